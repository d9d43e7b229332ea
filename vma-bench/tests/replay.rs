//! The bundled traces against the kernel's maps, with the counts that were taken when they were recorded.

use std::{collections::BTreeMap, process::Command};

use vma_bench::replay::{bundled::BUNDLED, stats::Stats};

/// What the recording says about a trace, counted there and not here.
struct Facts {
    lines: u64,
    mmap: u64,
    munmap: u64,
    mprotect: u64,
    mremap: u64,
    brk: u64,
    madvise: u64,
    processes: u64,
    threads_more: u64,
    snapshots: u64,
}

#[rustfmt::skip]
const FACTS: [(&str, Facts); 13] = [
    ("bash", Facts { lines: 12355, mmap: 1704, munmap: 99, mprotect: 254, mremap: 0, brk: 279, madvise: 0, processes: 121, threads_more: 0, snapshots: 121 }),
    ("cargo", Facts { lines: 2570, mmap: 634, munmap: 170, mprotect: 562, mremap: 0, brk: 66, madvise: 422, processes: 10, threads_more: 55, snapshots: 10 }),
    ("gcc", Facts { lines: 1490, mmap: 181, munmap: 10, mprotect: 33, mremap: 0, brk: 448, madvise: 0, processes: 5, threads_more: 0, snapshots: 11 }),
    ("git", Facts { lines: 1994, mmap: 181, munmap: 30, mprotect: 47, mremap: 0, brk: 45, madvise: 5, processes: 8, threads_more: 2, snapshots: 8 }),
    ("java", Facts { lines: 1033, mmap: 250, munmap: 28, mprotect: 579, mremap: 0, brk: 4, madvise: 17, processes: 1, threads_more: 25, snapshots: 1 }),
    ("jemalloc", Facts { lines: 762, mmap: 122, munmap: 5, mprotect: 13, mremap: 0, brk: 2, madvise: 477, processes: 1, threads_more: 6, snapshots: 1 }),
    ("kinds", Facts { lines: 161, mmap: 52, munmap: 9, mprotect: 11, mremap: 9, brk: 8, madvise: 10, processes: 3, threads_more: 0, snapshots: 15 }),
    ("mtmap", Facts { lines: 4827, mmap: 1291, munmap: 761, mprotect: 138, mremap: 141, brk: 3, madvise: 138, processes: 1, threads_more: 12, snapshots: 1 }),
    ("node", Facts { lines: 2011, mmap: 297, munmap: 457, mprotect: 472, mremap: 0, brk: 20, madvise: 356, processes: 2, threads_more: 8, snapshots: 2 }),
    ("python", Facts { lines: 1656, mmap: 387, munmap: 138, mprotect: 76, mremap: 1, brk: 92, madvise: 14, processes: 7, threads_more: 7, snapshots: 11 }),
    ("randops", Facts { lines: 6027, mmap: 1777, munmap: 1238, mprotect: 1204, mremap: 1186, brk: 1, madvise: 608, processes: 1, threads_more: 0, snapshots: 160 }),
    ("sqlite", Facts { lines: 175, mmap: 35, munmap: 6, mprotect: 8, mremap: 8, brk: 44, madvise: 0, processes: 1, threads_more: 0, snapshots: 2 }),
    ("stress-mmap", Facts { lines: 22113, mmap: 3301, munmap: 6210, mprotect: 41, mremap: 0, brk: 3, madvise: 12306, processes: 3, threads_more: 0, snapshots: 35 }),
];

fn replayed(name: &str) -> Stats {
    let trace = BUNDLED.iter().find(|b| b.name == name).expect("bundled");
    let outcome = trace.replay(&|_, _| {}).unwrap_or_else(|e| panic!("{e}"));
    if let Some(d) = &outcome.difference {
        panic!(
            "{name}: process {}, moment '{}', line {}: {}\n{}",
            d.pid, d.moment, d.line, d.what, d.diff
        );
    }
    outcome.stats
}

fn equals_the_kernel(name: &str) {
    let s = replayed(name);
    let (_, f) = FACTS.iter().find(|(n, _)| *n == name).expect("facts");
    assert_eq!(
        (s.lines, s.processes, s.threads_more),
        (f.lines, f.processes, f.threads_more)
    );
    assert_eq!(
        (s.snapshots, s.equal, s.not_reached),
        (f.snapshots, f.snapshots, 0)
    );
    let calls = |kind: &str| s.kinds.get(kind).map_or(0, |k| k.calls);
    for (kind, n) in [
        ("mmap", f.mmap),
        ("munmap", f.munmap),
        ("mprotect", f.mprotect),
        ("mremap", f.mremap),
        ("brk", f.brk),
        ("madvise", f.madvise),
    ] {
        assert_eq!(calls(kind), n, "{kind}");
    }
    let total = s.total();
    assert_eq!(
        total.forced, 0,
        "results that no order of calls explains: {:?}",
        s.forced
    );
    assert_eq!(s.placed, s.placed_predicted);
    assert_eq!(
        total.predicted + total.reordered + total.unchecked,
        total.calls
    );
    assert_eq!(s.not_followed, BTreeMap::new());
    assert_eq!(s.skipped, BTreeMap::new());
    let flags = s.vm_flags.expect("every bundled trace has smaps");
    assert_eq!(flags.different, BTreeMap::new(), "{:?}", flags.examples);
}

macro_rules! traces {
    ($($test:ident: $name:literal),* $(,)?) => {
        $(#[test]
        fn $test() {
            equals_the_kernel($name);
        })*
    };
}

traces! {
    bash: "bash",
    cargo: "cargo",
    gcc: "gcc",
    git: "git",
    java: "java",
    jemalloc: "jemalloc",
    kinds: "kinds",
    mtmap: "mtmap",
    node: "node",
    python: "python",
    randops: "randops",
    sqlite: "sqlite",
    stress_mmap: "stress-mmap",
}

/// No page of its arena is ever touched: the calls alone decide about every border.
#[test]
fn randops_is_equal_vma_by_vma_at_every_snapshot() {
    let s = replayed("randops");
    assert_eq!(
        (s.equal_by_vma, s.kernel_only, s.replay_only),
        (s.snapshots, 0, 0)
    );
}

#[test]
fn the_run_without_arguments_replays_everything() {
    let out = Command::new(env!("CARGO_BIN_EXE_vma-bench"))
        .output()
        .expect("runs");
    let text = String::from_utf8_lossy(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{text}");
    for (name, _) in &FACTS {
        assert!(
            text.lines()
                .any(|l| l.trim_start().starts_with(name) && l.trim_end().ends_with("equal")),
            "{name}: {text}"
        );
    }
}

#[test]
fn json_has_one_object_per_line() {
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/data/traces/kinds.strace.gz");
    let out = Command::new(env!("CARGO_BIN_EXE_vma-bench"))
        .args(["replay", trace, "--json"])
        .output()
        .expect("runs");
    assert_eq!(out.status.code(), Some(0));
    let text = String::from_utf8(out.stdout).expect("text");
    let rows: Vec<serde_json::Value> = text
        .lines()
        .map(|l| serde_json::from_str(l).expect("JSON"))
        .collect();
    let last = rows.last().expect("rows");
    assert_eq!(
        (&last["row"], &last["holds"], &last["snapshots"]),
        (&"summary".into(), &true.into(), &15.into())
    );
    assert!(
        rows.iter()
            .any(|r| r["row"] == "call" && r["call"] == "shmat" && r["calls"] == 7)
    );
}
