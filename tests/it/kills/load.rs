//! Clients that send requests all the time, reconnect after a cut, and record each end.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tollgate_loadtest::client::{Connection, Protocol, Target};

use super::checker::{ClientRecord, End};

/// A random generator (xorshift64*) with a seed.
#[derive(Clone, Debug)]
pub struct SeededRandom(u64);

impl SeededRandom {
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut draw = Self(seed ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        for _ in 0..4 {
            draw.below(2);
        }
        draw
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }
}

/// An answer that never ends by itself, because one token repeats.
#[derive(Clone, Debug)]
pub struct RepeatedToken {
    first: String,
    next: String,
}

impl RepeatedToken {
    /// Learns the tokens' text from two undisturbed answers.
    pub async fn learn(connection: &Connection) -> Self {
        let mut texts = Vec::new();
        for tokens in [1, 2] {
            let request = body(tokens, false).to_string().into();
            let answer = connection.post("/v1/chat/completions", request).await.expect("answers");
            let answer = answer.into_body().collect().await.expect("whole").to_bytes();
            let answer: Value = serde_json::from_slice(&answer).expect("JSON");
            let text = answer["choices"][0]["message"]["content"].as_str();
            texts.push(text.unwrap_or_else(|| panic!("{answer}")).to_owned());
        }
        let next = texts[1].strip_prefix(&texts[0]).expect("a longer text").to_owned();
        assert!(!next.is_empty(), "a token without a text");
        Self { first: texts.swap_remove(0), next }
    }

    fn text(&self, tokens: u64) -> String {
        let mut text = self.first.clone();
        for _ in 1..tokens {
            text.push_str(&self.next);
        }
        text
    }

    fn tokens(&self, text: &str) -> u64 {
        match text.len().checked_sub(self.first.len()) {
            Some(more) if !text.is_empty() => 1 + (more / self.next.len()) as u64,
            _ => 0,
        }
    }
}

/// Returns a request for one choice that its length ends.
pub fn body(tokens: u64, stream: bool) -> Value {
    let mut body = json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": tokens, "stream": stream,
        "logit_bias": { "300": 100 },
        "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
    });
    if stream {
        body["stream_options"] = json!({ "include_usage": true });
    }
    body
}

/// The state that all clients share.
pub struct Shared {
    /// The gateway's targets, or `None` while there is no gateway.
    targets: watch::Sender<Option<HashMap<&'static str, Target>>>,
    piece: RepeatedToken,
    records: Mutex<Vec<ClientRecord>>,
    sent: AtomicUsize,
    outstanding: AtomicUsize,
    ended: AtomicBool,
    /// The time of the last kill, and each stream's delay from the kill to its error
    /// event.
    killed: Mutex<Option<Instant>>,
    error_delays: Mutex<Vec<Duration>>,
    /// The last requests that were answered completely.
    answered: Mutex<Vec<(&'static str, String)>>,
}

/// A load that goes on until it is ended.
pub struct Load {
    shared: Arc<Shared>,
    clients: JoinSet<()>,
}

impl Load {
    /// Starts `clients`, each for a tenant.
    pub fn start(
        targets: HashMap<&'static str, Target>,
        piece: RepeatedToken,
        clients: &[&'static str],
        seed: u64,
    ) -> Self {
        let shared = Arc::new(Shared {
            targets: watch::Sender::new(Some(targets)),
            piece,
            records: Mutex::default(),
            sent: AtomicUsize::new(0),
            outstanding: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
            killed: Mutex::default(),
            error_delays: Mutex::default(),
            answered: Mutex::default(),
        });
        let mut set = JoinSet::new();
        for (number, &tenant) in clients.iter().enumerate() {
            let shared = Arc::clone(&shared);
            set.spawn(client(shared, tenant, SeededRandom::new(seed, 1 + number as u64)));
        }
        Self { shared, clients: set }
    }

    /// Sends the clients to another gateway, or lets them wait.
    pub fn set_targets(&self, targets: Option<HashMap<&'static str, Target>>) {
        self.shared.targets.send_replace(targets);
    }

    /// Records the time of a kill.
    pub fn record_kill(&self) {
        *self.shared.killed.lock().expect("no task panicked") = Some(Instant::now());
    }

    /// Waits until `count` requests are running.
    pub async fn until_outstanding(&self, count: usize) {
        let started = Instant::now();
        while self.shared.outstanding.load(Ordering::Relaxed) < count {
            assert!(started.elapsed() < Duration::from_secs(60), "no load comes about");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until a request that began after this call is answered completely.
    pub async fn until_answered(&self) {
        let before = self.shared.sent.load(Ordering::Relaxed);
        let (started, mut seen) = (Instant::now(), self.records().len());
        let mut since = 0;
        // More answers than clients cannot all belong to requests that began before.
        while since <= self.clients.len() || self.shared.sent.load(Ordering::Relaxed) <= before {
            assert!(started.elapsed() < Duration::from_secs(90), "nothing is answered");
            tokio::time::sleep(Duration::from_millis(10)).await;
            let records = self.shared.records.lock().expect("no task panicked");
            since +=
                records[seen..].iter().filter(|it| matches!(it.end, End::Whole { .. })).count();
            seen = records.len();
        }
    }

    /// Returns the records so far.
    pub fn records(&self) -> Vec<ClientRecord> {
        self.shared.records.lock().expect("no task panicked").clone()
    }

    /// Returns the number of sent requests.
    pub fn sent(&self) -> usize {
        self.shared.sent.load(Ordering::SeqCst)
    }

    /// Returns the delays from a kill to the error events.
    pub fn error_delays(&self) -> Vec<Duration> {
        self.shared.error_delays.lock().expect("no task panicked").clone()
    }

    /// Takes the requests answered since the last call.
    pub fn take_answered(&self) -> Vec<(&'static str, String)> {
        std::mem::take(&mut *self.shared.answered.lock().expect("no task panicked"))
    }

    /// Lets each client finish its request and waits for all clients.
    pub async fn end(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        while let Some(client) = self.clients.join_next().await {
            client.expect("a client panicked");
        }
    }
}

async fn client(shared: Arc<Shared>, tenant: &'static str, mut draw: SeededRandom) {
    let mut targets = shared.targets.subscribe();
    while !shared.ended.load(Ordering::Relaxed) {
        let target = targets.borrow_and_update().as_ref().map(|all| all[tenant].clone());
        let connection = match target {
            Some(target) => target.connect(Protocol::Either).await.ok(),
            None => None,
        };
        let Some(connection) = connection else {
            // A change of the targets wakes the client; otherwise it tries again soon.
            let _ = tokio::time::timeout(Duration::from_millis(20), targets.changed()).await;
            continue;
        };
        while !shared.ended.load(Ordering::Relaxed) {
            let end = shared.ask(&connection, tenant, &mut draw).await;
            match end {
                End::Cut => break,
                End::Refused(503) => {
                    // A draining gateway refuses, so the client pauses and reconnects.
                    tokio::time::sleep(Duration::from_millis(20 + draw.below(30))).await;
                    break;
                }
                End::Refused(_) => {
                    tokio::time::sleep(Duration::from_millis(100 + draw.below(200))).await;
                }
                _ => tokio::time::sleep(Duration::from_millis(draw.below(20))).await,
            }
        }
    }
}

impl Shared {
    /// Sends one request to its end and records the end.
    async fn ask(
        &self,
        connection: &Connection,
        tenant: &'static str,
        draw: &mut SeededRandom,
    ) -> End {
        let (tokens, kind) = (1 + draw.below(100), draw.below(10));
        // A cap that is almost used up may end an answer early.
        let least = if tenant == CAPPED { 1 } else { tokens };
        let leaves = (kind == 0).then(|| draw.below(10));
        self.sent.fetch_add(1, Ordering::SeqCst);
        self.outstanding.fetch_add(1, Ordering::Relaxed);
        let asked = self.converse(connection, least..=tokens, kind < 6, leaves);
        let (id, content, end) = match tokio::time::timeout(TIMEOUT, asked).await {
            Ok(answer) => answer,
            Err(_) => (None, 0, End::Wrong(format!("nothing for {TIMEOUT:?}"))),
        };
        self.outstanding.fetch_sub(1, Ordering::Relaxed);
        if end == End::Failed
            && let Some(killed) = *self.killed.lock().expect("no task panicked")
        {
            self.error_delays.lock().expect("no task panicked").push(killed.elapsed());
        }
        if let (End::Whole { .. }, Some(id)) = (&end, &id) {
            self.answered.lock().expect("no task panicked").push((tenant, id.clone()));
        }
        let record = ClientRecord { id, tenant, content, end: end.clone() };
        self.records.lock().expect("no task panicked").push(record);
        end
    }

    async fn converse(
        &self,
        connection: &Connection,
        tokens: RangeInclusive<u64>,
        stream: bool,
        leaves: Option<u64>,
    ) -> (Option<String>, u64, End) {
        let request = body(*tokens.end(), stream).to_string().into();
        let Ok(mut answer) = connection.post("/v1/chat/completions", request).await else {
            return (None, 0, End::Cut);
        };
        let id = answer.headers().get("x-request-id");
        let id = id.and_then(|id| id.to_str().ok()).map(str::to_owned);
        if let Some(frames) = leaves {
            for _ in 0..frames {
                if !matches!(answer.frame().await, Some(Ok(_))) {
                    break;
                }
            }
            return (id, 0, End::Left);
        }
        let status = answer.status().as_u16();
        let mut text = Vec::new();
        loop {
            match answer.frame().await {
                Some(Ok(frame)) => {
                    text.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
                }
                Some(Err(_)) => return (id, 0, End::Cut),
                None => break,
            }
        }
        let Ok(text) = String::from_utf8(text) else {
            return (id, 0, End::Wrong("no UTF-8".to_owned()));
        };
        let read = match (status, stream) {
            (200, true) => self.stream(&text, &tokens),
            (200, false) => self.whole(&text, &tokens),
            _ => refused(status, &text).map(|end| (0, end)),
        };
        match read {
            Ok((content, end)) => (id, content, end),
            Err(what) => (id, 0, End::Wrong(format!("{what} in {status} {text:?}"))),
        }
    }

    fn whole(&self, text: &str, tokens: &RangeInclusive<u64>) -> Result<(u64, End), String> {
        let answer: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let content = answer["choices"][0]["message"]["content"].as_str().ok_or("no content")?;
        let came = self.came(content)?;
        match tokens.contains(&came) {
            true => Ok((came, whole(&answer["usage"], came)?)),
            false => Err(format!("{came} of {tokens:?} tokens")),
        }
    }

    /// Returns the number of tokens in a text.
    fn came(&self, text: &str) -> Result<u64, String> {
        let came = self.piece.tokens(text);
        match came == 0 && text.is_empty() || text == self.piece.text(came) {
            true => Ok(came),
            false => Err("another text than such tokens have".to_owned()),
        }
    }

    /// Parses a stream, which must have one end and no event after it.
    fn stream(&self, text: &str, tokens: &RangeInclusive<u64>) -> Result<(u64, End), String> {
        let mut events = text.split_terminator("\n\n").collect::<Vec<_>>();
        if events.pop() != Some("data: [DONE]") {
            return Err("no end".to_owned());
        }
        let (mut content, mut usage, mut failed) = (String::new(), None, false);
        for event in events {
            let event = event.strip_prefix("data: ").ok_or("an event without data")?;
            if failed {
                return Err("something follows the error".to_owned());
            }
            let event: Value = serde_json::from_str(event).map_err(|error| error.to_string())?;
            failed = event.get("error").is_some_and(|error| !error.is_null());
            if let Some(more) = event["choices"][0]["delta"]["content"].as_str() {
                content.push_str(more);
            }
            if event["usage"].is_object() {
                usage = Some(event["usage"].clone());
            }
        }
        let came = self.came(&content)?;
        match usage {
            None if failed && came <= *tokens.end() => Ok((came, End::Failed)),
            Some(usage) if !failed && tokens.contains(&came) => Ok((came, whole(&usage, came)?)),
            _ => Err(format!("{came} of {tokens:?} tokens")),
        }
    }
}

fn whole(usage: &Value, tokens: u64) -> Result<End, String> {
    let figure = |name: &str| usage[name].as_u64().ok_or(format!("no {name}"));
    let (prompt, completion) = (figure("prompt_tokens")?, figure("completion_tokens")?);
    match completion == tokens {
        true => Ok(End::Whole { prompt, completion }),
        false => Err(format!("{completion} tokens on the receipt")),
    }
}

fn refused(status: u16, text: &str) -> Result<End, String> {
    let answer: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    match answer["error"]["message"].is_string() {
        true => Ok(End::Refused(status)),
        false => Err("no error is named".to_owned()),
    }
}

/// The tenant that uses up its cap.
pub const CAPPED: &str = "capped";
/// A time longer than any request may take.
const TIMEOUT: Duration = Duration::from_secs(120);
