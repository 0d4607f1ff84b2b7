//! Copies of a ledger: taken from one snapshot while it is written, checked before
//! they get their name, and put back in its place.
//!
//! Workers' journals send again what was posted after a backup, as far as they still
//! have it. The blocks that no journal has are missing: a restored ledger skips
//! them, each with its record.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::chain::Chain;
use super::check::{Checked, Finding};
use super::migrate::open_writer;
use super::wal_rewrite::WalRewriter;
use super::{post, wal};
use crate::act::AdminAction;
use crate::error::LedgerError;
use crate::rows::database::Database;
use crate::rows::meta;

/// The reason why there is no copy.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// A ledger cannot be read or written.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// A file cannot be made, synced or renamed.
    #[error("{}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The original or the copy is damaged.
    #[error("{} is damaged: {finding}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The first finding.
        finding: String,
    },
}

/// Copies the ledger at `from` to `to`. `check` checks a file.
pub(crate) fn backup(
    from: &Path,
    to: &Path,
    check: impl Fn(&Path) -> Result<Checked, LedgerError>,
) -> Result<Checked, BackupError> {
    let unfinished = with_end(to, ".unfinished");
    // A reader does not disturb the process that writes.
    let source = Database::open_reader(from)?;
    // Checked under the other name: a bad copy must not replace an earlier good backup.
    let checked = copy(&source, &unfinished).and_then(|()| sound(&unfinished, &check));
    let checked = checked.and_then(|checked| {
        put_in_place(&unfinished, to)?;
        Ok(checked)
    });
    if checked.is_err() {
        // Best effort: the file may not exist, and the next backup replaces it.
        let _ = fs::remove_file(&unfinished);
    }
    checked
}

/// Puts the `backup` in the place of the ledger at `path` and records `action`.
/// Returns the new place of the ledger that was there.
pub(crate) fn restore(
    backup: &Path,
    path: &Path,
    action: &AdminAction,
    check: impl Fn(&Path) -> Result<Checked, LedgerError>,
) -> Result<Option<PathBuf>, BackupError> {
    // Checked while nothing has changed: a damaged backup must not displace the ledger.
    sound(backup, &check)?;
    let unfinished = with_end(path, ".unfinished");
    copy(&Database::open_reader(backup)?, &unfinished)?;
    // Marked before it gets its name: a restored ledger must know that it is one.
    mark_restored(&unfinished, action)?;
    let aside =
        path.exists().then(|| with_end(path, &format!(".before-{}", action.at.unix_seconds())));
    if let Some(aside) = &aside {
        move_aside(path, aside)?;
    }
    put_in_place(&unfinished, path)?;
    Ok(aside)
}

/// Moves the write-ahead log and its index aside, and links the file there.
fn move_aside(path: &Path, aside: &Path) -> Result<(), BackupError> {
    // First the log: a log beside another database than its own would destroy it.
    for (from, to) in [(wal::beside(path), wal::beside(aside)), (shm(path), shm(aside))] {
        match fs::rename(&from, &to) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            moved => moved.map_err(at(&from))?,
        }
    }
    // A link, not a rename: until the last step a ledger stands at `path`.
    fs::hard_link(path, aside).map_err(at(aside))
}

fn copy(source: &Database, to: &Path) -> Result<(), BackupError> {
    // A killed backup may have left its unfinished file.
    match fs::remove_file(to) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        removed => removed.map_err(at(to))?,
    }
    source.copy_to(to)?;
    // Synced before the rename: the final name must not stand for bytes that a power cut can take.
    File::open(to).and_then(|file| file.sync_all()).map_err(at(to))
}

/// Checks a file and refuses a damaged one.
fn sound(
    path: &Path,
    check: &impl Fn(&Path) -> Result<Checked, LedgerError>,
) -> Result<Checked, BackupError> {
    let checked = check(path)?;
    match checked.findings.iter().find(|finding| !finding.is_remark()) {
        None => Ok(checked),
        Some(Finding { message, .. }) => {
            Err(BackupError::Damaged { path: path.to_owned(), finding: message.clone() })
        }
    }
}

/// Notes in a ledger that it was restored.
fn mark_restored(path: &Path, action: &AdminAction) -> Result<(), BackupError> {
    let mark = || -> Result<(), LedgerError> {
        let mut database = open_writer(path, None, &WalRewriter::default())?;
        let mut chain = Chain::load(database.tables())?;
        let transaction = database.begin()?;
        post::record_action(transaction.tables(), &mut chain, action)?;
        meta::set_restored(transaction.tables(), action.at)?;
        transaction.commit()?;
        // The rename moves one file, so no commit may stay in a write-ahead log beside it.
        database.leave_one_file()
    };
    mark()?;
    File::open(path).and_then(|file| file.sync_all()).map_err(at(path))
}

/// Renames a finished file and syncs its folder, so that the name outlasts a power
/// cut.
fn put_in_place(unfinished: &Path, path: &Path) -> Result<(), BackupError> {
    fs::rename(unfinished, path).map_err(at(path))?;
    // The parent of a bare file name is the empty path, which cannot be opened.
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    File::open(folder).and_then(|file| file.sync_all()).map_err(at(folder))
}

fn with_end(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    PathBuf::from(name)
}

/// Returns the path of the log's index.
fn shm(path: &Path) -> PathBuf {
    with_end(path, "-shm")
}

/// Names the file in an error.
fn at(path: &Path) -> impl FnOnce(io::Error) -> BackupError {
    let path = path.to_owned();
    move |source| BackupError::File { path, source }
}
