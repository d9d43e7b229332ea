//! The library's address space with what a replay keeps beside it.

mod apply;
mod files;
mod segments;
mod start;

use vma_core::{AddressSpace, MapsName, VmaRef};

pub use self::{files::OpenFiles, start::StartOf};
use super::{compare::Shown, history::EverWritable, maps::MapLine};

const RLIMIT_DATA: u64 = 2;
const RLIMIT_STACK: u64 = 3;
const RLIMIT_MEMLOCK: u64 = 8;
const RLIMIT_AS: u64 = 9;
const READ_IMPLIES_EXEC: u64 = 0x40_0000;

/// An address space of the library, the files that it maps, and the history of what may be written.
#[derive(Debug)]
pub struct Space {
    inner: AddressSpace,
    history: EverWritable,
    files: OpenFiles,
    /// Rings of `io_setup`: address and length in bytes.
    rings: Vec<(u64, u64)>,
}

/// What the library counts.
#[derive(Debug, Default, Clone, Copy)]
pub struct Counters {
    /// VMAs cut in two.
    pub splits: u64,
    /// Neighbours joined.
    pub merges: u64,
}

impl Space {
    /// An exact copy: what a call gives on it, it gives on this one.
    /// `None` without memory for it.
    #[must_use]
    pub fn copy(&self) -> Option<Self> {
        Some(Self {
            inner: self.inner.checkpoint().ok()?,
            history: self.history.clone(),
            files: self.files.clone(),
            rings: self.rings.clone(),
        })
    }

    /// What a forked child gets. `None` if the library refuses.
    #[must_use]
    pub fn fork(&self) -> Option<Self> {
        Some(Self {
            inner: self.inner.dup().ok()?,
            history: self.history.clone(),
            files: self.files.clone(),
            // Contexts of io_setup stay with the parent, although their mappings are copied.
            rings: Vec::new(),
        })
    }

    /// The layout as a map would show it; names, devices and inodes of files are the model's to add.
    pub fn shown(&self) -> Vec<Shown> {
        let layout = self.inner.read();
        layout
            .maps_entries()
            .map(|entry| Shown {
                line: MapLine {
                    start: entry.start,
                    end: entry.end,
                    perms: entry.flags.perms(),
                    offset: entry.offset,
                    dev: (0, 0),
                    inode: 0,
                    name: match entry.name {
                        MapsName::File(_) => String::new(),
                        other => other.to_string(),
                    },
                },
                file: entry.file.as_ref().and_then(|open| self.files.id_of(open)),
                flags: entry.flags.bits(),
            })
            .collect()
    }

    /// Lets the stack above `address` grow down to it, as a fault there would. Whether it did shows in [`pages`](Self::pages).
    pub fn grow_stack(&mut self, address: u64) {
        if self.inner.expand_stack(address).is_ok() {
            let top = self.inner.read().find(address).map(VmaRef::end);
            self.history.add(address, top.unwrap_or(address));
        }
    }

    /// Pages mapped.
    pub fn pages(&self) -> u64 {
        self.inner.totals().total
    }

    /// What may have been written.
    pub fn history(&self) -> &EverWritable {
        &self.history
    }

    /// What the library counted.
    pub fn counters(&self) -> Counters {
        let stats = self.inner.stats();
        Counters {
            splits: stats.splits,
            merges: stats.merges,
        }
    }

    /// Sets a soft limit, in bytes; resources that have nothing to do with memory are passed over.
    pub fn set_limit(&mut self, resource: u64, soft: u64) {
        // Limits have no impossible values.
        let _ = self.inner.configure(|config| match resource {
            RLIMIT_DATA => config.limits.data = soft,
            RLIMIT_STACK => config.limits.stack = soft,
            RLIMIT_MEMLOCK => config.limits.memlock = soft,
            RLIMIT_AS => config.limits.address_space = soft,
            _ => {}
        });
    }

    /// Sets the personality, as far as it changes what mappings get.
    pub fn set_personality(&mut self, persona: u64) {
        let _ = self
            .inner
            .configure(|config| config.read_implies_exec = persona & READ_IMPLIES_EXEC != 0);
    }
}
