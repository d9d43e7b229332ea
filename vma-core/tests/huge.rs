//! `MAP_HUGETLB`: what Linux 6.18 answered (x86-64, a pool of eight pages of 2 MiB), call by call.

#![allow(clippy::unwrap_used, reason = "tests may")]

use vma_core::{
    Access, AddressSpace, Advice, AdviseError, Errno, FaultError, HugePool, LockAllFlags,
    LockError, MapError, MapFlags, MapRequest, Overcommit, Prot, ProtectError, RemapError,
    RemapFlags, RemapRequest, SealError, SpaceConfig, UnmapError, VmaFlags,
};

const PAGE: u64 = 4096;
const M: u64 = 2 << 20;
const BASE: u64 = 0x100_0000_0000;
const RW: Prot = Prot::READ.union(Prot::WRITE);
const PRIVATE: MapFlags = MapFlags::PRIVATE
    .union(MapFlags::ANONYMOUS)
    .union(MapFlags::HUGETLB);
const SHARED: MapFlags = MapFlags::SHARED
    .union(MapFlags::ANONYMOUS)
    .union(MapFlags::HUGETLB);
const FIXED: MapFlags = MapFlags::FIXED;
const NORESERVE: MapFlags = MapFlags::NORESERVE;

struct Tested {
    space: AddressSpace,
    pool: HugePool,
}

/// A space with a pool of eight pages.
fn tested() -> Tested {
    let pool = HugePool::new(8);
    let space = AddressSpace::new(SpaceConfig {
        hugetlb: Some(pool.clone()),
        ..SpaceConfig::default()
    });
    Tested {
        space: space.unwrap(),
        pool,
    }
}

impl Tested {
    fn map(&self, addr: u64, len: u64, prot: Prot, flags: MapFlags) -> Result<u64, Errno> {
        self.map_offset(addr, len, prot, flags, 0)
    }

    fn map_offset(
        &self,
        addr: u64,
        len: u64,
        prot: Prot,
        flags: MapFlags,
        offset: u64,
    ) -> Result<u64, Errno> {
        let request = MapRequest {
            addr,
            len,
            prot,
            flags,
            file: None,
            offset,
        };
        let result = self.space.map(&request).map_err(MapError::errno);
        self.space.check().unwrap();
        result
    }

    /// `pages` of them at `BASE`.
    fn base(&self, pages: u64, flags: MapFlags) {
        assert_eq!(self.map(BASE, pages * M, RW, flags | FIXED), Ok(BASE));
    }

    fn plain(&self, addr: u64, len: u64) -> Result<u64, Errno> {
        let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | FIXED;
        self.map(addr, len, RW, flags)
    }

    fn unmap(&self, addr: u64, len: u64) -> Result<(), Errno> {
        self.space.unmap(addr, len).map_err(UnmapError::errno)
    }

    fn remap(&self, addr: u64, old: u64, new: u64, flags: u64, to: u64) -> Result<u64, Errno> {
        let request = RemapRequest {
            addr,
            old_len: old,
            new_len: new,
            flags: RemapFlags::from_bits_retain(flags),
            new_addr: to,
        };
        self.space.remap(&request).map_err(RemapError::errno)
    }

    fn reserved(&self) -> u64 {
        self.pool.stats().reserved
    }

    /// Mappings from `BASE` on: start and end in huge pages from there, protection, and offset in huge pages.
    fn layout(&self) -> Vec<(u64, u64, String, u64)> {
        let entries = self.space.maps_entries().into_iter();
        let shown = entries
            .filter(|entry| (BASE..BASE + 64 * M).contains(&entry.start))
            .map(|entry| {
                assert_eq!((entry.start | entry.end) % M, 0);
                let perms = String::from_utf8(entry.flags.perms().to_vec()).unwrap();
                let (start, end) = ((entry.start - BASE) / M, (entry.end - BASE) / M);
                (start, end, perms, entry.offset / M)
            });
        shown.collect()
    }

    #[track_caller]
    fn shows(&self, expected: &[(u64, u64, &str, u64)]) {
        let expected: Vec<_> = expected
            .iter()
            .map(|(start, end, perms, offset)| (*start, *end, (*perms).to_owned(), *offset))
            .collect();
        assert_eq!(self.layout(), expected);
    }
}

#[test]
fn a_mapping_is_rounded_to_whole_pages_and_placed_between_them() {
    let t = tested();
    let addr = t.map(0, 1, RW, PRIVATE).unwrap();
    assert_eq!((addr % M, t.reserved()), (0, 1));
    let entry = &t.space.maps_entries()[0];
    assert_eq!(entry.end - entry.start, M);
    assert_eq!(entry.name.to_string(), "/anon_hugepage (deleted)");
    assert_eq!(entry.device, (0, 0x11));
    let codes: Vec<_> = entry.flags.codes().collect();
    assert_eq!(codes.join(" "), "rd wr mr mw me de ht");
    assert_eq!(t.unmap(addr, PAGE), Err(Errno::EINVAL));
    assert_eq!(t.unmap(addr, M), Ok(()));
    assert_eq!(t.reserved(), 0);
    let addr = t.map(0, M + 1, RW, PRIVATE).unwrap();
    assert_eq!((addr % M, t.reserved()), (0, 2));
    t.unmap(addr, 2 * M).unwrap();
    // Hints are rounded up, after pages were rounded down.
    assert_eq!(t.map(BASE + PAGE, M, RW, PRIVATE), Ok(BASE + M));
    assert_eq!(t.map(BASE + 1, M, RW, PRIVATE), Ok(BASE));
    t.unmap(BASE, 2 * M).unwrap();
    for odd in [BASE + PAGE, BASE + 1] {
        assert_eq!(t.map(odd, M, RW, PRIVATE | FIXED), Err(Errno::EINVAL));
    }
    t.base(1, PRIVATE);
    let no_replace = PRIVATE | MapFlags::FIXED_NOREPLACE;
    assert_eq!(t.map(BASE, M, RW, no_replace), Err(Errno::EEXIST));
    assert_eq!(t.map(BASE + PAGE, M, RW, no_replace), Err(Errno::EINVAL));
    assert_ne!(t.map(BASE, M, RW, PRIVATE), Ok(BASE));
    assert_eq!(t.map(PAGE, M, RW, PRIVATE), Ok(M));
}

/// Gaps that would do are passed over where there is no room to align, needed or not.
#[test]
fn a_place_is_searched_with_room_to_align() {
    let t = tested();
    let top = t.space.config().mmap_base.unwrap();
    let high = t.map(0, M, RW, PRIVATE).unwrap();
    // The search asks for one page more than it needs.
    assert_eq!(high, (top - M) / M * M);
    let low = t.map(0, M, RW, PRIVATE).unwrap();
    let third = t.map(0, M, RW, PRIVATE).unwrap();
    assert_eq!((low, third), (high - M, high - 2 * M));
    t.unmap(low, M).unwrap();
    // A hole of exactly one page isn't taken.
    assert_eq!(t.map(0, M, RW, PRIVATE), Ok(third - M));
}

#[test]
fn mmap_fails_as_linux_says() {
    let t = tested();
    let inval = Err(Errno::EINVAL);
    let nomem = Err(Errno::ENOMEM);
    let map = |addr, len, flags| t.map(addr, len, RW, flags);
    for (got, expected) in [
        (map(0, 0, PRIVATE), inval),
        // Rounds up to nothing.
        (map(0, u64::MAX, PRIVATE), inval),
        (map(0, 1 << 47, PRIVATE), nomem),
        (map(0, 1 << 46, PRIVATE), nomem),
        (map(0, 1 << 63, PRIVATE), nomem),
        (map(0, 9 * M, PRIVATE), nomem),
        (map(0, 9 * M, SHARED), nomem),
        (map(0, M, PRIVATE | MapFlags::GROWSDOWN), inval),
        (map(0, M, SHARED | MapFlags::GROWSDOWN), inval),
        (
            map(
                0,
                M,
                MapFlags::ANONYMOUS | MapFlags::HUGETLB | MapFlags::DROPPABLE,
            ),
            inval,
        ),
        (map(0, M, MapFlags::ANONYMOUS | MapFlags::HUGETLB), inval),
        (
            map(0, M, PRIVATE | MapFlags::SHARED_VALIDATE | MapFlags::SYNC),
            Err(Errno::EOPNOTSUPP),
        ),
        (map(0x7fff_ffe0_0000, 4 * M, PRIVATE | FIXED), nomem),
        (map(u64::MAX - 4094, 4 * M, PRIVATE | FIXED), inval),
        (map(M.wrapping_neg(), M, PRIVATE | FIXED), nomem),
        (
            map(0, M, MapFlags::PRIVATE | MapFlags::HUGETLB),
            Err(Errno::EBADF),
        ),
        (t.map_offset(0, M, RW, PRIVATE, PAGE), inval),
        (t.map_offset(0, M, RW, PRIVATE, 1), inval),
        (
            t.map_offset(0, M, RW, PRIVATE, i64::MAX as u64 / M * M),
            Err(Errno::EOVERFLOW),
        ),
    ] {
        assert_eq!(got, expected);
    }
    assert_eq!((t.space.totals().map_count, t.reserved()), (0, 0));
    for size in 1..64 {
        let flags = PRIVATE | MapFlags::from_bits_retain(size << 26);
        let got = t.map(0, PAGE, RW, flags).map(|addr| addr % M);
        let expected = match size {
            21 => Ok(0),
            30 => nomem,
            _ => inval,
        };
        assert_eq!(got, expected, "{size}");
    }
}

#[test]
fn pages_of_1_gib_can_be_mapped_and_there_are_none() {
    let t = tested();
    let flags = PRIVATE | NORESERVE | MapFlags::from_bits_retain(30 << 26);
    let addr = t.map(0, PAGE, RW, flags).unwrap();
    let entry = &t.space.maps_entries()[0];
    assert_eq!((addr % (1 << 30), entry.end - addr), (0, 1 << 30));
    assert_eq!(entry.device, (0, 0x12));
    assert_eq!(t.unmap(addr, M), Err(Errno::EINVAL));
    assert_eq!(t.unmap(addr, 1 << 30), Ok(()));
}

#[test]
fn what_is_mapped_is_reserved_unless_told_otherwise() {
    let t = tested();
    let all = t.map(0, 8 * M, RW, PRIVATE).unwrap();
    assert_eq!(t.reserved(), 8);
    for prot in [RW, Prot::READ, Prot::empty()] {
        assert_eq!(t.map(0, M, prot, PRIVATE), Err(Errno::ENOMEM));
    }
    assert_eq!(t.map(0, M, RW, SHARED), Err(Errno::ENOMEM));
    let more = t.map(0, M, RW, PRIVATE | NORESERVE).unwrap();
    let flags = t.space.maps_entries();
    let flags = flags.iter().find(|entry| entry.start == more).unwrap();
    assert!(flags.flags.contains(VmaFlags::NORESERVE));
    // Also where plain memory doesn't honour it.
    let never = |c: &mut SpaceConfig| c.overcommit = Overcommit::Never { limit_pages: 9 };
    t.space.configure(never).unwrap();
    assert!(t.map(0, M, RW, SHARED | NORESERVE).is_ok());
    assert_eq!((t.space.totals().committed, t.reserved()), (0, 8));
    t.unmap(all, 8 * M).unwrap();
    assert_eq!(t.reserved(), 0);
    // The same as NORESERVE for a mapping that can't be written.
    let addr = t.map(0, M, Prot::empty(), PRIVATE).unwrap();
    assert_eq!(t.reserved(), 1);
    t.unmap(addr, M).unwrap();
}

#[test]
fn shared_reservations_stay_until_the_last_mapping_goes() {
    let t = tested();
    t.base(2, SHARED);
    t.unmap(BASE, M).unwrap();
    assert_eq!(t.reserved(), 2);
    let child = t.space.dup().unwrap();
    t.unmap(BASE, 4 * M).unwrap();
    assert_eq!(t.reserved(), 2);
    drop(child);
    assert_eq!(t.reserved(), 0);
    t.base(2, SHARED);
    assert_eq!(
        t.remap(BASE, 2 * M, 2 * M, 3, BASE + 16 * M),
        Ok(BASE + 16 * M)
    );
    assert_eq!(t.reserved(), 2);
    drop(t.space);
    assert_eq!(t.pool.stats().reserved, 0);
}

#[test]
fn a_child_reserves_nothing_of_private_mappings() {
    let t = tested();
    t.base(4, PRIVATE);
    let child = t.space.dup().unwrap();
    assert_eq!(t.reserved(), 4);
    child.unmap(BASE, M).unwrap();
    drop(child);
    assert_eq!(t.reserved(), 4);
    let child = t.space.dup().unwrap();
    drop(t.space);
    assert_eq!(t.pool.stats().reserved, 0);
    child.unmap(BASE, 4 * M).unwrap();
    assert_eq!(t.pool.stats().reserved, 0);
}

/// By the time that Linux asks for pages, what was there is gone, and it stays so.
#[test]
fn a_fixed_mapping_that_gets_no_pages_leaves_a_hole() {
    let t = tested();
    t.plain(BASE, 4 * M).unwrap();
    assert_eq!(t.map(BASE, 9 * M, RW, PRIVATE | FIXED), Err(Errno::ENOMEM));
    t.shows(&[]);
    t.plain(BASE, 4 * M).unwrap();
    let all = t.map(0, 8 * M, RW, PRIVATE).unwrap();
    assert_eq!(t.map(BASE + M, M, RW, PRIVATE | FIXED), Err(Errno::ENOMEM));
    t.shows(&[(0, 1, "rw-p", 0), (2, 4, "rw-p", 0)]);
    let odd = t.map_offset(BASE, M, RW, PRIVATE | FIXED, PAGE);
    assert_eq!(odd, Err(Errno::EINVAL));
    t.shows(&[(2, 4, "rw-p", 0)]);
    t.unmap(all, 8 * M).unwrap();
    // What goes in the same call counts, of private mappings.
    t.unmap(BASE, 4 * M).unwrap();
    t.base(8, PRIVATE);
    t.base(8, PRIVATE);
    assert_eq!(
        t.map(BASE + 2 * M, 4 * M, RW, PRIVATE | FIXED),
        Ok(BASE + 2 * M)
    );
    assert_eq!(t.reserved(), 8);
    t.shows(&[(0, 2, "rw-p", 0), (2, 6, "rw-p", 0), (6, 8, "rw-p", 6)]);
    assert_eq!(t.map(BASE, 9 * M, RW, PRIVATE | FIXED), Err(Errno::ENOMEM));
    t.shows(&[]);
    assert_eq!(t.reserved(), 0);
    t.base(8, SHARED);
    assert_eq!(t.map(BASE, 8 * M, RW, SHARED | FIXED), Err(Errno::ENOMEM));
    t.shows(&[]);
    assert_eq!(t.reserved(), 0);
}

#[test]
fn plain_mappings_replace_whole_huge_pages_only() {
    let t = tested();
    t.base(2, PRIVATE);
    assert_eq!(t.plain(BASE + PAGE, PAGE), Err(Errno::EINVAL));
    t.shows(&[(0, 2, "rw-p", 0)]);
    t.plain(BASE + M, 2 * M).unwrap();
    assert_eq!(t.reserved(), 1);
}

#[test]
fn offsets_are_kept_and_the_file_is_as_long_as_a_writable_mapping() {
    let t = tested();
    let touch = |addr| t.space.touch(addr, 1, Access::Read);
    let addr = t.map_offset(0, M, RW, PRIVATE, M).unwrap();
    assert_eq!(t.space.maps_entries()[0].offset, M);
    assert_eq!(touch(addr), Ok(()));
    t.unmap(addr, M).unwrap();
    let addr = t.map_offset(0, M, Prot::READ, PRIVATE, M).unwrap();
    assert_eq!(touch(addr), Err(FaultError::BeyondEnd(addr)));
    t.unmap(addr, M).unwrap();
    let addr = t.map_offset(0, 2 * M, Prot::READ, PRIVATE, M).unwrap();
    assert_eq!(touch(addr), Ok(()));
    assert_eq!(touch(addr + M), Err(FaultError::BeyondEnd(addr + M)));
    t.unmap(addr, 2 * M).unwrap();
    let addr = t.map_offset(0, M, RW, PRIVATE, 1 << 62).unwrap();
    assert_eq!(touch(addr), Ok(()));
}

#[test]
fn neighbours_never_become_one() {
    let t = tested();
    for (at, flags) in [(0, PRIVATE), (1, PRIVATE), (2, SHARED), (3, SHARED)] {
        t.map(BASE + at * M, M, RW, flags | FIXED).unwrap();
    }
    t.shows(&[
        (0, 1, "rw-p", 0),
        (1, 2, "rw-p", 0),
        (2, 3, "rw-s", 0),
        (3, 4, "rw-s", 0),
    ]);
}

#[test]
fn munmap_takes_whole_pages() {
    let t = tested();
    t.base(4, PRIVATE);
    for (addr, len) in [
        (BASE + PAGE, M),
        (BASE, PAGE),
        (BASE + PAGE, M - PAGE),
        (BASE - M, M + PAGE),
    ] {
        assert_eq!(t.unmap(addr, len), Err(Errno::EINVAL));
    }
    t.shows(&[(0, 4, "rw-p", 0)]);
    assert_eq!(t.unmap(BASE - PAGE, M + PAGE), Ok(()));
    assert_eq!(t.unmap(BASE + 2 * M, M), Ok(()));
    t.shows(&[(1, 2, "rw-p", 1), (3, 4, "rw-p", 3)]);
    assert_eq!(t.reserved(), 2);
    assert_eq!(t.unmap(BASE, 6 * M + PAGE), Ok(()));
    t.shows(&[]);
    assert_eq!(t.reserved(), 0);
}

#[test]
fn mprotect_splits_between_pages_and_nothing_merges_again() {
    let t = tested();
    t.base(4, PRIVATE);
    let protect = |addr, len, prot| {
        let result = t.space.protect(addr, len, prot);
        result.map_err(ProtectError::errno)
    };
    assert_eq!(protect(BASE, PAGE, Prot::READ), Err(Errno::EINVAL));
    assert_eq!(protect(BASE + PAGE, M, Prot::READ), Err(Errno::EINVAL));
    assert_eq!(protect(BASE + PAGE, PAGE, RW), Ok(()), "no change");
    assert_eq!(protect(BASE, M, Prot::READ), Ok(()));
    assert_eq!(protect(BASE, M, RW), Ok(()));
    t.shows(&[(0, 1, "rw-p", 0), (1, 4, "rw-p", 1)]);
    assert_eq!(protect(BASE + M, M + PAGE, Prot::READ), Err(Errno::EINVAL));
    assert_eq!(protect(BASE + 2 * M, 2 * M, Prot::READ), Ok(()));
    assert_eq!(protect(BASE, M, Prot::READ | Prot::EXEC), Ok(()));
    t.shows(&[(0, 1, "r-xp", 0), (1, 2, "rw-p", 1), (2, 4, "r--p", 2)]);
    let down = protect(BASE, M, Prot::READ | Prot::GROWSDOWN);
    assert_eq!(down, Err(Errno::EINVAL));
    assert_eq!(t.reserved(), 4);
    let totals = t.space.totals();
    assert_eq!((totals.committed, totals.locked), (0, 0));
    assert_eq!((totals.total, totals.data, totals.exec), (2048, 512, 512));
}

/// Old and new length, flags, destination; what comes of it, in huge pages.
#[test]
fn mremap_knows_whole_pages_and_no_growth() {
    let to = BASE + 16 * M;
    let inval = Err(Errno::EINVAL);
    let fresh = || {
        let t = tested();
        t.base(2, PRIVATE);
        t
    };
    let same: &[(u64, u64, &str, u64)] = &[(0, 2, "rw-p", 0)];
    let moved: &[(u64, u64, &str, u64)] = &[(16, 18, "rw-p", 0)];
    let first: &[(u64, u64, &str, u64)] = &[(0, 1, "rw-p", 0)];
    let parted: &[(u64, u64, &str, u64)] = &[(1, 2, "rw-p", 1), (16, 17, "rw-p", 0)];
    let one_moved: &[(u64, u64, &str, u64)] = &[(16, 17, "rw-p", 0)];
    for (addr, old, new, flags, dest, expected, layout, reserved) in [
        (BASE, 2 * M, 2 * M, 0, 0, Ok(BASE), same, 2),
        (BASE + PAGE, PAGE, PAGE, 0, 0, inval, same, 2),
        (BASE, PAGE, PAGE, 0, 0, Ok(BASE), same, 2),
        // Nobody uses this address, but it's looked at.
        (BASE, 2 * M, 2 * M, 0, PAGE, inval, same, 2),
        (BASE, PAGE, 2 * PAGE, 0, 0, Ok(BASE), same, 2),
        (BASE, M, PAGE, 0, 0, Ok(BASE), same, 2),
        (BASE, 2 * M, M + PAGE, 0, 0, Ok(BASE), same, 2),
        (BASE, 2 * M, M, 0, 0, Ok(BASE), first, 1),
        (BASE, M + PAGE, M, 0, 0, Ok(BASE), first, 1),
        (BASE, 5 * M, M, 0, 0, Ok(BASE), first, 1),
        (BASE, 2 * M, 3 * M, 0, 0, inval, same, 2),
        (BASE, 2 * M, 3 * M, 1, 0, inval, same, 2),
        (BASE, 2 * M, 3 * M, 3, to, inval, same, 2),
        (BASE, 2 * M, 2 * M, 3, to, Ok(to), moved, 2),
        (BASE, 2 * M, 2 * M, 3, to + PAGE, inval, same, 2),
        // Linux loses the reservation of the page that stays: it's never given back.
        (BASE, PAGE, PAGE, 3, to, Ok(to), parted, 2),
        (BASE, 2 * M, M, 3, to, Ok(to), one_moved, 1),
        (BASE, 2 * M, PAGE, 3, to, Ok(to), one_moved, 1),
        (BASE, 2 * M, 2 * M, 5, 0, inval, same, 2),
        (BASE, 2 * M, 2 * M, 7, to, inval, same, 2),
        (BASE, 0, M, 1, 0, inval, same, 2),
        (BASE + 8 * M + PAGE, M, M, 0, 0, Err(Errno::EFAULT), same, 2),
    ] {
        let t = fresh();
        let got = t.remap(addr, old, new, flags, dest);
        let call = (addr - BASE, old, new, flags, dest);
        assert_eq!((got, t.reserved()), (expected, reserved), "{call:x?}");
        t.shows(layout);
        t.unmap(BASE, 32 * M).unwrap();
        assert_eq!(t.reserved(), 0);
    }
    let t = fresh();
    t.map(BASE + 2 * M, M, RW, PRIVATE | FIXED).unwrap();
    assert_eq!(t.remap(BASE, 3 * M, 3 * M, 3, to), Ok(to));
    t.shows(&[(16, 18, "rw-p", 0), (18, 19, "rw-p", 0)]);
    let t = fresh();
    t.plain(BASE - M, M).unwrap();
    let odd = t.remap(BASE - PAGE, M + PAGE, M + PAGE, 3, to);
    assert_eq!(odd, Err(Errno::EINVAL), "what comes before has moved");
    assert_eq!(t.space.maps_entries().len(), 3);
    let t = tested();
    t.base(2, SHARED);
    for (flags, new) in [(1, M), (3, M), (1, 0)] {
        assert_eq!(
            t.remap(BASE, 0, new, flags, if flags == 3 { to } else { 0 }),
            inval
        );
    }
}

/// For the whole mapping, 4096 bytes of it, 4096 bytes in its first page, its second page, a page from its middle, and a page
/// and 4096 bytes.
#[test]
fn advice_is_taken_as_linux_takes_it() {
    const RANGES: [(u64, u64); 6] = [
        (0, 2 * M),
        (0, PAGE),
        (PAGE, PAGE),
        (M, M),
        (PAGE, M),
        (0, M + PAGE),
    ];
    let yes = [true; 6];
    let no = [false; 6];
    let whole = [true, false, false, true, false, false];
    let start = [true, true, false, true, false, true];
    for (advice, private, shared, errno) in [
        (Advice::NORMAL, yes, yes, Errno::EINVAL),
        (Advice::RANDOM, whole, whole, Errno::EINVAL),
        (Advice::SEQUENTIAL, whole, whole, Errno::EINVAL),
        (Advice::WILLNEED, yes, yes, Errno::EINVAL),
        (Advice::DONTNEED, start, start, Errno::EINVAL),
        (Advice::FREE, no, no, Errno::EINVAL),
        (Advice::REMOVE, no, yes, Errno::EACCES),
        (Advice::DONTFORK, whole, whole, Errno::EINVAL),
        (Advice::DOFORK, yes, yes, Errno::EINVAL),
        (Advice::MERGEABLE, yes, yes, Errno::EINVAL),
        (Advice::UNMERGEABLE, yes, yes, Errno::EINVAL),
        (Advice::HUGEPAGE, whole, whole, Errno::EINVAL),
        (Advice::NOHUGEPAGE, whole, whole, Errno::EINVAL),
        (Advice::DONTDUMP, whole, whole, Errno::EINVAL),
        (Advice::DODUMP, yes, yes, Errno::EINVAL),
        (Advice::WIPEONFORK, no, no, Errno::EINVAL),
        (Advice::KEEPONFORK, yes, yes, Errno::EINVAL),
        (Advice::COLD, no, no, Errno::EINVAL),
        (Advice::PAGEOUT, no, no, Errno::EINVAL),
        (Advice::POPULATE_READ, yes, yes, Errno::EINVAL),
        (Advice::POPULATE_WRITE, yes, yes, Errno::EINVAL),
        (Advice::DONTNEED_LOCKED, start, start, Errno::EINVAL),
        (Advice::COLLAPSE, no, no, Errno::EINVAL),
        (Advice::GUARD_INSTALL, no, no, Errno::EINVAL),
        (Advice::GUARD_REMOVE, no, no, Errno::EINVAL),
    ] {
        for (flags, expected) in [(PRIVATE, private), (SHARED, shared)] {
            let got = RANGES.map(|(at, len)| {
                let t = tested();
                t.base(2, flags);
                let result = t.space.advise(BASE + at, len, advice);
                result.map_err(AdviseError::errno)
            });
            let expected = expected.map(|ok| if ok { Ok(()) } else { Err(errno) });
            assert_eq!(got, expected, "{advice:?} {flags:?}");
        }
    }
}

#[test]
fn locking_is_a_no_op_that_counts_nothing() {
    let t = tested();
    let base = || t.base(2, PRIVATE);
    base();
    t.space.mlock(BASE + PAGE, PAGE).unwrap();
    t.space
        .mlockall(LockAllFlags::CURRENT | LockAllFlags::FUTURE)
        .unwrap();
    base();
    t.map(0, M, RW, PRIVATE | MapFlags::LOCKED).unwrap();
    assert_eq!(t.space.totals().locked_vm(), 0);
    let limit = |bytes| move |c: &mut SpaceConfig| c.limits.memlock = bytes;
    let t = tested();
    t.base(2, PRIVATE);
    t.space.configure(limit(2 * PAGE)).unwrap();
    for len in [PAGE, M] {
        let locked = t.map(0, len, RW, PRIVATE | MapFlags::LOCKED);
        assert_eq!(locked, Err(Errno::EAGAIN));
    }
    let mlock = |len| t.space.mlock(BASE, len).map_err(LockError::errno);
    assert_eq!((mlock(PAGE), mlock(M)), (Ok(()), Err(Errno::ENOMEM)));
    t.space.configure(limit(0)).unwrap();
    let locked = t.map(0, PAGE, RW, PRIVATE | MapFlags::LOCKED);
    assert_eq!(locked, Err(Errno::EPERM));
    assert_eq!(mlock(PAGE), Err(Errno::EPERM));
}

#[test]
fn seals_and_names() {
    let t = tested();
    t.base(2, PRIVATE);
    let seal = |addr, len| t.space.seal(addr, len, 0).map_err(SealError::errno);
    assert_eq!(seal(BASE, PAGE), Err(Errno::EINVAL));
    assert_eq!(seal(BASE + PAGE, PAGE), Err(Errno::EINVAL));
    assert_eq!(seal(BASE, M), Ok(()));
    t.shows(&[(0, 1, "rw-p", 0), (1, 2, "rw-p", 1)]);
    assert_eq!(t.unmap(BASE, M), Err(Errno::EPERM));
    assert_eq!(t.unmap(BASE + PAGE, PAGE), Err(Errno::EPERM));
    let odd = t.remap(BASE + PAGE, PAGE, PAGE, 0, 0);
    assert_eq!(odd, Err(Errno::EPERM));
    assert_eq!(t.unmap(BASE + M, PAGE), Err(Errno::EINVAL));
}

#[test]
fn limits_count_whole_pages() {
    let limited = |change: fn(&mut SpaceConfig)| {
        let t = tested();
        t.space.configure(change).unwrap();
        t
    };
    let t = limited(|c| c.limits.address_space = M);
    assert!(t.map(0, 1, RW, PRIVATE).is_ok());
    assert_eq!(t.map(0, 1, RW, PRIVATE), Err(Errno::ENOMEM));
    assert_eq!(t.reserved(), 1);
    let t = limited(|c| c.limits.data = 3 << 20);
    assert!(t.map(0, M, RW, PRIVATE).is_ok());
    assert_eq!(t.map(0, 2 * M, RW, PRIVATE), Err(Errno::ENOMEM));
    let addr = t.map(0, 2 * M, Prot::READ, PRIVATE).unwrap();
    let writable = t.space.protect(addr, 2 * M, RW);
    assert_eq!(writable.map_err(ProtectError::errno), Err(Errno::ENOMEM));
    assert!(t.map(0, 2 * M, RW, SHARED).is_ok());
    assert_eq!(t.reserved(), 5);
}

#[test]
fn without_a_pool_there_are_no_huge_pages() {
    let space = AddressSpace::default();
    let request = MapRequest {
        flags: PRIVATE | NORESERVE,
        ..MapRequest::anonymous(M, RW)
    };
    let result = space.map(&request).map_err(MapError::errno);
    assert_eq!(result, Err(Errno::ENOMEM));
}
