//! A file's pages: who lets go of them beside faults, moves and copies, and their dirty marks.

use std::iter::once;
use std::sync::{Arc, Weak};

use loom::sync::atomic::{Ordering, fence};
use loom::thread;
use vma_rcu::sync::planted;

use crate::addr::Pages;
use crate::backend::{Backend as _, FileUnmap, Inheritance, Inherited, PageChange};
use crate::file::{AccessMode, FileKind, FileObject, Mapper, OpenFile, Part, Tenancies, ToClean};
use crate::flags::VmaFlags;
use crate::space::Access;
use crate::vma::Vma;

use super::{Cpu, Frame, NEW, OLD, ONE_LEVEL, PAGE, Space, World, change, model, page};

/// A space in which a page of a file with marks is mapped, shared.
fn mapped(world: &mut World) -> (Arc<FileObject>, Arc<Space>) {
    let object = FileObject::builder(FileKind::Regular, "f")
        .len(page(1))
        .frames(world.frames.clone())
        .track_dirty(true)
        .build();
    let file = OpenFile::new(object.clone(), AccessMode::ReadWrite);
    let flags = VmaFlags::READ | VmaFlags::WRITE | VmaFlags::SHARED | VmaFlags::MAYSHARE;
    let paged = world.paged(ONE_LEVEL);
    let record = || Vma::new(flags, 0, 0).with_file(Some(file.clone()));
    let space = world.enter_with(paged, record);
    (object, space)
}

/// What is written back of the page, as `FileObject::sync` and the space do it; `None` if it isn't dirty.
fn clean(object: &FileObject, space: &Space) -> Option<u64> {
    let ToClean::Pages(mut cleaning) = object.pages().begin_cleaning(0..1, 1) else {
        return None;
    };
    fence(Ordering::SeqCst);
    let entries = space.paged.protect_file(&FileUnmap {
        file: object,
        start: page(0),
        end: page(1),
        copies: false,
        is_shown: &|_| true,
    });
    space.paged.protected(entries);
    let (_, frame) = cleaning.pages().next().unwrap();
    let mut word = [0; 8];
    frame.bytes().read(0, &mut word);
    cleaning.set_written(0..1);
    Some(u64::from_ne_bytes(word))
}

/// A store is in what is written, or the page is dirty afterwards. Where the store finds no page, one that stores fault on, or
/// one that they go to.
#[test]
fn a_store_beside_a_clean_is_written_or_leaves_a_mark() {
    for before in [None, Some(Access::Read), Some(Access::Write)] {
        model(Some(2), move || {
            let mut world = World::new();
            let (object, space) = mapped(&mut world);
            let mut cpu = Cpu::new(&space);
            match before {
                None => {}
                Some(Access::Write) => assert!(cpu.store(page(0), 1)),
                Some(_) => assert_eq!(cpu.load(page(0)), Some(0)),
            }
            let storing = thread::spawn(move || {
                assert!(cpu.store(page(0), 2));
                drop(cpu);
            });
            let written = clean(&object, &space);
            storing.join().unwrap();
            let is_dirty = object.dirty_pages() == 1;
            assert!(written == Some(2) || is_dirty, "lost beside {written:?}");
            assert_eq!(clean(&object, &space), is_dirty.then_some(2));
            assert_eq!(clean(&object, &space), None);
            let content = space.content(page(0));
            assert_eq!(content, Some(2));
            space.check();
            drop((object, space));
            world.end();
        });
    }
}

/// Where the file's page is mapped: there at first, and elsewhere when it has moved.
fn place(which: usize) -> Option<u64> {
    match which {
        OLD => Some(page(0)),
        NEW => Some(page(2)),
        _ => None,
    }
}

impl Mapper for Space {
    fn unmap_pages(&self, file: &FileObject, part: Part, copies: bool) {
        fence(Ordering::SeqCst);
        let is_shown = |addr| place(self.published.load(Ordering::Acquire)) == Some(addr);
        self.paged.unmap_file(&FileUnmap {
            file,
            start: part.addr,
            end: part.addr + page(1),
            copies,
            is_shown: &is_shown,
        });
    }

    fn protect_pages(&self, _: &FileObject, _: Part) -> usize {
        0
    }

    fn rob_heirs(&self, _: &FileObject, _: Part, _: &Frame) {}

    fn settle(&self, protected: usize) {
        self.paged.protected(protected);
    }

    fn pages(&self) -> Pages {
        Pages::new(PAGE as u64)
    }
}

/// What a space knows of the file.
struct Files {
    space: Arc<Space>,
    object: Arc<FileObject>,
    tenancies: Tenancies,
}

impl Files {
    fn of(space: &Arc<Space>, object: &Arc<FileObject>) -> Self {
        Files {
            space: Arc::clone(space),
            object: Arc::clone(object),
            tenancies: Tenancies::default(),
        }
    }

    fn part(which: usize) -> Part {
        Part {
            first: 0,
            end: 1,
            addr: place(which).unwrap(),
        }
    }

    fn link(&self, which: usize) {
        let weak = || Arc::downgrade(&self.space) as Weak<dyn Mapper>;
        let parts = once(Self::part(which));
        let linked = self.object.link(&self.tenancies, &weak, parts, false);
        drop(linked.unwrap());
    }

    fn unlink(&self, which: usize) {
        let parts = once(Self::part(which));
        self.object.unlink(&self.tenancies, parts);
    }

    /// What a call looks at that has put pages of the file where nobody could find them.
    fn look_back(&self, at: u64) {
        fence(Ordering::SeqCst);
        let state = self.space.paged.state();
        change::unmap_removed(state, at, at + page(1));
        if self.object.len() == 0 && !planted("no_look_at_end") {
            self.space.paged.unmap_file(&FileUnmap {
                file: &self.object,
                start: at,
                end: at + page(1),
                copies: true,
                is_shown: &|_| true,
            });
        }
    }

    /// mremap(2), as the space does it.
    fn remap(&self) {
        let (space, state) = (&self.space, self.space.paged.state());
        let (from, to) = (page(0), page(2));
        self.link(NEW);
        space.records[OLD].set_gated(true);
        crate::space::fence_before_tables();
        let changes = [PageChange::Move {
            from,
            to,
            len: page(1),
        }];
        let mapped = to..to + page(1);
        let prepared = change::prepare(state, &changes, &[], std::slice::from_ref(&mapped));
        let mut taken = prepared.unwrap().unwrap();
        space.records[NEW].set_gated(true);
        space.publish(NEW);
        crate::space::fence_before_tables();
        change::commit(state, &changes, &[], &mut taken);
        self.look_back(to);
        space.records[NEW].set_gated(false);
        space.finish(taken);
        self.unlink(OLD);
    }

    /// fork(2): the child.
    fn dup(&self, world: &mut World) -> Files {
        let paged = self.space.paged.dup().unwrap();
        let file = self.space.records[OLD].file().cloned();
        let flags = self.space.records[OLD].flags();
        let record = || Vma::new(flags, 0, 0).with_file(file.clone());
        let child = Files::of(&world.enter_with(paged, record), &self.object);
        child.link(OLD);
        let all = [Inherited {
            start: 0,
            end: self.space.paged.state().limit,
            how: Inheritance::Private,
        }];
        self.space
            .paged
            .dup_pages(&child.space.paged, &all)
            .unwrap();
        child.look_back(page(0));
        child
    }
}

/// A space in which a page of a file is mapped, and nobody has used it yet.
fn entered(world: &mut World, shared: bool) -> Files {
    let object = FileObject::builder(FileKind::Shmem, "f")
        .len(page(1))
        .frames(world.frames.clone())
        .build();
    let file = OpenFile::new(object.clone(), AccessMode::ReadWrite);
    let mut flags = VmaFlags::READ | VmaFlags::WRITE;
    if shared {
        flags |= VmaFlags::SHARED | VmaFlags::MAYSHARE;
    }
    let paged = world.paged(ONE_LEVEL);
    let record = || Vma::new(flags, 0, 0).with_file(Some(file.clone()));
    let files = Files::of(&world.enter_with(paged, record), &object);
    files.link(OLD);
    files
}

/// Nothing of the file is left anywhere.
fn nothing_is_left<const N: usize>(spaces: [Files; N], world: World) {
    for files in &spaces {
        for at in [page(0), page(2)] {
            assert_eq!(files.space.content(at), None, "past the end");
        }
        files.space.check();
    }
    assert_eq!(world.live(), 0, "a frame is left");
    drop(spaces);
    world.end();
}

fn truncate(object: &Arc<FileObject>) -> thread::JoinHandle<()> {
    let object = Arc::clone(object);
    thread::spawn(move || object.set_len(0).unwrap())
}

/// The length stays, and so do private copies.
fn punch(object: &Arc<FileObject>) -> thread::JoinHandle<()> {
    let object = Arc::clone(object);
    thread::spawn(move || object.punch_hole(0, page(1)).unwrap())
}

type LetGo = fn(&Arc<FileObject>) -> thread::JoinHandle<()>;

/// Who lets go of a page that was loaded from or copied.
const LETTING_GO: [(Access, LetGo); 3] = [
    (Access::Read, truncate),
    (Access::Write, truncate),
    (Access::Read, punch),
];

/// C7: truncation beside a fault, which makes the page, finds it, or copies it.
#[test]
fn a_fault_puts_in_no_page_that_its_file_lets_go_of() {
    for (shared, access) in [
        (true, Access::Write),
        (false, Access::Read),
        (false, Access::Write),
    ] {
        model(Some(3), move || {
            let mut world = World::new();
            let files = entered(&mut world, shared);
            let truncating = truncate(&files.object);
            files.space.fault(page(0), access);
            truncating.join().unwrap();
            nothing_is_left([files], world);
        });
    }
}

/// C7: truncation or a punched hole beside an mremap(2) that takes the page elsewhere.
#[test]
fn a_page_that_moves_is_let_go_of_as_well() {
    for (access, let_go) in LETTING_GO {
        model(Some(3), move || {
            let mut world = World::new();
            let files = entered(&mut world, false);
            assert!(files.space.fault(page(0), access));
            let letting_go = let_go(&files.object);
            files.remap();
            letting_go.join().unwrap();
            nothing_is_left([files], world);
        });
    }
}

/// C7: the same beside a fork(2), whose child may get the page.
#[test]
fn a_child_keeps_no_page_that_its_file_lets_go_of() {
    for (access, let_go) in LETTING_GO {
        model(Some(3), move || {
            let mut world = World::new();
            let files = entered(&mut world, false);
            assert!(files.space.fault(page(0), access));
            let letting_go = let_go(&files.object);
            let child = files.dup(&mut world);
            letting_go.join().unwrap();
            nothing_is_left([files, child], world);
        });
    }
}
