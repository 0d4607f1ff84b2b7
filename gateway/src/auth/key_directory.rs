//! The key store as the serving crate sees it.

use std::collections::BTreeMap;

use tollgate_domain::{Caller, KeyId, PlanName};
use tollgate_serving::KeyDirectory;

use super::KeyStore;

impl KeyDirectory for KeyStore {
    fn plan_of(&self, key: &KeyId) -> Option<PlanName> {
        Self::plan_of(self, key)
    }

    fn plans(&self) -> BTreeMap<PlanName, usize> {
        Self::plans(self)
    }

    fn may_have_asked(&self, caller: &Caller) -> bool {
        self.may_be(caller)
    }

    fn ends_requests(&self, key: &KeyId) -> bool {
        Self::ends_requests(self, key)
    }
}
