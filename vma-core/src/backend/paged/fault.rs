//! How a page comes into being.
//!
//! | mapping | load finds nothing | store finds nothing | store finds a page that isn't its own |
//! |---|---|---|---|
//! | private, anonymous | the page of zeros | a page of zeros of its own | a copy |
//! | private, of a file | the file's page | a copy of the file's page | a copy |
//! | shared | the file's page | the file's page | the page itself from then on; its file marks it as dirty, if it does that |
//!
//! All that takes time (allocating, zeroing, copying, asking the file) is done under no lock. Then the leaf's lock is
//! taken, and the page put in if everything is still as it was found.

use std::ptr::NonNull;
#[cfg(not(loom))]
use std::sync::OnceLock;

use vma_rcu::sync::atomic::{Ordering, fence};
use vma_rcu::sync::planted;

use super::entry::{Entry, Kind};
use super::frame::{Frame, FrameHead};
use super::huge;
#[cfg(not(loom))]
use super::mapping::Mapping;
use super::table::{Leaf, NoMemory, Seen, index};
use super::{Fault, Faulted, Fill, Filled, PAGE, Paged, State};
use crate::events::MonitorModes;
use crate::file::{FileKind, FileObject, FilePage, Marked, OpenFile};
use crate::flags::VmaFlags;
use crate::space::{Access, FaultError};

/// The one page of zeros. It is never written and never freed.
struct ZeroPage {
    head: FrameHead,
    #[cfg(not(loom))]
    _memory: Mapping,
    /// What loom sees of it.
    #[cfg(loom)]
    _memory: Box<vma_rcu::sync::atomic::AtomicU64>,
}

impl ZeroPage {
    fn new() -> Option<Self> {
        unsafe fn keep(_: NonNull<FrameHead>) {}
        #[cfg(not(loom))]
        let (memory, start) = {
            let memory = Mapping::new(1)?;
            let start = memory.page(0);
            (memory, start)
        };
        #[cfg(loom)]
        let (memory, start) = {
            let memory = Box::new(vma_rcu::sync::atomic::AtomicU64::new(0));
            let start = NonNull::from(&*memory).cast();
            (memory, start)
        };
        // SAFETY: F1: a page of its own, for ever, which nobody writes.
        let head = unsafe { FrameHead::new(start, std::ptr::null(), keep) };
        Some(ZeroPage {
            head,
            _memory: memory,
        })
    }
}

/// The page of zeros; `None` when memory runs out before there is one.
#[cfg(not(loom))]
fn zero_page() -> Option<&'static FrameHead> {
    static ZERO: OnceLock<Option<ZeroPage>> = OnceLock::new();
    let page = ZERO.get_or_init(ZeroPage::new);
    page.as_ref().map(|page| &page.head)
}

/// The same: one per execution of a model.
#[cfg(loom)]
fn zero_page() -> Option<&'static FrameHead> {
    loom::lazy_static! {
        static ref ZERO: Option<ZeroPage> = ZeroPage::new();
    }
    ZERO.as_ref().map(|page| &page.head)
}

/// An entry for a read fault of private memory.
fn zeros(addr: u64) -> Result<Entry, FaultError> {
    let head = zero_page().ok_or(FaultError::OutOfMemory(addr))?;
    // SAFETY: F3: it stays for ever.
    Ok(unsafe { Entry::borrowed(head.into(), false) })
}

/// Whether an entry does for an access.
pub(super) fn suffices(entry: Entry, access: Access) -> bool {
    entry.head().is_some() && (access != Access::Write || entry.is_owned())
}

/// See [`Backend::fault`](super::Backend::fault).
pub(super) fn fault(paged: &Paged, fault: &Fault<'_>) -> Result<Faulted, FaultError> {
    let state = paged.state();
    if fault.addr >= state.limit {
        return Err(FaultError::Unmapped(fault.addr));
    }
    if fault.vma.huge_page_size().is_some() {
        return huge::fault(paged, fault);
    }
    loop {
        let looked = state.tables.look(fault.addr);
        let (seen, found) = looked.map_or((None, Entry::NONE), |(seen, found)| (Some(seen), found));
        if found.is_guard() {
            return Err(FaultError::Unmapped(fault.addr));
        }
        if found.is_protected()
            && fault.access == Access::Write
            && fault.monitored.contains(MonitorModes::WP)
        {
            return Ok(Faulted::Monitored(MonitorModes::WP));
        }
        if suffices(found, fault.access) || is_last_owner(state, fault, found)? {
            return Ok(Faulted::Done);
        }
        if let Some(object) = stored_to(fault)
            && found.head().is_some()
        {
            match own(state, fault, found, object)? {
                Installed::Yes => return Ok(Faulted::Done),
                Installed::Changed => continue,
                Installed::Stale => return Ok(Faulted::Again),
                Installed::NotReady => return Ok(Faulted::NotReady),
            }
        }
        let source = source(fault, found);
        if !fault.monitored.is_empty()
            && let Some(mode) = asked_about(fault, source)
        {
            return Ok(Faulted::Monitored(mode));
        }
        let new = match source {
            Source::Nothing => return Err(FaultError::NoFrame(fault.addr)),
            Source::Zeros => New::of(zeros(fault.addr)?),
            Source::Fresh => {
                let frame = paged.allocate(fault.addr)?;
                New::of(Entry::of(frame.zeroed(), Kind::Anon, true))
            }
            Source::CopyOfFound if !fault.may_replace => return Ok(Faulted::Replaces),
            Source::CopyOfFound => match copy_of(paged, seen, fault, found)? {
                Some(new) => new,
                None => continue,
            },
            Source::File(file) => match file_page(paged, fault, file)? {
                Some(new) => new,
                None => return Ok(Faulted::NotReady),
            },
        };
        match install(state, fault, found, new)? {
            Installed::Yes => {
                if let Source::File(file) = source
                    && fault.access == Access::Read
                    && fault.monitored.is_empty()
                {
                    around(state, fault, file);
                }
                return Ok(Faulted::Done);
            }
            Installed::Changed => {}
            Installed::Stale => return Ok(Faulted::Again),
            Installed::NotReady => return Ok(Faulted::NotReady),
        }
    }
}

/// What a monitor is asked before a page is put in that isn't there. Source: `do_anonymous_page()`, `shmem_get_folio_gfp()`.
fn asked_about(fault: &Fault<'_>, source: Source<'_>) -> Option<MonitorModes> {
    let mode = match source {
        Source::Zeros | Source::Fresh => MonitorModes::MISSING,
        Source::CopyOfFound | Source::Nothing => return None,
        Source::File(file) => {
            let object = file.object();
            if !object.has_page(fault.pgoff.saturating_mul(PAGE as u64)) {
                return None;
            }
            if object.pages().contains(fault.pgoff) {
                MonitorModes::MINOR
            } else {
                MonitorModes::MISSING
            }
        }
    };
    fault.monitored.contains(mode).then_some(mode)
}

/// See [`Backend::fill`](super::Backend::fill).
pub(super) fn fill(
    paged: &Paged,
    fault: &Fault<'_>,
    content: &Fill<'_>,
) -> Result<Filled, FaultError> {
    let state = paged.state();
    let looked = state.tables.look(fault.addr);
    if looked.is_some_and(|(_, entry)| !entry.is_none()) {
        return Ok(Filled::Exists);
    }
    let is_shared = fault.vma.flags().contains(VmaFlags::SHARED);
    let shared = fault.vma.file().filter(|_| is_shared);
    let new = match (content, shared) {
        (Fill::Files, _) => None,
        (_, Some(file)) => {
            if !add_to_file(paged, fault, file, content)? {
                return Ok(Filled::Exists);
            }
            None
        }
        (Fill::Zeros, None) => Some(New::of(zeros(fault.addr)?)),
        (Fill::Bytes(bytes), None) => {
            let frame = paged.allocate(fault.addr)?.filled();
            frame.bytes().write(0, bytes);
            Some(New::of(Entry::of(frame, Kind::Anon, true)))
        }
    };
    let Some(new) = new else {
        let access = if is_shared {
            fault.access
        } else {
            Access::Read
        };
        let by_file = Fault { access, ..*fault };
        return match self::fault(paged, &by_file)? {
            Faulted::Done => Ok(Filled::Done),
            _ => Ok(Filled::Again),
        };
    };
    match install(state, fault, Entry::NONE, new)? {
        Installed::Yes => Ok(Filled::Done),
        Installed::Changed => Ok(Filled::Exists),
        Installed::Stale | Installed::NotReady => Ok(Filled::Again),
    }
}

/// Puts a page into a file; whether there was none.
fn add_to_file(
    paged: &Paged,
    fault: &Fault<'_>,
    file: &OpenFile,
    content: &Fill<'_>,
) -> Result<bool, FaultError> {
    let object = file.object();
    let new = paged.pending.until_some(|| object.pages().allocate());
    let new = new.ok_or(FaultError::OutOfMemory(fault.addr))?;
    let frame = match content {
        Fill::Bytes(bytes) => {
            let frame = new.filled();
            frame.bytes().write(0, bytes);
            frame
        }
        Fill::Zeros | Fill::Files => new.zeroed(),
    };
    let added = object.pages().add(object, fault.pgoff, frame);
    added.ok_or(FaultError::BeyondEnd(fault.addr))
}

/// The file whose page a store goes to.
fn stored_to<'f>(fault: &Fault<'f>) -> Option<&'f FileObject> {
    let is_shared_store =
        fault.access == Access::Write && fault.vma.flags().contains(VmaFlags::SHARED);
    let file = fault.vma.file().filter(|_| is_shared_store)?;
    Some(file.object())
}

/// Marks a page as dirty that stores are about to go to. With its leaf locked (D1).
fn mark(object: &FileObject, pgoff: u64, frame: &Frame) -> Result<(), Installed> {
    if !object.is_tracked() {
        return Ok(());
    }
    let asks = object
        .backend()
        .is_some_and(|backend| backend.asks_before_store());
    match object.pages().mark_for_stores(pgoff, frame, asks) {
        Marked::Yes => Ok(()),
        Marked::NotAllowed => Err(Installed::NotReady),
        Marked::Gone => Err(Installed::Stale),
    }
}

/// Stores to the file's page that was found go there from now on.
fn own(
    state: &State,
    fault: &Fault<'_>,
    found: Entry,
    object: &FileObject,
) -> Result<Installed, FaultError> {
    let _faulting = state.faults.read();
    let leaf = own_leaf(state, fault)?;
    let mark = |entry: Entry| {
        // SAFETY: F2, F3: in the table, under its lock.
        let frame = unsafe { entry.share() };
        frame.map_or(Ok(()), |frame| mark(object, fault.pgoff, &frame))
    };
    let too_early = planted("mark_before_the_lock");
    if too_early {
        let _ = mark(leaf.lock().entry(index(fault.addr)));
    }
    let mut leaf = leaf.lock();
    let at = index(fault.addr);
    // As in `install`.
    fence(Ordering::SeqCst);
    let now = leaf.entry(at);
    if !(fault.attached)() || now.is_removed() {
        return Ok(Installed::Stale);
    }
    if !now.shows_what(found) {
        return Ok(Installed::Changed);
    }
    if !now.is_owned() {
        if !too_early && let Err(result) = mark(now) {
            return Ok(result);
        }
        // The reference stays in the entry.
        leaf.replace(at, now.owned());
    }
    Ok(Installed::Yes)
}

/// Pages that a load brings in with the one that it's for, if the file has them at hand: an aligned group (`fault_around_bytes`).
const AROUND: usize = 16;

/// Puts in the file's pages around one that was loaded from. Source: `do_fault_around()`.
fn around(state: &State, fault: &Fault<'_>, file: &OpenFile) {
    let bytes = (AROUND * PAGE) as u64;
    let low = (fault.addr & !(bytes - 1)).max(fault.range.start);
    let high = ((fault.addr & !(bytes - 1)) + bytes).min(fault.range.end);
    let page = PAGE as u64;
    let first = fault.pgoff - (fault.addr - low) / page;
    let object = file.object();
    let pages = object
        .pages()
        .present::<AROUND>(object, first..first + (high - low) / page);
    if pages.len() < 2 {
        return;
    }
    let kind = kind_of(object);
    // A first store has to be marked.
    let owned = fault.vma.flags().contains(VmaFlags::SHARED) && !object.is_tracked();
    let _faulting = state.faults.read();
    // The table is there, but where the page that was just put in has been taken out again.
    let Some(seen) = state.tables.leaf(fault.addr).filter(|seen| !seen.is_shared) else {
        return;
    };
    let mut leaf = seen.leaf.lock();
    // As in `install`.
    fence(Ordering::SeqCst);
    if !(fault.attached)() {
        return;
    }
    for (at, frame) in &pages {
        let index = index(low + (at - first) * page);
        if leaf.entry(index).is_none() && !frame.is_removed() {
            leaf.replace(index, Entry::of(frame.clone(), kind, owned));
        }
    }
}

/// What a file's pages count as.
fn kind_of(object: &FileObject) -> Kind {
    match object.kind() {
        FileKind::Shmem => Kind::Shmem,
        _ => Kind::File,
    }
}

/// What is to be put in.
struct New {
    entry: Entry,
    /// The page that it shows, or is a copy of: if its file lets go of that, it isn't put in.
    of: Option<Frame>,
    /// It's to be marked as dirty.
    dirty: bool,
}

impl New {
    fn of(entry: Entry) -> Self {
        New {
            entry,
            of: None,
            dirty: false,
        }
    }
}

/// What the new page is made of.
#[derive(Clone, Copy)]
enum Source<'f> {
    Zeros,
    Fresh,
    CopyOfFound,
    File(&'f OpenFile),
    /// The embedder has put in no frame.
    Nothing,
}

/// The leaf that the page is put into. While the caller has `State::faults`.
pub(super) fn own_leaf<'s>(state: &'s State, fault: &Fault<'_>) -> Result<&'s Leaf, FaultError> {
    let leaf = state.tables.own_leaf(fault.addr);
    leaf.map_err(|NoMemory| FaultError::OutOfMemory(fault.addr))
}

/// Nobody else shows the private page any more that was shared with a child or a parent: stores may go to it.
fn is_last_owner(state: &State, fault: &Fault<'_>, found: Entry) -> Result<bool, FaultError> {
    if found.kind() != Kind::Anon {
        return Ok(false);
    }
    let _faulting = state.faults.read();
    let mut leaf = own_leaf(state, fault)?.lock();
    let at = index(fault.addr);
    let now = leaf.entry(at);
    let is_sole = now.shows_what(found) && (now.is_owned() || found.head().is_some_and(is_sole));
    if is_sole {
        // The reference stays in the entry.
        leaf.replace(at, now.owned());
    }
    Ok(is_sole)
}

/// Whether the entry in hand has the only reference. The leaf is locked.
pub(super) fn is_sole(head: NonNull<FrameHead>) -> bool {
    // SAFETY: F2: the entry holds a reference.
    unsafe { head.as_ref() }.is_sole()
}

fn source<'f>(fault: &Fault<'f>, found: Entry) -> Source<'f> {
    let write = fault.access == Access::Write;
    let file = fault.vma.file().filter(|_| !fault.vma.is_anonymous());
    match file {
        _ if found.head().is_some() => Source::CopyOfFound,
        _ if fault.vma.flags().contains(VmaFlags::PFNMAP) => Source::Nothing,
        Some(file) => Source::File(file),
        None if write => Source::Fresh,
        None => Source::Zeros,
    }
}

/// A copy of the page that was found, for a store to private memory. `None`: it isn't there any more.
fn copy_of(
    paged: &Paged,
    seen: Option<Seen<'_>>,
    fault: &Fault<'_>,
    found: Entry,
) -> Result<Option<New>, FaultError> {
    let Some(seen) = seen else { return Ok(None) };
    let mut new = paged.allocate(fault.addr)?;
    let is_zero = zero_page().is_some_and(|zero| found.head() == Some(zero.into()));
    if is_zero {
        return Ok(Some(New::of(Entry::of(new.zeroed(), Kind::Anon, true))));
    }
    let old = {
        let leaf = seen.leaf.lock();
        if !leaf.entry(index(fault.addr)).shows_what(found) {
            return Ok(None);
        }
        // SAFETY: F2, F3: in the table, under its lock.
        unsafe { found.share() }
    };
    let Some(old) = old else { return Ok(None) };
    old.bytes().copy_to(&mut new);
    let entry = Entry::of(new.filled(), Kind::Anon, true);
    // Kept until the copy is put in: else the same frame could be there again with other content.
    let of = Some(old);
    let dirty = false;
    Ok(Some(New { entry, of, dirty }))
}

/// The file's page, or a copy of it for a store to a private mapping. `None`: the file isn't ready.
fn file_page(paged: &Paged, fault: &Fault<'_>, file: &OpenFile) -> Result<Option<New>, FaultError> {
    let object = file.object();
    let find = || match object.pages().get_or_make(object, fault.pgoff) {
        FilePage::OutOfMemory => None,
        found => Some(found),
    };
    let page = match paged.pending.until_some(find) {
        Some(FilePage::Frame(frame)) => frame,
        Some(FilePage::BeyondEnd) => return Err(FaultError::BeyondEnd(fault.addr)),
        Some(FilePage::NotReady) => return Ok(None),
        Some(FilePage::OutOfMemory) | None => return Err(FaultError::OutOfMemory(fault.addr)),
    };
    let kind = kind_of(object);
    let shared = fault.vma.flags().contains(VmaFlags::SHARED);
    let write = fault.access == Access::Write;
    if shared || !write {
        let owned = shared && (write || !object.is_tracked());
        let entry = Entry::of(page.clone(), kind, owned);
        let (of, dirty) = (Some(page), shared && write);
        return Ok(Some(New { entry, of, dirty }));
    }
    let mut new = paged.allocate(fault.addr)?;
    page.bytes().copy_to(&mut new);
    let entry = Entry::of(new.filled(), Kind::Anon, true);
    let (of, dirty) = (Some(page), false);
    Ok(Some(New { entry, of, dirty }))
}

enum Installed {
    Yes,
    /// Somebody has put in something else.
    Changed,
    /// The mapping, or the file's page, isn't what it was.
    Stale,
    /// The file has to allow the store first.
    NotReady,
}

fn install(
    state: &State,
    fault: &Fault<'_>,
    found: Entry,
    new: New,
) -> Result<Installed, FaultError> {
    let New {
        entry: new,
        of,
        dirty,
    } = new;
    let _faulting = state.faults.read();
    let leaf = match own_leaf(state, fault) {
        Ok(leaf) => leaf,
        Err(error) => {
            // SAFETY: F2: it was put in nowhere.
            drop(unsafe { new.take() });
            return Err(error);
        }
    };
    let mut locked = leaf.lock();
    let at = index(fault.addr);
    // Pairs with those of calls (`Gates`, `recheck_files`): a call that hasn't seen this leaf is seen here. Model:
    // `a_fault_puts_nothing_into_an_unmapped_range`.
    if !planted("no_fault_fence") {
        fence(Ordering::SeqCst);
    }
    let is_gone = of.as_ref().is_some_and(Frame::is_removed) && !planted("no_look_at_removed");
    let is_stale = !planted("no_recheck") && !(fault.attached)() || is_gone;
    let now = locked.entry(at);
    let fits = now.shows_what(found) && !suffices(now, fault.access);
    let marked = match (stored_to(fault), &of) {
        (Some(object), Some(frame)) if dirty && fits && !is_stale => {
            mark(object, fault.pgoff, frame)
        }
        _ => Ok(()),
    };
    let result = if is_stale {
        Installed::Stale
    } else if let Err(result) = marked {
        result
    } else if fits {
        if now.head().is_some() {
            // An accessor may have the old page cached for loads. It's out of use before the first store to the new one; who
            // faults meanwhile waits for the leaf's lock.
            locked.replace(at, Entry::NONE);
            if !planted("no_shootdown_of_copy") {
                match fault.by {
                    Some(id) => state.shootdown.invalidate_others(id),
                    None => state.shootdown.invalidate(),
                }
            }
        }
        locked.replace(at, new);
        Installed::Yes
    } else {
        Installed::Changed
    };
    drop(locked);
    let gone = match result {
        Installed::Yes => now,
        Installed::Changed | Installed::Stale | Installed::NotReady => new,
    };
    // SAFETY: F2: taken out, and nobody uses it any more, or never put in.
    drop(unsafe { gone.take() });
    drop(of);
    Ok(result)
}

const _: () = assert!(PAGE == 1 << 12);
