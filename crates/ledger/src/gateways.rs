//! The gateways that share a database server: each has a number and a row, and beats.

use std::time::Duration;

use aws_lc_rs::rand;
use tollgate_sql::{Connection, Server, ServerAddress, SqlError};

use crate::error::StorageError;
use crate::rows::database::connect_primary;
use crate::rows::gateways;
pub use crate::rows::gateways::GatewayRow;

/// One gateway's row on the server. The calls block and must not come from async code.
pub struct Membership {
    address: ServerAddress,
    connection: Connection,
    name: String,
    number: u32,
    life: i64,
}

/// A failure to join or to beat.
#[derive(Debug, thiserror::Error)]
#[error("{address}: the list of gateways cannot be read or written")]
pub struct MembershipError {
    address: String,
    source: StorageError,
}

impl Membership {
    /// Adds a gateway to those that use the server. `name` tells it from the others for people.
    ///
    /// # Errors
    /// The server cannot be used.
    pub fn join(address: &ServerAddress, name: &str) -> Result<Self, MembershipError> {
        let failed = |source| error(address, source);
        let mut connection = connect(address).map_err(failed)?;
        let number = gateways::make_table(&mut connection)
            .and_then(|()| gateways::next_number(&connection))
            .map_err(|source| error(address, source.into()))?;
        let mut life = [0; 8];
        rand::fill(&mut life)
            .map_err(|_| error(address, StorageError::new(NoRandomNumbers, false)))?;
        let life = i64::from_le_bytes(life);
        let membership =
            Self { address: address.clone(), connection, name: name.to_owned(), number, life };
        membership.insert().map_err(|source| error(address, source.into()))?;
        Ok(membership)
    }

    /// Returns the gateway's number: 24 bits, which no earlier gateway of the server had.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Notes that this gateway runs, and that it has read the keys up to the generation
    /// `keys_seen`. Returns the number of gateways that run, this one included.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn beat(&mut self, keys_seen: i64) -> Result<u32, MembershipError> {
        if !self.connection.server().is_some_and(Server::is_connected) {
            self.connection =
                connect(&self.address).map_err(|source| error(&self.address, source))?;
        }
        self.beat_now(keys_seen).map_err(|source| error(&self.address, source.into()))
    }

    fn beat_now(&self, keys_seen: i64) -> Result<u32, SqlError> {
        let own = (self.number, self.life);
        if let Some(running) = gateways::beat(&self.connection, own, keys_seen)? {
            return Ok(running);
        }
        // The row was deleted, or the server was restored from an older backup.
        self.insert()?;
        let running = gateways::beat(&self.connection, own, keys_seen)?;
        Ok(running.unwrap_or(1))
    }

    /// Removes the gateway, so that the others have its share at once.
    ///
    /// # Errors
    /// The server does not answer; the row ends by itself then.
    pub fn leave(self) -> Result<(), MembershipError> {
        let left = gateways::delete(&self.connection, (self.number, self.life));
        left.map_err(|source| error(&self.address, source.into()))
    }

    fn insert(&self) -> Result<(), SqlError> {
        gateways::insert(&self.connection, (self.number, self.life), &self.name)
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the system has no random numbers")]
struct NoRandomNumbers;

fn connect(address: &ServerAddress) -> Result<Connection, StorageError> {
    Ok(connect_primary(address, SERVER_LIMIT)?.into())
}

fn error(address: &ServerAddress, source: StorageError) -> MembershipError {
    MembershipError { address: address.to_string(), source }
}

/// The time within which the server must answer.
const SERVER_LIMIT: Duration = Duration::from_secs(5);
