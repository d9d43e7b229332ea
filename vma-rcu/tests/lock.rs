//! Locks on single entries.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "tests may")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vma_rcu::reclaim::Domain;
use vma_rcu::tree::{Busy, RangeTree, Record, Writer};
use vma_rcu::wait::{CancelToken, GaveUp, Wait};

const SOON: Duration = Duration::from_millis(20);

#[derive(Debug)]
struct Stamp(u64);

impl Record for Stamp {}

fn tree(domain: &Domain) -> (RangeTree<Stamp>, Writer<Stamp>) {
    let (tree, mut writer) = RangeTree::new(domain);
    let entry = |i: u64| (i * 10..i * 10 + 10, Stamp(i * 10));
    tree.build(&mut writer, (0..100).map(entry)).unwrap();
    (tree, writer)
}

/// Puts one entry in the place of whatever is in the range.
fn replace(
    tree: &RangeTree<Stamp>,
    writer: &mut Writer<Stamp>,
    range: std::ops::Range<u64>,
    wait: Wait<'_>,
) -> Result<(), GaveUp> {
    let mut edit = tree.write(writer);
    let stamp = Stamp(range.start);
    edit.splice(range.clone(), [(range, stamp)]).unwrap();
    edit.prepare().unwrap().commit_with(wait).map(drop)
}

#[test]
fn a_writer_waits_for_the_readers_of_what_it_replaces_and_of_nothing_else() {
    let domain = Domain::default();
    let (tree, mut writer) = tree(&domain);
    let reader = domain.register();
    let token = CancelToken::new();
    token.cancel();
    let killed = Wait::killable(&token);
    let locked = tree.lock(55, &reader.pin()).unwrap().unwrap();
    let again = tree.lock(50, &reader.pin()).unwrap().unwrap();
    assert_eq!(
        (locked.start(), locked.end(), locked.value().0),
        (50, 60, 50)
    );
    assert!(tree.lock(5000, &reader.pin()).unwrap().is_none());
    // Neighbours, in the same leaf.
    replace(&tree, &mut writer, 40..50, killed).unwrap();
    replace(&tree, &mut writer, 60..80, killed).unwrap();
    // Absorbed: what lies in the range of another entry's new extent.
    for range in [50..60, 40..60, 50..80] {
        let result = replace(&tree, &mut writer, range, killed);
        assert_eq!(result, Err(GaveUp::Cancelled));
    }
    // A writer that has given up leaves everything as it was.
    assert!(tree.lock(55, &reader.pin()).unwrap().is_some());
    tree.locked(&writer).check().unwrap();
    drop(locked);
    assert!(replace(&tree, &mut writer, 50..60, Wait::at_most(SOON)).is_err());
    drop(again);
    replace(&tree, &mut writer, 50..60, killed).unwrap();
    drop(reader);
    domain.synchronize(None).unwrap();
    assert_eq!(domain.stats().pending_objects, 0);
}

#[test]
fn a_reader_never_waits_for_a_writer() {
    let domain = Domain::default();
    let (tree, mut writer) = tree(&domain);
    let reader = domain.register();
    let locked = tree.lock(55, &reader.pin()).unwrap().unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| replace(&tree, &mut writer, 50..60, Wait::forever()));
        let guard = reader.pin();
        while tree.lock(55, &guard).is_ok() {
            thread::yield_now();
        }
        assert_eq!(tree.lock(55, &guard).unwrap_err(), Busy);
        assert_eq!(tree.find(55, &guard).unwrap().value.0, 50);
        assert!(tree.lock(45, &guard).unwrap().is_some());
        assert!(!waiting.is_finished());
        drop((locked, guard));
        waiting.join().unwrap().unwrap();
    });
    assert!(tree.lock(55, &reader.pin()).unwrap().is_some());
}

#[test]
fn stress() {
    let seconds = std::env::var("VMA_STRESS_SECONDS").map_or(1, |s| s.parse().unwrap());
    let until = Instant::now() + Duration::from_secs(seconds);
    let domain = Domain::default();
    let (tree, writer) = tree(&domain);
    let writer = Mutex::new(writer);
    let stop = AtomicBool::new(false);
    let (locks, busy) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for seed in 1..=3_u64 {
            let (tree, stop, locks, busy) = (&tree, &stop, &locks, &busy);
            scope.spawn(move || {
                let reader = tree.domain().register();
                let mut at = seed;
                while !stop.load(Ordering::Relaxed) {
                    at = (at * 7 + seed) % 1000;
                    let locked = tree.lock(at, &reader.pin());
                    match locked {
                        Ok(Some(locked)) => {
                            assert_eq!(locked.value().0, locked.start());
                            assert!(locked.start() <= at && at < locked.end());
                            // What is locked is what a lookup finds.
                            let guard = reader.pin();
                            let found = tree.find(at, &guard).unwrap();
                            assert_eq!(found.range(), locked.start()..locked.end());
                            locks.fetch_add(1, Ordering::Relaxed);
                        }
                        Ok(None) => panic!("entries are replaced, never missing"),
                        Err(Busy) => drop(busy.fetch_add(1, Ordering::Relaxed)),
                    }
                }
            });
        }
        let mut at = 0;
        while Instant::now() < until {
            at = (at * 5 + 3) % 99;
            let wait = if at % 4 == 0 {
                Wait::at_most(Duration::from_nanos(50))
            } else {
                Wait::forever()
            };
            let halves = at % 2 == 0;
            let mut writer = writer.lock();
            let mut edit = tree.write(&mut writer);
            let (a, b, c) = (at * 10, at * 10 + 10, at * 10 + 20);
            let view = edit.view();
            let joined = view.find(a).unwrap().end == c;
            let whole = view.find(a).unwrap().start == a && view.find(c - 1).unwrap().end == c;
            if !whole {
                continue;
            }
            if halves || joined {
                edit.splice(a..c, [(a..b, Stamp(a)), (b..c, Stamp(b))])
                    .unwrap();
            } else {
                edit.splice(a..c, [(a..c, Stamp(a))]).unwrap();
            }
            drop(edit.prepare().unwrap().commit_with(wait));
            drop(writer);
            tree.domain().collect();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(locks.load(Ordering::Relaxed) > 100);
    tree.locked(&writer.lock()).check().unwrap();
}
