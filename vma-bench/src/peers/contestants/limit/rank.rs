//! The rank of an address among the sixteen sorted keys of a node, as fast as the machine has it.
//!
//! Keys and addresses are below 2^63, so that signed comparisons and the sign of a difference are right.

#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "vector instructions")
)]

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

/// Number of keys that are at most `addr`.
#[inline(always)]
pub(super) fn rank(keys: &Keys, addr: u64) -> usize {
    #[cfg(all(target_arch = "x86_64", target_feature = "avx2"))]
    // SAFETY: the whole program is compiled for AVX2 (and the count that comes with every such processor).
    return unsafe { avx2(keys, addr) };
    #[cfg(all(target_arch = "x86_64", not(target_feature = "avx2")))]
    // SAFETY: SSE2 is part of x86-64.
    return unsafe { sse2(keys, addr) };
    #[cfg(not(target_arch = "x86_64"))]
    keys.0.iter().map(|&key| usize::from(key <= addr)).sum()
}

/// Four comparisons of four; halves packed until one byte mask remains, in which each key has two bits.
#[cfg(all(target_arch = "x86_64", target_feature = "avx2"))]
#[target_feature(enable = "avx2,popcnt")]
#[inline]
fn avx2(keys: &Keys, addr: u64) -> usize {
    use std::arch::x86_64::{
        _mm256_cmpgt_epi64, _mm256_movemask_epi8, _mm256_packs_epi16, _mm256_packs_epi32,
        _mm256_set_epi64x, _mm256_set1_epi64x,
    };
    let needle = _mm256_set1_epi64x(addr.cast_signed());
    let above = |&[a, b, c, d]: &[u64; 4]| {
        let [a, b, c, d] = [a, b, c, d].map(u64::cast_signed);
        _mm256_cmpgt_epi64(_mm256_set_epi64x(d, c, b, a), needle)
    };
    let [a, b, c, d] = keys.0.as_chunks::<4>().0 else {
        return 0;
    };
    let low = _mm256_packs_epi32(above(a), above(b));
    let high = _mm256_packs_epi32(above(c), above(d));
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
        _mm_castps_si128, _mm_castsi128_ps, _mm_movemask_epi8, _mm_packs_epi16, _mm_packs_epi32,
        _mm_set_epi64x, _mm_set1_epi64x, _mm_shuffle_ps, _mm_sub_epi64,
    };
    let needle = _mm_set1_epi64x(addr.cast_signed());
    let difference = |low: u64, high: u64| {
        let two = _mm_set_epi64x(high.cast_signed(), low.cast_signed());
        _mm_castsi128_ps(_mm_sub_epi64(needle, two))
    };
    // The upper halves of four differences: their signs.
    let signs = |&[a, b, c, d]: &[u64; 4]| {
        _mm_castps_si128(_mm_shuffle_ps::<0b11_01_11_01>(
            difference(a, b),
            difference(c, d),
        ))
    };
    let [a, b, c, d] = keys.0.as_chunks::<4>().0 else {
        return 0;
    };
    let low = _mm_packs_epi32(signs(a), signs(b));
    let high = _mm_packs_epi32(signs(c), signs(d));
    let mask = _mm_movemask_epi8(_mm_packs_epi16(low, high));
    (mask | 1 << FANOUT).trailing_zeros() as usize
}
