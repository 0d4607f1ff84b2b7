//! The data folder: created for its owner only, and locked by one instance.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, Mode, flock};
use rustix::io::Errno;

/// A lock on a data folder, held until the value is dropped.
pub struct Locked {
    _file: File,
}

/// Sets the umask of this process and of its workers: whatever they make is for its
/// owner only, files 0600 and folders 0700. SQLite and other libraries make files
/// without naming a mode, so the modes cannot be set one by one.
pub fn keep_files_private() {
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
}

/// Creates `folder` if it is missing, for its owner only (0700).
///
/// # Errors
/// The folder cannot be created, or it is open to others and belongs to another
/// user.
pub fn make(folder: &Path) -> Result<()> {
    let shown = folder.display();
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .with_context(|| format!("data folder {shown}"))?;
    // The folder may exist already, with wider permissions.
    let open = fs::metadata(folder)?.permissions().mode() & 0o077 != 0;
    if open {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o700))
            .with_context(|| format!("cannot close the data folder {shown} to other users"))?;
    }
    Ok(())
}

/// Creates `folder` if it is missing and locks it.
///
/// # Errors
/// The folder cannot be created or written, or another instance holds it.
pub fn lock(folder: &Path) -> Result<Locked> {
    make(folder)?;
    let shown = folder.display();
    let path = folder.join("lock");
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        // The text of the holder must survive until the lock is taken.
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .with_context(|| path.display().to_string())?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => bail!("data folder {shown} is in use by {}", holder(&mut file)),
        Err(error) => return Err(error).with_context(|| format!("cannot lock {shown}")),
    }
    close_to_others(folder, DEEPEST);
    // The file keeps the text of the last holder until it is overwritten.
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())?;
    Ok(Locked { _file: file })
}

/// The address of a running gateway's admin listener in its data folder. Dropping the value
/// removes the file.
pub struct Announced {
    path: PathBuf,
}

/// Writes the address of the admin listener into `folder`, where commands look for it.
///
/// # Errors
/// The file cannot be written.
pub fn announce(folder: &Path, admin: SocketAddr) -> Result<Announced> {
    let path = folder.join(ADDRESS_FILE);
    let draft = folder.join(format!("{ADDRESS_FILE}.new"));
    // The rename is atomic, so that no command reads half an address.
    // With the folder: a copy of it must not lead commands to this gateway.
    let place = fs::canonicalize(folder)?;
    fs::write(&draft, format!("{}\n{}\n", reachable(admin), place.display()))
        .and_then(|()| fs::rename(&draft, &path))
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(Announced { path })
}

/// Returns the URL that [`announce`] has written, if there is one. The gateway that wrote it
/// may have been killed.
pub fn announced(folder: &Path) -> Option<String> {
    let text = fs::read_to_string(folder.join(ADDRESS_FILE)).ok()?;
    let (url, place) = text.trim_end().split_once('\n')?;
    let is_here = fs::canonicalize(folder).ok()?.display().to_string() == place;
    is_here.then(|| url.to_owned())
}

/// Returns the URL of a listener as this host reaches it.
pub fn reachable(mut address: SocketAddr) -> String {
    match address.ip() {
        // An unspecified address is no target, but a listener on it also listens on
        // loopback.
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    format!("https://{address}")
}

impl Drop for Announced {
    fn drop(&mut self) {
        // Commands notice that no gateway listens at an address that stays.
        let _ = fs::remove_file(&self.path);
    }
}

/// Takes the permissions of other users from everything in `folder`: an earlier
/// version, or a copy of the folder, may have left some. SQLite gives its log the mode
/// of the database, so an open database would stay open.
fn close_to_others(folder: &Path, depth: u32) {
    // A folder that cannot be listed holds nothing that this user made.
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        // The metadata of a link is its own: the file behind it may be anywhere.
        let Ok(metadata) = entry.metadata() else { continue };
        let (path, mode) = (entry.path(), metadata.permissions().mode());
        if !metadata.is_symlink() && mode & 0o077 != 0 {
            let closed = fs::set_permissions(&path, fs::Permissions::from_mode(mode & 0o700));
            if let Err(error) = closed {
                tracing::warn!(%error, path = %path.display(), "cannot close a file of the data folder to other users");
            }
        }
        if metadata.is_dir() && depth > 0 {
            close_to_others(&path, depth - 1);
        }
    }
}

/// Returns a description of the lock's holder, which wrote its process id into the
/// file.
fn holder(file: &mut File) -> String {
    let mut text = String::new();
    match file.read_to_string(&mut text) {
        Ok(_) if !text.trim().is_empty() => format!("another tollgate (process {})", text.trim()),
        _ => "another tollgate".to_owned(),
    }
}

/// The file with the URL of the running gateway's admin listener.
const ADDRESS_FILE: &str = "admin.address";

/// Folders within folders of the data folder: `workers/NAME/journal` has three.
const DEEPEST: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announced_address_is_of_its_folder_alone() {
        let parent = tempfile::tempdir().expect("a folder");
        let (folder, copy) = (parent.path().join("data"), parent.path().join("copy"));
        for folder in [&folder, &copy] {
            fs::create_dir(folder).expect("a folder");
        }
        assert_eq!(announced(&folder), None);
        let address = "0.0.0.0:9443".parse().expect("an address");
        let held = announce(&folder, address).expect("writes");
        assert_eq!(announced(&folder).as_deref(), Some("https://127.0.0.1:9443"));
        fs::copy(folder.join(ADDRESS_FILE), copy.join(ADDRESS_FILE)).expect("copies");
        assert_eq!(announced(&copy), None);
        drop(held);
        assert_eq!(announced(&folder), None);
    }

    #[test]
    fn data_folder_has_one_instance() {
        let parent = tempfile::tempdir().expect("a folder");
        let folder = parent.path().join("deep/data");
        let first = lock(&folder).expect("free");
        let error = lock(&folder).err().expect("taken").to_string();
        let us = format!("in use by another tollgate (process {})", std::process::id());
        assert!(error.contains(&us), "{error}");
        assert_eq!(fs::metadata(&folder).expect("made").permissions().mode() & 0o777, 0o700);
        drop(first);
        lock(&folder).expect("free again");
    }
}
