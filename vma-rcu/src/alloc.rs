//! Allocation that reports failure instead of ending the process.

use std::alloc::Layout;
use std::ptr::NonNull;

/// Raw memory for a `T`; `None` when memory runs out.
pub(crate) fn try_memory<T>() -> Option<NonNull<T>> {
    const { assert!(size_of::<T>() > 0, "nothing to allocate") };
    // SAFETY: the layout has a size other than zero, by the assertion above.
    let memory = unsafe { std::alloc::alloc(Layout::new::<T>()) };
    NonNull::new(memory.cast())
}

/// As [`try_memory`], with every byte zero.
pub(crate) fn try_zeroed<T>() -> Option<NonNull<T>> {
    let memory = try_memory::<T>()?;
    // SAFETY: fresh memory of this size.
    unsafe { memory.write_bytes(0, 1) };
    Some(memory)
}

/// Gives back what [`try_memory`] gave.
///
/// # Safety
///
/// `memory` came from `try_memory::<T>` and is not used any more.
pub(crate) unsafe fn free_memory<T>(memory: NonNull<T>) {
    // SAFETY: by the caller's promise, allocated with this very layout.
    unsafe { std::alloc::dealloc(memory.as_ptr().cast(), Layout::new::<T>()) };
}

/// `Box::new(make())`, or `None` when memory runs out.
pub(crate) fn try_box<T>(make: impl FnOnce() -> T) -> Option<Box<T>> {
    let memory = try_memory::<T>()?;
    // SAFETY: fresh memory of the right layout.
    unsafe { memory.write(make()) };
    // SAFETY: allocated by the global allocator with `T`'s layout, and initialised.
    Some(unsafe { Box::from_raw(memory.as_ptr()) })
}
