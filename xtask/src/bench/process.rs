//! Processes that a benchmark starts: their output, their processor time, and their
//! end.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::run::{command, output};

/// The longest wait for a started program to be ready or to answer an order.
const TIMEOUT: Duration = Duration::from_secs(300);

/// A program that runs until this value is dropped.
pub(super) struct Process {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    name: String,
}

impl Process {
    /// Starts `command` with an open standard input and reads its output in a thread.
    pub(super) fn start(name: &str, command: &mut Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("could not start {name}"))?;
        let stdout = BufReader::new(child.stdout.take().expect("stdout was piped above"));
        let (sender, lines) = sync_channel(4_096);
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // The channel is bounded: if it is full, lines are dropped, so that the
                // program never blocks.
                let _ = sender.try_send(line);
            }
        });
        let input = child.stdin.take();
        Ok(Self { child, input, lines, name: name.to_owned() })
    }

    /// Returns the next line of output, at most [`TIMEOUT`] from now.
    pub(super) fn line(&self) -> Result<String> {
        match self.lines.recv_timeout(TIMEOUT) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => {
                bail!("{} printed no line within {} s", self.name, TIMEOUT.as_secs())
            }
            Err(RecvTimeoutError::Disconnected) => {
                bail!("{} ended before it printed the expected line", self.name)
            }
        }
    }

    /// Waits for the line that begins with `ready` and returns the rest of the line.
    pub(super) fn ready(&self) -> Result<String> {
        loop {
            if let Some(rest) = self.line()?.strip_prefix("ready ") {
                return Ok(rest.to_owned());
            }
        }
    }

    /// Closes the program's input and returns all lines until the program ends.
    pub(super) fn end(&mut self) -> Vec<String> {
        drop(self.input.take());
        self.lines.iter().collect()
    }

    /// Sends a line and parses the answer, one line of JSON.
    pub(super) fn ask(&mut self, order: &str) -> Result<serde_json::Value> {
        let input = self.input.as_mut().expect("the input is open until `end`");
        writeln!(input, "{order}").with_context(|| format!("{}: {order}", self.name))?;
        let line = self.line()?;
        serde_json::from_str(&line).with_context(|| format!("{}: {order}: {line}", self.name))
    }

    /// Returns the memory of the process without its children, in MiB.
    pub(super) fn resident_mib(&self) -> Result<f64> {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", self.child.id()))?;
        let pages: f64 = statm.split_whitespace().nth(1).context("no second field")?.parse()?;
        Ok(pages * 4_096.0 / f64::from(1 << 20))
    }

    /// Begins the count of [`Self::peak_mib`] anew.
    pub(super) fn forget_peak(&self) -> Result<()> {
        Ok(std::fs::write(format!("/proc/{}/clear_refs", self.child.id()), "5")?)
    }

    /// Returns the most memory of the process without its children since [`Self::forget_peak`],
    /// in MiB.
    pub(super) fn peak_mib(&self) -> Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib: f64 = line.context("no VmHWM")?.trim().trim_end_matches(" kB").parse()?;
        Ok(kib / 1_024.0)
    }

    /// Kills the process, which cannot act on it, and waits for its end.
    pub(super) fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Returns the processor seconds of the process and its children so far.
    pub(super) fn processor_seconds(&self) -> Result<f64> {
        let ticks: u64 = family(self.child.id()).into_iter().map(ticks).sum();
        Ok(ticks as f64 / ticks_per_second()?)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Some programs end with their input, others on a signal. A program that still
        // runs after five seconds is killed.
        drop(self.input.take());
        let _ = command("kill").args(["-TERM", &self.child.id().to_string()]).status();
        for _ in 0..50 {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a process and all its descendants.
fn family(root: u32) -> Vec<u32> {
    let mut found = vec![root];
    let mut at = 0;
    while let Some(&process) = found.get(at) {
        at += 1;
        let Ok(threads) = std::fs::read_dir(format!("/proc/{process}/task")) else { continue };
        for thread in threads.filter_map(Result::ok) {
            let children = std::fs::read_to_string(thread.path().join("children"));
            found.extend(
                children
                    .unwrap_or_default()
                    .split_whitespace()
                    .filter_map(|pid| pid.parse::<u32>().ok()),
            );
        }
    }
    found
}

/// Returns the clock ticks in user and kernel mode, or 0 for a process that has ended.
fn ticks(process: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    used(&stat).unwrap_or(0)
}

/// Sums fields 14 and 15. Field 2 is a name in brackets that may contain brackets and
/// spaces, so the text is split behind the last bracket.
fn used(stat: &str) -> Option<u64> {
    let (_, after) = stat.rsplit_once(')')?;
    let mut fields = after.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let kernel: u64 = fields.next()?.parse().ok()?;
    Some(user + kernel)
}

fn ticks_per_second() -> Result<f64> {
    output(command("getconf").arg("CLK_TCK"))?.trim().parse().context("getconf CLK_TCK")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_read_past_brackets() {
        let stat = "42 (a) b) S 1 42 42 0 -1 4194560 1 2 3 4 700 55 9 9 20 0 1 0 5 6 7";
        assert_eq!(used(stat), Some(755));
        assert_eq!(used(""), None);
        assert!(ticks(std::process::id()) < u64::MAX);
        assert_eq!(family(std::process::id())[0], std::process::id());
    }
}
