//! Files as far as mappings need them: the object (an inode), and the open file description.
//!
//! Mappings merge only if they come from the same [`OpenFile`]: `dup(2)` gives the same one, a second
//! `open(2)` another. What the file *is* (length, seals, name) belongs to the [`FileObject`].

mod backend;
mod busy;
mod cache;
#[cfg(target_os = "linux")]
mod host;
mod index;
mod io;
mod lock;
mod mappings;
mod mem;
#[cfg(all(test, loom))]
mod models;
mod object;
mod seals;
mod sync;
mod tenant;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use self::backend::FileBackend;
#[cfg(all(test, loom))]
pub(crate) use self::cache::ToClean;
pub(crate) use self::cache::{FilePage, Marked};
#[cfg(target_os = "linux")]
pub use self::host::HostFile;
pub use self::io::FileIoError;
pub use self::mappings::{FileMapping, SpaceId};
pub(crate) use self::mappings::{Index, Mapper, Part};
pub use self::mem::{MemFile, MemFileCall};
pub use self::object::{
    FileKind, FileObject, FileObjectBuilder, FileSizeError, WritableDenial, WritableHold,
};
pub use self::seals::{SealFileError, Seals};
use self::sync::Seen;
pub(crate) use self::tenant::Tenancies;
use crate::addr::VmRange;
use crate::huge::HugeFile;

/// How a file was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessMode {
    /// `O_RDONLY`
    Read,
    /// `O_WRONLY`
    Write,
    /// `O_RDWR`
    ReadWrite,
}

/// An open file description (Linux `struct file`).
#[derive(Debug)]
pub struct OpenFile {
    object: Arc<FileObject>,
    mode: AccessMode,
    heir: Option<Heir>,
    /// Errors of writing back that were reported to it.
    seen: Seen,
}

/// What a child of a fork has of a private mapping of huge pages: the pages, and no reservation.
#[derive(Debug, Default)]
struct Heir {
    /// Its parent has taken a page away from it, so that a page that isn't there is an error (`HPAGE_RESV_UNMAPPED`). Relaxed:
    /// stored and looked at under [`HugeFile::faulting`] of the page.
    is_robbed: AtomicBool,
}

impl OpenFile {
    /// Opens a file.
    pub fn new(object: Arc<FileObject>, mode: AccessMode) -> Arc<OpenFile> {
        Arc::new(OpenFile {
            seen: object.errors().sample(),
            object,
            mode,
            heir: None,
        })
    }

    /// The same for a child, where that makes a difference.
    pub(crate) fn for_child(self: &Arc<Self>) -> Arc<OpenFile> {
        if !self.object.huge().is_some_and(|huge| huge.is_private()) {
            return self.clone();
        }
        Arc::new(OpenFile {
            object: self.object.clone(),
            mode: self.mode,
            seen: Seen::default(),
            heir: Some(Heir::default()),
        })
    }

    /// The huge pages whose reservations are a mapping's of this.
    pub(crate) fn owned_huge(&self) -> Option<&Arc<HugeFile>> {
        self.object.huge().filter(|_| self.heir.is_none())
    }

    /// A page was taken away from it, for its parent.
    pub(crate) fn set_robbed(&self) {
        if let Some(heir) = &self.heir {
            heir.is_robbed.store(true, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_robbed(&self) -> bool {
        let robbed = |heir: &Heir| heir.is_robbed.load(Ordering::Relaxed);
        self.heir.as_ref().is_some_and(robbed)
    }

    /// The file.
    pub fn object(&self) -> &Arc<FileObject> {
        &self.object
    }

    /// How it was opened.
    pub fn mode(&self) -> AccessMode {
        self.mode
    }

    /// Opened for reading.
    pub fn is_readable(&self) -> bool {
        self.mode != AccessMode::Write
    }

    /// Opened for writing.
    pub fn is_writable(&self) -> bool {
        self.mode != AccessMode::Read
    }
}

/// What the owner of a mapping wants to know of it and may forbid (Linux `vm_operations_struct`).
///
/// `may_split` and `has_close` are asked under the space's lock and must not call into the space.
/// `opened` and `closed` are called after the call, with no lock held; between them they give the net
/// change: as many `opened` more than `closed` as there are VMAs more than before.
pub trait MappingHooks: Send + Sync + 'static {
    /// Whether the mapping can be split at an address inside it.
    fn may_split(&self, vma: VmRange, at: u64) -> bool {
        let _ = (vma, at);
        true
    }

    /// Whether the owner follows the removal of each VMA. Such a VMA is never removed by merging.
    fn has_close(&self) -> bool {
        false
    }

    /// A VMA came into being by splitting, copying or mapping.
    fn opened(&self, vma: VmRange) {
        let _ = vma;
    }

    /// A VMA was removed.
    fn closed(&self, vma: VmRange) {
        let _ = vma;
    }
}

impl fmt::Debug for dyn MappingHooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappingHooks")
            .field("has_close", &self.has_close())
            .finish()
    }
}
