//! The thirteen recorded programs that come with the tool.

use std::{
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
    time::Instant,
};

use indicatif::{ProgressBar, ProgressStyle};

use super::{
    DIFFERENT, UNUSABLE, engine,
    error::ReplayError,
    input::text_of,
    load::{self, Text, Texts},
    output,
    stats::Outcome,
};
use crate::cli::BundledArgs;

/// A recorded program: its files, compressed.
#[derive(Debug)]
pub struct Bundled {
    /// Its name.
    pub name: &'static str,
    trace: &'static [u8],
    start: &'static [u8],
    end: &'static [u8],
    flags: &'static [u8],
    more: Option<&'static [u8]>,
}

macro_rules! file {
    ($name:literal, $kind:literal) => {
        include_bytes!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/data/traces/",
            $name,
            ".",
            $kind,
            ".gz"
        ))
    };
}

macro_rules! bundled {
    ($name:literal, more) => {
        bundled!($name, with Some(file!($name, "more.maps")))
    };
    ($name:literal, with $more:expr) => {
        Bundled {
            name: $name,
            trace: file!($name, "strace"),
            start: file!($name, "start.maps"),
            end: file!($name, "end.maps"),
            flags: file!($name, "end.smaps"),
            more: $more,
        }
    };
}

/// All of them.
pub static BUNDLED: [Bundled; 13] = [
    bundled!("bash", more),
    bundled!("cargo", more),
    bundled!("gcc", more),
    bundled!("git", more),
    bundled!("java", with None),
    bundled!("jemalloc", with None),
    bundled!("kinds", more),
    bundled!("mtmap", with None),
    bundled!("node", more),
    bundled!("python", more),
    bundled!("randops", more),
    bundled!("sqlite", more),
    bundled!("stress-mmap", more),
];

impl Bundled {
    /// The files as text.
    ///
    /// # Errors
    /// A file is damaged.
    pub fn texts(&self) -> Result<Texts, ReplayError> {
        let text = |kind: &str, bytes: &[u8]| -> Result<Text, ReplayError> {
            let path = PathBuf::from(format!("{}.{kind}", self.name));
            let text = text_of(&path, bytes.to_vec())?;
            Ok(Text { path, text })
        };
        Ok(Texts {
            trace: text("strace", self.trace)?,
            start: text("start.maps", self.start)?,
            end: Some(text("end.maps", self.end)?),
            flags: Some(text("end.smaps", self.flags)?),
            more: self.more.map(|more| text("more.maps", more)).transpose()?,
        })
    }

    /// Replays the program; `progress` gets the lines done.
    ///
    /// # Errors
    /// As [`load::case`] and [`engine::replay`].
    pub fn replay(&self, progress: engine::Progress<'_>) -> Result<Outcome, ReplayError> {
        let case = load::case(&self.texts()?)?;
        engine::replay(&case.log, &case.recorded, case.path.clone(), progress)
    }
}

/// The run without a command.
pub fn run(args: &BundledArgs) -> ExitCode {
    let began = Instant::now();
    // Drawn only where standard error is a terminal.
    let bar = ProgressBar::new(BUNDLED.len() as u64 * 100);
    if let Ok(style) = ProgressStyle::with_template("{msg:12} [{bar:40}] {percent:>3} % {elapsed}")
    {
        bar.set_style(style);
    }
    let mut outcomes = Vec::new();
    for (i, trace) in BUNDLED.iter().enumerate() {
        bar.set_message(trace.name);
        let base = i as u64 * 100;
        bar.set_position(base);
        match trace.replay(&|done, all| bar.set_position(base + done * 100 / all.max(1))) {
            Ok(outcome) => outcomes.push((trace.name, outcome)),
            Err(e) => {
                bar.finish_and_clear();
                eprintln!("vma-bench: {e}");
                return ExitCode::from(UNUSABLE);
            }
        }
    }
    bar.finish_and_clear();
    if let Err(e) = print(args, &outcomes, began) {
        eprintln!("vma-bench: {e}");
    }
    if outcomes.iter().any(|(_, o)| o.difference.is_some()) {
        ExitCode::from(DIFFERENT)
    } else {
        ExitCode::SUCCESS
    }
}

fn print(args: &BundledArgs, outcomes: &[(&str, Outcome)], began: Instant) -> io::Result<()> {
    if args.json {
        return outcomes
            .iter()
            .try_for_each(|(name, outcome)| output::summary_json(name, outcome));
    }
    let mut out = io::stdout().lock();
    writeln!(out, "{}\n", output::summary_table(outcomes))?;
    let snapshots: u64 = outcomes.iter().map(|(_, o)| o.stats.snapshots).sum();
    let equal: u64 = outcomes.iter().map(|(_, o)| o.stats.equal).sum();
    writeln!(
        out,
        "{equal} of {snapshots} layouts equal the kernel's page for page; 'by faults': borders between VMAs that only page \
         faults, which no log shows, decide about.\n`vma-bench replay TRACE` tells more about one. {:.1} s.",
        began.elapsed().as_secs_f64()
    )?;
    for (name, outcome) in outcomes {
        if let Some(d) = &outcome.difference {
            writeln!(
                out,
                "\n{name}: process {}, '{}', line {}: {}\n{}",
                d.pid, d.moment, d.line, d.what, d.diff
            )?;
        }
    }
    Ok(())
}
