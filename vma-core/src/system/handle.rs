//! Who keeps a space: Linux's `mm_users` and `mm_count`.

use std::fmt;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use vma_rcu::sync::Mutex;

use super::System;
use super::registry::{self, MemberId};
use crate::backend::Backend;
use crate::space::{AddressSpace, rethrow};

/// The system of a space; behind a trait, because a system's type has that of its spaces in it.
pub(super) trait Host<B: Backend>: Send + Sync {
    fn system(self: Arc<Self>) -> System<B>;
}

/// A space of a system.
pub(super) struct Living<B: Backend> {
    pub(super) space: AddressSpace<B>,
    /// The system, until the space has ended: a circle that the end cuts.
    pub(super) system: Mutex<Option<Arc<dyn Host<B>>>>,
}

pub(super) type Member<B> = registry::Member<Living<B>>;

/// A user of a space (Linux: `mmget`). Clones are further users; with the last one the space ends.
///
/// The end has two steps. First everything is unmapped, what is sealed as well: pages, entries in files' indexes and charges are gone, and owners
/// have been told. Then the space leaves the registry, and its number can be given to another. Lookups don't find it from the first step on.
/// The memory of the record goes a grace period later.
///
/// The last handle is dropped with no lock of the library's held. Where an owner's hook panics, the end is completed all the same, and
/// the panic goes on from here.
pub struct SpaceHandle<B: Backend = ()> {
    member: Arc<Member<B>>,
    /// It's no user any more.
    has_left: bool,
}

impl<B: Backend> SpaceHandle<B> {
    /// The first user is counted already.
    pub(super) fn first(member: Arc<Member<B>>) -> Self {
        SpaceHandle {
            member,
            has_left: false,
        }
    }

    /// One more user of a space that has some.
    pub(super) fn try_new(member: &Arc<Member<B>>) -> Option<Self> {
        member.try_use().then(|| Self::first(Arc::clone(member)))
    }

    /// Its number.
    pub fn id(&self) -> MemberId {
        self.member.id()
    }

    /// The space. Its own [`dup`](AddressSpace::dup) makes a space that no system knows; see [`SpaceHandle::dup`].
    pub fn space(&self) -> &AddressSpace<B> {
        &self.member.value.space
    }

    /// The system that it is in.
    pub fn system(&self) -> System<B> {
        let host = self.member.value.system.lock().clone();
        match host {
            Some(host) => host.system(),
            None => unreachable!("it is taken away when there is no user any more"),
        }
    }

    /// Keeps the record alone (Linux: `mmgrab`).
    pub fn downgrade(&self) -> WeakSpaceHandle<B> {
        WeakSpaceHandle {
            member: Arc::clone(&self.member),
        }
    }

    /// Lets go of it as dropping does, and says whether that was the end of the space.
    ///
    /// # Panics
    /// When an owner's hook does. The space has ended.
    pub fn exit(mut self) -> bool {
        self.leave()
    }

    fn leave(&mut self) -> bool {
        if std::mem::replace(&mut self.has_left, true) || !self.member.leave() {
            return false;
        }
        end(&self.member);
        true
    }
}

/// The end of a space without users.
fn end<B: Backend>(member: &Member<B>) {
    let living = &member.value;
    let unmapped = catch_unwind(AssertUnwindSafe(|| living.space.exit()));
    let host = living.system.lock().take();
    let system = host.map(Host::system);
    if let Some(system) = &system {
        system.shared.registry.remove(member);
    }
    // What others have retired may run code of theirs, and so may the end of the system.
    let collected = catch_unwind(AssertUnwindSafe(|| {
        living.space.domain().collect();
        drop(system);
    }));
    if let Err(panic) = unmapped.and(collected) {
        rethrow(panic);
    }
}

impl<B: Backend> Clone for SpaceHandle<B> {
    fn clone(&self) -> Self {
        self.member.use_again();
        Self::first(Arc::clone(&self.member))
    }
}

impl<B: Backend> Drop for SpaceHandle<B> {
    fn drop(&mut self) {
        self.leave();
    }
}

impl<B: Backend> Deref for SpaceHandle<B> {
    type Target = AddressSpace<B>;

    fn deref(&self) -> &AddressSpace<B> {
        self.space()
    }
}

impl<B: Backend> fmt::Debug for SpaceHandle<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpaceHandle")
            .field("id", &self.id())
            .finish_non_exhaustive()
    }
}

/// Keeps the record of a space and not the space, which may have ended (Linux: `mmgrab`).
pub struct WeakSpaceHandle<B: Backend = ()> {
    member: Arc<Member<B>>,
}

impl<B: Backend> WeakSpaceHandle<B> {
    /// The number that it has, or had: another space may have it by now.
    pub fn id(&self) -> MemberId {
        self.member.id()
    }

    /// One more user, unless the space ends or has ended (Linux: `mmget_not_zero`).
    pub fn upgrade(&self) -> Option<SpaceHandle<B>> {
        SpaceHandle::try_new(&self.member)
    }
}

impl<B: Backend> Clone for WeakSpaceHandle<B> {
    fn clone(&self) -> Self {
        WeakSpaceHandle {
            member: Arc::clone(&self.member),
        }
    }
}

impl<B: Backend> fmt::Debug for WeakSpaceHandle<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeakSpaceHandle")
            .field("id", &self.id())
            .finish_non_exhaustive()
    }
}
