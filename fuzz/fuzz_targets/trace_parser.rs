//! The parser of strace's logs: any text is a log or an error with its line, and a log whose calls are cut in two by other
//! tasks says the same.
#![no_main]

mod proportion;

use std::fmt::Write as _;
use std::path::Path;

use libfuzzer_sys::fuzz_target;
use vma_bench::replay::strace::line::{self, Body};
use vma_bench::replay::strace::log::{Event, Log};

fn parse(text: &str) -> Option<Log> {
    proportion::parse(text, |text| Log::parse(Path::new("log"), text)).ok()
}

/// Lines in order, each call with one beginning and at most one end.
fn check(log: &Log) {
    assert!(log.events.is_sorted_by_key(|(line, _)| *line));
    let (mut begun, mut ended) = (0, vec![false; log.calls.len()]);
    for (line, event) in &log.events {
        assert!((1..=log.lines).contains(line));
        match *event {
            Event::Begin(id) => {
                assert_eq!((id, log.calls[id].begin), (begun, *line));
                begun += 1;
            }
            Event::End(id) => {
                assert!(id < begun && !ended[id]);
                assert_eq!(log.calls[id].end, Some(*line));
                ended[id] = true;
            }
            Event::Seen(_) | Event::Gone(_) | Event::Superseded { .. } => {}
        }
    }
    assert_eq!(begun, log.calls.len());
    assert!(log.calls.iter().map(|call| call.end.is_some()).eq(ended));
}

/// The log with each whole call cut in two.
fn halved(text: &str) -> String {
    let mut out = String::new();
    for raw in text.lines() {
        let parsed = line::parse(raw);
        if let Ok(line) = parsed
            && let Body::Whole { name, args, ret } = line.body
        {
            let pid = line.pid.map_or(String::new(), |pid| format!("{pid} "));
            let (first, second) = args.split_at(args.floor_char_boundary(args.len() / 2));
            let _ = writeln!(out, "{pid}{name}({first} <unfinished ...>");
            let _ = writeln!(out, "{pid}<... {name} resumed>{second}) = {ret}");
        } else {
            let _ = writeln!(out, "{raw}");
        }
    }
    out
}

fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data);
    let Some(log) = parse(&text) else {
        return;
    };
    assert_eq!(log.lines, text.lines().count() as u64);
    check(&log);
    assert!(parse(text.trim_end_matches(['\n', '\r'])).is_none());

    // A carriage return belongs to the end of a line only once.
    if !text.contains('\r') {
        let cut = parse(&halved(&text)).expect("the same calls");
        check(&cut);
        let calls = |log: &Log| {
            format!(
                "{:?}",
                log.calls
                    .iter()
                    .map(|c| (c.pid, &c.name, &c.call, &c.ret))
                    .collect::<Vec<_>>()
            )
        };
        assert_eq!(calls(&cut), calls(&log));
    }
});
