//! Memory for objects of one size, cut from blocks.
//!
//! One allocation serves a chunk of blocks of objects, which is what makes a bulk build and the growth of a tree cheap, and
//! nodes lie beside nodes, so that a descent touches few pages. A chunk goes back to the allocator when all of its objects
//! have come back. Objects are handed out and taken back many at a time or one by one, by whoever holds the slab
//! exclusively.
//!
//! ```text
//! chunk   block | block | ...       1 to 4, the more the slab has already; 256 in a large one
//! block   header (one line) | colour (0 to 5 lines) | object | object | ...
//! ```
//!
//! Why chunks: in a heap that has been used an aligned allocation costs microseconds, whatever its size, which is as much as
//! to fill a block. Why small ones first: a small tree should take little memory.
//!
//! Why large ones in the end: they are huge pages where the kernel has some. A tree of 100,000 entries takes more pages of 4 KiB than
//! a processor caches translations for, and a miss costs as much as one of the data caches; in a virtual machine more.
//!
//! The colour of large objects' blocks differs from block to block: else the same line of every node would fall into the same half of
//! the cache's sets.
//!
//! A block's address is a multiple of [`BLOCK`], so that an object finds its header; a chunk is a little smaller than
//! that, so that an allocator which puts a header before what it gives can lay chunks end to end.

use std::alloc::{Layout, alloc, dealloc};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use crate::alloc::{free_memory, try_zeroed};

/// Alignment of a block in bytes.
const BLOCK: usize = 8192;
/// What a block can use of it.
const BYTES: usize = BLOCK - 64;
/// Blocks of a chunk, at most.
const MOST: usize = 4;
/// A slab grows by this part of itself: what a tree takes too much stays in proportion to it.
const GROWTH: usize = 2;

/// Blocks of a chunk that is a huge page of the processor's. A slab of as many grows by them.
const HUGE: usize = if cfg!(test) { 16 } else { (2 << 20) / BLOCK };

const fn layout(size: usize, align: usize) -> Layout {
    match Layout::from_size_align(size, align) {
        Ok(layout) => layout,
        Err(_) => panic!("the alignment is a power of two"),
    }
}

/// Layouts of chunks of 1, 2, ... blocks.
const LAYOUTS: [Layout; MOST] = {
    let mut layouts = [Layout::new::<Header>(); MOST];
    let mut i = 0;
    while i < MOST {
        layouts[i] = layout(i * BLOCK + BYTES, BLOCK);
        i += 1;
    }
    layouts
};

/// That of a chunk of so many.
const fn layout_of(blocks: usize) -> Layout {
    if blocks == HUGE {
        layout(HUGE * BLOCK, HUGE * BLOCK)
    } else {
        LAYOUTS[blocks - 1]
    }
}

/// Asks for a huge page there. Nothing depends on it.
#[cfg(all(target_os = "linux", not(any(loom, shuttle))))]
fn advise_huge(chunk: NonNull<()>) {
    let (start, len) = (chunk.as_ptr().cast(), HUGE * BLOCK);
    // SAFETY: memory of the chunk's alone, whose content this advice leaves as it is.
    let _ = unsafe { rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxHugepage) };
}

#[cfg(not(all(target_os = "linux", not(any(loom, shuttle)))))]
fn advise_huge(_: NonNull<()>) {}

/// A cache line in bytes.
const LINE: usize = 64;

/// At the start of a block.
#[repr(C, align(64))]
struct Header {
    /// Objects that are here.
    count: usize,
    /// A list of them. None in a whole block: its objects have never been handed out.
    first: *mut Free,
    /// Neighbours in the list that the block is in.
    previous: *mut Header,
    next: *mut Header,
    /// The first block of the chunk.
    chunk: *mut Header,
    /// In the first block: blocks of the chunk.
    blocks: usize,
    /// In the first block: blocks of the chunk all of whose objects are here.
    whole: usize,
}

/// What an object holds while it is here.
struct Free {
    next: *mut Free,
}

/// Objects of a `V`'s size and alignment, without content.
pub(super) struct Slab<V> {
    /// Blocks with some objects here and some not, the first of a list.
    partial: *mut Header,
    /// Blocks with all objects here, likewise.
    whole: *mut Header,
    /// Blocks in all.
    blocks: usize,
    marker: PhantomData<V>,
}

// SAFETY: the blocks that can be reached from a slab are reached through it alone, and hold no `V`.
unsafe impl<V> Send for Slab<V> {}

impl<V> Slab<V> {
    /// Where the objects of a block may begin, in lines after the header. Small ones lie in all sets anyway.
    const COLOURS: usize = if size_of::<V>() > 2 * LINE { 6 } else { 1 };

    /// Objects per block; none when they are too large or too strictly aligned: then each is an allocation.
    const COUNT: usize = {
        let count = (BYTES - size_of::<Header>() - (Self::COLOURS - 1) * LINE) / size_of::<V>();
        let fits = align_of::<V>() <= align_of::<Header>() && size_of::<V>() >= size_of::<Free>();
        if fits && count >= 8 { count } else { 0 }
    };

    pub(super) const fn new() -> Self {
        const { assert!(size_of::<V>() > 0, "nothing to allocate") };
        Slab {
            partial: ptr::null_mut(),
            whole: ptr::null_mut(),
            blocks: 0,
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
            return;
        }
        if let Some(block) = NonNull::new(self.partial) {
            unlink(&mut self.partial, block);
            Self::empty(block, list);
            return;
        }
        if self.whole.is_null() {
            self.add_chunk();
        }
        if let Some(block) = NonNull::new(self.whole) {
            self.take_whole(block, list);
        }
    }

    /// Everything that is in `block`, which is in no list.
    fn empty(block: NonNull<Header>, list: &mut Vec<NonNull<V>>) {
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

    /// All objects of a whole block.
    fn take_whole(&mut self, block: NonNull<Header>, list: &mut Vec<NonNull<V>>) {
        unlink(&mut self.whole, block);
        let header = block.as_ptr();
        // SAFETY: a live block of ours.
        let chunk = unsafe { (*header).chunk };
        // SAFETY: as above: the first block of its chunk.
        unsafe { (*chunk).whole -= 1 };
        // SAFETY: as above.
        if unsafe { (*header).first }.is_null() {
            Self::cut(block, list);
        }
        Self::empty(block, list);
    }

    /// The objects of a block that has never been used, zeroed; the lowest address comes last.
    fn cut(block: NonNull<Header>, list: &mut Vec<NonNull<V>>) {
        let colour = block.addr().get() / BLOCK % Self::COLOURS;
        let start = size_of::<Header>() + colour * LINE;
        // SAFETY: within the block, by `COUNT`.
        let first = unsafe { block.as_ptr().byte_add(start) }.cast::<V>();
        // SAFETY: `COUNT` objects are within the block, and nobody uses them.
        unsafe { first.write_bytes(0, Self::COUNT) };
        for i in (0..Self::COUNT).rev() {
            // SAFETY: as above.
            list.extend(NonNull::new(unsafe { first.add(i) }));
        }
    }

    /// A new chunk, all of whose blocks are whole, unless memory runs out.
    #[cold]
    fn add_chunk(&mut self) {
        let blocks = if self.blocks < HUGE {
            (self.blocks / GROWTH).clamp(1, MOST)
        } else {
            HUGE
        };
        // SAFETY: the layout has a size.
        let chunk = unsafe { alloc(layout_of(blocks)) };
        let Some(chunk) = NonNull::new(chunk.cast::<()>()) else {
            return;
        };
        if blocks == HUGE {
            advise_huge(chunk);
        }
        let chunk = chunk.cast::<Header>();
        for i in (0..blocks).rev() {
            // SAFETY: within the chunk.
            let block = unsafe { chunk.byte_add(i * BLOCK) };
            let header = Header {
                count: Self::COUNT,
                first: ptr::null_mut(),
                previous: ptr::null_mut(),
                next: ptr::null_mut(),
                chunk: chunk.as_ptr(),
                blocks,
                whole: blocks,
            };
            // SAFETY: memory for a header, aligned as the chunk is, ours alone.
            unsafe { block.write(header) };
            link(&mut self.whole, block);
        }
        self.blocks += blocks;
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
            link(&mut self.partial, block);
        }
        if count == Self::COUNT {
            unlink(&mut self.partial, block);
            link(&mut self.whole, block);
            self.give_whole(block);
        }
    }

    /// A block has become whole: its chunk may have.
    fn give_whole(&mut self, block: NonNull<Header>) {
        // SAFETY: a live block of ours.
        let chunk = unsafe { (*block.as_ptr()).chunk };
        // SAFETY: as above.
        let blocks = unsafe { (*chunk).blocks };
        // SAFETY: as above.
        let whole = unsafe { (*chunk).whole } + 1;
        // SAFETY: as above.
        unsafe { (*chunk).whole = whole };
        if whole < blocks {
            return;
        }
        for i in 0..blocks {
            // SAFETY: within the chunk.
            let block = unsafe { chunk.byte_add(i * BLOCK) };
            unlink(
                &mut self.whole,
                NonNull::new(block).expect("a block isn't at address zero"),
            );
        }
        self.blocks -= blocks;
        // SAFETY: allocated with this layout, and nothing of it is in use.
        unsafe { dealloc(chunk.cast(), layout_of(blocks)) };
    }
}

/// Puts a block in front of a list.
fn link(list: &mut *mut Header, block: NonNull<Header>) {
    let header = block.as_ptr();
    // SAFETY: a live block of ours.
    unsafe { (*header).previous = ptr::null_mut() };
    // SAFETY: as above.
    unsafe { (*header).next = *list };
    if let Some(next) = NonNull::new(*list) {
        // SAFETY: blocks in the list are live.
        unsafe { (*next.as_ptr()).previous = header };
    }
    *list = header;
}

/// Takes a block out of the list that it's in.
fn unlink(list: &mut *mut Header, block: NonNull<Header>) {
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
        None => *list = next,
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
        assert!(slab.partial.is_null() && slab.whole.is_null());
        assert_eq!(slab.blocks, 0, "every block went back");
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
