//! Tables that a child shares with its parent.

use loom::thread;

use crate::space::Access;

use super::{Cpu, ONE_LEVEL, TWO_LEVELS, World, model, page};

/// Two threads of a parent make a shared directory their own while the child, which shares it too, ends.
#[test]
fn a_directory_is_copied_while_its_last_link_goes() {
    model(None, || {
        let mut world = World::new();
        let parent = world.space(TWO_LEVELS);
        assert!(Cpu::new(&parent).store(page(0), 1));
        let child = world.fork(&parent);
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

/// A load by a thread that found its way while tables were shared doesn't see what the child does to them afterwards.
#[test]
fn an_access_finds_nothing_of_another_space() {
    model(None, || {
        let mut world = World::new();
        let parent = world.space(ONE_LEVEL);
        assert!(Cpu::new(&parent).store(page(0), 1));
        let child = world.fork(&parent);
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
        let mut world = World::new();
        let parent = world.space(ONE_LEVEL);
        assert!(Cpu::new(&parent).store(page(0), 1));
        let child = world.fork(&parent);
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
