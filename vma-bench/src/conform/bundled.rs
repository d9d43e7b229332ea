//! The vectors that come with the tool: recorded behaviour of Linux 6.18.

macro_rules! file {
    ($name:literal) => {
        (
            concat!($name, ".jsonl"),
            include_bytes!(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/data/golden/",
                $name,
                ".jsonl.gz"
            )),
        )
    };
}

/// Name and compressed content of each file.
pub static BUNDLED: [(&str, &[u8]); 24] = [
    file!("accounting"),
    file!("brk"),
    file!("errors"),
    file!("file_identity"),
    file!("files"),
    file!("flags"),
    file!("fork"),
    file!("growsdown"),
    file!("layout"),
    file!("limits"),
    file!("limits_map_count"),
    file!("limits_rlimit"),
    file!("mdwe"),
    file!("memfd_seals"),
    file!("merge_bridge"),
    file!("merge_pairs"),
    file!("mremap"),
    file!("placement"),
    file!("placement_bottom_up"),
    file!("process_madvise"),
    file!("remap_file_pages"),
    file!("scenarios"),
    file!("seal"),
    file!("touched"),
];
