//! Seats: the position of a request in the tree of shares.

use tollgate_domain::{Caller, KeyId, PoolName, TenantId};

use super::Weight;
use crate::schedule::{SchedulePolicy, Tier};

/// The position of a request in the tree: tier, share owner, tenant, key, and the weight of
/// the share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seat {
    pub(crate) tier: Tier,
    pub(crate) share_owner: Name,
    pub(crate) tenant: Name,
    pub(crate) key: Name,
    pub(crate) weight: Weight,
}

/// The name of a node at any level of the tree.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Name {
    Everyone,
    Pool(PoolName),
    Tenant(TenantId),
    Key(KeyId),
}

impl Seat {
    /// Creates the seat of a caller's requests under `policy`. `weight` belongs to the
    /// share owner and is above 0.
    pub fn new(
        policy: SchedulePolicy,
        tier: Tier,
        pool: Option<&PoolName>,
        caller: &Caller,
        weight: f64,
    ) -> Self {
        let weight = Weight::new(weight);
        let tenant = Name::Tenant(caller.tenant.clone());
        let key = Name::Key(caller.key.clone());
        match policy {
            SchedulePolicy::Fair | SchedulePolicy::TokenCounters => {
                let share_owner =
                    pool.map_or_else(|| tenant.clone(), |pool| Name::Pool(pool.clone()));
                Self { tier, share_owner, tenant, key, weight }
            }
            SchedulePolicy::KeyCounters => {
                Self { tier, share_owner: key.clone(), tenant, key, weight }
            }
            SchedulePolicy::FirstComeFirstServed => Self {
                tier,
                share_owner: Name::Everyone,
                tenant: Name::Everyone,
                key: Name::Everyone,
                weight: Weight::ONE,
            },
        }
    }
}
