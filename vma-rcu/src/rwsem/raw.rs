//! The lock without a value: one word and a queue.
//!
//! ```text
//! state   readers (bits 2..) | QUEUED (bit 1) | WRITER (bit 0)
//! ```
//!
//! Nobody enters by the word alone while `QUEUED` is set: whoever leaves then, and whoever comes, goes through the
//! queue's mutex. So under the mutex, with the bit set, the word only falls, and a decision taken there stays right.
//!
//! Whoever leaves last wakes the front of the queue and leaves the lock free for it. While it wakes up, another
//! *writer* may go first, so that a short critical section isn't followed by a thread's wake-up each time; after
//! some times ([`overtake`]) the lock is handed over instead.

use std::ptr::NonNull;

use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Bell, Mutex, planted};
use crate::wait::{GaveUp, Mode, Wait, WaitQueue, Waiter};

const WRITER: usize = 1;
const QUEUED: usize = 2;
const READER: usize = 4;
/// More readers than there is memory for guards.
const MAX_READERS: usize = usize::MAX / 2;

/// How often writers may go before the front of the queue.
fn overtake() -> u32 {
    if planted("always_hand_over") || planted("relaxed_hand_over") {
        0
    } else if cfg!(any(loom, shuttle)) {
        1
    } else {
        32
    }
}

/// Looks at the word before a thread queues.
const SPINS: u32 = if cfg!(any(loom, shuttle)) { 0 } else { 40 };

#[derive(Debug, Default)]
pub(super) struct RawRwSemaphore {
    /// Acquire when entering, release when leaving: what one holder did comes before the next, readers' loads
    /// before a writer's stores included. Whoever enters for another (a hand-over) does so by the same, and the
    /// queue's mutex passes it on. Models: `writers_and_readers_exclude_each_other`,
    /// `a_downgrade_lets_no_writer_in_between`.
    state: AtomicUsize,
    queue: Mutex<WaitQueue>,
}

fn hand_over_order() -> Ordering {
    if planted("relaxed_hand_over") {
        Ordering::Relaxed
    } else {
        Ordering::Acquire
    }
}

/// Whether `mode` may enter beside those that are in.
fn is_free(state: usize, mode: Mode) -> bool {
    match mode {
        Mode::Shared => state & WRITER == 0 && state < MAX_READERS,
        Mode::Exclusive => state & !QUEUED == 0,
    }
}

/// Whether a newcomer may go before those in the queue, if the lock is free. The front remembers it.
fn may_overtake(queue: &mut WaitQueue, mode: Mode) -> bool {
    let Some(front) = queue.front() else {
        return true;
    };
    if mode == Mode::Shared || front.overtaken >= overtake() {
        return false;
    }
    front.overtaken += 1;
    true
}

impl RawRwSemaphore {
    #[inline]
    pub(super) fn try_shared(&self) -> bool {
        let mut state = self.state.load(Ordering::Relaxed);
        while state & (WRITER | QUEUED) == 0 && state < MAX_READERS {
            let next = state + READER;
            match self.state.compare_exchange_weak(
                state,
                next,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
        false
    }

    #[inline]
    pub(super) fn try_exclusive(&self) -> bool {
        self.state
            .compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }

    #[inline]
    fn try_enter(&self, mode: Mode) -> bool {
        match mode {
            Mode::Shared => self.try_shared(),
            Mode::Exclusive => self.try_exclusive(),
        }
    }

    #[inline]
    pub(super) fn enter(&self, mode: Mode, wait: Wait<'_>) -> Result<(), GaveUp> {
        if self.try_enter(mode) {
            Ok(())
        } else {
            self.enter_slow(mode, wait)
        }
    }

    #[cold]
    fn enter_slow(&self, mode: Mode, wait: Wait<'_>) -> Result<(), GaveUp> {
        for spin in 0..SPINS {
            if self.state.load(Ordering::Relaxed) & QUEUED != 0 {
                break;
            }
            if self.try_enter(mode) {
                return Ok(());
            }
            for _ in 0..1 << (spin / 8) {
                std::hint::spin_loop();
            }
        }
        let bell = Bell::new();
        let mut waiter = Waiter::new(mode, bell.clone());
        let waiter = NonNull::from(&mut waiter);
        // May allocate: before anything is queued.
        let sleep = wait.prepare(&bell);
        let mut queue = self.queue.lock();
        let state = self.state.fetch_or(QUEUED, Ordering::Relaxed);
        if is_free(state, mode) && may_overtake(&mut queue, mode) {
            self.take(&mut queue, mode);
            return Ok(());
        }
        if let Err(reason) = wait.check() {
            self.settle(&mut queue);
            return Err(reason);
        }
        // SAFETY: W1. Every way out of this function is behind its removal; nothing below unwinds.
        unsafe { queue.push(waiter) };
        drop(queue);
        let result = sleep.until(|| self.look_again(waiter, mode));
        if let Err(reason) = result
            && !self.leave_queue(waiter)
        {
            return Err(reason);
        }
        Ok(())
    }

    /// Enters: the caller has the queue, and has seen that the lock is free for `mode`.
    fn take(&self, queue: &mut WaitQueue, mode: Mode) {
        let add = match mode {
            Mode::Shared => READER,
            Mode::Exclusive => WRITER,
        };
        self.state.fetch_add(add, Ordering::Acquire);
        self.unmark(queue);
    }

    /// `QUEUED` goes with the last waiter.
    fn unmark(&self, queue: &mut WaitQueue) {
        if queue.is_empty() {
            self.state.fetch_and(!QUEUED, Ordering::Relaxed);
        }
    }

    /// A waiter was woken: has it been let in, or can it enter now?
    fn look_again(&self, waiter: NonNull<Waiter>, mode: Mode) -> bool {
        let mut queue = self.queue.lock();
        // SAFETY: pushed by our caller.
        if unsafe { queue.is_granted(waiter) } {
            return true;
        }
        if !queue.is_front(waiter) || !is_free(self.state.load(Ordering::Relaxed), mode) {
            return false;
        }
        // SAFETY: as above.
        unsafe { queue.remove(waiter) };
        self.take(&mut queue, mode);
        if mode == Mode::Shared {
            self.grant_readers(&mut queue);
        }
        true
    }

    /// A waiter gives up; true when it had been let in meanwhile.
    fn leave_queue(&self, waiter: NonNull<Waiter>) -> bool {
        let mut queue = self.queue.lock();
        // SAFETY: pushed by our caller.
        if unsafe { queue.is_granted(waiter) } {
            return true;
        }
        // SAFETY: as above.
        unsafe { queue.remove(waiter) };
        // Those behind may be able to enter now.
        if !planted("no_settle") {
            self.settle(&mut queue);
        }
        false
    }

    /// Readers at the front enter together.
    fn grant_readers(&self, queue: &mut WaitQueue) {
        while queue
            .front()
            .is_some_and(|front| front.mode == Mode::Shared)
            && is_free(self.state.load(Ordering::Relaxed), Mode::Shared)
            && !planted("ungranted_readers")
        {
            self.state.fetch_add(READER, hand_over_order());
            queue.grant_front();
        }
        self.unmark(queue);
    }

    /// The lock may have come free for the front of the queue.
    fn settle(&self, queue: &mut WaitQueue) {
        let state = self.state.load(Ordering::Relaxed);
        let Some(front) = queue.front() else {
            return self.unmark(queue);
        };
        if !is_free(state, front.mode) {
            return;
        }
        if front.overtaken < overtake() {
            return front.nudge();
        }
        match front.mode {
            Mode::Shared => self.grant_readers(queue),
            Mode::Exclusive => {
                self.state.fetch_add(WRITER, hand_over_order());
                queue.grant_front();
                self.unmark(queue);
            }
        }
    }

    #[cold]
    fn wake(&self) {
        self.settle(&mut self.queue.lock());
    }

    #[inline]
    pub(super) fn leave_shared(&self) {
        let order = if planted("relaxed_read_unlock") {
            Ordering::Relaxed
        } else {
            Ordering::Release
        };
        let before = self.state.fetch_sub(READER, order);
        if before == READER | QUEUED && !planted("no_wake") {
            self.wake();
        }
    }

    #[inline]
    pub(super) fn leave_exclusive(&self) {
        let before = self.state.fetch_sub(WRITER, Ordering::Release);
        if before & QUEUED != 0 && !planted("no_wake") {
            self.wake();
        }
    }

    /// From exclusive to shared, in one step.
    #[inline]
    pub(super) fn downgrade(&self) {
        if planted("torn_downgrade") {
            self.leave_exclusive();
            let _ = self.enter(Mode::Shared, Wait::forever());
            return;
        }
        let before = self.state.fetch_add(READER - WRITER, Ordering::Release);
        if before & QUEUED != 0 && !planted("silent_downgrade") {
            self.wake();
        }
    }

    /// Whether somebody waits: a hint.
    #[inline]
    pub(super) fn is_contended(&self) -> bool {
        self.state.load(Ordering::Relaxed) & QUEUED != 0
    }
}
