//! Attackers that speak correct HTTP and ask for too much: floods, costly prompts,
//! hogs, endless outputs, sybils, early leavers, retry storms. Each one sends at
//! its own rate whatever the answers are. It stops at the end of the attack and
//! cancels its requests.

#![expect(clippy::expect_used, reason = "no code panics under the locks of this module")]

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::attack::{Attack, AttackerResult};
use super::tally::{self, Tally};
use super::{Ground, Stage, jobs, plays_before, random, streams, taught, wire};
use crate::client::{Protocol, Target};
use crate::clock;
use crate::outcome::{End, Question};
use crate::plan::Random;
use crate::run::chat_body;
use crate::scenario::{AttackKind, Attacker};
use crate::slot::{DueRequest, Slot, send_noting};

/// Requests of one attacker in flight at most.
const MOST_UNDER_WAY: usize = 4_096;

/// Time that an attacker waits for an answer.
const PATIENCE: Duration = Duration::from_secs(120);

/// Returns the targets of an attacker's connections: each key and each address is
/// used at least once.
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
        // Attackers use 127.1.0.1 and following, 127.2.0.1 and following, and so
        // on. Honest tenants use other addresses.
        let host = 1 + (index as u32 % attacker.sources);
        let [high, low] = (host as u16).to_be_bytes();
        let network = 1 + (number as u8 % 250);
        target.from_source(IpAddr::V4(Ipv4Addr::new(127, network, high, low)))
    };
    (0..connections).map(one).collect()
}

/// Runs attacker `number` until the attack ends.
pub(super) async fn run(
    ground: Arc<Ground>,
    number: usize,
    targets: Vec<Target>,
    rate: f64,
) -> (usize, AttackerResult) {
    let attacker = ground.scenario.attackers[number].clone();
    let seen = Arc::new(Mutex::new(AttackerResult {
        kind: attacker.kind,
        who: who(&attacker),
        rate: None,
        tally: Tally::default(),
        tokens: 0,
        first_tokens: Vec::new(),
        closed_after: Vec::new(),
        oldest_open: 0.0,
        shapes: Vec::new(),
    }));
    let phases = ground.scenario.phases;
    let begin = ground.started + phases.alone;
    let end = begin + phases.attack;
    let attack = Attack { ground: Arc::clone(&ground), attacker, seen: Arc::clone(&seen), end };
    let attacking = async {
        match attack.attacker.kind {
            AttackKind::BodyFlood | AttackKind::UnreadBesideDrip => {
                tokio::time::sleep_until(begin).await;
                streams::run(attack, targets).await;
            }
            AttackKind::TaughtEstimates => {
                tokio::time::sleep_until(begin).await;
                taught::run(attack, targets).await;
            }
            AttackKind::RandomShapes => {
                tokio::time::sleep_until(begin).await;
                random::run(attack, targets).await;
            }
            AttackKind::JobStorm | AttackKind::CancelStorm | AttackKind::GiantLines => {
                tokio::time::sleep_until(begin).await;
                jobs::run(attack, targets).await;
            }
            kind if kind.is_by_connections() => {
                tokio::time::sleep_until(begin).await;
                wire::run(attack, targets).await;
            }
            kind => {
                seen.lock().expect("no panic under the lock").rate = Some(rate);
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
    let seen = seen.lock().expect("no panic under the lock").clone();
    (number, seen)
}

/// The retries of a refused request.
#[derive(Clone, Copy)]
enum Tries {
    Once,
    AsOften,
}

/// Sends requests at `rate` until the end, then cancels all that are in flight.
async fn requests(attack: Attack, targets: &[Target], rate: f64, tries: Tries) {
    let Attack { attacker, ground, end, .. } = &attack;
    let slots: Vec<Arc<Slot>> =
        targets.iter().map(|to| Arc::new(Slot::new(to.clone(), Protocol::Http2))).collect();
    let questions = questions(&attack);
    let mut random = Random(ground.scenario.seed ^ 0x5eed);
    let mut under_way = JoinSet::new();
    let mut due = clock::now();
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
                question: with_own_key(&questions[number % questions.len()], stream, number),
                leaves: attacker.leave_within.map(|within| within.mul_f64(random.unit())),
                tries: match tries {
                    Tries::AsOften if attacker.kind == AttackKind::RetryStorm => {
                        1 + attacker.retries
                    }
                    _ => 1,
                },
            };
            under_way.spawn(one.send());
        }
        due += Duration::from_secs_f64(1.0 / rate);
    }
    tokio::time::sleep_until(*end).await;
    // Dropping the tasks resets their streams, and dropping the slots closes the
    // connections.
    under_way.shutdown().await;
}

/// Returns the questions, each whole and streamed. A shape has one form for both.
fn questions(attack: &Attack) -> Vec<[Question; 2]> {
    let Attack { attacker, ground, .. } = attack;
    let model = &ground.scenario.model;
    if !attacker.shapes.is_empty() {
        let shaped = attacker.shapes.iter().flat_map(|shape| shape.questions(model));
        return shaped.map(|question| [question.clone(), question]).collect();
    }
    let one = |prompt: &String, stream| {
        Question::chat(chat_body(model, prompt, attacker.ask.most_tokens(), stream), stream)
    };
    attacker.prompts().iter().map(|prompt| [one(prompt, false), one(prompt, true)]).collect()
}

/// Returns the question, with an idempotency key of its own if it has one.
fn with_own_key(forms: &[Question; 2], stream: bool, number: usize) -> Question {
    let mut question = forms[usize::from(stream)].clone();
    if let Some(key) = &mut question.idempotency_key {
        key.push_str(&number.to_string());
    }
    question
}

/// A request of an attacker.
struct One {
    attack: Attack,
    slot: Arc<Slot>,
    question: Question,
    leaves: Option<Duration>,
    tries: u32,
}

impl One {
    async fn send(self) {
        let Self { attack, slot, question, leaves, tries } = self;
        for _ in 0..tries {
            let mut wait = Wait {
                attack: &attack,
                since: clock::now(),
                begun: OnceLock::new(),
                counts: question.stream,
            };
            let request = DueRequest {
                tenant: 0,
                question: question.clone(),
                at: wait.since,
                timeout: PATIENCE,
            };
            let sending = send_noting(&slot, request, &wait.begun);
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
            attack.seen.lock().expect("no panic under the lock").tokens += outcome.tokens;
            if outcome.end == End::Done {
                return;
            }
        }
    }
}

/// A stream that waits for its first token. Dropping it records the wait. Leaving
/// out streams that still wait at the end would leave out the longest waits.
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
