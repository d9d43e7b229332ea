//! The files that a space maps: what their reverse indexes are told, and what they ask of the space.

use std::ops::Range;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;
use vma_rcu::sync::atomic::{Ordering, fence};
use vma_rcu::tree::View;

use super::probes::{self, ProbedPart};
use super::{AddressSpace, Core};
use crate::addr::{Pages, VmRange};
use crate::backend::paged::{Frame, PAGE};
use crate::backend::{Backend, FileUnmap};
use crate::error::PublishError;
use crate::events::InvalidationReason;
use crate::file::{FileKind, FileObject, Index, Mapper, OpenFile, Part, SpaceId, Tenancies};
use crate::flags::VmaFlags;
use crate::system::fence_of_probes;
use crate::vma::{Placed, Vma};

/// A part of a file that is mapped, or no longer.
#[derive(Debug)]
struct Edit {
    file: Arc<OpenFile>,
    part: Part,
    comes: bool,
    /// Probes concern it.
    executes: bool,
}

impl Edit {
    fn object(&self) -> *const FileObject {
        Arc::as_ptr(self.file.object())
    }
}

/// What a call changes in the indexes of files.
///
/// What comes is entered before it's published, what goes is removed when its pages are gone, all of a file under one hold of its lock.
#[derive(Debug, Default)]
pub(super) struct FileEdits(SmallVec<[Edit; 2]>);

/// How far back an edit looks for its opposite: calls undo what they have just done.
const NEAR: usize = 4;

impl FileEdits {
    /// Notes a mapping that comes or goes; one that comes back as it was is none of either.
    pub(super) fn note(&mut self, vma: Placed<'_>, comes: bool) {
        let Some((file, part)) = shown(vma) else {
            return;
        };
        let object = Arc::as_ptr(file.object());
        let executes = probes::concern(vma.vma);
        let undone = |edit: &Edit| {
            let same = edit.part == part && edit.object() == object && edit.executes == executes;
            same && edit.comes != comes
        };
        let near = self.0.len().saturating_sub(NEAR);
        match self.0[near..].iter().position(undone) {
            Some(at) => drop(self.0.remove(near + at)),
            None => self.0.push(Edit {
                file: file.clone(),
                part,
                comes,
                executes,
            }),
        }
    }

    /// Whether an index is to know of a mapping.
    pub(super) fn concern(vma: Placed<'_>) -> bool {
        shown(vma).is_some()
    }

    /// Files side by side.
    fn sort(&mut self) {
        let object = Edit::object;
        if !self.0.is_sorted_by_key(object) {
            self.0.sort_by_key(object);
        }
    }

    /// Enters what comes. It's taken back if the result is dropped before it is [kept](Linked::keep). If `hold`, the locks of the
    /// indexes are held until then.
    pub(super) fn link<'e, B: Backend>(
        &'e mut self,
        core: &'e Arc<Core<B>>,
        hold: bool,
    ) -> Result<Linked<'e>, PublishError> {
        self.sort();
        let edits: &'e [Edit] = &self.0;
        let mut linked = Linked {
            held: SmallVec::new(),
            edits: &[],
            tenancies: &core.tenancies,
        };
        for of_file in edits.chunk_by(|a, b| a.object() == b.object()) {
            let parts = of_file
                .iter()
                .filter(|edit| edit.comes)
                .map(|edit| edit.part);
            if parts.clone().next().is_some() {
                let object = of_file[0].file.object();
                let index = object.link(&core.tenancies, &|| core.weak(), parts, hold)?;
                linked.held.extend(index);
            }
            linked.edits = &edits[..linked.edits.len() + of_file.len()];
        }
        Ok(linked)
    }

    /// What of it has probes, or may have had: of what has been published.
    pub(super) fn probed(&self) -> Vec<ProbedPart> {
        if !self.0.iter().any(|edit| edit.executes) {
            return Vec::new();
        }
        fence_of_probes();
        let has_probes = |edit: &&Edit| edit.executes && edit.file.object().has_probes();
        let probed = self.0.iter().filter(has_probes);
        probed.map(|edit| (edit.file.clone(), edit.part)).collect()
    }

    /// Whether something goes.
    pub(super) fn removes(&self) -> bool {
        self.0.iter().any(|edit| !edit.comes)
    }

    /// Removes what goes. Files are let go of when this is dropped.
    pub(super) fn unlink<B: Backend>(&mut self, core: &Arc<Core<B>>) {
        self.sort();
        unlink(&core.tenancies, &self.0, false);
    }
}

fn unlink(tenancies: &Tenancies, edits: &[Edit], comes: bool) {
    for edits in edits.chunk_by(|a, b| a.object() == b.object()) {
        let of_kind = edits.iter().filter(|edit| edit.comes == comes);
        let mut parts = of_kind.map(|edit| edit.part).peekable();
        if parts.peek().is_some() {
            edits[0].file.object().unlink(tenancies, parts);
        }
    }
}

/// What was entered for a call that isn't published yet.
pub(super) struct Linked<'e> {
    /// First: let go of before entries are taken back.
    held: SmallVec<[Index<'e>; 1]>,
    edits: &'e [Edit],
    tenancies: &'e Tenancies,
}

impl Linked<'_> {
    /// It has been published.
    pub(super) fn keep(mut self) {
        self.edits = &[];
    }
}

impl Drop for Linked<'_> {
    fn drop(&mut self) {
        self.held.clear();
        unlink(self.tenancies, self.edits, true);
    }
}

/// What a mapping shows of its file.
pub(super) fn shown(vma: Placed<'_>) -> Option<(&Arc<OpenFile>, Part)> {
    let file = vma.file().filter(|_| !vma.vma.is_anonymous())?;
    let first = vma.vma.pgoff();
    let part = Part {
        first,
        end: first.saturating_add(vma.page_count()),
        addr: vma.start,
    };
    Some((file, part))
}

/// All parts of files that a space maps, files side by side.
fn all(view: View<'_, Vma>, pages: Pages) -> Vec<(&FileObject, Part)> {
    let mut parts: Vec<(&FileObject, Part)> = view
        .iter(0)
        .filter_map(|entry| {
            let placed = Placed {
                start: entry.start,
                end: entry.end,
                vma: entry.value,
                pages,
            };
            shown(placed).map(|(file, part)| (&**file.object(), part))
        })
        .collect();
    parts.sort_by_key(|(file, _)| std::ptr::from_ref(*file));
    parts
}

/// Enters all mappings of a copy, which is complete but for its pages. On an error none of them is there.
pub(super) fn link_all<B: Backend>(
    core: &Arc<Core<B>>,
    view: View<'_, Vma>,
) -> Result<(), PublishError> {
    let parts = all(view, core.pages);
    let mut done = 0;
    for of_file in parts.chunk_by(|a, b| std::ptr::eq(a.0, b.0)) {
        let of_it = of_file.iter().map(|(_, part)| *part);
        let linked = of_file[0]
            .0
            .link(&core.tenancies, &|| core.weak(), of_it, false);
        if let Err(error) = linked {
            unlink_parts(&core.tenancies, &parts[..done]);
            return Err(error);
        }
        done += of_file.len();
    }
    Ok(())
}

/// Removes all mappings of a space that goes.
pub(super) fn unlink_all<B: Backend>(core: &Arc<Core<B>>, view: View<'_, Vma>) {
    unlink_parts(&core.tenancies, &all(view, core.pages));
}

fn unlink_parts(tenancies: &Tenancies, parts: &[(&FileObject, Part)]) {
    for of_file in parts.chunk_by(|a, b| std::ptr::eq(a.0, b.0)) {
        of_file[0]
            .0
            .unlink(tenancies, of_file.iter().map(|(_, part)| *part));
    }
}

impl<B: Backend> Core<B> {
    fn weak(self: &Arc<Self>) -> Weak<dyn Mapper> {
        Arc::downgrade(self) as _
    }

    /// What was put behind mappings of files in this range while nobody could find it there: what its file has let go of
    /// meanwhile goes. Either a file that lets go of pages now finds the mapping, or this finds that it has.
    pub(super) fn recheck_files(&self, view: View<'_, Vma>, start: u64, end: u64) {
        fence(Ordering::SeqCst);
        for entry in view.iter(start).take_while(|entry| entry.start < end) {
            let shown = entry.value.file().filter(|_| !entry.value.is_anonymous());
            let Some(object) = shown.map(|file| file.object()) else {
                continue;
            };
            let (start, end) = (entry.start.max(start), entry.end.min(end));
            self.backend.unmap_removed(start, end);
            if object.is_tracked() {
                self.backend.protect_clean(start, end);
            }
            let beyond = object.len().div_ceil(PAGE as u64)..u64::MAX;
            if object.kind() != FileKind::Device
                && let Some((from, to)) = part_of(entry.start, entry.end, entry.value, &beyond)
                && from.max(start) < to.min(end)
            {
                self.backend.unmap_file(&FileUnmap {
                    file: object,
                    start: from.max(start),
                    end: to.min(end),
                    copies: true,
                    // The space's lock is held.
                    is_shown: &|_| true,
                });
            }
        }
    }
}

impl<B: Backend> Core<B> {
    fn range_of(&self, part: Part) -> VmRange {
        let len = self.pages.bytes(part.end - part.first);
        VmRange::new(part.addr, part.addr + len)
    }

    /// Calls `f` with the place of a part of a file, and with what tells whether one of its pages is still shown there, by a mapping
    /// that `counts`.
    fn with_shown<R>(
        &self,
        file: &FileObject,
        part: Part,
        copies: bool,
        counts: impl Fn(&Vma) -> bool,
        f: impl FnOnce(&FileUnmap<'_>) -> R,
    ) -> R {
        // Pairs with the one in `recheck_files`, and with those of faults.
        fence(Ordering::SeqCst);
        let reader = self.tree.domain().register();
        let guard = reader.pin();
        // What is mapped there may be something else by now, or another record of the same.
        let is_shown = |addr: u64| {
            self.tree.find(addr, &guard).is_some_and(|entry| {
                let page = self.pages.count(addr - entry.start);
                let pgoff = entry.value.pgoff().wrapping_add(page);
                let is_within = (part.first..part.end).contains(&pgoff);
                is_within && shows(entry.value, file) && counts(entry.value)
            })
        };
        f(&FileUnmap {
            file,
            start: self.range_of(part).start,
            end: self.range_of(part).end,
            copies,
            is_shown: &is_shown,
        })
    }
}

impl<B: Backend> Mapper for Core<B> {
    fn unmap_pages(&self, file: &FileObject, part: Part, copies: bool) {
        let range = self.range_of(part);
        self.notifiers.around(range, InvalidationReason::Clear, || {
            self.with_shown(
                file,
                part,
                copies,
                |_| true,
                |unmap| self.backend.unmap_file(unmap),
            );
        });
    }

    fn protect_pages(&self, file: &FileObject, part: Part) -> usize {
        let is_shared = |vma: &Vma| vma.flags().contains(VmaFlags::SHARED);
        let range = self.range_of(part);
        self.notifiers
            .around(range, InvalidationReason::ProtectPage, || {
                self.with_shown(file, part, false, is_shared, |unmap| {
                    self.backend.protect_file(unmap)
                })
            })
    }

    fn rob_heirs(&self, file: &FileObject, part: Part, frame: &Frame) {
        let range = self.range_of(part);
        self.notifiers.around(range, InvalidationReason::Clear, || {
            self.rob(file, part, frame);
        });
    }

    fn settle(&self, protected: usize) {
        self.backend.protected(protected);
    }

    fn pages(&self) -> Pages {
        self.pages
    }
}

impl<B: Backend> Core<B> {
    fn rob(&self, file: &FileObject, part: Part, frame: &Frame) {
        let reader = self.tree.domain().register();
        let guard = reader.pin();
        let (start, pages) = (part.addr, part.first..part.end);
        let end = start + self.pages.bytes(part.end - part.first);
        let within = self.tree.iter(start, &guard);
        for entry in within.take_while(|entry| entry.start < end) {
            if let Some(shown) = entry.value.file()
                && shows(entry.value, file)
                && shown.owned_huge().is_none()
                && let Some((start, end)) = part_of(entry.start, entry.end, entry.value, &pages)
                && self.backend.unmap_huge(start, end, frame)
            {
                shown.set_robbed();
            }
        }
    }
}

/// Whether a mapping shows pages of a file, or copies of them.
pub(super) fn shows(vma: &Vma, file: &FileObject) -> bool {
    let shown = vma.file().filter(|_| !vma.is_anonymous());
    shown.is_some_and(|shown| std::ptr::eq(&raw const **shown.object(), file))
}

/// The part of a mapping that shows some of these pages of its file.
fn part_of(start: u64, end: u64, vma: &Vma, pages: &Range<u64>) -> Option<(u64, u64)> {
    let page = PAGE as u64;
    let low = pages.start.saturating_sub(vma.pgoff());
    let high = pages.end.saturating_sub(vma.pgoff());
    let start = start.checked_add(low.checked_mul(page)?)?;
    let end = match high.checked_mul(page) {
        Some(bytes) => end.min((start - low * page).saturating_add(bytes)),
        None => end,
    };
    (start < end).then_some((start, end))
}

impl<B: Backend> AddressSpace<B> {
    /// Tells this space from others that live: see [`FileObject::mappings`].
    pub fn id(&self) -> SpaceId {
        SpaceId::of(&self.core)
    }
}
