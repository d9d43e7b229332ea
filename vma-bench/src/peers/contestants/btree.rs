//! `BTreeMap<start, (end, boxed record)>`: bare, and behind the two reader-writer locks.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::peers::contest::{Contestant, Edit, EditJob, Editable, Find, Hit, ReadJob};
use crate::peers::workload::{Rec, Workload};

/// The map that a user would write first.
pub type Map = BTreeMap<u64, (u64, Box<Rec>)>;

fn sorted(workload: &Workload) -> Map {
    workload
        .sorted()
        .map(|(id, range)| (range.start, (range.end, Box::new(Rec::new(id)))))
        .collect()
}

fn grown(workload: &Workload) -> Map {
    let mut map = Map::new();
    for (id, range) in workload.in_random_order() {
        map.insert(range.start, (range.end, Box::new(Rec::new(id))));
    }
    map
}

#[inline(always)]
fn find(map: &Map, addr: u64) -> Option<Hit> {
    let (&start, (end, rec)) = map.range(..=addr).next_back()?;
    (addr < *end).then(|| Hit::new(start, *end, rec))
}

/// The three edits of a split: the first part shrinks in place, two are put in.
#[inline(always)]
fn split(map: &mut Map, whole: &Range<u64>, cuts: (u64, u64), [_, middle, last]: [Rec; 3]) {
    if let Some(first) = map.get_mut(&whole.start) {
        first.0 = cuts.0;
    }
    map.insert(cuts.0, (cuts.1, Box::new(middle)));
    map.insert(cuts.1, (whole.end, Box::new(last)));
}

/// The three edits back.
#[inline(always)]
fn join(map: &mut Map, whole: &Range<u64>, cuts: (u64, u64)) {
    map.remove(&cuts.1);
    map.remove(&cuts.0);
    if let Some(first) = map.get_mut(&whole.start) {
        first.0 = whole.end;
    }
}

/// No lock at all: the baseline of the edits. (This lock is held over a whole series.)
#[derive(Debug)]
pub struct Bare(parking_lot::RwLock<Map>);

impl Contestant for Bare {
    const NAME: &'static str = "BTreeMap";

    fn bulk(workload: &Workload) -> Self {
        Self(parking_lot::RwLock::new(sorted(workload)))
    }

    fn grown(workload: &Workload) -> Option<Self> {
        Some(Self(parking_lot::RwLock::new(grown(workload))))
    }

    fn read<J: ReadJob>(&self, job: J) -> J::Out {
        job.run(&mut BareReader(&self.0.read()))
    }
}

struct BareReader<'a>(&'a Map);

impl Find for BareReader<'_> {
    #[inline(always)]
    fn find(&mut self, addr: u64) -> Option<Hit> {
        find(self.0, addr)
    }
}

impl Editable for Bare {
    const SURVIVES_WRITER: bool = false;

    fn edit<J: EditJob>(&self, job: J) -> J::Out {
        job.run(&mut BareWriter(&mut self.0.write()))
    }
}

struct BareWriter<'a>(&'a mut Map);

impl Edit for BareWriter<'_> {
    #[inline(always)]
    fn remove(&mut self, range: &Range<u64>) {
        self.0.remove(&range.start);
    }

    #[inline(always)]
    fn insert(&mut self, range: &Range<u64>, rec: Rec) {
        self.0.insert(range.start, (range.end, Box::new(rec)));
    }

    #[inline(always)]
    fn split(&mut self, whole: &Range<u64>, cuts: (u64, u64), recs: [Rec; 3]) {
        split(self.0, whole, cuts, recs);
    }

    #[inline(always)]
    fn join(&mut self, whole: &Range<u64>, cuts: (u64, u64), _rec: Rec) {
        join(self.0, whole, cuts);
    }
}

/// The two locks differ in the name of their type and in poisoning alone.
macro_rules! locked {
    ($type:ident, $reader:ident, $writer:ident, $lock:ty, $name:literal, $read:expr, $write:expr) => {
        #[doc = concat!("`", $name, "`: every lookup takes the lock to read, every edit to write.")]
        #[derive(Debug)]
        pub struct $type($lock);

        impl Contestant for $type {
            const NAME: &'static str = $name;

            fn bulk(workload: &Workload) -> Self {
                Self(<$lock>::new(sorted(workload)))
            }

            fn grown(workload: &Workload) -> Option<Self> {
                Some(Self(<$lock>::new(grown(workload))))
            }

            fn read<J: ReadJob>(&self, job: J) -> J::Out {
                job.run(&mut $reader(&self.0))
            }
        }

        struct $reader<'a>(&'a $lock);

        impl Find for $reader<'_> {
            #[inline(always)]
            fn find(&mut self, addr: u64) -> Option<Hit> {
                find(&$read(self.0), addr)
            }
        }

        impl Editable for $type {
            fn edit<J: EditJob>(&self, job: J) -> J::Out {
                job.run(&mut $writer(&self.0))
            }
        }

        struct $writer<'a>(&'a $lock);

        impl Edit for $writer<'_> {
            #[inline(always)]
            fn remove(&mut self, range: &Range<u64>) {
                $write(self.0).remove(&range.start);
            }

            #[inline(always)]
            fn insert(&mut self, range: &Range<u64>, rec: Rec) {
                let entry = (range.end, Box::new(rec));
                $write(self.0).insert(range.start, entry);
            }

            #[inline(always)]
            fn split(&mut self, whole: &Range<u64>, cuts: (u64, u64), recs: [Rec; 3]) {
                split(&mut $write(self.0), whole, cuts, recs);
            }

            #[inline(always)]
            fn join(&mut self, whole: &Range<u64>, cuts: (u64, u64), _rec: Rec) {
                join(&mut $write(self.0), whole, cuts);
            }
        }
    };
}

/// A poisoned lock can't be: nothing panics under it.
fn std_read(lock: &std::sync::RwLock<Map>) -> std::sync::RwLockReadGuard<'_, Map> {
    lock.read()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn std_write(lock: &std::sync::RwLock<Map>) -> std::sync::RwLockWriteGuard<'_, Map> {
    lock.write()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

locked!(
    StdLocked,
    StdReader,
    StdWriter,
    std::sync::RwLock<Map>,
    "RwLock<BTreeMap>",
    std_read,
    std_write
);
locked!(
    ParkingLocked,
    ParkingReader,
    ParkingWriter,
    parking_lot::RwLock<Map>,
    "parking_lot::RwLock<BTreeMap>",
    parking_lot::RwLock::read,
    parking_lot::RwLock::write
);
