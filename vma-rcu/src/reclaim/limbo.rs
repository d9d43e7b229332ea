//! Boxes that readers may still be looking at.

use std::fmt;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::Domain;
use super::queue::{Dispose, Panic, Producer, Queue, keep_first};
use crate::sync::{Arc, Mutex};

/// Frees boxes a grace period after they were retired.
///
/// For what isn't kept in a [`RangeTree`](crate::tree::RangeTree): whoever has unlinked an object puts it here, and
/// it's dropped by [`Domain::collect`] once every guard of that time has gone. It counts in the domain's statistics and
/// limits.
pub struct Limbo<T: Send + 'static> {
    producer: Mutex<Producer>,
    queue: Arc<Queue<Boxes<T>>>,
}

/// Takes the words apart that [`Limbo::retire`] makes of boxes.
struct Boxes<T>(PhantomData<fn() -> T>);

impl<T: Send + 'static> Dispose for Boxes<T> {
    unsafe fn dispose(&self, words: &[*mut ()]) -> (usize, Option<Panic>) {
        let mut panic = None;
        for word in words {
            // SAFETY: R2: made of a box by `retire`, and handed out once.
            let object = unsafe { Box::from_raw(word.cast::<T>()) };
            let result = catch_unwind(AssertUnwindSafe(|| drop(object)));
            keep_first(&mut panic, result.err());
        }
        (words.len() * size_of::<T>(), panic)
    }
}

impl<T: Send + 'static> Limbo<T> {
    /// An empty one, whose boxes wait for the guards of `domain`. `None` when memory runs out.
    pub fn try_new(domain: &Domain) -> Option<Self> {
        let (queue, producer) = Queue::try_new(Boxes(PhantomData), domain.counters())?;
        domain.adopt(Arc::clone(&queue) as _);
        Some(Limbo {
            producer: Mutex::new(producer),
            queue,
        })
    }

    /// Takes an object that no new reader can reach.
    ///
    /// # Errors
    ///
    /// Memory ran out: the object comes back.
    pub fn retire(&self, object: Box<T>) -> Result<(), Box<T>> {
        let mut object = Some(object);
        self.retire_with(|| object.take());
        object.map_or(Ok(()), Err)
    }

    /// Takes what `unlink` returns, which no new reader can reach then. There is room for it before `unlink` is called, which runs
    /// under a lock; so nothing is unlinked that can't be retired.
    ///
    /// Returns whether it got something. When memory runs out `unlink` isn't called.
    pub fn retire_with(&self, unlink: impl FnOnce() -> Option<Box<T>>) -> bool {
        let mut producer = self.producer.lock();
        if producer.reserve(1).is_ok()
            && let Some(object) = unlink()
        {
            producer.push(Box::into_raw(object).cast());
            producer.publish(&self.queue, 1, size_of::<T>());
            return true;
        }
        false
    }
}

impl<T: Send + 'static> Drop for Limbo<T> {
    fn drop(&mut self) {
        self.producer.lock().close(&self.queue);
    }
}

impl<T: Send + 'static> fmt::Debug for Limbo<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limbo")
            .field("queue", &self.queue)
            .finish_non_exhaustive()
    }
}
