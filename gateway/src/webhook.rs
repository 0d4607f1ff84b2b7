//! The webhook: messages about events to another system. A message waits in a bounded
//! queue in memory, is signed, and is sent again until the receiver answers 2xx or its
//! time is over. Sending delays no request.
//!
//! The receiver cannot lead a message anywhere else: no redirect is followed, no proxy of
//! the environment is used, and private networks are refused unless the config lists them.

mod address;
mod message;

use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::rand::{SecureRandom as _, SystemRandom};
use http::{StatusCode, header};
use reqwest::{Client, Url, redirect};
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tollgate_admission::CapReached;
use tollgate_config::{HttpsUrl, LiveConfig, Webhook as WebhookConfig};
use tollgate_domain::UtcTime;
use tollgate_serving::with_causes;

use self::address::{AllowedAddresses, ForbiddenAddress};
use self::message::{InvalidSecret, Message, Secret};
use crate::Clock;
use crate::telemetry::Metrics;
use crate::trust::{self, TrustError};

/// A handle that takes events. Clones fill the same queue.
#[derive(Clone)]
pub(crate) struct Webhook {
    config: LiveConfig,
    clock: Clock,
    metrics: Arc<Metrics>,
    queue: mpsc::Sender<Message>,
}

/// The task that delivers messages, one after the other.
pub(crate) struct WebhookService {
    config: LiveConfig,
    clock: Clock,
    metrics: Arc<Metrics>,
    queue: mpsc::Receiver<Message>,
}

/// The reasons why an attempt to deliver a message failed.
#[derive(Debug, thiserror::Error)]
enum AttemptError {
    /// The file of the secret cannot be read.
    #[error("cannot read the secret")]
    SecretFile(#[source] std::io::Error),
    /// The file has no secret.
    #[error(transparent)]
    Secret(#[from] InvalidSecret),
    /// The certificate authorities cannot be used.
    #[error("cannot set up TLS")]
    Trust(#[from] TrustError),
    /// The HTTP client cannot be built, or the runtime stops.
    #[error("cannot set up the HTTP client")]
    Setup,
    /// The address belongs to a private network.
    #[error(transparent)]
    Forbidden(#[from] ForbiddenAddress),
    /// The TCP connection or the TLS handshake failed.
    #[error("could not connect")]
    Connect(#[source] reqwest::Error),
    /// The exchange over HTTP broke.
    #[error("HTTP failed")]
    Http(#[source] reqwest::Error),
    /// There was no answer in time.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The receiver answered something else than 2xx.
    #[error("the receiver answered {0}")]
    Status(StatusCode),
}

impl AttemptError {
    /// Returns the label in metrics.
    fn kind(&self) -> &'static str {
        match self {
            Self::SecretFile(_) | Self::Secret(_) => "secret",
            Self::Trust(_) | Self::Setup => "setup",
            Self::Forbidden(_) => "forbidden_address",
            Self::Connect(_) => "connect",
            Self::Http(_) => "http",
            Self::Timeout(_) => "timeout",
            Self::Status(_) => "status",
        }
    }
}

/// Makes the webhook of `config` and the task that delivers its messages.
pub(crate) fn webhook(
    config: LiveConfig,
    clock: Clock,
    metrics: Arc<Metrics>,
) -> (Webhook, WebhookService) {
    let (sender, queue) = mpsc::channel(MOST_WAITING);
    let service = WebhookService {
        config: config.clone(),
        clock: clock.clone(),
        metrics: Arc::clone(&metrics),
        queue,
    };
    (Webhook { config, clock, metrics, queue: sender }, service)
}

impl Webhook {
    /// Queues the message that a threshold of a cap was reached, if the config has a
    /// webhook. Never waits.
    pub(crate) fn cap_reached(&self, reached: &CapReached) {
        if self.config.current().gateway().webhook.url.is_none() {
            return;
        }
        let mut bits = [0; 16];
        // Without an id a receiver could not recognise a repeated message.
        let drawn = SystemRandom::new().fill(&mut bits).is_ok();
        let message = Message::cap_reached(reached, u128::from_be_bytes(bits), self.clock.utc());
        if !drawn || self.queue.try_send(message).is_err() {
            self.metrics.webhook.message("dropped");
            tracing::error!(
                most = MOST_WAITING,
                "the queue of the webhook is full; a message is lost"
            );
        }
    }
}

impl WebhookService {
    /// Delivers messages until `end`. Those that still wait then are lost.
    pub(crate) async fn run(mut self, end: CancellationToken) {
        let mut under_way = 0;
        loop {
            let delivered = end.run_until_cancelled(self.deliver_next(&mut under_way)).await;
            if delivered.is_none_or(|next| !next) {
                break;
            }
        }
        let lost = self.queue.len() + under_way;
        if lost > 0 {
            tracing::warn!(messages = lost, "the gateway stops; messages of the webhook are lost");
        }
    }

    /// Delivers the next message. Returns false if no further one can come.
    async fn deliver_next(&mut self, under_way: &mut usize) -> bool {
        let Some(message) = self.queue.recv().await else { return false };
        // Set before the delivery, so that `run` logs the loss of a message that it cuts off.
        *under_way = 1;
        self.deliver(&message).await;
        *under_way = 0;
        true
    }

    /// Sends `message` until it is delivered or its time is over.
    async fn deliver(&self, message: &Message) {
        let began = self.clock.now();
        let mut wait = FIRST_WAIT;
        for attempt in 1_u32.. {
            // Read for each attempt, because a reload may have changed or removed the webhook.
            let config = self.config.current();
            let hook = &config.gateway().webhook;
            let Some(url) = &hook.url else {
                self.metrics.webhook.message("dropped");
                tracing::warn!(id = message.id, "the webhook was removed; its message is dropped");
                return;
            };
            let Err(error) = send(hook, url, message, self.clock.utc()).await else {
                self.metrics.webhook.message("delivered");
                if attempt > 1 {
                    tracing::info!(id = message.id, attempt, "webhook delivered its message");
                }
                return;
            };
            self.metrics.webhook.attempt_failed(error.kind());
            let error = with_causes(&error);
            // The next attempt would come after the message's time.
            if self.clock.now().since(began) + wait > hook.retry_for {
                self.metrics.webhook.message("failed");
                tracing::error!(
                    id = message.id,
                    attempt,
                    error,
                    "webhook could not deliver its message and gave up; the message is lost"
                );
                return;
            }
            // Once a message: a receiver that is down for long would fill the log.
            if attempt == 1 {
                tracing::warn!(
                    id = message.id,
                    error,
                    "webhook could not deliver its message; sending it again"
                );
            }
            sleep(wait).await;
            wait = (wait * 2).min(LONGEST_WAIT);
        }
    }
}

/// Makes one attempt to deliver `message`. Files are read again each time, so that a
/// renewed secret or authority needs no restart.
async fn send(
    hook: &WebhookConfig,
    url: &HttpsUrl,
    message: &Message,
    at: UtcTime,
) -> Result<(), AttemptError> {
    let url: Url = url.as_str().parse().map_err(|_| AttemptError::Setup)?;
    let allowed = AllowedAddresses::new(&hook.allowed_networks);
    // An address in the URL is never resolved, so the resolver would not check it.
    allowed.check_host(url.host_str().unwrap_or_default())?;
    let prepared = {
        let hook = hook.clone();
        // Files are read, which blocks.
        tokio::task::spawn_blocking(move || prepare(&hook, allowed)).await
    };
    let (client, secret) = prepared.map_err(|_| AttemptError::Setup)??;
    let request = client
        .post(url)
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::USER_AGENT, concat!("tollgate/", env!("CARGO_PKG_VERSION")))
        .header("webhook-id", &message.id)
        .header("webhook-timestamp", at.unix_seconds())
        // Signed for each attempt, because receivers refuse old timestamps.
        .header("webhook-signature", message.signature(&secret, at))
        .body(message.body.clone());
    // The body of the answer is never read.
    let answer = request.send().await.map_err(|error| failure(error, hook.timeout))?;
    match answer.status() {
        status if status.is_success() => Ok(()),
        // A redirect ends here as well, because none is followed.
        status => Err(AttemptError::Status(status)),
    }
}

/// Reads the files of the webhook.
fn prepare(
    hook: &WebhookConfig,
    allowed: AllowedAddresses,
) -> Result<(Client, Secret), AttemptError> {
    // The config was checked: a webhook with a URL has a secret.
    let path = hook.secret.as_deref().ok_or(InvalidSecret)?;
    let secret = Secret::parse(&read_secret(path).map_err(AttemptError::SecretFile)?)?;
    let client = Client::builder()
        .tls_backend_preconfigured(trust::client_config(hook.ca.as_deref())?)
        .https_only(true)
        .redirect(redirect::Policy::none())
        .no_proxy()
        .dns_resolver(allowed)
        // The client is made for one attempt, so it keeps no connection.
        .pool_max_idle_per_host(0)
        .timeout(hook.timeout)
        .build();
    Ok((client.map_err(|_| AttemptError::Setup)?, secret))
}

fn read_secret(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    fs::File::open(path)?.take(LARGEST_SECRET_FILE).read_to_string(&mut text)?;
    Ok(text)
}

fn failure(error: reqwest::Error, timeout: Duration) -> AttemptError {
    // The client wraps the resolver's error, so the whole chain is searched for it.
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(next) = cause {
        if let Some(forbidden) = next.downcast_ref::<ForbiddenAddress>() {
            return AttemptError::Forbidden(forbidden.clone());
        }
        cause = next.source();
    }
    // Asked first, because a connection that times out is an error of connecting, too.
    if error.is_timeout() {
        AttemptError::Timeout(timeout)
    } else if error.is_connect() {
        AttemptError::Connect(error)
    } else {
        AttemptError::Http(error)
    }
}

/// Messages that wait for delivery; further ones are dropped.
const MOST_WAITING: usize = 1_024;

/// The first wait before a message is sent again. Each failure doubles it.
const FIRST_WAIT: Duration = Duration::from_secs(1);

/// The longest wait before a message is sent again.
const LONGEST_WAIT: Duration = Duration::from_secs(300);

/// Bytes of the largest file of a secret.
const LARGEST_SECRET_FILE: u64 = 4_096;

#[cfg(test)]
mod tests;
