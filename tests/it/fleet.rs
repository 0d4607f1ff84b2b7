//! Several gateways on one PostgreSQL server and one Redis server, for the tests of limits that
//! they share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tollgate_rates::testing::TestRedis;

use crate::postgres::{Database, until_gateways};
use crate::support::{Tollgate, get};

/// Held by a test that saturates gateways: two at once would share the processor.
pub(crate) static ALONE: Mutex<()> = Mutex::const_new(());

/// Gateways that share limits, and a key of `acme`.
pub(crate) struct Fleet {
    pub(crate) all: Vec<Arc<Tollgate>>,
    pub(crate) key: String,
}

impl Fleet {
    /// Starts gateways with `other` in their config, and waits until all of them share limits and
    /// know the key.
    pub(crate) async fn start(
        database: &Database<'_>,
        redis: &TestRedis,
        other: &str,
        number: u32,
    ) -> Self {
        let config = config(database, redis, other);
        let first = database.gateway_with("0", &config);
        let mut all = vec![Arc::new(first)];
        for at in 1..number {
            database.share_secrets(&all[0], &at.to_string());
            all.push(Arc::new(database.gateway_with(&at.to_string(), &config)));
        }
        let key = all[0].key("acme", &[]);
        for gateway in &all {
            until_gateways(gateway, number).await;
            until_shared(gateway, true).await;
            until_known(gateway, &key).await;
        }
        Self { all, key }
    }
}

/// Returns the config of a gateway on both servers.
pub(crate) fn config(database: &Database<'_>, redis: &TestRedis, other: &str) -> String {
    format!("{}\n[cluster.redis]\nurl = \"{}\"\n", database.config_with(other), redis.url())
}

pub(crate) async fn until_known(gateway: &Tollgate, key: &str) {
    let begun = Instant::now();
    while get(&gateway.connect(key).await, "/v1/models").await.0 == 401 {
        assert!(begun.elapsed() < Duration::from_secs(5), "the key is not known");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until the gateway shares limits on the server, or until it does not. Returns the time.
pub(crate) async fn until_shared(gateway: &Tollgate, are_shared: bool) -> Duration {
    let begun = Instant::now();
    let wanted = format!("\ntollgate_rates_shared {}\n", u8::from(are_shared));
    while !gateway.metrics().await.contains(&wanted) {
        assert!(begun.elapsed() < Duration::from_secs(20), "still not {wanted}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    begun.elapsed()
}
