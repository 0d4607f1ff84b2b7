//! The memory for request bodies that are on their way: a budget for each share
//! owner, a pool or a tenant, and one for all. A tenant of a pool may use a part of
//! the pool's. Bytes are taken before they are kept and returned when the body is
//! dropped, so that slow or unfinished bodies cost no more memory than the budget.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tollgate_domain::TenantId;
use tollgate_serving::ShareOwner;

/// The sizes of the budget.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyBudgetOptions {
    /// Bytes for the bodies of one tenant of a pool.
    pub(crate) per_pooled_tenant: u64,
    /// Bytes for the bodies of one share owner.
    pub(crate) per_owner: u64,
    /// Bytes for the bodies of all tenants.
    pub(crate) total: u64,
}

/// The budget. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct BodyBudget {
    taken: Arc<Mutex<Taken>>,
}

#[derive(Debug)]
struct Taken {
    options: BodyBudgetOptions,
    all: u64,
    /// Owners without bytes are forgotten.
    owners: HashMap<ShareOwner, OwnerBytes>,
}

/// The bytes that the bodies of one share owner hold.
#[derive(Debug, Default)]
struct OwnerBytes {
    all: u64,
    /// Bytes by tenant. A tenant without bytes is forgotten.
    tenants: HashMap<TenantId, u64>,
}

/// The sums that hold once a body has more bytes.
struct Sums {
    tenant: u64,
    owner: u64,
    all: u64,
}

/// The reason for which the budget gives no more bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BudgetRefusal {
    /// The bodies of the tenant or of its pool hold as many bytes as this.
    Owner(u64),
    /// The bodies of all tenants hold as many bytes as they may.
    All,
}

/// Bytes of the budget that one body holds. The drop returns them.
#[derive(Debug)]
pub(crate) struct BodyBytes {
    budget: BodyBudget,
    owner: ShareOwner,
    tenant: TenantId,
    bytes: u64,
}

impl BodyBudget {
    pub(crate) fn new(options: BodyBudgetOptions) -> Self {
        let taken = Taken { options, all: 0, owners: HashMap::new() };
        Self { taken: Arc::new(Mutex::new(taken)) }
    }

    /// Puts other sizes in force. Bodies keep the bytes that they hold.
    pub(crate) fn adopt(&self, options: BodyBudgetOptions) {
        self.lock().options = options;
    }

    /// Returns a holder of no bytes for a body of `tenant`, of which `owner` owns the
    /// share.
    pub(crate) fn begin(&self, owner: ShareOwner, tenant: &TenantId) -> BodyBytes {
        BodyBytes { budget: self.clone(), owner, tenant: tenant.clone(), bytes: 0 }
    }

    /// Returns the bytes that all bodies hold.
    pub(crate) fn taken(&self) -> u64 {
        self.lock().all
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        // All sums change together, so a poisoned lock still holds true sums.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BodyBytes {
    /// Holds `bytes` in all, if the budget has them.
    ///
    /// # Errors
    /// The budget that is exhausted. Nothing is taken then.
    pub(crate) fn grow_to(&mut self, bytes: u64) -> Result<(), BudgetRefusal> {
        // A small body may hold more than it has.
        if bytes <= self.bytes {
            return Ok(());
        }
        let mut taken = self.budget.lock();
        let sums = self.sums(&taken, bytes)?;
        taken.all = sums.all;
        let owner = taken.owners.entry(self.owner.clone()).or_default();
        owner.all = sums.owner;
        owner.tenants.insert(self.tenant.clone(), sums.tenant);
        drop(taken);
        self.bytes = bytes;
        Ok(())
    }

    /// Checks that the budget has room for `bytes` in all now, and takes nothing.
    ///
    /// # Errors
    /// The budget that has no room.
    pub(crate) fn check(&self, bytes: u64) -> Result<(), BudgetRefusal> {
        self.sums(&self.budget.lock(), bytes).map(drop)
    }

    /// Returns the sums with `bytes` for this body.
    fn sums(&self, taken: &Taken, bytes: u64) -> Result<Sums, BudgetRefusal> {
        let BodyBudgetOptions { per_pooled_tenant, per_owner, total } = taken.options;
        let more = bytes.saturating_sub(self.bytes);
        let own = taken.owners.get(&self.owner);
        let tenant = own.and_then(|own| own.tenants.get(&self.tenant)).copied().unwrap_or(0);
        let owner = own.map_or(0, |own| own.all);
        let sums = Sums {
            tenant: tenant.saturating_add(more),
            owner: owner.saturating_add(more),
            all: taken.all.saturating_add(more),
        };
        // One tenant must not take all that its pool has.
        if matches!(self.owner, ShareOwner::Pool(_)) && sums.tenant > per_pooled_tenant {
            return Err(BudgetRefusal::Owner(per_pooled_tenant));
        }
        if sums.owner > per_owner {
            return Err(BudgetRefusal::Owner(per_owner));
        }
        // A few owners that hold the whole budget must not keep out the ordinary
        // requests of the others.
        if sums.all > total && sums.owner > GUARANTEED {
            return Err(BudgetRefusal::All);
        }
        Ok(sums)
    }

    /// Returns all bytes before the drop does.
    pub(crate) fn release(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        if bytes == 0 {
            return;
        }
        let mut taken = self.budget.lock();
        taken.all -= bytes;
        // Forgetting empty entries bounds the maps by the bodies that are on their way.
        if let Some(owner) = taken.owners.get_mut(&self.owner) {
            owner.all -= bytes;
            if let Some(own) = owner.tenants.get_mut(&self.tenant) {
                *own -= bytes;
                if *own == 0 {
                    owner.tenants.remove(&self.tenant);
                }
            }
            if owner.all == 0 {
                taken.owners.remove(&self.owner);
            }
        }
    }
}

impl Drop for BodyBytes {
    fn drop(&mut self) {
        self.release();
    }
}

/// Bytes that the bodies of a share owner may hold whatever the others hold.
const GUARANTEED: u64 = 256 * 1024;

#[cfg(test)]
mod tests {
    use tollgate_domain::PoolName;

    use super::*;

    fn tenant(name: &str) -> TenantId {
        TenantId::new(name).expect("a name")
    }

    fn budget(per_owner: u64, total: u64) -> BodyBudget {
        let per_pooled_tenant = per_owner / 2;
        BodyBudget::new(BodyBudgetOptions { per_pooled_tenant, per_owner, total })
    }

    fn pool(name: &str) -> ShareOwner {
        ShareOwner::Pool(PoolName::new(name).expect("a name"))
    }

    /// Begins a body of a tenant with a share of its own.
    fn begin(budget: &BodyBudget, name: &str) -> BodyBytes {
        budget.begin(ShareOwner::Tenant(tenant(name)), &tenant(name))
    }

    #[test]
    fn budget_bounds_tenant_and_all() {
        const MIB: u64 = 1 << 20;
        let budget = budget(2 * MIB, 3 * MIB);
        let mut first = begin(&budget, "acme");
        let mut second = begin(&budget, "acme");
        assert_eq!(first.grow_to(MIB), Ok(()));
        assert_eq!(first.grow_to(MIB), Ok(()), "the same bytes are not taken twice");
        assert_eq!(second.grow_to(MIB), Ok(()));
        assert_eq!(second.grow_to(MIB + 1), Err(BudgetRefusal::Owner(2 * MIB)));
        let mut third = begin(&budget, "other");
        assert_eq!(third.grow_to(MIB), Ok(()));
        assert_eq!(third.grow_to(MIB + 1), Err(BudgetRefusal::All));
        assert_eq!(budget.taken(), 3 * MIB);
        // What a refusal leaves is what was held before.
        drop(second);
        assert_eq!(third.grow_to(2 * MIB), Ok(()));
        drop((first, third));
        assert_eq!(budget.taken(), 0);
        assert!(budget.lock().owners.is_empty(), "owners without bytes are forgotten");
    }

    /// Eight tenants of one pool have the budget of one owner together, and one of them
    /// alone leaves a part of it to the others. Tenants with shares of their own have one
    /// each.
    #[test]
    fn tenants_of_pool_share_one_budget() {
        const MIB: u64 = 1 << 20;
        for (pool, expected) in [(Some(pool("trials")), 4), (None, 8)] {
            let owner =
                |name: &str| pool.clone().unwrap_or_else(|| ShareOwner::Tenant(tenant(name)));
            let budget = budget(4 * MIB, 64 * MIB);
            let names: Vec<_> = (0..8).map(|number| format!("t{number}")).collect();
            let mut held = Vec::new();
            for name in &names {
                let mut body = budget.begin(owner(name), &tenant(name));
                if body.grow_to(MIB).is_ok() {
                    held.push(body);
                }
            }
            assert_eq!(held.len(), expected, "{pool:?}");
            drop(held);
            let mut alone = budget.begin(owner("t0"), &tenant("t0"));
            let all = alone.check(4 * MIB);
            assert_eq!(all.is_ok(), pool.is_none(), "{pool:?}");
            assert_eq!(budget.taken(), 0, "a check takes nothing");
            assert_eq!(alone.grow_to(2 * MIB), Ok(()));
            let mut neighbour = budget.begin(owner("t1"), &tenant("t1"));
            assert_eq!(neighbour.grow_to(2 * MIB), Ok(()));
            alone.release();
            assert_eq!(budget.taken(), 2 * MIB);
            drop((alone, neighbour));
            assert!(budget.lock().owners.is_empty());
        }
    }

    #[test]
    fn budget_separates_pool_from_tenant_of_its_name() {
        let budget = budget(2 << 20, 8 << 20);
        let mut of_tenant = begin(&budget, "acme");
        assert_eq!(of_tenant.grow_to(2 << 20), Ok(()));
        let mut of_pool = budget.begin(pool("acme"), &tenant("newcomer"));
        assert_eq!(of_pool.grow_to(1 << 20), Ok(()));
        // The control: the same owner has no more.
        assert!(begin(&budget, "acme").grow_to(1).is_err());
    }

    #[test]
    fn budget_adopts_sizes_and_keeps_held_bytes() {
        let budget = budget(2 << 20, 8 << 20);
        let mut body = begin(&budget, "acme");
        assert_eq!(body.grow_to(2 << 20), Ok(()));
        budget.adopt(BodyBudgetOptions { per_pooled_tenant: 1, per_owner: 1, total: 8 << 20 });
        assert_eq!(budget.taken(), 2 << 20);
        assert_eq!(begin(&budget, "acme").grow_to(1), Err(BudgetRefusal::Owner(1)));
        let per_owner = 3 << 20;
        budget.adopt(BodyBudgetOptions { per_pooled_tenant: 1, per_owner, total: 8 << 20 });
        assert_eq!(body.grow_to(per_owner), Ok(()));
    }

    #[test]
    fn full_budget_keeps_room_for_small_bodies() {
        let budget = budget(1 << 20, 1 << 20);
        let mut hog = begin(&budget, "mallory");
        assert_eq!(hog.grow_to(1 << 20), Ok(()));
        let mut small: Vec<_> = (0..64).map(|_| begin(&budget, "acme")).collect();
        assert!(small.iter_mut().all(|body| body.grow_to(4_096).is_ok()));
        assert_eq!(begin(&budget, "acme").grow_to(1), Err(BudgetRefusal::All));
    }
}
