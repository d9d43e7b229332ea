//! The same work on the running kernel: pages of this process.

#![expect(
    unsafe_code,
    reason = "mapping and unmapping memory of this process can't be had otherwise"
)]

use std::io::{self, PipeWriter, pipe};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap,
};

const PAGE: usize = 4096;

/// Pages of anonymous memory, without huge ones.
#[derive(Debug)]
pub(crate) struct HostPages {
    start: NonNull<u8>,
    pages: usize,
}

impl HostPages {
    /// A new mapping; nothing is populated.
    ///
    /// # Errors
    /// What the kernel says.
    pub(crate) fn map(pages: usize) -> io::Result<Self> {
        let new = Self::plain(pages)?;
        let size = pages * PAGE;
        // SAFETY: the mapping just made. Kernels without huge pages refuse it, and need no telling.
        let _ = unsafe { madvise(new.start.as_ptr().cast(), size, Advice::LinuxNoHugepage) };
        Ok(new)
    }

    /// The same by one system call: the kernel's own choice of huge pages.
    ///
    /// # Errors
    /// What the kernel says.
    pub(crate) fn plain(pages: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let size = pages * PAGE;
        // SAFETY: a new mapping, where the kernel finds room.
        let start =
            unsafe { mmap_anonymous(std::ptr::null_mut(), size, access, MapFlags::PRIVATE) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(HostPages { start, pages })
    }

    /// Writes a byte to each page.
    pub(crate) fn touch(&self) {
        (0..self.pages).for_each(|page| self.touch_page(page));
    }

    /// Writes a byte to one page.
    ///
    /// # Panics
    /// If there is no such page.
    pub(crate) fn touch_page(&self, page: usize) {
        assert!(page < self.pages, "{page} of {} pages", self.pages);
        // SAFETY: within the mapping.
        let at = unsafe { self.start.add(page * PAGE) };
        // SAFETY: mapped to be written, and nobody else has it.
        unsafe { at.write_volatile(1) };
    }

    /// Has the kernel populate all pages at once.
    ///
    /// # Errors
    /// What the kernel says.
    pub(crate) fn populate(&self) -> io::Result<()> {
        let (start, size) = (self.start.as_ptr().cast(), self.pages * PAGE);
        // SAFETY: the whole mapping; its content doesn't change.
        unsafe { madvise(start, size, Advice::LinuxPopulateWrite) }?;
        Ok(())
    }

    /// Makes each page a mapping of its own: every other one can't be written.
    ///
    /// # Errors
    /// What the kernel says.
    pub(crate) fn split(&self) -> io::Result<()> {
        self.split_by(MprotectFlags::READ)
    }

    /// The same where none can: every other one can't be read either.
    ///
    /// # Errors
    /// What the kernel says.
    pub(crate) fn split_unreadable(&self) -> io::Result<()> {
        self.split_by(MprotectFlags::empty())
    }

    fn split_by(&self, access: MprotectFlags) -> io::Result<()> {
        for page in (1..self.pages).step_by(2) {
            // SAFETY: within the mapping.
            let at = unsafe { self.start.add(page * PAGE) };
            // SAFETY: nobody else has the page.
            unsafe { mprotect(at.as_ptr().cast(), PAGE, access) }?;
        }
        Ok(())
    }

    /// Drops the content of all pages.
    ///
    /// # Errors
    /// What the kernel says.
    pub(crate) fn discard(&self) -> io::Result<()> {
        let (start, size) = (self.start.as_ptr().cast(), self.pages * PAGE);
        // SAFETY: the whole mapping, of whose content nobody has a reference.
        unsafe { madvise(start, size, Advice::LinuxDontNeed) }?;
        Ok(())
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and nobody uses it any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.pages * PAGE) };
    }
}

/// A file in memory.
#[derive(Debug)]
pub(crate) struct HostFile(OwnedFd);

impl HostFile {
    /// A new file.
    ///
    /// # Errors
    /// What the kernel says.
    pub(crate) fn new(pages: usize) -> io::Result<Self> {
        let file = memfd_create("vma-bench", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, (pages * PAGE) as u64)?;
        Ok(HostFile(file))
    }

    /// Maps pages of it, to be read, where the kernel finds room.
    ///
    /// # Errors
    /// What the kernel says.
    pub(crate) fn map(&self, first: usize, pages: usize) -> io::Result<HostPages> {
        let (size, offset) = (pages * PAGE, (first * PAGE) as u64);
        let (access, flags) = (ProtFlags::READ, MapFlags::PRIVATE);
        // SAFETY: a new mapping, where the kernel finds room.
        let start = unsafe { mmap(std::ptr::null_mut(), size, access, flags, &self.0, offset) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(HostPages { start, pages })
    }
}

/// A copy of this process that does nothing.
#[derive(Debug)]
pub(crate) struct Copy {
    pid: libc::pid_t,
    /// The copy ends when it's closed.
    until: Option<PipeWriter>,
}

impl Copy {
    /// A copy that ends at once.
    ///
    /// # Errors
    /// What the kernel says.
    pub(crate) fn brief() -> io::Result<Self> {
        // SAFETY: the copy only ends, which is safe whatever other threads were doing.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            // SAFETY: ends the copy, without what an exit still has to do.
            0 => unsafe { libc::_exit(0) },
            pid => Ok(Copy { pid, until: None }),
        }
    }

    /// A copy that stays until this is dropped.
    ///
    /// # Errors
    /// What the kernel says.
    pub(crate) fn staying() -> io::Result<Self> {
        let (from_us, to_copy) = pipe()?;
        let (read, write) = (from_us.as_raw_fd(), to_copy.as_raw_fd());
        // SAFETY: the copy makes system calls only, which is safe whatever other threads were doing.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                let mut byte = 0_u8;
                // SAFETY: the copy's own descriptor, which it doesn't use otherwise.
                unsafe { libc::close(write) };
                // SAFETY: there is room for a byte. It ends when the other side is closed.
                unsafe { libc::read(read, (&raw mut byte).cast(), 1) };
                // SAFETY: as above.
                unsafe { libc::_exit(0) }
            }
            pid => Ok(Copy {
                pid,
                until: Some(to_copy),
            }),
        }
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        drop(self.until.take());
        let mut status = 0;
        // SAFETY: `status` is a live integer that is written; the copy is this one's, and waited for once.
        unsafe { libc::waitpid(self.pid, &raw mut status, 0) };
    }
}
