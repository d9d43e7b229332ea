//! What is global in Linux: the registry of spaces, the dup semaphore, and probes.
//!
//! A [`System`] knows its spaces by number. A space can live without one, and several systems in a process don't meet. Who has a
//! [`SpaceHandle`] (Linux: a user of the `mm_struct`) has the space; with the last of them it ends. Who only looks needs none:
//! lookups by number and walks over all spaces go under a guard alone, and touch no count.
//!
//! ```
//! use vma_core::{MapRequest, Prot, SpaceConfig, System};
//!
//! let system = System::default();
//! let shell = system.create(SpaceConfig::default(), ())?;
//! shell.map(&MapRequest::anonymous(4096, Prot::READ))?;
//! let child = shell.dup()?;
//!
//! // The maps of all spaces, under one guard and with no lock.
//! let reader = system.register();
//! let guard = reader.pin();
//! for member in system.iter(0, &guard) {
//!     println!("{}:\n{}", member.id(), member.maps());
//! }
//! drop(guard);
//!
//! // With the last handle the space ends.
//! let id = child.id();
//! drop(child);
//! assert!(system.find(id, &reader.pin()).is_none());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Locks
//!
//! ```text
//! a probe's places    its callbacks are called with it: see `probes`
//! dup semaphore   |  a thread sleeps on one of the two, and has the
//! mmap lock       |  other without waiting or not at all: see `dup`
//!   ...
//!     the registry's writers    taken with nothing held; nothing is waited for, and no destructor runs, under it
//! ```

mod dup;
mod error;
mod handle;
mod member;
#[cfg(all(test, loom))]
#[allow(unsafe_code, clippy::unwrap_used, reason = "tests may")]
mod models;
mod probes;
mod registry;
mod semaphore;

use std::fmt;
use std::sync::Arc;

use vma_rcu::reclaim::{Domain, Guard, Reader, ReclaimLimits};
use vma_rcu::sync::Mutex;
use vma_rcu::wait::{GaveUp, Wait};

pub use self::error::{CreateError, ForkError, RegisterError};
pub use self::handle::{SpaceHandle, WeakSpaceHandle};
pub use self::member::SpaceRef;
pub(crate) use self::probes::{Panicked, Place, Probed, Table, fence_of_probes};
pub use self::probes::{Probe, ProbeError, ProbeHandle, ProbeSite};
pub use self::registry::MemberId;
pub use self::semaphore::Quiesced;

use self::handle::{Host, Living};
use self::registry::Registry;
use self::semaphore::DupSemaphore;
use crate::backend::Backend;
use crate::limits::SpaceConfig;
use crate::space::{AddressSpace, Core, LockObserver};

/// What a [`System`] is made with.
#[derive(Clone, Default)]
pub struct SystemConfig {
    /// Numbers of spaces stay below this (Linux: `kernel.pid_max`). 0: 32768, as there.
    pub id_limit: u32,
    /// How much retired memory the domain of all spaces may hold.
    pub reclaim: ReclaimLimits,
    /// A dup sleeps on the parent's lock with the dup semaphore held, as Linux's did: to compare with, nothing needs it.
    pub nested_dup: bool,
    /// Hears how long the dup semaphore is waited for and held: the shared side by dups, the exclusive one by who keeps them out. Tries, and
    /// waits that were given up, aren't heard of. Called with the semaphore held or let go of, never under a space's lock that it
    /// waited for.
    pub dup_observer: Option<Arc<dyn LockObserver>>,
}

impl SystemConfig {
    fn id_limit(&self) -> u32 {
        match self.id_limit {
            0 => 32_768,
            limit => limit,
        }
    }
}

impl fmt::Debug for SystemConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SystemConfig")
            .field("id_limit", &self.id_limit())
            .field("reclaim", &self.reclaim)
            .field("nested_dup", &self.nested_dup)
            .field("dup_observer", &self.dup_observer.is_some())
            .finish()
    }
}

/// Address spaces by number, and what keeps dups apart from those who must see all of them. Clones are handles to the same one.
///
/// A system lives as long as a handle to it or to one of its spaces.
pub struct System<B: Backend = ()> {
    shared: Arc<Shared<B>>,
}

impl<B: Backend> Clone for System<B> {
    fn clone(&self) -> Self {
        System {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl<B: Backend> Default for System<B> {
    fn default() -> Self {
        Self::new(SystemConfig::default())
    }
}

impl<B: Backend> fmt::Debug for System<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("System")
            .field("spaces", &self.len())
            .finish_non_exhaustive()
    }
}

struct Shared<B: Backend> {
    registry: Registry<Living<B>>,
    dups: DupSemaphore,
    nested_dup: bool,
    probes: Arc<Table<Core<B>>>,
    /// Last: when the registry has let go of its records.
    end: WindDown,
}

impl<B: Backend> Host<B> for Shared<B> {
    fn system(self: Arc<Self>) -> System<B> {
        System { shared: self }
    }
}

/// The domain of the registry and all spaces.
///
/// Retired records hold spaces, which hold the domain: with the last handle to the system somebody has to free them, or nobody ever would.
struct WindDown(Domain);

impl Drop for WindDown {
    fn drop(&mut self) {
        self.0.wind_down();
    }
}

impl<B: Backend> System<B> {
    /// A system without spaces.
    pub fn new(config: SystemConfig) -> Self {
        let domain = Domain::new(config.reclaim);
        System {
            shared: Arc::new(Shared {
                registry: Registry::new(&domain, config.id_limit()),
                nested_dup: config.nested_dup,
                probes: Arc::default(),
                dups: DupSemaphore::new(config.dup_observer),
                end: WindDown(domain),
            }),
        }
    }

    /// The domain that the registry and all spaces share.
    pub fn domain(&self) -> &Domain {
        &self.shared.end.0
    }

    /// Registers the calling thread for lookups, in the registry and in all spaces of the system.
    pub fn register(&self) -> Reader {
        self.domain().register()
    }

    /// An empty space.
    ///
    /// # Errors
    /// `EINVAL` a configuration that no kernel could have; `EAGAIN` no number is left; `ENOMEM`.
    pub fn create(&self, config: SpaceConfig, backend: B) -> Result<SpaceHandle<B>, CreateError> {
        let space = AddressSpace::with_backend(config, self.domain(), backend)?;
        Ok(self.adopt(space)?)
    }

    /// Takes in a space that was made with the system's [domain](Self::domain), and perhaps with an observer; its mappings stay.
    ///
    /// Who dups a space that isn't in a system, or through [`AddressSpace::dup`], isn't kept out by [`quiesce_dups`](Self::quiesce_dups).
    ///
    /// # Errors
    /// `EINVAL` it was made with another domain; `EAGAIN` no number is left; `ENOMEM`. The space has ended.
    ///
    /// # Panics
    /// When a probe's callback does. The space has ended.
    pub fn adopt(&self, space: AddressSpace<B>) -> Result<SpaceHandle<B>, RegisterError> {
        if !space.domain().is_same(self.domain()) {
            return Err(RegisterError::OtherDomain);
        }
        space.join(&self.shared.probes);
        let living = Living {
            space,
            system: Mutex::new(Some(Arc::clone(&self.shared) as _)),
        };
        match self.shared.registry.insert(living) {
            Ok(member) => Ok(SpaceHandle::first(member)),
            Err((error, member)) => {
                member.value.space.exit();
                Err(error)
            }
        }
    }

    /// The space with this number, unless it is about to end. It may be the next instant.
    ///
    /// No lock, no retry, and no store to memory that others use: no count is touched, so that what was found is only to be looked at. See
    /// [`get`](Self::get) for more.
    ///
    /// # Panics
    /// When the guard is of another domain than the system's.
    pub fn find<'g>(
        &'g self,
        id: impl Into<MemberId>,
        guard: &'g Guard<'_>,
    ) -> Option<SpaceRef<'g, B>> {
        let member = self.shared.registry.find(id.into(), guard)?;
        Some(SpaceRef::new(member, guard))
    }

    /// The spaces in order of their numbers, from `from` on, without those that are about to end.
    ///
    /// As [`find`](Self::find). A space that is there from the beginning of the walk to its end is seen, and seen once; of those that come
    /// or go meanwhile any may be. A number may be met again only as another space's, further on never.
    ///
    /// # Panics
    /// As there.
    pub fn iter<'g>(
        &'g self,
        from: impl Into<MemberId>,
        guard: &'g Guard<'_>,
    ) -> impl Iterator<Item = SpaceRef<'g, B>> {
        let members = self.shared.registry.iter(from.into(), guard);
        members.map(move |member| SpaceRef::new(member, guard))
    }

    /// The space with this number, to keep: one more user. `None` if there is none or it is about to end; it never comes back.
    ///
    /// # Panics
    /// As [`find`](Self::find).
    pub fn get(&self, id: impl Into<MemberId>, guard: &Guard<'_>) -> Option<SpaceHandle<B>> {
        self.find(id, guard)?.get()
    }

    /// How many spaces there are, those included that are about to end.
    pub fn len(&self) -> usize {
        self.shared.registry.len()
    }

    /// Whether there is no space.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Waits until no dup is under way, and lets none begin until the result is dropped. Dups that wait meanwhile hold nothing.
    ///
    /// What is to be in all mappings of a file, those of children that are being made included, goes in under this, as a
    /// [probe](Self::register_probe)'s registration does. Debug builds panic at waiting for a space's lock meanwhile.
    ///
    /// # Errors
    /// [`GaveUp`]: `EINTR` for a system call.
    pub fn quiesce_dups(&self, wait: Wait<'_>) -> Result<Quiesced<'_>, GaveUp> {
        self.shared.dups.write_with(wait)
    }
}
