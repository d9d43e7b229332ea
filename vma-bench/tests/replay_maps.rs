//! Our parser of maps beside the one of `procfs-core`, on every map that comes with the tool.

use std::{fs, io::Read, path::Path};

use flate2::read::GzDecoder;
use procfs_core::{
    FromBufRead,
    process::{MMPermissions, MMapPath, MemoryMaps},
};
use vma_bench::replay::maps::{MapLine, parse_sections};

fn bundled_maps() -> Vec<(String, String)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/traces");
    let mut out = Vec::new();
    for entry in fs::read_dir(dir).expect("bundled") {
        let path = entry.expect("an entry").path();
        let name = path
            .file_name()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        if name.ends_with(".maps.gz") {
            let mut text = String::new();
            GzDecoder::new(fs::File::open(&path).expect("opened"))
                .read_to_string(&mut text)
                .expect("text");
            out.push((name, text));
        }
    }
    out
}

fn equal(ours: &MapLine, theirs: &procfs_core::process::MemoryMap) {
    assert_eq!((ours.start, ours.end), theirs.address);
    assert_eq!((ours.offset, ours.inode), (theirs.offset, theirs.inode));
    assert_eq!(
        (i64::from(ours.dev.0), i64::from(ours.dev.1)),
        (i64::from(theirs.dev.0), i64::from(theirs.dev.1))
    );
    for (letter, flag) in [
        (b'r', MMPermissions::READ),
        (b'w', MMPermissions::WRITE),
        (b'x', MMPermissions::EXECUTE),
        (b's', MMPermissions::SHARED),
        (b'p', MMPermissions::PRIVATE),
    ] {
        assert_eq!(ours.may(letter), theirs.perms.contains(flag));
    }
    match &theirs.pathname {
        MMapPath::Path(path) => assert_eq!(Path::new(&ours.name), path),
        MMapPath::Heap => assert_eq!(ours.name, "[heap]"),
        MMapPath::Stack => assert_eq!(ours.name, "[stack]"),
        MMapPath::Anonymous => assert_eq!(ours.name, ""),
        MMapPath::Vsys(key) => assert_eq!(ours.name, format!("/SYSV{key:08x} (deleted)")),
        MMapPath::Other(name) => assert_eq!(ours.name, format!("[{name}]")),
        _ => assert!(ours.name.starts_with('['), "{}", ours.name),
    }
}

#[test]
fn two_parsers_read_the_same() {
    let files = bundled_maps();
    assert!(files.len() >= 36, "{}", files.len());
    for (name, text) in files {
        let headed = if text.starts_with("===") {
            text
        } else {
            format!("=== pid=1 event=end\n{text}")
        };
        let ours = parse_sections(Path::new(&name), &headed).expect("sound");
        let sections = headed
            .split("=== ")
            .skip(1)
            .map(|s| s.split_once('\n').map_or("", |(_, body)| body));
        for (section, body) in ours.iter().zip(sections) {
            let body: String = body
                .lines()
                .filter(|l| !l.is_empty())
                .flat_map(|l| [l, "\n"])
                .collect();
            let theirs = MemoryMaps::from_buf_read(body.as_bytes()).expect("sound").0;
            assert_eq!(section.map.len(), theirs.len(), "{name}");
            section
                .map
                .iter()
                .zip(&theirs)
                .for_each(|(a, b)| equal(a, b));
            let back: String = section.map.iter().map(|l| l.text() + "\n").collect();
            assert_eq!(back, body, "{name}: a line comes out as it went in");
        }
    }
}
