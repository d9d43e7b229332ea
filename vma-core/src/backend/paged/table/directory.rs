//! Tables of the levels above the lowest.

use std::ops::Range;
#[cfg(loom)]
use std::ptr;

#[cfg(loom)]
use vma_rcu::sync::atomic::AtomicPtr;
use vma_rcu::sync::{Arc, Mutex};

use super::head::{Account, Head};
use super::leaf::Leaf;
use super::link::{Link, Slot};
use super::{BITS, ENTRIES, LEAF_BYTES};

/// A table of links.
pub(super) struct Directory {
    pub(super) slots: [Slot; ENTRIES],
    pub(super) head: Head,
    /// **P5** Held while a link is taken out, or replaced by one to a copy, and while links are marked and copied: so what a link leads
    /// to has that link for as long as it's copied, and is nobody else's alone.
    pub(super) copying: Mutex<()>,
    /// Levels between its tables and the leaves: 0 if they are leaves.
    pub(super) below: u32,
}

impl Directory {
    #[cfg(not(loom))]
    fn zeroed() -> Option<Box<Self>> {
        // SAFETY: null pointers, no account, a free mutex (as in a leaf), and a number.
        unsafe { super::try_zeroed() }
    }

    #[cfg(loom)]
    fn zeroed() -> Option<Box<Self>> {
        Some(Box::new(Directory {
            slots: std::array::from_fn(|_| Slot(AtomicPtr::new(ptr::null_mut()))),
            head: Head::none(),
            copying: Mutex::new(()),
            below: 0,
        }))
    }

    /// `None` when memory runs out, or the account's limit.
    pub(super) fn try_new(below: u32, account: &Arc<Account>) -> Option<Box<Self>> {
        account.charge(size_of::<Self>())?;
        let Some(mut directory) = Self::zeroed() else {
            account.uncharge(size_of::<Self>());
            return None;
        };
        directory.head.account = Some(Arc::clone(account));
        directory.below = below;
        Some(directory)
    }

    /// Bytes that a slot maps.
    pub(super) fn slot_bytes(&self) -> u64 {
        LEAF_BYTES << (BITS * self.below)
    }

    pub(super) fn slot(&self, addr: u64) -> &Slot {
        &self.slots[(addr / self.slot_bytes()) as usize % ENTRIES]
    }

    /// The slots, of this one that begins at `base`, that a range touches.
    pub(super) fn touched(&self, base: u64, start: u64, end: u64) -> Range<usize> {
        let bytes = self.slot_bytes();
        let from = start.saturating_sub(base) / bytes;
        let to = end.saturating_sub(base).div_ceil(bytes).min(ENTRIES as u64);
        from as usize..to.max(from) as usize
    }

    /// Takes a link out.
    pub(super) fn take(&self, slot: &Slot) -> Link {
        if slot.load().is_none() {
            return Link::NONE;
        }
        let _lock = self.copying.lock();
        slot.take()
    }

    /// Puts a link in, and takes the one out that was there.
    pub(super) fn replace(&self, slot: &Slot, link: Link) -> Link {
        let _lock = self.copying.lock();
        slot.replace(link)
    }

    /// A copy that leads to the same tables; all links say so, here and there.
    ///
    /// It stays as long as the call lasts.
    pub(super) fn copy_into(&self, copy: &Directory) {
        let _lock = self.copying.lock();
        for (slot, to) in self.slots.iter().zip(&copy.slots) {
            let link = slot.load();
            if !link.is_none() {
                to.store(self.share(slot, link));
            }
        }
    }

    /// One more link to what a slot of it leads to. Nobody changes the slot meanwhile.
    pub(super) fn share(&self, slot: &Slot, link: Link) -> Link {
        // SAFETY: P1: in a slot, and nobody takes it out meanwhile.
        unsafe { link.head(self.below) }.add_link();
        if !link.is_shared() {
            slot.store(link.shared());
        }
        link.shared()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        self.head.uncharge(size_of::<Directory>());
        for slot in &self.slots {
            // Emptied before, but for what a late fault has linked, which nobody else has.
            let link = slot.take();
            if link.is_none() {
                continue;
            }
            debug_assert!(
                !link.is_shared(),
                "links to shared tables are dropped one by one"
            );
            if self.below == 0 {
                // SAFETY: P1: a leaf, made of a box; nobody else can reach this directory.
                drop(unsafe { Box::from_raw(link.own().0.cast::<Leaf>()) });
            } else {
                // SAFETY: P1: a directory, as above.
                drop(unsafe { Box::from_raw(link.own().0.cast::<Directory>()) });
            }
        }
    }
}
