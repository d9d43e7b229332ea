//! How long which thread waits for a lock.

use std::cell::Cell;
use std::time::Duration;

use vma_core::{LockObserver, LockTimes};

/// What a thread does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Of A: maps, populates and unmaps.
    Mapper,
    /// Of A: dups.
    Forker,
    /// B: dups.
    Elsewhere,
    /// Attaches and detaches probes.
    Tracer,
}

thread_local! {
    /// What this thread does. A thread that hasn't said counts as the tracer.
    static ROLE: Cell<Role> = const { Cell::new(Role::Tracer) };
}

impl Role {
    /// From here on the calling thread's.
    pub(super) fn play(self) {
        ROLE.set(self);
    }
}

/// Waits and holds of one lock by what the thread does.
#[derive(Debug, Default)]
pub(super) struct ByRole([LockTimes; 4]);

impl ByRole {
    fn mine(&self) -> &LockTimes {
        &self.0[ROLE.get() as usize]
    }

    /// The longest time that threads of this role have waited, for either side.
    pub(super) fn longest_wait(&self, role: Role) -> Duration {
        let times = &self.0[role as usize];
        let sides = [false, true].map(|exclusive| times.waited(exclusive).longest);
        sides.into_iter().max().unwrap_or_default()
    }

    /// The longest time that they have held it.
    pub(super) fn longest_hold(&self, role: Role) -> Duration {
        let times = &self.0[role as usize];
        let sides = [false, true].map(|exclusive| times.held(exclusive).longest);
        sides.into_iter().max().unwrap_or_default()
    }

    /// Begins anew.
    pub(super) fn reset(&self) {
        self.0.iter().for_each(LockTimes::reset);
    }
}

impl LockObserver for ByRole {
    fn waited(&self, exclusive: bool, time: Duration) {
        LockObserver::waited(self.mine(), exclusive, time);
    }

    fn held(&self, exclusive: bool, time: Duration) {
        LockObserver::held(self.mine(), exclusive, time);
    }
}
