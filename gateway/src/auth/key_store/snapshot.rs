//! The keys in memory: of each no more than checking a request takes, since
//! there may be a million. Names that keys have in common are kept once.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;

use tollgate_domain::{PlanName, TenantId, UtcTime};

use super::super::scopes::Scopes;
use super::KeyStoreError;
use super::rows::{Checked, Stored, damaged};
use crate::auth::secret::number_of;

/// What requests are checked against, by the number that a key's id spells.
pub(super) type Entries = HashMap<u64, Box<Entry>>;

/// One key.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) mac: [u8; 32],
    pub(super) tenant: TenantId,
    /// `None`: whatever the tenant may.
    pub(super) scopes: Option<Arc<Scopes>>,
    pub(super) plan: Option<PlanName>,
    pub(super) expires: Option<UtcTime>,
    pub(super) is_revoked: bool,
    /// Whether what runs by it has to end.
    pub(super) ends_requests: bool,
}

impl Entry {
    pub(super) fn is_active(&self, now: UtcTime) -> bool {
        !self.is_revoked && self.expires.is_none_or(|expires| now < expires)
    }
}

/// The names and scopes that keys share. It only grows, with what is in the
/// database.
#[derive(Debug, Default)]
pub(super) struct Names {
    tenants: HashSet<TenantId>,
    plans: HashSet<PlanName>,
    /// By their JSON.
    scopes: HashMap<String, Option<Arc<Scopes>>>,
}

impl Names {
    /// A row as it is kept.
    pub(super) fn entry(&mut self, stored: Stored) -> Result<(u64, Box<Entry>), KeyStoreError> {
        let number = number_of(&stored.id).ok_or_else(|| damaged(&stored.id, "id"))?;
        let scopes = match self.scopes.get(&stored.scopes) {
            Some(scopes) => scopes.clone(),
            None => {
                let found: Scopes = serde_json::from_str(&stored.scopes)
                    .map_err(|_| damaged(&stored.id, "scopes"))?;
                let kept = (found != Scopes::everything()).then(|| Arc::new(found));
                self.scopes.insert(stored.scopes.clone(), kept.clone());
                kept
            }
        };
        let Checked { tenant, mac, expires, revoked, ends_requests, plan } = stored.check()?;
        let entry = Entry {
            mac,
            tenant: once(&mut self.tenants, tenant),
            scopes,
            plan: plan.map(|plan| once(&mut self.plans, plan)),
            expires,
            is_revoked: revoked.is_some(),
            ends_requests,
        };
        Ok((number, Box::new(entry)))
    }
}

/// The one that is kept and equals `name`.
fn once<N: Clone + Eq + Hash>(kept: &mut HashSet<N>, name: N) -> N {
    match kept.get(&name) {
        Some(kept) => kept.clone(),
        None => {
            kept.insert(name.clone());
            name
        }
    }
}
