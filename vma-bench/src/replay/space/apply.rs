//! One call on the library.

use std::sync::Arc;

use vma_core::{
    Access, Advice, LockAllFlags, LockFlags, MapFlags, MapRequest, OpenFile, Prot, RemapFlags,
    RemapRequest, SyncFlags,
};

use super::Space;
use crate::replay::{
    op::{Got, Op, OpFile},
    strace::call::{MmCall, Ret},
};

/// What a call of the library gave, as the system call would return it.
pub(super) type Answer = Result<u64, i32>;

const MAP_SHARED_VALIDATE: u64 = 3;
const MAP_FIXED: u64 = 0x10;
const MAP_FIXED_NOREPLACE: u64 = 0x10_0000;
const MREMAP_MOVES: u64 = 3;
const PROT_WRITE: u64 = 2;
const SHM_REMAP: u64 = 0o40000;
/// `MADV_COLLAPSE`: whether there is a huge page to be had depends on the machine.
const COLLAPSE: u64 = 25;

macro_rules! done {
    ($result:expr) => {
        $result.map(|_| 0).map_err(|e| e.errno().raw())
    };
}

impl Space {
    /// Does a call; its result is the library's own.
    pub fn apply(&mut self, op: &Op) -> Got {
        match self.call(op) {
            None => Got::Unchecked,
            Some(Ok(value)) => {
                self.note(&op.kind, value);
                Got::Ok(value)
            }
            Some(Err(errno)) => {
                // mprotect may have changed a part before the place where it failed.
                if let MmCall::Mprotect { addr, len, prot } = op.kind
                    && prot & PROT_WRITE != 0
                {
                    self.history.add(addr, addr.saturating_add(len));
                }
                Got::Err(errno)
            }
        }
    }

    /// Brings about the recorded result of a call for which the library gave another one.
    pub fn force(&mut self, op: &Op) {
        let Ret::Ok { value, .. } = op.ret else {
            return;
        };
        let mut forced = op.clone();
        match &mut forced.kind {
            MmCall::Mmap { addr, flags, .. } => {
                *addr = value;
                *flags = *flags & !MAP_FIXED_NOREPLACE | MAP_FIXED;
            }
            MmCall::Mremap {
                addr,
                flags,
                new_addr,
                ..
            } if *addr != value => {
                *new_addr = value;
                *flags |= MREMAP_MOVES;
            }
            MmCall::Shmat { addr, flags, .. } => {
                *addr = value;
                *flags |= SHM_REMAP;
            }
            MmCall::IoSetup { ctx: Some(ctx), .. } => {
                // A refusal leaves the layout without the ring, which the next snapshot shows.
                let _ = self.map_ring(op, *ctx, MapFlags::SHARED | MapFlags::FIXED);
                return;
            }
            _ => {}
        }
        self.apply(&forced);
    }

    fn call(&mut self, op: &Op) -> Option<Answer> {
        let space = &self.inner;
        Some(match op.kind {
            MmCall::Mmap {
                addr,
                len,
                prot,
                flags,
                offset,
                ..
            } => self.mmap(op, (addr, len), prot, flags, offset),
            MmCall::Munmap { addr, len } => done!(space.unmap(addr, len)),
            MmCall::Mprotect { addr, len, prot } => {
                done!(space.protect(addr, len, Prot::from_bits_retain(prot)))
            }
            // Without protection keys in hardware -1 is the only key there is.
            MmCall::PkeyMprotect {
                addr,
                len,
                prot,
                pkey: -1,
            } => {
                done!(space.protect(addr, len, Prot::from_bits_retain(prot)))
            }
            MmCall::Mremap {
                addr,
                old_len,
                new_len,
                flags,
                new_addr,
            } => space
                .remap(&RemapRequest {
                    addr,
                    old_len,
                    new_len,
                    flags: RemapFlags::from_bits_retain(flags),
                    new_addr,
                })
                .map_err(|e| e.errno().raw()),
            MmCall::Brk { addr } => Ok(space.brk(addr)),
            MmCall::PkeyMprotect { .. }
            | MmCall::Madvise {
                advice: COLLAPSE, ..
            } => return None,
            MmCall::Madvise { addr, len, advice } => {
                // The kernel takes an int.
                done!(space.advise(addr, len, Advice((advice as u32).cast_signed())))
            }
            MmCall::Mlock { addr, len } => done!(space.mlock(addr, len)),
            MmCall::Mlock2 { addr, len, flags } => {
                done!(space.mlock2(addr, len, LockFlags::from_bits_retain(flags)))
            }
            MmCall::Munlock { addr, len } => done!(space.munlock(addr, len)),
            MmCall::Mlockall { flags } => {
                done!(space.mlockall(LockAllFlags::from_bits_retain(flags)))
            }
            MmCall::Munlockall => done!(space.munlockall()),
            MmCall::Msync { addr, len, flags } => {
                done!(space.msync(addr, len, SyncFlags::from_bits_retain(flags)))
            }
            MmCall::RemapFilePages {
                addr,
                size,
                prot,
                pgoff,
                flags,
            } => done!(space.remap_file_pages(
                addr,
                size,
                Prot::from_bits_retain(prot),
                pgoff,
                MapFlags::from_bits_retain(flags)
            )),
            MmCall::Mseal { addr, len, flags } => done!(space.seal(addr, len, flags)),
            MmCall::Shmat { addr, flags, .. } => self.shmat(op, addr, flags),
            MmCall::Shmdt { addr } => self.shmdt(addr),
            MmCall::IoSetup { ctx, .. } => return self.io_setup(op, ctx),
            MmCall::IoDestroy { ctx } => self.io_destroy(ctx),
            MmCall::Touch { addr } => {
                // An address that can't be written is one that the call is told about in its own way.
                let _ = space.touch(addr, 1, Access::Write);
                return None;
            }
        })
    }

    fn mmap(&self, op: &Op, (addr, len): (u64, u64), prot: u64, flags: u64, offset: u64) -> Answer {
        let request = MapRequest {
            addr,
            len,
            prot: Prot::from_bits_retain(prot),
            flags: MapFlags::from_bits_retain(flags),
            file: self.files.get(op.file),
            offset,
        };
        let mapped = self.inner.map(&request).map_err(|e| e.errno().raw())?;
        // Shared memory without a file of its own: the library made the object.
        if let OpFile::Open { id, .. } = op.file
            && flags & MAP_SHARED_VALIDATE & 1 != 0
            && let Some(file) = self.file_at(mapped)
        {
            self.files.bind(&file, id);
        }
        Ok(mapped)
    }

    fn file_at(&self, addr: u64) -> Option<Arc<OpenFile>> {
        self.inner
            .read()
            .find(addr)
            .and_then(|vma| vma.file().cloned())
    }

    /// Keeps the history of what may be written.
    fn note(&mut self, call: &MmCall, value: u64) {
        let end = |addr: u64, len: u64| addr.saturating_add(len.next_multiple_of(4096).max(len));
        match *call {
            MmCall::Mmap { len, prot, .. } => {
                self.history.remove(value, end(value, len));
                if prot & PROT_WRITE != 0 {
                    self.history.add(value, end(value, len));
                }
            }
            MmCall::Munmap { addr, len } => self.history.remove(addr, end(addr, len)),
            MmCall::Mprotect { addr, len, prot }
            | MmCall::PkeyMprotect {
                addr, len, prot, ..
            } if prot & PROT_WRITE != 0 => {
                self.history.add(addr, end(addr, len));
            }
            MmCall::Mremap {
                addr,
                old_len,
                new_len,
                ..
            } => self.history.copy(addr, old_len, value, new_len),
            MmCall::Brk { .. } => {
                let (start, brk) = self.inner.read().heap();
                self.history.add(start, brk);
            }
            _ => {}
        }
    }
}
