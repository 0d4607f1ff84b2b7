//! The store of API keys. The keys have a database of their own, in a file or on the
//! ledger's server, so that a key check never waits for a commit of the ledger. Requests are
//! checked against a snapshot in memory.
//!
//! The store holds an HMAC of each key and never the key. Several processes may
//! open the store at the same time; the one that serves polls for the changes of
//! the others. A snapshot of a server's keys is good for 90 seconds after the last poll that
//! was answered: a gateway that is cut off from the server hears of no revocation.

mod admins;
mod heard_by;
mod pepper;
mod record;
mod snapshot;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use aws_lc_rs::hmac;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tollgate_domain::{AdminName, Caller, KeyId, PlanName, TenantId, UtcTime};
use tollgate_ledger::gateways::{GatewayStart, Membership, MembershipError};
use tollgate_ledger::keys::{
    ChangeNumber, DataVersion, KeyChange, KeyDatabase, KeyDatabaseError, KeySnapshot,
};
use tollgate_ledger::{AdminAction, DatabasePlace};
use tollgate_serving::boot_clock::{BootTime, SharedBootTime};

use self::admins::Admins;
pub use self::admins::{AdminRecord, AdminSecret, NewAdmin};
pub use self::heard_by::{HeardBy, UnawareGateway};
use self::snapshot::{Entries, Names};
use super::AuthenticatedCaller;
use super::jwt::is_token_key;

use super::scopes::Scopes;
use super::secret::{KeySecret, NoRandomness, id_of, number_of};

/// The keys of all tenants and the named admins. Clones share one connection and one
/// snapshot.
#[derive(Clone)]
pub struct KeyStore {
    shared: Arc<SharedStore>,
    /// The actor of this clone's changes in the audit log.
    actor: Arc<str>,
}

struct SharedStore {
    pepper: hmac::Key,
    followed: Mutex<FollowedDatabase>,
    /// The snapshot. A writer holds the lock of `followed`, too.
    entries: RwLock<Entries>,
    /// The named admins. A writer holds the lock of `followed`, too.
    admins: RwLock<Admins>,
    /// The time at which the newest answered comparison with the server began; `None` if the
    /// keys are in a file.
    confirmed: Option<SharedBootTime>,
    /// The generation that the snapshot contains. Read without the lock of `followed`, which
    /// may wait for a server.
    generation: AtomicI64,
}

/// The database, and how far the snapshot follows it.
struct FollowedDatabase {
    database: KeyDatabase,
    purpose: Purpose,
    /// The version at the last refresh.
    version: DataVersion,
    /// The number of connections that the database had made at the last refresh.
    connections: u64,
    /// The number of the last change that the snapshot contains.
    changed: ChangeNumber,
    names: Names,
}

/// The purpose for which a store is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// Checks of requests, which need the snapshot.
    Checking,
    /// Changes and lists, which need no snapshot.
    Changing,
}

/// The fate of the running requests of a revoked key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnderWay {
    /// The requests run to their end.
    Finish,
    /// The requests are ended; their tenant pays for the work that was done.
    End,
}

/// The options of a new key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyOptions {
    /// A name for people; at most 200 characters.
    pub label: String,
    /// The limits on the key's use.
    pub scopes: Scopes,
    /// The time when the key expires, if it does.
    pub expires: Option<UtcTime>,
    /// The plan that limits this key alone, in addition to its tenant's plan.
    pub plan: Option<PlanName>,
}

/// A key as lists show it, without secret and hash. The names in JSON state the unit of
/// each time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct KeyRecord {
    /// The public id of the key.
    #[schemars(with = "String")]
    #[serde(rename = "key")]
    pub id: KeyId,
    /// The tenant that the key belongs to.
    #[schemars(with = "String")]
    pub tenant: TenantId,
    /// A name for people.
    pub label: String,
    /// The limits on the key's use.
    pub scopes: Scopes,
    /// The time when the key was created.
    #[schemars(with = "u64")]
    #[serde(rename = "created_ns")]
    pub created: UtcTime,
    /// The time when the key expires, if it does.
    #[schemars(with = "Option<u64>")]
    #[serde(rename = "expires_ns")]
    pub expires: Option<UtcTime>,
    /// The time when the key was revoked, if it was.
    #[schemars(with = "Option<u64>")]
    #[serde(rename = "revoked_ns")]
    pub revoked: Option<UtcTime>,
    /// True if the revocation ended the running requests of the key.
    pub ends_requests: bool,
    /// The key that this key replaced.
    #[schemars(with = "Option<String>")]
    pub rotated_from: Option<KeyId>,
    /// The plan that limits this key alone, in addition to its tenant's plan.
    #[schemars(with = "Option<String>")]
    pub plan: Option<PlanName>,
}

/// A new key. Its secret cannot be read again later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewKey {
    /// The key as lists will show it.
    pub record: KeyRecord,
    /// The whole key, for the client.
    pub secret: KeySecret,
}

/// The failures of the key store.
#[derive(Debug, thiserror::Error)]
pub enum KeyStoreError {
    /// The database of the keys failed.
    #[error(transparent)]
    Database(#[from] KeyDatabaseError),
    /// The pepper file cannot be read or created.
    #[error("{path}: the pepper cannot be read or created")]
    Pepper {
        /// The path of the file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// Other users may read the pepper.
    #[error("{path}: mode {mode:o} lets other users read the pepper; set mode 600")]
    PepperReadable {
        /// The path of the file.
        path: PathBuf,
        /// The mode of the file.
        mode: u32,
    },
    /// The pepper file has a wrong length.
    #[error(
        "{path}: the pepper is damaged; no stored key can be checked without it: restore it from a backup"
    )]
    PepperTorn {
        /// The path of the file.
        path: PathBuf,
    },
    /// The database holds keys, but the pepper of their hashes is gone.
    #[error(
        "{path}: the pepper is missing; no stored key can be checked without it: restore it from a backup, or copy it from another gateway"
    )]
    PepperMissing {
        /// The path of the file.
        path: PathBuf,
    },
    /// The database has no key with this id.
    #[error("there is no key {0}")]
    Unknown(KeyId),
    /// A revoked or expired key cannot be rotated.
    #[error("key {0} is revoked or expired and cannot be rotated: create a new one")]
    NotActive(KeyId),
    /// The label is too long or contains control characters.
    #[error("a label has at most 200 characters, none of them a control character")]
    Label,
    /// The expiry of a new key is in the past.
    #[error("the key would expire at once: choose a later expiry")]
    Expired,
    /// The expiry of a new key is beyond the times that the database holds.
    #[error("the key would expire after the year 2262: choose an earlier expiry")]
    ExpiresTooLate,
    /// The end of a rotated key is beyond the times that the database holds.
    #[error("the old key would end after the year 2262: choose a shorter overlap")]
    OverlapTooLong,
    /// The hashes on the server were made with another pepper.
    #[error(
        "{path}: this is not the pepper of the keys on the server; copy the file from a gateway that uses them"
    )]
    PepperDiffers {
        /// The path of the file.
        path: PathBuf,
    },
    /// There is an admin with this name already.
    #[error("there is an admin {0} already: choose another name, or revoke that admin first")]
    AdminExists(AdminName),
    /// There is no admin with this name.
    #[error("there is no admin {0}")]
    UnknownAdmin(AdminName),
    /// There are as many admins as there may be.
    #[error("there are {0} admins, and there may be no more: revoke one first")]
    TooManyAdmins(usize),
    /// The system's random numbers failed.
    #[error(transparent)]
    Random(#[from] NoRandomness),
}

impl KeyStore {
    /// Returns a name for the gateways that have the same pepper. It tells nothing about that.
    pub(crate) fn cluster_mark(&self) -> String {
        let mark = hash(&self.shared.pepper, "the gateways with this pepper");
        mark.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
    }

    /// Opens `keys.db` and `pepper` in the folder `data`, and creates both on the
    /// first start. Other processes may have the files open.
    ///
    /// # Errors
    /// A file cannot be created or read, or has another format.
    pub fn open(data: &Path) -> Result<Self, KeyStoreError> {
        Self::open_at(data, DatabasePlace::File(data.join("keys.db")))
    }

    /// Opens the keys at `place`, with the `pepper` of the folder `data`. With a server the
    /// call must not come from async code, and neither must any call that reads or writes it.
    ///
    /// # Errors
    /// As [`Self::open`], the server cannot be used, or its keys have another pepper.
    pub fn open_at(data: &Path, place: DatabasePlace) -> Result<Self, KeyStoreError> {
        Self::open_for(data, place, Purpose::Checking)
    }

    /// Opens the store for changes and lists alone. No key is read into memory, so
    /// opening is quick even with a million keys; no key authenticates.
    ///
    /// # Errors
    /// The same as of [`Self::open_at`].
    pub fn open_to_change(data: &Path, place: DatabasePlace) -> Result<Self, KeyStoreError> {
        Self::open_for(data, place, Purpose::Changing)
    }

    fn open_for(
        data: &Path,
        place: DatabasePlace,
        purpose: Purpose,
    ) -> Result<Self, KeyStoreError> {
        let path = data.join("pepper");
        let is_new = !path.exists();
        let mut database = KeyDatabase::open(place)?;
        // A new pepper would make every stored key invalid for ever. The file is
        // looked for again, because another process may have created it meanwhile.
        let has_hashes = database.snapshot()?.count()? > 0 || !database.admins()?.is_empty();
        if is_new && has_hashes && !path.exists() {
            return Err(KeyStoreError::PepperMissing { path });
        }
        let pepper = pepper::load_or_create(&path)?;
        // A gateway with another pepper would refuse every key of the others.
        if !database.has_pepper_mark(&hash(&pepper, "the pepper of these keys"))? {
            return Err(KeyStoreError::PepperDiffers { path });
        }
        let confirmed = database.is_shared().then(|| SharedBootTime::new(BootTime::now()));
        // Read before the keys, so that the next refresh notices a change in between.
        let version = database.data_version()?;
        let mut names = Names::default();
        let (entries, changed) = match purpose {
            Purpose::Checking => load(&database.snapshot()?, &mut names)?,
            Purpose::Changing => (Entries::new(), ChangeNumber::default()),
        };
        let admins = admins::load(&mut database)?;
        let connections = database.connections();
        let followed = FollowedDatabase { database, purpose, version, connections, changed, names };
        Ok(Self {
            shared: Arc::new(SharedStore {
                pepper,
                followed: Mutex::new(followed),
                entries: RwLock::new(entries),
                admins: RwLock::new(admins),
                confirmed,
                generation: AtomicI64::new(version.generation()),
            }),
            actor: format!("uid {}", rustix::process::getuid().as_raw()).into(),
        })
    }

    /// Returns the same store, whose changes the audit log gets with `actor`. Without this
    /// call the actor is the user of the process.
    pub(crate) fn acting_as(&self, actor: &str) -> Self {
        Self { actor: actor.into(), ..self.clone() }
    }

    /// Creates a key for `tenant`. The caller must know that the tenant and the
    /// plan exist.
    ///
    /// # Errors
    /// The store cannot be written, or an option is out of bounds.
    #[expect(
        clippy::expect_used,
        reason = "`create_all` returns one key for each tenant that it is given"
    )]
    pub fn create(
        &self,
        tenant: &TenantId,
        options: KeyOptions,
        now: UtcTime,
    ) -> Result<NewKey, KeyStoreError> {
        let mut new = self.create_all([(tenant.clone(), options)], now)?;
        Ok(new.pop().expect("one key was asked for"))
    }

    /// Creates several keys, or none if one of them fails.
    ///
    /// # Errors
    /// The store cannot be written, or an option is out of bounds.
    pub fn create_all(
        &self,
        wanted: impl IntoIterator<Item = (TenantId, KeyOptions)>,
        now: UtcTime,
    ) -> Result<Vec<NewKey>, KeyStoreError> {
        self.change(|change, pepper| {
            let make = |(tenant, options): (TenantId, KeyOptions)| {
                options.check(now)?;
                let new = draw(&tenant, options, now, None)?;
                change.insert(&new.record.row(mac(pepper, &new.secret)))?;
                Ok(new)
            };
            wanted.into_iter().map(make).collect()
        })
    }

    /// Returns the keys of `tenant`, or of all tenants, ordered by tenant and age.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn list(&self, tenant: Option<&TenantId>) -> Result<Vec<KeyRecord>, KeyStoreError> {
        let rows = self.followed().database.list(tenant)?;
        rows.into_iter().map(KeyRecord::of).collect()
    }

    /// Returns the plans of keys that are not revoked, with the number of keys of
    /// each plan.
    pub fn plans(&self) -> BTreeMap<PlanName, usize> {
        let mut plans = BTreeMap::new();
        for entry in self.entries().values().filter(|entry| !entry.is_revoked) {
            if let Some(plan) = &entry.plan {
                *plans.entry(plan.clone()).or_default() += 1;
            }
        }
        plans
    }

    /// Returns the plan that limits the key alone, if there is one.
    pub fn plan_of(&self, id: &KeyId) -> Option<PlanName> {
        self.entries().get(&number_of(id.as_str())?)?.plan.clone()
    }

    /// Revokes a key for ever. A second call can still end the running requests,
    /// and changes nothing else.
    ///
    /// # Errors
    /// [`KeyStoreError::Unknown`], or the store cannot be written.
    pub fn revoke(
        &self,
        id: &KeyId,
        under_way: UnderWay,
        now: UtcTime,
    ) -> Result<KeyRecord, KeyStoreError> {
        self.change(|change, _| {
            let old = find(change, id)?;
            let record = KeyRecord {
                // A second revocation must not move the time of the first.
                revoked: old.revoked.or(Some(now)),
                ends_requests: old.ends_requests || under_way == UnderWay::End,
                ..old.clone()
            };
            // An unchanged row needs no change number, and the audit log no second action.
            if record != old {
                change.update_end(id, &record.end())?;
            }
            Ok(record)
        })
    }

    /// Creates a key that replaces `id`, with the same tenant, label, scopes,
    /// expiry and plan. The old key works for at most `overlap` longer. The limits
    /// of the new key start at zero usage.
    ///
    /// # Errors
    /// The key does not exist or is not active, or the store cannot be written.
    pub fn rotate(
        &self,
        id: &KeyId,
        overlap: Duration,
        now: UtcTime,
    ) -> Result<NewKey, KeyStoreError> {
        self.change(|change, pepper| {
            let mut old = find(change, id)?;
            // Rotation must not bring a revoked key back to life under a new secret.
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
            change.insert(&new.record.row(mac(pepper, &new.secret)))?;
            // Rotation never extends the life of the old key.
            let overlap = u64::try_from(overlap.as_nanos()).unwrap_or(u64::MAX);
            let end = UtcTime(now.0.saturating_add(overlap));
            let end = old.expires.map_or(end, |expires| expires.min(end));
            if end > LAST_TIME {
                return Err(KeyStoreError::OverlapTooLong);
            }
            old.expires = Some(end);
            change.update_end(id, &old.end())?;
            Ok(new)
        })
    }

    /// Brings the snapshot up to date with the changes of other processes. A call
    /// without changes costs one query.
    ///
    /// # Errors
    /// The store cannot be read; the snapshot does not change.
    pub fn refresh(&self) -> Result<(), KeyStoreError> {
        // Before the question: a revocation may follow the answer at once.
        let begun = BootTime::now();
        let mut followed = self.followed();
        let found = followed.database.data_version()?;
        let connections = followed.database.connections();
        if followed.connections != connections {
            self.update_admins(&mut followed)?;
            self.read_all_again(&mut followed)?;
        } else if followed.version != found {
            self.update_snapshot(&mut followed)?;
        }
        // Set last: after an error the next call tries again.
        (followed.connections, followed.version) = (connections, found);
        self.shared.generation.store(found.generation(), Ordering::Relaxed);
        if let Some(confirmed) = &self.shared.confirmed {
            confirmed.set(begun);
        }
        Ok(())
    }

    /// Returns true if the snapshot may be used: the keys are in a file, or were compared with
    /// the server's less than 90 seconds ago.
    pub(crate) fn is_confirmed(&self) -> bool {
        // The clock is read only where it matters, because each request asks.
        self.shared.confirmed.is_none() || self.is_confirmed_at(BootTime::now())
    }

    fn is_confirmed_at(&self, now: BootTime) -> bool {
        let confirmed = self.shared.confirmed.as_ref();
        confirmed.is_none_or(|confirmed| now.since(confirmed.get()) < CONFIRMED_FOR)
    }

    /// Joins the gateways that share the keys on a server; `None` if the keys are in a file. `home`
    /// is the id of the data folder.
    ///
    /// # Errors
    /// The server cannot be used.
    pub(crate) fn join_gateways(
        &self,
        name: &str,
        start: Option<&GatewayStart<'_>>,
    ) -> Result<Option<Membership>, MembershipError> {
        let place = self.followed().database.place().clone();
        match place {
            DatabasePlace::File(_) => Ok(None),
            DatabasePlace::Server(address) => Membership::join(&address, name, start).map(Some),
        }
    }

    /// Returns the generation of the keys that the snapshot contains.
    pub(crate) fn generation(&self) -> i64 {
        self.shared.generation.load(Ordering::Relaxed)
    }

    /// Waits until every gateway that shares the keys has read the changes so far, but not
    /// longer than three seconds. Returns `None` if the keys are in a file.
    ///
    /// # Errors
    /// The server cannot be read.
    pub fn wait_until_heard(&self) -> Result<Option<HeardBy>, KeyStoreError> {
        let version = {
            let mut followed = self.followed();
            if !followed.database.is_shared() {
                return Ok(None);
            }
            followed.database.data_version()?
        };
        let mut waited = Duration::ZERO;
        loop {
            let gateways = self.followed().database.gateways(version)?;
            let heard = HeardBy::of(gateways);
            if heard.unaware.is_empty() || waited >= LONGEST_WAIT {
                return Ok(Some(heard));
            }
            std::thread::sleep(BETWEEN_LOOKS);
            waited += BETWEEN_LOOKS;
        }
    }

    /// Returns up to `max` of the oldest changes of keys that the audit log may
    /// not have yet, each with its number.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn actions(&self, max: usize) -> Result<Vec<(i64, AdminAction)>, KeyStoreError> {
        Ok(self.followed().database.actions(max)?)
    }

    /// Deletes the actions with these numbers, because the audit log has them.
    ///
    /// # Errors
    /// The store cannot be written.
    pub fn forget_actions(&self, numbers: &[i64]) -> Result<(), KeyStoreError> {
        Ok(self.followed().database.forget_actions(numbers)?)
    }

    /// True if the running requests of the key `id` must end.
    pub fn ends_requests(&self, id: &KeyId) -> bool {
        let Some(number) = number_of(id.as_str()) else { return false };
        self.entries().get(&number).is_some_and(|entry| entry.ends_requests)
    }

    /// True if `caller` may have sent a request, now or earlier: its tenant has or
    /// had such a key, or the id stands for the subject of a token.
    pub(crate) fn may_be(&self, caller: &Caller) -> bool {
        let entries = self.entries();
        match number_of(caller.key.as_str()).and_then(|number| entries.get(&number)) {
            // A worker's report could name another tenant's key.
            Some(entry) => entry.tenant == caller.tenant,
            None => is_token_key(&caller.key),
        }
    }

    /// Returns true if there is a key with this id, whatever its state.
    pub(crate) fn has_key(&self, key: &KeyId) -> bool {
        number_of(key.as_str()).is_some_and(|number| self.entries().contains_key(&number))
    }

    /// Returns the caller of a batch that was made with a key of the tenant; `None` if the key
    /// was revoked or never was.
    pub(super) fn batch_caller(&self, caller: &Caller) -> Option<AuthenticatedCaller> {
        let (caller, entries) = (caller.clone(), self.entries());
        match number_of(caller.key.as_str()).and_then(|number| entries.get(&number)) {
            Some(entry) if entry.tenant == caller.tenant && !entry.is_revoked => {
                let (scopes, plan) = (entry.scopes.clone(), entry.plan.clone());
                Some(AuthenticatedCaller { caller, scopes, plan })
            }
            Some(_) => None,
            None => is_token_key(&caller.key).then_some(AuthenticatedCaller {
                caller,
                scopes: None,
                plan: None,
            }),
        }
    }

    /// Returns the caller of `key` if the key is active at `now`. The check of an
    /// unknown id takes as long as the check of a wrong secret.
    pub(super) fn verify(&self, key: KeySecret<&str>, now: UtcTime) -> Option<AuthenticatedCaller> {
        let entries = self.entries();
        let entry = entries.get(&key.number());
        let expected = entry.map_or(&[0; 32], |entry| &entry.mac);
        // The comparison takes constant time. It runs for an unknown id, too, so
        // that the time does not tell which ids exist.
        let matches = hmac::verify(&self.shared.pepper, key.expose().as_bytes(), expected);
        let entry = entry?;
        if matches.is_err() || !entry.is_active(now) {
            return None;
        }
        // For lists alone, so nothing depends on its order.
        entry.last_used.store(now.0, Ordering::Relaxed);
        let caller = Caller { tenant: entry.tenant.clone(), key: key.id() };
        let (scopes, plan) = (entry.scopes.clone(), entry.plan.clone());
        Some(AuthenticatedCaller { caller, scopes, plan })
    }

    /// Runs `change` in one transaction, then brings the snapshot up to date.
    fn change<T>(
        &self,
        change: impl FnOnce(&KeyChange<'_>, &hmac::Key) -> Result<T, KeyStoreError>,
    ) -> Result<T, KeyStoreError> {
        let mut followed = self.followed();
        let pepper = &self.shared.pepper;
        let done =
            followed.database.change(&self.actor, |in_database| change(in_database, pepper))?;
        // After the commit, so that the snapshot never holds a change that was rolled back.
        self.update_snapshot(&mut followed)?;
        Ok(done)
    }

    /// Reads the changes since the last update into the snapshot: all of them, or
    /// none if one cannot be read.
    fn update_snapshot(&self, followed: &mut FollowedDatabase) -> Result<(), KeyStoreError> {
        if followed.purpose == Purpose::Changing {
            return Ok(());
        }
        self.update_admins(followed)?;
        let FollowedDatabase { database, changed, names, .. } = followed;
        let stored = database.snapshot()?;
        // Read in the snapshot of the rows below, so that no change falls in between.
        let latest = stored.latest_change()?;
        let mut found = Vec::new();
        stored.changed_since(*changed, |facts| {
            found.push(names.entry(facts)?);
            Ok::<_, KeyStoreError>(())
        })?;
        let count = stored.count()?;
        // The read ends before the lock is taken, so requests wait for no query.
        drop(stored);
        let mut entries = self.shared.entries.write().unwrap_or_else(PoisonError::into_inner);
        for (number, entry) in found {
            // The last use is in memory alone, so a changed row must not take it away.
            let used = entries.get(&number).map(|old| old.last_used.load(Ordering::Relaxed));
            entry.last_used.store(used.unwrap_or_default(), Ordering::Relaxed);
            entries.insert(number, entry);
        }
        // Only now: after an error above, the next update reads the same changes again.
        *changed = latest;
        let is_whole = entries.len() == count;
        drop(entries);
        if !is_whole {
            // Rows were deleted by hand. Their keys must stop working.
            self.read_all_again(followed)?;
        }
        Ok(())
    }

    /// Reads the admins: all of them each time, because they are few and a revoked one must be
    /// refused at once.
    fn update_admins(&self, followed: &mut FollowedDatabase) -> Result<(), KeyStoreError> {
        let admins = admins::load(&mut followed.database)?;
        *self.shared.admins.write().unwrap_or_else(PoisonError::into_inner) = admins;
        Ok(())
    }

    /// Reads the keys of the whole snapshot anew. After a new connection the server may be a standby that
    /// lacks the newest changes, or restored from a backup: then later changes have numbers that
    /// were seen before. A key that was revoked stays revoked here.
    fn read_all_again(&self, followed: &mut FollowedDatabase) -> Result<(), KeyStoreError> {
        if followed.purpose == Purpose::Changing {
            return Ok(());
        }
        let FollowedDatabase { database, changed, names, .. } = followed;
        let (mut all, latest) = load(&database.snapshot()?, names)?;
        let mut entries = self.shared.entries.write().unwrap_or_else(PoisonError::into_inner);
        for (number, entry) in &mut all {
            let Some(old) = entries.get(number) else { continue };
            entry.last_used.store(old.last_used.load(Ordering::Relaxed), Ordering::Relaxed);
            // A revocation is for ever, so a row without it is older than this copy.
            if old.is_revoked && !entry.is_revoked {
                entry.is_revoked = true;
                tracing::error!(
                    key = %id_of(*number),
                    tenant = %entry.tenant,
                    "the database server has lost the revocation of a key; it stays revoked here until this gateway stops: revoke it again"
                );
            }
        }
        *entries = all;
        *changed = latest;
        Ok(())
    }

    fn followed(&self) -> MutexGuard<'_, FollowedDatabase> {
        // A panic rolls its transaction back, so the database behind the lock stays usable.
        self.shared.followed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn entries(&self) -> RwLockReadGuard<'_, Entries> {
        // An update replaces whole entries, so a panic leaves none half written.
        self.shared.entries.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads all keys; returns them with the number of the last change.
fn load(
    stored: &KeySnapshot<'_>,
    names: &mut Names,
) -> Result<(Entries, ChangeNumber), KeyStoreError> {
    let latest = stored.latest_change()?;
    let mut entries = Entries::with_capacity(stored.count()?);
    stored.changed_since(ChangeNumber::default(), |facts| {
        let (number, entry) = names.entry(facts)?;
        entries.insert(number, entry);
        Ok::<_, KeyStoreError>(())
    })?;
    Ok((entries, latest))
}

/// Returns the record of the key `id`.
fn find(change: &KeyChange<'_>, id: &KeyId) -> Result<KeyRecord, KeyStoreError> {
    KeyRecord::of(change.find(id)?.ok_or_else(|| KeyStoreError::Unknown(id.clone()))?)
}

impl KeyOptions {
    fn check(&self, now: UtcTime) -> Result<(), KeyStoreError> {
        // Terminals print labels in lists, where control characters could forge lines.
        if self.label.chars().count() > 200 || self.label.contains(char::is_control) {
            return Err(KeyStoreError::Label);
        }
        if self.expires.is_some_and(|expires| expires <= now) {
            return Err(KeyStoreError::Expired);
        }
        if self.expires.is_some_and(|expires| expires > LAST_TIME) {
            return Err(KeyStoreError::ExpiresTooLate);
        }
        Ok(())
    }
}

impl KeyRecord {
    /// True if the key works at `now`.
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

fn mac(pepper: &hmac::Key, secret: &KeySecret) -> [u8; 32] {
    hash(pepper, secret.expose())
}

/// Returns the HMAC of a whole key.
#[expect(clippy::expect_used, reason = "the tag of HMAC-SHA256 has 32 bytes")]
fn hash(pepper: &hmac::Key, text: &str) -> [u8; 32] {
    let tag = hmac::sign(pepper, text.as_bytes());
    tag.as_ref().try_into().expect("32 bytes")
}

/// The time for which a snapshot of a server's keys may be used without an answer of the server.
const CONFIRMED_FOR: Duration = Duration::from_secs(90);

/// The longest wait until all gateways have read a change, and the time between two looks.
const LONGEST_WAIT: Duration = Duration::from_secs(3);
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);

/// The last time that the database holds: a signed number of nanoseconds since 1970.
const LAST_TIME: UtcTime = UtcTime(i64::MAX as u64);

#[cfg(test)]
mod tests {
    use tollgate_sql::testing::TestServer;

    use super::*;

    fn parsed(new: &NewKey) -> KeySecret<&str> {
        KeySecret::parse(new.secret.expose()).expect("a key")
    }

    /// A standby that takes over may lack the newest changes, and gives their numbers again.
    #[test]
    fn revoked_key_stays_revoked_when_server_forgets() {
        let Some(server) = TestServer::shared() else { return };
        let (folder, database) = (tempfile::tempdir().expect("a folder"), server.new_database());
        let place = DatabasePlace::Server(server.address(&database));
        let keys = KeyStore::open_at(folder.path(), place).expect("opens");
        let tenant = TenantId::new("acme").expect("a name");
        let create = |now| keys.create(&tenant, KeyOptions::default(), UtcTime(now));
        let (first, second) = (create(5).expect("creates"), create(6).expect("creates"));
        keys.revoke(&first.record.id, UnderWay::Finish, UtcTime(7)).expect("revokes");
        keys.refresh().expect("reads");
        let works = |new: &NewKey| keys.verify(parsed(new), UtcTime(8)).is_some();
        assert!(!works(&first) && works(&second));
        // The row of the first key as it was, and a later revocation with an old number.
        let id = second.record.id.as_str();
        server.run(
            &database,
            &format!(
                "UPDATE keys SET revoked_at = NULL, changed = 1;
                 UPDATE keys SET revoked_at = 7 WHERE id = '{id}'"
            ),
        );
        server.cut_connections(&database);
        keys.refresh().expect("reads");
        assert!(!works(&first), "it was revoked");
        assert!(!works(&second), "its number was seen before");
    }

    /// A gateway that is cut off from the server hears of no revocation.
    #[test]
    fn keys_of_silent_server_stop_after_ninety_seconds() {
        let Some(server) = TestServer::start() else { return };
        let folder = tempfile::tempdir().expect("a folder");
        let place = DatabasePlace::Server(server.address(&server.new_database()));
        let keys = KeyStore::open_at(folder.path(), place).expect("opens");
        let tenant = TenantId::new("acme").expect("a name");
        let new = keys.create(&tenant, KeyOptions::default(), UtcTime(5)).expect("creates");
        server.kill();
        assert!(keys.refresh().is_err());
        let now = BootTime::now();
        let at = |seconds| now.plus(Duration::from_secs(seconds));
        assert!(keys.is_confirmed_at(at(80)), "the copy is used for a while");
        assert!(!keys.is_confirmed_at(at(91)));
        server.resume();
        keys.refresh().expect("reads");
        assert!(keys.is_confirmed_at(at(80)));
        assert_eq!(keys.list(None).expect("reads"), std::slice::from_ref(&new.record));
        assert!(keys.verify(parsed(&new), UtcTime(6)).is_some());
        // A file is changed by processes of this machine alone.
        let file = KeyStore::open(folder.path()).expect("opens");
        assert!(file.is_confirmed_at(at(1_000_000)));
    }
}
