//! Threads map, unmap, move, protect, dup and end spaces while others attach probes and detach them. Whenever all stand still each probe is where a
//! scan finds its byte, and in the end nothing is left.
//!
//! `VMA_STRESS_SECONDS` says how long (1 if it isn't set).

#![allow(clippy::unwrap_used, reason = "tests may")]

mod probed;
mod random;
mod watchdog;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use probed::{Log, PAGE, RX, scan, text};
use random::{Random, stress_time};
use vma_core::paged::{FramePool, Paged};
use vma_core::{
    Errno, MapFlags, MapRequest, OpenFile, Probe, ProbeError, ProbeHandle, ProbeSite, Prot,
    RemapFlags, RemapRequest, SpaceConfig, SpaceHandle, System, Wait,
};

const KEPT: usize = 6;
const CALLERS: u64 = 3;
const TRACERS: u64 = 2;
const FILE_PAGES: u64 = 6;
const ARENA: u64 = 16;
const AT: u64 = 0x1_0000_0000;

type Handle = SpaceHandle<Paged>;

struct World {
    pool: FramePool,
    system: System<Paged>,
    files: [Arc<OpenFile>; 2],
    kept: [Mutex<Option<Handle>>; KEPT],
    /// Shared by who makes a call, exclusive for a look while nobody does.
    calls: RwLock<()>,
    stop: AtomicBool,
    dups: AtomicU64,
    attached: AtomicU64,
    refused: AtomicU64,
    given_up: AtomicU64,
    installed: AtomicU64,
    inside: AtomicU64,
    looks: AtomicU64,
}

impl World {
    fn new() -> Self {
        let system = System::default();
        World {
            pool: FramePool::default(),
            system,
            files: [probed::file(FILE_PAGES), probed::file(FILE_PAGES)],
            kept: [const { Mutex::new(None) }; KEPT],
            calls: RwLock::default(),
            stop: AtomicBool::new(false),
            dups: AtomicU64::new(0),
            attached: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            given_up: AtomicU64::new(0),
            installed: AtomicU64::new(0),
            inside: AtomicU64::new(0),
            looks: AtomicU64::new(0),
        }
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn kept(&self, slot: u64) -> Option<Handle> {
        self.kept[slot as usize % KEPT].lock().unwrap().clone()
    }

    fn keep(&self, slot: u64, handle: Option<Handle>) {
        let old = std::mem::replace(
            &mut *self.kept[slot as usize % KEPT].lock().unwrap(),
            handle,
        );
        drop(old);
    }

    /// Nobody is making a call: the probe's own list, what it was told, and a scan are the same.
    fn check(&self, handle: &ProbeHandle<Paged>, log: &Log) {
        let spaces: Vec<_> = (0..KEPT as u64)
            .filter_map(|slot| self.kept(slot))
            .collect();
        probed::assert_exact(&spaces, handle, log);
    }
}

/// Random calls; errors are as good as success here.
fn call(world: &World, seed: u64) {
    let mut random = Random::new(seed);
    while !world.stopped() {
        let _call = world.calls.read().unwrap();
        let slot = random.below(KEPT as u64);
        let Some(space) = world.kept(slot) else {
            let backend = Paged::new(Arc::new(world.pool.clone()));
            let new = world.system.create(SpaceConfig::default(), backend);
            world.keep(slot, Some(new.unwrap()));
            continue;
        };
        let file = &world.files[random.below(2) as usize];
        let (at, pages) = (
            AT + random.below(ARENA) * PAGE,
            1 + random.below(FILE_PAGES),
        );
        let len = pages * PAGE;
        match random.below(14) {
            0..5 => {
                let mut request = text(file, random.below(3), pages, at);
                if random.below(8) == 0 {
                    request.flags = MapFlags::SHARED | MapFlags::FIXED;
                }
                let _ = space.map(&request);
            }
            5..7 => drop(space.unmap(at, len)),
            7 => {
                let prot = [RX, Prot::all(), Prot::READ][random.below(3) as usize];
                let _ = space.protect(at, len, prot);
            }
            8 => {
                let _ = space.remap(&RemapRequest {
                    addr: at,
                    old_len: len,
                    new_len: len,
                    flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
                    new_addr: AT + random.below(ARENA) * PAGE,
                });
            }
            9 => {
                let mut guard = space.write();
                let _ = guard.map(&text(file, 0, pages, at));
                let _ = guard.unmap(at, PAGE);
                let _ = guard.map(&MapRequest::anonymous(PAGE, RX));
                drop(guard.downgrade());
            }
            10 => {
                let _ = space.accessor().store_u8(at, 1);
            }
            11..13 => {
                let child = space.dup().unwrap();
                world.dups.fetch_add(1, Ordering::Relaxed);
                // Its probes are its own.
                let _ = child.unmap(at, len);
                world.keep(random.below(KEPT as u64), Some(child));
            }
            _ => world.keep(slot, None),
        }
    }
}

/// Fails now and then, when told to, and makes calls of its own.
struct Sometimes {
    world: Arc<World>,
    log: Log,
    fails: u64,
    calls: AtomicU64,
}

impl Sometimes {
    fn act(&self, seed: u64, addr: u64) {
        let world = &self.world;
        let mut random = Random::new(seed ^ addr);
        // Who looks while all stand still waits for who makes calls, this thread perhaps: not for this one.
        if random.below(4) > 0 {
            return;
        }
        let Ok(_call) = world.calls.try_read() else {
            return;
        };
        let Some(space) = world.kept(random.below(KEPT as u64)) else {
            return;
        };
        world.inside.fetch_add(1, Ordering::Relaxed);
        let file = &world.files[random.below(2) as usize];
        let at = AT + random.below(ARENA) * PAGE;
        if random.below(2) == 0 {
            let _ = space.map(&text(file, 0, 1 + random.below(FILE_PAGES), at));
        } else {
            let _ = space.unmap(at, PAGE);
        }
    }
}

impl Probe<Paged> for Sometimes {
    fn install(&self, site: &ProbeSite<'_, Paged>) -> Result<(), Errno> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        if call == self.fails {
            return Err(Errno::ENOSPC);
        }
        self.act(2 * call, site.addr());
        self.log.note(site, true);
        Ok(())
    }

    fn remove(&self, site: &ProbeSite<'_, Paged>) {
        self.log.note(site, false);
        self.act(2 * self.calls.load(Ordering::Relaxed) + 1, site.addr());
    }
}

/// Attaches and detaches.
fn trace(world: &Arc<World>, seed: u64) {
    let mut random = Random::new(seed);
    while !world.stopped() {
        let probe = Arc::new(Sometimes {
            world: Arc::clone(world),
            log: Log::default(),
            fails: random.below(3) * random.below(4),
            calls: AtomicU64::new(0),
        });
        let file = &world.files[random.below(2) as usize];
        let wait = if random.below(4) == 0 {
            Wait::at_most(Duration::from_micros(random.below(100)))
        } else {
            Wait::forever()
        };
        let offset = random.below(FILE_PAGES * PAGE);
        let asked = probe.clone();
        match world
            .system
            .register_probe(file.object(), offset, asked, wait)
        {
            Ok(handle) => {
                world.attached.fetch_add(1, Ordering::Relaxed);
                if random.below(2) == 0 {
                    let still = world.calls.write().unwrap();
                    if handle.failures() == 0 {
                        world.check(&handle, &probe.log);
                        world.looks.fetch_add(1, Ordering::Relaxed);
                    }
                    drop(still);
                }
                drop(handle);
            }
            Err(ProbeError::Refused { errno, .. }) => {
                assert_eq!(errno, Errno::ENOSPC);
                world.refused.fetch_add(1, Ordering::Relaxed);
            }
            Err(ProbeError::GaveUp(_)) => {
                world.given_up.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => panic!("{error}"),
        }
        // Nowhere, whatever calls are under way, and it stays so.
        let calls = probe.log.calls();
        assert!(probe.log.places().is_empty() && calls.0 == calls.1);
        world.installed.fetch_add(calls.0 as u64, Ordering::Relaxed);
        thread::yield_now();
        assert_eq!(probe.log.calls(), calls);
    }
}

#[test]
fn probes_are_everywhere_or_nowhere() {
    let time = stress_time();
    let _watchdog = watchdog::watch(time * 3 + Duration::from_mins(1));
    let world = Arc::new(World::new());
    let log = Log::new();
    // Stays all the time.
    let byte = 2 * PAGE + 7;
    let handle = probed::register(&world.system, &world.files[0], byte, &log);
    thread::scope(|scope| {
        let world = &world;
        for seed in 1..=CALLERS {
            scope.spawn(move || call(world, seed));
        }
        for seed in 1..=TRACERS {
            scope.spawn(move || trace(world, 100 + seed));
        }
        let until = Instant::now() + time;
        while Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
            let still = world.calls.write().unwrap();
            world.check(&handle, &log);
            drop(still);
        }
        world.stop.store(true, Ordering::Relaxed);
    });
    for (name, count) in [
        ("dups", &world.dups),
        ("attached", &world.attached),
        ("refused", &world.refused),
        ("given up", &world.given_up),
        ("installed", &world.installed),
        ("calls of callbacks", &world.inside),
        ("looks", &world.looks),
    ] {
        assert!(count.load(Ordering::Relaxed) > 0, "no {name}");
    }
    world.check(&handle, &log);
    for slot in 0..KEPT as u64 {
        world.keep(slot, None);
    }
    let spaces: [&Handle; 0] = [];
    assert!(scan(spaces, world.files[0].object(), byte).is_empty());
    assert!(log.places().is_empty());
    drop(handle);
    let World {
        pool,
        system,
        files,
        ..
    } = Arc::into_inner(world).unwrap();
    assert!(system.is_empty());
    for file in files {
        assert_eq!(file.object().mapping_count(), 0);
        file.truncate(0).unwrap();
    }
    assert_eq!(Arc::strong_count(&log), 1);
    system.domain().synchronize(None).unwrap();
    drop(system);
    assert_eq!(pool.stats().used, 0);
}
