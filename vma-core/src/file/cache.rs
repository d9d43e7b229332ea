//! The page cache of a file: which of its pages have a frame, and which of them are to be written back.
//!
//! # Pages
//!
//! ```text
//! absent --> being read --> present <--> being cleaned
//!               |              |
//!               v              v
//!            absent         leaving --> absent (or present again: an eviction that found it in use)
//! ```
//!
//! A page is read, written back and taken out of mappings with no lock held; whoever wants it meanwhile waits for the end of that
//! ([`Busy`]). Where a call changes the file behind the cache (truncation, a hole), the range is closed meanwhile: nobody begins
//! to read or to write back pages there, so that what was read before doesn't come back (C7).
//!
//! # Invariants
//!
//! * **D1** An entry that shows a page of a file with dirty marks, and says that stores go to it, shows a dirty one; but for one that is
//!   being cleaned, or is leaving, where somebody is on the way to that entry.
//! * **D2** A page's offset is in `dirty` if its frame says so, while it's present or being cleaned.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::busy::{Busy, Until};
use super::lock::Lock;
use super::{FileKind, FileObject};
use crate::backend::paged::{Frame, FrameAllocator, FramePool, NewFrame, PAGE};

/// Pages by offset.
///
/// # Locks
/// Its lock is the innermost but for the frame allocator's; pages are dropped when it's free again.
pub(crate) struct PageCache {
    pages: Lock<Pages>,
    /// `None`: the process's pool.
    frames: Option<Arc<dyn FrameAllocator>>,
}

#[derive(Default)]
struct Pages {
    by_offset: BTreeMap<u64, Page>,
    /// D2.
    dirty: BTreeSet<u64>,
    /// Where a call is changing the file behind the cache.
    closed: Option<(Range<u64>, Arc<Busy>)>,
}

#[derive(Debug)]
enum Page {
    Present(Frame),
    /// Its frame isn't there yet.
    BeingRead(Arc<Busy>),
    /// Present, and on its way to the backend.
    BeingCleaned(Frame, Arc<Busy>),
    /// Being taken out: faults wait until no mapping shows it any more.
    Leaving(Arc<Busy>),
}

impl Page {
    fn frame(&self) -> Option<&Frame> {
        match self {
            Page::Present(frame) | Page::BeingCleaned(frame, _) => Some(frame),
            Page::BeingRead(_) | Page::Leaving(_) => None,
        }
    }

    /// What there is to wait for before it has a frame, or none.
    fn found(&self) -> Result<&Frame, &Arc<Busy>> {
        match self {
            Page::Present(frame) | Page::BeingCleaned(frame, _) => Ok(frame),
            Page::BeingRead(busy) | Page::Leaving(busy) => Err(busy),
        }
    }
}

impl Pages {
    /// What there is to wait for before pages of a range are read or written back.
    fn closed_at(&self, pgoff: u64) -> Option<&Arc<Busy>> {
        let (range, busy) = self.closed.as_ref()?;
        range.contains(&pgoff).then_some(busy)
    }
}

/// What a fault finds.
pub(crate) enum FilePage {
    Frame(Frame),
    /// The file ends before.
    BeyondEnd,
    /// It has to be read, or somebody is at it: [`FileObject::prepare_page`].
    NotReady,
    OutOfMemory,
}

/// What becomes of a store to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Marked {
    /// It's marked as dirty.
    Yes,
    /// The file has to allow it first.
    NotAllowed,
    /// The file has let go of the page.
    Gone,
}

/// What a page is like before it's made present.
pub(super) enum Looked<'c> {
    Present(Frame),
    /// Somebody is at it.
    Wait(Arc<Busy>),
    BeyondEnd,
    /// It's the caller's to read it.
    Read(Reading<'c>),
}

/// A page that is being read. If it's dropped before, others find the page absent, and read it themselves.
pub(super) struct Reading<'c> {
    cache: &'c PageCache,
    pgoff: u64,
    until: Until,
}

impl Reading<'_> {
    /// Puts the page in. Calls that change the file wait for this.
    pub(super) fn done(self, frame: Frame) {
        let mut pages = self.cache.pages.write();
        pages.by_offset.insert(self.pgoff, Page::Present(frame));
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let mut pages = self.cache.pages.write();
        if let Some(Page::BeingRead(busy)) = pages.by_offset.get(&self.pgoff)
            && self.until.is(busy)
        {
            pages.by_offset.remove(&self.pgoff);
        }
    }
}

/// Pages on their way out of the cache, in order. When it's dropped no mapping shows them any more, or whoever took them out has
/// panicked, and they are gone all the same: else faults would wait for ever.
pub(crate) struct Leaving<'c> {
    cache: &'c PageCache,
    pages: Vec<(u64, Frame)>,
    until: Until,
}

impl Leaving<'_> {
    pub(super) fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// From the first to the last.
    pub(super) fn range(&self) -> Range<u64> {
        let first = self.pages.first().map_or(0, |page| page.0);
        let last = self.pages.last().map_or(0, |page| page.0 + 1);
        first..last
    }

    /// Puts those back that somebody else still has a reference to. How many went.
    pub(super) fn unless_in_use(mut self) -> usize {
        let mut pages = self.cache.pages.write();
        self.pages.retain(|(pgoff, frame)| {
            let goes = frame.is_sole();
            if !goes && let Some(page) = pages.by_offset.get_mut(pgoff) {
                frame.set_kept();
                *page = Page::Present(frame.clone());
            }
            goes
        });
        drop(pages);
        self.pages.len()
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let mut pages = self.cache.pages.write();
        for (pgoff, _) in &self.pages {
            if let Some(Page::Leaving(busy)) = pages.by_offset.get(pgoff)
                && self.until.is(busy)
            {
                pages.by_offset.remove(pgoff);
            }
        }
    }
}

/// A range of pages that nobody reads or writes back until this is dropped.
pub(super) struct Closed<'c> {
    cache: &'c PageCache,
    _until: Until,
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.cache.pages.write().closed = None;
    }
}

/// Pages that were dirty, and are on their way to the backend: what is stored to them from here on marks them anew. Those that
/// haven't been written when this is dropped are dirty again.
pub(crate) struct Cleaning<'c> {
    cache: &'c PageCache,
    /// Whether it was written.
    pages: Vec<(u64, Frame, bool)>,
    until: Until,
}

/// What there is to clean.
pub(crate) enum ToClean<'c> {
    Nothing,
    /// Somebody else is at it.
    Wait(Arc<Busy>),
    Pages(Cleaning<'c>),
}

impl Cleaning<'_> {
    /// In order.
    pub(crate) fn pages(&self) -> impl Iterator<Item = (u64, &Frame)> {
        self.pages.iter().map(|(pgoff, frame, _)| (*pgoff, frame))
    }

    /// From the first to the last.
    pub(super) fn range(&self) -> Range<u64> {
        let first = self.pages.first().map_or(0, |page| page.0);
        let last = self.pages.last().map_or(0, |page| page.0 + 1);
        first..last
    }

    pub(crate) fn set_written(&mut self, which: Range<usize>) {
        for page in &mut self.pages[which] {
            page.2 = true;
        }
    }
}

impl Drop for Cleaning<'_> {
    fn drop(&mut self) {
        let mut pages = self.cache.pages.write();
        let Pages {
            by_offset, dirty, ..
        } = &mut *pages;
        for (pgoff, frame, written) in &self.pages {
            // It may have left meanwhile, or left and come back.
            let Some(page) = by_offset.get_mut(pgoff) else {
                continue;
            };
            if !matches!(page, Page::BeingCleaned(_, busy) if self.until.is(busy)) {
                continue;
            }
            *page = Page::Present(frame.clone());
            if !written {
                frame.set_dirty();
                dirty.insert(*pgoff);
            }
        }
    }
}

impl fmt::Debug for PageCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pages = self.pages.read();
        f.debug_struct("PageCache")
            .field("pages", &pages.by_offset.len())
            .field("dirty", &pages.dirty.len())
            .finish_non_exhaustive()
    }
}

impl PageCache {
    pub(super) fn new(frames: Option<Arc<dyn FrameAllocator>>) -> Self {
        PageCache {
            pages: Lock::default(),
            frames,
        }
    }

    /// A frame for one of its pages.
    pub(crate) fn allocate(&self) -> Option<NewFrame> {
        self.allocator().allocate()
    }

    /// Puts in a page where there is none, and says whether there was none. `None`: the file ends before.
    pub(crate) fn add(&self, object: &FileObject, pgoff: u64, frame: Frame) -> Option<bool> {
        let mut pages = self.pages.write();
        // As in `get_or_make`.
        if !has_page(object, pgoff) {
            return None;
        }
        let (added, left) = match pages.by_offset.entry(pgoff) {
            Entry::Occupied(_) => (false, Some(frame)),
            Entry::Vacant(place) => {
                place.insert(Page::Present(frame));
                (true, None)
            }
        };
        drop(pages);
        drop(left);
        Some(added)
    }

    pub(super) fn allocator(&self) -> &dyn FrameAllocator {
        match &self.frames {
            Some(frames) => &**frames,
            None => FramePool::global(),
        }
    }

    /// Whether a page has a frame.
    pub(crate) fn contains(&self, pgoff: u64) -> bool {
        self.get(pgoff).is_some()
    }

    /// Number of pages that have one, or are about to, or are leaving.
    pub(crate) fn len(&self) -> usize {
        self.pages.read().by_offset.len()
    }

    /// Number of pages that are to be written back.
    pub(super) fn dirty(&self) -> usize {
        self.pages.read().dirty.len()
    }

    /// The frame of a page; a page of a file without a backend that has none gets one, of zeros.
    pub(crate) fn get_or_make(&self, object: &FileObject, pgoff: u64) -> FilePage {
        let found = |page: &Page| match page.found() {
            Ok(frame) => FilePage::Frame(frame.clone()),
            Err(_) => FilePage::NotReady,
        };
        if !has_page(object, pgoff) {
            return FilePage::BeyondEnd;
        }
        if let Some(page) = self.pages.read().by_offset.get(&pgoff) {
            return found(page);
        }
        if object.backend().is_some() {
            return FilePage::NotReady;
        }
        if object.huge().is_some() {
            // Faults alone make huge pages.
            return FilePage::OutOfMemory;
        }
        let Some(new) = self.allocator().allocate() else {
            return FilePage::OutOfMemory;
        };
        let new = new.zeroed();
        let mut pages = self.pages.write();
        // The length is stored before pages beyond it are taken out under this lock.
        if !has_page(object, pgoff) {
            return FilePage::BeyondEnd;
        }
        match pages.by_offset.entry(pgoff) {
            // The new one goes when the lock is free again.
            Entry::Occupied(page) => found(page.get()),
            Entry::Vacant(place) => found(place.insert(Page::Present(new))),
        }
    }

    /// A page of a file with a backend, for who has time.
    pub(super) fn look(&self, object: &FileObject, pgoff: u64) -> Looked<'_> {
        let mut pages = self.pages.write();
        if !has_page(object, pgoff) {
            return Looked::BeyondEnd;
        }
        if let Some(page) = pages.by_offset.get(&pgoff) {
            return match page.found() {
                Ok(frame) => Looked::Present(frame.clone()),
                Err(busy) => Looked::Wait(Arc::clone(busy)),
            };
        }
        if let Some(busy) = pages.closed_at(pgoff) {
            return Looked::Wait(Arc::clone(busy));
        }
        let until = Until::default();
        let page = Page::BeingRead(Arc::clone(until.busy()));
        pages.by_offset.insert(pgoff, page);
        Looked::Read(Reading {
            cache: self,
            pgoff,
            until,
        })
    }

    /// Who is at a page of a file without a backend.
    pub(super) fn busy(&self, pgoff: u64) -> Option<Arc<Busy>> {
        let pages = self.pages.read();
        pages.by_offset.get(&pgoff)?.found().err().cloned()
    }

    /// Puts in a page, filled and dirty, that has no frame yet; else it's given back.
    pub(super) fn put(&self, pgoff: u64, frame: Frame) -> Result<(), Frame> {
        let mut pages = self.pages.write();
        let Pages {
            by_offset, dirty, ..
        } = &mut *pages;
        match by_offset.entry(pgoff) {
            Entry::Occupied(_) => Err(frame),
            Entry::Vacant(place) => {
                frame.set_dirty();
                dirty.insert(pgoff);
                place.insert(Page::Present(frame));
                Ok(())
            }
        }
    }

    /// Those of some pages that have a frame, and lie before the end.
    pub(crate) fn present<const N: usize>(
        &self,
        object: &FileObject,
        range: Range<u64>,
    ) -> SmallVec<[(u64, Frame); N]> {
        let pages = self.pages.read();
        let range = pages.by_offset.range(range);
        let within = range.filter_map(|(pgoff, page)| match page.frame() {
            Some(frame) if has_page(object, *pgoff) => Some((*pgoff, frame.clone())),
            _ => None,
        });
        within.take(N).collect()
    }

    /// The frame of a page, if it has one.
    pub(super) fn get(&self, pgoff: u64) -> Option<Frame> {
        self.pages.read().by_offset.get(&pgoff)?.frame().cloned()
    }

    /// Number of pages that somebody has pinned.
    pub(super) fn pinned(&self) -> usize {
        let pages = self.pages.read();
        let frames = pages.by_offset.values().filter_map(Page::frame);
        frames.filter(|frame| frame.is_pinned()).count()
    }

    /// An entry is about to say that stores go to a page: under its leaf's lock (D1). `asks`: the file has to have allowed it.
    pub(crate) fn mark_for_stores(&self, pgoff: u64, frame: &Frame, asks: bool) -> Marked {
        if asks && !frame.is_allowed() {
            Marked::NotAllowed
        } else if frame.is_dirty() || self.mark_changed(pgoff, frame) {
            // Whoever clears a mark that was seen comes to the entry afterwards.
            Marked::Yes
        } else {
            Marked::Gone
        }
    }

    /// A page was changed. Whether it's still the file's. Who takes the mark away under the lock sees the change.
    pub(crate) fn mark_changed(&self, pgoff: u64, frame: &Frame) -> bool {
        let mut pages = self.pages.write();
        let here = pages.by_offset.get(&pgoff).and_then(Page::frame);
        let is_here = here.is_some_and(|here| here.is(frame));
        if is_here {
            frame.set_dirty();
            pages.dirty.insert(pgoff);
        }
        is_here
    }

    /// The file allows stores to a page, or has to be asked anew.
    pub(super) fn set_allowed(&self, range: Range<u64>, allowed: bool) {
        let pages = self.pages.write();
        for (_, page) in pages.by_offset.range(range) {
            if let Some(frame) = page.frame() {
                frame.set_allowed(allowed);
            }
        }
    }

    /// Takes the marks of some dirty pages away, the first `most` of a range.
    pub(crate) fn begin_cleaning(&self, range: Range<u64>, most: usize) -> ToClean<'_> {
        let mut pages = self.pages.write();
        let until = Until::default();
        let mut taken = Vec::new();
        let mut wait = None;
        let dirty: Vec<u64> = pages.dirty.range(range).take(most).copied().collect();
        for pgoff in dirty {
            wait = pages.closed_at(pgoff).cloned();
            if wait.is_some() {
                break;
            }
            match pages.by_offset.get_mut(&pgoff) {
                Some(page @ Page::Present(_)) => {
                    let busy = Arc::clone(until.busy());
                    let old = std::mem::replace(page, Page::Leaving(Arc::clone(&busy)));
                    if let Page::Present(frame) = old {
                        frame.set_clean();
                        taken.push((pgoff, frame.clone(), false));
                        *page = Page::BeingCleaned(frame, busy);
                    }
                }
                Some(Page::BeingCleaned(_, busy)) => {
                    wait = Some(Arc::clone(busy));
                    break;
                }
                _ => debug_assert!(false, "D2: only pages that are here are dirty"),
            }
            pages.dirty.remove(&pgoff);
        }
        drop(pages);
        match wait {
            _ if !taken.is_empty() => ToClean::Pages(Cleaning {
                cache: self,
                pages: taken,
                until,
            }),
            Some(busy) => ToClean::Wait(busy),
            None => ToClean::Nothing,
        }
    }

    /// Those who are writing back pages of a range.
    pub(super) fn being_cleaned(&self, range: Range<u64>) -> Vec<Arc<Busy>> {
        self.at_work(range, |page| match page {
            Page::BeingCleaned(_, busy) => Some(busy),
            _ => None,
        })
    }

    fn at_work(
        &self,
        range: Range<u64>,
        which: impl Fn(&Page) -> Option<&Arc<Busy>>,
    ) -> Vec<Arc<Busy>> {
        let pages = self.pages.read();
        let mut found: Vec<Arc<Busy>> = Vec::new();
        for busy in pages
            .by_offset
            .range(range)
            .filter_map(|(_, page)| which(page))
        {
            if !found.last().is_some_and(|last| Arc::ptr_eq(last, busy)) {
                found.push(Arc::clone(busy));
            }
        }
        found
    }

    /// Keeps others from reading, writing back and evicting pages of a range, and waits for those who are at it. One at a time,
    /// which the caller sees to.
    pub(super) fn close(&self, range: Range<u64>) -> Closed<'_> {
        let until = Until::default();
        let busy = Arc::clone(until.busy());
        self.pages.write().closed = Some((range.clone(), busy));
        let closed = Closed {
            cache: self,
            _until: until,
        };
        let at_work = self.at_work(range, |page| match page {
            Page::Present(_) => None,
            Page::BeingRead(busy) | Page::BeingCleaned(_, busy) | Page::Leaving(busy) => Some(busy),
        });
        for busy in at_work {
            busy.wait();
        }
        closed
    }

    /// Marks pages as leaving. Faults wait in their place until the result is dropped.
    pub(super) fn begin_removal(&self, range: Range<u64>) -> Leaving<'_> {
        self.begin_removal_of(range, |_, _| true)
    }

    /// The same for clean pages that nobody has pinned.
    pub(super) fn begin_eviction(&self, range: Range<u64>) -> Leaving<'_> {
        self.begin_removal_of(range, |pages, (pgoff, page)| {
            let clean = |frame: &Frame| !frame.is_dirty() && !frame.is_pinned();
            matches!(page, Page::Present(frame) if clean(frame))
                && pages.closed_at(*pgoff).is_none()
        })
    }

    fn begin_removal_of(
        &self,
        range: Range<u64>,
        which: impl Fn(&Pages, (&u64, &Page)) -> bool,
    ) -> Leaving<'_> {
        let until = Until::default();
        let mut leaving = Vec::new();
        let mut pages = self.pages.write();
        let offsets: Vec<u64> = pages
            .by_offset
            .range(range)
            .filter(|(_, page)| page.frame().is_some())
            .filter(|page| which(&pages, *page))
            .map(|(pgoff, _)| *pgoff)
            .collect();
        for pgoff in offsets {
            let Some(page) = pages.by_offset.get_mut(&pgoff) else {
                continue;
            };
            let old = std::mem::replace(page, Page::Leaving(Arc::clone(until.busy())));
            if let Page::Present(frame) | Page::BeingCleaned(frame, _) = old {
                frame.set_removed();
                leaving.push((pgoff, frame));
            }
            pages.dirty.remove(&pgoff);
        }
        drop(pages);
        Leaving {
            cache: self,
            pages: leaving,
            until,
        }
    }

    /// The frames of a huge page, which `make` allocates if it has none. The caller keeps others from making it.
    pub(crate) fn get_or_make_huge<E>(
        &self,
        object: &FileObject,
        range: Range<u64>,
        make: impl FnOnce() -> Result<Vec<Frame>, E>,
    ) -> Result<Option<Vec<Frame>>, E> {
        let found = |pages: &Pages| {
            let frames = pages.by_offset.range(range.clone());
            let frames = frames.map(|(_, page)| page.frame().cloned());
            frames.collect::<Option<Vec<_>>>()
        };
        let count = (range.end - range.start) as usize;
        match found(&self.pages.read()) {
            Some(frames) if frames.is_empty() => {}
            frames => return Ok(frames.filter(|frames| frames.len() == count)),
        }
        if !has_page(object, range.start) {
            return Ok(None);
        }
        let frames = make()?;
        let mut pages = self.pages.write();
        // The last mapping's end is noted before pages are let go of under this lock.
        if object.huge().is_some_and(|huge| huge.is_closed()) {
            drop(pages);
            return Ok(None);
        }
        for (pgoff, frame) in range.clone().zip(&frames) {
            pages.by_offset.insert(pgoff, Page::Present(frame.clone()));
        }
        Ok(Some(frames))
    }

    /// Lets go of all pages of a file that nobody maps, nor can.
    pub(super) fn clear(&self) {
        let pages = std::mem::take(&mut *self.pages.write());
        drop(pages);
    }
}

/// A frame for a page of a file.
pub(crate) type Allocate<'a> = &'a dyn Fn(&dyn FrameAllocator) -> Option<NewFrame>;

pub(super) fn has_page(object: &FileObject, pgoff: u64) -> bool {
    object.kind() == FileKind::Device
        || pgoff
            .checked_mul(PAGE as u64)
            .is_some_and(|offset| offset < object.len())
}
