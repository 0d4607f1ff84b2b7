//! Batch work beside interactive work: the figures of requests that run in the batch tier,
//! and of the same requests as interactive ones, which must break the bounds.

use tollgate_domain::Tier;
use tollgate_engine::SchedulePolicy::Fair;

use crate::play::{Played, Until, play};
use crate::table::{ATTACK_LASTS, Bound, Row, SEEDS, check_sums, first_token, row, victims, worst};
use crate::workload::{Sender, Size, Workload};

/// Requests of the batch tier a second: more than the device answers, so that some wait.
const RATE: f64 = 20.0;
/// The size of these requests.
const SIZE: Size = Size::of(1_000, 16);
/// The bound of the time between tokens. A step is at most 1.25 times as long. Answers then
/// last longer, so that more of them overlap and each step has more interactive work.
const BETWEEN_TOKENS: f64 = 1.3;
/// The longest predicted time of a step, in seconds.
const STEP: f64 = 0.08;

/// Returns the rows of batch work.
pub(crate) fn rows() -> Vec<Row> {
    let (mut added, mut between, mut control) = (Vec::new(), Vec::new(), Vec::new());
    let mut done = Vec::new();
    for seed in SEEDS.take(3) {
        let [alone, batch, interactive] = [None, Some(Tier::Batch), Some(Tier::Interactive)]
            .map(|tier| Victims::beside(tier, seed));
        added.push(batch.first_token - alone.first_token);
        between.push(batch.between_tokens / alone.between_tokens);
        control.push(interactive.between_tokens / alone.between_tokens);
        done.push(batch.tokens_per_second / interactive.tokens_per_second);
    }
    let name = "batch tier, 20/s of 1,000/16";
    vec![
        row(
            format!("{name}: added to the victims' first token p99"),
            worst(&added),
            "s",
            Bound::AtMost(STEP),
        ),
        row(
            format!("{name}: victims' time between tokens p99, over alone"),
            worst(&between),
            "",
            Bound::AtMost(BETWEEN_TOKENS),
        ),
        row("control: the same as interactive requests", least(&control), "", Bound::Above(2.0)),
        row(
            format!("{name}: tokens/s over the same as interactive"),
            least(&done),
            "",
            Bound::AtLeast(0.35),
        ),
    ]
}

/// The figures of one run.
struct Victims {
    /// Wait for the first token, p99, in seconds.
    first_token: f64,
    /// Mean time between the tokens of an answer, p99 over the answers, in seconds.
    between_tokens: f64,
    /// Tokens of all requests a second.
    tokens_per_second: f64,
}

impl Victims {
    /// Runs the victims beside requests of `tier`; alone without a tier.
    fn beside(tier: Option<Tier>, seed: u64) -> Self {
        let mut senders = victims();
        senders.extend(tier.map(|tier| Sender { tier, ..Sender::new("lines", RATE, SIZE) }));
        let workload = Workload::new(&senders, ATTACK_LASTS, seed);
        let played = play(&workload, Fair, Until::VictimsServed);
        check_sums(&played);
        Self {
            first_token: first_token(&workload, &played, 0.99),
            between_tokens: between_tokens(&workload, &played),
            tokens_per_second: played.tokens_per_second(),
        }
    }
}

/// Returns the mean time between the tokens of a victim's answer, p99 over the answers.
fn between_tokens(workload: &Workload, played: &Played) -> f64 {
    let victims = played.requests.iter().filter(|seen| workload.tenants[seen.ask.tenant].is_victim);
    let gaps = victims.filter(|seen| seen.tokens > 1).filter_map(|seen| {
        let lasts = seen.last_token?.saturating_sub(seen.first_token?);
        Some(lasts.as_secs_f64() / f64::from(seen.tokens - 1))
    });
    let mut gaps: Vec<f64> = gaps.collect();
    gaps.sort_by(f64::total_cmp);
    gaps[(gaps.len() as f64 * 0.99).ceil() as usize - 1]
}

fn least(figures: &[f64]) -> f64 {
    figures.iter().copied().fold(f64::INFINITY, f64::min)
}
