//! The concurrent ordered maps: `scc::TreeIndex`, `concurrent-map`, `crossbeam-skiplist`.
//!
//! None of them can replace several entries at once: a split is three edits here that readers see one by one.

use std::ops::{Bound, Range};
use std::sync::Arc;

use concurrent_map::ConcurrentMap;
use crossbeam_skiplist::SkipMap;
use parking_lot::Mutex;
use scc::{Guard, TreeIndex};

use crate::peers::contest::{Contestant, Edit, EditJob, Editable, Find, Hit, ReadJob};
use crate::peers::workload::{Rec, Workload};

/// `scc::TreeIndex` with the *end* as key (as in Linux's old tree): its ranges are walked upwards, and so the first key
/// past an address is its one cheap neighbour query.
///
/// In 3.8.8 the start of a range is approximated and then reached leaf by leaf, from the far end of the tree for a few
/// addresses (6 of 32,768 with 10k entries, a millisecond each; with a million entries one lookup took 42 s). That shows
/// in its spread and tail, and a layout of a million is not measured with it.
pub struct Scc(TreeIndex<u64, (u64, Arc<Rec>)>);

impl std::fmt::Debug for Scc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Scc").finish_non_exhaustive()
    }
}

fn scc_filled(entries: impl Iterator<Item = (u64, Range<u64>)>) -> Scc {
    let tree = TreeIndex::new();
    for (id, range) in entries {
        let _: Result<(), _> = tree.insert_sync(range.end, (range.start, Arc::new(Rec::new(id))));
    }
    Scc(tree)
}

impl Contestant for Scc {
    const NAME: &'static str = "scc::TreeIndex";

    fn bulk(workload: &Workload) -> Self {
        scc_filled(workload.sorted())
    }

    fn grown(workload: &Workload) -> Option<Self> {
        Some(scc_filled(workload.in_random_order()))
    }

    fn read<J: ReadJob>(&self, job: J) -> J::Out {
        job.run(&mut SccReader(&self.0))
    }
}

struct SccReader<'a>(&'a TreeIndex<u64, (u64, Arc<Rec>)>);

impl Find for SccReader<'_> {
    #[inline(always)]
    fn find(&mut self, addr: u64) -> Option<Hit> {
        let guard = Guard::new();
        let (&end, (start, rec)) = self.0.range(addr + 1.., &guard).next()?;
        (*start <= addr).then(|| Hit::new(*start, end, rec))
    }
}

impl Editable for Scc {
    fn edit<J: EditJob>(&self, job: J) -> J::Out {
        job.run(&mut SccWriter(&self.0))
    }
}

struct SccWriter<'a>(&'a TreeIndex<u64, (u64, Arc<Rec>)>);

impl SccWriter<'_> {
    fn put(&self, start: u64, end: u64, rec: Rec) {
        let _: Result<(), _> = self.0.insert_sync(end, (start, Arc::new(rec)));
    }
}

impl Edit for SccWriter<'_> {
    fn remove(&mut self, range: &Range<u64>) {
        self.0.remove_sync(&range.end);
    }

    fn insert(&mut self, range: &Range<u64>, rec: Rec) {
        self.put(range.start, range.end, rec);
    }

    fn split(&mut self, whole: &Range<u64>, cuts: (u64, u64), [first, middle, last]: [Rec; 3]) {
        self.0.remove_sync(&whole.end);
        self.put(cuts.1, whole.end, last);
        self.put(whole.start, cuts.0, first);
        self.put(cuts.0, cuts.1, middle);
    }

    fn join(&mut self, whole: &Range<u64>, cuts: (u64, u64), rec: Rec) {
        self.0.remove_sync(&cuts.0);
        self.0.remove_sync(&cuts.1);
        self.0.remove_sync(&whole.end);
        self.put(whole.start, whole.end, rec);
    }
}

type Cm = ConcurrentMap<u64, (u64, Arc<Rec>)>;

/// `concurrent-map`: a lookup clones the value out, here a shared pointer.
pub struct Concurrent(Mutex<Cm>);

impl std::fmt::Debug for Concurrent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Concurrent").finish_non_exhaustive()
    }
}

fn concurrent_filled(entries: impl Iterator<Item = (u64, Range<u64>)>) -> Concurrent {
    let map = Cm::new();
    for (id, range) in entries {
        map.insert(range.start, (range.end, Arc::new(Rec::new(id))));
    }
    Concurrent(Mutex::new(map))
}

impl Contestant for Concurrent {
    const NAME: &'static str = "concurrent-map";

    fn bulk(workload: &Workload) -> Self {
        concurrent_filled(workload.sorted())
    }

    fn grown(workload: &Workload) -> Option<Self> {
        Some(concurrent_filled(workload.in_random_order()))
    }

    fn read<J: ReadJob>(&self, job: J) -> J::Out {
        let handle = self.0.lock().clone();
        job.run(&mut ConcurrentHandle(handle))
    }
}

struct ConcurrentHandle(Cm);

impl Find for ConcurrentHandle {
    #[inline(always)]
    fn find(&mut self, addr: u64) -> Option<Hit> {
        let (start, (end, rec)) = self.0.get_lte(&addr)?;
        (addr < end).then(|| Hit::new(start, end, &rec))
    }
}

impl Editable for Concurrent {
    fn edit<J: EditJob>(&self, job: J) -> J::Out {
        let handle = self.0.lock().clone();
        job.run(&mut ConcurrentHandle(handle))
    }
}

impl Edit for ConcurrentHandle {
    fn remove(&mut self, range: &Range<u64>) {
        self.0.remove(&range.start);
    }

    fn insert(&mut self, range: &Range<u64>, rec: Rec) {
        self.0.insert(range.start, (range.end, Arc::new(rec)));
    }

    fn split(&mut self, whole: &Range<u64>, cuts: (u64, u64), [first, middle, last]: [Rec; 3]) {
        self.0.insert(whole.start, (cuts.0, Arc::new(first)));
        self.0.insert(cuts.0, (cuts.1, Arc::new(middle)));
        self.0.insert(cuts.1, (whole.end, Arc::new(last)));
    }

    fn join(&mut self, whole: &Range<u64>, cuts: (u64, u64), rec: Rec) {
        self.0.remove(&cuts.1);
        self.0.remove(&cuts.0);
        self.0.insert(whole.start, (whole.end, Arc::new(rec)));
    }
}

/// `crossbeam-skiplist`. Its `range()` leaks in 0.1.3; `upper_bound` doesn't.
pub struct Skip(SkipMap<u64, (u64, Box<Rec>)>);

impl std::fmt::Debug for Skip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Skip").finish_non_exhaustive()
    }
}

fn skip_filled(entries: impl Iterator<Item = (u64, Range<u64>)>) -> Skip {
    let map = SkipMap::new();
    for (id, range) in entries {
        map.insert(range.start, (range.end, Box::new(Rec::new(id))));
    }
    Skip(map)
}

impl Contestant for Skip {
    const NAME: &'static str = "crossbeam-skiplist";

    fn bulk(workload: &Workload) -> Self {
        skip_filled(workload.sorted())
    }

    fn grown(workload: &Workload) -> Option<Self> {
        Some(skip_filled(workload.in_random_order()))
    }

    fn read<J: ReadJob>(&self, job: J) -> J::Out {
        job.run(&mut SkipHandle(&self.0))
    }
}

struct SkipHandle<'a>(&'a SkipMap<u64, (u64, Box<Rec>)>);

impl Find for SkipHandle<'_> {
    #[inline(always)]
    fn find(&mut self, addr: u64) -> Option<Hit> {
        let entry = self.0.upper_bound(Bound::Included(&addr))?;
        let (end, rec) = entry.value();
        (addr < *end).then(|| Hit::new(*entry.key(), *end, rec))
    }
}

impl Editable for Skip {
    fn edit<J: EditJob>(&self, job: J) -> J::Out {
        job.run(&mut SkipHandle(&self.0))
    }
}

impl Edit for SkipHandle<'_> {
    fn remove(&mut self, range: &Range<u64>) {
        self.0.remove(&range.start);
    }

    fn insert(&mut self, range: &Range<u64>, rec: Rec) {
        self.0.insert(range.start, (range.end, Box::new(rec)));
    }

    fn split(&mut self, whole: &Range<u64>, cuts: (u64, u64), [first, middle, last]: [Rec; 3]) {
        self.0.insert(whole.start, (cuts.0, Box::new(first)));
        self.0.insert(cuts.0, (cuts.1, Box::new(middle)));
        self.0.insert(cuts.1, (whole.end, Box::new(last)));
    }

    fn join(&mut self, whole: &Range<u64>, cuts: (u64, u64), rec: Rec) {
        self.0.remove(&cuts.1);
        self.0.remove(&cuts.0);
        self.0.insert(whole.start, (whole.end, Box::new(rec)));
    }
}
