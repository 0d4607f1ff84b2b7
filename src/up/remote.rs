//! The workers of a start: processes of this machine, or workers on other machines.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use tollgate_config::{Cluster, Config, HostPort};
use tollgate_domain::WorkerName;
use tollgate_gateway::workers::WorkerEndpoint;
use tollgate_wire::{LinkFiles, RemoteWorker, WorkerAddress};

use super::sockets::Sockets;
use super::workers::{self, Planned};

/// The place of the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workers {
    /// One process of this machine for each model and device.
    Own,
    /// The workers that [cluster.workers] names.
    Remote,
}

/// The workers of a start.
pub struct WorkerPlan {
    /// The processes to start.
    pub planned: Vec<Planned>,
    /// Every worker, for the gateway.
    pub endpoints: Vec<WorkerEndpoint>,
    /// Removes a temporary folder of sockets when it is dropped.
    pub sockets: Option<Sockets>,
}

impl Workers {
    /// Checks that the config has workers of this place. Comes before the data folder is
    /// touched.
    ///
    /// # Errors
    /// The config names workers on other machines and the start has own ones, or the other
    /// way around; or the gateway's certificate cannot be used.
    pub fn check(self, config: &Config) -> Result<()> {
        match self {
            Self::Own if config.cluster().is_some_and(|cluster| !cluster.workers.is_empty()) => {
                bail!(
                    "the config names workers on other machines ([cluster.workers]), and \
                     `tollgate up` starts its own; run `tollgate gateway`, or remove the section"
                )
            }
            Self::Own => Ok(()),
            Self::Remote => endpoints(config).map(|_| ()),
        }
    }
}

impl WorkerPlan {
    /// Plans the workers. `folder` is the data folder.
    ///
    /// # Errors
    /// A certificate or a folder cannot be used.
    pub fn new(config: &Config, folder: &Path, place: Workers) -> Result<Self> {
        if place == Workers::Remote {
            return Ok(Self { planned: Vec::new(), endpoints: endpoints(config)?, sockets: None });
        }
        let sockets = Sockets::make(folder)?;
        let planned = workers::plan(config, folder, sockets.folder())?;
        let endpoints = planned.iter().map(Planned::endpoint).collect();
        Ok(Self { planned, endpoints, sockets: Some(sockets) })
    }
}

/// Returns the workers of the section `cluster`.
///
/// # Errors
/// The section names no worker, or the gateway's certificate cannot be used.
pub fn endpoints(config: &Config) -> Result<Vec<WorkerEndpoint>> {
    let Some(cluster) = config.cluster().filter(|cluster| !cluster.workers.is_empty()) else {
        bail!(
            "the config names no worker: add [cluster] and [cluster.workers.NAME], or run \
             `tollgate up`, which starts workers on this machine"
        );
    };
    let files = Arc::new(link_files(cluster));
    // A wrong certificate must fail the start, and not each connection later.
    files.check(None).context("[cluster] cannot be used")?;
    let endpoint = |(name, address): (&WorkerName, &HostPort)| {
        let (name, address) = (name.clone(), address.to_string());
        let remote = RemoteWorker { name: name.clone(), address, files: Arc::clone(&files) };
        let address = WorkerAddress::Remote(remote);
        WorkerEndpoint { name, address, is_shareable: true }
    };
    Ok(cluster.workers.iter().map(endpoint).collect())
}

/// Returns the certificate files that the section names.
pub fn link_files(cluster: &Cluster) -> LinkFiles {
    let Cluster { name, ca, certificate, key, workers: _ } = cluster;
    LinkFiles {
        cluster: name.clone(),
        ca: ca.clone(),
        certificate: certificate.clone(),
        key: key.clone(),
    }
}
