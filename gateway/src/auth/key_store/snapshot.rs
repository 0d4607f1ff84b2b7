//! The snapshot of the keys in memory. There may be a million keys, so each entry
//! holds only the facts that a check needs, and equal names are stored once.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use tollgate_domain::{PlanName, TenantId, UtcTime};
use tollgate_ledger::keys::KeyFacts;

use super::super::scopes::Scopes;
use super::KeyStoreError;
use super::record::{damaged, read_scopes};
use crate::auth::secret::number_of;

/// The entries of all keys, by the number that the id of a key spells.
pub(super) type Entries = HashMap<u64, Box<Entry>>;

/// The facts of one key that a check needs.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) mac: [u8; 32],
    pub(super) tenant: TenantId,
    /// The limits on use; `None` allows everything that the tenant may do.
    pub(super) scopes: Option<Arc<Scopes>>,
    pub(super) plan: Option<PlanName>,
    pub(super) expires: Option<UtcTime>,
    pub(super) is_revoked: bool,
    /// True if the running requests of the key must end.
    pub(super) ends_requests: bool,
    /// The time of the last use in this process, in Unix nanoseconds; 0 if there was none.
    pub(super) last_used: AtomicU64,
}

impl Entry {
    pub(super) fn is_active(&self, now: UtcTime) -> bool {
        !self.is_revoked && self.expires.is_none_or(|expires| now < expires)
    }
}

/// The names and scopes that several keys share. The maps only grow, but not
/// beyond the distinct values in the database.
#[derive(Debug, Default)]
pub(super) struct Names {
    tenants: HashSet<TenantId>,
    plans: HashSet<PlanName>,
    /// The scopes by their JSON; `None` for scopes without any limit.
    scopes: HashMap<String, Option<Arc<Scopes>>>,
}

impl Names {
    /// Returns the entry of a key, with the number of the key.
    pub(super) fn entry(&mut self, facts: KeyFacts) -> Result<(u64, Box<Entry>), KeyStoreError> {
        let number = number_of(facts.id.as_str()).ok_or_else(|| damaged(&facts, "id"))?;
        let scopes = match self.scopes.get(&facts.scopes) {
            Some(scopes) => scopes.clone(),
            None => {
                let found = read_scopes(&facts)?;
                let kept = (found != Scopes::everything()).then(|| Arc::new(found));
                self.scopes.insert(facts.scopes.clone(), kept.clone());
                kept
            }
        };
        let KeyFacts { id: _, tenant, mac, scopes: _, plan, end } = facts;
        let entry = Entry {
            mac,
            tenant: intern(&mut self.tenants, tenant),
            scopes,
            plan: plan.map(|plan| intern(&mut self.plans, plan)),
            expires: end.expires,
            is_revoked: end.revoked.is_some(),
            ends_requests: end.ends_requests,
            last_used: AtomicU64::new(0),
        };
        // Boxed, because a hash map keeps spare slots: an empty slot then costs a
        // pointer and not a whole entry.
        Ok((number, Box::new(entry)))
    }
}

/// Returns the kept name that equals `name`, and keeps `name` if there is none.
fn intern<N: Clone + Eq + Hash>(kept: &mut HashSet<N>, name: N) -> N {
    match kept.get(&name) {
        Some(kept) => kept.clone(),
        None => {
            kept.insert(name.clone());
            name
        }
    }
}
