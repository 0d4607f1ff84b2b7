//! Questions of admins to the key store, and the named admins. The store holds an HMAC of each admin's key and never
//! the key, as for the keys of tenants.

use std::collections::HashMap;
use std::fmt;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tollgate_domain::{AdminName, KeyId, TenantId, UtcTime};
use tollgate_ledger::keys::{AdminRow, KeyDatabase, KeyDatabaseError};

use super::super::roles::Role;
use super::super::secret::{NoRandomness, number_of};
use super::{KeyRecord, KeyStore, KeyStoreError, hash};

/// A named admin as lists show it, without secret and hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AdminRecord {
    /// The name, which no other admin has.
    #[schemars(with = "String")]
    pub name: AdminName,
    /// The role.
    pub role: Role,
    /// The time when the admin was created.
    #[schemars(with = "u64")]
    #[serde(rename = "created_ns")]
    pub created: UtcTime,
}

/// A new admin. The secret cannot be read again later.
#[derive(Clone, Debug)]
pub struct NewAdmin {
    /// The admin as lists will show it.
    pub record: AdminRecord,
    /// The whole key, for the admin.
    pub secret: AdminSecret,
}

/// The text of an admin's key: `tga-` and 256 random bits in hex. `Debug` hides the bits.
#[derive(Clone, PartialEq, Eq)]
pub struct AdminSecret(String);

/// The named admins in memory, by the HMAC of their keys.
pub(super) type Admins = HashMap<[u8; 32], AdminRecord>;

impl AdminSecret {
    /// Makes a key from the system's random numbers.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub(crate) fn draw() -> Result<Self, NoRandomness> {
        let mut bits = [0; 32];
        SystemRandom::new().fill(&mut bits).map_err(|_| NoRandomness)?;
        let hex = bits.iter().map(|byte| format!("{byte:02x}"));
        Ok(Self(hex.fold(PREFIX.to_owned(), |text, byte| text + &byte)))
    }

    /// Returns the whole key in plain text, to show it once.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for AdminSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AdminSecret({PREFIX}redacted)")
    }
}

impl KeyStore {
    /// Creates an admin.
    ///
    /// # Errors
    /// The name is taken, there are as many admins as there may be, or the store cannot be
    /// written.
    pub fn create_admin(
        &self,
        name: &AdminName,
        role: Role,
        now: UtcTime,
    ) -> Result<NewAdmin, KeyStoreError> {
        // Records name the key of the data folder's file `admin key`.
        if name.as_str() == FILE_ADMIN {
            return Err(KeyStoreError::AdminExists(name.clone()));
        }
        self.change(|change, pepper| {
            // Looked up in the transaction, so that two processes cannot make one name twice.
            let admins = change.admins()?;
            if admins.iter().any(|admin| admin.name == *name) {
                return Err(KeyStoreError::AdminExists(name.clone()));
            }
            if admins.len() >= MOST_ADMINS {
                return Err(KeyStoreError::TooManyAdmins(MOST_ADMINS));
            }
            let secret = AdminSecret::draw()?;
            let mac = hash(pepper, secret.expose());
            let record = AdminRecord { name: name.clone(), role, created: now };
            let (name, role) = (name.clone(), role.as_str().to_owned());
            change.insert_admin(&AdminRow { name, role, mac, created: now })?;
            Ok(NewAdmin { record, secret })
        })
    }

    /// Revokes an admin for ever. The name may be used again.
    ///
    /// # Errors
    /// There is no such admin, or the store cannot be written.
    pub fn revoke_admin(&self, name: &AdminName) -> Result<AdminRecord, KeyStoreError> {
        self.change(|change, _| {
            let found = change.admins()?.into_iter().find(|admin| admin.name == *name);
            let found = found.ok_or_else(|| KeyStoreError::UnknownAdmin(name.clone()))?;
            change.delete_admin(name)?;
            record(found)
        })
    }

    /// Returns the named admins, ordered by name.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn admins(&self) -> Result<Vec<AdminRecord>, KeyStoreError> {
        let rows = self.followed().database.admins()?;
        rows.into_iter().map(record).collect()
    }

    /// Returns up to `most` keys of `tenant`, or of all tenants, after the id `after`,
    /// ordered by id.
    ///
    /// # Errors
    /// The store cannot be read.
    pub(crate) fn list_page(
        &self,
        tenant: Option<&TenantId>,
        after: Option<&KeyId>,
        most: usize,
    ) -> Result<Vec<KeyRecord>, KeyStoreError> {
        let rows = self.followed().database.page(tenant, after, most)?;
        rows.into_iter().map(KeyRecord::of).collect()
    }

    /// Returns the time of the last use of a key in this process; `None` if there was none.
    pub(crate) fn last_used(&self, id: &KeyId) -> Option<UtcTime> {
        let used = self.entries().get(&number_of(id.as_str())?)?.last_used.load(Ordering::Relaxed);
        (used > 0).then_some(UtcTime(used))
    }

    /// Returns the admin whose key is `secret`.
    pub(crate) fn admin_of(&self, secret: &str) -> Option<AdminRecord> {
        // Longer text is no key, and hashing it would cost time.
        if secret.len() != SECRET_CHARS {
            return None;
        }
        let admins = self.shared.admins.read().unwrap_or_else(PoisonError::into_inner);
        // The time of the lookup depends on the hash, which no client can compute without
        // the pepper, and not on the secret.
        admins.get(&hash(&self.shared.pepper, secret)).cloned()
    }
}

/// Reads all admins of `database`.
pub(super) fn load(database: &mut KeyDatabase) -> Result<Admins, KeyStoreError> {
    let rows = database.admins()?;
    rows.into_iter().map(|row| Ok((row.mac, record(row)?))).collect()
}

fn record(row: AdminRow) -> Result<AdminRecord, KeyStoreError> {
    let AdminRow { name, role, mac: _, created } = row;
    let damaged =
        || KeyDatabaseError::Row { id: format!("of admin {name}"), column: "role".to_owned() };
    let role = role.parse().map_err(|_| damaged())?;
    Ok(AdminRecord { name, role, created })
}

/// The first characters of an admin's key.
const PREFIX: &str = "tga-";
/// Characters of an admin's key.
const SECRET_CHARS: usize = PREFIX.len() + 64;
/// The name that stands for the key in `admin.key`.
const FILE_ADMIN: &str = "key";
/// Named admins of one gateway.
const MOST_ADMINS: usize = 100;
