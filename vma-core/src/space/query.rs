//! msync(2) and mincore(2), as far as their results depend on the layout.

use super::{AddressSpace, ReadGuard};
use crate::addr::VmRange;
use crate::backend::Backend;
use crate::error::Errno;
use crate::flags::{SyncFlags, VmaFlags};

/// Why msync(2) failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SyncError {
    /// Unknown flags, or both ways at once.
    #[error("flags {0:#x} aren't valid")]
    BadFlags(u64),
    /// The start isn't page-aligned.
    #[error("address {0:#x} isn't page-aligned")]
    Unaligned(u64),
    /// Wraps around.
    #[error("{len:#x} bytes at {addr:#x} wrap around")]
    Wraps {
        /// Start.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// A hole; the rest was synced.
    #[error("nothing is mapped at {0:#x}")]
    Unmapped(u64),
    /// `MS_INVALIDATE` on a locked mapping.
    #[error("{0} is locked")]
    Locked(VmRange),
}

impl SyncError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            SyncError::BadFlags(_) | SyncError::Unaligned(_) => Errno::EINVAL,
            SyncError::Wraps { .. } | SyncError::Unmapped(_) => Errno::ENOMEM,
            SyncError::Locked(_) => Errno::EBUSY,
        }
    }
}

/// Why mincore(2) failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CoreError {
    /// The start isn't page-aligned.
    #[error("address {0:#x} isn't page-aligned")]
    Unaligned(u64),
    /// Ends beyond the address space.
    #[error("{len:#x} bytes at {addr:#x} end beyond the address space")]
    BeyondLimit {
        /// Start.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// A hole.
    #[error("nothing is mapped at {0:#x}")]
    Unmapped(u64),
    /// No room for the rest of the answer.
    #[error("{found} bytes were given, and there are more pages")]
    ShortVector {
        /// Bytes given, all of which tell of a page now.
        found: u64,
    },
}

impl CoreError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            CoreError::Unaligned(_) => Errno::EINVAL,
            CoreError::BeyondLimit { .. } | CoreError::Unmapped(_) => Errno::ENOMEM,
            CoreError::ShortVector { .. } => Errno::EFAULT,
        }
    }
}

impl<B: Backend> ReadGuard<'_, B> {
    /// As [`AddressSpace::msync`].
    ///
    /// # Errors
    /// As there.
    pub fn msync(&self, addr: u64, len: u64, flags: SyncFlags) -> Result<(), SyncError> {
        let both = SyncFlags::ASYNC | SyncFlags::SYNC;
        if !(both | SyncFlags::INVALIDATE).contains(flags) {
            return Err(SyncError::BadFlags(flags.bits()));
        }
        let pages = self.space.config.load().pages();
        if !pages.is_aligned(addr) {
            return Err(SyncError::Unaligned(addr));
        }
        if flags.contains(both) {
            return Err(SyncError::BadFlags(flags.bits()));
        }
        let end = addr
            .checked_add(pages.ceil_wrapping(len))
            .ok_or(SyncError::Wraps { addr, len })?;
        if end == addr {
            return Ok(());
        }
        let mut hole = None;
        let mut at = addr;
        loop {
            let Some(vma) = self.find_next(at) else {
                return Err(SyncError::Unmapped(at));
            };
            if vma.start() > at {
                hole = hole.or(Some(at));
                if vma.start() >= end || flags == SyncFlags::ASYNC {
                    return Err(SyncError::Unmapped(at));
                }
            }
            if flags.contains(SyncFlags::INVALIDATE) && vma.flags().contains(VmaFlags::LOCKED) {
                return Err(SyncError::Locked(vma.range()));
            }
            at = vma.end();
            if at >= end {
                return hole.map_or(Ok(()), |at| Err(SyncError::Unmapped(at)));
            }
        }
    }

    /// As [`AddressSpace::mincore`].
    ///
    /// # Errors
    /// As there.
    pub fn mincore(&self, addr: u64, len: u64, resident: &mut [u8]) -> Result<(), CoreError> {
        let config = self.space.config.load();
        if !config.pages().is_aligned(addr) {
            return Err(CoreError::Unaligned(addr));
        }
        let end = addr
            .checked_add(len)
            .filter(|end| *end <= config.task_size)
            .ok_or(CoreError::BeyondLimit { addr, len })?;
        let pages = config.pages();
        let mut at = addr;
        while at < end {
            let vma = self.find(at).ok_or(CoreError::Unmapped(at))?;
            let to = pages.ceil_wrapping(vma.end().min(end));
            let (first, last) = (pages.count(at - addr), pages.count(to - addr));
            let room = resident.len() as u64;
            let part = first.min(room) as usize..last.min(room) as usize;
            if B::ACTIVE {
                let first = pages.count(at - vma.start());
                for (told, page) in resident[part].iter_mut().zip(first..) {
                    let pgoff = vma.vma().pgoff().wrapping_add(page);
                    let is_there = self.space.core.backend.is_resident(at, vma.vma(), pgoff);
                    *told = is_there.into();
                    at += pages.bytes(1);
                }
            } else {
                resident[part].fill(0);
            }
            if last > room {
                return Err(CoreError::ShortVector { found: room });
            }
            at = to;
        }
        Ok(())
    }
}

impl<B: Backend> AddressSpace<B> {
    /// Whether msync(2) of the range succeeds. `addr` is page-aligned, `len` in bytes is rounded up.
    ///
    /// # Errors
    /// `EINVAL` unaligned, unknown flags, `ASYNC` and `SYNC` together; `ENOMEM` a hole or wrapping; `EBUSY`
    /// `INVALIDATE` on a locked mapping.
    ///
    /// Source: `msync` in mm/msync.c.
    pub fn msync(&self, addr: u64, len: u64, flags: SyncFlags) -> Result<(), SyncError> {
        self.read().msync(addr, len, flags)
    }

    /// Which pages of the range are present (mincore(2)), a byte each, 1 or 0: of a file those that its page cache has. Without a
    /// backend none is. At a hole those before it are told.
    ///
    /// # Errors
    /// `EINVAL` unaligned; `ENOMEM` a hole, or beyond the address space; `EFAULT` `resident` has fewer bytes than there are pages.
    ///
    /// Source: `mincore` in mm/mincore.c.
    pub fn mincore(&self, addr: u64, len: u64, resident: &mut [u8]) -> Result<(), CoreError> {
        self.read().mincore(addr, len, resident)
    }
}
