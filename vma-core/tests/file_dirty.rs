//! Dirty pages of files: no store and no mark is lost (C16), whatever is done to the mapping; and what is clean may go.

#![allow(clippy::unwrap_used, reason = "tests may")]

#[path = "memory/mod.rs"]
mod memory;
mod random;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use memory::{PAGE, RW, backed, backed_by, map, map_file, space};
use random::stress_time;
use vma_core::paged::{FramePool, Paged};
use vma_core::{
    Access, AccessMode, AddressSpace, Advice, Errno, FileBackend as _, FileIoError, FileKind,
    FileObject, MapFlags, MapRequest, MemFile, MemFileCall, OpenFile, Prot, RemapFlags,
    RemapRequest,
};

/// The word at the beginning of a page, as the backend has it.
fn word(memory: &MemFile, page: u64) -> u64 {
    let mut bytes = [0; 8];
    memory.read(page * PAGE, &mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

#[test]
fn stores_through_shared_mappings_mark_pages_and_nothing_else_does() {
    let (memory, file) = backed(4);
    let object = file.object();
    let space = space(&FramePool::default());
    let shared = map_file(&space, &file, 4, MapFlags::SHARED);
    let private = map_file(&space, &file, 4, MapFlags::PRIVATE);
    let mut cpu = space.accessor();
    for page in 0..4 {
        cpu.load_u8(shared + page * PAGE).unwrap();
        cpu.store_u8(private + page * PAGE, 1).unwrap();
    }
    space
        .advise(shared, 4 * PAGE, Advice::POPULATE_READ)
        .unwrap();
    assert_eq!(object.dirty_pages(), 0);
    cpu.store_u8(shared, 50).unwrap();
    cpu.fetch_add_u64(shared + PAGE, 1).unwrap();
    assert_eq!(object.dirty_pages(), 2);
    space.touch(shared + 2 * PAGE, PAGE, Access::Write).unwrap();
    assert_eq!(object.clean_range(0..4), [0, 1, 2]);
    assert_eq!(object.dirty_pages(), 0);
    cpu.write(shared + PAGE - 1, &[1, 2]).unwrap();
    cpu.copy(private, shared + 3 * PAGE, 8).unwrap();
    assert_eq!(object.clean_range(1..4), [1, 3]);
    assert_eq!(object.clean_range(0..u64::MAX), [0]);
    assert_eq!(memory.calls(MemFileCall::Write), 0);
}

/// What is asked for works without a backend; and what isn't costs nothing.
#[test]
fn a_file_without_a_backend_has_marks_if_it_is_told() {
    let space = space(&FramePool::default());
    for tracked in [false, true] {
        let object = FileObject::builder(FileKind::Shmem, "f")
            .len(2 * PAGE)
            .track_dirty(tracked)
            .build();
        let file = OpenFile::new(object.clone(), AccessMode::ReadWrite);
        let at = map_file(&space, &file, 2, MapFlags::SHARED);
        let mut cpu = space.accessor();
        cpu.load_u8(at).unwrap();
        cpu.store_u8(at, 1).unwrap();
        assert_eq!(object.dirty_pages(), usize::from(tracked));
        assert_eq!(object.write_protect_range(0..2), 1);
        cpu.store_u8(at, 2).unwrap();
        object.write_at(PAGE, &[1]).unwrap();
        assert_eq!(object.clean_range(0..2).len(), 2 * usize::from(tracked));
        cpu.store_u8(at, 3).unwrap();
        assert_eq!(object.evict(0..2), 0, "it's nowhere else");
        object.punch_hole(0, PAGE).unwrap();
        assert_eq!(object.dirty_pages(), 0);
        assert_eq!(object.sync(), Ok(()));
    }
}

#[test]
fn a_mark_stays_whatever_becomes_of_the_mapping() {
    type Step = fn(&AddressSpace<Paged>, u64);
    let steps: [(&str, Step); 6] = [
        ("munmap", |space, at| space.unmap(at, 4 * PAGE).unwrap()),
        ("mprotect", |space, at| {
            space.protect(at, 4 * PAGE, Prot::READ).unwrap();
        }),
        ("discarding", |space, at| {
            space.advise(at, 4 * PAGE, Advice::DONTNEED).unwrap();
        }),
        ("mremap", |space, at| {
            let to = map(space, 4);
            let request = RemapRequest {
                addr: at,
                old_len: 4 * PAGE,
                new_len: 4 * PAGE,
                flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
                new_addr: to,
            };
            assert_eq!(space.remap(&request), Ok(to));
            // Stores at the new place are marked as well.
            let file = space.read().find(to).unwrap().vma().file().cloned();
            let object = file.unwrap().object().clone();
            assert_eq!(object.clean_range(0..4), [1]);
            space.accessor().store_u8(to + PAGE + 1, 50).unwrap();
        }),
        ("dup", |space, at| {
            let child = space.dup().unwrap();
            space.unmap(at, 4 * PAGE).unwrap();
            child.accessor().store_u8(at + PAGE + 1, 50).unwrap();
        }),
        ("mapping over it", |space, at| {
            memory::map_at(space, at, 4);
        }),
    ];
    for (name, step) in steps {
        let (memory, file) = backed(4);
        let space = space(&FramePool::default());
        let at = map_file(&space, &file, 4, MapFlags::SHARED);
        let mut cpu = space.accessor();
        cpu.load_u8(at + PAGE).unwrap();
        cpu.store_u8(at + PAGE, 50).unwrap();
        drop(cpu);
        step(&space, at);
        assert_eq!(file.object().dirty_pages(), 1, "{name}");
        file.sync().unwrap();
        assert_eq!(memory.bytes()[PAGE as usize], 50, "{name}");
        assert_eq!(file.object().dirty_pages(), 0, "{name}");
        memory::check(&space);
    }
}

/// After a clean every mapping of every space faults first: split ones, moved ones, a child's.
#[test]
fn after_a_sync_stores_mark_anew_in_all_spaces() {
    let (memory, file) = backed(8);
    let object = file.object().clone();
    let pool = FramePool::default();
    let (one, other) = (space(&pool), space(&pool));
    let at = map_file(&one, &file, 8, MapFlags::SHARED);
    let there = map_file(&other, &file, 8, MapFlags::SHARED);
    one.protect(at + 4 * PAGE, PAGE, Prot::READ).unwrap();
    let child = one.dup().unwrap();
    let (mut a, mut b, mut c) = (one.accessor(), other.accessor(), child.accessor());
    for round in 1..4_u64 {
        for page in [0, 2, 3, 5, 7] {
            a.store_u64(at + page * PAGE, round).unwrap();
            b.store_u64(there + page * PAGE + 8, round).unwrap();
            c.store_u64(at + page * PAGE + 16, round).unwrap();
        }
        assert_eq!(object.dirty_pages(), 5);
        object.sync().unwrap();
        assert_eq!(object.dirty_pages(), 0);
        for page in [0, 2, 3, 5, 7] {
            assert_eq!(word(&memory, page), round);
        }
        // Each of them alone.
        a.store_u64(at + 2 * PAGE, 100 + round).unwrap();
        assert_eq!(object.clean_range(0..8), [2]);
        b.store_u64(there + 2 * PAGE, 200 + round).unwrap();
        assert_eq!(object.clean_range(0..8), [2]);
        c.store_u64(at + 2 * PAGE, 300 + round).unwrap();
        assert_eq!(object.clean_range(0..8), [2]);
    }
    // Runs were written as such.
    assert_eq!(memory.calls(MemFileCall::Write), 3 * 4);
    assert_eq!(memory.calls(MemFileCall::Sync), 3);
}

#[test]
fn a_range_is_synced_and_the_rest_stays_dirty() {
    let (memory, file) = backed(200);
    let space = space(&FramePool::default());
    let at = map_file(&space, &file, 200, MapFlags::SHARED);
    let mut cpu = space.accessor();
    for page in 0..200 {
        cpu.store_u64(at + page * PAGE, 1000 + page).unwrap();
    }
    file.sync_range(50 * PAGE + 1, 99 * PAGE).unwrap();
    assert_eq!(file.object().dirty_pages(), 100);
    assert_eq!([word(&memory, 50), word(&memory, 149)], [1050, 1149]);
    assert!(word(&memory, 49) != 1049 && word(&memory, 150) != 1150);
    file.sync().unwrap();
    for page in 0..200 {
        assert_eq!(word(&memory, page), 1000 + page);
    }
}

#[test]
fn what_cannot_be_written_stays_dirty_and_each_descriptor_hears_of_it_once() {
    let (memory, file) = backed(4);
    let object = file.object().clone();
    let other = OpenFile::new(object.clone(), AccessMode::Read);
    let space = space(&FramePool::default());
    let at = map_file(&space, &file, 4, MapFlags::SHARED);
    let mut cpu = space.accessor();
    cpu.store_u8(at, 50).unwrap();
    cpu.store_u8(at + 2 * PAGE, 51).unwrap();
    memory.fail_next(MemFileCall::Write, Errno::EIO);
    let error = file.sync().unwrap_err();
    assert_eq!(
        (error, error.errno()),
        (FileIoError::WriteFailed(Errno::EIO), Errno::EIO)
    );
    assert_eq!(object.dirty_pages(), 1, "the other one was written");
    assert_eq!(memory.bytes()[2 * PAGE as usize], 51);
    // The other descriptor has not heard of it, nor has who syncs the object.
    assert_eq!(other.sync(), Err(FileIoError::WriteFailed(Errno::EIO)));
    assert_eq!(memory.bytes()[0], 50, "written all the same");
    assert_eq!(other.sync(), Ok(()));
    assert_eq!(file.sync(), Ok(()));
    assert_eq!(object.sync(), Err(FileIoError::WriteFailed(Errno::EIO)));
    assert_eq!(object.sync(), Ok(()));
    // Who opens it now hears of later errors only.
    let late = OpenFile::new(object.clone(), AccessMode::Read);
    assert_eq!(late.sync(), Ok(()));
    // An error that nobody has heard of yet is for who comes next.
    cpu.store_u8(at, 52).unwrap();
    memory.fail_next(MemFileCall::Write, Errno::ENOSPC);
    let dropped = OpenFile::new(object.clone(), AccessMode::Read);
    assert!(dropped.sync().is_err());
    memory.fail_next(MemFileCall::Sync, Errno::EIO);
    assert_eq!(dropped.sync(), Err(FileIoError::SyncFailed(Errno::EIO)));
    assert_eq!(late.sync(), Err(FileIoError::WriteFailed(Errno::ENOSPC)));
}

#[test]
fn a_file_that_nobody_has_any_more_is_written_back() {
    let memory = Arc::new(MemFile::new(&[1; 3 * PAGE as usize]));
    let object = backed_by(memory.clone(), 3 * PAGE);
    let file = OpenFile::new(object, AccessMode::ReadWrite);
    let space = space(&FramePool::default());
    let at = map_file(&space, &file, 3, MapFlags::SHARED);
    space.accessor().store_u8(at + PAGE, 50).unwrap();
    file.write_at(0, &[51]).unwrap();
    drop(file);
    assert_eq!(memory.bytes()[0], 1);
    drop(space);
    assert_eq!(memory.bytes()[0], 51);
    assert_eq!(memory.bytes()[PAGE as usize], 50);
}

/// [F1] A page that several mappings show leaves all of them before its frame goes.
#[test]
fn clean_pages_are_evicted_from_all_mappings_that_show_them() {
    let pool = FramePool::default();
    let memory = Arc::new(MemFile::new(&vec![7; 8 * PAGE as usize]));
    let object = FileObject::builder(FileKind::Regular, "f")
        .len(8 * PAGE)
        .frames(Arc::new(pool.clone()))
        .backend(memory.clone())
        .build();
    let file = OpenFile::new(object.clone(), AccessMode::ReadWrite);
    let (one, other) = (space(&pool), space(&pool));
    let at = map_file(&one, &file, 8, MapFlags::SHARED);
    let twice = map_file(&one, &file, 8, MapFlags::SHARED);
    let there = map_file(&other, &file, 8, MapFlags::PRIVATE);
    // Split into siblings.
    for page in [1, 3, 5] {
        one.protect(at + page * PAGE, PAGE, Prot::READ).unwrap();
    }
    let (mut a, mut b) = (one.accessor(), other.accessor());
    for page in 0..8 {
        for start in [at, twice] {
            assert_eq!(a.load_u8(start + page * PAGE), Ok(7));
        }
        assert_eq!(b.load_u8(there + page * PAGE), Ok(7));
    }
    a.store_u8(at + 2 * PAGE, 50).unwrap();
    b.store_u8(there + 6 * PAGE, 60).unwrap();
    let pin = a.pin_page(twice + 4 * PAGE, Access::Read).unwrap();
    assert_eq!(
        object.evict(0..u64::MAX),
        6,
        "all but a dirty and a pinned one"
    );
    assert_eq!(object.resident_pages(), 2);
    assert_eq!(pool.stats().used, 3, "these, and a private copy");
    // They are read again, and found as they are now.
    memory.write(0, &[8; PAGE as usize]).unwrap();
    assert_eq!(a.load_u8(at), Ok(8));
    assert_eq!(b.load_u8(there), Ok(8));
    assert_eq!(b.load_u8(there + 6 * PAGE), Ok(60));
    assert_eq!(a.load_u8(twice + 2 * PAGE), Ok(50));
    let mut byte = [0];
    pin.read(0, &mut byte);
    assert_eq!(byte, [7]);
    drop(pin);
    object.sync().unwrap();
    assert_eq!(object.evict(0..8), 3);
    assert_eq!(a.load_u8(twice + 2 * PAGE), Ok(50));
    memory::check(&one);
    memory::check(&other);
}

#[test]
fn pages_leave_mappings_and_stay_in_the_cache() {
    let (memory, file) = backed(4);
    let object = file.object();
    let space = space(&FramePool::default());
    let shared = map_file(&space, &file, 4, MapFlags::SHARED);
    let private = map_file(&space, &file, 4, MapFlags::PRIVATE);
    let mut cpu = space.accessor();
    for copies in [false, true] {
        cpu.store_u8(shared, 50).unwrap();
        cpu.store_u8(private + PAGE, 60).unwrap();
        cpu.load_u8(private).unwrap();
        let before = space.backend().resident();
        object.unmap_range(0..4, copies);
        let resident = space.backend().resident();
        assert_eq!(resident.file, 0);
        assert_eq!(before.anon - resident.anon, u64::from(copies));
        assert_eq!(object.dirty_pages(), 1);
        assert_eq!(cpu.load_u8(private), Ok(50));
        let expected = if copies { 2 } else { 60 };
        assert_eq!(cpu.load_u8(private + PAGE), Ok(expected));
    }
    object.sync().unwrap();
    assert_eq!(memory.bytes()[0], 50);
}

#[test]
fn a_pin_for_stores_leaves_the_page_dirty() {
    let (memory, file) = backed(2);
    let object = file.object().clone();
    let space = space(&FramePool::default());
    let at = map_file(&space, &file, 2, MapFlags::SHARED);
    let mut cpu = space.accessor();
    let pin = cpu.pin_page(at, Access::Write).unwrap();
    let also = pin.clone();
    assert_eq!(object.dirty_pages(), 1);
    object.sync().unwrap();
    assert_eq!(object.evict(0..2), 0);
    // Nobody notices.
    pin.writable().unwrap().write(0, &[50]);
    assert_eq!(object.dirty_pages(), 0);
    drop(pin);
    assert_eq!(object.dirty_pages(), 1);
    object.sync().unwrap();
    assert_eq!(memory.bytes()[0], 50);
    drop(also);
    assert_eq!(object.dirty_pages(), 1);
    // A page that the file has let go of isn't its any more.
    let pin = cpu.pin_page(at + PAGE, Access::Write).unwrap();
    file.punch_hole(PAGE, PAGE).unwrap();
    drop(pin);
    assert_eq!(object.dirty_pages(), 1);
}

struct Stop<'s>(&'s AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// C16: counters in pages of a file, counted up through mappings that come, go, move and change their rights, beside syncs and evictions.
/// A page whose counter is above what it was at a sync is dirty or being written; what a finished store has counted is in the
/// backend after a sync that began later.
#[test]
#[expect(clippy::too_many_lines, reason = "one scenario, five threads")]
fn no_store_is_lost_beside_syncs() {
    const PAGES: u64 = 4;
    const AT: [u64; 2] = [0x5000_0000, 0x3000_0000];
    let memory = Arc::new(MemFile::new(&[0; (PAGES * PAGE) as usize]));
    let object = backed_by(memory.clone(), PAGES * PAGE);
    let file = OpenFile::new(object.clone(), AccessMode::ReadWrite);
    let pool = FramePool::default();
    let spaces = [space(&pool), space(&pool)];
    let counted: Vec<AtomicU64> = (0..2 * PAGES).map(|_| AtomicU64::new(0)).collect();
    let fixed = |addr| MapRequest {
        addr,
        flags: MapFlags::SHARED | MapFlags::FIXED,
        file: Some(file.clone()),
        ..MapRequest::anonymous(PAGES * PAGE, RW)
    };
    for space in &spaces {
        space.map(&fixed(AT[0])).unwrap();
    }
    let end = Instant::now() + stress_time();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        for (writer, space) in spaces.iter().enumerate() {
            let (stop, counted) = (&stop, &counted);
            scope.spawn(move || {
                let mut cpu = space.accessor();
                let mut value = 0;
                while !stop.load(Ordering::Relaxed) {
                    value += 1;
                    let page = value % PAGES;
                    // Wherever it's mapped now, if it is.
                    let stored = AT.iter().any(|at| {
                        let addr = at + page * PAGE + 8 * writer as u64;
                        cpu.store_u64(addr, value).is_ok()
                    });
                    if stored {
                        let which = page * 2 + writer as u64;
                        counted[which as usize].store(value, Ordering::Release);
                    }
                }
            });
        }
        let (space, fixed) = (&spaces[0], &fixed);
        let stop = &stop;
        scope.spawn(move || {
            let mut at = 0;
            let mut round = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                round += 1;
                let here = AT[at];
                match round % 4 {
                    0 => {
                        let request = RemapRequest {
                            addr: here,
                            old_len: PAGES * PAGE,
                            new_len: PAGES * PAGE,
                            flags: RemapFlags::MAYMOVE | RemapFlags::FIXED,
                            new_addr: AT[1 - at],
                        };
                        space.remap(&request).unwrap();
                        at = 1 - at;
                    }
                    1 => {
                        space.protect(here, 2 * PAGE, Prot::READ).unwrap();
                        space.protect(here, 2 * PAGE, RW).unwrap();
                    }
                    2 => space.advise(here, PAGES * PAGE, Advice::DONTNEED).unwrap(),
                    _ => {
                        space.unmap(here, PAGES * PAGE).unwrap();
                        space.map(&fixed(here)).unwrap();
                        drop(space.dup().unwrap());
                    }
                }
            }
        });
        scope.spawn({
            let object = &object;
            move || {
                while !stop.load(Ordering::Relaxed) {
                    object.evict(0..PAGES);
                    std::thread::yield_now();
                }
            }
        });
        while Instant::now() < end {
            let before: Vec<u64> = counted.iter().map(|c| c.load(Ordering::Acquire)).collect();
            object.sync().unwrap();
            let bytes = memory.bytes();
            for (counter, before) in before.into_iter().enumerate() {
                let at = counter / 2 * PAGE as usize + 8 * (counter % 2);
                let there = u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
                assert!(there >= before, "a store was lost: {there} < {before}");
            }
        }
    });
    object.sync().unwrap();
    assert_eq!(object.dirty_pages(), 0);
    let bytes = memory.bytes();
    for (counter, value) in counted.iter().enumerate() {
        let at = counter / 2 * PAGE as usize + 8 * (counter % 2);
        let there = u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
        assert!(there >= value.load(Ordering::Relaxed));
        let mut shown = [0; 8];
        object.read_at(at as u64, &mut shown).unwrap();
        assert_eq!(shown, bytes[at..at + 8], "a changed page that isn't dirty");
    }
    spaces.iter().for_each(memory::check);
}
