//! Runs the engine as one side of a benchmark. The program prints `ready`, then
//! executes one command a line and answers each with a line of JSON. A benchmark can
//! thus alternate between the engine and a peer within one run.
//!
//! `measure MODEL_DIR backend` runs steps of the CPU backend: `greedy N ID,ID,...`,
//! `decode BATCH CONTEXT STEPS`, `prefill TOKENS`, `bandwidth`. `measure MODEL_DIR
//! engine` runs whole requests: `alone COUNT IN OUT`, `together COUNT IN OUT`. The
//! program ends with its input. `measure make SHAPE MODEL_DIR` writes the folder, with
//! random weights.

#![allow(clippy::disallowed_methods, reason = "a program that measures time")]

use std::error::Error;
use std::io::{BufRead, Write};
use std::path::PathBuf;

use serde_json::Value;
use tollgate_engine::model::ModelFiles;
use tollgate_engine::random_model::{ModelSpec, RandomModel};
use tollgate_engine::weights::Element;

mod requests;
mod steps;

/// A target of commands.
trait Obeys {
    /// Executes the command `words`.
    fn obey(&mut self, words: &[&str]) -> Result<Value, Box<dyn Error>>;
    /// Returns a description for the record.
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
