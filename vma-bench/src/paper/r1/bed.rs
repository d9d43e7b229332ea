//! A space whose lock is watched, the three ways to unmap, and one unmapping.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use vma_core::paged::{FramePool, Paged};
use vma_core::{
    AddressSpace, Advice, AdviseError, ConfigError, Domain, FaultError, LockTimes, MapError,
    MapRequest, Prot, SpaceConfig, UnmapError,
};

pub(super) const PAGE: u64 = 4096;
pub(super) const RW: Prot = Prot::READ.union(Prot::WRITE);
/// Where what is unmapped is: not at the edge of a page table.
pub(super) const RANGE: u64 = 0x10_0000_5000;
/// Where pages are that aren't in the range: with tables of its own up to the second level, and a neighbour in those above.
pub(super) const BESIDE: u64 = 0x20_0000_5000;
/// Where others are at work: tables of its own up to the second level.
pub(super) const ELSEWHERE: u64 = 0x4_0000_5000;

/// Why it can't be measured.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each says all there is")]
pub enum R1Error {
    #[error("making a space: {0}")]
    Config(#[from] ConfigError),
    #[error("mapping: {0}")]
    Map(#[from] MapError),
    #[error("populating: {0}")]
    Populate(#[from] AdviseError),
    #[error("unmapping: {0}")]
    Unmap(#[from] UnmapError),
    #[error("storing: {0}")]
    Store(#[from] FaultError),
    #[error("the kernel refuses memory: {0}")]
    Kernel(#[from] std::io::Error),
}

/// How the pages go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Under the exclusive lock: before.
    Exclusive,
    /// Under the shared lock: after, as Linux does it.
    Downgraded,
    /// With no lock: this library's default.
    Detached,
}

impl Way {
    pub(super) const ALL: [Way; 3] = [Way::Exclusive, Way::Downgraded, Way::Detached];

    /// All of them, another one first in each repetition.
    pub(super) fn turn(repetition: usize) -> impl Iterator<Item = Way> {
        (0..Self::ALL.len()).map(move |i| Self::ALL[(i + repetition) % Self::ALL.len()])
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Way::Exclusive => "exclusive",
            Way::Downgraded => "downgraded",
            Way::Detached => "detached (default)",
        }
    }

    pub(super) fn unmap(
        self,
        space: &AddressSpace<Paged>,
        at: u64,
        len: u64,
    ) -> Result<(), UnmapError> {
        match self {
            Way::Exclusive => space.unmap_exclusively(at, len),
            Way::Downgraded => space.unmap_downgraded(at, len),
            Way::Detached => space.unmap(at, len),
        }
    }
}

/// One unmapping.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unmapped {
    /// How long the lock was held exclusively.
    pub(super) hold: Duration,
    /// The whole call.
    pub(super) call: Duration,
}

/// A space, and the frames that come back to it.
pub(super) struct Bed {
    pub(super) space: AddressSpace<Paged>,
    times: Arc<LockTimes>,
    /// Unmappings so far. Relaxed: one thread's.
    turns: AtomicUsize,
}

impl fmt::Debug for Bed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bed").finish_non_exhaustive()
    }
}

impl Bed {
    /// A space whose pool keeps all frames that it has ever had, so that populating again is quick.
    pub(super) fn new() -> Result<Self, R1Error> {
        let times = Arc::new(LockTimes::default());
        let space = unwatched()?.with_lock_observer(times.clone());
        let turns = AtomicUsize::new(0);
        Ok(Bed {
            space,
            times,
            turns,
        })
    }

    /// Maps the range, populated in its first `pages`, and in its last one in place of one of these: the same page tables
    /// are at both ends.
    pub(super) fn map(&self, len: u64, pages: u64) -> Result<(), R1Error> {
        self.space
            .map(&MapRequest::anonymous(len, RW).fixed(RANGE))?;
        if pages > 0 {
            let last = RANGE + len - PAGE;
            self.space.advise(last, PAGE, Advice::POPULATE_WRITE)?;
        }
        if pages > 1 {
            let first = (pages - 1) * PAGE;
            self.space.advise(RANGE, first, Advice::POPULATE_WRITE)?;
        }
        Ok(())
    }

    /// Unmaps it.
    pub(super) fn unmap(&self, way: Way, len: u64) -> Result<Duration, UnmapError> {
        let begin = Instant::now();
        way.unmap(&self.space, RANGE, len)?;
        Ok(begin.elapsed())
    }

    /// Maps, populates and unmaps, with nobody beside. As many pages as the range could have are populated in any case, those that it
    /// doesn't have in another mapping: what is left in the caches is the same.
    pub(super) fn once(&self, way: Way, len: u64, pages: u64) -> Result<Unmapped, R1Error> {
        self.space
            .map(&MapRequest::anonymous(len, RW).fixed(BESIDE))?;
        let rest = (len - pages * PAGE).max(PAGE);
        self.space.advise(BESIDE, rest, Advice::POPULATE_WRITE)?;
        self.map(len, pages)?;
        self.warm_up()?;
        self.times.reset();
        let call = self.unmap(way, len)?;
        let hold = self.times.held(true).longest;
        self.space.unmap(BESIDE, len)?;
        Ok(Unmapped { hold, call })
    }

    /// Populating has filled the caches with pages: brings back what calls of any size use. Another number of calls each
    /// time: some calls do work for those before them (records are let go of in batches), and that's not to be the same one of every round.
    fn warm_up(&self) -> Result<(), R1Error> {
        let turn = self.turns.fetch_add(1, Ordering::Relaxed);
        for _ in 0..32 + turn * 29 % 64 {
            self.space
                .map(&MapRequest::anonymous(PAGE, RW).fixed(ELSEWHERE))?;
            self.space.unmap(ELSEWHERE, PAGE)?;
        }
        Ok(())
    }
}

/// The same kind of space without anything watching its lock.
pub(super) fn unwatched() -> Result<AddressSpace<Paged>, R1Error> {
    let pool = FramePool::with_spare(usize::MAX, usize::MAX);
    let backend = Paged::new(Arc::new(pool));
    let config = SpaceConfig::default();
    Ok(AddressSpace::with_backend(
        config,
        &Domain::default(),
        backend,
    )?)
}
