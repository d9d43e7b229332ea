//! Moving pages from one range to another: whole tables where both are aligned alike, else entry by entry.

use std::ops::Range;

use super::detach::Detached;
use super::directory::Directory;
use super::leaf::Leaf;
use super::link::{Link, Slot};
use super::{BITS, LEAF_BYTES, NoMemory, PAGE_SHIFT, Tables, free, index};
use crate::backend::paged::entry::Entry;

/// Levels of directories, at most.
const LEVELS: usize = 8;

/// A move, and tables for where it goes.
pub(in super::super) struct Relocation {
    pub(in super::super) from: u64,
    pub(in super::super) to: u64,
    pub(in super::super) len: u64,
    /// For a destination from which tables are taken out first, where memory may not run out any more.
    spares: Spares,
}

/// Tables that lead nowhere yet.
#[derive(Default)]
struct Spares {
    leaves: Vec<Box<Leaf>>,
    directories: Vec<Box<Directory>>,
    /// Which part of the space the last one of a level is for.
    last: [Option<u64>; LEVELS],
}

/// A part of a move.
struct Step {
    at: u64,
    target: u64,
    bytes: u64,
    /// It's a whole table, of directories with this `below`; else entries of one leaf.
    whole: Option<u32>,
}

impl Relocation {
    pub(in super::super) fn new(from: u64, to: u64, len: u64) -> Self {
        Relocation {
            from,
            to,
            len,
            spares: Spares::default(),
        }
    }

    fn source(&self) -> Range<u64> {
        self.from..self.from + self.len
    }

    /// The parts in order of address.
    fn steps(&self, highest: u32) -> impl Iterator<Item = Step> + use<> {
        let (from, to, end) = (self.from, self.to, self.from + self.len);
        let mut at = from;
        std::iter::from_fn(move || {
            let rest = end - at;
            if rest == 0 {
                return None;
            }
            let target = at - from + to;
            let fits = |below: &u32| {
                let bytes = table_bytes(*below);
                at.is_multiple_of(bytes) && target.is_multiple_of(bytes) && rest >= bytes
            };
            let whole = (0..highest).rev().find(fits);
            let bytes = match whole {
                Some(below) => table_bytes(below),
                None => rest.min(LEAF_BYTES - at % LEAF_BYTES),
            };
            let step = Step {
                at,
                target,
                bytes,
                whole,
            };
            at += bytes;
            Some(step)
        })
    }
}

/// Bytes that a table maps which directories with `below` lead to.
fn table_bytes(below: u32) -> u64 {
    LEAF_BYTES << (BITS * below)
}

impl Spares {
    /// One for a slot of a directory with `below`.
    fn pop(&mut self, below: u32) -> Option<Link> {
        let table: *mut () = if below == 0 {
            Box::into_raw(self.leaves.pop()?).cast()
        } else {
            let mut levels = self.directories.iter().map(|directory| directory.below);
            let at = levels.position(|level| level + 1 == below)?;
            Box::into_raw(self.directories.swap_remove(at)).cast()
        };
        Some(Link(table))
    }
}

impl Tables {
    /// What can fail of a [`relocate`](Self::relocate): tables of the space's own on both sides, and room for what is in the way. Tables
    /// at the destination may be taken out before it, if `is_zapped`. The caller has the space's lock exclusively.
    pub(in super::super) fn prepare_relocation(
        &self,
        relocation: &mut Relocation,
        is_zapped: bool,
        into: &mut Detached,
    ) -> Result<(), NoMemory> {
        for step in relocation.steps(self.root.below) {
            let level = step.whole;
            if let Some(below) = level {
                if !self.own_source(step.at, below)? {
                    continue;
                }
                into.reserve_links(1)?;
            } else if self.leaf(step.at).is_some() {
                self.own_leaf(step.at)?;
                // Where it's aligned otherwise the entries go to two leaves.
                let last = step.target + step.bytes - 1;
                self.prepare_target(relocation, last, level, is_zapped)?;
            } else {
                continue;
            }
            self.prepare_target(relocation, step.target, level, is_zapped)?;
        }
        Ok(())
    }

    /// Makes the directories on the way to a table the space's own. Whether there is such a table.
    fn own_source(&self, addr: u64, below: u32) -> Result<bool, NoMemory> {
        let mut directory = &*self.root;
        loop {
            let slot = directory.slot(addr);
            let link = slot.load();
            if link.is_none() {
                return Ok(false);
            }
            if directory.below == below {
                return Ok(true);
            }
            if link.is_shared() {
                self.own(slot, link, directory.below)?;
                continue;
            }
            // SAFETY: P1: the lock that the caller has keeps others from unlinking.
            directory = unsafe { link.directory() };
        }
    }

    /// Tables down to the directories with `below`, or to the leaf.
    fn prepare_target(
        &self,
        relocation: &mut Relocation,
        addr: u64,
        below: Option<u32>,
        is_zapped: bool,
    ) -> Result<(), NoMemory> {
        if is_zapped {
            return self.make_spares(&mut relocation.spares, addr, below);
        }
        match below {
            Some(below) => self
                .own_directory(addr, below, &mut Spares::default())
                .map(|_| ()),
            None => self.own_leaf(addr).map(|_| ()),
        }
    }

    fn make_spares(
        &self,
        spares: &mut Spares,
        addr: u64,
        below: Option<u32>,
    ) -> Result<(), NoMemory> {
        if below.is_none() && spares.last[0].replace(addr / LEAF_BYTES) != Some(addr / LEAF_BYTES) {
            let leaf = Leaf::try_new(&self.account).ok_or(NoMemory)?;
            spares.leaves.try_reserve(1).map_err(|_| NoMemory)?;
            spares.leaves.push(leaf);
        }
        for level in below.unwrap_or(0)..self.root.below {
            let part = addr / table_bytes(level + 1);
            let last = &mut spares.last[level as usize + 1];
            if last.replace(part) != Some(part) {
                let directory = Directory::try_new(level, &self.account).ok_or(NoMemory)?;
                spares.directories.try_reserve(1).map_err(|_| NoMemory)?;
                spares.directories.push(directory);
            }
        }
        Ok(())
    }

    /// The directory with `below` for an address; on the way tables are made, of spare ones first, and made the space's
    /// own.
    fn own_directory(
        &self,
        addr: u64,
        below: u32,
        spares: &mut Spares,
    ) -> Result<&Directory, NoMemory> {
        let mut directory = &*self.root;
        loop {
            if directory.below == below {
                return Ok(directory);
            }
            let slot = directory.slot(addr);
            let link = slot.load();
            if link.is_none() {
                self.link_spare(slot, directory.below, spares)?;
            } else if link.is_shared() {
                self.own(slot, link, directory.below)?;
            } else {
                // SAFETY: P1: the lock that the caller has keeps others from unlinking.
                directory = unsafe { link.directory() };
            }
        }
    }

    fn link_spare(&self, slot: &Slot, below: u32, spares: &mut Spares) -> Result<(), NoMemory> {
        let Some(table) = spares.pop(below) else {
            return self.link(slot, below);
        };
        if !slot.exchange(Link::NONE, table) {
            // SAFETY: a spare table, shown to nobody.
            unsafe { free(table, below) };
        }
        Ok(())
    }

    /// Moves all that is mapped in a range, after it was prepared; nothing else is at its destination. Faults put nothing into either range
    /// meanwhile. Whether there was anything.
    pub(in super::super) fn relocate(
        &self,
        relocation: &mut Relocation,
        detached: &mut Detached,
    ) -> bool {
        let mut moved = false;
        for step in relocation.steps(self.root.below) {
            moved |= match step.whole {
                Some(below) => self.move_table(&step, below, &mut relocation.spares, detached),
                None => self.move_entries(&step, &mut relocation.spares),
            };
        }
        debug_assert!(self.is_empty(relocation.source()), "all has moved");
        moved
    }

    fn move_table(
        &self,
        step: &Step,
        below: u32,
        spares: &mut Spares,
        detached: &mut Detached,
    ) -> bool {
        let mut directory = &*self.root;
        let link = loop {
            let slot = directory.slot(step.at);
            if directory.below == below {
                break slot.take();
            }
            let link = slot.load();
            if link.is_none() {
                return false;
            }
            // SAFETY: P1: the lock that the caller has keeps others from unlinking.
            directory = unsafe { link.directory() };
        };
        if link.is_none() {
            return false;
        }
        match self.own_directory(step.target, below, spares) {
            // What maps nothing may be in the way.
            Ok(directory) => {
                let slot = directory.slot(step.target);
                detached.push_link(slot.replace(link), below);
            }
            // There are tables, or spare ones, by `prepare_relocation`; were there none, the pages would be lost, and not leaked.
            Err(NoMemory) => detached.push_link(link, below),
        }
        true
    }

    fn move_entries(&self, step: &Step, spares: &mut Spares) -> bool {
        let Some(source) = self.leaf(step.at) else {
            return false;
        };
        let mut moved = false;
        for offset in (0..step.bytes).step_by(1 << PAGE_SHIFT) {
            // Nobody else locks two leaves of a space: their order doesn't matter.
            let entry = source
                .leaf
                .lock()
                .replace(index(step.at + offset), Entry::NONE);
            if entry.is_none() {
                continue;
            }
            moved = true;
            let target = step.target + offset;
            let there = match self.own_leaf_with(target, spares) {
                Ok(leaf) => leaf.lock().replace(index(target), entry),
                // As above.
                Err(NoMemory) => entry,
            };
            debug_assert!(there.is_none(), "nothing is where pages are moved to");
            // SAFETY: P2: just taken out.
            drop(unsafe { there.take() });
        }
        moved
    }

    fn own_leaf_with(&self, addr: u64, spares: &mut Spares) -> Result<&Leaf, NoMemory> {
        let slot = self.own_directory(addr, 0, spares)?.slot(addr);
        if slot.load().is_none() {
            self.link_spare(slot, 0, spares)?;
        }
        self.own_leaf(addr)
    }

    /// Nothing is mapped in a range.
    fn is_empty(&self, range: Range<u64>) -> bool {
        let mut empty = true;
        self.for_each(range.start, range.end, |seen, _, mut indices| {
            empty &= indices.all(|index| seen.entry(index).is_none());
        });
        empty
    }
}
