//! Makes the process into one of another kind. None of this can be taken back.

use super::facts::{Resource, limit, status};
use super::{call, last_errno};

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

/// Sets a soft limit, in bytes, as far as the hard one allows.
fn set_limit(resource: Resource, bytes: u64) {
    let hard = limit(resource).1;
    let new = libc::rlimit {
        rlim_cur: bytes.min(hard),
        rlim_max: hard,
    };
    // SAFETY: `new` is a live structure that is read.
    let set = unsafe { libc::setrlimit(resource, &raw const new) };
    assert_eq!(set, 0, "errno {}", last_errno());
}

/// Sets the limit of locked memory, in bytes.
pub(crate) fn limit_locked_memory(bytes: u64) {
    set_limit(libc::RLIMIT_MEMLOCK, bytes);
}

/// Has the allocator take memory in advance, so that it needs none for a while.
#[cfg(target_env = "gnu")]
fn stock_up() {
    /// Bytes of heap that a sequence of calls surely doesn't use up.
    const HEAP: libc::c_int = 32 << 20;
    let options = [
        (libc::M_TOP_PAD, HEAP),
        (libc::M_MMAP_THRESHOLD, HEAP),
        (libc::M_TRIM_THRESHOLD, libc::c_int::MAX),
    ];
    for (option, value) in options {
        // SAFETY: these options of the allocator may be set at any time.
        let set = unsafe { libc::mallopt(option, value) };
        assert_eq!(set, 1);
    }
}

/// Other C libraries' allocators have no such options; what they have at hand has to do.
#[cfg(not(target_env = "gnu"))]
fn stock_up() {}

/// Limits address space and data to so many bytes more than there are, once memory for everything else has been taken.
pub(crate) fn limit_growth(bytes: u64, data_bytes: u64) {
    stock_up();
    // More than the heap has left, so that it grows.
    drop(std::hint::black_box(vec![0_u8; 1 << 20]));
    let bytes_of = |field| {
        status(field)
            .and_then(|kib| kib.parse::<u64>().ok())
            .unwrap()
            * 1024
    };
    set_limit(libc::RLIMIT_AS, bytes_of("VmSize") + bytes);
    set_limit(libc::RLIMIT_DATA, bytes_of("VmData") + data_bytes);
}

/// Memory can't become executable any more.
pub(crate) fn refuse_new_code() {
    const REFUSE_EXEC_GAIN: u64 = 1;
    // SAFETY: changes what later calls may do, no memory.
    let set = unsafe {
        call(
            libc::SYS_prctl,
            [libc::PR_SET_MDWE as u64, REFUSE_EXEC_GAIN, 0, 0, 0, 0],
        )
    };
    assert_eq!(set, Ok(0));
}

/// What can be read can be executed, from now on.
pub(crate) fn imply_exec() {
    let personality = libc::READ_IMPLIES_EXEC as u64;
    // SAFETY: changes what later mappings are like, no memory.
    let set = unsafe { call(libc::SYS_personality, [personality, 0, 0, 0, 0, 0]) };
    assert!(set.is_ok());
}
