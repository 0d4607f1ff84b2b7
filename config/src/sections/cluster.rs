//! Workers on other machines.

use std::collections::BTreeMap;
use std::path::PathBuf;

use tollgate_domain::{ClusterName, WorkerName};

use super::HostPort;
use crate::read::section;

section! {
    /// Workers on other machines. `tollgate gateway` connects to them, and
    /// `tollgate worker --listen` is one of them. Both sides prove their names with
    /// certificates of one authority; `tollgate workers certificates` makes them.
    pub(crate) struct RawCluster {
        /// The name that both sides' certificates have.
        name: Option<ClusterName> = None;
        /// The PEM file with the authority's certificates.
        ca: Option<PathBuf> = None;
        /// The PEM file with this machine's certificate chain, the leaf first. Renewed
        /// files are used by the next connection.
        certificate: Option<PathBuf> = None;
        /// The certificate's private key in PEM.
        key: Option<PathBuf> = None;
    }
    sections {
        /// The workers, by the names in their certificates.
        workers: BTreeMap<WorkerName, RawRemoteWorker>;
    }
}

section! {
    /// A worker on another machine.
    pub(crate) struct RawRemoteWorker {
        /// The worker's host and port.
        address: Option<HostPort> = None;
    }
}
