//! Turns a hang into a failure that says where each thread is.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

/// Disarms the watchdog when dropped.
pub(crate) struct Watchdog(#[expect(dead_code, reason = "held for its destructor")] Sender<()>);

/// Ends the process unless the result is dropped within `limit`.
pub(crate) fn watch(limit: Duration) -> Watchdog {
    let (alive, gone) = mpsc::channel();
    thread::spawn(move || {
        if gone.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            eprintln!("no end after {limit:?}; threads:");
            print_threads();
            std::process::abort();
        }
    });
    Watchdog(alive)
}

/// Name, state, what it waits in, and its system call, for every thread.
fn print_threads() {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else {
        return eprintln!("  (no /proc here)");
    };
    for task in tasks.flatten() {
        let read = |name: &str| {
            std::fs::read_to_string(task.path().join(name))
                .map_or_else(|error| format!("<{error}>"), |text| text.trim().to_owned())
        };
        let status = read("status");
        let state = status.lines().find(|line| line.starts_with("State:"));
        eprintln!(
            "  {} {}: {}; in {}; system call {}",
            task.file_name().display(),
            read("comm"),
            state.unwrap_or("State: unknown"),
            read("wchan"),
            read("syscall"),
        );
    }
}
