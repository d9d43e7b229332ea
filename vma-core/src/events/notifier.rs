//! Notifiers: who keeps translations of their own (a device's MMU, shadow page tables, a cache of translated code) is told before
//! pages go, and when they have gone. Linux: mmu notifiers.
//!
//! ```text
//! call                                     who translates
//! ----                                     --------------
//! start: counted; callbacks                begin: what has started so far
//! take the lock, publish                   look up, fault
//! pages go, and nobody uses them           under its own lock, which callbacks take too:
//! end: counted; callbacks                    retry, if something has started since, or is under way; else keep it
//! ```
//!
//! A translation that is kept was looked up after all that had ended before, and the start of what came later finds it. So behind a
//! call's end nothing of what it took away is in use.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use smallvec::SmallVec;
use vma_rcu::sync::Mutex;
use vma_rcu::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

use crate::addr::VmRange;
use crate::space::{discard, rethrow};

/// Why translations no longer hold. Source: `enum mmu_notifier_event`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum InvalidationReason {
    /// The mapping goes, or its pages are found elsewhere from now on (`MMU_NOTIFY_UNMAP`).
    Unmap,
    /// Pages go or are replaced, the mapping stays (`MMU_NOTIFY_CLEAR`): `MADV_DONTNEED`, truncation, a copy in a shared page's place.
    Clear,
    /// What the mapping allows changes (`MMU_NOTIFY_PROTECTION_VMA`).
    ProtectVma,
    /// Stores have to fault again (`MMU_NOTIFY_PROTECTION_PAGE`): a dup, a file that writes pages back.
    ProtectPage,
    /// The space ends (`MMU_NOTIFY_RELEASE`).
    Release,
}

/// Translations that no longer hold: of all pages in a range, which may be larger than what really changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Invalidation {
    /// Where.
    pub range: VmRange,
    /// Why.
    pub reason: InvalidationReason,
}

/// Is told of translations that no longer hold: see [`AddressSpace::register_notifier`](crate::AddressSpace::register_notifier).
///
/// # What a callback may do
///
/// It runs with no lock of the library's held that it could need, and may do what any code may: look up, read and write guest memory,
/// register and unregister notifiers (itself too), and make calls of its own, which call back in turn. It mustn't wait for the call that
/// it hears of: neither for its end, nor for a thread that waits for that.
///
/// There are exceptions, where it runs inside of something:
///
/// | what is called | what it mustn't do besides |
/// |---|---|
/// | a call on a [`WriteGuard`](crate::WriteGuard) that the embedder holds, with a range that it wasn't [announced](crate::AddressSpace::write_announced) for | whatever takes the space's lock: all calls on it, reads and writes of pages that aren't present; registering |
/// | truncation, punching, writing back and evicting of a file | change the length of that file, or wait for its pages |
/// | a fault that has to take a huge page away from a child | touch that page |
///
/// # Panics
/// A panic doesn't keep others from being told, nor the call from being completed; then it goes on from the call.
pub trait Notifier: Send + Sync {
    /// What holds of this range is about to change. When it returns nobody uses an old translation, and none is made until
    /// [`invalidate_end`](Self::invalidate_end) that is kept.
    ///
    /// The call may fail afterwards: then nothing changes.
    fn invalidate_start(&self, invalidation: &Invalidation);

    /// It has changed. Once for each start, with the same argument, also where the notifier has been unregistered meanwhile.
    fn invalidate_end(&self, invalidation: &Invalidation) {
        let _ = invalidation;
    }
}

/// How many starts are remembered, so that who translates elsewhere needn't do it again.
const REMEMBERED: usize = 32;

type Ranges = SmallVec<[VmRange; 2]>;

/// The notifiers of a space.
#[derive(Default)]
pub(crate) struct Notifiers(Arc<Shared>);

#[derive(Default)]
struct Shared {
    /// Entries of `State::list`. Raised with the space's lock held exclusively, and so are calls that hold it told by it; others look
    /// once more afterwards, behind a fence that pairs with the one in `register`.
    count: AtomicUsize,
    /// How many there have been. As `count`.
    registered: AtomicU64,
    /// Nothing is called, allocated beyond its lists, or dropped under it.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    list: Vec<Arc<Registered>>,
    /// How many ranges have started.
    starts: u64,
    /// Started and not ended, by the number of the first range.
    active: Vec<(u64, Ranges)>,
    /// The last to start, with their numbers.
    recent: VecDeque<(u64, VmRange)>,
}

struct Registered {
    id: u64,
    range: VmRange,
    notifier: Arc<dyn Notifier>,
}

impl State {
    fn is_active(&self, range: VmRange) -> bool {
        let mut ranges = self.active.iter().flat_map(|(_, ranges)| ranges);
        ranges.any(|active| active.intersects(range))
    }
}

impl Notifiers {
    /// Whether there are any.
    #[inline]
    pub(crate) fn is_any(&self) -> bool {
        self.0.count.load(Ordering::Acquire) > 0
    }

    /// How many there have been so far: one that has been registered since isn't told by what started before.
    pub(crate) fn registered(&self) -> u64 {
        self.0.registered.load(Ordering::Acquire)
    }

    /// Adds one. The space's lock is held exclusively.
    pub(crate) fn register(
        &self,
        range: VmRange,
        notifier: Arc<dyn Notifier>,
    ) -> NotifierRegistration {
        let shared = &self.0;
        let id = {
            let mut state = shared.state.lock();
            let id = shared.registered.load(Ordering::Relaxed);
            let registered = Registered {
                id,
                range,
                notifier,
            };
            state.list.push(Arc::new(registered));
            shared.count.store(state.list.len(), Ordering::Release);
            shared.registered.store(id + 1, Ordering::Release);
            id
        };
        // Before its owner looks anything up: see `around`.
        fence(Ordering::SeqCst);
        NotifierRegistration {
            shared: Arc::clone(shared),
            id,
        }
    }

    /// Lets go of all of them.
    pub(crate) fn clear(&self) {
        let mut state = self.0.state.lock();
        let gone = std::mem::take(&mut state.list);
        self.0.count.store(0, Ordering::Release);
        drop(state);
        drop(gone);
    }

    /// Tells those whom some ranges concern, and counts.
    #[cold]
    pub(crate) fn start(&self, ranges: &[VmRange], reason: InvalidationReason) -> Started {
        self.start_from(0, ranges, reason)
    }

    /// The same, but for those that were registered before one.
    fn start_from(&self, first: u64, ranges: &[VmRange], reason: InvalidationReason) -> Started {
        let shared = &self.0;
        let mut state = shared.state.lock();
        let ticket = state.starts;
        let ranges = Ranges::from_slice(ranges);
        for range in &ranges {
            let number = state.starts;
            state.starts += 1;
            if state.recent.len() == REMEMBERED {
                state.recent.pop_front();
            }
            state.recent.push_back((number, *range));
        }
        state.active.push((ticket, ranges.clone()));
        let concerned = |one: &&Arc<Registered>| {
            one.id >= first && ranges.iter().any(|range| range.intersects(one.range))
        };
        let told: Vec<_> = state.list.iter().filter(concerned).cloned().collect();
        let mut started = Started {
            shared: Arc::clone(shared),
            registered: shared.registered.load(Ordering::Relaxed),
            ranges,
            reason,
            ticket,
            told,
            panic: None,
            ended: false,
        };
        drop(state);
        started.tell(|notifier, invalidation| notifier.invalidate_start(invalidation));
        started
    }

    /// Does something that no lock keeps registrations out of. One that comes meanwhile is told afterwards; its owner has waited for
    /// nothing yet.
    pub(crate) fn around<R>(
        &self,
        range: VmRange,
        reason: InvalidationReason,
        f: impl FnOnce() -> R,
    ) -> R {
        let before = self.registered();
        let started = self.is_any().then(|| self.start(&[range], reason));
        let result = f();
        self.tell_late(before, range, reason);
        drop(started);
        result
    }

    /// Those that have come since there were so many are told of what has been done by now.
    pub(crate) fn tell_late(&self, before: u64, range: VmRange, reason: InvalidationReason) {
        // Pairs with the one in `register`: either its owner finds what has been done, or it's found here.
        fence(Ordering::SeqCst);
        if self.registered() != before {
            drop(self.start_from(before, &[range], reason));
        }
    }
}

impl fmt::Debug for Notifiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.0.count.load(Ordering::Relaxed);
        f.debug_struct("Notifiers").field("count", &count).finish()
    }
}

/// Something that has started, and ends when this is dropped.
pub(crate) struct Started {
    shared: Arc<Shared>,
    /// As [`Notifiers::registered`], when it started.
    registered: u64,
    ranges: Ranges,
    reason: InvalidationReason,
    ticket: u64,
    told: Vec<Arc<Registered>>,
    /// The first of a callback.
    panic: Option<Box<dyn Any + Send>>,
    ended: bool,
}

impl Started {
    /// Whether it is about all of a range.
    pub(crate) fn covers(&self, range: VmRange) -> bool {
        let covers = |one: &VmRange| one.start <= range.start && range.end <= one.end;
        self.ranges.iter().any(covers)
    }

    /// As [`Notifiers::registered`], when it started.
    pub(crate) fn registered(&self) -> u64 {
        self.registered
    }

    fn tell(&mut self, f: impl Fn(&dyn Notifier, &Invalidation)) {
        for one in &self.told {
            for range in self.ranges.iter().filter(|it| it.intersects(one.range)) {
                let invalidation = Invalidation {
                    range: *range,
                    reason: self.reason,
                };
                let told = catch_unwind(AssertUnwindSafe(|| f(&*one.notifier, &invalidation)));
                if let Err(panic) = told {
                    match &self.panic {
                        Some(_) => discard(panic),
                        None => self.panic = Some(panic),
                    }
                }
            }
        }
    }

    /// Ends it, and returns the panic of a callback if there was one.
    pub(crate) fn end(mut self) -> Option<Box<dyn Any + Send>> {
        self.finish();
        self.panic.take()
    }

    fn finish(&mut self) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let mut state = self.shared.state.lock();
        let active = &mut state.active;
        if let Some(at) = active.iter().position(|(ticket, _)| *ticket == self.ticket) {
            active.swap_remove(at);
        }
        drop(state);
        self.tell(|notifier, invalidation| notifier.invalidate_end(invalidation));
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.finish();
        if let Some(panic) = self.panic.take() {
            rethrow(panic);
        }
    }
}

/// A place among what has started: see [`NotifierRegistration::read_begin`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a translation holds only if `read_retry` says so"]
pub struct Sequence {
    starts: u64,
    busy: bool,
}

/// Keeps a notifier registered until it's dropped.
///
/// A callback that is under way then comes to its end, and who was told of a start is told of the end. The notifier itself is let go of by
/// the last of them.
///
/// # Translating
///
/// Keeping translations takes a lock of the notifier's own, which its callbacks take as well, and this order:
///
/// ```
/// use std::collections::HashMap;
/// use std::sync::{Arc, Mutex};
/// use vma_core::{AddressSpace, Invalidation, Notifier, VmRange};
///
/// #[derive(Default)]
/// struct Shadow(Mutex<HashMap<u64, u8>>);
///
/// impl Notifier for Shadow {
///     fn invalidate_start(&self, gone: &Invalidation) {
///         self.0.lock().unwrap().retain(|page, _| !gone.range.contains(*page));
///     }
/// }
///
/// let space = AddressSpace::default();
/// let shadow = Arc::new(Shadow::default());
/// let all = VmRange { start: 0, end: u64::MAX };
/// let registration = space.register_notifier(all, shadow.clone());
///
/// let page = VmRange { start: 0x1000, end: 0x2000 };
/// loop {
///     let sequence = registration.read_begin(page);
///     let translation = 0; // look it up, fault it in
///     let mut kept = shadow.0.lock().unwrap();
///     if !registration.read_retry(page, sequence) {
///         kept.insert(page.start, translation);
///         break;
///     }
///     drop(kept);
///     std::thread::yield_now();
/// }
/// ```
#[must_use = "the notifier is unregistered when this is dropped"]
pub struct NotifierRegistration {
    shared: Arc<Shared>,
    id: u64,
}

impl NotifierRegistration {
    /// Before a page of the range is looked up. Source: `mmu_interval_read_begin()`, which waits where this says to try again later.
    pub fn read_begin(&self, range: VmRange) -> Sequence {
        let state = self.shared.state.lock();
        Sequence {
            starts: state.starts,
            busy: state.is_active(range),
        }
    }

    /// Whether what was looked up since may not be kept: something of the range was being taken away at the time, or has been since. To be
    /// asked under the lock that callbacks take. After many other invalidations the answer may be yes for none of these reasons.
    ///
    /// Source: `mmu_interval_read_retry()`.
    pub fn read_retry(&self, range: VmRange, sequence: Sequence) -> bool {
        let state = self.shared.state.lock();
        let since = state.starts - sequence.starts;
        let is_new = |(number, other): &(u64, VmRange)| {
            *number >= sequence.starts && other.intersects(range)
        };
        sequence.busy || since > REMEMBERED as u64 || state.recent.iter().any(is_new)
    }

    /// Whether something of the range is being taken away just now.
    pub fn is_invalidating(&self, range: VmRange) -> bool {
        self.shared.state.lock().is_active(range)
    }

    /// Takes it out, as dropping does.
    pub fn unregister(self) {}
}

impl Drop for NotifierRegistration {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        let at = state.list.iter().position(|one| one.id == self.id);
        let gone = at.map(|at| state.list.remove(at));
        self.shared.count.store(state.list.len(), Ordering::Release);
        drop(state);
        // Its destructor is the embedder's.
        drop(gone);
    }
}

impl fmt::Debug for NotifierRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NotifierRegistration")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}
