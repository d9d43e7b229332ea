//! What of a file is mapped, found by looking at all mappings of all spaces.

use vma_core::{AddressSpace, Backend, FileObject, SpaceId, VmaFlags};

/// Space, address, length in bytes, first page.
type Found = (SpaceId, u64, u64, u64);

/// Whether the file's index is what a scan finds, each mapping once; no call is under way.
pub(crate) fn exact<B: Backend>(
    file: &FileObject,
    spaces: &[AddressSpace<B>],
) -> Result<(), String> {
    let mut scanned: Vec<Found> = Vec::new();
    let mut writable = 0;
    for space in spaces {
        let reader = space.register();
        let guard = reader.pin();
        for vma in space.iter(0, &guard) {
            let shows = |open: &&std::sync::Arc<vma_core::OpenFile>| {
                std::ptr::eq(&raw const **open.object(), file)
            };
            if vma.file().as_ref().is_some_and(shows) {
                scanned.push((
                    space.id(),
                    vma.start(),
                    vma.end() - vma.start(),
                    vma.vma().pgoff(),
                ));
                let kind = VmaFlags::SHARED | VmaFlags::MAYWRITE;
                writable += i64::from(vma.flags().contains(kind));
            }
        }
    }
    let mut indexed: Vec<Found> = file
        .mappings(0..u64::MAX)
        .iter()
        .map(|mapping| {
            (
                mapping.space,
                mapping.range.start,
                mapping.range.len(),
                mapping.pages.start,
            )
        })
        .collect();
    scanned.sort_unstable();
    indexed.sort_unstable();
    if scanned != indexed {
        return Err(format!("scanned {scanned:x?}, indexed {indexed:x?}"));
    }
    if file.mapping_count() != scanned.len() {
        return Err(format!(
            "{} counted of {}",
            file.mapping_count(),
            scanned.len()
        ));
    }
    if file.writable_mappings() != writable {
        return Err(format!(
            "{} counted of {writable} writable",
            file.writable_mappings()
        ));
    }
    Ok(())
}

#[track_caller]
pub(crate) fn assert_exact<B: Backend>(file: &FileObject, spaces: &[AddressSpace<B>]) {
    if let Err(error) = exact(file, spaces) {
        panic!("{error}");
    }
}
