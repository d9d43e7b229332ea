//! A busy process, another one that only dups, and who attaches probes to a file that neither maps.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use vma_core::paged::{FramePool, Paged};
use vma_core::{
    AccessMode, AddressSpace, CreateError, Errno, FileKind, FileObject, ForkError, MapError,
    MapFlags, MapRequest, OpenFile, Probe, ProbeError, ProbeHandle, ProbeSite, Prot, RegisterError,
    SpaceConfig, SpaceHandle, System, SystemConfig, UnmapError, Wait,
};

use super::beside::{Beside, LOOK, Step, wait_until};
use super::watch::{ByRole, Role};
use crate::peers::sys::{Seat, sit};

const PAGE: u64 = 4096;
const RW: Prot = Prot::READ.union(Prot::WRITE);
/// Where A maps.
const RANGE: u64 = 0x10_0000_0000;
/// Where the probed file is mapped.
const PROBED: u64 = 0x4_0000_0000;
/// Spaces that map it.
const TRACED: usize = 4;
/// From one call of A's to the next: who has been woken for A's lock gets there.
const GAP: Duration = Duration::from_micros(50);

/// Why it can't be measured.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each says all there is")]
pub enum R2Error {
    #[error("creating a space: {0}")]
    Create(#[from] CreateError),
    #[error("registering a space: {0}")]
    Register(#[from] RegisterError),
    #[error("making a space: {0}")]
    Config(#[from] vma_core::ConfigError),
    #[error("mapping: {0}")]
    Map(#[from] MapError),
    #[error("unmapping: {0}")]
    Unmap(#[from] UnmapError),
    #[error("dup: {0}")]
    Fork(#[from] ForkError),
    #[error("attaching a probe: {0}")]
    Probe(#[from] ProbeError),
}

/// What is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// A dup sleeps on its parent's lock with the dup semaphore held: before.
    Nested,
    /// It holds neither while it sleeps on the other: after, this library's default.
    Apart,
    /// The same beside a B that runs an empty loop.
    Control,
}

impl Way {
    pub(super) const ALL: [Way; 3] = [Way::Nested, Way::Apart, Way::Control];

    /// All of them, another one first in each repetition.
    pub(super) fn turn(repetition: usize) -> impl Iterator<Item = Way> {
        (0..Self::ALL.len()).map(move |i| Self::ALL[(i + repetition) % Self::ALL.len()])
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Way::Nested => "nested",
            Way::Apart => "apart (default)",
            Way::Control => "empty loop",
        }
    }
}

/// How much is measured while the load goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Effort {
    pub(super) runs: usize,
    /// Attaches and detaches of a run.
    pub(super) turns: usize,
}

/// A probe that notes where it is.
struct Breakpoint;

impl Probe<Paged> for Breakpoint {
    fn install(&self, site: &ProbeSite<'_, Paged>) -> Result<(), Errno> {
        black_box(site.addr());
        Ok(())
    }

    fn remove(&self, site: &ProbeSite<'_, Paged>) {
        black_box(site.addr());
    }
}

/// The longest times of a run.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Run {
    /// Dups in B: all of them, and those beside an attach and a detach.
    pub(super) longest: Duration,
    pub(super) beside_attach: Duration,
    pub(super) beside_detach: Duration,
    pub(super) attach: Duration,
    /// Waits for the dup semaphore: of B, of A's dups, of the tracer.
    pub(super) waits: [Duration; 3],
    /// Waits of A's dups for A's lock, of A's other thread for it, and that thread's hold of it.
    pub(super) at_home: [Duration; 3],
}

fn populated(mut request: MapRequest) -> MapRequest {
    request.flags |= MapFlags::POPULATE;
    request
}

/// See the [module](self).
pub(super) struct Bed {
    system: System<Paged>,
    is_control: bool,
    busy: SpaceHandle<Paged>,
    elsewhere: SpaceHandle<Paged>,
    /// They map the probed file.
    _traced: Vec<SpaceHandle<Paged>>,
    file: Arc<OpenFile>,
    dups: Arc<ByRole>,
    home: Arc<ByRole>,
    /// Of the tracer, so far. Relaxed: one thread's.
    steps: AtomicU32,
}

/// Frames of all that A has.
pub(super) fn pool() -> Arc<FramePool> {
    // Frames stay, so that populating again takes as long each time.
    Arc::new(FramePool::with_spare(usize::MAX, usize::MAX))
}

impl Bed {
    pub(super) fn new(way: Way, pool: &Arc<FramePool>) -> Result<Self, R2Error> {
        let (dups, home) = (Arc::<ByRole>::default(), Arc::<ByRole>::default());
        let system = System::new(SystemConfig {
            nested_dup: way == Way::Nested,
            dup_observer: Some(dups.clone()),
            ..SystemConfig::default()
        });
        let paged = Paged::new(pool.clone());
        let busy = AddressSpace::with_backend(SpaceConfig::default(), system.domain(), paged)?;
        let busy = system.adopt(busy.with_lock_observer(home.clone()))?;
        // Theirs is another pool: what A has is no matter of theirs.
        let others = Arc::new(FramePool::default());
        let create = || system.create(SpaceConfig::default(), Paged::new(others.clone()));
        let elsewhere = create()?;
        for prot in [RW, Prot::READ, RW, Prot::READ] {
            elsewhere.map(&populated(MapRequest::anonymous(16 * PAGE, prot)))?;
        }
        let probed = FileObject::builder(FileKind::Shmem, "probed").len(16 * PAGE);
        let file = OpenFile::new(probed.build(), AccessMode::Read);
        let traced = (0..TRACED).map(|_| {
            let space = create()?;
            let text = Prot::READ | Prot::EXEC;
            let request =
                MapRequest::file(file.clone(), 0, 16 * PAGE, text, MapFlags::PRIVATE).fixed(PROBED);
            space.map(&request)?;
            Ok(space)
        });
        let traced = traced.collect::<Result<_, R2Error>>()?;
        Ok(Bed {
            system,
            is_control: way == Way::Control,
            busy,
            elsewhere,
            _traced: traced,
            file,
            dups,
            home,
            steps: AtomicU32::new(0),
        })
    }

    /// Attaches a probe: in each of the spaces that map the file it's installed when this returns.
    fn attach(&self, number: usize) -> Result<ProbeHandle<Paged>, R2Error> {
        let offset = number as u64 * PAGE;
        let probe = Arc::new(Breakpoint);
        let file = self.file.object();
        let attached = self
            .system
            .register_probe(file, offset, probe, Wait::forever());
        Ok(attached?)
    }

    /// Maps and unmaps as the source's load: the lock is held until all pages are there, and shared until they are gone.
    fn map_and_unmap(&self, len: u64) -> Result<(), R2Error> {
        let request = populated(MapRequest::anonymous(len, RW).fixed(RANGE));
        self.busy.write().map(&request)?;
        thread::sleep(GAP);
        self.busy.unmap_downgraded(RANGE, len)?;
        thread::sleep(GAP);
        Ok(())
    }

    /// Runs beside one and the same load: for each number of probes those in which so many are attached and detached.
    pub(super) fn run<const N: usize>(
        &self,
        len: u64,
        probes: [usize; N],
        effort: Effort,
    ) -> Result<[Vec<Run>; N], R2Error> {
        let beside = Beside::default();
        thread::scope(|scope| {
            let mapper = scope.spawn(|| {
                sit(Seat::Second);
                Role::Mapper.play();
                beside.until_stopped(|| beside.cycle(|| self.map_and_unmap(len)))
            });
            let forker = scope.spawn(|| {
                sit(Seat::Second);
                Role::Forker.play();
                beside.until_stopped(|| {
                    drop(self.busy.dup()?);
                    beside.count_fork();
                    Ok(())
                })
            });
            let elsewhere = scope.spawn(|| {
                sit(Seat::First);
                Role::Elsewhere.play();
                if self.is_control {
                    return beside.empty_loop();
                }
                beside.until_stopped(|| self.dup_elsewhere(&beside))
            });
            let threads = [mapper, forker, elsewhere];
            let is_done = || threads.iter().any(ScopedJoinHandle::is_finished);
            let runs = probes.map(|probes| self.runs(&beside, probes, effort, &is_done));
            beside.stop();
            for thread in threads {
                // A panic over there has been reported.
                thread.join().unwrap_or(Ok(()))?;
            }
            let mut all = [const { Vec::new() }; N];
            for (all, runs) in all.iter_mut().zip(runs) {
                *all = runs?;
            }
            Ok(all)
        })
    }

    fn dup_elsewhere(&self, beside: &Beside) -> Result<(), R2Error> {
        let step = beside.step();
        let begin = Instant::now();
        let child = self.elsewhere.dup()?;
        let time = begin.elapsed();
        beside.note(step, time);
        drop(child);
        Ok(())
    }

    fn runs(
        &self,
        beside: &Beside,
        probes: usize,
        effort: Effort,
        is_done: &impl Fn() -> bool,
    ) -> Result<Vec<Run>, R2Error> {
        let mut runs = Vec::new();
        // What the caches and the pool haven't seen yet isn't measured.
        if !wait_until(|| beside.is_warm(), is_done) {
            return Ok(runs);
        }
        for _ in 0..effort.runs {
            runs.push(self.one_run(beside, probes, effort.turns, is_done)?);
        }
        Ok(runs)
    }

    fn one_run(
        &self,
        beside: &Beside,
        probes: usize,
        turns: usize,
        is_done: &impl Fn() -> bool,
    ) -> Result<Run, R2Error> {
        self.dups.reset();
        self.home.reset();
        beside.begin();
        let forks = beside.forks();
        let mut attach = Duration::ZERO;
        for _ in 0..turns {
            thread::sleep(self.pause(beside));
            beside.go_on();
            let begin = Instant::now();
            let attached = (0..probes).map(|number| self.attach(number));
            let attached = attached.collect::<Result<Vec<_>, _>>()?;
            attach = attach.max(begin.elapsed());
            beside.go_on();
            thread::sleep(self.pause(beside));
            beside.go_on();
            attached.into_iter().for_each(ProbeHandle::unregister);
            beside.go_on();
        }
        // So that a wait of A's for its own lock has been seen.
        wait_until(|| beside.forks() > forks, is_done);
        let wait = |role| self.dups.longest_wait(role);
        Ok(Run {
            longest: beside.longest(),
            beside_attach: beside.longest_beside(Step::Attach),
            beside_detach: beside.longest_beside(Step::Detach),
            attach,
            waits: [Role::Elsewhere, Role::Forker, Role::Tracer].map(wait),
            at_home: [
                self.home.longest_wait(Role::Forker),
                self.home.longest_wait(Role::Mapper),
                self.home.longest_hold(Role::Mapper),
            ],
        })
    }

    /// Until the tracer's next step: another part of what A's loop takes each time, evenly spread up to a half.
    fn pause(&self, beside: &Beside) -> Duration {
        const GOLDEN: f64 = 0.618_034;
        let step = self.steps.fetch_add(1, Ordering::Relaxed);
        let part = (f64::from(step) * GOLDEN).fract();
        LOOK + beside.last_cycle().mul_f64(part / 2.0)
    }
}
