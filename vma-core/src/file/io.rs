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

use parking_lot::MutexGuard;
use smallvec::SmallVec;

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
    /// Its backend couldn't read a page.
    #[error("the page at offset {offset:#x} couldn't be read: {errno}")]
    ReadFailed {
        /// Offset in bytes.
        offset: u64,
        /// The backend's error.
        errno: Errno,
    },
    /// Its backend doesn't allow stores to a page.
    #[error("stores to the page at offset {offset:#x} aren't allowed: {errno}")]
    StoreRefused {
        /// Offset in bytes.
        offset: u64,
        /// The backend's error.
        errno: Errno,
    },
    /// Its backend couldn't change the length, or make a hole.
    #[error("length or holes couldn't be changed: {0}")]
    ChangeFailed(Errno),
    /// Its backend couldn't write back a page, in this call or since the last one.
    #[error("pages couldn't be written back: {0}")]
    WriteFailed(Errno),
    /// Its backend couldn't make permanent what was written.
    #[error("what was written couldn't be made permanent: {0}")]
    SyncFailed(Errno),
    /// There is nothing to be synced.
    #[error("such a file can't be synced")]
    CannotSync,
}

impl FileIoError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            FileIoError::BadRange { .. } | FileIoError::CannotSync => Errno::EINVAL,
            FileIoError::TooLarge(_) => Errno::EFBIG,
            FileIoError::Sealed(_) => Errno::EPERM,
            FileIoError::Size(error) => error.errno(),
            FileIoError::OutOfMemory(_) => Errno::ENOMEM,
            FileIoError::Mode { errno, .. }
            | FileIoError::ReadFailed { errno, .. }
            | FileIoError::StoreRefused { errno, .. }
            | FileIoError::ChangeFailed(errno)
            | FileIoError::WriteFailed(errno)
            | FileIoError::SyncFailed(errno) => errno,
        }
    }
}

const MAX: u64 = i64::MAX as u64;
const NO_WRITING: Seals = Seals::WRITE.union(Seals::FUTURE_WRITE);

/// The first and the last page of a range of bytes.
fn edges_of(offset: u64, end: u64) -> impl Iterator<Item = (u64, Range<usize>)> {
    let last = end.saturating_sub(1) / PAGE as u64 * PAGE as u64;
    let first = by_page(offset, end).take(1);
    first.chain(by_page(last.max(offset), end).filter(move |_| last > offset))
}

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
    /// Copies bytes out; how many there were before the end. Pages without a frame are read by the backend, or are zeros.
    ///
    /// # Errors
    /// The backend's, if it fails at the first page; after others, what they had is the result.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<usize, FileIoError> {
        let end = offset.saturating_add(into.len() as u64).min(self.len());
        let mut done = 0;
        for (pgoff, range) in by_page(offset, end) {
            let part = &mut into[done..done + range.len()];
            match self.bring_in(pgoff, &|frames| frames.allocate()) {
                Ok(Some(frame)) => frame.bytes().read(range.start, part),
                // The file has become shorter.
                Ok(None) if self.backend().is_some() => break,
                Ok(None) => part.fill(0),
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
            done += range.len();
        }
        Ok(done)
    }

    /// Copies bytes in; the file grows if it has to. Pages that are overwritten in part are read first.
    ///
    /// # Errors
    /// `EFBIG`; `EPERM` when sealed against growing; `ENOMEM`; what the backend fails with. But for `ENOMEM` nothing has changed.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), FileIoError> {
        self.write_if(offset, from, |_| Ok(()))
    }

    /// The same, if the seals that it has then allow it.
    fn write_if(
        &self,
        offset: u64,
        from: &[u8],
        allow: impl Fn(Seals) -> Result<(), FileIoError>,
    ) -> Result<(), FileIoError> {
        let end = offset
            .checked_add(from.len() as u64)
            .filter(|end| *end <= MAX);
        let end = end.ok_or(FileIoError::TooLarge(u64::MAX))?;
        // As long as these are kept, they aren't evicted.
        let (_order, _edges) = self.begin_write(offset, end, allow)?;
        if end > self.len() && !from.is_empty() {
            self.grow(end)?;
        }
        let mut done = 0;
        for (pgoff, range) in by_page(offset, end) {
            let part = &from[done..done + range.len()];
            done += range.len();
            if self.backend().is_some() {
                self.write_page(pgoff, range.start, part)?;
                continue;
            }
            match self.pages().get_or_make(self, pgoff) {
                FilePage::Frame(frame) => {
                    frame.bytes().write(range.start, part);
                    self.changed(pgoff, &frame);
                }
                FilePage::OutOfMemory => {
                    return Err(FileIoError::OutOfMemory(pgoff * PAGE as u64));
                }
                FilePage::NotReady | FilePage::BeyondEnd => {
                    unreachable!("pages leave under the lock that is held")
                }
            }
        }
        Ok(())
    }

    /// From here on length, seals and holes stay as they are; and pages of which a part isn't overwritten are there. They are read
    /// before the lock is taken.
    fn begin_write(
        &self,
        offset: u64,
        end: u64,
        allow: impl Fn(Seals) -> Result<(), FileIoError>,
    ) -> Result<(MutexGuard<'_, ()>, SmallVec<[Frame; 2]>), FileIoError> {
        loop {
            let mut edges = SmallVec::<[(u64, Frame); 2]>::new();
            if self.backend().is_some() && end <= MAX {
                let seals = self.current_seals();
                allow(seals)?;
                for (pgoff, range) in edges_of(offset, end) {
                    if self.has_rest(pgoff, &range)
                        && let Some(frame) = self.bring_in(pgoff, &|frames| frames.allocate())?
                    {
                        edges.push((pgoff, frame));
                    }
                }
            }
            let order = self.resizing();
            allow(self.current_seals())?;
            let is_here = |pgoff| {
                let mut edges = edges.iter();
                edges.any(|(at, frame)| *at == pgoff && !frame.is_removed())
            };
            let lacks = |(pgoff, range): (u64, Range<usize>)| {
                self.has_rest(pgoff, &range) && !is_here(pgoff)
            };
            // A call may have changed the file meanwhile.
            if self.backend().is_none() || !edges_of(offset, end).any(lacks) {
                let frames = edges.into_iter().map(|(_, frame)| frame);
                return Ok((order, frames.collect()));
            }
        }
    }

    /// Bytes of a page of a file with a backend, whose other bytes are there, or are nothing yet.
    fn write_page(&self, pgoff: u64, at: usize, part: &[u8]) -> Result<(), FileIoError> {
        let mut new = None;
        loop {
            if let Some(busy) = self.pages().busy(pgoff) {
                busy.wait();
                continue;
            }
            if let Some(frame) = self.pages().get(pgoff) {
                frame.bytes().write(at, part);
                if self.changed(pgoff, &frame) {
                    return Ok(());
                }
                // It was evicted meanwhile.
                continue;
            }
            let frame = if let Some(frame) = new.take() {
                frame
            } else {
                let frame = self.pages().allocator().allocate();
                let frame = frame.ok_or(FileIoError::OutOfMemory(pgoff * PAGE as u64))?;
                let frame = frame.zeroed();
                frame.bytes().write(at, part);
                frame
            };
            match self.pages().put(pgoff, frame) {
                Ok(()) => return Ok(()),
                Err(frame) => new = Some(frame),
            }
        }
    }

    /// Marks a page that was written to, if the file has marks. Whether it's still the file's.
    pub(crate) fn changed(&self, pgoff: u64, frame: &Frame) -> bool {
        !self.is_tracked() || self.pages().mark_changed(pgoff, frame)
    }

    /// Frees the pages of a range and zeroes what of others lies in it; the length stays
    /// (`FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE`). No mapping shows the old content afterwards, but private copies.
    ///
    /// # Errors
    /// `EPERM` when sealed against writing; what the backend fails with. Nothing has changed then.
    pub fn punch_hole(&self, offset: u64, len: u64) -> Result<(), FileIoError> {
        let _order = self.resizing();
        let seals = self.current_seals();
        if seals.intersects(NO_WRITING) {
            return Err(FileIoError::Sealed(seals));
        }
        let page = PAGE as u64;
        let end = offset.saturating_add(len);
        let _closed = match self.backend() {
            Some(backend) if offset < self.len() => {
                let closed = self.pages().close(offset / page..end.div_ceil(page));
                let part = end.min(self.len()) - offset;
                let result = backend.punch_hole(offset, part);
                result.map_err(FileIoError::ChangeFailed)?;
                Some(closed)
            }
            _ => None,
        };
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
        self.for_each_mapping(&pages, |space, part| {
            space.rob_heirs(self, part, frame);
            0
        });
    }

    /// Takes pages out of all mappings.
    pub(super) fn unmap_pages(&self, range: Range<u64>, copies: bool) {
        self.for_each_mapping(&range, |space, part| {
            space.unmap_pages(self, part, copies);
            0
        });
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
    /// `EBADF` not opened for reading; `EINVAL` an offset above 2^63 - 1; what the backend fails with.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<usize, FileIoError> {
        check(offset, 0)?;
        if !self.is_readable() {
            return Err(FileIoError::Mode {
                mode: self.mode(),
                errno: Errno::EBADF,
            });
        }
        self.object().read_at(offset, into)
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
        self.object().set_len(len)
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
