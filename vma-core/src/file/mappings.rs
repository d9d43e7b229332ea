//! The reverse index of a file: which parts of it are mapped, in which spaces, and where.
//!
//! It has two levels. The file's own index leads from pages to *tenants*, spaces that map some of them; each tenant knows its parts
//! exactly. A space that maps more of a file, or less, changes its tenant alone, which nobody shares with it but walks: the file's index
//! is for the first mapping and the last, and for pages beyond those that a space had before.
//!
//! # Locks
//!
//! ```text
//! a space's mmap lock
//!   tenants of a space
//!     parts of a tenant      walks look at a few at a time
//!   index of a file          shared by walks, exclusive for changes; nothing is allocated, freed or called under it
//! ```
//!
//! A walk copies some entries, lets the lock go, and sees to those spaces; then it goes on. So what it does takes no lock of a
//! space's, and nobody who maps the file waits for it.
//!
//! # A superset (C6)
//!
//! A part is with its tenant, and then the tenant in the index, before the mapping is published, and until its pages are gone: what
//! can be faulted is found, and a walk that doesn't find it was through there before it came: through the index if the tenant wasn't in
//! it, else through the tenant. So whoever faults there sees what the walker had changed before
//! (a length, a page marked as leaving), and a space that is still letting go of pages is found. What a part leads to is asked
//! for each page, under its table's lock. Whenever no call is under way the parts are the mappings, each once.
//!
//! Entries of the index keep their place as long as they are there, since a walk goes on behind the last that it has seen. So a tenant that
//! comes to show more pages gets further entries ([`Segments`](super::tenant::Segments)), and loses all of them at once.

use std::any::Any;
use std::fmt;
use std::ops::{ControlFlow, Range};
use std::ptr;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;
use vma_rcu::lock_order::{Held, Level};
use vma_rcu::rwsem::{ReadGuard, RwSemaphore, WriteGuard};

use super::FileObject;
use super::index::{Cursor, Interval, IntervalSet};
use super::tenant::{Segment, Tenancies, Tenant};
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

    pub(super) fn of_weak(space: &Weak<dyn Mapper>) -> Self {
        SpaceId(space.as_ptr().addr())
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

type Set = IntervalSet<Arc<Tenant>>;

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
            .field("entries", &self.read().1.len())
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

    /// No entry is left.
    #[cfg(all(test, loom))]
    pub(super) fn is_vacant(&self) -> bool {
        self.read().1.len() == 0
    }

    fn read(&self) -> (Held, ReadGuard<'_, Set, Observed>) {
        (self.held(), self.set.read())
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

fn interval(tenant: &Tenant, segment: Segment) -> Interval {
    Interval {
        first: segment.0,
        tie: tenant.salt(),
        end: segment.1,
    }
}

/// Entries that a walk looks at before it lets the lock go.
const BATCH: usize = if cfg!(test) { 2 } else { 32 };

impl FileObject {
    /// A space is going to show these parts. The lock of the index is kept if `hold` says so, to publish under it.
    ///
    /// # Errors
    /// Memory ran out, and nothing has changed.
    pub(crate) fn link<'f>(
        &'f self,
        tenancies: &Tenancies,
        space: &impl Fn() -> Weak<dyn Mapper>,
        parts: impl Iterator<Item = Part> + Clone,
        hold: bool,
    ) -> Result<Option<Index<'f>>, PublishError> {
        let entries = tenancies.add(self, space, &parts)?;
        if entries.is_none() && !hold {
            return Ok(None);
        }
        let mut index = self.mappings_index().write();
        let Some((tenant, segments)) = entries else {
            return Ok(Some(index));
        };
        // Memory is made with the lock let go of, and what isn't used goes the same way.
        while let Some(need) = index.set.needs(segments.len()) {
            drop(index);
            let Some(chunk) = need.allocate() else {
                tenancies.uncover(self, &segments);
                self.unlink(tenancies, parts);
                return Err(PublishError::NoMemory);
            };
            index = self.mappings_index().write();
            let unused = index.set.add(chunk);
            drop(index);
            drop(unused);
            index = self.mappings_index().write();
        }
        for segment in segments {
            let at = interval(&tenant, segment);
            index.set.insert(at, Arc::clone(&tenant));
        }
        Ok(hold.then_some(index))
    }

    /// It no longer shows them.
    pub(crate) fn unlink(&self, tenancies: &Tenancies, parts: impl Iterator<Item = Part>) {
        let Some((tenant, segments)) = tenancies.remove(self, parts) else {
            return;
        };
        let mut index = self.mappings_index().write();
        for segment in segments {
            let is_ours = |other: &Arc<Tenant>| Arc::ptr_eq(other, &tenant);
            // There is another one here, so that this drop frees nothing.
            let removed = index.set.remove(interval(&tenant, segment), is_ours);
            debug_assert!(removed.is_some(), "{segment:?} was linked");
        }
        let memory = index.set.take_memory();
        drop(index);
        drop((memory, tenant));
    }

    /// Calls `f` for each entry of these pages, with no lock held.
    fn for_each_tenant(&self, pages: &Range<u64>, mut f: impl FnMut(&Tenant, Segment)) {
        let mut after = Cursor::default();
        loop {
            let mut batch = SmallVec::<[(Arc<Tenant>, Segment); BATCH]>::new();
            let mut is_last = true;
            let (held, set) = self.mappings_index().read();
            set.overlapping((pages.start, pages.end), after, |key, tenant| {
                if batch.len() == BATCH {
                    is_last = false;
                    return ControlFlow::Break(());
                }
                after = Cursor::behind(key);
                batch.push((Arc::clone(tenant), (key.first, key.end)));
                ControlFlow::Continue(())
            });
            drop((set, held));
            batch.iter().for_each(|(tenant, at)| f(tenant, *at));
            if is_last {
                return;
            }
        }
    }

    /// Calls `f` for each part of these pages that is mapped, or may be, and settles with the spaces; no lock is held meanwhile. `f`
    /// says how many entries it has protected; the sum.
    pub(super) fn for_each_mapping(
        &self,
        pages: &Range<u64>,
        mut f: impl FnMut(&dyn Mapper, Part) -> usize,
    ) -> usize {
        let mut sum = 0;
        self.for_each_tenant(pages, |tenant, (first, end)| {
            // A space that is going needs no seeing to.
            let Some(space) = tenant.space.upgrade() else {
                return;
            };
            let pages = pages.start.max(first)..pages.end.min(end);
            let mut found = None;
            tenant.for_each(&pages, |part| {
                let part = part.within(&pages, space.pages());
                *found.get_or_insert(0) += f(&*space, part);
            });
            if let Some(protected) = found {
                space.settle(protected);
                sum += protected;
            }
        });
        sum
    }

    /// Calls `f` for each space that maps some of these pages, or may do so, and the part of the file that it maps there, with no
    /// lock held.
    pub(crate) fn for_each_mapper(
        &self,
        pages: &Range<u64>,
        mut f: impl FnMut(Arc<dyn Mapper>, Part),
    ) {
        self.for_each_tenant(pages, |tenant, (first, end)| {
            let pages = pages.start.max(first)..pages.end.min(end);
            let mut space = None;
            tenant.for_each(&pages, |part| {
                // A space that is going needs no seeing to. `f` has it as well: it doesn't end here.
                if let Some(space) = space.get_or_insert_with(|| tenant.space.upgrade()) {
                    f(Arc::clone(space), part);
                }
            });
        });
    }

    /// The mappings that show some of these pages, in order of their first page. What calls are making or taking away meanwhile may
    /// be among them.
    pub fn mappings(&self, pages: Range<u64>) -> Vec<FileMapping> {
        let mut found = Vec::new();
        self.for_each_tenant(&pages, |tenant, (first, end)| {
            let Some(size) = tenant.space.upgrade().map(|space| space.pages()) else {
                return;
            };
            let within = pages.start.max(first)..pages.end.min(end);
            tenant.for_each(&within, |part| {
                // Not again what another entry has led to.
                if part.first.max(pages.start) >= first {
                    let bytes = size.bytes(part.end - part.first);
                    found.push(FileMapping {
                        space: tenant.space_id(),
                        range: VmRange::new(part.addr, part.addr + bytes),
                        pages: part.first..part.end,
                    });
                }
            });
        });
        found.sort_by_key(|mapping| (mapping.pages.start, mapping.space, mapping.range.start));
        found
    }

    /// How many mappings there are, in all spaces. It looks at each space that maps the file.
    pub fn mapping_count(&self) -> usize {
        let mut count = 0;
        self.for_each_tenant(&(0..u64::MAX), |tenant, at| count += tenant.count_at(at));
        count
    }
}
