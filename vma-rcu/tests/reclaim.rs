//! Reclamation: bounds, deadlines, threads that come and go, destructors that misbehave.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "tests may")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use vma_rcu::reclaim::{Domain, ReclaimLimits};
use vma_rcu::tree::{RangeTree, Record, Writer};

/// Counts its drops; one with a poison panics instead.
struct Counted {
    drops: Arc<AtomicUsize>,
    poison: bool,
}

impl Record for Counted {}

impl Drop for Counted {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Ordering::Relaxed);
        assert!(!self.poison, "a destructor that panics");
    }
}

fn churn(
    tree: &RangeTree<Counted>,
    writer: &mut Writer<Counted>,
    drops: &Arc<AtomicUsize>,
    n: usize,
) {
    for i in 0..n as u64 {
        let range = (i % 50) * 10..(i % 50) * 10 + 10;
        let value = Counted {
            drops: Arc::clone(drops),
            poison: false,
        };
        let mut edit = tree.write(writer);
        edit.splice(range.clone(), [(range, value)]).unwrap();
        edit.prepare().unwrap().commit();
        tree.domain().collect();
    }
}

#[test]
fn with_no_reader_pinned_retired_memory_stays_within_a_few_batches() {
    let domain = Domain::default();
    let (tree, mut writer) = RangeTree::new(&domain);
    let drops = Arc::new(AtomicUsize::new(0));
    let mut most = 0;
    for _ in 0..100 {
        churn(&tree, &mut writer, &drops, 100);
        most = most.max(domain.stats().pending_objects);
    }
    assert!(most < 128 * 8, "{most} objects pending");
    domain.synchronize(None).unwrap();
    assert_eq!(domain.stats().pending_objects, 0);
    assert_eq!(drops.load(Ordering::Relaxed), 100 * 100 - 50);
}

#[test]
fn a_pinned_reader_makes_synchronize_and_throttle_report() {
    let domain = Domain::new(ReclaimLimits {
        soft_bytes: 10_000,
        hard_bytes: 100_000,
    });
    let (tree, mut writer) = RangeTree::new(&domain);
    let drops = Arc::new(AtomicUsize::new(0));
    let reader = domain.register();
    let guard = reader.pin();
    churn(&tree, &mut writer, &drops, 2000);
    let soon = || Some(Instant::now() + Duration::from_millis(20));
    let timed_out = domain.synchronize(soon()).unwrap_err();
    assert!(timed_out.pending_objects > 2000);
    assert!(timed_out.to_string().contains("pinned"));
    let over = domain.throttle(soon()).unwrap_err();
    assert!(over.pending_bytes > over.hard_bytes && over.hard_bytes == 100_000);
    assert!(
        domain
            .stats()
            .oldest_pin
            .is_some_and(|age| age >= Duration::from_millis(20))
    );
    assert_eq!(drops.load(Ordering::Relaxed), 0, "freed under a guard");
    // Another reader comes and goes meanwhile.
    let other = domain.register();
    assert!(tree.find(5, &other.pin()).is_some());
    drop(guard);
    domain
        .throttle(Some(Instant::now() + Duration::from_mins(1)))
        .unwrap();
    domain.synchronize(None).unwrap();
    assert_eq!(drops.load(Ordering::Relaxed), 2000 - 50);
}

#[test]
fn a_destructor_that_panics_costs_nobody_elses_memory() {
    let domain = Domain::default();
    let (tree, mut writer) = RangeTree::new(&domain);
    let drops = Arc::new(AtomicUsize::new(0));
    for i in 0..40 {
        let value = Counted {
            drops: Arc::clone(&drops),
            poison: i == 20,
        };
        let mut edit = tree.write(&mut writer);
        edit.splice(i..i + 1, [(i..i + 1, value)]).unwrap();
        edit.prepare().unwrap().commit();
    }
    let mut edit = tree.write(&mut writer);
    edit.splice(0..40, []).unwrap();
    edit.prepare().unwrap().commit();
    let result =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| domain.synchronize(None)));
    assert!(result.is_err(), "the panic reaches who frees");
    domain.synchronize(None).unwrap();
    assert_eq!(drops.load(Ordering::Relaxed), 40);
    assert_eq!(
        (domain.stats().pending_objects, domain.stats().pending_bytes),
        (0, 0)
    );
    churn(&tree, &mut writer, &drops, 500);
    tree.locked(&writer).check().unwrap();
}

#[test]
fn values_outlive_the_tree_as_long_as_a_guard() {
    let domain = Domain::default();
    let (tree, mut writer) = RangeTree::new(&domain);
    let drops = Arc::new(AtomicUsize::new(0));
    churn(&tree, &mut writer, &drops, 50);
    let reader = domain.register();
    let guard = reader.pin();
    let found = tree.find(7, &guard).unwrap();
    drop(tree);
    drop(writer);
    for _ in 0..10 {
        domain.collect();
    }
    assert_eq!(found.value.drops.load(Ordering::Relaxed), 0);
    drop(guard);
    domain.synchronize(None).unwrap();
    assert_eq!(drops.load(Ordering::Relaxed), 50);
}

#[test]
fn dropping_the_last_handle_frees_the_rest() {
    let drops = Arc::new(AtomicUsize::new(0));
    let domain = Domain::default();
    let (tree, mut writer) = RangeTree::new(&domain);
    churn(&tree, &mut writer, &drops, 300);
    drop(domain);
    drop(writer);
    drop(tree);
    assert_eq!(drops.load(Ordering::Relaxed), 300);
}

#[test]
fn threads_that_register_and_exit_leave_nothing() {
    let domain = Domain::default();
    let (tree, mut writer) = RangeTree::new(&domain);
    let drops = Arc::new(AtomicUsize::new(0));
    churn(&tree, &mut writer, &drops, 50);
    let tree = Arc::new(tree);
    for round in 0..50 {
        let thread = |n: u64| {
            let tree = Arc::clone(&tree);
            std::thread::spawn(move || {
                let reader = tree.domain().register();
                let outer = reader.pin();
                assert!(tree.find(n * 10, &reader.pin()).is_some());
                assert!(tree.find(n * 10, &outer).is_some());
                drop(outer);
                tree.domain().collect();
            })
        };
        let threads: Vec<_> = (0..8).map(thread).collect();
        churn(&tree, &mut writer, &drops, 20);
        for thread in threads {
            thread.join().unwrap();
        }
        if round % 10 == 0 {
            domain.synchronize(None).unwrap();
            assert_eq!(domain.stats().pending_objects, 0);
        }
    }
}

#[test]
#[should_panic(expected = "another domain")]
fn a_guard_of_another_domain_is_refused() {
    let (tree, _writer) = RangeTree::<Counted>::new(&Domain::default());
    let other = Domain::default();
    let reader = other.register();
    tree.find(0, &reader.pin());
}

#[test]
#[should_panic(expected = "another tree's")]
fn a_writer_of_another_tree_is_refused() {
    let domain = Domain::default();
    let (tree, _writer) = RangeTree::<Counted>::new(&domain);
    let (_tree, mut other) = RangeTree::<Counted>::new(&domain);
    drop(tree.write(&mut other));
}

/// As with fork and exit: what a dead writer leaves is a batch of its own, counted and freed.
#[test]
fn what_dead_writers_leave_is_freed_by_collect_and_leaves_no_phantom() {
    let limits = ReclaimLimits {
        soft_bytes: 100_000,
        hard_bytes: 1_000_000,
    };
    let domain = Domain::new(limits);
    let drops = Arc::new(AtomicUsize::new(0));
    let mut most = 0;
    for round in 0..400 {
        let (tree, mut writer) = RangeTree::new(&domain);
        churn(&tree, &mut writer, &drops, 60);
        if round % 3 == 0 {
            drop(tree);
            drop(writer);
        } else {
            drop(writer);
            drop(tree);
        }
        if round % 7 == 0 {
            domain.synchronize(None).unwrap();
        }
        domain.collect();
        domain.throttle(None).unwrap();
        most = most.max(domain.stats().pending_objects);
    }
    assert!(most < 2000, "{most} objects pending");
    for _ in 0..8 {
        domain.collect();
    }
    assert_eq!(domain.stats().pending_objects, 0, "collect alone frees it");
    assert_eq!(drops.load(Ordering::Relaxed), 400 * 60);
    domain.throttle(None).unwrap();
}

#[test]
fn a_forgotten_guard_holds_nothing_once_its_reader_is_gone() {
    let domain = Domain::default();
    let (tree, mut writer) = RangeTree::new(&domain);
    let drops = Arc::new(AtomicUsize::new(0));
    let reader = domain.register();
    std::mem::forget(reader.pin());
    churn(&tree, &mut writer, &drops, 200);
    let soon = Some(Instant::now() + Duration::from_millis(10));
    assert!(domain.synchronize(soon).is_err());
    drop(reader);
    domain.synchronize(None).unwrap();
    assert_eq!(domain.stats().pending_objects, 0);
}

struct Held(#[expect(dead_code, reason = "counts")] Arc<()>);

impl Record for Held {}

#[test]
fn a_forgotten_commit_and_a_domain_dropped_before_the_writer_leak_nothing() {
    let count = Arc::new(());
    let domain = Domain::default();
    let (tree, mut writer) = RangeTree::new(&domain);
    let entry = |i: u64| (i * 10..i * 10 + 10, Held(Arc::clone(&count)));
    tree.build(&mut writer, (0..10).map(entry)).unwrap();
    let mut edit = tree.write(&mut writer);
    edit.splice(0..50, []).unwrap();
    std::mem::forget(edit.prepare().unwrap().commit());
    drop(tree);
    drop(domain);
    drop(writer);
    assert_eq!(Arc::strong_count(&count), 1);
}

#[test]
fn a_destructor_that_panics_in_a_dropped_transaction_costs_no_other_value() {
    for forget_first in [false, true] {
        let drops = Arc::new(AtomicUsize::new(0));
        let domain = Domain::default();
        let (tree, mut writer) = RangeTree::new(&domain);
        let mut edit = tree.write(&mut writer);
        let entry = |i: u64| {
            let drops = Arc::clone(&drops);
            let poison = i == 2;
            (i * 10..i * 10 + 10, Counted { drops, poison })
        };
        edit.splice(0..50, (0..5).map(entry)).unwrap();
        let panics = |f: &mut dyn FnMut()| {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err()
        };
        let mut edit = Some(edit);
        let in_edit = if forget_first {
            std::mem::forget(edit);
            false
        } else {
            let panicked = panics(&mut || drop(edit.take()));
            drop(edit);
            panicked
        };
        let mut writer = Some(writer);
        assert_ne!(panics(&mut || drop(writer.take())), in_edit);
        assert_eq!(drops.load(Ordering::Relaxed), 5);
    }
}

/// What a destructor panics with, and whose own destructor panics.
struct Payload;

impl Drop for Payload {
    fn drop(&mut self) {
        assert!(std::thread::panicking(), "a payload that panics");
    }
}

struct Nasty(#[expect(dead_code, reason = "counts")] Arc<()>);

impl Record for Nasty {}

impl Drop for Nasty {
    fn drop(&mut self) {
        std::panic::panic_any(Payload);
    }
}

#[test]
fn payloads_that_panic_when_they_are_dropped_stop_nothing() {
    let count = Arc::new(());
    let domain = Domain::default();
    let (tree, mut writer) = RangeTree::new(&domain);
    let entry = |i: u64| (i * 10..i * 10 + 10, Nasty(Arc::clone(&count)));
    tree.build(&mut writer, (0..10).map(entry)).unwrap();
    drop(tree);
    drop(writer);
    let result =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| domain.synchronize(None)));
    std::mem::forget(result.unwrap_err());
    domain.synchronize(None).unwrap();
    assert_eq!(Arc::strong_count(&count), 1);
}

#[test]
fn a_batch_that_is_due_is_freed_also_after_one_that_was_not_full() {
    let domain = Domain::default();
    let (tree, mut writer) = RangeTree::new(&domain);
    let drops = Arc::new(AtomicUsize::new(0));
    churn(&tree, &mut writer, &drops, 105);
    domain.synchronize(None).unwrap();
    for _ in 0..300 {
        churn(&tree, &mut writer, &drops, 1);
        let waiting = domain.stats().pending_objects;
        assert!(waiting <= 128 + 2, "{waiting}");
    }
}

/// Boxes in limbo are dropped once, after the guards of their time, and count meanwhile.
#[test]
fn limbo_keeps_a_box_as_long_as_a_guard_of_its_time() {
    struct Counted(Arc<AtomicUsize>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let domain = Domain::default();
    let dropped = Arc::new(AtomicUsize::new(0));
    let limbo = vma_rcu::reclaim::Limbo::try_new(&domain).unwrap();
    let reader = domain.register();
    let guard = reader.pin();
    for _ in 0..300 {
        assert!(limbo.retire(Box::new(Counted(dropped.clone()))).is_ok());
        domain.collect();
    }
    assert_eq!(dropped.load(Ordering::Relaxed), 0);
    assert_eq!(domain.stats().pending_objects, 300);
    drop(guard);
    domain.synchronize(None).unwrap();
    assert_eq!(dropped.load(Ordering::Relaxed), 300);
    // What is left when it goes is the domain's to drop.
    assert!(limbo.retire(Box::new(Counted(dropped.clone()))).is_ok());
    drop(limbo);
    domain.synchronize(None).unwrap();
    assert_eq!(dropped.load(Ordering::Relaxed), 301);
}
