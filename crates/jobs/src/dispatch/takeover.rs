//! The first acts under a claim: caps on the tries of earlier claims, and the check of the
//! input.

use std::collections::BTreeMap;
use std::io::{BufReader, Read};
use std::sync::Arc;

use futures_util::stream::{self, StreamExt};

use super::run::BatchRun;
use super::try_run;
use crate::batch::{BatchState, Cause, FailureCode};
use crate::error::JobError;
use crate::hash::Sha256;
use crate::line::{Line, LineReader};
use crate::service::{CapRequest, LineService};
use crate::upload::blocking;
use crate::validate::{MOST_ERRORS, validate};

/// Caps that are on their way to the ledger at once.
const CAPS_AT_ONCE: usize = 1_024;

impl BatchRun {
    /// Puts caps on the tries of earlier claims that may have run and that no row answers.
    /// Their marks stay until all caps are in the ledger.
    pub(super) async fn cap_earlier(&mut self) -> Result<(), JobError> {
        if self.claim.number.0 == 1 {
            self.earlier_are_capped = true;
            return Ok(());
        }
        if !self.earlier.is_empty() {
            let models = self.models_of_earlier().await?;
            let caps: Vec<CapRequest> = self
                .earlier
                .drain(..)
                .filter_map(|open| {
                    // A line without a model was never placed.
                    let model = models.get(&open.line)?.clone();
                    Some(CapRequest { caller: self.caller.clone(), request: open.request, model })
                })
                .collect();
            tracing::info!(batch = %self.claim.batch, tries = caps.len(), "batch is taken over; tries of earlier claims are not billed");
            cap_all(&self.context.service, caps).await;
        }
        let claim = self.claim;
        self.context.store(move |store| store.capped(&claim)).await?;
        self.earlier_are_capped = true;
        Ok(())
    }

    /// Returns the models of the lines with open tries.
    async fn models_of_earlier(
        &mut self,
    ) -> Result<BTreeMap<u64, tollgate_domain::ModelName>, JobError> {
        let lines: std::collections::BTreeSet<u64> =
            self.earlier.iter().map(|open| open.line).collect();
        let reader = self.context.jobs.shared().blobs.reader(self.ranges.clone());
        blocking(move || {
            let (mut reader, mut models) = (LineReader::new(reader), BTreeMap::new());
            let last = lines.last().copied();
            while let Some(line) = reader.next().map_err(unreadable)? {
                if lines.contains(&line.number) {
                    let model = Line::read(&line).and_then(|line| line.model);
                    models.extend(model.map(|model| (line.number, model)));
                }
                // No line after the last open try matters, and the rest can be 200 MiB.
                if Some(line.number) >= last {
                    break;
                }
            }
            Ok(models)
        })
        .await
    }

    /// Checks the input. The batch then runs, or has failed.
    pub(super) async fn validate(&mut self) -> Result<(), JobError> {
        // A closed semaphore does not occur: it lives as long as the dispatcher.
        let _permit = self.context.validations.clone().acquire_owned().await;
        let reader = self.context.jobs.shared().blobs.reader(self.ranges.clone()).into_inner();
        let (endpoint, expected) = (self.batch.endpoint, self.sha256);
        let checked = blocking(move || {
            let mut reader = HashingReader { reader, hash: Sha256::new() };
            let errors = validate(BufReader::with_capacity(BUFFER, &mut reader), endpoint);
            let errors = errors.map_err(unreadable)?;
            let hash = reader.hash.finish();
            // The check stops early at the most mistakes.
            let was_read = errors.len() < MOST_ERRORS;
            match expected {
                Some(expected) if was_read && expected != hash => Err(JobError::Damaged),
                _ => Ok(errors),
            }
        })
        .await;
        match checked {
            Ok(errors) => {
                let (now, claim) = (self.context.jobs.now(), self.claim);
                let validated =
                    move |store: &mut dyn crate::Store| store.validated(now, &claim, &errors);
                self.batch = self.context.store(validated).await?;
                Ok(())
            }
            Err(JobError::Damaged) => self.fail_damaged().await,
            Err(error) => Err(error),
        }
    }

    /// Lets a batch fail because its input has changed on the disk.
    pub(super) async fn fail_damaged(&mut self) -> Result<(), JobError> {
        tracing::error!(batch = %self.claim.batch, input = %self.batch.input, "the input of a batch has changed on the disk; the batch fails");
        self.begin_end(Cause::Failed(FailureCode::Internal)).await
    }

    /// Begins to end the batch, unless an earlier cause stands.
    pub(super) async fn begin_end(&mut self, cause: Cause) -> Result<(), JobError> {
        let (now, claim) = (self.context.jobs.now(), self.claim);
        self.batch = self.context.store(move |store| store.begin_end(now, &claim, cause)).await?;
        debug_assert!(matches!(self.batch.state, BatchState::Ending(_)), "a cause was committed");
        Ok(())
    }
}

/// Waits until the ledger has all caps.
pub(super) async fn cap_all(service: &Arc<dyn LineService>, caps: Vec<CapRequest>) {
    let caps = stream::iter(caps).map(|cap| try_run::cap(&**service, cap));
    caps.buffer_unordered(CAPS_AT_ONCE).collect::<()>().await;
}

/// A reader that hashes what it reads.
struct HashingReader<R> {
    reader: R,
    hash: Sha256,
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.reader.read(buffer)?;
        self.hash.update(buffer.get(..read).unwrap_or_default());
        Ok(read)
    }
}

/// Converts an error of reading an input. An input that is lost, or has lost bytes, is damaged.
pub(super) fn unreadable(error: std::io::Error) -> JobError {
    match error.kind() {
        // The database is on the same disk and has the file, so the file does not come back.
        std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::NotFound => JobError::Damaged,
        _ => crate::blobs::at(std::path::Path::new("input of a batch"), error),
    }
}

const BUFFER: usize = 64 * 1024;
