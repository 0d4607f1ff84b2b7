//! An attacker that plays random shapes one after the other, so that the gateway's
//! memory and processor time can be attributed to each.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::attack::Attack;
use super::{tally, watch};
use crate::client::{Protocol, Target};
use crate::clock;
use crate::outcome::Question;
use crate::random_shape::{Manner, RandomShape};
use crate::slot::{DueRequest, Slot, send};

/// The effect of one random shape.
#[derive(Clone, Debug, Serialize)]
pub struct ShapeResult {
    /// The number, which gives the same shape again with the same seed.
    pub number: u64,
    /// A description.
    pub about: String,
    /// The begin in seconds from the start of the drill.
    pub from: f64,
    /// The end.
    pub to: f64,
    /// Seconds of the gateway's processor time, if known.
    pub cpu_seconds: Option<f64>,
    /// Bytes by which the gateway's memory grew at most, if known.
    pub memory: Option<u64>,
}

/// Time between two looks at the gateway's memory.
const LOOKS: Duration = Duration::from_millis(10);

/// Time that a connection may take to open, and a client to write.
const PATIENCE: Duration = Duration::from_secs(5);

/// Bytes of an answer over HTTP/1.1 that are read at most.
const MOST_ANSWER: u64 = 1 << 20;

/// Plays the shapes until all are played or the attack ends.
pub(super) async fn run(attack: Attack, targets: Vec<Target>) {
    let slots: Vec<Arc<Slot>> =
        targets.iter().map(|to| Arc::new(Slot::new(to.clone(), Protocol::Http2))).collect();
    let scenario = &attack.ground.scenario;
    for number in 0..u64::from(attack.attacker.requests) {
        if clock::now() >= attack.end {
            return;
        }
        let shape = RandomShape::new(scenario.seed, number, &scenario.model);
        let place = number as usize % targets.len();
        let before = Observed::now(&attack);
        let from = clock::now();
        let mut peak = before.memory;
        let playing = play(&attack, &shape, (&targets[place], &slots[place]));
        tokio::pin!(playing);
        // Memory between two looks is not seen.
        while timeout(LOOKS, &mut playing).await.is_err() {
            peak = peak.max(Observed::now(&attack).memory);
        }
        let after = Observed::now(&attack);
        peak = peak.max(after.memory);
        let (at, cpu) = (|instant| attack.ground.at(instant), (before.cpu, after.cpu));
        let result = ShapeResult {
            number,
            about: shape.about.clone(),
            from: at(from),
            to: at(clock::now()),
            cpu_seconds: cpu.0.zip(cpu.1).map(|(before, after)| after - before),
            memory: before.memory.zip(peak).map(|(before, peak)| peak - before),
        };
        attack.shape_played(result);
    }
}

/// The gateway's use of this machine.
struct Observed {
    memory: Option<u64>,
    cpu: Option<f64>,
}

impl Observed {
    fn now(attack: &Attack) -> Self {
        let pid = attack.ground.gateway_pid;
        Self {
            memory: pid.and_then(watch::held_by).map(|(memory, _)| memory),
            cpu: pid.and_then(watch::cpu_of),
        }
    }
}

/// Sends all copies of a shape and waits for their ends.
async fn play(attack: &Attack, shape: &RandomShape, (target, slot): (&Target, &Arc<Slot>)) {
    let mut copies = JoinSet::new();
    for number in 0..shape.copies {
        let (attack, target, slot) = (attack.clone(), target.clone(), Arc::clone(slot));
        let (mut question, manner) = (shape.question.clone(), shape.manner);
        // Half of the copies repeat the key of another.
        question.idempotency_key =
            question.idempotency_key.map(|key| format!("{key}{}", number / 2));
        copies.spawn(async move {
            let outcome = match manner {
                Manner::Reads(time) => {
                    let at = clock::now();
                    let due = DueRequest { tenant: 0, question, at, timeout: time };
                    // A client that leaves must not close the connection of the others.
                    match timeout(time, send(&slot, DueRequest { timeout: PATIENCE, ..due })).await
                    {
                        Ok(outcome) => tally::outcome(&outcome.end),
                        Err(_) => "left early".to_owned(),
                    }
                }
                _ => timeout(PATIENCE, by_hand(&target, &question, manner))
                    .await
                    .unwrap_or_else(|_| "timed out".to_owned()),
            };
            attack.count(&outcome);
        });
    }
    while copies.join_next().await.is_some() {}
}

/// Sends a request over HTTP/1.1 in a manner that a client library would not have.
async fn by_hand(target: &Target, question: &Question, manner: Manner) -> String {
    let Ok(mut tls) = target.connect_tls(Protocol::Http1).await else {
        return "connect failed".to_owned();
    };
    let (pieces, pause, more) = match manner {
        Manner::Drips(pieces, pause) => (pieces as usize, pause, 0),
        Manner::PromisesMore(pause) => (1, pause, 1_000),
        Manner::Ignores(pause) | Manner::Reads(pause) => (1, pause, 0),
    };
    let mut head = format!(
        "POST {} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\nconnection: close\r\n\
         content-length: {}\r\nauthorization: ",
        question.path,
        target.authority(),
        question.body.len() + more,
    )
    .into_bytes();
    head.extend(target.authorization().as_bytes());
    head.extend(b"\r\n\r\n");
    // The gateway may answer and close before the end of the body, so an error of a
    // write says nothing.
    let _ = tls.write_all(&head).await;
    for piece in question.body.chunks((question.body.len() / pieces).max(1)) {
        if tls.write_all(piece).await.is_err() || tls.flush().await.is_err() {
            break;
        }
        sleep(pause).await;
    }
    if !matches!(manner, Manner::Drips(..)) {
        return "left early".to_owned();
    }
    let mut answer = Vec::new();
    // A connection that is closed after a refusal may lose the end of the answer.
    let _ = tls.take(MOST_ANSWER).read_to_end(&mut answer).await;
    let status = String::from_utf8_lossy(&answer).split_whitespace().nth(1).map(str::to_owned);
    status.unwrap_or_else(|| "no answer".to_owned())
}
