//! The bundled vectors: every case passes, and as many cases, calls and comparisons as the files have by another count.

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
}

macro_rules! facts {
    ($($name:ident: $cases:literal, $calls:literal, $bytes:literal, $vectors:literal;)*) => {
        const ALL: &[(&str, u64, u64)] = &[$((stringify!($name), $cases, $calls)),*];

        $(#[test]
        fn $name() {
            passes(stringify!($name), &Facts {
                cases: $cases,
                calls: $calls,
                bytes: $bytes,
                vectors: $vectors,
            });
        })*
    };
}

facts! {
    accounting: 120, 4861, 0, 0;
    brk: 75, 2157, 19, 0;
    errors: 298, 9237, 28, 52;
    file_identity: 64, 763, 84, 0;
    files: 205, 8182, 1329, 0;
    flags: 220, 7748, 0, 25;
    fork: 180, 7028, 1542, 0;
    growsdown: 90, 2656, 104, 0;
    layout: 280, 10259, 0, 0;
    limits: 105, 2768, 0, 0;
    limits_map_count: 272, 3944, 0, 0;
    limits_rlimit: 282, 1988, 4, 0;
    mdwe: 42, 1092, 26, 0;
    memfd_seals: 82, 2549, 232, 0;
    merge_bridge: 311, 2266, 287, 0;
    merge_pairs: 444, 2124, 112, 0;
    mremap: 270, 10403, 798, 0;
    placement: 105, 2854, 0, 0;
    placement_bottom_up: 40, 1261, 0, 0;
    process_madvise: 26, 698, 108, 0;
    remap_file_pages: 42, 1287, 142, 0;
    scenarios: 60, 425, 53, 4;
    seal: 126, 2640, 277, 6;
    touched: 275, 11309, 1695, 30;
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
    let compared = report.compared;
    assert_eq!(
        (compared.byte_values, compared.mincore_vectors),
        (facts.bytes, facts.vectors)
    );
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
