//! From a name, arguments and a result to a [`Call`] and a [`Ret`](super::call::Ret).

mod kinds;
mod result;

use self::kinds::{descriptors, locks, memory, names, process, segments, tasks};
pub use self::result::ret;
use super::{
    call::{Call, FdArg, PathArg},
    symbols::{self, Table, eval},
    value::{Value, parse_list},
};

/// Decodes a call; `None` for one that this tool doesn't know (it is counted, its arguments aren't looked at).
///
/// # Errors
/// What is wrong with the arguments of a known call.
pub fn call(name: &str, args: &str) -> Result<Option<Call>, String> {
    let Some(decoder) = decoder_of(name) else {
        return Ok(None);
    };
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
        "mmap" | "munmap" | "mprotect" | "pkey_mprotect" | "mremap" | "brk" | "madvise"
        | "remap_file_pages" | "mseal" | "msync" => memory,
        "mlock" | "mlock2" | "munlock" | "mlockall" | "munlockall" => locks,
        "shmat" | "shmdt" | "shmget" | "shmctl" | "io_setup" | "io_destroy" => segments,
        "clone" | "clone3" | "fork" | "vfork" | "execve" | "execveat" | "exit" | "exit_group"
        | "arch_prctl" => tasks,
        "open" | "openat" | "openat2" | "creat" | "close" | "close_range" | "dup" | "dup2"
        | "dup3" | "memfd_create" | "io_uring_setup" | "userfaultfd" | "fcntl" | "memfd_secret" => {
            descriptors
        }
        "rename" | "renameat" | "renameat2" | "link" | "linkat" | "unlink" | "unlinkat"
        | "chdir" | "fchdir" => names,
        "prlimit64" | "setrlimit" | "personality" | "prctl" => process,
        "pkey_alloc" | "pkey_free" | "mincore" | "ftruncate" | "getrlimit" | "mbind"
        | "set_mempolicy" | "get_mempolicy" | "migrate_pages" | "move_pages" => {
            |_| Ok(Call::Neutral)
        }
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
        number_in(self.get(i)?, table)
            .map_err(|why| format!("{}: argument {}: {why}", self.name, i + 1))
    }

    fn num_or(&self, i: usize, table: Table, default: u64) -> Result<u64, String> {
        if self.list.len() > i {
            self.num(i, table)
        } else {
            Ok(default)
        }
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
        Ok(FdArg {
            fd: (number as u32).cast_signed(),
            path,
            deleted,
        })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::strace::call::{MmCall, Written};

    fn mm(name: &str, args: &str) -> MmCall {
        match call(name, args).unwrap().unwrap() {
            Call::Mm(mm) => mm,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn memory_calls_are_decoded() {
        assert_eq!(
            mm(
                "mmap",
                "0x7ffff7dfb000, 1400832, PROT_READ|PROT_EXEC, MAP_PRIVATE|MAP_FIXED|MAP_DENYWRITE, 3</lib/x>, 0x26000"
            ),
            MmCall::Mmap {
                addr: 0x7fff_f7df_b000,
                len: 1_400_832,
                prot: 5,
                flags: 0x812,
                fd: FdArg {
                    fd: 3,
                    path: Some("/lib/x".into()),
                    deleted: false
                },
                offset: 0x26000
            }
        );
        assert_eq!(
            mm("mremap", "0x7000, 4096, 8192, MREMAP_MAYMOVE"),
            MmCall::Mremap {
                addr: 0x7000,
                old_len: 4096,
                new_len: 8192,
                flags: 1,
                new_addr: 0
            }
        );
        assert_eq!(
            mm("madvise", "0x7000, 1, 0x66 /* MADV_??? */"),
            MmCall::Madvise {
                addr: 0x7000,
                len: 1,
                advice: 102
            }
        );
        assert_eq!(
            mm("io_setup", "64, [0x7ffff7d99000]"),
            MmCall::IoSetup {
                nr: 64,
                ctx: Some(0x7fff_f7d9_9000)
            }
        );
        assert_eq!(
            mm("pkey_mprotect", "0x7000, 1, PROT_READ, -1"),
            MmCall::PkeyMprotect {
                addr: 0x7000,
                len: 1,
                prot: 1,
                pkey: -1
            }
        );
        assert_eq!(
            mm("shmat", "50, 0x7000, SHM_RND|SHM_REMAP"),
            MmCall::Shmat {
                id: 50,
                addr: 0x7000,
                flags: 0o60000
            }
        );
    }

    #[test]
    fn other_calls_are_decoded() {
        let c = |name, args| call(name, args).unwrap().unwrap();
        let made = |flags, written| Call::Clone { flags, written };
        let nothing = Written::default();
        assert_eq!(c("vfork", ""), made(0x4100, nothing));
        assert_eq!(
            c(
                "clone",
                "child_stack=NULL, flags=CLONE_CHILD_SETTID|SIGCHLD, child_tidptr=0x7"
            ),
            made(
                0x100_0000,
                Written {
                    child_tid: Some(7),
                    ..nothing
                }
            )
        );
        assert_eq!(
            c(
                "clone3",
                "{flags=CLONE_VM|CLONE_THREAD|CLONE_SETTLS|CLONE_PARENT_SETTID, parent_tid=0x8, tls=0x9} \
                 => {parent_tid=[1]}, 88"
            ),
            made(
                0x19_0100,
                Written {
                    tls: Some(9),
                    parent_tid: Some(8),
                    child_tid: None,
                }
            )
        );
        assert_eq!(
            c("arch_prctl", "ARCH_SET_FS, 0x7f00"),
            Call::SetFs { addr: 0x7f00 }
        );
        assert_eq!(
            c("arch_prctl", "0x3001 /* ARCH_??? */, 0x7f00"),
            Call::Neutral
        );
        assert_eq!(
            c(
                "prlimit64",
                "0, RLIMIT_AS, {rlim_cur=1024*1024, rlim_max=RLIM64_INFINITY}, NULL"
            ),
            Call::Rlimit {
                resource: 9,
                soft: Some(1 << 20)
            }
        );
        assert_eq!(
            c("prlimit64", "0, RLIMIT_STACK, NULL, "),
            Call::Rlimit {
                resource: 3,
                soft: None
            }
        );
        assert_eq!(
            c("arch_prctl", "ARCH_SET_FS, 0x7f00"),
            Call::SetFs { addr: 0x7f00 }
        );
        assert_eq!(
            c("arch_prctl", "0x3001 /* ARCH_??? */, 0x7f00"),
            Call::Neutral
        );
        assert_eq!(
            c(
                "prlimit64",
                "0, RLIMIT_NOFILE, NULL, {rlim_cur=1, rlim_max=2}"
            ),
            Call::Neutral
        );
        assert_eq!(
            c("personality", "PER_LINUX|READ_IMPLIES_EXEC"),
            Call::Personality { persona: 0x40_0000 }
        );
        assert_eq!(
            c("dup2", "3<pipe:[1]>, 0</dev/null>"),
            Call::Dup {
                old: FdArg {
                    fd: 3,
                    path: Some("pipe:[1]".into()),
                    deleted: false
                },
                new: Some(0),
                cloexec: false
            }
        );
    }

    #[test]
    fn damage_in_arguments_is_named() {
        for (name, args, why) in [
            (
                "mmap",
                "NULL, 4096, PROT_READ",
                "mmap: argument 4 is missing",
            ),
            (
                "munmap",
                "0x70zz, 4096",
                "munmap: argument 1: \"0x70zz\" is neither a number nor a constant known here",
            ),
            (
                "mprotect",
                "0x7000, 4096, PROT_NEW",
                "mprotect: argument 3: \"PROT_NEW\" is neither",
            ),
            ("clone", "child_stack=NULL", "clone: no flags="),
            ("munmap", "0x7000, 4096}", "arguments that can't be read"),
        ] {
            let error = call(name, args).unwrap_err();
            assert!(error.starts_with(why), "{error}");
        }
        assert_eq!(call("statx", "}}}"), Ok(None));
    }
}
