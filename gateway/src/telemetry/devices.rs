//! How devices are, read off the workers when metrics are scraped. Labels are
//! workers' names, which are config's, and a closed set of concerns; a worker
//! whose device is not watched, or that is away, has no series.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::admin::concerns;
use crate::upstream::WorkerReport;

type Figures = Family<WorkerLabel, Gauge<f64, AtomicU64>>;

/// The figures of all devices.
#[derive(Debug)]
pub(super) struct DeviceMetrics {
    registry: Registry,
    figures: [(&'static str, Figures); 13],
    concerns: Family<ConcernLabels, Gauge>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WorkerLabel {
    worker: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ConcernLabels {
    worker: String,
    concern: &'static str,
}

impl DeviceMetrics {
    pub(super) fn new() -> Self {
        let mut registry = Registry::with_prefix("tollgate_device");
        let figures = NAMES.map(|(name, help)| (name, help, Figures::default()));
        for (name, help, figure) in &figures {
            registry.register(*name, *help, figure.clone());
        }
        let concerns = Family::default();
        registry.register("concern", "What is not as it should be", concerns.clone());
        Self { registry, figures: figures.map(|(name, _, figure)| (name, figure)), concerns }
    }

    /// The registry with figures of now.
    pub(super) fn read(&self, workers: &[WorkerReport]) -> &Registry {
        for (_, figure) in &self.figures {
            figure.clear();
        }
        self.concerns.clear();
        for report in workers {
            let Some(health) = report.health else { continue };
            let worker = report.name.to_string();
            let values: [Option<f64>; 13] = [
                Some(f64::from(u8::from(health.rests))),
                health.utilisation_percent.map(|percent| f64::from(percent) / 100.0),
                health.memory_used.map(|bytes| bytes as f64),
                health.memory_total.map(|bytes| bytes as f64),
                health.memory_ours.map(|bytes| bytes as f64),
                health.temperature_celsius.map(f64::from),
                health.power_mw.map(|mw| mw as f64 / 1e3),
                health.power_limit_mw.map(|mw| mw as f64 / 1e3),
                health.energy_mj.map(|mj| mj as f64 / 1e3),
                health.clock_mhz.map(|mhz| f64::from(mhz) * 1e6),
                health.ecc_corrected.map(|errors| errors as f64),
                health.ecc_uncorrected.map(|errors| errors as f64),
                health.processes.map(f64::from),
            ];
            for ((_, figure), value) in self.figures.iter().zip(values) {
                if let Some(value) = value {
                    figure.get_or_create(&WorkerLabel { worker: worker.clone() }).set(value);
                }
            }
            for (concern, holds) in concerns(&health) {
                let labels = ConcernLabels { worker: worker.clone(), concern };
                self.concerns.get_or_create(&labels).set(holds.into());
            }
        }
        &self.registry
    }
}

/// In the order in which they are filled.
const NAMES: [(&str, &str); 13] = [
    ("rests", "Whether nothing new is placed there until it is well"),
    ("utilisation_ratio", "Part of the time in which kernels ran"),
    ("memory_used_bytes", "Memory in use"),
    ("memory_total_bytes", "Memory"),
    ("memory_worker_bytes", "Memory of the worker's process"),
    ("temperature_celsius", "Temperature"),
    ("power_watts", "Power"),
    ("power_limit_watts", "The limit of power"),
    ("energy_joules", "Energy since the driver was loaded"),
    ("clock_hertz", "Clock of its processors"),
    ("ecc_corrected", "Memory errors that were corrected since the driver was loaded"),
    ("ecc_uncorrected", "Memory errors that were not"),
    ("processes", "Processes that compute on it"),
];
