//! What can go wrong.

use vma_rcu::wait::GaveUp;

use crate::error::Errno;
use crate::file::{FileKind, SpaceId};

/// Why a probe couldn't be registered. It's nowhere then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// The wait for dups ended, or it had ended before the probe was everywhere.
    #[error("the wait for a probe's registration ended: {0}")]
    GaveUp(#[from] GaveUp),
    /// There is no such byte in the file.
    #[error("a probe at byte {offset:#x} of a file of {len:#x} bytes")]
    BeyondEnd {
        /// As given.
        offset: u64,
        /// The file's length.
        len: u64,
    },
    /// What isn't read from pages of a file.
    #[error("a file of kind {0:?} can't have probes")]
    Unsupported(FileKind),
    /// [`Probe::install`](super::Probe::install) failed at one place.
    #[error("the probe couldn't be installed at {addr:#x} in {space:?}: {errno}")]
    Refused {
        /// In which space.
        space: SpaceId,
        /// Where in it.
        addr: u64,
        /// What it failed with.
        errno: Errno,
    },
    /// It was asked for by a probe's callback.
    #[error("a probe's callback can't register probes")]
    InCallback,
}

impl ProbeError {
    /// The error number; of [`Refused`](ProbeError::Refused) the callback's.
    pub const fn errno(self) -> Errno {
        match self {
            ProbeError::GaveUp(_) => Errno::EINTR,
            ProbeError::BeyondEnd { .. } => Errno::EINVAL,
            ProbeError::Unsupported(_) => Errno::EIO,
            ProbeError::Refused { errno, .. } => errno,
            ProbeError::InCallback => Errno::EBUSY,
        }
    }
}
