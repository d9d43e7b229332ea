//! Who is told before a call takes something away: see [`crate::events`].
//!
//! A call announces what its arguments name, with no lock held, and takes the lock then. What it turns out to take away besides is
//! announced with the lock held; so are the calls of who holds it already.

use std::sync::Arc;

use smallvec::SmallVec;
use vma_rcu::wait::{GaveUp, Wait};

use super::draft::Changes;
use super::{AddressSpace, WriteGuard};
use crate::addr::VmRange;
use crate::backend::{Backend, PageChange};
use crate::events::{InvalidationReason, Notifier, NotifierRegistration, Started};

/// What a call is about to take away; at most a source and a destination.
pub(super) type Ranges = SmallVec<[VmRange; 2]>;

/// All that there can be.
pub(super) const EVERYTHING: VmRange = VmRange::new(0, u64::MAX);

pub(super) fn everything() -> Ranges {
    Ranges::from_elem(EVERYTHING, 1)
}

/// Bytes from an address on, as arguments of a call that may be refused for them: rounded up, and cut at the end of addresses.
pub(super) fn named(addr: u64, len: u64, unit: u64) -> Ranges {
    let end = addr.saturating_add(len);
    let end = end.checked_next_multiple_of(unit).unwrap_or(u64::MAX);
    let range = VmRange::new(addr, end);
    if len == 0 || range.is_empty() {
        Ranges::new()
    } else {
        Ranges::from_elem(range, 1)
    }
}

/// Where translations no longer hold after a change, and why.
fn outdated(change: &PageChange) -> Option<(VmRange, InvalidationReason)> {
    let (start, end, reason) = match *change {
        PageChange::Zap { start, end } => (start, end, InvalidationReason::Unmap),
        PageChange::Move { from, len, .. } => (from, from + len, InvalidationReason::Unmap),
        PageChange::Discard { start, end } | PageChange::Guard { start, end } => {
            (start, end, InvalidationReason::Clear)
        }
        PageChange::Protect { start, end } => (start, end, InvalidationReason::ProtectVma),
        PageChange::Unguard { .. } => return None,
    };
    Some((VmRange::new(start, end), reason))
}

impl<B: Backend> AddressSpace<B> {
    /// Has a notifier told of what is taken away in a range, until the result is dropped. What it hears of and what it may do:
    /// [`Notifier`]; how it keeps translations of its own: [`NotifierRegistration`].
    ///
    /// | it's told of | reason |
    /// |---|---|
    /// | unmap, a map over something, `MADV_REMOVE`'s guard pages, brk down, remap's source and destination | `Unmap` |
    /// | `MADV_DONTNEED` and guard pages; truncation, punching and eviction of a file; a copy in place of a page that is shared with a child or a file, or of the page of zeros | `Clear` |
    /// | protect | `ProtectVma` |
    /// | dup (everywhere), write-back of a file | `ProtectPage` |
    /// | the end of the space, after which it's unregistered | `Release` |
    ///
    /// Not of what only adds: a map where nothing is, a fault that finds no page, `MADV_GUARD_REMOVE`.
    ///
    /// # Concurrency
    /// Takes the space's lock exclusively. A call that takes the lock afterwards is heard of before it changes anything. Of what takes no lock
    /// of the space's (files, faults) and was under way it hears before that returns. A child of a dup has no notifiers.
    ///
    /// Source: `mmu_notifier_register()`, `mmu_interval_notifier_insert()`.
    pub fn register_notifier(
        &self,
        range: VmRange,
        notifier: Arc<dyn Notifier>,
    ) -> NotifierRegistration {
        let _exclusive = self.write();
        self.core.notifiers.register(range, notifier)
    }

    /// As [`write_with`](Self::write_with), with notifiers told before, with no lock held, that all of a range goes: calls on the guard that
    /// stay inside don't call back themselves. They are told of the end when the guard has been dropped.
    ///
    /// # Errors
    /// [`GaveUp`]: `EINTR` for a system call.
    pub fn write_announced<'s>(
        &'s self,
        range: VmRange,
        wait: Wait<'s>,
    ) -> Result<WriteGuard<'s, B>, GaveUp> {
        let ranges = Ranges::from_elem(range, 1);
        self.announce(&ranges, InvalidationReason::Unmap, || self.write_with(wait))
    }

    /// The exclusive side for one call that is about to take away what is in these ranges.
    #[inline]
    pub(super) fn write_to(
        &self,
        ranges: impl FnOnce() -> Ranges,
        reason: InvalidationReason,
    ) -> WriteGuard<'_, B> {
        let guard = self.write_once();
        if !guard.notifies {
            return guard;
        }
        drop(guard);
        self.write_to_notified(&ranges(), reason)
    }

    #[cold]
    fn write_to_notified(&self, ranges: &Ranges, reason: InvalidationReason) -> WriteGuard<'_, B> {
        let lock = || Ok::<_, GaveUp>(self.write_once());
        match self.announce(ranges, reason, lock) {
            Ok(guard) => guard,
            Err(_) => unreachable!("nothing ends this wait early"),
        }
    }

    fn announce<'s, E>(
        &'s self,
        ranges: &Ranges,
        reason: InvalidationReason,
        lock: impl Fn() -> Result<WriteGuard<'s, B>, E>,
    ) -> Result<WriteGuard<'s, B>, E> {
        loop {
            let started = self.start(ranges, reason);
            let mut guard = lock()?;
            // If not, one more has come meanwhile.
            if ranges.is_empty() || guard.is_announced(started.as_ref()) {
                guard.end_later(started);
                return Ok(guard);
            }
        }
    }

    /// Tells notifiers, if there are any, with no lock held.
    pub(crate) fn start(&self, ranges: &Ranges, reason: InvalidationReason) -> Option<Started> {
        let notifiers = &self.core.notifiers;
        (notifiers.is_any() && !ranges.is_empty()).then(|| notifiers.start(ranges, reason))
    }

    /// The same for a dup.
    pub(crate) fn start_dup(&self) -> Option<Started> {
        self.start(&everything(), InvalidationReason::ProtectPage)
    }
}

impl<B: Backend> WriteGuard<'_, B> {
    /// Whether all notifiers know that everything changes.
    pub(crate) fn is_announced(&self, started: Option<&Started>) -> bool {
        match started {
            Some(started) => started.registered() == self.space.core.notifiers.registered(),
            None => !self.notifies,
        }
    }

    /// What was announced ends when the lock has been let go.
    pub(crate) fn end_later(&mut self, started: Option<Started>) {
        if let Some(started) = started {
            self.after.end_later(started);
        }
    }

    /// Announces what hasn't been.
    #[cold]
    pub(super) fn notify_changes(&mut self, changes: &Changes) {
        for (range, reason) in changes.pages.iter().filter_map(outdated) {
            self.notify(range, reason);
        }
    }

    pub(super) fn notify(&mut self, range: VmRange, reason: InvalidationReason) {
        if !self.after.is_announced(range) {
            let started = self.space.core.notifiers.start(&[range], reason);
            self.after.end_later(started);
        }
    }
}
