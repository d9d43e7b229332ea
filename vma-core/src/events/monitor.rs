//! Monitors: who says what is in pages that nothing is in yet, and hears of changes to them. Linux: userfaultfd.
//!
//! A mapping that is registered has its monitor's [`Context`] in its record. A fault that needs the monitor puts a message into the
//! context's queue and waits, with no lock held, until it's woken; then it looks again. A call that the monitor is to hear of leaves its
//! message when the lock has been let go, and waits until that has been read.
//!
//! # The end
//!
//! With the last [`Monitor`] its context is dead, for good, before those who wait are woken. From then on its mappings count as
//! unregistered; their records lose it when the space's lock is taken next.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, OnceLock};

use vma_rcu::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use vma_rcu::sync::{Mutex, planted};
use vma_rcu::wait::{GaveUp, Sleepers, Wait};

use crate::addr::VmRange;
use crate::error::Errno;
use crate::file::SpaceId;
use crate::space::Access;

bitflags::bitflags! {
    /// `UFFD_FEATURE_*`: what a monitor wants to hear of besides faults.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct MonitorFeatures: u64 {
        /// `UFFD_FEATURE_EVENT_FORK`: children's mappings have a monitor of their own. Without it they have none.
        const EVENT_FORK = 1 << 1;
        /// `UFFD_FEATURE_EVENT_REMAP`: moved mappings stay registered. Without it they aren't afterwards.
        const EVENT_REMAP = 1 << 2;
        /// `UFFD_FEATURE_EVENT_REMOVE`: before `MADV_DONTNEED`, `MADV_FREE` and `MADV_REMOVE`.
        const EVENT_REMOVE = 1 << 3;
        /// `UFFD_FEATURE_EVENT_UNMAP`.
        const EVENT_UNMAP = 1 << 6;
        /// `UFFD_FEATURE_SIGBUS`: faults aren't told of, and fail.
        const SIGBUS = 1 << 7;
        const _ = !0;
    }

    /// `UFFDIO_REGISTER_MODE_*`: which faults a monitor is asked about.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct MonitorModes: u64 {
        /// `UFFDIO_REGISTER_MODE_MISSING`: nothing is there.
        const MISSING = 1;
        /// `UFFDIO_REGISTER_MODE_WP`: a store to a page that the monitor has [protected](crate::AddressSpace::monitor_write_protect).
        const WP = 2;
        /// `UFFDIO_REGISTER_MODE_MINOR`: the file has the page, the mapping doesn't show it yet.
        const MINOR = 4;
        const _ = !0;
    }
}

impl MonitorFeatures {
    const KNOWN: MonitorFeatures = MonitorFeatures::EVENT_FORK
        .union(MonitorFeatures::EVENT_REMAP)
        .union(MonitorFeatures::EVENT_REMOVE)
        .union(MonitorFeatures::EVENT_UNMAP)
        .union(MonitorFeatures::SIGBUS);
}

/// The features aren't known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("features {0:#x} aren't known")]
pub struct MonitorFeaturesError(pub u64);

impl MonitorFeaturesError {
    /// `EINVAL`.
    pub const fn errno(self) -> Errno {
        Errno::EINVAL
    }
}

/// What a monitor reads.
#[derive(Debug)]
#[non_exhaustive]
pub enum MonitorEvent {
    /// An access waits, until it's woken.
    Fault {
        /// First byte of the page.
        addr: u64,
        /// What the access is.
        access: Access,
        /// One of the modes: what it found.
        mode: MonitorModes,
    },
    /// The space has been duplicated; the dup waits until this has been read. If it isn't kept, the child has no monitor.
    Fork(Monitor),
    /// Mappings have moved.
    Remap {
        /// First byte, before.
        from: u64,
        /// First byte, now.
        to: u64,
        /// Bytes.
        len: u64,
    },
    /// Pages are about to be discarded.
    Remove(VmRange),
    /// A range has been unmapped.
    Unmap(VmRange),
}

/// What is told to who writes mappings: the context of some is dead.
#[derive(Debug, Default)]
pub(crate) struct Attention {
    /// Raised with release, after a context's end; lowered with acquire by who then looks at all mappings.
    dead: AtomicBool,
    /// There has been a monitor. Raised with the space's lock held exclusively, before its mappings are published.
    expected: AtomicBool,
}

impl Attention {
    pub(crate) fn expect(&self) {
        self.expected.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn is_expected(&self) -> bool {
        self.expected.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn is_raised(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    pub(crate) fn raise(&self) {
        self.dead.store(true, Ordering::Release);
    }

    pub(crate) fn lower(&self) -> bool {
        self.dead.swap(false, Ordering::Acquire)
    }
}

/// The space that a context belongs to.
#[derive(Debug)]
struct Home {
    id: SpaceId,
    attention: Arc<Attention>,
}

/// What mappings keep of a monitor.
#[derive(Default)]
pub(crate) struct Context {
    features: MonitorFeatures,
    home: OnceLock<Home>,
    /// Store-release before those who wait are woken, load-acquire by them. Model: `a_fault_goes_on_when_its_monitor_dies`.
    dead: AtomicBool,
    /// Calls whose message hasn't been read (Linux: `mmap_changing`). Raised with the space's lock held exclusively, so that who has
    /// either side sees those that have published.
    changing: AtomicUsize,
    /// Nothing is called or dropped under it.
    queue: Mutex<Queue>,
    readers: Sleepers,
    waiters: Sleepers,
}

#[derive(Default)]
struct Queue {
    next: u64,
    faults: VecDeque<Pending>,
    events: VecDeque<(u64, MonitorEvent)>,
}

/// A fault that waits.
struct Pending {
    ticket: u64,
    addr: u64,
    access: Access,
    mode: MonitorModes,
    is_read: bool,
}

impl Context {
    fn new(features: MonitorFeatures) -> Arc<Self> {
        Arc::new(Context {
            features,
            ..Context::default()
        })
    }

    pub(crate) fn has(&self, features: MonitorFeatures) -> bool {
        self.features.contains(features)
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    pub(crate) fn is_changing(&self) -> bool {
        self.changing.load(Ordering::Acquire) > 0
    }

    /// Makes it a space's, for good, and says whether it is.
    pub(crate) fn belongs_to(&self, id: SpaceId, attention: &Arc<Attention>) -> bool {
        let home = self.home.get_or_init(|| Home {
            id,
            attention: Arc::clone(attention),
        });
        home.id == id
    }

    /// Whether it's a space's already.
    pub(crate) fn is_of(&self, id: SpaceId) -> bool {
        self.home.get().is_some_and(|home| home.id == id)
    }

    /// A fault asks the monitor. Before it waits it looks again: what is put in place before this is found then, and what comes later
    /// wakes it.
    pub(crate) fn ask(self: &Arc<Self>, addr: u64, access: Access, mode: MonitorModes) -> Asked {
        let mut queue = self.queue.lock();
        let ticket = queue.next;
        queue.next += 1;
        queue.faults.push_back(Pending {
            ticket,
            addr,
            access,
            mode,
            is_read: false,
        });
        drop(queue);
        self.readers.wake();
        Asked {
            context: Arc::clone(self),
            ticket,
            addr,
        }
    }

    /// Wakes the faults of a range: they look again.
    pub(crate) fn wake(&self, range: VmRange) {
        let is_elsewhere = |fault: &Pending| !range.contains(fault.addr);
        self.queue.lock().faults.retain(is_elsewhere);
        if !planted("silent_wake") {
            self.waiters.wake();
        }
    }

    fn is_waiting(&self, ticket: u64) -> bool {
        let queue = self.queue.lock();
        queue.faults.iter().any(|fault| fault.ticket == ticket)
    }

    /// A call has something to say, when it has let go of the space's lock, which it holds exclusively.
    pub(crate) fn announce(self: &Arc<Self>, event: MonitorEvent) -> Announced {
        self.changing.fetch_add(1, Ordering::AcqRel);
        Announced {
            context: Arc::clone(self),
            event: Some(event),
        }
    }

    fn take(&self) -> Option<MonitorEvent> {
        let mut queue = self.queue.lock();
        if let Some(fault) = queue.faults.iter_mut().find(|fault| !fault.is_read) {
            fault.is_read = true;
            return Some(MonitorEvent::Fault {
                addr: fault.addr,
                access: fault.access,
                mode: fault.mode,
            });
        }
        let (_, event) = queue.events.pop_front()?;
        drop(queue);
        self.waiters.wake();
        Some(event)
    }

    /// The last handle is gone.
    fn die(&self) {
        if planted("dead_when_woken") {
            self.waiters.wake();
        }
        self.dead.store(true, Ordering::Release);
        let left = std::mem::take(&mut *self.queue.lock());
        if !planted("dead_when_woken") {
            self.waiters.wake();
        }
        if let Some(home) = self.home.get() {
            home.attention.raise();
        }
        // Monitors of children may be among it.
        drop(left);
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("features", &self.features)
            .field("dead", &self.is_dead())
            .finish_non_exhaustive()
    }
}

/// A fault that a monitor has been asked about. Its message is taken back when this is dropped.
pub(crate) struct Asked {
    context: Arc<Context>,
    ticket: u64,
    addr: u64,
}

impl Asked {
    /// Whether it's about a page, and this monitor was asked.
    pub(crate) fn is_for(&self, addr: u64, context: &Arc<Context>) -> bool {
        self.addr == addr && Arc::ptr_eq(&self.context, context)
    }

    /// Waits until it's woken, or the monitor is dead.
    pub(crate) fn wait(self, wait: Wait<'_>) -> Result<(), GaveUp> {
        let context = &self.context;
        context.waiters.wait_until(wait, || {
            context.is_dead() || !context.is_waiting(self.ticket)
        })
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        let mut queue = self.context.queue.lock();
        queue.faults.retain(|fault| fault.ticket != self.ticket);
    }
}

/// What a call has to say when it has let go of the space's lock.
#[derive(Debug)]
pub(crate) struct Announced {
    context: Arc<Context>,
    event: Option<MonitorEvent>,
}

impl Announced {
    /// Says it, and waits until it has been read, the monitor is dead, or the wait is over.
    pub(crate) fn deliver(mut self, wait: Wait<'_>) {
        let Some(event) = self.event.take() else {
            return;
        };
        let context = &self.context;
        let ticket = {
            let mut queue = context.queue.lock();
            let ticket = queue.next;
            queue.next += 1;
            queue.events.push_back((ticket, event));
            ticket
        };
        context.readers.wake();
        let is_read = || {
            let queue = context.queue.lock();
            queue.events.iter().all(|(other, _)| *other != ticket)
        };
        // Giving up leaves what has been done as it is.
        let _ = context
            .waiters
            .wait_until(wait, || context.is_dead() || is_read());
        let mut queue = context.queue.lock();
        let at = queue.events.iter().position(|(other, _)| *other == ticket);
        let unread = at.and_then(|at| queue.events.remove(at));
        drop(queue);
        drop(unread);
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        self.context.changing.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Ends the context.
struct Handle(Arc<Context>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.die();
    }
}

/// Says what is in the pages of registered ranges, and hears of changes to them (Linux: a userfaultfd).
///
/// Clones are handles to the same one. With the last of them all that wait for it go on as if there were none.
///
/// ```
/// use std::thread;
/// use vma_core::paged::Paged;
/// use vma_core::{AddressSpace, Domain, MapRequest, Monitor, MonitorEvent, MonitorFeatures, MonitorModes};
/// use vma_core::{Prot, SpaceConfig, Wait};
///
/// let space = AddressSpace::with_backend(SpaceConfig::default(), &Domain::default(), Paged::default())?;
/// let addr = space.map(&MapRequest::anonymous(4096, Prot::READ | Prot::WRITE))?;
/// let monitor = Monitor::new(MonitorFeatures::empty())?;
/// space.register_monitor(addr, 4096, &monitor, MonitorModes::MISSING)?;
/// thread::scope(|scope| {
///     scope.spawn(|| {
///         if let Ok(MonitorEvent::Fault { addr, .. }) = monitor.read_event(Wait::forever()) {
///             space.monitor_copy(&monitor, addr, &[7; 4096]).unwrap();
///         }
///     });
///     assert_eq!(space.accessor().load_u8(addr), Ok(7));
/// });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Monitor(Arc<Handle>);

impl Monitor {
    /// A monitor of a space that is still to be chosen: the first that it's registered with.
    ///
    /// # Errors
    /// `EINVAL`: unknown features.
    ///
    /// Source: `userfaultfd_api()`.
    pub fn new(features: MonitorFeatures) -> Result<Self, MonitorFeaturesError> {
        if !MonitorFeatures::KNOWN.contains(features) {
            return Err(MonitorFeaturesError(features.bits()));
        }
        Ok(Self::of(Context::new(features)))
    }

    fn of(context: Arc<Context>) -> Self {
        Monitor(Arc::new(Handle(context)))
    }

    /// One for a child of the space, with the same features, and its context.
    pub(crate) fn for_child(parent: &Context) -> (Self, Arc<Context>) {
        let context = Context::new(parent.features);
        (Self::of(Arc::clone(&context)), context)
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.0.0
    }

    /// The next message; faults first. Each is read once.
    ///
    /// # Errors
    /// [`GaveUp`], when the wait is over first.
    pub fn read_event(&self, wait: Wait<'_>) -> Result<MonitorEvent, GaveUp> {
        let mut read = None;
        self.context().readers.wait_until(wait, || {
            read = self.context().take();
            read.is_some()
        })?;
        match read {
            Some(event) => Ok(event),
            None => unreachable!("that's what was waited for"),
        }
    }

    /// The next message, if there is one.
    pub fn try_read_event(&self) -> Option<MonitorEvent> {
        self.context().take()
    }

    /// Has the faults of a range look again (`UFFDIO_WAKE`). What isn't in place by then is asked for once more.
    pub fn wake(&self, range: VmRange) {
        self.context().wake(range);
    }

    /// Calls that change the layout have left messages that haven't been read, so that pages can't be put in place (`EAGAIN`).
    pub fn is_changing(&self) -> bool {
        self.context().is_changing()
    }
}

impl fmt::Debug for Monitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Monitor")
            .field("features", &self.context().features)
            .finish_non_exhaustive()
    }
}
