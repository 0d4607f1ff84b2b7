//! The safetensors files of one model, mapped into memory and checked.
//!
//! A model has one file, or several with an index. Headers are read within bounds. A
//! file whose length differs from its header, a missing shard, or a tensor that is not
//! where the index says is refused here. A tensor that is requested later either has
//! its exact shape or gives an error that names its file.

mod shard;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::json_file::{self, JsonFileError};
use shard::Shard;

/// The safetensors files of one model.
#[derive(Debug)]
pub struct Weights {
    folder: PathBuf,
    shards: Vec<Shard>,
    /// Index of the shard of each tensor.
    places: BTreeMap<String, usize>,
}

/// One tensor with the bytes of its file: little endian, row-major.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// Type of the elements.
    pub element: Element,
    /// Exactly the bytes of the tensor's shape and type.
    pub bytes: &'a [u8],
}

/// The element types that the engine reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// IEEE single precision, 32 bits.
    F32,
    /// IEEE half precision, 16 bits.
    F16,
    /// The upper 16 bits of an F32.
    Bf16,
}

/// The reasons why weights are refused.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// A file could not be read or mapped.
    #[error("cannot read weights {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The shards' index is not valid JSON of the expected structure.
    #[error("{} is malformed", path.display())]
    Index {
        /// Path of the index file.
        path: PathBuf,
        /// The position and the cause.
        source: serde_json::Error,
    },
    /// The index is too large, empty, or names a shard outside the folder.
    #[error("{}: {reason}", path.display())]
    IndexContent {
        /// Path of the index file.
        path: PathBuf,
        /// A sentence about the fault.
        reason: String,
    },
    /// A file's header is truncated, malicious, or not safetensors.
    #[error("{}: not a whole safetensors file: {reason}", path.display())]
    Header {
        /// Path of the file.
        path: PathBuf,
        /// A sentence about the fault.
        reason: String,
    },
    /// A tensor of the model is in no file, or not in the file that the index names.
    #[error("{}: tensor {tensor} is missing", path.display())]
    Missing {
        /// The file, or the folder if no file has the tensor.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
    },
    /// A tensor's shape differs from the shape that `config.json` implies.
    #[error("{}: tensor {tensor} has shape {found:?}, config.json implies {expected:?}", path.display())]
    Shape {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// The shape in the file.
        found: Vec<usize>,
        /// The shape that `config.json` implies.
        expected: Vec<usize>,
    },
    /// A tensor has an element type that the engine does not read.
    #[error("{}: tensor {tensor} is {found}: only F32, F16 and BF16 are supported", path.display())]
    Type {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// The type's name in safetensors.
        found: String,
    },
}

impl Weights {
    /// Maps `model.safetensors`, or the shards that `model.safetensors.index.json`
    /// names, and checks every header.
    ///
    /// # Errors
    /// [`WeightsError`], which names the file and the tensor.
    pub fn open(folder: &Path) -> Result<Self, WeightsError> {
        let index = folder.join(INDEX);
        if index.exists() { Self::open_sharded(folder, &index) } else { Self::open_single(folder) }
    }

    fn open_single(folder: &Path) -> Result<Self, WeightsError> {
        let shard = Shard::open(folder, SINGLE)?;
        let places = shard.tensors().map(|name| (name.clone(), 0)).collect();
        Ok(Self { folder: folder.to_owned(), shards: vec![shard], places })
    }

    #[expect(clippy::expect_used, reason = "`names` holds every value of the map")]
    fn open_sharded(folder: &Path, index: &Path) -> Result<Self, WeightsError> {
        let map = read_index(index)?;
        let mut names: Vec<&String> = map.values().collect();
        names.sort();
        // The index lists a shard once for each of its tensors.
        names.dedup();
        if names.len() > MAX_SHARDS {
            return Err(index_content(index, format!("names more than {MAX_SHARDS} shards")));
        }
        // A path like ../../secret must not be opened.
        if let Some(name) = names.iter().find(|name| !is_plain_file_name(name)) {
            return Err(index_content(index, format!("{name:?} is not a plain file name")));
        }
        let shards: Vec<Shard> =
            names.iter().map(|name| Shard::open(folder, name)).collect::<Result<_, _>>()?;
        let mut places = BTreeMap::new();
        for (tensor, file) in &map {
            let place = names.binary_search(&file).expect("names holds every value of the map");
            // Checked now, so that a request for a listed tensor can only fail by its
            // shape or type.
            if !shards[place].has(tensor) {
                let path = folder.join(file);
                return Err(WeightsError::Missing { path, tensor: tensor.clone() });
            }
            places.insert(tensor.clone(), place);
        }
        Ok(Self { folder: folder.to_owned(), shards, places })
    }

    /// Returns a tensor, which must have this shape.
    ///
    /// # Errors
    /// [`WeightsError::Missing`], [`WeightsError::Shape`] or [`WeightsError::Type`].
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, WeightsError> {
        match self.places.get(name) {
            Some(&place) => self.shards[place].tensor(name, shape),
            None => {
                Err(WeightsError::Missing { path: self.folder.clone(), tensor: name.to_owned() })
            }
        }
    }

    /// Returns true if there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    /// Returns the name and the content of every file, in order of name.
    pub fn files(&self) -> Vec<(&str, &[u8])> {
        self.shards.iter().map(|shard| (shard.name(), shard.bytes())).collect()
    }
}

impl Element {
    /// Returns the bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

impl Tensor<'_> {
    /// Converts the elements in `range` to f32, without rounding.
    ///
    /// # Panics
    /// If `range` reaches behind the tensor, or `out` has another length.
    pub fn read(&self, range: std::ops::Range<usize>, out: &mut [f32]) {
        assert_eq!(range.len(), out.len(), "as many places as elements");
        let size = self.element.size();
        let bytes = &self.bytes[range.start * size..range.end * size];
        match self.element {
            Element::F32 => {
                for (to, from) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *to = f32::from_le_bytes(*from);
                }
            }
            Element::F16 => {
                for (to, from) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *to = half::f16::from_le_bytes(*from).to_f32();
                }
            }
            Element::Bf16 => {
                for (to, from) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *to = half::bf16::from_le_bytes(*from).to_f32();
                }
            }
        }
    }
}

#[derive(Deserialize)]
struct RawIndex {
    weight_map: BTreeMap<String, String>,
}

fn read_index(path: &Path) -> Result<BTreeMap<String, String>, WeightsError> {
    let bytes = json_file::read(path).map_err(|error| match error {
        JsonFileError::Read { path, source } => WeightsError::Read { path, source },
        too_large @ JsonFileError::TooLarge { .. } => index_content(path, too_large.to_string()),
    })?;
    let raw: RawIndex = serde_json::from_slice(&bytes)
        .map_err(|source| WeightsError::Index { path: path.to_owned(), source })?;
    if raw.weight_map.is_empty() {
        return Err(index_content(path, "weight_map is empty".to_owned()));
    }
    Ok(raw.weight_map)
}

fn index_content(path: &Path, reason: String) -> WeightsError {
    WeightsError::IndexContent { path: path.to_owned(), reason }
}

/// Returns true for a file name in the same folder. An index must not name files
/// outside its folder.
fn is_plain_file_name(name: &str) -> bool {
    name.ends_with(".safetensors") && !name.contains(['/', '\\', '\0']) && !name.starts_with('.')
}

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
// Each shard is an open map, and an index is not trusted.
const MAX_SHARDS: usize = 1_024;
