//! munmap(2).

use super::draft::Draft;
use super::{AddressSpace, WriteGuard, notify};
use crate::accounting::{check_split, is_accountable};
use crate::addr::VmRange;
use crate::backend::Backend;
use crate::error::{Errno, PublishError, SplitError};
use crate::events::InvalidationReason;
use crate::flags::VmaFlags;
use crate::limits::SpaceConfig;

/// Why a range couldn't be unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnmapError {
    /// Unaligned start, no length, or beyond the address space.
    #[error("munmap of {len:#x} bytes at {addr:#x}: unaligned, empty or beyond the address space")]
    BadRange {
        /// Start as given.
        addr: u64,
        /// Length as given.
        len: u64,
    },
    /// A sealed mapping lies in the range.
    #[error("{0} is sealed")]
    Sealed(VmRange),
    /// A mapping at an edge couldn't be split.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// No memory for records.
    #[error(transparent)]
    Publish(#[from] PublishError),
}

impl UnmapError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            UnmapError::BadRange { .. } => Errno::EINVAL,
            UnmapError::Sealed(_) => Errno::EPERM,
            UnmapError::Split(error) => error.errno(),
            UnmapError::Publish(error) => error.errno(),
        }
    }
}

/// What lies in a range that is about to be unmapped.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Gathered {
    /// Pages mapped in it.
    pub(super) pages: u64,
    /// Of these, charged.
    pub(super) accounted: u64,
}

/// Splits at both edges and looks whether everything between may go. Source: `vms_gather_munmap_vmas()`.
///
/// On an error the splits made so far stay in the draft, as they do in Linux.
pub(super) fn gather(draft: &mut Draft<'_>, range: VmRange) -> Result<Gathered, UnmapError> {
    let Some(first) = draft.first_in(range.start, range.end) else {
        return Ok(Gathered::default());
    };
    let (mut vma, mut flags) = (first.range(), first.flags());
    if range.start > vma.start {
        if range.end < vma.end {
            // The call may free memory, so that one mapping above the limit is let pass, but no hole punch.
            check_split(draft.totals(), draft.config).map_err(SplitError::from)?;
        }
        if flags.contains(VmaFlags::SEALED) {
            return Err(UnmapError::Sealed(vma));
        }
        draft.split(range.start)?;
        vma.start = range.start;
    }
    let mut gathered = Gathered::default();
    loop {
        if flags.contains(VmaFlags::SEALED) {
            return Err(UnmapError::Sealed(vma));
        }
        if vma.end > range.end {
            draft.split(range.end)?;
        }
        let end = vma.end.min(range.end);
        let count = draft.pages.count(end - vma.start);
        gathered.pages += count;
        if flags.contains(VmaFlags::ACCOUNT) {
            gathered.accounted += count;
        }
        let Some(next) = draft.first_in(end, range.end) else {
            return Ok(gathered);
        };
        (vma, flags) = (next.range(), next.flags());
    }
}

/// Gathers and removes.
#[inline]
pub(super) fn unmap_range(draft: &mut Draft<'_>, range: VmRange) -> Result<(), UnmapError> {
    gather(draft, range)?;
    draft.remove(range.start, range.end);
    Ok(())
}

/// The range of an unmap, or what is wrong with it. Source: `do_vmi_munmap()`.
pub(super) fn parse(config: &SpaceConfig, addr: u64, len: u64) -> Result<VmRange, UnmapError> {
    let pages = config.pages();
    let bad = UnmapError::BadRange { addr, len };
    if !pages.is_aligned(addr) || addr > config.task_size || len > config.task_size - addr {
        return Err(bad);
    }
    let end = addr.checked_add(pages.ceil_wrapping(len)).ok_or(bad)?;
    if end == addr {
        return Err(bad);
    }
    Ok(VmRange::new(addr, end))
}

/// Pages that a new mapping of these flags is charged with, in place of `gathered`.
pub(super) fn charge_of(flags: VmaFlags, pages: u64, gathered: Gathered) -> Option<u64> {
    is_accountable(flags).then(|| pages.saturating_sub(gathered.accounted))
}

impl<B: Backend> WriteGuard<'_, B> {
    /// As [`AddressSpace::unmap`].
    ///
    /// # Errors
    /// As there.
    pub fn unmap(&mut self, addr: u64, len: u64) -> Result<(), UnmapError> {
        let config = self.config();
        let range = parse(config, addr, len)?;
        let mut changes = self.changes();
        let mut draft = self.draft(config, &mut changes);
        let result = unmap_range(&mut draft, range);
        self.commit(&mut changes)?;
        result
    }
}

impl<B: Backend> AddressSpace<B> {
    /// Unmaps every page of a range; pages that aren't mapped are passed over (munmap(2)).
    ///
    /// `addr` is page-aligned, `len` in bytes is rounded up.
    ///
    /// # Errors
    /// | errno | when |
    /// |---|---|
    /// | `EINVAL` | unaligned start, length 0, beyond the address space; a special mapping can't be split |
    /// | `EPERM` | something in the range is sealed; nothing is unmapped, but a split at the start stays |
    /// | `ENOMEM` | a hole in the middle of one mapping at the limit of mappings |
    ///
    /// Source: `do_vmi_munmap()` in mm/vma.c.
    ///
    /// # Who waits
    /// The pages go when the lock is free again: others map, unmap and fault meanwhile, in the same place too. How long the lock
    /// is held doesn't depend on how many pages there are. When the call returns, nobody uses them any more (C3); of a call
    /// on a [`WriteGuard`] that's true when the guard is dropped.
    pub fn unmap(&self, addr: u64, len: u64) -> Result<(), UnmapError> {
        self.write_to_unmap(addr, len).unmap(addr, len)
    }

    fn write_to_unmap(&self, addr: u64, len: u64) -> WriteGuard<'_, B> {
        let ranges = || notify::named(addr, len, self.core.pages.size());
        self.write_to(ranges, InvalidationReason::Unmap)
    }

    /// The same as Linux does it: the pages go under the shared side of the lock, so that readers come in, and no writer.
    ///
    /// # Errors
    /// As [`unmap`](Self::unmap).
    ///
    /// Source: `vms_complete_munmap_vmas()` in mm/vma.c.
    pub fn unmap_downgraded(&self, addr: u64, len: u64) -> Result<(), UnmapError> {
        let mut guard = self.write_to_unmap(addr, len);
        let result = guard.unmap(addr, len);
        guard.downgrade().finish();
        result
    }

    /// The same with the lock held exclusively until the pages are gone.
    ///
    /// # Errors
    /// As [`unmap`](Self::unmap).
    pub fn unmap_exclusively(&self, addr: u64, len: u64) -> Result<(), UnmapError> {
        let mut guard = self.write_to_unmap(addr, len);
        let result = guard.unmap(addr, len);
        guard.finish();
        result
    }
}
