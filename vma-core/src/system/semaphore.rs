//! The dup semaphore: readers are dups, the writer keeps them out.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use vma_rcu::lock_order::{Held, Level};
use vma_rcu::percpu_rwsem::{HoldOff, PercpuRwSemaphore, ReadGuard, WriteGuard};
use vma_rcu::rwsem::LockStatistics as _;
use vma_rcu::wait::{GaveUp, Wait};

use crate::space::order::DUP;
use crate::space::{LockObserver, Observed};

pub(super) struct DupSemaphore {
    lock: PercpuRwSemaphore<()>,
    observed: Observed,
}

impl DupSemaphore {
    pub(super) fn new(observer: Option<Arc<dyn LockObserver>>) -> Self {
        DupSemaphore {
            lock: PercpuRwSemaphore::new(()),
            observed: observer.map(Observed::by).unwrap_or_default(),
        }
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn now(&self) -> Option<Instant> {
        self.observed.is_active().then(Instant::now)
    }

    /// The shared side, waited for.
    pub(super) fn read_with(&self, wait: Wait<'_>, level: Level) -> Result<Dupping<'_>, GaveUp> {
        let held = level.acquire(self.address());
        let asked = self.now();
        let guard = self.lock.read_with(wait)?;
        let dupping = self.dupping(guard, held);
        if let Some(asked) = asked {
            self.observed.waited(false, asked.elapsed());
        }
        Ok(dupping)
    }

    /// The shared side, if nobody keeps dups out.
    pub(super) fn try_read(&self) -> Option<Dupping<'_>> {
        let guard = self.lock.try_read()?;
        Some(self.dupping(guard, DUP.acquired(self.address())))
    }

    fn dupping<'s>(&'s self, guard: ReadGuard<'s, ()>, held: Held) -> Dupping<'s> {
        Dupping {
            guard: Some(guard),
            held: Some(held),
            since: self.now(),
            observed: &self.observed,
        }
    }

    /// See [`PercpuRwSemaphore::hold_off_writers`].
    pub(super) fn hold_off_writers(&self) -> HoldOff<'_, ()> {
        self.lock.hold_off_writers()
    }

    pub(super) fn write_with(&self, wait: Wait<'_>) -> Result<Quiesced<'_>, GaveUp> {
        let held = DUP.acquire(self.address());
        let asked = self.now();
        let guard = self.lock.write_with(wait)?;
        let quiesced = Quiesced {
            guard: Some(guard),
            held: Some(held),
            since: self.now(),
            observed: &self.observed,
        };
        if let Some(asked) = asked {
            self.observed.waited(true, asked.elapsed());
        }
        Ok(quiesced)
    }
}

/// The shared side: a dup is under way.
pub(super) struct Dupping<'s> {
    guard: Option<ReadGuard<'s, ()>>,
    held: Option<Held>,
    since: Option<Instant>,
    observed: &'s Observed,
}

impl Drop for Dupping<'_> {
    fn drop(&mut self) {
        let time = self.since.map(|since| since.elapsed());
        drop((self.guard.take(), self.held.take()));
        if let Some(time) = time {
            self.observed.held(false, time);
        }
    }
}

/// No dup is under way in the system, and none begins: see [`System::quiesce_dups`](super::System::quiesce_dups).
#[must_use = "dups go on when it is dropped"]
pub struct Quiesced<'s> {
    guard: Option<WriteGuard<'s, ()>>,
    held: Option<Held>,
    since: Option<Instant>,
    observed: &'s Observed,
}

impl Drop for Quiesced<'_> {
    fn drop(&mut self) {
        let time = self.since.map(|since| since.elapsed());
        drop((self.guard.take(), self.held.take()));
        if let Some(time) = time {
            self.observed.held(true, time);
        }
    }
}

impl fmt::Debug for Quiesced<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quiesced").finish_non_exhaustive()
    }
}
