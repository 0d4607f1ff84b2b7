//! The measurement of capacity: a closed loop of one kind of request for a few
//! seconds, by a tenant with no other part in the drill. Rates that are given as
//! multiples refer to it, so that a scenario has the same meaning on any machine.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use super::{DrillError, Stage, tally};
use crate::client::{Protocol, Target};
use crate::clock;
use crate::outcome::{End, Question};
use crate::run::chat_body;
use crate::scenario::{Capacity, Rate, Scenario};
use crate::slot::{DueRequest, Slot, send};

/// The capacity for one kind of request.
#[derive(Clone, Debug, serde::Serialize)]
pub struct MeasuredCapacity {
    /// The first prompt, shortened.
    pub asks: String,
    /// The largest number of tokens in an answer.
    pub max_tokens: u32,
    /// Answered requests a second.
    pub requests_per_second: f64,
    /// Answered tokens a second.
    pub tokens_per_second: f64,
    #[serde(skip)]
    prompts: Vec<String>,
}

/// Time that one answer may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Streams on one connection.
const STREAMS: u32 = 64;

/// Measures the capacity for every rate of `scenario` that needs it.
pub(super) async fn find(
    scenario: &Scenario,
    stage: &Stage,
) -> Result<Vec<MeasuredCapacity>, DrillError> {
    let Some(capacity) = &scenario.capacity else { return Ok(Vec::new()) };
    let target = &stage.keys[&capacity.tenant][0];
    let mut found: Vec<MeasuredCapacity> = Vec::new();
    for (prompts, max_tokens, rate) in kinds(scenario) {
        let is_known = found.iter().any(|one| one.is_of(&prompts, max_tokens));
        if rate.wants_capacity() && !is_known {
            found.push(measure(scenario, capacity, target, prompts, max_tokens).await?);
        }
    }
    Ok(found)
}

/// Returns the requests a second of this kind, or 0 if it was not measured.
pub(super) fn of(found: &[MeasuredCapacity], prompts: &[String], max_tokens: u32) -> f64 {
    let one = found.iter().find(|one| one.is_of(prompts, max_tokens));
    one.map_or(0.0, |one| one.requests_per_second)
}

impl MeasuredCapacity {
    fn is_of(&self, prompts: &[String], max_tokens: u32) -> bool {
        self.prompts == prompts && self.max_tokens == max_tokens
    }
}

fn kinds(scenario: &Scenario) -> Vec<(Vec<String>, u32, Rate)> {
    let honest = scenario.honest.iter().map(|one| (one.prompts(), one.ask.most_tokens(), one.rate));
    let attackers =
        scenario.attackers.iter().map(|one| (one.prompts(), one.ask.most_tokens(), one.rate));
    honest.chain(attackers).collect()
}

#[expect(
    clippy::expect_used,
    reason = "a panic of a sender is a defect of the load test, not a result of the server"
)]
async fn measure(
    scenario: &Scenario,
    capacity: &Capacity,
    target: &Target,
    prompts: Vec<String>,
    max_tokens: u32,
) -> Result<MeasuredCapacity, DrillError> {
    let connections = capacity.at_once.div_ceil(STREAMS);
    let slots: Vec<_> =
        (0..connections).map(|_| Arc::new(Slot::new(target.clone(), Protocol::Http2))).collect();
    let started = clock::now();
    let until = started + capacity.seconds;
    let mut loops = JoinSet::new();
    for number in 0..capacity.at_once as usize {
        let slot = Arc::clone(&slots[number % slots.len()]);
        let body = chat_body(&scenario.model, &prompts[number % prompts.len()], max_tokens, true);
        let asked = Question::chat(body, true);
        loops.spawn(async move {
            let (mut answered, mut tokens, mut failure) = (0u64, 0u64, None);
            while clock::now() < until {
                let outcome = {
                    let (question, at, timeout) = (asked.clone(), clock::now(), PATIENCE);
                    send(&slot, DueRequest { tenant: 0, question, at, timeout }).await
                };
                if outcome.end == End::Done {
                    answered += 1;
                    tokens += outcome.tokens;
                } else {
                    failure = Some(tally::outcome(&outcome.end));
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
            (answered, tokens, failure)
        });
    }
    let (mut answered, mut tokens, mut failure) = (0, 0, None);
    while let Some(ended) = loops.join_next().await {
        let (more, more_tokens, why) = ended.expect("a sender panicked");
        answered += more;
        tokens += more_tokens;
        failure = failure.or(why);
    }
    if answered == 0 {
        return Err(DrillError::NothingAnswered(failure.unwrap_or_default()));
    }
    // Requests in flight at the end were answered, too, so their time counts.
    let seconds = started.elapsed().as_secs_f64();
    Ok(MeasuredCapacity {
        asks: prompts[0].chars().rev().take(48).collect::<Vec<_>>().into_iter().rev().collect(),
        max_tokens,
        requests_per_second: answered as f64 / seconds,
        tokens_per_second: tokens as f64 / seconds,
        prompts,
    })
}
