//! Radix page tables.
//!
//! A table of the lowest level holds the entries of 2 MiB, one of a level above 512 tables. Tables come into being when a
//! page is put in, by a compare-and-exchange of the slot above. They are walked without a lock, under a guard of the space's
//! domain, and freed a grace period after they were unlinked.
//!
//! # Locks
//!
//! Entries of a leaf change under its lock alone, so that its counters are exact. They are read without it.
//!
//! # Invariants
//!
//! * **P1** A slot of a directory of level `n` is null or leads to a table of level `n - 1`, which lives as long as it can be
//!   reached, and then for as long as a guard of that time.
//! * **P2** An entry holds one reference to its frame, unless it says that it borrows it.
//! * **P3** A leaf's counters are the numbers of its entries of each kind.

use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};
use vma_rcu::reclaim::{Domain, Limbo};

use super::entry::{Entry, Kind};

/// Entries of a table.
pub(super) const ENTRIES: usize = 512;
/// Bits of an address that a level decodes.
const BITS: u32 = 9;
/// Bytes that a leaf maps.
pub(super) const LEAF_BYTES: u64 = (ENTRIES as u64) << PAGE_SHIFT;
const PAGE_SHIFT: u32 = 12;

/// Place of an address in its leaf.
pub(super) fn index(addr: u64) -> usize {
    (addr >> PAGE_SHIFT) as usize % ENTRIES
}

/// A table of any level above the lowest.
struct Directory {
    /// Release when a table is linked (or the slot emptied), acquire on the way down: what the table holds was written before.
    slots: [AtomicPtr<()>; ENTRIES],
    /// Of its slots' tables: 0 for leaves.
    below: u32,
}

/// A table of entries.
pub(super) struct Leaf {
    /// [`Entry`] words. Stored under the lock, with release: who reads one without the lock, with acquire, sees the frame's
    /// bytes as they were when it was put in.
    entries: [AtomicPtr<()>; ENTRIES],
    counts: Mutex<Counts>,
}

/// Pages of a leaf by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    /// Private pages.
    pub anon: u64,
    /// Pages of files.
    pub file: u64,
    /// Pages of shared memory.
    pub shmem: u64,
}

impl Resident {
    fn add(&mut self, other: Resident) {
        self.anon += other.anon;
        self.file += other.file;
        self.shmem += other.shmem;
    }

    /// All kinds together.
    pub fn total(&self) -> u64 {
        self.anon + self.file + self.shmem
    }
}

#[derive(Debug, Default)]
struct Counts {
    anon: u16,
    file: u16,
    shmem: u16,
    /// Not empty, guards and uncounted pages included.
    used: u16,
}

impl Counts {
    fn of(&mut self, kind: Kind) -> Option<&mut u16> {
        match kind {
            Kind::Anon => Some(&mut self.anon),
            Kind::File => Some(&mut self.file),
            Kind::Shmem => Some(&mut self.shmem),
            Kind::Uncounted => None,
        }
    }
}

/// A leaf whose entries can't change but by this.
pub(super) struct LockedLeaf<'l> {
    leaf: &'l Leaf,
    counts: MutexGuard<'l, Counts>,
}

impl Leaf {
    pub(super) fn entry(&self, index: usize) -> Entry {
        Entry::from_word(self.entries[index].load(Ordering::Acquire))
    }

    pub(super) fn lock(&self) -> LockedLeaf<'_> {
        LockedLeaf {
            leaf: self,
            counts: self.counts.lock(),
        }
    }
}

impl LockedLeaf<'_> {
    pub(super) fn entry(&self, index: usize) -> Entry {
        Entry::from_word(self.leaf.entries[index].load(Ordering::Relaxed))
    }

    /// Puts in another entry and returns the one that was there, whose reference is now the caller's.
    pub(super) fn replace(&mut self, index: usize, new: Entry) -> Entry {
        let old = self.entry(index);
        self.leaf.entries[index].store(new.word(), Ordering::Release);
        self.counts.used += u16::from(!new.is_none());
        self.counts.used -= u16::from(!old.is_none());
        if let Some(count) = self.counts.of(new.kind()) {
            *count += 1;
        }
        if let Some(count) = self.counts.of(old.kind()) {
            *count -= 1;
        }
        old
    }

    pub(super) fn is_empty(&self) -> bool {
        self.counts.used == 0
    }

    fn resident(&self) -> Resident {
        Resident {
            anon: self.counts.anon.into(),
            file: self.counts.file.into(),
            shmem: self.counts.shmem.into(),
        }
    }

    /// P3.
    fn recount(&self) -> Resident {
        let mut resident = Resident::default();
        for index in 0..ENTRIES {
            match self.entry(index).kind() {
                Kind::Anon => resident.anon += 1,
                Kind::File => resident.file += 1,
                Kind::Shmem => resident.shmem += 1,
                Kind::Uncounted => {}
            }
        }
        resident
    }
}

impl Drop for Leaf {
    fn drop(&mut self) {
        for entry in &mut self.entries {
            // SAFETY: P2: nobody else can reach the leaf, and the entry is dropped with it.
            drop(unsafe { Entry::from_word(*entry.get_mut()).take() });
        }
    }
}

/// Zeroed memory for a table; `None` when memory runs out.
///
/// # Safety
///
/// All bytes zero are a `T`.
unsafe fn try_zeroed<T>() -> Option<Box<T>> {
    const { assert!(size_of::<T>() > 0) };
    // SAFETY: the layout has a size.
    let memory = unsafe { std::alloc::alloc_zeroed(std::alloc::Layout::new::<T>()) };
    let memory = ptr::NonNull::new(memory.cast::<T>())?;
    // SAFETY: allocated as a box would be, and initialised, by the caller's promise.
    Some(unsafe { Box::from_raw(memory.as_ptr()) })
}

impl Leaf {
    fn try_new() -> Option<Box<Self>> {
        // SAFETY: null pointers, zero counters; a free `parking_lot::Mutex` is a zero byte, see the test.
        unsafe { try_zeroed() }
    }
}

impl Directory {
    fn try_new(below: u32) -> Option<Box<Self>> {
        // SAFETY: null pointers and a number.
        let mut directory: Box<Self> = unsafe { try_zeroed()? };
        directory.below = below;
        Some(directory)
    }

    /// Bytes that a slot maps.
    fn slot_bytes(&self) -> u64 {
        LEAF_BYTES << (BITS * self.below)
    }

    fn index(&self, addr: u64) -> usize {
        (addr / self.slot_bytes()) as usize % ENTRIES
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        for index in 0..ENTRIES {
            let table = *self.slots[index].get_mut();
            if table.is_null() {
                continue;
            }
            if self.below == 0 {
                // SAFETY: P1: a leaf, made of a box; nobody else can reach this directory.
                drop(unsafe { Box::from_raw(table.cast::<Leaf>()) });
            } else {
                // SAFETY: P1: a directory, as above.
                drop(unsafe { Box::from_raw(table.cast::<Directory>()) });
            }
        }
    }
}

/// Memory ran out.
#[derive(Clone, Copy, Debug)]
pub(super) struct NoMemory;

/// The page tables of a space.
pub(super) struct Tables {
    root: Box<Directory>,
    leaves: Limbo<Leaf>,
    directories: Limbo<Directory>,
    /// Bytes of the tables that are linked, and the most they may be. Relaxed: a bound that orders nothing.
    bytes: AtomicUsize,
    limit: usize,
}

// SAFETY: P1: what slots lead to belongs to the tables; entries are frames that any thread may use.
unsafe impl Send for Tables {}
// SAFETY: as above; whatever changes is atomic or behind a lock.
unsafe impl Sync for Tables {}

impl Tables {
    /// Empty ones, for addresses below `limit`, which may take `bytes`. `None` when memory runs out.
    pub(super) fn try_new(limit: u64, bytes: usize, domain: &Domain) -> Option<Self> {
        let mut below = 1;
        while below < 4 && (LEAF_BYTES << (BITS * (below + 1))) < limit {
            below += 1;
        }
        Some(Tables {
            root: Directory::try_new(below)?,
            leaves: Limbo::try_new(domain)?,
            directories: Limbo::try_new(domain)?,
            bytes: AtomicUsize::new(size_of::<Directory>()),
            limit: bytes,
        })
    }

    /// The leaf for `addr`, if there is one. The caller has a guard of the domain, or the space's lock exclusively.
    pub(super) fn leaf(&self, addr: u64) -> Option<&Leaf> {
        let mut directory = &*self.root;
        loop {
            let slot = &directory.slots[directory.index(addr)];
            let table = slot.load(Ordering::Acquire);
            if table.is_null() {
                return None;
            }
            if directory.below == 0 {
                // SAFETY: P1, by the caller's guard.
                return Some(unsafe { &*table.cast::<Leaf>() });
            }
            // SAFETY: as above.
            directory = unsafe { &*table.cast::<Directory>() };
        }
    }

    /// The leaf for `addr`, made if need be. The caller as for [`leaf`](Self::leaf).
    pub(super) fn make_leaf(&self, addr: u64) -> Result<&Leaf, NoMemory> {
        let mut directory = &*self.root;
        loop {
            let slot = &directory.slots[directory.index(addr)];
            let mut table = slot.load(Ordering::Acquire);
            if table.is_null() {
                table = self.link(slot, directory.below).ok_or(NoMemory)?;
            }
            if directory.below == 0 {
                // SAFETY: P1, by the caller's guard.
                return Ok(unsafe { &*table.cast::<Leaf>() });
            }
            // SAFETY: as above.
            directory = unsafe { &*table.cast::<Directory>() };
        }
    }

    /// The leaves that there are, in order, with the part of the range that each maps: address, and entries.
    pub(super) fn for_each(
        &self,
        start: u64,
        end: u64,
        mut f: impl FnMut(&Leaf, u64, Range<usize>),
    ) {
        visit(&self.root, 0, start, end, &mut f);
    }

    /// Pages by kind.
    pub(super) fn resident(&self) -> Resident {
        let mut sum = Resident::default();
        self.for_each(0, u64::MAX, |leaf, _, _| sum.add(leaf.lock().resident()));
        sum
    }

    /// The same, counted one by one.
    pub(super) fn recount(&self) -> Resident {
        let mut sum = Resident::default();
        self.for_each(0, u64::MAX, |leaf, _, _| sum.add(leaf.lock().recount()));
        sum
    }

    /// Bytes that the tables take.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Puts a new table into an empty slot of a directory, and returns it, or the one that somebody else has put in
    /// meanwhile.
    fn link(&self, slot: &AtomicPtr<()>, below: u32) -> Option<*mut ()> {
        let size = table_size(below);
        if self.bytes.fetch_add(size, Ordering::Relaxed) + size > self.limit {
            self.bytes.fetch_sub(size, Ordering::Relaxed);
            return None;
        }
        let made = link(slot, below);
        if !made.is_some_and(|(_, linked)| linked) {
            self.bytes.fetch_sub(size, Ordering::Relaxed);
        }
        made.map(|(table, _)| table)
    }

    /// Unlinks the tables that map nothing outside of the range; their entries have been taken out. The caller has the
    /// space's lock exclusively, so that no other call unlinks.
    ///
    /// When memory runs out, tables stay where they are, empty.
    pub(super) fn free(&self, start: u64, end: u64) {
        self.free_below(&self.root, 0, start, end);
    }

    fn free_below(&self, directory: &Directory, base: u64, start: u64, end: u64) {
        let bytes = directory.slot_bytes();
        for index in slots(directory, base, start, end) {
            let low = base + index as u64 * bytes;
            let slot = &directory.slots[index];
            let table = slot.load(Ordering::Acquire);
            if table.is_null() {
                continue;
            }
            if directory.below > 0 {
                // One by one, so that each counts as what it is. A table that a fault links meanwhile goes with its directory.
                // SAFETY: P1: the lock that the caller has keeps others from unlinking.
                self.free_below(unsafe { &*table.cast() }, low, start, end);
            }
            if start > low || end - low < bytes {
                continue;
            }
            let unlinked = if directory.below == 0 {
                self.leaves.retire_with(|| unlink(slot))
            } else {
                self.directories.retire_with(|| unlink(slot))
            };
            if unlinked {
                let size = table_size(directory.below);
                self.bytes.fetch_sub(size, Ordering::Relaxed);
            }
        }
    }
}

/// Takes a table out of its slot. Not while another call does.
fn unlink<T>(slot: &AtomicPtr<()>) -> Option<Box<T>> {
    let table = slot.swap(ptr::null_mut(), Ordering::AcqRel);
    // SAFETY: P1: made of a box by `link`, and just taken out.
    (!table.is_null()).then(|| unsafe { Box::from_raw(table.cast()) })
}

/// Bytes of a table whose directory says `below`.
fn table_size(below: u32) -> usize {
    if below == 0 {
        size_of::<Leaf>()
    } else {
        size_of::<Directory>()
    }
}

/// Puts a new table into an empty slot. The table that is there then, and whether it's that one. `None` when memory runs out.
fn link(slot: &AtomicPtr<()>, below: u32) -> Option<(*mut (), bool)> {
    let table: *mut () = match below {
        0 => Box::into_raw(Leaf::try_new()?).cast(),
        _ => Box::into_raw(Directory::try_new(below - 1)?).cast(),
    };
    let result = slot.compare_exchange(ptr::null_mut(), table, Ordering::AcqRel, Ordering::Acquire);
    let Err(other) = result else {
        return Some((table, true));
    };
    if below == 0 {
        // SAFETY: made above, and shown to nobody.
        drop(unsafe { Box::from_raw(table.cast::<Leaf>()) });
    } else {
        // SAFETY: as above.
        drop(unsafe { Box::from_raw(table.cast::<Directory>()) });
    }
    Some((other, false))
}

/// The slots of a directory, which begins at `base`, that a range touches.
fn slots(directory: &Directory, base: u64, start: u64, end: u64) -> Range<usize> {
    let bytes = directory.slot_bytes();
    let from = start.saturating_sub(base) / bytes;
    let to = end.saturating_sub(base).div_ceil(bytes).min(ENTRIES as u64);
    from as usize..to.max(from) as usize
}

/// See [`Tables::for_each`].
fn visit(
    directory: &Directory,
    base: u64,
    start: u64,
    end: u64,
    f: &mut impl FnMut(&Leaf, u64, Range<usize>),
) {
    let bytes = directory.slot_bytes();
    for index in slots(directory, base, start, end) {
        let low = base + index as u64 * bytes;
        let table = directory.slots[index].load(Ordering::Acquire);
        if table.is_null() {
            continue;
        }
        if directory.below > 0 {
            // SAFETY: P1, by the caller's guard.
            visit(unsafe { &*table.cast() }, low, start, end, f);
            continue;
        }
        let from = start.saturating_sub(low) >> PAGE_SHIFT;
        let to = (end - low).min(bytes) >> PAGE_SHIFT;
        // SAFETY: as above.
        let leaf = unsafe { &*table.cast::<Leaf>() };
        f(leaf, low + (from << PAGE_SHIFT), from as usize..to as usize);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod tests {
    use super::*;

    #[test]
    fn zero_bytes_are_an_empty_leaf() {
        let leaf = Leaf::try_new().unwrap();
        assert!(leaf.counts.try_lock().is_some());
        assert!(leaf.lock().is_empty());
        assert!((0..ENTRIES).all(|index| leaf.entry(index).is_none()));
    }

    #[test]
    fn tables_come_and_go_by_range() {
        let domain = Domain::default();
        let tables = Tables::try_new(1 << 47, 1 << 20, &domain).unwrap();
        let empty = tables.bytes();
        let addresses = [0x1000, 0x20_0000, 0x4000_0000, 0x7fff_ffff_f000];
        for addr in addresses {
            assert!(tables.leaf(addr).is_none());
            let leaf = tables.make_leaf(addr).unwrap();
            leaf.lock()
                .replace((addr >> 12) as usize % ENTRIES, Entry::GUARD);
        }
        let mut seen = Vec::new();
        tables.for_each(0, u64::MAX, |leaf, at, range| {
            let guard = |index: &usize| leaf.entry(*index).is_guard();
            let index = range.clone().find(guard).unwrap();
            seen.push(at + (((index - range.start) as u64) << 12));
        });
        assert_eq!(seen, addresses);
        tables.for_each(0x3000, 0x20_3000, |_, at, range| {
            assert!((at, range.clone()) == (0x3000, 3..512) || (at, range) == (0x20_0000, 0..3));
        });
        // A table that reaches out of the range stays.
        tables.free(0x1000, 0x20_1000);
        assert!(tables.leaf(0x1000).is_some() && tables.leaf(0x20_0000).is_some());
        tables.free(0, 0x20_1000);
        assert!(tables.leaf(0x1000).is_none() && tables.leaf(0x20_0000).is_some());
        tables.free(0, 1 << 47);
        assert_eq!(tables.bytes(), empty);
        domain.synchronize(None).unwrap();
        assert_eq!(domain.stats().pending_objects, 0);
    }
}
