//! Many threads create spaces, dup them, look for them, keep them, print them all, end them and keep dups out, attach probes, listen to
//! what becomes invalid and die as monitors that forks wait for, all at once. In the end
//! nobody is registered, every frame is back, the indexes of files are empty and who was told of something was told of its end.
//!
//! `VMA_STRESS_SECONDS` says how long (1 if it isn't set).

#![allow(clippy::unwrap_used, reason = "tests may")]

#[path = "memory/mod.rs"]
mod memory;
mod random;
mod watchdog;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use memory::{PAGE, RW};
use random::{Random, stress_time};
use vma_core::paged::{FramePool, Paged};
use vma_core::{
    AccessMode, AddressSpace, CancelToken, Errno, FileKind, FileObject, ForkError, GaveUp,
    Invalidation, MapFlags, MapRequest, Monitor, MonitorFeatures, MonitorModes, Notifier, OpenFile,
    Probe, ProbeSite, Prot, SpaceConfig, SpaceHandle, System, SystemConfig, VmRange, Wait,
    WeakSpaceHandle,
};

/// Numbers are used again soon.
const ID_LIMIT: u32 = 40;
const KEPT: usize = 12;
const CALLERS: u64 = 3;
const FILE_PAGES: u64 = 16;

type Handle = SpaceHandle<Paged>;

/// What tells a space apart from others that have had its number: the address of its first mapping.
const BASE: u64 = 0x1_0000_0000;
const STEP: u64 = 0x100_0000;

struct World {
    pool: FramePool,
    system: System<Paged>,
    file: Arc<OpenFile>,
    kept: [Mutex<Option<Handle>>; KEPT],
    stop: AtomicBool,
    births: AtomicU64,
    dups: AtomicU64,
    ends: AtomicU64,
    walks: AtomicU64,
    quiets: AtomicU64,
    given_up: AtomicU64,
    /// Probes that were somewhere, notifiers that heard something, events that were read.
    probed: AtomicU64,
    heard: AtomicU64,
    events: AtomicU64,
    /// Only under the exclusive side of the dup semaphore.
    quiet: AtomicU64,
}

impl World {
    fn new() -> Self {
        let pool = FramePool::default();
        let object = FileObject::builder(FileKind::Shmem, "f")
            .len(FILE_PAGES * PAGE)
            .frames(Arc::new(pool.clone()))
            .build();
        World {
            pool,
            system: System::new(SystemConfig {
                id_limit: ID_LIMIT,
                ..SystemConfig::default()
            }),
            file: OpenFile::new(object, AccessMode::ReadWrite),
            kept: [const { Mutex::new(None) }; KEPT],
            stop: AtomicBool::new(false),
            births: AtomicU64::new(0),
            dups: AtomicU64::new(0),
            ends: AtomicU64::new(0),
            walks: AtomicU64::new(0),
            quiets: AtomicU64::new(0),
            given_up: AtomicU64::new(0),
            probed: AtomicU64::new(0),
            heard: AtomicU64::new(0),
            events: AtomicU64::new(0),
            quiet: AtomicU64::new(0),
        }
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn kept(&self, slot: u64) -> Option<Handle> {
        self.kept[slot as usize % KEPT].lock().unwrap().clone()
    }

    /// What was there ends here, unless somebody else keeps it.
    fn keep(&self, slot: u64, handle: Handle) {
        let old = self.kept[slot as usize % KEPT]
            .lock()
            .unwrap()
            .replace(handle);
        if let Some(old) = old
            && old.exit()
        {
            self.ends.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn create(&self) -> Option<Handle> {
        let backend = Paged::new(Arc::new(self.pool.clone()));
        let domain = self.system.domain();
        let space = AddressSpace::with_backend(SpaceConfig::default(), domain, backend).unwrap();
        let birth = self.births.fetch_add(1, Ordering::Relaxed);
        let mark = MapRequest::anonymous(PAGE, RW).fixed(BASE + birth * STEP);
        space.map(&mark).unwrap();
        space.seal(BASE + birth * STEP, PAGE, 0).unwrap();
        self.system.adopt(space).ok()
    }
}

/// Random calls; errors are as good as success here.
fn call(world: &World, seed: u64) {
    let mut random = Random::new(seed);
    let reader = world.system.register();
    let mut weak: Vec<WeakSpaceHandle<Paged>> = Vec::new();
    while !world.stopped() {
        match random.below(10) {
            0 => {
                if let Some(new) = world.create() {
                    weak.push(new.downgrade());
                    world.keep(random.below(99), new);
                }
            }
            1..4 => dup(world, &mut random),
            4 => {
                if let Some(space) = world.kept(random.below(99)) {
                    let (kind, prot) = match random.below(3) {
                        0 => (MapFlags::SHARED, RW),
                        1 => (MapFlags::PRIVATE, RW),
                        _ => (MapFlags::PRIVATE, Prot::READ | Prot::EXEC),
                    };
                    let request = MapRequest {
                        flags: kind,
                        file: Some(world.file.clone()),
                        ..MapRequest::anonymous((1 + random.below(FILE_PAGES)) * PAGE, prot)
                    };
                    if let Ok(at) = space.map(&request) {
                        let _ = space.accessor().store_u8(at, 1);
                    }
                }
            }
            5 => {
                let id = 1 + random.below(ID_LIMIT.into()) as u32;
                let got = world.system.get(id, &reader.pin());
                if let Some(space) = got {
                    assert_eq!(space.id().get(), id);
                    // It can't end under a handle: its first mapping is sealed.
                    let at = space.read().iter(0).next().unwrap().start();
                    let _ = space.accessor().store_u8(at, 7);
                    let _ = space.map(&MapRequest::anonymous(4 * PAGE, Prot::READ));
                    assert_eq!(space.read().iter(0).next().unwrap().start(), at);
                }
            }
            6 => {
                if weak.len() > 4 {
                    let which = random.below(weak.len() as u64) as usize;
                    let old = weak.swap_remove(which);
                    if let Some(space) = old.upgrade() {
                        assert_eq!(space.id(), old.id());
                        assert!(space.read().iter(0).next().is_some());
                    }
                }
            }
            7 => {
                let slot = random.below(KEPT as u64) as usize;
                let old = world.kept[slot].lock().unwrap().take();
                drop(old);
            }
            _ => {
                if let Some(space) = world.kept(random.below(99)) {
                    let guard = space.write();
                    thread::yield_now();
                    drop(guard);
                }
            }
        }
    }
}

fn dup(world: &World, random: &mut Random) {
    let Some(parent) = world.kept(random.below(99)) else {
        return;
    };
    let token = CancelToken::new();
    let wait = match random.below(4) {
        0 => Wait::at_most(Duration::from_micros(random.below(200))),
        1 => {
            token.cancel();
            Wait::killable(&token)
        }
        _ => Wait::forever(),
    };
    match parent.dup_with(wait) {
        Ok(child) => {
            assert_ne!(child.id(), parent.id());
            world.dups.fetch_add(1, Ordering::Relaxed);
            world.keep(random.below(99), child);
        }
        Err(ForkError::GaveUp(GaveUp::TimedOut | GaveUp::Cancelled)) => {
            world.given_up.fetch_add(1, Ordering::Relaxed);
        }
        Err(ForkError::Register(_)) => {}
        Err(error) => panic!("{error}"),
    }
}

/// Prints all spaces: each is one space's, whatever happens to its number.
fn walk(world: &World) {
    let reader = world.system.register();
    while !world.stopped() {
        let guard = reader.pin();
        let mut last = 0;
        for member in world.system.iter(0, &guard) {
            let id = member.id().get();
            assert!(id > last && id < ID_LIMIT, "{id} after {last}");
            last = id;
            let first = member.iter(0).next().map(vma_core::VmaRef::start);
            let text = member.maps();
            // It may have begun to end meanwhile.
            if let (Some(first), Some(line)) = (first, text.lines().next()) {
                let start = line.split('-').next().unwrap();
                let start = u64::from_str_radix(start, 16).unwrap();
                assert!(start == first || !member.is_used(), "{start:x} {first:x}");
            }
        }
        world.walks.fetch_add(1, Ordering::Relaxed);
        drop(guard);
        thread::yield_now();
    }
}

/// What is begun and ended in turn, at each place or of each range.
#[derive(Default)]
struct Balance {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Probe<Paged> for Balance {
    fn install(&self, _: &ProbeSite<'_, Paged>) -> Result<(), Errno> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn remove(&self, _: &ProbeSite<'_, Paged>) {
        self.ended.fetch_add(1, Ordering::Relaxed);
    }
}

impl Notifier for Balance {
    fn invalidate_start(&self, _: &Invalidation) {
        self.begun.fetch_add(1, Ordering::Relaxed);
    }

    fn invalidate_end(&self, _: &Invalidation) {
        self.ended.fetch_add(1, Ordering::Relaxed);
    }
}

impl Balance {
    fn check(&self) {
        let ended = self.ended.load(Ordering::Relaxed);
        assert_eq!(self.begun.load(Ordering::Relaxed), ended);
    }
}

/// Attaches a probe to a page that spaces map to execute, and detaches it.
fn trace(world: &World) {
    let mut random = Random::new(77);
    while !world.stopped() {
        let probe = Arc::new(Balance::default());
        let offset = random.below(FILE_PAGES) * PAGE;
        let wait = Wait::at_most(Duration::from_millis(50));
        let object = world.file.object();
        if let Ok(handle) = world
            .system
            .register_probe(object, offset, probe.clone(), wait)
        {
            thread::sleep(Duration::from_micros(random.below(300)));
            handle.unregister();
            world.probed.fetch_add(
                u64::from(probe.begun.load(Ordering::Relaxed) > 0),
                Ordering::Relaxed,
            );
        }
        // Nobody else has it: calls that were to see to it have.
        probe.check();
    }
}

/// Hears what becomes invalid in a space, for a while.
fn listen(world: &World) {
    let mut random = Random::new(78);
    while !world.stopped() {
        let Some(space) = world.kept(random.below(99)) else {
            continue;
        };
        let notifier = Arc::new(Balance::default());
        let all = VmRange {
            start: 0,
            end: 1 << 47,
        };
        let registered = space.register_notifier(all, notifier.clone());
        thread::sleep(Duration::from_micros(random.below(300)));
        drop(registered);
        let heard = notifier.begun.load(Ordering::Relaxed) > 0;
        world.heard.fetch_add(u64::from(heard), Ordering::Relaxed);
        drop(space);
    }
}

/// Asked and told of a range of a space, reads some of it, and dies: nobody waits for it any more.
fn watch(world: &World) {
    let mut random = Random::new(79);
    let features = MonitorFeatures::EVENT_FORK | MonitorFeatures::EVENT_UNMAP;
    while !world.stopped() {
        let Some(space) = world.kept(random.below(99)) else {
            continue;
        };
        let monitor = Monitor::new(features).unwrap();
        let Ok(at) = space.map(&MapRequest::anonymous(4 * PAGE, RW)) else {
            continue;
        };
        let modes = MonitorModes::MISSING;
        let is_there = space.register_monitor(at, 4 * PAGE, &monitor, modes);
        if is_there.is_ok() {
            for _ in 0..random.below(4) {
                let wait = Wait::at_most(Duration::from_micros(200));
                if let Ok(event) = monitor.read_event(wait) {
                    world.events.fetch_add(1, Ordering::Relaxed);
                    drop(event);
                }
            }
        }
        drop(monitor);
        // Others may have unmapped or ended it.
        let _ = space.unmap(at, 4 * PAGE);
    }
}

fn quiesce(world: &World) {
    while !world.stopped() {
        if let Ok(guard) = world
            .system
            .quiesce_dups(Wait::at_most(Duration::from_millis(50)))
        {
            assert_eq!(world.quiet.fetch_add(1, Ordering::Relaxed), 0);
            thread::yield_now();
            world.quiet.fetch_sub(1, Ordering::Relaxed);
            world.quiets.fetch_add(1, Ordering::Relaxed);
            drop(guard);
        }
        thread::sleep(Duration::from_micros(100));
    }
}

#[test]
fn nothing_is_left_of_spaces_that_came_and_went() {
    let time = stress_time();
    let _watchdog = watchdog::watch(time * 3 + Duration::from_mins(1));
    let world = World::new();
    thread::scope(|scope| {
        for seed in 1..=CALLERS {
            let world = &world;
            scope.spawn(move || call(world, seed));
        }
        scope.spawn(|| walk(&world));
        scope.spawn(|| quiesce(&world));
        scope.spawn(|| quiesce(&world));
        scope.spawn(|| trace(&world));
        scope.spawn(|| listen(&world));
        scope.spawn(|| watch(&world));
        let until = Instant::now() + time;
        while Instant::now() < until {
            thread::sleep(Duration::from_millis(20));
        }
        world.stop.store(true, Ordering::Relaxed);
    });
    for (name, count) in [
        ("dups", &world.dups),
        ("ends", &world.ends),
        ("walks", &world.walks),
        ("quiets", &world.quiets),
        ("given up", &world.given_up),
        ("probes", &world.probed),
        ("invalidations", &world.heard),
        ("events", &world.events),
    ] {
        assert!(count.load(Ordering::Relaxed) > 0, "no {name}");
    }
    for slot in &world.kept {
        if let Some(space) = slot.lock().unwrap().take() {
            memory::check(&space);
            space.check().unwrap();
            assert!(space.exit(), "nobody else has it");
        }
    }
    let World {
        pool, system, file, ..
    } = world;
    assert!(system.is_empty());
    assert_eq!(file.object().mapping_count(), 0);
    assert_eq!(file.object().writable_mappings(), 0);
    system.domain().synchronize(None).unwrap();
    assert_eq!(system.domain().stats().pending_objects, 0);
    drop(system);
    file.truncate(0).unwrap();
    drop(file);
    assert_eq!(pool.stats().used, 0);
}
