//! Monitors of the running kernel, and the calls that are compared.

#![expect(
    unsafe_code,
    reason = "memory is mapped and unmapped in a zone of its own"
)]

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

const PAGE: u64 = 4096;
/// Pages of the zone.
const PAGES: u64 = 24;

/// Two without events, and two that hear of moves and unmaps.
pub(crate) const FEATURES: [u64; 4] = [0, 0, 1 << 2, (1 << 2) | (1 << 6)];
/// Of the modes, in smaps.
pub(crate) const CODES: [&str; 3] = ["um", "uw", "ui"];

/// 0, or the errno.
pub(crate) type Outcome = Result<(), i32>;

/// What is mapped.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Anon,
    ReadOnly,
    /// Memory files.
    Shared,
    Private,
    NeverWritten,
    File,
}

/// A call; places and lengths in pages.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Map(u64, u64, Kind),
    Unmap(u64, u64),
    Protect(u64, u64, u64),
    Remap(u64, u64, u64),
    Register(usize, u64, u64, u64),
    Unregister(usize, u64, u64),
    Close(usize),
}

/// xorshift.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) % limit
    }
}

impl Op {
    pub(crate) fn random(random: &mut Random) -> Op {
        let page = random.below(PAGES - 1);
        let pages = 1 + random.below((PAGES - page).min(8));
        let number = random.below(4) as usize;
        match random.below(16) {
            0..=3 => {
                let kind = match random.below(12) {
                    0..=5 => Kind::Anon,
                    6 => Kind::ReadOnly,
                    7..=8 => Kind::Shared,
                    9 => Kind::Private,
                    10 => Kind::NeverWritten,
                    _ => Kind::File,
                };
                Op::Map(page, pages, kind)
            }
            4 => Op::Unmap(page, pages),
            5 => Op::Protect(page, pages, [1, 3][random.below(2) as usize]),
            6..=7 => {
                let to = random.below(PAGES - pages + 1);
                Op::Remap(page, pages, to)
            }
            8..=12 => Op::Register(
                number,
                page,
                pages,
                [1, 1, 2, 4, 7, 3][random.below(6) as usize],
            ),
            13..=14 => Op::Unregister(number, page, pages),
            _ => Op::Close(number),
        }
    }
}

struct Monitor {
    fd: OwnedFd,
    reader: Option<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// The zone of this process.
pub(crate) struct Kernel {
    zone: u64,
    memory: [File; 2],
    regular: File,
    monitors: [Option<Monitor>; 4],
}

fn last() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

fn outcome(failed: bool) -> Outcome {
    if failed { Err(last()) } else { Ok(()) }
}

fn open_monitor(features: u64) -> Result<OwnedFd, String> {
    // SAFETY: makes a descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    if fd < 0 {
        return Err(format!("userfaultfd fails with errno {}", last()));
    }
    // SAFETY: the descriptor is new and nobody else's.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let mut api = [0xaa, features, 0];
    match ioctl(&fd, 0xc018_aa3f, &mut api) {
        Ok(()) => Ok(fd),
        Err(errno) => Err(format!("UFFDIO_API fails with errno {errno}")),
    }
}

fn ioctl(fd: &OwnedFd, request: u64, words: &mut [u64]) -> Outcome {
    // SAFETY: the words are as many as the request has.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request, words.as_mut_ptr()) };
    outcome(result != 0)
}

impl Monitor {
    fn new(features: u64) -> Self {
        let fd = open_monitor(features).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let reader = (features != 0).then(|| {
            let (fd, stop) = (fd.as_raw_fd(), Arc::clone(&stop));
            thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let mut poll = libc::pollfd {
                        fd,
                        events: libc::POLLIN,
                        revents: 0,
                    };
                    let mut message = [0_u8; 32];
                    // SAFETY: one live record; the descriptor stays open until this thread has been joined.
                    if unsafe { libc::poll(&raw mut poll, 1, 1) } > 0 {
                        // SAFETY: as above, and as many bytes as there are.
                        unsafe { libc::read(fd, message.as_mut_ptr().cast(), message.len()) };
                    }
                }
            })
        });
        Monitor { fd, reader, stop }
    }
}

impl Kernel {
    /// Takes a zone, in which nothing may be mapped. The error says why there is nothing to compare with.
    pub(crate) fn new(zone: u64) -> Result<Self, String> {
        drop(open_monitor(FEATURES[3])?);
        let version = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        if !version.starts_with("6.18.") {
            return Err(format!("the kernel is {}, not 6.18", version.trim()));
        }
        // SAFETY: makes a descriptor.
        let fd = unsafe { libc::memfd_create(c"m".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: the descriptor is new and nobody else's.
        let memory = unsafe { File::from_raw_fd(fd) };
        memory.set_len(64 * PAGE).unwrap();
        let read_only = File::open(format!("/proc/self/fd/{fd}")).unwrap();
        Ok(Kernel {
            zone,
            memory: [memory, read_only],
            regular: File::open("/proc/self/exe").unwrap(),
            monitors: [const { None }; 4],
        })
    }

    fn monitor(&mut self, number: usize) -> &Monitor {
        self.monitors[number].get_or_insert_with(|| Monitor::new(FEATURES[number]))
    }

    /// Unmaps everything and closes all monitors.
    pub(crate) fn clear(&mut self) {
        self.monitors = [const { None }; 4];
        self.run(Op::Unmap(0, PAGES)).unwrap();
    }

    pub(crate) fn run(&mut self, op: Op) -> Outcome {
        let zone = self.zone;
        let place = |page: u64| zone + page * PAGE;
        let pointer = |page: u64| std::ptr::with_exposed_provenance_mut(place(page) as usize);
        let bytes = |pages: u64| (pages * PAGE) as usize;
        match op {
            Op::Map(page, pages, kind) => {
                let (anon, both) = (libc::MAP_ANONYMOUS | libc::MAP_PRIVATE, 3);
                let (fd, flags, prot) = match kind {
                    Kind::Anon => (-1, anon, both),
                    Kind::ReadOnly => (-1, anon, 1),
                    Kind::Shared => (self.memory[0].as_raw_fd(), libc::MAP_SHARED, both),
                    Kind::Private => (self.memory[0].as_raw_fd(), libc::MAP_PRIVATE, both),
                    Kind::NeverWritten => (self.memory[1].as_raw_fd(), libc::MAP_SHARED, 1),
                    Kind::File => (self.regular.as_raw_fd(), libc::MAP_PRIVATE, 1),
                };
                let offset = if fd < 0 {
                    0
                } else {
                    (page * PAGE).cast_signed()
                };
                // SAFETY: within the zone, in which nothing of Rust's is.
                let at = unsafe {
                    libc::mmap(
                        pointer(page),
                        bytes(pages),
                        prot,
                        flags | libc::MAP_FIXED,
                        fd,
                        offset,
                    )
                };
                outcome(at == libc::MAP_FAILED)
            }
            Op::Unmap(page, pages) => {
                // SAFETY: as above.
                outcome(unsafe { libc::munmap(pointer(page), bytes(pages)) } != 0)
            }
            Op::Protect(page, pages, prot) => {
                // SAFETY: as above.
                outcome(unsafe { libc::mprotect(pointer(page), bytes(pages), prot as i32) } != 0)
            }
            Op::Remap(page, pages, to) => {
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                // SAFETY: as above, both places.
                let at = unsafe {
                    libc::mremap(
                        pointer(page),
                        bytes(pages),
                        bytes(pages),
                        flags,
                        pointer(to),
                    )
                };
                outcome(at == libc::MAP_FAILED)
            }
            Op::Register(number, page, pages, modes) => {
                let mut words = [place(page), pages * PAGE, modes, 0];
                ioctl(&self.monitor(number).fd, 0xc020_aa00, &mut words)
            }
            Op::Unregister(number, page, pages) => {
                let mut words = [place(page), pages * PAGE];
                ioctl(&self.monitor(number).fd, 0x8010_aa01, &mut words)
            }
            Op::Close(number) => {
                self.monitors[number] = None;
                Ok(())
            }
        }
    }

    /// Ranges, rights and codes of modes, of the zone.
    pub(crate) fn layout(&self) -> Vec<String> {
        let text = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = Vec::new();
        let mut head = None;
        for line in text.lines() {
            let mut words = line.split_whitespace();
            let Some(first) = words.next() else { continue };
            if let Some(codes) = line.strip_prefix("VmFlags:") {
                let codes = codes.split_whitespace();
                let modes: Vec<_> = codes.filter(|code| CODES.contains(code)).collect();
                if let Some(head) = head.take() {
                    lines.push(format!("{head} {}", modes.join(" ")));
                }
            } else if let Some((start, _)) = first.split_once('-') {
                let start = u64::from_str_radix(start, 16).unwrap_or(0);
                let is_inside = (self.zone..self.zone + PAGES * PAGE).contains(&start);
                let perms = words.next().unwrap_or_default();
                head = is_inside.then(|| format!("{first} {perms}"));
            }
        }
        lines
    }
}
