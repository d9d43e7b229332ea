//! mmap(2).

mod check;
mod error;

use std::sync::Arc;

use self::check::{Parsed, Plan, parse, validate};
pub(super) use self::check::{denied_by_mdwe, place_error};
pub use self::error::MapError;
use super::draft::Draft;
use super::unmap::{Gathered, charge_of, gather};
use super::{AddressSpace, WriteGuard, new_vma, notify};
use crate::accounting::{check_commit, check_expand};
use crate::addr::{Pages, VmRange};
use crate::anon::AnonId;
use crate::backend::Backend;
use crate::events::InvalidationReason;
use crate::file::{AccessMode, FileObject, OpenFile};
use crate::flags::{MapFlags, Prot, VmaFlags};
use crate::huge::HugeFile;
use crate::merge::Kind;

/// Arguments of mmap(2), as the system call takes them.
#[derive(Clone, Debug)]
pub struct MapRequest {
    /// Address: a wish, or with `FIXED` the place.
    pub addr: u64,
    /// Bytes, rounded up to pages.
    pub len: u64,
    /// Protection.
    pub prot: Prot,
    /// Flags.
    pub flags: MapFlags,
    /// What the descriptor stands for; `None` for a bad one. Not looked at with `ANONYMOUS`.
    pub file: Option<Arc<OpenFile>>,
    /// Bytes into the file.
    pub offset: u64,
}

impl MapRequest {
    /// Private anonymous memory wherever there is room.
    pub fn anonymous(len: u64, prot: Prot) -> Self {
        MapRequest {
            addr: 0,
            len,
            prot,
            flags: MapFlags::PRIVATE | MapFlags::ANONYMOUS,
            file: None,
            offset: 0,
        }
    }

    /// A file, wherever there is room; `flags` says how it's shared.
    pub fn file(file: Arc<OpenFile>, offset: u64, len: u64, prot: Prot, flags: MapFlags) -> Self {
        MapRequest {
            addr: 0,
            len,
            prot,
            flags,
            file: Some(file),
            offset,
        }
    }

    /// At this very address, replacing what is there.
    #[must_use]
    pub fn fixed(mut self, addr: u64) -> Self {
        self.addr = addr;
        self.flags |= MapFlags::FIXED;
        self
    }
}

/// Replaces what is in the range by the new mapping. Source: `__mmap_region()`.
///
/// On an error the draft holds what Linux leaves behind: splits at the edges.
#[inline]
fn install(
    backend: &impl Backend,
    draft: &mut Draft<'_>,
    range: VmRange,
    plan: Plan,
) -> Result<(), MapError> {
    // What lies below is asked for merging, later.
    draft.look_around(range.start);
    let occupied = draft.first_in(range.start, range.end).is_some();
    let gathered = if occupied {
        gather(draft, range)?
    } else {
        Gathered::default()
    };
    let pages = draft.pages.count(range.len());
    let config = draft.config;
    check_expand(draft.totals(), config, plan.flags, pages - gathered.pages)?;
    let mut flags = plan.flags;
    let huge = plan.file.as_ref().and_then(|file| file.object().huge());
    if huge.is_none()
        && let Some(charge) = charge_of(flags, pages, gathered)
    {
        if charge > 0 {
            check_commit(draft.totals(), config, charge)?;
        }
        flags |= VmaFlags::ACCOUNT;
    }
    let coming = huge.map_or(0, |huge| coming_back(draft, range, huge));
    if occupied {
        draft.remove(range.start, range.end);
    }
    if let Some(huge) = huge {
        reserve_huge(huge, draft.pages, range, &plan, coming)?;
    }
    if let Some(file) = &plan.file {
        flags |= file.object().added_flags();
    }
    // Locked by default, which such a mapping can't be. Linux takes the bits away after it has looked for
    // something to merge with, so that nothing fitted.
    let unlockable = flags.contains(VmaFlags::LOCKED)
        && flags.intersects(VmaFlags::SPECIAL | VmaFlags::DROPPABLE);
    if unlockable {
        flags -= VmaFlags::LOCK_BITS;
    }
    let file = if plan.new_object {
        Some(OpenFile::new(
            backend
                .shared_memory(FileObject::shared_anonymous(range.len()))
                .build(),
            AccessMode::ReadWrite,
        ))
    } else {
        plan.file
    };
    let vma = new_vma(config, flags, plan.pgoff).with_file(file);
    if unlockable {
        draft.insert(range.start, range.end, vma);
    } else {
        draft.insert_merged(range.start, range.end, vma, AnonId::NONE, Kind::New);
    }
    Ok(())
}

/// Huge pages of the same pool that go back to it with what is mapped in a range.
fn coming_back(draft: &Draft<'_>, range: VmRange, huge: &HugeFile) -> u64 {
    let mut sum = 0;
    let mut at = range.start;
    while let Some(vma) = draft.first_in(at, range.end) {
        let owned = vma.file().and_then(|file| file.owned_huge());
        if let Some(there) = owned.filter(|there| there.is_private() && there.pool() == huge.pool())
            && let Some(pages) = vma.huge_pages()
        {
            sum += there.held_in(pages);
        }
        at = vma.end;
    }
    sum
}

/// What the file behind `MAP_HUGETLB` asks for. Linux has taken away what was in the range by then, and doesn't put it back.
/// Source: `hugetlbfs_file_mmap()`.
#[cold]
fn reserve_huge(
    huge: &HugeFile,
    pages: Pages,
    range: VmRange,
    plan: &Plan,
    coming: u64,
) -> Result<(), MapError> {
    let unit = pages.count(huge.page_size());
    if !plan.pgoff.is_multiple_of(unit) {
        return Err(MapError::UnalignedOffset(pages.bytes(plan.pgoff)));
    }
    let first = plan.pgoff / unit;
    let wanted = first..first + pages.count(range.len()) / unit;
    if plan.flags.contains(VmaFlags::NORESERVE) || huge.reserve(wanted, coming) {
        Ok(())
    } else {
        Err(MapError::NoHugePages)
    }
}

impl<B: Backend> WriteGuard<'_, B> {
    /// As [`AddressSpace::map`].
    ///
    /// # Errors
    /// As there.
    pub fn map(&mut self, request: &MapRequest) -> Result<u64, MapError> {
        if request.flags.contains(MapFlags::HUGETLB) {
            // Pages that earlier calls have taken out may be what is needed.
            self.after.finish(self.space);
        }
        let mut huge = None;
        let parsed = parse(self.config(), request, &mut huge)?;
        self.map_parsed(&parsed)
    }

    fn map_parsed(&mut self, parsed: &Parsed<'_>) -> Result<u64, MapError> {
        let mut changes = self.changes();
        let mut draft = self.draft(self.config(), &mut changes);
        let (addr, plan) = validate(self.inner(), &draft, parsed)?;
        let populate = plan.flags.contains(VmaFlags::LOCKED)
            || parsed.flags & (MapFlags::POPULATE | MapFlags::NONBLOCK) == MapFlags::POPULATE;
        let range = VmRange::new(addr, addr + parsed.len);
        let result = install(&self.space.core.backend, &mut draft, range, plan);
        self.commit(&mut changes)?;
        result?;
        if populate {
            self.populate(range.start, range.end);
        }
        Ok(addr)
    }

    /// Maps part of a file at a fixed place, as `remap_file_pages(2)` does.
    pub(super) fn map_shared_at(
        &mut self,
        range: VmRange,
        file: &Arc<OpenFile>,
        pgoff: u64,
        prot: Prot,
        flags: MapFlags,
    ) -> Result<u64, MapError> {
        if self
            .config()
            .pages()
            .count(range.len())
            .checked_add(pgoff)
            .is_none()
        {
            return Err(MapError::Overflow {
                offset: u64::MAX,
                len: range.len(),
            });
        }
        let parsed = Parsed {
            hint: range.start,
            len: range.len(),
            prot,
            flags,
            no_replace: false,
            file: Some(file),
            pgoff,
        };
        self.map_parsed(&parsed)
    }
}

impl<B: Backend> AddressSpace<B> {
    /// Maps memory (mmap(2)) and returns its address.
    ///
    /// # Errors
    /// In this order; with any of them the mappings that `FIXED` would have replaced stay (a split at an edge of the range
    /// may stay as well). But when huge pages can't be reserved, or their offset isn't aligned, they are gone, as in Linux.
    ///
    /// | errno | when |
    /// |---|---|
    /// | `EINVAL` | unaligned offset; length 0; no valid kind or size of pages; unaligned `FIXED` address; growing down and not private anonymous |
    /// | `EBADF` | no descriptor |
    /// | `EOVERFLOW` | offset plus length beyond the largest file |
    /// | `ENOMEM` | limit of mappings (one more than it may exist), address space, data, overcommit; no room; too few huge pages |
    /// | `EPERM` | below the lowest address; locked memory not allowed; `noexec`; seals |
    /// | `EEXIST` | `FIXED_NOREPLACE` over a mapping |
    /// | `EAGAIN` | too much locked memory |
    /// | `EACCES` | the descriptor's mode; write and execute together |
    /// | `EOPNOTSUPP` | `SHARED_VALIDATE` with an unknown flag |
    /// | `ENODEV` | the file can't be mapped |
    ///
    /// Source: `do_mmap()` in mm/mmap.c, `mmap_region()` in mm/vma.c.
    ///
    /// ```
    /// use vma_core::{AddressSpace, MapRequest, Prot};
    /// let space = AddressSpace::default();
    /// let addr = space.map(&MapRequest::anonymous(8192, Prot::READ | Prot::WRITE))?;
    /// space.unmap(addr, 4096)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn map(&self, request: &MapRequest) -> Result<u64, MapError> {
        let ranges = || {
            let replaces = request.flags.contains(MapFlags::FIXED);
            let unit = if request.flags.contains(MapFlags::HUGETLB) {
                self.config.load().huge_page_size
            } else {
                self.core.pages.size()
            };
            notify::named(request.addr, if replaces { request.len } else { 0 }, unit)
        };
        self.write_to(ranges, InvalidationReason::Unmap)
            .map(request)
    }
}
