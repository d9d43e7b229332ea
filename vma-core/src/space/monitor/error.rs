//! What registering and putting pages in place fail with.

use crate::addr::VmRange;
use crate::error::{Errno, PublishError, SplitError};

/// Why a range wasn't registered or unregistered. What lies before a mapping that couldn't be split or recorded was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MonitorError {
    /// No modes, or unknown ones.
    #[error("modes {0:#x} aren't valid")]
    BadModes(u64),
    /// Unaligned, empty or outside of the address space.
    #[error("{len:#x} bytes at {addr:#x}: unaligned, empty or beyond the address space")]
    BadRange {
        /// Start.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// Nothing is mapped in the range.
    #[error("nothing is mapped from {0:#x} on")]
    Unmapped(u64),
    /// Monitors, or these modes, aren't for such a mapping.
    #[error("{0} can't be monitored like this")]
    NotMonitorable(VmRange),
    /// The mapping may never be written.
    #[error("{0} can't be written")]
    NotWritable(VmRange),
    /// Registered with another monitor.
    #[error("{0} has another monitor")]
    OtherMonitor(VmRange),
    /// The same, where that is to be taken away.
    #[error("{0} is another monitor's")]
    NotIts(VmRange),
    /// The monitor is another space's.
    #[error("the monitor belongs to another space")]
    OtherSpace,
    /// A mapping couldn't be split.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// No memory for records; nothing was changed.
    #[error(transparent)]
    Publish(#[from] PublishError),
}

impl MonitorError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            MonitorError::BadModes(_)
            | MonitorError::BadRange { .. }
            | MonitorError::Unmapped(_)
            | MonitorError::NotMonitorable(_)
            | MonitorError::NotIts(_)
            | MonitorError::OtherSpace => Errno::EINVAL,
            MonitorError::NotWritable(_) => Errno::EPERM,
            MonitorError::OtherMonitor(_) => Errno::EBUSY,
            MonitorError::Split(error) => error.errno(),
            MonitorError::Publish(error) => error.errno(),
        }
    }
}

/// Why a monitor couldn't put something in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResolveError {
    /// The layout is changing: there is an event to be read first.
    #[error("the layout is changing; there is an event to be read")]
    Changing,
    /// Unaligned, empty or outside of the address space.
    #[error("{len:#x} bytes at {addr:#x}: unaligned, empty or beyond the address space")]
    BadRange {
        /// Start.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// The monitor is another space's, or none's yet.
    #[error("the monitor doesn't belong to the space")]
    OtherSpace,
    /// The range isn't one mapping's that is registered, or not for this.
    #[error("{0:#x} and what follows isn't registered for it")]
    NotRegistered(u64),
    /// It can't be done to such a mapping, or not with this backend.
    #[error("it can't be done to {0}")]
    NotApplicable(VmRange),
    /// There is a page already.
    #[error("there is a page at {0:#x}")]
    Exists(u64),
    /// The file has no page there, or ends before.
    #[error("the file has no page for {0:#x}")]
    NoPage(u64),
    /// No memory for a page or for page tables.
    #[error("no memory for the page at {0:#x}")]
    OutOfMemory(u64),
}

impl ResolveError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            ResolveError::Changing => Errno::EAGAIN,
            ResolveError::BadRange { .. }
            | ResolveError::OtherSpace
            | ResolveError::NotApplicable(_) => Errno::EINVAL,
            ResolveError::NotRegistered(_) => Errno::ENOENT,
            ResolveError::Exists(_) => Errno::EEXIST,
            ResolveError::NoPage(_) => Errno::EFAULT,
            ResolveError::OutOfMemory(_) => Errno::ENOMEM,
        }
    }
}
