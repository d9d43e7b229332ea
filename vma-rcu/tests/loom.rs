//! Models of publish, lookup and retire, of the list of retired objects, and of pins in signal handlers.
//!
//! `.ci/loom` runs them as they are, and then once per planted fault, which they must find.
#![cfg(loom)]
#![allow(clippy::unwrap_used, reason = "tests may")]

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;
use vma_rcu::reclaim::Domain;
use vma_rcu::tree::{RangeTree, Record, Writer};

/// A value whose every access loom checks: reads by readers, a write by its destructor.
struct Value {
    id: u64,
    cell: UnsafeCell<u64>,
}

impl Value {
    fn new(id: u64) -> Self {
        let cell = UnsafeCell::new(id);
        Value { id, cell }
    }

    fn read(&self) -> u64 {
        // SAFETY: read only; loom reports a concurrent write.
        self.cell.with(|id| unsafe { *id })
    }
}

// SAFETY: shared access only reads, and loom watches.
unsafe impl Sync for Value {}

impl Record for Value {}

impl Drop for Value {
    fn drop(&mut self) {
        // SAFETY: exclusive by `&mut`; loom reports a concurrent read.
        self.cell.with_mut(|id| unsafe { *id = u64::MAX });
    }
}

fn model(preemptions: usize, f: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 100_000;
    builder.check(f);
}

fn put(tree: &RangeTree<Value>, writer: &mut Writer<Value>, at: u64, id: u64) {
    let mut edit = tree.write(writer);
    edit.splice(at..at + 10, [(at..at + 10, Value::new(id))])
        .unwrap();
    edit.prepare().unwrap().commit();
}

/// A reader finds the old or the new value, whole, while a writer replaces it and frees what it can.
#[test]
fn a_lookup_sees_old_or_new_and_never_freed_memory() {
    model(5, || {
        let domain = Domain::default();
        let (tree, mut writer) = RangeTree::new(&domain);
        put(&tree, &mut writer, 10, 1);
        let tree = Arc::new(tree);
        let reader = {
            let tree = Arc::clone(&tree);
            thread::spawn(move || {
                let reader = tree.domain().register();
                let guard = reader.pin();
                let found = tree.find(15, &guard).expect("it is never unmapped");
                assert_eq!((found.start, found.end), (10, 20));
                assert_eq!(found.value.read(), found.value.id);
            })
        };
        put(&tree, &mut writer, 10, 2);
        domain.collect();
        reader.join().unwrap();
    });
}

/// A change that splits a leaf is seen wholly or not at all by an iteration.
#[test]
fn an_iteration_sees_a_split_wholly_or_not_at_all() {
    model(5, || {
        let domain = Domain::default();
        let (tree, mut writer) = RangeTree::new(&domain);
        tree.build(
            &mut writer,
            (1..4).map(|i| (i * 10..i * 10 + 10, Value::new(i))),
        )
        .unwrap();
        let tree = Arc::new(tree);
        let reader = {
            let tree = Arc::clone(&tree);
            thread::spawn(move || {
                let reader = tree.domain().register();
                let guard = reader.pin();
                let starts: Vec<u64> = tree
                    .iter(0, &guard)
                    .map(|e| e.start + e.value.read())
                    .collect();
                assert!(
                    starts == [11, 22, 33] || starts == [11, 24, 30, 36],
                    "{starts:?}"
                );
            })
        };
        let mut edit = tree.write(&mut writer);
        let three = [
            (20..25, Value::new(4)),
            (25..30, Value::new(5)),
            (30..40, Value::new(6)),
        ];
        edit.splice(20..40, three).unwrap();
        edit.prepare().unwrap().commit();
        reader.join().unwrap();
    });
}

/// `synchronize` frees what was retired before it, half-filled batches too, and waits for the reader.
#[test]
fn synchronize_waits_for_the_reader_and_leaves_nothing() {
    model(5, || {
        let domain = Domain::default();
        let (tree, mut writer) = RangeTree::new(&domain);
        put(&tree, &mut writer, 10, 1);
        let tree = Arc::new(tree);
        let reader = {
            let tree = Arc::clone(&tree);
            thread::spawn(move || {
                let reader = tree.domain().register();
                let guard = reader.pin();
                if let Some(found) = tree.find(12, &guard) {
                    assert_eq!(found.value.read(), found.value.id);
                }
            })
        };
        let mut edit = tree.write(&mut writer);
        edit.splice(10..20, []).unwrap();
        edit.prepare().unwrap().commit();
        // Without a wait in the model: one look, as a deadline that has passed.
        let _ = domain.synchronize(Some(std::time::Instant::now()));
        reader.join().unwrap();
        for _ in 0..4 {
            if domain.synchronize(Some(std::time::Instant::now())).is_ok() {
                break;
            }
        }
        assert_eq!(domain.stats().pending_objects, 0);
    });
}

/// A pin keeps what is found under it, however late the writer looks.
#[test]
fn a_pin_holds_back_the_free() {
    model(5, || {
        let domain = Domain::default();
        let (tree, mut writer) = RangeTree::new(&domain);
        put(&tree, &mut writer, 10, 1);
        let tree = Arc::new(tree);
        let reader = {
            let tree = Arc::clone(&tree);
            let reader = tree.domain().register();
            thread::spawn(move || {
                let guard = reader.pin();
                if let Some(found) = tree.find(12, &guard) {
                    assert_eq!(found.value.read(), found.value.id);
                }
            })
        };
        let mut edit = tree.write(&mut writer);
        edit.splice(10..20, []).unwrap();
        edit.prepare().unwrap().commit();
        for _ in 0..3 {
            let _ = domain.synchronize(Some(std::time::Instant::now()));
        }
        reader.join().unwrap();
    });
}

/// A grace period that sees a reader pinned again has all that the reader did in its earlier pin behind it.
#[test]
fn a_later_pin_does_not_hide_the_end_of_an_earlier_one() {
    model(5, || {
        let domain = Domain::default();
        let (tree, mut writer) = RangeTree::new(&domain);
        put(&tree, &mut writer, 10, 1);
        let tree = Arc::new(tree);
        let reader = {
            let tree = Arc::clone(&tree);
            let reader = tree.domain().register();
            thread::spawn(move || {
                for _ in 0..2 {
                    let guard = reader.pin();
                    if let Some(found) = tree.find(12, &guard) {
                        assert_eq!(found.value.read(), found.value.id);
                    }
                }
            })
        };
        let mut edit = tree.write(&mut writer);
        edit.splice(10..20, []).unwrap();
        edit.prepare().unwrap().commit();
        for _ in 0..3 {
            let _ = domain.synchronize(Some(std::time::Instant::now()));
        }
        reader.join().unwrap();
    });
}

/// A reader that has locked an entry keeps it, without a guard; the writer waits for it and no longer.
#[test]
fn a_locked_entry_stays_until_it_is_let_go() {
    model(3, || {
        let domain = Domain::default();
        let (tree, mut writer) = RangeTree::new(&domain);
        put(&tree, &mut writer, 10, 1);
        let tree = Arc::new(tree);
        let reader = {
            let tree = Arc::clone(&tree);
            thread::spawn(move || {
                let reader = tree.domain().register();
                let locked = tree.lock(12, &reader.pin());
                if let Ok(Some(locked)) = locked {
                    assert_eq!((locked.start(), locked.end()), (10, 20));
                    assert_eq!(locked.value().read(), locked.value().id);
                }
            })
        };
        let mut edit = tree.write(&mut writer);
        edit.splice(10..20, []).unwrap();
        edit.prepare().unwrap().commit();
        for _ in 0..2 {
            let _ = domain.synchronize(Some(std::time::Instant::now()));
        }
        reader.join().unwrap();
    });
}

/// What is retired when a domain is wound down is freed by who winds it down, or by the reader that was in the way.
#[test]
fn who_winds_down_or_the_last_reader_frees() {
    model(5, || {
        let domain = Domain::default();
        let (tree, mut writer) = RangeTree::new(&domain);
        put(&tree, &mut writer, 10, 1);
        let tree = Arc::new(tree);
        let reader = {
            let tree = Arc::clone(&tree);
            let reader = tree.domain().register();
            thread::spawn(move || {
                let guard = reader.pin();
                if let Some(found) = tree.find(12, &guard) {
                    assert_eq!(found.value.read(), found.value.id);
                }
            })
        };
        let mut edit = tree.write(&mut writer);
        edit.splice(10..20, []).unwrap();
        edit.prepare().unwrap().commit();
        // A grace period that waits for the reader may be under way.
        domain.stats();
        domain.wind_down();
        reader.join().unwrap();
        assert_eq!(domain.stats().pending_objects, 0);
    });
}
