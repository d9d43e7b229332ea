//! Pages of 2 MiB for `MAP_HUGETLB`: the pool, reservations, and which page of a mapping has one.
//!
//! | | reserved by | given back when |
//! |---|---|---|
//! | private mapping | the mapping, page by page | its owner unmaps that page; children of a fork reserve nothing |
//! | shared mapping | the file behind it | the file's last mapping goes |
//!
//! A page that is made present takes the reservation of its place, if there is one; else one that nobody has reserved. A private page
//! that its owner discards gives the reservation back to its place.
//!
//! # Locks
//!
//! ```text
//! HugeFile::faulting     one fault of a page of a file at a time; held while memory is allocated and copied
//!   locks of page tables, page cache
//!     HugeFile::places
//!       HugePool
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};

/// Bytes of a page of a [`HugePool`].
pub(crate) const HUGE_PAGE: u64 = 2 << 20;
/// Bytes of the larger pages, of which there are none.
pub(crate) const GIGANTIC_PAGE: u64 = 1 << 30;

/// Pages of 2 MiB that spaces may share: `MAP_HUGETLB` reserves in it, and faults take from it.
///
/// It counts; memory comes from the operating system when a page is made present, and goes back with its last user.
///
/// ```
/// use vma_core::{AddressSpace, HugePool, MapFlags, MapRequest, Prot, SpaceConfig};
/// let pool = HugePool::new(4);
/// let space = AddressSpace::new(SpaceConfig {
///     hugetlb: Some(pool.clone()),
///     ..SpaceConfig::default()
/// })?;
/// let mut request = MapRequest::anonymous(1, Prot::READ | Prot::WRITE);
/// request.flags |= MapFlags::HUGETLB;
/// let addr = space.map(&request)?;
/// assert_eq!(pool.stats().reserved, 1);
/// space.unmap(addr, 2 << 20)?;
/// assert_eq!(pool.stats().reserved, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct HugePool(Arc<Mutex<HugePoolStats>>);

/// What a [`HugePool`] has, in pages: the first lines of `/proc/meminfo` on huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HugePoolStats {
    /// `HugePages_Total`.
    pub total: u64,
    /// `HugePages_Free`: not in use, those that are reserved included.
    pub free: u64,
    /// `HugePages_Rsvd`: promised to mappings, and not in use yet.
    pub reserved: u64,
}

impl HugePool {
    /// A pool of so many pages.
    pub fn new(pages: u64) -> Self {
        HugePool(Arc::new(Mutex::new(HugePoolStats {
            total: pages,
            free: pages,
            reserved: 0,
        })))
    }

    /// What there is.
    pub fn stats(&self) -> HugePoolStats {
        *self.0.lock()
    }

    /// Reserves pages, if there are as many beyond those reserved already. `coming` pages are given back by the same call.
    ///
    /// Source: `hugetlb_acct_memory()`.
    fn reserve(&self, pages: u64, coming: u64) -> bool {
        let mut stats = self.0.lock();
        let available = (stats.free.saturating_add(coming)).saturating_sub(stats.reserved);
        let fits = pages <= available;
        if fits {
            stats.reserved += pages;
        }
        fits
    }

    fn unreserve(&self, pages: u64) {
        self.0.lock().reserved -= pages;
    }

    /// Takes a page: one that was reserved, or one that nobody has reserved.
    fn take(&self, reserved: bool) -> bool {
        let mut stats = self.0.lock();
        if stats.free == 0 || (!reserved && stats.free <= stats.reserved) {
            return false;
        }
        stats.free -= 1;
        stats.reserved -= u64::from(reserved);
        true
    }

    /// Puts a page back, with a reservation for it.
    fn put(&self, reserved: bool) {
        let mut stats = self.0.lock();
        stats.free += 1;
        stats.reserved += u64::from(reserved);
    }
}

impl PartialEq for HugePool {
    /// The same pool.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for HugePool {}

impl fmt::Debug for HugePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HugePool").field(&self.stats()).finish()
    }
}

/// Locks that faults of a file's pages are spread over.
const FAULT_LOCKS: usize = 8;

/// The huge pages of a file (Linux: a file of hugetlbfs with its `resv_map`).
#[derive(Debug)]
pub(crate) struct HugeFile {
    size: u64,
    pool: HugePool,
    is_private: bool,
    places: Mutex<Places>,
    /// By page. Linux: `hugetlb_fault_mutex_table`.
    faulting: [Mutex<()>; FAULT_LOCKS],
}

#[derive(Debug, Default)]
struct Places {
    /// Pages of the file that were reserved; none of a mapping with `NORESERVE`.
    by_page: BTreeMap<u64, Place>,
    /// Number of the next page that is taken.
    next: u64,
    /// Mappings of the file in all spaces.
    mappings: u64,
    /// There have been some, and are none.
    is_closed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Reserved,
    /// By the page of this number.
    Used(u64),
}

impl HugeFile {
    pub(crate) fn new(size: u64, pool: HugePool, is_private: bool) -> Arc<Self> {
        Arc::new(HugeFile {
            size,
            pool,
            is_private,
            places: Mutex::default(),
            faulting: std::array::from_fn(|_| Mutex::default()),
        })
    }

    /// Bytes of a page.
    pub(crate) fn page_size(&self) -> u64 {
        self.size
    }

    pub(crate) fn pool(&self) -> &HugePool {
        &self.pool
    }

    /// A private mapping's: pages are the mapping's own, and their reservations as well.
    pub(crate) fn is_private(&self) -> bool {
        self.is_private
    }

    /// Keeps other faults of the page out.
    pub(crate) fn faulting(&self, page: u64) -> MutexGuard<'_, ()> {
        self.faulting[page as usize % FAULT_LOCKS].lock()
    }

    /// Reserves pages of the file. Source: `hugetlb_reserve_pages()`.
    pub(crate) fn reserve(&self, pages: Range<u64>, coming: u64) -> bool {
        if !self.pool.reserve(pages.end - pages.start, coming) {
            return false;
        }
        let mut places = self.places.lock();
        places
            .by_page
            .extend(pages.map(|page| (page, Place::Reserved)));
        true
    }

    /// Pages that go back to the pool when the owner unmaps a range.
    pub(crate) fn held_in(&self, pages: Range<u64>) -> u64 {
        self.places.lock().by_page.range(pages).count() as u64
    }

    /// The owner has unmapped these pages. Source: `hugetlb_vm_op_close()`.
    pub(crate) fn release(&self, pages: Range<u64>) {
        let mut places = self.places.lock();
        let gone: Vec<u64> = places.by_page.range(pages).map(|(page, _)| *page).collect();
        let mut reserved = 0;
        for page in gone {
            reserved += u64::from(places.by_page.remove(&page) == Some(Place::Reserved));
        }
        self.pool.unreserve(reserved);
    }

    /// A mapping more, or less. Whether it was the last: nobody can map it again, and what was reserved is given back.
    #[must_use]
    pub(crate) fn count_mapping(&self, more: bool) -> bool {
        let mut places = self.places.lock();
        if more {
            places.mappings += 1;
            return false;
        }
        places.mappings = places.mappings.saturating_sub(1);
        let is_last = places.mappings == 0;
        places.is_closed = is_last;
        drop(places);
        if is_last {
            self.release(0..u64::MAX);
        }
        is_last
    }

    /// Nobody maps it any more, nor can: a fault that comes late puts nothing into the page cache.
    pub(crate) fn is_closed(&self) -> bool {
        self.places.lock().is_closed
    }

    /// Takes a page of the pool for a page of the file. `owns`: the reservation is the taker's. `copy`: it's a copy of a page that
    /// has used up the reservation.
    ///
    /// The caller is [`faulting`](Self::faulting) it.
    pub(crate) fn take(self: &Arc<Self>, page: u64, owns: bool, copy: bool) -> Option<HugePage> {
        let mut places = self.places.lock();
        let place = places.by_page.get(&page).copied().filter(|_| owns);
        let reserved = place == Some(Place::Reserved) && !copy;
        if !self.pool.take(reserved) {
            return None;
        }
        // What was in the place, for when the page is put in nowhere.
        let before = match place {
            // A page that was there is on its way out.
            Some(_) if !copy => Place::Reserved,
            Some(place @ Place::Used(_)) => place,
            // It was unmapped, or was never reserved.
            Some(Place::Reserved) | None => return Some(HugePage::new(&self.pool, None)),
        };
        let id = places.next;
        places.next += 1;
        places.by_page.insert(page, Place::Used(id));
        let used = UsedPlace {
            file: Arc::downgrade(self),
            page,
            id,
            before,
        };
        Some(HugePage::new(&self.pool, Some(used)))
    }
}

impl Drop for HugeFile {
    fn drop(&mut self) {
        self.release(0..u64::MAX);
    }
}

/// A page of the pool in use, until it's dropped.
#[derive(Debug)]
pub(crate) struct HugePage {
    pool: HugePool,
    place: Option<UsedPlace>,
    /// It has been put in somewhere. Relaxed: whoever drops it comes after.
    is_used: AtomicBool,
}

/// The place that a page uses.
#[derive(Debug)]
struct UsedPlace {
    file: Weak<HugeFile>,
    page: u64,
    /// The page's number there.
    id: u64,
    /// What the place is again if the page isn't put in: used by the page that it would have been a copy of, or reserved.
    before: Place,
}

impl HugePage {
    fn new(pool: &HugePool, place: Option<UsedPlace>) -> Self {
        HugePage {
            pool: pool.clone(),
            place,
            is_used: AtomicBool::new(false),
        }
    }

    /// It's put in.
    pub(crate) fn set_used(&self) {
        self.is_used.store(true, Ordering::Relaxed);
    }

    /// Another page of the same pool, without a reservation.
    pub(crate) fn another(&self) -> Option<HugePage> {
        let taken = self.pool.take(false);
        taken.then(|| HugePage::new(&self.pool, None))
    }
}

impl Drop for HugePage {
    fn drop(&mut self) {
        let place = self.place.take();
        let file = place.as_ref().and_then(|place| place.file.upgrade());
        let (Some(place), Some(file)) = (place, file) else {
            self.pool.put(false);
            return;
        };
        let mut places = file.places.lock();
        // Of a place that was unmapped, or has another page by now, it's none of its business.
        let mut reserved = false;
        if places.by_page.get(&place.page) == Some(&Place::Used(place.id)) {
            let next = if !self.is_used.load(Ordering::Relaxed) {
                Some(place.before)
            } else if file.is_private {
                Some(Place::Reserved)
            } else {
                // A hole that was punched into shared memory isn't reserved again.
                None
            };
            reserved = next == Some(Place::Reserved);
            match next {
                Some(next) => places.by_page.insert(place.page, next),
                None => places.by_page.remove(&place.page),
            };
        }
        self.pool.put(reserved);
        drop(places);
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod tests {
    use super::*;

    fn counts(pool: &HugePool) -> (u64, u64) {
        let stats = pool.stats();
        (stats.free, stats.reserved)
    }

    #[test]
    fn a_private_place_gets_its_reservation_back_until_it_is_unmapped() {
        let pool = HugePool::new(3);
        let file = HugeFile::new(HUGE_PAGE, pool.clone(), true);
        assert!(file.reserve(0..2, 0));
        assert_eq!(counts(&pool), (3, 2));
        let page = file.take(0, true, false).unwrap();
        assert_eq!(counts(&pool), (2, 1));
        page.set_used();
        drop(page);
        assert_eq!(counts(&pool), (3, 2));
        let page = file.take(0, true, false).unwrap();
        file.release(0..1);
        assert_eq!(counts(&pool), (2, 1));
        drop(page);
        assert_eq!(counts(&pool), (3, 1));
        drop(file);
        assert_eq!(counts(&pool), (3, 0));
    }

    #[test]
    fn a_copy_takes_what_nobody_has_reserved_and_becomes_the_place_s_page() {
        let pool = HugePool::new(3);
        let file = HugeFile::new(HUGE_PAGE, pool.clone(), true);
        assert!(file.reserve(0..2, 0));
        let first = file.take(0, true, false).unwrap();
        first.set_used();
        // Put in nowhere, a copy leaves the place as it was.
        drop(file.take(0, true, true).unwrap());
        assert_eq!(counts(&pool), (2, 1));
        let copy = file.take(0, true, true).unwrap();
        copy.set_used();
        assert_eq!(counts(&pool), (1, 1));
        assert!(file.take(0, false, false).is_none(), "the last is reserved");
        drop(first);
        assert_eq!(counts(&pool), (2, 1));
        drop(copy);
        assert_eq!(counts(&pool), (3, 2));
    }

    #[test]
    fn shared_places_are_reserved_once() {
        let pool = HugePool::new(2);
        let file = HugeFile::new(HUGE_PAGE, pool.clone(), false);
        assert!(file.reserve(0..2, 0));
        assert!(!file.reserve(2..3, 0));
        assert!(!file.count_mapping(true));
        let page = file.take(0, true, false).unwrap();
        drop(page);
        assert_eq!(counts(&pool), (2, 2), "it was put in nowhere");
        let page = file.take(0, true, false).unwrap();
        page.set_used();
        drop(page);
        assert_eq!(counts(&pool), (2, 1));
        assert!(file.count_mapping(false));
        assert_eq!(counts(&pool), (2, 0));
    }
}
