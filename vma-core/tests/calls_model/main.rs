//! Random sequences of all calls against a naive model of pages, written independently of the library. After each call:
//! result, every page, `rangemap`'s ranges, the structural checker, and a recount of every total.

#![expect(clippy::unwrap_used, reason = "a test that fails shows where")]

mod call;
mod on_space;
mod pages;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use rangemap::RangeMap;
use vma_core::{
    AccessMode, AddressSpace, FileKind, FileObject, OpenFile, Seals, SpaceConfig, Totals, VmaFlags,
};

use call::{Call, Mix, sequence, shortened};
use on_space::{Outcome, World, apply};
use pages::{Answer, Descriptor, Model, Page, Source, UNPREDICTED};

const PAGE: u64 = 4096;
const BASE: u64 = 0x10_0000_0000;
const ZONE: u64 = 64 * PAGE;

const MIX: Mix = Mix {
    page: PAGE,
    zone: 40,
    calls: 100,
    seals_from: 80,
    lock_all: true,
    exec_only: true,
    huge_pages: true,
    ksm: true,
    forks: 2,
};

fn identity(file: &Arc<OpenFile>) -> usize {
    Arc::as_ptr(file).addr()
}

/// Space and model side by side.
struct Pair {
    world: World,
    space: AddressSpace,
    model: Model,
    unknown: u64,
}

impl Pair {
    fn new() -> Self {
        let object = FileObject::builder(FileKind::Shmem, "/f").len(24 * PAGE);
        let sealed = FileObject::builder(FileKind::Shmem, "/s").len(8 * PAGE);
        let sealed = sealed.seals(Seals::FUTURE_WRITE).build();
        let world = World::new((BASE, BASE + ZONE), &object.build(), &sealed);
        let descriptor = |file: &Arc<OpenFile>| Descriptor {
            open_file: identity(file),
            readable: file.mode() != AccessMode::Write,
            writable: file.mode() != AccessMode::Read,
            sealed: Arc::ptr_eq(file.object(), &sealed),
        };
        let model = Model {
            page: PAGE,
            pages: BTreeMap::new(),
            lengths: world
                .files
                .iter()
                .map(|file| (identity(file), file.object().len()))
                .collect(),
            descriptors: world.files.each_ref().map(descriptor),
            default_lock: VmaFlags::empty(),
            borders: Vec::new(),
            guarded: Vec::new(),
        };
        let config = SpaceConfig {
            ipc_lock: true,
            ..SpaceConfig::default()
        };
        Pair {
            world,
            space: AddressSpace::new(config).unwrap(),
            model,
            unknown: 0,
        }
    }

    fn step(&mut self, call: &Call) {
        self.model.borders = self.borders();
        let answer = self.model.apply(call);
        let got = apply(&self.world, &self.space, call);
        if *call == Call::Fork {
            let before = self.space.maps();
            let child = self.space.dup().unwrap();
            assert_eq!(before, self.space.maps(), "a fork changes the parent");
            self.space = child;
        }
        self.space.check().unwrap();
        assert_eq!(
            Totals {
                locked_surplus: 0,
                ..self.space.totals()
            },
            self.recounted()
        );
        let seen = self.seen();
        match answer {
            Answer::This(expected) => {
                assert_eq!(got, expected);
                self.learn_new_file(call, got, &seen);
                let compared = |pages: &BTreeMap<u64, Page>| -> BTreeMap<u64, Page> {
                    let masked = |page: &Page| Page {
                        flags: page.flags & !UNPREDICTED.bits(),
                        history: None,
                        ..*page
                    };
                    pages
                        .iter()
                        .map(|(number, page)| (*number, masked(page)))
                        .collect()
                };
                let (expected, got) = (compared(&self.model.pages), compared(&seen));
                let difference: Vec<_> = (0..ZONE / PAGE)
                    .filter(|number| expected.get(number) != got.get(number))
                    .map(|number| (number, expected.get(&number), got.get(&number)))
                    .collect();
                assert!(
                    difference.is_empty(),
                    "(page, expected, got): {difference:x?}"
                );
                self.check_ranges(&expected);
                self.check_histories(&seen);
            }
            Answer::Unknown => self.unknown += 1,
        }
        for number in &self.model.guarded {
            assert!(
                seen[number].has(VmaFlags::MAYBE_GUARD),
                "page {number} isn't marked"
            );
        }
        self.model.pages = seen;
    }

    /// A shared anonymous mapping is a file of its own, which only the space can name.
    fn learn_new_file(&mut self, call: &Call, got: Outcome, seen: &BTreeMap<u64, Page>) {
        let (
            Call::Map {
                len, file: None, ..
            },
            Outcome::At(at),
        ) = (*call, got)
        else {
            return;
        };
        let from = at / PAGE;
        let (Some(Source::File { open_file: 0, .. }), Source::File { open_file, .. }) = (
            self.model.pages.get(&from).map(|page| page.source),
            seen[&from].source,
        ) else {
            return;
        };
        let known = |page: &&Page| matches!(page.source, Source::File { open_file: other, .. } if other == open_file);
        assert_eq!(
            self.model.pages.values().find(known),
            None,
            "the file isn't new"
        );
        for page in self.model.pages.values_mut() {
            if let Source::File {
                open_file: number @ 0,
                ..
            } = &mut page.source
            {
                *number = open_file;
            }
        }
        self.model
            .lengths
            .insert(open_file, len.div_ceil(PAGE) * PAGE);
    }

    fn borders(&self) -> Vec<(u64, u64)> {
        let number = |addr: u64| (addr - BASE) / PAGE;
        let entries = self.space.maps_entries();
        entries
            .iter()
            .map(|entry| (number(entry.start), number(entry.end)))
            .collect()
    }

    fn seen(&self) -> BTreeMap<u64, Page> {
        let mut pages = BTreeMap::new();
        for entry in self.space.maps_entries() {
            let source = match &entry.file {
                Some(file) => Source::File {
                    open_file: identity(file),
                    page: entry.offset / PAGE,
                },
                None => Source::Anonymous,
            };
            let first = Page {
                flags: entry.flags.bits(),
                source,
                history: entry.anon.id().map(|id| (id, entry.pgoff)),
            };
            for by in 0..(entry.end - entry.start) / PAGE {
                pages.insert((entry.start - BASE) / PAGE + by, first.further(by));
            }
        }
        pages
    }

    /// What was written keeps its identity and its place in it; what is shared never has one.
    fn check_histories(&self, seen: &BTreeMap<u64, Page>) {
        for (number, page) in &self.model.pages {
            let now = seen[number];
            if let Some(history) = page.history {
                assert_eq!(now.history, Some(history), "history of page {number}");
            }
            let shared_history = now.has(VmaFlags::SHARED) && now.history.is_some();
            assert!(!shared_history, "page {number} is shared and has a history");
        }
    }

    /// Whatever `rangemap` keeps apart is apart here.
    fn check_ranges(&self, pages: &BTreeMap<u64, Page>) {
        let mut ranges = RangeMap::new();
        for (number, page) in pages {
            // Equal along a mapping of a file.
            let origin = match page.source {
                Source::Anonymous => (0, 0),
                Source::File { open_file, page } => (open_file, page.wrapping_sub(*number)),
            };
            ranges.insert(*number..*number + 1, (page.flags, origin));
        }
        let borders = self.borders();
        for (range, _) in ranges.iter() {
            assert!(
                borders.iter().any(|(start, _)| *start == range.start),
                "nothing starts at {}",
                range.start
            );
            assert!(
                borders.iter().any(|(_, end)| *end == range.end),
                "nothing ends at {}",
                range.end
            );
        }
    }

    /// Every total anew, from what maps says.
    fn recounted(&self) -> Totals {
        let mut totals = Totals::default();
        for entry in self.space.maps_entries() {
            let pages = (entry.end - entry.start) / PAGE;
            let has = |flags| entry.flags.contains(flags);
            totals.map_count += 1;
            totals.total += pages;
            let (stack, write) = (has(VmaFlags::GROWSDOWN), has(VmaFlags::WRITE));
            let if_so = |yes: bool| if yes { pages } else { 0 };
            totals.stack += if_so(stack);
            totals.exec += if_so(has(VmaFlags::EXEC) && !write && !stack);
            totals.data += if_so(write && !has(VmaFlags::SHARED) && !stack);
            totals.locked += if_so(has(VmaFlags::LOCKED));
            totals.committed += if_so(has(VmaFlags::ACCOUNT));
        }
        totals
    }
}

/// Message of the first difference, and after which call it is; else how often the model knew no answer.
fn run(calls: &[Call]) -> Result<u64, (usize, String)> {
    let mut pair = Pair::new();
    for (number, call) in calls.iter().enumerate() {
        let step = catch_unwind(AssertUnwindSafe(|| pair.step(call)));
        step.map_err(|payload| {
            let text = payload.downcast_ref::<String>().cloned();
            (
                number,
                text.unwrap_or_else(|| "a panic without a message".to_owned()),
            )
        })?;
    }
    Ok(pair.unknown)
}

fn run_sequences(seeds: std::ops::Range<u64>) {
    let total = (seeds.end - seeds.start) * MIX.calls as u64;
    let mut unknown = 0;
    for seed in seeds {
        let calls = sequence(&MIX, seed);
        if let Ok(more) = run(&calls) {
            unknown += more;
            continue;
        }
        let loud = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| ()));
        let calls = shortened(calls, |calls| run(calls).is_err());
        let difference = run(&calls).unwrap_err();
        std::panic::set_hook(loud);
        panic!(
            "sequence {seed}, shortened: {calls:x?}\nafter call {}: {}",
            difference.0, difference.1
        );
    }
    assert!(
        unknown * 50 < total,
        "the model knew {unknown} of {total} answers not"
    );
}

#[test]
fn all_calls_do_to_every_page_what_the_model_says() {
    run_sequences(0..200);
}

/// A million calls; `VMA_MODEL_SEED` starts elsewhere.
#[test]
#[ignore = "takes minutes"]
fn all_calls_do_to_every_page_what_the_model_says_for_long() {
    let first = std::env::var("VMA_MODEL_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(1000);
    run_sequences(first..first + 10_000);
}
