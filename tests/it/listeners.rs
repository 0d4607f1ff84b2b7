//! The listeners of the real binary under other projects' tools: curl, h2load,
//! slowhttptest. The listener's own tests cover single connections; these tests cover
//! the whole.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinSet;
use tollgate_loadtest::client::{Protocol, Target};

use crate::reload::put_in_force;
use crate::support::{self, Tollgate, binary, get, post, program};

/// One request of a curl call, which uses one connection where it can.
#[derive(Clone, Default)]
struct CurlRequest {
    method: &'static str,
    url: String,
    headers: Vec<String>,
    body: Option<String>,
}

/// The response to one request.
#[derive(Debug)]
struct CurlResponse {
    status: u16,
    /// True if the request needed a new connection.
    is_new: bool,
}

/// Sends all of `asks` with curl and its `options`. Returns the responses, and all
/// bodies in one text.
fn curl(gateway: &Tollgate, options: &[&str], asks: &[CurlRequest]) -> (Vec<CurlResponse>, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let bodies = folder.path().join("bodies");
    let mut config = String::new();
    for (number, ask) in asks.iter().enumerate() {
        let quoted = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"");
        if number > 0 {
            config.push_str("next\n");
        }
        let ca = gateway.ca();
        // Writing into a String cannot fail.
        let _ = write!(
            config,
            "silent\nshow-error\ngloboff\npath-as-is\ncacert = \"{}\"\nmax-time = 20\n\
             output = \"{}.{number}\"\nwrite-out = \"%{{http_code}} %{{num_connects}}\\n\"\n\
             request = \"{}\"\nurl = \"{}\"\n",
            ca.display(),
            bodies.display(),
            ask.method,
            quoted(&ask.url),
        );
        for header in &ask.headers {
            let _ = writeln!(config, "header = \"{}\"", quoted(header));
        }
        if let Some(body) = &ask.body {
            let path = folder.path().join(format!("body.{number}"));
            fs::write(&path, body).expect("writes");
            let _ = writeln!(config, "data-binary = \"@{}\"", path.display());
        }
        for option in options {
            let _ = writeln!(config, "{option}");
        }
    }
    let path = folder.path().join("curl");
    fs::write(&path, config).expect("writes");
    let output = Command::new("curl").arg("--disable").arg("-K").arg(&path).output().expect("curl");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "curl: {} {error}", output.status);
    let responses = String::from_utf8(output.stdout).expect("digits");
    let responses = responses.lines().map(|line| {
        let (status, connects) = line.split_once(' ').expect("two words");
        CurlResponse { status: status.parse().expect("a status"), is_new: connects != "0" }
    });
    let read = |number| fs::read_to_string(format!("{}.{number}", bodies.display()));
    let bodies = (0..asks.len()).map(|number| read(number).unwrap_or_default()).collect();
    (responses.collect(), bodies)
}

fn ask(method: &'static str, url: String) -> CurlRequest {
    CurlRequest { method, url, ..CurlRequest::default() }
}

fn bearer(key: &str) -> String {
    format!("authorization: Bearer {key}")
}

/// Returns the resident memory of a process, KiB.
fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

fn chat(max_tokens: u32) -> Value {
    json!({
        "model": "tollgate-demo", "max_tokens": max_tokens,
        "messages": [{ "role": "user", "content": "Hello!" }],
    })
}

/// Checks that a tenant over its rate is refused before its body is read: a body
/// without JSON gets 429 and not 400, even if the body is large.
#[tokio::test]
async fn refusals_come_before_the_body() {
    if program("curl").is_none() {
        return;
    }
    let gateway = Tollgate::with_config(
        "[plans.one]\nrequests_per_minute = { limit = 1, burst = 1 }\n[tenants.acme]\nplan = \"one\"\n",
    );
    let key = gateway.key("acme", &[]);
    let connection = gateway.connect(&key).await;
    let (status, reply) = post(&connection, "/v1/chat/completions", &chat(1)).await;
    assert_eq!(status, 200, "{reply}");
    let url = format!("{}/v1/chat/completions", gateway.url);
    let body = |bytes: usize| CurlRequest {
        headers: vec![bearer(&key), "content-type: application/json".to_owned()],
        body: Some("no JSON ".repeat(bytes / 8)),
        ..ask("POST", url.clone())
    };
    for protocol in ["http1.1", "http2"] {
        // Over HTTP/1 the last request waits for 100-continue.
        let asks = [body(800), body(8_000), body(60_000), body(900_000), body(1_500_000)];
        let (responses, replies) = curl(&gateway, &[protocol], &asks);
        assert!(
            responses.iter().all(|response| response.status == 429),
            "{protocol}: {responses:?} {replies}"
        );
        assert_eq!(replies.matches(r#""type":"rate_limit_error""#).count(), 5, "{replies}");
        let is_new: Vec<bool> = responses.iter().map(|response| response.is_new).collect();
        // After a small body the connection stays open.
        assert_eq!(is_new[..4], [true, false, false, false], "{protocol}");
    }
    // An unknown key is also refused before the body is read.
    let mut unknown = body(8_000);
    unknown.headers[0] = "authorization: Bearer nobody".to_owned();
    let (responses, _) = curl(&gateway, &["http1.1"], &[unknown.clone(), unknown]);
    assert_eq!((responses[0].status, responses[1].status, responses[1].is_new), (401, 401, false));
}

/// Checks T10: none of 1,000 forged addresses counts as another source.
#[test]
fn forged_addresses_change_nothing() {
    if program("curl").is_none() {
        return;
    }
    let gateway = Tollgate::with_config(&format!(
        "[gateway.sources]\nrequests_per_second = 1\nrequest_burst = 10\n{}",
        support::OPEN
    ));
    let asks: Vec<CurlRequest> = (0..1_000)
        .map(|n| {
            let forged = format!("198.51.{}.{}", n / 250, n % 250 + 1);
            let headers = match n % 4 {
                0 => vec![format!("x-forwarded-for: {forged}")],
                1 => vec![format!("x-forwarded-for: {forged}, 127.0.0.1")],
                2 => vec![format!("forwarded: for={forged}")],
                _ => vec![format!("x-real-ip: {forged}"), format!("x-forwarded-for: ::{n}")],
            };
            CurlRequest { headers, ..ask("GET", format!("{}/v1/models", gateway.url)) }
        })
        .collect();
    let started = Instant::now();
    let (responses, _) = curl(&gateway, &["http2"], &asks);
    let allowed = 11 + started.elapsed().as_secs() as usize;
    let passed = responses.iter().filter(|response| response.status != 429).count();
    assert_eq!(responses.len(), 1_000);
    assert!(passed <= allowed, "{passed} passed, {allowed} may");
    assert!(passed >= 10, "its own requests are answered");
}

/// Checks T12 and T39: oversized headers and compressed bodies are refused by their
/// headers and leave no memory behind.
#[tokio::test]
async fn bombs_are_refused_unread() {
    if program("curl").is_none() {
        return;
    }
    let gateway = Tollgate::with_config(support::OPEN);
    let key = gateway.key("acme", &[]);
    let connection = gateway.connect(&key).await;
    assert_eq!(get(&connection, "/v1/models").await.0, 200);
    let url = format!("{}/v1/chat/completions", gateway.url);
    let bomb = |coding: &str, bytes: usize| CurlRequest {
        headers: vec![bearer(&key), format!("content-encoding: {coding}")],
        body: Some("\u{1f}".repeat(bytes)),
        ..ask("POST", url.clone())
    };
    let encoded: Vec<CurlRequest> = ["gzip", "zstd", "br", "deflate", "gzip, zstd", "x-unknown"]
        .iter()
        .map(|coding| bomb(coding, 40_000))
        .collect();
    let headers = |count: usize, bytes: usize| CurlRequest {
        headers: (0..count).map(|n| format!("x-bomb-{n}: {}", "x".repeat(bytes))).collect(),
        ..ask("GET", url.clone())
    };
    let heads = [headers(200, 10), headers(1, 20_000), headers(70, 300)];
    // A first round excludes memory that is allocated only once.
    for protocol in ["http1.1", "http2"] {
        curl(&gateway, &[protocol], &encoded);
        curl(&gateway, &[protocol], &heads);
    }
    // A leak would grow in every batch by part of its 2.8 MB; memory that only settles
    // does not.
    let grown = (0..6).map(|_| {
        let before = resident(gateway.pid());
        for _ in 0..5 {
            for protocol in ["http1.1", "http2"] {
                let (responses, _) = curl(&gateway, &[protocol], &encoded);
                assert!(
                    responses.iter().all(|response| response.status == 415),
                    "{protocol}: {responses:?}"
                );
                let (responses, _) = curl(&gateway, &[protocol], &heads[1..]);
                assert!(
                    responses.iter().all(|response| response.status == 431),
                    "{protocol}: {responses:?}"
                );
            }
            let (responses, _) = curl(&gateway, &["http1.1"], &heads[..1]);
            assert_eq!(responses[0].status, 431);
        }
        resident(gateway.pid()).saturating_sub(before)
    });
    let grown: Vec<u64> = grown.collect();
    assert!(grown.iter().any(|&batch| batch <= 512), "{grown:?} KiB more");
    assert_eq!(get(&connection, "/v1/models").await.0, 200);
}

/// Checks T50: clients cannot add metric series.
#[tokio::test]
async fn metrics_gain_no_client_series() {
    if program("curl").is_none() {
        return;
    }
    let gateway = Tollgate::with_config(support::OPEN);
    let key = gateway.key("acme", &[]);
    let asks: Vec<CurlRequest> = (0..1_500)
        .map(|n| {
            let method = ["GET", "POST", "PUT", "BOMB", "DELETE"][n % 5];
            let path = match n % 3 {
                0 => format!("/v1/bomb-{n}"),
                1 => format!("/v1/models/bomb-{n}"),
                _ => format!("/v1/usage/bomb-{n}?bomb={n}"),
            };
            let mut headers = vec![format!("user-agent: bomb-{n}"), format!("x-bomb-{n}: {n}")];
            headers.push(match n % 2 {
                0 => bearer(&key),
                _ => bearer(&format!("bomb-{n}")),
            });
            CurlRequest { headers, ..ask(method, format!("{}{path}", gateway.url)) }
        })
        .collect();
    let (responses, _) = curl(&gateway, &["http2"], &asks);
    assert!(
        responses.iter().all(|response| (400..500).contains(&response.status)),
        "all are refused"
    );
    let (_, metrics) = curl(&gateway, &[], &[ask("GET", format!("{}/metrics", gateway.admin))]);
    let series = metrics.lines().filter(|line| !line.starts_with('#')).count();
    assert!((10..=5_000).contains(&series), "{series} series");
    assert!(!metrics.contains("bomb") && !metrics.contains("BOMB"), "{metrics}");
}

/// Checks T51: clients cannot add log lines or control bytes.
#[test]
fn log_lines_never_come_from_clients() {
    if program("curl").is_none() {
        return;
    }
    let folder = TempDir::new().expect("a folder");
    let log = folder.path().join("log");
    let (mut child, url) = logging_to(&log, folder.path());
    let hostile = ["\\u001b[2J", "%0a{\"level\":\"ERROR\"}", "%00%1b%7f", "\u{9b}2J", "{\"a\":\"b"];
    let mut config = String::new();
    for (number, text) in hostile.iter().cycle().take(100).enumerate() {
        let _ = write!(
            config,
            "{}silent\ninsecure\ngloboff\npath-as-is\nmax-time = 20\noutput = \"/dev/null\"\n\
             url = \"{url}/v1/{}\"\nheader = \"authorization: Bearer tg-{}\"\n\
             header = \"user-agent: {}\"\nheader = \"x-request-id: {}\"\n",
            if number > 0 { "next\n" } else { "" },
            text.replace('"', "%22").replace(['{', '}', '\\'], ""),
            text.replace('\\', "\\\\").replace('"', "\\\""),
            text.replace('\\', "\\\\").replace('"', "\\\""),
            text.replace('\\', "\\\\").replace('"', "\\\""),
        );
    }
    let path = folder.path().join("curl");
    fs::write(&path, config).expect("writes");
    let asked = Command::new("curl").arg("--disable").arg("-K").arg(&path).output().expect("curl");
    let end = Command::new("kill").arg(child.id().to_string()).status().expect("kill runs");
    child.wait().expect("it was started");
    assert!(end.success());
    let text = fs::read_to_string(&log).expect("a log");
    assert!(!text.is_empty(), "it says when it drains, at least");
    for line in text.lines() {
        let event: Value = serde_json::from_str(line).unwrap_or_else(|error| {
            panic!("{error} in {line:?} ({})", String::from_utf8_lossy(&asked.stderr))
        });
        assert!(event["level"].is_string() && event["timestamp"].is_string(), "{line}");
        assert!(!line.contains(char::is_control), "{line:?}");
        // A refusal is not logged.
        assert!(event["level"] != "ERROR" && !line.contains("[2J"), "{line}");
    }
    assert!(text.lines().count() < 50, "a hundred refusals are not logged: {text}");
}

/// Starts the binary with its log in a file and returns its URL.
fn logging_to(log: &Path, folder: &Path) -> (std::process::Child, String) {
    let mut child = Command::new(binary())
        .args(["up", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--data"])
        .arg(folder.join("data"))
        .env_remove("TOLLGATE_LOG")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(File::create(log).expect("creates"))
        .spawn()
        .expect("the binary starts");
    let lines = BufReader::new(child.stdout.take().expect("it was piped")).lines();
    let url = lines
        .map_while(Result::ok)
        .find_map(|line| Some(line.strip_prefix("ready ")?.split_whitespace().next()?.to_owned()));
    (child, url.expect("a `ready` line"))
}

/// Checks T54: every admin route, without the key and with wrong keys.
#[tokio::test]
async fn admin_routes_require_the_admin_key() {
    if program("curl").is_none() {
        return;
    }
    // Without the penalty every wrong key gets the same answer.
    let penalties = "[gateway.penalties]\nfailed_authentications_per_minute = 1_000_000\n";
    let gateway = Tollgate::with_config(&format!("{penalties}{}", support::OPEN));
    let key = gateway.key("acme", &[]);
    // The routes come from the source, so that a new route is tested, too.
    let mut routes: Vec<String> = include_str!("../../gateway/src/admin/routes.rs")
        .split("(\"/")
        .skip(1)
        .filter_map(|rest| rest.split('"').next())
        .map(|route| format!("/{}", route.replace(['{', '}', '*'], "")))
        .collect();
    routes.sort();
    routes.dedup();
    assert!(routes.len() >= 10, "{routes:?}");
    routes.extend(["/".to_owned(), "/v1/nothing".to_owned(), "/v1/models".to_owned()]);
    let credentials = [None, Some(bearer(&key)), Some(bearer("tga-0000")), Some(bearer(""))];
    let mut asks = Vec::new();
    for route in &routes {
        for method in ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"] {
            for credential in &credentials {
                let headers = credential.iter().cloned().collect();
                asks.push(CurlRequest {
                    headers,
                    ..ask(method, format!("{}{route}", gateway.admin))
                });
            }
        }
    }
    let (responses, _) = curl(&gateway, &["http2"], &asks);
    assert_eq!(responses.len(), asks.len());
    let open = ["/healthz", "/readyz", "/metrics"];
    for (response, ask) in responses.iter().zip(&asks) {
        let path = ask.url.trim_start_matches(&gateway.admin);
        let expected: &[u16] = match (open.contains(&path), ask.method) {
            (true, "GET") => &[200],
            (true, _) => &[405],
            (false, _) => &[401],
        };
        assert!(expected.contains(&response.status), "{} {path}: {response:?}", ask.method);
    }
    // The public listener has none of these routes; its usage is the caller's own, and its
    // document is that of the public API.
    let own: Vec<CurlRequest> = routes
        .iter()
        .filter(|route| !["/openapi.json", "/v1/models", "/v1/usage"].contains(&route.as_str()))
        .map(|route| CurlRequest {
            headers: vec![bearer(&key)],
            ..ask("GET", format!("{}{route}", gateway.url))
        })
        .collect();
    let (responses, replies) = curl(&gateway, &["http2"], &own);
    assert!(responses.iter().all(|response| response.status == 404), "{responses:?} {replies}");
}

/// Checks T03: connections that are slow in any phase are closed, and honest requests
/// are served meanwhile.
#[tokio::test]
async fn slow_connections_are_closed() {
    let Some(tool) = program("slowhttptest") else { return };
    let gateway = Tollgate::with_config(&format!(
        "[gateway.timeouts]\nfirst_byte = \"1s\"\nheaders = \"1s\"\nidle = \"1s\"\n\
         body_progress = \"1s\"\nwrite_progress = \"1s\"\n{}",
        support::OPEN
    ));
    let key = gateway.key("acme", &[]);
    let honest = gateway.target(&key).connect(Protocol::Http1).await.expect("connects");
    assert_eq!(get(&honest, "/v1/models").await.0, 200);
    for mode in [&["-H", "-i", "1"][..], &["-B", "-i", "1"], &["-X", "-n", "1"]] {
        let url = format!("{}/v1/chat/completions", gateway.url);
        let before = ended_late(&gateway);
        let mut slow = Command::new(&tool);
        slow.args(mode).args(["-c", "20", "-r", "20", "-l", "8", "-p", "5", "-u", &url]);
        let running = tokio::task::spawn_blocking(move || slow.output().expect("slowhttptest"));
        let said: Output = running.await.expect("it ends");
        let said = String::from_utf8_lossy(&said.stdout);
        // A slow reader still drains the kernel's buffers, and a slow body without a
        // key is answered before it arrives.
        let (all_closed, late) = (said.contains("No open connections left"), ended_late(&gateway));
        assert!(all_closed || mode[0] == "-X", "{mode:?}: {said}");
        assert!(late >= before + 20 || mode[0] == "-B", "{mode:?}: {before}, {late}: {said}");
        let connection = gateway.connect(&key).await;
        assert_eq!(get(&connection, "/v1/models").await.0, 200, "{mode:?}");
    }
}

/// Returns the number of connections closed for being late.
fn ended_late(gateway: &Tollgate) -> u64 {
    let (_, metrics) = curl(gateway, &[], &[ask("GET", format!("{}/metrics", gateway.admin))]);
    let late = |line: &str| {
        let rest = line.strip_prefix("tollgate_connections_ended_total{reason=\"")?;
        let (reason, count) = rest.split_once("\"} ")?;
        let is_late = ["head_timeout", "idle", "write_timeout"].contains(&reason);
        is_late.then(|| count.parse::<u64>().expect("a count"))
    };
    metrics.lines().filter_map(late).sum()
}

/// Checks many simultaneous streams over both protocols.
#[test]
fn h2load_is_answered() {
    let Some(tool) = program("h2load") else { return };
    let gateway = Tollgate::with_config(support::OPEN);
    let key = gateway.key("acme", &[]);
    for protocol in [&["-m", "10"][..], &["--h1"]] {
        let output = Command::new(&tool)
            .args(["-n", "600", "-c", "6", "-t", "1", "-H", &bearer(&key)])
            .args(protocol)
            .arg(format!("{}/v1/models", gateway.url))
            .output()
            .expect("h2load");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains("600 succeeded, 0 failed, 0 errored"), "{protocol:?}: {said}");
        assert!(said.contains("600 2xx, 0 3xx, 0 4xx, 0 5xx"), "{protocol:?}: {said}");
    }
}

/// C16: connections that are opened while the certificate changes again and again succeed,
/// and each is answered.
#[tokio::test]
async fn certificate_rotation_fails_no_handshake() {
    const PLAIN: &str = "[plans.open]\n[tenants.acme]\nplan = \"open\"\n\
        [gateway.connections]\nnew_per_second = 10_000\nnew_burst = 10_000\n\
        [gateway.reads]\nrequests_per_second = 10_000\nrequest_burst = 10_000\n";
    let gateway = Tollgate::with_config(PLAIN);
    let key = gateway.key("acme", &[]);
    let admin = gateway.connect_admin().await;
    // Another gateway has a certificate of another authority.
    let other = Tollgate::demo();
    let files = other.data().join("tls");
    let shown = files.display();
    let other_tls = format!(
        "[gateway.tls]\ncertificate = \"{shown}/server.pem\"\nkey = \"{shown}/server.key\"\n"
    );
    let (gateway_url, both) = (gateway.url.clone(), gateway.data().join("both.pem"));
    let authorities =
        [gateway.ca(), files.join("ca.pem")].map(|file| fs::read(file).expect("reads"));
    fs::write(&both, authorities.concat()).expect("writes");
    // A new target resumes no session, so it sees the certificate of the moment.
    let fresh = move || Target::new(&gateway_url, &both, &key).expect("a target");
    let (is_over, opened) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let mut clients = JoinSet::new();
    for protocol in [Protocol::Http1, Protocol::Http2, Protocol::Either] {
        let (fresh, is_over, opened) = (fresh.clone(), Arc::clone(&is_over), Arc::clone(&opened));
        clients.spawn(async move {
            let resuming = fresh();
            while !is_over.load(Ordering::Relaxed) {
                for target in [&resuming, &fresh()] {
                    let connection = target.connect(protocol).await.expect("a handshake succeeds");
                    assert_eq!(get(&connection, "/v1/models").await.0, 200);
                    opened.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    }
    let mut seen = HashSet::new();
    for round in 0..20 {
        let tls = if round % 2 == 0 { other_tls.as_str() } else { "" };
        put_in_force(&gateway, &admin, &format!("{PLAIN}{tls}")).await;
        // Each certificate serves some connections before the next one comes.
        let wanted = opened.load(Ordering::Relaxed) + 9;
        while opened.load(Ordering::Relaxed) < wanted {
            let tls = fresh().connect_tls(Protocol::Http1).await.expect("a handshake succeeds");
            let certificates = tls.get_ref().1.peer_certificates().expect("a certificate");
            seen.insert(certificates[0].as_ref().to_vec());
        }
    }
    is_over.store(true, Ordering::Relaxed);
    // A client that failed has panicked.
    clients.join_all().await;
    assert_eq!(seen.len(), 2, "the certificate did not change");
}
