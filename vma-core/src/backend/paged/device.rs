//! Frames that are the embedder's: a device's memory, or memory shared with somebody else.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::entry::Entry;
use super::frame::FrameHead;
use super::table::{NoMemory, index};
use super::{PAGE, Paged};
use crate::addr::VmRange;
use crate::error::Errno;
use crate::flags::VmaFlags;
use crate::space::AddressSpace;

/// Frames of the embedder's memory. They are mapped, and never given back or counted.
///
/// A clone is a handle to the same frames. A space that has had some of them put in keeps a handle for as long as it lives, and so do
/// its children.
#[derive(Clone)]
pub struct DeviceFrames(Arc<Inner>);

struct Inner {
    heads: Box<[FrameHead]>,
    /// Dropped with the last handle.
    _owner: Box<dyn Any + Send + Sync>,
}

impl fmt::Debug for DeviceFrames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceFrames")
            .field("pages", &self.len())
            .finish_non_exhaustive()
    }
}

impl DeviceFrames {
    /// Frames for `pages` pages from `memory` on. `owner` is dropped with the last handle: what keeps the memory.
    ///
    /// # Panics
    /// `memory` isn't aligned to [`PAGE`].
    ///
    /// # Safety
    /// **F4** The memory is there as long as there is a handle; it's accessed by atomic operations alone, from any thread.
    pub unsafe fn new(
        memory: NonNull<u8>,
        pages: usize,
        owner: impl Any + Send + Sync,
    ) -> DeviceFrames {
        unsafe fn keep(_: NonNull<FrameHead>) {}
        assert!(
            memory.addr().get().is_multiple_of(PAGE),
            "frames are aligned to a page"
        );
        let head = |index: usize| {
            // SAFETY: within the memory, by the caller's promise.
            let page = unsafe { memory.add(index * PAGE) };
            // SAFETY: F1, by F4: as long as there are references there are handles.
            unsafe { FrameHead::new(page, std::ptr::null(), keep) }
        };
        DeviceFrames(Arc::new(Inner {
            heads: (0..pages).map(head).collect(),
            _owner: Box::new(owner),
        }))
    }

    /// Whether both are handles to the same frames.
    pub(super) fn is(&self, other: &DeviceFrames) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Number of frames.
    pub fn len(&self) -> usize {
        self.0.heads.len()
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Why frames weren't put into a mapping. Those before the page that it names were.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InsertError {
    /// Unaligned, or more frames than there are.
    #[error(
        "{count} frames from number {first} on at {addr:#x}: unaligned, or there aren't as many"
    )]
    BadRange {
        /// Where.
        addr: u64,
        /// Number of the first frame.
        first: usize,
        /// How many.
        count: usize,
    },
    /// Nothing is mapped there, or the mapping ends before.
    #[error("nothing is mapped at {0:#x}, or another mapping")]
    Unmapped(u64),
    /// The mapping isn't one for the embedder's frames: it lacks `PFNMAP`.
    #[error("{0} isn't a mapping for the embedder's frames")]
    NotForFrames(VmRange),
    /// There is a page already.
    #[error("there is a page at {0:#x}")]
    Occupied(u64),
    /// No memory for page tables.
    #[error("no memory for page tables at {0:#x}")]
    OutOfMemory(u64),
}

impl InsertError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            InsertError::BadRange { .. } | InsertError::NotForFrames(_) => Errno::EINVAL,
            InsertError::Unmapped(_) => Errno::EFAULT,
            InsertError::Occupied(_) => Errno::EBUSY,
            InsertError::OutOfMemory(_) => Errno::ENOMEM,
        }
    }
}

impl AddressSpace<Paged> {
    /// Puts frames of the embedder's into a mapping with `PFNMAP`, made by [`insert_special`](Self::insert_special): `count` of them,
    /// from number `first` on, at `addr`. They are found there until they are unmapped or discarded, also in children. In a private
    /// mapping a store goes to a copy. Pages without a frame are [`FaultError::NoFrame`](crate::FaultError).
    ///
    /// # Errors
    /// `EINVAL` unaligned, too many, not such a mapping; `EFAULT` the mapping ends before; `EBUSY` there is a page; `ENOMEM` page
    /// tables.
    ///
    /// Source: `vmf_insert_pfn()`, `remap_pfn_range()` in mm/memory.c.
    pub fn insert_frames(
        &self,
        addr: u64,
        frames: &DeviceFrames,
        first: usize,
        count: usize,
    ) -> Result<(), InsertError> {
        let bad = InsertError::BadRange { addr, first, count };
        let last = first.checked_add(count).ok_or(bad)?;
        let heads = frames.0.heads.get(first..last).ok_or(bad)?;
        if !addr.is_multiple_of(PAGE as u64) {
            return Err(bad);
        }
        let state = self.backend().state();
        // Before the first can be found.
        state
            .keep(frames)
            .map_err(|NoMemory| InsertError::OutOfMemory(addr))?;
        let layout = self.read();
        let mapped = layout.find(addr);
        let vma = mapped.ok_or(InsertError::Unmapped(addr))?;
        let flags = vma.flags();
        if !flags.contains(VmaFlags::PFNMAP) {
            return Err(InsertError::NotForFrames(vma.range()));
        }
        for (index_of, head) in heads.iter().enumerate() {
            let at = addr.wrapping_add((index_of * PAGE) as u64);
            if at < addr || at >= vma.range().end {
                return Err(InsertError::Unmapped(at));
            }
            // SAFETY: F3, F4: the state keeps a handle for as long as its tables.
            let entry = unsafe { Entry::borrowed(head.into(), flags.contains(VmaFlags::SHARED)) };
            let _faulting = state.faults.read();
            // The leaf is the space's own: that stays while the space's lock is held.
            let leaf = state.walk(|| state.tables.own_leaf(at));
            let mut leaf = leaf
                .map_err(|NoMemory| InsertError::OutOfMemory(at))?
                .lock();
            fence(Ordering::SeqCst);
            if !leaf.entry(index(at)).is_none() {
                return Err(InsertError::Occupied(at));
            }
            leaf.replace(index(at), entry);
        }
        Ok(())
    }
}
