//! Huge pages: 512 frames in a block, put in, copied and let go of together.
//!
//! A huge page is a leaf table all of whose entries show the frames of one block, each with a reference of its own. So whatever walks
//! tables (zap, move, dup, pins, accessors) sees pages of 4 KiB like any others; the block goes back to the pool with the last
//! reference to the last of its frames. Under the leaf's lock the entries are alike (**H1**): all of them show the same block and are
//! owned, or none is; but while a call is taking them out. A fault that finds them unlike looks again.
//!
//! | mapping | nothing there | a store finds a page that isn't its own |
//! |---|---|---|
//! | private | a page of zeros of its own, for loads as well | the page itself, if nobody else has it; else a copy |
//! | shared | the file's page | cannot be |

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use vma_rcu::sync::atomic::{Ordering as Order, fence};
use vma_rcu::sync::planted;

use super::entry::{Entry, Kind};
use super::fault::{is_sole, own_leaf, suffices};
use super::frame::{Frame, FrameHead, NewFrame};
use super::mapping::Mapping;
use super::table::{ENTRIES, LEAF_BYTES, Leaf, LockedLeaf, NoMemory, index};
use super::{Fault, Faulted, PAGE, Paged, State};
use crate::file::OpenFile;
use crate::huge::{HugeFile, HugePage};
use crate::space::FaultError;

/// The memory of a huge page. It lives until the last reference to one of its frames is gone.
struct Block {
    /// Nothing is added or removed: frames point to theirs.
    heads: Vec<FrameHead>,
    /// Frames that somebody has a reference to. A decrement is a release, and the last one acquires, as in a frame itself.
    live: AtomicUsize,
    page: HugePage,
    memory: Mapping,
}

impl Block {
    /// References to all frames, which are zero. `None` when memory runs out.
    fn frames(page: HugePage) -> Option<Vec<NewFrame>> {
        let memory = Mapping::aligned(ENTRIES)?;
        let mut heads = Vec::new();
        heads.try_reserve_exact(ENTRIES).ok()?;
        let mut frames = Vec::new();
        frames.try_reserve_exact(ENTRIES).ok()?;
        let block = Box::into_raw(Box::new(Block {
            heads,
            live: AtomicUsize::new(ENTRIES),
            page,
            memory,
        }));
        for at in 0..ENTRIES {
            // SAFETY: made above, and nobody else has it yet.
            let made = unsafe { &mut *block };
            let memory = made.memory.page(at);
            // SAFETY: F1: a page of the block's own, which stays as long as one of its frames has a reference.
            let head = unsafe { FrameHead::new(memory, block.cast_const().cast(), release) };
            made.heads.push(head);
        }
        // SAFETY: as above; from here on nobody changes it but by its atomics.
        let made = unsafe { &*block };
        for head in &made.heads {
            // SAFETY: F1: the head stays as long as the block, and has no reference yet.
            let frame = unsafe { Frame::first(NonNull::from(head)) };
            // SAFETY: the first reference; memory of the operating system is zero at first.
            frames.push(unsafe { NewFrame::new(frame, true) });
        }
        Some(frames)
    }

    /// The block of a frame, if it has one.
    ///
    /// # Safety
    ///
    /// F2: somebody has a reference to the frame, for as long as the result is used.
    unsafe fn of<'b>(head: NonNull<FrameHead>) -> &'b Block {
        // SAFETY: F2, by the caller's promise.
        let owner = unsafe { head.as_ref() }.owner().cast::<Block>();
        // SAFETY: F1: the owner of a huge page's frame is its block.
        unsafe { &*owner }
    }
}

/// The last reference to a frame is gone.
///
/// # Safety
///
/// F1: the head is one of a block's.
unsafe fn release(head: NonNull<FrameHead>) {
    // SAFETY: F1: it stays as long as its block, which this frame keeps.
    let block = unsafe { head.as_ref() }.owner().cast::<Block>();
    // SAFETY: as above.
    let live = &unsafe { &*block }.live;
    if live.fetch_sub(1, Ordering::Release) != 1 {
        return;
    }
    live.load(Ordering::Acquire);
    // SAFETY: made of a box; that was the last frame.
    drop(unsafe { Box::from_raw(block.cast_mut()) });
}

/// Whether an entry shows the huge page that a frame is part of.
pub(super) fn shows(entry: Entry, frame: &Frame) -> bool {
    let Some(head) = entry.head().filter(|_| entry.is_huge()) else {
        return false;
    };
    // SAFETY: F2: in a table whose lock is held.
    let owner = unsafe { head.as_ref() }.owner();
    owner == frame.owner()
}

/// What a fault has to do with.
struct Place<'f> {
    /// The huge page's number in the file.
    page: u64,
    file: &'f OpenFile,
    huge: &'f Arc<HugeFile>,
}

impl Place<'_> {
    /// Its pages of 4 KiB, in the file.
    fn pgoffs(&self) -> Range<u64> {
        let count = ENTRIES as u64;
        self.page * count..(self.page + 1) * count
    }
}

/// See [`Backend::fault`](super::super::Backend::fault).
pub(super) fn fault(paged: &Paged, fault: &Fault<'_>) -> Result<Faulted, FaultError> {
    let Some(file) = fault.vma.file() else {
        return Err(FaultError::Unmapped(fault.addr));
    };
    let Some(huge) = file.object().huge() else {
        return Err(FaultError::Unmapped(fault.addr));
    };
    let size = huge.page_size();
    let place = Place {
        page: fault.pgoff / (size / PAGE as u64),
        file,
        huge,
    };
    let state = paged.state();
    let looked = state.tables.look(fault.addr);
    if looked.is_some_and(|(_, entry)| suffices(entry, fault.access)) {
        return Ok(Faulted::Done);
    }
    let start = place.page.checked_mul(size);
    if start.is_none_or(|start| start >= file.object().len()) {
        return Err(FaultError::BeyondEnd(fault.addr));
    }
    if size != LEAF_BYTES {
        // There are none of this size.
        return Err(FaultError::NoHugePage(fault.addr));
    }
    if !huge.is_private() {
        return shared(paged, fault, &place);
    }
    private(paged, fault, &place)
}

/// What a fault finds.
enum Looked {
    /// The page is there, and does.
    Does,
    /// The frames that are there, each with a reference: all of a page's, or none.
    Found(Vec<Frame>),
    /// A call is taking them out.
    Unlike,
}

/// Looks at what is there. A page that nobody else has any more becomes the mapping's own again.
fn look(state: &State, fault: &Fault<'_>, place: &Place<'_>) -> Result<Looked, FaultError> {
    let _faults = state.faults.read();
    let mut leaf = own_leaf(state, fault)?.lock();
    if leaf.is_empty() {
        return Ok(Looked::Found(Vec::new()));
    }
    let first = leaf.entry(0);
    let alike = |leaf: &LockedLeaf<'_>| {
        (0..ENTRIES).all(|at| {
            let entry = leaf.entry(at);
            entry.is_huge() && entry.is_owned() == first.is_owned() && same_block(entry, first)
        })
    };
    if !first.is_huge() || !alike(&leaf) {
        return Ok(Looked::Unlike);
    }
    if suffices(first, fault.access) {
        return Ok(Looked::Does);
    }
    let is_last = |at| leaf.entry(at).head().is_some_and(is_sole);
    if (0..ENTRIES).all(is_last) {
        for at in 0..ENTRIES {
            // References stay in the entries.
            let entry = leaf.entry(at);
            leaf.replace(at, entry.owned());
        }
        return Ok(Looked::Does);
    }
    debug_assert!(place.huge.is_private(), "shared pages are everybody's own");
    let frames = (0..ENTRIES).filter_map(|at| {
        // SAFETY: F2: in the table, under its lock.
        unsafe { leaf.entry(at).share() }
    });
    Ok(Looked::Found(frames.collect()))
}

/// Whether two entries show frames of the same block. Their leaf is locked.
fn same_block(a: Entry, b: Entry) -> bool {
    let owner = |entry: Entry| {
        let head = entry.head()?;
        // SAFETY: F2: in a table whose lock is held.
        Some(unsafe { head.as_ref() }.owner())
    };
    owner(a) == owner(b)
}

/// A page of zeros, or a copy.
fn private(paged: &Paged, fault: &Fault<'_>, place: &Place<'_>) -> Result<Faulted, FaultError> {
    let state = paged.state();
    // One fault at a time, so that a page is taken once, and no child comes between when one is robbed.
    let _faulting = place.huge.faulting(place.page);
    let old = match look(state, fault, place)? {
        Looked::Does => return Ok(Faulted::Done),
        Looked::Unlike => return Ok(Faulted::Again),
        Looked::Found(old) => old,
    };
    if !old.is_empty() && !fault.may_replace {
        return Ok(Faulted::Replaces);
    }
    if old.is_empty() && place.file.is_robbed() {
        return Err(FaultError::NoHugePage(fault.addr));
    }
    let owns = place.file.owned_huge().is_some();
    let take = || place.huge.take(place.page, owns, !old.is_empty());
    let page = match paged.pending.until_some(take) {
        Some(page) => page,
        None if owns && let Some(frame) = old.first() => {
            place.file.object().rob_heirs(place.pgoffs(), frame);
            // The page is the mapping's own now, or there is a page for the copy.
            return Ok(Faulted::Again);
        }
        None => return Err(FaultError::NoHugePage(fault.addr)),
    };
    let frames = Block::frames(page).ok_or(FaultError::OutOfMemory(fault.addr))?;
    let entries = new_entries(frames, &old);
    install(state, fault, &old, entries)
}

/// Entries for a page of a mapping's own: zeros, or a copy of what was there.
fn new_entries(frames: Vec<NewFrame>, old: &[Frame]) -> Vec<Entry> {
    let mut old = old.iter();
    let entry = |mut new: NewFrame| {
        if let Some(old) = old.next() {
            old.bytes().copy_to(&mut new);
        }
        Entry::of(new.filled(), Kind::HugeAnon, true)
    };
    frames.into_iter().map(entry).collect()
}

/// The file's page.
fn shared(paged: &Paged, fault: &Fault<'_>, place: &Place<'_>) -> Result<Faulted, FaultError> {
    let object = place.file.object();
    let frames = {
        let _faulting = place.huge.faulting(place.page);
        let make = || {
            let take = || place.huge.take(place.page, true, false);
            let page = paged.pending.until_some(take);
            let page = page.ok_or(FaultError::NoHugePage(fault.addr))?;
            let frames = Block::frames(page).ok_or(FaultError::OutOfMemory(fault.addr))?;
            let frames: Vec<Frame> = frames.into_iter().map(NewFrame::filled).collect();
            if let Some(frame) = frames.first() {
                // SAFETY: F2: a reference that is kept for the time of the call.
                unsafe { Block::of(frame.head_pointer()) }.page.set_used();
            }
            Ok(frames)
        };
        let cache = object.pages();
        cache.get_or_make_huge(object, place.pgoffs(), make)?
    };
    let Some(frames) = frames else {
        return Ok(Faulted::Again);
    };
    let entries = frames.iter().cloned();
    let entries = entries.map(|frame| Entry::of(frame, Kind::HugeFile, true));
    let result = install(paged.state(), fault, &[], entries.collect());
    // Until here, so that a page that has left the file isn't another one.
    drop(frames);
    result
}

/// Puts a page in, if what is there is still what was found: the frames of `old`, or nothing.
fn install(
    state: &State,
    fault: &Fault<'_>,
    old: &[Frame],
    new: Vec<Entry>,
) -> Result<Faulted, FaultError> {
    let new = Unplaced(new);
    let _faults = state.faults.read();
    let mut leaf = own_leaf(state, fault)?.lock();
    // As for other pages.
    fence(Order::SeqCst);
    if !planted("no_recheck") && !(fault.attached)() {
        return Ok(Faulted::Again);
    }
    if new.0.iter().any(|entry| entry.is_removed()) {
        return Ok(Faulted::Again);
    }
    let is_as_found = match old.first() {
        None => leaf.is_empty(),
        Some(first) => (0..ENTRIES).all(|at| {
            let entry = leaf.entry(at);
            shows(entry, first) && !entry.is_owned()
        }),
    };
    if !is_as_found {
        return Ok(Faulted::Again);
    }
    let mut gone = Vec::new();
    if !old.is_empty() {
        // Out of use before the first store to the copy.
        gone.extend((0..ENTRIES).map(|at| leaf.replace(at, Entry::NONE)));
        if !planted("no_shootdown_of_copy") {
            state.shootdown.invalidate();
        }
    }
    let placed = new.place();
    if let Some(head) = placed.first().and_then(|entry| entry.head()) {
        // SAFETY: F2: the entry's reference, which nobody takes as long as the leaf is locked.
        unsafe { Block::of(head) }.page.set_used();
    }
    for (at, entry) in placed.into_iter().enumerate() {
        leaf.replace(at, entry);
    }
    drop(leaf);
    drop(Unplaced(gone));
    Ok(Faulted::Done)
}

/// Entries in no table, with their references.
struct Unplaced(Vec<Entry>);

impl Unplaced {
    /// The entries, for a table.
    fn place(self) -> Vec<Entry> {
        std::mem::take(&mut ManuallyDrop::new(self).0)
    }
}

impl Drop for Unplaced {
    fn drop(&mut self) {
        for entry in self.0.drain(..) {
            // SAFETY: F2: in no table, each once.
            drop(unsafe { entry.take() });
        }
    }
}

/// A huge page some of which is pinned stays the parent's, the child gets a copy, unless it won't live. `at` is a pinned part of it.
pub(super) fn copy_pinned(
    from: &Leaf,
    child: &State,
    at: u64,
    so_far: Result<(), NoMemory>,
) -> Result<(), NoMemory> {
    let old: Vec<Frame> = {
        let mut leaf = from.lock();
        if leaf.entry(index(at)).is_owned() {
            // Copied for another part of it.
            return so_far;
        }
        let entries: Vec<Entry> = (0..ENTRIES).map(|at| leaf.entry(at)).collect();
        for (at, entry) in entries.iter().enumerate() {
            leaf.replace(at, entry.owned());
        }
        let shared = entries.iter().filter_map(|entry| {
            // SAFETY: F2: in the table, under its lock.
            unsafe { entry.share() }
        });
        shared.collect()
    };
    so_far?;
    let to = child.tables.own_leaf(at)?;
    let page = old.first().and_then(|frame| {
        // SAFETY: F2: a reference that is kept for the time of the call.
        unsafe { Block::of(frame.head_pointer()) }.page.another()
    });
    // Without one the child, which shows what is the parent's own, will be dropped.
    let frames = page.and_then(Block::frames).ok_or(NoMemory)?;
    let entries = new_entries(frames, &old).into_iter().enumerate();
    let gone = {
        let mut leaf = to.lock();
        entries.map(|(at, entry)| leaf.replace(at, entry)).collect()
    };
    drop(Unplaced(gone));
    Ok(())
}

const _: () = assert!(cfg!(loom) || LEAF_BYTES == crate::huge::HUGE_PAGE);
