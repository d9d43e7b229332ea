//! Situations that other address-space managers got wrong, each generalised to its kind, with the outcome that Linux
//! 6.18 has. The rows (S, M, L, B, X, P) are those of the project's list of field cases.
//!
//! | row | what waits until pages have contents |
//! |---|---|
//! | S4, L1, L3 | the old bytes are still there |
//! | M7 | the pages left behind read as zero, the moved ones as before |
//! | L7 | a copy on write is counted once |
//! | B1 | memory is zero when the heap grows again |
//! | B3 | the child's page is zero, its neighbour isn't |
//! | B4 | zeros behind the end of the file; private copies lost when it shrinks |
//! | B6 | writing after mprotect doesn't write to the zero page |
//!
//! Bad arguments of every call (S6, S7, S9, S11, M4, B5) also stand in the tables of `errno_*.rs`.

#![allow(
    clippy::redundant_closure_for_method_calls,
    clippy::unwrap_used,
    reason = "one shape for errors of many types; a test may panic"
)]

mod common;

#[path = "field_cases/changes.rs"]
mod changes;
#[path = "field_cases/heap_and_advice.rs"]
mod heap_and_advice;
#[path = "field_cases/limits.rs"]
mod limits;
#[path = "field_cases/merging.rs"]
mod merging;
#[path = "field_cases/moves.rs"]
mod moves;
#[path = "field_cases/others.rs"]
mod others;

use std::sync::Arc;

use common::{AT, PAGE, RW};
use vma_core::{
    AddressSpace, Errno, FileKind, FileObject, MapFlags, MapRequest, OpenFile, Prot, RemapFlags,
    RemapRequest, SpaceConfig,
};

const R: Prot = Prot::READ;
const NONE: Prot = Prot::empty();
const RX: Prot = Prot::READ.union(Prot::EXEC);

fn addr(page: u64) -> u64 {
    AT + page * PAGE
}

fn fresh() -> AddressSpace {
    AddressSpace::new(SpaceConfig {
        ipc_lock: true,
        ..SpaceConfig::default()
    })
    .unwrap()
}

fn map(space: &AddressSpace, at: u64, pages: u64, prot: Prot) {
    space
        .map(&MapRequest::anonymous(pages * PAGE, prot).fixed(addr(at)))
        .unwrap();
}

fn object(pages: u64) -> Arc<FileObject> {
    FileObject::builder(FileKind::Regular, "/f")
        .len(pages * PAGE)
        .build()
}

fn map_file(
    space: &AddressSpace,
    file: &Arc<OpenFile>,
    (at, pages): (u64, u64),
    prot: Prot,
    flags: MapFlags,
    offset: u64,
) -> Result<u64, Errno> {
    let request = MapRequest::file(file.clone(), offset * PAGE, pages * PAGE, prot, flags);
    space
        .map(&request.fixed(addr(at)))
        .map_err(|error| error.errno())
}

/// New memory shared with children.
fn map_shared(space: &AddressSpace, at: u64, pages: u64) {
    let request = MapRequest {
        flags: MapFlags::SHARED | MapFlags::ANONYMOUS,
        ..MapRequest::anonymous(pages * PAGE, RW)
    };
    space.map(&request.fixed(addr(at))).unwrap();
}

/// `"0-2 rw-p, 2-4 r--p"`: page numbers relative to the base.
fn layout(space: &AddressSpace) -> String {
    space.check().unwrap();
    let entries = space.maps_entries();
    let line = |entry: &vma_core::MapsEntry| {
        let perms: String = entry.flags.perms().map(char::from).iter().collect();
        format!(
            "{}-{} {perms}",
            (entry.start - AT) / PAGE,
            (entry.end - AT) / PAGE
        )
    };
    entries.iter().map(line).collect::<Vec<_>>().join(", ")
}

/// The same of pieces `(from, to, perms)`, empty ones left out.
fn pieces(expected: &[(u64, u64, &str)]) -> String {
    let line = |(from, to, perms): &(u64, u64, &str)| format!("{from}-{to} {perms}");
    let present = expected.iter().filter(|(from, to, _)| from < to);
    present.map(line).collect::<Vec<_>>().join(", ")
}

fn remap(
    space: &AddressSpace,
    at: u64,
    old: u64,
    new: u64,
    flags: RemapFlags,
    to: u64,
) -> Result<u64, Errno> {
    let request = RemapRequest {
        addr: addr(at),
        old_len: old * PAGE,
        new_len: new * PAGE,
        flags,
        new_addr: to,
    };
    space
        .remap(&request)
        .map(|addr| (addr - AT) / PAGE)
        .map_err(|error| error.errno())
}

fn protect(space: &AddressSpace, at: u64, pages: u64, prot: Prot) -> Result<(), Errno> {
    space
        .protect(addr(at), pages * PAGE, prot)
        .map_err(|error| error.errno())
}

const FIXED: RemapFlags = RemapFlags::MAYMOVE.union(RemapFlags::FIXED);
const KEEP: RemapFlags = RemapFlags::MAYMOVE.union(RemapFlags::DONTUNMAP);
