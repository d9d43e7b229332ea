//! How much memory there is to measure with.

use std::fs;

/// Bytes that can be used without pushing others out: what the machine has available, or what is left of the group's limit.
/// `None` where nobody says.
pub fn available() -> Option<u64> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let machine = available_in(&read("/proc/meminfo"));
    let group = left_of(
        &read("/sys/fs/cgroup/memory.max"),
        &read("/sys/fs/cgroup/memory.current"),
    );
    match (machine, group) {
        (Some(machine), Some(group)) => Some(machine.min(group)),
        (machine, group) => machine.or(group),
    }
}

/// `MemAvailable` of `/proc/meminfo`, in bytes.
fn available_in(meminfo: &str) -> Option<u64> {
    let mut lines = meminfo.lines();
    let rest = lines.find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// What is left of a control group's limit, in bytes; `None` without one.
fn left_of(max: &str, current: &str) -> Option<u64> {
    let max: u64 = max.trim().parse().ok()?;
    Some(max.saturating_sub(current.trim().parse().ok()?))
}

/// Whether something of a size can be measured that takes so much memory; if not a note says so.
pub fn fits(bytes: u64, need: u64, available: Option<u64>, notes: &mut Vec<String>) -> bool {
    let lacking = available.filter(|available| need > *available);
    notes.extend(lacking.map(|available| {
        format!(
            "{} left out: that takes {} MiB, and {} MiB of memory are available",
            size_name(bytes),
            need >> 20,
            available >> 20
        )
    }));
    lacking.is_none()
}

/// A size as people write it: in the largest unit that it's a multiple of.
pub fn size_name(bytes: u64) -> String {
    for (shift, unit) in [(30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes > 0 && bytes.is_multiple_of(1 << shift) {
            return format!("{} {unit}", bytes >> shift);
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_available_is_read_in_kibibytes() {
        let text =
            "MemTotal:       100 kB\nMemFree: 7 kB\nMemAvailable:   24689 kB\nBuffers: 1 kB\n";
        assert_eq!(available_in(text), Some(24_689 << 10));
        for damaged in [
            "",
            "MemTotal: 100 kB\n",
            "MemAvailable: x kB\n",
            "MemAvailable: 5\n",
        ] {
            assert_eq!(available_in(damaged), None, "{damaged:?}");
        }
    }

    #[test]
    fn a_group_without_a_limit_has_no_say() {
        assert_eq!(left_of("max\n", "4096\n"), None);
        assert_eq!(left_of("", ""), None);
        assert_eq!(left_of("8192\n", "4096\n"), Some(4096));
        assert_eq!(left_of("4096\n", "8192\n"), Some(0));
    }

    #[test]
    fn sizes_have_the_largest_unit_that_fits() {
        for (bytes, name) in [
            (0, "0 B"),
            (100, "100 B"),
            (4096, "4 KiB"),
            (64 << 20, "64 MiB"),
            (1 << 30, "1 GiB"),
            (3 << 29, "1536 MiB"),
        ] {
            assert_eq!(size_name(bytes), name);
        }
    }
}
