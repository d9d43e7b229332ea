//! Locks on single entries: the reader's side of Linux's per-VMA locks.
//!
//! Every record has a lock word. [`RangeTree::lock`] adds a reader to it, by one read-modify-write on that word and nothing
//! else that is shared; it never waits. A transaction closes the words of the entries that it takes out, for good, before it
//! publishes, and waits for their readers; entries that stay aren't touched. So while an entry is
//! locked it is in the tree, with its range and its value.
//!
//! ```text
//! reader                                   writer
//! ------                                   ------
//! find the entry, under a guard            word |= CLOSED
//! word + 1, unless CLOSED: then give up    wait until no reader is left
//! ...                                      publish
//! word - 1; was it the last, and CLOSED:   retire the record
//!   ring the writer's bell
//! ```
//!
//! Both sides work on one word, whose changes have one order: a reader that comes in is waited for, one that doesn't has
//! to look again, and finds what took the entry's place or waits at the lock that the writer holds.

use std::fmt;
use std::ptr::NonNull;

use super::node::{RecordMemory, Root, Slot};
use super::scratch::Dead;
use super::{RangeTree, Record, Writer, read};
use crate::reclaim::Guard;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::{Bell, planted};
use crate::wait::{GaveUp, Wait};

/// The entry is being taken out, or has been.
const CLOSED: u32 = 1 << 31;
/// Readers of one entry, at most.
const MAX_READERS: u32 = CLOSED - 2;

/// The lock word of a record. Acquire when a reader comes and when the writer has waited, release when a reader leaves: what
/// readers did under the lock comes before the record is dropped. Model:
/// `a_locked_entry_stays_until_it_is_let_go`.
#[derive(Debug)]
pub(super) struct LockWord(AtomicU32);

impl LockWord {
    pub(super) fn new() -> Self {
        LockWord(AtomicU32::new(0))
    }

    fn try_enter(&self) -> bool {
        let mut word = self.0.load(Ordering::Relaxed);
        while word < MAX_READERS {
            let next = word + 1;
            match self
                .0
                .compare_exchange_weak(word, next, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
        false
    }

    /// Whether the writer waits for this reader. The record may be gone as soon as this has run.
    fn leave(&self) -> bool {
        let order = if planted("relaxed_unlock") {
            Ordering::Relaxed
        } else {
            Ordering::Release
        };
        self.0.fetch_sub(1, order) == CLOSED | 1
    }

    /// No reader comes in from here on; how many are in. The word is open: only its tree's one writer closes it.
    fn close(&self) -> u32 {
        // An addition, because a processor does it at once and hands the old value back; an `or` with that would be
        // a loop.
        self.0.fetch_add(CLOSED, Ordering::Acquire)
    }

    fn is_empty(&self) -> bool {
        self.0.load(Ordering::Acquire) & !CLOSED == 0
    }

    fn reopen(&self) {
        self.0.fetch_and(!CLOSED, Ordering::Release);
    }
}

/// The entry is being replaced, or has been since it was found: look again, or wait for the writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy;

impl fmt::Display for Busy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the entry is being replaced")
    }
}

impl std::error::Error for Busy {}

/// An entry that stays in the tree as long as this lives, as it is.
///
/// Needs no guard: it may be held over waits and I/O. A writer that wants to replace the entry waits
/// for it; don't ask for the writer while holding one.
pub struct Locked<'t, T: Record> {
    tree: &'t RangeTree<T>,
    start: u64,
    end: u64,
    record: NonNull<RecordMemory<T>>,
}

// SAFETY: T9: a shared reference to a record, whose values are `Send + Sync` (`Record`).
unsafe impl<T: Record> Send for Locked<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Record> Sync for Locked<'_, T> {}

impl<T: Record> Locked<'_, T> {
    /// First address.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// First address behind it.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// The value.
    #[inline]
    pub fn value(&self) -> &T {
        // SAFETY: T9: the record is in the tree while it's locked.
        &unsafe { self.record.as_ref() }.value
    }
}

impl<T: Record> Drop for Locked<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: T9. Not used after the word was changed.
        let last = unsafe { self.record.as_ref() }.lock.leave();
        if last {
            self.tree.ring();
        }
    }
}

impl<T: Record + fmt::Debug> fmt::Debug for Locked<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locked")
            .field("range", &(self.start..self.end))
            .field("value", self.value())
            .finish()
    }
}

/// The lock word of an entry.
///
/// # Safety
///
/// T7: the entry is in the tree, and the writer is the caller's.
#[inline(always)]
unsafe fn word<T>(slot: &Slot<T>) -> &LockWord {
    let record = slot.record.cast::<RecordMemory<T>>();
    // SAFETY: by the caller's promise; values are the first field of their records.
    &unsafe { &*record }.lock
}

impl<T: Record> RangeTree<T> {
    /// Locks the entry that contains `addr`, or says that there is none. Never waits.
    ///
    /// # Errors
    ///
    /// [`Busy`]: a transaction is replacing the entry, or has replaced it since it was found.
    #[inline]
    pub fn lock(&self, addr: u64, guard: &Guard<'_>) -> Result<Option<Locked<'_, T>>, Busy> {
        let root = self.protected_root(guard);
        // SAFETY: T7: the guard is borrowed for longer than the call.
        unsafe { self.lock_below(root, addr) }
    }

    /// [`lock`](Self::lock) for who has the writer, shared: no transaction is under way.
    ///
    /// # Errors
    ///
    /// [`Busy`]: the entry has two thousand million readers.
    ///
    /// # Panics
    ///
    /// When `writer` is another tree's.
    pub fn lock_under(&self, addr: u64, writer: &Writer<T>) -> Result<Option<Locked<'_, T>>, Busy> {
        self.assert_own(writer.tree);
        // SAFETY: T7: the writer is borrowed for longer than the call.
        unsafe { self.lock_below(self.root(Ordering::Relaxed), addr) }
    }

    /// # Safety
    ///
    /// T7: what is reachable from `root` can't be freed during the call.
    #[inline]
    unsafe fn lock_below(&self, root: Root, addr: u64) -> Result<Option<Locked<'_, T>>, Busy> {
        // SAFETY: T7, by the caller's promise.
        let Some(place) = (unsafe { read::find_record::<T>(root, addr) }) else {
            return Ok(None);
        };
        let record = place.record.cast::<RecordMemory<T>>();
        // SAFETY: T7, by the caller's promise; values are the first field of their records.
        if !unsafe { record.as_ref() }.lock.try_enter() {
            return Err(Busy);
        }
        Ok(Some(Locked {
            tree: self,
            start: place.range.start,
            end: place.range.end,
            record,
        }))
    }

    /// The last reader of a closed entry has left.
    #[cold]
    fn ring(&self) {
        if let Some(bell) = &*self.excluding.lock() {
            bell.ring();
        }
    }

    /// Closes the entries that leave and waits for their readers. On an error they are open again.
    ///
    /// # Safety
    ///
    /// T7: the entries are in the tree, and the writer is the caller's.
    #[inline]
    pub(super) unsafe fn exclude(&self, dead: &[Dead<T>], wait: Wait<'_>) -> Result<(), GaveUp> {
        let mut readers = 0;
        for dead in dead {
            // SAFETY: by the caller's promise.
            for (_, slot) in unsafe { dead.entries() } {
                // SAFETY: by the caller's promise.
                readers |= unsafe { word(slot) }.close();
            }
        }
        if readers == 0 || planted("no_exclusion") {
            return Ok(());
        }
        // SAFETY: by the caller's promise, which goes beyond the wait.
        let entries = || dead.iter().flat_map(|dead| unsafe { dead.entries() });
        // SAFETY: as above.
        let words = || entries().map(|(_, slot)| unsafe { word(slot) });
        let result = self.wait_for_readers(|| words().all(LockWord::is_empty), wait);
        if result.is_err() {
            words().for_each(LockWord::reopen);
        }
        result
    }

    #[cold]
    fn wait_for_readers(
        &self,
        is_empty: impl FnMut() -> bool,
        wait: Wait<'_>,
    ) -> Result<(), GaveUp> {
        let bell = Bell::new();
        let sleep = wait.prepare(&bell);
        *self.excluding.lock() = Some(bell.clone());
        let result = sleep.until(is_empty);
        *self.excluding.lock() = None;
        result
    }
}
