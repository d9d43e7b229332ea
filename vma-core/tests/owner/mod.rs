//! Files whose owner hears of their mappings.

use std::sync::Arc;

use vma_core::{AccessMode, FileKind, FileObject, MappingHooks, OpenFile, VmRange};

/// Tells a closure of what happens to mappings.
struct Told<F>(F);

impl<F: Fn(bool) + Send + Sync + 'static> MappingHooks for Told<F> {
    fn has_close(&self) -> bool {
        true
    }

    fn opened(&self, _: VmRange) {
        (self.0)(true);
    }

    fn closed(&self, _: VmRange) {
        (self.0)(false);
    }
}

/// A file of eight pages whose owner hears of its mappings: whether one has come or gone.
pub(crate) fn followed(told: impl Fn(bool) + Send + Sync + 'static) -> Arc<OpenFile> {
    let object = FileObject::builder(FileKind::Shmem, "followed")
        .len(8 * 4096)
        .hooks(Arc::new(Told(told)))
        .build();
    OpenFile::new(object, AccessMode::ReadWrite)
}
