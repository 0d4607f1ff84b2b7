//! An attacker that teaches the gateway to expect short answers, and then asks for
//! long ones, all at once.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use super::attack::Attack;
use super::tally;
use crate::client::{Protocol, Target};
use crate::clock;
use crate::outcome::Question;
use crate::run::chat_body;
use crate::slot::{DueRequest, Slot, send};

/// Answers of one token before the long ones. The gateway's mean is over about the
/// last twenty answers.
const LESSONS: u32 = 30;

/// Time that one lesson may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Sends the lessons one after the other, then the long requests together.
pub(super) async fn run(attack: Attack, targets: Vec<Target>) {
    let slots: Vec<Arc<Slot>> =
        targets.into_iter().map(|to| Arc::new(Slot::new(to, Protocol::Http2))).collect();
    let attacker = &attack.attacker;
    let prompt = attacker.prompts().swap_remove(0);
    let question = |tokens| {
        let body = chat_body(&attack.ground.scenario.model, &prompt, tokens, false);
        Question::chat(body, false)
    };
    for _ in 0..LESSONS {
        let (question, at) = (question(1), clock::now());
        let lesson = DueRequest { tenant: 0, question, at, timeout: PATIENCE };
        let outcome = send(&slots[0], lesson).await;
        attack.count(&format!("lesson {}", tally::outcome(&outcome.end)));
    }
    let mut under_way = JoinSet::new();
    for number in 0..attacker.streams as usize {
        let slot = Arc::clone(&slots[number % slots.len()]);
        let (question, at) = (question(attacker.ask.max_tokens.unwrap_or(400)), clock::now());
        let attack = attack.clone();
        under_way.spawn(async move {
            let timeout = attack.end.saturating_duration_since(at);
            let outcome = send(&slot, DueRequest { tenant: 0, question, at, timeout }).await;
            attack.count(&tally::outcome(&outcome.end));
        });
    }
    while under_way.join_next().await.is_some() {}
}
