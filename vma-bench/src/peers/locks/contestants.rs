//! The locks that are compared, each behind the same two calls.

use std::hash::{Hash as _, Hasher as _};
use std::hint::black_box;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use crossbeam_utils::sync::ShardedLock;
use vma_rcu::percpu_rwsem::PercpuRwSemaphore;
use vma_rcu::rwsem::RwSemaphore;

/// A reader-writer lock around a number.
pub(super) trait Lock: Sync {
    /// Name in rows.
    const NAME: &'static str;

    /// A free lock.
    fn make() -> Self;

    /// Takes the shared side and lets it go.
    fn read(&self) -> u64;

    /// Takes the exclusive side and lets it go.
    fn write(&self);
}

impl Lock for RwSemaphore<u64> {
    const NAME: &'static str = "RwSemaphore";

    fn make() -> Self {
        Self::new(0)
    }

    #[inline(always)]
    fn read(&self) -> u64 {
        *black_box(&*RwSemaphore::read(self))
    }

    #[inline(always)]
    fn write(&self) {
        *black_box(&mut *RwSemaphore::write(self)) += 1;
    }
}

impl Lock for PercpuRwSemaphore<u64> {
    const NAME: &'static str = "PercpuRwSemaphore";

    fn make() -> Self {
        Self::new(0)
    }

    #[inline(always)]
    fn read(&self) -> u64 {
        let guard = PercpuRwSemaphore::read(self);
        *black_box(&*guard)
    }

    #[inline(always)]
    fn write(&self) {
        *black_box(&mut *PercpuRwSemaphore::write(self)) += 1;
    }
}

/// As where the kernel has no `membarrier`.
pub(super) struct Fenced(PercpuRwSemaphore<u64>);

impl Lock for Fenced {
    const NAME: &'static str = "PercpuRwSemaphore, fences";

    fn make() -> Self {
        Self(PercpuRwSemaphore::with_fences(0, 64))
    }

    #[inline(always)]
    fn read(&self) -> u64 {
        *black_box(&*self.0.read())
    }

    #[inline(always)]
    fn write(&self) {
        *black_box(&mut *self.0.write()) += 1;
    }
}

impl Lock for parking_lot::RwLock<u64> {
    const NAME: &'static str = "parking_lot::RwLock";

    fn make() -> Self {
        Self::new(0)
    }

    #[inline(always)]
    fn read(&self) -> u64 {
        *black_box(&*parking_lot::RwLock::read(self))
    }

    #[inline(always)]
    fn write(&self) {
        *black_box(&mut *parking_lot::RwLock::write(self)) += 1;
    }
}

impl Lock for std::sync::RwLock<u64> {
    const NAME: &'static str = "std::sync::RwLock";

    fn make() -> Self {
        Self::new(0)
    }

    #[inline(always)]
    fn read(&self) -> u64 {
        *black_box(&*std::sync::RwLock::read(self).expect("no user panics"))
    }

    #[inline(always)]
    fn write(&self) {
        *black_box(&mut *std::sync::RwLock::write(self).expect("no user panics")) += 1;
    }
}

impl Lock for ShardedLock<u64> {
    const NAME: &'static str = "crossbeam::ShardedLock";

    fn make() -> Self {
        Self::new(0)
    }

    #[inline(always)]
    fn read(&self) -> u64 {
        *black_box(&*ShardedLock::read(self).expect("no user panics"))
    }

    #[inline(always)]
    fn write(&self) {
        *black_box(&mut *ShardedLock::write(self).expect("no user panics")) += 1;
    }
}

/// BRAVO (Dice and Kogan, USENIX ATC 2019) over `parking_lot`: readers announce themselves in a table that all locks share, as
/// long as no writer has been there lately. The bias isn't given back by time here but at once: best for readers.
pub(super) struct Bravo {
    /// Readers use the table.
    biased: AtomicBool,
    below: parking_lot::RwLock<u64>,
}

/// Who reads what. Read-modify-write by readers, scanned by writers: `SeqCst`, as the paper has it.
static TABLE: [AtomicPtr<Bravo>; 4096] = [const { AtomicPtr::new(ptr::null_mut()) }; 4096];

thread_local! {
    static HASH: usize = {
        let mut hasher = std::hash::DefaultHasher::new();
        std::thread::current().id().hash(&mut hasher);
        hasher.finish() as usize
    };
}

impl Bravo {
    #[inline(always)]
    fn slot(&self) -> &'static AtomicPtr<Bravo> {
        let own = ptr::from_ref(self).addr() >> 6;
        &TABLE[(HASH.with(|hash| *hash) ^ own) % TABLE.len()]
    }
}

impl Lock for Bravo {
    const NAME: &'static str = "BRAVO over parking_lot";

    fn make() -> Self {
        Self {
            biased: AtomicBool::new(true),
            below: parking_lot::RwLock::new(0),
        }
    }

    #[inline(always)]
    fn read(&self) -> u64 {
        if self.biased.load(Ordering::Relaxed) {
            let (slot, own) = (self.slot(), ptr::from_ref(self).cast_mut());
            let free =
                slot.compare_exchange(ptr::null_mut(), own, Ordering::SeqCst, Ordering::Relaxed);
            if free.is_ok() {
                // What is protected lies in the lock below, which a writer has only after the table is clear of us: here it's
                // enough to show that we are in.
                let fast = self.biased.load(Ordering::SeqCst);
                slot.store(ptr::null_mut(), Ordering::Release);
                if fast {
                    return black_box(0);
                }
            }
        }
        *black_box(&*self.below.read())
    }

    #[inline(always)]
    fn write(&self) {
        let mut value = black_box(self.below.write());
        self.biased.store(false, Ordering::SeqCst);
        let own = ptr::from_ref(self).cast_mut();
        for slot in &TABLE {
            while slot.load(Ordering::SeqCst) == own {
                std::hint::spin_loop();
            }
        }
        *value += 1;
        self.biased.store(true, Ordering::SeqCst);
    }
}
