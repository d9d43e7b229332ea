//! An address-space call as it is done on a space: arguments, the file, and the recorded result.

use super::{
    model::files::{DescriptionId, FileKind, InodeId},
    order::Spanned,
    strace::{
        call::{MmCall, Ret},
        log::CallId,
    },
};

/// The file that a call maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpFile {
    /// None.
    None,
    /// The descriptor isn't open.
    Bad,
    /// An open file.
    Open {
        /// Which one.
        id: DescriptionId,
        /// Its contents.
        inode: InodeId,
        /// What mapping it does.
        kind: FileKind,
        /// May be read.
        readable: bool,
        /// May be written.
        writable: bool,
    },
}

/// An address-space call.
#[derive(Debug, Clone)]
pub struct Op {
    /// Its record in the log.
    pub call: CallId,
    /// Its arguments.
    pub kind: MmCall,
    /// The file that it maps.
    pub file: OpFile,
    /// The size of what it maps where the arguments don't tell (shmat, `io_setup`), in bytes.
    pub size: u64,
    /// The recorded result.
    pub ret: Ret,
    /// The line on which it begins.
    pub begin: u64,
    /// The line on which it ends.
    pub end: Option<u64>,
}

impl Spanned for Op {
    fn begin(&self) -> u64 {
        self.begin
    }
    fn end(&self) -> Option<u64> {
        self.end
    }
}

/// What the library returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Got {
    /// A value.
    Ok(u64),
    /// An errno.
    Err(i32),
    /// What depends on page contents or on the rest of the kernel.
    Unchecked,
}

impl Got {
    /// Whether it is what was recorded.
    pub fn fits(self, recorded: &Ret) -> bool {
        match (self, recorded) {
            (Self::Unchecked, _) | (_, Ret::Unknown) => true,
            (Self::Ok(got), Ret::Ok { value, .. }) => got == *value,
            (Self::Err(got), Ret::Err(errno)) => got == *errno,
            _ => false,
        }
    }
}

impl Op {
    /// A write to memory that a call on `line` shows.
    pub fn touch(addr: u64, line: u64) -> Self {
        Self {
            call: CallId::MAX,
            kind: MmCall::Touch { addr },
            file: OpFile::None,
            size: 0,
            ret: Ret::Unknown,
            begin: line,
            end: Some(line),
        }
    }

    /// The recorded address where the kernel chose it: mmap without `MAP_FIXED`, a mremap that moved, shmat without an
    /// address, `io_setup`.
    pub fn chosen_address(&self) -> Option<u64> {
        const FIXED: u64 = 0x10 | 0x10_0000;
        const MREMAP_FIXED: u64 = 2;
        let Ret::Ok { value, .. } = self.ret else {
            return None;
        };
        match self.kind {
            MmCall::Mmap { flags, .. } if flags & FIXED == 0 => Some(value),
            MmCall::Mremap { addr, flags, .. } if flags & MREMAP_FIXED == 0 && value != addr => {
                Some(value)
            }
            MmCall::Shmat { addr: 0, .. } => Some(value),
            MmCall::IoSetup { ctx, .. } => ctx,
            _ => None,
        }
    }
}

/// A result in words.
pub fn words(ret: &Ret) -> String {
    match ret {
        Ret::Ok { value, .. } => format!("{value:#x}"),
        Ret::Err(errno) => format!("errno {errno}"),
        Ret::Unknown => "?".to_owned(),
    }
}

impl std::fmt::Display for Got {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ok(value) => write!(f, "{value:#x}"),
            Self::Err(errno) => write!(f, "errno {errno}"),
            Self::Unchecked => f.write_str("not compared"),
        }
    }
}
