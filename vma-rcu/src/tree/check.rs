//! The checker: every structural invariant, and a recount of everything cached.

use std::fmt;

use super::node::{
    FANOUT, INNER_MIN, Inner, LANES, LEAF_CAP, LEAF_MIN, Leaf, NodePtr, PAD, Root, inner, leaf,
};
use super::{MAX_END, Record};

/// An invariant that doesn't hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// Its name in `docs/design.md`: T1 to T8.
    pub invariant: &'static str,
    /// What was found.
    pub found: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.invariant, self.found)
    }
}

impl std::error::Error for Broken {}

/// What the checker found below a node.
struct Summary {
    last: u64,
    gap: u64,
    entries: usize,
}

/// Walks the whole tree.
///
/// # Safety
///
/// T7: what is reachable from `root` can't be freed during the call, and the writer is the caller's.
pub(super) unsafe fn check<T: Record>(
    root: Root,
    len: usize,
    last_end: u64,
    now: u64,
) -> Result<(), Broken> {
    let (entries, last) = if root.is_empty() {
        (0, 0)
    } else {
        let walk = Walk::<T> {
            now,
            top: root.node(),
            marker: std::marker::PhantomData,
        };
        let found = walk.node(root.node(), root.height(), 0)?;
        (found.entries, found.last)
    };
    require("T8", last == last_end, || {
        format!("last end {last:#x}, kept as {last_end:#x}")
    })?;
    require("T8", entries == len, || {
        format!("{entries} entries, counted as {len}")
    })
}

fn require(
    invariant: &'static str,
    holds: bool,
    found: impl FnOnce() -> String,
) -> Result<(), Broken> {
    if holds {
        return Ok(());
    }
    let found = found();
    Err(Broken { invariant, found })
}

struct Walk<T> {
    now: u64,
    top: NodePtr,
    marker: std::marker::PhantomData<T>,
}

impl<T: Record> Walk<T> {
    fn node(&self, node: NodePtr, height: usize, lo: u64) -> Result<Summary, Broken> {
        require("T2", !node.is_null(), || {
            format!("no node at height {height}")
        })?;
        if height == 0 {
            // SAFETY: T7, by `check`'s caller.
            self.leaf(unsafe { leaf(node) }, node, lo)
        } else {
            // SAFETY: T7, by `check`'s caller.
            self.inner(unsafe { inner(node) }, node, height, lo)
        }
    }

    fn leaf(&self, leaf: &Leaf<T>, node: NodePtr, lo: u64) -> Result<Summary, Broken> {
        let len = leaf.len();
        let least = if node == self.top { 1 } else { LEAF_MIN };
        require("T4", (least..=LEAF_CAP).contains(&len), || {
            format!("{len} entries in a leaf")
        })?;
        let mut previous = lo;
        for i in 0..len {
            let (start, end) = (leaf.slots[i].start, leaf.ends[i]);
            let sound = previous <= start && start < end && end <= MAX_END;
            require("T1", sound, || {
                format!("{start:#x}..{end:#x} after {previous:#x}")
            })?;
            let guarded = leaf.guarded >> i & 1 == 1;
            require("T5", guarded == (leaf.noted_gap(i) > 0), || {
                format!("guard of {start:#x}")
            })?;
            previous = end;
        }
        let slots = leaf.slots[len..].iter().map(|slot| &slot.start);
        let padded = leaf.ends[len..].iter().chain(slots).all(|key| *key == PAD);
        require("T4", padded && leaf.guarded >> len == 0, || {
            "used lanes beyond the end".into()
        })?;
        let gap = leaf.max_gap(lo, len);
        Ok(Summary {
            last: previous,
            gap,
            entries: len,
        })
    }

    fn inner(
        &self,
        inner: &Inner,
        node: NodePtr,
        height: usize,
        lo: u64,
    ) -> Result<Summary, Broken> {
        let len = inner.len();
        let least = if node == self.top { 2 } else { INNER_MIN };
        require("T4", (least..=FANOUT).contains(&len), || {
            format!("{len} children")
        })?;
        require("T6", inner.birth <= self.now, || {
            format!("born in {}", inner.birth)
        })?;
        let padded = inner.pivots[len - 1..].iter().all(|pivot| *pivot == PAD);
        require("T4", padded && inner.pivots[LANES - 1] == PAD, || {
            "pivots beyond".into()
        })?;
        let mut sum = Summary {
            last: lo,
            gap: 0,
            entries: 0,
        };
        for i in 0..len {
            let below = self.node(inner.child(i), height - 1, sum.last)?;
            let pivot = inner.pivots[i];
            let exact = i + 1 == len || pivot == below.last;
            require("T3", exact, || {
                format!("pivot {pivot:#x}, last end {:#x}", below.last)
            })?;
            // SAFETY: T7, by `check`'s caller.
            let cached = unsafe { inner.gaps() }[i];
            require("T5", cached == below.gap, || {
                format!("gap {cached:#x}, is {:#x}", below.gap)
            })?;
            sum.last = below.last;
            sum.gap = sum.gap.max(below.gap);
            sum.entries += below.entries;
        }
        Ok(sum)
    }
}
