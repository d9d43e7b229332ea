//! The command line, as clap reads it.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::host::HostArgs;
use crate::paper::PaperArgs;
use crate::peers::PeersArgs;

/// Replays recorded programs on the library and measures it beside its peers.
///
/// Without a command: replays the bundled traces of thirteen programs and prints a summary.
/// Exit status: 0 everything equals the recorded maps, 1 something differs, 2 unusable input.
#[derive(Debug, Parser)]
#[command(version, about, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// What to do; nothing means: replay the bundled traces.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Options of the run without a command.
    #[command(flatten)]
    pub bundled: BundledArgs,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Replay the memory calls in a `strace -f` log and compare with the recorded maps.
    Replay(ReplayArgs),
    /// Run golden vectors, recorded calls of a kernel, and check every call.
    ///
    /// Exit status: 0 all cases passed, 1 a case failed, 2 unusable input.
    Conform(ConformArgs),
    /// Measure the tree and the address space beside what one would use instead.
    Peers(PeersArgs),
    /// Measure faults, accesses, unmapping and fork beside the running kernel.
    Host(HostArgs),
    /// Reproduce a published result, before and after in one run.
    Paper(PaperArgs),
}

/// Options of the run without a command.
#[derive(Debug, Clone, Args)]
pub struct BundledArgs {
    /// Print one JSON object per trace instead of the table.
    #[arg(long)]
    pub json: bool,
}

/// Options of `replay`.
#[derive(Debug, Clone, Args)]
pub struct ReplayArgs {
    /// The log: `strace -f -y -o TRACE`, plain or gzip.
    pub trace: PathBuf,
    /// `/proc/PID/maps` when the first execve was done [default: NAME.start.maps beside the log]
    #[arg(long, value_name = "FILE")]
    pub start: Option<PathBuf>,
    /// `/proc/PID/maps` of the first process at its end [default: NAME.end.maps beside the log]
    #[arg(long, value_name = "FILE")]
    pub end: Option<PathBuf>,
    /// Print JSON, one object per line.
    #[arg(long)]
    pub json: bool,
}

/// Options of `conform`.
#[derive(Debug, Clone, Args)]
pub struct ConformArgs {
    /// Files of vectors, plain or gzip, or folders of them (*.jsonl, *.jsonl.gz) [default: the bundled ones]
    #[arg(value_name = "PATH")]
    pub paths: Vec<PathBuf>,
    /// Only cases of this family.
    #[arg(long, value_name = "F")]
    pub family: Option<String>,
    /// Only the case with this name, or with this number in its name.
    #[arg(long, value_name = "N")]
    pub case: Option<String>,
    /// Print JSON, one object per line.
    #[arg(long)]
    pub json: bool,
}
