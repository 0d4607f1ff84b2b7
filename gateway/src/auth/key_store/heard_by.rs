//! The gateways that have read a change of keys, and those that have not.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tollgate_ledger::keys::GatewayRow;

/// The gateways that have read a change of keys, and those that have not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HeardBy {
    /// The gateways that have read the change.
    pub seen: usize,
    /// All gateways that may accept keys.
    pub of: usize,
    /// The gateways that have not read the change.
    pub unaware: Vec<UnawareGateway>,
}

/// A gateway that has not read a change of keys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UnawareGateway {
    /// The name of its machine, and its address for callers.
    pub name: String,
    /// The time after which it accepts no keys unless it reads them anew, in whole seconds.
    pub stops_in_seconds: u64,
}

impl HeardBy {
    pub(super) fn of(gateways: Vec<GatewayRow>) -> Self {
        let of = gateways.len();
        let unaware: Vec<UnawareGateway> = gateways
            .into_iter()
            .filter(|gateway| !gateway.has_seen)
            .map(|GatewayRow { name, silent_ms, .. }| UnawareGateway {
                name,
                stops_in_seconds: MOST_SILENT_SECONDS.saturating_sub(silent_ms / 1_000),
            })
            .collect();
        Self { seen: of - unaware.len(), of, unaware }
    }
}

/// Writes `seen by 3 of 3 gateways`, or names those that have not seen the change.
impl fmt::Display for HeardBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seen by {} of {} gateways", self.seen, self.of)?;
        for UnawareGateway { name, stops_in_seconds } in &self.unaware {
            write!(f, "; not yet by {name}, which stops within {stops_in_seconds} s otherwise")?;
        }
        Ok(())
    }
}

/// The time for which a gateway may accept keys after its last beat, in seconds: those 90 after
/// the last answer of the server, and the time until the beat after that answer.
const MOST_SILENT_SECONDS: u64 = 95;
