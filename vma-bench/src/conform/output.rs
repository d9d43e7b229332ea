//! What `conform` prints.

use std::{
    io::{self, Write},
    time::Duration,
};

use serde::Serialize;

use super::report::{Compared, Failure, FileReport};
use crate::report::{grouped, json_line};

/// Sums over files.
#[derive(Debug, Default, Serialize)]
struct Sums {
    cases: u64,
    passed: u64,
    failed: u64,
    calls: u64,
    #[serde(flatten)]
    compared: Compared,
}

impl Sums {
    fn of(reports: &[FileReport]) -> Sums {
        let mut sums = Sums::default();
        for report in reports {
            sums.cases += report.cases();
            sums.passed += report.passed;
            sums.failed += report.failed();
            sums.calls += report.calls;
            sums.compared += report.compared;
        }
        sums
    }
}

#[derive(Serialize)]
struct FileRow<'a> {
    row: &'static str,
    file: &'a str,
    #[serde(flatten)]
    sums: Sums,
}

#[derive(Serialize)]
struct FailureRow<'a> {
    row: &'static str,
    file: &'a str,
    #[serde(flatten)]
    failure: &'a Failure,
}

#[derive(Serialize)]
struct Summary {
    row: &'static str,
    holds: bool,
    files: usize,
    #[serde(flatten)]
    sums: Sums,
    seconds: f64,
}

/// A line per file, a line per failed case, a summary.
///
/// # Errors
/// Standard output can't be written.
pub(super) fn json(reports: &[FileReport], took: Duration) -> io::Result<()> {
    for report in reports {
        json_line(&FileRow {
            row: "file",
            file: &report.file,
            sums: Sums::of(std::slice::from_ref(report)),
        })?;
        for failure in &report.failures {
            json_line(&FailureRow {
                row: "failure",
                file: &report.file,
                failure,
            })?;
        }
    }
    let sums = Sums::of(reports);
    json_line(&Summary {
        row: "summary",
        holds: sums.failed == 0,
        files: reports.len(),
        sums,
        seconds: took.as_secs_f64(),
    })
}

/// A line per file, the sums, and the first failed case of each file.
///
/// # Errors
/// Standard output can't be written.
pub(super) fn text(reports: &[FileReport], took: Duration) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let names = reports.iter().map(|report| report.file.chars().count());
    let width = names.max().unwrap_or_default();
    let mut line = |name: &str, sums: &Sums| {
        writeln!(
            out,
            "{name:width$}  {:>5} passed {:>5} failed {:>7} calls {:>5} bytes {:>3} mincore vectors",
            grouped(sums.passed),
            grouped(sums.failed),
            grouped(sums.calls),
            grouped(sums.compared.byte_values),
            grouped(sums.compared.mincore_vectors)
        )
    };
    for report in reports {
        line(&report.file, &Sums::of(std::slice::from_ref(report)))?;
    }
    let sums = Sums::of(reports);
    line("all", &sums)?;
    writeln!(
        out,
        "\nAfter every call: result (byte values, resident pages and faults included), layout of each process, structure; VmFlags where \
         recorded. Nothing is skipped.\n{} of {} cases passed. {:.1} s.",
        grouped(sums.passed),
        grouped(sums.cases),
        took.as_secs_f64()
    )?;
    for report in reports {
        if let Some(first) = report.failures.first() {
            writeln!(
                out,
                "\n{}: the first of {} failed cases:\n{first}",
                report.file,
                report.failed()
            )?;
        }
    }
    Ok(())
}
