//! One safetensors file, mapped into memory, with its header read within bounds.
//!
//! A file has eight bytes of header length, a JSON header with the type, shape and
//! place of each tensor, and the tensors' bytes. The header is not trusted: every
//! tensor must lie within the file and be as long as its shape implies.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use serde::Deserialize;

use super::{Element, Tensor, WeightsError};

#[derive(Debug)]
pub(super) struct Shard {
    path: PathBuf,
    name: String,
    map: Mmap,
    tensors: BTreeMap<String, Entry>,
    /// Offset of the tensors' bytes in the file.
    data: usize,
}

/// A tensor's entry in the header, checked.
#[derive(Debug)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    /// Bytes of the tensor behind the header, within the file.
    place: std::ops::Range<usize>,
}

impl Shard {
    pub(super) fn open(folder: &Path, name: &str) -> Result<Self, WeightsError> {
        let path = folder.join(name);
        let read = |source| WeightsError::Read { path: path.clone(), source };
        let file = File::open(&path).map_err(read)?;
        // SAFETY: the map is read-only, and its bytes are only read as bytes. If
        // another process truncates the file while the model loads, a signal stops this
        // process. A worker is a process of its own, so the gateway survives that.
        let map = unsafe { Mmap::map(&file) }.map_err(read)?;
        let (data, tensors) = parse_header(&map)
            .map_err(|reason| WeightsError::Header { path: path.clone(), reason })?;
        Ok(Self { name: name.to_owned(), map, tensors, data, path })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.map
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &String> {
        self.tensors.keys()
    }

    pub(super) fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    pub(super) fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, WeightsError> {
        let (path, tensor) = (|| self.path.clone(), || name.to_owned());
        let Some(entry) = self.tensors.get(name) else {
            return Err(WeightsError::Missing { path: path(), tensor: tensor() });
        };
        if entry.shape != shape {
            let (found, expected) = (entry.shape.clone(), shape.to_vec());
            return Err(WeightsError::Shape { path: path(), tensor: tensor(), found, expected });
        }
        let Some(element) = element(&entry.dtype) else {
            let found = entry.dtype.clone();
            return Err(WeightsError::Type { path: path(), tensor: tensor(), found });
        };
        Ok(Tensor { element, bytes: &self.map[self.data..][entry.place.clone()] })
    }
}

/// Returns the offset of the data, and the tensors by name.
fn parse_header(map: &[u8]) -> Result<(usize, BTreeMap<String, Entry>), String> {
    let Some((length, rest)) = map.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(format!("{} bytes hold no header", map.len()));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(format!("a header of {length} bytes is more than {MAX_HEADER_BYTES}"));
    }
    let length = length as usize;
    let Some((header, data)) = rest.split_at_checked(length) else {
        return Err(format!("the file ends within its header of {length} bytes"));
    };
    let raw: BTreeMap<String, RawEntry> =
        serde_json::from_slice(header).map_err(|error| format!("header: {error}"))?;
    let tensors = raw
        .into_iter()
        .filter(|(name, _)| name != "__metadata__")
        .map(|(name, entry)| Ok((name.clone(), check_entry(&name, entry, data.len())?)))
        .collect::<Result<_, String>>()?;
    Ok((LENGTH_BYTES + length, tensors))
}

/// A tensor's entry in the JSON. `__metadata__` has other fields, so all fields are
/// optional.
#[derive(Deserialize)]
struct RawEntry {
    dtype: Option<String>,
    shape: Option<Vec<usize>>,
    data_offsets: Option<(usize, usize)>,
}

fn check_entry(name: &str, raw: RawEntry, available: usize) -> Result<Entry, String> {
    let RawEntry { dtype: Some(dtype), shape: Some(shape), data_offsets: Some((from, to)) } = raw
    else {
        return Err(format!("tensor {name} lacks dtype, shape or data_offsets"));
    };
    if from > to {
        return Err(format!("tensor {name} ends before it begins"));
    }
    if to > available {
        return Err(format!("tensor {name} ends at byte {to} of {available}: the file is torn"));
    }
    // A file may contain types that the engine does not read; only a request for such a
    // tensor is refused.
    if let Some(element) = element(&dtype) {
        // The product of a malicious shape may overflow.
        let bytes = shape.iter().try_fold(element.size(), |sum, &side| sum.checked_mul(side));
        if bytes != Some(to - from) {
            return Err(format!("tensor {name} has {} bytes for shape {shape:?}", to - from));
        }
    }
    Ok(Entry { dtype, shape, place: from..to })
}

fn element(dtype: &str) -> Option<Element> {
    match dtype {
        "F32" => Some(Element::F32),
        "F16" => Some(Element::F16),
        "BF16" => Some(Element::Bf16),
        _ => None,
    }
}

const LENGTH_BYTES: usize = 8;
// The header is parsed as a whole, so a damaged length must not make it huge.
const MAX_HEADER_BYTES: u64 = 32 << 20;
