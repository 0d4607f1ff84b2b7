//! The manifest of a data folder: a small file beside the signing key that says which
//! databases belong to the folder and how far they had come. A database that is
//! missing, empty or older than the manifest has lost data. Nothing else shows that:
//! a new database is made where there is none, and spent caps would be spent again.
//! All three may be on a database server; then the manifest tells if the server was restored
//! from an older backup.
//!
//! The file is written at each start and after each checkpoint, never with a commit,
//! so it may be some seconds older than the databases.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use aws_lc_rs::rand;
use serde::{Deserialize, Serialize};

use crate::durable_file;
use crate::error::{LedgerError, StorageError};
use crate::options::{DatabasePlace, SERVER_LIMIT};
use crate::reader::LedgerReader;
use crate::rows::identity::IdentityRows;
use crate::rows::key_database::KeyConnection;
use crate::rows::key_server_schema::{self, KeyIdentity};

/// The databases of a data folder, as they were at the last checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    version: u32,
    /// The newest signed checkpoint of the ledger: the number of records that it
    /// covers, and the note. Its root hash is the ledger's identity.
    checkpoint: Option<(u64, String)>,
    /// The id of the key database.
    keys: i32,
    /// The number of the newest change of keys.
    key_changes: u64,
    /// The ids that `idempotency.db` may have; none if the records are on a server. Each start
    /// draws a new one, so a copy from before the start has another. There are two only while a
    /// start changes the id.
    idempotency: Vec<i32>,
}

/// A database that has lost data, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// The file's name in the data folder, or [`Manifest::SERVER`], or
    /// [`Manifest::SERVER_KEYS`].
    pub file: &'static str,
    /// The damage, in words that follow the name.
    pub what: String,
}

/// A manifest that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// A file cannot be read or written.
    #[error("{}: the manifest of the data folder cannot be read or written", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is not a manifest of this version.
    #[error("{}: not a manifest of version {VERSION}; if no database is damaged or old, remove the file", path.display())]
    Torn {
        /// The file.
        path: PathBuf,
    },
    /// The ledger on a database server cannot be read.
    #[error(transparent)]
    Ledger(LedgerError),
    /// The keys on a database server cannot be read.
    #[error("{place}: the keys cannot be read")]
    Keys {
        /// User, host and database of the server.
        place: String,
        /// The cause.
        source: StorageError,
    },
    /// A database cannot be read.
    #[error("{}: cannot be read", path.display())]
    Database {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: StorageError,
    },
}

impl Manifest {
    /// Loads the manifest of the data folder `data`; `None` before the first start, or
    /// in a folder of an earlier version.
    ///
    /// # Errors
    /// The file cannot be read, or is no manifest.
    pub fn load(data: &Path) -> Result<Option<Self>, ManifestError> {
        let path = path_in(data);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(ManifestError::File { path, source }),
        };
        let manifest = serde_json::from_slice(&text).ok();
        manifest
            .filter(|manifest: &Self| manifest.version == VERSION)
            .map(Some)
            .ok_or(ManifestError::Torn { path })
    }

    /// The name of a ledger on a database server in a [`Loss`].
    pub const SERVER: &'static str = "the ledger on the database server";
    /// The name of keys on a database server in a [`Loss`].
    pub const SERVER_KEYS: &'static str = "the key database on the server";

    /// Returns the databases of `data` that have lost data since the manifest was
    /// written; `ledger` is the place of the ledger. If that is a server, the keys are there,
    /// too. A file that is no database is not among the losses: the program that opens it
    /// says so.
    pub fn losses(&self, data: &Path, ledger: &DatabasePlace) -> Vec<Loss> {
        let idempotency = match ledger {
            DatabasePlace::File(_) => self.loss_of(data, IDEMPOTENCY),
            // The records are beside the ledger on the server.
            DatabasePlace::Server(_) => None,
        };
        let idempotency = idempotency.map(|what| Loss { file: IDEMPOTENCY, what });
        let keys = self.key_loss(&keys_beside(data, ledger));
        [self.ledger_loss(ledger), keys, idempotency].into_iter().flatten().collect()
    }

    /// Returns the loss of the keys, as [`Self::losses`].
    pub fn key_loss(&self, keys: &DatabasePlace) -> Option<Loss> {
        match keys {
            DatabasePlace::File(path) => {
                Some(Loss { file: KEYS, what: self.loss_of(path.parent()?, KEYS)? })
            }
            DatabasePlace::Server(_) => {
                let what = match key_identity(keys).ok()? {
                    None => "is missing".to_owned(),
                    Some(found) => self.loss_against(found)?,
                };
                Some(Loss { file: Self::SERVER_KEYS, what })
            }
        }
    }

    /// Returns the loss of the ledger, as [`Self::losses`].
    pub fn ledger_loss(&self, ledger: &DatabasePlace) -> Option<Loss> {
        match ledger {
            DatabasePlace::File(path) => {
                let what = self.loss_of(path.parent()?, LEDGER)?;
                Some(Loss { file: LEDGER, what })
            }
            DatabasePlace::Server(_) => {
                let checkpoint = self.checkpoint.as_ref()?;
                let what = match ledger.has_ledger().ok()? {
                    false => "is missing".to_owned(),
                    true => {
                        let reader = LedgerReader::open_within(ledger, SERVER_LIMIT).ok()?;
                        older_ledger(checkpoint, reader.newest_covering(checkpoint).ok()?)?
                    }
                };
                Some(Loss { file: Self::SERVER, what })
            }
        }
    }

    /// Returns the loss of one file of `data`, as [`Self::losses`].
    pub fn loss_of(&self, data: &Path, file: &'static str) -> Option<String> {
        let path = data.join(file);
        match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Some("is missing".to_owned());
            }
            // All of a new database may still be in its log.
            Ok(found) if found.len() == 0 && is_empty(&log_of(&path)) => {
                return Some("is empty".to_owned());
            }
            _ => {}
        }
        let rows = IdentityRows::open(&path).ok()?;
        match file {
            LEDGER => self.loss_of_ledger(&rows),
            KEYS => self.loss_of_keys(&rows),
            _ => self.loss_of_idempotency(&rows),
        }
        .ok()
        .flatten()
    }

    fn loss_of_ledger(&self, rows: &IdentityRows) -> Result<Option<String>, StorageError> {
        let Some(checkpoint) = &self.checkpoint else { return Ok(None) };
        let newest = match rows.has_checkpoint(checkpoint.0, &checkpoint.1)? {
            true => Newest::Covers,
            false => Newest::Only(rows.newest_checkpoint()?.map_or(0, |(size, _)| size)),
        };
        Ok(older_ledger(checkpoint, newest))
    }

    fn loss_of_keys(&self, rows: &IdentityRows) -> Result<Option<String>, StorageError> {
        let found = KeyIdentity { id: rows.id()?, newest_change: rows.newest_key_change()? };
        Ok(self.loss_against(found))
    }

    fn loss_against(&self, found: KeyIdentity) -> Option<String> {
        if found.id != self.keys {
            return Some("is another database of keys".to_owned());
        }
        let lost = self.key_changes.checked_sub(found.newest_change).filter(|lost| *lost > 0)?;
        Some(format!("is older: its last {lost} changes of keys are missing"))
    }

    fn loss_of_idempotency(&self, rows: &IdentityRows) -> Result<Option<String>, StorageError> {
        let is_known = self.idempotency.contains(&rows.id()?);
        Ok((!is_known).then(|| "is another or an older database of idempotency keys".to_owned()))
    }

    /// Writes the manifest of a start, once all three databases are open and before
    /// requests are served.
    ///
    /// # Errors
    /// A database or the manifest cannot be read or written.
    pub fn begin(data: &Path, ledger: &DatabasePlace) -> Result<(), ManifestError> {
        if let DatabasePlace::Server(_) = ledger {
            return Self::read(data, ledger, Vec::new())?.write(data);
        }
        let idempotency = IdentifiedFile::open(data, IDEMPOTENCY)?;
        let (before, next) = (idempotency.id()?, new_id(data)?);
        let keys = IdentifiedFile::open(data, KEYS)?;
        if keys.id()? == 0 {
            // Before the manifest is written, because it names this id.
            keys.set_id(new_id(data)?)?;
        }
        // Both ids, because the process may be killed between the two files.
        Self::read(data, ledger, vec![before, next])?.write(data)?;
        idempotency.set_id(next)?;
        Self::read(data, ledger, vec![next])?.write(data)
    }

    /// Writes the manifest again if a checkpoint was signed or the keys have changed
    /// since.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn refresh(data: &Path, ledger: &DatabasePlace) -> Result<(), ManifestError> {
        let Some(known) = Self::load(data)? else { return Ok(()) };
        let found = Self::read(data, ledger, known.idempotency.clone())?;
        // This runs every few seconds, so an unchanged manifest must not cost a sync.
        if found == known { Ok(()) } else { found.write(data) }
    }

    /// Notes that an admin has put another ledger in the place of the old one.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn replace_ledger(data: &Path) -> Result<(), ManifestError> {
        let Some(known) = Self::load(data)? else { return Ok(()) };
        let checkpoint = IdentifiedFile::open(data, LEDGER)?.newest_checkpoint()?;
        // The other databases were not replaced, so what the manifest says of them must still hold.
        Self { checkpoint, ..known }.write(data)
    }

    fn read(
        data: &Path,
        ledger: &DatabasePlace,
        idempotency: Vec<i32>,
    ) -> Result<Self, ManifestError> {
        let checkpoint = match ledger {
            // The control of a benchmark runs without a ledger.
            DatabasePlace::File(path) if !path.exists() => None,
            DatabasePlace::File(_) => IdentifiedFile::open(data, LEDGER)?.newest_checkpoint()?,
            DatabasePlace::Server(_) => {
                // A stop waits for this, so a silent server must not hold it for long.
                let reader = LedgerReader::open_within(ledger, SERVER_LIMIT);
                let newest = reader.and_then(|reader| reader.newest());
                newest.map_err(ManifestError::Ledger)?
            }
        };
        let keys = keys_beside(data, ledger);
        let KeyIdentity { id: keys, newest_change: key_changes } = key_identity(&keys)?
            .ok_or_else(|| ManifestError::Keys {
                place: keys.to_string(),
                source: StorageError::new(NoKeys, false),
            })?;
        Ok(Self { version: VERSION, checkpoint, keys, key_changes, idempotency })
    }

    /// Replaces the file at once and durably: a crash leaves the old one or the new one.
    fn write(&self, data: &Path) -> Result<(), ManifestError> {
        let path = path_in(data);
        let written = serde_json::to_string_pretty(self)
            .map_err(io::Error::from)
            .and_then(|text| durable_file::replace(&path, &format!("{text}\n")));
        written.map_err(|source| ManifestError::File { path, source })
    }
}

impl std::fmt::Display for Loss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.file, self.what)
    }
}

/// The newest checkpoint of a ledger, compared with one that is known.
pub(crate) enum Newest {
    /// The ledger has the known checkpoint, or has archived its records.
    Covers,
    /// The ledger lacks it. Its newest checkpoint covers this number of records.
    Only(u64),
}

fn older_ledger((size, _): &(u64, String), newest: Newest) -> Option<String> {
    let Newest::Only(newest) = newest else { return None };
    Some(format!(
        "is another or an older ledger: the newest checkpoint here covers {size} records, \
         the one in the ledger {newest}"
    ))
}

/// A database with its path, for errors.
struct IdentifiedFile {
    path: PathBuf,
    rows: IdentityRows,
}

impl IdentifiedFile {
    fn open(data: &Path, file: &str) -> Result<Self, ManifestError> {
        Self::at(data.join(file))
    }

    fn at(path: PathBuf) -> Result<Self, ManifestError> {
        match IdentityRows::open(&path) {
            Ok(rows) => Ok(Self { path, rows }),
            Err(source) => Err(ManifestError::Database { path, source }),
        }
    }

    fn id(&self) -> Result<i32, ManifestError> {
        self.named(self.rows.id())
    }

    fn set_id(&self, id: i32) -> Result<(), ManifestError> {
        self.named(self.rows.set_id(id))
    }

    fn newest_key_change(&self) -> Result<u64, ManifestError> {
        self.named(self.rows.newest_key_change())
    }

    fn newest_checkpoint(&self) -> Result<Option<(u64, String)>, ManifestError> {
        self.named(self.rows.newest_checkpoint())
    }

    fn named<T>(&self, result: Result<T, StorageError>) -> Result<T, ManifestError> {
        result.map_err(|source| ManifestError::Database { path: self.path.clone(), source })
    }
}

/// A server on which the keys were not made yet.
#[derive(Debug, thiserror::Error)]
#[error("there are none")]
struct NoKeys;

/// Returns the place of the keys: beside the ledger on a server, or in the data folder.
fn keys_beside(data: &Path, ledger: &DatabasePlace) -> DatabasePlace {
    match ledger {
        DatabasePlace::File(_) => DatabasePlace::File(data.join(KEYS)),
        DatabasePlace::Server(address) => DatabasePlace::Server(address.clone()),
    }
}

/// Returns the identity of the keys; `None` where a server has none.
fn key_identity(keys: &DatabasePlace) -> Result<Option<KeyIdentity>, ManifestError> {
    match keys {
        DatabasePlace::File(path) => {
            let keys = IdentifiedFile::at(path.clone())?;
            let (id, newest_change) = (keys.id()?, keys.newest_key_change()?);
            Ok(Some(KeyIdentity { id, newest_change }))
        }
        DatabasePlace::Server(address) => {
            let found = KeyConnection::connect(address)
                .and_then(|connection| key_server_schema::identity(connection.tables()));
            found.map_err(|source| ManifestError::Keys { place: keys.to_string(), source })
        }
    }
}

fn path_in(data: &Path) -> PathBuf {
    data.join("audit").join("manifest.json")
}

fn log_of(path: &Path) -> PathBuf {
    crate::operations::wal::beside(path)
}

fn is_empty(path: &Path) -> bool {
    fs::metadata(path).map_or(true, |found| found.len() == 0)
}

/// Draws an id that is not 0, which stands for no id.
fn new_id(data: &Path) -> Result<i32, ManifestError> {
    let mut bytes = [0; 4];
    rand::fill(&mut bytes).map_err(|_| ManifestError::File {
        path: path_in(data),
        source: io::Error::other("no random bytes"),
    })?;
    Ok((i32::from_le_bytes(bytes) & i32::MAX).max(1))
}

const VERSION: u32 = 1;
const LEDGER: &str = "ledger.db";
const KEYS: &str = "keys.db";
const IDEMPOTENCY: &str = "idempotency.db";
