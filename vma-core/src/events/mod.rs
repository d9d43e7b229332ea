//! What others hear of a space's memory: *notifiers* are told what to forget before it goes (Linux: mmu notifiers), *monitors* are asked what is
//! in pages that nothing is in yet, and told of changes (Linux: userfaultfd).

#[cfg(all(test, loom))]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod models;
mod monitor;
mod notifier;

pub(crate) use self::monitor::{Announced, Asked, Attention, Context};
pub use self::monitor::{
    Monitor, MonitorEvent, MonitorFeatures, MonitorFeaturesError, MonitorModes,
};
pub use self::notifier::{
    Invalidation, InvalidationReason, Notifier, NotifierRegistration, Sequence,
};
pub(crate) use self::notifier::{Notifiers, Started};
