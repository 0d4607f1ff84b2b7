//! The peer of a connection, as requests see it.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::HeaderMap;

use super::ListenerOptions;
use super::connection_limits::ConnectionPermit;
use super::connection_table::{BoundReached, ConnectionOwners, OpenConnection};

/// The other end of a connection. Clones share one connection, which stays
/// counted until the last clone is dropped.
#[derive(Clone)]
pub struct Peer {
    connection: Arc<PeerConnection>,
}

struct PeerConnection {
    address: SocketAddr,
    /// Their proxies are the ones that may name clients on this connection.
    options: Arc<ListenerOptions>,
    permit: ConnectionPermit,
}

impl Peer {
    pub(super) fn new(
        address: SocketAddr,
        options: Arc<ListenerOptions>,
        permit: ConnectionPermit,
    ) -> Self {
        Self { connection: Arc::new(PeerConnection { address, options, permit }) }
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
        let PeerConnection { address, options, .. } = &*self.connection;
        options.proxies.client(address.ip(), headers)
    }

    /// Returns true once a request on this connection has authenticated, or if the
    /// connection counts for no owner.
    pub fn is_authenticated(&self) -> bool {
        self.connection.permit.is_authenticated()
    }

    /// Marks the connection as authenticated. It no longer counts against the
    /// unauthenticated connections of its source; it counts for `owners`, until its
    /// end and whoever sends the next requests. At a bound an idle connection of the
    /// same owner is closed for it, or one of the owner with most at the same source.
    ///
    /// # Errors
    /// A bound, if none of the owner's connections is idle. The caller refuses the
    /// request; the connection closes after the response.
    pub fn authenticate(&self, owners: &ConnectionOwners) -> Result<(), BoundReached> {
        self.connection.permit.authenticate(owners)
    }

    /// Returns the connection as the table of connections sees it.
    pub(super) fn open_connection(&self) -> &Arc<OpenConnection> {
        self.connection.permit.connection()
    }
}
