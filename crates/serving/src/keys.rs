//! The questions that serving asks about API keys. The key store of the front
//! door answers them; serving never sees a secret.

use std::collections::BTreeMap;

use tollgate_domain::{Caller, KeyId, PlanName};

/// A directory of API keys. Every method is a lookup in memory.
pub trait KeyDirectory: Send + Sync {
    /// Returns the plan that limits the key alone, if one does.
    fn plan_of(&self, key: &KeyId) -> Option<PlanName>;

    /// Returns the plans that limit keys in use, with the number of keys of each.
    fn plans(&self) -> BTreeMap<PlanName, usize>;

    /// True if `caller` can have asked, now or before: its tenant has or had such
    /// a key, or the key stands for the subject of a token.
    fn may_have_asked(&self, caller: &Caller) -> bool;

    /// True if the key was revoked and its running requests must end.
    fn ends_requests(&self, key: &KeyId) -> bool;
}
