//! fork(2) between the two locks that it needs.
//!
//! A dup holds the parent's mmap lock exclusively, and the shared side of the dup semaphore, whose exclusive side belongs to who has to see every
//! copy (a probe's registration). It never sleeps on one while holding the other (C9): it sleeps on one, tries the other, and if that
//! fails lets go and does it the other way round.
//!
//! ```text
//! dup                                            another thread of the parent     a registration
//! ---                                            ----------------------------     --------------
//! sleep on the mmap lock, and get it                                              has the semaphore
//! try the semaphore: no
//! let go of the mmap lock                        can have it at once
//! sleep on the semaphore                         has the mmap lock, for long      lets go
//!   get it
//! try the mmap lock: no
//! let go of the semaphore                                                         can have it at once
//! sleep on the mmap lock                         lets go
//!   get it
//! try the semaphore: yes
//! ```
//!
//! So a parent that is busy holds up its own forks alone: who registers doesn't wait for it, and other forks don't wait for who
//! registers on its account.
//!
//! # It can't be overtaken for ever
//!
//! Sleeping is fair on both locks, but trying isn't: a registration and a busy parent could take turns. After [`TURNS`] turns a dup is overdue and
//! *holds off* registrations that come from then on; they wait, and so do no dups. Those that were there before are let be. Call `W` the ones
//! among them that are still there.
//!
//! 1. A try of the semaphore fails only if one of `W` has closed the fast path. From then on the path stays closed until `W` is empty, since each
//!    hands over to the next, and nobody joins them.
//! 2. So the sleep that follows is in the queue, behind all of `W`, or comes after their end: when it's over `W` is empty.
//! 3. With `W` empty no try of the semaphore fails.
//!
//! The first turn of an overdue dup may pass the semaphore on the fast path before one of `W` closes it; by 1 and 2 the second is the last that can
//! fail, and the third succeeds at its first try. In all a dup takes at most `TURNS + 3` turns, each of which sleeps on locks that
//! are first come, first served. Registrations wait for an overdue dup's own locks, no longer; they can't starve, since a dup only becomes overdue
//! by registrations that went before it.
//!
//! # Order of release
//!
//! First the parent's lock, then the semaphore, then hooks are told and the child is registered, and only then anybody's answer would be waited for (a
//! monitor's). So who doesn't answer delays this fork alone. A child that fails has left the indexes of all files before the parent's lock is
//! let go: a registration never sees half of one. One that is complete can be found there before it has a number, and zapped.

use vma_rcu::percpu_rwsem::HoldOff;
use vma_rcu::sync::planted;
use vma_rcu::wait::{GaveUp, Wait};

use super::error::ForkError;
use super::handle::SpaceHandle;
use super::semaphore::{DupSemaphore, Dupping};
use crate::backend::Backend;
use crate::space::order::{DUP, NESTED_DUP};
use crate::space::{AddressSpace, WriteGuard};

/// Turns after which a dup is overdue.
pub(super) const TURNS: u32 = if cfg!(loom) { 2 } else { 4 };

/// A lock that is slept on or tried.
pub(super) trait Either {
    type Guard;

    fn sleep(&self) -> Result<Self::Guard, GaveUp>;

    fn attempt(&self) -> Option<Self::Guard>;
}

/// Both locks, and how many turns it took: see the [module](self). `dups` is a lock on whose shared side `hold_off` lets no new writer wait.
pub(super) fn both<M: Either, D: Either, H>(
    mmap: &M,
    dups: &D,
    hold_off: impl Fn() -> H,
) -> Result<(M::Guard, D::Guard, u32), GaveUp> {
    let mut holding_off = None;
    let mut turn = 0;
    loop {
        if turn >= TURNS && holding_off.is_none() {
            holding_off = Some(hold_off());
        }
        turn += 1;
        debug_assert!(turn <= TURNS + 3, "an overdue dup was overtaken");
        let parent = mmap.sleep()?;
        if let Some(dup) = dups.attempt() {
            return Ok((parent, dup, turn));
        }
        if planted("hold_and_sleep") {
            return Ok((parent, dups.sleep()?, turn));
        }
        drop(parent);
        let dup = dups.sleep()?;
        if planted("sleep_and_hold") {
            return Ok((mmap.sleep()?, dup, turn));
        }
        if let Some(parent) = mmap.attempt() {
            return Ok((parent, dup, turn));
        }
        drop(dup);
    }
}

/// The parent's lock.
struct Parent<'s, B: Backend> {
    space: &'s AddressSpace<B>,
    wait: Wait<'s>,
}

impl<'s, B: Backend> Either for Parent<'s, B> {
    type Guard = WriteGuard<'s, B>;

    fn sleep(&self) -> Result<Self::Guard, GaveUp> {
        self.space.write_for_dup(self.wait)
    }

    fn attempt(&self) -> Option<Self::Guard> {
        self.space.try_write_for_dup()
    }
}

/// The semaphore's shared side.
struct Dups<'s> {
    lock: &'s DupSemaphore,
    wait: Wait<'s>,
}

impl<'s> Either for Dups<'s> {
    type Guard = Dupping<'s>;

    fn sleep(&self) -> Result<Self::Guard, GaveUp> {
        self.lock.read_with(self.wait, DUP)
    }

    fn attempt(&self) -> Option<Self::Guard> {
        self.lock.try_read()
    }
}

/// Both locks of a dup. Dropped in the right order, whatever happens.
struct Locked<'s, B: Backend> {
    parent: Option<WriteGuard<'s, B>>,
    dup: Option<Dupping<'s>>,
}

impl<'s, B: Backend> Locked<'s, B> {
    fn new(
        space: &'s AddressSpace<B>,
        lock: &'s DupSemaphore,
        wait: Wait<'s>,
        nested: bool,
    ) -> Result<Self, GaveUp> {
        let (parent, dup) = if nested {
            let dup = lock.read_with(wait, NESTED_DUP)?;
            (space.write_for_dup(wait)?, dup)
        } else {
            let parent = Parent { space, wait };
            let dups = Dups { lock, wait };
            let hold_off = || -> HoldOff<'_, ()> { lock.hold_off_writers() };
            let (parent, dup, _) = both(&parent, &dups, hold_off)?;
            (parent, dup)
        };
        Ok(Locked {
            parent: Some(parent),
            dup: Some(dup),
        })
    }
}

impl<B: Backend> Drop for Locked<'_, B> {
    fn drop(&mut self) {
        let unfinished = self.parent.take().map(WriteGuard::release);
        drop(self.dup.take());
        // Owners are told here, with nothing held.
        drop(unfinished);
    }
}

impl<B: Backend> SpaceHandle<B> {
    /// The child of a fork(2), as [`AddressSpace::dup`], in the same system: it's found there when it is complete.
    ///
    /// # Errors
    /// As [`dup_with`](Self::dup_with), but `EINTR`.
    pub fn dup(&self) -> Result<SpaceHandle<B>, ForkError> {
        self.dup_with(Wait::forever())
    }

    /// [`dup`](Self::dup), waiting for the parent's lock and the dup semaphore as `wait` says. While it waits for one of them it doesn't hold
    /// the other.
    ///
    /// # Errors
    /// `EINTR` the wait ended; `ENOMEM` the overcommit policy, or memory; `EAGAIN` no number is left. There is no child then, and nothing in the
    /// indexes of files; of a space that can't be registered owners hear as of one that ends.
    ///
    /// Source: `dup_mmap()` in mm/mmap.c.
    pub fn dup_with(&self, wait: Wait<'_>) -> Result<SpaceHandle<B>, ForkError> {
        let system = self.system();
        let shared = &system.shared;
        // Runs destructors, perhaps: before any lock.
        self.space().throttle(wait)?;
        let (child, locked) = loop {
            let started = self.space().start_dup();
            let mut locked = Locked::new(self.space(), &shared.dups, wait, shared.nested_dup)?;
            let Some(parent) = &mut locked.parent else {
                unreachable!("only drop takes it out")
            };
            parent.wait_as(wait);
            if parent.is_announced(started.as_ref()) {
                parent.end_later(started);
                break (parent.dup_into_system(), locked);
            }
        };
        // Monitors of the parent are told at its end, and waited for: nothing is held by then.
        drop(locked);
        let (child, probed) = child?;
        child.settle_probes(&probed);
        Ok(system.adopt(child)?)
    }
}
