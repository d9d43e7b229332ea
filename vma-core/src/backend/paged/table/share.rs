//! What a child gets of its parent's tables.

use vma_rcu::sync::atomic::Ordering;

use super::directory::Directory;
use super::link::Link;
use super::{NoMemory, PAGE_SHIFT, Tables, part};
use crate::backend::paged::entry::Kind;
use crate::backend::{Inheritance, Inherited};

/// What a child inherits, in ranges.
pub(in super::super) struct Plan<'p> {
    /// In order of address. Between them nothing is mapped.
    ranges: &'p [Inherited],
    /// Pages that may not be shared have to be looked for.
    one_by_one: bool,
    /// Addresses of private pages that somebody has pinned.
    pinned: Vec<u64>,
}

/// How a table is inherited.
enum Way {
    /// Nothing in it is.
    NotAtAll,
    /// As a whole.
    Shared,
    /// What some ranges say.
    InParts,
}

impl<'p> Plan<'p> {
    pub(in super::super) fn new(ranges: &'p [Inherited], one_by_one: bool) -> Self {
        Plan {
            ranges,
            one_by_one,
            pinned: Vec::new(),
        }
    }

    /// What is shared now and must not stay so.
    pub(in super::super) fn pinned(&self) -> &[u64] {
        &self.pinned
    }

    /// The ranges that reach into another.
    fn within(&self, start: u64, end: u64) -> &'p [Inherited] {
        let from = self.ranges.partition_point(|range| range.end <= start);
        let to = self.ranges.partition_point(|range| range.start < end);
        &self.ranges[from..to.max(from)]
    }

    fn way(&self, start: u64, end: u64) -> Way {
        let ranges = self.within(start, end);
        let is = |how: Inheritance| move |range: &Inherited| range.how == how;
        if ranges.iter().all(is(Inheritance::Nothing)) {
            Way::NotAtAll
        } else if !self.one_by_one && ranges.iter().all(is(Inheritance::Everything)) {
            Way::Shared
        } else {
            Way::InParts
        }
    }
}

impl Tables {
    /// Gives a child what the plan says: tables where it can, single private pages elsewhere. None of it is stored to any more through
    /// these tables, neither here nor there.
    ///
    /// Nobody else changes these tables meanwhile, nor uses the child's. The caller invalidates translations afterwards. When
    /// memory runs out the child has a part, and nothing has changed for the parent but that stores find out so.
    pub(in super::super) fn share(
        &self,
        child: &Tables,
        plan: &mut Plan<'_>,
    ) -> Result<(), NoMemory> {
        for tables in [self, child] {
            tables.shares.store(true, Ordering::Relaxed);
        }
        self.share_below(child, &self.root, &child.root, 0, plan)
    }

    fn share_below(
        &self,
        child: &Tables,
        from: &Directory,
        to: &Directory,
        base: u64,
        plan: &mut Plan<'_>,
    ) -> Result<(), NoMemory> {
        for (index, (slot, copy)) in from.slots.iter().zip(&to.slots).enumerate() {
            let mut link = slot.load();
            if link.is_none() {
                continue;
            }
            let low = base + index as u64 * from.slot_bytes();
            let high = low + from.slot_bytes();
            match plan.way(low, high) {
                Way::NotAtAll => continue,
                Way::Shared => {
                    copy.store(from.share(slot, link));
                    continue;
                }
                Way::InParts => {}
            }
            // What is below is changed.
            while link.is_shared() {
                self.own(slot, link, from.below)?;
                link = slot.load();
            }
            child.link(copy, from.below)?;
            if from.below > 0 {
                // SAFETY: P1: nobody else unlinks.
                let from = unsafe { link.directory() };
                // SAFETY: as above; nobody has the child yet.
                let to = unsafe { copy.load().directory() };
                self.share_below(child, from, to, low, plan)?;
                continue;
            }
            copy_entries(link, copy.load(), low, plan)?;
        }
        Ok(())
    }
}

/// The pages of a leaf that a child inherits, one by one.
fn copy_entries(from: Link, to: Link, low: u64, plan: &mut Plan<'_>) -> Result<(), NoMemory> {
    // SAFETY: P1: nobody else unlinks.
    let from = unsafe { from.leaf() };
    // SAFETY: as above; nobody has the child yet.
    let to = unsafe { to.leaf() };
    for range in plan.within(low, low + super::LEAF_BYTES) {
        if range.how == Inheritance::Nothing {
            continue;
        }
        let (_, indices) = part(low, &(range.start..range.end));
        let (mut from, mut to) = (from.lock(), to.lock());
        for index in indices {
            let entry = from.entry(index);
            // The child finds the file's by itself.
            let inherited = entry.is_private() || entry.kind() == Kind::Uncounted;
            if inherited && !entry.is_none() {
                if entry.is_pinned() {
                    plan.pinned.try_reserve(1).map_err(|_| NoMemory)?;
                    plan.pinned.push(low + ((index as u64) << PAGE_SHIFT));
                }
                let shown = from.share(index, entry);
                let old = to.replace(index, shown);
                debug_assert!(old.is_none(), "nothing is there yet");
            }
        }
    }
    Ok(())
}
