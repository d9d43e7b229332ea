//! `vma-bench paper`: the smallest sizes run, and every figure is a row of the schema. No time is asserted.

use std::collections::BTreeSet;
use std::process::{Command, Output};

use serde_json::Value;

/// Few mappings, few rounds.
const FEW: [&str; 4] = ["--max-mappings", "100", "--max-rounds", "5"];

fn run(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vma-bench"));
    command.args(["paper", "--quick"]).args(args);
    command.output().expect("the tool can be run")
}

fn name(row: &Value) -> String {
    row["row"].as_str().unwrap_or_default().to_owned()
}

/// The rows of a run, each of which has all fields and is there once.
fn rows(args: &[&str]) -> Vec<Value> {
    let output = run(args);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let rows: Vec<Value> = text(&output.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).expect("one object per line"))
        .collect();
    for row in &rows {
        let fields = row.as_object().expect("an object");
        assert_eq!(fields.len(), 13, "{row}");
        assert!(
            row["suite"]
                .as_str()
                .is_some_and(|suite| suite.starts_with("paper/"))
        );
        assert!(row["value"].as_f64().is_some_and(f64::is_finite), "{row}");
    }
    assert_eq!(names(&rows).len(), rows.len(), "each row once");
    rows
}

fn names(rows: &[Value]) -> BTreeSet<String> {
    rows.iter().map(name).collect()
}

/// Names of the rows that have a target.
fn with_target(rows: &[Value]) -> Vec<String> {
    let claimed = rows.iter().filter(|row| !row["holds"].is_null());
    claimed.map(name).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the tool writes text")
}

#[test]
fn the_smallest_sizes_give_a_row_for_every_figure() {
    let rows = rows(&["R1", "--json", "--max-bytes", "2097152"]);
    let names = names(&rows);
    for size in ["4 KiB", "2 MiB"] {
        for way in ["exclusive", "downgraded", "detached (default)"] {
            for section in ["exclusive hold of the lock", "whole call"] {
                let name = format!("R1/{section}/{size}/{way}");
                assert!(names.contains(&name), "{name}");
            }
        }
        assert!(names.contains(&format!("R1/whole call/{size}/kernel")));
    }
    let with_target = with_target(&rows);
    // The factor is claimed for large ranges, and stalls need two cores.
    let expected = 3 + usize::from(names.iter().any(|name| name.contains("stall")));
    assert_eq!(with_target.len(), expected, "{with_target:?}");
}

#[test]
fn without_a_result_all_are_measured_and_without_json_there_are_tables_and_a_verdict() {
    let output = run(&[&["--max-bytes", "4096"], &FEW[..]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let out = text(&output.stdout);
    assert!(out.contains("R1/exclusive hold of the lock"), "{out}");
    assert!(out.contains("R4/hold of the index's lock"), "{out}");
    assert!(
        out.contains("R2/attach") || out.contains("one core only"),
        "{out}"
    );
    assert!(out.contains("targets hold"), "{out}");
}

#[test]
fn a_small_busy_process_gives_a_row_for_every_figure() {
    let rows = rows(&[&["R2", "--json", "--max-bytes", "2097152"], &FEW[..]].concat());
    let names = names(&rows);
    if names.is_empty() {
        // One core.
        return;
    }
    for probes in ["1 probe", "4 probes"] {
        for section in [
            "longest dup in B beside attach",
            "attach",
            "longest dup in B beside detach",
            "longest dup in B, whole run",
        ] {
            for way in ["nested", "apart (default)"] {
                let name = format!("R2/{section}, {probes}/2 MiB/{way}");
                assert!(names.contains(&name), "{name}");
            }
        }
        for way in ["nested", "apart (default)"] {
            let name = format!(
                "R2/longest time at a lock, {probes}/2 MiB/tracer, for the semaphore: {way}"
            );
            assert!(names.contains(&name), "{name}");
        }
        let name = format!("R2/attach, {probes}/Linux, 4 GB/nested");
        assert!(names.contains(&name), "{name}");
    }
    // Factors are claimed for large ones, and the growth with several sizes.
    assert!(with_target(&rows).is_empty());
}

#[test]
fn files_of_few_mappings_give_a_row_for_every_figure() {
    let rows = rows(&[&["R4", "--json"], &FEW[..]].concat());
    let names = names(&rows);
    let threads: &[&str] = if names.iter().any(|name| name.contains("2 threads")) {
        &["1 thread", "2 threads"]
    } else {
        &["1 thread"]
    };
    for threads in threads {
        for section in [
            "hold of the index's lock, per call",
            "hold of the index's lock, longest",
            "wait for the index's lock, per call",
            "wait for the index's lock, longest",
            "programs started and ended per second",
        ] {
            for way in ["before", "after (default)"] {
                let name = format!("R4/{section}/{threads}/{way}");
                assert!(names.contains(&name), "{name}");
            }
        }
        for line in ["low", "median", "high"] {
            let name = format!("R4/programs per second, after / before/{threads}/{line}");
            assert!(names.contains(&name), "{name}");
        }
    }
    for shape in ["each another page", "the same pages in many spaces"] {
        for contender in ["index", "BTreeMap"] {
            let name = format!("R4/an entry comes and goes, {shape}/100/{contender}");
            assert!(names.contains(&name), "{name}");
        }
    }
    // Holds on each number of threads, programs per second on two; indexes of this size have none.
    let expected = if threads.len() > 1 { 3 } else { 1 };
    let with_target = with_target(&rows);
    assert_eq!(with_target.len(), expected, "{with_target:?}");
}

#[test]
fn an_unknown_result_is_refused() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vma-bench"));
    let output = command
        .args(["paper", "R9"])
        .output()
        .expect("it can be run");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("R1"), "says what there is");
}
