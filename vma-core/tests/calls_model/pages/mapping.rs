//! mmap(2) and `remap_file_pages(2)`.

use vma_core::VmaFlags;

use super::{
    Answer, Descriptor, EACCES, EEXIST, EINVAL, EOPNOTSUPP, EPERM, Model, Page, Source, answer,
    failed,
};
use crate::call::Call;
use crate::on_space::Outcome;

const TYPE: u64 = 0xf;
const SHARED: u64 = 1;
const PRIVATE: u64 = 2;
const SHARED_VALIDATE: u64 = 3;
const DROPPABLE: u64 = 8;
const FIXED: u64 = 0x10;
const BITS_32: u64 = 0x40;
const GROWSDOWN: u64 = 0x100;
const LOCKED: u64 = 0x2000;
const NORESERVE: u64 = 0x4000;
const STACK: u64 = 0x2_0000;
const SYNC: u64 = 0x8_0000;
const NOREPLACE: u64 = 0x10_0000;

/// An open file that isn't known yet: that of a new shared anonymous mapping.
pub(crate) const NEW_FILE: usize = 0;

/// Flags by the kind of mapping of a file, or why it can't be.
fn of_file(descriptor: Descriptor, prot: VmaFlags, flags: u64) -> Result<VmaFlags, i32> {
    let may = VmaFlags::MAY;
    let kind = flags & TYPE;
    let mut bits = match kind {
        SHARED | SHARED_VALIDATE => {
            // The one is as old as the flag, the other doesn't know its own modifiers.
            if kind == SHARED_VALIDATE && flags & (SYNC | NOREPLACE) != 0 {
                return Err(EOPNOTSUPP);
            }
            if prot.contains(VmaFlags::WRITE) && !descriptor.writable {
                return Err(EACCES);
            }
            let shared = may | VmaFlags::SHARED | VmaFlags::MAYSHARE;
            if descriptor.writable {
                shared
            } else {
                shared - (VmaFlags::MAYWRITE | VmaFlags::SHARED)
            }
        }
        PRIVATE => may,
        _ => return Err(EINVAL),
    };
    if !descriptor.readable {
        return Err(EACCES);
    }
    if flags & GROWSDOWN != 0 {
        return Err(EINVAL);
    }
    if descriptor.sealed && bits.contains(VmaFlags::SHARED) {
        if prot.contains(VmaFlags::WRITE) {
            return Err(EPERM);
        }
        bits -= VmaFlags::MAYWRITE;
    }
    Ok(bits)
}

fn of_anonymous(flags: u64) -> Result<VmaFlags, i32> {
    let grows = if flags & GROWSDOWN != 0 {
        VmaFlags::GROWSDOWN
    } else {
        VmaFlags::empty()
    };
    match flags & TYPE {
        SHARED if flags & GROWSDOWN == 0 => {
            Ok(VmaFlags::MAY | VmaFlags::SHARED | VmaFlags::MAYSHARE)
        }
        PRIVATE => Ok(VmaFlags::MAY | grows),
        DROPPABLE if flags & (LOCKED | GROWSDOWN) == 0 => Ok(VmaFlags::MAY
            | VmaFlags::DROPPABLE
            | VmaFlags::NORESERVE
            | VmaFlags::WIPEONFORK
            | VmaFlags::DONTDUMP),
        _ => Err(EINVAL),
    }
}

impl Model {
    pub(super) fn map(&mut self, call: &Call) -> Answer {
        let Call::Map {
            at,
            len,
            prot,
            flags,
            file,
            offset,
        } = *call
        else {
            unreachable!("called for mmap alone");
        };
        if len == 0 {
            return failed(EINVAL);
        }
        let fixed = flags & (FIXED | NOREPLACE) != 0;
        if fixed && !self.is_aligned(at) {
            return failed(EINVAL);
        }
        let from = at / self.page;
        let to = from + len.div_ceil(self.page);
        if flags & NOREPLACE != 0 && !self.is_free(from, to) {
            return failed(EEXIST);
        }
        let prot = VmaFlags::from_bits_retain(prot);
        let bits = match file {
            Some(file) => of_file(self.descriptors[file], prot, flags),
            None => of_anonymous(flags),
        };
        let mut bits = match bits {
            Ok(bits) => bits | prot | self.default_lock,
            Err(errno) => return failed(errno),
        };
        if flags & LOCKED != 0 {
            bits |= VmaFlags::LOCKED;
        }
        if bits.contains(VmaFlags::DROPPABLE) {
            bits -= VmaFlags::LOCK_BITS;
        }
        if flags & NORESERVE != 0 {
            bits |= VmaFlags::NORESERVE;
        }
        if flags & SYNC != 0 {
            // Marked whatever it's a mapping of; only SHARED_VALIDATE asks whether that makes sense.
            bits |= VmaFlags::SYNC;
        }
        if flags & STACK != 0 {
            bits |= VmaFlags::NOHUGEPAGE;
        }
        if !fixed && (flags & BITS_32 != 0 || !self.takes_hint(from, to)) {
            return Answer::This(Outcome::Outside);
        }
        if self.any_sealed(from, to) {
            return failed(EPERM);
        }
        let source = match file {
            Some(file) => Source::File {
                open_file: self.descriptors[file].open_file,
                page: offset / self.page,
            },
            None if bits.contains(VmaFlags::MAYSHARE) => Source::File {
                open_file: NEW_FILE,
                page: 0,
            },
            None => Source::Anonymous,
        };
        self.fill(
            from,
            to,
            Page {
                flags: bits.bits(),
                source,
                history: None,
            },
        );
        Answer::This(Outcome::At(from * self.page))
    }

    /// A hint is taken where it's free, and nothing above wants room below.
    pub(super) fn takes_hint(&self, from: u64, to: u64) -> bool {
        let above = self.pages.range(from..).next();
        self.is_free(from, to) && above.is_none_or(|(_, page)| !page.has(VmaFlags::GROWSDOWN))
    }

    /// Pages that go on from a first one.
    pub(super) fn fill(&mut self, from: u64, to: u64, first: Page) {
        for number in from..to {
            self.pages.insert(number, first.further(number - from));
        }
    }

    /// A fixed mapping of other pages of what is mapped shared there.
    pub(super) fn remap_file(&mut self, call: &Call) -> Answer {
        let Call::RemapFile {
            at,
            len,
            prot,
            pgoff,
            ..
        } = *call
        else {
            unreachable!("called for remap_file_pages alone");
        };
        let from = at / self.page;
        let to = from + len / self.page;
        let Some(first) = self
            .pages
            .get(&from)
            .copied()
            .filter(|page| page.has(VmaFlags::SHARED))
        else {
            return failed(EINVAL);
        };
        let Source::File { open_file, .. } = first.source else {
            return failed(EINVAL);
        };
        let alike = self.walk(from, to, |page| {
            let same_file =
                matches!(page.source, Source::File { open_file: other, .. } if other == open_file);
            if page.flags == first.flags && same_file {
                Ok(())
            } else {
                Err(EINVAL)
            }
        });
        if prot != 0 || from >= to || alike.is_err() {
            return failed(EINVAL);
        }
        if self.any_sealed(from, to) {
            return failed(EPERM);
        }
        let kept = VmaFlags::ACCESS | VmaFlags::MAY | VmaFlags::SHARED | VmaFlags::MAYSHARE;
        let mut flags = VmaFlags::from_bits_retain(first.flags) & kept;
        flags |= self.default_lock;
        if first.has(VmaFlags::LOCKED) {
            flags |= VmaFlags::LOCKED;
        }
        let source = Source::File {
            open_file,
            page: pgoff,
        };
        self.fill(
            from,
            to,
            Page {
                flags: flags.bits(),
                source,
                history: None,
            },
        );
        answer(Ok(()))
    }
}
