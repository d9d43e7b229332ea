//! mlock(2), mlock2(2), munlock(2), mlockall(2), munlockall(2).

use super::draft::Draft;
use super::{AddressSpace, WriteGuard};
use crate::accounting::check_lock_pages;
use crate::backend::Backend;
use crate::error::{Errno, LimitError, PublishError, SplitError};
use crate::flags::{LockAllFlags, LockFlags, VmaFlags};
use crate::limits::SpaceConfig;

/// Why memory couldn't be locked or unlocked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// Unknown flags, or none.
    #[error("flags {0:#x} aren't valid")]
    BadFlags(u64),
    /// Locking isn't allowed at all.
    #[error("memory can't be locked: RLIMIT_MEMLOCK is 0")]
    Forbidden,
    /// Wraps around.
    #[error("{len:#x} bytes at {addr:#x} wrap around")]
    Wraps {
        /// Start.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// Nothing mapped here; what lies before was changed.
    #[error("nothing is mapped at {0:#x}")]
    Unmapped(u64),
    /// Too much.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// A mapping couldn't be split.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// Everything is marked locked, but the pages at this address can't be had.
    #[error("the pages at {0:#x} can't be made present")]
    NotPresent(u64),
    /// No memory for records; nothing was changed.
    #[error(transparent)]
    Publish(#[from] PublishError),
}

impl LockError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            LockError::BadFlags(_) | LockError::Wraps { .. } => Errno::EINVAL,
            LockError::Forbidden => Errno::EPERM,
            LockError::Unmapped(_) | LockError::NotPresent(_) => Errno::ENOMEM,
            LockError::Limit(error) => error.errno(),
            LockError::Split(error) => error.errno(),
            LockError::Publish(error) => error.errno(),
        }
    }
}

/// Start rounded down, length up to cover the end; both as Linux computes them, wrapping included.
fn widen(config: &SpaceConfig, addr: u64, len: u64) -> (u64, u64) {
    let pages = config.pages();
    let len = pages.ceil_wrapping(len.wrapping_add(addr & pages.mask()));
    (pages.floor(addr), len)
}

/// Locked pages inside a range.
fn locked_in(draft: &Draft<'_>, start: u64, len: u64) -> u64 {
    let end = start.saturating_add(len);
    let mut bytes = 0;
    let mut at = start;
    while let Some(vma) = draft.first_in(at, end) {
        if vma.flags().contains(VmaFlags::LOCKED) {
            bytes += vma.end.min(end) - vma.start.max(start);
        }
        at = vma.end;
    }
    draft.pages.count(bytes)
}

/// Mappings that can't be locked: marking them is a no-op that succeeds.
fn is_exempt(flags: VmaFlags) -> bool {
    flags.intersects(VmaFlags::SPECIAL | VmaFlags::HUGETLB | VmaFlags::DROPPABLE)
}

/// Gives part of one mapping other lock bits. Returns the end of the mapping it belongs to then. Source: `mlock_fixup()`.
fn mark(draft: &mut Draft<'_>, start: u64, end: u64, bits: VmaFlags) -> Result<u64, SplitError> {
    let Some(vma) = draft.find(start) else {
        return Ok(end);
    };
    let old = vma.flags();
    let new = (old - VmaFlags::LOCK_BITS) | bits;
    if new == old || is_exempt(old) {
        return Ok(end);
    }
    let extras = vma.vma.extras().cloned();
    draft.modify(start, end, new, extras.as_ref())
}

/// Mapping by mapping; on an error the ones before stay changed. Source: `apply_vma_lock_flags()`.
fn apply(draft: &mut Draft<'_>, addr: u64, len: u64, bits: VmaFlags) -> Result<(), LockError> {
    let end = addr
        .checked_add(len)
        .ok_or(LockError::Wraps { addr, len })?;
    let mut at = addr;
    while at < end {
        let vma = draft.find(at).ok_or(LockError::Unmapped(at))?;
        let to = vma.end.min(end);
        at = mark(draft, at, to, bits)?.max(to);
    }
    Ok(())
}

impl<B: Backend> WriteGuard<'_, B> {
    /// As [`AddressSpace::mlock`].
    ///
    /// # Errors
    /// As there.
    pub fn mlock(&mut self, addr: u64, len: u64) -> Result<(), LockError> {
        self.mlock2(addr, len, LockFlags::empty())
    }

    /// As [`AddressSpace::mlock2`].
    ///
    /// # Errors
    /// As there.
    pub fn mlock2(&mut self, addr: u64, len: u64, flags: LockFlags) -> Result<(), LockError> {
        let (start, end) = self.lock_range(addr, len, flags)?;
        let populated = self.populate_checked(start, end);
        populated.map_err(LockError::NotPresent)
    }

    /// What is to be populated.
    fn lock_range(
        &mut self,
        addr: u64,
        len: u64,
        flags: LockFlags,
    ) -> Result<(u64, u64), LockError> {
        if !LockFlags::ONFAULT.contains(flags) {
            return Err(LockError::BadFlags(flags.bits()));
        }
        let bits = if flags.contains(LockFlags::ONFAULT) {
            VmaFlags::LOCK_BITS
        } else {
            VmaFlags::LOCKED
        };
        let config = self.config();
        if !config.may_lock() {
            return Err(LockError::Forbidden);
        }
        let (start, len) = widen(config, addr, len);
        let mut changes = self.changes();
        let mut draft = self.draft(config, &mut changes);
        let wanted = draft.pages.count(len);
        let used = draft.totals().locked_vm();
        if check_lock_pages(used, config, wanted).is_err() {
            // What is locked already isn't counted twice.
            let again = locked_in(&draft, start, len);
            check_lock_pages(used, config, wanted.saturating_sub(again))?;
        }
        let result = apply(&mut draft, start, len, bits);
        self.commit(&mut changes)?;
        result?;
        Ok((start, start.saturating_add(len)))
    }

    /// As [`AddressSpace::munlock`].
    ///
    /// # Errors
    /// As there.
    pub fn munlock(&mut self, addr: u64, len: u64) -> Result<(), LockError> {
        let config = self.config();
        let (start, len) = widen(config, addr, len);
        let mut changes = self.changes();
        let mut draft = self.draft(config, &mut changes);
        let result = apply(&mut draft, start, len, VmaFlags::empty());
        self.commit(&mut changes)?;
        result
    }

    /// As [`AddressSpace::mlockall`].
    ///
    /// # Errors
    /// As there.
    pub fn mlockall(&mut self, flags: LockAllFlags) -> Result<(), LockError> {
        let known = LockAllFlags::CURRENT | LockAllFlags::FUTURE | LockAllFlags::ONFAULT;
        if flags.is_empty() || !known.contains(flags) || flags == LockAllFlags::ONFAULT {
            return Err(LockError::BadFlags(flags.bits()));
        }
        let config = self.config();
        if !config.may_lock() {
            return Err(LockError::Forbidden);
        }
        let current = flags.contains(LockAllFlags::CURRENT);
        if current {
            check_lock_pages(0, config, self.totals().total)?;
        }
        let bits = if flags.contains(LockAllFlags::ONFAULT) {
            VmaFlags::LOCK_BITS
        } else {
            VmaFlags::LOCKED
        };
        self.lock_all(
            flags.contains(LockAllFlags::FUTURE).then_some(bits),
            current.then_some(bits),
        )?;
        if current {
            self.populate(0, self.config().task_size);
        }
        Ok(())
    }

    /// As [`AddressSpace::munlockall`].
    ///
    /// # Errors
    /// As there.
    pub fn munlockall(&mut self) -> Result<(), LockError> {
        self.lock_all(None, Some(VmaFlags::empty()))
    }

    /// Sets the default for new mappings and, if asked, the bits of all present ones. Source: `apply_mlockall_flags()`.
    fn lock_all(
        &mut self,
        future: Option<VmaFlags>,
        current: Option<VmaFlags>,
    ) -> Result<(), LockError> {
        if let Some(bits) = current {
            let mut changes = self.changes();
            let mut draft = self.draft(self.config(), &mut changes);
            let mut at = 0;
            while let Some(vma) = draft.next(at) {
                let (start, end) = (vma.start, vma.end);
                // One that can't be marked is passed over.
                at = mark(&mut draft, start, end, bits).unwrap_or(end).max(end);
            }
            self.commit(&mut changes)?;
        }
        let inner = self.inner_mut();
        inner.default_flags =
            (inner.default_flags - VmaFlags::LOCK_BITS) | future.unwrap_or_default();
        Ok(())
    }
}

impl<B: Backend> AddressSpace<B> {
    /// Locks a range (mlock(2)). The start is rounded down, the end up.
    ///
    /// # Errors
    /// | errno | when |
    /// |---|---|
    /// | `EPERM` | `RLIMIT_MEMLOCK` is 0 |
    /// | `ENOMEM` | the limit; something isn't mapped (what lies before is locked); pages can't be made present |
    /// | `EINVAL` | wraps around |
    ///
    /// Source: `do_mlock()` in mm/mlock.c.
    pub fn mlock(&self, addr: u64, len: u64) -> Result<(), LockError> {
        self.mlock2(addr, len, LockFlags::empty())
    }

    /// Locks a range, with `ONFAULT` page by page as they are touched (mlock2(2)).
    ///
    /// # Errors
    /// As [`mlock`](Self::mlock), and `EINVAL` for unknown flags.
    pub fn mlock2(&self, addr: u64, len: u64, flags: LockFlags) -> Result<(), LockError> {
        let (start, end) = self.write().lock_range(addr, len, flags)?;
        let populated = self.populate(start, end, false);
        populated.map_err(LockError::NotPresent)
    }

    /// Unlocks a range (munlock(2)).
    ///
    /// # Errors
    /// `ENOMEM` something isn't mapped (what lies before is unlocked), or a limit on splitting; `EINVAL` wraps around.
    pub fn munlock(&self, addr: u64, len: u64) -> Result<(), LockError> {
        self.write_once().munlock(addr, len)
    }

    /// Locks everything mapped, or everything that is going to be (mlockall(2)).
    ///
    /// # Errors
    /// `EINVAL` unknown, no or incomplete flags; `EPERM` `RLIMIT_MEMLOCK` is 0; `ENOMEM` the limit.
    ///
    /// Source: `mlockall` in mm/mlock.c.
    pub fn mlockall(&self, flags: LockAllFlags) -> Result<(), LockError> {
        self.write_once().mlockall(flags)
    }

    /// Unlocks everything, now and for the future (munlockall(2)).
    ///
    /// # Errors
    /// `ENOMEM`, no memory for records.
    pub fn munlockall(&self) -> Result<(), LockError> {
        self.write_once().munlockall()
    }
}
