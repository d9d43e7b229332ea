//! The only door to atomics, locks and shared ownership: real types, or loom's under `cfg(loom)`.
//!
//! [`Track`] makes plain memory visible to loom. A node's keys are plain words, written before the node
//! is published and only read afterwards; loom can't see plain memory, so every node carries a `Track`
//! that is written with the keys and read with them. Outside of loom it has no size and no code.

#[cfg(not(loom))]
mod imp {
    pub(crate) use parking_lot::Mutex;
    pub(crate) use std::sync::Arc;

    pub(crate) mod atomic {
        pub(crate) use std::sync::atomic::{
            AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, compiler_fence, fence,
        };
    }

    /// Nothing: see the module.
    #[derive(Debug, Default)]
    pub(crate) struct Track;

    #[expect(clippy::unused_self, reason = "loom's has something to do")]
    impl Track {
        pub(crate) const fn new() -> Self {
            Track
        }

        #[inline(always)]
        pub(crate) fn read(&self) {}

        #[inline(always)]
        pub(crate) fn write(&self) {}
    }
}

#[cfg(loom)]
mod imp {
    /// Reference counts aren't ours to model, and loom's can't hold a trait object.
    pub(crate) use std::sync::Arc;

    pub(crate) mod atomic {
        pub(crate) use loom::sync::atomic::{
            AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence,
        };
        pub(crate) use std::sync::atomic::compiler_fence;
    }

    /// loom's mutex with parking_lot's signatures.
    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Mutex(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
            match self.0.lock() {
                Ok(guard) => guard,
                Err(poisoned) => poisoned.into_inner(),
            }
        }
    }

    /// A cell whose accesses loom checks for data races: see the module.
    #[derive(Debug, Default)]
    pub(crate) struct Track(loom::cell::UnsafeCell<()>);

    impl Track {
        pub(crate) fn new() -> Self {
            Track::default()
        }

        pub(crate) fn read(&self) {
            self.0.with(|_| ());
        }

        pub(crate) fn write(&self) {
            self.0.with_mut(|_| ());
        }
    }
}

pub(crate) use imp::*;

/// Whether this is a model build in which the fault `name` was planted (`VMA_PLANTED`), to see that a model
/// finds it. Constant false otherwise. An environment variable rather than a cfg: only this crate is built anew.
#[inline(always)]
pub(crate) fn planted(name: &str) -> bool {
    cfg!(loom) && option_env!("VMA_PLANTED") == Some(name)
}
