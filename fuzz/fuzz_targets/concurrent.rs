//! Two threads make calls on one space: some order of the calls, each thread's in its own, gives the same results and the same layout.
#![no_main]

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use vma_core::{
    Access, AccessMode, AddressSpace, Advice, Errno, FaultError, FileKind, FileObject, Limits,
    MapFlags, MapRequest, OpenFile, Prot, RemapFlags, RemapRequest, SpaceConfig,
};

const PAGE: u64 = 4096;
const AT: u64 = 0x10_0000_0000;
/// Pages that calls play in, the last ones of them the heap's.
const WINDOW: u64 = 12;
const HEAP: u64 = AT + 8 * PAGE;
/// Calls of a thread: 70 orders at the most.
const CALLS: usize = 4;
/// Calls that are made before, at the most.
const BEFORE: usize = 5;

/// Calls of one step each. Not mlock and `MAP_POPULATE`: they fault pages in after the change, and others may come between.
#[derive(Arbitrary, Clone, Debug)]
enum Op {
    Map {
        at: u8,
        pages: u8,
        prot: u8,
        how: How,
        placed: bool,
    },
    Unmap(Pages),
    UnmapDowngraded(Pages),
    Protect {
        pages: Pages,
        prot: u8,
    },
    Remap {
        pages: Pages,
        new: u8,
        to: Option<u8>,
        keep: bool,
    },
    Advise {
        pages: Pages,
        which: u8,
    },
    Name {
        pages: Pages,
        name: bool,
    },
    Seal(Pages),
    Brk(u8),
    Touch {
        at: u8,
        write: bool,
    },
    Dup,
    Find(u8),
    Maps,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum How {
    Private,
    Shared,
    File,
    SharedFile,
    GrowsDown,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Pages {
    at: u8,
    pages: u8,
}

impl Pages {
    fn place(self) -> (u64, u64) {
        let at = u64::from(self.at) % WINDOW;
        let pages = (u64::from(self.pages) % 5 + 1).min(WINDOW - at);
        (AT + at * PAGE, pages * PAGE)
    }
}

/// A call, and how long its thread waits before it.
type Timed = (u8, Op);

#[derive(Arbitrary, Debug)]
struct Input {
    /// Mappings at the limit are refused.
    few: bool,
    /// How many of each are made.
    counts: [u8; 3],
    before: [Op; BEFORE],
    threads: [[Timed; CALLS]; 2],
}

/// What a call gave.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    Value(u64),
    Errno(Errno),
    Fault(FaultError),
    Text(String),
}

fn prot(bits: u8) -> Prot {
    Prot::from_bits_retain(u64::from(bits) & 7)
}

struct World {
    space: AddressSpace,
    file: Arc<OpenFile>,
}

impl World {
    fn new(input: &Input) -> Self {
        let config = SpaceConfig {
            max_map_count: if input.few { 6 } else { 1000 },
            limits: Limits {
                address_space: 40 * PAGE,
                ..Limits::default()
            },
            ..SpaceConfig::default()
        };
        let space = AddressSpace::new(config).expect("a valid configuration");
        space.set_brk(HEAP, HEAP);
        let object = FileObject::builder(FileKind::Regular, "f").len(8 * PAGE);
        let file = OpenFile::new(object.build(), AccessMode::ReadWrite);
        let world = World { space, file };
        let before = usize::from(input.counts[2]) % (BEFORE + 1);
        for op in &input.before[..before] {
            world.call(op);
        }
        world
    }

    fn call(&self, op: &Op) -> Outcome {
        let space = &self.space;
        macro_rules! outcome {
            ($result:expr) => {
                match $result {
                    Ok(value) => Outcome::Value(value),
                    Err(e) => Outcome::Errno(e.errno()),
                }
            };
        }
        macro_rules! done {
            ($result:expr) => {
                outcome!($result.map(|()| 0))
            };
        }
        match *op {
            Op::Map {
                at,
                pages,
                prot: bits,
                how,
                placed,
            } => {
                let (addr, len) = Pages { at, pages }.place();
                let anonymous = MapFlags::ANONYMOUS;
                let flags = match how {
                    How::Private => MapFlags::PRIVATE | anonymous,
                    How::Shared => MapFlags::SHARED | anonymous,
                    How::File => MapFlags::PRIVATE,
                    How::SharedFile => MapFlags::SHARED,
                    How::GrowsDown => MapFlags::PRIVATE | anonymous | MapFlags::GROWSDOWN,
                };
                let request =
                    MapRequest::file(self.file.clone(), addr - AT, len, prot(bits), flags);
                outcome!(space.map(&if placed { request.fixed(addr) } else { request }))
            }
            Op::Unmap(pages) => {
                let (addr, len) = pages.place();
                done!(space.unmap(addr, len))
            }
            Op::UnmapDowngraded(pages) => {
                let (addr, len) = pages.place();
                done!(space.unmap_downgraded(addr, len))
            }
            Op::Protect { pages, prot: bits } => {
                let (addr, len) = pages.place();
                done!(space.protect(addr, len, prot(bits)))
            }
            Op::Remap {
                pages,
                new,
                to,
                keep,
            } => {
                let (addr, old_len) = pages.place();
                let mut flags = RemapFlags::MAYMOVE;
                flags.set(RemapFlags::FIXED, to.is_some());
                flags.set(RemapFlags::DONTUNMAP, keep);
                let place = |at| Pages { at, pages: new }.place();
                outcome!(space.remap(&RemapRequest {
                    addr,
                    old_len,
                    new_len: if keep { old_len } else { place(pages.at).1 },
                    flags,
                    new_addr: to.map_or(0, |at| place(at).0),
                }))
            }
            Op::Advise { pages, which } => {
                let (addr, len) = pages.place();
                let advice = match which % 6 {
                    0 => Advice::DONTNEED,
                    1 => Advice::DONTFORK,
                    2 => Advice::DOFORK,
                    3 => Advice::WIPEONFORK,
                    4 => Advice::SEQUENTIAL,
                    _ => Advice::NORMAL,
                };
                done!(space.advise(addr, len, advice))
            }
            Op::Name { pages, name } => {
                let (addr, len) = pages.place();
                done!(space.set_name(addr, len, name.then_some("n")))
            }
            Op::Seal(pages) => {
                let (addr, len) = pages.place();
                done!(space.seal(addr, len, 0))
            }
            Op::Brk(pages) => Outcome::Value(space.brk(HEAP + u64::from(pages) % 5 * PAGE)),
            Op::Touch { at, write } => {
                let access = if write { Access::Write } else { Access::Read };
                match space.touch(Pages { at, pages: 0 }.place().0, 1, access) {
                    Ok(()) => Outcome::Value(0),
                    Err(e) => Outcome::Fault(e),
                }
            }
            Op::Dup => match space.dup() {
                Ok(child) => {
                    child.check().expect("a valid child");
                    Outcome::Text(layout(&child))
                }
                Err(e) => Outcome::Errno(e.errno()),
            },
            Op::Find(at) => {
                let reader = space.register();
                let guard = reader.pin();
                let found = space.find(Pages { at, pages: 0 }.place().0, &guard);
                Outcome::Text(found.map_or(String::new(), |vma| {
                    format!("{} {:?}", vma.range(), vma.flags())
                }))
            }
            Op::Maps => Outcome::Text(layout(space)),
        }
    }

    fn calls(&self, calls: &[Timed]) -> Vec<Outcome> {
        let call = |(pause, op): &Timed| {
            (0..*pause).for_each(|_| spin_loop());
            self.call(op)
        };
        calls.iter().map(call).collect()
    }
}

/// All that a space shows of its mappings.
fn layout(space: &AddressSpace) -> String {
    let entry =
        |entry: vma_core::MapsEntry| format!("{entry} {:?} {:#x}\n", entry.flags, entry.pgoff);
    space.maps_entries().into_iter().map(entry).collect()
}

/// Results of both threads, the layout, the counters.
type Seen = ([Vec<Outcome>; 2], String, String);

fn seen(world: &World, results: [Vec<Outcome>; 2]) -> Seen {
    world.space.check().expect("a valid layout");
    let totals = format!("{:?} {:#x}", world.space.totals(), world.space.brk(0));
    (results, layout(&world.space), totals)
}

/// Both threads at once.
fn together(input: &Input, first: &[Timed], second: &[Timed]) -> Seen {
    let world = World::new(input);
    let arrived = AtomicUsize::new(0);
    // Relaxed: it says when, and nothing else.
    let start = |calls| {
        arrived.fetch_add(1, Ordering::Relaxed);
        while arrived.load(Ordering::Relaxed) < 2 {
            thread::yield_now();
        }
        world.calls(calls)
    };
    let results = thread::scope(|scope| {
        let other = scope.spawn(|| start(second));
        [start(first), other.join().expect("no call panics")]
    });
    seen(&world, results)
}

/// One order: bit i of `order` says whose call the i-th is.
fn one_by_one(input: &Input, threads: [&[Timed]; 2], order: u32) -> Seen {
    let world = World::new(input);
    let mut results = [Vec::new(), Vec::new()];
    for i in 0..threads[0].len() + threads[1].len() {
        let who = (order >> i & 1) as usize;
        let next = results[who].len();
        results[who].push(world.call(&threads[who][next].1));
    }
    seen(&world, results)
}

fuzz_target!(|input: Input| {
    let calls = |who: usize| &input.threads[who][..usize::from(input.counts[who]) % (CALLS + 1)];
    let (first, second) = (calls(0), calls(1));
    let seen = together(&input, first, second);
    let calls = first.len() + second.len();
    let mut orders =
        (0..1 << calls).filter(|order: &u32| order.count_ones() as usize == second.len());
    assert!(
        orders.any(|order| one_by_one(&input, [first, second], order) == seen),
        "no order explains {seen:#?}"
    );
});
