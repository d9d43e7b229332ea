//! msync(2) and mincore(2).

use std::sync::Arc;

use super::{AddressSpace, ReadGuard};
use crate::addr::{Pages, VmRange};
use crate::backend::Backend;
use crate::error::Errno;
use crate::file::{FileIoError, OpenFile};
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
    /// A file of the range couldn't be synced. What comes after it wasn't.
    #[error("the file mapped at {addr:#x}: {error}")]
    File {
        /// Where in the range its part begins.
        addr: u64,
        /// What failed.
        error: FileIoError,
    },
}

impl SyncError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            SyncError::BadFlags(_) | SyncError::Unaligned(_) => Errno::EINVAL,
            SyncError::Wraps { .. } | SyncError::Unmapped(_) => Errno::ENOMEM,
            SyncError::Locked(_) => Errno::EBUSY,
            SyncError::File { error, .. } => error.errno(),
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

/// A range that msync(2) has come to some place of.
struct Sync {
    flags: SyncFlags,
    at: u64,
    end: u64,
    hole: Option<u64>,
}

/// What comes next.
enum Step {
    /// A part of a file, as offset and length in bytes.
    File {
        file: Arc<OpenFile>,
        addr: u64,
        offset: u64,
        len: u64,
    },
    Done(Result<(), SyncError>),
}

impl Sync {
    /// `None`: there is nothing to do.
    fn parse(
        pages: Pages,
        addr: u64,
        len: u64,
        flags: SyncFlags,
    ) -> Result<Option<Self>, SyncError> {
        let both = SyncFlags::ASYNC | SyncFlags::SYNC;
        if !(both | SyncFlags::INVALIDATE).contains(flags) {
            return Err(SyncError::BadFlags(flags.bits()));
        }
        if !pages.is_aligned(addr) {
            return Err(SyncError::Unaligned(addr));
        }
        if flags.contains(both) {
            return Err(SyncError::BadFlags(flags.bits()));
        }
        let end = addr
            .checked_add(pages.ceil_wrapping(len))
            .ok_or(SyncError::Wraps { addr, len })?;
        Ok((end != addr).then_some(Sync {
            flags,
            at: addr,
            end,
            hole: None,
        }))
    }

    /// Syncs file by file, with what `step` finds next.
    fn run(mut self, mut step: impl FnMut(&mut Self) -> Step) -> Result<(), SyncError> {
        loop {
            match step(&mut self) {
                Step::Done(result) => return result,
                Step::File {
                    file,
                    addr,
                    offset,
                    len,
                } => {
                    let synced = file.sync_range(offset, len);
                    synced.map_err(|error| SyncError::File { addr, error })?;
                }
            }
            if self.is_over() {
                return self.result();
            }
        }
    }

    fn is_over(&self) -> bool {
        self.at >= self.end
    }

    fn result(&self) -> Result<(), SyncError> {
        self.hole.map_or(Ok(()), |at| Err(SyncError::Unmapped(at)))
    }

    /// Up to the next file.
    fn step<B: Backend>(&mut self, layout: &ReadGuard<'_, B>, pages: Pages) -> Step {
        loop {
            let Some(vma) = layout.find_next(self.at) else {
                return Step::Done(Err(SyncError::Unmapped(self.at)));
            };
            if vma.start() > self.at {
                let hole = *self.hole.get_or_insert(self.at);
                if vma.start() >= self.end || self.flags == SyncFlags::ASYNC {
                    return Step::Done(Err(SyncError::Unmapped(hole)));
                }
                self.at = vma.start();
            }
            if self.flags.contains(SyncFlags::INVALIDATE) && vma.flags().contains(VmaFlags::LOCKED)
            {
                return Step::Done(Err(SyncError::Locked(vma.range())));
            }
            let addr = self.at;
            self.at = vma.end();
            let is_shared = vma.flags().contains(VmaFlags::SHARED);
            if self.flags.contains(SyncFlags::SYNC)
                && is_shared
                && let Some(file) = vma.vma().file()
            {
                let first = pages.bytes(vma.vma().pgoff());
                return Step::File {
                    file: Arc::clone(file),
                    addr,
                    offset: first.wrapping_add(addr - vma.start()),
                    len: vma.end().min(self.end) - addr,
                };
            }
            if self.is_over() {
                return Step::Done(self.result());
            }
        }
    }
}

impl<B: Backend> ReadGuard<'_, B> {
    /// As [`AddressSpace::msync`], while the guard is held: files are written to meanwhile.
    ///
    /// # Errors
    /// As there.
    pub fn msync(&self, addr: u64, len: u64, flags: SyncFlags) -> Result<(), SyncError> {
        let pages = self.space.config.load().pages();
        let Some(sync) = Sync::parse(pages, addr, len, flags)? else {
            return Ok(());
        };
        sync.run(|sync| sync.step(self, pages))
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
    /// msync(2): with `SYNC`, files behind shared mappings of the range write back their part of it and make it permanent, with no lock of
    /// the space's held; the layout may change meanwhile. `ASYNC` and `INVALIDATE` do nothing, as in Linux: dirty pages stay marked, and
    /// shared mappings show the page cache anyway. `addr` is page-aligned, `len` in bytes is rounded up.
    ///
    /// # Errors
    /// `EINVAL` unaligned, unknown flags, `ASYNC` and `SYNC` together; `ENOMEM` a hole (the rest was synced) or wrapping; `EBUSY`
    /// `INVALIDATE` on a locked mapping; what a file fails with ([`OpenFile::sync_range`]).
    ///
    /// Source: `msync` in mm/msync.c.
    pub fn msync(&self, addr: u64, len: u64, flags: SyncFlags) -> Result<(), SyncError> {
        let pages = self.config.load().pages();
        let Some(sync) = Sync::parse(pages, addr, len, flags)? else {
            return Ok(());
        };
        // The lock is let go of after each step.
        sync.run(|sync| sync.step(&self.read(), pages))
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
