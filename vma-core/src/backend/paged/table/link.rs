//! What leads from a table to the next.

use std::ptr;

use vma_rcu::sync::atomic::{AtomicPtr, Ordering};
use vma_rcu::sync::planted;

use super::directory::Directory;
use super::head::Head;
use super::leaf::Leaf;

/// What a slot holds: nothing, or where a table is and whether it's shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Link(pub(super) *mut ());

const SHARED: usize = 1;

impl Link {
    pub(super) const NONE: Link = Link(ptr::null_mut());

    pub(super) fn is_none(self) -> bool {
        self.0.is_null()
    }

    pub(super) fn is_shared(self) -> bool {
        self.0.addr() & SHARED != 0
    }

    pub(super) fn shared(self) -> Self {
        Link(self.0.map_addr(|address| address | SHARED))
    }

    pub(super) fn own(self) -> Self {
        Link(self.0.map_addr(|address| address & !SHARED))
    }

    /// # Safety
    ///
    /// P1: the link was found in a slot of a directory with `below` 0, or taken out of it, by a caller who keeps the leaf alive.
    pub(super) unsafe fn leaf<'t>(self) -> &'t Leaf {
        // SAFETY: by the caller's promise.
        unsafe { &*self.own().0.cast::<Leaf>() }
    }

    /// # Safety
    ///
    /// As [`leaf`](Self::leaf), for `below` above 0.
    pub(super) unsafe fn directory<'t>(self) -> &'t Directory {
        // SAFETY: by the caller's promise.
        unsafe { &*self.own().0.cast::<Directory>() }
    }

    /// # Safety
    ///
    /// As [`leaf`](Self::leaf), for the level that `below` says.
    pub(super) unsafe fn head<'t>(self, below: u32) -> &'t Head {
        if below == 0 {
            // SAFETY: by the caller's promise.
            &unsafe { self.leaf() }.head
        } else {
            // SAFETY: by the caller's promise.
            &unsafe { self.directory() }.head
        }
    }
}

/// Where a link is.
pub(super) struct Slot(
    /// Release when a table is linked (or the slot emptied), acquire on the way down: what the table holds was written before.
    /// Model: `two_faults_share_one_table`.
    pub(super) AtomicPtr<()>,
);

impl Slot {
    pub(super) fn load(&self) -> Link {
        Link(self.0.load(Ordering::Acquire))
    }

    pub(super) fn store(&self, link: Link) {
        self.0.store(link.0, Ordering::Release);
    }

    pub(super) fn take(&self) -> Link {
        if self.load().is_none() {
            return Link::NONE;
        }
        self.replace(Link::NONE)
    }

    /// Takes out what was found a moment ago, by who alone takes links out: of links that aren't shared faults replace none, so that a
    /// store does, where hundreds are taken.
    pub(super) fn take_known(&self, link: Link) -> Link {
        if link.is_shared() {
            return self.take();
        }
        self.store(Link::NONE);
        link
    }

    pub(super) fn replace(&self, link: Link) -> Link {
        Link(self.0.swap(link.0, Ordering::AcqRel))
    }

    /// Whether it held `from`, and holds `to` now.
    pub(super) fn exchange(&self, from: Link, to: Link) -> bool {
        let order = if planted("relaxed_link") {
            Ordering::Relaxed
        } else {
            Ordering::AcqRel
        };
        self.0
            .compare_exchange(from.0, to.0, order, Ordering::Acquire)
            .is_ok()
    }
}
