//! The checks of mmap(2), in Linux's order: what a request has to hold before anything is planned.

use std::sync::Arc;

use super::{MapError, MapRequest};
use crate::accounting::{check_lock, check_map_count};
use crate::file::{AccessMode, FileKind, FileObject, OpenFile, Seals, WritableHold};
use crate::flags::{MapFlags, MdweFlags, Prot, VmaFlags, prot_bits};
use crate::huge::{GIGANTIC_PAGE, HUGE_PAGE, HugeFile, HugePool};
use crate::limits::{Overcommit, SpaceConfig};
use crate::space::Inner;
use crate::space::draft::Draft;
use crate::space::placement::{PlaceError, PlaceRequest, place, place_fixed};

/// Bits that hold the kind of mapping.
const TYPE: u64 = 0xf;
/// Largest file: bytes.
const MAX_FILE: u64 = i64::MAX as u64;
/// Size of a huge page, encoded in the flags.
const HUGE_SHIFT: u64 = 26;

/// Flags that `SHARED_VALIDATE` accepts.
const KNOWN: MapFlags = MapFlags::SHARED_VALIDATE
    .union(MapFlags::FIXED)
    .union(MapFlags::ANONYMOUS)
    .union(MapFlags::DENYWRITE)
    .union(MapFlags::EXECUTABLE)
    .union(MapFlags::UNINITIALIZED)
    .union(MapFlags::GROWSDOWN)
    .union(MapFlags::LOCKED)
    .union(MapFlags::NORESERVE)
    .union(MapFlags::POPULATE)
    .union(MapFlags::NONBLOCK)
    .union(MapFlags::STACK)
    .union(MapFlags::HUGETLB)
    .union(MapFlags::BITS_32)
    .union(MapFlags::ABOVE4G)
    .union(MapFlags::from_bits_retain(21 << HUGE_SHIFT))
    .union(MapFlags::from_bits_retain(30 << HUGE_SHIFT));

/// A request whose arguments hold by themselves.
pub(super) struct Parsed<'r> {
    pub(super) hint: u64,
    /// Whole pages, not 0.
    pub(super) len: u64,
    pub(super) prot: Prot,
    pub(super) flags: MapFlags,
    pub(super) no_replace: bool,
    pub(super) file: Option<&'r Arc<OpenFile>>,
    /// Page offset into the file.
    pub(super) pgoff: u64,
}

/// What is needed to build the VMA.
pub(super) struct Plan {
    pub(super) flags: VmaFlags,
    /// The file that merging compares.
    pub(super) file: Option<Arc<OpenFile>>,
    pub(super) pgoff: u64,
    /// A shared anonymous object is made only once nothing can refuse any more.
    pub(super) new_object: bool,
    /// Counts as a writable mapping while the call runs.
    pub(super) _hold: Option<WritableHold>,
}

/// Checks that need no lock. `huge` takes the file that is made for `MAP_HUGETLB`. Source: `ksys_mmap_pgoff()` and the head of
/// `do_mmap()`.
#[inline]
pub(super) fn parse<'r>(
    config: &SpaceConfig,
    request: &'r MapRequest,
    huge: &'r mut Option<Arc<OpenFile>>,
) -> Result<Parsed<'r>, MapError> {
    let pages = config.pages();
    if !pages.is_aligned(request.offset) {
        return Err(MapError::UnalignedOffset(request.offset));
    }
    let mut flags = request.flags;
    let file = if flags.contains(MapFlags::ANONYMOUS) {
        None
    } else {
        Some(request.file.as_ref())
    };
    let file = match file {
        None => None,
        Some(None) => return Err(MapError::BadDescriptor),
        Some(Some(file)) => Some(file),
    };
    let (file, len) = if flags.contains(MapFlags::HUGETLB) {
        let size = check_huge(config, flags, file.is_some())?;
        let len = request.len.wrapping_add(size - 1) & !(size - 1);
        if len == 0 {
            return Err(MapError::Empty);
        }
        (
            Some(&*huge.insert(huge_file(config, request, size, len)?)),
            len,
        )
    } else {
        (file, request.len)
    };
    if len == 0 {
        return Err(MapError::Empty);
    }
    let mut prot = request.prot;
    if config.read_implies_exec
        && prot.contains(Prot::READ)
        && !file.is_some_and(|file| file.object().is_no_exec())
    {
        prot |= Prot::EXEC;
    }
    let no_replace = flags.contains(MapFlags::FIXED_NOREPLACE);
    if no_replace {
        flags |= MapFlags::FIXED;
    }
    let hint = if flags.contains(MapFlags::FIXED) {
        request.addr
    } else {
        let page = pages.floor(request.addr);
        if page != 0 && page < config.mmap_min_addr {
            pages.ceil_wrapping(config.mmap_min_addr)
        } else {
            page
        }
    };
    let len = pages.ceil_wrapping(len);
    if len == 0 {
        return Err(MapError::TooLong(request.len));
    }
    let pgoff = pages.count(request.offset);
    if pgoff.checked_add(pages.count(len)).is_none() {
        return Err(MapError::Overflow {
            offset: request.offset,
            len,
        });
    }
    Ok(Parsed {
        hint,
        len,
        prot,
        flags,
        no_replace,
        file,
        pgoff,
    })
}

/// `MAP_HUGETLB` has to name a size that exists: bytes of a page.
fn check_huge(config: &SpaceConfig, flags: MapFlags, has_file: bool) -> Result<u64, MapError> {
    let size = match flags.bits() >> HUGE_SHIFT & 0x3f {
        0 | 21 => HUGE_PAGE,
        30 => GIGANTIC_PAGE,
        _ => 0,
    };
    if has_file || size <= config.page_size {
        return Err(MapError::BadType(flags.bits()));
    }
    Ok(size)
}

/// The file that is behind `MAP_HUGETLB`. Source: `hugetlb_file_setup()`, `hugetlbfs_file_mmap()`.
#[cold]
fn huge_file(
    config: &SpaceConfig,
    request: &MapRequest,
    size: u64,
    len: u64,
) -> Result<Arc<OpenFile>, MapError> {
    let pool = config.hugetlb.as_ref().ok_or(MapError::NoHugePages)?;
    let pool = if size == HUGE_PAGE {
        pool.clone()
    } else {
        HugePool::new(0)
    };
    let is_private = request.flags.bits() & MapFlags::SHARED.bits() == 0;
    // It's as long as the mapping, and grows to where a writable one ends.
    let end = if request.prot.contains(Prot::WRITE) {
        request.offset.saturating_add(len)
    } else {
        len
    };
    let object = FileObject::huge_anonymous(HugeFile::new(size, pool, is_private), end);
    Ok(OpenFile::new(object, AccessMode::ReadWrite))
}

/// `VmaFlags` that the flag word stands for (`calc_vm_flag_bits`).
fn flag_bits(config: &SpaceConfig, flags: MapFlags) -> VmaFlags {
    let mut bits = VmaFlags::empty();
    for (flag, bit) in [
        (MapFlags::GROWSDOWN, VmaFlags::GROWSDOWN),
        (MapFlags::LOCKED, VmaFlags::LOCKED),
        (MapFlags::SYNC, VmaFlags::SYNC),
    ] {
        if flags.contains(flag) {
            bits |= bit;
        }
    }
    if config.huge_pages && flags.contains(MapFlags::STACK) {
        bits |= VmaFlags::NOHUGEPAGE;
    }
    bits
}

/// Checks of a file mapping; returns its flags.
fn file_flags(
    parsed: &Parsed<'_>,
    file: &Arc<OpenFile>,
    mut bits: VmaFlags,
    config: &SpaceConfig,
) -> Result<VmaFlags, MapError> {
    let object = file.object();
    let pages = config.pages();
    let bounded = matches!(
        object.kind(),
        FileKind::Regular | FileKind::Shmem | FileKind::Huge
    );
    if bounded && (parsed.len > MAX_FILE || parsed.pgoff > pages.count(MAX_FILE - parsed.len)) {
        let offset = parsed.pgoff.saturating_mul(pages.size());
        return Err(MapError::Overflow {
            offset,
            len: parsed.len,
        });
    }
    let refused = MapError::Access {
        mode: file.mode(),
        prot: parsed.prot.bits(),
    };
    match parsed.flags.bits() & TYPE {
        kind @ (1 | 3) => {
            if kind == 3 && !KNOWN.contains(parsed.flags) {
                return Err(MapError::Unsupported(parsed.flags.bits()));
            }
            if parsed.prot.contains(Prot::WRITE) {
                if !file.is_writable() {
                    return Err(refused);
                }
                if object.is_append_only() {
                    return Err(MapError::AppendOnly);
                }
            }
            bits |= VmaFlags::SHARED | VmaFlags::MAYSHARE;
            if !file.is_writable() {
                bits -= VmaFlags::MAYWRITE | VmaFlags::SHARED;
            }
        }
        2 => {}
        _ => return Err(MapError::BadType(parsed.flags.bits())),
    }
    if !file.is_readable() {
        return Err(refused);
    }
    if object.is_no_exec() {
        if bits.contains(VmaFlags::EXEC) {
            return Err(MapError::NoExec);
        }
        bits -= VmaFlags::MAYEXEC;
    }
    if object.kind() == FileKind::Unmappable {
        return Err(MapError::NotMappable);
    }
    if bits.contains(VmaFlags::GROWSDOWN) {
        return Err(MapError::BadType(parsed.flags.bits()));
    }
    let seals = object.current_seals();
    if bits.contains(VmaFlags::SHARED) && seals.intersects(Seals::WRITE | Seals::FUTURE_WRITE) {
        if bits.contains(VmaFlags::WRITE) {
            return Err(MapError::FileSealed(seals));
        }
        bits -= VmaFlags::MAYWRITE;
    }
    Ok(bits)
}

/// Checks of an anonymous mapping; returns its flags.
#[inline]
fn anonymous_flags(flags: MapFlags, mut bits: VmaFlags) -> Result<VmaFlags, MapError> {
    let bad = MapError::BadType(flags.bits());
    let kind = flags.bits() & TYPE;
    if kind != 2 && bits.contains(VmaFlags::GROWSDOWN) {
        return Err(bad);
    }
    match kind {
        1 => bits |= VmaFlags::SHARED | VmaFlags::MAYSHARE,
        2 => {}
        8 => {
            if flags.intersects(MapFlags::LOCKED | MapFlags::HUGETLB) {
                return Err(bad);
            }
            bits |= VmaFlags::DROPPABLE
                | VmaFlags::NORESERVE
                | VmaFlags::WIPEONFORK
                | VmaFlags::DONTDUMP;
        }
        _ => return Err(bad),
    }
    Ok(bits)
}

/// Whether gaining execute is refused (`map_deny_write_exec`).
pub(in crate::space) fn denied_by_mdwe(mdwe: MdweFlags, old: VmaFlags, new: VmaFlags) -> bool {
    mdwe.contains(MdweFlags::REFUSE_EXEC_GAIN)
        && new.contains(VmaFlags::EXEC)
        && (new.contains(VmaFlags::WRITE) || !old.contains(VmaFlags::EXEC))
}

/// From the parsed request to the address and the VMA's attributes. Source: `do_mmap()`.
#[inline]
pub(super) fn validate(
    inner: &Inner,
    draft: &Draft<'_>,
    parsed: &Parsed<'_>,
) -> Result<(u64, Plan), MapError> {
    let config = draft.config;
    let totals = draft.totals();
    check_map_count(totals, config)?;
    let mut bits = prot_bits(parsed.prot)
        | flag_bits(config, parsed.flags)
        | inner.default_flags
        | VmaFlags::MAY;
    let addr = place_request(draft, parsed, bits)?;
    if parsed.no_replace
        && let Some(there) = draft.first_in(addr, addr + parsed.len)
    {
        return Err(MapError::Occupied(there.range()));
    }
    if parsed.flags.contains(MapFlags::LOCKED) && !config.may_lock() {
        return Err(MapError::LockForbidden);
    }
    check_lock(totals, config, bits, parsed.len).map_err(MapError::LockLimit)?;
    bits = match parsed.file {
        Some(file) => file_flags(parsed, file, bits, config)?,
        None => anonymous_flags(parsed.flags, bits)?,
    };
    let is_huge = parsed
        .file
        .is_some_and(|file| file.object().huge().is_some());
    if parsed.flags.contains(MapFlags::NORESERVE)
        && (is_huge || !matches!(config.overcommit, Overcommit::Never { .. }))
    {
        bits |= VmaFlags::NORESERVE;
    }
    if denied_by_mdwe(inner.mdwe, bits, bits) {
        return Err(MapError::WriteExec);
    }
    let hold = match parsed.file {
        Some(file) if bits.contains(VmaFlags::SHARED | VmaFlags::MAYWRITE) => {
            let object = file.object();
            let hold = object.hold_writable();
            Some(hold.ok_or_else(|| MapError::FileSealed(object.current_seals()))?)
        }
        _ => None,
    };
    let shared = bits.contains(VmaFlags::MAYSHARE);
    let zero_device = parsed
        .file
        .is_some_and(|file| file.object().kind() == FileKind::DevZero);
    let new_object = shared && (parsed.file.is_none() || zero_device);
    let pgoff = match parsed.file {
        Some(_) => parsed.pgoff,
        None if shared => 0,
        None => draft.pages.count(addr),
    };
    let plan = Plan {
        flags: bits,
        file: parsed.file.filter(|_| !new_object).cloned(),
        pgoff,
        new_object,
        _hold: hold,
    };
    Ok((addr, plan))
}

#[inline]
fn place_request(draft: &Draft<'_>, parsed: &Parsed<'_>, bits: VmaFlags) -> Result<u64, MapError> {
    let config = draft.config;
    let failed = |error| place_error(error, parsed.hint, parsed.len, config);
    let align = parsed
        .file
        .and_then(|file| file.object().huge())
        .map_or(0, |huge| huge.page_size());
    let mask = align.saturating_sub(1);
    if parsed.flags.contains(MapFlags::FIXED) {
        if parsed.len <= config.task_size && parsed.hint & mask != 0 {
            return Err(MapError::UnalignedAddress(parsed.hint));
        }
        return place_fixed(config, parsed.hint, parsed.len).map_err(failed);
    }
    let shared_anonymous =
        parsed.file.is_none() && parsed.flags.bits() & MapFlags::SHARED.bits() != 0;
    let huge_aligned = config.huge_pages
        && match parsed.file {
            Some(file) => file.object().is_huge_aligned(),
            None => {
                !shared_anonymous
                    && parsed.hint == 0
                    && parsed.len & (config.huge_page_size - 1) == 0
            }
        };
    let request = PlaceRequest {
        hint: parsed.hint.wrapping_add(mask) & !mask,
        len: parsed.len,
        align,
        flags: parsed.flags,
        vma_flags: bits,
        huge_aligned,
        offset: if parsed.file.is_some() {
            draft.pages.bytes(parsed.pgoff)
        } else {
            0
        },
    };
    place(&draft.ground(), &request).map_err(failed)
}

/// The error of a failed placement.
pub(in crate::space) fn place_error(
    error: PlaceError,
    addr: u64,
    len: u64,
    config: &SpaceConfig,
) -> MapError {
    match error {
        PlaceError::BeyondLimit => MapError::BeyondLimit { addr, len },
        PlaceError::Unaligned => MapError::UnalignedAddress(addr),
        PlaceError::TooLow => MapError::TooLow {
            addr,
            min: config.mmap_min_addr,
        },
        PlaceError::NoSpace => MapError::NoSpace(len),
        PlaceError::ReadAsError(number) => MapError::ReadAsError(number),
    }
}
