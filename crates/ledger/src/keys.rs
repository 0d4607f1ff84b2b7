//! The database of API keys and of named admins: a file of its own beside the ledger, or
//! tables beside the ledger's on a server, which several gateways share. It has a connection
//! of its own, so that a key check never waits for a commit of the ledger. The
//! database holds a keyed hash of each key and never the key.
//!
//! Nothing is decided about keys here. Rows go in and out, each change under a number
//! of its own, and each change waits in a queue for the audit log.

use std::collections::HashSet;
use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tollgate_domain::{AdminName, KeyId, TenantId, UtcTime};

use crate::act::AdminAction;
use crate::error::StorageError;
use crate::options::DatabasePlace;
pub use crate::rows::admins::AdminRow;
pub use crate::rows::gateways::GatewayRow;
use crate::rows::key_actions::{self, KeyActionRow};
pub use crate::rows::key_database::DataVersion;
use crate::rows::key_database::{KeyConnection, KeyTables, KeyTransaction, OtherFormat};
use crate::rows::keys::{self, KeyRowError};
pub use crate::rows::keys::{ChangeNumber, KeyEnd, KeyFacts, KeyRow};
use crate::rows::{admins, copies, key_server_schema};

/// The open key database. Several processes may have it open.
pub struct KeyDatabase {
    place: DatabasePlace,
    connection: KeyConnection,
    /// The number of connections made so far.
    connections: u64,
}

/// A change of keys, which is written as a whole or not at all.
pub struct KeyChange<'d> {
    place: &'d DatabasePlace,
    tables: KeyTables<'d>,
    number: ChangeNumber,
}

/// The keys as they were at one time.
pub struct KeySnapshot<'d> {
    place: &'d DatabasePlace,
    transaction: KeyTransaction<'d>,
}

/// Reasons why keys cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum KeyDatabaseError {
    /// The database failed.
    #[error("{place}: the key database failed")]
    Database {
        /// The file, or user, host and database of the server.
        place: String,
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
    #[error("{place}: the key database has format {found}; this version reads format {expected}")]
    Format {
        /// The file, or user, host and database of the server.
        place: String,
        /// The format of the database.
        found: i64,
        /// The format that this version reads.
        expected: i64,
    },
    /// The keys of a file were to be moved to a server that has other ones.
    #[error("{place}: there are other keys already; name an empty database")]
    OtherKeys {
        /// User, host and database of the server.
        place: String,
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
    /// Opens the keys at `place`. A file is made with mode 0600 if there is none, and an older
    /// format of it is migrated. On a server the tables are made if there are none. The call
    /// must not come from async code.
    ///
    /// # Errors
    /// The file cannot be created or read, the server cannot be used, or the format is unknown.
    pub fn open(place: DatabasePlace) -> Result<Self, KeyDatabaseError> {
        if let DatabasePlace::File(path) = &place {
            create_missing(path)
                .map_err(|source| KeyDatabaseError::File { path: path.clone(), source })?;
        }
        let mut connection = connect(&place)?;
        match connection.prepare().map_err(at(&place))? {
            None => Ok(Self { place, connection, connections: 1 }),
            Some(OtherFormat { found, expected }) => {
                Err(KeyDatabaseError::Format { place: place.to_string(), found, expected })
            }
        }
    }

    /// Returns the place of the keys.
    pub fn place(&self) -> &DatabasePlace {
        &self.place
    }

    /// Returns the number of connections made so far. Behind a new one the server may have older
    /// keys than before: a standby took over, or a backup was restored.
    pub fn connections(&self) -> u64 {
        self.connections
    }

    /// Returns true if other machines may change the keys.
    pub fn is_shared(&self) -> bool {
        matches!(self.place, DatabasePlace::Server(_))
    }

    /// Returns the connection, which is made again if the server has ended it.
    fn connected(&mut self) -> Result<&mut KeyConnection, KeyDatabaseError> {
        if !self.connection.is_connected() {
            self.connection = connect(&self.place)?;
            self.connections += 1;
        }
        Ok(&mut self.connection)
    }

    /// Returns the version of the data, which differs after another connection has
    /// changed a key. The call costs one short query.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn data_version(&mut self) -> Result<DataVersion, KeyDatabaseError> {
        let version = self.connected()?.data_version();
        version.map_err(at(&self.place))
    }

    /// Returns true if the hashes on a server were made with the pepper that has this `mark`.
    /// The first call sets the mark. A file has its pepper beside it, and no mark.
    ///
    /// # Errors
    /// The server cannot be read or written.
    pub fn has_pepper_mark(&mut self, mark: &[u8; 32]) -> Result<bool, KeyDatabaseError> {
        if !self.is_shared() {
            return Ok(true);
        }
        self.connected()?;
        let transaction = self.connection.begin().map_err(at(&self.place))?;
        let found = key_server_schema::pepper_mark(transaction.tables(), mark);
        let found = found.map_err(at(&self.place))?;
        transaction.commit().map_err(at(&self.place))?;
        Ok(found == mark)
    }

    /// Returns the gateways that share these keys, each with whether it has read the keys up to
    /// `version`, ordered by name. Empty for a file.
    ///
    /// # Errors
    /// The server cannot be read.
    pub fn gateways(&mut self, version: DataVersion) -> Result<Vec<GatewayRow>, KeyDatabaseError> {
        if !self.is_shared() {
            return Ok(Vec::new());
        }
        let found = self.connected()?.gateways(version);
        found.map_err(at(&self.place))
    }

    /// Copies all keys, all admins and what waits for the audit log from this file to the
    /// server at `place`, in one transaction. Returns false if an earlier call has done so.
    ///
    /// # Errors
    /// A database cannot be read or written, or the server has other keys.
    pub fn copy_to_server(&mut self, place: DatabasePlace) -> Result<bool, KeyDatabaseError> {
        let mut server = Self::open(place)?;
        // Read apart: the server's connection is borrowed below.
        let here = self.list(None)?;
        let there = server.list(None)?;
        if !there.is_empty() || !server.admins()?.is_empty() {
            let there: HashSet<&KeyId> = there.iter().map(|key| &key.facts.id).collect();
            return match here.iter().all(|key| there.contains(&key.facts.id)) {
                true => Ok(false),
                false => Err(KeyDatabaseError::OtherKeys { place: server.place.to_string() }),
            };
        }
        let from = self.connection.snapshot().map_err(at(&self.place))?;
        let failed = at(&server.place);
        let to = server.connection.begin().map_err(&failed)?;
        copies::run_keys(from.tables(), to.tables()).map_err(&failed)?;
        to.commit().map_err(&failed)?;
        Ok(true)
    }

    /// Returns the keys of `tenant`, or of all tenants, ordered by tenant and age.
    ///
    /// # Errors
    /// The database cannot be read, or a row is damaged.
    pub fn list(&mut self, tenant: Option<&TenantId>) -> Result<Vec<KeyRow>, KeyDatabaseError> {
        let found = keys::list(self.connected()?.tables(), tenant);
        found.map_err(at(&self.place))
    }

    /// Returns up to `most` keys of `tenant`, or of all tenants, after the id `after`,
    /// ordered by id.
    ///
    /// # Errors
    /// The database cannot be read, or a row is damaged.
    pub fn page(
        &mut self,
        tenant: Option<&TenantId>,
        after: Option<&KeyId>,
        most: usize,
    ) -> Result<Vec<KeyRow>, KeyDatabaseError> {
        let found = keys::page(self.connected()?.tables(), tenant, after, most);
        found.map_err(at(&self.place))
    }

    /// Returns all named admins, ordered by name.
    ///
    /// # Errors
    /// The database cannot be read, or a row is damaged.
    pub fn admins(&mut self) -> Result<Vec<AdminRow>, KeyDatabaseError> {
        let found = admins::list(self.connected()?.tables());
        found.map_err(at(&self.place))
    }

    /// Begins to read. All reads see the keys as they are at the first of them.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn snapshot(&mut self) -> Result<KeySnapshot<'_>, KeyDatabaseError> {
        self.connected()?;
        let transaction = self.connection.snapshot().map_err(at(&self.place))?;
        Ok(KeySnapshot { place: &self.place, transaction })
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
        self.connected()?;
        let place = &self.place;
        let transaction = self.connection.begin().map_err(at(place))?;
        let tables = transaction.tables();
        let number = keys::next_change(tables).map_err(at(place))?;
        // Triggers of the database write the actions. Those that this change causes
        // come after `latest`, and they alone get the actor: a row without an actor was
        // caused by another program.
        let latest = key_actions::latest(tables).map_err(at(place))?;
        let done = change(&KeyChange { place, tables, number })?;
        key_actions::set_actor(tables, latest, actor).map_err(at(place))?;
        transaction.commit().map_err(at(place))?;
        Ok(done)
    }

    /// Returns up to `max` of the oldest actions that wait for the audit log, each
    /// with its number. An action without a known actor has the actor `unknown`.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn actions(&mut self, max: usize) -> Result<Vec<(i64, AdminAction)>, KeyDatabaseError> {
        let rows = key_actions::oldest(self.connected()?.tables(), max);
        let rows = rows.map_err(at(&self.place))?;
        Ok(rows.into_iter().map(|row| (row.number, action(row))).collect())
    }

    /// Deletes the actions with these numbers. No number is used again.
    ///
    /// # Errors
    /// The database cannot be written.
    pub fn forget_actions(&mut self, numbers: &[i64]) -> Result<(), KeyDatabaseError> {
        self.connected()?;
        // One transaction, so that a batch costs one sync of the disk.
        let transaction = self.connection.begin().map_err(at(&self.place))?;
        key_actions::delete(transaction.tables(), numbers).map_err(at(&self.place))?;
        transaction.commit().map_err(at(&self.place))
    }
}

impl KeyChange<'_> {
    /// Returns the key with the id `id`, with the changes so far.
    ///
    /// # Errors
    /// The database cannot be read, or the row is damaged.
    pub fn find(&self, id: &KeyId) -> Result<Option<KeyRow>, KeyDatabaseError> {
        keys::find(self.tables, id).map_err(at(self.place))
    }

    /// Inserts a new key.
    ///
    /// # Errors
    /// The database cannot be written, a key has this id already, or a time is after
    /// the year 2262.
    pub fn insert(&self, key: &KeyRow) -> Result<(), KeyDatabaseError> {
        keys::insert(self.tables, key, self.number).map_err(at(self.place))
    }

    /// Updates the facts about the end of the key `id`.
    ///
    /// # Errors
    /// The database cannot be written, or a time is after the year 2262.
    pub fn update_end(&self, id: &KeyId, end: &KeyEnd) -> Result<(), KeyDatabaseError> {
        keys::update_end(self.tables, id, end, self.number).map_err(at(self.place))
    }

    /// Returns all named admins, with the changes so far.
    ///
    /// # Errors
    /// The database cannot be read, or a row is damaged.
    pub fn admins(&self) -> Result<Vec<AdminRow>, KeyDatabaseError> {
        admins::list(self.tables).map_err(at(self.place))
    }

    /// Inserts a new admin.
    ///
    /// # Errors
    /// The database cannot be written, an admin has this name or this hash already, or the
    /// time is after the year 2262.
    pub fn insert_admin(&self, admin: &AdminRow) -> Result<(), KeyDatabaseError> {
        admins::insert(self.tables, admin).map_err(at(self.place))
    }

    /// Deletes an admin.
    ///
    /// # Errors
    /// The database cannot be written.
    pub fn delete_admin(&self, name: &AdminName) -> Result<(), KeyDatabaseError> {
        admins::delete(self.tables, name).map_err(at(self.place))
    }
}

impl KeySnapshot<'_> {
    /// Returns the number of the latest change.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn latest_change(&self) -> Result<ChangeNumber, KeyDatabaseError> {
        keys::latest_change(self.transaction.tables()).map_err(at(self.place))
    }

    /// Returns the number of keys.
    ///
    /// # Errors
    /// The database cannot be read.
    pub fn count(&self) -> Result<usize, KeyDatabaseError> {
        keys::count(self.transaction.tables()).map_err(at(self.place))
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
        keys::changed_since(self.transaction.tables(), since, take).map_err(at(self.place))?
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

fn connect(place: &DatabasePlace) -> Result<KeyConnection, KeyDatabaseError> {
    let connection = match place {
        DatabasePlace::File(path) => KeyConnection::open(path),
        DatabasePlace::Server(address) => KeyConnection::connect(address),
    };
    connection.map_err(at(place))
}

/// Names the place in an error.
fn at<E: Into<KeyRowError>>(place: &DatabasePlace) -> impl Fn(E) -> KeyDatabaseError {
    move |error| match error.into() {
        KeyRowError::Storage(source) => {
            KeyDatabaseError::Database { place: place.to_string(), source }
        }
        KeyRowError::Damaged { id, column } => KeyDatabaseError::Row { id, column },
        KeyRowError::Time => KeyDatabaseError::Time,
    }
}
