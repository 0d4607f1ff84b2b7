//! The folder in which several gateways keep the bytes of files and batches. A file in it
//! names the store whose bytes these are: a gateway with another folder would miss the files
//! of the others, and one with another database would delete them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::blobs::at;
use crate::disk::{Disk, HostDisk};
use crate::error::JobError;
use crate::rows::StorePlace;

/// The file that names the store.
const NAME: &str = "store.id";

/// Checks that `folder` is the one of the store, and makes it if the store has none.
///
/// # Errors
/// [`JobError::Folder`], or the folder cannot be read or written.
pub(crate) fn join(folder: &Path, place: StorePlace) -> Result<(), JobError> {
    let refuse = |problem| Err(JobError::Folder { path: folder.to_owned(), problem });
    HostDisk.create_folder(folder).map_err(|source| at(folder, source))?;
    let path = folder.join(NAME);
    let id = format!("{:032x}\n", place.id);
    match fs::read_to_string(&path) {
        Ok(found) if found == id => Ok(()),
        Ok(_) => refuse("it has the files and batches of another database"),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at(&path, error)),
        // A gateway with a folder of its own machine would not find the files of the others.
        Err(_) if place.has_folder => refuse(
            "the file store.id is missing: it is not the folder that the other gateways use, or it \
             is not mounted",
        ),
        Err(_) => {
            let mut found = fs::read_dir(folder).map_err(|source| at(folder, source))?;
            if found.next().is_some() {
                return refuse("it is not empty, and no file store.id says that it is of batches");
            }
            name(folder, &id).map_err(|source| at(&path, source))
        }
    }
}

/// Writes the file that names the store. After a power cut it is whole or not there.
fn name(folder: &Path, id: &str) -> io::Result<()> {
    let part = folder.join(format!("{NAME}.part"));
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
    file.write_all(id.as_bytes())?;
    file.sync_all()?;
    fs::rename(&part, folder.join(NAME))?;
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_folder_refuses_other_stores() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("batches");
        let problem = |has_folder, id| match join(&path, StorePlace { id, has_folder }) {
            Ok(()) => "",
            Err(JobError::Folder { problem, .. }) => problem,
            Err(other) => panic!("{other}"),
        };
        assert!(problem(true, 7).contains("not the folder that the other gateways use"));
        assert_eq!(problem(false, 7), "");
        assert_eq!(problem(true, 7), "");
        assert!(problem(true, 8).contains("another database"));
        fs::remove_file(path.join(NAME)).expect("removed");
        fs::write(path.join("a"), "b").expect("written");
        assert!(problem(false, 7).contains("not empty"));
    }
}
