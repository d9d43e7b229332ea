//! The edits of a draft: insert, merge, remove, split, change.

use std::sync::Arc;

use vma_rcu::tree::Record as _;

use super::{Draft, Followed, HookEvent, HugeEvent, Piece, Pieces, Window, one};
use crate::accounting::check_split;
use crate::addr::VmRange;
use crate::anon::AnonId;
use crate::backend::PageChange;
use crate::error::SplitError;
use crate::events::{Context, MonitorEvent, MonitorFeatures};
use crate::flags::VmaFlags;
use crate::merge::{Kind, Merge, Proposal, decide};
use crate::space::files::FileEdits;
use crate::space::monitor::hearing;
use crate::vma::{Extras, Vma, same_hooks};

impl Draft<'_> {
    /// Puts a VMA into a free range, alone.
    #[inline(always)]
    pub(in crate::space) fn insert(&mut self, start: u64, end: u64, vma: Vma) {
        self.account(start, end, &vma);
        self.add_window(start, end, one(start, end, vma));
    }

    /// Puts a VMA into a free range, merging it with its neighbours where the rule allows it.
    /// Returns the range of the VMA that holds it now.
    #[inline]
    pub(in crate::space) fn insert_merged(
        &mut self,
        start: u64,
        end: u64,
        vma: Vma,
        chain: AnonId,
        kind: Kind,
    ) -> (Merge, VmRange) {
        let prev = self.prev(start).filter(|prev| prev.end == start);
        let next = self.next(start).filter(|next| next.start == end);
        let merge = if prev.is_none() && next.is_none() {
            // Nothing touches.
            Merge::Alone
        } else {
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
            decide(&proposal, prev, next)
        };
        let (from, piece) = match (merge, prev, next) {
            (Merge::Left, Some(prev), _) => (
                (prev.start, end),
                Piece::new(prev.start, end, prev.vma.clone().absorb(&vma)),
            ),
            (Merge::Right, _, Some(next)) => {
                let grown = next.vma.clone().with_pgoff(vma.pgoff()).absorb(&vma);
                ((start, next.end), Piece::new(start, next.end, grown))
            }
            (Merge::Both, Some(prev), Some(next)) => {
                let grown = prev.vma.clone().absorb(next.vma).absorb(&vma);
                (
                    (prev.start, next.end),
                    Piece::new(prev.start, next.end, grown),
                )
            }
            _ => {
                self.insert(start, end, vma);
                return (Merge::Alone, VmRange::new(start, end));
            }
        };
        self.count_merge(merge);
        let range = VmRange::new(piece.start, piece.end);
        self.replace(from.0, from.1, smallvec::smallvec![piece]);
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
    #[inline(always)]
    pub(in crate::space) fn remove(&mut self, start: u64, end: u64) {
        let mut from = u64::MAX;
        let mut to = start;
        let mut at = start;
        if self.changes.notes_pages {
            self.note_gone(start, end);
        }
        if self.changes.monitored {
            self.tell_unmapped(start, end);
        }
        while let Some((vma_start, vma_end)) = self.take_account(at, end) {
            from = from.min(vma_start);
            to = vma_end;
            at = vma_end;
        }
        if from < to {
            self.add_window(from, to, Pieces::new());
            self.note_pages(PageChange::Zap { start, end });
        }
    }

    /// Each monitor hears of it once. Source: `userfaultfd_unmap_prep()`.
    #[cold]
    fn tell_unmapped(&mut self, start: u64, end: u64) {
        let mut at = start;
        while let Some(vma) = self.first_in(at, end) {
            at = vma.end;
            let Some(monitor) = hearing(vma.vma, MonitorFeatures::EVENT_UNMAP).cloned() else {
                continue;
            };
            let unmapped = VmRange::new(start, end);
            let knows = |(other, event): &(Arc<Context>, MonitorEvent)| {
                Arc::ptr_eq(other, &monitor)
                    && matches!(event, MonitorEvent::Unmap(range) if *range == unmapped)
            };
            if !self.changes.told.iter().any(knows) {
                self.tell(monitor, MonitorEvent::Unmap(unmapped));
            }
        }
    }

    /// Of what kinds the mappings are that go.
    fn note_gone(&mut self, start: u64, end: u64) {
        let mut at = start;
        while let Some(vma) = self.first_in(at, end) {
            let (flags, to) = (vma.flags(), vma.end);
            self.changes.gone |= flags;
            at = to;
        }
    }

    /// Replaces the VMAs that lie wholly inside the range.
    pub(in crate::space) fn replace(&mut self, start: u64, end: u64, pieces: Pieces) {
        let mut at = start;
        while let Some((_, vma_end)) = self.take_account(at, end) {
            at = vma_end;
        }
        self.put(start, end, pieces);
    }

    /// Takes the first VMA in the range out of the totals, and returns where it lies.
    #[inline(always)]
    fn take_account(&mut self, start: u64, end: u64) -> Option<(u64, u64)> {
        let vma = self.first_in(start, end)?;
        let (vma_start, vma_end, flags) = (vma.start, vma.end, vma.flags());
        let count = vma.page_count();
        let guarded = vma.vma.start_gap() > 0;
        let plain = vma.file().is_none() && vma.vma.extras().is_none();
        let follow = if plain { None } else { Some(vma.vma.clone()) };
        self.changes.totals.remove(flags, count);
        self.changes.guards |= guarded;
        if let Some(vma) = follow {
            self.follow(&vma, VmRange::new(vma_start, vma_end), false);
        }
        Some((vma_start, vma_end))
    }

    /// Owners and files that have to hear of a VMA that comes or goes.
    #[inline(never)]
    fn follow(&mut self, vma: &Vma, range: VmRange, opened: bool) {
        let placed = self.placed(range.start, range.end, vma);
        if FileEdits::concern(placed) {
            self.changes
                .followed
                .get_or_insert_default()
                .files
                .note(placed, opened);
        }
        if let Some(file) = vma.file()
            && vma.is_shared_maywrite()
        {
            let delta = if opened { 1 } else { -1 };
            let object = file.object();
            let writable = &mut self.followed().writable;
            match writable
                .iter_mut()
                .find(|(known, _)| Arc::ptr_eq(known, object))
            {
                Some((_, sum)) => *sum += delta,
                None => writable.push((object.clone(), delta)),
            }
        }
        if let Some(event) = HugeEvent::of(placed, opened) {
            let events = &mut self.followed().huge;
            match events.iter().position(|other| event.undoes(other)) {
                Some(index) => drop(events.remove(index)),
                None => events.push(event),
            }
        }
        if let Some(hooks) = vma.hooks() {
            let opposite = |event: &HookEvent| {
                event.opened != opened && same_hooks(Some(&event.hooks), Some(hooks))
            };
            let events = &mut self.followed().hooks;
            match events.iter().position(opposite) {
                Some(index) => drop(events.remove(index)),
                None => events.push(HookEvent {
                    hooks: hooks.clone(),
                    range,
                    opened,
                }),
            }
        }
    }

    fn followed(&mut self) -> &mut Followed {
        self.changes.followed.get_or_insert_default()
    }

    /// Sets the content of a range. What was there is out of the totals already.
    fn put(&mut self, start: u64, end: u64, pieces: Pieces) {
        for piece in &pieces {
            self.account(piece.start, piece.end, &piece.vma);
        }
        self.add_window(start, end, pieces);
    }

    /// Adds a VMA to the totals.
    #[inline]
    fn account(&mut self, start: u64, end: u64, vma: &Vma) {
        let count = self.pages.count(end - start);
        self.changes.totals.add(vma.flags(), count);
        self.changes.guards |= vma.start_gap() > 0;
        if vma.file().is_some() || vma.extras().is_some() {
            self.follow(vma, VmRange::new(start, end), true);
        }
    }

    #[inline]
    fn add_window(&mut self, start: u64, end: u64, pieces: Pieces) {
        if self.edited {
            self.join_windows(start, end, pieces);
        } else {
            self.edited = true;
            self.changes.windows.push(Window { start, end, pieces });
        }
    }

    /// Adds a window to others (A1).
    #[inline(never)]
    fn join_windows(&mut self, start: u64, end: u64, pieces: Pieces) {
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
        let mut merged = Window {
            start,
            end,
            pieces: Pieces::new(),
        };
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

    /// Gives the whole VMA at `addr` flags that merging doesn't compare.
    pub(in crate::space) fn add_sticky(&mut self, addr: u64, flags: VmaFlags) {
        let Some(vma) = self.find(addr).filter(|vma| !vma.flags().contains(flags)) else {
            return;
        };
        let (start, end) = (vma.start, vma.end);
        let changed = vma.vma.clone().with_flags(vma.flags() | flags);
        self.replace(start, end, one(start, end, changed));
    }

    /// Splits the VMA that holds `at` inside, if there is one. No limit is tested (`__split_vma`).
    pub(in crate::space) fn split(&mut self, at: u64) -> Result<(), SplitError> {
        let Some(vma) = self.find(at).filter(|vma| vma.start < at) else {
            return Ok(());
        };
        let between_pages = |size: u64| at.is_multiple_of(size);
        let whole = vma.vma.huge_page_size().is_none_or(between_pages);
        let hooks = vma.vma.hooks();
        if !whole || hooks.is_some_and(|hooks| !hooks.may_split(vma.range(), at)) {
            return Err(SplitError::Refused {
                vma: vma.range(),
                at,
            });
        }
        let (start, end) = (vma.start, vma.end);
        let low = Piece::new(start, at, vma.vma.clone());
        let high = Piece::new(at, end, vma.tail(at));
        self.changes.stats.splits += 1;
        self.replace(start, end, smallvec::smallvec![low, high]);
        Ok(())
    }

    /// Splits where the limit on the number of mappings applies (`split_vma`).
    pub(in crate::space) fn split_limited(&mut self, at: u64) -> Result<(), SplitError> {
        if self.find(at).is_some_and(|vma| vma.start < at) {
            check_split(self.totals(), self.config)?;
        }
        self.split(at)
    }

    /// Gives the part `[start, end)` of the VMA that holds it other attributes, merging or splitting
    /// (`vma_modify`). Returns the end of the VMA that the part belongs to now.
    ///
    /// A split at `start` stays when the one at `end` fails, as in Linux.
    pub(in crate::space) fn modify(
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
        let other_rights = (flags ^ middle.flags()).intersects(VmaFlags::ACCESS);
        let (middle_start, middle_end) = (middle.start, middle.end);
        let (at_start, at_end) = (start == middle_start, end == middle_end);
        let part = middle
            .tail(start)
            .with_flags(flags)
            .with_extras(extras.cloned());
        if at_start || at_end {
            let before = middle.vma.clone();
            let kind = Kind::Existing {
                at_start,
                at_end,
                has_close: middle.vma.has_close(),
            };
            if let Some(new_end) = self.merge_existing(
                &before,
                VmRange::new(middle_start, middle_end),
                start,
                end,
                &part,
                kind,
            ) {
                self.note_rights(other_rights, start, end);
                return Ok(new_end);
            }
        }
        self.split_limited(start)?;
        self.split_limited(end)?;
        self.replace(start, end, one(start, end, part));
        self.note_rights(other_rights, start, end);
        Ok(end)
    }

    /// What may be done with the pages of a range is another thing from now on.
    fn note_rights(&mut self, changed: bool, start: u64, end: u64) {
        if changed {
            self.note_pages(PageChange::Protect { start, end });
        }
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
                pieces.push(Piece::new(prev.start, end, prev.vma.clone().absorb(part)));
                if end < whole.end {
                    let skipped = self.pages.count(end - whole.start);
                    let rest = middle
                        .clone()
                        .with_pgoff(middle.pgoff().wrapping_add(skipped));
                    pieces.push(Piece::new(end, whole.end, rest));
                }
                (prev.start, whole.end, end)
            }
            (Merge::Right, _, Some(next)) => {
                if whole.start < start {
                    pieces.push(Piece::new(whole.start, start, middle.clone()));
                }
                let grown = next.vma.clone().with_pgoff(part.pgoff()).absorb(part);
                pieces.push(Piece::new(start, next.end, grown));
                (whole.start, next.end, next.end)
            }
            (Merge::Both, Some(prev), Some(next)) => {
                let grown = prev.vma.clone().absorb(next.vma).absorb(part);
                pieces.push(Piece::new(prev.start, next.end, grown));
                (prev.start, next.end, next.end)
            }
            _ => return None,
        };
        self.count_merge(merge);
        self.replace(from, to, pieces);
        Some(result)
    }
}
