//! Replays the recorded memory calls of real programs on [`vma_core::AddressSpace`] and compares with the kernel's maps.
//!
//! The way of the data, each step a module: [`input`] reads files; [`strace`] parses the log and [`maps`] the maps;
//! [`load`] puts a case together; [`engine`] walks the log, with files and tasks in [`model`]; each address space is a
//! [`mm::Mm`], a [`space::Space`] with a journal, in which [`order`] finds the order of overlapping calls; [`compare`]
//! and [`vmflags`] judge; [`output`] prints.
//!
//! The library decides every result: addresses, errnos, merging. A recorded result is only compared. Where the library
//! disagrees, another order of overlapping calls is looked for; if none explains it, the recorded result is forced
//! so that the replay can go on, and counted.

pub mod bundled;
pub mod compare;
pub mod engine;
pub mod error;
pub mod history;
pub mod input;
pub mod load;
pub mod maps;
pub mod mm;
pub mod model;
pub mod op;
pub mod order;
pub mod output;
pub mod space;
pub mod stats;
pub mod strace;
pub mod vmflags;

use std::process::ExitCode;

use crate::cli::ReplayArgs;

/// Exit status of a replay that differs from the recorded maps.
pub const DIFFERENT: u8 = 1;
/// Exit status for input that can't be used.
pub const UNUSABLE: u8 = 2;

/// The command `replay`.
pub fn run(args: &ReplayArgs) -> ExitCode {
    let case = load::files(&args.trace, args.start.as_deref(), args.end.as_deref());
    let outcome = case
        .and_then(|case| engine::replay(&case.log, &case.recorded, case.path.clone(), &|_, _| {}));
    match outcome {
        Ok(outcome) => {
            let name = args.trace.display().to_string();
            let printed = if args.json {
                output::json(&name, &outcome)
            } else {
                output::text(&name, &outcome)
            };
            if let Err(e) = printed {
                // A reader that went away has seen enough.
                eprintln!("vma-bench: {e}");
            }
            output::status(&outcome)
        }
        Err(e) => {
            eprintln!("vma-bench: {e}");
            ExitCode::from(UNUSABLE)
        }
    }
}
