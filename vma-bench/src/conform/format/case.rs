//! A case: what is given, the calls, and the layouts that they lead to.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{
    fields::Fields,
    op::{Mode, Op},
    validate::validate,
    word::hex,
};
use crate::conform::layout::Layout;

/// One line of a file of vectors.
#[derive(Debug, Clone)]
pub(in crate::conform) struct Case {
    /// Its name, unique within the file.
    pub name: String,
    /// Its family.
    pub family: String,
    /// First address of the arena.
    pub start: u64,
    /// Bytes of the arena.
    pub len: u64,
    /// What lies around the arena.
    pub space: SpaceKind,
    /// The limit on mappings, of the arena alone.
    pub max_map_count: Option<u64>,
    /// Resource limits.
    pub limits: Limits,
    /// Start of the heap, relative to the arena.
    pub brk_start: Option<u64>,
    /// The files, before the first call.
    pub files: Vec<FileSpec>,
    /// The calls.
    pub ops: Vec<Op>,
    /// Final layout of every process that lives at the end.
    pub at_end: BTreeMap<u64, Layout>,
    /// Layout of the process in question after each call (`None`: it ended), where that is recorded.
    pub after_each: Option<Vec<Option<Layout>>>,
}

/// What lies around the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::conform) enum SpaceKind {
    /// Free space, and more of it elsewhere, which the kernel prefers.
    Open,
    /// Mappings, everywhere; the search goes top down.
    Closed,
    /// Mappings, everywhere; the search goes bottom up.
    ClosedBottomUp,
}

/// Resource limits in bytes; `None`: no limit (stack: 8 MiB).
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::conform) struct Limits {
    /// `RLIMIT_AS`, of the arena alone.
    #[serde(rename = "as")]
    pub address_space: Option<u64>,
    /// `RLIMIT_DATA`, of the arena alone.
    pub data: Option<u64>,
    /// `RLIMIT_MEMLOCK`; the process then lacks `CAP_IPC_LOCK`.
    pub memlock: Option<u64>,
    /// `RLIMIT_STACK`.
    pub stack: Option<u64>,
}

/// A memory file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::conform) struct FileSpec {
    /// `f` and a number.
    pub id: String,
    /// Bytes.
    pub len: u64,
    /// How the first descriptor is open.
    pub mode: Mode,
    /// Made with `MFD_ALLOW_SEALING`.
    #[serde(default)]
    pub sealable: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCase {
    name: String,
    family: String,
    page_size: u64,
    arena: Arena,
    space: SpaceKind,
    max_map_count: Option<u64>,
    limits: Limits,
    brk_start: Option<u64>,
    files: Vec<FileSpec>,
    ops: Vec<Fields>,
    maps: Layout,
    child_maps: Option<BTreeMap<u64, Layout>>,
    maps_after_each: Option<Vec<Option<Layout>>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Arena {
    start: String,
    len: u64,
}

impl Case {
    /// Reads one line.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub(in crate::conform) fn parse(line: &str) -> Result<Case, String> {
        let raw: RawCase = serde_json::from_str(line).map_err(|e| at_column(&e))?;
        if raw.page_size != super::PAGE {
            return Err(format!(
                "`page_size` is {}, not {}",
                raw.page_size,
                super::PAGE
            ));
        }
        let start = hex(&raw.arena.start)
            .ok_or_else(|| format!("`arena.start`: {:?} isn't 0x...", raw.arena.start))?;
        let numbered = |(i, fields)| Op::try_from(fields).map_err(|e| format!("op {i}: {e}"));
        let ops = raw.ops.into_iter().enumerate().map(numbered);
        let mut at_end = raw.child_maps.unwrap_or_default();
        if at_end.insert(0, raw.maps).is_some() {
            return Err("`child_maps` has process 0, whose layout is in `maps`".to_owned());
        }
        let case = Case {
            name: raw.name,
            family: raw.family,
            start,
            len: raw.arena.len,
            space: raw.space,
            max_map_count: raw.max_map_count,
            limits: raw.limits,
            brk_start: raw.brk_start,
            files: raw.files,
            ops: ops.collect::<Result<_, _>>()?,
            at_end,
            after_each: raw.maps_after_each,
        };
        validate(&case)?;
        Ok(case)
    }

    /// Whether the case is the one that `wanted` names: its whole name, or what follows the family in it, as text or
    /// as a number (`layout-00007`, `00007`, `7`).
    pub(in crate::conform) fn is_named(&self, wanted: &str) -> bool {
        let short = self
            .name
            .strip_prefix(&self.family)
            .and_then(|rest| rest.strip_prefix('-'))
            .unwrap_or(&self.name);
        let number = |text: &str| text.parse::<u64>().ok();
        self.name == wanted
            || short == wanted
            || number(short).is_some_and(|n| number(wanted) == Some(n))
    }
}

/// The message of an error in a line, with the column. (`serde_json` counts lines of its own, always 1 here.)
fn at_column(e: &serde_json::Error) -> String {
    let text = e.to_string();
    let tail = format!(" at line {} column {}", e.line(), e.column());
    match text.strip_suffix(&tail) {
        Some(what) => format!("column {}: {what}", e.column()),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_found_by_name_by_its_tail_and_by_number() {
        let case = |name: &str| Case {
            name: name.to_owned(),
            family: "merge_pairs".to_owned(),
            start: 0,
            len: 0,
            space: SpaceKind::Open,
            max_map_count: None,
            limits: Limits::default(),
            brk_start: None,
            files: Vec::new(),
            ops: Vec::new(),
            at_end: BTreeMap::new(),
            after_each: None,
        };
        let numbered = case("merge_pairs-00017");
        for wanted in ["merge_pairs-00017", "00017", "17"] {
            assert!(numbered.is_named(wanted), "{wanted}");
        }
        for wanted in ["1", "7", "pairs-00017", "", "merge_pairs"] {
            assert!(!numbered.is_named(wanted), "{wanted}");
        }
        assert!(case("merge_pairs-hole").is_named("hole"));
    }
}
