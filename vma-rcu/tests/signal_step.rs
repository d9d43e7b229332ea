//! A pin is interrupted at each of its instructions by a handler that pins the same reader.
#![cfg(all(target_os = "linux", target_arch = "x86_64", not(loom)))]
#![allow(clippy::unwrap_used, reason = "tests may")]

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::time::Instant;

use vma_rcu::reclaim::{Domain, Reader};

static READER: AtomicPtr<Reader> = AtomicPtr::new(ptr::null_mut());
static STEPS: AtomicU64 = AtomicU64::new(0);
static UNPROTECTED: AtomicU64 = AtomicU64::new(0);

extern "C" fn handler(_: libc::c_int) {
    let reader = READER.load(Ordering::Acquire);
    if reader.is_null() {
        return;
    }
    // SAFETY: set while the reader lives.
    let reader = unsafe { &*reader };
    STEPS.fetch_add(1, Ordering::Relaxed);
    let guard = reader.pin();
    // What was interrupted holds no lock and isn't in the allocator. Under a guard no grace period may end.
    let ended = reader.domain().synchronize(Some(Instant::now())).is_ok();
    UNPROTECTED.fetch_add(u64::from(ended), Ordering::Relaxed);
    drop(guard);
}

#[inline(never)]
fn stepped(reader: &Reader) {
    // SAFETY: sets the trap flag: SIGTRAP after each instruction, which `handler` takes.
    unsafe { std::arch::asm!("pushfq", "or qword ptr [rsp], 0x100", "popfq") };
    let guard = reader.pin();
    drop(guard);
    // SAFETY: clears it.
    unsafe { std::arch::asm!("pushfq", "and qword ptr [rsp], -257", "popfq") };
}

#[test]
fn a_pin_in_a_handler_protects_wherever_it_interrupts_a_pin() {
    let domain = Domain::default();
    let reader = Box::into_raw(Box::new(domain.register()));
    // SAFETY: a handler that does only what is async-signal-safe where it runs.
    let old = unsafe { libc::signal(libc::SIGTRAP, handler as *const () as libc::sighandler_t) };
    assert_ne!(old, libc::SIG_ERR);
    READER.store(reader, Ordering::Release);
    // SAFETY: freed below.
    stepped(unsafe { &*reader });
    READER.store(ptr::null_mut(), Ordering::Release);
    // SAFETY: made above; no handler knows it any more.
    drop(unsafe { Box::from_raw(reader) });
    assert!(STEPS.load(Ordering::Relaxed) > 10, "nothing was stepped");
    assert_eq!(UNPROTECTED.load(Ordering::Relaxed), 0);
}
