//! What every contestant is measured on: one layout of ranges, and random lists made beforehand.
//!
//! A list is far longer than what a branch predictor can learn, and holds page numbers in 32 bits, so that streaming
//! through it takes little of the cache that the contestants compete for.

use std::ops::Range;

/// Bytes of a page; all ranges are multiples of it.
pub const PAGE: u64 = 4096;
/// Where the layout begins.
const BASE: u64 = 0x1_0000 * PAGE;
/// Shortest list of random addresses or entries.
const MIN_LIST: usize = 1 << 15;

/// A small, fast and repeatable generator (`SplitMix64`).
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// A generator whose sequence depends on `seed` alone.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0..bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }
}

/// What is stored for each range: as large as a lean VMA record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rec {
    /// Which entry this is; distinct, so that no contestant merges neighbours.
    pub id: u64,
    /// Stands for flags, file, offset and the rest of a VMA.
    pub rest: [u64; 7],
}

impl Rec {
    /// The record of entry `id`.
    pub fn new(id: u64) -> Self {
        Self { id, rest: [id; 7] }
    }
}

/// One layout and the lists that go with it.
#[derive(Debug)]
pub struct Workload {
    /// The ranges, ascending and disjoint; each at least three pages long.
    pub entries: Vec<Range<u64>>,
    /// Indices of `entries` in random order: the order in which grown trees are built.
    pub shuffled: Vec<u32>,
    /// Page numbers to look up, each inside some entry.
    pub pages: Vec<u32>,
    /// Random indices of `entries`, for edits.
    pub picks: Vec<u32>,
}

impl Workload {
    /// A fragmented layout of `count` entries; the same one for the same `count`.
    pub fn new(count: usize) -> Self {
        let mut rng = Rng::new(count as u64);
        let entries = layout(count, &mut rng);
        let list = count.next_power_of_two().max(MIN_LIST);
        let shuffled = shuffle(count, &mut rng);
        let pages = (0..list).map(|_| random_page(&entries, &mut rng)).collect();
        let picks = (0..list).map(|_| rng.below(count as u64) as u32).collect();
        Self {
            entries,
            shuffled,
            pages,
            picks,
        }
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The ranges in random order, each with its index.
    pub fn in_random_order(&self) -> impl Iterator<Item = (u64, Range<u64>)> + '_ {
        self.shuffled
            .iter()
            .map(|&i| (u64::from(i), self.entries[i as usize].clone()))
    }

    /// The ranges in ascending order, each with its index.
    pub fn sorted(&self) -> impl Iterator<Item = (u64, Range<u64>)> + '_ {
        self.entries
            .iter()
            .cloned()
            .enumerate()
            .map(|(i, range)| (i as u64, range))
    }

    /// First byte past the layout.
    pub fn end(&self) -> u64 {
        self.entries.last().map_or(BASE, |last| last.end)
    }
}

/// The address that page number `page` of a list stands for.
#[inline(always)]
pub fn address(page: u32) -> u64 {
    u64::from(page) * PAGE
}

/// The two borders at which `range` is split in three.
#[inline]
pub fn thirds(range: &Range<u64>) -> (u64, u64) {
    (range.start + PAGE, range.end - PAGE)
}

/// Half of the entries touch their predecessor; other gaps are a few pages, now and then many.
fn layout(count: usize, rng: &mut Rng) -> Vec<Range<u64>> {
    let mut at = BASE;
    (0..count)
        .map(|_| {
            at += PAGE * gap_pages(rng);
            let start = at;
            at += PAGE * (3 + rng.below(14));
            start..at
        })
        .collect()
}

fn gap_pages(rng: &mut Rng) -> u64 {
    let kind = rng.below(4096);
    match kind {
        0..2048 => 0,
        2048..4032 => 1 + rng.below(12),
        4032..4092 => 16 + rng.below(240),
        _ => 512 + rng.below(512),
    }
}

fn shuffle(count: usize, rng: &mut Rng) -> Vec<u32> {
    let mut order: Vec<u32> = (0..count as u32).collect();
    for i in (1..count).rev() {
        order.swap(i, rng.below(i as u64 + 1) as usize);
    }
    order
}

fn random_page(entries: &[Range<u64>], rng: &mut Rng) -> u32 {
    let range = &entries[rng.below(entries.len() as u64) as usize];
    let pages = (range.end - range.start) / PAGE;
    (range.start / PAGE + rng.below(pages)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_is_ascending_disjoint_and_splittable() {
        let w = Workload::new(1000);
        assert_eq!(w.len(), 1000);
        assert!(w.entries.windows(2).all(|p| p[0].end <= p[1].start));
        assert!(w.entries.iter().all(|e| e.end - e.start >= 3 * PAGE));
        assert!(w.end() / PAGE < u64::from(u32::MAX));
    }

    #[test]
    fn every_listed_page_is_inside_an_entry() {
        let w = Workload::new(100);
        for &page in &w.pages {
            let addr = address(page);
            assert!(w.entries.iter().any(|e| e.contains(&addr)));
        }
    }

    #[test]
    fn random_order_is_a_permutation() {
        let w = Workload::new(500);
        let mut seen = w.shuffled.clone();
        seen.sort_unstable();
        assert!(seen.iter().copied().eq(0..500));
    }
}
