//! The tree and its peers under criterion: the workloads of `vma-bench peers`, one contestant at a time.
//!
//! For work on one structure (`cargo bench -p vma-bench --bench tree -- RangeTree`). Ratios between contestants belong
//! to `peers`, which interleaves them.

use std::hint::black_box;
use std::ops::Range;
use std::time::{Duration, Instant};

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput};
use vma_bench::peers::contest::{Contestant, Edit, EditJob, Editable, Find, Order, ReadJob};
use vma_bench::peers::contestants::{
    btree, concurrent, left_right, limit, ours, rangemap, sorted_vec,
};
use vma_bench::peers::workload::{Rec, Workload, address, thirds};
use vma_rcu::tree::GapRequest;

const SIZES: [usize; 3] = [1_000, 10_000, 100_000];

/// `iters` lookups, timed.
struct Lookups<'a>(&'a Workload, Order, u64);

impl ReadJob for Lookups<'_> {
    type Out = Duration;

    fn run(self, finder: &mut impl Find) -> Duration {
        let Self(workload, order, iters) = self;
        let mask = match order {
            Order::Independent => 0,
            // Zero, which the compiler can't know.
            Order::Dependent => black_box(0),
        };
        let mut found = 0;
        let begin = Instant::now();
        for (&page, _) in workload.pages.iter().cycle().zip(0..iters) {
            let addr = address(page) ^ (found & mask);
            let hit = finder.find(addr);
            found = hit.map_or(0, |hit| hit.start ^ hit.end ^ hit.record as u64);
            black_box(found);
        }
        begin.elapsed()
    }
}

/// `iters` edits of one kind, timed.
struct Edits<'a, F>(&'a Workload, u64, F);

impl<F: EditOne> EditJob for Edits<'_, F> {
    type Out = Duration;

    fn run(self, editor: &mut impl Edit) -> Duration {
        let Self(workload, iters, _) = self;
        let begin = Instant::now();
        for (&pick, _) in workload.picks.iter().cycle().zip(0..iters) {
            F::edit(editor, u64::from(pick), &workload.entries[pick as usize]);
        }
        begin.elapsed()
    }
}

trait EditOne {
    const NAME: &'static str;
    fn edit(editor: &mut impl Edit, id: u64, range: &Range<u64>);
}

struct Pair;

impl EditOne for Pair {
    const NAME: &'static str = "remove+insert";

    #[inline(always)]
    fn edit(editor: &mut impl Edit, id: u64, range: &Range<u64>) {
        editor.remove(range);
        editor.insert(range, Rec::new(id));
    }
}

struct SplitAndBack;

impl EditOne for SplitAndBack {
    const NAME: &'static str = "split+back";

    #[inline(always)]
    fn edit(editor: &mut impl Edit, id: u64, range: &Range<u64>) {
        let cuts = thirds(range);
        editor.split(
            range,
            cuts,
            [0, 1 << 40, 1 << 41].map(|part| Rec::new(part | id)),
        );
        editor.join(range, cuts, Rec::new(id));
    }
}

fn lookups<C: Contestant>(c: &mut Criterion) {
    for order in [Order::Independent, Order::Dependent] {
        let mut group = c.benchmark_group(format!("lookup/{}", order.name()));
        group.throughput(Throughput::Elements(1));
        for size in SIZES {
            let workload = Workload::new(size);
            let contestant = C::grown(&workload).unwrap_or_else(|| C::bulk(&workload));
            group.bench_with_input(BenchmarkId::new(C::NAME, size), &workload, |b, workload| {
                b.iter_custom(|iters| contestant.read(Lookups(workload, order, iters)));
            });
        }
    }
}

fn edits<C: Editable, F: EditOne>(c: &mut Criterion, make: impl Fn() -> F) {
    let mut group = c.benchmark_group(F::NAME);
    for size in SIZES {
        let workload = Workload::new(size);
        let contestant = C::grown(&workload).unwrap_or_else(|| C::bulk(&workload));
        group.bench_with_input(BenchmarkId::new(C::NAME, size), &workload, |b, workload| {
            b.iter_custom(|iters| contestant.edit(Edits(workload, iters, make())));
        });
    }
}

fn builds<C: Contestant>(c: &mut Criterion) {
    let mut group = c.benchmark_group("bulk build");
    for size in SIZES {
        let workload = Workload::new(size);
        group.throughput(Throughput::Elements(size as u64));
        group.bench_with_input(BenchmarkId::new(C::NAME, size), &workload, |b, workload| {
            b.iter_batched(|| (), |()| C::bulk(workload), BatchSize::PerIteration);
        });
    }
}

fn gaps(c: &mut Criterion) {
    let mut group = c.benchmark_group("gap search");
    for size in SIZES {
        let workload = Workload::new(size);
        let ours = ours::Ours::grown(&workload).unwrap_or_else(|| ours::Ours::bulk(&workload));
        let (tree, writer) = ours.halves();
        let writer = writer.lock();
        let view = tree.locked(&writer);
        let mut picks = workload.picks.iter().cycle().copied();
        let mut request = |pages: u64| {
            let from = workload.entries[picks.next().unwrap_or(0) as usize].start;
            GapRequest {
                len: pages << 12,
                align: 1,
                align_offset: 0,
                window: from..1 << 47,
            }
        };
        for pages in [1, 64, 600] {
            group.bench_function(
                BenchmarkId::new(format!("lowest fit of {pages} pages"), size),
                |b| {
                    b.iter(|| view.lowest_gap(&request(pages)));
                },
            );
        }
    }
}

fn editable<C: Editable>(c: &mut Criterion) {
    lookups::<C>(c);
    edits::<C, Pair>(c, || Pair);
    edits::<C, SplitAndBack>(c, || SplitAndBack);
    builds::<C>(c);
}

fn main() {
    let mut c = Criterion::default().configure_from_args();
    lookups::<limit::Limit>(&mut c);
    editable::<ours::Ours>(&mut c);
    gaps(&mut c);
    editable::<btree::Bare>(&mut c);
    editable::<btree::StdLocked>(&mut c);
    editable::<btree::ParkingLocked>(&mut c);
    editable::<rangemap::Locked>(&mut c);
    editable::<sorted_vec::Swapped>(&mut c);
    editable::<left_right::LeftRight>(&mut c);
    editable::<concurrent::Scc>(&mut c);
    editable::<concurrent::Concurrent>(&mut c);
    editable::<concurrent::Skip>(&mut c);
    c.final_summary();
}
