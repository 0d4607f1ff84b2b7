//! Support for tests of this and other crates: a fake worker, and components
//! that a simulation puts together by hand.

mod fake_worker;
mod limits;
mod test_keys;

use std::sync::Arc;

use tokio::sync::watch;
use tollgate_wire::v1::worker_client::WorkerClient;
use tonic::transport::{Channel, Endpoint};

pub use self::fake_worker::{CONTEXT, FakeRun, FakeWorker, MODEL};
pub use self::limits::{LIMITS_CONFIG, state_of};
pub use self::test_keys::TestKeys;
pub use crate::fuzz::TOKENIZER;
use crate::orders::Orders;
use crate::worker_identity::WorkerIdentity;
use crate::workers::{BatchPlaces, ConnectedWorker, Load, PlaceSharers};

/// Makes a connected worker without a connection, for a simulated wire. Calls to
/// the worker fail.
pub fn connected_worker(identity: Arc<WorkerIdentity>, orders: &Orders) -> Arc<ConnectedWorker> {
    let load = watch::channel(Load::default()).1;
    let places = BatchPlaces::new(4, PlaceSharers::default(), Arc::default());
    Arc::new(ConnectedWorker::new(identity, unconnected_client(), load, orders.clone(), places))
}

/// Makes a client that connects to no worker.
fn unconnected_client() -> WorkerClient<Channel> {
    WorkerClient::new(Endpoint::from_static("http://[::1]:9").connect_lazy())
}
