//! API keys: rows in an embedded database of their own, so that a key check
//! never waits for a ledger commit, and in memory the snapshot that requests
//! are checked against.
//!
//! Only an HMAC of a key is stored. Several processes may open the store at
//! once: the one that serves follows the others by polling.

mod rows;

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use aws_lc_rs::hmac;
use rusqlite::Connection;
use tollgate_domain::{Caller, KeyId, PlanName, TenantId, UtcTime};

use super::AuthenticatedCaller;
use super::pepper;
use super::scopes::Scopes;
use super::secret::{KeySecret, NoRandomness};

/// The keys of all tenants. Clones share one connection and snapshot.
#[derive(Clone)]
pub struct KeyStore {
    shared: Arc<Shared>,
}

struct Shared {
    pepper: hmac::Key,
    connection: Mutex<Connection>,
    /// `PRAGMA data_version` of the snapshot, behind the connection's lock.
    version: Mutex<i64>,
    snapshot: ArcSwap<HashMap<String, Entry>>,
}

/// What a request is checked against.
#[derive(Clone)]
struct Entry {
    mac: Vec<u8>,
    record: KeyRecord,
}

/// What a new key is for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyOptions {
    /// What people call it; at most 200 characters.
    pub label: String,
    /// What it may be used for.
    pub scopes: Scopes,
    /// When it stops working by itself.
    pub expires: Option<UtcTime>,
    /// The plan whose limits bind this key alone, beside its tenant's.
    pub plan: Option<PlanName>,
}

/// A key as lists show it. No secret, no hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRecord {
    /// Its public id.
    pub id: KeyId,
    /// Whose it is.
    pub tenant: TenantId,
    /// What people call it.
    pub label: String,
    /// What it may be used for.
    pub scopes: Scopes,
    /// When it was made.
    pub created: UtcTime,
    /// When it stops working, if ever.
    pub expires: Option<UtcTime>,
    /// When it was revoked, if it was.
    pub revoked: Option<UtcTime>,
    /// The key that this one replaced.
    pub rotated_from: Option<KeyId>,
    /// The plan whose limits bind this key alone, beside its tenant's.
    pub plan: Option<PlanName>,
}

/// A key that was just made: the only time its secret is seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewKey {
    /// As it is listed from now on.
    pub record: KeyRecord,
    /// The whole key, for the client.
    pub secret: KeySecret,
}

/// Why the store could not do it.
#[derive(Debug, thiserror::Error)]
pub enum KeyStoreError {
    /// The database does not answer or refuses.
    #[error("{path}: the key database failed")]
    Database {
        /// The file.
        path: PathBuf,
        /// Why.
        source: rusqlite::Error,
    },
    /// The database file cannot be made or its mode set.
    #[error("{path}: cannot be opened")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Written by a version that we do not know.
    #[error("{path}: key database format {found} is not {expected}, the one this version reads")]
    Format {
        /// The file.
        path: PathBuf,
        /// The format in the file.
        found: i64,
        /// Ours.
        expected: i64,
    },
    /// A row holds what no version writes.
    #[error("key {id}: column {column} is damaged")]
    Row {
        /// The row.
        id: String,
        /// The column.
        column: &'static str,
    },
    /// The pepper file cannot be read or made.
    #[error("{path}: the pepper cannot be read or made")]
    Pepper {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Others may read the pepper.
    #[error("{path}: mode {mode:o} lets others read the pepper; use 600")]
    PepperReadable {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// The pepper file has another length.
    #[error("{path}: the pepper is torn; without it no stored key can be checked")]
    PepperTorn {
        /// The file.
        path: PathBuf,
    },
    /// There are keys, but not the pepper that they were stored with.
    #[error("{path}: the pepper is missing; without it no stored key can be checked: restore it")]
    PepperMissing {
        /// The file.
        path: PathBuf,
    },
    /// No such key.
    #[error("there is no key {0}")]
    Unknown(KeyId),
    /// A key that no longer works cannot be rotated.
    #[error("key {0} is revoked or expired and cannot be rotated: create a new one")]
    NotActive(KeyId),
    /// The label is too long.
    #[error("a label has at most 200 characters")]
    Label,
    /// A time beyond the year 2262.
    #[error("a time beyond the year 2262")]
    Time,
    /// The system has no random numbers.
    #[error(transparent)]
    Random(#[from] NoRandomness),
}

impl KeyStore {
    /// Opens `keys.db` and `pepper` in the folder `data`, making both on the
    /// first start. Works beside other processes that have them open.
    ///
    /// # Errors
    /// When a file cannot be made or read, or is of another format.
    pub fn open(data: &Path) -> Result<Self, KeyStoreError> {
        let path = data.join("pepper");
        let is_new = !path.exists();
        let connection = rows::open(&data.join("keys.db"))?;
        let version = rows::data_version(&connection)?;
        let snapshot = rows::load(&connection)?;
        // A new one would turn every stored key away, for good.
        if is_new && !snapshot.is_empty() && !path.exists() {
            return Err(KeyStoreError::PepperMissing { path });
        }
        let pepper = pepper::load_or_create(&path)?;
        Ok(Self {
            shared: Arc::new(Shared {
                pepper,
                connection: Mutex::new(connection),
                version: Mutex::new(version),
                snapshot: ArcSwap::from_pointee(snapshot),
            }),
        })
    }

    /// Makes a key for `tenant`; whether there is such a tenant, and such a
    /// plan, is the caller's to know.
    ///
    /// # Errors
    /// When the store cannot be written, or an option is out of bounds.
    pub fn create(
        &self,
        tenant: &TenantId,
        options: KeyOptions,
        now: UtcTime,
    ) -> Result<NewKey, KeyStoreError> {
        if options.label.chars().count() > 200 {
            return Err(KeyStoreError::Label);
        }
        self.change(|connection, pepper| {
            let new = draw(tenant, options, now, None)?;
            rows::insert(connection, &new.record, &mac(pepper, &new.secret))?;
            Ok(new)
        })
    }

    /// All keys, by tenant and age; of one tenant where one is named.
    pub fn list(&self, tenant: Option<&TenantId>) -> Vec<KeyRecord> {
        let snapshot = self.shared.snapshot.load();
        let mut records: Vec<KeyRecord> = snapshot
            .values()
            .map(|entry| &entry.record)
            .filter(|record| tenant.is_none_or(|tenant| record.tenant == *tenant))
            .cloned()
            .collect();
        records.sort_by(|a, b| (&a.tenant, a.created, &a.id).cmp(&(&b.tenant, b.created, &b.id)));
        records
    }

    /// Revokes a key, for good. Revoking again changes nothing.
    ///
    /// # Errors
    /// [`KeyStoreError::Unknown`], or when the store cannot be written.
    pub fn revoke(&self, id: &KeyId, now: UtcTime) -> Result<KeyRecord, KeyStoreError> {
        self.change(|connection, _| {
            let mut record = rows::find(connection, id)?;
            if record.revoked.is_none() {
                record.revoked = Some(now);
                rows::update(connection, &record)?;
            }
            Ok(record)
        })
    }

    /// Makes a key that replaces `id`, with the same tenant, label, scopes,
    /// expiry and plan; the old one works for `overlap` more, at most. What was
    /// counted against the old one's limits is not counted against the new
    /// one's.
    ///
    /// # Errors
    /// When there is no such key or it no longer works, or the store cannot
    /// be written.
    pub fn rotate(
        &self,
        id: &KeyId,
        overlap: Duration,
        now: UtcTime,
    ) -> Result<NewKey, KeyStoreError> {
        self.change(|connection, pepper| {
            let mut old = rows::find(connection, id)?;
            if !old.is_active(now) {
                return Err(KeyStoreError::NotActive(id.clone()));
            }
            let options = KeyOptions {
                label: old.label.clone(),
                scopes: old.scopes.clone(),
                expires: old.expires,
                plan: old.plan.clone(),
            };
            let new = draw(&old.tenant, options, now, Some(id.clone()))?;
            rows::insert(connection, &new.record, &mac(pepper, &new.secret))?;
            let overlap = u64::try_from(overlap.as_nanos()).unwrap_or(u64::MAX);
            let end = UtcTime(now.0.saturating_add(overlap));
            old.expires = Some(old.expires.map_or(end, |expires| expires.min(end)));
            rows::update(connection, &old)?;
            Ok(new)
        })
    }

    /// Takes in what other processes changed. Cheap when nothing did.
    ///
    /// # Errors
    /// When the store cannot be read; the snapshot stays as it was.
    pub fn refresh(&self) -> Result<(), KeyStoreError> {
        let connection = self.connection();
        let found = rows::data_version(&connection)?;
        let mut version = self.shared.version.lock().unwrap_or_else(PoisonError::into_inner);
        if *version != found {
            self.shared.snapshot.store(Arc::new(rows::load(&connection)?));
            *version = found;
        }
        Ok(())
    }

    /// Whether `id` is a key that works at `now`.
    pub fn is_active(&self, id: &KeyId, now: UtcTime) -> bool {
        let snapshot = self.shared.snapshot.load();
        snapshot.get(id.as_str()).is_some_and(|entry| entry.record.is_active(now))
    }

    /// Whose key it is, if it is one and works at `now`. An unknown id takes
    /// as long as a wrong secret.
    pub(super) fn verify(&self, key: &KeySecret, now: UtcTime) -> Option<AuthenticatedCaller> {
        let snapshot = self.shared.snapshot.load();
        let entry = snapshot.get(key.id_text());
        let expected = entry.map_or(&[0; 32][..], |entry| &entry.mac);
        // Compares in constant time.
        let matches = hmac::verify(&self.shared.pepper, key.expose().as_bytes(), expected);
        let record = &entry?.record;
        if matches.is_err() || !record.is_active(now) {
            return None;
        }
        let caller = Caller { tenant: record.tenant.clone(), key: record.id.clone() };
        let (scopes, plan) = (record.scopes.clone(), record.plan.clone());
        Some(AuthenticatedCaller { caller, scopes, plan })
    }

    /// Runs `change` in a transaction of its own, whole or not at all, and
    /// takes the result into the snapshot.
    fn change<T>(
        &self,
        change: impl FnOnce(&Connection, &hmac::Key) -> Result<T, KeyStoreError>,
    ) -> Result<T, KeyStoreError> {
        let mut connection = self.connection();
        let fault = rows::fault_at(&connection);
        let transaction = connection
            .transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)
            .map_err(&fault)?;
        let done = change(&transaction, &self.shared.pepper)?;
        let snapshot = rows::load(&transaction)?;
        transaction.commit().map_err(&fault)?;
        self.shared.snapshot.store(Arc::new(snapshot));
        Ok(done)
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.shared.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KeyRecord {
    /// Whether it works at `now`.
    pub fn is_active(&self, now: UtcTime) -> bool {
        self.revoked.is_none() && self.expires.is_none_or(|expires| now < expires)
    }
}

impl fmt::Debug for KeyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyStore({} keys)", self.shared.snapshot.load().len())
    }
}

fn draw(
    tenant: &TenantId,
    options: KeyOptions,
    now: UtcTime,
    rotated_from: Option<KeyId>,
) -> Result<NewKey, KeyStoreError> {
    let secret = KeySecret::draw()?;
    let KeyOptions { label, scopes, expires, plan } = options;
    let record = KeyRecord {
        id: secret.id(),
        tenant: tenant.clone(),
        label,
        scopes,
        created: now,
        expires,
        revoked: None,
        rotated_from,
        plan,
    };
    Ok(NewKey { record, secret })
}

fn mac(pepper: &hmac::Key, secret: &KeySecret) -> Vec<u8> {
    hmac::sign(pepper, secret.expose().as_bytes()).as_ref().to_vec()
}
