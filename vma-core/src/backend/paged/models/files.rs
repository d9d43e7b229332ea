//! Dirty marks of a file's pages.

use std::sync::Arc;

use loom::sync::atomic::{Ordering, fence};
use loom::thread;

use crate::backend::{Backend as _, FileUnmap};
use crate::file::{AccessMode, FileKind, FileObject, OpenFile, ToClean};
use crate::flags::VmaFlags;
use crate::space::Access;
use crate::vma::Vma;

use super::{Cpu, ONE_LEVEL, Space, World, model, page};

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
        model(None, move || {
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
