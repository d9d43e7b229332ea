//! What readers get: a mapping and where it lies.

use std::sync::Arc;

use vma_rcu::tree::Entry;

use super::{ReadGuard, WriteGuard};
use crate::addr::VmRange;
use crate::anon::AnonId;
use crate::backend::Backend;
use crate::file::OpenFile;
use crate::flags::VmaFlags;
use crate::vma::Vma;

/// A mapping as a lookup found it.
#[derive(Clone, Copy, Debug)]
pub struct VmaRef<'g> {
    start: u64,
    end: u64,
    vma: &'g Vma,
}

impl<'g> VmaRef<'g> {
    pub(super) fn from_entry(entry: Entry<'g, Vma>) -> Self {
        VmaRef {
            start: entry.start,
            end: entry.end,
            vma: entry.value,
        }
    }

    pub(super) fn new(start: u64, end: u64, vma: &'g Vma) -> Self {
        VmaRef { start, end, vma }
    }

    /// First byte.
    pub fn start(self) -> u64 {
        self.start
    }

    /// First byte after it.
    pub fn end(self) -> u64 {
        self.end
    }

    /// Its range.
    pub fn range(self) -> VmRange {
        VmRange::new(self.start, self.end)
    }

    /// Its record.
    pub fn vma(self) -> &'g Vma {
        self.vma
    }

    /// Attributes.
    pub fn flags(self) -> VmaFlags {
        self.vma.flags()
    }

    /// Page offset as maps shows it: 0 without a file.
    pub fn shown_pgoff(self) -> u64 {
        if self.vma.file().is_some() {
            self.vma.pgoff()
        } else {
            0
        }
    }

    /// What it maps, if a file.
    pub fn file(self) -> Option<&'g Arc<OpenFile>> {
        self.vma.file()
    }

    /// Identity of its private pages.
    pub fn anon(self) -> AnonId {
        self.vma.anon()
    }
}

impl<B: Backend> ReadGuard<'_, B> {
    /// The mapping that holds `addr`.
    pub fn find(&self, addr: u64) -> Option<VmaRef<'_>> {
        self.space
            .core
            .tree
            .locked(&self.inner().writer)
            .find(addr)
            .map(VmaRef::from_entry)
    }

    /// The first mapping that ends above `addr`.
    pub fn find_next(&self, addr: u64) -> Option<VmaRef<'_>> {
        self.space
            .core
            .tree
            .locked(&self.inner().writer)
            .find_next(addr)
            .map(VmaRef::from_entry)
    }

    /// The mappings in order of address, from the first that ends above `from`.
    pub fn iter(&self, from: u64) -> impl Iterator<Item = VmaRef<'_>> {
        self.space
            .core
            .tree
            .locked(&self.inner().writer)
            .iter(from)
            .map(VmaRef::from_entry)
    }

    /// Start and present end of the heap, in bytes.
    pub fn heap(&self) -> (u64, u64) {
        (self.inner().start_brk, self.inner().brk)
    }
}

impl<B: Backend> WriteGuard<'_, B> {
    /// The mapping that holds `addr`.
    pub fn find(&self, addr: u64) -> Option<VmaRef<'_>> {
        self.space
            .core
            .tree
            .locked(&self.inner().writer)
            .find(addr)
            .map(VmaRef::from_entry)
    }

    /// The mappings in order of address, from the first that ends above `from`.
    pub fn iter(&self, from: u64) -> impl Iterator<Item = VmaRef<'_>> {
        self.space
            .core
            .tree
            .locked(&self.inner().writer)
            .iter(from)
            .map(VmaRef::from_entry)
    }
}
