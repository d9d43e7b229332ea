//! What a mapping *does*: the seam between bookkeeping and memory.

pub mod paged;

use std::fmt;
use std::ops::Range;

use vma_rcu::reclaim::Domain;
use vma_rcu::shootdown::AccessorId;

use crate::addr::VmRange;
use crate::error::PublishError;
use crate::events::MonitorModes;
use crate::file::{FileObject, FileObjectBuilder};
use crate::limits::{ConfigError, SpaceConfig};
use crate::space::{Access, FaultError};
use crate::vma::Vma;

/// What a call does to the pages of a range, beside what it does to mappings. In bytes, page-aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PageChange {
    /// They go, guard pages as well: unmapped, or something else is mapped there from now on.
    Zap {
        /// First byte.
        start: u64,
        /// First byte after it.
        end: u64,
    },
    /// Their content goes, as with `MADV_DONTNEED`; guard pages stay.
    Discard {
        /// First byte.
        start: u64,
        /// First byte after it.
        end: u64,
    },
    /// They are found elsewhere from now on, guard pages as well. Nothing is there.
    Move {
        /// First byte.
        from: u64,
        /// Where that is afterwards.
        to: u64,
        /// Bytes.
        len: u64,
    },
    /// What may be done with them has changed.
    Protect {
        /// First byte.
        start: u64,
        /// First byte after it.
        end: u64,
    },
    /// They become guard pages.
    Guard {
        /// First byte.
        start: u64,
        /// First byte after it.
        end: u64,
    },
    /// Guard pages among them are none any more.
    Unguard {
        /// First byte.
        start: u64,
        /// First byte after it.
        end: u64,
    },
}

/// What a child inherits of a range of its parent's, beside the mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inherited {
    /// First byte.
    pub start: u64,
    /// First byte after it.
    pub end: u64,
    /// What.
    pub how: Inheritance,
}

/// See [`Inherited`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inheritance {
    /// All that is there: private pages and guard pages, and nothing else can be there.
    Everything,
    /// Private pages and guard pages; others the child finds by itself.
    Private,
    /// Nothing.
    Nothing,
}

/// A page that has to be accessible.
pub struct Fault<'f> {
    /// Its first byte.
    pub addr: u64,
    /// For what. The mapping allows it.
    pub access: Access,
    /// Which accessor of the backend's asks for it, if one does: what it has cached of the page it will look up again.
    pub by: Option<AccessorId>,
    /// The mapping.
    pub vma: &'f Vma,
    /// Where it is.
    pub range: VmRange,
    /// The page's offset in the file, in pages, if the mapping is one of a file.
    pub pgoff: u64,
    /// Whether `vma` is still what is mapped there. To be asked under the lock under which the page is put in, so
    /// that a call that takes the mapping away finds the page.
    pub attached: &'f dyn Fn() -> bool,
    /// A copy may take the place of a page that is shown: those who have noted it have been told. Else it's
    /// [`Faulted::Replaces`].
    pub may_replace: bool,
    /// What a monitor is asked about: see [`Faulted::Monitored`].
    pub monitored: MonitorModes,
}

impl fmt::Debug for Fault<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fault")
            .field("addr", &self.addr)
            .field("access", &self.access)
            .field("vma", &self.vma)
            .finish_non_exhaustive()
    }
}

/// What became of a fault that found no error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Faulted {
    /// The page is there.
    Done,
    /// Something else is mapped there by now, or a call is moving pages: look up again, with the space's lock if
    /// that happens again and again.
    Again,
    /// A copy would take the place of a page that is shown ([`Fault::may_replace`]).
    Replaces,
    /// The mapping's monitor has to be asked, for one of [`Fault::monitored`].
    Monitored(MonitorModes),
    /// The mapping's file has to do something first, which may take long, or somebody is at the page. The caller lets go of its guard,
    /// and of the space's lock if it can, has the file do it ([`FileObject::prepare_page`]), and looks up again.
    NotReady,
}

/// What a monitor puts in place of a page.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Fill<'f> {
    /// As many bytes as a page has.
    Bytes(&'f [u8]),
    /// A page of zeros.
    Zeros,
    /// The page that the mapping's file has.
    Files,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// It's there.
    Done,
    /// There was a page.
    Exists,
    /// The file is at it: once more.
    Again,
    /// The backend has no pages.
    Unsupported,
}

/// Backing of a space. `()` is pure bookkeeping, at no cost.
///
/// None of the methods may call into the space.
pub trait Backend: Sized + Send + Sync + 'static {
    /// Whether there is anything behind mappings. `false` compiles the calls away.
    const ACTIVE: bool = true;

    /// What a call has taken out of the space, and not let go of yet.
    type Taken: Send + fmt::Debug;

    /// The space is made. Once, before anything else.
    ///
    /// # Errors
    /// [`ConfigError`]: the backend can't do this page size, or memory runs out.
    fn attach(&self, domain: &Domain, config: &SpaceConfig) -> Result<(), ConfigError>;

    /// Whether something may be behind a range, or be kept ready for it, so that it's worth looking for what is free around it. The
    /// space's lock is held exclusively.
    fn may_hold(&self, start: u64, end: u64) -> bool {
        let _ = (start, end);
        true
    }

    /// Does what can fail of changes that are about to be published. The space's lock is held exclusively. `holes` says for each
    /// [`Zap`](PageChange::Zap), in their order, what is free around it afterwards, itself included; at least itself. `mapped` are the ranges that
    /// mappings have afterwards, as far as they change. `None` if there is nothing to be done about it: neither
    /// [`commit`](Self::commit) nor [`finish`](Self::finish) is called then.
    ///
    /// # Errors
    /// [`PublishError`]: the call fails with `ENOMEM` and changes nothing.
    fn prepare(
        &self,
        changes: &[PageChange],
        holes: &[Range<u64>],
        mapped: &[Range<u64>],
    ) -> Result<Option<Self::Taken>, PublishError>;

    /// Makes changes, in their order, after they were published; `holes` as in [`prepare`](Self::prepare).
    ///
    /// The space's lock is held exclusively, and mappings whose pages are zapped or moved take no faults. What takes long is
    /// left for [`finish`](Self::finish).
    fn commit(&self, changes: &[PageChange], holes: &[Range<u64>], taken: &mut Self::Taken);

    /// Waits until no access uses what was there before, and lets go of it. With or without the space's lock; also for a call that
    /// was prepared and not made.
    fn finish(&self, taken: Self::Taken);

    /// Makes a page accessible. The caller has a guard of the space's domain.
    ///
    /// # Errors
    /// The signal that the access gets.
    fn fault(&self, fault: &Fault<'_>) -> Result<Faulted, FaultError>;

    /// Puts a page in place where there is none, for a monitor. The space's lock is held, and a guard.
    ///
    /// # Errors
    /// The signal that an access would get.
    fn fill(&self, fault: &Fault<'_>, fill: &Fill<'_>) -> Result<Filled, FaultError> {
        let _ = (fault, fill);
        Ok(Filled::Unsupported)
    }

    /// Has stores to the private pages that are there asked about from here on ([`MonitorModes::WP`]), or no longer. The space's lock is
    /// held exclusively. When it returns nobody stores to them without.
    ///
    /// # Errors
    /// Memory ran out; some may be done.
    fn monitor_protect(&self, start: u64, end: u64, on: bool) -> Result<(), PublishError> {
        let _ = (start, end, on);
        Ok(())
    }

    /// Whether a page is present: first byte, mapping, offset in its file in pages. The space's lock is held.
    fn is_resident(&self, addr: u64, vma: &Vma, pgoff: u64) -> bool;

    /// Whether a private mapping shows a page of its own at an address, in place of its file's. Asked with no lock held, for
    /// [`ProbeSite::is_copied`](crate::ProbeSite::is_copied).
    fn is_copied(&self, addr: u64) -> bool {
        let _ = addr;
        false
    }

    /// The backend of a child. Nothing is behind its mappings yet.
    ///
    /// # Errors
    /// Memory ran out.
    fn dup(&self) -> Result<Self, PublishError>;

    /// What the child of a fork gets. Stores that the parent makes from here on aren't seen in the child, nor the reverse;
    /// the child has what was there at one instant of the call.
    ///
    /// The space's lock is held exclusively, and nobody has the child yet but files that take pages out of it. `ranges` are all
    /// mappings, in order.
    ///
    /// # Errors
    /// Memory ran out; the parent is as it was, and the child will be dropped.
    fn dup_pages(&self, child: &Self, ranges: &[Inherited]) -> Result<(), PublishError>;

    /// Lets go of a file's pages. Called by the file, with no lock of the space's held, under a guard of its domain.
    fn unmap_file(&self, unmap: &FileUnmap<'_>);

    /// Lets go of what a range shows of the huge page that a frame is part of, for its owner; whether there was something. Called as
    /// [`unmap_file`](Self::unmap_file).
    fn unmap_huge(&self, start: u64, end: u64, part: &paged::Frame) -> bool {
        let _ = (start, end, part);
        false
    }

    /// The same for those pages of a range that their file has let go of already, whichever file that is.
    fn unmap_removed(&self, start: u64, end: u64);

    /// Takes stores to a file's pages away from what shows them there: they fault first from here on. How many entries have changed.
    /// Called as [`unmap_file`](Self::unmap_file); [`protected`](Self::protected) comes after the last part.
    fn protect_file(&self, unmap: &FileUnmap<'_>) -> usize {
        let _ = unmap;
        0
    }

    /// Waits until nobody stores to pages that stores were taken away from: by so many entries, or by calls that have taken
    /// entries out and not waited for it themselves.
    fn protected(&self, entries: usize) {
        let _ = entries;
    }

    /// As [`protect_file`](Self::protect_file) for those pages of a range that aren't marked as dirty, of whichever file. The mapping
    /// takes no faults or accesses meanwhile.
    fn protect_clean(&self, start: u64, end: u64) {
        let _ = (start, end);
    }

    /// A frame for a file's page, from its allocator. A backend that is about to give frames back waits for those, if there are none.
    fn allocate(&self, frames: &dyn paged::FrameAllocator) -> Option<paged::NewFrame> {
        frames.allocate()
    }

    /// Waits until no access uses what calls have taken out so far, whether or not they have waited for it themselves. Called by
    /// a file that lets go of pages: a mapping that it no longer finds may have shown them; and for a call that finds done what it is to do.
    fn settle(&self);

    /// What shared anonymous memory is made of.
    fn shared_memory(&self, builder: FileObjectBuilder) -> FileObjectBuilder {
        builder
    }
}

/// Pages of a file that mappings must let go of.
pub struct FileUnmap<'f> {
    /// The file.
    pub file: &'f FileObject,
    /// First byte of the mapping's part that shows them.
    pub start: u64,
    /// First byte after it.
    pub end: u64,
    /// Private copies of them as well.
    pub copies: bool,
    /// Whether one of the pages is mapped at an address. Since the mapping was looked up something else may have been mapped there. To
    /// be asked under the lock under which the page is taken out.
    pub is_shown: &'f dyn Fn(u64) -> bool,
}

impl fmt::Debug for FileUnmap<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileUnmap")
            .field("start", &self.start)
            .field("end", &self.end)
            .field("copies", &self.copies)
            .finish_non_exhaustive()
    }
}

impl Backend for () {
    const ACTIVE: bool = false;

    type Taken = ();

    fn attach(&self, _domain: &Domain, _config: &SpaceConfig) -> Result<(), ConfigError> {
        Ok(())
    }

    fn prepare(
        &self,
        _: &[PageChange],
        _holes: &[Range<u64>],
        _mapped: &[Range<u64>],
    ) -> Result<Option<()>, PublishError> {
        Ok(None)
    }

    fn commit(&self, _: &[PageChange], _holes: &[Range<u64>], _taken: &mut ()) {}

    fn finish(&self, _taken: ()) {}

    fn fault(&self, _fault: &Fault<'_>) -> Result<Faulted, FaultError> {
        Ok(Faulted::Done)
    }

    fn is_resident(&self, _addr: u64, _vma: &Vma, _pgoff: u64) -> bool {
        false
    }

    fn dup(&self) -> Result<Self, PublishError> {
        Ok(())
    }

    fn dup_pages(&self, _child: &Self, _ranges: &[Inherited]) -> Result<(), PublishError> {
        Ok(())
    }

    fn unmap_file(&self, _unmap: &FileUnmap<'_>) {}

    fn unmap_removed(&self, _start: u64, _end: u64) {}

    fn settle(&self) {}
}
