//! The same work on the running kernel: pages of this process.

#![expect(
    unsafe_code,
    reason = "mapping and unmapping memory of this process can't be had otherwise"
)]

use std::io;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

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
