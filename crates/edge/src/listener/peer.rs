//! The peer of a connection, as requests see it.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::HeaderMap;

use super::connection_limits::ConnectionPermit;
use crate::source::Proxies;

/// The other end of a connection. Clones share one connection, which stays
/// counted until the last clone is dropped.
#[derive(Clone)]
pub struct Peer {
    connection: Arc<PeerConnection>,
}

struct PeerConnection {
    address: SocketAddr,
    proxies: Arc<Proxies>,
    permit: ConnectionPermit,
}

impl Peer {
    pub(super) fn new(
        address: SocketAddr,
        proxies: Arc<Proxies>,
        permit: ConnectionPermit,
    ) -> Self {
        Self { connection: Arc::new(PeerConnection { address, proxies, permit }) }
    }

    /// Returns the address of the other end: a client, or a proxy. If a trusted
    /// proxy has named the client by the PROXY protocol, returns the client's
    /// address.
    pub fn address(&self) -> SocketAddr {
        self.connection.address
    }

    /// Returns the client of a request with these headers: the peer, or the
    /// client that a trusted proxy names in the headers.
    pub fn client(&self, headers: &HeaderMap) -> IpAddr {
        self.connection.proxies.client(self.connection.address.ip(), headers)
    }

    /// Marks the connection as authenticated. The connection no longer counts
    /// against the unauthenticated connections of its source.
    pub fn mark_authenticated(&self) {
        self.connection.permit.release_source();
    }
}
