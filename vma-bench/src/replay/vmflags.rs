//! `VmFlags` of `/proc/PID/smaps` beside the flags of the replay.

use std::collections::BTreeSet;

use vma_core::VmaFlags;

use super::{compare::Shown, history::EverWritable, maps::FlagLine, stats::FlagCounts};

/// Flags that the comparison leaves out: soft-dirty isn't kept by the recording kernel, `gu` says that a guard page may be
/// inside, which is page contents; lock-on-fault isn't printed.
const LEFT_OUT: [&str; 3] = ["sd", "gu", "lf"];

/// How many differences are told in words.
const EXAMPLES: usize = 5;

/// Compares the flags of VMAs that have the same borders on both sides.
pub fn compare(
    recorded: &[FlagLine],
    replayed: &[Shown],
    history: &EverWritable,
    out: &mut FlagCounts,
) {
    for kernel in recorded.iter().filter(|k| k.line.name != "[vsyscall]") {
        let same = |s: &&Shown| s.line.start == kernel.line.start && s.line.end == kernel.line.end;
        let Some(ours) = replayed.iter().find(same) else {
            out.not_compared += 1;
            continue;
        };
        out.compared += 1;
        let have = letters(ours.flags);
        let want: BTreeSet<&str> = kernel
            .flags
            .iter()
            .map(String::as_str)
            .filter(|f| !LEFT_OUT.contains(f))
            .collect();
        let missing: Vec<&str> = want.difference(&have).copied().collect();
        let more: Vec<&str> = have.difference(&want).copied().collect();
        if missing.is_empty() && more.is_empty() {
            continue;
        }
        // mprotect gives ACCOUNT back for anonymous memory that was never written.
        let by_faults = missing.iter().chain(&more).all(|f| *f == "ac")
            && !kernel.line.may(b'w')
            && kernel.line.may(b'p')
            && history.contains_any(kernel.line.start, kernel.line.end);
        if by_faults {
            out.by_faults += 1;
            continue;
        }
        *out.different
            .entry(format!("-{} +{}", missing.join(" "), more.join(" ")))
            .or_default() += 1;
        if out.examples.len() < EXAMPLES {
            out.examples.push(format!(
                "{}: kernel {want:?}, replay {have:?}",
                kernel.line.text()
            ));
        }
    }
}

fn letters(flags: u64) -> BTreeSet<&'static str> {
    VmaFlags::from_bits_retain(flags)
        .codes()
        .filter(|code| !LEFT_OUT.contains(code))
        .collect()
}
