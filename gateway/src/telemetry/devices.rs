//! The health of devices, read from the workers when metrics are scraped.
//! Labels are the names of workers, which config gives, and a closed set of
//! concerns. A worker that is not connected, or whose device is not watched,
//! has no series.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tollgate_wire::v1;

use tollgate_serving::workers::WorkerReport;

type Figures = Family<WorkerLabel, Gauge<f64, AtomicU64>>;
type Totals = Family<WorkerLabel, Counter<f64, AtomicU64>>;

/// The figures of all devices.
#[derive(Debug)]
pub(super) struct DeviceMetrics {
    registry: Registry,
    figures: [(&'static str, Figures); 10],
    totals: [Totals; 4],
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
        let totals = TOTALS.map(|(name, help)| {
            let total = Totals::default();
            registry.register(name, help, total.clone());
            total
        });
        let concerns = Family::default();
        registry.register("concern", "1 while the concern holds", concerns.clone());
        Self {
            registry,
            figures: figures.map(|(name, _, figure)| (name, figure)),
            totals,
            concerns,
        }
    }

    /// Sets the figures from `workers` and returns the registry.
    pub(super) fn read(&self, workers: &[WorkerReport]) -> &Registry {
        for (_, figure) in &self.figures {
            // A worker that is gone must not keep its last figures, which would look current.
            figure.clear();
        }
        self.totals.iter().for_each(Family::clear);
        self.concerns.clear();
        for report in workers {
            // A worker without health figures keeps no series of earlier scrapes.
            let Some(health) = report.health else { continue };
            let worker = report.name.to_string();
            // Prometheus asks for base units, and holds each value as a float: whole numbers stay
            // exact up to 2^53.
            let values: [Option<f64>; 10] = [
                Some(f64::from(u8::from(health.rests))),
                health.utilisation_percent.map(|percent| f64::from(percent) / 100.0),
                health.memory_used.map(|bytes| bytes as f64),
                health.memory_total.map(|bytes| bytes as f64),
                health.memory_ours.map(|bytes| bytes as f64),
                health.temperature_celsius.map(f64::from),
                health.power_mw.map(|mw| mw as f64 / 1e3),
                health.power_limit_mw.map(|mw| mw as f64 / 1e3),
                health.clock_mhz.map(|mhz| f64::from(mhz) * 1e6),
                health.processes.map(f64::from),
            ];
            for ((_, figure), value) in self.figures.iter().zip(values) {
                // A figure that the driver does not report has no series, because 0 would look
                // measured.
                if let Some(value) = value {
                    figure.get_or_create(&WorkerLabel { worker: worker.clone() }).set(value);
                }
            }
            // Totals since the driver was loaded, which begin again with the driver, or since the
            // worker started.
            let totals: [Option<f64>; 4] = [
                health.energy_mj.map(|mj| mj as f64 / 1e3),
                health.ecc_corrected.map(|errors| errors as f64),
                health.ecc_uncorrected.map(|errors| errors as f64),
                health.xids.map(|errors| errors as f64),
            ];
            for (total, value) in self.totals.iter().zip(totals) {
                if let Some(value) = value {
                    total.get_or_create(&WorkerLabel { worker: worker.clone() }).inc_by(value);
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

/// Returns every concern by name, with true if the concern holds.
pub(crate) fn concerns(health: &v1::DeviceHealth) -> [(&'static str, bool); 8] {
    [
        ("hot", health.hot),
        ("ill", health.ill),
        ("gone", health.gone),
        ("busy", health.busy),
        ("memory_full", health.memory_full),
        ("leak", health.leak),
        ("slowed", health.slowed),
        ("busy_without_work", health.busy_without_work),
    ]
}

/// The names and help texts of the figures, in the order in which `read` fills
/// them.
const NAMES: [(&str, &str); 10] = [
    ("rests", "1 while the gateway places nothing new on the device"),
    ("utilisation_ratio", "Share of the time in which kernels ran"),
    ("memory_used_bytes", "Device memory in use"),
    ("memory_total_bytes", "Device memory in total"),
    ("memory_worker_bytes", "Device memory of the worker's process"),
    ("temperature_celsius", "Temperature of the device"),
    ("power_watts", "Power that the device draws"),
    ("power_limit_watts", "Power limit of the device"),
    ("clock_hertz", "Clock of the device's processors"),
    ("processes", "Processes that compute on the device"),
];

/// The names and help texts of the totals, in the order in which `read` fills them.
const TOTALS: [(&str, &str); 4] = [
    ("energy_joules", "Energy used since the driver was loaded"),
    ("ecc_corrected", "Memory errors corrected since the driver was loaded"),
    ("ecc_uncorrected", "Memory errors not corrected since the driver was loaded"),
    ("xids", "Critical errors (Xids) that the driver reported since the worker started"),
];
