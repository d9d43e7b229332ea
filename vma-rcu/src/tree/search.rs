//! The search within a node: the first of 16 sorted keys above a given one.
//!
//! Branch-free over all lanes. With AVX2 it is four comparisons and a bit count; without, the compiler
//! makes a chain of compare-and-add of it. A plain x86-64 build finds out at run time.

use super::node::LANES;

/// How to search; a type parameter, so that a whole descent is compiled for it.
pub(super) trait Search {
    /// Index of the first key above `key`, at most `LANES`.
    fn first_above(keys: &[u64; LANES], key: u64) -> usize;
}

/// Any processor.
pub(super) struct Portable;

impl Search for Portable {
    #[inline(always)]
    fn first_above(keys: &[u64; LANES], key: u64) -> usize {
        // Sorted: as many keys are not above as stand before the first that is.
        keys.iter().map(|k| usize::from(*k <= key)).sum()
    }
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
        __m256i, _mm256_castsi256_pd, _mm256_cmpgt_epi64, _mm256_loadu_si256, _mm256_movemask_pd,
        _mm256_set1_epi64x, _mm256_xor_si256,
    };

    use super::{LANES, Search};

    /// x86-64 with AVX2. Use it only where [`available`] says so.
    pub(in crate::tree) struct Avx2;

    #[inline(always)]
    pub(in crate::tree) fn available() -> bool {
        cfg!(target_feature = "avx2") || std::arch::is_x86_feature_detected!("avx2")
    }

    impl Search for Avx2 {
        #[inline(always)]
        fn first_above(keys: &[u64; LANES], key: u64) -> usize {
            // SAFETY: whoever names `Avx2` has asked `available`.
            unsafe { first_above(keys, key) }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn first_above(keys: &[u64; LANES], key: u64) -> usize {
        // AVX2 compares signed numbers: flip the sign bit of both sides.
        let flip = _mm256_set1_epi64x(i64::MIN);
        let needle = _mm256_set1_epi64x(key.cast_signed() ^ i64::MIN);
        let mut mask = 0;
        for (i, four) in keys.as_chunks::<4>().0.iter().enumerate() {
            // SAFETY: an unaligned load of the 32 bytes that `four` is.
            let four = unsafe { _mm256_loadu_si256(four.as_ptr().cast::<__m256i>()) };
            let above = _mm256_cmpgt_epi64(_mm256_xor_si256(four, flip), needle);
            mask |= _mm256_movemask_pd(_mm256_castsi256_pd(above)) << (4 * i);
        }
        // A bit beyond the last lane: none above.
        (mask | 1 << LANES).trailing_zeros() as usize
    }
}
