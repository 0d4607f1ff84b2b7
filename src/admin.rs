//! The client of a running gateway's admin listener, for the subcommands that need one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use http_body_util::BodyExt;
use serde::Deserialize;
use tollgate_config::Config;
use tollgate_loadtest::client::{Connection, Protocol, Target};

use crate::common::Place;

/// The address of the admin listener and the files that give access.
#[derive(clap::Args)]
pub struct Admin {
    #[command(flatten)]
    pub place: Place,
    /// The admin listener [default: from the config].
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// The CA certificate to trust [default: DATA/tls/ca.pem].
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
}

impl Admin {
    /// Opens a connection with the admin key of the data folder.
    ///
    /// # Errors
    /// The config is invalid, no key is there, or no gateway answers.
    pub async fn connect(&self) -> Result<Connection> {
        let config = self.place.load()?;
        let url = self.url.clone().unwrap_or_else(|| url(&config));
        let ca = self.ca.clone().unwrap_or_else(|| config.data().join("tls/ca.pem"));
        // The running gateway wrote this key; access to the file is the permission.
        let key_file = config.data().join("admin.key");
        let key = std::fs::read_to_string(&key_file).with_context(|| {
            format!("admin key {} (does `tollgate up` use this data folder?)", key_file.display())
        })?;
        let target = Target::new(&url, &ca, &key)?;
        Ok(target.connect(Protocol::Either).await?)
    }
}

/// Returns the address of the config's admin listener, as this host reaches it.
fn url(config: &Config) -> String {
    let mut address = config.gateway().admin_listen;
    match address.ip() {
        // An unspecified address is no target, but a listener on it also listens on
        // loopback.
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    format!("https://{address}")
}

/// A request to the admin listener, with its path.
#[derive(Clone, Copy, Debug)]
pub enum Ask<'a> {
    Get(&'a str),
    Post(&'a str),
    Delete(&'a str),
}

/// Sends a request without a body and returns the body of a successful answer.
///
/// # Errors
/// Any other answer, with the gateway's message.
pub async fn ask(connection: &Connection, ask: Ask<'_>) -> Result<String> {
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
    let response = match ask {
        Ask::Get(path) => connection.get(path).await?,
        Ask::Post(path) => connection.post(path, Default::default()).await?,
        Ask::Delete(path) => connection.delete(path).await?,
    };
    let status = response.status();
    let body = response.into_body().collect().await?.to_bytes();
    let body = String::from_utf8(body.to_vec()).context("cannot parse the gateway's answer")?;
    if status.is_success() {
        return Ok(body);
    }
    match serde_json::from_str::<Refused>(&body) {
        Ok(Refused { error }) if error.mistakes.is_empty() => {
            bail!("the gateway answered {status}: {}", error.message)
        }
        Ok(Refused { error }) => {
            bail!("the config in force stays, because:\n{}", error.mistakes.join("\n"))
        }
        Err(_) => bail!("the gateway answered {status}"),
    }
}
