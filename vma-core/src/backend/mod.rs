//! What a mapping *does*: the seam between bookkeeping and memory.

use crate::error::PublishError;
use crate::flags::VmaFlags;

/// One range whose content of VMAs a call replaces, as the backend sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte.
    pub start: u64,
    /// First byte after it.
    pub end: u64,
    /// Attributes that the range gets.
    pub flags: VmaFlags,
}

/// Backing of a space. `()` is pure bookkeeping, at no cost.
///
/// All methods but [`zap`](Backend::zap) are called with the space's lock held exclusively; none may call
/// into the space. A failed `prepare` leaves everything as it was.
pub trait Backend: Send + Sync + 'static {
    /// Whether the backend wants to be told. `false` compiles the calls away.
    const ACTIVE: bool = true;

    /// Does what can fail for a range that is about to hold `pieces` (sorted, disjoint, inside it).
    ///
    /// # Errors
    /// [`PublishError`]: the call fails with `ENOMEM` and changes nothing.
    fn prepare(&self, start: u64, end: u64, pieces: &[Piece]) -> Result<(), PublishError>;

    /// Makes it so. Called once per successful `prepare`, or not at all. What a new mapping replaces in
    /// place is the backend's to drop here; a piece doesn't say yet whether it is new.
    fn commit(&self, start: u64, end: u64, pieces: &[Piece]);

    /// Frees what lay in a range that is no longer mapped. Called after the lock was let go.
    fn zap(&self, start: u64, end: u64);
}

impl Backend for () {
    const ACTIVE: bool = false;

    fn prepare(&self, _start: u64, _end: u64, _pieces: &[Piece]) -> Result<(), PublishError> {
        Ok(())
    }

    fn commit(&self, _start: u64, _end: u64, _pieces: &[Piece]) {}

    fn zap(&self, _start: u64, _end: u64) {}
}
