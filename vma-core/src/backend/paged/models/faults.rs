//! Faults against faults.

use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;

use super::{Cpu, ONE_LEVEL, Space, TWO_LEVELS, World, model, page};
use crate::backend::paged::FrameAllocator as _;
use crate::space::Access;

/// One frame is put in, and counted once; the other one goes back. Whoever finds it finds it filled.
#[test]
fn two_faults_make_one_page() {
    model(Some(4), || {
        let mut world = World::new();
        let space = world.space(ONE_LEVEL);
        let mut cpu = Cpu::new(&space);
        let other = thread::spawn(move || assert_eq!(cpu.load(page(0)), Some(0)));
        assert!(space.fault(page(0), Access::Write));
        other.join().unwrap();
        assert_eq!(space.content(page(0)), Some(0));
        assert_eq!(space.paged.state().tables.resident().anon, 1);
        assert_eq!(world.live(), 1);
        space.check();
        drop(space);
        world.end();
    });
}

/// Each level has one table, in which both pages are.
#[test]
fn two_faults_share_one_table() {
    model(None, || {
        let mut world = World::new();
        let space = world.space(TWO_LEVELS);
        // The same, one after the other.
        let like = world.space(TWO_LEVELS);
        assert!(like.fault(page(0), Access::Write) && like.fault(page(1), Access::Write));
        let other = {
            let space = space.clone();
            thread::spawn(move || assert!(space.fault(page(1), Access::Write)))
        };
        assert!(space.fault(page(0), Access::Write));
        other.join().unwrap();
        assert_eq!(space.content(page(0)), Some(0));
        assert_eq!(space.content(page(1)), Some(0));
        let bytes = |space: &Space| space.paged.state().tables.bytes();
        assert_eq!(bytes(&space), bytes(&like));
        assert_eq!(space.paged.state().tables.resident().anon, 2);
        drop((space, like));
        world.end();
    });
}

/// A store goes to a copy. Who has seen it, and has the page cached that was copied, loads from the copy.
#[test]
fn a_copied_page_is_out_of_use_before_the_first_store() {
    model(None, || {
        let mut world = World::new();
        let space = world.space(ONE_LEVEL);
        assert!(Cpu::new(&space).store(page(0), 1));
        let child = world.fork(&space);
        let stored = std::sync::Arc::new(AtomicBool::new(false));
        let mut cpu = Cpu::new(&space);
        assert_eq!(cpu.load(page(0)), Some(1));
        let reader = {
            let stored = stored.clone();
            thread::spawn(move || {
                let seen = stored.load(Ordering::Acquire);
                let value = cpu.load(page(0));
                assert!(value == Some(2) || !seen && value == Some(1), "{value:?}");
            })
        };
        assert!(Cpu::new(&space).store(page(0), 2));
        stored.store(true, Ordering::Release);
        reader.join().unwrap();
        assert_eq!(child.content(page(0)), Some(1));
        drop((space, child));
        world.end();
    });
}

/// Two references, in two threads: all uses come before the frame goes back.
#[test]
fn a_frame_goes_back_after_its_last_use() {
    model(None, || {
        let world = World::new();
        let frame = world.frames.allocate().unwrap().zeroed();
        let other = {
            let frame = frame.clone();
            thread::spawn(move || frame.bytes().write(0, &[1; 8]))
        };
        frame.bytes().write(0, &[2; 8]);
        drop(frame);
        other.join().unwrap();
        world.end();
    });
}
