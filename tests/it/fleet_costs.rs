//! The cost of sharing limits: the gateway's processor time for a request and the time to an answer,
//! beside a gateway that shares nothing. These are figures, and no test of speed.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;
use tollgate_rates::testing::TestRedis;
use tollgate_sql::testing::TestServer;

use crate::fleet::{ALONE, Fleet, INSTANT_DEVICE, Load, failures, figures, one_token};
use crate::postgres::{Database, apart};
use crate::support::{self, Tollgate};

/// Limits that all leave room.
fn plan() -> String {
    format!(
        "[plans.open]\nrequests_per_minute = 1_000_000\ntokens_per_minute = 100_000_000\n\
         concurrent = 256\nqueued = 256\ndevice_time_per_day = \"20h\"\n\
         [tenants.acme]\nplan = \"open\"\n{INSTANT_DEVICE}"
    )
}

/// Returns the binary to measure: an optimized one, if `TOLLGATE_BINARY` names one.
fn program() -> PathBuf {
    std::env::var_os("TOLLGATE_BINARY").map_or_else(|| support::binary().into(), PathBuf::from)
}

/// Returns the processor time of a process, s.
fn processor_time(gateway: &Tollgate) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", gateway.pid())).expect("it runs");
    // The name may have spaces, and ends with the last bracket.
    let fields = stat.rsplit(')').next().expect("a name").split_whitespace();
    let ticks: u64 =
        fields.skip(11).take(2).map(|field| field.parse::<u64>().expect("ticks")).sum();
    // Linux counts hundredths of a second.
    ticks as f64 / 100.0
}

/// The figures of one round.
struct Round {
    /// Processor time of a request, us.
    cost: f64,
    /// The times to an answer at the 50th and 99th percentile, ms.
    times: (f64, f64),
    per_second: f64,
}

async fn measure(gateway: &Tollgate, load: Load) -> Round {
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (from, before) = (load.now(), processor_time(gateway));
    tokio::time::sleep(Duration::from_secs(5)).await;
    let (to, after) = (load.now(), processor_time(gateway));
    let (answers, _) = load.end().await;
    assert_eq!(failures(&answers).len(), 0, "{:#?}", failures(&answers).first());
    let within = answers.iter().filter(|answer| (from..to).contains(&answer.answered));
    let mut times: Vec<f64> =
        within.map(|answer| (answer.answered - answer.sent).as_secs_f64() * 1e3).collect();
    times.sort_by(f64::total_cmp);
    let at = |percent: usize| times[times.len() * percent / 100];
    Round {
        cost: (after - before) * 1e6 / times.len() as f64,
        times: (at(50), at(99)),
        per_second: times.len() as f64 / (to - from).as_secs_f64(),
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn shown(rounds: &[Round]) -> serde_json::Value {
    let of = |value: fn(&Round) -> f64| median(rounds.iter().map(value).collect());
    json!({
        "processor_us_per_request": of(|round| round.cost), "p50_ms": of(|round| round.times.0),
        "p99_ms": of(|round| round.times.1), "per_second": of(|round| round.per_second),
    })
}

mod long {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    #[ignore = "takes two minutes"]
    async fn sharing_is_measured_beside_a_gateway_alone() {
        let _alone = ALONE.lock().await;
        let Some(server) = apart(TestServer::shared) else { return };
        let Some(redis) = TestRedis::start() else { return };
        let database = Database::new(&server);
        let program = program();
        let fleet = Fleet::start_by(&database, &redis, &plan(), 3, &program).await;
        let alone = Tollgate::start_on(&database.path("alone"), &plan(), Command::new(&program));
        let target = Arc::new(Mutex::new(alone.target(&alone.key("acme", &[]))));
        let mut figures_of = json!({ "binary": program.display().to_string() });
        // Saturated by four clients, and about a third of that.
        for (name, clients, pause) in
            [("saturated", 4, Duration::ZERO), ("third", 2, Duration::from_millis(4))]
        {
            let (mut shared, mut embedded) = (Vec::new(), Vec::new());
            // In turn, so that other work on the machine disturbs both.
            for _ in 0..5 {
                let load = Load::begin(&fleet.targets()[..1], &[clients], &one_token(), pause);
                shared.push(measure(&fleet.all[0], load).await);
                let load = Load::begin(&[Arc::clone(&target)], &[clients], &one_token(), pause);
                embedded.push(measure(&alone, load).await);
            }
            figures_of[name] = json!({ "shared": shown(&shared), "alone": shown(&embedded) });
        }
        figures("cost_of_sharing", &figures_of);
    }
}
