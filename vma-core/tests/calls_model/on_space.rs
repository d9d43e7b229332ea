//! Calls on a space of the library.

use std::sync::Arc;

use vma_core::{
    Access, AccessMode, AddressSpace, Advice, AdviseError, CoreError, Errno, FileIoError,
    FileObject, LockAllFlags, LockError, LockFlags, MapFlags, MapRequest, OpenFile, Prot,
    ProtectError, RemapFileError, RemapFlags, RemapRequest, SealError, SyncError, SyncFlags,
    UnmapError,
};

use crate::call::{Call, mapped_len};

/// What came of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    /// At this many bytes from the base.
    At(u64),
    /// Somewhere outside of the zone, and unmapped again.
    Outside,
    /// With this error number.
    Failed(i32),
    /// The access got a signal.
    Signal,
}

/// Where the calls play, and with which files.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) base: u64,
    /// Results below and above are outside.
    pub(crate) end: u64,
    /// 0 and 1: one description, read and write; 2: another; 3: read only; 4: write only; 5: of a file sealed
    /// against future writing.
    pub(crate) files: [Arc<OpenFile>; 6],
}

impl World {
    pub(crate) fn new(
        (base, end): (u64, u64),
        object: &Arc<FileObject>,
        sealed: &Arc<FileObject>,
    ) -> Self {
        let open = |mode| OpenFile::new(object.clone(), mode);
        let first = open(AccessMode::ReadWrite);
        let files = [
            first.clone(),
            first,
            open(AccessMode::ReadWrite),
            open(AccessMode::Read),
            open(AccessMode::Write),
            OpenFile::new(sealed.clone(), AccessMode::ReadWrite),
        ];
        World { base, end, files }
    }

    /// The file that changes its length.
    pub(crate) fn object(&self) -> &Arc<FileObject> {
        self.files[0].object()
    }

    fn is_inside(&self, addr: u64) -> bool {
        (self.base..self.end).contains(&addr)
    }
}

fn done<T, E>(result: Result<T, E>, errno: impl Fn(E) -> Errno) -> Outcome {
    match result {
        Ok(_) => Outcome::Done,
        Err(error) => Outcome::Failed(errno(error).raw()),
    }
}

fn placed(world: &World, space: &AddressSpace, addr: u64, len: u64) -> Outcome {
    if world.is_inside(addr) {
        return Outcome::At(addr - world.base);
    }
    space.unmap(addr, len).unwrap();
    Outcome::Outside
}

fn map(world: &World, space: &AddressSpace, request: &MapRequest) -> Outcome {
    match space.map(request) {
        Ok(addr) => {
            let len = mapped_len(request.len, request.flags.bits());
            placed(world, space, addr, len)
        }
        Err(error) => Outcome::Failed(error.errno().raw()),
    }
}

fn remap(world: &World, space: &AddressSpace, request: &RemapRequest) -> Outcome {
    match space.remap(request) {
        Ok(addr) => placed(world, space, addr, request.new_len),
        Err(error) => Outcome::Failed(error.errno().raw()),
    }
}

/// Makes a call. Forks are the caller's affair.
pub(crate) fn apply(world: &World, space: &AddressSpace, call: &Call) -> Outcome {
    let base = world.base;
    match *call {
        Call::Map {
            at,
            len,
            prot,
            flags,
            file,
            offset,
        } => {
            let request = MapRequest {
                addr: base + at,
                len,
                prot: Prot::from_bits_retain(prot),
                flags: MapFlags::from_bits_retain(flags),
                file: file.map(|file| world.files[file].clone()),
                offset,
            };
            map(world, space, &request)
        }
        Call::Remap {
            at,
            old,
            new,
            flags,
            to,
        } => {
            let request = RemapRequest {
                addr: base + at,
                old_len: old,
                new_len: new,
                flags: RemapFlags::from_bits_retain(flags),
                new_addr: base + to,
            };
            remap(world, space, &request)
        }
        Call::Unmap { at, len } => done(space.unmap(base + at, len), UnmapError::errno),
        Call::Protect { at, len, prot } => done(
            space.protect(base + at, len, Prot::from_bits_retain(prot)),
            ProtectError::errno,
        ),
        Call::Truncate { len } => done(world.object().set_len(len), FileIoError::errno),
        Call::Touch { at, len, write } => {
            let access = if write { Access::Write } else { Access::Read };
            let touched = space.touch(base + at, len, access);
            touched.map_or(Outcome::Signal, |()| Outcome::Done)
        }
        Call::Fork => Outcome::Done,
        _ => apply_to_range(world, space, call),
    }
}

/// Calls that change no mapping's place.
fn apply_to_range(world: &World, space: &AddressSpace, call: &Call) -> Outcome {
    let base = world.base;
    match *call {
        Call::Advise { at, len, advice } => done(
            space.advise(base + at, len, Advice(advice)),
            AdviseError::errno,
        ),
        Call::Guard { at, len } => {
            let result = space.advise(base + at, len, Advice::GUARD_INSTALL);
            let outcome = done(result, AdviseError::errno);
            let _ = space.advise(base + at, len, Advice::GUARD_REMOVE);
            outcome
        }
        Call::Lock { at, len, on_fault } => {
            let flags = LockFlags::from_bits_retain(u64::from(on_fault));
            done(space.mlock2(base + at, len, flags), LockError::errno)
        }
        Call::Unlock { at, len } => done(space.munlock(base + at, len), LockError::errno),
        Call::LockAll { flags } => done(
            space.mlockall(LockAllFlags::from_bits_retain(flags)),
            LockError::errno,
        ),
        Call::UnlockAll => done(space.munlockall(), LockError::errno),
        Call::Seal { at, len } => done(space.seal(base + at, len, 0), SealError::errno),
        Call::Sync { at, len, flags } => done(
            space.msync(base + at, len, SyncFlags::from_bits_retain(flags)),
            SyncError::errno,
        ),
        Call::Core { at, len } => done(
            space.mincore(base + at, len, &mut vec![0; len.div_ceil(4096) as usize]),
            CoreError::errno,
        ),
        Call::RemapFile {
            at,
            len,
            prot,
            pgoff,
            flags,
        } => {
            let (prot, flags) = (
                Prot::from_bits_retain(prot),
                MapFlags::from_bits_retain(flags),
            );
            done(
                space.remap_file_pages(base + at, len, prot, pgoff, flags),
                RemapFileError::errno,
            )
        }
        _ => unreachable!("{call:?} belongs to apply()"),
    }
}
