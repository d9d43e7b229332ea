//! Registering monitors, and what they put in place: see [`crate::events`]. Linux: userfaultfd.

use std::sync::Arc;

use super::draft::{Draft, Piece};
use super::{AddressSpace, WriteGuard};
use crate::addr::VmRange;
use crate::backend::{Backend, Fault, Fill, Filled};
use crate::error::{Errno, PublishError, SplitError};
use crate::events::{Announced, Context, Monitor, MonitorEvent, MonitorFeatures, MonitorModes};
use crate::file::FileKind;
use crate::flags::VmaFlags;
use crate::limits::SpaceConfig;
use crate::space::{Access, FaultError};
use crate::vma::{Extras, Placed, Vma};

/// All three modes, as flags of a mapping.
pub(super) const MONITORED: VmaFlags = VmaFlags::UFFD_MISSING
    .union(VmaFlags::UFFD_WP)
    .union(VmaFlags::UFFD_MINOR);

/// Why a range wasn't registered or unregistered. What lies before a mapping that couldn't be split or recorded was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MonitorError {
    /// No modes, or unknown ones.
    #[error("modes {0:#x} aren't valid")]
    BadModes(u64),
    /// Unaligned, empty or outside of the address space.
    #[error("{len:#x} bytes at {addr:#x}: unaligned, empty or beyond the address space")]
    BadRange {
        /// Start.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// Nothing is mapped in the range.
    #[error("nothing is mapped from {0:#x} on")]
    Unmapped(u64),
    /// Monitors, or these modes, aren't for such a mapping.
    #[error("{0} can't be monitored like this")]
    NotMonitorable(VmRange),
    /// The mapping may never be written.
    #[error("{0} can't be written")]
    NotWritable(VmRange),
    /// Registered with another monitor.
    #[error("{0} has another monitor")]
    OtherMonitor(VmRange),
    /// The same, where that is to be taken away.
    #[error("{0} is another monitor's")]
    NotIts(VmRange),
    /// The monitor is another space's.
    #[error("the monitor belongs to another space")]
    OtherSpace,
    /// A mapping couldn't be split.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// No memory for records; nothing was changed.
    #[error(transparent)]
    Publish(#[from] PublishError),
}

impl MonitorError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            MonitorError::BadModes(_)
            | MonitorError::BadRange { .. }
            | MonitorError::Unmapped(_)
            | MonitorError::NotMonitorable(_)
            | MonitorError::NotIts(_)
            | MonitorError::OtherSpace => Errno::EINVAL,
            MonitorError::NotWritable(_) => Errno::EPERM,
            MonitorError::OtherMonitor(_) => Errno::EBUSY,
            MonitorError::Split(error) => error.errno(),
            MonitorError::Publish(error) => error.errno(),
        }
    }
}

/// Why a monitor couldn't put something in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResolveError {
    /// The layout is changing: there is an event to be read first.
    #[error("the layout is changing; there is an event to be read")]
    Changing,
    /// Unaligned, empty or outside of the address space.
    #[error("{len:#x} bytes at {addr:#x}: unaligned, empty or beyond the address space")]
    BadRange {
        /// Start.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// The monitor is another space's, or none's yet.
    #[error("the monitor doesn't belong to the space")]
    OtherSpace,
    /// The range isn't one mapping's that is registered, or not for this.
    #[error("{0:#x} and what follows isn't registered for it")]
    NotRegistered(u64),
    /// It can't be done to such a mapping, or not with this backend.
    #[error("it can't be done to {0}")]
    NotApplicable(VmRange),
    /// There is a page already.
    #[error("there is a page at {0:#x}")]
    Exists(u64),
    /// The file has no page there, or ends before.
    #[error("the file has no page for {0:#x}")]
    NoPage(u64),
    /// No memory for a page or for page tables.
    #[error("no memory for the page at {0:#x}")]
    OutOfMemory(u64),
}

impl ResolveError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            ResolveError::Changing => Errno::EAGAIN,
            ResolveError::BadRange { .. }
            | ResolveError::OtherSpace
            | ResolveError::NotApplicable(_) => Errno::EINVAL,
            ResolveError::NotRegistered(_) => Errno::ENOENT,
            ResolveError::Exists(_) => Errno::EEXIST,
            ResolveError::NoPage(_) => Errno::EFAULT,
            ResolveError::OutOfMemory(_) => Errno::ENOMEM,
        }
    }
}

/// The flags of some modes.
fn flags_of(modes: MonitorModes) -> VmaFlags {
    let mut flags = VmaFlags::empty();
    flags.set(
        VmaFlags::UFFD_MISSING,
        modes.contains(MonitorModes::MISSING),
    );
    flags.set(VmaFlags::UFFD_WP, modes.contains(MonitorModes::WP));
    flags.set(VmaFlags::UFFD_MINOR, modes.contains(MonitorModes::MINOR));
    flags
}

/// Source: `validate_range()`.
fn parse(config: &SpaceConfig, addr: u64, len: u64) -> Option<VmRange> {
    let pages = config.pages();
    let is_valid = pages.is_aligned(addr)
        && pages.is_aligned(len)
        && len > 0
        && addr >= config.mmap_min_addr
        && addr < config.task_size
        && len <= config.task_size - addr;
    is_valid.then(|| VmRange::new(addr, addr + len))
}

fn is_shared_memory(vma: &Vma) -> bool {
    let object = vma.file().map(|file| file.object());
    !vma.is_anonymous() && object.is_some_and(|object| object.kind() == FileKind::Shmem)
}

/// Source: `vma_can_userfault()`.
fn is_monitorable(vma: Placed<'_>, wanted: VmaFlags) -> bool {
    let flags = vma.flags();
    let is_huge = flags.contains(VmaFlags::HUGETLB);
    let is_memory = is_huge || is_shared_memory(vma.vma);
    if flags.intersects(VmaFlags::DROPPABLE | VmaFlags::SHADOW_STACK)
        || (flags.intersects(VmaFlags::SPECIAL) && !is_huge)
        || (wanted.contains(VmaFlags::UFFD_MINOR) && !is_memory)
    {
        return false;
    }
    vma.vma.is_anonymous() || is_memory
}

/// Whether an address lies between huge pages of a mapping.
fn is_between(vma: Placed<'_>, addr: u64) -> bool {
    let size = vma.vma.huge_page_size();
    size.is_none_or(|size| addr.is_multiple_of(size))
}

/// What is in a record beside flags, with another monitor or none.
fn extras_with(vma: &Vma, monitor: Option<&Arc<Context>>) -> Option<Arc<Extras>> {
    let extras = vma.extras().map(|extras| Extras::clone(extras));
    let extras = Extras {
        monitor: monitor.cloned(),
        ..extras.unwrap_or_default()
    };
    (!extras.is_default()).then(|| Arc::new(extras))
}

/// The record without a monitor.
pub(super) fn unmonitored(vma: Vma) -> Vma {
    if vma.monitor().is_none() {
        return vma;
    }
    let (flags, extras) = (vma.flags() - MONITORED, extras_with(&vma, None));
    vma.with_flags(flags).with_extras(extras)
}

/// The record with another monitor.
pub(super) fn with_monitor(vma: Vma, monitor: &Arc<Context>) -> Vma {
    let extras = extras_with(&vma, Some(monitor));
    vma.with_extras(extras)
}

/// Takes the monitor from a whole mapping, without merging. Source: `userfaultfd_reset_ctx()`.
pub(super) fn forget(draft: &mut Draft<'_>, addr: u64) {
    let Some(vma) = draft.find(addr) else { return };
    let (start, end) = (vma.start, vma.end);
    let piece = Piece::new(start, end, unmonitored(vma.vma.clone()));
    draft.replace(start, end, smallvec::smallvec![piece]);
}

/// Mapping by mapping; of those before an error the change stays.
fn for_each(
    draft: &mut Draft<'_>,
    range: VmRange,
    mut f: impl FnMut(&mut Draft<'_>, VmRange) -> Result<u64, SplitError>,
) -> Result<(), SplitError> {
    let mut at = range.start;
    while let Some(vma) = draft.first_in(at, range.end) {
        let part = VmRange::new(vma.start.max(range.start), vma.end.min(range.end));
        at = f(draft, part)?.max(part.end);
    }
    Ok(())
}

/// Source: `userfaultfd_register()`.
fn register(
    draft: &mut Draft<'_>,
    range: VmRange,
    context: &Arc<Context>,
    modes: MonitorModes,
) -> Result<(), MonitorError> {
    let first = draft.first_in(range.start, range.end);
    let first = first.ok_or(MonitorError::Unmapped(range.start))?;
    if !is_between(first, range.start) {
        return Err(MonitorError::NotMonitorable(first.range()));
    }
    let wanted = flags_of(modes);
    let mut at = range.start;
    while let Some(vma) = draft.first_in(at, range.end) {
        if !is_monitorable(vma, wanted) {
            return Err(MonitorError::NotMonitorable(vma.range()));
        }
        if !vma.flags().contains(VmaFlags::MAYWRITE) {
            return Err(MonitorError::NotWritable(vma.range()));
        }
        if range.end < vma.end && !is_between(vma, range.end) {
            return Err(MonitorError::NotMonitorable(vma.range()));
        }
        let other = vma.vma.monitor();
        if other.is_some_and(|other| !Arc::ptr_eq(other, context)) {
            return Err(MonitorError::OtherMonitor(vma.range()));
        }
        at = vma.end;
    }
    for_each(draft, range, |draft, part| {
        let Some(vma) = draft.find(part.start) else {
            return Ok(part.end);
        };
        if vma.vma.monitor().is_some() && vma.flags().contains(wanted) {
            return Ok(vma.end);
        }
        let flags = (vma.flags() - MONITORED) | wanted;
        let extras = extras_with(vma.vma, Some(context));
        draft.modify(part.start, part.end, flags, extras.as_ref())
    })?;
    Ok(())
}

/// Source: `userfaultfd_unregister()`.
fn unregister(
    draft: &mut Draft<'_>,
    range: VmRange,
    context: &Arc<Context>,
) -> Result<(), MonitorError> {
    let first = draft.first_in(range.start, range.end);
    let first = first.ok_or(MonitorError::Unmapped(range.start))?;
    if !is_between(first, range.start) {
        return Err(MonitorError::NotMonitorable(first.range()));
    }
    let mut at = range.start;
    while let Some(vma) = draft.first_in(at, range.end) {
        let other = vma.vma.monitor();
        if other.is_some_and(|other| !Arc::ptr_eq(other, context)) {
            return Err(MonitorError::NotIts(vma.range()));
        }
        if !is_monitorable(vma, vma.flags()) {
            return Err(MonitorError::NotMonitorable(vma.range()));
        }
        at = vma.end;
    }
    for_each(draft, range, |draft, part| {
        let Some(vma) = draft.find(part.start) else {
            return Ok(part.end);
        };
        if vma.vma.monitor().is_none() {
            return Ok(vma.end);
        }
        let (flags, extras) = (vma.flags() - MONITORED, extras_with(vma.vma, None));
        draft.modify(part.start, part.end, flags, extras.as_ref())
    })?;
    Ok(())
}

impl<B: Backend> WriteGuard<'_, B> {
    /// As [`AddressSpace::register_monitor`].
    ///
    /// # Errors
    /// As there.
    pub fn register_monitor(
        &mut self,
        addr: u64,
        len: u64,
        monitor: &Monitor,
        modes: MonitorModes,
    ) -> Result<(), MonitorError> {
        let known = MonitorModes::MISSING | MonitorModes::WP | MonitorModes::MINOR;
        if modes.is_empty() || !known.contains(modes) {
            return Err(MonitorError::BadModes(modes.bits()));
        }
        let range = self.monitored_range(addr, len)?;
        let context = monitor.context();
        let core = &self.space.core;
        if !context.belongs_to(self.space.id(), &core.attention) {
            return Err(MonitorError::OtherSpace);
        }
        let mut changes = self.changes();
        let mut draft = self.draft(self.config(), &mut changes);
        let result = register(&mut draft, range, context, modes);
        if result.is_ok() && modes.contains(MonitorModes::WP) {
            // Of an earlier registration.
            self.protect_pages(range, false)?;
        }
        core.attention.expect();
        self.commit(&mut changes)?;
        result
    }

    /// As [`AddressSpace::unregister_monitor`].
    ///
    /// # Errors
    /// As there.
    pub fn unregister_monitor(
        &mut self,
        addr: u64,
        len: u64,
        monitor: &Monitor,
    ) -> Result<(), MonitorError> {
        let range = self.monitored_range(addr, len)?;
        let context = monitor.context();
        let mut changes = self.changes();
        let mut draft = self.draft(self.config(), &mut changes);
        let result = unregister(&mut draft, range, context);
        self.commit(&mut changes)?;
        // Those who ask from here on find no monitor when they look again.
        context.wake(range);
        result
    }

    fn monitored_range(&self, addr: u64, len: u64) -> Result<VmRange, MonitorError> {
        parse(self.config(), addr, len).ok_or(MonitorError::BadRange { addr, len })
    }

    fn protect_pages(&self, range: VmRange, on: bool) -> Result<(), PublishError> {
        let backend = &self.space.core.backend;
        backend.monitor_protect(range.start, range.end, on)
    }

    /// Mappings of dead monitors lose them. Source: `userfaultfd_release_all()`.
    #[cold]
    pub(super) fn reap_monitors(&mut self) {
        let attention = &self.space.core.attention;
        if !attention.lower() {
            return;
        }
        let config = Arc::clone(self.config());
        let mut changes = self.changes();
        let mut draft = self.draft(&config, &mut changes);
        let everything = VmRange::new(0, config.task_size);
        let reaped = for_each(&mut draft, everything, |draft, part| {
            let Some(vma) = draft.find(part.start) else {
                return Ok(part.end);
            };
            if !vma.vma.monitor().is_some_and(|monitor| monitor.is_dead()) {
                return Ok(vma.end);
            }
            let (flags, extras) = (vma.flags() - MONITORED, extras_with(vma.vma, None));
            draft.modify(part.start, part.end, flags, extras.as_ref())
        });
        if reaped.is_err() || self.commit(&mut changes).is_err() {
            // They count as unregistered; the next one tries again.
            attention.raise();
        }
    }

    /// Monitors hear that pages are going to be discarded, when the lock has been let go.
    pub(super) fn announce_removal(
        &self,
        start: u64,
        end: u64,
        mut discards: impl FnMut(Placed<'_>) -> bool,
    ) -> Vec<Announced> {
        if !self.space.core.attention.is_expected() {
            return Vec::new();
        }
        let mut changes = self.changes();
        let draft = self.draft(self.config(), &mut changes);
        let mut told = Vec::new();
        let mut at = start;
        while let Some(vma) = draft.first_in(at, end) {
            if !discards(vma) {
                break;
            }
            let part = VmRange::new(vma.start.max(start), vma.end.min(end));
            if let Some(monitor) = hearing(vma.vma, MonitorFeatures::EVENT_REMOVE) {
                told.push(monitor.announce(MonitorEvent::Remove(part)));
            }
            at = vma.end;
        }
        told
    }
}

/// A mapping's monitor, if it hears of something.
pub(super) fn hearing(vma: &Vma, features: MonitorFeatures) -> Option<&Arc<Context>> {
    let monitor = vma.monitor()?;
    (monitor.has(features) && !monitor.is_dead()).then_some(monitor)
}

/// What is put in place of one page.
enum Content<'c> {
    Bytes(&'c [u8]),
    Zeros,
    /// The page that the file has.
    Files,
}

impl<B: Backend> AddressSpace<B> {
    /// Has a monitor asked about faults in a range (`UFFDIO_REGISTER`). Mappings are split at its ends, and merged with neighbours that have
    /// the same monitor and modes. What was registered before with this monitor has these modes afterwards. The range may have holes.
    ///
    /// Huge pages (`MAP_HUGETLB`) are registered, and faults of them aren't asked about. With the backend `()` there are no faults.
    ///
    /// # Errors
    /// | errno | when |
    /// |---|---|
    /// | `EINVAL` | no or unknown modes; unaligned, empty or outside; nothing mapped there; not for such a mapping (a file that isn't shared memory, special or droppable memory, `MINOR` on anonymous memory); another space's monitor |
    /// | `EPERM` | a mapping may never be written |
    /// | `EBUSY` | another monitor's |
    /// | `ENOMEM` | a limit of mappings; no memory |
    ///
    /// Source: `userfaultfd_register()` in fs/userfaultfd.c.
    pub fn register_monitor(
        &self,
        addr: u64,
        len: u64,
        monitor: &Monitor,
        modes: MonitorModes,
    ) -> Result<(), MonitorError> {
        self.write_once()
            .register_monitor(addr, len, monitor, modes)
    }

    /// Takes a monitor from a range (`UFFDIO_UNREGISTER`). Faults that wait there go on without it.
    ///
    /// # Errors
    /// `EINVAL` unaligned, empty or outside; nothing mapped; another monitor's; a mapping that couldn't have one. `ENOMEM` a limit of
    /// mappings; no memory.
    ///
    /// Source: `userfaultfd_unregister()` in fs/userfaultfd.c.
    pub fn unregister_monitor(
        &self,
        addr: u64,
        len: u64,
        monitor: &Monitor,
    ) -> Result<(), MonitorError> {
        self.write_once().unregister_monitor(addr, len, monitor)
    }

    /// Puts pages in place where there are none, and wakes who waits for them (`UFFDIO_COPY`). Returns how many bytes, which is less than
    /// asked for if an error came after the first page.
    ///
    /// # Errors
    /// | errno | when |
    /// |---|---|
    /// | `EAGAIN` | an event has to be read first |
    /// | `EINVAL` | unaligned, empty or outside; another space's monitor; huge pages; a backend without pages |
    /// | `ENOENT` | not within one registered mapping |
    /// | `EEXIST` | there is a page |
    /// | `EFAULT` | the file ends before |
    /// | `ENOMEM` | no memory |
    ///
    /// Takes the shared side of the space's lock. Source: `userfaultfd_copy()`, `mfill_atomic_copy()`.
    pub fn monitor_copy(
        &self,
        monitor: &Monitor,
        addr: u64,
        bytes: &[u8],
    ) -> Result<u64, ResolveError> {
        let page = self.core.pages.size() as usize;
        let content = |at: u64| {
            let from = (at - addr) as usize;
            Content::Bytes(&bytes[from..from + page])
        };
        self.resolve(monitor, addr, bytes.len() as u64, content)
    }

    /// Pages of zeros, as [`monitor_copy`](Self::monitor_copy) does it (`UFFDIO_ZEROPAGE`).
    ///
    /// # Errors
    /// As there.
    pub fn monitor_zero(
        &self,
        monitor: &Monitor,
        addr: u64,
        len: u64,
    ) -> Result<u64, ResolveError> {
        self.resolve(monitor, addr, len, |_| Content::Zeros)
    }

    /// Has a mapping show pages that its file has (`UFFDIO_CONTINUE`), as [`monitor_copy`](Self::monitor_copy) does it.
    ///
    /// # Errors
    /// As there; `EINVAL` not shared memory; `EFAULT` the file has no page.
    pub fn monitor_continue(
        &self,
        monitor: &Monitor,
        addr: u64,
        len: u64,
    ) -> Result<u64, ResolveError> {
        self.resolve(monitor, addr, len, |_| Content::Files)
    }

    /// Protects the pages that are in place, so that stores to them are asked about, or no longer, and wakes who waits
    /// (`UFFDIO_WRITEPROTECT`). Pages of anonymous memory alone.
    ///
    /// # Errors
    /// `EAGAIN` an event has to be read first; `EINVAL` unaligned, empty or outside, another space's monitor, not anonymous memory; `ENOENT`
    /// something in the range isn't registered for it (what lies before is done); `ENOMEM` no memory for page tables.
    ///
    /// Takes the exclusive side of the space's lock. Source: `userfaultfd_writeprotect()`, `mwriteprotect_range()`.
    pub fn monitor_write_protect(
        &self,
        monitor: &Monitor,
        addr: u64,
        len: u64,
        on: bool,
    ) -> Result<(), ResolveError> {
        let context = monitor.context();
        let guard = self.write();
        let range = self.resolved_range(context, guard.config(), addr, len)?;
        let mut at = range.start;
        while at < range.end {
            let vma = guard.find(at);
            let vma = vma.filter(|vma| vma.flags().contains(VmaFlags::UFFD_WP));
            let vma = vma.ok_or(ResolveError::NotRegistered(at))?;
            if !vma.vma().is_anonymous() {
                return Err(ResolveError::NotApplicable(vma.range()));
            }
            let part = VmRange::new(at, vma.range().end.min(range.end));
            let done = guard.protect_pages(part, on);
            done.map_err(|_| ResolveError::OutOfMemory(at))?;
            at = part.end;
        }
        drop(guard);
        if !on {
            context.wake(range);
        }
        Ok(())
    }

    /// What comes before all that a monitor does to pages.
    fn resolved_range(
        &self,
        context: &Context,
        config: &SpaceConfig,
        addr: u64,
        len: u64,
    ) -> Result<VmRange, ResolveError> {
        if context.is_changing() {
            return Err(ResolveError::Changing);
        }
        let bad = ResolveError::BadRange { addr, len };
        let range = parse(config, addr, len).ok_or(bad)?;
        if !context.is_of(self.id()) {
            return Err(ResolveError::OtherSpace);
        }
        Ok(range)
    }

    fn resolve<'c>(
        &self,
        monitor: &Monitor,
        addr: u64,
        len: u64,
        content: impl Fn(u64) -> Content<'c>,
    ) -> Result<u64, ResolveError> {
        let context = monitor.context();
        let mut at = addr;
        let result = self.with_pager_now(|pager, config| {
            let range = self.resolved_range(context, config, addr, len)?;
            let vma = pager
                .find(range.start)
                .filter(|vma| vma.vma.monitor().is_some());
            let vma = vma.filter(|vma| range.end <= vma.end);
            let vma = vma.ok_or(ResolveError::NotRegistered(range.start))?;
            if !vma.flags().contains(VmaFlags::SHARED) {
                pager.identify(range.start);
            }
            while at < range.end {
                self.resolve_page(vma, at, &content(at))?;
                at += self.core.pages.size();
            }
            Ok(())
        });
        if at > addr {
            context.wake(VmRange::new(addr, at));
            return Ok(at - addr);
        }
        result.map(|()| 0)
    }

    /// With the shared side of the space's lock held.
    fn resolve_page(
        &self,
        vma: Placed<'_>,
        at: u64,
        content: &Content<'_>,
    ) -> Result<(), ResolveError> {
        let not_applicable = ResolveError::NotApplicable(vma.range());
        if vma.flags().contains(VmaFlags::HUGETLB) {
            return Err(not_applicable);
        }
        let file = vma.file().filter(|_| !vma.vma.is_anonymous());
        let pgoff = vma.pgoff_at(at);
        if file.is_some_and(|file| !file.object().has_page(vma.pages.bytes(pgoff))) {
            return Err(ResolveError::NoPage(at));
        }
        let fill = match content {
            Content::Bytes(bytes) => Fill::Bytes(bytes),
            Content::Zeros => Fill::Zeros,
            Content::Files => {
                let file = file.filter(|_| is_shared_memory(vma.vma));
                let file = file.ok_or(not_applicable)?;
                if !file.object().pages().contains(pgoff) {
                    return Err(ResolveError::NoPage(at));
                }
                Fill::Files
            }
        };
        let reader = self.register();
        let _guard = reader.pin();
        let fault = Fault {
            addr: at,
            access: Access::Write,
            by: None,
            vma: vma.vma,
            range: vma.range(),
            pgoff,
            attached: &|| true,
            may_replace: false,
            monitored: MonitorModes::empty(),
        };
        loop {
            let filled = self.core.backend.fill(&fault, &fill);
            let filled = filled.map_err(|error| match error {
                FaultError::BeyondEnd(_) => ResolveError::NoPage(at),
                FaultError::OutOfMemory(_) => ResolveError::OutOfMemory(at),
                _ => not_applicable,
            })?;
            match filled {
                Filled::Done => return Ok(()),
                Filled::Exists => return Err(ResolveError::Exists(at)),
                Filled::Unsupported => return Err(not_applicable),
                // A file is taking out the page.
                Filled::Again => std::thread::yield_now(),
            }
        }
    }
}
