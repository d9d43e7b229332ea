//! Concurrency building blocks of the `vma` project. This crate knows nothing of virtual memory areas.
//!
//! * [`reclaim`]: when memory that readers may still be looking at can be freed.
//! * [`tree`]: [`RangeTree`](tree::RangeTree), disjoint half-open `u64` ranges under read-copy-update.
//! * [`rwsem`]: a reader-writer semaphore with downgrade and waits that can be given up.
//! * [`percpu_rwsem`]: a reader-writer semaphore whose readers share nothing.
//! * [`shootdown`]: waiting until nobody uses an old translation any more.
//! * [`lock_order`]: a lock order that debug builds enforce.
//! * [`wait`]: how long to wait, and cancelling from outside.
//!
//! # Consistency
//!
//! Readers never lock, never retry and never write memory that another reader reads or writes. A
//! writer's transaction becomes visible by one pointer store: a reader sees all of it or nothing.
//!
//! # Lifetimes
//!
//! What a reader finds lives as long as the [`Guard`](reclaim::Guard) that it was found under. What a
//! transaction takes out is freed after every guard of that time has gone, by a writer or by whoever
//! calls [`Domain::collect`](reclaim::Domain::collect), never by a reader.
//!
//! # Performance
//!
//! A lookup costs a pin and one search of 16 keys per level. A transaction copies one node of 384 bytes
//! when it stays within a leaf; nodes and records come from the writer's own pool.
//!
//! # Unsafe code
//!
//! All of it is in this crate. Each block holds one operation and names the invariant it stands on:
//! the tree's are T1 to T9 (`docs/design.md`), the reclamation's are R1 to R4, the locks' W1 and L1 to L3,
//! the shootdown's S1.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(test)]
extern crate self as vma_rcu;

mod alloc;
mod barrier;
pub mod lock_order;
pub mod percpu_rwsem;
pub mod reclaim;
pub mod rwsem;
pub mod shootdown;
#[doc(hidden)]
pub mod sync;
pub mod tree;
pub mod wait;
