//! Why mremap(2) fails.

use crate::addr::VmRange;
use crate::error::{Errno, LimitError, PublishError};
use crate::space::map::MapError;
use crate::space::unmap::UnmapError;

/// Why nothing was moved or resized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RemapError {
    /// Unknown flags, or a combination that doesn't exist.
    #[error("flags {0:#x} aren't valid")]
    BadFlags(u64),
    /// An address isn't page-aligned.
    #[error("address {0:#x} isn't page-aligned")]
    Unaligned(u64),
    /// The new length is 0 or exceeds the address space.
    #[error("new length {0:#x}")]
    BadLength(u64),
    /// The destination ends beyond the address space.
    #[error("{len:#x} bytes at {addr:#x} end beyond the address space")]
    BeyondLimit {
        /// Destination.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// Source and destination overlap.
    #[error("source {source_addr:#x} and destination {addr:#x} overlap")]
    Overlap {
        /// Source.
        source_addr: u64,
        /// Destination.
        addr: u64,
    },
    /// Nothing is mapped at the source.
    #[error("nothing is mapped at {0:#x}")]
    Unmapped(u64),
    /// The range ends beyond the mapping.
    #[error("the range reaches beyond {0}")]
    Crosses(VmRange),
    /// Several mappings, of which one has to move alone.
    #[error("{0} can't move together with others")]
    MovesAlone(VmRange),
    /// The mapping can't grow.
    #[error("{0} can't grow")]
    FixedSize(VmRange),
    /// Huge pages: an address lies between them, or the mapping would grow.
    #[error("{0} has huge pages: addresses between them, or more of them")]
    HugePages(VmRange),
    /// Length 0 on a private mapping, or `DONTUNMAP` on one that can't.
    #[error("{0} can't be duplicated")]
    NotShared(VmRange),
    /// The mapping can't be split there.
    #[error("{vma} can't be split at {at:#x}")]
    Refused {
        /// The mapping.
        vma: VmRange,
        /// Where.
        at: u64,
    },
    /// Sealed.
    #[error("{0} is sealed")]
    Sealed(VmRange),
    /// The page offset would wrap.
    #[error("the page offset of {0} would wrap")]
    Offset(VmRange),
    /// There is no room to grow in place, and it may not move.
    #[error("no room for {wanted:#x} bytes at {vma}")]
    NoRoom {
        /// The mapping.
        vma: VmRange,
        /// Bytes.
        wanted: u64,
    },
    /// Too much locked memory.
    #[error(transparent)]
    LockLimit(LimitError),
    /// A limit.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// What lies at the destination, or the tail, can't be unmapped.
    #[error(transparent)]
    Unmap(#[from] UnmapError),
    /// There is no destination.
    #[error(transparent)]
    Place(MapError),
    /// No memory for records.
    #[error(transparent)]
    Publish(#[from] PublishError),
}

impl RemapError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            RemapError::BadFlags(_)
            | RemapError::Unaligned(_)
            | RemapError::BadLength(_)
            | RemapError::BeyondLimit { .. }
            | RemapError::Overlap { .. }
            | RemapError::NotShared(_)
            | RemapError::HugePages(_)
            | RemapError::Refused { .. }
            | RemapError::Offset(_) => Errno::EINVAL,
            RemapError::Unmapped(_)
            | RemapError::Crosses(_)
            | RemapError::MovesAlone(_)
            | RemapError::FixedSize(_) => Errno::EFAULT,
            RemapError::Sealed(_) => Errno::EPERM,
            RemapError::NoRoom { .. } => Errno::ENOMEM,
            RemapError::LockLimit(_) => Errno::EAGAIN,
            RemapError::Limit(error) => error.errno(),
            RemapError::Unmap(error) => error.errno(),
            RemapError::Place(error) => error.errno(),
            RemapError::Publish(error) => error.errno(),
        }
    }
}
