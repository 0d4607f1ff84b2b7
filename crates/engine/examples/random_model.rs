//! Writes a model folder of a named shape with random weights: `cargo run -p
//! tollgate-engine --example random_model -- qwen2.5-0.5b DIR [SEED]`. The model serves
//! like a real one, but its answers have no meaning.

use std::error::Error;
use std::path::Path;

use tollgate_engine::random_model::{ModelSpec, RandomModel};
use tollgate_engine::weights::Element;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (shape, folder, seed) = match words.as_slice() {
        [shape, folder] => (shape, folder, 1),
        [shape, folder, seed] => (shape, folder, seed.parse()?),
        _ => return Err("usage: random_model SHAPE DIR [SEED]".into()),
    };
    let known = "tiny, qwen2.5-0.5b, qwen2.5-7b, llama-3-8b";
    let spec = ModelSpec::named(shape).ok_or_else(|| format!("{shape:?} is none of {known}"))?;
    RandomModel { spec, element: Element::Bf16, seed }.write(Path::new(folder))?;
    println!("{shape} with random weights is in {folder}");
    Ok(())
}
