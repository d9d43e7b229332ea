//! The address-space half of fork(2): layout, identities and charges.

use std::ops::Range;
use std::sync::Arc;

use vma_rcu::tree::{Entry, Record as _};

use super::draft::HookEvent;
use super::maps::Marks;
use super::monitor::{hearing, unmonitored, with_monitor};
use super::probes::{self, ProbedPart};
use super::{AddressSpace, Inner, WriteGuard, files, notify};
use crate::accounting::{Totals, check_commit};
use crate::addr::Pages;
use crate::anon::{AnonId, AnonIds};
use crate::backend::{Backend, Inheritance, Inherited};
use crate::error::{Errno, LimitError, PublishError};
use crate::events::{Context, InvalidationReason, Monitor, MonitorEvent, MonitorFeatures};
use crate::file::{FileObject, OpenFile};
use crate::flags::{MdweFlags, VmaFlags};
use crate::limits::SpaceConfig;
use crate::vma::{Placed, Vma};

/// Why a space couldn't be duplicated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DupError {
    /// The overcommit policy refuses the child's charges.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// No memory for records.
    #[error(transparent)]
    Publish(#[from] PublishError),
}

impl DupError {
    /// `ENOMEM`.
    pub const fn errno(self) -> Errno {
        match self {
            DupError::Publish(error) => error.errno(),
            DupError::Limit(_) => Errno::ENOMEM,
        }
    }
}

type Entries = Vec<(Range<u64>, Vma)>;

/// What the copy of a VMA is like.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Copying {
    /// As fork does it.
    Fork,
    /// The same in everything.
    Exact,
}

/// The child's record. Source: `dup_mmap()`, `anon_vma_fork()`.
fn child_of(vma: &Vma, ids: &mut AnonIds, heirs: &mut Heirs) -> Vma {
    let flags = vma.flags() - VmaFlags::LOCK_BITS;
    let file = vma.file().map(OpenFile::for_child);
    let anon = if flags.contains(VmaFlags::WIPEONFORK) {
        AnonId::NONE
    } else {
        ids.forked(vma.anon())
    };
    let child = vma
        .clone()
        .with_flags(flags)
        .with_anon(anon)
        .with_file(file);
    heirs.replace_monitor(child)
}

/// Monitors of the parent's that follow it to the child, with the child's. Source: `dup_userfaultfd()`.
#[derive(Default)]
struct Heirs(Vec<(Arc<Context>, Monitor, Arc<Context>)>);

impl Heirs {
    fn replace_monitor(&mut self, vma: Vma) -> Vma {
        let Some(monitor) = hearing(&vma, MonitorFeatures::EVENT_FORK) else {
            return unmonitored(vma);
        };
        let known = self
            .0
            .iter()
            .find(|(parent, ..)| Arc::ptr_eq(parent, monitor));
        if let Some((.., child)) = known {
            return with_monitor(&vma, child);
        }
        let (handle, child) = Monitor::for_child(monitor);
        let heir = with_monitor(&vma, &child);
        self.0.push((Arc::clone(monitor), handle, child));
        heir
    }
}

/// What a child inherits of a mapping, beside the mapping.
fn inherited(vma: &Vma) -> Inheritance {
    let flags = vma.flags();
    let has_own = !vma.anon().is_none() || flags.contains(VmaFlags::MAYBE_GUARD);
    if flags.intersects(VmaFlags::DONTCOPY | VmaFlags::WIPEONFORK) {
        Inheritance::Nothing
    } else if vma.file().is_none() && !flags.intersects(VmaFlags::SHARED | VmaFlags::SPECIAL) {
        Inheritance::Everything
    } else if has_own || flags.contains(VmaFlags::PFNMAP) {
        Inheritance::Private
    } else {
        Inheritance::Nothing
    }
}

/// What a copy is made of.
struct Copied {
    pages: Pages,
    entries: Entries,
    totals: Totals,
    /// Starts of mappings that keep a gap below them.
    guarded: Vec<u64>,
    followed: Followed,
    maps_files: bool,
    heirs: Heirs,
    /// What is inherited of all of the parent's mappings, in order; neighbours that are inherited alike are one, and what is free
    /// between them.
    inherited: Vec<Inherited>,
}

impl Copied {
    fn inherit(&mut self, entry: &Entry<'_, Vma>) -> Result<(), PublishError> {
        let how = inherited(entry.value);
        match self.inherited.last_mut() {
            Some(last) if last.how == how => last.end = entry.end,
            _ => {
                let room = self.inherited.try_reserve(1);
                room.map_err(|_| PublishError::NoMemory)?;
                self.inherited.push(Inherited {
                    start: entry.start,
                    end: entry.end,
                    how,
                });
            }
        }
        Ok(())
    }

    fn add(&mut self, entry: &Entry<'_, Vma>, pages: u64, copy: Vma) {
        self.totals.add(copy.flags(), pages);
        if copy.start_gap() > 0 {
            self.guarded.push(entry.start);
        }
        if copy.file().is_some() || copy.extras().is_some() {
            let placed = Placed {
                start: entry.start,
                end: entry.end,
                vma: &copy,
                pages: self.pages,
            };
            self.followed.note(placed);
            self.maps_files |= copy.file().is_some();
        }
        self.entries.push((entry.start..entry.end, copy));
    }
}

/// All of it but pages, in one walk.
fn copy_layout<B: Backend>(
    guard: &WriteGuard<'_, B>,
    config: &SpaceConfig,
    ids: &mut AnonIds,
    copying: Copying,
) -> Result<Copied, DupError> {
    let inner = guard.inner();
    let view = guard.space.core.tree.locked(&inner.writer);
    let mut copied = Copied {
        pages: config.pages(),
        entries: Vec::with_capacity(view.len()),
        totals: Totals::default(),
        guarded: Vec::new(),
        followed: Followed::default(),
        maps_files: false,
        inherited: Vec::new(),
        heirs: Heirs::default(),
    };
    for entry in view.iter(0) {
        let pages = config.pages().count(entry.end - entry.start);
        let copy = match copying {
            Copying::Exact => {
                let file = entry.value.file().map(OpenFile::for_child);
                entry.value.clone().with_file(file)
            }
            Copying::Fork => {
                if B::ACTIVE {
                    copied.inherit(&entry)?;
                }
                let flags = entry.value.flags();
                if flags.contains(VmaFlags::DONTCOPY) {
                    continue;
                }
                if flags.contains(VmaFlags::ACCOUNT) {
                    check_commit(&copied.totals, config, pages)?;
                }
                child_of(entry.value, ids, &mut copied.heirs)
            }
        };
        copied.add(&entry, pages, copy);
    }
    if copying == Copying::Exact {
        copied.totals.locked_surplus = inner.totals.locked_surplus;
    }
    Ok(copied)
}

/// Owners and files that have to hear of the copies, once they exist.
#[derive(Default)]
struct Followed {
    hooks: Vec<HookEvent>,
    writable: Vec<Arc<FileObject>>,
    huge: Vec<Arc<FileObject>>,
    /// Where probes have to look.
    probed: Vec<ProbedPart>,
}

impl Followed {
    #[cold]
    fn note(&mut self, placed: Placed<'_>) {
        let vma = placed.vma;
        self.probed.extend(probes::probed(placed));
        if let Some(file) = vma.file() {
            if vma.is_shared_maywrite() {
                self.writable.push(file.object().clone());
            }
            if file.object().huge().is_some() {
                self.huge.push(file.object().clone());
            }
        }
        if let Some(hooks) = vma.hooks() {
            self.hooks.push(HookEvent {
                hooks: hooks.clone(),
                range: placed.range(),
                opened: true,
            });
        }
    }
}

impl<B: Backend> WriteGuard<'_, B> {
    fn copy(
        &mut self,
        copying: Copying,
        is_in_system: bool,
        backend: impl FnOnce() -> Result<B, PublishError>,
    ) -> Result<(AddressSpace<B>, Vec<ProbedPart>), DupError> {
        let config = self.space.config.load_full();
        let mut ids = self.space.identities.lock().clone();
        let copied = copy_layout(self, &config, &mut ids, copying)?;
        let mut child = AddressSpace::assemble(
            SpaceConfig::clone(&config),
            self.space.core.tree.domain(),
            backend()?,
            ids,
        );
        if is_in_system {
            child.core.probes.inherit(&self.space.core.probes);
        }
        let parent = self.inner();
        let inner = child.inner.get_mut();
        // A child that fails half-way goes as it came.
        (inner.is_told, inner.is_linked) = (false, false);
        inner.guarded = copied.guarded;
        let built = child.core.tree.build(&mut inner.writer, copied.entries);
        inherit(inner, parent, copying);
        child.landmarks.follow(Marks::of(inner));
        inner.totals = copied.totals;
        built.map_err(|_| PublishError::NoMemory)?;
        if copied.maps_files {
            files::link_all(&child.core, child.core.tree.locked(&inner.writer))?;
        }
        child.inner.get_mut().is_linked = true;
        self.copy_pages(&mut child, &copied.inherited)?;
        child.inner.get_mut().is_told = true;
        for file in copied.followed.writable {
            file.count_writable(1);
        }
        for file in copied.followed.huge {
            file.count_huge_mapping(true);
        }
        for (parent, heir, context) in copied.heirs.0 {
            context.belongs_to(child.id(), &child.core.attention);
            child.core.attention.expect();
            let event = MonitorEvent::Fork(heir);
            self.after.tell_monitors(vec![(parent, event)]);
        }
        self.after.tell(copied.followed.hooks);
        Ok((child, copied.followed.probed))
    }

    /// The pages of a child whose layout is there.
    fn copy_pages(
        &self,
        child: &mut AddressSpace<B>,
        ranges: &[Inherited],
    ) -> Result<(), PublishError> {
        let core = &self.space.core;
        core.backend.dup_pages(&child.core.backend, ranges)?;
        let view = child.core.tree.locked(&child.inner.get_mut().writer);
        let private = |range: &&Inherited| range.how == Inheritance::Private;
        for range in ranges.iter().filter(private) {
            child.core.recheck_files(view, range.start, range.end);
        }
        Ok(())
    }

    /// As [`AddressSpace::dup`].
    ///
    /// # Errors
    /// As there.
    pub fn dup(&mut self) -> Result<AddressSpace<B>, DupError> {
        Ok(self.fork(false)?.0)
    }

    /// A child that is in the system of its parent, and where probes have to look in it.
    pub(crate) fn dup_into_system(
        &mut self,
    ) -> Result<(AddressSpace<B>, Vec<ProbedPart>), DupError> {
        self.fork(true)
    }

    fn fork(&mut self, is_in_system: bool) -> Result<(AddressSpace<B>, Vec<ProbedPart>), DupError> {
        let space = self.space;
        if self.notifies {
            self.notify(notify::EVERYTHING, InvalidationReason::ProtectPage);
        }
        // What was taken out may be what copies need.
        self.after.finish(space);
        self.copy(Copying::Fork, is_in_system, || space.core.backend.dup())
    }

    /// As [`AddressSpace::checkpoint`].
    ///
    /// # Errors
    /// As there.
    pub fn checkpoint(&mut self) -> Result<AddressSpace<B>, DupError>
    where
        B: Clone,
    {
        let space = self.space;
        let copy = || Ok(space.core.backend.clone());
        Ok(self.copy(Copying::Exact, false, copy)?.0)
    }
}

/// What isn't a VMA.
fn inherit(child: &mut Inner, parent: &Inner, copying: Copying) {
    child.start_brk = parent.start_brk;
    child.brk = parent.brk;
    child.data_segment = parent.data_segment;
    child.start_stack = parent.start_stack;
    match copying {
        Copying::Exact => {
            child.stats = parent.stats;
            child.default_flags = parent.default_flags;
            child.mdwe = parent.mdwe;
        }
        Copying::Fork if parent.mdwe.contains(MdweFlags::NO_INHERIT) => {}
        Copying::Fork => child.mdwe = parent.mdwe,
    }
}

impl<B: Backend> AddressSpace<B> {
    /// The child of a fork(2): the layout of one instant, without what is marked `DONTFORK`, unlocked, with
    /// identities of its own. Limits on mappings and address space aren't applied.
    ///
    /// The exclusive side of the parent is held for the time of the copy.
    ///
    /// # Errors
    /// `ENOMEM`: the overcommit policy, or memory for records.
    ///
    /// Source: `dup_mmap()` in mm/mmap.c.
    pub fn dup(&self) -> Result<AddressSpace<B>, DupError> {
        let mut guard = self.write_to(notify::everything, InvalidationReason::ProtectPage);
        let child = guard.dup();
        // By itself: what is returned is forgotten when a callback panics at the guard's end.
        drop(guard);
        child
    }

    /// A copy that is the same in everything, identities, locks and counters included: to try a call and go back.
    ///
    /// # Errors
    /// `ENOMEM`: memory for records.
    pub fn checkpoint(&self) -> Result<AddressSpace<B>, DupError>
    where
        B: Clone,
    {
        let mut guard = self.write();
        let copy = guard.checkpoint();
        drop(guard);
        copy
    }
}
