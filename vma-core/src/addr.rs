//! Addresses, page arithmetic and ranges that were checked once.
//!
//! System calls take raw `u64`s. The first stage of each call turns them into a [`VmRange`] by way of
//! [`Pages`], after which no arithmetic can wrap.

use std::fmt;

/// A half-open, page-aligned range of addresses, `start < end`, inside the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VmRange {
    /// First byte.
    pub start: u64,
    /// First byte after it.
    pub end: u64,
}

impl VmRange {
    pub(crate) const fn new(start: u64, end: u64) -> Self {
        VmRange { start, end }
    }

    /// Bytes.
    pub const fn len(self) -> u64 {
        self.end - self.start
    }

    /// Never true of a range that a call returns.
    pub const fn is_empty(self) -> bool {
        self.start >= self.end
    }

    /// Whether `addr` lies inside.
    pub const fn contains(self, addr: u64) -> bool {
        self.start <= addr && addr < self.end
    }

    /// Whether the two have a byte in common.
    pub const fn intersects(self, other: VmRange) -> bool {
        self.start < other.end && other.start < self.end
    }
}

impl fmt::Display for VmRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}-{:#x}", self.start, self.end)
    }
}

/// Arithmetic in units of one page size (a power of two).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pages {
    shift: u32,
}

impl Pages {
    /// `page_size` is a power of two; the configuration checked it.
    pub(crate) const fn new(page_size: u64) -> Self {
        Pages {
            shift: page_size.trailing_zeros(),
        }
    }

    pub(crate) const fn size(self) -> u64 {
        1 << self.shift
    }

    pub(crate) const fn mask(self) -> u64 {
        self.size() - 1
    }

    pub(crate) const fn is_aligned(self, value: u64) -> bool {
        value & self.mask() == 0
    }

    /// Down to a page boundary.
    pub(crate) const fn floor(self, value: u64) -> u64 {
        value & !self.mask()
    }

    /// Up to a page boundary, wrapping to 0 at the top as Linux's `PAGE_ALIGN`.
    pub(crate) const fn ceil_wrapping(self, value: u64) -> u64 {
        self.floor(value.wrapping_add(self.mask()))
    }

    /// Whole pages in a number of bytes.
    pub(crate) const fn count(self, bytes: u64) -> u64 {
        bytes >> self.shift
    }

    /// Bytes of a number of pages; the number came from `count`, or is capped.
    pub(crate) const fn bytes(self, pages: u64) -> u64 {
        pages << self.shift
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn rounding_up_wraps_to_zero_at_the_top() {
        let pages = Pages::new(4096);
        assert_eq!(pages.ceil_wrapping(0), 0);
        assert_eq!(pages.ceil_wrapping(1), 4096);
        assert_eq!(pages.ceil_wrapping(4096), 4096);
        assert_eq!(pages.ceil_wrapping(u64::MAX - 4094), 0);
        assert_eq!(pages.ceil_wrapping(u64::MAX), 0);
    }

    #[test]
    fn ranges_that_touch_do_not_intersect() {
        let low = VmRange::new(0, 4096);
        let high = VmRange::new(4096, 8192);
        assert!(!low.intersects(high) && !high.intersects(low));
        assert!(low.contains(4095) && !low.contains(4096));
    }
}
