//! Radix page tables.
//!
//! A table of the lowest level holds the entries of 2 MiB, one of a level above 512 links. Tables come into being when a
//! page is put in, by a compare-and-exchange of the slot above. They are walked without a lock, under a guard of the space's
//! domain, and freed a grace period after nothing leads to them any more.
//!
//! # Shared tables
//!
//! After [`share`](Tables::share) tables of a parent are its child's as well. A link that says SHARED leads to a table that other
//! spaces may lead to: all below it is read, and never changed through that link. Who wants to change something makes the way
//! there its own first ([`own_leaf`](Tables::own_leaf)): a table of its own in place of the shared one, level by level, or the
//! same one if nobody else has it any more.
//!
//! ```text
//! a thread of a space                      another one              the space that has it too
//! -------------------                      -----------              -------------------------
//! finds the link to a shared table         finds it as well
//!                                          locks it for copying
//!                                          link in place? copies
//!                                          puts the copy there
//!                                          unlocks
//!                                          locks, unlocks
//!                                          drops the link -------->  nobody else has it: its own,
//! locks it for copying                                               changes it
//! link in place? no: looks again
//! ```
//!
//! # Locks
//!
//! ```text
//! copying of a table (one at a time)
//!   lock of a leaf
//! ```
//!
//! Entries of a leaf change under its lock alone, so that its counters are exact. They are read without it. Slots change by
//! compare-and-exchange, or by a swap when they are emptied.
//!
//! # Invariants
//!
//! * **P1** A slot of a directory of level `n` is empty or leads to a table of level `n - 1`, which lives as long as it can be
//!   reached, and then for as long as a guard of that time.
//! * **P2** An entry holds one reference to its frame, unless it says that it borrows it. A link holds one to its table.
//! * **P3** A leaf's counters are the numbers of its entries of each kind.
//! * **P4** A table that several links lead to has only links that say SHARED, and is changed by nobody, but that private pages
//!   in it are marked as no longer owned.
//! * **P5** A table is copied under its lock for copying, with the space's link to it in place: so nobody has it alone meanwhile.

mod detach;
mod directory;
mod head;
mod leaf;
mod link;
mod relocate;
mod share;

use std::ops::Range;
use std::ptr;

use vma_rcu::reclaim::{Domain, Limbo};
use vma_rcu::sync::atomic::{AtomicBool, Ordering};
use vma_rcu::sync::{Arc, planted};

pub(super) use self::detach::{Detached, Hole};
use self::directory::Directory;
pub(super) use self::head::Account;
pub use self::leaf::Resident;
pub(super) use self::leaf::{Leaf, LockedLeaf, Seen};
use self::link::{Link, Slot};
pub(super) use self::relocate::Relocation;
pub(super) use self::share::Plan;
use super::entry::Entry;

/// Entries of a table.
pub(super) const ENTRIES: usize = 1 << BITS;
/// Bits of an address that a level decodes.
const BITS: u32 = if cfg!(loom) { 1 } else { 9 };
/// Bytes that a leaf maps.
pub(super) const LEAF_BYTES: u64 = (ENTRIES as u64) << PAGE_SHIFT;
const PAGE_SHIFT: u32 = 12;

/// Place of an address in its leaf.
pub(super) fn index(addr: u64) -> usize {
    (addr >> PAGE_SHIFT) as usize % ENTRIES
}

/// Memory ran out.
#[derive(Clone, Copy, Debug)]
pub(super) struct NoMemory;

/// Zeroed memory for a table; `None` when memory runs out.
///
/// # Safety
///
/// All bytes zero are a `T`.
#[cfg(not(loom))]
unsafe fn try_zeroed<T>() -> Option<Box<T>> {
    const { assert!(size_of::<T>() > 0) };
    // SAFETY: the layout has a size.
    let memory = unsafe { std::alloc::alloc_zeroed(std::alloc::Layout::new::<T>()) };
    let memory = ptr::NonNull::new(memory.cast::<T>())?;
    // SAFETY: allocated as a box would be, and initialised, by the caller's promise.
    Some(unsafe { Box::from_raw(memory.as_ptr()) })
}

/// The page tables of a space.
pub(super) struct Tables {
    root: Box<Directory>,
    leaves: Limbo<Leaf>,
    directories: Limbo<Directory>,
    domain: Domain,
    account: Arc<Account>,
    /// Some may be shared, so that faults exchange them. Changed with the space's lock held exclusively, or before there is one; read
    /// with either side: relaxed does.
    shares: AtomicBool,
}

// SAFETY: P1: what slots lead to belongs to the tables, or is shared as P4 says; entries are frames that any thread may use.
unsafe impl Send for Tables {}
// SAFETY: as above; whatever changes is atomic or behind a lock.
unsafe impl Sync for Tables {}

impl Tables {
    /// Empty ones, for addresses below `limit`, which may take `bytes`. `None` when memory runs out.
    pub(super) fn try_new(limit: u64, bytes: usize, domain: &Domain) -> Option<Self> {
        let mut below = 0;
        while below < 4 && (LEAF_BYTES << (BITS * (below + 1))) < limit {
            below += 1;
        }
        let account = Arc::new(Account::new(bytes));
        Some(Tables {
            root: Directory::try_new(below, &account)?,
            leaves: Limbo::try_new(domain)?,
            directories: Limbo::try_new(domain)?,
            domain: domain.clone(),
            account,
            shares: AtomicBool::new(false),
        })
    }

    /// Whether some may be shared. Who has the space's lock, either side, needs a guard only if so: faults under a guard alone put
    /// copies in place of shared tables.
    pub(super) fn may_share(&self) -> bool {
        self.shares.load(Ordering::Relaxed)
    }

    /// The leaf for `addr`, if there is one. The caller has a guard of the domain, or the space's lock and nothing is
    /// [shared](Self::may_share).
    pub(super) fn leaf(&self, addr: u64) -> Option<Seen<'_>> {
        let mut directory = &*self.root;
        let mut is_shared = false;
        loop {
            let link = directory.slot(addr).load();
            if link.is_none() {
                return None;
            }
            is_shared |= link.is_shared();
            if directory.below == 0 {
                // SAFETY: P1, by the caller's guard.
                let leaf = unsafe { link.leaf() };
                leaf.head.life.read();
                return Some(Seen { leaf, is_shared });
            }
            // SAFETY: as above.
            directory = unsafe { link.directory() };
            directory.head.life.read();
        }
    }

    /// The leaf for `addr`, and what is there. The caller as for [`leaf`](Self::leaf).
    ///
    /// While a space leads to a shared table nobody changes that. When it has left it, the table may become another's own: who has
    /// found the way there before must not take what is there then for the space's. If it saw something that the other has put in,
    /// it sees here that the way has changed. Model: `an_access_finds_nothing_of_another_space`.
    pub(super) fn look(&self, addr: u64) -> Option<(Seen<'_>, Entry)> {
        loop {
            let seen = self.leaf(addr)?;
            let entry = seen.entry(index(addr));
            let now = self.leaf(addr)?;
            if ptr::eq(now.leaf, seen.leaf) || planted("no_second_look") {
                return Some((seen, entry));
            }
        }
    }

    /// Whether `leaf` is the one for `addr`, and this space's alone. The caller as for [`leaf`](Self::leaf); while it has the leaf's
    /// lock, nobody else puts anything in.
    pub(super) fn owns(&self, addr: u64, leaf: &Leaf) -> bool {
        let now = self.leaf(addr);
        now.is_some_and(|now| ptr::eq(now.leaf, leaf) && !now.is_shared)
    }

    /// The leaf for `addr`, made if need be, and this space's alone. The caller as for [`leaf`](Self::leaf), and the tables
    /// aren't [shared](Self::share) meanwhile.
    pub(super) fn own_leaf(&self, addr: u64) -> Result<&Leaf, NoMemory> {
        let mut directory = &*self.root;
        loop {
            let slot = directory.slot(addr);
            let link = slot.load();
            if link.is_none() {
                self.link(slot, directory.below)?;
                continue;
            }
            if link.is_shared() {
                self.own(slot, link, directory.below)?;
                continue;
            }
            if directory.below == 0 {
                // SAFETY: P1, by the caller's guard.
                return Ok(unsafe { link.leaf() });
            }
            // SAFETY: as above.
            directory = unsafe { link.directory() };
        }
    }

    /// Makes the tables that there are in a range this space's alone. The caller as for [`own_leaf`](Self::own_leaf).
    pub(super) fn own_range(&self, start: u64, end: u64) -> Result<(), NoMemory> {
        let mut at = start;
        // Looked for anew each time: what leads to the next one may have been exchanged on the way to this one.
        while let Some(shared) = first_shared(&self.root, 0, false, &(at..end)) {
            self.own_leaf(shared)?;
            at = (shared / LEAF_BYTES + 1) * LEAF_BYTES;
        }
        Ok(())
    }

    /// The leaves that there are, in order, with the part of the range that each maps: address, and entries.
    pub(super) fn for_each(
        &self,
        start: u64,
        end: u64,
        mut f: impl FnMut(Seen<'_>, u64, Range<usize>),
    ) {
        visit(&self.root, 0, false, start..end, &mut f);
    }

    /// Pages by kind.
    pub(super) fn resident(&self) -> Resident {
        let mut sum = Resident::default();
        self.for_each(0, u64::MAX, |seen, _, _| {
            sum.add(seen.leaf.lock().resident());
        });
        sum
    }

    /// The same, counted one by one.
    pub(super) fn recount(&self) -> Resident {
        let mut sum = Resident::default();
        self.for_each(0, u64::MAX, |seen, _, _| {
            sum.add(seen.leaf.lock().recount());
        });
        sum
    }

    /// Bytes of the tables that this space has made.
    pub(super) fn bytes(&self) -> usize {
        self.account.bytes()
    }

    #[cfg(all(test, loom))]
    pub(super) fn account(&self) -> Arc<Account> {
        Arc::clone(&self.account)
    }

    /// Puts a new table into an empty slot, unless somebody else does meanwhile.
    fn link(&self, slot: &Slot, below: u32) -> Result<(), NoMemory> {
        let table = self.make(below)?;
        if !slot.exchange(Link::NONE, table) {
            // SAFETY: made above, and shown to nobody.
            unsafe { free(table, below) };
        }
        Ok(())
    }

    /// An empty table for a slot of a directory with `below`.
    fn make(&self, below: u32) -> Result<Link, NoMemory> {
        let table: *mut () = if below == 0 {
            Box::into_raw(Leaf::try_new(&self.account).ok_or(NoMemory)?).cast()
        } else {
            Box::into_raw(Directory::try_new(below - 1, &self.account).ok_or(NoMemory)?).cast()
        };
        Ok(Link(table))
    }

    /// Puts a table of the space's own in place of a shared one, unless somebody else has changed the slot. The caller has a guard of
    /// the domain.
    fn own(&self, slot: &Slot, shared: Link, below: u32) -> Result<(), NoMemory> {
        // SAFETY: P1, by the caller's guard.
        let head = unsafe { shared.head(below) };
        let new = if head.is_sole() {
            Link::NONE
        } else {
            self.make(below)?
        };
        let gone = {
            let _copying = head.lock_to_copy();
            let twice = planted("copied_twice");
            // Without its link the space has nothing to do with the table, which may be another's own by now.
            if slot.load() != shared && !twice && !planted("late_copy") {
                new
            } else if head.is_sole() || new.is_none() {
                slot.exchange(shared, shared.own());
                new
            } else {
                head.copied.read();
                // SAFETY: P1, P4: locked, with our link in place.
                unsafe { copy_table(shared, new, below) };
                if slot.exchange(shared, new) {
                    shared
                } else if twice {
                    slot.store(new);
                    shared
                } else {
                    // A call takes the link away.
                    new
                }
            }
        };
        self.release(gone, below);
        Ok(())
    }
}

/// Makes an empty table show what another does.
///
/// # Safety
///
/// Both are of the kind that `below` says and stay; `from` is locked for copying, and nobody else has `to`.
unsafe fn copy_table(from: Link, to: Link, below: u32) {
    if below == 0 {
        // SAFETY: by the caller's promise.
        let to = unsafe { to.leaf() };
        // SAFETY: as above.
        unsafe { from.leaf() }.copy_into(to);
    } else {
        // SAFETY: as above.
        let to = unsafe { to.directory() };
        // SAFETY: as above.
        unsafe { from.directory() }.copy_into(to);
    }
}

/// Frees a table that nobody else has.
///
/// # Safety
///
/// `link` was made from a box of the kind that `below` says, once, and nobody else uses it.
unsafe fn free(link: Link, below: u32) {
    let table = link.own().0;
    if below == 0 {
        // SAFETY: by the caller's promise.
        drop(unsafe { Box::from_raw(table.cast::<Leaf>()) });
    } else {
        // SAFETY: as above.
        drop(unsafe { Box::from_raw(table.cast::<Directory>()) });
    }
}

/// See [`Tables::for_each`].
fn visit(
    directory: &Directory,
    base: u64,
    is_shared: bool,
    within: Range<u64>,
    f: &mut impl FnMut(Seen<'_>, u64, Range<usize>),
) {
    let bytes = directory.slot_bytes();
    for index in directory.touched(base, within.start, within.end) {
        let low = base + index as u64 * bytes;
        let link = directory.slots[index].load();
        if link.is_none() {
            continue;
        }
        let is_shared = is_shared || link.is_shared();
        if directory.below > 0 {
            // SAFETY: P1, by the caller's guard.
            let directory = unsafe { link.directory() };
            visit(directory, low, is_shared, within.clone(), f);
            continue;
        }
        let (at, range) = part(low, &within);
        // SAFETY: as above.
        let leaf = unsafe { link.leaf() };
        f(Seen { leaf, is_shared }, at, range);
    }
}

/// An address of the first leaf in a range that may not be changed.
fn first_shared(
    directory: &Directory,
    base: u64,
    is_shared: bool,
    within: &Range<u64>,
) -> Option<u64> {
    let bytes = directory.slot_bytes();
    directory
        .touched(base, within.start, within.end)
        .find_map(|index| {
            let low = base + index as u64 * bytes;
            let link = directory.slots[index].load();
            let is_shared = is_shared || link.is_shared();
            if link.is_none() {
                None
            } else if directory.below == 0 {
                is_shared.then_some(low.max(within.start))
            } else {
                // SAFETY: P1, by the caller's guard.
                let directory = unsafe { link.directory() };
                first_shared(directory, low, is_shared, within)
            }
        })
}

/// The part of a range that the leaf at `low` maps: its address, and its entries.
fn part(low: u64, within: &Range<u64>) -> (u64, Range<usize>) {
    let from = within.start.saturating_sub(low) >> PAGE_SHIFT;
    let to = (within.end - low).min(LEAF_BYTES) >> PAGE_SHIFT;
    (low + (from << PAGE_SHIFT), from as usize..to as usize)
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod tests {
    use super::*;

    use crate::backend::{Inheritance, Inherited};

    fn tables(domain: &Domain) -> Tables {
        Tables::try_new(1 << 47, 1 << 20, domain).unwrap()
    }

    /// Puts in guard pages: entries without frames.
    fn fill(tables: &Tables, addresses: &[u64]) {
        for addr in addresses {
            let leaf = tables.own_leaf(*addr).unwrap();
            leaf.lock().replace(index(*addr), Entry::GUARD);
        }
    }

    fn filled(tables: &Tables) -> Vec<u64> {
        let mut seen = Vec::new();
        tables.for_each(0, u64::MAX, |leaf, at, range| {
            for (i, index) in range.enumerate() {
                if leaf.entry(index).is_guard() {
                    seen.push(at + ((i as u64) << PAGE_SHIFT));
                }
            }
        });
        seen
    }

    fn detach(tables: &Tables, hole: Hole) {
        let mut detached = Detached::default();
        tables.prepare_detach(hole, &mut detached).unwrap();
        let mut make_room = |_: &mut Detached| unreachable!("there was room");
        tables.detach(hole, &mut detached, &mut make_room);
        tables.let_go(&mut detached);
    }

    const ADDRESSES: [u64; 4] = [0x1000, 0x20_0000, 0x4000_0000, 0x7fff_ffff_f000];

    #[test]
    fn zero_bytes_are_an_empty_leaf() {
        let leaf = Leaf::try_new(&Arc::new(Account::new(1 << 20))).unwrap();
        assert!(leaf.lock().is_empty());
        let tables = tables(&Domain::default());
        assert!(tables.leaf(0).is_none());
        tables.own_leaf(0).unwrap();
        let seen = tables.leaf(0).unwrap();
        assert!((0..ENTRIES).all(|index| seen.entry(index).is_none()));
    }

    #[test]
    fn tables_come_and_go_by_range() {
        let domain = Domain::default();
        let tables = tables(&domain);
        let empty = tables.bytes();
        fill(&tables, &ADDRESSES);
        assert_eq!(filled(&tables), ADDRESSES);
        tables.for_each(0x3000, 0x20_3000, |_, at, range| {
            assert!((at, range.clone()) == (0x3000, 3..512) || (at, range) == (0x20_0000, 0..3));
        });
        // A table that reaches out of what is free stays, without the entries of the range.
        let (start, end) = (0x1000, 0x20_1000);
        let hole = |low, high| Hole {
            low,
            start,
            end,
            high,
        };
        detach(&tables, hole(0x1000, 0x20_1000));
        assert!(tables.leaf(0x1000).is_some() && tables.leaf(0x20_0000).is_some());
        assert_eq!(filled(&tables), ADDRESSES[2..]);
        detach(&tables, hole(0, 0x20_1000));
        assert!(tables.leaf(0x1000).is_none() && tables.leaf(0x20_0000).is_some());
        let all = Hole {
            low: 0,
            start: 0,
            end: 1 << 47,
            high: u64::MAX,
        };
        detach(&tables, all);
        assert_eq!(tables.bytes(), empty);
        domain.synchronize(None).unwrap();
        assert_eq!(domain.stats().pending_objects, 0);
    }

    /// Whoever changes a page after tables were shared has a copy of what leads to it, and nothing else.
    #[test]
    fn shared_tables_are_copied_on_the_way_to_a_change() {
        let domain = Domain::default();
        let (parent, child) = (tables(&domain), tables(&domain));
        fill(&parent, &ADDRESSES);
        let made = parent.bytes();
        let everything = [Inherited {
            start: 0,
            end: 1 << 47,
            how: Inheritance::Everything,
        }];
        parent
            .share(&child, &mut Plan::new(&everything, false))
            .unwrap();
        assert_eq!(parent.bytes(), made);
        assert_eq!(child.bytes(), size_of::<Directory>());
        assert_eq!(filled(&child), ADDRESSES);
        fill(&child, &[0x2000]);
        assert_eq!(filled(&parent), ADDRESSES);
        assert!(parent.leaf(0x20_0000).unwrap().is_shared);
        assert!(child.leaf(0x20_0000).unwrap().is_shared);
        assert!(!child.leaf(0x1000).unwrap().is_shared);
        // Its root, the way to the leaf, and the leaf.
        assert_eq!(
            child.bytes(),
            3 * size_of::<Directory>() + size_of::<Leaf>()
        );
        drop(parent);
        assert_eq!(filled(&child).len(), ADDRESSES.len() + 1);
        // Nobody else has them any more: they're taken, not copied.
        let before = child.bytes();
        fill(&child, &[0x20_1000, 0x4000_1000]);
        assert_eq!(child.bytes(), before);
        drop(child);
        domain.synchronize(None).unwrap();
        assert_eq!(domain.stats().pending_objects, 0);
    }

    /// What a child doesn't inherit isn't there, and tables with both are copied.
    #[test]
    fn a_plan_decides_what_is_shared() {
        let domain = Domain::default();
        let (parent, child) = (tables(&domain), tables(&domain));
        fill(&parent, &[0x1000, 0x2000, 0x20_0000, 0x40_0000]);
        let range = |start, end, how| Inherited { start, end, how };
        let plan = [
            range(0x1000, 0x2000, Inheritance::Private),
            range(0x2000, 0x3000, Inheritance::Nothing),
            range(0x20_0000, 0x30_0000, Inheritance::Everything),
            range(0x40_0000, 0x50_0000, Inheritance::Nothing),
        ];
        parent.share(&child, &mut Plan::new(&plan, false)).unwrap();
        assert_eq!(filled(&child), [0x1000, 0x20_0000]);
        assert!(!child.leaf(0x1000).unwrap().is_shared);
        assert!(child.leaf(0x20_0000).unwrap().is_shared);
        assert!(!parent.leaf(0x1000).unwrap().is_shared);
        assert_eq!(filled(&parent).len(), 4);
    }
}
