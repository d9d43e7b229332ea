//! Where probes are is what a scan of all spaces finds: after every call, whatever it did, and in the end.
#![allow(clippy::unwrap_used, reason = "tests may")]

#[path = "memory/mod.rs"]
mod memory;
mod probed;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use memory::RW;
use probed::{Log, PAGE, RX, register, scan};
use proptest::prelude::*;
use vma_core::paged::{FramePool, Paged};
use vma_core::{
    Access, Advice, Backend, Errno, MapFlags, MapRequest, OpenFile, Probe, ProbeHandle, ProbeSite,
    Prot, RemapFlags, RemapRequest, SpaceConfig, SpaceHandle, System, Wait,
};

const AT: u64 = 0x10_0000_0000;
/// Pages that calls play in.
const ARENA: u64 = 24;
const SPACES: usize = 3;
/// More than there are probes at a time.
const SLOTS: usize = 4;
const FILES: [u64; 2] = [12, 40];

fn addr(page: u64) -> u64 {
    AT + page * PAGE
}

#[derive(Clone, Debug)]
enum Call {
    Map {
        file: usize,
        offset: u64,
        shared: bool,
        prot: u8,
    },
    Anonymous,
    Unmap,
    Protect {
        prot: u8,
    },
    Move {
        to: u64,
        keep: bool,
    },
    Resize {
        pages: u64,
    },
    Nonlinear {
        offset: u64,
    },
    Fork {
        into: usize,
        not_this: bool,
        adopted: bool,
    },
    Exit,
    Touch {
        write: bool,
    },
    Batch {
        to: u64,
        downgrade: bool,
    },
    /// At `fail` its installation fails, counted from now on.
    Register {
        slot: usize,
        file: usize,
        offset: u64,
        fail: usize,
    },
    Unregister {
        slot: usize,
    },
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        8 => (0..2usize, 0..8u64, 0..6u8, 0..4u8)
            .prop_map(|(file, offset, shared, prot)| Call::Map { file, offset, shared: shared == 0, prot }),
        1 => Just(Call::Anonymous),
        3 => Just(Call::Unmap),
        3 => (0..4u8).prop_map(|prot| Call::Protect { prot }),
        3 => (0..ARENA, any::<bool>()).prop_map(|(to, keep)| Call::Move { to, keep }),
        2 => (1..8u64).prop_map(|pages| Call::Resize { pages }),
        1 => (0..8u64).prop_map(|offset| Call::Nonlinear { offset }),
        2 => (0..SPACES, any::<bool>(), any::<bool>())
            .prop_map(|(into, not_this, adopted)| Call::Fork { into, not_this, adopted }),
        1 => Just(Call::Exit),
        2 => any::<bool>().prop_map(|write| Call::Touch { write }),
        2 => (0..ARENA, any::<bool>()).prop_map(|(to, downgrade)| Call::Batch { to, downgrade }),
        5 => (0..SLOTS, 0..2usize, 0..12 * PAGE, 0..12usize)
            .prop_map(|(slot, file, offset, fail)| Call::Register { slot, file, offset, fail }),
        2 => (0..SLOTS).prop_map(|slot| Call::Unregister { slot }),
    ]
}

/// Fails once, and counts down to it.
struct Failing {
    log: Log,
    until: AtomicUsize,
}

impl<B: Backend> Probe<B> for Failing {
    fn install(&self, site: &ProbeSite<'_, B>) -> Result<(), Errno> {
        match self.until.load(Ordering::Relaxed) {
            0 => {}
            1 => return Err(Errno::ENOMEM),
            more => self.until.store(more - 1, Ordering::Relaxed),
        }
        self.log.note(site, true);
        Ok(())
    }

    fn remove(&self, site: &ProbeSite<'_, B>) {
        self.log.note(site, false);
    }
}

struct World<'f, B: Backend> {
    system: System<B>,
    spaces: Vec<SpaceHandle<B>>,
    files: Vec<Arc<OpenFile>>,
    probes: Vec<Option<(ProbeHandle<B>, Arc<Failing>)>>,
    fresh: &'f dyn Fn() -> B,
}

fn prot(which: u8) -> Prot {
    [RX, RW, Prot::READ, Prot::all()][which as usize]
}

impl<'f, B: Backend> World<'f, B> {
    fn new(fresh: &'f dyn Fn() -> B) -> Self {
        let system = System::default();
        let create = |_| system.create(SpaceConfig::default(), fresh()).unwrap();
        World {
            spaces: (0..SPACES).map(create).collect(),
            files: FILES.map(probed::file).to_vec(),
            probes: (0..SLOTS).map(|_| None).collect(),
            system,
            fresh,
        }
    }

    fn request(&self, file: usize, at: u64, (offset, pages): (u64, u64), prot: Prot) -> MapRequest {
        let file = self.files[file].clone();
        let flags = MapFlags::PRIVATE;
        let request = MapRequest::file(file, offset * PAGE, pages * PAGE, prot, flags);
        request.fixed(addr(at))
    }

    /// Makes a call; errors are as good as success here.
    fn make(&mut self, who: usize, (at, pages): (u64, u64), call: &Call) {
        let space = &self.spaces[who];
        let (from, len) = (addr(at), pages * PAGE);
        match *call {
            Call::Map {
                file,
                offset,
                shared,
                prot: which,
            } => {
                let mut request = self.request(file, at, (offset, pages), prot(which));
                if shared {
                    request.flags = MapFlags::SHARED | MapFlags::FIXED;
                }
                let _ = space.map(&request);
            }
            Call::Anonymous => {
                let _ = space.map(&MapRequest::anonymous(len, RW).fixed(from));
            }
            Call::Unmap => {
                let _ = space.unmap(from, len);
            }
            Call::Protect { prot: which } => {
                let _ = space.protect(from, len, prot(which));
            }
            Call::Move { to, keep } => {
                let keeping = if keep {
                    RemapFlags::DONTUNMAP
                } else {
                    RemapFlags::empty()
                };
                let _ = space.remap(&RemapRequest {
                    addr: from,
                    old_len: len,
                    new_len: len,
                    flags: RemapFlags::MAYMOVE | RemapFlags::FIXED | keeping,
                    new_addr: addr(to),
                });
            }
            Call::Resize { pages } => {
                let _ = space.remap(&RemapRequest {
                    addr: from,
                    old_len: len,
                    new_len: pages * PAGE,
                    flags: RemapFlags::MAYMOVE,
                    new_addr: 0,
                });
            }
            Call::Nonlinear { offset } => {
                let none = Prot::empty();
                let _ = space.remap_file_pages(from, len, none, offset, MapFlags::empty());
            }
            Call::Fork {
                into,
                not_this,
                adopted,
            } => {
                if not_this {
                    let _ = space.advise(from, len, Advice::DONTFORK);
                }
                self.spaces[into] = if adopted {
                    self.system.adopt(space.space().dup().unwrap()).unwrap()
                } else {
                    space.dup().unwrap()
                };
            }
            Call::Exit => {
                let fresh = (self.fresh)();
                self.spaces[who] = self.system.create(SpaceConfig::default(), fresh).unwrap();
            }
            Call::Touch { write } => {
                let access = if write { Access::Write } else { Access::Read };
                let _ = space.touch(from, len, access);
            }
            Call::Batch { to, downgrade } => {
                let mut guard = space.write();
                let _ = guard.unmap(from, len);
                let _ = guard.map(&self.request(0, at, (0, pages), RX));
                let _ = guard.unmap(from, PAGE);
                let _ = guard.map(&self.request(0, at, (0, pages), RX));
                let _ = guard.map(&self.request(1, to, (3, pages), RW));
                if downgrade {
                    drop(guard.downgrade());
                }
            }
            Call::Register {
                slot,
                file,
                offset,
                fail,
            } => self.register(slot, file, offset, fail),
            Call::Unregister { slot } => self.probes[slot] = None,
        }
    }

    fn register(&mut self, slot: usize, file: usize, offset: u64, fail: usize) {
        self.probes[slot] = None;
        let file = self.files[file].object();
        let wanted = scan(&self.spaces, file, offset);
        let probe = Arc::new(Failing {
            log: Log::default(),
            until: AtomicUsize::new(fail),
        });
        let asked = probe.clone();
        match self
            .system
            .register_probe(file, offset, asked, Wait::forever())
        {
            Ok(handle) => {
                assert!(fail == 0 || wanted.len() < fail);
                // From here on there are no failures.
                probe.until.store(0, Ordering::Relaxed);
                self.probes[slot] = Some((handle, probe));
            }
            Err(error) => {
                assert_eq!(error.errno(), Errno::ENOMEM);
                assert!(fail > 0 && wanted.len() >= fail, "{fail} of {wanted:x?}");
                assert_eq!(probe.log.calls(), (fail - 1, fail - 1));
            }
        }
    }

    fn check(&self) -> Result<(), String> {
        for (handle, probe) in self.probes.iter().flatten() {
            let wanted = scan(&self.spaces, handle.file(), handle.offset());
            let (told, own) = (probe.log.places(), handle.sites().unwrap());
            if told != wanted || !own.iter().eq(&wanted) {
                let offset = handle.offset();
                return Err(format!(
                    "byte {offset:#x} is at {wanted:x?}, told {told:x?}, kept {own:x?}"
                ));
            }
        }
        Ok(())
    }
}

type Calls = Vec<(usize, (u64, u64), Call)>;

fn follows<B: Backend>(fresh: &dyn Fn() -> B, calls: &Calls) -> Result<(), TestCaseError> {
    let mut world = World::new(fresh);
    for (who, range, call) in calls {
        world.make(*who, *range, call);
        world.check().map_err(|error| {
            TestCaseError::fail(format!("after {call:?} at {range:?} in {who}: {error}"))
        })?;
    }
    world.spaces.clear();
    world.check().map_err(TestCaseError::fail)?;
    for (handle, probe) in world.probes.drain(..).flatten() {
        drop(handle);
        let (installed, removed) = probe.log.calls();
        prop_assert_eq!(installed, removed);
        prop_assert_eq!(Arc::strong_count(&probe), 1);
    }
    Ok(())
}

fn calls() -> impl Strategy<Value = Calls> {
    let range = (0..ARENA, 1..10u64);
    proptest::collection::vec((0..SPACES, range, call()), 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn probes_are_where_a_scan_finds_their_bytes_after_every_call(calls in calls()) {
        follows(&|| (), &calls)?;
    }

    #[test]
    fn the_same_with_memory_behind_it(calls in calls()) {
        let pool = FramePool::default();
        follows(&|| Paged::new(Arc::new(pool.clone())), &calls)?;
        prop_assert_eq!(pool.stats().used, 0);
    }
}

/// The sequences above reach what they are for.
#[test]
fn a_probe_in_the_middle_of_a_moved_part_moves() {
    let mut world = World::new(&|| ());
    let log = Log::new();
    let file = world.files[0].clone();
    let handle = register(&world.system, &file, 3 * PAGE, &log);
    let map = Call::Map {
        file: 0,
        offset: 0,
        shared: false,
        prot: 0,
    };
    world.make(0, (0, 8), &map);
    let moved = Call::Move {
        to: 12,
        keep: false,
    };
    world.make(0, (2, 4), &moved);
    probed::assert_exact(&world.spaces, &handle, &log);
    assert_eq!(log.calls(), (2, 1));
}
