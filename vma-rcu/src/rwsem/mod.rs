//! A reader-writer semaphore whose waits can be given up and whose exclusive side can be downgraded.
//!
//! As Linux's `rw_semaphore`: many readers or one writer; [`WriteGuard::downgrade`] turns the writer into a
//! reader with no other writer in between; every wait takes a [`Wait`]. Unlike `parking_lot`'s lock,
//! nothing is allocated when a thread waits (a killable wait may), a wait can be cancelled from outside, and guards may
//! be dropped in another thread.
//!
//! # Who enters when
//!
//! | situation | rule |
//! |---|---|
//! | nobody waits | whoever comes; readers beside readers |
//! | somebody waits | newcomers queue behind: a waiting writer keeps new readers out |
//! | the lock comes free | the front of the queue is woken; readers at the front enter together, up to the first writer |
//! | the woken thread isn't there yet | another *writer* may go first, 32 times; then the lock is handed over |
//! | after a downgrade | readers at the front enter; a writer at the front goes on waiting, and keeps those behind it out |
//! | a waiter gives up | those behind it are looked at again |
//!
//! So nobody starves: a thread waits for those before it in the queue, and for at most 32 writers each.
//!
//! A thread that holds the shared side must not ask for it again: behind a waiting writer it would wait for
//! itself. Not for signal handlers. The first wait of a thread that std hasn't made may allocate its handle.
//!
//! ```
//! use vma_rcu::rwsem::RwSemaphore;
//!
//! let lock = RwSemaphore::new(vec![1]);
//! let mut writer = lock.write();
//! writer.push(2);
//! let reader = writer.downgrade();
//! assert_eq!(*reader, [1, 2]);
//! assert!(lock.try_read().is_some() && lock.try_write().is_none());
//! ```

mod raw;

use std::cell::UnsafeCell;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use self::raw::RawRwSemaphore;
use crate::wait::{GaveUp, Mode, Wait};

/// Hears how long threads waited for a semaphore and held it. `()` hears nothing, at no cost: no clock is read.
pub trait LockStatistics {
    /// Whether to measure at all.
    const ACTIVE: bool = true;

    /// The same as a question of the moment: asked before each wait and each hold, and where the answer is no, no clock is read for it.
    #[inline]
    fn is_active(&self) -> bool {
        true
    }

    /// A thread has entered, this time after it asked; uncontended entries included, tries and waits that were given up not.
    /// Called with the lock held.
    fn waited(&self, exclusive: bool, time: Duration);

    /// A thread has held the lock for this time. Called after it has let go; at a downgrade, for the exclusive part, with the
    /// shared side held.
    fn held(&self, exclusive: bool, time: Duration);
}

impl LockStatistics for () {
    const ACTIVE: bool = false;

    #[inline]
    fn waited(&self, _: bool, _: Duration) {}

    #[inline]
    fn held(&self, _: bool, _: Duration) {}
}

#[inline]
fn now<S: LockStatistics>(statistics: &S) -> Option<Instant> {
    (S::ACTIVE && statistics.is_active()).then(Instant::now)
}

/// See the [module](self).
#[derive(Default)]
pub struct RwSemaphore<T: ?Sized, S = ()> {
    raw: RawRwSemaphore,
    statistics: S,
    value: UnsafeCell<T>,
}

// SAFETY: L1: the value goes with the semaphore.
unsafe impl<T: ?Sized + Send, S: Send> Send for RwSemaphore<T, S> {}
// SAFETY: L1: readers share the value, and a writer may move it out from any thread.
unsafe impl<T: ?Sized + Send + Sync, S: Sync> Sync for RwSemaphore<T, S> {}

impl<T> RwSemaphore<T> {
    /// A free semaphore.
    pub fn new(value: T) -> Self {
        Self::with_statistics(value, ())
    }
}

impl<T, S: LockStatistics> RwSemaphore<T, S> {
    /// A free semaphore whose waits and holds are measured.
    pub fn with_statistics(value: T, statistics: S) -> Self {
        RwSemaphore {
            raw: RawRwSemaphore::default(),
            statistics,
            value: UnsafeCell::new(value),
        }
    }

    /// The value.
    pub fn into_inner(self) -> T {
        self.value.into_inner()
    }
}

impl<T: ?Sized, S: LockStatistics> RwSemaphore<T, S> {
    /// The shared side, waiting as long as it takes.
    #[inline]
    pub fn read(&self) -> ReadGuard<'_, T, S> {
        match self.read_with(Wait::forever()) {
            Ok(guard) => guard,
            Err(_) => unreachable!("nothing ends this wait early"),
        }
    }

    /// The shared side, waiting as `wait` says.
    ///
    /// # Errors
    ///
    /// [`GaveUp`]: the lock and its queue are as if nobody had asked. A free lock is entered whatever `wait` says.
    #[inline]
    pub fn read_with(&self, wait: Wait<'_>) -> Result<ReadGuard<'_, T, S>, GaveUp> {
        let asked = now(&self.statistics);
        self.raw.enter(Mode::Shared, wait)?;
        let guard = ReadGuard::of(self);
        self.entered(false, asked);
        Ok(guard)
    }

    /// The shared side, if it's free and nobody waits or is about to.
    #[inline]
    pub fn try_read(&self) -> Option<ReadGuard<'_, T, S>> {
        self.raw.try_shared().then(|| ReadGuard::of(self))
    }

    /// The exclusive side, waiting as long as it takes.
    #[inline]
    pub fn write(&self) -> WriteGuard<'_, T, S> {
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
    #[inline]
    pub fn write_with(&self, wait: Wait<'_>) -> Result<WriteGuard<'_, T, S>, GaveUp> {
        let asked = now(&self.statistics);
        self.raw.enter(Mode::Exclusive, wait)?;
        let guard = WriteGuard::of(self);
        self.entered(true, asked);
        Ok(guard)
    }

    /// The exclusive side, if it's free and nobody waits or is about to.
    #[inline]
    pub fn try_write(&self) -> Option<WriteGuard<'_, T, S>> {
        self.raw.try_exclusive().then(|| WriteGuard::of(self))
    }

    /// After the guard was made: a panic in here lets go of the lock.
    #[inline]
    fn entered(&self, exclusive: bool, asked: Option<Instant>) {
        if let Some(asked) = asked {
            self.statistics.waited(exclusive, asked.elapsed());
        }
    }

    /// Whether somebody waits at the moment. It may have changed by the time that the caller looks at it.
    #[inline]
    pub fn is_contended(&self) -> bool {
        self.raw.is_contended()
    }

    /// The value, which nobody else can reach.
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }

    /// What hears of waits and holds.
    pub fn statistics(&self) -> &S {
        &self.statistics
    }

    /// The same, to be replaced.
    pub fn statistics_mut(&mut self) -> &mut S {
        &mut self.statistics
    }

    #[inline]
    fn held(&self, exclusive: bool, time: Option<Duration>) {
        if let Some(time) = time {
            self.statistics.held(exclusive, time);
        }
    }
}

/// How long it has been, asked before the lock is let go of.
#[inline]
fn since(taken: Option<Instant>) -> Option<Duration> {
    taken.map(|taken| taken.elapsed())
}

impl<T: ?Sized + fmt::Debug, S: LockStatistics> fmt::Debug for RwSemaphore<T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("RwSemaphore");
        match self.try_read() {
            Some(guard) => out.field("value", &&*guard),
            None => out.field("value", &format_args!("<locked>")),
        };
        out.finish_non_exhaustive()
    }
}

/// The shared side of a [`RwSemaphore`].
///
/// **L1** While it lives nobody has the exclusive side.
#[must_use = "the lock is let go of when the guard is dropped"]
pub struct ReadGuard<'l, T: ?Sized, S: LockStatistics = ()> {
    lock: &'l RwSemaphore<T, S>,
    taken: Option<Instant>,
}

impl<'l, T: ?Sized, S: LockStatistics> ReadGuard<'l, T, S> {
    #[inline]
    fn of(lock: &'l RwSemaphore<T, S>) -> Self {
        let taken = now(&lock.statistics);
        ReadGuard { lock, taken }
    }
}

impl<T: ?Sized, S: LockStatistics> Deref for ReadGuard<'_, T, S> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: L1.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T: ?Sized, S: LockStatistics> Drop for ReadGuard<'_, T, S> {
    #[inline]
    fn drop(&mut self) {
        let time = since(self.taken);
        self.lock.raw.leave_shared();
        self.lock.held(false, time);
    }
}

impl<T: ?Sized + fmt::Debug, S: LockStatistics> fmt::Debug for ReadGuard<'_, T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// The exclusive side of a [`RwSemaphore`].
///
/// **L1** While it lives nobody else has either side.
#[must_use = "the lock is let go of when the guard is dropped"]
pub struct WriteGuard<'l, T: ?Sized, S: LockStatistics = ()> {
    lock: &'l RwSemaphore<T, S>,
    taken: Option<Instant>,
}

impl<'l, T: ?Sized, S: LockStatistics> WriteGuard<'l, T, S> {
    #[inline]
    fn of(lock: &'l RwSemaphore<T, S>) -> Self {
        let taken = now(&lock.statistics);
        WriteGuard { lock, taken }
    }

    /// Keeps the shared side. No writer comes in between; readers at the front of the queue enter beside.
    #[inline]
    pub fn downgrade(self) -> ReadGuard<'l, T, S> {
        let (lock, time) = (self.lock, since(self.taken));
        std::mem::forget(self);
        lock.raw.downgrade();
        let guard = ReadGuard::of(lock);
        lock.held(true, time);
        guard
    }
}

impl<T: ?Sized, S: LockStatistics> Deref for WriteGuard<'_, T, S> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: L1.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T: ?Sized, S: LockStatistics> DerefMut for WriteGuard<'_, T, S> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: L1.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T: ?Sized, S: LockStatistics> Drop for WriteGuard<'_, T, S> {
    #[inline]
    fn drop(&mut self) {
        let time = since(self.taken);
        self.lock.raw.leave_exclusive();
        self.lock.held(true, time);
    }
}

impl<T: ?Sized + fmt::Debug, S: LockStatistics> fmt::Debug for WriteGuard<'_, T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
