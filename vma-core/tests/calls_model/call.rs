//! Random sequences of all calls, and what is left of one that fails.

/// A call with its arguments. Addresses are bytes from the base of the zone that the calls play in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Map {
        at: u64,
        len: u64,
        prot: u64,
        flags: u64,
        /// Number of a descriptor, see [`crate::on_space::World`].
        file: Option<usize>,
        offset: u64,
    },
    Unmap {
        at: u64,
        len: u64,
    },
    Protect {
        at: u64,
        len: u64,
        prot: u64,
    },
    Remap {
        at: u64,
        old: u64,
        new: u64,
        flags: u64,
        to: u64,
    },
    Advise {
        at: u64,
        len: u64,
        advice: i32,
    },
    /// Guard pages installed and removed again: contents aside, what they leave behind.
    Guard {
        at: u64,
        len: u64,
    },
    Lock {
        at: u64,
        len: u64,
        on_fault: bool,
    },
    Unlock {
        at: u64,
        len: u64,
    },
    LockAll {
        flags: u64,
    },
    UnlockAll,
    Seal {
        at: u64,
        len: u64,
    },
    Sync {
        at: u64,
        len: u64,
        flags: u64,
    },
    Core {
        at: u64,
        len: u64,
    },
    RemapFile {
        at: u64,
        len: u64,
        prot: u64,
        pgoff: u64,
        flags: u64,
    },
    Touch {
        at: u64,
        len: u64,
        write: bool,
    },
    Truncate {
        len: u64,
    },
    Fork,
}

/// Bytes that a mapping has, of huge pages or not.
pub(crate) fn mapped_len(len: u64, flags: u64) -> u64 {
    if flags & HUGETLB == 0 {
        len
    } else {
        len.next_multiple_of(HUGE_PAGE)
    }
}

/// What a sequence may contain.
#[derive(Clone, Copy, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent properties of a system"
)]
pub(crate) struct Mix {
    /// Bytes per page.
    pub(crate) page: u64,
    /// Pages of the zone.
    pub(crate) zone: u64,
    /// Calls per sequence.
    pub(crate) calls: usize,
    /// From this call on there are seals, which nothing takes away.
    pub(crate) seals_from: usize,
    /// mlockall, which reaches beyond the zone.
    pub(crate) lock_all: bool,
    /// Mappings with `PROT_EXEC` alone: with protection keys they can't be read.
    pub(crate) exec_only: bool,
    /// Advice about transparent huge pages is known.
    pub(crate) huge_pages: bool,
    /// Advice about merging by content is known.
    pub(crate) ksm: bool,
    /// Forks in each sequence, at most.
    pub(crate) forks: usize,
}

/// Splitmix64: a sequence is known by its seed.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[(self.next() % from.len() as u64) as usize]
    }
}

/// Longest range of a call, in pages.
const LONGEST: u64 = 10;

const READ: u64 = 1;
const WRITE: u64 = 2;
const EXEC: u64 = 4;
const GROWSDOWN: u64 = 0x100_0000;

const PRIVATE: u64 = 2;
const SHARED: u64 = 1;
const FIXED: u64 = 0x10;
const ANONYMOUS: u64 = 0x20;
const STACK_GROWS: u64 = 0x100;
const NOREPLACE: u64 = 0x10_0000;
/// `MAP_LOCKED`, `MAP_NORESERVE`, `MAP_POPULATE`, `MAP_POPULATE | MAP_NONBLOCK`, `MAP_STACK`, `MAP_DENYWRITE`, `MAP_32BIT`, unknown.
const MODIFIERS: [u64; 9] = [
    0x2000, 0x4000, 0x8000, 0x1_8000, 0x2_0000, 0x800, 0x40, 0x8_0000, 0x800_0000,
];

const HUGETLB: u64 = 0x4_0000;
/// `MAP_LOCKED`, `MAP_POPULATE`.
const POPULATING: u64 = 0xa000;
/// Bytes.
pub(crate) const HUGE_PAGE: u64 = 2 << 20;

const MAYMOVE: u64 = 1;
const MOVE_FIXED: u64 = 2;
const DONTUNMAP: u64 = 4;

/// Pages of a zone where little differs but the history of faults.
const PLAIN_ZONE: u64 = 12;

struct Generator<'a> {
    random: Random,
    mix: &'a Mix,
    /// Hardly anything but private anonymous memory, in few pages: it's then the history of faults that decides what merges.
    plain: bool,
}

impl Generator<'_> {
    /// A range in the zone, rather a short one, so that it often has no hole; now and then unaligned, or empty.
    fn range(&mut self) -> (u64, u64) {
        let longest = 1 + self.random.below(LONGEST).min(self.random.below(LONGEST));
        self.range_of(longest)
    }

    /// A range of so many pages, unless the zone ends before.
    fn range_of(&mut self, pages: u64) -> (u64, u64) {
        let page = self.mix.page;
        let (zone, pages) = if self.plain {
            (PLAIN_ZONE, pages.div_ceil(2))
        } else {
            (self.mix.zone, pages)
        };
        let first = self.random.below(zone);
        let pages = pages.min(zone - first);
        let (mut at, mut len) = (first * page, pages * page);
        match self.random.below(60) {
            0 => at += 1 + self.random.below(page - 1),
            1 => len = 0,
            2 | 3 => len -= self.random.below(page),
            _ => {}
        }
        (at, len)
    }

    fn prot(&mut self) -> u64 {
        if self.plain {
            return self.random.pick(&[READ, READ | WRITE, READ | WRITE]);
        }
        let prot = self.random.pick(&[
            0,
            READ,
            READ | WRITE,
            READ | WRITE,
            READ | WRITE,
            WRITE,
            READ | EXEC,
            READ | WRITE | EXEC,
            EXEC,
        ]);
        if prot == EXEC && !self.mix.exec_only {
            READ
        } else {
            prot
        }
    }

    fn map(&mut self) -> Call {
        let pages = 1 + self.random.below(LONGEST);
        let (at, len) = self.range_of(pages);
        if self.plain && !self.random.one_in(8) {
            return Call::Map {
                at,
                len,
                prot: READ | WRITE,
                flags: FIXED | PRIVATE | ANONYMOUS,
                file: None,
                offset: 0,
            };
        }
        let mut flags = match self.random.below(8) {
            0 => 0,
            1 => NOREPLACE,
            _ => FIXED,
        };
        let file = (self.random.below(5) < 2).then(|| self.random.below(6) as usize);
        flags |= match self.random.below(20) {
            0 => 3,
            1 => 8,
            2 => 0,
            n if n < (if file.is_some() { 10 } else { 6 }) => SHARED,
            _ => PRIVATE,
        };
        if file.is_none() {
            flags |= ANONYMOUS;
        }
        if self.random.one_in(12) {
            flags |= STACK_GROWS;
        }
        while self.random.one_in(8) {
            flags |= self.random.pick(&MODIFIERS);
        }
        let mut offset = self.random.below(30) * self.mix.page;
        if self.random.one_in(3) {
            // As if it went on from the start of the zone, so that neighbours merge.
            offset = at / self.mix.page * self.mix.page;
        }
        let prot = self.prot();
        Call::Map {
            at,
            len,
            prot,
            flags,
            file,
            offset,
        }
    }

    fn remap(&mut self) -> Call {
        let (at, mut old) = self.range();
        let (to, mut new) = self.range();
        let flags = self.random.pick(&[
            0,
            0,
            MAYMOVE,
            MAYMOVE,
            MAYMOVE | MOVE_FIXED,
            MAYMOVE | MOVE_FIXED,
            MAYMOVE | MOVE_FIXED,
            MAYMOVE | MOVE_FIXED,
            MAYMOVE | MOVE_FIXED,
            MAYMOVE | MOVE_FIXED,
            MAYMOVE | DONTUNMAP,
            MAYMOVE | DONTUNMAP,
            MAYMOVE | MOVE_FIXED | DONTUNMAP,
            MAYMOVE | MOVE_FIXED | DONTUNMAP,
            MOVE_FIXED,
            DONTUNMAP,
        ]);
        let keeps = flags & DONTUNMAP != 0 && !self.random.one_in(8);
        if keeps || self.random.one_in(2) {
            new = old;
        }
        if self.random.one_in(24) {
            old = 0;
        }
        Call::Remap {
            at,
            old,
            new,
            flags,
            to,
        }
    }

    fn advise(&mut self) -> Call {
        let (at, len) = self.range();
        if self.plain {
            let advice = self.random.pick(&[10, 11]);
            return Call::Advise { at, len, advice };
        }
        let mut advice = self.random.pick(&[
            0, 0, 1, 2, 3, 4, 4, 8, 9, 10, 10, 11, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22,
            22, 23, 23, 24, 25, 5, -1,
        ]);
        if matches!(advice, 14 | 15 | 25) && !self.mix.huge_pages
            || matches!(advice, 12 | 13) && !self.mix.ksm
        {
            advice = 0;
        }
        Call::Advise { at, len, advice }
    }

    fn protect(&mut self) -> Call {
        let (at, len) = self.range();
        let mut prot = self.prot();
        if self.random.one_in(20) {
            prot |= GROWSDOWN;
        }
        Call::Protect { at, len, prot }
    }

    fn lock(&mut self) -> Call {
        let (at, len) = self.range();
        if self.random.one_in(3) {
            return Call::Unlock { at, len };
        }
        let on_fault = self.random.one_in(3);
        Call::Lock { at, len, on_fault }
    }

    fn rare(&mut self) -> Call {
        let (at, len) = self.range();
        let page = self.mix.page;
        match self.random.below(9) {
            0 => Call::Guard { at, len },
            1 if self.mix.lock_all => Call::LockAll {
                flags: 1 + self.random.below(7),
            },
            2 if self.mix.lock_all => Call::UnlockAll,
            3 | 4 => Call::Sync {
                at,
                len,
                flags: self.random.below(8),
            },
            5 => Call::Core { at, len },
            6 => Call::Truncate {
                len: self.random.below(24) * page + self.random.below(2),
            },
            _ => Call::RemapFile {
                at,
                len,
                prot: u64::from(self.random.one_in(12)),
                pgoff: self.random.below(24),
                flags: 0x1_0000 * self.random.below(2),
            },
        }
    }

    /// Most sequences begin with a zone that is full.
    fn first(&mut self) -> Call {
        let file = self.random.one_in(4).then_some(0);
        let shared = self.random.one_in(4);
        let kind = if shared { SHARED } else { PRIVATE };
        let anonymous = if file.is_some() { 0 } else { ANONYMOUS };
        Call::Map {
            at: 0,
            len: self.mix.zone * self.mix.page,
            prot: READ | WRITE,
            flags: FIXED | kind | anonymous,
            file,
            offset: 0,
        }
    }

    fn call(&mut self, seals: bool, forks: bool) -> Call {
        if seals && self.random.one_in(4) {
            let (at, len) = self.range();
            let len = len.min(3 * self.mix.page);
            return Call::Seal { at, len };
        }
        if self.plain && forks && self.random.one_in(16) {
            return Call::Fork;
        }
        match self.random.below(100) {
            0..26 => self.map(),
            26..30 => {
                let (at, len) = self.range();
                Call::Unmap { at, len }
            }
            30..46 => self.protect(),
            46..61 => self.remap(),
            61..70 => self.advise(),
            70..77 => self.lock(),
            77..91 => {
                let pages = self.random.pick(&[1, 1, 1, 2, 5]);
                let (at, len) = self.range_of(pages);
                let write = !self.random.one_in(4);
                Call::Touch { at, len, write }
            }
            91 if forks => Call::Fork,
            _ => self.rare(),
        }
    }
}

/// The sequence that belongs to a seed.
pub(crate) fn sequence(mix: &Mix, seed: u64) -> Vec<Call> {
    let mut generator = Generator {
        random: Random::new(seed),
        mix,
        plain: seed % 2 == 1,
    };
    let mut forks = mix.forks;
    (0..mix.calls)
        .map(|number| {
            if number == 0 && !generator.plain && !generator.random.one_in(4) {
                return generator.first();
            }
            let call = generator.call(number >= mix.seals_from, forks > 0);
            forks -= usize::from(call == Call::Fork);
            call
        })
        .collect()
}

/// The same sequence in pages of 2 MiB: most anonymous mappings have such pages, and some ranges end between them. `faults`: calls
/// that make pages present are left.
///
/// No moves to given places: Linux 6.18 loses reservations for good when a part of a private mapping moves.
#[allow(dead_code, reason = "not every test has huge pages")]
pub(crate) fn in_huge_pages(calls: &[Call], page: u64, seed: u64, faults: bool) -> Vec<Call> {
    let mut scale = Scale {
        page,
        random: Random::new(seed ^ 0x4e7b),
    };
    let scaled = calls.iter().filter_map(|call| scale.call(*call, faults));
    scaled.collect()
}

struct Scale {
    page: u64,
    random: Random,
}

impl Scale {
    /// A page is 2 MiB now, or a bit less.
    fn bytes(&mut self, bytes: u64) -> u64 {
        let (whole, rest) = (bytes / self.page * HUGE_PAGE, bytes % self.page);
        if self.random.one_in(16) {
            whole.saturating_sub(self.page) + rest
        } else {
            whole + rest
        }
    }

    fn range(&mut self, at: &mut u64, len: &mut u64) {
        let end = self.bytes(*at + *len);
        *at = self.bytes(*at);
        *len = end.saturating_sub(*at);
    }

    /// `None`: it's left out.
    fn call(&mut self, mut call: Call, faults: bool) -> Option<Call> {
        match &mut call {
            Call::Map {
                at,
                len,
                flags,
                file,
                offset,
                ..
            } => {
                self.range(at, len);
                if !faults {
                    *flags &= !POPULATING;
                }
                if file.is_none() && !self.random.one_in(4) {
                    *flags |= HUGETLB;
                }
                *offset = if file.is_none() && !self.random.one_in(4) {
                    0
                } else {
                    self.bytes(*offset)
                };
            }
            Call::Remap {
                at,
                old,
                new,
                flags,
                to,
            } => {
                for bytes in [at, old, new, to] {
                    *bytes = self.bytes(*bytes);
                }
                *flags &= !MOVE_FIXED;
            }
            // What comes of collapsing depends on which pages are present; the others aren't for ranges in the zone.
            Call::Advise { advice: 25, .. }
            | Call::LockAll { .. }
            | Call::UnlockAll
            | Call::RemapFile { .. }
            | Call::Truncate { .. } => return None,
            Call::Advise {
                advice: 22 | 23, ..
            }
            | Call::Lock { .. }
            | Call::Touch { .. }
                if !faults =>
            {
                return None;
            }
            Call::Unmap { at, len }
            | Call::Protect { at, len, .. }
            | Call::Advise { at, len, .. }
            | Call::Guard { at, len }
            | Call::Lock { at, len, .. }
            | Call::Unlock { at, len }
            | Call::Seal { at, len }
            | Call::Sync { at, len, .. }
            | Call::Core { at, len }
            | Call::Touch { at, len, .. } => self.range(at, len),
            Call::Fork => {}
        }
        Some(call)
    }
}

/// Drops calls while what is left still fails: halves first, single ones in the end.
pub(crate) fn shortened(mut calls: Vec<Call>, mut fails: impl FnMut(&[Call]) -> bool) -> Vec<Call> {
    let mut step = calls.len().div_ceil(2);
    while step > 0 {
        let mut at = 0;
        while at < calls.len() {
            let mut without = calls.clone();
            without.drain(at..(at + step).min(calls.len()));
            if fails(&without) {
                calls = without;
            } else {
                at += step;
            }
        }
        step /= 2;
    }
    calls
}
