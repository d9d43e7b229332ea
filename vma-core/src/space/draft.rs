//! Planning: the layout as a call is going to leave it, before anything is published.
//!
//! A [`Draft`] lies over the present layout. Edits replace whole VMAs inside *windows*; lookups see through
//! the windows to the base. A call plans on it step by step, as Linux does on the tree itself, and the sum
//! of the steps is published by one store. A call that fails half-way publishes the prefix that Linux
//! documents, or throws the draft away.

use std::sync::Arc;

use smallvec::SmallVec;
use vma_rcu::tree::View;

use crate::accounting::{Totals, check_split};
use crate::addr::{Pages, VmRange};
use crate::error::SplitError;
use crate::file::{FileObject, MappingHooks};
use crate::flags::VmaFlags;
use crate::limits::SpaceConfig;
use crate::merge::{Kind, Merge, Proposal, decide};
use crate::vma::{Extras, Placed, Vma, same_hooks};

use super::Stats;
use super::placement::Ground;

/// A VMA of a draft.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) vma: Vma,
}

impl Piece {
    pub(super) fn new(start: u64, end: u64, vma: Vma) -> Self {
        Piece { start, end, vma }
    }
}

type Pieces = SmallVec<[Piece; 3]>;

/// A range whose VMAs are replaced. It covers whole VMAs of the base.
#[derive(Debug)]
pub(super) struct Window {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) pieces: Pieces,
}

/// An owner to be told after the call.
#[derive(Debug)]
pub(super) struct HookEvent {
    pub(super) hooks: Arc<dyn MappingHooks>,
    pub(super) range: VmRange,
    pub(super) opened: bool,
}

/// What a call is about to publish.
#[derive(Debug, Default)]
pub(super) struct Changes {
    pub(super) windows: SmallVec<[Window; 1]>,
    pub(super) totals: Totals,
    pub(super) stats: Stats,
    pub(super) hooks: Vec<HookEvent>,
    /// Change of the number of writable shared mappings, per file.
    pub(super) writable: Vec<(Arc<FileObject>, i64)>,
}

pub(super) struct Draft<'a> {
    view: View<'a, Vma>,
    /// Starts of the base's mappings that keep a gap below them.
    guarded: &'a [u64],
    pub(super) config: &'a SpaceConfig,
    pub(super) pages: Pages,
    changes: Changes,
}

impl<'a> Draft<'a> {
    pub(super) fn new(view: View<'a, Vma>, guarded: &'a [u64], config: &'a SpaceConfig, totals: Totals) -> Self {
        Draft {
            view,
            guarded,
            config,
            pages: config.pages(),
            changes: Changes { totals, ..Changes::default() },
        }
    }

    pub(super) fn finish(self) -> Changes {
        self.changes
    }

    /// Totals as they are going to be.
    pub(super) fn totals(&self) -> &Totals {
        &self.changes.totals
    }

    pub(super) fn totals_mut(&mut self) -> &mut Totals {
        &mut self.changes.totals
    }

    /// What places are searched in: the layout under the draft, before the first edit.
    pub(super) fn ground(&self) -> Ground<'a> {
        debug_assert!(self.is_untouched(), "gap searches need an untouched draft");
        Ground { view: self.view, guarded: self.guarded, config: self.config }
    }

    pub(super) fn is_untouched(&self) -> bool {
        self.changes.windows.is_empty()
    }

    // ---- lookup ------------------------------------------------------------------------------

    /// The first VMA that ends above `addr` (Linux `find_vma`).
    pub(super) fn next(&self, addr: u64) -> Option<Placed<'_>> {
        let mut at = addr;
        for window in &self.changes.windows {
            if window.end <= at {
                continue;
            }
            if at < window.start
                && let Some(entry) = self.view.find_next(at)
                && entry.start < window.start
            {
                return Some(self.placed(entry.start, entry.end, entry.value));
            }
            let index = window.pieces.partition_point(|piece| piece.end <= at);
            if let Some(piece) = window.pieces.get(index) {
                return Some(self.placed(piece.start, piece.end, &piece.vma));
            }
            at = window.end;
        }
        let entry = self.view.find_next(at)?;
        Some(self.placed(entry.start, entry.end, entry.value))
    }

    /// The last VMA that ends at or below `addr`.
    pub(super) fn prev(&self, addr: u64) -> Option<Placed<'_>> {
        let mut at = addr;
        for window in self.changes.windows.iter().rev() {
            if window.start >= at {
                continue;
            }
            if at > window.end
                && let Some(entry) = self.view.find_prev(at)
                && entry.end > window.end
            {
                return Some(self.placed(entry.start, entry.end, entry.value));
            }
            let index = window.pieces.partition_point(|piece| piece.end <= at);
            if let Some(piece) = index.checked_sub(1).and_then(|index| window.pieces.get(index)) {
                return Some(self.placed(piece.start, piece.end, &piece.vma));
            }
            at = window.start;
        }
        let entry = self.view.find_prev(at)?;
        Some(self.placed(entry.start, entry.end, entry.value))
    }

    /// The VMA that holds `addr`.
    pub(super) fn find(&self, addr: u64) -> Option<Placed<'_>> {
        self.next(addr).filter(|vma| vma.start <= addr)
    }

    /// The first VMA that intersects the range.
    pub(super) fn first_in(&self, start: u64, end: u64) -> Option<Placed<'_>> {
        self.next(start).filter(|vma| start < end && vma.start < end)
    }

    fn placed<'p>(&self, start: u64, end: u64, vma: &'p Vma) -> Placed<'p> {
        Placed { start, end, vma, pages: self.pages }
    }

    // ---- edits -------------------------------------------------------------------------------

    /// Puts a VMA into a free range, alone.
    pub(super) fn insert(&mut self, start: u64, end: u64, vma: Vma) {
        self.put(start, end, smallvec::smallvec![Piece::new(start, end, vma)]);
    }

    /// Puts a VMA into a free range, merging it with its neighbours where the rule allows it.
    /// Returns the range of the VMA that holds it now.
    pub(super) fn insert_merged(
        &mut self,
        start: u64,
        end: u64,
        vma: Vma,
        chain: crate::anon::AnonId,
        kind: Kind,
    ) -> (Merge, VmRange) {
        let prev = self.prev(start);
        let next = self.next(start);
        let proposal = Proposal {
            start,
            end,
            flags: vma.flags(),
            file: vma.file(),
            extras: vma.extras(),
            pgoff: vma.pgoff(),
            anon: vma.anon(),
            chain,
            kind,
        };
        let merge = decide(&proposal, prev, next);
        let (from, piece) = match (merge, prev, next) {
            (Merge::Left, Some(prev), _) => {
                let anon = prev.vma.anon().or(vma.anon());
                ((prev.start, end), Piece::new(prev.start, end, prev.vma.clone().with_anon(anon)))
            }
            (Merge::Right, _, Some(next)) => {
                let anon = next.vma.anon().or(vma.anon());
                let grown = next.vma.clone().with_pgoff(vma.pgoff()).with_anon(anon);
                ((start, next.end), Piece::new(start, next.end, grown))
            }
            (Merge::Both, Some(prev), Some(next)) => {
                let anon = prev.vma.anon().or(next.vma.anon()).or(vma.anon());
                let grown = prev.vma.clone().with_anon(anon);
                ((prev.start, next.end), Piece::new(prev.start, next.end, grown))
            }
            _ => ((start, end), Piece::new(start, end, vma)),
        };
        self.count_merge(merge);
        let range = VmRange::new(piece.start, piece.end);
        if merge == Merge::Alone {
            self.put(from.0, from.1, smallvec::smallvec![piece]);
        } else {
            self.replace(from.0, from.1, smallvec::smallvec![piece]);
        }
        (merge, range)
    }

    fn count_merge(&mut self, merge: Merge) {
        self.changes.stats.merges += match merge {
            Merge::Alone => 0,
            Merge::Left | Merge::Right => 1,
            Merge::Both => 2,
        };
    }

    /// Removes everything in a range; VMAs that reach out of it were split before.
    pub(super) fn remove(&mut self, start: u64, end: u64) {
        let mut from = u64::MAX;
        let mut to = start;
        let mut at = start;
        while let Some((vma_start, vma_end)) = self.take_account(at, end) {
            from = from.min(vma_start);
            to = vma_end;
            at = vma_end;
        }
        if from < to {
            self.put(from, to, Pieces::new());
        }
    }

    /// Replaces the VMAs that lie wholly inside the range.
    pub(super) fn replace(&mut self, start: u64, end: u64, pieces: Pieces) {
        let mut at = start;
        while let Some((_, vma_end)) = self.take_account(at, end) {
            at = vma_end;
        }
        self.put(start, end, pieces);
    }

    /// Takes the first VMA in the range out of the totals, and returns where it lies.
    fn take_account(&mut self, start: u64, end: u64) -> Option<(u64, u64)> {
        let vma = self.first_in(start, end)?;
        let (vma_start, vma_end, flags) = (vma.start, vma.end, vma.flags());
        let count = vma.page_count();
        let plain = vma.file().is_none() && vma.vma.extras().is_none();
        let follow = if plain { None } else { Some(vma.vma.clone()) };
        self.changes.totals.remove(flags, count);
        if let Some(vma) = follow {
            self.follow(&vma, VmRange::new(vma_start, vma_end), false);
        }
        Some((vma_start, vma_end))
    }

    /// Owners and files that have to hear of a VMA that comes or goes.
    fn follow(&mut self, vma: &Vma, range: VmRange, opened: bool) {
        if let Some(file) = vma.file()
            && vma.is_shared_maywrite()
        {
            let delta = if opened { 1 } else { -1 };
            let object = file.object();
            match self.changes.writable.iter_mut().find(|(known, _)| Arc::ptr_eq(known, object)) {
                Some((_, sum)) => *sum += delta,
                None => self.changes.writable.push((object.clone(), delta)),
            }
        }
        if let Some(hooks) = vma.hooks() {
            let opposite = |event: &HookEvent| {
                event.opened != opened && same_hooks(Some(&event.hooks), Some(hooks))
            };
            match self.changes.hooks.iter().position(opposite) {
                Some(index) => drop(self.changes.hooks.remove(index)),
                None => self.changes.hooks.push(HookEvent { hooks: hooks.clone(), range, opened }),
            }
        }
    }

    /// Sets the content of a range. What was there is out of the totals already.
    fn put(&mut self, start: u64, end: u64, pieces: Pieces) {
        for piece in &pieces {
            let count = self.pages.count(piece.end - piece.start);
            self.changes.totals.add(piece.vma.flags(), count);
            if piece.vma.file().is_some() || piece.vma.extras().is_some() {
                let vma = piece.vma.clone();
                self.follow(&vma, VmRange::new(piece.start, piece.end), true);
            }
        }
        let windows = &mut self.changes.windows;
        let first = windows.partition_point(|window| window.end < start);
        let last = windows.partition_point(|window| window.start <= end);
        if first == last {
            windows.insert(first, Window { start, end, pieces });
            return;
        }
        if last - first == 1 {
            let window = &mut windows[first];
            let low = window.pieces.partition_point(|piece| piece.end <= start);
            let high = window.pieces.partition_point(|piece| piece.start < end);
            window.start = window.start.min(start);
            window.end = window.end.max(end);
            if low == window.pieces.len() {
                window.pieces.extend(pieces);
            } else {
                let tail: Pieces = window.pieces.drain(high..).collect();
                window.pieces.truncate(low);
                window.pieces.extend(pieces);
                window.pieces.extend(tail);
            }
            return;
        }
        let mut merged = Window { start, end, pieces: Pieces::new() };
        let mut above = Pieces::new();
        for window in windows.drain(first..last) {
            merged.start = merged.start.min(window.start);
            merged.end = merged.end.max(window.end);
            for piece in window.pieces {
                if piece.end <= start {
                    merged.pieces.push(piece);
                } else if piece.start >= end {
                    above.push(piece);
                }
            }
        }
        merged.pieces.extend(pieces);
        merged.pieces.extend(above);
        windows.insert(first, merged);
    }

    // ---- split and change --------------------------------------------------------------------

    /// Splits the VMA that holds `at` inside, if there is one. No limit is tested (`__split_vma`).
    pub(super) fn split(&mut self, at: u64) -> Result<(), SplitError> {
        let Some(vma) = self.find(at).filter(|vma| vma.start < at) else {
            return Ok(());
        };
        if let Some(hooks) = vma.vma.hooks()
            && !hooks.may_split(vma.range(), at)
        {
            return Err(SplitError::Refused { vma: vma.range(), at });
        }
        let (start, end) = (vma.start, vma.end);
        let low = Piece::new(start, at, vma.vma.clone());
        let high = Piece::new(at, end, vma.tail(at));
        self.changes.stats.splits += 1;
        self.replace(start, end, smallvec::smallvec![low, high]);
        Ok(())
    }

    /// Splits where the limit on the number of mappings applies (`split_vma`).
    pub(super) fn split_limited(&mut self, at: u64) -> Result<(), SplitError> {
        if self.find(at).is_some_and(|vma| vma.start < at) {
            check_split(self.totals(), self.config)?;
        }
        self.split(at)
    }

    /// Gives the part `[start, end)` of the VMA that holds it other attributes, merging or splitting
    /// (`vma_modify`). Returns the end of the VMA that the part belongs to now.
    ///
    /// A split at `start` stays when the one at `end` fails, as in Linux.
    pub(super) fn modify(
        &mut self,
        start: u64,
        end: u64,
        flags: VmaFlags,
        extras: Option<&Arc<Extras>>,
    ) -> Result<u64, SplitError> {
        let Some(middle) = self.find(start) else {
            return Ok(end);
        };
        debug_assert!(end <= middle.end, "the part lies in one VMA");
        let (middle_start, middle_end) = (middle.start, middle.end);
        let (at_start, at_end) = (start == middle_start, end == middle_end);
        let part = middle.tail(start).with_flags(flags).with_extras(extras.cloned());
        if at_start || at_end {
            let before = middle.vma.clone();
            let kind = Kind::Existing { at_start, at_end, has_close: middle.vma.has_close() };
            if let Some(new_end) = self.merge_existing(&before, VmRange::new(middle_start, middle_end), start, end, &part, kind) {
                return Ok(new_end);
            }
        }
        self.split_limited(start)?;
        self.split_limited(end)?;
        self.replace(start, end, smallvec::smallvec![Piece::new(start, end, part)]);
        Ok(end)
    }

    fn merge_existing(
        &mut self,
        middle: &Vma,
        whole: VmRange,
        start: u64,
        end: u64,
        part: &Vma,
        kind: Kind,
    ) -> Option<u64> {
        let prev = self.prev(start);
        let next = self.next(end);
        let proposal = Proposal {
            start,
            end,
            flags: part.flags(),
            file: part.file(),
            extras: part.extras(),
            pgoff: part.pgoff(),
            anon: part.anon(),
            chain: part.anon(),
            kind,
        };
        let merge = decide(&proposal, prev, next);
        let mut pieces = Pieces::new();
        let (from, to, result) = match (merge, prev, next) {
            (Merge::Left, Some(prev), _) => {
                let anon = prev.vma.anon().or(part.anon());
                pieces.push(Piece::new(prev.start, end, prev.vma.clone().with_anon(anon)));
                if end < whole.end {
                    let skipped = self.pages.count(end - whole.start);
                    let rest = middle.clone().with_pgoff(middle.pgoff().wrapping_add(skipped));
                    pieces.push(Piece::new(end, whole.end, rest));
                }
                (prev.start, whole.end, end)
            }
            (Merge::Right, _, Some(next)) => {
                if whole.start < start {
                    pieces.push(Piece::new(whole.start, start, middle.clone()));
                }
                let anon = next.vma.anon().or(part.anon());
                let grown = next.vma.clone().with_pgoff(part.pgoff()).with_anon(anon);
                pieces.push(Piece::new(start, next.end, grown));
                (whole.start, next.end, next.end)
            }
            (Merge::Both, Some(prev), Some(next)) => {
                let anon = prev.vma.anon().or(next.vma.anon()).or(part.anon());
                pieces.push(Piece::new(prev.start, next.end, prev.vma.clone().with_anon(anon)));
                (prev.start, next.end, next.end)
            }
            _ => return None,
        };
        self.count_merge(merge);
        self.replace(from, to, pieces);
        Some(result)
    }
}
