//! `left-right` over two copies of a `BTreeMap`: wait-free readers, every edit done twice and published.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use left_right::{Absorb, ReadHandle, ReadHandleFactory, WriteHandle};
use parking_lot::Mutex;

use crate::peers::contest::{Contestant, Edit, EditJob, Editable, Find, Hit, ReadJob};
use crate::peers::workload::{Rec, Workload};

/// Records are shared by the two copies.
#[derive(Debug, Default, Clone)]
struct Map(BTreeMap<u64, (u64, Arc<Rec>)>);

enum Op {
    Insert(u64, u64, Arc<Rec>),
    Remove(u64),
    Resize(u64, u64),
}

impl Absorb<Op> for Map {
    fn absorb_first(&mut self, op: &mut Op, _other: &Self) {
        match op {
            Op::Insert(start, end, rec) => {
                self.0.insert(*start, (*end, Arc::clone(rec)));
            }
            Op::Remove(start) => {
                self.0.remove(start);
            }
            Op::Resize(start, end) => {
                if let Some(entry) = self.0.get_mut(start) {
                    entry.0 = *end;
                }
            }
        }
    }

    fn sync_with(&mut self, first: &Self) {
        *self = first.clone();
    }
}

/// The two halves; a reader is made from the factory.
pub struct LeftRight {
    writer: Mutex<WriteHandle<Map, Op>>,
    readers: Mutex<ReadHandleFactory<Map>>,
}

impl std::fmt::Debug for LeftRight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LeftRight").finish_non_exhaustive()
    }
}

fn filled(entries: impl Iterator<Item = (u64, Range<u64>)>) -> LeftRight {
    let (mut writer, reader) = left_right::new::<Map, Op>();
    writer.extend(
        entries.map(|(id, range)| Op::Insert(range.start, range.end, Arc::new(Rec::new(id)))),
    );
    writer.publish();
    // The second publish brings the other copy level, as it is in steady state.
    writer.publish();
    LeftRight {
        writer: Mutex::new(writer),
        readers: Mutex::new(reader.factory()),
    }
}

impl Contestant for LeftRight {
    const NAME: &'static str = "left-right<BTreeMap>";

    fn bulk(workload: &Workload) -> Self {
        filled(workload.sorted())
    }

    fn grown(workload: &Workload) -> Option<Self> {
        Some(filled(workload.in_random_order()))
    }

    fn read<J: ReadJob>(&self, job: J) -> J::Out {
        let handle = self.readers.lock().handle();
        job.run(&mut Reader(handle))
    }
}

struct Reader(ReadHandle<Map>);

impl Find for Reader {
    #[inline(always)]
    fn find(&mut self, addr: u64) -> Option<Hit> {
        let map = self.0.enter()?;
        let (&start, (end, rec)) = map.0.range(..=addr).next_back()?;
        (addr < *end).then(|| Hit::new(start, *end, rec))
    }
}

impl Editable for LeftRight {
    fn edit<J: EditJob>(&self, job: J) -> J::Out {
        job.run(&mut Writer(&mut self.writer.lock()))
    }
}

struct Writer<'a>(&'a mut WriteHandle<Map, Op>);

impl Edit for Writer<'_> {
    fn remove(&mut self, range: &Range<u64>) {
        self.0.append(Op::Remove(range.start));
        self.0.publish();
    }

    fn insert(&mut self, range: &Range<u64>, rec: Rec) {
        self.0
            .append(Op::Insert(range.start, range.end, Arc::new(rec)));
        self.0.publish();
    }

    fn split(&mut self, whole: &Range<u64>, cuts: (u64, u64), [_, middle, last]: [Rec; 3]) {
        self.0.append(Op::Resize(whole.start, cuts.0));
        self.0.append(Op::Insert(cuts.0, cuts.1, Arc::new(middle)));
        self.0.append(Op::Insert(cuts.1, whole.end, Arc::new(last)));
        self.0.publish();
    }

    fn join(&mut self, whole: &Range<u64>, cuts: (u64, u64), _rec: Rec) {
        self.0.append(Op::Remove(cuts.1));
        self.0.append(Op::Remove(cuts.0));
        self.0.append(Op::Resize(whole.start, whole.end));
        self.0.publish();
    }
}
