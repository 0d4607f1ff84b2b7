//! Attackers that speak proper HTTP and ask too much of it: floods, costly
//! prompts, hogs, endless outputs, sybils, early leavers, retry storms. Each
//! sends at its own rate whatever the answers say, and is gone, with all that
//! it had under way, when the attack ends.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::tally::{self, ANSWERED, Live, Tally};
use super::{Ground, Stage, plays_before, wire};
use crate::client::{Protocol, Target};
use crate::outcome::End;
use crate::plan::Random;
use crate::run::chat_body;
use crate::scenario::{Attacker, Kind};
use crate::slot::{Slot, send_noting};

/// What one attacker saw.
#[derive(Clone, Debug)]
pub struct AttackerSeen {
    /// What it did.
    pub kind: Kind,
    /// Its tenants, as the scenario names them, shortened.
    pub who: String,
    /// Requests a second that it meant to send; none where it has connections.
    pub rate: Option<f64>,
    /// What became of what it sent.
    pub tally: Tally,
    /// Tokens of its answers.
    pub tokens: u64,
    /// Milliseconds to the first token of each of its answers; of those that
    /// still waited at the end, how long they had.
    pub first_tokens: Vec<f64>,
    /// How long the gateway let each of its connections live, in seconds.
    pub closed_after: Vec<f64>,
    /// The oldest connection that was still open at the end, in seconds.
    pub oldest_open: f64,
}

/// The most requests of one attacker under way at once.
const MOST_UNDER_WAY: usize = 4_096;

/// How long an attacker waits for an answer.
const PATIENCE: Duration = Duration::from_secs(120);

/// The most ages of connections, and first tokens, that are kept.
const MOST_KEPT: usize = 100_000;

/// The connections of an attacker: each key and each address at least once.
pub(super) fn targets(
    attacker: &Attacker,
    number: usize,
    stage: &Stage,
    may_choose_source: bool,
) -> Vec<Target> {
    let keys: Vec<&Target> = attacker
        .tenants
        .iter()
        .flat_map(|tenant| stage.keys[tenant].iter().take(attacker.keys as usize))
        .collect();
    let connections = (attacker.connections.max(attacker.sources) as usize).max(keys.len());
    let one = |index: usize| {
        let target = keys[index % keys.len()];
        if !may_choose_source {
            return target.clone();
        }
        // 127.1.0.1 and on for the first attacker, 127.2.0.1 for the second:
        // not the address of the honest.
        let host = 1 + (index as u32 % attacker.sources);
        let [high, low] = (host as u16).to_be_bytes();
        let network = 1 + (number as u8 % 250);
        target.from_source(IpAddr::V4(Ipv4Addr::new(127, network, high, low)))
    };
    (0..connections).map(one).collect()
}

/// Plays attacker `number` until the attack ends.
pub(super) async fn run(
    ground: Arc<Ground>,
    number: usize,
    targets: Vec<Target>,
    rate: f64,
) -> (usize, AttackerSeen) {
    let attacker = ground.scenario.attackers[number].clone();
    let seen = Arc::new(Mutex::new(AttackerSeen {
        kind: attacker.kind,
        who: who(&attacker),
        rate: None,
        tally: Tally::default(),
        tokens: 0,
        first_tokens: Vec::new(),
        closed_after: Vec::new(),
        oldest_open: 0.0,
    }));
    let phases = ground.scenario.phases;
    let begin = ground.started + phases.alone;
    let end = begin + phases.attack;
    let attack = Attack { ground: Arc::clone(&ground), attacker, seen: Arc::clone(&seen), end };
    let attacking = async {
        match attack.attacker.kind {
            Kind::SlowReaders | Kind::Slowloris | Kind::RapidReset => {
                tokio::time::sleep_until(begin).await;
                wire::run(attack, targets).await;
            }
            kind => {
                seen.lock().expect("nobody panics under it").rate = Some(rate);
                if plays_before(kind) {
                    requests(attack.until(begin), &targets, rate, Tries::Once).await;
                }
                tokio::time::sleep_until(begin).await;
                requests(attack, &targets, rate, Tries::AsOften).await;
            }
        }
    };
    tokio::select! {
        () = attacking => {}
        () = ground.stop.cancelled() => {}
    }
    let seen = seen.lock().expect("nobody panics under it").clone();
    (number, seen)
}

/// An attacker at work.
#[derive(Clone)]
pub(super) struct Attack {
    pub(super) ground: Arc<Ground>,
    pub(super) attacker: Attacker,
    pub(super) seen: Arc<Mutex<AttackerSeen>>,
    pub(super) end: Instant,
}

/// Whether a request is sent again as often as the scenario says.
#[derive(Clone, Copy)]
enum Tries {
    Once,
    AsOften,
}

impl Attack {
    fn until(&self, end: Instant) -> Self {
        Self { end, ..self.clone() }
    }

    /// Counts what became of something sent now.
    pub(super) fn count(&self, what: &str) {
        let at = self.ground.at(Instant::now());
        Live::count(&self.ground.live.attacks);
        if what == ANSWERED {
            Live::count(&self.ground.live.attacks_answered);
        }
        self.seen.lock().expect("nobody panics under it").tally.add(at, what);
    }

    fn waited(&self, span: Duration) {
        let mut seen = self.seen.lock().expect("nobody panics under it");
        if seen.first_tokens.len() < MOST_KEPT {
            seen.first_tokens.push(span.as_secs_f64() * 1e3);
        }
    }

    /// The gateway ended a connection that had lived since `opened`.
    pub(super) fn closed(&self, opened: Instant) {
        let mut seen = self.seen.lock().expect("nobody panics under it");
        if seen.closed_after.len() < MOST_KEPT {
            seen.closed_after.push(opened.elapsed().as_secs_f64());
        }
    }

    /// A connection opened then is open still, at the end.
    pub(super) fn still_open(&self, opened: Instant) {
        let mut seen = self.seen.lock().expect("nobody panics under it");
        seen.oldest_open = seen.oldest_open.max(opened.elapsed().as_secs_f64());
    }
}

/// Requests at `rate` until the end; then nothing of them is left.
async fn requests(attack: Attack, targets: &[Target], rate: f64, tries: Tries) {
    let Attack { attacker, ground, end, .. } = &attack;
    let slots: Vec<Arc<Slot>> =
        targets.iter().map(|to| Arc::new(Slot::new(to.clone(), Protocol::Http2))).collect();
    let prompts = attacker.prompts();
    let body = |prompt: &String, stream| {
        chat_body(&ground.scenario.model, prompt, attacker.ask.most_tokens(), stream)
    };
    let bodies: Vec<[Bytes; 2]> =
        prompts.iter().map(|prompt| [body(prompt, false), body(prompt, true)]).collect();
    let mut random = Random(ground.scenario.seed ^ 0x5eed);
    let mut under_way = JoinSet::new();
    let mut due = Instant::now();
    for number in 0usize.. {
        if due >= *end {
            break;
        }
        tokio::time::sleep_until(due).await;
        while under_way.try_join_next().is_some() {}
        if under_way.len() >= MOST_UNDER_WAY {
            attack.count(&tally::outcome(&End::NotSent));
        } else {
            let stream = random.below(100) < usize::from(attacker.stream);
            let one = One {
                attack: attack.clone(),
                slot: Arc::clone(&slots[number % slots.len()]),
                body: bodies[number % bodies.len()][usize::from(stream)].clone(),
                stream,
                leaves: attacker.leave_within.map(|within| within.mul_f64(random.unit())),
                tries: match tries {
                    Tries::AsOften if attacker.kind == Kind::RetryStorm => 1 + attacker.retries,
                    _ => 1,
                },
            };
            under_way.spawn(one.send());
        }
        due += Duration::from_secs_f64(1.0 / rate);
    }
    tokio::time::sleep_until(*end).await;
    // Dropping them resets their streams, and the slots close their connections.
    under_way.shutdown().await;
}

/// One request of an attacker.
struct One {
    attack: Attack,
    slot: Arc<Slot>,
    body: Bytes,
    stream: bool,
    leaves: Option<Duration>,
    tries: u32,
}

impl One {
    async fn send(self) {
        let Self { attack, slot, body, stream, leaves, tries } = self;
        for _ in 0..tries {
            let mut wait = Wait {
                attack: &attack,
                since: Instant::now(),
                begun: OnceLock::new(),
                counts: stream,
            };
            let sending =
                send_noting(&slot, 0, body.clone(), stream, wait.since, PATIENCE, &wait.begun);
            let outcome = match leaves {
                None => sending.await,
                Some(after) => match tokio::time::timeout(after, sending).await {
                    Ok(outcome) => outcome,
                    Err(_) => {
                        wait.counts = false;
                        attack.count("left early");
                        return;
                    }
                },
            };
            wait.counts &= wait.begun.get().is_some();
            drop(wait);
            attack.count(&tally::outcome(&outcome.end));
            attack.seen.lock().expect("nobody panics under it").tokens += outcome.tokens;
            if outcome.end == End::Done {
                return;
            }
        }
    }
}

/// A stream that waits for its first token. Dropped, by its end or by that of
/// the attack, it says how long it did: leaving out those that still wait
/// would leave out the longest.
struct Wait<'a> {
    attack: &'a Attack,
    since: Instant,
    begun: OnceLock<Duration>,
    counts: bool,
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        if self.counts {
            self.attack.waited(self.begun.get().copied().unwrap_or_else(|| self.since.elapsed()));
        }
    }
}

fn who(attacker: &Attacker) -> String {
    match attacker.tenants.as_slice() {
        [one] if attacker.keys > 1 => format!("{one} ({} keys)", attacker.keys),
        [one] => one.clone(),
        [first, .., last] => format!("{first} to {last}"),
        [] => String::new(),
    }
}
