//! The order in which overlapping calls were done.
//!
//! A log shows when a call began and when it ended; the kernel did its work somewhere between. If the calls, done in the
//! order in which they ended, don't give the recorded results, another order may. The search here finds one: it
//! goes back over the last calls that overlap, and takes calls that have begun but not ended into account. It is
//! bounded, and what it can't explain is reported as such.

/// A state on which calls are done.
pub trait World: Sized {
    /// A call with its recorded result.
    type Op: Spanned;

    /// An exact copy; `None` without memory for it.
    #[must_use]
    fn copy(&self) -> Option<Self>;

    /// Does `op`; whether the result is the recorded one.
    fn fits(&mut self, op: &Self::Op) -> bool;
}

/// When a call began and ended, in lines of the log.
pub trait Spanned {
    /// The line on which it begins.
    fn begin(&self) -> u64;
    /// The line on which it ends; `None`: never.
    fn end(&self) -> Option<u64>;

    /// Whether this call was over before `other` began, so that it was done first.
    fn is_before(&self, other: &Self) -> bool {
        self.end().is_some_and(|end| end < other.begin())
    }
}

/// How many states a search may make.
pub const BUDGET: u32 = 4000;

/// A search for an order of `must`, all of which have to be done, with up to `extra` of `may` between them.
#[derive(Debug)]
pub struct Search<'a, W: World> {
    must: Vec<&'a W::Op>,
    may: Vec<&'a W::Op>,
    /// States left to be made.
    pub budget: u32,
}

/// What a search found.
#[derive(Debug)]
pub struct Found<W> {
    /// The state after it.
    pub world: W,
    /// The order: `Ok(i)` is `must[i]`, `Err(i)` is `may[i]`.
    pub order: Vec<Result<usize, usize>>,
}

impl<'a, W: World> Search<'a, W> {
    /// A search; `must` is in the order that is tried first.
    pub fn new(must: Vec<&'a W::Op>, may: Vec<&'a W::Op>, budget: u32) -> Self {
        Self { must, may, budget }
    }

    /// Searches from `start` on with exactly `extra` calls of `may`.
    pub fn run(&mut self, start: &W, extra: usize) -> Option<Found<W>> {
        let mut order = Vec::with_capacity(self.must.len() + extra);
        self.step(start, extra, &mut order)
            .map(|world| Found { world, order })
    }

    fn step(
        &mut self,
        world: &W,
        extra: usize,
        order: &mut Vec<Result<usize, usize>>,
    ) -> Option<W> {
        let used = order.iter().filter(|o| o.is_ok()).count();
        let candidates: Vec<Result<usize, usize>> = (0..self.must.len())
            .map(Ok)
            .chain((0..self.may.len()).filter(|_| extra > 0).map(Err))
            .filter(|c| !order.contains(c) && self.may_be_next(*c, order))
            .collect();
        for candidate in candidates {
            // An extra call behind the last of `must` explains nothing.
            if used + usize::from(candidate.is_ok()) == self.must.len()
                && extra > usize::from(candidate.is_err())
            {
                continue;
            }
            self.budget = self.budget.checked_sub(1)?;
            let mut next = world.copy()?;
            if !next.fits(self.op(candidate)) {
                continue;
            }
            order.push(candidate);
            let left = extra - usize::from(candidate.is_err());
            if left == 0 && order.iter().filter(|o| o.is_ok()).count() == self.must.len() {
                return Some(next);
            }
            if let Some(done) = self.step(&next, left, order) {
                return Some(done);
            }
            order.pop();
        }
        None
    }

    fn op(&self, which: Result<usize, usize>) -> &'a W::Op {
        match which {
            Ok(i) => self.must[i],
            Err(i) => self.may[i],
        }
    }

    /// Whether nothing that is still to be done was over before this call began.
    fn may_be_next(&self, which: Result<usize, usize>, order: &[Result<usize, usize>]) -> bool {
        let op = self.op(which);
        (0..self.must.len())
            .filter(|&i| Ok(i) != which && !order.contains(&Ok(i)))
            .all(|i| !self.must[i].is_before(op))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A counter: each call adds one and returns what was there.
    #[derive(Clone)]
    struct Counter(u64);

    struct Take {
        begin: u64,
        end: Option<u64>,
        got: u64,
    }

    impl Spanned for Take {
        fn begin(&self) -> u64 {
            self.begin
        }
        fn end(&self) -> Option<u64> {
            self.end
        }
    }

    impl World for Counter {
        type Op = Take;
        fn copy(&self) -> Option<Self> {
            Some(self.clone())
        }
        fn fits(&mut self, op: &Take) -> bool {
            self.0 += 1;
            op.got == self.0 - 1
        }
    }

    fn take(begin: u64, end: u64, got: u64) -> Take {
        Take {
            begin,
            end: Some(end),
            got,
        }
    }

    #[test]
    fn overlapping_calls_are_put_in_the_order_that_fits() {
        let (a, b, c) = (take(1, 9, 2), take(2, 9, 0), take(3, 9, 1));
        let found = Search::new(vec![&a, &b, &c], vec![], BUDGET)
            .run(&Counter(0), 0)
            .unwrap();
        assert_eq!(found.order, [Ok(1), Ok(2), Ok(0)]);
        assert_eq!(found.world.0, 3);
    }

    #[test]
    fn calls_that_have_not_ended_may_be_done_already() {
        let (target, pending, other) = (take(1, 5, 1), take(2, 20, 0), take(3, 20, 7));
        let mut search = Search::new(vec![&target], vec![&other, &pending], BUDGET);
        assert!(search.run(&Counter(0), 0).is_none());
        assert_eq!(search.run(&Counter(0), 1).unwrap().order, [Err(1), Ok(0)]);
    }

    #[test]
    fn calls_one_after_the_other_keep_their_order() {
        let (a, b) = (take(1, 2, 1), take(3, 4, 0));
        assert!(
            Search::new(vec![&a, &b], vec![], BUDGET)
                .run(&Counter(0), 0)
                .is_none()
        );
    }

    #[test]
    fn the_search_is_bounded() {
        let calls: Vec<Take> = (0..12).map(|_| take(1, 9, 99)).collect();
        let mut search = Search::new(calls.iter().collect(), vec![], 5);
        assert!(search.run(&Counter(0), 0).is_none());
        assert_eq!(search.budget, 0);
    }
}
