//! One call of a case, made on the library.

use std::collections::BTreeMap;

use vma_core::paged::Paged;
use vma_core::{
    AddressSpace, Advice, Errno, FaultError, LockAllFlags, LockFlags, MapFlags, MapRequest,
    MdweFlags, Prot, RemapFlags, RemapRequest, Seals, SyncFlags, Totals, VmaRef,
};

use super::{
    files::{FileResult, Files},
    format::{At, Call, Case, Counters, Op, Outcome, PAGE, Piece},
    setup,
};

/// A case under way.
#[derive(Debug)]
pub(super) struct Run<'a> {
    case: &'a Case,
    /// The files.
    pub files: Files,
    /// The living processes.
    pub spaces: BTreeMap<u64, AddressSpace<Paged>>,
    /// Totals of process 0 before the first call.
    before: Totals,
}

/// What the library says a call comes to.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// The result.
    pub outcome: Outcome,
    /// Which pages mincore finds, a digit each.
    pub resident: Option<String>,
}

impl From<Outcome> for Answer {
    fn from(outcome: Outcome) -> Self {
        let resident = None;
        Answer { outcome, resident }
    }
}

fn failed(errno: Errno) -> Outcome {
    Outcome::Errno(errno.name().to_owned())
}

macro_rules! done {
    ($result:expr) => {
        match $result {
            Ok(()) => Outcome::Ok(0),
            Err(e) => failed(e.errno()),
        }
    };
}

fn on_file(result: FileResult<()>) -> Outcome {
    match result {
        Ok(()) => Outcome::Ok(0),
        Err(name) => Outcome::Errno(name.to_owned()),
    }
}

/// The kernel takes an int.
fn advice(raw: u64) -> Advice {
    Advice((raw as u32).cast_signed())
}

impl<'a> Run<'a> {
    /// A case before its first call.
    ///
    /// # Errors
    /// As [`setup::first_process`].
    pub(super) fn new(case: &'a Case) -> Result<Self, String> {
        let space = setup::first_process(case)?;
        Ok(Run {
            case,
            files: Files::new(&case.files)?,
            before: space.totals(),
            spaces: BTreeMap::from([(0, space)]),
        })
    }

    /// Makes call `index` of the case.
    ///
    /// # Errors
    /// In words: the call can't be made, or what the recording did after it fails.
    pub(super) fn call(&mut self, index: usize, op: &Op) -> Result<Answer, String> {
        match &op.call {
            Call::Fork { child } => self.fork(op.process, *child),
            Call::Exit {} => {
                self.spaces.remove(&op.process);
                Ok(Outcome::Ok(0).into())
            }
            Call::DupFd { file, new } => Ok(on_file(self.files.dup(file, new)).into()),
            Call::Reopen { file, new, mode } => {
                Ok(on_file(self.files.reopen(file, new, *mode)).into())
            }
            Call::Ftruncate { file, len } => Ok(on_file(self.files.truncate(file, len.0)).into()),
            Call::PunchHole { file, off, len } => {
                Ok(on_file(self.files.punch_hole(file, off.0, len.0)).into())
            }
            Call::FileWrite { file, off, val } => {
                Ok(on_file(self.files.write_byte(file, off.0, *val)).into())
            }
            Call::FileRead { file, off } => Ok(self.file_read(file, off.0).into()),
            Call::FileSeal { file, seals } => Ok(self.file_seal(file, seals.0).into()),
            Call::Mmap {
                addr,
                len,
                prot,
                flags,
                file,
                off,
            } => {
                let file = file.as_deref().map(|id| self.files.get(id)).transpose()?;
                let request = MapRequest {
                    addr: self.at(*addr),
                    len: len.0,
                    prot: Prot::from_bits_retain(prot.0),
                    flags: MapFlags::from_bits_retain(flags.0),
                    file: file.cloned(),
                    offset: off.map_or(0, |off| off.0),
                };
                self.map(index, op.process, &request)
            }
            _ => self.change(self.space(op.process)?, &op.call),
        }
    }

    fn space(&self, process: u64) -> Result<&AddressSpace<Paged>, String> {
        self.spaces
            .get(&process)
            .ok_or_else(|| format!("there is no process {process}"))
    }

    fn at(&self, addr: At) -> u64 {
        addr.resolve(self.case.start)
    }

    fn fork(&mut self, parent: u64, child: u64) -> Result<Answer, String> {
        let number = i64::try_from(child).map_err(|e| e.to_string())?;
        match self.space(parent)?.dup() {
            Ok(copy) => {
                self.spaces.insert(child, copy);
                Ok(Outcome::Ok(number).into())
            }
            Err(e) => Ok(failed(e.errno()).into()),
        }
    }

    fn file_read(&self, file: &str, off: u64) -> Outcome {
        match self.files.read_byte(file, off) {
            Ok(Some(byte)) => Outcome::Ok(byte.into()),
            Ok(None) => Outcome::Eof,
            Err(name) => Outcome::Errno(name.to_owned()),
        }
    }

    fn file_seal(&self, file: &str, seals: u64) -> Outcome {
        match self.files.get(file) {
            // The kernel takes an unsigned int.
            Ok(open) => done!(open.add_seals(Seals::from_bits_retain(seals as u32))),
            Err(name) => Outcome::Errno(name.to_owned()),
        }
    }

    fn map(&mut self, index: usize, process: u64, request: &MapRequest) -> Result<Answer, String> {
        let space = self.space(process)?;
        let addr = match space.map(request) {
            Ok(addr) => addr,
            Err(e) => return Ok(failed(e.errno()).into()),
        };
        // The object behind a new shared anonymous mapping is called by the number of the call.
        let object = {
            let guard = space.read();
            let file = guard.find(addr).and_then(VmaRef::file);
            file.map(|file| file.object().clone())
        };
        let outcome = self.placed(space, addr, request.len)?;
        if let (Some(object), Outcome::Ok(_)) = (object, &outcome) {
            self.files.adopt(&object, &format!("s{index}"));
        }
        Ok(outcome.into())
    }

    /// What the recording did with a new mapping: outside the arena it was unmapped again at once.
    fn placed(&self, space: &AddressSpace<Paged>, addr: u64, len: u64) -> Result<Outcome, String> {
        let size = len.div_ceil(PAGE).saturating_mul(PAGE);
        let offset = addr.wrapping_sub(self.case.start);
        let end = offset.checked_add(size);
        if addr >= self.case.start && end.is_some_and(|end| end <= self.case.len) {
            return Ok(Outcome::Ok(offset.cast_signed()));
        }
        space
            .unmap(addr, size)
            .map_err(|e| format!("what was mapped outside the arena stays: {e}"))?;
        Ok(Outcome::Outside)
    }

    /// The calls that change the layout of one space.
    fn change(&self, space: &AddressSpace<Paged>, call: &Call) -> Result<Answer, String> {
        let outcome = match *call {
            Call::Munmap { addr, len } => done!(space.unmap(self.at(addr), len.0)),
            Call::Mprotect { addr, len, prot } => {
                done!(space.protect(self.at(addr), len.0, Prot::from_bits_retain(prot.0)))
            }
            Call::Mremap {
                addr,
                old_len,
                new_len,
                flags,
                new_addr,
            } => {
                let request = RemapRequest {
                    addr: self.at(addr),
                    old_len: old_len.0,
                    new_len: new_len.0,
                    flags: RemapFlags::from_bits_retain(flags.0),
                    new_addr: new_addr.map_or(0, |addr| self.at(addr)),
                };
                match space.remap(&request) {
                    Ok(at) => self.placed(space, at, new_len.0)?,
                    Err(e) => failed(e.errno()),
                }
            }
            Call::Brk { addr } => {
                let brk = space.brk(self.at(addr));
                Outcome::Ok(brk.wrapping_sub(self.case.start).cast_signed())
            }
            Call::Mseal { addr, len, flags } => done!(space.seal(self.at(addr), len.0, flags.0)),
            Call::RemapFilePages {
                addr,
                len,
                prot,
                pgoff,
                flags,
            } => done!(space.remap_file_pages(
                self.at(addr),
                len.0,
                Prot::from_bits_retain(prot.0),
                pgoff.0,
                MapFlags::from_bits_retain(flags.0)
            )),
            // The kernel refuses any flag before it looks at anything else.
            Call::ProcessMadvise { flags, .. } if flags.0 != 0 => failed(Errno::EINVAL),
            Call::ProcessMadvise {
                ref vec, advice, ..
            } => {
                let at = |piece: &Piece| (self.at(piece.addr), piece.len.0);
                let ranges: Vec<(u64, u64)> = vec.iter().map(at).collect();
                match space.advise_vector(&ranges, self::advice(advice.0)) {
                    Ok(bytes) => Outcome::Ok(bytes.cast_signed()),
                    Err(e) => failed(e.errno()),
                }
            }
            _ => return self.use_memory(space, call),
        };
        Ok(outcome.into())
    }

    /// The calls that use memory, lock it, ask about it, or set how later calls work.
    fn use_memory(&self, space: &AddressSpace<Paged>, call: &Call) -> Result<Answer, String> {
        Ok(match *call {
            Call::Madvise { addr, len, advice } => {
                done!(space.advise(self.at(addr), len.0, self::advice(advice.0))).into()
            }
            Call::Mlock { addr, len } => done!(space.mlock(self.at(addr), len.0)).into(),
            Call::Mlock2 { addr, len, flags } => {
                let flags = LockFlags::from_bits_retain(flags.0);
                done!(space.mlock2(self.at(addr), len.0, flags)).into()
            }
            Call::Munlock { addr, len } => done!(space.munlock(self.at(addr), len.0)).into(),
            Call::Mlockall { flags } => {
                done!(space.mlockall(LockAllFlags::from_bits_retain(flags.0))).into()
            }
            Call::Munlockall {} => done!(space.munlockall()).into(),
            Call::Msync { addr, len, flags } => {
                let flags = SyncFlags::from_bits_retain(flags.0);
                done!(space.msync(self.at(addr), len.0, flags)).into()
            }
            Call::Mincore { addr, len } => mincore(space, self.at(addr), len.0),
            Call::Write { addr, val } => {
                let stored = space.accessor().store_u8(self.at(addr), val);
                accessed(stored.map(|()| 0)).into()
            }
            Call::Read { addr } => accessed(space.accessor().load_u8(self.at(addr))).into(),
            Call::Mdwe { flags } => {
                done!(space.set_mdwe(MdweFlags::from_bits_retain(flags.0))).into()
            }
            Call::Stats {} => Outcome::Stats(self.counters(&space.totals())).into(),
            _ => return Err("this call isn't made on a space".to_owned()),
        })
    }

    /// The counters of a space, less what process 0 had before the first call.
    fn counters(&self, now: &Totals) -> Counters {
        let kib = |of: fn(&Totals) -> u64| {
            let pages = of(now).cast_signed() - of(&self.before).cast_signed();
            pages * (PAGE / 1024).cast_signed()
        };
        Counters {
            size: kib(|t| t.total),
            locked: kib(Totals::locked_vm),
            data: kib(|t| t.data),
            stack: kib(|t| t.stack),
            exec: kib(|t| t.exec),
        }
    }
}

fn mincore(space: &AddressSpace<Paged>, addr: u64, len: u64) -> Answer {
    // As large as any recorded one, and more.
    let mut pages = vec![0; len.div_ceil(PAGE).min(1 << 24) as usize];
    match space.mincore(addr, len, &mut pages) {
        Ok(()) => Answer {
            outcome: Outcome::Ok(0),
            resident: Some(
                pages
                    .iter()
                    .map(|page| if *page == 1 { '1' } else { '0' })
                    .collect(),
            ),
        },
        Err(e) => failed(e.errno()).into(),
    }
}

/// A load or a store of one byte.
fn accessed(result: Result<u8, FaultError>) -> Outcome {
    match result {
        Ok(byte) => Outcome::Ok(byte.into()),
        Err(FaultError::Unmapped(_)) => Outcome::signal("SIGSEGV", "MAPERR"),
        Err(FaultError::Denied { .. }) => Outcome::signal("SIGSEGV", "ACCERR"),
        Err(FaultError::BeyondEnd(_)) => Outcome::signal("SIGBUS", "ADRERR"),
        // An error that isn't known here is equal to no recorded one.
        Err(e) => Outcome::signal("?", &e.to_string()),
    }
}
