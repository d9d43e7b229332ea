//! The calls that don't change an address space themselves: descriptors, names, segments, limits; and what an
//! address-space call needs of them.

use super::{Engine, Segment};
use crate::replay::{
    model::{
        fds::resolve,
        files::{DescriptionId, FileKind},
        tasks::Task,
    },
    op::{Op, OpFile},
    strace::{
        call::{Call, FdArg, MmCall, PathArg, Ret},
        log::{CallId, CallRecord},
    },
};

const MAP_TYPE: u64 = 0xf;
const MAP_SHARED: u64 = 1;
const MAP_ANONYMOUS: u64 = 0x20;
const PROT_WRITE: u64 = 2;
const SHM_RDONLY: u64 = 0o10000;
const RENAME_EXCHANGE: u64 = 2;
const CLOSE_RANGE_UNSHARE: u64 = 2;
const CLOSE_RANGE_CLOEXEC: u64 = 4;
const O_ACCMODE: u64 = 3;
const O_CLOEXEC: u64 = 0o2_000_000;

/// The CPUs of the machine that recorded: `io_setup` sizes its ring by them.
const RECORDED_CPUS: u64 = 2;

impl Engine<'_> {
    /// What the call needs beside its arguments.
    pub(super) fn prepare(
        &mut self,
        id: CallId,
        record: &CallRecord,
        call: &MmCall,
        task: Task,
    ) -> Op {
        let (file, size) = match call {
            MmCall::Mmap {
                prot, flags, fd, ..
            } => (self.mapped_file(fd, *prot, *flags, task), 0),
            MmCall::Shmat { id, flags, .. } => match self.segments.get(id).copied() {
                Some(segment) => {
                    let id = self
                        .files
                        .reopen(segment.description, flags & SHM_RDONLY == 0);
                    (self.open_file(id), segment.size)
                }
                None => (OpFile::Bad, 0),
            },
            MmCall::IoSetup { nr, .. } => {
                let id = self.files.nameless("/[aio]", FileKind::Aio);
                (self.open_file(id), ring_size(*nr))
            }
            _ => (OpFile::None, 0),
        };
        // A result that isn't known is that of a call that never came back.
        let end = record.end.filter(|_| record.ret != Ret::Unknown);
        Op {
            call: id,
            kind: call.clone(),
            file,
            size,
            ret: record.ret.clone(),
            begin: record.begin,
            end,
        }
    }

    fn open_file(&self, id: DescriptionId) -> OpFile {
        let d = self.files.get(id);
        OpFile::Open {
            id,
            inode: self.files.inode(id),
            kind: d.kind,
            readable: d.readable,
            writable: d.writable,
        }
    }

    fn mapped_file(&mut self, fd: &FdArg, prot: u64, flags: u64, task: Task) -> OpFile {
        let shared = matches!(flags & MAP_TYPE, 1 | 3);
        let id = if flags & MAP_ANONYMOUS != 0 {
            if !shared {
                return OpFile::None;
            }
            self.files.nameless("/dev/zero", FileKind::SharedAnon)
        } else {
            let needs_write = flags & MAP_TYPE == MAP_SHARED && prot & PROT_WRITE != 0;
            let Some(id) = self.description(fd, task, needs_write) else {
                return OpFile::Bad;
            };
            if shared && self.files.get(id).kind == FileKind::DevZero {
                self.files.nameless("/dev/zero", FileKind::SharedAnon)
            } else {
                id
            }
        };
        self.open_file(id)
    }

    /// The description behind a descriptor. Where the log doesn't have its opening, the path that `-y` shows tells
    /// which file it is; it is taken to be open for reading, and for writing if it is used so.
    fn description(&mut self, arg: &FdArg, task: Task, writable: bool) -> Option<DescriptionId> {
        if arg.fd < 0 {
            return None;
        }
        let known = self.tasks.fds[task.fds]
            .get(arg.fd)
            .map(|fd| fd.description);
        let Some(path) = &arg.path else { return known };
        if let Some(id) = known {
            let (have, deleted) = self.files.path(id);
            let same = have == path && (deleted == arg.deleted || !self.follows_files);
            if same && (self.follows_files || !writable || self.files.get(id).writable) {
                return Some(id);
            }
        }
        self.stats.fds_unlogged += 1;
        let id = self.files.open(path, arg.deleted, true, writable);
        self.tasks.fds[task.fds].set(arg.fd, id, false);
        Some(id)
    }

    /// What is done when a call begins. Descriptors are closed here: by the time that close returns, another thread may
    /// have got the number.
    pub(super) fn call_begins(&mut self, call: &Call, task: Task) {
        match call {
            Call::Close { fd } => self.tasks.fds[task.fds].close(*fd),
            Call::CloseRange { first, last, flags } if flags & CLOSE_RANGE_UNSHARE == 0 => {
                self.tasks.fds[task.fds].close_range(
                    *first,
                    *last,
                    flags & CLOSE_RANGE_CLOEXEC != 0,
                );
            }
            Call::Open { path, .. } | Call::Unlink { path } | Call::Chdir { path } => {
                self.learn_cwd(path, task);
            }
            Call::Rename { from, to, .. } | Call::Link { from, to } => {
                self.learn_cwd(from, task);
                self.learn_cwd(to, task);
            }
            _ => {}
        }
    }

    /// `AT_FDCWD</tmp>` tells the current folder.
    fn learn_cwd(&mut self, path: &PathArg, task: Task) {
        if let Some(FdArg {
            fd: -100,
            path: Some(cwd),
            ..
        }) = &path.dir
        {
            self.tasks.cwds[task.cwd] = Some(cwd.clone());
        }
    }

    fn full_path(&self, path: &PathArg, task: Task) -> Option<String> {
        resolve(path, self.tasks.cwds[task.cwd].as_deref())
    }

    /// What is done when a call ends.
    pub(super) fn call_ends(&mut self, call: &Call, ret: &Ret, pid: u32, task: Task) {
        let Ret::Ok {
            value,
            path,
            deleted,
        } = ret
        else {
            return;
        };
        match call {
            Call::Open { path: arg, flags } => {
                let path = path.clone().or_else(|| self.full_path(arg, task));
                let mode = flags & O_ACCMODE;
                self.opened(
                    *value,
                    path,
                    *deleted,
                    (mode != 1, mode != 0),
                    flags & O_CLOEXEC != 0,
                    task,
                );
            }
            Call::MemfdCreate { cloexec } => {
                self.opened(*value, path.clone(), true, (true, true), *cloexec, task);
            }
            Call::NewFd {
                cloexec,
                readable,
                writable,
                ..
            } => {
                self.opened(
                    *value,
                    path.clone(),
                    *deleted,
                    (*readable, *writable),
                    *cloexec,
                    task,
                );
            }
            Call::Dup { old, cloexec, .. } => {
                if let (Some(id), Ok(new)) =
                    (self.description(old, task, false), i32::try_from(*value))
                    && new != old.fd
                {
                    self.tasks.fds[task.fds].set(new, id, *cloexec);
                }
            }
            Call::CloseRange { first, last, flags } if flags & CLOSE_RANGE_UNSHARE != 0 => {
                self.tasks.unshare_fds(pid);
                if let Some(task) = self.tasks.get(pid) {
                    self.tasks.fds[task.fds].close_range(
                        *first,
                        *last,
                        flags & CLOSE_RANGE_CLOEXEC != 0,
                    );
                }
            }
            Call::Shmget { key, size } => {
                let description = self
                    .files
                    .nameless(&format!("/SYSV{key:08x}"), FileKind::SysV);
                self.segments.entry(*value).or_insert(Segment {
                    size: *size,
                    description,
                });
            }
            Call::Rlimit {
                resource,
                soft: Some(soft),
            } => {
                self.tasks.processes[task.process]
                    .limits
                    .insert(*resource, *soft);
                if let Some(mm) = &mut self.mms[task.mm] {
                    mm.change(|space| space.set_limit(*resource, *soft));
                }
            }
            Call::Personality { persona }
                if u32::try_from(*persona).is_ok_and(|p| p != u32::MAX) =>
            {
                if let Some(mm) = &mut self.mms[task.mm] {
                    mm.change(|space| space.set_personality(*persona));
                }
            }
            other => self.names_change(other, task),
        }
    }

    fn opened(
        &mut self,
        fd: u64,
        path: Option<String>,
        deleted: bool,
        mode: (bool, bool),
        cloexec: bool,
        task: Task,
    ) {
        let (Ok(fd), Some(path)) = (i32::try_from(fd), path) else {
            return;
        };
        let id = self.files.open(&path, deleted, mode.0, mode.1);
        self.tasks.fds[task.fds].set(fd, id, cloexec);
    }

    fn names_change(&mut self, call: &Call, task: Task) {
        match call {
            Call::Rename { from, to, flags } => {
                if let (Some(from), Some(to)) =
                    (self.full_path(from, task), self.full_path(to, task))
                {
                    if flags & RENAME_EXCHANGE != 0 {
                        self.files.exchange(&from, &to);
                    } else {
                        self.files.rename(&from, &to);
                    }
                }
            }
            Call::Link { from, to } => {
                if let (Some(from), Some(to)) =
                    (self.full_path(from, task), self.full_path(to, task))
                {
                    self.files.link(&from, &to);
                }
            }
            Call::Unlink { path } => {
                if let Some(path) = self.full_path(path, task) {
                    self.files.unlink(&path);
                }
            }
            Call::Chdir { path } => self.tasks.cwds[task.cwd] = self.full_path(path, task),
            Call::Fchdir { dir } => self.tasks.cwds[task.cwd].clone_from(&dir.path),
            _ => {}
        }
    }
}

/// The bytes of the ring that `io_setup` maps, before rounding.
fn ring_size(nr: u64) -> u64 {
    let entries = nr
        .max(4 * RECORDED_CPUS)
        .saturating_mul(2)
        .saturating_add(2);
    entries.saturating_mul(32).saturating_add(32)
}

#[cfg(test)]
mod tests {
    #[test]
    fn rings_have_the_sizes_that_were_recorded() {
        assert_eq!(super::ring_size(64).div_ceil(4096), 2);
        assert_eq!(super::ring_size(1000).div_ceil(4096), 16);
    }
}
