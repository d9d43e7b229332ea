//! What is done to all lanes of a leaf at once: entries moved aside, the largest gap.
//!
//! Where an entry comes or goes in a leaf is anybody's guess, and a loop whose length depends on it costs a
//! mispredicted branch beside its work. With AVX2 all lanes are done, without a branch.

use super::Record;
use super::node::{LANES, LEAF_CAP, Leaf, PAD, Slot, max_gap_with};
use super::search::{Portable, Search};

/// How to do it; a type parameter as [`Search`] is, and for the same reason.
pub(super) trait Lanes: Search {
    /// Copies the lanes of `old` to `out`: those from `to` on to `rest` and on, those below `rest` to where they
    /// are. What is free behind them is unused afterwards.
    fn splice<T>(out: &mut Leaf<T>, old: &Leaf<T>, to: usize, rest: usize);

    /// [`Leaf::max_gap`] of a whole leaf.
    fn max_gap<T: Record>(leaf: &Leaf<T>, lo: u64) -> u64;

    /// [`max_gap_with`].
    fn max_with(gaps: &[u64; LANES], i: usize, gap: u64) -> u64;
}

impl Lanes for Portable {
    #[inline(always)]
    fn splice<T>(out: &mut Leaf<T>, old: &Leaf<T>, to: usize, rest: usize) {
        splice(out, old, to, rest);
    }

    #[inline(always)]
    fn max_gap<T: Record>(leaf: &Leaf<T>, lo: u64) -> u64 {
        leaf.max_gap(lo, leaf.len())
    }

    #[inline(always)]
    fn max_with(gaps: &[u64; LANES], i: usize, gap: u64) -> u64 {
        max_gap_with(gaps, i, gap)
    }
}

/// [`Lanes::splice`] lane by lane.
#[inline(always)]
fn splice<T>(out: &mut Leaf<T>, old: &Leaf<T>, to: usize, rest: usize) {
    out.ends = old.ends;
    // In halves, which are moved in registers; the whole would be a call.
    let (low, high) = out.slots.split_at_mut(LEAF_CAP / 2);
    low.copy_from_slice(&old.slots[..LEAF_CAP / 2]);
    high.copy_from_slice(&old.slots[LEAF_CAP / 2..]);
    if rest == to {
        return;
    }
    // One loop over both: copies of a few words aren't worth two calls.
    let tail = LEAF_CAP - rest.max(to);
    let (ends, slots) = (&old.ends[to..to + tail], &old.slots[to..to + tail]);
    let into = out.ends[rest..].iter_mut().zip(&mut out.slots[rest..]);
    for ((end, slot), from) in into.zip(ends.iter().zip(slots)) {
        (*end, *slot) = (*from.0, *from.1);
    }
    for i in rest + tail..LEAF_CAP {
        out.ends[i] = PAD;
        out.slots[i] = Slot::UNUSED;
    }
}

#[cfg(all(target_arch = "x86_64", not(any(test, loom, small_nodes))))]
mod avx2 {
    use std::arch::x86_64::{
        __m128i, __m256i, _mm_cvtsi128_si64, _mm_loadu_si128, _mm_storeu_si128,
        _mm256_andnot_si256, _mm256_blendv_epi8, _mm256_broadcastsi128_si256,
        _mm256_castsi128_si256, _mm256_castsi256_si128, _mm256_cmpeq_epi64, _mm256_cmpgt_epi64,
        _mm256_extracti128_si256, _mm256_inserti128_si256, _mm256_loadu_si256,
        _mm256_permute4x64_epi64, _mm256_set_epi64x, _mm256_set1_epi64x, _mm256_storeu_si256,
        _mm256_sub_epi64, _mm256_unpacklo_epi64, _mm256_xor_si256,
    };

    use super::{LANES, LEAF_CAP, Lanes, Leaf, PAD, Record, Slot};
    use crate::tree::search::Avx2;

    impl Lanes for Avx2 {
        #[inline(always)]
        fn splice<T>(out: &mut Leaf<T>, old: &Leaf<T>, to: usize, rest: usize) {
            match rest.wrapping_sub(to).cast_signed() {
                // SAFETY: whoever names `Avx2` has asked `available`.
                1 => unsafe { shift::<T, 1>(out, old, rest) },
                // SAFETY: as above.
                -1 => unsafe { shift::<T, -1>(out, old, rest) },
                // SAFETY: as above.
                2 => unsafe { shift::<T, 2>(out, old, rest) },
                // SAFETY: as above.
                -2 => unsafe { shift::<T, -2>(out, old, rest) },
                _ => super::splice(out, old, to, rest),
            }
        }

        #[inline(always)]
        fn max_gap<T: Record>(leaf: &Leaf<T>, lo: u64) -> u64 {
            if leaf.guarded != 0 {
                return leaf.max_gap(lo, leaf.len());
            }
            // SAFETY: as above.
            unsafe { max_gap(leaf, lo) }
        }

        #[inline(always)]
        fn max_with(gaps: &[u64; LANES], i: usize, gap: u64) -> u64 {
            // SAFETY: as above.
            unsafe { max_with(gaps, i, gap) }
        }
    }

    /// `k < rest`: lane `k` of `old`; else its lane `k - BY`.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn shift<T, const BY: isize>(out: &mut Leaf<T>, old: &Leaf<T>, rest: usize) {
        let rest = _mm256_set1_epi64x(rest.cast_signed() as i64);
        for (i, four) in out.ends.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let k = 4 * i.cast_signed();
            let stays = _mm256_cmpgt_epi64(rest, lanes([k, k + 1, k + 2, k + 3]));
            let ends = choose(ends(&old.ends, k), ends(&old.ends, k - BY), stays);
            // SAFETY: an unaligned store to the 32 bytes that `four` is.
            unsafe { _mm256_storeu_si256((&raw mut *four).cast(), ends) };
        }
        let (pairs, last) = out.slots.as_chunks_mut::<2>();
        for (i, two) in pairs.iter_mut().enumerate() {
            let k = 2 * i.cast_signed();
            let stays = _mm256_cmpgt_epi64(rest, lanes([k, k, k + 1, k + 1]));
            let slots = choose(slots(&old.slots, k), slots(&old.slots, k - BY), stays);
            // SAFETY: an unaligned store to the 32 bytes that `two` is.
            unsafe { _mm256_storeu_si256((&raw mut *two).cast(), slots) };
        }
        for slot in last {
            let k = LEAF_CAP.cast_signed() - 1;
            let stays = _mm256_cmpgt_epi64(rest, lanes([k; 4]));
            let slots = choose(slots(&old.slots, k), slots(&old.slots, k - BY), stays);
            let low = _mm256_castsi256_si128(slots);
            // SAFETY: an unaligned store to the 16 bytes that `slot` is.
            unsafe { _mm_storeu_si128((&raw mut *slot).cast(), low) };
        }
    }

    /// Four ends from lane `k` on. There is nothing below the first lane, and `PAD` above the last.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn ends(ends: &[u64; LANES], k: isize) -> __m256i {
        let last = LANES.cast_signed() - 1;
        if let 0..=12 = k {
            let four = &ends[k.cast_unsigned()..][..4];
            // SAFETY: an unaligned load of the 32 bytes that `four` is.
            unsafe { _mm256_loadu_si256(four.as_ptr().cast()) }
        } else {
            let lane = |i: isize| ends[(k + i).clamp(0, last).cast_unsigned()].cast_signed();
            _mm256_set_epi64x(lane(3), lane(2), lane(1), lane(0))
        }
    }

    /// Two slots from lane `k` on. There is nothing below the first, and [`Slot::UNUSED`] above the last.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn slots<T>(slots: &[Slot<T>; LEAF_CAP], k: isize) -> __m256i {
        let last = LEAF_CAP.cast_signed() - 1;
        if k < last {
            let k = k.max(-1);
            if k < 0 {
                return _mm256_broadcastsi128_si256(slot(&slots[0]));
            }
            let two = &slots[k.cast_unsigned()..][..2];
            // SAFETY: an unaligned load of the 32 bytes that `two` is.
            unsafe { _mm256_loadu_si256(two.as_ptr().cast()) }
        } else {
            let unused = slot(&Slot::<T>::UNUSED);
            let low = if k == last {
                slot(&slots[LEAF_CAP - 1])
            } else {
                unused
            };
            _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), unused)
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn slot<T>(slot: &Slot<T>) -> __m128i {
        // SAFETY: an unaligned load of the 16 bytes that `slot` is.
        unsafe { _mm_loadu_si128((&raw const *slot).cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn lanes(k: [isize; 4]) -> __m256i {
        let lane = |i: usize| k[i] as i64;
        _mm256_set_epi64x(lane(3), lane(2), lane(1), lane(0))
    }

    /// `a` where `which` has its bits set, else `b`.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn choose(a: __m256i, b: __m256i, which: __m256i) -> __m256i {
        _mm256_blendv_epi8(b, a, which)
    }

    /// Largest gap of a leaf without start gaps.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn max_gap<T>(leaf: &Leaf<T>, lo: u64) -> u64 {
        // With the sign bit flipped, as AVX2 compares signed numbers: the least is no gap.
        let flip = _mm256_set1_epi64x(i64::MIN);
        let mut max = flip;
        for k in (0..LANES.cast_signed()).step_by(4) {
            // Lanes 0, 2, 1, 3: as the starts come out of their slots.
            let starts = _mm256_unpacklo_epi64(slots(&leaf.slots, k), slots(&leaf.slots, k + 2));
            let previous = if k == 0 {
                let lane = |i: usize| leaf.ends[i].cast_signed();
                _mm256_set_epi64x(lane(2), lane(0), lane(1), lo.cast_signed())
            } else {
                _mm256_permute4x64_epi64::<0b11_01_10_00>(ends(&leaf.ends, k - 1))
            };
            let unused = _mm256_cmpeq_epi64(starts, _mm256_set1_epi64x(PAD.cast_signed()));
            let gaps = _mm256_andnot_si256(unused, _mm256_sub_epi64(starts, previous));
            max = larger(max, _mm256_xor_si256(gaps, flip));
        }
        largest(max)
    }

    /// [`max_gap_with`](crate::tree::node::max_gap_with).
    #[inline]
    #[target_feature(enable = "avx2")]
    fn max_with(gaps: &[u64; LANES], i: usize, gap: u64) -> u64 {
        let flip = _mm256_set1_epi64x(i64::MIN);
        let i = _mm256_set1_epi64x(i.cast_signed() as i64);
        let mut max = _mm256_set1_epi64x(gap.cast_signed() ^ i64::MIN);
        for k in (0..LANES.cast_signed()).step_by(4) {
            let replaced = _mm256_cmpeq_epi64(i, lanes([k, k + 1, k + 2, k + 3]));
            let others = _mm256_andnot_si256(replaced, ends(gaps, k));
            max = larger(max, _mm256_xor_si256(others, flip));
        }
        largest(max)
    }

    /// The largest of four numbers whose sign bit is flipped.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn largest(four: __m256i) -> u64 {
        let two = _mm256_castsi128_si256(_mm256_extracti128_si256::<1>(four));
        let two = larger(four, two);
        let one = larger(two, _mm256_permute4x64_epi64::<0b01>(two));
        _mm_cvtsi128_si64(_mm256_castsi256_si128(one)).cast_unsigned() ^ (1 << 63)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn larger(a: __m256i, b: __m256i) -> __m256i {
        choose(a, b, _mm256_cmpgt_epi64(a, b))
    }
}
