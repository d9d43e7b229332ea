//! An asymmetric barrier: readers order their store before their load for nothing, because the writer makes every running
//! thread of the process execute a barrier (`membarrier(2)`, `MEMBARRIER_CMD_PRIVATE_EXPEDITED`). Where the kernel
//! doesn't have it both sides use a fence.
//!
//! ```text
//! reader                              writer
//! ------                              ------
//! count := count + 1                  gate := closed
//! light                               heavy
//! gate load                           counts load
//! ```
//!
//! Of the two loads at least one sees the other side's store. Models see fences on both sides.

use crate::sync::atomic::{Ordering, fence};

/// How this process does it.
#[cfg_attr(
    any(loom, shuttle, not(target_os = "linux")),
    allow(dead_code, reason = "fences alone")
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Barrier {
    /// Fences on both sides.
    Symmetric,
    /// The writer alone pays.
    Asymmetric,
}

impl Barrier {
    /// What the kernel has; asked once.
    #[cfg(all(target_os = "linux", not(any(loom, shuttle))))]
    pub(crate) fn detect() -> Self {
        use std::sync::OnceLock;

        use rustix::thread::{MembarrierCommand, membarrier};

        static BARRIER: OnceLock<Barrier> = OnceLock::new();
        *BARRIER.get_or_init(|| {
            // Has to be asked for before it's used; a child of fork inherits it.
            match membarrier(MembarrierCommand::RegisterPrivateExpedited) {
                Ok(()) if membarrier(MembarrierCommand::PrivateExpedited).is_ok() => {
                    Barrier::Asymmetric
                }
                _ => Barrier::Symmetric,
            }
        })
    }

    #[cfg(any(loom, shuttle, not(target_os = "linux")))]
    pub(crate) fn detect() -> Self {
        Barrier::Symmetric
    }

    /// The readers' side.
    #[inline(always)]
    pub(crate) fn light(self) {
        match self {
            Barrier::Symmetric => {
                if !crate::sync::planted("no_light_barrier") {
                    fence(Ordering::SeqCst);
                }
            }
            Barrier::Asymmetric => crate::sync::atomic::compiler_fence(Ordering::SeqCst),
        }
    }

    /// The writers' side; whether it worked.
    #[must_use]
    pub(crate) fn heavy(self) -> bool {
        #[cfg(all(target_os = "linux", not(any(loom, shuttle))))]
        if self == Barrier::Asymmetric {
            use rustix::thread::{MembarrierCommand, membarrier};
            // It worked when it was asked for. Should a sandbox have taken it away since, or the kernel lack memory for a moment,
            // the slow kind does as well.
            return membarrier(MembarrierCommand::PrivateExpedited)
                .or_else(|_| membarrier(MembarrierCommand::Global))
                .is_ok();
        }
        fence(Ordering::SeqCst);
        true
    }
}
