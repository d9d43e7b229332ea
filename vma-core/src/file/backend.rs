//! What is behind a file of the embedder's.

use std::fmt;

use crate::error::Errno;

/// Where the bytes of a [`FileObject`](crate::FileObject) come from and go to: a file of the host's, an archive, a network.
///
/// # Concurrency
///
/// Any thread may call any of them, several at once. For one page there is one call at a time that reads or writes it, and none
/// while [`set_len`](Self::set_len) or [`punch_hole`](Self::punch_hole) change that part of the file.
///
/// They may block: no lock of a space's is held, nor a guard, nor one of the page cache's. Who holds a
/// [`WriteGuard`](crate::WriteGuard) or a [`ReadGuard`](crate::ReadGuard) and makes pages present or syncs by it, has them called
/// meanwhile. Calls that change the length or the holes of one file come one after the other, also while the backend is at it: so
/// [`set_len`](Self::set_len) and [`punch_hole`](Self::punch_hole) mustn't make such calls on the same file, and none of these
/// may access what maps the pages that it's called for.
///
/// A panic in one of them counts as a failure that left everything as it was.
pub trait FileBackend: Send + Sync + fmt::Debug + 'static {
    /// Reads bytes from `offset` on; how many there were before the backend's end. The rest is taken as zeros.
    ///
    /// # Errors
    /// A fault gets `SIGBUS`, read(2) this number.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<usize, Errno>;

    /// Writes all of these bytes; the backend's file grows if it has to. They end at or before the file's end.
    ///
    /// # Errors
    /// The pages stay dirty, and the next sync of each descriptor reports it.
    fn write(&self, offset: u64, from: &[u8]) -> Result<(), Errno>;

    /// Changes the length. What lies beyond an earlier, shorter length reads as zeros afterwards.
    ///
    /// # Errors
    /// The length stays what it was.
    fn set_len(&self, len: u64) -> Result<(), Errno>;

    /// Makes a range read as zeros; the length stays.
    ///
    /// # Errors
    /// Nothing has changed. `EOPNOTSUPP`: it can't.
    fn punch_hole(&self, offset: u64, len: u64) -> Result<(), Errno>;

    /// Makes what was written so far permanent (fdatasync(2)).
    ///
    /// # Errors
    /// The sync that asked for it fails.
    fn sync(&self) -> Result<(), Errno>;

    /// Whether [`before_store`](Self::before_store) is to be called.
    fn asks_before_store(&self) -> bool {
        false
    }

    /// Called before a page is stored to through a mapping for the first time since it was read or written back (Linux
    /// `page_mkwrite`), with its offset in bytes: to reserve what writing it back will need, for instance.
    ///
    /// # Errors
    /// The store gets `SIGBUS`.
    fn before_store(&self, offset: u64) -> Result<(), Errno> {
        let _ = offset;
        Ok(())
    }
}
