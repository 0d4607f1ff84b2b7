//! Files: the objects that clients read. Every key is always there, as the SDKs' types
//! want it.

use schemars::JsonSchema;
use serde::Serialize;

/// The `purpose` of the input of batches.
pub const PURPOSE_BATCH: &str = "batch";
/// The `purpose` of the results of a batch.
pub const PURPOSE_BATCH_OUTPUT: &str = "batch_output";

/// A file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct FileObject {
    /// The file's id.
    pub id: String,
    object: FileTag,
    /// The size in bytes.
    pub bytes: u64,
    /// The time of creation, in Unix seconds.
    pub created_at: u64,
    /// The time from which the file does not exist, in Unix seconds.
    pub expires_at: u64,
    /// The client's name for the file.
    pub filename: String,
    /// The use of the file.
    pub purpose: &'static str,
    status: Processed,
    status_details: (),
}

/// The facts of a file, from which its object is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileFacts {
    /// The file's id.
    pub id: String,
    /// The size in bytes.
    pub bytes: u64,
    /// The time of creation, in Unix seconds.
    pub created: u64,
    /// The time from which the file does not exist, in Unix seconds.
    pub expires: u64,
    /// The client's name for the file.
    pub filename: String,
    /// The use of the file.
    pub purpose: &'static str,
}

impl From<FileFacts> for FileObject {
    fn from(facts: FileFacts) -> Self {
        let FileFacts { id, bytes, created, expires, filename, purpose } = facts;
        Self {
            id,
            object: FileTag::File,
            bytes,
            created_at: created,
            expires_at: expires,
            filename,
            purpose,
            status: Processed::Processed,
            status_details: (),
        }
    }
}

/// The value of `object` in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum FileTag {
    File,
}

/// The value of `status` in a file. A file exists once all of it is on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Processed {
    Processed,
}

/// The answer to a deletion of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct DeletedFile {
    id: String,
    object: FileTag,
    deleted: bool,
}

impl DeletedFile {
    /// Makes the answer for the file `id`.
    pub fn new(id: String) -> Self {
        Self { id, object: FileTag::File, deleted: true }
    }
}

/// A page of a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ListObject<T> {
    object: &'static str,
    data: Vec<T>,
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
}

/// An object with an id that a list names.
pub trait Listed {
    /// Returns the id.
    fn id(&self) -> &str;
}

impl Listed for FileObject {
    fn id(&self) -> &str {
        &self.id
    }
}

impl<T: Listed> ListObject<T> {
    /// Makes a page. `has_more` is true if another page follows.
    pub fn new(data: Vec<T>, has_more: bool) -> Self {
        let id = |object: Option<&T>| object.map(|object| object.id().to_owned());
        let (first_id, last_id) = (id(data.first()), id(data.last()));
        Self { object: "list", data, first_id, last_id, has_more }
    }
}
