//! A connection to a PostgreSQL server. Every call has a time limit, because a server
//! that is stopped keeps its connections open and never answers.

mod address;
mod codec;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::Future;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::runtime::Runtime;
use tokio_postgres::{Client, NoTls, Row, Statement};
use tokio_postgres_rustls::MakeRustlsConnect;

pub use self::address::{ServerAddress, ServerAddressError};
use self::codec::refer;
pub(crate) use self::codec::value_at;
use crate::error::SqlError;
use crate::params::Params;
use crate::value::OwnedValue;

/// Prepared statements that a connection keeps.
const KEPT_STATEMENTS: usize = 128;
/// Statements that are sent together. The library sends this many in their order.
const SENT_TOGETHER: usize = 30;
/// Rows that are read at once from a large result.
const FETCHED: u32 = 1_000;
/// The longest time, in milliseconds, that a statement waits for a lock.
const LOCK_TIMEOUT_MS: u32 = 5_000;

/// One connection to a server. It serves one thread at a time, and must not be used from
/// async code: a call blocks until the server has answered.
pub struct Server {
    client: Client,
    /// The time within which the server must answer a call.
    limit: Duration,
    /// The statements by the text of their callers.
    statements: RefCell<HashMap<String, Statement>>,
    /// Statements that are not sent yet.
    unsent: RefCell<Vec<(Statement, Vec<OwnedValue>)>>,
    /// True after an error that leaves the state of the connection unknown.
    is_broken: Cell<bool>,
    /// The number of cursors opened so far, for their names.
    cursors: Cell<u64>,
    /// Drives the connection during a call. `None` only while the value is dropped.
    runtime: Option<Runtime>,
}

/// A large result that is read in parts. It exists within a transaction.
pub(crate) struct Cursor<'c> {
    server: &'c Server,
    name: String,
    fetch: Statement,
}

impl Server {
    /// Connects to the server. `limit` is the time within which it must answer each call.
    ///
    /// # Errors
    /// The server cannot be reached, refuses the user, or does not answer.
    pub fn connect(address: &ServerAddress, limit: Duration) -> Result<Self, SqlError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(|_| SqlError::Closed)?;
        // The connection is a task of this runtime alone, and ends with it.
        let client = match address.tls() {
            Some(tls) => {
                let connecting = address.config().connect(MakeRustlsConnect::new(tls));
                let (client, connection) = runtime.block_on(within(limit, connecting))?;
                runtime.spawn(connection);
                client
            }
            None => {
                let connecting = address.config().connect(NoTls);
                let (client, connection) = runtime.block_on(within(limit, connecting))?;
                runtime.spawn(connection);
                client
            }
        };
        let server = Self {
            client,
            limit,
            statements: RefCell::default(),
            unsent: RefCell::default(),
            is_broken: Cell::new(false),
            cursors: Cell::new(0),
            runtime: Some(runtime),
        };
        // A commit is acknowledged only once it is on the server's disk, whatever the
        // server's own setting.
        server.batch(&format!(
            "SET synchronous_commit = on; SET lock_timeout = {LOCK_TIMEOUT_MS};
             SET client_min_messages = warning"
        ))?;
        Ok(server)
    }

    /// Returns the server's version as PostgreSQL numbers it, e.g. 150004 for 15.4.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn version(&self) -> Result<u32, SqlError> {
        let rows = self.query("SELECT current_setting('server_version_num')::int8", &())?;
        let row = rows.first().ok_or(SqlError::NoRow)?;
        crate::Row::of_server(row).get(0)
    }

    /// Returns true if the server is a standby, which accepts no writes.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn is_standby(&self) -> Result<bool, SqlError> {
        let rows = self.query("SELECT pg_is_in_recovery()", &())?;
        let row = rows.first().ok_or(SqlError::NoRow)?;
        crate::Row::of_server(row).get(0)
    }

    /// Returns true if the server answers on this connection.
    pub fn is_connected(&self) -> bool {
        self.batch("").is_ok()
    }

    /// Runs statements without parameters.
    pub(crate) fn batch(&self, sql: &str) -> Result<(), SqlError> {
        self.call(self.client.batch_execute(sql))
    }

    /// Runs a statement and returns the number of its rows.
    pub(crate) fn execute(&self, sql: &str, params: &dyn Params) -> Result<u64, SqlError> {
        let (statement, values) = self.bind(sql, params)?;
        self.call(self.client.execute(&statement, &refer(&values)))
    }

    /// Runs a statement whose number of rows nobody needs. It is sent together with later ones,
    /// so its error may come from a later call.
    pub(crate) fn send(&self, sql: &str, params: &dyn Params) -> Result<(), SqlError> {
        let bound = self.bind(sql, params)?;
        self.unsent.borrow_mut().push(bound);
        if self.unsent.borrow().len() < SENT_TOGETHER {
            return Ok(());
        }
        self.flush()
    }

    /// Sends the statements of [`Self::send`] and waits for their results.
    pub(crate) fn flush(&self) -> Result<(), SqlError> {
        let unsent = self.unsent.take();
        if unsent.is_empty() {
            return Ok(());
        }
        let values: Vec<_> = unsent.iter().map(|(_, values)| refer(values)).collect();
        let calls = unsent.iter().zip(&values);
        let calls = calls.map(|((statement, _), values)| self.client.execute(statement, values));
        self.call_now(async {
            // The first error is the cause of the others.
            join_all(calls).await.into_iter().try_for_each(|result| result.map(drop))
        })
    }

    /// Forgets the statements of [`Self::send`] that are not sent yet, before a rollback.
    pub(crate) fn discard(&self) {
        self.unsent.take();
    }

    /// Runs a query and returns all its rows.
    pub(crate) fn query(&self, sql: &str, params: &dyn Params) -> Result<Vec<Row>, SqlError> {
        let (statement, values) = self.bind(sql, params)?;
        self.call(self.client.query(&statement, &refer(&values)))
    }

    /// Opens a query whose rows are read in parts. The caller has begun a transaction.
    pub(crate) fn open_cursor(
        &self,
        sql: &str,
        params: &dyn Params,
    ) -> Result<Cursor<'_>, SqlError> {
        let number = self.cursors.get() + 1;
        self.cursors.set(number);
        let name = format!("rows_{number}");
        let declare = format!("DECLARE {name} NO SCROLL CURSOR FOR {}", numbered(sql));
        let statement = self.call(self.client.prepare(&declare))?;
        let values = owned(&statement, params)?;
        self.call(self.client.execute(&statement, &refer(&values)))?;
        let fetch = format!("FETCH FORWARD {FETCHED} FROM {name}");
        let fetch = self.call(self.client.prepare(&fetch))?;
        Ok(Cursor { server: self, name, fetch })
    }

    fn bind(
        &self,
        sql: &str,
        params: &dyn Params,
    ) -> Result<(Statement, Vec<OwnedValue>), SqlError> {
        let statement = self.prepare(sql)?;
        let values = owned(&statement, params)?;
        Ok((statement, values))
    }

    fn prepare(&self, sql: &str) -> Result<Statement, SqlError> {
        if let Some(known) = self.statements.borrow().get(sql) {
            return Ok(known.clone());
        }
        let statement = self.call(self.client.prepare(&numbered(sql)))?;
        let mut statements = self.statements.borrow_mut();
        // Texts with names of columns in them have many forms, so the map needs a bound.
        if statements.len() >= KEPT_STATEMENTS {
            statements.clear();
        }
        statements.insert(sql.to_owned(), statement.clone());
        Ok(statement)
    }

    /// Runs one call, after the statements that were to be sent before it.
    fn call<T>(
        &self,
        answer: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, SqlError> {
        self.flush()?;
        self.call_now(answer)
    }

    fn call_now<T>(
        &self,
        answer: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, SqlError> {
        let Some(runtime) = self.runtime.as_ref().filter(|_| !self.is_broken.get()) else {
            return Err(SqlError::Closed);
        };
        let answer = runtime.block_on(within(self.limit, answer));
        if let Err(error) = &answer {
            // An error with a code is the server's answer. After any other one nobody knows
            // what the server has done.
            let is_answer = matches!(error, SqlError::Server(error) if error.is_answer());
            self.is_broken.set(!is_answer);
        }
        answer
    }
}

async fn within<T>(
    limit: Duration,
    answer: impl Future<Output = Result<T, tokio_postgres::Error>>,
) -> Result<T, SqlError> {
    match tokio::time::timeout(limit, answer).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(SqlError::Silent { seconds: limit.as_secs() }),
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A plain drop of a runtime waits for its tasks, and panics in async code.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Cursor<'_> {
    /// Returns the next part of the rows; an empty one after the last.
    pub(crate) fn fetch(&mut self) -> Result<Vec<Row>, SqlError> {
        self.server.call(self.server.client.query(&self.fetch, &[]))
    }
}

impl Drop for Cursor<'_> {
    fn drop(&mut self) {
        // A failure is harmless: the end of the transaction closes the cursor.
        let _ = self.server.batch(&format!("CLOSE {}", self.name));
    }
}

fn owned(statement: &Statement, params: &dyn Params) -> Result<Vec<OwnedValue>, SqlError> {
    let mut values = Vec::with_capacity(statement.params().len());
    params.try_each(&mut |value| {
        let index = values.len() + 1;
        values.push(value.try_into().map_err(|source| SqlError::Value { index, source })?);
        Ok(())
    })?;
    let (expected, given) = (statement.params().len(), values.len());
    if expected != given {
        return Err(SqlError::Parameters { expected, given });
    }
    Ok(values)
}

/// Writes `?1` as `$1`, outside of quoted texts.
fn numbered(sql: &str) -> String {
    let mut is_quoted = false;
    let mut written = String::with_capacity(sql.len());
    for character in sql.chars() {
        is_quoted ^= character == '\'';
        written.push(if character == '?' && !is_quoted { '$' } else { character });
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbered_changes_parameters_and_no_texts() {
        let sql = "SELECT '?1', a FROM t WHERE a = ?1 AND b = 'it''s ?' AND c = ?12";
        let expected = "SELECT '?1', a FROM t WHERE a = $1 AND b = 'it''s ?' AND c = $12";
        assert_eq!(numbered(sql), expected);
    }
}
