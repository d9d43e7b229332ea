//! Probes that remember where they are, and where they should be.

#![allow(dead_code, reason = "each test uses a part")]

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use vma_core::{
    AccessMode, Backend, Errno, FileKind, FileObject, MapFlags, MapRequest, OpenFile, Probe,
    ProbeHandle, ProbeSite, Prot, SpaceConfig, SpaceHandle, SpaceId, System, VmaFlags, Wait,
};

pub(crate) const PAGE: u64 = 4096;
pub(crate) const RX: Prot = Prot::READ.union(Prot::EXEC);

pub(crate) type Places = BTreeSet<(SpaceId, u64)>;

/// Install and remove take turns, or a callback panics.
#[derive(Default)]
pub(crate) struct Log {
    places: Mutex<Places>,
    pub(crate) installs: AtomicUsize,
    pub(crate) removes: AtomicUsize,
    /// A callback is under way.
    busy: AtomicBool,
}

impl Log {
    pub(crate) fn new() -> Arc<Log> {
        Arc::default()
    }

    pub(crate) fn places(&self) -> Places {
        self.places.lock().unwrap().clone()
    }

    /// Installed and removed so far.
    pub(crate) fn calls(&self) -> (usize, usize) {
        (
            self.installs.load(Ordering::Relaxed),
            self.removes.load(Ordering::Relaxed),
        )
    }

    pub(crate) fn note<B>(&self, site: &ProbeSite<'_, B>, comes: bool) {
        assert!(!self.busy.swap(true, Ordering::Relaxed), "one at a time");
        let at = (site.space(), site.addr());
        let mut places = self.places.lock().unwrap();
        let changed = if comes {
            self.installs.fetch_add(1, Ordering::Relaxed);
            places.insert(at)
        } else {
            self.removes.fetch_add(1, Ordering::Relaxed);
            places.remove(&at)
        };
        drop(places);
        self.busy.store(false, Ordering::Relaxed);
        assert!(changed, "{at:x?} comes: {comes}");
    }
}

impl<B: Backend> Probe<B> for Log {
    fn install(&self, site: &ProbeSite<'_, B>) -> Result<(), Errno> {
        self.note(site, true);
        Ok(())
    }

    fn remove(&self, site: &ProbeSite<'_, B>) {
        self.note(site, false);
    }
}

/// A file that can be executed.
pub(crate) fn file(pages: u64) -> Arc<OpenFile> {
    let object = FileObject::builder(FileKind::Regular, "program")
        .len(pages * PAGE)
        .build();
    OpenFile::new(object, AccessMode::ReadWrite)
}

/// Pages `first..first + pages` of a file at an address.
pub(crate) fn text(file: &Arc<OpenFile>, first: u64, pages: u64, at: u64) -> MapRequest {
    let request = MapRequest::file(
        file.clone(),
        first * PAGE,
        pages * PAGE,
        RX,
        MapFlags::PRIVATE,
    );
    request.fixed(at)
}

pub(crate) fn register<B: Backend>(
    system: &System<B>,
    file: &Arc<OpenFile>,
    offset: u64,
    probe: &Arc<impl Probe<B>>,
) -> ProbeHandle<B> {
    let probe = probe.clone();
    system
        .register_probe(file.object(), offset, probe, Wait::forever())
        .unwrap()
}

/// Where a byte of a file is mapped so that probes concern it.
pub(crate) fn scan<'s, B: Backend>(
    spaces: impl IntoIterator<Item = &'s SpaceHandle<B>>,
    file: &FileObject,
    offset: u64,
) -> Places {
    let mut places = Places::new();
    for space in spaces {
        let size = space.config().page_size;
        for vma in space.read().iter(0) {
            let from = vma.vma().pgoff() * size;
            let end = from + vma.range().len();
            let kinds = VmaFlags::HUGETLB | VmaFlags::MAYEXEC | VmaFlags::MAYSHARE;
            let shown = vma.file().as_ref().is_some_and(|open| {
                let object: &FileObject = open.object();
                std::ptr::eq(object, file)
            });
            if shown && vma.flags() & kinds == VmaFlags::MAYEXEC && (from..end).contains(&offset) {
                places.insert((space.space().id(), vma.start() + (offset - from)));
            }
        }
    }
    places
}

/// A probe's own list, its callbacks' and a scan are the same.
#[track_caller]
pub(crate) fn assert_exact<'s, B: Backend>(
    spaces: impl IntoIterator<Item = &'s SpaceHandle<B>>,
    handle: &ProbeHandle<B>,
    log: &Log,
) {
    let wanted = scan(spaces, handle.file(), handle.offset());
    assert_eq!(log.places(), wanted);
    let own: Places = handle.sites().unwrap().into_iter().collect();
    assert_eq!(own, wanted);
}

pub(crate) const AT: u64 = 0x1000_0000;
/// In the third page.
pub(crate) const BYTE: u64 = 2 * PAGE + 0x123;

pub(crate) fn create(system: &System) -> SpaceHandle {
    system.create(SpaceConfig::default(), ()).unwrap()
}

pub(crate) fn id(space: &SpaceHandle) -> SpaceId {
    space.space().id()
}

/// A probe of closures.
pub(crate) struct With<C, I, R> {
    pub(crate) concerns: C,
    pub(crate) install: I,
    pub(crate) remove: R,
}

impl<C, I, R> Probe for With<C, I, R>
where
    C: Fn(&ProbeSite<'_>) -> bool + Send + Sync + 'static,
    I: Fn(&ProbeSite<'_>) -> Result<(), Errno> + Send + Sync + 'static,
    R: Fn(&ProbeSite<'_>) + Send + Sync + 'static,
{
    fn concerns(&self, site: &ProbeSite<'_>) -> bool {
        (self.concerns)(site)
    }

    fn install(&self, site: &ProbeSite<'_>) -> Result<(), Errno> {
        (self.install)(site)
    }

    fn remove(&self, site: &ProbeSite<'_>) {
        (self.remove)(site);
    }
}

/// Logs after asking `install`.
pub(crate) fn asking(
    log: &Arc<Log>,
    install: impl Fn(&ProbeSite<'_>) -> Result<(), Errno> + Send + Sync + 'static,
) -> Arc<impl Probe> {
    let (comes, goes) = (log.clone(), log.clone());
    Arc::new(With {
        concerns: |_: &ProbeSite<'_>| true,
        install: move |site: &ProbeSite<'_>| {
            install(site)?;
            comes.note(site, true);
            Ok(())
        },
        remove: move |site: &ProbeSite<'_>| goes.note(site, false),
    })
}

pub(crate) fn panics(f: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(f)).is_err()
}
