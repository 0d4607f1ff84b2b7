//! The gateways that share a database server: each has a number and a row, and beats.

use aws_lc_rs::rand;
use tollgate_sql::{ServerAddress, SqlError};

use crate::error::StorageError;
use crate::rows::gateways;
pub use crate::rows::gateways::{Beat, GatewayRow};
use crate::server_connection::{ServerConnection, ServerFailure};

/// One gateway's row on the server. The calls block and must not come from async code.
pub struct Membership {
    connection: ServerConnection,
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
        let mut connection = ServerConnection::new(address.clone());
        let number = connection.run(|connection| {
            gateways::make_table(connection)?;
            gateways::next_number(connection)
        })?;
        let mut life = [0; 8];
        rand::fill(&mut life).map_err(|_| MembershipError {
            address: address.to_string(),
            source: StorageError::new(NoRandomNumbers, false),
        })?;
        let life = i64::from_le_bytes(life);
        connection.run(|connection| gateways::insert(connection, (number, life), name))?;
        Ok(Self { connection, name: name.to_owned(), number, life })
    }

    /// Returns the gateway's number: 24 bits, which no earlier gateway of the server had.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Notes that this gateway runs, and that it has read the keys up to the generation
    /// `keys_seen`.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn beat(&mut self, keys_seen: i64) -> Result<Beat, MembershipError> {
        let (own, name) = ((self.number, self.life), &self.name);
        Ok(self.connection.run(|connection| {
            if let Some(beat) = gateways::beat(connection, own, keys_seen)? {
                return Ok(beat);
            }
            // The row was deleted, or the server was restored from an older backup.
            gateways::insert(connection, own, name)?;
            gateways::beat(connection, own, keys_seen)?.ok_or(SqlError::NoRow)
        })?)
    }

    /// Removes the gateway, so that the others have its share at once.
    ///
    /// # Errors
    /// The server does not answer; the row ends by itself then.
    pub fn leave(mut self) -> Result<(), MembershipError> {
        let own = (self.number, self.life);
        Ok(self.connection.run(|connection| gateways::delete(connection, own))?)
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the system has no random numbers")]
struct NoRandomNumbers;

impl From<ServerFailure> for MembershipError {
    fn from(ServerFailure { address, source }: ServerFailure) -> Self {
        Self { address, source }
    }
}
