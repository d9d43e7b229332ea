//! The set beside a list, with nodes of four; the checker after each edit.
#![allow(clippy::unwrap_used, reason = "tests may")]

use proptest::prelude::*;

use super::*;

impl<V> IntervalSet<V> {
    /// X1 to X5.
    fn check(&self) {
        if self.len == 0 {
            assert_eq!((self.leaves.taken(), self.directories.taken()), (0, 0));
            return;
        }
        let (mut entries, mut leaves, mut directories) = (0, 0, 0);
        let bounds = (0, Key::MAX);
        let mut visit = |leaf: &Leaf<V>, (low, high): (Key, Key)| {
            leaves += 1;
            entries += leaf.len();
            for at in 0..LEAF {
                assert_eq!(leaf.get(at).is_some(), at < leaf.len());
            }
            for (interval, _) in leaf.entries() {
                assert!(low <= interval.key() && interval.key() <= high, "X1, X2");
            }
        };
        self.check_below(self.root, self.height, bounds, &mut visit, &mut directories);
        assert_eq!(entries, self.len);
        assert_eq!(
            (self.leaves.taken(), self.directories.taken()),
            (leaves, directories)
        );
    }

    fn check_below(
        &self,
        id: u32,
        height: u32,
        bounds: (Key, Key),
        visit: &mut impl FnMut(&Leaf<V>, (Key, Key)),
        directories: &mut usize,
    ) {
        assert!(self.count(id, height) > 0, "X4");
        if height == 0 {
            return visit(self.leaves.get(id), bounds);
        }
        *directories += 1;
        let directory = self.directories.get(id);
        for at in 0..directory.len {
            let child = directory.children[at];
            assert_eq!(
                directory.ends[at],
                self.greatest_end(child, height - 1),
                "X3"
            );
            let low = if at > 0 {
                directory.separators[at]
            } else {
                bounds.0
            };
            let next = directory.separators[..directory.len].get(at + 1);
            let high = next.map_or(bounds.1, |next| *next);
            self.check_below(child, height - 1, (low, high), visit, directories);
        }
    }

    fn make_room(&mut self, entries: usize) {
        while let Some(need) = self.needs(entries) {
            drop(self.add(need.allocate().unwrap()));
        }
    }

    fn found(&self, range: (u64, u64), after: Cursor) -> Vec<Interval> {
        let mut found = Vec::new();
        self.overlapping(range, after, |interval, _| {
            found.push(interval);
            ControlFlow::Continue(())
        });
        found
    }
}

type Item = (Interval, u8);

fn interval(first: u64, tie: u64, len: u64) -> Interval {
    let end = first.saturating_add(len);
    Interval { first, tie, end }
}

/// Few places, so that they meet, and both ends of what there can be.
fn intervals() -> impl Strategy<Value = Interval> {
    let first = prop_oneof![8 => 0..12_u64, 1 => u64::MAX - 4..u64::MAX - 1];
    let len = prop_oneof![6 => 1..4_u64, 2 => 4..30_u64, 1 => Just(u64::MAX)];
    (first, 0..3_u64, len).prop_map(|(first, tie, len)| interval(first, tie, len))
}

#[derive(Clone, Debug)]
enum Edit {
    Insert(Interval, u8),
    /// The one of this number.
    Remove(prop::sample::Index),
    Miss(Interval),
    Query(u64, u64),
    /// All of some that walks in small steps see while others come and go.
    Walk(u64, u64, Vec<Interval>),
}

fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let edit = prop_oneof![
        6 => (intervals(), 0..3_u8).prop_map(|(interval, value)| Edit::Insert(interval, value)),
        5 => any::<prop::sample::Index>().prop_map(Edit::Remove),
        1 => intervals().prop_map(Edit::Miss),
        2 => (0..14_u64, 0..14_u64).prop_map(|(first, end)| Edit::Query(first, end)),
        1 => (0..14_u64, 0..14_u64, prop::collection::vec(intervals(), 0..12))
            .prop_map(|(first, end, others)| Edit::Walk(first, end, others)),
    ];
    prop::collection::vec(edit, 0..300)
}

fn sorted(list: &[Item], first: u64, end: u64) -> Vec<(Key, u64)> {
    let mut found: Vec<_> = list
        .iter()
        .filter(|(interval, _)| first < end && interval.first < end && interval.end > first)
        .map(|(interval, _)| (interval.key(), interval.end))
        .collect();
    found.sort_unstable();
    found
}

/// A walk of steps of two, between which others come and go, sees all that stay.
fn walk(set: &mut IntervalSet<u8>, list: &[Item], (first, end): (u64, u64), others: &[Interval]) {
    let mut others = others.iter();
    let (mut seen, mut after, mut guests) = (Vec::new(), Cursor::default(), Vec::new());
    loop {
        let mut left = 2;
        let mut is_last = true;
        set.overlapping((first, end), after, |interval, _| {
            if !after.is_at(interval) {
                if left == 0 {
                    is_last = false;
                    return ControlFlow::Break(());
                }
                left -= 1;
            }
            after = Cursor::behind(interval);
            seen.push((interval.key(), interval.end));
            ControlFlow::Continue(())
        });
        if is_last {
            break;
        }
        for guest in others.by_ref().take(2) {
            set.make_room(1);
            set.insert(*guest, 9);
            guests.push(*guest);
        }
        if guests.len() > 3 {
            let gone = guests.remove(0);
            set.remove(gone, |value| *value == 9).unwrap();
        }
        set.check();
    }
    for guest in guests {
        set.remove(guest, |value| *value == 9).unwrap();
    }
    for stays in sorted(list, first, end) {
        let at = seen.iter().position(|other| *other == stays);
        seen.swap_remove(at.unwrap_or_else(|| panic!("{stays:?} was passed over")));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn it_is_what_a_list_is(edits in edits()) {
        let mut set = IntervalSet::new();
        let mut list: Vec<Item> = Vec::new();
        for edit in &edits {
            match edit {
                Edit::Insert(interval, value) => {
                    set.make_room(1);
                    set.insert(*interval, *value);
                    list.push((*interval, *value));
                }
                Edit::Remove(index) => if !list.is_empty() {
                    let (interval, value) = list.swap_remove(index.index(list.len()));
                    prop_assert_eq!(set.remove(interval, |other| *other == value), Some(value));
                },
                Edit::Miss(interval) => {
                    prop_assert_eq!(set.remove(*interval, |value| *value == 7), None);
                }
                Edit::Query(first, end) => {
                    let found = set.found((*first, *end), Cursor::default());
                    let mut found: Vec<_> = found.iter().map(|interval| (interval.key(), interval.end)).collect();
                    prop_assert!(found.is_sorted_by_key(|(key, _)| *key));
                    found.sort_unstable();
                    prop_assert_eq!(found, sorted(&list, *first, *end));
                }
                Edit::Walk(first, end, others) => walk(&mut set, &list, (*first, *end), others),
            }
            set.check();
            prop_assert_eq!(set.len(), list.len());
        }
        for (interval, value) in list {
            prop_assert_eq!(set.remove(interval, |other| *other == value), Some(value));
            set.check();
        }
        prop_assert_eq!(set.len(), 0);
        prop_assert!(set.take_memory().is_some() || edits.is_empty() || set.leaves.is_empty());
    }
}

/// Room that was made is enough, wherever the entries go.
#[test]
fn room_for_many_lasts_for_many() {
    for order in 0..3_u64 {
        let mut set = IntervalSet::new();
        for batch in 0..50_u64 {
            set.make_room(64);
            for i in 0..64 {
                let at = batch * 64 + i;
                let first = match order {
                    0 => at,
                    1 => u64::MAX / 2 - at,
                    _ => at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 8,
                };
                set.insert(interval(first, 0, 1), ());
            }
            set.check();
        }
        assert_eq!(set.len(), 3200);
    }
}

#[test]
fn memory_of_an_empty_set_is_handed_out_once() {
    let mut set = IntervalSet::new();
    assert!(set.take_memory().is_none());
    set.make_room(1);
    set.insert(interval(1, 1, 1), ());
    assert!(set.take_memory().is_none());
    set.remove(interval(1, 1, 1), |()| true).unwrap();
    assert!(set.take_memory().is_some());
    assert!(set.take_memory().is_none());
}
