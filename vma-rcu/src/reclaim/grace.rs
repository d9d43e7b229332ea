//! Grace periods: numbered, one at a time.
//!
//! A period begins with a look at all readers and is over when those that were pinned then have unpinned. What
//! is unlinked while one is under way has to wait for the next one: readers that it doesn't wait for may have
//! seen it.
//!
//! Names as in Linux: `get_state_synchronize_rcu` is [`GracePeriods::ticket`], `poll_state_synchronize_rcu` the
//! comparison with what [`GracePeriods::poll`] returns.

use std::time::Duration;
#[cfg(not(loom))]
use std::time::Instant;

use super::slot::{Blockers, Slot};
use crate::sync::{Arc, Mutex, planted};

/// The readers of a domain and its grace periods.
#[derive(Debug, Default)]
pub(crate) struct GracePeriods {
    slots: Mutex<Vec<Arc<Slot>>>,
    /// Taken before `slots`.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Periods begun, and periods over: equal, or one apart.
    begun: u64,
    over: u64,
    /// The last one that somebody waits for.
    wanted: u64,
    blockers: Blockers,
    #[cfg(not(loom))]
    since: Option<Instant>,
}

impl GracePeriods {
    pub(crate) fn register(&self) -> Arc<Slot> {
        let slot = Arc::<Slot>::default();
        let mut state = self.state.lock();
        let mut slots = self.slots.lock();
        // So that no period allocates.
        state.blockers.reserve(slots.len() + 1);
        // A reader that registers after a look at the slots has this lock after it, and with it every
        // unlinking before it.
        slots.push(Arc::clone(&slot));
        slot
    }

    pub(crate) fn unregister(&self, slot: &Arc<Slot>) {
        slot.abandon();
        let mut slots = self.slots.lock();
        if let Some(i) = slots.iter().position(|known| Arc::ptr_eq(known, slot)) {
            slots.swap_remove(i);
        }
    }

    /// The number of the period after which what has been unlinked before this call may be freed.
    pub(crate) fn ticket(&self) -> u64 {
        let mut state = self.state.lock();
        state.wanted = state.begun + 1;
        if planted("early_grace") {
            return state.over;
        }
        state.wanted
    }

    /// Ends the period under way if its readers have unpinned, begins the next one if it's wanted; the number of the
    /// last one that is over. Never waits.
    pub(crate) fn poll(&self) -> u64 {
        let mut state = self.state.lock();
        loop {
            if state.over < state.begun {
                if !state.blockers.refresh() {
                    break;
                }
                state.over = state.begun;
            }
            if state.over >= state.wanted {
                break;
            }
            state.begin(&self.slots.lock());
        }
        state.over
    }

    /// Whether the period under way still waits for a reader.
    pub(crate) fn is_waiting(&self) -> bool {
        let mut state = self.state.lock();
        state.over < state.begun && !state.blockers.refresh()
    }

    /// How long the period under way has been waiting, after a [`poll`](Self::poll).
    pub(crate) fn age(&self) -> Option<Duration> {
        let state = self.state.lock();
        if state.over == state.begun {
            return None;
        }
        #[cfg(loom)]
        return Some(Duration::ZERO);
        #[cfg(not(loom))]
        state.since.map(|since| since.elapsed())
    }
}

impl State {
    fn begin(&mut self, slots: &[Arc<Slot>]) {
        self.begun += 1;
        self.blockers.note(slots);
        #[cfg(not(loom))]
        {
            self.since = (!self.blockers.is_empty()).then(Instant::now);
        }
    }
}
