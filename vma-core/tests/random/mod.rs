//! Random choices of stress tests, and how long they go on.

#![allow(dead_code, reason = "each test uses a part")]

use std::time::Duration;

/// xorshift: a sequence is known by its seed.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// `VMA_STRESS_SECONDS`, or one second.
pub(crate) fn stress_time() -> Duration {
    let seconds = std::env::var("VMA_STRESS_SECONDS").ok();
    Duration::from_secs(seconds.map_or(1, |text| text.parse().unwrap()))
}
