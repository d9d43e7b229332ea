//! Planning: the layout as a call is going to leave it, before anything is published.
//!
//! A [`Draft`] lies over the present layout. Edits replace whole VMAs inside *windows*; lookups see through
//! the windows to the base. A call plans on it step by step, as Linux does on the tree itself, and the sum
//! of the steps is published by one store. A call that fails half-way publishes the prefix that Linux
//! documents, or throws the draft away.

mod edit;

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;
use vma_rcu::tree::{Entry, View};

use crate::accounting::Totals;
use crate::addr::{Pages, VmRange};
use crate::backend::PageChange;
use crate::events::{Context, MonitorEvent};
use crate::file::{FileObject, MappingHooks, OpenFile};
use crate::flags::VmaFlags;
use crate::limits::SpaceConfig;
use crate::vma::{Placed, Vma};

use super::Stats;
use super::files::FileEdits;
use super::placement::Ground;

/// A VMA of a draft.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) vma: Vma,
}

impl Piece {
    #[inline]
    pub(super) fn new(start: u64, end: u64, vma: Vma) -> Self {
        Piece { start, end, vma }
    }
}

/// A call leaves one piece in its window, or none; only splits leave more.
type Pieces = SmallVec<[Piece; 1]>;

/// One piece.
#[inline]
pub(super) fn one(start: u64, end: u64, vma: Vma) -> Pieces {
    Pieces::from_buf([Piece::new(start, end, vma)])
}

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
#[derive(Debug)]
pub(super) struct Changes {
    pub(super) windows: SmallVec<[Window; 1]>,
    pub(super) totals: Totals,
    pub(super) stats: Stats,
    /// A mapping with a guard gap comes or goes.
    pub(super) guards: bool,
    /// Few calls have any.
    pub(super) followed: Option<Box<Followed>>,
    /// What happens to pages, in this order; not noted where nothing is behind mappings.
    pub(super) pages: Vec<PageChange>,
    /// Flags of all mappings that are unmapped.
    pub(super) gone: VmaFlags,
    /// What monitors are to be told, in this order.
    pub(super) told: Vec<(Arc<Context>, MonitorEvent)>,
    notes_pages: bool,
    /// There have been monitors.
    monitored: bool,
}

impl Changes {
    /// None; `totals` are those of the layout.
    #[inline]
    pub(super) fn new(totals: Totals, notes_pages: bool, monitored: bool) -> Self {
        Changes {
            windows: SmallVec::new(),
            totals,
            stats: Stats::default(),
            guards: false,
            followed: None,
            pages: Vec::new(),
            gone: VmaFlags::empty(),
            told: Vec::new(),
            notes_pages,
            monitored,
        }
    }
}

/// Who has to hear of mappings that come or go.
#[derive(Debug, Default)]
pub(super) struct Followed {
    pub(super) hooks: Vec<HookEvent>,
    /// Change of the number of writable shared mappings, per file.
    pub(super) writable: Vec<(Arc<FileObject>, i64)>,
    /// Mappings of huge pages.
    pub(super) huge: Vec<HugeEvent>,
    /// What comes and goes in the indexes of files.
    pub(super) files: FileEdits,
}

/// Huge pages that are mapped, or no longer.
#[derive(Debug)]
pub(super) struct HugeEvent {
    pub(super) file: Arc<OpenFile>,
    /// Their numbers in the file.
    pub(super) pages: Range<u64>,
    pub(super) opened: bool,
}

impl HugeEvent {
    pub(super) fn of(vma: Placed<'_>, opened: bool) -> Option<Self> {
        let pages = vma.huge_pages()?;
        let file = vma.file()?.clone();
        Some(HugeEvent {
            file,
            pages,
            opened,
        })
    }

    /// Both say the same of the same pages, one way and back.
    pub(super) fn undoes(&self, other: &HugeEvent) -> bool {
        self.opened != other.opened
            && self.pages == other.pages
            && Arc::ptr_eq(&self.file, &other.file)
    }
}

/// Gives back what the pages that are no longer mapped had reserved, and counts mappings.
#[cold]
pub(super) fn settle_huge(events: &[HugeEvent]) {
    for gone in events.iter().filter(|event| !event.opened) {
        let Some(huge) = gone.file.owned_huge().filter(|huge| huge.is_private()) else {
            continue;
        };
        let mut at = gone.pages.start;
        let mut kept: Vec<_> = events
            .iter()
            .filter(|event| event.opened && Arc::ptr_eq(&event.file, &gone.file))
            .map(|event| event.pages.clone())
            .collect();
        kept.sort_by_key(|pages| pages.start);
        for pages in kept {
            if at < pages.start.min(gone.pages.end) {
                huge.release(at..pages.start.min(gone.pages.end));
            }
            at = at.max(pages.end);
        }
        if at < gone.pages.end {
            huge.release(at..gone.pages.end);
        }
    }
    // Those that come first: a file whose last mapping is replaced by another has one.
    for opened in [true, false] {
        for event in events.iter().filter(|event| event.opened == opened) {
            event.file.object().count_huge_mapping(opened);
        }
    }
}

/// A search upwards in the base: what lies first above each address of `from..to`.
#[derive(Clone, Copy)]
struct Above<'a> {
    from: u64,
    to: u64,
    entry: Option<Entry<'a, Vma>>,
}

impl<'a> Above<'a> {
    /// Answers nothing.
    const UNASKED: Above<'a> = Above {
        from: u64::MAX,
        to: 0,
        entry: None,
    };

    fn new(from: u64, entry: Option<Entry<'a, Vma>>) -> Self {
        let to = entry.map_or(u64::MAX, |entry| entry.end);
        Above { from, to, entry }
    }
}

/// A search downwards in the base: its address, and the last VMA that ends at or below it.
type Below<'a> = Option<(u64, Option<Entry<'a, Vma>>)>;

pub(super) struct Draft<'a> {
    view: View<'a, Vma>,
    /// Starts of the base's mappings that keep a gap below them.
    guarded: &'a [u64],
    pub(super) config: &'a SpaceConfig,
    pub(super) pages: Pages,
    /// Last search upwards in the base, which doesn't change under the draft.
    above: Cell<Above<'a>>,
    /// Last search for both neighbours of an address in the base.
    below: Cell<Below<'a>>,
    /// Whether `changes` has windows.
    edited: bool,
    changes: &'a mut Changes,
}

impl<'a> Draft<'a> {
    pub(super) fn new(
        view: View<'a, Vma>,
        guarded: &'a [u64],
        config: &'a SpaceConfig,
        changes: &'a mut Changes,
    ) -> Self {
        Draft {
            view,
            guarded,
            config,
            pages: config.pages(),
            above: Cell::new(Above::UNASKED),
            below: Cell::new(None),
            edited: false,
            changes,
        }
    }

    /// Something happens to pages when this is published.
    #[inline]
    pub(super) fn note_pages(&mut self, change: PageChange) {
        if self.changes.notes_pages {
            self.changes.pages.push(change);
        }
    }

    /// Monitors hear of it when this is published.
    pub(super) fn tell(&mut self, monitor: Arc<Context>, event: MonitorEvent) {
        self.changes.told.push((monitor, event));
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
        !self.edited
    }

    /// The first VMA of the base that ends above `addr`. Calls ask for the same one several times.
    #[inline(always)]
    fn base_next(&self, addr: u64) -> Option<Entry<'a, Vma>> {
        let above = self.above.get();
        if above.from <= addr && addr < above.to {
            above.entry
        } else {
            self.look_above(addr)
        }
    }

    #[inline(never)]
    fn look_above(&self, addr: u64) -> Option<Entry<'a, Vma>> {
        let entry = self.view.find_next(addr);
        self.above.set(Above::new(addr, entry));
        entry
    }

    /// The last VMA of the base that ends at or below `addr`.
    #[inline(always)]
    fn base_prev(&self, addr: u64) -> Option<Entry<'a, Vma>> {
        if let Some((asked, entry)) = self.below.get()
            && asked == addr
        {
            return entry;
        }
        self.look_around(addr)
    }

    /// Searches the base on both sides of `addr` at once, for what will be asked about either, and returns what
    /// [`base_prev`](Self::base_prev) does.
    #[inline]
    pub(super) fn look_around(&self, addr: u64) -> Option<Entry<'a, Vma>> {
        let (below, above) = self.view.neighbours(addr);
        self.above.set(Above::new(addr, above));
        self.below.set(Some((addr, below)));
        below
    }

    /// The first VMA that ends above `addr` (Linux `find_vma`).
    #[inline(always)]
    pub(super) fn next(&self, addr: u64) -> Option<Placed<'_>> {
        if self.is_untouched() {
            let entry = self.base_next(addr)?;
            return Some(self.placed(entry.start, entry.end, entry.value));
        }
        self.next_edited(addr)
    }

    /// [`next`](Self::next) through the windows.
    #[inline(never)]
    fn next_edited(&self, addr: u64) -> Option<Placed<'_>> {
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
    #[inline(always)]
    pub(super) fn prev(&self, addr: u64) -> Option<Placed<'_>> {
        if self.is_untouched() {
            let entry = self.base_prev(addr)?;
            return Some(self.placed(entry.start, entry.end, entry.value));
        }
        self.prev_edited(addr)
    }

    /// [`prev`](Self::prev) through the windows.
    #[inline(never)]
    fn prev_edited(&self, addr: u64) -> Option<Placed<'_>> {
        let mut at = addr;
        for window in self.changes.windows.iter().rev() {
            if window.start >= at {
                continue;
            }
            if at > window.end
                && let Some(entry) = self.base_prev(at)
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
        let entry = self.base_prev(at)?;
        Some(self.placed(entry.start, entry.end, entry.value))
    }

    /// The VMA that holds `addr`.
    #[inline(always)]
    pub(super) fn find(&self, addr: u64) -> Option<Placed<'_>> {
        self.next(addr).filter(|vma| vma.start <= addr)
    }

    /// The first VMA that intersects the range.
    #[inline(always)]
    pub(super) fn first_in(&self, start: u64, end: u64) -> Option<Placed<'_>> {
        if start >= end {
            return None;
        }
        self.next(start).filter(|vma| vma.start < end)
    }

    #[inline(always)]
    fn placed<'p>(&self, start: u64, end: u64, vma: &'p Vma) -> Placed<'p> {
        Placed {
            start,
            end,
            vma,
            pages: self.pages,
        }
    }
}
