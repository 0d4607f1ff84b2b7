//! Load by h2load, a generator that is not ours, on a core of its own.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::process::Process;
use crate::run::command;

/// What is asked, how often at once.
pub(super) struct Load<'a> {
    pub(super) url: String,
    pub(super) protocol: Protocol,
    pub(super) headers: &'a [String],
    /// POSTed; without one it is a GET.
    pub(super) body: Option<&'a Path>,
    /// The status that every answer must have, or all but `exceptions`.
    pub(super) status: u16,
    pub(super) exceptions: u64,
    pub(super) seconds: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    H1,
    H2,
}

/// What came of it.
#[derive(Debug, PartialEq)]
pub(super) struct Answered {
    pub(super) per_second: f64,
    pub(super) requests: u64,
    /// Answers by the first digit of their status, 2 to 5.
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

    /// 32 requests at once, as connections or as streams.
    fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::H1 => &["--h1", "-c", "32"],
            Self::H2 => &["-c", "4", "-m", "8"],
        }
    }
}

impl Load<'_> {
    /// Loads `servers` and gives the answers and the processor seconds that
    /// the servers took for each thousand of them.
    pub(super) fn run(&self, servers: &[&Process]) -> Result<(Answered, f64)> {
        let seconds =
            || -> Result<f64> { servers.iter().map(|server| server.processor_seconds()).sum() };
        let before = seconds()?;
        let answered = self.send()?;
        let used = seconds()? - before;
        Ok((Answered { ..answered }, used * 1e6 / answered.requests as f64))
    }

    fn send(&self) -> Result<Answered> {
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
        let answered = read(&text).with_context(|| format!("h2load said: {text}"))?;
        self.judge(&answered).with_context(|| format!("{}: {text}", self.url))?;
        Ok(answered)
    }

    fn judge(&self, answered: &Answered) -> Result<()> {
        let right = answered.by_class[usize::from(self.status / 100) - 2];
        let all: u64 = answered.by_class.iter().sum();
        if answered.failed > 0 || all - right > self.exceptions {
            bail!("not all answers were {}", self.status);
        }
        Ok(())
    }
}

/// The core of all that serves.
pub(super) const SERVER_CORE: &str = "0";
/// The core of all that asks.
const LOAD_CORE: &str = "1";

/// The part of a config that lets this load in: as many connections as it
/// likes, and of requests what its one source may send.
pub(super) fn door(requests_per_second: u32, request_burst: u32) -> String {
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
requests_per_second = {requests_per_second}
request_burst = {request_burst}
"#
    )
}

/// Requests a second that no load reaches.
pub(super) const UNBOUNDED: u32 = 1_000_000;

/// A program that may run on one core only.
pub(super) fn pinned(core: &str, program: &str) -> Command {
    let mut taskset = command("taskset");
    taskset.args(["-c", core, program]);
    taskset
}

/// h2load's summary.
fn read(text: &str) -> Option<Answered> {
    let after = |mark: &str| text.lines().find_map(|line| line.trim().strip_prefix(mark));
    let number = |words: &str, unit: &str| -> Option<u64> {
        words.split(", ").find_map(|part| part.trim().strip_suffix(unit)?.trim().parse().ok())
    };
    let finished = after("finished in ")?;
    let per_second = finished.split(", ").nth(1)?.strip_suffix(" req/s")?.parse().ok()?;
    let requests = after("requests: ")?;
    let classes = after("status codes: ")?;
    let of = |class: &str| number(classes, class);
    Some(Answered {
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
    fn reads_a_summary() {
        let text = "finished in 3.00s, 12345.67 req/s, 1.20MB/s\n\
            requests: 37037 total, 37069 started, 37037 done, 37036 succeeded, 1 failed, 0 errored, 0 timeout\n\
            status codes: 37036 2xx, 0 3xx, 1 4xx, 0 5xx\n";
        let expected = Answered {
            per_second: 12_345.67,
            requests: 37_037,
            by_class: [37_036, 0, 1, 0],
            failed: 0,
        };
        assert_eq!(read(text), Some(expected));
        assert_eq!(read("finished"), None);
    }
}
