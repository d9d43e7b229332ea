//! Layouts: the mappings inside the arena, as recorded and as the library has them.

use std::{
    fmt::{self, Write},
    sync::Arc,
};

use serde::Deserialize;
use similar::TextDiff;
use vma_core::paged::Paged;
use vma_core::{AddressSpace, VmaFlags};

use super::{
    files::Files,
    format::{Case, LayoutMark},
};

/// The mappings inside the arena, in order of address.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Vec<RawMapping>")]
pub(super) struct Layout(pub Vec<Mapping>);

/// A mapping; addresses are relative to the arena.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mapping {
    /// First byte.
    pub start: i64,
    /// First byte after it.
    pub end: i64,
    /// `rwxp` as maps shows it.
    pub perms: [u8; 4],
    /// Bytes into the file.
    pub offset: u64,
    /// Name of the file or object; `None`: private anonymous memory.
    pub file: Option<Arc<str>>,
    /// What smaps tells of the flags.
    pub flags: VmaFlags,
}

/// A mapping as the vectors write it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawMapping {
    start: i64,
    end: i64,
    perms: String,
    offset: u64,
    file: Option<String>,
    flags: String,
}

impl TryFrom<Vec<RawMapping>> for Layout {
    type Error = String;

    fn try_from(raw: Vec<RawMapping>) -> Result<Layout, String> {
        let mappings = raw.into_iter().map(Mapping::try_from);
        Ok(Layout(mappings.collect::<Result<_, _>>()?))
    }
}

impl TryFrom<RawMapping> for Mapping {
    type Error = String;

    fn try_from(raw: RawMapping) -> Result<Mapping, String> {
        let perms = <[u8; 4]>::try_from(raw.perms.as_bytes())
            .map_err(|_| format!("`perms`: {:?} isn't four characters", raw.perms))?;
        let known = |code| {
            VmaFlags::from_code(code).ok_or_else(|| format!("`flags`: {code:?} isn't a known flag"))
        };
        let flags = raw.flags.split_whitespace().map(known);
        Ok(Mapping {
            start: raw.start,
            end: raw.end,
            perms,
            offset: raw.offset,
            file: raw.file.map(Arc::from),
            flags: flags.collect::<Result<_, _>>()?,
        })
    }
}

/// `start-end perms offset file`, the line that is hashed.
impl fmt::Display for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let perms: String = self.perms.map(char::from).iter().collect();
        let file = self.file.as_deref().unwrap_or("-");
        // As two's complement, below the arena: such an address is a difference anyhow.
        let (start, end, offset) = (self.start, self.end, self.offset);
        write!(f, "{start:x}-{end:x} {perms} {offset:x} {file}")
    }
}

impl Mapping {
    /// Everything but the flags, which hash and "unchanged" leave out.
    fn same_shape(&self, other: &Mapping) -> bool {
        let all_but_flags = |m: &Mapping| (m.start, m.end, m.perms, m.offset);
        all_but_flags(self) == all_but_flags(other) && self.file == other.file
    }
}

/// 32-bit FNV-1a over what is written to it.
struct Fnv(u32);

impl Write for Fnv {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            self.0 = (self.0 ^ u32::from(byte)).wrapping_mul(16_777_619);
        }
        Ok(())
    }
}

impl Layout {
    /// The layout of a space inside the arena of a case. A mapping that only reaches into the arena is part of it; what
    /// closes the space around the arena isn't.
    pub(super) fn of(space: &AddressSpace<Paged>, case: &Case, files: &Files) -> Layout {
        let arena_end = case.start + case.len;
        let relative = |addr: u64| addr.wrapping_sub(case.start).cast_signed();
        let guard = space.read();
        let inside = guard
            .maps_entries()
            .filter(|entry| entry.end > case.start && entry.start < arena_end);
        let mappings = inside.map(|entry| Mapping {
            start: relative(entry.start),
            end: relative(entry.end),
            perms: entry.flags.perms(),
            offset: entry.offset,
            file: entry.file.as_ref().map(|file| files.name_of(file.object())),
            flags: entry
                .flags
                .codes()
                .filter_map(VmaFlags::from_code)
                .collect(),
        });
        Layout(mappings.collect())
    }

    /// Number of mappings and hash.
    pub(super) fn mark(&self) -> LayoutMark {
        let mut hash = Fnv(2_166_136_261);
        for mapping in &self.0 {
            // Hashing can't fail.
            let _ = writeln!(hash, "{mapping}");
        }
        LayoutMark {
            count: self.0.len(),
            hash: hash.0,
        }
    }

    /// Equal but for the flags.
    pub(super) fn same_shape(&self, other: &Layout) -> bool {
        self.0.len() == other.0.len() && self.0.iter().zip(&other.0).all(|(a, b)| a.same_shape(b))
    }

    /// What leads from one layout to another, a line per mapping.
    pub(super) fn diff(from: (&str, &Layout), to: (&str, &Layout)) -> String {
        let (old, new) = (from.1.to_string(), to.1.to_string());
        let diff = TextDiff::from_lines(&old, &new);
        format!(
            "--- {}\n+++ {}\n{}",
            from.0,
            to.0,
            diff.unified_diff().context_radius(2)
        )
    }
}

/// A line per mapping, with the codes of its flags.
impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|mapping| {
            let codes: Vec<&str> = mapping.flags.codes().collect();
            writeln!(f, "{mapping} [{}]", codes.join(" "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(json: &str) -> Result<Layout, String> {
        serde_json::from_str(&format!("[{json}]")).map_err(|e| e.to_string())
    }

    #[test]
    fn hashes_are_those_of_the_vectors() {
        assert_eq!(
            Layout::default().mark(),
            LayoutMark {
                count: 0,
                hash: 0x811c_9dc5
            }
        );
        // The first call of accounting-00000.
        let one = mapping(
            r#"{"start":0,"end":36864,"perms":"r-xp","offset":0,"file":null,"flags":"rd ex mr mw me"}"#,
        );
        assert_eq!(
            one.unwrap().mark(),
            LayoutMark {
                count: 1,
                hash: 0x70ed_6b8f
            }
        );
    }

    #[test]
    fn odd_mappings_are_refused() {
        for (json, why) in [
            (
                r#"{"start":0,"end":1,"perms":"r-x","offset":0,"file":null,"flags":""}"#,
                "four",
            ),
            (
                r#"{"start":0,"end":1,"perms":"r-xp","offset":0,"file":null,"flags":"qq"}"#,
                "qq",
            ),
            (
                r#"{"start":0,"end":1,"perms":"r-xp","offset":-1,"file":null,"flags":""}"#,
                "-1",
            ),
            (
                r#"{"start":0,"end":1,"perms":"r-xp","offset":0,"file":1,"flags":""}"#,
                "string",
            ),
            (
                r#"{"start":0,"end":1,"perms":"r-xp","offset":0,"file":null}"#,
                "flags",
            ),
            (
                r#"{"start":0,"end":1,"perms":"r-xp","offset":0,"file":null,"flags":"","x":1}"#,
                "x",
            ),
        ] {
            let e = mapping(json).unwrap_err();
            assert!(e.contains(why), "{json}: {e}");
        }
    }
}
