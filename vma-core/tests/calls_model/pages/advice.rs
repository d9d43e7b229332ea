//! madvise(2).

use vma_core::VmaFlags;

use super::{
    Answer, DONE, EACCES, EFAULT, EINVAL, ENOMEM, EPERM, Model, Page, Refusal, Source, failed,
};

const POPULATE_READ: i32 = 22;
const POPULATE_WRITE: i32 = 23;
/// `MADV_DONTNEED`, `FREE`, `REMOVE`, `DONTFORK`, `WIPEONFORK`, `DONTNEED_LOCKED`.
const DISCARDING: [i32; 6] = [4, 8, 9, 10, 18, 24];

fn refuse_if(refused: bool, errno: i32) -> Refusal {
    if refused { Err(errno) } else { Ok(()) }
}

fn is_protected_by_seal(page: &Page) -> bool {
    page.has(VmaFlags::SEALED) && page.is_anonymous() && !page.has(VmaFlags::WRITE)
}

/// An advice on one page. `sealed_file`: the open file that may not be written.
fn advise_page(page: &mut Page, advice: i32, sealed_file: usize) -> Refusal {
    if DISCARDING.contains(&advice) && is_protected_by_seal(page) {
        return Err(EPERM);
    }
    let locked = page.has(VmaFlags::LOCKED);
    let droppable = page.has(VmaFlags::DROPPABLE);
    let shared = page.has_any(VmaFlags::SHARED | VmaFlags::MAYSHARE);
    let reading = VmaFlags::RAND_READ | VmaFlags::SEQ_READ;
    match advice {
        0 => page.clear(reading),
        1 | 2 => {
            page.clear(reading);
            page.set(if advice == 1 {
                VmaFlags::RAND_READ
            } else {
                VmaFlags::SEQ_READ
            });
        }
        // Content only.
        3 | 24 => {}
        4 | 20 | 21 => refuse_if(locked, EINVAL)?,
        8 => refuse_if(locked || !page.is_anonymous(), EINVAL)?,
        9 => {
            let Source::File { open_file, .. } = page.source else {
                return Err(EINVAL);
            };
            refuse_if(locked, EINVAL)?;
            refuse_if(!page.has(VmaFlags::SHARED | VmaFlags::MAYWRITE), EACCES)?;
            refuse_if(open_file == sealed_file, EPERM)?;
        }
        10 => page.set(VmaFlags::DONTCOPY),
        11 => page.clear(VmaFlags::DONTCOPY),
        12 if shared || droppable => {}
        12 => page.set(VmaFlags::MERGEABLE),
        13 => page.clear(VmaFlags::MERGEABLE),
        14 => {
            page.clear(VmaFlags::NOHUGEPAGE);
            page.set(VmaFlags::HUGEPAGE);
        }
        15 => {
            page.clear(VmaFlags::HUGEPAGE);
            page.set(VmaFlags::NOHUGEPAGE);
        }
        16 => page.set(VmaFlags::DONTDUMP),
        17 => {
            refuse_if(droppable, EINVAL)?;
            page.clear(VmaFlags::DONTDUMP);
        }
        18 => {
            refuse_if(!page.is_anonymous() || shared, EINVAL)?;
            page.set(VmaFlags::WIPEONFORK);
        }
        19 => {
            refuse_if(droppable, EINVAL)?;
            page.clear(VmaFlags::WIPEONFORK);
        }
        // MADV_COLLAPSE: no huge page fits in.
        _ => return Err(EINVAL),
    }
    Ok(())
}

impl Model {
    /// Holes are passed over and reported in the end; any other error stops.
    fn walk_over_holes(
        &mut self,
        (from, to): (u64, u64),
        mut visit: impl FnMut(u64, &mut Page) -> Refusal,
    ) -> Answer {
        let mut hole = false;
        for number in from..to {
            match self.pages.get_mut(&number) {
                None => hole = true,
                Some(page) => {
                    if let Err(errno) = visit(number, page) {
                        return failed(errno);
                    }
                }
            }
        }
        if hole { failed(ENOMEM) } else { DONE }
    }

    pub(super) fn advise(&mut self, at: u64, len: u64, advice: i32) -> Answer {
        let known = matches!(advice, 0..=4 | 8..=25);
        if !known || !self.is_aligned(at) {
            return failed(EINVAL);
        }
        let (from, to) = self.span(at, len);
        if advice == POPULATE_READ || advice == POPULATE_WRITE {
            return self.populate(from, to, advice);
        }
        let sealed_file = self.descriptors[5].open_file;
        self.walk_over_holes((from, to), |_, page| advise_page(page, advice, sealed_file))
    }

    fn populate(&self, from: u64, to: u64, advice: i32) -> Answer {
        let access = if advice == POPULATE_WRITE {
            VmaFlags::WRITE
        } else {
            VmaFlags::READ
        };
        for number in from..to {
            let Some(page) = self.pages.get(&number) else {
                return failed(ENOMEM);
            };
            if !page.has(access) {
                return failed(EINVAL);
            }
            if !self.is_backed(page) {
                return failed(EFAULT);
            }
        }
        DONE
    }

    pub(super) fn guard(&mut self, at: u64, len: u64) -> Answer {
        if !self.is_aligned(at) {
            return failed(EINVAL);
        }
        let span = self.span(at, len);
        let mut guarded = Vec::new();
        let answer = self.walk_over_holes(span, |number, page| {
            refuse_if(is_protected_by_seal(page), EPERM)?;
            refuse_if(page.has(VmaFlags::LOCKED), EINVAL)?;
            guarded.push(number);
            Ok(())
        });
        self.guarded = guarded;
        answer
    }
}
