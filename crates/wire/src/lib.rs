//! The protocol between gateway and worker, and the conversions between its
//! messages and the types of the domain crate. Values from the wire are checked
//! here, once, so that no other code handles unchecked figures.

mod block;
mod connect;
mod grammar;
mod link;

pub use block::{BLOCK_FORMAT, WireError, finish_reason};
pub use connect::{Client, ConnectError, RemoteWorker, WorkerAddress, connect};
pub use link::{LinkError, LinkFiles, LinkOwner};

/// Code generated from `proto/worker.proto`. `tests/generated.rs` says how to renew
/// it.
#[allow(missing_docs, clippy::all, clippy::pedantic, unreachable_pub, unused_qualifications)]
#[rustfmt::skip]
pub mod v1 {
    include!("generated/tollgate.worker.v1.rs");
}
