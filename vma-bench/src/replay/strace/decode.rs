//! From a name, arguments and a result to a [`Call`] and a [`Ret`].

use super::{
    call::{Call, FdArg, MmCall, PathArg, Ret},
    line::shorten,
    symbols::{self, Table, eval, number},
    value::{Value, parse_list},
};

/// Decodes a call; `None` for one that this tool doesn't know (it is counted, its arguments aren't looked at).
///
/// # Errors
/// What is wrong with the arguments of a known call.
pub fn call(name: &str, args: &str) -> Result<Option<Call>, String> {
    let Some(decoder) = decoder_of(name) else { return Ok(None) };
    let list = parse_list(args)?;
    decoder(&Args { name, list: &list }).map(Some)
}

/// Whether `name` is a call whose arguments are looked at.
pub fn is_known(name: &str) -> bool {
    decoder_of(name).is_some()
}

type Decoder = fn(&Args<'_>) -> Result<Call, String>;

fn decoder_of(name: &str) -> Option<Decoder> {
    Some(match name {
        "mmap" | "munmap" | "mprotect" | "pkey_mprotect" | "mremap" | "brk" | "madvise" | "remap_file_pages" | "mseal"
        | "msync" => memory,
        "mlock" | "mlock2" | "munlock" | "mlockall" | "munlockall" => locks,
        "shmat" | "shmdt" | "shmget" | "shmctl" | "io_setup" | "io_destroy" => segments,
        "clone" | "clone3" | "fork" | "vfork" | "execve" | "execveat" | "exit" | "exit_group" => tasks,
        "open" | "openat" | "openat2" | "creat" | "close" | "close_range" | "dup" | "dup2" | "dup3" | "memfd_create"
        | "io_uring_setup" | "userfaultfd" | "fcntl" | "memfd_secret" => descriptors,
        "rename" | "renameat" | "renameat2" | "link" | "linkat" | "unlink" | "unlinkat" | "chdir" | "fchdir" => names,
        "prlimit64" | "setrlimit" | "personality" | "prctl" => process,
        "arch_prctl" | "pkey_alloc" | "pkey_free" | "mincore" | "ftruncate" | "getrlimit" | "mbind" | "set_mempolicy"
        | "get_mempolicy" | "migrate_pages" | "move_pages" => |_| Ok(Call::Neutral),
        _ => return None,
    })
}

struct Args<'a> {
    name: &'a str,
    list: &'a [Value],
}

impl<'a> Args<'a> {
    fn get(&self, i: usize) -> Result<&'a Value, String> {
        // clone names its arguments, mmap doesn't: `flags=` is passed over.
        match self.list.get(i) {
            Some(Value::Named(_, inner)) => Ok(inner.as_ref()),
            Some(value) => Ok(value),
            None => Err(format!("{}: argument {} is missing", self.name, i + 1)),
        }
    }

    fn num(&self, i: usize, table: Table) -> Result<u64, String> {
        number_in(self.get(i)?, table).map_err(|why| format!("{}: argument {}: {why}", self.name, i + 1))
    }

    fn num_or(&self, i: usize, table: Table, default: u64) -> Result<u64, String> {
        if self.list.len() > i { self.num(i, table) } else { Ok(default) }
    }

    fn named(&self, name: &str) -> Option<&'a Value> {
        self.list.iter().find_map(|v| match v {
            Value::Named(n, inner) if n == name => Some(inner.as_ref()),
            _ => None,
        })
    }

    fn fd(&self, i: usize) -> Result<FdArg, String> {
        let number = self.num(i, symbols::FD)?;
        let (path, deleted) = match self.get(i)? {
            Value::Fd { path, deleted, .. } => (Some(path.clone()), *deleted),
            _ => (None, false),
        };
        // The kernel takes an int; the upper half of the register doesn't count.
        Ok(FdArg { fd: (number as u32).cast_signed(), path, deleted })
    }

    fn path(&self, dir: Option<usize>, i: usize) -> Result<PathArg, String> {
        let dir = dir.map(|i| self.fd(i)).transpose()?;
        let path = match self.get(i)? {
            Value::Str { text, cut: false } => text.clone(),
            // A bad pointer or an abbreviated name: nothing in the file system can be found by it.
            _ => String::new(),
        };
        Ok(PathArg { dir, path })
    }
}

fn number_in(value: &Value, table: Table) -> Result<u64, String> {
    match value {
        Value::Word(text) | Value::Fd { word: text, .. } => eval(text, table),
        Value::Arrow(before, _) => number_in(before, table),
        other => Err(format!("not a number: {other:?}")),
    }
}

fn memory(a: &Args<'_>) -> Result<Call, String> {
    let n = |i| a.num(i, &[]);
    let prot = |i| a.num(i, symbols::PROT);
    let (addr, len) = (n(0)?, if a.name == "brk" { 0 } else { n(1)? });
    Ok(Call::Mm(match a.name {
        "mmap" => {
            MmCall::Mmap { addr, len, prot: prot(2)?, flags: a.num(3, symbols::MAP)?, fd: a.fd(4)?, offset: n(5)? }
        }
        "munmap" => MmCall::Munmap { addr, len },
        "mprotect" => MmCall::Mprotect { addr, len, prot: prot(2)? },
        "pkey_mprotect" => MmCall::PkeyMprotect { addr, len, prot: prot(2)?, pkey: n(3)?.cast_signed() },
        "mremap" => MmCall::Mremap {
            addr,
            old_len: len,
            new_len: n(2)?,
            flags: a.num(3, symbols::MREMAP)?,
            new_addr: a.num_or(4, &[], 0)?,
        },
        "brk" => MmCall::Brk { addr },
        "madvise" => MmCall::Madvise { addr, len, advice: a.num(2, symbols::MADV)? },
        "mseal" => MmCall::Mseal { addr, len, flags: n(2)? },
        "msync" => MmCall::Msync { addr, len, flags: a.num(2, symbols::LOCKS)? },
        _ => MmCall::RemapFilePages { addr, size: len, prot: prot(2)?, pgoff: n(3)?, flags: a.num(4, symbols::MAP)? },
    }))
}

fn locks(a: &Args<'_>) -> Result<Call, String> {
    let n = |i| a.num(i, &[]);
    let flags = |i| a.num(i, symbols::LOCKS);
    Ok(Call::Mm(match a.name {
        "mlock" => MmCall::Mlock { addr: n(0)?, len: n(1)? },
        "mlock2" => MmCall::Mlock2 { addr: n(0)?, len: n(1)?, flags: flags(2)? },
        "munlock" => MmCall::Munlock { addr: n(0)?, len: n(1)? },
        "mlockall" => MmCall::Mlockall { flags: flags(0)? },
        _ => MmCall::Munlockall,
    }))
}

fn segments(a: &Args<'_>) -> Result<Call, String> {
    let n = |i| a.num(i, symbols::SHM);
    Ok(match a.name {
        "shmget" => Call::Shmget { key: n(0)?, size: n(1)? },
        "shmctl" => Call::Shmctl { id: n(0)?, cmd: n(1)? & !0x100 },
        "shmat" => Call::Mm(MmCall::Shmat { id: n(0)?, addr: n(1)?, flags: n(2)? }),
        "shmdt" => Call::Mm(MmCall::Shmdt { addr: n(0)? }),
        "io_setup" => Call::Mm(MmCall::IoSetup { nr: n(0)?, ctx: context(a.get(1)?) }),
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

fn tasks(a: &Args<'_>) -> Result<Call, String> {
    const FORK: u64 = 0;
    Ok(match a.name {
        "fork" => Call::Clone { flags: FORK },
        "vfork" => Call::Clone { flags: 0x4100 },
        "clone" => {
            let flags = a.named("flags").ok_or("clone: no flags=")?;
            Call::Clone { flags: clone_flags(flags)? }
        }
        "clone3" => {
            let flags = a.get(0)?.field("flags").ok_or("clone3: no flags=")?;
            Call::Clone { flags: clone_flags(flags)? }
        }
        "execve" | "execveat" => Call::Exec,
        _ => Call::Exit,
    })
}

/// clone's flags, the signal in the low byte left out.
fn clone_flags(value: &Value) -> Result<u64, String> {
    let Value::Word(text) = value else { return Err("clone: flags= isn't a number".into()) };
    let mut flags = 0;
    for part in text.split('|').map(str::trim).filter(|p| !p.starts_with("SIG")) {
        flags |= eval(part, symbols::CLONE).map_err(|why| format!("clone: {why}"))?;
    }
    Ok(flags & !0xff)
}

fn descriptors(a: &Args<'_>) -> Result<Call, String> {
    const O_CLOEXEC: u64 = 0o2_000_000;
    let flags = |i| a.num(i, symbols::OPEN);
    let new_fd = |cloexec| Call::NewFd { cloexec, path: None, readable: true, writable: true };
    Ok(match a.name {
        "open" => Call::Open { path: a.path(None, 0)?, flags: flags(1)? },
        "creat" => Call::Open { path: a.path(None, 0)?, flags: 0o1101 },
        "openat" => Call::Open { path: a.path(Some(0), 1)?, flags: flags(2)? },
        "openat2" => {
            let how = a.get(2)?.field("flags").ok_or("openat2: no flags=")?;
            Call::Open { path: a.path(Some(0), 1)?, flags: number_in(how, symbols::OPEN)? }
        }
        "close" => Call::Close { fd: a.fd(0)?.fd },
        "close_range" => Call::CloseRange { first: a.num(0, &[])?, last: a.num(1, &[])?, flags: flags(2)? },
        "dup" => Call::Dup { old: a.fd(0)?, new: None, cloexec: false },
        "dup2" => Call::Dup { old: a.fd(0)?, new: Some(a.fd(1)?.fd), cloexec: false },
        "dup3" => Call::Dup { old: a.fd(0)?, new: Some(a.fd(1)?.fd), cloexec: flags(2)? & O_CLOEXEC != 0 },
        "fcntl" => match a.get(1)? {
            Value::Word(cmd) if cmd == "F_DUPFD" => Call::Dup { old: a.fd(0)?, new: None, cloexec: false },
            Value::Word(cmd) if cmd == "F_DUPFD_CLOEXEC" => Call::Dup { old: a.fd(0)?, new: None, cloexec: true },
            _ => Call::Neutral,
        },
        "memfd_create" => Call::MemfdCreate { cloexec: flags(1)? & 1 != 0 },
        "io_uring_setup" => new_fd(true),
        _ => new_fd(flags(0)? & O_CLOEXEC != 0),
    })
}

fn names(a: &Args<'_>) -> Result<Call, String> {
    let flags = |i| a.num_or(i, symbols::OPEN, 0);
    Ok(match a.name {
        "rename" => Call::Rename { from: a.path(None, 0)?, to: a.path(None, 1)?, flags: 0 },
        "renameat" => Call::Rename { from: a.path(Some(0), 1)?, to: a.path(Some(2), 3)?, flags: 0 },
        "renameat2" => Call::Rename { from: a.path(Some(0), 1)?, to: a.path(Some(2), 3)?, flags: flags(4)? },
        "link" => Call::Link { from: a.path(None, 0)?, to: a.path(None, 1)? },
        "linkat" => Call::Link { from: a.path(Some(0), 1)?, to: a.path(Some(2), 3)? },
        "unlink" => Call::Unlink { path: a.path(None, 0)? },
        "unlinkat" => Call::Unlink { path: a.path(Some(0), 1)? },
        "chdir" => Call::Chdir { path: a.path(None, 0)? },
        _ => Call::Fchdir { dir: a.fd(0)? },
    })
}

fn process(a: &Args<'_>) -> Result<Call, String> {
    Ok(match a.name {
        "personality" => Call::Personality { persona: a.num(0, symbols::PERSONALITY)? },
        "prctl" => match (a.get(0)?, a.list.get(1)) {
            (Value::Word(op), Some(Value::Word(what))) if op == "PR_SET_VMA" && what == "PR_SET_VMA_ANON_NAME" => {
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
    let Ok(resource) = number_in(resource, symbols::RLIMIT) else { return Ok(Call::Neutral) };
    let soft = new.field("rlim_cur").map(|v| number_in(v, symbols::RLIMIT)).transpose()?;
    Ok(Call::Rlimit { resource, soft })
}

/// Decodes what follows the equals sign: `0x7fff`, `3</path>`, `-1 ENOMEM (...)`, `?`.
///
/// # Errors
/// It is none of these.
pub fn ret(text: &str) -> Result<Ret, String> {
    let text = text.trim();
    if text == "?" || text.starts_with("? ") {
        return Ok(Ret::Unknown);
    }
    let bad = || format!("no result of a call: {:?}", shorten(text));
    if let Some(error) = text.strip_prefix("-1 E") {
        let name = error.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or(error);
        return errno(name).map(Ret::Err).ok_or_else(|| format!("an error that isn't known here: \"E{name}\""));
    }
    let (word, rest) = text.split_at(text.find(['<', ' ', '(']).unwrap_or(text.len()));
    let value = number(word).ok_or_else(bad)?;
    if !rest.starts_with('<') || word.contains('x') {
        return Ok(Ret::Ok { value, path: None, deleted: false });
    }
    match parse_list(text.split(" <0.").next().unwrap_or(text)).map_err(|_| bad())?.as_slice() {
        [Value::Fd { path, deleted, .. }] => Ok(Ret::Ok { value, path: Some(path.clone()), deleted: *deleted }),
        _ => Err(bad()),
    }
}

/// Linux's number of an error, named without its `E`.
fn errno(name: &str) -> Option<i32> {
    const NAMES: [&str; 41] = [
        "", "PERM", "NOENT", "SRCH", "INTR", "IO", "NXIO", "2BIG", "NOEXEC", "BADF", "CHILD", "AGAIN", "NOMEM", "ACCES",
        "FAULT", "NOTBLK", "BUSY", "EXIST", "XDEV", "NODEV", "NOTDIR", "ISDIR", "INVAL", "NFILE", "MFILE", "NOTTY", "TXTBSY",
        "FBIG", "NOSPC", "SPIPE", "ROFS", "MLINK", "PIPE", "DOM", "RANGE", "DEADLK", "NAMETOOLONG", "NOLCK", "NOSYS",
        "NOTEMPTY", "LOOP",
    ];
    const MORE: [(&str, i32); 8] = [
        ("WOULDBLOCK", 11),
        ("OVERFLOW", 75),
        ("OPNOTSUPP", 95),
        ("NOTSUPP", 95),
        ("IDRM", 43),
        ("USERS", 87),
        ("BADFD", 77),
        ("DQUOT", 122),
    ];
    if name.is_empty() {
        return None;
    }
    let plain = NAMES.iter().position(|n| *n == name).and_then(|i| i32::try_from(i).ok());
    plain.or_else(|| MORE.iter().find(|(n, _)| *n == name).map(|&(_, number)| number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mm(name: &str, args: &str) -> MmCall {
        match call(name, args).unwrap().unwrap() {
            Call::Mm(mm) => mm,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn memory_calls_are_decoded() {
        assert_eq!(
            mm("mmap", "0x7ffff7dfb000, 1400832, PROT_READ|PROT_EXEC, MAP_PRIVATE|MAP_FIXED|MAP_DENYWRITE, 3</lib/x>, 0x26000"),
            MmCall::Mmap {
                addr: 0x7fff_f7df_b000,
                len: 1_400_832,
                prot: 5,
                flags: 0x812,
                fd: FdArg { fd: 3, path: Some("/lib/x".into()), deleted: false },
                offset: 0x26000
            }
        );
        assert_eq!(
            mm("mremap", "0x7000, 4096, 8192, MREMAP_MAYMOVE"),
            MmCall::Mremap { addr: 0x7000, old_len: 4096, new_len: 8192, flags: 1, new_addr: 0 }
        );
        assert_eq!(mm("madvise", "0x7000, 1, 0x66 /* MADV_??? */"), MmCall::Madvise { addr: 0x7000, len: 1, advice: 102 });
        assert_eq!(mm("io_setup", "64, [0x7ffff7d99000]"), MmCall::IoSetup { nr: 64, ctx: Some(0x7fff_f7d9_9000) });
        assert_eq!(mm("pkey_mprotect", "0x7000, 1, PROT_READ, -1"), MmCall::PkeyMprotect {
            addr: 0x7000,
            len: 1,
            prot: 1,
            pkey: -1
        });
        assert_eq!(mm("shmat", "50, 0x7000, SHM_RND|SHM_REMAP"), MmCall::Shmat { id: 50, addr: 0x7000, flags: 0o60000 });
    }

    #[test]
    fn other_calls_are_decoded() {
        let c = |name, args| call(name, args).unwrap().unwrap();
        assert_eq!(c("vfork", ""), Call::Clone { flags: 0x4100 });
        assert_eq!(c("clone", "child_stack=NULL, flags=CLONE_CHILD_SETTID|SIGCHLD, child_tidptr=0x7"), Call::Clone {
            flags: 0x100_0000
        });
        assert_eq!(c("clone3", "{flags=CLONE_VM|CLONE_THREAD, exit_signal=0} => {parent_tid=[1]}, 88"), Call::Clone {
            flags: 0x1_0100
        });
        assert_eq!(
            c("prlimit64", "0, RLIMIT_AS, {rlim_cur=1024*1024, rlim_max=RLIM64_INFINITY}, NULL"),
            Call::Rlimit { resource: 9, soft: Some(1 << 20) }
        );
        assert_eq!(c("prlimit64", "0, RLIMIT_STACK, NULL, "), Call::Rlimit { resource: 3, soft: None });
        assert_eq!(c("prlimit64", "0, RLIMIT_NOFILE, NULL, {rlim_cur=1, rlim_max=2}"), Call::Neutral);
        assert_eq!(c("personality", "PER_LINUX|READ_IMPLIES_EXEC"), Call::Personality { persona: 0x40_0000 });
        assert_eq!(c("dup2", "3<pipe:[1]>, 0</dev/null>"), Call::Dup {
            old: FdArg { fd: 3, path: Some("pipe:[1]".into()), deleted: false },
            new: Some(0),
            cloexec: false
        });
    }

    #[test]
    fn results_are_decoded() {
        let value = |value| Ret::Ok { value, path: None, deleted: false };
        assert_eq!(ret("0x7000"), Ok(value(0x7000)));
        assert_eq!(ret("0"), Ok(value(0)));
        assert_eq!(ret("0x40000 (PER_LINUX|ADDR_NO_RANDOMIZE)"), Ok(value(0x40000)));
        assert_eq!(ret("0 <0.000021>"), Ok(value(0)));
        assert_eq!(ret("3</memfd:a>(deleted)"), Ok(Ret::Ok { value: 3, path: Some("/memfd:a".into()), deleted: true }));
        assert_eq!(ret("3</a> <0.000021>"), Ok(Ret::Ok { value: 3, path: Some("/a".into()), deleted: false }));
        assert_eq!(ret("-1 ENOMEM (Cannot allocate memory)"), Ok(Ret::Err(12)));
        assert_eq!(ret("-1 EEXIST (File exists)"), Ok(Ret::Err(17)));
        assert_eq!(ret("-1 EOVERFLOW (x)"), Ok(Ret::Err(75)));
        assert_eq!(ret("? ERESTARTSYS (To be restarted)"), Ok(Ret::Unknown));
        for bad in ["", "x", "-1 EWHAT (x)", "-1 E", "3</a"] {
            assert!(ret(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn damage_in_arguments_is_named() {
        for (name, args, why) in [
            ("mmap", "NULL, 4096, PROT_READ", "mmap: argument 4 is missing"),
            ("munmap", "0x70zz, 4096", "munmap: argument 1: \"0x70zz\" is neither a number nor a constant known here"),
            ("mprotect", "0x7000, 4096, PROT_NEW", "mprotect: argument 3: \"PROT_NEW\" is neither"),
            ("clone", "child_stack=NULL", "clone: no flags="),
            ("munmap", "0x7000, 4096}", "arguments that can't be read"),
        ] {
            let error = call(name, args).unwrap_err();
            assert!(error.starts_with(why), "{error}");
        }
        assert_eq!(call("statx", "}}}"), Ok(None));
    }
}
