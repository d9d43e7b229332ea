//! Probes in the files that a space maps: who has to look where.

use std::sync::{Arc, OnceLock};

use vma_rcu::sync::atomic::{AtomicBool, Ordering};

use super::files::{shown, shows};
use super::{AddressSpace, Core, rethrow};
use crate::backend::Backend;
use crate::file::{FileObject, OpenFile, Part};
use crate::flags::VmaFlags;
use crate::system::{Panicked, Place, Probed, Table, fence_of_probes};
use crate::vma::{Placed, Vma};

/// A part of a file that has probes, and where it is or was mapped.
pub(crate) type ProbedPart = (Arc<OpenFile>, Part);

/// A space's link to the probes of its system.
pub(super) struct Probes<B: Backend> {
    /// Set once. Between that and the look at files' marks there is a fence, as in a call; a registration that doesn't see it has its
    /// mark seen.
    table: OnceLock<Arc<Table<Core<B>>>>,
    /// The space has ended, with mappings still there. The same.
    has_ended: AtomicBool,
}

impl<B: Backend> Default for Probes<B> {
    fn default() -> Self {
        Probes {
            table: OnceLock::new(),
            has_ended: AtomicBool::new(false),
        }
    }
}

impl<B: Backend> Probes<B> {
    /// Whether there can be any.
    #[inline]
    pub(super) fn is_in_system(&self) -> bool {
        self.table.get().is_some()
    }

    /// A child of a space of a system is in the same one.
    pub(super) fn inherit(&self, parent: &Self) {
        if let Some(table) = parent.table.get() {
            let _ = self.table.set(Arc::clone(table));
        }
    }
}

/// Whether probes are in mappings of this kind. Source: `valid_vma()` in kernel/events/uprobes.c, without `VM_WRITE`, which mprotect
/// changes.
pub(super) fn concern(vma: &Vma) -> bool {
    let kinds = VmaFlags::HUGETLB | VmaFlags::MAYEXEC | VmaFlags::MAYSHARE;
    vma.flags() & kinds == VmaFlags::MAYEXEC
}

/// What of a mapping has probes, or may have had.
pub(super) fn probed(vma: Placed<'_>) -> Option<ProbedPart> {
    let (file, part) = shown(vma).filter(|(file, _)| file.object().has_probes())?;
    concern(vma.vma).then(|| (Arc::clone(file), part))
}

impl<B: Backend> Probed for Core<B> {
    type Backend = B;

    fn shows(&self, file: &FileObject, offset: u64, addr: u64) -> bool {
        let reader = self.tree.domain().register();
        let guard = reader.pin();
        let is_there = self.tree.find(addr, &guard).is_some_and(|entry| {
            let at = || self.pages.bytes(entry.value.pgoff()) + (addr - entry.start);
            concern(entry.value) && shows(entry.value, file) && at() == offset
        });
        is_there && !self.probes.has_ended.load(Ordering::Relaxed)
    }

    fn backend(&self) -> &B {
        &self.backend
    }

    fn table(&self) -> Option<&Arc<Table<Self>>> {
        self.probes.table.get()
    }
}

impl<B: Backend> Core<B> {
    fn probed_parts(&self) -> Vec<ProbedPart> {
        let reader = self.tree.domain().register();
        let guard = reader.pin();
        let entries = self.tree.iter(0, &guard);
        let probed = entries.filter_map(|entry| {
            probed(Placed {
                start: entry.start,
                end: entry.end,
                vma: entry.value,
                pages: self.pages,
            })
        });
        probed.collect()
    }

    /// Where probes have to look when the space goes with mappings still there: nothing is shown any more.
    pub(super) fn probes_at_end(&self) -> Vec<ProbedPart> {
        if !self.probes.is_in_system() {
            return Vec::new();
        }
        self.probes.has_ended.store(true, Ordering::Relaxed);
        fence_of_probes();
        self.probed_parts()
    }
}

impl<B: Backend> AddressSpace<B> {
    /// Takes it into a system, unless it is in it from its birth: probes are installed in what is mapped.
    pub(crate) fn join(&self, table: &Arc<Table<Core<B>>>) {
        table.note_page_size(self.core.pages);
        if self.core.probes.table.set(Arc::clone(table)).is_err() {
            return;
        }
        fence_of_probes();
        self.settle_probes(&self.core.probed_parts());
    }

    /// Probes look at these parts, with no lock held. A callback's panic goes on when all have looked.
    pub(crate) fn settle_probes(&self, probed: &[ProbedPart]) {
        let mut panicked = None;
        self.settle_probes_at(probed, &mut panicked);
        if let Some(panic) = panicked {
            rethrow(panic);
        }
    }

    pub(super) fn settle_probes_at(&self, probed: &[ProbedPart], panicked: &mut Panicked) {
        let core = &self.core;
        let Some(table) = core.probes.table.get() else {
            return;
        };
        for (file, part) in probed {
            for (probe, addr) in table.within(file.object(), *part, core.pages) {
                let space = Arc::clone(core);
                probe.settle(Place { space, addr }, panicked);
            }
        }
    }
}
