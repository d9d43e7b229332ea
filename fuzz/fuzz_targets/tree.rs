//! `RangeTree` beside a `BTreeMap`: the checker and a full comparison after every transaction, snapshots
//! that must stay what they were.
#![no_main]

use std::collections::BTreeMap;
use std::ops::Range;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use vma_rcu::reclaim::{Domain, Guard};
use vma_rcu::tree::{EditError, GapRequest, Iter, RangeTree, Record, Snapshot, Writer};

/// Freed memory is poisoned by the address sanitizer: reading the box is the check.
struct Value(Box<u32>);

impl Record for Value {
    fn start_gap(&self) -> u64 {
        if self.0.is_multiple_of(7) { 16 } else { 0 }
    }
}

type Model = BTreeMap<u64, (u64, u32)>;

/// Addresses are small, so that operations meet.
#[derive(Arbitrary, Debug)]
enum Op {
    Splice {
        at: u16,
        len: u8,
        pieces: [(u8, u8); 3],
    },
    /// As it comes: overlapping windows, entries out of order, straddled borders.
    Raw {
        windows: [(u16, u8); 2],
        entry: (u16, u8),
    },
    Remove(u16),
    Split(u16),
    Fill {
        at: u16,
        step: u8,
        count: u8,
    },
    Clear {
        at: u16,
        len: u16,
    },
    Snapshot,
    /// Begins an iteration, or takes a step in every one that is under way.
    Begin,
    Step(u8),
    Release,
    Abandon {
        at: u16,
    },
    Collect,
    Gap {
        len: u8,
        align: u8,
        offset: u8,
        from: u16,
        to: u16,
    },
    Lookup(u16),
}

struct World<'g> {
    tree: &'g RangeTree<Value>,
    writer: Writer<Value>,
    model: Model,
    guard: &'g Guard<'g>,
    snapshots: Vec<(Snapshot<'g, Value>, Model)>,
    /// Iterations under way, and where they are.
    flights: Vec<(Iter<'g, Value>, u64)>,
    next: u32,
}

type Edit = (Range<u64>, Vec<Range<u64>>);

impl World<'_> {
    fn whole(&self, lo: u64, len: u64) -> Range<u64> {
        let mut window = lo..lo + len.max(1);
        let touched = self
            .model
            .range(..window.end)
            .filter(|(_, (end, _))| *end > window.start);
        for (start, (end, _)) in touched.map(|(s, e)| (*s, *e)).collect::<Vec<_>>() {
            window = window.start.min(start)..window.end.max(end);
        }
        window
    }

    fn entry_at(&self, at: u16) -> Option<(u64, u64)> {
        let next = self
            .model
            .range(u64::from(at)..)
            .next()
            .or(self.model.iter().next());
        next.map(|(start, (end, _))| (*start, *end))
    }

    /// The edits on the model; `None` where the tree must refuse them.
    fn expected(&self, edits: &[Edit]) -> Option<(Model, u32)> {
        let mut windows: Vec<_> = edits.iter().map(|(window, _)| window.clone()).collect();
        windows.sort_by_key(|window| window.start);
        if windows.windows(2).any(|pair| pair[0].end > pair[1].start) {
            return None;
        }
        let mut model = self.model.clone();
        let mut next = self.next;
        for (window, entries) in edits {
            if window.is_empty() {
                return None;
            }
            let meets = |start: u64, end: u64| start < window.end && end > window.start;
            for (start, (end, _)) in self.model.iter().map(|(s, e)| (*s, *e)) {
                if meets(start, end) {
                    if start < window.start || end > window.end {
                        return None;
                    }
                    model.remove(&start);
                }
            }
            let mut floor = window.start;
            for entry in entries {
                if entry.is_empty() || entry.start < floor || entry.end > window.end {
                    return None;
                }
                floor = entry.end;
                next += 1;
                model.insert(entry.start, (entry.end, next));
            }
        }
        Some((model, next))
    }

    fn splice(&mut self, edits: &[Edit]) {
        let expected = self.expected(edits);
        let mut next = self.next;
        let mut transaction = self.tree.write(&mut self.writer);
        let result = edits
            .iter()
            .try_for_each(|(window, entries)| {
                let entries = entries.iter().map(|range| {
                    next += 1;
                    (range.clone(), Value(Box::new(next)))
                });
                transaction.splice(window.clone(), entries)
            })
            .and_then(|()| {
                transaction
                    .prepare()
                    .map(|prepared| drop(prepared.commit()))
            });
        match (result, expected) {
            (Ok(()), Some((model, next))) => (self.model, self.next) = (model, next),
            (Err(error), None) => assert_ne!(error, EditError::OutOfMemory),
            (result, expected) => panic!("{edits:?}: {result:?}, expected {expected:?}"),
        }
        self.compare();
    }

    fn compare(&self) {
        let view = self.tree.locked(&self.writer);
        view.check().unwrap();
        let entries = view.iter(0).map(|e| (e.start, (e.end, *e.value.0)));
        assert!(entries.eq(self.model.iter().map(|(s, e)| (*s, *e))));
        for (snapshot, model) in &self.snapshots {
            let entries = snapshot.iter(0).map(|e| (e.start, (e.end, *e.value.0)));
            assert!(
                entries.eq(model.iter().map(|(s, e)| (*s, *e))),
                "a snapshot changed"
            );
        }
    }

    fn gap(&self, request: &GapRequest) {
        let need = request.len + request.align - 1;
        let mut fits = Vec::new();
        let mut previous = 0;
        let mut gap = |gap: Range<u64>| {
            let start = gap.start.max(request.window.start);
            let end = gap.end.min(request.window.end);
            if end.saturating_sub(start) >= need {
                fits.push(start..end);
            }
        };
        for (start, (end, id)) in &self.model {
            let guard = Value(Box::new(*id)).start_gap();
            gap(previous..start.saturating_sub(guard));
            previous = *end;
        }
        gap(previous..u64::MAX);
        let aligned = |a: &u64| a % request.align == request.align_offset % request.align;
        let low = fits.first().and_then(|gap| gap.clone().find(aligned));
        let high = fits
            .last()
            .and_then(|gap| (gap.start..=gap.end - request.len).rev().find(aligned));
        let view = self.tree.locked(&self.writer);
        assert_eq!(view.lowest_gap(request), low);
        assert_eq!(view.highest_gap(request), high);
    }

    fn lookup(&self, at: u64) {
        let id = |e: vma_rcu::tree::Entry<'_, Value>| (e.start, (e.end, *e.value.0));
        let same = |entry: Option<(&u64, &(u64, u32))>| entry.map(|(s, e)| (*s, *e));
        let next = self.model.iter().find(|(_, (end, _))| *end > at);
        let previous = self.model.iter().rev().find(|(_, (end, _))| *end <= at);
        assert_eq!(self.tree.find_next(at, self.guard).map(id), same(next));
        assert_eq!(self.tree.find_prev(at, self.guard).map(id), same(previous));
        assert_eq!(
            self.tree.find(at, self.guard).map(id),
            same(next.filter(|(s, _)| **s <= at))
        );
    }

    fn step(&mut self, op: &Op) {
        match *op {
            Op::Splice { at, len, pieces } => {
                let window = self.whole(at.into(), len.into());
                let mut at = window.start;
                let mut entries = Vec::new();
                for (gap, len) in pieces {
                    let start = at + u64::from(gap % 16);
                    let end = start + u64::from(len % 32) + 1;
                    if end <= window.end {
                        entries.push(start..end);
                        at = end;
                    }
                }
                self.splice(&[(window, entries)]);
            }
            Op::Raw { windows, entry } => {
                let range = |(at, len): (u16, u8)| u64::from(at)..u64::from(at) + u64::from(len);
                let edits = [
                    (range(windows[0]), vec![range(entry)]),
                    (range(windows[1]), vec![]),
                ];
                self.splice(&edits);
            }
            Op::Remove(at) => {
                if let Some((start, end)) = self.entry_at(at) {
                    self.splice(&[(start..end, vec![])]);
                }
            }
            Op::Split(at) => {
                if let Some((start, end)) = self.entry_at(at).filter(|(s, e)| e - s >= 3) {
                    let pieces = vec![start..start + 1, start + 1..end - 1, end - 1..end];
                    self.splice(&[(start..end, pieces)]);
                }
            }
            Op::Fill { at, step, count } => {
                let step = u64::from(step % 32) + 2;
                let window = self.whole(at.into(), step * u64::from(count));
                let fits = (window.end - window.start) / step;
                let entry = |i| window.start + i * step..window.start + i * step + step - 1;
                let entries = (0..fits.min(count.into())).map(entry).collect();
                self.splice(&[(window.clone(), entries)]);
            }
            Op::Clear { at, len } => {
                let window = self.whole(at.into(), len.into());
                self.splice(&[(window, vec![])]);
            }
            Op::Snapshot if self.snapshots.len() < 4 => {
                let view = self.tree.locked(&self.writer);
                self.snapshots
                    .push((view.snapshot(self.guard), self.model.clone()));
            }
            Op::Begin => {
                if self.flights.len() == 4 {
                    self.flights.remove(0);
                }
                self.flights.push((self.tree.iter(0, self.guard), 0));
            }
            Op::Step(count) => {
                for (iter, at) in &mut self.flights {
                    for entry in iter.by_ref().take(count.into()) {
                        assert!(entry.start >= *at, "an iteration overlaps itself");
                        assert_ne!(*entry.value.0, 0);
                        *at = entry.end;
                    }
                }
            }
            Op::Release => self.snapshots.clear(),
            Op::Abandon { at } => {
                let window = self.whole(at.into(), 40);
                let mut transaction = self.tree.write(&mut self.writer);
                transaction.splice(window, []).unwrap();
                drop(transaction.prepare());
                self.compare();
            }
            Op::Collect => drop(self.tree.domain().collect()),
            Op::Gap {
                len,
                align,
                offset,
                from,
                to,
            } => self.gap(&GapRequest {
                len: u64::from(len) + 1,
                align: 1 << (align % 6),
                align_offset: offset.into(),
                window: from.into()..to.into(),
            }),
            Op::Lookup(at) => self.lookup(at.into()),
            Op::Snapshot => {}
        }
    }
}

fuzz_target!(|ops: Vec<Op>| {
    let domain = Domain::default();
    let reader = domain.register();
    let guard = reader.pin();
    let (tree, writer) = RangeTree::new(&domain);
    let mut world = World {
        tree: &tree,
        writer,
        model: Model::new(),
        guard: &guard,
        snapshots: Vec::new(),
        flights: Vec::new(),
        next: 0,
    };
    for op in ops.iter().take(200) {
        world.step(op);
    }
    drop(world);
    drop(tree);
    drop(guard);
    domain.synchronize(None).unwrap();
    assert_eq!(domain.stats().pending_objects, 0);
});
