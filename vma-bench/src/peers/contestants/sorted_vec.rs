//! `ArcSwap<sorted Vec>`: readers load a pointer and search by bisection; every edit copies the vector.

use std::ops::Range;
use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::peers::contest::{Contestant, Edit, EditJob, Editable, Find, Hit, ReadJob};
use crate::peers::workload::{Rec, Workload};

type Entries = Vec<(u64, u64, Arc<Rec>)>;

/// A vector that is replaced as a whole.
#[derive(Debug)]
pub struct Swapped(ArcSwap<Entries>);

impl Contestant for Swapped {
    const NAME: &'static str = "ArcSwap<sorted Vec>";

    fn bulk(workload: &Workload) -> Self {
        let entries: Entries = workload
            .sorted()
            .map(|(id, range)| (range.start, range.end, Arc::new(Rec::new(id))))
            .collect();
        Self(ArcSwap::from_pointee(entries))
    }

    fn read<J: ReadJob>(&self, job: J) -> J::Out {
        job.run(&mut Reader(&self.0))
    }
}

struct Reader<'a>(&'a ArcSwap<Entries>);

impl Find for Reader<'_> {
    #[inline(always)]
    fn find(&mut self, addr: u64) -> Option<Hit> {
        let entries = self.0.load();
        let after = entries.partition_point(|entry| entry.0 <= addr);
        let (start, end, rec) = entries.get(after.checked_sub(1)?)?;
        (addr < *end).then(|| Hit::new(*start, *end, rec))
    }
}

impl Editable for Swapped {
    fn edit<J: EditJob>(&self, job: J) -> J::Out {
        job.run(&mut Writer(&self.0))
    }
}

/// Edits come from one thread at a time, so that nothing is lost between load and store.
struct Writer<'a>(&'a ArcSwap<Entries>);

impl Writer<'_> {
    /// Replaces the `count` entries from the one at `start` by `new`.
    fn replace<const N: usize>(&self, start: u64, count: usize, new: [(u64, u64, Arc<Rec>); N]) {
        let old = self.0.load();
        let at = old.partition_point(|entry| entry.0 < start);
        let mut entries = Entries::with_capacity(old.len() + N - count.min(N));
        entries.extend_from_slice(&old[..at]);
        entries.extend(new);
        entries.extend_from_slice(&old[at + count..]);
        self.0.store(Arc::new(entries));
    }
}

impl Edit for Writer<'_> {
    fn remove(&mut self, range: &Range<u64>) {
        self.replace(range.start, 1, []);
    }

    fn insert(&mut self, range: &Range<u64>, rec: Rec) {
        self.replace(range.start, 0, [(range.start, range.end, Arc::new(rec))]);
    }

    fn split(&mut self, whole: &Range<u64>, cuts: (u64, u64), recs: [Rec; 3]) {
        let [first, middle, last] = recs.map(Arc::new);
        self.replace(
            whole.start,
            1,
            [
                (whole.start, cuts.0, first),
                (cuts.0, cuts.1, middle),
                (cuts.1, whole.end, last),
            ],
        );
    }

    fn join(&mut self, whole: &Range<u64>, _cuts: (u64, u64), rec: Rec) {
        self.replace(whole.start, 3, [(whole.start, whole.end, Arc::new(rec))]);
    }
}
