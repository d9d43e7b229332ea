//! Many spaces over a few files, all calls at once. A thread per file truncates it, grows it and punches holes, and asks each time
//! through every mapping that there is whether a page past the end can still be reached. In the end the indexes are what a scan
//! finds, counts are what a recount gives, and every frame is back.
//!
//! `VMA_STRESS_SECONDS` says how long (1 if it isn't set).

#![allow(clippy::unwrap_used, reason = "tests may")]

#[path = "memory/mod.rs"]
mod memory;
mod random;
mod scan;
mod watchdog;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use memory::{PAGE, RW};
use random::{Random, stress_time};
use vma_core::paged::{FramePool, Paged};
use vma_core::{
    AccessMode, AddressSpace, Advice, FaultError, FileKind, FileObject, MapFlags, MapRequest,
    OpenFile, Prot, RemapFlags, RemapRequest,
};

const AT: u64 = 0x10_0000_0000;
/// Pages that calls play in: two leaf tables.
const ARENA: u64 = 1024;
const SPACES: usize = 4;
const FILES: usize = 3;
const FILE_PAGES: u64 = 48;
const CALLERS: u64 = 3;

type Space = Arc<AddressSpace<Paged>>;

struct World {
    pool: FramePool,
    spaces: [Mutex<Space>; SPACES],
    files: Vec<Arc<OpenFile>>,
    stop: AtomicBool,
    calls: AtomicU64,
    looks: AtomicU64,
}

impl World {
    fn new() -> Self {
        let pool = FramePool::default();
        let spaces = [(); SPACES].map(|()| Mutex::new(Arc::new(memory::space(&pool))));
        let file = |_| {
            let builder = FileObject::builder(FileKind::Shmem, "f").len(FILE_PAGES * PAGE);
            let object = builder.frames(Arc::new(pool.clone())).build();
            OpenFile::new(object, AccessMode::ReadWrite)
        };
        World {
            spaces,
            files: (0..FILES).map(file).collect(),
            stop: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            looks: AtomicU64::new(0),
            pool,
        }
    }

    fn space(&self, slot: usize) -> Space {
        self.spaces[slot].lock().unwrap().clone()
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Random calls; errors are as good as success here.
fn call(world: &World, seed: u64) {
    let mut random = Random::new(seed);
    while !world.stopped() {
        let slot = random.below(SPACES as u64) as usize;
        let space = world.space(slot);
        let at = AT + random.below(ARENA) * PAGE;
        let len = (1 + random.below(40)) * PAGE;
        let to = AT + random.below(ARENA) * PAGE;
        world.calls.fetch_add(1, Ordering::Relaxed);
        match random.below(24) {
            0..8 => {
                let kind = if random.below(2) == 0 {
                    MapFlags::SHARED
                } else {
                    MapFlags::PRIVATE
                };
                let request = MapRequest {
                    addr: at,
                    flags: kind | MapFlags::FIXED,
                    file: Some(world.files[random.below(FILES as u64) as usize].clone()),
                    offset: random.below(FILE_PAGES) * PAGE,
                    ..MapRequest::anonymous(len, RW)
                };
                let _ = space.map(&request);
            }
            8..10 => drop(space.unmap(at, len)),
            10..12 => {
                let prot = if random.below(2) == 0 { Prot::READ } else { RW };
                let _ = space.protect(at, len, prot);
            }
            12..14 => {
                let _ = space.remap(&RemapRequest {
                    addr: at,
                    old_len: len,
                    new_len: len,
                    flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
                    new_addr: to,
                });
            }
            14 => {
                let _ = space.remap(&RemapRequest {
                    addr: at,
                    old_len: PAGE,
                    new_len: len,
                    flags: RemapFlags::MAYMOVE,
                    new_addr: 0,
                });
            }
            15 => drop(space.advise(at, len, Advice::DONTNEED)),
            16 => {
                let child = space.dup().unwrap();
                let into = random.below(SPACES as u64) as usize;
                let old =
                    std::mem::replace(&mut *world.spaces[into].lock().unwrap(), Arc::new(child));
                drop(old);
            }
            17 if random.below(4) == 0 => {
                let fresh = Arc::new(memory::space(&world.pool));
                let old = std::mem::replace(&mut *world.spaces[slot].lock().unwrap(), fresh);
                drop(old);
            }
            _ => {
                let mut cpu = space.accessor();
                for page in 0..random.below(16) {
                    let addr = at + page * PAGE;
                    if random.below(2) == 0 {
                        let _ = cpu.load_u8(addr);
                    } else {
                        let _ = cpu.store_u8(addr, page as u8);
                    }
                }
            }
        }
    }
}

/// The only one that changes this file's length.
fn resize(world: &World, which: usize, seed: u64) {
    let mut random = Random::new(seed);
    let file = &world.files[which];
    while !world.stopped() {
        let pages = random.below(FILE_PAGES);
        file.truncate(pages * PAGE).unwrap();
        for slot in 0..SPACES {
            nothing_beyond(world, file.object(), &world.space(slot), pages);
        }
        file.truncate(FILE_PAGES * PAGE).unwrap();
        let _ = file.punch_hole(random.below(FILE_PAGES) * PAGE, 5 * PAGE);
    }
}

/// Loads through every mapping of pages from `pages` on; others unmap and move them meanwhile.
fn nothing_beyond(world: &World, file: &FileObject, space: &Space, pages: u64) {
    let mut cpu = space.accessor();
    for mapping in file.mappings(pages..u64::MAX) {
        if mapping.space != space.id() {
            continue;
        }
        for page in mapping.pages.start.max(pages)..mapping.pages.end {
            let addr = mapping.range.start + (page - mapping.pages.start) * PAGE;
            let result = cpu.load_u8(addr);
            // Whatever is mapped there by now is looked at with the layout kept as it is.
            let layout = space.read();
            let shows = layout.find(addr).filter(|vma| {
                vma.file()
                    .is_some_and(|open| std::ptr::eq(&raw const **open.object(), file))
                    && vma.vma().pgoff() + (addr - vma.start()) / PAGE >= pages
            });
            if shows.is_some() {
                let again = cpu.load_u8(addr);
                assert!(
                    matches!(again, Err(FaultError::BeyondEnd(_))),
                    "page {page} of {pages} is reached: {again:?}, before {result:?}"
                );
                world.looks.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

#[test]
fn indexes_are_exact_when_all_is_quiet_again_and_nothing_reaches_past_an_end() {
    let time = stress_time();
    let _watchdog = watchdog::watch(time * 3 + Duration::from_mins(1));
    let world = World::new();
    std::thread::scope(|scope| {
        for seed in 1..=CALLERS {
            let world = &world;
            scope.spawn(move || call(world, seed));
        }
        for which in 0..FILES {
            let world = &world;
            scope.spawn(move || resize(world, which, 77 + which as u64));
        }
        let until = Instant::now() + time;
        while Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
        world.stop.store(true, Ordering::Relaxed);
    });
    let World {
        pool,
        spaces,
        files,
        calls,
        looks,
        ..
    } = world;
    let spaces: Vec<AddressSpace<Paged>> = spaces
        .into_iter()
        .map(|slot| Arc::into_inner(slot.into_inner().unwrap()).unwrap())
        .collect();
    for file in &files {
        scan::assert_exact(file.object(), &spaces);
    }
    for space in &spaces {
        memory::check(space);
    }
    assert!(calls.into_inner() > 0 && looks.into_inner() > 0);
    drop(spaces);
    for file in &files {
        assert_eq!(file.object().mapping_count(), 0);
        file.truncate(0).unwrap();
    }
    drop(files);
    assert_eq!(pool.stats().used, 0);
}
