//! The reading side: a few connections of its own, so that a read never waits for
//! the writer, nor the writer for a read.

use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tollgate_domain::{RequestId, TenantId, UtcDay, UtcMonth, UtcTime, WorkerEpoch};

use crate::act::FaultCap;
use crate::error::LedgerError;
use crate::manifest::Newest;
use crate::operations::archive::{self, Archivable, ArchiveError};
use crate::operations::check::{self, CHECKS, Checked, Finding, Findings};
use crate::operations::export::{self, ExportError, Exported, Proof, Range};
use crate::operations::query::{self, RequestRow, Spending};
use crate::operations::statement;
use crate::options::DatabasePlace;
use crate::rows::daily::{self, Spender, UsageQuery, UsageRow};
use crate::rows::database::Database;
use crate::rows::requests::{self, OpenAttempt};
use crate::rows::{Tables, actions, archives, checkpoints, epochs, meta, server_schema};
use crate::rows::{faults, homes};
use crate::rules::balance::{Balance, EnergyBalance};
use crate::rules::statement::records::Record;
use crate::rules::statement::{Statement, StatementError, StatementQuery};

/// Idle connections that are kept. More readers at once open and close their own.
const KEPT: usize = 4;
/// The time within which a server must answer a command that reads whole tables.
const LONG_LIMIT: Duration = Duration::from_secs(600);

/// A reader of a ledger, beside its writer in this or another process. Calls block on
/// the disk: an async caller makes them on a blocking thread.
#[derive(Clone)]
pub struct LedgerReader {
    pool: Arc<Pool>,
}

struct Pool {
    place: DatabasePlace,
    /// The time within which a server must answer.
    limit: Duration,
    idle: Mutex<Vec<Database>>,
}

impl Pool {
    fn open(place: &DatabasePlace, limit: Duration) -> Result<Database, LedgerError> {
        match place {
            DatabasePlace::File(path) => Database::open_reader(path),
            DatabasePlace::Server(address) => {
                let database = Database::connect_reader(address, limit)?;
                server_schema::refuse_other_formats(address, database.tables())?;
                Ok(database)
            }
        }
    }
}

impl LedgerReader {
    /// Opens a ledger for reading only.
    ///
    /// # Errors
    /// The ledger cannot be opened, there is none, or it is of another version.
    pub(crate) fn open(place: &DatabasePlace) -> Result<Self, LedgerError> {
        Self::open_within(place, LONG_LIMIT)
    }

    /// Opens a ledger for reading only, as [`Self::open`]. `limit` is the time within which a
    /// server must answer: a caller of the gateway must not wait for a server that is silent,
    /// and keep a thread meanwhile.
    pub(crate) fn open_within(place: &DatabasePlace, limit: Duration) -> Result<Self, LedgerError> {
        // Opened at once: a missing or foreign ledger must fail here, not at the first read.
        let idle = Mutex::new(vec![Pool::open(place, limit)?]);
        Ok(Self { pool: Arc::new(Pool { place: place.clone(), limit, idle }) })
    }

    /// Runs `read` on one snapshot of the whole ledger.
    fn read<T>(
        &self,
        read: impl FnOnce(Tables<'_>) -> Result<T, LedgerError>,
    ) -> Result<T, LedgerError> {
        // A poisoned pool is still a list of connections.
        let taken = self.pool.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        // A kept connection may have broken since, for instance because the server was started
        // anew. Nothing is read yet, so another connection takes its place.
        let mut database = match taken.filter(Database::is_connected) {
            Some(database) => database,
            None => Pool::open(&self.pool.place, self.pool.limit)?,
        };
        // One snapshot: several queries of one read agree with one another.
        let snapshot = database.snapshot()?;
        let result = read(snapshot.tables());
        // The transaction ends before the connection returns to the pool.
        drop(snapshot);
        let mut idle = self.pool.idle.lock().unwrap_or_else(PoisonError::into_inner);
        // A connection that failed is closed: the file may have been replaced.
        if result.is_ok() && idle.len() < KEPT {
            idle.push(database);
        }
        result
    }

    /// Runs a read with an error type of its own.
    fn read_as<T, E: From<LedgerError>>(
        &self,
        read: impl FnOnce(Tables<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        self.read(|tables| Ok(read(tables)))?
    }

    /// Returns true if the ledger is on a database server.
    pub(crate) fn is_on_server(&self) -> bool {
        matches!(self.pool.place, DatabasePlace::Server(_))
    }

    /// Returns usage by group, ordered by the columns of the group.
    ///
    /// # Errors
    /// Storage errors.
    pub fn usage(&self, query: &UsageQuery) -> Result<Vec<UsageRow>, LedgerError> {
        self.read(|tables| daily::usage(tables, query))
    }

    /// Returns one request of one tenant; `None` where that tenant has no request of
    /// that id, even if another tenant has.
    ///
    /// # Errors
    /// Storage errors, and [`LedgerError::Damaged`].
    pub fn request(
        &self,
        tenant: &TenantId,
        request: &RequestId,
    ) -> Result<Option<RequestRow>, LedgerError> {
        self.read(|tables| query::find_request(tables, tenant, request))
    }

    /// Returns what was spent on `day` and in its month up to it.
    ///
    /// # Errors
    /// Storage errors, and [`LedgerError::Damaged`].
    pub fn spending(&self, day: UtcDay) -> Result<Spending, LedgerError> {
        self.read(|tables| query::spending(tables, Spender::All, day))
    }

    /// Returns what the requests of the gateway with the data folder `home` were charged on `day`
    /// and in its month up to it. Only for a ledger on a server that was opened with
    /// [`LedgerOptions::home`](crate::LedgerOptions::home).
    ///
    /// # Errors
    /// Storage errors, and [`LedgerError::Damaged`].
    pub fn spending_of(&self, home: &str, day: UtcDay) -> Result<Spending, LedgerError> {
        self.read(|tables| query::spending(tables, Spender::Home(home), day))
    }

    /// Returns what the lives of the data folder `home` before `life` charged, as
    /// [`Self::spending_of`].
    ///
    /// # Errors
    /// Storage errors, and [`LedgerError::Damaged`].
    pub fn spending_before(
        &self,
        (home, life): (&str, u64),
        day: UtcDay,
    ) -> Result<Spending, LedgerError> {
        self.read(|tables| query::spending(tables, Spender::Before(home, life), day))
    }

    /// Returns the device time of one epoch by account; all zero for an unknown epoch.
    ///
    /// # Errors
    /// Storage errors.
    pub fn balance(&self, epoch: WorkerEpoch) -> Result<Balance, LedgerError> {
        self.read(|tables| query::balance(tables, epoch))
    }

    /// Returns the energy of one epoch by account; `None` where its device reported
    /// none.
    ///
    /// # Errors
    /// Storage errors.
    pub fn energy(&self, epoch: WorkerEpoch) -> Result<Option<EnergyBalance>, LedgerError> {
        self.read(|tables| query::energy(tables, epoch))
    }

    /// Returns every epoch of every worker, in the order of the first blocks.
    ///
    /// # Errors
    /// Storage errors, and [`LedgerError::Damaged`].
    pub fn epochs(&self) -> Result<Vec<WorkerEpoch>, LedgerError> {
        self.read(query::all_epochs)
    }

    /// Returns the number of the last block of an epoch that was posted or skipped; 0
    /// for an unknown epoch.
    ///
    /// # Errors
    /// Storage errors.
    pub fn last_block(&self, epoch: WorkerEpoch) -> Result<u64, LedgerError> {
        let found = self.read(|tables| epochs::find(tables, epoch))?;
        Ok(found.map_or(0, |known| known.last_block))
    }

    /// Returns the attempts of an ended epoch without a recorded end: their worker
    /// died with them. A caller that does not know them either posts a cap of zero for
    /// each.
    ///
    /// # Errors
    /// Storage errors, and [`LedgerError::Damaged`].
    pub fn open_attempts(&self, epoch: WorkerEpoch) -> Result<Vec<OpenAttempt>, LedgerError> {
        self.read(|tables| requests::open_attempts(tables, epoch))
    }

    /// Returns a cap of nothing for each attempt that ended by a fault and has no cap. None where
    /// the ledger is a file.
    ///
    /// # Errors
    /// Storage errors, and [`LedgerError::Damaged`].
    pub fn uncapped_faults(&self) -> Result<Vec<FaultCap>, LedgerError> {
        self.read(faults::caps_of_nothing)
    }

    /// Returns the numbers of the gateways that share the ledger and may still settle what their
    /// requests left open. None where the ledger is a file.
    ///
    /// # Errors
    /// Storage errors.
    pub fn live_gateways(&self) -> Result<Vec<u32>, LedgerError> {
        self.read(homes::live_numbers)
    }

    /// Returns the epochs that ended in the last days that the ledger knows. A gateway
    /// that was killed may have left attempts open in these.
    ///
    /// # Errors
    /// Storage errors, and [`LedgerError::Damaged`].
    pub fn lately_ended(&self) -> Result<Vec<WorkerEpoch>, LedgerError> {
        self.read(query::lately_ended)
    }

    /// Returns the statement, read in one snapshot from the sums by day.
    ///
    /// # Errors
    /// [`StatementError`].
    pub fn statement(&self, query: StatementQuery<'_>) -> Result<Statement, StatementError> {
        self.read_as(|tables| statement::statement(tables, query))
    }

    /// Returns the statement and calls `record` with every record behind it and the id
    /// of the record's line: the charges before the entries. The call takes as long as
    /// there are records, and fails where they are not what the sums by day state.
    ///
    /// # Errors
    /// [`StatementError`].
    pub fn statement_records(
        &self,
        query: StatementQuery<'_>,
        record: &mut dyn FnMut(&str, &Record),
    ) -> Result<Statement, StatementError> {
        self.read_as(|tables| statement::statement_records(tables, query, record))
    }

    /// Returns the records of the months before `before` that can leave the database:
    /// up to the last checkpoint that covers nothing later, nothing that has not
    /// ended, and no part of a correction.
    ///
    /// # Errors
    /// [`ArchiveError`], also for a ledger on a server.
    pub fn archivable(&self, before: UtcMonth, now: UtcTime) -> Result<Archivable, ArchiveError> {
        if let DatabasePlace::Server(_) = self.pool.place {
            return Err(LedgerError::NoFile.into());
        }
        archive::refuse_unsettled(before, now)?;
        self.read_as(|tables| archive::archivable(tables, before))
    }

    /// Returns the number of the first record that is not archived.
    ///
    /// # Errors
    /// Storage errors.
    pub fn first_record(&self) -> Result<u64, LedgerError> {
        self.read(archives::first_record)
    }

    /// Returns the time of the ledger's last restore; `None` if it was never restored.
    /// Blocks that began before and that no journal has any more are skipped.
    ///
    /// # Errors
    /// Storage errors.
    pub fn restored(&self) -> Result<Option<UtcTime>, LedgerError> {
        self.read(meta::restored)
    }

    /// Writes records and checkpoints of `range`, a line each, from one snapshot. The
    /// export ends with a record that is the last of a checkpoint.
    ///
    /// # Errors
    /// The ledger cannot be read, the output cannot be written, or no checkpoint covers
    /// the range.
    pub fn export(
        &self,
        range: Range,
        records: &mut dyn Write,
        checkpoints: &mut dyn Write,
    ) -> Result<Exported, ExportError> {
        self.read_as(|tables| export::export(tables, range, records, checkpoints))
    }

    /// Returns the records of the newest `most` actions of admins, each with its number, the
    /// newest last. Actions that an archive has removed are not among them.
    ///
    /// # Errors
    /// Storage errors.
    pub fn newest_actions(&self, most: u32) -> Result<Vec<(u64, String)>, LedgerError> {
        self.read(|tables| actions::newest(tables, most))
    }

    /// Proves that each record of `request` is in the log.
    ///
    /// # Errors
    /// No record tells of the request, or no checkpoint covers one of its records yet.
    pub fn prove(&self, request: &RequestId) -> Result<Proof, ExportError> {
        self.read_as(|tables| export::prove(tables, request))
    }

    /// Returns the newest checkpoint; `None` where none was signed yet.
    ///
    /// # Errors
    /// Storage errors.
    pub fn checkpoint(&self) -> Result<Option<String>, LedgerError> {
        Ok(self.newest()?.map(|(_, note)| note))
    }

    /// Returns size and note of the newest checkpoint.
    pub(crate) fn newest(&self) -> Result<Option<(u64, String)>, LedgerError> {
        self.read(checkpoints::newest)
    }

    /// Compares the newest checkpoint with a known one.
    pub(crate) fn newest_covering(
        &self,
        (size, note): &(u64, String),
    ) -> Result<Newest, LedgerError> {
        self.read(|tables| {
            let is_known = checkpoints::find(tables, *size)?.as_ref() == Some(note);
            if is_known || archives::first_record(tables)? >= *size {
                return Ok(Newest::Covers);
            }
            Ok(Newest::Only(checkpoints::newest_size(tables)?.unwrap_or(0)))
        })
    }

    /// Checks everything; no finding means a sound ledger. The check reads every row:
    /// seconds for a million entries. A part that is too torn to be read is a finding.
    pub fn check(&self) -> Vec<Finding> {
        self.findings(|_| Ok(CHECKS))
    }

    /// Runs the checks that `choose` returns.
    pub(crate) fn findings(
        &self,
        choose: impl FnOnce(Tables<'_>) -> Result<&'static [check::Check], LedgerError>,
    ) -> Vec<Finding> {
        let mut findings = Findings::default();
        // Findings collected before a failure are kept.
        let checked = self.read(|tables| {
            check::run(tables, choose(tables)?, &mut findings);
            Ok(())
        });
        if let Err(error) = checked {
            findings.add("file", check::with_cause(&error));
        }
        findings.into_list()
    }

    /// Counts the rows that a check covers.
    pub(crate) fn count(&self) -> Result<Checked, LedgerError> {
        self.read(Checked::count)
    }
}
