//! Memory of the operating system's.

use std::ptr::NonNull;

use super::PAGE;

/// Pages that are zero at first. They are unmapped when this is dropped.
pub(super) struct Mapping {
    start: NonNull<u8>,
    pages: usize,
}

// SAFETY: plain memory, owned.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `None` when memory runs out.
    #[cfg(target_os = "linux")]
    pub(super) fn new(pages: usize) -> Option<Self> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        // SAFETY: a new mapping, where the kernel finds room.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                pages * PAGE,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        let start = NonNull::new(start.ok()?.cast())?;
        Some(Mapping { start, pages })
    }

    /// The same, aligned to its size, a power of two.
    #[cfg(target_os = "linux")]
    pub(super) fn aligned(pages: usize) -> Option<Self> {
        let size = pages * PAGE;
        let all = std::mem::ManuallyDrop::new(Self::new(2 * pages)?);
        let before = all.start.addr().get().wrapping_neg() % size;
        // SAFETY: within the mapping.
        let start = unsafe { all.start.add(before) };
        // SAFETY: as above.
        let after = unsafe { start.add(size) };
        for (from, len) in [(all.start, before), (after, size - before)] {
            if len > 0 {
                // SAFETY: part of the mapping just made, which nobody uses.
                let result = unsafe { rustix::mm::munmap(from.as_ptr().cast(), len) };
                debug_assert!(result.is_ok(), "{result:?}");
            }
        }
        Some(Mapping { start, pages })
    }

    /// `None` when memory runs out.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn aligned(pages: usize) -> Option<Self> {
        Self::new(pages)
    }

    /// `None` when memory runs out.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn new(pages: usize) -> Option<Self> {
        // SAFETY: the layout has a size.
        let start = unsafe { std::alloc::alloc_zeroed(layout(pages)) };
        let start = NonNull::new(start)?;
        Some(Mapping { start, pages })
    }

    pub(super) fn page(&self, index: usize) -> NonNull<u8> {
        assert!(index < self.pages, "beyond the mapping");
        // SAFETY: within the mapping.
        unsafe { self.start.add(index * PAGE) }
    }
}

#[cfg(not(target_os = "linux"))]
fn layout(pages: usize) -> std::alloc::Layout {
    std::alloc::Layout::from_size_align(pages * PAGE, PAGE).expect("a few pages")
}

impl Drop for Mapping {
    #[cfg(target_os = "linux")]
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nobody uses it any more.
        let result = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.pages * PAGE) };
        debug_assert!(result.is_ok(), "{result:?}");
    }

    #[cfg(not(target_os = "linux"))]
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this layout, and nobody uses it any more.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), layout(self.pages)) };
    }
}
