//! When memory that readers may still be looking at can be freed.
//!
//! A [`Domain`] is a private epoch collector (crossbeam's, never the default one, which other libraries
//! share) with what it lacks: a count of what is pending, limits, a deadline, and frees that no reader
//! runs. What a writer retires waits in a list of its own; per 128 objects one tiny deferred closure
//! raises a mark when the epochs have passed; the freeing is done by [`Domain::collect`], which writers
//! call after they have let go of their locks.
//!
//! # Rules
//!
//! * **R1** An object is retired once, after the store that made it unreachable for new readers.
//! * **R2** It is freed after a closure that was deferred later has run (every epoch reader of that time
//!   has unpinned), and after every signal handler that was active then has left.
//! * **R3** A queue's segments are owned by the queue; the producer writes slots beyond the published
//!   count only, consumers take turns under a mutex and stay below it.
//! * **R4** A guard protects objects of its own domain only; every use compares the two.
//!
//! # Who frees, and when
//!
//! | caller | does |
//! |---|---|
//! | a reader's pin | at most: advances the epoch and raises marks (every 128th pin) |
//! | [`Domain::collect`] | frees what is past its grace period; destructors run here, under no lock of ours |
//! | [`Domain::synchronize`] | waits for a grace period, then frees everything retired before |
//! | [`Domain::throttle`] | at the hard limit waits a bounded time, and then says so |
//! | dropping the last handle | frees all the rest |

mod queue;
mod signal;

#[cfg(not(loom))]
use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::panic::resume_unwind;
#[cfg(not(loom))]
use std::sync::Weak;
use std::time::{Duration, Instant};

use crossbeam_epoch as epoch;

pub(crate) use self::queue::{Counters, Dispose, Drain, Panic, Producer, Queue};
use self::signal::SignalSlot;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex, planted};

/// How much retired memory a [`Domain`] may hold, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReclaimLimits {
    /// From here on every [`Domain::collect`] pushes the epoch forward.
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
    /// at least about that long. One starts with each full batch and with each call of
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
    collector: epoch::Collector,
    limits: ReclaimLimits,
    counters: Arc<Counters>,
    queues: Mutex<Vec<Arc<dyn Drain>>>,
    handlers: Mutex<Vec<Arc<SignalSlot>>>,
    probe: Mutex<Option<Probe>>,
    /// Snapshots alive: relaxed, statistics.
    pub(crate) snapshots: AtomicUsize,
}

/// One grace period under way, to tell how long it takes.
struct Probe {
    /// Store-release by the closure, load-acquire by who asks: nothing else is ordered by it.
    over: Arc<AtomicBool>,
    since: Instant,
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
            collector: epoch::Collector::new(),
            limits,
            counters: Arc::default(),
            queues: Mutex::new(Vec::new()),
            handlers: Mutex::new(Vec::new()),
            probe: Mutex::new(None),
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
            handle: self.inner.collector.register(),
            domain: self.clone(),
        }
    }

    /// Registers a context in which signal handlers of the calling thread may pin: see
    /// [`SignalReader`].
    pub fn register_signal(&self) -> SignalReader {
        let slot = Arc::new(SignalSlot::default());
        self.inner.handlers.lock().push(Arc::clone(&slot));
        SignalReader {
            slot,
            domain: self.clone(),
            not_send: PhantomData,
        }
    }

    /// Frees what is past its grace period; returns how many objects. Call it after letting go of the
    /// lock that guards the writer: destructors of retired values run here. Returns at once when nothing
    /// is due. Above the soft limit it also pushes the epoch forward.
    ///
    /// # Panics
    ///
    /// When a destructor does; everything that was due is freed all the same.
    pub fn collect(&self) -> usize {
        if self.inner.counters.pending() > self.inner.limits.soft_bytes {
            self.advance();
        }
        if !self.inner.counters.work.load(Ordering::Relaxed) {
            return 0;
        }
        self.drain()
    }

    #[cold]
    fn drain(&self) -> usize {
        if !self.inner.counters.work.swap(false, Ordering::Acquire) {
            return 0;
        }
        let queues = self.inner.queues.lock().clone();
        let mut objects = 0;
        let mut held_back = false;
        let mut panic = None;
        for queue in &queues {
            if let Some(count) = queue.seal() {
                self.defer_grace(queue, count);
                self.probe();
            }
            let drained = queue.drain(&self.inner.handlers);
            objects += drained.objects;
            held_back |= drained.held_back;
            panic = panic.or(drained.panic);
        }
        if held_back {
            self.inner.counters.work.store(true, Ordering::Release);
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
            Arc::strong_count(queue) == 1 && queue.freed() == queue.produced()
        };
        let mut queues = self.inner.queues.lock();
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
        for (queue, count) in &targets {
            self.defer_grace(queue, *count);
        }
        let over = Arc::new(AtomicBool::new(false));
        self.defer_mark(Arc::clone(&over));
        let mut pause = Backoff::default();
        loop {
            self.advance();
            self.drain();
            let freed = targets.iter().all(|(queue, count)| queue.freed() >= *count);
            if freed && over.load(Ordering::Acquire) {
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
            self.advance();
            self.drain();
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
        self.advance();
        let oldest_pin = self.probe();
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
            oldest_pin,
        }
    }

    /// The limits that the domain was made with.
    pub fn limits(&self) -> ReclaimLimits {
        self.inner.limits
    }

    /// How long the current grace period has been waiting; starts one when none is under way.
    fn probe(&self) -> Option<Duration> {
        if cfg!(loom) {
            // It reads a real clock, which a model may not.
            return None;
        }
        let mut probe = self.inner.probe.lock();
        if let Some(probe) = probe.as_ref()
            && !probe.over.load(Ordering::Acquire)
        {
            return Some(probe.since.elapsed());
        }
        let over = Arc::new(AtomicBool::new(false));
        *probe = Some(Probe {
            over: Arc::clone(&over),
            since: Instant::now(),
        });
        drop(probe);
        self.defer_mark(over);
        None
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

    fn defer_grace(&self, queue: &Arc<dyn Drain>, count: u64) {
        if planted("early_grace") {
            return queue.grace(count);
        }
        // Weak: a closure that never runs, because its handle stays idle, keeps no queue alive.
        let queue = Arc::downgrade(queue);
        self.with_handle(|handle| {
            let guard = handle.pin();
            guard.defer(move || {
                if let Some(queue) = queue.upgrade() {
                    queue.grace(count);
                }
            });
            guard.flush();
        });
    }

    fn defer_mark(&self, mark: Arc<AtomicBool>) {
        self.with_handle(|handle| {
            let guard = handle.pin();
            guard.defer(move || mark.store(true, Ordering::Release));
            guard.flush();
        });
    }

    /// Tries to move the epoch on and runs what is due.
    fn advance(&self) {
        self.with_handle(|handle| handle.pin().flush());
    }

    /// Runs `f` with a handle of the calling thread, kept for next time.
    #[cfg(not(loom))]
    fn with_handle<R>(&self, f: impl FnOnce(&epoch::LocalHandle) -> R) -> R {
        thread_local! {
            /// Handles of this thread, by domain. Those of domains that are gone leave when one is added.
            static HANDLES: RefCell<Vec<(Weak<Inner>, epoch::LocalHandle)>> =
                const { RefCell::new(Vec::new()) };
        }
        let mut f = Some(f);
        let result = HANDLES.try_with(|handles| {
            // A destructor that runs below `flush` may come back here: then, too, a handle for once.
            let mut handles = handles.try_borrow_mut().ok()?;
            let ours = Arc::as_ptr(&self.inner);
            let known = handles.iter().position(|(weak, _)| weak.as_ptr() == ours);
            let index = known.unwrap_or_else(|| {
                handles.retain(|(weak, _)| weak.strong_count() > 0);
                handles.push((Arc::downgrade(&self.inner), self.inner.collector.register()));
                handles.len() - 1
            });
            f.take().map(|f| f(&handles[index].1))
        });
        match (result, f) {
            (Ok(Some(result)), _) => result,
            (_, Some(f)) => f(&self.inner.collector.register()),
            (_, None) => unreachable!("`f` is taken only when it is called"),
        }
    }

    /// loom's threads share one real thread, and with it what is local to a thread.
    #[cfg(loom)]
    fn with_handle<R>(&self, f: impl FnOnce(&epoch::LocalHandle) -> R) -> R {
        f(&self.inner.collector.register())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Readers and trees hold a handle each: nobody can reach a retired object now.
        for queue in self.queues.lock().drain(..) {
            queue.grace(queue.produced());
            queue.drain(&Mutex::new(Vec::new()));
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

/// Spins, yields, then sleeps up to a millisecond.
#[derive(Default)]
struct Backoff(u32);

impl Backoff {
    fn wait(&mut self) {
        #[cfg(loom)]
        loom::thread::yield_now();
        #[cfg(not(loom))]
        match self.0 {
            0..8 => std::thread::yield_now(),
            n => std::thread::sleep(Duration::from_micros(1 << n.min(10))),
        }
        self.0 += 1;
    }
}

/// A registered thread. It stays with its thread; each thread registers itself.
pub struct Reader {
    handle: epoch::LocalHandle,
    domain: Domain,
}

impl Reader {
    /// Pins the thread: what is found under the guard isn't freed before the guard is dropped.
    ///
    /// Runs no frees of ours. crossbeam's own housekeeping, every 128th pin, raises the marks of batches
    /// whose grace period is over, and allocates or frees a queue node for some of those. Pins nest. Where not even
    /// that may happen (a signal handler, an allocator's own code), use a [`SignalReader`].
    #[inline]
    pub fn pin(&self) -> Guard<'_> {
        Guard {
            domain: &self.domain.inner,
            _pin: Pin::Epoch(self.handle.pin()),
        }
    }

    /// The domain that this reader is registered with.
    pub fn domain(&self) -> &Domain {
        &self.domain
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader").finish_non_exhaustive()
    }
}

/// A second registration of a thread, for its signal handlers.
///
/// [`pin`](Self::pin), lookups under it and the drop of its guard are async-signal-safe: a few loads,
/// stores and a fence; nothing is allocated, freed or waited for, whatever the handler interrupted (a
/// pin of this reader or of the thread's [`Reader`], a writer, the allocator). Handlers nest. While a
/// handler is pinned, nothing that it may see is freed; keep such pins as short as handlers are.
#[derive(Debug)]
pub struct SignalReader {
    slot: Arc<SignalSlot>,
    domain: Domain,
    not_send: PhantomData<*const ()>,
}

impl SignalReader {
    /// Pins the handler. See the type.
    pub fn pin(&self) -> Guard<'_> {
        self.slot.enter();
        Guard {
            domain: &self.domain.inner,
            _pin: Pin::Handler(HandlerPin(&self.slot)),
        }
    }
}

impl Drop for SignalReader {
    fn drop(&mut self) {
        self.slot.abandon();
        let mut handlers = self.domain.inner.handlers.lock();
        handlers.retain(|slot| !Arc::ptr_eq(slot, &self.slot));
    }
}

/// While it lives, nothing that was found under it is freed.
pub struct Guard<'r> {
    domain: &'r Inner,
    _pin: Pin<'r>,
}

#[expect(dead_code, reason = "held for their destructors")]
enum Pin<'r> {
    Epoch(epoch::Guard),
    Handler(HandlerPin<'r>),
}

struct HandlerPin<'r>(&'r SignalSlot);

impl Drop for HandlerPin<'_> {
    fn drop(&mut self) {
        self.0.leave();
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
