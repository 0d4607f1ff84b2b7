//! Bodies and headers of every error.

use http_body_util::BodyExt as _;
use tollgate_admission::{CapFigures, Figures, Limit, RateFigures};
use tollgate_domain::{DeviceClass, DeviceNanos, PoolName, Rate, RequestId, TenantId};

use super::*;

#[test]
fn durations_have_the_form_of_openai() {
    for (millis, expected) in [
        (0, "0s"),
        (12, "12ms"),
        (1_000, "1s"),
        (1_500, "1.5s"),
        (8_640, "8.64s"),
        (360_000, "6m0s"),
        (3_600_000, "1h0m0s"),
    ] {
        assert_eq!(duration_text(Duration::from_millis(millis)).to_string(), expected);
    }
    assert_eq!(duration_text(Duration::from_nanos(1)).to_string(), "1ms", "rounded up");
}

fn refusal(limit: Limit, value: u64) -> LimitRefusal {
    LimitRefusal {
        limit,
        scope: Scope::Tenant(TenantId::new("acme").unwrap()),
        class: limit.is_device_time().then(DeviceClass::cpu),
        currency: (limit == Limit::BudgetPerMonth).then(|| "EUR".parse().unwrap()),
        value,
        largest: value,
        asked: 1,
        remaining: 0,
        retry_after: Some(Duration::from_micros(1_234_567)),
        resets: None,
        permanent: false,
        figures: Figures::default(),
    }
}

fn never(limit: Limit, value: u64, asked: u64) -> LimitRefusal {
    LimitRefusal { asked, retry_after: None, permanent: true, ..refusal(limit, value) }
}

fn penalty(offence: Offence) -> ApiError {
    ApiError::Penalty { offence, retry_after: Duration::from_millis(12_500) }
}

#[allow(clippy::too_many_lines, reason = "one table of cases")]
fn every_error() -> Vec<ApiError> {
    let seconds = |seconds: u64| seconds * 1_000_000_000;
    let cap = |limit, wait| LimitRefusal {
        retry_after: Some(Duration::from_secs(wait)),
        permanent: true,
        ..refusal(limit, seconds(3_600))
    };
    let figures = Figures {
        requests: Some(RateFigures {
            rate: Rate::per_minute(600),
            remaining: 0,
            reset: Duration::from_millis(59_999),
        }),
        tokens: Some(RateFigures {
            rate: Rate::per_minute(200_000),
            remaining: 1_234,
            reset: Duration::from_micros(11_500),
        }),
        device_time: Some(RateFigures {
            rate: Rate::per_minute(seconds(60)),
            remaining: 1_999_999,
            reset: Duration::from_micros(60_000_001),
        }),
        grammar_time: Some(RateFigures {
            rate: Rate::per_minute(seconds(2)),
            remaining: 980_000_000,
            reset: Duration::from_millis(600),
        }),
        day: Some(CapFigures {
            cap: DeviceNanos::from_secs(3_600),
            remaining: DeviceNanos::ZERO,
            reset: Duration::from_millis(3_600_500),
        }),
        month: Some(CapFigures {
            cap: DeviceNanos::from_secs(36_000),
            remaining: DeviceNanos::from_secs(1),
            reset: Duration::from_secs(864_000),
        }),
    };
    vec![
        ApiError::MissingCredential,
        ApiError::InvalidCredential,
        ApiError::SourceNotAllowed,
        ApiError::TenantNotServed,
        ApiError::KeyRevoked,
        ApiError::Permission { message: "This key may not use 'usage'.".into() },
        ApiError::ModelNotFound { model: "gpt-\u{7}5".into() },
        ApiError::ModelNotFound { model: "x".repeat(1_000) },
        ApiError::NotFound { what: "request", id: "req-1".into() },
        ApiError::UnknownRoute {
            method: http::Method::GET,
            path: "/v1/nothing".into(),
            hint: None,
        },
        ApiError::UnknownRoute {
            method: http::Method::POST,
            path: "/chat/completions".into(),
            hint: Some("The base URL must end in /v1."),
        },
        ApiError::MethodNotAllowed { method: http::Method::PUT, path: "/v1/models".into() },
        ApiError::Idempotency(IdempotencyRefusal::OtherBody),
        ApiError::Idempotency(IdempotencyRefusal::Charged { request: RequestId::from_random(7) }),
        ApiError::Idempotency(IdempotencyRefusal::Unsettled { request: RequestId::from_random(7) }),
        ApiError::Idempotency(IdempotencyRefusal::TooManyKeys { limit: 100_000 }),
        ApiError::invalid("messages[2].content", "Must be text."),
        ApiError::missing("messages"),
        ApiError::unsupported("tools", "Tools are not supported."),
        ApiError::malformed("The body is not JSON."),
        ApiError::ContextLength { param: "messages", limit: 512, prompt: 600, completion: None },
        ApiError::ContextLength {
            param: "messages",
            limit: 512,
            prompt: 500,
            completion: Some(50),
        },
        ApiError::BodyTooSlow,
        ApiError::BodyTooLarge { limit: 2_097_152 },
        ApiError::BodyMemory { limit: 33_554_432 },
        ApiError::UnsupportedEncoding { encoding: "zstd".into() },
        ApiError::SourceLimit { per_second: 20, retry_after: Duration::from_millis(50) },
        ApiError::ConnectionLimit { most: 512, owner: "key tg1".to_owned() },
        ApiError::LiveStreams { most: 16 },
        ApiError::ReadLimit { per_second: 50, retry_after: Duration::from_secs(1) },
        penalty(Offence::Refusals),
        penalty(Offence::FailedAuthentication),
        penalty(Offence::Cancels),
        ApiError::from(LimitRefusal { figures, ..refusal(Limit::Requests, 600) }),
        ApiError::from(refusal(Limit::Tokens, 200_000)),
        ApiError::from(refusal(Limit::GrammarTime, seconds(2))),
        ApiError::from(LimitRefusal {
            scope: Scope::Pool(PoolName::new("trial").unwrap()),
            ..refusal(Limit::DeviceTime, seconds(60))
        }),
        ApiError::from(LimitRefusal {
            retry_after: Some(Duration::from_secs(61)),
            ..refusal(Limit::DeviceTime, seconds(60))
        }),
        ApiError::from(LimitRefusal { retry_after: None, ..refusal(Limit::Concurrent, 8) }),
        ApiError::from(LimitRefusal { retry_after: None, ..refusal(Limit::Queued, 64) }),
        ApiError::from(never(Limit::LargestJob, seconds(20), seconds(31))),
        ApiError::from(never(Limit::Tokens, 1_000, 1_500)),
        ApiError::from(cap(Limit::DeviceTimePerDay, 14_400)),
        ApiError::from(cap(Limit::DeviceTimePerMonth, 864_000)),
        ApiError::from(cap(Limit::BudgetPerMonth, 864_000)),
        ApiError::from(refusal(Limit::Capacity, 65_536)),
        ApiError::Overloaded {
            full: FullQueue::Workers,
            retry_after: Some(Duration::from_millis(2_500)),
        },
        ApiError::Overloaded { full: FullQueue::Tokenizing, retry_after: None },
        ApiError::Overloaded { full: FullQueue::BodyMemory, retry_after: None },
        ApiError::Draining,
        ApiError::LedgerUnavailable,
        ApiError::NoWorker { model: "tollgate-demo".into() },
        ApiError::DeadlineExceeded { deadline: Duration::from_secs(600) },
        ApiError::Internal,
        ApiError::WorkerLost { charged: true },
        ApiError::WorkerLost { charged: false },
    ]
}

#[test]
fn cap_below_one_request_names_max_tokens() {
    let text = |refusal| ApiError::from(refusal).message().into_owned();
    let day = text(never(Limit::DeviceTimePerDay, 20_000_000, 31_000_000));
    assert!(day.starts_with("This request may need 31"), "{day}");
    assert!(day.contains("Lower 'max_tokens'") && !day.contains("Try again"), "{day}");
    let currency = Some("EUR".parse().expect("a currency"));
    let budget = never(Limit::BudgetPerMonth, 5_000_000_000, 6_000_000_000);
    let budget = text(LimitRefusal { currency, ..budget });
    assert!(budget.contains("6 EUR, which is more than the whole limit of 5 EUR"), "{budget}");
}

async fn rendered(error: ApiError) -> String {
    let response = error.clone().into_response();
    let (parts, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let mut headers: Vec<String> = parts
        .headers
        .iter()
        .filter(|(name, _)| *name != header::CONTENT_TYPE && *name != header::CACHE_CONTROL)
        .map(|(name, value)| format!("  {name}: {}\n", value.to_str().unwrap()))
        .collect();
    headers.sort();
    format!(
        "{} {}\n{}  {}\n",
        parts.status.as_u16(),
        error.kind().0,
        headers.concat(),
        String::from_utf8(body.to_vec()).unwrap()
    )
}

#[tokio::test]
async fn errors_match_their_snapshot() {
    let mut all = String::new();
    for error in every_error() {
        all.push_str(&rendered(error).await);
    }
    insta::assert_snapshot!("refusals", all);
}

#[tokio::test]
async fn error_bodies_have_four_keys() {
    for error in every_error() {
        let body: serde_json::Value = serde_json::from_slice(&error.envelope().to_json()).unwrap();
        let keys: Vec<_> = body["error"].as_object().unwrap().keys().collect();
        assert_eq!(keys.len(), 4, "{error:?}");
        for key in ["message", "type", "param", "code"] {
            assert!(body["error"].get(key).is_some(), "{key} in {error:?}");
        }
        assert!(!body["error"]["message"].as_str().unwrap().contains(char::is_control));
    }
}

/// Readers of `docs/api.md` look an error up by its status and code.
#[test]
fn api_page_lists_every_error() {
    let page = include_str!("../../../docs/api.md");
    for error in every_error() {
        let body: serde_json::Value = serde_json::from_slice(&error.envelope().to_json()).unwrap();
        let code = body["error"]["code"].as_str().unwrap_or("null");
        let row = format!("| {} | `{code}` |", error.status().as_u16());
        let kind = format!("`{}`", error.kind().0);
        assert!(
            page.lines().any(|line| line.starts_with(&row) && line.contains(&kind)),
            "docs/api.md has no row that begins with {row} and names the kind {kind}"
        );
    }
}

#[test]
fn rejected_credentials_share_one_body() {
    // The body must not tell what is wrong with a credential.
    let body = ApiError::InvalidCredential.envelope().to_json();
    assert_eq!(
        String::from_utf8(body).unwrap(),
        r#"{"error":{"message":"Incorrect API key provided.","type":"invalid_request_error","param":null,"code":"invalid_api_key"}}"#
    );
}
