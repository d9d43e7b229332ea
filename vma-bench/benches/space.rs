//! The address space under criterion: the workloads of `vma-bench peers`.

use criterion::{BenchmarkId, Criterion};
use vma_bench::peers::contestants::space::Space;
use vma_bench::peers::workload::Workload;

const SIZES: [usize; 3] = [1_000, 10_000, 100_000];

fn main() {
    let mut c = Criterion::default().configure_from_args();
    let mut group = c.benchmark_group("map+unmap");
    for size in SIZES {
        let workload = Workload::new(size);
        let space = Space::new(&workload);
        let mut picks = workload.picks.iter().cycle().copied();
        group.bench_function(BenchmarkId::new("random place", size), |b| {
            b.iter(|| space.remap(&workload, picks.next().unwrap_or(0)));
        });
        group.bench_function(BenchmarkId::new("placed by the space", size), |b| {
            b.iter(|| space.place());
        });
    }
    group.finish();
    c.final_summary();
}
