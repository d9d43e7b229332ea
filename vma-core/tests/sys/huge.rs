//! Huge pages of the machine's: a pool of them for the time of a test.

use std::fs;

const POOL: &str = "/proc/sys/vm/nr_hugepages";

fn meminfo(field: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let mut lines = text.lines();
    let rest = lines.find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// Pages that can be reserved now.
pub(super) fn available() -> u64 {
    let free = meminfo("HugePages_Free").unwrap_or(0);
    free.saturating_sub(meminfo("HugePages_Rsvd").unwrap_or(0))
}

/// Pages that are reserved, in the whole machine.
pub(crate) fn reserved_huge_pages() -> u64 {
    meminfo("HugePages_Rsvd").unwrap_or(0)
}

/// Pages of 2 MiB that nobody else has, until it's dropped.
#[derive(Debug)]
pub(crate) struct MachinePool {
    before: u64,
}

impl MachinePool {
    /// # Errors
    /// Why there are none.
    pub(crate) fn new(pages: u64) -> Result<Self, String> {
        if meminfo("Hugepagesize") != Some(2048) {
            return Err("huge pages aren't 2 MiB".to_owned());
        }
        if meminfo("HugePages_Free") > meminfo("HugePages_Rsvd") {
            return Err("somebody uses huge pages".to_owned());
        }
        let size =
            |path: &str| -> Option<u64> { fs::read_to_string(path).ok()?.trim().parse().ok() };
        let before = size(POOL).ok_or(format!("{POOL} can't be read"))?;
        let pool = MachinePool { before };
        let wanted = (meminfo("HugePages_Total").unwrap_or(0) + pages).to_string();
        fs::write(POOL, wanted).map_err(|error| format!("{POOL}: {error}"))?;
        let got = available();
        if got == pages {
            Ok(pool)
        } else {
            Err(format!("{got} huge pages of {pages} could be had"))
        }
    }
}

impl Drop for MachinePool {
    fn drop(&mut self) {
        // What can't be given back is in use by somebody.
        let _ = fs::write(POOL, self.before.to_string());
    }
}
