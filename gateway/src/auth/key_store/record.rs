//! Conversions between a key's row in the database and its record.

use tollgate_domain::UtcTime;
use tollgate_ledger::keys::{KeyDatabaseError, KeyEnd, KeyFacts, KeyRow};

use super::super::scopes::Scopes;
use super::{KeyRecord, KeyStoreError};

impl KeyRecord {
    /// Returns the record of a row.
    pub(super) fn of(row: KeyRow) -> Result<Self, KeyStoreError> {
        let KeyRow { facts, label, created, rotated_from } = row;
        let scopes = read_scopes(&facts)?;
        let KeyFacts { id, tenant, mac: _, scopes: _, plan, end } = facts;
        let KeyEnd { expires, revoked, ends_requests } = end;
        Ok(Self {
            id,
            tenant,
            label,
            scopes,
            created,
            expires,
            revoked,
            ends_requests,
            rotated_from,
            plan,
        })
    }

    /// Returns the row of a new key with the HMAC `mac`.
    #[expect(clippy::expect_used, reason = "names and words serialise")]
    pub(super) fn row(&self, mac: [u8; 32]) -> KeyRow {
        let facts = KeyFacts {
            id: self.id.clone(),
            tenant: self.tenant.clone(),
            mac,
            scopes: serde_json::to_string(&self.scopes).expect("names and words serialise"),
            plan: self.plan.clone(),
            end: self.end(),
        };
        KeyRow {
            facts,
            label: self.label.clone(),
            created: self.created,
            rotated_from: self.rotated_from.clone(),
        }
    }

    /// Returns the state at `now`: `active`, `revoked` or `expired`.
    pub fn state(&self, now: UtcTime) -> &'static str {
        match (self.revoked, self.is_active(now)) {
            (Some(_), _) => "revoked",
            (None, true) => "active",
            (None, false) => "expired",
        }
    }

    /// Returns the facts about the end of the key.
    pub(super) fn end(&self) -> KeyEnd {
        let Self { expires, revoked, ends_requests, .. } = *self;
        KeyEnd { expires, revoked, ends_requests }
    }
}

/// Reads the scopes of a row.
pub(super) fn read_scopes(facts: &KeyFacts) -> Result<Scopes, KeyStoreError> {
    serde_json::from_str(&facts.scopes).map_err(|_| damaged(facts, "scopes"))
}

/// Returns the error that `column` of a row holds a value that no version writes.
pub(super) fn damaged(facts: &KeyFacts, column: &str) -> KeyStoreError {
    let (id, column) = (facts.id.to_string(), column.to_owned());
    KeyDatabaseError::Row { id, column }.into()
}
