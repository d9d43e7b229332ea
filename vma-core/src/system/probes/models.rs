//! Models of registrations beside map, unmap and dup (C10).
//!
//! Probes, their table, the file's index and the dup semaphore are the real ones. A space has one page: whether it is mapped is one word, in
//! place of the tree. `.ci/loom` runs them as they are, and then once per planted fault, which they must find.

use std::sync::{Arc, Weak};

use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::thread;
use vma_rcu::wait::Wait;

use super::inside::Inside;
use super::registered::Registered;
use super::{Place, Probe, ProbeSite, Probed, Table, fence_of_probes};
use crate::addr::Pages;
use crate::backend::paged::Frame;
use crate::error::Errno;
use crate::file::{FileKind, FileObject, Mapper, Part, Tenancies};
use crate::system::semaphore::DupSemaphore;

const PART: Part = Part {
    first: 0,
    end: 1,
    addr: 0x1000,
};

/// A space that maps the first page of a file, or doesn't.
struct Space {
    tenancies: Tenancies,
    /// As the root of the tree: store-release, load-acquire.
    mapped: AtomicBool,
    table: Arc<Table<Space>>,
    /// It is in the system.
    joined: AtomicBool,
    /// How often the probe is installed there.
    count: AtomicUsize,
}

impl Space {
    fn new(table: &Arc<Table<Space>>) -> Arc<Self> {
        let space = Space::outside(table);
        space.join();
        space
    }

    fn outside(table: &Arc<Table<Space>>) -> Arc<Self> {
        Arc::new(Space {
            tenancies: Tenancies::default(),
            mapped: AtomicBool::new(false),
            table: Arc::clone(table),
            joined: AtomicBool::new(false),
            count: AtomicUsize::new(0),
        })
    }

    fn join(&self) {
        self.table.note_page_size(self.pages());
        self.joined.store(true, Ordering::Release);
        fence_of_probes();
    }

    fn weak(self: &Arc<Self>) -> Weak<dyn Mapper> {
        Arc::downgrade(self) as _
    }

    fn enter(self: &Arc<Self>, file: &FileObject) {
        let parts = std::iter::once(PART);
        let linked = file.link(&self.tenancies, &|| self.weak(), parts, false);
        drop(linked.unwrap());
        self.mapped.store(true, Ordering::Release);
    }

    fn map(self: &Arc<Self>, file: &FileObject) {
        self.enter(file);
        fence_of_probes();
        self.settle(file, file.has_probes());
    }

    fn unmap(self: &Arc<Self>, file: &FileObject) {
        self.mapped.store(false, Ordering::Release);
        fence_of_probes();
        let is_marked = file.has_probes();
        file.unlink(&self.tenancies, std::iter::once(PART));
        self.settle(file, is_marked);
    }

    fn settle(self: &Arc<Self>, file: &FileObject, is_marked: bool) {
        if !is_marked {
            return;
        }
        for (probe, addr) in self.table.within(file, PART, self.pages()) {
            let space = Arc::clone(self);
            probe.settle(Place { space, addr }, &mut None);
        }
    }

    /// Nobody is at work.
    fn is_probed(&self) -> bool {
        match self.count.load(Ordering::Relaxed) {
            0 => false,
            1 => true,
            more => panic!("installed {more} times"),
        }
    }
}

impl Probed for Space {
    type Backend = AtomicUsize;

    fn shows(&self, _: &FileObject, offset: u64, addr: u64) -> bool {
        assert_eq!((offset, addr), (0, PART.addr));
        self.mapped.load(Ordering::Acquire)
    }

    fn backend(&self) -> &AtomicUsize {
        &self.count
    }

    fn table(&self) -> Option<&Arc<Table<Self>>> {
        self.joined.load(Ordering::Acquire).then_some(&self.table)
    }
}

impl Mapper for Space {
    fn unmap_pages(&self, _: &FileObject, _: Part, _: bool) {}

    fn protect_pages(&self, _: &FileObject, _: Part) -> usize {
        0
    }

    fn rob_heirs(&self, _: &FileObject, _: Part, _: &Frame) {}

    fn settle(&self, _: usize) {}

    fn pages(&self) -> Pages {
        Pages::new(4096)
    }
}

/// Counts in the space.
struct Counts;

impl Probe<AtomicUsize> for Counts {
    fn install(&self, site: &ProbeSite<'_, AtomicUsize>) -> Result<(), Errno> {
        site.backend().fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn remove(&self, site: &ProbeSite<'_, AtomicUsize>) {
        site.backend().fetch_sub(1, Ordering::Relaxed);
    }
}

/// A system with a file.
struct World {
    table: Arc<Table<Space>>,
    dups: DupSemaphore,
    file: Arc<FileObject>,
}

impl World {
    fn new() -> Arc<Self> {
        Arc::new(World {
            table: Arc::default(),
            dups: DupSemaphore::new(None),
            file: FileObject::builder(FileKind::Shmem, "f").len(4096).build(),
        })
    }

    fn register(&self) -> Arc<Registered<Space>> {
        let place = (&self.file, 0);
        let forever = Wait::forever();
        let quiesce = || self.dups.write_with(forever);
        let probe = Arc::new(Counts);
        self.table.register(place, probe, forever, quiesce).unwrap()
    }

    /// As a registration where no dup can be.
    fn register_alone(&self) -> Arc<Registered<Space>> {
        let probe = Arc::new(Counts);
        let registered = self
            .table
            .register((&self.file, 0), probe, Wait::forever(), || Ok(()));
        registered.unwrap()
    }
}

fn model(preemptions: Option<usize>, f: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = 100_000;
    builder.check(f);
}

#[test]
fn a_probe_is_in_what_is_mapped_meanwhile() {
    model(Some(4), || {
        let world = World::new();
        let space = Space::new(&world.table);
        let mapper = {
            let (space, world) = (space.clone(), world.clone());
            thread::spawn(move || space.map(&world.file))
        };
        let probe = world.register_alone();
        mapper.join().unwrap();
        assert!(space.is_probed(), "mapped without the probe");
        probe.close(&mut None);
        assert!(!space.is_probed());
    });
}

#[test]
fn a_probe_is_in_nothing_that_is_unmapped_meanwhile() {
    model(Some(4), || {
        let world = World::new();
        let space = Space::new(&world.table);
        space.map(&world.file);
        let unmapper = {
            let (space, world) = (space.clone(), world.clone());
            thread::spawn(move || space.unmap(&world.file))
        };
        let probe = world.register_alone();
        unmapper.join().unwrap();
        assert!(!space.is_probed(), "unmapped with the probe");
        probe.close(&mut None);
        assert!(!space.is_probed());
    });
}

/// A dup copies what it sees of the file's mark before the child is in the index.
#[test]
fn a_child_that_is_made_meanwhile_has_the_probe() {
    model(Some(3), || {
        let world = World::new();
        let child = Space::new(&world.table);
        let dup = {
            let (child, world) = (child.clone(), world.clone());
            thread::spawn(move || {
                let dupping = world
                    .dups
                    .read_with(Wait::forever(), crate::space::order::DUP)
                    .unwrap();
                let is_marked = world.file.has_probes();
                child.enter(&world.file);
                drop(dupping);
                child.settle(&world.file, is_marked);
            })
        };
        let probe = world.register();
        dup.join().unwrap();
        assert!(child.is_probed(), "a child without the probe");
        probe.close(&mut None);
        assert!(!child.is_probed());
    });
}

#[test]
fn a_space_that_is_taken_in_meanwhile_has_the_probe() {
    model(Some(4), || {
        let world = World::new();
        let space = Space::outside(&world.table);
        space.enter(&world.file);
        let adopter = {
            let (space, world) = (space.clone(), world.clone());
            thread::spawn(move || {
                space.join();
                space.settle(&world.file, world.file.has_probes());
            })
        };
        let probe = world.register_alone();
        adopter.join().unwrap();
        assert!(space.is_probed(), "taken in without the probe");
        probe.close(&mut None);
        assert!(!space.is_probed());
    });
}

#[test]
fn an_unregistered_probe_is_in_nothing_that_is_mapped_meanwhile() {
    model(Some(4), || {
        let world = World::new();
        let space = Space::new(&world.table);
        let probe = world.register_alone();
        let mapper = {
            let (space, world) = (space.clone(), world.clone());
            thread::spawn(move || space.map(&world.file))
        };
        probe.close(&mut None);
        assert!(!space.is_probed(), "a callback after unregistration");
        mapper.join().unwrap();
        assert!(!space.is_probed(), "mapped with a probe that is gone");
        assert!(!world.file.has_probes());
    });
}

/// Who is in a callback doesn't wait: whoever is at work does it.
#[test]
fn what_a_callback_leaves_is_done() {
    model(Some(4), || {
        let world = World::new();
        let (one, two) = (Space::new(&world.table), Space::new(&world.table));
        one.map(&world.file);
        let probe = world.register_alone();
        assert!(one.is_probed());
        let callback = {
            let (one, world) = (one.clone(), world.clone());
            thread::spawn(move || {
                let _inside = Inside::enter();
                one.unmap(&world.file);
            })
        };
        two.map(&world.file);
        callback.join().unwrap();
        assert!(!one.is_probed(), "nobody has seen to what was left");
        assert!(two.is_probed());
        probe.close(&mut None);
        assert!(!two.is_probed());
    });
}
