//! A software MMU: radix page tables and reference-counted frames.
//!
//! | module | what it is |
//! |---|---|
//! | `frame` | 4 KiB of memory with a count of references; where they come from ([`FrameAllocator`]) |
//! | `pool` | the default allocator ([`FramePool`]) |
//! | `entry`, `table` | page tables, and what is done to them as a whole: taken out, moved, shared |
//! | `fault`, `huge` | how a page comes into being, and a huge one |
//! | `change` | what calls do to pages: zap, move, guard, dup |
//! | `pending` | allocations that wait for frames on their way back |
//! | `device` | frames of the embedder's ([`DeviceFrames`]) |
//! | `access` | loads, stores and pins ([`Accessor`]) |
//!
//! # Translations
//!
//! An entry says which frame a page shows, and whether stores go to it or to a copy. What an access *may* do is the mapping's
//! business: an accessor looks at both, and caches what came of it. So mprotect changes no entry.
//!
//! # Locks
//!
//! ```text
//! space's lock
//!   faults of a space (shared by a fault while it changes tables, exclusive in dup)
//!     copying of a shared table
//!       lock of a leaf table (two of them: the lower address first)
//!         page cache of a file
//!           frame allocator
//! ```
//!
//! # Who excludes whom
//!
//! | | |
//! |---|---|
//! | two faults on one page | the leaf's lock: the second one finds the page |
//! | fault, and a call that takes the mapping away | the call publishes, then takes tables and entries out; the fault asks under the leaf's lock whether its mapping is still attached. Whichever comes first, nothing stays |
//! | fault or access, and a call that zaps or moves pages of a mapping that is there afterwards | the mapping's gate is closed until the old pages are out of the tables, or where they belong: faults wait for the call |
//! | fault, and dup | the fault lock: the child gets what was there at the instant of the shootdown |
//! | parent and child | tables that both have are changed by neither: who wants to makes a copy of its own first |
//! | first store to a file's page, and whoever writes it back | the fault marks the page under the leaf's lock under which stores go to it from then on; who writes it back takes the mark away, and then comes to each leaf |
//! | fault of a file's page, and truncation | the file marks what it takes out, then unmaps it under the leaf's lock, under which the fault looks for the mark |
//! | access, and any of these calls | [`vma_rcu::shootdown`]: frames are let go of after it |

#[expect(unsafe_code, reason = "memory that guests share")]
mod access;
#[expect(unsafe_code, reason = "references in page-table entries")]
mod change;
#[expect(unsafe_code, reason = "memory of the embedder's")]
mod device;
#[expect(unsafe_code, reason = "references in page-table entries")]
mod entry;
#[expect(unsafe_code, reason = "references in page-table entries")]
mod fault;
#[expect(unsafe_code, reason = "memory that guests share")]
mod frame;
#[expect(unsafe_code, reason = "frames in blocks")]
mod huge;
#[expect(unsafe_code, reason = "memory of the operating system")]
mod mapping;
#[cfg(all(test, loom))]
#[allow(unsafe_code, clippy::unwrap_used, reason = "tests may")]
mod models;
mod pending;
#[expect(unsafe_code, reason = "frames without references")]
mod pool;
#[expect(unsafe_code, reason = "tables that are read without a lock")]
mod table;

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use vma_rcu::percpu_rwsem::PercpuRwSemaphore;
use vma_rcu::reclaim::{Domain, Reader};
use vma_rcu::shootdown::Shootdown;
use vma_rcu::sync::Mutex;
use vma_rcu::sync::atomic::{AtomicUsize, Ordering};

pub use self::access::{AccessError, Accessor};
use self::change::Owed;
pub use self::change::Taken;
pub use self::device::{DeviceFrames, InsertError};
pub use self::frame::{Frame, FrameAllocator, FrameHead, NewFrame, PageBytes};
use self::pending::Pending;
pub use self::pool::{FramePool, PoolStats};
pub use self::table::Resident;
use self::table::{LEAF_BYTES, NoMemory, Tables};
use super::{Backend, Fault, Faulted, FileUnmap, Fill, Filled, Inherited, PageChange};
use crate::error::PublishError;
use crate::file::FileObjectBuilder;
use crate::limits::{ConfigError, SpaceConfig};
use crate::space::FaultError;
use crate::vma::Vma;

/// Size of a page and of a frame in bytes.
pub const PAGE: usize = 4096;

/// Threads of a space that change tables without sharing a counter. Each costs 128 bytes per space.
const FAULT_COUNTERS: usize = 16;

/// What page tables of a space take at most, in bytes, unless it's told otherwise.
const TABLE_LIMIT: usize = 1 << 30;

/// Guest memory in frames of this process.
pub struct Paged {
    frames: Arc<dyn FrameAllocator>,
    /// Shared with children.
    pending: Arc<Pending>,
    table_limit: usize,
    /// Set when the space is made.
    state: OnceLock<State>,
}

struct State {
    domain: Domain,
    /// First address beyond the space.
    limit: u64,
    tables: Tables,
    /// The shared side while a fault changes tables; exclusively while they are shared with a child. Model:
    /// `a_child_has_what_was_there_at_one_instant`.
    faults: PercpuRwSemaphore<()>,
    shootdown: Shootdown,
    owed: Owed,
    pins: Arc<Pins>,
    /// What entries may borrow from.
    devices: Mutex<Vec<DeviceFrames>>,
}

/// How many pages of a space are pinned.
#[derive(Debug, Default)]
struct Pins(
    /// Counted up under the fault lock's shared side, read under the exclusive one, so that relaxed does.
    AtomicUsize,
);

impl Pins {
    fn is_any(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

impl fmt::Debug for Paged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Paged").finish_non_exhaustive()
    }
}

impl Default for Paged {
    fn default() -> Self {
        Self::new(Arc::new(FramePool::default()))
    }
}

impl Paged {
    /// Memory from an allocator, which spaces may share.
    pub fn new(frames: Arc<dyn FrameAllocator>) -> Self {
        Paged {
            frames,
            pending: Arc::default(),
            table_limit: TABLE_LIMIT,
            state: OnceLock::new(),
        }
    }

    /// Limits what page tables may take, in bytes; beyond it there is no memory. At first it's 1 GiB, which maps 512 GiB: a guest
    /// can ask for tables without pages, by guard pages or by reading.
    #[must_use]
    pub fn with_table_limit(mut self, bytes: usize) -> Self {
        self.table_limit = bytes;
        self
    }

    fn state(&self) -> &State {
        self.state
            .get()
            .expect("a space attaches its backend first")
    }

    /// A frame. Where there is none, frames of calls that are letting go of some are waited for.
    fn allocate(&self, addr: u64) -> Result<NewFrame, FaultError> {
        let frame = self.pending.until_some(|| self.frames.allocate());
        frame.ok_or(FaultError::OutOfMemory(addr))
    }

    /// Resident pages by kind: a count per table of 512 pages, summed up. Not of one instant while faults are under way.
    pub fn resident(&self) -> Resident {
        let state = self.state();
        let reader = state.domain.register();
        let _guard = reader.pin();
        state.tables.resident()
    }

    /// The same, counted page by page.
    pub fn recount(&self) -> Resident {
        let state = self.state();
        let reader = state.domain.register();
        let _guard = reader.pin();
        state.tables.recount()
    }

    /// What page tables take, in bytes.
    pub fn table_bytes(&self) -> usize {
        self.state().tables.bytes()
    }
}

impl State {
    fn try_new(domain: &Domain, limit: u64, table_limit: usize) -> Option<Self> {
        Some(State {
            domain: domain.clone(),
            limit,
            tables: Tables::try_new(limit, table_limit, domain)?,
            faults: PercpuRwSemaphore::with_counters((), FAULT_COUNTERS),
            shootdown: Shootdown::default(),
            owed: Owed::default(),
            pins: Arc::default(),
            devices: Mutex::default(),
        })
    }
}

impl State {
    /// Does something to tables while the space's lock is held, either side. Faults put copies in place of tables that are shared, and
    /// with the last link to one it's freed a grace period later, so that a guard is needed as well.
    fn walk<R>(&self, f: impl FnOnce() -> R) -> R {
        let reader = self.tables.may_share().then(|| self.domain.register());
        let _guard = reader.as_ref().map(Reader::pin);
        f()
    }

    /// Keeps a handle.
    fn keep(&self, frames: &DeviceFrames) -> Result<(), NoMemory> {
        let mut devices = self.devices.lock();
        if !devices.iter().any(|other| other.is(frames)) {
            devices.try_reserve(1).map_err(|_| NoMemory)?;
            devices.push(frames.clone());
        }
        Ok(())
    }

    /// Keeps what another space keeps.
    fn keep_all_of(&self, other: &State) -> Result<(), NoMemory> {
        let devices = other.devices.lock().clone();
        devices.iter().try_for_each(|frames| self.keep(frames))
    }
}

impl Backend for Paged {
    type Taken = Taken;

    fn attach(&self, domain: &Domain, config: &SpaceConfig) -> Result<(), ConfigError> {
        if config.page_size != PAGE as u64 {
            return Err(ConfigError::Backend);
        }
        if self.state.get().is_some() {
            // Made by `dup`.
            return Ok(());
        }
        let state = State::try_new(domain, config.task_size, self.table_limit)
            .ok_or(ConfigError::Backend)?;
        self.state.set(state).map_err(|_| ConfigError::Backend)
    }

    fn may_hold(&self, start: u64, end: u64) -> bool {
        let tables = &self.state().tables;
        let is_in_one_leaf = start / LEAF_BYTES == (end - 1) / LEAF_BYTES;
        !is_in_one_leaf || self.state().walk(|| tables.look(start).is_some())
    }

    fn prepare(
        &self,
        changes: &[PageChange],
        holes: &[Range<u64>],
        mapped: &[Range<u64>],
    ) -> Result<Option<Taken>, PublishError> {
        let state = self.state();
        let taken = state.walk(|| change::prepare(state, changes, holes, mapped));
        taken.map_err(PublishError::from)
    }

    fn commit(&self, changes: &[PageChange], holes: &[Range<u64>], taken: &mut Taken) {
        let state = self.state();
        // Also where nothing turns out to be there: else the calls that take something out would have a line to fetch under the lock
        // that the others don't touch (C5).
        if changes.iter().any(change::takes_frames) {
            taken.announce(&self.pending);
        }
        state.walk(|| change::commit(state, changes, holes, taken));
    }

    fn finish(&self, taken: Taken) {
        change::finish(self.state(), taken);
    }

    fn fault(&self, fault: &Fault<'_>) -> Result<Faulted, FaultError> {
        fault::fault(self, fault)
    }

    fn fill(&self, fault: &Fault<'_>, fill: &Fill<'_>) -> Result<Filled, FaultError> {
        fault::fill(self, fault, fill)
    }

    fn monitor_protect(&self, start: u64, end: u64, on: bool) -> Result<(), PublishError> {
        let state = self.state();
        let done = state.walk(|| change::monitor_protect(state, start, end, on));
        done.map_err(PublishError::from)
    }

    fn is_resident(&self, addr: u64, vma: &Vma, pgoff: u64) -> bool {
        if let Some(file) = vma.file().filter(|_| !vma.is_anonymous())
            && file.object().huge().is_none()
            && file.object().pages().contains(pgoff)
        {
            return true;
        }
        let state = self.state();
        let looked = state.walk(|| state.tables.look(addr).map(|(_, entry)| entry));
        looked.is_some_and(|entry| entry.head().is_some())
    }

    fn is_copied(&self, addr: u64) -> bool {
        let state = self.state();
        let reader = state.domain.register();
        let _guard = reader.pin();
        let looked = state.tables.look(addr);
        looked.is_some_and(|(_, entry)| entry.is_private())
    }

    fn dup(&self) -> Result<Self, PublishError> {
        let parent = self.state();
        let child = Paged {
            frames: Arc::clone(&self.frames),
            pending: Arc::clone(&self.pending),
            table_limit: self.table_limit,
            state: OnceLock::new(),
        };
        let state = State::try_new(&parent.domain, parent.limit, self.table_limit);
        let state = state.ok_or(PublishError::NoMemory)?;
        state.keep_all_of(parent)?;
        child.state.set(state).map_err(|_| PublishError::NoMemory)?;
        Ok(child)
    }

    fn dup_pages(&self, child: &Self, ranges: &[Inherited]) -> Result<(), PublishError> {
        change::dup(self, child, ranges).map_err(PublishError::from)
    }

    fn unmap_removed(&self, start: u64, end: u64) {
        let state = self.state();
        state.walk(|| change::unmap_removed(state, start, end));
    }

    fn settle(&self) {
        change::settle(self.state());
    }

    fn unmap_file(&self, unmap: &FileUnmap<'_>) {
        let state = self.state();
        state.walk(|| change::unmap_file(state, unmap));
    }

    fn protect_file(&self, unmap: &FileUnmap<'_>) -> usize {
        let state = self.state();
        state.walk(|| change::protect_file(state, unmap))
    }

    fn protect_clean(&self, start: u64, end: u64) {
        let state = self.state();
        state.walk(|| change::protect_clean(state, start, end));
    }

    fn protected(&self, entries: usize) {
        change::protected(self.state(), entries);
    }

    fn allocate(&self, frames: &dyn FrameAllocator) -> Option<NewFrame> {
        self.pending.until_some(|| frames.allocate())
    }

    fn unmap_huge(&self, start: u64, end: u64, part: &Frame) -> bool {
        change::unmap_huge(self.state(), start, end, part)
    }

    fn shared_memory(&self, builder: FileObjectBuilder) -> FileObjectBuilder {
        builder.frames(Arc::clone(&self.frames))
    }
}
