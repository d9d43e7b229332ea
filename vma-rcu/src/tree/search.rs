//! The search within a node: the first of 16 sorted keys above a given one.
//!
//! Branch-free over all lanes. With AVX2 it is four comparisons and a bit count; without, the compiler
//! makes a chain of compare-and-add of it. A plain x86-64 build finds out at run time.

use super::node::LANES;
use std::ops::Range;

/// How to search; a type parameter, so that a whole descent is compiled for it.
pub(super) trait Search {
    /// Index of the first key above `key`, at most `LANES`.
    fn first_above(keys: &[u64; LANES], key: u64) -> usize;

    /// Bit i: the i-th value is at least `least`, which isn't zero.
    fn at_least(values: &[u64; LANES], least: u64) -> u32;
}

/// Any processor.
pub(super) struct Portable;

impl Search for Portable {
    #[inline(always)]
    fn first_above(keys: &[u64; LANES], key: u64) -> usize {
        // Sorted: as many keys are not above as stand before the first that is.
        keys.iter().map(|k| usize::from(*k <= key)).sum()
    }

    #[inline(always)]
    fn at_least(values: &[u64; LANES], least: u64) -> u32 {
        let bits = values.iter().enumerate();
        bits.fold(0, |mask, (i, value)| mask | u32::from(*value >= least) << i)
    }
}

/// Asks for cache lines of the node at `node`, where that costs less than a later miss:
/// their address is known a search before their content is needed.
#[inline(always)]
pub(super) fn prefetch(node: *const (), lines: Range<usize>) {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    for line in lines {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let address = node.cast::<i8>().wrapping_add(64 * line);
        // SAFETY: a hint; no address is invalid for it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(loom))))]
    let _ = (node, lines);
}

/// [`Search::first_above`] for callers that aren't compiled per kind of search.
#[inline]
pub(super) fn first_above(keys: &[u64; LANES], key: u64) -> usize {
    #[cfg(all(target_arch = "x86_64", not(any(test, loom, small_nodes))))]
    if available() {
        return Avx2::first_above(keys, key);
    }
    Portable::first_above(keys, key)
}

#[cfg(all(target_arch = "x86_64", not(any(test, loom, small_nodes))))]
pub(super) use avx2::{Avx2, available};

#[cfg(all(target_arch = "x86_64", not(any(test, loom, small_nodes))))]
mod avx2 {
    use std::arch::x86_64::{
        __m256i, _mm256_castsi256_pd, _mm256_cmpgt_epi64, _mm256_loadu_si256, _mm256_movemask_epi8,
        _mm256_movemask_pd, _mm256_packs_epi16, _mm256_packs_epi32, _mm256_set1_epi64x,
        _mm256_xor_si256,
    };

    use super::{LANES, Search};

    /// x86-64 with AVX2. Use it only where [`available`] says so.
    pub(in crate::tree) struct Avx2;

    #[inline(always)]
    pub(in crate::tree) fn available() -> bool {
        cfg!(all(target_feature = "avx2", target_feature = "popcnt"))
            || (std::arch::is_x86_feature_detected!("avx2")
                && std::arch::is_x86_feature_detected!("popcnt"))
    }

    impl Search for Avx2 {
        #[inline(always)]
        fn first_above(keys: &[u64; LANES], key: u64) -> usize {
            // SAFETY: whoever names `Avx2` has asked `available`.
            unsafe { first_above(keys, key) }
        }

        #[inline(always)]
        fn at_least(values: &[u64; LANES], least: u64) -> u32 {
            // SAFETY: as above.
            unsafe { at_least(values, least) }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn first_above(keys: &[u64; LANES], key: u64) -> usize {
        let [a, b, c, d] = keys.as_chunks::<4>().0 else {
            return LANES;
        };
        let needle = _mm256_set1_epi64x(key.cast_signed() ^ i64::MIN);
        // How many are above, in whatever order the packing leaves them: two bits for each.
        let low = _mm256_packs_epi32(above(a, needle), above(b, needle));
        let high = _mm256_packs_epi32(above(c, needle), above(d, needle));
        let mask = _mm256_movemask_epi8(_mm256_packs_epi16(low, high));
        LANES - (mask.count_ones() / 2) as usize
    }

    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn at_least(values: &[u64; LANES], least: u64) -> u32 {
        let needle = _mm256_set1_epi64x(least.saturating_sub(1).cast_signed() ^ i64::MIN);
        let mut mask = 0;
        for (i, four) in values.as_chunks::<4>().0.iter().enumerate() {
            let bits = _mm256_movemask_pd(_mm256_castsi256_pd(above(four, needle)));
            mask |= bits.cast_unsigned() << (4 * i);
        }
        mask
    }

    /// All ones where a number is above the needle, whose sign bit is flipped: AVX2 compares signed
    /// numbers.
    #[inline]
    #[target_feature(enable = "avx2,popcnt")]
    fn above(four: &[u64; 4], needle: __m256i) -> __m256i {
        let flip = _mm256_set1_epi64x(i64::MIN);
        #[expect(clippy::cast_ptr_alignment, reason = "the load is an unaligned one")]
        let address = four.as_ptr().cast::<__m256i>();
        // SAFETY: an unaligned load of the 32 bytes that `four` is.
        let four = unsafe { _mm256_loadu_si256(address) };
        _mm256_cmpgt_epi64(_mm256_xor_si256(four, flip), needle)
    }
}
