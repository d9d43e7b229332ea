//! The decoders of the families of calls.

use super::{Args, number_in};
use crate::replay::strace::{
    call::{Call, MmCall, Written},
    symbols::{self, eval, number},
    value::Value,
};

const CLONE_SETTLS: u64 = 0x8_0000;
const CLONE_PARENT_SETTID: u64 = 0x10_0000;
const CLONE_CHILD_SETTID: u64 = 0x100_0000;

pub(super) fn memory(a: &Args<'_>) -> Result<Call, String> {
    let n = |i| a.num(i, &[]);
    let prot = |i| a.num(i, symbols::PROT);
    let (addr, len) = (n(0)?, if a.name == "brk" { 0 } else { n(1)? });
    Ok(Call::Mm(match a.name {
        "mmap" => MmCall::Mmap {
            addr,
            len,
            prot: prot(2)?,
            flags: a.num(3, symbols::MAP)?,
            fd: a.fd(4)?,
            offset: n(5)?,
        },
        "munmap" => MmCall::Munmap { addr, len },
        "mprotect" => MmCall::Mprotect {
            addr,
            len,
            prot: prot(2)?,
        },
        "pkey_mprotect" => MmCall::PkeyMprotect {
            addr,
            len,
            prot: prot(2)?,
            pkey: n(3)?.cast_signed(),
        },
        "mremap" => MmCall::Mremap {
            addr,
            old_len: len,
            new_len: n(2)?,
            flags: a.num(3, symbols::MREMAP)?,
            new_addr: a.num_or(4, &[], 0)?,
        },
        "brk" => MmCall::Brk { addr },
        "madvise" => MmCall::Madvise {
            addr,
            len,
            advice: a.num(2, symbols::MADV)?,
        },
        "mseal" => MmCall::Mseal {
            addr,
            len,
            flags: n(2)?,
        },
        "msync" => MmCall::Msync {
            addr,
            len,
            flags: a.num(2, symbols::LOCKS)?,
        },
        _ => MmCall::RemapFilePages {
            addr,
            size: len,
            prot: prot(2)?,
            pgoff: n(3)?,
            flags: a.num(4, symbols::MAP)?,
        },
    }))
}

pub(super) fn locks(a: &Args<'_>) -> Result<Call, String> {
    let n = |i| a.num(i, &[]);
    let flags = |i| a.num(i, symbols::LOCKS);
    Ok(Call::Mm(match a.name {
        "mlock" => MmCall::Mlock {
            addr: n(0)?,
            len: n(1)?,
        },
        "mlock2" => MmCall::Mlock2 {
            addr: n(0)?,
            len: n(1)?,
            flags: flags(2)?,
        },
        "munlock" => MmCall::Munlock {
            addr: n(0)?,
            len: n(1)?,
        },
        "mlockall" => MmCall::Mlockall { flags: flags(0)? },
        _ => MmCall::Munlockall,
    }))
}

pub(super) fn segments(a: &Args<'_>) -> Result<Call, String> {
    let n = |i| a.num(i, symbols::SHM);
    Ok(match a.name {
        "shmget" => Call::Shmget {
            key: n(0)?,
            size: n(1)?,
        },
        "shmctl" => Call::Shmctl {
            id: n(0)?,
            cmd: n(1)? & !0x100,
        },
        "shmat" => Call::Mm(MmCall::Shmat {
            id: n(0)?,
            addr: n(1)?,
            flags: n(2)?,
        }),
        "shmdt" => Call::Mm(MmCall::Shmdt { addr: n(0)? }),
        "io_setup" => Call::Mm(MmCall::IoSetup {
            nr: n(0)?,
            ctx: context(a.get(1)?),
        }),
        _ => Call::Mm(MmCall::IoDestroy { ctx: n(0)? }),
    })
}

/// `[0x7ffff7d99000]`, the context that `io_setup` stored; `[0] => [0x7fff...]` in some versions.
fn context(value: &Value) -> Option<u64> {
    match value {
        Value::Array(items) => match items.as_slice() {
            [Value::Word(text)] => number(text),
            _ => None,
        },
        Value::Arrow(_, after) => context(after),
        _ => None,
    }
}

pub(super) fn tasks(a: &Args<'_>) -> Result<Call, String> {
    const VFORK: u64 = 0x4100;
    let plain = |flags| Call::Clone {
        flags,
        written: Written::default(),
    };
    Ok(match a.name {
        "fork" => plain(0),
        "vfork" => plain(VFORK),
        "clone" => {
            let flags = clone_flags(a.named("flags").ok_or("clone: no flags=")?)?;
            clone(flags, |name| a.named(name))
        }
        "clone3" => {
            let args = a.get(0)?;
            let flags = clone_flags(args.field("flags").ok_or("clone3: no flags=")?)?;
            clone(flags, |name| args.field(name))
        }
        "arch_prctl" => match (a.get(0)?, a.list.get(1)) {
            (Value::Word(code), Some(Value::Word(addr))) if code == "ARCH_SET_FS" => Call::SetFs {
                addr: number(addr).ok_or("arch_prctl: no address")?,
            },
            _ => Call::Neutral,
        },
        "execve" | "execveat" => Call::Exec,
        _ => Call::Exit,
    })
}

/// What is written by or for a clone, as its flags say.
fn clone<'a>(flags: u64, argument: impl Fn(&str) -> Option<&'a Value>) -> Call {
    let address = |flag: u64, names: &[&str]| {
        let value = names
            .iter()
            .find_map(|name| argument(name))
            .filter(|_| flags & flag != 0)?;
        match value {
            Value::Word(text) => number(text),
            _ => None,
        }
    };
    Call::Clone {
        flags,
        written: Written {
            tls: address(CLONE_SETTLS, &["tls"]),
            parent_tid: address(CLONE_PARENT_SETTID, &["parent_tid"]),
            child_tid: address(CLONE_CHILD_SETTID, &["child_tidptr", "child_tid"]),
        },
    }
}

/// clone's flags, the signal in the low byte left out.
fn clone_flags(value: &Value) -> Result<u64, String> {
    let Value::Word(text) = value else {
        return Err("clone: flags= isn't a number".into());
    };
    let mut flags = 0;
    for part in text
        .split('|')
        .map(str::trim)
        .filter(|p| !p.starts_with("SIG"))
    {
        flags |= eval(part, symbols::CLONE).map_err(|why| format!("clone: {why}"))?;
    }
    Ok(flags & !0xff)
}

pub(super) fn descriptors(a: &Args<'_>) -> Result<Call, String> {
    const O_CLOEXEC: u64 = 0o2_000_000;
    let flags = |i| a.num(i, symbols::OPEN);
    let new_fd = |cloexec| Call::NewFd {
        cloexec,
        path: None,
        readable: true,
        writable: true,
    };
    Ok(match a.name {
        "open" => Call::Open {
            path: a.path(None, 0)?,
            flags: flags(1)?,
        },
        "creat" => Call::Open {
            path: a.path(None, 0)?,
            flags: 0o1101,
        },
        "openat" => Call::Open {
            path: a.path(Some(0), 1)?,
            flags: flags(2)?,
        },
        "openat2" => {
            let how = a.get(2)?.field("flags").ok_or("openat2: no flags=")?;
            Call::Open {
                path: a.path(Some(0), 1)?,
                flags: number_in(how, symbols::OPEN)?,
            }
        }
        "close" => Call::Close { fd: a.fd(0)?.fd },
        "close_range" => Call::CloseRange {
            first: a.num(0, &[])?,
            last: a.num(1, &[])?,
            flags: flags(2)?,
        },
        "dup" => Call::Dup {
            old: a.fd(0)?,
            new: None,
            cloexec: false,
        },
        "dup2" => Call::Dup {
            old: a.fd(0)?,
            new: Some(a.fd(1)?.fd),
            cloexec: false,
        },
        "dup3" => Call::Dup {
            old: a.fd(0)?,
            new: Some(a.fd(1)?.fd),
            cloexec: flags(2)? & O_CLOEXEC != 0,
        },
        "fcntl" => match a.get(1)? {
            Value::Word(cmd) if cmd == "F_DUPFD" => Call::Dup {
                old: a.fd(0)?,
                new: None,
                cloexec: false,
            },
            Value::Word(cmd) if cmd == "F_DUPFD_CLOEXEC" => Call::Dup {
                old: a.fd(0)?,
                new: None,
                cloexec: true,
            },
            _ => Call::Neutral,
        },
        "memfd_create" => Call::MemfdCreate {
            cloexec: flags(1)? & 1 != 0,
        },
        "io_uring_setup" => new_fd(true),
        _ => new_fd(flags(0)? & O_CLOEXEC != 0),
    })
}

pub(super) fn names(a: &Args<'_>) -> Result<Call, String> {
    let flags = |i| a.num_or(i, symbols::OPEN, 0);
    Ok(match a.name {
        "rename" => Call::Rename {
            from: a.path(None, 0)?,
            to: a.path(None, 1)?,
            flags: 0,
        },
        "renameat" => Call::Rename {
            from: a.path(Some(0), 1)?,
            to: a.path(Some(2), 3)?,
            flags: 0,
        },
        "renameat2" => Call::Rename {
            from: a.path(Some(0), 1)?,
            to: a.path(Some(2), 3)?,
            flags: flags(4)?,
        },
        "link" => Call::Link {
            from: a.path(None, 0)?,
            to: a.path(None, 1)?,
        },
        "linkat" => Call::Link {
            from: a.path(Some(0), 1)?,
            to: a.path(Some(2), 3)?,
        },
        "unlink" => Call::Unlink {
            path: a.path(None, 0)?,
        },
        "unlinkat" => Call::Unlink {
            path: a.path(Some(0), 1)?,
        },
        "chdir" => Call::Chdir {
            path: a.path(None, 0)?,
        },
        _ => Call::Fchdir { dir: a.fd(0)? },
    })
}

pub(super) fn process(a: &Args<'_>) -> Result<Call, String> {
    Ok(match a.name {
        "personality" => Call::Personality {
            persona: a.num(0, symbols::PERSONALITY)?,
        },
        "prctl" => match (a.get(0)?, a.list.get(1)) {
            (Value::Word(op), Some(Value::Word(what)))
                if op == "PR_SET_VMA" && what == "PR_SET_VMA_ANON_NAME" =>
            {
                Call::SetVmaName
            }
            _ => Call::Neutral,
        },
        "setrlimit" => rlimit(a.get(0)?, a.get(1)?)?,
        // prlimit64(pid, ...): 0 is the caller; another process's limits aren't followed.
        _ if a.num(0, &[])? != 0 => Call::Neutral,
        _ => rlimit(a.get(1)?, a.get(2)?)?,
    })
}

fn rlimit(resource: &Value, new: &Value) -> Result<Call, String> {
    // Resources that have nothing to do with memory aren't in the table.
    let Ok(resource) = number_in(resource, symbols::RLIMIT) else {
        return Ok(Call::Neutral);
    };
    let soft = new
        .field("rlim_cur")
        .map(|v| number_in(v, symbols::RLIMIT))
        .transpose()?;
    Ok(Call::Rlimit { resource, soft })
}
