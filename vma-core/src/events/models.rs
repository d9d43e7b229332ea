//! Models of a fault that waits for its monitor.
//!
//! Context, queue and sleepers are the real ones; a page is one word. `.ci/loom` runs them as they are, and then once per planted fault,
//! which they must find.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use vma_rcu::wait::Wait;

use super::{Context, Monitor, MonitorEvent, MonitorFeatures, MonitorModes};
use crate::addr::VmRange;
use crate::space::Access;

const PAGE: VmRange = VmRange::new(0x1000, 0x2000);

fn model(preemptions: Option<usize>, f: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(f);
}

/// As `AddressSpace::fault_page`: it asks, looks again, and waits, until the page is there or nobody is asked about it.
fn fault(context: &Arc<Context>, page: &AtomicBool) {
    let mut asked = None;
    while !page.load(Ordering::Acquire) && !context.is_dead() {
        match asked.take() {
            None => asked = Some(context.ask(PAGE.start, Access::Read, MonitorModes::MISSING)),
            Some(asked) => super::Asked::wait(asked, Wait::forever()).unwrap(),
        }
    }
}

#[test]
fn a_fault_goes_on_when_its_monitor_dies() {
    model(Some(3), || {
        let monitor = Monitor::new(MonitorFeatures::empty()).unwrap();
        let context = Arc::clone(monitor.context());
        let faulting = thread::spawn(move || fault(&context, &AtomicBool::new(false)));
        drop(monitor);
        faulting.join().unwrap();
    });
}

#[test]
fn a_fault_goes_on_when_its_page_is_there() {
    model(Some(3), || {
        // A model that fails doesn't go on with what it drops.
        let monitor = ManuallyDrop::new(Monitor::new(MonitorFeatures::empty()).unwrap());
        let context = Arc::clone(monitor.context());
        let page = Arc::new(AtomicBool::new(false));
        let there = Arc::clone(&page);
        let faulting = thread::spawn(move || fault(&context, &there));
        // Whether it's been asked or not.
        page.store(true, Ordering::Release);
        monitor.wake(PAGE);
        faulting.join().unwrap();
        drop(ManuallyDrop::into_inner(monitor));
    });
}

#[test]
fn a_call_goes_on_when_its_event_is_read_or_the_monitor_dies() {
    model(Some(3), || {
        let monitor = Monitor::new(MonitorFeatures::empty()).unwrap();
        let announced = monitor.context().announce(MonitorEvent::Unmap(PAGE));
        let calling = thread::spawn(move || announced.deliver(Wait::forever()));
        let context = Arc::clone(monitor.context());
        let read = monitor.try_read_event().is_some();
        drop(monitor);
        calling.join().unwrap();
        assert!(!context.is_changing(), "read: {read}");
    });
}
