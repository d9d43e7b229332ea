//! Registering monitors, and what they put in place: see [`crate::events`]. Linux: userfaultfd.

mod error;
mod resolve;

use std::sync::Arc;

pub use self::error::{MonitorError, ResolveError};

use super::draft::{Draft, Piece};
use super::{AddressSpace, WriteGuard};
use crate::addr::VmRange;
use crate::backend::Backend;
use crate::error::{PublishError, SplitError};
use crate::events::{Announced, Context, Monitor, MonitorEvent, MonitorFeatures, MonitorModes};
use crate::file::FileKind;
use crate::flags::VmaFlags;
use crate::limits::SpaceConfig;
use crate::vma::{Extras, Placed, Vma};

/// All three modes, as flags of a mapping.
pub(super) const MONITORED: VmaFlags = VmaFlags::UFFD_MISSING
    .union(VmaFlags::UFFD_WP)
    .union(VmaFlags::UFFD_MINOR);

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
pub(super) fn with_monitor(vma: &Vma, monitor: &Arc<Context>) -> Vma {
    let extras = extras_with(vma, Some(monitor));
    vma.clone().with_extras(extras)
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
}
