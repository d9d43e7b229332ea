//! Blocks of nodes and records that went back to the allocator aren't written to, and all go back.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "tests may")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use vma_rcu::reclaim::Domain;
use vma_rcu::tree::{RangeTree, Record, Writer};

/// Keeps what is freed of a block's alignment, and fills it.
struct Keeping;

const BLOCK: usize = 8192;
const FILL: u8 = 0xaa;
static FREED: Mutex<[(usize, usize); 4096]> = Mutex::new([(0, 0); 4096]);
static COUNT: AtomicUsize = AtomicUsize::new(0);
static MADE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes everything on to the system's allocator, or keeps it.
unsafe impl GlobalAlloc for Keeping {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.align() == BLOCK {
            MADE.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        if layout.align() != BLOCK {
            // SAFETY: the caller's contract is the same.
            return unsafe { System.dealloc(memory, layout) };
        }
        let mut freed = FREED.lock().unwrap();
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        if freed[..count]
            .iter()
            .any(|(block, _)| *block == memory.addr())
        {
            std::process::abort();
        }
        // SAFETY: the caller gives it up, and nobody else gets it.
        unsafe { memory.write_bytes(FILL, layout.size()) };
        freed[count] = (memory.expose_provenance(), layout.size());
    }
}

#[global_allocator]
static ALLOCATOR: Keeping = Keeping;

/// One test at a time: they count blocks.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap()
}

/// Blocks that are out, after a look at all that aren't.
fn blocks_out() -> usize {
    let count = COUNT.load(Ordering::Relaxed);
    for (block, size) in &FREED.lock().unwrap()[..count] {
        let block = std::ptr::with_exposed_provenance::<u8>(*block);
        // SAFETY: kept by the allocator, initialised by it.
        let bytes = unsafe { std::slice::from_raw_parts(block, *size) };
        assert!(
            bytes.iter().all(|byte| *byte == FILL),
            "written after it was freed"
        );
    }
    MADE.load(Ordering::Relaxed) - count
}

struct Value(#[expect(dead_code, reason = "takes room")] u64);

impl Record for Value {}

fn filled(domain: &Domain) -> (RangeTree<Value>, Writer<Value>) {
    let (tree, mut writer) = RangeTree::new(domain);
    let entry = |i: u64| (i * 10..i * 10 + 10, Value(i));
    tree.build(&mut writer, (0..10_000).map(entry)).unwrap();
    (tree, writer)
}

fn clear(tree: &RangeTree<Value>, writer: &mut Writer<Value>, from: u64, to: u64) {
    let mut edit = tree.write(writer);
    edit.splice(from * 10..to * 10, []).unwrap();
    edit.prepare().unwrap().commit();
}

#[test]
fn a_tree_dropped_between_two_batches_of_its_writer() {
    let _turn = turn();
    let before = blocks_out();
    let domain = Domain::default();
    let reader = domain.register();
    let (tree, mut writer) = filled(&domain);
    let guard = reader.pin();
    for i in (0..4_000).step_by(2) {
        clear(&tree, &mut writer, i, i + 1);
    }
    domain.collect();
    for i in (6_000..10_000).step_by(10) {
        clear(&tree, &mut writer, i, i + 10);
    }
    drop(tree);
    domain.collect();
    drop(guard);
    for _ in 0..6 {
        domain.collect();
        blocks_out();
    }
    drop((writer, reader, domain));
    assert_eq!(blocks_out(), before);
}

#[test]
fn all_orders_of_dropping_give_every_block_back() {
    let _turn = turn();
    for order in 0..6 {
        let before = blocks_out();
        let domain = Domain::default();
        let (tree, mut writer) = filled(&domain);
        for i in (0..10_000).step_by(2) {
            clear(&tree, &mut writer, i, i + 1);
            if i % 64 == 0 {
                domain.collect();
            }
        }
        let (mut tree, mut writer, mut domain) = (Some(tree), Some(writer), Some(domain));
        let last = [
            [0, 1, 2],
            [0, 2, 1],
            [1, 0, 2],
            [1, 2, 0],
            [2, 0, 1],
            [2, 1, 0],
        ];
        for which in last[order] {
            match which {
                0 => drop(tree.take()),
                1 => drop(writer.take()),
                _ => drop(domain.take()),
            }
            if let Some(domain) = &domain {
                domain.synchronize(None).unwrap();
            }
            blocks_out();
        }
        assert_eq!(blocks_out(), before, "order {order}");
    }
}
