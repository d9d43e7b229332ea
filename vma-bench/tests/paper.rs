//! `vma-bench paper`: the smallest sizes run, and every figure is a row of the schema. No time is asserted.

use std::collections::BTreeSet;
use std::process::{Command, Output};

use serde_json::Value;

fn run(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vma-bench"));
    command.args(["paper", "R1", "--quick"]).args(args);
    command.output().expect("the tool can be run")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the tool writes text")
}

#[test]
fn the_smallest_sizes_give_a_row_for_every_figure() {
    let output = run(&["--json", "--max-bytes", "2097152"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let rows: Vec<Value> = text(&output.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).expect("one object per line"))
        .collect();
    let name = |row: &Value| row["row"].as_str().unwrap_or_default().to_owned();
    let names: BTreeSet<String> = rows.iter().map(name).collect();
    assert_eq!(names.len(), rows.len(), "each row once");
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
    for size in ["4 KiB", "2 MiB"] {
        for way in ["exclusive", "downgraded", "detached (default)"] {
            for section in ["exclusive hold of the lock", "whole call"] {
                let name = format!("R1/{section}/{size}/{way}");
                assert!(names.contains(&name), "{name}");
            }
        }
        assert!(names.contains(&format!("R1/whole call/{size}/kernel")));
    }
    let with_target: Vec<String> = rows
        .iter()
        .filter(|row| !row["holds"].is_null())
        .map(name)
        .collect();
    // The factor is claimed for large ranges, and stalls need two cores.
    let expected = 3 + usize::from(names.iter().any(|name| name.contains("stall")));
    assert_eq!(with_target.len(), expected, "{with_target:?}");
}

#[test]
fn without_json_there_are_tables_and_a_verdict() {
    let output = run(&["--max-bytes", "4096"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let out = text(&output.stdout);
    assert!(out.contains("R1/exclusive hold of the lock"), "{out}");
    assert!(out.contains("targets hold"), "{out}");
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
