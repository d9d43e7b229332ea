//! What a case presupposes, built with the library's public interface alone.

use std::sync::Arc;

use vma_core::paged::{FramePool, Paged};
use vma_core::{AddressSpace, Domain, Layout as Placement, SpaceConfig, SpecialMapping, VmaFlags};

use super::format::{Case, PAGE, SpaceKind, TASK_SIZE};

/// The ranges around the arena that are occupied in a closed space.
fn outside(case: &Case) -> Vec<(u64, u64)> {
    match case.space {
        SpaceKind::Open => Vec::new(),
        SpaceKind::Closed | SpaceKind::ClosedBottomUp => {
            let around = [(PAGE, case.start), (case.start + case.len, TASK_SIZE)];
            around.into_iter().filter(|(s, e)| s < e).collect()
        }
    }
}

/// Limits hold as if nothing but the arena's mappings existed: what occupies the outside is added to them.
fn config(case: &Case) -> SpaceConfig {
    let outside = outside(case);
    let bytes: u64 = outside.iter().map(|(start, end)| end - start).sum();
    let mut config = SpaceConfig {
        // The recording ran as root, and gave CAP_IPC_LOCK up where it set a limit.
        ipc_lock: case.limits.memlock.is_none(),
        task_size: TASK_SIZE,
        ..SpaceConfig::default()
    };
    let limits = &mut config.limits;
    if let Some(limit) = case.limits.address_space {
        limits.address_space = limit.saturating_add(bytes);
    }
    // What occupies the outside can't be written and so is no data.
    limits.data = case.limits.data.unwrap_or(limits.data);
    limits.memlock = case.limits.memlock.unwrap_or(limits.memlock);
    limits.stack = case.limits.stack.unwrap_or(limits.stack);
    if let Some(limit) = case.max_map_count {
        config.max_map_count = limit.saturating_add(outside.len() as u64);
    }
    if case.space != SpaceKind::Open {
        // All that is free lies in the arena, wherever the search begins.
        config.mmap_base = Some(TASK_SIZE - PAGE);
    }
    if case.space == SpaceKind::ClosedBottomUp {
        config.layout = Placement::BottomUp;
    }
    config
}

/// More than any recorded case uses; damaged ones may ask for anything.
const FRAMES: usize = 1 << 16;
const TABLE_BYTES: usize = 16 << 20;

fn memory() -> Paged {
    Paged::new(Arc::new(FramePool::new(FRAMES))).with_table_limit(TABLE_BYTES)
}

/// Process 0 before the first call.
///
/// # Errors
/// The library refuses what the case presupposes: in words.
pub(super) fn first_process(case: &Case) -> Result<AddressSpace<Paged>, String> {
    let space = AddressSpace::with_backend(config(case), &Domain::default(), memory())
        .map_err(|e| e.to_string())?;
    for (start, end) in outside(case) {
        // A mapping with a name and these flags merges with nothing and can't be expanded into the arena.
        let flags = VmaFlags::DONTEXPAND | VmaFlags::IO;
        let occupied = SpecialMapping {
            name: Some(Arc::from("outside")),
            ..SpecialMapping::anonymous(start, end, flags)
        };
        space.insert_special(&occupied).map_err(|e| e.to_string())?;
    }
    if let Some(brk) = case.brk_start {
        space.set_brk(case.start + brk, case.start + brk);
    }
    Ok(space)
}
