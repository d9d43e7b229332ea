//! brk(2).

use super::draft::Draft;
use super::placement::check_fixed;
use super::unmap::{UnmapError, unmap_range};
use super::{AddressSpace, Inner, WriteGuard, new_vma, notify};
use crate::accounting::{check_commit, check_expand, check_lock, check_map_count};
use crate::addr::VmRange;
use crate::anon::AnonId;
use crate::backend::Backend;
use crate::error::{Errno, LimitError, PublishError};
use crate::events::InvalidationReason;
use crate::flags::VmaFlags;
use crate::limits::UNLIMITED;
use crate::merge::Kind;

/// Why the break stayed where it was. The system call doesn't tell; its result is the old break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BrkError {
    /// Below the start of the heap.
    #[error("{addr:#x} lies below the heap, which starts at {start:#x}")]
    BelowHeap {
        /// Break asked for.
        addr: u64,
        /// Start of the heap.
        start: u64,
    },
    /// Beyond the address space, or below the lowest address.
    #[error("the heap can't reach {0:#x}")]
    OutOfRange(u64),
    /// Too near the next mapping: a page and its gap have to stay free.
    #[error("a break of {addr:#x} comes too near {next}")]
    Collision {
        /// Break asked for.
        addr: u64,
        /// The mapping above.
        next: VmRange,
    },
    /// Nothing is mapped where it should shrink.
    #[error("no heap is mapped from {0:#x} to the present break")]
    NoHeap(u64),
    /// What should go can't be unmapped.
    #[error(transparent)]
    Unmap(#[from] UnmapError),
    /// A limit.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// No memory for records.
    #[error(transparent)]
    Publish(#[from] PublishError),
}

impl BrkError {
    /// What the kernel has internally; the C library turns a break that didn't move into `ENOMEM`.
    pub const fn errno(self) -> Errno {
        match self {
            BrkError::Publish(error) => error.errno(),
            _ => Errno::ENOMEM,
        }
    }
}

/// Unmaps from the new break to the old one.
fn shrink(draft: &mut Draft<'_>, new: u64, old: u64) -> Result<(), BrkError> {
    if draft.first_in(new, old).is_none() {
        return Err(BrkError::NoHeap(new));
    }
    Ok(unmap_range(draft, VmRange::new(new, old))?)
}

/// Maps from the old break to the new one. Source: `do_brk_flags()`.
fn grow(draft: &mut Draft<'_>, inner: &Inner, old: u64, new: u64) -> Result<(), BrkError> {
    let config = draft.config;
    let len = new - old;
    check_fixed(config, old, len).map_err(|_| BrkError::OutOfRange(new))?;
    check_lock(draft.totals(), config, inner.default_flags, len)?;
    let clearance = new.saturating_add(config.page_size);
    let reach = clearance.saturating_add(config.stack_guard_gap());
    if let Some(next) = draft.first_in(old, reach)
        && clearance > next.start_with_gap()
    {
        return Err(BrkError::Collision {
            addr: new,
            next: next.range(),
        });
    }
    let mut flags =
        VmaFlags::READ | VmaFlags::WRITE | VmaFlags::MAY | VmaFlags::ACCOUNT | inner.default_flags;
    if config.read_implies_exec {
        flags |= VmaFlags::EXEC;
    }
    let pages = draft.pages.count(len);
    check_expand(draft.totals(), config, flags, pages)?;
    check_map_count(draft.totals(), config)?;
    check_commit(draft.totals(), config, pages)?;
    let vma = new_vma(config, flags, draft.pages.count(old));
    let extends = draft
        .prev(old)
        .is_some_and(|heap| heap.end == old && heap.end > inner.start_brk);
    if extends {
        draft.insert_merged(old, new, vma, AnonId::NONE, Kind::LeftOnly);
    } else {
        draft.insert(old, new, vma);
    }
    Ok(())
}

impl<B: Backend> WriteGuard<'_, B> {
    /// As [`AddressSpace::brk`].
    pub fn brk(&mut self, addr: u64) -> u64 {
        match self.try_brk(addr) {
            Ok(()) => addr,
            Err(_) => self.inner().brk,
        }
    }

    /// As [`AddressSpace::try_brk`].
    ///
    /// # Errors
    /// As there.
    pub fn try_brk(&mut self, addr: u64) -> Result<(), BrkError> {
        let config = self.config();
        let inner = self.inner();
        let start = inner.start_brk;
        if addr < start {
            return Err(BrkError::BelowHeap { addr, start });
        }
        let limit = config.limits.data;
        let wanted = (addr - start).saturating_add(inner.data_segment);
        if limit != UNLIMITED && wanted > limit {
            let pages = config.pages();
            let used = pages.count(inner.brk - start);
            return Err(LimitError::Data {
                used,
                wanted: pages.count(wanted),
                limit,
            }
            .into());
        }
        let new = config.pages().ceil_wrapping(addr);
        let old = config.pages().ceil_wrapping(inner.brk);
        if new == old {
            self.inner_mut().brk = addr;
            self.mark();
            return Ok(());
        }
        let growing = addr > inner.brk;
        if growing && new < addr {
            return Err(BrkError::OutOfRange(addr));
        }
        let mut changes = self.changes();
        let mut draft = self.draft(config, &mut changes);
        let result = if growing {
            grow(&mut draft, inner, old, new)
        } else {
            shrink(&mut draft, new, old)
        };
        let locked = inner.default_flags.contains(VmaFlags::LOCKED);
        self.commit(&mut changes)?;
        result?;
        self.inner_mut().brk = addr;
        self.mark();
        if growing && locked {
            self.populate(old, new);
        }
        Ok(())
    }

    /// As [`AddressSpace::set_brk`].
    pub fn set_brk(&mut self, start: u64, brk: u64) {
        let inner = self.inner_mut();
        inner.start_brk = start;
        inner.brk = brk.max(start);
        self.mark();
    }
}

impl<B: Backend> AddressSpace<B> {
    /// Moves the end of the heap (the system call brk) and returns where it is then: `addr`, or the old break
    /// when it can't be moved. `brk(0)` asks.
    ///
    /// Source: `brk` in mm/mmap.c.
    pub fn brk(&self, addr: u64) -> u64 {
        self.write_to_brk(addr).brk(addr)
    }

    /// Moves the end of the heap and says why not.
    ///
    /// # Errors
    /// [`BrkError`]. A heap that grows keeps one page, and the gap of a stack, clear of the next mapping.
    pub fn try_brk(&self, addr: u64) -> Result<(), BrkError> {
        self.write_to_brk(addr).try_brk(addr)
    }

    fn write_to_brk(&self, addr: u64) -> WriteGuard<'_, B> {
        let mut announced = 0;
        loop {
            let pages = self.core.pages;
            let low = pages.ceil_wrapping(addr);
            let ranges = || notify::named(low, announced.max(low) - low, pages.size());
            let guard = self.write_to(ranges, InvalidationReason::Unmap);
            let inner = guard.inner();
            let is_shrinking = (inner.start_brk..inner.brk).contains(&addr);
            if !guard.notifies || !is_shrinking || announced >= inner.brk {
                return guard;
            }
            announced = inner.brk;
        }
    }

    /// Sets start and end of the heap without mapping anything, as exec does.
    pub fn set_brk(&self, start: u64, brk: u64) {
        self.write_once().set_brk(start, brk);
    }

    /// Sets the size of the program's data segment in bytes, which `RLIMIT_DATA` counts with the heap.
    pub fn set_data_segment(&self, bytes: u64) {
        self.write_once().inner_mut().data_segment = bytes;
    }
}
