//! Random calls on the running kernel and on a space: after each call the same result, the same layout, the
//! same flags, the same amount of locked memory.
//!
//! The kernel's side plays in a zone of a process that has a single thread and does nothing else: this test has no
//! harness, and each sequence runs in a copy of the process that ends with it. The space is given the limits,
//! capabilities and page size of that process. Where the kernel isn't 6.18, the tests say so and do nothing. Those with huge pages
//! take some from the machine for as long as they run, and are skipped where it gives none.
//!
//! `VMA_LIVE_SEED` starts at another sequence than 0; `VMA_LIVE_SEQUENCES` makes more of them; with `VMA_LIVE_COUNTS`
//! the results are counted by call.

#![expect(clippy::unwrap_used, reason = "a test that fails shows where")]

#[path = "calls_model/call.rs"]
mod call;
#[path = "calls_model/on_space.rs"]
mod on_space;
mod sys;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::ExitCode;

use vma_core::{AddressSpace, MdweFlags};

use call::{Call, HUGE_PAGE, Mix, in_huge_pages, sequence, shortened};
use on_space::{Outcome, World, apply};
use sys::{Ended, Facts, Kernel, Line, MachinePool};

/// Far from where the kernel puts anything by itself.
const BASE: u64 = 0x10_0000_0000;
/// Pages that ranges begin in, and pages of the zone: moved and grown ranges end in it too.
const PAGES: u64 = 40;
const ZONE_PAGES: u64 = 64;
/// Calls per sequence.
const CALLS: usize = 50;

/// What the process is like that the calls are made in.
#[derive(Clone, Copy, Debug)]
enum Setting {
    /// As it was started.
    Plain,
    /// An ordinary user, who may lock so many pages.
    Ordinary { lockable_pages: u64 },
    /// So many pages of address space and of data more than there are.
    Limited { pages: u64, data_pages: u64 },
    /// `PR_SET_MDWE`.
    NoNewCode,
    /// `READ_IMPLIES_EXEC` of personality(2).
    ReadImpliesExec,
    /// So many pages of 2 MiB, which most anonymous mappings ask for. With `faults` they are enough for all.
    HugePages { pages: u64, faults: bool },
}

/// A kind of run.
struct Test {
    name: &'static str,
    /// Sequences of [`CALLS`] calls.
    sequences: u64,
    setting: Setting,
    /// Only on demand.
    ignored: bool,
}

const fn test(name: &'static str, sequences: u64, setting: Setting) -> Test {
    Test {
        name,
        sequences,
        setting,
        ignored: false,
    }
}

const TESTS: [Test; 9] = [
    test("random_calls_have_the_kernels_results", 90, Setting::Plain),
    test(
        "random_calls_of_an_ordinary_user_have_the_kernels_results",
        40,
        Setting::Ordinary { lockable_pages: 24 },
    ),
    test(
        "random_calls_of_a_user_who_may_lock_nothing_have_the_kernels_results",
        10,
        Setting::Ordinary { lockable_pages: 0 },
    ),
    test(
        "random_calls_near_the_limits_have_the_kernels_results",
        40,
        Setting::Limited {
            pages: 46,
            data_pages: 42,
        },
    ),
    test(
        "random_calls_under_mdwe_have_the_kernels_results",
        15,
        Setting::NoNewCode,
    ),
    test(
        "random_calls_where_reading_implies_executing_have_the_kernels_results",
        15,
        Setting::ReadImpliesExec,
    ),
    test(
        "random_calls_on_huge_pages_have_the_kernels_results",
        25,
        Setting::HugePages {
            pages: 400,
            faults: true,
        },
    ),
    test(
        "random_calls_on_few_huge_pages_have_the_kernels_results",
        40,
        Setting::HugePages {
            pages: 12,
            faults: false,
        },
    ),
    Test {
        ignored: true,
        ..test(
            "a_million_random_calls_have_the_kernels_results",
            20_000,
            Setting::Plain,
        )
    },
];

/// Kernel and space side by side.
struct Pair {
    kernel: Kernel,
    world: World,
    space: AddressSpace,
    /// Locked memory outside of the zone can't be told from that inside.
    outside_locked: bool,
    /// Huge pages that were reserved before, where nothing uses one, so that reservations can be compared.
    reserved_before: Option<u64>,
    compared: Counts,
}

/// How often each kind of call had each result.
#[derive(Default)]
struct Counts(BTreeMap<String, u64>);

impl Counts {
    fn add(&mut self, call: &Call, outcome: Outcome) {
        let kind = format!("{call:?}");
        let kind = kind.split(' ').next().unwrap_or_default();
        let result = match outcome {
            Outcome::At(_) => "At".to_owned(),
            other => format!("{other:?}"),
        };
        *self.0.entry(format!("{kind} {result}")).or_default() += 1;
    }

    fn add_all(&mut self, other: Counts) {
        for (what, count) in other.0 {
            *self.0.entry(what).or_default() += count;
        }
    }

    fn total(&self) -> u64 {
        self.0.values().sum()
    }

    /// One a line.
    fn to_text(&self) -> String {
        self.0
            .iter()
            .fold(String::new(), |mut text, (what, count)| {
                let _ = writeln!(text, "{count} {what}");
                text
            })
    }

    fn from_text(text: &str) -> Self {
        let line = |line: &str| {
            let (count, what) = line.split_once(' ')?;
            Some((what.to_owned(), count.parse().ok()?))
        };
        Counts(text.lines().filter_map(line).collect())
    }
}

/// What differed, after which call.
struct Difference {
    call: usize,
    text: String,
}

impl Pair {
    fn new(facts: &Facts, zone_page: u64) -> Self {
        let page = facts.config.page_size;
        let zone = (BASE, BASE + ZONE_PAGES * zone_page);
        let kernel = Kernel::new(page, zone);
        kernel.reset_files();
        let (object, sealed) = kernel.objects();
        Pair {
            kernel,
            world: World::new(zone, &object, &sealed),
            space: AddressSpace::new(facts.config.clone()).unwrap(),
            outside_locked: false,
            reserved_before: None,
            compared: Counts::default(),
        }
    }

    /// Makes all calls; the first difference ends it.
    fn run(&mut self, calls: &[Call], from: usize) -> Result<(), Difference> {
        for (number, call) in calls.iter().enumerate().skip(from) {
            let expected = self.kernel.apply(call);
            let got = apply(&self.world, &self.space, call);
            self.outside_locked |= matches!(call, Call::LockAll { .. });
            self.compared.add(call, expected);
            let mut text = self.compare_layouts();
            if expected != got {
                let _ = writeln!(
                    text,
                    "result: the kernel has {expected:?}, the space {got:?}"
                );
            }
            if !text.is_empty() {
                return Err(Difference { call: number, text });
            }
            if *call == Call::Fork {
                self.run_child(calls, number)?;
            }
        }
        Ok(())
    }

    /// The rest of the sequence in a real child on one side, in a child of the space on the other. Then the parents go on.
    fn run_child(&mut self, calls: &[Call], number: usize) -> Result<(), Difference> {
        let ended = sys::in_child(|| {
            let child = self.space.dup().unwrap();
            // What it has reserved stays so.
            let _parent = std::mem::replace(&mut self.space, child);
            self.outside_locked = false;
            self.compared = Counts::default();
            let result = self.compare_and_run(calls, number);
            report(result, &self.compared)
        });
        // The file is the same on both sides of the fork, and the child has changed its length.
        self.kernel.apply(&Call::Truncate {
            len: self.world.object().len(),
        });
        match outcome_of(ended) {
            Ok(compared) => {
                self.compared.add_all(compared);
                Ok(())
            }
            Err(difference) => Err(Difference {
                call: difference.call,
                text: format!("in the child: {}", difference.text),
            }),
        }
    }

    fn compare_and_run(&mut self, calls: &[Call], number: usize) -> Result<(), Difference> {
        let text = self.compare_layouts();
        if !text.is_empty() {
            return Err(Difference { call: number, text });
        }
        self.run(calls, number + 1)
    }

    /// Empty if there is no difference.
    fn compare_layouts(&self) -> String {
        let mut text = String::new();
        // Stacks that grow stay in the zone, ranges that grow too.
        let expected = sys::lines_between(self.world.base, self.world.end);
        let entries = self.space.maps_entries();
        let got: Vec<Line> = entries
            .iter()
            .map(|entry| Line::new(&entry.to_string(), entry.flags.codes()))
            .collect();
        if expected != got {
            text.push_str("layout: the kernel has (-), the space has (+)\n");
            for line in expected.iter().filter(|line| !got.contains(line)) {
                let _ = writeln!(text, "  - {} | {}", line.text, line.flags);
            }
            for line in got.iter().filter(|line| !expected.contains(line)) {
                let _ = writeln!(text, "  + {} | {}", line.text, line.flags);
            }
        }
        let locked = self.space.totals().locked_vm() * self.kernel.page();
        if !self.outside_locked && Kernel::locked() != locked {
            let _ = writeln!(
                text,
                "locked: the kernel has {}, the space {locked}",
                Kernel::locked()
            );
        }
        if let Some(before) = self.reserved_before
            && let Some(pool) = &self.space.config().hugetlb
        {
            let (expected, got) = (sys::reserved_huge_pages() - before, pool.stats().reserved);
            if expected != got {
                let _ = writeln!(text, "reserved: the kernel has {expected}, the space {got}");
            }
        }
        if let Err(error) = self.space.check() {
            let _ = writeln!(text, "the space is broken: {error}");
        }
        text
    }
}

fn report(result: Result<(), Difference>, compared: &Counts) -> String {
    match result {
        Ok(()) => compared.to_text(),
        Err(difference) => format!("!{}\n{}", difference.call, difference.text),
    }
}

/// What a copy of this process answered: calls compared, or a difference.
fn outcome_of(ended: Ended) -> Result<Counts, Difference> {
    let at_unknown = |text| Difference {
        call: usize::MAX,
        text,
    };
    match ended {
        Ended::Said(text) => {
            let (first, rest) = text.split_once('\n').unwrap_or((&text, ""));
            match first.strip_prefix('!') {
                Some(number) => Err(Difference {
                    call: number.parse().unwrap_or(usize::MAX),
                    text: rest.to_owned(),
                }),
                None => Ok(Counts::from_text(&text)),
            }
        }
        Ended::Panicked(text) => Err(at_unknown(format!("panicked: {text}\n"))),
        Ended::Died(status) => Err(at_unknown(format!("ended with wait status {status:#x}\n"))),
    }
}

/// One sequence in a copy of this process.
fn run(test: &Test, calls: &[Call]) -> Result<Counts, Difference> {
    let ended = sys::in_child(|| {
        let facts = prepare(test);
        let zone_page = match test.setting {
            Setting::HugePages { .. } => HUGE_PAGE,
            _ => facts.config.page_size,
        };
        let mut pair = Pair::new(&facts, zone_page);
        if matches!(test.setting, Setting::HugePages { faults: false, .. }) {
            pair.reserved_before = Some(sys::reserved_huge_pages());
        }
        if matches!(test.setting, Setting::NoNewCode) {
            pair.space.set_mdwe(MdweFlags::REFUSE_EXEC_GAIN).unwrap();
        }
        let result = pair.run(calls, 0);
        report(result, &pair.compared)
    });
    outcome_of(ended)
}

/// Becomes what the test wants.
fn prepare(test: &Test) -> Facts {
    let page = Facts::of_this_process().config.page_size;
    match test.setting {
        Setting::Plain | Setting::HugePages { .. } => {}
        Setting::Ordinary { lockable_pages } => {
            sys::stop_being_root();
            sys::limit_locked_memory(lockable_pages * page);
        }
        Setting::Limited { pages, data_pages } => {
            sys::limit_growth(pages * page, data_pages * page);
        }
        Setting::NoNewCode => sys::refuse_new_code(),
        Setting::ReadImpliesExec => sys::imply_exec(),
    }
    Facts::of_this_process()
}

fn mix(test: &Test) -> Mix {
    let facts = Facts::of_this_process();
    Mix {
        page: facts.config.page_size,
        zone: PAGES,
        calls: CALLS,
        seals_from: CALLS - 10,
        lock_all: matches!(test.setting, Setting::Plain) && facts.config.ipc_lock,
        exec_only: !facts.protection_keys,
        huge_pages: facts.config.huge_pages,
        ksm: facts.ksm,
        forks: 1,
    }
}

/// The difference of the shortest sequence that still shows one.
fn explain(test: &Test, seed: u64, calls: Vec<Call>) -> String {
    let calls = shortened(calls, |calls| run(test, calls).is_err());
    let mut report = format!("sequence {seed}, shortened to {} calls:\n", calls.len());
    for (number, call) in calls.iter().enumerate() {
        let _ = writeln!(report, "  {number}: {call:x?}");
    }
    match run(test, &calls) {
        Err(difference) => {
            let _ = write!(
                report,
                "after call {}:\n{}",
                difference.call, difference.text
            );
        }
        Ok(_) => report.push_str("which doesn't show it every time\n"),
    }
    report
}

fn number_from(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Runs a test; the error is what to print.
fn perform(test: &Test) -> Result<String, String> {
    let _pool = match test.setting {
        Setting::HugePages { pages, .. } => match MachinePool::new(pages) {
            Ok(pool) => Some(pool),
            Err(why) => return Ok(format!("skipped: {why}")),
        },
        _ => None,
    };
    let mix = mix(test);
    let first = number_from("VMA_LIVE_SEED").unwrap_or(0);
    let sequences = number_from("VMA_LIVE_SEQUENCES").unwrap_or(test.sequences);
    let mut compared = Counts::default();
    let mut failures = Vec::new();
    for seed in first..first + sequences {
        let mut calls = sequence(&mix, seed);
        if let Setting::HugePages { faults, .. } = test.setting {
            calls = in_huge_pages(&calls, mix.page, seed, faults);
        }
        match run(test, &calls) {
            Ok(more) => compared.add_all(more),
            Err(_) => failures.push(explain(test, seed, calls)),
        }
        if failures.len() >= 5 {
            break;
        }
    }
    if failures.is_empty() {
        let counts = if std::env::var_os("VMA_LIVE_COUNTS").is_some() {
            format!("\n{}", compared.to_text())
        } else {
            String::new()
        };
        return Ok(format!("{} calls compared{counts}", compared.total()));
    }
    Err(failures.join("\n"))
}

/// What the command line of a test binary asks for.
#[expect(clippy::struct_excessive_bools, reason = "one for each option")]
struct Wanted {
    filters: Vec<String>,
    exact: bool,
    list: bool,
    ignored: bool,
    not_ignored: bool,
}

impl Wanted {
    fn from_args() -> Self {
        let args: Vec<String> = std::env::args().skip(1).collect();
        let has = |flag: &str| args.iter().any(|arg| arg == flag);
        Wanted {
            filters: args
                .iter()
                .filter(|arg| !arg.starts_with('-'))
                .cloned()
                .collect(),
            exact: has("--exact"),
            list: has("--list"),
            ignored: has("--ignored") || has("--include-ignored"),
            not_ignored: !has("--ignored"),
        }
    }

    fn takes(&self, test: &Test) -> bool {
        let matches = |filter: &String| {
            if self.exact {
                test.name == filter
            } else {
                test.name.contains(filter.as_str())
            }
        };
        let kind = if test.ignored {
            self.ignored
        } else {
            self.not_ignored
        };
        kind && (self.filters.is_empty() || self.filters.iter().any(matches))
    }
}

fn main() -> ExitCode {
    let wanted = Wanted::from_args();
    let chosen = TESTS.iter().filter(|candidate| wanted.takes(candidate));
    if wanted.list {
        for test in chosen {
            println!("{}: test", test.name);
        }
        return ExitCode::SUCCESS;
    }
    let skipped = sys::why_not_comparable();
    let mut failed = false;
    for test in chosen {
        if let Some(why) = &skipped {
            println!("test {} ... skipped: {why}", test.name);
            continue;
        }
        match perform(test) {
            Ok(text) => println!("test {} ... ok ({text})", test.name),
            Err(text) => {
                failed = true;
                println!("test {} ... FAILED\n{text}", test.name);
            }
        }
    }
    ExitCode::from(u8::from(failed))
}
