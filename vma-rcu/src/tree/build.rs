//! Bulk build: a tree from a sorted sequence, level by level, in linear time.

use std::ops::Range;

use super::write::Writer;
use super::{EditError, RangeTree, Record};

impl<T: Record> RangeTree<T> {
    /// Replaces the whole content by `entries`, sorted and disjoint, in one publish. Linear time; nodes
    /// are filled evenly, to the last one.
    ///
    /// # Errors
    ///
    /// As for [`Transaction::splice`](super::Transaction::splice); the tree is then as it was.
    ///
    /// # Panics
    ///
    /// When `writer` is another tree's.
    pub fn build(
        &self,
        writer: &mut Writer<T>,
        entries: impl IntoIterator<Item = (Range<u64>, T)>,
    ) -> Result<(), EditError> {
        let mut transaction = self.write(writer);
        transaction.splice(0..super::MAX_END, entries)?;
        transaction.prepare()?.commit();
        Ok(())
    }
}
