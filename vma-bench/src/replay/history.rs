//! Which pages were writable at some time since they were mapped: only they may have been written, and so only they can
//! have the fault history (`anon_vma`) that decides about borders and that no log shows.

use std::collections::BTreeMap;

/// A set of addresses as disjoint, half-open ranges.
#[derive(Debug, Clone, Default)]
pub struct EverWritable {
    ranges: BTreeMap<u64, u64>,
}

impl EverWritable {
    /// Adds `[start, end)`.
    pub fn add(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        let (mut start, mut end) = (start, end);
        let touching: Vec<(u64, u64)> = self
            .overlapping(start.saturating_sub(1), end.saturating_add(1))
            .collect();
        for (s, e) in touching {
            self.ranges.remove(&s);
            (start, end) = (start.min(s), end.max(e));
        }
        self.ranges.insert(start, end);
    }

    /// Takes `[start, end)` out.
    pub fn remove(&mut self, start: u64, end: u64) {
        let hit: Vec<(u64, u64)> = self.overlapping(start, end).collect();
        for (s, e) in hit {
            self.ranges.remove(&s);
            if s < start {
                self.ranges.insert(s, start);
            }
            if e > end {
                self.ranges.insert(end, e);
            }
        }
    }

    /// What mremap does: the part in `[from, from + len)` is at `to` as well; what was at `[to, to + new_len)` is gone.
    pub fn copy(&mut self, from: u64, len: u64, to: u64, new_len: u64) {
        let source_end = from.saturating_add(len);
        let parts: Vec<(u64, u64)> = self.overlapping(from, source_end).collect();
        self.remove(to, to.saturating_add(new_len));
        for (s, e) in parts {
            let (s, e) = (s.max(from), e.min(source_end));
            self.add(to.saturating_add(s - from), to.saturating_add(e - from));
        }
        // A mapping that may be written and grows may be written in the part that is new.
        if new_len > len && self.contains_any(to, to.saturating_add(len.max(1))) {
            self.add(to.saturating_add(len), to.saturating_add(new_len));
        }
    }

    /// Whether any address of `[start, end)` is in the set.
    pub fn contains_any(&self, start: u64, end: u64) -> bool {
        self.overlapping(start, end).next().is_some()
    }

    fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        let before = self
            .ranges
            .range(..start)
            .next_back()
            .filter(|(_, e)| **e > start);
        let inside = if start < end {
            Some(self.ranges.range(start..end))
        } else {
            None
        };
        before
            .into_iter()
            .chain(inside.into_iter().flatten())
            .map(|(&s, &e)| (s, e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(ranges: &[(u64, u64)]) -> EverWritable {
        let mut out = EverWritable::default();
        for &(s, e) in ranges {
            out.add(s, e);
        }
        out
    }

    fn ranges(set: &EverWritable) -> Vec<(u64, u64)> {
        set.ranges.iter().map(|(&s, &e)| (s, e)).collect()
    }

    #[test]
    fn ranges_join_and_are_cut() {
        let mut s = set(&[(10, 20), (30, 40), (20, 30)]);
        assert_eq!(ranges(&s), [(10, 40)]);
        s.remove(15, 35);
        assert_eq!(ranges(&s), [(10, 15), (35, 40)]);
        assert!(s.contains_any(14, 35) && !s.contains_any(15, 35));
        s.remove(0, 100);
        assert_eq!(ranges(&s), []);
    }

    #[test]
    fn a_move_takes_the_history_along() {
        let mut s = set(&[(10, 20), (100, 200)]);
        s.copy(0, 30, 100, 50);
        assert_eq!(ranges(&s), [(10, 20), (110, 120), (130, 200)]);
    }
}
