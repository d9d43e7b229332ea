//! Configuration: resource limits, placement policy, overcommit, capabilities, kernel contract.
//!
//! All of it is cold: a mutating call loads it once, a lookup never.

use crate::addr::Pages;
use crate::flags::VmaFlags;
use crate::huge::HugePool;

/// No limit (`RLIM_INFINITY`).
pub const UNLIMITED: u64 = u64::MAX;

/// Resource limits of the process, in bytes. [`UNLIMITED`] means none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// `RLIMIT_AS`: everything mapped.
    pub address_space: u64,
    /// `RLIMIT_DATA`: private writable mappings that aren't stacks.
    pub data: u64,
    /// The hard limit of `RLIMIT_DATA`; it only matters where the soft limit is 0, which Linux then reads as the hard one.
    pub data_max: u64,
    /// `RLIMIT_MEMLOCK`: locked mappings. Not applied with [`SpaceConfig::ipc_lock`].
    pub memlock: u64,
    /// `RLIMIT_STACK`: a single mapping that grows down.
    pub stack: u64,
}

impl Default for Limits {
    /// No limits, but for a stack of 8 MiB.
    fn default() -> Self {
        Limits {
            address_space: UNLIMITED,
            data: UNLIMITED,
            data_max: UNLIMITED,
            memlock: UNLIMITED,
            stack: 8 << 20,
        }
    }
}

/// `vm.overcommit_memory`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Overcommit {
    /// Mode 0: a single request may not exceed RAM plus swap, given in pages.
    Heuristic {
        /// RAM plus swap, in pages.
        memory_pages: u64,
    },
    /// Mode 1: everything is allowed.
    Always,
    /// Mode 2: the sum of all charges may not exceed a limit; `MAP_NORESERVE` isn't honoured.
    Never {
        /// The commit limit, in pages.
        limit_pages: u64,
    },
}

/// Where the kernel looks for a free place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// From [`SpaceConfig::mmap_base`] down: the default.
    #[default]
    TopDown,
    /// From a third of the address space up: the legacy layout (`ADDR_COMPAT_LAYOUT`, or an unlimited stack at exec).
    BottomUp,
}

/// Which kernel's behaviour to follow where kernels differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Semantics {
    /// Linux 6.18.
    #[default]
    Linux6_18,
}

/// What a space is created with. Fields can be changed later with
/// [`AddressSpace::configure`](crate::AddressSpace::configure), but for the page size and the address limit.
///
/// ```
/// use vma_core::{Limits, SpaceConfig};
/// let config = SpaceConfig {
///     limits: Limits { address_space: 1 << 30, ..Limits::default() },
///     ..SpaceConfig::default()
/// };
/// assert!(config.validate().is_ok());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent switches of a kernel"
)]
pub struct SpaceConfig {
    /// Bytes per page: a power of two, 4096 or more.
    pub page_size: u64,
    /// First address that isn't the user's (`TASK_SIZE`).
    pub task_size: u64,
    /// Where the top-down search begins; `None`: computed from the stack limit at creation, as exec does without randomisation.
    pub mmap_base: Option<u64>,
    /// Direction of the search.
    pub layout: Layout,
    /// Lowest address that can be mapped (`vm.mmap_min_addr`).
    pub mmap_min_addr: u64,
    /// Pages kept free below a mapping that grows down.
    pub stack_guard_gap_pages: u64,
    /// Resource limits.
    pub limits: Limits,
    /// `vm.max_map_count`.
    pub max_map_count: u64,
    /// `vm.overcommit_memory`.
    pub overcommit: Overcommit,
    /// `CAP_IPC_LOCK`: no limit on locked memory.
    pub ipc_lock: bool,
    /// `CAP_SYS_RAWIO`: may map below [`SpaceConfig::mmap_min_addr`].
    pub raw_io: bool,
    /// `READ_IMPLIES_EXEC` of personality(2).
    pub read_implies_exec: bool,
    /// Transparent huge pages are built in: 2 MiB placement, and `MAP_STACK` sets the no-huge-page flag.
    pub huge_pages: bool,
    /// Size of a transparent huge page, in bytes.
    pub huge_page_size: u64,
    /// Where `MAP_HUGETLB` finds pages of 2 MiB; `None`: such a mapping is `ENOMEM`, as on a machine without any. Of
    /// pages of 1 GiB there are none.
    pub hugetlb: Option<HugePool>,
    /// Names of anonymous mappings (`PR_SET_VMA_ANON_NAME`) are built in.
    pub anon_names: bool,
    /// Mappings with one of these flags are unmapped with the space's lock held until their pages are gone, if there
    /// is anything behind mappings. Linux did that with `HUGETLB` and `PFNMAP` at first; nothing here needs it, but an embedder
    /// whose own frames must be out of use before another call comes.
    pub exclusive_unmap: VmaFlags,
    /// Calls publish with the locks of the reverse indexes held in which they enter something, as Linux did before 6.6: to
    /// compare with, nothing needs it.
    pub publish_under_index_lock: bool,
    /// Which kernel to follow.
    pub semantics: Semantics,
}

impl Default for SpaceConfig {
    /// Linux 6.18 on x86-64 with 4-level page tables.
    fn default() -> Self {
        SpaceConfig {
            page_size: 4096,
            task_size: 0x7fff_ffff_f000,
            mmap_base: None,
            layout: Layout::TopDown,
            mmap_min_addr: 4096,
            stack_guard_gap_pages: 256,
            limits: Limits::default(),
            max_map_count: 65530,
            overcommit: Overcommit::Heuristic {
                memory_pages: u64::MAX,
            },
            ipc_lock: false,
            raw_io: false,
            read_implies_exec: false,
            huge_pages: true,
            huge_page_size: 2 << 20,
            hugetlb: None,
            anon_names: false,
            exclusive_unmap: VmaFlags::empty(),
            publish_under_index_lock: false,
            semantics: Semantics::Linux6_18,
        }
    }
}

/// A configuration that no kernel could have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Not a power of two, or below 4096, or above 2^30.
    #[error("page size {0} isn't a power of two from 4096 to 2^30")]
    PageSize(u64),
    /// Unaligned, zero, or beyond 2^63.
    #[error("task size {0:#x} isn't page-aligned, is 0 or lies beyond 2^63")]
    TaskSize(u64),
    /// Not a power of two, or smaller than a page.
    #[error("huge page size {0} isn't a power of two of at least a page")]
    HugePageSize(u64),
    /// Above the task size or unaligned.
    #[error("mmap base {0:#x} is unaligned or lies above the task size")]
    MmapBase(u64),
    /// The stack guard gap doesn't fit the address space.
    #[error("a stack guard gap of {0} pages exceeds the address space")]
    GuardGap(u64),
    /// A value was changed that is fixed at creation.
    #[error("page size and task size can't change after creation")]
    Fixed,
    /// The backend has pages of another size, serves another space already, or has no memory.
    #[error(
        "the backend can't serve a space of this page size, or serves another one, or has no memory"
    )]
    Backend,
}

impl SpaceConfig {
    /// Checks the values that arithmetic relies on.
    ///
    /// # Errors
    /// A [`ConfigError`] that names the value.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if !self.page_size.is_power_of_two() || !(4096..=1 << 30).contains(&self.page_size) {
            return Err(ConfigError::PageSize(self.page_size));
        }
        let pages = Pages::new(self.page_size);
        if self.task_size == 0 || !pages.is_aligned(self.task_size) || self.task_size > 1 << 63 {
            return Err(ConfigError::TaskSize(self.task_size));
        }
        if !self.huge_page_size.is_power_of_two()
            || !(self.page_size..=1 << 40).contains(&self.huge_page_size)
        {
            return Err(ConfigError::HugePageSize(self.huge_page_size));
        }
        if let Some(base) = self.mmap_base
            && (!pages.is_aligned(base) || base > self.task_size)
        {
            return Err(ConfigError::MmapBase(base));
        }
        if self.stack_guard_gap_pages > pages.count(self.task_size) {
            return Err(ConfigError::GuardGap(self.stack_guard_gap_pages));
        }
        Ok(())
    }

    pub(crate) fn pages(&self) -> Pages {
        Pages::new(self.page_size)
    }

    /// Bytes kept free below a mapping that grows down.
    pub(crate) fn stack_guard_gap(&self) -> u64 {
        self.pages().bytes(self.stack_guard_gap_pages)
    }

    /// Where the top-down search begins. Source: `mmap_base()` in arch/x86/mm/mmap.c, without randomisation.
    pub(crate) fn base(&self) -> u64 {
        self.mmap_base.unwrap_or_else(|| {
            let least = 128 << 20;
            let most = (self.task_size / 6).saturating_mul(5);
            let gap = self
                .limits
                .stack
                .saturating_add(self.stack_guard_gap())
                .max(least)
                .min(most.max(self.page_size));
            let base = self.task_size.saturating_sub(gap);
            self.pages().ceil_wrapping(base)
        })
    }

    /// Where the bottom-up search begins (`TASK_UNMAPPED_BASE`).
    pub(crate) fn legacy_base(&self) -> u64 {
        self.pages().ceil_wrapping(self.task_size / 3)
    }

    /// Whether locked memory may be had at all (`can_do_mlock`).
    pub(crate) fn may_lock(&self) -> bool {
        self.ipc_lock || self.limits.memlock != 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_default_base_is_that_of_an_exec_without_randomisation() {
        let config = SpaceConfig::default();
        assert_eq!(config.base(), 0x7fff_f7ff_f000);
        assert_eq!(config.legacy_base(), 0x2aaa_aaaa_b000);
    }

    #[test]
    fn impossible_values_are_named() {
        let with = |change: fn(&mut SpaceConfig)| {
            let mut config = SpaceConfig::default();
            change(&mut config);
            config.validate()
        };
        assert_eq!(with(|_| ()), Ok(()));
        assert_eq!(with(|c| c.page_size = 0), Err(ConfigError::PageSize(0)));
        assert_eq!(
            with(|c| c.page_size = 4097),
            Err(ConfigError::PageSize(4097))
        );
        assert_eq!(with(|c| c.task_size = 0), Err(ConfigError::TaskSize(0)));
        assert_eq!(
            with(|c| c.task_size = u64::MAX),
            Err(ConfigError::TaskSize(u64::MAX))
        );
        assert_eq!(
            with(|c| c.mmap_base = Some(1)),
            Err(ConfigError::MmapBase(1))
        );
        assert_eq!(
            with(|c| c.huge_page_size = 3),
            Err(ConfigError::HugePageSize(3))
        );
        assert_eq!(
            with(|c| c.stack_guard_gap_pages = u64::MAX),
            Err(ConfigError::GuardGap(u64::MAX))
        );
    }
}
