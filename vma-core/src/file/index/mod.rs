//! stub
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Interval {
    pub(crate) first: u64,
    pub(crate) tie: u64,
    pub(crate) end: u64,
}
pub(crate) struct IntervalSet<V>(Vec<(Interval, V)>);
impl<V> IntervalSet<V> {
    pub(crate) fn new() -> Self {
        IntervalSet(Vec::new())
    }
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
    pub(crate) fn needs(&self, _n: usize) -> usize {
        0
    }
    pub(crate) fn insert(&mut self, i: Interval, v: V) {
        self.0.push((i, v));
        self.0.sort_by_key(|e| e.0);
    }
    pub(crate) fn remove(&mut self, i: Interval, is: impl Fn(&V) -> bool) -> Option<V> {
        let at = self.0.iter().position(|e| e.0 == i && is(&e.1))?;
        Some(self.0.remove(at).1)
    }
    pub(crate) fn overlapping(
        &self,
        first: u64,
        end: u64,
        after: Option<Interval>,
        mut f: impl FnMut(Interval, &V) -> bool,
    ) {
        for (i, v) in &self.0 {
            if i.first < end && i.end > first && after.is_none_or(|a| *i > a) && !f(*i, v) {
                return;
            }
        }
    }
}
