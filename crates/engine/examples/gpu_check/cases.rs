//! Runs cases one after the other, each in a process of its own: after a device
//! failure, every later case in the same process would fail too.

use std::error::Error;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::options::Options;

/// Runs all `titles` of a check and returns their results. A process that ends with an
/// error or without output has failed. Results are written as they come, so that a case
/// that hangs loses only itself.
pub(crate) fn apart(
    check: &str,
    titles: &[String],
    options: &Options,
) -> Result<Value, Box<dyn Error>> {
    let program = std::env::current_exe()?;
    gather(check, titles, options, |title| {
        eprintln!("{check} {title}");
        let mut case = Command::new(&program);
        case.args(std::env::args().skip(1)).args(["--case", title]).stdin(Stdio::null());
        let ended = case.stderr(Stdio::inherit()).output()?;
        let said = serde_json::from_slice::<Value>(&ended.stdout).ok();
        let ended = ended.status;
        let is_whole = |said: &Value| ended.success() || said["passed"] == false;
        Ok(said
            .filter(is_whole)
            .unwrap_or_else(|| json!({ "case": title, "passed": false, "why": ended.to_string() })))
    })
}

/// Collects the results of `run` for each case, and whether all passed.
pub(crate) fn gather(
    check: &str,
    titles: &[String],
    options: &Options,
    mut run: impl FnMut(&str) -> Result<Value, Box<dyn Error>>,
) -> Result<Value, Box<dyn Error>> {
    let told = |cases: &[Value]| {
        let passed = cases.iter().all(|case| case["passed"] != false);
        let whole = cases.len() == titles.len();
        json!({ "check": check, "passed": passed && whole, "cases": cases })
    };
    let mut cases: Vec<Value> = Vec::new();
    for title in titles {
        cases.push(run(title)?);
        if let Some(out) = &options.out {
            std::fs::write(out, format!("{:#}\n", told(&cases)))?;
        }
    }
    Ok(told(&cases))
}
