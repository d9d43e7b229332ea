//! Tables that a child shares with its parent.

use std::sync::Arc;

use loom::thread;

use crate::backend::{Backend as _, FileUnmap};
use crate::file::{FileKind, FileObject};
use crate::space::Access;

use super::{Cpu, NOTHING, ONE_LEVEL, Space, TWO_LEVELS, World, model, page};

/// A parent that has stored to a page, and its child.
fn family(limit: u64) -> (World, Arc<Space>, Arc<Space>) {
    let mut world = World::new();
    let parent = world.space(limit);
    assert!(Cpu::new(&parent).store(page(0), 1));
    let child = world.fork(&parent);
    (world, parent, child)
}

/// Two threads of a parent make a shared directory their own while the child, which shares it too, ends.
#[test]
fn a_directory_is_copied_while_its_last_link_goes() {
    model(Some(4), || {
        let (world, parent, child) = family(TWO_LEVELS);
        let late = {
            let parent = parent.clone();
            let reader = world.domain.register();
            thread::spawn(move || {
                let _guard = reader.pin();
                parent.paged.state().tables.own_leaf(page(0)).unwrap();
            })
        };
        parent.paged.state().tables.own_leaf(page(0)).unwrap();
        drop(child);
        late.join().unwrap();
        assert_eq!(parent.content(page(0)), Some(1));
        assert_eq!(world.live(), 1);
        parent.check();
        drop(parent);
        world.end();
    });
}

/// The same while the child has ended, and the range is unmapped in which the late one faults.
#[test]
fn a_directory_is_copied_while_its_range_is_unmapped() {
    model(Some(3), || {
        let mut world = World::new();
        let parent = world.space(TWO_LEVELS);
        assert!(Cpu::new(&parent).store(page(0), 1));
        let first = world.fork(&parent);
        // So that what is in the directory is shared one by one.
        parent.paged.state().tables.own_leaf(page(4)).unwrap();
        let child = world.fork(&parent);
        drop(first);
        let late = {
            let parent = parent.clone();
            thread::spawn(move || parent.fault(page(0), Access::Write))
        };
        drop(child);
        let taken = parent.unmap(0, TWO_LEVELS, 0..u64::MAX, NOTHING);
        parent.finish(taken);
        late.join().unwrap();
        assert_eq!(parent.content(page(0)), None);
        assert_eq!(world.live(), 0);
        drop(parent);
        world.end();
    });
}

/// A load by a thread that found its way while tables were shared doesn't see what the child does to them afterwards.
#[test]
fn an_access_finds_nothing_of_another_space() {
    model(None, || {
        let (world, parent, child) = family(ONE_LEVEL);
        let mut cpu = Cpu::new(&parent);
        let accessor = thread::spawn(move || assert_eq!(cpu.load(page(0)), Some(1)));
        // Makes the leaf the parent's own, and leaves the shared one to the child.
        assert!(parent.fault(page(1), Access::Write));
        assert!(Cpu::new(&child).store(page(0), 7));
        accessor.join().unwrap();
        assert_eq!(child.content(page(0)), Some(7));
        assert_eq!(parent.content(page(0)), Some(1));
        drop((parent, child));
        world.end();
    });
}

/// A thread that comes late to copy a table that its space no longer leads to takes nothing from who owns it by then.
#[test]
fn a_late_copy_leaves_the_owner_alone() {
    model(None, || {
        let (world, parent, child) = family(ONE_LEVEL);
        let late = {
            let parent = parent.clone();
            thread::spawn(move || {
                parent.paged.state().tables.own_leaf(page(0)).unwrap();
            })
        };
        parent.paged.state().tables.own_leaf(page(1)).unwrap();
        assert!(Cpu::new(&child).store(page(0), 7));
        late.join().unwrap();
        let entry = child.paged.state().tables.leaf(page(0)).unwrap().entry(0);
        assert!(entry.is_owned(), "the child has stored to it");
        assert_eq!(child.content(page(0)), Some(7));
        assert_eq!(parent.content(page(0)), Some(1));
        assert_eq!(world.live(), 2);
        drop((parent, child));
        world.end();
    });
}

/// The same where the late one faults in a range that is being unmapped, so that its space leaves the table by that.
#[test]
fn a_late_copy_of_what_is_unmapped_leaves_the_owner_alone() {
    model(Some(4), || {
        let (world, parent, child) = family(ONE_LEVEL);
        let late = {
            let parent = parent.clone();
            thread::spawn(move || parent.fault(page(0), Access::Write))
        };
        let taken = parent.unmap(0, ONE_LEVEL, 0..u64::MAX, NOTHING);
        parent.finish(taken);
        assert!(Cpu::new(&child).store(page(0), 7));
        late.join().unwrap();
        let (_, entry) = child.paged.state().tables.look(page(0)).unwrap();
        assert!(entry.is_owned(), "the child has stored to it");
        assert_eq!(child.content(page(0)), Some(7));
        assert_eq!(parent.content(page(0)), None);
        assert_eq!(world.live(), 1);
        drop((parent, child));
        world.end();
    });
}

/// Parent and child store to the page that both show, at the same time.
#[test]
fn each_gets_a_copy_of_its_own() {
    model(Some(3), || {
        let (world, parent, child) = family(ONE_LEVEL);
        let mut cpu = Cpu::new(&parent);
        let other = thread::spawn(move || {
            assert!(cpu.store(page(0), 7));
            assert_eq!(cpu.load(page(0)), Some(7));
        });
        let mut cpu = Cpu::new(&child);
        assert_eq!(cpu.load(page(0)), Some(1));
        assert!(cpu.store(page(0), 8));
        assert_eq!(cpu.load(page(0)), Some(8));
        drop(cpu);
        other.join().unwrap();
        assert_eq!(parent.content(page(0)), Some(7));
        assert_eq!(child.content(page(0)), Some(8));
        assert_eq!(world.live(), 2);
        parent.check();
        child.check();
        drop((parent, child));
        world.end();
    });
}

/// Two threads of a child store to two pages of a leaf that it shares: the leaf is copied once, and has both.
#[test]
fn two_stores_copy_a_table_once() {
    model(Some(3), || {
        let (world, parent, child) = family(ONE_LEVEL);
        let mut cpu = Cpu::new(&child);
        let other = thread::spawn(move || assert!(cpu.store(page(0), 7)));
        assert!(Cpu::new(&child).store(page(1), 8));
        other.join().unwrap();
        assert_eq!(child.content(page(0)), Some(7));
        assert_eq!(child.content(page(1)), Some(8));
        assert_eq!(parent.content(page(0)), Some(1));
        assert_eq!(parent.content(page(1)), None);
        assert_eq!(world.live(), 3);
        child.check();
        drop((parent, child));
        world.end();
    });
}

/// Both spaces leave shared tables at the same time, one by making its own, the other by its end.
#[test]
fn a_shared_table_is_freed_once() {
    model(Some(4), || {
        let (world, parent, child) = family(TWO_LEVELS);
        let other = {
            let parent = parent.clone();
            thread::spawn(move || {
                parent.paged.state().tables.own_leaf(page(0)).unwrap();
            })
        };
        drop(child);
        other.join().unwrap();
        assert_eq!(parent.content(page(0)), Some(1));
        assert_eq!(world.live(), 1);
        drop(parent);
        world.end();
    });
}

/// A thread that writes A, and then B, while its space is copied: no child has B without A, and none sees what comes later. With
/// tables that were shared before, and with such that weren't.
#[test]
fn a_child_has_what_was_there_at_one_instant() {
    for forked_before in [false, true] {
        model(Some(3), move || {
            let mut world = World::new();
            let parent = world.space(ONE_LEVEL);
            let mut cpu = Cpu::new(&parent);
            assert!(cpu.store(page(0), 0) && cpu.store(page(1), 0));
            if forked_before {
                drop(world.fork(&parent));
            }
            // Cached for stores, if the space wasn't copied.
            assert_eq!(cpu.load(page(1)), Some(0));
            let writer = thread::spawn(move || {
                cpu.cache.retain(|cached| cached.0 == page(1));
                assert!(cpu.store(page(0), 1));
                assert!(cpu.store(page(1), 1));
            });
            let child = world.fork(&parent);
            let seen = [1, 0].map(|number| child.content(page(number)).unwrap());
            assert!(seen != [1, 0], "B without A");
            writer.join().unwrap();
            let later = [1, 0].map(|number| child.content(page(number)).unwrap());
            assert_eq!(seen, later);
            assert_eq!(parent.content(page(0)), Some(1));
            assert_eq!(parent.content(page(1)), Some(1));
            drop((parent, child));
            world.end();
        });
    }
}

/// A thread is on its way through shared tables while its space leaves them, and the other one ends: they are freed after it.
#[test]
fn a_reader_keeps_tables_that_both_spaces_have_left() {
    model(Some(4), || {
        let (world, parent, child) = family(ONE_LEVEL);
        let mut cpu = Cpu::new(&parent);
        cpu.reader = Some(world.domain.register());
        let reader = thread::spawn(move || {
            assert_eq!(cpu.load(page(0)), Some(1));
            drop(cpu);
        });
        parent.paged.state().tables.own_leaf(page(0)).unwrap();
        drop(child);
        world.domain.synchronize(None).unwrap();
        reader.join().unwrap();
        assert_eq!(world.live(), 1);
        drop(parent);
        world.end();
    });
}

/// A file lets go of its pages; the walk comes to a leaf that the space has left meanwhile: what another has there stays.
#[test]
fn a_file_takes_nothing_from_a_table_that_was_left() {
    model(None, || {
        let mut world = World::new();
        let parent = world.space(ONE_LEVEL);
        assert!(Cpu::new(&parent).store(page(1), 1));
        let file = {
            let parent = parent.clone();
            thread::spawn(move || {
                let file = FileObject::builder(FileKind::Regular, "f").build();
                parent.paged.unmap_file(&FileUnmap {
                    file: &file,
                    start: page(0),
                    end: page(1),
                    copies: true,
                    is_shown: &|_| true,
                });
            })
        };
        // By now something else is mapped there.
        let child = world.fork(&parent);
        parent.paged.state().tables.own_leaf(page(1)).unwrap();
        assert!(Cpu::new(&child).store(page(0), 7));
        file.join().unwrap();
        assert_eq!(child.content(page(0)), Some(7));
        drop((parent, child));
        world.end();
    });
}
