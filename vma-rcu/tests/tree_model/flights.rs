//! Iterations and snapshots that stay open while transactions commit.
//!
//! Values have weights, and every transaction keeps their sum. So an iteration that sees each
//! transaction wholly or not at all comes to that sum, whenever it began; and entries never overlap.

use std::collections::BTreeMap;
use std::ops::Range;

use vma_rcu::reclaim::{Domain, Guard};
use vma_rcu::tree::{Iter, RangeTree, Record, Snapshot, Writer};

struct Weight {
    weight: i64,
    gap: u64,
}

impl Record for Weight {
    fn start_gap(&self) -> u64 {
        self.gap
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 8) % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// start -> (end, weight)
type Model = BTreeMap<u64, (u64, i64)>;

/// A window, and start, end and weight of what comes into it.
type Edit = (Range<u64>, Vec<(u64, u64, i64)>);

struct Flight<'g> {
    iter: Iter<'g, Weight>,
    at: u64,
    sum: i64,
}

struct World<'g> {
    tree: &'g RangeTree<Weight>,
    writer: Writer<Weight>,
    guard: &'g Guard<'g>,
    model: Model,
    random: Random,
    space: u64,
    flights: Vec<Flight<'g>>,
    snapshots: Vec<(Snapshot<'g, Weight>, Model)>,
}

impl World<'_> {
    /// A window that cuts no entry.
    fn window(&self, mut lo: u64, mut hi: u64) -> Range<u64> {
        for (start, (end, _)) in &self.model {
            if *start < hi && *end > lo {
                (lo, hi) = (lo.min(*start), hi.max(*end));
            }
        }
        lo..hi
    }

    /// One to three windows; now and then almost everything, so that the root collapses.
    fn windows(&mut self) -> Vec<Range<u64>> {
        if self.random.one_in(10) {
            let at = self.random.below(self.space);
            let low = self.random.one_in(4);
            return vec![if low {
                self.window(0, at + 1)
            } else {
                self.window(at, self.space * 3)
            }];
        }
        let mut windows: Vec<Range<u64>> = Vec::new();
        for _ in 0..=self.random.below(3) {
            let at = self.random.below(self.space);
            let wide = if self.random.one_in(6) {
                self.space
            } else {
                4 + self.space / 20
            };
            let len = 1 + self.random.below(wide);
            let window = self.window(at, at + len);
            if windows
                .iter()
                .all(|w| window.end <= w.start || window.start >= w.end)
            {
                windows.push(window);
            }
        }
        windows
    }

    fn fill(&mut self, window: &Range<u64>) -> Vec<(u64, u64, i64)> {
        let size = match self.random.below(4) {
            0 => return Vec::new(),
            1 => window.end - window.start,
            _ => 1 + self.random.below(5),
        };
        let mut entries = Vec::new();
        let mut at = window.start;
        loop {
            at += if self.random.one_in(2) {
                0
            } else {
                self.random.below(3)
            };
            if at + size > window.end {
                return entries;
            }
            entries.push((at, at + size, 0));
            at += size;
        }
    }

    /// Gives the new entries the weight of the removed ones.
    fn balance(&mut self, edits: &mut [Edit], removed: i64) {
        if edits.iter().all(|(_, entries)| entries.is_empty()) {
            if removed != 0 {
                let start = edits[0].0.start;
                edits[0].1.push((start, start + 1, removed));
            }
            return;
        }
        let mut left = removed;
        for (_, entries) in edits.iter_mut() {
            for entry in entries.iter_mut() {
                entry.2 = self.random.below(100).cast_signed() - 50;
                left -= entry.2;
            }
        }
        let last = edits
            .iter_mut()
            .rev()
            .find_map(|(_, entries)| entries.last_mut());
        last.expect("there is one").2 += left;
    }

    fn transact(&mut self) {
        let mut edits: Vec<Edit> = Vec::new();
        for window in self.windows() {
            let entries = self.fill(&window);
            edits.push((window, entries));
        }
        let inside = |start: &u64| edits.iter().any(|(window, _)| window.contains(start));
        let removed = self.model.iter().filter(|(start, _)| inside(start));
        let removed = removed.map(|(_, (_, weight))| weight).sum();
        self.balance(&mut edits, removed);
        let mut transaction = self.tree.write(&mut self.writer);
        for (window, entries) in &edits {
            let entry = |(start, end, weight): &(u64, u64, i64)| {
                let gap = if (start / 3).is_multiple_of(7) { 2 } else { 0 };
                (
                    *start..*end,
                    Weight {
                        weight: *weight,
                        gap,
                    },
                )
            };
            transaction
                .splice(window.clone(), entries.iter().map(entry))
                .unwrap();
        }
        let prepared = transaction.prepare().unwrap();
        if self.random.one_in(10) {
            return;
        }
        drop(prepared.commit());
        for (window, entries) in edits {
            self.model.retain(|start, _| !window.contains(start));
            self.model.extend(
                entries
                    .into_iter()
                    .map(|(start, end, weight)| (start, (end, weight))),
            );
        }
    }

    /// Advances every iteration by a few entries.
    fn fly(&mut self) {
        if self.flights.len() < 6 {
            let iter = self.tree.iter(0, self.guard);
            self.flights.push(Flight {
                iter,
                at: 0,
                sum: 0,
            });
        }
        let random = &mut self.random;
        self.flights.retain_mut(|flight| {
            let steps = if random.one_in(4) { 40 } else { 6 };
            for _ in 0..random.below(steps) {
                let Some(entry) = flight.iter.next() else {
                    assert_eq!(flight.sum, 0, "a transaction was seen in part");
                    return false;
                };
                assert!(
                    entry.start >= flight.at,
                    "{:#x} after {:#x}",
                    entry.start,
                    flight.at
                );
                flight.at = entry.end;
                flight.sum += entry.value.weight;
            }
            true
        });
    }

    fn snapshots(&mut self) {
        match self.random.below(24) {
            0 if self.snapshots.len() < 3 => {
                let view = self.tree.locked(&self.writer);
                self.snapshots
                    .push((view.snapshot(self.guard), self.model.clone()));
            }
            1 => drop(self.snapshots.pop()),
            _ => {}
        }
        for (snapshot, model) in &self.snapshots {
            let entries = snapshot.iter(0).map(|e| (e.start, (e.end, e.value.weight)));
            assert!(
                entries.eq(model.iter().map(|(s, e)| (*s, *e))),
                "a snapshot changed"
            );
        }
    }
}

#[test]
fn iterations_in_flight_see_transactions_wholly_and_in_order() {
    let seeds = std::env::var("VMA_FLIGHT_SEEDS")
        .ok()
        .and_then(|n| n.parse().ok());
    for seed in 1..=seeds.unwrap_or(20) {
        let domain = Domain::default();
        let (tree, mut writer) = RangeTree::new(&domain);
        let reader = domain.register();
        let guard = reader.pin();
        let mut random = Random(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed) | 1);
        let space = [64, 400, 3000][(seed % 3) as usize];
        let count = random.below(space / 4);
        let entry = |i: u64| (i * 4..i * 4 + 3, Weight { weight: 0, gap: 0 });
        tree.build(&mut writer, (0..count).map(entry)).unwrap();
        let mut world = World {
            tree: &tree,
            writer,
            guard: &guard,
            model: (0..count).map(|i| (i * 4, (i * 4 + 3, 0))).collect(),
            random,
            space,
            flights: Vec::new(),
            snapshots: Vec::new(),
        };
        for _ in 0..200 {
            world.transact();
            tree.locked(&world.writer).check().unwrap();
            world.fly();
            world.snapshots();
        }
        let view = tree.locked(&world.writer);
        let entries = view.iter(0).map(|e| (e.start, (e.end, e.value.weight)));
        assert!(entries.eq(world.model.iter().map(|(s, e)| (*s, *e))));
    }
}

/// What is left of a tree when all but one child of the root go is a node that the old root leads to as well.
#[test]
fn an_iteration_from_before_the_root_collapsed_does_not_overlap() {
    let domain = Domain::default();
    let reader = domain.register();
    let guard = reader.pin();
    let entry = |i: u64| (i * 10..i * 10 + 10, Weight { weight: 0, gap: 0 });
    for cut in 1..400 {
        let (tree, mut writer) = RangeTree::new(&domain);
        tree.build(&mut writer, (0..400).map(entry)).unwrap();
        let mut iter = tree.iter(0, &guard);
        let mut at = iter.next().unwrap().end;
        let mut edit = |window: Range<u64>, entries: Vec<(Range<u64>, Weight)>| {
            let mut transaction = tree.write(&mut writer);
            transaction.splice(window, entries).unwrap();
            transaction.prepare().unwrap().commit();
        };
        edit(cut * 10..4000, vec![]);
        let new = cut * 10..cut * 10 + 5;
        edit(new.clone(), vec![(new, Weight { weight: 0, gap: 0 })]);
        for entry in iter {
            assert!(
                entry.start >= at,
                "{:#x} after {at:#x}, cut at {cut}",
                entry.start
            );
            at = entry.end;
        }
    }
}
