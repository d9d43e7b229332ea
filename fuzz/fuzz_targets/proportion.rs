//! What a parser leaves allocated, held against the size of what it reads. (What it takes and gives back is only limited by the
//! fuzzer's `-malloc_limit_mb`.)

use vma_bench::peers::sys::live_bytes;

/// Bytes per byte of the text that its meaning may take: the largest record, for the shortest line.
const EACH: usize = 1024;

/// Runs a parser on a text; what it makes of it is in proportion to it.
pub fn parse<T>(text: &str, parser: impl FnOnce(&str) -> T) -> T {
    let (result, bytes) = live_bytes(|| parser(text));
    assert!(
        bytes <= (text.len() + 64) * EACH,
        "{bytes} bytes in use for a text of {}",
        text.len()
    );
    result
}
