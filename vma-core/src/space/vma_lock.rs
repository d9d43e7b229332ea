//! Locks on single mappings (Linux: per-VMA locks, `mm/mmap_lock.c`).

use vma_rcu::lock_order::Held;
use vma_rcu::reclaim::{Guard, Reader};
use vma_rcu::tree::{Busy, Locked};
use vma_rcu::wait::{GaveUp, Wait};

use super::{AddressSpace, VmaRef, order};
use crate::backend::Backend;
use crate::vma::Vma;

/// A mapping that stays, as it is, for as long as this lives. It needs no guard.
///
/// A call that would replace it (change, cut, join it with a neighbour, unmap it) waits. Don't make such a call, or ask
/// for a space's lock, in a thread that holds one: debug builds panic at that.
#[derive(Debug)]
#[must_use = "the mapping is let go of when this is dropped"]
pub struct VmaLock<'s> {
    locked: Locked<'s, Vma>,
    _held: Held,
}

impl VmaLock<'_> {
    fn new(locked: Locked<'_, Vma>) -> VmaLock<'_> {
        let held = order::VMA.acquired(locked.start() as usize);
        VmaLock {
            locked,
            _held: held,
        }
    }

    /// The mapping.
    pub fn vma(&self) -> VmaRef<'_> {
        VmaRef::new(self.locked.start(), self.locked.end(), self.locked.value())
    }
}

impl<B: Backend> AddressSpace<B> {
    /// Locks the mapping that holds `addr`; `None` when there is none. Never waits, allocates nothing, and touches nothing
    /// shared but the mapping's own lock word.
    ///
    /// # Errors
    /// [`Busy`]: a call is replacing the mapping. Look again, or use [`read`](Self::read), as
    /// [`lock_vma_with`](Self::lock_vma_with) does.
    ///
    /// Source: `lock_vma_under_rcu()`.
    pub fn lock_vma(&self, addr: u64, guard: &Guard<'_>) -> Result<Option<VmaLock<'_>>, Busy> {
        Ok(self.core.tree.lock(addr, guard)?.map(VmaLock::new))
    }

    /// The same, but where it's busy it waits for the calls under way, as `wait` says.
    ///
    /// # Errors
    /// [`GaveUp`]: `EINTR` for a system call.
    pub fn lock_vma_with(
        &self,
        addr: u64,
        reader: &Reader,
        wait: Wait<'_>,
    ) -> Result<Option<VmaLock<'_>>, GaveUp> {
        loop {
            if let Ok(locked) = self.lock_vma(addr, &reader.pin()) {
                return Ok(locked);
            }
            let layout = self.read_with(wait)?;
            // No call is under way: only an absurd number of readers can be in the way still.
            if let Ok(locked) = self.core.tree.lock_under(addr, &layout.inner().writer) {
                drop(layout);
                return Ok(locked.map(VmaLock::new));
            }
        }
    }
}
