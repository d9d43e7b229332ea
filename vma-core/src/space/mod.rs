//! The address space: one file per call.
//!
//! # How a call runs
//!
//! ```text
//! parse      raw arguments into ranges and flags            no lock needed
//! validate   order of checks as in Linux                    exclusive lock
//! plan       edits on a Draft; pure                         exclusive lock
//! prepare    memory for index and backend; can fail         exclusive lock
//! commit     one publish, totals, file counts; can't fail   exclusive lock
//! after      owners' hooks, dropping files, reclamation     no lock
//! ```
//!
//! # Locks
//!
//! ```text
//! AddressSpace::inner (exclusive or shared)
//!   AddressSpace::identities
//! ```
//!
//! Lookups under a [`Guard`] take neither.

mod advise;
mod brk;
mod check;
mod draft;
mod dup;
mod exit;
mod fault;
mod files;
mod gate;
mod guard;
mod lock;
mod map;
mod maps;
mod monitor;
mod notify;
mod observe;
pub(crate) mod order;
mod placement;
mod probes;
mod protect;
mod query;
mod remap;
mod remap_file;
mod seal;
mod special;
mod stack;
mod unmap;
mod view;
mod vma_lock;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use vma_rcu::lock_order::Held;
use vma_rcu::reclaim::{Domain, Guard, OverLimit, Reader};
use vma_rcu::rwsem::{self, RwSemaphore};
use vma_rcu::tree::{RangeTree, Record as _, Writer};
use vma_rcu::wait::{GaveUp, Wait};

pub use self::advise::AdviseError;
pub use self::brk::BrkError;
pub use self::check::CheckError;
pub use self::dup::DupError;
pub(crate) use self::fault::Need;
pub use self::fault::{Access, FaultError};
#[cfg(all(test, loom))]
pub(crate) use self::gate::fence_before_tables;
pub use self::guard::{ReadGuard, WriteGuard};
pub(crate) use self::guard::{discard, rethrow};
pub use self::lock::LockError;
pub use self::map::{MapError, MapRequest};
pub use self::maps::{MapsEntry, MapsName};
pub use self::monitor::{MonitorError, ResolveError};
pub use self::observe::{LockObserver, LockTime, LockTimes};
pub use self::protect::{MdweError, ProtectError};
pub use self::query::{CoreError, SyncError};
pub use self::remap::{RemapError, RemapRequest};
pub use self::remap_file::RemapFileError;
pub use self::seal::SealError;
pub use self::special::{NameError, SpecialError, SpecialMapping};
pub use self::stack::GrowError;
pub use self::unmap::UnmapError;
pub use self::view::VmaRef;
pub use self::vma_lock::VmaLock;

use self::draft::{HugeEvent, Piece, Window, settle_huge};
use self::guard::After;
use self::maps::Landmarks;
pub(crate) use self::observe::Observed;
use self::probes::Probes;
use crate::accounting::Totals;
use crate::addr::Pages;
use crate::anon::AnonIds;
use crate::backend::Backend;
use crate::error::PublishError;
use crate::events::{Attention, InvalidationReason, Notifiers};
use crate::file::Tenancies;
use crate::flags::{MdweFlags, VmaFlags};
use crate::limits::{ConfigError, SpaceConfig};
use crate::vma::Vma;

/// How long a writer waits, before it takes the lock, for readers that hold too much retired memory.
const PATIENCE: Duration = Duration::from_millis(100);

/// What calls have done to the layout since the space was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Mappings cut in two.
    pub splits: u64,
    /// Neighbours joined.
    pub merges: u64,
    /// Changes published.
    pub publishes: u64,
}

impl Stats {
    fn add(&mut self, other: Stats) {
        self.splits += other.splits;
        self.merges += other.merges;
    }
}

/// An address space: Linux's `mm_struct`, as far as its mappings go.
///
/// # Consistency
/// A call changes the layout by one publish: a reader sees all of it or nothing.
///
/// # Concurrency
/// [`find`](Self::find) and [`iter`](Self::iter) take no lock and never wait. [`read`](Self::read) keeps the layout stable;
/// every call that changes it takes the exclusive side itself. [`write`](Self::write) holds it over several calls.
/// [`lock_vma`](Self::lock_vma) keeps one mapping stable, and is in nobody's way but that of who wants to replace it.
pub struct AddressSpace<B: Backend = ()> {
    core: Arc<Core<B>>,
    /// Exclusive for changes, shared to keep the layout stable.
    inner: RwSemaphore<Inner, Observed>,
    /// For those without the lock. Replaced as a whole, together with `Inner::config`.
    config: ArcSwap<SpaceConfig>,
    /// Who hands out identities of private pages. Taken inside `inner` (shared side) by faults; with the exclusive
    /// side held it's free.
    identities: Mutex<AnonIds>,
    /// For those without the lock who print the layout.
    landmarks: Landmarks,
}

/// What files that are mapped here, and probes in them, know of the space: nothing of it takes the space's lock.
pub(crate) struct Core<B: Backend> {
    /// For readers, without a lock.
    tree: RangeTree<Vma>,
    backend: B,
    pages: Pages,
    probes: Probes<B>,
    tenancies: Tenancies,
    notifiers: Notifiers,
    attention: Arc<Attention>,
}

/// Protected by `AddressSpace::inner`.
#[derive(Debug)]
struct Inner {
    writer: Writer<Vma>,
    /// The same as `AddressSpace::config`, to be had without a read-modify-write.
    config: Arc<SpaceConfig>,
    totals: Totals,
    stats: Stats,
    /// Added to new mappings: the lock bits, after `mlockall(MCL_FUTURE)`.
    default_flags: VmaFlags,
    /// Start of the heap, unchanged after exec.
    start_brk: u64,
    /// Its end, as the program sees it: not rounded.
    brk: u64,
    /// Bytes of the program's data segment, which `RLIMIT_DATA` counts with the heap.
    data_segment: u64,
    /// An address inside `[stack]`.
    start_stack: Option<u64>,
    mdwe: MdweFlags,
    /// Starts of the mappings that keep a gap free below them, ascending: a search passes over all that lies in such a
    /// gap, which the index alone doesn't tell.
    guarded: Vec<u64>,
    /// Files and owners have been told of the mappings that are there, and are told when the space goes.
    is_told: bool,
    /// The mappings that are there are in the indexes of their files.
    is_linked: bool,
}

impl Inner {
    /// What replaced windows change in `guarded`.
    #[cold]
    fn guard_edits(windows: &[Window]) -> Vec<GuardEdit> {
        let keeps_gap = |piece: &&Piece| piece.vma.start_gap() > 0;
        let edit = |window: &Window| GuardEdit {
            start: window.start,
            end: window.end,
            starts: window
                .pieces
                .iter()
                .filter(keeps_gap)
                .map(|piece| piece.start)
                .collect(),
        };
        windows.iter().map(edit).collect()
    }

    #[cold]
    fn apply_guard_edits(&mut self, edits: Vec<GuardEdit>) {
        for edit in edits {
            let from = self.guarded.partition_point(|start| *start < edit.start);
            let to = self.guarded.partition_point(|start| *start < edit.end);
            self.guarded.splice(from..to, edit.starts);
        }
    }
}

/// Mappings with a gap below them that a window holds from now on.
struct GuardEdit {
    start: u64,
    end: u64,
    starts: Vec<u64>,
}

impl AddressSpace<()> {
    /// An empty space, bookkeeping only.
    ///
    /// # Errors
    /// [`ConfigError`] for values that no kernel could have.
    pub fn new(config: SpaceConfig) -> Result<Self, ConfigError> {
        Self::with_backend(config, &Domain::default(), ())
    }
}

impl<B: Backend> AddressSpace<B> {
    /// An empty space with a backend and a reclamation domain, which several spaces may share.
    ///
    /// # Errors
    /// [`ConfigError`] for values that no kernel could have.
    pub fn with_backend(
        config: SpaceConfig,
        domain: &Domain,
        backend: B,
    ) -> Result<Self, ConfigError> {
        config.validate()?;
        let config = SpaceConfig {
            mmap_base: Some(config.base()),
            ..config
        };
        backend.attach(domain, &config)?;
        Ok(Self::assemble(config, domain, backend, AnonIds::default()))
    }

    fn assemble(config: SpaceConfig, domain: &Domain, backend: B, ids: AnonIds) -> Self {
        let (tree, writer) = RangeTree::new(domain);
        let config = Arc::new(config);
        let inner = Inner {
            writer,
            config: Arc::clone(&config),
            totals: Totals::default(),
            stats: Stats::default(),
            default_flags: VmaFlags::empty(),
            start_brk: 0,
            brk: 0,
            data_segment: 0,
            start_stack: None,
            mdwe: MdweFlags::empty(),
            guarded: Vec::new(),
            is_told: true,
            is_linked: true,
        };
        AddressSpace {
            core: Arc::new(Core {
                tenancies: Tenancies::default(),
                tree,
                backend,
                pages: config.pages(),
                probes: Probes::default(),
                notifiers: Notifiers::default(),
                attention: Arc::default(),
            }),
            inner: RwSemaphore::with_statistics(inner, Observed::default()),
            config: ArcSwap::new(config),
            identities: Mutex::new(ids),
            landmarks: Landmarks::default(),
        }
    }

    /// Registers the calling thread for lookups; keep the result for as long as it makes some.
    pub fn register(&self) -> Reader {
        self.core.tree.domain().register()
    }

    /// The reclamation domain.
    pub fn domain(&self) -> &Domain {
        self.core.tree.domain()
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.core.backend
    }

    /// The mapping that holds `addr`. It may be gone the next instant.
    ///
    /// No lock, no retry, no store to shared memory.
    pub fn find<'g>(&self, addr: u64, guard: &'g Guard<'_>) -> Option<VmaRef<'g>> {
        self.core.tree.find(addr, guard).map(VmaRef::from_entry)
    }

    /// The first mapping that ends above `addr`, under the same terms as [`find`](Self::find).
    pub fn find_next<'g>(&self, addr: u64, guard: &'g Guard<'_>) -> Option<VmaRef<'g>> {
        self.core
            .tree
            .find_next(addr, guard)
            .map(VmaRef::from_entry)
    }

    /// The mappings in order of address, from the first that ends above `from`.
    ///
    /// No lock. Each publish is seen wholly or not at all, but several may come between two steps.
    pub fn iter<'g>(&self, from: u64, guard: &'g Guard<'_>) -> impl Iterator<Item = VmaRef<'g>> {
        self.core.tree.iter(from, guard).map(VmaRef::from_entry)
    }

    /// Keeps the layout as it is until the guard is dropped.
    ///
    /// Other readers come in beside, but not while a writer waits: don't ask for it again, nor for a call that
    /// changes something, in a thread that holds it. Debug builds panic at that.
    pub fn read(&self) -> ReadGuard<'_, B> {
        match self.read_with(Wait::forever()) {
            Ok(guard) => guard,
            Err(_) => unreachable!("nothing ends this wait early"),
        }
    }

    /// [`read`](Self::read), waiting as `wait` says.
    ///
    /// # Errors
    /// [`GaveUp`]: `EINTR` for a system call.
    pub fn read_with(&self, wait: Wait<'_>) -> Result<ReadGuard<'_, B>, GaveUp> {
        if self.core.attention.is_raised() {
            drop(self.write_with(wait)?);
        }
        let held = order::MMAP.acquire(self.address());
        let inner = self.inner.read_with(wait)?;
        Ok(ReadGuard::new(self, inner, held))
    }

    /// [`read`](Self::read), if nobody has the exclusive side or waits for it.
    pub fn try_read(&self) -> Option<ReadGuard<'_, B>> {
        let inner = self.inner.try_read()?;
        let held = order::MMAP.acquired(self.address());
        Some(ReadGuard::new(self, inner, held))
    }

    /// Takes the exclusive side, to make several calls without letting others in between.
    ///
    /// When retired memory has reached the domain's hard limit, it first waits up to 100 ms for readers to let go
    /// of their guards. If they don't, the lock is taken all the same, but calls that would change something fail
    /// with [`PublishError::Retired`](crate::PublishError) and change nothing.
    #[inline]
    pub fn write(&self) -> WriteGuard<'_, B> {
        match self.write_with(Wait::forever()) {
            Ok(guard) => guard,
            Err(_) => unreachable!("nothing ends this wait early"),
        }
    }

    /// For one call, which may leave work for when the lock has been let go.
    #[inline]
    fn write_once(&self) -> WriteGuard<'_, B> {
        let mut guard = self.write();
        guard.once = true;
        guard
    }

    /// [`write`](Self::write), waiting as `wait` says: for the lock, and in each call on the guard for readers that
    /// hold single mappings ([`lock_vma`](Self::lock_vma)) which the call replaces. So every call can be given up on:
    /// `space.write_with(Wait::killable(&token))?.unmap(addr, len)`.
    ///
    /// # Errors
    /// [`GaveUp`]: `EINTR` for a system call.
    #[inline]
    pub fn write_with<'s>(&'s self, wait: Wait<'s>) -> Result<WriteGuard<'s, B>, GaveUp> {
        // One relaxed load, as long as there is no need.
        let refused = match self.core.tree.domain().throttle(None) {
            Ok(()) => None,
            Err(_) => self.wait_for_readers(wait)?,
        };
        let held = order::MMAP.acquire(self.address());
        let inner = self.inner.write_with(wait)?;
        Ok(self.write_guard(inner, held, wait, refused))
    }

    /// [`write`](Self::write), if nobody has either side or waits.
    pub fn try_write(&self) -> Option<WriteGuard<'_, B>> {
        let refused = self.core.tree.domain().throttle(None).err().map(retired);
        let inner = self.inner.try_write()?;
        let held = order::MMAP.acquired(self.address());
        Some(self.write_guard(inner, held, Wait::forever(), refused))
    }

    /// Waits, as long as `wait` says, for readers that hold too much retired memory: what calls that take the lock do before it.
    pub(crate) fn throttle(&self, wait: Wait<'_>) -> Result<(), GaveUp> {
        if self.core.tree.domain().throttle(None).is_err() {
            self.wait_for_readers(wait)?;
        }
        Ok(())
    }

    /// The exclusive side for a dup, which has been throttled before.
    pub(crate) fn write_for_dup(&self, wait: Wait<'_>) -> Result<WriteGuard<'_, B>, GaveUp> {
        let held = order::MMAP.acquire(self.address());
        let inner = self.inner.write_with(wait)?;
        Ok(self.write_guard(inner, held, Wait::forever(), None))
    }

    /// The same, if nobody has either side or waits. Runs no code of anybody's.
    pub(crate) fn try_write_for_dup(&self) -> Option<WriteGuard<'_, B>> {
        let inner = self.inner.try_write()?;
        let held = order::MMAP.acquired(self.address());
        Some(self.write_guard(inner, held, Wait::forever(), None))
    }

    #[inline]
    fn write_guard<'s>(
        &'s self,
        inner: rwsem::WriteGuard<'s, Inner, Observed>,
        held: Held,
        wait: Wait<'s>,
        refused: Option<PublishError>,
    ) -> WriteGuard<'s, B> {
        let mut guard = WriteGuard {
            space: self,
            inner: Some(inner),
            held: Some(held),
            wait,
            after: After::default(),
            refused,
            once: false,
            notifies: self.core.notifiers.is_any(),
        };
        if self.core.attention.is_raised() {
            guard.reap_monitors();
        }
        guard
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    #[cold]
    fn wait_for_readers(&self, wait: Wait<'_>) -> Result<Option<PublishError>, GaveUp> {
        let until = Instant::now() + PATIENCE;
        loop {
            wait.check()?;
            let look = Instant::now() + PATIENCE / 100;
            match self.core.tree.domain().throttle(Some(look)) {
                Ok(()) => return Ok(None),
                Err(over) if look >= until => return Ok(Some(retired(over))),
                Err(_) => {}
            }
        }
    }

    /// The configuration.
    pub fn config(&self) -> Arc<SpaceConfig> {
        self.config.load_full()
    }

    /// Changes the configuration: limits, placement, capabilities. Calls under way may still see the old one.
    ///
    /// # Errors
    /// [`ConfigError`], with nothing changed: impossible values, or another page or task size.
    pub fn configure(&self, change: impl FnOnce(&mut SpaceConfig)) -> Result<(), ConfigError> {
        let mut guard = self.write();
        let old = Arc::clone(guard.config());
        let mut new = SpaceConfig::clone(&old);
        change(&mut new);
        new.validate()?;
        if new.page_size != old.page_size || new.task_size != old.task_size {
            return Err(ConfigError::Fixed);
        }
        new.mmap_base = Some(new.base());
        let new = Arc::new(new);
        guard.inner_mut().config = Arc::clone(&new);
        self.config.store(new);
        Ok(())
    }

    /// Totals, in pages.
    pub fn totals(&self) -> Totals {
        self.read().inner().totals
    }

    /// What calls have done so far.
    pub fn stats(&self) -> Stats {
        self.read().inner().stats
    }
}

impl Default for AddressSpace<()> {
    fn default() -> Self {
        Self::assemble(
            SpaceConfig {
                mmap_base: Some(SpaceConfig::default().base()),
                ..SpaceConfig::default()
            },
            &Domain::default(),
            (),
            AnonIds::default(),
        )
    }
}

impl<B: Backend> fmt::Debug for AddressSpace<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressSpace")
            .field("totals", &self.totals())
            .finish_non_exhaustive()
    }
}

impl<B: Backend> Drop for AddressSpace<B> {
    /// Lets go of files and owners: each mapping that is left counts as removed.
    fn drop(&mut self) {
        // Its pages go with the last part of it, after this.
        let _started = self.start(&notify::everything(), InvalidationReason::Release);
        let inner = self.inner.get_mut();
        let view = self.core.tree.locked(&inner.writer);
        if inner.is_linked {
            files::unlink_all(&self.core, view);
        }
        // Nobody has heard of a child that failed.
        if !inner.is_told {
            return;
        }
        let probed = self.core.probes_at_end();
        let mut gone = Vec::new();
        for entry in view.iter(0) {
            if entry.value.is_shared_maywrite()
                && let Some(file) = entry.value.file()
            {
                file.object().count_writable(-1);
            }
            let placed = crate::vma::Placed {
                start: entry.start,
                end: entry.end,
                vma: entry.value,
                pages: inner.config.pages(),
            };
            gone.extend(HugeEvent::of(placed, false));
            if let Some(hooks) = entry.value.hooks() {
                hooks.closed(crate::addr::VmRange::new(entry.start, entry.end));
            }
        }
        settle_huge(&gone);
        self.settle_probes(&probed);
    }
}

fn retired(over: OverLimit) -> PublishError {
    PublishError::Retired {
        pending_bytes: over.pending_bytes,
        hard_bytes: over.hard_bytes,
    }
}

/// Bytes that stay free below a mapping of these flags.
fn start_gap(config: &SpaceConfig, flags: VmaFlags) -> u64 {
    if flags.contains(VmaFlags::GROWSDOWN) {
        config.stack_guard_gap()
    } else if flags.contains(VmaFlags::SHADOW_STACK) {
        config.page_size
    } else {
        0
    }
}

/// A new record of these flags.
fn new_vma(config: &SpaceConfig, flags: VmaFlags, pgoff: u64) -> Vma {
    Vma::new(flags, pgoff, start_gap(config, flags))
}

/// The range of a call whose start has to be aligned and whose length is rounded up (madvise, mseal).
/// `Ok(None)`: nothing to do. `Err` carries no reason: each call has its own.
fn rounded_range(pages: Pages, start: u64, len: u64) -> Result<Option<(u64, u64)>, ()> {
    let rounded = pages.ceil_wrapping(len);
    if len != 0 && rounded == 0 {
        return Err(());
    }
    let end = start.checked_add(rounded).ok_or(())?;
    Ok((end != start).then_some((start, end)))
}
