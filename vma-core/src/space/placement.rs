//! Where a mapping goes (Linux `get_unmapped_area`, x86-64).

use vma_rcu::tree::{GapRequest, Record as _, View};

use crate::addr::VmRange;
use crate::flags::{MapFlags, VmaFlags};
use crate::limits::{Layout, SpaceConfig};
use crate::vma::Vma;

/// 32-bit mappings go here: enough for code of the small model.
const LOW_WINDOW: VmRange = VmRange::new(0x4000_0000, 0x8000_0000);
const FOUR_GIB: u64 = 1 << 32;

/// What is searched.
#[derive(Clone, Copy)]
pub(super) struct Ground<'a> {
    pub(super) view: View<'a, Vma>,
    /// Starts of the mappings that keep a gap free below them, ascending.
    pub(super) guarded: &'a [u64],
    pub(super) config: &'a SpaceConfig,
}

/// What is looked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlaceRequest {
    /// The address asked for, page-aligned; 0 for none.
    pub(super) hint: u64,
    /// Bytes, whole pages, not 0.
    pub(super) len: u64,
    /// Bytes that the address is aligned to, of huge pages; else 0. The hint is so.
    pub(super) align: u64,
    pub(super) flags: MapFlags,
    /// Flags that the mapping is going to have, as far as they matter here.
    pub(super) vma_flags: VmaFlags,
    /// Whether 2 MiB alignment is tried: anonymous memory, or a file system that wants it.
    pub(super) huge_aligned: bool,
    /// Byte offset into the file that alignment is relative to.
    pub(super) offset: u64,
}

/// Why there is no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlaceError {
    /// Longer than the address space, or the fixed range ends beyond it.
    BeyondLimit,
    /// A fixed address isn't page-aligned.
    Unaligned,
    /// Below the lowest address that may be mapped.
    TooLow,
    /// No gap is large enough.
    NoSpace,
    /// The fixed address is a negative error number to the kernel, and comes out as that error.
    ReadAsError(u16),
}

/// Addresses from here on look like `-errno` (`IS_ERR_VALUE`).
const FIRST_ERROR: u64 = u64::MAX - 4094;

/// Finds the address. A fixed one is checked, not searched.
#[inline]
pub(super) fn place(ground: &Ground<'_>, request: &PlaceRequest) -> Result<u64, PlaceError> {
    let config = ground.config;
    if request.flags.contains(MapFlags::FIXED) {
        return place_fixed(config, request.hint, request.len);
    }
    if request.len > config.task_size {
        return Err(PlaceError::BeyondLimit);
    }
    let addr = if request.huge_aligned {
        match huge_aligned(ground, request) {
            Some(addr) => addr,
            None => search(ground, request)?,
        }
    } else {
        search(ground, request)?
    };
    check_fixed(config, addr, request.len)?;
    Ok(addr)
}

/// [`place`] where there is no choice.
pub(super) fn place_fixed(config: &SpaceConfig, addr: u64, len: u64) -> Result<u64, PlaceError> {
    if len > config.task_size {
        return Err(PlaceError::BeyondLimit);
    }
    if addr >= FIRST_ERROR {
        return Err(PlaceError::ReadAsError(addr.wrapping_neg() as u16));
    }
    check_fixed(config, addr, len)?;
    Ok(addr)
}

/// What a chosen or given address has to hold in any case.
pub(super) fn check_fixed(config: &SpaceConfig, addr: u64, len: u64) -> Result<(), PlaceError> {
    if len > config.task_size || addr > config.task_size - len {
        return Err(PlaceError::BeyondLimit);
    }
    if !config.pages().is_aligned(addr) {
        return Err(PlaceError::Unaligned);
    }
    if addr < config.mmap_min_addr && !config.raw_io {
        return Err(PlaceError::TooLow);
    }
    Ok(())
}

fn search(ground: &Ground<'_>, request: &PlaceRequest) -> Result<u64, PlaceError> {
    let config = ground.config;
    let bottom_up = config.layout == Layout::BottomUp || request.flags.contains(MapFlags::BITS_32);
    if bottom_up {
        return lowest(ground, request);
    }
    if hint_is_free(ground, request.hint, request.len, config.task_size) {
        return Ok(request.hint);
    }
    let low = if request.flags.contains(MapFlags::ABOVE4G) {
        FOUR_GIB
    } else {
        config.page_size
    };
    let window = VmRange::new(low.max(config.mmap_min_addr), config.base());
    if let Some(addr) = highest_gap(ground, request, window) {
        return Ok(addr);
    }
    // Better an odd place than a failure: from the legacy base up.
    lowest(ground, request)
}

/// Whether the hint can be had as it is: free, and clear of the next mapping's gap.
fn hint_is_free(ground: &Ground<'_>, hint: u64, len: u64, limit: u64) -> bool {
    if hint == 0 || len > limit || hint > limit - len {
        return false;
    }
    debug_assert!(
        ground.config.pages().is_aligned(hint),
        "the caller rounds hints"
    );
    ground
        .view
        .find_next(hint)
        .is_none_or(|next| hint + len <= next.start.saturating_sub(next.value.start_gap()))
}

/// Length to look for: a shadow stack keeps a page free below itself.
fn padded(config: &SpaceConfig, request: &PlaceRequest) -> u64 {
    if request.vma_flags.contains(VmaFlags::SHADOW_STACK) {
        config.page_size
    } else {
        0
    }
}

/// The highest gap, as Linux finds it: where the mapping above a gap keeps a guard gap, the search goes on
/// below that guard gap, past other gaps that lie inside it. Source: `unmapped_area_topdown()`.
fn highest_gap(ground: &Ground<'_>, request: &PlaceRequest, window: VmRange) -> Option<u64> {
    let gap = padded(ground.config, request);
    // There has to be room to align, whether or not it's needed.
    let len = request.len.checked_add(gap)?.checked_add(request.align)?;
    let mut high = window.end;
    loop {
        if window.start >= high {
            return None;
        }
        let found = ground.view.highest_gap(&GapRequest {
            len,
            // Gaps begin and end at page boundaries.
            align: 1,
            align_offset: 0,
            window: window.start..high,
        });
        let reached = found.map_or(window.start, |addr| addr + len);
        match passed_guard(ground, len, VmRange::new(window.start, high), reached) {
            Some(below) => high = below,
            None => return found.map(|addr| aligned_down(addr + request.align, request) + gap),
        }
    }
}

/// Where the search goes on if it meets a guarded mapping with a large enough gap before it gets down to `reached`.
fn passed_guard(ground: &Ground<'_>, len: u64, window: VmRange, reached: u64) -> Option<u64> {
    for start in ground.guarded.iter().rev() {
        let gap_end = (*start).min(window.end);
        if gap_end <= reached {
            return None;
        }
        let gap_start = ground
            .view
            .find_prev(*start)
            .map_or(0, |prev| prev.end)
            .max(window.start);
        let below = ground
            .view
            .find(*start)
            .map_or(*start, |vma| start.saturating_sub(vma.value.start_gap()));
        if gap_start < gap_end && gap_end - gap_start >= len && below < gap_end {
            return Some(below);
        }
    }
    None
}

fn lowest(ground: &Ground<'_>, request: &PlaceRequest) -> Result<u64, PlaceError> {
    let config = ground.config;
    let window = if request.flags.contains(MapFlags::BITS_32) {
        LOW_WINDOW
    } else {
        VmRange::new(config.legacy_base(), config.task_size)
    };
    if request.len > window.end {
        return Err(PlaceError::NoSpace);
    }
    if hint_is_free(ground, request.hint, request.len, window.end) {
        return Ok(request.hint);
    }
    let low = window.start.max(config.mmap_min_addr);
    if low >= window.end {
        return Err(PlaceError::NoSpace);
    }
    let gap = padded(config, request);
    let len = request
        .len
        .checked_add(gap)
        .and_then(|len| len.checked_add(request.align))
        .ok_or(PlaceError::NoSpace)?;
    ground
        .view
        .lowest_gap(&GapRequest {
            len,
            // Gaps begin and end at page boundaries.
            align: 1,
            align_offset: 0,
            window: low..window.end,
        })
        .map(|addr| aligned_down(addr + request.align.saturating_sub(1), request) + gap)
        .ok_or(PlaceError::NoSpace)
}

fn aligned_down(addr: u64, request: &PlaceRequest) -> u64 {
    addr & !request.align.saturating_sub(1)
}

/// Looks for a place with room to align, and takes the aligned slot in it. Source: `__thp_get_unmapped_area()`.
fn huge_aligned(ground: &Ground<'_>, request: &PlaceRequest) -> Option<u64> {
    let config = ground.config;
    let size = config.huge_page_size;
    let mask = size - 1;
    let end = request.offset.checked_add(request.len)?;
    let first = request.offset.checked_add(mask)? & !mask;
    if end <= first || end - first < size {
        return None;
    }
    let len = request.len.checked_add(size)?;
    if len > config.task_size || request.offset.checked_add(len).is_none() {
        return None;
    }
    let found = search(ground, &PlaceRequest { len, ..*request }).ok()?;
    check_fixed(config, found, len).ok()?;
    if found == request.hint {
        return Some(found);
    }
    let skip = request.offset.wrapping_sub(found) & mask;
    if config.layout == Layout::TopDown && skip == 0 {
        return Some(found + size);
    }
    Some(found + skip)
}
