//! The probes of a system, by place in their files.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use vma_rcu::sync::Mutex;
use vma_rcu::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use vma_rcu::sync::planted;
use vma_rcu::wait::{GaveUp, Wait};

use super::inside::Inside;
use super::registered::{Panicked, Place, Probed, Refused, Registered};
use super::{Probe, ProbeError};
use crate::addr::Pages;
use crate::file::{FileKind, FileObject, Mapper, Part, SpaceId};
use crate::space::rethrow;

/// In order of files and of bytes in them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) file: usize,
    pub(super) offset: u64,
    pub(super) number: u64,
}

type Probes<S> = BTreeMap<Key, Arc<Registered<S>>>;

/// See the [module](self).
pub(crate) struct Table<S: Probed> {
    /// A leaf. Calls that look for probes allocate nothing under it, registrations do.
    probes: Mutex<Probes<S>>,
    /// Numbers given out: relaxed.
    next: AtomicU64,
    /// Sizes of pages of spaces that are or were in the system, a bit each: by which pages their mappings are found in a file's index. Set
    /// before a space is linked to the system, and looked at behind the fence of a registration: as [`FileObject::has_probes`].
    page_sizes: AtomicU32,
}

impl<S: Probed> Default for Table<S> {
    fn default() -> Self {
        Table {
            probes: Mutex::new(BTreeMap::new()),
            next: AtomicU64::new(0),
            page_sizes: AtomicU32::new(0),
        }
    }
}

/// Between a store that the other side looks at and the look at the other side's: a registration's is the file's mark, a call's what is mapped (or
/// that a space is in the system, or has ended). Of the two one sees the other. Model: `a_probe_is_in_what_is_mapped_meanwhile`.
pub(crate) fn fence_of_probes() {
    if !planted("no_probe_fence") {
        fence(Ordering::SeqCst);
    }
}

impl<S: Probed> Table<S> {
    /// Spaces with pages of this size may be in the system from now on.
    pub(crate) fn note_page_size(&self, pages: Pages) {
        let bit = pages.bytes(1).trailing_zeros();
        self.page_sizes.fetch_or(1 << bit, Ordering::Relaxed);
    }

    /// The probes in a part of a file, and the addresses of their bytes.
    pub(crate) fn within(
        &self,
        file: &FileObject,
        part: Part,
        pages: Pages,
    ) -> Vec<(Arc<Registered<S>>, u64)> {
        let size = pages.bytes(1);
        let first = part.first.saturating_mul(size);
        let key = |offset| Key {
            file: std::ptr::from_ref(file).addr(),
            offset,
            number: 0,
        };
        let range = key(first)..key(part.end.saturating_mul(size));
        let mut found = Vec::new();
        loop {
            let probes = self.probes.lock();
            let within = probes.range(range.clone());
            let count = within.clone().count();
            if count <= found.capacity() {
                let at = |key: &Key| part.addr + (key.offset - first);
                found.extend(within.map(|(key, probe)| (Arc::clone(probe), at(key))));
                return found;
            }
            drop(probes);
            found.reserve(count);
        }
    }

    pub(super) fn remove(&self, key: &Key) {
        let removed = self.probes.lock().remove(key);
        debug_assert!(removed.is_some(), "it was registered");
    }

    /// Registers a probe, and has it installed wherever its byte is mapped. `quiesce` keeps dups out until its result is dropped.
    ///
    /// ```text
    /// dups are kept out             those before are complete, those after look at the mark
    ///   enter it; mark the file     calls settle it from here on
    ///   fence
    ///   copy the file's index       its lock is held for some entries at a time
    /// dups go on
    /// for each: settle              with nothing else held
    /// ```
    pub(super) fn register<G>(
        self: &Arc<Self>,
        (file, offset): (&Arc<FileObject>, u64),
        probe: Arc<dyn Probe<S::Backend>>,
        wait: Wait<'_>,
        quiesce: impl FnOnce() -> Result<G, GaveUp>,
    ) -> Result<Arc<Registered<S>>, ProbeError> {
        if Inside::is_inside() {
            return Err(ProbeError::InCallback);
        }
        check(file, offset)?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let place = (Arc::clone(file), offset, number);
        let registered = Arc::new(Registered::new(Arc::clone(self), place, probe));
        let mut quiesced = Some(quiesce()?);
        if planted("early_dups") {
            quiesced = None;
        }
        let entry = (registered.key(), Arc::clone(&registered));
        self.probes.lock().insert(entry.0, entry.1);
        file.count_probe(true);
        fence_of_probes();
        let found = self.find(file, offset);
        drop(quiesced);
        let mut panicked = None;
        let installed = self.install(&registered, found, wait, &mut panicked);
        if let Err(error) = installed {
            registered.close(&mut panicked);
            if let Some(panic) = panicked {
                rethrow(panic);
            }
            return Err(error);
        }
        Ok(registered)
    }

    /// Where a byte of a file may be mapped: in spaces of other systems as well, and perhaps no longer, or not yet. Where the index counts
    /// pages of another size it's nowhere, or there.
    fn find(&self, file: &FileObject, offset: u64) -> Vec<(Arc<dyn Mapper>, u64)> {
        let mut found = Vec::new();
        let sizes = self.page_sizes.load(Ordering::Relaxed);
        let known = (0..u32::BITS).filter(|bit| sizes >> bit & 1 == 1);
        for size in known.map(|bit| 1_u64 << bit) {
            let page = offset / size;
            file.for_each_mapper(&(page..page + 1), |mapper, part| {
                let first = (page - part.first).wrapping_mul(size);
                let addr = part.addr.wrapping_add(first).wrapping_add(offset % size);
                // Spaces may go with this, so that nothing is left out here.
                found.push((mapper, addr));
            });
        }
        found
    }

    fn install(
        self: &Arc<Self>,
        registered: &Registered<S>,
        found: Vec<(Arc<dyn Mapper>, u64)>,
        wait: Wait<'_>,
        panicked: &mut Panicked,
    ) -> Result<(), ProbeError> {
        for (mapper, addr) in found {
            // One of another kind is in another system.
            let any: Arc<dyn Any + Send + Sync> = mapper;
            let Ok(space) = any.downcast::<S>() else {
                continue;
            };
            if !space.table().is_some_and(|table| Arc::ptr_eq(table, self)) {
                continue;
            }
            wait.check()?;
            let id = SpaceId::of(&space);
            if let Err(refused) = registered.settle_now(Place { space, addr }, panicked) {
                let errno = match refused {
                    Refused::Failed(errno) => errno,
                    // The panic goes on.
                    Refused::Panicked => crate::error::Errno::EFAULT,
                };
                return Err(ProbeError::Refused {
                    space: id,
                    addr,
                    errno,
                });
            }
        }
        Ok(())
    }
}

/// Source: the head of `uprobe_register()`.
fn check(file: &FileObject, offset: u64) -> Result<(), ProbeError> {
    match file.kind() {
        FileKind::Regular | FileKind::Shmem => {}
        kind => return Err(ProbeError::Unsupported(kind)),
    }
    let len = file.len();
    if offset > len {
        return Err(ProbeError::BeyondEnd { offset, len });
    }
    Ok(())
}
