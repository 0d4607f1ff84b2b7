//! The writer's open database together with the end of its audit log.

use super::chain::Chain;
use super::migrate;
use crate::audit_key::AuditKey;
use crate::error::LedgerError;
use crate::options::{DatabasePlace, LedgerOptions};
use crate::rows::database::{Database, Transaction};

/// An open ledger and the end of its chain.
pub(crate) struct Store {
    database: Database,
    chain: Chain,
}

impl Store {
    /// Opens the ledger for writing; makes or migrates it where needed.
    pub(crate) fn open(options: &LedgerOptions) -> Result<Self, LedgerError> {
        let LedgerOptions { place, home, max_pages, server_limit, log, .. } = options;
        let database = match place {
            DatabasePlace::File(path) => migrate::open_writer(path, *max_pages, log)?,
            DatabasePlace::Server(address) => {
                migrate::open_server(address, *server_limit, home.as_deref())?
            }
        };
        let chain = Chain::load(database.tables())?;
        Ok(Self { database, chain })
    }

    /// Runs `write` in a transaction and commits it. On an error neither the file
    /// nor the chain has changed.
    pub(crate) fn transact<T>(
        &mut self,
        write: impl FnOnce(&mut Transaction<'_>, &mut Chain) -> Result<T, LedgerError>,
    ) -> Result<T, LedgerError> {
        // A copy, because the chain must not move before the commit does.
        let mut chain = self.chain.clone();
        let has_others = self.database.may_have_other_writers();
        // The lock is taken first; a failure leaves nothing to undo.
        let mut transaction = self.database.begin()?;
        // Another gateway may have written since. Under the lock none does.
        if has_others && !chain.is_end_of(transaction.tables())? {
            chain = Chain::load(transaction.tables())?;
        }
        let done = write(&mut transaction, &mut chain)?;
        transaction.commit()?;
        self.chain = chain;
        Ok(done)
    }

    /// Signs the records that no checkpoint covers yet, in a transaction of its own.
    pub(crate) fn sign(&mut self, key: &AuditKey) -> Result<(), LedgerError> {
        if self.chain.unsigned() == 0 {
            return Ok(());
        }
        self.transact(|transaction, chain| {
            // The size is a primary key, and another gateway may have signed meanwhile.
            if chain.unsigned() == 0 {
                return Ok(());
            }
            chain.sign(transaction.tables(), key)
        })
    }

    /// Returns the number of records that no checkpoint covers yet.
    pub(crate) fn unsigned(&self) -> u64 {
        self.chain.unsigned()
    }

    /// The open database.
    pub(crate) fn database(&self) -> &Database {
        &self.database
    }
}
