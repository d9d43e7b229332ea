//! The bundled vectors: every case passes, and as many cases, calls and skips as the files have by another count.

use std::path::Path;

use vma_bench::{
    conform::{bundled::BUNDLED, input::Suite, run_suite},
    replay::input::text_of,
};

/// What a file has, counted in its JSON and not by the runner.
struct Facts {
    cases: u64,
    calls: u64,
    /// Reads through a mapping or a descriptor that give a byte.
    bytes: u64,
    /// Calls of mincore that give a vector.
    vectors: u64,
    /// Whether guard pages are installed anywhere.
    guards: bool,
}

macro_rules! facts {
    ($($name:ident: $cases:literal, $calls:literal, $bytes:literal, $vectors:literal, $guards:literal;)*) => {
        const ALL: &[(&str, u64, u64)] = &[$((stringify!($name), $cases, $calls)),*];

        $(#[test]
        fn $name() {
            passes(stringify!($name), &Facts {
                cases: $cases,
                calls: $calls,
                bytes: $bytes,
                vectors: $vectors,
                guards: $guards,
            });
        })*
    };
}

facts! {
    accounting: 120, 4861, 0, 0, false;
    brk: 75, 2157, 19, 0, false;
    errors: 298, 9237, 28, 52, true;
    file_identity: 64, 763, 84, 0, false;
    files: 205, 8182, 1329, 0, false;
    flags: 220, 7748, 0, 25, true;
    fork: 180, 7028, 1542, 0, false;
    growsdown: 90, 2656, 104, 0, false;
    layout: 280, 10259, 0, 0, false;
    limits: 105, 2768, 0, 0, false;
    limits_map_count: 272, 3944, 0, 0, true;
    limits_rlimit: 282, 1988, 4, 0, false;
    mdwe: 42, 1092, 26, 0, false;
    memfd_seals: 82, 2549, 232, 0, false;
    merge_bridge: 311, 2266, 287, 0, false;
    merge_pairs: 444, 2124, 112, 0, true;
    mremap: 270, 10403, 798, 0, false;
    placement: 105, 2854, 0, 0, false;
    placement_bottom_up: 40, 1261, 0, 0, false;
    process_madvise: 26, 698, 108, 0, true;
    remap_file_pages: 42, 1287, 142, 0, false;
    scenarios: 60, 425, 53, 4, true;
    seal: 126, 2640, 277, 6, true;
    touched: 275, 11309, 1695, 30, true;
}

fn passes(name: &str, facts: &Facts) {
    let file = format!("{name}.jsonl");
    let (_, bytes) = BUNDLED
        .iter()
        .find(|(known, _)| *known == file)
        .expect("bundled");
    let path = Path::new(&file);
    let text = text_of(path, bytes.to_vec()).unwrap_or_else(|e| panic!("{e}"));
    let suite = Suite::parse(path, &text).unwrap_or_else(|e| panic!("{e}"));
    let report = run_suite(&suite, &|| {}).unwrap_or_else(|e| panic!("{e}"));
    if let Some(first) = report.failures.first() {
        panic!("{} cases failed, the first: {first}", report.failed());
    }
    assert_eq!((report.passed, report.calls), (facts.cases, facts.calls));
    let skipped = report.skipped;
    assert_eq!(
        (skipped.byte_values, skipped.mincore_vectors),
        (facts.bytes, facts.vectors)
    );
    assert!(facts.guards || skipped.fault_outcomes == 0, "{skipped}");
}

#[test]
fn all_files_are_bundled_and_no_other() {
    let names: Vec<String> = ALL
        .iter()
        .map(|(name, ..)| format!("{name}.jsonl"))
        .collect();
    let bundled: Vec<&str> = BUNDLED.iter().map(|(name, _)| *name).collect();
    assert_eq!(bundled, names);
    assert_eq!(ALL.iter().map(|(_, cases, _)| cases).sum::<u64>(), 4_014);
    assert_eq!(ALL.iter().map(|(.., calls)| calls).sum::<u64>(), 100_499);
}
