//! This project's tree: a pin per lookup, one transaction per edit.

use std::ops::Range;

use parking_lot::Mutex;
use vma_rcu::reclaim::{Domain, Guard, Reader as PinReader};
use vma_rcu::tree::{RangeTree, Record, Writer as WriterHalf};

use crate::peers::contest::{Contestant, Edit, EditJob, Editable, Find, Hit, ReadJob};
use crate::peers::workload::{Rec, Workload};

impl Record for Rec {}

/// The tree with its writing half in the lock that a user would have.
#[derive(Debug)]
pub struct Ours {
    domain: Domain,
    tree: RangeTree<Rec>,
    writer: Mutex<WriterHalf<Rec>>,
}

impl Ours {
    fn empty() -> Self {
        let domain = Domain::default();
        let (tree, writer) = RangeTree::new(&domain);
        Self {
            domain,
            tree,
            writer: Mutex::new(writer),
        }
    }

    /// The tree and its writing half, for cases of its own.
    pub fn halves(&self) -> (&RangeTree<Rec>, &Mutex<WriterHalf<Rec>>) {
        (&self.tree, &self.writer)
    }

    fn filled(workload: &Workload) -> Self {
        let ours = Self::empty();
        let entries = workload.sorted().map(|(id, range)| (range, Rec::new(id)));
        ours.tree
            .build(&mut ours.writer.lock(), entries)
            .expect("the layout is sorted and disjoint");
        ours
    }

    fn inserted(workload: &Workload) -> Self {
        let ours = Self::empty();
        {
            let mut half = ours.writer.lock();
            let mut writer = Writer {
                ours: &ours,
                half: &mut half,
            };
            for (id, range) in workload.in_random_order() {
                writer.insert(&range, Rec::new(id));
            }
        }
        // What is counted as its memory is the tree, not what waits for a grace period.
        ours.domain
            .synchronize(None)
            .expect("no reader is registered yet");
        ours
    }
}

impl Contestant for Ours {
    const NAME: &'static str = "RangeTree";

    fn bulk(workload: &Workload) -> Self {
        Self::filled(workload)
    }

    fn grown(workload: &Workload) -> Option<Self> {
        Some(Self::inserted(workload))
    }

    fn read<J: ReadJob>(&self, job: J) -> J::Out {
        let pins = self.domain.register();
        job.run(&mut Reader {
            tree: &self.tree,
            pins,
        })
    }
}

struct Reader<'a> {
    tree: &'a RangeTree<Rec>,
    pins: PinReader,
}

impl Find for Reader<'_> {
    #[inline(always)]
    fn find(&mut self, addr: u64) -> Option<Hit> {
        let guard = self.pins.pin();
        let entry = self.tree.find(addr, &guard)?;
        Some(Hit::new(entry.start, entry.end, entry.value))
    }
}

impl Editable for Ours {
    fn edit<J: EditJob>(&self, job: J) -> J::Out {
        let mut half = self.writer.lock();
        job.run(&mut Writer {
            ours: self,
            half: &mut half,
        })
    }
}

struct Writer<'a> {
    ours: &'a Ours,
    half: &'a mut WriterHalf<Rec>,
}

impl Writer<'_> {
    /// One transaction from begin to end, and then what a user does after unlocking.
    #[inline(always)]
    fn splice<const N: usize>(&mut self, window: Range<u64>, entries: [(Range<u64>, Rec); N]) {
        let mut transaction = self.ours.tree.write(self.half);
        transaction
            .splice(window, entries)
            .expect("the window holds whole entries");
        let prepared = transaction.prepare().expect("memory suffices");
        drop(prepared.commit());
        self.ours.domain.collect();
    }
}

impl Edit for Writer<'_> {
    #[inline(always)]
    fn remove(&mut self, range: &Range<u64>) {
        self.splice(range.clone(), []);
    }

    #[inline(always)]
    fn insert(&mut self, range: &Range<u64>, rec: Rec) {
        self.splice(range.clone(), [(range.clone(), rec)]);
    }

    #[inline(always)]
    fn split(&mut self, whole: &Range<u64>, cuts: (u64, u64), [first, middle, last]: [Rec; 3]) {
        self.splice(
            whole.clone(),
            [
                (whole.start..cuts.0, first),
                (cuts.0..cuts.1, middle),
                (cuts.1..whole.end, last),
            ],
        );
    }

    #[inline(always)]
    fn join(&mut self, whole: &Range<u64>, _cuts: (u64, u64), rec: Rec) {
        self.splice(whole.clone(), [(whole.clone(), rec)]);
    }
}

/// The same tree with one pin for a whole series of lookups: what the pin costs.
#[derive(Debug)]
pub struct OnePin(Ours);

impl Contestant for OnePin {
    const NAME: &'static str = "RangeTree, one pin";

    fn bulk(workload: &Workload) -> Self {
        Self(Ours::filled(workload))
    }

    fn grown(workload: &Workload) -> Option<Self> {
        Some(Self(Ours::inserted(workload)))
    }

    fn read<J: ReadJob>(&self, job: J) -> J::Out {
        let pins = self.0.domain.register();
        let guard = pins.pin();
        job.run(&mut Pinned {
            tree: &self.0.tree,
            guard: &guard,
        })
    }
}

struct Pinned<'a> {
    tree: &'a RangeTree<Rec>,
    guard: &'a Guard<'a>,
}

impl Find for Pinned<'_> {
    #[inline(always)]
    fn find(&mut self, addr: u64) -> Option<Hit> {
        let entry = self.tree.find(addr, self.guard)?;
        Some(Hit::new(entry.start, entry.end, entry.value))
    }
}
