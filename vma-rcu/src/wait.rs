//! Waiting, and giving up on it.
//!
//! A [`Wait`] says how long a caller is ready to wait: for ever, up to a deadline, or until somebody cancels a
//! [`CancelToken`] (the counterpart of a fatal signal for Linux's *killable* waits). The waits of this crate's locks
//! take one; when they end early nothing has changed.

use std::fmt;
use std::ptr::{self, NonNull};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Bell, Mutex};

/// Ends waits from outside, once and for all. Clones are handles to the same one.
///
/// ```
/// use vma_rcu::{rwsem::RwSemaphore, wait::{CancelToken, GaveUp, Wait}};
///
/// let lock = RwSemaphore::new(0);
/// let held = lock.write();
/// let token = CancelToken::new();
/// token.cancel();
/// assert_eq!(lock.read_with(Wait::killable(&token)).err(), Some(GaveUp::Cancelled));
/// # drop(held);
/// ```
#[derive(Clone, Debug, Default)]
pub struct CancelToken {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Store-release by `cancel` before it looks at the sleepers, load-acquire by sleepers after they are listed: the
    /// list's lock orders the two. Model: `a_cancelled_wait_ends_and_leaves_the_lock_as_it_was`.
    cancelled: AtomicBool,
    sleepers: Mutex<SmallVec<[Bell; 2]>>,
}

impl CancelToken {
    /// A token that isn't cancelled.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends all waits that were given this token, present and future ones. Takes a mutex: not for signal handlers.
    pub fn cancel(&self) {
        self.shared.cancelled.store(true, Ordering::Release);
        for sleeper in &*self.shared.sleepers.lock() {
            sleeper.ring();
        }
    }

    /// Whether [`cancel`](Self::cancel) has been called.
    pub fn is_cancelled(&self) -> bool {
        self.shared.cancelled.load(Ordering::Acquire)
    }

    /// Lists a sleeper as long as the result lives.
    fn enlist<'t>(&'t self, bell: &'t Bell) -> Enlisted<'t> {
        self.shared.sleepers.lock().push(bell.clone());
        Enlisted(self, bell)
    }
}

struct Enlisted<'t>(&'t CancelToken, &'t Bell);

impl Drop for Enlisted<'_> {
    fn drop(&mut self) {
        let mut sleepers = self.0.shared.sleepers.lock();
        if let Some(i) = sleepers.iter().position(|sleeper| sleeper.is(self.1)) {
            sleepers.swap_remove(i);
        }
    }
}

/// Why a wait ended without what was waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GaveUp {
    /// The deadline passed.
    TimedOut,
    /// The token was cancelled.
    Cancelled,
}

impl fmt::Display for GaveUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GaveUp::TimedOut => "the deadline passed before the lock came free",
            GaveUp::Cancelled => "the wait for the lock was cancelled",
        })
    }
}

impl std::error::Error for GaveUp {}

/// How long to wait. The default: as long as it takes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wait<'t> {
    deadline: Option<Instant>,
    token: Option<&'t CancelToken>,
}

impl<'t> Wait<'t> {
    /// As long as it takes.
    pub const fn forever() -> Self {
        Wait {
            deadline: None,
            token: None,
        }
    }

    /// Up to an instant.
    pub const fn until(deadline: Instant) -> Self {
        Wait {
            deadline: Some(deadline),
            token: None,
        }
    }

    /// For a time from now on.
    pub fn at_most(time: Duration) -> Self {
        Wait {
            deadline: Instant::now().checked_add(time),
            token: None,
        }
    }

    /// Until the token is cancelled.
    pub const fn killable(token: &'t CancelToken) -> Self {
        Wait {
            deadline: None,
            token: Some(token),
        }
    }

    /// The same wait, with this deadline in place of any other.
    #[must_use]
    pub const fn and_until(mut self, deadline: Instant) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Whether the wait is over, for who waits for something else in steps.
    ///
    /// # Errors
    ///
    /// [`GaveUp`], when it is.
    pub fn check(&self) -> Result<(), GaveUp> {
        if self.token.is_some_and(CancelToken::is_cancelled) {
            return Err(GaveUp::Cancelled);
        }
        // A model has no clock: a deadline there is one that has passed.
        if self
            .deadline
            .is_some_and(|deadline| cfg!(any(loom, shuttle)) || Instant::now() >= deadline)
        {
            return Err(GaveUp::TimedOut);
        }
        Ok(())
    }

    /// Gets ready to sleep: lists the sleeper with the token, which may allocate.
    pub(crate) fn prepare<'w>(&'w self, bell: &'w Bell) -> Sleep<'w> {
        Sleep {
            wait: self,
            bell,
            _enlisted: self.token.map(|token| token.enlist(bell)),
        }
    }
}

/// A thread that is about to sleep.
pub(crate) struct Sleep<'w> {
    wait: &'w Wait<'w>,
    bell: &'w Bell,
    _enlisted: Option<Enlisted<'w>>,
}

impl Sleep<'_> {
    /// Sleeps until `done` says so, looking again whenever the bell rings. What `done` looks at must be true before
    /// somebody rings. Doesn't unwind unless `done` does.
    pub(crate) fn until(&self, mut done: impl FnMut() -> bool) -> Result<(), GaveUp> {
        loop {
            if done() {
                return Ok(());
            }
            self.wait.check()?;
            self.bell.sleep(self.wait.deadline);
        }
    }
}

/// Threads that wait for whatever somebody brings about and then tells them of. For the crates of this workspace alone.
#[derive(Debug, Default)]
pub struct Sleepers {
    bells: Mutex<SmallVec<[Bell; 2]>>,
}

struct Sleeping<'s>(&'s Sleepers, &'s Bell);

impl Drop for Sleeping<'_> {
    fn drop(&mut self) {
        let mut bells = self.0.bells.lock();
        if let Some(at) = bells.iter().position(|bell| bell.is(self.1)) {
            bells.swap_remove(at);
        }
    }
}

impl Sleepers {
    /// Sleeps until `done` says so. What it looks at must be so before [`wake`](Self::wake) is called.
    ///
    /// # Errors
    ///
    /// [`GaveUp`], when the wait is over first.
    pub fn wait_until(&self, wait: Wait<'_>, mut done: impl FnMut() -> bool) -> Result<(), GaveUp> {
        if done() {
            return Ok(());
        }
        let bell = Bell::new();
        self.bells.lock().push(bell.clone());
        let _sleeping = Sleeping(self, &bell);
        wait.prepare(&bell).until(done)
    }

    /// Has all of them look again.
    pub fn wake(&self) {
        for bell in &*self.bells.lock() {
            bell.ring();
        }
    }
}

/// What a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Shared,
    Exclusive,
}

/// A thread in a [`WaitQueue`]; it lies on the thread's stack.
pub(crate) struct Waiter {
    pub(crate) mode: Mode,
    /// How often somebody has been let in front of it.
    pub(crate) overtaken: u32,
    bell: Bell,
    granted: bool,
    linked: bool,
    previous: *mut Waiter,
    next: *mut Waiter,
}

impl Waiter {
    pub(crate) fn new(mode: Mode, bell: Bell) -> Self {
        Waiter {
            mode,
            overtaken: 0,
            bell,
            granted: false,
            linked: false,
            previous: ptr::null_mut(),
            next: ptr::null_mut(),
        }
    }

    /// Makes the thread look again.
    pub(crate) fn nudge(&self) {
        self.bell.ring();
    }
}

/// First in, first out. Its user keeps it in a mutex; nothing is allocated.
///
/// **W1** A waiter is linked, read and written under the queue's mutex alone, and its thread doesn't leave the function
/// whose frame it is in before it is unlinked.
#[derive(Default)]
pub(crate) struct WaitQueue {
    head: Option<NonNull<Waiter>>,
    tail: Option<NonNull<Waiter>>,
}

// SAFETY: W1. The waiters are reached through the queue alone, under its mutex.
unsafe impl Send for WaitQueue {}

impl WaitQueue {
    pub(crate) fn is_empty(&self) -> bool {
        self.head.is_none()
    }

    /// The longest waiting.
    pub(crate) fn front(&mut self) -> Option<&mut Waiter> {
        // SAFETY: W1.
        self.head.map(|mut waiter| unsafe { waiter.as_mut() })
    }

    /// Whether `waiter` is the longest waiting.
    pub(crate) fn is_front(&self, waiter: NonNull<Waiter>) -> bool {
        self.head == Some(waiter)
    }

    /// Adds a waiter at the end.
    ///
    /// # Safety
    ///
    /// W1, from here until the waiter isn't linked any more.
    pub(crate) unsafe fn push(&mut self, mut waiter: NonNull<Waiter>) {
        // SAFETY: W1.
        let new = unsafe { waiter.as_mut() };
        new.linked = true;
        match self.tail {
            // SAFETY: W1.
            Some(mut tail) => unsafe { tail.as_mut() }.next = waiter.as_ptr(),
            None => self.head = Some(waiter),
        }
        new.previous = self.tail.map_or(ptr::null_mut(), NonNull::as_ptr);
        self.tail = Some(waiter);
    }

    /// Whether the waiter was granted what it waits for. It is unlinked then.
    ///
    /// # Safety
    ///
    /// The waiter was pushed to this queue by the caller.
    #[expect(clippy::unused_self, reason = "shows that the mutex is held")]
    pub(crate) unsafe fn is_granted(&self, waiter: NonNull<Waiter>) -> bool {
        // SAFETY: W1.
        unsafe { waiter.as_ref() }.granted
    }

    /// Takes a waiter out, if it is in.
    ///
    /// # Safety
    ///
    /// The waiter was pushed to this queue, and is still alive.
    pub(crate) unsafe fn remove(&mut self, mut waiter: NonNull<Waiter>) {
        // SAFETY: W1.
        let old = unsafe { waiter.as_mut() };
        if !std::mem::take(&mut old.linked) {
            return;
        }
        let (mut previous, mut next) = (NonNull::new(old.previous), NonNull::new(old.next));
        match &mut previous {
            // SAFETY: W1.
            Some(previous) => unsafe { previous.as_mut() }.next = old.next,
            None => self.head = next,
        }
        match &mut next {
            // SAFETY: W1.
            Some(next) => unsafe { next.as_mut() }.previous = old.previous,
            None => self.tail = previous,
        }
        // It may be added to another queue.
        old.next = ptr::null_mut();
    }

    /// Whether a waiter is in this queue: it looks at each.
    pub(crate) fn contains(&self, waiter: NonNull<Waiter>) -> bool {
        let mut at = self.head;
        while let Some(here) = at {
            if here == waiter {
                return true;
            }
            // SAFETY: W1.
            at = NonNull::new(unsafe { here.as_ref() }.next);
        }
        false
    }

    /// Adds all of another queue, which is under the same mutex, at the end.
    pub(crate) fn append(&mut self, other: &mut WaitQueue) {
        while let Some(head) = other.head {
            // SAFETY: W1.
            unsafe { other.remove(head) };
            // SAFETY: W1: it goes on being linked, under the same mutex.
            unsafe { self.push(head) };
        }
    }

    /// Takes the longest waiting out, and tells its thread that it has what it waited for.
    pub(crate) fn grant_front(&mut self) {
        let Some(mut head) = self.head else { return };
        // SAFETY: W1.
        unsafe { self.remove(head) };
        // SAFETY: W1. Its thread can't go on before it has had the mutex.
        let waiter = unsafe { head.as_mut() };
        waiter.granted = true;
        waiter.bell.ring();
    }
}

impl fmt::Debug for WaitQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitQueue")
            .field("is_empty", &self.is_empty())
            .finish_non_exhaustive()
    }
}
