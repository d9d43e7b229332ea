//! What allocates nothing: lookups and locks on single mappings, once the thread is registered.
#![allow(clippy::unwrap_used, reason = "tests may")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use vma_core::{AddressSpace, MapRequest, Prot, SpaceConfig};
use vma_rcu::wait::Wait;

thread_local! {
    /// Calls of this thread to the allocator, both ways.
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

struct Watching;

fn note() {
    // At the thread's end there is nobody to tell.
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
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

fn calls(run: impl FnOnce()) -> u64 {
    let before = CALLS.get();
    run();
    CALLS.get() - before
}

#[test]
fn lookups_and_locks_on_mappings_allocate_nothing() {
    let space = AddressSpace::new(SpaceConfig::default()).unwrap();
    let map = |prot| space.map(&MapRequest::anonymous(0x3000, prot)).unwrap();
    let mut addr = 0;
    let mapping = calls(|| addr = map(Prot::READ));
    assert!(mapping > 0, "the watch sees what a first mapping allocates");
    // Many mappings: the index has inner nodes.
    for i in 0..1000 {
        map(if i % 2 == 0 { Prot::READ } else { Prot::WRITE });
    }
    let reader = space.register();
    let once = || {
        let guard = reader.pin();
        assert!(space.find(addr, &guard).is_some());
        let one = space.lock_vma(addr, &guard).unwrap().unwrap();
        assert!(one.vma().start() <= addr);
        drop(one);
        drop(guard);
        let one = space.lock_vma_with(addr, &reader, Wait::forever()).unwrap();
        assert!(one.is_some());
    };
    // Debug builds keep a list of the locks that a thread holds, and make room for it at first.
    once();
    assert_eq!(calls(|| (0..100).for_each(|_| once())), 0);
}
