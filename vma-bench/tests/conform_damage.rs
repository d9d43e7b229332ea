//! Unusable vectors: each kind of damage has its message with file and line and exit status 2, and nothing panics.

use std::{
    fs,
    io::Write,
    path::Path,
    process::{Command, Output},
};

use flate2::{Compression, write::GzEncoder};
use vma_bench::conform::{input::Suite, run_suite};

/// A case that passes: one call, one mapping.
const CASE: &str = r#"{"name":"t-0","family":"t","page_size":4096,"arena":{"start":"0x100000000000","len":65536},"space":"open","max_map_count":null,"limits":{},"files":[{"id":"f0","len":4096,"mode":"rw"}],"ops":[{"op":"mmap","addr":0,"len":36864,"prot":5,"flags":50,"result":{"ok":0},"n":1,"h":"70ed6b8f"}],"maps":[{"start":0,"end":36864,"perms":"r-xp","offset":0,"file":null,"flags":"rd ex mr mw me"}]}"#;

fn conform(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vma-bench"))
        .arg("conform")
        .args(args)
        .output()
        .expect("the tool runs")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The tool on a file with this content.
fn on(name: &str, content: &[u8]) -> Output {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join(name);
    fs::write(&path, content).expect("written");
    conform(&[&path.to_string_lossy()])
}

fn gz(text: &str) -> Vec<u8> {
    let mut out = GzEncoder::new(Vec::new(), Compression::fast());
    out.write_all(text.as_bytes()).expect("compressed");
    out.finish().expect("compressed")
}

#[track_caller]
fn unusable(output: &Output, why: &str) {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains(why), "{why:?} isn't in {said:?}");
    assert!(!said.contains("panicked"), "{said}");
    assert!(output.stdout.is_empty());
}

/// What parsing a line gives, as text.
fn refusal(line: &str) -> String {
    match Suite::parse(Path::new("v.jsonl"), line) {
        Ok(_) => format!("accepted: {line}"),
        Err(e) => e.to_string(),
    }
}

#[test]
fn the_case_as_it_is_passes() {
    let output = on("v.jsonl", CASE.as_bytes());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(on("v.jsonl.gz", &gz(CASE)).status.code(), Some(0));
}

#[test]
fn a_failed_case_is_status_1() {
    let output = on("v.jsonl", CASE.replace("70ed6b8f", "70ed6b80").as_bytes());
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    for part in [
        "0 passed     1 failed",
        "t-0, op 0: mmap addr=0 len=36864 prot=5 flags=50",
        "layout expected: 1 mappings with hash 70ed6b80",
        "layout got:      1 mappings with hash 70ed6b8f",
        "+0-9000 r-xp 0 - [rd ex mr mw me]",
    ] {
        assert!(said.contains(part), "{part:?} isn't in {said}");
    }
}

#[test]
fn files_that_cannot_be_read_are_named() {
    unusable(
        &conform(&["/nonexistent/v.jsonl"]),
        "/nonexistent/v.jsonl: ",
    );
    unusable(&on("v.jsonl", b""), "v.jsonl: there are no cases in it");
    unusable(&on("v.jsonl", b"\xff\xfe"), "v.jsonl:1: not text");
    let packed = gz(CASE);
    unusable(
        &on("v.jsonl.gz", &packed[..packed.len() / 2]),
        "damaged or cut off gzip data",
    );
    let dir = tempfile::tempdir().expect("a folder");
    unusable(
        &conform(&[&dir.path().to_string_lossy()]),
        "there is no *.jsonl",
    );
}

#[test]
fn a_damaged_line_is_named_before_anything_is_run() {
    let text = format!("{CASE}\n{}\n", &CASE[..100]);
    unusable(
        &on("v.jsonl", text.as_bytes()),
        "v.jsonl:2: column 100: EOF",
    );
    let text = format!("{CASE}\n\n{CASE}\n");
    unusable(&on("v.jsonl", text.as_bytes()), "v.jsonl:2: ");
}

#[test]
fn a_filter_that_keeps_nothing_is_unusable() {
    unusable(
        &conform(&["--family", "nosuch"]),
        "no case has this family and name",
    );
    unusable(
        &conform(&["--case", "nosuch"]),
        "no case has this family and name",
    );
}

#[test]
fn a_folder_means_its_vectors_and_filters_choose_among_them() {
    let dir = tempfile::tempdir().expect("a folder");
    let other = CASE.replace(r#""t-0","family":"t""#, r#""u-00012","family":"u""#);
    fs::write(dir.path().join("a.jsonl"), format!("{CASE}\n{other}\n")).expect("written");
    fs::write(dir.path().join("b.jsonl.gz"), gz(CASE)).expect("written");
    fs::write(dir.path().join("notes.txt"), "no vectors").expect("written");
    let folder = dir.path().to_string_lossy();
    for (filter, rows) in [
        (&[][..], vec![("a.jsonl", 2), ("b.jsonl.gz", 1)]),
        (&["--family", "u"][..], vec![("a.jsonl", 1)]),
        (&["--case", "12"][..], vec![("a.jsonl", 1)]),
        (
            &["--case", "t-0"][..],
            vec![("a.jsonl", 1), ("b.jsonl.gz", 1)],
        ),
    ] {
        let args: Vec<&str> = [&*folder, "--json"]
            .into_iter()
            .chain(filter.iter().copied())
            .collect();
        let output = conform(&args);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let lines = String::from_utf8(output.stdout).expect("text");
        let json: Vec<serde_json::Value> = lines
            .lines()
            .map(|line| serde_json::from_str(line).expect("a JSON object per line"))
            .collect();
        let (summary, files) = json.split_last().expect("a summary");
        let got: Vec<(String, u64)> = files
            .iter()
            .map(|row| {
                let file = Path::new(row["file"].as_str().expect("a name"));
                let name = file
                    .file_name()
                    .expect("a name")
                    .to_string_lossy()
                    .into_owned();
                (name, row["passed"].as_u64().expect("a number"))
            })
            .collect();
        let want: Vec<(String, u64)> = rows.iter().map(|(f, n)| ((*f).to_owned(), *n)).collect();
        assert_eq!(got, want, "{filter:?}");
        assert_eq!(summary["row"], "summary");
        assert_eq!(summary["holds"], true);
    }
}

#[test]
fn unknown_missing_and_impossible_values_are_refused() {
    #[rustfmt::skip]
    let damages = [
        (r#""family":"t","#, "", "missing field `family`"),
        (r#""family":"t","#, r#""family":"t","colour":1,"#, "unknown field `colour`"),
        (r#""family":"t","#, r#""family":"t","family":"t","#, "duplicate field `family`"),
        (r#""page_size":4096"#, r#""page_size":16384"#, "`page_size` is 16384"),
        (r#""0x100000000000""#, r#""100000000000""#, "isn't 0x"),
        (r#""0x100000000000""#, r#""0x100000001000""#, "unaligned"),
        (r#""0x100000000000""#, r#""0x0""#, "unaligned or beyond"),
        (r#""0x100000000000""#, r#""0xffffffffc0000000""#, "beyond the address space"),
        (r#""len":65536"#, r#""len":0"#, "empty"),
        (r#""len":65536"#, r#""len":65537"#, "unaligned"),
        (r#""len":65536"#, r#""len":18446744073709547520"#, "beyond the address space"),
        (r#""len":65536"#, r#""len":-1"#, "-1"),
        (r#""space":"open""#, r#""space":"ajar""#, "unknown variant `ajar`"),
        (r#""max_map_count":null"#, r#""max_map_count":-1"#, "-1"),
        (r#""limits":{}"#, r#""limits":{"cpu":1}"#, "unknown field `cpu`"),
        (r#""limits":{}"#, r#""limits":{"as":"1"}"#, "invalid type"),
        (r#""mode":"rw""#, r#""mode":"rwx""#, "unknown variant `rwx`"),
        (r#""mode":"rw"}"#, r#""mode":"rw"},{"id":"f0","len":0,"mode":"r"}"#, "f0 twice"),
        (r#"{"op":"mmap""#, r#"{"op":"mmap","p":1"#, "op 0: there is no process 1"),
        (r#"{"op":"mmap""#, r#"{"op":"mmap","file":"f9""#, "op 0: there is no file f9"),
        (r#"{"op":"mmap""#, r#"{"op":"mmap","colour":9"#, "op 0: unknown field `colour`"),
        (r#"{"op":"mmap""#, r#"{"op":"brk","addr":0,"result":{"ok":0}},{"op":"mmap""#, "without `brk_start`"),
        (r#"{"op":"mmap""#, r#"{"op":"exit","result":{"ok":0}},{"op":"mmap""#, "op 1: there is no process 0"),
        (r#"{"op":"mmap""#, r#"{"op":"dup_fd","file":"f0","new":"f0","result":{"ok":0}},{"op":"mmap""#, "there is a file f0 already"),
        (r#"{"op":"mmap""#, r#"{"op":"fork","child":0,"result":{"ok":0},"n":0,"h":"811c9dc5"},{"op":"mmap""#, "a process 0 already"),
        (r#"{"op":"mmap""#, r#"{"op":"fork","child":1,"result":{"ok":1},"n":0,"h":"811c9dc5"},{"op":"mmap""#, "live at the end"),
        (r#"{"op":"mmap""#, r#"{"op":"fork","child":1,"result":{"ok":1},"n":0,"h":"811c9dc5"},{"op":"dup_fd","file":"f0","new":"f1","result":{"ok":0}},{"op":"mmap""#, "after a fork"),
        (r#""maps":["#, r#""brk_start":65537,"maps":["#, "outside the arena"),
        (r#""maps":["#, r#""child_maps":{"0":[]},"maps":["#, "`child_maps` has process 0"),
        (r#""maps":["#, r#""child_maps":{"3":[]},"maps":["#, "live at the end"),
        (r#""maps":["#, r#""child_maps":{"x":[]},"maps":["#, "expected key to be a number"),
        (r#""maps":["#, r#""maps_after_each":[],"maps":["#, "0 layouts for 1 calls"),
        (r#""maps":["#, r#""maps_after_each":[null],"maps":["#, "null for exit"),
        (r#""flags":"rd ex"#, r#""flags":"rd zz"#, "\"zz\" isn't a known flag"),
        (r#""perms":"r-xp""#, r#""perms":"r-xpp""#, "four characters"),
        (r#""offset":0"#, r#""offset":0.5"#, "floating point"),
    ];
    for (part, damaged, why) in damages {
        assert!(CASE.contains(part), "{part}");
        let said = refusal(&CASE.replacen(part, damaged, 1));
        assert!(
            said.starts_with("v.jsonl:1: ") && said.contains(why),
            "{damaged}: {said}"
        );
    }
    for whole in [
        "", "null", "[]", "{}", "7", "\"text\"", "{", "[[[[[[", "\u{0}",
    ] {
        let said = refusal(&format!("{whole}\n{CASE}"));
        assert!(said.starts_with("v.jsonl:1: "), "{whole:?}: {said}");
    }
    let deep = format!(r#""addr":{}"#, "[".repeat(100_000));
    let said = refusal(&CASE.replacen(r#""addr":0"#, &deep, 1));
    assert!(said.contains("recursion limit"), "{}", &said[..80]);
}

/// A text that may be a case still; if it is, it's run, and the library may find fault with it but not panic.
fn survives(text: &str) {
    let Ok(suite) = Suite::parse(Path::new("v.jsonl"), text) else {
        return;
    };
    if let Ok(report) = run_suite(&suite, &|| {}) {
        for failure in report.failures {
            assert!(!failure.got.contains("a panic"), "{text}: {failure}");
        }
    }
}

/// One call of each kind with a number in every argument, so that damage to any of them is tried.
const CALLS: &str = r#"{"op":"mmap","addr":0,"len":36864,"prot":3,"flags":50,"off":0,"result":{"ok":0},"n":1,"h":"00000000"};{"op":"mprotect","addr":4096,"len":4096,"prot":1,"result":{"ok":0}};{"op":"mremap","addr":0,"old_len":4096,"new_len":8192,"flags":3,"new_addr":49152,"result":{"ok":49152}};{"op":"madvise","addr":0,"len":4096,"advice":4,"result":{"ok":0}};{"op":"mlock2","addr":0,"len":4096,"flags":1,"result":{"ok":0}};{"op":"mlockall","flags":1,"result":{"ok":0}};{"op":"msync","addr":0,"len":4096,"flags":4,"result":{"ok":0}};{"op":"mincore","addr":0,"len":4096,"result":{"ok":0}};{"op":"brk","addr":8192,"result":{"ok":8192}};{"op":"write","addr":0,"val":1,"result":{"ok":0}};{"op":"read","addr":0,"result":{"ok":0}};{"op":"ftruncate","file":"f0","len":8192,"result":{"ok":0}};{"op":"punch_hole","file":"f0","off":0,"len":4096,"result":{"ok":0}};{"op":"file_write","file":"f0","off":9000,"val":1,"result":{"ok":0}};{"op":"file_read","file":"f0","off":0,"result":{"ok":0}};{"op":"mseal","addr":0,"len":4096,"flags":0,"result":{"ok":0}};{"op":"remap_file_pages","addr":0,"len":4096,"prot":0,"pgoff":1,"flags":0,"result":{"ok":0}};{"op":"process_madvise","vec":[{"addr":0,"len":4096}],"advice":20,"flags":0,"result":{"ok":4096}};{"op":"mdwe","flags":1,"result":{"ok":0}};{"op":"file_seal","file":"f0","seals":2,"result":{"ok":0}};{"op":"fork","child":1,"result":{"ok":1},"n":0,"h":"00000000"}"#;

/// Extreme numbers, as the format writes them.
const EXTREMES: [&str; 12] = [
    "0",
    "1",
    "-1",
    "4095",
    "-4096",
    "9223372036854775807",
    "-9223372036854775808",
    "\"0xffffffffffffffff\"",
    "\"0xfffffffffffff000\"",
    "\"0x8000000000000000\"",
    "\"0x7ffffffff000\"",
    "\"0x7fffffffe000\"",
];

#[test]
fn extreme_numbers_in_any_argument_never_panic() {
    let setup = CALLS.split(';').next().expect("a call");
    for call in CALLS.split(';') {
        let children = if call.contains("fork") {
            r#""child_maps":{"1":[]},"#
        } else {
            ""
        };
        for (at, _) in call.match_indices(':') {
            let rest = &call[at + 1..];
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            if digits == 0 {
                continue;
            }
            for extreme in EXTREMES {
                let damaged = format!("{}{extreme}{}", &call[..=at], &rest[digits..]);
                // Whatever the call gives isn't what is expected; the setup call is expected to succeed.
                let first = setup.replace("00000000", "91e7ad5f");
                let ops = format!(r#""ops":[{first},{damaged}],"brk_start":4096,{children}"maps""#);
                let from = CASE.find(r#""ops""#).expect("ops");
                let to = CASE.find(r#""maps""#).expect("maps");
                survives(&format!("{}{ops}{}", &CASE[..from], &CASE[to + 6..]));
            }
        }
    }
}

#[test]
fn limits_and_lengths_at_the_edge_never_panic() {
    for extreme in [
        "0",
        "1",
        "4096",
        "9223372036854775807",
        "18446744073709551615",
    ] {
        for (part, damaged) in [
            (
                r#""max_map_count":null"#,
                format!(r#""max_map_count":{extreme}"#),
            ),
            (r#""limits":{}"#, format!(r#""limits":{{"as":{extreme}}}"#)),
            (
                r#""limits":{}"#,
                format!(r#""limits":{{"data":{extreme}}}"#),
            ),
            (
                r#""limits":{}"#,
                format!(r#""limits":{{"memlock":{extreme}}}"#),
            ),
            (
                r#""limits":{}"#,
                format!(r#""limits":{{"stack":{extreme}}}"#),
            ),
            (
                r#"{"id":"f0","len":4096"#,
                format!(r#"{{"id":"f0","len":{extreme}"#),
            ),
            (r#""end":36864"#, format!(r#""end":{extreme}"#)),
            (r#""n":1"#, format!(r#""n":{extreme}"#)),
        ] {
            assert!(CASE.contains(part), "{part}");
            for space in ["open", "closed", "closed_bottom_up"] {
                let space = format!(r#""space":"{space}""#);
                let case =
                    CASE.replacen(part, &damaged, 1)
                        .replacen(r#""space":"open""#, &space, 1);
                survives(&case);
            }
        }
    }
}

#[test]
fn a_line_with_any_byte_cut_out_or_replaced_never_panics() {
    for at in 0..CASE.len() {
        survives(&CASE[..at]);
        survives(&format!("{}{}", &CASE[..at], &CASE[at + 1..]));
        for other in ["9", "-", "\"", "}", ",", "x"] {
            survives(&format!("{}{other}{}", &CASE[..at], &CASE[at + 1..]));
        }
    }
}
