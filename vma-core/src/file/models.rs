//! Models of calls and walks that meet in a file's reverse index.
//!
//! Index, locks and the shootdown are the real ones. A space has one page: an entry behind a lock, which stands for a leaf of its
//! tables. `.ci/loom` runs them as they are, and then once per planted fault, which they must find.

use std::ops::Range;
use std::sync::{Arc, Weak};

use loom::sync::Mutex;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use loom::thread;
use vma_rcu::shootdown::Shootdown;
use vma_rcu::sync::planted;

use super::{FileKind, FileObject, Index, Mapper, Part, Tenancies};
use crate::addr::Pages;
use crate::backend::paged::Frame;

const PART: Part = Part {
    first: 0,
    end: 1,
    addr: 0x1000,
};

/// A space that maps the first page of a file, or doesn't.
struct Space {
    tenancies: Tenancies,
    /// As the root of the tree: store-release, load-acquire.
    mapped: AtomicBool,
    /// Whether the page is in the table.
    entry: Mutex<bool>,
    shootdown: Shootdown,
    /// The page's content: 0 while it is the file's.
    page: AtomicU64,
}

impl Space {
    fn new() -> Arc<Self> {
        Arc::new(Space {
            tenancies: Tenancies::default(),
            mapped: AtomicBool::new(false),
            entry: Mutex::new(false),
            shootdown: Shootdown::default(),
            page: AtomicU64::new(0),
        })
    }

    fn weak(self: &Arc<Self>) -> Weak<dyn Mapper> {
        Arc::downgrade(self) as _
    }

    fn link<'f>(self: &Arc<Self>, file: &'f FileObject, part: Part) -> Option<Index<'f>> {
        let parts = std::iter::once(part);
        file.link(&self.tenancies, &|| self.weak(), parts, false)
            .unwrap()
    }

    fn map(self: &Arc<Self>, file: &FileObject) {
        let link = || drop(self.link(file, PART));
        if planted("late_link") {
            self.mapped.store(true, Ordering::Release);
            link();
        } else {
            link();
            self.mapped.store(true, Ordering::Release);
        }
    }

    /// Puts the page in unless its file has let go of it.
    fn fault(&self, gone: &AtomicBool) {
        let mut entry = self.entry.lock().unwrap();
        fence(Ordering::SeqCst);
        if self.mapped.load(Ordering::Acquire) && !gone.load(Ordering::Relaxed) {
            *entry = true;
        }
    }

    fn unmap(self: &Arc<Self>, file: &FileObject) {
        self.mapped.store(false, Ordering::Release);
        fence(Ordering::SeqCst);
        *self.entry.lock().unwrap() = false;
        if !planted("early_unlink") {
            self.shootdown.invalidate();
        }
        file.unlink(&self.tenancies, std::iter::once(PART));
        if planted("early_unlink") {
            self.shootdown.invalidate();
        }
    }
}

impl Mapper for Space {
    fn unmap_pages(&self, _: &FileObject, part: Part, _: bool) {
        if part.addr != PART.addr {
            return;
        }
        fence(Ordering::SeqCst);
        *self.entry.lock().unwrap() = false;
    }

    fn protect_pages(&self, _: &FileObject, _: Part) -> usize {
        0
    }

    fn rob_heirs(&self, _: &FileObject, _: Part, _: &Frame) {}

    fn settle(&self, _: usize) {
        self.shootdown.invalidate();
    }

    fn pages(&self) -> Pages {
        Pages::new(4096)
    }
}

fn file() -> Arc<FileObject> {
    FileObject::builder(FileKind::Shmem, "f").len(4096).build()
}

/// The file lets go of its page.
fn truncate(file: &FileObject, gone: &AtomicBool) {
    gone.store(true, Ordering::Relaxed);
    file.for_each_mapping(&(0..u64::MAX), |space, part| {
        space.unmap_pages(file, part, true);
        0
    });
}

fn model(preemptions: Option<usize>, f: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = 100_000;
    builder.check(f);
}

/// I1: either the walk finds the mapping, or who faults there sees that the file has let go of the page. Where the space maps
/// nothing of the file yet, where it's found for these pages already, and where it is for others.
#[test]
fn what_can_be_faulted_is_found_by_a_walk() {
    for known in [None, Some(0..8), Some(5..6)] {
        found_by_a_walk(known);
    }
}

fn found_by_a_walk(known: Option<Range<u64>>) {
    model(Some(2), move || {
        let (space, file) = (Space::new(), file());
        let known = known.clone().map(|pages| Part {
            first: pages.start,
            end: pages.end,
            addr: 0x10_0000,
        });
        if let Some(part) = known {
            space.link(&file, part);
        }
        let gone = Arc::new(AtomicBool::new(false));
        let mapper = {
            let (space, file) = (space.clone(), file.clone());
            thread::spawn(move || space.map(&file))
        };
        let faulter = {
            let (space, gone) = (space.clone(), gone.clone());
            thread::spawn(move || space.fault(&gone))
        };
        truncate(&file, &gone);
        faulter.join().unwrap();
        mapper.join().unwrap();
        let is_there = *space.entry.lock().unwrap();
        assert!(!is_there, "a page past the end is mapped");
        space.unmap(&file);
        if let Some(part) = known {
            file.unlink(&space.tenancies, std::iter::once(part));
        }
        assert_eq!(file.mapping_count(), 0);
    });
}

/// I1: a space that has unmapped the page, and may still use it, is found and waited for.
#[test]
fn a_walk_waits_for_a_space_that_is_letting_go() {
    model(Some(2), || {
        let (space, file) = (Space::new(), file());
        let gone = Arc::new(AtomicBool::new(false));
        space.map(&file);
        space.fault(&gone);
        let accessor = {
            let space = space.clone();
            thread::spawn(move || {
                let mut accessing = space.shootdown.register();
                let access = accessing.enter();
                let is_there = || space.mapped.load(Ordering::Acquire);
                let has_page = is_there() && *space.entry.lock().unwrap() && is_there();
                let seen = has_page.then(|| space.page.load(Ordering::Relaxed));
                drop(access);
                seen
            })
        };
        let unmapper = {
            let (space, file) = (space.clone(), file.clone());
            thread::spawn(move || space.unmap(&file))
        };
        truncate(&file, &gone);
        // The frame is somebody else's now.
        space.page.store(1, Ordering::Relaxed);
        let seen = accessor.join().unwrap();
        unmapper.join().unwrap();
        assert_ne!(seen, Some(1), "somebody else's bytes");
        assert_eq!(file.mapping_count(), 0);
    });
}

/// I2: calls of two spaces on one file leave what is mapped.
#[test]
fn two_spaces_enter_and_leave() {
    model(Some(3), || {
        let (one, two, file) = (Space::new(), Space::new(), file());
        let other = {
            let (two, file) = (two.clone(), file.clone());
            thread::spawn(move || {
                two.map(&file);
                two.unmap(&file);
            })
        };
        one.map(&file);
        other.join().unwrap();
        assert_eq!(file.mapping_count(), 1);
        one.unmap(&file);
        assert_eq!(file.mapping_count(), 0);
    });
}

/// I2: a call that takes a space's last part away beside one of the same space that brings another.
#[test]
fn a_space_leaves_and_comes_back() {
    model(Some(3), || {
        let (space, file) = (Space::new(), file());
        let later = Part {
            first: 7,
            end: 8,
            addr: 0x9000,
        };
        space.link(&file, PART);
        let leaving = {
            let (space, file) = (space.clone(), file.clone());
            thread::spawn(move || file.unlink(&space.tenancies, std::iter::once(PART)))
        };
        space.link(&file, later);
        let found = file.mappings(7..8);
        assert_eq!(found.len(), 1, "what has come is found");
        leaving.join().unwrap();
        assert_eq!(file.mappings(0..8), found);
        file.unlink(&space.tenancies, std::iter::once(later));
        assert_eq!(file.mapping_count(), 0);
        assert!(file.mappings_index().is_vacant());
    });
}
