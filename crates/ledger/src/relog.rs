//! The write-ahead log, written once more before SQLite opens it to write.
//!
//! After a failed sync the kernel may have forgotten which pages are not on the
//! disk, and shows them all the same. A process that knows takes them for not
//! written; one that comes after its death does not know: SQLite would take
//! the commits in them for committed, and append behind them, or copy them into
//! the file, and a power cut would take the middle away from what has been
//! acknowledged since. Written again, the same bytes are dirty pages as any, and
//! a sync puts them on the disk.

use std::fmt;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use crate::check::wal;

/// Writes the log of a database once more: of the real file system, unless
/// somebody plays one. Nobody else may write the database meanwhile.
#[derive(Clone)]
pub struct WalRewriter(Arc<Rewrite>);

type Rewrite = dyn Fn(&Path) -> io::Result<()> + Send + Sync;

impl WalRewriter {
    /// One that does it by `rewrite`, which is given the database's path.
    pub fn new(rewrite: impl Fn(&Path) -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self(Arc::new(rewrite))
    }

    /// Does it for the database at `path`; where there is no log it is done.
    ///
    /// # Errors
    /// The log cannot be read, written or synced.
    pub fn rewrite(&self, path: &Path) -> io::Result<()> {
        (self.0)(path)
    }
}

impl Default for WalRewriter {
    fn default() -> Self {
        Self::new(rewrite_file)
    }
}

impl fmt::Debug for WalRewriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WalRewriter")
    }
}

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
            return log.sync_all();
        }
        log.write_all_at(&part[..read], at)?;
        at += read as u64;
    }
}

/// Bytes that are copied at once.
const AT_ONCE: usize = 1 << 20;
