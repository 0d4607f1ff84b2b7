//! Budgets over the real process: a budget is never exceeded, also after a crash, and counts
//! what the statement counts.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{self, Tollgate, get, post};

/// A budget for about ten answers of forty tokens.
const BUDGETS: &str = r#"
[plans.small]
concurrent = 64
budget_per_month = { EUR = "1" }
[plans.open]
concurrent = 64
[pools.all]
plan = "small"

[tenants.acme]
plan = "small"
[tenants.open]
plan = "open"

[prices.standard]
from = 2026-01-01
currency = "EUR"
per_device_second = "1000"

[prices.demo]
from = 2026-01-01
model = "tollgate-demo"
currency = "EUR"
per_device_second = "0.3"
per_million_prompt_tokens = "1000"
per_million_completion_tokens = "2000"
"#;

const BUDGET: u64 = 1_000_000_000;

fn ask() -> Value {
    json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": 40,
        "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
    })
}

/// Sends rounds of five requests until a whole round is refused. Returns the refusal and the
/// number of answers.
async fn spend_out(gateway: &Tollgate, key: &str) -> (Value, usize) {
    let connection = gateway.connect(key).await;
    let mut answers = 0;
    for _ in 0..200 {
        let body = ask();
        let one = || post(&connection, "/v1/chat/completions", &body);
        let round: [(u16, Value); 5] = tokio::join!(one(), one(), one(), one(), one()).into();
        answers += round.iter().filter(|(status, _)| *status == 200).count();
        for (status, body) in &round {
            assert!([200, 429].contains(status), "{body}");
        }
        if let [(429, refusal), ..] = &round
            && round.iter().all(|(status, _)| *status == 429)
        {
            return (refusal.clone(), answers);
        }
    }
    panic!("the budget was never spent: {answers} answers");
}

/// Returns the nano-units of the tenant's statement, once the ledger has every answer.
async fn billed(gateway: &Tollgate, tenant: &str, answers: usize) -> u64 {
    let config = gateway.config();
    let config = config.to_str().expect("UTF-8");
    for _ in 0..200 {
        let printed = gateway.command(&["usage", "--tenant", tenant, "--json", "--by", "day"]);
        let days: Value = serde_json::from_str(&printed).expect("JSON");
        let requests = days["rows"][0]["requests"].as_u64().unwrap_or(0);
        if requests as usize >= answers {
            let month = &days["rows"][0]["day"].as_str().expect("a day")[..7];
            let asked = ["statement", "--tenant", tenant, "--month", month, "--json"];
            let printed = gateway.command(&[&asked[..], &["--config", config]].concat());
            let statement: Value = serde_json::from_str(&printed).expect("JSON");
            assert_eq!(statement["lines"].as_array().map(Vec::len), Some(1), "{statement}");
            let amount = statement["total"]["amount"].as_str().expect("text").replace('.', "");
            return amount.parse().expect("a number");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the ledger never had {answers} answers");
}

/// Returns the used nano-units of the tenant's budget.
async fn used(gateway: &Tollgate, key: &str) -> u64 {
    let (_, limits) = get(&gateway.connect(key).await, "/v1/limits").await;
    let data = limits["data"].as_array().expect("a list");
    let budget = data.iter().find(|it| it["limit"] == "budget_per_month").expect("a budget");
    assert_eq!((&budget["unit"], &budget["currency"]), (&json!("nano_units"), &json!("EUR")));
    assert_eq!(budget["value"].as_u64(), Some(BUDGET));
    budget["used"].as_u64().expect("a number")
}

/// Returns the metric of reached thresholds, once the last one is counted.
async fn thresholds(gateway: &Tollgate) -> Vec<String> {
    let connection = gateway.connect_admin().await;
    for _ in 0..200 {
        let response = connection.get("/metrics").await.expect("answers");
        let text = support::rest(response).await;
        let reached = text.lines().filter(|line| line.starts_with("tollgate_caps_reached_total{"));
        let reached: Vec<String> = reached.map(str::to_owned).collect();
        if reached.iter().any(|line| line.contains("percent=\"100\"")) {
            return reached;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("no cap was reported as spent");
}

#[tokio::test]
async fn budget_holds_under_load_and_crash() {
    support::stay_within_a_day().await;
    let gateway = Tollgate::with_config(BUDGETS);
    let key = gateway.key("acme", &[]);
    let (refusal, answers) = spend_out(&gateway, &key).await;
    assert_eq!(refusal["error"]["code"], "insufficient_quota", "{refusal}");
    let message = refusal["error"]["message"].as_str().expect("a message");
    assert!(message.contains("1 EUR a month (UTC) for tenant acme"), "{message}");
    assert!(answers >= 2, "{answers} answers");
    let before = billed(&gateway, "acme", answers).await;
    assert!(before > BUDGET / 2 && before <= BUDGET, "{before} of {BUDGET}");
    // The statement rounds down, and the budget up.
    let counted = used(&gateway, &key).await;
    assert!(counted - before <= 1, "{counted} counted, {before} billed");

    let reached = thresholds(&gateway).await;
    let count = |percent| {
        let name = format!("{{limit=\"budget_per_month\",percent=\"{percent}\"}}");
        reached.iter().filter(|line| line.contains(&name)).count()
    };
    assert_eq!((count(80), count(100)), (1, 1), "{reached:?}");
    assert!(reached.iter().all(|line| line.ends_with(" 1")), "{reached:?}");

    let mut gateway = gateway;
    gateway.kill();
    let gateway = gateway.restart();
    assert_eq!(used(&gateway, &key).await, counted, "what the ledger has");
    let (_, more) = spend_out(&gateway, &key).await;
    let after = billed(&gateway, "acme", answers + more).await;
    assert!(after <= BUDGET, "{after} of {BUDGET} after a crash");

    // The control: without a budget the same requests are served, and shown in no budget.
    let open = gateway.connect(&gateway.key("open", &[])).await;
    assert_eq!(post(&open, "/v1/chat/completions", &ask()).await.0, 200);
    let shown = gateway.command(&[
        "tenants",
        "show",
        "acme",
        "--config",
        gateway.config().to_str().expect("UTF-8"),
    ]);
    assert!(shown.contains("budget_per_month") && shown.contains("1.000000000 EUR"), "{shown}");
}

#[tokio::test]
async fn budget_of_key_binds_only_its_key() {
    support::stay_within_a_day().await;
    let gateway = Tollgate::with_config(BUDGETS);
    let limited = gateway.key("open", &["--plan", "small"]);
    let free = gateway.key("open", &[]);
    let (refusal, _) = spend_out(&gateway, &limited).await;
    let message = refusal["error"]["message"].as_str().expect("a message");
    assert!(message.contains("1 EUR a month (UTC) for key "), "{message}");
    let connection = gateway.connect(&free).await;
    assert_eq!(post(&connection, "/v1/chat/completions", &ask()).await.0, 200);
}
