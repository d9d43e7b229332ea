//! What this process may do and what its kernel has, so that a space can be given the same.

use std::fs;
use std::path::Path;

use vma_core::{HugePool, Layout, Limits, Overcommit, SpaceConfig};

use super::{call, last_errno};

/// Facts of process and kernel.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    /// For a space that stands for the part of the process that is compared; limits are the process's own, less
    /// what it has mapped elsewhere.
    pub(crate) config: SpaceConfig,
    /// The processor has protection keys, and the kernel uses them for memory that can only be executed.
    pub(crate) protection_keys: bool,
    /// Advice about merging by content is known.
    pub(crate) ksm: bool,
}

/// Number of a capability.
const IPC_LOCK: u32 = 14;
const RAW_IO: u32 = 17;

/// Bit of personality(2).
const READ_IMPLIES_EXEC: u64 = 0x040_0000;

fn number_in(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// A field of `/proc/self/status`, first word.
pub(super) fn status(field: &str) -> Option<String> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.split_whitespace().next().map(str::to_owned)
}

/// Type of the limits' names, which differs between C libraries.
#[cfg(target_env = "gnu")]
pub(super) type Resource = libc::__rlimit_resource_t;
#[cfg(not(target_env = "gnu"))]
pub(super) type Resource = libc::c_int;

/// Soft and hard limit.
pub(super) fn limit(resource: Resource) -> (u64, u64) {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a live structure that is written.
    let got = unsafe { libc::getrlimit(resource, &raw mut limit) };
    assert_eq!(got, 0, "errno {}", last_errno());
    (limit.rlim_cur, limit.rlim_max)
}

fn page_size() -> u64 {
    // SAFETY: reads a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    size.try_into().unwrap()
}

fn personality() -> u64 {
    // SAFETY: this argument only asks.
    unsafe { call(libc::SYS_personality, [0xffff_ffff, 0, 0, 0, 0, 0]) }.unwrap_or(0)
}

impl Facts {
    /// Of this process as it is now.
    pub(crate) fn of_this_process() -> Self {
        let kib = |field| {
            status(field)
                .and_then(|value| value.parse::<u64>().ok())
                .unwrap_or(0)
                * 1024
        };
        let capabilities =
            status("CapEff").map_or(0, |hex| u64::from_str_radix(&hex, 16).unwrap_or(0));
        let capable = |bit: u32| capabilities & (1 << bit) != 0;
        let less = |limit: u64, used: u64| {
            if limit == libc::RLIM_INFINITY {
                limit
            } else {
                limit.saturating_sub(used)
            }
        };
        let (data, data_max) = limit(libc::RLIMIT_DATA);
        let stack = limit(libc::RLIMIT_STACK).0;
        let mappings = fs::read_to_string("/proc/self/maps")
            .unwrap()
            .lines()
            .count() as u64;
        let limits = Limits {
            address_space: less(limit(libc::RLIMIT_AS).0, kib("VmSize")),
            data: less(data, kib("VmData")),
            data_max: less(data_max, kib("VmData")),
            memlock: less(limit(libc::RLIMIT_MEMLOCK).0, kib("VmLck")),
            stack,
        };
        let overcommit = match number_in("/proc/sys/vm/overcommit_memory") {
            Some(1) => Overcommit::Always,
            Some(2) => Overcommit::Never {
                limit_pages: u64::MAX,
            },
            _ => Overcommit::Heuristic {
                memory_pages: u64::MAX,
            },
        };
        let config = SpaceConfig {
            page_size: page_size(),
            layout: if stack == libc::RLIM_INFINITY {
                Layout::BottomUp
            } else {
                Layout::TopDown
            },
            mmap_min_addr: number_in("/proc/sys/vm/mmap_min_addr").unwrap_or(4096),
            limits,
            max_map_count: number_in("/proc/sys/vm/max_map_count")
                .unwrap_or(65530)
                .saturating_sub(mappings),
            overcommit,
            ipc_lock: capable(IPC_LOCK),
            raw_io: capable(RAW_IO),
            read_implies_exec: personality() & READ_IMPLIES_EXEC != 0,
            huge_pages: Path::new("/sys/kernel/mm/transparent_hugepage").exists(),
            hugetlb: Some(HugePool::new(super::huge::available())),
            ..SpaceConfig::default()
        };
        let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        Facts {
            config,
            protection_keys: cpu.split_whitespace().any(|flag| flag == "ospke"),
            ksm: Path::new("/sys/kernel/mm/ksm").exists(),
        }
    }
}

/// Number of mseal(2), and of an advice that kernels before 6.13 don't know.
const GUARD_INSTALL: u64 = 102;

/// Why this system's results can't be compared with those of Linux 6.18; `None` if they can.
pub(crate) fn why_not_comparable() -> Option<String> {
    if !cfg!(target_arch = "x86_64") {
        return Some(format!("this is {}, not x86-64", std::env::consts::ARCH));
    }
    let release = match fs::read_to_string("/proc/sys/kernel/osrelease") {
        Ok(release) => release.trim().to_owned(),
        Err(error) => return Some(format!("/proc/sys/kernel/osrelease: {error}")),
    };
    if !(release == "6.18" || release.starts_with("6.18.") || release.starts_with("6.18-")) {
        return Some(format!("the running kernel is {release}, not 6.18"));
    }
    // SAFETY: a length of 0 touches nothing.
    let seal = unsafe { call(libc::SYS_mseal, [0; 6]) };
    if let Err(errno) = seal {
        return Some(format!("mseal isn't there: errno {errno}"));
    }
    // SAFETY: a length of 0 touches nothing.
    let guard = unsafe { call(libc::SYS_madvise, [0, 0, GUARD_INSTALL, 0, 0, 0]) };
    if let Err(errno) = guard {
        return Some(format!("there are no guard pages: errno {errno}"));
    }
    for path in ["/proc/self/smaps", "/proc/self/status", "/dev/zero"] {
        if let Err(error) = fs::File::open(path) {
            return Some(format!("{path}: {error}"));
        }
    }
    None
}
