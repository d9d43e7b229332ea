//! Snapshots: layouts that an execve begins with, and layouts to compare with.

use super::Engine;
use crate::replay::{
    compare::{self, Comparison, Shown},
    maps::{MapLine, Moment, Snapshot},
    mm::Mm,
    model::tasks::MmId,
    op::Op,
    order::{Search, World},
    space::{Space, StartOf},
    stats::{Difference, FlagCounts},
    strace::call::{Call, MmCall, Ret},
    vmflags,
};

/// Calls under way at the end of a process for which both answers are tried: done and not done.
const OPEN_AT_END: usize = 4;

/// How many borders that fault history explains are told in words.
const BORDERS_SHOWN: usize = 6;

/// A moment in words.
pub(super) fn moment_words(moment: Moment) -> String {
    match moment {
        Moment::Exec(n) => format!("exec {n}"),
        Moment::At(n) => format!("at {n}"),
        Moment::End => "end".to_owned(),
    }
}

impl Engine<'_> {
    /// The space that the `n`-th execve of `pid`, on `line`, begins with; `None` where no map shows it.
    pub(super) fn layout_after_exec(&mut self, pid: u32, n: u64, line: u64) -> Option<Mm> {
        let recorded = self.recorded;
        let snapshot = recorded.snapshots.get(&(pid, Moment::Exec(n)))?;
        self.visited.push((pid, Moment::Exec(n)));
        let start = StartOf {
            map: &snapshot.map,
            brk: self.first_break(pid, line),
            limits: self
                .tasks
                .processes
                .iter()
                .rev()
                .find(|p| p.pid == pid)
                .map(|p| p.limits.clone())
                .unwrap_or_default(),
        };
        Space::begin(&start, &mut self.files, &self.open_files).map(Mm::new)
    }

    /// The break as the first brk(NULL) behind `line` gives it; no map shows it.
    fn first_break(&self, pid: u32, line: u64) -> Option<u64> {
        let first = self
            .brks
            .get(&pid)?
            .iter()
            .map(|&id| &self.log.calls[id])
            .find(|c| c.begin >= line)?;
        match (&first.call, &first.ret) {
            (Call::Mm(MmCall::Brk { addr }), Ret::Ok { value, .. }) if addr != value => {
                Some(*value)
            }
            _ => None,
        }
    }

    /// Compares at `moment` of `pid`, if there is a snapshot of it.
    pub(super) fn visit(&mut self, line: u64, pid: u32, moment: Moment, mm: MmId) {
        let recorded = self.recorded;
        let Some(snapshot) = recorded.snapshots.get(&(pid, moment)) else {
            return;
        };
        if self.visited.contains(&(pid, moment)) {
            return;
        }
        if self.mms[mm].is_none() {
            self.without_start.get_or_insert((pid, moment));
            return;
        }
        self.visited.push((pid, moment));
        let (shown, comparison) = self.compare_with_growth(mm, snapshot);
        let (shown, comparison) = if comparison.difference.is_some() {
            self.with_open_calls(mm, snapshot)
                .unwrap_or((shown, comparison))
        } else {
            (shown, comparison)
        };
        if pid == self.first_pid && moment == Moment::End {
            self.stats.vmas = shown.len() as u64;
            self.compare_flags(&shown, mm);
        }
        self.count(line, pid, snapshot, &shown, comparison);
    }

    /// Compares after letting stacks grow to where the kernel shows them.
    fn compare_with_growth(&mut self, mm: MmId, snapshot: &Snapshot) -> (Vec<Shown>, Comparison) {
        let map = without_gate(&snapshot.map);
        let Some(mm) = &mut self.mms[mm] else {
            return (Vec::new(), Comparison::default());
        };
        let mut shown = mm.space().shown();
        for address in compare::grown_stacks(map, &shown) {
            let before = mm.space().pages();
            mm.change(|space| space.grow_stack(address));
            let pages = mm.space().pages().saturating_sub(before);
            if pages > 0 {
                self.stats.stack_growths += 1;
                self.stats.stack_pages += pages;
            }
            shown = mm.space().shown();
        }
        let history = mm.space().history();
        let comparison =
            compare::compare(map, &shown, &mut self.files, history, self.follows_files);
        (shown, comparison)
    }

    /// Calls that never came back may have been done or not: looks for a choice that gives the recorded map.
    fn with_open_calls(
        &mut self,
        mm: MmId,
        snapshot: &Snapshot,
    ) -> Option<(Vec<Shown>, Comparison)> {
        let space = self.mms[mm].as_ref()?;
        let open: Vec<&Op> = space
            .pending()
            .iter()
            .filter(|op| op.end.is_none())
            .take(OPEN_AT_END)
            .collect();
        let map = without_gate(&snapshot.map);
        for choice in 1..1_u32 << open.len() {
            let chosen: Vec<&Op> = (0..open.len())
                .filter(|i| choice >> i & 1 == 1)
                .map(|i| open[i])
                .collect();
            let mut search = Search::<Space>::new(chosen, Vec::new(), 100);
            let Some(found) = search.run(&World::copy(space.space())?, 0) else {
                continue;
            };
            let shown = found.world.shown();
            let mut files = self.files.clone();
            let comparison = compare::compare(
                map,
                &shown,
                &mut files,
                found.world.history(),
                self.follows_files,
            );
            if comparison.difference.is_none() {
                self.files = files;
                *self.stats.never_returned.entry("done").or_default() +=
                    u64::from(choice.count_ones());
                return Some((shown, comparison));
            }
        }
        None
    }

    fn count(
        &mut self,
        line: u64,
        pid: u32,
        snapshot: &Snapshot,
        shown: &[Shown],
        found: Comparison,
    ) {
        let stats = &mut self.stats;
        stats.snapshots += 1;
        stats.most_vmas = stats.most_vmas.max(shown.len() as u64);
        stats.pages += found.pages;
        stats.borders += found.borders;
        stats.kernel_only += found.kernel_only;
        stats.replay_only += found.replay_only;
        stats.deleted_unlogged += found.deleted_unlogged;
        let room = BORDERS_SHOWN.saturating_sub(stats.by_faults.len());
        let moment = moment_words(snapshot.moment);
        let words = |&(at, kernel): &(u64, bool)| {
            let side = if kernel { "kernel" } else { "replay" };
            format!("process {pid}, '{moment}': {at:#x} only in the {side}")
        };
        stats
            .by_faults
            .extend(found.by_faults.iter().take(room).map(words));
        match found.difference {
            None => {
                stats.equal += 1;
                stats.equal_by_vma += u64::from(found.kernel_only + found.replay_only == 0);
            }
            Some(what) if self.difference.is_none() => {
                let map = without_gate(&snapshot.map);
                self.difference = Some(Difference {
                    pid,
                    moment: moment_words(snapshot.moment),
                    line,
                    what,
                    diff: compare::diff(map, shown, &self.files),
                });
            }
            Some(_) => {}
        }
    }

    fn compare_flags(&mut self, shown: &[Shown], mm: MmId) {
        let (Some(recorded), Some(mm)) = (&self.recorded.flags, &self.mms[mm]) else {
            return;
        };
        let mut counts = FlagCounts::default();
        vmflags::compare(recorded, shown, mm.space().history(), &mut counts);
        self.stats.vm_flags = Some(counts);
    }
}

/// A map without `[vsyscall]`, which isn't part of an address space.
fn without_gate(map: &[MapLine]) -> &[MapLine] {
    match map.split_last() {
        Some((last, rest)) if last.name == "[vsyscall]" => rest,
        _ => map,
    }
}
