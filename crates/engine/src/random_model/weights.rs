//! Random tensors, written to one safetensors file as a stream.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use serde_json::{Map, json};

use super::RandomModel;
use crate::weights::Element;

pub(super) fn write(model: &RandomModel, path: &Path) -> io::Result<()> {
    let tensors = model.spec.tensors();
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    let mut end = 0;
    for (name, shape) in &tensors {
        let begin = end;
        end += shape.iter().product::<usize>() * model.element.size();
        let dtype = dtype(model.element);
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [begin, end] });
        header.insert(name.clone(), entry);
    }
    let mut header = serde_json::Value::Object(header).to_string();
    // Tensors start at a multiple of 8, as in files from other writers.
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let mut file = BufWriter::with_capacity(BUFFER_BYTES, File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut random = Random(model.seed);
    for (name, shape) in &tensors {
        let count = shape.iter().product();
        Draw::of(name, shape).write(&mut random, count, model.element, &mut file)?;
    }
    file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
}

/// Uniform distribution of a tensor's elements: `centre +- spread`.
struct Draw {
    centre: f32,
    spread: f32,
}

impl Draw {
    /// Returns the distribution for a tensor. Values must neither vanish nor explode across
    /// the layers: norms are near 1, and matrices are scaled by the root of their inputs.
    fn of(name: &str, shape: &[usize]) -> Self {
        match shape {
            [_] if name.ends_with("norm.weight") => Self { centre: 1.0, spread: 0.1 },
            [_] => Self { centre: 0.0, spread: 0.1 },
            [.., inputs] => {
                // A standard deviation of 1 is a spread of the root of 3.
                Self { centre: 0.0, spread: (3.0 / *inputs as f32).sqrt() }
            }
            [] => Self { centre: 0.0, spread: 0.0 },
        }
    }

    fn write(
        &self,
        random: &mut Random,
        count: usize,
        element: Element,
        file: &mut impl Write,
    ) -> io::Result<()> {
        // Written in pieces, so that memory does not grow with the tensor.
        let mut bytes = Vec::with_capacity(PIECE * element.size());
        let mut left = count;
        while left > 0 {
            let piece = left.min(PIECE);
            bytes.clear();
            for _ in 0..piece {
                let value = self.centre + self.spread * random.even();
                match element {
                    Element::F32 => bytes.extend(value.to_le_bytes()),
                    Element::F16 => bytes.extend(half::f16::from_f32(value).to_le_bytes()),
                    Element::Bf16 => bytes.extend(half::bf16::from_f32(value).to_le_bytes()),
                }
            }
            file.write_all(&bytes)?;
            left -= piece;
        }
        Ok(())
    }
}

/// The SplitMix64 generator.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// Returns a uniform number from -1 to 1.
    fn even(&mut self) -> f32 {
        // These are 24 bits, as many as an f32 holds exactly.
        (self.next() >> 40) as f32 / (1_u32 << 23) as f32 - 1.0
    }
}

fn dtype(element: Element) -> &'static str {
    match element {
        Element::F32 => "F32",
        Element::F16 => "F16",
        Element::Bf16 => "BF16",
    }
}

const BUFFER_BYTES: usize = 1 << 20;
const PIECE: usize = 1 << 16;
