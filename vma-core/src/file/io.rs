//! Reading, writing, truncating and punching holes: the calls that start from a file.
//!
//! # Truncation and faults
//!
//! ```text
//! truncate, punch                          fault
//! ---------------                          -----
//! length := new                            length, page from the cache
//! pages marked as leaving                  leaf's lock
//! for each space: under each leaf's lock     is the page marked? then look again
//!   take the entries out                     put the entry in
//! pages out of the cache
//! ```

use std::ops::Range;

use super::cache::FilePage;
use super::{FileKind, FileObject, FileSizeError, OpenFile, Seals};
use crate::backend::paged::{Frame, PAGE};
use crate::error::Errno;

/// Why a call on a descriptor failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FileIoError {
    /// Not opened for it.
    #[error("the file is opened {mode:?}")]
    Mode {
        /// How it was opened.
        mode: super::AccessMode,
        /// `EBADF`, or `EINVAL` for ftruncate(2).
        errno: Errno,
    },
    /// An offset or a length above 2^63 - 1, or no length.
    #[error("{len:#x} bytes at offset {offset:#x}")]
    BadRange {
        /// Offset in bytes.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Beyond the largest file.
    #[error("the file can't grow to {0:#x} bytes")]
    TooLarge(u64),
    /// Its seals forbid it.
    #[error("the file's seals {0:?} forbid it")]
    Sealed(Seals),
    /// Its seals forbid this length.
    #[error(transparent)]
    Size(#[from] FileSizeError),
    /// No memory for its pages. What lies before was written.
    #[error("no memory for the page at offset {0:#x}")]
    OutOfMemory(u64),
}

impl FileIoError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            FileIoError::Mode { errno, .. } => errno,
            FileIoError::BadRange { .. } => Errno::EINVAL,
            FileIoError::TooLarge(_) => Errno::EFBIG,
            FileIoError::Sealed(_) => Errno::EPERM,
            FileIoError::Size(error) => error.errno(),
            FileIoError::OutOfMemory(_) => Errno::ENOMEM,
        }
    }
}

const MAX: u64 = i64::MAX as u64;
const NO_WRITING: Seals = Seals::WRITE.union(Seals::FUTURE_WRITE);

/// A range of bytes by pages: offset in pages, and bytes of that page.
fn by_page(offset: u64, end: u64) -> impl Iterator<Item = (u64, Range<usize>)> {
    let page = PAGE as u64;
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let start = at % page;
        let stop = (start + (end - at)).min(page);
        let item = (at / page, start as usize..stop as usize);
        at += stop - start;
        Some(item)
    })
}

impl FileObject {
    /// Copies bytes out; how many there were before the end. Pages without a frame read as zeros.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> usize {
        let end = offset.saturating_add(into.len() as u64).min(self.len());
        let mut done = 0;
        for (pgoff, range) in by_page(offset, end) {
            let part = &mut into[done..done + range.len()];
            match self.pages().get(pgoff) {
                Some(frame) => frame.bytes().read(range.start, part),
                None => part.fill(0),
            }
            done += range.len();
        }
        done
    }

    /// Copies bytes in; the file grows if it has to.
    ///
    /// # Errors
    /// `EFBIG`; `EPERM` when sealed against growing; `ENOMEM`.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), FileIoError> {
        self.write_if(offset, from, |_| Ok(()))
    }

    /// The same, if the seals that it has then allow it.
    fn write_if(
        &self,
        offset: u64,
        from: &[u8],
        allow: impl FnOnce(Seals) -> Result<(), FileIoError>,
    ) -> Result<(), FileIoError> {
        let end = offset
            .checked_add(from.len() as u64)
            .filter(|end| *end <= MAX);
        let end = end.ok_or(FileIoError::TooLarge(u64::MAX))?;
        // Length, seals and holes stay as they are meanwhile.
        let _order = self.resizing();
        allow(self.current_seals())?;
        if end > self.len() && !from.is_empty() {
            self.resize(end)?;
        }
        let mut done = 0;
        for (pgoff, range) in by_page(offset, end) {
            let part = &from[done..done + range.len()];
            match self.pages().get_or_make(self, pgoff) {
                FilePage::Frame(frame) => frame.bytes().write(range.start, part),
                FilePage::OutOfMemory => {
                    return Err(FileIoError::OutOfMemory(pgoff * PAGE as u64));
                }
                FilePage::Busy | FilePage::BeyondEnd => {
                    unreachable!("pages leave under the lock that is held")
                }
            }
            done += range.len();
        }
        Ok(())
    }

    /// Frees the pages of a range and zeroes what of others lies in it; the length stays
    /// (`FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE`). No mapping shows the old content afterwards, but private copies.
    ///
    /// # Errors
    /// `EPERM` when sealed against writing.
    pub fn punch_hole(&self, offset: u64, len: u64) -> Result<(), FileIoError> {
        let _order = self.resizing();
        let seals = self.current_seals();
        if seals.intersects(NO_WRITING) {
            return Err(FileIoError::Sealed(seals));
        }
        let page = PAGE as u64;
        let end = offset.saturating_add(len);
        // What goes as a whole; of the rest bytes become 0.
        let unit = self.huge_unit();
        let whole = offset.div_ceil(page * unit) * unit..end / (page * unit) * unit;
        if whole.start < whole.end {
            self.remove_pages(whole.clone(), false);
        }
        // What lies in pages of which only a part goes, at either end.
        let end = end.min(self.len());
        let (head, tail) = if whole.start < whole.end {
            (whole.start * page, whole.end * page)
        } else {
            (end, end)
        };
        for (pgoff, range) in by_page(offset, head.min(end)).chain(by_page(tail, end)) {
            if let Some(frame) = self.pages().get(pgoff) {
                frame.bytes().fill(range.start, range.len(), 0);
            }
        }
        Ok(())
    }

    /// Pages beyond a new, smaller length go; the rest of the last one is zeroed.
    pub(super) fn cut_pages(&self, len: u64) {
        let page = PAGE as u64;
        let unit = self.huge_unit();
        self.remove_pages(len.div_ceil(page * unit) * unit..u64::MAX, true);
        let tail = (len % page) as usize;
        if tail > 0
            && let Some(frame) = self.pages().get(len / page)
        {
            frame.bytes().fill(tail, PAGE - tail, 0);
        }
    }

    /// Pages that only go together.
    fn huge_unit(&self) -> u64 {
        self.huge().map_or(1, |huge| huge.page_size() / PAGE as u64)
    }

    fn remove_pages(&self, range: Range<u64>, copies: bool) {
        let leaving = self.pages().begin_removal(range.clone());
        self.unmap_pages(range, copies);
        drop(leaving);
    }

    /// There is no huge page for a parent's copy: children let go of the page that it shares with them. Source:
    /// `unmap_ref_private()`.
    pub(crate) fn rob_heirs(&self, pages: Range<u64>, frame: &Frame) {
        self.for_each_mapping(&pages, |space, part| space.rob_heirs(self, part, frame));
    }

    /// Takes pages out of all mappings.
    fn unmap_pages(&self, range: Range<u64>, copies: bool) {
        self.for_each_mapping(&range, |space, part| space.unmap_pages(self, part, copies));
    }

    /// Pages that have a frame.
    pub fn resident_pages(&self) -> usize {
        self.pages().len()
    }
}

/// Checks of the arguments alone.
fn check(offset: u64, len: u64) -> Result<(), FileIoError> {
    if offset > MAX || len > MAX {
        return Err(FileIoError::BadRange { offset, len });
    }
    Ok(())
}

impl OpenFile {
    fn check_writable(&self, errno: Errno) -> Result<(), FileIoError> {
        if self.is_writable() {
            Ok(())
        } else {
            let mode = self.mode();
            Err(FileIoError::Mode { mode, errno })
        }
    }

    /// pread(2): how many bytes there were before the end.
    ///
    /// # Errors
    /// `EBADF` not opened for reading; `EINVAL` an offset above 2^63 - 1.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<usize, FileIoError> {
        check(offset, 0)?;
        if !self.is_readable() {
            return Err(FileIoError::Mode {
                mode: self.mode(),
                errno: Errno::EBADF,
            });
        }
        Ok(self.object().read_at(offset, into))
    }

    /// pwrite(2); the file grows if it has to.
    ///
    /// # Errors
    /// `EBADF` not opened for writing; `EINVAL` an offset above 2^63 - 1; `EPERM` sealed; `EFBIG`; `ENOMEM`.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), FileIoError> {
        check(offset, 0)?;
        self.check_writable(Errno::EBADF)?;
        self.object().write_if(offset, from, |seals| {
            if seals.intersects(NO_WRITING) {
                Err(FileIoError::Sealed(seals))
            } else {
                Ok(())
            }
        })
    }

    /// ftruncate(2).
    ///
    /// # Errors
    /// `EINVAL` not opened for writing, or a length above 2^63 - 1; `EPERM` sealed.
    pub fn truncate(&self, len: u64) -> Result<(), FileIoError> {
        check(0, len)?;
        self.check_writable(Errno::EINVAL)?;
        Ok(self.object().set_len(len)?)
    }

    /// fallocate(2) with `FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE`.
    ///
    /// # Errors
    /// `EINVAL` no length, or a number above 2^63 - 1; `EBADF` not opened for writing; `EPERM` sealed; `EOPNOTSUPP` a device.
    pub fn punch_hole(&self, offset: u64, len: u64) -> Result<(), FileIoError> {
        check(offset, len)?;
        if len == 0 {
            return Err(FileIoError::BadRange { offset, len });
        }
        self.check_writable(Errno::EBADF)?;
        if self.object().kind() == FileKind::Device {
            let (mode, errno) = (self.mode(), Errno::EOPNOTSUPP);
            return Err(FileIoError::Mode { mode, errno });
        }
        self.object().punch_hole(offset, len)
    }
}
