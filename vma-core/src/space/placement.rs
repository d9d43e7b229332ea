//! Where a mapping goes (Linux `get_unmapped_area`, x86-64).

use vma_rcu::tree::{GapRequest, View};

use crate::addr::VmRange;
use crate::flags::{MapFlags, VmaFlags};
use crate::limits::{Layout, SpaceConfig};
use crate::vma::Vma;

/// 32-bit mappings go here: enough for code of the small model.
const LOW_WINDOW: VmRange = VmRange::new(0x4000_0000, 0x8000_0000);
const FOUR_GIB: u64 = 1 << 32;

/// What is looked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlaceRequest {
    /// The address asked for, page-aligned; 0 for none.
    pub(super) hint: u64,
    /// Bytes, whole pages, not 0.
    pub(super) len: u64,
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
}

/// Finds the address. A fixed one is checked, not searched.
pub(super) fn place(
    view: View<'_, Vma>,
    config: &SpaceConfig,
    request: &PlaceRequest,
) -> Result<u64, PlaceError> {
    if request.len > config.task_size {
        return Err(PlaceError::BeyondLimit);
    }
    let addr = if request.flags.contains(MapFlags::FIXED) {
        request.hint
    } else if request.huge_aligned {
        match huge_aligned(view, config, request) {
            Some(addr) => addr,
            None => search(view, config, request)?,
        }
    } else {
        search(view, config, request)?
    };
    check_fixed(config, addr, request.len)?;
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

fn search(view: View<'_, Vma>, config: &SpaceConfig, request: &PlaceRequest) -> Result<u64, PlaceError> {
    let bottom_up = config.layout == Layout::BottomUp || request.flags.contains(MapFlags::BITS_32);
    if bottom_up {
        return lowest(view, config, request);
    }
    if hint_is_free(view, config, request.hint, request.len, config.task_size) {
        return Ok(request.hint);
    }
    let low = if request.flags.contains(MapFlags::ABOVE4G) { FOUR_GIB } else { config.page_size };
    let window = VmRange::new(low.max(config.mmap_min_addr), config.base());
    if let Some(addr) = highest_gap(view, config, request, window) {
        return Ok(addr);
    }
    // Better an odd place than a failure: from the legacy base up.
    lowest(view, config, request)
}

/// Whether the hint can be had as it is: free, and clear of the next mapping's gap.
fn hint_is_free(view: View<'_, Vma>, config: &SpaceConfig, hint: u64, len: u64, limit: u64) -> bool {
    if hint == 0 || len > limit || hint > limit - len {
        return false;
    }
    debug_assert!(config.pages().is_aligned(hint), "the caller rounds hints");
    view.find_next(hint)
        .is_none_or(|next| hint + len <= next.start.saturating_sub(vma_rcu::tree::Record::start_gap(next.value)))
}

/// Length to look for: a shadow stack keeps a page free below itself.
fn padded(config: &SpaceConfig, request: &PlaceRequest) -> u64 {
    if request.vma_flags.contains(VmaFlags::SHADOW_STACK) { config.page_size } else { 0 }
}

fn highest_gap(
    view: View<'_, Vma>,
    config: &SpaceConfig,
    request: &PlaceRequest,
    window: VmRange,
) -> Option<u64> {
    let gap = padded(config, request);
    if window.is_empty() {
        return None;
    }
    view.highest_gap(GapRequest {
        len: request.len.checked_add(gap)?,
        align: config.page_size,
        align_offset: 0,
        window: window.start..window.end,
    })
    .map(|addr| addr + gap)
}

fn lowest(view: View<'_, Vma>, config: &SpaceConfig, request: &PlaceRequest) -> Result<u64, PlaceError> {
    let window = if request.flags.contains(MapFlags::BITS_32) {
        LOW_WINDOW
    } else {
        VmRange::new(config.legacy_base(), config.task_size)
    };
    if request.len > window.end {
        return Err(PlaceError::NoSpace);
    }
    if hint_is_free(view, config, request.hint, request.len, window.end) {
        return Ok(request.hint);
    }
    let low = window.start.max(config.mmap_min_addr);
    if low >= window.end {
        return Err(PlaceError::NoSpace);
    }
    let gap = padded(config, request);
    let len = request.len.checked_add(gap).ok_or(PlaceError::NoSpace)?;
    view.lowest_gap(GapRequest {
        len,
        align: config.page_size,
        align_offset: 0,
        window: low..window.end,
    })
    .map(|addr| addr + gap)
    .ok_or(PlaceError::NoSpace)
}

/// Looks for a place with room to align, and takes the aligned slot in it. Source: `__thp_get_unmapped_area()`.
fn huge_aligned(view: View<'_, Vma>, config: &SpaceConfig, request: &PlaceRequest) -> Option<u64> {
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
    let found = search(view, config, &PlaceRequest { len, ..*request }).ok()?;
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
