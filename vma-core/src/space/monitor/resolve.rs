//! What monitors put in place: `UFFDIO_COPY`, `UFFDIO_ZEROPAGE`, `UFFDIO_CONTINUE`, `UFFDIO_WRITEPROTECT`.

use super::{is_shared_memory, parse};
use crate::addr::VmRange;
use crate::backend::{Backend, Fault, Fill, Filled};
use crate::events::{Context, Monitor, MonitorModes};
use crate::flags::VmaFlags;
use crate::limits::SpaceConfig;
use crate::space::{Access, AddressSpace, FaultError, ResolveError};
use crate::vma::Placed;

/// What is put in place of one page.
enum Content<'c> {
    Bytes(&'c [u8]),
    Zeros,
    /// The page that the file has.
    Files,
}

impl<B: Backend> AddressSpace<B> {
    /// Puts pages in place where there are none, and wakes who waits for them (`UFFDIO_COPY`). Returns how many bytes, which is less than
    /// asked for if an error came after the first page.
    ///
    /// # Errors
    /// | errno | when |
    /// |---|---|
    /// | `EAGAIN` | an event has to be read first |
    /// | `EINVAL` | unaligned, empty or outside; another space's monitor; huge pages; a backend without pages |
    /// | `ENOENT` | not within one registered mapping |
    /// | `EEXIST` | there is a page |
    /// | `EFAULT` | the file ends before |
    /// | `ENOMEM` | no memory |
    ///
    /// Takes the shared side of the space's lock. Source: `userfaultfd_copy()`, `mfill_atomic_copy()`.
    pub fn monitor_copy(
        &self,
        monitor: &Monitor,
        addr: u64,
        bytes: &[u8],
    ) -> Result<u64, ResolveError> {
        let page = self.core.pages.size() as usize;
        let content = |at: u64| {
            let from = (at - addr) as usize;
            Content::Bytes(&bytes[from..from + page])
        };
        self.resolve(monitor, addr, bytes.len() as u64, content)
    }

    /// Pages of zeros, as [`monitor_copy`](Self::monitor_copy) does it (`UFFDIO_ZEROPAGE`).
    ///
    /// # Errors
    /// As there.
    pub fn monitor_zero(
        &self,
        monitor: &Monitor,
        addr: u64,
        len: u64,
    ) -> Result<u64, ResolveError> {
        self.resolve(monitor, addr, len, |_| Content::Zeros)
    }

    /// Has a mapping show pages that its file has (`UFFDIO_CONTINUE`), as [`monitor_copy`](Self::monitor_copy) does it.
    ///
    /// # Errors
    /// As there; `EINVAL` not shared memory; `EFAULT` the file has no page.
    pub fn monitor_continue(
        &self,
        monitor: &Monitor,
        addr: u64,
        len: u64,
    ) -> Result<u64, ResolveError> {
        self.resolve(monitor, addr, len, |_| Content::Files)
    }

    /// Protects the pages that are in place, so that stores to them are asked about, or no longer, and wakes who waits
    /// (`UFFDIO_WRITEPROTECT`). Pages of anonymous memory alone.
    ///
    /// # Errors
    /// `EAGAIN` an event has to be read first; `EINVAL` unaligned, empty or outside, another space's monitor, not anonymous memory; `ENOENT`
    /// something in the range isn't registered for it (what lies before is done); `ENOMEM` no memory for page tables.
    ///
    /// Takes the exclusive side of the space's lock. Source: `userfaultfd_writeprotect()`, `mwriteprotect_range()`.
    pub fn monitor_write_protect(
        &self,
        monitor: &Monitor,
        addr: u64,
        len: u64,
        on: bool,
    ) -> Result<(), ResolveError> {
        let asked = monitor.context();
        let guard = self.write();
        let range = self.resolved_range(asked, guard.config(), addr, len)?;
        let mut at = range.start;
        while at < range.end {
            let vma = guard.find(at);
            let vma = vma.filter(|vma| vma.flags().contains(VmaFlags::UFFD_WP));
            let vma = vma.ok_or(ResolveError::NotRegistered(at))?;
            if !vma.vma().is_anonymous() {
                return Err(ResolveError::NotApplicable(vma.range()));
            }
            let part = VmRange::new(at, vma.range().end.min(range.end));
            let done = guard.protect_pages(part, on);
            done.map_err(|_| ResolveError::OutOfMemory(at))?;
            at = part.end;
        }
        drop(guard);
        if !on {
            asked.wake(range);
        }
        Ok(())
    }

    /// What comes before all that a monitor does to pages.
    fn resolved_range(
        &self,
        context: &Context,
        config: &SpaceConfig,
        addr: u64,
        len: u64,
    ) -> Result<VmRange, ResolveError> {
        if context.is_changing() {
            return Err(ResolveError::Changing);
        }
        let bad = ResolveError::BadRange { addr, len };
        let range = parse(config, addr, len).ok_or(bad)?;
        if !context.is_of(self.id()) {
            return Err(ResolveError::OtherSpace);
        }
        Ok(range)
    }

    fn resolve<'c>(
        &self,
        monitor: &Monitor,
        addr: u64,
        len: u64,
        content: impl Fn(u64) -> Content<'c>,
    ) -> Result<u64, ResolveError> {
        let asked = monitor.context();
        let mut at = addr;
        let result = self.with_pager_now(|pager, config| {
            let range = self.resolved_range(asked, config, addr, len)?;
            let vma = pager
                .find(range.start)
                .filter(|vma| vma.vma.monitor().is_some());
            let vma = vma.filter(|vma| range.end <= vma.end);
            let vma = vma.ok_or(ResolveError::NotRegistered(range.start))?;
            if !vma.flags().contains(VmaFlags::SHARED) {
                pager.identify(range.start);
            }
            while at < range.end {
                self.resolve_page(vma, at, &content(at))?;
                at += self.core.pages.size();
            }
            Ok(())
        });
        if at > addr {
            asked.wake(VmRange::new(addr, at));
            return Ok(at - addr);
        }
        result.map(|()| 0)
    }

    /// With the shared side of the space's lock held.
    fn resolve_page(
        &self,
        vma: Placed<'_>,
        at: u64,
        content: &Content<'_>,
    ) -> Result<(), ResolveError> {
        let not_applicable = ResolveError::NotApplicable(vma.range());
        if vma.flags().contains(VmaFlags::HUGETLB) {
            return Err(not_applicable);
        }
        let shown = vma.file().filter(|_| !vma.vma.is_anonymous());
        let pgoff = vma.pgoff_at(at);
        if shown.is_some_and(|file| !file.object().has_page(vma.pages.bytes(pgoff))) {
            return Err(ResolveError::NoPage(at));
        }
        let fill = match content {
            Content::Bytes(bytes) => Fill::Bytes(bytes),
            Content::Zeros => Fill::Zeros,
            Content::Files => {
                let memory = shown.filter(|_| is_shared_memory(vma.vma));
                let memory = memory.ok_or(not_applicable)?;
                if !memory.object().pages().contains(pgoff) {
                    return Err(ResolveError::NoPage(at));
                }
                Fill::Files
            }
        };
        let reader = self.register();
        let _guard = reader.pin();
        let fault = Fault {
            addr: at,
            access: Access::Write,
            by: None,
            vma: vma.vma,
            range: vma.range(),
            pgoff,
            attached: &|| true,
            may_replace: false,
            monitored: MonitorModes::empty(),
        };
        loop {
            let filled = self.core.backend.fill(&fault, &fill);
            let filled = filled.map_err(|error| match error {
                FaultError::BeyondEnd(_) => ResolveError::NoPage(at),
                FaultError::OutOfMemory(_) => ResolveError::OutOfMemory(at),
                _ => not_applicable,
            })?;
            match filled {
                Filled::Done => return Ok(()),
                Filled::Exists => return Err(ResolveError::Exists(at)),
                Filled::Unsupported => return Err(not_applicable),
                // A file is taking out the page.
                Filled::Again => std::thread::yield_now(),
            }
        }
    }
}
