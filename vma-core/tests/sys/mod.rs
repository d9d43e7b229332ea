//! The running kernel, for the tests that compare with it.
//!
//! Calls are made by number, with arguments as the caller has them: bindings that know the calls would refuse
//! the wrong ones, which are half of what is compared.

#![expect(
    unsafe_code,
    reason = "memory is mapped and unmapped, and processes are split"
)]

mod child;
mod facts;
mod huge;
mod kernel;
mod layout;
mod setting;

pub(crate) use self::child::{Ended, in_child};
pub(crate) use self::facts::{Facts, why_not_comparable};
pub(crate) use self::huge::{MachinePool, reserved_huge_pages};
pub(crate) use self::kernel::Kernel;
pub(crate) use self::layout::{Line, lines_between};
pub(crate) use self::setting::{
    imply_exec, limit_growth, limit_locked_memory, refuse_new_code, stop_being_root,
};

use std::ffi::c_long;
use std::io;

/// Makes a system call. The error is the errno.
///
/// # Safety
/// The call with these arguments may read and write no memory, nor map or unmap any, that anything else in this process relies on.
unsafe fn call(number: c_long, args: [u64; 6]) -> Result<u64, i32> {
    // SAFETY: passed on to the caller.
    let result =
        unsafe { libc::syscall(number, args[0], args[1], args[2], args[3], args[4], args[5]) };
    if result == -1 {
        Err(last_errno())
    } else {
        Ok(result.cast_unsigned())
    }
}

fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}
