//! Who is there, by number.
//!
//! A tree of members, which readers search under a guard. Numbers are given out as Linux gives out those of processes
//! (`idr_alloc_cyclic`): the next free one, from the beginning again at the limit, so that a number that has come free is used again late.
//!
//! # A member's life
//!
//! ```text
//! inserted      users = 1, found by all
//! used          users goes up and down; from 0 never again
//! users = 0     found by nobody: lookups and walks pass over it; its value ends meanwhile
//! removed       out of the tree; the number can be given out again
//! a grace period later, with nobody having it: freed
//! ```
//!
//! So a number is one member's at a time: until its value has ended it isn't another's. Whoever has found a member under a guard
//! can look at it until the guard is dropped, whatever becomes of it meanwhile.

use std::fmt;
use std::process::abort;
use std::sync::Arc;

use vma_rcu::lock_order::Held;
use vma_rcu::reclaim::{Domain, Guard};
use vma_rcu::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use vma_rcu::sync::{Mutex, MutexGuard, planted};
use vma_rcu::tree::{GapRequest, RangeTree, Record, Writer};

use super::error::RegisterError;
use crate::error::PublishError;
use crate::space::order::REGISTRY;

/// Number of a space in its system. The first one is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(u32);

impl MemberId {
    /// The number.
    pub fn get(self) -> u32 {
        self.0
    }
}

impl From<u32> for MemberId {
    fn from(id: u32) -> Self {
        MemberId(id)
    }
}

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A value with a number and a count of users.
pub(super) struct Member<T> {
    id: MemberId,
    /// Who may use the value. Release by who leaves, acquire by the last one: what users did comes before the end. From 0 it never goes up.
    /// Models: `a_member_that_was_got_has_not_ended`, `the_last_user_comes_after_all_others`.
    users: AtomicUsize,
    /// It has ended and couldn't be taken out of the tree. Under the registry's lock: relaxed.
    is_stuck: AtomicBool,
    pub(super) value: T,
}

impl<T> Member<T> {
    pub(super) fn id(&self) -> MemberId {
        self.id
    }

    /// Whether it has users.
    pub(super) fn is_used(&self) -> bool {
        planted("find_ended") || self.users.load(Ordering::Acquire) != 0
    }

    /// One more user, unless there is none any more.
    pub(super) fn try_use(&self) -> bool {
        if planted("get_from_zero") {
            self.users.fetch_add(1, Ordering::Acquire);
            return true;
        }
        let mut users = self.users.load(Ordering::Relaxed);
        while users != 0 {
            let more = users.checked_add(1).unwrap_or_else(|| abort());
            match self.users.compare_exchange_weak(
                users,
                more,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(now) => users = now,
            }
        }
        false
    }

    /// One more user, for a user.
    pub(super) fn use_again(&self) {
        let users = self.users.fetch_add(1, Ordering::Relaxed);
        if users > usize::MAX / 2 {
            abort();
        }
    }

    /// A user less; whether it was the last one, who has to see to the end.
    #[must_use = "the last user ends the value"]
    pub(super) fn leave(&self) -> bool {
        let order = if planted("relaxed_leave_member") {
            Ordering::Relaxed
        } else {
            Ordering::Release
        };
        if self.users.fetch_sub(1, order) != 1 {
            return false;
        }
        if !planted("no_last_user_acquire") {
            fence(Ordering::Acquire);
        }
        true
    }
}

/// What the tree holds of a member.
struct Entry<T>(Arc<Member<T>>);

impl<T: Send + Sync + 'static> Record for Entry<T> {}

/// See the [module](self).
pub(super) struct Registry<T: Send + Sync + 'static> {
    tree: RangeTree<Entry<T>>,
    ids: Mutex<Ids<T>>,
    limit: u32,
}

struct Ids<T: Send + Sync + 'static> {
    writer: Writer<Entry<T>>,
    /// Where the search for a free number begins.
    next: u32,
    /// Members that couldn't be taken out for want of memory.
    stuck: usize,
}

/// Why a member wasn't taken in, and the member.
type Refused<T> = (RegisterError, Arc<Member<T>>);

/// The lowest number.
const FIRST: u32 = 1;

impl<T: Send + Sync + 'static> Registry<T> {
    /// Numbers are below `limit`.
    pub(super) fn new(domain: &Domain, limit: u32) -> Self {
        let (tree, writer) = RangeTree::new(domain);
        Registry {
            tree,
            ids: Mutex::new(Ids {
                writer,
                next: FIRST,
                stuck: 0,
            }),
            limit,
        }
    }

    fn lock(&self) -> (MutexGuard<'_, Ids<T>>, Held) {
        let held = REGISTRY.acquire(std::ptr::from_ref(self).addr());
        (self.ids.lock(), held)
    }

    /// Takes a value in, with one user. What it returns on an error is to be dropped with no lock held.
    pub(super) fn insert(&self, value: T) -> Result<Arc<Member<T>>, Refused<T>> {
        let mut member = Member {
            id: MemberId(0),
            users: AtomicUsize::new(1),
            is_stuck: AtomicBool::new(false),
            value,
        };
        let (mut ids, _held) = self.lock();
        self.take_out_stuck(&mut ids);
        let Some(id) = self.free_id(&ids) else {
            let full = RegisterError::Full { limit: self.limit };
            return Err((full, Arc::new(member)));
        };
        member.id = MemberId(id);
        let member = Arc::new(member);
        let at = u64::from(id);
        let entry = (at..at + 1, Entry(Arc::clone(&member)));
        if self.replace(&mut ids, at, Some(entry)).is_err() {
            return Err((PublishError::NoMemory.into(), member));
        }
        ids.next = id + 1;
        Ok(member)
    }

    /// The next number that nobody has. Source: `idr_alloc_cyclic()`, as `alloc_pid()` uses it.
    fn free_id(&self, ids: &Ids<T>) -> Option<u32> {
        let view = self.tree.locked(&ids.writer);
        let within = |from: u32| {
            let window = u64::from(from)..u64::from(self.limit);
            if window.is_empty() {
                return None;
            }
            view.lowest_gap(&GapRequest::new(1, window))
        };
        let found = within(ids.next).or_else(|| within(FIRST))?;
        u32::try_from(found).ok()
    }

    /// One transaction: what is at `at` goes, and perhaps something comes.
    fn replace(
        &self,
        ids: &mut Ids<T>,
        at: u64,
        entry: Option<(std::ops::Range<u64>, Entry<T>)>,
    ) -> Result<(), PublishError> {
        let mut transaction = self.tree.write(&mut ids.writer);
        let spliced = transaction.splice(at..at + 1, entry);
        spliced.map_err(|_| PublishError::NoMemory)?;
        let prepared = transaction.prepare();
        drop(prepared.map_err(|_| PublishError::NoMemory)?.commit());
        Ok(())
    }

    /// Takes a member out whose value has ended. Where there is no memory for that it stays, without users, until the next call.
    pub(super) fn remove(&self, member: &Member<T>) {
        debug_assert!(!member.is_used(), "it has no users any more");
        let (mut ids, _held) = self.lock();
        self.take_out_stuck(&mut ids);
        let at = u64::from(member.id.0);
        if self.replace(&mut ids, at, None).is_err() {
            member.is_stuck.store(true, Ordering::Relaxed);
            ids.stuck += 1;
        }
    }

    fn take_out_stuck(&self, ids: &mut Ids<T>) {
        while ids.stuck > 0 {
            let view = self.tree.locked(&ids.writer);
            let is_stuck = |member: &Member<T>| member.is_stuck.load(Ordering::Relaxed);
            let found = view.iter(0).find(|entry| is_stuck(&entry.value.0));
            let Some(at) = found.map(|entry| entry.start) else {
                ids.stuck = 0;
                return;
            };
            if self.replace(ids, at, None).is_err() {
                return;
            }
            ids.stuck -= 1;
        }
    }

    pub(super) fn find<'g>(
        &self,
        id: MemberId,
        guard: &'g Guard<'_>,
    ) -> Option<&'g Arc<Member<T>>> {
        let entry = self.tree.find(id.0.into(), guard)?;
        Some(&entry.value.0).filter(|member| member.is_used())
    }

    pub(super) fn iter<'g>(
        &self,
        from: MemberId,
        guard: &'g Guard<'_>,
    ) -> impl Iterator<Item = &'g Arc<Member<T>>> + use<'g, T> {
        let members = self.tree.iter(from.0.into(), guard);
        members
            .map(|entry| &entry.value.0)
            .filter(|member| member.is_used())
    }

    /// Members in the tree.
    pub(super) fn len(&self) -> usize {
        let (ids, _held) = self.lock();
        self.tree.locked(&ids.writer).len()
    }
}
