//! The protocol between gateway and worker, and the conversions between its
//! messages and the domain's types. Nothing else touches generated code's
//! layout: what crosses the wire is checked here, once.

mod block;
mod connect;

pub use block::{BLOCK_FORMAT, WireError, finish_reason};
pub use connect::{ConnectError, connect};

/// Generated from `proto/worker.proto`; renewed as `tests/generated.rs` says.
#[allow(missing_docs, clippy::all, clippy::pedantic, unreachable_pub, unused_qualifications)]
#[rustfmt::skip]
pub mod v1 {
    include!("generated/tollgate.worker.v1.rs");
}
