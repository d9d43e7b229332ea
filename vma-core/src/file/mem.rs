//! A backend in memory.

use std::collections::VecDeque;

use parking_lot::Mutex;

use super::FileBackend;
use crate::error::Errno;

/// A file in memory, which can be told to fail: for tests, and for what has no file of its own.
///
/// ```
/// use std::sync::Arc;
/// use vma_core::{FileKind, FileObject, MemFile};
///
/// let memory = Arc::new(MemFile::new(b"hello"));
/// let object = FileObject::builder(FileKind::Regular, "greeting")
///     .len(5)
///     .backend(memory.clone())
///     .build();
/// object.write_at(0, b"J")?;
/// assert_eq!(memory.bytes(), b"hello");
/// object.sync()?;
/// assert_eq!(memory.bytes(), b"Jello");
/// # Ok::<(), vma_core::FileIoError>(())
/// ```
#[derive(Debug, Default)]
pub struct MemFile {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    bytes: Vec<u8>,
    failures: VecDeque<(MemFileCall, Errno)>,
    calls: [u64; 5],
}

/// What a [`MemFile`] is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemFileCall {
    /// [`FileBackend::read`]
    Read,
    /// [`FileBackend::write`]
    Write,
    /// [`FileBackend::set_len`]
    SetLen,
    /// [`FileBackend::punch_hole`]
    PunchHole,
    /// [`FileBackend::sync`]
    Sync,
}

impl MemFile {
    /// One with these bytes.
    pub fn new(bytes: &[u8]) -> Self {
        let file = MemFile::default();
        file.state.lock().bytes = bytes.to_vec();
        file
    }

    /// What it has.
    pub fn bytes(&self) -> Vec<u8> {
        self.state.lock().bytes.clone()
    }

    /// The next call of a kind, of those that no failure is planned for yet, fails.
    pub fn fail_next(&self, call: MemFileCall, errno: Errno) {
        self.state.lock().failures.push_back((call, errno));
    }

    /// How often it was called.
    pub fn calls(&self, call: MemFileCall) -> u64 {
        self.state.lock().calls[call as usize]
    }

    fn call<R>(
        &self,
        call: MemFileCall,
        f: impl FnOnce(&mut Vec<u8>) -> Result<R, Errno>,
    ) -> Result<R, Errno> {
        let mut state = self.state.lock();
        state.calls[call as usize] += 1;
        let planned = state.failures.iter().position(|(of, _)| *of == call);
        if let Some((_, errno)) = planned.and_then(|at| state.failures.remove(at)) {
            return Err(errno);
        }
        f(&mut state.bytes)
    }
}

/// As an index of memory.
fn index(offset: u64) -> Result<usize, Errno> {
    usize::try_from(offset).map_err(|_| Errno::EFBIG)
}

fn resize(bytes: &mut Vec<u8>, len: usize) -> Result<(), Errno> {
    let more = len.saturating_sub(bytes.len());
    bytes.try_reserve(more).map_err(|_| Errno::ENOSPC)?;
    bytes.resize(len, 0);
    Ok(())
}

impl FileBackend for MemFile {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<usize, Errno> {
        self.call(MemFileCall::Read, |bytes| {
            let start = index(offset)?.min(bytes.len());
            let count = into.len().min(bytes.len() - start);
            into[..count].copy_from_slice(&bytes[start..start + count]);
            Ok(count)
        })
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), Errno> {
        self.call(MemFileCall::Write, |bytes| {
            let start = index(offset)?;
            let end = start.checked_add(from.len()).ok_or(Errno::EFBIG)?;
            if end > bytes.len() {
                resize(bytes, end)?;
            }
            bytes[start..end].copy_from_slice(from);
            Ok(())
        })
    }

    fn set_len(&self, len: u64) -> Result<(), Errno> {
        self.call(MemFileCall::SetLen, |bytes| resize(bytes, index(len)?))
    }

    fn punch_hole(&self, offset: u64, len: u64) -> Result<(), Errno> {
        self.call(MemFileCall::PunchHole, |bytes| {
            let start = index(offset)?.min(bytes.len());
            let end = index(offset.saturating_add(len))?.min(bytes.len());
            bytes[start..end].fill(0);
            Ok(())
        })
    }

    fn sync(&self) -> Result<(), Errno> {
        self.call(MemFileCall::Sync, |_| Ok(()))
    }
}
