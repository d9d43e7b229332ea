//! Where nodes and records come from and go back to.
//!
//! The writer's own free lists serve a transaction without a lock. What was retired comes back, after
//! its grace period, from whichever thread freed it, through the shared [`Recycler`]; the writer takes a
//! whole list of it when its own is empty.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use super::node::{Inner, Leaf, NodeMemory, NodePtr, RecordMemory, SLOT_LINES};
use super::search::prefetch;
use crate::alloc::{free_memory, try_memory, try_zeroed};
use crate::reclaim::{Dispose, Panic};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Mutex};

/// Free objects that a list keeps, at most; the rest goes back to the allocator.
const KEEP: usize = 1024;

/// Marks a retired word as a record.
const RECORD_BIT: usize = 1;
/// Marks a retired word as an inner node (leaves have no mark).
const INNER_BIT: usize = 2;

struct Lists<T> {
    nodes: Vec<NonNull<NodeMemory<T>>>,
    records: Vec<NonNull<RecordMemory<T>>>,
}

// SAFETY: the lists hold memory without content, which any thread may use or free.
unsafe impl<T> Send for Lists<T> {}
// SAFETY: a shared reference gives no access to the memory.
unsafe impl<T> Sync for Lists<T> {}

impl<T> Lists<T> {
    const fn new() -> Self {
        Lists {
            nodes: Vec::new(),
            records: Vec::new(),
        }
    }

    fn keep_node(&mut self, memory: NonNull<NodeMemory<T>>) {
        if self.nodes.len() < KEEP && self.nodes.try_reserve(1).is_ok() {
            self.nodes.push(memory);
        } else {
            // SAFETY: it came from `try_memory`, and nothing uses it any more.
            unsafe { free_memory(memory) };
        }
    }

    fn keep_record(&mut self, memory: NonNull<RecordMemory<T>>) {
        if self.records.len() < KEEP && self.records.try_reserve(1).is_ok() {
            self.records.push(memory);
        } else {
            // SAFETY: it came from `try_memory`, and nothing uses it any more.
            unsafe { free_memory(memory) };
        }
    }
}

impl<T> Drop for Lists<T> {
    fn drop(&mut self) {
        for node in self.nodes.drain(..) {
            // SAFETY: it came from `try_memory`, and nothing uses it any more.
            unsafe { free_memory(node) };
        }
        for record in self.records.drain(..) {
            // SAFETY: as above.
            unsafe { free_memory(record) };
        }
    }
}

/// Takes retired words apart: the [`Dispose`] of a tree's queue.
pub(super) struct Recycler<T> {
    lists: Mutex<Lists<T>>,
    /// Something is in the lists: relaxed, a hint that saves the writer a look.
    filled: AtomicBool,
}

impl<T> Recycler<T> {
    pub(super) fn new() -> Self {
        Recycler {
            lists: Mutex::new(Lists::new()),
            filled: AtomicBool::new(false),
        }
    }

    /// Swaps each list of `own` that is empty for what is here.
    fn refill(&self, own: &mut Lists<T>) {
        let mut lists = self.lists.lock();
        if own.nodes.is_empty() {
            std::mem::swap(&mut lists.nodes, &mut own.nodes);
        }
        if own.records.is_empty() {
            std::mem::swap(&mut lists.records, &mut own.records);
        }
        let left = !lists.nodes.is_empty() || !lists.records.is_empty();
        self.filled.store(left, Ordering::Relaxed);
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

impl<T: Send + Sync + 'static> Dispose for Recycler<T> {
    unsafe fn dispose(&self, words: &[*mut ()]) -> (usize, Option<Panic>) {
        let mut bytes = 0;
        let mut panic = None;
        // Destructors first and under no lock; one that panics costs nobody else's memory.
        for word in words.iter().filter(|word| word.addr() & RECORD_BIT == 1) {
            let record = word.map_addr(|address| address & !RECORD_BIT).cast::<T>();
            // SAFETY: R2: a record that was retired once and that nobody can reach.
            let result = catch_unwind(AssertUnwindSafe(|| unsafe { record.drop_in_place() }));
            panic = panic.or(result.err());
        }
        let mut lists = self.lists.lock();
        for word in words {
            let memory = word.map_addr(|address| address & !(RECORD_BIT | INNER_BIT));
            let Some(memory) = NonNull::new(memory) else {
                continue;
            };
            if word.addr() & RECORD_BIT == 1 {
                lists.keep_record(memory.cast());
                bytes += record_bytes::<T>();
            } else {
                // SAFETY: R2: a node that nobody can reach.
                unsafe { retract::<T>(memory, word.addr() & INNER_BIT != 0) };
                lists.keep_node(memory.cast());
                bytes += node_bytes::<T>();
            }
        }
        self.filled.store(true, Ordering::Relaxed);
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

/// Runs a closure when dropped.
struct Defer<F: FnMut()>(F);

impl<F: FnMut()> Drop for Defer<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// The writer's own lists.
pub(super) struct Pool<T> {
    lists: Lists<T>,
    recycler: Arc<crate::reclaim::Queue<Recycler<T>>>,
    #[cfg(any(test, feature = "fault-injection"))]
    pub(super) fail_after: Option<usize>,
}

impl<T: Send + Sync + 'static> Pool<T> {
    pub(super) fn new(recycler: Arc<crate::reclaim::Queue<Recycler<T>>>) -> Self {
        Pool {
            lists: Lists::new(),
            recycler,
            #[cfg(any(test, feature = "fault-injection"))]
            fail_after: None,
        }
    }

    pub(super) fn queue(&self) -> &Arc<crate::reclaim::Queue<Recycler<T>>> {
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
    fn refill(&mut self) {
        if self.recycler.disposer().filled.load(Ordering::Relaxed) {
            self.recycler.disposer().refill(&mut self.lists);
        }
    }

    #[inline]
    fn node_memory(&mut self) -> Option<NonNull<NodeMemory<T>>> {
        if self.refused() {
            return None;
        }
        if self.lists.nodes.is_empty() {
            self.refill();
        }
        let node = self.lists.nodes.pop();
        // The next one will be written soon, and was last touched long ago.
        if let Some(next) = self.lists.nodes.last() {
            prefetch(next.as_ptr().cast(), 0..SLOT_LINES.end);
        }
        node.or_else(try_zeroed)
    }

    /// Memory for a leaf, with any content; `None` when memory runs out.
    ///
    /// It may be used as a `Leaf` at once: it was zeroed when it was allocated, and words and raw pointers may
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
        if self.lists.records.is_empty() {
            self.refill();
        }
        let record = self.lists.records.pop();
        if let Some(next) = self.lists.records.last() {
            prefetch(next.as_ptr().cast(), 0..1);
        }
        let Some(memory) = record.or_else(try_memory::<RecordMemory<T>>) else {
            return Err(value);
        };
        // SAFETY: memory for a record, ours alone.
        unsafe { memory.write(RecordMemory { value, start_gap }) };
        // The value is its first field.
        Ok(memory.cast())
    }

    /// Takes back a node that was never published.
    pub(super) fn give_node(&mut self, node: NonNull<()>) {
        self.lists.keep_node(node.cast());
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
        let lists = &mut self.lists;
        let _keep = Defer(|| lists.keep_record(memory.cast()));
        // SAFETY: by the caller's promise.
        unsafe { record.drop_in_place() };
    }
}
