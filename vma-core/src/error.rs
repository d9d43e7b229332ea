//! Linux error numbers, and the conditions that several calls share.
//!
//! Every call has an error enum of its own, next to the call; each has `errno()`.

use std::fmt;

use crate::addr::VmRange;

/// A Linux error number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Errno(u16);

macro_rules! errnos {
    ($($name:ident = $value:literal, $text:literal;)*) => {
        impl Errno {
            $(#[doc = $text] pub const $name: Errno = Errno($value);)*

            /// The symbol, such as `"EINVAL"`.
            pub const fn name(self) -> &'static str {
                match self.0 {
                    $($value => stringify!($name),)*
                    _ => "E?",
                }
            }
        }
    };
}

errnos! {
    EPERM = 1, "Operation not permitted.";
    ENOENT = 2, "No such file or directory.";
    EINTR = 4, "Interrupted while waiting for a lock.";
    EIO = 5, "Input/output error.";
    EBADF = 9, "Bad file descriptor.";
    EAGAIN = 11, "Resource temporarily unavailable.";
    ENOMEM = 12, "Cannot allocate memory.";
    EACCES = 13, "Permission denied.";
    EFAULT = 14, "Bad address.";
    EBUSY = 16, "Device or resource busy.";
    EEXIST = 17, "File exists.";
    ENODEV = 19, "No such device.";
    EINVAL = 22, "Invalid argument.";
    ETXTBSY = 26, "Text file busy.";
    EFBIG = 27, "File too large.";
    ENOSPC = 28, "No space left on device.";
    EROFS = 30, "Read-only file system.";
    EOVERFLOW = 75, "Value too large for defined data type.";
    EOPNOTSUPP = 95, "Operation not supported.";
    EDQUOT = 122, "Disk quota exceeded.";
}

impl Errno {
    /// The error of a number: what a [`FileBackend`](crate::FileBackend) fails with may be any of Linux's.
    pub const fn from_raw(number: u16) -> Self {
        Errno(number)
    }

    /// The number as Linux has it.
    pub const fn raw(self) -> i32 {
        self.0 as i32
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A limit that a call ran into. All amounts are pages unless named otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LimitError {
    /// `vm.max_map_count` mappings exist already.
    #[error("{count} mappings exist, vm.max_map_count is {max}")]
    MapCount {
        /// Mappings at the time.
        count: u64,
        /// The limit.
        max: u64,
    },
    /// `RLIMIT_AS`.
    #[error("{used} pages are mapped, {wanted} more exceed RLIMIT_AS of {limit} bytes")]
    AddressSpace {
        /// Pages mapped.
        used: u64,
        /// Pages asked for.
        wanted: u64,
        /// The limit, in bytes.
        limit: u64,
    },
    /// `RLIMIT_DATA`.
    #[error("{used} pages of data are mapped, {wanted} more exceed RLIMIT_DATA of {limit} bytes")]
    Data {
        /// Data pages mapped.
        used: u64,
        /// Pages asked for.
        wanted: u64,
        /// The limit, in bytes.
        limit: u64,
    },
    /// `RLIMIT_STACK`.
    #[error("a stack of {wanted} bytes exceeds RLIMIT_STACK of {limit} bytes")]
    Stack {
        /// Size that the stack would have, in bytes.
        wanted: u64,
        /// The limit, in bytes.
        limit: u64,
    },
    /// `RLIMIT_MEMLOCK`.
    #[error("{used} pages are locked, {wanted} more exceed RLIMIT_MEMLOCK of {limit} bytes")]
    MemLock {
        /// Pages locked.
        used: u64,
        /// Pages asked for.
        wanted: u64,
        /// The limit, in bytes.
        limit: u64,
    },
    /// The overcommit policy refuses.
    #[error(
        "{committed} pages are committed, {wanted} more exceed what the overcommit policy allows ({limit})"
    )]
    Commit {
        /// Pages committed.
        committed: u64,
        /// Pages asked for.
        wanted: u64,
        /// What may be committed, or asked for at once.
        limit: u64,
    },
}

impl LimitError {
    /// `ENOMEM`; calls that report a limit differently say so.
    pub const fn errno(self) -> Errno {
        Errno::ENOMEM
    }
}

/// Why a VMA couldn't be split or its attributes changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SplitError {
    /// One mapping too many.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// The mapping's owner doesn't allow a split there (special mappings such as `[vdso]`).
    #[error("the mapping {vma} can't be split at {at:#x}")]
    Refused {
        /// The mapping.
        vma: VmRange,
        /// Where.
        at: u64,
    },
}

impl SplitError {
    /// `ENOMEM`, or `EINVAL` for a refused split.
    pub const fn errno(self) -> Errno {
        match self {
            SplitError::Limit(limit) => limit.errno(),
            SplitError::Refused { .. } => Errno::EINVAL,
        }
    }
}

/// Why a planned change couldn't be published; nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// The allocator, or the backend, has no memory.
    #[error("out of memory for the space's own records")]
    NoMemory,
    /// Retired records reached the hard limit of the reclamation domain and stayed there: some reader keeps a guard for too long.
    #[error(
        "{pending_bytes} bytes of retired records are held by a reader's guard, the hard limit is {hard_bytes}"
    )]
    Retired {
        /// Bytes retired and not yet freed.
        pending_bytes: usize,
        /// The hard limit.
        hard_bytes: usize,
    },
    /// Somebody holds a lock on a mapping that was to be replaced, and the call's [`Wait`](vma_rcu::wait::Wait) ended.
    #[error("the wait for the readers of a mapping that was to be replaced ended: {0}")]
    GaveUp(vma_rcu::wait::GaveUp),
}

impl PublishError {
    /// `ENOMEM`, or `EINTR` for a wait that ended.
    pub const fn errno(self) -> Errno {
        match self {
            PublishError::NoMemory | PublishError::Retired { .. } => Errno::ENOMEM,
            PublishError::GaveUp(_) => Errno::EINTR,
        }
    }

    /// As `errno`, for calls that report a lack of memory as `EAGAIN`.
    pub(crate) const fn errno_or_again(self) -> Errno {
        match self.errno() {
            Errno::ENOMEM => Errno::EAGAIN,
            other => other,
        }
    }
}
