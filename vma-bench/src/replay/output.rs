//! What a replay prints.

use std::{
    collections::BTreeMap,
    fmt::Display,
    io::{self, Write},
    process::ExitCode,
};

use comfy_table::{CellAlignment, Table, presets::NOTHING};
use serde::Serialize;

use super::{
    DIFFERENT,
    stats::{KindCounts, Outcome, Stats},
};
use crate::report::{grouped, json_line};

/// The exit status of an outcome.
pub fn status(outcome: &Outcome) -> ExitCode {
    if outcome.difference.is_some() {
        ExitCode::from(DIFFERENT)
    } else {
        ExitCode::SUCCESS
    }
}

#[derive(Serialize)]
struct CallLine<'a> {
    row: &'static str,
    trace: &'a str,
    call: &'a str,
    #[serde(flatten)]
    counts: KindCounts,
}

#[derive(Serialize)]
struct Line<'a, T> {
    row: &'static str,
    trace: &'a str,
    #[serde(flatten)]
    value: &'a T,
}

#[derive(Serialize)]
struct Summary<'a> {
    row: &'static str,
    trace: &'a str,
    holds: bool,
    calls_per_second: f64,
    total: KindCounts,
    #[serde(flatten)]
    stats: &'a Stats,
}

/// Prints an outcome as JSON: a line per kind of call, a line per forced result, the difference, the summary.
///
/// # Errors
/// Standard output can't be written.
pub fn json(trace: &str, outcome: &Outcome) -> io::Result<()> {
    for (call, counts) in &outcome.stats.kinds {
        json_line(&CallLine {
            row: "call",
            trace,
            call,
            counts: *counts,
        })?;
    }
    for forced in &outcome.stats.forced {
        json_line(&Line {
            row: "forced",
            trace,
            value: forced,
        })?;
    }
    if let Some(difference) = &outcome.difference {
        json_line(&Line {
            row: "difference",
            trace,
            value: difference,
        })?;
    }
    summary_json(trace, outcome)
}

/// Prints the summary line of an outcome as JSON.
///
/// # Errors
/// Standard output can't be written.
pub fn summary_json(trace: &str, outcome: &Outcome) -> io::Result<()> {
    let stats = &outcome.stats;
    json_line(&Summary {
        row: "summary",
        trace,
        holds: outcome.difference.is_none(),
        calls_per_second: stats.rate().round(),
        total: stats.total(),
        stats,
    })
}

/// Prints an outcome for people.
///
/// # Errors
/// Standard output can't be written.
pub fn text(trace: &str, outcome: &Outcome) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let s = &outcome.stats;
    writeln!(
        out,
        "{trace}: {} lines, {} processes, {} more threads\n",
        grouped(s.lines),
        grouped(s.processes),
        grouped(s.threads_more)
    )?;
    writeln!(out, "{}\n", kinds_table(s))?;
    layouts(&mut out, s)?;
    remarks(&mut out, s)?;
    for f in &s.forced {
        writeln!(
            out,
            "  forced: line {}, task {}: {}: recorded {}, the library gave {}",
            f.line, f.pid, f.call, f.recorded, f.replayed
        )?;
    }
    match &outcome.difference {
        None => writeln!(
            out,
            "equal to the recorded maps at {} of {} snapshots",
            s.equal, s.snapshots
        ),
        Some(d) => {
            writeln!(
                out,
                "DIFFERENT at {} of {} snapshots; the first:",
                s.snapshots - s.equal,
                s.snapshots
            )?;
            writeln!(
                out,
                "process {}, moment '{}', line {} of the log: {}",
                d.pid, d.moment, d.line, d.what
            )?;
            writeln!(out, "--- the kernel's map\n+++ the replay's\n{}", d.diff)
        }
    }
}

fn kinds_table(s: &Stats) -> Table {
    let mut table = new_table(&[
        "call",
        "calls",
        "failed",
        "predicted",
        "reordered",
        "forced",
        "not compared",
    ]);
    let mut row = |name: &str, k: &KindCounts| {
        let counts = [
            k.calls,
            k.failed,
            k.predicted,
            k.reordered,
            k.forced,
            k.unchecked,
        ];
        table.add_row([name.to_owned()].into_iter().chain(counts.map(grouped)));
    };
    for (name, counts) in &s.kinds {
        row(name, counts);
    }
    row("all", &s.total());
    right_align(&mut table);
    table
}

fn layouts(out: &mut impl Write, s: &Stats) -> io::Result<()> {
    let line = |out: &mut dyn Write, what: &str, value: String| writeln!(out, "{what:<24}{value}");
    line(
        out,
        "addresses chosen",
        format!(
            "{} by the kernel, {} of them alike by the library",
            grouped(s.placed),
            grouped(s.placed_predicted)
        ),
    )?;
    line(
        out,
        "snapshots",
        format!(
            "{} compared, {} equal page for page ({} pages), {} of these VMA by VMA without exception",
            grouped(s.snapshots),
            grouped(s.equal),
            grouped(s.pages),
            grouped(s.equal_by_vma)
        ),
    )?;
    line(
        out,
        "borders between VMAs",
        format!(
            "{} on both sides; only by fault history: {} in the kernel, {} in the replay",
            grouped(s.borders),
            grouped(s.kernel_only),
            grouped(s.replay_only)
        ),
    )?;
    for border in &s.by_faults {
        writeln!(out, "  {border}")?;
    }
    if s.kernel_only + s.replay_only > s.by_faults.len() as u64 {
        writeln!(out, "  ...")?;
    }
    if let Some(f) = &s.vm_flags {
        let different: u64 = f.different.values().sum();
        line(
            out,
            "VmFlags at the end",
            format!(
                "{} VMAs compared, {} by faults, {} different, {} not comparable",
                f.compared, f.by_faults, different, f.not_compared
            ),
        )?;
        for (what, n) in &f.different {
            writeln!(out, "  {what}: {n}")?;
        }
        for example in &f.examples {
            writeln!(out, "  {example}")?;
        }
    }
    line(
        out,
        "VMAs",
        format!(
            "{} at the end, {} at most; {} splits, {} merges",
            grouped(s.vmas),
            grouped(s.most_vmas),
            grouped(s.splits),
            grouped(s.merges)
        ),
    )?;
    let rate = format!(
        "{:.0} calls per second inside the library ({} calls)",
        s.rate(),
        grouped(s.timed_calls)
    );
    line(out, "speed", rate)
}

/// What isn't in the log or wasn't looked at: nothing of it is passed over in silence.
fn remarks(out: &mut impl Write, s: &Stats) -> io::Result<()> {
    let remark = |out: &mut dyn Write, n: u64, what: &str| {
        if n > 0 {
            writeln!(out, "  {}: {what}", grouped(n))
        } else {
            Ok(())
        }
    };
    remark(
        out,
        s.stack_growths,
        &format!(
            "stacks found lower than calls left them, by {} pages in all",
            grouped(s.stack_pages)
        ),
    )?;
    remark(
        out,
        s.deleted_unlogged,
        "names deleted by calls that the log doesn't have",
    )?;
    remark(
        out,
        s.fds_unlogged,
        "descriptors whose opening the log doesn't have",
    )?;
    listed(
        out,
        "calls that never came back, taken as",
        &s.never_returned,
    )?;
    listed(out, "not followed", &s.not_followed)?;
    listed(out, "lines passed over", &s.skipped)?;
    listed(
        out,
        "calls that have nothing to do with memory",
        &s.unknown_calls,
    )
}

fn listed<K: Display>(
    out: &mut impl Write,
    what: &str,
    counts: &BTreeMap<K, u64>,
) -> io::Result<()> {
    for (key, n) in counts {
        writeln!(out, "  {}: {what}: {key}", grouped(*n))?;
    }
    Ok(())
}

/// A table without lines, its first column left-aligned.
fn new_table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(header.iter().copied());
    table
}

fn right_align(table: &mut Table) {
    table
        .column_iter_mut()
        .skip(1)
        .for_each(|column| column.set_cell_alignment(CellAlignment::Right));
}

/// The summary of many traces.
pub fn summary_table(outcomes: &[(&str, Outcome)]) -> Table {
    let mut table = new_table(&[
        "trace",
        "calls",
        "failed",
        "predicted",
        "reordered",
        "forced",
        "snapshots",
        "equal",
        "borders",
        "by faults",
        "VMAs",
        "splits",
        "merges",
        "calls/s",
        "result",
    ]);
    for (name, outcome) in outcomes {
        let (s, k) = (&outcome.stats, outcome.stats.total());
        let counts = [
            k.calls,
            k.failed,
            k.predicted,
            k.reordered,
            k.forced,
            s.snapshots,
            s.equal,
            s.borders,
            s.kernel_only + s.replay_only,
            s.vmas,
            s.splits,
            s.merges,
        ];
        let result = if outcome.difference.is_none() {
            "equal"
        } else {
            "DIFFERENT"
        };
        let tail = [format!("{:.0}", s.rate()), result.to_owned()];
        table.add_row(
            [(*name).to_owned()]
                .into_iter()
                .chain(counts.map(grouped))
                .chain(tail),
        );
    }
    right_align(&mut table);
    table
}
