//! Readers: a few connections of their own, so that a statement never waits
//! for the writer nor the writer for a statement.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rusqlite::Connection;

use crate::{LedgerError, schema};

/// Idle connections kept; more readers at once open their own and close them.
const KEPT: usize = 4;

/// Reads a ledger, beside its writer in this or another process. Calls block
/// on the disk: an async caller makes them on a blocking thread.
#[derive(Clone)]
pub struct LedgerReader {
    shared: Arc<Shared>,
}

struct Shared {
    path: PathBuf,
    idle: Mutex<Vec<Connection>>,
}

impl LedgerReader {
    /// Opens for reading only.
    ///
    /// # Errors
    /// [`LedgerError::Open`] where there is no ledger, [`LedgerError::Format`]
    /// where there is one of another version.
    pub(crate) fn open(path: &Path) -> Result<Self, LedgerError> {
        let idle = Mutex::new(vec![schema::open_reader(path)?]);
        let shared = Shared { path: path.to_owned(), idle };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Runs `read` on one snapshot of the whole ledger.
    pub(crate) fn read<T>(
        &self,
        read: impl FnOnce(&Connection) -> Result<T, LedgerError>,
    ) -> Result<T, LedgerError> {
        // A poisoned pool is still a list of connections.
        let taken = self.shared.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut connection = match taken {
            Some(connection) => connection,
            None => schema::open_reader(&self.shared.path)?,
        };
        let snapshot = connection.transaction()?;
        let result = read(&snapshot);
        drop(snapshot);
        let mut idle = self.shared.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if result.is_ok() && idle.len() < KEPT {
            idle.push(connection);
        }
        result
    }
}
