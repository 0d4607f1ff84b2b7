//! The double-entry ledger of device time, embedded.
//!
//! Workers' blocks come in ([`LedgerHandle::submit`]), each in full or not
//! at all; one thread writes, commits many at once and answers after the
//! commit. Every transaction sums to zero: what a device did (credit) is what
//! tenants, overhead, idle and loss received (debit). Nothing is ever changed:
//! "who pays" after a fault is a correction beside the entry it corrects. Each
//! posting has its record in the [audit](AuditKey) log, in the same commit.
//!
//! No async runtime, no clock, no network; readers have their own connections
//! and may be another process ([`Ledger::open_read_only`]).

mod act;
mod archive;
mod audit;
mod backup;
mod charge;
mod check;
mod error;
mod fault;
mod plans;
mod post;
mod query;
mod reader;
mod relog;
mod schema;
mod statement;
mod writer;

pub use act::{
    Act, AdminAction, FaultCap, PartiallyRejectedBlock, PlansInForce, Posted, RefusedBlock,
    Submitted,
};
pub use archive::{Archivable, ArchiveError};
pub use audit::export::{ExportError, Exported, Proof, ProvedRecord, Range, Start};
pub use audit::note::{AuditKey, AuditKeyError};
pub use backup::BackupError;
pub use check::{Checked, Finding};
pub use error::{BlockRefusal, LedgerError};
pub use query::{
    Balance, EnergyBalance, EntryRow, GroupBy, OpenAttempt, RequestRow, RequestState, SpendRow,
    Spending, UsageQuery, UsageRow,
};
pub use reader::LedgerReader;
pub use relog::WalRewriter;
pub use statement::{
    PlanSpan, PricedAs, Record, Statement, StatementDay, StatementError, StatementFigures,
    StatementLine, StatementQuery,
};
pub use writer::{Health, LeaveOut, Ledger, LedgerHandle, LedgerOptions, ManualLedger};
