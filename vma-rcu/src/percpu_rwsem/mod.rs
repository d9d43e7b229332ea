//! A reader-writer semaphore for what is read all the time and written hardly ever.
//!
//! As Linux's `percpu_rw_semaphore`: a reader stores to a counter of its own and looks at a flag that hardly ever changes; it
//! shares no cache line with other readers and executes no fence where the platform has an asymmetric
//! barrier. A writer pays: it raises the flag, makes all threads execute a barrier, and waits until all counters
//! are zero. Linux counts per processor and turns preemption off meanwhile; here each *thread* has a counter, so that
//! plain stores suffice, and processors may come and go.
//!
//! # Who enters when
//!
//! | situation | rule |
//! |---|---|
//! | no writer | readers enter on the fast path |
//! | a writer is in, or waits for readers to leave | readers and writers queue, first in, first out |
//! | the writer leaves | readers at the front of the queue enter together; a writer behind them is next, and those behind it wait |
//! | nobody is left in the queue | readers are back on the fast path |
//! | somebody [holds writers off](PercpuRwSemaphore::hold_off_writers) | those that come from then on wait in a queue of their own until nobody does any more |
//!
//! So a reader waits for the writers before it, a writer for the readers and writers before it and for who holds it off, and nobody for
//! those that come later.
//!
//! # Counters
//!
//! A thread's seat says where its counter lies in every semaphore; a guard remembers both, so that who drops it asks only
//! whose seat it is. A counter is `entered` less `left` less `gone`: the first two are stored to by its thread alone (two
//! words, so that an unlock doesn't wait for the lock's store), and any other thread that drops a guard it was given adds
//! to the third. Threads beyond the number of counters, and readers that were let in by a leaving writer, use one that is
//! shared (by atomic additions).
//!
//! A thread that holds the shared side must not ask for it again: behind a waiting writer it would wait for
//! itself. Not for signal handlers: one that interrupts its thread's reader between the load and the store of a counter would
//! lose it. In the child of a fork the readers of other threads stay counted.
//!
//! ```
//! use vma_rcu::percpu_rwsem::PercpuRwSemaphore;
//!
//! let lock = PercpuRwSemaphore::new(1);
//! assert_eq!(*lock.read(), 1);
//! *lock.write() = 2;
//! assert_eq!(*lock.read(), 2);
//! ```

mod seat;

use std::cell::UnsafeCell;
use std::fmt;
use std::hint::cold_path;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::barrier::Barrier;
use crate::sync::atomic::{AtomicU32, AtomicUsize, Ordering, compiler_fence};
use crate::sync::{Bell, Mutex, planted};
use crate::wait::{GaveUp, Mode, Wait, WaitQueue, Waiter};

/// The fast path is closed.
const CLOSED: u32 = 1;
/// Readers execute a fence before they look at the gate.
const FENCED: u32 = 2;

/// Counters of a semaphore, unless it was made with another number.
const SEATS: usize = if cfg!(any(loom, shuttle)) { 4 } else { 64 };

/// In a guard: its counter is nobody's own. No thread has this seat.
const SHARED: usize = usize::MAX;

/// One thread's counter, or the shared one. Two cache lines, because some processors fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counter {
    /// Guards taken. Stored to by the thread whose it is, added to by all where it's shared; relaxed: that the writer misses no
    /// reader that hasn't seen the gate closed is the barrier's doing.
    entered: AtomicUsize,
    /// Guards that this thread has dropped. Store-release; load-acquire by the writer: what readers did comes before what the
    /// writer does. Models: `percpu_writers_and_readers_exclude_each_other`,
    /// `percpu_readers_are_back_on_the_fast_path`.
    left: AtomicUsize,
    /// Guards that other threads have dropped: added to, with the orderings of `left`.
    gone: AtomicUsize,
}

impl Counter {
    /// By its thread alone.
    #[inline(always)]
    fn enter(&self) {
        let entered = self.entered.load(Ordering::Relaxed);
        self.entered
            .store(entered.wrapping_add(1), Ordering::Relaxed);
    }

    /// By its thread alone.
    #[inline(always)]
    fn leave(&self) {
        let left = self.left.load(Ordering::Relaxed);
        let order = if planted("relaxed_percpu_unlock") {
            Ordering::Relaxed
        } else {
            Ordering::Release
        };
        self.left.store(left.wrapping_add(1), order);
    }

    /// By any thread, for whoever has entered.
    #[cold]
    fn leave_for_another(&self) {
        self.gone.fetch_add(1, Ordering::Release);
    }

    /// Whether no reader is in. Once nobody enters any more that stays so, but for those that are about to step back.
    fn is_empty(&self) -> bool {
        // `entered` last: what is seen of the others is never ahead of it.
        let early = planted("entered_first").then(|| self.entered.load(Ordering::Relaxed));
        let left = self.left.load(Ordering::Acquire);
        let gone = self.gone.load(Ordering::Acquire);
        let entered = early.unwrap_or_else(|| self.entered.load(Ordering::Relaxed));
        entered == left.wrapping_add(gone)
    }
}

/// See the [module](self).
pub struct PercpuRwSemaphore<T: ?Sized> {
    /// [`CLOSED`] while a writer is in or waits for readers to leave; [`FENCED`] where readers need a fence. Zero is
    /// what readers hope for. Store-release when it's opened, after the writer's last store; load-acquire by readers.
    gate: AtomicU32,
    barrier: Barrier,
    counters: Box<[Counter]>,
    /// Their size in bytes: the first seat that has none.
    limit: usize,
    /// Everybody's.
    shared: Counter,
    state: Mutex<State>,
    value: UnsafeCell<T>,
}

#[derive(Debug, Default)]
struct State {
    /// Empty unless `writer` is set.
    queue: WaitQueue,
    /// Writers that came while they were held off.
    postponed: WaitQueue,
    /// How many hold writers off.
    held_off: usize,
    /// Somebody has the exclusive side or waits for readers to leave.
    writer: bool,
    /// Rung when a reader leaves.
    draining: Option<Bell>,
}

// SAFETY: L2: the value goes with the semaphore.
unsafe impl<T: ?Sized + Send> Send for PercpuRwSemaphore<T> {}
// SAFETY: L2: readers share the value, and a writer may move it out from any thread.
unsafe impl<T: ?Sized + Send + Sync> Sync for PercpuRwSemaphore<T> {}

impl<T: Default> Default for PercpuRwSemaphore<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> PercpuRwSemaphore<T> {
    /// A free semaphore with 64 counters (8 KiB).
    pub fn new(value: T) -> Self {
        Self::with_counters(value, SEATS)
    }

    /// A free semaphore on which up to `counters` live threads have a counter of their own; further ones share one, at the
    /// cost of two atomic additions per read.
    pub fn with_counters(value: T, counters: usize) -> Self {
        Self::assemble(value, counters, Barrier::detect())
    }

    /// As where the platform has no asymmetric barrier: each reader executes a fence.
    #[doc(hidden)]
    pub fn with_fences(value: T, counters: usize) -> Self {
        Self::assemble(value, counters, Barrier::Symmetric)
    }

    fn assemble(value: T, counters: usize, barrier: Barrier) -> Self {
        PercpuRwSemaphore {
            gate: AtomicU32::new(Self::open(barrier)),
            barrier,
            counters: (0..counters).map(|_| Counter::default()).collect(),
            limit: counters * size_of::<Counter>(),
            shared: Counter::default(),
            state: Mutex::new(State::default()),
            value: UnsafeCell::new(value),
        }
    }

    /// The value.
    pub fn into_inner(self) -> T {
        self.value.into_inner()
    }

    fn open(barrier: Barrier) -> u32 {
        match barrier {
            Barrier::Symmetric => FENCED,
            Barrier::Asymmetric => 0,
        }
    }
}

impl<T: ?Sized> PercpuRwSemaphore<T> {
    /// The shared side, waiting as long as it takes.
    #[inline]
    pub fn read(&self) -> ReadGuard<'_, T> {
        if let Some(guard) = self.enter() {
            return guard;
        }
        self.wait_to_read();
        self.shared_guard()
    }

    #[cold]
    fn wait_to_read(&self) {
        match self.queue(Mode::Shared, Wait::forever()) {
            Ok(()) => {}
            Err(_) => unreachable!("nothing ends this wait early"),
        }
    }

    /// The shared side, waiting as `wait` says.
    ///
    /// # Errors
    ///
    /// [`GaveUp`]: the lock and its queue are as if nobody had asked. Without a writer it is entered whatever `wait` says.
    #[inline]
    pub fn read_with(&self, wait: Wait<'_>) -> Result<ReadGuard<'_, T>, GaveUp> {
        match self.enter() {
            Some(guard) => Ok(guard),
            None => self.read_slow(wait),
        }
    }

    /// The shared side, unless a writer is in, waits, or tries.
    #[inline]
    pub fn try_read(&self) -> Option<ReadGuard<'_, T>> {
        // Not needed, but so that who tries again and again doesn't step in each time and disturb the writer.
        if self.gate.load(Ordering::Relaxed) & CLOSED != 0 {
            return None;
        }
        self.enter()
    }

    /// The fast path.
    #[inline(always)]
    fn enter(&self) -> Option<ReadGuard<'_, T>> {
        let seat = seat::own();
        let Some(counter) = self.counter(seat) else {
            return self.enter_otherwise().map(|seat| self.guard(seat));
        };
        counter.enter();
        if self.is_closed() {
            counter.leave();
            self.stepped_back();
            return None;
        }
        Some(ReadGuard {
            lock: self,
            counter,
            seat,
        })
    }

    /// A seat's counter.
    #[inline(always)]
    fn counter(&self, seat: usize) -> Option<&Counter> {
        if seat >= self.limit {
            return None;
        }
        // SAFETY: L3: a multiple of a counter's size, and below that of all of them: one of them starts there.
        let counter = unsafe { self.counters.as_ptr().byte_add(seat) };
        // SAFETY: one of the counters, as above, which live as long as the lock and are only shared.
        Some(unsafe { &*counter })
    }

    /// For a seat on which the caller has been counted.
    fn guard(&self, seat: usize) -> ReadGuard<'_, T> {
        ReadGuard {
            lock: self,
            counter: self.counter(seat).unwrap_or(&self.shared),
            seat,
        }
    }

    /// The reader's barrier, and then a look at the gate.
    #[inline(always)]
    fn is_closed(&self) -> bool {
        compiler_fence(Ordering::SeqCst);
        let gate = self.gate.load(Ordering::Acquire);
        if gate == 0 {
            return false;
        }
        cold_path();
        self.is_closed_behind_a_fence(gate)
    }

    #[inline]
    fn is_closed_behind_a_fence(&self, gate: u32) -> bool {
        if gate & FENCED == 0 {
            return true;
        }
        self.barrier.light();
        self.gate.load(Ordering::Acquire) & CLOSED != 0
    }

    /// This reader has left, as the fast path was closed when it had come in.
    #[cold]
    fn stepped_back(&self) {
        if self.is_closed() {
            self.ring();
        }
    }

    /// The thread hasn't a counter of its own, or not yet: the seat it has entered on.
    #[cold]
    fn enter_otherwise(&self) -> Option<usize> {
        if seat::assign() {
            let guard = ManuallyDrop::new(self.enter()?);
            return Some(guard.seat);
        }
        self.shared.entered.fetch_add(1, Ordering::Relaxed);
        if self.is_closed() {
            drop(self.shared_guard());
            return None;
        }
        Some(SHARED)
    }

    fn shared_guard(&self) -> ReadGuard<'_, T> {
        ReadGuard {
            lock: self,
            counter: &self.shared,
            seat: SHARED,
        }
    }

    #[cold]
    fn read_slow(&self, wait: Wait<'_>) -> Result<ReadGuard<'_, T>, GaveUp> {
        self.queue(Mode::Shared, wait)?;
        // Whoever let us in has counted us.
        Ok(self.shared_guard())
    }

    /// The caller of the state's lock, or whoever waits, enters.
    fn let_in(&self, state: &mut State, mode: Mode) {
        match mode {
            Mode::Shared => {
                self.shared.entered.fetch_add(1, Ordering::Relaxed);
            }
            Mode::Exclusive => state.writer = true,
        }
    }

    /// Waits in the queue until somebody lets this thread in.
    fn queue(&self, mode: Mode, wait: Wait<'_>) -> Result<(), GaveUp> {
        let bell = Bell::new();
        let mut waiter = Waiter::new(mode, bell.clone());
        let waiter = NonNull::from(&mut waiter);
        // May allocate: before anything is queued.
        let sleep = wait.prepare(&bell);
        {
            let mut state = self.state.lock();
            let is_postponed = mode == Mode::Exclusive && state.held_off > 0;
            if !state.writer && !is_postponed {
                self.let_in(&mut state, mode);
                return Ok(());
            }
            let queue = if is_postponed {
                &mut state.postponed
            } else {
                &mut state.queue
            };
            // SAFETY: W1. Every way out of this function is behind its removal; nothing below unwinds.
            unsafe { queue.push(waiter) };
        }
        let granted = || {
            // SAFETY: pushed above.
            unsafe { self.state.lock().queue.is_granted(waiter) }
        };
        let Err(reason) = sleep.until(granted) else {
            return Ok(());
        };
        let mut state = self.state.lock();
        // SAFETY: pushed above.
        if unsafe { state.queue.is_granted(waiter) } {
            return Ok(());
        }
        // Those behind it wait for the writer that is in, or for who holds them off, as before.
        let queue = if state.postponed.contains(waiter) {
            &mut state.postponed
        } else {
            &mut state.queue
        };
        // SAFETY: pushed above, and in this queue unless it's in none.
        unsafe { queue.remove(waiter) };
        Err(reason)
    }

    /// Keeps writers that come from now on out until the result is dropped; those that wait already aren't.
    ///
    /// For a reader that can't sleep with what it holds, and so tries again and again: once it has slept for the shared side with writers
    /// held off, there are none left, and from then on it can't fail. Several may do it at once. Readers notice nothing. Whoever has the result
    /// must not wait for the exclusive side.
    pub fn hold_off_writers(&self) -> HoldOff<'_, T> {
        if !planted("no_hold_off") {
            self.state.lock().held_off += 1;
        }
        HoldOff { lock: self }
    }

    /// Nobody holds writers off any more.
    fn readmit(&self, state: &mut State) {
        let State {
            queue, postponed, ..
        } = state;
        queue.append(postponed);
        if !state.writer && state.queue.front().is_some() {
            self.let_in(state, Mode::Exclusive);
            state.queue.grant_front();
        }
    }

    /// The exclusive side, waiting as long as it takes.
    pub fn write(&self) -> WriteGuard<'_, T> {
        match self.write_with(Wait::forever()) {
            Ok(guard) => guard,
            Err(_) => unreachable!("nothing ends this wait early"),
        }
    }

    /// The exclusive side, waiting as `wait` says.
    ///
    /// # Errors
    ///
    /// As for [`read_with`](Self::read_with).
    pub fn write_with(&self, wait: Wait<'_>) -> Result<WriteGuard<'_, T>, GaveUp> {
        self.queue(Mode::Exclusive, wait)?;
        // From here on the guard lets the next ones in, whatever happens.
        let guard = WriteGuard { lock: self };
        self.drain(wait)?;
        Ok(guard)
    }

    /// The exclusive side, if nobody has either, waits, or is just looking.
    pub fn try_write(&self) -> Option<WriteGuard<'_, T>> {
        {
            let mut state = self.state.lock();
            if state.writer || state.held_off > 0 {
                return None;
            }
            state.writer = true;
        }
        let guard = WriteGuard { lock: self };
        self.close();
        self.drained(0).is_none().then_some(guard)
    }

    /// Closes the fast path, if it isn't closed: afterwards every reader that is in can be seen.
    fn close(&self) {
        // Closed already when another writer has handed over: nobody has entered but by the queue.
        let gate = self.gate.load(Ordering::Relaxed);
        if gate & CLOSED == 0 {
            self.gate.store(gate | CLOSED, Ordering::Relaxed);
            if !self.barrier.heavy() {
                // A closed gate would tell the next writer that this has been done.
                self.gate.store(gate, Ordering::Release);
                panic!("membarrier was there when it was asked for, and is gone now");
            }
        }
    }

    /// The first counter, from index `from` on, with a reader in. Once the fast path is closed, one that was seen empty has
    /// none until it's opened again, but for those that step back.
    fn drained(&self, from: usize) -> Option<usize> {
        let all = self.counters.iter().chain([&self.shared]).enumerate();
        let mut left = all.skip(from);
        left.find(|(_, counter)| !counter.is_empty())
            .map(|(index, _)| index)
    }

    /// Waits until no reader is in.
    fn drain(&self, wait: Wait<'_>) -> Result<(), GaveUp> {
        let bell = Bell::new();
        let sleep = wait.prepare(&bell);
        self.state.lock().draining = Some(bell.clone());
        self.close();
        let mut next = 0;
        sleep.until(|| match self.drained(next) {
            Some(busy) => {
                next = busy;
                false
            }
            None => true,
        })
    }

    /// The writer leaves, or gives up.
    fn hand_over(&self) {
        let mut state = self.state.lock();
        state.draining = None;
        while let Some(mode) = state.queue.front().map(|front| front.mode) {
            self.let_in(&mut state, mode);
            state.queue.grant_front();
            if mode == Mode::Exclusive {
                // It waits for the readers before it, with the fast path still closed.
                return;
            }
        }
        state.writer = false;
        if planted("no_reopen") {
            return;
        }
        let order = if planted("relaxed_reopen") {
            Ordering::Relaxed
        } else {
            Ordering::Release
        };
        let gate = self.gate.load(Ordering::Relaxed);
        self.gate.store(gate & !CLOSED, order);
    }

    /// A reader has left while the fast path was closed.
    #[cold]
    fn ring(&self) {
        if planted("no_ring") {
            return;
        }
        if let Some(bell) = &self.state.lock().draining {
            bell.ring();
        }
    }

    /// Whether readers enter on the fast path: a hint.
    pub fn is_fast(&self) -> bool {
        self.gate.load(Ordering::Relaxed) & CLOSED == 0
    }

    /// Whether readers do without a fence: the kernel has `membarrier`.
    pub fn is_asymmetric(&self) -> bool {
        self.barrier == Barrier::Asymmetric
    }

    /// The value, which nobody else can reach.
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for PercpuRwSemaphore<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("PercpuRwSemaphore");
        match self.try_read() {
            Some(guard) => out.field("value", &&*guard),
            None => out.field("value", &format_args!("<locked>")),
        };
        out.finish_non_exhaustive()
    }
}

/// The shared side of a [`PercpuRwSemaphore`]. It may be dropped in another thread than it was taken in.
///
/// **L2** While it lives nobody has the exclusive side.
#[must_use = "the lock is let go of when the guard is dropped"]
pub struct ReadGuard<'l, T: ?Sized> {
    lock: &'l PercpuRwSemaphore<T>,
    /// Where it counts.
    counter: &'l Counter,
    /// Whose that is, or [`SHARED`].
    seat: usize,
}

impl<T: ?Sized> Deref for ReadGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: L2.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T: ?Sized> Drop for ReadGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if self.seat == seat::own() || planted("foreign_as_own") {
            self.counter.leave();
        } else {
            self.counter.leave_for_another();
        }
        if self.lock.is_closed() {
            self.lock.ring();
        }
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for ReadGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// Keeps new writers of a [`PercpuRwSemaphore`] waiting: see [`hold_off_writers`](PercpuRwSemaphore::hold_off_writers).
#[must_use = "writers come in when it is dropped"]
pub struct HoldOff<'l, T: ?Sized> {
    lock: &'l PercpuRwSemaphore<T>,
}

impl<T: ?Sized> Drop for HoldOff<'_, T> {
    fn drop(&mut self) {
        if planted("no_hold_off") {
            return;
        }
        let mut state = self.lock.state.lock();
        state.held_off -= 1;
        if state.held_off == 0 && !planted("no_readmit") {
            self.lock.readmit(&mut state);
        }
    }
}

impl<T: ?Sized> fmt::Debug for HoldOff<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HoldOff").finish_non_exhaustive()
    }
}

/// The exclusive side of a [`PercpuRwSemaphore`].
///
/// **L2** While it lives nobody else has either side.
#[must_use = "the lock is let go of when the guard is dropped"]
pub struct WriteGuard<'l, T: ?Sized> {
    lock: &'l PercpuRwSemaphore<T>,
}

impl<T: ?Sized> Deref for WriteGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: L2.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T: ?Sized> DerefMut for WriteGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: L2.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T: ?Sized> Drop for WriteGuard<'_, T> {
    fn drop(&mut self) {
        self.lock.hand_over();
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for WriteGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
