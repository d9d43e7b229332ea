//! Flag words of the calls and of VMAs, with Linux's bit values (x86-64).
//!
//! All of them keep unknown bits (`from_bits_retain`): which unknown bit is an error and which is ignored
//! differs between calls, and is judged there.

use bitflags::bitflags;

bitflags! {
    /// `PROT_*` of mmap(2) and mprotect(2).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Prot: u64 {
        /// `PROT_READ`
        const READ = 1;
        /// `PROT_WRITE`
        const WRITE = 2;
        /// `PROT_EXEC`
        const EXEC = 4;
        /// `PROT_SEM`: accepted and ignored.
        const SEM = 8;
        /// `PROT_GROWSDOWN`: extend the change to the start of a mapping that grows down.
        const GROWSDOWN = 0x0100_0000;
        /// `PROT_GROWSUP`: no mapping grows up on x86-64.
        const GROWSUP = 0x0200_0000;
        const _ = !0;
    }

    /// `MAP_*` of mmap(2).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct MapFlags: u64 {
        /// `MAP_SHARED`
        const SHARED = 1;
        /// `MAP_PRIVATE`
        const PRIVATE = 2;
        /// `MAP_SHARED_VALIDATE` (equals `SHARED | PRIVATE`)
        const SHARED_VALIDATE = 3;
        /// `MAP_DROPPABLE`
        const DROPPABLE = 8;
        /// `MAP_FIXED`
        const FIXED = 0x10;
        /// `MAP_ANONYMOUS`
        const ANONYMOUS = 0x20;
        /// `MAP_32BIT`
        const BITS_32 = 0x40;
        /// `MAP_ABOVE4G`
        const ABOVE4G = 0x80;
        /// `MAP_GROWSDOWN`
        const GROWSDOWN = 0x100;
        /// `MAP_DENYWRITE`: ignored.
        const DENYWRITE = 0x800;
        /// `MAP_EXECUTABLE`: ignored.
        const EXECUTABLE = 0x1000;
        /// `MAP_LOCKED`
        const LOCKED = 0x2000;
        /// `MAP_NORESERVE`
        const NORESERVE = 0x4000;
        /// `MAP_POPULATE`
        const POPULATE = 0x8000;
        /// `MAP_NONBLOCK`
        const NONBLOCK = 0x1_0000;
        /// `MAP_STACK`
        const STACK = 0x2_0000;
        /// `MAP_HUGETLB`
        const HUGETLB = 0x4_0000;
        /// `MAP_SYNC`
        const SYNC = 0x8_0000;
        /// `MAP_FIXED_NOREPLACE`
        const FIXED_NOREPLACE = 0x10_0000;
        /// `MAP_UNINITIALIZED`: ignored.
        const UNINITIALIZED = 0x400_0000;
        const _ = !0;
    }

    /// `MREMAP_*` of mremap(2).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct RemapFlags: u64 {
        /// `MREMAP_MAYMOVE`
        const MAYMOVE = 1;
        /// `MREMAP_FIXED`
        const FIXED = 2;
        /// `MREMAP_DONTUNMAP`
        const DONTUNMAP = 4;
        const _ = !0;
    }

    /// Flags of mlock2(2).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct LockFlags: u64 {
        /// `MLOCK_ONFAULT`
        const ONFAULT = 1;
        const _ = !0;
    }

    /// `MCL_*` of mlockall(2).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct LockAllFlags: u64 {
        /// `MCL_CURRENT`
        const CURRENT = 1;
        /// `MCL_FUTURE`
        const FUTURE = 2;
        /// `MCL_ONFAULT`
        const ONFAULT = 4;
        const _ = !0;
    }

    /// `MS_*` of msync(2).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct SyncFlags: u64 {
        /// `MS_ASYNC`
        const ASYNC = 1;
        /// `MS_INVALIDATE`
        const INVALIDATE = 2;
        /// `MS_SYNC`
        const SYNC = 4;
        const _ = !0;
    }

    /// `PR_MDWE_*` of prctl(2), `PR_SET_MDWE`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct MdweFlags: u64 {
        /// `PR_MDWE_REFUSE_EXEC_GAIN`
        const REFUSE_EXEC_GAIN = 1;
        /// `PR_MDWE_NO_INHERIT`
        const NO_INHERIT = 2;
        const _ = !0;
    }

    /// Attributes of a VMA, with the bit values of Linux's `vm_flags` on x86-64.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct VmaFlags: u64 {
        /// Readable (`rd`).
        const READ = 1;
        /// Writable (`wr`).
        const WRITE = 2;
        /// Executable (`ex`).
        const EXEC = 4;
        /// Shared, and opened for writing (`sh`).
        const SHARED = 8;
        /// May become readable (`mr`).
        const MAYREAD = 0x10;
        /// May become writable (`mw`).
        const MAYWRITE = 0x20;
        /// May become executable (`me`).
        const MAYEXEC = 0x40;
        /// Shared (`ms`): what maps shows as `s`.
        const MAYSHARE = 0x80;
        /// Grows down on a fault below it (`gd`).
        const GROWSDOWN = 0x100;
        /// userfaultfd, missing pages (`um`).
        const UFFD_MISSING = 0x200;
        /// Page frame numbers without `struct page` (`pf`).
        const PFNMAP = 0x400;
        /// May hold guard pages (`gu`).
        const MAYBE_GUARD = 0x800;
        /// userfaultfd, write protection (`uw`).
        const UFFD_WP = 0x1000;
        /// Locked (`lo`).
        const LOCKED = 0x2000;
        /// Device memory (`io`).
        const IO = 0x4000;
        /// Read sequentially (`sr`).
        const SEQ_READ = 0x8000;
        /// Read at random (`rr`).
        const RAND_READ = 0x1_0000;
        /// Not copied at fork (`dc`).
        const DONTCOPY = 0x2_0000;
        /// mremap may not grow it (`de`).
        const DONTEXPAND = 0x4_0000;
        /// Locked when faulted (`lf`).
        const LOCKONFAULT = 0x8_0000;
        /// Counted for overcommit (`ac`).
        const ACCOUNT = 0x10_0000;
        /// No reservation (`nr`).
        const NORESERVE = 0x20_0000;
        /// Huge page file (`ht`).
        const HUGETLB = 0x40_0000;
        /// Synchronous faults (`sf`).
        const SYNC = 0x80_0000;
        /// Of the architecture (`ar`).
        const ARCH_1 = 0x100_0000;
        /// Wiped in the child (`wf`).
        const WIPEONFORK = 0x200_0000;
        /// Left out of core dumps (`dd`).
        const DONTDUMP = 0x400_0000;
        /// Soft-dirty (`sd`).
        const SOFTDIRTY = 0x800_0000;
        /// Pages of both kinds (`mm`).
        const MIXEDMAP = 0x1000_0000;
        /// Transparent huge pages wanted (`hg`).
        const HUGEPAGE = 0x2000_0000;
        /// Transparent huge pages unwanted (`nh`).
        const NOHUGEPAGE = 0x4000_0000;
        /// May be merged by content (`mg`).
        const MERGEABLE = 0x8000_0000;
        /// Shadow stack (`ss`).
        const SHADOW_STACK = 1 << 37;
        /// May be dropped under memory pressure (`dp`).
        const DROPPABLE = 1 << 40;
        /// userfaultfd, minor faults (`ui`).
        const UFFD_MINOR = 1 << 41;
        /// Sealed (`sl`).
        const SEALED = 1 << 42;
        const _ = !0;
    }
}

impl VmaFlags {
    /// Read, write and execute.
    pub const ACCESS: VmaFlags = VmaFlags::READ.union(VmaFlags::WRITE).union(VmaFlags::EXEC);
    /// Never merged, never locked (Linux's `VM_SPECIAL`).
    pub const SPECIAL: VmaFlags = VmaFlags::IO
        .union(VmaFlags::DONTEXPAND)
        .union(VmaFlags::PFNMAP)
        .union(VmaFlags::MIXEDMAP);
    /// Not compared by merging: the merged mapping has what any part had.
    pub const STICKY: VmaFlags = VmaFlags::SOFTDIRTY.union(VmaFlags::MAYBE_GUARD);
    /// Both lock bits.
    pub const LOCK_BITS: VmaFlags = VmaFlags::LOCKED.union(VmaFlags::LOCKONFAULT);
    /// May be read, written and executed.
    pub const MAY: VmaFlags = VmaFlags::MAYREAD
        .union(VmaFlags::MAYWRITE)
        .union(VmaFlags::MAYEXEC);

    /// Any access is allowed.
    pub const fn is_accessible(self) -> bool {
        self.intersects(VmaFlags::ACCESS)
    }

    /// `rwxp` as maps shows it.
    pub fn perms(self) -> [u8; 4] {
        let bit = |flag, yes| if self.contains(flag) { yes } else { b'-' };
        [
            bit(VmaFlags::READ, b'r'),
            bit(VmaFlags::WRITE, b'w'),
            bit(VmaFlags::EXEC, b'x'),
            if self.contains(VmaFlags::MAYSHARE) {
                b's'
            } else {
                b'p'
            },
        ]
    }

    /// The two-letter codes of the `VmFlags` line of smaps, in its order.
    pub fn codes(self) -> impl Iterator<Item = &'static str> {
        CODES
            .iter()
            .filter(move |(flag, _)| self.contains(*flag))
            .map(|(_, code)| *code)
    }

    /// The flag that a two-letter code of smaps stands for.
    pub fn from_code(code: &str) -> Option<VmaFlags> {
        CODES
            .iter()
            .find(|(_, known)| *known == code)
            .map(|(flag, _)| *flag)
    }
}

/// In bit order, which is the order of smaps.
const CODES: [(VmaFlags, &str); 36] = [
    (VmaFlags::READ, "rd"),
    (VmaFlags::WRITE, "wr"),
    (VmaFlags::EXEC, "ex"),
    (VmaFlags::SHARED, "sh"),
    (VmaFlags::MAYREAD, "mr"),
    (VmaFlags::MAYWRITE, "mw"),
    (VmaFlags::MAYEXEC, "me"),
    (VmaFlags::MAYSHARE, "ms"),
    (VmaFlags::GROWSDOWN, "gd"),
    (VmaFlags::UFFD_MISSING, "um"),
    (VmaFlags::PFNMAP, "pf"),
    (VmaFlags::MAYBE_GUARD, "gu"),
    (VmaFlags::UFFD_WP, "uw"),
    (VmaFlags::LOCKED, "lo"),
    (VmaFlags::IO, "io"),
    (VmaFlags::SEQ_READ, "sr"),
    (VmaFlags::RAND_READ, "rr"),
    (VmaFlags::DONTCOPY, "dc"),
    (VmaFlags::DONTEXPAND, "de"),
    (VmaFlags::LOCKONFAULT, "lf"),
    (VmaFlags::ACCOUNT, "ac"),
    (VmaFlags::NORESERVE, "nr"),
    (VmaFlags::HUGETLB, "ht"),
    (VmaFlags::SYNC, "sf"),
    (VmaFlags::ARCH_1, "ar"),
    (VmaFlags::WIPEONFORK, "wf"),
    (VmaFlags::DONTDUMP, "dd"),
    (VmaFlags::SOFTDIRTY, "sd"),
    (VmaFlags::MIXEDMAP, "mm"),
    (VmaFlags::HUGEPAGE, "hg"),
    (VmaFlags::NOHUGEPAGE, "nh"),
    (VmaFlags::MERGEABLE, "mg"),
    (VmaFlags::SHADOW_STACK, "ss"),
    (VmaFlags::DROPPABLE, "dp"),
    (VmaFlags::UFFD_MINOR, "ui"),
    (VmaFlags::SEALED, "sl"),
];

/// The access bits that a protection asks for.
pub(crate) const fn prot_bits(prot: Prot) -> VmaFlags {
    // PROT_READ, PROT_WRITE and PROT_EXEC have the values of VM_READ, VM_WRITE and VM_EXEC.
    VmaFlags::from_bits_retain(prot.bits() & VmaFlags::ACCESS.bits())
}

macro_rules! advice {
    ($($name:ident = $value:literal, $text:literal;)*) => {
        /// `MADV_*` of madvise(2), as the number that the call takes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct Advice(pub i32);

        impl Advice {
            $(#[doc = $text] pub const $name: Advice = Advice($value);)*

            /// Whether the kernel knows the advice.
            pub const fn is_known(self) -> bool {
                matches!(self.0, $($value)|*)
            }
        }
    };
}

advice! {
    NORMAL = 0, "`MADV_NORMAL`";
    RANDOM = 1, "`MADV_RANDOM`";
    SEQUENTIAL = 2, "`MADV_SEQUENTIAL`";
    WILLNEED = 3, "`MADV_WILLNEED`";
    DONTNEED = 4, "`MADV_DONTNEED`";
    FREE = 8, "`MADV_FREE`";
    REMOVE = 9, "`MADV_REMOVE`";
    DONTFORK = 10, "`MADV_DONTFORK`";
    DOFORK = 11, "`MADV_DOFORK`";
    MERGEABLE = 12, "`MADV_MERGEABLE`";
    UNMERGEABLE = 13, "`MADV_UNMERGEABLE`";
    HUGEPAGE = 14, "`MADV_HUGEPAGE`";
    NOHUGEPAGE = 15, "`MADV_NOHUGEPAGE`";
    DONTDUMP = 16, "`MADV_DONTDUMP`";
    DODUMP = 17, "`MADV_DODUMP`";
    WIPEONFORK = 18, "`MADV_WIPEONFORK`";
    KEEPONFORK = 19, "`MADV_KEEPONFORK`";
    COLD = 20, "`MADV_COLD`";
    PAGEOUT = 21, "`MADV_PAGEOUT`";
    POPULATE_READ = 22, "`MADV_POPULATE_READ`";
    POPULATE_WRITE = 23, "`MADV_POPULATE_WRITE`";
    DONTNEED_LOCKED = 24, "`MADV_DONTNEED_LOCKED`";
    COLLAPSE = 25, "`MADV_COLLAPSE`";
    HWPOISON = 100, "`MADV_HWPOISON`";
    SOFT_OFFLINE = 101, "`MADV_SOFT_OFFLINE`";
    GUARD_INSTALL = 102, "`MADV_GUARD_INSTALL`";
    GUARD_REMOVE = 103, "`MADV_GUARD_REMOVE`";
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_smaps_code_stands_for_one_bit_and_they_are_in_bit_order() {
        let bits: Vec<u64> = CODES.iter().map(|(flag, _)| flag.bits()).collect();
        assert!(bits.iter().all(|bits| bits.is_power_of_two()));
        assert!(bits.windows(2).all(|pair| pair[0] < pair[1]));
        for (flag, code) in CODES {
            assert_eq!(VmaFlags::from_code(code), Some(flag));
        }
    }

    #[test]
    fn perms_follow_mayshare_not_shared() {
        let flags = VmaFlags::READ | VmaFlags::MAYSHARE;
        assert_eq!(&flags.perms(), b"r--s");
    }
}
