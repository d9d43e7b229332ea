//! `vma-bench`: replays recorded programs on the library and measures it beside its peers.
#![deny(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use vma_bench::{
    cli::{Cli, Command},
    conform, host, paper, peers, replay,
};

fn main() -> ExitCode {
    let cli = Cli::parse();
    match cli.command {
        None => replay::bundled::run(&cli.bundled),
        Some(Command::Replay(args)) => replay::run(&args),
        Some(Command::Conform(args)) => conform::run(&args),
        Some(Command::Peers(args)) => peers::run(&args),
        Some(Command::Host(args)) => host::run(&args),
        Some(Command::Paper(args)) => paper::run(&args),
    }
}
