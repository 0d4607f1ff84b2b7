//! The state of the gateway's own parts: queues, penalties, the ledger, the certificate, the
//! disk and the build. Read when metrics are scraped, but for the time of commits.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use tollgate_admission::Offence;
use tollgate_domain::UtcTime;
use tollgate_serving::settlement::BooksReport;

use super::{FloatGauge, gauge, seconds};

/// The figures of the gateway's own parts.
#[derive(Debug)]
pub(super) struct StateMetrics {
    registry: Registry,
    waiting: Family<PlaceLabel, Gauge>,
    penalties_held: Family<HeldLabel, Gauge>,
    ledger_commit: Histogram,
    ledger_lag: FloatGauge,
    ledger_blocks: Family<BlockLabel, Counter>,
    audit_unsigned: FloatGauge,
    disk_free: Gauge,
    certificate_expiry: FloatGauge,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PlaceLabel {
    // `where` is a keyword.
    r#where: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HeldLabel {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BlockLabel {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BuildLabels {
    version: &'static str,
}

/// The state of the gateway's own parts at a scrape.
#[derive(Clone, Debug, Default)]
pub(crate) struct StateReadings {
    /// Requests that wait, by the place where they wait.
    pub(crate) waiting: [(&'static str, i64); 3],
    /// Penalties in force, by offence.
    pub(crate) penalties: BTreeMap<Offence, usize>,
    /// Age of the oldest block that is not committed.
    pub(crate) ledger_lag: Duration,
    /// Age of the oldest audit record that no checkpoint signs yet.
    pub(crate) audit_unsigned: Duration,
    /// Bytes that are free where the data folder is; `None` if unknown.
    pub(crate) disk_free: Option<u64>,
    /// The end of the certificate in use; `None` if unknown.
    pub(crate) certificate_expires: Option<UtcTime>,
}

impl StateMetrics {
    pub(super) fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("tollgate"),
            waiting: Family::default(),
            penalties_held: Family::default(),
            ledger_commit: seconds(&COMMIT_SECONDS),
            ledger_lag: Gauge::default(),
            ledger_blocks: Family::default(),
            audit_unsigned: Gauge::default(),
            disk_free: Gauge::default(),
            certificate_expiry: Gauge::default(),
        };
        metrics.register();
        let build: Family<BuildLabels, Gauge> = Family::default();
        build.get_or_create(&BuildLabels { version: env!("CARGO_PKG_VERSION") }).set(1);
        metrics.registry.register("build_info", "Always 1; the label is the version", build);
        metrics
    }

    fn register(&mut self) {
        let Self { registry, .. } = self;
        registry.register(
            "waiting",
            "Requests that wait: for a place in their limits, to be parsed and tokenized, at workers",
            self.waiting.clone(),
        );
        registry.register(
            "penalties_held",
            "Penalties in force, of tenants and of network sources",
            self.penalties_held.clone(),
        );
        registry.register_with_unit(
            "ledger_commit",
            "Time from the arrival of a journal block until the ledger has it on the disk",
            Unit::Seconds,
            self.ledger_commit.clone(),
        );
        registry.register_with_unit(
            "ledger_lag",
            "Age of the oldest journal block that arrived and is not on the disk; 0 if there is none",
            Unit::Seconds,
            self.ledger_lag.clone(),
        );
        registry.register(
            "ledger_blocks",
            "Journal blocks by what became of them",
            self.ledger_blocks.clone(),
        );
        registry.register_with_unit(
            "audit_unsigned",
            "Age of the oldest audit record that no checkpoint signs yet; 0 if all are signed",
            Unit::Seconds,
            self.audit_unsigned.clone(),
        );
        registry.register_with_unit(
            "disk_free",
            "Free space of the file system of the data folder",
            Unit::Bytes,
            self.disk_free.clone(),
        );
        registry.register_with_unit(
            "certificate_expiry_timestamp",
            "Unix time at which the certificate in use expires",
            Unit::Seconds,
            self.certificate_expiry.clone(),
        );
    }

    /// Observes the time in which a block reached the disk.
    pub(super) fn block_committed(&self, elapsed: Duration) {
        self.ledger_commit.observe(elapsed.as_secs_f64());
    }

    /// Sets the figures and returns the registry.
    pub(super) fn read(&self, readings: &StateReadings, books: &BooksReport) -> &Registry {
        let StateReadings {
            waiting,
            penalties,
            ledger_lag,
            audit_unsigned,
            disk_free,
            certificate_expires,
        } = readings;
        for (place, requests) in waiting.iter().filter(|(place, _)| !place.is_empty()) {
            self.waiting.get_or_create(&PlaceLabel { r#where: place }).set(*requests);
        }
        // All of them, because an offence without a penalty must not keep its last figure.
        for offence in Offence::ALL {
            let held = penalties.get(&offence).copied().unwrap_or(0);
            self.penalties_held
                .get_or_create(&HeldLabel { kind: offence.as_str() })
                .set(gauge(held));
        }
        for (outcome, blocks) in &books.blocks {
            let label = BlockLabel { outcome: outcome.as_str() };
            self.ledger_blocks.get_or_create(&label).inner().store(*blocks, Ordering::Relaxed);
        }
        self.ledger_lag.set(ledger_lag.as_secs_f64());
        self.audit_unsigned.set(audit_unsigned.as_secs_f64());
        // Figures that cannot be read keep their last value; at first that is 0.
        if let Some(bytes) = disk_free {
            self.disk_free.set(gauge(*bytes));
        }
        if let Some(expires) = certificate_expires {
            self.certificate_expiry.set(expires.unix_seconds() as f64);
        }
        &self.registry
    }
}

const COMMIT_SECONDS: [f64; 10] =
    [0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 30.0];
