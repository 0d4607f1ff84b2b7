//! Copies of a ledger: taken from one snapshot while it is written, checked
//! before they get their name, and put back in its place.
//!
//! What was posted after a backup comes again from the workers' journals where
//! these still have it. Where they do not, blocks are missing: a ledger that
//! was restored passes over them, each with its record.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use rusqlite::backup::{Backup, StepResult};
use rusqlite::{Connection, OptionalExtension, TransactionBehavior};
use tollgate_domain::UtcTime;

use crate::audit::chain::Chain;
use crate::check::{Checked, wal};
use crate::{AdminAction, Ledger, LedgerError, LedgerReader, WalRewriter, post, schema};

/// Why there is no copy.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// A ledger cannot be read or written.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// A file cannot be made, synced or renamed.
    #[error("{}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// What was to be copied is damaged, or the copy is.
    #[error("{} is damaged: {finding}", path.display())]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// The first that is wrong with it.
        finding: String,
    },
}

impl Ledger {
    /// Copies the ledger at `from` to `to`, also beside the process that
    /// writes it. The copy is one snapshot, in one file, on the disk and sound
    /// when this returns; an older file of that name is replaced.
    ///
    /// # Errors
    /// [`BackupError`]; nothing of the name `to` was made or changed then.
    pub fn backup(from: &Path, to: &Path) -> Result<Checked, BackupError> {
        let unfinished = with_end(to, ".unfinished");
        let source = schema::open_reader(from)?;
        let checked = copy(&source, &unfinished).and_then(|()| sound(&unfinished));
        let checked = checked.and_then(|checked| {
            put_in_place(&unfinished, to)?;
            Ok(checked)
        });
        if checked.is_err() {
            let _ = fs::remove_file(&unfinished); // it may not even be there
        }
        checked
    }

    /// Puts the `backup` in the place of the ledger at `path`, which is moved
    /// aside, and records that this was done. That nobody writes there is for
    /// the caller to see to. Returns where the ledger before lies now, if
    /// there was one.
    ///
    /// # Errors
    /// [`BackupError`]; the ledger in place is the one that was there.
    pub fn restore(
        backup: &Path,
        path: &Path,
        action: &AdminAction,
    ) -> Result<Option<PathBuf>, BackupError> {
        sound(backup)?;
        let unfinished = with_end(path, ".unfinished");
        copy(&schema::open_reader(backup)?, &unfinished)?;
        mark(&unfinished, action)?;
        let aside =
            path.exists().then(|| with_end(path, &format!(".before-{}", action.at.unix_seconds())));
        if let Some(aside) = &aside {
            // A log beside another database than its own would destroy it.
            for (from, to) in [(wal::beside(path), wal::beside(aside)), (shm(path), shm(aside))] {
                match fs::rename(&from, &to) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    moved => moved.map_err(at(&from))?,
                }
            }
            fs::hard_link(path, aside).map_err(at(aside))?;
        }
        put_in_place(&unfinished, path)?;
        Ok(aside)
    }
}

impl LedgerReader {
    /// When the ledger was last restored; `None` where it never was. Blocks
    /// that began before and that no journal has any more are passed over.
    ///
    /// # Errors
    /// Storage errors.
    pub fn restored(&self) -> Result<Option<UtcTime>, LedgerError> {
        self.read(restored)
    }
}

pub(crate) fn restored(connection: &Connection) -> Result<Option<UtcTime>, LedgerError> {
    let at: Option<u64> = connection
        .prepare_cached("SELECT value FROM meta WHERE name = 'restored'")?
        .query_row([], |row| row.get(0))
        .optional()?;
    Ok(at.map(UtcTime))
}

fn copy(source: &Connection, to: &Path) -> Result<(), BackupError> {
    match fs::remove_file(to) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        removed => removed.map_err(at(to))?,
    }
    let copied = || -> Result<(), LedgerError> {
        let mut target = Connection::open(to)?;
        // All in one step, so that it is one snapshot whoever writes meanwhile.
        let step = Backup::new(source, &mut target)?.step(-1)?;
        if step != StepResult::Done {
            return Err(LedgerError::Busy);
        }
        // One file, with no log beside it.
        target.pragma_update(None, "journal_mode", "DELETE")?;
        Ok(())
    };
    copied()?;
    File::open(to).and_then(|file| file.sync_all()).map_err(at(to))
}

/// Checks a copy.
fn sound(path: &Path) -> Result<Checked, BackupError> {
    let checked = Ledger::check_file(path)?;
    match checked.findings.iter().find(|finding| !finding.is_remark()) {
        None => Ok(checked),
        Some(finding) => {
            Err(BackupError::Damaged { path: path.to_owned(), finding: finding.message.clone() })
        }
    }
}

/// Notes in a restored ledger that it is one.
fn mark(path: &Path, action: &AdminAction) -> Result<(), BackupError> {
    let marked = || -> Result<(), LedgerError> {
        let mut connection = schema::open_writer(path, None, &WalRewriter::default())?;
        let mut chain = Chain::load(&connection, false)?;
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        post::record_action(&transaction, &mut chain, action)?;
        transaction.execute("REPLACE INTO meta VALUES ('restored', ?1)", [action.at.0])?;
        transaction.commit()?;
        // As above; the next start makes the log again.
        connection.pragma_update(None, "journal_mode", "DELETE")?;
        Ok(())
    };
    marked()?;
    File::open(path).and_then(|file| file.sync_all()).map_err(at(path))
}

fn put_in_place(unfinished: &Path, path: &Path) -> Result<(), BackupError> {
    fs::rename(unfinished, path).map_err(at(path))?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    File::open(folder).and_then(|file| file.sync_all()).map_err(at(folder))
}

fn with_end(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    PathBuf::from(name)
}

fn shm(path: &Path) -> PathBuf {
    with_end(path, "-shm")
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> BackupError {
    let path = path.to_owned();
    move |source| BackupError::File { path, source }
}
