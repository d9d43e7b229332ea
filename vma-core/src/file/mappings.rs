//! The reverse index of a file: which parts of it are mapped, in which spaces, and where.
//!
//! # Locks
//!
//! ```text
//! a space's mmap lock
//!   index of a file          shared by walks, exclusive for changes; nothing is allocated, freed or called under it
//! ```
//!
//! A walk copies some entries, lets the lock go, and sees to those spaces; then it goes on. So what it does takes no lock of a
//! space's, and nobody who maps the file waits for it.
//!
//! # A superset (C6)
//!
//! A mapping's entry is there before it is published, and until its pages are gone: what can be faulted is in the index, and a walk
//! that doesn't find an entry was through before it came. So whoever faults there sees what the walker had changed before
//! (a length, a page marked as leaving), and a space that is still letting go of pages is found. What an entry leads to is asked
//! for each page, under its table's lock. Whenever no call is under way the entries are the mappings, each once.

use std::any::Any;
use std::fmt;
use std::ops::{ControlFlow, Range};
use std::ptr;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;
use vma_rcu::lock_order::{Held, Level};
use vma_rcu::rwsem::{RwSemaphore, WriteGuard};

use super::FileObject;
use super::index::{Cursor, Interval, IntervalSet};
use crate::addr::{Pages, VmRange};
use crate::backend::paged::Frame;
use crate::error::PublishError;
use crate::space::Observed;

/// The lock of a file's index.
const INDEX: Level = Level::new(60, "a file's reverse index");

/// A part of a file, in pages, and where it is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Part {
    /// First page.
    pub(crate) first: u64,
    /// First page after it.
    pub(crate) end: u64,
    /// Address of the first page.
    pub(crate) addr: u64,
}

impl Part {
    /// What of it shows these pages.
    fn within(self, pages: &Range<u64>, size: Pages) -> Part {
        let first = self.first.max(pages.start);
        Part {
            first,
            end: self.end.min(pages.end),
            addr: self.addr + size.bytes(first - self.first),
        }
    }
}

/// A space, as a file sees it that it maps.
pub(crate) trait Mapper: Any + Send + Sync {
    /// Lets go of the file's pages that a part shows; of private copies as well, if told.
    fn unmap_pages(&self, file: &FileObject, part: Part, copies: bool);

    /// Has stores to the file's pages that a part shows fault first from here on. How many entries have changed.
    fn protect_pages(&self, file: &FileObject, part: Part) -> usize;

    /// Takes a private huge page away from children that still show their parent's; `frame` is one of it.
    fn rob_heirs(&self, file: &FileObject, part: Part, frame: &Frame);

    /// Waits until nobody uses what was taken out so far, nor stores to what so many protected entries show.
    fn settle(&self, protected: usize);

    /// Its pages.
    fn pages(&self) -> Pages;
}

/// Tells spaces apart, as long as they live: see [`AddressSpace::id`](crate::AddressSpace::id).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpaceId(usize);

impl SpaceId {
    pub(crate) fn of<M: ?Sized>(space: &Arc<M>) -> Self {
        SpaceId(Arc::as_ptr(space).addr())
    }

    fn of_weak(space: &Weak<dyn Mapper>) -> Self {
        SpaceId(space.as_ptr().addr())
    }

    /// Keeps entries apart that have the same place in the file: it is added to their address.
    fn salt(self) -> u64 {
        (self.0 as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// A mapping of a file: see [`FileObject::mappings`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileMapping {
    /// The space.
    pub space: SpaceId,
    /// Where in it.
    pub range: VmRange,
    /// Which pages of the file.
    pub pages: Range<u64>,
}

type Set = IntervalSet<Weak<dyn Mapper>>;

/// See the [module](self).
pub(super) struct Mappings {
    set: RwSemaphore<Set, Observed>,
}

impl Default for Mappings {
    fn default() -> Self {
        Mappings {
            set: RwSemaphore::with_statistics(IntervalSet::new(), Observed::default()),
        }
    }
}

impl fmt::Debug for Mappings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mappings")
            .field("count", &self.len())
            .finish()
    }
}

impl Mappings {
    pub(super) fn observe(&mut self, observer: Observed) {
        *self.set.statistics_mut() = observer;
    }

    fn held(&self) -> Held {
        INDEX.acquire(ptr::from_ref(self).addr())
    }

    fn len(&self) -> usize {
        let _held = self.held();
        self.set.read().len()
    }

    fn write(&self) -> Index<'_> {
        let held = self.held();
        Index {
            set: self.set.write(),
            _held: held,
        }
    }
}

/// The index, locked exclusively.
pub(crate) struct Index<'f> {
    set: WriteGuard<'f, Set, Observed>,
    _held: Held,
}

/// The key of a part of a space's.
fn interval(space: SpaceId, part: Part) -> Interval {
    Interval {
        first: part.first,
        tie: part.addr.wrapping_add(space.salt()),
        end: part.end,
    }
}

fn part(space: SpaceId, interval: Interval) -> Part {
    Part {
        first: interval.first,
        end: interval.end,
        addr: interval.tie.wrapping_sub(space.salt()),
    }
}

/// Entries that room is made for at a time.
const ROOM: usize = 64;
/// Entries that a walk looks at before it lets the lock go.
const BATCH: usize = if cfg!(test) { 2 } else { 32 };

type Batch = SmallVec<[(Arc<dyn Mapper>, Part); BATCH]>;

impl FileObject {
    /// A space is going to show these parts. The lock may be kept, to publish under it.
    ///
    /// # Errors
    /// Memory ran out, and nothing has changed.
    pub(crate) fn link<'f>(
        &'f self,
        space: &Weak<dyn Mapper>,
        parts: impl Iterator<Item = Part> + Clone,
    ) -> Result<Index<'f>, PublishError> {
        let id = SpaceId::of_weak(space);
        let mut index = self.mappings_index().write();
        let (mut rest, mut done) = (parts.clone(), 0);
        loop {
            let count = rest.clone().take(ROOM).count();
            if count == 0 {
                return Ok(index);
            }
            // Memory is made with the lock let go of, and what isn't used goes the same way.
            while let Some(need) = index.set.needs(count) {
                drop(index);
                let Some(chunk) = need.allocate() else {
                    self.unlink(space, parts.take(done));
                    return Err(PublishError::NoMemory);
                };
                index = self.mappings_index().write();
                let unused = index.set.add(chunk);
                drop(index);
                drop(unused);
                index = self.mappings_index().write();
            }
            for part in rest.by_ref().take(count) {
                index.set.insert(interval(id, part), space.clone());
            }
            done += count;
        }
    }

    /// It no longer shows them.
    pub(crate) fn unlink(&self, space: &Weak<dyn Mapper>, parts: impl Iterator<Item = Part>) {
        let id = SpaceId::of_weak(space);
        let mut index = self.mappings_index().write();
        for part in parts {
            let is_ours = |other: &Weak<dyn Mapper>| SpaceId::of_weak(other) == id;
            // The caller has another one, so that this drop frees nothing.
            let removed = index.set.remove(interval(id, part), is_ours);
            debug_assert!(removed.is_some(), "{part:?} was linked");
        }
        let memory = index.set.take_memory();
        drop(index);
        drop(memory);
    }

    /// Calls `f` for each part of these pages that is mapped, or may be, and settles with the spaces; no lock is held meanwhile. `f`
    /// says how many entries it has protected; the sum.
    pub(super) fn for_each_mapping(
        &self,
        pages: &Range<u64>,
        mut f: impl FnMut(&dyn Mapper, Part) -> usize,
    ) -> usize {
        let (mut after, mut sum) = (Cursor::default(), 0);
        loop {
            let (batch, is_last) = self.next_batch(pages, &mut after);
            let mut counts = SmallVec::<[usize; BATCH]>::new();
            for (space, part) in &batch {
                counts.push(f(&**space, part.within(pages, space.pages())));
            }
            for (at, (space, _)) in batch.iter().enumerate() {
                let is_same =
                    |other: usize| ptr::addr_eq(Arc::as_ptr(&batch[other].0), Arc::as_ptr(space));
                if !(at + 1..batch.len()).any(is_same) {
                    let of_space = (0..=at).filter(|other| is_same(*other));
                    space.settle(of_space.map(|other| counts[other]).sum());
                }
            }
            sum += counts.iter().sum::<usize>();
            if is_last {
                return sum;
            }
        }
    }

    /// Calls `f` for each space that maps some of these pages, or may do so, and the part of the file that it maps there, with no
    /// lock held.
    pub(crate) fn for_each_mapper(
        &self,
        pages: &Range<u64>,
        mut f: impl FnMut(Arc<dyn Mapper>, Part),
    ) {
        let (mut after, mut is_last) = (Cursor::default(), false);
        while !is_last {
            let batch;
            (batch, is_last) = self.next_batch(pages, &mut after);
            batch.into_iter().for_each(|(space, part)| f(space, part));
        }
    }

    /// The next entries behind a place, and whether they are the last.
    fn next_batch(&self, pages: &Range<u64>, after: &mut Cursor) -> (Batch, bool) {
        let mut batch = Batch::new();
        let (mut seen, mut is_last) = (0, true);
        self.walk(pages, *after, |key, space| {
            // Entries that differ in their end alone, of one mapping on its way to another, are seen to together.
            if !after.is_at(key) {
                if seen == BATCH {
                    is_last = false;
                    return ControlFlow::Break(());
                }
                (seen, *after) = (seen + 1, Cursor::behind(key));
                // A space that is going needs no seeing to.
                if let Some(alive) = space.upgrade() {
                    batch.push((alive, part(SpaceId::of_weak(space), key)));
                }
            } else if let Some((_, last)) = batch.last_mut()
                && (last.first, last.addr) == (key.first, part(SpaceId::of_weak(space), key).addr)
            {
                last.end = last.end.max(key.end);
            }
            ControlFlow::Continue(())
        });
        (batch, is_last)
    }

    fn walk(
        &self,
        pages: &Range<u64>,
        after: Cursor,
        f: impl FnMut(Interval, &Weak<dyn Mapper>) -> ControlFlow<()>,
    ) {
        let index = self.mappings_index();
        let _held = index.held();
        let set = index.set.read();
        set.overlapping((pages.start, pages.end), after, f);
    }

    /// The mappings that show some of these pages, in order of their first page. What calls are making or taking away meanwhile may
    /// be among them.
    pub fn mappings(&self, pages: Range<u64>) -> Vec<FileMapping> {
        let mut found = Vec::new();
        self.walk(&pages, Cursor::default(), |key, space| {
            let id = SpaceId::of_weak(space);
            // Its size of pages is asked for later, since the space must not go here.
            found.push((space.clone(), part(id, key)));
            ControlFlow::Continue(())
        });
        let mapping = |(space, part): (Weak<dyn Mapper>, Part)| {
            let size = space.upgrade()?.pages();
            Some(FileMapping {
                space: SpaceId::of_weak(&space),
                range: VmRange::new(part.addr, part.addr + size.bytes(part.end - part.first)),
                pages: part.first..part.end,
            })
        };
        found.into_iter().filter_map(mapping).collect()
    }

    /// How many mappings there are, in all spaces.
    pub fn mapping_count(&self) -> usize {
        self.mappings_index().len()
    }
}
