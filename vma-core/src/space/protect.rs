//! mprotect(2), and `PR_SET_MDWE` of prctl(2).

use super::draft::Draft;
use super::map::denied_by_mdwe;
use super::{AddressSpace, WriteGuard, notify};
use crate::accounting::{check_commit, check_expand};
use crate::addr::VmRange;
use crate::backend::Backend;
use crate::error::{Errno, LimitError, PublishError, SplitError};
use crate::events::InvalidationReason;
use crate::flags::{MdweFlags, Prot, VmaFlags, prot_bits};
use crate::limits::SpaceConfig;

/// Why a protection couldn't be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtectError {
    /// Unknown protection bits, or growing both ways.
    #[error("protection {0:#x} isn't valid")]
    BadProtection(u64),
    /// The start isn't page-aligned.
    #[error("address {0:#x} isn't page-aligned")]
    Unaligned(u64),
    /// Ends beyond the top.
    #[error("{len:#x} bytes at {addr:#x} wrap around")]
    Wraps {
        /// Start.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// `PROT_GROWSDOWN` or `PROT_GROWSUP` on a mapping that doesn't.
    #[error("{0} doesn't grow that way")]
    NotGrowing(VmRange),
    /// Nothing mapped from here on; what lies before was changed.
    #[error("nothing is mapped at {0:#x}")]
    Unmapped(u64),
    /// The mapping may not have this protection; what lies before was changed.
    #[error("{vma} may not get protection {prot:#x}")]
    Denied {
        /// The mapping.
        vma: VmRange,
        /// Protection asked for.
        prot: u64,
    },
    /// Execute would be gained, which was forbidden by `PR_SET_MDWE`.
    #[error("{0} may not gain execute (PR_SET_MDWE)")]
    WriteExec(VmRange),
    /// Sealed; what lies before was changed.
    #[error("{0} is sealed")]
    Sealed(VmRange),
    /// A mapping couldn't be split.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// A limit.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// No memory for records; nothing was changed.
    #[error(transparent)]
    Publish(#[from] PublishError),
}

impl ProtectError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            ProtectError::BadProtection(_)
            | ProtectError::Unaligned(_)
            | ProtectError::NotGrowing(_) => Errno::EINVAL,
            ProtectError::Wraps { .. } | ProtectError::Unmapped(_) => Errno::ENOMEM,
            ProtectError::Denied { .. } | ProtectError::WriteExec(_) => Errno::EACCES,
            ProtectError::Sealed(_) => Errno::EPERM,
            ProtectError::Split(error) => error.errno(),
            ProtectError::Limit(error) => error.errno(),
            ProtectError::Publish(error) => error.errno(),
        }
    }
}

/// `Ok(None)`: nothing to do.
fn parse(
    config: &SpaceConfig,
    addr: u64,
    len: u64,
    prot: Prot,
) -> Result<Option<(u64, u64, Prot)>, ProtectError> {
    let pages = config.pages();
    let growing = Prot::GROWSDOWN | Prot::GROWSUP;
    let plain = prot - growing;
    if prot.contains(growing) {
        return Err(ProtectError::BadProtection(prot.bits()));
    }
    if !pages.is_aligned(addr) {
        return Err(ProtectError::Unaligned(addr));
    }
    if len == 0 {
        return Ok(None);
    }
    let end = addr.wrapping_add(pages.ceil_wrapping(len));
    if end <= addr {
        return Err(ProtectError::Wraps { addr, len });
    }
    if !(Prot::READ | Prot::WRITE | Prot::EXEC | Prot::SEM).contains(plain) {
        return Err(ProtectError::BadProtection(prot.bits()));
    }
    Ok(Some((addr, end, plain)))
}

/// Where the change begins: the first mapping must be there, and grow if that was asked for.
fn first(draft: &Draft<'_>, start: u64, end: u64, prot: Prot) -> Result<(u64, u64), ProtectError> {
    let vma = draft
        .first_in(start, end)
        .ok_or(ProtectError::Unmapped(start))?;
    if prot.contains(Prot::GROWSDOWN) {
        if !vma.flags().contains(VmaFlags::GROWSDOWN) {
            return Err(ProtectError::NotGrowing(vma.range()));
        }
        return Ok((vma.start, end));
    }
    if vma.start > start {
        return Err(ProtectError::Unmapped(start));
    }
    if prot.contains(Prot::GROWSUP) {
        return Err(ProtectError::NotGrowing(vma.range()));
    }
    Ok((start, end))
}

/// Parts that became writable while locked: their pages are made private at once.
type Written = smallvec::SmallVec<[(u64, u64); 0]>;

/// Mapping by mapping; on an error the ones before stay changed. Source: `do_mprotect_pkey()`.
fn change(
    draft: &mut Draft<'_>,
    mdwe: MdweFlags,
    start: u64,
    end: u64,
    prot: Prot,
    written: &mut Written,
) -> Result<(), ProtectError> {
    let mut at = start;
    while at < end {
        let vma = draft.find(at).ok_or(ProtectError::Unmapped(at))?;
        let old = vma.flags();
        let range = vma.range();
        let mut wanted = prot;
        if draft.config.read_implies_exec
            && prot.contains(Prot::READ)
            && old.contains(VmaFlags::MAYEXEC)
        {
            wanted |= Prot::EXEC;
        }
        let access = prot_bits(wanted);
        let new = (old - VmaFlags::ACCESS) | access;
        // The MAY bits lie four above the access bits.
        let may = VmaFlags::from_bits_retain(new.bits() >> 4) & VmaFlags::ACCESS;
        if !may.contains(access) {
            return Err(ProtectError::Denied {
                vma: range,
                prot: wanted.bits(),
            });
        }
        if denied_by_mdwe(mdwe, old, new) {
            return Err(ProtectError::WriteExec(range));
        }
        let to = range.end.min(end);
        at = change_one(draft, at, to, new, written)?.max(to);
    }
    Ok(())
}

/// One mapping's part. Returns the end of the mapping that it belongs to now. Source: `mprotect_fixup()`.
fn change_one(
    draft: &mut Draft<'_>,
    start: u64,
    end: u64,
    new: VmaFlags,
    written: &mut Written,
) -> Result<u64, ProtectError> {
    let Some(vma) = draft.find(start) else {
        return Ok(end);
    };
    let old = vma.flags();
    if old.contains(VmaFlags::SEALED) {
        return Err(ProtectError::Sealed(vma.range()));
    }
    if new == old {
        return Ok(end);
    }
    let pages = draft.pages.count(end - start);
    let extras = vma.vma.extras().cloned();
    let mut flags = new;
    if new.contains(VmaFlags::WRITE) {
        let (totals, config) = (draft.totals(), draft.config);
        if let Err(limit) = check_expand(totals, config, new, pages)
            && check_expand(totals, config, old, pages).is_ok()
        {
            return Err(limit.into());
        }
        let charged = VmaFlags::ACCOUNT
            | VmaFlags::WRITE
            | VmaFlags::HUGETLB
            | VmaFlags::SHARED
            | VmaFlags::NORESERVE;
        if !old.intersects(charged) {
            check_commit(totals, config, pages)?;
            flags |= VmaFlags::ACCOUNT;
        }
    } else if old.contains(VmaFlags::ACCOUNT) && vma.vma.is_anonymous() && vma.vma.anon().is_none()
    {
        flags -= VmaFlags::ACCOUNT;
    }
    let result = draft.modify(start, end, flags, extras.as_ref())?;
    let before = old & (VmaFlags::WRITE | VmaFlags::SHARED | VmaFlags::LOCKED);
    if before == VmaFlags::LOCKED && new.contains(VmaFlags::WRITE) {
        written.push((start, end));
    }
    Ok(result)
}

impl<B: Backend> WriteGuard<'_, B> {
    /// As [`AddressSpace::protect`].
    ///
    /// # Errors
    /// As there.
    pub fn protect(&mut self, addr: u64, len: u64, prot: Prot) -> Result<(), ProtectError> {
        let config = self.config();
        let Some((start, end, plain)) = parse(config, addr, len, prot)? else {
            return Ok(());
        };
        let mut changes = self.changes();
        let mut draft = self.draft(config, &mut changes);
        let (start, end) = first(&draft, start, end, prot)?;
        let mut written = Written::new();
        let mdwe = self.inner().mdwe;
        let result = change(&mut draft, mdwe, start, end, plain, &mut written);
        self.commit(&mut changes)?;
        for (start, end) in written {
            self.populate(start, end);
        }
        result
    }

    /// As [`AddressSpace::set_mdwe`].
    ///
    /// # Errors
    /// As there.
    pub fn set_mdwe(&mut self, flags: MdweFlags) -> Result<(), MdweError> {
        let known = MdweFlags::REFUSE_EXEC_GAIN | MdweFlags::NO_INHERIT;
        if !known.contains(flags) || flags == MdweFlags::NO_INHERIT {
            return Err(MdweError::BadFlags(flags.bits()));
        }
        let current = self.inner().mdwe;
        if !current.is_empty() && current != flags {
            return Err(MdweError::Final(current));
        }
        self.inner_mut().mdwe = flags;
        Ok(())
    }
}

/// Why `PR_SET_MDWE` failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MdweError {
    /// Unknown bits, or not inheriting what isn't refused.
    #[error("flags {0:#x} aren't valid")]
    BadFlags(u64),
    /// Once set it can't be changed.
    #[error("already set to {0:?}, which is final")]
    Final(MdweFlags),
}

impl MdweError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            MdweError::BadFlags(_) => Errno::EINVAL,
            MdweError::Final(_) => Errno::EPERM,
        }
    }
}

impl<B: Backend> AddressSpace<B> {
    /// Changes the protection of a range (mprotect(2)).
    ///
    /// `addr` is page-aligned, `len` in bytes is rounded up; length 0 does nothing.
    ///
    /// # Errors
    /// | errno | when |
    /// |---|---|
    /// | `EINVAL` | unaligned; unknown bits; `PROT_GROWSDOWN` on a mapping that doesn't grow; a split refused |
    /// | `ENOMEM` | wraps around; something in the range isn't mapped; a limit |
    /// | `EACCES` | the mapping may not have it (a file opened read-only); `PR_SET_MDWE` |
    /// | `EPERM` | sealed |
    ///
    /// What lies before the failing mapping stays changed.
    ///
    /// Source: `do_mprotect_pkey()` in mm/mprotect.c.
    pub fn protect(&self, addr: u64, len: u64, prot: Prot) -> Result<(), ProtectError> {
        let ranges = || notify::named(addr, len, self.core.pages.size());
        self.write_to(ranges, InvalidationReason::ProtectVma)
            .protect(addr, len, prot)
    }

    /// Refuses gaining execute from now on (`PR_SET_MDWE` of prctl(2)).
    ///
    /// # Errors
    /// `EINVAL` unknown or incomplete flags, `EPERM` already set to something else.
    pub fn set_mdwe(&self, flags: MdweFlags) -> Result<(), MdweError> {
        self.write_once().set_mdwe(flags)
    }
}
