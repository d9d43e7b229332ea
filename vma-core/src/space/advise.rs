//! madvise(2) and `process_madvise(2)` on oneself.

use std::sync::Arc;

use vma_rcu::wait::Wait;

use super::draft::Draft;
use super::fault::Pager;
use super::{AddressSpace, WriteGuard, notify, rounded_range};
use crate::addr::{Pages, VmRange};
use crate::backend::{Backend, PageChange};
use crate::error::{Errno, PublishError, SplitError};
use crate::events::{Announced, InvalidationReason};
use crate::file::{FileIoError, FileObject, Seals};
use crate::flags::{Advice, VmaFlags};
use crate::limits::SpaceConfig;
use crate::vma::Placed;

/// Why an advice wasn't taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdviseError {
    /// No such advice, or not built in.
    #[error("advice {0} isn't known")]
    Unknown(i32),
    /// Unaligned, or wraps around.
    #[error("madvise of {len:#x} bytes at {addr:#x}: unaligned or wraps around")]
    BadRange {
        /// Start.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// The advice isn't for such a mapping.
    #[error("advice {advice} isn't for the mapping {vma}")]
    NotApplicable {
        /// The mapping.
        vma: VmRange,
        /// The advice.
        advice: i32,
    },
    /// `MADV_REMOVE` on a mapping that can't write to its file.
    #[error("{0} can't write to its file")]
    ReadOnly(VmRange),
    /// `MADV_REMOVE` on a file sealed against writing.
    #[error("the file's seals {0:?} forbid it")]
    FileSealed(Seals),
    /// Sealed, and the advice would discard what can't be written.
    #[error("{0} is sealed")]
    Sealed(VmRange),
    /// A file couldn't free its pages (`MADV_REMOVE`).
    #[error(transparent)]
    File(#[from] FileIoError),
    /// Something in the range isn't mapped; everything mapped was advised.
    #[error("nothing is mapped at {0:#x}")]
    Unmapped(u64),
    /// Pages can't be had: the file ends before.
    #[error("there are no pages at {0:#x}")]
    NoPages(u64),
    /// There is no memory for a page; those before it are present.
    #[error("no memory for the page at {0:#x}")]
    OutOfMemory(u64),
    /// A mapping couldn't be split.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// No memory for records; nothing was changed.
    #[error(transparent)]
    Publish(#[from] PublishError),
}

impl AdviseError {
    /// The error number. A limit on mappings is `EAGAIN` here.
    pub const fn errno(self) -> Errno {
        match self {
            AdviseError::Unknown(_)
            | AdviseError::BadRange { .. }
            | AdviseError::NotApplicable { .. }
            | AdviseError::Split(SplitError::Refused { .. }) => Errno::EINVAL,
            AdviseError::ReadOnly(_) => Errno::EACCES,
            AdviseError::FileSealed(_) | AdviseError::Sealed(_) => Errno::EPERM,
            AdviseError::Unmapped(_) | AdviseError::OutOfMemory(_) => Errno::ENOMEM,
            AdviseError::NoPages(_) => Errno::EFAULT,
            AdviseError::File(error) => error.errno(),
            AdviseError::Split(_) => Errno::EAGAIN,
            AdviseError::Publish(error) => error.errno_or_again(),
        }
    }
}

/// Discards content, so that a sealed read-only mapping refuses it.
fn discards(advice: Advice) -> bool {
    matches!(
        advice,
        Advice::FREE
            | Advice::DONTNEED
            | Advice::DONTNEED_LOCKED
            | Advice::REMOVE
            | Advice::DONTFORK
            | Advice::WIPEONFORK
            | Advice::GUARD_INSTALL
    )
}

/// Flags after an advice that is kept in them; `None` for one that isn't. Source: `madvise_vma_behavior()`.
fn new_flags(vma: Placed<'_>, advice: Advice) -> Option<Result<VmaFlags, AdviseError>> {
    let old = vma.flags();
    let reading = VmaFlags::RAND_READ | VmaFlags::SEQ_READ;
    let unless = |forbidden: bool, flags: VmaFlags| {
        if forbidden {
            Err(not_applicable(vma, advice))
        } else {
            Ok(flags)
        }
    };
    Some(match advice {
        Advice::NORMAL => Ok(old - reading),
        Advice::SEQUENTIAL => Ok((old - reading) | VmaFlags::SEQ_READ),
        Advice::RANDOM => Ok((old - reading) | VmaFlags::RAND_READ),
        Advice::DONTFORK => Ok(old | VmaFlags::DONTCOPY),
        Advice::DOFORK => unless(old.contains(VmaFlags::IO), old - VmaFlags::DONTCOPY),
        Advice::WIPEONFORK => unless(
            vma.file().is_some() || old.contains(VmaFlags::SHARED),
            old | VmaFlags::WIPEONFORK,
        ),
        Advice::KEEPONFORK => unless(
            old.contains(VmaFlags::DROPPABLE),
            old - VmaFlags::WIPEONFORK,
        ),
        Advice::DONTDUMP => Ok(old | VmaFlags::DONTDUMP),
        Advice::DODUMP => {
            let special = old.intersects(VmaFlags::SPECIAL) && !old.contains(VmaFlags::HUGETLB);
            unless(
                special || old.contains(VmaFlags::DROPPABLE),
                old - VmaFlags::DONTDUMP,
            )
        }
        Advice::MERGEABLE => {
            let never = VmaFlags::SPECIAL
                | VmaFlags::SHARED
                | VmaFlags::MAYSHARE
                | VmaFlags::HUGETLB
                | VmaFlags::DROPPABLE;
            Ok(if old.intersects(never) {
                old
            } else {
                old | VmaFlags::MERGEABLE
            })
        }
        Advice::UNMERGEABLE => Ok(old - VmaFlags::MERGEABLE),
        Advice::HUGEPAGE => Ok((old - VmaFlags::NOHUGEPAGE) | VmaFlags::HUGEPAGE),
        Advice::NOHUGEPAGE => Ok((old - VmaFlags::HUGEPAGE) | VmaFlags::NOHUGEPAGE),
        _ => return None,
    })
}

pub(super) fn not_applicable(vma: Placed<'_>, advice: Advice) -> AdviseError {
    AdviseError::NotApplicable {
        vma: vma.range(),
        advice: advice.0,
    }
}

/// Whether an advice that changes no flags may be given to a mapping.
fn check(
    vma: Placed<'_>,
    advice: Advice,
    config: &SpaceConfig,
    start: u64,
    end: u64,
) -> Result<(), AdviseError> {
    let flags = vma.flags();
    let forbidden = match advice {
        Advice::DONTNEED | Advice::FREE => VmaFlags::LOCKED | VmaFlags::PFNMAP,
        Advice::COLLAPSE => VmaFlags::HUGETLB,
        Advice::DONTNEED_LOCKED => VmaFlags::PFNMAP,
        Advice::COLD | Advice::PAGEOUT => VmaFlags::LOCKED | VmaFlags::PFNMAP | VmaFlags::HUGETLB,
        Advice::GUARD_INSTALL => VmaFlags::SPECIAL | VmaFlags::HUGETLB | VmaFlags::LOCKED,
        Advice::GUARD_REMOVE => VmaFlags::SPECIAL | VmaFlags::HUGETLB,
        _ => VmaFlags::empty(),
    };
    if flags.intersects(forbidden) || (advice == Advice::FREE && !vma.vma.is_anonymous()) {
        return Err(not_applicable(vma, advice));
    }
    match advice {
        Advice::REMOVE => check_remove(vma, advice),
        Advice::COLLAPSE => {
            let size = config.huge_page_size;
            let first = start.checked_add(size - 1).map(|start| start & !(size - 1));
            let fits =
                first.is_some_and(|first| first.checked_add(size).is_some_and(|slot| slot <= end));
            if fits {
                Ok(())
            } else {
                Err(not_applicable(vma, advice))
            }
        }
        _ => Ok(()),
    }
}

fn check_remove(vma: Placed<'_>, advice: Advice) -> Result<(), AdviseError> {
    if vma.flags().contains(VmaFlags::LOCKED) {
        return Err(not_applicable(vma, advice));
    }
    let file = vma.file().ok_or_else(|| not_applicable(vma, advice))?;
    if !vma.vma.is_shared_maywrite() {
        return Err(AdviseError::ReadOnly(vma.range()));
    }
    let seals = file.object().current_seals();
    if seals.intersects(Seals::WRITE | Seals::FUTURE_WRITE) {
        return Err(AdviseError::FileSealed(seals));
    }
    Ok(())
}

/// Whether a seal refuses the advice (`can_madvise_modify`).
fn check_sealed(vma: Placed<'_>, advice: Advice) -> Result<(), AdviseError> {
    let flags = vma.flags();
    if flags.contains(VmaFlags::SEALED)
        && discards(advice)
        && vma.vma.is_anonymous()
        && !flags.contains(VmaFlags::WRITE)
    {
        return Err(AdviseError::Sealed(vma.range()));
    }
    Ok(())
}

/// A part of a file that `MADV_REMOVE` frees, when the mappings have been walked.
struct Hole {
    file: Arc<FileObject>,
    offset: u64,
    len: u64,
}

/// One mapping's part. Returns the end of the mapping that it belongs to then.
fn advise_one(
    draft: &mut Draft<'_>,
    pager: &Pager<'_, impl Backend>,
    holes: &mut Vec<Hole>,
    start: u64,
    end: u64,
    advice: Advice,
) -> Result<u64, AdviseError> {
    let Some(vma) = draft.find(start) else {
        return Ok(end);
    };
    check_sealed(vma, advice)?;
    if let Some(flags) = new_flags(vma, advice) {
        let flags = flags?;
        if flags == vma.flags() {
            return Ok(end);
        }
        let extras = vma.vma.extras().cloned();
        return Ok(draft.modify(start, end, flags, extras.as_ref())?);
    }
    check(vma, advice, draft.config, start, end)?;
    match advice {
        Advice::DONTNEED | Advice::DONTNEED_LOCKED => {
            // Whole pages, if there are huge ones.
            let mask = vma.vma.huge_page_size().map_or(0, |size| size - 1);
            if start & mask != 0 {
                return Err(not_applicable(vma, advice));
            }
            if start < end & !mask {
                let end = end & !mask;
                draft.note_pages(PageChange::Discard { start, end });
            }
        }
        Advice::GUARD_INSTALL => {
            if vma.vma.is_anonymous() {
                // Of a file's mapping children find the marks without an identity, by the flag.
                pager.identify(start);
            }
            draft.add_sticky(start, VmaFlags::MAYBE_GUARD);
            draft.note_pages(PageChange::Guard { start, end });
        }
        Advice::REMOVE => {
            if let Some(file) = vma.file() {
                holes.push(Hole {
                    file: file.object().clone(),
                    offset: vma.pages.bytes(vma.pgoff_at(start)),
                    len: end - start,
                });
            }
            draft.note_pages(PageChange::Unguard { start, end });
        }
        Advice::GUARD_REMOVE => draft.note_pages(PageChange::Unguard { start, end }),
        _ => {}
    }
    Ok(end)
}

/// Mapping by mapping; holes are passed over and reported at the end. Source: `madvise_walk_vmas()`.
fn walk(
    draft: &mut Draft<'_>,
    pager: &Pager<'_, impl Backend>,
    holes: &mut Vec<Hole>,
    start: u64,
    end: u64,
    advice: Advice,
) -> Result<(), AdviseError> {
    let mut hole = None;
    let mut at = start;
    while at < end {
        let Some(vma) = draft.next(at) else {
            return Err(AdviseError::Unmapped(at));
        };
        if vma.start > at {
            hole = hole.or(Some(at));
            at = vma.start;
            if at >= end {
                break;
            }
        }
        let to = vma.end.min(end);
        at = advise_one(draft, pager, holes, at, to, advice)?.max(to);
    }
    hole.map_or(Ok(()), |at| Err(AdviseError::Unmapped(at)))
}

/// Frees pages of files, with no lock held that their other mappings could want.
fn punch(holes: Vec<Hole>) -> Result<(), AdviseError> {
    for hole in holes {
        hole.file.punch_hole(hole.offset, hole.len)?;
    }
    Ok(())
}

/// The range that is advised; `None`: an empty one.
fn parse(
    pages: Pages,
    addr: u64,
    len: u64,
    advice: Advice,
) -> Result<Option<(u64, u64)>, AdviseError> {
    // Injecting memory errors isn't built in.
    let injects = matches!(advice, Advice::HWPOISON | Advice::SOFT_OFFLINE);
    if !advice.is_known() || injects {
        return Err(AdviseError::Unknown(advice.0));
    }
    let bad = AdviseError::BadRange { addr, len };
    if !pages.is_aligned(addr) {
        return Err(bad);
    }
    rounded_range(pages, addr, len).map_err(|()| bad)
}

fn tells_monitors(advice: Advice) -> bool {
    matches!(
        advice,
        Advice::DONTNEED | Advice::DONTNEED_LOCKED | Advice::FREE | Advice::REMOVE
    )
}

/// Whether an advice makes pages present, and does nothing else.
fn populates(advice: Advice) -> bool {
    matches!(advice, Advice::POPULATE_READ | Advice::POPULATE_WRITE)
}

/// Bytes advised before the first error, which is one only if there are none.
fn one_by_one(
    ranges: &[(u64, u64)],
    mut advise: impl FnMut(u64, u64) -> Result<(), AdviseError>,
) -> Result<u64, AdviseError> {
    let mut done = 0u64;
    for (addr, len) in ranges {
        match advise(*addr, *len) {
            Ok(()) => done = done.saturating_add(*len),
            Err(_) if done > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

impl<B: Backend> WriteGuard<'_, B> {
    /// As [`AddressSpace::advise`].
    ///
    /// # Errors
    /// As there.
    pub fn advise(&mut self, addr: u64, len: u64, advice: Advice) -> Result<(), AdviseError> {
        let config = self.config();
        let Some((start, end)) = parse(config.pages(), addr, len, advice)? else {
            return Ok(());
        };
        if populates(advice) {
            return self.populate_advised(start, end, advice);
        }
        let told = self.announce_discard(start, end, advice);
        self.after.deliver_later(told);
        let mut holes = Vec::new();
        let result = self.advise_range(start, end, advice, &mut holes);
        punch(holes).and(result)
    }

    /// Monitors hear of it before pages go. Source: `userfaultfd_remove()`.
    fn announce_discard(&self, start: u64, end: u64, advice: Advice) -> Vec<Announced> {
        if !tells_monitors(advice) {
            return Vec::new();
        }
        self.announce_removal(start, end, |vma| {
            let part = (vma.start.max(start), vma.end.min(end));
            check_sealed(vma, advice).is_ok()
                && check(vma, advice, self.config(), part.0, part.1).is_ok()
        })
    }

    /// All but what files free of their pages.
    fn advise_range(
        &mut self,
        start: u64,
        end: u64,
        advice: Advice,
        holes: &mut Vec<Hole>,
    ) -> Result<(), AdviseError> {
        let config = self.config();
        let mut changes = self.changes();
        let mut draft = self.draft(config, &mut changes);
        let pager = self.pager(config);
        let result = walk(&mut draft, &pager, holes, start, end, advice);
        if let Err(error) = self.commit(&mut changes) {
            holes.clear();
            return Err(error.into());
        }
        result
    }

    /// As [`AddressSpace::advise_vector`].
    ///
    /// # Errors
    /// As there.
    pub fn advise_vector(
        &mut self,
        ranges: &[(u64, u64)],
        advice: Advice,
    ) -> Result<u64, AdviseError> {
        one_by_one(ranges, |addr, len| self.advise(addr, len, advice))
    }
}

impl<B: Backend> AddressSpace<B> {
    /// Takes an advice (madvise(2)). What is kept in a mapping's flags changes the layout; of the others only the errors matter here.
    ///
    /// `addr` is page-aligned, `len` in bytes is rounded up; length 0 does nothing.
    ///
    /// # Errors
    /// | errno | when |
    /// |---|---|
    /// | `EINVAL` | unknown; unaligned; wraps around; not for such a mapping |
    /// | `ENOMEM` | a hole: everything mapped was advised; populating without memory for a page |
    /// | `EAGAIN` | the limit of mappings |
    /// | `EPERM` | sealed and discarding; `MADV_REMOVE` on a sealed file |
    /// | `EACCES` | `MADV_REMOVE` on a mapping that can't write |
    /// | `EFAULT` | populating beyond the end of the file, or where its backend can't read |
    /// | any other | `MADV_REMOVE`: what the file's backend fails with |
    ///
    /// Any error but the one for holes stops at that mapping.
    ///
    /// Source: `do_madvise()` in mm/madvise.c.
    pub fn advise(&self, addr: u64, len: u64, advice: Advice) -> Result<(), AdviseError> {
        let pages = self.config.load().pages();
        let Some((start, end)) = parse(pages, addr, len, advice)? else {
            return Ok(());
        };
        if populates(advice) {
            return self.populate_advised(start, end, advice);
        }
        if tells_monitors(advice) && self.core.attention.is_expected() {
            let told = self.write().announce_discard(start, end, advice);
            for announced in told {
                announced.deliver(Wait::forever());
            }
        }
        let mut holes = Vec::new();
        let clears = matches!(
            advice,
            Advice::DONTNEED | Advice::DONTNEED_LOCKED | Advice::GUARD_INSTALL
        );
        let ranges = || notify::named(start, if clears { end - start } else { 0 }, pages.size());
        let mut guard = self.write_to(ranges, InvalidationReason::Clear);
        let result = guard.advise_range(start, end, advice, &mut holes);
        drop(guard);
        punch(holes).and(result)
    }

    /// Takes an advice for several ranges (`process_madvise(2)` on oneself) and returns the bytes advised.
    ///
    /// # Errors
    /// Those of [`advise`](Self::advise), if the first range fails; a later failure ends the call with what was done.
    pub fn advise_vector(&self, ranges: &[(u64, u64)], advice: Advice) -> Result<u64, AdviseError> {
        one_by_one(ranges, |addr, len| self.advise(addr, len, advice))
    }
}
