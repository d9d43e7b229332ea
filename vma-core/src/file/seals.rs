//! Seals of memory files (`F_ADD_SEALS`).

use bitflags::bitflags;

use super::OpenFile;
use crate::error::Errno;

bitflags! {
    /// `F_SEAL_*` of fcntl(2).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Seals: u32 {
        /// `F_SEAL_SEAL`: no more seals.
        const SEAL = 1;
        /// `F_SEAL_SHRINK`
        const SHRINK = 2;
        /// `F_SEAL_GROW`
        const GROW = 4;
        /// `F_SEAL_WRITE`
        const WRITE = 8;
        /// `F_SEAL_FUTURE_WRITE`
        const FUTURE_WRITE = 16;
        /// `F_SEAL_EXEC`
        const EXEC = 32;
        const _ = !0;
    }
}

impl Seals {
    /// All that the kernel knows.
    pub(super) const KNOWN: Seals = Seals::from_bits_retain(63);
}

/// Why a file couldn't be sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SealFileError {
    /// The descriptor isn't open for writing.
    #[error("the file isn't open for writing")]
    NotWritable,
    /// Unknown bits.
    #[error("unknown seals in {0:#x}")]
    Unknown(u32),
    /// The file can't be sealed.
    #[error("the file doesn't support seals")]
    Unsupported,
    /// `F_SEAL_SEAL` is set.
    #[error("the file's seals {0:?} are final")]
    Final(Seals),
    /// `F_SEAL_WRITE` while mappings may write.
    #[error("{0} mappings can write to the file")]
    Busy(i64),
    /// `F_SEAL_WRITE` while pages are pinned: who holds the pins may write.
    #[error("{0} pages of the file are pinned")]
    Pinned(usize),
}

impl SealFileError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            SealFileError::NotWritable | SealFileError::Final(_) => Errno::EPERM,
            SealFileError::Unknown(_) | SealFileError::Unsupported => Errno::EINVAL,
            SealFileError::Busy(_) | SealFileError::Pinned(_) => Errno::EBUSY,
        }
    }
}

impl OpenFile {
    /// Adds seals (`F_ADD_SEALS`).
    ///
    /// # Errors
    /// [`SealFileError`]: `EPERM` read-only descriptor or final seals, `EINVAL` unknown seals or a file without
    /// them, `EBUSY` for `F_SEAL_WRITE` while a mapping can write or be made to, or pages are pinned.
    ///
    /// Source: `memfd_add_seals()` in mm/memfd.c.
    pub fn add_seals(&self, seals: Seals) -> Result<(), SealFileError> {
        if !self.is_writable() {
            return Err(SealFileError::NotWritable);
        }
        if !Seals::KNOWN.contains(seals) {
            return Err(SealFileError::Unknown(seals.bits()));
        }
        self.object().seal(seals)
    }
}
