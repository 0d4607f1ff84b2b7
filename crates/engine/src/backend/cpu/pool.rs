//! The threads that compute, and the distribution of a pass over them.
//!
//! Threads claim chunks one at a time from a counter. The pool's owner claims chunks
//! too. A core that is busy with other work delays only the chunk that it has claimed.
//! Between passes the helper threads spin for a short time, because the next pass
//! usually comes within microseconds, and then park.

use std::any::Any;
use std::cell::UnsafeCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};

/// The function of a pass. It is called with the index of the thread and of the chunk.
type PassFn<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// Threads that live as long as the pool.
pub(super) struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

struct Shared {
    /// The number of the pass in the upper half, and the number of its unclaimed chunks
    /// in the lower half. A compare-exchange takes one chunk off, so that a claim
    /// always belongs to the current pass.
    state: AtomicU64,
    /// Chunks of the current pass that are done.
    done: AtomicU32,
    /// The current pass. It is written only while no chunk is claimed or claimable, and
    /// read only between claiming a chunk and counting it done.
    pass: UnsafeCell<Option<PassPointer>>,
    /// One flag for each helper: true if it is parked or about to park.
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

// SAFETY: `pass` is handed over through `state` as its comment says; the other fields
// synchronise themselves.
unsafe impl Sync for Shared {}
// SAFETY: the pointer refers to a `Sync` closure and is used only while the closure
// lives.
unsafe impl Send for Shared {}

/// The nice value that a computing thread adds to that of its process. A thread with
/// this value gets about a third of the time of a thread that handles requests if both
/// want the same core. Request threads need little time, but soon; computing threads
/// take all there is.
const NICER: i32 = 5;

/// Lowers the priority of the calling thread below the other threads of the process.
/// Linux keeps a nice value for each thread.
pub(super) fn give_way() {
    // The call fails only if the nice value is already the highest.
    let _ = rustix::process::nice(NICER);
}

impl Pool {
    /// Creates a pool of `threads` threads, including the caller's own thread.
    ///
    /// # Errors
    /// The error of the system that refused a thread.
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

    /// Returns the number of threads, including the caller's own thread.
    pub(super) fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Runs `work` for every chunk below `chunks`, in any order on all threads, and
    /// returns when all are done. A single chunk runs on the calling thread.
    ///
    /// # Panics
    /// If `work` panics. The panic is passed on after all threads have left `work`.
    #[expect(
        clippy::expect_used,
        reason = "a pass has fewer than 2^32 chunks, because the KV pool and the model bound it"
    )]
    pub(super) fn run(&self, chunks: usize, work: &PassFn<'_>) {
        // Waking a helper costs more than one chunk takes.
        if chunks <= 1 || self.helpers.is_empty() {
            (0..chunks).for_each(|chunk| work(0, chunk));
            return;
        }
        let chunks = u32::try_from(chunks).expect("a step has far fewer chunks");
        self.publish(chunks, work);
        self.wake(chunks as usize - 1);
        self.shared.claim_all(0);
        self.await_done(chunks);
        // The lock's value is valid even after a panic, so poisoning is ignored.
        let panic = self.shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    fn publish(&self, chunks: u32, work: &PassFn<'_>) {
        let shared = &self.shared;
        // Relaxed: only this thread changes the upper half.
        let number = shared.state.load(Ordering::Relaxed) >> 32;
        let work = std::ptr::from_ref(work);
        // SAFETY: only the lifetime is erased. `run` does not return before every chunk
        // is done, and no thread reads the pointer later.
        let work =
            unsafe { std::mem::transmute::<*const PassFn<'_>, *const PassFn<'static>>(work) };
        // SAFETY: the previous pass has ended, so no chunk is claimed, and none can be
        // claimed until `state` is stored.
        unsafe { *shared.pass.get() = Some(PassPointer { work, chunks }) };
        // Relaxed: the store of `state` below publishes it.
        shared.done.store(0, Ordering::Relaxed);
        // The number may wrap: it must only differ from that of the previous pass.
        let number = (number + 1) & 0xffff_ffff;
        // This store and the accesses of `help` before it parks are sequentially
        // consistent: either the helper sees the chunks, or `wake` sees that the helper
        // is parked.
        shared.state.store(number << 32 | u64::from(chunks), Ordering::SeqCst);
    }

    fn wake(&self, most: usize) {
        // No more helpers than chunks are woken, because the caller takes one itself.
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
            // A helper may have lost its core in the middle of a chunk; yielding gives
            // it one.
            if spins.is_multiple_of(SPINS) { thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // Before the wake-ups, so that each helper sees it.
        self.shared.stop.store(true, Ordering::SeqCst);
        for helper in self.helpers.drain(..) {
            helper.thread().unpark();
            // Helpers catch the panics of chunks and do not panic themselves.
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
                // Looked at again after the mark: a pass that came before it wakes no helper.
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

    /// Claims and runs chunks until none is left. Returns true if it ran at least one.
    #[expect(
        clippy::expect_used,
        reason = "a chunk can be claimed only after its pass is published"
    )]
    fn claim_all(&self, thread: usize) -> bool {
        let mut any = false;
        while let Some(left) = self.claim() {
            any = true;
            // SAFETY: this thread holds a chunk of the current pass, so `pass` is
            // written and stays until the chunk is counted done.
            let pass = unsafe { *self.pass.get() }.expect("a claim is of a published pass");
            // SAFETY: for the same reason the closure lives until then.
            let work = unsafe { &*pass.work };
            let chunk = (pass.chunks - left) as usize;
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(thread, chunk))) {
                let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(panic);
            }
            // Release, so that the owner of the pool sees what the chunk has written.
            self.done.fetch_add(1, Ordering::Release);
        }
        any
    }

    /// Takes one chunk off the current pass and returns the number of chunks that were
    /// unclaimed before.
    fn claim(&self) -> Option<u32> {
        let one_less = |state: u64| (state & 0xffff_ffff > 0).then(|| state - 1);
        self.state
            // Acquire, so that a claim sees the pass that was published before it.
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, one_less)
            .ok()
            .map(|state| (state & 0xffff_ffff) as u32)
    }
}

/// Rounds of spinning before a helper parks, some tens of microseconds.
const SPINS: u32 = 1_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_runs_every_chunk_once() {
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
    fn pool_runs_many_short_passes_in_order() {
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
    fn pool_passes_a_panic_on_and_keeps_working() {
        let pool = Pool::new(2).unwrap();
        let run = |bad: usize| {
            catch_unwind(AssertUnwindSafe(|| pool.run(8, &|_, chunk| assert_ne!(chunk, bad))))
        };
        assert!(run(5).is_err());
        assert!(run(8).is_ok());
    }
}
