//! Batch work beside interactive work: the figures of requests that run in the batch tier,
//! and of the same requests as interactive ones, which must break the bounds.

use std::time::Duration;

use tollgate_domain::Tier;
use tollgate_engine::SchedulePolicy::{self, Fair, FirstComeFirstServed};

use crate::play::{Played, Until, play};
use crate::table::{
    ATTACK_LASTS, Bound, Row, SEEDS, check_sums, first_token, row, served, victims, worst,
};
use crate::workload::{Sender, Size, Workload};

/// Requests of the batch tier a second: more than the device answers, so that some wait.
const RATE: f64 = 20.0;
/// The size of these requests.
const SIZE: Size = Size::of(1_000, 16);
/// The bound of the time between tokens. A step is at most 1.23 times as long. Answers then
/// last longer, so that more of them overlap and each step has more interactive work.
const BETWEEN_TOKENS: f64 = 1.25;
/// The longest predicted time of a step, in seconds.
const STEP: f64 = 0.08;

/// Lines of a whole input file, all of which wait in the engine at once.
const FILE: (u32, Size) = (50_000, Size::of(500, 8));
/// Lines of the largest cost: one of them fills most of the cache.
const LARGEST: (u32, Size) = (200, Size::of(6_000, 2_000));
/// Costly lines of which the cache holds several.
const COSTLY: (u32, Size) = (1_000, Size::of(2_000, 500));
/// The lines of the tenants beside them.
const SMALL: (u32, Size) = (20_000, Size::of(256, 64));
/// The time in which shares of the batch tier are compared.
const SHARES_LAST: Duration = Duration::from_secs(600);

/// Returns the rows of a file of 50,000 lines beside interactive requests: of all victims, and of
/// one of them alone.
pub(crate) fn file() -> Vec<Row> {
    let cases = [("four clients", usize::MAX), ("one client", 1)];
    cases.into_iter().flat_map(|(name, clients)| beside_file(name, clients)).collect()
}

fn beside_file(name: &str, clients: usize) -> [Row; 3] {
    let (mut added, mut between, mut control) = (Vec::new(), Vec::new(), Vec::new());
    for seed in SEEDS.take(3) {
        let [alone, batch, interactive] = [None, Some(Tier::Batch), Some(Tier::Interactive)]
            .map(|tier| Victims::beside_file(clients, tier, seed));
        added.push(batch.first_token - alone.first_token);
        between.push(batch.between_tokens / alone.between_tokens);
        control.push(interactive.between_tokens / alone.between_tokens);
    }
    let name = format!("50,000 lines, {name}");
    [
        row(format!("{name}: added to first token p99"), worst(&added), "s", Bound::AtMost(STEP)),
        row(
            format!("{name}: time between tokens p99, over alone"),
            worst(&between),
            "",
            Bound::AtMost(BETWEEN_TOKENS),
        ),
        row(
            format!("{name}: control, the lines as interactive"),
            least(&control),
            "",
            Bound::Above(2.0),
        ),
    ]
}

/// Returns the rows of shares of the batch tier beside a tenant with costly lines.
pub(crate) fn shares() -> Vec<Row> {
    let costly = parts(COSTLY, Fair);
    let difference = costly.iter().map(|part| 100.0 * (part - 1.0).abs()).fold(0.0, f64::max);
    // A line that fills most of the cache may wait, but nobody waits for it.
    let missing = |policy| {
        let [_, others @ ..] = parts(LARGEST, policy);
        100.0 * (1.0 - least(&others))
    };
    vec![
        row(
            "lines of 2,000/500: difference of any tenant's batch share",
            difference,
            "%",
            Bound::AtMost(2.0),
        ),
        row(
            "lines of 6,000/2,000: missing from others' batch shares",
            missing(Fair),
            "%",
            Bound::AtMost(2.0),
        ),
        row(
            "control: the same, first come, first served",
            missing(FirstComeFirstServed),
            "%",
            Bound::Above(20.0),
        ),
    ]
}

/// Returns the device time of a tenant with these lines and of two with small lines, over a third
/// of the whole. The costly lines come first.
fn parts(lines: (u32, Size), policy: SchedulePolicy) -> [f64; 3] {
    // Each file is put before the earlier ones.
    let workload = Workload::new(&[], SHARES_LAST, 0)
        .with_file("small-1", Tier::Batch, SMALL)
        .with_file("small-2", Tier::Batch, SMALL)
        .with_file("costly", Tier::Batch, lines);
    let played = play(&workload, policy, Until::TimeIsUp);
    check_sums(&played);
    let served = served(&played, Duration::ZERO, SHARES_LAST);
    let part = served.iter().sum::<f64>() / 3.0;
    [served[2] / part, served[0] / part, served[1] / part]
}

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
        Self::of(&Workload::new(&senders, ATTACK_LASTS, seed))
    }

    /// Runs so many victims beside a file whose lines are in `tier`; alone without a tier.
    fn beside_file(clients: usize, tier: Option<Tier>, seed: u64) -> Self {
        let clients: Vec<Sender> = victims().into_iter().take(clients).collect();
        let workload = Workload::new(&clients, ATTACK_LASTS, seed);
        Self::of(&match tier {
            Some(tier) => workload.with_file("lines", tier, FILE),
            None => workload,
        })
    }

    fn of(workload: &Workload) -> Self {
        let played = play(workload, Fair, Until::VictimsServed);
        check_sums(&played);
        Self {
            first_token: first_token(workload, &played, 0.99),
            between_tokens: between_tokens(workload, &played),
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
