//! `vma-bench paper`: results that others have published, before and after in one run.

pub mod memory;
pub mod r1;
pub mod r2;
pub mod r3;
pub mod r4;

use std::error::Error;
use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::ValueEnum as _;
use indicatif::{ProgressBar, ProgressStyle};

use crate::peers::report::Report;

/// A published result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Published {
    /// Zapping under the read lock in munmap (Yang Shi, 2018; Linux 4.20), and after the lock.
    #[value(name = "R1", alias = "r1")]
    R1,
    /// Fork that doesn't sleep on one lock while it holds another (Alexei Starovoitov, 2026; proposed).
    #[value(name = "R2", alias = "r2")]
    R2,
    /// Looking at objects under a guard, without a reference (Stephen Brennan, 2021; Linux 5.14).
    #[value(name = "R3", alias = "r3")]
    R3,
    /// A space's own tree updated outside the lock of a file's reverse index (Yu Ma, 2023; Linux 6.6).
    #[value(name = "R4", alias = "r4")]
    R4,
}

/// Options of `paper`.
#[derive(Debug, Clone, clap::Args)]
pub struct PaperArgs {
    /// Which result [default: all of them]
    #[arg(value_name = "RESULT")]
    pub result: Option<Published>,
    /// Fewer rounds, and less memory: unmapping up to 1 GiB instead of 8, a busy parent of up to 512 MiB instead of 2 GiB.
    #[arg(long)]
    pub quick: bool,
    /// One JSON object per figure and line.
    #[arg(long)]
    pub json: bool,
    /// Nothing larger than this, in bytes.
    #[arg(long, value_name = "BYTES", hide = true)]
    pub max_bytes: Option<u64>,
    /// No file with more mappings than this.
    #[arg(long, value_name = "N", hide = true, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_mappings: Option<u32>,
    /// No more rounds than this of what is measured in rounds.
    #[arg(long, value_name = "N", hide = true, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_rounds: Option<u32>,
}

/// Measures, and prints it. Fails if a space or the kernel refuses something that was said to fit, or the output can't be written.
pub fn run(args: &PaperArgs) -> ExitCode {
    let mut report = Report::new("paper", args.json);
    let asked = match &args.result {
        Some(result) => std::slice::from_ref(result),
        None => Published::value_variants(),
    };
    let measured = asked
        .iter()
        .try_for_each(|result| measure(*result, args, &mut report));
    let mut err = io::stderr();
    if let Err(error) = &measured {
        let _ = writeln!(err, "vma-bench: {error}");
    }
    if let Err(error) = report.finish() {
        let _ = writeln!(err, "vma-bench: writing the figures: {error}");
        return ExitCode::FAILURE;
    }
    match measured {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn measure(result: Published, args: &PaperArgs, report: &mut Report) -> Result<(), Box<dyn Error>> {
    match result {
        Published::R1 => r1::run(args, report)?,
        Published::R2 => r2::run(args, report)?,
        Published::R3 => r3::run(args, report)?,
        Published::R4 => r4::run(args, report)?,
    }
    Ok(())
}

/// A line that isn't a figure.
fn say(json: bool, note: &str) {
    // Nothing to do about a closed output: the report says so at the end.
    let _ = if json {
        writeln!(io::stderr(), "{note}")
    } else {
        writeln!(io::stdout(), "{note}")
    };
}

fn progress(work: u64) -> ProgressBar {
    let bar = ProgressBar::new(work);
    if let Ok(style) = ProgressStyle::with_template("{msg:26} [{bar:40}] {percent:>3} % {elapsed}")
    {
        bar.set_style(style);
    }
    bar
}
