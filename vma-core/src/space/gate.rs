//! Mappings closed to faults while a call is at work on their pages.

use vma_rcu::sync::atomic::{Ordering, fence};
use vma_rcu::sync::planted;
use vma_rcu::tree::View;

use crate::vma::Vma;

/// Between a store that faults look at (of a gate, of what is mapped) and the look at tables. Pairs with the fence under the lock
/// of a leaf that a page is put into: of the loads that follow (of the gate or the mapping there, of table slots here) one sees the
/// other side's store. Model: `a_fault_puts_nothing_into_an_unmapped_range`.
pub(crate) fn fence_before_tables() {
    if !planted("no_publish_fence") {
        fence(Ordering::SeqCst);
    }
}

/// The mappings in some ranges. Their gates are opened when it's dropped.
pub(super) struct Gates<'v> {
    view: View<'v, Vma>,
    ranges: &'v [(u64, u64)],
}

impl<'v> Gates<'v> {
    pub(super) fn new(view: View<'v, Vma>, ranges: &'v [(u64, u64)]) -> Self {
        Gates { view, ranges }
    }

    /// Closes them; they stay closed when this is gone. A fault under way has put in its page by now, or puts in none.
    pub(super) fn close(self) {
        if !self.ranges.is_empty() {
            self.set(true);
            fence_before_tables();
        }
        std::mem::forget(self);
    }

    fn set(&self, closed: bool) {
        for (start, end) in self.ranges {
            let within = self.view.iter(*start);
            for entry in within.take_while(|entry| entry.start < *end) {
                entry.value.set_gated(closed);
            }
        }
    }
}

impl Drop for Gates<'_> {
    fn drop(&mut self) {
        self.set(false);
    }
}
