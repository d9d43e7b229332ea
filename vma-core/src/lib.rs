//! Linux's VMA subsystem as a library: the bookkeeping of an address space and the memory behind it, with the results of Linux 6.18
//! to the letter, readable by any number of threads without a lock.
//!
//! ```
//! use vma_core::{AddressSpace, MapRequest, Prot};
//!
//! let space = AddressSpace::default();
//! let addr = space.map(&MapRequest::anonymous(3 * 4096, Prot::READ | Prot::WRITE))?;
//! space.protect(addr + 4096, 4096, Prot::READ)?;
//!
//! // Lookups: register the thread once, pin for as long as what was found is used.
//! let reader = space.register();
//! let guard = reader.pin();
//! let vma = space.find(addr + 4096, &guard).ok_or("unmapped")?;
//! assert_eq!(&vma.flags().perms(), b"r--p");
//!
//! // Equal neighbours are one mapping again.
//! space.protect(addr + 4096, 4096, Prot::READ | Prot::WRITE)?;
//! assert_eq!(space.totals().map_count, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Consistency
//!
//! A call changes the layout by one store that publishes all of it: no reader sees a hole, an overlap or half a
//! call. Iterating sees each publish wholly or not at all; [`AddressSpace::read`] keeps everything as it is.
//!
//! # Concurrency
//!
//! [`AddressSpace::find`] takes no lock, waits for nothing and writes no memory that others use. Calls that change
//! the layout exclude each other. Owners' hooks and files are let go of after the lock.
//!
//! # Errors
//!
//! Each call has an error enum with the range, limit or value that it failed on, and `errno()` gives Linux's
//! number. Where Linux documents a partial effect (a prefix that stays changed) the same part is changed here;
//! otherwise nothing is. No argument makes a call panic.
//!
//! # What is where
//!
//! [`AddressSpace`] has the calls, each in a file of its name; [`merge`](crate) is decided in one place, and so is
//! the identity of private pages ([`AnonId`]). [`Backend`] is the seam to memory: `()` keeps books only, [`paged`] is a
//! software MMU. [`Notifier`]s and [`Monitor`]s hear of what happens to it. [`System`] is what is global in Linux: spaces by number, and what dups and probes exclude each other with.

#![deny(unsafe_code)]

mod accounting;
mod addr;
mod anon;
mod backend;
#[doc(hidden)]
pub mod bench;
mod error;
mod events;
mod file;
mod flags;
mod huge;
mod limits;
mod merge;
mod space;
mod system;
mod vma;

pub use vma_rcu::reclaim::{Domain, Guard, Reader, ReclaimLimits};
pub use vma_rcu::tree::Busy;
pub use vma_rcu::wait::{CancelToken, GaveUp, Wait};

pub use crate::accounting::Totals;
pub use crate::addr::VmRange;
pub use crate::anon::AnonId;
pub use crate::backend::{
    Backend, Fault, Faulted, FileUnmap, Fill, Filled, Inheritance, Inherited, PageChange, paged,
};
pub use crate::error::{Errno, LimitError, PublishError, SplitError};
pub use crate::events::{
    Invalidation, InvalidationReason, Monitor, MonitorEvent, MonitorFeatures, MonitorFeaturesError,
    MonitorModes, Notifier, NotifierRegistration, Sequence,
};
#[cfg(target_os = "linux")]
pub use crate::file::HostFile;
pub use crate::file::{
    AccessMode, FileBackend, FileIoError, FileKind, FileMapping, FileObject, FileObjectBuilder,
    FileSizeError, MappingHooks, MemFile, MemFileCall, OpenFile, SealFileError, Seals, SpaceId,
    WritableDenial, WritableHold,
};
pub use crate::flags::{
    Advice, LockAllFlags, LockFlags, MapFlags, MdweFlags, Prot, RemapFlags, SyncFlags, VmaFlags,
};
pub use crate::huge::{HugePool, HugePoolStats};
pub use crate::limits::{
    ConfigError, Layout, Limits, Overcommit, Semantics, SpaceConfig, UNLIMITED,
};
pub use crate::space::{
    Access, AddressSpace, AdviseError, BrkError, CheckError, CoreError, DupError, FaultError,
    GrowError, LockError, LockObserver, LockTime, LockTimes, MapError, MapRequest, MapsEntry,
    MapsName, MdweError, MonitorError, NameError, ProtectError, ReadGuard, RemapError,
    RemapFileError, RemapRequest, ResolveError, SealError, SpecialError, SpecialMapping, Stats,
    SyncError, UnmapError, VmaLock, VmaRef, WriteGuard,
};
pub use crate::system::{
    CreateError, ForkError, MemberId, Probe, ProbeError, ProbeHandle, ProbeSite, Quiesced,
    RegisterError, SpaceHandle, SpaceRef, System, SystemConfig, WeakSpaceHandle,
};
pub use crate::vma::Vma;

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
