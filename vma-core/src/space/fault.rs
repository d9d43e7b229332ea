//! Touching pages, as far as bookkeeping knows of it: which access faults how, stack growth, and the
//! identity that a first write gives to a private mapping ([`crate::anon`]).

use std::cell::RefCell;
use std::sync::Arc;

use parking_lot::Mutex;
use vma_rcu::reclaim::{Domain, Reader};
use vma_rcu::shootdown::AccessorId;
use vma_rcu::tree::View;
use vma_rcu::wait::Wait;

use super::advise::{AdviseError, not_applicable};
use super::{AddressSpace, Inner, WriteGuard};
use crate::addr::{Pages, VmRange};
use crate::anon::{AnonIds, reusable};
use crate::backend::paged::{FrameAllocator, PAGE};
use crate::backend::{Backend, Fault, Faulted};
use crate::error::Errno;
use crate::events::{Asked, InvalidationReason, MonitorFeatures, MonitorModes, Notifiers, Started};
use crate::file::{FileIoError, FileObject};
use crate::flags::{Advice, VmaFlags};
use crate::limits::SpaceConfig;
use crate::vma::{Placed, Vma};

/// Kind of access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Load.
    Read,
    /// Store.
    Write,
    /// Instruction fetch.
    Execute,
}

/// The signal that an access gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FaultError {
    /// `SIGSEGV`, `SEGV_MAPERR`: nothing is mapped, or a stack can't grow there.
    #[error("nothing is mapped at {0:#x}")]
    Unmapped(u64),
    /// `SIGSEGV`, `SEGV_ACCERR`: the mapping doesn't allow it.
    #[error("the mapping {vma} doesn't allow {access:?} at {addr:#x}")]
    Denied {
        /// Address.
        addr: u64,
        /// Kind of access.
        access: Access,
        /// The mapping.
        vma: VmRange,
    },
    /// `SIGBUS`, `BUS_ADRERR`: the file ends before.
    #[error("the file ends before {0:#x}")]
    BeyondEnd(u64),
    /// `SIGBUS`, `BUS_ADRERR`: the file's backend couldn't read the page.
    #[error("the page at {addr:#x} couldn't be read: {errno}")]
    ReadFailed {
        /// Address.
        addr: u64,
        /// The backend's error.
        errno: Errno,
    },
    /// `SIGBUS`, `BUS_ADRERR`: the file's backend doesn't allow stores to the page.
    #[error("a store to the page at {addr:#x} isn't allowed: {errno}")]
    StoreRefused {
        /// Address.
        addr: u64,
        /// The backend's error.
        errno: Errno,
    },
    /// `SIGBUS`, `BUS_ADRERR`: a mapping of the embedder's frames has none there.
    #[error("no frame was put in at {0:#x}")]
    NoFrame(u64),
    /// `SIGBUS`, `BUS_ADRERR`: no huge page is free that isn't reserved by others.
    #[error("no huge page for {0:#x}")]
    NoHugePage(u64),
    /// There is no memory for the page. (Linux ends a process.)
    #[error("no memory for the page at {0:#x}")]
    OutOfMemory(u64),
    /// Frames of the embedder's aren't pinned (`EFAULT`).
    #[error("the frame at {0:#x} is the embedder's")]
    Unpinnable(u64),
    /// `SIGBUS`: a monitor has to be asked, and can't be: it doesn't want to (`UFFD_FEATURE_SIGBUS`), or the space's lock is held meanwhile.
    #[error("a monitor has to say what is at {0:#x}")]
    Monitored(u64),
    /// The wait for a monitor was given up (`EINTR`).
    #[error("the wait for what is at {0:#x} was given up")]
    Interrupted(u64),
    /// An atomic access has to be aligned to its size.
    #[error("{0:#x} isn't aligned for an atomic access")]
    Unaligned(u64),
}

impl FaultError {
    /// Where it happened.
    pub const fn addr(self) -> u64 {
        match self {
            FaultError::Unmapped(addr)
            | FaultError::Denied { addr, .. }
            | FaultError::ReadFailed { addr, .. }
            | FaultError::StoreRefused { addr, .. }
            | FaultError::BeyondEnd(addr)
            | FaultError::NoFrame(addr)
            | FaultError::NoHugePage(addr)
            | FaultError::Unpinnable(addr)
            | FaultError::Monitored(addr)
            | FaultError::Interrupted(addr)
            | FaultError::OutOfMemory(addr)
            | FaultError::Unaligned(addr) => addr,
        }
    }

    /// The same at another address of the page.
    pub(crate) fn at(self, addr: u64) -> Self {
        match self {
            FaultError::Unmapped(_) => FaultError::Unmapped(addr),
            FaultError::Denied { access, vma, .. } => FaultError::Denied { addr, access, vma },
            FaultError::ReadFailed { errno, .. } => FaultError::ReadFailed { addr, errno },
            FaultError::StoreRefused { errno, .. } => FaultError::StoreRefused { addr, errno },
            FaultError::BeyondEnd(_) => FaultError::BeyondEnd(addr),
            FaultError::NoFrame(_) => FaultError::NoFrame(addr),
            FaultError::NoHugePage(_) => FaultError::NoHugePage(addr),
            FaultError::Unpinnable(_) => FaultError::Unpinnable(addr),
            FaultError::Monitored(_) => FaultError::Monitored(addr),
            FaultError::Interrupted(_) => FaultError::Interrupted(addr),
            FaultError::OutOfMemory(_) => FaultError::OutOfMemory(addr),
            FaultError::Unaligned(_) => FaultError::Unaligned(addr),
        }
    }
}

impl Access {
    /// Whether a mapping of these flags allows it.
    pub(crate) fn is_allowed(self, flags: VmaFlags) -> bool {
        match self {
            Access::Write => flags.contains(VmaFlags::WRITE),
            Access::Execute => flags.contains(VmaFlags::EXEC),
            // On x86 whatever can be accessed at all can be read.
            Access::Read => flags.is_accessible(),
        }
    }
}

/// What a page is made present for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need<'w> {
    /// What the mapping has to allow.
    allowed: Access,
    /// A page of a private mapping is to be its own, as for a store.
    own: bool,
    /// As [`Fault::by`].
    by: Option<AccessorId>,
    /// How long monitors are waited for.
    wait: Wait<'w>,
}

impl<'w> Need<'w> {
    pub(crate) fn of(access: Access) -> Self {
        Need {
            allowed: access,
            own: false,
            by: None,
            wait: Wait::forever(),
        }
    }

    /// For a pin: see [`Accessor::pin_page`](crate::paged::Accessor::pin_page).
    pub(crate) fn to_pin(access: Access) -> Self {
        Need {
            own: true,
            ..Need::of(access)
        }
    }

    pub(crate) fn by(self, accessor: AccessorId) -> Self {
        Need {
            by: Some(accessor),
            ..self
        }
    }

    pub(crate) fn wait(self, wait: Wait<'w>) -> Self {
        Need { wait, ..self }
    }

    /// As what a backend sees it.
    fn access(self, flags: VmaFlags) -> Access {
        if self.own && !flags.contains(VmaFlags::SHARED) {
            Access::Write
        } else {
            self.allowed
        }
    }
}

/// Whether a first access of this kind gives a mapping its identity.
fn identifies(access: Access, flags: VmaFlags) -> bool {
    // A huge page is the mapping's own from the first load on.
    (access == Access::Write || flags.contains(VmaFlags::HUGETLB))
        && !flags.contains(VmaFlags::SHARED)
}

/// What a file has to do before a page can be made present, with no lock held.
struct FileWork {
    object: Arc<FileObject>,
    pgoff: u64,
    store: bool,
}

impl FileWork {
    /// For an access to a page of a mapping.
    fn of(vma: &Vma, pgoff: u64, access: Access) -> Option<Self> {
        let object = Arc::clone(vma.file()?.object());
        let store = access == Access::Write && vma.flags().contains(VmaFlags::SHARED);
        Some(FileWork {
            object,
            pgoff,
            store,
        })
    }

    /// What an access at `addr` gets if it fails. Source: `vmf_fs_error()`.
    fn run<B: Backend>(&self, backend: &B, addr: u64) -> Result<(), FaultError> {
        let allocate = |frames: &dyn FrameAllocator| backend.allocate(frames);
        let result = self
            .object
            .prepare_page_with(self.pgoff, self.store, &allocate);
        result.map_err(|error| match error {
            error if error.errno() == Errno::ENOMEM => FaultError::OutOfMemory(addr),
            FileIoError::StoreRefused { errno, .. } => FaultError::StoreRefused { addr, errno },
            error => FaultError::ReadFailed {
                addr,
                errno: error.errno(),
            },
        })
    }

    fn is_for(&self, vma: &Vma, pgoff: u64) -> bool {
        let object = vma.file().map(|file| file.object());
        self.pgoff == pgoff && object.is_some_and(|object| Arc::ptr_eq(object, &self.object))
    }
}

/// What has to be done for a page when the space's lock has been let go of.
enum Work {
    /// By its file.
    File(FileWork),
    /// Notifiers hear that pages are going to be replaced by copies.
    Tell(VmRange),
    /// A monitor that has been asked is waited for.
    Wait(Asked),
}

/// See [`Work`].
#[derive(Default)]
struct Deferred {
    /// What, and for which address.
    work: Option<(Work, u64)>,
    /// What notifiers have been told of.
    started: Option<Started>,
    /// A monitor that has been asked.
    asked: Option<Asked>,
    /// The wait for it was given up.
    gave_up: bool,
    /// What it failed with before.
    failed: Option<(FileWork, FaultError)>,
    /// Where to go on afterwards.
    resume: Option<u64>,
}

/// An error that nobody sees: it's tried again.
fn later(addr: u64) -> FaultError {
    let errno = Errno::EAGAIN;
    FaultError::ReadFailed { addr, errno }
}

/// What may be replaced by faults of `at..end`, which lies in one mapping: whole pages.
fn replaced(vma: Placed<'_>, at: u64, end: u64) -> VmRange {
    let size = vma.vma.huge_page_size().unwrap_or(vma.pages.size());
    let end = end.checked_next_multiple_of(size).unwrap_or(u64::MAX);
    VmRange::new(at & !(size - 1), end)
}

/// Faults under a guard alone before the space's lock is asked for: each one lost to a call that replaced the mapping.
const ATTEMPTS: usize = 4;

/// Looks up, makes pages present and gives identities while the layout is stable.
pub(super) struct Pager<'a, B> {
    view: View<'a, Vma>,
    ids: &'a Mutex<AnonIds>,
    pages: Pages,
    backend: &'a B,
    domain: &'a Domain,
    /// `None`: the lock can't be let go of, and files do it while it's held.
    deferred: Option<RefCell<Deferred>>,
    notifiers: &'a Notifiers,
    /// There are some.
    notifies: bool,
}

impl<'a, B: Backend> Pager<'a, B> {
    /// Files do what they have to while the lock is held, and notifiers aren't told.
    fn of(space: &'a AddressSpace<B>, inner: &'a Inner, config: &SpaceConfig) -> Self {
        Pager {
            view: space.core.tree.locked(&inner.writer),
            ids: &space.identities,
            pages: config.pages(),
            backend: &space.core.backend,
            domain: space.domain(),
            deferred: None,
            notifiers: &space.core.notifiers,
            notifies: false,
        }
    }

    pub(super) fn find(&self, addr: u64) -> Option<Placed<'a>> {
        self.place(self.view.find(addr)?)
    }

    fn next(&self, addr: u64) -> Option<Placed<'a>> {
        self.place(self.view.find_next(addr)?)
    }

    #[expect(clippy::unnecessary_wraps, reason = "a step of chains of options")]
    fn place(&self, entry: vma_rcu::tree::Entry<'a, Vma>) -> Option<Placed<'a>> {
        Some(Placed {
            start: entry.start,
            end: entry.end,
            vma: entry.value,
            pages: self.pages,
        })
    }

    /// Nothing is mapped at `addr`, and what comes next is a stack.
    fn may_grow(&self, addr: u64) -> bool {
        self.find(addr).is_none()
            && self
                .next(addr)
                .is_some_and(|next| next.flags().contains(VmaFlags::GROWSDOWN))
    }

    /// Gives the mapping at `addr` an identity if it has none (`anon_vma_prepare`).
    pub(super) fn identify(&self, addr: u64) {
        let Some(vma) = self.find(addr).filter(|vma| vma.vma.anon().is_none()) else {
            return;
        };
        let next = self.next(vma.end);
        let prev = self
            .view
            .find_prev(vma.start)
            .and_then(|entry| self.place(entry));
        let mut ids = self.ids.lock();
        // Two faults may have come here at once; the second one finds the first one's.
        if vma.vma.anon().is_none() {
            let id = reusable(vma, prev, next).unwrap_or_else(|| ids.fresh());
            vma.vma.anon_cell().set(id);
        }
    }

    /// Makes the pages of part of one mapping present, up to the first that can't be.
    pub(super) fn make_present(
        &self,
        vma: Placed<'_>,
        start: u64,
        end: u64,
        access: Access,
        by: Option<AccessorId>,
    ) -> Result<(), FaultError> {
        if !B::ACTIVE {
            return self
                .first_missing(vma, start, end)
                .map_or(Ok(()), |missing| Err(FaultError::BeyondEnd(missing)));
        }
        let reader = self.domain.register();
        let mut at = self.resume(start, end);
        let mut started = None;
        while at < end {
            let guard = reader.pin();
            let fault = Fault {
                addr: self.pages.floor(at),
                access,
                by,
                vma: vma.vma,
                range: vma.range(),
                pgoff: vma.pgoff_at(at),
                attached: &|| true,
                may_replace: self.may_replace(started.as_ref(), at),
                monitored: vma.vma.monitored(),
            };
            match self.backend.fault(&fault).map_err(|error| error.at(at))? {
                Faulted::Done => at = self.pages.floor(at) + self.pages.bytes(1),
                // A call is moving pages.
                Faulted::Again => std::thread::yield_now(),
                Faulted::Replaces => {
                    drop(guard);
                    started = Some(self.tell(vma, at, end)?);
                }
                Faulted::Monitored(mode) => self.ask(vma, at, access, mode)?,
                Faulted::NotReady => {
                    drop(guard);
                    self.file_work(vma, at, access)?;
                }
            }
        }
        Ok(())
    }

    /// Whether notifiers have been told that the page at `at` may be replaced.
    fn may_replace(&self, started: Option<&Started>, at: u64) -> bool {
        let page = VmRange::new(at, at + 1);
        // One more may have come while the lock was free.
        let all = self.notifiers.registered();
        let covers = |started: &Started| started.covers(page) && started.registered() == all;
        let deferred = self.deferred.as_ref();
        !self.notifies
            || started.is_some_and(covers)
            || deferred.is_some_and(|it| it.borrow().started.as_ref().is_some_and(covers))
    }

    /// Tells them, or leaves it for when the lock is free, as [`file_work`](Self::file_work) does.
    fn tell(&self, vma: Placed<'_>, at: u64, end: u64) -> Result<Started, FaultError> {
        let range = replaced(vma, at, end);
        let Some(deferred) = &self.deferred else {
            return Ok(self.notifiers.start(&[range], InvalidationReason::Clear));
        };
        let mut deferred = deferred.borrow_mut();
        deferred.work = Some((Work::Tell(range), at));
        deferred.resume = Some(at);
        Err(later(at))
    }

    /// Asks a monitor, or, if it has been asked already, leaves the wait for when the lock is free, as
    /// [`file_work`](Self::file_work) does.
    fn ask(
        &self,
        vma: Placed<'_>,
        at: u64,
        access: Access,
        mode: MonitorModes,
    ) -> Result<(), FaultError> {
        let page = self.pages.floor(at);
        let (Some(monitor), Some(deferred)) = (vma.vma.monitor(), &self.deferred) else {
            return Err(FaultError::Monitored(at));
        };
        if monitor.has(MonitorFeatures::SIGBUS) {
            return Err(FaultError::Monitored(at));
        }
        let mut deferred = deferred.borrow_mut();
        if deferred.gave_up {
            return Err(FaultError::Interrupted(at));
        }
        match deferred.asked.take() {
            Some(asked) if asked.is_for(page, monitor) => {
                deferred.work = Some((Work::Wait(asked), at));
                deferred.resume = Some(at);
                Err(later(at))
            }
            _ => {
                deferred.asked = Some(monitor.ask(page, access, mode));
                Ok(())
            }
        }
    }

    /// Where to begin: files may have made present what lies before, with the lock let go of.
    fn resume(&self, start: u64, end: u64) -> u64 {
        let deferred = self.deferred.as_ref();
        let resume = deferred.and_then(|deferred| deferred.borrow_mut().resume.take());
        resume
            .filter(|at| (start..end).contains(at))
            .unwrap_or(start)
    }

    /// Has a mapping's file do what it has to do for the page at `at`, or leaves it for when the lock is free: then the result is
    /// an error that nobody sees.
    fn file_work(&self, vma: Placed<'_>, at: u64, access: Access) -> Result<(), FaultError> {
        let pgoff = vma.pgoff_at(at);
        let Some(work) = FileWork::of(vma.vma, pgoff, access) else {
            return Ok(());
        };
        let Some(deferred) = &self.deferred else {
            return work.run(self.backend, at);
        };
        let mut deferred = deferred.borrow_mut();
        if let Some((failed, error)) = &deferred.failed
            && failed.is_for(vma.vma, pgoff)
        {
            return Err(error.at(at));
        }
        deferred.work = Some((Work::File(work), at));
        deferred.resume = Some(at);
        Err(later(at))
    }

    /// The first address in the part of a mapping that its file has no page for.
    #[expect(clippy::unused_self, reason = "belongs to what a page fault finds")]
    fn first_missing(&self, vma: Placed<'_>, start: u64, end: u64) -> Option<u64> {
        let file = vma.file().filter(|_| !vma.vma.is_anonymous())?;
        let object = file.object();
        let offset = |addr: u64| vma.pages.bytes(vma.pgoff_at(addr));
        let last = vma.pages.floor(end - 1).max(start);
        if object.has_page(offset(last)) {
            return None;
        }
        let first = vma.pages.floor(start);
        if !object.has_page(offset(first)) {
            return Some(start);
        }
        let len = vma.pages.ceil_wrapping(object.len());
        Some(first + (len - offset(first)))
    }

    /// One access to all pages of `[start, end)` that lie in the mapping at `start`. Returns where it ends.
    fn access(&self, start: u64, end: u64, need: Need<'_>) -> Result<u64, FaultError> {
        let vma = self.find(start).ok_or(FaultError::Unmapped(start))?;
        let flags = vma.flags();
        if !need.allowed.is_allowed(flags) {
            return Err(FaultError::Denied {
                addr: start,
                access: need.allowed,
                vma: vma.range(),
            });
        }
        let access = need.access(flags);
        if identifies(access, flags) {
            // Before the file is asked for the page, so that it stays when there is none.
            self.identify(start);
        }
        let to = vma.end.min(end);
        self.make_present(vma, start, to, access, need.by)?;
        Ok(to)
    }

    /// Makes pages present as mlock and `MAP_POPULATE` do, mapping by mapping; holes are passed over. At most so many pages
    /// before it returns where it has come to. Source: `__mm_populate()`, `populate_vma_page_range()`.
    fn populate(&self, start: u64, end: u64, ignore_errors: bool, most: u64) -> Result<u64, u64> {
        let Some(vma) = self.next(start).filter(|vma| vma.start < end) else {
            return Ok(end);
        };
        let from = vma.start.max(start);
        let last = vma.end.min(end);
        let to = last.min(from.saturating_add(self.pages.bytes(most)));
        match self.populate_one(vma, from, to) {
            Ok(()) => Ok(to),
            // The rest of the mapping is left.
            Err(_) if ignore_errors => Ok(last),
            Err(at) => Err(at),
        }
    }

    /// `MADV_POPULATE_READ` and `MADV_POPULATE_WRITE`, for one mapping or so many pages of it. Returns where it has come to.
    pub(super) fn populate_advised(
        &self,
        start: u64,
        end: u64,
        advice: Advice,
        most: u64,
    ) -> Result<u64, AdviseError> {
        let vma = self.find(start).ok_or(AdviseError::Unmapped(start))?;
        let flags = vma.flags();
        let write = advice == Advice::POPULATE_WRITE;
        let allowed = flags.contains(if write {
            VmaFlags::WRITE
        } else {
            VmaFlags::READ
        });
        if flags.intersects(VmaFlags::IO | VmaFlags::PFNMAP) || !allowed {
            return Err(not_applicable(vma, advice));
        }
        let access = if write { Access::Write } else { Access::Read };
        if identifies(access, flags) {
            self.identify(start);
        }
        let last = vma.end.min(end);
        let to = last.min(start.saturating_add(self.pages.bytes(most)));
        self.make_present(vma, start, to, access, None)
            .map_err(|fault| match fault {
                FaultError::OutOfMemory(addr) => AdviseError::OutOfMemory(addr),
                fault => AdviseError::NoPages(fault.addr()),
            })?;
        Ok(to)
    }

    fn populate_one(&self, vma: Placed<'_>, start: u64, end: u64) -> Result<(), u64> {
        let flags = vma.flags();
        if flags.intersects(VmaFlags::IO | VmaFlags::PFNMAP | VmaFlags::LOCKONFAULT) {
            return Ok(());
        }
        if !flags.is_accessible() {
            return Err(start);
        }
        let mut access = Access::Read;
        if flags & (VmaFlags::WRITE | VmaFlags::SHARED) == VmaFlags::WRITE {
            access = Access::Write;
        }
        if identifies(access, flags) {
            self.identify(start);
        }
        self.make_present(vma, start, end, access, None)
            .map_err(FaultError::addr)
    }
}

/// Pages that are populated before others get a turn on the lock.
const PART: u64 = 512;

/// Does `f` from where it has come to, until that is the end.
fn step<E>(start: u64, end: u64, mut f: impl FnMut(u64) -> Result<u64, E>) -> Result<(), E> {
    let mut at = start;
    while at < end {
        at = f(at)?;
    }
    Ok(())
}

impl<B: Backend> AddressSpace<B> {
    /// Makes pages present under the shared side of the lock, with pauses for writers.
    pub(super) fn populate(&self, start: u64, end: u64, ignore_errors: bool) -> Result<(), u64> {
        step(start, end, |at| {
            self.with_pager(Wait::forever(), |pager| {
                pager.populate(at, end, ignore_errors, PART)
            })
        })
    }

    /// The same as a fault of each page would. Source: `madvise_populate()`.
    pub(super) fn populate_advised(
        &self,
        start: u64,
        end: u64,
        advice: Advice,
    ) -> Result<(), AdviseError> {
        step(start, end, |at| {
            self.with_pager(Wait::forever(), |pager| {
                pager.populate_advised(at, end, advice, PART)
            })
        })
    }

    /// Calls `f` once, while the layout is stable.
    pub(super) fn with_pager_now<R>(&self, f: impl FnOnce(&Pager<'_, B>, &SpaceConfig) -> R) -> R {
        let layout = self.read();
        let config = &layout.inner().config;
        f(&Pager::of(self, layout.inner(), config), config)
    }

    /// Calls `f` while the layout is stable: again after a file had something to do for a page, with the lock let go of.
    fn with_pager<R>(&self, wait: Wait<'_>, mut f: impl FnMut(&Pager<'_, B>) -> R) -> R {
        let mut deferred = Deferred::default();
        loop {
            let result = {
                let layout = self.read();
                let inner = layout.inner();
                let pager = Pager {
                    deferred: Some(RefCell::new(deferred)),
                    notifies: self.core.notifiers.is_any(),
                    ..Pager::of(self, inner, &inner.config)
                };
                let result = f(&pager);
                deferred = pager.deferred.map(RefCell::into_inner).unwrap_or_default();
                result
            };
            let Some((work, addr)) = deferred.work.take() else {
                return result;
            };
            match work {
                Work::File(work) => {
                    deferred.failed = match work.run(&self.core.backend, addr) {
                        Ok(()) => None,
                        Err(error) => Some((work, error)),
                    };
                }
                Work::Wait(asked) => {
                    deferred.started = None;
                    deferred.gave_up = asked.wait(wait).is_err();
                }
                Work::Tell(range) => {
                    let started = self
                        .core
                        .notifiers
                        .start(&[range], InvalidationReason::Clear);
                    deferred.started = Some(started);
                }
            }
        }
    }
}

impl<B: Backend> WriteGuard<'_, B> {
    pub(super) fn pager<'a>(&'a self, config: &SpaceConfig) -> Pager<'a, B> {
        Pager {
            notifies: self.notifies,
            ..Pager::of(self.space, self.inner(), config)
        }
    }

    /// Makes pages present, with the lock held only if more calls may come; what can't be had is passed over.
    pub(super) fn populate(&mut self, start: u64, end: u64) {
        if self.once {
            self.after.populate(start, end);
            return;
        }
        // What was taken out may be what is needed.
        self.after.finish(self.space);
        let pager = self.pager(self.config());
        // With errors ignored there is none.
        let _ = step(start, end, |at| pager.populate(at, end, true, u64::MAX));
    }

    /// Makes pages present, up to the first address that can't be.
    pub(super) fn populate_checked(&mut self, start: u64, end: u64) -> Result<(), u64> {
        self.after.finish(self.space);
        let pager = self.pager(self.config());
        step(start, end, |at| pager.populate(at, end, false, u64::MAX))
    }

    /// [`AddressSpace::populate_advised`].
    pub(super) fn populate_advised(
        &mut self,
        start: u64,
        end: u64,
        advice: Advice,
    ) -> Result<(), AdviseError> {
        self.after.finish(self.space);
        let pager = self.pager(self.config());
        step(start, end, |at| {
            pager.populate_advised(at, end, advice, u64::MAX)
        })
    }

    /// As [`AddressSpace::touch`].
    ///
    /// # Errors
    /// As there.
    pub fn touch(&mut self, addr: u64, len: u64, access: Access) -> Result<(), FaultError> {
        let end = addr
            .checked_add(len.max(1))
            .ok_or(FaultError::Unmapped(addr))?;
        // What was taken out may be what is needed.
        self.after.finish(self.space);
        let mut at = addr;
        while at < end {
            if self.find(at).is_none() {
                self.expand_stack(at)
                    .map_err(|_| FaultError::Unmapped(at))?;
            }
            let config = self.config();
            at = self.pager(config).access(at, end, Need::of(access))?;
        }
        Ok(())
    }
}

impl<B: Backend> AddressSpace<B> {
    /// Makes a page accessible: under a guard alone, unless a stack has to grow, a mapping gets its identity, or calls replace
    /// the mapping faster than it can be looked up.
    pub(crate) fn fault_page(
        &self,
        page: u64,
        need: Need<'_>,
        reader: &Reader,
    ) -> Result<(), FaultError> {
        let notifiers = &self.core.notifiers;
        let registered = notifiers.registered();
        let is_heard = registered > 0 && notifiers.is_any();
        let mut started = None;
        let mut asked: Option<Asked> = None;
        let mut attempts = 0;
        while attempts < ATTEMPTS {
            let guard = reader.pin();
            let Some(entry) = self.core.tree.find(page, &guard) else {
                break;
            };
            let (vma, flags) = (entry.value, entry.value.flags());
            if !need.allowed.is_allowed(flags) {
                return Err(FaultError::Denied {
                    addr: page,
                    access: need.allowed,
                    vma: VmRange::new(entry.start, entry.end),
                });
            }
            let access = need.access(flags);
            if identifies(access, flags) && vma.anon().is_none() {
                break;
            }
            if vma.is_gated() {
                break;
            }
            // Asked under the leaf's lock, after a fence that pairs with those of calls: see `Gates`.
            let attached = || {
                let now = self.core.tree.find(page, &guard);
                now.is_some_and(|now| std::ptr::eq(now.value, vma)) && !vma.is_gated()
            };
            let fault = Fault {
                addr: page,
                access,
                by: need.by,
                vma,
                range: VmRange::new(entry.start, entry.end),
                pgoff: vma.pgoff().wrapping_add((page - entry.start) / PAGE as u64),
                attached: &attached,
                may_replace: !is_heard
                    || started.as_ref().is_some_and(|started: &Started| {
                        started.covers(replaced(self.place(&entry), page, page + 1))
                    }),
                monitored: vma.monitored(),
            };
            match self.core.backend.fault(&fault) {
                Ok(Faulted::Done) => {
                    if access == Access::Write {
                        let page = VmRange::new(page, page + 1);
                        notifiers.tell_late(registered, page, InvalidationReason::Clear);
                    }
                    return Ok(());
                }
                Ok(Faulted::Replaces) => {
                    let range = replaced(self.place(&entry), page, page + 1);
                    drop(guard);
                    started = Some(notifiers.start(&[range], InvalidationReason::Clear));
                }
                Err(error) if attached() => return Err(error),
                Ok(Faulted::Monitored(mode)) => {
                    let monitor = vma.monitor();
                    let monitor = monitor.filter(|it| !it.has(MonitorFeatures::SIGBUS));
                    let Some(monitor) = monitor else {
                        return Err(FaultError::Monitored(page));
                    };
                    match asked.take() {
                        Some(asked) if asked.is_for(page, monitor) => {
                            drop(guard);
                            // Nothing is to wait for what a monitor does.
                            started = None;
                            let waited = asked.wait(need.wait);
                            waited.map_err(|_| FaultError::Interrupted(page))?;
                        }
                        _ => asked = Some(monitor.ask(page, access, mode)),
                    }
                }
                // What was wrong may be another mapping's doing.
                Ok(Faulted::Again) | Err(_) => attempts += 1,
                Ok(Faulted::NotReady) => {
                    let work = FileWork::of(vma, fault.pgoff, access);
                    drop(guard);
                    if let Some(work) = work
                        && let Err(error) = work.run(&self.core.backend, page)
                        && self.is_still_shown(page, &work, reader)
                    {
                        return Err(error);
                    }
                }
            }
        }
        drop(asked);
        self.touch_as(page, page + 1, need)
    }

    fn place<'e>(&self, entry: &vma_rcu::tree::Entry<'e, Vma>) -> Placed<'e> {
        Placed {
            start: entry.start,
            end: entry.end,
            vma: entry.value,
            pages: self.core.pages,
        }
    }

    /// Whether the page that a file had to do with is still what is mapped somewhere.
    fn is_still_shown(&self, page: u64, work: &FileWork, reader: &Reader) -> bool {
        let guard = reader.pin();
        self.core.tree.find(page, &guard).is_some_and(|entry| {
            let pgoff = (page - entry.start) / PAGE as u64;
            work.is_for(entry.value, entry.value.pgoff().wrapping_add(pgoff))
        })
    }

    /// Accesses every page of a range, as a program would, as far as that leaves traces in the bookkeeping: a stack below
    /// the first address grows, and a first write to a private mapping gives it an identity. An access of
    /// length 0 counts as one byte.
    ///
    /// Takes the shared side only, but for stack growth.
    ///
    /// # Errors
    /// The signal, for the first page that can't be accessed; the ones before were.
    ///
    /// ```
    /// use vma_core::{Access, AddressSpace, MapRequest, Prot};
    /// let space = AddressSpace::default();
    /// let addr = space.map(&MapRequest::anonymous(4096, Prot::READ))?;
    /// assert!(space.touch(addr, 1, Access::Read).is_ok());
    /// assert!(space.touch(addr, 1, Access::Write).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn touch(&self, addr: u64, len: u64, access: Access) -> Result<(), FaultError> {
        let end = addr
            .checked_add(len.max(1))
            .ok_or(FaultError::Unmapped(addr))?;
        self.touch_as(addr, end, Need::of(access))
    }

    /// [`touch`](Self::touch), waiting for monitors as `wait` says.
    ///
    /// # Errors
    /// As there, and [`FaultError::Interrupted`].
    pub fn touch_with(
        &self,
        addr: u64,
        len: u64,
        access: Access,
        wait: Wait<'_>,
    ) -> Result<(), FaultError> {
        let end = addr
            .checked_add(len.max(1))
            .ok_or(FaultError::Unmapped(addr))?;
        self.touch_as(addr, end, Need::of(access).wait(wait))
    }

    fn touch_as(&self, start: u64, end: u64, need: Need<'_>) -> Result<(), FaultError> {
        let mut at = start;
        while at < end {
            match self.with_pager(need.wait, |pager| {
                let result = pager.access(at, end, need);
                // A guard page, or no stack above that could grow down to here, is an error for good.
                let grows = matches!(result, Err(FaultError::Unmapped(_))) && pager.may_grow(at);
                (!grows).then_some(result)
            }) {
                Some(Ok(to)) => {
                    at = to;
                    continue;
                }
                Some(Err(error)) => return Err(error),
                None => {}
            }
            // A stack may grow down to here, which needs the exclusive side; meanwhile all may have changed.
            self.write()
                .expand_stack(at)
                .map_err(|_| FaultError::Unmapped(at))?;
        }
        Ok(())
    }
}
