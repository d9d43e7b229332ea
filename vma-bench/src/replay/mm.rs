//! An address space with the calls that are under way in it, and a journal to go back in.

use std::time::{Duration, Instant};

use super::{
    op::{Got, Op},
    order::{BUDGET, Search, Spanned, World},
    space::Space,
    stats::Verdict,
    strace::{call::Ret, log::CallId},
};

/// How many of the last calls may be put in another order.
const WINDOW: usize = 6;
/// How many calls that haven't ended may be taken to be done already.
const EXTRA: usize = 4;
/// Calls in the journal before the point to go back to is moved up, if nothing is under way.
const JOURNAL: usize = 64;
/// And at the latest.
const JOURNAL_MAX: usize = 256;

/// A call that was done.
#[derive(Debug, Clone)]
struct Done {
    op: Op,
    forced: bool,
}

/// An address space.
#[derive(Debug)]
pub struct Mm {
    space: Space,
    /// The space before the journal; `None` where there was no memory for a copy.
    base: Option<Space>,
    done: Vec<Done>,
    pending: Vec<Op>,
    /// Calls that were done before their end came.
    early: Vec<Op>,
    /// Time in the library.
    pub time: Duration,
    /// Calls in that time.
    pub timed_calls: u64,
}

/// What became of a call.
#[derive(Debug, Clone, Copy)]
pub struct Settled {
    /// How its recorded result was reached.
    pub verdict: Verdict,
    /// What the library returned at the call's place in the log.
    pub got: Got,
}

impl World for Space {
    type Op = Op;

    fn copy(&self) -> Option<Self> {
        Space::copy(self)
    }

    fn fits(&mut self, op: &Op) -> bool {
        self.apply(op).fits(&op.ret)
    }
}

impl Mm {
    /// An address space that begins as `space`.
    pub fn new(space: Space) -> Self {
        let base = space.copy();
        Self {
            space,
            base,
            done: Vec::new(),
            pending: Vec::new(),
            early: Vec::new(),
            time: Duration::ZERO,
            timed_calls: 0,
        }
    }

    /// The space as it is.
    pub fn space(&self) -> &Space {
        &self.space
    }

    /// The space, for a change that isn't a call of the log; calls before it keep their order.
    pub fn change(&mut self, change: impl FnOnce(&mut Space)) {
        change(&mut self.space);
        self.rebase();
    }

    /// A copy for a forked child; calls before it keep their order.
    /// `None` if the library refuses.
    pub fn fork(&mut self) -> Option<Space> {
        let child = self.space.fork();
        self.rebase();
        child
    }

    /// A call begins.
    pub fn begin(&mut self, op: Op) {
        self.pending.push(op);
    }

    /// Memory at `addr` is written, as a call on `line` shows.
    pub fn touch(&mut self, addr: u64, line: u64) {
        let op = Op::touch(addr, line);
        self.space.apply(&op);
        self.keep(op, false);
    }

    /// The calls that have begun and are not known to be done.
    pub fn pending(&self) -> &[Op] {
        &self.pending
    }

    /// A call ends: its recorded result has to hold now.
    pub fn end(&mut self, call: CallId) -> Option<(Op, Settled)> {
        if let Some(at) = self.early.iter().position(|op| op.call == call) {
            let op = self.early.swap_remove(at);
            return Some((
                op,
                Settled {
                    verdict: Verdict::Reordered,
                    got: Got::Unchecked,
                },
            ));
        }
        let at = self.pending.iter().position(|op| op.call == call)?;
        if self.pending[at].ret == Ret::Unknown {
            // `= ?`: a task that is killed in a call; the call may have been done or not.
            return None;
        }
        let op = self.pending.remove(at);
        let began = Instant::now();
        let got = self.space.apply(&op);
        self.time += began.elapsed();
        self.timed_calls += 1;
        let verdict = if got == Got::Unchecked {
            self.keep(op.clone(), false);
            Verdict::Unchecked
        } else if got.fits(&op.ret) {
            self.keep(op.clone(), false);
            Verdict::Predicted
        } else {
            self.explain(op.clone())
        };
        Some((op, Settled { verdict, got }))
    }

    fn keep(&mut self, op: Op, forced: bool) {
        self.done.push(Done { op, forced });
        if self.done.len() > JOURNAL && self.pending.is_empty() {
            self.rebase();
        } else if self.done.len() > JOURNAL_MAX {
            let keep_from = self.done.len() - WINDOW;
            self.base = self.at(keep_from);
            self.done.drain(..keep_from);
        }
    }

    /// The space after the first `n` calls of the journal.
    fn at(&self, n: usize) -> Option<Space> {
        let mut space = self.base.as_ref()?.copy()?;
        for done in &self.done[..n] {
            if done.forced {
                space.force(&done.op);
            } else {
                space.apply(&done.op);
            }
        }
        Some(space)
    }

    /// Moves the point to go back to up to now.
    fn rebase(&mut self) {
        self.base = self.space.copy();
        self.done.clear();
    }

    /// Finds an order that explains the result of `op`, or forces it.
    fn explain(&mut self, op: Op) -> Verdict {
        let overlapping = self
            .done
            .iter()
            .rev()
            .take_while(|d| !d.forced && !d.op.is_before(&op))
            .count()
            .min(WINDOW);
        let mut budget = BUDGET;
        for back in 0..=overlapping {
            let from = self.done.len() - back;
            let Some(start) = self.at(from) else { break };
            let must: Vec<&Op> = self.done[from..]
                .iter()
                .map(|d| &d.op)
                .chain([&op])
                .collect();
            for extra in 0..=EXTRA.min(self.pending.len()) {
                if back + extra == 0 {
                    continue;
                }
                let mut search =
                    Search::<Space>::new(must.clone(), self.pending.iter().collect(), budget);
                let found = search.run(&start, extra);
                budget = search.budget;
                if let Some(found) = found {
                    self.adopt(found.world, from, &op, &found.order);
                    return Verdict::Reordered;
                }
                if budget == 0 {
                    break;
                }
            }
        }
        if let Some(before) = self.at(self.done.len()) {
            self.space = before;
        }
        self.space.force(&op);
        self.keep(op, true);
        Verdict::Forced
    }

    /// Takes over what a search found: `Ok(i)` of `order` is the `i`-th call from `from` on, `op` the last of these;
    /// `Err(i)` is a call that is under way.
    fn adopt(&mut self, space: Space, from: usize, op: &Op, order: &[Result<usize, usize>]) {
        let again: Vec<Op> = self
            .done
            .drain(from..)
            .map(|d| d.op)
            .chain([op.clone()])
            .collect();
        for &which in order {
            let op = match which {
                Ok(i) => again[i].clone(),
                Err(i) => self.pending[i].clone(),
            };
            self.done.push(Done { op, forced: false });
        }
        let mut taken: Vec<usize> = order.iter().filter_map(|which| which.err()).collect();
        taken.sort_unstable();
        for i in taken.into_iter().rev() {
            self.early.push(self.pending.remove(i));
        }
        self.space = space;
    }
}
