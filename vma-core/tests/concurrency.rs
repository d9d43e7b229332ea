//! Readers beside a writer: what a lookup returns was there, whole.
#![allow(
    clippy::redundant_closure_for_method_calls,
    clippy::unwrap_used,
    reason = "one shape for errors of many types; a test may panic"
)]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use common::{AT, PAGE, RW};
use vma_core::{
    Access, AddressSpace, MapRequest, Prot, RemapFlags, RemapRequest, SpaceConfig, VmaFlags,
};

/// C2, and one publish per call: while a page is only ever remade by single calls, it's never seen unmapped,
/// and always with one of the protections that it really had.
#[test]
fn a_page_that_calls_only_change_is_never_seen_missing() {
    let space = AddressSpace::default();
    space
        .map(&MapRequest::anonymous(64 * PAGE, RW).fixed(AT))
        .unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let reader = space.register();
                let mut at = AT;
                while !stop.load(Ordering::Relaxed) {
                    let guard = reader.pin();
                    let vma = space.find(at, &guard).expect("the page is always mapped");
                    assert!(vma.start() <= at && at < vma.end());
                    assert!(vma.flags().contains(VmaFlags::READ));
                    let mut last = AT;
                    for vma in space.iter(AT, &guard) {
                        assert!(vma.start() >= last || last == AT);
                        last = vma.end();
                    }
                    at = AT + (at - AT + 7 * PAGE) % (64 * PAGE);
                }
            });
        }
        for i in 0..4000u64 {
            let at = AT + (i * 13 % 60) * PAGE;
            match i % 3 {
                0 => space.protect(at, 4 * PAGE, Prot::READ).unwrap(),
                1 => space.protect(at, 3 * PAGE, RW).unwrap(),
                _ => drop(
                    space
                        .map(&MapRequest::anonymous(2 * PAGE, RW).fixed(at))
                        .unwrap(),
                ),
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    space.check().unwrap();
}

/// X2, X3: two threads never get the same place.
#[test]
fn places_chosen_at_the_same_time_are_different() {
    let space = AddressSpace::default();
    let chosen: Vec<u64> = thread::scope(|scope| {
        let choose = || {
            let one = |_| space.map(&MapRequest::anonymous(PAGE, Prot::READ)).unwrap();
            (0..500).map(one).collect::<Vec<_>>()
        };
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(choose)).collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect()
    });
    let mut sorted = chosen.clone();
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!(sorted.len(), 2000);
    assert_eq!((space.totals().total, space.totals().map_count), (2000, 1));
    space.check().unwrap();
}

/// X14, hazard 1: threads that touch neighbours at the same time agree on one identity, while a writer splits and merges.
#[test]
fn faults_at_the_same_time_agree_on_an_identity() {
    for _ in 0..50 {
        let space = AddressSpace::default();
        space
            .map(&MapRequest::anonymous(8 * PAGE, RW).fixed(AT))
            .unwrap();
        thread::scope(|scope| {
            for i in 0..3u64 {
                let space = &space;
                scope.spawn(move || space.touch(AT + i * 2 * PAGE, PAGE, Access::Write));
            }
            scope.spawn(|| {
                space.protect(AT + 3 * PAGE, PAGE, Prot::READ).unwrap();
                space.protect(AT + 3 * PAGE, PAGE, RW).unwrap();
            });
        });
        space.check().unwrap();
        let entries = space.maps_entries();
        assert!(entries.iter().all(|entry| !entry.anon.is_none()));
        // Two faults that come while the mapping is cut in three have no neighbour with an identity: as in Linux each
        // makes one, and the halves stay apart. More than that there is no reason for.
        let apart = entries.len() == 2 && entries[0].anon != entries[1].anon;
        assert!(entries.len() == 1 || apart, "{entries:?}");
    }
}

/// C14: a reader that keeps its guard holds up writers for a bounded time; then calls fail and change nothing,
/// and all is well once it lets go.
#[test]
fn a_stalled_reader_makes_writers_fail_after_a_while_and_changes_nothing() {
    let limits = vma_core::ReclaimLimits {
        soft_bytes: 1 << 12,
        hard_bytes: 1 << 14,
    };
    let domain = vma_core::Domain::new(limits);
    let space = AddressSpace::with_backend(SpaceConfig::default(), &domain, ()).unwrap();
    let reader = space.register();
    let guard = reader.pin();
    let mut refused = None;
    for i in 0..10_000 {
        let before = space.maps();
        if let Err(error) =
            space.map(&MapRequest::anonymous(PAGE, Prot::READ).fixed(AT + 2 * i * PAGE))
        {
            assert_eq!(space.maps(), before);
            refused = Some(error);
            break;
        }
    }
    let error = refused.expect("the hard limit is reached");
    assert_eq!(error.errno(), vma_core::Errno::ENOMEM);
    assert!(error.to_string().contains("reader"), "{error}");
    drop(guard);
    space.map(&MapRequest::anonymous(PAGE, Prot::READ)).unwrap();
    space.check().unwrap();
}

/// Calls of one hold are published one by one, with nobody between.
#[test]
fn a_batch_excludes_other_writers() {
    let space = AddressSpace::default();
    space
        .map(&MapRequest::anonymous(PAGE, RW).fixed(AT))
        .unwrap();
    thread::scope(|scope| {
        let mut write = space.write();
        let other = scope.spawn(|| space.unmap(AT, PAGE));
        let moved = RemapRequest {
            addr: AT,
            old_len: PAGE,
            new_len: 2 * PAGE,
            flags: RemapFlags::MAYMOVE,
            new_addr: 0,
        };
        assert_eq!(write.remap(&moved), Ok(AT));
        write.protect(AT, 2 * PAGE, Prot::READ).unwrap();
        assert_eq!(write.iter(0).count(), 1);
        drop(write);
        other.join().unwrap().unwrap();
    });
    assert_eq!(space.totals().total, 1);
}
