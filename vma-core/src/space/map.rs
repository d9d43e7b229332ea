//! mmap(2).

use std::sync::Arc;

use super::draft::Draft;
use super::placement::{PlaceError, PlaceRequest, place};
use super::unmap::{UnmapError, charge_of, gather};
use super::{AddressSpace, Inner, WriteGuard, new_vma};
use crate::accounting::{check_commit, check_expand, check_lock, check_map_count};
use crate::addr::VmRange;
use crate::anon::AnonId;
use crate::backend::Backend;
use crate::error::{Errno, LimitError, NoMemory, SplitError};
use crate::file::{AccessMode, FileKind, FileObject, OpenFile, Seals, WritableHold};
use crate::flags::{MapFlags, MdweFlags, Prot, VmaFlags, prot_bits};
use crate::limits::{Overcommit, SpaceConfig};
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
        MapRequest { addr: 0, len, prot, flags, file: Some(file), offset }
    }

    /// At this very address, replacing what is there.
    #[must_use]
    pub fn fixed(mut self, addr: u64) -> Self {
        self.addr = addr;
        self.flags |= MapFlags::FIXED;
        self
    }
}

/// Why nothing was mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The offset isn't page-aligned.
    #[error("offset {0:#x} isn't page-aligned")]
    UnalignedOffset(u64),
    /// No such descriptor.
    #[error("bad file descriptor")]
    BadDescriptor,
    /// Length 0.
    #[error("length 0")]
    Empty,
    /// The length rounds up to more than there are addresses.
    #[error("a length of {0:#x} bytes exceeds the address space")]
    TooLong(u64),
    /// Offset plus length exceed what a file can have.
    #[error("offset {offset:#x} and length {len:#x} exceed the largest file")]
    Overflow {
        /// Bytes into the file.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Neither shared nor private, or a combination that doesn't exist.
    #[error("flags {0:#x} name no valid kind of mapping")]
    BadType(u64),
    /// `FIXED` with an unaligned address.
    #[error("fixed address {0:#x} isn't page-aligned")]
    UnalignedAddress(u64),
    /// A fixed address of the last 4095 bytes: Linux takes it for an error number that some part of it returned, and
    /// returns that.
    #[error("a fixed address {0} bytes below the top is taken for error number {0}")]
    ReadAsError(u16),
    /// Ends beyond the address space.
    #[error("{len:#x} bytes at {addr:#x} end beyond the address space")]
    BeyondLimit {
        /// Address.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// Below `vm.mmap_min_addr`.
    #[error("{addr:#x} lies below the lowest address, {min:#x}")]
    TooLow {
        /// Address.
        addr: u64,
        /// `vm.mmap_min_addr`.
        min: u64,
    },
    /// No gap is large enough.
    #[error("no free range of {0:#x} bytes")]
    NoSpace(u64),
    /// `FIXED_NOREPLACE` over a mapping.
    #[error("{0} is mapped")]
    Occupied(VmRange),
    /// `MAP_LOCKED` and locked memory isn't allowed at all.
    #[error("memory can't be locked: RLIMIT_MEMLOCK is 0")]
    LockForbidden,
    /// Too much locked memory.
    #[error(transparent)]
    LockLimit(LimitError),
    /// The descriptor's mode doesn't allow it.
    #[error("a file opened {mode:?} can't be mapped with protection {prot:#x} this way")]
    Access {
        /// How it was opened.
        mode: AccessMode,
        /// Protection asked for.
        prot: u64,
    },
    /// Writing to an append-only file.
    #[error("the file is append-only")]
    AppendOnly,
    /// Executing from a `noexec` mount.
    #[error("the file system is mounted noexec")]
    NoExec,
    /// The file can't be mapped.
    #[error("the file can't be mapped")]
    NotMappable,
    /// `SHARED_VALIDATE` with a flag that isn't known.
    #[error("flags {0:#x} hold one that this file doesn't support")]
    Unsupported(u64),
    /// The file is sealed against writing.
    #[error("the file's seals {0:?} forbid it")]
    FileSealed(Seals),
    /// Writable and executable, which was forbidden by `PR_SET_MDWE`.
    #[error("write and execute together are refused (PR_SET_MDWE)")]
    WriteExec,
    /// A mapping to be replaced is sealed.
    #[error("{0} is sealed")]
    Sealed(VmRange),
    /// A mapping at an edge of the replaced range couldn't be split.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// A limit.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// Huge pages were asked for, and there are none.
    #[error("no huge pages")]
    NoHugePages,
    /// No memory for records.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
}

impl MapError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            MapError::UnalignedOffset(_)
            | MapError::Empty
            | MapError::BadType(_)
            | MapError::UnalignedAddress(_) => Errno::EINVAL,
            MapError::BadDescriptor => Errno::EBADF,
            MapError::TooLong(_)
            | MapError::BeyondLimit { .. }
            | MapError::NoSpace(_)
            | MapError::NoHugePages => Errno::ENOMEM,
            MapError::Overflow { .. } => Errno::EOVERFLOW,
            MapError::TooLow { .. }
            | MapError::LockForbidden
            | MapError::NoExec
            | MapError::FileSealed(_)
            | MapError::Sealed(_) => Errno::EPERM,
            MapError::Occupied(_) => Errno::EEXIST,
            MapError::LockLimit(_) => Errno::EAGAIN,
            MapError::Access { .. } | MapError::AppendOnly | MapError::WriteExec => Errno::EACCES,
            MapError::NotMappable => Errno::ENODEV,
            MapError::Unsupported(_) => Errno::EOPNOTSUPP,
            MapError::ReadAsError(number) => Errno::from_raw(number),
            MapError::Split(error) => error.errno(),
            MapError::Limit(error) => error.errno(),
            MapError::NoMemory(error) => error.errno(),
        }
    }
}

impl From<UnmapError> for MapError {
    fn from(error: UnmapError) -> Self {
        match error {
            UnmapError::BadRange { addr, len } => MapError::BeyondLimit { addr, len },
            UnmapError::Sealed(range) => MapError::Sealed(range),
            UnmapError::Split(error) => MapError::Split(error),
            UnmapError::NoMemory(error) => MapError::NoMemory(error),
        }
    }
}

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
struct Parsed<'r> {
    hint: u64,
    /// Whole pages, not 0.
    len: u64,
    prot: Prot,
    flags: MapFlags,
    no_replace: bool,
    file: Option<&'r Arc<OpenFile>>,
    /// Page offset into the file.
    pgoff: u64,
}

/// What is needed to build the VMA.
struct Plan {
    flags: VmaFlags,
    /// The file that merging compares.
    file: Option<Arc<OpenFile>>,
    pgoff: u64,
    /// A shared anonymous object is made only once nothing can refuse any more.
    new_object: bool,
    /// Counts as a writable mapping while the call runs.
    _hold: Option<WritableHold>,
}

/// Checks that need no lock. Source: `ksys_mmap_pgoff()` and the head of `do_mmap()`.
fn parse<'r>(config: &SpaceConfig, request: &'r MapRequest) -> Result<Parsed<'r>, MapError> {
    let pages = config.pages();
    if !pages.is_aligned(request.offset) {
        return Err(MapError::UnalignedOffset(request.offset));
    }
    let mut flags = request.flags;
    let file = if flags.contains(MapFlags::ANONYMOUS) { None } else { Some(request.file.as_ref()) };
    let file = match file {
        None => None,
        Some(None) => return Err(MapError::BadDescriptor),
        Some(Some(file)) => Some(file),
    };
    if flags.contains(MapFlags::HUGETLB) {
        check_huge(flags, file.is_some())?;
    }
    if request.len == 0 {
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
    let len = pages.ceil_wrapping(request.len);
    if len == 0 {
        return Err(MapError::TooLong(request.len));
    }
    let pgoff = pages.count(request.offset);
    if pgoff.checked_add(pages.count(len)).is_none() {
        return Err(MapError::Overflow { offset: request.offset, len });
    }
    Ok(Parsed { hint, len, prot, flags, no_replace, file, pgoff })
}

/// `MAP_HUGETLB`: there is no pool of huge pages here.
fn check_huge(flags: MapFlags, has_file: bool) -> Result<(), MapError> {
    let size = flags.bits() >> HUGE_SHIFT & 0x3f;
    if has_file || !matches!(size, 0 | 21 | 30) {
        return Err(MapError::BadType(flags.bits()));
    }
    Err(MapError::NoHugePages)
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
fn file_flags(parsed: &Parsed<'_>, file: &Arc<OpenFile>, mut bits: VmaFlags, config: &SpaceConfig) -> Result<VmaFlags, MapError> {
    let object = file.object();
    let pages = config.pages();
    let bounded = matches!(object.kind(), FileKind::Regular | FileKind::Shmem);
    if bounded && (parsed.len > MAX_FILE || parsed.pgoff > pages.count(MAX_FILE - parsed.len)) {
        let offset = parsed.pgoff.saturating_mul(pages.size());
        return Err(MapError::Overflow { offset, len: parsed.len });
    }
    let refused = MapError::Access { mode: file.mode(), prot: parsed.prot.bits() };
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
            bits |= VmaFlags::DROPPABLE | VmaFlags::NORESERVE | VmaFlags::WIPEONFORK | VmaFlags::DONTDUMP;
        }
        _ => return Err(bad),
    }
    Ok(bits)
}

/// Whether gaining execute is refused (`map_deny_write_exec`).
pub(super) fn denied_by_mdwe(mdwe: MdweFlags, old: VmaFlags, new: VmaFlags) -> bool {
    mdwe.contains(MdweFlags::REFUSE_EXEC_GAIN)
        && new.contains(VmaFlags::EXEC)
        && (new.contains(VmaFlags::WRITE) || !old.contains(VmaFlags::EXEC))
}

/// From the parsed request to the address and the VMA's attributes. Source: `do_mmap()`.
fn validate(
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
    if parsed.flags.contains(MapFlags::NORESERVE)
        && !matches!(config.overcommit, Overcommit::Never { .. })
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
    let zero_device = parsed.file.is_some_and(|file| file.object().kind() == FileKind::DevZero);
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

fn place_request(draft: &Draft<'_>, parsed: &Parsed<'_>, bits: VmaFlags) -> Result<u64, MapError> {
    let config = draft.config;
    let shared_anonymous = parsed.file.is_none() && parsed.flags.bits() & MapFlags::SHARED.bits() != 0;
    let huge_aligned = config.huge_pages
        && match parsed.file {
            Some(file) => file.object().is_huge_aligned(),
            None => !shared_anonymous && parsed.hint == 0 && parsed.len & (config.huge_page_size - 1) == 0,
        };
    let request = PlaceRequest {
        hint: parsed.hint,
        len: parsed.len,
        flags: parsed.flags,
        vma_flags: bits,
        huge_aligned,
        offset: if parsed.file.is_some() { draft.pages.bytes(parsed.pgoff) } else { 0 },
    };
    place(&draft.ground(), &request).map_err(|error| place_error(error, parsed.hint, parsed.len, config))
}

/// The error of a failed placement.
pub(super) fn place_error(error: PlaceError, addr: u64, len: u64, config: &SpaceConfig) -> MapError {
    match error {
        PlaceError::BeyondLimit => MapError::BeyondLimit { addr, len },
        PlaceError::Unaligned => MapError::UnalignedAddress(addr),
        PlaceError::TooLow => MapError::TooLow { addr, min: config.mmap_min_addr },
        PlaceError::NoSpace => MapError::NoSpace(len),
        PlaceError::ReadAsError(number) => MapError::ReadAsError(number),
    }
}

/// Replaces what is in the range by the new mapping. Source: `__mmap_region()`.
///
/// On an error the draft holds what Linux leaves behind: splits at the edges.
fn install(draft: &mut Draft<'_>, range: VmRange, plan: Plan) -> Result<(), MapError> {
    let occupied = draft.first_in(range.start, range.end).is_some();
    let gathered = if occupied { gather(draft, range)? } else { super::unmap::Gathered::default() };
    let pages = draft.pages.count(range.len());
    let config = draft.config;
    check_expand(draft.totals(), config, plan.flags, pages - gathered.pages)?;
    let mut flags = plan.flags;
    if let Some(charge) = charge_of(flags, pages, gathered) {
        if charge > 0 {
            check_commit(draft.totals(), config, charge)?;
        }
        flags |= VmaFlags::ACCOUNT;
    }
    if occupied {
        draft.remove(range.start, range.end);
    }
    if flags.intersects(VmaFlags::SPECIAL) {
        flags -= VmaFlags::LOCK_BITS;
    }
    let file = if plan.new_object {
        Some(OpenFile::new(FileObject::shared_anonymous(range.len()), AccessMode::ReadWrite))
    } else {
        plan.file
    };
    let vma = new_vma(config, flags, plan.pgoff).with_file(file);
    draft.insert_merged(range.start, range.end, vma, AnonId::NONE, Kind::New);
    Ok(())
}

impl<B: Backend> WriteGuard<'_, B> {
    /// As [`AddressSpace::map`].
    ///
    /// # Errors
    /// As there.
    pub fn map(&mut self, request: &MapRequest) -> Result<u64, MapError> {
        let config = self.config();
        let parsed = parse(&config, request)?;
        self.map_parsed(&config, &parsed)
    }

    fn map_parsed(&mut self, config: &SpaceConfig, parsed: &Parsed<'_>) -> Result<u64, MapError> {
        let mut draft = self.draft(config);
        let (addr, plan) = validate(self.inner(), &draft, parsed)?;
        let populate = plan.flags.contains(VmaFlags::LOCKED)
            || parsed.flags & (MapFlags::POPULATE | MapFlags::NONBLOCK) == MapFlags::POPULATE;
        let range = VmRange::new(addr, addr + parsed.len);
        let result = install(&mut draft, range, plan);
        let changes = draft.finish();
        self.commit(changes)?;
        result?;
        if populate {
            self.populate(range.start, range.end);
        }
        Ok(addr)
    }

    /// Maps part of a file at a fixed place, as remap_file_pages(2) does.
    pub(super) fn map_shared_at(
        &mut self,
        config: &SpaceConfig,
        range: VmRange,
        file: &Arc<OpenFile>,
        pgoff: u64,
        prot: Prot,
        flags: MapFlags,
    ) -> Result<u64, MapError> {
        if config.pages().count(range.len()).checked_add(pgoff).is_none() {
            return Err(MapError::Overflow { offset: u64::MAX, len: range.len() });
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
        self.map_parsed(config, &parsed)
    }
}

impl<B: Backend> AddressSpace<B> {
    /// Maps memory (mmap(2)) and returns its address.
    ///
    /// # Errors
    /// In this order; with any of them the mappings that `FIXED` would have replaced stay (a split at an edge of the range
    /// may stay as well).
    ///
    /// | errno | when |
    /// |---|---|
    /// | `EINVAL` | unaligned offset; length 0; no valid kind; unaligned `FIXED` address; growing down and not private anonymous |
    /// | `EBADF` | no descriptor |
    /// | `EOVERFLOW` | offset plus length beyond the largest file |
    /// | `ENOMEM` | limit of mappings (one more than it may exist), address space, data, overcommit; no room |
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
        self.write().map(request)
    }
}
