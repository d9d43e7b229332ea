//! The check can fail: an expectation that is changed in a single place is reported, at its place and as its kind.

use std::path::Path;

use serde_json::{Value, json};
use vma_bench::{
    conform::{
        bundled::BUNDLED,
        input::Suite,
        report::{Failure, FileReport},
        run_suite,
    },
    replay::input::text_of,
};

fn lines(name: &str) -> Vec<Value> {
    let (_, bytes) = BUNDLED
        .iter()
        .find(|(known, _)| *known == name)
        .expect("bundled");
    let text = text_of(Path::new(name), bytes.to_vec()).expect("text");
    text.lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

fn run(case: &Value) -> FileReport {
    let suite = Suite::parse(Path::new("planted.jsonl"), &case.to_string())
        .unwrap_or_else(|e| panic!("{e}\n{case}"));
    run_suite(&suite, &|| {}).unwrap_or_else(|e| panic!("{e}"))
}

/// The failure of the case with a change; the case itself has to pass.
fn failure(case: &Value, change: impl FnOnce(&mut Value)) -> Option<Failure> {
    let mut planted = case.clone();
    change(&mut planted);
    run(&planted).failures.into_iter().next()
}

fn ops(case: &Value) -> &[Value] {
    case["ops"].as_array().expect("ops")
}

/// The first case of a file in which a call is as wanted, and the index of the call.
fn find(name: &str, wanted: impl Fn(&Value) -> bool) -> (Value, usize) {
    lines(name)
        .into_iter()
        .find_map(|case| {
            let at = ops(&case).iter().position(&wanted)?;
            Some((case, at))
        })
        .expect("such a call")
}

#[track_caller]
fn fails_at(case: &Value, op: usize, what: &str, change: impl FnOnce(&mut Value)) {
    assert_eq!(run(case).passed, 1, "unchanged");
    let failure = failure(case, change).expect("a failure");
    assert_eq!((failure.op, failure.what), (Some(op), what), "{failure}");
    assert_eq!(failure.case, case["name"].as_str().expect("name"));
}

/// Wrong results that could stand at a call.
fn wrong_results(op: &Value) -> Vec<Value> {
    let right = &op["result"];
    if right.get("VmSize").is_some() {
        let counters = ["VmSize", "VmLck", "VmData", "VmStk", "VmExec"];
        let wrong = |name: &&str| {
            let mut result = right.clone();
            result[*name] = json!(right[*name].as_i64().expect("a number") + 4);
            result
        };
        return counters.iter().map(wrong).collect();
    }
    let mut wrong = vec![
        json!({"errno": "EPROTO"}),
        json!({"signal": "SIGBUS", "code": "OBJERR"}),
    ];
    // Which byte is read needs contents.
    let is_byte = matches!(op["op"].as_str(), Some("read" | "file_read"));
    match right["ok"].as_i64() {
        Some(_) if is_byte => wrong.push(json!({"ok": 256})),
        Some(value) if right.get("vec").is_none() => wrong.push(json!({"ok": value + 1})),
        Some(_) => {}
        None => wrong.push(json!({"ok": 0})),
    }
    if right.get("outside").is_none() {
        wrong.push(json!({"outside": true}));
    }
    wrong
}

#[test]
fn a_wrong_result_or_layout_at_any_call_is_found_there() {
    let names = [
        "accounting",
        "errors",
        "files",
        "fork",
        "growsdown",
        "mremap",
        "scenarios",
        "touched",
    ];
    for name in names {
        let case = &lines(&format!("{name}.jsonl"))[0];
        assert_eq!(run(case).passed, 1, "{name}");
        for (i, op) in ops(case).iter().enumerate() {
            // A fork that failed would leave later calls without their process, which is unusable input.
            let fork = op["op"] == "fork";
            for wrong in wrong_results(op).into_iter().filter(|_| !fork) {
                let found = failure(case, |case| case["ops"][i]["result"] = wrong.clone());
                let found =
                    found.unwrap_or_else(|| panic!("{name}, op {i}: {op} passed with {wrong}"));
                assert_eq!(
                    (found.op, found.what),
                    (Some(i), "result"),
                    "{wrong}: {found}"
                );
            }
            let hash = if op["h"] == "811c9dc5" {
                "811c9dc4"
            } else {
                "811c9dc5"
            };
            let found = failure(case, |case| {
                case["ops"][i]["n"] = op.get("n").cloned().unwrap_or(json!(0));
                case["ops"][i]["h"] = json!(hash);
            });
            let empty_already = op.get("h").is_none()
                && ops(case)[..i]
                    .iter()
                    .rev()
                    .find_map(|op| op.get("h"))
                    .is_none_or(|h| h == hash);
            if !empty_already {
                let found =
                    found.unwrap_or_else(|| panic!("{name}, op {i}: {op} passed with {hash}"));
                assert_eq!((found.op, found.what), (Some(i), "layout"), "{found}");
            }
        }
    }
}

#[test]
fn a_change_that_is_not_recorded_is_found() {
    let (case, at) = find("layout.jsonl", |op| op.get("n").is_some());
    fails_at(&case, at, "layout", |case| {
        let op = case["ops"][at].as_object_mut().expect("an object");
        op.remove("n");
        op.remove("h");
    });
}

#[test]
fn a_wrong_number_of_mappings_is_found() {
    let (case, at) = find("layout.jsonl", |op| op.get("n").is_some());
    fails_at(&case, at, "layout", |case| case["ops"][at]["n"] = json!(99));
}

#[test]
fn a_fork_with_another_layout_or_number_is_found() {
    let (case, at) = find("fork.jsonl", |op| op["op"] == "fork");
    fails_at(&case, at, "layout", |case| {
        case["ops"][at]["h"] = json!("00000000");
    });
    fails_at(&case, at, "result", |case| {
        case["ops"][at]["result"]["ok"] = json!(77);
    });
}

/// A case of a file with a layout after each call, and a call after which something is mapped.
fn with_each(name: &str) -> (Value, usize) {
    lines(name)
        .into_iter()
        .find_map(|case| {
            let each = case.get("maps_after_each")?.as_array()?;
            let at = each
                .iter()
                .position(|maps| maps.as_array().is_some_and(|m| !m.is_empty()))?;
            Some((case, at))
        })
        .expect("such a case")
}

#[test]
fn a_wrong_layout_after_a_call_is_found_with_its_flags() {
    let (case, at) = with_each("merge_pairs.jsonl");
    let planted: [(&str, Value, &str); 6] = [
        ("start", json!(-4096), "layout"),
        ("end", json!(1), "layout"),
        ("perms", json!("rwxs"), "layout"),
        ("offset", json!(8192), "layout"),
        ("file", json!("f7"), "layout"),
        ("flags", json!("rd dd"), "VmFlags"),
    ];
    for (field, wrong, what) in planted {
        fails_at(&case, at, what, |case| {
            case["maps_after_each"][at][0][field] = wrong;
        });
    }
    fails_at(&case, at, "layout", |case| {
        case["maps_after_each"][at] = json!([]);
    });
    let shown = failure(&case, |case| {
        case["maps_after_each"][at][0]["flags"] = json!("rd dd");
    });
    let diff = shown.expect("a failure").diff;
    assert!(
        diff.contains("[rd dd]") && diff.contains("the kernel's"),
        "{diff}"
    );
}

#[test]
fn a_wrong_layout_at_the_end_is_found_in_parents_and_children() {
    let case = lines("fork.jsonl")
        .into_iter()
        .find(|case| {
            let children = case.get("child_maps").and_then(Value::as_object);
            children.is_some_and(|c| c.values().all(|maps| maps != &json!([])))
                && case["maps"] != json!([])
        })
        .expect("a case with children");
    assert_eq!(run(&case).passed, 1);
    let child = case["child_maps"]
        .as_object()
        .expect("children")
        .keys()
        .next()
        .expect("one")
        .clone();
    let flagged = failure(&case, |case| case["maps"][0]["flags"] = json!("rd dd")).expect("parent");
    assert_eq!((flagged.op, flagged.what), (None, "VmFlags"));
    let moved = failure(&case, |case| {
        case["child_maps"][&child][0]["end"] = json!(1);
    })
    .expect("child");
    assert_eq!((moved.op, moved.what), (None, "layout"));
    let empty = failure(&case, |case| case["child_maps"][&child] = json!([])).expect("child");
    assert_eq!((empty.op, empty.what), (None, "layout"));
}

#[test]
fn a_limit_that_is_not_the_recorded_one_is_found() {
    for (name, change) in [
        ("limits_map_count.jsonl", json!(null)),
        ("limits_map_count.jsonl", json!(1)),
    ] {
        let failed = lines(name)
            .iter()
            .any(|case| failure(case, |case| case["max_map_count"] = change.clone()).is_some());
        assert!(failed, "{name} with {change}");
    }
    for limit in ["as", "data", "memlock", "stack"] {
        let limited: Vec<Value> = lines("limits_rlimit.jsonl")
            .into_iter()
            .filter(|case| case["limits"].get(limit).is_some())
            .take(20)
            .collect();
        let without = |case: &mut Value| {
            case["limits"]
                .as_object_mut()
                .expect("an object")
                .remove(limit);
        };
        assert!(
            limited.iter().any(|case| failure(case, without).is_some()),
            "{limit}"
        );
    }
}

#[test]
fn a_space_of_another_kind_is_found() {
    for (name, kind) in [
        ("placement.jsonl", "closed_bottom_up"),
        ("placement.jsonl", "open"),
        ("placement_bottom_up.jsonl", "closed"),
    ] {
        let case = &lines(name)[0];
        assert!(
            failure(case, |case| case["space"] = json!(kind)).is_some(),
            "{name} as {kind}"
        );
    }
}

#[test]
fn guard_pages_excuse_nothing_where_none_can_be() {
    // MAPERR where something is mapped without the flag is no fault outcome that contents decide.
    let (case, at) = find("touched.jsonl", |op| {
        op["op"] == "write" && op["result"]["ok"] == 0
    });
    fails_at(&case, at, "result", |case| {
        case["ops"][at]["result"] = json!({"signal": "SIGSEGV", "code": "MAPERR"});
    });
    let (case, at) = find("flags.jsonl", |op| {
        op["op"] == "mlock" && op["result"]["ok"] == 0
    });
    fails_at(&case, at, "result", |case| {
        case["ops"][at]["result"] = json!({"errno": "ENOMEM"});
    });
}
