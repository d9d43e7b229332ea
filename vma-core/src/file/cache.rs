//! The page cache of a file: which of its pages have a frame.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::RwLock;
use smallvec::SmallVec;

use super::{FileKind, FileObject};
use crate::backend::paged::{Frame, FrameAllocator, FramePool, PAGE};

/// Pages by offset.
///
/// # Locks
/// Its lock is the innermost but for the frame allocator's; pages are dropped when it's free again.
pub(crate) struct PageCache {
    pages: RwLock<BTreeMap<u64, Page>>,
    /// `None`: the process's pool.
    frames: Option<Arc<dyn FrameAllocator>>,
}

#[derive(Debug)]
enum Page {
    Frame(Frame),
    /// Being taken out: faults wait until no mapping shows it any more.
    Leaving,
}

/// What a fault finds.
pub(crate) enum FilePage {
    Frame(Frame),
    /// The file ends before.
    BeyondEnd,
    /// Look again.
    Busy,
    OutOfMemory,
}

/// Pages on their way out of the cache, in order. When it's dropped no mapping shows them any more, or whoever took them out has
/// panicked, and they are gone all the same: else faults would wait for ever.
pub(crate) struct Leaving<'c> {
    cache: &'c PageCache,
    pages: Vec<(u64, Frame)>,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let mut pages = self.cache.pages.write();
        for (pgoff, _) in &self.pages {
            pages.remove(pgoff);
        }
    }
}

impl fmt::Debug for PageCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageCache")
            .field("pages", &self.pages.read().len())
            .finish_non_exhaustive()
    }
}

impl PageCache {
    pub(super) fn new(frames: Option<Arc<dyn FrameAllocator>>) -> Self {
        PageCache {
            pages: RwLock::default(),
            frames,
        }
    }

    fn allocator(&self) -> &dyn FrameAllocator {
        match &self.frames {
            Some(frames) => &**frames,
            None => FramePool::global(),
        }
    }

    /// Whether a page has a frame.
    pub(crate) fn contains(&self, pgoff: u64) -> bool {
        matches!(self.pages.read().get(&pgoff), Some(Page::Frame(_)))
    }

    /// Number of pages that have one.
    pub(crate) fn len(&self) -> usize {
        self.pages.read().len()
    }

    /// The frame of a page; a page that has none gets one, of zeros.
    pub(crate) fn get_or_make(&self, object: &FileObject, pgoff: u64) -> FilePage {
        let found = |page: &Page| match page {
            Page::Frame(frame) => FilePage::Frame(frame.clone()),
            Page::Leaving => FilePage::Busy,
        };
        if !has_page(object, pgoff) {
            return FilePage::BeyondEnd;
        }
        if let Some(page) = self.pages.read().get(&pgoff) {
            return found(page);
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
        match pages.entry(pgoff) {
            // The new one goes when the lock is free again.
            Entry::Occupied(page) => found(page.get()),
            Entry::Vacant(place) => found(place.insert(Page::Frame(new))),
        }
    }

    /// Those of some pages that have a frame, and lie before the end.
    pub(crate) fn present<const N: usize>(
        &self,
        object: &FileObject,
        range: Range<u64>,
    ) -> SmallVec<[(u64, Frame); N]> {
        let pages = self.pages.read();
        let within = pages.range(range).filter_map(|(pgoff, page)| match page {
            Page::Frame(frame) if has_page(object, *pgoff) => Some((*pgoff, frame.clone())),
            _ => None,
        });
        within.take(N).collect()
    }

    /// The frame of a page, if it has one.
    pub(super) fn get(&self, pgoff: u64) -> Option<Frame> {
        match self.pages.read().get(&pgoff)? {
            Page::Frame(frame) => Some(frame.clone()),
            Page::Leaving => None,
        }
    }

    /// Marks pages as leaving. Faults find nothing in their place until the result is dropped.
    pub(super) fn begin_removal(&self, range: Range<u64>) -> Leaving<'_> {
        let mut leaving = Vec::new();
        let mut pages = self.pages.write();
        for (pgoff, page) in pages.range_mut(range) {
            if let Page::Frame(frame) = std::mem::replace(page, Page::Leaving) {
                frame.set_removed();
                leaving.push((*pgoff, frame));
            }
        }
        drop(pages);
        Leaving {
            cache: self,
            pages: leaving,
        }
    }

    /// The frames of a huge page, which `make` allocates if it has none. The caller keeps others from making it.
    pub(crate) fn get_or_make_huge<E>(
        &self,
        object: &FileObject,
        range: Range<u64>,
        make: impl FnOnce() -> Result<Vec<Frame>, E>,
    ) -> Result<Option<Vec<Frame>>, E> {
        let found = |pages: &BTreeMap<u64, Page>| {
            let frames = pages.range(range.clone()).map(|(_, page)| match page {
                Page::Frame(frame) => Some(frame.clone()),
                Page::Leaving => None,
            });
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
            pages.insert(pgoff, Page::Frame(frame.clone()));
        }
        Ok(Some(frames))
    }

    /// Lets go of all pages of a file that nobody maps, nor can.
    pub(super) fn clear(&self) {
        let pages = std::mem::take(&mut *self.pages.write());
        drop(pages);
    }
}

fn has_page(object: &FileObject, pgoff: u64) -> bool {
    object.kind() == FileKind::Device
        || pgoff
            .checked_mul(PAGE as u64)
            .is_some_and(|offset| offset < object.len())
}
