//! What a probe's callbacks may do, and what becomes of those that fail.
#![allow(clippy::unwrap_used, reason = "tests may")]

mod probed;
mod watchdog;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use probed::{
    AT, BYTE, Log, PAGE, Places, With, asking, assert_exact, create, file, id, panics, register,
    text,
};
use vma_core::{
    CancelToken, Errno, GaveUp, Probe, ProbeError, ProbeHandle, ProbeSite, System, Wait,
};

#[test]
fn an_installation_that_fails_fails_the_registration_and_unwinds_it() {
    let (system, file, log) = (System::default(), file(8), Log::new());
    let spaces: Vec<_> = (0..5).map(|_| create(&system)).collect();
    for space in &spaces {
        space.map(&text(&file, 0, 8, AT)).unwrap();
    }
    let bad = id(&spaces[2]);
    let probe = asking(&log, move |site| {
        if site.space() == bad {
            return Err(Errno::EFAULT);
        }
        Ok(())
    });
    let try_it = || system.register_probe(file.object(), BYTE, probe.clone(), Wait::forever());
    let error = try_it().unwrap_err();
    let refused = ProbeError::Refused {
        space: bad,
        addr: AT + BYTE,
        errno: Errno::EFAULT,
    };
    assert_eq!((error, error.errno()), (refused, Errno::EFAULT));
    let (installed, removed) = log.calls();
    assert!(log.places().is_empty() && installed == removed);
    // Nobody looks for it any more.
    spaces[0].map(&text(&file, 0, 8, AT + 8 * PAGE)).unwrap();
    assert_eq!(log.calls(), (installed, removed));
    spaces[2].unmap(AT, 8 * PAGE).unwrap();
    let handle = try_it().unwrap();
    assert_exact(&spaces, &handle, &log);
    // Later it's left out.
    spaces[2].map(&text(&file, 0, 8, AT)).unwrap();
    assert_eq!((log.places().len(), handle.failures()), (5, 1));
    let child = spaces[2].dup().unwrap();
    assert_eq!((log.places().len(), handle.failures()), (6, 1));
    drop(child);
    spaces[2].unmap(AT, 8 * PAGE).unwrap();
    drop(handle);
    assert!(log.places().is_empty());
}

#[test]
fn a_panic_in_a_registration_goes_on_when_the_probe_is_nowhere() {
    let (system, file, log) = (System::default(), file(8), Log::new());
    let spaces: Vec<_> = (0..3).map(|_| create(&system)).collect();
    for space in &spaces {
        space.map(&text(&file, 0, 8, AT)).unwrap();
    }
    let calls = AtomicUsize::new(0);
    let probe = asking(&log, move |_| {
        assert_ne!(calls.fetch_add(1, Ordering::Relaxed), 1, "the second");
        Ok(())
    });
    let try_it = || register(&system, &file, BYTE, &probe);
    assert!(panics(|| drop(try_it())));
    assert_eq!(log.calls(), (1, 1));
    drop(system.quiesce_dups(Wait::forever()).unwrap());
    let handle = try_it();
    assert_exact(&spaces, &handle, &log);
}

#[test]
fn a_panic_in_a_call_goes_on_when_all_is_done() {
    let (system, file) = (System::default(), file(8));
    let space = create(&system);
    let armed = Arc::new(AtomicUsize::new(0));
    // Before and after it, whatever the order.
    let logs = [Log::new(), Log::new()];
    let first = register(&system, &file, BYTE, &logs[0]);
    let log = Log::new();
    let (one, two) = (armed.clone(), armed.clone());
    let (comes, goes) = (log.clone(), log.clone());
    let probe = Arc::new(With {
        concerns: |_: &ProbeSite<'_>| true,
        install: move |site: &ProbeSite<'_>| {
            assert_ne!(one.load(Ordering::Relaxed), 1, "armed");
            comes.note(site, true);
            Ok(())
        },
        remove: move |site: &ProbeSite<'_>| {
            goes.note(site, false);
            assert_ne!(two.load(Ordering::Relaxed), 2, "armed");
        },
    });
    let handle = register(&system, &file, BYTE, &probe);
    let last = register(&system, &file, BYTE + 1, &logs[1]);

    armed.store(1, Ordering::Relaxed);
    assert!(panics(|| {
        let _ = space.map(&text(&file, 0, 8, AT));
    }));
    assert_eq!(space.totals().map_count, 1);
    assert_eq!((log.calls(), handle.failures()), ((0, 0), 1));
    assert_exact([&space], &first, &logs[0]);
    assert_exact([&space], &last, &logs[1]);
    assert!(panics(|| drop(space.dup())));
    assert_eq!(system.len(), 1);
    assert_exact([&space], &first, &logs[0]);
    armed.store(0, Ordering::Relaxed);
    let child = space.dup().unwrap();
    assert_exact([&space, &child], &last, &logs[1]);
    assert_eq!(log.places(), Places::from([(id(&child), AT + BYTE)]));

    armed.store(2, Ordering::Relaxed);
    assert!(panics(|| {
        child.exit();
    }));
    assert_eq!((system.len(), log.calls()), (1, (1, 1)));
    assert_exact([&space], &last, &logs[1]);
    armed.store(0, Ordering::Relaxed);
    space.map(&text(&file, 0, 8, AT + 8 * PAGE)).unwrap();
    space.map(&text(&file, 0, 8, AT + 16 * PAGE)).unwrap();
    armed.store(2, Ordering::Relaxed);
    assert!(panics(|| space.unmap(AT + 8 * PAGE, PAGE * 8).unwrap()));
    assert!(panics(|| handle.unregister()));
    assert_eq!(log.calls(), (3, 3));
    drop(system.quiesce_dups(Wait::forever()).unwrap());
    assert!(space.try_write().is_some());
}

#[test]
fn a_filter_says_which_spaces_it_concerns() {
    let (system, file, log) = (System::default(), file(8), Log::new());
    let (one, two) = (create(&system), create(&system));
    for space in [&one, &two] {
        space.map(&text(&file, 0, 8, AT)).unwrap();
    }
    let (only, comes, goes) = (id(&one), log.clone(), log.clone());
    let probe = Arc::new(With {
        concerns: move |site: &ProbeSite<'_>| site.space() == only,
        install: move |site: &ProbeSite<'_>| {
            comes.note(site, true);
            Ok(())
        },
        remove: move |site: &ProbeSite<'_>| goes.note(site, false),
    });
    let handle = register(&system, &file, BYTE, &probe);
    two.map(&text(&file, 0, 8, AT + 8 * PAGE)).unwrap();
    let child = one.dup().unwrap();
    assert_exact([&one], &handle, &log);
    drop((child, one, two));
    assert_eq!((log.calls(), handle.failures()), ((1, 1), 0));
}

#[test]
fn a_registration_can_be_given_up_between_two_installations() {
    let (system, file, log) = (System::default(), file(8), Log::new());
    let spaces: Vec<_> = (0..3).map(|_| create(&system)).collect();
    for space in &spaces {
        space.map(&text(&file, 0, 8, AT)).unwrap();
    }
    let token = CancelToken::new();
    let cancel = token.clone();
    let probe = asking(&log, move |_| {
        cancel.cancel();
        Ok(())
    });
    let wait = Wait::killable(&token);
    let result = system.register_probe(file.object(), BYTE, probe, wait);
    assert_eq!(
        result.map(drop).unwrap_err(),
        ProbeError::GaveUp(GaveUp::Cancelled)
    );
    assert_eq!(log.calls(), (1, 1));
}

/// A callback that makes calls, once, and not for what those bring.
struct Reenters<F> {
    log: Arc<Log>,
    f: F,
    armed: Mutex<bool>,
    at_remove: bool,
}

impl<F: Fn(&ProbeSite<'_>) + Send + Sync + 'static> Reenters<F> {
    fn new(log: &Arc<Log>, at_remove: bool, f: F) -> Arc<Self> {
        Arc::new(Reenters {
            log: log.clone(),
            f,
            armed: Mutex::new(true),
            at_remove,
        })
    }

    fn act(&self, site: &ProbeSite<'_>) {
        let armed = std::mem::take(&mut *self.armed.lock().unwrap());
        if armed {
            (self.f)(site);
        }
    }
}

impl<F: Fn(&ProbeSite<'_>) + Send + Sync + 'static> Probe for Reenters<F> {
    fn install(&self, site: &ProbeSite<'_>) -> Result<(), Errno> {
        if !self.at_remove {
            self.act(site);
        }
        self.log.note(site, true);
        Ok(())
    }

    fn remove(&self, site: &ProbeSite<'_>) {
        self.log.note(site, false);
        if self.at_remove {
            self.act(site);
        }
    }
}

#[test]
fn a_callback_may_make_calls_on_its_space() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    for at_remove in [false, true] {
        let (system, file, log) = (System::default(), file(8), Log::new());
        let space = create(&system);
        let (inside, text_file) = (space.clone(), file.clone());
        let child = Arc::new(Mutex::new(None));
        let kept = child.clone();
        let probe = Reenters::new(&log, at_remove, move |_| {
            inside.map(&text(&text_file, 0, 8, AT + 8 * PAGE)).unwrap();
            inside.map(&text(&text_file, 0, 8, AT + 16 * PAGE)).unwrap();
            inside.unmap(AT + 8 * PAGE, 8 * PAGE).unwrap();
            *kept.lock().unwrap() = Some(inside.dup().unwrap());
            // Its own.
            inside.unmap(AT, 8 * PAGE).unwrap();
        });
        let handle = register(&system, &file, BYTE, &probe);
        space.map(&text(&file, 0, 8, AT)).unwrap();
        if at_remove {
            space.unmap(AT, 8 * PAGE).unwrap();
        }
        let child = child.lock().unwrap().take().unwrap();
        assert_exact([&space, &child], &handle, &log);
        assert!(log.places().contains(&(id(&child), AT + 16 * PAGE + BYTE)));
        drop(child);
        assert_exact([&space], &handle, &log);
        space.unmap(AT, 32 * PAGE).unwrap();
        assert!(log.places().is_empty());
        // The probe has a handle to the space, which has one to the system.
        drop(handle);
        drop(probe);
        assert_eq!(Arc::strong_count(&log), 1);
    }
}

#[test]
fn a_callback_may_end_its_space() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let (system, file, log) = (System::default(), file(8), Log::new());
    let space = create(&system);
    space.map(&text(&file, 0, 8, AT)).unwrap();
    let last = Mutex::new(Some(space));
    let probe = Reenters::new(&log, false, move |_| drop(last.lock().unwrap().take()));
    let handle = register(&system, &file, BYTE, &probe);
    assert_eq!((system.len(), log.calls()), (0, (1, 1)));
    assert_eq!(handle.sites(), Some(Vec::new()));
}

#[test]
fn a_callback_may_drop_probes_its_own_too_and_register_none() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    for at_remove in [false, true] {
        let (system, file) = (System::default(), file(8));
        let (log, other_log) = (Log::new(), Log::new());
        let space = create(&system);
        space.map(&text(&file, 0, 8, AT + 8 * PAGE)).unwrap();
        let handles: Arc<Mutex<Vec<ProbeHandle>>> = Arc::default();
        let (inside, inside_file, own) = (system.clone(), file.clone(), handles.clone());
        let probe = Reenters::new(&log, at_remove, move |_| {
            let mut own = own.lock().unwrap();
            if own.is_empty() {
                return;
            }
            let refused =
                inside.register_probe(inside_file.object(), BYTE, Log::new(), Wait::forever());
            let error = refused.map(drop).unwrap_err();
            assert_eq!(
                (error, error.errno()),
                (ProbeError::InCallback, Errno::EBUSY)
            );
            // Nobody is told where it is, since it is being changed.
            assert_eq!(own[0].sites(), None);
            assert!(own[1].sites().is_some());
            own.drain(..).for_each(ProbeHandle::unregister);
        });
        *probe.armed.lock().unwrap() = false;
        let mine = register(&system, &file, BYTE, &probe);
        let other = register(&system, &file, BYTE, &other_log);
        handles.lock().unwrap().extend([mine, other]);
        *probe.armed.lock().unwrap() = true;
        space.map(&text(&file, 0, 8, AT)).unwrap();
        if at_remove {
            space.unmap(AT, 8 * PAGE).unwrap();
        }
        assert!(handles.lock().unwrap().is_empty());
        assert!(log.places().is_empty() && other_log.places().is_empty());
        drop(probe);
        assert_eq!(
            (Arc::strong_count(&log), Arc::strong_count(&other_log)),
            (1, 1)
        );
    }
}

/// Two callbacks that each make a call on the other's space: neither waits for the other.
#[test]
fn callbacks_of_two_probes_wait_for_nobody() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let (system, files) = (System::default(), [file(8), file(8)]);
    let spaces = [create(&system), create(&system)];
    let logs = [Log::new(), Log::new()];
    let meet = Arc::new(std::sync::Barrier::new(2));
    let handles = [0, 1].map(|who: usize| {
        let (other, text_file) = (spaces[1 - who].clone(), files[1 - who].clone());
        let meet = meet.clone();
        let probe = Reenters::new(&logs[who], false, move |_| {
            meet.wait();
            other
                .map(&text(&text_file, 0, 8, AT + (1 + who as u64) * 8 * PAGE))
                .unwrap();
        });
        register(&system, &files[who], BYTE, &probe)
    });
    thread::scope(|scope| {
        for (space, file) in spaces.iter().zip(&files) {
            scope.spawn(|| space.map(&text(file, 0, 8, AT)).unwrap());
        }
    });
    for (handle, log) in handles.iter().zip(&logs) {
        assert_exact(&spaces, handle, log);
        assert_eq!(log.places().len(), 2);
    }
    drop(handles);
}

/// A space that is busy, and needn't be asked.
#[test]
fn a_registration_waits_for_no_space() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let (system, file, log) = (System::default(), file(8), Log::new());
    let space = create(&system);
    space.map(&text(&file, 0, 8, AT)).unwrap();
    let guard = space.write();
    thread::scope(|scope| {
        let tracer = scope.spawn(|| {
            let handle = register(&system, &file, BYTE, &log);
            assert_eq!(log.calls(), (1, 0));
            handle.unregister();
            assert_eq!(log.calls(), (1, 1));
        });
        tracer.join().unwrap();
    });
    drop(guard);
}

/// Who unregisters waits for the callback of a call that is under way, and then it's nowhere.
#[test]
fn an_unregistration_waits_for_callbacks() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let (system, file, log) = (System::default(), file(8), Log::new());
    let space = create(&system);
    let (begin, started) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    let ended = Mutex::new(ended);
    let probe = asking(&log, move |_| {
        begin.send(()).unwrap();
        ended.lock().unwrap().recv().unwrap();
        Ok(())
    });
    let handle = register(&system, &file, BYTE, &probe);
    thread::scope(|scope| {
        let map = scope.spawn(|| space.map(&text(&file, 0, 8, AT)).unwrap());
        started.recv().unwrap();
        // The mapping is there, and no lock is held.
        assert_eq!(space.totals().map_count, 1);
        let unregister = scope.spawn(|| handle.unregister());
        thread::sleep(Duration::from_millis(30));
        assert!(!unregister.is_finished());
        end.send(()).unwrap();
        unregister.join().unwrap();
        assert_eq!(log.calls(), (1, 1));
        map.join().unwrap();
    });
    space.unmap(AT, 8 * PAGE).unwrap();
    assert_eq!(log.calls(), (1, 1));
}

/// A mapping that goes while it is being installed there takes it away afterwards.
#[test]
fn an_unmap_beside_an_installation_removes_it() {
    let _watchdog = watchdog::watch(Duration::from_mins(1));
    let (system, file, log) = (System::default(), file(8), Log::new());
    let space = create(&system);
    space.map(&text(&file, 0, 8, AT)).unwrap();
    let (begin, started) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    let ended = Mutex::new(ended);
    let probe = asking(&log, move |_| {
        begin.send(()).unwrap();
        ended.lock().unwrap().recv().unwrap();
        Ok(())
    });
    thread::scope(|scope| {
        let registration = scope.spawn(|| register(&system, &file, BYTE, &probe));
        started.recv().unwrap();
        // Dups don't wait for it.
        let child = create(&system).dup().unwrap();
        let unmap = scope.spawn(|| space.unmap(AT, 8 * PAGE).unwrap());
        while space.totals().map_count > 0 {
            thread::yield_now();
        }
        assert!(!unmap.is_finished());
        end.send(()).unwrap();
        unmap.join().unwrap();
        assert_eq!(log.calls(), (1, 1));
        drop(child);
        let handle = registration.join().unwrap();
        assert_exact([&space], &handle, &log);
    });
}

#[cfg(debug_assertions)]
#[test]
fn a_registration_with_a_lock_held_is_caught() {
    let (system, file, log) = (System::default(), file(8), Log::new());
    let (one, two) = (create(&system), create(&system));
    let caught = |f: &dyn Fn()| {
        let result = catch_unwind(AssertUnwindSafe(f));
        result.is_err_and(|panic| {
            panic
                .downcast_ref::<String>()
                .is_some_and(|text| text.contains("lock order"))
        })
    };
    let try_it = || drop(register(&system, &file, BYTE, &log));
    one.map(&text(&file, 0, 8, AT)).unwrap();
    let quiesced = system.quiesce_dups(Wait::forever()).unwrap();
    assert!(caught(&try_it));
    drop(quiesced);
    let guard = one.write();
    assert!(caught(&try_it));
    drop(guard);
    let handle = register(&system, &file, BYTE, &log);
    let (first, second) = if std::ptr::from_ref(one.space()) < std::ptr::from_ref(two.space()) {
        (&one, &two)
    } else {
        (&two, &one)
    };
    let guard = first.write();
    assert!(caught(&|| {
        second.map(&text(&file, 0, 8, AT + 8 * PAGE)).unwrap();
    }));
    drop(guard);
    drop(handle);
}
