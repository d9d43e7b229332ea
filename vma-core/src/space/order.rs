//! The lock order: see `docs/design.md`. Debug builds enforce it.

use vma_rcu::lock_order::Level;

/// A space's lock; of two spaces the lower address first.
pub(super) const MMAP: Level = Level::new(20, "a space's mmap lock");
/// The lock of one mapping, which is had without waiting or not at all. What may wait comes before it.
pub(super) const VMA: Level = Level::new(40, "a mapping's lock");
