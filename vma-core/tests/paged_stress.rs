//! Virtual CPUs load and store while other threads take pages and rights away: nobody sees what a call has forbidden once it has
//! returned, and in the end every frame is back.
//!
//! Every page has a *state* beside it: what its owner, the one thread that makes calls about it, has last done with it, and a number
//! that grows. A load between two looks at the same state has to agree with it; a stamp that is older than the state, or another
//! page's, has come through a translation that should be gone.
//!
//! `VMA_STRESS_SECONDS` says how long (1 if it isn't set).

#![allow(clippy::unwrap_used, reason = "tests may")]

mod random;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use random::{Random, stress_time};
use vma_core::paged::{Accessor, FramePool, Paged};
use vma_core::{
    AccessMode, AddressSpace, Advice, Domain, FaultError, FileKind, FileObject, MapFlags,
    MapRequest, OpenFile, Prot, RemapFlags, RemapRequest, SpaceConfig,
};

const PAGE: u64 = 4096;
const RW: Prot = Prot::READ.union(Prot::WRITE);
/// Pages of anonymous memory, and as many of a file.
const PAGES: u64 = 24;
const AT: u64 = 0x5000_0000;
const FILE_AT: u64 = 0x6000_0000;
const ELSEWHERE: u64 = 0x7000_0000;

/// Last bits of a state.
const READABLE: u64 = 0;
/// Whatever happens is right.
const CHANGING: u64 = 1;
const UNMAPPED: u64 = 2;
const DENIED: u64 = 3;
const BEYOND: u64 = 4;
const MODES: u64 = 8;

struct World {
    space: AddressSpace<Paged>,
    file: Arc<OpenFile>,
    /// Of the anonymous pages, then of the file's.
    states: Vec<AtomicU64>,
    stop: AtomicBool,
}

fn address(page: u64) -> u64 {
    if page < PAGES {
        AT + page * PAGE
    } else {
        FILE_AT + (page - PAGES) * PAGE
    }
}

/// What a page's owner writes into it while its number is `number`.
fn stamp(page: u64, number: u64) -> u64 {
    (page + 1) << 48 | number
}

impl World {
    fn new(pool: &FramePool) -> Self {
        let backend = Paged::new(Arc::new(pool.clone()));
        let domain = Domain::default();
        let space = AddressSpace::with_backend(SpaceConfig::default(), &domain, backend).unwrap();
        let object = FileObject::builder(FileKind::Shmem, "f")
            .len(PAGES * PAGE)
            .frames(Arc::new(pool.clone()))
            .build();
        let file = OpenFile::new(object, AccessMode::ReadWrite);
        let world = World {
            space,
            file,
            states: (0..2 * PAGES).map(|_| AtomicU64::new(READABLE)).collect(),
            stop: AtomicBool::new(false),
        };
        world.map(AT, PAGES);
        let shared = MapRequest {
            addr: FILE_AT,
            flags: MapFlags::SHARED | MapFlags::FIXED,
            file: Some(world.file.clone()),
            ..MapRequest::anonymous(PAGES * PAGE, RW)
        };
        world.space.map(&shared).unwrap();
        world
    }

    fn map(&self, addr: u64, pages: u64) {
        let request = MapRequest {
            addr,
            flags: MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED,
            ..MapRequest::anonymous(pages * PAGE, RW)
        };
        self.space.map(&request).unwrap();
    }

    fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Its owner is about to make a call about a page; the number that it has afterwards.
    fn begin(&self, page: u64) -> u64 {
        let state = &self.states[page as usize];
        let number = state.load(Ordering::Relaxed) / MODES + 1;
        state.store(number * MODES + CHANGING, Ordering::SeqCst);
        number
    }

    /// The call has returned.
    fn end(&self, page: u64, number: u64, mode: u64) {
        self.states[page as usize].store(number * MODES + mode, Ordering::SeqCst);
    }

    /// A load, or a store and a load, by a virtual CPU.
    fn look(&self, cpu: &mut Accessor<'_>, page: u64, store: bool) {
        let at = address(page);
        let state = &self.states[page as usize];
        let before = state.load(Ordering::SeqCst);
        // The second word is everybody's: it never holds another page's.
        if store {
            let _ = cpu.store_u64(at + 8, page + 1);
        }
        let seen = cpu.load_u64(at);
        let other = cpu.load_u64(at + 8);
        let after = state.load(Ordering::SeqCst);
        if let Ok(other) = other {
            assert!(
                other == 0 || other == page + 1,
                "page {page} shows {other}'s word"
            );
        }
        if let Ok(seen) = seen {
            let (of, number) = (seen >> 48, seen & 0xffff_ffff_ffff);
            assert!(
                seen == 0 || of == page + 1,
                "page {page} shows stamp {seen:#x}"
            );
            // While a call is under way the page may still show what was there before.
            let oldest = match before % MODES {
                CHANGING => 0,
                _ => before / MODES,
            };
            assert!(
                seen == 0 || number >= oldest,
                "page {page} shows {number} after {oldest}"
            );
        }
        if before == after {
            let right = match (before % MODES, seen) {
                (CHANGING, _) | (READABLE, Ok(_)) => true,
                (UNMAPPED, Err(FaultError::Unmapped(addr)))
                | (DENIED, Err(FaultError::Denied { addr, .. }))
                | (BEYOND, Err(FaultError::BeyondEnd(addr))) => addr == at,
                _ => false,
            };
            assert!(right, "page {page} in state {before}: {seen:?}");
        }
    }

    fn virtual_cpu(&self, seed: u64) {
        let mut random = Random::new(seed);
        let mut cpu = self.space.accessor();
        while !self.is_over() {
            let page = random.below(2 * PAGES);
            for _ in 0..8 {
                self.look(&mut cpu, page, random.below(4) == 0);
            }
        }
    }

    /// The owner of some of the anonymous pages.
    fn anonymous_owner(&self, pages: std::ops::Range<u64>, seed: u64) {
        let mut random = Random::new(seed);
        let mut cpu = self.space.accessor();
        let space = &self.space;
        while !self.is_over() {
            let page = pages.start + random.below(pages.end - pages.start);
            let at = address(page);
            let number = self.begin(page);
            match random.below(6) {
                0 => space.advise(at, PAGE, Advice::DONTNEED).unwrap(),
                1 => {
                    space.unmap(at, PAGE).unwrap();
                    self.end(page, number, UNMAPPED);
                    self.begin(page);
                    self.map(at, 1);
                }
                2 => {
                    space.protect(at, PAGE, Prot::empty()).unwrap();
                    self.end(page, number, DENIED);
                    self.begin(page);
                    space.advise(at, PAGE, Advice::DONTNEED).unwrap();
                    space.protect(at, PAGE, RW).unwrap();
                }
                3 => {
                    space.advise(at, PAGE, Advice::GUARD_INSTALL).unwrap();
                    self.end(page, number, UNMAPPED);
                    self.begin(page);
                    space.advise(at, PAGE, Advice::GUARD_REMOVE).unwrap();
                }
                // Replaced in place.
                4 => self.map(at, 1),
                // There and back: what was written stays.
                _ => {
                    cpu.store_u64(at, stamp(page, number)).unwrap();
                    let away = ELSEWHERE + page * PAGE;
                    let go = |addr, new_addr| RemapRequest {
                        addr,
                        old_len: PAGE,
                        new_len: PAGE,
                        flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
                        new_addr,
                    };
                    space.remap(&go(at, away)).unwrap();
                    self.end(page, number, UNMAPPED);
                    assert_eq!(cpu.load_u64(away).unwrap(), stamp(page, number));
                    let number = self.begin(page);
                    space.remap(&go(away, at)).unwrap();
                    assert_eq!(cpu.load_u64(at).unwrap(), stamp(page, number - 1));
                    space.advise(at, PAGE, Advice::DONTNEED).unwrap();
                }
            }
            let number = self.begin(page);
            cpu.store_u64(at, stamp(page, number)).unwrap();
            self.end(page, number, READABLE);
        }
    }

    /// The owner of the file's pages.
    fn file_owner(&self) {
        let mut random = Random::new(77);
        let mut cpu = self.space.accessor();
        while !self.is_over() {
            let page = PAGES + random.below(PAGES);
            let offset = (page - PAGES) * PAGE;
            if random.below(2) == 0 {
                let number = self.begin(page);
                self.file.punch_hole(offset, PAGE).unwrap();
                cpu.store_u64(address(page), stamp(page, number)).unwrap();
                self.end(page, number, READABLE);
                continue;
            }
            let beyond = page..2 * PAGES;
            let numbers: Vec<u64> = beyond.clone().map(|page| self.begin(page)).collect();
            self.file.truncate(offset).unwrap();
            for (page, number) in beyond.clone().zip(&numbers) {
                self.end(page, *number, BEYOND);
            }
            for page in beyond.clone() {
                self.begin(page);
            }
            self.file.truncate(PAGES * PAGE).unwrap();
            for page in beyond {
                let number = self.begin(page);
                self.end(page, number, READABLE);
            }
        }
    }

    /// Children come and go, and see what there is.
    fn forks(&self) {
        while !self.is_over() {
            let child = self.space.dup().unwrap();
            let mut cpu = child.accessor();
            for page in 0..PAGES {
                if let Ok(seen) = cpu.load_u64(address(page)) {
                    assert!(
                        seen == 0 || seen >> 48 == page + 1,
                        "a child's page {page}: {seen:#x}"
                    );
                    cpu.store_u64(address(page), 1).ok();
                }
            }
            drop(cpu);
            assert_eq!(child.backend().resident(), child.backend().recount());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Stops the others when a thread panics.
struct StopOnPanic<'w>(&'w World);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop.store(true, Ordering::Relaxed);
        }
    }
}

#[test]
fn no_access_finds_what_a_call_has_forbidden() {
    let time = stress_time();
    let pool = FramePool::default();
    {
        let world = &World::new(&pool);
        std::thread::scope(|scope| {
            let run = |f: Box<dyn FnOnce() + Send>| {
                scope.spawn(move || {
                    let _stop = StopOnPanic(world);
                    f();
                });
            };
            run(Box::new(|| world.virtual_cpu(1)));
            run(Box::new(|| world.virtual_cpu(2)));
            run(Box::new(|| world.anonymous_owner(0..PAGES / 2, 3)));
            run(Box::new(|| world.anonymous_owner(PAGES / 2..PAGES, 4)));
            run(Box::new(|| world.file_owner()));
            run(Box::new(|| world.forks()));
            let until = Instant::now() + time;
            while Instant::now() < until && !world.is_over() {
                std::thread::sleep(Duration::from_millis(20));
            }
            world.stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(
            world.space.backend().resident(),
            world.space.backend().recount()
        );
        world.space.check().unwrap();
    }
    assert_eq!(pool.stats().used, 0, "every frame is back");
}

fn run_for(threads: Vec<Box<dyn FnMut() + Send + '_>>) {
    let until = Instant::now() + stress_time();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for mut thread in threads {
            let over = &over;
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) && Instant::now() < until {
                    let step = std::panic::AssertUnwindSafe(&mut thread);
                    if let Err(panic) = std::panic::catch_unwind(step) {
                        over.store(true, Ordering::Relaxed);
                        std::panic::resume_unwind(panic);
                    }
                }
            });
        }
    });
}

fn plain_space(pool: &FramePool) -> AddressSpace<Paged> {
    let backend = Paged::new(Arc::new(pool.clone()));
    AddressSpace::with_backend(SpaceConfig::default(), &Domain::default(), backend).unwrap()
}

fn file_of(pages: u64, pool: &FramePool) -> Arc<OpenFile> {
    let object = FileObject::builder(FileKind::Shmem, "f")
        .len(pages * PAGE)
        .frames(Arc::new(pool.clone()))
        .build();
    OpenFile::new(object, AccessMode::ReadWrite)
}

fn map_file(space: &AddressSpace<Paged>, file: &Arc<OpenFile>, at: u64, prot: Prot, pages: u64) {
    let request = MapRequest {
        addr: at,
        flags: MapFlags::SHARED | MapFlags::FIXED,
        file: Some(file.clone()),
        ..MapRequest::anonymous(pages * PAGE, prot)
    };
    space.map(&request).unwrap();
}

fn map_private(space: &AddressSpace<Paged>, at: u64, pages: u64) {
    let request = MapRequest {
        addr: at,
        flags: MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED,
        ..MapRequest::anonymous(pages * PAGE, RW)
    };
    space.map(&request).unwrap();
}

/// Memory that takes the place of a file that mustn't be written is written; the file isn't, and no store is lost.
#[test]
fn a_store_goes_to_the_mapping_that_allows_it() {
    const PAGES: u64 = 64;
    let pool = FramePool::default();
    let space = &plain_space(&pool);
    let file = &file_of(PAGES, &pool);
    let last = AT + (PAGES - 1) * PAGE;
    // Read only, and nothing at the last page but one: a hole that is filled.
    let replace = Box::new(move || {
        map_file(space, file, AT, Prot::READ, PAGES);
        space
            .touch(AT, PAGES * PAGE, vma_core::Access::Read)
            .unwrap();
        space.unmap(last - PAGE, PAGE).unwrap();
        map_private(space, AT, PAGES);
        let mut bytes = vec![9; (PAGES * PAGE) as usize];
        file.read_at(0, &mut bytes).unwrap();
        assert!(
            bytes.iter().all(|byte| *byte == 0),
            "a read-only file was written"
        );
    });
    let store = |at: u64| -> Box<dyn FnMut() + Send + '_> {
        Box::new(move || {
            let mut cpu = space.accessor();
            for i in 1..500 {
                let _ = cpu.store_u64(at, i);
            }
        })
    };
    run_for(vec![replace, store(last), store(last - PAGE)]);
}

/// [C8] Whoever writes A and then B: no child has the new B without the new A.
#[test]
fn a_child_is_of_one_instant() {
    const PAGES: u64 = 40;
    let pool = FramePool::default();
    let space = &plain_space(&pool);
    map_private(space, AT, PAGES);
    let mut number = 0;
    let write = Box::new(move || {
        let mut cpu = space.accessor();
        for _ in 0..50 {
            number += 1;
            // Downwards and upwards, as a copy page by page would be caught either way.
            let order: Vec<u64> = if number % 2 == 0 {
                (0..PAGES).collect()
            } else {
                (0..PAGES).rev().collect()
            };
            for page in order {
                cpu.store_u64(AT + page * PAGE, number).unwrap();
            }
        }
    });
    let fork = Box::new(move || {
        let child = space.dup().unwrap();
        let mut cpu = child.accessor();
        let seen: Vec<u64> = (0..PAGES)
            .map(|page| cpu.load_u64(AT + page * PAGE).unwrap())
            .collect();
        let (low, high) = (seen.iter().min().unwrap(), seen.iter().max().unwrap());
        // One round is under way, and it has come so far in its own order.
        assert!(high - low <= 1, "{seen:?}");
        let ordered = if high % 2 == 0 {
            seen.is_sorted_by(|a, b| a >= b)
        } else {
            seen.is_sorted()
        };
        assert!(ordered, "{seen:?}");
    });
    run_for(vec![write, fork]);
}

/// [C7] A page on its way from one place to another doesn't escape truncation, nor does a child's copy.
#[test]
fn what_moves_is_truncated_as_well() {
    const PAGES: u64 = 8;
    let pool = FramePool::default();
    let space = &plain_space(&pool);
    let file = &file_of(PAGES, &pool);
    let private = |at: u64| {
        let request = MapRequest {
            addr: at,
            flags: MapFlags::PRIVATE | MapFlags::FIXED,
            file: Some(file.clone()),
            ..MapRequest::anonymous(PAGES * PAGE, RW)
        };
        space.map(&request).unwrap();
    };
    map_file(space, file, AT, RW, PAGES);
    private(FILE_AT);
    let places = [AT, AT + 0x100_0000, FILE_AT, FILE_AT + 0x100_0000];
    let travel = Box::new(move || {
        for pair in places.chunks(2) {
            for (addr, new_addr) in [(pair[0], pair[1]), (pair[1], pair[0])] {
                let request = RemapRequest {
                    addr,
                    old_len: PAGES * PAGE,
                    new_len: PAGES * PAGE,
                    flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
                    new_addr,
                };
                space.remap(&request).unwrap();
            }
        }
    });
    let truncate = Box::new(move || {
        let mut cpu = space.accessor();
        for at in places {
            for page in 0..PAGES {
                let _ = cpu.store_u64(at + page * PAGE, 7);
            }
        }
        file.truncate(0).unwrap();
        for _ in 0..3 {
            for at in places {
                for page in 0..PAGES {
                    let seen = cpu.load_u64(at + page * PAGE);
                    assert!(seen.is_err(), "{seen:?} at {at:#x}, page {page}");
                }
            }
        }
        file.truncate(PAGES * PAGE).unwrap();
    });
    let fork = Box::new(move || {
        let child = space.dup().unwrap();
        drop(child);
    });
    run_for(vec![travel, truncate, fork]);
}

/// Ranges of several tables, which go and come as a whole.
struct Large {
    space: AddressSpace<Paged>,
    states: [AtomicU64; Large::COUNT as usize],
}

impl Large {
    const COUNT: u64 = 2;
    /// Two tables and a half.
    const PAGES: u64 = 1280;
    /// Between pages that are looked at: they lie in all of the tables.
    const STEP: u64 = 51;

    fn at(region: u64) -> u64 {
        (1 << 40) + region * (8 << 20)
    }

    fn pages(region: u64) -> impl Iterator<Item = u64> {
        (0..Self::PAGES)
            .step_by(Self::STEP as usize)
            .map(move |page| Self::at(region) + page * PAGE)
    }

    fn set(&self, region: u64, number: u64, mode: u64) {
        self.states[region as usize].store(number * MODES + mode, Ordering::SeqCst);
    }

    /// Puts it back where it belongs, with a stamp in each page.
    fn own(&self, region: u64, number: &mut u64, random: &mut Random) {
        let (space, at, len) = (&self.space, Self::at(region), Self::PAGES * PAGE);
        self.set(region, *number, CHANGING);
        let gone = match random.below(6) {
            0 => space.unmap(at, len).is_ok(),
            1 => space.unmap_downgraded(at, len).is_ok(),
            2 => space.unmap_exclusively(at, len).is_ok(),
            // Replaced in place, over the last of it only.
            3 => space.unmap(at, len - PAGE).is_ok(),
            4 => {
                let go = |addr, new_addr| RemapRequest {
                    addr,
                    old_len: len,
                    new_len: len,
                    flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
                    new_addr,
                };
                let away = at + (1 << 38);
                space.remap(&go(at, away)).unwrap();
                self.set(region, *number, UNMAPPED);
                let mut cpu = space.accessor();
                for page in Self::pages(region) {
                    let seen = cpu.load_u64(page - at + away).unwrap();
                    assert!(seen == 0 || seen == stamp(region, *number), "{seen:#x}");
                }
                self.set(region, *number, CHANGING);
                space.remap(&go(away, at)).unwrap();
                false
            }
            _ => false,
        };
        if gone {
            self.set(region, *number, UNMAPPED);
            std::thread::yield_now();
            self.set(region, *number, CHANGING);
        }
        map_private(space, at, Self::PAGES);
        *number += 1;
        let mut cpu = space.accessor();
        for page in Self::pages(region) {
            cpu.store_u64(page, stamp(region, *number)).unwrap();
        }
        self.set(region, *number, READABLE);
    }

    fn look(&self, random: &mut Random) {
        let mut cpu = self.space.accessor();
        for _ in 0..500 {
            let region = random.below(Self::COUNT);
            let page = random.below(Self::PAGES / Self::STEP) * Self::STEP;
            let at = Self::at(region) + page * PAGE;
            let state = &self.states[region as usize];
            let before = state.load(Ordering::SeqCst);
            let seen = cpu.load_u64(at);
            let after = state.load(Ordering::SeqCst);
            let (number, mode) = (before / MODES, before % MODES);
            if let Ok(seen) = seen {
                let shown = seen & 0xffff_ffff_ffff;
                assert!(seen == 0 || seen >> 48 == region + 1, "{seen:#x}");
                // While a call is under way what was there before may still be seen.
                assert!(seen == 0 || shown >= number, "{shown} after {number}");
            }
            if before == after {
                let right = match mode {
                    READABLE => seen == Ok(stamp(region, number)),
                    UNMAPPED => seen.is_err(),
                    _ => true,
                };
                assert!(right, "region {region} in state {before}: {seen:?}");
            }
        }
    }

    /// A child keeps what it has got, whatever becomes of its parent's, and its stores stay its own.
    fn fork(&self) {
        let child = self.space.dup().unwrap();
        let mut cpu = child.accessor();
        for region in 0..Self::COUNT {
            let mut look =
                || -> Vec<_> { Self::pages(region).map(|at| cpu.load_u64(at)).collect() };
            let first = look();
            std::thread::yield_now();
            assert_eq!(first, look());
            let written = Self::pages(region).step_by(2);
            let written: Vec<_> = written.filter(|at| cpu.store_u64(*at, 3).is_ok()).collect();
            for at in written {
                assert_eq!(cpu.load_u64(at), Ok(3));
            }
            for (at, seen) in Self::pages(region).zip(&first).skip(1).step_by(2) {
                assert_eq!(cpu.load_u64(at), *seen);
            }
        }
        drop(cpu);
        let backend = child.backend();
        assert_eq!(backend.resident(), backend.recount());
    }
}

/// [C3] [C4] [C15] Tables of a range go in one step, are shared with children, move, and are replaced while they're on their way
/// back.
#[test]
fn ranges_of_several_tables_come_and_go() {
    let pool = FramePool::default();
    {
        let world = &Large {
            space: plain_space(&pool),
            states: [const { AtomicU64::new(CHANGING) }; Large::COUNT as usize],
        };
        let owner = |region| -> Box<dyn FnMut() + Send + '_> {
            let (mut number, mut random) = (0, Random::new(region + 5));
            map_private(&world.space, Large::at(region), Large::PAGES);
            Box::new(move || world.own(region, &mut number, &mut random))
        };
        let mut random = Random::new(11);
        let look = Box::new(move || world.look(&mut random));
        let fork = Box::new(move || world.fork());
        run_for(vec![owner(0), owner(1), look, fork]);
        let backend = world.space.backend();
        assert_eq!(backend.resident(), backend.recount());
        world.space.check().unwrap();
    }
    assert_eq!(pool.stats().used, 0, "every frame is back");
}

/// The last handle of a pool and its last frames may go in any order, in several threads.
#[test]
fn spaces_that_share_a_pool_may_go_at_once() {
    for _ in 0..200 {
        let pool = FramePool::default();
        let parent = plain_space(&pool);
        map_private(&parent, AT, 40);
        parent
            .touch(AT, 40 * PAGE, vma_core::Access::Write)
            .unwrap();
        let child = parent.dup().unwrap();
        child.touch(AT, 20 * PAGE, vma_core::Access::Write).unwrap();
        drop(pool);
        std::thread::scope(|scope| {
            scope.spawn(move || drop(parent));
            scope.spawn(move || drop(child));
        });
    }
}
