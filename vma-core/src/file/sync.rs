//! Dirty pages: writing them back, protecting them, and letting go of clean ones. None of it takes a space's lock.
//!
//! ```text
//! sync                                   store through a mapping
//! ----                                   -----------------------
//! take the dirty marks away              leaf's lock
//! for each space: under each leaf's lock   mark the page
//!   stores go to the page no more          stores go to it from now on
//! one shootdown per space                unlock
//! read the bytes, write them             store
//! ```
//!
//! A store is made before the shootdown, and its bytes are written; or its thread finds that stores don't go to the page, and marks
//! it first. Whoever marks a page under a leaf's lock does it before the marks are taken away, and is found by the walk, or after
//! (C16). Model: `a_store_beside_a_clean_is_written_or_leaves_a_mark`.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::busy::Busy;
use super::cache::{Allocate, Cleaning, Looked, ToClean, has_page};
use super::{FileBackend, FileIoError, FileKind, FileObject, OpenFile};
use crate::backend::paged::{Frame, PAGE};
use crate::error::Errno;

/// Pages that are written back in one go, at most: 256 KiB.
const BATCH: usize = 64;

/// Errors of writing back, so that each descriptor hears of them once. Source: `errseq_t` in lib/errseq.c.
#[derive(Debug, Default)]
pub(super) struct WriteErrors {
    last: Mutex<LastError>,
    /// For who syncs the object itself.
    own: Seen,
}

#[derive(Debug, Default)]
struct LastError {
    /// How many there were.
    count: u64,
    errno: Option<Errno>,
    is_seen: bool,
}

/// How many errors somebody has heard of. Relaxed: changed under `WriteErrors::last`, but for a new one.
#[derive(Debug, Default)]
pub(super) struct Seen(AtomicU64);

impl WriteErrors {
    fn record(&self, errno: Errno) {
        let mut last = self.last.lock();
        last.count += 1;
        last.errno = Some(errno);
        last.is_seen = false;
    }

    /// Who comes new hears of an error that nobody has heard of yet.
    pub(super) fn sample(&self) -> Seen {
        let last = self.last.lock();
        Seen(AtomicU64::new(if last.is_seen { last.count } else { 0 }))
    }

    /// The last error, if it's new to somebody.
    fn check(&self, seen: &Seen) -> Result<(), FileIoError> {
        let mut last = self.last.lock();
        let before = seen.0.swap(last.count, Ordering::Relaxed);
        match last.errno {
            Some(errno) if before != last.count => {
                last.is_seen = true;
                Err(FileIoError::WriteFailed(errno))
            }
            _ => Ok(()),
        }
    }
}

fn wait_for_all(busy: &[Arc<Busy>]) {
    for busy in busy {
        busy.wait();
    }
}

/// The pages that a range of bytes touches.
fn pages_of(offset: u64, len: u64) -> Range<u64> {
    let page = PAGE as u64;
    offset / page..offset.saturating_add(len).div_ceil(page)
}

impl FileObject {
    /// Reads a page into the page cache unless it's there, and for a store to it through a mapping asks the backend to allow that
    /// ([`FileBackend::before_store`]); waits for who is at it. For faults that found it [`NotReady`](crate::Faulted::NotReady).
    ///
    /// # Errors
    /// What the backend fails with; `ENOMEM` no frame.
    pub fn prepare_page(&self, pgoff: u64, store: bool) -> Result<(), FileIoError> {
        self.prepare_page_with(pgoff, store, &|frames| frames.allocate())
    }

    pub(crate) fn prepare_page_with(
        &self,
        pgoff: u64,
        store: bool,
        allocate: Allocate<'_>,
    ) -> Result<(), FileIoError> {
        let Some(backend) = self.backend() else {
            if let Some(busy) = self.pages().busy(pgoff) {
                busy.wait();
            }
            return Ok(());
        };
        let Some(frame) = self.bring_in(pgoff, allocate)? else {
            return Ok(());
        };
        if store && backend.asks_before_store() && !frame.is_allowed() {
            let offset = pgoff * PAGE as u64;
            let refused = |errno| FileIoError::StoreRefused { offset, errno };
            backend.before_store(offset).map_err(refused)?;
            frame.set_allowed(true);
        }
        Ok(())
    }

    /// The page of a file with a backend; `None` beyond the end. As long as the result is kept, it isn't evicted.
    pub(super) fn bring_in(
        &self,
        pgoff: u64,
        allocate: Allocate<'_>,
    ) -> Result<Option<Frame>, FileIoError> {
        let Some(backend) = self.backend() else {
            return Ok(self.pages().get(pgoff));
        };
        loop {
            let reading = match self.pages().look(self, pgoff) {
                Looked::Present(frame) => return Ok(Some(frame)),
                Looked::BeyondEnd => return Ok(None),
                Looked::Wait(busy) => {
                    busy.wait();
                    continue;
                }
                Looked::Read(reading) => reading,
            };
            let offset = pgoff * PAGE as u64;
            let new = allocate(self.pages().allocator());
            let new = new.ok_or(FileIoError::OutOfMemory(offset))?.filled();
            let mut bytes = [0; PAGE];
            let read = backend.read(offset, &mut bytes);
            let count = read.map_err(|errno| FileIoError::ReadFailed { offset, errno })?;
            // Not beyond the end of ours, which stays while a page is being read there.
            let end = self.len().saturating_sub(offset).min(PAGE as u64) as usize;
            bytes[count.min(end)..].fill(0);
            new.bytes().write(0, &bytes);
            reading.done(new.clone());
            return Ok(Some(new));
        }
    }

    /// Pages that are to be written back.
    pub fn dirty_pages(&self) -> usize {
        self.pages().dirty()
    }

    /// Writes back what was changed, and makes it permanent (fsync(2)). Of errors it reports what wasn't reported to it before:
    /// its own, and those of others since.
    ///
    /// No space's lock is taken; stores go on meanwhile, and what is stored after the page was looked at is for the next sync.
    ///
    /// # Errors
    /// What the backend fails with. A page that couldn't be written stays dirty. `EINVAL` a device, or what can't be mapped, without a
    /// backend.
    ///
    /// Source: `vfs_fsync_range()` in fs/sync.c.
    pub fn sync(&self) -> Result<(), FileIoError> {
        self.sync_for(&self.errors().own, 0..u64::MAX)
    }

    /// The same for a range of bytes.
    ///
    /// # Errors
    /// As [`sync`](Self::sync).
    pub fn sync_range(&self, offset: u64, len: u64) -> Result<(), FileIoError> {
        self.sync_for(&self.errors().own, pages_of(offset, len))
    }

    fn sync_for(&self, seen: &Seen, pages: Range<u64>) -> Result<(), FileIoError> {
        let Some(backend) = self.backend() else {
            return match self.kind() {
                FileKind::Device | FileKind::Unmappable => Err(FileIoError::CannotSync),
                _ => Ok(()),
            };
        };
        wait_for_all(&self.pages().being_cleaned(pages.clone()));
        self.write_back(&**backend, pages, true);
        let synced = backend.sync().map_err(FileIoError::SyncFailed);
        self.errors().check(seen).and(synced)
    }

    /// Writes back dirty pages, and notes errors. `mapped`: mappings may show them.
    fn write_back(&self, backend: &dyn FileBackend, range: Range<u64>, mapped: bool) {
        let mut buffer = Vec::new();
        let mut from = range.start;
        while from < range.end {
            let mut cleaning = match self.pages().begin_cleaning(from..range.end, BATCH) {
                ToClean::Nothing => return,
                ToClean::Wait(busy) => {
                    busy.wait();
                    continue;
                }
                ToClean::Pages(cleaning) => cleaning,
            };
            let batch = cleaning.range();
            from = batch.end;
            if mapped {
                self.protect_pages(batch);
            }
            for run in runs(&cleaning) {
                let offset = self.fill(&mut buffer, &cleaning, run.clone());
                let result = match &*buffer {
                    // Beyond the end by now.
                    [] => Ok(()),
                    bytes => backend.write(offset, bytes),
                };
                match result {
                    Ok(()) => cleaning.set_written(run),
                    Err(errno) => self.errors().record(errno),
                }
            }
        }
    }

    /// Some of the pages, up to the end of the file, into a buffer; where they begin. In the last page what lies beyond the end
    /// becomes 0. (While pages are being cleaned the end doesn't move within one of them, nor before it.)
    fn fill(&self, buffer: &mut Vec<u8>, cleaning: &Cleaning<'_>, which: Range<usize>) -> u64 {
        buffer.clear();
        let mut start = None;
        for (pgoff, frame) in cleaning.pages().skip(which.start).take(which.len()) {
            let offset = pgoff * PAGE as u64;
            start = start.or(Some(offset));
            let count = self.len().saturating_sub(offset).min(PAGE as u64) as usize;
            frame.bytes().fill(count, PAGE - count, 0);
            let before = buffer.len();
            buffer.resize(before + count, 0);
            frame.bytes().read(0, &mut buffer[before..]);
        }
        start.unwrap_or_default()
    }

    /// From here on a store to one of the pages through a mapping faults first. Nobody stores to one without when it returns. How
    /// many entries have changed.
    fn protect_pages(&self, range: Range<u64>) -> usize {
        self.for_each_mapping(&range, |space, part| space.protect_pages(self, part))
    }

    /// Takes the dirty marks of pages away and says which of them had one, in order: stores from here on mark them anew. Nothing is
    /// written back: that is the caller's business, as what an embedder does that looks for changes (dirty logging). Without a
    /// backend the file has marks if [`track_dirty`](crate::FileObjectBuilder::track_dirty) says so.
    ///
    /// Source: `clean_record_shared_mapping_range()` in `mm/mapping_dirty_helpers.c`.
    pub fn clean_range(&self, pages: Range<u64>) -> Vec<u64> {
        let mut cleaned = Vec::new();
        let mut from = pages.start;
        while from < pages.end {
            match self.pages().begin_cleaning(from..pages.end, BATCH) {
                ToClean::Nothing => break,
                ToClean::Wait(busy) => busy.wait(),
                ToClean::Pages(mut cleaning) => {
                    let batch = cleaning.range();
                    from = batch.end;
                    self.protect_pages(batch);
                    cleaned.extend(cleaning.pages().map(|(pgoff, _)| pgoff));
                    let count = cleaning.pages().count();
                    cleaning.set_written(0..count);
                }
            }
        }
        cleaned
    }

    /// Makes the next store to each of the pages through a mapping fault, so that the backend is asked anew
    /// ([`FileBackend::before_store`]). Dirty marks stay. How many page-table entries have changed.
    ///
    /// Source: `wp_shared_mapping_range()` in `mm/mapping_dirty_helpers.c`.
    pub fn write_protect_range(&self, pages: Range<u64>) -> usize {
        self.pages().set_allowed(pages.clone(), false);
        self.protect_pages(pages)
    }

    /// Takes pages out of all mappings; of private copies as well, if told. They stay in the page cache, dirty marks too, and are
    /// found again by the next access.
    ///
    /// Source: `unmap_mapping_range()` in mm/memory.c.
    pub fn unmap_range(&self, pages: Range<u64>, copies: bool) {
        self.unmap_pages(pages, copies);
    }

    /// Lets go of pages that are neither dirty nor pinned nor in use: out of all mappings, then out of the page cache. How many went.
    /// Without a backend none does.
    pub fn evict(&self, pages: Range<u64>) -> usize {
        if self.backend().is_none() {
            return 0;
        }
        let leaving = self.pages().begin_eviction(pages.clone());
        if leaving.is_empty() {
            return 0;
        }
        self.unmap_pages(leaving.range(), false);
        leaving.unless_in_use()
    }

    /// Before it goes.
    pub(super) fn write_back_the_rest(&self) {
        if let Some(backend) = self.backend()
            && self.dirty_pages() > 0
        {
            self.write_back(&**backend, 0..u64::MAX, false);
        }
    }

    /// A page of a file with a backend that has a content which isn't all overwritten with `range`.
    pub(super) fn has_rest(&self, pgoff: u64, range: &Range<usize>) -> bool {
        let offset = pgoff.saturating_mul(PAGE as u64);
        let end = self.len().saturating_sub(offset).min(PAGE as u64) as usize;
        has_page(self, pgoff) && (range.start > 0 || range.end < end)
    }
}

/// Pages that lie side by side.
fn runs(cleaning: &Cleaning<'_>) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let mut before = None;
    for (index, (pgoff, _)) in cleaning.pages().enumerate() {
        match runs.last_mut() {
            Some(last) if before == Some(pgoff) => last.end = index + 1,
            _ => runs.push(index..index + 1),
        }
        before = Some(pgoff + 1);
    }
    runs
}

impl OpenFile {
    /// fsync(2): as [`FileObject::sync`], with the errors that weren't reported to this descriptor.
    ///
    /// # Errors
    /// As there.
    pub fn sync(&self) -> Result<(), FileIoError> {
        self.object().sync_for(&self.seen, 0..u64::MAX)
    }

    /// The same for a range of bytes.
    ///
    /// # Errors
    /// As [`FileObject::sync`].
    pub fn sync_range(&self, offset: u64, len: u64) -> Result<(), FileIoError> {
        self.object().sync_for(&self.seen, pages_of(offset, len))
    }
}
