//! The parser of golden vectors: any text is cases or an error with its line, each line by itself; what is accepted can be run.
#![no_main]

mod proportion;

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use vma_bench::conform::input::{InputError, Suite};
use vma_bench::conform::run_suite;

fn parse(text: &str) -> Result<Suite, InputError> {
    proportion::parse(text, |text| Suite::parse(Path::new("vectors"), text))
}

fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data);
    let alone = |line| parse(line).is_ok();
    match parse(&text) {
        Ok(suite) => {
            assert_eq!(suite.len(), text.lines().count());
            assert!(text.lines().all(alone));
            if let Ok(report) = run_suite(&suite, &|| {}) {
                assert_eq!(report.passed + report.failed(), suite.len() as u64);
            }
        }
        Err(_) => assert!(text.is_empty() || !text.lines().all(alone)),
    }
});
