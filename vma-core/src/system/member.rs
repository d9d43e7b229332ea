//! A space as a lookup finds it.

use std::fmt;
use std::sync::Arc;

use vma_rcu::reclaim::Guard;

use super::handle::{Member, SpaceHandle};
use super::registry::MemberId;
use crate::backend::Backend;
use crate::space::{MapsEntry, VmaRef};

/// A space that was found under a guard, to be looked at as long as the guard lives.
///
/// It may end meanwhile. Then its layout empties under the reader's eyes, each mapping there wholly or not at all, and stays empty;
/// what was found before stays readable. So it offers nothing that waits or changes something: [`get`](Self::get) does, to who
/// has to.
pub struct SpaceRef<'g, B: Backend = ()> {
    member: &'g Arc<Member<B>>,
    guard: &'g Guard<'g>,
}

impl<B: Backend> Clone for SpaceRef<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for SpaceRef<'_, B> {}

impl<'g, B: Backend> SpaceRef<'g, B> {
    pub(super) fn new(member: &'g Arc<Member<B>>, guard: &'g Guard<'_>) -> Self {
        SpaceRef { member, guard }
    }

    /// Its number.
    pub fn id(self) -> MemberId {
        self.member.id()
    }

    /// Whether it has users still. It may not the next instant.
    pub fn is_used(self) -> bool {
        self.member.is_used()
    }

    /// One more user, unless there is none any more: to wait, to change something, or to keep it.
    pub fn get(self) -> Option<SpaceHandle<B>> {
        SpaceHandle::try_new(self.member)
    }

    /// The mapping that holds `addr`.
    pub fn find(self, addr: u64) -> Option<VmaRef<'g>> {
        self.member.value.space.find(addr, self.guard)
    }

    /// The first mapping that ends above `addr`.
    pub fn find_next(self, addr: u64) -> Option<VmaRef<'g>> {
        self.member.value.space.find_next(addr, self.guard)
    }

    /// The mappings in order of address, from the first that ends above `from`.
    pub fn iter(self, from: u64) -> impl Iterator<Item = VmaRef<'g>> {
        self.member.value.space.iter(from, self.guard)
    }

    /// The layout as the text of `/proc/PID/maps`, as [`AddressSpace::maps_under`](crate::AddressSpace::maps_under).
    pub fn maps(self) -> String {
        self.member.value.space.maps_under(self.guard)
    }

    /// The same line by line, from the first mapping that ends above `from`.
    pub fn maps_entries(self, from: u64) -> impl Iterator<Item = MapsEntry> + 'g {
        self.member.value.space.maps_entries_under(from, self.guard)
    }
}

impl<B: Backend> fmt::Debug for SpaceRef<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpaceRef")
            .field("id", &self.id())
            .finish_non_exhaustive()
    }
}
