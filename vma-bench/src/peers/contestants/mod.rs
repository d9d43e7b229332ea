//! Everything that is measured side by side.

pub mod btree;
pub mod concurrent;
pub mod left_right;
pub mod limit;
pub mod ours;
pub mod rangemap;
pub mod sorted_vec;
pub mod space;

use crate::peers::contest::{Contestant, Editable};
use crate::peers::harness::{Build, EditEntrant, Entrant, Subject};
use crate::peers::workload::Workload;

/// Name of the baseline of lookups.
pub const LOCKED_BTREE: &str = btree::StdLocked::NAME;
/// Name of the baseline of edits.
pub const BARE_BTREE: &str = btree::Bare::NAME;
/// Name of the static tree.
pub const LIMIT: &str = limit::Limit::NAME;
/// Name of this project's tree.
pub const OURS: &str = ours::Ours::NAME;

/// The structures that exist at one size.
pub struct Field<'w> {
    /// Those that only look up.
    pub readers: Vec<Box<dyn Entrant + 'w>>,
    /// Those that can also be edited.
    pub editors: Vec<Box<dyn EditEntrant + 'w>>,
}

impl std::fmt::Debug for Field<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list()
            .entries(self.all().map(|entrant| (entrant.name(), entrant.build())))
            .finish()
    }
}

impl<'w> Field<'w> {
    /// Builds everything for `workload`. Where the layout is huge the peers' bulk-built copies are left out (the memory
    /// of all together would be too much for small machines), and so is `scc::TreeIndex` (see [`concurrent::Scc`]).
    pub fn new(workload: &'w Workload) -> Self {
        let mut field = Self {
            readers: Vec::new(),
            editors: Vec::new(),
        };
        let all = workload.len() <= 100_000;
        field.reader::<limit::Limit>(workload, Build::Bulk);
        for build in [Build::Bulk, Build::Grown] {
            field.editor::<ours::Ours>(workload, build);
            field.reader::<ours::OnePin>(workload, build);
            field.editor::<btree::StdLocked>(workload, build);
            if all || build == Build::Grown {
                field.editor::<btree::ParkingLocked>(workload, build);
                field.editor::<rangemap::Locked>(workload, build);
                field.editor::<left_right::LeftRight>(workload, build);
                field.editor::<concurrent::Concurrent>(workload, build);
                field.editor::<concurrent::Skip>(workload, build);
            }
            if all {
                field.editor::<concurrent::Scc>(workload, build);
            }
        }
        if all {
            field.editor::<sorted_vec::Swapped>(workload, Build::Bulk);
        } else {
            field.reader::<sorted_vec::Swapped>(workload, Build::Bulk);
        }
        field.editor::<btree::Bare>(workload, Build::Grown);
        field
    }

    fn reader<C: Contestant + 'w>(&mut self, workload: &'w Workload, build: Build) {
        if let Some(subject) = Subject::<C>::new(workload, build) {
            self.readers.push(Box::new(subject));
        }
    }

    fn editor<C: Editable + 'w>(&mut self, workload: &'w Workload, build: Build) {
        if let Some(subject) = Subject::<C>::new(workload, build) {
            self.editors.push(Box::new(subject));
        }
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &dyn Entrant> {
        let readers = self.readers.iter().map(|entrant| &**entrant);
        readers.chain(
            self.editors
                .iter()
                .map(|entrant| &**entrant as &dyn Entrant),
        )
    }

    /// Those that are edited: grown ones, in their steady state, and whatever can't be grown. A vector of a million is
    /// left out, since each edit copies it.
    pub fn edited(&self) -> impl Iterator<Item = &dyn EditEntrant> {
        let grown = |name| {
            self.editors
                .iter()
                .any(|other| other.name() == name && other.build() == Build::Grown)
        };
        self.editors
            .iter()
            .map(|entrant| &**entrant)
            .filter(move |entrant| entrant.build() == Build::Grown || !grown(entrant.name()))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::peers::contest::{Edit, EditJob, Find, Hit, Order, ReadJob};
    use crate::peers::harness::Span;
    use crate::peers::workload::{Rec, address, thirds};

    struct FindAll<'a>(&'a [u64]);

    impl ReadJob for FindAll<'_> {
        type Out = Vec<Option<(u64, u64)>>;

        fn run(self, finder: &mut impl Find) -> Self::Out {
            self.0
                .iter()
                .map(|&addr| finder.find(addr).map(|Hit { start, end, .. }| (start, end)))
                .collect()
        }
    }

    fn probes(w: &Workload) -> Vec<u64> {
        let inside = w.pages.iter().take(500).map(|&page| address(page));
        w.entries
            .iter()
            .take(500)
            .flat_map(|e| [e.start - 1, e.start, e.end - 1, e.end])
            .chain(inside)
            .collect()
    }

    fn truth(w: &Workload, addr: u64) -> Option<(u64, u64)> {
        let at = w
            .entries
            .partition_point(|e| e.start <= addr)
            .checked_sub(1)?;
        let entry = &w.entries[at];
        entry.contains(&addr).then_some((entry.start, entry.end))
    }

    fn finds_the_truth<C: Contestant>() {
        let w = Workload::new(700);
        let probes = probes(&w);
        let want: Vec<_> = probes.iter().map(|&addr| truth(&w, addr)).collect();
        assert_eq!(C::bulk(&w).read(FindAll(&probes)), want, "{} bulk", C::NAME);
        if let Some(grown) = C::grown(&w) {
            assert_eq!(grown.read(FindAll(&probes)), want, "{} grown", C::NAME);
        }
    }

    #[derive(Clone, Copy)]
    enum Step {
        Remove,
        Insert,
        Split,
        Join,
    }

    struct EditAll<'a>(&'a Workload, Step);

    impl EditJob for EditAll<'_> {
        type Out = ();

        fn run(self, editor: &mut impl Edit) {
            for (id, range) in self.0.in_random_order().take(300) {
                let cuts = thirds(&range);
                match self.1 {
                    Step::Remove => editor.remove(&range),
                    Step::Insert => editor.insert(&range, Rec::new(id)),
                    Step::Split => {
                        editor.split(&range, cuts, [1, 2, 3].map(|k| Rec::new(id << 8 | k)));
                    }
                    Step::Join => editor.join(&range, cuts, Rec::new(id)),
                }
            }
        }
    }

    fn edits_as_told<C: Editable>() {
        let w = Workload::new(700);
        let probes = probes(&w);
        let whole: Vec<_> = probes.iter().map(|&addr| truth(&w, addr)).collect();
        let c = C::bulk(&w);
        let touched: Vec<_> = w
            .in_random_order()
            .take(300)
            .map(|(_, range)| range)
            .collect();
        let gone = |hit: Option<(u64, u64)>| {
            hit.filter(|(start, _)| touched.iter().all(|t| t.start != *start))
        };
        c.edit(EditAll(&w, Step::Remove));
        let want: Vec<_> = whole.iter().map(|&hit| gone(hit)).collect();
        assert_eq!(c.read(FindAll(&probes)), want, "{} removed", C::NAME);
        c.edit(EditAll(&w, Step::Insert));
        assert_eq!(c.read(FindAll(&probes)), whole, "{} inserted", C::NAME);
        c.edit(EditAll(&w, Step::Split));
        let parts = |addr: u64, hit: (u64, u64)| {
            let (a, b) = thirds(&(hit.0..hit.1));
            let cut = touched.iter().any(|t| t.start == hit.0);
            [(hit.0, a), (a, b), (b, hit.1)]
                .into_iter()
                .find(|p| cut && p.0 <= addr && addr < p.1)
                .unwrap_or(hit)
        };
        let want: Vec<_> = probes
            .iter()
            .zip(&whole)
            .map(|(&addr, hit)| hit.map(|hit| parts(addr, hit)))
            .collect();
        assert_eq!(c.read(FindAll(&probes)), want, "{} split", C::NAME);
        c.edit(EditAll(&w, Step::Join));
        assert_eq!(c.read(FindAll(&probes)), whole, "{} joined", C::NAME);
    }

    macro_rules! honest {
        ($($test:ident: $type:ty),+ $(,)?) => {$(
            #[test]
            fn $test() {
                finds_the_truth::<$type>();
                edits_as_told::<$type>();
            }
        )+};
    }

    honest! {
        range_tree_is_right: ours::Ours,
        bare_btree_is_right: btree::Bare,
        locked_btree_is_right: btree::StdLocked,
        parking_lot_btree_is_right: btree::ParkingLocked,
        rangemap_is_right: rangemap::Locked,
        sorted_vec_is_right: sorted_vec::Swapped,
        left_right_is_right: left_right::LeftRight,
        scc_is_right: concurrent::Scc,
        concurrent_map_is_right: concurrent::Concurrent,
        skiplist_is_right: concurrent::Skip,
    }

    #[test]
    fn limit_and_one_pin_are_right() {
        finds_the_truth::<limit::Limit>();
        finds_the_truth::<ours::OnePin>();
    }

    #[test]
    fn every_entrant_can_be_measured() {
        let w = Workload::new(100);
        let field = Field::new(&w);
        let moment = Span {
            warm_up: Duration::ZERO,
            measured: Duration::from_micros(50),
        };
        for entrant in field.all() {
            for threads in [1, 2] {
                assert!(entrant.lookups(Order::Dependent, threads, moment) > 0.0);
            }
        }
        for entrant in field.edited() {
            assert!(entrant.pairs(moment) > 0.0);
            assert!(entrant.splits(moment) > 0.0);
            if entrant.survives_writer() {
                assert!(entrant.lookups_beside_writer(moment) > 0.0);
            }
        }
    }
}
