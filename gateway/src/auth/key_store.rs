//! API keys: rows in an embedded database of their own, so that a key check
//! never waits for a ledger commit, and in memory the snapshot that requests
//! are checked against.
//!
//! Only an HMAC of a key is stored. Several processes may open the store at
//! once: the one that serves follows the others by polling.

mod actions;
mod rows;
mod snapshot;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use aws_lc_rs::hmac;
use rusqlite::{Connection, TransactionBehavior};
use tollgate_domain::{Caller, KeyId, PlanName, TenantId, UtcTime};
use tollgate_ledger::AdminAction;

use self::snapshot::{Entries, Names};
use super::AuthenticatedCaller;
use super::jwt::is_token_key;
use super::pepper;
use super::scopes::Scopes;
use super::secret::{KeySecret, NoRandomness, number_of};

/// The keys of all tenants. Clones share one connection and snapshot.
#[derive(Clone)]
pub struct KeyStore {
    shared: Arc<Shared>,
}

struct Shared {
    pepper: hmac::Key,
    database: Mutex<Database>,
    /// Written with the database's lock held, a few entries at a time.
    entries: RwLock<Entries>,
}

struct Database {
    connection: Connection,
    used_for: Use,
    /// `PRAGMA data_version` as of the last look.
    version: i64,
    /// The number of the last change that is among the entries.
    changed: i64,
    names: Names,
}

/// What a store is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Checking,
    Changing,
}

/// What becomes of the requests that a revoked key has under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnderWay {
    /// They end by themselves.
    Finish,
    /// They are ended; their tenant pays what was done.
    End,
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
    /// Whether revoking it ended what it had under way.
    pub ends_requests: bool,
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
    /// The label is too long, or not for people.
    #[error("a label has at most 200 characters, none of them a control character")]
    Label,
    /// It would not work for a moment.
    #[error("a key that expires at once is of no use")]
    Expired,
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
        Self::open_for(data, Use::Checking)
    }

    /// As [`Self::open`], for changing and listing keys only: none is read into
    /// memory, so this is as quick with a million, and nobody is authenticated.
    ///
    /// # Errors
    /// As for [`Self::open`].
    pub fn open_to_change(data: &Path) -> Result<Self, KeyStoreError> {
        Self::open_for(data, Use::Changing)
    }

    fn open_for(data: &Path, used_for: Use) -> Result<Self, KeyStoreError> {
        let path = data.join("pepper");
        let is_new = !path.exists();
        let mut connection = rows::open(&data.join("keys.db"))?;
        actions::open(&mut connection)?;
        // A new one would turn every stored key away, for good.
        if is_new && rows::count(&connection)? > 0 && !path.exists() {
            return Err(KeyStoreError::PepperMissing { path });
        }
        let pepper = pepper::load_or_create(&path)?;
        let version = rows::data_version(&connection)?;
        let mut names = Names::default();
        let (entries, changed) = match used_for {
            Use::Checking => load(&mut connection, &mut names)?,
            Use::Changing => (Entries::new(), 0),
        };
        let database = Database { connection, used_for, version, changed, names };
        Ok(Self {
            shared: Arc::new(Shared {
                pepper,
                database: Mutex::new(database),
                entries: RwLock::new(entries),
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
        let mut new = self.create_all([(tenant.clone(), options)], now)?;
        Ok(new.pop().expect("one was asked for"))
    }

    /// Makes many keys, all or none.
    ///
    /// # Errors
    /// When the store cannot be written, or an option is out of bounds.
    pub fn create_all(
        &self,
        wanted: impl IntoIterator<Item = (TenantId, KeyOptions)>,
        now: UtcTime,
    ) -> Result<Vec<NewKey>, KeyStoreError> {
        self.change(|connection, pepper, change| {
            let make = |(tenant, options): (TenantId, KeyOptions)| {
                options.check(now)?;
                let new = draw(&tenant, options, now, None)?;
                rows::insert(connection, &new.record, &mac(pepper, &new.secret), change)?;
                Ok(new)
            };
            wanted.into_iter().map(make).collect()
        })
    }

    /// All keys, by tenant and age; of one tenant where one is named.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn list(&self, tenant: Option<&TenantId>) -> Result<Vec<KeyRecord>, KeyStoreError> {
        rows::list(&self.database().connection, tenant)
    }

    /// The plans that bind keys which are not revoked, and how many each.
    pub fn plans(&self) -> BTreeMap<PlanName, usize> {
        let mut plans = BTreeMap::new();
        for entry in self.entries().values().filter(|entry| !entry.is_revoked) {
            if let Some(plan) = &entry.plan {
                *plans.entry(plan.clone()).or_default() += 1;
            }
        }
        plans
    }

    /// The plan that binds the key alone, if one does.
    pub fn plan_of(&self, id: &KeyId) -> Option<PlanName> {
        self.entries().get(&number_of(id.as_str())?)?.plan.clone()
    }

    /// Revokes a key, for good. Revoking again changes nothing but what becomes
    /// of the requests under way, which can still be ended.
    ///
    /// # Errors
    /// [`KeyStoreError::Unknown`], or when the store cannot be written.
    pub fn revoke(
        &self,
        id: &KeyId,
        under_way: UnderWay,
        now: UtcTime,
    ) -> Result<KeyRecord, KeyStoreError> {
        self.change(|connection, _, change| {
            let old = rows::find(connection, id)?;
            let record = KeyRecord {
                revoked: old.revoked.or(Some(now)),
                ends_requests: old.ends_requests || under_way == UnderWay::End,
                ..old.clone()
            };
            if record != old {
                rows::update(connection, &record, change)?;
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
        self.change(|connection, pepper, change| {
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
            rows::insert(connection, &new.record, &mac(pepper, &new.secret), change)?;
            let overlap = u64::try_from(overlap.as_nanos()).unwrap_or(u64::MAX);
            let end = UtcTime(now.0.saturating_add(overlap));
            old.expires = Some(old.expires.map_or(end, |expires| expires.min(end)));
            rows::update(connection, &old, change)?;
            Ok(new)
        })
    }

    /// Takes in what other processes changed. Cheap when nothing did.
    ///
    /// # Errors
    /// When the store cannot be read; the snapshot stays as it was.
    pub fn refresh(&self) -> Result<(), KeyStoreError> {
        let mut database = self.database();
        let found = rows::data_version(&database.connection)?;
        if database.version != found {
            self.take_in(&mut database)?;
            database.version = found;
        }
        Ok(())
    }

    /// The oldest `most` things that were done to keys and that the audit log
    /// may not have yet, each with its number.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn actions(&self, most: usize) -> Result<Vec<(i64, AdminAction)>, KeyStoreError> {
        actions::oldest(&self.database().connection, most)
    }

    /// Forgets the actions of these numbers: the audit log has them.
    ///
    /// # Errors
    /// When the store cannot be written.
    pub fn forget_actions(&self, numbers: &[i64]) -> Result<(), KeyStoreError> {
        actions::forget(&mut self.database().connection, numbers)
    }

    /// Whether `id` is a key whose requests have to end.
    pub fn ends_requests(&self, id: &KeyId) -> bool {
        let Some(number) = number_of(id.as_str()) else { return false };
        self.entries().get(&number).is_some_and(|entry| entry.ends_requests)
    }

    /// Whether `caller` can have asked, now or before: its tenant has or had
    /// such a key, or the id stands for the subject of a token.
    pub(crate) fn may_be(&self, caller: &Caller) -> bool {
        let entries = self.entries();
        match number_of(caller.key.as_str()).and_then(|number| entries.get(&number)) {
            Some(entry) => entry.tenant == caller.tenant,
            None => is_token_key(&caller.key),
        }
    }

    /// Whose key it is, if it is one and works at `now`. An unknown id takes
    /// as long as a wrong secret.
    pub(super) fn verify(&self, key: KeySecret<&str>, now: UtcTime) -> Option<AuthenticatedCaller> {
        let entries = self.entries();
        let entry = entries.get(&key.number());
        let expected = entry.map_or(&[0; 32], |entry| &entry.mac);
        // Compares in constant time.
        let matches = hmac::verify(&self.shared.pepper, key.expose().as_bytes(), expected);
        let entry = entry?;
        if matches.is_err() || !entry.is_active(now) {
            return None;
        }
        let caller = Caller { tenant: entry.tenant.clone(), key: key.id() };
        let (scopes, plan) = (entry.scopes.clone(), entry.plan.clone());
        Some(AuthenticatedCaller { caller, scopes, plan })
    }

    /// Runs `change` in a transaction of its own, whole or not at all, under a
    /// change number of its own, and takes the result in.
    fn change<T>(
        &self,
        change: impl FnOnce(&Connection, &hmac::Key, i64) -> Result<T, KeyStoreError>,
    ) -> Result<T, KeyStoreError> {
        let mut database = self.database();
        let fault = rows::fault_at(&database.connection);
        let transaction = database
            .connection
            .transaction_with_behavior(TransactionBehavior::Immediate)
            .map_err(&fault)?;
        let number = rows::next_change(&transaction)?;
        let latest = actions::latest(&transaction)?;
        let done = change(&transaction, &self.shared.pepper, number)?;
        actions::sign(&transaction, latest)?;
        transaction.commit().map_err(&fault)?;
        self.take_in(&mut database)?;
        Ok(done)
    }

    /// Reads what changed since the last time into the entries: all of it, or
    /// nothing where it cannot be read.
    fn take_in(&self, database: &mut Database) -> Result<(), KeyStoreError> {
        if database.used_for == Use::Changing {
            return Ok(());
        }
        let Database { connection, changed, names, .. } = database;
        let fault = rows::fault_at(connection);
        let transaction = connection.transaction().map_err(&fault)?;
        let latest = rows::next_change(&transaction)? - 1;
        let mut found = Vec::new();
        rows::changed_since(&transaction, *changed, |stored| {
            found.push(names.entry(stored)?);
            Ok(())
        })?;
        let count = rows::count(&transaction)?;
        drop(transaction);
        let mut entries = self.shared.entries.write().unwrap_or_else(PoisonError::into_inner);
        entries.extend(found);
        *changed = latest;
        let is_whole = entries.len() == count;
        drop(entries);
        if !is_whole {
            // Rows were taken out by hand: what is gone works no more.
            let (all, latest) = load(connection, names)?;
            *self.shared.entries.write().unwrap_or_else(PoisonError::into_inner) = all;
            *changed = latest;
        }
        Ok(())
    }

    fn database(&self) -> MutexGuard<'_, Database> {
        self.shared.database.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn entries(&self) -> RwLockReadGuard<'_, Entries> {
        self.shared.entries.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All keys, and the number of the last change among them.
fn load(connection: &mut Connection, names: &mut Names) -> Result<(Entries, i64), KeyStoreError> {
    let fault = rows::fault_at(connection);
    let transaction = connection.transaction().map_err(&fault)?;
    let latest = rows::next_change(&transaction)? - 1;
    let mut entries = Entries::with_capacity(rows::count(&transaction)?);
    rows::changed_since(&transaction, 0, |stored| {
        let (number, entry) = names.entry(stored)?;
        entries.insert(number, entry);
        Ok(())
    })?;
    Ok((entries, latest))
}

impl KeyOptions {
    fn check(&self, now: UtcTime) -> Result<(), KeyStoreError> {
        if self.label.chars().count() > 200 || self.label.contains(char::is_control) {
            return Err(KeyStoreError::Label);
        }
        if self.expires.is_some_and(|expires| expires <= now) {
            return Err(KeyStoreError::Expired);
        }
        Ok(())
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
        write!(f, "KeyStore({} keys)", self.entries().len())
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
        ends_requests: false,
        rotated_from,
        plan,
    };
    Ok(NewKey { record, secret })
}

fn mac(pepper: &hmac::Key, secret: &KeySecret) -> Vec<u8> {
    hmac::sign(pepper, secret.expose().as_bytes()).as_ref().to_vec()
}
