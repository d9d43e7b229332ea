//! Totals of a space, and the limits that are tested against them.
//!
//! Every total but one is a function of the VMAs that exist, so a recount must give the same
//! (property C1). The exception is [`Totals::locked_surplus`].

use crate::addr::Pages;
use crate::error::LimitError;
use crate::flags::VmaFlags;
use crate::limits::{Overcommit, SpaceConfig, UNLIMITED};

/// Cached totals of a space. All but the first are pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Number of VMAs (`map_count`).
    pub map_count: u64,
    /// Everything mapped (`total_vm`, `VmSize`).
    pub total: u64,
    /// Private writable, not growing down (`data_vm`, `VmData`).
    pub data: u64,
    /// Executable, not writable, not growing down (`exec_vm`, `VmExe + VmLib`).
    pub exec: u64,
    /// Growing down (`stack_vm`, `VmStk`).
    pub stack: u64,
    /// Locked, as a recount of the VMAs gives it.
    pub locked: u64,
    /// Pages that Linux 6.18 still counts as locked although their VMA no longer is: mremap with
    /// `MREMAP_DONTUNMAP` takes the lock flag from its source and doesn't subtract the pages.
    pub locked_surplus: u64,
    /// Charged against the overcommit limit (VMAs with `ACCOUNT`).
    pub committed: u64,
}

impl Totals {
    /// `VmLck`, in pages.
    pub fn locked_vm(&self) -> u64 {
        self.locked + self.locked_surplus
    }

    pub(crate) fn add(&mut self, flags: VmaFlags, pages: u64) {
        self.map_count += 1;
        self.total += pages;
        if let Some(class) = self.class(flags) {
            *class += pages;
        }
        if flags.contains(VmaFlags::LOCKED) {
            self.locked += pages;
        }
        if flags.contains(VmaFlags::ACCOUNT) {
            self.committed += pages;
        }
    }

    pub(crate) fn remove(&mut self, flags: VmaFlags, pages: u64) {
        self.map_count -= 1;
        self.total -= pages;
        if let Some(class) = self.class(flags) {
            *class -= pages;
        }
        if flags.contains(VmaFlags::LOCKED) {
            self.locked -= pages;
        }
        if flags.contains(VmaFlags::ACCOUNT) {
            self.committed -= pages;
        }
    }

    /// The class that Linux counts a mapping in (`vm_stat_account`).
    fn class(&mut self, flags: VmaFlags) -> Option<&mut u64> {
        if flags.contains(VmaFlags::GROWSDOWN) {
            Some(&mut self.stack)
        } else if flags.contains(VmaFlags::EXEC) && !flags.contains(VmaFlags::WRITE) {
            Some(&mut self.exec)
        } else if is_data(flags) {
            Some(&mut self.data)
        } else {
            None
        }
    }
}

/// Private, writable and not a stack (`is_data_mapping`).
pub(crate) fn is_data(flags: VmaFlags) -> bool {
    let of_interest = VmaFlags::WRITE | VmaFlags::SHARED | VmaFlags::GROWSDOWN;
    flags & of_interest == VmaFlags::WRITE
}

/// Whether a new mapping of these flags is charged (`accountable_mapping`).
pub(crate) fn is_accountable(flags: VmaFlags) -> bool {
    let of_interest = VmaFlags::NORESERVE | VmaFlags::SHARED | VmaFlags::WRITE;
    flags & of_interest == VmaFlags::WRITE
}

/// `RLIMIT_AS` and `RLIMIT_DATA` for `wanted` more pages of these flags. Source: `may_expand_vm()`.
pub(crate) fn check_expand(
    totals: &Totals,
    config: &SpaceConfig,
    flags: VmaFlags,
    wanted: u64,
) -> Result<(), LimitError> {
    let pages = config.pages();
    let limits = &config.limits;
    if limits.address_space != UNLIMITED
        && totals.total.saturating_add(wanted) > pages.count(limits.address_space)
    {
        return Err(LimitError::AddressSpace {
            used: totals.total,
            wanted,
            limit: limits.address_space,
        });
    }
    if limits.data != UNLIMITED && is_data(flags) {
        let sum = totals.data.saturating_add(wanted);
        let limit = if limits.data == 0 {
            limits.data_max
        } else {
            limits.data
        };
        if sum > pages.count(limit) {
            return Err(LimitError::Data {
                used: totals.data,
                wanted,
                limit,
            });
        }
    }
    Ok(())
}

/// `RLIMIT_MEMLOCK` for `bytes` more of a mapping with these flags. Source: `mlock_future_ok()`.
pub(crate) fn check_lock(
    totals: &Totals,
    config: &SpaceConfig,
    flags: VmaFlags,
    bytes: u64,
) -> Result<(), LimitError> {
    if !flags.contains(VmaFlags::LOCKED) || config.ipc_lock {
        return Ok(());
    }
    check_lock_pages(totals.locked_vm(), config, config.pages().count(bytes))
}

/// `RLIMIT_MEMLOCK` for `wanted` pages more than `used`.
pub(crate) fn check_lock_pages(
    used: u64,
    config: &SpaceConfig,
    wanted: u64,
) -> Result<(), LimitError> {
    let limit = config.limits.memlock;
    if config.ipc_lock
        || limit == UNLIMITED
        || used.saturating_add(wanted) <= config.pages().count(limit)
    {
        return Ok(());
    }
    Err(LimitError::MemLock {
        used,
        wanted,
        limit,
    })
}

/// The overcommit policy for `wanted` more pages. Source: `__vm_enough_memory()`.
pub(crate) fn check_commit(
    totals: &Totals,
    config: &SpaceConfig,
    wanted: u64,
) -> Result<(), LimitError> {
    let (base, limit) = match config.overcommit {
        Overcommit::Always => return Ok(()),
        Overcommit::Heuristic { memory_pages } => (0, memory_pages),
        Overcommit::Never { limit_pages } => (totals.committed, limit_pages),
    };
    if base.saturating_add(wanted) <= limit {
        return Ok(());
    }
    Err(LimitError::Commit {
        committed: totals.committed,
        wanted,
        limit,
    })
}

/// `vm.max_map_count` where a split needs one more mapping.
pub(crate) fn check_split(totals: &Totals, config: &SpaceConfig) -> Result<(), LimitError> {
    if totals.map_count >= config.max_map_count {
        return Err(map_count_error(totals, config));
    }
    Ok(())
}

/// `vm.max_map_count` at the entry of mmap and brk, which let it be exceeded by one.
pub(crate) fn check_map_count(totals: &Totals, config: &SpaceConfig) -> Result<(), LimitError> {
    if totals.map_count > config.max_map_count {
        return Err(map_count_error(totals, config));
    }
    Ok(())
}

pub(crate) fn map_count_error(totals: &Totals, config: &SpaceConfig) -> LimitError {
    LimitError::MapCount {
        count: totals.map_count,
        max: config.max_map_count,
    }
}

/// Bytes to pages, for recounts.
pub(crate) fn recount<I: IntoIterator<Item = (u64, VmaFlags)>>(vmas: I, pages: Pages) -> Totals {
    let mut totals = Totals::default();
    for (bytes, flags) in vmas {
        totals.add(flags, pages.count(bytes));
    }
    totals
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn adding_and_removing_a_vma_of_each_class_leaves_nothing() {
        let mut totals = Totals::default();
        let classes = [
            VmaFlags::READ | VmaFlags::WRITE | VmaFlags::ACCOUNT,
            VmaFlags::READ | VmaFlags::EXEC,
            VmaFlags::GROWSDOWN | VmaFlags::WRITE | VmaFlags::LOCKED,
            VmaFlags::SHARED | VmaFlags::MAYSHARE | VmaFlags::WRITE,
        ];
        for flags in classes {
            totals.add(flags, 3);
        }
        assert_eq!(
            (totals.total, totals.data, totals.exec, totals.stack),
            (12, 3, 3, 3)
        );
        assert_eq!((totals.locked, totals.committed), (3, 3));
        for flags in classes {
            totals.remove(flags, 3);
        }
        assert_eq!(totals, Totals::default());
    }

    #[test]
    fn a_data_limit_of_zero_is_read_as_the_hard_limit() {
        let mut config = SpaceConfig::default();
        config.limits.data = 0;
        config.limits.data_max = 4 * 4096;
        let flags = VmaFlags::WRITE;
        let totals = Totals::default();
        assert!(check_expand(&totals, &config, flags, 4).is_ok());
        assert!(check_expand(&totals, &config, flags, 5).is_err());
    }
}
