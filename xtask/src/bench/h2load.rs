//! Load by h2load, a generator of another project, on a core of its own.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::process::Process;
use crate::run::command;

/// A request and the way to repeat it.
pub(super) struct Load<'a> {
    pub(super) url: String,
    pub(super) protocol: Protocol,
    pub(super) headers: &'a [String],
    /// The body of a POST; without one the request is a GET.
    pub(super) body: Option<&'a Path>,
    /// The expected status of every answer, except of at most `exceptions` answers.
    pub(super) status: u16,
    pub(super) exceptions: u64,
    pub(super) seconds: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    H1,
    H2,
}

/// The result of a load.
#[derive(Debug, PartialEq)]
pub(super) struct LoadResult {
    pub(super) per_second: f64,
    pub(super) requests: u64,
    /// The number of answers by the first digit of their status, 2 to 5.
    by_class: [u64; 4],
    failed: u64,
}

impl Protocol {
    pub(super) const ALL: [Self; 2] = [Self::H1, Self::H2];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::H1 => "h1",
            Self::H2 => "h2",
        }
    }

    /// Returns the flags for 32 simultaneous requests, as connections or as streams.
    fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::H1 => &["--h1", "-c", "32"],
            Self::H2 => &["-c", "4", "-m", "8"],
        }
    }
}

impl Load<'_> {
    /// Loads `servers`. Returns the answers, and the microseconds of processor time
    /// that the servers took for each request.
    pub(super) fn run(&self, servers: &[&Process]) -> Result<(LoadResult, f64)> {
        let seconds =
            || -> Result<f64> { servers.iter().map(|server| server.processor_seconds()).sum() };
        let before = seconds()?;
        let answered = self.send()?;
        let microseconds = (seconds()? - before) * 1e6 / answered.requests as f64;
        Ok((answered, microseconds))
    }

    fn send(&self) -> Result<LoadResult> {
        let mut load = pinned(LOAD_CORE, "h2load");
        load.args(["-t", "1", "-D", &self.seconds.to_string()]);
        load.args(self.protocol.arguments());
        for header in self.headers {
            load.args(["-H", header]);
        }
        if let Some(body) = self.body {
            load.arg("-d").arg(body);
        }
        let ran = load.arg(&self.url).output().context("h2load")?;
        let text = String::from_utf8_lossy(&ran.stdout);
        let answered =
            read(&text).with_context(|| format!("cannot read the summary of h2load: {text}"))?;
        self.check_statuses(&answered).with_context(|| format!("{}: {text}", self.url))?;
        Ok(answered)
    }

    /// Checks that at most `exceptions` answers have another status than expected.
    fn check_statuses(&self, answered: &LoadResult) -> Result<()> {
        let right = answered.by_class[usize::from(self.status / 100) - 2];
        let all: u64 = answered.by_class.iter().sum();
        if answered.failed > 0 || all - right > self.exceptions {
            bail!(
                "more than {} answers failed or had another status than {}",
                self.exceptions,
                self.status
            );
        }
        Ok(())
    }
}

/// The core of all servers.
pub(super) const SERVER_CORE: &str = "0";
/// The core of the load generator.
const LOAD_CORE: &str = "1";

/// Returns the part of a config that admits this load: enough connections, and the
/// given rates, in requests a second, of its one source and of its one key's reads.
pub(super) fn listener_config(source_requests: u32, reads: u32) -> String {
    format!(
        r#"
[gateway]
listen = "127.0.0.1:0"
admin_listen = "127.0.0.1:0"

[gateway.connections]
per_source = 1000
new_per_second = 10_000
new_burst = 10_000

[gateway.sources]
requests_per_second = {source_requests}
request_burst = {source_requests}

# The loads read /v1/models with one key.
[gateway.reads]
requests_per_second = {reads}
request_burst = {reads}
"#
    )
}

/// The requests a second that no load reaches.
pub(super) const UNBOUNDED: u32 = 1_000_000;

/// Returns a command for a program that may run on one core only.
pub(super) fn pinned(core: &str, program: &str) -> Command {
    let mut taskset = command("taskset");
    taskset.args(["-c", core, program]);
    taskset
}

/// Parses the summary of h2load.
fn read(text: &str) -> Option<LoadResult> {
    let after = |mark: &str| text.lines().find_map(|line| line.trim().strip_prefix(mark));
    let number = |words: &str, unit: &str| -> Option<u64> {
        words.split(", ").find_map(|part| part.trim().strip_suffix(unit)?.trim().parse().ok())
    };
    let finished = after("finished in ")?;
    let per_second = finished.split(", ").nth(1)?.strip_suffix(" req/s")?.parse().ok()?;
    let requests = after("requests: ")?;
    let classes = after("status codes: ")?;
    let of = |class: &str| number(classes, class);
    Some(LoadResult {
        per_second,
        requests: number(requests, "succeeded")? + number(requests, "failed")?,
        by_class: [of("2xx")?, of("3xx")?, of("4xx")?, of("5xx")?],
        failed: number(requests, "errored")? + number(requests, "timeout")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_gives_requests_and_statuses() {
        let text = "finished in 3.00s, 12345.67 req/s, 1.20MB/s\n\
            requests: 37037 total, 37069 started, 37037 done, 37036 succeeded, 1 failed, 0 errored, 0 timeout\n\
            status codes: 37036 2xx, 0 3xx, 1 4xx, 0 5xx\n";
        let expected = LoadResult {
            per_second: 12_345.67,
            requests: 37_037,
            by_class: [37_036, 0, 1, 0],
            failed: 0,
        };
        assert_eq!(read(text), Some(expected));
        assert_eq!(read("finished"), None);
    }
}
