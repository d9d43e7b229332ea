//! Several spaces that map two files in all ways: after every call the reverse indexes are what a scan of all spaces finds, seals
//! hold, and what shared mappings show is what a model of the files has.
#![no_main]

use std::sync::Arc;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use vma_core::paged::{FramePool, Paged};
use vma_core::{
    AccessMode, AddressSpace, Advice, Domain, FaultError, FileIoError, FileKind, FileObject,
    MapFlags, MapRequest, OpenFile, Prot, RemapFlags, RemapRequest, Seals, SpaceConfig, VmaFlags,
};

const PAGE: u64 = 4096;
const AT: u64 = 0x10_0000_0000;
/// Pages that calls play in, and the most that a file has.
const ARENA: u64 = 32;
const FILE: u64 = 16;
const RW: Prot = Prot::READ.union(Prot::WRITE);

#[derive(Arbitrary, Debug)]
enum Op {
    Map {
        who: u8,
        at: u8,
        pages: u8,
        file: bool,
        offset: u8,
        shared: bool,
        write: bool,
    },
    Unmap {
        who: u8,
        at: u8,
        pages: u8,
    },
    Protect {
        who: u8,
        at: u8,
        pages: u8,
        write: bool,
    },
    Move {
        who: u8,
        at: u8,
        pages: u8,
        to: u8,
        keep: bool,
    },
    Resize {
        who: u8,
        at: u8,
        pages: u8,
        new: u8,
    },
    Nonlinear {
        who: u8,
        at: u8,
        pages: u8,
        offset: u8,
    },
    Advise {
        who: u8,
        at: u8,
        pages: u8,
        which: u8,
    },
    Fork {
        who: u8,
        into: u8,
    },
    Exit {
        who: u8,
    },
    Truncate {
        file: bool,
        pages: u8,
        bytes: u16,
    },
    Punch {
        file: bool,
        at: u8,
        pages: u8,
        bytes: u16,
    },
    WriteFile {
        file: bool,
        at: u8,
        value: u8,
    },
    Seal {
        file: bool,
        seals: u8,
    },
    Load {
        who: u8,
        at: u8,
    },
    Store {
        who: u8,
        at: u8,
        value: u8,
    },
}

/// A file, and the first byte of each of its pages.
struct File {
    open: Arc<OpenFile>,
    bytes: [u8; FILE as usize],
    len: u64,
}

impl File {
    fn new(pool: &FramePool) -> Self {
        let builder = FileObject::builder(FileKind::Shmem, "f").seals(Seals::empty());
        let object = builder.frames(Arc::new(pool.clone())).build();
        File {
            open: OpenFile::new(object, AccessMode::ReadWrite),
            bytes: [0; FILE as usize],
            len: 0,
        }
    }

    fn object(&self) -> &FileObject {
        self.open.object()
    }

    fn has(&self, seals: Seals) -> bool {
        self.object().current_seals().intersects(seals)
    }

    fn shows(&self, vma: &vma_core::Vma) -> bool {
        let open = vma.file();
        open.is_some_and(|open| std::ptr::eq(&raw const **open.object(), self.object()))
    }
}

struct World {
    pool: FramePool,
    spaces: Vec<AddressSpace<Paged>>,
    files: [File; 2],
}

fn place(at: u8, pages: u8) -> (u64, u64) {
    let at = u64::from(at) % ARENA;
    let pages = (u64::from(pages) % 9 + 1).min(ARENA - at);
    (AT + at * PAGE, pages * PAGE)
}

impl World {
    fn new() -> Self {
        let pool = FramePool::default();
        let files = [(); 2].map(|()| File::new(&pool));
        let spaces = (0..3).map(|_| space(&pool)).collect();
        World {
            pool,
            spaces,
            files,
        }
    }

    fn who(&self, who: u8) -> &AddressSpace<Paged> {
        &self.spaces[usize::from(who) % self.spaces.len()]
    }

    fn run(&mut self, op: &Op) {
        match *op {
            Op::Map {
                who,
                at,
                pages,
                file,
                offset,
                shared,
                write,
            } => {
                let (addr, len) = place(at, pages);
                let kind = if shared {
                    MapFlags::SHARED
                } else {
                    MapFlags::PRIVATE
                };
                let file = &self.files[usize::from(file)];
                let request = MapRequest {
                    addr,
                    flags: kind | MapFlags::FIXED,
                    file: Some(file.open.clone()),
                    offset: u64::from(offset) % FILE * PAGE,
                    ..MapRequest::anonymous(len, if write { RW } else { Prot::READ })
                };
                let result = self.who(who).map(&request);
                let refused = shared && write && file.has(Seals::WRITE | Seals::FUTURE_WRITE);
                assert_eq!(result.is_err(), refused, "{request:?}: {result:?}");
            }
            Op::Unmap { who, at, pages } => {
                let (addr, len) = place(at, pages);
                self.who(who).unmap(addr, len).expect("a valid range");
            }
            Op::Protect {
                who,
                at,
                pages,
                write,
            } => {
                let (addr, len) = place(at, pages);
                let prot = if write { RW } else { Prot::READ };
                let _ = self.who(who).protect(addr, len, prot);
            }
            Op::Move {
                who,
                at,
                pages,
                to,
                keep,
            } => {
                let (addr, len) = place(at, pages);
                let keeping = if keep {
                    RemapFlags::DONTUNMAP
                } else {
                    RemapFlags::empty()
                };
                let _ = self.who(who).remap(&RemapRequest {
                    addr,
                    old_len: len,
                    new_len: len,
                    flags: RemapFlags::MAYMOVE | RemapFlags::FIXED | keeping,
                    new_addr: place(to, 0).0,
                });
            }
            Op::Resize {
                who,
                at,
                pages,
                new,
            } => {
                let (addr, len) = place(at, pages);
                let _ = self.who(who).remap(&RemapRequest {
                    addr,
                    old_len: len,
                    new_len: place(at, new).1,
                    flags: RemapFlags::MAYMOVE,
                    new_addr: 0,
                });
            }
            Op::Nonlinear {
                who,
                at,
                pages,
                offset,
            } => {
                let (addr, len) = place(at, pages);
                let (offset, none) = (u64::from(offset) % FILE, Prot::empty());
                let space = self.who(who);
                let _ = space.remap_file_pages(addr, len, none, offset, MapFlags::empty());
            }
            Op::Advise {
                who,
                at,
                pages,
                which,
            } => {
                let (addr, len) = place(at, pages);
                let advice = match which % 4 {
                    0 => Advice::DONTNEED,
                    1 => Advice::DONTFORK,
                    2 => Advice::DOFORK,
                    _ => Advice::GUARD_INSTALL,
                };
                let _ = self.who(who).advise(addr, len, advice);
            }
            Op::Fork { who, into } => {
                let child = self.who(who).dup().expect("no limit is set");
                let into = usize::from(into) % self.spaces.len();
                self.spaces[into] = child;
            }
            Op::Exit { who } => {
                let who = usize::from(who) % self.spaces.len();
                self.spaces[who] = space(&self.pool);
            }
            Op::Truncate { file, pages, bytes } => {
                let len = u64::from(pages) % (FILE + 1) * PAGE;
                self.truncate(file, len.saturating_sub(u64::from(bytes) % PAGE));
            }
            Op::Punch {
                file,
                at,
                pages,
                bytes,
            } => {
                let offset = u64::from(at) % FILE * PAGE + u64::from(bytes) % PAGE;
                self.punch(file, offset, (u64::from(pages) % FILE + 1) * PAGE);
            }
            Op::WriteFile { file, at, value } => {
                let file = &mut self.files[usize::from(file)];
                let page = u64::from(at) % FILE;
                let (end, result) = (page * PAGE + 1, file.open.write_at(page * PAGE, &[value]));
                if file.has(Seals::WRITE | Seals::FUTURE_WRITE)
                    || end > file.len && file.has(Seals::GROW)
                {
                    assert!(matches!(
                        result,
                        Err(FileIoError::Sealed(_) | FileIoError::Size(_))
                    ));
                } else {
                    result.expect("nothing forbids it");
                    file.bytes[page as usize] = value;
                    file.len = file.len.max(end);
                }
            }
            Op::Seal { file, seals } => {
                let file = &self.files[usize::from(file)];
                let seals = Seals::from_bits_truncate(u32::from(seals) & 0b1_1110);
                let writable = self.scan(file).1;
                let before = file.object().current_seals();
                let result = file.open.add_seals(seals);
                let busy =
                    seals.contains(Seals::WRITE) && !before.contains(Seals::WRITE) && writable > 0;
                assert_eq!(result.is_err(), busy, "{seals:?}: {result:?}");
            }
            Op::Load { who, at } => self.access(who, at, None),
            Op::Store { who, at, value } => self.access(who, at, Some(value)),
        }
    }

    fn truncate(&mut self, file: bool, len: u64) {
        let file = &mut self.files[usize::from(file)];
        let result = file.open.truncate(len);
        let sealed =
            len < file.len && file.has(Seals::SHRINK) || len > file.len && file.has(Seals::GROW);
        assert_eq!(result.is_err(), sealed);
        if result.is_ok() {
            for (page, byte) in (0..).zip(&mut file.bytes) {
                if page * PAGE >= len {
                    *byte = 0;
                }
            }
            file.len = len;
        }
    }

    fn punch(&mut self, file: bool, offset: u64, len: u64) {
        let file = &mut self.files[usize::from(file)];
        let result = file.open.punch_hole(offset, len);
        assert_eq!(
            result.is_err(),
            file.has(Seals::WRITE | Seals::FUTURE_WRITE)
        );
        if result.is_ok() {
            for (page, byte) in (0..).zip(&mut file.bytes) {
                if (offset..offset + len).contains(&(page * PAGE)) {
                    *byte = 0;
                }
            }
        }
    }

    /// Loads or stores the first byte of a page; what a shared mapping shows is the file's.
    fn access(&mut self, who: u8, at: u8, store: Option<u8>) {
        let space = &self.spaces[usize::from(who) % self.spaces.len()];
        let addr = place(at, 0).0;
        let mut cpu = space.accessor();
        let result = match store {
            Some(value) => cpu.store_u8(addr, value).map(|()| value),
            None => cpu.load_u8(addr),
        };
        let reader = space.register();
        let guard = reader.pin();
        let Some(vma) = space.find(addr, &guard) else {
            assert_eq!(result, Err(FaultError::Unmapped(addr)));
            return;
        };
        let page = vma.vma().pgoff() + (addr - vma.start()) / PAGE;
        for file in &mut self.files {
            if !file.shows(vma.vma()) || result == Err(FaultError::Unmapped(addr)) {
                continue;
            }
            if page * PAGE >= file.len {
                let denied = store.is_some() && !vma.flags().contains(VmaFlags::WRITE);
                assert!(
                    denied || result == Err(FaultError::BeyondEnd(addr)),
                    "{result:?}"
                );
            } else if vma.flags().contains(VmaFlags::SHARED)
                && let Ok(value) = result
            {
                if let Some(stored) = store {
                    file.bytes[page as usize] = stored;
                }
                assert_eq!(value, file.bytes[page as usize]);
            }
        }
    }

    /// All mappings of a file, and how many of them may write to it.
    fn scan(&self, file: &File) -> (Vec<(vma_core::SpaceId, u64, u64, u64)>, i64) {
        let (mut found, mut writable) = (Vec::new(), 0);
        for space in &self.spaces {
            let reader = space.register();
            let guard = reader.pin();
            for vma in space.iter(0, &guard).filter(|vma| file.shows(vma.vma())) {
                found.push((space.id(), vma.start(), vma.end(), vma.vma().pgoff()));
                let kind = VmaFlags::SHARED | VmaFlags::MAYWRITE;
                writable += i64::from(vma.flags().contains(kind));
            }
        }
        found.sort_unstable();
        (found, writable)
    }

    fn check(&self) {
        for file in &self.files {
            let (scanned, writable) = self.scan(file);
            let mut indexed: Vec<_> = file
                .object()
                .mappings(0..u64::MAX)
                .iter()
                .map(|found| {
                    (
                        found.space,
                        found.range.start,
                        found.range.end,
                        found.pages.start,
                    )
                })
                .collect();
            indexed.sort_unstable();
            assert_eq!(indexed, scanned);
            let counted = file.object().writable_mappings();
            if file.has(Seals::WRITE) {
                assert!(writable == 0 && counted < 0);
            } else {
                assert_eq!(counted, writable);
            }
            assert_eq!(file.object().len(), file.len);
        }
    }
}

fn space(pool: &FramePool) -> AddressSpace<Paged> {
    let backend = Paged::new(Arc::new(pool.clone()));
    AddressSpace::with_backend(SpaceConfig::default(), &Domain::default(), backend)
        .expect("the default configuration is valid")
}

fuzz_target!(|ops: Vec<Op>| {
    let mut world = World::new();
    for op in ops.iter().take(200) {
        world.run(op);
        world.check();
    }
    let World {
        pool,
        spaces,
        files,
    } = world;
    for space in &spaces {
        assert_eq!(space.backend().resident(), space.backend().recount());
    }
    drop(spaces);
    for file in &files {
        assert_eq!(file.object().mapping_count(), 0);
    }
    drop(files);
    assert_eq!(pool.stats().used, 0);
});
