//! Faults and accesses against calls that take the mapping away.

use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;

use super::{Cpu, NEW, NOTHING, OLD, ONE_LEVEL, World, load, model, page, store};
use crate::space::Access;

/// Where nothing was mapped before, so that there is no table: a fault puts its page in before the call comes to the leaf,
/// or finds that the mapping is gone.
#[test]
fn a_fault_puts_nothing_into_an_unmapped_range() {
    model(None, || {
        let mut world = World::new();
        let space = world.space(ONE_LEVEL);
        let fault = {
            let space = space.clone();
            thread::spawn(move || space.fault(page(0), Access::Write))
        };
        let taken = space.unmap(page(0), page(4), 0..u64::MAX, NOTHING);
        space.finish(taken);
        fault.join().unwrap();
        assert_eq!(space.content(page(0)), None);
        assert_eq!(world.live(), 0);
        space.check();
        drop(space);
        world.end();
    });
}

/// The same where a neighbour's page keeps the leaf in place.
#[test]
fn a_fault_puts_nothing_into_an_unmapped_part_of_a_leaf() {
    model(None, || {
        let mut world = World::new();
        let space = world.space(ONE_LEVEL);
        assert!(space.fault(page(1), Access::Write));
        let fault = {
            let space = space.clone();
            thread::spawn(move || space.fault(page(0), Access::Write))
        };
        let taken = space.unmap(page(0), page(1), page(0)..page(1), NOTHING);
        space.finish(taken);
        fault.join().unwrap();
        assert_eq!(space.content(page(0)), None);
        assert_eq!(space.content(page(1)), Some(0));
        assert_eq!(world.live(), 1);
        space.check();
        drop(space);
        world.end();
    });
}

/// When the call has returned, no access is under way through what was mapped: with the leaf, and within a leaf that stays.
#[test]
fn an_access_is_over_before_the_frame_goes_back() {
    for hole in [0..u64::MAX, page(0)..page(1)] {
        model(None, move || {
            let mut world = World::new();
            let space = world.space(ONE_LEVEL);
            let mut cpu = Cpu::new(&space);
            assert!(cpu.store(page(0), 1));
            let accessor = thread::spawn(move || {
                // By what is cached, and by what is found.
                let first = cpu.load(page(0));
                let second = cpu.load(page(0));
                assert!(first.is_none_or(|first| first == 1), "{first:?}");
                assert!(second.is_none() || first == second, "{second:?}");
            });
            let taken = space.unmap(page(0), page(1), hole.clone(), NOTHING);
            space.finish(taken);
            assert_eq!(world.live(), 0);
            accessor.join().unwrap();
            drop(space);
            world.end();
        });
    }
}

/// While old pages are being let go of, the range is mapped again: the new mapping has a page of its own, which is left alone.
/// Stores of who finds the old mapping don't come to it.
#[test]
fn a_detached_range_can_be_mapped_again() {
    for hole in [0..u64::MAX, page(0)..page(1)] {
        model(Some(3), move || {
            let mut world = World::new();
            let space = world.space(ONE_LEVEL);
            let mut cpu = Cpu::new(&space);
            assert!(cpu.store(page(0), 1));
            let other = thread::spawn(move || {
                // The old page, or the new one, whose content nobody has stored yet or the other has.
                let seen = cpu.load(page(0));
                assert!(matches!(seen, None | Some(0..=2)), "{seen:?}");
                let again = cpu.load(page(0));
                assert!(again != Some(1) || seen == Some(1), "old bytes again");
            });
            let taken = space.unmap(page(0), page(1), hole.clone(), NEW);
            let mut cpu = Cpu::new(&space);
            assert_eq!(cpu.load(page(0)), Some(0));
            assert!(cpu.store(page(0), 2));
            space.finish(taken);
            assert_eq!(cpu.load(page(0)), Some(2));
            other.join().unwrap();
            assert_eq!(world.live(), 1);
            drop((cpu, space));
            world.end();
        });
    }
}

/// A fault that began in the mapping before puts nothing where the new one finds it.
#[test]
fn a_fault_of_the_old_mapping_puts_nothing_into_the_new_one() {
    model(Some(3), || {
        let mut world = World::new();
        let space = world.space(ONE_LEVEL);
        let mut cpu = Cpu::new(&space);
        // 1 is for the old mapping alone.
        let old = thread::spawn(move || {
            cpu.while_mapped(OLD, page(0), Access::Write, |memory| store(memory, 1))
        });
        let taken = space.unmap(page(0), page(1), 0..u64::MAX, NEW);
        let mut cpu = Cpu::new(&space);
        assert_eq!(cpu.load(page(0)), Some(0));
        space.finish(taken);
        assert_eq!(cpu.load(page(0)), Some(0));
        old.join().unwrap();
        drop((cpu, space));
        world.end();
    });
}

/// One call has taken a page out and not waited for the accesses yet. Another one maps the range anew, and has returned: then
/// nobody uses the old page any more.
#[test]
fn a_new_mapping_waits_for_accesses_that_an_earlier_call_owes() {
    model(Some(4), || {
        let mut world = World::new();
        let space = world.space(ONE_LEVEL);
        let mut cpu = Cpu::new(&space);
        assert!(cpu.store(page(0), 1));
        let mapped = std::sync::Arc::new(AtomicBool::new(false));
        let accessor = {
            let mapped = mapped.clone();
            thread::spawn(move || {
                let is_new = mapped.load(Ordering::Acquire);
                let seen = cpu.load(page(0));
                assert!(!(is_new && seen == Some(1)), "the old page");
            })
        };
        let first = space.unmap(page(0), page(1), 0..u64::MAX, NOTHING);
        let second = space.unmap(page(0), page(1), 0..u64::MAX, NEW);
        space.finish(second);
        mapped.store(true, Ordering::Release);
        space.finish(first);
        accessor.join().unwrap();
        drop(space);
        world.end();
    });
}

/// Who finds the new mapping doesn't find the old one's page in it, neither before nor after that has been taken out.
#[test]
fn a_gate_keeps_old_pages_from_a_new_mapping() {
    model(Some(3), || {
        let mut world = World::new();
        let space = world.space(ONE_LEVEL);
        let mut cpu = Cpu::new(&space);
        assert!(cpu.store(page(0), 1));
        let other = thread::spawn(move || {
            let seen = cpu.while_mapped(NEW, page(0), Access::Read, load);
            assert!(matches!(seen, None | Some(0)), "{seen:?}");
        });
        let taken = space.unmap(page(0), page(1), 0..u64::MAX, NEW);
        space.finish(taken);
        other.join().unwrap();
        drop(space);
        world.end();
    });
}
