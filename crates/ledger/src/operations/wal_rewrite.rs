//! The rewrite of the write-ahead log before SQLite opens it for writing.
//!
//! After a failed sync the kernel may show pages that are not on the disk. The
//! process that saw the failure treats them as not written. A later process does not
//! know: SQLite would take the commits in them as committed, append behind them, or
//! copy them into the file. A power cut would then remove the middle of what was
//! acknowledged since. Rewritten bytes are ordinary dirty pages, and a sync puts
//! them on the disk.

use std::fmt;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use super::wal;

/// The rewrite of a database's write-ahead log: on the real file system by default,
/// on a simulated one in tests. No other process may write the database meanwhile.
#[derive(Clone)]
pub struct WalRewriter(Arc<Rewrite>);

type Rewrite = dyn Fn(&Path) -> io::Result<()> + Send + Sync;

impl WalRewriter {
    /// Returns a rewriter that calls `rewrite` with the database's path.
    #[cfg(feature = "test-support")]
    pub fn new(rewrite: impl Fn(&Path) -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self(Arc::new(rewrite))
    }

    /// Rewrites and syncs the log of the database at `path`. Does nothing if there is
    /// no log.
    ///
    /// # Errors
    /// The log cannot be read, written or synced.
    pub fn rewrite(&self, path: &Path) -> io::Result<()> {
        (self.0)(path)
    }
}

impl Default for WalRewriter {
    fn default() -> Self {
        Self(Arc::new(rewrite_file))
    }
}

impl fmt::Debug for WalRewriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WalRewriter")
    }
}

/// Reads the log and writes the same bytes back.
fn rewrite_file(path: &Path) -> io::Result<()> {
    let log = match OpenOptions::new().read(true).write(true).open(wal::beside(path)) {
        Ok(log) => log,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let (mut part, mut at) = (vec![0; AT_ONCE], 0);
    loop {
        let read = log.read_at(&mut part, at)?;
        if read == 0 {
            // Only now are the rewritten pages on the disk.
            return log.sync_all();
        }
        // The same bytes at the same place: only their pages become dirty.
        log.write_all_at(&part[..read], at)?;
        at += read as u64;
    }
}

/// Bytes per read and write.
const AT_ONCE: usize = 1 << 20;
