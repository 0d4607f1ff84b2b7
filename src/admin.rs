//! The client of a running gateway's admin listener, for the subcommands that need one,
//! and the choice between that listener and the files of a stopped gateway.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use http::StatusCode;
use http_body_util::BodyExt;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::runtime::Runtime;
use tollgate_config::Config;
use tollgate_gateway::admin_certificate;
use tollgate_loadtest::client::{ClientError, Connection, Protocol, Target};

use crate::common::Place;
use crate::data;

/// The address of the admin listener and the files that give access.
#[derive(clap::Args)]
pub struct Admin {
    #[command(flatten)]
    pub place: Place,
    /// The admin listener [default: the gateway that runs on the data folder].
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// With --url: the CA certificate to trust [default: DATA/tls/ca.pem].
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// A file with the key of an admin [default: DATA/admin.key].
    #[arg(long, value_name = "FILE")]
    admin_key: Option<PathBuf>,
}

/// The two ways to the state of a gateway.
pub enum Reach {
    /// A gateway runs on the data folder, or was named: its admin API.
    Running(Box<AdminClient>),
    /// No gateway runs: the files of the config's data folder.
    Stopped(Box<Config>),
}

/// A connection to an admin listener.
pub struct AdminClient {
    runtime: Runtime,
    connection: Connection,
    /// The bound of a request, from sending it to the end of its answer.
    longest: Duration,
}

/// A request to the admin listener, with its path.
#[derive(Clone, Copy, Debug)]
pub enum Ask<'a> {
    Get(&'a str),
    /// A request with a body; null stands for an empty one.
    Post(&'a str, &'a Value),
    Delete(&'a str),
}

impl Admin {
    /// Returns the access that config and data folder give.
    pub fn of(place: Place) -> Self {
        Self { place, url: None, ca: None, admin_key: None }
    }

    /// Returns the access for questions that need no key.
    pub fn without_key(place: Place, url: Option<String>, ca: Option<PathBuf>) -> Self {
        Self { place, url, ca, admin_key: None }
    }

    /// Opens a connection without a key to the gateway, which must run.
    ///
    /// # Errors
    /// The config is invalid, or no gateway answers.
    pub fn probe(&self) -> Result<AdminClient> {
        let config = self.place.load()?;
        let Some(url) = self.url.clone().or_else(|| data::announced(config.data())) else {
            bail!("no gateway runs on the data folder {}", config.data().display());
        };
        // Probes need no key, but each request of the client carries one.
        Ok(self.dial((&config, &url, "none"), PROBE)??)
    }

    /// Opens a connection to the gateway, which must run.
    ///
    /// # Errors
    /// The config is invalid, no key is there, or no gateway answers.
    pub fn connect(&self) -> Result<AdminClient> {
        let config = self.place.load()?;
        let announced = || data::announced(config.data());
        let url = self.url.clone().or_else(announced);
        let url = url.unwrap_or_else(|| data::reachable(config.gateway().admin_listen));
        Ok(self.open(&config, &url)??)
    }

    /// Opens a connection to the gateway that runs on the data folder, or to the one that
    /// `--url` names. Without a running gateway, the files of the data folder are used.
    ///
    /// # Errors
    /// The config is invalid, no key is there, or the named gateway does not answer.
    pub fn reach(&self) -> Result<Reach> {
        let config = self.place.load()?;
        if let Some(url) = &self.url {
            return Ok(Reach::Running(Box::new(self.open(&config, url)??)));
        }
        let Some(url) = data::announced(config.data()) else {
            return Ok(Reach::Stopped(Box::new(config)));
        };
        match self.open(&config, &url)? {
            Ok(client) => Ok(Reach::Running(Box::new(client))),
            Err(error) => {
                // The gateway was killed and left its address, or it hangs. A key must be
                // revocable then, too, and a gateway reads the files within a second.
                if !is_refused(&error) {
                    eprintln!("the gateway at {url} does not answer ({error}); using its files");
                }
                Ok(Reach::Stopped(Box::new(config)))
            }
        }
    }

    /// Opens a connection to `url`. The outer error is of the files, the inner one of the
    /// network.
    fn open(&self, config: &Config, url: &str) -> Result<Result<AdminClient, ClientError>> {
        // The running gateway wrote this key; access to the file is the permission.
        let key_file = self.admin_key.clone().unwrap_or_else(|| config.data().join("admin.key"));
        let key = std::fs::read_to_string(&key_file).with_context(|| {
            format!("admin key {} (does `tollgate up` use this data folder?)", key_file.display())
        })?;
        self.dial((config, url, &key), ANSWER)
    }

    /// Opens a connection to the listener `(config, url, key)`.
    fn dial(
        &self,
        listener: (&Config, &str, &str),
        longest: Duration,
    ) -> Result<Result<AdminClient, ClientError>> {
        let (config, url, key) = listener;
        let first = connect(&self.target(config, url, key)?, longest)?;
        if !matches!(first, Err(ClientError::Tls { .. })) {
            return Ok(first);
        }
        // The gateway may have renewed its certificate just now. It writes the new one into
        // the data folder a moment later.
        std::thread::sleep(RENEWAL);
        connect(&self.target(config, url, key)?, longest)
    }

    /// Returns the listener at `url` with the certificate or the authority to trust.
    fn target(&self, config: &Config, url: &str, key: &str) -> Result<Target> {
        let folder = config.data();
        // The gateway on the data folder has written its certificate there. A certificate
        // of a public authority names a domain, not the loopback address.
        if self.url.is_none()
            && self.ca.is_none()
            && let Ok(leaf) = std::fs::read(admin_certificate(folder))
        {
            return Ok(Target::pinned(url, leaf, key)?);
        }
        let ca = self.ca.clone().unwrap_or_else(|| folder.join("tls/ca.pem"));
        Ok(Target::new(url, &ca, key)?)
    }
}

/// Opens a connection to `target`. The outer error is of this process, the inner one of the
/// network.
fn connect(target: &Target, longest: Duration) -> Result<Result<AdminClient, ClientError>> {
    // Requests follow each other, so one thread is enough.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let connected = runtime
        .block_on(async { tokio::time::timeout(CONNECT, target.connect(Protocol::Either)).await });
    let timed_out = |_| ClientError::Connect {
        authority: target.authority().to_owned(),
        source: std::io::ErrorKind::TimedOut.into(),
    };
    let connected = connected.map_err(timed_out).flatten();
    Ok(connected.map(|connection| AdminClient { runtime, connection, longest }))
}

impl AdminClient {
    /// Sends a request and returns the JSON of a successful answer.
    ///
    /// # Errors
    /// Any other answer, with the gateway's message.
    pub fn json<T: DeserializeOwned>(&self, ask: Ask<'_>) -> Result<T> {
        serde_json::from_str(&self.text(ask)?).context("cannot parse the gateway's answer")
    }

    /// Reads all pages of the list at `path`, which has no query or one that ends with `&`.
    ///
    /// # Errors
    /// The errors of [`Self::json`].
    pub fn pages<T: DeserializeOwned>(&self, path: &str) -> Result<Vec<T>> {
        #[derive(Deserialize)]
        struct Page<T> {
            rows: Vec<T>,
            next: Option<String>,
        }
        let mut all = Vec::new();
        let mut after = String::new();
        loop {
            let page: Page<T> = self.json(Ask::Get(&format!("{path}{after}")))?;
            all.extend(page.rows);
            let Some(next) = page.next else { return Ok(all) };
            let sign = if path.contains('?') { "" } else { "?" };
            after = format!("{sign}after={}", encoded(&next));
        }
    }

    /// Sends a request and returns the body of a successful answer.
    ///
    /// # Errors
    /// Any other answer, with the gateway's message.
    pub fn text(&self, ask: Ask<'_>) -> Result<String> {
        let (status, body) = self.exchange(ask)?;
        if status.is_success() { Ok(body) } else { Err(refusal(status, &body)) }
    }

    /// Sends a request and returns whether the answer is a success, and its body.
    ///
    /// # Errors
    /// The connection failed, or the body is no text.
    pub fn answer(&self, ask: Ask<'_>) -> Result<(bool, String)> {
        let (status, body) = self.exchange(ask)?;
        Ok((status.is_success(), body))
    }

    fn exchange(&self, ask: Ask<'_>) -> Result<(StatusCode, String)> {
        let asked = async {
            let response = match ask {
                Ask::Get(path) => self.connection.get(path).await?,
                Ask::Post(path, Value::Null) => self.connection.post(path, "".into()).await?,
                Ask::Post(path, body) => {
                    self.connection.post(path, body.to_string().into()).await?
                }
                Ask::Delete(path) => self.connection.delete(path).await?,
            };
            let status = response.status();
            let body = response.into_body().collect().await?.to_bytes();
            anyhow::Ok((status, body))
        };
        let longest = self.longest;
        // The timer needs the runtime, which runs the block alone.
        let asked = async { tokio::time::timeout(longest, asked).await };
        let answered = self.runtime.block_on(asked);
        let (status, body) = answered
            .map_err(|_| anyhow!("the gateway did not answer within {} s", longest.as_secs()))??;
        let body = String::from_utf8(body.to_vec()).context("cannot parse the gateway's answer")?;
        Ok((status, body))
    }
}

/// Returns the error of an answer that is no success.
fn refusal(status: StatusCode, body: &str) -> anyhow::Error {
    #[derive(Deserialize)]
    struct Refused {
        error: Why,
    }
    #[derive(Deserialize)]
    struct Why {
        message: String,
        /// The mistakes of a config, each with its place.
        #[serde(default)]
        mistakes: Vec<String>,
    }
    match serde_json::from_str::<Refused>(body) {
        Ok(Refused { error }) if error.mistakes.is_empty() => {
            anyhow!("the gateway answered {status}: {}", error.message)
        }
        Ok(Refused { error }) => {
            anyhow!("the config in force stays, because:\n{}", error.mistakes.join("\n"))
        }
        Err(_) => anyhow!("the gateway answered {status}"),
    }
}

/// Returns true if nothing listens at the address.
fn is_refused(error: &ClientError) -> bool {
    matches!(error, ClientError::Connect { source, .. }
        if source.kind() == std::io::ErrorKind::ConnectionRefused)
}

/// Returns `text` as one segment of a path or one value of a query.
pub fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let encode =
        |byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(encode).collect()
}

/// Time in which the gateway must accept a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// Time in which a gateway writes its renewed certificate into the data folder.
const RENEWAL: Duration = Duration::from_millis(500);

/// Time in which the gateway must answer a probe.
const PROBE: Duration = Duration::from_secs(5);

/// Time in which the gateway must answer any other request. Statements of a long time read
/// millions of rows.
const ANSWER: Duration = Duration::from_secs(300);
