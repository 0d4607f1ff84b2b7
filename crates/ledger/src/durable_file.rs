//! Small files that are replaced at once and durably.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Replaces the file at `path`: a crash leaves the old one or the new one.
pub(crate) fn replace(path: &Path, text: &str) -> io::Result<()> {
    let unfinished = path.with_extension("new");
    let mut options = OpenOptions::new();
    // A crash may have left an unfinished file.
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(&unfinished)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&unfinished, path)?;
    // The new name is an entry of the folder, so the folder is synced too.
    File::open(path.parent().unwrap_or(path))?.sync_all()
}
