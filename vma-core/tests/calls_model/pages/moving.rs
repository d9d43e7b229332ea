//! mremap(2).

use vma_core::VmaFlags;

use super::{Answer, EFAULT, EINVAL, ENOMEM, EPERM, Model, Page, failed};
use crate::call::Call;
use crate::on_space::Outcome;

const MAYMOVE: u64 = 1;
const FIXED: u64 = 2;
const DONTUNMAP: u64 = 4;

/// Arguments in pages.
#[derive(Clone, Copy)]
struct Move {
    from: u64,
    old: u64,
    new: u64,
    to: u64,
    anywhere: bool,
    fixed: bool,
    keep: bool,
}

impl Model {
    pub(super) fn remap(&mut self, call: &Call) -> Answer {
        let Call::Remap {
            at,
            old,
            new,
            flags,
            to,
        } = *call
        else {
            unreachable!("called for mremap alone");
        };
        let wanted = Move {
            from: at / self.page,
            old: old.div_ceil(self.page),
            new: new.div_ceil(self.page),
            to: to / self.page,
            anywhere: flags & MAYMOVE != 0,
            fixed: flags & FIXED != 0,
            keep: flags & DONTUNMAP != 0,
        };
        if !self.is_aligned(at) || wanted.new == 0 {
            return failed(EINVAL);
        }
        if wanted.fixed || wanted.keep {
            let overlap =
                wanted.from < wanted.to + wanted.new && wanted.to < wanted.from + wanted.old;
            let resized = wanted.keep && wanted.old != wanted.new;
            if !self.is_aligned(to) || !wanted.anywhere || resized || overlap {
                return failed(EINVAL);
            }
        }
        if wanted.fixed && wanted.old == wanted.new {
            return self.move_all(wanted);
        }
        let Some((_, end)) = self.mapping(wanted.from) else {
            return failed(EFAULT);
        };
        let first = self.pages[&wanted.from];
        if first.has(VmaFlags::SEALED) {
            return failed(EPERM);
        }
        if wanted.old == 0 && !first.has(VmaFlags::MAYSHARE) {
            return failed(EINVAL);
        }
        if wanted.fixed || wanted.keep {
            self.move_one(wanted, end)
        } else {
            self.resize(wanted, end)
        }
    }

    fn at(&self, page: u64) -> Answer {
        Answer::This(Outcome::At(page * self.page))
    }

    /// No destination was given.
    fn resize(&mut self, wanted: Move, end: u64) -> Answer {
        let Move { from, old, new, .. } = wanted;
        if new < old {
            // Whatever lies in the tail.
            if self.any_sealed(from + new, from + old) {
                return failed(EPERM);
            }
            self.remove(from + new, from + old);
        }
        if new <= old {
            return self.at(from);
        }
        if from + old > end {
            return failed(EFAULT);
        }
        let first = self.pages[&from];
        if from + old == end && self.is_free(end, from + new) {
            for number in end..from + new {
                self.pages.insert(number, first.further(number - from));
            }
            return self.at(from);
        }
        if !wanted.anywhere {
            return failed(ENOMEM);
        }
        self.remove(from, from + old);
        Answer::This(Outcome::Outside)
    }

    /// One mapping to a given place, or near it.
    fn move_one(&mut self, wanted: Move, end: u64) -> Answer {
        let Move {
            from, old, new, to, ..
        } = wanted;
        if from + old.min(new) > end {
            return failed(EFAULT);
        }
        if from + old > end {
            // Shrinking, and the tail is in other mappings.
            return Answer::Unknown;
        }
        if wanted.fixed {
            if self.any_sealed(to, to + new) {
                return failed(EPERM);
            }
            self.remove(to, to + new);
            if !self.pages.contains_key(&from) {
                // With an old length of 0 nothing overlaps.
                return failed(EFAULT);
            }
        }
        let arrives = wanted.fixed || self.takes_hint(to, to + new);
        let first = self.pages[&from];
        if wanted.keep {
            if !self.unlock_source(from, (to, to + new), arrives) {
                return Answer::Unknown;
            }
        } else {
            self.remove(from, from + old);
        }
        if !arrives {
            return Answer::This(Outcome::Outside);
        }
        self.fill(to, to + new, first);
        self.at(to)
    }

    /// What stays behind is unlocked, the whole mapping of it. `false`: it may have merged with what has moved, which then
    /// is unlocked as well.
    fn unlock_source(&mut self, from: u64, (to, to_end): (u64, u64), arrives: bool) -> bool {
        let (start, end) = self.mapping(from).unwrap();
        let locked = self.pages[&from].has(VmaFlags::LOCKED);
        if locked && arrives && (to == end || to_end == start) {
            return false;
        }
        for (_, page) in self.pages.range_mut(start..end) {
            page.clear(VmaFlags::LOCK_BITS);
            page.history = None;
        }
        true
    }

    /// Every mapping of the range, holes keep their distance. The ones before a failing one have moved.
    fn move_all(&mut self, wanted: Move) -> Answer {
        let Move { from, old, to, .. } = wanted;
        if self.mapping(from).is_none() {
            return failed(EFAULT);
        }
        let pieces: Vec<(u64, u64)> = self
            .borders
            .iter()
            .map(|(start, end)| (*start.max(&from), *end.min(&(from + old))))
            .filter(|(start, end)| start < end)
            .collect();
        let moved: Vec<Page> = pieces.iter().map(|(start, _)| self.pages[start]).collect();
        for ((start, end), first) in pieces.into_iter().zip(moved) {
            let (target, target_end) = (start - from + to, end - from + to);
            if first.has(VmaFlags::SEALED) || self.any_sealed(target, target_end) {
                return failed(EPERM);
            }
            self.remove(target, target_end);
            let touches = |(from, to): &(u64, u64)| *from == target_end || *to == target;
            if wanted.keep && first.has(VmaFlags::LOCKED) && self.borders.iter().any(touches) {
                // It may become part of a later source, which is unlocked as a whole.
                return Answer::Unknown;
            }
            if wanted.keep {
                if !self.unlock_source(start, (target, target_end), true) {
                    return Answer::Unknown;
                }
            } else {
                self.remove(start, end);
            }
            self.fill(target, target_end, first);
        }
        self.at(to)
    }
}
