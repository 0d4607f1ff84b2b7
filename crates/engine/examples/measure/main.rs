//! The engine as one side of a benchmark: it says `ready`, then obeys a line at
//! a time and answers each with a line of JSON, so that whoever measures can
//! take turns between it and a peer within one run.
//!
//! `measure MODEL_DIR backend` runs steps of the CPU backend:
//! `greedy N ID,ID,...`, `decode BATCH CONTEXT STEPS`, `prefill TOKENS`,
//! `bandwidth`. `measure MODEL_DIR engine` runs whole requests:
//! `alone COUNT IN OUT`, `together COUNT IN OUT`. The end of its input ends it.
//! `measure make SHAPE MODEL_DIR` writes the folder, with random weights.

use std::error::Error;
use std::io::{BufRead, Write};
use std::path::PathBuf;

use serde_json::Value;
use tollgate_engine::model::ModelFiles;
use tollgate_engine::random_model::{ModelSpec, RandomModel};
use tollgate_engine::weights::Element;

mod requests;
mod steps;

/// What obeys.
trait Obeys {
    /// Does what `words` say.
    fn obey(&mut self, words: &[&str]) -> Result<Value, Box<dyn Error>>;
    /// Who it is, for the record.
    fn about(&self) -> Value;
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match *words.as_slice() {
        ["make", shape, folder] => make(shape, folder),
        [folder, "backend"] => obey(steps::Steps::new(&open(folder)?)?),
        [folder, "engine"] => obey(requests::Requests::new(&open(folder)?)?),
        _ => Err("usage: measure MODEL_DIR backend|engine, or measure make SHAPE MODEL_DIR".into()),
    }
}

fn obey(mut obeys: impl Obeys) -> Result<(), Box<dyn Error>> {
    let mut output = std::io::stdout().lock();
    writeln!(output, "ready {}", obeys.about())?;
    output.flush()?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        writeln!(output, "{}", obeys.obey(&words)?)?;
        output.flush()?;
    }
    Ok(())
}

fn open(folder: &str) -> Result<ModelFiles, Box<dyn Error>> {
    Ok(ModelFiles::open(&PathBuf::from(folder))?)
}

fn make(shape: &str, folder: &str) -> Result<(), Box<dyn Error>> {
    let unknown = || format!("a shape is one of {}", ModelSpec::NAMES.join(", "));
    let spec = ModelSpec::named(shape).ok_or_else(unknown)?;
    Ok(RandomModel { spec, element: Element::Bf16, seed: 1 }.write(&PathBuf::from(folder))?)
}
