//! Small logs, each for one thing that the model of tasks, files and order has to get right.

use std::path::PathBuf;

use vma_bench::replay::{
    engine,
    load::{self, Text, Texts},
    stats::Outcome,
};

const EXE: &str =
    "00400000-00401000 r-xp 00000000 fe:00 7                                  /bin/x\n";
const LOADER: &str =
    "7ffff7ffe000-7ffff7fff000 r-xp 00000000 fe:00 8                          /lib/ld.so\n";
const STACK: &str =
    "7ffffffde000-7ffffffff000 rw-p 00000000 00:00 0                          [stack]\n";
const EXEC: &str = "1 execve(\"/bin/x\", [\"x\"], 0x1 /* 0 vars */) = 0\n";

fn anon(range: &str, perms: &str) -> String {
    format!("{range} {perms} 00000000 00:00 0 \n")
}

fn file(range: &str, perms: &str, offset: &str, inode: u32, name: &str) -> String {
    format!("{range} {perms} {offset} fe:00 {inode}                        {name}\n")
}

/// A map of the program with `more` between it and the loader.
fn map(more: &str) -> String {
    format!("{EXE}{more}{LOADER}{STACK}")
}

fn run(log: &str, end: &str, more: &str) -> Result<Outcome, String> {
    let text = |name: &str, text: String| Text {
        path: PathBuf::from(name),
        text,
    };
    let texts = Texts {
        trace: text("t", format!("{EXEC}{log}")),
        start: text("start", map("")),
        end: Some(text("end", end.to_owned())),
        flags: None,
        more: (!more.is_empty()).then(|| text("more", more.to_owned())),
    };
    let case = load::case(&texts).map_err(|e| e.to_string())?;
    engine::replay(&case.log, &case.recorded, case.path.clone(), &|_, _| {})
        .map_err(|e| e.to_string())
}

#[track_caller]
fn equal(log: &str, end: &str, more: &str) -> Outcome {
    let outcome = run(log, end, more).unwrap_or_else(|e| panic!("{e}"));
    if let Some(d) = &outcome.difference {
        panic!("{}\n{}", d.what, d.diff);
    }
    assert_eq!(
        outcome.stats.total().forced,
        0,
        "{:?}",
        outcome.stats.forced
    );
    outcome
}

const RW: &str = "PROT_READ|PROT_WRITE, MAP_PRIVATE|MAP_ANONYMOUS, -1, 0";
const THREAD: &str = "1 clone3({flags=CLONE_VM|CLONE_FILES|CLONE_FS|CLONE_THREAD, exit_signal=0} => {parent_tid=[2]}, 88) = 2\n";
const BOTH_GONE: &str = "2 +++ exited with 0 +++\n1 +++ exited with 0 +++\n";

#[test]
fn of_overlapping_calls_the_one_that_ends_later_may_come_first() {
    let log = format!(
        "{THREAD}1 mmap(NULL, 8192, {RW}) = 0x7ffff7ffc000\n\
         1 munmap(0x7ffff7ffc000, 8192 <unfinished ...>\n\
         2 mmap(NULL, 4096, {RW}) = 0x7ffff7ffd000\n\
         1 <... munmap resumed>) = 0\n{BOTH_GONE}"
    );
    let outcome = equal(&log, &map(&anon("7ffff7ffd000-7ffff7ffe000", "rw-p")), "");
    assert_eq!(outcome.stats.total().reordered, 2);
}

#[test]
fn calls_that_ended_already_may_change_places() {
    // Both ask for a page; the one that ended first got the lower place.
    let log = format!(
        "{THREAD}1 mmap(NULL, 4096, {RW} <unfinished ...>\n2 mmap(NULL, 8192, {RW} <unfinished ...>\n\
         1 <... mmap resumed>) = 0x7ffff7ffb000\n2 <... mmap resumed>) = 0x7ffff7ffc000\n{BOTH_GONE}"
    );
    let outcome = equal(&log, &map(&anon("7ffff7ffb000-7ffff7ffe000", "rw-p")), "");
    assert_eq!(
        (
            outcome.stats.total().predicted,
            outcome.stats.total().reordered
        ),
        (0, 2)
    );
}

#[test]
fn calls_one_after_the_other_are_never_exchanged() {
    let log = format!(
        "{THREAD}1 mmap(NULL, 4096, {RW}) = 0x7ffff7ffb000\n2 mmap(NULL, 8192, {RW}) = 0x7ffff7ffc000\n{BOTH_GONE}"
    );
    let outcome = run(&log, &map(&anon("7ffff7ffb000-7ffff7ffe000", "rw-p")), "").expect("replays");
    assert_eq!(outcome.stats.total().forced, 1);
}

#[test]
fn a_call_that_never_came_back_was_done_or_not() {
    let log = format!(
        "{THREAD}1 mmap(NULL, 8192, {RW}) = 0x7ffff7ffc000\n2 munmap(0x7ffff7ffc000, 4096 <unfinished ...>\n\
         1 exit_group(0) = ?\n2 <... munmap resumed>) = ?\n{BOTH_GONE}"
    );
    equal(&log, &map(&anon("7ffff7ffc000-7ffff7ffe000", "rw-p")), "");
    let log = log.replace("2 <... munmap resumed>) = ?\n", "");
    equal(&log, &map(&anon("7ffff7ffc000-7ffff7ffe000", "rw-p")), "");
    let outcome = equal(&log, &map(&anon("7ffff7ffd000-7ffff7ffe000", "rw-p")), "");
    assert_eq!(outcome.stats.never_returned["done"], 1);
}

#[test]
fn a_child_may_show_itself_before_its_fork_returns() {
    let log = format!(
        "1 mmap(NULL, 4096, {RW}) = 0x7ffff7ffd000\n1 clone(child_stack=NULL, flags=SIGCHLD <unfinished ...>\n\
         3 munmap(0x7ffff7ffd000, 4096) = 0\n3 +++ exited with 0 +++\n1 <... clone resumed>) = 3\n1 +++ exited with 0 +++\n"
    );
    let child = format!("=== pid=3 event=end\n{}", map(""));
    let outcome = equal(
        &log,
        &map(&anon("7ffff7ffd000-7ffff7ffe000", "rw-p")),
        &child,
    );
    assert_eq!((outcome.stats.processes, outcome.stats.snapshots), (2, 2));
}

#[test]
fn a_vfork_child_shares_the_space_until_its_execve() {
    let log = format!(
        "1 vfork( <unfinished ...>\n4 mmap(NULL, 4096, {RW}) = 0x7ffff7ffd000\n\
         4 execve(\"/bin/x\", [\"x\"], 0x1 /* 0 vars */ <unfinished ...>\n1 <... vfork resumed>) = 4\n4 <... execve resumed>) = 0\n\
         4 mmap(NULL, 4096, PROT_READ, MAP_PRIVATE|MAP_ANONYMOUS, -1, 0) = 0x7ffff7ffd000\n4 +++ exited with 0 +++\n1 +++ exited with 0 +++\n"
    );
    let child = format!(
        "=== pid=4 event=exec n=1\n{}=== pid=4 event=end\n{}",
        map(""),
        map(&anon("7ffff7ffd000-7ffff7ffe000", "r--p"))
    );
    equal(
        &log,
        &map(&anon("7ffff7ffd000-7ffff7ffe000", "rw-p")),
        &child,
    );
}

#[test]
fn a_child_without_a_map_after_its_execve_is_not_followed() {
    let log = "1 vfork() = 4\n4 execve(\"/bin/y\", [\"y\"], 0x1 /* 0 vars */) = 0\n4 brk(NULL) = 0x5000\n\
               4 +++ exited with 0 +++\n1 +++ exited with 0 +++\n";
    let outcome = equal(log, &map(""), "");
    assert_eq!(
        outcome.stats.not_followed["a process without a map after its execve"],
        1
    );
    let end = format!("=== pid=4 event=end\n{}", map(""));
    assert_eq!(
        run(log, &map(""), &end).expect_err("no layout to begin with"),
        "t: process 4 has a map at 'end', but none after its execve (event=exec) to begin with"
    );
}

#[test]
fn the_execve_of_a_thread_replaces_the_process() {
    let log = format!(
        "{THREAD}2 execve(\"/bin/x\", [\"x\"], 0x1 /* 0 vars */ <unfinished ...>\n1 +++ superseded by execve in pid 2 +++\n\
         1 <... execve resumed>) = 0\n1 mmap(NULL, 4096, {RW}) = 0x7ffff7ffd000\n1 +++ exited with 0 +++\n"
    );
    let again = format!("=== pid=1 event=exec n=2\n{}", map(""));
    equal(
        &log,
        &map(&anon("7ffff7ffd000-7ffff7ffe000", "rw-p")),
        &again,
    );
}

#[test]
fn mappings_of_one_open_file_merge_and_of_two_do_not() {
    let open = |fd: u32| format!("1 openat(AT_FDCWD</>, \"/f\", O_RDONLY) = {fd}</f>\n");
    let part = |fd: u32, at: &str, offset: &str| {
        format!("1 mmap({at}, 4096, PROT_READ, MAP_PRIVATE|MAP_FIXED, {fd}</f>, {offset}) = {at}\n")
    };
    let gone = "1 +++ exited with 0 +++\n";
    let one = open(3)
        + "1 dup(3</f>) = 4</f>\n"
        + &part(3, "0x10000", "0")
        + &part(4, "0x11000", "0x1000")
        + gone;
    let merged = file("00010000-00012000", "r--p", "00000000", 9, "/f");
    equal(&one, &format!("{merged}{}", map("")), "");
    let two = open(3) + &open(4) + &part(3, "0x10000", "0") + &part(4, "0x11000", "0x1000") + gone;
    let (low, high) = (
        file("00010000-00011000", "r--p", "00000000", 9, "/f"),
        file("00011000-00012000", "r--p", "00001000", 9, "/f"),
    );
    let outcome = equal(&two, &format!("{low}{high}{}", map("")), "");
    assert_eq!((outcome.stats.equal_by_vma, outcome.stats.borders), (1, 1));
}

#[test]
fn names_follow_their_files() {
    let log = "1 openat(AT_FDCWD</d>, \"a\", O_RDWR) = 3</d/a>\n1 openat(AT_FDCWD</d>, \"b\", O_RDWR) = 4</d/b>\n\
               1 mmap(0x10000, 4096, PROT_READ, MAP_SHARED|MAP_FIXED, 3</d/a>, 0) = 0x10000\n\
               1 mmap(0x20000, 4096, PROT_READ, MAP_SHARED|MAP_FIXED, 4</d/b>, 0) = 0x20000\n\
               1 rename(\"a\", \"b\") = 0\n1 +++ exited with 0 +++\n";
    let end = file("00010000-00011000", "r--s", "00000000", 1, "/d/b")
        + &file("00020000-00021000", "r--s", "00000000", 2, "/d/b (deleted)")
        + &map("");
    equal(log, &end, "");
    let wrong = end.replace("/d/b\n", "/d/a\n");
    let outcome = run(log, &wrong, "").expect("replays");
    assert_eq!(
        outcome.difference.expect("differs").what,
        "page 0x10000: name is \"/d/a\", the replay has \"/d/b\""
    );
}

#[test]
fn an_inode_that_changes_under_a_file_is_a_difference() {
    let log = "1 openat(AT_FDCWD</>, \"/f\", O_RDONLY) = 3</f>\n\
               1 mmap(0x10000, 4096, PROT_READ, MAP_PRIVATE|MAP_FIXED, 3</f>, 0) = 0x10000\n\
               1 mmap(0x20000, 4096, PROT_READ, MAP_PRIVATE|MAP_FIXED, 3</f>, 0) = 0x20000\n1 +++ exited with 0 +++\n";
    let end = file("00010000-00011000", "r--p", "00000000", 1, "/f")
        + &file("00020000-00021000", "r--p", "00000000", 2, "/f")
        + &map("");
    let outcome = run(log, &end, "").expect("replays");
    assert!(outcome.difference.expect("differs").what.contains("it was"));
}

#[test]
fn a_stack_may_have_grown_and_nothing_else() {
    let gone = "1 +++ exited with 0 +++\n";
    let grown = map("").replace("7ffffffde000-", "7fffffe00000-");
    let outcome = equal(gone, &grown, "");
    assert_eq!(
        (outcome.stats.stack_growths, outcome.stats.stack_pages),
        (1, 0x1de)
    );
    let shrunk = map("").replace("7ffffffde000-", "7ffffffdf000-");
    assert!(
        run(gone, &shrunk, "")
            .expect("replays")
            .difference
            .is_some()
    );
}

#[test]
fn close_range_and_dup2_change_the_files_behind_numbers() {
    let log = "1 openat(AT_FDCWD</>, \"/f\", O_RDONLY) = 3</f>\n1 openat(AT_FDCWD</>, \"/g\", O_RDONLY) = 4</g>\n\
               1 dup2(4</g>, 3</f>) = 3</g>\n1 mmap(0x10000, 4096, PROT_READ, MAP_PRIVATE|MAP_FIXED, 3, 0) = 0x10000\n\
               1 close_range(3, 4294967295, 0) = 0\n\
               1 mmap(0x20000, 4096, PROT_READ, MAP_PRIVATE|MAP_FIXED, 3, 0) = -1 EBADF (Bad file descriptor)\n1 +++ exited with 0 +++\n";
    equal(
        log,
        &format!(
            "{}{}",
            file("00010000-00011000", "r--p", "00000000", 4, "/g"),
            map("")
        ),
        "",
    );
}
