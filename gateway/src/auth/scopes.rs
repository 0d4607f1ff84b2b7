//! The scopes of a credential. Scopes can only narrow what the tenant may do.

use std::net::IpAddr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tollgate_domain::{ModelName, Network};

/// A part of the API that a key can be limited to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/models`
    Models,
    /// `/v1/usage`
    Usage,
    /// `/v1/files` and `/v1/batches`
    Batches,
}

impl Endpoint {
    /// Every endpoint.
    pub const ALL: [Self; 5] =
        [Self::Chat, Self::Completions, Self::Models, Self::Usage, Self::Batches];

    /// Returns the name that the command line and the key database use.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Models => "models",
            Self::Usage => "usage",
            Self::Batches => "batches",
        }
    }
}

/// A name that no endpoint has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an endpoint: use chat, completions, models, usage or batches")]
pub struct UnknownEndpoint(String);

impl std::str::FromStr for Endpoint {
    type Err = UnknownEndpoint;
    fn from_str(text: &str) -> Result<Self, UnknownEndpoint> {
        Self::ALL
            .into_iter()
            .find(|endpoint| endpoint.as_str() == text)
            // Cut, so that the error stays short whatever the admin wrote.
            .ok_or_else(|| UnknownEndpoint(text.chars().take(64).collect()))
    }
}

/// The models, endpoints and networks to which a credential is limited. A list
/// that is `None` sets no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
// A limit that this version does not know must not be ignored: the key would allow
// more.
#[serde(deny_unknown_fields)]
pub struct Scopes {
    /// The models that the credential may use.
    #[schemars(with = "Option<Vec<String>>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub models: Option<Vec<ModelName>>,
    /// The endpoints that the credential may call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoints: Option<Vec<Endpoint>>,
    /// The networks from which the credential may be used.
    #[schemars(with = "Option<Vec<String>>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sources: Option<Vec<Network>>,
}

impl Scopes {
    /// Returns scopes without any limit.
    pub fn everything() -> Self {
        Self::default()
    }

    pub(super) fn has_model(&self, model: &ModelName) -> bool {
        self.models.as_ref().is_none_or(|models| models.contains(model))
    }

    /// True if the credential may be used from `address`. An unknown address is in
    /// no network.
    pub(super) fn has_source(&self, address: Option<IpAddr>) -> bool {
        self.sources.as_ref().is_none_or(|networks| {
            address.is_some_and(|address| networks.iter().any(|n| n.contains(address)))
        })
    }

    pub(super) fn has_endpoint(&self, endpoint: Endpoint) -> bool {
        self.endpoints.as_ref().is_none_or(|endpoints| endpoints.contains(&endpoint))
    }
}
