//! Processes of their own for whatever ends badly or can't be taken back.

use std::io::{Read as _, Write as _, pipe};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use super::{call, last_errno};

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

/// Id of the user that owns nothing.
const NOBODY: u64 = 65534;

/// Goes on as an ordinary user, if this was root.
pub(crate) fn stop_being_root() {
    // SAFETY: reads an id.
    if unsafe { libc::geteuid() } != 0 {
        return;
    }
    let calls = [
        (libc::SYS_setgroups, [0; 6]),
        (libc::SYS_setresgid, [NOBODY, NOBODY, NOBODY, 0, 0, 0]),
        (libc::SYS_setresuid, [NOBODY, NOBODY, NOBODY, 0, 0, 0]),
        // Else /proc/self would still belong to root.
        (
            libc::SYS_prctl,
            [libc::PR_SET_DUMPABLE as u64, 1, 0, 0, 0, 0],
        ),
    ];
    for (number, args) in calls {
        // SAFETY: none of these calls touches memory; the empty list of groups is never read.
        let result = unsafe { call(number, args) };
        result.unwrap_or_else(|errno| panic!("call {number} failed with errno {errno}"));
    }
}

/// Sets the soft limit of `RLIMIT_MEMLOCK`, in bytes, as far as the hard one allows.
pub(crate) fn limit_locked_memory(bytes: u64) {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a live structure that is written.
    let got = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    assert_eq!(got, 0);
    limit.rlim_cur = bytes.min(limit.rlim_max);
    // SAFETY: `limit` is a live structure that is read.
    let set = unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) };
    assert_eq!(set, 0);
}
