//! An attack at work: the state that all kinds of attackers share, and the
//! results that they record.

#![expect(clippy::expect_used, reason = "no code panics under the locks of this module")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use super::tally::{ANSWERED, Live, Tally};
use super::{Ground, ShapeResult};
use crate::clock;
use crate::scenario::{AttackKind, Attacker};

/// The results of one attacker.
#[derive(Clone, Debug)]
pub struct AttackerResult {
    /// The kind of the attack.
    pub kind: AttackKind,
    /// The attacker's tenants, shortened.
    pub who: String,
    /// The planned requests a second; `None` for attackers with connections instead
    /// of requests.
    pub rate: Option<f64>,
    /// Counts of the outcomes of requests.
    pub tally: Tally,
    /// Tokens in the answers.
    pub tokens: u64,
    /// Milliseconds to the first token of each answer. A stream that never got one
    /// counts with the time that it waited.
    pub first_tokens: Vec<f64>,
    /// Seconds after which the gateway closed each connection.
    pub closed_after: Vec<f64>,
    /// Age in seconds of the oldest connection that was open at the end.
    pub oldest_open: f64,
    /// The effect of each random shape.
    pub shapes: Vec<ShapeResult>,
}

/// A running attack.
#[derive(Clone)]
pub(super) struct Attack {
    pub(super) ground: Arc<Ground>,
    pub(super) attacker: Attacker,
    pub(super) seen: Arc<Mutex<AttackerResult>>,
    pub(super) end: Instant,
}

impl Attack {
    pub(super) fn until(&self, end: Instant) -> Self {
        Self { end, ..self.clone() }
    }

    /// Counts an outcome now.
    pub(super) fn count(&self, what: &str) {
        let at = self.ground.at(clock::now());
        Live::count(&self.ground.live.attacks);
        if what == ANSWERED {
            Live::count(&self.ground.live.attacks_answered);
        }
        self.seen.lock().expect("no panic under the lock").tally.add(at, what);
    }

    pub(super) fn waited(&self, span: Duration) {
        let mut seen = self.seen.lock().expect("no panic under the lock");
        if seen.first_tokens.len() < MOST_KEPT {
            seen.first_tokens.push(span.as_secs_f64() * 1e3);
        }
    }

    /// Records that the gateway closed a connection from `opened`.
    pub(super) fn closed(&self, opened: Instant) {
        let mut seen = self.seen.lock().expect("no panic under the lock");
        if seen.closed_after.len() < MOST_KEPT {
            seen.closed_after.push(opened.elapsed().as_secs_f64());
        }
    }

    /// Records the effect of a random shape.
    pub(super) fn shape_played(&self, result: ShapeResult) {
        self.seen.lock().expect("no panic under the lock").shapes.push(result);
    }

    /// Records that a connection from `opened` is open at the end.
    pub(super) fn still_open(&self, opened: Instant) {
        let mut seen = self.seen.lock().expect("no panic under the lock");
        seen.oldest_open = seen.oldest_open.max(opened.elapsed().as_secs_f64());
    }
}

/// The most ages of connections, and first tokens, that are kept.
const MOST_KEPT: usize = 100_000;
