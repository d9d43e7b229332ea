//! mremap(2).
//!
//! | old and new length | flags | what happens |
//! |---|---|---|
//! | equal | none, `MAYMOVE` | nothing; the range isn't even looked at beyond its first page |
//! | smaller | none, `MAYMOVE` | the tail is unmapped, whatever lies in it |
//! | larger | none | grows in place, or `ENOMEM` |
//! | larger | `MAYMOVE` | grows in place, else moves |
//! | equal | `FIXED` | every mapping in the range moves, holes keep their distance |
//! | other | `FIXED` | one mapping moves, its tail is unmapped or grows |
//! | equal | `DONTUNMAP` | pages move, the mapping stays behind empty |
//! | 0, any | `MAYMOVE` | a shared mapping is mapped once more |

mod error;

pub use self::error::RemapError;
use super::draft::{Draft, Piece};
use super::map::place_error;
use super::monitor::forget;
use super::placement::{PlaceRequest, check_fixed, place};
use super::unmap::{UnmapError, unmap_range};
use super::{AddressSpace, WriteGuard, notify};
use crate::accounting::{check_commit, check_expand, check_lock, map_count_error};
use crate::addr::VmRange;
use crate::anon::AnonId;
use crate::backend::{Backend, PageChange};
use crate::error::LimitError;
use crate::events::{InvalidationReason, MonitorEvent, MonitorFeatures};
use crate::file::FileKind;
use crate::flags::{MapFlags, RemapFlags, VmaFlags};
use crate::limits::SpaceConfig;
use crate::merge::{Kind, Merge};
use crate::vma::Placed;

/// Arguments of mremap(2), as the system call takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemapRequest {
    /// Present address, page-aligned.
    pub addr: u64,
    /// Present length in bytes, rounded up.
    pub old_len: u64,
    /// New length in bytes, rounded up.
    pub new_len: u64,
    /// Flags.
    pub flags: RemapFlags,
    /// Where to, with `FIXED`; a wish, with `DONTUNMAP` alone.
    pub new_addr: u64,
}

/// One move or resize in hand; lengths are whole pages.
#[derive(Clone, Copy, Debug)]
struct Remap {
    addr: u64,
    old_len: u64,
    new_len: u64,
    new_addr: u64,
    fixed: bool,
    may_move: bool,
    keep_source: bool,
}

impl Remap {
    /// The destination is given, not searched.
    fn names_destination(&self) -> bool {
        self.fixed || self.keep_source
    }

    fn growth(&self) -> u64 {
        self.new_len.saturating_sub(self.old_len)
    }
}

/// What came of it.
#[derive(Clone, Copy, Debug)]
struct Done {
    addr: u64,
    /// Part that was added to a locked mapping.
    populate: Option<(u64, u64)>,
}

/// Free slots that a move wants below the limit on mappings.
const MOVE_SLOTS: u64 = 3;

/// Checks of the arguments alone. Source: `check_mremap_params()`.
fn parse(
    config: &SpaceConfig,
    map_count: u64,
    request: &RemapRequest,
) -> Result<Remap, RemapError> {
    let pages = config.pages();
    let flags = request.flags;
    let known = RemapFlags::MAYMOVE | RemapFlags::FIXED | RemapFlags::DONTUNMAP;
    let remap = Remap {
        addr: request.addr,
        old_len: pages.ceil_wrapping(request.old_len),
        new_len: pages.ceil_wrapping(request.new_len),
        new_addr: request.new_addr,
        fixed: flags.contains(RemapFlags::FIXED),
        may_move: flags.contains(RemapFlags::MAYMOVE),
        keep_source: flags.contains(RemapFlags::DONTUNMAP),
    };
    if !known.contains(flags) {
        return Err(RemapError::BadFlags(flags.bits()));
    }
    if !pages.is_aligned(remap.addr) {
        return Err(RemapError::Unaligned(remap.addr));
    }
    if remap.new_len == 0 || remap.new_len > config.task_size {
        return Err(RemapError::BadLength(request.new_len));
    }
    if !remap.names_destination() {
        return Ok(remap);
    }
    if remap.new_addr > config.task_size - remap.new_len {
        return Err(RemapError::BeyondLimit {
            addr: remap.new_addr,
            len: remap.new_len,
        });
    }
    if !pages.is_aligned(remap.new_addr) {
        return Err(RemapError::Unaligned(remap.new_addr));
    }
    if !remap.may_move || (remap.keep_source && remap.old_len != remap.new_len) {
        return Err(RemapError::BadFlags(flags.bits()));
    }
    let old_end = remap.addr.wrapping_add(remap.old_len);
    let new_end = remap.new_addr + remap.new_len;
    if old_end > remap.new_addr && new_end > remap.addr {
        return Err(RemapError::Overlap {
            source_addr: remap.addr,
            addr: remap.new_addr,
        });
    }
    // Unmapping the destination may add two mappings to what a move itself wants.
    if map_count + 2 >= config.max_map_count.saturating_sub(MOVE_SLOTS) {
        return Err(LimitError::MapCount {
            count: map_count,
            max: config.max_map_count,
        }
        .into());
    }
    Ok(remap)
}

/// Checks of the source; returns the request in pages of the mapping's size. Source: `check_prep_vma()`.
fn check_source(draft: &Draft<'_>, remap: &Remap) -> Result<Remap, RemapError> {
    let vma = draft
        .find(remap.addr)
        .ok_or(RemapError::Unmapped(remap.addr))?;
    let flags = vma.flags();
    let range = vma.range();
    if flags.contains(VmaFlags::SEALED) {
        return Err(RemapError::Sealed(range));
    }
    let remap = match vma.vma.huge_page_size() {
        None => *remap,
        Some(size) => align_huge(remap, size).ok_or(RemapError::HugePages(range))?,
    };
    let fixed_size = flags.intersects(VmaFlags::DONTEXPAND | VmaFlags::PFNMAP);
    if remap.old_len == 0 && !flags.intersects(VmaFlags::SHARED | VmaFlags::MAYSHARE) {
        return Err(RemapError::NotShared(range));
    }
    if remap.keep_source && fixed_size {
        return Err(RemapError::NotShared(range));
    }
    if remap.new_len <= remap.old_len && !remap.names_destination() {
        // What lies behind the first page isn't looked at.
        return Ok(remap);
    }
    if remap.old_len.min(remap.new_len) > range.end - remap.addr {
        return Err(RemapError::Crosses(range));
    }
    if remap.new_len <= remap.old_len {
        return Ok(remap);
    }
    let (totals, config) = (draft.totals(), draft.config);
    let pages = draft.pages.count(remap.new_len);
    if vma.pgoff_at(remap.addr).checked_add(pages).is_none() {
        return Err(RemapError::Offset(range));
    }
    if fixed_size {
        return Err(RemapError::FixedSize(range));
    }
    check_lock(totals, config, flags, remap.growth()).map_err(RemapError::LockLimit)?;
    check_expand(totals, config, flags, draft.pages.count(remap.growth()))?;
    Ok(remap)
}

/// Lengths in whole huge pages; `None`: an address between them, even one that isn't used, or a longer mapping. Source:
/// `align_hugetlb()`.
fn align_huge(remap: &Remap, size: u64) -> Option<Remap> {
    let mask = size - 1;
    let round = |len: u64| len.wrapping_add(mask) & !mask;
    let (old_len, new_len) = (round(remap.old_len), round(remap.new_len));
    let fits = (remap.addr | remap.new_addr) & mask == 0 && new_len <= old_len;
    fits.then_some(Remap {
        old_len,
        new_len,
        ..*remap
    })
}

/// Without a given destination. Source: `mremap_at()`.
fn remap_in_place(draft: &mut Draft<'_>, mut remap: Remap) -> Result<Done, RemapError> {
    if remap.new_len == remap.old_len {
        return Ok(Done {
            addr: remap.addr,
            populate: None,
        });
    }
    if remap.new_len < remap.old_len {
        shrink(draft, &remap)?;
        return Ok(Done {
            addr: remap.addr,
            populate: None,
        });
    }
    if can_grow_in_place(draft, &remap) {
        return grow_in_place(draft, &remap);
    }
    let vma = draft
        .find(remap.addr)
        .ok_or(RemapError::Unmapped(remap.addr))?;
    if !remap.may_move {
        return Err(RemapError::NoRoom {
            vma: vma.range(),
            wanted: remap.new_len,
        });
    }
    remap.new_addr = destination(draft, vma, &remap)?;
    move_mapping(draft, &remap)
}

fn shrink(draft: &mut Draft<'_>, remap: &Remap) -> Result<(), UnmapError> {
    let start = remap.addr + remap.new_len;
    let len = remap.old_len - remap.new_len;
    let range = super::unmap::parse(draft.config, start, len)?;
    unmap_range(draft, range)
}

fn can_grow_in_place(draft: &Draft<'_>, remap: &Remap) -> bool {
    let Some(vma) = draft.find(remap.addr) else {
        return false;
    };
    let Some(end) = vma.end.checked_add(remap.growth()) else {
        return false;
    };
    vma.end - remap.addr == remap.old_len
        && draft.first_in(vma.end, end).is_none()
        && check_fixed(draft.config, vma.start, end - vma.start).is_ok()
}

/// Source: `expand_vma_in_place()`.
fn grow_in_place(draft: &mut Draft<'_>, remap: &Remap) -> Result<Done, RemapError> {
    let vma = draft
        .find(remap.addr)
        .ok_or(RemapError::Unmapped(remap.addr))?;
    let (range, flags) = (vma.range(), vma.flags());
    if flags.contains(VmaFlags::ACCOUNT) {
        check_commit(
            draft.totals(),
            draft.config,
            draft.pages.count(remap.growth()),
        )?;
    }
    if flags.intersects(VmaFlags::SPECIAL) {
        return Err(RemapError::NoRoom {
            vma: range,
            wanted: remap.new_len,
        });
    }
    let end = range.end + remap.growth();
    let tail = vma.vma.clone().with_pgoff(vma.pgoff_at(range.end));
    let (merge, _) = draft.insert_merged(range.end, end, tail, AnonId::NONE, Kind::New);
    debug_assert!(
        matches!(merge, Merge::Left | Merge::Both),
        "a mapping goes with its own tail"
    );
    let populate = flags.contains(VmaFlags::LOCKED).then_some((range.end, end));
    Ok(Done {
        addr: remap.addr,
        populate,
    })
}

/// With a given destination. Source: `mremap_to()`.
fn remap_to(draft: &mut Draft<'_>, mut remap: Remap) -> Result<Done, RemapError> {
    if remap.fixed {
        let range = VmRange::new(remap.new_addr, remap.new_addr + remap.new_len);
        unmap_range(draft, range)?;
    }
    let grown = remap;
    if remap.new_len < remap.old_len {
        shrink(draft, &remap)?;
        remap.old_len = remap.new_len;
    }
    let vma = draft
        .find(remap.addr)
        .ok_or(RemapError::Unmapped(remap.addr))?;
    if remap.keep_source {
        let pages = draft.pages.count(remap.old_len);
        check_expand(draft.totals(), draft.config, vma.flags(), pages)?;
    }
    if remap.fixed {
        check_fixed(draft.config, remap.new_addr, remap.new_len).map_err(|error| {
            RemapError::Place(place_error(
                error,
                remap.new_addr,
                remap.new_len,
                draft.config,
            ))
        })?;
    } else {
        remap.new_addr = destination(draft, vma, &grown)?;
    }
    move_mapping(draft, &remap)
}

/// Searches a place. Source: `vrm_set_new_addr()`.
fn destination(draft: &Draft<'_>, vma: Placed<'_>, remap: &Remap) -> Result<u64, RemapError> {
    let config = draft.config;
    let shared = vma.flags().contains(VmaFlags::MAYSHARE);
    let hint = if remap.keep_source { remap.new_addr } else { 0 };
    let huge_aligned = config.huge_pages
        && match vma.file() {
            Some(file) => file.object().is_huge_aligned(),
            None => !shared && hint == 0 && remap.new_len & (config.huge_page_size - 1) == 0,
        };
    let offset = if vma.file().is_some() {
        draft.pages.bytes(vma.pgoff_at(remap.addr))
    } else {
        0
    };
    let request = PlaceRequest {
        hint,
        len: remap.new_len,
        align: 0,
        flags: if shared {
            MapFlags::SHARED
        } else {
            MapFlags::empty()
        },
        vma_flags: VmaFlags::empty(),
        huge_aligned,
        offset,
    };
    place(&draft.ground(), &request)
        .map_err(|error| RemapError::Place(place_error(error, hint, remap.new_len, config)))
}

/// Copies the mapping to its destination and takes it away from its source. Source: `move_vma()`.
fn move_mapping(draft: &mut Draft<'_>, remap: &Remap) -> Result<Done, RemapError> {
    let vma = draft
        .find(remap.addr)
        .ok_or(RemapError::Unmapped(remap.addr))?;
    let (range, flags) = (vma.range(), vma.flags());
    let source_end = remap.addr + remap.old_len;
    if draft.totals().map_count >= draft.config.max_map_count.saturating_sub(MOVE_SLOTS) {
        return Err(map_count_error(draft.totals(), draft.config).into());
    }
    if let Some(hooks) = vma.vma.hooks() {
        let refused = [remap.addr, source_end]
            .into_iter()
            .find(|at| *at != range.start && *at != range.end && !hooks.may_split(range, *at));
        if let Some(at) = refused {
            return Err(RemapError::Refused { vma: range, at });
        }
    }
    if flags.contains(VmaFlags::ACCOUNT) {
        let charged = if remap.keep_source {
            remap.new_len
        } else {
            remap.growth()
        };
        check_commit(draft.totals(), draft.config, draft.pages.count(charged))?;
    }
    let unfaulted = vma.vma.is_anonymous() && vma.vma.anon().is_none();
    let pgoff = if unfaulted {
        draft.pages.count(remap.new_addr)
    } else {
        vma.pgoff_at(remap.addr)
    };
    let chain = vma.vma.anon();
    let copy = vma.vma.clone().with_pgoff(pgoff);
    let new_end = remap.new_addr + remap.new_len;
    let monitor = copy.monitor().cloned();
    let (_, copied) = draft.insert_merged(remap.new_addr, new_end, copy, chain, Kind::New);
    if let Some(monitor) = monitor {
        if monitor.has(MonitorFeatures::EVENT_REMAP) {
            let (from, to, len) = (remap.addr, remap.new_addr, remap.old_len);
            draft.tell(monitor, MonitorEvent::Remap { from, to, len });
        } else {
            forget(draft, copied.start);
        }
    }
    if remap.old_len > 0 {
        draft.note_pages(PageChange::Move {
            from: remap.addr,
            to: remap.new_addr,
            len: remap.old_len,
        });
    }
    if remap.keep_source {
        leave_source(draft, remap.addr, source_end, copied);
    } else if remap.old_len > 0 {
        unmap_range(draft, VmRange::new(remap.addr, source_end))?;
    }
    let grown = flags.contains(VmaFlags::LOCKED) && remap.growth() > 0;
    Ok(Done {
        addr: remap.new_addr,
        populate: grown.then_some((remap.new_addr + remap.old_len, new_end)),
    })
}

/// The source after `DONTUNMAP`: unlocked as a whole, and never written again if all of it went. Source: `dontunmap_complete()`.
fn leave_source(draft: &mut Draft<'_>, start: u64, end: u64, copied: VmRange) {
    let Some(vma) = draft.find(start) else {
        return;
    };
    let range = vma.range();
    let merged_with_copy = copied.contains(start);
    let mut left = vma.vma.clone();
    if left.flags().contains(VmaFlags::LOCKED) {
        // Linux 6.18 takes the flag and leaves the count.
        let pages = vma.page_count();
        left = left.with_flags(vma.flags() - VmaFlags::LOCK_BITS);
        draft.totals_mut().locked_surplus += pages;
    }
    if !merged_with_copy && range == VmRange::new(start, end) {
        left = left.with_anon(AnonId::NONE);
    }
    draft.replace(
        range.start,
        range.end,
        smallvec::smallvec![Piece::new(range.start, range.end, left)],
    );
}

/// Whether a mapping can move together with others.
fn moves_in_company(vma: Placed<'_>) -> bool {
    vma.vma.monitor().is_none()
        && vma.file().is_none_or(|file| {
            let object = file.object();
            // Such files choose places themselves.
            object.kind() != FileKind::DevZero && object.hooks().is_none()
        })
}

/// `FIXED` with equal lengths: all mappings of the range, one by one; an error leaves the earlier ones moved.
/// Source: `remap_move()`.
fn move_all(draft: &mut Draft<'_>, remap: &Remap) -> Result<Done, RemapError> {
    let start = remap.addr;
    let end = start
        .checked_add(remap.old_len)
        .ok_or(RemapError::Unmapped(start))?;
    let mut at = start;
    let mut target = remap.new_addr;
    let mut last_end = None;
    while let Some(vma) = draft.first_in(at, end) {
        let range = vma.range();
        let from = range.start.max(start);
        let len = range.end.min(end) - from;
        if last_end.is_none() && from > start {
            return Err(RemapError::Unmapped(start));
        }
        if !moves_in_company(vma) && (last_end.is_some() || range.end < end) {
            return Err(RemapError::MovesAlone(range));
        }
        let gap = last_end.map_or(0, |last| range.start.saturating_sub(last));
        let one = Remap {
            addr: from,
            old_len: len,
            new_len: len,
            new_addr: target + gap,
            ..*remap
        };
        let one = check_source(draft, &one)?;
        remap_to(draft, one)?;
        target = one.new_addr + one.new_len;
        last_end = Some(range.end);
        at = range.end;
    }
    if last_end.is_none() {
        return Err(RemapError::Unmapped(start));
    }
    Ok(Done {
        addr: remap.new_addr,
        populate: None,
    })
}

/// All of it on a draft. What Linux leaves behind on an error is in the draft.
fn plan(draft: &mut Draft<'_>, remap: &Remap) -> Result<Done, RemapError> {
    if remap.fixed && remap.old_len == remap.new_len {
        return move_all(draft, remap);
    }
    let remap = check_source(draft, remap)?;
    if remap.names_destination() {
        remap_to(draft, remap)
    } else {
        remap_in_place(draft, remap)
    }
}

impl<B: Backend> WriteGuard<'_, B> {
    /// As [`AddressSpace::remap`].
    ///
    /// # Errors
    /// As there.
    pub fn remap(&mut self, request: &RemapRequest) -> Result<u64, RemapError> {
        let config = self.config();
        let remap = parse(config, self.inner().totals.map_count, request)?;
        let mut changes = self.changes();
        let mut draft = self.draft(config, &mut changes);
        let result = plan(&mut draft, &remap);
        self.commit(&mut changes)?;
        let done = result?;
        if let Some((start, end)) = done.populate {
            self.populate(start, end);
        }
        Ok(done.addr)
    }
}

impl<B: Backend> AddressSpace<B> {
    /// Moves or resizes mappings (mremap(2)) and returns the new address.
    ///
    /// # Errors
    /// | errno | when |
    /// |---|---|
    /// | `EINVAL` | unknown flags or combinations; unaligned; new length 0 or too long; destination beyond the address space or overlapping; old length 0 on a private mapping; huge pages: addresses between them (`new_addr` as well, whether it's used or not), and growing |
    /// | `EFAULT` | nothing mapped at `addr`; the range crosses the end of a mapping while growing or moving; the mapping can't grow |
    /// | `EPERM` | source or destination sealed |
    /// | `EAGAIN` | too much locked memory |
    /// | `ENOMEM` | no room; a limit: 6 mappings below the one on mappings with a given destination, 4 for other moves |
    ///
    /// With `FIXED`, an error that only shows once the destination was unmapped leaves it unmapped; of several mappings
    /// the ones before the failing one stay moved.
    ///
    /// Source: `do_mremap()` in mm/mremap.c.
    pub fn remap(&self, request: &RemapRequest) -> Result<u64, RemapError> {
        let ranges = || {
            let unit = self.config.load().huge_page_size;
            let mut ranges = notify::named(request.addr, request.old_len, unit);
            if request.flags.contains(RemapFlags::FIXED) {
                ranges.extend(notify::named(request.new_addr, request.new_len, unit));
            }
            ranges
        };
        self.write_to(ranges, InvalidationReason::Unmap)
            .remap(request)
    }
}
