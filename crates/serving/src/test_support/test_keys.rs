//! A key directory for tests.

use std::collections::BTreeMap;

use tollgate_domain::{Caller, KeyId, PlanName};

use crate::KeyDirectory;

/// A directory in which each key has a fixed plan. Keys that stand for the subject
/// of a token, `jwt:` in front, may have asked for every tenant.
#[derive(Clone, Debug, Default)]
pub struct TestKeys {
    /// The plans of keys.
    pub plans: BTreeMap<KeyId, PlanName>,
}

impl KeyDirectory for TestKeys {
    fn plan_of(&self, key: &KeyId) -> Option<PlanName> {
        self.plans.get(key).cloned()
    }

    fn plans(&self) -> BTreeMap<PlanName, usize> {
        let mut plans = BTreeMap::new();
        for plan in self.plans.values() {
            *plans.entry(plan.clone()).or_default() += 1;
        }
        plans
    }

    fn may_have_asked(&self, caller: &Caller) -> bool {
        caller.key.as_str().starts_with("jwt:")
    }

    fn ends_requests(&self, _: &KeyId) -> bool {
        false
    }
}
