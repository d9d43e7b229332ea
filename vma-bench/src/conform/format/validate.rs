//! What has to hold between the fields of a case, so that the run can rely on it.

use std::collections::BTreeSet;

use super::{
    PAGE, TASK_SIZE,
    case::Case,
    op::{Call, Op},
    result::Outcome,
};

/// Arenas are aligned to this, in bytes.
const ARENA_ALIGNMENT: u64 = 1 << 30;

/// Checks a case.
///
/// # Errors
/// What doesn't hold.
pub(super) fn validate(case: &Case) -> Result<(), String> {
    arena(case)?;
    let mut names = Names::new(case)?;
    let recorded = case.after_each.as_ref();
    if let Some(after) = recorded.filter(|after| after.len() != case.ops.len()) {
        return Err(format!(
            "`maps_after_each` has {} layouts for {} calls",
            after.len(),
            case.ops.len()
        ));
    }
    for (i, op) in case.ops.iter().enumerate() {
        names.step(op).map_err(|e| format!("op {i}: {e}"))?;
        if matches!(op.call, Call::Brk { .. }) && case.brk_start.is_none() {
            return Err(format!("op {i}: brk in a case without `brk_start`"));
        }
        let ended = matches!(op.call, Call::Exit {});
        if recorded.is_some_and(|after| after[i].is_none() != ended) {
            return Err(format!(
                "op {i}: `maps_after_each` is null for exit, and for nothing else"
            ));
        }
    }
    let with_layout: BTreeSet<u64> = case.at_end.keys().copied().collect();
    // Process 0 has a layout, an empty one, even if it ended.
    names.living.insert(0);
    if names.living != with_layout {
        return Err(format!(
            "processes {:?} live at the end, there are maps of {with_layout:?}",
            names.living
        ));
    }
    Ok(())
}

fn arena(case: &Case) -> Result<(), String> {
    let Case { start, len, .. } = *case;
    let fits = start.checked_add(len).is_some_and(|end| end <= TASK_SIZE);
    let aligned = start.is_multiple_of(ARENA_ALIGNMENT) && len.is_multiple_of(PAGE);
    if !fits || !aligned || start == 0 || len == 0 {
        return Err(format!(
            "`arena`: {len} bytes at {start:#x} are empty, unaligned or beyond the address space"
        ));
    }
    match case.brk_start {
        Some(brk) if brk > len => Err(format!("`brk_start` {brk} is outside the arena")),
        _ => Ok(()),
    }
}

/// Processes and files by the names that calls use.
struct Names<'a> {
    living: BTreeSet<u64>,
    processes: BTreeSet<u64>,
    files: BTreeSet<&'a str>,
}

impl<'a> Names<'a> {
    fn new(case: &'a Case) -> Result<Self, String> {
        let mut files = BTreeSet::new();
        for file in &case.files {
            if !files.insert(file.id.as_str()) {
                return Err(format!("`files` has {} twice", file.id));
            }
        }
        Ok(Names {
            living: BTreeSet::from([0]),
            processes: BTreeSet::from([0]),
            files,
        })
    }

    fn step(&mut self, op: &'a Op) -> Result<(), String> {
        let p = op.process;
        if !self.living.contains(&p) {
            return Err(format!("there is no process {p}"));
        }
        if let Some(file) = op.call.file().filter(|file| !self.files.contains(file)) {
            return Err(format!("there is no file {file}"));
        }
        match &op.call {
            Call::Fork { child } => {
                if !self.processes.insert(*child) {
                    return Err(format!("there was a process {child} already"));
                }
                if matches!(op.outcome, Outcome::Ok(_)) {
                    self.living.insert(*child);
                }
            }
            Call::Exit {} => {
                self.living.remove(&p);
            }
            Call::DupFd { new, .. } | Call::Reopen { new, .. } => {
                // Processes have tables of descriptors of their own; the format keeps to one.
                if self.processes.len() > 1 {
                    return Err("a descriptor is made after a fork".to_owned());
                }
                if !self.files.insert(new) {
                    return Err(format!("there is a file {new} already"));
                }
            }
            _ => {}
        }
        Ok(())
    }
}
