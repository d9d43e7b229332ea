//! The file object.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

use arc_swap::ArcSwap;
use parking_lot::{Mutex, MutexGuard};
use vma_rcu::sync::atomic::AtomicUsize;

use super::cache::PageCache;
use super::mappings::Mappings;
use super::sync::WriteErrors;
use super::{FileBackend, FileIoError, MappingHooks, SealFileError, Seals};
use crate::backend::paged::{FrameAllocator, PAGE};
use crate::error::Errno;
use crate::flags::VmaFlags;
use crate::huge::{HUGE_PAGE, HugeFile};
use crate::space::{LockObserver, Observed};

/// What a file is, as far as mapping it goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileKind {
    /// A regular file of a disk file system.
    #[default]
    Regular,
    /// Shared memory: memfd, tmpfs, System V segments, what backs `MAP_SHARED | MAP_ANONYMOUS`.
    Shmem,
    /// `/dev/zero`: a private mapping is anonymous memory that shows the file, a shared one is new shared memory.
    DevZero,
    /// What is behind `MAP_HUGETLB`. Only mmap makes one.
    Huge,
    /// A device that can be mapped; pages aren't bounded by a length.
    Device,
    /// Pipe, directory and others that can't be mapped (`ENODEV`).
    Unmappable,
}

/// A file, or another object whose pages are mapped (Linux `struct address_space` with its inode).
#[derive(Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a property of its own"
)]
pub struct FileObject {
    kind: FileKind,
    tag: u64,
    device: (u32, u32),
    inode: u64,
    no_exec: bool,
    append_only: bool,
    huge_aligned: bool,
    mmap_flags: VmaFlags,
    hooks: Option<Arc<dyn MappingHooks>>,
    /// Replaced as a whole; maps readers clone the pointer.
    /// Replaced as a whole, so that who prints a layout takes no lock.
    name: ArcSwap<Arc<str>>,
    /// Bytes. Stored under `sealing`, before pages beyond are taken out of the cache under its lock; whoever has found a page in
    /// the cache asks that page whether it still belongs there. So it's relaxed.
    len: AtomicU64,
    /// [`Seals`] bits; changed under `sealing` only.
    seals: AtomicU32,
    sealing: Mutex<()>,
    /// Mappings that are shared and may write; negative when denied (`i_mmap_writable`).
    writable: AtomicI64,
    pages: PageCache,
    mappings: Mappings,
    /// Probes of all systems. A call looks at it behind a fence, after it has published; a registration raises it, and has a fence before
    /// it looks at what is mapped: of the two one sees the other. Release when raised, acquire: the probe can be found. Model:
    /// `a_probe_is_in_what_is_mapped_meanwhile`.
    probes: AtomicUsize,
    huge: Option<Arc<HugeFile>>,
    backend: Option<Arc<dyn FileBackend>>,
    /// Pages are marked when they are changed.
    tracked: bool,
    errors: WriteErrors,
}

/// Makes a [`FileObject`].
#[derive(Debug)]
pub struct FileObjectBuilder(FileObject);

impl FileObjectBuilder {
    /// An opaque number of the embedder's, to find its own record again.
    #[must_use]
    pub fn tag(mut self, tag: u64) -> Self {
        self.0.tag = tag;
        self
    }

    /// Device (major, minor) and inode, as maps shows them.
    #[must_use]
    pub fn inode(mut self, major: u32, minor: u32, inode: u64) -> Self {
        self.0.device = (major, minor);
        self.0.inode = inode;
        self
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(self, len: u64) -> Self {
        self.0.len.store(len, Ordering::Relaxed);
        self
    }

    /// On a file system mounted `noexec`.
    #[must_use]
    pub fn no_exec(mut self, yes: bool) -> Self {
        self.0.no_exec = yes;
        self
    }

    /// The append-only attribute is set.
    #[must_use]
    pub fn append_only(mut self, yes: bool) -> Self {
        self.0.append_only = yes;
        self
    }

    /// The file system places mappings of 2 MiB and more aligned (ext4, xfs, btrfs).
    #[must_use]
    pub fn huge_aligned(mut self, yes: bool) -> Self {
        self.0.huge_aligned = yes;
        self
    }

    /// Flags that the file's owner adds to each mapping, as a driver does: `DONTEXPAND` of rings, `IO`, `PFNMAP`.
    #[must_use]
    pub fn mmap_flags(mut self, flags: VmaFlags) -> Self {
        self.0.mmap_flags = flags;
        self
    }

    /// Can be sealed, and has these seals.
    #[must_use]
    pub fn seals(self, seals: Seals) -> Self {
        self.0.seals.store(seals.bits(), Ordering::Relaxed);
        self
    }

    /// Where frames for its pages come from; else from [`FramePool::global`](crate::paged::FramePool::global).
    #[must_use]
    pub fn frames(mut self, frames: Arc<dyn FrameAllocator>) -> Self {
        self.0.pages = PageCache::new(Some(frames));
        self
    }

    /// Has `observer` hear of every wait for the lock of its reverse index, and every hold of it.
    #[must_use]
    pub fn index_observer(mut self, observer: Arc<dyn LockObserver>) -> Self {
        self.0.mappings.observe(Observed::by(observer));
        self
    }

    /// What is behind it: its pages are read on demand, marked when they are changed, and written back by
    /// [`FileObject::sync`] and msync(2). [`len`](Self::len) says how long it is.
    ///
    /// What is still dirty when the last handle to the object goes, descriptors and mappings included, is written back then, by
    /// the thread that drops it; errors can't be reported to anybody. (A mapping's handle goes some time after it's unmapped.) Who wants to
    /// know syncs before.
    #[must_use]
    pub fn backend(mut self, backend: Arc<dyn FileBackend>) -> Self {
        self.0.backend = Some(backend);
        self.0.tracked = true;
        self
    }

    /// Pages are marked when they are changed, also without a backend: for [`FileObject::clean_range`]. First stores through shared
    /// mappings fault, then.
    #[must_use]
    pub fn track_dirty(mut self, yes: bool) -> Self {
        self.0.tracked = yes || self.0.backend.is_some();
        self
    }

    /// Who follows its mappings.
    #[must_use]
    pub fn hooks(mut self, hooks: Arc<dyn MappingHooks>) -> Self {
        self.0.hooks = Some(hooks);
        self
    }

    /// Done.
    pub fn build(self) -> Arc<FileObject> {
        Arc::new(self.0)
    }
}

/// Why a file's length couldn't change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the file is sealed against a change from {from} to {to} bytes")]
pub struct FileSizeError {
    /// Length now.
    pub from: u64,
    /// Length wanted.
    pub to: u64,
}

impl FileSizeError {
    /// `EPERM`.
    pub const fn errno(self) -> Errno {
        Errno::EPERM
    }
}

impl FileObject {
    /// Starts a file of a kind with the name that maps shows. It can't be sealed unless
    /// [`FileObjectBuilder::seals`] says so.
    pub fn builder(kind: FileKind, name: &str) -> FileObjectBuilder {
        FileObjectBuilder(FileObject {
            kind,
            tag: 0,
            device: (0, 0),
            inode: 0,
            no_exec: false,
            append_only: false,
            huge_aligned: false,
            mmap_flags: VmaFlags::empty(),
            hooks: None,
            name: ArcSwap::from_pointee(Arc::from(name)),
            len: AtomicU64::new(0),
            seals: AtomicU32::new(Seals::SEAL.bits()),
            sealing: Mutex::new(()),
            writable: AtomicI64::new(0),
            pages: PageCache::new(None),
            mappings: Mappings::default(),
            probes: AtomicUsize::new(0),
            huge: None,
            backend: None,
            tracked: false,
            errors: WriteErrors::default(),
        })
    }

    /// The object behind a new `MAP_SHARED | MAP_ANONYMOUS` mapping.
    pub(crate) fn shared_anonymous(len: u64) -> FileObjectBuilder {
        FileObject::builder(FileKind::Shmem, "/dev/zero (deleted)")
            .inode(0, 1, 0)
            .len(len)
    }

    /// What is behind a `MAP_HUGETLB` mapping of `len` bytes. Source: `hugetlb_file_setup()`.
    pub(crate) fn huge_anonymous(huge: Arc<HugeFile>, len: u64) -> Arc<FileObject> {
        // A file system of its own for each size of pages.
        let minor = if huge.page_size() == HUGE_PAGE {
            0x11
        } else {
            0x12
        };
        let mut builder = FileObject::builder(FileKind::Huge, "/anon_hugepage (deleted)")
            .inode(0, minor, 0)
            .mmap_flags(VmaFlags::HUGETLB | VmaFlags::DONTEXPAND)
            .len(len);
        builder.0.huge = Some(huge);
        builder.build()
    }

    /// Its huge pages.
    pub(crate) fn huge(&self) -> Option<&Arc<HugeFile>> {
        self.huge.as_ref()
    }

    /// Counts a mapping of huge pages that comes or goes; pages go with the last.
    pub(crate) fn count_huge_mapping(&self, more: bool) {
        if self.huge().is_some_and(|huge| huge.count_mapping(more)) {
            self.pages.clear();
        }
    }

    pub(crate) fn pages(&self) -> &PageCache {
        &self.pages
    }

    /// Whether there may be probes in it.
    pub(crate) fn has_probes(&self) -> bool {
        self.probes.load(Ordering::Acquire) > 0
    }

    /// Counts a probe that comes or goes.
    pub(crate) fn count_probe(&self, more: bool) {
        if more {
            self.probes.fetch_add(1, Ordering::Release);
        } else {
            self.probes.fetch_sub(1, Ordering::Relaxed);
        }
    }

    pub(super) fn mappings_index(&self) -> &Mappings {
        &self.mappings
    }

    pub(crate) fn backend(&self) -> Option<&Arc<dyn FileBackend>> {
        self.backend.as_ref()
    }

    /// Whether pages are marked when they are changed.
    pub(crate) fn is_tracked(&self) -> bool {
        self.tracked
    }

    pub(super) fn errors(&self) -> &WriteErrors {
        &self.errors
    }

    /// Keeps the length, the seals and the holes as they are.
    pub(super) fn resizing(&self) -> MutexGuard<'_, ()> {
        self.sealing.lock()
    }

    /// What it is.
    pub fn kind(&self) -> FileKind {
        self.kind
    }

    /// The embedder's number.
    pub fn tag(&self) -> u64 {
        self.tag
    }

    /// Device, as (major, minor).
    pub fn device(&self) -> (u32, u32) {
        self.device
    }

    /// Inode number.
    pub fn inode(&self) -> u64 {
        self.inode
    }

    /// The name that maps shows.
    pub fn name(&self) -> Arc<str> {
        Arc::clone(&self.name.load())
    }

    /// Renames it; `" (deleted)"` at the end is the caller's to add.
    pub fn set_name(&self, name: &str) {
        self.name.store(Arc::new(Arc::from(name)));
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Changes the length (ftruncate(2)). When it returns no access through any mapping reaches a page beyond.
    ///
    /// # Errors
    /// `EPERM` when sealed against it; what the backend fails with. Nothing has changed then.
    pub fn set_len(&self, len: u64) -> Result<(), FileIoError> {
        let _order = self.sealing.lock();
        let from = self.len();
        self.check_size(from, len)?;
        let page = PAGE as u64;
        let _closed = match &self.backend {
            None => None,
            // Nobody reads or writes back what goes, nor the page that the end lies in, before or after.
            Some(backend) => {
                let shorter = from.min(len) / page;
                let end = if len < from { u64::MAX } else { shorter + 1 };
                let closed = self.pages.close(shorter..end);
                backend.set_len(len).map_err(FileIoError::ChangeFailed)?;
                Some(closed)
            }
        };
        if len > from {
            self.lengthen(from, len);
        } else {
            self.len.store(len, Ordering::Relaxed);
        }
        if len < from {
            self.cut_pages(len);
        }
        Ok(())
    }

    fn check_size(&self, from: u64, to: u64) -> Result<(), FileSizeError> {
        let seals = self.current_seals();
        if (to < from && seals.contains(Seals::SHRINK))
            || (to > from && seals.contains(Seals::GROW))
        {
            return Err(FileSizeError { from, to });
        }
        Ok(())
    }

    /// For a write beyond the end, with `sealing` locked. The backend finds out when the page is written back.
    pub(super) fn grow(&self, len: u64) -> Result<(), FileSizeError> {
        let from = self.len();
        self.check_size(from, len)?;
        let last = from / PAGE as u64;
        let _closed = self
            .backend
            .is_some()
            .then(|| self.pages.close(last..last + 1));
        self.lengthen(from, len);
        Ok(())
    }

    /// What was stored beyond the end, in its page, isn't part of the file.
    fn lengthen(&self, from: u64, len: u64) {
        let tail = (from % PAGE as u64) as usize;
        if self.backend.is_some()
            && tail > 0
            && let Some(frame) = self.pages.get(from / PAGE as u64)
        {
            frame.bytes().fill(tail, PAGE - tail, 0);
        }
        self.len.store(len, Ordering::Relaxed);
    }

    /// The seals it has.
    pub fn current_seals(&self) -> Seals {
        Seals::from_bits_retain(self.seals.load(Ordering::Acquire))
    }

    pub(crate) fn is_no_exec(&self) -> bool {
        self.no_exec
    }

    pub(crate) fn is_append_only(&self) -> bool {
        self.append_only
    }

    pub(crate) fn is_huge_aligned(&self) -> bool {
        self.huge_aligned
    }

    pub(crate) fn added_flags(&self) -> VmaFlags {
        self.mmap_flags
    }

    pub(crate) fn hooks(&self) -> Option<&Arc<dyn MappingHooks>> {
        self.hooks.as_ref()
    }

    /// Whether a fault in the page at byte `offset` of the file finds one.
    pub(crate) fn has_page(&self, offset: u64) -> bool {
        self.kind == FileKind::Device || offset < self.len()
    }

    pub(super) fn seal(&self, seals: Seals) -> Result<(), SealFileError> {
        if self.kind != FileKind::Shmem {
            return Err(SealFileError::Unsupported);
        }
        let _order = self.sealing.lock();
        let current = self.current_seals();
        if current.contains(Seals::SEAL) {
            return Err(SealFileError::Final(current));
        }
        if seals.contains(Seals::WRITE) && !current.contains(Seals::WRITE) {
            self.deny()?;
            let pinned = self.pages.pinned();
            if pinned > 0 {
                self.count_writable(1);
                return Err(SealFileError::Pinned(pinned));
            }
        }
        self.seals
            .store((current | seals).bits(), Ordering::Release);
        Ok(())
    }

    /// Keeps shared mappings that may write from being made (`EPERM`) until the result is dropped.
    ///
    /// # Errors
    /// `EBUSY`: there are some.
    ///
    /// Source: `mapping_deny_writable()` in include/linux/fs.h.
    pub fn deny_writable(self: &Arc<Self>) -> Result<WritableDenial, SealFileError> {
        self.deny()?;
        Ok(WritableDenial(self.clone()))
    }

    fn deny(&self) -> Result<(), SealFileError> {
        self.writable
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| {
                (count <= 0).then(|| count - 1)
            })
            .map(|_| ())
            .map_err(SealFileError::Busy)
    }

    /// Counts one writable shared mapping for the time of a call, so that no seal comes between
    /// (`mapping_map_writable`). `None` when denied.
    pub(crate) fn hold_writable(self: &Arc<Self>) -> Option<WritableHold> {
        self.writable
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| {
                (count >= 0).then(|| count + 1)
            })
            .ok()
            .map(|_| WritableHold(self.clone()))
    }

    /// The number of writable shared mappings changed by `delta`.
    pub(crate) fn count_writable(&self, delta: i64) {
        self.writable.fetch_add(delta, Ordering::AcqRel);
    }

    /// Number of mappings that are shared and may write; negative when writing is denied.
    pub fn writable_mappings(&self) -> i64 {
        self.writable.load(Ordering::Acquire)
    }
}

/// No writable shared mapping is made until this is dropped.
#[derive(Debug)]
pub struct WritableDenial(Arc<FileObject>);

impl Drop for WritableDenial {
    fn drop(&mut self) {
        self.0.count_writable(1);
    }
}

impl Drop for FileObject {
    fn drop(&mut self) {
        self.write_back_the_rest();
    }
}

/// One writable mapping counted until this is dropped.
#[derive(Debug)]
pub struct WritableHold(Arc<FileObject>);

impl Drop for WritableHold {
    fn drop(&mut self) {
        self.0.count_writable(-1);
    }
}
