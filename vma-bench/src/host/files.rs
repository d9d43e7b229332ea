//! A page of a file mapped and unmapped, on its own and among many other mappings of the same file.
//!
//! The others are neighbouring pages that can and can't be read in turn, so that no two are one mapping; the page that comes and goes is
//! another one of the file each time. Nothing is populated.

use std::cell::Cell;
use std::sync::Arc;

use vma_core::paged::{FramePool, Paged};
use vma_core::{
    AccessMode, AddressSpace, FileKind, FileObject, MapFlags, MapRequest, OpenFile, Prot,
};

use super::sys::{HostFile, HostPages};
use super::{PAGE, per_page, space};
use crate::peers::harness::{Effort, Sample, rounds};
use crate::peers::paired::Pairs;
use crate::peers::report::Report;
use crate::peers::row::{Row, Target};
use crate::peers::stats::Summary;

/// Mappings of a file besides.
const OTHERS: usize = 10_000;
/// Pages mapped and unmapped behind a sample.
const COUNT: usize = 256;
/// Between two that follow each other, in pages: neither divides the other.
const STRIDE: usize = 4_241;

/// All of it.
pub(super) fn measure(effort: Effort, report: &mut Report) {
    for (others, column, target) in [
        (0, "no others", None),
        (OTHERS, "10,000 others", Some(Target::ratio_at_most(0.3))),
    ] {
        let (host, ours) = (Host::new(others), Ours::new(others));
        let mut contenders: Vec<Sample<'_>> =
            vec![Box::new(|| host.sample()), Box::new(|| ours.sample())];
        let series = rounds(&mut contenders, effort);
        let section = "host/mmap and munmap of a file page";
        report.add(section, column, "kernel", |row| {
            Row::new(row, "ns", Summary::of(&series[0]))
        });
        report.add(section, column, "paged", |row| {
            Pairs::of(&series[0], &series[1]).row(row, "ns", "kernel", target)
        });
    }
}

/// The page that comes next.
fn step(next: &Cell<usize>) -> usize {
    let page = next.get();
    next.set((page + STRIDE) % OTHERS);
    page
}

struct Host {
    file: HostFile,
    _others: Option<HostPages>,
    next: Cell<usize>,
}

impl Host {
    fn new(others: usize) -> Self {
        let file = HostFile::new(OTHERS).expect("the kernel has memory");
        let others = (others > 0).then(|| {
            let pages = file.map(0, others).expect("the kernel has room");
            let split = pages.split_unreadable();
            split.expect("the kernel allows this many mappings");
            pages
        });
        Host {
            file,
            _others: others,
            next: Cell::new(0),
        }
    }

    fn sample(&self) -> f64 {
        per_page(COUNT as u64, || {
            for _ in 0..COUNT {
                let page = self.file.map(step(&self.next), 1);
                drop(page.expect("the kernel allows one more mapping"));
            }
        })
    }
}

struct Ours {
    file: Arc<OpenFile>,
    space: AddressSpace<Paged>,
    next: Cell<usize>,
}

impl Ours {
    fn new(others: usize) -> Self {
        let file = FileObject::builder(FileKind::Shmem, "/memfd:vma-bench (deleted)")
            .len(OTHERS as u64 * PAGE)
            .build();
        let ours = Ours {
            file: OpenFile::new(file, AccessMode::ReadWrite),
            space: space(&FramePool::default()),
            next: Cell::new(0),
        };
        if others > 0 {
            let at = ours.map(0, others);
            for page in (1..others as u64).step_by(2) {
                let split = ours.space.protect(at + page * PAGE, PAGE, Prot::empty());
                split.expect("as many mappings as on the kernel");
            }
        }
        ours
    }

    fn map(&self, first: usize, pages: usize) -> u64 {
        let (offset, len) = (first as u64 * PAGE, pages as u64 * PAGE);
        let request = MapRequest::file(
            self.file.clone(),
            offset,
            len,
            Prot::READ,
            MapFlags::PRIVATE,
        );
        self.space.map(&request).expect("there is room")
    }

    fn sample(&self) -> f64 {
        per_page(COUNT as u64, || {
            for _ in 0..COUNT {
                let at = self.map(step(&self.next), 1);
                self.space.unmap(at, PAGE).expect("mapped");
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_have_the_others_and_one_that_comes_and_goes() {
        let (host, ours) = (Host::new(100), Ours::new(100));
        assert!(host.sample() > 0.0 && ours.sample() > 0.0);
        let count = || ours.file.object().mapping_count();
        assert_eq!(count(), 100);
        let at = ours.map(7, 1);
        assert_eq!(count(), 101, "it merges with none");
        ours.space.unmap(at, PAGE).unwrap();
        assert_eq!(ours.space.totals().map_count, 100);
    }

    #[test]
    fn every_page_has_its_turn() {
        let next = Cell::new(0);
        let mut pages: Vec<usize> = (0..OTHERS).map(|_| step(&next)).collect();
        pages.sort_unstable();
        assert!(pages.iter().copied().eq(0..OTHERS));
    }
}
