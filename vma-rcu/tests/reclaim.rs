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
