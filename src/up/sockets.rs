//! The folder of the workers' sockets.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The folder of the workers' sockets and options: in the data folder or, if that
/// path is too long for a socket, a temporary folder.
pub struct Sockets {
    folder: PathBuf,
    is_ours: bool,
}

impl Sockets {
    /// A socket's path may have 107 bytes. The rest is for the worker's name.
    const LONGEST_FOLDER: usize = 70;

    /// Makes the folder.
    ///
    /// # Errors
    /// The folder cannot be made, or another user made it.
    pub fn make(data: &Path) -> Result<Self> {
        let within = data.join("run");
        let is_ours = within.as_os_str().len() > Self::LONGEST_FOLDER;
        let folder = if is_ours {
            // The process id keeps two instances apart.
            std::env::temp_dir().join(format!("tollgate-{}", std::process::id()))
        } else {
            within
        };
        // Access to a socket is access to its worker, so only this user may enter the
        // folder.
        let made = DirBuilder::new().mode(0o700).create(&folder);
        match made {
            // In the shared temporary folder, an existing folder may belong to
            // another user.
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && !is_ours => {}
            made => made.with_context(|| format!("socket folder {}", folder.display()))?,
        }
        Ok(Self { folder, is_ours })
    }

    /// Returns the folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        if self.is_ours {
            // An error leaves only a small folder behind.
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }
}
