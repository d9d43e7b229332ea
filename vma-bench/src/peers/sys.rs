//! The system below the measurements: an allocator that can count, a clock for single calls, cores to pin to.

#![expect(
    unsafe_code,
    reason = "a global allocator and the time stamp counter can't be had otherwise"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use core_affinity::CoreId;

/// Whether allocations are counted. Relaxed: set and read by the one measuring thread; others' counts don't matter.
static COUNTING: AtomicBool = AtomicBool::new(false);
/// Bytes asked for while counting. Relaxed: a statistic that orders nothing.
static TAKEN: AtomicUsize = AtomicUsize::new(0);
/// Bytes given back while counting. Relaxed, as above.
static GIVEN: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The system's allocator; counts requested bytes while [`live_bytes`] runs.
struct Counting;

#[inline]
fn count(counter: &AtomicUsize, bytes: usize) {
    if COUNTING.load(Ordering::Relaxed) {
        counter.fetch_add(bytes, Ordering::Relaxed);
    }
}

// SAFETY: every call is passed on to `System` unchanged, whose contract is the same; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(&TAKEN, layout.size());
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(&TAKEN, layout.size());
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    #[inline]
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(&GIVEN, layout.size());
        // SAFETY: `ptr` came from `System` with this layout, as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }

    #[inline]
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(&GIVEN, layout.size());
        count(&TAKEN, new_size);
        // SAFETY: `ptr` came from `System` with this layout, as the caller promises.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

/// Runs `make` and says how many bytes it left allocated (as requested, without the allocator's own overhead).
/// Not for two threads at once.
pub fn live_bytes<T>(make: impl FnOnce() -> T) -> (T, usize) {
    TAKEN.store(0, Ordering::Relaxed);
    GIVEN.store(0, Ordering::Relaxed);
    COUNTING.store(true, Ordering::Relaxed);
    let result = make();
    COUNTING.store(false, Ordering::Relaxed);
    (
        result,
        TAKEN
            .load(Ordering::Relaxed)
            .saturating_sub(GIVEN.load(Ordering::Relaxed)),
    )
}

/// A point in time in units of [`tick_ns`], read after everything before it has finished.
#[inline(always)]
pub fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_mm_lfence, _rdtsc};
        // SAFETY: the fence is part of SSE2, and that of x86-64.
        unsafe { _mm_lfence() };
        // SAFETY: reading the time stamp counter has no precondition.
        let now = unsafe { _rdtsc() };
        // SAFETY: as above.
        unsafe { _mm_lfence() };
        now
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }
}

/// Nanoseconds per tick, measured once against the monotonic clock.
pub fn tick_ns() -> f64 {
    static NS: OnceLock<f64> = OnceLock::new();
    *NS.get_or_init(|| {
        let (clock, first) = (Instant::now(), ticks());
        while clock.elapsed() < Duration::from_millis(20) {
            std::hint::spin_loop();
        }
        let elapsed = clock.elapsed().as_nanos() as f64;
        elapsed / (ticks() - first) as f64
    })
}

/// Which core a thread measures on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seat {
    /// The measuring thread: the last core, which interrupts prefer least.
    First,
    /// The second reader, or the writer.
    Second,
}

/// Pins the calling thread; without effect where there is no such core or pinning isn't allowed.
pub fn sit(seat: Seat) {
    let cores = all_cores();
    let index = match seat {
        Seat::First => cores.len().checked_sub(1),
        Seat::Second => cores.len().checked_sub(2),
    };
    if let Some(core) = index.and_then(|i| cores.get(i)) {
        core_affinity::set_for_current(*core);
    }
}

/// Number of cores that threads can be pinned to.
pub fn cores() -> usize {
    all_cores().len()
}

/// Asked for once, before anything is pinned: later the answer would be the one core that the caller is pinned to.
fn all_cores() -> &'static [CoreId] {
    static CORES: OnceLock<Vec<CoreId>> = OnceLock::new();
    CORES.get_or_init(|| core_affinity::get_core_ids().unwrap_or_default())
}
