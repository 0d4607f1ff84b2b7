//! Masks: which tokens may come next in a choice, and the threads that compute them.
//!
//! After each sampled token the engine hands the choice to the threads and goes on. The
//! mask is there when the next forward pass has ended, or it is late: then the choice is
//! not sampled in this step, and the other choices do not wait.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fmt, io, thread};

use llguidance::TokenParser;

use super::{COMPILE_STACK, RequestGrammar};

/// The tokens that may come next.
#[derive(Clone, PartialEq, Eq)]
pub struct TokenMask {
    /// One bit for each token of the vocabulary, lowest bit first.
    words: Box<[u32]>,
}

impl TokenMask {
    /// Returns a mask of `vocabulary` tokens that allows `tokens`.
    pub fn of(vocabulary: u32, tokens: impl IntoIterator<Item = u32>) -> Self {
        let mut words = vec![0; vocabulary.div_ceil(32) as usize].into_boxed_slice();
        for token in tokens {
            words[(token / 32) as usize] |= 1 << (token % 32);
        }
        Self { words }
    }

    /// Returns true if `token` may come next.
    pub fn allows(&self, token: u32) -> bool {
        let word = self.words.get((token / 32) as usize);
        word.is_some_and(|word| word & 1 << (token % 32) != 0)
    }

    /// Returns the words of the mask: bit `i % 32` of word `i / 32` belongs to token `i`.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Returns the tokens that may come next, in ascending order.
    pub fn tokens(&self) -> impl Iterator<Item = u32> {
        self.words.iter().zip(0u32..).flat_map(|(&word, index)| {
            (0..32).filter(move |bit| word & 1 << bit != 0).map(move |bit| 32 * index + bit)
        })
    }
}

impl fmt::Debug for TokenMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let allowed: u32 = self.words.iter().map(|word| word.count_ones()).sum();
        write!(f, "TokenMask({allowed} tokens)")
    }
}

/// Returns the mask of the parser's next token.
pub(super) fn mask_of(parser: &mut TokenParser) -> anyhow::Result<TokenMask> {
    let mask = parser.compute_mask()?;
    // The library keeps a bit more than there are tokens.
    let words = parser.token_env.tok_trie().vocab_size().div_ceil(u32::BITS as usize);
    Ok(TokenMask { words: mask.as_slice()[..words].into() })
}

/// The grammar's state in one choice.
#[derive(Clone)]
pub struct Constraint {
    grammar: RequestGrammar,
    choice: Arc<ChoiceState>,
}

struct ChoiceState {
    promise: Mutex<Promised>,
    changed: Condvar,
    /// The parser and the tokens that it has read. Only the thread that computes the
    /// promised mask takes this lock.
    reading: Mutex<Reading>,
}

#[derive(Default)]
struct Reading {
    /// `None` until the first token: a choice that ends there needs no parser.
    parser: Option<TokenParser>,
    tokens: Vec<u32>,
    /// Number of tokens that the current parser read at once.
    reread: usize,
}

/// The mask of the next token, and the step that needs it.
struct Promised {
    promise: Promise,
    /// True if the last step that needed the mask went without it.
    missed: bool,
}

/// The mask of the next token.
enum Promise {
    /// A thread computes it.
    Pending,
    /// It has been computed.
    Kept(Arc<TokenMask>),
    /// The answer exceeds the bounds of its grammar.
    Broken,
}

/// The reason why a step sampled no token of a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsampled {
    /// The mask was late. The next step can compute the row again.
    Late,
    /// The answer exceeds the bounds of its grammar and cannot go on.
    Exceeded,
    /// The mask was there, and the row had no number for a token that it allows.
    Broken,
}

/// The time that one step may wait for masks, shared by all its rows.
#[derive(Debug)]
pub struct MaskWait {
    until: Option<Instant>,
}

impl MaskWait {
    /// Creates the wait of one step. Its time runs from the first mask that is not there.
    pub fn new() -> Self {
        Self { until: None }
    }

    fn left(&mut self) -> Duration {
        let now = now();
        self.until.get_or_insert(now + PATIENCE).saturating_duration_since(now)
    }
}

impl Default for MaskWait {
    fn default() -> Self {
        Self::new()
    }
}

impl Constraint {
    pub(super) fn new(grammar: &RequestGrammar) -> Self {
        let first = Arc::clone(&grammar.compiled.0.first);
        Self {
            grammar: grammar.clone(),
            choice: Arc::new(ChoiceState {
                promise: Mutex::new(Promised { promise: Promise::Kept(first), missed: false }),
                changed: Condvar::new(),
                reading: Mutex::default(),
            }),
        }
    }

    /// Tells the grammar the next token of the choice, which its mask allowed. Does not
    /// block: the mask after it is computed by a thread.
    pub fn advance(&self, token: u32) {
        // Before the job is queued: a fast thread's mask must not be overwritten.
        self.promise().promise = Promise::Pending;
        self.grammar.compiled.0.threads.submit(Job { constraint: self.clone(), token });
    }

    /// Returns the mask of the next token, or `None` if it is late or never comes.
    pub fn mask(&self, wait: &mut MaskWait) -> Option<Arc<TokenMask>> {
        let mut promised = self.promise();
        loop {
            promised.missed = !matches!(promised.promise, Promise::Kept(_));
            match &promised.promise {
                Promise::Kept(mask) => return Some(Arc::clone(mask)),
                Promise::Broken => return None,
                Promise::Pending => {}
            }
            let left = wait.left();
            if left.is_zero() {
                return None;
            }
            let waited = self.choice.changed.wait_timeout(promised, left);
            promised = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Returns the reason why the last step gave no token.
    pub fn unsampled(&self) -> Unsampled {
        let Promised { promise, missed } = &*self.promise();
        match (promise, missed) {
            (Promise::Broken, _) => Unsampled::Exceeded,
            // The mask may have come just after the step had gone on without it.
            (Promise::Pending | Promise::Kept(_), true) => Unsampled::Late,
            (Promise::Pending | Promise::Kept(_), false) => Unsampled::Broken,
        }
    }

    fn promise(&self) -> MutexGuard<'_, Promised> {
        // Each change is one assignment, so a panic leaves nothing half done.
        self.choice.promise.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads `token` and keeps the promise of the mask after it.
    fn read(&self, token: u32) {
        let began = now();
        let mut reading = self.choice.reading.lock().unwrap_or_else(PoisonError::into_inner);
        let read = catch_unwind(AssertUnwindSafe(|| reading.read(token, &self.grammar)));
        // Released first: once the promise is kept, the next token may come at once.
        drop(reading);
        let promise = match read {
            Ok(Ok(mask)) => Promise::Kept(Arc::new(mask)),
            // An error is final: it stays in this choice's parser.
            Ok(Err(_)) | Err(_) => Promise::Broken,
        };
        self.grammar.add(began.elapsed());
        self.promise().promise = promise;
        self.choice.changed.notify_all();
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").finish_non_exhaustive()
    }
}

impl Reading {
    fn read(&mut self, token: u32, grammar: &RequestGrammar) -> anyhow::Result<TokenMask> {
        self.tokens.push(token);
        let parser = match &mut self.parser {
            Some(parser) => {
                parser.consume_token(token)?;
                parser
            }
            // A first token, or a lexer that grew large: its caches never shrink, so a new
            // parser reads the answer again.
            none => {
                let mut parser = grammar.compiled.parser();
                self.reread = self.tokens.len();
                for &token in &self.tokens {
                    parser.consume_token(token)?;
                }
                none.insert(parser)
            }
        };
        let mask = mask_of(parser)?;
        // Reading again helps if the states are of earlier tokens. It must not happen after
        // each token: the answer of some grammars needs ever more states.
        let has_grown = parser.parser.lexer_stats().num_states > MOST_LEXER_STATES;
        if has_grown && self.tokens.len() - self.reread >= TOKENS_BETWEEN_REREADS {
            self.parser = None;
        }
        Ok(mask)
    }
}

/// One mask to compute.
struct Job {
    constraint: Constraint,
    token: u32,
}

/// The threads that compute masks. They end when this value is dropped.
pub(super) struct MaskThreads {
    queue: Arc<MaskQueue>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct MaskQueue {
    /// Jobs in order of arrival; `None` when the threads must end. A choice has at most one
    /// job, so the queue is no longer than the batch.
    jobs: Mutex<Option<VecDeque<Job>>>,
    arrived: Condvar,
    #[cfg(test)]
    paused: std::sync::atomic::AtomicBool,
}

impl MaskThreads {
    /// Starts the threads.
    pub(super) fn start() -> io::Result<Self> {
        let queue = MaskQueue { jobs: Mutex::new(Some(VecDeque::new())), ..MaskQueue::default() };
        let queue = Arc::new(queue);
        let thread = |number: usize| {
            let queue = Arc::clone(&queue);
            thread::Builder::new()
                .name(format!("mask-{number}"))
                .stack_size(COMPILE_STACK)
                .spawn(move || queue.work())
        };
        let threads = (0..THREADS).map(thread).collect::<io::Result<Vec<_>>>()?;
        Ok(Self { queue, threads })
    }

    #[cfg(test)]
    pub(super) fn pause(&self, paused: bool) {
        let _jobs = self.queue.jobs();
        self.queue.paused.store(paused, std::sync::atomic::Ordering::Relaxed);
        self.queue.arrived.notify_all();
    }

    fn submit(&self, job: Job) {
        if let Some(jobs) = self.queue.jobs().as_mut() {
            jobs.push_back(job);
        }
        self.queue.arrived.notify_one();
    }
}

impl Drop for MaskThreads {
    fn drop(&mut self) {
        // A queue without a list tells the threads to end.
        *self.queue.jobs() = None;
        self.queue.arrived.notify_all();
        let current = thread::current().id();
        for thread in self.threads.drain(..) {
            // The last constraint may be dropped by a mask thread itself.
            if thread.thread().id() != current {
                let _ = thread.join();
            }
        }
    }
}

impl MaskQueue {
    fn jobs(&self) -> MutexGuard<'_, Option<VecDeque<Job>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Computes masks until the threads must end.
    fn work(&self) {
        while let Some(Job { constraint, token }) = self.next() {
            constraint.read(token);
        }
    }

    /// Returns the first job, if there is one; `None` if the threads must end.
    fn first(&self, jobs: &mut Option<VecDeque<Job>>) -> Option<Option<Job>> {
        let jobs = jobs.as_mut()?;
        #[cfg(test)]
        if self.paused.load(std::sync::atomic::Ordering::Relaxed) {
            return Some(None);
        }
        Some(jobs.pop_front())
    }

    /// Waits for the next job. Returns `None` when the threads must end.
    fn next(&self) -> Option<Job> {
        let mut jobs = self.jobs();
        loop {
            if let Some(job) = self.first(&mut jobs)? {
                return Some(job);
            }
            jobs = self.arrived.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "host time of grammars is measured here")]
fn now() -> Instant {
    Instant::now()
}

/// Time that a step waits for masks in all.
const PATIENCE: Duration = Duration::from_millis(2);
/// Threads that compute masks.
const THREADS: usize = 2;
/// States of a lexer after which a new one takes its place. Below the bound of
/// [`super::limits`], at which an answer ends.
const MOST_LEXER_STATES: usize = 12_000;
/// Tokens after which an answer may be read again.
const TOKENS_BETWEEN_REREADS: usize = 256;
