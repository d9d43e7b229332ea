//! Page-table entries.

use std::ptr::NonNull;

use super::frame::{Frame, FrameHead};

/// What a page-table entry says: nothing, a guard page, or a frame and how it may be used.
///
/// ```text
/// 0                      nothing
/// GUARD                  a guard page: every access finds nothing
/// head of a frame | bits a page
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry(*mut ());

/// Stores go to the frame itself. Without it they go to a copy. (What the mapping allows is another question.)
const OWNED: usize = 1;
/// A private page, counted as anonymous.
const ANON: usize = 2;
/// Of shared memory, counted apart from other files' pages.
const SHMEM: usize = 4;
/// No reference is held: the page of zeros, frames that are the embedder's. Not counted.
const BORROWED: usize = 8;
/// Part of a huge page, counted apart.
const HUGE: usize = 16;
const BITS: usize = 31;

/// With `ANON` or `BORROWED`: a monitor is asked before a store. Never with `OWNED`.
const PROTECTED: usize = SHMEM;

/// Alone, without a frame.
const GUARD: usize = BORROWED;

/// What a page counts as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Private.
    Anon,
    /// A file's.
    File,
    /// Shared memory's.
    Shmem,
    /// Part of a huge page, private.
    HugeAnon,
    /// Part of a huge page, shared.
    HugeFile,
    /// Nothing: it isn't the space's.
    Uncounted,
}

impl Entry {
    pub(super) const NONE: Entry = Entry(std::ptr::null_mut());
    pub(super) const GUARD: Entry = Entry(std::ptr::without_provenance_mut(GUARD));

    /// Takes the reference over, which [`take`](Self::take) gives back.
    pub(super) fn of(frame: Frame, kind: Kind, owned: bool) -> Self {
        let bits = match kind {
            Kind::Anon => ANON,
            Kind::File => 0,
            Kind::Shmem => SHMEM,
            Kind::HugeAnon => HUGE | ANON,
            Kind::HugeFile => HUGE,
            Kind::Uncounted => BORROWED,
        };
        let bits = bits | if owned { OWNED } else { 0 };
        let head = frame.into_raw().as_ptr().cast::<()>();
        Entry(head.map_addr(|address| address | bits))
    }

    /// A page of somebody's who keeps it for as long as it is mapped.
    ///
    /// # Safety
    ///
    /// **F3** The frame stays for as long as the entry is used.
    pub(super) unsafe fn borrowed(head: NonNull<FrameHead>, owned: bool) -> Self {
        let bits = BORROWED | if owned { OWNED } else { 0 };
        Entry(
            head.as_ptr()
                .cast::<()>()
                .map_addr(|address| address | bits),
        )
    }

    pub(super) fn from_word(word: *mut ()) -> Self {
        Entry(word)
    }

    pub(super) fn word(self) -> *mut () {
        self.0
    }

    pub(super) fn is_none(self) -> bool {
        self.0.is_null()
    }

    pub(super) fn is_guard(self) -> bool {
        self == Entry::GUARD
    }

    fn has(self, bit: usize) -> bool {
        self.0.addr() & bit != 0
    }

    pub(super) fn is_owned(self) -> bool {
        self.has(OWNED)
    }

    /// It shows a frame that somebody else keeps.
    pub(super) fn is_borrowed(self) -> bool {
        self.has(BORROWED) && self.head().is_some()
    }

    /// The frame that it shows.
    pub(super) fn head(self) -> Option<NonNull<FrameHead>> {
        NonNull::new(self.0.map_addr(|address| address & !BITS).cast())
    }

    pub(super) fn kind(self) -> Kind {
        if self.head().is_none() || self.has(BORROWED) {
            Kind::Uncounted
        } else if self.has(HUGE) {
            if self.has(ANON) {
                Kind::HugeAnon
            } else {
                Kind::HugeFile
            }
        } else if self.has(ANON) {
            Kind::Anon
        } else if self.has(SHMEM) {
            Kind::Shmem
        } else {
            Kind::File
        }
    }

    /// A private page of the space's.
    pub(super) fn is_private(self) -> bool {
        matches!(self.kind(), Kind::Anon | Kind::HugeAnon)
    }

    /// Part of a huge page.
    pub(super) fn is_huge(self) -> bool {
        matches!(self.kind(), Kind::HugeAnon | Kind::HugeFile)
    }

    /// Its file has let go of the page.
    pub(super) fn is_removed(self) -> bool {
        let is_file = matches!(self.kind(), Kind::File | Kind::Shmem | Kind::HugeFile);
        let head = self.head().filter(|_| is_file);
        // SAFETY: F2: the entry holds a reference, in a table whose lock is held.
        head.is_some_and(|head| unsafe { head.as_ref() }.is_removed())
    }

    /// A file's page that stores go to, though it isn't marked as dirty.
    pub(super) fn is_owned_and_clean(self) -> bool {
        let is_file = self.is_owned() && matches!(self.kind(), Kind::File | Kind::Shmem);
        let head = self.head().filter(|_| is_file);
        // SAFETY: F2: the entry holds a reference, in a table whose lock is held.
        head.is_some_and(|head| !unsafe { head.as_ref() }.is_dirty())
    }

    /// Somebody has pinned the page: it stays this mapping's.
    pub(super) fn is_pinned(self) -> bool {
        // SAFETY: F2, F3: in a table whose lock is held.
        self.head()
            .is_some_and(|head| unsafe { head.as_ref() }.is_pinned())
    }

    /// The same page, stores to which go to a copy.
    pub(super) fn without_owner(self) -> Self {
        Entry(self.0.map_addr(|address| address & !OWNED))
    }

    /// The same page, stores to which go to it.
    pub(super) fn owned(self) -> Self {
        let entry = self.unprotected();
        Entry(entry.0.map_addr(|address| address | OWNED))
    }

    /// Whether it's of a kind that a monitor can protect.
    fn is_protectable(self) -> bool {
        self.head().is_some() && !self.has(HUGE) && (self.has(ANON) || self.has(BORROWED))
    }

    /// A monitor is asked before a store.
    pub(super) fn is_protected(self) -> bool {
        self.is_protectable() && self.has(PROTECTED)
    }

    /// The same page, with a monitor asked before a store if it can be.
    pub(super) fn protected(self) -> Self {
        if !self.is_protectable() {
            return self;
        }
        let entry = self.without_owner();
        Entry(entry.0.map_addr(|address| address | PROTECTED))
    }

    /// The same page, with nobody asked.
    pub(super) fn unprotected(self) -> Self {
        if !self.is_protected() {
            return self;
        }
        Entry(self.0.map_addr(|address| address & !PROTECTED))
    }

    /// The reference that the entry holds, if it holds one.
    ///
    /// # Safety
    ///
    /// F2: the entry has been taken out of the table, by the caller, who calls this once.
    pub(super) unsafe fn take(self) -> Option<Frame> {
        let head = self.head().filter(|_| !self.has(BORROWED))?;
        // SAFETY: by the caller's promise the one that `of` put in.
        Some(unsafe { Frame::from_raw(head) })
    }

    /// The same, but a private page isn't its own: what shows it is shared.
    pub(super) fn unless_private(self) -> Self {
        if self.is_private() {
            self.without_owner()
        } else {
            self
        }
    }

    /// Whether both show the same, whoever owns it.
    pub(super) fn shows_what(self, other: Entry) -> bool {
        self.without_owner() == other.without_owner()
    }

    /// Another reference to the page's frame.
    ///
    /// # Safety
    ///
    /// F2, F3: the entry is in a table, and its leaf's lock is held.
    pub(super) unsafe fn share(self) -> Option<Frame> {
        let head = self.head()?;
        // SAFETY: by the caller's promise the entry's own reference stays meanwhile.
        Some(unsafe { Frame::another(head) })
    }

    /// An entry for another table that shows the same, with a reference of its own if this one has one. A private page is neither
    /// one's own from here on.
    ///
    /// # Safety
    ///
    /// As [`share`](Self::share).
    pub(super) unsafe fn duplicate(self) -> Self {
        let shown = self.unless_private();
        if self.kind() != Kind::Uncounted {
            // SAFETY: by the caller's promise; the reference is the new entry's.
            std::mem::forget(unsafe { self.share() });
        }
        shown
    }
}
