//! The layout as `/proc/PID/maps` shows it.

use std::fmt::{self, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vma_rcu::reclaim::Guard;

use super::{AddressSpace, Inner, ReadGuard, VmaRef};
use crate::anon::AnonId;
use crate::backend::Backend;
use crate::file::OpenFile;
use crate::flags::VmaFlags;

/// What the last column of maps says.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MapsName {
    /// Nothing.
    None,
    /// Path of the file.
    File(Arc<str>),
    /// `[heap]`
    Heap,
    /// `[stack]`
    Stack,
    /// Given by the embedder, such as `[vdso]`.
    Special(Arc<str>),
    /// `[anon:NAME]`
    Anon(Arc<str>),
}

impl fmt::Display for MapsName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MapsName::None => Ok(()),
            MapsName::File(name) | MapsName::Special(name) => {
                // As seq_path does: a line break would break the line.
                for part in name.split_inclusive('\n') {
                    match part.strip_suffix('\n') {
                        Some(part) => write!(f, "{part}\\012")?,
                        None => f.write_str(part)?,
                    }
                }
                Ok(())
            }
            MapsName::Heap => f.write_str("[heap]"),
            MapsName::Stack => f.write_str("[stack]"),
            MapsName::Anon(name) => write!(f, "[anon:{name}]"),
        }
    }
}

/// A line of maps. `Display` gives it in the kernel's form, without the line break.
#[derive(Clone, Debug)]
pub struct MapsEntry {
    /// First byte.
    pub start: u64,
    /// First byte after it.
    pub end: u64,
    /// All attributes; [`VmaFlags::perms`] gives the column of maps.
    pub flags: VmaFlags,
    /// Bytes into the file, 0 without one.
    pub offset: u64,
    /// Device of the file, (major, minor).
    pub device: (u32, u32),
    /// Inode of the file.
    pub inode: u64,
    /// Last column.
    pub name: MapsName,
    /// What it maps.
    pub file: Option<Arc<OpenFile>>,
    /// Identity of its private pages; maps doesn't show it.
    pub anon: AnonId,
    /// Page offset as merging sees it; maps doesn't show that of anonymous memory.
    pub pgoff: u64,
}

impl MapsEntry {
    fn new(vma: VmaRef<'_>, marks: Marks, page_size: u64) -> Self {
        let file = vma.file().cloned();
        let (device, inode) = file.as_ref().map_or(((0, 0), 0), |file| {
            (file.object().device(), file.object().inode())
        });
        MapsEntry {
            start: vma.start(),
            end: vma.end(),
            flags: vma.flags(),
            offset: vma.shown_pgoff().wrapping_mul(page_size),
            device,
            inode,
            name: name_of(vma, marks),
            file,
            anon: vma.anon(),
            pgoff: vma.vma().pgoff(),
        }
    }
}

/// Where heap and stack are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Marks {
    start_brk: u64,
    brk: u64,
    start_stack: Option<u64>,
}

impl Marks {
    pub(super) fn of(inner: &Inner) -> Self {
        Marks {
            start_brk: inner.start_brk,
            brk: inner.brk,
            start_stack: inner.start_stack,
        }
    }
}

/// The same for who hasn't the lock. Relaxed, and stored with the exclusive side held: each word is right at its time, as what is
/// printed without the lock is.
#[derive(Debug)]
pub(super) struct Landmarks {
    start_brk: AtomicU64,
    brk: AtomicU64,
    /// [`u64::MAX`]: none.
    start_stack: AtomicU64,
}

impl Default for Landmarks {
    fn default() -> Self {
        Landmarks {
            start_brk: AtomicU64::new(0),
            brk: AtomicU64::new(0),
            start_stack: AtomicU64::new(u64::MAX),
        }
    }
}

impl Landmarks {
    /// Call it with the exclusive side held, after a change.
    pub(super) fn follow(&self, marks: Marks) {
        self.start_brk.store(marks.start_brk, Ordering::Relaxed);
        self.brk.store(marks.brk, Ordering::Relaxed);
        let stack = marks.start_stack.unwrap_or(u64::MAX);
        self.start_stack.store(stack, Ordering::Relaxed);
    }

    fn get(&self) -> Marks {
        let stack = self.start_stack.load(Ordering::Relaxed);
        Marks {
            start_brk: self.start_brk.load(Ordering::Relaxed),
            brk: self.brk.load(Ordering::Relaxed),
            start_stack: (stack != u64::MAX).then_some(stack),
        }
    }
}

/// Source: `get_vma_name()` in `fs/proc/task_mmu.c`.
fn name_of(vma: VmaRef<'_>, marks: Marks) -> MapsName {
    if let Some(name) = vma.vma().special_name() {
        return MapsName::Special(name.clone());
    }
    if let Some(file) = vma.file() {
        return MapsName::File(file.object().name());
    }
    if vma.start() < marks.brk && vma.end() > marks.start_brk {
        return MapsName::Heap;
    }
    if marks
        .start_stack
        .is_some_and(|stack| vma.start() <= stack && vma.end() >= stack)
    {
        return MapsName::Stack;
    }
    match vma.vma().anon_name() {
        Some(name) => MapsName::Anon(name.clone()),
        None => MapsName::None,
    }
}

/// Column where the name begins.
const NAME_COLUMN: usize = 73;

impl fmt::Display for MapsEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let perms: String = self.flags.perms().map(char::from).iter().collect();
        let mut line = String::with_capacity(NAME_COLUMN);
        let (major, minor) = self.device;
        write!(
            line,
            "{:08x}-{:08x} {perms} {:08x} {major:02x}:{minor:02x} {} ",
            self.start, self.end, self.offset, self.inode
        )?;
        if self.name != MapsName::None {
            while line.len() < NAME_COLUMN {
                line.push(' ');
            }
            write!(line, "{}", self.name)?;
        }
        f.write_str(&line)
    }
}

impl<B: Backend> ReadGuard<'_, B> {
    /// The layout, line by line.
    pub fn maps_entries(&self) -> impl Iterator<Item = MapsEntry> {
        let page_size = self.space.config.load().page_size;
        self.iter(0)
            .map(move |vma| MapsEntry::new(vma, Marks::of(self.inner()), page_size))
    }

    /// The layout as the text of `/proc/PID/maps`.
    pub fn maps(&self) -> String {
        let mut text = String::new();
        for entry in self.maps_entries() {
            text.push_str(&entry.to_string());
            text.push('\n');
        }
        text
    }
}

impl<B: Backend> AddressSpace<B> {
    /// The layout as the text of `/proc/PID/maps`, of one instant. `[vsyscall]`, which is no mapping of the
    /// space, isn't in it.
    ///
    /// ```
    /// use vma_core::{AddressSpace, MapRequest, Prot};
    /// let space = AddressSpace::default();
    /// space.map(&MapRequest::anonymous(4096, Prot::READ).fixed(0x10000))?;
    /// assert_eq!(space.maps(), "00010000-00011000 r--p 00000000 00:00 0 \n");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn maps(&self) -> String {
        self.read().maps()
    }

    /// The layout of one instant, line by line.
    pub fn maps_entries(&self) -> Vec<MapsEntry> {
        self.read().maps_entries().collect()
    }

    /// The layout as the text of `/proc/PID/maps`, without the lock: each line was right at an instant of the call, and no line is torn, but
    /// lines need not be of the same instant.
    pub fn maps_under(&self, guard: &Guard<'_>) -> String {
        let mut text = String::new();
        for entry in self.maps_entries_under(0, guard) {
            let _ = writeln!(text, "{entry}");
        }
        text
    }

    /// The same line by line, from the first mapping that ends above `from`.
    pub fn maps_entries_under<'g>(
        &'g self,
        from: u64,
        guard: &'g Guard<'_>,
    ) -> impl Iterator<Item = MapsEntry> + 'g {
        let page_size = self.core.pages.bytes(1);
        let entry = move |vma| MapsEntry::new(vma, self.landmarks.get(), page_size);
        self.iter(from, guard).map(entry)
    }
}
