//! Opening, checking, copying and compacting of ledgers.

use std::path::{Path, PathBuf};

use tollgate_sql::ServerAddress;

use crate::act::AdminAction;
use crate::audit_key::AuditKey;
use crate::error::LedgerError;
use crate::handle::LedgerHandle;
use crate::operations::backup::{self, BackupError};
use crate::operations::check::{self, Checked, Finding, Findings};
use crate::operations::move_to_server::Moved;
use crate::operations::{archive, move_to_server, wal};
use crate::options::{DatabasePlace, LedgerOptions};
use crate::reader::LedgerReader;
use crate::writer::Writer;

/// The façade that opens, checks and copies ledgers by their path.
pub struct Ledger;

impl Ledger {
    /// Opens or makes the ledger at `path` with the defaults.
    ///
    /// # Errors
    /// As [`Ledger::open_with`].
    pub fn open(path: &Path) -> Result<LedgerHandle, LedgerError> {
        Self::open_with(LedgerOptions::new(path))
    }

    /// Opens or makes a ledger and starts its writer. The caller ensures, by a lock on
    /// the data folder, that no other process writes the ledger.
    ///
    /// # Errors
    /// [`LedgerError::Open`], [`LedgerError::Log`], [`LedgerError::Format`] and
    /// [`LedgerError::Damaged`].
    pub fn open_with(options: LedgerOptions) -> Result<LedgerHandle, LedgerError> {
        let (handle, writer) = Writer::open(options)?;
        std::thread::Builder::new()
            .name("ledger".to_owned())
            .spawn(move || writer.run())
            .map_err(|error| LedgerError::Damaged(format!("no thread for the ledger: {error}")))?;
        Ok(handle)
    }

    /// Opens a ledger without a thread, for tests that control time: the owner of the
    /// returned value drives the writer.
    ///
    /// # Errors
    /// As [`Ledger::open_with`].
    #[cfg(feature = "test-support")]
    pub fn open_manual(
        options: LedgerOptions,
    ) -> Result<(LedgerHandle, crate::ManualLedger), LedgerError> {
        let (handle, writer) = Writer::open(options)?;
        Ok((handle, crate::ManualLedger::new(writer)))
    }

    /// Opens a ledger for reading, beside a process that writes it.
    ///
    /// # Errors
    /// The ledger cannot be opened, there is none, or it is of another version.
    pub fn open_read_only(place: impl Into<DatabasePlace>) -> Result<LedgerReader, LedgerError> {
        LedgerReader::open(&place.into())
    }

    /// Checks a ledger before it is written again: everything that
    /// [`Self::check_file`] checks, or, where that would take minutes, the file, its
    /// write-ahead log and the chain of records. A torn last commit is what a power
    /// cut leaves; it was never acknowledged, and is only logged. A server checks its own
    /// files, and other gateways write there at the same time, so nothing is read of it.
    ///
    /// # Errors
    /// [`LedgerError::Damaged`] with the first finding. A missing ledger is no error,
    /// nor is one that cannot be opened: the caller that opens it gets that error.
    pub fn check_start(place: impl Into<DatabasePlace>) -> Result<(), LedgerError> {
        let place = place.into();
        let DatabasePlace::File(path) = &place else { return Ok(()) };
        Self::check_log(path)?;
        // An older format cannot be read yet; opening it for writing migrates it.
        let Ok(reader) = LedgerReader::open(&place) else {
            return Ok(());
        };
        let findings = reader.findings(check::checks_at_start);
        // A remark, such as a skipped block, must not prevent a start.
        match findings.into_iter().find(|finding| !finding.is_remark()) {
            Some(Finding { message, .. }) => Err(LedgerError::Damaged(message)),
            None => Ok(()),
        }
    }

    /// Refuses a write-ahead log with a damage that SQLite would hide.
    fn check_log(path: &Path) -> Result<(), LedgerError> {
        let log = wal::beside(path);
        match check::find_torn_log(path)?.map(|torn| (torn.message(&log), torn)) {
            Some((found, wal::Torn::AtTheEnd { .. })) => {
                tracing::warn!(
                    found,
                    "incomplete last commit in the write-ahead log; recovering to the commit before it"
                );
            }
            // SQLite would silently drop acknowledged commits here.
            Some((found, _)) => return Err(LedgerError::Damaged(found)),
            None => {}
        }
        Ok(())
    }

    /// Checks the ledger at `place`, also beside the processes that write it.
    ///
    /// # Errors
    /// There is no ledger, or one of another version.
    pub fn check(place: &DatabasePlace) -> Result<Checked, LedgerError> {
        match place {
            DatabasePlace::File(path) => Self::check_file(path),
            DatabasePlace::Server(_) => Ok(Self::check_rows(&LedgerReader::open(place)?)),
        }
    }

    fn check_rows(reader: &LedgerReader) -> Checked {
        let findings = reader.check();
        // A table that cannot be counted is among the findings.
        let counted = reader.count().unwrap_or_else(|_| Checked::nothing(Vec::new()));
        Checked { findings, ..counted }
    }

    /// Checks the ledger at `path`, also beside the process that writes it: first the
    /// write-ahead log on the disk, then the rows as [`LedgerReader::check`].
    ///
    /// # Errors
    /// There is no ledger, or one of another version.
    pub fn check_file(path: &Path) -> Result<Checked, LedgerError> {
        let mut findings = Findings::default();
        // SQLite drops torn frames without an error, so the log is read without SQLite first.
        if let Some(torn) = check::find_torn_log(path)? {
            findings.add("file", torn.message(&wal::beside(path)));
        }
        let reader = match Self::open_read_only(path) {
            Ok(reader) => reader,
            // A file that cannot even be opened as a database is a finding.
            Err(LedgerError::Open { source, .. }) if path.exists() => {
                findings.add("file", source.to_string());
                return Ok(Checked::nothing(findings.into_list()));
            }
            Err(error) => return Err(error),
        };
        let checked = Self::check_rows(&reader);
        let mut findings = findings.into_list();
        findings.extend(checked.findings);
        Ok(Checked { findings, ..checked })
    }

    /// Copies the ledger at `from` to `to`, also beside the process that writes it.
    /// The copy is one snapshot in one file. It is on the disk and sound when this
    /// returns. An older file at `to` is replaced.
    ///
    /// # Errors
    /// [`BackupError`]; then no file at `to` was made or changed.
    pub fn backup(from: &Path, to: &Path) -> Result<Checked, BackupError> {
        backup::backup(from, to, Self::check_file)
    }

    /// Puts the `backup` in the place of the ledger at `path`, which is moved aside,
    /// and records `action`. The caller ensures that no process writes there. Returns
    /// the new place of the ledger that was there, if there was one.
    ///
    /// # Errors
    /// [`BackupError`]; then the ledger at `path` is unchanged.
    pub fn restore(
        backup: &Path,
        path: &Path,
        action: &AdminAction,
    ) -> Result<Option<PathBuf>, BackupError> {
        backup::restore(backup, path, action, Self::check_file)
    }

    /// Copies the ledger at `path` to a database server, every row unchanged, after it has
    /// recorded `action` and signed the log with `key`. The caller ensures that no process
    /// writes the file, and that it is sound. The file stays as it is, without a log beside
    /// it.
    ///
    /// # Errors
    /// [`LedgerError`]; then the server has no part of the ledger, and the move can be run again.
    pub fn move_to_server(
        path: &Path,
        address: &ServerAddress,
        action: &AdminAction,
        key: &AuditKey,
    ) -> Result<Moved, LedgerError> {
        move_to_server::run(path, address, action, key)
    }

    /// Takes the records before `to`, and everything that they tell of, out of the
    /// ledger at `path`, and records `action` with added detail. The caller has a copy
    /// and ensures that no other process writes. The file shrinks to its contents.
    ///
    /// # Errors
    /// [`LedgerError`]; then nothing has changed.
    pub fn compact(path: &Path, to: u64, action: AdminAction) -> Result<(), LedgerError> {
        archive::compact(path, to, action)
    }
}
