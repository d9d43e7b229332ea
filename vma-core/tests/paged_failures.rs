//! Frames or tables run out at the n-th allocation, for every n: a call fails and has changed nothing but what it says, contents
//! stay, and nothing is lost.

#![allow(clippy::unwrap_used, reason = "tests may")]

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use vma_core::paged::{FrameAllocator, FramePool, NewFrame, Paged};
use vma_core::{
    Access, AccessMode, AddressSpace, Advice, Domain, Errno, FaultError, FileKind, FileObject,
    MapFlags, MapRequest, OpenFile, Prot, RemapFlags, RemapRequest, SpaceConfig,
};

const PAGE: u64 = 4096;
const RW: Prot = Prot::READ.union(Prot::WRITE);
const AT: u64 = 0x4000_0000;
/// In other tables.
const FAR: u64 = 0x50_0000_0000;
const PAGES: u64 = 6;

/// A pool that gives so many frames, and then none.
struct Failing {
    pool: FramePool,
    left: AtomicI64,
}

impl FrameAllocator for Failing {
    fn allocate(&self) -> Option<NewFrame> {
        if self.left.fetch_sub(1, Ordering::Relaxed) <= 0 {
            return None;
        }
        self.pool.allocate()
    }
}

struct World {
    pool: FramePool,
    frames: Arc<Failing>,
    space: AddressSpace<Paged>,
    file: Arc<OpenFile>,
}

impl World {
    /// Some private pages that are written, a private and a shared mapping of a file.
    fn new(table_limit: usize) -> Self {
        let pool = FramePool::default();
        let frames = Arc::new(Failing {
            pool: pool.clone(),
            left: AtomicI64::new(i64::MAX),
        });
        let backend = Paged::new(frames.clone()).with_table_limit(table_limit);
        let domain = Domain::default();
        let space = AddressSpace::with_backend(SpaceConfig::default(), &domain, backend).unwrap();
        let object = FileObject::builder(FileKind::Shmem, "f")
            .len(PAGES * PAGE)
            .frames(frames.clone())
            .build();
        let file = OpenFile::new(object, AccessMode::ReadWrite);
        file.write_at(0, &vec![5; (PAGES * PAGE) as usize]).unwrap();
        let world = World {
            pool,
            frames,
            space,
            file,
        };
        world.map(AT, None, MapFlags::PRIVATE | MapFlags::ANONYMOUS);
        world.map(AT + 0x10_0000, Some(&world.file), MapFlags::PRIVATE);
        world.map(AT + 0x20_0000, Some(&world.file), MapFlags::SHARED);
        world
    }

    fn map(&self, addr: u64, file: Option<&Arc<OpenFile>>, flags: MapFlags) {
        let request = MapRequest {
            addr,
            flags: flags | MapFlags::FIXED,
            file: file.cloned(),
            ..MapRequest::anonymous(PAGES * PAGE, RW)
        };
        self.space.map(&request).unwrap();
    }

    /// Everything that can be read, byte by page, and the layout.
    fn shown(&self) -> (Vec<Result<u8, FaultError>>, String) {
        let left = self.frames.left.swap(i64::MAX, Ordering::Relaxed);
        let mut cpu = self.space.accessor();
        let pages = (0..PAGES)
            .flat_map(|page| [AT, AT + 0x10_0000, AT + 0x20_0000, FAR].map(|at| at + page * PAGE));
        let bytes = pages.map(|at| cpu.load_u8(at)).collect();
        self.frames.left.store(left, Ordering::Relaxed);
        (bytes, self.space.maps().clone())
    }
}

type Step = fn(&World) -> Result<(), Errno>;

fn fault(error: FaultError) -> Errno {
    match error {
        FaultError::OutOfMemory(_) => Errno::ENOMEM,
        other => panic!("{other}"),
    }
}

fn store_all(world: &World) -> Result<(), Errno> {
    let mut cpu = world.space.accessor();
    for at in [AT, AT + 0x10_0000, AT + 0x20_0000] {
        for page in 0..PAGES {
            // What is there already: only copies are made.
            let byte = cpu.load_u8(at + page * PAGE).map_err(fault)?;
            cpu.store_u8(at + page * PAGE, byte).map_err(fault)?;
        }
    }
    Ok(())
}

fn populate(world: &World) -> Result<(), Errno> {
    let space = &world.space;
    let done = space.advise(AT, PAGES * PAGE, Advice::POPULATE_WRITE);
    done.map_err(vma_core::AdviseError::errno)
}

fn move_away(world: &World) -> Result<(), Errno> {
    let request = RemapRequest {
        addr: AT,
        old_len: PAGES * PAGE,
        new_len: PAGES * PAGE,
        flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
        new_addr: FAR,
    };
    let moved = world.space.remap(&request);
    moved.map(|_| ()).map_err(vma_core::RemapError::errno)
}

fn guard(world: &World) -> Result<(), Errno> {
    world.map(FAR, None, MapFlags::PRIVATE | MapFlags::ANONYMOUS);
    let done = world.space.advise(FAR, PAGES * PAGE, Advice::GUARD_INSTALL);
    world.space.unmap(FAR, PAGES * PAGE).unwrap();
    done.map_err(vma_core::AdviseError::errno)
}

fn fork(world: &World) -> Result<(), Errno> {
    let child = world.space.dup().map_err(vma_core::DupError::errno)?;
    let shown = |space: &AddressSpace<Paged>| {
        let mut cpu = space.accessor();
        (0..PAGES)
            .map(|page| cpu.load_u8(AT + page * PAGE))
            .collect::<Vec<_>>()
    };
    let left = world.frames.left.swap(i64::MAX, Ordering::Relaxed);
    assert_eq!(shown(&child), shown(&world.space));
    world.frames.left.store(left, Ordering::Relaxed);
    child.touch(AT, PAGES * PAGE, Access::Write).map_err(fault)
}

/// What is unmapped shares tables with a child's.
fn unmap_shared(world: &World) -> Result<(), Errno> {
    let child = world.space.dup().map_err(vma_core::DupError::errno)?;
    let done = world.space.unmap(AT + PAGE, 2 * PAGE);
    done.map_err(vma_core::UnmapError::errno)?;
    let left = world.frames.left.swap(i64::MAX, Ordering::Relaxed);
    let mut cpu = child.accessor();
    for page in 0..3 {
        assert!(cpu.load_u8(AT + page * PAGE).is_ok());
    }
    world.frames.left.store(left, Ordering::Relaxed);
    Ok(())
}

/// The same, moved onto other pages that are shared.
fn move_shared(world: &World) -> Result<(), Errno> {
    let child = world.space.dup().map_err(vma_core::DupError::errno)?;
    let request = RemapRequest {
        addr: AT,
        old_len: PAGES * PAGE,
        new_len: PAGES * PAGE,
        flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
        new_addr: AT + 0x10_0000,
    };
    let moved = world.space.remap(&request);
    drop(child);
    moved.map(|_| ()).map_err(vma_core::RemapError::errno)
}

/// A page that the child gets a copy of.
fn fork_pinned(world: &World) -> Result<(), Errno> {
    let mut cpu = world.space.accessor();
    let pin = cpu.pin_page(AT, Access::Write).map_err(fault)?;
    let bytes = pin.writable().unwrap();
    let child = world.space.dup();
    // Whether or not there is a child, the pin's page is the mapping's.
    let left = world.frames.left.swap(i64::MAX, Ordering::Relaxed);
    let mut was = [0];
    bytes.read(0, &mut was);
    cpu.store_u8(AT, was[0] + 1).unwrap();
    let mut seen = [0];
    bytes.read(0, &mut seen);
    assert_eq!(seen[0], was[0] + 1);
    cpu.store_u8(AT, was[0]).unwrap();
    world.frames.left.store(left, Ordering::Relaxed);
    child.map(|_| ()).map_err(vma_core::DupError::errno)
}

fn write_file(world: &World) -> Result<(), Errno> {
    world.file.punch_hole(0, 2 * PAGE).unwrap();
    let done = world.file.write_at(0, &vec![5; 2 * PAGE as usize]);
    let left = world.frames.left.swap(i64::MAX, Ordering::Relaxed);
    world.file.write_at(0, &vec![5; 2 * PAGE as usize]).unwrap();
    world.frames.left.store(left, Ordering::Relaxed);
    done.map_err(vma_core::FileIoError::errno)
}

const STEPS: [(&str, Step); 9] = [
    ("store", store_all),
    ("populate", populate),
    ("move", move_away),
    ("guard", guard),
    ("fork", fork),
    ("unmap shared", unmap_shared),
    ("move shared", move_shared),
    ("fork pinned", fork_pinned),
    ("write to the file", write_file),
];

/// Does a step with so many frames and so much memory for tables; whether it succeeded.
fn attempt(name: &str, step: Step, frames: i64, tables: usize) -> bool {
    let world = World::new(tables);
    let written = world.space.touch(AT, 3 * PAGE, Access::Write).is_ok();
    if !written {
        // Not even what comes before the step.
        return false;
    }
    let before = world.shown();
    world.frames.left.store(frames, Ordering::Relaxed);
    let result = step(&world);
    world.frames.left.store(i64::MAX, Ordering::Relaxed);
    let space = &world.space;
    match result {
        Ok(()) => {}
        // madvise says so of a layout that can't be changed, to which guard pages belong.
        Err(Errno::EAGAIN) if name == "guard" => assert_eq!(before, world.shown()),
        Err(Errno::ENOMEM) => {
            let after = world.shown();
            assert_eq!(
                before, after,
                "{name} with {frames} frames, {tables} bytes of tables"
            );
        }
        Err(other) => panic!("{name} with {frames} frames: {other}"),
    }
    space.check().unwrap();
    assert_eq!(space.backend().resident(), space.backend().recount());
    let World {
        pool,
        space,
        file,
        frames,
        ..
    } = world;
    drop((space, file, frames));
    assert_eq!(pool.stats().used, 0, "{name}: frames are lost");
    result.is_ok()
}

#[test]
fn frames_run_out_at_every_allocation() {
    for (name, step) in STEPS {
        let mut frames = 0;
        while !attempt(name, step, frames, usize::MAX) {
            frames += 1;
            assert!(frames < 200, "{name} never succeeds");
        }
        let takes_none = ["move", "guard", "unmap shared", "move shared"];
        assert!(frames > 0 || takes_none.contains(&name), "{name}");
    }
}

#[test]
fn tables_run_out_at_every_allocation() {
    for (name, step) in STEPS {
        // Enough for the topmost one.
        let mut tables = 5;
        while !attempt(name, step, i64::MAX, tables * 1024) {
            tables += 1;
            assert!(tables < 200, "{name} never succeeds");
        }
        assert!(tables > 8, "{name}");
    }
}
