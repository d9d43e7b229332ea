//! `vma-bench host`: the same work on the running kernel and on a space, in one run.
//!
//! The kernel does more for each page (it has hardware to look after), and has to be entered; a system call that does
//! nothing is shown beside. Rounds are interleaved as in [`peers`](crate::peers).

#![expect(
    clippy::cast_precision_loss,
    reason = "counts and nanoseconds of a run are far below 2^52"
)]

mod files;
mod fork;
pub(crate) mod sys;

use std::hint::black_box;
use std::io::{self, Write as _};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vma_core::paged::{Accessor, FramePool, Paged};
use vma_core::{AddressSpace, Advice, Domain, MapRequest, Prot, SpaceConfig};

use self::sys::HostPages;
use crate::peers::harness::{Effort, Sample, Span, rounds};
use crate::peers::paired::Pairs;
use crate::peers::report::Report;
use crate::peers::row::{Row, Target};
use crate::peers::stats::Summary;
use crate::peers::sys::{Seat, cores, sit};

const PAGE: u64 = 4096;
const RW: Prot = Prot::READ.union(Prot::WRITE);

/// Options of `host`.
#[derive(Debug, Clone, clap::Args)]
pub struct HostArgs {
    /// Fewer rounds, less memory: a few seconds.
    #[arg(long)]
    pub quick: bool,
    /// One JSON object per figure and line.
    #[arg(long)]
    pub json: bool,
}

/// Measures everything and prints it. Fails only if the output can't be written.
pub fn run(args: &HostArgs) -> ExitCode {
    let mut report = Report::new("host", args.json);
    sit(Seat::First);
    let effort = Effort {
        rounds: if args.quick { 15 } else { 101 },
        warm_up: 3,
        span: Span {
            warm_up: Duration::from_micros(200),
            measured: Duration::from_millis(1),
        },
    };
    let sizes: &[u64] = if args.quick { &[512] } else { &[64, 512, 8192] };
    for pages in sizes {
        populated(*pages, effort, &mut report);
    }
    accesses(effort, &mut report);
    if cores() > 1 {
        two_cpus(effort, &mut report);
    }
    files::measure(effort, &mut report);
    fork::measure(args.quick, effort, &mut report);
    tables(args.quick, &mut report);
    match report.finish() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "vma-bench: writing the figures: {error}");
            ExitCode::FAILURE
        }
    }
}

fn space(pool: &FramePool) -> AddressSpace<Paged> {
    let backend = Paged::new(Arc::new(pool.clone()));
    AddressSpace::with_backend(SpaceConfig::default(), &Domain::default(), backend)
        .expect("the default configuration is valid")
}

fn map(space: &AddressSpace<Paged>, pages: u64) -> u64 {
    space
        .map(&MapRequest::anonymous(pages * PAGE, RW))
        .expect("there is room")
}

fn touch(cpu: &mut Accessor<'_>, at: u64, pages: u64) {
    for page in 0..pages {
        let stored = cpu.store_u8(at + page * PAGE, 1);
        stored.expect("mapped to be written, and the pool has no limit");
    }
}

/// Nanoseconds that `f` takes per page.
fn per_page(pages: u64, f: impl FnOnce()) -> f64 {
    let begin = Instant::now();
    f();
    begin.elapsed().as_nanos() as f64 / pages as f64
}

/// First touch, discard and unmap of a populated range.
fn populated(pages: u64, effort: Effort, report: &mut Report) {
    let pool = FramePool::default();
    let space = space(&pool);
    let on_host = || HostPages::map(pages as usize).expect("the kernel has memory");
    // Two samples each: the cold pool's frames have never been used.
    let mut contenders: Vec<Sample<'_>> = vec![
        Box::new(|| {
            let host = on_host();
            per_page(pages, || host.touch())
        }),
        Box::new(|| {
            let at = map(&space, pages);
            let mut cpu = space.accessor();
            touch(&mut cpu, at, pages);
            space.unmap(at, pages * PAGE).expect("mapped");
            let at = map(&space, pages);
            let ns = per_page(pages, || touch(&mut cpu, at, pages));
            space.unmap(at, pages * PAGE).expect("mapped");
            ns
        }),
        Box::new(|| {
            let pool = FramePool::default();
            let space = self::space(&pool);
            let at = map(&space, pages);
            let mut cpu = space.accessor();
            per_page(pages, || touch(&mut cpu, at, pages))
        }),
    ];
    let column = format!("{pages} pages");
    let series = rounds(&mut contenders, effort);
    let host = Summary::of(&series[0]);
    let section = "host/first touch, per page";
    report.add(section, &column, "kernel", |row| Row::new(row, "ns", host));
    report.add(section, &column, "paged, warm pool", |row| {
        Row::new(row, "ns", Summary::of(&series[1]))
            .beside("kernel", host.median)
            .target(Some(Target::ratio_at_most(0.6)))
    });
    report.add(section, &column, "paged, cold pool", |row| {
        Row::new(row, "ns", Summary::of(&series[2])).beside("kernel", host.median)
    });
    drop(contenders);

    let mut cpu = space.accessor();
    let cpu = std::cell::RefCell::new(&mut cpu);
    let ours = |end: &dyn Fn(u64)| {
        let at = map(&space, pages);
        touch(&mut cpu.borrow_mut(), at, pages);
        let ns = per_page(pages, || end(at));
        // What was only discarded is still mapped; unmapping nothing succeeds.
        space.unmap(at, pages * PAGE).expect("a valid range");
        ns
    };
    let discard = |at| {
        let done = space.advise(at, pages * PAGE, Advice::DONTNEED);
        done.expect("mapped");
    };
    let mut contenders: Vec<Sample<'_>> = vec![
        Box::new(|| {
            let host = on_host();
            host.touch();
            per_page(pages, || drop(host))
        }),
        Box::new(|| ours(&|at| space.unmap(at, pages * PAGE).expect("mapped"))),
        Box::new(|| {
            let host = on_host();
            host.touch();
            per_page(pages, || host.discard().expect("mapped"))
        }),
        Box::new(|| ours(&discard)),
    ];
    let series = rounds(&mut contenders, effort);
    for (at, section, target) in [
        (0, "host/unmap, per populated page", 0.3),
        (2, "host/DONTNEED, per populated page", 0.5),
    ] {
        let host = Summary::of(&series[at]);
        report.add(section, &column, "kernel", |row| Row::new(row, "ns", host));
        report.add(section, &column, "paged", |row| {
            Row::new(row, "ns", Summary::of(&series[at + 1]))
                .beside("kernel", host.median)
                .target(Some(Target::ratio_at_most(target)))
        });
    }
}

/// Accesses between two looks at the clock.
const BURST: u64 = 4096;

/// Nanoseconds per access of a burst, repeated for as long as the span says.
fn burst(span: Span, mut f: impl FnMut(u64)) -> f64 {
    let mut run = |time: Duration| {
        let begin = Instant::now();
        let mut count = 0;
        loop {
            for i in 0..BURST {
                f(i);
            }
            count += BURST;
            let elapsed = begin.elapsed();
            if elapsed >= time {
                return elapsed.as_nanos() as f64 / count as f64;
            }
        }
    };
    run(span.warm_up);
    run(span.measured)
}

/// Loads of a page that is hot, of one whose translation isn't cached, and a system call that does nothing.
fn accesses(effort: Effort, report: &mut Report) {
    /// Far more than an accessor caches.
    const COLD: u64 = 4096;
    let pool = FramePool::default();
    let space = space(&pool);
    let at = map(&space, COLD);
    let mut cpu = space.accessor();
    touch(&mut cpu, at, COLD);
    let words: Vec<AtomicU64> = (0..PAGE / 8).map(AtomicU64::new).collect();
    let cpu = std::cell::RefCell::new(&mut cpu);
    let span = effort.span;
    let mut contenders: Vec<Sample<'_>> = vec![
        Box::new(|| {
            burst(span, |i| {
                black_box(words[(i % (PAGE / 8)) as usize].load(Ordering::Relaxed));
            })
        }),
        Box::new(|| {
            let cpu = &mut **cpu.borrow_mut();
            burst(span, |i| {
                black_box(cpu.load_u64(at + i * 8 % PAGE).unwrap_or(0));
            })
        }),
        Box::new(|| {
            let cpu = &mut **cpu.borrow_mut();
            burst(span, |i| {
                let _ = cpu.store_u64(at + i * 8 % PAGE, i);
            })
        }),
        Box::new(|| {
            let cpu = &mut **cpu.borrow_mut();
            burst(span, |i| {
                black_box(cpu.load_u64(at + i % COLD * PAGE).unwrap_or(0));
            })
        }),
        Box::new(|| {
            burst(span, |_| {
                black_box(rustix::process::getppid());
            })
        }),
    ];
    let series = rounds(&mut contenders, effort);
    let plain = Summary::of(&series[0]);
    let section = "host/access";
    report.add(section, "1 cpu", "plain load", |row| {
        Row::new(row, "ns", plain)
    });
    let lines = [
        ("load, hot page", Some(Target::ratio_at_most(5.0))),
        ("store, hot page", None),
        ("load, cold translation", Some(Target::at_most(100.0))),
        ("system call that does nothing", None),
    ];
    for ((line, target), samples) in lines.into_iter().zip(&series[1..]) {
        report.add(section, "1 cpu", line, |row| {
            Row::new(row, "ns", Summary::of(samples))
                .beside("plain load", plain.median)
                .target(target)
        });
    }
}

/// A virtual CPU alone, and beside another one on another page; compared round by round, and beside threads that do the same to memory
/// of their own, which shows what the machine makes of it.
fn two_cpus(effort: Effort, report: &mut Report) {
    let pool = FramePool::default();
    let space = space(&pool);
    let at = map(&space, 1024);
    let span = effort.span;
    let guest = |page: u64| {
        let mut cpu = space.accessor();
        burst(span, |i| {
            let to = at + page * PAGE + i * 8 % PAGE;
            let _ = cpu.store_u64(to, i);
            black_box(cpu.load_u64(to).unwrap_or(0));
        })
    };
    let plain = |_page: u64| {
        let words: Vec<AtomicU64> = (0..PAGE / 8).map(AtomicU64::new).collect();
        burst(span, |i| {
            let word = &words[(i % (PAGE / 8)) as usize];
            word.store(i, Ordering::Relaxed);
            black_box(word.load(Ordering::Relaxed));
        })
    };
    let mut contenders: Vec<Sample<'_>> = vec![
        Box::new(|| guest(0)),
        Box::new(|| side_by_side(guest)),
        Box::new(|| plain(0)),
        Box::new(|| side_by_side(plain)),
    ];
    let effort = Effort {
        rounds: effort.rounds * 3,
        ..effort
    };
    let series = rounds(&mut contenders, effort);
    let section = "host/store and load, disjoint pages";
    report.add(section, "ns", "alone", |row| {
        Row::new(row, "ns", Summary::of(&series[0]))
    });
    for (line, first, second, target) in [
        ("beside another cpu", 0, 1, Some(Target::ratio_at_most(1.2))),
        ("plain memory beside another thread", 2, 3, None),
    ] {
        let pairs = Pairs::of(&series[first], &series[second]);
        report.add(section, "ns", line, |row| {
            pairs.row(row, "ns", "alone", target)
        });
    }
}

/// The mean of what two threads measure at once.
fn side_by_side(work: impl Fn(u64) -> f64 + Sync) -> f64 {
    let start = Barrier::new(2);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            sit(Seat::Second);
            start.wait();
            work(600)
        });
        start.wait();
        let mine = work(0);
        other
            .join()
            .map_or(mine, |theirs| f64::midpoint(mine, theirs))
    })
}

/// What page tables take.
fn tables(quick: bool, report: &mut Report) {
    let mib: u64 = if quick { 128 } else { 1024 };
    let pool = FramePool::default();
    let space = space(&pool);
    let pages = mib << 8;
    let at = map(&space, pages);
    touch(&mut space.accessor(), at, pages);
    let share = space.backend().table_bytes() as f64 / (pages * PAGE) as f64 * 100.0;
    let column = format!("{mib} MiB");
    report.add(
        "host/page tables, of what is populated",
        &column,
        "paged",
        |row| Row::new(row, "%", Summary::once(share)).target(Some(Target::at_most(1.0))),
    );
}
