//! The places of a test's databases: a file, or an empty database of a PostgreSQL server.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::sync::Arc;

use tollgate_ledger::DatabasePlace;
use tollgate_sql::testing::TestServer;

/// A place for one database.
pub enum Place {
    File(tempfile::TempDir),
    Server(OnServer),
}

/// An empty database of a server.
pub struct OnServer {
    pub server: Arc<TestServer>,
    pub database: String,
}

impl Place {
    pub fn file() -> Self {
        Self::File(tempfile::tempdir().expect("a folder"))
    }

    pub fn on(server: Arc<TestServer>) -> Self {
        Self::Server(OnServer::new(server))
    }

    /// Makes another empty place in the same kind of store.
    pub fn another(&self) -> Self {
        match self {
            Self::File(_) => Self::file(),
            Self::Server(on) => Self::on(Arc::clone(&on.server)),
        }
    }

    /// Returns the place as the product names it. `file` is the name of a file.
    pub fn of(&self, file: &str) -> DatabasePlace {
        match self {
            Self::File(folder) => DatabasePlace::File(folder.path().join(file)),
            Self::Server(on) => on.place(),
        }
    }
}

impl OnServer {
    pub fn new(server: Arc<TestServer>) -> Self {
        let database = server.new_database();
        Self { server, database }
    }

    pub fn place(&self) -> DatabasePlace {
        DatabasePlace::Server(self.server.address(&self.database))
    }

    /// Runs statements as a person at a SQL prompt.
    pub fn sql(&self, text: &str) {
        self.server.run(&self.database, text);
    }
}

/// Runs each test of a suite once for each store.
macro_rules! for_every_store {
    ($($test:ident),* $(,)?) => {
        mod file {
            $(#[test]
            fn $test() {
                super::$test(&super::Place::file());
            })*
        }

        mod server {
            $(#[test]
            fn $test() {
                let Some(server) = super::TestServer::shared() else { return };
                super::$test(&super::Place::on(server));
            })*
        }
    };
}
