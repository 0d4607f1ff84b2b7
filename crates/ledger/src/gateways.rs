//! The gateways that share a database server: each has a number and a row, and beats.

use aws_lc_rs::rand;
use tollgate_sql::{Begin, ServerAddress, SqlError};

use crate::error::StorageError;
pub use crate::rows::gateway_days::GatewayStart;
pub use crate::rows::gateways::{Beat, GatewayRow};
pub use crate::rows::homes::{GatewayHome, HomeState, OtherGateway};
use crate::rows::{gateway_days, gateways, homes, slices};
use crate::server_connection::{ServerConnection, ServerFailure};
pub use tollgate_cluster::Silence;

/// One gateway's row on the server. The calls block and must not come from async code.
pub struct Membership {
    connection: ServerConnection,
    name: String,
    /// The id of the data folder, if it has one.
    home: Option<String>,
    number: u32,
    life: i64,
    earlier: Vec<u32>,
}

/// The data folders of the gateways on a server. The calls block and must not come from async
/// code.
pub struct GatewayHomes(ServerConnection);

/// The outcome of [`GatewayHomes::free`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freed {
    /// Unspent parts of this many caps are free.
    Caps(u32),
    /// The gateway may run, and may still use what it has.
    MayRun,
    /// No gateway has had this data folder.
    Unknown,
}

impl GatewayHomes {
    /// Makes a list over a server that gateways have joined. It connects at the first call.
    pub fn on(address: &ServerAddress) -> Self {
        Self(ServerConnection::new(address.clone()))
    }

    /// Returns all data folders.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn list(&mut self) -> Result<Vec<GatewayHome>, MembershipError> {
        Ok(self.0.run(|connection| homes::list(connection))?)
    }

    /// Begins to retire a gateway that is lost. From its next beat on it knows, and ends. Returns
    /// false if it has beaten since `lost` was read.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn retire(&mut self, lost: &OtherGateway) -> Result<bool, MembershipError> {
        Ok(self.0.run(|connection| {
            let transaction = connection.begin(Begin::Write)?;
            let is_retired = homes::retire(transaction.connection(), lost)?;
            transaction.commit()?;
            Ok(is_retired)
        })?)
    }

    /// Notes that a retired gateway has nothing of the caps any more.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn stop_retired(&mut self, lost: &OtherGateway) -> Result<(), MembershipError> {
        Ok(self.0.run(|connection| homes::stop_retired(connection, lost))?)
    }

    /// Frees what a gateway that never starts again has of the caps, and lets other gateways repeat
    /// requests that it has begun. Work of it that is in no ledger yet is given up.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn free(&mut self, home: &str) -> Result<Freed, MembershipError> {
        Ok(self.0.run(|connection| {
            let transaction = connection.begin(Begin::Write)?;
            let connection = transaction.connection();
            let Some(found) = homes::lock(connection, home)? else { return Ok(Freed::Unknown) };
            if found.may_run() {
                return Ok(Freed::MayRun);
            }
            let caps = slices::free(connection, home)?;
            homes::give_up(connection, home)?;
            transaction.commit()?;
            Ok(Freed::Caps(caps))
        })?)
    }
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
    /// `start` is given if it has a data folder.
    ///
    /// # Errors
    /// The server cannot be used.
    pub fn join(
        address: &ServerAddress,
        name: &str,
        start: Option<&GatewayStart<'_>>,
    ) -> Result<Self, MembershipError> {
        let mut connection = ServerConnection::new(address.clone());
        let number = connection.run(|connection| {
            gateways::make_table(connection)?;
            gateway_days::make_lives(connection)?;
            gateways::next_number(connection)
        })?;
        let mut life = [0; 8];
        rand::fill(&mut life).map_err(|_| MembershipError {
            address: address.to_string(),
            source: StorageError::new(NoRandomNumbers, false),
        })?;
        let life = i64::from_le_bytes(life);
        connection.run(|connection| gateways::insert(connection, (number, life), name))?;
        let earlier = connection.run(|connection| {
            let Some(start) = start else { return Ok(Vec::new()) };
            // Before the first request: whoever records its work must know the data folder.
            gateway_days::note_number(connection, number, start)?;
            gateway_days::numbers_before(connection, (start.home, start.life))
        })?;
        let (name, home) = (name.to_owned(), start.map(|start| start.home.to_owned()));
        Ok(Self { connection, name, home, number, life, earlier })
    }

    /// Returns the numbers of the earlier starts in the gateway's data folder.
    pub fn earlier_numbers(&self) -> &[u32] {
        &self.earlier
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
        let (name, home, number) = (&self.name, self.home.as_deref(), self.number);
        let own = (number, self.life);
        Ok(self.connection.run(|connection| {
            if let Some(home) = home {
                homes::see(connection, home, (name, number))?;
            }
            if let Some(beat) = gateways::beat(connection, own, keys_seen)? {
                return Ok(beat);
            }
            // The row was deleted, or the server was restored from an older backup.
            gateways::insert(connection, own, name)?;
            gateways::beat(connection, own, keys_seen)?.ok_or(SqlError::NoRow)
        })?)
    }

    /// Returns the other gateways that have not stopped. None without a data folder.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn others(&mut self) -> Result<Vec<OtherGateway>, MembershipError> {
        let Some(own) = &self.home else { return Ok(Vec::new()) };
        Ok(self.connection.run(|connection| homes::others(connection, own))?)
    }

    /// Removes the gateway, so that the others have its share at once.
    ///
    /// # Errors
    /// The server does not answer; the row ends by itself then.
    pub fn leave(mut self) -> Result<(), MembershipError> {
        let own = (self.number, self.life);
        Ok(self.connection.run(|connection| {
            if let Some(home) = &self.home {
                homes::stop(connection, home)?;
            }
            gateways::delete(connection, own)
        })?)
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
