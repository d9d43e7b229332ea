//! The parsers of `/proc/PID/maps` and smaps: any text is a map or an error with its line; what a map prints is that map again,
//! and so is what a space prints into which its lines were put.
#![no_main]

mod proportion;

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use vma_bench::replay::maps::{MapLine, parse_flags, parse_line, parse_map, parse_sections};
use vma_core::{
    AccessMode, AddressSpace, FileKind, FileObject, OpenFile, SpaceConfig, SpecialMapping, VmaFlags,
};

const PAGE: u64 = 4096;

fn parse(text: &str) -> Option<Vec<MapLine>> {
    proportion::parse(text, |text| parse_map(Path::new("map"), text)).ok()
}

fn flags(line: &MapLine) -> VmaFlags {
    let letters = [
        (b'r', VmaFlags::READ),
        (b'w', VmaFlags::WRITE),
        (b'x', VmaFlags::EXEC),
        (b's', VmaFlags::SHARED | VmaFlags::MAYSHARE),
    ];
    let have = letters.iter().filter(|(letter, _)| line.may(*letter));
    have.fold(VmaFlags::MAY, |flags, (_, flag)| flags | *flag)
}

/// The line as a mapping, if a space can have it: `[vsyscall]` is beyond it, offsets are of whole pages, and of files, and a file
/// has a name.
fn mapping(line: &MapLine, task_size: u64) -> Option<SpecialMapping> {
    let shown = if line.has_file() {
        line.offset.is_multiple_of(PAGE) && !line.name.is_empty()
    } else {
        line.offset == 0
    };
    if line.end > task_size || !shown {
        return None;
    }
    let mut mapping = SpecialMapping::anonymous(line.start, line.end, flags(line));
    if line.has_file() {
        let (major, minor) = line.dev;
        let builder = FileObject::builder(FileKind::Regular, &line.name);
        let object = builder.inode(major, minor, line.inode).build();
        mapping.pgoff = Some(line.offset / PAGE);
        mapping.file = Some(OpenFile::new(object, AccessMode::ReadWrite));
    } else if !line.name.is_empty() {
        mapping.name = Some(line.name.as_str().into());
    }
    Some(mapping)
}

fn through_a_space(map: &[MapLine]) {
    let space = AddressSpace::<()>::default();
    let task_size = SpaceConfig::default().task_size;
    let fits = |line: &&MapLine| mapping(line, task_size).is_some();
    let map: Vec<_> = map.iter().filter(fits).cloned().collect();
    for mapping in map.iter().filter_map(|line| mapping(line, task_size)) {
        space.insert_special(&mapping).expect("lines don't overlap");
    }
    space.check().expect("a valid layout");
    let text = space.maps();
    let printed: String = map.iter().map(|line| line.text() + "\n").collect();
    assert_eq!(text, printed);
    let reader = space.register();
    assert_eq!(space.maps_under(&reader.pin()), text);
    assert_eq!(parse(&text).unwrap_or_default(), map);
}

fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data);
    if let Some(map) = parse(&text) {
        let printed: String = map.iter().map(|line| line.text() + "\n").collect();
        assert_eq!(parse(&printed), Some(map.clone()));
        through_a_space(&map);
    }
    let path = Path::new("map");
    if let Ok(sections) = proportion::parse(&text, |text| parse_sections(path, text)) {
        assert!(sections.iter().all(|section| !section.map.is_empty()));
    }
    if let Ok(mappings) = proportion::parse(&text, |text| parse_flags(path, text)) {
        let again = |line: &MapLine| parse_line(&line.text()).as_ref() == Ok(line);
        assert!(mappings.iter().all(|mapping| again(&mapping.line)));
    }
});
