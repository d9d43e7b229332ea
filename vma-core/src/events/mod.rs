//! What others hear of a space's memory: *notifiers* are told what to forget before it goes (Linux: mmu notifiers).

mod notifier;

pub use self::notifier::{
    Invalidation, InvalidationReason, Notifier, NotifierRegistration, Sequence,
};
pub(crate) use self::notifier::{Notifiers, Started};
