//! What a replay counts.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;

/// How a recorded result was reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The library gave it at the call's place in the log.
    Predicted,
    /// The library gave it once overlapping calls were put in another order.
    Reordered,
    /// The library gave something else; the recorded result was forced.
    Forced,
    /// It depends on what a library without page contents doesn't know; not compared.
    Unchecked,
}

/// Counts of one kind of call.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct KindCounts {
    /// Calls in the log that were replayed.
    pub calls: u64,
    /// Of these, calls whose recorded result is an error.
    pub failed: u64,
    /// Results that the library gave at the call's place in the log.
    pub predicted: u64,
    /// Results that it gave in another order of overlapping calls.
    pub reordered: u64,
    /// Results that were forced.
    pub forced: u64,
    /// Results that weren't compared.
    pub unchecked: u64,
}

impl KindCounts {
    /// Counts one result.
    pub fn add(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Predicted => self.predicted += 1,
            Verdict::Reordered => self.reordered += 1,
            Verdict::Forced => self.forced += 1,
            Verdict::Unchecked => self.unchecked += 1,
        }
    }

    /// Adds the counts of another table.
    pub fn merge(&mut self, other: &Self) {
        self.calls += other.calls;
        self.failed += other.failed;
        self.predicted += other.predicted;
        self.reordered += other.reordered;
        self.forced += other.forced;
        self.unchecked += other.unchecked;
    }
}

/// A result that had to be forced.
#[derive(Debug, Clone, Serialize)]
pub struct ForcedCall {
    /// The line on which the call begins.
    pub line: u64,
    /// The task.
    pub pid: u32,
    /// The call.
    pub call: String,
    /// The recorded result.
    pub recorded: String,
    /// What the library gave.
    pub replayed: String,
}

/// The comparison of `VmFlags`.
#[derive(Debug, Clone, Default, Serialize)]
pub struct FlagCounts {
    /// VMAs with the same borders on both sides, whose flags were compared.
    pub compared: u64,
    /// VMAs whose borders differ by fault history, and so weren't.
    pub not_compared: u64,
    /// VMAs that differ in `ac` alone, where faults decide about it.
    pub by_faults: u64,
    /// VMAs that differ otherwise, as `flag kernel/replay: count`.
    pub different: BTreeMap<String, u64>,
    /// The first that differ, in words.
    pub examples: Vec<String>,
}

/// Everything that a replay counts.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Stats {
    /// Lines of the log.
    pub lines: u64,
    /// Address-space owners and vfork children.
    pub processes: u64,
    /// Threads beside the first one of each process.
    pub threads_more: u64,
    /// Address-space calls by name.
    pub kinds: BTreeMap<String, KindCounts>,
    /// Calls of other kinds that were followed (descriptors, names, tasks, limits), by name.
    pub followed: BTreeMap<String, u64>,
    /// Results whose address was the kernel's choice.
    pub placed: u64,
    /// Of these, addresses that the library chose as well without being told.
    pub placed_predicted: u64,
    /// The first results that had to be forced.
    pub forced: Vec<ForcedCall>,
    /// Calls that never came back, by what was assumed.
    pub never_returned: BTreeMap<&'static str, u64>,
    /// Snapshots compared.
    pub snapshots: u64,
    /// Of these, equal page for page and, but for fault history, VMA by VMA.
    pub equal: u64,
    /// Of the equal ones, those with no border that only fault history explains.
    pub equal_by_vma: u64,
    /// Snapshots that were not reached.
    pub not_reached: u64,
    /// Pages compared, over all snapshots.
    pub pages: u64,
    /// Borders between adjacent VMAs that both sides have, over all snapshots.
    pub borders: u64,
    /// Borders that only the kernel has, by fault history.
    pub kernel_only: u64,
    /// Borders that only the replay has, by fault history.
    pub replay_only: u64,
    /// The first of these borders, in words.
    pub by_faults: Vec<String>,
    /// Times that a stack was found lower than calls had left it, and pages by which.
    pub stack_growths: u64,
    /// Pages by which.
    pub stack_pages: u64,
    /// Names shown as deleted by calls that the log doesn't have.
    pub deleted_unlogged: u64,
    /// Descriptors whose opening the log doesn't have.
    pub fds_unlogged: u64,
    /// The comparison of `VmFlags` at the end of the first process.
    pub vm_flags: Option<FlagCounts>,
    /// VMAs of the first process at its end.
    pub vmas: u64,
    /// Most VMAs in a snapshot.
    pub most_vmas: u64,
    /// VMAs split, over all address spaces.
    pub splits: u64,
    /// VMAs merged, over all address spaces.
    pub merges: u64,
    /// Calls of tasks that can't be followed, by reason.
    pub not_followed: BTreeMap<&'static str, u64>,
    /// Lines passed over, by reason.
    pub skipped: BTreeMap<&'static str, u64>,
    /// Calls that this tool doesn't know, by name.
    pub unknown_calls: BTreeMap<String, u64>,
    /// Time spent in the library's calls.
    #[serde(skip)]
    pub time: Duration,
    /// Calls done in that time.
    pub timed_calls: u64,
}

impl Stats {
    /// The counts of all kinds together.
    pub fn total(&self) -> KindCounts {
        let mut out = KindCounts::default();
        self.kinds.values().for_each(|k| out.merge(k));
        out
    }

    /// Calls per second inside the library.
    pub fn rate(&self) -> f64 {
        let seconds = self.time.as_secs_f64();
        if seconds > 0.0 {
            u64_to_f64(self.timed_calls) / seconds
        } else {
            0.0
        }
    }
}

/// Counts stay far below 2^52.
#[expect(clippy::cast_precision_loss, reason = "a rate for people")]
fn u64_to_f64(n: u64) -> f64 {
    n as f64
}

/// A difference from the recorded maps.
#[derive(Debug, Clone, Serialize)]
pub struct Difference {
    /// The process.
    pub pid: u32,
    /// The moment: `exec 1`, `at 64`, `end`.
    pub moment: String,
    /// The line of the log that the replay had reached.
    pub line: u64,
    /// What differs first.
    pub what: String,
    /// The layouts as a diff.
    pub diff: String,
}

/// What a replay came to.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// The counts.
    pub stats: Stats,
    /// The first difference; `None` where everything is equal.
    pub difference: Option<Difference>,
}
