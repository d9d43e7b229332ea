//! Models of a dup between its two locks, and of spaces that are looked up by number while they end.
//!
//! Protocol, locks, registry and reclamation are the real ones; what they guard are numbers whose every access loom checks.
//! `.ci/loom` runs them as they are, and then once per planted fault, which they must find.

use std::cell::Cell;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::thread;
use vma_rcu::percpu_rwsem::{self, PercpuRwSemaphore};
use vma_rcu::reclaim::{Domain, ReclaimLimits};
use vma_rcu::rwsem::{self, RwSemaphore};
use vma_rcu::sync::planted;
use vma_rcu::wait::{CancelToken, GaveUp, Wait};

use super::dup::{Either, TURNS, both};
use super::registry::{Member, MemberId, Registry};

fn model(preemptions: usize, f: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 100_000;
    builder.check(f);
}

/// A number whose every access loom checks.
#[derive(Default)]
struct Watched(UnsafeCell<u64>);

// SAFETY: what the models are about; loom reports concurrent access.
unsafe impl Send for Watched {}
// SAFETY: as above.
unsafe impl Sync for Watched {}

impl Watched {
    fn get(&self) -> u64 {
        // SAFETY: loom reports a concurrent write.
        self.0.with(|value| unsafe { *value })
    }

    fn add(&self, n: u64) {
        // SAFETY: loom reports any concurrent access.
        self.0.with_mut(|value| unsafe { *value += n });
    }
}

/// A parent's lock and the dup semaphore. The parent's number is written under its lock; the other one by each dup, under both, and read by
/// who keeps dups out.
#[derive(Default)]
struct Locks {
    mmap: RwSemaphore<Watched>,
    dups: PercpuRwSemaphore<()>,
    copies: Watched,
}

impl Locks {
    fn dup(&self, wait: Wait<'_>) -> Result<u32, GaveUp> {
        let mmap = Mmap {
            lock: &self.mmap,
            wait,
        };
        let dups = Dups {
            lock: &self.dups,
            wait,
        };
        let (parent, dup, turns) = both(&mmap, &dups, || self.dups.hold_off_writers())?;
        parent.get();
        self.copies.add(1);
        // In the order of a dup.
        drop(parent);
        drop(dup);
        Ok(turns)
    }

    /// Nothing is held, and nobody is kept out.
    fn assert_free(&self) {
        assert!(!self.mmap.is_contended() && self.mmap.try_write().is_some());
        assert!(self.dups.is_fast() && self.dups.try_write().is_some());
    }
}

struct Mmap<'s> {
    lock: &'s RwSemaphore<Watched>,
    wait: Wait<'s>,
}

impl<'s> Either for Mmap<'s> {
    type Guard = rwsem::WriteGuard<'s, Watched>;

    fn sleep(&self) -> Result<Self::Guard, GaveUp> {
        self.lock.write_with(self.wait)
    }

    fn attempt(&self) -> Option<Self::Guard> {
        self.lock.try_write()
    }
}

struct Dups<'s> {
    lock: &'s PercpuRwSemaphore<()>,
    wait: Wait<'s>,
}

impl<'s> Either for Dups<'s> {
    type Guard = percpu_rwsem::ReadGuard<'s, ()>;

    fn sleep(&self) -> Result<Self::Guard, GaveUp> {
        self.lock.read_with(self.wait)
    }

    fn attempt(&self) -> Option<Self::Guard> {
        self.lock.try_read()
    }
}

/// C9: a parent that is busy until a registration is through (as no thread of its own may be: it'd hang with a dup that is overdue).
#[test]
fn a_registration_does_not_wait_for_a_busy_parent() {
    model(2, || {
        let locks = Arc::new(Locks::default());
        // One that the dup meets.
        let registration = {
            let locks = locks.clone();
            thread::spawn(move || drop(locks.dups.write()))
        };
        let busy = {
            let locks = locks.clone();
            thread::spawn(move || {
                let parent = locks.mmap.write();
                parent.add(1);
                // A registration that the parent's thread waits for.
                drop(locks.dups.write());
                parent.add(1);
            })
        };
        locks.dup(Wait::forever()).unwrap();
        busy.join().unwrap();
        registration.join().unwrap();
        assert_eq!(locks.mmap.read().get(), 2);
        locks.assert_free();
    });
}

/// C9: whoever keeps dups out may wait for the parent's lock.
#[test]
fn a_parent_does_not_wait_for_a_registration() {
    model(3, || {
        let locks = Arc::new(Locks::default());
        let registration = {
            let locks = locks.clone();
            thread::spawn(move || {
                let quiesced = locks.dups.write();
                let before = locks.copies.get();
                locks.mmap.write().add(1);
                assert_eq!(locks.copies.get(), before, "dups are kept out");
                drop(quiesced);
            })
        };
        locks.dup(Wait::forever()).unwrap();
        registration.join().unwrap();
        assert_eq!(locks.mmap.read().get(), 1);
        locks.assert_free();
    });
}

/// All three at once come through, and nobody is left asleep.
#[test]
fn a_dup_a_registration_and_a_busy_parent_come_through() {
    model(2, || {
        let locks = Arc::new(Locks::default());
        let busy = {
            let locks = locks.clone();
            thread::spawn(move || locks.mmap.write().add(1))
        };
        let registration = {
            let locks = locks.clone();
            thread::spawn(move || {
                let quiesced = locks.dups.write();
                locks.copies.get();
                drop(quiesced);
            })
        };
        let turns = locks.dup(Wait::forever()).unwrap();
        assert!(turns <= 2, "{turns} turns for one registration");
        busy.join().unwrap();
        registration.join().unwrap();
        assert_eq!((locks.mmap.read().get(), locks.copies.get()), (1, 1));
        locks.assert_free();
    });
}

/// Two dups of one parent beside a registration: each has the parent for itself.
#[test]
fn two_dups_and_a_registration_come_through() {
    model(2, || {
        let locks = Arc::new(Locks::default());
        let dup = {
            let locks = locks.clone();
            thread::spawn(move || locks.dup(Wait::forever()).map(drop).unwrap())
        };
        let registration = {
            let locks = locks.clone();
            thread::spawn(move || {
                let quiesced = locks.dups.write();
                assert!(locks.copies.get() <= 2);
                drop(quiesced);
            })
        };
        locks.dup(Wait::forever()).unwrap();
        dup.join().unwrap();
        registration.join().unwrap();
        assert_eq!(locks.copies.get(), 2);
        locks.assert_free();
    });
}

/// C11: a dup that gives up on either lock leaves both as they were, and lets in whom it held off.
#[test]
fn a_dup_that_gives_up_leaves_both_locks() {
    model(2, || {
        let locks = Arc::new(Locks::default());
        let token = CancelToken::new();
        let others = {
            let locks = locks.clone();
            thread::spawn(move || {
                locks.mmap.write().add(1);
                drop(locks.dups.write());
            })
        };
        let dup = {
            let (locks, token) = (locks.clone(), token.clone());
            thread::spawn(move || u64::from(locks.dup(Wait::killable(&token)).is_ok()))
        };
        token.cancel();
        let copies = dup.join().unwrap();
        others.join().unwrap();
        assert_eq!(locks.copies.get(), copies);
        locks.assert_free();
    });
}

/// The lock of a parent that is so busy that no try ever gets it.
struct Busy<'s> {
    /// Whether the dup has the semaphore, or asks for it.
    has_dups: &'s Cell<bool>,
    /// How often the dup sleeps before it gives up.
    patience: Cell<u32>,
}

impl Either for Busy<'_> {
    type Guard = ();

    fn sleep(&self) -> Result<(), GaveUp> {
        assert!(!self.has_dups.get(), "it sleeps on one and holds the other");
        let left = self.patience.get().checked_sub(1);
        self.patience.set(left.ok_or(GaveUp::Cancelled)?);
        Ok(())
    }

    fn attempt(&self) -> Option<()> {
        self.has_dups.set(false);
        None
    }
}

/// The semaphore, for a dup of that parent.
struct Noted<'s> {
    lock: Dups<'s>,
    has_dups: &'s Cell<bool>,
}

impl<'s> Either for Noted<'s> {
    type Guard = percpu_rwsem::ReadGuard<'s, ()>;

    fn sleep(&self) -> Result<Self::Guard, GaveUp> {
        self.has_dups.set(true);
        self.lock.sleep()
    }

    fn attempt(&self) -> Option<Self::Guard> {
        self.lock.attempt()
    }
}

/// A dup of that parent beside as many registrations: how many turns it took.
fn dup_of_busy(registrations: u32, patience: u32) -> Result<u32, GaveUp> {
    let dups = Arc::new(PercpuRwSemaphore::new(()));
    let registrations = {
        let dups = dups.clone();
        thread::spawn(move || {
            for _ in 0..registrations {
                drop(dups.write());
            }
        })
    };
    let has_dups = Cell::new(false);
    let busy = Busy {
        has_dups: &has_dups,
        patience: Cell::new(patience),
    };
    let noted = Noted {
        lock: Dups {
            lock: &dups,
            wait: Wait::forever(),
        },
        has_dups: &has_dups,
    };
    let locked = both(&busy, &noted, || dups.hold_off_writers());
    let turns = locked.map(|((), _, turns)| turns);
    registrations.join().unwrap();
    assert!(dups.is_fast() && dups.try_write().is_some());
    turns
}

/// C9: registrations and a busy parent can't overtake a dup for ever.
#[test]
fn a_dup_is_overtaken_a_bounded_number_of_times() {
    model(2, || {
        let turns = dup_of_busy(TURNS + 4, u32::MAX).unwrap();
        assert!(turns <= TURNS + 3, "overtaken: {turns} turns");
    });
}

/// C11: one that is overdue and gives up lets in whom it has held off.
#[test]
fn an_overdue_dup_that_gives_up_lets_registrations_in() {
    model(2, || {
        let turns = dup_of_busy(TURNS + 3, TURNS + 1);
        assert!(turns.is_err() || turns.is_ok_and(|turns| turns <= TURNS + 1));
    });
}

/// What is in the place of a space.
#[derive(Default)]
struct Living {
    /// Read by its users, written by its end.
    content: Watched,
    /// What all with this number share: written by one that has just got it, and by its end.
    number: Arc<Watched>,
}

/// As a system's registry; with one number, if `limit` is 2.
fn registry<T: Send + Sync + 'static>(limit: u32) -> (Domain, Arc<Registry<T>>) {
    let domain = Domain::new(ReclaimLimits::default());
    let registry = Arc::new(Registry::new(&domain, limit));
    (domain, registry)
}

fn insert<T: Send + Sync + 'static>(registry: &Registry<T>, value: T) -> Option<Arc<Member<T>>> {
    registry.insert(value).ok()
}

/// As a handle's, when it's dropped.
fn leave(registry: &Registry<Living>, member: &Member<Living>) {
    if !member.leave() {
        return;
    }
    if planted("early_remove") {
        registry.remove(member);
    }
    member.value.content.add(1);
    member.value.number.add(1);
    if !planted("early_remove") {
        registry.remove(member);
    }
}

/// What a lookup gives whoever is to keep it.
fn get(registry: &Registry<Living>, domain: &Domain, id: u32) -> Option<Arc<Member<Living>>> {
    let reader = domain.register();
    let guard = reader.pin();
    let found = registry.find(MemberId::from(id), &guard)?;
    found.try_use().then(|| Arc::clone(found))
}

/// One that was found and used is there: it ends when both have left.
#[test]
fn a_member_that_was_got_has_not_ended() {
    model(4, || {
        let (domain, registry) = registry(10);
        let member = insert(&registry, Living::default()).unwrap();
        let other = {
            let (domain, registry) = (domain.clone(), registry.clone());
            thread::spawn(move || {
                if let Some(member) = get(&registry, &domain, 1) {
                    assert_eq!(member.value.content.get(), 0, "it has ended");
                    leave(&registry, &member);
                }
            })
        };
        leave(&registry, &member);
        other.join().unwrap();
        assert_eq!(member.value.content.get(), 1, "it ends once");
        assert!(!member.try_use() && registry.len() == 0);
    });
}

/// What users did comes before the end, whoever is the last one.
#[test]
fn the_last_user_comes_after_all_others() {
    model(4, || {
        let (_domain, registry) = registry(10);
        let member = insert(&registry, Living::default()).unwrap();
        let others: Vec<_> = (0..2)
            .map(|_| {
                member.use_again();
                let (registry, member) = (registry.clone(), member.clone());
                thread::spawn(move || {
                    member.value.content.get();
                    leave(&registry, &member);
                })
            })
            .collect();
        leave(&registry, &member);
        for other in others {
            other.join().unwrap();
        }
        assert_eq!(member.value.content.get(), 1, "it ends once");
    });
}

/// A number is given out again when whoever had it has ended; who looks meanwhile finds one of the two, or none.
#[test]
fn a_number_is_one_members_at_a_time() {
    model(2, || {
        let (domain, registry) = registry(2);
        let number = Arc::<Watched>::default();
        let living = |number: &Arc<Watched>| Living {
            number: number.clone(),
            ..Living::default()
        };
        let old = insert(&registry, living(&number)).unwrap();
        let creator = {
            let (registry, number) = (registry.clone(), number.clone());
            thread::spawn(move || {
                let new = insert(&registry, living(&number))?;
                new.value.number.add(1);
                Some(new)
            })
        };
        let looker = {
            let (domain, registry) = (domain.clone(), registry.clone());
            thread::spawn(move || {
                if let Some(member) = get(&registry, &domain, 1) {
                    assert_eq!(member.value.content.get(), 0, "it has ended");
                    leave(&registry, &member);
                }
            })
        };
        leave(&registry, &old);
        looker.join().unwrap();
        let new = creator.join().unwrap();
        assert_eq!(old.value.content.get(), 1, "it ends once");
        assert_eq!(registry.len(), usize::from(new.is_some()));
        let found = get(&registry, &domain, 1);
        assert_eq!(found.is_some(), new.is_some());
        for used in found.into_iter().chain(new) {
            leave(&registry, &used);
        }
        assert_eq!(registry.len(), 0);
    });
}

/// Lookups and walks pass over one without users, whether it's in the tree still or not.
#[test]
fn a_member_without_users_is_found_by_nobody() {
    model(4, || {
        let (domain, registry) = registry(10);
        let member = insert(&registry, Living::default()).unwrap();
        let left = Arc::new(AtomicBool::new(false));
        let looker = {
            let (registry, left) = (registry.clone(), left.clone());
            thread::spawn(move || {
                let reader = domain.register();
                let guard = reader.pin();
                let has_left = left.load(Ordering::Acquire);
                let found = registry.find(MemberId::from(1), &guard).is_some();
                let walked = registry.iter(MemberId::from(0), &guard).count();
                assert!(!has_left || (!found && walked == 0), "one that has left");
            })
        };
        assert!(member.leave());
        left.store(true, Ordering::Release);
        registry.remove(&member);
        looker.join().unwrap();
    });
}

/// A value whose destructor writes what lookups read.
struct Freed {
    content: Watched,
    count: Arc<AtomicUsize>,
}

impl Drop for Freed {
    fn drop(&mut self) {
        self.content.add(1);
        self.count.fetch_add(1, Ordering::Relaxed);
    }
}

/// What was found under a guard stays until the guard is dropped, and no longer.
#[test]
fn a_member_is_freed_a_grace_period_after_its_end() {
    model(4, || {
        let (domain, registry) = registry(2);
        let count = Arc::new(AtomicUsize::new(0));
        let freed = || Freed {
            content: Watched::default(),
            count: count.clone(),
        };
        let member = insert(&registry, freed()).unwrap();
        let looker = {
            let registry = registry.clone();
            let reader = domain.register();
            thread::spawn(move || {
                let guard = reader.pin();
                if let Some(found) = registry.find(MemberId::from(1), &guard) {
                    assert_eq!(found.value.content.get(), 0, "it is gone");
                }
            })
        };
        assert!(member.leave());
        registry.remove(&member);
        drop(member);
        domain.wind_down();
        looker.join().unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 1);
    });
}
