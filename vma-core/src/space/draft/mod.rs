//! Planning: the layout as a call is going to leave it, before anything is published.
//!
//! A [`Draft`] lies over the present layout. Edits replace whole VMAs inside *windows*; lookups see through
//! the windows to the base. A call plans on it step by step, as Linux does on the tree itself, and the sum
//! of the steps is published by one store. A call that fails half-way publishes the prefix that Linux
//! documents, or throws the draft away.

mod edit;

use std::cell::Cell;
use std::sync::Arc;

use smallvec::SmallVec;
use vma_rcu::tree::{Entry, View};

use crate::accounting::Totals;
use crate::addr::{Pages, VmRange};
use crate::file::{FileObject, MappingHooks};
use crate::limits::SpaceConfig;
use crate::vma::{Placed, Vma};

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

/// A call leaves one piece in its window, or none; only splits leave more.
type Pieces = SmallVec<[Piece; 1]>;

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
    /// A mapping with a guard gap comes or goes.
    pub(super) guards: bool,
    /// Change of the number of writable shared mappings, per file.
    pub(super) writable: Vec<(Arc<FileObject>, i64)>,
}

/// What a search of the base was asked, and found.
type Found<'a> = Cell<Option<(u64, Option<Entry<'a, Vma>>)>>;

pub(super) struct Draft<'a> {
    view: View<'a, Vma>,
    /// Starts of the base's mappings that keep a gap below them.
    guarded: &'a [u64],
    pub(super) config: &'a SpaceConfig,
    pub(super) pages: Pages,
    /// Last search upwards in the base, which doesn't change under the draft.
    cached: Found<'a>,
    /// Last answer of `adjacent_below`.
    below: Found<'a>,
    changes: Changes,
}

impl<'a> Draft<'a> {
    pub(super) fn new(
        view: View<'a, Vma>,
        guarded: &'a [u64],
        config: &'a SpaceConfig,
        totals: Totals,
    ) -> Self {
        Draft {
            view,
            guarded,
            config,
            pages: config.pages(),
            cached: Cell::new(None),
            below: Cell::new(None),
            changes: Changes {
                totals,
                ..Changes::default()
            },
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
        Ground {
            view: self.view,
            guarded: self.guarded,
            config: self.config,
        }
    }

    pub(super) fn is_untouched(&self) -> bool {
        self.changes.windows.is_empty()
    }

    /// The first VMA of the base that ends above `addr`. Calls ask for the same one several times.
    fn base_next(&self, addr: u64) -> Option<Entry<'a, Vma>> {
        if let Some((asked, entry)) = self.cached.get()
            && asked <= addr
            && entry.is_none_or(|entry| addr < entry.end)
        {
            return entry;
        }
        let entry = self.view.find_next(addr);
        self.cached.set(Some((addr, entry)));
        entry
    }

    /// The VMA that ends at `addr`, if one does: all that merging wants to know of what lies below.
    /// Where nothing does, the search has found what lies above as well, for [`next`](Self::next).
    pub(super) fn adjacent_below(&self, addr: u64) -> Option<Placed<'_>> {
        let last = addr.checked_sub(1)?;
        if !self.is_untouched() {
            return self.prev(addr).filter(|vma| vma.end == addr);
        }
        let entry = match self.below.get() {
            Some((asked, entry)) if asked == addr => entry,
            _ => {
                let entry = self.base_next(last).filter(|below| below.end == addr);
                self.below.set(Some((addr, entry)));
                entry
            }
        };
        entry.map(|below| self.placed(below.start, below.end, below.value))
    }

    /// The first VMA that ends above `addr` (Linux `find_vma`).
    pub(super) fn next(&self, addr: u64) -> Option<Placed<'_>> {
        let mut at = addr;
        for window in &self.changes.windows {
            if window.end <= at {
                continue;
            }
            if at < window.start
                && let Some(entry) = self.base_next(at)
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
        let entry = self.base_next(at)?;
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
            if let Some(piece) = index
                .checked_sub(1)
                .and_then(|index| window.pieces.get(index))
            {
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
        if start >= end {
            return None;
        }
        self.next(start).filter(|vma| vma.start < end)
    }

    fn placed<'p>(&self, start: u64, end: u64, vma: &'p Vma) -> Placed<'p> {
        Placed {
            start,
            end,
            vma,
            pages: self.pages,
        }
    }
}
