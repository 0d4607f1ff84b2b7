//! The threads that compute, and how a pass is shared out among them.
//!
//! Chunks are claimed one at a time from a counter, by the thread that owns
//! the pool too, so that a core that is busy elsewhere holds nobody up but
//! by the chunk it has claimed. Between passes helpers spin a little, because
//! the next one comes within microseconds, and then park.

use std::any::Any;
use std::cell::UnsafeCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};

/// A pass: called with the thread's index and the chunk's.
type PassFn<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// Threads that live as long as the pool.
pub(super) struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

struct Shared {
    /// The number of the pass in the upper half, how many of its chunks are
    /// unclaimed in the lower. Claiming is taking one off, by compare-exchange,
    /// so that a claim is always of the current pass.
    state: AtomicU64,
    /// Chunks of the current pass that are done.
    done: AtomicU32,
    /// The current pass. Written only while no chunk is claimed or claimable,
    /// read only between claiming a chunk and counting it done.
    pass: UnsafeCell<Option<PassPointer>>,
    /// For each helper whether it is parked, or about to be.
    parked: Vec<AtomicBool>,
    /// The first panic of a chunk of the current pass.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
}

#[derive(Clone, Copy)]
struct PassPointer {
    work: *const PassFn<'static>,
    chunks: u32,
}

// SAFETY: `pass` is handed over through `state` as its comment says; the rest
// is synchronised by itself.
unsafe impl Sync for Shared {}
// SAFETY: the pointer is to a `Sync` closure, and used only while it lives.
unsafe impl Send for Shared {}

/// How much nicer than its process a thread that computes is. Where cores are
/// contested it weighs a third of one that carries requests and answers: those
/// need little and soon, this one takes all there is.
const NICER: i32 = 5;

/// Makes the calling thread give way to the process's other threads. (On Linux
/// a thread is as nice as it says itself.)
pub(super) fn give_way() {
    // Refused only where nobody can be nicer any more.
    let _ = rustix::process::nice(NICER);
}

impl Pool {
    /// A pool of `threads` threads, the caller's own among them.
    pub(super) fn new(threads: usize) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            done: AtomicU32::new(0),
            pass: UnsafeCell::new(None),
            parked: (1..threads).map(|_| AtomicBool::new(false)).collect(),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
        });
        let mut pool = Self { shared: Arc::clone(&shared), helpers: Vec::new() };
        for index in 1..threads {
            let shared = Arc::clone(&shared);
            let name = format!("compute-{index}");
            let helper = thread::Builder::new().name(name).spawn(move || {
                give_way();
                shared.help(index);
            })?;
            pool.helpers.push(helper);
        }
        Ok(pool)
    }

    /// Threads, the caller's own among them.
    pub(super) fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Runs `work` for every chunk below `chunks`, in no order, on all
    /// threads, and returns when all are done. A single chunk runs here.
    ///
    /// # Panics
    /// If `work` does, once no thread runs it any more.
    pub(super) fn run(&self, chunks: usize, work: &PassFn<'_>) {
        if chunks <= 1 || self.helpers.is_empty() {
            (0..chunks).for_each(|chunk| work(0, chunk));
            return;
        }
        let chunks = u32::try_from(chunks).expect("a step has far fewer chunks");
        self.publish(chunks, work);
        self.wake(chunks as usize - 1);
        self.shared.claim_all(0);
        self.await_done(chunks);
        let panic = self.shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    fn publish(&self, chunks: u32, work: &PassFn<'_>) {
        let shared = &self.shared;
        let number = shared.state.load(Ordering::Relaxed) >> 32;
        let work = std::ptr::from_ref(work);
        // SAFETY: only the lifetime is forgotten. `run` does not return
        // before every chunk is done, and nobody reads the pointer later.
        let work =
            unsafe { std::mem::transmute::<*const PassFn<'_>, *const PassFn<'static>>(work) };
        // SAFETY: the pass before has ended, so no chunk is claimed, and none
        // is claimable until `state` is stored.
        unsafe { *shared.pass.get() = Some(PassPointer { work, chunks }) };
        shared.done.store(0, Ordering::Relaxed);
        let number = (number + 1) & 0xffff_ffff;
        // Sequentially consistent, as is what `help` does before it parks:
        // either it sees the chunks, or `wake` sees that it is parked.
        shared.state.store(number << 32 | u64::from(chunks), Ordering::SeqCst);
    }

    fn wake(&self, most: usize) {
        for (parked, helper) in self.shared.parked.iter().zip(&self.helpers).take(most) {
            if parked.load(Ordering::SeqCst) && parked.swap(false, Ordering::SeqCst) {
                Thread::unpark(helper.thread());
            }
        }
    }

    fn await_done(&self, chunks: u32) {
        let mut spins = 0_u32;
        while self.shared.done.load(Ordering::Acquire) < chunks {
            spins += 1;
            // A helper that lost its core in the middle of a chunk needs it.
            if spins.is_multiple_of(SPINS) { thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for helper in self.helpers.drain(..) {
            helper.thread().unpark();
            // A helper catches the panics of chunks and has none of its own.
            let _ = helper.join();
        }
    }
}

impl Shared {
    fn help(&self, index: usize) {
        let parked = &self.parked[index - 1];
        let mut spins = 0;
        while !self.stop.load(Ordering::SeqCst) {
            if self.claim_all(index) {
                spins = 0;
            } else if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                parked.store(true, Ordering::SeqCst);
                if self.unclaimed() == 0 && !self.stop.load(Ordering::SeqCst) {
                    thread::park();
                }
                parked.store(false, Ordering::SeqCst);
                spins = 0;
            }
        }
    }

    fn unclaimed(&self) -> u32 {
        (self.state.load(Ordering::SeqCst) & 0xffff_ffff) as u32
    }

    /// Claims and does chunks until none is left; whether there was one.
    fn claim_all(&self, thread: usize) -> bool {
        let mut any = false;
        while let Some(left) = self.claim() {
            any = true;
            // SAFETY: we hold a chunk of the current pass, so it is written
            // and stays until we count the chunk done.
            let pass = unsafe { *self.pass.get() }.expect("a claim is of a published pass");
            // SAFETY: likewise, the closure lives until then.
            let work = unsafe { &*pass.work };
            let chunk = (pass.chunks - left) as usize;
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(thread, chunk))) {
                let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(panic);
            }
            self.done.fetch_add(1, Ordering::Release);
        }
        any
    }

    /// Takes one chunk off the current pass and says how many were left.
    fn claim(&self) -> Option<u32> {
        let one_less = |state: u64| (state & 0xffff_ffff > 0).then(|| state - 1);
        self.state
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, one_less)
            .ok()
            .map(|state| (state & 0xffff_ffff) as u32)
    }
}

/// Some tens of microseconds.
const SPINS: u32 = 1_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_runs_once() {
        for threads in [1, 2, 3, 7] {
            let pool = Pool::new(threads).unwrap();
            for chunks in [0, 1, 2, 3, 10, 1_000] {
                let counts: Vec<AtomicU32> = (0..chunks).map(|_| AtomicU32::new(0)).collect();
                pool.run(chunks, &|thread, chunk| {
                    assert!(thread < threads);
                    counts[chunk].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn many_short_passes_see_each_other() {
        let pool = Pool::new(3).unwrap();
        let sum = AtomicU64::new(0);
        for pass in 0..20_000_u64 {
            pool.run(4, &|_, chunk| {
                sum.fetch_add(pass * chunk as u64, Ordering::Relaxed);
            });
        }
        assert_eq!(sum.into_inner(), 6 * (19_999 * 20_000 / 2));
    }

    #[test]
    fn a_panic_comes_out_and_the_pool_goes_on() {
        let pool = Pool::new(2).unwrap();
        let run = |bad: usize| {
            catch_unwind(AssertUnwindSafe(|| pool.run(8, &|_, chunk| assert_ne!(chunk, bad))))
        };
        assert!(run(5).is_err());
        assert!(run(8).is_ok());
    }
}
