//! Write transactions: edits, prepare, commit, retire.

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;

use super::gap;
use super::lanes::Lanes;
use super::node::{Leaf, Root, Slot};
use super::pool::{Pool, Recycler, node_bytes, record_bytes, record_word};
use super::rebuild::Rebuild;
use super::scratch::{Scratch, push};
use super::search::Portable;
use super::{EditError, Entry, MAX_END, RangeTree, Record, View, read};
use crate::reclaim::{Domain, Panic, Producer, Queue, keep_first};
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use crate::wait::{GaveUp, Wait};

/// The right to change one tree, and what changing takes: pools, the list of retired objects, scratch.
///
/// Keep it inside the lock that orders the tree's writers. `&Writer` means that the layout is stable,
/// `&mut Writer` that it may be changed.
pub struct Writer<T: Record> {
    pub(super) tree: u64,
    /// Kept alive: it frees what this writer retires.
    #[expect(dead_code, reason = "held for its destructor")]
    domain: Domain,
    pub(super) pool: Pool<T>,
    producer: Producer,
    pub(super) sequence: u64,
    edits: Vec<Edit>,
    news: Vec<New<T>>,
    pub(super) scratch: Scratch<T>,
    stage: Stage,
}

// SAFETY: the pointers in `news` and `scratch` are to records and nodes that belong to the writer's
// tree; records are `Send + Sync` (`Record`), nodes are words, atomics and pointers to the two.
unsafe impl<T: Record> Send for Writer<T> {}
// SAFETY: as above; a shared reference reads `sequence` and `tree` alone.
unsafe impl<T: Record> Sync for Writer<T> {}

/// Elements that a list keeps room for between transactions, at most.
const KEEP: usize = 256;

/// How far the current transaction has come. A transaction that was forgotten instead of dropped leaves
/// its stage behind, and the next one cleans up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Idle,
    Open,
    Committed,
}

/// Entries `first..first + count` of the new ones take the place of whatever is in `lo..hi`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Edit {
    pub(super) lo: u64,
    pub(super) hi: u64,
    pub(super) first: usize,
    pub(super) count: usize,
}

/// An entry that isn't in the tree yet.
pub(super) struct New<T> {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) record: NonNull<T>,
    pub(super) guarded: bool,
}

impl<T> New<T> {
    #[inline]
    pub(super) fn slot(&self) -> Slot<T> {
        Slot {
            start: self.start,
            record: self.record.as_ptr(),
        }
    }
}

impl<T: Record> Writer<T> {
    pub(super) fn new(
        tree: u64,
        domain: Domain,
        queue: Arc<Queue<Arc<Recycler<T>>>>,
        producer: Producer,
    ) -> Self {
        Writer {
            tree,
            domain,
            pool: Pool::new(queue),
            producer,
            sequence: 0,
            edits: Vec::new(),
            news: Vec::new(),
            scratch: Scratch::new(),
            stage: Stage::Idle,
        }
    }

    /// Makes the `n`-th allocation from now on, and all later ones, fail (0: the next). `None`: no more.
    #[cfg(any(test, feature = "fault-injection"))]
    pub fn fail_allocation(&mut self, n: Option<usize>) {
        self.pool.fail_after = n;
    }

    /// Allocates the record of a new entry.
    #[inline]
    fn adopt(&mut self, range: &Range<u64>, value: T) -> Result<(), EditError> {
        let start_gap = value.start_gap();
        let Ok(record) = self.pool.record(value, start_gap) else {
            return Err(EditError::OutOfMemory);
        };
        let new = New {
            start: range.start,
            end: range.end,
            record,
            guarded: start_gap > 0,
        };
        let pushed = push(&mut self.news, new);
        if pushed.is_err() {
            // SAFETY: R1: never published, ours alone, and in no list.
            unsafe { self.pool.drop_record(record.as_ptr()) };
        }
        Ok(pushed?)
    }

    /// Drops the new entries from index `keep` on, all of them even if a destructor panics.
    fn disown(&mut self, keep: usize) {
        if let Some(panic) = self.try_disown(keep) {
            resume_unwind(panic);
        }
    }

    fn try_disown(&mut self, keep: usize) -> Option<Panic> {
        let mut first = None;
        while self.news.len() > keep
            && let Some(new) = self.news.pop()
        {
            let pool = &mut self.pool;
            let result = catch_unwind(AssertUnwindSafe(|| {
                // SAFETY: R1: never published, ours alone, and out of the list.
                unsafe { pool.drop_record(new.record.as_ptr()) };
            }));
            keep_first(&mut first, result.err());
        }
        first
    }

    /// Undoes whatever stage a transaction has reached short of its commit; finishes one that reached
    /// it.
    #[inline]
    fn wind_up(&mut self) {
        match self.stage {
            Stage::Idle => return,
            Stage::Open => self.undo(),
            Stage::Committed => self.retire(),
        }
        self.stage = Stage::Idle;
    }

    #[cold]
    fn undo(&mut self) {
        for (node, _) in self.scratch.made.drain(..) {
            self.pool.give_node(node);
        }
        self.scratch.clear();
        self.edits.clear();
        self.stage = Stage::Idle;
        self.disown(0);
    }

    /// Gives up what a large transaction has made the lists grow to.
    #[cold]
    fn trim(&mut self) {
        self.news.shrink_to(KEEP);
        self.edits.shrink_to(KEEP);
        self.scratch = Scratch::new();
    }

    /// Fills the scratch with what the edits do to the tree.
    #[inline(always)]
    fn prepare<S: Lanes>(&mut self, tree: &RangeTree<T>) -> Result<(), EditError> {
        if self.edits.len() > 1 {
            sort(&mut self.edits)?;
        }
        let (mut rebuild, edits) = rebuild(tree, self);
        rebuild.run::<S>(tree.root(Ordering::Relaxed), edits)?;
        let retired = self.scratch.dead.len() + self.scratch.leaving;
        let reserved = self.producer.reserve(retired);
        reserved.map_err(|()| EditError::OutOfMemory)?;
        self.scratch.added = self.news.len();
        // What lies below the end of the last entry doesn't move it.
        let old_end = tree.last_end.load(Ordering::Relaxed);
        self.scratch.end_moves = self.edits.last().is_some_and(|edit| edit.hi >= old_end);
        Ok(())
    }

    /// Hands over what the commit took out. The list has room: `prepare` saw to it.
    #[inline]
    fn retire(&mut self) {
        let nodes = self.scratch.dead.len();
        let records = self.scratch.leaving;
        let count = nodes + records;
        if count > 0 {
            let scratch = &self.scratch;
            if let Some(room) = self.producer.take_room(count) {
                let mut room = room.iter();
                scratch.each_retired(|word| {
                    if let Some(slot) = room.next() {
                        slot.store(word, Ordering::Relaxed);
                    }
                });
            } else {
                push_each(scratch, &mut self.producer);
            }
            let bytes = nodes * node_bytes::<T>() + records * record_bytes::<T>();
            self.producer.publish(self.pool.queue(), count, bytes);
        }
        self.scratch.clear();
        let grown = self.news.capacity().max(self.scratch.capacity());
        if count.max(grown) > KEEP {
            self.trim();
        }
    }
}

/// Retires what doesn't fit into one segment.
#[cold]
fn push_each<T>(scratch: &Scratch<T>, producer: &mut Producer) {
    scratch.each_retired(|word| producer.push(word));
}

/// Drops what a `splice` has adopted, unless it comes to its end.
struct Adopted<'w, T: Record> {
    writer: &'w mut Writer<T>,
    /// Index of its first new entry.
    first: usize,
}

impl<T: Record> Drop for Adopted<'_, T> {
    #[cold]
    fn drop(&mut self) {
        let panic = self.writer.try_disown(self.first);
        rethrow(panic);
    }
}

/// Goes on with a destructor's panic, unless there is one under way already.
fn rethrow(panic: Option<Panic>) {
    if let Some(panic) = panic {
        if std::thread::panicking() {
            // What it carries isn't dropped: its destructor could panic as well.
            std::mem::forget(panic);
        } else {
            resume_unwind(panic);
        }
    }
}

impl<T: Record> fmt::Debug for Writer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writer")
            .field("tree", &self.tree)
            .field("sequence", &self.sequence)
            .finish_non_exhaustive()
    }
}

/// What the three stages of a transaction share.
struct Session<'a, T: Record> {
    tree: &'a RangeTree<T>,
    writer: &'a mut Writer<T>,
}

impl<T: Record> Drop for Session<'_, T> {
    fn drop(&mut self) {
        self.writer.wind_up();
    }
}

/// Edits that will become visible together.
///
/// Dropping it changes nothing; values that were given to it are dropped then.
#[must_use = "a transaction does nothing until it is prepared and committed"]
pub struct Transaction<'a, T: Record> {
    session: Session<'a, T>,
}

impl<'a, T: Record> Transaction<'a, T> {
    pub(super) fn new(tree: &'a RangeTree<T>, writer: &'a mut Writer<T>) -> Self {
        tree.assert_own(writer.tree);
        writer.wind_up();
        writer.stage = Stage::Open;
        Transaction {
            session: Session { tree, writer },
        }
    }

    /// The layout before the transaction; edits aren't visible in it.
    pub fn view(&self) -> View<'_, T> {
        self.session.tree.locked(self.session.writer)
    }

    /// Everything in `window` leaves the tree, and `entries` come in: sorted, disjoint, non-empty,
    /// within the window. So an insertion has a window without entries, a removal no entries, and a
    /// split or a resize both. Entries of the tree must lie wholly inside the window or outside of it.
    ///
    /// The windows of one transaction are disjoint; their order doesn't matter.
    ///
    /// # Errors
    ///
    /// [`EditError::BadRange`] for an empty or reversed range or one beyond [`MAX_END`],
    /// [`EditError::OutOfOrder`] for entries that overlap, aren't sorted or leave the window,
    /// [`EditError::OutOfMemory`]. The transaction is then as it was before the call. What depends on the
    /// tree or on other windows is found by [`prepare`](Self::prepare).
    pub fn splice(
        &mut self,
        window: Range<u64>,
        entries: impl IntoIterator<Item = (Range<u64>, T)>,
    ) -> Result<(), EditError> {
        check(&window)?;
        let writer = &mut *self.session.writer;
        let first = writer.news.len();
        let adopted = Adopted { writer, first };
        let writer = &mut *adopted.writer;
        let mut floor = window.start;
        for (range, value) in entries {
            if range.start < floor || range.start >= range.end || range.end > window.end {
                check(&range)?;
                return Err(EditError::OutOfOrder { range });
            }
            floor = range.end;
            writer.adopt(&range, value)?;
        }
        let edit = Edit {
            lo: window.start,
            hi: window.end,
            first,
            count: writer.news.len() - first,
        };
        push(&mut writer.edits, edit)?;
        std::mem::forget(adopted);
        Ok(())
    }

    /// Bulk build: `entries` for an empty tree.
    pub(super) fn fill(
        self,
        entries: impl IntoIterator<Item = (Range<u64>, T)>,
    ) -> Result<Prepared<'a, T>, EditError> {
        let session = self.session;
        let (mut rebuild, _) = rebuild(session.tree, session.writer);
        let added = rebuild.bulk(entries)?;
        let scratch = &mut session.writer.scratch;
        scratch.added = added;
        scratch.end_moves = true;
        Ok(Prepared { session })
    }

    /// Does everything that can fail. Nothing is visible yet.
    ///
    /// # Errors
    ///
    /// [`EditError::OutOfOrder`] when two windows overlap, [`EditError::Straddles`] when an entry of the
    /// tree lies across the border of a window, [`EditError::OutOfMemory`]. The tree is then as it was.
    pub fn prepare(self) -> Result<Prepared<'a, T>, EditError> {
        let mut session = self.session;
        session.prepare()?;
        Ok(Prepared { session })
    }
}

impl<T: Record> Session<'_, T> {
    #[inline(always)]
    fn prepare(&mut self) -> Result<(), EditError> {
        #[inline(never)]
        fn anywhere<T: Record>(
            tree: &RangeTree<T>,
            writer: &mut Writer<T>,
        ) -> Result<(), EditError> {
            writer.prepare::<Portable>(tree)
        }
        #[cfg(all(target_arch = "x86_64", not(any(test, loom, small_nodes))))]
        if super::search::available() {
            #[cfg_attr(not(target_feature = "avx2"), target_feature(enable = "avx2,popcnt"))]
            fn fast<T: Record>(
                tree: &RangeTree<T>,
                writer: &mut Writer<T>,
            ) -> Result<(), EditError> {
                writer.prepare::<super::search::Avx2>(tree)
            }
            #[cfg_attr(
                target_feature = "avx2",
                expect(unused_unsafe, reason = "needed where the build doesn't promise AVX2")
            )]
            // SAFETY: AVX2 is there.
            return unsafe { fast(self.tree, self.writer) };
        }
        anywhere(self.tree, self.writer)
    }
}

/// Puts the edits in order.
fn sort(edits: &mut [Edit]) -> Result<(), EditError> {
    edits.sort_unstable_by_key(|edit| edit.lo);
    match edits.array_windows().find(|[a, b]| a.hi > b.lo) {
        Some([_, b]) => Err(EditError::OutOfOrder { range: b.lo..b.hi }),
        None => Ok(()),
    }
}

/// A run over the tree, numbered as the next transaction, and the edits.
fn rebuild<'w, T: Record>(
    tree: &RangeTree<T>,
    writer: &'w mut Writer<T>,
) -> (Rebuild<'w, T>, &'w [Edit]) {
    writer.sequence += 1;
    let rebuild = Rebuild {
        pool: &mut writer.pool,
        scratch: &mut writer.scratch,
        news: &writer.news,
        sequence: writer.sequence,
        floor: tree.floor.load(Ordering::Relaxed),
    };
    (rebuild, &writer.edits)
}

impl<T: Record> fmt::Debug for Transaction<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transaction")
            .field("edits", &self.session.writer.edits)
            .finish_non_exhaustive()
    }
}

/// A transaction that can't fail any more. Dropping it changes nothing.
#[must_use = "nothing is visible before the commit"]
pub struct Prepared<'a, T: Record> {
    session: Session<'a, T>,
}

impl<'a, T: Record> Prepared<'a, T> {
    /// Makes all edits visible, by one store. Waits for the readers of locked entries ([`Locked`](super::Locked)) that
    /// it takes out.
    pub fn commit(self) -> Committed<'a, T> {
        match self.commit_with(Wait::forever()) {
            Ok(committed) => committed,
            Err(_) => unreachable!("nothing ends this wait early"),
        }
    }

    /// [`commit`](Self::commit), waiting for the readers as `wait` says.
    ///
    /// # Errors
    ///
    /// [`GaveUp`]: nothing has changed.
    #[inline]
    pub fn commit_with(self, wait: Wait<'_>) -> Result<Committed<'a, T>, GaveUp> {
        let Prepared { mut session } = self;
        // SAFETY: T7: in the tree until it is published below; the writer is ours.
        unsafe { session.tree.exclude(&session.writer.scratch.dead, wait) }?;
        session.publish();
        session.account();
        Ok(Committed { session })
    }
}

impl<T: Record> Session<'_, T> {
    /// The store. From here on the new nodes and records belong to the tree, come what may.
    fn publish(&mut self) {
        let Session { tree, writer } = self;
        let scratch = &writer.scratch;
        if let Some(value) = scratch.value {
            match scratch.slot {
                // SAFETY: T6, T7: a slot of a node that is in the tree; the writer is ours.
                Some(slot) => unsafe { slot.as_ref() }.store(value, super::publish_ordering()),
                None => tree.root.store(value, super::publish_ordering()),
            }
        }
        writer.stage = Stage::Committed;
        writer.news.clear();
        writer.edits.clear();
        writer.scratch.made.clear();
    }

    /// What only writers look at: cached gaps and totals.
    fn account(&mut self) {
        let Session { tree, writer } = self;
        let scratch = &writer.scratch;
        for (node, child, gap) in &scratch.gaps {
            // SAFETY: T7: a node above the slot, in the tree; the writer is ours.
            let node = unsafe { node.as_ref() };
            // SAFETY: T7: exclusively ours.
            unsafe { node.set_gap(*child, *gap) };
        }
        if scratch.shared_root || !scratch.refresh.is_empty() || scratch.end_moves {
            account_rest(tree, scratch, writer.sequence);
        }
        let len = tree.len.load(Ordering::Relaxed) + scratch.added - scratch.leaving;
        tree.len.store(len, Ordering::Relaxed);
        #[cfg(debug_assertions)]
        if !cfg!(loom) && writer.sequence.is_multiple_of(super::CHECK_EVERY) {
            let result = tree.locked(writer).check();
            debug_assert!(result.is_ok(), "{result:?}");
        }
    }
}

/// What most transactions don't come to: a root that is shared, a leaf that ends elsewhere, a new end of all.
#[cold]
fn account_rest<T: Record>(tree: &RangeTree<T>, scratch: &Scratch<T>, sequence: u64) {
    if scratch.shared_root {
        tree.floor.fetch_max(sequence, Ordering::Relaxed);
    }
    let root = tree.root(Ordering::Relaxed);
    for key in &scratch.refresh {
        // SAFETY: T7: the writer is the caller's.
        unsafe { gap::refresh::<T>(root, *key) };
    }
    if scratch.end_moves {
        // SAFETY: T7: as above.
        let last_end = unsafe { read::last_end::<T>(root) };
        tree.last_end.store(last_end, Ordering::Relaxed);
    }
}

impl<T: Record> fmt::Debug for Prepared<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared").finish_non_exhaustive()
    }
}

/// What a commit took out. When this is dropped the values are retired: they are dropped in turn after
/// their grace period, by whoever calls [`Domain::collect`](crate::reclaim::Domain::collect).
pub struct Committed<'a, T: Record> {
    session: Session<'a, T>,
}

impl<T: Record> Committed<'_, T> {
    /// The entries that were removed, in ascending order.
    pub fn removed(&self) -> impl ExactSizeIterator<Item = Entry<'_, T>> {
        let scratch = &self.session.writer.scratch;
        let dead = scratch.dead.iter();
        // SAFETY: R1: taken out but not retired before `self` is dropped.
        let entries = dead.flat_map(|dead| unsafe { dead.entries() });
        let entries = entries.map(|(end, slot)| Entry {
            start: slot.start,
            end,
            // SAFETY: as above.
            value: unsafe { &*slot.record },
        });
        Counted {
            entries,
            left: scratch.leaving,
        }
    }

    /// The layout after the commit.
    pub fn view(&self) -> View<'_, T> {
        self.session.tree.locked(self.session.writer)
    }
}

/// An iterator whose length is known.
struct Counted<I> {
    entries: I,
    left: usize,
}

impl<I: Iterator> Iterator for Counted<I> {
    type Item = I::Item;

    fn next(&mut self) -> Option<I::Item> {
        let next = self.entries.next()?;
        self.left -= 1;
        Some(next)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl<I: Iterator> ExactSizeIterator for Counted<I> {}

impl<T: Record> fmt::Debug for Committed<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Committed")
            .field("removed", &self.session.writer.scratch.leaving)
            .finish_non_exhaustive()
    }
}

impl<T: Record> Drop for Writer<T> {
    fn drop(&mut self) {
        // A transaction that was forgotten: its nodes are in the scratch, its records in `news`. One that
        // was forgotten after its commit still owes its dead to the list.
        match self.stage {
            Stage::Idle => {}
            Stage::Open => {
                for (node, _) in self.scratch.made.drain(..) {
                    self.pool.give_node(node);
                }
            }
            Stage::Committed => self.retire(),
        }
        let panic = self.try_disown(0);
        self.producer.close(self.pool.queue());
        rethrow(panic);
    }
}

pub(super) fn check(range: &Range<u64>) -> Result<(), EditError> {
    if range.start < range.end && range.end <= MAX_END {
        Ok(())
    } else {
        Err(EditError::BadRange {
            start: range.start,
            end: range.end,
        })
    }
}

/// The nodes and records of a whole tree that nobody can reach, as words for the disposer.
///
/// # Safety
///
/// R2: no reader can reach `root` or anything below it.
pub(super) unsafe fn gather<T: Record>(root: Root, give: &mut impl FnMut(*mut ())) {
    fn below<T: Record>(node: *mut (), height: usize, give: &mut impl FnMut(*mut ())) {
        if height == 0 {
            // SAFETY: T7, T2: in the tree that the caller owns.
            let leaf: &Leaf<T> = unsafe { super::node::leaf(node) };
            for slot in &leaf.slots[..leaf.len()] {
                give(record_word(slot.record));
            }
        } else {
            // SAFETY: as above.
            let inner = unsafe { super::node::inner(node) };
            for i in 0..inner.len() {
                below::<T>(inner.child(i), height - 1, give);
            }
        }
        give(super::pool::node_word(node, height));
    }
    if !root.is_empty() {
        below::<T>(root.node(), root.height(), give);
    }
}
