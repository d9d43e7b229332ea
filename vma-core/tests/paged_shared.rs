//! Spaces that share tables, each of which changes them at the same time.

#![allow(clippy::unwrap_used, reason = "tests may")]

#[path = "memory/mod.rs"]
mod memory;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memory::{PAGE, check, map, space};
use vma_core::paged::FramePool;

struct Stop<'s>(&'s AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// C16: what one space does to tables that it shares takes nothing from the other: a store is there when it has been made.
#[test]
fn stores_stay_while_another_space_lets_go_of_the_tables() {
    let pool = FramePool::default();
    let parent = space(&pool);
    let pages = 512 * 4;
    let addr = map(&parent, pages);
    memory::populate(&parent, addr, pages, 1);
    let end = Instant::now() + Duration::from_secs(2);
    let stop = AtomicBool::new(false);
    let x = addr + 700 * PAGE;
    std::thread::scope(|scope| {
        // Two threads of the parent, each with a word of its own on one page.
        for word in 0..2_u64 {
            let (parent, stop) = (&parent, &stop);
            scope.spawn(move || {
                let mut cpu = parent.accessor();
                let mut value = 0;
                while !stop.load(Ordering::Relaxed) {
                    value += 1;
                    cpu.store_u64(x + 8 * word, value).unwrap();
                    assert_eq!(cpu.load_u64(x + 8 * word), Ok(value), "a store was lost");
                }
            });
        }
        // Also when something panics.
        let _stop = Stop(&stop);
        while Instant::now() < end {
            let child = parent.dup().unwrap();
            std::thread::scope(|scope| {
                for thread in 0..2 {
                    let child = &child;
                    scope.spawn(move || {
                        let mut cpu = child.accessor();
                        let _ = cpu.store_u8(x + (1 + thread) * PAGE, 3);
                        let _ = cpu.store_u8(x + (5 + thread) * PAGE, 3);
                    });
                }
                child.unmap(addr, pages * PAGE).unwrap();
            });
        }
    });
    check(&parent);
}
