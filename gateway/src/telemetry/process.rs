//! The memory, the processor time and the descriptors of this process, under the names that
//! Prometheus's own client libraries use. A scrape reads them from /proc; if
//! /proc cannot be read, the last figures stay.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::gauge;

/// The resources that this process uses.
#[derive(Debug)]
pub(super) struct ProcessMetrics {
    registry: Registry,
    resident_memory: Gauge,
    open_descriptors: Gauge,
    cpu: Counter<f64, AtomicU64>,
    started: Gauge<f64, AtomicU64>,
}

impl ProcessMetrics {
    pub(super) fn new() -> Self {
        // A registry without a prefix: dashboards expect these names exactly as they are.
        let mut registry = Registry::default();
        let (resident_memory, open_descriptors) = (Gauge::default(), Gauge::default());
        registry.register(
            "process_resident_memory_bytes",
            "Resident memory of the gateway",
            resident_memory.clone(),
        );
        registry.register(
            "process_open_fds",
            "Open descriptors of the gateway",
            open_descriptors.clone(),
        );
        let cpu = Counter::default();
        registry.register(
            "process_cpu_seconds",
            "Processor time of the gateway, in user and in system mode",
            cpu.clone(),
        );
        let started = Gauge::default();
        registry.register(
            "process_start_time_seconds",
            "Unix time at which the gateway started",
            started.clone(),
        );
        Self { registry, resident_memory, open_descriptors, cpu, started }
    }

    /// Reads /proc and returns the registry.
    pub(super) fn read(&self) -> &Registry {
        if let Some(bytes) = resident_memory() {
            self.resident_memory.set(gauge(bytes));
        }
        if let Ok(descriptors) = fs::read_dir("/proc/self/fd") {
            // One descriptor is that of the listing itself.
            self.open_descriptors.set(gauge(descriptors.count().saturating_sub(1)));
        }
        if let Some(ProcessTimes { cpu, started }) = process_times() {
            self.cpu.inner().store(cpu.to_bits(), Ordering::Relaxed);
            self.started.set(started);
        }
        &self.registry
    }
}

fn resident_memory() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    // The kernel prints `kB` and means 1024 bytes.
    Some(kib * 1024)
}

/// The processor time of this process, and its start in Unix time. Seconds.
struct ProcessTimes {
    cpu: f64,
    started: f64,
}

fn process_times() -> Option<ProcessTimes> {
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The name of the program is in parentheses and may hold spaces.
    let (_, fields) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    // The fields of proc(5) begin with 1; the first one here is 3, the state.
    let field = |number: usize| fields.get(number - 3)?.parse::<f64>().ok();
    let cpu = (field(14)? + field(15)?) / ticks;
    let system = fs::read_to_string("/proc/stat").ok()?;
    let boot = system.lines().find_map(|line| line.strip_prefix("btime "))?;
    let boot: f64 = boot.trim().parse().ok()?;
    Some(ProcessTimes { cpu, started: boot + field(22)? / ticks })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Other tests open descriptors at the same time, so only bounds are exact.
    #[test]
    fn process_metrics_report_resources() {
        let metrics = ProcessMetrics::new();
        metrics.read();
        assert!(metrics.resident_memory.get() > 1 << 20);
        assert!(metrics.open_descriptors.get() >= 3);
        // Compared with a file of this process, so that the test reads no clock.
        let folder = tempfile::tempdir().unwrap();
        let made = fs::metadata(folder.path()).unwrap().modified().unwrap();
        let made = made.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
        let started = metrics.started.get();
        // The kernel rounds both to a second and a tick.
        assert!(started > 1.5e9 && started < made + 2.0, "{started} before {made}");
        assert!(metrics.cpu.get() >= 0.0);
    }
}
