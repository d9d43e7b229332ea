//! The lock order: see `docs/design.md`. Debug builds enforce it.

use vma_rcu::lock_order::Level;

/// A system's dup semaphore, either side. Of it and a space's lock a thread sleeps on one, and has the other without waiting
/// or not at all.
pub(crate) const DUP: Level = Level::new(10, "the dup semaphore").apart_from(MMAP);
/// The same in the order that Linux had: to compare with.
pub(crate) const NESTED_DUP: Level = Level::new(10, "the dup semaphore in nested order");
/// A space's lock; of two spaces the lower address first.
pub(crate) const MMAP: Level = Level::new(20, "a space's mmap lock");
/// The lock of one mapping, which is had without waiting or not at all. What may wait comes before it.
pub(super) const VMA: Level = Level::new(40, "a mapping's lock");
/// Writers of a system's registry. Nothing is waited for under it.
pub(crate) const REGISTRY: Level = Level::new(90, "a system's registry");
