//! The record of one mapping.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use vma_rcu::sync::atomic::{AtomicBool, Ordering};
use vma_rcu::sync::planted;
use vma_rcu::tree::Record;

use crate::addr::{Pages, VmRange};
use crate::anon::{AnonCell, AnonId};
use crate::events::{Context, MonitorModes};
use crate::file::{FileKind, MappingHooks, OpenFile};
use crate::flags::VmaFlags;

/// Attributes of a mapping. Its range is the key that it is stored under; range, flags and file never
/// change in place: a change makes a new record.
///
/// Immutable, but for the identity of its private pages, which the first write fault sets.
pub struct Vma {
    flags: VmaFlags,
    /// Page offset: into the file, or for anonymous memory the page number that it was created at.
    pgoff: u64,
    file: Option<Arc<OpenFile>>,
    /// What few mappings have.
    extras: Option<Arc<Extras>>,
    /// Protected by the space's identity lock.
    anon: AnonCell,
    /// Bytes kept free below it.
    start_gap: u64,
    gate: Gate,
}

/// Closed while a call is at work on the pages behind a mapping: then nothing may be put there, nor used, but by the call. Faults
/// without a lock find it closed and wait for the space's lock, which the call holds exclusively.
///
/// Closed before the mapping is published, so that who finds it finds it closed, or followed by a fence that pairs with that of a
/// fault ([`AddressSpace`](crate::AddressSpace), `fault_page`). Opened with release when the call is through; who sees that, with
/// acquire, sees the pages as the call has left them. Model: `a_gate_keeps_old_pages_from_a_new_mapping`.
#[derive(Debug, Default)]
struct Gate(AtomicBool);

/// What few mappings have. Equal by value for merging.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extras {
    /// Name of anonymous memory (`PR_SET_VMA_ANON_NAME`).
    pub(crate) anon_name: Option<Arc<str>>,
    /// Memory policy, a number of the embedder's.
    pub(crate) policy: Option<u64>,
    /// Made by the embedder.
    pub(crate) special: Option<Special>,
    /// Who is asked about faults.
    pub(crate) monitor: Option<Arc<Context>>,
}

/// A mapping that no call made: `[vdso]`, a ring of `io_uring`, a segment of a device.
#[derive(Clone, Debug)]
pub(crate) struct Special {
    /// As maps shows it.
    pub(crate) name: Option<Arc<str>>,
    pub(crate) hooks: Option<Arc<dyn MappingHooks>>,
    /// Its pages come from somewhere else than zero-filled memory (Linux: has `vm_ops`).
    pub(crate) has_ops: bool,
}

impl Extras {
    /// Nothing in it.
    pub(crate) fn is_default(&self) -> bool {
        self.anon_name.is_none()
            && self.policy.is_none()
            && self.special.is_none()
            && self.monitor.is_none()
    }
}

impl Record for Vma {
    fn start_gap(&self) -> u64 {
        self.start_gap
    }
}

impl Clone for Vma {
    fn clone(&self) -> Self {
        Vma {
            flags: self.flags,
            pgoff: self.pgoff,
            file: self.file.clone(),
            extras: self.extras.clone(),
            anon: AnonCell::new(self.anon.get()),
            start_gap: self.start_gap,
            gate: Gate::default(),
        }
    }
}

impl fmt::Debug for Vma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let codes: Vec<_> = self.flags.codes().collect();
        f.debug_struct("Vma")
            .field("flags", &codes.join(" "))
            .field("pgoff", &self.pgoff)
            .field("file", &self.file.as_ref().map(|file| file.object().name()))
            .field("anon", &self.anon.get())
            .finish_non_exhaustive()
    }
}

impl Vma {
    #[inline]
    pub(crate) fn new(flags: VmaFlags, pgoff: u64, start_gap: u64) -> Self {
        Vma {
            flags,
            pgoff,
            file: None,
            extras: None,
            anon: AnonCell::default(),
            start_gap,
            gate: Gate::default(),
        }
    }

    #[inline]
    pub(crate) fn with_file(mut self, file: Option<Arc<OpenFile>>) -> Self {
        self.file = file;
        self
    }

    pub(crate) fn with_extras(mut self, extras: Option<Arc<Extras>>) -> Self {
        self.extras = extras;
        self
    }

    pub(crate) fn with_flags(mut self, flags: VmaFlags) -> Self {
        self.flags = flags;
        self
    }

    /// Takes over what a VMA that merges into it brings along: its sticky flags, and its identity if there was none.
    pub(crate) fn absorb(self, other: &Vma) -> Self {
        let flags = self.flags | (other.flags & VmaFlags::STICKY);
        let anon = self.anon().or(other.anon());
        self.with_flags(flags).with_anon(anon)
    }

    pub(crate) fn with_pgoff(mut self, pgoff: u64) -> Self {
        self.pgoff = pgoff;
        self
    }

    pub(crate) fn with_anon(mut self, anon: AnonId) -> Self {
        self.anon = AnonCell::new(anon);
        self
    }

    /// Attributes.
    pub fn flags(&self) -> VmaFlags {
        self.flags
    }

    /// Page offset as merging sees it. Anonymous memory has one too, that maps doesn't show.
    pub fn pgoff(&self) -> u64 {
        self.pgoff
    }

    /// What it maps, if a file.
    pub fn file(&self) -> Option<&Arc<OpenFile>> {
        self.file.as_ref()
    }

    /// Identity of its private pages.
    pub fn anon(&self) -> AnonId {
        self.anon.get()
    }

    /// Name of anonymous memory, if one was set.
    pub fn anon_name(&self) -> Option<&Arc<str>> {
        self.extras.as_ref()?.anon_name.as_ref()
    }

    /// Name that the embedder gave, such as `[vdso]`.
    pub fn special_name(&self) -> Option<&Arc<str>> {
        self.extras.as_ref()?.special.as_ref()?.name.as_ref()
    }

    /// Whether a call is at work on its pages.
    pub(crate) fn is_gated(&self) -> bool {
        self.gate.0.load(Ordering::Acquire) && !planted("open_gate")
    }

    pub(crate) fn set_gated(&self, closed: bool) {
        self.gate.0.store(closed, Ordering::Release);
    }

    pub(crate) fn anon_cell(&self) -> &AnonCell {
        &self.anon
    }

    pub(crate) fn extras(&self) -> Option<&Arc<Extras>> {
        self.extras.as_ref()
    }

    /// Who is asked about faults, alive or not.
    pub(crate) fn monitor(&self) -> Option<&Arc<Context>> {
        self.extras.as_ref()?.monitor.as_ref()
    }

    /// Which faults are asked about. Of huge pages none.
    pub(crate) fn monitored(&self) -> MonitorModes {
        let modes = [
            (VmaFlags::UFFD_MISSING, MonitorModes::MISSING),
            (VmaFlags::UFFD_WP, MonitorModes::WP),
            (VmaFlags::UFFD_MINOR, MonitorModes::MINOR),
        ];
        if self.extras.is_none() || self.flags.contains(VmaFlags::HUGETLB) {
            return MonitorModes::empty();
        }
        match self.monitor() {
            Some(monitor) if !monitor.is_dead() => {
                let set = modes.iter().filter(|(flag, _)| self.flags.contains(*flag));
                set.map(|(_, mode)| *mode).collect()
            }
            _ => MonitorModes::empty(),
        }
    }

    /// Zero-filled memory (`vma_is_anonymous`): no file, or `/dev/zero` privately.
    pub fn is_anonymous(&self) -> bool {
        match &self.file {
            Some(file) => file.object().kind() == FileKind::DevZero,
            None => self
                .extras
                .as_ref()
                .and_then(|extras| extras.special.as_ref())
                .is_none_or(|special| !special.has_ops),
        }
    }

    /// Bytes of its pages, of a mapping of huge ones: it's split between them only.
    pub(crate) fn huge_page_size(&self) -> Option<u64> {
        if !self.flags.contains(VmaFlags::HUGETLB) {
            return None;
        }
        let huge = self.file.as_ref()?.object().huge()?;
        Some(huge.page_size())
    }

    /// Who follows this mapping.
    pub(crate) fn hooks(&self) -> Option<&Arc<dyn MappingHooks>> {
        if let Some(file) = &self.file
            && let Some(hooks) = file.object().hooks()
        {
            return Some(hooks);
        }
        self.extras.as_ref()?.special.as_ref()?.hooks.as_ref()
    }

    /// Its removal is followed, so merging may not remove it.
    pub(crate) fn has_close(&self) -> bool {
        self.hooks().is_some_and(|hooks| hooks.has_close())
    }

    /// Shared, and may write: counted in the file.
    pub(crate) fn is_shared_maywrite(&self) -> bool {
        self.flags.contains(VmaFlags::SHARED | VmaFlags::MAYWRITE)
    }

    pub(crate) fn same_file(a: &Vma, b: &Vma) -> bool {
        same_open_file(a.file.as_ref(), b.file.as_ref())
    }

    pub(crate) fn same_policy(a: &Vma, b: &Vma) -> bool {
        let policy = |vma: &Vma| vma.extras.as_ref().and_then(|extras| extras.policy);
        policy(a) == policy(b)
    }
}

/// The same open file description, or none on both sides.
pub(crate) fn same_open_file(a: Option<&Arc<OpenFile>>, b: Option<&Arc<OpenFile>>) -> bool {
    match (a, b) {
        (None, None) => true,
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        _ => false,
    }
}

/// Equal names, policies, owners and monitors.
pub(crate) fn same_extras(a: Option<&Arc<Extras>>, b: Option<&Arc<Extras>>) -> bool {
    let (Some(a), Some(b)) = (a, b) else {
        return a.is_none() && b.is_none();
    };
    let same_special = match (&a.special, &b.special) {
        (None, None) => true,
        (Some(a), Some(b)) => a.name == b.name && same_hooks(a.hooks.as_ref(), b.hooks.as_ref()),
        _ => false,
    };
    let same_monitor = match (&a.monitor, &b.monitor) {
        (None, None) => true,
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        _ => false,
    };
    a.anon_name == b.anon_name && a.policy == b.policy && same_special && same_monitor
}

pub(crate) fn same_hooks(
    a: Option<&Arc<dyn MappingHooks>>,
    b: Option<&Arc<dyn MappingHooks>>,
) -> bool {
    match (a, b) {
        (None, None) => true,
        // Vtables of one type may differ between codegen units; the object's address tells.
        (Some(a), Some(b)) => std::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b)),
        _ => false,
    }
}

/// A VMA and where it lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed<'a> {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) vma: &'a Vma,
    pub(crate) pages: Pages,
}

impl<'a> Placed<'a> {
    pub(crate) fn range(self) -> VmRange {
        VmRange::new(self.start, self.end)
    }

    pub(crate) fn page_count(self) -> u64 {
        self.pages.count(self.end - self.start)
    }

    pub(crate) fn flags(self) -> VmaFlags {
        self.vma.flags
    }

    /// The pages that it maps of a file of huge pages, by their number in it.
    pub(crate) fn huge_pages(self) -> Option<Range<u64>> {
        let unit = self.pages.count(self.vma.huge_page_size()?);
        let first = self.vma.pgoff / unit;
        Some(first..first + self.page_count() / unit)
    }

    /// The record of the part that begins at `addr`.
    pub(crate) fn tail(self, addr: u64) -> Vma {
        let skipped = self.pages.count(addr - self.start);
        self.vma
            .clone()
            .with_pgoff(self.vma.pgoff.wrapping_add(skipped))
    }

    /// Page offset at `addr`.
    pub(crate) fn pgoff_at(self, addr: u64) -> u64 {
        self.vma
            .pgoff
            .wrapping_add(self.pages.count(addr - self.start))
    }

    /// Start less the gap that has to stay free below (`vm_start_gap`).
    pub(crate) fn start_with_gap(self) -> u64 {
        self.start.saturating_sub(self.vma.start_gap)
    }

    pub(crate) fn file(self) -> Option<&'a Arc<OpenFile>> {
        self.vma.file.as_ref()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_record_stays_small() {
        assert!(size_of::<Vma>() <= 56, "{}", size_of::<Vma>());
    }
}
