//! Memory for objects of one size, cut from blocks.
//!
//! One allocation serves a block of objects, which is what makes a bulk build and the growth of a tree cheap, and
//! nodes lie beside nodes, so that a descent touches few pages. A block goes back to the allocator when all of its objects
//! have come back. Objects are handed out and taken back many at a time or one by one, by whoever holds the slab
//! exclusively.
//!
//! ```text
//! block   header (one line) | colour (0 to 5 lines) | object | object | ...
//! ```
//!
//! The colour differs from block to block: else the same line of every node would fall into the same half of the cache's sets.
//!
//! A block's address is a multiple of [`BLOCK`], so that an object finds its header; it is a little smaller than
//! that, so that an allocator which puts a header before what it gives can lay blocks end to end.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use crate::alloc::{free_memory, try_zeroed};

/// Alignment of a block in bytes.
const BLOCK: usize = 8192;
/// Size of a block in bytes.
const BYTES: usize = BLOCK - 64;
const LAYOUT: Layout = match Layout::from_size_align(BYTES, BLOCK) {
    Ok(layout) => layout,
    Err(_) => panic!("the alignment is a power of two"),
};

/// A cache line in bytes.
const LINE: usize = 64;
/// Where the objects of a block may begin, in lines after the header.
const COLOURS: usize = 6;

/// At the start of a block.
#[repr(C, align(64))]
struct Header {
    /// Objects that are here.
    count: usize,
    first: *mut Free,
    /// Neighbours in the list of blocks with an object here.
    previous: *mut Header,
    next: *mut Header,
}

/// What an object holds while it is here.
struct Free {
    next: *mut Free,
}

/// Objects of a `V`'s size and alignment, without content.
pub(super) struct Slab<V> {
    /// A block with at least one object here, the first of a list.
    partial: *mut Header,
    marker: PhantomData<V>,
}

// SAFETY: the blocks that can be reached from a slab are reached through it alone, and hold no `V`.
unsafe impl<V> Send for Slab<V> {}

impl<V> Slab<V> {
    /// Objects per block; none when they are too large or too strictly aligned: then each is an allocation.
    const COUNT: usize = {
        let count = (BYTES - size_of::<Header>() - (COLOURS - 1) * LINE) / size_of::<V>();
        let fits = align_of::<V>() <= align_of::<Header>() && size_of::<V>() >= size_of::<Free>();
        if fits && count >= 8 { count } else { 0 }
    };

    pub(super) const fn new() -> Self {
        const { assert!(size_of::<V>() > 0, "nothing to allocate") };
        Slab {
            partial: ptr::null_mut(),
            marker: PhantomData,
        }
    }

    /// Puts objects into `list`, at least one, unless memory runs out. Their bytes have been set, to whatever.
    pub(super) fn take(&mut self, list: &mut Vec<NonNull<V>>) {
        if list.try_reserve(Self::COUNT.max(1)).is_err() {
            return;
        }
        if Self::COUNT == 0 {
            list.extend(try_zeroed::<V>());
        } else if let Some(block) = NonNull::new(self.partial) {
            self.empty(block, list);
        } else {
            Self::add_block(list);
        }
    }

    /// Everything that is in `block`.
    fn empty(&mut self, block: NonNull<Header>, list: &mut Vec<NonNull<V>>) {
        self.unlink(block);
        let header = block.as_ptr();
        // SAFETY: a live block of ours.
        let mut free = unsafe { (*header).first };
        while let Some(object) = NonNull::new(free) {
            list.push(object.cast());
            // SAFETY: an object that is here holds a `Free`.
            free = unsafe { (*free).next };
        }
        // SAFETY: as above.
        unsafe { (*header).first = ptr::null_mut() };
        // SAFETY: as above.
        unsafe { (*header).count = 0 };
    }

    /// A new block, all of whose objects are handed out; the lowest address comes last.
    #[cold]
    fn add_block(list: &mut Vec<NonNull<V>>) {
        // SAFETY: the layout has a size. Zero bytes are a header without objects.
        let block = unsafe { alloc_zeroed(LAYOUT) };
        if block.is_null() {
            return;
        }
        let colour = block.addr() / BLOCK % COLOURS;
        let start = size_of::<Header>() + colour * LINE;
        for i in (0..Self::COUNT).rev() {
            // SAFETY: within the block, by `COUNT`.
            let object = unsafe { block.add(start + i * size_of::<V>()) };
            list.extend(NonNull::new(object.cast::<V>()));
        }
    }

    /// Takes an object back.
    ///
    /// # Safety
    ///
    /// It came from [`take`](Self::take) of a slab of the same `V`, as the pointer that it is (provenance included),
    /// holds nothing that needs dropping, and isn't used any more. Blocks go with their objects: all of a block's come back
    /// to one slab.
    #[inline(never)]
    pub(super) unsafe fn give(&mut self, object: NonNull<V>) {
        if Self::COUNT == 0 {
            // SAFETY: it came from `try_zeroed`.
            return unsafe { free_memory(object) };
        }
        let header = object
            .as_ptr()
            .map_addr(|address| address & !(BLOCK - 1))
            .cast::<Header>();
        let free = object.as_ptr().cast::<Free>();
        // SAFETY: the block lives as long as one of its objects is handed out.
        let next = unsafe { (*header).first };
        // SAFETY: the object is ours, large enough and aligned, by `COUNT`.
        unsafe { free.write(Free { next }) };
        // SAFETY: as above.
        unsafe { (*header).first = free };
        // SAFETY: as above.
        let count = unsafe { (*header).count } + 1;
        // SAFETY: as above.
        unsafe { (*header).count = count };
        let block = NonNull::new(header).expect("a block isn't at address zero");
        if count == 1 {
            self.link(block);
        }
        if count == Self::COUNT {
            self.unlink(block);
            // SAFETY: allocated with this layout, and nothing of it is in use.
            unsafe { dealloc(header.cast(), LAYOUT) };
        }
    }

    /// Puts a block in front of the list.
    fn link(&mut self, block: NonNull<Header>) {
        let header = block.as_ptr();
        // SAFETY: a live block of ours.
        unsafe { (*header).previous = ptr::null_mut() };
        // SAFETY: as above.
        unsafe { (*header).next = self.partial };
        if let Some(next) = NonNull::new(self.partial) {
            // SAFETY: blocks in the list are live.
            unsafe { (*next.as_ptr()).previous = header };
        }
        self.partial = header;
    }

    /// Takes a block out of the list.
    fn unlink(&mut self, block: NonNull<Header>) {
        let header = block.as_ptr();
        // SAFETY: a live block of ours.
        let previous = unsafe { (*header).previous };
        // SAFETY: as above.
        let next = unsafe { (*header).next };
        if let Some(next) = NonNull::new(next) {
            // SAFETY: blocks in the list are live.
            unsafe { (*next.as_ptr()).previous = previous };
        }
        match NonNull::new(previous) {
            // SAFETY: as above.
            Some(previous) => unsafe { (*previous.as_ptr()).next = next },
            None => self.partial = next,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each object is handed out once, and holds what is written to it.
    fn check<V: Copy + PartialEq + std::fmt::Debug>(make: impl Fn(usize) -> V) {
        let mut slab = Slab::<V>::new();
        let mut own = Vec::new();
        let mut used: Vec<(NonNull<V>, V)> = Vec::new();
        let mut state = 1_usize;
        for i in 0..20_000 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let grow = i % 4000 < 2000;
            if (state >> 33) % 4 < if grow { 3 } else { 1 } {
                if own.is_empty() {
                    slab.take(&mut own);
                }
                let object: NonNull<V> = own.pop().unwrap();
                assert!(object.as_ptr().is_aligned());
                // SAFETY: handed out to us.
                unsafe { object.write(make(i)) };
                used.push((object, make(i)));
            } else if !used.is_empty() {
                let (object, value) = used.swap_remove((state >> 40) % used.len());
                // SAFETY: written above.
                assert_eq!(unsafe { object.read() }, value);
                // SAFETY: from `take`, not used any more.
                unsafe { slab.give(object) };
            }
        }
        for (object, value) in used {
            // SAFETY: written above.
            assert_eq!(unsafe { object.read() }, value);
            // SAFETY: from `take`, not used any more.
            unsafe { slab.give(object) };
        }
        for object in own {
            // SAFETY: from `take`, never used.
            unsafe { slab.give(object) };
        }
        assert!(slab.partial.is_null(), "every block went back");
    }

    #[test]
    fn objects_keep_what_they_hold_and_blocks_go_back() {
        #[derive(Clone, Copy, PartialEq, Debug)]
        #[repr(align(64))]
        struct Line([usize; 8]);
        #[derive(Clone, Copy, PartialEq, Debug)]
        #[repr(align(128))]
        struct Strict(usize);
        check(|i| i);
        check(|i| [i; 11]);
        check(|i| Line([i; 8]));
        check(|i| [i; 1000]);
        check(Strict);
    }
}
