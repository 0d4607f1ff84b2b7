//! Attackers of files and batches: storms of batches, storms of cancels, and inputs with one
//! giant, deep or repeated line. Each connection sends one thing after the other.

use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::attack::Attack;
use super::tally::ANSWERED;
use crate::client::{ClientError, Connection, Protocol, Target};
use crate::clock;
use crate::run::chat_body;
use crate::scenario::AttackKind;

/// Time between two rounds of a connection, if the scenario gives none.
const PACE: Duration = Duration::from_millis(20);
/// Time between a connection that broke and the next one.
const PAUSE: Duration = Duration::from_millis(500);
/// Lines of the input of a storm.
const LINES: usize = 200;
/// Bytes of a giant line: a little less than the largest body of a gateway by default.
const GIANT: usize = 2_000_000;
/// Levels of a deep line.
const DEPTH: usize = 100_000;
/// Equal lines of an input.
const EQUAL: usize = 5_000;

/// Keeps one connection busy to every target until the attack ends.
pub(super) async fn run(attack: Attack, targets: Vec<Target>) {
    let mut connections = JoinSet::new();
    for target in targets {
        let attack = attack.clone();
        connections.spawn(async move {
            while clock::now() < attack.end {
                if let Err(error) = rounds(&attack, &target).await {
                    attack.count(error.kind());
                }
                sleep(PAUSE).await;
            }
        });
    }
    while connections.join_next().await.is_some() {}
}

/// Plays rounds on one connection until it breaks or the attack ends.
async fn rounds(attack: &Attack, target: &Target) -> Result<(), ClientError> {
    let connection = target.connect(Protocol::Http2).await?;
    let client = JobClient { attack, connection };
    let inputs = client.inputs();
    let pace = attack.attacker.pace.unwrap_or(PACE);
    for input in inputs.iter().cycle() {
        if clock::now() >= attack.end {
            break;
        }
        client.round(input).await?;
        sleep(pace).await;
    }
    Ok(())
}

/// One connection of an attacker.
struct JobClient<'a> {
    attack: &'a Attack,
    connection: Connection,
}

impl JobClient<'_> {
    /// Uploads an input and makes a batch of it; a storm of cancels cancels it at once.
    async fn round(&self, input: &Bytes) -> Result<(), ClientError> {
        let kind = HeaderValue::from_static(FORM);
        let headers = HeaderMap::from_iter([(CONTENT_TYPE, kind)]);
        let file = self.connection.post_with("/v1/files", input.clone(), headers).await?;
        let Some(file) = self.counted(file).await else { return Ok(()) };
        let body = serde_json::json!({
            "input_file_id": file, "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        });
        let batch = self.connection.post("/v1/batches", body.to_string().into()).await?;
        let Some(batch) = self.counted(batch).await else { return Ok(()) };
        if self.attack.attacker.kind == AttackKind::CancelStorm {
            let path = format!("/v1/batches/{batch}/cancel");
            self.counted(self.connection.post(&path, "{}".into()).await?).await;
        }
        Ok(())
    }

    /// Counts a response, and returns the id in it.
    async fn counted(&self, response: Response<Incoming>) -> Option<String> {
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.ok()?.to_bytes();
        let body: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
        let code = body["error"]["code"].as_str().unwrap_or("without a code");
        match status {
            200 => self.attack.count(ANSWERED),
            _ => self.attack.count(&format!("{status} {code}")),
        }
        body["id"].as_str().filter(|_| status == 200).map(str::to_owned)
    }

    /// Returns the forms of the inputs, which are sent in turn.
    fn inputs(&self) -> Vec<Bytes> {
        let Attack { attacker, ground, .. } = self.attack;
        let prompts = attacker.prompts();
        let prompt = prompts.first().map_or("Hello.", String::as_str);
        let body = chat_body(&ground.scenario.model, prompt, attacker.ask.most_tokens(), false);
        let body = String::from_utf8_lossy(&body).into_owned();
        match attacker.kind {
            AttackKind::GiantLines => vec![
                form(&line(0, &format!("{{\"user\":\"{}\"}}", "x".repeat(GIANT)))),
                form(&line(0, &format!("{}{}", "[".repeat(DEPTH), "]".repeat(DEPTH)))),
                form(&line(0, &body).repeat(EQUAL)),
            ],
            _ => vec![form(&(0..LINES).map(|number| line(number, &body)).collect::<String>())],
        }
    }
}

fn line(number: usize, body: &str) -> String {
    format!(
        "{{\"custom_id\":\"{number}\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\",\"body\":{body}}}\n"
    )
}

const FORM: &str = "multipart/form-data; boundary=tollgate-drill";

/// Returns the form that uploads an input.
fn form(lines: &str) -> Bytes {
    Bytes::from(format!(
        "--tollgate-drill\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n\
         --tollgate-drill\r\ncontent-disposition: form-data; name=\"file\"; \
         filename=\"in.jsonl\"\r\n\r\n{lines}\r\n--tollgate-drill--\r\n"
    ))
}
