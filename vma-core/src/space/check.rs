//! Structural checker (property C1).

use super::{AddressSpace, ReadGuard};
use crate::accounting::{Totals, recount};
use crate::addr::VmRange;
use crate::backend::Backend;

/// What is wrong with a space. Never seen, unless this library has a bug.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// Two mappings overlap or are out of order.
    #[error("{0} and {1} overlap")]
    Overlap(VmRange, VmRange),
    /// A mapping is empty, unaligned or beyond the address space.
    #[error("{0} is no valid range")]
    Range(VmRange),
    /// A cached total differs from a recount.
    #[error("totals are {cached:?}, a recount gives {counted:?}")]
    Totals {
        /// As kept.
        cached: Box<Totals>,
        /// As counted.
        counted: Box<Totals>,
    },
}

impl<B: Backend> ReadGuard<'_, B> {
    /// As [`AddressSpace::check`].
    ///
    /// # Errors
    /// As there.
    pub fn check(&self) -> Result<(), CheckError> {
        let config = self.space.config.load();
        let pages = config.pages();
        let mut last: Option<VmRange> = None;
        for vma in self.iter(0) {
            let range = vma.range();
            let aligned = pages.is_aligned(range.start) && pages.is_aligned(range.end);
            if range.is_empty() || !aligned || range.end > config.task_size {
                return Err(CheckError::Range(range));
            }
            if let Some(last) = last
                && last.end > range.start
            {
                return Err(CheckError::Overlap(last, range));
            }
            last = Some(range);
        }
        let cached = self.inner().totals;
        let counted = recount(
            self.iter(0).map(|vma| (vma.range().len(), vma.flags())),
            pages,
        );
        if (Totals {
            locked_surplus: 0,
            ..cached
        }) == counted
        {
            return Ok(());
        }
        Err(CheckError::Totals {
            cached: Box::new(cached),
            counted: Box::new(counted),
        })
    }
}

impl<B: Backend> AddressSpace<B> {
    /// Checks order, ranges and totals of the whole space: O(n), for tests.
    ///
    /// # Errors
    /// [`CheckError`], which means a bug of this library.
    pub fn check(&self) -> Result<(), CheckError> {
        self.read().check()
    }
}
