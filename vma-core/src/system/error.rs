//! What can go wrong.

use vma_rcu::wait::GaveUp;

use crate::error::{Errno, PublishError};
use crate::limits::ConfigError;
use crate::space::DupError;

/// Why a space couldn't be taken into a system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// All numbers are taken.
    #[error("all numbers below {limit} are taken")]
    Full {
        /// The limit.
        limit: u32,
    },
    /// No memory for the registry.
    #[error(transparent)]
    Publish(#[from] PublishError),
    /// It was made with another domain than the system's.
    #[error("the space has another reclamation domain than the system")]
    OtherDomain,
}

impl RegisterError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            RegisterError::Full { .. } => Errno::EAGAIN,
            RegisterError::Publish(error) => error.errno(),
            RegisterError::OtherDomain => Errno::EINVAL,
        }
    }
}

/// Why a space couldn't be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// No kernel could have this configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// It couldn't be taken in.
    #[error(transparent)]
    Register(#[from] RegisterError),
}

impl CreateError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            CreateError::Config(_) => Errno::EINVAL,
            CreateError::Register(error) => error.errno(),
        }
    }
}

/// Why a space of a system couldn't be duplicated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ForkError {
    /// The wait for one of the locks ended.
    #[error("the wait for the parent or the dup semaphore ended: {0}")]
    GaveUp(#[from] GaveUp),
    /// It couldn't be copied.
    #[error(transparent)]
    Dup(#[from] DupError),
    /// The child couldn't be taken in.
    #[error(transparent)]
    Register(#[from] RegisterError),
}

impl ForkError {
    /// `EINTR`, `ENOMEM` or `EAGAIN`.
    pub const fn errno(self) -> Errno {
        match self {
            ForkError::GaveUp(_) => Errno::EINTR,
            ForkError::Dup(error) => error.errno(),
            ForkError::Register(error) => error.errno(),
        }
    }
}
