//! Models of what faults, calls, accesses and copies of a space do to each other's pages, and of shared tables.
//!
//! They run the real tables, faults and changes; tables have two entries here, so that a space of one level of directories has
//! four pages, and of two levels eight. What is mapped is one record that stands for all mappings of a space, published as the
//! space does it, and an accessor is what [`Accessor`](super::Accessor) does, without the space. A frame has one word, whose
//! every access loom sees: when it's freed all of them have to come before.
//!
//! `.ci/loom` runs them as they are, and then once per planted fault, which they must find.

mod calls;
mod faults;
mod files;
mod sharing;

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize as Count, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use vma_rcu::reclaim::{Domain, Reader};
use vma_rcu::shootdown::Accessing;

use super::frame::{Frame, PageBytes};
use super::table::Account;
use super::{Fault, Faulted, FrameAllocator, FrameHead, NewFrame, PAGE, Paged, State};
use super::{change, fault};
use crate::addr::VmRange;
use crate::backend::{Backend, Inheritance, Inherited};
use crate::flags::VmaFlags;
use crate::space::{Access, FaultError};
use crate::vma::Vma;

/// Below it a space has one level of directories.
const ONE_LEVEL: u64 = 4 * PAGE as u64;
/// Below it a space has two.
const TWO_LEVELS: u64 = 8 * PAGE as u64;

/// What is in a new frame.
const GARBAGE: u64 = 0xdead;
/// What is in a freed one.
const FREED: u64 = 0xf7ee;

/// All interleavings, up to a number of preemptions where there are too many. (With a bound loom passes over some that have fewer.
/// So models have two threads rather than three, if one can do the work of two.)
fn model(preemptions: Option<usize>, f: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = 100_000;
    builder.check(f);
}

fn page(number: u64) -> u64 {
    number * PAGE as u64
}

/// An allocator that never gives a frame twice.
#[derive(Default)]
struct Frames {
    live: Count,
    all: Mutex<Vec<Box<(FrameHead, Box<AtomicU64>)>>>,
}

// SAFETY: heads and words may be used by any thread, and stay where they are.
unsafe impl Send for Frames {}
// SAFETY: as above.
unsafe impl Sync for Frames {}

impl FrameAllocator for Frames {
    fn allocate(&self) -> Option<NewFrame> {
        let word = Box::new(AtomicU64::new(GARBAGE));
        let memory = NonNull::from(&*word).cast();
        // SAFETY: F1: a word, all that is used of a page here.
        let head = unsafe { FrameHead::new(memory, (&raw const *self).cast(), release) };
        let frame = Box::new((head, word));
        let head = NonNull::from(&frame.0);
        self.all.lock().unwrap().push(frame);
        self.live.fetch_add(1, Relaxed);
        // SAFETY: F1: new, and it stays as long as the allocator does.
        let frame = unsafe { Frame::first(head) };
        // SAFETY: nobody else has it.
        Some(unsafe { NewFrame::new(frame, false) })
    }
}

/// A frame's last reference is gone: everything that was done to it came before, or loom reports it.
unsafe fn release(head: NonNull<FrameHead>) {
    // SAFETY: heads stay as long as the allocator.
    let head = unsafe { head.as_ref() };
    // SAFETY: the allocator outlives the spaces.
    let frames = unsafe { &*head.owner().cast::<Frames>() };
    let word = head.memory().cast::<AtomicU64>().as_ptr();
    // SAFETY: loom checks that nobody else uses it.
    let was = unsafe { &mut *word }.with_mut(|word| std::mem::replace(word, FREED));
    assert_ne!(was, FREED, "freed twice");
    frames.live.fetch_sub(1, Relaxed);
}

/// What an execution begins and ends with.
struct World {
    frames: Arc<Frames>,
    domain: Domain,
    accounts: Vec<Arc<Account>>,
}

impl World {
    fn new() -> Self {
        World {
            frames: Arc::default(),
            domain: Domain::default(),
            accounts: Vec::new(),
        }
    }

    fn space(&mut self, limit: u64) -> Arc<Space> {
        let paged = self.paged(limit);
        self.enter(paged)
    }

    fn paged(&self, limit: u64) -> Paged {
        let paged = Paged::new(Arc::clone(&self.frames) as _);
        let state = State::try_new(&self.domain, limit, usize::MAX / 2).unwrap();
        assert!(paged.state.set(state).is_ok());
        paged
    }

    fn enter(&mut self, paged: Paged) -> Arc<Space> {
        let flags = VmaFlags::READ | VmaFlags::WRITE;
        self.enter_with(paged, || Vma::new(flags, 0, 0))
    }

    fn enter_with(&mut self, paged: Paged, record: impl Fn() -> Vma) -> Arc<Space> {
        self.accounts.push(paged.state().tables.account());
        Arc::new(Space {
            paged,
            records: [record(), record()],
            published: AtomicUsize::new(OLD),
        })
    }

    /// Frames that somebody has.
    fn live(&self) -> usize {
        self.frames.live.load(Relaxed)
    }

    fn fork(&mut self, parent: &Space) -> Arc<Space> {
        let child = parent.paged.dup().unwrap();
        let all = [Inherited {
            start: 0,
            end: parent.paged.state().limit,
            how: Inheritance::Everything,
        }];
        parent.paged.dup_pages(&child, &all).unwrap();
        self.enter(child)
    }

    /// Nothing is left of the spaces, which are gone (C18).
    fn end(self) {
        drop(self.domain);
        let bytes: usize = self.accounts.iter().map(|account| account.bytes()).sum();
        assert_eq!(bytes, 0, "tables are left");
        let live = self.frames.live.load(Relaxed);
        assert_eq!(live, 0, "frames are left");
    }
}

const NOTHING: usize = usize::MAX;
const OLD: usize = 0;
const NEW: usize = 1;

struct Space {
    paged: Paged,
    records: [Vma; 2],
    /// Which of them is mapped. As the root of the tree: store-release, load-acquire.
    published: AtomicUsize,
}

impl Space {
    fn find(&self) -> Option<&Vma> {
        self.records.get(self.published.load(Ordering::Acquire))
    }

    fn publish(&self, which: usize) {
        self.published.store(which, Ordering::Release);
    }

    /// As `AddressSpace::fault_page`, without its last resort. Whether the page is there; it isn't if nothing is mapped, or
    /// the gate closed.
    fn fault(&self, addr: u64, access: Access) -> bool {
        loop {
            let Some(vma) = self.find().filter(|vma| !vma.is_gated()) else {
                return false;
            };
            let attached =
                || self.find().is_some_and(|now| std::ptr::eq(now, vma)) && !vma.is_gated();
            let fault = Fault {
                addr,
                access,
                by: None,
                vma,
                range: VmRange::new(addr, addr + PAGE as u64),
                pgoff: 0,
                attached: &attached,
                may_replace: true,
                monitored: crate::MonitorModes::empty(),
            };
            match fault::fault(&self.paged, &fault) {
                Ok(Faulted::Done) => return true,
                // The file's page has gone.
                Err(FaultError::BeyondEnd(_)) => return false,
                Err(error) if attached() => panic!("{error}"),
                // It's going: who takes it out comes first.
                Ok(Faulted::NotReady) => loom::thread::yield_now(),
                Ok(Faulted::Again | Faulted::Replaces | Faulted::Monitored(_)) | Err(_) => {}
            }
        }
    }

    /// What the tables say, when nobody else is there.
    fn content(&self, addr: u64) -> Option<u64> {
        let (_, entry) = self.paged.state().tables.look(addr)?;
        let head = entry.head()?;
        // SAFETY: F2: in the table.
        Some(load(unsafe { head.as_ref() }.memory()))
    }

    /// P3.
    fn check(&self) {
        let tables = &self.paged.state().tables;
        assert_eq!(tables.resident(), tables.recount());
    }

    /// As unmapping the range does it; what is mapped afterwards. The rest is `change::finish`.
    fn unmap(&self, start: u64, end: u64, hole: Range<u64>, which: usize) -> super::Taken {
        let state = self.paged.state();
        let changes = [crate::backend::PageChange::Zap { start, end }];
        let mapped = start..end;
        let mapped = std::slice::from_ref(&mapped);
        let mapped = if which == NOTHING { &[] } else { mapped };
        if let Some(new) = self.records.get(which) {
            new.set_gated(true);
        }
        let hole = std::slice::from_ref(&hole);
        let mut taken = change::prepare(state, &changes, hole, mapped)
            .unwrap()
            .unwrap();
        self.publish(which);
        crate::space::fence_before_tables();
        change::commit(state, &changes, hole, &mut taken);
        if let Some(new) = self.records.get(which) {
            new.set_gated(false);
        }
        taken
    }

    fn finish(&self, taken: super::Taken) {
        change::finish(self.paged.state(), taken);
    }
}

/// # Panics
///
/// When the frame is nobody's, or not filled.
fn load(memory: NonNull<u8>) -> u64 {
    let mut word = [0; 8];
    // SAFETY: F2, S1: by the caller; here loom looks.
    unsafe { PageBytes::at(memory) }.read(0, &mut word);
    let word = u64::from_ne_bytes(word);
    assert_ne!(word, FREED, "the frame was freed");
    assert_ne!(word, GARBAGE, "the frame isn't filled yet");
    word
}

/// # Panics
///
/// As [`load`].
fn store(memory: NonNull<u8>, value: u64) {
    load(memory);
    // SAFETY: F2, S1: as in `load`.
    unsafe { PageBytes::at(memory) }.write(0, &value.to_ne_bytes());
}

/// An accessor, which caches a translation per page.
struct Cpu {
    accessing: Accessing<'static>,
    /// Page, whether stores go there, memory.
    cache: Vec<(u64, bool, NonNull<u8>)>,
    /// Pinned while tables are looked at, where a model frees some.
    reader: Option<Reader>,
    space: Arc<Space>,
}

// SAFETY: a thread at a time has it.
unsafe impl Send for Cpu {}

impl Cpu {
    fn new(space: &Arc<Space>) -> Self {
        let shootdown = &raw const space.paged.state().shootdown;
        Cpu {
            // SAFETY: dropped before the space that it has a share of.
            accessing: unsafe { &*shootdown }.register(),
            cache: Vec::new(),
            reader: None,
            space: Arc::clone(space),
        }
    }

    /// See `access::translate`.
    fn translate(space: &Space, addr: u64, access: Access) -> Option<(u64, bool, NonNull<u8>)> {
        let vma = space.find().filter(|vma| !vma.is_gated())?;
        let (_, entry) = space.paged.state().tables.look(addr)?;
        let head = entry.head()?;
        if space.find().is_none_or(|now| !std::ptr::eq(now, vma)) {
            return None;
        }
        if access == Access::Write && !entry.is_owned() {
            return None;
        }
        // SAFETY: F2, S1.
        let memory = unsafe { head.as_ref() }.memory();
        Some((addr, entry.is_owned(), memory))
    }

    /// Does `f` to a page, as `Accessor::on_page`. `None`: nothing is mapped.
    fn on_page<R>(
        &mut self,
        addr: u64,
        access: Access,
        f: impl FnOnce(NonNull<u8>) -> R,
    ) -> Option<R> {
        loop {
            let Some(now) = self.accessing.enter() else {
                self.cache.clear();
                self.accessing.renew();
                continue;
            };
            let does = |cached: &&(u64, bool, NonNull<u8>)| {
                cached.0 == addr && (cached.1 || access != Access::Write)
            };
            let cached = self.cache.iter().find(does).copied();
            let guard = cached.is_none().then(|| self.reader.as_ref()).flatten();
            let guard = guard.map(Reader::pin);
            let found = cached.or_else(|| Self::translate(&self.space, addr, access));
            drop(guard);
            if let Some(found) = found {
                self.cache.retain(|cached| cached.0 != addr);
                self.cache.push(found);
                return Some(f(found.2));
            }
            drop(now);
            let guard = self.reader.as_ref().map(Reader::pin);
            let is_there = self.space.fault(addr, access);
            drop(guard);
            if !is_there {
                return None;
            }
        }
    }

    fn load(&mut self, addr: u64) -> Option<u64> {
        self.on_page(addr, Access::Read, load)
    }

    fn store(&mut self, addr: u64, value: u64) -> bool {
        let stored = self.on_page(addr, Access::Write, |memory| store(memory, value));
        stored.is_some()
    }

    /// Does `f` to a page as long as `which` is mapped there: what another mapping has isn't this one's business.
    fn while_mapped<R>(
        &mut self,
        which: usize,
        addr: u64,
        access: Access,
        f: impl FnOnce(NonNull<u8>) -> R,
    ) -> Option<R> {
        let space = Arc::clone(&self.space);
        let is_it = || space.published.load(Ordering::Acquire) == which;
        while is_it() {
            let Some(now) = self.accessing.enter() else {
                self.cache.clear();
                self.accessing.renew();
                continue;
            };
            // Where the mapping changes in between, the call that changes it waits for this access.
            if is_it()
                && let Some(found) = Self::translate(&space, addr, access)
                && is_it()
            {
                return Some(f(found.2));
            }
            drop(now);
            if !is_it() || !space.fault(addr, access) {
                return None;
            }
        }
        None
    }
}
