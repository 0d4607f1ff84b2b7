//! Other machines of a gateway: workers, a database server, and a server for rates.

use std::collections::BTreeMap;
use std::path::PathBuf;

use tollgate_domain::{ClusterName, WorkerName};

use super::HostPort;
use crate::read::section;

section! {
    /// Other machines: workers, a database server, and a server for rates. `tollgate gateway` connects to workers, and
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
        /// A PostgreSQL server that has ledger and API keys, in place of `ledger.db` and `keys.db`
        /// in the data folder.
        postgres: RawPostgres;
        /// A Redis server on which the gateways that share `cluster.postgres` share rates.
        redis: RawRedis;
    }
}

section! {
    /// A Redis server on which the gateways that share `cluster.postgres` share rates: each has
    /// the part that it uses. Without it each of *n* gateways has an *n*th part.
    pub(crate) struct RawRedis {
        /// The server, such as `rediss://cache.example.com:6379`. A number behind a slash names a
        /// database of it. The password has a file of its own.
        url: Option<String> = None;
        /// The file with the password, on one line.
        password: Option<PathBuf> = None;
        /// The PEM file with the authority of the server's certificate. A server on another
        /// machine needs it, and a URL that begins with `rediss://`.
        ca: Option<PathBuf> = None;
    }
}

section! {
    /// A PostgreSQL server that has the ledger with the audit log, and the API keys, in place of
    /// `ledger.db` and `keys.db` in the data folder. Several gateways can share it.
    pub(crate) struct RawPostgres {
        /// The database, such as `postgres://tollgate@db.example.com/tollgate`. The
        /// password has a file of its own.
        url: Option<String> = None;
        /// The file with the password, on one line.
        password: Option<PathBuf> = None;
        /// The PEM file with the authority of the server's certificate. With it the
        /// connection is encrypted and the server's name checked. A server on another
        /// machine needs it, unless the URL says `sslmode=disable`.
        ca: Option<PathBuf> = None;
    }
}

section! {
    /// A worker on another machine.
    pub(crate) struct RawRemoteWorker {
        /// The worker's host and port.
        address: Option<HostPort> = None;
    }
}
