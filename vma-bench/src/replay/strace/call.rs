//! A system call with its arguments as numbers.

use std::fmt;

/// A descriptor argument with the path that `-y` shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FdArg {
    /// The number; `AT_FDCWD` is -100.
    pub fd: i32,
    /// The path, if the log has it.
    pub path: Option<String>,
    /// The path is followed by `(deleted)`.
    pub deleted: bool,
}

/// A path argument with the folder that it is relative to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathArg {
    /// The folder's descriptor; `None` for calls without one.
    pub dir: Option<FdArg>,
    /// The path as given.
    pub path: String,
}

/// The address-space calls: what is replayed on a `vma_core::AddressSpace`. Addresses and lengths in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the system calls' own arguments")]
pub enum MmCall {
    Mmap {
        addr: u64,
        len: u64,
        prot: u64,
        flags: u64,
        fd: FdArg,
        offset: u64,
    },
    Munmap {
        addr: u64,
        len: u64,
    },
    Mprotect {
        addr: u64,
        len: u64,
        prot: u64,
    },
    PkeyMprotect {
        addr: u64,
        len: u64,
        prot: u64,
        pkey: i64,
    },
    Mremap {
        addr: u64,
        old_len: u64,
        new_len: u64,
        flags: u64,
        new_addr: u64,
    },
    Brk {
        addr: u64,
    },
    Madvise {
        addr: u64,
        len: u64,
        advice: u64,
    },
    Mlock {
        addr: u64,
        len: u64,
    },
    Mlock2 {
        addr: u64,
        len: u64,
        flags: u64,
    },
    Munlock {
        addr: u64,
        len: u64,
    },
    Mlockall {
        flags: u64,
    },
    Munlockall,
    Msync {
        addr: u64,
        len: u64,
        flags: u64,
    },
    RemapFilePages {
        addr: u64,
        size: u64,
        prot: u64,
        pgoff: u64,
        flags: u64,
    },
    Mseal {
        addr: u64,
        len: u64,
        flags: u64,
    },
    Shmat {
        id: u64,
        addr: u64,
        flags: u64,
    },
    Shmdt {
        addr: u64,
    },
    IoSetup {
        nr: u64,
        ctx: Option<u64>,
    },
    IoDestroy {
        ctx: u64,
    },
    /// Not a call: a write to memory that a call shows.
    Touch {
        addr: u64,
    },
}

impl fmt::Display for MmCall {
    /// The call with its numbers, addresses and flags in hexadecimal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mmap {
                addr,
                len,
                prot,
                flags,
                fd,
                offset,
            } => {
                let path = fd.path.as_deref().unwrap_or("");
                write!(
                    f,
                    "mmap({addr:#x}, {len:#x}, prot {prot:#x}, flags {flags:#x}, {}<{path}>, {offset:#x})",
                    fd.fd
                )
            }
            Self::Munmap { addr, len } => write!(f, "munmap({addr:#x}, {len:#x})"),
            Self::Mprotect { addr, len, prot } => {
                write!(f, "mprotect({addr:#x}, {len:#x}, {prot:#x})")
            }
            Self::PkeyMprotect {
                addr,
                len,
                prot,
                pkey,
            } => {
                write!(f, "pkey_mprotect({addr:#x}, {len:#x}, {prot:#x}, {pkey})")
            }
            Self::Mremap {
                addr,
                old_len,
                new_len,
                flags,
                new_addr,
            } => {
                write!(
                    f,
                    "mremap({addr:#x}, {old_len:#x}, {new_len:#x}, {flags:#x}, {new_addr:#x})"
                )
            }
            Self::Brk { addr } => write!(f, "brk({addr:#x})"),
            Self::Madvise { addr, len, advice } => {
                write!(f, "madvise({addr:#x}, {len:#x}, {advice})")
            }
            Self::Mlock { addr, len } => write!(f, "mlock({addr:#x}, {len:#x})"),
            Self::Mlock2 { addr, len, flags } => {
                write!(f, "mlock2({addr:#x}, {len:#x}, {flags:#x})")
            }
            Self::Munlock { addr, len } => write!(f, "munlock({addr:#x}, {len:#x})"),
            Self::Mlockall { flags } => write!(f, "mlockall({flags:#x})"),
            Self::Munlockall => f.write_str("munlockall()"),
            Self::Msync { addr, len, flags } => write!(f, "msync({addr:#x}, {len:#x}, {flags:#x})"),
            Self::RemapFilePages {
                addr,
                size,
                prot,
                pgoff,
                flags,
            } => {
                write!(
                    f,
                    "remap_file_pages({addr:#x}, {size:#x}, {prot:#x}, {pgoff:#x}, {flags:#x})"
                )
            }
            Self::Mseal { addr, len, flags } => write!(f, "mseal({addr:#x}, {len:#x}, {flags:#x})"),
            Self::Shmat { id, addr, flags } => write!(f, "shmat({id}, {addr:#x}, {flags:#o})"),
            Self::Shmdt { addr } => write!(f, "shmdt({addr:#x})"),
            Self::IoSetup { nr, .. } => write!(f, "io_setup({nr})"),
            Self::IoDestroy { ctx } => write!(f, "io_destroy({ctx:#x})"),
            Self::Touch { addr } => write!(f, "a write at {addr:#x}"),
        }
    }
}

/// Memory that a call of the clone family shows to be written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Written {
    /// The new thread's own block, which its creator has filled.
    pub tls: Option<u64>,
    /// Where the kernel stores the child's id, in the parent.
    pub parent_tid: Option<u64>,
    /// Where the kernel stores it, in the child.
    pub child_tid: Option<u64>,
}

/// Everything else that matters for a replay.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the system calls' own arguments")]
pub enum Call {
    Mm(MmCall),
    /// clone, clone3, fork, vfork; `flags` are clone's.
    Clone {
        flags: u64,
        written: Written,
    },
    /// `arch_prctl(ARCH_SET_FS)`: the address of the thread's own block.
    SetFs {
        addr: u64,
    },
    Exec,
    Exit,
    Shmget {
        key: u64,
        size: u64,
    },
    Shmctl {
        id: u64,
        cmd: u64,
    },
    MemfdCreate {
        cloexec: bool,
    },
    /// Any other call whose result is a new descriptor; `cloexec` as far as the flags say.
    NewFd {
        cloexec: bool,
        path: Option<String>,
        readable: bool,
        writable: bool,
    },
    Open {
        path: PathArg,
        flags: u64,
    },
    Close {
        fd: i32,
    },
    CloseRange {
        first: u64,
        last: u64,
        flags: u64,
    },
    Dup {
        old: FdArg,
        new: Option<i32>,
        cloexec: bool,
    },
    Rename {
        from: PathArg,
        to: PathArg,
        flags: u64,
    },
    Link {
        from: PathArg,
        to: PathArg,
    },
    Unlink {
        path: PathArg,
    },
    Chdir {
        path: PathArg,
    },
    Fchdir {
        dir: FdArg,
    },
    /// prlimit64 on the caller itself and setrlimit; `soft` where a new limit is given.
    Rlimit {
        resource: u64,
        soft: Option<u64>,
    },
    Personality {
        persona: u64,
    },
    /// `prctl(PR_SET_VMA`, `PR_SET_VMA_ANON_NAME`, ...).
    SetVmaName,
    /// A call that is logged and has no effect that a map shows.
    Neutral,
}

/// What a call returned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ret {
    /// A value; a descriptor comes with its path.
    Ok {
        /// The value, two's complement.
        value: u64,
        /// The path behind a descriptor.
        path: Option<String>,
        /// The path is followed by `(deleted)`.
        deleted: bool,
    },
    /// `-1 ENAME (...)`: the errno.
    Err(i32),
    /// `?`: never came back, or its result isn't known.
    Unknown,
}
