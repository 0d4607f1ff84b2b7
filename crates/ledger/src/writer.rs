//! The one thread that writes. It drains its queue into a transaction,
//! commits, then answers: an answer means that it is on the disk. When the
//! disk refuses, everyone in the group is told so, and the ledger is unwell
//! until a write has gone through again.
//!
//! What is posted has its record of the audit log in the same transaction. So
//! has a checkpoint the records that it signs, when it is time for one.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_channel::oneshot;
use rusqlite::{Connection, TransactionBehavior};
use tollgate_domain::{Block, BlockParts};

use crate::act::{Act, Posted, Submitted};
use crate::audit::chain::Chain;
use crate::audit::note::AuditKey;
use crate::error::is_about_content;
use crate::{BlockRefusal, LedgerError, LedgerReader, WalRewriter, fault, plans, post, schema};

/// How a ledger is kept.
#[derive(Clone, Debug)]
pub struct LedgerOptions {
    /// The database file; made if there is none.
    pub path: PathBuf,
    /// Commands that may wait for the writer.
    pub queue: usize,
    /// Commands in one commit.
    pub group: usize,
    /// While the disk refuses: how long between tries.
    pub retry: Duration,
    /// Largest size of the database in pages of 4 KiB, where it is bounded.
    pub max_pages: Option<u32>,
    /// Writes the log once more before the file is opened.
    pub log: WalRewriter,
    /// Signs the audit log; without it records are written and not signed.
    pub key: Option<Arc<AuditKey>>,
    /// The longest that a record waits for a checkpoint that covers it.
    pub checkpoint_every: Duration,
    /// The most records that wait for one.
    pub checkpoint_records: u64,
    /// A control for benchmarks, which an admin cannot choose.
    pub leave_out: LeaveOut,
}

/// What a ledger leaves undone, so that what that costs is seen beside it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LeaveOut {
    /// Nothing: it is a ledger.
    #[default]
    Nothing,
    /// The records of the audit log. Such a ledger is not sound, and `check`
    /// says so.
    Records,
    /// All of it: whatever is posted is answered as if it were on the disk, and
    /// forgotten.
    Everything,
}

/// Opens ledgers.
pub struct Ledger;

/// Posts to the ledger and reads it. The writer ends with the last handle,
/// after all that was accepted.
#[derive(Clone)]
pub struct LedgerHandle {
    commands: SyncSender<Command>,
    health: Arc<Mutex<Health>>,
    reader: LedgerReader,
    key: Option<Arc<AuditKey>>,
}

/// Whether billable work may be taken on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// The last write went through.
    Healthy,
    /// It did not; work that must be billed is refused until one does.
    Degraded {
        /// What the disk said, for the log.
        reason: String,
    },
}

/// What became of each command of a group.
type Results = Vec<Result<Posted, LedgerError>>;

/// What became of one command, or why none of its group can be committed.
type RunApart = Result<Result<Posted, LedgerError>, LedgerError>;

/// Runs a command so that it can be taken back by itself.
fn run_apart(
    command: &Command,
    transaction: &mut rusqlite::Transaction<'_>,
    chain: &mut Chain,
) -> RunApart {
    let part = transaction.savepoint()?;
    let before = chain.clone();
    match command.act.run(&part, chain) {
        Ok(posted) => {
            part.commit()?;
            Ok(Ok(posted))
        }
        Err(error @ LedgerError::Storage(_)) => Err(error),
        Err(refused) => {
            drop(part);
            *chain = before;
            Ok(Err(refused))
        }
    }
}

struct Command {
    act: Act,
    answer: oneshot::Sender<Result<Posted, LedgerError>>,
}

impl Act {
    /// Does it; the caller rolls back on an error. [`LedgerError::Storage`]
    /// means the disk: what SQLite refuses for its content is this command's
    /// own failure.
    fn run(&self, connection: &Connection, chain: &mut Chain) -> Result<Posted, LedgerError> {
        let result = match self {
            Self::Post(block) => post::post_block(connection, chain, block),
            Self::PostPartly(partly) => post::post_struck(connection, chain, partly),
            Self::CapFault(cap) => fault::post(connection, chain, cap),
            Self::Skip(refused) => post::pass_over(connection, chain, refused),
            Self::Record(action) => post::record_action(connection, chain, action),
            Self::PutPlansInForce(told) => plans::post(connection, chain, told),
            Self::Sign => Ok(Posted::New), // the commit does it, after all others
        };
        match (result, self) {
            (Err(LedgerError::Storage(source)), act) if is_about_content(&source) => {
                let reason = source.to_string();
                let block = match act {
                    Self::Post(block) => Some(&**block),
                    Self::PostPartly(partly) => Some(&partly.accepted),
                    Self::CapFault(_)
                    | Self::Skip(_)
                    | Self::Record(_)
                    | Self::PutPlansInForce(_)
                    | Self::Sign => None,
                };
                Err(match block.map(Block::parts) {
                    Some(&BlockParts { epoch, number, .. }) => {
                        let refusal = BlockRefusal::Unfit { reason };
                        LedgerError::Refused { epoch, number, refusal }
                    }
                    None => LedgerError::Damaged(reason),
                })
            }
            (result, _) => result,
        }
    }
}

impl LedgerOptions {
    /// The defaults, for a ledger at `path`.
    pub fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            queue: 1_024,
            group: 256,
            retry: Duration::from_secs(1),
            max_pages: None,
            log: WalRewriter::default(),
            key: None,
            checkpoint_every: Duration::from_secs(10),
            checkpoint_records: 10_000,
            leave_out: LeaveOut::Nothing,
        }
    }
}

impl Ledger {
    /// Opens or makes the ledger at `path`, with the defaults.
    ///
    /// # Errors
    /// As [`Ledger::open_with`].
    pub fn open(path: &Path) -> Result<LedgerHandle, LedgerError> {
        Self::open_with(LedgerOptions::new(path))
    }

    /// Opens or makes a ledger. That nobody else writes it is for the caller
    /// to see to, by a lock on the data folder.
    ///
    /// # Errors
    /// [`LedgerError::Open`], [`LedgerError::Log`], [`LedgerError::Format`] and
    /// [`LedgerError::Damaged`].
    pub fn open_with(options: LedgerOptions) -> Result<LedgerHandle, LedgerError> {
        let (handle, ManualLedger { writer }) = Self::open_manual(options)?;
        std::thread::Builder::new()
            .name("ledger".to_owned())
            .spawn(move || writer.run())
            .map_err(|error| LedgerError::Damaged(format!("no thread for the ledger: {error}")))?;
        Ok(handle)
    }

    /// Opens a ledger that writes when its owner says so, for who plays time.
    ///
    /// # Errors
    /// As [`Ledger::open_with`].
    pub fn open_manual(
        options: LedgerOptions,
    ) -> Result<(LedgerHandle, ManualLedger), LedgerError> {
        let store = Store::open(&options)?;
        let reader = LedgerReader::open(&options.path)?;
        let (commands, inbox) = sync_channel(options.queue.max(1));
        let health = Arc::new(Mutex::new(Health::Healthy));
        let key = options.key.clone();
        let writer = Writer {
            options,
            store: Some(store),
            inbox,
            health: Arc::clone(&health),
            // What an earlier life left unsigned is signed at once.
            due: Some(Instant::now()),
        };
        Ok((LedgerHandle { commands, health, reader, key }, ManualLedger { writer }))
    }

    /// Opens a ledger for reading, beside a process that writes it.
    ///
    /// # Errors
    /// [`LedgerError::Open`] and [`LedgerError::Format`].
    pub fn open_read_only(path: &Path) -> Result<LedgerReader, LedgerError> {
        LedgerReader::open(path)
    }
}

impl LedgerHandle {
    /// Hands `act` to the writer. The returned future ends once the act is on
    /// the disk, or with the reason why the act is not. The act is done even if
    /// the future is dropped.
    ///
    /// The future fails with [`LedgerError::Busy`] where the queue is full, with
    /// [`LedgerError::Closed`] where the writer has stopped, and with an error
    /// [of the disk](LedgerError::is_of_the_disk) where nothing was written.
    /// [`Act`] lists the errors of each act.
    pub fn submit(&self, act: impl Into<Act>) -> Submitted {
        let (answer, receiver) = oneshot::channel();
        if let Err(refused) = self.commands.try_send(Command { act: act.into(), answer }) {
            let (command, error) = match refused {
                TrySendError::Full(command) => (command, LedgerError::Busy),
                TrySendError::Disconnected(command) => (command, LedgerError::Closed),
            };
            // The receiver is alive: it is returned below.
            let _ = command.answer.send(Err(error));
        }
        Submitted::new(receiver)
    }

    /// Whether the last write went through.
    pub fn health(&self) -> Health {
        self.health.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The public key of the audit log, where it is signed.
    pub fn verifier(&self) -> Option<&str> {
        self.key.as_deref().map(AuditKey::verifier)
    }

    /// The reading side.
    pub fn reader(&self) -> &LedgerReader {
        &self.reader
    }
}

/// The open file, and where its audit log ends.
struct Store {
    connection: Connection,
    chain: Chain,
}

impl Store {
    fn open(options: &LedgerOptions) -> Result<Self, LedgerError> {
        let connection = schema::open_writer(&options.path, options.max_pages, &options.log)?;
        let chain = Chain::load(&connection, options.leave_out == LeaveOut::Records)?;
        Ok(Self { connection, chain })
    }

    /// Does `write` to the chain in a transaction: whole, or neither the file
    /// nor the chain has changed.
    fn transact<T>(
        &mut self,
        write: impl FnOnce(&mut rusqlite::Transaction<'_>, &mut Chain) -> Result<T, LedgerError>,
    ) -> Result<T, LedgerError> {
        let mut chain = self.chain.clone();
        let mut transaction =
            self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let done = write(&mut transaction, &mut chain)?;
        transaction.commit()?;
        self.chain = chain;
        Ok(done)
    }
}

/// A ledger without its thread.
pub struct ManualLedger {
    writer: Writer,
}

impl ManualLedger {
    /// What the thread does when it wakes: it commits what waits, as one
    /// group, or looks whether an unwell disk is well again.
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

struct Writer {
    options: LedgerOptions,
    /// `None` after the disk failed: what the cache believes is then worth
    /// nothing and the file is opened anew.
    store: Option<Store>,
    inbox: Receiver<Command>,
    health: Arc<Mutex<Health>>,
    /// When the next checkpoint is; `None` while all records are signed.
    due: Option<Instant>,
}

impl Writer {
    fn run(mut self) {
        loop {
            match self.next() {
                Ok(first) => self.serve_group(first),
                Err(RecvTimeoutError::Timeout) if self.is_healthy() => self.sign(),
                Err(RecvTimeoutError::Timeout) => self.try_to_recover(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        if self.is_healthy() {
            self.sign();
            self.copy_log();
        }
    }

    /// At an end, so that the file alone is the whole of it, for who takes it and
    /// leaves the log; that stays as it is, and so nothing is lost if this fails.
    fn copy_log(&self) {
        let Some(store) = self.store.as_ref().filter(|_| self.is_healthy()) else { return };
        let _ = store.connection.query_row("PRAGMA wal_checkpoint", [], |_| Ok(()));
    }

    /// The next command, or that it is time for something else.
    fn next(&self) -> Result<Command, RecvTimeoutError> {
        let patience = if self.is_healthy() {
            self.due.map(|due| due.saturating_duration_since(Instant::now()))
        } else {
            Some(self.options.retry)
        };
        match patience {
            Some(patience) => self.inbox.recv_timeout(patience),
            None => self.inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
        }
    }

    fn serve_group(&mut self, first: Command) {
        let mut group = vec![first];
        while group.len() < self.options.group
            && let Ok(next) = self.inbox.try_recv()
        {
            group.push(next);
        }
        let committed: Result<Results, LedgerError> = match self.options.leave_out {
            LeaveOut::Everything => Ok(group.iter().map(|_| Ok(Posted::New)).collect()),
            LeaveOut::Nothing | LeaveOut::Records => self.commit(&group),
        };
        match committed {
            Ok(results) => {
                // Where all were refused or known, the disk was asked nothing.
                let wrote = results.iter().any(|result| matches!(result, Ok(Posted::New)));
                if wrote || self.is_healthy() {
                    self.written();
                }
                if group.iter().any(|command| matches!(command.act, Act::Sign)) {
                    self.copy_log();
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

    /// One transaction for the whole group. A command that is refused leaves
    /// no trace and does not hinder the others; a disk that refuses fails all.
    ///
    /// Hardly a group holds one that is refused, and to be able to take one
    /// back SQLite copies every page that it changes. So all are first run
    /// without that, and only where one is refused is each kept apart.
    fn commit(&mut self, group: &[Command]) -> Result<Results, LedgerError> {
        let together = self.commit_by(group, |command, transaction, chain| {
            command.act.run(transaction, chain).map(Ok)
        });
        match &together {
            Ok(_) => together,
            Err(error) if error.is_of_the_disk() => together,
            Err(_) => self.commit_by(group, run_apart),
        }
    }

    /// `run` for each command in one transaction, signed where it is time.
    fn commit_by(
        &mut self,
        group: &[Command],
        run: impl Fn(&Command, &mut rusqlite::Transaction<'_>, &mut Chain) -> RunApart,
    ) -> Result<Results, LedgerError> {
        let overdue = self.due.is_some_and(|due| due <= Instant::now())
            || group.iter().any(|command| matches!(command.act, Act::Sign));
        let key = self.options.key.clone();
        let most = self.options.checkpoint_records;
        self.store()?.transact(|transaction, chain| {
            let results: Results = group
                .iter()
                .map(|command| run(command, transaction, chain))
                .collect::<Result<_, _>>()?;
            let enough = chain.unsigned() >= most;
            if let Some(key) = key.filter(|_| (overdue && chain.unsigned() > 0) || enough) {
                chain.sign(transaction, &key)?;
            }
            Ok(results)
        })
    }

    /// Signs what is not signed yet, in a transaction of its own.
    fn sign(&mut self) {
        let Some(key) = self.options.key.clone() else {
            self.due = None;
            return;
        };
        let signed = self.store().and_then(|store| {
            if store.chain.unsigned() == 0 {
                return Ok(());
            }
            store.transact(|transaction, chain| chain.sign(transaction, &key))
        });
        match signed {
            Ok(()) => self.written(),
            Err(error) => self.mark_degraded(&error),
        }
    }

    /// After a commit: well, and waiting for the next checkpoint where there
    /// is something to sign.
    fn written(&mut self) {
        self.set_health(Health::Healthy);
        let unsigned = self.store.as_ref().is_some_and(|store| store.chain.unsigned() > 0);
        let later = || Instant::now() + self.options.checkpoint_every;
        self.due = (unsigned && self.options.key.is_some()).then(|| self.due.unwrap_or_else(later));
    }

    fn store(&mut self) -> Result<&mut Store, LedgerError> {
        let store = match self.store.take() {
            Some(store) => store,
            None => Store::open(&self.options)?,
        };
        Ok(self.store.insert(store))
    }

    /// Writes and takes back what a block might need: 64 KiB.
    fn try_to_recover(&mut self) {
        let probe = |store: &mut Store| {
            store
                .connection
                .execute_batch("INSERT INTO probe VALUES (zeroblob(65536)); DELETE FROM probe;")
        };
        let result = self.store().and_then(|store| Ok(probe(store)?));
        match result {
            Ok(()) => self.written(),
            Err(error) => self.mark_degraded(&error),
        }
    }

    fn is_healthy(&self) -> bool {
        *self.health.lock().unwrap_or_else(PoisonError::into_inner) == Health::Healthy
    }

    fn mark_degraded(&mut self, error: &LedgerError) {
        self.store = None;
        let reason = match error {
            LedgerError::Storage(source) | LedgerError::Open { source, .. } => source.to_string(),
            LedgerError::Log { source, .. } => source.to_string(),
            other => other.to_string(),
        };
        self.set_health(Health::Degraded { reason });
    }

    fn set_health(&self, new: Health) {
        let mut health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        match (&*health, &new) {
            (Health::Healthy, Health::Degraded { reason }) => {
                tracing::error!(reason, "the ledger cannot be written");
            }
            (Health::Degraded { .. }, Health::Healthy) => {
                tracing::info!("the ledger can be written again");
            }
            _ => (),
        }
        *health = new;
    }
}
