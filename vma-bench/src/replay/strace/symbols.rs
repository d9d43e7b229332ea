//! The constants that strace writes by name, as far as memory calls use them (x86-64 values).

use super::line::shorten;

/// A table of names and values.
pub type Table = &'static [(&'static str, u64)];

/// `prot` of mmap and mprotect.
pub const PROT: Table = &[
    ("PROT_NONE", 0),
    ("PROT_READ", 1),
    ("PROT_WRITE", 2),
    ("PROT_EXEC", 4),
    ("PROT_SEM", 8),
    ("PROT_GROWSDOWN", 0x0100_0000),
    ("PROT_GROWSUP", 0x0200_0000),
];

/// `flags` of mmap.
pub const MAP: Table = &[
    ("MAP_FILE", 0),
    ("MAP_SHARED", 1),
    ("MAP_PRIVATE", 2),
    ("MAP_SHARED_VALIDATE", 3),
    ("MAP_DROPPABLE", 8),
    ("MAP_FIXED", 0x10),
    ("MAP_ANONYMOUS", 0x20),
    ("MAP_ANON", 0x20),
    ("MAP_32BIT", 0x40),
    ("MAP_ABOVE4G", 0x80),
    ("MAP_GROWSDOWN", 0x100),
    ("MAP_DENYWRITE", 0x800),
    ("MAP_EXECUTABLE", 0x1000),
    ("MAP_LOCKED", 0x2000),
    ("MAP_NORESERVE", 0x4000),
    ("MAP_POPULATE", 0x8000),
    ("MAP_NONBLOCK", 0x1_0000),
    ("MAP_STACK", 0x2_0000),
    ("MAP_HUGETLB", 0x4_0000),
    ("MAP_SYNC", 0x8_0000),
    ("MAP_FIXED_NOREPLACE", 0x10_0000),
    ("MAP_UNINITIALIZED", 0x400_0000),
    ("MAP_HUGE_SHIFT", 26),
];

/// `flags` of mremap.
pub const MREMAP: Table = &[
    ("MREMAP_MAYMOVE", 1),
    ("MREMAP_FIXED", 2),
    ("MREMAP_DONTUNMAP", 4),
];

/// `advice` of madvise.
pub const MADV: Table = &[
    ("MADV_NORMAL", 0),
    ("MADV_RANDOM", 1),
    ("MADV_SEQUENTIAL", 2),
    ("MADV_WILLNEED", 3),
    ("MADV_DONTNEED", 4),
    ("MADV_FREE", 8),
    ("MADV_REMOVE", 9),
    ("MADV_DONTFORK", 10),
    ("MADV_DOFORK", 11),
    ("MADV_MERGEABLE", 12),
    ("MADV_UNMERGEABLE", 13),
    ("MADV_HUGEPAGE", 14),
    ("MADV_NOHUGEPAGE", 15),
    ("MADV_DONTDUMP", 16),
    ("MADV_DODUMP", 17),
    ("MADV_WIPEONFORK", 18),
    ("MADV_KEEPONFORK", 19),
    ("MADV_COLD", 20),
    ("MADV_PAGEOUT", 21),
    ("MADV_POPULATE_READ", 22),
    ("MADV_POPULATE_WRITE", 23),
    ("MADV_DONTNEED_LOCKED", 24),
    ("MADV_COLLAPSE", 25),
    ("MADV_HWPOISON", 100),
    ("MADV_SOFT_OFFLINE", 101),
    ("MADV_GUARD_INSTALL", 102),
    ("MADV_GUARD_REMOVE", 103),
];

/// `flags` of mlock2, mlockall, msync.
pub const LOCKS: Table = &[
    ("MLOCK_ONFAULT", 1),
    ("MCL_CURRENT", 1),
    ("MCL_FUTURE", 2),
    ("MCL_ONFAULT", 4),
    ("MS_ASYNC", 1),
    ("MS_INVALIDATE", 2),
    ("MS_SYNC", 4),
];

/// System V shared memory.
pub const SHM: Table = &[
    ("IPC_PRIVATE", 0),
    ("IPC_CREAT", 0o1000),
    ("IPC_EXCL", 0o2000),
    ("IPC_RMID", 0),
    ("IPC_SET", 1),
    ("IPC_STAT", 2),
    ("IPC_INFO", 3),
    ("SHM_HUGETLB", 0o4000),
    ("SHM_NORESERVE", 0o10000),
    ("SHM_RDONLY", 0o10000),
    ("SHM_RND", 0o20000),
    ("SHM_REMAP", 0o40000),
    ("SHM_EXEC", 0o100_000),
    ("SHM_LOCK", 11),
    ("SHM_UNLOCK", 12),
    ("SHM_STAT", 13),
    ("SHM_INFO", 14),
    ("SHM_STAT_ANY", 15),
];

/// `flags` of open, dup3, `close_range`, `memfd_create`.
pub const OPEN: Table = &[
    ("O_RDONLY", 0),
    ("O_WRONLY", 1),
    ("O_RDWR", 2),
    ("O_ACCMODE", 3),
    ("O_CREAT", 0o100),
    ("O_EXCL", 0o200),
    ("O_NOCTTY", 0o400),
    ("O_TRUNC", 0o1000),
    ("O_APPEND", 0o2000),
    ("O_NONBLOCK", 0o4000),
    ("O_NDELAY", 0o4000),
    ("O_DSYNC", 0o10000),
    ("O_SYNC", 0o4_010_000),
    ("O_ASYNC", 0o20000),
    ("O_DIRECT", 0o40000),
    ("O_LARGEFILE", 0o100_000),
    ("O_DIRECTORY", 0o200_000),
    ("O_NOFOLLOW", 0o400_000),
    ("O_NOATIME", 0o1_000_000),
    ("O_CLOEXEC", 0o2_000_000),
    ("O_PATH", 0o10_000_000),
    ("O_TMPFILE", 0o20_200_000),
    ("CLOSE_RANGE_UNSHARE", 2),
    ("CLOSE_RANGE_CLOEXEC", 4),
    ("MFD_CLOEXEC", 1),
    ("MFD_ALLOW_SEALING", 2),
    ("MFD_HUGETLB", 4),
    ("MFD_NOEXEC_SEAL", 8),
    ("MFD_EXEC", 0x10),
    ("AT_REMOVEDIR", 0x200),
    ("RENAME_NOREPLACE", 1),
    ("RENAME_EXCHANGE", 2),
    ("RENAME_WHITEOUT", 4),
    ("AT_SYMLINK_FOLLOW", 0x400),
    ("AT_EMPTY_PATH", 0x1000),
];

/// `flags` of clone; the signal in its low byte doesn't matter here.
pub const CLONE: Table = &[
    ("CLONE_VM", 0x100),
    ("CLONE_FS", 0x200),
    ("CLONE_FILES", 0x400),
    ("CLONE_SIGHAND", 0x800),
    ("CLONE_PIDFD", 0x1000),
    ("CLONE_PTRACE", 0x2000),
    ("CLONE_VFORK", 0x4000),
    ("CLONE_PARENT", 0x8000),
    ("CLONE_THREAD", 0x1_0000),
    ("CLONE_NEWNS", 0x2_0000),
    ("CLONE_SYSVSEM", 0x4_0000),
    ("CLONE_SETTLS", 0x8_0000),
    ("CLONE_PARENT_SETTID", 0x10_0000),
    ("CLONE_CHILD_CLEARTID", 0x20_0000),
    ("CLONE_DETACHED", 0x40_0000),
    ("CLONE_UNTRACED", 0x80_0000),
    ("CLONE_CHILD_SETTID", 0x100_0000),
    ("CLONE_NEWCGROUP", 0x200_0000),
    ("CLONE_NEWUTS", 0x400_0000),
    ("CLONE_NEWIPC", 0x800_0000),
    ("CLONE_NEWUSER", 0x1000_0000),
    ("CLONE_NEWPID", 0x2000_0000),
    ("CLONE_NEWNET", 0x4000_0000),
    ("CLONE_IO", 0x8000_0000),
    ("CLONE_CLEAR_SIGHAND", 0x1_0000_0000),
    ("CLONE_INTO_CGROUP", 0x2_0000_0000),
];

/// `persona` of personality.
pub const PERSONALITY: Table = &[
    ("PER_LINUX", 0),
    ("UNAME26", 0x2_0000),
    ("ADDR_NO_RANDOMIZE", 0x4_0000),
    ("FDPIC_FUNCPTRS", 0x8_0000),
    ("MMAP_PAGE_ZERO", 0x10_0000),
    ("ADDR_COMPAT_LAYOUT", 0x20_0000),
    ("READ_IMPLIES_EXEC", 0x40_0000),
    ("ADDR_LIMIT_32BIT", 0x80_0000),
    ("SHORT_INODE", 0x100_0000),
    ("WHOLE_SECONDS", 0x200_0000),
    ("STICKY_TIMEOUTS", 0x400_0000),
    ("ADDR_LIMIT_3GB", 0x800_0000),
];

/// Resources and limits.
pub const RLIMIT: Table = &[
    ("RLIMIT_DATA", 2),
    ("RLIMIT_STACK", 3),
    ("RLIMIT_MEMLOCK", 8),
    ("RLIMIT_AS", 9),
    ("RLIM64_INFINITY", u64::MAX),
    ("RLIM_INFINITY", u64::MAX),
];

/// Descriptors by name.
pub const FD: Table = &[("AT_FDCWD", (-100_i64).cast_unsigned())];

/// The value of an expression such as `PROT_READ|PROT_WRITE`, `8192*1024`, `1<<12`, `-1`, `0600`, `NULL`; comments are
/// passed over.
///
/// # Errors
/// A name that isn't in `table` or a number that isn't one.
pub fn eval(text: &str, table: Table) -> Result<u64, String> {
    let plain = without_comments(text);
    let mut value = 0_u64;
    for part in plain.split('|').filter(|p| !p.is_empty()) {
        value |= product(part.trim(), table)?;
    }
    Ok(value)
}

fn product(text: &str, table: Table) -> Result<u64, String> {
    if let Some((base, shift)) = text.split_once("<<") {
        let (base, shift) = (product(base.trim(), table)?, product(shift.trim(), table)?);
        return Ok(u32::try_from(shift)
            .ok()
            .and_then(|s| base.checked_shl(s))
            .unwrap_or(0));
    }
    let mut value = 1_u64;
    for factor in text.split('*') {
        value = value.wrapping_mul(atom(factor.trim(), table)?);
    }
    Ok(value)
}

fn atom(text: &str, table: Table) -> Result<u64, String> {
    if text == "NULL" {
        return Ok(0);
    }
    if let Some(&(_, value)) = table.iter().find(|(name, _)| *name == text) {
        return Ok(value);
    }
    number(text).ok_or_else(|| {
        format!(
            "{:?} is neither a number nor a constant known here",
            shorten(text)
        )
    })
}

/// A number as C writes it: decimal, `0x`, octal with a leading zero, negative.
pub fn number(text: &str) -> Option<u64> {
    if let Some(positive) = text.strip_prefix('-') {
        return number(positive).map(u64::wrapping_neg);
    }
    if let Some(hex) = text.strip_prefix("0x") {
        return digits(hex, 16);
    }
    match text.strip_prefix('0') {
        Some(octal) if !octal.is_empty() => digits(octal, 8),
        _ => digits(text, 10),
    }
}

fn digits(text: &str, radix: u32) -> Option<u64> {
    // from_str_radix takes a sign, C doesn't here.
    if text.starts_with(['+', '-']) {
        None
    } else {
        u64::from_str_radix(text, radix).ok()
    }
}

fn without_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("/*") {
        out.push_str(before);
        rest = after.split_once("*/").map_or("", |(_, rest)| rest);
    }
    out.push_str(rest);
    out.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_have_their_values() {
        for (text, table, value) in [
            ("NULL", PROT, 0),
            ("PROT_READ|PROT_WRITE", PROT, 3),
            ("PROT_READ|0x80", PROT, 0x81),
            ("8192*1024", RLIMIT, 8 << 20),
            ("1<<12", RLIMIT, 4096),
            ("0x66 /* MADV_??? */", MADV, 0x66),
            ("-1", FD, u64::MAX),
            ("0600", SHM, 0o600),
            ("18446744073709551615", PROT, u64::MAX),
            ("21<<MAP_HUGE_SHIFT", MAP, 21 << 26),
            ("1<<64", MAP, 0),
            ("RLIM64_INFINITY", RLIMIT, u64::MAX),
        ] {
            assert_eq!(eval(text, table), Ok(value), "{text}");
        }
    }

    #[test]
    fn what_has_no_value_is_an_error() {
        for text in [
            "PROT_NEW",
            "0xzz",
            "12a",
            "99999999999999999999",
            "0x",
            "-",
            "08",
            "+5",
            "0x+5",
            "--",
        ] {
            assert!(eval(text, PROT).is_err(), "{text}");
        }
    }
}
