//! The state of a running system as far as memory calls depend on it: files with their names, descriptors, tasks.

pub mod fds;
pub mod files;
pub mod tasks;
