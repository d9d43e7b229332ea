//! The replay itself: walks the events of a log, keeps files, tasks and address spaces, and compares at every snapshot.

mod calls;
mod snapshots;

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
};

use super::{
    error::ReplayError,
    maps::{FlagLine, Moment, Snapshot},
    mm::Mm,
    model::{
        files::{DescriptionId, Files},
        tasks::{MmId, Task, Tasks, share},
    },
    space::OpenFiles,
    stats::{Difference, ForcedCall, Outcome, Stats, Verdict},
    strace::{
        call::{Call, MmCall, Ret},
        log::{CallId, CallRecord, Event, Log},
    },
};

/// The recorded maps of a log.
#[derive(Debug, Default)]
pub struct Recorded {
    /// By process and moment. The first execve of the first process is the start map.
    pub snapshots: HashMap<(u32, Moment), Snapshot>,
    /// `VmFlags` of the first process at its end.
    pub flags: Option<Vec<FlagLine>>,
}

/// A System V segment.
#[derive(Debug, Clone, Copy)]
struct Segment {
    size: u64,
    description: DescriptionId,
}

/// The first forced results are kept in words.
const FORCED_SHOWN: usize = 8;

/// Called with lines done and lines in all.
pub type Progress<'a> = &'a dyn Fn(u64, u64);

/// A replay under way.
struct Engine<'a> {
    log: &'a Log,
    recorded: &'a Recorded,
    path: PathBuf,
    follows_files: bool,
    files: Files,
    tasks: Tasks,
    /// `None`: an address space that can't be followed.
    mms: Vec<Option<Mm>>,
    segments: BTreeMap<u64, Segment>,
    open_files: OpenFiles,
    visited: Vec<(u32, Moment)>,
    /// The first moment of a process whose layout nothing shows after its execve.
    without_start: Option<(u32, Moment)>,
    first_pid: u32,
    /// Per task its calls of brk, to find the break after an execve.
    brks: HashMap<u32, Vec<CallId>>,
    stats: Stats,
    difference: Option<Difference>,
}

/// Replays `log` and compares with `recorded`.
///
/// # Errors
/// The first process has no map to begin with, or the log ends before a snapshot that is there.
pub fn replay(
    log: &Log,
    recorded: &Recorded,
    path: PathBuf,
    progress: Progress<'_>,
) -> Result<Outcome, ReplayError> {
    let Some(first_pid) = log.calls.first().map(|c| c.pid) else {
        return Err(ReplayError::file(&path, "no call in it"));
    };
    let mut brks: HashMap<u32, Vec<CallId>> = HashMap::new();
    for (id, record) in log.calls.iter().enumerate() {
        if matches!(record.call, Call::Mm(MmCall::Brk { .. })) {
            brks.entry(record.pid).or_default().push(id);
        }
    }
    let mut engine = Engine {
        log,
        recorded,
        path,
        follows_files: log.follows_files(),
        files: Files::default(),
        tasks: Tasks::new(log, first_pid, 0),
        mms: vec![None],
        segments: BTreeMap::new(),
        open_files: OpenFiles::default(),
        visited: Vec::new(),
        without_start: None,
        first_pid,
        brks,
        stats: Stats::default(),
        difference: None,
    };
    engine.start()?;
    for &(line, event) in &log.events {
        engine.event(line, event);
        if line % 1024 == 0 {
            progress(line, log.lines);
        }
    }
    engine.finish()
}

impl Engine<'_> {
    /// A log that doesn't begin with an execve is of a program that ran already: the start map is its layout.
    fn start(&mut self) -> Result<(), ReplayError> {
        let begins_with_exec = self
            .log
            .calls
            .first()
            .is_some_and(|c| matches!(c.call, Call::Exec));
        if !self
            .recorded
            .snapshots
            .contains_key(&(self.first_pid, Moment::Exec(1)))
        {
            return Err(ReplayError::file(
                &self.path,
                "no start map for its first process",
            ));
        }
        if !begins_with_exec {
            self.mms[0] = self.layout_after_exec(self.first_pid, 1, 0);
            self.tasks.processes[0].execs = 1;
        }
        Ok(())
    }

    fn event(&mut self, line: u64, event: Event) {
        match event {
            Event::Begin(id) => self.begin(line, id),
            Event::End(id) => self.end(line, id),
            Event::Seen(pid) => {
                self.task(pid);
            }
            Event::Gone(pid) => self.gone(line, pid),
            Event::Superseded { pid, by } => self.tasks.supersede(pid, by),
        }
    }

    /// The task `pid`, made now if a call that is under way made it.
    fn task(&mut self, pid: u32) -> Option<Task> {
        if let Some(task) = self.tasks.get(pid) {
            return Some(task);
        }
        if let Some(maker) = self.tasks.take_maker(pid) {
            self.make_task(pid, maker)
        } else {
            *self
                .stats
                .not_followed
                .entry("a task whose beginning isn't in the log")
                .or_default() += 1;
            None
        }
    }

    /// Makes the task `pid` by the call `maker`.
    fn make_task(&mut self, pid: u32, maker: CallId) -> Option<Task> {
        let log = self.log;
        let record = &log.calls[maker];
        let Call::Clone { flags, written } = record.call else {
            return None;
        };
        let parent = self.task(record.pid)?;
        let mm = if flags & share::VM != 0 {
            parent.mm
        } else {
            let child = self.mms[parent.mm].as_mut().and_then(Mm::fork).map(Mm::new);
            self.mms.push(child);
            self.mms.len() - 1
        };
        self.tasks.add(pid, parent, flags, mm);
        self.touch(parent.mm, written.parent_tid, record.begin);
        self.touch(mm, written.child_tid, record.begin);
        self.tasks.get(pid)
    }

    /// Memory that a call on `line` shows to be written: it has a fault history from there on.
    fn touch(&mut self, mm: MmId, addr: Option<u64>, line: u64) {
        if let (Some(mm), Some(addr)) = (&mut self.mms[mm], addr) {
            mm.touch(addr, line);
        }
    }

    fn begin(&mut self, line: u64, id: CallId) {
        let log = self.log;
        let record = &log.calls[id];
        let Some(task) = self.task(record.pid) else {
            return;
        };
        let process = &mut self.tasks.processes[task.process];
        if process.pid == record.pid && is_counted(&record.name) {
            process.counted_calls += 1;
            let moment = Moment::At(process.counted_calls);
            self.visit(line, record.pid, moment, task.mm);
        }
        match &record.call {
            Call::Mm(call) => {
                let op = self.prepare(id, record, call, task);
                if let Some(mm) = &mut self.mms[task.mm] {
                    mm.begin(op);
                } else {
                    *self
                        .stats
                        .not_followed
                        .entry("a process without a map after its execve")
                        .or_default() += 1;
                }
            }
            // The block of a thread is filled before it is made known.
            Call::Clone { written, .. } => self.touch(task.mm, written.tls, line),
            Call::SetFs { addr } => self.touch(task.mm, Some(*addr), line),
            other => self.call_begins(other, task),
        }
    }

    fn end(&mut self, line: u64, id: CallId) {
        let log = self.log;
        let record = &log.calls[id];
        let Some(task) = self.task(record.pid) else {
            return;
        };
        match &record.call {
            Call::Mm(call) => self.memory_call_ends(id, record, call, task),
            Call::Clone { .. } => {
                *self.stats.followed.entry(record.name.clone()).or_default() += 1;
                if let Ret::Ok { value, .. } = record.ret
                    && let Ok(child @ 1..) = u32::try_from(value)
                    && self.tasks.is_due(child, id)
                {
                    self.tasks.take_maker(child);
                    self.make_task(child, id);
                }
            }
            Call::Exec if matches!(record.ret, Ret::Ok { .. }) => {
                *self.stats.followed.entry(record.name.clone()).or_default() += 1;
                self.exec(line, record.pid, task);
            }
            other => {
                *self.stats.followed.entry(record.name.clone()).or_default() += 1;
                self.call_ends(other, &record.ret, record.pid, task);
            }
        }
    }

    fn memory_call_ends(&mut self, id: CallId, record: &CallRecord, call: &MmCall, task: Task) {
        let Some(mm) = &mut self.mms[task.mm] else {
            return;
        };
        let Some((op, settled)) = mm.end(id) else {
            return;
        };
        let kind = self.stats.kinds.entry(record.name.clone()).or_default();
        kind.calls += 1;
        kind.failed += u64::from(matches!(record.ret, Ret::Err(_)));
        kind.add(settled.verdict);
        if op.chosen_address().is_some() {
            self.stats.placed += 1;
            self.stats.placed_predicted += u64::from(matches!(
                settled.verdict,
                Verdict::Predicted | Verdict::Reordered
            ));
        }
        if settled.verdict == Verdict::Forced && self.stats.forced.len() < FORCED_SHOWN {
            self.stats.forced.push(ForcedCall {
                line: record.begin,
                pid: record.pid,
                call: call.to_string(),
                recorded: super::op::words(&record.ret),
                replayed: settled.got.to_string(),
            });
        }
    }

    fn exec(&mut self, line: u64, pid: u32, task: Task) {
        // A thread's execve goes on under the pid of the process.
        let leader = self.tasks.processes[task.process].pid;
        let n = self.tasks.processes[task.process].execs + 1;
        let mm = self.layout_after_exec(leader, n, line);
        self.mms.push(mm);
        self.tasks.exec(pid, self.mms.len() - 1);
        self.close_unused();
    }

    fn gone(&mut self, line: u64, pid: u32) {
        let Some(task) = self.task(pid) else { return };
        let Some((_, last)) = self.tasks.remove(pid) else {
            return;
        };
        if last {
            let leader = self.tasks.processes[task.process].pid;
            self.visit(line, leader, Moment::End, task.mm);
        }
        self.close_unused();
    }

    /// Gives up the address spaces that no task has any more, keeping their counts.
    fn close_unused(&mut self) {
        let mut used = vec![false; self.mms.len()];
        self.tasks.mms().for_each(|mm| used[mm] = true);
        for (slot, used) in self.mms.iter_mut().zip(used) {
            if !used && let Some(mm) = slot.take() {
                count_in(&mut self.stats, &mm);
            }
        }
    }

    fn finish(mut self) -> Result<Outcome, ReplayError> {
        // Without an exit line the last state is what there is; only a snapshot of it isn't there.
        for slot in &mut self.mms {
            if let Some(mm) = slot.take() {
                count_in(&mut self.stats, &mm);
            }
        }
        self.stats.lines = self.log.lines;
        self.stats.processes = self.tasks.processes.len() as u64;
        self.stats.threads_more = self.tasks.threads_more;
        self.stats.skipped.clone_from(&self.log.skipped);
        self.stats.unknown_calls.clone_from(&self.log.unknown_calls);
        if let Some((pid, moment)) = self.without_start {
            let moment = snapshots::moment_words(moment);
            let why = format!(
                "process {pid} has a map at '{moment}', but none after its execve (event=exec) to begin with"
            );
            return Err(ReplayError::file(&self.path, why));
        }
        let mut left: Vec<(u32, Moment)> = self
            .recorded
            .snapshots
            .keys()
            .filter(|k| !self.visited.contains(k))
            .copied()
            .collect();
        left.sort_unstable();
        self.stats.not_reached = left.len() as u64;
        match left.first() {
            Some((pid, moment)) if self.difference.is_none() => Err(ReplayError::line(
                &self.path,
                self.log.lines,
                format!(
                    "the log ends before process {pid} is at the recorded moment '{}' ({} such in all)",
                    snapshots::moment_words(*moment),
                    left.len()
                ),
            )),
            _ => Ok(Outcome {
                stats: self.stats,
                difference: self.difference,
            }),
        }
    }
}

/// The calls that `event=at n=...` counts.
fn is_counted(name: &str) -> bool {
    matches!(
        name,
        "mmap" | "munmap" | "mprotect" | "mremap" | "brk" | "madvise"
    )
}

fn count_in(stats: &mut Stats, mm: &Mm) {
    let counters = mm.space().counters();
    stats.splits += counters.splits;
    stats.merges += counters.merges;
    stats.time += mm.time;
    stats.timed_calls += mm.timed_calls;
    let open = mm.pending().iter().filter(|op| op.end.is_none()).count() as u64;
    if open > 0 {
        *stats
            .never_returned
            .entry("not done, or without a trace")
            .or_default() += open;
    }
}
