//! Processes of their own for whatever ends badly or can't be taken back.

use std::io::{Read as _, Write as _, pipe};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use super::last_errno;

/// How a child ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// With what it had to say.
    Said(String),
    /// By a panic of this message.
    Panicked(String),
    /// With a wait status that isn't 0: a signal, or out of memory.
    Died(i32),
}

const SAID: u8 = b's';

/// Message and place of a copy's panic.
static LAST_PANIC: Mutex<String> = Mutex::new(String::new());

/// Runs a closure in a copy of this process and returns its answer.
///
/// # Panics
/// If this process has more than one thread: others' locks would stay taken in the copy.
pub(crate) fn in_child(work: impl FnOnce() -> String) -> Ended {
    let threads = std::fs::read_dir("/proc/self/task").unwrap().count();
    assert_eq!(threads, 1, "only a process of one thread can be copied");
    let (mut from_child, mut to_parent) = pipe().unwrap();
    // SAFETY: the only thread copies the process, so that no lock is left taken in the copy.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork failed with errno {}", last_errno());
    if pid == 0 {
        std::panic::set_hook(Box::new(|info| {
            *LAST_PANIC.lock().unwrap() = info.to_string();
        }));
        let (kind, text) = match catch_unwind(AssertUnwindSafe(work)) {
            Ok(text) => (SAID, text),
            Err(_) => (b'p', LAST_PANIC.lock().unwrap().clone()),
        };
        let sent = to_parent
            .write_all(&[kind])
            .and_then(|()| to_parent.write_all(text.as_bytes()));
        // SAFETY: ends the copy at once, without what the parent's exit still has to do.
        unsafe { libc::_exit(i32::from(sent.is_err())) }
    }
    drop(to_parent);
    let mut answer = Vec::new();
    let read = from_child.read_to_end(&mut answer);
    let mut status = 0;
    // SAFETY: `status` is a live integer that is written.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(waited, pid);
    match answer.split_first() {
        Some((kind, text)) if read.is_ok() && status == 0 => {
            let text = String::from_utf8_lossy(text).into_owned();
            if *kind == SAID {
                Ended::Said(text)
            } else {
                Ended::Panicked(text)
            }
        }
        _ => Ended::Died(status),
    }
}
