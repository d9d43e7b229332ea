//! Mappings that no call makes: what exec lays out, `[vdso]`, rings and devices; and names of anonymous memory.

use std::sync::Arc;

use super::draft::Draft;
use super::placement::check_fixed;
use super::{AddressSpace, WriteGuard, new_vma, rounded_range};
use crate::addr::VmRange;
use crate::backend::Backend;
use crate::error::{Errno, PublishError, SplitError};
use crate::file::{MappingHooks, OpenFile};
use crate::flags::VmaFlags;
use crate::vma::{Extras, Special};

/// A mapping made by the embedder: put where it's told, as it's told, never merged when it's made.
#[derive(Clone, Debug)]
pub struct SpecialMapping {
    /// First byte, page-aligned.
    pub start: u64,
    /// First byte after it, page-aligned.
    pub end: u64,
    /// All flags, `MAY` bits and `ACCOUNT` included.
    pub flags: VmaFlags,
    /// Page offset; `None`: that of anonymous memory, the page number of `start`.
    pub pgoff: Option<u64>,
    /// What it maps.
    pub file: Option<Arc<OpenFile>>,
    /// Name such as `[vdso]`; a mapping with a name isn't anonymous memory. `[heap]` and `[stack]` follow from the
    /// addresses given to [`AddressSpace::set_brk`] and [`AddressSpace::set_stack`].
    pub name: Option<Arc<str>>,
    /// Who follows it.
    pub hooks: Option<Arc<dyn MappingHooks>>,
}

impl SpecialMapping {
    /// Anonymous memory with these flags.
    pub fn anonymous(start: u64, end: u64, flags: VmaFlags) -> Self {
        SpecialMapping {
            start,
            end,
            flags,
            pgoff: None,
            file: None,
            name: None,
            hooks: None,
        }
    }
}

/// Why an embedder's mapping wasn't made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpecialError {
    /// Empty, unaligned or beyond the address space.
    #[error("{start:#x}-{end:#x} is empty, unaligned or beyond the address space")]
    BadRange {
        /// First byte.
        start: u64,
        /// First byte after it.
        end: u64,
    },
    /// Something is mapped there.
    #[error("{0} is mapped")]
    Occupied(VmRange),
    /// No memory for records.
    #[error(transparent)]
    Publish(#[from] PublishError),
}

impl SpecialError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            SpecialError::BadRange { .. } => Errno::EINVAL,
            SpecialError::Occupied(_) => Errno::EEXIST,
            SpecialError::Publish(error) => error.errno(),
        }
    }
}

/// Why memory couldn't be named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// Not built in, as configured.
    #[error("names of anonymous memory aren't built in")]
    NotBuiltIn,
    /// Too long, or with a character that isn't allowed.
    #[error(
        "the name is longer than 79 bytes or holds one of \\ ` $ [ ] or an unprintable character"
    )]
    BadName,
    /// Unaligned or wraps around.
    #[error("{len:#x} bytes at {addr:#x}: unaligned or wraps around")]
    BadRange {
        /// Start.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// A hole; everything mapped was named.
    #[error("nothing is mapped at {0:#x}")]
    Unmapped(u64),
    /// A file is mapped.
    #[error("{0} isn't anonymous memory")]
    NotAnonymous(VmRange),
    /// A mapping couldn't be split.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// No memory for records; nothing was changed.
    #[error(transparent)]
    Publish(#[from] PublishError),
}

impl NameError {
    /// The error number.
    pub const fn errno(self) -> Errno {
        match self {
            NameError::NotBuiltIn | NameError::BadName | NameError::BadRange { .. } => {
                Errno::EINVAL
            }
            NameError::Split(SplitError::Refused { .. }) => Errno::EINVAL,
            NameError::Unmapped(_) => Errno::ENOMEM,
            NameError::NotAnonymous(_) => Errno::EBADF,
            NameError::Split(_) => Errno::EAGAIN,
            NameError::Publish(error) => error.errno_or_again(),
        }
    }
}

/// Longest name, in bytes.
const NAME_MAX: usize = 79;

fn is_valid_name(name: &str) -> bool {
    name.len() <= NAME_MAX
        && name
            .bytes()
            .all(|byte| (byte == b' ' || byte.is_ascii_graphic()) && !b"\\`$[]".contains(&byte))
}

fn rename(
    draft: &mut Draft<'_>,
    start: u64,
    end: u64,
    name: Option<&Arc<str>>,
) -> Result<(), NameError> {
    let mut hole = None;
    let mut at = start;
    while at < end {
        let Some(vma) = draft.next(at) else {
            return Err(NameError::Unmapped(at));
        };
        if vma.start > at {
            hole = hole.or(Some(at));
            at = vma.start;
            continue;
        }
        if vma.file().is_some() {
            return Err(NameError::NotAnonymous(vma.range()));
        }
        let to = vma.end.min(end);
        let mut extras = vma
            .vma
            .extras()
            .map(|extras| Extras::clone(extras))
            .unwrap_or_default();
        if extras.anon_name.as_ref() == name {
            at = to;
            continue;
        }
        extras.anon_name = name.cloned();
        let extras = (!extras.is_default()).then(|| Arc::new(extras));
        let flags = vma.flags();
        at = draft.modify(at, to, flags, extras.as_ref())?.max(to);
    }
    hole.map_or(Ok(()), |at| Err(NameError::Unmapped(at)))
}

impl<B: Backend> WriteGuard<'_, B> {
    /// As [`AddressSpace::insert_special`].
    ///
    /// # Errors
    /// As there.
    pub fn insert_special(&mut self, mapping: &SpecialMapping) -> Result<(), SpecialError> {
        let config = self.config();
        let &SpecialMapping {
            start, end, flags, ..
        } = mapping;
        let bad = SpecialError::BadRange { start, end };
        let len = end.checked_sub(start).filter(|len| *len > 0).ok_or(bad)?;
        if !config.pages().is_aligned(end) {
            return Err(bad);
        }
        let limits_only = crate::limits::SpaceConfig {
            mmap_min_addr: 0,
            hugetlb: None,
            ..**config
        };
        check_fixed(&limits_only, start, len).map_err(|_| bad)?;
        let mut changes = self.changes();
        let mut draft = self.draft(config, &mut changes);
        if let Some(there) = draft.first_in(start, end) {
            return Err(SpecialError::Occupied(there.range()));
        }
        let has_ops = mapping.name.is_some() || mapping.hooks.is_some();
        let extras = has_ops.then(|| {
            let special = Special {
                name: mapping.name.clone(),
                hooks: mapping.hooks.clone(),
                has_ops,
            };
            Arc::new(Extras {
                special: Some(special),
                ..Extras::default()
            })
        });
        let pgoff = mapping.pgoff.unwrap_or_else(|| config.pages().count(start));
        let vma = new_vma(config, flags, pgoff)
            .with_file(mapping.file.clone())
            .with_extras(extras);
        draft.insert(start, end, vma);
        self.commit(&mut changes)?;
        Ok(())
    }

    /// As [`AddressSpace::set_name`].
    ///
    /// # Errors
    /// As there.
    pub fn set_name(&mut self, addr: u64, len: u64, name: Option<&str>) -> Result<(), NameError> {
        let config = self.config();
        if !config.anon_names {
            return Err(NameError::NotBuiltIn);
        }
        if !name.is_none_or(is_valid_name) {
            return Err(NameError::BadName);
        }
        let bad = NameError::BadRange { addr, len };
        if !config.pages().is_aligned(addr) {
            return Err(bad);
        }
        let Some((start, end)) = rounded_range(config.pages(), addr, len).map_err(|()| bad)? else {
            return Ok(());
        };
        let name = name.map(Arc::from);
        let mut changes = self.changes();
        let mut draft = self.draft(config, &mut changes);
        let result = rename(&mut draft, start, end, name.as_ref());
        self.commit(&mut changes)?;
        result
    }
}

impl<B: Backend> AddressSpace<B> {
    /// Puts a mapping of the embedder's into the layout: segments of a program, `[vdso]`, a device. No limits
    /// are applied, and it isn't merged.
    ///
    /// # Errors
    /// `EINVAL` bad range, `EEXIST` something is mapped there, `ENOMEM` no memory for records.
    pub fn insert_special(&self, mapping: &SpecialMapping) -> Result<(), SpecialError> {
        self.write_once().insert_special(mapping)
    }

    /// Says which mapping is the program's stack: the one that holds `addr`, now and as it grows.
    pub fn set_stack(&self, addr: u64) {
        let mut guard = self.write_once();
        guard.inner_mut().start_stack = Some(addr);
        guard.mark();
    }

    /// Names anonymous memory (`PR_SET_VMA_ANON_NAME`); `None` takes the name away.
    ///
    /// # Errors
    /// `EINVAL` not built in, bad name, unaligned; `ENOMEM` a hole; `EBADF` a file is mapped; `EAGAIN` the limit of mappings.
    pub fn set_name(&self, addr: u64, len: u64, name: Option<&str>) -> Result<(), NameError> {
        self.write_once().set_name(addr, len, name)
    }
}
