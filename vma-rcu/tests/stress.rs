//! Readers, snapshots and a writer at once. Short by default; `VMA_STRESS_SECONDS` makes it longer.
//! Run under the sanitizers by `.ci/asan`.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "tests may")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vma_rcu::reclaim::{Domain, Reader, ReclaimLimits};
use vma_rcu::tree::{RangeTree, Record, Snapshot, Writer};

/// A value that knows its range, in memory of its own: reading it after its drop is a use after free.
struct Stamp(Box<[u64; 3]>);

impl Stamp {
    fn new(start: u64, end: u64) -> Self {
        Stamp(Box::new([start, end, start ^ end ^ 0x5eed]))
    }

    fn check(&self, start: u64, end: u64) {
        assert_eq!(*self.0, [start, end, start ^ end ^ 0x5eed]);
    }
}

impl Record for Stamp {}

fn duration() -> Duration {
    let seconds = std::env::var("VMA_STRESS_SECONDS").ok();
    Duration::from_millis(
        seconds
            .and_then(|s| s.parse::<u64>().ok())
            .map_or(700, |s| s * 1000),
    )
}

/// xorshift64
fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Blocks of 64 units, each always wholly covered: by one entry, by two, or by one per unit.
const BLOCKS: u64 = 300;
const UNIT: u64 = 0x1000;
const BLOCK: u64 = 64 * UNIT;

fn pieces(block: u64, kind: u64) -> Vec<(std::ops::Range<u64>, Stamp)> {
    let count = [1, 2, 64][(kind % 3) as usize];
    let size = BLOCK / count;
    let piece = |i| {
        let start = block * BLOCK + i * size;
        (start..start + size, Stamp::new(start, start + size))
    };
    (0..count).map(piece).collect()
}

/// Everything is covered at every instant, so that a miss is a hole.
fn look_up(tree: &RangeTree<Stamp>, stop: &AtomicBool, seed: u64) -> u64 {
    let reader = tree.domain().register();
    let mut state = seed;
    let mut done = 0;
    while !stop.load(Ordering::Relaxed) {
        let guard = reader.pin();
        for _ in 0..16 {
            let at = random(&mut state) % (BLOCKS * BLOCK);
            let found = tree.find(at, &guard).expect("a hole");
            assert!((found.start..found.end).contains(&at));
            found.value.check(found.start, found.end);
        }
        done += 16;
    }
    done
}

/// A piece of a block beside one of another kind is a half-seen transaction.
fn walk(tree: &RangeTree<Stamp>, stop: &AtomicBool) -> u64 {
    let reader = tree.domain().register();
    let mut done = 0;
    while !stop.load(Ordering::Relaxed) {
        let guard = reader.pin();
        let mut at = 0;
        let mut first = 0;
        for entry in tree.iter(0, &guard) {
            assert_eq!(entry.start, at, "a hole or an overlap");
            entry.value.check(entry.start, entry.end);
            let size = entry.end - entry.start;
            if at % BLOCK == 0 {
                first = size;
            }
            assert_eq!(size, first, "half a transaction");
            at = entry.end;
        }
        assert_eq!(at, BLOCKS * BLOCK);
        done += 1;
    }
    done
}

/// Replaces two blocks per transaction, 400 times, under one guard with a snapshot from the hundredth on.
fn edit(tree: &RangeTree<Stamp>, writer: &mut Writer<Stamp>, reader: &Reader, state: &mut u64) {
    let guard = reader.pin();
    let mut kept: Option<(Snapshot<'_, Stamp>, u64)> = None;
    for i in 0..400 {
        let block = random(state) % BLOCKS;
        let other = (block + 1 + random(state) % (BLOCKS - 1)) % BLOCKS;
        let mut transaction = tree.write(writer);
        for (block, kind) in [(block, random(state)), (other, random(state))] {
            let window = block * BLOCK..(block + 1) * BLOCK;
            transaction.splice(window, pieces(block, kind)).unwrap();
        }
        drop(transaction.prepare().unwrap().commit());
        if i == 100 {
            let view = tree.locked(writer);
            let sum = view.iter(0).map(|e| e.start ^ e.end).sum();
            kept = Some((view.snapshot(&guard), sum));
        }
    }
    let (snapshot, sum) = kept.expect("taken above");
    assert_eq!(tree.domain().stats().snapshots, 1);
    assert_eq!(snapshot.iter(0).map(|e| e.start ^ e.end).sum::<u64>(), sum);
}

#[test]
fn readers_never_see_a_hole_an_overlap_or_half_a_transaction() {
    let limits = ReclaimLimits {
        soft_bytes: 1 << 18,
        hard_bytes: 8 << 20,
    };
    let domain = Domain::new(limits);
    let (tree, mut writer) = RangeTree::new(&domain);
    let content = (0..BLOCKS).flat_map(|block| pieces(block, block));
    tree.build(&mut writer, content).unwrap();
    let stop = AtomicBool::new(false);
    let done = thread::scope(|scope| {
        let (tree, stop) = (&tree, &stop);
        let threads = [
            scope.spawn(move || look_up(tree, stop, 1)),
            scope.spawn(move || look_up(tree, stop, 2)),
            scope.spawn(move || walk(tree, stop)),
        ];
        let reader = domain.register();
        let mut state = 99;
        let deadline = Instant::now() + duration();
        while Instant::now() < deadline {
            edit(tree, &mut writer, &reader, &mut state);
            domain.collect();
            tree.locked(&writer).check().unwrap();
            // Readers pin for microseconds, unless the machine stalls them.
            let patience = Instant::now() + Duration::from_secs(20);
            domain.throttle(Some(patience)).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        threads.map(|thread| thread.join().unwrap())
    });
    assert!(
        done.iter().all(|count| *count > 0),
        "idle readers: {done:?}"
    );
    domain.synchronize(None).unwrap();
    assert_eq!(domain.stats().pending_objects, 0);
    drop(tree);
    drop(writer);
    domain.synchronize(None).unwrap();
    let stats = domain.stats();
    assert_eq!((stats.pending_objects, stats.pending_bytes), (0, 0));
}
