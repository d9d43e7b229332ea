//! The rank of an address among the sixteen sorted keys of a node, as fast as the machine has it.
//!
//! Keys and addresses are below 2^63, so that signed comparisons and the sign of a difference are right.

#![cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "vector loads, and AVX2 found at run time"))]

/// Keys of a node.
pub(super) const FANOUT: usize = 16;
/// Past every address.
const PAD: u64 = u64::MAX >> 1;

/// Sixteen sorted keys, two cache lines.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Keys([u64; FANOUT]);

impl Keys {
    /// At most sixteen ascending keys, and padding.
    pub(super) fn padded(keys: impl Iterator<Item = u64>) -> Self {
        let mut padded = [PAD; FANOUT];
        for (slot, key) in padded.iter_mut().zip(keys) {
            *slot = key;
        }
        Self(padded)
    }

    pub(super) fn first(&self) -> u64 {
        self.0[0]
    }

    #[inline(always)]
    pub(super) fn get(&self, index: usize) -> u64 {
        self.0[index & (FANOUT - 1)]
    }
}

pub(super) use ranker::Ranker;

/// Compiled for AVX2: no detection, inlined.
#[cfg(all(target_arch = "x86_64", target_feature = "avx2"))]
mod ranker {
    use super::Keys;

    #[derive(Debug, Clone, Copy)]
    pub(in super::super) struct Ranker;

    impl Ranker {
        pub(in super::super) fn new() -> Self {
            Self
        }

        /// Number of keys that are at most `addr`.
        #[inline(always)]
        pub(in super::super) fn rank(self, keys: &Keys, addr: u64) -> usize {
            // SAFETY: the whole program is compiled for AVX2.
            unsafe { super::avx2(keys, addr) }
        }
    }
}

/// Plain x86-64.
#[cfg(all(target_arch = "x86_64", not(target_feature = "avx2")))]
mod ranker {
    use super::Keys;

    #[derive(Debug, Clone, Copy)]
    pub(in super::super) struct Ranker;

    impl Ranker {
        pub(in super::super) fn new() -> Self {
            Self
        }

        /// Number of keys that are at most `addr`.
        #[inline(always)]
        pub(in super::super) fn rank(self, keys: &Keys, addr: u64) -> usize {
            // SAFETY: SSE2 is part of x86-64.
            unsafe { super::sse2(keys, addr) }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod ranker {
    use super::Keys;

    #[derive(Debug, Clone, Copy)]
    pub(in super::super) struct Ranker;

    impl Ranker {
        pub(in super::super) fn new() -> Self {
            Self
        }

        /// Number of keys that are at most `addr`.
        #[inline(always)]
        pub(in super::super) fn rank(self, keys: &Keys, addr: u64) -> usize {
            keys.0.iter().map(|&key| usize::from(key <= addr)).sum()
        }
    }
}

/// Four comparisons of four; halves packed until one byte mask remains, in which each key has two bits.
#[cfg(all(target_arch = "x86_64", target_feature = "avx2"))]
#[target_feature(enable = "avx2,popcnt")]
#[inline]
fn avx2(keys: &Keys, addr: u64) -> usize {
    use std::arch::x86_64::{
        __m256i, _mm256_cmpgt_epi64, _mm256_load_si256, _mm256_movemask_epi8, _mm256_packs_epi16, _mm256_packs_epi32,
        _mm256_set1_epi64x,
    };
    let needle = _mm256_set1_epi64x(addr as i64);
    let above = |i: usize| {
        // SAFETY: `4 * i + 4 <= 16` keys, and `Keys` is aligned to 64 bytes.
        let four = unsafe { _mm256_load_si256(keys.0.as_ptr().add(4 * i).cast::<__m256i>()) };
        _mm256_cmpgt_epi64(four, needle)
    };
    let low = _mm256_packs_epi32(above(0), above(1));
    let high = _mm256_packs_epi32(above(2), above(3));
    let mask = _mm256_movemask_epi8(_mm256_packs_epi16(low, high));
    FANOUT - (mask.count_ones() / 2) as usize
}

/// SSE2 has no 64-bit comparison: the sign of the difference stands for it. The packs keep the order, and so the first
/// set bit is the first key above.
#[cfg(all(target_arch = "x86_64", not(target_feature = "avx2")))]
#[target_feature(enable = "sse2")]
#[inline]
fn sse2(keys: &Keys, addr: u64) -> usize {
    use std::arch::x86_64::{
        __m128i, _mm_castps_si128, _mm_castsi128_ps, _mm_load_si128, _mm_movemask_epi8, _mm_packs_epi16,
        _mm_packs_epi32, _mm_set1_epi64x, _mm_shuffle_ps, _mm_sub_epi64,
    };
    let needle = _mm_set1_epi64x(addr as i64);
    let difference = |i: usize| {
        // SAFETY: `2 * i + 2 <= 16` keys, and `Keys` is aligned to 64 bytes.
        let two = unsafe { _mm_load_si128(keys.0.as_ptr().add(2 * i).cast::<__m128i>()) };
        _mm_castsi128_ps(_mm_sub_epi64(needle, two))
    };
    // The upper halves of four differences: their signs.
    let signs = |i: usize| _mm_castps_si128(_mm_shuffle_ps::<0b11_01_11_01>(difference(i), difference(i + 1)));
    let low = _mm_packs_epi32(signs(0), signs(2));
    let high = _mm_packs_epi32(signs(4), signs(6));
    let mask = _mm_movemask_epi8(_mm_packs_epi16(low, high));
    (mask | 1 << FANOUT).trailing_zeros() as usize
}
