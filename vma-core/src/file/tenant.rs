//! What one space maps of one file.

use std::ops::{ControlFlow, Range};
use std::sync::{Arc, Weak};
use std::{mem, ptr};

use smallvec::SmallVec;
use vma_rcu::sync::{Mutex, planted};

use super::index::{Cursor, Interval, IntervalSet};
use super::mappings::{Mapper, Part};
use super::{FileObject, SpaceId};
use crate::error::PublishError;

/// Parts that are kept in a list; more are in a tree.
const FEW: usize = if cfg!(test) { 2 } else { 6 };
/// Parts that a walk looks at before it lets the lock go.
const BATCH: usize = if cfg!(test) { 2 } else { 32 };

/// A space, as a file knows it that it maps.
pub(super) struct Tenant {
    pub(super) space: Weak<dyn Mapper>,
    /// Held for as long as it takes to look, or to change a few entries. Nothing else is locked meanwhile; the list of its space's tenants
    /// may be locked before.
    parts: Mutex<Parts>,
    #[cfg(loom)]
    number: u64,
}

#[cfg(loom)]
static TENANTS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

/// Pages of a file, from one to before another.
pub(super) type Segment = (u64, u64);

/// What leads to a tenant in its file's index: side by side, so that they cover all between the first and the last of them.
pub(super) type Segments = SmallVec<[Segment; 2]>;

/// What is to be entered in a file's index, or taken out.
pub(super) type Entries = (Arc<Tenant>, Segments);

struct Parts {
    few: SmallVec<[Part; FEW]>,
    /// All of them, in one set, once there were more than few.
    many: Vec<IntervalSet<()>>,
    segments: Segments,
}

fn interval(part: Part) -> Interval {
    Interval {
        first: part.first,
        tie: part.addr,
        end: part.end,
    }
}

fn part(interval: Interval) -> Part {
    Part {
        first: interval.first,
        end: interval.end,
        addr: interval.tie,
    }
}

impl Parts {
    fn new() -> Self {
        Parts {
            few: SmallVec::new(),
            many: Vec::new(),
            segments: SmallVec::new(),
        }
    }

    fn len(&self) -> usize {
        let many = self.many.first().map_or(0, IntervalSet::len);
        self.few.len() + many
    }

    /// Room for some more.
    fn reserve(&mut self, count: usize) -> Result<(), PublishError> {
        self.segments.try_reserve(2).map_err(no_memory)?;
        if self.many.is_empty() && self.few.len() + count <= FEW {
            return Ok(());
        }
        let is_new = self.many.is_empty();
        if is_new {
            self.many.try_reserve_exact(1).map_err(no_memory)?;
            self.many.push(IntervalSet::new());
        }
        let many = &mut self.many[0];
        while let Some(need) = many.needs(self.few.len() + count) {
            let Some(chunk) = need.allocate() else {
                if is_new {
                    self.many.clear();
                }
                return Err(PublishError::NoMemory);
            };
            drop(many.add(chunk));
        }
        for part in self.few.drain(..) {
            many.insert(interval(part), ());
        }
        Ok(())
    }

    /// There is room.
    fn insert(&mut self, part: Part) {
        match self.many.first_mut() {
            None => self.few.push(part),
            Some(many) => many.insert(interval(part), ()),
        }
    }

    fn remove(&mut self, part: Part) -> bool {
        if let Some(many) = self.many.first_mut() {
            return many.remove(interval(part), |()| true).is_some();
        }
        let at = self.few.iter().position(|other| *other == part);
        at.map(|at| self.few.swap_remove(at)).is_some()
    }

    /// Segments that are missing for some pages to be found. They are the larger the more there are already, so that they stay few.
    fn cover(&mut self, (first, end): Segment) -> Segments {
        let hull = self.segments.first().zip(self.segments.last());
        let Some((low, high)) = hull.map(|(low, high)| (low.0, high.1)) else {
            self.segments.push((first, end));
            return self.segments.clone();
        };
        let (len, mut new) = (high - low, Segments::new());
        if first < low {
            let segment = (first.min(low.saturating_sub(len)), low);
            self.segments.insert(0, segment);
            new.push(segment);
        }
        if end > high {
            let segment = (high, end.max(high.saturating_add(len)));
            self.segments.push(segment);
            new.push(segment);
        }
        new
    }

    /// Up to a batch of those that overlap, in order; whether they are the last ones.
    fn overlapping(&self, pages: &Range<u64>, after: &mut Cursor, found: &mut Batch) -> bool {
        let (from, mut is_last) = (*after, true);
        let mut see = |key: Interval| {
            // Parts that differ in their end alone, of one mapping on its way to another, are one.
            if !after.is_at(key) {
                if found.len() == BATCH {
                    is_last = false;
                    return ControlFlow::Break(());
                }
                *after = Cursor::behind(key);
                found.push(part(key));
            } else if let Some(last) = found.last_mut() {
                last.end = last.end.max(key.end);
            }
            ControlFlow::Continue(())
        };
        let overlap = |part: &&Part| part.first < pages.end && part.end > pages.start;
        if let Some(many) = self.many.first() {
            many.overlapping((pages.start, pages.end), from, |key, ()| see(key));
        } else {
            let mut few: SmallVec<[Part; FEW]> = self.few.iter().filter(overlap).copied().collect();
            few.sort_unstable_by_key(|part| (part.first, part.addr));
            let ahead = few
                .into_iter()
                .map(interval)
                .filter(|key| from.is_before(*key));
            let _ = { ahead }.try_for_each(see);
        }
        is_last
    }
}

type Batch = SmallVec<[Part; BATCH]>;

fn no_memory<E>(_: E) -> PublishError {
    PublishError::NoMemory
}

impl Tenant {
    /// In the same order in each execution.
    #[cfg(loom)]
    pub(super) fn salt(&self) -> u64 {
        self.number
    }

    pub(super) fn space_id(&self) -> SpaceId {
        SpaceId::of_weak(&self.space)
    }

    /// Tells segments of tenants apart that begin alike; as long as they live.
    #[cfg(not(loom))]
    pub(super) fn salt(&self) -> u64 {
        (ptr::from_ref(self).addr() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// Parts, if `segment` is the first that leads here.
    pub(super) fn count_at(&self, segment: Segment) -> usize {
        let parts = self.parts.lock();
        let is_first = parts.segments.first() == Some(&segment);
        if is_first { parts.len() } else { 0 }
    }

    /// Calls `f` for each part of these pages, with no lock held.
    pub(super) fn for_each(&self, pages: &Range<u64>, mut f: impl FnMut(Part)) {
        let mut after = Cursor::default();
        loop {
            let mut batch = Batch::new();
            let is_last = self.parts.lock().overlapping(pages, &mut after, &mut batch);
            batch.into_iter().for_each(&mut f);
            if is_last {
                return;
            }
        }
    }
}

/// The files that a space maps: its tenant of each, which has parts. By address of the file, in order.
///
/// A call changes its tenants with this locked, so that none is found here that is on its way out.
pub(crate) struct Tenancies(Mutex<Vec<(usize, Arc<Tenant>)>>);

impl Default for Tenancies {
    fn default() -> Self {
        Tenancies(Mutex::new(Vec::new()))
    }
}

fn place(list: &[(usize, Arc<Tenant>)], file: &FileObject) -> Result<usize, usize> {
    let address = ptr::from_ref(file).addr();
    list.binary_search_by_key(&address, |(address, _)| *address)
}

impl Tenancies {
    /// Notes parts of a file; what has to be entered in the index so that they are found, if anything. On an error none is there.
    pub(super) fn add(
        &self,
        file: &FileObject,
        space: &impl Fn() -> Weak<dyn Mapper>,
        new: &(impl Iterator<Item = Part> + Clone),
    ) -> Result<Option<Entries>, PublishError> {
        let of_all = |all: Segment, part: Part| (all.0.min(part.first), all.1.max(part.end));
        let all = new.clone().fold((u64::MAX, 0), of_all);
        let add = |parts: &mut Parts| -> Result<Segments, PublishError> {
            parts.reserve(new.clone().count())?;
            new.clone().for_each(|part| parts.insert(part));
            Ok(parts.cover(all))
        };
        let mut list = self.0.lock();
        match place(&list, file) {
            Ok(at) => {
                let tenant = &list[at].1;
                let segments = add(&mut tenant.parts.lock())?;
                Ok((!segments.is_empty()).then(|| (Arc::clone(tenant), segments)))
            }
            Err(at) => {
                list.try_reserve(1).map_err(no_memory)?;
                let mut parts = Parts::new();
                let segments = add(&mut parts)?;
                let tenant = Arc::new(Tenant {
                    space: space(),
                    parts: Mutex::new(parts),
                    #[cfg(loom)]
                    number: TENANTS.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
                });
                let address = ptr::from_ref(file).addr();
                list.insert(at, (address, Arc::clone(&tenant)));
                Ok(Some((tenant, segments)))
            }
        }
    }

    /// Segments couldn't be entered.
    pub(super) fn uncover(&self, file: &FileObject, segments: &Segments) {
        let list = self.0.lock();
        if let Ok(at) = place(&list, file) {
            let mut parts = list[at].1.parts.lock();
            parts.segments.retain(|segment| !segments.contains(segment));
        }
    }

    /// Takes parts away. When they were the last ones the tenant goes: what is to be taken out of the index.
    pub(super) fn remove(
        &self,
        file: &FileObject,
        old: impl Iterator<Item = Part>,
    ) -> Option<Entries> {
        let mut list = self.0.lock();
        let at = place(&list, file).ok();
        debug_assert!(at.is_some(), "it was linked");
        let mut parts = list[at?].1.parts.lock();
        for part in old {
            let removed = parts.remove(part);
            debug_assert!(removed, "{part:?} was linked");
        }
        if parts.len() > 0 {
            return None;
        }
        let segments = mem::take(&mut parts.segments);
        drop(parts);
        if planted("late_forget") {
            drop(list);
            list = self.0.lock();
        }
        let (_, tenant) = list.remove(at?);
        Some((tenant, segments))
    }
}
