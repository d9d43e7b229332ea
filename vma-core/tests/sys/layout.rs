//! The layout as `/proc/self/smaps` shows it.

use std::fs::File;
use std::io::{BufRead as _, BufReader};

/// A mapping: its line of maps with single spaces, and the codes of its flags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) text: String,
    pub(crate) flags: String,
}

/// Objects behind shared anonymous memory have an inode each, that nobody can foresee.
const SHARED_ANONYMOUS: &str = "/dev/zero (deleted)";
/// The same for huge pages, on file systems of the kernel's own.
const HUGE_PAGES: &str = "/anon_hugepage (deleted)";

impl Line {
    /// Of a line of maps, and codes of flags.
    pub(crate) fn new<'a>(line: &str, flags: impl Iterator<Item = &'a str>) -> Self {
        let mut words: Vec<&str> = line.split_whitespace().collect();
        if line.ends_with(SHARED_ANONYMOUS) {
            words[4] = "*";
        }
        if line.ends_with(HUGE_PAGES) {
            (words[3], words[4]) = ("*", "*");
        }
        // Soft-dirty is set or not by how the kernel was built.
        let flags: Vec<&str> = flags.filter(|code| *code != "sd").collect();
        Line {
            text: words.join(" "),
            flags: flags.join(" "),
        }
    }
}

fn start_of(header: &str) -> u64 {
    let start = header.split('-').next().unwrap_or_default();
    u64::from_str_radix(start, 16).unwrap_or(0)
}

/// The mappings of this process that begin in `[from, to)`.
pub(crate) fn lines_between(from: u64, to: u64) -> Vec<Line> {
    let mut reader = BufReader::with_capacity(1 << 14, File::open("/proc/self/smaps").unwrap());
    let mut lines = Vec::new();
    let mut text = String::new();
    let mut header = String::new();
    while {
        text.clear();
        reader.read_line(&mut text).unwrap() > 0
    } {
        let line = text.trim_end();
        let first = line.split(' ').next().unwrap_or_default();
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if start_of(&header) >= from {
                lines.push(Line::new(&header, flags.split_whitespace()));
            }
        } else if !first.ends_with(':') {
            if start_of(line) >= to {
                break;
            }
            line.clone_into(&mut header);
        }
    }
    lines
}
