//! The tree with nodes of full size, beside a `BTreeMap`.

mod tree_model;
