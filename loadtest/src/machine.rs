//! The machine and the program of a run, for its report.

use serde::Serialize;

/// The machine that sent the load, and the version of the program.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The version of tollgate.
    pub version: &'static str,
    /// The name of the processor; `unknown processor` if the system does not tell it.
    pub processor: String,
    /// The number of processors that the program may use.
    pub processors: usize,
}

impl Machine {
    /// Describes this machine.
    pub fn here() -> Self {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            processor: processor(&info).unwrap_or("unknown processor").to_owned(),
            processors: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        }
    }
}

/// Returns the name of the first processor in the text of `/proc/cpuinfo`.
fn processor(info: &str) -> Option<&str> {
    let (_, name) = info.lines().find(|line| line.starts_with("model name"))?.split_once(':')?;
    Some(name.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_name_is_read() {
        let info = "processor\t: 0\nmodel name\t: A B-1 @ 2 GHz\nflags\t\t: x\n";
        assert_eq!(processor(info), Some("A B-1 @ 2 GHz"));
        assert_eq!(processor("Hardware : x\n"), None);
    }
}
