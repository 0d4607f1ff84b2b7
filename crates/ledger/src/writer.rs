//! The one thread that writes. It drains its queue into a transaction, commits, then
//! answers: an answer means that the act is on the disk. If the disk refuses, every
//! act of the group gets the error, and the ledger is degraded until a write
//! succeeds.
//!
//! Every posting has its audit record in the same transaction. When a checkpoint is
//! due, the transaction also signs the records.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Instant;

use crate::act::{Act, Posted};
use crate::error::LedgerError;
use crate::handle::{Command, Health, HealthCell, LedgerHandle, UnsignedCell};
use crate::operations::acts;
use crate::operations::chain::Chain;
use crate::operations::store::Store;
use crate::options::{DatabasePlace, LedgerOptions};
use crate::reader::LedgerReader;
use crate::rows::database::Transaction;

/// The result of each act of a group.
type Results = Vec<Result<Posted, LedgerError>>;

/// The result of one act, or the reason why no act of its group can be committed.
type ActResult = Result<Result<Posted, LedgerError>, LedgerError>;

/// The writer of a ledger, without its thread.
pub(crate) struct Writer {
    options: LedgerOptions,
    /// `None` after the disk failed: SQLite's cache may then hold pages that are not
    /// on the disk, so the file is opened anew. The same holds for a broken connection.
    store: Option<Store>,
    inbox: Receiver<Command>,
    health: HealthCell,
    unsigned: UnsignedCell,
    /// The time of the next checkpoint; `None` while all records are signed.
    due: Option<Instant>,
}

impl Writer {
    /// Opens the ledger and returns the handle and the writer.
    #[expect(
        clippy::disallowed_methods,
        reason = "the thread keeps the time of its next checkpoint"
    )]
    pub(crate) fn open(options: LedgerOptions) -> Result<(LedgerHandle, Self), LedgerError> {
        // The writer opens first: it makes or migrates the file that the reader needs.
        let store = Store::open(&options)?;
        let reader = LedgerReader::open_within(&options.place, options.server_limit)?;
        // Bounded: a full queue answers `Busy` instead of growing.
        let (commands, inbox) = sync_channel(options.queue.max(1));
        let health = HealthCell::healthy();
        let key = options.key.as_ref().map(Arc::clone);
        let unsigned = UnsignedCell::default();
        let handle = LedgerHandle::new(commands, health.clone(), unsigned.clone(), reader, key);
        let now = Instant::now();
        if options.key.is_some() && store.unsigned() > 0 {
            unsigned.set(Some(now));
        }
        // An earlier process may have left records unsigned: sign them at once.
        let due = Some(now);
        Ok((handle, Self { options, store: Some(store), inbox, health, unsigned, due }))
    }

    /// Serves commands until the last handle is dropped.
    pub(crate) fn run(mut self) {
        loop {
            match self.next() {
                Ok(first) => self.serve_group(first),
                // A timeout of a healthy writer means that a checkpoint is due.
                Err(RecvTimeoutError::Timeout) if self.is_healthy() => self.sign(),
                Err(RecvTimeoutError::Timeout) => self.try_to_recover(),
                // Every handle is dropped, and the queue is drained.
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        if self.is_healthy() {
            // The last records must be signed, or an export of them waits for the next start.
            self.sign();
            self.checkpoint_log();
        }
    }

    /// Copies the write-ahead log into the file, so that the file alone is the whole
    /// ledger. Best effort: the log stays valid.
    fn checkpoint_log(&self) {
        let Some(store) = self.store.as_ref().filter(|_| self.is_healthy()) else { return };
        // A failure loses nothing: the commits stay in the log, and the next start reads them.
        let _ = store.database().checkpoint();
    }

    /// Returns the next command, or a timeout when a checkpoint or a retry is due.
    #[expect(
        clippy::disallowed_methods,
        reason = "the thread keeps the time of its next checkpoint"
    )]
    fn next(&self) -> Result<Command, RecvTimeoutError> {
        let timeout = if self.is_healthy() {
            self.due.map(|due| due.saturating_duration_since(Instant::now()))
        } else {
            // Degraded: wake up to try the disk, even if no act comes.
            Some(self.options.retry)
        };
        match timeout {
            Some(timeout) => self.inbox.recv_timeout(timeout),
            None => self.inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
        }
    }

    fn serve_group(&mut self, first: Command) {
        // Acts that came while the last group was committed share one sync.
        let mut group = vec![first];
        // Only what waits already: a group does not wait for more.
        while group.len() < self.options.group
            && let Ok(next) = self.inbox.try_recv()
        {
            group.push(next);
        }
        match self.commit(&group) {
            Ok(results) => {
                // If all acts were refused or known, nothing was written, and the
                // disk has not shown that it works again.
                let wrote = results.iter().any(|result| matches!(result, Ok(Posted::New)));
                if wrote || self.is_healthy() {
                    self.mark_written();
                }
                if group.iter().any(|command| matches!(command.act, Act::Sign)) {
                    self.checkpoint_log();
                }
                for (command, result) in group.into_iter().zip(results) {
                    // The caller may have stopped waiting; the act is done all the same.
                    let _ = command.answer.send(result);
                }
            }
            Err(error) => {
                self.mark_degraded(&error);
                for command in group {
                    let _ = command.answer.send(Err(error.clone()));
                }
            }
        }
    }

    /// Commits a group in one transaction. A refused act leaves no trace and does not
    /// affect the others; a disk error fails all.
    ///
    /// A group rarely holds a refused act, and a savepoint makes SQLite copy every
    /// page that changes. So the group first runs without savepoints, and only after
    /// a refusal again with one for each act.
    fn commit(&mut self, group: &[Command]) -> Result<Results, LedgerError> {
        let together = self.commit_by(group, |command, transaction, chain| {
            acts::run(&command.act, transaction.tables(), chain).map(Ok)
        });
        match &together {
            // The rollback of the first run undid the whole group, so all acts run once more.
            Err(error) if !error.is_of_the_disk() => self.commit_by(group, run_apart),
            _ => together,
        }
    }

    /// Runs each command in one transaction, and signs if a checkpoint is due.
    #[expect(
        clippy::disallowed_methods,
        reason = "the thread keeps the time of its next checkpoint"
    )]
    fn commit_by(
        &mut self,
        group: &[Command],
        run: impl Fn(&Command, &mut Transaction<'_>, &mut Chain) -> ActResult,
    ) -> Result<Results, LedgerError> {
        // A checkpoint rides on this commit rather than costing one of its own.
        let overdue = self.due.is_some_and(|due| due <= Instant::now())
            || group.iter().any(|command| matches!(command.act, Act::Sign));
        let key = self.options.key.clone();
        let most = self.options.checkpoint_records;
        self.store()?.transact(|transaction, chain| {
            // The first error that ends the closure rolls everything back, the chain included.
            let results: Results = group
                .iter()
                .map(|command| run(command, transaction, chain))
                .collect::<Result<_, _>>()?;
            let enough = chain.unsigned() >= most;
            if let Some(key) = key.filter(|_| (overdue && chain.unsigned() > 0) || enough) {
                chain.sign(transaction.tables(), &key)?;
            }
            Ok(results)
        })
    }

    /// Signs the records that are not signed yet.
    fn sign(&mut self) {
        let Some(key) = self.options.key.clone() else {
            // Without a key nothing is ever signed, so the writer must not wake up for it.
            self.due = None;
            return;
        };
        match self.store().and_then(|store| store.sign(&key)) {
            Ok(()) => self.mark_written(),
            Err(error) => self.mark_degraded(&error),
        }
    }

    /// Marks the ledger healthy after a commit, and sets the next checkpoint if there
    /// are records to sign.
    #[expect(
        clippy::disallowed_methods,
        reason = "the thread keeps the time of its next checkpoint"
    )]
    fn mark_written(&mut self) {
        self.set_health(Health::Healthy);
        let unsigned = self.store.as_ref().is_some_and(|store| store.unsigned() > 0);
        let to_sign = unsigned && self.options.key.is_some();
        let now = Instant::now();
        // A time that is already set stays, so that steady traffic cannot put it off.
        let later = || now + self.options.checkpoint_every;
        self.due = to_sign.then(|| self.due.unwrap_or_else(later));
        self.unsigned.set(to_sign.then(|| self.unsigned.get().unwrap_or(now)));
    }

    /// Returns the store, and opens it first if the disk failed before.
    fn store(&mut self) -> Result<&mut Store, LedgerError> {
        // Taken out first: if the opening fails, the next use tries again.
        let store = match self.store.take() {
            Some(store) => store,
            None => Store::open(&self.options)?,
        };
        Ok(self.store.insert(store))
    }

    fn try_to_recover(&mut self) {
        match self.store().and_then(|store| store.database().probe()) {
            Ok(()) => self.mark_written(),
            Err(error) => self.mark_degraded(&error),
        }
    }

    fn is_healthy(&self) -> bool {
        self.health.get() == Health::Healthy
    }

    #[expect(clippy::disallowed_methods, reason = "the thread keeps the time of the first failure")]
    fn mark_degraded(&mut self, error: &LedgerError) {
        // The next use opens the file anew and rewrites its log.
        self.store = None;
        let reason = match error {
            LedgerError::Storage(source)
            | LedgerError::Open { source, .. }
            | LedgerError::Server { source, .. } => source.to_string(),
            LedgerError::Log { source, .. } => source.to_string(),
            other => other.to_string(),
        };
        let since = Instant::now();
        self.set_health(Health::Degraded { reason, since });
    }

    fn set_health(&self, new: Health) {
        // Only a change is logged; a disk that stays full would flood the log.
        let before = self.health.replace(new.clone());
        match (before, new) {
            (Health::Healthy, Health::Degraded { reason, .. }) => match self.options.place {
                DatabasePlace::File(_) => tracing::error!(
                    reason,
                    "the ledger cannot be written; billable work is refused until a write succeeds"
                ),
                DatabasePlace::Server(_) => tracing::error!(
                    reason,
                    "the ledger cannot be written; usage stays in the workers' journals, and billable work is refused after 90 s"
                ),
            },
            (Health::Degraded { .. }, Health::Healthy) => {
                tracing::info!("the ledger can be written again; billable work is accepted");
            }
            _ => (),
        }
    }
}

/// Runs a command so that it can be undone by itself.
fn run_apart(command: &Command, transaction: &mut Transaction<'_>, chain: &mut Chain) -> ActResult {
    // The chain lives in memory, so a rollback must restore it too.
    let before = chain.clone();
    match transaction.run_apart(|tables| acts::run(&command.act, tables, chain))? {
        // A disk error fails the group; there is no point in running the other acts.
        Err(error @ LedgerError::Storage(_)) => Err(error),
        Err(refused) => {
            *chain = before;
            Ok(Err(refused))
        }
        posted => Ok(posted),
    }
}

/// A writer without a thread: its owner calls [`ManualLedger::tick`].
#[cfg(feature = "test-support")]
pub struct ManualLedger {
    writer: Writer,
}

#[cfg(feature = "test-support")]
impl ManualLedger {
    pub(crate) fn new(writer: Writer) -> Self {
        Self { writer }
    }

    /// Does what the thread does when it wakes: commits the waiting acts as one group,
    /// tries a degraded disk again, or signs if a checkpoint is due.
    #[expect(
        clippy::disallowed_methods,
        reason = "the thread keeps the time of its next checkpoint"
    )]
    pub fn tick(&mut self) {
        match self.writer.inbox.try_recv() {
            Ok(first) => self.writer.serve_group(first),
            Err(_) if !self.writer.is_healthy() => self.writer.try_to_recover(),
            Err(_) if self.writer.due.is_some_and(|due| due <= Instant::now()) => {
                self.writer.sign();
            }
            Err(_) => {}
        }
    }
}
