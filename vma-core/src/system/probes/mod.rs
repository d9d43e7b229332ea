//! Probes: a byte of a file watched in all spaces of a system that map it. Linux's uprobes; an emulator's breakpoints and hooks in its
//! code cache.
//!
//! # Locks
//!
//! ```text
//! a probe's places      the outermost: callbacks are called with it alone
//!   dup semaphore, mmap locks, ...
//!     table of probes, what callbacks have left to do     leaves
//! ```
//!
//! So a callback may make any call on any space. What such a call brings and takes away is seen to by whoever has the lock of the probe's
//! places, at once if that's nobody; callbacks wait for no other callback, and there is no circle.
//!
//! # Nothing is missed (C10)
//!
//! ```text
//! a call on a space                      a registration
//! -----------------                      --------------
//!                                        dups are kept out
//! enter what comes in files' indexes     enter the probe; mark the file
//! publish                                fence
//! fence                                  copy the index of the file
//! is the file marked?                    dups go on
//! let the lock go                        settle each place that was found
//! settle what came and went
//! ```
//!
//! * What the registration doesn't find in the index came there later: its call sees the mark. What it finds and isn't published yet, or no
//!   longer there, is so later than it looked: by the fences the call sees the mark.
//! * A dup looks at marks while it copies the layout, before the copies are in any index. A registration in between would be missed, so it
//!   waits for dups: those before are in the index as a whole, and those after see the mark. The child is in the system by then, though nobody
//!   finds it by number yet; one that fails has never been settled.
//! * To settle a place is to look at what is mapped there and do what is missing, one after the other for each probe. The last one to do so
//!   comes after the last change.
//! * An unregistered probe is wanted nowhere; where it was installed it knows itself, so that nothing is searched for, nor dups kept out.

mod error;
mod inside;
#[cfg(all(test, loom))]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod models;
mod registered;
mod table;

use std::fmt;
use std::sync::Arc;

use vma_rcu::wait::Wait;

pub use self::error::ProbeError;
pub(crate) use self::registered::{Panicked, Place, Probed};
pub(crate) use self::table::{Table, fence_of_probes};

use self::registered::Registered;
use super::System;
use crate::backend::Backend;
use crate::error::Errno;
use crate::file::{FileObject, SpaceId};
use crate::space::{Core, rethrow};

/// What an embedder does where a byte of a file is mapped (Linux: `struct uprobe_consumer`, and the breakpoint).
///
/// # Which mappings
/// Private ones that may execute and aren't of huge pages, whatever they allow at the time. (Linux leaves out those that are writable
/// as well, and so misses what is made executable later.) It's the mapping that counts: whether its page has been overwritten
/// makes no difference, unless [`concerns`](Self::concerns) asks [`ProbeSite::is_copied`].
///
/// # When
/// A call that maps, moves, unmaps, duplicates or ends has let go of all locks when it calls these, and returns when they have. (Other threads
/// of the space may find a mapping a little before it has its probe; nobody finds a dup's child before.) At each
/// place `install` that has succeeded and `remove` take turns. They are called one after the other for each probe, in all of its
/// spaces. A mapping that is split, merged or protected keeps its probes, and so does one that is replaced by the same part of the file:
/// nothing is asked.
///
/// # What a callback may do
/// Everything, but register a probe (`EBUSY`): no lock of a space is held. Calls on any space and dropping probes, this one as well, don't
/// wait for callbacks: where one is at work, on this thread or another, it sees to the rest before its caller returns.
///
/// A callback that waits for a thread that makes calls on spaces may wait for ever.
///
/// # Panics
/// The panic of a callback goes on from the call, when everything else has been done; `install` counts as failed then, `remove` as done.
///
/// ```
/// use std::collections::BTreeSet;
/// use std::sync::{Arc, Mutex};
/// use vma_core::{AccessMode, Errno, FileKind, FileObject, MapFlags, MapRequest, OpenFile};
/// use vma_core::{Probe, ProbeSite, Prot, SpaceConfig, SpaceId, System, Wait};
///
/// /// Where an emulator stops.
/// #[derive(Default)]
/// struct Breakpoint(Mutex<BTreeSet<(SpaceId, u64)>>);
///
/// impl Probe for Breakpoint {
///     fn install(&self, site: &ProbeSite<'_>) -> Result<(), Errno> {
///         self.0.lock().unwrap().insert((site.space(), site.addr()));
///         Ok(())
///     }
///
///     fn remove(&self, site: &ProbeSite<'_>) {
///         self.0.lock().unwrap().remove(&(site.space(), site.addr()));
///     }
/// }
///
/// let system = System::default();
/// let shell = system.create(SpaceConfig::default(), ())?;
/// let file = FileObject::builder(FileKind::Regular, "/bin/sh").len(8192).build();
/// let stops = Arc::new(Breakpoint::default());
/// let probe = system.register_probe(&file, 0x1234, stops.clone(), Wait::forever())?;
///
/// let text = OpenFile::new(file, AccessMode::Read);
/// let request = MapRequest::file(text, 0, 8192, Prot::READ | Prot::EXEC, MapFlags::PRIVATE);
/// let at = shell.map(&request)?;
/// let child = shell.dup()?;
/// assert!(stops.0.lock().unwrap().contains(&(child.space().id(), at + 0x1234)));
/// probe.unregister();
/// assert!(stops.0.lock().unwrap().is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Probe<B = ()>: Send + Sync + 'static {
    /// Whether it is to be installed there (Linux: `uprobe_consumer::filter`). Asked before each [`install`](Self::install).
    fn concerns(&self, site: &ProbeSite<'_, B>) -> bool {
        let _ = site;
        true
    }

    /// The byte is mapped there from now on. The space may be a dup's child that no one finds by its number yet.
    ///
    /// # Errors
    /// It couldn't be installed: a registration that is under way fails with this, and the probe is removed from where it was installed.
    /// Later the mapping is without it, and [counted](ProbeHandle::failures).
    fn install(&self, site: &ProbeSite<'_, B>) -> Result<(), Errno>;

    /// It is there no longer, or unregistered. The space may be about to end.
    fn remove(&self, site: &ProbeSite<'_, B>);
}

/// Where a probe is installed.
pub struct ProbeSite<'s, B = ()> {
    space: SpaceId,
    addr: u64,
    backend: &'s B,
}

impl<'s, B> ProbeSite<'s, B> {
    fn new((space, addr): (SpaceId, u64), backend: &'s B) -> Self {
        ProbeSite {
            space,
            addr,
            backend,
        }
    }

    /// The space: [`AddressSpace::id`](crate::AddressSpace::id).
    pub fn space(&self) -> SpaceId {
        self.space
    }

    /// The byte's address.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// The space's backend.
    pub fn backend(&self) -> &'s B {
        self.backend
    }
}

impl<B: Backend> ProbeSite<'_, B> {
    /// Whether the byte's page is a private copy: it was stored to, or may have been, and shows something else than the file does. The next
    /// instant it may be one. Where there is no memory behind mappings there are no copies.
    pub fn is_copied(&self) -> bool {
        self.backend.is_copied(self.addr)
    }
}

impl<B> fmt::Debug for ProbeSite<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProbeSite")
            .field("space", &self.space)
            .field("addr", &format_args!("{:#x}", self.addr))
            .finish_non_exhaustive()
    }
}

/// A probe that is registered; dropping it unregisters it. It keeps the file.
#[must_use = "the probe is unregistered when it is dropped"]
pub struct ProbeHandle<B: Backend = ()> {
    registered: Arc<Registered<Core<B>>>,
    is_closed: bool,
}

impl<B: Backend> ProbeHandle<B> {
    /// Removes it from everywhere, as dropping does. When this returns none of its callbacks is under way, nor comes again; but inside a
    /// callback, where it returns at once if somebody is at work, who completes it.
    ///
    /// It waits for the probe's callbacks alone. As [`register_probe`](System::register_probe), not while the thread holds a guard of a space.
    ///
    /// # Panics
    /// When a callback does. It has been removed from everywhere.
    ///
    /// Source: `uprobe_unregister_nosync()` and `uprobe_unregister_sync()` in kernel/events/uprobes.c.
    pub fn unregister(mut self) {
        self.close();
    }

    fn close(&mut self) {
        if std::mem::replace(&mut self.is_closed, true) {
            return;
        }
        let mut panicked = None;
        self.registered.close(&mut panicked);
        if let Some(panic) = panicked {
            rethrow(panic);
        }
    }

    /// The file.
    pub fn file(&self) -> &Arc<FileObject> {
        self.registered.file()
    }

    /// The byte.
    pub fn offset(&self) -> u64 {
        self.registered.offset()
    }

    /// Where it is installed, in no order that means something. It waits for callbacks under way; inside one it doesn't, and has no
    /// answer while one of this probe is.
    ///
    /// # Panics
    /// When a callback does that another callback's call has left to it.
    pub fn sites(&self) -> Option<Vec<(SpaceId, u64)>> {
        let mut panicked = None;
        let installed = self.registered.installed(&mut panicked);
        if let Some(panic) = panicked {
            rethrow(panic);
        }
        installed
    }

    /// How often it couldn't be installed in what was mapped after its registration.
    pub fn failures(&self) -> u64 {
        self.registered.failures()
    }
}

impl<B: Backend> Drop for ProbeHandle<B> {
    fn drop(&mut self) {
        self.close();
    }
}

impl<B: Backend> fmt::Debug for ProbeHandle<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProbeHandle")
            .field("file", &self.file().name())
            .field("offset", &self.offset())
            .finish_non_exhaustive()
    }
}

impl<B: Backend> System<B> {
    /// Has `probe` installed wherever a byte of a file is mapped in a space of this system, now and later, until the result is dropped.
    ///
    /// It waits for dups under way as `wait` says, and looks between installations whether to go on. Dups wait while it looks for mappings, and
    /// no longer while it calls the probe. Mappings that come meanwhile are seen to by who makes them, so that another thread may call the
    /// probe first.
    ///
    /// Not while the thread holds a guard of a space or [keeps dups out](Self::quiesce_dups): debug builds panic. The same holds for
    /// every call that maps or unmaps what has probes, in another space than the one whose guard is held.
    ///
    /// # Errors
    /// With each of them the probe is installed nowhere.
    ///
    /// | errno | when |
    /// |---|---|
    /// | `EINVAL` | the byte lies beyond the end of the file |
    /// | `EIO` | the file is a device, or another thing without pages of its own |
    /// | `EINTR` | the wait ended |
    /// | `EBUSY` | inside a probe's callback |
    /// | any | [`Probe::install`] failed with it |
    ///
    /// # Panics
    /// When a callback does. The probe is installed nowhere.
    ///
    /// Source: `uprobe_register()` and `register_for_each_vma()` in kernel/events/uprobes.c.
    pub fn register_probe(
        &self,
        file: &Arc<FileObject>,
        offset: u64,
        probe: Arc<dyn Probe<B>>,
        wait: Wait<'_>,
    ) -> Result<ProbeHandle<B>, ProbeError> {
        let quiesce = || self.quiesce_dups(wait);
        let place = (file, offset);
        let registered = self.shared.probes.register(place, probe, wait, quiesce)?;
        Ok(ProbeHandle {
            registered,
            is_closed: false,
        })
    }
}
