//! For the crates of this workspace alone: no part of the interface.
//!
//! The only door to atomics, locks and shared ownership: real types, loom's under `cfg(loom)`, shuttle's under `cfg(shuttle)`.
//!
//! [`Track`] makes plain memory visible to loom. A node's keys are plain words, written before the node
//! is published and only read afterwards; loom can't see plain memory, so every node carries a `Track`
//! that is written with the keys and read with them. Outside of loom it has no size and no code.

#[cfg(not(any(loom, shuttle)))]
mod imp {
    pub use parking_lot::{Mutex, MutexGuard};
    pub use std::sync::Arc;

    pub mod atomic {
        pub use std::sync::atomic::{
            AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, compiler_fence,
            fence,
        };
    }

    /// Makes a thread sleep, and wakes it: one wake-up is remembered. A thread may be woken for no reason.
    #[derive(Clone, Debug)]
    pub(crate) struct Bell(std::thread::Thread);

    impl Bell {
        /// The calling thread's.
        pub(crate) fn new() -> Self {
            Bell(std::thread::current())
        }

        /// Sleeps until it rings, at most up to the deadline. Only for the thread that made it.
        pub(crate) fn sleep(&self, deadline: Option<std::time::Instant>) {
            debug_assert_eq!(self.0.id(), std::thread::current().id());
            match deadline {
                None => std::thread::park(),
                Some(deadline) => std::thread::park_timeout(
                    deadline.saturating_duration_since(std::time::Instant::now()),
                ),
            }
        }

        pub(crate) fn ring(&self) {
            self.0.unpark();
        }

        pub(crate) fn is(&self, other: &Bell) -> bool {
            self.0.id() == other.0.id()
        }
    }

    /// Nothing: see the module.
    #[derive(Debug, Default)]
    pub struct Track;

    impl Track {
        pub const fn new() -> Self {
            Track
        }

        #[inline(always)]
        pub fn read(&self) {}

        #[inline(always)]
        pub fn write(&self) {}
    }
}

#[cfg(loom)]
mod imp {
    /// Reference counts aren't ours to model, and loom's can't hold a trait object.
    pub use std::sync::Arc;

    pub mod atomic {
        pub use loom::sync::atomic::{
            AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
        };
        pub use std::sync::atomic::compiler_fence;
    }

    pub use loom::sync::MutexGuard;

    /// loom's mutex with parking_lot's signatures.
    #[derive(Debug, Default)]
    pub struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub fn new(value: T) -> Self {
            Mutex(loom::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
            match self.0.lock() {
                Ok(guard) => guard,
                Err(poisoned) => poisoned.into_inner(),
            }
        }
    }

    /// loom's park wakes threads that wait for a mutex; its `Notify` doesn't.
    #[derive(Clone)]
    pub(crate) struct Bell(Arc<loom::sync::Notify>);

    impl Bell {
        pub(crate) fn new() -> Self {
            Bell(Arc::new(loom::sync::Notify::new()))
        }

        /// A model has no clock: whoever has a deadline doesn't sleep.
        pub(crate) fn sleep(&self, _deadline: Option<std::time::Instant>) {
            self.0.wait();
        }

        pub(crate) fn ring(&self) {
            self.0.notify();
        }

        pub(crate) fn is(&self, other: &Bell) -> bool {
            Arc::ptr_eq(&self.0, &other.0)
        }
    }

    impl std::fmt::Debug for Bell {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("Bell").finish_non_exhaustive()
        }
    }

    /// A cell whose accesses loom checks for data races: see the module.
    #[derive(Debug, Default)]
    pub struct Track(loom::cell::UnsafeCell<()>);

    impl Track {
        pub fn new() -> Self {
            Track::default()
        }

        pub fn read(&self) {
            self.0.with(|_| ());
        }

        pub fn write(&self) {
            self.0.with_mut(|_| ());
        }
    }
}

#[cfg(shuttle)]
mod imp {
    pub use std::sync::Arc;

    pub mod atomic {
        pub use shuttle::sync::atomic::{
            AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering,
        };
        // Every access is sequentially consistent there.
        pub use std::sync::atomic::{compiler_fence, fence};
    }

    pub use shuttle::sync::MutexGuard;

    /// shuttle's mutex with parking_lot's signatures.
    #[derive(Debug, Default)]
    pub struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub fn new(value: T) -> Self {
            Mutex(shuttle::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> shuttle::sync::MutexGuard<'_, T> {
            match self.0.lock() {
                Ok(guard) => guard,
                Err(poisoned) => poisoned.into_inner(),
            }
        }
    }

    /// A remembered wake-up, by shuttle's means.
    #[derive(Clone, Debug)]
    pub(crate) struct Bell(Arc<(shuttle::sync::Mutex<bool>, shuttle::sync::Condvar)>);

    impl Bell {
        pub(crate) fn new() -> Self {
            Bell(Arc::default())
        }

        /// A schedule has no clock: whoever has a deadline doesn't sleep.
        pub(crate) fn sleep(&self, _deadline: Option<std::time::Instant>) {
            let (rung, bell) = &*self.0;
            let mut rung = rung.lock().expect("nobody panics here");
            while !std::mem::take(&mut *rung) {
                rung = bell.wait(rung).expect("nobody panics here");
            }
        }

        pub(crate) fn ring(&self) {
            let (rung, bell) = &*self.0;
            *rung.lock().expect("nobody panics here") = true;
            bell.notify_one();
        }

        pub(crate) fn is(&self, other: &Bell) -> bool {
            Arc::ptr_eq(&self.0, &other.0)
        }
    }

    /// Nothing: shuttle doesn't look at memory.
    #[derive(Debug, Default)]
    pub struct Track;

    impl Track {
        pub const fn new() -> Self {
            Track
        }

        pub fn read(&self) {}

        pub fn write(&self) {}
    }
}

pub(crate) use imp::Bell;
pub use imp::{Arc, Mutex, MutexGuard, Track, atomic};

/// Whether this is a model build that runs with the fault `name` planted (`VMA_PLANTED`), to see that a model finds it.
/// Constant false otherwise.
#[inline(always)]
pub fn planted(name: &str) -> bool {
    cfg!(any(loom, shuttle)) && is_planted(name)
}

fn is_planted(name: &str) -> bool {
    static PLANTED: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    let planted = PLANTED.get_or_init(|| std::env::var("VMA_PLANTED").ok());
    planted.as_deref() == Some(name)
}
