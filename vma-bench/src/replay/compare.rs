//! A layout as the replay has it beside one that the kernel showed.
//!
//! First page for page: permissions, offset, device, inode and name must be equal. Then border for border. A border
//! that only one side has is an error, except where page faults, which no log shows, can be its reason: private memory that was
//! writable at some time, with nothing that a map shows different on its two sides, and no difference of ours either but
//! ACCOUNT, which depends on faults too.

use std::{collections::BTreeMap, fmt::Write};

use similar::TextDiff;

use super::{
    history::EverWritable,
    maps::MapLine,
    model::files::{DescriptionId, DevIno, Files, InodeId},
};

/// `VM_GROWSDOWN`, `VM_ACCOUNT`, `VM_SOFTDIRTY`.
pub const VM_GROWSDOWN: u64 = 0x100;
const VM_ACCOUNT: u64 = 0x10_0000;
const VM_SOFTDIRTY: u64 = 0x800_0000;

/// A VMA of the replay.
#[derive(Debug, Clone)]
pub struct Shown {
    /// As a map would show it; device and inode as far as earlier snapshots told.
    pub line: MapLine,
    /// The file.
    pub file: Option<DescriptionId>,
    /// Linux's `vm_flags`.
    pub flags: u64,
}

/// What a comparison found.
#[derive(Debug, Default)]
pub struct Comparison {
    /// Pages that are mapped on both sides and equal.
    pub pages: u64,
    /// Borders between adjacent VMAs that both have.
    pub borders: u64,
    /// Borders that only the kernel has, by its fault history.
    pub kernel_only: u64,
    /// Borders that only the replay has, by the kernel's fault history.
    pub replay_only: u64,
    /// These borders: the address, and whether the kernel has it.
    pub by_faults: Vec<(u64, bool)>,
    /// Names that the kernel shows as deleted and that no logged call deleted.
    pub deleted_unlogged: u64,
    /// The first difference that nothing explains.
    pub difference: Option<String>,
}

/// Compares a layout with what the kernel showed. Devices and inodes of files are learnt the first time.
pub fn compare(
    recorded: &[MapLine],
    replayed: &[Shown],
    files: &mut Files,
    history: &EverWritable,
    follows_files: bool,
) -> Comparison {
    let mut out = Comparison::default();
    let mut inodes: BTreeMap<DevIno, InodeId> = BTreeMap::new();
    for piece in pieces(recorded, replayed) {
        if let Err(why) = piece.check(files, &mut inodes, follows_files, &mut out) {
            out.difference = Some(format!("page {:#x}: {why}", piece.start));
            return out;
        }
        out.pages += (piece.end - piece.start) / 4096;
    }
    out.difference = borders(recorded, replayed, history, &mut out);
    out
}

/// A range in which neither side has a border.
struct Piece<'a> {
    start: u64,
    end: u64,
    recorded: Option<&'a MapLine>,
    replayed: Option<&'a Shown>,
}

fn pieces<'a>(recorded: &'a [MapLine], replayed: &'a [Shown]) -> Vec<Piece<'a>> {
    let mut cuts: Vec<u64> = recorded.iter().flat_map(|l| [l.start, l.end]).collect();
    cuts.extend(replayed.iter().flat_map(|s| [s.line.start, s.line.end]));
    cuts.sort_unstable();
    cuts.dedup();
    let (mut i, mut j) = (0, 0);
    let mut out = Vec::with_capacity(cuts.len());
    for pair in cuts.windows(2) {
        let &[start, end] = pair else { continue };
        while recorded.get(i).is_some_and(|l| l.end <= start) {
            i += 1;
        }
        while replayed.get(j).is_some_and(|s| s.line.end <= start) {
            j += 1;
        }
        let a = recorded.get(i).filter(|l| l.start <= start);
        let b = replayed.get(j).filter(|s| s.line.start <= start);
        if a.is_some() || b.is_some() {
            out.push(Piece {
                start,
                end,
                recorded: a,
                replayed: b,
            });
        }
    }
    out
}

impl Piece<'_> {
    fn check(
        &self,
        files: &mut Files,
        inodes: &mut BTreeMap<DevIno, InodeId>,
        follows_files: bool,
        out: &mut Comparison,
    ) -> Result<(), String> {
        let (Some(kernel), Some(ours)) = (self.recorded, self.replayed) else {
            let side = if self.recorded.is_some() {
                "mapped in the kernel, not in the replay"
            } else {
                "mapped in the replay, not in the kernel"
            };
            return Err(side.into());
        };
        if kernel.perms != ours.line.perms {
            return Err(format!(
                "permissions are {}, the replay has {}",
                kernel.perms(),
                ours.line.perms()
            ));
        }
        let Some(file) = ours.file else {
            return Self::check_no_file(kernel, ours);
        };
        if !kernel.has_file() {
            return Err(format!(
                "no file in the kernel, the replay has {}",
                files.shown_name(file)
            ));
        }
        let (want, have) = (self.offset_in(kernel), self.offset_in(&ours.line));
        if want != have {
            return Err(format!(
                "file offset is {want:#x}, the replay has {have:#x}"
            ));
        }
        let name = files.shown_name(file);
        if kernel.name != name {
            if follows_files || kernel.name.strip_suffix(" (deleted)") != Some(name.as_str()) {
                return Err(format!(
                    "name is {:?}, the replay has {name:?}",
                    kernel.name
                ));
            }
            files.learn_deleted(file);
            out.deleted_unlogged += 1;
        }
        Self::check_inode(kernel, file, files, inodes)
    }

    fn check_inode(
        kernel: &MapLine,
        file: DescriptionId,
        files: &mut Files,
        inodes: &mut BTreeMap<DevIno, InodeId>,
    ) -> Result<(), String> {
        let (shown, inode) = ((kernel.dev, kernel.inode), files.inode(file));
        files.learn(inode, shown);
        let known = files.known_as(inode).unwrap_or(shown);
        if known != shown {
            return Err(format!(
                "inode is {shown:?}, it was {known:?} in an earlier map"
            ));
        }
        let first = *inodes.entry(shown).or_insert(inode);
        if first != inode {
            return Err(format!(
                "inode {shown:?} is mapped twice, the replay has two files there"
            ));
        }
        Ok(())
    }

    fn check_no_file(kernel: &MapLine, ours: &Shown) -> Result<(), String> {
        if kernel.has_file() {
            return Err(format!(
                "{:?} in the kernel, no file in the replay",
                kernel.name
            ));
        }
        if kernel.name != ours.line.name {
            // [heap] and [stack] are shown for a whole VMA if any part of it is: borders that differ move the name.
            let whole = kernel.start == ours.line.start && kernel.end == ours.line.end;
            let moves = |n: &str| n.is_empty() || n == "[heap]" || n == "[stack]";
            if whole || !moves(&kernel.name) || !moves(&ours.line.name) {
                return Err(format!(
                    "name is {:?}, the replay has {:?}",
                    kernel.name, ours.line.name
                ));
            }
        }
        Ok(())
    }

    fn offset_in(&self, line: &MapLine) -> u64 {
        line.offset.wrapping_add(self.start - line.start)
    }
}

/// Borders between adjacent VMAs; the first that one side lacks without an explanation.
fn borders(
    recorded: &[MapLine],
    replayed: &[Shown],
    history: &EverWritable,
    out: &mut Comparison,
) -> Option<String> {
    let kernel: BTreeMap<u64, (&MapLine, &MapLine)> = recorded
        .windows(2)
        .filter(|w| w[0].end == w[1].start)
        .map(|w| (w[1].start, (&w[0], &w[1])))
        .collect();
    let ours: BTreeMap<u64, (&Shown, &Shown)> = replayed
        .windows(2)
        .filter(|w| w[0].line.end == w[1].line.start)
        .map(|w| (w[1].line.start, (&w[0], &w[1])))
        .collect();
    let writable = |a: &MapLine, b: &MapLine| a.may(b'p') && history.contains_any(a.start, b.end);
    for (at, (low, high)) in &kernel {
        if ours.contains_key(at) {
            out.borders += 1;
        } else if low.could_continue_into(high) && writable(low, high) {
            out.kernel_only += 1;
            out.by_faults.push((*at, true));
        } else {
            return Some(format!(
                "border {at:#x}: the kernel has one, the replay has none, and faults can't be the reason"
            ));
        }
    }
    for (at, (low, high)) in ours.iter().filter(|(at, _)| !kernel.contains_key(at)) {
        let hidden = (low.flags ^ high.flags) & !(VM_ACCOUNT | VM_SOFTDIRTY);
        if hidden == 0 && low.file == high.file && writable(&low.line, &high.line) {
            out.replay_only += 1;
            out.by_faults.push((*at, false));
        } else {
            return Some(format!(
                "border {at:#x}: the replay has one, the kernel has none, and faults can't be the reason \
                 (flags {:#x} and {:#x}, same open file: {})",
                low.flags,
                high.flags,
                low.file == high.file
            ));
        }
    }
    None
}

/// Addresses to which stacks have grown in the kernel: begins of recorded VMAs below a VMA of ours that grows down.
pub fn grown_stacks(recorded: &[MapLine], replayed: &[Shown]) -> Vec<u64> {
    let mut out = Vec::new();
    for (i, ours) in replayed
        .iter()
        .enumerate()
        .filter(|(_, s)| s.flags & VM_GROWSDOWN != 0)
    {
        let floor = i.checked_sub(1).map_or(0, |below| replayed[below].line.end);
        let first = recorded
            .iter()
            .find(|l| l.start <= ours.line.start && ours.line.start < l.end);
        if let Some(line) = first
            .filter(|l| l.start < ours.line.start && l.start >= floor && l.perms == ours.line.perms)
        {
            out.push(line.start);
        }
    }
    out
}

/// The two layouts as a diff: the kernel's lines with `-`, the replay's with `+`; the first few places.
pub fn diff(recorded: &[MapLine], replayed: &[Shown], files: &Files) -> String {
    let text = |lines: &mut dyn Iterator<Item = MapLine>| {
        let mut out = String::new();
        for line in lines {
            out.push_str(&line.text());
            out.push('\n');
        }
        out
    };
    let kernel = text(&mut recorded.iter().cloned());
    let ours = text(&mut replayed.iter().map(|s| completed(s, files)));
    let diff = TextDiff::from_lines(&kernel, &ours);
    let mut out = String::new();
    for hunk in diff.unified_diff().context_radius(2).iter_hunks().take(3) {
        let _ = write!(out, "{hunk}");
    }
    out
}

/// The line of a VMA with name, device and inode as far as they are known by now.
fn completed(shown: &Shown, files: &Files) -> MapLine {
    let mut line = shown.line.clone();
    if let Some(file) = shown.file {
        line.name = files.shown_name(file);
        if let Some((dev, inode)) = files.known_as(files.inode(file)) {
            (line.dev, line.inode) = (dev, inode);
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::maps::parse_line;

    fn line(text: &str) -> MapLine {
        parse_line(text).unwrap()
    }

    fn ours(text: &str, flags: u64) -> Shown {
        Shown {
            line: line(text),
            file: None,
            flags,
        }
    }

    fn check(kernel: &[&str], replay: &[Shown], writable: bool) -> Comparison {
        let kernel: Vec<MapLine> = kernel.iter().map(|l| line(l)).collect();
        let mut history = EverWritable::default();
        if writable {
            history.add(0x1000, 0x2000);
        }
        compare(&kernel, replay, &mut Files::default(), &history, true)
    }

    const ALL: &str = "1000-3000 rw-p 00000000 00:00 0 ";
    const LOW: &str = "1000-2000 rw-p 00000000 00:00 0 ";
    const HIGH: &str = "2000-3000 rw-p 00000000 00:00 0 ";

    #[test]
    fn equal_layouts_are_equal() {
        let c = check(&[LOW, HIGH], &[ours(LOW, 3), ours(HIGH, 0x4003)], false);
        assert_eq!((c.difference, c.pages, c.borders), (None, 2, 1));
    }

    #[test]
    fn a_border_needs_memory_that_was_writable() {
        assert_eq!(check(&[LOW, HIGH], &[ours(ALL, 3)], true).kernel_only, 1);
        assert!(
            check(&[LOW, HIGH], &[ours(ALL, 3)], false)
                .difference
                .is_some()
        );
        assert_eq!(
            check(&[ALL], &[ours(LOW, 3), ours(HIGH, 0x10_0003)], true).replay_only,
            1
        );
        assert!(
            check(&[ALL], &[ours(LOW, 3), ours(HIGH, 3)], false)
                .difference
                .is_some()
        );
    }

    #[test]
    fn a_border_of_ours_by_another_flag_is_a_difference() {
        let c = check(&[ALL], &[ours(LOW, 3), ours(HIGH, 0x4003)], true);
        assert!(c.difference.unwrap().contains("flags 0x3 and 0x4003"));
    }

    #[test]
    fn a_border_of_shared_memory_is_a_difference() {
        let (low, high) = (
            "1000-2000 rw-s 00000000 00:00 0 ",
            "2000-3000 rw-s 00000000 00:00 0 ",
        );
        let c = check(
            &["1000-3000 rw-s 00000000 00:00 0 "],
            &[ours(low, 3), ours(high, 3)],
            true,
        );
        assert!(c.difference.is_some());
    }

    #[test]
    fn pages_that_differ_are_named() {
        let readable = "2000-3000 r--p 00000000 00:00 0 ";
        let c = check(&[LOW, readable], &[ours(ALL, 3)], true);
        assert_eq!(
            c.difference.unwrap(),
            "page 0x2000: permissions are r--p, the replay has rw-p"
        );
        let c = check(&[LOW], &[ours(ALL, 3)], true);
        assert_eq!(
            c.difference.unwrap(),
            "page 0x2000: mapped in the replay, not in the kernel"
        );
        let c = check(&[ALL], &[ours(HIGH, 3)], true);
        assert_eq!(
            c.difference.unwrap(),
            "page 0x1000: mapped in the kernel, not in the replay"
        );
    }

    #[test]
    fn grown_stacks_are_found() {
        let kernel = [
            line("1000-2000 rw-p 0 00:00 0 "),
            line("5000-9000 rw-p 00000000 00:00 0  [stack]"),
        ];
        let replay = [
            ours("1000-2000 rw-p 0 00:00 0 ", 3),
            ours("8000-9000 rw-p 00000000 00:00 0 ", 0x103),
        ];
        assert_eq!(grown_stacks(&kernel, &replay), [0x5000]);
    }
}
