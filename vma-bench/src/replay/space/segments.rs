//! Mappings that other parts of the kernel make: System V segments and the rings of `io_setup`.

use std::sync::Arc;

use vma_core::{MapFlags, MapRequest, Prot};

use super::{Space, apply::Answer};
use crate::replay::{op::Op, strace::call::Ret};

const EINVAL: i32 = 22;
const SHM_RDONLY: u64 = 0o10000;
const SHM_RND: u64 = 0o20000;
const SHM_REMAP: u64 = 0o40000;
const SHM_EXEC: u64 = 0o100_000;
const PAGE: u64 = 4096;

impl Space {
    /// shmat(2). Source: `do_shmat()` in ipc/shm.c.
    pub(super) fn shmat(&self, op: &Op, addr: u64, flags: u64) -> Answer {
        let Some(file) = self.files.get(op.file) else {
            return Err(EINVAL);
        };
        let mut at = addr;
        if !at.is_multiple_of(PAGE) {
            if flags & SHM_RND == 0 {
                return Err(EINVAL);
            }
            at -= at % PAGE;
        }
        if at == 0 && flags & SHM_REMAP != 0 {
            return Err(EINVAL);
        }
        if at != 0 && flags & SHM_REMAP == 0 {
            let end = at.checked_add(op.size).ok_or(EINVAL)?;
            if self
                .inner
                .read()
                .find_next(at)
                .is_some_and(|vma| vma.start() < end)
            {
                return Err(EINVAL);
            }
        }
        let mut prot = if flags & SHM_RDONLY != 0 {
            Prot::READ
        } else {
            Prot::READ | Prot::WRITE
        };
        if flags & SHM_EXEC != 0 {
            prot |= Prot::EXEC;
        }
        let fixed = if at != 0 {
            MapFlags::FIXED
        } else {
            MapFlags::empty()
        };
        let request = MapRequest {
            addr: at,
            len: op.size,
            prot,
            flags: MapFlags::SHARED | fixed,
            file: Some(file),
            offset: 0,
        };
        self.inner.map(&request).map_err(|e| e.errno().raw())
    }

    /// shmdt(2): all that is left of the attachment that began at `addr`. Source: `ksys_shmdt()` in ipc/shm.c.
    pub(super) fn shmdt(&self, addr: u64) -> Answer {
        let mut parts = Vec::new();
        {
            let layout = self.inner.read();
            let mut file = None;
            for vma in layout.iter(addr) {
                let Some(open) = vma.file() else { continue };
                let from_start = vma.start().checked_sub(addr).map(|bytes| bytes / PAGE)
                    == Some(vma.vma().pgoff());
                let ours = match &file {
                    None => self.files.is_segment(open) && from_start,
                    Some(first) => Arc::ptr_eq(first, open) && from_start,
                };
                if ours {
                    file.get_or_insert_with(|| open.clone());
                    parts.push((vma.start(), vma.end() - vma.start()));
                }
            }
        }
        if parts.is_empty() {
            return Err(EINVAL);
        }
        for (start, len) in parts {
            self.inner.unmap(start, len).map_err(|e| e.errno().raw())?;
        }
        Ok(0)
    }

    /// `io_setup` of a ring of the size in `op`. It returns 0 and stores the address, which is compared with the recorded one: an
    /// address that differs is the result.
    pub(super) fn io_setup(&mut self, op: &Op, context: Option<u64>) -> Option<Answer> {
        // Why a context is refused (the system's limit, mostly) isn't known here, and then nothing is mapped.
        let context = context.filter(|_| matches!(op.ret, Ret::Ok { .. }))?;
        Some(
            self.map_ring(op, 0, MapFlags::SHARED)
                .map(|at| if at == context { 0 } else { at }),
        )
    }

    /// Maps the ring of `op`.
    pub(super) fn map_ring(&mut self, op: &Op, addr: u64, flags: MapFlags) -> Answer {
        let (prot, file) = (Prot::READ | Prot::WRITE, self.files.get(op.file));
        let at = self
            .inner
            .map(&MapRequest {
                addr,
                len: op.size,
                prot,
                flags,
                file,
                offset: 0,
            })
            .map_err(|e| e.errno().raw())?;
        self.rings.push((at, op.size));
        Ok(at)
    }

    /// `io_destroy`.
    pub(super) fn io_destroy(&mut self, context: u64) -> Answer {
        let at = self
            .rings
            .iter()
            .position(|(at, _)| *at == context)
            .ok_or(EINVAL)?;
        let (start, len) = self.rings.swap_remove(at);
        self.inner
            .unmap(start, len)
            .map(|()| 0)
            .map_err(|e| e.errno().raw())
    }
}
