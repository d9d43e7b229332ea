//! A naive model: an array of pages, each with all that is known of it. Written from Linux's documentation and from
//! measurements, not from the library; slow and plain on purpose.
//!
//! What pages alone can't tell it takes from the layout before the call: where a mapping ends. Three things it
//! doesn't predict: whether a page is charged and which other pages of a mapping a guard mark spreads to (both follow
//! the history of faults), and the few moves that [`Answer::Unknown`] stands for.

use std::collections::BTreeMap;

use vma_core::VmaFlags;

use crate::call::Call;
use crate::on_space::Outcome;

mod advice;
mod mapping;
mod moving;

/// Where a page's content comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Source {
    Anonymous,
    /// Page of an open file. Each shared anonymous mapping is a file of its own.
    File {
        open_file: usize,
        page: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Page {
    /// All attributes, [`UNPREDICTED`] ones as last seen.
    pub(crate) flags: VmaBits,
    pub(crate) source: Source,
    /// Identity and page offset of private memory that was written. Where the model has one, it stays; where it has none, there
    /// may be one.
    pub(crate) history: Option<History>,
}

pub(crate) type History = (u64, u64);

/// [`VmaFlags`] that can be ordered.
pub(crate) type VmaBits = u64;

/// Follow the history of faults.
pub(crate) const UNPREDICTED: VmaFlags = VmaFlags::ACCOUNT.union(VmaFlags::MAYBE_GUARD);

pub(crate) const EPERM: i32 = 1;
pub(crate) const ENOMEM: i32 = 12;
pub(crate) const EACCES: i32 = 13;
pub(crate) const EFAULT: i32 = 14;
pub(crate) const EBUSY: i32 = 16;
pub(crate) const EEXIST: i32 = 17;
pub(crate) const EINVAL: i32 = 22;
pub(crate) const EOPNOTSUPP: i32 = 95;

/// A descriptor as the calls know it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptor {
    pub(crate) open_file: usize,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// Sealed against future writing.
    pub(crate) sealed: bool,
}

/// What the model says of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    This(Outcome),
    /// Depends on whether mappings have merged.
    Unknown,
}

pub(crate) fn failed(errno: i32) -> Answer {
    Answer::This(Outcome::Failed(errno))
}

pub(crate) const DONE: Answer = Answer::This(Outcome::Done);

/// Calls stop at the first page that refuses.
type Refusal = Result<(), i32>;

pub(crate) struct Model {
    /// Bytes per page.
    pub(crate) page: u64,
    pub(crate) pages: BTreeMap<u64, Page>,
    /// Bytes of each file.
    pub(crate) lengths: BTreeMap<usize, u64>,
    pub(crate) descriptors: [Descriptor; 6],
    /// Lock bits of new mappings.
    pub(crate) default_lock: VmaFlags,
    /// First page and page behind the last of each mapping before the call, less what the call has removed.
    pub(crate) borders: Vec<(u64, u64)>,
    /// Pages that a guard page was put on, by the last call.
    pub(crate) guarded: Vec<u64>,
}

impl Page {
    pub(crate) fn has(&self, flags: VmaFlags) -> bool {
        self.flags & flags.bits() == flags.bits()
    }

    pub(crate) fn has_any(&self, flags: VmaFlags) -> bool {
        self.flags & flags.bits() != 0
    }

    pub(crate) fn set(&mut self, flags: VmaFlags) {
        self.flags |= flags.bits();
    }

    pub(crate) fn clear(&mut self, flags: VmaFlags) {
        self.flags &= !flags.bits();
    }

    pub(crate) fn is_anonymous(&self) -> bool {
        self.source == Source::Anonymous
    }

    /// The page `by` pages further on in whatever it belongs to.
    pub(crate) fn further(&self, by: u64) -> Page {
        let source = match self.source {
            Source::Anonymous => Source::Anonymous,
            Source::File { open_file, page } => Source::File {
                open_file,
                page: page + by,
            },
        };
        let history = self.history.map(|(id, pgoff)| (id, pgoff + by));
        Page {
            source,
            history,
            ..*self
        }
    }
}

impl Model {
    pub(crate) fn is_aligned(&self, bytes: u64) -> bool {
        bytes.is_multiple_of(self.page)
    }

    /// Pages from the one that `at` lies in to the one before `at + len`.
    pub(crate) fn span(&self, at: u64, len: u64) -> (u64, u64) {
        (at / self.page, (at + len).div_ceil(self.page))
    }

    pub(crate) fn any_sealed(&self, from: u64, to: u64) -> bool {
        self.pages
            .range(from..to)
            .any(|(_, page)| page.has(VmaFlags::SEALED))
    }

    pub(crate) fn remove(&mut self, from: u64, to: u64) {
        self.pages.retain(|number, _| !(from..to).contains(number));
        let left = |(start, end): &(u64, u64)| [(*start, *end.min(&from)), (*start.max(&to), *end)];
        self.borders = self
            .borders
            .iter()
            .flat_map(left)
            .filter(|(start, end)| start < end)
            .collect();
    }

    pub(crate) fn is_free(&self, from: u64, to: u64) -> bool {
        from >= to || self.pages.range(from..to).next().is_none()
    }

    /// The mapping that a page lies in.
    pub(crate) fn mapping(&self, page: u64) -> Option<(u64, u64)> {
        self.borders
            .iter()
            .copied()
            .find(|(from, to)| (*from..*to).contains(&page))
    }

    /// Whether the file has the page.
    pub(crate) fn is_backed(&self, page: &Page) -> bool {
        match page.source {
            Source::Anonymous => true,
            Source::File { open_file, page } => page * self.page < self.lengths[&open_file],
        }
    }

    /// Page by page up to the first hole, or the first that refuses.
    pub(crate) fn walk(
        &mut self,
        from: u64,
        to: u64,
        mut visit: impl FnMut(&mut Page) -> Refusal,
    ) -> Refusal {
        for number in from..to {
            visit(self.pages.get_mut(&number).ok_or(ENOMEM)?)?;
        }
        Ok(())
    }

    /// What the call does to the pages, and its result.
    pub(crate) fn apply(&mut self, call: &Call) -> Answer {
        self.guarded.clear();
        match *call {
            Call::Map { .. } => self.map(call),
            Call::Unmap { at, len } => self.unmap(at, len),
            Call::Protect { at, len, prot } => self.protect(at, len, prot),
            Call::Remap { .. } => self.remap(call),
            Call::Advise { at, len, advice } => self.advise(at, len, advice),
            Call::Guard { at, len } => self.guard(at, len),
            Call::Lock { at, len, on_fault } => self.lock(at, len, on_fault),
            Call::Unlock { at, len } => {
                let (from, to) = self.span(at, len);
                answer(self.mark_locked(from, to, VmaFlags::empty()))
            }
            Call::LockAll { flags } => self.lock_all(flags),
            Call::UnlockAll => {
                self.default_lock = VmaFlags::empty();
                self.mark_all_locked(VmaFlags::empty());
                DONE
            }
            Call::Seal { at, len } => self.seal(at, len),
            Call::Sync { at, len, flags } => self.sync(at, len, flags),
            Call::Core { at, len } => {
                if !self.is_aligned(at) {
                    return failed(EINVAL);
                }
                let (from, to) = self.span(at, len);
                answer(self.walk(from, to, |_| Ok(())))
            }
            Call::RemapFile { .. } => self.remap_file(call),
            Call::Touch { at, len, write } => self.touch(at, len, write),
            Call::Truncate { len } => {
                let open_files: Vec<usize> = self.descriptors[..5]
                    .iter()
                    .map(|descriptor| descriptor.open_file)
                    .collect();
                for open_file in open_files {
                    self.lengths.insert(open_file, len);
                }
                DONE
            }
            Call::Fork => {
                self.fork();
                DONE
            }
        }
    }

    /// munmap(2): all or nothing.
    fn unmap(&mut self, at: u64, len: u64) -> Answer {
        if !self.is_aligned(at) || len == 0 {
            return failed(EINVAL);
        }
        let (from, to) = self.span(at, len);
        if self.any_sealed(from, to) {
            return failed(EPERM);
        }
        self.remove(from, to);
        DONE
    }

    /// mprotect(2): the pages before the one that refuses are changed.
    fn protect(&mut self, at: u64, len: u64, prot: u64) -> Answer {
        const GROWSDOWN: u64 = 0x100_0000;
        if !self.is_aligned(at) {
            return failed(EINVAL);
        }
        if len == 0 {
            return DONE;
        }
        let (mut from, to) = self.span(at, len);
        if prot & GROWSDOWN != 0 {
            let Some((start, _)) = self.borders.iter().copied().find(|(_, end)| *end > from) else {
                return failed(ENOMEM);
            };
            if start >= to {
                return failed(ENOMEM);
            }
            if !self.pages[&start].has(VmaFlags::GROWSDOWN) {
                return failed(EINVAL);
            }
            from = start;
        }
        let wanted = VmaFlags::from_bits_retain(prot & 7);
        let allowed = VmaFlags::from_bits_retain(wanted.bits() << 4);
        answer(self.walk(from, to, |page| {
            if !page.has(allowed) {
                return Err(EACCES);
            }
            if page.has(VmaFlags::SEALED) {
                return Err(EPERM);
            }
            page.clear(VmaFlags::ACCESS);
            page.set(wanted);
            Ok(())
        }))
    }

    /// mseal(2): all or nothing.
    fn seal(&mut self, at: u64, len: u64) -> Answer {
        if !self.is_aligned(at) {
            return failed(EINVAL);
        }
        let (from, to) = self.span(at, len);
        if (from..to).any(|number| !self.pages.contains_key(&number)) {
            return failed(ENOMEM);
        }
        answer(self.walk(from, to, |page| {
            page.set(VmaFlags::SEALED);
            Ok(())
        }))
    }

    /// msync(2).
    fn sync(&self, at: u64, len: u64, flags: u64) -> Answer {
        const ASYNC: u64 = 1;
        const INVALIDATE: u64 = 2;
        const SYNC: u64 = 4;
        if !self.is_aligned(at) || flags & (ASYNC | SYNC) == ASYNC | SYNC {
            return failed(EINVAL);
        }
        let (from, to) = self.span(at, len);
        let mut hole = false;
        for number in from..to {
            match self.pages.get(&number) {
                None if flags == ASYNC => return failed(ENOMEM),
                None => hole = true,
                Some(page) if flags & INVALIDATE != 0 && page.has(VmaFlags::LOCKED) => {
                    return failed(EBUSY);
                }
                Some(_) => {}
            }
        }
        if hole { failed(ENOMEM) } else { DONE }
    }

    fn mark_locked(&mut self, from: u64, to: u64, bits: VmaFlags) -> Refusal {
        self.walk(from, to, |page| {
            if !page.has(VmaFlags::DROPPABLE) {
                page.clear(VmaFlags::LOCK_BITS);
                page.set(bits);
            }
            Ok(())
        })
    }

    fn mark_all_locked(&mut self, bits: VmaFlags) {
        let numbers: Vec<u64> = self.pages.keys().copied().collect();
        for number in numbers {
            // It is there.
            let _ = self.mark_locked(number, number + 1, bits);
        }
    }

    /// mlock2(2): marks first, then makes present what can be.
    fn lock(&mut self, at: u64, len: u64, on_fault: bool) -> Answer {
        let (from, to) = self.span(at, len);
        let (from, to) = if len == 0 && self.is_aligned(at) {
            (from, from)
        } else {
            (from, to)
        };
        let bits = if on_fault {
            VmaFlags::LOCK_BITS
        } else {
            VmaFlags::LOCKED
        };
        if let Err(errno) = self.mark_locked(from, to, bits) {
            return failed(errno);
        }
        let present = self.pages.range(from..to).all(|(_, page)| {
            page.has(VmaFlags::LOCKONFAULT)
                || page.has_any(VmaFlags::ACCESS) && self.is_backed(page)
        });
        if present { DONE } else { failed(ENOMEM) }
    }

    fn lock_all(&mut self, flags: u64) -> Answer {
        const CURRENT: u64 = 1;
        const FUTURE: u64 = 2;
        const ONFAULT: u64 = 4;
        if flags == ONFAULT {
            return failed(EINVAL);
        }
        let bits = if flags & ONFAULT != 0 {
            VmaFlags::LOCK_BITS
        } else {
            VmaFlags::LOCKED
        };
        self.default_lock = if flags & FUTURE != 0 {
            bits
        } else {
            VmaFlags::empty()
        };
        if flags & CURRENT != 0 {
            self.mark_all_locked(bits);
        }
        DONE
    }

    /// One access per page; a mapping that grows down may grow.
    fn touch(&mut self, at: u64, len: u64, write: bool) -> Answer {
        let (from, to) = self.span(at, len.max(1));
        for number in from..to {
            if !self.pages.contains_key(&number) {
                self.grow_down(number);
            }
            let allowed = self.pages.get(&number).is_some_and(|page| {
                let access = if write {
                    VmaFlags::WRITE
                } else {
                    VmaFlags::ACCESS
                };
                page.has_any(access) && self.is_backed(page)
            });
            if !allowed {
                return Answer::This(Outcome::Signal);
            }
        }
        DONE
    }

    /// All guard gaps are longer than the zone: only what is inaccessible or grows down itself may lie below.
    fn grow_down(&mut self, to: u64) {
        let above = self
            .pages
            .range(to..)
            .next()
            .map(|(number, page)| (*number, *page));
        let Some((start, page)) = above.filter(|(_, page)| page.has(VmaFlags::GROWSDOWN)) else {
            return;
        };
        let below = self.pages.range(..to).next_back().map(|(_, page)| *page);
        let in_the_way =
            |page: Page| page.has_any(VmaFlags::ACCESS) && !page.has(VmaFlags::GROWSDOWN);
        if below.is_some_and(in_the_way) {
            return;
        }
        for number in to..start {
            let by = start - number;
            let history = page.history.map(|(id, pgoff)| (id, pgoff - by));
            self.pages.insert(number, Page { history, ..page });
        }
    }

    /// Goes on as the child.
    fn fork(&mut self) {
        self.pages.retain(|_, page| !page.has(VmaFlags::DONTCOPY));
        self.default_lock = VmaFlags::empty();
        self.mark_all_locked(VmaFlags::empty());
        for page in self.pages.values_mut() {
            // The child has identities of its own.
            page.history = None;
        }
    }
}

pub(crate) fn answer(result: Refusal) -> Answer {
    match result {
        Ok(()) => DONE,
        Err(errno) => failed(errno),
    }
}
