//! Safetensors files of one model, mapped into memory and checked.
//!
//! One file or many with an index. A header is read within bounds; a file
//! that is shorter or longer than its header says, a shard that is missing
//! and a tensor that is not where the index says are refused here, so that
//! what is asked for later either has its exact shape or names its file.

mod shard;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use shard::Shard;

/// The safetensors files of one model.
#[derive(Debug)]
pub struct Weights {
    folder: PathBuf,
    shards: Vec<Shard>,
    /// Tensor name to shard.
    places: BTreeMap<String, usize>,
}

/// One tensor, as it lies in its file: little endian, row-major.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// The type of its elements.
    pub element: Element,
    /// Exactly as many bytes as its shape and type say.
    pub bytes: &'a [u8],
}

/// The types of elements that the engine reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// 32 bits.
    F32,
    /// 16 bits, IEEE half.
    F16,
    /// 16 bits, the upper half of an F32.
    Bf16,
}

/// Why weights were refused.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// A file could not be read or mapped.
    #[error("cannot read weights {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The shards' index is not the JSON that it should be.
    #[error("{} is malformed", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// The index is too large, empty, or names a shard outside the folder.
    #[error("{}: {reason}", path.display())]
    IndexContent {
        /// The index.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A file's header is torn, hostile or not safetensors.
    #[error("{}: not a whole safetensors file: {reason}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A tensor that the model needs is in no file, or not in the one that
    /// the index names.
    #[error("{}: tensor {tensor} is missing", path.display())]
    Missing {
        /// The file, or the folder when no file claims to have it.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor's shape is not the one that `config.json` implies.
    #[error("{}: tensor {tensor} has shape {found:?}, config.json implies {expected:?}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape that was wanted.
        expected: Vec<usize>,
    },
    /// A tensor's elements are of a type that the engine does not read.
    #[error("{}: tensor {tensor} is {found}: only F32, F16 and BF16 are supported", path.display())]
    Type {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The type's name in safetensors.
        found: String,
    },
}

impl Weights {
    /// Maps `model.safetensors`, or the shards that
    /// `model.safetensors.index.json` names, and checks every header.
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

    fn open_sharded(folder: &Path, index: &Path) -> Result<Self, WeightsError> {
        let map = read_index(index)?;
        let mut names: Vec<&String> = map.values().collect();
        names.sort();
        names.dedup();
        if names.len() > MAX_SHARDS {
            return Err(index_content(index, format!("names more than {MAX_SHARDS} shards")));
        }
        if let Some(name) = names.iter().find(|name| !is_plain_file_name(name)) {
            return Err(index_content(index, format!("{name:?} is not a plain file name")));
        }
        let shards: Vec<Shard> =
            names.iter().map(|name| Shard::open(folder, name)).collect::<Result<_, _>>()?;
        let mut places = BTreeMap::new();
        for (tensor, file) in &map {
            let place = names.binary_search(&file).expect("names holds every value of the map");
            if !shards[place].has(tensor) {
                let path = folder.join(file);
                return Err(WeightsError::Missing { path, tensor: tensor.clone() });
            }
            places.insert(tensor.clone(), place);
        }
        Ok(Self { folder: folder.to_owned(), shards, places })
    }

    /// A tensor that must be there with this shape.
    ///
    /// # Errors
    /// [`WeightsError::Missing`], [`WeightsError::Shape`],
    /// [`WeightsError::Type`].
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, WeightsError> {
        match self.places.get(name) {
            Some(&place) => self.shards[place].tensor(name, shape),
            None => {
                Err(WeightsError::Missing { path: self.folder.clone(), tensor: name.to_owned() })
            }
        }
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    /// Every file by name, in order of name, whole.
    pub fn files(&self) -> Vec<(&str, &[u8])> {
        self.shards.iter().map(|shard| (shard.name(), shard.bytes())).collect()
    }
}

impl Element {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

impl Tensor<'_> {
    /// The elements `range` as f32, exactly.
    ///
    /// # Panics
    /// If `range` reaches behind the tensor or `out` is not as long as it.
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
    use crate::model::{ModelError, read_json_bytes};
    let bytes = read_json_bytes(path).map_err(|error| match error {
        ModelError::Read { path, source } => WeightsError::Read { path, source },
        other => index_content(path, other.to_string()),
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

/// A name in the same folder: an index must not reach out of it.
fn is_plain_file_name(name: &str) -> bool {
    name.ends_with(".safetensors") && !name.contains(['/', '\\', '\0']) && !name.starts_with('.')
}

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const MAX_SHARDS: usize = 1_024;
