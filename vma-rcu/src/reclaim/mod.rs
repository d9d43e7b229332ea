//! When memory that readers may still be looking at can be freed.
//!
//! A [`Domain`] knows its readers by a slot each, counts what writers have retired, and frees it after a grace
//! period: when every reader that was pinned at its beginning has unpinned. What a writer retires waits
//! in a list of its own; per 128 objects there is one grace period; the freeing is done by
//! [`Domain::collect`], which writers call after they have let go of their locks.
//!
//! # Rules
//!
//! * **R1** An object is retired once, after the store that made it unreachable for new readers.
//! * **R2** It is freed after a grace period that began later: every reader that was pinned at its beginning has
//!   unpinned since.
//! * **R3** A queue's segments are owned by the queue; the producer writes slots beyond the published
//!   count only, consumers take turns under a mutex and stay below it.
//! * **R4** A guard protects objects of its own domain only; every use compares the two.
//!
//! # Who frees, and when
//!
//! | caller | does |
//! |---|---|
//! | a reader's pin and unpin | stores to its own slot, nothing else, ever |
//! | [`Domain::collect`] | frees what is past its grace period; destructors run here, under no lock of ours |
//! | [`Domain::synchronize`] | waits for a grace period, then frees everything retired before |
//! | [`Domain::throttle`] | at the hard limit waits a bounded time, and then says so |
//! | dropping the last handle | frees all the rest |
//! | [`Domain::wind_down`], and then each [`Reader`] that is dropped | frees what nobody looks at any more |

mod grace;
mod limbo;
mod queue;
mod slot;

use std::fmt;
use std::marker::PhantomData;
use std::panic::resume_unwind;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use self::grace::GracePeriods;
pub use self::limbo::Limbo;
pub(crate) use self::queue::{Counters, Dispose, Drain, Panic, Producer, Queue, keep_first};
use self::slot::Slot;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use crate::sync::{Arc, Mutex, planted};

/// How much retired memory a [`Domain`] may hold, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReclaimLimits {
    /// From here on [`Domain::collect`] doesn't wait for a batch to fill.
    pub soft_bytes: usize,
    /// From here on [`Domain::throttle`] makes writers wait.
    pub hard_bytes: usize,
}

impl Default for ReclaimLimits {
    /// 4 MiB and 64 MiB.
    fn default() -> Self {
        ReclaimLimits {
            soft_bytes: 4 << 20,
            hard_bytes: 64 << 20,
        }
    }
}

/// What a domain holds at the moment. Exact when no writer is at work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReclaimStats {
    /// Objects retired and not yet freed.
    pub pending_objects: u64,
    /// Their size in bytes.
    pub pending_bytes: usize,
    /// Objects freed so far.
    pub freed_objects: u64,
    /// Snapshots that are alive, each of which holds a guard.
    pub snapshots: usize,
    /// How long the grace period under way has been waiting for readers: some reader has been pinned for
    /// at least that long. One begins with each full batch and with each call of
    /// [`Domain::stats`]; `None` when none is under way.
    pub oldest_pin: Option<Duration>,
}

/// [`Domain::synchronize`] reached its deadline: some reader of the time of the call is still pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedOut {
    /// Objects still pending.
    pub pending_objects: u64,
}

impl fmt::Display for TimedOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a reader stayed pinned up to the deadline; {} retired objects are pending",
            self.pending_objects
        )
    }
}

impl std::error::Error for TimedOut {}

/// [`Domain::throttle`] reached its deadline above the hard limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverLimit {
    /// Bytes pending.
    pub pending_bytes: usize,
    /// The hard limit.
    pub hard_bytes: usize,
}

impl fmt::Display for OverLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} bytes of retired memory are pending, the hard limit is {}: some reader stays pinned",
            self.pending_bytes, self.hard_bytes
        )
    }
}

impl std::error::Error for OverLimit {}

/// A reclamation domain. Clones are handles to the same one.
#[derive(Clone, Debug)]
pub struct Domain {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    grace: GracePeriods,
    limits: ReclaimLimits,
    counters: Arc<Counters>,
    queues: Mutex<Vec<Arc<dyn Drain>>>,
    /// Readers that leave free what they held up. `SeqCst` fences on both sides, between store and look at the slots, and between leaving
    /// the slot and this load: either whoever winds down sees that the reader has left, or the reader that it is to free.
    /// Model: `who_winds_down_or_the_last_reader_frees`.
    winding_down: AtomicBool,
    /// Snapshots alive: relaxed, statistics.
    pub(crate) snapshots: AtomicUsize,
}

impl Default for Domain {
    fn default() -> Self {
        Self::new(ReclaimLimits::default())
    }
}

impl Domain {
    /// A domain of its own; nothing is shared with any other.
    pub fn new(limits: ReclaimLimits) -> Self {
        let inner = Inner {
            grace: GracePeriods::default(),
            limits,
            counters: Arc::default(),
            queues: Mutex::new(Vec::new()),
            winding_down: AtomicBool::new(false),
            snapshots: AtomicUsize::new(0),
        };
        Domain {
            inner: Arc::new(inner),
        }
    }

    /// Registers the calling thread as a reader. Allocates; afterwards neither [`Reader::pin`] nor a
    /// lookup does.
    pub fn register(&self) -> Reader {
        Reader {
            slot: self.inner.grace.register(),
            domain: self.clone(),
            not_send: PhantomData,
        }
    }

    /// Frees what is past its grace period; returns how many objects. Call it after letting go of the
    /// lock that guards the writer: destructors of retired values run here. Returns at once when nothing
    /// is due. Above the soft limit it doesn't wait for a batch to fill.
    ///
    /// # Panics
    ///
    /// When a destructor does; everything that was due is freed all the same.
    #[inline]
    pub fn collect(&self) -> usize {
        let full = self.inner.counters.pending() > self.inner.limits.soft_bytes;
        if !full && !self.inner.counters.work.load(Ordering::Relaxed) {
            return 0;
        }
        self.drain(full)
    }

    /// Moves grace periods on and frees what is past its own. Batches that aren't full begin to wait too, if
    /// `all` is asked for.
    #[cold]
    fn drain(&self, all: bool) -> usize {
        let inner = &*self.inner;
        // What is due has to wait for the period under way, at least: the mark stays.
        if !all && inner.grace.is_waiting() {
            return 0;
        }
        // Whatever raises the mark from here on is seen by the next call.
        inner.counters.work.swap(false, Ordering::Acquire);
        // Destructors run below: they may come back here, or drop a writer.
        let queues: SmallVec<[Arc<dyn Drain>; 4]> = inner.queues.lock().iter().cloned().collect();
        for queue in &queues {
            queue.seal(&inner.grace, all);
        }
        let over = inner.grace.poll();
        let mut objects = 0;
        let mut more = false;
        let mut panic = None;
        for queue in &queues {
            let drained = queue.drain(over);
            objects += drained.objects;
            more |= drained.more;
            keep_first(&mut panic, drained.panic);
        }
        if more {
            inner.counters.work.store(true, Ordering::Release);
        }
        drop(queues);
        self.forget_idle();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
        objects
    }

    /// Lets go of queues whose writer is gone and that are empty.
    fn forget_idle(&self) {
        let idle = |queue: &Arc<dyn Drain>| {
            let last = Arc::strong_count(queue) == 1;
            // With the writer's handle gone, all that it pushed is seen.
            fence(Ordering::Acquire);
            last && queue.freed() == queue.produced()
        };
        let mut queues = self.inner.queues.lock();
        if !queues.iter().any(idle) {
            return;
        }
        let gone: Vec<_> = queues.extract_if(.., |queue| idle(queue)).collect();
        drop(queues);
        drop(gone);
    }

    /// Waits until every guard of the time of the call has gone, then frees everything that was retired
    /// before the call, in half-filled batches too. With no writer at work nothing is pending
    /// afterwards.
    ///
    /// Never call it with a guard of this domain in the same thread, nor in the destructor of a value of one of
    /// its trees: it would wait for itself.
    ///
    /// # Panics
    ///
    /// When a destructor does, as [`collect`](Self::collect).
    ///
    /// # Errors
    ///
    /// [`TimedOut`] at the deadline (`None`: never). What was past its grace period has been freed.
    pub fn synchronize(&self, deadline: Option<Instant>) -> Result<(), TimedOut> {
        let targets: Vec<(Arc<dyn Drain>, u64)> = {
            let queues = self.inner.queues.lock();
            let target = |queue: &Arc<dyn Drain>| (Arc::clone(queue), queue.produced());
            queues.iter().map(target).collect()
        };
        let ticket = self.inner.grace.ticket();
        let mut pause = Backoff::default();
        loop {
            self.drain(true);
            let freed = targets.iter().all(|(queue, count)| queue.freed() >= *count);
            if freed && self.inner.grace.poll() >= ticket {
                drop(targets);
                self.forget_idle();
                return Ok(());
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                let pending_objects = self.stats().pending_objects;
                return Err(TimedOut { pending_objects });
            }
            pause.wait();
        }
    }

    /// Frees what no reader looks at any more, without waiting, and has readers free what they hold up when they are dropped.
    ///
    /// For who has retired the last value: values that hold a handle to their own domain keep it, and so themselves, until somebody
    /// [collects](Self::collect).
    ///
    /// # Panics
    ///
    /// When a destructor does, as [`collect`](Self::collect).
    pub fn wind_down(&self) {
        self.inner.winding_down.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.free_rest();
    }

    /// What a destructor retires is freed as well.
    fn free_rest(&self) {
        while self.drain(true) > 0 {}
    }

    /// Whether both are handles to one domain.
    pub fn is_same(&self, other: &Domain) -> bool {
        self.is(&other.inner)
    }

    /// Returns at once below the hard limit; above it frees, and waits for readers to unpin. Writers
    /// call it *before* they take the lock that guards the writer.
    ///
    /// # Panics
    ///
    /// When a destructor does, as [`collect`](Self::collect).
    ///
    /// # Errors
    ///
    /// [`OverLimit`] at the deadline (`None`: one look, no wait).
    #[inline]
    pub fn throttle(&self, deadline: Option<Instant>) -> Result<(), OverLimit> {
        if self.inner.counters.pending() <= self.inner.limits.hard_bytes {
            return Ok(());
        }
        self.throttle_slow(deadline)
    }

    #[cold]
    fn throttle_slow(&self, deadline: Option<Instant>) -> Result<(), OverLimit> {
        let mut pause = Backoff::default();
        loop {
            self.drain(true);
            let pending_bytes = self.inner.counters.pending();
            let hard_bytes = self.inner.limits.hard_bytes;
            if pending_bytes <= hard_bytes {
                return Ok(());
            }
            if deadline.is_none_or(|deadline| Instant::now() >= deadline) {
                return Err(OverLimit {
                    pending_bytes,
                    hard_bytes,
                });
            }
            pause.wait();
        }
    }

    /// What is pending, and since when.
    pub fn stats(&self) -> ReclaimStats {
        self.inner.grace.ticket();
        self.inner.grace.poll();
        let queues = self.inner.queues.lock();
        let pending = |queue: &Arc<dyn Drain>| {
            let freed = queue.freed();
            queue.produced() - freed
        };
        ReclaimStats {
            pending_objects: queues.iter().map(pending).sum(),
            pending_bytes: queues.iter().map(|queue| queue.pending_bytes()).sum(),
            freed_objects: queues.iter().map(|queue| queue.freed()).sum(),
            snapshots: self.inner.snapshots.load(Ordering::Relaxed),
            oldest_pin: self.inner.grace.age(),
        }
    }

    /// The limits that the domain was made with.
    pub fn limits(&self) -> ReclaimLimits {
        self.inner.limits
    }

    pub(crate) fn is(&self, inner: &Inner) -> bool {
        std::ptr::eq::<Inner>(&raw const *self.inner, inner)
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.inner
    }

    pub(crate) fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.inner.counters)
    }

    pub(crate) fn adopt(&self, queue: Arc<dyn Drain>) {
        self.inner.queues.lock().push(queue);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Readers and trees hold a handle each: nobody can reach a retired object now.
        for queue in self.queues.lock().drain(..) {
            while queue.freed() < queue.produced() {
                queue.seal(&self.grace, true);
                queue.drain(self.grace.poll());
            }
        }
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner")
            .field("limits", &self.limits)
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

/// Yields, then sleeps up to a millisecond.
#[derive(Default)]
struct Backoff(u32);

impl Backoff {
    fn wait(&mut self) {
        #[cfg(shuttle)]
        shuttle::thread::yield_now();
        #[cfg(loom)]
        loom::thread::yield_now();
        #[cfg(not(any(loom, shuttle)))]
        match self.0 {
            0..8 => std::thread::yield_now(),
            n => std::thread::sleep(Duration::from_micros(1 << n.min(10))),
        }
        self.0 = self.0.saturating_add(1);
    }
}

/// A registered thread. It stays with its thread; each thread registers itself.
///
/// [`pin`](Self::pin), lookups under it and the drop of its guard are async-signal-safe: a few loads,
/// stores and a fence; nothing is allocated, freed or waited for, whatever a handler of this thread interrupted
/// (a pin of this very reader half-way, a lookup, a writer, the allocator).
pub struct Reader {
    slot: Arc<Slot>,
    domain: Domain,
    not_send: PhantomData<*const ()>,
}

impl Reader {
    /// Pins the thread: what is found under the guard isn't freed before the guard is dropped. Pins nest; the
    /// outermost counts. Keep them short: nothing that is retired meanwhile can be freed.
    #[inline]
    pub fn pin(&self) -> Guard<'_> {
        self.slot.enter();
        Guard {
            domain: &self.domain.inner,
            slot: &self.slot,
            not_send: PhantomData,
        }
    }

    /// The domain that this reader is registered with.
    pub fn domain(&self) -> &Domain {
        &self.domain
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.domain.inner.grace.unregister(&self.slot);
        if !planted("no_wind_down_fence") {
            fence(Ordering::SeqCst);
        }
        if self.domain.inner.winding_down.load(Ordering::Relaxed) {
            self.domain.free_rest();
        }
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader").finish_non_exhaustive()
    }
}

/// While it lives, nothing that was found under it is freed. It stays with its thread.
pub struct Guard<'r> {
    domain: &'r Inner,
    slot: &'r Slot,
    not_send: PhantomData<*const ()>,
}

impl Drop for Guard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.slot.leave();
    }
}

impl Guard<'_> {
    /// R4: is it a guard of this domain?
    #[inline]
    pub(crate) fn protects(&self, domain: &Domain) -> bool {
        domain.is(self.domain)
    }
}

impl fmt::Debug for Guard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard").finish_non_exhaustive()
    }
}
