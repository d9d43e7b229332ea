//! The default allocator of frames: chunks of mapped memory, with caches that threads share out among themselves.
//!
//! ```text
//! cache (one lock each, nearly always free)  ->  up to 128 idle frames
//!   chunks (one lock)                        ->  2 MiB each: idle frames by index, and those never used
//! ```

use std::cell::Cell;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::frame::{Frame, FrameAllocator, FrameHead, NewFrame};
use super::mapping::Mapping;

/// Frames of a chunk: 2 MiB.
pub(super) const CHUNK: usize = 512;
const CACHES: usize = 16;
/// Frames that move between a cache and the chunks at a time.
const BATCH: usize = 64;
/// Frames that a cache holds, at most.
const FULL: usize = 2 * BATCH;
/// Chunks that are kept though all of their frames are idle, unless a pool is told otherwise: 64 MiB. To unmap one and map it again
/// costs as much as its frames are worth.
const SPARE: usize = 32;

/// Frames from memory that the operating system maps, 2 MiB at a time.
///
/// Chunks that aren't used go back to it, but for 64 MiB (or what [`with_spare`](Self::with_spare) says), which [`trim`](Self::trim) gives back as well; frames in caches count as
/// used until then. Clones are
/// handles to the same pool, and frames may outlive the last one.
#[derive(Clone, Debug)]
pub struct FramePool(Arc<Handle>);

/// What a pool has given out, in frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// In use.
    pub used: usize,
    /// Idle, in caches.
    pub cached: usize,
    /// Chunks of 512 frames that are mapped.
    pub chunks: usize,
}

struct Handle(Arc<Shared>);

struct Shared {
    caches: [Mutex<Cache>; CACHES],
    chunks: Mutex<Chunks>,
    /// Frames that may be outside of the chunks at once.
    limit: usize,
    /// The last handle is gone: nothing is cached any more. Relaxed: set before each cache is emptied under its lock.
    closed: AtomicBool,
}

/// Room for `FULL` from the first use on: nothing is allocated when a frame comes back.
#[derive(Default)]
#[repr(align(128))]
struct Cache(Vec<Idle>);

/// A frame without references.
#[derive(Clone, Copy)]
struct Idle {
    head: NonNull<FrameHead>,
    is_zero: bool,
}

// SAFETY: F1: an idle frame may be used from any thread, by whoever has this.
unsafe impl Send for Idle {}

#[derive(Default)]
struct Chunks {
    /// By id.
    slots: Vec<Option<Box<Chunk>>>,
    /// Ids without a chunk.
    vacant: Vec<usize>,
    /// Ids of the chunks with an idle frame.
    available: Vec<usize>,
    /// Chunks all of whose frames are idle.
    whole: usize,
    /// How many of these are kept.
    spare: usize,
    /// Frames outside of the chunks, those in caches included.
    out: usize,
}

struct Chunk {
    heads: Box<[FrameHead]>,
    /// Room for all.
    idle: Vec<u16>,
    /// From here on frames have never been used, and are zero.
    fresh: usize,
    /// Place in `available`.
    listed: Option<usize>,
    /// As long as one of its frames is out: frames keep their pool alive.
    pool: Option<Arc<Shared>>,
    /// In the list of those that are let go.
    next: Option<Box<Chunk>>,
    _memory: Mapping,
    /// Not a box: to move one would be to claim it for oneself, and every head points to it.
    _info: Arc<Info>,
}

/// What a head knows of where it came from.
struct Info {
    id: usize,
    /// The pool. It lives as long as one of its frames is out.
    shared: *const Shared,
}

// SAFETY: the pointer is used by who holds one of the pool's frames alone.
unsafe impl Send for Info {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for Info {}

impl Chunk {
    fn new(id: usize, shared: &Arc<Shared>) -> Option<Box<Self>> {
        let memory = Mapping::new(CHUNK)?;
        let info = Arc::new(Info {
            id,
            shared: Arc::as_ptr(shared),
        });
        let owner = Arc::as_ptr(&info).cast::<()>();
        let mut idle = Vec::new();
        idle.try_reserve_exact(CHUNK).ok()?;
        let mut heads = Vec::new();
        heads.try_reserve_exact(CHUNK).ok()?;
        for index in 0..CHUNK {
            // SAFETY: F1: a page of the chunk's own, which stays as long as one of its frames is out.
            heads.push(unsafe { FrameHead::new(memory.page(index), owner, release) });
        }
        Some(Box::new(Chunk {
            heads: heads.into_boxed_slice(),
            idle,
            fresh: 0,
            listed: None,
            pool: None,
            next: None,
            _memory: memory,
            _info: info,
        }))
    }

    fn left(&self) -> usize {
        self.idle.len() + CHUNK - self.fresh
    }

    fn take(&mut self) -> Option<Idle> {
        let (index, is_zero) = match self.idle.pop() {
            Some(index) => (index as usize, false),
            None if self.fresh < CHUNK => {
                self.fresh += 1;
                (self.fresh - 1, true)
            }
            None => return None,
        };
        let head = NonNull::from(&self.heads[index]);
        Some(Idle { head, is_zero })
    }

    fn give(&mut self, head: NonNull<FrameHead>) {
        let offset = head.addr().get() - self.heads.as_ptr().addr();
        self.idle.push((offset / size_of::<FrameHead>()) as u16);
    }
}

impl Chunks {
    /// Frames for a cache, which has room for them.
    fn take(&mut self, shared: &Arc<Shared>, frames: &mut Vec<Idle>) {
        let wanted = BATCH.min(shared.limit.saturating_sub(self.out));
        for _ in 0..wanted {
            if self.available.is_empty() && !self.grow(shared) {
                break;
            }
            let Some(chunk) = self
                .available
                .last()
                .and_then(|id| self.slots[*id].as_mut())
            else {
                break;
            };
            if chunk.left() == CHUNK {
                self.whole -= 1;
                chunk.pool = Some(Arc::clone(shared));
            }
            frames.extend(chunk.take());
            self.out += 1;
            if chunk.left() == 0 {
                chunk.listed = None;
                self.available.pop();
            }
        }
    }

    fn grow(&mut self, shared: &Arc<Shared>) -> bool {
        let id = self.vacant.last().copied().unwrap_or(self.slots.len());
        // Whatever comes back later finds room in both lists.
        let room = [
            self.slots.try_reserve(1),
            self.vacant.try_reserve(self.slots.len() + 1),
            self.available.try_reserve(self.slots.len() + 1),
        ];
        if room.iter().any(Result::is_err) {
            return false;
        }
        let Some(mut chunk) = Chunk::new(id, shared) else {
            return false;
        };
        chunk.listed = Some(self.available.len());
        self.available.push(id);
        self.whole += 1;
        if id == self.slots.len() {
            self.slots.push(Some(chunk));
        } else {
            self.vacant.pop();
            self.slots[id] = Some(chunk);
        }
        true
    }

    fn give(&mut self, idle: Idle, closed: bool, let_go: &mut LetGo) {
        // SAFETY: F1: the head, and what it knows of its chunk, stay as long as one of its frames is out.
        let owner = unsafe { idle.head.as_ref() }.owner().cast::<Info>();
        // SAFETY: as above.
        let id = unsafe { &*owner }.id;
        let Some(chunk) = &mut self.slots[id] else {
            return;
        };
        chunk.give(idle.head);
        self.out -= 1;
        if chunk.listed.is_none() {
            chunk.listed = Some(self.available.len());
            self.available.push(id);
        }
        if chunk.left() < CHUNK {
            return;
        }
        let_go.pool = chunk.pool.take().or(let_go.pool.take());
        if self.whole < self.spare && !closed {
            self.whole += 1;
            return;
        }
        let_go.chunk(self.remove(id));
    }

    /// Takes out all chunks whose frames are all idle.
    fn give_back(&mut self, let_go: &mut LetGo) {
        for id in 0..self.slots.len() {
            if self.slots[id]
                .as_ref()
                .is_some_and(|chunk| chunk.left() == CHUNK)
            {
                let_go.chunk(self.remove(id));
            }
        }
        self.whole = 0;
    }

    /// Takes out a chunk all of whose frames are idle.
    fn remove(&mut self, id: usize) -> Option<Box<Chunk>> {
        let chunk = self.slots[id].take()?;
        self.vacant.push(id);
        if let Some(place) = chunk.listed {
            self.available.swap_remove(place);
            let moved = self.available.get(place).copied();
            if let Some(chunk) = moved.and_then(|id| self.slots[id].as_mut()) {
                chunk.listed = Some(place);
            }
        }
        Some(chunk)
    }
}

/// What is dropped when no lock is held: chunks, and a chunk's share in its pool.
#[derive(Default)]
struct LetGo {
    /// A list: to make one allocates nothing.
    chunks: Option<Box<Chunk>>,
    pool: Option<Arc<Shared>>,
    /// For as long as the pool is used.
    keep: Option<Arc<Shared>>,
}

impl LetGo {
    fn chunk(&mut self, chunk: Option<Box<Chunk>>) {
        if let Some(mut chunk) = chunk {
            chunk.next = self.chunks.take();
            self.chunks = Some(chunk);
        }
    }
}

/// The number of the calling thread's cache.
fn cache() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static MINE: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    // At the thread's end any will do.
    MINE.try_with(|mine| {
        if mine.get() == usize::MAX {
            mine.set(NEXT.fetch_add(1, Ordering::Relaxed) % CACHES);
        }
        mine.get()
    })
    .unwrap_or(0)
}

impl Shared {
    fn allocate(self: &Arc<Self>) -> Option<Idle> {
        let mut cache = self.caches[cache()].lock();
        if let Some(idle) = cache.0.pop() {
            return Some(idle);
        }
        if cache.0.capacity() < FULL {
            cache.0.try_reserve_exact(FULL).ok()?;
        }
        self.chunks.lock().take(self, &mut cache.0);
        if let Some(idle) = cache.0.pop() {
            return Some(idle);
        }
        drop(cache);
        // What others have cached counts against the limit.
        self.caches.iter().find_map(|cache| cache.lock().0.pop())
    }

    #[must_use]
    fn give(self: &Arc<Self>, idle: Idle) -> LetGo {
        let mut let_go = LetGo::default();
        let mut cache = self.caches[cache()].lock();
        if self.closed.load(Ordering::Relaxed) || cache.0.capacity() < FULL {
            drop(cache);
            // With the frame the pool may go; its last use is the unlocking below.
            let_go.keep = Some(Arc::clone(self));
            let closed = self.closed.load(Ordering::Relaxed);
            self.chunks.lock().give(idle, closed, &mut let_go);
            return let_go;
        }
        if cache.0.len() == FULL {
            let mut chunks = self.chunks.lock();
            for idle in cache.0.drain(..BATCH) {
                chunks.give(idle, false, &mut let_go);
            }
        }
        cache.0.push(idle);
        let_go
    }

    #[must_use]
    fn empty_caches(&self) -> LetGo {
        let mut let_go = LetGo::default();
        let closed = self.closed.load(Ordering::Relaxed);
        for cache in &self.caches {
            let mut cache = cache.lock();
            let mut chunks = self.chunks.lock();
            for idle in cache.0.drain(..) {
                chunks.give(idle, closed, &mut let_go);
            }
        }
        self.chunks.lock().give_back(&mut let_go);
        let_go
    }
}

/// The last reference to a frame is gone.
///
/// # Safety
///
/// F1: the head is one of a pool's.
unsafe fn release(head: NonNull<FrameHead>) {
    // SAFETY: F1: it stays as long as its frame is out.
    let owner = unsafe { head.as_ref() }.owner().cast::<Info>();
    // SAFETY: as above.
    let shared = unsafe { &*owner }.shared;
    let is_zero = false;
    // SAFETY: the pool, which is in an `Arc`, lives as long as one of its frames is out: this one is. Not dropped.
    let pool = ManuallyDrop::new(unsafe { Arc::from_raw(shared) });
    // What may end the pool is dropped when it's no longer used.
    drop(pool.give(Idle { head, is_zero }));
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.closed.store(true, Ordering::Relaxed);
        drop(self.0.empty_caches());
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle")
            .field("limit", &self.0.limit)
            .finish_non_exhaustive()
    }
}

impl Default for FramePool {
    fn default() -> Self {
        Self::new(usize::MAX)
    }
}

impl FramePool {
    /// A pool of up to `limit` frames. Nothing is mapped yet.
    pub fn new(limit: usize) -> Self {
        Self::with_spare(limit, SPARE * CHUNK)
    }

    /// The same, which keeps up to `spare` idle frames, rounded up to chunks of 512, until [`trim`](Self::trim): for who gives back
    /// much and soon wants it again.
    pub fn with_spare(limit: usize, spare: usize) -> Self {
        let chunks = Chunks {
            spare: spare.div_ceil(CHUNK),
            ..Chunks::default()
        };
        FramePool(Arc::new(Handle(Arc::new(Shared {
            caches: std::array::from_fn(|_| Mutex::default()),
            chunks: Mutex::new(chunks),
            limit,
            closed: AtomicBool::new(false),
        }))))
    }

    /// The process's own, without a limit: for files that nobody has given another allocator.
    pub fn global() -> &'static FramePool {
        static GLOBAL: OnceLock<FramePool> = OnceLock::new();
        GLOBAL.get_or_init(FramePool::default)
    }

    /// Gives back to the operating system what isn't used.
    pub fn trim(&self) {
        drop(self.0.0.empty_caches());
    }

    /// What is given out. Exact when nobody allocates or frees meanwhile.
    pub fn stats(&self) -> PoolStats {
        let shared = &self.0.0;
        let cached = shared.caches.iter().map(|cache| cache.lock().0.len()).sum();
        let chunks = shared.chunks.lock();
        PoolStats {
            used: chunks.out.saturating_sub(cached),
            cached,
            chunks: chunks.slots.iter().flatten().count(),
        }
    }
}

impl FrameAllocator for FramePool {
    fn allocate(&self) -> Option<NewFrame> {
        let Idle { head, is_zero } = self.0.0.allocate()?;
        // SAFETY: F1: an idle frame, which is ours now; its head stays as long as it is out.
        let frame = unsafe { Frame::first(head) };
        // SAFETY: the first reference.
        Some(unsafe { NewFrame::new(frame, is_zero) })
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod tests {
    use super::*;

    #[test]
    fn frames_are_zero_on_demand_and_go_back() {
        let pool = FramePool::new(2000);
        let mut frames = Vec::new();
        while let Some(frame) = pool.allocate() {
            let frame = frame.zeroed();
            let mut bytes = [1; 16];
            frame.bytes().read(4080, &mut bytes);
            assert_eq!(bytes, [0; 16]);
            frame.bytes().fill(0, 4096, 7);
            frames.push(frame);
        }
        assert_eq!(frames.len(), 2000, "the limit is the limit");
        assert_eq!(pool.stats().chunks, 4);
        let kept = frames[3].clone();
        frames.clear();
        assert_eq!(pool.stats().used, 1);
        pool.trim();
        assert_eq!(pool.stats().cached, 0);
        // The one in use.
        assert_eq!(pool.stats().chunks, 1);
        let again = pool.allocate().map(NewFrame::zeroed);
        let mut bytes = [1; 16];
        again.unwrap().bytes().read(0, &mut bytes);
        assert_eq!(bytes, [0; 16], "used before, zero again");
        drop(pool);
        let mut bytes = [0; 4];
        kept.bytes().read(8, &mut bytes);
        assert_eq!(bytes, [7; 4], "a frame outlives its pool");
    }

    #[test]
    fn a_pool_keeps_as_much_as_it_is_told() {
        for (spare, kept) in [(0, 0), (CHUNK + 1, 2), (10 * CHUNK, 4)] {
            let pool = FramePool::with_spare(usize::MAX, spare);
            let frames: Vec<_> = (0..4 * CHUNK).map(|_| pool.allocate().unwrap()).collect();
            assert_eq!(pool.stats().chunks, 4);
            drop(frames);
            // Frames in a cache hold their chunk back.
            let stats = pool.stats();
            assert!((kept..=kept + 1).contains(&stats.chunks), "{stats:?}");
            pool.trim();
            assert_eq!(pool.stats().chunks, 0);
        }
    }

    #[test]
    fn threads_share_a_pool() {
        let pool = FramePool::new(5000);
        std::thread::scope(|scope| {
            for seed in 0..4_usize {
                let pool = &pool;
                scope.spawn(move || {
                    let mut frames = Vec::new();
                    for i in 0..20_000 {
                        if (i / 700 + seed).is_multiple_of(2) {
                            frames.extend(pool.allocate().map(NewFrame::zeroed));
                        } else {
                            frames.pop();
                        }
                    }
                });
            }
        });
        assert_eq!(pool.stats().used, 0);
        pool.trim();
        assert_eq!(pool.stats().chunks, 0);
    }
}
