//! Lookups in signal handlers that interrupt pins, lookups, transactions and the allocator. (X16: a lookup never waits for who was interrupted.)
#![cfg(all(unix, not(loom)))]
#![allow(clippy::unwrap_used, reason = "tests may")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

use vma_rcu::reclaim::{Domain, Reader};
use vma_rcu::tree::{RangeTree, Record};

thread_local! {
    static IN_HANDLER: Cell<bool> = const { Cell::new(false) };
}

/// Counts what a handler allocates or frees, which must be nothing.
struct Watching;

static FORBIDDEN: AtomicU64 = AtomicU64::new(0);

fn note() {
    if IN_HANDLER.try_with(Cell::get).unwrap_or(false) {
        FORBIDDEN.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        note();
        // SAFETY: the caller's contract is the same.
        unsafe { System.dealloc(memory, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

struct Stamp(Box<u64>);

impl Record for Stamp {}

struct Shared {
    tree: RangeTree<Stamp>,
    reader: Reader,
}

static SHARED: AtomicPtr<Shared> = AtomicPtr::new(std::ptr::null_mut());
static HANDLED: AtomicU64 = AtomicU64::new(0);
static WRONG: AtomicU64 = AtomicU64::new(0);

extern "C" fn handler(_: libc::c_int) {
    IN_HANDLER.with(|flag| flag.set(true));
    let shared = SHARED.load(Ordering::Acquire);
    if !shared.is_null() {
        // SAFETY: set before the first signal, and freed after the last.
        let shared = unsafe { &*shared };
        let guard = shared.reader.pin();
        // Entries are replaced, never missing.
        for at in [5, 1005, 2005] {
            let found = shared.tree.find(at, &guard);
            let right = found.is_some_and(|e| *e.value.0 == e.start);
            WRONG.fetch_add(u64::from(!right), Ordering::Relaxed);
        }
        HANDLED.fetch_add(1, Ordering::Relaxed);
    }
    IN_HANDLER.with(|flag| flag.set(false));
}

#[test]
fn a_handler_finds_what_it_must_and_neither_allocates_nor_frees() {
    let domain = Domain::default();
    let (tree, mut writer) = RangeTree::new(&domain);
    let entry = |i: u64| (i * 10..i * 10 + 10, Stamp(Box::new(i * 10)));
    tree.build(&mut writer, (0..300).map(entry)).unwrap();
    let shared = Box::into_raw(Box::new(Shared {
        tree,
        reader: domain.register(),
    }));
    SHARED.store(shared, Ordering::Release);
    // SAFETY: a handler that does only what is async-signal-safe.
    let old = unsafe { libc::signal(libc::SIGUSR1, handler as *const () as libc::sighandler_t) };
    assert_ne!(old, libc::SIG_ERR);
    // SAFETY: asks for the calling thread.
    let target = unsafe { libc::pthread_self() } as u64;
    let stop = std::sync::Arc::new(AtomicBool::new(false));
    let sender = {
        let stop = std::sync::Arc::clone(&stop);
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                // SAFETY: the target joins this thread before it ends.
                unsafe { libc::pthread_kill(target as libc::pthread_t, libc::SIGUSR1) };
                // Not faster, else the target does nothing but handle.
                std::thread::sleep(std::time::Duration::from_micros(100));
            }
        })
    };
    // SAFETY: freed below, after the last signal. The handler runs in this thread, and pins the same reader.
    let Shared { tree, reader } = unsafe { &*shared };
    let mut i = 0_u64;
    while HANDLED.load(Ordering::Relaxed) < 500 || i < 5_000 {
        let block = (i * 7919) % 299;
        let window = block * 10..block * 10 + 20;
        let mut edit = tree.write(&mut writer);
        edit.splice(window, [entry(block), entry(block + 1)])
            .unwrap();
        edit.prepare().unwrap().commit();
        let guard = reader.pin();
        assert!(tree.find(i % 3000, &guard).is_some());
        drop(guard);
        domain.collect();
        i += 1;
    }
    stop.store(true, Ordering::Relaxed);
    sender.join().unwrap();
    // SAFETY: back to the default, for a signal that isn't sent any more.
    unsafe { libc::signal(libc::SIGUSR1, libc::SIG_IGN) };
    SHARED.store(std::ptr::null_mut(), Ordering::Release);
    // SAFETY: made above; no handler runs any more.
    drop(unsafe { Box::from_raw(shared) });
    assert_eq!(WRONG.load(Ordering::Relaxed), 0, "wrong or missing entries");
    assert_eq!(
        FORBIDDEN.load(Ordering::Relaxed),
        0,
        "allocations and frees in handlers"
    );
    domain.synchronize(None).unwrap();
    assert_eq!(domain.stats().pending_objects, 0);
}
