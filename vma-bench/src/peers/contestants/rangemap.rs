//! `RwLock<RangeMap>`: the range map of the ecosystem, behind the standard lock.

use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

use rangemap::RangeMap;

use crate::peers::contest::{Contestant, Edit, EditJob, Editable, Find, Hit, ReadJob};
use crate::peers::workload::{Rec, Workload};

/// Values are shared pointers, since the map clones them when it splits a range.
#[derive(Debug)]
pub struct Locked(RwLock<RangeMap<u64, Arc<Rec>>>);

impl Contestant for Locked {
    const NAME: &'static str = "RwLock<RangeMap>";

    fn bulk(workload: &Workload) -> Self {
        let map = workload
            .sorted()
            .map(|(id, range)| (range, Arc::new(Rec::new(id))))
            .collect();
        Self(RwLock::new(map))
    }

    fn grown(workload: &Workload) -> Option<Self> {
        let mut map = RangeMap::new();
        for (id, range) in workload.in_random_order() {
            map.insert(range, Arc::new(Rec::new(id)));
        }
        Some(Self(RwLock::new(map)))
    }

    fn read<J: ReadJob>(&self, job: J) -> J::Out {
        job.run(&mut Reader(&self.0))
    }
}

struct Reader<'a>(&'a RwLock<RangeMap<u64, Arc<Rec>>>);

impl Find for Reader<'_> {
    #[inline(always)]
    fn find(&mut self, addr: u64) -> Option<Hit> {
        let map = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let (range, rec) = map.get_key_value(&addr)?;
        Some(Hit::new(range.start, range.end, rec))
    }
}

impl Editable for Locked {
    fn edit<J: EditJob>(&self, job: J) -> J::Out {
        job.run(&mut Writer(&self.0))
    }
}

struct Writer<'a>(&'a RwLock<RangeMap<u64, Arc<Rec>>>);

impl Writer<'_> {
    fn with(&self, edit: impl FnOnce(&mut RangeMap<u64, Arc<Rec>>)) {
        edit(&mut self.0.write().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Edit for Writer<'_> {
    fn remove(&mut self, range: &Range<u64>) {
        self.with(|map| map.remove(range.clone()));
    }

    fn insert(&mut self, range: &Range<u64>, rec: Rec) {
        let rec = Arc::new(rec);
        self.with(|map| map.insert(range.clone(), rec));
    }

    /// One insertion over the middle splits the rest by itself; the last third then gets its own record.
    fn split(&mut self, whole: &Range<u64>, cuts: (u64, u64), [_, middle, last]: [Rec; 3]) {
        let (middle, last) = (Arc::new(middle), Arc::new(last));
        self.with(|map| {
            map.insert(cuts.0..cuts.1, middle);
            map.insert(cuts.1..whole.end, last);
        });
    }

    fn join(&mut self, whole: &Range<u64>, _cuts: (u64, u64), rec: Rec) {
        let rec = Arc::new(rec);
        self.with(|map| map.insert(whole.clone(), rec));
    }
}
