//! Fault history as identity: what Linux keeps in `anon_vma` and its chain.
//!
//! Whether a private VMA has ever been written decides visible layout: two neighbours whose pages belong
//! to different identities never become one VMA again. Linux's rules come down to this:
//!
//! | state | comes from | merging with |
//! |---|---|---|
//! | none | never written | none, or an identity that isn't forked |
//! | an id | first write fault, own or taken over from a neighbour | none, or the same id |
//! | an id, *forked* | existed in the parent when this space was forked from it | the same id only |
//!
//! "Forked" stands for a chain of more than one link: the parent's identity and an own one. It stays for
//! ever, even when no page is shared any more. Source: `is_mergeable_anon_vma()`,
//! `vma_had_uncowed_parents()`, `reusable_anon_vma()`, `anon_vma_fork()` in mm/.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::flags::VmaFlags;
use crate::vma::{Placed, Vma};

/// Identity of the private pages of a VMA. Comparable within one space only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnonId(u64);

impl AnonId {
    /// Never written.
    pub const NONE: AnonId = AnonId(0);

    pub(crate) fn new(id: u64, forked: bool) -> Self {
        AnonId(id << 1 | u64::from(forked))
    }

    /// Whether there is none.
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }

    /// The id, if there is one.
    pub const fn id(self) -> Option<u64> {
        if self.0 == 0 { None } else { Some(self.0 >> 1) }
    }

    /// Inherited at fork: the chain has more than one link.
    pub const fn is_forked(self) -> bool {
        self.0 & 1 != 0
    }

    /// What a merged VMA of the two has; [`compatible`](Self::compatible) was checked.
    pub(crate) fn or(self, other: AnonId) -> AnonId {
        if self.is_none() { other } else { self }
    }

    /// Whether a surviving VMA with `self` can take in pages with `source`.
    ///
    /// `source_chain` is the identity whose chain would be copied: that of the VMA the pages come from, or
    /// none where the pages are an extension of a VMA and no chain is copied.
    pub(crate) fn mergeable(self, source: AnonId, source_chain: AnonId) -> bool {
        match (self.is_none(), source.is_none()) {
            (true, false) => !source_chain.is_forked(),
            (false, true) => !self.is_forked(),
            _ => self == source,
        }
    }

    /// Whether the two outer VMAs of a three-way merge go together.
    pub(crate) fn compatible(self, other: AnonId) -> bool {
        self.is_none() || other.is_none() || self == other
    }
}

/// The identity inside a VMA record: set once, by the first write fault.
///
/// Relaxed: it is written under the space's read side plus its identity lock and read under the write side,
/// so that the locks order it; lock-free readers only look at it as information.
#[derive(Debug, Default)]
pub(crate) struct AnonCell(AtomicU64);

impl AnonCell {
    pub(crate) fn new(id: AnonId) -> Self {
        AnonCell(AtomicU64::new(id.0))
    }

    pub(crate) fn get(&self) -> AnonId {
        AnonId(self.0.load(Ordering::Relaxed))
    }

    /// The caller holds the identity lock and saw none.
    pub(crate) fn set(&self, id: AnonId) {
        self.0.store(id.0, Ordering::Relaxed);
    }
}

/// Hands out ids. Protected by the space's identity lock, or by its write side.
#[derive(Clone, Debug, Default)]
pub(crate) struct AnonIds {
    last: u64,
}

impl AnonIds {
    /// A new identity of this space's own.
    pub(crate) fn fresh(&mut self) -> AnonId {
        self.last += 1;
        AnonId::new(self.last, false)
    }

    /// The child's counterpart of an identity of the parent: a link of its own in front of the parent's.
    ///
    /// Two VMAs of the parent that share an identity get different ones in the child.
    pub(crate) fn forked(&mut self, parent: AnonId) -> AnonId {
        if parent.is_none() {
            return AnonId::NONE;
        }
        self.last += 1;
        AnonId::new(self.last, true)
    }
}

/// The identity that `vma` may take over from a neighbour at its first write fault: the next one's, else
/// the previous one's. Source: `find_mergeable_anon_vma()`.
pub(crate) fn reusable(
    vma: Placed<'_>,
    prev: Option<Placed<'_>>,
    next: Option<Placed<'_>>,
) -> Option<AnonId> {
    let from_next = next
        .filter(|next| goes_together(vma, *next))
        .map(|next| next.vma.anon());
    let from_prev = || {
        prev.filter(|prev| goes_together(*prev, vma))
            .map(|prev| prev.vma.anon())
    };
    let usable = |id: &AnonId| !id.is_none() && !id.is_forked();
    from_next
        .filter(usable)
        .or_else(|| from_prev().filter(usable))
}

/// Whether two neighbours could become one VMA if their protection were the same (`anon_vma_compatible`).
fn goes_together(low: Placed<'_>, high: Placed<'_>) -> bool {
    let ignored = VmaFlags::ACCESS | VmaFlags::STICKY;
    low.end == high.start
        && Vma::same_policy(low.vma, high.vma)
        && Vma::same_file(low.vma, high.vma)
        && (low.vma.flags() ^ high.vma.flags()) - ignored == VmaFlags::empty()
        && low.vma.pgoff().wrapping_add(low.page_count()) == high.vma.pgoff()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn only_an_unforked_identity_goes_with_none() {
        let own = AnonId::new(1, false);
        let forked = AnonId::new(2, true);
        let other = AnonId::new(3, false);
        let none = AnonId::NONE;
        assert!(none.mergeable(none, none));
        assert!(own.mergeable(none, none) && none.mergeable(own, own));
        assert!(!forked.mergeable(none, none) && !none.mergeable(forked, forked));
        assert!(forked.mergeable(forked, forked) && own.mergeable(own, own));
        assert!(!own.mergeable(other, other) && !own.compatible(other));
    }

    #[test]
    fn shared_identities_of_the_parent_become_different_ones_in_the_child() {
        let mut ids = AnonIds::default();
        let shared = ids.fresh();
        let (first, second) = (ids.forked(shared), ids.forked(shared));
        assert!(first != second && first.is_forked() && second.is_forked());
        assert!(ids.forked(AnonId::NONE).is_none());
    }
}
