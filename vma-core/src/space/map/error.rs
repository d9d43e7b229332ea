//! Why mmap(2) fails.

use crate::addr::VmRange;
use crate::error::{Errno, LimitError, PublishError, SplitError};
use crate::file::{AccessMode, Seals};
use crate::space::unmap::UnmapError;

/// Why nothing was mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The offset isn't page-aligned.
    #[error("offset {0:#x} isn't page-aligned")]
    UnalignedOffset(u64),
    /// No such descriptor.
    #[error("bad file descriptor")]
    BadDescriptor,
    /// Length 0.
    #[error("length 0")]
    Empty,
    /// The length rounds up to more than there are addresses.
    #[error("a length of {0:#x} bytes exceeds the address space")]
    TooLong(u64),
    /// Offset plus length exceed what a file can have.
    #[error("offset {offset:#x} and length {len:#x} exceed the largest file")]
    Overflow {
        /// Bytes into the file.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Neither shared nor private, or a combination that doesn't exist.
    #[error("flags {0:#x} name no valid kind of mapping")]
    BadType(u64),
    /// `FIXED` with an unaligned address.
    #[error("fixed address {0:#x} isn't page-aligned")]
    UnalignedAddress(u64),
    /// A fixed address of the last 4095 bytes: Linux takes it for an error number that some part of it returned, and
    /// returns that.
    #[error("a fixed address {0} bytes below the top is taken for error number {0}")]
    ReadAsError(u16),
    /// Ends beyond the address space.
    #[error("{len:#x} bytes at {addr:#x} end beyond the address space")]
    BeyondLimit {
        /// Address.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// Below `vm.mmap_min_addr`.
    #[error("{addr:#x} lies below the lowest address, {min:#x}")]
    TooLow {
        /// Address.
        addr: u64,
        /// `vm.mmap_min_addr`.
        min: u64,
    },
    /// No gap is large enough.
    #[error("no free range of {0:#x} bytes")]
    NoSpace(u64),
    /// `FIXED_NOREPLACE` over a mapping.
    #[error("{0} is mapped")]
    Occupied(VmRange),
    /// `MAP_LOCKED` and locked memory isn't allowed at all.
    #[error("memory can't be locked: RLIMIT_MEMLOCK is 0")]
    LockForbidden,
    /// Too much locked memory.
    #[error(transparent)]
    LockLimit(LimitError),
    /// The descriptor's mode doesn't allow it.
    #[error("a file opened {mode:?} can't be mapped with protection {prot:#x} this way")]
    Access {
        /// How it was opened.
        mode: AccessMode,
        /// Protection asked for.
        prot: u64,
    },
    /// Writing to an append-only file.
    #[error("the file is append-only")]
    AppendOnly,
    /// Executing from a `noexec` mount.
    #[error("the file system is mounted noexec")]
    NoExec,
    /// The file can't be mapped.
    #[error("the file can't be mapped")]
    NotMappable,
    /// `SHARED_VALIDATE` with a flag that isn't known.
    #[error("flags {0:#x} hold one that this file doesn't support")]
    Unsupported(u64),
    /// The file is sealed against writing.
    #[error("the file's seals {0:?} forbid it")]
    FileSealed(Seals),
    /// Writable and executable, which was forbidden by `PR_SET_MDWE`.
    #[error("write and execute together are refused (PR_SET_MDWE)")]
    WriteExec,
    /// A mapping to be replaced is sealed.
    #[error("{0} is sealed")]
    Sealed(VmRange),
    /// A mapping at an edge of the replaced range couldn't be split.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// A limit.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// Huge pages were asked for, and there are none.
    #[error("no huge pages")]
    NoHugePages,
    /// No memory for records.
    #[error(transparent)]
    Publish(#[from] PublishError),
}

impl MapError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            MapError::UnalignedOffset(_)
            | MapError::Empty
            | MapError::BadType(_)
            | MapError::UnalignedAddress(_) => Errno::EINVAL,
            MapError::BadDescriptor => Errno::EBADF,
            MapError::TooLong(_)
            | MapError::BeyondLimit { .. }
            | MapError::NoSpace(_)
            | MapError::NoHugePages => Errno::ENOMEM,
            MapError::Overflow { .. } => Errno::EOVERFLOW,
            MapError::TooLow { .. }
            | MapError::LockForbidden
            | MapError::NoExec
            | MapError::FileSealed(_)
            | MapError::Sealed(_) => Errno::EPERM,
            MapError::Occupied(_) => Errno::EEXIST,
            MapError::LockLimit(_) => Errno::EAGAIN,
            MapError::Access { .. } | MapError::AppendOnly | MapError::WriteExec => Errno::EACCES,
            MapError::NotMappable => Errno::ENODEV,
            MapError::Unsupported(_) => Errno::EOPNOTSUPP,
            MapError::ReadAsError(number) => Errno::from_raw(number),
            MapError::Split(error) => error.errno(),
            MapError::Limit(error) => error.errno(),
            MapError::Publish(error) => error.errno(),
        }
    }
}

impl From<UnmapError> for MapError {
    fn from(error: UnmapError) -> Self {
        match error {
            UnmapError::BadRange { addr, len } => MapError::BeyondLimit { addr, len },
            UnmapError::Sealed(range) => MapError::Sealed(range),
            UnmapError::Split(error) => MapError::Split(error),
            UnmapError::Publish(error) => MapError::Publish(error),
        }
    }
}
