//! The list of what one writer has retired.
//!
//! One producer (the writer, exclusive by `&mut`) and any number of consumers (under a mutex). The
//! producer stores a word and publishes the new count: no read-modify-write, no lock, so that retiring
//! costs next to nothing. The list belongs to the domain, so that any thread can drain it, an idle
//! writer's half-filled segment included.
//!
//! ```text
//! freed <= taken <= graced <= sealed <= produced        (all counts of objects since the queue was made)
//! ```

use std::any::Any;
use std::fmt;
use std::ptr::{self, NonNull};

use super::grace::GracePeriods;
use crate::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex};

/// Objects per segment, and per grace period at least.
pub(crate) const SEGMENT: usize = if cfg!(any(loom, shuttle)) { 2 } else { 128 };

/// Bytes after which a batch is counted, full or not: so much may be missing in what is known to be pending.
const BATCH_BYTES: usize = 256 << 10;

/// What the owner of a queue does with words whose grace period is over.
pub(crate) trait Dispose: Send + Sync + 'static {
    /// Frees the objects behind `words`, all of them even if a destructor panics. Their size in bytes, and
    /// the first panic.
    ///
    /// # Safety
    ///
    /// Each word was passed to [`Producer::push`] of a queue with this disposer, nobody can reach the
    /// object any more (R2), and no other call gets the same word.
    unsafe fn dispose(&self, words: &[*mut ()]) -> (usize, Option<Panic>);
}

/// What a destructor panicked with.
pub(crate) type Panic = Box<dyn Any + Send>;

/// Notes a panic, if none is noted yet. What it carries isn't dropped: its destructor could panic as well.
pub(crate) fn keep_first(first: &mut Option<Panic>, panic: Option<Panic>) {
    if first.is_none() {
        *first = panic;
    } else {
        std::mem::forget(panic);
    }
}

/// A queue as the domain sees it.
pub(crate) trait Drain: Send + Sync {
    /// Objects retired so far.
    fn produced(&self) -> u64;
    /// Objects freed so far.
    fn freed(&self) -> u64;
    /// Bytes retired and not yet freed.
    fn pending_bytes(&self) -> usize;
    /// Lets what is there wait for a grace period, if it is a full batch or `all` is asked for, and nothing waits
    /// already.
    fn seal(&self, grace: &GracePeriods, all: bool);
    /// Frees what waited for grace periods up to number `over`.
    fn drain(&self, over: u64) -> Drained;
}

/// The outcome of [`Drain::drain`].
#[derive(Debug, Default)]
pub(crate) struct Drained {
    pub(crate) objects: usize,
    /// A batch waits for its grace period, or for being sealed.
    pub(crate) more: bool,
    pub(crate) panic: Option<Panic>,
}

struct Segment {
    /// Written by the producer before it publishes the count, read by consumers after they have seen
    /// it: relaxed, ordered by [`Queue::produced`].
    slots: [AtomicPtr<()>; SEGMENT],
    /// Set once by the producer; ordered by [`Queue::produced`] as well (the count that needs the next
    /// segment is published later).
    next: AtomicPtr<Segment>,
}

impl Segment {
    fn try_new() -> Option<NonNull<Segment>> {
        let segment = crate::alloc::try_box(|| Segment {
            slots: std::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())),
            next: AtomicPtr::new(ptr::null_mut()),
        })?;
        Some(NonNull::from(Box::leak(segment)))
    }
}

/// What a domain and its queues share.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Something may be past its grace period, or a batch is full. Store-release by who makes it so,
    /// swapped (acquire) by `collect` before it looks. Model:
    /// `synchronize_waits_for_the_reader_and_leaves_nothing`.
    pub(crate) work: AtomicBool,
    /// Bytes retired less bytes freed, moved once per batch: relaxed, a bound for `throttle`. Below zero, read
    /// as a signed number, when objects of a batch are freed before the batch is full.
    pending: AtomicUsize,
}

impl Counters {
    /// Bytes pending, within one batch per writer.
    #[inline]
    pub(crate) fn pending(&self) -> usize {
        let pending = self.pending.load(Ordering::Relaxed).cast_signed();
        pending.max(0).cast_unsigned()
    }
}

/// The shared half.
pub(crate) struct Queue<D> {
    disposer: D,
    /// The domain's.
    counters: Arc<Counters>,
    /// Store-release by the producer after the slot, load-acquire by consumers before they read slots.
    /// Model:
    /// `synchronize_waits_for_the_reader_and_leaves_nothing`.
    produced: AtomicU64,
    /// No more objects will come: what there is makes a batch. Store-release after the last count, load-acquire
    /// before the count is read.
    closed: AtomicBool,
    /// Objects that wait for a grace period or have had it. Written under `consumer`; relaxed, a hint for the producer when
    /// to raise the mark.
    sealed: AtomicU64,
    /// Statistics, and the target of `synchronize`: release after the free, acquire by who waits.
    freed: AtomicU64,
    /// Statistics: relaxed, one writer (the producer).
    produced_bytes: AtomicUsize,
    /// Statistics: relaxed.
    freed_bytes: AtomicUsize,
    consumer: Mutex<Consumer>,
}

struct Consumer {
    head: NonNull<Segment>,
    taken: u64,
    /// What may be freed.
    graced: u64,
    /// What waits for the period `ticket`; equal to `graced` when nothing does.
    sealed: u64,
    ticket: u64,
}

// SAFETY: R3. The segments behind `head` are owned by the queue; the producer touches only the last one,
// through atomics, and consumers take turns under the mutex.
unsafe impl Send for Consumer {}

/// The writer's half. Moving it is moving the right to retire.
pub(crate) struct Producer {
    tail: NonNull<Segment>,
    /// Words in the tail.
    used: usize,
    produced: u64,
    /// The count at the last full batch, and the bytes since.
    batch_start: u64,
    batch_bytes: usize,
    /// Room that `reserve` made beyond the current segment.
    spare: Vec<NonNull<Segment>>,
}

// SAFETY: R3. `tail` and `spare` are reached through this value alone (the tail by consumers as well,
// through atomics), so that they may move to another thread with it.
unsafe impl Send for Producer {}
// SAFETY: R3. `&Producer` gives access to `produced` alone.
unsafe impl Sync for Producer {}

impl<D> Queue<D> {
    pub(crate) fn disposer(&self) -> &D {
        &self.disposer
    }
}

impl<D: Dispose> Queue<D> {
    /// A queue and its producer; `None` when memory runs out.
    pub(crate) fn try_new(disposer: D, counters: Arc<Counters>) -> Option<(Arc<Self>, Producer)> {
        let head = Segment::try_new()?;
        let consumer = Consumer {
            head,
            taken: 0,
            graced: 0,
            sealed: 0,
            ticket: 0,
        };
        let queue = Queue {
            disposer,
            counters,
            closed: AtomicBool::new(false),
            sealed: AtomicU64::new(0),
            produced: AtomicU64::new(0),
            freed: AtomicU64::new(0),
            produced_bytes: AtomicUsize::new(0),
            freed_bytes: AtomicUsize::new(0),
            consumer: Mutex::new(consumer),
        };
        let producer = Producer {
            tail: head,
            used: 0,
            produced: 0,
            batch_start: 0,
            batch_bytes: 0,
            spare: Vec::new(),
        };
        Some((Arc::new(queue), producer))
    }

    /// Takes up to a segment of words that may be freed, by what is known of the periods up to `over`; how
    /// many, and whether more will come without a push.
    fn take(&self, words: &mut [*mut (); SEGMENT], over: u64) -> (usize, bool) {
        let mut consumer = self.consumer.lock();
        if consumer.ticket <= over {
            consumer.graced = consumer.sealed;
        }
        let count = (consumer.graced - consumer.taken).min(SEGMENT as u64) as usize;
        // The words were stored before `produced` was, and `sealed` is a value of `produced`.
        consumer.pop(&mut words[..count]);
        let more = consumer.sealed > consumer.graced || self.due(consumer.sealed);
        (count, more)
    }

    /// Whether what came after the first `sealed` objects makes a batch.
    fn due(&self, sealed: u64) -> bool {
        // Before the count, which doesn't grow after it.
        let closed = self.closed.load(Ordering::Acquire);
        let least = if closed { 1 } else { SEGMENT as u64 };
        self.produced() >= sealed + least
    }
}

impl Consumer {
    /// The next words; there must be as many.
    fn pop(&mut self, mut words: &mut [*mut ()]) {
        while !words.is_empty() {
            let index = (self.taken % SEGMENT as u64) as usize;
            if index == 0 && self.taken > 0 {
                self.next_segment();
            }
            let run = words.len().min(SEGMENT - index);
            let (now, later) = words.split_at_mut(run);
            // SAFETY: R3. `head` is a live segment until `next_segment` frees it.
            let slots = &unsafe { self.head.as_ref() }.slots[index..index + run];
            for (word, slot) in now.iter_mut().zip(slots) {
                *word = slot.load(Ordering::Relaxed);
            }
            self.taken += run as u64;
            words = later;
        }
    }

    fn next_segment(&mut self) {
        // SAFETY: R3. As in `pop`.
        let next = unsafe { self.head.as_ref() }.next.load(Ordering::Relaxed);
        // SAFETY: R3. The producer left this segment before it published the count that brought us
        // here, and consumers take turns.
        drop(unsafe { Box::from_raw(self.head.as_ptr()) });
        self.head = NonNull::new(next).expect("a published word has a segment");
    }
}

impl Producer {
    /// Makes sure that `count` pushes can't fail.
    #[inline]
    pub(crate) fn reserve(&mut self, count: usize) -> Result<(), ()> {
        if SEGMENT - self.used >= count {
            return Ok(());
        }
        self.reserve_segments(count)
    }

    #[cold]
    fn reserve_segments(&mut self, count: usize) -> Result<(), ()> {
        while SEGMENT - self.used + self.spare.len() * SEGMENT < count {
            self.spare.try_reserve(1).map_err(|_| ())?;
            self.spare.push(Segment::try_new().ok_or(())?);
        }
        Ok(())
    }

    /// Appends a word; `reserve` must have made room.
    #[inline]
    pub(crate) fn push(&mut self, word: *mut ()) {
        // SAFETY: R3. The tail is live: consumers don't pass the published count.
        let slot = match unsafe { self.tail.as_ref() }.slots.get(self.used) {
            Some(slot) => slot,
            None => self.next_segment(),
        };
        slot.store(word, Ordering::Relaxed);
        self.used += 1;
    }

    /// The next `count` slots, which the caller fills instead of pushing; `None` when they aren't of one segment.
    #[inline]
    pub(crate) fn take_room(&mut self, count: usize) -> Option<&[AtomicPtr<()>]> {
        let from = self.used;
        // SAFETY: R3. As in `push`.
        let room = unsafe { self.tail.as_ref() }
            .slots
            .get(from..from + count)?;
        self.used += count;
        Some(room)
    }

    /// The first slot of a new tail.
    #[cold]
    fn next_segment(&mut self) -> &AtomicPtr<()> {
        let next = self.spare.pop().expect("room was reserved");
        // SAFETY: R3. As in `push`; what it leads to from now on is owned by this queue.
        unsafe { self.tail.as_ref() }
            .next
            .store(next.as_ptr(), Ordering::Relaxed);
        self.tail = next;
        self.used = 0;
        // SAFETY: R3. As in `push`.
        &unsafe { next.as_ref() }.slots[0]
    }

    /// Lets consumers see the `count` words pushed since the last call, which stand for `bytes`.
    #[inline]
    pub(crate) fn publish<D>(&mut self, queue: &Queue<D>, count: usize, bytes: usize) {
        self.produced += count as u64;
        let total = queue.produced_bytes.load(Ordering::Relaxed);
        queue.produced_bytes.store(total + bytes, Ordering::Relaxed);
        queue.produced.store(self.produced, Ordering::Release);
        self.batch_bytes += bytes;
        let is_full = self.produced - self.batch_start >= SEGMENT as u64;
        if is_full || self.batch_bytes >= BATCH_BYTES {
            self.end_batch(queue);
        } else if self.produced - queue.sealed.load(Ordering::Relaxed) >= SEGMENT as u64
            && !queue.counters.work.load(Ordering::Relaxed)
        {
            // Batches and sealing are out of step after somebody has sealed one that wasn't full.
            queue.counters.work.store(true, Ordering::Release);
        }
    }

    /// Nothing more will be pushed.
    pub(crate) fn close<D>(&mut self, queue: &Queue<D>) {
        queue.closed.store(true, Ordering::Release);
        self.end_batch(queue);
    }

    #[cold]
    fn end_batch<D>(&mut self, queue: &Queue<D>) {
        self.batch_start = self.produced;
        let bytes = std::mem::take(&mut self.batch_bytes);
        queue.counters.pending.fetch_add(bytes, Ordering::Relaxed);
        queue.counters.work.store(true, Ordering::Release);
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        for segment in self.spare.drain(..) {
            // SAFETY: R3. A spare segment has been shown to nobody.
            drop(unsafe { Box::from_raw(segment.as_ptr()) });
        }
    }
}

impl<D: Dispose> Drain for Queue<D> {
    fn produced(&self) -> u64 {
        self.produced.load(Ordering::Acquire)
    }

    fn freed(&self) -> u64 {
        self.freed.load(Ordering::Acquire)
    }

    fn pending_bytes(&self) -> usize {
        let freed = self.freed_bytes.load(Ordering::Relaxed);
        self.produced_bytes
            .load(Ordering::Relaxed)
            .saturating_sub(freed)
    }

    fn seal(&self, grace: &GracePeriods, all: bool) {
        let mut consumer = self.consumer.lock();
        if consumer.sealed > consumer.graced {
            return;
        }
        let produced = self.produced();
        if produced > consumer.sealed && (all || self.due(consumer.sealed)) {
            consumer.sealed = produced;
            self.sealed.store(produced, Ordering::Relaxed);
            // After the count: what it covers has been unlinked before.
            consumer.ticket = grace.ticket();
        }
    }

    fn drain(&self, over: u64) -> Drained {
        let mut sum = Drained::default();
        let mut words = [ptr::null_mut(); SEGMENT];
        loop {
            let (count, more) = self.take(&mut words, over);
            if count == 0 {
                sum.more = more;
                return sum;
            }
            // SAFETY: R2. `take` handed these words to this call alone, after their grace period.
            let (bytes, panic) = unsafe { self.disposer.dispose(&words[..count]) };
            self.freed_bytes.fetch_add(bytes, Ordering::Relaxed);
            self.counters.pending.fetch_sub(bytes, Ordering::Relaxed);
            self.freed.fetch_add(count as u64, Ordering::Release);
            sum.objects += count;
            keep_first(&mut sum.panic, panic);
        }
    }
}

impl<D> Drop for Queue<D> {
    fn drop(&mut self) {
        // Words that are left are freed by the domain before it lets go of its queues; here only the
        // segments remain.
        let consumer = &mut *self.consumer.lock();
        let mut segment = consumer.head.as_ptr();
        while !segment.is_null() {
            // SAFETY: R3. Producer and consumers are gone; the chain is ours.
            let boxed = unsafe { Box::from_raw(segment) };
            segment = boxed.next.load(Ordering::Relaxed);
        }
    }
}

impl<D> fmt::Debug for Queue<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue")
            .field("produced", &self.produced)
            .field("freed", &self.freed)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Producer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer")
            .field("produced", &self.produced)
            .finish_non_exhaustive()
    }
}
