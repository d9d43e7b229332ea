//! Frames: 4 KiB of guest memory each, counted references.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU8;

use vma_rcu::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use vma_rcu::sync::planted;

use super::PAGE;

/// Head of a frame: what an allocator knows it by. It stays where it is for as long as the frame exists.
///
/// 32-byte aligned, so that a page-table entry has five bits to spare.
#[derive(Debug)]
#[repr(C, align(32))]
pub struct FrameHead {
    /// References. An increment is relaxed, since whoever makes one has a reference; a decrement is a release, and the last one
    /// acquires, so that all uses come before the frame is given back. As `std::sync::Arc`. Model:
    /// `a_frame_goes_back_after_its_last_use`.
    refs: AtomicU32,
    /// [`REMOVED`], [`DIRTY`], [`ALLOWED`], and how often it's pinned, in units of [`PIN`]. Relaxed: ordered by the locks of the page
    /// cache and of the page table that both sides take. Model of `DIRTY`: `a_store_beside_a_clean_is_written_or_leaves_a_mark`.
    state: AtomicU32,
    memory: NonNull<u8>,
    /// The allocator's, for its own bookkeeping.
    owner: *const (),
    release: unsafe fn(NonNull<FrameHead>),
}

/// Words of a page. Models have one, which loom sees.
const WORDS: usize = if cfg!(loom) { 1 } else { PAGE / 8 };

/// The frame is a file's no more: whoever found it in the page cache before has to look again.
const REMOVED: u32 = 1;
/// Of a file that wants to know: it's to be written back. Set where it's changed, and before an entry says that stores go to it; under
/// the page cache's lock.
const DIRTY: u32 = 2;
/// The file has allowed stores to it, until it's written back.
const ALLOWED: u32 = 4;
/// One pin.
const PIN: u32 = 8;

// SAFETY: F1: `memory` and `owner` are only used as the allocator allows it from any thread (its promise).
unsafe impl Send for FrameHead {}
// SAFETY: as above; what changes is atomic.
unsafe impl Sync for FrameHead {}

impl FrameHead {
    /// The head of a free frame.
    ///
    /// `release` is called with the head when the last reference is gone; `owner` is for its use.
    ///
    /// # Safety
    ///
    /// **F1** `memory` is [`PAGE`] bytes, aligned to that, used by nobody else as long as there are references, and any thread may
    /// use it; `release` may be called from any thread.
    pub unsafe fn new(
        memory: NonNull<u8>,
        owner: *const (),
        release: unsafe fn(NonNull<FrameHead>),
    ) -> Self {
        FrameHead {
            refs: AtomicU32::new(0),
            state: AtomicU32::new(0),
            memory,
            owner,
            release,
        }
    }

    /// What was given to [`new`](Self::new).
    pub fn owner(&self) -> *const () {
        self.owner
    }

    /// There is one reference. It stays so as long as who has it makes no other.
    pub(super) fn is_sole(&self) -> bool {
        self.refs.load(Ordering::Acquire) == 1
    }

    /// The frame has left the page cache.
    pub(super) fn is_removed(&self) -> bool {
        self.state.load(Ordering::Relaxed) & REMOVED != 0
    }

    /// It's to be written back.
    pub(super) fn is_dirty(&self) -> bool {
        self.state.load(Ordering::Relaxed) & DIRTY != 0
    }

    /// Somebody has pinned it.
    pub(super) fn is_pinned(&self) -> bool {
        self.state.load(Ordering::Relaxed) >= PIN
    }

    /// Where its bytes are.
    pub fn memory(&self) -> NonNull<u8> {
        self.memory
    }
}

/// One reference to a frame.
///
/// **F2** As long as it lives, the frame isn't given back.
pub struct Frame(NonNull<FrameHead>);

// SAFETY: F1, F2: a counted reference to something that any thread may use.
unsafe impl Send for Frame {}
// SAFETY: as above.
unsafe impl Sync for Frame {}

impl Frame {
    /// The first reference to a free frame.
    ///
    /// # Safety
    ///
    /// F1 holds, the head lives until its `release` is called, and nobody else has a reference or makes the first one.
    pub unsafe fn first(head: NonNull<FrameHead>) -> Self {
        // SAFETY: by the caller's promise.
        let shared = unsafe { head.as_ref() };
        shared.state.store(0, Ordering::Relaxed);
        shared.refs.store(1, Ordering::Relaxed);
        Frame(head)
    }

    fn head(&self) -> &FrameHead {
        // SAFETY: F2.
        unsafe { self.0.as_ref() }
    }

    /// Where it comes from.
    pub(super) fn owner(&self) -> *const () {
        self.head().owner
    }

    /// Its head. As long as the reference is kept, so is that.
    pub(super) fn head_pointer(&self) -> NonNull<FrameHead> {
        self.0
    }

    /// The reference as a pointer, for a page-table entry.
    pub(super) fn into_raw(self) -> NonNull<FrameHead> {
        ManuallyDrop::new(self).0
    }

    /// Takes the reference back that [`into_raw`](Self::into_raw) gave away.
    ///
    /// # Safety
    ///
    /// Once per `into_raw`.
    pub(super) unsafe fn from_raw(head: NonNull<FrameHead>) -> Self {
        Frame(head)
    }

    /// Another reference to a frame that somebody else holds one to.
    ///
    /// # Safety
    ///
    /// Somebody does, for as long as the call lasts.
    pub(super) unsafe fn another(head: NonNull<FrameHead>) -> Self {
        // SAFETY: F2, by the caller's promise.
        let count = unsafe { head.as_ref() }
            .refs
            .fetch_add(1, Ordering::Relaxed);
        assert!(count < u32::MAX / 2, "two thousand million references");
        Frame(head)
    }

    /// The frame leaves the page cache.
    pub(crate) fn set_removed(&self) {
        self.head().state.fetch_or(REMOVED, Ordering::Relaxed);
    }

    /// The page cache has it again, after all.
    pub(crate) fn set_kept(&self) {
        self.head().state.fetch_and(!REMOVED, Ordering::Relaxed);
    }

    /// It's to be written back.
    pub(crate) fn set_dirty(&self) {
        self.head().state.fetch_or(DIRTY, Ordering::Relaxed);
    }

    /// It's about to be written back: from here on stores are marked anew, and have to be allowed anew.
    pub(crate) fn set_clean(&self) {
        let clear = !(DIRTY | ALLOWED);
        self.head().state.fetch_and(clear, Ordering::Relaxed);
    }

    pub(crate) fn is_dirty(&self) -> bool {
        self.head().is_dirty()
    }

    /// Whether its file has allowed stores to it.
    pub(crate) fn set_allowed(&self, allowed: bool) {
        if allowed {
            self.head().state.fetch_or(ALLOWED, Ordering::Relaxed);
        } else {
            self.head().state.fetch_and(!ALLOWED, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_allowed(&self) -> bool {
        self.head().state.load(Ordering::Relaxed) & ALLOWED != 0
    }

    pub(crate) fn is_pinned(&self) -> bool {
        self.head().is_pinned()
    }

    /// Nobody else has a reference.
    pub(crate) fn is_sole(&self) -> bool {
        self.head().is_sole()
    }

    /// Whether both are references to the same frame.
    pub(crate) fn is(&self, other: &Frame) -> bool {
        self.0 == other.0
    }

    /// One pin more. At most some hundred million of them; beyond that it would be leaked rather than unpinned.
    pub(super) fn pin(&self) {
        self.head().state.fetch_add(PIN, Ordering::Relaxed);
    }

    /// One pin less.
    pub(super) fn unpin(&self) {
        self.head().state.fetch_sub(PIN, Ordering::Relaxed);
    }

    /// It has left the page cache.
    pub(crate) fn is_removed(&self) -> bool {
        self.head().state.load(Ordering::Relaxed) & REMOVED != 0
    }

    /// Its bytes.
    pub fn bytes(&self) -> PageBytes<'_> {
        PageBytes {
            memory: self.head().memory,
            marker: std::marker::PhantomData,
        }
    }
}

impl Clone for Frame {
    fn clone(&self) -> Self {
        // SAFETY: F2: `self` is the other reference.
        unsafe { Frame::another(self.0) }
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        let head = self.head();
        let order = if planted("relaxed_frame_drop") {
            Ordering::Relaxed
        } else {
            Ordering::Release
        };
        if head.refs.fetch_sub(1, order) != 1 {
            return;
        }
        if !planted("no_last_frame_acquire") {
            // A load rather than a fence: the thread sanitizer knows no fences.
            head.refs.load(Ordering::Acquire);
        }
        let release = head.release;
        // SAFETY: F1, F2: that was the last reference.
        unsafe { release(self.0) };
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame")
            .field("memory", &self.head().memory)
            .field("refs", &self.head().refs)
            .finish_non_exhaustive()
    }
}

/// The bytes of a page, as everybody who has it mapped sees them: each access is atomic by itself, and
/// relaxed.
#[derive(Clone, Copy, Debug)]
pub struct PageBytes<'f> {
    memory: NonNull<u8>,
    marker: std::marker::PhantomData<&'f Frame>,
}

impl PageBytes<'_> {
    /// # Safety
    ///
    /// F2 for the frame behind it, as long as the result is used.
    pub(super) unsafe fn at(memory: NonNull<u8>) -> Self {
        PageBytes {
            memory,
            marker: std::marker::PhantomData,
        }
    }

    fn byte(&self, at: usize) -> &AtomicU8 {
        assert!(at < PAGE, "beyond the page");
        // SAFETY: F1: within the page.
        let byte = unsafe { self.memory.add(at) };
        // SAFETY: F1, F2; it is accessed by atomic operations alone.
        unsafe { byte.cast().as_ref() }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < WORDS, "beyond the page");
        // SAFETY: F1: within the page, and aligned as it is.
        let word = unsafe { self.memory.cast::<AtomicU64>().add(index) };
        // SAFETY: F1, F2; it is accessed by atomic operations alone.
        unsafe { word.as_ref() }
    }

    /// Copies bytes out, from `at` on: whole words where it is aligned, so that no word is seen half-written.
    ///
    /// # Panics
    ///
    /// Beyond the end of the page.
    pub fn read(self, at: usize, into: &mut [u8]) {
        self.each(at, into.len(), |place, range| match place {
            Place::Word(word) => {
                into[range].copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
            }
            Place::Byte(byte) => into[range.start] = byte.load(Ordering::Relaxed),
        });
    }

    /// Copies bytes in, as [`read`](Self::read) copies them out.
    ///
    /// # Panics
    ///
    /// Beyond the end of the page.
    pub fn write(self, at: usize, from: &[u8]) {
        self.each(at, from.len(), |place, range| match place {
            Place::Word(word) => {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(&from[range]);
                word.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
            }
            Place::Byte(byte) => byte.store(from[range.start], Ordering::Relaxed),
        });
    }

    /// Sets `len` bytes to `value`.
    ///
    /// # Panics
    ///
    /// Beyond the end of the page.
    pub fn fill(self, at: usize, len: usize, value: u8) {
        let word = u64::from_ne_bytes([value; 8]);
        self.each(at, len, |place, _| match place {
            Place::Word(to) => to.store(word, Ordering::Relaxed),
            Place::Byte(to) => to.store(value, Ordering::Relaxed),
        });
    }

    /// The word or byte at each step, and which bytes of the run it is.
    #[inline(always)]
    fn each(self, at: usize, len: usize, mut f: impl FnMut(Place<'_>, std::ops::Range<usize>)) {
        assert!(at <= PAGE && len <= PAGE - at, "beyond the page");
        let mut done = 0;
        while done < len {
            let here = at + done;
            if here.is_multiple_of(8) && len - done >= 8 {
                f(Place::Word(self.word(here / 8)), done..done + 8);
                done += 8;
            } else {
                f(Place::Byte(self.byte(here)), done..done + 1);
                done += 1;
            }
        }
    }

    /// Copies a page that others may be writing to into one that nobody else has.
    pub(super) fn copy_to(self, new: &mut NewFrame) {
        let to = new.frame.bytes();
        for i in 0..WORDS {
            to.word(i)
                .store(self.word(i).load(Ordering::Relaxed), Ordering::Relaxed);
        }
        new.is_zero = false;
    }
}

enum Place<'p> {
    Word(&'p AtomicU64),
    Byte(&'p AtomicU8),
}

/// A frame that nobody else knows of.
#[derive(Debug)]
pub struct NewFrame {
    frame: Frame,
    is_zero: bool,
}

impl NewFrame {
    /// `is_zero`: every byte is 0 already.
    ///
    /// # Safety
    ///
    /// It is the only reference, and so it is as long as the result isn't given away.
    pub unsafe fn new(frame: Frame, is_zero: bool) -> Self {
        NewFrame { frame, is_zero }
    }

    /// The frame with every byte 0.
    pub fn zeroed(mut self) -> Frame {
        self.zero();
        self.frame
    }

    /// The frame as it is.
    pub(crate) fn filled(self) -> Frame {
        self.frame
    }

    fn zero(&mut self) {
        if std::mem::replace(&mut self.is_zero, true) {
            return;
        }
        #[cfg(loom)]
        self.frame.bytes().word(0).store(0, Ordering::Relaxed);
        // SAFETY: F1; nobody else has a reference, so that plain stores race with nothing.
        #[cfg(not(loom))]
        unsafe {
            self.frame.head().memory.write_bytes(0, PAGE);
        }
    }
}

/// Where frames come from.
///
/// Running out is an answer, not an abort. Frames go back by themselves, from whatever thread drops the last reference.
pub trait FrameAllocator: Send + Sync + 'static {
    /// A frame that nobody else has, with any content; `None` at the allocator's limit, or when memory runs out.
    fn allocate(&self) -> Option<NewFrame>;
}
