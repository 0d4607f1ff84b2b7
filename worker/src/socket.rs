//! The worker's Unix socket. Only the worker's own user may enter its folder. A
//! socket that a dead process left is replaced; a socket of a living process is
//! not.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::time::Instant;

use crate::WorkerError;

/// A listening socket and its file.
pub(crate) struct Socket {
    pub(crate) listener: UnixListener,
    pub(crate) file: SocketFile,
}

/// A guard that removes the socket's file when it is dropped.
pub(crate) struct SocketFile(PathBuf);

/// Listens on `path`. Waits a few seconds for a predecessor that is ending.
pub(crate) async fn listen(path: &Path) -> Result<Socket, WorkerError> {
    let failed = |source| WorkerError::Socket { path: path.to_owned(), source };
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        own_folder(folder).map_err(failed)?;
    }
    // A symbolic link must not lead to a file in another place.
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => {
            if !becomes_free(path).await {
                return Err(WorkerError::SocketInUse(path.to_owned()));
            }
            match fs::remove_file(path) {
                // The predecessor removed the file at its end.
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
                _ => (),
            }
        }
        Ok(_) => {
            // The file may hold data, so it is not removed.
            let what = "the path exists and is not a socket";
            return Err(failed(io::Error::new(io::ErrorKind::AlreadyExists, what)));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => (),
        Err(error) => return Err(failed(error)),
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    Ok(Socket { listener, file: SocketFile(path.to_owned()) })
}

/// Returns true once no process accepts connections on `path`. Waits for a
/// predecessor: a worker that lost its parent still finishes its step and its
/// journal.
#[expect(clippy::disallowed_methods, reason = "the wait for the predecessor has a bound")]
async fn becomes_free(path: &Path) -> bool {
    let until = Instant::now() + PREDECESSOR;
    // The socket of a dead process refuses connections, even if its file is still there.
    while UnixStream::connect(path).await.is_ok() {
        if Instant::now() >= until {
            return false;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    true
}

/// Time that a predecessor has to end.
const PREDECESSOR: Duration = Duration::from_secs(3);

/// Creates the folder with mode 0700, or checks that no other user may enter it.
fn own_folder(folder: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().recursive(true).mode(0o700).create(folder) {
        Ok(()) => (),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => (),
        Err(error) => return Err(error),
    }
    // A folder that existed may have wider permissions.
    let mode = fs::metadata(folder)?.permissions().mode();
    if mode & 0o077 == 0 {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!("other users may enter {}; its mode must be 0700", folder.display()),
    ))
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // A file that stays behind is replaced by the next start.
        let _ = fs::remove_file(&self.0);
    }
}
