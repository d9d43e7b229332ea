//! Input that can't be used, or not wholly: each kind of damage has its message with file and line and exit status 2, or is
//! counted; nothing panics.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use tempfile::TempDir;
use vma_bench::replay::{
    bundled::BUNDLED,
    engine,
    load::{self, Texts},
};

/// A small trace with its maps in a folder of its own, to be damaged.
struct Case {
    dir: TempDir,
}

impl Case {
    fn new() -> Self {
        let case = Self {
            dir: tempfile::tempdir().expect("a folder"),
        };
        let texts = texts("sqlite");
        for (name, text) in [
            ("t.strace", Some(texts.trace.text)),
            ("t.start.maps", Some(texts.start.text)),
            ("t.end.maps", texts.end.map(|t| t.text)),
            ("t.more.maps", texts.more.map(|t| t.text)),
        ] {
            case.write(name, text.expect("there").as_bytes());
        }
        case
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.at(name), bytes).expect("written");
    }

    fn edit(&self, name: &str, edit: impl FnOnce(&str) -> String) {
        let text = fs::read_to_string(self.at(name)).expect("read");
        self.write(name, edit(&text).as_bytes());
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.at(name)).expect("removed");
    }

    fn replay(&self, more: &[&str]) -> Output {
        replay(&self.at("t.strace"), more)
    }

    /// The message of a run that has to end with status 2, the folder left out.
    fn refusal(&self, more: &[&str]) -> String {
        let out = self.replay(more);
        let message = String::from_utf8_lossy(&out.stderr)
            .replace(&format!("{}/", self.dir.path().display()), "");
        assert_eq!(out.status.code(), Some(2), "{message}");
        message
            .trim_end()
            .trim_start_matches("vma-bench: ")
            .to_owned()
    }
}

fn replay(trace: &Path, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vma-bench"))
        .arg("replay")
        .arg(trace)
        .args(more)
        .output()
        .expect("runs")
}

fn texts(name: &str) -> Texts {
    BUNDLED
        .iter()
        .find(|b| b.name == name)
        .expect("bundled")
        .texts()
        .expect("sound")
}

fn stdout(out: &Output) -> String {
    String::from_utf8_lossy(&out.stdout).into_owned()
}

#[test]
fn an_undamaged_case_is_equal() {
    let out = Case::new().replay(&[]);
    assert_eq!(out.status.code(), Some(0), "{}", stdout(&out));
}

#[test]
fn a_log_that_is_not_there() {
    let case = Case::new();
    case.remove("t.strace");
    assert!(
        case.refusal(&[]).starts_with("t.strace: No such file"),
        "{}",
        case.refusal(&[])
    );
}

#[test]
fn a_folder_in_place_of_a_log() {
    let case = Case::new();
    let out = replay(case.dir.path(), &[]);
    assert_eq!(out.status.code(), Some(2));
}

#[test]
fn a_log_that_is_empty() {
    let case = Case::new();
    case.write("t.strace", b"");
    assert_eq!(
        case.refusal(&[]),
        "t.strace:1: no call that matters in the whole log"
    );
}

#[test]
fn a_log_that_is_cut_within_a_line() {
    let case = Case::new();
    case.edit("t.strace", |t| t[..t.len() / 2].to_owned());
    let message = case.refusal(&[]);
    assert!(
        message.starts_with("t.strace:") && message.ends_with("cut off"),
        "{message}"
    );
}

#[test]
fn a_log_that_is_cut_between_lines() {
    let case = Case::new();
    case.edit("t.strace", |t| {
        t.lines().take(150).flat_map(|l| [l, "\n"]).collect()
    });
    let message = case.refusal(&[]);
    assert!(
        message.starts_with(
            "t.strace:150: the log ends before process 11547 is at the recorded moment"
        ),
        "{message}"
    );
}

#[test]
fn compression_that_is_cut_or_damaged() {
    let case = Case::new();
    let whole = fs::read(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/data/traces/sqlite.strace.gz"
    ))
    .expect("bundled");
    case.write("t.strace", &whole[..whole.len() - 20]);
    assert!(
        case.refusal(&[])
            .starts_with("t.strace: damaged or cut off gzip data")
    );
    let mut flipped = whole;
    flipped[400] ^= 0x55;
    case.write("t.strace", &flipped);
    assert!(case.refusal(&[]).starts_with("t.strace"));
}

#[test]
fn bytes_that_are_no_text() {
    let case = Case::new();
    case.write("t.strace", &[b'a', b'\n', 0xff, 0xfe, 0x00]);
    assert_eq!(
        case.refusal(&[]),
        "t.strace:2: not text: strace and /proc write ASCII"
    );
    case.write("t.strace", &[0, 1, 2, 3, b'\n']);
    assert!(
        case.refusal(&[])
            .starts_with("t.strace:1: no line of strace")
    );
}

#[test]
fn a_line_of_something_else() {
    let case = Case::new();
    case.edit("t.strace", |t| t.replacen('\n', "\nwhat is this\n", 1));
    assert_eq!(
        case.refusal(&[]),
        "t.strace:2: no line of strace: \"what is this\""
    );
}

#[test]
fn a_number_that_is_none() {
    let case = Case::new();
    case.edit("t.strace", |t| {
        t.replacen("mmap(NULL, 8192", "mmap(NULL, 8x92", 1)
    });
    assert_eq!(
        case.refusal(&[]),
        "t.strace:3: mmap: argument 2: \"8x92\" is neither a number nor a constant known here"
    );
}

#[test]
fn a_constant_that_nobody_knows() {
    let case = Case::new();
    case.edit("t.strace", |t| {
        t.replacen("MAP_PRIVATE|MAP_ANON", "MAP_PRIVATE|MAP_NEW|MAP_ANON", 1)
    });
    assert_eq!(
        case.refusal(&[]),
        "t.strace:3: mmap: argument 4: \"MAP_NEW\" is neither a number nor a constant known here"
    );
}

#[test]
fn arguments_that_are_missing() {
    let case = Case::new();
    case.edit("t.strace", |t| {
        t.replacen(
            "mmap(NULL, 8192, PROT_READ|PROT_WRITE, MAP_PRIVATE|MAP_ANONYMOUS, -1, 0)",
            "mmap(NULL, 8192)",
            1,
        )
    });
    assert_eq!(case.refusal(&[]), "t.strace:3: mmap: argument 3 is missing");
}

#[test]
fn an_error_that_nobody_knows() {
    let case = Case::new();
    case.edit("t.strace", |t| {
        t.replacen("= 0x7ffff7fc0000", "= -1 EWHAT (What)", 1)
    });
    assert_eq!(
        case.refusal(&[]),
        "t.strace:3: mmap: an error that isn't known here: \"EWHAT\""
    );
}

#[test]
fn maps_that_are_not_there() {
    let case = Case::new();
    case.remove("t.start.maps");
    assert_eq!(
        case.refusal(&[]),
        "t.strace: no start map: NAME.start.maps isn't beside it and --start isn't given"
    );
    let missing = case.at("missing");
    assert!(
        case.refusal(&["--start", missing.to_str().expect("text")])
            .starts_with("missing: No such file")
    );
    let case = Case::new();
    case.remove("t.end.maps");
    case.remove("t.more.maps");
    assert!(
        case.refusal(&[])
            .starts_with("t.strace: nothing to compare with")
    );
    assert!(
        case.refusal(&["--end", case.at("missing").to_str().expect("text")])
            .starts_with("missing: No such file")
    );
}

#[test]
fn maps_that_are_damaged() {
    for (name, from, to, why) in [
        (
            "t.start.maps",
            "r--p",
            "rq-p",
            "t.start.maps:1: permissions that aren't like rwxp",
        ),
        (
            "t.end.maps",
            "-",
            "+",
            "t.end.maps:1: a range that isn't START-END",
        ),
        (
            "t.more.maps",
            "event=at",
            "event=on",
            "t.more.maps:1: event=on isn't exec, at or end",
        ),
        (
            "t.more.maps",
            "pid=",
            "pit=",
            "t.more.maps:1: no pid= in the heading",
        ),
    ] {
        let case = Case::new();
        case.edit(name, |t| t.replacen(from, to, 1));
        assert_eq!(case.refusal(&[]), why);
    }
    let case = Case::new();
    case.edit("t.end.maps", |t| t[..t.len() - 30].to_owned());
    assert!(
        case.refusal(&[]).contains("cut off") || case.refusal(&[]).contains("not a line of a map")
    );
}

#[test]
fn a_map_at_a_moment_that_never_comes() {
    let case = Case::new();
    case.edit("t.more.maps", |t| t.replacen("n=64", "n=6400", 1));
    let message = case.refusal(&[]);
    assert!(
        message.ends_with(
            "the log ends before process 11547 is at the recorded moment 'at 6400' (1 such in all)"
        ),
        "{message}"
    );
}

#[test]
fn calls_and_lines_that_do_not_matter_are_counted() {
    let case = Case::new();
    case.edit("t.strace", |t| {
        let odd = "\nstrace: Process 1 attached\n11547 read(3, \"x)y\", 3) = 3\n11547 <... munmap resumed>) = 0\n99 brk(NULL) = 0x1000\n";
        t.replacen('\n', odd, 1)
    });
    let out = case.replay(&[]);
    let text = stdout(&out);
    assert_eq!(out.status.code(), Some(0), "{text}");
    for line in [
        "1: lines passed over: a note of strace itself",
        "1: lines passed over: resumed without its beginning",
        "1: calls that have nothing to do with memory: read",
        "2: not followed: a task whose beginning isn't in the log",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
}

#[test]
fn maps_given_by_name_are_used() {
    let (case, elsewhere) = (Case::new(), tempfile::tempdir().expect("a folder"));
    let to = |name: &str| elsewhere.path().join(name);
    for (from, name) in [("t.start.maps", "first"), ("t.end.maps", "last")] {
        fs::rename(case.at(from), to(name)).expect("moved");
    }
    let (first, last) = (to("first"), to("last"));
    let args = [
        "--start",
        first.to_str().expect("text"),
        "--end",
        last.to_str().expect("text"),
    ];
    let out = case.replay(&args);
    assert_eq!(out.status.code(), Some(0), "{}", stdout(&out));
    assert!(stdout(&out).contains("equal to the recorded maps at 2 of 2 snapshots"));
}

#[test]
fn a_map_that_differs_is_shown_as_a_diff() {
    let case = Case::new();
    case.edit("t.end.maps", |t| t.replacen("r-xp", "rwxp", 1));
    let out = case.replay(&[]);
    let text = stdout(&out);
    assert_eq!(out.status.code(), Some(1), "{text}");
    assert!(
        text.contains("permissions are rwxp, the replay has r-xp"),
        "{text}"
    );
    assert!(
        text.lines().any(|l| l.starts_with("-55555555c000-"))
            && text.lines().any(|l| l.starts_with("+55555555c000-")),
        "{text}"
    );
    let json = stdout(&case.replay(&["--json"]));
    assert!(
        json.lines().any(|l| l.contains("\"row\":\"difference\"")),
        "{json}"
    );
}

#[test]
fn a_result_that_nothing_explains_is_forced_and_counted() {
    let case = Case::new();
    // The first anonymous mapping of the loader, said to be elsewhere, here and in what follows.
    case.edit("t.strace", |t| {
        t.replacen("= 0x7ffff7fc0000", "= 0x7ffff0000000", 1)
    });
    let out = case.replay(&[]);
    let text = stdout(&out);
    assert_eq!(out.status.code(), Some(1), "{text}");
    assert!(
        text.contains("recorded 0x7ffff0000000, the library gave 0x7ffff7fc0000"),
        "{text}"
    );
}

/// Parses and replays in this process; what comes out doesn't matter, that it comes out does.
fn survives(mut texts: Texts, log: String) {
    texts.trace.text = log;
    if let Ok(case) = load::case(&texts) {
        let _ = engine::replay(&case.log, &case.recorded, case.path.clone(), &|_, _| {});
    }
}

#[test]
fn no_cut_of_a_log_panics() {
    let whole = texts("kinds").trace.text;
    for cut in (0..whole.len()).step_by(97) {
        survives(texts("kinds"), whole[..cut].to_owned());
        let lines: String = whole[..cut]
            .rsplit_once('\n')
            .map_or(String::new(), |(l, _)| format!("{l}\n"));
        survives(texts("kinds"), lines);
    }
}

#[test]
fn no_changed_byte_of_a_log_panics() {
    let whole = texts("kinds").trace.text.into_bytes();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..400 {
        let mut log = whole.clone();
        for _ in 0..3 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let at = usize::try_from(random >> 33).expect("64 bits") % log.len();
            log[at] = b"0123456789abcdef<>()[]{}|,=\" \n\\x"
                [usize::try_from(random >> 20).expect("64 bits") % 32];
        }
        survives(texts("kinds"), String::from_utf8(log).expect("ASCII"));
    }
}

#[test]
fn no_swapped_lines_panic() {
    let whole = texts("mtmap").trace.text;
    let lines: Vec<&str> = whole.lines().collect();
    for step in [2, 3, 7] {
        let mut log: Vec<&str> = lines.iter().copied().take(600).collect();
        for i in (1..log.len() - step).step_by(step) {
            log.swap(i, i + step);
        }
        survives(
            texts("mtmap"),
            log.iter().flat_map(|l| [*l, "\n"]).collect(),
        );
    }
}
