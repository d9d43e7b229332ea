//! Tables of the lowest level.

use std::ptr;

use vma_rcu::sync::atomic::{AtomicPtr, Ordering};
use vma_rcu::sync::{Arc, Mutex, MutexGuard, planted};

use super::super::entry::{Entry, Kind};
use super::ENTRIES;
use super::head::{Account, Head};

/// A table of entries.
pub(in super::super) struct Leaf {
    /// [`Entry`] words. Stored under the lock, with release: who reads one without the lock, with acquire, sees the frame's
    /// bytes as they were when it was put in. (Where a fault puts it in, the fence before it does that as well.) Model:
    /// `two_faults_make_one_page`.
    entries: [AtomicPtr<()>; ENTRIES],
    pub(super) head: Head,
    counts: Mutex<Counts>,
}

/// Pages of a leaf by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    /// Private pages.
    pub anon: u64,
    /// Pages of files.
    pub file: u64,
    /// Pages of shared memory.
    pub shmem: u64,
    /// Pages of 4 KiB that belong to huge ones, private or not (`HugetlbPages`).
    pub huge: u64,
}

impl Resident {
    pub(super) fn add(&mut self, other: Resident) {
        self.anon += other.anon;
        self.file += other.file;
        self.shmem += other.shmem;
        self.huge += other.huge;
    }

    /// All kinds together but huge pages (`VmRSS`).
    pub fn total(&self) -> u64 {
        self.anon + self.file + self.shmem
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    anon: u16,
    file: u16,
    shmem: u16,
    huge: u16,
    /// Not empty, guards and uncounted pages included.
    used: u16,
}

impl Counts {
    fn of(&mut self, kind: Kind) -> Option<&mut u16> {
        match kind {
            Kind::Anon => Some(&mut self.anon),
            Kind::File => Some(&mut self.file),
            Kind::Shmem => Some(&mut self.shmem),
            Kind::HugeAnon | Kind::HugeFile => Some(&mut self.huge),
            Kind::Uncounted => None,
        }
    }
}

/// A leaf whose entries can't change but by this.
pub(in super::super) struct LockedLeaf<'l> {
    leaf: &'l Leaf,
    counts: MutexGuard<'l, Counts>,
}

/// A leaf as a space sees it.
#[derive(Clone, Copy)]
pub(in super::super) struct Seen<'t> {
    pub(in super::super) leaf: &'t Leaf,
    /// Nothing in it may be changed, nor stored to.
    pub(in super::super) is_shared: bool,
}

impl Seen<'_> {
    pub(in super::super) fn entry(self, index: usize) -> Entry {
        let entry = self.leaf.entry(index);
        if self.is_shared {
            entry.unless_private()
        } else {
            entry
        }
    }
}

impl Leaf {
    /// What the leaf itself says; it may be shared.
    fn entry(&self, index: usize) -> Entry {
        Entry::from_word(self.entries[index].load(Ordering::Acquire))
    }

    pub(in super::super) fn lock(&self) -> LockedLeaf<'_> {
        LockedLeaf {
            leaf: self,
            counts: self.counts.lock(),
        }
    }

    /// Lets go of all that it holds. Nobody uses it, nor puts anything in.
    pub(super) fn clear(&self) {
        let mut entries = [Entry::NONE; ENTRIES];
        {
            let mut locked = self.lock();
            if locked.is_empty() {
                return;
            }
            for (index, entry) in entries.iter_mut().enumerate() {
                *entry = locked.entry(index);
                if !entry.is_none() {
                    self.entries[index].store(ptr::null_mut(), Ordering::Release);
                }
            }
            *locked.counts = Counts::default();
        }
        for entry in entries.iter().filter(|entry| !entry.is_none()) {
            // SAFETY: P2: just taken out.
            drop(unsafe { entry.take() });
        }
    }

    /// A copy that shows the same pages, none of the private ones owned, neither here nor there.
    ///
    /// The caller has locked it for copying, and a link to it stays meanwhile.
    pub(super) fn copy_into(&self, copy: &Leaf) {
        let mut from = self.lock();
        for index in 0..ENTRIES {
            let entry = from.entry(index);
            if entry.is_none() {
                continue;
            }
            let shown = from.share(index, entry);
            // Nobody else has the copy yet.
            copy.entries[index].store(shown.word(), Ordering::Relaxed);
        }
        *copy.counts.lock() = *from.counts;
    }
}

impl LockedLeaf<'_> {
    pub(in super::super) fn entry(&self, index: usize) -> Entry {
        Entry::from_word(self.leaf.entries[index].load(Ordering::Relaxed))
    }

    /// Puts in another entry and returns the one that was there, whose reference is now the caller's.
    pub(in super::super) fn replace(&mut self, index: usize, new: Entry) -> Entry {
        let old = self.entry(index);
        self.leaf.entries[index].store(new.word(), Ordering::Release);
        self.counts.used += u16::from(!new.is_none());
        self.counts.used -= u16::from(!old.is_none());
        if let Some(count) = self.counts.of(new.kind()) {
            *count += 1;
        }
        if let Some(count) = self.counts.of(old.kind()) {
            *count -= 1;
        }
        old
    }

    /// An entry of its own for another leaf, which shows the same; stores to a private page go to copies from here on.
    pub(in super::super) fn share(&mut self, index: usize, entry: Entry) -> Entry {
        if entry.is_owned() && entry.is_private() && !planted("shared_pages_stay_owned") {
            self.leaf.entries[index].store(entry.without_owner().word(), Ordering::Release);
        }
        // SAFETY: P2: in the table, under its lock.
        unsafe { entry.duplicate() }
    }

    pub(in super::super) fn is_empty(&self) -> bool {
        self.counts.used == 0
    }

    pub(super) fn resident(&self) -> Resident {
        Resident {
            anon: self.counts.anon.into(),
            file: self.counts.file.into(),
            shmem: self.counts.shmem.into(),
            huge: self.counts.huge.into(),
        }
    }

    /// P3.
    pub(super) fn recount(&self) -> Resident {
        let mut resident = Resident::default();
        for index in 0..ENTRIES {
            match self.entry(index).kind() {
                Kind::Anon => resident.anon += 1,
                Kind::File => resident.file += 1,
                Kind::Shmem => resident.shmem += 1,
                Kind::HugeAnon | Kind::HugeFile => resident.huge += 1,
                Kind::Uncounted => {}
            }
        }
        resident
    }
}

impl Drop for Leaf {
    fn drop(&mut self) {
        self.head.life.write();
        self.head.uncharge(size_of::<Leaf>());
        self.clear();
    }
}

impl Leaf {
    #[cfg(not(loom))]
    fn zeroed() -> Option<Box<Self>> {
        // SAFETY: null pointers, a head of zeros, zero counters; a free `parking_lot::Mutex` is a zero byte, see the test.
        unsafe { super::try_zeroed() }
    }

    /// loom's atomics aren't plain bytes.
    #[cfg(loom)]
    fn zeroed() -> Option<Box<Self>> {
        Some(Box::new(Leaf {
            entries: std::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())),
            head: Head::none(),
            counts: Mutex::new(Counts::default()),
        }))
    }

    /// `None` when memory runs out, or the account's limit.
    pub(super) fn try_new(account: &Arc<Account>) -> Option<Box<Self>> {
        account.charge(size_of::<Self>())?;
        let Some(mut leaf) = Self::zeroed() else {
            account.uncharge(size_of::<Self>());
            return None;
        };
        leaf.head.account = Some(Arc::clone(account));
        Some(leaf)
    }
}
