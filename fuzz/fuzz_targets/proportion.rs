//! What a parser allocates, held against the size of what it reads.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes in use, and the most there were. Relaxed: the parsers have one thread.
static USED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: all of it is the system's allocator, with the arguments as they came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let used = USED.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(used, Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        USED.fetch_sub(layout.size(), Ordering::Relaxed);
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Bytes per byte of the text that a parser may have in use: the largest record, for the shortest line.
const EACH: usize = 1024;

/// Runs a parser on a text; what it allocates is in proportion to it.
pub fn parse<T>(text: &str, parser: impl FnOnce(&str) -> T) -> T {
    let before = USED.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let result = parser(text);
    let most = PEAK.load(Ordering::Relaxed) - before;
    assert!(
        most <= (text.len() + 64) * EACH,
        "{most} bytes in use for a text of {}",
        text.len()
    );
    result
}
