//! Doors for this project's own benchmarks: no API, and no promise that any of it is there in the next version.

use std::fmt;
use std::iter;
use std::ops::Range;
use std::sync::{Arc, Weak};

use crate::addr::Pages;
use crate::backend::paged::{Frame, PAGE};
use crate::error::PublishError;
use crate::file::{FileKind, FileObject, Mapper, Part, Tenancies};

/// A space as far as an index knows one: nothing is behind it.
struct Nobody;

impl Mapper for Nobody {
    fn unmap_pages(&self, _: &FileObject, _: Part, _: bool) {}

    fn protect_pages(&self, _: &FileObject, _: Part) -> usize {
        0
    }

    fn rob_heirs(&self, _: &FileObject, _: Part, _: &Frame) {}

    fn settle(&self, _: usize) {}

    fn pages(&self) -> Pages {
        Pages::new(PAGE as u64)
    }
}

/// The reverse index of a file alone: what map and unmap do to it, its lock included, by the same functions.
pub struct IndexBench {
    file: Arc<FileObject>,
    /// With what each knows of the files that it maps.
    spaces: Vec<(Arc<Nobody>, Tenancies)>,
}

impl fmt::Debug for IndexBench {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IndexBench")
            .field("count", &self.count())
            .finish_non_exhaustive()
    }
}

impl IndexBench {
    /// A file that nobody maps, and `spaces` that could.
    pub fn new(spaces: usize) -> Self {
        let space = || {
            let space = Arc::new(Nobody);
            (space, Tenancies::default())
        };
        IndexBench {
            file: FileObject::builder(FileKind::Regular, "bench").build(),
            spaces: iter::repeat_with(space).take(spaces).collect(),
        }
    }

    /// `space` shows these pages of the file from `addr` on.
    ///
    /// # Errors
    /// No memory for the entry.
    ///
    /// # Panics
    /// If there is no such space.
    pub fn link(&self, space: usize, pages: Range<u64>, addr: u64) -> Result<(), PublishError> {
        let parts = iter::once(part(pages, addr));
        let (space, tenancies) = &self.spaces[space];
        let weak = || Arc::downgrade(space) as Weak<dyn Mapper>;
        self.file.link(tenancies, &weak, parts, false).map(drop)
    }

    /// It no longer does; not to be asked for what isn't there.
    ///
    /// # Panics
    /// If there is no such space.
    pub fn unlink(&self, space: usize, pages: Range<u64>, addr: u64) {
        let parts = iter::once(part(pages, addr));
        self.file.unlink(&self.spaces[space].1, parts);
    }

    /// Entries.
    pub fn count(&self) -> usize {
        self.file.mapping_count()
    }
}

fn part(pages: Range<u64>, addr: u64) -> Part {
    Part {
        first: pages.start,
        end: pages.end,
        addr,
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod tests {
    use super::*;
    use crate::file::SpaceId;

    #[test]
    fn spaces_that_show_the_same_are_told_apart() {
        let bench = IndexBench::new(2);
        for space in [0, 1] {
            bench.link(space, 3..5, 0x1000).unwrap();
        }
        let ids = |bench: &IndexBench| {
            let shown = bench.file.mappings(4..5);
            shown.iter().map(|mapping| mapping.space).collect()
        };
        let both: Vec<SpaceId> = ids(&bench);
        assert_eq!((bench.count(), both.len()), (2, 2));
        assert_ne!(both[0], both[1]);
        bench.unlink(0, 3..5, 0x1000);
        assert_eq!(ids(&bench), [SpaceId::of(&bench.spaces[1].0)]);
        bench.unlink(1, 3..5, 0x1000);
        assert_eq!(bench.count(), 0);
    }
}
