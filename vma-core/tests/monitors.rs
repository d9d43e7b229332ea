//! Monitors: how mappings look that have one, who is asked about what, and what waits for whom.

#![allow(clippy::unwrap_used, reason = "tests may")]

mod memory;
mod random;
mod uffd;
mod watchdog;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use memory::{PAGE, RW, check, map, map_at, map_file, populate, space};
use random::stress_time;
use uffd::{Kernel, Kind, Op, Outcome};
use vma_core::paged::{FramePool, Paged};
use vma_core::{
    Access, AccessMode, AddressSpace, Advice, CancelToken, Errno, FaultError, FileKind, FileObject,
    GaveUp, MapFlags, MapRequest, Monitor, MonitorError, MonitorEvent, MonitorFeatures as Features,
    MonitorModes as Modes, OpenFile, Prot, RemapFlags, RemapRequest, ResolveError, SpaceConfig,
    System, SystemConfig, VmRange, VmaFlags, Wait, WriteGuard,
};

const SOON: Duration = Duration::from_millis(50);

fn at(start: u64, pages: u64) -> VmRange {
    VmRange {
        start,
        end: start + pages * PAGE,
    }
}

fn monitor(features: Features) -> Monitor {
    Monitor::new(features).unwrap()
}

/// A space with some pages that are asked about.
fn missing(pool: &FramePool, pages: u64) -> (AddressSpace<Paged>, u64, Monitor) {
    let space = space(pool);
    let addr = map(&space, pages);
    let monitor = monitor(Features::empty());
    space
        .register_monitor(addr, pages * PAGE, &monitor, Modes::MISSING)
        .unwrap();
    (space, addr, monitor)
}

/// The next fault.
#[track_caller]
fn fault(monitor: &Monitor) -> (u64, Access, Modes) {
    match monitor.read_event(Wait::forever()) {
        Ok(MonitorEvent::Fault { addr, access, mode }) => (addr, access, mode),
        other => panic!("{other:?}"),
    }
}

fn page_of(byte: u8) -> Vec<u8> {
    vec![byte; PAGE as usize]
}

/// Ranges and whether they are registered.
fn layout(space: &AddressSpace<Paged>) -> Vec<(u64, u64, bool)> {
    let guard = space.read();
    guard
        .iter(0)
        .map(|vma| {
            let is_registered = vma.flags().contains(VmaFlags::UFFD_MISSING);
            (vma.range().start, vma.range().end, is_registered)
        })
        .collect()
}

// --- The layout ---

const ZONE: u64 = 0x2000_0000_0000;

/// The other side of [`Kernel`].
struct Model {
    space: AddressSpace,
    memory: [Arc<OpenFile>; 2],
    regular: Arc<OpenFile>,
    monitors: [Option<Monitor>; 4],
}

impl Model {
    fn new() -> Self {
        let memory = FileObject::builder(FileKind::Shmem, "m")
            .len(64 * PAGE)
            .build();
        let regular = FileObject::builder(FileKind::Regular, "f")
            .len(64 * PAGE)
            .build();
        Model {
            space: AddressSpace::default(),
            memory: [AccessMode::ReadWrite, AccessMode::Read]
                .map(|mode| OpenFile::new(memory.clone(), mode)),
            regular: OpenFile::new(regular, AccessMode::Read),
            monitors: [const { None }; 4],
        }
    }

    fn monitor(&mut self, number: usize) -> &Monitor {
        let features = Features::from_bits_retain(uffd::FEATURES[number]);
        self.monitors[number].get_or_insert_with(|| monitor(features))
    }

    /// Of events nobody reads nothing is waited for.
    fn guard(&self) -> WriteGuard<'_> {
        let now = Wait::until(Instant::now());
        self.space.write_with(now).unwrap()
    }

    fn run(&mut self, op: Op) -> Outcome {
        let place = |page: u64| ZONE + page * PAGE;
        let raw = |errno: Errno| errno.raw();
        match op {
            Op::Map(page, pages, kind) => {
                let (file, flags, prot) = match kind {
                    Kind::Anon => (None, MapFlags::PRIVATE | MapFlags::ANONYMOUS, RW),
                    Kind::ReadOnly => (None, MapFlags::PRIVATE | MapFlags::ANONYMOUS, Prot::READ),
                    Kind::Shared => (Some(&self.memory[0]), MapFlags::SHARED, RW),
                    Kind::Private => (Some(&self.memory[0]), MapFlags::PRIVATE, RW),
                    Kind::NeverWritten => (Some(&self.memory[1]), MapFlags::SHARED, Prot::READ),
                    Kind::File => (Some(&self.regular), MapFlags::PRIVATE, Prot::READ),
                };
                let request = MapRequest {
                    addr: place(page),
                    flags: flags | MapFlags::FIXED,
                    file: file.cloned(),
                    offset: if file.is_some() { page * PAGE } else { 0 },
                    ..MapRequest::anonymous(pages * PAGE, prot)
                };
                self.guard()
                    .map(&request)
                    .map(drop)
                    .map_err(|e| raw(e.errno()))
            }
            Op::Unmap(page, pages) => {
                let result = self.guard().unmap(place(page), pages * PAGE);
                result.map_err(|e| raw(e.errno()))
            }
            Op::Protect(page, pages, prot) => {
                let prot = Prot::from_bits_retain(prot);
                let result = self.guard().protect(place(page), pages * PAGE, prot);
                result.map_err(|e| raw(e.errno()))
            }
            Op::Remap(page, pages, to) => {
                let request = RemapRequest {
                    addr: place(page),
                    old_len: pages * PAGE,
                    new_len: pages * PAGE,
                    flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
                    new_addr: place(to),
                };
                let result = self.guard().remap(&request);
                result.map(drop).map_err(|e| raw(e.errno()))
            }
            Op::Register(number, page, pages, modes) => {
                let monitor = self.monitor(number).clone();
                let modes = Modes::from_bits_retain(modes);
                let result =
                    self.space
                        .register_monitor(place(page), pages * PAGE, &monitor, modes);
                result.map_err(|e| raw(e.errno()))
            }
            Op::Unregister(number, page, pages) => {
                let monitor = self.monitor(number).clone();
                let result = self
                    .space
                    .unregister_monitor(place(page), pages * PAGE, &monitor);
                result.map_err(|e| raw(e.errno()))
            }
            Op::Close(number) => {
                self.monitors[number] = None;
                Ok(())
            }
        }
    }

    /// Ranges, rights and codes of modes.
    fn layout(&self) -> Vec<String> {
        let guard = self.space.read();
        let line = |vma: vma_core::VmaRef<'_>| {
            let codes = vma.flags().codes();
            let modes: Vec<_> = codes.filter(|code| uffd::CODES.contains(code)).collect();
            let perms = vma.flags().perms().map(char::from);
            let perms: String = perms.iter().collect();
            format!(
                "{:x}-{:x} {perms} {}",
                vma.range().start,
                vma.range().end,
                modes.join(" ")
            )
        };
        guard.iter(0).map(line).collect()
    }
}

/// Random calls, each of which has the kernel's errno and leaves the kernel's layout.
#[test]
fn registered_layouts_are_the_kernels() {
    let mut kernel = match Kernel::new(ZONE) {
        Ok(kernel) => kernel,
        Err(reason) => return eprintln!("1 comparison skipped: {reason}"),
    };
    let mut registered = 0;
    for seed in 1..=60 {
        let mut model = Model::new();
        let mut random = uffd::Random(seed);
        let mut calls = Vec::new();
        for _ in 0..60 {
            let op = Op::random(&mut random);
            calls.push(op);
            let (theirs, ours) = (kernel.run(op), model.run(op));
            assert_eq!(ours, theirs, "{calls:?}");
            let layout = model.layout();
            assert_eq!(layout, kernel.layout(), "{calls:?}");
            registered += u32::from(layout.iter().any(|line| !line.ends_with(' ')));
            model.space.check().unwrap();
        }
        kernel.clear();
    }
    assert!(registered > 100, "there was something to compare");
}

#[test]
fn what_cannot_be_registered_is_refused_in_the_kernels_order() {
    let pool = FramePool::default();
    let space = space(&pool);
    let (mine, other) = (monitor(Features::empty()), monitor(Features::empty()));
    let addr = map(&space, 8);
    let register = |addr, len, monitor: &Monitor, modes: Modes| {
        let result = space.register_monitor(addr, len, monitor, modes);
        result.map_err(MonitorError::errno)
    };
    let (einval, missing) = (Err(Errno::EINVAL), Modes::MISSING);
    assert_eq!(register(addr, PAGE, &mine, Modes::empty()), einval);
    assert_eq!(
        register(addr, PAGE, &mine, Modes::from_bits_retain(8)),
        einval
    );
    assert_eq!(register(addr + 1, PAGE, &mine, missing), einval);
    assert_eq!(register(addr, PAGE + 1, &mine, missing), einval);
    assert_eq!(register(addr, 0, &mine, missing), einval);
    assert_eq!(register(u64::MAX - PAGE + 1, PAGE, &mine, missing), einval);
    assert_eq!(
        register(0x10_0000, PAGE, &mine, missing),
        einval,
        "nothing there"
    );
    assert_eq!(register(addr, PAGE, &mine, Modes::MINOR), einval);
    assert_eq!(register(addr, PAGE, &mine, missing), Ok(()));
    assert_eq!(register(addr, 2 * PAGE, &other, missing), Err(Errno::EBUSY));
    let unregister = |len, monitor: &Monitor| {
        let result = space.unregister_monitor(addr, len, monitor);
        result.map_err(MonitorError::errno)
    };
    assert_eq!(unregister(PAGE, &other), einval);
    assert_eq!(unregister(0, &mine), einval);
    assert_eq!(unregister(8 * PAGE, &mine), Ok(()));
    // A monitor is one space's.
    let child = space.dup().unwrap();
    let elsewhere = child.register_monitor(addr, PAGE, &mine, missing);
    assert_eq!(elsewhere.map_err(MonitorError::errno), einval);
    assert_eq!(
        Monitor::new(Features::from_bits_retain(1 << 20))
            .unwrap_err()
            .errno(),
        Errno::EINVAL
    );
    space.check().unwrap();
}

#[test]
fn a_name_and_a_monitor_do_not_get_lost_by_each_other() {
    let pool = FramePool::default();
    let space = memory::space_with(
        &pool,
        SpaceConfig {
            anon_names: true,
            ..SpaceConfig::default()
        },
    );
    let addr = map(&space, 4);
    let monitor = monitor(Features::empty());
    space.set_name(addr, 4 * PAGE, Some("n")).unwrap();
    space
        .register_monitor(addr, 2 * PAGE, &monitor, Modes::MISSING)
        .unwrap();
    space.set_name(addr, PAGE, Some("m")).unwrap();
    let names: Vec<_> = space
        .read()
        .iter(0)
        .map(|vma| {
            (
                vma.vma().anon_name().unwrap().to_string(),
                vma.flags().contains(VmaFlags::UFFD_MISSING),
            )
        })
        .collect();
    let is = |name: &str, registered| (name.to_owned(), registered);
    assert_eq!(names, [is("m", true), is("n", true), is("n", false)]);
    space.set_name(addr, PAGE, Some("n")).unwrap();
    drop(monitor);
    assert_eq!(layout(&space), [(addr, addr + 4 * PAGE, false)]);
}

#[test]
fn a_monitor_that_dies_leaves_mappings_as_if_it_had_not_been() {
    let pool = FramePool::default();
    let (space, addr, monitor) = missing(&pool, 8);
    let again = monitor.clone();
    map_at(&space, addr + 3 * PAGE, 2);
    assert_eq!(layout(&space).len(), 3);
    drop(monitor);
    assert_eq!(layout(&space).len(), 3, "there is another handle");
    drop(again);
    assert_eq!(layout(&space), [(addr, addr + 8 * PAGE, false)]);
    space.check().unwrap();
    // Another one can have it.
    let next = self::monitor(Features::empty());
    space
        .register_monitor(addr, PAGE, &next, Modes::MISSING)
        .unwrap();
}

// --- Faults ---

#[test]
fn an_access_waits_until_its_page_is_there() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let pool = FramePool::default();
    let (space, addr, monitor) = missing(&pool, 4);
    thread::scope(|scope| {
        let load = scope.spawn(|| space.accessor().load_u8(addr + 7));
        assert_eq!(fault(&monitor), (addr, Access::Read, Modes::MISSING));
        assert!(monitor.try_read_event().is_none(), "it's read once");
        // Woken for nothing it asks again.
        monitor.wake(at(addr, 1));
        assert_eq!(fault(&monitor).0, addr);
        assert_eq!(space.monitor_copy(&monitor, addr, &page_of(7)), Ok(PAGE));
        assert_eq!(load.join().unwrap(), Ok(7));
        let store = scope.spawn(|| space.accessor().store_u8(addr + PAGE, 1));
        assert_eq!(
            fault(&monitor),
            (addr + PAGE, Access::Write, Modes::MISSING)
        );
        assert_eq!(space.monitor_zero(&monitor, addr + PAGE, PAGE), Ok(PAGE));
        assert_eq!(store.join().unwrap(), Ok(()));
    });
    let mut cpu = space.accessor();
    assert_eq!(cpu.load_u8(addr + PAGE), Ok(1));
    assert_eq!(cpu.load_u8(addr + PAGE + 1), Ok(0));
    // What is there isn't asked about, before and after a store.
    cpu.store_u8(addr, 8).unwrap();
    assert_eq!(cpu.load_u8(addr + 1), Ok(7));
    assert!(monitor.try_read_event().is_none());
    check(&space);
    drop(cpu);
    drop(space);
    assert_eq!(pool.stats().used, 0);
}

#[test]
fn what_a_monitor_puts_in_place_is_refused_where_it_does_not_fit() {
    let pool = FramePool::default();
    let (space, addr, monitor) = missing(&pool, 4);
    map_at(&space, addr + 3 * PAGE, 1);
    let copy = |addr, pages: u64| {
        let bytes = vec![1; (pages * PAGE) as usize];
        let result = space.monitor_copy(&monitor, addr, &bytes);
        result.map_err(ResolveError::errno)
    };
    assert_eq!(copy(addr + 1, 1), Err(Errno::EINVAL));
    assert_eq!(copy(addr, 0), Err(Errno::EINVAL));
    assert_eq!(copy(addr + 2 * PAGE, 2), Err(Errno::ENOENT), "two mappings");
    assert_eq!(
        copy(addr + 3 * PAGE, 1),
        Err(Errno::ENOENT),
        "not registered"
    );
    assert_eq!(
        copy(addr + 64 * PAGE, 1),
        Err(Errno::ENOENT),
        "nothing there"
    );
    assert_eq!(copy(addr + PAGE, 1), Ok(PAGE));
    assert_eq!(copy(addr + PAGE, 1), Err(Errno::EEXIST));
    assert_eq!(copy(addr, 2), Ok(PAGE), "up to what is there");
    let zero = space.monitor_zero(&monitor, addr, PAGE);
    assert_eq!(zero.map_err(ResolveError::errno), Err(Errno::EEXIST));
    let minor = space.monitor_continue(&monitor, addr + 2 * PAGE, PAGE);
    assert_eq!(minor.map_err(ResolveError::errno), Err(Errno::EINVAL));
    let protect = space.monitor_write_protect(&monitor, addr, PAGE, true);
    assert_eq!(protect.map_err(ResolveError::errno), Err(Errno::ENOENT));
    let stranger = self::monitor(Features::empty());
    let foreign = space.monitor_copy(&stranger, addr, &page_of(1));
    assert_eq!(foreign.map_err(ResolveError::errno), Err(Errno::EINVAL));
    // Without pages behind it.
    let bare = AddressSpace::default();
    let addr = bare.map(&MapRequest::anonymous(PAGE, RW)).unwrap();
    let monitor = self::monitor(Features::empty());
    bare.register_monitor(addr, PAGE, &monitor, Modes::MISSING)
        .unwrap();
    let none = bare.monitor_copy(&monitor, addr, &page_of(1));
    assert_eq!(none.map_err(ResolveError::errno), Err(Errno::EINVAL));
}

#[test]
fn accesses_that_wait_go_on_when_the_monitor_dies() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let pool = FramePool::default();
    let (space, addr, monitor) = missing(&pool, 4);
    thread::scope(|scope| {
        let accesses = [0, 1, 1, 2].map(|page| {
            let space = &space;
            scope.spawn(move || space.accessor().load_u8(addr + page * PAGE))
        });
        let touch = scope.spawn(|| space.touch(addr, 4 * PAGE, Access::Write));
        for _ in 0..5 {
            fault(&monitor);
        }
        drop(monitor);
        for access in accesses {
            assert_eq!(access.join().unwrap(), Ok(0));
        }
        assert_eq!(touch.join().unwrap(), Ok(()));
    });
    assert_eq!(layout(&space), [(addr, addr + 4 * PAGE, false)]);
}

#[test]
fn accesses_that_wait_go_on_when_the_range_is_unregistered() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let pool = FramePool::default();
    let (space, addr, monitor) = missing(&pool, 1);
    thread::scope(|scope| {
        let load = scope.spawn(|| space.accessor().load_u8(addr));
        fault(&monitor);
        space.unregister_monitor(addr, PAGE, &monitor).unwrap();
        assert_eq!(load.join().unwrap(), Ok(0));
    });
}

#[test]
fn an_access_that_waits_can_be_given_up() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let pool = FramePool::default();
    let (space, addr, monitor) = missing(&pool, 2);
    let token = CancelToken::new();
    thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut cpu = space.accessor();
            cpu.set_token(Some(token.clone()));
            cpu.load_u8(addr)
        });
        fault(&monitor);
        token.cancel();
        assert_eq!(load.join().unwrap(), Err(FaultError::Interrupted(addr)));
    });
    let touched = space.touch_with(addr + PAGE, 1, Access::Write, Wait::at_most(SOON));
    assert_eq!(touched, Err(FaultError::Interrupted(addr + PAGE)));
    assert!(
        monitor.try_read_event().is_none(),
        "the message is taken back"
    );
    assert_eq!(
        monitor.read_event(Wait::at_most(SOON)).unwrap_err(),
        GaveUp::TimedOut
    );
}

#[test]
fn what_cannot_wait_is_an_error() {
    let pool = FramePool::default();
    let (space, addr, monitor) = missing(&pool, 2);
    let touched = space.write().touch(addr, 1, Access::Read);
    assert_eq!(touched, Err(FaultError::Monitored(addr)));
    assert!(monitor.try_read_event().is_none());
    let signals = self::monitor(Features::SIGBUS);
    let other = map(&space, 1);
    space
        .register_monitor(other, PAGE, &signals, Modes::MISSING)
        .unwrap();
    assert_eq!(
        space.accessor().load_u8(other),
        Err(FaultError::Monitored(other))
    );
    let touched = space.touch(other, 1, Access::Write);
    assert_eq!(touched, Err(FaultError::Monitored(other)));
    assert!(signals.try_read_event().is_none());
    space.monitor_copy(&signals, other, &page_of(3)).unwrap();
    assert_eq!(space.accessor().load_u8(other), Ok(3));
}

#[test]
fn populating_asks_as_well() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let pool = FramePool::default();
    let (space, addr, monitor) = missing(&pool, 3);
    thread::scope(|scope| {
        let advise = scope.spawn(|| space.advise(addr, 3 * PAGE, Advice::POPULATE_WRITE));
        for page in 0..3 {
            assert_eq!(fault(&monitor).0, addr + page * PAGE);
            space
                .monitor_copy(&monitor, addr + page * PAGE, &page_of(1))
                .unwrap();
        }
        advise.join().unwrap().unwrap();
    });
    assert_eq!(space.backend().resident().anon, 3);
}

#[test]
fn pages_of_shared_memory_are_asked_about() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let pool = FramePool::default();
    let space = space(&pool);
    let memory = FileObject::builder(FileKind::Shmem, "m")
        .len(4 * PAGE)
        .build();
    memory.write_at(PAGE, &page_of(5)).unwrap();
    let memory = OpenFile::new(memory, AccessMode::ReadWrite);
    let shared = map_file(&space, &memory, 4, MapFlags::SHARED);
    let private = map_file(&space, &memory, 4, MapFlags::PRIVATE);
    let monitor = monitor(Features::empty());
    let modes = Modes::MISSING | Modes::MINOR;
    space
        .register_monitor(shared, 4 * PAGE, &monitor, modes)
        .unwrap();
    space
        .register_monitor(private, 4 * PAGE, &monitor, Modes::MISSING)
        .unwrap();
    thread::scope(|scope| {
        // The file has the page.
        let load = scope.spawn(|| space.accessor().load_u8(shared + PAGE));
        assert_eq!(fault(&monitor), (shared + PAGE, Access::Read, Modes::MINOR));
        let copy = space.monitor_copy(&monitor, shared + PAGE, &page_of(1));
        assert_eq!(copy.map_err(ResolveError::errno), Err(Errno::EEXIST));
        assert_eq!(
            space.monitor_continue(&monitor, shared + PAGE, PAGE),
            Ok(PAGE)
        );
        assert_eq!(load.join().unwrap(), Ok(5));
        // It hasn't.
        let load = scope.spawn(|| space.accessor().load_u8(shared));
        assert_eq!(fault(&monitor), (shared, Access::Read, Modes::MISSING));
        let minor = space.monitor_continue(&monitor, shared, PAGE);
        assert_eq!(minor.map_err(ResolveError::errno), Err(Errno::EFAULT));
        space.monitor_copy(&monitor, shared, &page_of(6)).unwrap();
        assert_eq!(load.join().unwrap(), Ok(6));
        let mut bytes = [0];
        memory.object().read_at(0, &mut bytes).unwrap();
        assert_eq!(bytes, [6], "it's the file's page");
        // What the file has is no reason to ask here; a copy is the mapping's own.
        assert_eq!(space.accessor().load_u8(private), Ok(6));
        let store = scope.spawn(|| space.accessor().store_u8(private + 2 * PAGE, 1));
        assert_eq!(fault(&monitor).0, private + 2 * PAGE);
        space
            .monitor_copy(&monitor, private + 2 * PAGE, &page_of(9))
            .unwrap();
        store.join().unwrap().unwrap();
        assert_eq!(memory.object().resident_pages(), 2);
    });
    memory.truncate(3 * PAGE).unwrap();
    let beyond = space.monitor_copy(&monitor, shared + 3 * PAGE, &page_of(1));
    assert_eq!(beyond.map_err(ResolveError::errno), Err(Errno::EFAULT));
    check(&space);
}

#[test]
fn stores_to_protected_pages_are_asked_about() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let pool = FramePool::default();
    let space = space(&pool);
    let addr = map(&space, 4);
    populate(&space, addr, 2, 1);
    let mut cpu = space.accessor();
    cpu.load_u8(addr + 2 * PAGE).unwrap();
    let monitor = monitor(Features::empty());
    space
        .register_monitor(addr, 4 * PAGE, &monitor, Modes::WP)
        .unwrap();
    cpu.store_u8(addr, 2).unwrap();
    let protect = |pages, on| space.monitor_write_protect(&monitor, addr, pages * PAGE, on);
    protect(4, true).unwrap();
    assert_eq!(cpu.load_u8(addr), Ok(2), "loads aren't");
    // What is cached for stores doesn't do any more.
    let over = CancelToken::new();
    over.cancel();
    cpu.set_token(Some(over));
    assert_eq!(cpu.store_u8(addr, 3), Err(FaultError::Interrupted(addr)));
    cpu.set_token(None);
    // A child that shares the pages isn't asked, nor changes anything.
    let child = space.dup().unwrap();
    child.accessor().store_u8(addr, 9).unwrap();
    thread::scope(|scope| {
        for page in [0, 2] {
            let to = addr + page * PAGE;
            let space = &space;
            let store = scope.spawn(move || space.accessor().store_u8(to, 3));
            assert_eq!(fault(&monitor), (to, Access::Write, Modes::WP));
            let one = space.monitor_write_protect(&monitor, to, PAGE, false);
            one.unwrap();
            store.join().unwrap().unwrap();
            assert_eq!(cpu.load_u8(to), Ok(3));
        }
    });
    // Pages that come later, or instead, aren't protected.
    cpu.store_u8(addr + 3 * PAGE, 1).unwrap();
    space.advise(addr + PAGE, PAGE, Advice::DONTNEED).unwrap();
    cpu.store_u8(addr + PAGE, 1).unwrap();
    // What is registered once more isn't either.
    protect(4, true).unwrap();
    space.unregister_monitor(addr, 4 * PAGE, &monitor).unwrap();
    space
        .register_monitor(addr, 4 * PAGE, &monitor, Modes::WP)
        .unwrap();
    cpu.store_u8(addr + PAGE, 2).unwrap();
    assert!(monitor.try_read_event().is_none());
    check(&space);
    assert_eq!(child.accessor().load_u8(addr), Ok(9));
}

// --- Events ---

/// Every event, all of which are waited for.
const EVENTS: Features = Features::EVENT_FORK
    .union(Features::EVENT_REMAP)
    .union(Features::EVENT_REMOVE)
    .union(Features::EVENT_UNMAP);

/// The event that a call leaves; meanwhile nothing can be put in place.
#[track_caller]
fn event_of(
    space: &AddressSpace<Paged>,
    monitor: &Monitor,
    call: impl FnOnce() + Send,
) -> MonitorEvent {
    let returned = AtomicBool::new(false);
    thread::scope(|scope| {
        let call = scope.spawn(|| {
            call();
            returned.store(true, Ordering::Relaxed);
        });
        while !monitor.is_changing() {
            thread::yield_now();
        }
        assert!(!returned.load(Ordering::Relaxed));
        let copy = space.monitor_copy(monitor, 0x1_0000_0000, &page_of(1));
        assert_eq!(copy.map_err(ResolveError::errno), Err(Errno::EAGAIN));
        let event = monitor.read_event(Wait::forever()).unwrap();
        call.join().unwrap();
        assert!(!monitor.is_changing());
        event
    })
}

#[test]
fn calls_wait_until_their_events_are_read() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let pool = FramePool::default();
    let space = space(&pool);
    let (addr, to) = (map(&space, 8), map(&space, 8));
    let monitor = monitor(EVENTS);
    let register = |addr| {
        space
            .register_monitor(addr, 8 * PAGE, &monitor, Modes::MISSING)
            .unwrap();
    };
    register(addr);
    let event = |call: &(dyn Fn() + Sync)| event_of(&space, &monitor, call);
    let unmapped = event(&|| space.unmap(addr + 6 * PAGE, 4 * PAGE).unwrap());
    assert!(
        matches!(unmapped, MonitorEvent::Unmap(range) if range == at(addr + 6 * PAGE, 4)),
        "as it was asked for: {unmapped:?}"
    );
    let unmapped = event(&|| map_at(&space, addr + 5 * PAGE, 1));
    assert!(matches!(unmapped, MonitorEvent::Unmap(range) if range == at(addr + 5 * PAGE, 1)));
    space.monitor_copy(&monitor, addr, &page_of(4)).unwrap();
    let removed = event(&|| space.advise(addr, 8 * PAGE, Advice::DONTNEED).unwrap_or(()));
    assert!(matches!(removed, MonitorEvent::Remove(range) if range == at(addr, 5)));
    space.monitor_copy(&monitor, addr, &page_of(4)).unwrap();
    // Two mappings of one monitor: one event.
    let more = map(&space, 5);
    for page in [0, 2, 4] {
        space
            .register_monitor(more + page * PAGE, PAGE, &monitor, Modes::MISSING)
            .unwrap();
    }
    let unmapped = event(&|| space.unmap(more, 5 * PAGE).unwrap());
    assert!(matches!(unmapped, MonitorEvent::Unmap(range) if range == at(more, 5)));
    // A move is one event, and taking away the source another.
    thread::scope(|scope| {
        let moved = scope.spawn(|| {
            let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
            space.remap(&RemapRequest {
                addr,
                old_len: 2 * PAGE,
                new_len: 2 * PAGE,
                flags,
                new_addr: to,
            })
        });
        let read = || monitor.read_event(Wait::forever()).unwrap();
        assert!(
            matches!(read(), MonitorEvent::Remap { from, to: new, len } if (from, new, len) == (addr, to, 2 * PAGE))
        );
        assert!(matches!(read(), MonitorEvent::Unmap(range) if range == at(addr, 2)));
        moved.join().unwrap().unwrap();
    });
    let is_registered = |start| layout(&space).iter().any(|vma| vma.0 == start && vma.2);
    assert!(is_registered(to));
    assert_eq!(space.accessor().load_u8(to), Ok(4));
}

#[test]
fn who_gives_up_waiting_for_an_event_leaves_what_is_done() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let pool = FramePool::default();
    let space = space(&pool);
    let addr = map(&space, 4);
    let monitor = monitor(EVENTS);
    space
        .register_monitor(addr, 4 * PAGE, &monitor, Modes::MISSING)
        .unwrap();
    let mut guard = space.write_with(Wait::at_most(SOON)).unwrap();
    guard.unmap(addr, PAGE).unwrap();
    drop(guard);
    assert_eq!(layout(&space).len(), 1);
    assert!(!monitor.is_changing());
    assert!(monitor.try_read_event().is_none());
    // One that dies is waited for no longer.
    thread::scope(|scope| {
        let unmap = scope.spawn(|| space.unmap(addr + PAGE, PAGE));
        while !monitor.is_changing() {
            thread::yield_now();
        }
        drop(monitor);
        unmap.join().unwrap().unwrap();
    });
    assert_eq!(layout(&space), [(addr + 2 * PAGE, addr + 4 * PAGE, false)]);
}

#[test]
fn a_child_has_a_monitor_only_if_the_parents_hears_of_forks() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let pool = FramePool::default();
    let (space, _, deaf) = missing(&pool, 2);
    let other = map(&space, 2);
    let monitor = monitor(EVENTS);
    let register = |start, monitor: &Monitor| {
        space
            .register_monitor(start, PAGE, monitor, Modes::MISSING)
            .unwrap();
    };
    let mut child = None;
    assert!(space.dup().is_ok(), "nobody hears of it");
    register(other, &monitor);
    register(other + PAGE, &monitor);
    let third = map(&space, 2);
    register(third, &monitor);
    let event = event_of(&space, &monitor, || child = Some(space.dup().unwrap()));
    let (child, MonitorEvent::Fork(heir)) = (child.unwrap(), event) else {
        panic!("no fork");
    };
    let registered: Vec<_> = layout(&child).into_iter().filter(|vma| vma.2).collect();
    let mut expected = [(other, other + 2 * PAGE, true), (third, third + PAGE, true)];
    expected.sort_unstable();
    assert_eq!(registered, expected);
    thread::scope(|scope| {
        let load = scope.spawn(|| child.accessor().load_u8(other));
        assert_eq!(fault(&heir).0, other);
        let foreign = child.monitor_copy(&monitor, other, &page_of(1));
        assert_eq!(foreign.map_err(ResolveError::errno), Err(Errno::EINVAL));
        child.monitor_copy(&heir, other, &page_of(8)).unwrap();
        assert_eq!(load.join().unwrap(), Ok(8));
        drop(heir);
        assert_eq!(child.accessor().load_u8(other + PAGE), Ok(0));
    });
    assert!(layout(&child).iter().all(|vma| !vma.2));
    assert_eq!(layout(&space).iter().filter(|vma| vma.2).count(), 3);
    drop(deaf);
}

/// C9: who doesn't answer delays the fork that it was told of, and nobody else.
#[test]
fn a_monitor_that_does_not_answer_delays_its_own_fork_alone() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let pool = FramePool::default();
    let system = System::<Paged>::new(SystemConfig::default());
    let member = || {
        let backend = Paged::new(Arc::new(pool.clone()));
        let config = SpaceConfig::default();
        let space = AddressSpace::with_backend(config, system.domain(), backend);
        system.adopt(space.unwrap()).unwrap()
    };
    let (parent, other) = (member(), member());
    let addr = map(&parent, 2);
    map(&other, 1);
    let monitor = monitor(Features::EVENT_FORK);
    parent
        .register_monitor(addr, PAGE, &monitor, Modes::MISSING)
        .unwrap();
    let token = CancelToken::new();
    thread::scope(|scope| {
        let fork = scope.spawn(|| parent.dup_with(Wait::killable(&token)));
        while !monitor.is_changing() {
            thread::yield_now();
        }
        other.dup().unwrap();
        drop(system.quiesce_dups(Wait::forever()).unwrap());
        parent.unmap(addr + PAGE, PAGE).unwrap();
        assert!(!fork.is_finished());
        token.cancel();
        // Giving up leaves the result; nobody has the child's monitor.
        let child = fork.join().unwrap().unwrap();
        assert!(layout(&child).iter().all(|vma| !vma.2));
        assert!(monitor.try_read_event().is_none());
    });
}

/// Nobody is told, and nobody waited for.
#[test]
fn a_space_that_ends_waits_for_no_monitor() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let system = System::<()>::new(SystemConfig::default());
    let handle = system.create(SpaceConfig::default(), ()).unwrap();
    let addr = handle.map(&MapRequest::anonymous(PAGE, RW)).unwrap();
    let monitor = monitor(EVENTS);
    handle
        .register_monitor(addr, PAGE, &monitor, Modes::MISSING)
        .unwrap();
    assert!(handle.exit());
    assert!(monitor.try_read_event().is_none());
}

#[test]
fn protection_moves_with_its_page() {
    let pool = FramePool::default();
    let space = space(&pool);
    let (addr, to) = (map(&space, 1), map(&space, 1));
    populate(&space, addr, 1, 1);
    let monitor = monitor(Features::EVENT_REMAP);
    space
        .register_monitor(addr, PAGE, &monitor, Modes::WP)
        .unwrap();
    space
        .monitor_write_protect(&monitor, addr, PAGE, true)
        .unwrap();
    let request = RemapRequest {
        addr,
        old_len: PAGE,
        new_len: PAGE,
        flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
        new_addr: to,
    };
    let mut guard = space.write_with(Wait::at_most(SOON)).unwrap();
    guard.remap(&request).unwrap();
    drop(guard);
    let touched = space.touch_with(to, 1, Access::Write, Wait::at_most(SOON));
    assert_eq!(touched, Err(FaultError::Interrupted(to)));
    drop(monitor);
    assert_eq!(space.touch(to, 1, Access::Write), Ok(()));
    assert_eq!(space.accessor().load_u8(to), Ok(1));
}

// --- All at once ---

/// Threads that access, one that answers, one that changes the layout, and monitors that die and follow each other: all of them come to
/// their end, and no access sees what nobody has put there.
#[test]
fn everybody_goes_on() {
    let _watchdog = watchdog::watch(stress_time() + Duration::from_mins(2));
    let pool = FramePool::default();
    let space = space(&pool);
    let pages = 16;
    let addr = map(&space, pages);
    let end = Instant::now() + stress_time();
    let (running, answered) = (AtomicBool::new(true), AtomicU64::new(0));
    thread::scope(|scope| {
        let mut others = Vec::new();
        for number in 0..3_u64 {
            let space = &space;
            let running = &running;
            others.push(scope.spawn(move || {
                let mut cpu = space.accessor();
                let mut turn = number;
                while running.load(Ordering::Relaxed) {
                    turn = turn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let page = addr + (turn >> 40) % pages * PAGE;
                    match cpu.load_u8(page) {
                        Ok(byte) => assert!(byte == 0 || byte == 7, "{byte}"),
                        Err(FaultError::Unmapped(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            }));
        }
        others.push(scope.spawn(|| {
            let mut turn = 0_u64;
            while running.load(Ordering::Relaxed) {
                turn += 1;
                let page = addr + turn % pages * PAGE;
                match turn % 4 {
                    0 => space.unmap(page, PAGE).unwrap(),
                    1 => space.advise(page, PAGE, Advice::DONTNEED).unwrap_or(()),
                    2 => drop(space.dup().unwrap()),
                    _ => map_at(&space, page, 1),
                }
            }
        }));
        while Instant::now() < end {
            let monitor = monitor(EVENTS);
            let until = Instant::now() + Duration::from_millis(5);
            let _ = space.register_monitor(addr, pages * PAGE, &monitor, Modes::MISSING);
            while let Ok(event) = monitor.read_event(Wait::until(until)) {
                if let MonitorEvent::Fault { addr, .. } = event {
                    match space.monitor_copy(&monitor, addr, &page_of(7)) {
                        Ok(_) => _ = answered.fetch_add(1, Ordering::Relaxed),
                        // It asks again if that's not so any more.
                        Err(_) => monitor.wake(at(addr, 1)),
                    }
                }
            }
        }
        running.store(false, Ordering::Relaxed);
        for other in others {
            other.join().unwrap();
        }
    });
    assert!(answered.load(Ordering::Relaxed) > 0);
    space.check().unwrap();
    check(&space);
    drop(space);
    assert_eq!(pool.stats().used, 0);
}
