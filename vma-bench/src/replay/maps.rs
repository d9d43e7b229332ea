//! What the kernel showed: `/proc/PID/maps`, one or many in a file, and the `VmFlags` of `/proc/PID/smaps`.
//!
//! The parser is our own: the one of `procfs-core` drops `(deleted)` from System V names, trims names and panics on a
//! short name that begins with `/SYSV`. A test compares the two on all bundled files.

use std::path::Path;

use super::error::ReplayError;

/// A line of a map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapLine {
    /// First address.
    pub start: u64,
    /// One past the last address.
    pub end: u64,
    /// `rwxp` as written.
    pub perms: [u8; 4],
    /// Offset into the file, in bytes.
    pub offset: u64,
    /// Device as major, minor.
    pub dev: (u32, u32),
    /// Inode; 0 where no file is mapped.
    pub inode: u64,
    /// The name at the end of the line; empty if there is none.
    pub name: String,
}

impl MapLine {
    /// The permissions as text.
    pub fn perms(&self) -> &str {
        std::str::from_utf8(&self.perms).unwrap_or("????")
    }

    /// Whether the permission letter `c` is there.
    pub fn may(&self, c: u8) -> bool {
        self.perms.contains(&c)
    }

    /// Whether a file is mapped, as far as the map tells.
    pub fn has_file(&self) -> bool {
        self.inode != 0 || self.dev != (0, 0)
    }

    /// Whether `next` could be one VMA together with `self`, as far as the map tells.
    pub fn could_continue_into(&self, next: &MapLine) -> bool {
        self.end == next.start
            && self.perms == next.perms
            && self.dev == next.dev
            && self.inode == next.inode
            && self.name == next.name
            && (!self.has_file() || self.offset.wrapping_add(self.end - self.start) == next.offset)
    }

    /// The line as the kernel writes it.
    pub fn text(&self) -> String {
        let mut out = format!(
            "{:08x}-{:08x} {} {:08x} {:02x}:{:02x} {} ",
            self.start,
            self.end,
            self.perms(),
            self.offset,
            self.dev.0,
            self.dev.1,
            self.inode
        );
        if !self.name.is_empty() {
            out.push_str(&" ".repeat(73_usize.saturating_sub(out.len())));
            out.push_str(&self.name);
        }
        out
    }
}

/// When a snapshot was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Moment {
    /// After the `n`-th successful execve of the process: replaces the layout.
    Exec(u64),
    /// When the process entered its `n`-th call of mmap, munmap, mprotect, mremap, brk or madvise.
    At(u64),
    /// When the process was about to give its address space up.
    End,
}

/// A map with the moment that it shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The process; `None` for the one whose first line is the first of the log.
    pub pid: Option<u32>,
    /// When.
    pub moment: Moment,
    /// The lines.
    pub map: Vec<MapLine>,
    /// Where its first line stands in its file.
    pub line: u64,
}

/// Parses a file with one map.
///
/// # Errors
/// A line that isn't one of a map, lines out of order, or no line at all.
pub fn parse_map(path: &Path, text: &str) -> Result<Vec<MapLine>, ReplayError> {
    let lines = text.lines().enumerate().map(|(i, l)| (i as u64 + 1, l));
    let map = parse_lines(path, lines)?;
    if map.is_empty() {
        return Err(ReplayError::file(path, "no line of a map in it"));
    }
    whole_last_line(path, text)?;
    Ok(map)
}

/// Parses a file of sections, each `=== pid=123 event=exec n=1` (or `event=at n=64`, `event=end`) and a map.
///
/// # Errors
/// As [`parse_map`], and a heading that isn't one.
pub fn parse_sections(path: &Path, text: &str) -> Result<Vec<Snapshot>, ReplayError> {
    let mut out: Vec<Snapshot> = Vec::new();
    let mut body: Vec<(u64, &str)> = Vec::new();
    for (i, raw) in text.lines().enumerate() {
        let number = i as u64 + 1;
        if let Some(heading) = raw.strip_prefix("=== ") {
            close_section(path, &mut out, &mut body)?;
            let (pid, moment) =
                parse_heading(heading).map_err(|why| ReplayError::line(path, number, why))?;
            out.push(Snapshot {
                pid: Some(pid),
                moment,
                map: Vec::new(),
                line: number + 1,
            });
        } else if out.is_empty() {
            return Err(ReplayError::line(
                path,
                number,
                "no heading '=== pid=... event=...' before the first map",
            ));
        } else {
            body.push((number, raw));
        }
    }
    close_section(path, &mut out, &mut body)?;
    whole_last_line(path, text)?;
    Ok(out)
}

fn close_section(
    path: &Path,
    out: &mut [Snapshot],
    body: &mut Vec<(u64, &str)>,
) -> Result<(), ReplayError> {
    let Some(last) = out.last_mut() else {
        return Ok(());
    };
    last.map = parse_lines(path, body.drain(..))?;
    if last.map.is_empty() {
        return Err(ReplayError::line(
            path,
            last.line,
            "a heading without a map",
        ));
    }
    Ok(())
}

fn whole_last_line(path: &Path, text: &str) -> Result<(), ReplayError> {
    if text.ends_with('\n') {
        return Ok(());
    }
    Err(ReplayError::line(
        path,
        text.lines().count() as u64,
        "the last line has no end: the file is cut off",
    ))
}

fn parse_heading(heading: &str) -> Result<(u32, Moment), String> {
    let field = |name: &str| {
        heading
            .split_whitespace()
            .find_map(|f| f.strip_prefix(name)?.strip_prefix('='))
    };
    let number = |name: &str| field(name).ok_or(format!("no {name}= in the heading"));
    let pid = number("pid")?
        .parse()
        .map_err(|_| "pid= isn't a number".to_owned())?;
    let n = || {
        number("n")?
            .parse()
            .map_err(|_| "n= isn't a number".to_owned())
    };
    let moment = match number("event")? {
        "exec" => Moment::Exec(n()?),
        "at" => Moment::At(n()?),
        "end" => Moment::End,
        other => return Err(format!("event={other} isn't exec, at or end")),
    };
    Ok((pid, moment))
}

fn parse_lines<'a>(
    path: &Path,
    lines: impl Iterator<Item = (u64, &'a str)>,
) -> Result<Vec<MapLine>, ReplayError> {
    let mut map: Vec<MapLine> = Vec::new();
    for (number, raw) in lines.filter(|(_, l)| !l.is_empty()) {
        let line = parse_line(raw).map_err(|why| ReplayError::line(path, number, why))?;
        if map.last().is_some_and(|last| last.end > line.start) {
            return Err(ReplayError::line(
                path,
                number,
                "begins before the line above it ends",
            ));
        }
        map.push(line);
    }
    Ok(map)
}

/// Parses one line of a map.
///
/// # Errors
/// Which field is wrong.
pub fn parse_line(raw: &str) -> Result<MapLine, String> {
    let mut fields = raw.splitn(6, ' ');
    let mut next = |what: &str| {
        fields
            .next()
            .filter(|f| !f.is_empty())
            .ok_or(format!("no {what}: not a line of a map"))
    };
    let (start, end) = pair(next("range")?, '-').ok_or("a range that isn't START-END")?;
    if start >= end || (start | end) & 0xfff != 0 {
        return Err("a range that is empty, reversed or not of whole pages".into());
    }
    let perms = next("permissions")?;
    let perms: [u8; 4] = perms
        .as_bytes()
        .try_into()
        .ok()
        .filter(|p: &[u8; 4]| {
            p.iter()
                .zip(["r-", "w-", "x-", "ps"])
                .all(|(b, set)| set.as_bytes().contains(b))
        })
        .ok_or("permissions that aren't like rwxp")?;
    let offset =
        u64::from_str_radix(next("offset")?, 16).map_err(|_| "an offset that isn't a number")?;
    let (major, minor) = pair(next("device")?, ':').ok_or("a device that isn't MAJOR:MINOR")?;
    let inode = next("inode")?
        .parse()
        .map_err(|_| "an inode that isn't a number")?;
    let dev = (
        u32::try_from(major).unwrap_or(u32::MAX),
        u32::try_from(minor).unwrap_or(u32::MAX),
    );
    // The name is padded to a column; a name with blanks at its end keeps them.
    let name = fields
        .next()
        .unwrap_or("")
        .trim_start_matches(' ')
        .to_owned();
    Ok(MapLine {
        start,
        end,
        perms,
        offset,
        dev,
        inode,
        name,
    })
}

fn pair(text: &str, separator: char) -> Option<(u64, u64)> {
    let (a, b) = text.split_once(separator)?;
    Some((
        u64::from_str_radix(a, 16).ok()?,
        u64::from_str_radix(b, 16).ok()?,
    ))
}

/// A VMA with its `VmFlags`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlagLine {
    /// Its line in the map.
    pub line: MapLine,
    /// The two-letter flags in the order in which they are printed.
    pub flags: Vec<String>,
}

/// Parses `/proc/PID/smaps` for its lines and flags.
///
/// # Errors
/// As [`parse_map`], and a mapping without `VmFlags`.
pub fn parse_flags(path: &Path, text: &str) -> Result<Vec<FlagLine>, ReplayError> {
    let mut out: Vec<FlagLine> = Vec::new();
    let mut open: Option<(u64, MapLine)> = None;
    for (i, raw) in text.lines().enumerate() {
        let number = i as u64 + 1;
        if let Some(flags) = raw.strip_prefix("VmFlags:") {
            let Some((_, line)) = open.take() else {
                return Err(ReplayError::line(path, number, "VmFlags without a mapping"));
            };
            out.push(FlagLine {
                line,
                flags: flags.split_whitespace().map(str::to_owned).collect(),
            });
        } else if !raw.starts_with(|c: char| c.is_ascii_uppercase()) {
            let line = parse_line(raw).map_err(|why| ReplayError::line(path, number, why))?;
            if open.replace((number, line)).is_some() {
                return Err(ReplayError::line(
                    path,
                    number,
                    "the mapping above has no VmFlags",
                ));
            }
        }
    }
    match open {
        Some((number, _)) => Err(ReplayError::line(
            path,
            number,
            "a mapping without VmFlags: the file is cut off",
        )),
        None => Ok(out),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str =
        "7ffff7bda000-7ffff7bea000 rw-s 00003000 00:13 244892                     /[aio] (deleted)";

    #[test]
    fn a_line_has_its_fields_and_comes_out_as_it_went_in() {
        let line = parse_line(LINE).unwrap();
        assert_eq!(
            (line.start, line.end, line.perms()),
            (0x7fff_f7bd_a000, 0x7fff_f7be_a000, "rw-s")
        );
        assert_eq!(
            (line.offset, line.dev, line.inode),
            (0x3000, (0, 0x13), 244_892)
        );
        assert_eq!(line.name, "/[aio] (deleted)");
        assert_eq!(line.text(), LINE);
        let plain = "40000000-40003000 rw-p 00000000 00:00 0 ";
        assert_eq!(parse_line(plain).unwrap().text(), plain);
    }

    #[test]
    fn sections_have_their_moments() {
        let text = format!(
            "=== pid=7 event=exec n=1\n{LINE}\n\n=== pid=8 event=at n=64\n{LINE}\n=== pid=8 event=end\n{LINE}\n"
        );
        let sections = parse_sections(Path::new("m"), &text).unwrap();
        let moments: Vec<_> = sections.iter().map(|s| (s.pid, s.moment)).collect();
        assert_eq!(
            moments,
            [
                (Some(7), Moment::Exec(1)),
                (Some(8), Moment::At(64)),
                (Some(8), Moment::End)
            ]
        );
    }

    #[test]
    fn damage_is_an_error_with_its_line() {
        let map = |text: &str| parse_map(Path::new("m"), text).unwrap_err().to_string();
        for (text, why) in [
            ("", "m: no line of a map in it"),
            ("hello\n", "m:1: a range that isn't START-END"),
            (
                "2000-1000 r--p 00000000 00:00 0 \n",
                "m:1: a range that is empty, reversed or not of whole pages",
            ),
            (
                "1000-2000 rq-p 00000000 00:00 0 \n",
                "m:1: permissions that aren't like rwxp",
            ),
            (
                "1000-2000 r--p zz 00:00 0 \n",
                "m:1: an offset that isn't a number",
            ),
            (
                "1000-2000 r--p 00000000 0000 0 \n",
                "m:1: a device that isn't MAJOR:MINOR",
            ),
            (
                "1000-2000 r--p 00000000 00:00 x \n",
                "m:1: an inode that isn't a number",
            ),
            ("1000-2000 r--p\n", "m:1: no offset: not a line of a map"),
            (
                "1000-3000 r--p 0 00:00 0 \n2000-4000 r--p 0 00:00 0 \n",
                "m:2: begins before the line above it ends",
            ),
            (
                "1000-2000 r--p 00000000 00:00 0",
                "m:1: the last line has no end: the file is cut off",
            ),
        ] {
            assert_eq!(map(text), why);
        }
        let sections = |text: &str| {
            parse_sections(Path::new("m"), text)
                .unwrap_err()
                .to_string()
        };
        for (text, why) in [
            (
                "1000-2000 r--p 0 00:00 0 \n",
                "m:1: no heading '=== pid=... event=...' before the first map",
            ),
            ("=== pid=x event=end\n", "m:1: pid= isn't a number"),
            ("=== pid=1 event=at\n", "m:1: no n= in the heading"),
            (
                "=== pid=1 event=later n=1\n",
                "m:1: event=later isn't exec, at or end",
            ),
            ("=== pid=1 event=end\n", "m:2: a heading without a map"),
        ] {
            assert_eq!(sections(text), why);
        }
    }

    #[test]
    fn flags_of_smaps() {
        let text = format!("{LINE}\nSize: 12 kB\nVmFlags: rd wr sh mr mw ms de \n");
        let flags = parse_flags(Path::new("s"), &text).unwrap();
        assert_eq!(flags[0].flags, ["rd", "wr", "sh", "mr", "mw", "ms", "de"]);
        assert!(parse_flags(Path::new("s"), &format!("{LINE}\nSize: 12 kB\n")).is_err());
        assert!(parse_flags(Path::new("s"), "VmFlags: rd\n").is_err());
    }
}
