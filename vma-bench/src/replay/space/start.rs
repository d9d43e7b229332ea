//! The layout that a program begins with: what execve mapped, taken from a map.

use std::{collections::HashMap, sync::Arc};

use vma_core::{Access, AddressSpace, Layout, SpaceConfig, SpecialMapping, VmaFlags};

use super::{OpenFiles, Space};
use crate::replay::{
    history::EverWritable,
    maps::MapLine,
    model::files::{DescriptionId, Files},
    op::OpFile,
};

/// Where the bottom-up search begins: a third of the address space.
const LEGACY_BASE: u64 = 0x2aaa_aaaa_b000;
/// How far above it the mappings of a program lie that begins bottom-up.
const LEGACY_SPAN: u64 = 1 << 36;
const PAGE: u64 = 4096;

/// What a program begins with.
#[derive(Debug)]
pub struct StartOf<'a> {
    /// The map when its execve was done.
    pub map: &'a [MapLine],
    /// The start of its heap, where the log shows it.
    pub brk: Option<u64>,
    /// Soft limits that were set before, by resource.
    pub limits: HashMap<u64, u64>,
}

impl Space {
    /// The space of a program after its execve. `None` if the map can't be one of this kernel's.
    pub fn begin(start: &StartOf<'_>, files: &mut Files, open: &OpenFiles) -> Option<Self> {
        let inner = AddressSpace::new(config(start)).ok()?;
        let mut space = Self {
            inner,
            history: EverWritable::default(),
            files: open.clone(),
            rings: Vec::new(),
        };
        for line in start.map.iter().filter(|l| l.name != "[vsyscall]") {
            space.insert(line, files)?;
        }
        let brk = start.brk.unwrap_or_else(|| heap_start(start.map));
        let heap = start.map.iter().filter(|l| l.name == "[heap]");
        space.inner.set_brk(
            heap.clone().map(|l| l.start).min().unwrap_or(brk),
            heap.map(|l| l.end).max().unwrap_or(brk),
        );
        for (&resource, &soft) in &start.limits {
            space.set_limit(resource, soft);
        }
        Some(space)
    }

    fn insert(&mut self, line: &MapLine, files: &mut Files) -> Option<()> {
        let file = line.has_file().then(|| files.of_map_line(line));
        let mapping = SpecialMapping {
            start: line.start,
            end: line.end,
            flags: flags_of(line),
            pgoff: file.map(|_| line.offset / PAGE),
            file: file.and_then(|id| self.files.get(as_file(id, files))),
            name: kernel_name(line).map(Arc::from),
            hooks: None,
        };
        self.inner.insert_special(&mapping).ok()?;
        if line.name == "[stack]" {
            let top = line.end - PAGE;
            self.inner.set_stack(top);
            // Arguments and environment are there.
            let _ = self.inner.touch(top, 1, Access::Write);
        }
        if line.may(b'w') && line.may(b'p') {
            self.history.add(line.start, line.end);
        }
        Some(())
    }
}

fn as_file(id: DescriptionId, files: &Files) -> OpFile {
    let d = files.get(id);
    OpFile::Open {
        id,
        inode: files.inode(id),
        kind: d.kind,
        readable: d.readable,
        writable: d.writable,
    }
}

/// The name of a mapping of the kernel's own; `[heap]` and `[stack]` are ordinary memory.
fn kernel_name(line: &MapLine) -> Option<&str> {
    let name = line.name.as_str();
    let own = !line.has_file() && name.starts_with('[') && name != "[heap]" && name != "[stack]";
    own.then_some(name)
}

/// The flags that such a line has after an execve: a map doesn't show them, the kernel always sets them so.
fn flags_of(line: &MapLine) -> VmaFlags {
    let mut access = VmaFlags::empty();
    for (letter, flag) in [
        (b'r', VmaFlags::READ),
        (b'w', VmaFlags::WRITE),
        (b'x', VmaFlags::EXEC),
    ] {
        if line.may(letter) {
            access |= flag;
        }
    }
    if line.name.starts_with("[vvar") {
        return VmaFlags::READ
            | VmaFlags::MAYREAD
            | VmaFlags::PFNMAP
            | VmaFlags::IO
            | VmaFlags::DONTEXPAND
            | VmaFlags::DONTDUMP;
    }
    let mut flags = access | VmaFlags::MAY;
    match line.name.as_str() {
        "[vdso]" => flags |= VmaFlags::DONTEXPAND,
        "[stack]" => flags |= VmaFlags::GROWSDOWN,
        _ => {}
    }
    if line.may(b's') {
        flags |= VmaFlags::MAYSHARE;
        if line.may(b'w') {
            flags |= VmaFlags::SHARED;
        } else {
            flags -= VmaFlags::MAYWRITE;
        }
    } else if line.may(b'w') {
        flags |= VmaFlags::ACCOUNT;
    }
    flags
}

/// The configuration of the recording machine, and where its kernel placed the loader.
fn config(start: &StartOf<'_>) -> SpaceConfig {
    let mut config = SpaceConfig {
        // Recorded by root.
        ipc_lock: true,
        ..SpaceConfig::default()
    };
    let stack = start
        .map
        .iter()
        .find(|l| l.name == "[stack]")
        .map_or(u64::MAX, |l| l.start);
    let below_stack = || start.map.iter().filter(|l| l.end <= stack);
    // The loader and [vdso] are the first mappings that the kernel places: they end at the base.
    let Some(top) = below_stack()
        .next_back()
        .filter(|l| !is_program(start.map, l))
    else {
        return config;
    };
    if (LEGACY_BASE..LEGACY_BASE + LEGACY_SPAN).contains(&top.start) {
        config.layout = Layout::BottomUp;
    } else {
        config.mmap_base = Some(top.end);
    }
    config
}

/// Whether the line belongs to the program itself, its bss or its heap: all up to the first large gap.
fn is_program(map: &[MapLine], line: &MapLine) -> bool {
    const LARGE: u64 = 1 << 32;
    let end = map
        .windows(2)
        .find(|w| w[1].start - w[0].end > LARGE)
        .map_or(u64::MAX, |w| w[0].end);
    line.end <= end
}

/// Where the heap begins without randomisation: behind the program's last segment.
fn heap_start(map: &[MapLine]) -> u64 {
    map.iter()
        .take_while(|l| is_program(map, l))
        .last()
        .map_or(0, |l| l.end)
}
