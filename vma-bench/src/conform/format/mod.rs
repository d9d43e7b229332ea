//! The format of the vectors: one JSON object per line, read into types that refuse what they don't know.

mod case;
mod fields;
mod op;
mod result;
mod validate;
mod word;

pub(super) use self::{
    case::{Case, FileSpec, SpaceKind},
    op::{Call, LayoutMark, Mode, Op, Piece},
    result::{Counters, Outcome},
    word::At,
};

/// Bytes per page in all vectors.
pub(super) const PAGE: u64 = 4096;

/// First address that isn't the user's (`TASK_SIZE`).
pub(super) const TASK_SIZE: u64 = 0x7fff_ffff_f000;
