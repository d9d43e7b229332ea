//! What the threads of a load share, and what B has seen.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::R2Error;

/// How often somebody looks who waits for something that isn't measured.
pub(super) const LOOK: Duration = Duration::from_millis(1);

/// Threads of a load.
const THREADS: u32 = 3;

/// What the tracer does, every other step; in between it sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Attach = 1,
    Detach = 3,
}

/// Until the next one of the same kind.
const STEPS: u64 = 4;

/// See the [module](self). Relaxed throughout: figures and flags that order nothing else.
#[derive(Debug, Default)]
pub(super) struct Beside {
    stop: AtomicBool,
    /// Threads that have done what they do once.
    warm: AtomicU32,
    /// Dups of A.
    forks: AtomicU64,
    /// Nanoseconds that A's loop has taken last.
    cycle: AtomicU64,
    /// How often the tracer has gone on: the remainder is the [`Step`].
    step: AtomicU64,
    /// Nanoseconds: the longest dup in B, beside each step. A dup may be beside several.
    longest: [AtomicU64; STEPS as usize],
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Beside {
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Does `turn` again and again.
    pub(super) fn until_stopped(
        &self,
        mut turn: impl FnMut() -> Result<(), R2Error>,
    ) -> Result<(), R2Error> {
        turn()?;
        self.warm.fetch_add(1, Ordering::Relaxed);
        while !self.stop.load(Ordering::Relaxed) {
            turn()?;
        }
        Ok(())
    }

    /// What B does who only looks at the clock: the time from look to look is noted as that of a dup.
    pub(super) fn empty_loop(&self) -> Result<(), R2Error> {
        let (mut began, mut last) = (self.step(), Instant::now());
        self.until_stopped(|| {
            // Before the clock, and once more after it: the thread may be stopped anywhere.
            let (step, now) = (self.step(), Instant::now());
            self.note(began, now - last);
            (began, last) = (step, now);
            Ok(())
        })
    }

    /// Whether each thread has been round, and A's children have come and gone.
    pub(super) fn is_warm(&self) -> bool {
        self.warm.load(Ordering::Relaxed) == THREADS && self.forks() > 1
    }

    /// A's loop goes round once.
    pub(super) fn cycle(&self, turn: impl FnOnce() -> Result<(), R2Error>) -> Result<(), R2Error> {
        let begin = Instant::now();
        turn()?;
        self.cycle.store(ns(begin.elapsed()), Ordering::Relaxed);
        Ok(())
    }

    pub(super) fn last_cycle(&self) -> Duration {
        Duration::from_nanos(self.cycle.load(Ordering::Relaxed))
    }

    pub(super) fn count_fork(&self) {
        self.forks.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn forks(&self) -> u64 {
        self.forks.load(Ordering::Relaxed)
    }

    /// A run begins.
    pub(super) fn begin(&self) {
        for longest in &self.longest {
            longest.store(0, Ordering::Relaxed);
        }
    }

    /// The tracer goes on to the next step.
    pub(super) fn go_on(&self) {
        self.step.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn step(&self) -> u64 {
        self.step.load(Ordering::Relaxed)
    }

    /// A dup in B has taken so long, and began when the tracer was at `began`.
    pub(super) fn note(&self, began: u64, time: Duration) {
        let ended = self.step();
        for step in (began..=ended).take(self.longest.len()) {
            let longest = &self.longest[(step % STEPS) as usize];
            longest.fetch_max(ns(time), Ordering::Relaxed);
        }
    }

    /// The longest dup in B of this run.
    pub(super) fn longest(&self) -> Duration {
        let longest = self.longest.iter().map(|ns| ns.load(Ordering::Relaxed));
        Duration::from_nanos(longest.max().unwrap_or_default())
    }

    /// The longest one beside a step of this kind; zero if there was none.
    pub(super) fn longest_beside(&self, step: Step) -> Duration {
        Duration::from_nanos(self.longest[step as usize].load(Ordering::Relaxed))
    }
}

/// Looks again and again whether it is `so`; false when `is_done` says that it's not going to be.
pub(super) fn wait_until(so: impl Fn() -> bool, is_done: impl Fn() -> bool) -> bool {
    while !so() {
        if is_done() {
            return false;
        }
        thread::sleep(LOOK);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_micros(1);
    const LONG: Duration = Duration::from_micros(5);

    #[test]
    fn a_dup_is_beside_every_step_that_it_has_seen() {
        let beside = Beside::default();
        beside.note(beside.step(), SHORT);
        let began = beside.step();
        beside.go_on();
        beside.go_on();
        beside.note(began, LONG);
        let longest = |step| beside.longest_beside(step);
        assert_eq!(longest(Step::Attach), LONG);
        assert_eq!(longest(Step::Detach), Duration::ZERO);
        beside.go_on();
        beside.note(beside.step(), SHORT);
        assert_eq!((longest(Step::Detach), beside.longest()), (SHORT, LONG));
        beside.begin();
        assert_eq!(beside.longest(), Duration::ZERO);
    }

    #[test]
    fn one_that_has_seen_many_turns_is_beside_all_steps() {
        let beside = Beside::default();
        let began = beside.step();
        for _ in 0..3 * STEPS {
            beside.go_on();
        }
        beside.note(began, LONG);
        for step in [Step::Attach, Step::Detach] {
            assert_eq!(beside.longest_beside(step), LONG);
        }
    }
}
