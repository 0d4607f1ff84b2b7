//! The edge: from bytes on a socket to an HTTP request and its [`Peer`].
//!
//! The crate bounds and times everything that a client can do before tollgate
//! knows who the client is. It knows no tenant, no plan and no JSON; the
//! [`Service`] behind a listener does. The tests that run the listener over
//! real sockets stand with that service, in `gateway/src/stack/socket_tests`.

pub mod drain_body;
pub mod listener;
pub mod request_ids;
pub mod source;
pub mod tls;

#[doc(hidden)]
pub mod fuzz;

pub use listener::{Listener, ListenerMetrics, ListenerOptions, Peer, Service};
