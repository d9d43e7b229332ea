//! Files in: plain or gzip, told apart by their first bytes, and the maps files that lie beside a log.

use std::{
    ffi::OsString,
    fs, io,
    io::Read,
    path::{Path, PathBuf},
};

use flate2::read::MultiGzDecoder;

use super::error::ReplayError;

/// The two bytes that begin every gzip member.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Reads a whole file as text, decompressing it where its first bytes say gzip.
///
/// # Errors
/// The file can't be read, its compression is damaged or cut off, or it isn't text (with the line).
pub fn read_text(path: &Path) -> Result<String, ReplayError> {
    let read_error = |source| ReplayError::Read {
        path: path.to_path_buf(),
        source,
    };
    let bytes = fs::read(path).map_err(read_error)?;
    text_of(path, bytes)
}

/// As [`read_text`], of bytes that are in memory already; `path` is for messages.
///
/// # Errors
/// As [`read_text`].
pub fn text_of(path: &Path, bytes: Vec<u8>) -> Result<String, ReplayError> {
    let plain = if bytes.starts_with(&GZIP_MAGIC) {
        let mut plain = Vec::new();
        MultiGzDecoder::new(bytes.as_slice())
            .read_to_end(&mut plain)
            .map_err(|source| ReplayError::Read {
                path: path.to_path_buf(),
                source: io::Error::new(
                    source.kind(),
                    format!("damaged or cut off gzip data: {source}"),
                ),
            })?;
        plain
    } else {
        bytes
    };
    String::from_utf8(plain).map_err(|e| {
        let good = &e.as_bytes()[..e.utf8_error().valid_up_to()];
        let line = good.split(|&b| b == b'\n').count() as u64;
        ReplayError::line(path, line, "not text: strace and /proc write ASCII")
    })
}

/// The file `NAME.KIND` (`kind`: `start.maps`, ...) beside the log `NAME.strace` or `NAME.strace.gz`, plain before gzip;
/// `None` where there is neither.
pub fn beside(trace: &Path, kind: &str) -> Option<PathBuf> {
    let stem = stem_of(trace);
    [format!(".{kind}"), format!(".{kind}.gz")]
        .into_iter()
        .map(|tail| with_tail(&stem, &tail))
        .find(|p| p.is_file())
}

/// `NAME` of `NAME.strace.gz`, `NAME.strace`, `NAME.gz`, with its folder.
fn stem_of(trace: &Path) -> PathBuf {
    let mut stem = trace.to_path_buf();
    for extension in ["gz", "strace"] {
        if stem.extension().is_some_and(|e| e == extension) {
            stem.set_extension("");
        }
    }
    stem
}

fn with_tail(stem: &Path, tail: &str) -> PathBuf {
    let mut name = OsString::from(stem);
    name.push(tail);
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn text_is_read_plain_and_gzipped() {
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(b"one\ntwo\n").unwrap();
        let gz = gz.finish().unwrap();
        assert_eq!(
            text_of(Path::new("a"), b"one\ntwo\n".to_vec()).unwrap(),
            "one\ntwo\n"
        );
        assert_eq!(text_of(Path::new("a"), gz.clone()).unwrap(), "one\ntwo\n");
        for cut in 2..gz.len() {
            assert!(
                text_of(Path::new("a"), gz[..cut].to_vec()).is_err(),
                "cut at {cut}"
            );
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_named_by_line() {
        let e = text_of(Path::new("a"), b"one\n\xff\xfe\n".to_vec()).unwrap_err();
        assert_eq!(e.to_string(), "a:2: not text: strace and /proc write ASCII");
    }

    #[test]
    fn neighbours_are_found_by_the_name_of_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("x.start.maps"), "").unwrap();
        fs::write(at("x.end.maps.gz"), "").unwrap();
        assert_eq!(
            beside(&at("x.strace.gz"), "start.maps"),
            Some(at("x.start.maps"))
        );
        assert_eq!(
            beside(&at("x.strace"), "end.maps"),
            Some(at("x.end.maps.gz"))
        );
        assert_eq!(beside(&at("x.strace"), "more.maps"), None);
    }
}
