//! `AddressSpace<()>` filled with the layout of a workload: lock, merging and accounting included.

use vma_core::{AddressSpace, MapFlags, MapRequest, Overcommit, Prot, SpaceConfig};

use crate::peers::workload::{PAGE, Workload};

/// Bytes of a mapping that the space places itself.
const PLACED: u64 = 4 * PAGE;

/// A space in which every entry of the workload is a mapping of its own.
#[derive(Debug)]
pub struct Space(AddressSpace);

impl Space {
    /// Maps every entry, in random order.
    pub fn new(workload: &Workload) -> Self {
        let config = SpaceConfig {
            max_map_count: u64::MAX,
            overcommit: Overcommit::Always,
            mmap_base: Some(workload.end()),
            ..SpaceConfig::default()
        };
        let space = Self(AddressSpace::new(config).expect("the configuration is a kernel's"));
        for (id, _) in workload.in_random_order() {
            space.map(workload, id as u32);
        }
        space
    }

    /// Number of mappings.
    pub fn len(&self) -> usize {
        let reader = self.0.register();
        let guard = reader.pin();
        self.0.iter(0, &guard).count()
    }

    /// Whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Maps entry `pick` at its place. Neighbours differ in protection, so that none merge.
    pub fn map(&self, workload: &Workload, pick: u32) {
        let range = &workload.entries[pick as usize];
        let prot = if pick.is_multiple_of(2) {
            Prot::READ
        } else {
            Prot::READ | Prot::WRITE
        };
        let mut request = MapRequest::anonymous(range.end - range.start, prot);
        request.addr = range.start;
        request.flags |= MapFlags::FIXED;
        self.0
            .map(&request)
            .expect("the layout is the user's and within the limits");
    }

    /// Unmaps entry `pick`.
    pub fn unmap(&self, workload: &Workload, pick: u32) {
        let range = &workload.entries[pick as usize];
        self.0
            .unmap(range.start, range.end - range.start)
            .expect("the range is valid");
    }

    /// Unmaps entry `pick` and maps it again.
    #[inline]
    pub fn remap(&self, workload: &Workload, pick: u32) {
        self.unmap(workload, pick);
        self.map(workload, pick);
    }

    /// Maps a few pages wherever the space puts them, and unmaps them.
    #[inline]
    pub fn place(&self) {
        let request = MapRequest::anonymous(PLACED, Prot::READ | Prot::EXEC);
        let addr = self.0.map(&request).expect("there is room");
        self.0.unmap(addr, PLACED).expect("the range is valid");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_is_a_mapping_of_its_own_before_and_after() {
        let w = Workload::new(500);
        let space = Space::new(&w);
        assert_eq!(space.len(), 500);
        for &pick in &w.picks[..100] {
            space.remap(&w, pick);
            space.place();
        }
        assert_eq!(space.len(), 500);
    }
}
