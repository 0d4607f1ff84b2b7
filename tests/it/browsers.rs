//! Web pages that call the API: the headers that a browser asks for, as curl sees them.

use std::fs;
use std::process::Command;

use serde_json::json;

use crate::support::{Tollgate, program, read};

/// The origin of a page that the tests allow.
const PAGE: &str = "https://app.example";

const CORS: &str = "[gateway.cors]\norigins = [\"https://app.example\"]\n";

/// One key may send two requests a minute.
const PLAN: &str = "[plans.two]\nrequests_per_minute = { limit = 2, burst = 2 }\n\
                    [tenants.acme]\nplan = \"two\"\n";

/// A response's status and headers, with names in lower case.
#[derive(Debug)]
struct Head {
    status: u16,
    headers: Vec<(String, String)>,
}

impl Head {
    fn get(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }
}

/// Sends one request with curl.
fn ask(gateway: &Tollgate, method: &str, url: &str, headers: &[&str], body: Option<&str>) -> Head {
    let mut curl = Command::new("curl");
    curl.args(["--disable", "--silent", "--show-error", "--max-time", "20", "--http1.1"]);
    curl.args(["--dump-header", "-", "--output", "/dev/null", "--request", method]);
    curl.arg("--cacert").arg(gateway.ca()).arg(url);
    for header in headers {
        curl.args(["--header", header]);
    }
    if let Some(body) = body {
        curl.args(["--data-binary", body]);
    }
    let output = curl.output().expect("curl");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "curl: {} {error}", output.status);
    let text = String::from_utf8(output.stdout).expect("headers are text");
    let mut lines = text.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).expect("a status line");
    let header = |line: &str| {
        let (name, value) = line.split_once(':')?;
        Some((name.to_ascii_lowercase(), value.trim().to_owned()))
    };
    Head { status: status.parse().expect("a status"), headers: lines.filter_map(header).collect() }
}

/// Sends the preflight of a chat request from a page of `origin`.
fn preflight(gateway: &Tollgate, base: &str, origin: &str) -> Head {
    let headers = [
        &format!("origin: {origin}"),
        "access-control-request-method: POST",
        "access-control-request-headers: authorization,content-type,x-stainless-lang",
    ];
    ask(gateway, "OPTIONS", &format!("{base}/v1/chat/completions"), &headers, None)
}

#[tokio::test]
async fn listed_page_calls_the_api() {
    if program("curl").is_none() {
        return;
    }
    let gateway = Tollgate::with_config(&format!("{CORS}{PLAN}"));
    let key = gateway.key("acme", &[]);
    // A preflight has no key, and more of them than the plan has requests cost nothing.
    for _ in 0..5 {
        let head = preflight(&gateway, &gateway.url, PAGE);
        assert_eq!(head.status, 204, "{head:?}");
        assert_eq!(head.get("access-control-allow-origin"), Some(PAGE));
        assert_eq!(head.get("access-control-allow-methods"), Some("POST"));
        let allowed = head.get("access-control-allow-headers");
        assert_eq!(allowed, Some("authorization,content-type,x-stainless-lang"));
        assert_eq!(head.get("vary"), Some("origin"));
        assert_eq!(head.get("access-control-allow-credentials"), None);
    }
    let body = json!({
        "model": "tollgate-demo", "max_tokens": 1,
        "messages": [{ "role": "user", "content": "Hello!" }],
    });
    let url = format!("{}/v1/chat/completions", gateway.url);
    let key = format!("authorization: Bearer {key}");
    let chat = |origin: &str, key: &str| {
        let origin = format!("origin: {origin}");
        let headers = [&*origin, key, "content-type: application/json"];
        ask(&gateway, "POST", &url, &headers, Some(&body.to_string()))
    };
    // A page must be able to read answers and refusals.
    for status in [200, 200, 429] {
        let head = chat(PAGE, &key);
        assert_eq!(head.status, status, "{head:?}");
        assert_eq!(head.get("access-control-allow-origin"), Some(PAGE), "{head:?}");
        let exposed = head.get("access-control-expose-headers").expect("a list");
        let exposed: Vec<&str> = exposed.split(", ").collect();
        for (name, _) in &head.headers {
            let is_limit = name.starts_with("x-") || name.contains("ratelimit");
            if is_limit || name.starts_with("retry-after") {
                assert!(exposed.contains(&name.as_str()), "{name} is missing in {exposed:?}");
            }
        }
        assert!(exposed.contains(&"retry-after") && exposed.contains(&"x-request-id"));
    }
    let head = chat(PAGE, "authorization: Bearer wrong");
    assert_eq!((head.status, head.get("access-control-allow-origin")), (401, Some(PAGE)));
    let head = chat("https://other.example", &key);
    assert_eq!((head.status, head.get("access-control-allow-origin")), (429, None));
}

#[tokio::test]
async fn other_pages_get_no_header() {
    if program("curl").is_none() {
        return;
    }
    let gateway = Tollgate::with_config(&format!("{CORS}{PLAN}"));
    for origin in ["https://other.example", "null", "https://app.example.other.example"] {
        let head = preflight(&gateway, &gateway.url, origin);
        assert_eq!((head.status, head.get("access-control-allow-origin")), (405, None), "{head:?}");
    }
    // No page may call the admin listener.
    let head = preflight(&gateway, &gateway.admin, PAGE);
    assert_eq!(head.get("access-control-allow-origin"), None, "{head:?}");
    assert_ne!(head.status, 204);
    // Nor the public one, once a reload takes the origin away.
    fs::write(gateway.config(), PLAN).expect("writes the config");
    let admin = gateway.connect_admin().await;
    let reply = admin.post("/config/reload", Default::default()).await.expect("answers");
    let (status, report) = read(reply).await;
    assert_eq!((status, &report["applied"]), (200, &json!(true)), "{report}");
    let head = preflight(&gateway, &gateway.url, PAGE);
    assert_eq!((head.status, head.get("access-control-allow-origin")), (405, None), "{head:?}");
    assert_eq!(head.get("vary"), None);
}

#[test]
fn preflights_count_against_their_source() {
    if program("curl").is_none() {
        return;
    }
    let sources = "[gateway.sources]\nrequests_per_second = 1\nrequest_burst = 2\n";
    let gateway = Tollgate::with_config(&format!("{CORS}{sources}{PLAN}"));
    let statuses: Vec<u16> =
        (0..40).map(|_| preflight(&gateway, &gateway.url, PAGE).status).collect();
    assert!(statuses.contains(&204) && statuses.contains(&429), "{statuses:?}");
}
