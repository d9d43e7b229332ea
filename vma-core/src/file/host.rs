//! A backend that is a file of the host's.

use std::fs::File;

use rustix::fs::{FallocateFlags, fallocate, fdatasync, fstat, ftruncate};
use rustix::io::{pread, pwrite, retry_on_intr};

use super::FileBackend;
use crate::error::Errno;

/// A regular file of the host's. Nobody else should change it meanwhile: what is in the page cache isn't looked at again.
///
/// ```no_run
/// use std::sync::Arc;
/// use vma_core::{FileKind, FileObject, HostFile};
///
/// let file = std::fs::File::options().read(true).write(true).open("data")?;
/// let host = HostFile::new(file);
/// let object = FileObject::builder(FileKind::Regular, "/data")
///     .len(host.len().map_err(|errno| std::io::Error::from_raw_os_error(errno.raw()))?)
///     .backend(Arc::new(host))
///     .build();
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct HostFile {
    file: File,
}

impl HostFile {
    /// Opened for what will be done with it.
    pub fn new(file: File) -> Self {
        HostFile { file }
    }

    /// Its length in bytes now.
    ///
    /// # Errors
    /// What fstat(2) fails with.
    pub fn len(&self) -> Result<u64, Errno> {
        let stat = fstat(&self.file).map_err(errno)?;
        Ok(u64::try_from(stat.st_size).unwrap_or(0))
    }

    /// Whether its length is 0.
    ///
    /// # Errors
    /// As [`len`](Self::len).
    pub fn is_empty(&self) -> Result<bool, Errno> {
        Ok(self.len()? == 0)
    }
}

fn errno(error: rustix::io::Errno) -> Errno {
    let raw = u16::try_from(error.raw_os_error());
    raw.map_or(Errno::EIO, Errno::from_raw)
}

impl FileBackend for HostFile {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<usize, Errno> {
        let mut done = 0;
        while done < into.len() {
            let rest = &mut into[done..];
            let count = retry_on_intr(|| pread(&self.file, &mut *rest, offset + done as u64));
            match count.map_err(errno)? {
                0 => break,
                count => done += count,
            }
        }
        Ok(done)
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), Errno> {
        let mut done = 0;
        while done < from.len() {
            let rest = &from[done..];
            let count = retry_on_intr(|| pwrite(&self.file, rest, offset + done as u64));
            match count.map_err(errno)? {
                // It can't be written, and doesn't say why.
                0 => return Err(Errno::EIO),
                count => done += count,
            }
        }
        Ok(())
    }

    fn set_len(&self, len: u64) -> Result<(), Errno> {
        retry_on_intr(|| ftruncate(&self.file, len)).map_err(errno)
    }

    fn punch_hole(&self, offset: u64, len: u64) -> Result<(), Errno> {
        if len == 0 {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        retry_on_intr(|| fallocate(&self.file, flags, offset, len)).map_err(errno)
    }

    fn sync(&self) -> Result<(), Errno> {
        retry_on_intr(|| fdatasync(&self.file)).map_err(errno)
    }
}
