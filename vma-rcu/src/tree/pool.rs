//! Where nodes and records come from and go back to.
//!
//! The writer's own lists serve a transaction without a lock. What was retired comes back, after
//! its grace period, from whichever thread freed it, to the shared [`Recycler`]; the writer takes a
//! whole list of it when its own is empty. Below the lists are slabs.

use std::mem::needs_drop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use super::lock::LockWord;
use super::node::{Inner, Leaf, NodeMemory, NodePtr, RecordMemory, SLOT_LINES};
use super::scratch::reserve;
use super::search::prefetch;
use super::slab::Slab;
use crate::reclaim::{Dispose, Panic, Queue, keep_first};
use crate::sync::{Arc, Mutex};

/// Free objects that a list keeps, at most; the rest goes back to its slab.
const KEEP: usize = 512;

/// Marks a retired word as a record.
const RECORD_BIT: usize = 1;
/// Marks a retired word as an inner node (leaves have no mark).
const INNER_BIT: usize = 2;

/// Objects of one kind, without content.
struct Store<V> {
    list: Vec<NonNull<V>>,
    slab: Slab<V>,
}

// SAFETY: the memory in the list has no content: any thread may use or free it.
unsafe impl<V> Send for Store<V> {}

impl<V> Store<V> {
    const fn new() -> Self {
        Store {
            list: Vec::new(),
            slab: Slab::new(),
        }
    }

    /// # Safety
    ///
    /// `memory` came from this store, and nothing uses it any more.
    #[inline]
    unsafe fn give(&mut self, memory: NonNull<V>) {
        if self.list.len() < KEEP && reserve(&mut self.list, 1).is_ok() {
            self.list.push(memory);
        } else {
            // SAFETY: by the caller's promise.
            unsafe { self.slab.give(memory) };
        }
    }

    /// Fills `own`, which is empty, unless memory runs out.
    fn refill(&mut self, own: &mut Vec<NonNull<V>>) {
        if self.list.is_empty() {
            self.slab.take(own);
        } else {
            std::mem::swap(&mut self.list, own);
        }
    }
}

impl<V> Drop for Store<V> {
    fn drop(&mut self) {
        for memory in self.list.drain(..) {
            // SAFETY: it came from the slab, and nothing uses it any more.
            unsafe { self.slab.give(memory) };
        }
    }
}

/// Takes retired words apart: the [`Dispose`] of a tree's queues. There is one per tree, so that what is of one block comes
/// back to one slab.
pub(super) struct Recycler<T>(Mutex<Stores<T>>);

struct Stores<T> {
    nodes: Store<NodeMemory<T>>,
    records: Store<RecordMemory<T>>,
}

impl<T> Recycler<T> {
    pub(super) fn new() -> Self {
        Recycler(Mutex::new(Stores {
            nodes: Store::new(),
            records: Store::new(),
        }))
    }
}

/// The word under which a node is retired.
pub(super) fn node_word(node: NodePtr, height: usize) -> *mut () {
    let bit = if height == 0 { 0 } else { INNER_BIT };
    node.map_addr(|address| address | bit)
}

/// The word under which a record is retired.
pub(super) fn record_word<T>(record: *mut T) -> *mut () {
    record.cast::<()>().map_addr(|address| address | RECORD_BIT)
}

/// The size of what a retired word stands for, in bytes.
pub(super) fn word_bytes<T>(word: *mut ()) -> usize {
    if word.addr() & RECORD_BIT == 1 {
        record_bytes::<T>()
    } else {
        node_bytes::<T>()
    }
}

/// Sizes in bytes, for the statistics.
pub(super) const fn node_bytes<T>() -> usize {
    size_of::<NodeMemory<T>>()
}

/// As [`node_bytes`].
pub(super) const fn record_bytes<T>() -> usize {
    size_of::<RecordMemory<T>>()
}

impl<T: Send + Sync + 'static> Dispose for Arc<Recycler<T>> {
    unsafe fn dispose(&self, words: &[*mut ()]) -> (usize, Option<Panic>) {
        let mut bytes = 0;
        let mut panic = None;
        // Destructors first and under no lock; one that panics costs nobody else's memory.
        let records = |word: &&*mut ()| needs_drop::<T>() && word.addr() & RECORD_BIT == 1;
        for word in words.iter().filter(records) {
            let record = word.map_addr(|address| address & !RECORD_BIT).cast::<T>();
            // SAFETY: R2: a record that was retired once and that nobody can reach.
            let result = catch_unwind(AssertUnwindSafe(|| unsafe { record.drop_in_place() }));
            keep_first(&mut panic, result.err());
        }
        let stores = &mut *self.0.lock();
        for word in words {
            let memory = word.map_addr(|address| address & !(RECORD_BIT | INNER_BIT));
            let Some(memory) = NonNull::new(memory) else {
                continue;
            };
            if word.addr() & RECORD_BIT == 1 {
                // SAFETY: R2: dropped above; it came from the pool.
                unsafe { stores.records.give(memory.cast()) };
                bytes += record_bytes::<T>();
            } else {
                // SAFETY: R2: a node that nobody can reach.
                unsafe { retract::<T>(memory, word.addr() & INNER_BIT != 0) };
                // SAFETY: as above; it came from the pool.
                unsafe { stores.nodes.give(memory.cast()) };
                bytes += node_bytes::<T>();
            }
        }
        (bytes, panic)
    }
}

/// Tells loom that a node's memory is written from here on.
///
/// # Safety
///
/// The node is of the kind that is said, and nobody else can reach it.
unsafe fn retract<T>(node: NonNull<()>, inner: bool) {
    if inner {
        // SAFETY: by the caller's promise.
        unsafe { node.cast::<Inner>().as_ref() }.track.write();
    } else {
        // SAFETY: by the caller's promise.
        unsafe { node.cast::<Leaf<T>>().as_ref() }.track.write();
    }
}

/// Adds to one of the writer's lists, as long as it is short.
fn give<V>(own: &mut Vec<NonNull<V>>, memory: NonNull<V>, spill: impl FnOnce(NonNull<V>)) {
    if own.len() < KEEP && reserve(own, 1).is_ok() {
        own.push(memory);
    } else {
        spill(memory);
    }
}

/// Runs a closure when dropped.
struct Defer<F: FnMut()>(F);

impl<F: FnMut()> Drop for Defer<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// The writer's own lists.
pub(super) struct Pool<T> {
    nodes: Vec<NonNull<NodeMemory<T>>>,
    records: Vec<NonNull<RecordMemory<T>>>,
    recycler: Arc<Queue<Arc<Recycler<T>>>>,
    #[cfg(any(test, feature = "fault-injection"))]
    pub(super) fail_after: Option<usize>,
}

impl<T> Drop for Pool<T> {
    fn drop(&mut self) {
        let stores = &mut *self.recycler.disposer().0.lock();
        for node in self.nodes.drain(..) {
            // SAFETY: it came from there, and nothing uses it any more.
            unsafe { stores.nodes.give(node) };
        }
        for record in self.records.drain(..) {
            // SAFETY: as above.
            unsafe { stores.records.give(record) };
        }
    }
}

impl<T: Send + Sync + 'static> Pool<T> {
    pub(super) fn new(recycler: Arc<Queue<Arc<Recycler<T>>>>) -> Self {
        Pool {
            nodes: Vec::new(),
            records: Vec::new(),
            recycler,
            #[cfg(any(test, feature = "fault-injection"))]
            fail_after: None,
        }
    }

    pub(super) fn queue(&self) -> &Arc<Queue<Arc<Recycler<T>>>> {
        &self.recycler
    }

    #[cfg_attr(
        not(any(test, feature = "fault-injection")),
        expect(
            clippy::unused_self,
            reason = "refuses only where faults can be planted"
        )
    )]
    fn refused(&mut self) -> bool {
        #[cfg(any(test, feature = "fault-injection"))]
        if let Some(left) = &mut self.fail_after {
            if *left == 0 {
                return true;
            }
            *left -= 1;
        }
        false
    }

    #[cold]
    fn refill_nodes(&mut self) {
        let stores = &mut *self.recycler.disposer().0.lock();
        stores.nodes.refill(&mut self.nodes);
    }

    #[cold]
    fn refill_records(&mut self) {
        let stores = &mut *self.recycler.disposer().0.lock();
        stores.records.refill(&mut self.records);
    }

    #[inline(always)]
    fn node_memory(&mut self) -> Option<NonNull<NodeMemory<T>>> {
        if self.refused() {
            return None;
        }
        if self.nodes.is_empty() {
            self.refill_nodes();
        }
        let node = self.nodes.pop();
        // The next one will be written soon, and was last touched long ago.
        if let Some(next) = self.nodes.last() {
            prefetch(next.as_ptr().cast(), 0..SLOT_LINES.end);
        }
        node
    }

    /// Memory for a leaf, with any content; `None` when memory runs out.
    ///
    /// It may be used as a `Leaf` at once: its bytes were set when its slab was, and words and raw pointers may
    /// have any value.
    #[inline]
    pub(super) fn leaf(&mut self) -> Option<NonNull<Leaf<T>>> {
        let memory = self.node_memory()?.cast::<Leaf<T>>();
        if cfg!(loom) {
            // SAFETY: memory for either kind of node, ours alone.
            unsafe { memory.write(Leaf::empty()) };
            // SAFETY: just written, ours alone.
            unsafe { memory.as_ref() }.track.write();
        }
        Some(memory)
    }

    /// Memory for an inner node, as [`leaf`](Self::leaf).
    #[inline]
    pub(super) fn inner(&mut self) -> Option<NonNull<Inner>> {
        let memory = self.node_memory()?.cast::<Inner>();
        if cfg!(loom) {
            // SAFETY: memory for either kind of node, ours alone.
            unsafe { memory.write(Inner::empty(0)) };
            // SAFETY: just written, ours alone.
            unsafe { memory.as_ref() }.track.write();
        }
        Some(memory)
    }

    /// A record for `value`, which keeps `start_gap` bytes free below it; gives the value back when memory
    /// runs out.
    #[inline]
    pub(super) fn record(&mut self, value: T, start_gap: u64) -> Result<NonNull<T>, T> {
        if self.refused() {
            return Err(value);
        }
        if self.records.is_empty() {
            self.refill_records();
        }
        let Some(memory) = self.records.pop() else {
            return Err(value);
        };
        if let Some(next) = self.records.last() {
            prefetch(next.as_ptr().cast(), 0..1);
        }
        // SAFETY: memory for a record, ours alone.
        unsafe {
            memory.write(RecordMemory {
                value,
                start_gap,
                lock: LockWord::new(),
            });
        }
        // The value is its first field.
        Ok(memory.cast())
    }

    /// Takes back a node that was never published.
    pub(super) fn give_node(&mut self, node: NonNull<()>) {
        give(&mut self.nodes, node.cast(), |node| {
            // SAFETY: it came from there, and nothing uses it any more.
            unsafe { self.recycler.disposer().0.lock().nodes.give(node) };
        });
    }

    /// Drops a record that was never published.
    ///
    /// # Safety
    ///
    /// R1: `record` came from [`record`](Self::record), is the caller's alone and isn't used again.
    pub(super) unsafe fn drop_record(&mut self, record: *mut T) {
        let Some(memory) = NonNull::new(record) else {
            return;
        };
        // The memory is kept even when the destructor panics.
        let _keep = Defer(|| {
            give(&mut self.records, memory.cast(), |record| {
                // SAFETY: it came from there, and nothing uses it any more.
                unsafe { self.recycler.disposer().0.lock().records.give(record) };
            });
        });
        // SAFETY: by the caller's promise.
        unsafe { record.drop_in_place() };
    }
}
