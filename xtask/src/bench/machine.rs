//! The machine of a benchmark, in public facts, and its load.

use std::fs;

use anyhow::Result;
use serde::Serialize;

use crate::run::{command, output};

/// The facts about the machine.
#[derive(Serialize)]
pub(super) struct Machine {
    processor: String,
    cores: usize,
    /// The instruction sets of the processor that decide which kernels run.
    instructions: Vec<&'static str>,
    memory_gib: u64,
    system: String,
    kernel: String,
    compiler: String,
}

/// The instruction sets that decide which kernels run.
const KERNEL_INSTRUCTIONS: [&str; 6] =
    ["avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"];

impl Machine {
    /// Reads the facts from the files of the system.
    pub(super) fn read() -> Result<Self> {
        let processors = fs::read_to_string("/proc/cpuinfo")?;
        let flags = field(&processors, "flags").unwrap_or_default();
        let has = |name: &&str| flags.split_whitespace().any(|flag| flag == *name);
        let memory = fs::read_to_string("/proc/meminfo")?;
        let kib = field(&memory, "MemTotal").and_then(|text| text.strip_suffix(" kB"));
        let kib: u64 = kib.and_then(|text| text.parse().ok()).unwrap_or_default();
        let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
        let system = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
        Ok(Self {
            processor: field(&processors, "model name").unwrap_or("unknown").to_owned(),
            cores: std::thread::available_parallelism()?.get(),
            instructions: KERNEL_INSTRUCTIONS.into_iter().filter(has).collect(),
            memory_gib: (kib + (1 << 19)) >> 20,
            system: system.unwrap_or("unknown").trim_matches('"').to_owned(),
            kernel: output(command("uname").arg("-r"))?.trim().to_owned(),
            compiler: output(command("rustc").arg("--version"))?.trim().to_owned(),
        })
    }

    /// Formats the machine in one line.
    pub(super) fn line(&self) -> String {
        let Self { processor, cores, instructions, memory_gib, system, .. } = self;
        let instructions = instructions.join(" ");
        format!("{processor}, {cores} cores ({instructions}), {memory_gib} GiB, {system}")
    }
}

/// Returns the number of running or runnable programs, on average over the last minute.
pub(super) fn load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or_default()
}

/// Finds the first value of `name` in lines of `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::field;

    #[test]
    fn field_finds_exact_names_only() {
        let text = "model\t\t: 143\nmodel name\t: A processor\nMemTotal:  24 kB\n";
        assert_eq!(field(text, "model name"), Some("A processor"));
        assert_eq!(field(text, "MemTotal"), Some("24 kB"));
        assert_eq!(field(text, "flags"), None);
    }
}
