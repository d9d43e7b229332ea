//! mseal(2).

use super::draft::Draft;
use super::{AddressSpace, WriteGuard, rounded_range};
use crate::backend::Backend;
use crate::error::{Errno, PublishError, SplitError};
use crate::flags::VmaFlags;

/// Why a range couldn't be sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SealError {
    /// Flags aren't defined.
    #[error("flags {0:#x} aren't valid")]
    BadFlags(u64),
    /// Unaligned, or wraps around.
    #[error("mseal of {len:#x} bytes at {addr:#x}: unaligned or wraps around")]
    BadRange {
        /// Start.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// A hole; nothing was sealed.
    #[error("nothing is mapped at {0:#x}")]
    Unmapped(u64),
    /// A mapping couldn't be split; what lies before was sealed.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// No memory for records; nothing was changed.
    #[error(transparent)]
    Publish(#[from] PublishError),
}

impl SealError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            SealError::BadFlags(_) | SealError::BadRange { .. } => Errno::EINVAL,
            SealError::Unmapped(_) => Errno::ENOMEM,
            SealError::Split(error) => error.errno(),
            SealError::Publish(error) => error.errno(),
        }
    }
}

/// The first address in the range that isn't mapped.
pub(super) fn first_hole(draft: &Draft<'_>, start: u64, end: u64) -> Option<u64> {
    let mut at = start;
    while at < end {
        match draft.find(at) {
            Some(vma) => at = vma.end,
            None => return Some(at),
        }
    }
    None
}

fn apply(draft: &mut Draft<'_>, start: u64, end: u64) -> Result<(), SealError> {
    let mut at = start;
    while let Some(vma) = draft.find(at).filter(|_| at < end) {
        let to = vma.end.min(end);
        if vma.flags().contains(VmaFlags::SEALED) {
            at = to;
            continue;
        }
        let flags = vma.flags() | VmaFlags::SEALED;
        let extras = vma.vma.extras().cloned();
        draft.modify(at, to, flags, extras.as_ref())?;
        at = to;
    }
    Ok(())
}

impl<B: Backend> WriteGuard<'_, B> {
    /// As [`AddressSpace::seal`].
    ///
    /// # Errors
    /// As there.
    pub fn seal(&mut self, addr: u64, len: u64, flags: u64) -> Result<(), SealError> {
        if flags != 0 {
            return Err(SealError::BadFlags(flags));
        }
        let config = self.config();
        let bad = SealError::BadRange { addr, len };
        if !config.pages().is_aligned(addr) {
            return Err(bad);
        }
        let Some((start, end)) = rounded_range(config.pages(), addr, len).map_err(|()| bad)? else {
            return Ok(());
        };
        let mut changes = self.changes();
        let mut draft = self.draft(config, &mut changes);
        if let Some(hole) = first_hole(&draft, start, end) {
            return Err(SealError::Unmapped(hole));
        }
        let result = apply(&mut draft, start, end);
        self.commit(&mut changes)?;
        result
    }
}

impl<B: Backend> AddressSpace<B> {
    /// Seals a range against unmapping, moving, resizing and changes of protection, for ever (mseal(2)).
    ///
    /// # Errors
    /// | errno | when |
    /// |---|---|
    /// | `EINVAL` | flags; unaligned; wraps around |
    /// | `ENOMEM` | a hole in the range: nothing is sealed; the limit of mappings: what lies before is |
    ///
    /// Source: `do_mseal()` in mm/mseal.c.
    pub fn seal(&self, addr: u64, len: u64, flags: u64) -> Result<(), SealError> {
        self.write().seal(addr, len, flags)
    }
}
