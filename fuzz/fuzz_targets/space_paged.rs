//! What memory shows, in a space and its children, against a model that has a byte for each page: stores and loads through mappings
//! of all kinds, while they move, go, are discarded and forked, and while their file is cut and punched.
#![no_main]

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use vma_core::paged::{FramePool, Paged};
use vma_core::{
    Access, AccessMode, AddressSpace, Advice, Domain, FaultError, FileKind, FileObject, MapFlags,
    MapRequest, OpenFile, Prot, RemapFlags, RemapRequest, SpaceConfig,
};

const PAGE: u64 = 4096;
/// Two leaf tables meet in the middle of the arena.
const AT: u64 = 0x10_0020_0000 - ARENA as u64 / 2 * PAGE;
const ARENA: usize = 32;
/// Most pages that the file has.
const FILE: usize = 16;
const SPACES: usize = 3;

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Range {
    at: u8,
    pages: u8,
}

impl Range {
    fn pages(self) -> std::ops::Range<usize> {
        let at = usize::from(self.at) % ARENA;
        at..ARENA.min(at + 1 + usize::from(self.pages) % 10)
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Backing {
    Anonymous,
    Shared,
    File { offset: u8 },
    SharedFile { offset: u8 },
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Op {
    Map {
        range: Range,
        backing: Backing,
        populate: bool,
    },
    Unmap(Range),
    Protect {
        range: Range,
        write: bool,
    },
    Move {
        range: Range,
        to: u8,
        keep: bool,
    },
    Resize {
        range: Range,
        new: u8,
    },
    DontNeed(Range),
    Guard {
        range: Range,
        install: bool,
    },
    WipeOnFork {
        range: Range,
        wipe: bool,
    },
    Dup {
        into: u8,
    },
    Exit,
    Truncate {
        pages: u8,
        inside: bool,
    },
    Punch(Range),
    WriteFile {
        at: u8,
        value: u8,
    },
    Load(u8),
    Store {
        at: u8,
        value: u8,
    },
}

#[derive(Arbitrary, Debug)]
struct Step {
    who: u8,
    op: Op,
}

/// What is mapped at a page.
#[derive(Clone, Debug)]
enum Memory {
    /// Of this space alone, and the page of the file below what was written.
    Private {
        written: Option<u8>,
        file: Option<usize>,
    },
    /// Of a shared anonymous mapping, which is a file as long as it was at first.
    Shared(Rc<[Cell<u8>]>, usize),
    SharedFile(usize),
}

#[derive(Clone, Debug)]
struct Page {
    memory: Memory,
    write: bool,
    guard: bool,
    wipe: bool,
}

type Pages = [Option<Page>; ARENA];

/// The file: what each page shows, and how many there are.
struct File {
    open: Arc<OpenFile>,
    bytes: [u8; FILE],
    /// In bytes.
    len: u64,
}

struct World {
    pool: FramePool,
    spaces: [AddressSpace<Paged>; SPACES],
    models: [Pages; SPACES],
    file: File,
}

fn addr(page: usize) -> u64 {
    AT + page as u64 * PAGE
}

fn bytes(range: &std::ops::Range<usize>) -> (u64, u64) {
    (addr(range.start), range.len() as u64 * PAGE)
}

fn prot(write: bool) -> Prot {
    if write {
        Prot::READ | Prot::WRITE
    } else {
        Prot::READ
    }
}

fn new_space(pool: &FramePool) -> AddressSpace<Paged> {
    let backend = Paged::new(Arc::new(pool.clone()));
    AddressSpace::with_backend(SpaceConfig::default(), &Domain::default(), backend)
        .expect("the default configuration is valid")
}

impl File {
    fn load(&self, page: usize) -> Option<u8> {
        (page as u64 * PAGE < self.len).then(|| self.bytes[page])
    }
}

/// `None`: there's nothing behind the page.
fn shown(page: &Page, file: &File) -> Option<u8> {
    match &page.memory {
        Memory::Private {
            written: Some(byte),
            ..
        } => Some(*byte),
        Memory::Private { file: None, .. } => Some(0),
        Memory::Private {
            file: Some(page), ..
        }
        | Memory::SharedFile(page) => file.load(*page),
        Memory::Shared(object, page) => object.get(*page).map(Cell::get),
    }
}

/// The page `by` pages further on in what is mapped, without what was written.
fn further(page: &Page, by: usize) -> Page {
    let memory = match &page.memory {
        Memory::Private { file, .. } => Memory::Private {
            written: None,
            file: file.map(|page| page + by),
        },
        Memory::SharedFile(page) => Memory::SharedFile(page + by),
        Memory::Shared(object, page) => Memory::Shared(object.clone(), page + by),
    };
    Page {
        memory,
        guard: false,
        ..*page
    }
}

impl World {
    fn new() -> Self {
        let pool = FramePool::default();
        let object = FileObject::builder(FileKind::Shmem, "f").frames(Arc::new(pool.clone()));
        World {
            spaces: [(); SPACES].map(|()| new_space(&pool)),
            models: [(); SPACES].map(|()| std::array::from_fn(|_| None)),
            file: File {
                open: OpenFile::new(object.build(), AccessMode::ReadWrite),
                bytes: [0; FILE],
                len: 0,
            },
            pool,
        }
    }

    fn run(&mut self, step: &Step) {
        let who = usize::from(step.who) % SPACES;
        let (space, model) = (&self.spaces[who], &mut self.models[who]);
        match step.op {
            Op::Map {
                range,
                backing,
                populate,
            } => map(space, model, &self.file, range.pages(), backing, populate),
            Op::Unmap(range) => {
                let range = range.pages();
                let (at, len) = bytes(&range);
                space.unmap(at, len).expect("no limit is set");
                model[range].fill(None);
            }
            Op::Protect { range, write } => {
                let range = range.pages();
                let (at, len) = bytes(&range);
                let result = space.protect(at, len, prot(write));
                let all = walk(model, range, |page| page.write = write);
                assert_eq!(result.is_ok(), all, "{result:?}");
            }
            Op::Move { range, to, keep } => relocate(space, model, range.pages(), to, keep),
            Op::Resize { range, new } => resize(space, model, range.pages(), new),
            Op::DontNeed(range) => {
                let range = range.pages();
                let (at, len) = bytes(&range);
                let result = space.advise(at, len, Advice::DONTNEED);
                let whole = model[range.clone()].iter().all(Option::is_some);
                assert_eq!(result.is_ok(), whole, "{result:?}");
                for page in model[range].iter_mut().flatten() {
                    forget(page);
                }
            }
            Op::Guard { range, install } => {
                let range = range.pages();
                let (at, len) = bytes(&range);
                let advice = if install {
                    Advice::GUARD_INSTALL
                } else {
                    Advice::GUARD_REMOVE
                };
                let result = space.advise(at, len, advice);
                let whole = model[range.clone()].iter().all(Option::is_some);
                assert_eq!(result.is_ok(), whole, "{result:?}");
                for page in model[range].iter_mut().flatten() {
                    if install {
                        forget(page);
                    }
                    page.guard = install;
                }
            }
            Op::WipeOnFork { range, wipe } => {
                // One page, so that it's either done or not.
                let at = range.pages().start;
                let advice = if wipe {
                    Advice::WIPEONFORK
                } else {
                    Advice::KEEPONFORK
                };
                let result = space.advise(addr(at), PAGE, advice);
                if let Some(page) = &mut model[at] {
                    let anonymous = matches!(page.memory, Memory::Private { file: None, .. });
                    assert_eq!(result.is_ok(), anonymous || !wipe, "{result:?}");
                    page.wipe = result.is_ok() && wipe;
                }
            }
            Op::Dup { into } => {
                let into = usize::from(into) % SPACES;
                self.spaces[into] = self.spaces[who].dup().expect("no limit is set");
                self.models[into] = self.models[who].clone();
                for page in self.models[into]
                    .iter_mut()
                    .flatten()
                    .filter(|page| page.wipe)
                {
                    forget(page);
                    page.guard = false;
                }
                self.compare(into);
            }
            Op::Exit => {
                self.spaces[who] = new_space(&self.pool);
                self.models[who].fill(None);
            }
            Op::Truncate { pages, inside } => {
                let pages = u64::from(pages) % (FILE as u64 + 1);
                self.truncate((pages * PAGE).saturating_sub(u64::from(inside) * 100));
            }
            Op::Punch(range) => {
                let range = range.pages();
                let offset = range.start as u64 * PAGE;
                let result = self.file.open.punch_hole(offset, bytes(&range).1);
                result.expect("nothing is sealed");
                for (page, byte) in self.file.bytes.iter_mut().enumerate() {
                    if range.contains(&page) {
                        *byte = 0;
                    }
                }
            }
            Op::WriteFile { at, value } => {
                let page = usize::from(at) % FILE;
                let offset = page as u64 * PAGE;
                let result = self.file.open.write_at(offset, &[value]);
                result.expect("nothing is sealed");
                self.file.bytes[page] = value;
                self.file.len = self.file.len.max(offset + 1);
            }
            Op::Load(at) => self.load(who, usize::from(at) % ARENA),
            Op::Store { at, value } => self.store(who, usize::from(at) % ARENA, value),
        }
    }

    /// Private copies of pages that are cut off go too; those of pages that are punched stay.
    fn truncate(&mut self, len: u64) {
        self.file.open.truncate(len).expect("nothing is sealed");
        let is_cut = |page: usize| page as u64 * PAGE >= len;
        if len < self.file.len {
            for (page, byte) in self.file.bytes.iter_mut().enumerate() {
                if is_cut(page) {
                    *byte = 0;
                }
            }
            for page in self.models.iter_mut().flatten().flatten() {
                if let Memory::Private {
                    file: Some(of_file),
                    ..
                } = page.memory
                    && is_cut(of_file)
                {
                    forget(page);
                }
            }
        }
        self.file.len = len;
    }

    fn load(&self, who: usize, at: usize) {
        let result = self.spaces[who].accessor().load_u8(addr(at));
        let Some(page) = &self.models[who][at] else {
            assert_eq!(result, Err(FaultError::Unmapped(addr(at))));
            return;
        };
        match shown(page, &self.file) {
            _ if page.guard => assert!(result.is_err(), "{result:?}"),
            None => assert_eq!(result, Err(FaultError::BeyondEnd(addr(at)))),
            Some(byte) => assert_eq!(result, Ok(byte), "page {at} of {who}: {page:?}"),
        }
    }

    fn store(&mut self, who: usize, at: usize, value: u8) {
        let result = self.spaces[who].accessor().store_u8(addr(at), value);
        let Some(page) = &mut self.models[who][at] else {
            assert_eq!(result, Err(FaultError::Unmapped(addr(at))));
            return;
        };
        if !page.write {
            let denied = matches!(
                result,
                Err(FaultError::Denied {
                    access: Access::Write,
                    ..
                })
            );
            assert!(denied, "{result:?}");
        } else if page.guard {
            assert!(result.is_err());
        } else if shown(page, &self.file).is_none() {
            assert_eq!(result, Err(FaultError::BeyondEnd(addr(at))));
        } else {
            assert_eq!(result, Ok(()));
            match &mut page.memory {
                Memory::Private { written, .. } => *written = Some(value),
                Memory::Shared(object, page) => object[*page].set(value),
                Memory::SharedFile(page) => self.file.bytes[*page] = value,
            }
        }
    }

    fn compare(&self, who: usize) {
        for at in 0..ARENA {
            self.load(who, at);
        }
        let backend = self.spaces[who].backend();
        assert_eq!(backend.resident(), backend.recount());
        self.spaces[who].check().expect("the structure is whole");
    }
}

fn forget(page: &mut Page) {
    if let Memory::Private { written, .. } = &mut page.memory {
        *written = None;
    }
}

/// Page by page to the first hole; whether there was none.
fn walk(
    model: &mut Pages,
    range: std::ops::Range<usize>,
    mut visit: impl FnMut(&mut Page),
) -> bool {
    model[range].iter_mut().all(|page| {
        let Some(page) = page else { return false };
        visit(page);
        true
    })
}

fn map(
    space: &AddressSpace<Paged>,
    model: &mut Pages,
    file: &File,
    range: std::ops::Range<usize>,
    backing: Backing,
    populate: bool,
) {
    let (shared, offset) = match backing {
        Backing::Anonymous => (false, None),
        Backing::Shared => (true, None),
        Backing::File { offset } => (false, Some(usize::from(offset) % FILE)),
        Backing::SharedFile { offset } => (true, Some(usize::from(offset) % FILE)),
    };
    let (at, len) = bytes(&range);
    let mut flags = MapFlags::FIXED;
    flags |= if shared {
        MapFlags::SHARED
    } else {
        MapFlags::PRIVATE
    };
    if offset.is_none() {
        flags |= MapFlags::ANONYMOUS;
    }
    if populate {
        flags |= MapFlags::POPULATE;
    }
    let result = space.map(&MapRequest {
        addr: at,
        flags,
        file: offset.map(|_| file.open.clone()),
        offset: offset.unwrap_or(0) as u64 * PAGE,
        ..MapRequest::anonymous(len, prot(true))
    });
    assert_eq!(result.ok(), Some(at));
    let object: Rc<[Cell<u8>]> = range.clone().map(|_| Cell::new(0)).collect();
    for (by, page) in model[range].iter_mut().enumerate() {
        let of_file = offset.map(|offset| offset + by);
        let memory = match (shared, of_file) {
            (false, _) => Memory::Private {
                // Present pages that may be written are copies from the start.
                written: of_file
                    .filter(|_| populate)
                    .and_then(|page| file.load(page)),
                file: of_file,
            },
            (true, None) => Memory::Shared(object.clone(), by),
            (true, Some(page)) => Memory::SharedFile(page),
        };
        *page = Some(Page {
            memory,
            write: true,
            guard: false,
            wipe: false,
        });
    }
}

/// To a given place, whatever is mapped there; by the page where a hole ends it.
fn relocate(
    space: &AddressSpace<Paged>,
    model: &mut Pages,
    range: std::ops::Range<usize>,
    to: u8,
    keep: bool,
) {
    let target = usize::from(to) % (ARENA + 1 - range.len());
    let (at, len) = bytes(&range);
    let keeping = if keep {
        RemapFlags::DONTUNMAP
    } else {
        RemapFlags::empty()
    };
    let result = space.remap(&RemapRequest {
        addr: at,
        old_len: len,
        new_len: len,
        flags: RemapFlags::MAYMOVE | RemapFlags::FIXED | keeping,
        new_addr: addr(target),
    });
    let overlap = range.start < target + range.len() && target < range.end;
    if overlap || model[range.start].is_none() {
        assert!(result.is_err());
        return;
    }
    assert_eq!(result.ok(), Some(addr(target)));
    for (by, from) in range.enumerate() {
        let Some(page) = model[from].clone() else {
            continue;
        };
        if keep {
            let left = model[from].as_mut().expect("it was found");
            forget(left);
            left.guard = false;
        } else {
            model[from] = None;
        }
        model[target + by] = Some(page);
    }
}

/// In place; what grows goes on with what was mapped.
fn resize(space: &AddressSpace<Paged>, model: &mut Pages, range: std::ops::Range<usize>, new: u8) {
    let (at, old_len) = bytes(&range);
    let new = (usize::from(new) % 10 + 1).min(ARENA - range.start);
    let result = space.remap(&RemapRequest {
        addr: at,
        old_len,
        new_len: new as u64 * PAGE,
        flags: RemapFlags::empty(),
        new_addr: 0,
    });
    let end = range.start + new;
    if new <= range.len() {
        assert_eq!(result.is_ok(), model[range.start].is_some(), "{result:?}");
        if result.is_ok() {
            model[end..range.end].fill(None);
        }
        return;
    }
    // Where a mapping ends is for the space to say.
    if result.is_ok() {
        assert!(model[range.end..end].iter().all(Option::is_none));
        let last = model[range.end - 1].clone().expect("it is mapped");
        for number in range.end..end {
            model[number] = Some(further(&last, number + 1 - range.end));
        }
    }
}

fuzz_target!(|steps: Vec<Step>| {
    let mut world = World::new();
    for step in steps.iter().take(200) {
        world.run(step);
        for who in 0..SPACES {
            let backend = world.spaces[who].backend();
            assert_eq!(backend.resident(), backend.recount());
        }
    }
    for who in 0..SPACES {
        world.compare(who);
    }
    let World {
        pool, spaces, file, ..
    } = world;
    drop(spaces);
    assert_eq!(file.open.object().mapping_count(), 0);
    drop(file);
    assert_eq!(pool.stats().used, 0);
});
