//! Tasks and processes: who shares an address space, descriptors and a folder with whom.

use std::collections::HashMap;

use super::fds::FdTable;
use crate::replay::strace::{
    call::{Call, Ret},
    log::{CallId, Log},
};

/// clone's flags that matter here.
pub mod share {
    /// `CLONE_VM`: one address space.
    pub const VM: u64 = 0x100;
    /// `CLONE_FS`: one current folder.
    pub const FS: u64 = 0x200;
    /// `CLONE_FILES`: one descriptor table.
    pub const FILES: u64 = 0x400;
    /// `CLONE_VFORK`: the parent waits.
    pub const VFORK: u64 = 0x4000;
    /// `CLONE_THREAD`: one process.
    pub const THREAD: u64 = 0x1_0000;
}

/// Index into the owner's table of address spaces.
pub type MmId = usize;

/// A task.
#[derive(Debug, Clone, Copy)]
pub struct Task {
    /// Index of its process.
    pub process: usize,
    /// Its address space.
    pub mm: MmId,
    /// Index of its descriptor table.
    pub fds: usize,
    /// Index of its folder.
    pub cwd: usize,
}

/// A process: the unit of which snapshots are taken.
#[derive(Debug, Clone)]
pub struct Process {
    /// Its pid.
    pub pid: u32,
    /// Its tasks that live.
    pub alive: u64,
    /// Successful calls of execve so far.
    pub execs: u64,
    /// Calls of mmap, munmap, mprotect, mremap, brk and madvise that its first task has begun.
    pub counted_calls: u64,
    /// Soft `RLIMIT_AS`, DATA, STACK, MEMLOCK that a call has set.
    pub limits: HashMap<u64, u64>,
}

/// All tasks.
#[derive(Debug, Default)]
pub struct Tasks {
    /// Processes in order of appearance.
    pub processes: Vec<Process>,
    /// Descriptor tables.
    pub fds: Vec<FdTable>,
    /// Current folders, as far as known.
    pub cwds: Vec<Option<String>>,
    by_pid: HashMap<u32, Task>,
    /// Per pid the calls that made it, in order.
    makers: HashMap<u32, Vec<CallId>>,
    /// Threads beside the first one of each process.
    pub threads_more: u64,
}

impl Tasks {
    /// The state before the first line of `log`: its first task alone.
    pub fn new(log: &Log, first: u32, mm: MmId) -> Self {
        let mut makers: HashMap<u32, Vec<CallId>> = HashMap::new();
        for (id, record) in log.calls.iter().enumerate() {
            if let (Call::Clone { .. }, Ret::Ok { value, .. }) = (&record.call, &record.ret)
                && let Ok(child @ 1..) = u32::try_from(*value)
            {
                makers.entry(child).or_default().push(id);
            }
        }
        let mut tasks = Self {
            makers,
            ..Self::default()
        };
        tasks.fds.push(FdTable::default());
        tasks.cwds.push(None);
        tasks.add_process(first);
        tasks.by_pid.insert(
            first,
            Task {
                process: 0,
                mm,
                fds: 0,
                cwd: 0,
            },
        );
        tasks
    }

    fn add_process(&mut self, pid: u32) -> usize {
        self.processes.push(Process {
            pid,
            alive: 1,
            execs: 0,
            counted_calls: 0,
            limits: HashMap::new(),
        });
        self.processes.len() - 1
    }

    /// The task `pid`, if it lives.
    pub fn get(&self, pid: u32) -> Option<Task> {
        self.by_pid.get(&pid).copied()
    }

    /// The call that made the task `pid`, which hasn't shown itself yet; each call is given once.
    pub fn take_maker(&mut self, pid: u32) -> Option<CallId> {
        let calls = self.makers.get_mut(&pid)?;
        if calls.is_empty() {
            None
        } else {
            Some(calls.remove(0))
        }
    }

    /// Whether the call `maker` has yet to make its child.
    pub fn is_due(&self, pid: u32, maker: CallId) -> bool {
        self.makers
            .get(&pid)
            .is_some_and(|calls| calls.contains(&maker))
    }

    /// Adds the task `pid`, made by `parent` with clone's `flags`; `mm` is the address space that it gets.
    pub fn add(&mut self, pid: u32, parent: Task, flags: u64, mm: MmId) {
        let process = if flags & share::THREAD != 0 {
            self.threads_more += 1;
            self.processes[parent.process].alive += 1;
            parent.process
        } else {
            let limits = self.processes[parent.process].limits.clone();
            let process = self.add_process(pid);
            self.processes[process].limits = limits;
            process
        };
        let fds = if flags & share::FILES != 0 {
            parent.fds
        } else {
            self.copy_fds(parent.fds)
        };
        let cwd = if flags & share::FS != 0 {
            parent.cwd
        } else {
            self.copy_cwd(parent.cwd)
        };
        self.by_pid.insert(
            pid,
            Task {
                process,
                mm,
                fds,
                cwd,
            },
        );
    }

    fn copy_fds(&mut self, fds: usize) -> usize {
        self.fds.push(self.fds[fds].clone());
        self.fds.len() - 1
    }

    fn copy_cwd(&mut self, cwd: usize) -> usize {
        self.cwds.push(self.cwds[cwd].clone());
        self.cwds.len() - 1
    }

    /// A successful execve of `pid`: a table of its own without what is closed by it, and the space `mm`.
    pub fn exec(&mut self, pid: u32, mm: MmId) {
        let Some(task) = self.get(pid) else { return };
        let fds = self.copy_fds(task.fds);
        self.fds[fds].exec();
        self.processes[task.process].execs += 1;
        self.by_pid.insert(pid, Task { mm, fds, ..task });
    }

    /// `close_range(2)` with `CLOSE_RANGE_UNSHARE`.
    pub fn unshare_fds(&mut self, pid: u32) {
        let Some(task) = self.get(pid) else { return };
        let fds = self.copy_fds(task.fds);
        self.by_pid.insert(pid, Task { fds, ..task });
    }

    /// The thread `by` goes on as `pid` after an execve; the task that was `pid` is gone.
    pub fn supersede(&mut self, pid: u32, by: u32) {
        if let Some(task) = self.by_pid.remove(&by)
            && self.by_pid.insert(pid, task).is_some()
        {
            let alive = &mut self.processes[task.process].alive;
            *alive = alive.saturating_sub(1);
        }
    }

    /// The task `pid` is gone; its record, and whether its process is gone with it.
    pub fn remove(&mut self, pid: u32) -> Option<(Task, bool)> {
        let task = self.by_pid.remove(&pid)?;
        let process = &mut self.processes[task.process];
        process.alive = process.alive.saturating_sub(1);
        Some((task, process.alive == 0))
    }

    /// The address spaces of the tasks that live.
    pub fn mms(&self) -> impl Iterator<Item = MmId> + '_ {
        self.by_pid.values().map(|task| task.mm)
    }
}
