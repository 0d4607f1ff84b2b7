//! The owners of a connection: the key, the tenant and the pool of its first
//! authenticated request, with the bounds that config sets for them. The edge
//! counts by numbers and knows none of the names.

use std::hash::{BuildHasher as _, RandomState};

use tollgate_config::{Config, Tenant};
use tollgate_edge::Peer;
use tollgate_edge::listener::{BoundReached, ConnectionOwners, OwnerBound, OwnerId};

use tollgate_serving::ConfiguredTenant;

use crate::auth::AuthenticatedCaller;
use crate::reply::ApiError;

/// The numbers of owners. Clones draw the same numbers.
#[derive(Clone, Debug, Default)]
pub(crate) struct OwnerNumbers {
    /// Keyed at random, so that no client can choose names with one number.
    hasher: RandomState,
}

impl OwnerNumbers {
    /// Counts the connection of `peer` for the owners of its first authenticated
    /// request. A connection with requests of several callers stays with the first.
    ///
    /// # Errors
    /// [`ApiError::ConnectionLimit`]: the connection is closed after the response.
    /// [`ApiError::Draining`]: it is closed because of an earlier caller's bound.
    pub(crate) fn authenticate(
        &self,
        peer: &Peer,
        caller: &AuthenticatedCaller,
        tenant: &ConfiguredTenant,
    ) -> Result<(), ApiError> {
        // Looked at first, because a connection is counted once and has many requests.
        if peer.is_authenticated() {
            return Ok(());
        }
        let (tenant, config) = (tenant.tenant(), tenant.config());
        let owners = self.owners(caller, tenant, config);
        peer.authenticate(&owners).map_err(|reached| {
            let (most, owner) = match reached {
                // The bound is another caller's, so this client is only told to connect again.
                BoundReached::Ending => return ApiError::Draining,
                BoundReached::Source(most) => (most, "your network address".to_owned()),
                BoundReached::Owner(index) => {
                    // The index fits: the table returns it only for the owners that it checked.
                    let bound = &owners.bounds[index];
                    (bound.most, self.name(bound.owner, caller, tenant))
                }
            };
            ApiError::ConnectionLimit { most, owner }
        })
    }

    /// Returns the bounds on a caller's connections, the narrowest first. A plan's
    /// number applies to what the plan limits. The default of a key does not apply
    /// below a tenant whose plan names a number.
    fn owners(
        &self,
        caller: &AuthenticatedCaller,
        tenant: &Tenant,
        config: &Config,
    ) -> ConnectionOwners {
        let defaults = &config.gateway().connections;
        let key_plan = caller.plan().and_then(|plan| config.plan(plan));
        let of_key = key_plan.and_then(|plan| plan.connections);
        let of_tenant = tenant.plan.as_ref().and_then(|plan| plan.connections);
        let of_key = of_key.or(of_tenant.is_none().then_some(defaults.per_key));
        let pool = tenant.pool.as_ref();
        let bounds = [
            of_key.map(|most| OwnerBound { owner: self.key(caller), most }),
            Some(OwnerBound {
                owner: self.tenant(tenant),
                most: of_tenant.unwrap_or(defaults.per_tenant),
            }),
            pool.and_then(|pool| {
                let most = pool.plan.connections?;
                Some(OwnerBound { owner: self.pool(pool.name.as_str()), most })
            }),
        ];
        // The pool stands for its tenants, as it does for shares of a device.
        let holder = match (pool, &tenant.plan) {
            (Some(pool), None) => self.pool(pool.name.as_str()),
            _ => self.tenant(tenant),
        };
        ConnectionOwners { bounds: bounds.into_iter().flatten().collect(), holder }
    }

    /// Returns the owner as a client knows it.
    fn name(&self, owner: OwnerId, caller: &AuthenticatedCaller, tenant: &Tenant) -> String {
        if owner == self.key(caller) {
            format!("key {}", caller.key())
        } else if owner == self.tenant(tenant) {
            format!("tenant {}", tenant.name)
        } else {
            let pool = tenant.pool.as_ref().map_or("", |pool| pool.name.as_str());
            format!("pool {pool}")
        }
    }

    fn key(&self, caller: &AuthenticatedCaller) -> OwnerId {
        // With the kind, so that a key and a tenant of one name have different numbers.
        OwnerId(self.hasher.hash_one(("key", caller.caller())))
    }

    fn tenant(&self, tenant: &Tenant) -> OwnerId {
        OwnerId(self.hasher.hash_one(("tenant", &tenant.name)))
    }

    fn pool(&self, name: &str) -> OwnerId {
        OwnerId(self.hasher.hash_one(("pool", name)))
    }
}

#[cfg(test)]
mod tests {
    use crate::api::tests::test_gateway::TestGateway;

    const CONFIG: &str = r#"
[gateway.connections]
per_key = 5
per_tenant = 6
[plans.open]
[plans.wide]
connections = 40
[plans.trial]
connections = 9
[pools.trials]
plan = "trial"
[tenants.acme]
plan = "PLAN"
[tenants.other]
pool = "trials"
"#;

    /// Checks the bounds of `tenant`'s connections if the plan of acme is `plan`.
    async fn check(tenant: &str, plan: &str, expected: &[(&str, u32)]) {
        let config = CONFIG.replace("PLAN", plan);
        let gateway = TestGateway::open(TestGateway::folder(), &config, &[]).await;
        let caller = gateway.caller(tenant);
        let (config, numbers) = (gateway.api.config.current(), &gateway.api.owner_numbers);
        let tenant = config.tenant(caller.tenant()).expect("a tenant");
        let owners = numbers.owners(&caller, tenant, &config);
        let named = owners.bounds.iter().map(|bound| {
            let name = numbers.name(bound.owner, &caller, tenant);
            (name.split(' ').next().unwrap_or_default().to_owned(), bound.most)
        });
        let expected: Vec<_> =
            expected.iter().map(|&(owner, most)| (owner.to_owned(), most)).collect();
        assert_eq!(named.collect::<Vec<_>>(), expected, "{plan}");
        let is_pool = owners.bounds.len() == 3;
        let holder = numbers.name(owners.holder, &caller, tenant);
        assert_eq!(holder.starts_with("pool "), is_pool, "{holder}");
    }

    #[tokio::test]
    async fn connection_bounds_follow_plans() {
        check("acme", "open", &[("key", 5), ("tenant", 6)]).await;
        check("acme", "wide", &[("tenant", 40)]).await;
        check("other", "open", &[("key", 5), ("tenant", 6), ("pool", 9)]).await;
    }
}
