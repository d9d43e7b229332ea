//! One probe, and where it is installed.
//!
//! Who changes what is mapped, or registers, doesn't say "install" or "remove": it has a place *settled*, which looks at what is mapped there
//! and does what is missing. So it does no harm to settle a place for nothing, or twice, and the last one sees the layout as it stays.

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;

use vma_rcu::lock_order::Level;
use vma_rcu::rwsem::{RwSemaphore, WriteGuard};
use vma_rcu::sync::atomic::{AtomicU64, Ordering};
use vma_rcu::sync::{Mutex, planted};

use super::inside::Inside;
use super::table::{Key, Table};
use super::{Probe, ProbeSite};
use crate::error::Errno;
use crate::file::{FileObject, SpaceId};

/// The outermost lock: callbacks are called with it.
const PLACES: Level = Level::new(5, "a probe's places");

/// A space, as probes see it.
pub(crate) trait Probed: Send + Sync + Sized + 'static {
    type Backend;

    /// Whether this byte of the file is at this address now, in a mapping that probes concern.
    fn shows(&self, file: &FileObject, offset: u64, addr: u64) -> bool;

    fn backend(&self) -> &Self::Backend;

    /// Where the probes of its system are, if it's in one.
    fn table(&self) -> Option<&Arc<Table<Self>>>;
}

/// An address of a space.
pub(crate) struct Place<S> {
    pub(crate) space: Arc<S>,
    pub(crate) addr: u64,
}

/// The first panic of callbacks: the rest of the work is done all the same.
pub(crate) type Panicked = Option<Box<dyn Any + Send>>;

/// Why it isn't at a place where it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    Failed(Errno),
    Panicked,
}

pub(crate) struct Registered<S: Probed> {
    file: Arc<FileObject>,
    /// Bytes.
    offset: u64,
    /// Tells it from others at the same byte.
    number: u64,
    probe: Arc<dyn Probe<S::Backend>>,
    table: Arc<Table<S>>,
    /// Exclusive only: callbacks come one after the other.
    places: RwSemaphore<Places<S>>,
    /// For who has `places`, which is asked again when it is let go of. A leaf.
    left: Mutex<Left<S>>,
    /// Statistics: relaxed.
    failures: AtomicU64,
}

struct Places<S> {
    installed: BTreeMap<(SpaceId, u64), Arc<S>>,
    /// Unregistered: it is installed nowhere any more.
    is_closed: bool,
}

/// What callbacks have left to do for whoever is at work, in no order. A list of boxes: nothing is allocated under its lock.
struct Left<S> {
    first: Option<Box<LeftPlace<S>>>,
    close: bool,
}

struct LeftPlace<S> {
    place: Place<S>,
    next: Option<Box<LeftPlace<S>>>,
}

impl<S> Default for Left<S> {
    fn default() -> Self {
        Left {
            first: None,
            close: false,
        }
    }
}

impl<S> Left<S> {
    fn is_empty(&self) -> bool {
        self.first.is_none() && !self.close
    }
}

/// What a turn of work has come to; dropped with nothing held.
struct Turn<'p, S> {
    panicked: &'p mut Panicked,
    /// Spaces that may go with this.
    spaces: Vec<Arc<S>>,
}

impl<S: Probed> Registered<S> {
    pub(super) fn new(
        table: Arc<Table<S>>,
        (file, offset, number): (Arc<FileObject>, u64, u64),
        probe: Arc<dyn Probe<S::Backend>>,
    ) -> Self {
        Registered {
            file,
            offset,
            number,
            probe,
            table,
            places: RwSemaphore::new(Places {
                installed: BTreeMap::new(),
                is_closed: false,
            }),
            left: Mutex::new(Left::default()),
            failures: AtomicU64::new(0),
        }
    }

    pub(super) fn file(&self) -> &Arc<FileObject> {
        &self.file
    }

    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    pub(super) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    pub(super) fn key(&self) -> Key {
        Key {
            file: Arc::as_ptr(&self.file).addr(),
            offset: self.offset,
            number: self.number,
        }
    }

    /// Where it is installed. `None` inside a callback while somebody is at work.
    pub(super) fn installed(&self, panicked: &mut Panicked) -> Option<Vec<(SpaceId, u64)>> {
        let list = |places: &mut Places<S>, _: &mut Turn<'_, S>| {
            let installed = places.installed.keys().copied();
            installed.collect()
        };
        if Inside::is_inside() {
            let installed = self.try_work(panicked, list);
            self.work_off(panicked);
            return installed;
        }
        Some(self.work(panicked, list))
    }

    /// A call has changed what is mapped at a place. Returns when it has been seen to; but for a callback's call, which somebody else may
    /// see to later.
    pub(crate) fn settle(&self, place: Place<S>, panicked: &mut Panicked) {
        if Inside::is_inside() {
            let mut last = Box::new(LeftPlace { place, next: None });
            let mut left = self.left.lock();
            last.next = left.first.take();
            left.first = Some(last);
            drop(left);
            self.work_off(panicked);
        } else if self.settle_now(place, panicked).is_err() {
            self.failures.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The same for the registration, which isn't one of a callback and wants to know.
    pub(super) fn settle_now(
        &self,
        place: Place<S>,
        panicked: &mut Panicked,
    ) -> Result<(), Refused> {
        self.work(panicked, |places, turn| self.see_to(places, turn, place))
    }

    /// Removes it from everywhere, for good. When this returns no callback is under way, nor comes again; but inside a callback.
    pub(super) fn close(&self, panicked: &mut Panicked) {
        if Inside::is_inside() {
            self.left.lock().close = true;
            self.work_off(panicked);
        } else {
            self.work(panicked, |places, turn| self.remove_all(places, turn));
        }
    }

    /// Waits for its turn. Whoever has had one does what was left meanwhile, so that there is no other way to the places.
    fn work<R>(
        &self,
        panicked: &mut Panicked,
        f: impl FnOnce(&mut Places<S>, &mut Turn<'_, S>) -> R,
    ) -> R {
        let mut turn = Turn::new(panicked);
        let held = PLACES.acquire(ptr::from_ref(self).addr());
        let mut places = self.places.write();
        let result = f(&mut places, &mut turn);
        self.see_to_left(places, &mut turn);
        drop(held);
        drop(turn);
        if !planted("no_look_at_left") {
            self.work_off(panicked);
        }
        result
    }

    /// Does what is left, unless somebody is at work, who does it then.
    ///
    /// Who leaves something and finds the lock taken did so before the owner let go of it, and the owner looks again after that. Model:
    /// `what_a_callback_leaves_is_done`.
    fn work_off(&self, panicked: &mut Panicked) {
        while !self.left.lock().is_empty() {
            if self.try_work(panicked, |_, _| ()).is_none() {
                return;
            }
        }
    }

    /// If nobody is at work. [`work_off`](Self::work_off) comes after it.
    fn try_work<R>(
        &self,
        panicked: &mut Panicked,
        f: impl FnOnce(&mut Places<S>, &mut Turn<'_, S>) -> R,
    ) -> Option<R> {
        let mut turn = Turn::new(panicked);
        let mut places = self.places.try_write()?;
        let held = PLACES.acquired(ptr::from_ref(self).addr());
        let result = f(&mut places, &mut turn);
        self.see_to_left(places, &mut turn);
        drop(held);
        Some(result)
    }

    fn see_to_left(&self, mut places: WriteGuard<'_, Places<S>>, turn: &mut Turn<'_, S>) {
        loop {
            let mut left = std::mem::take(&mut *self.left.lock());
            if left.is_empty() {
                return;
            }
            while let Some(first) = left.first {
                if self.see_to(&mut places, turn, first.place).is_err() {
                    self.failures.fetch_add(1, Ordering::Relaxed);
                }
                left.first = first.next;
            }
            if left.close {
                self.remove_all(&mut places, turn);
            }
        }
    }

    /// Does what is missing at a place.
    fn see_to(
        &self,
        places: &mut Places<S>,
        turn: &mut Turn<'_, S>,
        Place { space, addr }: Place<S>,
    ) -> Result<(), Refused> {
        let key = (SpaceId::of(&space), addr);
        let is_wanted = !places.is_closed && space.shows(&self.file, self.offset, addr);
        let is_installed = places.installed.contains_key(&key);
        let mut result = Ok(());
        if is_wanted && !is_installed {
            let site = ProbeSite::new(key, space.backend());
            let call = || {
                let concerns = self.probe.concerns(&site);
                concerns.then(|| self.probe.install(&site)).transpose()
            };
            result = match turn.call(call) {
                None => Err(Refused::Panicked),
                Some(Err(errno)) => Err(Refused::Failed(errno)),
                Some(Ok(installed)) => {
                    if installed.is_some() {
                        places.installed.insert(key, Arc::clone(&space));
                    }
                    Ok(())
                }
            };
        } else if is_installed && !is_wanted {
            turn.spaces.extend(places.installed.remove(&key));
            let site = ProbeSite::new(key, space.backend());
            turn.call(|| self.probe.remove(&site));
        }
        turn.spaces.push(space);
        result
    }

    fn remove_all(&self, places: &mut Places<S>, turn: &mut Turn<'_, S>) {
        if std::mem::replace(&mut places.is_closed, !planted("stays_open")) {
            return;
        }
        while let Some((key, space)) = places.installed.pop_first() {
            let site = ProbeSite::new(key, space.backend());
            turn.call(|| self.probe.remove(&site));
            turn.spaces.push(space);
        }
        // As long as it was somewhere calls had to look for it.
        self.table.remove(&self.key());
        self.file.count_probe(false);
    }
}

impl<'p, S> Turn<'p, S> {
    fn new(panicked: &'p mut Panicked) -> Self {
        Turn {
            panicked,
            spaces: Vec::new(),
        }
    }

    /// Calls the embedder. `None`: it has panicked.
    fn call<R>(&mut self, f: impl FnOnce() -> R) -> Option<R> {
        let inside = Inside::enter();
        let result = catch_unwind(AssertUnwindSafe(f));
        let result = match result {
            Ok(result) => Some(result),
            Err(panic) => {
                // Another one's destructor is the embedder's as well.
                self.panicked.get_or_insert(panic);
                None
            }
        };
        drop(inside);
        result
    }
}
