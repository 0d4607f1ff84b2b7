//! The reading of a model's JSON files, within a bound.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The largest JSON file that a model folder may hold, bytes. The shards' index of a very large
/// model has some hundred KiB.
pub const MAX_JSON_BYTES: u64 = 16 << 20;

/// The reasons why a JSON file cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum JsonFileError {
    /// The system could not read the file.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is larger than [`MAX_JSON_BYTES`].
    #[error("{} is larger than {MAX_JSON_BYTES} bytes", path.display())]
    TooLarge {
        /// Path of the file.
        path: PathBuf,
    },
}

/// Reads a JSON file of at most [`MAX_JSON_BYTES`].
///
/// # Errors
/// [`JsonFileError`], which names the file.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, JsonFileError> {
    let fail = |source| JsonFileError::Read { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(fail)?;
    // One byte more than allowed shows that the file is too large. The size in the file's metadata
    // is not enough: a pipe or a device has none.
    file.take(MAX_JSON_BYTES + 1).read_to_end(&mut bytes).map_err(fail)?;
    if bytes.len() as u64 > MAX_JSON_BYTES {
        return Err(JsonFileError::TooLarge { path: path.to_owned() });
    }
    Ok(bytes)
}
