//! The database of API keys and of named admins: a file of its own beside the ledger, with a connection
//! of its own, so that a key check never waits for a commit of the ledger. The
//! database holds a keyed hash of each key and never the key.
//!
//! Nothing is decided about keys here. Rows go in and out, each change under a number
//! of its own, and each change waits in a queue for the audit log.

use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tollgate_domain::{AdminName, KeyId, TenantId, UtcTime};

use crate::act::AdminAction;
use crate::error::StorageError;
use crate::rows::admins;
pub use crate::rows::admins::AdminRow;
use crate::rows::key_actions::{self, KeyActionRow};
pub use crate::rows::key_database::DataVersion;
use crate::rows::key_database::{FORMAT, KeyConnection, KeyTables, KeyTransaction};
use crate::rows::keys::{self, KeyRowError};
pub use crate::rows::keys::{ChangeNumber, KeyEnd, KeyFacts, KeyRow};

/// The open key database. Several processes may have it open.
pub struct KeyDatabase {
    path: PathBuf,
    connection: KeyConnection,
}

/// A change of keys, which is written as a whole or not at all.
pub struct KeyChange<'d> {
    path: &'d Path,
    tables: KeyTables<'d>,
    number: ChangeNumber,
}

/// The keys as they were at one time.
pub struct KeySnapshot<'d> {
    path: &'d Path,
    transaction: KeyTransaction<'d>,
}

/// Reasons why keys cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum KeyDatabaseError {
    /// The database failed.
    #[error("{path}: the key database failed")]
    Database {
        /// The path of the file.
        path: PathBuf,
        /// The cause.
        source: StorageError,
    },
    /// The file cannot be created.
    #[error("{path}: cannot be opened")]
    File {
        /// The path of the file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The database was written by another version of the program.
    #[error("{path}: the key database has format {found}; this version reads format {FORMAT}")]
    Format {
        /// The path of the file.
        path: PathBuf,
        /// The format of the file.
        found: i64,
    },
    /// A row holds a value that no version writes.
    #[error("key {id}: column {column} is damaged")]
    Row {
        /// The id in the row.
        id: String,
        /// The name of the column.
        column: String,
    },
    /// A time is after the year 2262, the last that the database can hold.
    #[error("the time is after the year 2262")]
    Time,
}

impl KeyDatabase {
    /// Opens `keys.db` in the folder `data`. Makes the file with mode 0600 if there is
    /// none, and migrates an older format.
    ///
    /// # Errors
    /// The file cannot be created or read, or has an unknown format.
    pub fn open(data: &Path) -> Result<Self, KeyDatabaseError> {
        let path = data.join("keys.db");
        create_missing(&path)
            .map_err(|source| KeyDatabaseError::File { path: path.clone(), source })?;
        let mut connection = KeyConnection::open(&path).map_err(at(&path))?;
        match connection.prepare().map_err(at(&path))? {
            None => Ok(Self { path, connection }),
            Some(found) => Err(KeyDatabaseError::Format { path, found }),
        }
    }

    /// Returns the version of the data, which differs after another connection has
    /// changed a key. The call costs one short query.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn data_version(&self) -> Result<DataVersion, KeyDatabaseError> {
        self.connection.data_version().map_err(at(&self.path))
    }

    /// Returns the keys of `tenant`, or of all tenants, ordered by tenant and age.
    ///
    /// # Errors
    /// The database cannot be read, or a row is damaged.
    pub fn list(&self, tenant: Option<&TenantId>) -> Result<Vec<KeyRow>, KeyDatabaseError> {
        keys::list(self.connection.tables(), tenant).map_err(at(&self.path))
    }

    /// Returns up to `most` keys of `tenant`, or of all tenants, after the id `after`,
    /// ordered by id.
    ///
    /// # Errors
    /// The database cannot be read, or a row is damaged.
    pub fn page(
        &self,
        tenant: Option<&TenantId>,
        after: Option<&KeyId>,
        most: usize,
    ) -> Result<Vec<KeyRow>, KeyDatabaseError> {
        keys::page(self.connection.tables(), tenant, after, most).map_err(at(&self.path))
    }

    /// Returns all named admins, ordered by name.
    ///
    /// # Errors
    /// The database cannot be read, or a row is damaged.
    pub fn admins(&self) -> Result<Vec<AdminRow>, KeyDatabaseError> {
        admins::list(self.connection.tables()).map_err(at(&self.path))
    }

    /// Begins to read. All reads see the keys as they are at the first of them.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn snapshot(&mut self) -> Result<KeySnapshot<'_>, KeyDatabaseError> {
        let transaction = self.connection.snapshot().map_err(at(&self.path))?;
        Ok(KeySnapshot { path: &self.path, transaction })
    }

    /// Runs `change` and commits. If `change` fails, nothing is written. Each changed
    /// key adds an action to the queue for the audit log, with `actor` as its actor.
    ///
    /// # Errors
    /// The errors of `change`, or the database cannot be written.
    pub fn change<T, E: From<KeyDatabaseError>>(
        &mut self,
        actor: &str,
        change: impl FnOnce(&KeyChange<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        let path = self.path.as_path();
        let transaction = self.connection.begin().map_err(at(path))?;
        let tables = transaction.tables();
        let number = keys::next_change(tables).map_err(at(path))?;
        // Triggers of the database write the actions. Those that this change causes
        // come after `latest`, and they alone get the actor: a row without an actor was
        // caused by another program.
        let latest = key_actions::latest(tables).map_err(at(path))?;
        let done = change(&KeyChange { path, tables, number })?;
        key_actions::set_actor(tables, latest, actor).map_err(at(path))?;
        transaction.commit().map_err(at(path))?;
        Ok(done)
    }

    /// Returns up to `max` of the oldest actions that wait for the audit log, each
    /// with its number. An action without a known actor has the actor `unknown`.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn actions(&self, max: usize) -> Result<Vec<(i64, AdminAction)>, KeyDatabaseError> {
        let rows = key_actions::oldest(self.connection.tables(), max).map_err(at(&self.path))?;
        Ok(rows.into_iter().map(|row| (row.number, action(row))).collect())
    }

    /// Deletes the actions with these numbers. No number is used again.
    ///
    /// # Errors
    /// The database cannot be written.
    pub fn forget_actions(&mut self, numbers: &[i64]) -> Result<(), KeyDatabaseError> {
        // One transaction, so that a batch costs one sync of the disk.
        let transaction = self.connection.begin().map_err(at(&self.path))?;
        key_actions::delete(transaction.tables(), numbers).map_err(at(&self.path))?;
        transaction.commit().map_err(at(&self.path))
    }
}

impl KeyChange<'_> {
    /// Returns the key with the id `id`, with the changes so far.
    ///
    /// # Errors
    /// The database cannot be read, or the row is damaged.
    pub fn find(&self, id: &KeyId) -> Result<Option<KeyRow>, KeyDatabaseError> {
        keys::find(self.tables, id).map_err(at(self.path))
    }

    /// Inserts a new key.
    ///
    /// # Errors
    /// The database cannot be written, a key has this id already, or a time is after
    /// the year 2262.
    pub fn insert(&self, key: &KeyRow) -> Result<(), KeyDatabaseError> {
        keys::insert(self.tables, key, self.number).map_err(at(self.path))
    }

    /// Updates the facts about the end of the key `id`.
    ///
    /// # Errors
    /// The database cannot be written, or a time is after the year 2262.
    pub fn update_end(&self, id: &KeyId, end: &KeyEnd) -> Result<(), KeyDatabaseError> {
        keys::update_end(self.tables, id, end, self.number).map_err(at(self.path))
    }

    /// Returns all named admins, with the changes so far.
    ///
    /// # Errors
    /// The database cannot be read, or a row is damaged.
    pub fn admins(&self) -> Result<Vec<AdminRow>, KeyDatabaseError> {
        admins::list(self.tables).map_err(at(self.path))
    }

    /// Inserts a new admin.
    ///
    /// # Errors
    /// The database cannot be written, an admin has this name or this hash already, or the
    /// time is after the year 2262.
    pub fn insert_admin(&self, admin: &AdminRow) -> Result<(), KeyDatabaseError> {
        admins::insert(self.tables, admin).map_err(at(self.path))
    }

    /// Deletes an admin.
    ///
    /// # Errors
    /// The database cannot be written.
    pub fn delete_admin(&self, name: &AdminName) -> Result<(), KeyDatabaseError> {
        admins::delete(self.tables, name).map_err(at(self.path))
    }
}

impl KeySnapshot<'_> {
    /// Returns the number of the latest change.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn latest_change(&self) -> Result<ChangeNumber, KeyDatabaseError> {
        keys::latest_change(self.transaction.tables()).map_err(at(self.path))
    }

    /// Returns the number of keys.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn count(&self) -> Result<usize, KeyDatabaseError> {
        keys::count(self.transaction.tables()).map_err(at(self.path))
    }

    /// Calls `take` with the facts of each key that changed after `since`, in no
    /// particular order.
    ///
    /// # Errors
    /// The first error of `take`, or the database cannot be read, or a row is damaged.
    pub fn changed_since<E: From<KeyDatabaseError>>(
        &self,
        since: ChangeNumber,
        take: impl FnMut(KeyFacts) -> Result<(), E>,
    ) -> Result<(), E> {
        keys::changed_since(self.transaction.tables(), since, take).map_err(at(self.path))?
    }
}

/// Makes the file `path` if there is none, with mode 0600. SQLite would give it the mode of
/// the umask, which may let other users read it.
///
/// An existing file is never opened here: as soon as a process closes a file, it loses all
/// its locks on that file, and with them the locks of its open connections.
fn create_missing(path: &Path) -> std::io::Result<()> {
    // So that no thread connects between the creation by another and the closing.
    static CREATION: Mutex<()> = Mutex::new(());
    let _creation = CREATION.lock().unwrap_or_else(PoisonError::into_inner);
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        made => made.map(drop),
    }
}

/// Makes the action that the audit log records.
fn action(row: KeyActionRow) -> AdminAction {
    let KeyActionRow { number: _, id, at_utc_ms, operation, tenant, key, actor, detail } = row;
    AdminAction {
        id,
        // A damaged time or detail gets a default: an error here would hold back every later
        // action.
        at: UtcTime(u64::try_from(at_utc_ms).unwrap_or(0).saturating_mul(1_000_000)),
        operation,
        actor: actor.unwrap_or_else(|| "unknown".to_owned()),
        // An action on an admin concerns no tenant.
        user: (!tenant.is_empty()).then_some((tenant, Some(key))),
        detail: serde_json::from_str(&detail).unwrap_or_default(),
    }
}

/// Names the file in an error.
fn at<E: Into<KeyRowError>>(path: &Path) -> impl Fn(E) -> KeyDatabaseError {
    move |error| match error.into() {
        KeyRowError::Storage(source) => {
            KeyDatabaseError::Database { path: path.to_owned(), source }
        }
        KeyRowError::Damaged { id, column } => KeyDatabaseError::Row { id, column },
        KeyRowError::Time => KeyDatabaseError::Time,
    }
}
