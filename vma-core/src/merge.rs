//! Whether neighbouring mappings become one: decided here, for all calls.
//!
//! A call describes what it is about to put into a range as a [`Proposal`] and gets a [`Merge`]. All of the
//! following hold, or there is no merging on that side:
//!
//! | condition | source in Linux 6.18 |
//! |---|---|
//! | virtually adjacent | `can_vma_merge_left`, `can_vma_merge_right` |
//! | equal flags, but for soft-dirty and guard pages, which the merged VMA gets from any part | `is_mergeable_vma`, `VM_STICKY` |
//! | same open file description | `is_mergeable_vma` |
//! | equal name, memory policy, owner, monitor | `is_mergeable_vma`, `mpol_equal` |
//! | page offsets go on | `can_vma_merge_before`, `can_vma_merge_after` |
//! | none of IO, PFNMAP, MIXEDMAP, DONTEXPAND | `vma_merge_new_range`, `vma_merge_existing_range` |
//! | identities of private pages go together ([`AnonId::mergeable`]) | `is_mergeable_anon_vma` |
//! | on both sides at once: the outer two go together as well ([`AnonId::compatible`]); else left only | `can_vma_merge_right` |
//! | a VMA that would be removed isn't followed by a close hook; if only the next one is, left only | `can_merge_remove_vma` |
//! | an existing VMA's changed part reaches the VMA's end on that side | `vma_merge_existing_range` |
//! | brk merges to the left only | `just_expand` |
//!
//! Where merging is tried: map, brk growth, the destination of remap and its growth in place (new ranges);
//! protect, the mlock family, advice kept in flags, seal, naming (existing ones). Never: stack growth, unmap, shrinking.

use std::sync::Arc;

use crate::anon::AnonId;
use crate::file::OpenFile;
use crate::flags::VmaFlags;
use crate::vma::{Extras, Placed, same_extras, same_open_file};

/// What a range is about to hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Proposal<'a> {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) flags: VmaFlags,
    pub(crate) file: Option<&'a Arc<OpenFile>>,
    pub(crate) extras: Option<&'a Arc<Extras>>,
    pub(crate) pgoff: u64,
    /// Identity of the pages in it.
    pub(crate) anon: AnonId,
    /// Identity whose chain a neighbour would take over: see [`AnonId::mergeable`].
    pub(crate) chain: AnonId,
    pub(crate) kind: Kind,
}

/// How the range comes to hold it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The range was free.
    New,
    /// As new, but only what lies to the left may grow (brk).
    LeftOnly,
    /// A part of an existing VMA changes its attributes.
    Existing {
        /// The part begins where the VMA does.
        at_start: bool,
        /// The part ends where the VMA does.
        at_end: bool,
        /// The VMA has a close hook.
        has_close: bool,
    },
}

/// Outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Merge {
    /// It stays by itself.
    Alone,
    /// The previous VMA grows over it.
    Left,
    /// The next VMA grows down over it.
    Right,
    /// The previous VMA grows over it and over the next one.
    Both,
}

/// Decides. `prev` and `next` are the neighbours in the layout, adjacent or not.
#[inline]
pub(crate) fn decide(
    new: &Proposal<'_>,
    prev: Option<Placed<'_>>,
    next: Option<Placed<'_>>,
) -> Merge {
    if new.flags.intersects(VmaFlags::SPECIAL) {
        return Merge::Alone;
    }
    let (try_left, try_right) = match new.kind {
        Kind::New => (true, true),
        Kind::LeftOnly => (true, false),
        Kind::Existing {
            at_start, at_end, ..
        } => (at_start, at_end),
    };
    let prev = prev.filter(|prev| try_left && fits_left(new, *prev));
    let next = next
        .filter(|next| try_right && fits_right(new, *next))
        .filter(|next| prev.is_none_or(|prev| prev.vma.anon().compatible(next.vma.anon())));
    if prev.is_none() && next.is_none() {
        return Merge::Alone;
    }
    if let Kind::Existing {
        at_start: true,
        at_end: true,
        has_close: true,
    } = new.kind
    {
        // The whole VMA would go, and may not.
        return Merge::Alone;
    }
    match (prev, next) {
        (Some(_), Some(next)) if next.vma.has_close() => Merge::Left,
        (Some(_), Some(_)) => Merge::Both,
        (Some(_), None) => Merge::Left,
        _ => Merge::Right,
    }
}

#[inline]
fn fits_left(new: &Proposal<'_>, prev: Placed<'_>) -> bool {
    prev.end == new.start
        && prev.vma.pgoff().wrapping_add(prev.page_count()) == new.pgoff
        && same_attributes(new, prev)
        && prev.vma.anon().mergeable(new.anon, new.chain)
}

#[inline]
fn fits_right(new: &Proposal<'_>, next: Placed<'_>) -> bool {
    let page_count = next.pages.count(new.end - new.start);
    next.start == new.end
        && new.pgoff.wrapping_add(page_count) == next.vma.pgoff()
        && same_attributes(new, next)
        && next.vma.anon().mergeable(new.anon, new.chain)
}

fn same_attributes(new: &Proposal<'_>, other: Placed<'_>) -> bool {
    (new.flags ^ other.flags()) - VmaFlags::STICKY == VmaFlags::empty()
        && same_open_file(new.file, other.vma.file())
        && same_extras(new.extras, other.vma.extras())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::addr::Pages;
    use crate::vma::Vma;

    const PAGES: Pages = Pages::new(4096);
    const RW: VmaFlags = VmaFlags::READ.union(VmaFlags::WRITE);

    fn vma(start_page: u64, anon: AnonId) -> Vma {
        Vma::new(RW, start_page, 0).with_anon(anon)
    }

    fn placed(start_page: u64, end_page: u64, vma: &Vma) -> Placed<'_> {
        Placed {
            start: start_page * 4096,
            end: end_page * 4096,
            vma,
            pages: PAGES,
        }
    }

    fn proposal(anon: AnonId, kind: Kind) -> Proposal<'static> {
        Proposal {
            start: 4 * 4096,
            end: 6 * 4096,
            flags: RW,
            file: None,
            extras: None,
            pgoff: 4,
            anon,
            chain: anon,
            kind,
        }
    }

    /// Every pair of identities on both sides of a new range.
    #[test]
    fn a_new_range_joins_each_side_whose_identity_allows_it() {
        let ids = [
            AnonId::NONE,
            AnonId::new(1, false),
            AnonId::new(2, false),
            AnonId::new(3, true),
        ];
        for left in ids {
            for right in ids {
                let (low, high) = (vma(0, left), vma(6, right));
                let got = decide(
                    &proposal(AnonId::NONE, Kind::New),
                    Some(placed(0, 4, &low)),
                    Some(placed(6, 9, &high)),
                );
                let want = match (!left.is_forked(), !right.is_forked()) {
                    (true, true) if left.compatible(right) => Merge::Both,
                    (true, _) => Merge::Left,
                    (false, true) => Merge::Right,
                    (false, false) => Merge::Alone,
                };
                assert_eq!(got, want, "{left:?} {right:?}");
            }
        }
    }

    #[test]
    fn an_inner_part_of_a_vma_never_merges() {
        let (low, high) = (vma(0, AnonId::NONE), vma(6, AnonId::NONE));
        for (at_start, at_end, want) in [
            (false, false, Merge::Alone),
            (true, false, Merge::Left),
            (false, true, Merge::Right),
            (true, true, Merge::Both),
        ] {
            let kind = Kind::Existing {
                at_start,
                at_end,
                has_close: false,
            };
            let got = decide(
                &proposal(AnonId::NONE, kind),
                Some(placed(0, 4, &low)),
                Some(placed(6, 9, &high)),
            );
            assert_eq!(got, want);
        }
    }

    #[test]
    fn each_special_flag_alone_prevents_merging() {
        let low = vma(0, AnonId::NONE);
        for flag in VmaFlags::SPECIAL.iter() {
            let low = low.clone().with_flags(RW | flag);
            let mut new = proposal(AnonId::NONE, Kind::New);
            new.flags |= flag;
            assert_eq!(decide(&new, Some(placed(0, 4, &low)), None), Merge::Alone);
        }
    }

    #[test]
    fn offsets_must_go_on_and_soft_dirty_does_not_matter() {
        let low = vma(0, AnonId::NONE).with_flags(RW | VmaFlags::SOFTDIRTY);
        let new = proposal(AnonId::NONE, Kind::New);
        assert_eq!(decide(&new, Some(placed(0, 4, &low)), None), Merge::Left);
        let moved = Proposal { pgoff: 5, ..new };
        assert_eq!(decide(&moved, Some(placed(0, 4, &low)), None), Merge::Alone);
        assert_eq!(decide(&new, Some(placed(0, 3, &low)), None), Merge::Alone);
    }
}
