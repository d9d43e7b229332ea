//! A registration that comes in the middle of a dup waits for it, and then finds the child as a whole or not at all (C10).
#![allow(clippy::unwrap_used, reason = "tests may")]

mod probed;
mod watchdog;

use std::fmt;
use std::ops::Range;
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Duration;

use probed::{AT, BYTE, Log, PAGE, assert_exact, file, register, text};
use vma_core::{
    Backend, ConfigError, Domain, Errno, Fault, FaultError, Faulted, FileUnmap, Inherited,
    PageChange, PublishError, SpaceConfig, System, Vma,
};

/// At which step of a dup something is done, and whether that step fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// Marks have been looked at, nothing is in an index.
    Layout,
    /// The child is in the indexes of files.
    Pages { fails: bool },
}

type Action = Box<dyn FnOnce() + Send>;

/// No memory, and something to do in the middle of a dup.
#[derive(Default)]
struct Staged(Mutex<Option<(Step, Action)>>);

impl fmt::Debug for Staged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Staged").finish()
    }
}

impl Staged {
    /// Whether this step is the one.
    fn reach(&self, reached: impl Fn(Step) -> bool) -> Option<Step> {
        let mut staged = self.0.lock().unwrap();
        let (step, action) = staged.take_if(|(step, _)| reached(*step))?;
        drop(staged);
        action();
        Some(step)
    }
}

impl Backend for Staged {
    type Taken = ();

    fn attach(&self, _: &Domain, _: &SpaceConfig) -> Result<(), ConfigError> {
        Ok(())
    }

    fn prepare(
        &self,
        _: &[PageChange],
        _: &[Range<u64>],
        _: &[Range<u64>],
    ) -> Result<Option<()>, PublishError> {
        Ok(Some(()))
    }

    fn commit(&self, _: &[PageChange], _: &[Range<u64>], (): &mut ()) {}

    fn finish(&self, (): ()) {}

    fn fault(&self, _: &Fault<'_>) -> Result<Faulted, FaultError> {
        Ok(Faulted::Done)
    }

    fn is_resident(&self, _: u64, _: &Vma, _: u64) -> bool {
        false
    }

    fn dup(&self) -> Result<Self, PublishError> {
        self.reach(|step| step == Step::Layout);
        Ok(Staged::default())
    }

    fn dup_pages(&self, _: &Self, _: &[Inherited]) -> Result<(), PublishError> {
        match self.reach(|step| step != Step::Layout) {
            Some(Step::Pages { fails: true }) => Err(PublishError::NoMemory),
            _ => Ok(()),
        }
    }

    fn unmap_file(&self, _: &FileUnmap<'_>) {}

    fn unmap_removed(&self, _: u64, _: u64) {}

    fn settle(&self) {}
}

fn registers_at(step: Step) {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let (system, file, log) = (System::<Staged>::default(), file(8), Log::new());
    let parent = system
        .create(SpaceConfig::default(), Staged::default())
        .unwrap();
    parent.map(&text(&file, 0, 8, AT)).unwrap();
    let (begin, started) = mpsc::channel();
    let (done, registered) = mpsc::channel();
    let staged = move || {
        begin.send(()).unwrap();
        // Time enough for a registration that doesn't wait.
        let _ = registered.recv_timeout(Duration::from_millis(50));
    };
    *parent.backend().0.lock().unwrap() = Some((step, Box::new(staged)));
    thread::scope(|scope| {
        let (system, file, log) = (&system, &file, &log);
        let tracer = scope.spawn(move || {
            started.recv().unwrap();
            let handle = register(system, file, BYTE, log);
            let _ = done.send(());
            handle
        });
        let child = parent.dup();
        let handle = tracer.join().unwrap();
        match child {
            Ok(child) => {
                assert_ne!(step, Step::Pages { fails: true });
                assert_exact([&parent, &child], &handle, log);
                assert_eq!(log.calls(), (2, 0));
            }
            Err(error) => {
                assert_eq!(step, Step::Pages { fails: true });
                assert_eq!(error.errno(), Errno::ENOMEM);
                assert_exact([&parent], &handle, log);
                assert_eq!(log.calls(), (1, 0), "the child was never a space");
            }
        }
        parent.unmap(AT, 8 * PAGE).unwrap();
        assert!(log.places().is_empty());
    });
}

#[test]
fn before_the_child_is_in_any_index() {
    registers_at(Step::Layout);
}

#[test]
fn after_the_child_is_in_the_index() {
    registers_at(Step::Pages { fails: false });
}

#[test]
fn when_the_dup_is_about_to_fail() {
    registers_at(Step::Pages { fails: true });
}
