//! A connection to the database server that is made again after a failure.

use std::time::Duration;

use tollgate_sql::{Connection, Server, ServerAddress, SqlError};

use crate::error::StorageError;
use crate::rows::database::connect_primary;

/// A connection that is made at its first use, and again after each failure.
pub(crate) struct ServerConnection {
    address: ServerAddress,
    open: Option<Connection>,
}

/// A failure of the server, with its address.
#[derive(Debug)]
pub(crate) struct ServerFailure {
    pub(crate) address: String,
    pub(crate) source: StorageError,
}

impl ServerConnection {
    pub(crate) fn new(address: ServerAddress) -> Self {
        Self { address, open: None }
    }

    pub(crate) fn address(&self) -> &ServerAddress {
        &self.address
    }

    /// Runs calls on the connection.
    pub(crate) fn run<T>(
        &mut self,
        run: impl FnOnce(&mut Connection) -> Result<T, SqlError>,
    ) -> Result<T, ServerFailure> {
        let is_open =
            |connection: &Connection| connection.server().is_some_and(Server::is_connected);
        let mut connection = match self.open.take().filter(is_open) {
            Some(connection) => connection,
            None => {
                connect_primary(&self.address, LIMIT).map_err(|source| self.failure(source))?.into()
            }
        };
        let done = run(&mut connection).map_err(|source| self.failure(source.into()))?;
        // A connection that failed is closed: an answer may still be on its way.
        self.open = Some(connection);
        Ok(done)
    }

    fn failure(&self, source: StorageError) -> ServerFailure {
        ServerFailure { address: self.address.to_string(), source }
    }
}

/// The time within which the server must answer.
const LIMIT: Duration = Duration::from_secs(5);
