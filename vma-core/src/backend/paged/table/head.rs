//! What tables of all levels have: how many links lead to one, and whom it counts for.

use std::sync::atomic::AtomicUsize;

use vma_rcu::sync::atomic::{AtomicU32, Ordering};
use vma_rcu::sync::{Arc, Mutex, MutexGuard, Track, planted};

/// What tables of a space take, and may take. A table counts for the space that made it, until it's freed, whoever has it by then.
pub(in super::super) struct Account {
    /// Relaxed: a bound that orders nothing, and isn't modelled.
    bytes: AtomicUsize,
    limit: usize,
}

impl Account {
    pub(in super::super) fn new(limit: usize) -> Self {
        Account {
            bytes: AtomicUsize::new(0),
            limit,
        }
    }

    /// `None` beyond the limit.
    pub(super) fn charge(&self, size: usize) -> Option<()> {
        let fits = self.bytes.fetch_add(size, Ordering::Relaxed) + size <= self.limit;
        if !fits {
            self.uncharge(size);
        }
        fits.then_some(())
    }

    pub(in super::super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(super) fn uncharge(&self, size: usize) {
        self.bytes.fetch_sub(size, Ordering::Relaxed);
    }
}

/// Somebody else has led to the table at some time, so that readers of other spaces may be in it.
const EVER: u32 = 1 << 31;

/// What tables of all levels have.
pub(super) struct Head {
    /// Links to the table, less one, and [`EVER`]. One more is relaxed, since who makes it has one; one less is a release, and the
    /// last one acquires: what was done to the table through other links comes before. Model:
    /// `a_shared_table_is_freed_once`.
    refs: AtomicU32,
    /// Held while the table is copied; and for a moment, by who drops a link to it, before that no longer counts: so who has found
    /// its link in place under the lock copies a table that stays shared meanwhile, and that nobody changes. Models:
    /// `a_late_copy_leaves_the_owner_alone`, `a_directory_is_copied_while_its_last_link_goes`.
    copying: Mutex<()>,
    /// For models: read by who copies the table, written by who drops the last link.
    pub(super) copied: Track,
    /// For models: read by who comes along, written when the table's memory is given back.
    pub(super) life: Track,
    /// Taken out when the table no longer counts.
    pub(super) account: Option<Arc<Account>>,
}

impl Head {
    /// Of a table that counts for nobody.
    #[cfg(loom)]
    pub(super) fn none() -> Self {
        Head {
            refs: AtomicU32::new(0),
            copying: Mutex::new(()),
            copied: Track::new(),
            life: Track::new(),
            account: None,
        }
    }

    /// Nobody else leads to the table. It stays so: only who has a link can make another.
    pub(super) fn is_sole(&self) -> bool {
        self.refs.load(Ordering::Acquire) & !EVER == 0
    }

    pub(super) fn was_shared(&self) -> bool {
        self.refs.load(Ordering::Relaxed) & EVER != 0
    }

    pub(super) fn add_link(&self) {
        let refs = self.refs.fetch_add(1, Ordering::Relaxed);
        assert!(refs & !EVER < EVER / 2, "a thousand million links");
        self.refs.fetch_or(EVER, Ordering::Relaxed);
    }

    /// See `copying`.
    pub(super) fn lock_to_copy(&self) -> MutexGuard<'_, ()> {
        self.copying.lock()
    }

    /// Whether it was the last.
    pub(super) fn drop_link(&self) -> bool {
        if !planted("no_wait_for_copies") {
            drop(self.copying.lock());
        }
        let order = if planted("relaxed_drop_link") {
            Ordering::Relaxed
        } else {
            Ordering::Release
        };
        let last = self.refs.fetch_sub(1, order) & !EVER == 0;
        if last && !planted("no_last_acquire") {
            // As a load, which the thread sanitizer knows, unlike a fence.
            self.refs.load(Ordering::Acquire);
        }
        if last {
            self.copied.write();
        }
        last
    }

    pub(super) fn uncharge(&mut self, size: usize) {
        if let Some(account) = self.account.take() {
            account.uncharge(size);
        }
    }
}
