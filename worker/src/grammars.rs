//! Compiled grammars. Requests wait here, at the worker's door, until their grammar is
//! compiled. So a grammar that takes long delays its own request, not the batch.
//!
//! Two threads compile. While a thread works for one tenant, the other one first takes the
//! grammars of other tenants. A tenant's latest grammars are kept.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::sync::oneshot;
use tollgate_domain::{Grammar, TenantId};
use tollgate_engine::grammar::{
    COMPILE_STACK, CompiledGrammar, GrammarCompiler, GrammarError, RequestGrammar, Vocabulary,
};
use tollgate_engine::{Refusal, RefusedReason};
use tollgate_text::Tokenizer;

/// The grammars of one worker. Copies share them.
#[derive(Clone)]
pub(crate) struct Grammars(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    arrived: Condvar,
    compiler: OnceLock<Result<GrammarCompiler, GrammarError>>,
}

#[derive(Default)]
struct State {
    /// Grammars to compile, in order of arrival.
    waiting: VecDeque<Compilation>,
    /// Tenants with a grammar that a thread compiles now.
    busy: Vec<TenantId>,
    /// Compiled grammars, the latest used first. A tenant never gets the grammar of
    /// another: the time of an answer would show that the other has used it.
    kept: VecDeque<(TenantId, Grammar, CompiledGrammar)>,
    ended: bool,
}

/// A grammar that waits to be compiled.
struct Compilation {
    tenant: TenantId,
    grammar: Grammar,
    reply: oneshot::Sender<Result<RequestGrammar, RefusedForm>>,
}

/// A form that is refused, with the processor time that was spent on it.
#[derive(Debug)]
pub(crate) struct RefusedForm {
    pub(crate) refusal: Refusal,
    pub(crate) spent: Duration,
}

impl From<Refusal> for RefusedForm {
    /// Refuses a form on which no time was spent.
    fn from(refusal: Refusal) -> Self {
        Self { refusal, spent: Duration::ZERO }
    }
}

impl Grammars {
    /// Starts the threads. They build the compiler first, which takes half a second for a
    /// large vocabulary.
    pub(crate) fn start(
        tokenizer: Arc<Tokenizer>,
        vocabulary: u32,
        end_tokens: Vec<u32>,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            arrived: Condvar::new(),
            compiler: OnceLock::new(),
        });
        for number in 0..THREADS {
            let (shared, tokenizer) = (Arc::clone(&shared), Arc::clone(&tokenizer));
            let end_tokens = end_tokens.clone();
            thread::Builder::new()
                .name(format!("grammar-{number}"))
                .stack_size(COMPILE_STACK)
                .spawn(move || {
                    // A flood of new forms must not take the processor from the model.
                    // The call fails only if the nice value is already the highest.
                    let _ = rustix::process::nice(NICER);
                    shared.compiler.get_or_init(|| {
                        GrammarCompiler::new(read_vocabulary(&tokenizer, vocabulary, end_tokens))
                    });
                    shared.work();
                })?;
        }
        Ok(Self(shared))
    }

    /// Returns the compiled grammar of a tenant's request.
    ///
    /// # Errors
    /// The refusal of the request: the grammar cannot be compiled or takes too long, or too
    /// many others wait.
    pub(crate) async fn compile(
        &self,
        tenant: &TenantId,
        grammar: Grammar,
    ) -> Result<RequestGrammar, RefusedForm> {
        let (reply, compiled) = oneshot::channel();
        {
            // In a block of its own: the lock must not be held while the request waits.
            let mut state = self.0.state();
            if let Some(kept) = state.find(tenant, &grammar) {
                return Ok(kept.of_request(Duration::ZERO));
            }
            let own = state.waiting.iter().filter(|waiting| waiting.tenant == *tenant).count();
            if state.waiting.len() >= MOST_WAITING || own >= MOST_WAITING_OF_TENANT {
                return Err(overloaded("too many forms of answers wait to be compiled").into());
            }
            state.waiting.push_back(Compilation { tenant: tenant.clone(), grammar, reply });
        }
        self.0.arrived.notify_one();
        match tokio::time::timeout(LONGEST_WAIT, compiled).await {
            Ok(Ok(compiled)) => compiled,
            // The threads end with the worker alone.
            Ok(Err(_)) => Err(RefusedForm::from(Refusal {
                reason: RefusedReason::Draining,
                retry_after: None,
                message: "the worker is stopping".to_owned(),
            })),
            Err(_) => {
                Err(overloaded("the form of the answer waited too long to be compiled").into())
            }
        }
    }

    /// Lets the threads end after the grammar that they compile.
    pub(crate) fn end(&self) {
        self.0.state().ended = true;
        self.0.arrived.notify_all();
    }
}

impl State {
    /// Returns the kept grammar, which becomes the latest used one.
    fn find(&mut self, tenant: &TenantId, grammar: &Grammar) -> Option<CompiledGrammar> {
        let place = self.kept.iter().position(|(of, kept, _)| of == tenant && kept == grammar)?;
        let entry = self.kept.remove(place)?;
        let compiled = entry.2.clone();
        self.kept.push_front(entry);
        Some(compiled)
    }

    fn keep(&mut self, tenant: TenantId, grammar: Grammar, compiled: CompiledGrammar) {
        self.kept.push_front((tenant, grammar, compiled));
        self.kept.truncate(MOST_KEPT);
    }

    /// Takes the next grammar to compile: the first of a tenant that occupies no
    /// thread, or the first of all if both threads are free.
    fn next(&mut self) -> Option<Compilation> {
        // A request whose client has left needs no grammar.
        self.waiting.retain(|waiting| !waiting.reply.is_closed());
        let idle = self.waiting.iter().position(|waiting| !self.busy.contains(&waiting.tenant));
        let next = match (idle, self.busy.is_empty()) {
            (Some(place), _) => self.waiting.remove(place)?,
            // One thread stays free for the tenants that come next.
            (None, false) => return None,
            (None, true) => self.waiting.pop_front()?,
        };
        self.busy.push(next.tenant.clone());
        Some(next)
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compiles grammars until the worker ends.
    fn work(&self) {
        let mut state = self.state();
        while !state.ended {
            let Some(Compilation { tenant, grammar, reply }) = state.next() else {
                state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            // Released, because requests must not wait for the lock while this thread compiles.
            drop(state);
            let compiled = self.compile(&grammar);
            state = self.state();
            state.busy.retain(|busy| *busy != tenant);
            let answer = compiled.map(|(compiled, spent)| {
                state.keep(tenant, grammar, compiled.clone());
                compiled.of_request(spent)
            });
            // The request may have left meanwhile; the grammar is kept all the same.
            let _ = reply.send(answer);
            // The next grammar of this tenant may have waited for this thread.
            self.arrived.notify_one();
        }
    }

    /// Compiles a grammar. Returns it with the processor time that it took.
    fn compile(&self, grammar: &Grammar) -> Result<(CompiledGrammar, Duration), RefusedForm> {
        let compiler = match self.compiler.wait() {
            Ok(compiler) => compiler,
            Err(error) => {
                let message = format!("this model enforces no forms of answers: {error}");
                return Err(unenforceable(message).into());
            }
        };
        let began = processor_time();
        let compiled = compiler.compile(grammar);
        let spent = processor_time().saturating_sub(began);
        let compiled = match compiled {
            Ok(_) if spent > LONGEST_COMPILATION => Err(unenforceable(format!(
                "the form of the answer takes {} ms to compile; at most {} ms are allowed",
                spent.as_millis(),
                LONGEST_COMPILATION.as_millis()
            ))),
            compiled => compiled.map_err(|error| unenforceable(error.to_string())),
        };
        match compiled {
            Ok(compiled) => Ok((compiled, spent)),
            // The time counts all the same: a form that fails late must not be free.
            Err(refusal) => Err(RefusedForm { refusal, spent }),
        }
    }
}

/// Returns the tokens of a model with `size` rows of embeddings. The tokenizer may have
/// fewer.
fn read_vocabulary(tokenizer: &Tokenizer, size: u32, end_tokens: Vec<u32>) -> Vocabulary {
    Vocabulary {
        tokens: (0..size).map(|id| tokenizer.token_bytes(id).to_vec()).collect(),
        controls: (0..size).filter(|&id| tokenizer.is_control(id)).collect(),
        end_tokens,
    }
}

/// Returns the processor time of the calling thread. Unlike the time on the wall, it does
/// not depend on the load of the machine.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

fn unenforceable(message: String) -> Refusal {
    Refusal { reason: RefusedReason::Grammar, retry_after: None, message }
}

fn overloaded(message: &str) -> Refusal {
    Refusal {
        reason: RefusedReason::Overloaded,
        retry_after: Some(RETRY),
        message: message.to_owned(),
    }
}

/// The nice value that the threads add to that of their process: below the threads that
/// compute the model on a processor. Linux keeps a nice value for each thread.
const NICER: i32 = 10;
/// Threads that compile.
const THREADS: usize = 2;
/// Compiled grammars that are kept. One takes up to 4 MiB, typical ones 0.1 MiB.
const MOST_KEPT: usize = 64;
/// Grammars that wait to be compiled, over all tenants.
const MOST_WAITING: usize = 256;
/// Grammars of one tenant that wait to be compiled.
const MOST_WAITING_OF_TENANT: usize = 64;
/// Processor time of one compilation.
const LONGEST_COMPILATION: Duration = Duration::from_millis(250);
/// Time that a request waits for its grammar.
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// Time after which a refused request may come again.
const RETRY: Duration = Duration::from_secs(1);
