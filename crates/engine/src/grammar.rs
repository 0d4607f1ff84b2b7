//! Grammars: the forms of answers, compiled for a model's vocabulary, and the masks of
//! tokens that may come next.
//!
//! A grammar is compiled once and shared by all its choices ([`CompiledGrammar`]). Each
//! choice has a [`Constraint`] of its own. The engine's thread never computes a mask: it
//! hands each sampled token to the mask threads, which work while the next forward
//! pass runs.
//!
//! Compiling has no time limit of its own, and it can overflow the stack on schemas with
//! long chains of references. Callers check schemas first, compile on threads with a large
//! stack, and do not wait for ever.

mod forms;
mod masks;
mod reasons;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokRxInfo, TokTrie};
use llguidance::{ParserFactory, TokenParser};
use tollgate_domain::Grammar;

pub use self::masks::{Constraint, MaskWait, TokenMask, Unsampled};
use self::masks::{MaskThreads, mask_of};

/// A model's tokens, as grammars read them.
pub struct Vocabulary {
    /// The bytes of each token, in the order of ids. A token without bytes is never sampled
    /// under a grammar.
    pub tokens: Vec<Vec<u8>>,
    /// Ids of the control tokens, which no text contains.
    pub controls: Vec<u32>,
    /// The tokens that end an answer, at least one.
    pub end_tokens: Vec<u32>,
}

/// A compiler of grammars for one model.
pub struct GrammarCompiler {
    factory: ParserFactory,
    /// The control tokens: their texts with their ids.
    controls: Vec<(String, u32)>,
    threads: Arc<MaskThreads>,
}

/// The reasons why a grammar is refused.
#[derive(Debug, thiserror::Error)]
pub enum GrammarError {
    /// The model has no token that ends an answer.
    #[error("the model has no end token")]
    NoEnd,
    /// The grammar cannot be enforced, or it exceeds the bounds of its compilation. Has the
    /// reason, in words for a client.
    #[error("the form of the answer cannot be enforced: {0}")]
    Compile(String),
    /// No token can begin an answer of this form.
    #[error("no answer of this model can have this form")]
    Empty,
    /// The threads that compute masks could not be started.
    #[error("cannot start the threads of the grammars")]
    Threads(#[source] std::io::Error),
}

impl GrammarCompiler {
    /// Creates the compiler and starts its mask threads.
    ///
    /// # Errors
    /// [`GrammarError::NoEnd`], [`GrammarError::Threads`], or [`GrammarError::Compile`] if
    /// the vocabulary does not fit the library.
    pub fn new(vocabulary: Vocabulary) -> Result<Self, GrammarError> {
        let Vocabulary { mut tokens, controls, end_tokens } = vocabulary;
        let [first_end, ..] = end_tokens[..] else { return Err(GrammarError::NoEnd) };
        let mut control_texts = Vec::with_capacity(controls.len());
        for id in controls {
            let Some(token) = tokens.get_mut(id as usize) else { continue };
            control_texts.push((String::from_utf8_lossy(token).into_owned(), id));
            // The library knows a control token by this first byte, which no UTF-8 text has.
            token.insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
        }
        let info = TokRxInfo::new(tokens.len() as u32, first_end);
        let trie = TokTrie::from(&info, &tokens).with_eos_tokens(&end_tokens);
        let environment: llguidance::toktrie::TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::general_slices();
        let mut factory =
            ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)
                .map_err(|error| GrammarError::Compile(error.to_string()))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        let threads = MaskThreads::start().map_err(GrammarError::Threads)?;
        Ok(Self { factory, controls: control_texts, threads: Arc::new(threads) })
    }

    /// Compiles a grammar and tries its first two masks. Takes milliseconds, and uses much
    /// stack: call it on a thread with [`COMPILE_STACK`] bytes.
    ///
    /// # Errors
    /// [`GrammarError::Compile`], or [`GrammarError::Empty`].
    pub fn compile(&self, grammar: &Grammar) -> Result<CompiledGrammar, GrammarError> {
        // The library panics at some grammars. The panic must not end the thread.
        let compiled = catch_unwind(AssertUnwindSafe(|| self.compile_inner(grammar)));
        compiled.unwrap_or_else(|_| Err(GrammarError::Compile("the compiler failed".to_owned())))
    }

    fn compile_inner(&self, grammar: &Grammar) -> Result<CompiledGrammar, GrammarError> {
        let form = forms::form_of(grammar, &self.controls)?;
        let mut parser = self.parser(form)?;
        parser.start_without_prompt();
        // The prototype stays fresh: an error of the lexer would stay in it for ever.
        let mut trial = parser.deep_clone();
        let first = mask_of(&mut trial).map_err(|_| GrammarError::Empty)?;
        // Some grammars fail only at their second mask. Any allowed token leads there.
        if let Some(token) = first.tokens().find(|token| !self.is_end(*token)) {
            trial
                .consume_token(token)
                .and_then(|_| trial.compute_mask())
                .map_err(|error| refused(&error))?;
        }
        Ok(CompiledGrammar(Arc::new(Compiled {
            prototype: Mutex::new(parser),
            first: Arc::new(first),
            threads: Arc::clone(&self.threads),
        })))
    }

    fn parser(&self, form: TopLevelGrammar) -> Result<TokenParser, GrammarError> {
        self.factory.create_parser(form).map_err(|error| refused(&error))
    }

    /// Keeps the mask threads from work, or lets them go on.
    #[cfg(test)]
    pub(crate) fn pause_masks(&self, paused: bool) {
        self.threads.pause(paused);
    }

    fn is_end(&self, token: u32) -> bool {
        self.factory.tok_env().tok_trie().eos_tokens().contains(&token)
    }
}

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarCompiler").finish_non_exhaustive()
    }
}

/// A compiled grammar. Copies share it.
#[derive(Clone)]
pub struct CompiledGrammar(Arc<Compiled>);

struct Compiled {
    /// A parser that has read nothing.
    prototype: Mutex<TokenParser>,
    /// The tokens that may begin an answer.
    first: Arc<TokenMask>,
    threads: Arc<MaskThreads>,
}

impl CompiledGrammar {
    /// Returns the grammar for one request. `spent` is the host time for it so far.
    pub fn of_request(&self, spent: Duration) -> RequestGrammar {
        let spent = AtomicU64::new(u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX));
        RequestGrammar { compiled: self.clone(), spent: Arc::new(spent) }
    }

    /// Returns a parser that has read nothing and shares nothing with others.
    fn parser(&self) -> TokenParser {
        // Nothing panics while it holds the lock but an allocation, which ends the process.
        self.0.prototype.lock().unwrap_or_else(PoisonError::into_inner).deep_clone()
    }
}

impl fmt::Debug for CompiledGrammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompiledGrammar").finish_non_exhaustive()
    }
}

/// The grammar of a request, with the host time that it has taken. Copies share the time.
#[derive(Clone)]
pub struct RequestGrammar {
    compiled: CompiledGrammar,
    spent: Arc<AtomicU64>,
}

impl RequestGrammar {
    /// Returns the constraint of one choice, which has generated nothing yet.
    pub fn constraint(&self) -> Constraint {
        Constraint::new(self)
    }

    /// Returns the host time for the grammar so far: compilation and masks.
    pub fn spent(&self) -> Duration {
        // Relaxed: the sum orders no other memory.
        Duration::from_nanos(self.spent.load(Ordering::Relaxed))
    }

    fn add(&self, spent: Duration) {
        let nanos = u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX);
        self.spent.fetch_add(nanos, Ordering::Relaxed);
    }
}

impl fmt::Debug for RequestGrammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestGrammar").field("spent", &self.spent()).finish_non_exhaustive()
    }
}

/// Two are equal if they are one grammar, compiled once.
impl PartialEq for RequestGrammar {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.compiled.0, &other.compiled.0)
    }
}

/// Returns the bounds of one grammar. With them a mask takes at most about 3 ms for a
/// vocabulary of 152,000 tokens.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 1_000,
        initial_lexer_fuel: 200_000,
        step_lexer_fuel: 20_000,
        step_max_items: 4_000,
        max_lexer_states: 16_000,
        max_grammar_size: 50_000,
        // Error messages must not repeat a caller's text.
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// Returns the refusal of a grammar, with the library's reason in words for a client.
fn refused(error: &impl fmt::Display) -> GrammarError {
    let text = error.to_string();
    let first: String =
        text.lines().next().unwrap_or_default().chars().take(MOST_ERROR_CHARS).collect();
    GrammarError::Compile(reasons::for_client(&first))
}

/// Bytes of stack that a compilation may take.
pub const COMPILE_STACK: usize = 16 << 20;
/// Characters of a reported error at most.
const MOST_ERROR_CHARS: usize = 300;

#[cfg(test)]
mod tests;
