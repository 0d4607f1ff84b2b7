//! An honest tenant. The due times of its requests are fixed before the first is
//! sent, with the same rate in all three phases. Every latency counts from the due
//! time.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::task::JoinSet;

use super::{Ground, Live};
use crate::client::{Protocol, Target};
use crate::outcome::{End, Outcome, Question};
use crate::plan::Random;
use crate::run::chat_body;
use crate::slot::{DueRequest, Slot, send};

/// A request of an honest tenant.
#[derive(Clone, Debug)]
pub struct HonestSample {
    /// The tenant.
    pub tenant: Arc<str>,
    /// The due time in seconds from the start.
    pub due: f64,
    /// The measurements.
    pub outcome: Outcome,
}

/// Time that an answer may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Requests of one tenant in flight at most.
const MOST_UNDER_WAY: usize = 1_024;

/// The sender of one honest tenant.
pub(super) struct HonestSender {
    tenant: Arc<str>,
    slots: Vec<Arc<Slot>>,
    /// Set for newcomers: each request has a connection of its own.
    newcomer: Option<Target>,
    due: Vec<(Duration, usize, bool)>,
    questions: Vec<[Question; 2]>,
}

impl HonestSender {
    pub(super) fn new(
        ground: &Ground,
        group: usize,
        tenant: &str,
        target: Target,
        rate: f64,
    ) -> Self {
        let scenario = &ground.scenario;
        let honest = &scenario.honest[group];
        // Each tenant has its own due times, the same in every run with the seed.
        let mut random = Random(scenario.seed ^ tenant_seed(tenant));
        let prompts = honest.prompts();
        let (mut at, mut due) = (0.0, Vec::new());
        loop {
            at += honest.arrivals.gap(rate, &mut random);
            if at >= scenario.whole().as_secs_f64() {
                break;
            }
            let streams = random.below(100) < usize::from(honest.stream);
            due.push((Duration::from_secs_f64(at), due.len() % prompts.len(), streams));
        }
        let question = |prompt: &String, stream| {
            let most = honest.ask.most_tokens();
            Question::chat(chat_body(&scenario.model, prompt, most, stream), stream)
        };
        let slot = |_| Arc::new(Slot::new(target.clone(), Protocol::Http2));
        Self {
            tenant: tenant.into(),
            slots: (0..honest.connections.max(1)).map(slot).collect(),
            due,
            questions: prompts.iter().map(|p| [question(p, false), question(p, true)]).collect(),
            newcomer: honest.newcomers.then_some(target),
        }
    }

    /// Sends every request and waits for the answers.
    #[expect(
        clippy::expect_used,
        reason = "a panic of a sender is a defect of the load test, not a result of the server"
    )]
    pub(super) async fn run(self, ground: Arc<Ground>) -> Vec<HonestSample> {
        let Self { tenant, slots, newcomer, due, questions } = self;
        let mut under_way: JoinSet<HonestSample> = JoinSet::new();
        let mut samples = Vec::with_capacity(due.len());
        for (number, (after, prompt, stream)) in due.into_iter().enumerate() {
            let at = ground.started + after;
            tokio::select! {
                () = tokio::time::sleep_until(at) => {}
                () = ground.stop.cancelled() => return samples,
            }
            while let Some(ended) = under_way.try_join_next() {
                samples.push(ended.expect("a sender panicked"));
            }
            Live::count(&ground.live.honest_due);
            let (tenant, due) = (Arc::clone(&tenant), after.as_secs_f64());
            if under_way.len() >= MOST_UNDER_WAY {
                let outcome = Outcome::ended(0, End::NotSent, Duration::ZERO);
                samples.push(HonestSample { tenant, due, outcome });
                continue;
            }
            let slot = match &newcomer {
                Some(target) => Arc::new(newcomer_slot(&ground, target, number)),
                None => Arc::clone(&slots[number % slots.len()]),
            };
            let question = questions[prompt][usize::from(stream)].clone();
            let ground = Arc::clone(&ground);
            under_way.spawn(async move {
                let outcome = {
                    let timeout = PATIENCE;
                    send(&slot, DueRequest { tenant: 0, question, at, timeout }).await
                };
                note(&ground.live, &outcome);
                HonestSample { tenant, due, outcome }
            });
        }
        while let Some(ended) = under_way.join_next().await {
            samples.push(ended.expect("a sender panicked"));
        }
        samples
    }
}

/// Returns a slot for one request of a newcomer, from an address of its own if the
/// gateway is on this machine.
fn newcomer_slot(ground: &Ground, target: &Target, number: usize) -> Slot {
    let target = match ground.may_choose_source {
        true => {
            // Attackers use the networks 127.1 to 127.250.
            let [high, low] = (number as u16).to_be_bytes();
            target.from_source(IpAddr::V4(Ipv4Addr::new(127, 251, high, low)))
        }
        false => target.clone(),
    };
    Slot::new(target, Protocol::Http2)
}

fn note(live: &Live, outcome: &Outcome) {
    if outcome.end == End::Done {
        Live::count(&live.honest_answered);
        if let Some(first) = outcome.first_token {
            live.last_first_token.store(first.as_micros() as u64, Ordering::Relaxed);
        }
    }
}

/// Returns the FNV-1a hash of the name, which gives each tenant another seed.
fn tenant_seed(tenant: &str) -> u64 {
    let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    tenant.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}
