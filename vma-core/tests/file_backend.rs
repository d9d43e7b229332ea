//! Files with a backend: what is read when, what failures become, what calls that change a file do to reads under way.

#![allow(clippy::unwrap_used, reason = "tests may")]

#[path = "memory/mod.rs"]
mod memory;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use memory::{PAGE, RW, backed, backed_by, map_file, space};
use vma_core::paged::{FramePool, Paged};
use vma_core::{
    Access, AccessMode, AddressSpace, Advice, Errno, FaultError, FileBackend, FileIoError,
    FileKind, FileObject, MapFlags, MapRequest, MemFile, MemFileCall, OpenFile, SealFileError,
    Seals,
};

fn open(object: &Arc<FileObject>) -> Arc<OpenFile> {
    OpenFile::new(object.clone(), AccessMode::ReadWrite)
}

/// Long enough for another thread to come to where it waits.
fn pause() {
    std::thread::sleep(Duration::from_millis(50));
}

/// Where to stop, who is told, and who lets it go on.
type Stop = (MemFileCall, Sender<()>, Receiver<()>);

/// A file in memory whose reads and writes stop where a test says, until it lets them go on.
struct Stopping {
    memory: MemFile,
    at: Mutex<Option<Stop>>,
    panics: AtomicBool,
}

impl fmt::Debug for Stopping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stopping").finish_non_exhaustive()
    }
}

/// A call that has stopped.
struct Stopped {
    reached: Receiver<()>,
    go_on: Sender<()>,
}

impl Stopping {
    fn new(bytes: &[u8]) -> Arc<Self> {
        Arc::new(Stopping {
            memory: MemFile::new(bytes),
            at: Mutex::new(None),
            panics: AtomicBool::new(false),
        })
    }

    /// The next call of a kind stops.
    fn stop_next(&self, call: MemFileCall) -> Stopped {
        let (reach, reached) = channel();
        let (go_on, may_go_on) = channel();
        *self.at.lock().unwrap() = Some((call, reach, may_go_on));
        Stopped { reached, go_on }
    }

    fn stop(&self, call: MemFileCall) {
        let stop = {
            let mut at = self.at.lock().unwrap();
            at.take_if(|stop| stop.0 == call)
        };
        if let Some((_, reach, may_go_on)) = stop {
            reach.send(()).unwrap();
            may_go_on.recv().unwrap();
        }
    }
}

impl FileBackend for Stopping {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<usize, Errno> {
        let count = self.memory.read(offset, into);
        // It has the bytes by now.
        self.stop(MemFileCall::Read);
        assert!(!self.panics.swap(false, Ordering::SeqCst), "as planned");
        count
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), Errno> {
        self.stop(MemFileCall::Write);
        self.memory.write(offset, from)
    }

    fn set_len(&self, len: u64) -> Result<(), Errno> {
        self.memory.set_len(len)
    }

    fn punch_hole(&self, offset: u64, len: u64) -> Result<(), Errno> {
        self.memory.punch_hole(offset, len)
    }

    fn sync(&self) -> Result<(), Errno> {
        self.memory.sync()
    }
}

/// A space, and a shared mapping of a file in it.
fn mapped(object: &Arc<FileObject>, pages: u64) -> (AddressSpace<Paged>, u64) {
    let space = space(&FramePool::default());
    let at = map_file(&space, &open(object), pages, MapFlags::SHARED);
    (space, at)
}

#[test]
fn pages_are_read_when_they_are_first_accessed_and_once() {
    let (memory, file) = backed(4);
    let space = space(&FramePool::default());
    let shared = map_file(&space, &file, 4, MapFlags::SHARED);
    let private = map_file(&space, &file, 4, MapFlags::PRIVATE);
    assert_eq!(memory.calls(MemFileCall::Read), 0);
    let mut cpu = space.accessor();
    assert_eq!(cpu.load_u8(shared + 2 * PAGE), Ok(3));
    assert_eq!(cpu.load_u8(private + 2 * PAGE), Ok(3));
    let mut byte = [0];
    assert_eq!(file.read_at(2 * PAGE + 5, &mut byte), Ok(1));
    assert_eq!(byte, [3]);
    assert_eq!(memory.calls(MemFileCall::Read), 1);
    assert_eq!(file.object().resident_pages(), 1);
    // A private copy, a shared store and read(2) of others.
    cpu.store_u8(private, 50).unwrap();
    cpu.store_u8(shared + PAGE, 60).unwrap();
    assert_eq!(file.read_at(3 * PAGE, &mut byte), Ok(1));
    assert_eq!(byte, [4]);
    assert_eq!(memory.calls(MemFileCall::Read), 4);
    assert_eq!(cpu.load_u8(private + PAGE), Ok(60), "the file's page");
    assert_eq!(cpu.load_u8(shared), Ok(1));
    memory::check(&space);
}

#[test]
fn threads_that_fault_on_one_page_wait_for_one_read() {
    let stopping = Stopping::new(&[7; PAGE as usize]);
    let object = backed_by(stopping.clone(), PAGE);
    let (space, at) = mapped(&object, 1);
    let stopped = stopping.stop_next(MemFileCall::Read);
    std::thread::scope(|scope| {
        let threads = [(); 4].map(|()| {
            scope.spawn(|| {
                let mut cpu = space.accessor();
                cpu.load_u8(at)
            })
        });
        stopped.reached.recv().unwrap();
        // Meanwhile nobody is kept from changing the space.
        pause();
        let other = memory::map(&space, 1);
        space.unmap(other, PAGE).unwrap();
        stopped.go_on.send(()).unwrap();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), Ok(7));
        }
    });
    assert_eq!(stopping.memory.calls(MemFileCall::Read), 1);
}

#[test]
fn a_failed_read_is_sigbus_and_an_error_of_read_and_the_next_one_tries_again() {
    let (memory, file) = backed(2);
    let space = space(&FramePool::default());
    let at = map_file(&space, &file, 2, MapFlags::SHARED);
    let mut cpu = space.accessor();
    let failed = |addr, errno| FaultError::ReadFailed { addr, errno };
    memory.fail_next(MemFileCall::Read, Errno::EIO);
    assert_eq!(cpu.load_u8(at + 5), Err(failed(at + 5, Errno::EIO)));
    memory.fail_next(MemFileCall::Read, Errno::EIO);
    assert_eq!(cpu.store_u8(at, 1), Err(failed(at, Errno::EIO)));
    memory.fail_next(MemFileCall::Read, Errno::ENOMEM);
    assert_eq!(cpu.load_u8(at), Err(FaultError::OutOfMemory(at)));
    memory.fail_next(MemFileCall::Read, Errno::EIO);
    let touched = space.touch(at, 2 * PAGE, Access::Read);
    assert_eq!(touched, Err(failed(at, Errno::EIO)));
    memory.fail_next(MemFileCall::Read, Errno::EIO);
    let populated = space.advise(at, 2 * PAGE, Advice::POPULATE_READ);
    assert_eq!(populated.unwrap_err().errno(), Errno::EFAULT);
    let mut bytes = [0; 2];
    memory.fail_next(MemFileCall::Read, Errno::EIO);
    let error = file.read_at(0, &mut bytes).unwrap_err();
    assert_eq!(
        error,
        FileIoError::ReadFailed {
            offset: 0,
            errno: Errno::EIO
        }
    );
    assert_eq!(error.errno(), Errno::EIO);
    // A part of a page can't be written without the rest.
    memory.fail_next(MemFileCall::Read, Errno::EIO);
    assert_eq!(file.write_at(1, &[9]).unwrap_err().errno(), Errno::EIO);
    assert_eq!(file.object().resident_pages(), 0);
    assert_eq!(cpu.load_u8(at), Ok(1));
    // What was read before the failure is what read(2) returns.
    memory.fail_next(MemFileCall::Read, Errno::EIO);
    assert_eq!(file.read_at(PAGE - 1, &mut bytes), Ok(1));
    assert_eq!(cpu.load_u8(at + PAGE), Ok(2));
}

#[test]
fn populating_passes_over_pages_that_cannot_be_read() {
    let (memory, file) = backed(4);
    let space = space(&FramePool::default());
    memory.fail_next(MemFileCall::Read, Errno::EIO);
    let request = MapRequest {
        flags: MapFlags::SHARED | MapFlags::POPULATE,
        file: Some(file.clone()),
        ..MapRequest::anonymous(4 * PAGE, RW)
    };
    let at = space.map(&request).unwrap();
    // As in Linux the rest of the mapping is left.
    assert_eq!(file.object().resident_pages(), 0);
    let at_once = MapRequest {
        addr: at,
        flags: MapFlags::SHARED | MapFlags::POPULATE | MapFlags::FIXED,
        ..request
    };
    space.map(&at_once).unwrap();
    assert_eq!(file.object().resident_pages(), 4);
    assert_eq!(memory.calls(MemFileCall::Read), 5);
    // By a guard files are read while it's held.
    let (_, other) = backed(4);
    let mut guard = space.write();
    let at = guard
        .map(&MapRequest {
            flags: MapFlags::SHARED,
            file: Some(other.clone()),
            ..MapRequest::anonymous(4 * PAGE, RW)
        })
        .unwrap();
    guard.touch(at, 4 * PAGE, Access::Write).unwrap();
    drop(guard);
    assert_eq!(other.object().dirty_pages(), 4);
}

#[test]
fn a_reader_that_panics_leaves_the_page_to_the_next_one() {
    let stopping = Stopping::new(&[7; PAGE as usize]);
    let object = backed_by(stopping.clone(), PAGE);
    let (space, at) = mapped(&object, 1);
    stopping.panics.store(true, Ordering::SeqCst);
    let stopped = stopping.stop_next(MemFileCall::Read);
    std::thread::scope(|scope| {
        let load = || space.accessor().load_u8(at);
        let first = scope.spawn(load);
        stopped.reached.recv().unwrap();
        let second = scope.spawn(load);
        pause();
        stopped.go_on.send(()).unwrap();
        assert!(first.join().is_err());
        assert_eq!(second.join().unwrap(), Ok(7));
    });
    space.unmap(at, PAGE).unwrap();
}

/// C7: what was read before is not what is found afterwards.
#[test]
fn pages_that_are_being_read_are_truncated_and_punched_as_well() {
    for punch in [false, true] {
        let stopping = Stopping::new(&[7; 2 * PAGE as usize]);
        let object = backed_by(stopping.clone(), 2 * PAGE);
        let (space, at) = mapped(&object, 2);
        for page in 0..2 {
            let stopped = stopping.stop_next(MemFileCall::Read);
            std::thread::scope(|scope| {
                let load = scope.spawn(|| space.accessor().load_u8(at + page * PAGE + 200));
                stopped.reached.recv().unwrap();
                let change = scope.spawn(|| {
                    if punch {
                        object.punch_hole(100, 2 * PAGE - 100).unwrap();
                    } else {
                        object.set_len(100).unwrap();
                        object.set_len(2 * PAGE).unwrap();
                    }
                });
                pause();
                stopped.go_on.send(()).unwrap();
                change.join().unwrap();
                let loaded = load.join().unwrap();
                let beyond = matches!(loaded, Err(FaultError::BeyondEnd(_)));
                assert!(matches!(loaded, Ok(0 | 7)) || beyond, "{loaded:?}");
            });
            let mut cpu = space.accessor();
            assert_eq!(cpu.load_u8(at + page * PAGE + 200), Ok(0));
            assert_eq!(cpu.load_u8(at + 99), Ok(7));
            assert_eq!(cpu.load_u8(at + 100), Ok(0));
            object.sync().unwrap();
            object.evict(0..2);
            stopping.memory.write(0, &[7; 2 * PAGE as usize]).unwrap();
        }
    }
}

#[test]
fn what_lies_beyond_the_end_is_zero_and_never_written() {
    let bytes = vec![7; PAGE as usize];
    let memory = Arc::new(MemFile::new(&bytes));
    // The backend has more than the file shows.
    let object = backed_by(memory.clone(), 100);
    let (space, at) = mapped(&object, 2);
    let mut cpu = space.accessor();
    assert_eq!(cpu.load_u8(at + 99), Ok(7));
    assert_eq!(cpu.load_u8(at + 100), Ok(0));
    assert_eq!(
        cpu.load_u8(at + PAGE),
        Err(FaultError::BeyondEnd(at + PAGE))
    );
    cpu.store_u8(at, 1).unwrap();
    cpu.store_u8(at + 100, 2).unwrap();
    assert_eq!(cpu.load_u8(at + 100), Ok(2));
    object.sync().unwrap();
    assert_eq!(memory.bytes()[..101], [&[1][..], &[7; 100]].concat());
    assert_eq!(
        cpu.load_u8(at + 100),
        Ok(0),
        "zeroed when it's written back"
    );
    // Longer again, by ftruncate(2) and by write(2).
    cpu.store_u8(at + 100, 3).unwrap();
    object.set_len(200).unwrap();
    assert_eq!(cpu.load_u8(at + 100), Ok(0));
    cpu.store_u8(at + 200, 3).unwrap();
    object.write_at(300, &[5]).unwrap();
    assert_eq!(cpu.load_u8(at + 200), Ok(0));
    object.sync().unwrap();
    let bytes = memory.bytes();
    assert_eq!((bytes.len(), bytes[200], bytes[300]), (301, 0, 5));
}

#[test]
fn writing_reads_only_what_it_leaves() {
    let (memory, file) = backed(4);
    let page = vec![9; PAGE as usize];
    file.write_at(PAGE, &page).unwrap();
    assert_eq!(memory.calls(MemFileCall::Read), 0, "a whole page");
    file.write_at(2 * PAGE + 1, &page).unwrap();
    assert_eq!(memory.calls(MemFileCall::Read), 2, "both edges");
    // Beyond the end nothing is there to be read, nor up to it in the last page.
    file.write_at(4 * PAGE + 10, &[1]).unwrap();
    assert_eq!(memory.calls(MemFileCall::Read), 2);
    assert_eq!(file.object().len(), 4 * PAGE + 11);
    let mut bytes = [0; 12];
    assert_eq!(file.read_at(4 * PAGE, &mut bytes), Ok(11));
    assert_eq!(bytes, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
    assert_eq!(file.object().dirty_pages(), 4);
    file.sync().unwrap();
    let bytes = memory.bytes();
    assert_eq!(bytes.len() as u64, 4 * PAGE + 11);
    let at = |offset: u64| bytes[offset as usize];
    assert_eq!([at(PAGE), at(2 * PAGE), at(2 * PAGE + 1)], [9, 3, 9]);
    assert_eq!(
        [at(3 * PAGE), at(3 * PAGE + 1), at(4 * PAGE + 9)],
        [9, 4, 0]
    );
}

#[test]
fn a_change_that_the_backend_refuses_changes_nothing() {
    let (memory, file) = backed(4);
    let space = space(&FramePool::default());
    let at = map_file(&space, &file, 4, MapFlags::SHARED);
    let mut cpu = space.accessor();
    cpu.store_u8(at + 3 * PAGE, 50).unwrap();
    for len in [PAGE, 8 * PAGE] {
        memory.fail_next(MemFileCall::SetLen, Errno::ENOSPC);
        let error = file.truncate(len).unwrap_err();
        assert_eq!(error, FileIoError::ChangeFailed(Errno::ENOSPC));
        assert_eq!(file.object().len(), 4 * PAGE);
    }
    memory.fail_next(MemFileCall::PunchHole, Errno::EOPNOTSUPP);
    let error = file.punch_hole(0, 4 * PAGE).unwrap_err();
    assert_eq!(error.errno(), Errno::EOPNOTSUPP);
    memory.fail_next(MemFileCall::PunchHole, Errno::EOPNOTSUPP);
    let error = space.advise(at, 4 * PAGE, Advice::REMOVE).unwrap_err();
    assert_eq!(error.errno(), Errno::EOPNOTSUPP);
    assert_eq!(cpu.load_u8(at + 3 * PAGE), Ok(50));
    // And one that it makes is one of both.
    file.punch_hole(PAGE, PAGE).unwrap();
    file.truncate(3 * PAGE).unwrap();
    assert_eq!(cpu.load_u8(at + PAGE), Ok(0));
    assert_eq!(memory.bytes().len() as u64, 3 * PAGE);
    assert_eq!(memory.bytes()[PAGE as usize], 0);
    assert_eq!(file.object().dirty_pages(), 0, "what was dirty is gone");
}

/// Counts questions, and refuses some.
#[derive(Debug, Default)]
struct Asking {
    memory: MemFile,
    asked: AtomicU64,
    refuses: AtomicBool,
}

impl FileBackend for Asking {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<usize, Errno> {
        self.memory.read(offset, into)
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), Errno> {
        self.memory.write(offset, from)
    }

    fn set_len(&self, len: u64) -> Result<(), Errno> {
        self.memory.set_len(len)
    }

    fn punch_hole(&self, offset: u64, len: u64) -> Result<(), Errno> {
        self.memory.punch_hole(offset, len)
    }

    fn sync(&self) -> Result<(), Errno> {
        self.memory.sync()
    }

    fn asks_before_store(&self) -> bool {
        true
    }

    fn before_store(&self, offset: u64) -> Result<(), Errno> {
        assert_eq!(offset, PAGE);
        self.asked.fetch_add(1, Ordering::SeqCst);
        if self.refuses.load(Ordering::SeqCst) {
            return Err(Errno::ENOSPC);
        }
        Ok(())
    }
}

#[test]
fn a_backend_is_asked_before_the_first_store_and_may_refuse_it() {
    let asking = Arc::new(Asking::default());
    let object = backed_by(asking.clone(), 2 * PAGE);
    let (space, at) = mapped(&object, 2);
    let at = at + PAGE;
    let asked = || asking.asked.load(Ordering::SeqCst);
    let mut cpu = space.accessor();
    cpu.load_u8(at).unwrap();
    asking.refuses.store(true, Ordering::SeqCst);
    let refused = FaultError::StoreRefused {
        addr: at + 4,
        errno: Errno::ENOSPC,
    };
    assert_eq!(cpu.store_u8(at + 4, 1), Err(refused));
    assert_eq!(object.dirty_pages(), 0);
    asking.refuses.store(false, Ordering::SeqCst);
    cpu.store_u8(at, 1).unwrap();
    cpu.store_u8(at + 1, 1).unwrap();
    assert_eq!(asked(), 2, "once it's allowed it stays so");
    object.sync().unwrap();
    cpu.load_u8(at).unwrap();
    assert_eq!(asked(), 2);
    cpu.store_u8(at, 2).unwrap();
    assert_eq!(asked(), 3, "anew after it was written back");
    assert_eq!(object.write_protect_range(0..2), 1);
    cpu.store_u8(at, 3).unwrap();
    assert_eq!(asked(), 4, "and when it was asked for");
    // A store that finds no page yet.
    object.sync().unwrap();
    assert_eq!(object.evict(0..2), 1);
    cpu.store_u8(at, 4).unwrap();
    assert_eq!(asked(), 5);
}

#[test]
fn running_out_of_frames_for_a_files_page_is_an_error_and_nothing_more() {
    let memory = Arc::new(MemFile::new(&[7; 4 * PAGE as usize]));
    let pool = FramePool::new(2);
    let object = FileObject::builder(FileKind::Regular, "f")
        .len(4 * PAGE)
        .frames(Arc::new(pool))
        .backend(memory)
        .build();
    let (space, at) = mapped(&object, 4);
    let mut cpu = space.accessor();
    let mut bytes = [0; 4 * PAGE as usize];
    let error = cpu.read(at, &mut bytes).unwrap_err();
    assert_eq!(error.fault, FaultError::OutOfMemory(at + 2 * PAGE));
    assert_eq!(
        object.read_at(3 * PAGE, &mut bytes),
        Err(FileIoError::OutOfMemory(3 * PAGE))
    );
    // Clean pages make room.
    assert_eq!(object.evict(0..4), 2);
    assert_eq!(cpu.load_u8(at + 3 * PAGE), Ok(7));
}

#[test]
fn many_threads_read_write_change_and_evict_one_file() {
    let pages = 8_u64;
    let (memory, file) = backed(pages);
    let object = file.object().clone();
    let space = space(&FramePool::default());
    let at = map_file(&space, &file, pages, MapFlags::SHARED);
    let start = Barrier::new(4);
    let rounds = 300;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            start.wait();
            let mut cpu = space.accessor();
            for round in 0..rounds * 8 {
                let _ = cpu.store_u64(at + round % pages * PAGE, round);
                let _ = cpu.load_u64(at + (round + 3) % pages * PAGE);
            }
        });
        scope.spawn(|| {
            start.wait();
            for round in 0..rounds {
                let offset = round * 1000 % (pages * PAGE);
                object.write_at(offset, &[5; 3000]).unwrap();
                let mut bytes = [0; 3000];
                object.read_at(offset, &mut bytes).unwrap();
            }
        });
        scope.spawn(|| {
            start.wait();
            for round in 0..rounds {
                object.set_len((round % pages) * PAGE + 77).unwrap();
                object
                    .punch_hole(round * 777 % (pages * PAGE), PAGE)
                    .unwrap();
                object.set_len(pages * PAGE).unwrap();
            }
        });
        scope.spawn(|| {
            start.wait();
            for _ in 0..rounds {
                object.sync().unwrap();
                object.evict(0..pages);
            }
        });
    });
    object.set_len(pages * PAGE).unwrap();
    object.sync().unwrap();
    let mut bytes = vec![0; (pages * PAGE) as usize];
    object.read_at(0, &mut bytes).unwrap();
    let mut there = memory.bytes();
    there.resize(bytes.len(), 0);
    assert!(there == bytes, "the backend has what the cache has");
    let mut cpu = space.accessor();
    let mut shown = vec![0; bytes.len()];
    cpu.read(at, &mut shown).unwrap();
    assert!(shown == bytes, "and so has the mapping");
    memory::check(&space);
}

#[test]
fn an_embedder_keeps_writable_shared_mappings_away() {
    let (_, file) = backed(2);
    let space = space(&FramePool::default());
    let map = |file: &Arc<OpenFile>, flags| {
        space.map(&MapRequest {
            flags,
            file: Some(file.clone()),
            ..MapRequest::anonymous(PAGE, vma_core::Prot::READ)
        })
    };
    let read_only = OpenFile::new(file.object().clone(), AccessMode::Read);
    let at = map(&file, MapFlags::SHARED).unwrap();
    let busy = file.object().deny_writable().unwrap_err();
    assert_eq!((busy, busy.errno()), (SealFileError::Busy(1), Errno::EBUSY));
    space.unmap(at, PAGE).unwrap();
    let denial = file.object().deny_writable().unwrap();
    let twice = file.object().deny_writable().unwrap();
    assert_eq!(file.object().writable_mappings(), -2);
    let denied = map(&file, MapFlags::SHARED).unwrap_err();
    assert_eq!(denied.errno(), Errno::EPERM);
    map(&file, MapFlags::PRIVATE).unwrap();
    map(&read_only, MapFlags::SHARED).unwrap();
    drop(denial);
    assert!(map(&file, MapFlags::SHARED).is_err());
    drop(twice);
    map(&file, MapFlags::SHARED).unwrap();
}

#[test]
fn a_file_with_pinned_pages_cannot_be_sealed_against_writing() {
    let object = FileObject::builder(FileKind::Shmem, "memfd:f")
        .len(2 * PAGE)
        .seals(Seals::empty())
        .build();
    let (space, at) = mapped(&object, 2);
    let pin = space.accessor().pin_page(at, Access::Write).unwrap();
    space.unmap(at, 2 * PAGE).unwrap();
    let error = open(&object).add_seals(Seals::WRITE).unwrap_err();
    assert_eq!(error, SealFileError::Pinned(1));
    assert_eq!(error.errno(), Errno::EBUSY);
    assert_eq!(object.writable_mappings(), 0);
    drop(pin);
    open(&object).add_seals(Seals::WRITE).unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn a_file_of_the_hosts_has_what_was_stored() {
    use std::os::unix::fs::FileExt as _;
    use vma_core::HostFile;

    let path = std::env::temp_dir().join(format!("vma-core-{}", std::process::id()));
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    std::fs::remove_file(&path).unwrap();
    file.write_all_at(&[7; 3 * PAGE as usize + 100], 0).unwrap();
    let host = HostFile::new(file.try_clone().unwrap());
    let len = host.len().unwrap();
    assert_eq!(len, 3 * PAGE + 100);
    assert!(!host.is_empty().unwrap());
    let object = backed_by(Arc::new(host), len);
    let (space, at) = mapped(&object, 5);
    let mut cpu = space.accessor();
    assert_eq!(cpu.load_u8(at + 3 * PAGE + 99), Ok(7));
    assert_eq!(cpu.load_u8(at + 3 * PAGE + 100), Ok(0));
    cpu.store_u8(at + 3 * PAGE + 100, 9).unwrap();
    cpu.store_u64(at + PAGE, 0x0102_0304_0506_0708).unwrap();
    space
        .msync(at, 4 * PAGE, vma_core::SyncFlags::SYNC)
        .unwrap();
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, PAGE).unwrap();
    assert_eq!(u64::from_ne_bytes(bytes), 0x0102_0304_0506_0708);
    assert_eq!(
        file.metadata().unwrap().len(),
        len,
        "nothing beyond the end"
    );
    object.write_at(4 * PAGE + 1, &[5]).unwrap();
    object.punch_hole(PAGE, PAGE).unwrap();
    object.sync().unwrap();
    assert_eq!(file.metadata().unwrap().len(), 4 * PAGE + 2);
    file.read_exact_at(&mut bytes, PAGE).unwrap();
    assert_eq!(bytes, [0; 8]);
    object.set_len(PAGE / 2).unwrap();
    assert_eq!(file.metadata().unwrap().len(), PAGE / 2);
    assert_eq!(
        cpu.load_u8(at + PAGE),
        Err(FaultError::BeyondEnd(at + PAGE))
    );
    // What it can't do is an error with the host's number.
    let read_only = HostFile::new(std::fs::File::open("/proc/self/exe").unwrap());
    let object = backed_by(Arc::new(read_only), PAGE);
    object.write_at(0, &[1; PAGE as usize]).unwrap();
    assert_eq!(object.sync().unwrap_err().errno(), Errno::EBADF);
}
