//! Disjoint half-open `u64` ranges under read-copy-update.
//!
//! A [`RangeTree`] is a B+ tree of fan-out 15 whose leaves hold start and end of each entry, and a
//! pointer to its value. Two halves share it: the tree itself, which any number of readers search under
//! a [`Guard`], and the [`Writer`], of which there is one and which belongs inside a lock.
//!
//! ```
//! use vma_rcu::{reclaim::Domain, tree::{RangeTree, Record}};
//!
//! struct Name(&'static str);
//! impl Record for Name {}
//!
//! let domain = Domain::default();
//! let (tree, mut writer) = RangeTree::new(&domain);
//!
//! let mut edit = tree.write(&mut writer);
//! edit.splice(0x1000..0x4000, [(0x1000..0x2000, Name("text")), (0x2000..0x4000, Name("data"))])?;
//! edit.prepare()?.commit();
//!
//! let reader = domain.register();
//! let guard = reader.pin();
//! let found = tree.find(0x2fff, &guard).unwrap();
//! assert_eq!((found.start, found.end, found.value.0), (0x2000, 0x4000, "data"));
//! # Ok::<(), vma_rcu::tree::EditError>(())
//! ```
//!
//! # Consistency
//!
//! A transaction is published by one store, at the lowest node that all of its edits are below. A lookup
//! sees the tree of one instant within the call. An iteration sees each transaction wholly or not at
//! all, its entries ascend and never overlap; a transaction that commits meanwhile may be seen or not,
//! and a later one may be seen without an earlier one elsewhere. A [`Snapshot`] is the tree of one
//! instant.
//!
//! A reader who needs an entry to stay for longer than an instant [locks](RangeTree::lock) it: that touches the
//! entry's own lock word alone and never waits; a writer waits for the readers of the entries that it takes out.
//!
//! # Cost
//!
//! A reader's steps are bounded by the height (16 lanes per level, 4 levels for 20,000 entries). A
//! transaction within one leaf copies that leaf; one that moves the end of a leaf's last entry copies the
//! way up to the node that holds it as a pivot; splits and merges copy the parent.

mod build;
mod check;
mod gap;
mod lanes;
mod lock;
mod node;
mod pool;
mod read;
mod rebuild;
mod repack;
mod scratch;
mod search;
mod slab;
mod within;
mod write;

#[cfg(test)]
#[path = "../../tests/tree_model/mod.rs"]
mod small_nodes;

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

pub use self::check::Broken;
pub use self::gap::GapRequest;
pub use self::lock::{Busy, Locked};
use self::node::Root;
use self::pool::Recycler;
pub use self::read::Iter;
pub use self::write::{Committed, Prepared, Transaction, Writer};
use crate::reclaim::{Domain, Guard, Queue};
use crate::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Arc, Bell, Mutex, planted};

/// Largest end of an entry. (The two numbers above mean "unused" and "beyond everything".)
pub const MAX_END: u64 = u64::MAX - 1;

/// The ordering of the store that publishes a transaction. Release: pairs with the acquire loads of a
/// descent, so that whoever sees the pointer sees the node.
#[inline(always)]
fn publish_ordering() -> Ordering {
    if planted("relaxed_publish") {
        Ordering::Relaxed
    } else {
        Ordering::Release
    }
}

/// In debug builds the checker runs after each so many transactions.
#[cfg(debug_assertions)]
const CHECK_EVERY: u64 = if cfg!(test) { 1 } else { 64 };

/// What a tree needs to know of a value.
pub trait Record: Send + Sync + 'static {
    /// Bytes that stay free below the entry when a gap is searched for (a stack's guard gap). Asked once,
    /// when the value is given to a transaction.
    fn start_gap(&self) -> u64 {
        0
    }
}

/// An entry as a reader finds it: copied range, borrowed value.
#[derive(Debug)]
pub struct Entry<'g, T> {
    /// First address.
    pub start: u64,
    /// First address after it.
    pub end: u64,
    /// The value.
    pub value: &'g T,
}

impl<T> Clone for Entry<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Entry<'_, T> {}

impl<T> Entry<'_, T> {
    /// `start..end`.
    pub fn range(&self) -> Range<u64> {
        self.start..self.end
    }
}

/// Why an edit can't be made. The tree is as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EditError {
    /// An empty or reversed range, or one that ends beyond [`MAX_END`].
    BadRange {
        /// Its start.
        start: u64,
        /// Its end.
        end: u64,
    },
    /// Entries or windows that overlap, aren't sorted, or an entry outside of its window.
    OutOfOrder {
        /// The one that doesn't fit.
        range: Range<u64>,
    },
    /// An entry of the tree lies across the border of a window.
    Straddles {
        /// The window, or the part of it that one node saw.
        window: Range<u64>,
        /// Start of the entry.
        start: u64,
        /// Its end.
        end: u64,
    },
    /// Memory ran out.
    OutOfMemory,
}

impl fmt::Display for EditError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EditError::BadRange { start, end } => {
                write!(
                    f,
                    "{start:#x}..{end:#x} is empty, reversed or ends beyond {MAX_END:#x}"
                )
            }
            EditError::OutOfOrder { range } => write!(
                f,
                "{:#x}..{:#x} overlaps another range, comes before one, or leaves its window",
                range.start, range.end
            ),
            EditError::Straddles { window, start, end } => write!(
                f,
                "the entry {start:#x}..{end:#x} lies across the border of the window {:#x}..{:#x}",
                window.start, window.end
            ),
            EditError::OutOfMemory => write!(f, "out of memory for nodes or records of the tree"),
        }
    }
}

impl std::error::Error for EditError {}

/// Disjoint ranges with a value each: the half that readers use.
///
/// Dropping it retires everything in it; values are dropped when the last guard that may see them has
/// gone.
pub struct RangeTree<T: Record> {
    /// Store-release by a commit ([`publish_ordering`]), load-acquire by readers. Model:
    /// `a_lookup_sees_old_or_new_and_never_freed_memory`.
    root: AtomicPtr<()>,
    domain: Domain,
    recycler: Arc<Recycler<T>>,
    /// Tells this tree's writer from others'.
    id: u64,
    /// Nodes born before belong to a snapshot (T6). Written under `&Writer`, read under `&mut Writer`:
    /// relaxed, the writer's lock orders it.
    floor: AtomicU64,
    /// Entries. As `floor`.
    len: AtomicUsize,
    /// End of the last entry, 0 without one. As `floor`.
    last_end: AtomicU64,
    /// Rung by the last reader of an entry that the writer waits for.
    excluding: Mutex<Option<Bell>>,
    marker: PhantomData<T>,
}

/// Numbers trees: relaxed, only uniqueness matters.
static NEXT_ID: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);

impl<T: Record> RangeTree<T> {
    /// An empty tree and its writer.
    ///
    /// Ends the process when memory for the list of retired objects (1 KiB) runs out, as `Box::new`
    /// does.
    pub fn new(domain: &Domain) -> (RangeTree<T>, Writer<T>) {
        let recycler = Arc::new(Recycler::<T>::new());
        let made = Queue::try_new(Arc::clone(&recycler), domain.counters());
        let Some((queue, producer)) = made else {
            std::alloc::handle_alloc_error(std::alloc::Layout::new::<[usize; 128]>())
        };
        domain.adopt(Arc::clone(&queue) as _);
        let id = NEXT_ID.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let tree = RangeTree {
            root: AtomicPtr::new(Root::EMPTY.0),
            domain: domain.clone(),
            recycler,
            id,
            floor: AtomicU64::new(0),
            len: AtomicUsize::new(0),
            last_end: AtomicU64::new(0),
            excluding: Mutex::new(None),
            marker: PhantomData,
        };
        (tree, Writer::new(id, domain.clone(), queue, producer))
    }

    /// The domain that retired nodes and values belong to.
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    #[inline(always)]
    fn root(&self, ordering: Ordering) -> Root {
        Root(self.root.load(ordering))
    }

    /// The root for a reader.
    ///
    /// # Panics
    ///
    /// When the guard is of another domain: it would protect nothing here (R4).
    #[inline(always)]
    fn protected_root(&self, guard: &Guard<'_>) -> Root {
        assert!(
            guard.protects(&self.domain),
            "the guard is of another domain"
        );
        self.root(Ordering::Acquire)
    }

    fn assert_own(&self, writer: u64) {
        assert!(writer == self.id, "the writer is another tree's");
    }

    /// The entry that contains `addr`.
    ///
    /// It was there at an instant within the call. No lock, no retry, no store; after
    /// [`register`](Domain::register) nothing is allocated. Async-signal-safe.
    ///
    /// # Panics
    ///
    /// When `guard` is of another domain. So do all lookups.
    #[inline]
    pub fn find<'g>(&self, addr: u64, guard: &'g Guard<'_>) -> Option<Entry<'g, T>> {
        let root = self.protected_root(guard);
        // SAFETY: T7: the guard is this domain's and lives for 'g.
        unsafe { read::find(root, addr) }
    }

    /// The first entry that ends above `addr`: the one that contains it or else the next (Linux's
    /// `find_vma`). Guarantees as for [`find`](Self::find).
    #[inline]
    pub fn find_next<'g>(&self, addr: u64, guard: &'g Guard<'_>) -> Option<Entry<'g, T>> {
        let root = self.protected_root(guard);
        // SAFETY: T7: the guard is this domain's and lives for 'g.
        unsafe { read::find_next(root, addr) }
    }

    /// The last entry that ends at or below `addr`.
    ///
    /// When it lies in another leaf than `addr` does, the two are read one after the other, as by an
    /// iteration: see [Consistency](self#consistency). Otherwise as for [`find`](Self::find).
    pub fn find_prev<'g>(&self, addr: u64, guard: &'g Guard<'_>) -> Option<Entry<'g, T>> {
        let root = self.protected_root(guard);
        // SAFETY: T7: the guard is this domain's and lives for 'g.
        unsafe { read::find_prev(root, addr) }
    }

    /// The entries in ascending order, from the first that ends above `from`. What it sees of
    /// transactions that commit meanwhile is said in [Consistency](self#consistency).
    pub fn iter<'g>(&self, from: u64, guard: &'g Guard<'_>) -> Iter<'g, T> {
        let root = self.protected_root(guard);
        // SAFETY: T7: the guard is this domain's and lives for 'g.
        unsafe { Iter::new(root, from) }
    }

    /// Reading with the writer at hand: the layout is stable, no guard is needed.
    ///
    /// # Panics
    ///
    /// When `writer` is another tree's.
    pub fn locked<'a>(&'a self, writer: &'a Writer<T>) -> View<'a, T> {
        self.assert_own(writer.tree);
        View {
            tree: self,
            sequence: writer.sequence,
        }
    }

    /// Starts a transaction.
    ///
    /// # Panics
    ///
    /// When `writer` is another tree's.
    pub fn write<'a>(&'a self, writer: &'a mut Writer<T>) -> Transaction<'a, T> {
        Transaction::new(self, writer)
    }
}

impl<T: Record> Drop for RangeTree<T> {
    fn drop(&mut self) {
        let root = self.root(Ordering::Relaxed);
        if root.is_empty() {
            return;
        }
        let made = Queue::try_new(Arc::clone(&self.recycler), self.domain.counters());
        // Without memory for the list what is in the tree is leaked.
        let Some((queue, mut producer)) = made else {
            return;
        };
        let (mut count, mut bytes) = (0, 0);
        // SAFETY: T7: the tree is ours. The nodes are only read here.
        unsafe {
            write::gather::<T>(root, &mut |word| {
                if producer.reserve(1).is_ok() {
                    producer.push(word);
                    count += 1;
                    bytes += pool::word_bytes::<T>(word);
                }
            });
        }
        producer.publish(&queue, count, bytes);
        // Adopted first: else the mark that `close` raises could be spent before the queue is seen.
        self.domain.adopt(Arc::clone(&queue) as _);
        producer.close(&queue);
    }
}

impl<T: Record> fmt::Debug for RangeTree<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RangeTree")
            .field("id", &self.id)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// Everything that may be asked while the layout is stable.
#[derive(Debug)]
pub struct View<'a, T: Record> {
    tree: &'a RangeTree<T>,
    sequence: u64,
}

impl<T: Record> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Record> Copy for View<'_, T> {}

impl<'a, T: Record> View<'a, T> {
    fn root(self) -> Root {
        self.tree.root(Ordering::Relaxed)
    }

    fn last_end(self) -> u64 {
        self.tree.last_end.load(Ordering::Relaxed)
    }

    /// Number of entries.
    pub fn len(self) -> usize {
        self.tree.len.load(Ordering::Relaxed)
    }

    /// No entry at all?
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The entry that contains `addr`.
    #[inline]
    pub fn find(self, addr: u64) -> Option<Entry<'a, T>> {
        // SAFETY: T7: the writer is borrowed for 'a.
        unsafe { read::find(self.root(), addr) }
    }

    /// The first entry that ends above `addr`.
    #[inline]
    pub fn find_next(self, addr: u64) -> Option<Entry<'a, T>> {
        // SAFETY: T7: the writer is borrowed for 'a.
        unsafe { read::find_next(self.root(), addr) }
    }

    /// The last entry that ends at or below `addr`.
    pub fn find_prev(self, addr: u64) -> Option<Entry<'a, T>> {
        // SAFETY: T7: the writer is borrowed for 'a.
        unsafe { read::find_prev(self.root(), addr) }
    }

    /// [`find_prev`](Self::find_prev) and [`find_next`](Self::find_next) at the cost of one of them.
    #[inline]
    pub fn neighbours(self, addr: u64) -> (Option<Entry<'a, T>>, Option<Entry<'a, T>>) {
        // SAFETY: T7: the writer is borrowed for 'a.
        unsafe { read::neighbours(self.root(), addr) }
    }

    /// The entries in ascending order, from the first that ends above `from`.
    pub fn iter(self, from: u64) -> Iter<'a, T> {
        // SAFETY: T7: the writer is borrowed for 'a.
        unsafe { Iter::new(self.root(), from) }
    }

    /// Lowest free range that satisfies `request`, in O(log n).
    pub fn lowest_gap(self, request: &GapRequest) -> Option<u64> {
        // SAFETY: T7: the writer is borrowed for 'a.
        unsafe { gap::lowest::<T>(self.root(), self.last_end(), request) }
    }

    /// Highest free range that satisfies `request`, in O(log n).
    pub fn highest_gap(self, request: &GapRequest) -> Option<u64> {
        // SAFETY: T7: the writer is borrowed for 'a.
        unsafe { gap::highest::<T>(self.root(), self.last_end(), request) }
    }

    /// The tree of this instant, to be read later without the writer.
    ///
    /// From here on the first transaction that changes a node of the snapshot copies it and all above
    /// it. While the snapshot lives, its guard keeps retired memory from being freed.
    pub fn snapshot<'g>(self, guard: &'g Guard<'_>) -> Snapshot<'g, T> {
        let root = self.tree.protected_root(guard);
        self.tree
            .floor
            .fetch_max(self.sequence + 1, Ordering::Relaxed);
        let domain = self.tree.domain.clone();
        domain.inner().snapshots.fetch_add(1, Ordering::Relaxed);
        Snapshot {
            root,
            len: self.len(),
            domain,
            marker: PhantomData,
        }
    }

    /// Checks every structural invariant.
    ///
    /// # Errors
    ///
    /// The first one that doesn't hold.
    pub fn check(self) -> Result<(), Broken> {
        // SAFETY: T7: the writer is borrowed for 'a.
        unsafe { check::check::<T>(self.root(), self.len(), self.last_end(), self.sequence) }
    }
}

/// A tree of one instant.
pub struct Snapshot<'g, T: Record> {
    root: Root,
    len: usize,
    domain: Domain,
    marker: PhantomData<&'g T>,
}

impl<'g, T: Record> Snapshot<'g, T> {
    /// Number of entries.
    pub fn len(&self) -> usize {
        self.len
    }

    /// No entry at all?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The entry that contains `addr`.
    pub fn find(&self, addr: u64) -> Option<Entry<'g, T>> {
        // SAFETY: T7: the guard lives for 'g, and everything below the root was reachable under it.
        unsafe { read::find(self.root, addr) }
    }

    /// The first entry that ends above `addr`.
    pub fn find_next(&self, addr: u64) -> Option<Entry<'g, T>> {
        // SAFETY: as for `find`.
        unsafe { read::find_next(self.root, addr) }
    }

    /// The last entry that ends at or below `addr`.
    pub fn find_prev(&self, addr: u64) -> Option<Entry<'g, T>> {
        // SAFETY: as for `find`.
        unsafe { read::find_prev(self.root, addr) }
    }

    /// The entries in ascending order, from the first that ends above `from`.
    pub fn iter(&self, from: u64) -> Iter<'g, T> {
        // SAFETY: as for `find`.
        unsafe { Iter::new(self.root, from) }
    }
}

impl<T: Record> Drop for Snapshot<'_, T> {
    fn drop(&mut self) {
        self.domain
            .inner()
            .snapshots
            .fetch_sub(1, Ordering::Relaxed);
    }
}

impl<T: Record> fmt::Debug for Snapshot<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
