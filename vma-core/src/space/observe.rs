//! How long the lock is waited for and held.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vma_rcu::rwsem::LockStatistics;

use super::AddressSpace;
use crate::backend::Backend;

/// Hears how long threads wait for a space's lock and hold it.
///
/// Single mappings ([`AddressSpace::lock_vma`]) and lookups aren't heard of: they don't take the lock.
pub trait LockObserver: Send + Sync {
    /// A thread has the lock, this time after it asked; uncontended entries included, tries and waits that were given up not.
    ///
    /// Called with the lock held: it mustn't use the space, and what it takes everybody waits for.
    fn waited(&self, exclusive: bool, time: Duration);

    /// A thread has held the lock for this time. Called after it has let go, and before the pages go that its call has taken away; at a
    /// downgrade, for the exclusive part, with the shared side held: it mustn't use the space.
    fn held(&self, exclusive: bool, time: Duration);
}

/// Counts, sums and maxima of a lock: the [`LockObserver`] for who wants no more than that.
///
/// ```
/// use std::sync::Arc;
/// use vma_core::{AddressSpace, LockTimes, MapRequest, Prot};
///
/// let times = Arc::new(LockTimes::default());
/// let space = AddressSpace::default().with_lock_observer(times.clone());
/// let at = space.map(&MapRequest::anonymous(4096, Prot::READ))?;
/// space.unmap(at, 4096)?;
/// let (held, waited) = (times.held(true), times.waited(true));
/// assert_eq!((held.count, waited.count), (2, 2));
/// assert!(held.longest <= held.total);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct LockTimes {
    /// The shared side, the exclusive one.
    waited: [Times; 2],
    held: [Times; 2],
}

/// Times of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockTime {
    /// How many.
    pub count: u64,
    /// All together.
    pub total: Duration,
    /// The longest.
    pub longest: Duration,
}

/// Nanoseconds. Relaxed throughout: statistics that order nothing; each is right, together they need not be of one instant.
#[derive(Debug, Default)]
struct Times {
    count: AtomicU64,
    total: AtomicU64,
    longest: AtomicU64,
}

impl Times {
    fn add(&self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.count.fetch_add(1, Ordering::Relaxed);
        self.total.fetch_add(ns, Ordering::Relaxed);
        self.longest.fetch_max(ns, Ordering::Relaxed);
    }

    fn reset(&self) {
        for word in [&self.count, &self.total, &self.longest] {
            word.store(0, Ordering::Relaxed);
        }
    }

    fn get(&self) -> LockTime {
        let time = |word: &AtomicU64| Duration::from_nanos(word.load(Ordering::Relaxed));
        LockTime {
            count: self.count.load(Ordering::Relaxed),
            total: time(&self.total),
            longest: time(&self.longest),
        }
    }
}

impl LockTimes {
    /// Waits for one side of the lock.
    pub fn waited(&self, exclusive: bool) -> LockTime {
        self.waited[usize::from(exclusive)].get()
    }

    /// Holds of one side of the lock.
    pub fn held(&self, exclusive: bool) -> LockTime {
        self.held[usize::from(exclusive)].get()
    }

    /// Begins anew.
    pub fn reset(&self) {
        self.waited.iter().chain(&self.held).for_each(Times::reset);
    }
}

impl LockObserver for LockTimes {
    fn waited(&self, exclusive: bool, time: Duration) {
        self.waited[usize::from(exclusive)].add(time);
    }

    fn held(&self, exclusive: bool, time: Duration) {
        self.held[usize::from(exclusive)].add(time);
    }
}

/// The observer that a space may have. Without one no clock is read.
#[derive(Clone, Default)]
pub(crate) struct Observed(Option<Arc<dyn LockObserver>>);

impl Observed {
    pub(crate) fn by(observer: Arc<dyn LockObserver>) -> Self {
        Observed(Some(observer))
    }
}

impl fmt::Debug for Observed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Observed").field(&self.0.is_some()).finish()
    }
}

impl LockStatistics for Observed {
    #[inline]
    fn is_active(&self) -> bool {
        self.0.is_some()
    }

    fn waited(&self, exclusive: bool, time: Duration) {
        if let Some(observer) = &self.0 {
            observer.waited(exclusive, time);
        }
    }

    fn held(&self, exclusive: bool, time: Duration) {
        if let Some(observer) = &self.0 {
            observer.held(exclusive, time);
        }
    }
}

impl<B: Backend> AddressSpace<B> {
    /// Has `observer` hear of every wait for the lock and every hold of it from now on; one that was there before is replaced.
    ///
    /// It costs two to three looks at the clock per hold; without an observer there are none. Copies of the space
    /// ([`dup`](Self::dup), [`checkpoint`](Self::checkpoint)) have none.
    #[must_use]
    pub fn with_lock_observer(mut self, observer: Arc<dyn LockObserver>) -> Self {
        *self.inner.statistics_mut() = Observed::by(observer);
        self
    }
}
