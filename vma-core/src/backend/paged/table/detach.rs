//! Taking tables and entries out of a range, in time that doesn't depend on what is in them; and letting go of them.

use std::ops::Range;

use smallvec::SmallVec;
use vma_rcu::sync::planted;

use super::directory::Directory;
use super::leaf::Leaf;
use super::link::Link;
use super::{ENTRIES, LEAF_BYTES, NoMemory, Tables, free, part};
use crate::backend::paged::entry::Entry;

/// How long the end of a grace period is waited for when there is no memory to wait without it.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(1);

/// What has been taken out of a space's tables, and isn't let go of yet: accesses may still use it.
#[derive(Default)]
pub(in super::super) struct Detached {
    /// Links with the level they were found in, as `below` of its directory.
    links: SmallVec<[(Link, u32); 2]>,
    /// Entries of leaves that stay.
    entries: SmallVec<[Entry; 8]>,
    /// Links and entries that there has to be room for.
    promised: (usize, usize),
}

// SAFETY: P1, P2: links and entries are references to tables and frames, which any thread may let go of.
unsafe impl Send for Detached {}

impl Detached {
    pub(in super::super) fn is_empty(&self) -> bool {
        self.links.is_empty() && self.entries.is_empty()
    }

    /// Room for some more entries, if there is memory for it; for a few there is without.
    pub(in super::super) fn make_room(&mut self, count: usize) {
        let _ = self.entries.try_reserve(count);
    }

    /// Room for entries, beside what there is room for already.
    fn reserve_entries(&mut self, count: usize) -> Result<(), NoMemory> {
        // What was promised before isn't used yet.
        let promised = self.promised.1 + count;
        self.entries.try_reserve(promised).map_err(|_| NoMemory)?;
        self.promised.1 = promised;
        Ok(())
    }

    /// Room for links, beside what there is room for already.
    pub(super) fn reserve_links(&mut self, count: usize) -> Result<(), NoMemory> {
        let promised = self.promised.0 + count;
        self.links.try_reserve(promised).map_err(|_| NoMemory)?;
        self.promised.0 = promised;
        Ok(())
    }

    /// Takes a link that no slot holds any more.
    pub(super) fn push_link(&mut self, link: Link, below: u32) {
        if !link.is_none() {
            self.links.push((link, below));
        }
    }

    /// Takes the entries that `which` says (by place and entry, under the leaf's lock) out of a leaf, or as many as there is room
    /// for: the rest of the range is left.
    pub(in super::super) fn take(
        &mut self,
        leaf: &Leaf,
        range: &mut Range<usize>,
        which: impl Fn(usize, Entry) -> bool,
    ) {
        self.exchange(leaf, range, Entry::NONE, || true, which);
    }

    /// The same, with something else in their place. None if the leaf isn't the space's any more, which `is_ours` is asked under its
    /// lock.
    pub(in super::super) fn exchange(
        &mut self,
        leaf: &Leaf,
        range: &mut Range<usize>,
        new: Entry,
        is_ours: impl Fn() -> bool,
        which: impl Fn(usize, Entry) -> bool,
    ) {
        let mut leaf = leaf.lock();
        if leaf.is_empty() && new.is_none() || !is_ours() {
            range.start = range.end;
        }
        while range.start < range.end && self.entries.len() < self.entries.capacity() {
            let old = leaf.entry(range.start);
            if old != new && which(range.start, old) {
                leaf.replace(range.start, new);
                if !old.is_none() {
                    self.entries.push(old);
                }
            }
            range.start += 1;
        }
    }
}

/// What is unmapped: `start` to `end`, between `low` and `high`, which is where nothing is mapped then.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Hole {
    pub(in super::super) low: u64,
    pub(in super::super) start: u64,
    pub(in super::super) end: u64,
    pub(in super::super) high: u64,
}

impl Hole {
    /// Whether nothing else is mapped in a table.
    fn has(&self, low: u64, bytes: u64) -> bool {
        self.low <= low && self.high.saturating_sub(low) >= bytes
    }
}

impl Tables {
    /// What can fail of a [`detach`](Self::detach): room, and tables at the edges that are this space's own. The caller has
    /// the space's lock exclusively.
    pub(in super::super) fn prepare_detach(
        &self,
        hole: Hole,
        into: &mut Detached,
    ) -> Result<(), NoMemory> {
        self.prepare_below(&self.root, 0, hole, into)
    }

    fn prepare_below(
        &self,
        directory: &Directory,
        base: u64,
        hole: Hole,
        into: &mut Detached,
    ) -> Result<(), NoMemory> {
        let bytes = directory.slot_bytes();
        let touched = directory.touched(base, hole.start, hole.end);
        let edges = [touched.start, touched.end.saturating_sub(1)];
        let edges = edges.iter().take(touched.len());
        // Those between are in the hole as a whole.
        let edges = edges.map(|index| (*index, base + *index as u64 * bytes));
        let staying = edges.filter(|(_, low)| !hole.has(*low, bytes));
        into.reserve_links(touched.len() - staying.clone().count())?;
        for (index, low) in staying {
            let slot = &directory.slots[index];
            if slot.load().is_none() {
                continue;
            }
            if directory.below == 0 {
                self.own_leaf(low)?;
                let (_, range) = part(low, &(hole.start..hole.end));
                into.reserve_entries(range.len())?;
                continue;
            }
            let mut link = slot.load();
            while link.is_shared() {
                self.own(slot, link, directory.below)?;
                link = slot.load();
            }
            // SAFETY: P1: the lock that the caller has keeps others from unlinking.
            let below = unsafe { link.directory() };
            self.prepare_below(below, low, hole, into)?;
        }
        Ok(())
    }

    /// Takes out all that maps a range: whole tables where nothing else is mapped in them, and entries at the edges. What other
    /// calls do in the tables needs the lock that the caller has, exclusively; faults in the range put nothing in any more.
    ///
    /// `make_room` lets go of what is in `into`, where there wasn't enough room for what faults have made since it was prepared.
    pub(in super::super) fn detach(
        &self,
        hole: Hole,
        into: &mut Detached,
        make_room: &mut dyn FnMut(&mut Detached),
    ) {
        detach_below(&self.root, 0, hole, into, make_room);
    }

    /// Lets go of what was taken out. No access uses it any more.
    pub(in super::super) fn let_go(&self, detached: &mut Detached) {
        for entry in detached.entries.drain(..) {
            // SAFETY: P2: taken out of its leaf, once.
            drop(unsafe { entry.take() });
        }
        for (link, below) in detached.links.drain(..) {
            self.release(link, below);
        }
    }

    /// Drops a link to a table that no slot holds any more, and all that hangs on it if it was the last.
    pub(super) fn release(&self, link: Link, below: u32) {
        if link.is_none() {
            return;
        }
        // SAFETY: P1: the link itself keeps it.
        if link.is_shared() && !unsafe { link.head(below) }.drop_link() {
            return;
        }
        if below == 0 {
            // SAFETY: as above.
            unsafe { link.leaf() }.clear();
            // SAFETY: P1: made of a box; it was the last link.
            let leaf = unsafe { Box::from_raw(link.own().0.cast::<Leaf>()) };
            self.retire_leaf(leaf);
        } else {
            // SAFETY: as above.
            let directory = unsafe { link.directory() };
            for slot in &directory.slots {
                let link = slot.take();
                if !link.is_none() {
                    self.release(link, below - 1);
                }
            }
            // SAFETY: as above.
            let directory = unsafe { Box::from_raw(link.own().0.cast::<Directory>()) };
            self.retire_directory(directory);
        }
    }

    /// Frees a table a grace period from now.
    fn retire_leaf(&self, mut leaf: Box<Leaf>) {
        leaf.head.uncharge(size_of::<Leaf>());
        if planted("no_grace") {
            return drop(leaf);
        }
        if let Err(leaf) = self.leaves.retire(leaf) {
            self.without_memory(leaf);
        }
    }

    /// As [`retire_leaf`](Self::retire_leaf).
    fn retire_directory(&self, mut directory: Box<Directory>) {
        directory.head.uncharge(size_of::<Directory>());
        if let Err(directory) = self.directories.retire(directory) {
            self.without_memory(directory);
        }
    }

    /// There is no memory to note that a table is to be freed: it's waited for, or stays for good.
    #[cold]
    fn without_memory<T>(&self, table: Box<T>) {
        let deadline = std::time::Instant::now() + PATIENCE;
        match self.domain.synchronize(Some(deadline)) {
            Ok(()) => drop(table),
            Err(_) => std::mem::forget(table),
        }
    }
}

/// See [`Tables::detach`].
fn detach_below(
    directory: &Directory,
    base: u64,
    hole: Hole,
    into: &mut Detached,
    make_room: &mut dyn FnMut(&mut Detached),
) {
    let bytes = directory.slot_bytes();
    for index in directory.touched(base, hole.start, hole.end) {
        let low = base + index as u64 * bytes;
        let slot = &directory.slots[index];
        let link = slot.load();
        if link.is_none() {
            continue;
        }
        if hole.has(low, bytes) {
            if into.links.len() == into.links.capacity() {
                make_room(into);
            }
            into.push_link(slot.take_known(link), directory.below);
            continue;
        }
        debug_assert!(!link.is_shared(), "edges were made the space's own");
        if directory.below > 0 {
            // SAFETY: P1: the lock that the caller has keeps others from unlinking.
            let below = unsafe { link.directory() };
            detach_below(below, low, hole, into, make_room);
            continue;
        }
        // SAFETY: as above.
        let leaf = unsafe { link.leaf() };
        let (_, mut range) = part(low, &(hole.start..hole.end));
        into.take(leaf, &mut range, |_, _| true);
        while !range.is_empty() {
            make_room(into);
            into.take(leaf, &mut range, |_, _| true);
        }
    }
}

impl Drop for Tables {
    fn drop(&mut self) {
        let root = &*self.root;
        for slot in &root.slots {
            self.tear_down(slot.take(), root.below);
        }
    }
}

impl Tables {
    /// [`release`](Self::release) where nobody else can be in tables that were this space's alone.
    fn tear_down(&self, link: Link, below: u32) {
        if link.is_none() {
            return;
        }
        // SAFETY: P1: the link itself keeps it.
        if unsafe { link.head(below) }.was_shared() {
            self.release(link, below);
            return;
        }
        if below > 0 {
            // SAFETY: as above.
            let directory = unsafe { link.directory() };
            for slot in &directory.slots {
                self.tear_down(slot.take(), below - 1);
            }
        }
        // SAFETY: P1: its only link, and nobody else can be there.
        unsafe { free(link, below) };
    }
}

const _: () = assert!(LEAF_BYTES == (ENTRIES * crate::backend::paged::PAGE) as u64);
