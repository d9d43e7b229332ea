//! The tree with nodes of full size, beside a `BTreeMap`.
#![allow(clippy::unwrap_used, reason = "tests may")]

mod tree_model;
