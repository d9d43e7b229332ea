//! `remap_file_pages(2)`.

use super::draft::Draft;
use super::map::MapError;
use super::{AddressSpace, WriteGuard, notify};
use crate::addr::VmRange;
use crate::backend::Backend;
use crate::error::Errno;
use crate::events::InvalidationReason;
use crate::flags::{MapFlags, Prot, VmaFlags};
use crate::limits::SpaceConfig;
use crate::vma::same_open_file;

/// Why file pages weren't rearranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RemapFileError {
    /// The protection has to be 0.
    #[error("protection {0:#x} isn't 0")]
    BadProtection(u64),
    /// Empty or wrapping, in memory or in the file.
    #[error("{len:#x} bytes at {addr:#x}, page {pgoff:#x}: empty, or wraps around")]
    BadRange {
        /// Start.
        addr: u64,
        /// Bytes.
        len: u64,
        /// Page of the file.
        pgoff: u64,
    },
    /// Not one shared mapping, or several alike without a hole.
    #[error("no shared mapping of one file covers {0}")]
    NotShared(VmRange),
    /// The new mapping was refused.
    #[error(transparent)]
    Map(#[from] MapError),
}

impl RemapFileError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            RemapFileError::Map(error) => error.errno(),
            _ => Errno::EINVAL,
        }
    }
}

fn parse(
    config: &SpaceConfig,
    addr: u64,
    len: u64,
    prot: Prot,
    pgoff: u64,
) -> Result<VmRange, RemapFileError> {
    if !prot.is_empty() {
        return Err(RemapFileError::BadProtection(prot.bits()));
    }
    let pages = config.pages();
    let bad = RemapFileError::BadRange { addr, len, pgoff };
    let start = pages.floor(addr);
    let end = start
        .checked_add(pages.floor(len))
        .filter(|end| *end > start)
        .ok_or(bad)?;
    pgoff.checked_add(pages.count(end - start)).ok_or(bad)?;
    Ok(VmRange::new(start, end))
}

/// One mapping, or several alike that touch, cover the range.
fn is_covered(draft: &Draft<'_>, range: VmRange) -> bool {
    let Some(first) = draft.find(range.start) else {
        return false;
    };
    let mut at = first.end;
    while at < range.end {
        let Some(next) = draft.find(at) else {
            return false;
        };
        if next.flags() != first.flags() || !same_open_file(next.file(), first.file()) {
            return false;
        }
        at = next.end;
    }
    true
}

impl<B: Backend> WriteGuard<'_, B> {
    /// As [`AddressSpace::remap_file_pages`].
    ///
    /// # Errors
    /// As there.
    pub fn remap_file_pages(
        &mut self,
        addr: u64,
        len: u64,
        prot: Prot,
        pgoff: u64,
        flags: MapFlags,
    ) -> Result<(), RemapFileError> {
        let config = self.config();
        let range = parse(config, addr, len, prot, pgoff)?;
        let mut changes = self.changes();
        let draft = self.draft(config, &mut changes);
        let refused = RemapFileError::NotShared(range);
        let vma = draft.find(range.start).ok_or(refused)?;
        let bits = vma.flags();
        let file = vma
            .file()
            .filter(|_| bits.contains(VmaFlags::SHARED) && !bits.contains(VmaFlags::HUGETLB))
            .ok_or(refused)?
            .clone();
        if !is_covered(&draft, range) {
            return Err(refused);
        }
        let prot = Prot::from_bits_retain((bits & VmaFlags::ACCESS).bits());
        let mut map_flags = flags & MapFlags::NONBLOCK;
        map_flags |= MapFlags::SHARED | MapFlags::FIXED | MapFlags::POPULATE;
        if bits.contains(VmaFlags::LOCKED) {
            map_flags |= MapFlags::LOCKED;
        }
        self.map_shared_at(range, &file, pgoff, prot, map_flags)?;
        Ok(())
    }
}

impl<B: Backend> AddressSpace<B> {
    /// Maps other pages of the file into part of a shared mapping (`remap_file_pages(2)`), as a new fixed mapping.
    ///
    /// `addr` and `len` are rounded down to pages.
    ///
    /// # Errors
    /// `EINVAL` protection not 0, empty or wrapping range, no shared mapping that covers it; what [`map`](Self::map) reports.
    ///
    /// Source: `remap_file_pages` in mm/mmap.c.
    pub fn remap_file_pages(
        &self,
        addr: u64,
        len: u64,
        prot: Prot,
        pgoff: u64,
        flags: MapFlags,
    ) -> Result<(), RemapFileError> {
        let ranges = || notify::named(self.core.pages.floor(addr), len, self.core.pages.size());
        self.write_to(ranges, InvalidationReason::Unmap)
            .remap_file_pages(addr, len, prot, pgoff, flags)
    }
}
