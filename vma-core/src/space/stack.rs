//! Growth of mappings that grow down.

use super::draft::{Draft, Piece};
use super::{AddressSpace, WriteGuard};
use crate::accounting::{check_commit, check_expand, check_lock};
use crate::addr::VmRange;
use crate::backend::Backend;
use crate::error::{Errno, LimitError, PublishError};
use crate::flags::VmaFlags;

/// Why a stack didn't grow. A program gets `SIGSEGV` for all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrowError {
    /// The next mapping above doesn't grow down, or there is none.
    #[error("no stack lies above {0:#x}")]
    NoStack(u64),
    /// Below `vm.mmap_min_addr`.
    #[error("{addr:#x} lies below the lowest address, {min:#x}")]
    TooLow {
        /// Address.
        addr: u64,
        /// `vm.mmap_min_addr`.
        min: u64,
    },
    /// Too near the mapping below.
    #[error("growing to {addr:#x} leaves less than the guard gap above {below}")]
    GuardGap {
        /// Page.
        addr: u64,
        /// The mapping below.
        below: VmRange,
    },
    /// Its page offset would fall below 0 (a stack that was moved).
    #[error("the page offset of {0} can't go that low")]
    Offset(VmRange),
    /// A limit.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// No memory for records.
    #[error(transparent)]
    Publish(#[from] PublishError),
}

impl GrowError {
    /// What `expand_stack()` returns in the kernel.
    pub const fn errno(self) -> Errno {
        match self {
            GrowError::NoStack(_) => Errno::EFAULT,
            GrowError::TooLow { .. } => Errno::EPERM,
            GrowError::GuardGap { .. } | GrowError::Offset(_) => Errno::ENOMEM,
            GrowError::Limit(error) => error.errno(),
            GrowError::Publish(error) => error.errno(),
        }
    }
}

/// Tests what has to be kept clear below. Source: head of `expand_downwards()`.
fn check_place(draft: &Draft<'_>, page: u64, stack: VmRange) -> Result<(), GrowError> {
    let config = draft.config;
    if page < config.mmap_min_addr {
        return Err(GrowError::TooLow {
            addr: page,
            min: config.mmap_min_addr,
        });
    }
    if let Some(below) = draft.prev(stack.start)
        && !below.flags().contains(VmaFlags::GROWSDOWN)
        && below.flags().is_accessible()
        && page.saturating_sub(below.end) < config.stack_guard_gap()
    {
        return Err(GrowError::GuardGap {
            addr: page,
            below: below.range(),
        });
    }
    Ok(())
}

/// Tests the limits and grows. Source: `acct_stack_growth()`.
fn grow(draft: &mut Draft<'_>, page: u64) -> Result<(), GrowError> {
    let Some(vma) = draft.next(page) else {
        return Err(GrowError::NoStack(page));
    };
    let (start, end, flags) = (vma.start, vma.end, vma.flags());
    let pages = draft.pages.count(start - page);
    let pgoff = vma
        .vma
        .pgoff()
        .checked_sub(pages)
        .ok_or(GrowError::Offset(vma.range()))?;
    let grown = vma.vma.clone().with_pgoff(pgoff);
    let (totals, config) = (draft.totals(), draft.config);
    check_expand(totals, config, flags, pages)?;
    if end - page > config.limits.stack {
        return Err(LimitError::Stack {
            wanted: end - page,
            limit: config.limits.stack,
        }
        .into());
    }
    check_lock(totals, config, flags, start - page)?;
    check_commit(totals, config, pages)?;
    draft.replace(page, end, smallvec::smallvec![Piece::new(page, end, grown)]);
    Ok(())
}

impl<B: Backend> WriteGuard<'_, B> {
    /// As [`AddressSpace::expand_stack`].
    ///
    /// # Errors
    /// As there.
    pub fn expand_stack(&mut self, addr: u64) -> Result<(), GrowError> {
        let config = self.config();
        let page = config.pages().floor(addr);
        let mut changes = self.changes();
        let draft = self.draft(config, &mut changes);
        let stack = draft.next(addr).ok_or(GrowError::NoStack(addr))?;
        if stack.start <= addr {
            return Ok(());
        }
        if !stack.flags().contains(VmaFlags::GROWSDOWN) {
            return Err(GrowError::NoStack(addr));
        }
        let range = stack.range();
        check_place(&draft, page, range)?;
        // Stays even when a limit refuses the growth.
        self.pager(config).identify(range.start);
        let mut draft = draft;
        let result = grow(&mut draft, page);
        self.commit(&mut changes)?;
        result
    }
}

impl<B: Backend> AddressSpace<B> {
    /// Grows the mapping above `addr` down to it, if it's one that grows down and `addr` lies below it. An address that is mapped
    /// is left alone.
    ///
    /// # Errors
    /// [`GrowError`]; the program would get `SIGSEGV`.
    ///
    /// Source: `expand_downwards()` in mm/vma.c.
    pub fn expand_stack(&self, addr: u64) -> Result<(), GrowError> {
        self.write().expand_stack(addr)
    }
}
