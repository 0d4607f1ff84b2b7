//! The memory and the descriptors of this process, under the names that
//! Prometheus's own client libraries use. A scrape reads them from /proc; if
//! /proc cannot be read, the last figures stay.

use std::fs;

use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::gauge;

/// The resources that this process uses.
#[derive(Debug)]
pub(super) struct ProcessMetrics {
    registry: Registry,
    resident_memory: Gauge,
    open_descriptors: Gauge,
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
        Self { registry, resident_memory, open_descriptors }
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
    }
}
