//! The cases, each a function that adds its rows to the report.

pub mod build;
pub mod edits;
pub mod gaps;
pub mod lookup;
pub mod space;
pub mod writer;

use super::contestants::Field;
use super::harness::Effort;
use super::report::Report;
use super::workload::Workload;

/// What a case needs to know.
#[derive(Debug, Clone, Copy)]
pub struct Context<'f> {
    /// The layout.
    pub workload: &'f Workload,
    /// The structures that hold it.
    pub field: &'f Field<'f>,
    /// How much is measured.
    pub effort: Effort,
}

/// `1k` for 1000, and so on: the column of a size.
pub fn size_name(count: usize) -> String {
    match count {
        0..1_000 => count.to_string(),
        1_000..1_000_000 => format!("{}k", count / 1_000),
        _ => format!("{}M", count / 1_000_000),
    }
}

/// All cases that are run for every size of layout, reading before editing: bulk-built trees stay as built.
pub fn all(context: Context<'_>, report: &mut Report) {
    build::memory(context, report);
    lookup::run(context, report);
    edits::run(context, report);
    gaps::run(context, report);
    space::run(context, report);
    writer::run(context, report);
}
