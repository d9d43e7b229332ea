//! Runs golden vectors, recorded calls of a Linux 6.18 kernel, on [`vma_core::AddressSpace`] and checks every call.
//!
//! The way of the data, each step a module: [`input`] finds and reads the files; `format` is their format, in types;
//! `setup` builds what a case presupposes; `call` makes one call; `check` judges it, with `layout`; [`report`] is what came
//! out, and `output` prints it.
//!
//! Checked after every call: its result (value, errno, signal, counters), the layout of every process (count and hash, or
//! that it is as before), the layout with flags where it is recorded, the library's own checker. At the end: the layouts
//! with flags, the values of bytes, the pages that mincore finds. Nothing is skipped.

pub mod bundled;
mod call;
mod check;
mod files;
mod format;
pub mod input;
mod layout;
mod output;
pub mod report;
mod setup;

use std::{process::ExitCode, time::Instant};

use indicatif::{ProgressBar, ProgressStyle};

use self::{
    input::{Filter, InputError, Suite},
    report::FileReport,
};
use crate::cli::ConformArgs;

/// Exit status when a case failed.
pub const FAILED: u8 = 1;
/// Exit status for input that can't be used.
pub const UNUSABLE: u8 = 2;

/// Runs the cases of a file; `tick` is called after each.
///
/// # Errors
/// The library can't be brought into the state that a case presupposes; with the case's line.
pub fn run_suite(suite: &Suite, tick: &dyn Fn()) -> Result<FileReport, InputError> {
    let mut report = FileReport {
        file: suite.path.display().to_string(),
        ..FileReport::default()
    };
    for (line, case) in &suite.cases {
        report.calls += case.ops.len() as u64;
        let failure = check::check(case, &mut report.compared)
            .map_err(|why| InputError::line(&suite.path, *line, why))?;
        match failure {
            None => report.passed += 1,
            Some(failure) => report.failures.push(failure),
        }
        tick();
    }
    Ok(report)
}

/// The command `conform`.
pub fn run(args: &ConformArgs) -> ExitCode {
    let began = Instant::now();
    let reports = match reports(args) {
        Ok(reports) => reports,
        Err(why) => {
            eprintln!("vma-bench: {why}");
            return ExitCode::from(UNUSABLE);
        }
    };
    let printed = if args.json {
        output::json(&reports, began.elapsed())
    } else {
        output::text(&reports, began.elapsed())
    };
    if let Err(e) = printed {
        // A reader that went away has seen enough.
        eprintln!("vma-bench: {e}");
    }
    if reports.iter().any(|report| report.failed() > 0) {
        ExitCode::from(FAILED)
    } else {
        ExitCode::SUCCESS
    }
}

/// Reads everything before anything is run, so that unusable input shows at once.
fn reports(args: &ConformArgs) -> Result<Vec<FileReport>, String> {
    let mut suites = input::load(&args.paths).map_err(|e| e.to_string())?;
    let wanted = Filter {
        family: args.family.as_deref(),
        case: args.case.as_deref(),
    };
    for suite in &mut suites {
        suite.retain(wanted);
    }
    suites.retain(|suite| !suite.is_empty());
    let cases: usize = suites.iter().map(Suite::len).sum();
    if cases == 0 {
        return Err("no case has this family and name".to_owned());
    }
    // Drawn only where standard error is a terminal.
    let bar = ProgressBar::new(cases as u64);
    if let Ok(style) = ProgressStyle::with_template("{msg:26} [{bar:40}] {pos}/{len} {elapsed}") {
        bar.set_style(style);
    }
    let run = |suite: &Suite| {
        let name = suite.path.file_name().unwrap_or_default();
        bar.set_message(name.to_string_lossy().into_owned());
        run_suite(suite, &|| bar.inc(1)).map_err(|e| e.to_string())
    };
    let reports = suites.iter().map(run).collect();
    bar.finish_and_clear();
    reports
}
