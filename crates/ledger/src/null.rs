//! A ledger that keeps nothing, as the control of a benchmark: it shows what the
//! real ledger costs.

use std::sync::mpsc::sync_channel;

use crate::act::Posted;
use crate::error::LedgerError;
use crate::handle::{Command, HealthCell, LedgerHandle, UnsignedCell};
use crate::ledger::Ledger;
use crate::operations::store::Store;
use crate::options::LedgerOptions;
use crate::reader::LedgerReader;

impl Ledger {
    /// Opens a ledger that answers every act as new and writes nothing. The file is
    /// made, so that readers see an empty ledger.
    ///
    /// # Errors
    /// As [`Ledger::open_with`].
    pub fn open_null(options: LedgerOptions) -> Result<LedgerHandle, LedgerError> {
        drop(Store::open(&options)?);
        let reader = LedgerReader::open(&options.place)?;
        let (commands, inbox) = sync_channel(options.queue.max(1));
        std::thread::Builder::new()
            .name("null-ledger".to_owned())
            .spawn(move || {
                for Command { answer, .. } in inbox {
                    // The caller may have stopped waiting.
                    let _ = answer.send(Ok(Posted::New));
                }
            })
            .map_err(|error| LedgerError::Damaged(format!("no thread for the ledger: {error}")))?;
        let (health, unsigned) = (HealthCell::healthy(), UnsignedCell::default());
        Ok(LedgerHandle::new(commands, health, unsigned, reader, options.key))
    }
}
