//! Random transactions on a tree and on a `BTreeMap`, compared after every one.
//!
//! Compiled twice: with the library's unit tests, where nodes have 4 lanes so that a few entries reach
//! splits, merges and root changes, and as an integration test, with nodes of full size.

#![allow(clippy::unwrap_used, reason = "tests may")]

mod flights;

use std::collections::BTreeMap;
use std::ops::Range;

use proptest::prelude::*;
use vma_rcu::reclaim::{Domain, Guard};
use vma_rcu::tree::{EditError, GapRequest, RangeTree, Record, Snapshot, Writer};

/// A value that tells when it is dropped twice or read after its drop.
#[derive(Debug)]
struct Value {
    id: u64,
    guard: u64,
    alive: Box<u64>,
}

impl Value {
    fn new(id: u64) -> Self {
        let guard = if id.is_multiple_of(5) { 24 } else { 0 };
        Value {
            id,
            guard,
            alive: Box::new(id),
        }
    }
}

impl Record for Value {
    fn start_gap(&self) -> u64 {
        assert_eq!(*self.alive, self.id, "read after its drop");
        self.guard
    }
}

/// A window, and what comes into it.
type Edit = (Range<u64>, Vec<(Range<u64>, Value)>);

/// start -> (end, id)
type Model = BTreeMap<u64, (u64, u64)>;

#[derive(Clone, Debug)]
enum Op {
    /// Removes what is in a window (widened to whole entries), and puts in pieces of these sizes.
    Splice(u64, u64, Vec<(u64, u64)>),
    /// Two such edits in one transaction.
    Two(u64, u64, u64, u64),
    /// Splits an entry into three, or joins three into one.
    Split(u64),
    Join(u64),
    Remove(u64),
    Snapshot,
    DropSnapshots,
    /// Prepared and dropped.
    Abandon(u64, u64),
    /// Every allocation of the transaction fails once.
    Fail(u64, u64),
    Collect,
}

/// Addresses; small enough that operations meet.
const SPACE: u64 = 4096;

fn op() -> impl Strategy<Value = Op> {
    let at = 0..SPACE;
    let pieces = prop::collection::vec((0_u64..12, 1_u64..24), 0..8);
    prop_oneof![
        8 => (at.clone(), 1_u64..200, pieces).prop_map(|(a, n, p)| Op::Splice(a, n, p)),
        3 => (at.clone(), 1_u64..40, at.clone(), 1_u64..40).prop_map(|(a, n, b, m)| Op::Two(a, n, b, m)),
        6 => at.clone().prop_map(Op::Split),
        6 => at.clone().prop_map(Op::Join),
        6 => at.clone().prop_map(Op::Remove),
        1 => Just(Op::Snapshot),
        1 => Just(Op::DropSnapshots),
        1 => (at.clone(), 1_u64..60).prop_map(|(a, n)| Op::Abandon(a, n)),
        2 => (at, 1_u64..60).prop_map(|(a, n)| Op::Fail(a, n)),
        1 => Just(Op::Collect),
    ]
}

struct World<'g> {
    tree: &'g RangeTree<Value>,
    writer: Writer<Value>,
    model: Model,
    guard: &'g Guard<'g>,
    snapshots: Vec<(Snapshot<'g, Value>, Model)>,
    next: u64,
}

impl World<'_> {
    fn value(&mut self) -> Value {
        self.next += 1;
        Value::new(self.next)
    }

    /// A window without an entry across its border.
    fn widen(&self, lo: u64, len: u64) -> Range<u64> {
        let mut window = lo..(lo + len).min(SPACE * 2);
        for (start, (end, _)) in &self.model {
            if *start < window.end && *end > window.start {
                window = window.start.min(*start)..window.end.max(*end);
            }
        }
        window
    }

    /// Entries of these gaps and lengths, as far as they fit.
    fn pieces(&mut self, window: &Range<u64>, sizes: &[(u64, u64)]) -> Vec<(Range<u64>, Value)> {
        let mut at = window.start;
        let mut entries = Vec::new();
        for (gap, len) in sizes {
            let range = at + gap..at + gap + len;
            if range.end > window.end {
                break;
            }
            at = range.end;
            entries.push((range, self.value()));
        }
        entries
    }

    fn splice(&mut self, edits: Vec<Edit>) {
        let mut expected = self.model.clone();
        let mut gone = Vec::new();
        for (window, entries) in &edits {
            let inside: Vec<u64> = expected
                .range(window.clone())
                .map(|(start, _)| *start)
                .collect();
            for start in inside {
                gone.extend(expected.remove(&start).map(|(end, id)| (start, end, id)));
            }
            for (range, value) in entries {
                expected.insert(range.start, (range.end, value.id));
            }
        }
        gone.sort_unstable();
        let mut transaction = self.tree.write(&mut self.writer);
        for (window, entries) in edits {
            transaction.splice(window, entries).unwrap();
        }
        let committed = transaction.prepare().unwrap().commit();
        let removed: Vec<_> = committed
            .removed()
            .map(|e| (e.start, e.end, e.value.id))
            .collect();
        assert_eq!(removed, gone);
        drop(committed);
        self.model = expected;
    }

    /// The `n`-th entry, counted round.
    fn nth(&self, n: u64) -> Option<(u64, u64)> {
        let n = n.checked_rem(self.model.len() as u64)?;
        self.model
            .iter()
            .nth(n as usize)
            .map(|(start, (end, _))| (*start, *end))
    }

    fn step(&mut self, op: &Op) {
        match op {
            Op::Splice(at, len, sizes) => {
                let window = self.widen(*at, *len);
                let entries = self.pieces(&window, sizes);
                self.splice(vec![(window, entries)]);
            }
            Op::Two(a, n, b, m) => {
                let first = self.widen(*a, *n);
                let second = self.widen(*b, *m);
                if first.start < second.end && second.start < first.end {
                    return;
                }
                let one = self.pieces(&first, &[(0, 5), (3, 4)]);
                let other = self.pieces(&second, &[(1, 3)]);
                self.splice(vec![(first, one), (second, other)]);
            }
            Op::Split(n) => {
                let Some((start, end)) = self.nth(*n) else {
                    return;
                };
                let third = (end - start) / 3;
                if third == 0 {
                    return;
                }
                let cuts = [start, start + third, end - third, end];
                let entries = cuts
                    .windows(2)
                    .map(|c| (c[0]..c[1], self.value()))
                    .collect();
                self.splice(vec![(start..end, entries)]);
            }
            Op::Join(n) => {
                let Some((start, _)) = self.nth(*n) else {
                    return;
                };
                let three: Vec<_> = self.model.range(start..).take(3).collect();
                let end = three.last().map_or(start, |(_, (end, _))| *end);
                let value = self.value();
                self.splice(vec![(start..end, vec![(start..end, value)])]);
            }
            Op::Remove(n) => {
                let Some((start, end)) = self.nth(*n) else {
                    return;
                };
                self.splice(vec![(start..end, vec![])]);
            }
            Op::Snapshot => {
                let view = self.tree.locked(&self.writer);
                self.snapshots
                    .push((view.snapshot(self.guard), self.model.clone()));
            }
            Op::DropSnapshots => self.snapshots.clear(),
            Op::Abandon(at, len) => {
                let window = self.widen(*at, *len);
                let entries = self.pieces(&window, &[(1, 2), (1, 2), (1, 2)]);
                let mut transaction = self.tree.write(&mut self.writer);
                transaction.splice(window, entries).unwrap();
                drop(transaction.prepare().unwrap());
            }
            Op::Fail(at, len) => self.fail(*at, *len),
            Op::Collect => {
                self.tree.domain().collect();
            }
        }
    }

    /// The same transaction with the n-th allocation failing, for every n, until it passes.
    fn fail(&mut self, at: u64, len: u64) {
        let window = self.widen(at, len);
        for n in 0..100 {
            let entries = self.pieces(&window, &[(1, 2), (1, 2), (1, 2), (1, 2)]);
            let ids: Vec<_> = entries
                .iter()
                .map(|(range, v)| (range.clone(), v.id))
                .collect();
            self.writer.fail_allocation(Some(n));
            let mut transaction = self.tree.write(&mut self.writer);
            let result = transaction.splice(window.clone(), entries).and_then(|()| {
                transaction
                    .prepare()
                    .map(|prepared| drop(prepared.commit()))
            });
            self.writer.fail_allocation(None);
            match result {
                Ok(()) => {
                    self.model.retain(|start, _| !window.contains(start));
                    self.model
                        .extend(ids.into_iter().map(|(r, id)| (r.start, (r.end, id))));
                    return;
                }
                Err(error) => assert_eq!(error, EditError::OutOfMemory),
            }
            self.compare();
        }
        panic!("a hundred allocations for one transaction");
    }

    fn compare(&self) {
        let view = self.tree.locked(&self.writer);
        assert_eq!(view.check(), Ok(()));
        assert_eq!(view.len(), self.model.len());
        let entries: Model = view
            .iter(0)
            .map(|e| (e.start, (e.end, e.value.id)))
            .collect();
        assert_eq!(entries, self.model);
        for (snapshot, model) in &self.snapshots {
            let entries: Model = snapshot
                .iter(0)
                .map(|e| (e.start, (e.end, *e.value.alive)))
                .collect();
            assert_eq!(&entries, model, "a snapshot changed");
        }
    }

    fn compare_lookups(&self, at: u64) {
        let containing = self
            .model
            .range(..=at)
            .next_back()
            .filter(|(_, (end, _))| *end > at);
        let next = self.model.iter().find(|(_, (end, _))| *end > at);
        let previous = self.model.iter().rev().find(|(_, (end, _))| *end <= at);
        let plain = |entry: Option<(&u64, &(u64, u64))>| entry.map(|(s, (e, id))| (*s, *e, *id));
        let view = self.tree.locked(&self.writer);
        let found = [
            self.tree.find(at, self.guard),
            self.tree.find_next(at, self.guard),
            self.tree.find_prev(at, self.guard),
        ];
        let expected = [plain(containing), plain(next), plain(previous)];
        assert_eq!(
            found.map(|e| e.map(|e| (e.start, e.end, e.value.id))),
            expected
        );
        let locked = [view.find(at), view.find_next(at), view.find_prev(at)];
        assert_eq!(
            locked.map(|e| e.map(|e| (e.start, e.end, e.value.id))),
            expected
        );
        let (previous, next) = view.neighbours(at);
        assert_eq!(
            (previous.map(|e| e.start), next.map(|e| e.start)),
            (locked[2].map(|e| e.start), locked[1].map(|e| e.start))
        );
        let rest = self.tree.iter(at, self.guard).map(|e| e.start);
        let model = self
            .model
            .iter()
            .filter(|(_, (end, _))| *end > at)
            .map(|(s, _)| *s);
        assert!(rest.eq(model));
    }

    fn compare_gaps(&self, request: &GapRequest) {
        let mut gaps = Vec::new();
        let mut previous = 0;
        for (start, (end, id)) in &self.model {
            gaps.push(previous..start.saturating_sub(Value::new(*id).guard));
            previous = *end;
        }
        gaps.push(previous..u64::MAX);
        let need = request.len + request.align - 1;
        let fits = |gap: &Range<u64>| {
            let lo = gap.start.max(request.window.start);
            let hi = gap.end.min(request.window.end);
            (lo <= hi && hi - lo >= need).then_some(lo..hi)
        };
        let aligned = |a: &u64| a % request.align == request.align_offset % request.align;
        let low = gaps
            .iter()
            .find_map(fits)
            .and_then(|gap| gap.clone().find(aligned));
        let high = gaps.iter().rev().find_map(fits);
        let high = high.and_then(|gap| (gap.start..=gap.end - request.len).rev().find(aligned));
        let view = self.tree.locked(&self.writer);
        assert_eq!(view.lowest_gap(request), low, "lowest {request:?}");
        assert_eq!(view.highest_gap(request), high, "highest {request:?}");
    }
}

fn run(ops: &[Op], probes: &[(u64, u64, u32, u64)]) {
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
        next: 0,
    };
    for op in ops {
        world.step(op);
        world.compare();
    }
    for (at, len, align, offset) in probes {
        world.compare_lookups(*at);
        let request = GapRequest {
            len: *len,
            align: 1 << align,
            align_offset: *offset,
            window: *at..(*at + 700).max(SPACE * (offset & 1)),
        };
        world.compare_gaps(&request);
    }
    for start in world.model.keys() {
        world.compare_lookups(*start);
        world.compare_lookups(start.saturating_sub(1));
    }
    drop(world);
    drop(tree);
    drop(guard);
    domain.synchronize(None).unwrap();
    assert_eq!(domain.stats().pending_objects, 0);
    assert_eq!(domain.stats().pending_bytes, 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..Default::default() })]

    #[test]
    fn transactions_equal_a_btree_map(
        ops in prop::collection::vec(op(), 1..160),
        probes in prop::collection::vec((0..SPACE * 2, 1_u64..80, 0_u32..6, 0_u64..64), 0..24),
    ) {
        run(&ops, &probes);
    }
}

#[test]
fn bulk_build_equals_insertion_and_replaces_what_was_there() {
    let domain = Domain::default();
    for n in (0..80).chain([225, 226, 3000]) {
        let (tree, mut writer) = RangeTree::new(&domain);
        for round in 0..2 {
            let entry = |i: u64| (i * 8..i * 8 + 5, Value::new(i + round));
            tree.build(&mut writer, (0..n).map(entry)).unwrap();
            let view = tree.locked(&writer);
            view.check().unwrap();
            let ids: Vec<_> = view.iter(0).map(|e| (e.start, e.value.id)).collect();
            let expected: Vec<_> = (0..n).map(|i| (i * 8, i + round)).collect();
            assert_eq!(ids, expected);
        }
    }
}

#[test]
#[expect(clippy::single_range_in_vec_init, reason = "a list of ranges")]
fn bad_edits_are_refused_and_change_nothing() {
    let domain = Domain::default();
    let (tree, mut writer) = RangeTree::new(&domain);
    tree.build(
        &mut writer,
        [(10..20, Value::new(1)), (30..40, Value::new(2))],
    )
    .unwrap();
    let mut refuse = |window: Range<u64>, entries: &[Range<u64>]| {
        let mut transaction = tree.write(&mut writer);
        let entries = entries.iter().map(|range| (range.clone(), Value::new(9)));
        let result = transaction.splice(window, entries);
        let result = result.and_then(|()| transaction.prepare().map(drop));
        let view = tree.locked(&writer);
        assert_eq!(view.iter(0).map(|e| e.value.id).collect::<Vec<_>>(), [1, 2]);
        view.check().unwrap();
        result.unwrap_err()
    };
    let bad = |start, end| EditError::BadRange { start, end };
    assert_eq!(refuse(5..5, &[]), bad(5, 5));
    #[expect(clippy::reversed_empty_ranges, reason = "that is the case")]
    let reversed = 6..5;
    assert_eq!(refuse(reversed, &[]), bad(6, 5));
    assert_eq!(refuse(5..u64::MAX, &[]), bad(5, u64::MAX));
    assert_eq!(refuse(50..60, &[51..51]), bad(51, 51));
    let order = |range| EditError::OutOfOrder { range };
    assert_eq!(refuse(50..60, &[55..61]), order(55..61));
    assert_eq!(refuse(50..60, &[49..51]), order(49..51));
    assert_eq!(refuse(50..60, &[50..55, 54..56]), order(54..56));
    let straddles = |window, start, end| EditError::Straddles { window, start, end };
    assert_eq!(refuse(15..25, &[]), straddles(15..25, 10, 20));
    assert_eq!(refuse(25..35, &[25..26]), straddles(25..35, 30, 40));
    assert_eq!(refuse(12..14, &[12..13]), straddles(12..14, 10, 20));
    let mut transaction = tree.write(&mut writer);
    transaction.splice(50..60, []).unwrap();
    transaction.splice(45..51, []).unwrap();
    assert_eq!(transaction.prepare().unwrap_err(), order(50..60));
}

#[test]
fn the_whole_key_space_can_be_mapped_up_to_its_last_address() {
    use vma_rcu::tree::MAX_END;
    let domain = Domain::default();
    let reader = domain.register();
    let guard = reader.pin();
    let (tree, mut writer) = RangeTree::new(&domain);
    assert!(tree.find(0, &guard).is_none());
    tree.build(
        &mut writer,
        [(0..4096, Value::new(1)), (4096..MAX_END, Value::new(2))],
    )
    .unwrap();
    assert_eq!(tree.find(0, &guard).unwrap().value.id, 1);
    assert_eq!(tree.find(MAX_END - 1, &guard).unwrap().value.id, 2);
    assert!(tree.find(MAX_END, &guard).is_none());
    assert!(tree.find(u64::MAX, &guard).is_none());
    assert_eq!(tree.find_prev(u64::MAX, &guard).unwrap().value.id, 2);
    assert!(tree.find_next(u64::MAX, &guard).is_none());
    assert_eq!(tree.iter(u64::MAX, &guard).count(), 0);
}

#[test]
fn a_forgotten_transaction_is_cleaned_up_by_the_next() {
    let domain = Domain::default();
    let (tree, mut writer) = RangeTree::new(&domain);
    for i in 0..50_u64 {
        let mut transaction = tree.write(&mut writer);
        transaction
            .splice(i..i + 1, [(i..i + 1, Value::new(i))])
            .unwrap();
        std::mem::forget(transaction.prepare().unwrap());
        let mut transaction = tree.write(&mut writer);
        transaction
            .splice(i..i + 1, [(i..i + 1, Value::new(i))])
            .unwrap();
        std::mem::forget(transaction.prepare().unwrap().commit());
    }
    assert_eq!(tree.locked(&writer).len(), 50);
    tree.locked(&writer).check().unwrap();
    let mut transaction = tree.write(&mut writer);
    transaction
        .splice(60..61, [(60..61, Value::new(1))])
        .unwrap();
    std::mem::forget(transaction);
    drop(writer);
}

#[test]
fn an_iterator_that_panics_half_way_leaves_the_transaction_as_it_was() {
    let domain = Domain::default();
    let (tree, mut writer) = RangeTree::new(&domain);
    let mut transaction = tree.write(&mut writer);
    transaction.splice(0..10, [(0..10, Value::new(1))]).unwrap();
    let panics = (20..40).map(|i| {
        assert!(i < 30, "half way");
        (i..i + 1, Value::new(i))
    });
    let splice = std::panic::AssertUnwindSafe(|| transaction.splice(20..40, panics));
    assert!(std::panic::catch_unwind(splice).is_err());
    transaction
        .splice(50..60, [(50..60, Value::new(2))])
        .unwrap();
    transaction.prepare().unwrap().commit();
    let view = tree.locked(&writer);
    view.check().unwrap();
    assert_eq!(view.iter(0).map(|e| e.start).collect::<Vec<_>>(), [0, 50]);
}

/// A start gap that panics where it's asked for must not be asked for in a commit.
#[test]
fn the_start_gap_is_asked_once_before_anything_is_published() {
    struct Once(std::sync::atomic::AtomicBool);
    impl Record for Once {
        fn start_gap(&self) -> u64 {
            let before = self.0.swap(true, std::sync::atomic::Ordering::Relaxed);
            assert!(!before || std::thread::panicking(), "asked again");
            8
        }
    }
    let domain = Domain::default();
    let (tree, mut writer) = RangeTree::new(&domain);
    for i in 0..200_u64 {
        let at = (i * 37) % 200 * 20;
        let mut transaction = tree.write(&mut writer);
        transaction
            .splice(at..at + 10, [(at..at + 10, Once(false.into()))])
            .unwrap();
        transaction.prepare().unwrap().commit();
        let view = tree.locked(&writer);
        view.lowest_gap(&GapRequest::new(3, 0..10_000));
        view.highest_gap(&GapRequest::new(3, 0..10_000));
    }
    for i in (0..200).step_by(2) {
        let mut transaction = tree.write(&mut writer);
        transaction.splice(i * 20..i * 20 + 10, []).unwrap();
        transaction.prepare().unwrap().commit();
    }
}
