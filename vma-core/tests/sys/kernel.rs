//! The calls on the running kernel, in a zone of this process that nothing else uses.

use std::ffi::c_long;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::fd::{AsRawFd as _, FromRawFd as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::Arc;

use vma_core::{AccessMode, Advice, FileKind, FileObject, OpenFile, Seals};

use super::facts::status;
use super::{call, last_errno};
use crate::call::{Call, mapped_len};
use crate::on_space::Outcome;

/// Pages of the file that changes its length, and of the sealed one.
const FILE_PAGES: u64 = 24;
const SEALED_PAGES: u64 = 8;
/// Bytes around the zone that have to be free.
const CLEARANCE: u64 = 64 << 20;

/// The zone and the files.
#[derive(Debug)]
pub(crate) struct Kernel {
    page: u64,
    base: u64,
    end: u64,
    /// As [`crate::on_space::World::files`].
    files: [File; 6],
    zero: File,
    scratch: File,
}

/// A memory file of a length in bytes.
fn memory_file(name: &std::ffi::CStr, len: u64) -> File {
    // SAFETY: the name is a live string that ends in 0.
    let fd =
        unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC) };
    assert!(fd >= 0, "memfd_create failed with errno {}", last_errno());
    // SAFETY: the descriptor is new and nobody else's.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len).unwrap();
    file
}

/// The descriptor as an argument.
fn number_of(file: &File) -> u64 {
    i64::from(file.as_raw_fd()).cast_unsigned()
}

/// Opens a file of this process once more: another description.
fn reopened(file: &File, options: &OpenOptions) -> File {
    options
        .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .unwrap()
}

impl Kernel {
    /// Takes `[base, end)`, bytes, as the zone.
    ///
    /// # Panics
    /// If this process has something mapped there or near.
    pub(crate) fn new(page: u64, (base, end): (u64, u64)) -> Self {
        for line in fs::read_to_string("/proc/self/maps").unwrap().lines() {
            let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
            let address = |text| u64::from_str_radix(text, 16).unwrap();
            let clear = address(to) <= base - CLEARANCE || address(from) >= end + CLEARANCE;
            assert!(clear, "the zone is taken by {line}");
        }
        let file = memory_file(c"calls", FILE_PAGES * page);
        let sealed = memory_file(c"sealed", SEALED_PAGES * page);
        // SAFETY: changes the file alone.
        let seal = unsafe {
            libc::fcntl(
                sealed.as_raw_fd(),
                libc::F_ADD_SEALS,
                libc::F_SEAL_FUTURE_WRITE,
            )
        };
        assert_eq!(seal, 0, "errno {}", last_errno());
        let (mut both, mut read, mut write) =
            (OpenOptions::new(), OpenOptions::new(), OpenOptions::new());
        both.read(true).write(true);
        read.read(true);
        write.write(true);
        let files = [
            file.try_clone().unwrap(),
            reopened(&file, &both),
            reopened(&file, &read),
            reopened(&file, &write),
        ];
        let [dup, other, read_only, write_only] = files;
        Kernel {
            page,
            base,
            end,
            files: [file, dup, other, read_only, write_only, sealed],
            zero: File::open("/dev/zero").unwrap(),
            scratch: memory_file(c"scratch", page),
        }
    }

    /// Bytes per page.
    pub(crate) fn page(&self) -> u64 {
        self.page
    }

    /// What stands for the two files on the other side.
    pub(crate) fn objects(&self) -> (Arc<FileObject>, Arc<FileObject>) {
        let object = |file: &File| {
            let metadata = file.metadata().unwrap();
            let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
            let (major, minor) = (libc::major(metadata.dev()), libc::minor(metadata.dev()));
            FileObject::builder(FileKind::Shmem, path.to_str().unwrap())
                .inode(major, minor, metadata.ino())
                .len(metadata.len())
                .seals(Seals::empty())
                .build()
        };
        let sealed = object(&self.files[5]);
        let for_sealing = OpenFile::new(sealed.clone(), AccessMode::ReadWrite);
        for_sealing.add_seals(Seals::FUTURE_WRITE).unwrap();
        (object(&self.files[0]), sealed)
    }

    /// Bytes locked by this process.
    pub(crate) fn locked() -> u64 {
        status("VmLck")
            .and_then(|kib| kib.parse::<u64>().ok())
            .unwrap()
            * 1024
    }

    /// Makes a system call on a part of the zone that begins `at` bytes into it.
    fn on_range(&self, number: c_long, at: u64, len: u64, rest: [u64; 4]) -> Result<u64, i32> {
        let start = self.base + at;
        let [c, d, e, f] = rest;
        assert!(
            start + len.next_multiple_of(self.page) <= self.end,
            "leaves the zone"
        );
        // SAFETY: all that the call may touch lies in the zone, in which nothing of Rust's is.
        unsafe { call(number, [start, len, c, d, e, f]) }
    }

    fn done(result: Result<u64, i32>) -> Outcome {
        match result {
            Ok(_) => Outcome::Done,
            Err(errno) => Outcome::Failed(errno),
        }
    }

    fn placed(&self, result: Result<u64, i32>, len: u64) -> Outcome {
        match result {
            Ok(addr) if (self.base..self.end).contains(&addr) => Outcome::At(addr - self.base),
            Ok(addr) => {
                // SAFETY: the kernel has just placed this mapping where nothing was.
                let gone = unsafe { call(libc::SYS_munmap, [addr, len, 0, 0, 0, 0]) };
                assert!(gone.is_ok());
                Outcome::Outside
            }
            Err(errno) => Outcome::Failed(errno),
        }
    }

    /// One access to each page of a range, made by the kernel for us, so that a signal becomes an error.
    fn touch(&self, at: u64, len: u64, write: bool) -> Outcome {
        let start = self.base + at;
        let end = start + len.max(1);
        assert!(end <= self.end);
        let mut addr = start;
        while addr < end {
            let (number, file) = if write {
                (libc::SYS_read, &self.zero)
            } else {
                (libc::SYS_pwrite64, &self.scratch)
            };
            let fd = number_of(file);
            // SAFETY: one byte of the zone is read or written.
            let result = unsafe { call(number, [fd, addr, 1, 0, 0, 0]) };
            match result {
                Ok(_) => {}
                Err(libc::EFAULT) => return Outcome::Signal,
                Err(errno) => return Outcome::Failed(errno),
            }
            addr = (addr / self.page + 1) * self.page;
        }
        Outcome::Done
    }

    /// Makes a call. Forks are the caller's affair.
    pub(crate) fn apply(&self, call_made: &Call) -> Outcome {
        match *call_made {
            Call::Map {
                at,
                len,
                prot,
                flags,
                file,
                offset,
            } => {
                let fd = file.map_or(u64::MAX, |file| number_of(&self.files[file]));
                let result = self.on_range(libc::SYS_mmap, at, len, [prot, flags, fd, offset]);
                self.placed(result, mapped_len(len, flags))
            }
            Call::Remap {
                at,
                old,
                new,
                flags,
                to,
            } => self.remap(at, (old, new), flags, to),
            Call::Unmap { at, len } => Self::done(self.on_range(libc::SYS_munmap, at, len, [0; 4])),
            Call::Protect { at, len, prot } => {
                Self::done(self.on_range(libc::SYS_mprotect, at, len, [prot, 0, 0, 0]))
            }
            Call::Advise { at, len, advice } => Self::done(self.advise(at, len, advice)),
            Call::Guard { at, len } => {
                let outcome = Self::done(self.advise(at, len, Advice::GUARD_INSTALL.0));
                let _ = self.advise(at, len, Advice::GUARD_REMOVE.0);
                outcome
            }
            Call::Lock { at, len, on_fault } => {
                Self::done(self.on_range(libc::SYS_mlock2, at, len, [u64::from(on_fault), 0, 0, 0]))
            }
            Call::Unlock { at, len } => {
                Self::done(self.on_range(libc::SYS_munlock, at, len, [0; 4]))
            }
            Call::Seal { at, len } => Self::done(self.on_range(libc::SYS_mseal, at, len, [0; 4])),
            Call::Sync { at, len, flags } => {
                Self::done(self.on_range(libc::SYS_msync, at, len, [flags, 0, 0, 0]))
            }
            Call::Core { at, len } => {
                let mut present = vec![0_u8; (len / self.page + 1) as usize];
                let vector = present.as_mut_ptr() as u64;
                Self::done(self.on_range(libc::SYS_mincore, at, len, [vector, 0, 0, 0]))
            }
            Call::RemapFile {
                at,
                len,
                prot,
                pgoff,
                flags,
            } => Self::done(self.on_range(
                libc::SYS_remap_file_pages,
                at,
                len,
                [prot, pgoff, flags, 0],
            )),
            Call::Touch { at, len, write } => self.touch(at, len, write),
            Call::LockAll { .. } | Call::UnlockAll | Call::Truncate { .. } | Call::Fork => {
                self.apply_to_all(call_made)
            }
        }
    }

    fn advise(&self, at: u64, len: u64, advice: i32) -> Result<u64, i32> {
        let harms_memory = matches!(advice, libc::MADV_HWPOISON | libc::MADV_SOFT_OFFLINE);
        assert!(!harms_memory, "that would take memory from the machine");
        let advice = advice as i64;
        self.on_range(
            libc::SYS_madvise,
            at,
            len,
            [advice.cast_unsigned(), 0, 0, 0],
        )
    }

    fn remap(&self, at: u64, (old, new): (u64, u64), flags: u64, to: u64) -> Outcome {
        let longest = old.max(new).next_multiple_of(self.page);
        assert!(
            self.base + at + longest <= self.end && self.base + to + longest <= self.end,
            "leaves the zone"
        );
        let args = [self.base + at, old, new, flags, self.base + to, 0];
        // SAFETY: source and destination lie in the zone, in which nothing of Rust's is; where the kernel chooses the
        // destination, nothing is there.
        let result = unsafe { call(libc::SYS_mremap, args) };
        self.placed(result, new)
    }

    fn apply_to_all(&self, call_made: &Call) -> Outcome {
        match *call_made {
            Call::LockAll { flags } => {
                // SAFETY: changes the contents of no memory.
                Self::done(unsafe { call(libc::SYS_mlockall, [flags, 0, 0, 0, 0, 0]) })
            }
            Call::UnlockAll => {
                // SAFETY: changes the contents of no memory.
                Self::done(unsafe { call(libc::SYS_munlockall, [0; 6]) })
            }
            Call::Truncate { len } => match self.files[0].set_len(len) {
                Ok(()) => Outcome::Done,
                Err(error) => Outcome::Failed(error.raw_os_error().unwrap_or(0)),
            },
            _ => Outcome::Done,
        }
    }

    /// The length that the file begins with.
    pub(crate) fn reset_files(&self) {
        self.files[0].set_len(FILE_PAGES * self.page).unwrap();
        // So that reads through it always find the byte that is overwritten.
        self.scratch.write_all_at(&[0], 0).unwrap();
        let _ = std::io::stdout().flush();
    }
}
