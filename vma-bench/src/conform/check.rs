//! Runs a case and checks every call: result, layout of all processes, structure, final layouts.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
};

use super::{
    call::{Answer, Run},
    format::{Call, Case, Op, Outcome},
    layout::Layout,
    report::{Compared, Failure},
};

/// What goes wrong in a case; where, the caller adds.
struct Difference {
    what: &'static str,
    expected: String,
    got: String,
    diff: String,
}

impl Difference {
    fn new(what: &'static str, expected: impl Into<String>, got: impl Into<String>) -> Self {
        Difference {
            what,
            expected: expected.into(),
            got: got.into(),
            diff: String::new(),
        }
    }
}

/// Runs a case. `None`: passed.
///
/// A panic of the library is a failure of the case and not the end of the run.
///
/// # Errors
/// The library can't be brought into the state that the case presupposes: in words.
pub(super) fn check(case: &Case, compared: &mut Compared) -> Result<Option<Failure>, String> {
    let mut run = Run::new(case)?;
    let mut before = BTreeMap::from([(0, Layout::default())]);
    for (index, op) in case.ops.iter().enumerate() {
        // What a panic leaves behind is only dropped.
        let step = catch_unwind(AssertUnwindSafe(|| {
            one_call(case, &mut run, &mut before, index, compared)
        }));
        let result = step.unwrap_or_else(|panic| Err(panicked(panic.as_ref())));
        if let Err(difference) = result {
            return Ok(Some(failure(case, Some((index, op)), difference)));
        }
    }
    let at_end = final_layouts(case, &before);
    Ok(at_end.map(|difference| failure(case, None, difference)))
}

fn failure(case: &Case, op: Option<(usize, &Op)>, difference: Difference) -> Failure {
    Failure {
        case: case.name.clone(),
        family: case.family.clone(),
        op: op.map(|(index, _)| index),
        process: op.map(|(_, op)| op.process),
        call: op.map(|(_, op)| op.text.clone()),
        what: difference.what,
        expected: difference.expected,
        got: difference.got,
        diff: difference.diff,
    }
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> Difference {
    let message = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("without a message");
    Difference::new("result", "a result", format!("a panic: {message}"))
}

fn one_call(
    case: &Case,
    run: &mut Run<'_>,
    before: &mut BTreeMap<u64, Layout>,
    index: usize,
    compared: &mut Compared,
) -> Result<(), Difference> {
    let op = &case.ops[index];
    let answer = run
        .call(index, op)
        .map_err(|e| Difference::new("result", op.outcome.to_string(), e))?;
    let after: BTreeMap<u64, Layout> = run
        .spaces
        .iter()
        .map(|(process, space)| (*process, Layout::of(space, case, &run.files)))
        .collect();
    let result = judge_result(op, &answer, compared)
        .and_then(|()| judge_layouts(case, index, before, &after))
        .and_then(|()| judge_structure(run));
    if let Err(mut difference) = result {
        if difference.diff.is_empty() {
            difference.diff = changed_by_call(op, before, &after);
        }
        return Err(difference);
    }
    *before = after;
    Ok(())
}

/// The process whose layout is recorded after a call.
fn concerned(op: &Op) -> u64 {
    match (&op.call, &op.outcome) {
        (Call::Fork { child }, Outcome::Ok(_)) => *child,
        _ => op.process,
    }
}

fn judge_result(op: &Op, answer: &Answer, compared: &mut Compared) -> Result<(), Difference> {
    let reads = matches!(op.call, Call::Read { .. } | Call::FileRead { .. });
    compared.byte_values += u64::from(reads && matches!(op.outcome, Outcome::Ok(_)));
    compared.mincore_vectors += u64::from(op.resident.is_some());
    if op.outcome != answer.outcome {
        let (expected, got) = (op.outcome.to_string(), answer.outcome.to_string());
        return Err(Difference::new("result", expected, got));
    }
    if op.resident.is_some() && op.resident != answer.resident {
        let show = |pages: &Option<String>| pages.clone().unwrap_or_default();
        let (expected, got) = (show(&op.resident), show(&answer.resident));
        return Err(Difference::new("resident pages", expected, got));
    }
    Ok(())
}

fn judge_layouts(
    case: &Case,
    index: usize,
    before: &BTreeMap<u64, Layout>,
    after: &BTreeMap<u64, Layout>,
) -> Result<(), Difference> {
    let op = &case.ops[index];
    let concerned = concerned(op);
    for (process, new) in after {
        let old = before.get(process);
        if *process == concerned {
            let recorded = case.after_each.as_ref();
            let recorded = recorded.and_then(|each| each[index].as_ref());
            if let Some(want) = recorded {
                equal(want, new, "after the call")?;
            }
            judge_mark(op, old, new)?;
        } else if old != Some(new) {
            let expected = format!("process {process} as before the call");
            let mut difference = Difference::new("layout", expected, "another layout");
            let nothing = Layout::default();
            let old = old.unwrap_or(&nothing);
            difference.diff = Layout::diff(("before the call", old), ("after the call", new));
            return Err(difference);
        }
    }
    Ok(())
}

/// Count and hash, or the layout from before where there are none.
fn judge_mark(op: &Op, old: Option<&Layout>, new: &Layout) -> Result<(), Difference> {
    let got = new.mark();
    let expected = match (op.layout, old) {
        (Some(mark), _) if mark == got => return Ok(()),
        (Some(mark), _) => mark.to_string(),
        (None, Some(old)) if old.same_shape(new) => return Ok(()),
        (None, _) => "the layout from before the call".to_owned(),
    };
    Err(Difference::new("layout", expected, got.to_string()))
}

/// Compares with a recorded layout, flags included.
fn equal(want: &Layout, got: &Layout, when: &str) -> Result<(), Difference> {
    if want == got {
        return Ok(());
    }
    let what = if want.same_shape(got) {
        "VmFlags"
    } else {
        "layout"
    };
    let mut difference = Difference::new(
        what,
        format!("{}, {when}", want.mark()),
        got.mark().to_string(),
    );
    difference.diff = Layout::diff(("the kernel's", want), ("the library's", got));
    Err(difference)
}

/// The library's own checker: order of mappings, cached totals against a recount.
fn judge_structure(run: &Run<'_>) -> Result<(), Difference> {
    run.spaces.values().try_for_each(|space| {
        space
            .check()
            .map_err(|e| Difference::new("structure", "a space without defects", e.to_string()))
    })
}

/// What the call did to the layout, to go with a difference that has no recorded layout to show.
fn changed_by_call(
    op: &Op,
    before: &BTreeMap<u64, Layout>,
    after: &BTreeMap<u64, Layout>,
) -> String {
    let nothing = Layout::default();
    let old = before.get(&op.process).unwrap_or(&nothing);
    let new = after.get(&concerned(op)).unwrap_or(&nothing);
    if old == new {
        format!("the layout, before the call and after it:\n{new}")
    } else {
        Layout::diff(("before the call", old), ("after the call", new))
    }
}

fn final_layouts(case: &Case, at_end: &BTreeMap<u64, Layout>) -> Option<Difference> {
    let nothing = Layout::default();
    case.at_end.iter().find_map(|(process, want)| {
        let got = at_end.get(process).unwrap_or(&nothing);
        let when = format!("process {process} at the end");
        equal(want, got, &when).err()
    })
}
