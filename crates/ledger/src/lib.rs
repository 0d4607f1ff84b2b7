//! The double-entry ledger of device time, in a file or on a database server.
//!
//! Workers' blocks come in ([`LedgerHandle::submit`]), each in full or not at all.
//! One thread writes: it commits many acts at once and answers after the commit.
//! Every transaction sums to zero: the device is credited with its time, and
//! tenants, overhead, idle and loss are debited. Rows are never changed: a fault cap
//! adds corrections beside the entries that it corrects. Each posting has its record
//! in the [audit](AuditKey) log, in the same commit.
//!
//! The crate has no clock, and no async code: a call blocks until the database has
//! answered. Readers have their own connections and may be in another process
//! ([`Ledger::open_read_only`]). A file has one writer. On a server each gateway has one;
//! a lock lets one of them write at a time, so all append to one log.
//!
//! Layers, from the bottom: `rows` (SQL, one file a table), `rules` (pure
//! decisions), `operations` (both together), and the façade: [`Ledger`],
//! [`LedgerHandle`], [`LedgerReader`] and the writer. A layer uses only those below.
//! Two databases beside the ledger have a façade each over the same `rows`:
//! [`idempotency`] and [`keys`]. [`gateways`] is the list of those that share a server, and
//! [`caps`] their slices of caps.

mod durable_file;
mod error;
mod hex;

mod act;
mod rows;

mod rules;

mod audit_key;
mod operations;

pub mod caps;
pub mod gateways;
mod handle;
pub mod idempotency;
pub mod keys;
mod ledger;
mod manifest;
#[cfg(feature = "test-support")]
mod null;
mod options;
mod reader;
mod server_connection;
mod writer;

pub use act::{
    Act, AdminAction, FaultCap, PartiallyRejectedBlock, PlansInForce, Posted, RefusedBlock,
    Submitted,
};
pub use audit_key::{AuditKey, AuditKeyError};
pub use error::{BlockRefusal, LedgerError, StorageError};
pub use handle::{Health, LedgerHandle, SERVER_AWAY};
pub use ledger::Ledger;
pub use manifest::{Loss, Manifest, ManifestError};
pub use operations::archive::{Archivable, ArchiveError};
pub use operations::backup::BackupError;
pub use operations::check::{Checked, Finding};
pub use operations::export::{ExportError, Exported, Proof, ProvedRecord, Range, Start};
pub use operations::move_to_server::Moved;
pub use operations::query::{RequestRow, RequestState, Spending};
pub use operations::wal_rewrite::WalRewriter;
pub use options::{DatabasePlace, LedgerOptions};
pub use reader::LedgerReader;
pub use rows::daily::{GroupBy, PricedRow, SpendRow, UsageQuery, UsageRow};
pub use rows::requests::{EntryRow, OpenAttempt};
pub use rules::balance::{Balance, EnergyBalance};
pub use rules::plans::PlanSpan;
pub use rules::statement::records::Record;
pub use rules::statement::{
    PricedAs, Statement, StatementDay, StatementError, StatementFigures, StatementLine,
    StatementQuery,
};
pub use tollgate_sql::ServerAddress;
#[cfg(feature = "test-support")]
pub use writer::ManualLedger;
