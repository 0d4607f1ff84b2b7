//! What keys may be, where that is neither a number nor a name. How each is read
//! and shown stands in `read::fields`.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use tollgate_domain::TenantId;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// The name of a token issuer in config.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct IssuerName(String);

/// A token issuer that is believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issuer {
    /// Its name in config.
    pub name: String,
    /// The `iss` that its tokens bear.
    pub issuer: String,
    /// The `aud` that they are for.
    pub audience: String,
    /// The signatures that they may bear; not empty.
    pub algorithms: Vec<JwtAlgorithm>,
    /// Its public keys.
    pub keys: JwtKeys,
    /// The claim that names the tenant.
    pub tenant_claim: String,
    /// The tenants that it may name; all where `None`.
    pub tenants: Option<BTreeSet<TenantId>>,
    /// How far clocks may be apart.
    pub leeway: Duration,
}

/// Where an issuer's public keys are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JwtKeys {
    /// In PEM, one a file; all of the one family that the algorithms name.
    Pem(Vec<PathBuf>),
    /// In a JSON Web Key Set.
    Jwks(PathBuf),
    /// In a JSON Web Key Set that is fetched.
    Url {
        /// Where it is.
        url: HttpsUrl,
        /// Who may vouch for that place; the system's authorities where `None`.
        ca: Option<PathBuf>,
        /// How often it is fetched.
        refresh: Duration,
    },
}

/// An address of the web: `https://`, a host, perhaps a port and a path; no
/// name, no password, no fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpsUrl(String);

impl HttpsUrl {
    /// As it is written.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for HttpsUrl {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let rest = text.strip_prefix("https://").ok_or(())?;
        let authority = rest.split(['/', '?']).next().unwrap_or_default();
        let host = authority.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok());
        let host = host.map_or(authority, |(host, _)| host);
        let is_plain =
            text.bytes().all(|byte| byte.is_ascii_graphic() && !b"#@\\\"".contains(&byte));
        let is_host = host.starts_with('[') && host.ends_with(']')
            || host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte));
        if is_plain && is_host && !host.is_empty() && text.len() <= 2_048 {
            Ok(Self(text.to_owned()))
        } else {
            Err(())
        }
    }
}

/// As it is written.
impl fmt::Display for HttpsUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What computes in a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// The model, on its device.
    Model,
    /// Nothing: time passes as if something did.
    Synthetic,
}

impl FromStr for EngineKind {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "model" => Ok(Self::Model),
            "synthetic" => Ok(Self::Synthetic),
            _ => Err(()),
        }
    }
}

/// As it is written.
impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Model => "model",
            Self::Synthetic => "synthetic",
        })
    }
}

/// Who runs next on a synthetic device. All but the first are there to be
/// compared with it, and no other device can be given them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyntheticPolicy {
    /// Shares of device time by holder, tenant and key.
    Fair,
    /// In order of arrival.
    FirstCome,
    /// Shares of tokens.
    TokenCounters,
    /// Each key has a share of its own.
    KeyCounters,
}

impl SyntheticPolicy {
    const ALL: [Self; 4] = [Self::Fair, Self::FirstCome, Self::TokenCounters, Self::KeyCounters];
}

impl FromStr for SyntheticPolicy {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|policy| policy.to_string() == text).ok_or(())
    }
}

/// As it is written.
impl fmt::Display for SyntheticPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fair => "fair",
            Self::FirstCome => "first_come",
            Self::TokenCounters => "token_counters",
            Self::KeyCounters => "key_counters",
        })
    }
}

/// Where a model runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DeviceSelector {
    /// On the first GPU that can be used, else on the CPU.
    Auto,
    /// On the CPU.
    Cpu,
    /// On the first GPU that can be used, or on the one with this UUID or
    /// place in the driver's list.
    Cuda(Option<String>),
}

impl FromStr for DeviceSelector {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(None)),
            _ => match text.strip_prefix("cuda:") {
                Some(uuid) if !uuid.is_empty() => Ok(Self::Cuda(Some(uuid.to_owned()))),
                _ => Err(()),
            },
        }
    }
}

/// As it is written.
impl fmt::Display for DeviceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(uuid)) => write!(f, "cuda:{uuid}"),
        }
    }
}

/// How a trusted proxy names the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientFrom {
    /// By the header of each request.
    XForwardedFor,
    /// By the binary PROXY protocol, before a connection's first byte.
    ProxyV2,
}

impl FromStr for ClientFrom {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        [Self::XForwardedFor, Self::ProxyV2]
            .into_iter()
            .find(|from| from.to_string() == text)
            .ok_or(())
    }
}

/// As it is written.
impl fmt::Display for ClientFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::XForwardedFor => "x-forwarded-for",
            Self::ProxyV2 => "proxy-v2",
        })
    }
}

/// A signature by a private key that only the issuer has; those by a shared
/// secret are not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the names are RFC 7518's and RFC 8037's")]
pub enum JwtAlgorithm {
    RS256,
    RS384,
    RS512,
    PS256,
    PS384,
    PS512,
    ES256,
    ES384,
    EdDSA,
}

impl JwtAlgorithm {
    const ALL: [Self; 9] = [
        Self::RS256,
        Self::RS384,
        Self::RS512,
        Self::PS256,
        Self::PS384,
        Self::PS512,
        Self::ES256,
        Self::ES384,
        Self::EdDSA,
    ];

    /// The kind of key that makes it: `RSA`, `EC` or `Ed25519`.
    pub fn family(self) -> &'static str {
        match self {
            Self::RS256 | Self::RS384 | Self::RS512 => "RSA",
            Self::PS256 | Self::PS384 | Self::PS512 => "RSA",
            Self::ES256 | Self::ES384 => "EC",
            Self::EdDSA => "Ed25519",
        }
    }
}

impl FromStr for JwtAlgorithm {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|algorithm| algorithm.to_string() == text).ok_or(())
    }
}

/// As the token's `alg` says it.
impl fmt::Display for JwtAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl IssuerName {
    pub(crate) fn new(name: &str) -> Result<Self, tollgate_domain::ids::InvalidName> {
        // An issuer's name follows the rules of every other name.
        TenantId::new(name)
            .map(|name| Self(name.as_str().to_owned()))
            .map_err(|error| tollgate_domain::ids::InvalidName { kind: "issuer", ..error })
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}
