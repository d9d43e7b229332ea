//! All calls that change a layout, in an address space of 64 pages, against an array of pages that knows no mappings: after each
//! call rights, sources and totals of every page, the error number, and `rangemap`'s idea of where something begins and ends.
#![no_main]

use std::collections::BTreeMap;
use std::sync::Arc;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use rangemap::{RangeMap, RangeSet};
use vma_core::{
    Access, AccessMode, AddressSpace, Advice, Errno, FileKind, FileObject, Limits, LockAllFlags,
    LockFlags, MapFlags, MapRequest, OpenFile, Prot, RemapFlags, RemapRequest, Seals, SpaceConfig,
    Totals, VmaFlags,
};

const PAGE: u64 = 4096;
/// All pages of the address space. The first can't be mapped.
const PAGES: usize = 64;
/// Where the search for room begins, downwards.
const BASE: usize = 56;
const HEAP: usize = 32;
/// Pages kept free below what grows down.
const GAP: usize = 2;
/// Pages of each file.
const FILE: u64 = 20;
/// Follow the history of faults.
const UNPREDICTED: VmaFlags = VmaFlags::ACCOUNT.union(VmaFlags::MAYBE_GUARD);

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Range {
    at: u8,
    pages: u8,
    odd: u8,
}

impl Range {
    /// Few are unaligned or empty, and few reach beyond the end.
    fn bytes(self) -> (u64, u64) {
        let at = u64::from(self.at) % PAGES as u64 * PAGE;
        let len = (u64::from(self.pages) % 13 * PAGE).max(PAGE * u64::from(self.odd != 0));
        match self.odd {
            1 => (at + 8, len),
            2..6 => (at, len - 8),
            _ => (at, len),
        }
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Call {
    Map {
        range: Range,
        prot: u8,
        kind: u8,
        place: u8,
        modifiers: u16,
        file: u8,
        offset: u8,
    },
    Unmap(Range),
    Protect {
        range: Range,
        prot: u8,
    },
    Remap {
        range: Range,
        new: Option<u8>,
        flags: u8,
        to: u8,
    },
    Brk {
        to: u8,
        bytes: u8,
    },
    Advise {
        range: Range,
        advice: u8,
    },
    /// Guard pages installed and taken away again.
    Guard(Range),
    Lock {
        range: Range,
        on_fault: bool,
    },
    Unlock(Range),
    LockAll(u8),
    UnlockAll,
    Seal(Range),
    Touch {
        at: u8,
        write: bool,
    },
    /// Goes on as the child or as the parent.
    Dup {
        child: bool,
    },
}

/// Limits low enough to be met.
#[derive(Arbitrary, Debug)]
struct Tight {
    total: u8,
    locked: u8,
    data: u8,
    mappings: u8,
}

#[derive(Arbitrary, Debug)]
struct Input {
    tight: Option<Tight>,
    calls: Vec<Call>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Page {
    flags: VmaFlags,
    /// Open file and page of it.
    source: Option<(usize, u64)>,
}

impl Page {
    fn has(&self, flags: VmaFlags) -> bool {
        self.flags.contains(flags)
    }

    fn further(self, by: usize) -> Page {
        let source = self.source.map(|(file, page)| (file, page + by as u64));
        Page { source, ..self }
    }

    fn shields(&self) -> bool {
        self.has(VmaFlags::SEALED) && self.source.is_none() && !self.has(VmaFlags::WRITE)
    }
}

type Pages = [Option<Page>; PAGES];
type Answer = Result<Option<usize>, Errno>;

/// What a call must come to.
enum Expected {
    This(Answer),
    /// An error, whichever.
    Failure,
    /// Depends on which mappings have merged: only what holds in general is checked.
    Unknown,
}

impl From<Answer> for Expected {
    fn from(answer: Answer) -> Self {
        Expected::This(answer)
    }
}

fn id(file: &Arc<OpenFile>) -> usize {
    Arc::as_ptr(file).addr()
}

struct Model {
    pages: Pages,
    files: [Arc<OpenFile>; 4],
    /// Pages of each open file.
    lengths: BTreeMap<usize, u64>,
    default_lock: VmaFlags,
    /// In bytes.
    brk: u64,
    /// Limits may refuse what there is room for.
    limited: bool,
    /// Mappings before the call, which are where moves go wrong.
    borders: Vec<(usize, usize)>,
}

impl Model {
    fn any(&self, from: usize, to: usize, flags: VmaFlags) -> bool {
        let mut pages = self.pages.iter().take(to).skip(from).flatten();
        pages.any(|page| page.flags.intersects(flags))
    }

    fn is_free(&self, from: usize, to: usize) -> bool {
        from >= to || to <= PAGES && self.pages[from..to].iter().all(Option::is_none)
    }

    fn remove(&mut self, from: usize, to: usize) {
        for page in self.pages.iter_mut().take(to).skip(from) {
            *page = None;
        }
        let outside = |(start, end): &(usize, usize)| {
            [(*start, from.min(*end)), (to.max(*start), *end)]
                .into_iter()
                .filter(|(start, end)| start < end)
        };
        self.borders = self.borders.iter().flat_map(outside).collect();
    }

    fn fill(&mut self, from: usize, to: usize, first: Page) {
        for number in from..to {
            self.pages[number] = Some(first.further(number - from));
        }
    }

    fn mapping(&self, page: usize) -> Option<(usize, usize)> {
        let mut borders = self.borders.iter().copied();
        borders.find(|(start, end)| (*start..*end).contains(&page))
    }

    /// Page by page to the first hole or refusal.
    fn walk(
        &mut self,
        (from, to): (usize, usize),
        mut visit: impl FnMut(&mut Page) -> Result<(), Errno>,
    ) -> Answer {
        for number in from..to {
            let page = self.pages.get_mut(number).and_then(Option::as_mut);
            visit(page.ok_or(Errno::ENOMEM)?)?;
        }
        Ok(None)
    }

    /// As `walk`, but holes are passed over and reported in the end.
    fn walk_over_holes(
        &mut self,
        (from, to): (usize, usize),
        mut visit: impl FnMut(&mut Page) -> Result<(), Errno>,
    ) -> Answer {
        let mut hole = false;
        for number in from..to {
            match self.pages.get_mut(number).and_then(Option::as_mut) {
                Some(page) => visit(page)?,
                None => hole = true,
            }
        }
        if hole { Err(Errno::ENOMEM) } else { Ok(None) }
    }

    fn is_backed(&self, page: &Page) -> bool {
        page.source
            .is_none_or(|(file, page)| page < self.lengths[&file])
    }

    fn grows(&self) -> bool {
        self.any(0, PAGES, VmaFlags::GROWSDOWN)
    }

    /// Checks where something was placed, or that there was no room.
    fn placed(&self, hint: usize, len: usize, got: Answer, low: bool) -> Answer {
        let exact = !low && !self.grows();
        if exact && hint > 0 && self.is_free(hint, hint + len) {
            return Ok(Some(hint));
        }
        match got {
            Ok(Some(at)) => {
                assert!(at > 0 && self.is_free(at, at + len), "{at} isn't free");
                Ok(Some(at))
            }
            Err(Errno::ENOMEM) => {
                let room = |from: usize, to: usize| {
                    (from..(to + 1).saturating_sub(len)).any(|at| self.is_free(at, at + len))
                };
                assert!(
                    !exact || self.limited || !room(1, BASE) && !room(PAGES.div_ceil(3), PAGES),
                    "there is room"
                );
                got
            }
            // A difference.
            _ => Err(Errno::ENOMEM),
        }
    }

    fn apply(&mut self, call: &Call, request: &Request, got: Answer) -> Expected {
        match (*call, request) {
            (_, Request::Map(request)) => self.map(request, got),
            (_, Request::Remap(request)) => self.remap(request, got),
            (Call::Brk { .. }, &Request::Brk(to)) => self.move_brk(to).into(),
            (_, &Request::Range(at, len)) => self.apply_to_range(call, at, len).into(),
            (Call::LockAll(flags), _) => {
                let flags = u64::from(flags) % 8;
                if flags == 0 || flags == 4 {
                    return Err(Errno::EINVAL).into();
                }
                let bits = if flags & 4 != 0 {
                    VmaFlags::LOCK_BITS
                } else {
                    VmaFlags::LOCKED
                };
                self.default_lock = VmaFlags::empty();
                if flags & 2 != 0 {
                    self.default_lock = bits;
                }
                if flags & 1 != 0 {
                    self.lock_all(bits);
                }
                Ok(None).into()
            }
            (Call::UnlockAll, _) => {
                self.default_lock = VmaFlags::empty();
                self.lock_all(VmaFlags::empty());
                Ok(None).into()
            }
            (Call::Touch { at, write }, _) => self.touch(usize::from(at) % PAGES, write),
            _ => Expected::Unknown,
        }
    }

    /// Kind and attributes of a new mapping.
    fn new_flags(&self, request: &MapRequest) -> Result<VmaFlags, Errno> {
        let flags = request.flags;
        let prot = VmaFlags::from_bits_retain(request.prot.bits());
        let kind = flags.bits() & 0xf;
        let shared = VmaFlags::SHARED | VmaFlags::MAYSHARE;
        let grows = flags.contains(MapFlags::GROWSDOWN);
        let Some(file) = &request.file else {
            return match kind {
                1 if !grows => Ok(VmaFlags::MAY | shared),
                2 if grows => Ok(VmaFlags::MAY | VmaFlags::GROWSDOWN),
                2 => Ok(VmaFlags::MAY),
                8 if !grows && !flags.contains(MapFlags::LOCKED) => Ok(VmaFlags::MAY
                    | VmaFlags::DROPPABLE
                    | VmaFlags::NORESERVE
                    | VmaFlags::WIPEONFORK
                    | VmaFlags::DONTDUMP),
                _ => Err(Errno::EINVAL),
            };
        };
        let mut bits = VmaFlags::MAY;
        if kind == 3 && flags.intersects(MapFlags::SYNC | MapFlags::FIXED_NOREPLACE) {
            return Err(Errno::EOPNOTSUPP);
        }
        match kind {
            1 | 3 if file.mode() == AccessMode::Read => {
                if prot.contains(VmaFlags::WRITE) {
                    return Err(Errno::EACCES);
                }
                bits = (bits - VmaFlags::MAYWRITE) | VmaFlags::MAYSHARE;
            }
            1 | 3 => bits |= shared,
            2 => {}
            _ => return Err(Errno::EINVAL),
        }
        if file.mode() == AccessMode::Write {
            return Err(Errno::EACCES);
        }
        if grows {
            return Err(Errno::EINVAL);
        }
        if id(file) == id(&self.files[3]) && bits.contains(VmaFlags::SHARED) {
            if prot.contains(VmaFlags::WRITE) {
                return Err(Errno::EPERM);
            }
            bits -= VmaFlags::MAYWRITE;
        }
        Ok(bits)
    }

    fn map(&mut self, request: &MapRequest, got: Answer) -> Expected {
        let flags = request.flags;
        if flags.contains(MapFlags::HUGETLB) {
            return Expected::Failure;
        }
        if request.len == 0 {
            return Err(Errno::EINVAL).into();
        }
        let len = request.len.div_ceil(PAGE) as usize;
        let from = (request.addr / PAGE) as usize;
        let fixed = flags.intersects(MapFlags::FIXED | MapFlags::FIXED_NOREPLACE);
        if fixed {
            if request.addr + len as u64 * PAGE > PAGES as u64 * PAGE {
                return Err(Errno::ENOMEM).into();
            }
            if !request.addr.is_multiple_of(PAGE) {
                return Err(Errno::EINVAL).into();
            }
            if from == 0 {
                return Err(Errno::EPERM).into();
            }
        }
        let new = self.new_flags(request);
        let from = if fixed {
            from
        } else {
            let low = flags.contains(MapFlags::BITS_32) || flags.contains(MapFlags::GROWSDOWN);
            match (self.placed(from, len, got, low), new) {
                (Ok(Some(at)), Ok(_)) => at,
                (Err(errno), Ok(_)) => return Err(errno).into(),
                // No room, which comes before what else is wrong.
                (Err(Errno::ENOMEM), _) if got == Err(Errno::ENOMEM) => return got.into(),
                (_, Err(errno)) => return Err(errno).into(),
                (Ok(None), Ok(_)) => return Expected::Failure,
            }
        };
        let to = from + len;
        if flags.contains(MapFlags::FIXED_NOREPLACE) && !self.is_free(from, to) {
            return Err(Errno::EEXIST).into();
        }
        let mut bits = match new {
            Ok(bits) => bits,
            Err(errno) => return Err(errno).into(),
        };
        bits |= VmaFlags::from_bits_retain(request.prot.bits()) | self.default_lock;
        for (flag, bit) in [
            (MapFlags::LOCKED, VmaFlags::LOCKED),
            (MapFlags::NORESERVE, VmaFlags::NORESERVE),
            (MapFlags::STACK, VmaFlags::NOHUGEPAGE),
            (MapFlags::SYNC, VmaFlags::SYNC),
        ] {
            if flags.contains(flag) {
                bits |= bit;
            }
        }
        if bits.contains(VmaFlags::DROPPABLE) {
            bits -= VmaFlags::LOCK_BITS;
        }
        if self.any(from, to, VmaFlags::SEALED) {
            return Err(Errno::EPERM).into();
        }
        let source = match &request.file {
            Some(file) => Some((id(file), request.offset / PAGE)),
            // A file of its own, known by what it is afterwards.
            None if bits.contains(VmaFlags::SHARED) => Some((0, 0)),
            None => None,
        };
        let flags = bits;
        self.fill(from, to, Page { flags, source });
        Ok(Some(from)).into()
    }

    fn apply_to_range(&mut self, call: &Call, at: u64, len: u64) -> Answer {
        let (from, to) = ((at / PAGE) as usize, (at + len).div_ceil(PAGE) as usize);
        let aligned = at.is_multiple_of(PAGE);
        if !aligned && !matches!(call, Call::Lock { .. } | Call::Unlock(_)) {
            return Err(Errno::EINVAL);
        }
        let span = (from, if len == 0 && aligned { from } else { to });
        match *call {
            Call::Unmap(_) if len == 0 || to > PAGES => Err(Errno::EINVAL),
            Call::Unmap(_) if self.any(from, to, VmaFlags::SEALED) => Err(Errno::EPERM),
            Call::Unmap(_) => {
                self.remove(from, to);
                Ok(None)
            }
            Call::Protect { prot, .. } => self.protect(span, u64::from(prot)),
            Call::Advise { advice, .. } => self.advise(span, advice_of(advice).0),
            Call::Guard(_) => self.walk_over_holes(span, |page| {
                if page.shields() {
                    Err(Errno::EPERM)
                } else if page.has(VmaFlags::LOCKED) {
                    Err(Errno::EINVAL)
                } else {
                    Ok(())
                }
            }),
            Call::Lock { on_fault, .. } => {
                let bits = if on_fault {
                    VmaFlags::LOCK_BITS
                } else {
                    VmaFlags::LOCKED
                };
                self.mark_locked(span, bits)?;
                let absent = |page: &Page| {
                    !page.has(VmaFlags::LOCKONFAULT)
                        && !(page.flags.intersects(VmaFlags::ACCESS) && self.is_backed(page))
                };
                if self.pages[span.0..span.1].iter().flatten().any(absent) {
                    return Err(Errno::ENOMEM);
                }
                Ok(None)
            }
            Call::Unlock(_) => self.mark_locked(span, VmaFlags::empty()),
            Call::Seal(_) => {
                let before = self.pages;
                let result = self.walk(span, |page| {
                    page.flags |= VmaFlags::SEALED;
                    Ok(())
                });
                if result.is_err() {
                    self.pages = before;
                }
                result
            }
            _ => unreachable!("{call:?} has no range"),
        }
    }

    fn mark_locked(&mut self, span: (usize, usize), bits: VmaFlags) -> Answer {
        self.walk(span, |page| {
            if !page.has(VmaFlags::DROPPABLE) {
                page.flags = page.flags - VmaFlags::LOCK_BITS | bits;
            }
            Ok(())
        })
    }

    fn lock_all(&mut self, bits: VmaFlags) {
        for page in self.pages.iter_mut().flatten() {
            if !page.has(VmaFlags::DROPPABLE) {
                page.flags = page.flags - VmaFlags::LOCK_BITS | bits;
            }
        }
    }

    fn protect(&mut self, span: (usize, usize), prot: u64) -> Answer {
        let wanted = VmaFlags::from_bits_retain(prot % 8);
        self.walk(span, |page| {
            // The rights to take are four bits above the rights.
            if !page.has(VmaFlags::from_bits_retain(wanted.bits() << 4)) {
                return Err(Errno::EACCES);
            }
            if page.has(VmaFlags::SEALED) {
                return Err(Errno::EPERM);
            }
            page.flags = page.flags - VmaFlags::ACCESS | wanted;
            Ok(())
        })
    }

    fn populate(&self, (from, to): (usize, usize), access: VmaFlags) -> Answer {
        for number in from..to {
            let page = self.pages.get(number).copied().flatten();
            let page = page.ok_or(Errno::ENOMEM)?;
            if !page.has(access) {
                return Err(Errno::EINVAL);
            }
            if !self.is_backed(&page) {
                return Err(Errno::EFAULT);
            }
        }
        Ok(None)
    }

    fn advise(&mut self, span: (usize, usize), advice: i32) -> Answer {
        const DISCARDING: [i32; 6] = [4, 8, 9, 10, 18, 24];
        match advice {
            22 => return self.populate(span, VmaFlags::READ),
            23 => return self.populate(span, VmaFlags::WRITE),
            0..=4 | 8..=21 | 24..=25 => {}
            _ => return Err(Errno::EINVAL),
        }
        let sealed_file = id(&self.files[3]);
        self.walk_over_holes(span, |page| {
            if DISCARDING.contains(&advice) && page.shields() {
                return Err(Errno::EPERM);
            }
            let shared = page.flags.intersects(VmaFlags::SHARED | VmaFlags::MAYSHARE);
            let droppable = page.has(VmaFlags::DROPPABLE);
            let refused = match advice {
                4 | 20 | 21 => page.has(VmaFlags::LOCKED),
                8 => page.has(VmaFlags::LOCKED) || page.source.is_some(),
                9 => page.has(VmaFlags::LOCKED) || page.source.is_none(),
                17 | 19 => droppable,
                18 => shared || page.source.is_some(),
                // No huge page fits in.
                25 => true,
                _ => false,
            };
            if refused {
                return Err(Errno::EINVAL);
            }
            if advice == 9 {
                if !page.has(VmaFlags::SHARED | VmaFlags::MAYWRITE) {
                    return Err(Errno::EACCES);
                }
                if page.source.is_some_and(|(file, _)| file == sealed_file) {
                    return Err(Errno::EPERM);
                }
            }
            let none = VmaFlags::empty();
            let read = VmaFlags::RAND_READ | VmaFlags::SEQ_READ;
            let huge = VmaFlags::HUGEPAGE | VmaFlags::NOHUGEPAGE;
            let (off, on) = match advice {
                0 => (read, none),
                1 => (read, VmaFlags::RAND_READ),
                2 => (read, VmaFlags::SEQ_READ),
                10 => (none, VmaFlags::DONTCOPY),
                11 => (VmaFlags::DONTCOPY, none),
                12 if !shared && !droppable => (none, VmaFlags::MERGEABLE),
                13 => (VmaFlags::MERGEABLE, none),
                14 => (huge, VmaFlags::HUGEPAGE),
                15 => (huge, VmaFlags::NOHUGEPAGE),
                16 => (none, VmaFlags::DONTDUMP),
                17 => (VmaFlags::DONTDUMP, none),
                18 => (none, VmaFlags::WIPEONFORK),
                19 => (VmaFlags::WIPEONFORK, none),
                _ => (none, none),
            };
            page.flags = page.flags - off | on;
            Ok(())
        })
    }

    /// brk(2) never fails, it stays where it is.
    fn move_brk(&mut self, to: u64) -> Answer {
        if to < HEAP as u64 * PAGE {
            return Err(Errno::ENOMEM);
        }
        let (old, new) = (self.brk.div_ceil(PAGE) as usize, to.div_ceil(PAGE) as usize);
        if new < old {
            if self.is_free(new, old) || self.any(new, old, VmaFlags::SEALED) {
                return Err(Errno::ENOMEM);
            }
            self.remove(new, old);
        }
        if new > old {
            let next = (old..PAGES).find(|number| self.pages[*number].is_some());
            let bound = next.map(|next| {
                let page = self.pages[next].expect("it was found");
                // What begins below `old` has no gap that matters: it's in the way itself.
                next - if page.has(VmaFlags::GROWSDOWN) {
                    GAP
                } else {
                    0
                }
            });
            if new > PAGES || bound.is_some_and(|bound| new + 1 > bound) {
                return Err(Errno::ENOMEM);
            }
            let flags = VmaFlags::MAY | VmaFlags::READ | VmaFlags::WRITE | self.default_lock;
            self.fill(
                old,
                new,
                Page {
                    flags,
                    source: None,
                },
            );
        }
        self.brk = to;
        Ok(None)
    }

    /// Pages stay, unless what grows down grows down to it.
    fn touch(&mut self, at: usize, write: bool) -> Expected {
        let access = if write {
            VmaFlags::WRITE
        } else {
            VmaFlags::ACCESS
        };
        if let Some(page) = self.pages[at] {
            if page.flags.intersects(access) && self.is_backed(&page) {
                return Ok(None).into();
            }
            return Expected::Failure;
        }
        let above = (at..PAGES).find(|number| self.pages[*number].is_some());
        let Some(start) = above.filter(|above| self.any(*above, above + 1, VmaFlags::GROWSDOWN))
        else {
            return Expected::Failure;
        };
        let page = self.pages[start].expect("it was found");
        let in_the_way =
            |page: &Page| page.flags.intersects(VmaFlags::ACCESS) && !page.has(VmaFlags::GROWSDOWN);
        let gap = at.saturating_sub(GAP);
        let near = self.pages[gap..at].iter().flatten().next_back();
        let grown = at > 0 && !near.is_some_and(in_the_way);
        if !grown {
            return Expected::Failure;
        }
        self.fill(at, start, page);
        if page.flags.intersects(access) {
            Ok(None).into()
        } else {
            Expected::Failure
        }
    }

    fn remap(&mut self, request: &RemapRequest, got: Answer) -> Expected {
        let pages = |bytes: u64| bytes.div_ceil(PAGE) as usize;
        let (from, to) = (
            (request.addr / PAGE) as usize,
            (request.new_addr / PAGE) as usize,
        );
        let (old, new) = (pages(request.old_len), pages(request.new_len));
        let anywhere = request.flags.contains(RemapFlags::MAYMOVE);
        let fixed = request.flags.contains(RemapFlags::FIXED);
        let keep = request.flags.contains(RemapFlags::DONTUNMAP);
        let invalid = !request.addr.is_multiple_of(PAGE)
            || new == 0
            || (fixed || keep)
                && (!anywhere
                    || keep && old != new
                    || to + new > PAGES
                    || from < to + new && to < from + old);
        if invalid {
            return Err(Errno::EINVAL).into();
        }
        if fixed && old == new {
            return self.move_all(from, old, to, keep);
        }
        let Some((_, end)) = self.mapping(from) else {
            return Err(Errno::EFAULT).into();
        };
        let first = self.pages[from].expect("it is mapped");
        if first.has(VmaFlags::SEALED) {
            return Err(Errno::EPERM).into();
        }
        if old == 0 && !first.has(VmaFlags::MAYSHARE) {
            return Err(Errno::EINVAL).into();
        }
        if fixed || keep {
            return self.move_one((from, old, end), (to, new), fixed, keep, got);
        }
        if new < old && self.any(from + new, from + old, VmaFlags::SEALED) {
            return Err(Errno::EPERM).into();
        }
        if new < old && from + old > PAGES {
            return Err(Errno::EINVAL).into();
        }
        if new <= old {
            self.remove(from + new, from + old);
            return Ok(Some(from)).into();
        }
        if from + old > end {
            return Err(Errno::EFAULT).into();
        }
        if from + old == end && self.is_free(end, from + new) {
            self.fill(from, from + new, first);
            return Ok(Some(from)).into();
        }
        if !anywhere {
            return Err(Errno::ENOMEM).into();
        }
        match self.placed(0, new, got, false) {
            Ok(Some(at)) => {
                self.remove(from, from + old);
                self.fill(at, at + new, first);
                Ok(Some(at)).into()
            }
            other => other.into(),
        }
    }

    fn move_one(
        &mut self,
        (from, old, end): (usize, usize, usize),
        (to, new): (usize, usize),
        fixed: bool,
        keep: bool,
        got: Answer,
    ) -> Expected {
        if from + old.min(new) > end {
            return Err(Errno::EFAULT).into();
        }
        if from + old > end || to == 0 {
            return Expected::Unknown;
        }
        let mut at = to;
        if fixed {
            if self.any(to, to + new, VmaFlags::SEALED) {
                return Err(Errno::EPERM).into();
            }
            self.remove(to, to + new);
            if self.pages[from].is_none() {
                return Err(Errno::EFAULT).into();
            }
        } else {
            match self.placed(to, new, got, false) {
                Ok(Some(found)) => at = found,
                other => return other.into(),
            }
        }
        let first = self.pages[from].expect("it is mapped");
        if keep {
            if !self.leave(from, (at, at + new)) {
                return Expected::Unknown;
            }
        } else {
            self.remove(from, from + old);
        }
        self.fill(at, at + new, first);
        Ok(Some(at)).into()
    }

    /// What stays behind is unlocked, all that is left of its mapping; not known if that has merged with what arrives.
    fn leave(&mut self, from: usize, (to, to_end): (usize, usize)) -> bool {
        let (start, end) = self.mapping(from).expect("it is mapped");
        let locked = self.any(from, from + 1, VmaFlags::LOCKED);
        if locked && (to == end || to_end == start) {
            return false;
        }
        for page in self.pages[start..end].iter_mut().flatten() {
            page.flags -= VmaFlags::LOCK_BITS;
        }
        true
    }

    /// Mapping by mapping, holes keep their distance; those before the one that fails have moved.
    fn move_all(&mut self, from: usize, len: usize, to: usize, keep: bool) -> Expected {
        if self.mapping(from).is_none() {
            return Err(Errno::EFAULT).into();
        }
        if to == 0 {
            return Expected::Unknown;
        }
        let clipped = |(start, end): &(usize, usize)| ((*start).max(from), (*end).min(from + len));
        let mut pieces: Vec<_> = self.borders.iter().map(clipped).collect();
        pieces.retain(|(start, end)| start < end);
        for (start, end) in pieces {
            let first = self.pages[start].expect("it is mapped");
            let (target, target_end) = (start - from + to, end - from + to);
            if first.has(VmaFlags::SEALED) || self.any(target, target_end, VmaFlags::SEALED) {
                return Err(Errno::EPERM).into();
            }
            self.remove(target, target_end);
            let touches = |(from, to): &(usize, usize)| *from == target_end || *to == target;
            if keep && first.has(VmaFlags::LOCKED) && self.borders.iter().any(touches) {
                return Expected::Unknown;
            }
            if keep {
                if !self.leave(start, (target, target_end)) {
                    return Expected::Unknown;
                }
            } else {
                self.remove(start, end);
            }
            self.fill(target, target_end, first);
        }
        Ok(Some(to)).into()
    }

    fn fork(&mut self) {
        for page in &mut self.pages {
            *page = page.filter(|page| !page.has(VmaFlags::DONTCOPY));
        }
        self.default_lock = VmaFlags::empty();
        for page in self.pages.iter_mut().flatten() {
            page.flags -= VmaFlags::LOCK_BITS;
        }
    }
}

/// A call with its arguments as the space takes them.
enum Request {
    Map(MapRequest),
    Remap(RemapRequest),
    Range(u64, u64),
    Brk(u64),
    None,
}

fn advice_of(advice: u8) -> Advice {
    Advice(i32::from(advice) % 27)
}

impl Request {
    fn new(call: &Call, files: &[Arc<OpenFile>; 4]) -> Self {
        match *call {
            Call::Map {
                range,
                prot,
                kind,
                place,
                modifiers,
                file,
                offset,
            } => {
                const MODIFIERS: [MapFlags; 10] = [
                    MapFlags::LOCKED,
                    MapFlags::NORESERVE,
                    MapFlags::POPULATE,
                    MapFlags::NONBLOCK,
                    MapFlags::STACK,
                    MapFlags::GROWSDOWN,
                    MapFlags::SYNC,
                    MapFlags::BITS_32,
                    MapFlags::HUGETLB,
                    MapFlags::from_bits_retain(0x800_0000),
                ];
                // Two thirds of the mappings have none.
                let mut flags = MapFlags::from_bits_retain(match kind % 16 {
                    0 => 0,
                    1 => 3,
                    2 => 8,
                    3..8 => 1,
                    _ => 2,
                });
                let place = match place % 4 {
                    0 => MapFlags::empty(),
                    1 => MapFlags::FIXED_NOREPLACE,
                    _ => MapFlags::FIXED,
                };
                for (bit, modifier) in MODIFIERS.iter().enumerate() {
                    // A single one, and any set of them when the highest bit is set.
                    let one = modifiers < 256 && usize::from(modifiers) == bit + 1;
                    if one || modifiers >> 15 == 1 && modifiers >> bit & 1 == 1 {
                        flags |= *modifier;
                    }
                }
                let (addr, len) = range.bytes();
                let file = files.get(usize::from(file) % 8).cloned();
                if file.is_none() {
                    flags |= MapFlags::ANONYMOUS;
                }
                Request::Map(MapRequest {
                    addr,
                    flags: flags | place,
                    file,
                    offset: u64::from(offset) % 16 * PAGE,
                    ..MapRequest::anonymous(len, Prot::from_bits_retain(u64::from(prot) % 8))
                })
            }
            Call::Remap {
                range,
                new,
                flags,
                to,
            } => {
                let (addr, len) = range.bytes();
                Request::Remap(RemapRequest {
                    addr,
                    old_len: len,
                    new_len: new.map_or(len, |new| u64::from(new) % 13 * PAGE),
                    flags: RemapFlags::from_bits_retain(u64::from(flags) % 8),
                    new_addr: u64::from(to) % PAGES as u64 * PAGE,
                })
            }
            Call::Brk { to, bytes } => {
                Request::Brk(u64::from(to) % (PAGES as u64 + 2) * PAGE + u64::from(bytes))
            }
            Call::Unmap(range)
            | Call::Protect { range, .. }
            | Call::Advise { range, .. }
            | Call::Guard(range)
            | Call::Lock { range, .. }
            | Call::Unlock(range)
            | Call::Seal(range) => {
                let (at, len) = range.bytes();
                Request::Range(at, len)
            }
            Call::LockAll(_) | Call::UnlockAll | Call::Touch { .. } | Call::Dup { .. } => {
                Request::None
            }
        }
    }
}

/// Makes the call: the page that the result names, if it names one.
fn run(space: &AddressSpace, call: &Call, request: &Request) -> Answer {
    macro_rules! done {
        ($call:expr) => {
            $call.map(|_| None).map_err(|error| error.errno())
        };
    }
    let page = |addr: u64| Some((addr / PAGE) as usize);
    match (*call, request) {
        (_, Request::Map(request)) => space.map(request).map(page).map_err(|error| error.errno()),
        (_, Request::Remap(request)) => space
            .remap(request)
            .map(page)
            .map_err(|error| error.errno()),
        (_, &Request::Brk(to)) => {
            if space.brk(to) == to {
                Ok(None)
            } else {
                Err(Errno::ENOMEM)
            }
        }
        (Call::Unmap(_), &Request::Range(at, len)) => done!(space.unmap(at, len)),
        (Call::Protect { prot, .. }, &Request::Range(at, len)) => {
            done!(space.protect(at, len, Prot::from_bits_retain(u64::from(prot) % 8)))
        }
        (Call::Advise { advice, .. }, &Request::Range(at, len)) => {
            done!(space.advise(at, len, advice_of(advice)))
        }
        (Call::Guard(_), &Request::Range(at, len)) => {
            let result = space.advise(at, len, Advice::GUARD_INSTALL);
            let _ = space.advise(at, len, Advice::GUARD_REMOVE);
            done!(result)
        }
        (Call::Lock { on_fault, .. }, &Request::Range(at, len)) => {
            done!(space.mlock2(at, len, LockFlags::from_bits_retain(u64::from(on_fault))))
        }
        (Call::Unlock(_), &Request::Range(at, len)) => done!(space.munlock(at, len)),
        (Call::Seal(_), &Request::Range(at, len)) => done!(space.seal(at, len, 0)),
        (Call::LockAll(flags), _) => {
            done!(space.mlockall(LockAllFlags::from_bits_retain(u64::from(flags) % 8)))
        }
        (Call::UnlockAll, _) => done!(space.munlockall()),
        (Call::Touch { at, write }, _) => {
            let access = if write { Access::Write } else { Access::Read };
            let touched = space.touch(u64::from(at) % PAGES as u64 * PAGE, 1, access);
            touched.map(|_| None).map_err(|_| Errno::EFAULT)
        }
        _ => Ok(None),
    }
}

/// Every page, as maps has it.
fn seen(space: &AddressSpace) -> Pages {
    let mut pages = [None; PAGES];
    for entry in space.maps_entries() {
        let first = Page {
            flags: entry.flags,
            source: entry
                .file
                .as_ref()
                .map(|file| (id(file), entry.offset / PAGE)),
        };
        let from = (entry.start / PAGE) as usize;
        for number in from..(entry.end / PAGE) as usize {
            assert!(pages[number].is_none());
            pages[number] = Some(first.further(number - from));
        }
    }
    pages
}

fn compared(pages: &Pages) -> Pages {
    pages.map(|page| {
        page.map(|page| Page {
            flags: page.flags - UNPREDICTED,
            ..page
        })
    })
}

fn borders(space: &AddressSpace) -> Vec<(usize, usize)> {
    let page = |addr: u64| (addr / PAGE) as usize;
    let entries = space.maps_entries();
    let ends = entries.iter();
    ends.map(|entry| (page(entry.start), page(entry.end)))
        .collect()
}

/// Totals, page by page.
fn recounted(pages: &Pages, map_count: u64) -> Totals {
    let mut totals = Totals {
        map_count,
        ..Totals::default()
    };
    for page in pages.iter().flatten() {
        let (stack, write) = (page.has(VmaFlags::GROWSDOWN), page.has(VmaFlags::WRITE));
        totals.total += 1;
        totals.stack += u64::from(stack);
        totals.exec += u64::from(page.has(VmaFlags::EXEC) && !write && !stack);
        totals.data += u64::from(write && !page.has(VmaFlags::SHARED) && !stack);
        totals.locked += u64::from(page.has(VmaFlags::LOCKED));
        totals.committed += u64::from(page.has(VmaFlags::ACCOUNT));
    }
    totals
}

struct World {
    space: AddressSpace,
    model: Model,
    tight: Option<Tight>,
    /// Whether something was moved and kept, which makes the count of locked pages differ as Linux's does.
    kept: bool,
}

impl World {
    fn new(tight: Option<Tight>) -> Self {
        let object = FileObject::builder(FileKind::Shmem, "f")
            .len(FILE * PAGE)
            .build();
        let sealed = FileObject::builder(FileKind::Shmem, "s").len(FILE * PAGE);
        let sealed = sealed.seals(Seals::FUTURE_WRITE).build();
        let files = [
            OpenFile::new(object.clone(), AccessMode::ReadWrite),
            OpenFile::new(object.clone(), AccessMode::Read),
            OpenFile::new(object, AccessMode::Write),
            OpenFile::new(sealed, AccessMode::ReadWrite),
        ];
        let mut config = SpaceConfig {
            task_size: PAGES as u64 * PAGE,
            mmap_base: Some(BASE as u64 * PAGE),
            stack_guard_gap_pages: GAP as u64,
            ipc_lock: tight.is_none(),
            ..SpaceConfig::default()
        };
        if let Some(tight) = &tight {
            let bytes = |pages: u8| u64::from(pages) % PAGES as u64 * PAGE;
            config.limits = Limits {
                address_space: bytes(tight.total),
                memlock: bytes(tight.locked),
                data: bytes(tight.data),
                ..Limits::default()
            };
            config.max_map_count = u64::from(tight.mappings) % 24;
        }
        let space = AddressSpace::new(config).expect("the configuration is valid");
        space.set_brk(HEAP as u64 * PAGE, HEAP as u64 * PAGE);
        let model = Model {
            pages: [None; PAGES],
            lengths: files.iter().map(|file| (id(file), FILE)).collect(),
            files,
            default_lock: VmaFlags::empty(),
            brk: HEAP as u64 * PAGE,
            limited: tight.is_some(),
            borders: Vec::new(),
        };
        World {
            space,
            model,
            tight,
            kept: false,
        }
    }

    fn step(&mut self, call: &Call) {
        if let Call::Dup { child } = *call {
            return self.dup(child);
        }
        let before = self.model.pages;
        let lock_before = self.model.default_lock;
        let brk_before = self.model.brk;
        self.model.borders = borders(&self.space);
        let request = Request::new(call, &self.model.files);
        let got = run(&self.space, call, &request);
        if let Request::Remap(request) = &request {
            self.kept |= request.flags.contains(RemapFlags::DONTUNMAP);
        }
        let now = seen(&self.space);
        let mut expected = self.model.apply(call, &request, got);
        self.learn(&request, got, &now);
        // Limits may refuse what a model without limits does.
        let limited = self.tight.is_some()
            && matches!(got, Err(Errno::ENOMEM | Errno::EAGAIN | Errno::EPERM))
            || self.tight.is_some() && matches!(call, Call::Touch { .. }) && got.is_err();
        if limited && !matches!(expected, Expected::This(answer) if answer == got) {
            self.model.default_lock = lock_before;
            self.model.brk = brk_before;
            self.between(&before, &now, &request);
            expected = Expected::Unknown;
        }
        match expected {
            Expected::This(answer) => {
                assert_eq!(got, answer);
                self.compare(&now);
            }
            Expected::Failure => {
                assert!(got.is_err(), "{got:?}");
                self.compare(&now);
            }
            Expected::Unknown => {}
        }
        self.model.pages = now;
        self.check(&now);
    }

    fn compare(&self, now: &Pages) {
        let (model, now) = (compared(&self.model.pages), compared(now));
        for number in 0..PAGES {
            assert_eq!(now[number], model[number], "page {number}");
        }
    }

    /// A call that a limit stopped has done to each page what it should, or nothing; moves have removed what was in the way.
    fn between(&self, before: &Pages, now: &Pages, request: &Request) {
        let (before, after, now) = (compared(before), compared(&self.model.pages), compared(now));
        for number in 0..PAGES {
            let removed = matches!(request, Request::Remap(_)) && now[number].is_none();
            assert!(
                removed || now[number] == before[number] || now[number] == after[number],
                "page {number}: {:?}, {:?}, {:?}",
                before[number],
                after[number],
                now[number]
            );
        }
    }

    /// A shared anonymous mapping is a new file, which only the space can name.
    fn learn(&mut self, request: &Request, got: Answer, now: &Pages) {
        let (Request::Map(request), Ok(Some(at))) = (request, got) else {
            return;
        };
        let Some((Some((0, _)), Some((file, 0)))) = self.model.pages[at]
            .zip(now[at])
            .map(|(page, now)| (page.source, now.source))
        else {
            return;
        };
        for page in self.model.pages.iter_mut().flatten() {
            match &mut page.source {
                Some((id @ 0, _)) => *id = file,
                Some((id, _)) => assert_ne!(*id, file, "the file isn't new"),
                None => {}
            }
        }
        let len = request.len.div_ceil(PAGE);
        self.model.lengths.insert(file, len);
    }

    fn dup(&mut self, child: bool) {
        let before = (self.space.maps(), self.space.totals());
        let copy = match self.space.dup() {
            Ok(copy) => copy,
            Err(error) => {
                assert!(self.tight.is_some(), "{error}");
                return;
            }
        };
        assert_eq!(before, (self.space.maps(), self.space.totals()));
        let parent = (self.model.pages, self.model.default_lock);
        self.model.fork();
        self.compare(&seen(&copy));
        assert_eq!(copy.brk(0), self.model.brk);
        let other = if child {
            self.kept = false;
            std::mem::replace(&mut self.space, copy)
        } else {
            (self.model.pages, self.model.default_lock) = parent;
            copy
        };
        other.check().expect("what is left behind is whole");
        let now = seen(&self.space);
        self.check(&now);
    }

    fn check(&self, now: &Pages) {
        self.space.check().expect("the structure is whole");
        assert_eq!(self.space.brk(0), self.model.brk);
        let totals = self.space.totals();
        let borders = borders(&self.space);
        let counted = recounted(now, borders.len() as u64);
        assert_eq!(
            Totals {
                locked_surplus: 0,
                ..totals
            },
            counted
        );
        assert!(self.kept || totals.locked_surplus == 0);
        if let Some(tight) = &self.tight {
            let pages = |pages: u8| u64::from(pages) % PAGES as u64;
            assert!(totals.total <= pages(tight.total), "{totals:?}");
            assert!(totals.locked <= pages(tight.locked), "{totals:?}");
            assert!(
                totals.map_count <= u64::from(tight.mappings) % 24 + 1,
                "{totals:?}"
            );
        }
        let mut mapped = RangeSet::new();
        let mut ranges = RangeMap::new();
        for (number, page) in (0..).zip(now) {
            if let Some(page) = page {
                mapped.insert(number..number + 1);
                let origin = page
                    .source
                    .map(|(file, page)| (file, page as i64 - number as i64));
                ranges.insert(number..number + 1, (page.flags.bits(), origin));
            }
        }
        let by_mappings: RangeSet<usize> = borders.iter().map(|(from, to)| *from..*to).collect();
        assert_eq!(mapped, by_mappings);
        // Whatever differs is apart.
        for (range, _) in ranges.iter() {
            assert!(borders.iter().any(|(from, _)| *from == range.start));
            assert!(borders.iter().any(|(_, to)| *to == range.end));
        }
    }
}

fuzz_target!(|input: Input| {
    let mut world = World::new(input.tight);
    for call in input.calls.iter().take(200) {
        world.step(call);
    }
});
