//! The files, the spaces that map them all the time, and one program's start and exit.

use std::array;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vma_core::{
    AccessMode, AddressSpace, ConfigError, Domain, FileKind, FileObject, LockTime, LockTimes,
    MapError, MapFlags, MapRequest, OpenFile, Prot, ProtectError, PublishError, SpaceConfig,
    UnmapError,
};

const PAGE: u64 = 4096;
const RW: Prot = Prot::READ.union(Prot::WRITE);
const RX: Prot = Prot::READ.union(Prot::EXEC);

/// Why it can't be measured.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each says all there is")]
pub enum R4Error {
    #[error("making a space: {0}")]
    Config(#[from] ConfigError),
    #[error("mapping: {0}")]
    Map(#[from] MapError),
    #[error("protecting: {0}")]
    Protect(#[from] ProtectError),
    #[error("unmapping: {0}")]
    Unmap(#[from] UnmapError),
    #[error("entering: {0}")]
    Enter(#[from] PublishError),
}

/// Where a call updates its space's tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Under the lock of the index: before.
    Under,
    /// Outside of it: after, and this library's default.
    Outside,
}

impl Way {
    pub(super) const ALL: [Way; 2] = [Way::Under, Way::Outside];

    /// Both, the other one first in each repetition.
    pub(super) fn turn(repetition: usize) -> [Way; 2] {
        let [under, outside] = Self::ALL;
        if repetition.is_multiple_of(2) {
            [under, outside]
        } else {
            [outside, under]
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Way::Under => "before",
            Way::Outside => "after (default)",
        }
    }
}

/// The parts of a program or library, in pages, as the linker lays them out: headers, code, constants, data, and memory that is zero at
/// first. Of the data, so many pages can only be read once it is linked.
#[derive(Debug, Clone, Copy)]
struct Shape {
    headers: u64,
    code: u64,
    constants: u64,
    data: u64,
    zeroed: u64,
    fixed_data: u64,
}

const fn shape(parts: [u64; 6]) -> Shape {
    let [headers, code, constants, data, zeroed, fixed_data] = parts;
    Shape {
        headers,
        code,
        constants,
        data,
        zeroed,
        fixed_data,
    }
}

/// A shell with its libraries, the larger ones as large as a distribution's.
const SHAPES: [Shape; LINKED] = [
    shape([47, 222, 58, 13, 10, 4]),
    shape([3, 6, 2, 2, 1, 1]),
    shape([40, 356, 83, 6, 13, 4]),
    shape([16, 120, 100, 2, 1, 1]),
    shape([14, 62, 20, 6, 1, 4]),
    shape([7, 23, 5, 2, 1, 1]),
    shape([154, 660, 147, 40, 4, 37]),
    shape([3, 13, 4, 2, 1, 1]),
];
/// Files that are mapped in parts.
const LINKED: usize = 8;
/// These, one that is mapped whole and unmapped when all is linked (`ld.so.cache`), and one that stays (the locale).
pub(super) const FILES: usize = LINKED + 2;
const CACHE: usize = LINKED;
const LOCALE: usize = LINKED + 1;
const CACHE_PAGES: u64 = 6;
const LOCALE_PAGES: u64 = 750;

/// What a program calls for from its start to its exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Map,
    Protect,
    Unmap,
    /// The whole space goes.
    Exit,
}

impl Kind {
    pub(super) const ALL: [Kind; 4] = [Kind::Map, Kind::Protect, Kind::Unmap, Kind::Exit];

    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Map => "map",
            Kind::Protect => "protect",
            Kind::Unmap => "unmap",
            Kind::Exit => "exit",
        }
    }

    /// Calls of each program.
    pub(super) const fn calls(self) -> u64 {
        match self {
            Kind::Map => 5 * LINKED as u64 + 2,
            Kind::Protect => LINKED as u64,
            Kind::Unmap | Kind::Exit => 1,
        }
    }
}

/// Calls of each program.
pub(super) const CALLS: u64 =
    Kind::Map.calls() + Kind::Protect.calls() + Kind::Unmap.calls() + Kind::Exit.calls();

/// Waits for, or holds of, all indexes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) count: u64,
    pub(super) total: Duration,
    pub(super) longest: Duration,
}

/// Files, and spaces that map them.
pub(super) struct Bed {
    files: [Arc<OpenFile>; FILES],
    /// One for each file, if anybody watches.
    times: Option<[Arc<LockTimes>; FILES]>,
    /// Programs that are running all the time.
    standing: Vec<AddressSpace<()>>,
    configs: [SpaceConfig; 2],
}

impl fmt::Debug for Bed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bed").finish_non_exhaustive()
    }
}

impl Bed {
    /// Files that `standing` spaces map all the time.
    pub(super) fn new(standing: usize, is_watched: bool) -> Result<Self, R4Error> {
        let times: [Arc<LockTimes>; FILES] = array::from_fn(|_| Arc::default());
        let files = array::from_fn(|at| {
            let mut file = FileObject::builder(FileKind::Regular, "/usr/lib/a")
                .inode(8, 1, at as u64 + 1)
                .len(1 << 30);
            if is_watched {
                file = file.index_observer(times[at].clone());
            }
            OpenFile::new(file.build(), AccessMode::Read)
        });
        let config = |under| SpaceConfig {
            publish_under_index_lock: under,
            ..SpaceConfig::default()
        };
        let mut bed = Bed {
            files,
            times: is_watched.then_some(times),
            standing: Vec::new(),
            configs: [config(true), config(false)],
        };
        let domain = Domain::default();
        for _ in 0..standing {
            let started = bed.start(Way::Outside, &domain, &mut |_| ())?;
            bed.standing.push(started);
        }
        Ok(bed)
    }

    /// Watches from now on.
    pub(super) fn reset(&self) {
        self.times.iter().flatten().for_each(|times| times.reset());
    }

    fn sum(&self, of: impl Fn(&LockTimes) -> LockTime) -> Sum {
        let each = self.times.iter().flatten().map(|times| of(times));
        each.fold(Sum::default(), |sum, time| Sum {
            count: sum.count + time.count,
            total: sum.total + time.total,
            longest: sum.longest.max(time.longest),
        })
    }

    /// Exclusive holds since the last [`reset`](Self::reset).
    pub(super) fn held(&self) -> Sum {
        self.sum(|times| times.held(true))
    }

    /// Waits for the exclusive side since then.
    pub(super) fn waited(&self) -> Sum {
        self.sum(|times| times.waited(true))
    }

    /// Mappings of all files, in all spaces.
    #[cfg(test)]
    fn mappings(&self) -> usize {
        let count = |file: &Arc<OpenFile>| file.object().mapping_count();
        self.files.iter().map(count).sum()
    }

    fn map(
        &self,
        space: &AddressSpace<()>,
        file: usize,
        pages: u64,
        prot: Prot,
    ) -> Result<u64, MapError> {
        let file = self.files[file].clone();
        space.map(&MapRequest::file(
            file,
            0,
            pages * PAGE,
            prot,
            MapFlags::PRIVATE,
        ))
    }

    /// Maps a program or library as ld.so does: all of it to find a place, then part by part over that. Where its data is.
    fn load(&self, space: &AddressSpace<()>, file: usize, shape: Shape) -> Result<u64, MapError> {
        let in_file = shape.headers + shape.code + shape.constants + shape.data;
        let at = self.map(space, file, in_file + shape.zeroed, Prot::READ)?;
        let mut page = shape.headers;
        for (pages, prot) in [
            (shape.code, RX),
            (shape.constants, Prot::READ),
            (shape.data, RW),
        ] {
            let file = self.files[file].clone();
            let (offset, len) = (page * PAGE, pages * PAGE);
            let part = MapRequest::file(file, offset, len, prot, MapFlags::PRIVATE);
            space.map(&part.fixed(at + offset))?;
            page += pages;
        }
        let zeroed = MapRequest::anonymous(shape.zeroed * PAGE, RW);
        space.map(&zeroed.fixed(at + page * PAGE))?;
        Ok(at + (page - shape.data) * PAGE)
    }

    /// A program starts; `done` is told when all calls of a kind are through.
    fn start(
        &self,
        way: Way,
        domain: &Domain,
        done: &mut impl FnMut(Kind),
    ) -> Result<AddressSpace<()>, R4Error> {
        let config = self.configs[way as usize].clone();
        let space = AddressSpace::with_backend(config, domain, ())?;
        let cache = self.map(&space, CACHE, CACHE_PAGES, Prot::READ)?;
        let mut data = [0; LINKED];
        for (file, shape) in SHAPES.into_iter().enumerate() {
            data[file] = self.load(&space, file, shape)?;
        }
        self.map(&space, LOCALE, LOCALE_PAGES, Prot::READ)?;
        done(Kind::Map);
        for (at, shape) in data.into_iter().zip(SHAPES) {
            space.protect(at, shape.fixed_data * PAGE, Prot::READ)?;
        }
        done(Kind::Protect);
        space.unmap(cache, CACHE_PAGES * PAGE)?;
        done(Kind::Unmap);
        Ok(space)
    }

    /// A program starts and exits.
    pub(super) fn exec(
        &self,
        way: Way,
        domain: &Domain,
        done: &mut impl FnMut(Kind),
    ) -> Result<(), R4Error> {
        drop(self.start(way, domain, done)?);
        done(Kind::Exit);
        Ok(())
    }

    /// Programs one after the other for a while: how many, and how long it took.
    pub(super) fn exec_for(
        &self,
        way: Way,
        domain: &Domain,
        time: Duration,
    ) -> Result<(u64, Duration), R4Error> {
        let (begin, mut count) = (Instant::now(), 0);
        loop {
            self.exec(way, domain, &mut |_| ())?;
            count += 1;
            let elapsed = begin.elapsed();
            if elapsed >= time {
                return Ok((count, elapsed));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exec_leaves_the_indexes_as_they_were() {
        let (bed, domain) = (Bed::new(3, false).unwrap(), Domain::default());
        // Of each linked file five parts, and the locale.
        let of_each = 5 * LINKED + 1;
        assert_eq!(bed.mappings(), 3 * of_each);
        for way in Way::ALL {
            let started = bed.start(way, &domain, &mut |_| ()).unwrap();
            assert_eq!(bed.mappings(), 4 * of_each, "{way:?}");
            assert_eq!(started.totals().map_count, (6 * LINKED + 1) as u64);
            drop(started);
            bed.exec(way, &domain, &mut |_| ()).unwrap();
            assert_eq!(bed.mappings(), 3 * of_each, "{way:?}");
        }
    }

    #[test]
    fn each_kind_of_call_is_told_of_once_and_only_watched_files_have_times() {
        let domain = Domain::default();
        for is_watched in [true, false] {
            let bed = Bed::new(1, is_watched).unwrap();
            bed.reset();
            let mut kinds = Vec::new();
            let mut done = |kind| kinds.push(kind);
            bed.exec(Way::Under, &domain, &mut done).unwrap();
            assert_eq!(kinds, Kind::ALL);
            assert_eq!(bed.held().total > Duration::ZERO, is_watched);
            assert_eq!(bed.waited() != Sum::default(), is_watched);
            bed.reset();
            assert_eq!(bed.held(), Sum::default());
        }
    }

    #[test]
    fn the_other_way_begins_in_each_repetition() {
        assert_eq!(Way::turn(0), Way::ALL);
        assert_eq!(Way::turn(1), [Way::Outside, Way::Under]);
    }
}
