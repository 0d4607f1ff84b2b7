//! The pepper: a secret of this server that goes into every stored key hash. A
//! stolen database without the pepper tells nothing about any key.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use aws_lc_rs::hmac;
use aws_lc_rs::rand::{SecureRandom, SystemRandom};

use super::KeyStoreError;

/// Reads the pepper file, or creates it on the first start. Two processes that
/// start at the same time end with the same pepper.
pub(super) fn load_or_create(path: &Path) -> Result<hmac::Key, KeyStoreError> {
    match read(path) {
        Err(KeyStoreError::Pepper { source, .. }) if source.kind() == ErrorKind::NotFound => {
            create(path)?;
            read(path)
        }
        other => other,
    }
}

fn read(path: &Path) -> Result<hmac::Key, KeyStoreError> {
    let fault = |source| KeyStoreError::Pepper { path: path.to_owned(), source };
    let file = File::open(path).map_err(fault)?;
    let mode = file.metadata().map_err(fault)?.permissions().mode();
    // A pepper that others can read protects nothing.
    if mode & 0o077 != 0 {
        return Err(KeyStoreError::PepperReadable { path: path.to_owned(), mode: mode & 0o777 });
    }
    // One byte more than expected is read, so that a longer file is noticed.
    let mut bytes = Vec::with_capacity(LENGTH + 1);
    file.take(LENGTH as u64 + 1).read_to_end(&mut bytes).map_err(fault)?;
    if bytes.len() != LENGTH {
        return Err(KeyStoreError::PepperTorn { path: path.to_owned() });
    }
    Ok(hmac::Key::new(hmac::HMAC_SHA256, &bytes))
}

/// Creates the pepper file. The bytes are written to a temporary file, which is
/// then linked to its name: a link fails if another process was first, and no
/// reader ever sees half a file.
fn create(path: &Path) -> Result<(), KeyStoreError> {
    let fault = |source| KeyStoreError::Pepper { path: path.to_owned(), source };
    // The parent of a plain file name is empty, and stands for the present folder.
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let mut random = [0; LENGTH + 8];
    SystemRandom::new()
        .fill(&mut random)
        .map_err(|_| fault(std::io::Error::other("no random numbers")))?;
    // The draft has a random name, because two processes may start at the same time.
    let (pepper, name) = random.split_at(LENGTH);
    let name: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
    let beside = path.with_extension(format!("new-{name}"));
    let written =
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside).and_then(
            |mut file| {
                file.write_all(pepper)?;
                // Synced before it has its name, because without it no stored key can be checked.
                file.sync_all()
            },
        );
    let linked = written.and_then(|()| match std::fs::hard_link(&beside, path) {
        // Another process was first: its pepper counts.
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        other => other,
    });
    let removed = std::fs::remove_file(&beside);
    // A name is on the disk only once the folder is. A database of keys that outlives its pepper
    // after a power cut would be of no use.
    let synced = linked.and(removed).and_then(|()| File::open(folder)?.sync_all());
    synced.map_err(fault)
}

/// Bytes of the pepper.
const LENGTH: usize = 32;
