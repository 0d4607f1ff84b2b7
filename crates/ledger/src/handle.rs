//! The handle on a ledger that is written: submits acts and reads.

use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_channel::oneshot;

use crate::act::{Act, Posted, Submitted};
use crate::audit_key::AuditKey;
use crate::error::LedgerError;
use crate::reader::LedgerReader;

/// A handle that submits acts to the ledger and reads it. The writer ends with the
/// last handle, after all accepted acts.
#[derive(Clone)]
pub struct LedgerHandle {
    commands: SyncSender<Command>,
    health: HealthCell,
    unsigned: UnsignedCell,
    reader: LedgerReader,
    key: Option<Arc<AuditKey>>,
}

/// The time for which billable work goes on without the database server.
pub const SERVER_AWAY: Duration = Duration::from_secs(90);

/// The ability of the ledger to take billable work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// The last write succeeded.
    Healthy,
    /// The last write failed. Work that must be billed is refused until one succeeds: at once
    /// without a disk, and after [`SERVER_AWAY`] without a server.
    Degraded {
        /// The error of the disk or the server, for the log.
        reason: String,
        /// The time of the first write that failed.
        since: Instant,
    },
}

/// The health that writer and handles share.
#[derive(Clone)]
pub(crate) struct HealthCell(Arc<Mutex<Health>>);

/// The time of the commit of the oldest record that no checkpoint signs yet. Writer and handles
/// share it.
#[derive(Clone, Default)]
pub(crate) struct UnsignedCell(Arc<Mutex<Option<Instant>>>);

/// An act on its way to the writer, and the sender of its answer.
pub(crate) struct Command {
    pub(crate) act: Act,
    pub(crate) answer: oneshot::Sender<Result<Posted, LedgerError>>,
}

impl HealthCell {
    pub(crate) fn healthy() -> Self {
        Self(Arc::new(Mutex::new(Health::Healthy)))
    }

    pub(crate) fn get(&self) -> Health {
        // A poisoned lock still holds a whole value.
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the health and returns the one before. A ledger that is degraded keeps the time of its
    /// first failure.
    pub(crate) fn replace(&self, mut new: Health) -> Health {
        let mut health = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Health::Degraded { since: first, .. }, Health::Degraded { since, .. }) =
            (&*health, &mut new)
        {
            *since = *first;
        }
        std::mem::replace(&mut *health, new)
    }
}

impl UnsignedCell {
    /// Returns the time; `None` if every record is signed.
    pub(crate) fn get(&self) -> Option<Instant> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set(&self, since: Option<Instant>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = since;
    }
}

impl LedgerHandle {
    pub(crate) fn new(
        commands: SyncSender<Command>,
        health: HealthCell,
        unsigned: UnsignedCell,
        reader: LedgerReader,
        key: Option<Arc<AuditKey>>,
    ) -> Self {
        Self { commands, health, unsigned, reader, key }
    }

    /// Returns true if the gateway may begin work that must be billed. The journals of the workers
    /// keep the usage while a database server is away, so such work goes on for [`SERVER_AWAY`].
    pub fn may_begin_work(&self) -> bool {
        match self.health.get() {
            Health::Healthy => true,
            Health::Degraded { since, .. } => {
                self.reader.is_on_server() && since.elapsed() < SERVER_AWAY
            }
        }
    }

    /// Hands `act` to the writer. The returned future ends once the act is on the
    /// disk, or with the reason why it is not. The act is done even if the future is
    /// dropped.
    ///
    /// The future fails with [`LedgerError::Busy`] where the queue is full, with
    /// [`LedgerError::Closed`] where the writer has stopped, and with an error
    /// [of the disk](LedgerError::is_of_the_disk) where nothing was written. [`Act`]
    /// lists the errors of each act.
    pub fn submit(&self, act: impl Into<Act>) -> Submitted {
        let (answer, receiver) = oneshot::channel();
        // Never wait here: callers are async tasks.
        if let Err(refused) = self.commands.try_send(Command { act: act.into(), answer }) {
            let (command, error) = match refused {
                TrySendError::Full(command) => (command, LedgerError::Busy),
                TrySendError::Disconnected(command) => (command, LedgerError::Closed),
            };
            // Cannot fail: the receiver is returned below.
            let _ = command.answer.send(Err(error));
        }
        Submitted::new(receiver)
    }

    /// Returns the result of the last write.
    pub fn health(&self) -> Health {
        self.health.get()
    }

    /// Returns for how long the oldest record has waited for a checkpoint that signs it. Zero if
    /// every record is signed, and in a ledger without a key.
    pub fn unsigned_for(&self) -> Duration {
        self.unsigned.get().map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Returns the public key of the audit log; `None` for an unsigned log.
    pub fn verifier(&self) -> Option<&str> {
        self.key.as_deref().map(AuditKey::verifier)
    }

    /// Returns the reading side.
    pub fn reader(&self) -> &LedgerReader {
        &self.reader
    }
}
