//! The address of a server: checked once, before the first connection.

use std::fmt;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode};

/// The address of a server with the user, the password and the authority of its
/// certificate. `Debug` and `Display` leave the password out.
#[derive(Clone)]
pub struct ServerAddress(Arc<Checked>);

struct Checked {
    config: Config,
    /// `None` for a connection without TLS.
    tls: Option<ClientConfig>,
    shown: String,
}

/// An address that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ServerAddressError {
    /// The text is no URL of a PostgreSQL database.
    #[error("not the URL of a PostgreSQL database, such as postgres://user@host/database: {0}")]
    Url(String),
    /// The URL has a password, which every reader of the file would see.
    #[error("the URL has a password: write it into a file of its own")]
    Password,
    /// The URL lacks a part.
    #[error("the URL lacks {0}")]
    Lacks(&'static str),
    /// The server is on another machine, and nothing proves its name.
    #[error(
        "the server {host} is on another machine: name the authority of its certificate ('ca'), \
         or write sslmode=disable into the URL to connect without encryption"
    )]
    Unproved {
        /// The server's host.
        host: String,
    },
    /// The authority's file has no certificate, or a damaged one.
    #[error("the authority's file has no valid PEM certificate")]
    Authority,
}

impl ServerAddress {
    /// Checks an address. `authority` are the PEM certificates that the server's certificate
    /// must come from; with them the connection is encrypted and the server's name checked.
    ///
    /// # Errors
    /// The URL is invalid or lacks a part, or a server on another machine is named without
    /// an authority.
    pub fn new(
        url: &str,
        password: Option<&str>,
        authority: Option<&[u8]>,
    ) -> Result<Self, ServerAddressError> {
        let mut config: Config = url.parse().map_err(|error: tokio_postgres::Error| {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            ServerAddressError::Url(cause.unwrap_or_else(|| error.to_string()))
        })?;
        if config.get_password().is_some() {
            return Err(ServerAddressError::Password);
        }
        let user = config.get_user().ok_or(ServerAddressError::Lacks("the user"))?.to_owned();
        let database =
            config.get_dbname().ok_or(ServerAddressError::Lacks("the database"))?.to_owned();
        let host = config.get_hosts().first().ok_or(ServerAddressError::Lacks("the host"))?;
        let host = match host {
            Host::Tcp(name) => name.clone(),
            Host::Unix(path) => path.display().to_string(),
        };
        let is_plain = config.get_ssl_mode() == SslMode::Disable;
        if authority.is_none() && !is_plain && !is_local(config.get_hosts()) {
            return Err(ServerAddressError::Unproved { host });
        }
        let tls = match authority {
            Some(pem) if !is_plain => Some(tls_config(pem)?),
            _ => None,
        };
        config.ssl_mode(if tls.is_some() { SslMode::Require } else { SslMode::Disable });
        if let Some(password) = password {
            config.password(password);
        }
        config.application_name("tollgate");
        let shown = format!("{user}@{host}/{database}");
        Ok(Self(Arc::new(Checked { config, tls, shown })))
    }

    pub(super) fn config(&self) -> &Config {
        &self.0.config
    }

    pub(super) fn tls(&self) -> Option<ClientConfig> {
        self.0.tls.clone()
    }
}

fn is_local(hosts: &[Host]) -> bool {
    hosts.iter().all(|host| match host {
        Host::Unix(_) => true,
        Host::Tcp(name) => {
            let is_loopback = |address: std::net::IpAddr| address.is_loopback();
            name == "localhost" || name.parse().is_ok_and(is_loopback)
        }
    })
}

fn tls_config(authority: &[u8]) -> Result<ClientConfig, ServerAddressError> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(authority) {
        let certificate = certificate.map_err(|_| ServerAddressError::Authority)?;
        roots.add(certificate).map_err(|_| ServerAddressError::Authority)?;
    }
    if roots.is_empty() {
        return Err(ServerAddressError::Authority);
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|_| ServerAddressError::Authority)?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.shown)
    }
}

impl fmt::Debug for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(url: &str) -> String {
        ServerAddress::new(url, None, None).expect_err(url).to_string()
    }

    #[test]
    fn address_names_the_mistake() {
        for (url, said) in [
            ("mysql://u@db/x", "not the URL of a PostgreSQL database"),
            ("postgres://u:secret@db/x", "the URL has a password"),
            ("postgres://db/x", "the URL lacks the user"),
            ("postgres://u@/x", "the URL lacks the host"),
            ("postgres://u@localhost", "the URL lacks the database"),
            ("postgres://u@db/x", "the server db is on another machine"),
            ("postgres://u@10.0.0.7/x?sslmode=require", "the server 10.0.0.7 is on another"),
        ] {
            let refused = refusal(url);
            assert!(refused.starts_with(said), "{url}: {refused}");
            assert!(!refused.contains("secret"), "{refused}");
        }
        let authority = ServerAddress::new("postgres://u@db/x", None, Some(b"no PEM"));
        assert!(matches!(authority, Err(ServerAddressError::Authority)), "{authority:?}");
    }

    #[test]
    fn address_is_shown_without_password() {
        let url = "postgres://u@127.0.0.1:5433/x";
        let address = ServerAddress::new(url, Some("secret"), None).expect("a local server");
        assert_eq!(format!("{address} {address:?}"), "u@127.0.0.1/x u@127.0.0.1/x");
    }
}
