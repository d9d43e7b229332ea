//! Loads and stores.

use std::fmt;
use std::hint::cold_path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use vma_rcu::reclaim::Reader;
use vma_rcu::shootdown::Accessing;
use vma_rcu::wait::{CancelToken, Wait};

use super::frame::{Frame, PageBytes};
use super::table::index;
use super::{PAGE, Paged, Pins};
use crate::file::FileObject;
use crate::flags::VmaFlags;
use crate::space::{Access, AddressSpace, FaultError, Need};

/// Entries of an accessor's cache of translations: a megabyte's.
const CACHED: usize = 256;
const OFFSET: u64 = PAGE as u64 - 1;

/// An access that didn't come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("after {done} bytes: {fault}")]
pub struct AccessError {
    /// Bytes that were accessed.
    pub done: u64,
    /// Why the next one wasn't, with its address.
    #[source]
    pub fault: FaultError,
}

/// A cached translation. A tag is the page's address, or [`NO_PAGE`].
#[derive(Clone, Copy)]
struct Cached {
    /// For loads.
    load: u64,
    /// For stores.
    store: u64,
    /// For instruction fetches.
    fetch: u64,
    /// The page's memory less the page's address, so that to add an address gives its place.
    base: *mut u8,
}

/// Equal to no address less its offset.
const NO_PAGE: u64 = 1;

impl Cached {
    const NONE: Cached = Cached {
        load: NO_PAGE,
        store: NO_PAGE,
        fetch: NO_PAGE,
        base: std::ptr::null_mut(),
    };

    #[inline(always)]
    fn tag(&self, access: Access) -> u64 {
        match access {
            Access::Read => self.load,
            Access::Write => self.store,
            Access::Execute => self.fetch,
        }
    }
}

/// One virtual CPU's way to a space's memory: caches translations (a software TLB), and makes pages present where an access
/// finds none.
///
/// # Atomicity
///
/// An aligned access of 1, 2, 4 or 8 bytes is one access of the host's, relaxed if nothing else is said; an unaligned
/// one is made byte by byte. [`read`](Self::read) and [`write`](Self::write) move whole aligned words of 8 bytes, and
/// single bytes at the edges. All of them are atomic accesses, so that what several accessors do to the same bytes at
/// the same time is no data race; where their sizes differ, the host's memory decides what comes of it.
///
/// # Concurrency
///
/// Accesses take no lock as long as pages are present. When a call that takes pages away, or rights, has returned,
/// no access through an older translation is under way, and none will be (C3).
pub struct Accessor<'s> {
    space: &'s AddressSpace<Paged>,
    reader: Reader,
    accessing: Accessing<'s>,
    cache: Box<[Cached; CACHED]>,
    /// Ends waits for monitors.
    token: Option<CancelToken>,
}

impl fmt::Debug for Accessor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accessor")
            .field("accessing", &self.accessing)
            .finish_non_exhaustive()
    }
}

impl AddressSpace<Paged> {
    /// An accessor for the calling thread.
    pub fn accessor(&self) -> Accessor<'_> {
        Accessor {
            space: self,
            reader: self.register(),
            accessing: self.backend().state().shootdown.register(),
            cache: Box::new([Cached::NONE; CACHED]),
            token: None,
        }
    }
}

/// A long-term reference to a page's frame: it stays, whatever becomes of the mapping (C17).
///
/// As long as the mapping isn't changed, the page that it shows is this one: also after a dup, whose child gets a copy. A page of a
/// file that was pinned for stores is dirty when the pin goes, since nobody knows what was stored by it.
#[derive(Debug)]
pub struct PinnedPage {
    frame: Frame,
    writable: bool,
    pins: Arc<Pins>,
    /// The file that marks changed pages, and which one this is, if it was pinned for stores.
    of: Option<(Arc<FileObject>, u64)>,
}

impl PinnedPage {
    fn new(
        frame: Frame,
        writable: bool,
        pins: &Arc<Pins>,
        of: Option<(Arc<FileObject>, u64)>,
    ) -> Self {
        frame.pin();
        pins.0.fetch_add(1, Ordering::Relaxed);
        PinnedPage {
            frame,
            writable,
            pins: Arc::clone(pins),
            of,
        }
    }
}

impl Clone for PinnedPage {
    fn clone(&self) -> Self {
        let of = self.of.clone();
        PinnedPage::new(self.frame.clone(), self.writable, &self.pins, of)
    }
}

impl Drop for PinnedPage {
    fn drop(&mut self) {
        // It may have been written back since, and stored to afterwards (`unpin_user_pages_dirty_lock()`).
        if let Some((object, pgoff)) = &self.of {
            object.changed(*pgoff, &self.frame);
        }
        self.frame.unpin();
        self.pins.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl PinnedPage {
    /// Copies bytes out, from offset `at` on.
    ///
    /// # Panics
    /// Beyond the end of the page.
    pub fn read(&self, at: usize, into: &mut [u8]) {
        self.frame.bytes().read(at, into);
    }

    /// Its bytes, if it was pinned for stores: else they may be other mappings' as well.
    pub fn writable(&self) -> Option<PageBytes<'_>> {
        self.writable.then(|| self.frame.bytes())
    }
}

impl Accessor<'_> {
    /// Does `f` to the memory of the page that holds `addr`, if that's cached and `addr` is a multiple of `size`, a power of two:
    /// between the marks, so that it may wait for nothing. It's given [`Cached::base`].
    #[inline(always)]
    fn on_cached_page<R>(
        &mut self,
        addr: u64,
        size: usize,
        access: Access,
        f: impl FnOnce(*mut u8) -> R,
    ) -> Option<R> {
        let _now = self.accessing.enter()?;
        let cached = &self.cache[slot(addr)];
        // Both questions at once: a tag has no bits of an offset.
        let tag = addr & (!OFFSET | (size as u64 - 1));
        (cached.tag(access) == tag).then(|| f(cached.base))
    }

    /// The same, whether it's cached or not, without the second condition.
    #[cold]
    #[inline(never)]
    fn on_page<R>(
        &mut self,
        addr: u64,
        access: Access,
        f: impl FnOnce(*mut u8) -> R,
    ) -> Result<R, FaultError> {
        let page = addr & !OFFSET;
        loop {
            let Some(now) = self.accessing.enter() else {
                self.forget();
                continue;
            };
            if let Some(cached) = translate(self.space, &self.reader, page, access) {
                self.cache[slot(page)] = cached;
                return Ok(f(cached.base));
            }
            drop(now);
            self.fault(addr, access)?;
        }
    }

    /// From here on accesses that wait for a monitor are given up when a token is cancelled: they are
    /// [`FaultError::Interrupted`].
    pub fn set_token(&mut self, token: Option<CancelToken>) {
        self.token = token;
    }

    fn need<'n>(&'n self, need: Need<'n>) -> Need<'n> {
        let wait = self.token.as_ref().map_or(Wait::forever(), Wait::killable);
        need.by(self.accessing.id()).wait(wait)
    }

    /// Makes the page present.
    fn fault(&mut self, addr: u64, access: Access) -> Result<(), FaultError> {
        let need = self.need(Need::of(access));
        let result = self.space.fault_page(addr & !OFFSET, need, &self.reader);
        result.map_err(|fault| fault.at(addr))
    }

    /// What is cached is outdated.
    fn forget(&mut self) {
        self.cache.fill(Cached::NONE);
        self.accessing.renew();
    }

    /// Loads bytes.
    ///
    /// # Errors
    /// [`AccessError`]: what lies before the fault was read.
    pub fn read(&mut self, addr: u64, into: &mut [u8]) -> Result<(), AccessError> {
        self.by_page(addr, into.len() as u64, Access::Read, |bytes, at, range| {
            bytes.read(at, &mut into[range]);
        })
    }

    /// Stores bytes.
    ///
    /// # Errors
    /// [`AccessError`]: what lies before the fault was written.
    pub fn write(&mut self, addr: u64, from: &[u8]) -> Result<(), AccessError> {
        self.by_page(
            addr,
            from.len() as u64,
            Access::Write,
            |bytes, at, range| {
                bytes.write(at, &from[range]);
            },
        )
    }

    /// Sets `len` bytes to `value`.
    ///
    /// # Errors
    /// [`AccessError`]: what lies before the fault was set.
    pub fn fill(&mut self, addr: u64, len: u64, value: u8) -> Result<(), AccessError> {
        self.by_page(addr, len, Access::Write, |bytes, at, range| {
            bytes.fill(at, range.len(), value);
        })
    }

    /// Copies `len` bytes within the space; they mustn't overlap, else bytes may be copied twice.
    ///
    /// # Errors
    /// [`AccessError`] for whichever side faults first; what lies before was copied.
    pub fn copy(&mut self, from: u64, to: u64, len: u64) -> Result<(), AccessError> {
        in_parts(from, to, len, |from, to, part| {
            self.read(from, part)?;
            self.write(to, part)
        })
    }

    /// Copies `len` bytes into another space, or this one by another accessor.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    pub fn copy_to(
        &mut self,
        from: u64,
        other: &mut Accessor<'_>,
        to: u64,
        len: u64,
    ) -> Result<(), AccessError> {
        in_parts(from, to, len, |from, to, part| {
            self.read(from, part)?;
            other.write(to, part)
        })
    }

    /// Loads bytes up to a zero byte, which isn't part of the result, or up to `max` bytes.
    ///
    /// # Errors
    /// [`AccessError`], when a fault comes before either.
    pub fn read_c_string(&mut self, addr: u64, max: usize) -> Result<Vec<u8>, AccessError> {
        let mut string = Vec::new();
        let mut buffer = [0; 256];
        while string.len() < max {
            let at = addr.wrapping_add(string.len() as u64);
            let count = page_rest(at)
                .min(buffer.len() as u64)
                .min((max - string.len()) as u64);
            let part = &mut buffer[..count as usize];
            self.read(at, part).map_err(|error| AccessError {
                done: string.len() as u64 + error.done,
                ..error
            })?;
            if let Some(end) = part.iter().position(|byte| *byte == 0) {
                string.extend_from_slice(&part[..end]);
                break;
            }
            string.extend_from_slice(part);
        }
        Ok(string)
    }

    /// A reference to the frame of a page, made present for `access`. With [`Access::Write`] it's the one that stores go to.
    ///
    /// A page of a private mapping becomes the mapping's own first, also for [`Access::Read`]: so who holds the pin sees later
    /// stores (as `FOLL_LONGTERM` does it).
    ///
    /// # Errors
    /// The fault; [`FaultError::Unpinnable`] for frames of the embedder's.
    pub fn pin_page(&mut self, addr: u64, access: Access) -> Result<PinnedPage, FaultError> {
        let page = addr & !OFFSET;
        loop {
            if let Some(pinned) = self.try_pin(page, access)? {
                return Ok(pinned);
            }
            // It may show something else then.
            self.cache[slot(page)] = Cached::NONE;
            let need = self.need(Need::to_pin(access));
            self.space.fault_page(page, need, &self.reader)?;
        }
    }

    /// A pin of what is there, if that does.
    fn try_pin(&self, page: u64, access: Access) -> Result<Option<PinnedPage>, FaultError> {
        let state = self.space.backend().state();
        // A dup comes before, and the page is looked at as it is then, or after, and sees the pin.
        let _faulting = state.faults.read();
        let guard = self.reader.pin();
        let Some(vma) = self.space.find(page, &guard) else {
            return Ok(None);
        };
        let Some(seen) = state.tables.leaf(page) else {
            return Ok(None);
        };
        let leaf = seen.leaf.lock();
        let entry = leaf.entry(index(page));
        let now = self.space.find(page, &guard);
        let is_attached = now.is_some_and(|now| std::ptr::eq(now.vma(), vma.vma()));
        let shared = vma.flags().contains(VmaFlags::SHARED);
        // A table that is shared has only private pages, which aren't the mapping's own; or it's another space's alone by now.
        let does = !seen.is_shared && (entry.is_owned() || (shared && access != Access::Write));
        if !is_attached || vma.vma().is_gated() || !access.is_allowed(vma.flags()) || !does {
            return Ok(None);
        }
        if entry.is_borrowed() {
            return Err(FaultError::Unpinnable(page));
        }
        // SAFETY: F2: in the table, under its lock.
        let frame = unsafe { entry.share() };
        let writable = access == Access::Write;
        let file = vma.vma().file().filter(|_| writable && shared);
        let of = file.filter(|file| file.object().is_tracked()).map(|file| {
            let pgoff = (page - vma.range().start) / PAGE as u64;
            let pgoff = vma.vma().pgoff().wrapping_add(pgoff);
            (Arc::clone(file.object()), pgoff)
        });
        Ok(frame.map(|frame| PinnedPage::new(frame, writable, &state.pins, of)))
    }

    /// Page by page.
    #[inline(always)]
    fn by_page(
        &mut self,
        addr: u64,
        len: u64,
        access: Access,
        mut f: impl FnMut(PageBytes<'_>, usize, std::ops::Range<usize>),
    ) -> Result<(), AccessError> {
        let mut done = 0;
        while done < len {
            let at = addr.wrapping_add(done);
            let count = page_rest(at).min(len - done);
            let range = done as usize..(done + count) as usize;
            let mut part = |base: *mut u8| {
                let memory = base.wrapping_add((at & !OFFSET) as usize);
                // SAFETY: the memory of a frame.
                let memory = unsafe { NonNull::new_unchecked(memory) };
                // SAFETY: F2, S1: between the marks.
                let bytes = unsafe { PageBytes::at(memory) };
                f(bytes, (at & OFFSET) as usize, range.clone());
            };
            if self.on_cached_page(at, 1, access, &mut part).is_none() {
                self.on_page(at, access, &mut part)
                    .map_err(|fault| AccessError { done, fault })?;
            }
            done += count;
        }
        Ok(())
    }
}

/// What the tables say, if that does for the access. Between the marks.
fn translate(
    space: &AddressSpace<Paged>,
    reader: &Reader,
    page: u64,
    access: Access,
) -> Option<Cached> {
    let guard = reader.pin();
    let vma = space.find(page, &guard)?;
    // Before the entry is looked at: what is seen with an open gate is the mapping's own. A mapping that has been replaced since
    // has the pages that were there before, as whoever replaces it waits for this access.
    if vma.vma().is_gated() {
        return None;
    }
    let (_, entry) = space.backend().state().tables.look(page)?;
    let head = entry.head()?;
    // The entry is the mapping's: had another one taken its place before the page came, it would be found now.
    let now = space.find(page, &guard);
    if now.is_none_or(|now| !std::ptr::eq(now.vma(), vma.vma())) {
        return None;
    }
    let tag = |access: Access| {
        let owned = access != Access::Write || entry.is_owned();
        if owned && access.is_allowed(vma.flags()) {
            page
        } else {
            NO_PAGE
        }
    };
    // SAFETY: F2, S1: the frame was in the table while this thread is in access, so that it stays until it leaves.
    let memory = unsafe { head.as_ref() }.memory();
    let cached = Cached {
        load: tag(Access::Read),
        store: tag(Access::Write),
        fetch: tag(Access::Execute),
        base: memory.as_ptr().wrapping_sub(page as usize),
    };
    (cached.tag(access) == page).then_some(cached)
}

/// Calls `step` with parts of two ranges that each lie in one page, and a buffer for them.
fn in_parts(
    from: u64,
    to: u64,
    len: u64,
    mut step: impl FnMut(u64, u64, &mut [u8]) -> Result<(), AccessError>,
) -> Result<(), AccessError> {
    let mut buffer = [0; PAGE];
    let mut done = 0;
    while done < len {
        let (from, to) = (from.wrapping_add(done), to.wrapping_add(done));
        let count = page_rest(from).min(page_rest(to)).min(len - done);
        step(from, to, &mut buffer[..count as usize]).map_err(|error| AccessError {
            done: done + error.done,
            ..error
        })?;
        done += count;
    }
    Ok(())
}

/// Where a translation is cached.
#[inline(always)]
fn slot(addr: u64) -> usize {
    (addr / PAGE as u64) as usize % CACHED
}

/// Bytes from `addr` to the end of its page.
fn page_rest(addr: u64) -> u64 {
    PAGE as u64 - (addr & OFFSET)
}

/// Loads, stores and read-modify-writes of one width.
macro_rules! width {
    ($word:ty, $atomic:ty, $load:ident, $store:ident, $exchange:ident, $swap:ident, $add:ident, $and:ident, $or:ident, $xor:ident) => {
        impl Accessor<'_> {
            #[doc = concat!("Loads a `", stringify!($word), "`, in the host's byte order.")]
            ///
            /// # Errors
            /// The fault.
            #[inline]
            pub fn $load(&mut self, addr: u64) -> Result<$word, FaultError> {
                // SAFETY: F2, S1, between the marks; aligned, within the page.
                let load = move |base| unsafe { word::<$atomic>(base, addr) }.load(Ordering::Relaxed);
                if let Some(value) =
                    self.on_cached_page(addr, size_of::<$word>(), Access::Read, load)
                {
                    return Ok(value);
                }
                cold_path();
                if !addr.is_multiple_of(size_of::<$word>() as u64) {
                    let mut bytes = [0; size_of::<$word>()];
                    self.read(addr, &mut bytes).map_err(|error| error.fault)?;
                    return Ok(<$word>::from_ne_bytes(bytes));
                }
                // Apart, so that the frequent result stays in registers.
                let value = self.on_page(addr, Access::Read, load)?;
                Ok(value)
            }

            #[doc = concat!("Stores a `", stringify!($word), "`, in the host's byte order.")]
            ///
            /// # Errors
            /// The fault.
            #[inline]
            pub fn $store(&mut self, addr: u64, value: $word) -> Result<(), FaultError> {
                // SAFETY: F2, S1, between the marks; aligned, within the page.
                let word = move |base| unsafe { word::<$atomic>(base, addr) };
                let store = move |base| word(base).store(value, Ordering::Relaxed);
                if self
                    .on_cached_page(addr, size_of::<$word>(), Access::Write, store)
                    .is_some()
                {
                    return Ok(());
                }
                cold_path();
                if !addr.is_multiple_of(size_of::<$word>() as u64) {
                    let result = self.write(addr, &value.to_ne_bytes());
                    return result.map_err(|error| error.fault);
                }
                self.on_page(addr, Access::Write, store)?;
                Ok(())
            }

            /// Stores `new` if `current` is there; sequentially consistent. What was there, as `Err` if it was something
            /// else.
            ///
            /// # Errors
            /// The fault; [`FaultError::Unaligned`].
            #[inline]
            pub fn $exchange(
                &mut self,
                addr: u64,
                current: $word,
                new: $word,
            ) -> Result<Result<$word, $word>, FaultError> {
                self.atomically::<$atomic, _>(addr, |word| {
                    word.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst)
                })
            }

            /// Stores `new`, sequentially consistent. What was there.
            ///
            /// # Errors
            /// The fault; [`FaultError::Unaligned`].
            #[inline]
            pub fn $swap(&mut self, addr: u64, new: $word) -> Result<$word, FaultError> {
                self.atomically::<$atomic, _>(addr, |word| word.swap(new, Ordering::SeqCst))
            }

            width!(@fetch $word, $atomic, $add, fetch_add, "Adds, wrapping");
            width!(@fetch $word, $atomic, $and, fetch_and, "Ands");
            width!(@fetch $word, $atomic, $or, fetch_or, "Ors");
            width!(@fetch $word, $atomic, $xor, fetch_xor, "Exclusive-ors");
        }
    };
    (@fetch $word:ty, $atomic:ty, $name:ident, $op:ident, $what:literal) => {
        #[doc = concat!($what, ", sequentially consistent. What was there.")]
        ///
        /// # Errors
        /// The fault; [`FaultError::Unaligned`].
        #[inline]
        pub fn $name(&mut self, addr: u64, operand: $word) -> Result<$word, FaultError> {
            self.atomically::<$atomic, _>(addr, |word| word.$op(operand, Ordering::SeqCst))
        }
    };
}

/// The word at an address, in its page's memory. See [`Cached::base`].
///
/// # Safety
///
/// F2 for the frame behind it as long as the result is used; the address is aligned for an `A`, an atomic of up to 8 bytes.
#[inline(always)]
unsafe fn word<'m, A>(base: *mut u8, addr: u64) -> &'m A {
    let place = base.wrapping_add(addr as usize).cast::<A>();
    // SAFETY: by the caller's promise; memory of frames is accessed by atomic operations alone.
    unsafe { &*place }
}

impl Accessor<'_> {
    #[inline(always)]
    fn atomically<A, R>(
        &mut self,
        addr: u64,
        f: impl FnOnce(&A) -> R + Copy,
    ) -> Result<R, FaultError> {
        // SAFETY: F2, S1, between the marks; aligned, within the page.
        let change = move |base| f(unsafe { word::<A>(base, addr) });
        if let Some(result) = self.on_cached_page(addr, size_of::<A>(), Access::Write, change) {
            return Ok(result);
        }
        cold_path();
        if !addr.is_multiple_of(size_of::<A>() as u64) {
            return Err(FaultError::Unaligned(addr));
        }
        let result = self.on_page(addr, Access::Write, change)?;
        Ok(result)
    }
}

width!(
    u8,
    AtomicU8,
    load_u8,
    store_u8,
    compare_exchange_u8,
    swap_u8,
    fetch_add_u8,
    fetch_and_u8,
    fetch_or_u8,
    fetch_xor_u8
);
width!(
    u16,
    AtomicU16,
    load_u16,
    store_u16,
    compare_exchange_u16,
    swap_u16,
    fetch_add_u16,
    fetch_and_u16,
    fetch_or_u16,
    fetch_xor_u16
);
width!(
    u32,
    AtomicU32,
    load_u32,
    store_u32,
    compare_exchange_u32,
    swap_u32,
    fetch_add_u32,
    fetch_and_u32,
    fetch_or_u32,
    fetch_xor_u32
);
width!(
    u64,
    AtomicU64,
    load_u64,
    store_u64,
    compare_exchange_u64,
    swap_u64,
    fetch_add_u64,
    fetch_and_u64,
    fetch_or_u64,
    fetch_xor_u64
);
