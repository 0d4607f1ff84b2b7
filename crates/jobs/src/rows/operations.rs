//! The operations of the store: each is one transaction over the tables.

use std::collections::BTreeMap;

use tollgate_domain::{DeviceNanos, TenantId, UtcDay, UtcTime};

use super::files::{BlobKind, NewBlob};
use super::{SqlStore, Tables, answers, batches, claims, damaged, files, spent};
use crate::batch::{
    BatchPage, BatchRow, BatchState, BatchUsage, Cause, Counts, InputError, NewBatch,
    SpentByBatches, Times, TryCost,
};
use crate::claim::{Claim, ClaimNumber, ClaimSeed, Claimed};
use crate::error::JobError;
use crate::file::{BlobRange, FilePage, FileRow, FinishedFile, NewFile, Page, Purpose};
use crate::ids::{BatchId, BlobId, FileId};
use crate::quota::{QuotaScope, QuotaUse, ScopedQuotas};
use crate::rules::{self, EarlierClaim, UploadGrowth};
use crate::store::{
    Answer, AnswerKind, GatewayStored, Most, Released, Store, StoredFigures, TriesLeft,
};

/// Runs `act` under the fence of a claim.
fn fenced<T>(
    store: &mut SqlStore,
    claim: &Claim,
    act: impl FnOnce(Tables<'_>) -> Result<T, JobError>,
) -> Result<T, JobError> {
    store.write(|tables| {
        // In the transaction of the act, so that no other claim can come in between.
        claims::check(tables, claim)?;
        act(tables)
    })
}

fn batch(tables: Tables<'_>, id: BatchId) -> Result<BatchRow, JobError> {
    batches::find(tables, id)?.ok_or(JobError::NoSuchBatch)
}

fn batch_of(tables: Tables<'_>, tenant: &TenantId, id: BatchId) -> Result<BatchRow, JobError> {
    // Another tenant's batch looks like one that does not exist.
    batches::find(tables, id)?.filter(|row| row.tenant == *tenant).ok_or(JobError::NoSuchBatch)
}

fn quota_use(tables: Tables<'_>, scope: &QuotaScope) -> Result<QuotaUse, JobError> {
    let (stored, open) = (files::sums(tables, scope)?, batches::sums(tables, scope)?);
    Ok(QuotaUse {
        queued: open.queued,
        lines: open.lines,
        stored: stored.stored,
        results: stored.segments.saturating_add(open.room),
        files: stored.files + stored.uploads + 2 * open.queued,
        uploads: stored.uploads,
    })
}

fn check_upload(
    tables: Tables<'_>,
    growth: UploadGrowth,
    quotas: &[ScopedQuotas],
    all: GatewayStored,
) -> Result<(), JobError> {
    tables.lock_scopes(quotas)?;
    tables.lock_all()?;
    // Narrowest first, so that a refusal names the tenant before its pool.
    for scoped in quotas {
        rules::check_upload(scoped, &quota_use(tables, &scoped.scope)?, growth)?;
    }
    rules::check_gateway(all, files::stored_by_all(tables)?, growth)
}

/// Returns the blobs that no row needs.
fn released(tables: Tables<'_>) -> Result<Vec<Released>, JobError> {
    Ok(files::unneeded_blobs(tables)?.into_iter().map(Released).collect())
}

/// Makes the result file of one kind; `None` if no line is in it.
fn result_file(
    tables: Tables<'_>,
    batch: &BatchRow,
    kind: AnswerKind,
    (id, now): (FileId, UtcTime),
) -> Result<Option<FileId>, JobError> {
    let (lines, ranges) = answers::ranges(tables, batch.id, kind)?;
    if lines == 0 {
        return Ok(None);
    }
    let suffix = match kind {
        AnswerKind::Output => "output",
        AnswerKind::Error => "error",
    };
    let file = FileRow {
        id,
        tenant: batch.tenant.clone(),
        pool: batch.pool.clone(),
        bytes: ranges.iter().map(|range| range.length).sum(),
        created: now,
        expires: rules::after(now, batch.results_kept),
        filename: format!("{}_{suffix}.jsonl", batch.id),
        purpose: Purpose::BatchOutput,
        lines,
        // The answers may come from several claims, so that no hash covers the whole.
        sha256: None,
    };
    files::insert(tables, &file, &ranges)?;
    Ok(Some(id))
}

impl Store for SqlStore {
    fn reserve(
        &mut self,
        new: &NewFile,
        quotas: &[ScopedQuotas],
        all: GatewayStored,
    ) -> Result<(), JobError> {
        self.write(|tables| {
            let growth = UploadGrowth { is_new: true, held: 0, bytes: new.reserved };
            check_upload(tables, growth, quotas, all)?;
            files::insert_blob(
                tables,
                &NewBlob {
                    id: new.blob,
                    tenant: &new.tenant,
                    pool: new.pool.as_ref(),
                    kind: BlobKind::Upload,
                    bytes: new.reserved,
                    batch: None,
                },
            )?;
            files::set_home(tables, new.blob)
        })
    }

    fn grow(
        &mut self,
        upload: &NewFile,
        bytes: u64,
        quotas: &[ScopedQuotas],
        all: GatewayStored,
    ) -> Result<(), JobError> {
        self.write(|tables| {
            let held = files::upload_bytes(tables, upload.blob)?.ok_or(JobError::NoSuchFile)?;
            let growth = UploadGrowth { is_new: false, held, bytes };
            check_upload(tables, growth, quotas, all)?;
            files::set_blob(tables, upload.blob, BlobKind::Upload, bytes)
        })
    }

    fn finish(
        &mut self,
        now: UtcTime,
        upload: &NewFile,
        finished: &FinishedFile,
        quotas: &[ScopedQuotas],
    ) -> Result<FileRow, JobError> {
        self.write(|tables| {
            // Of two uploads with one id, the second finds the file of the first.
            tables.lock_scopes(quotas)?;
            files::upload_bytes(tables, upload.blob)?.ok_or(JobError::NoSuchFile)?;
            if let Some(file) = files::find(tables, upload.id, Some((&upload.tenant, now)))? {
                return Err(JobError::FileExists(Box::new(file)));
            }
            let FinishedFile { bytes, lines, sha256, filename, life } = finished;
            // The true size counts from now on, instead of the reservation.
            files::set_blob(tables, upload.blob, BlobKind::Input, *bytes)?;
            let file = FileRow {
                id: upload.id,
                tenant: upload.tenant.clone(),
                pool: upload.pool.clone(),
                bytes: *bytes,
                created: now,
                expires: rules::after(now, rules::life(*life, quotas)),
                filename: filename.clone(),
                purpose: Purpose::Batch,
                lines: *lines,
                sha256: Some(*sha256),
            };
            let range = BlobRange { blob: upload.blob, offset: 0, length: *bytes };
            files::insert(tables, &file, &[range])?;
            Ok(file)
        })
    }

    fn is_upload(&mut self, blob: BlobId) -> Result<bool, JobError> {
        self.read(|tables| Ok(files::upload_bytes(tables, blob)?.is_some()))
    }

    fn abandon(&mut self, upload: BlobId) -> Result<(), JobError> {
        self.write(|tables| match files::upload_bytes(tables, upload)? {
            Some(_) => files::delete_blob(tables, upload),
            None => Ok(()),
        })
    }

    fn file(&mut self, now: UtcTime, tenant: &TenantId, id: FileId) -> Result<FileRow, JobError> {
        self.read(|tables| {
            files::find(tables, id, Some((tenant, now)))?.ok_or(JobError::NoSuchFile)
        })
    }

    fn files(
        &mut self,
        now: UtcTime,
        tenant: &TenantId,
        page: &FilePage,
    ) -> Result<Page<FileRow>, JobError> {
        self.read(|tables| files::page(tables, now, tenant, page))
    }

    fn ranges(
        &mut self,
        now: UtcTime,
        tenant: &TenantId,
        id: FileId,
    ) -> Result<(FileRow, Vec<BlobRange>), JobError> {
        self.read(|tables| {
            let file = files::find(tables, id, Some((tenant, now)))?.ok_or(JobError::NoSuchFile)?;
            Ok((file, files::ranges(tables, id)?))
        })
    }

    fn delete_file(
        &mut self,
        now: UtcTime,
        tenant: &TenantId,
        id: FileId,
    ) -> Result<Vec<Released>, JobError> {
        self.write(|tables| {
            tables.lock_file(id)?;
            files::find(tables, id, Some((tenant, now)))?.ok_or(JobError::NoSuchFile)?;
            if files::is_needed(tables, id)? {
                return Err(JobError::FileInUse);
            }
            files::delete(tables, id)?;
            released(tables)
        })
    }

    fn forget(&mut self, blob: BlobId) -> Result<(), JobError> {
        self.write(|tables| files::delete_blob(tables, blob))
    }

    fn create_batch(
        &mut self,
        now: UtcTime,
        new: &NewBatch,
        quotas: &[ScopedQuotas],
    ) -> Result<BatchRow, JobError> {
        self.write(|tables| {
            // In the transaction of the insert: of two requests with one id, the second finds the
            // batch of the first.
            tables.lock_scopes(quotas)?;
            tables.keep_file(new.input)?;
            let earlier = batches::find(tables, new.id)?;
            if let Some(earlier) = earlier.filter(|row| row.tenant == new.tenant) {
                return Ok(earlier);
            }
            let input = files::find(tables, new.input, Some((&new.tenant, now)))?
                .ok_or(JobError::NoSuchFile)?;
            if input.purpose != Purpose::Batch {
                return Err(JobError::WrongPurpose);
            }
            for scoped in quotas {
                rules::check_batch(scoped, &quota_use(tables, &scoped.scope)?, input.lines)?;
            }
            let row = BatchRow {
                id: new.id,
                tenant: new.tenant.clone(),
                pool: new.pool.clone(),
                key: new.key.clone(),
                input: new.input,
                endpoint: new.endpoint,
                metadata: new.metadata.clone(),
                created: now,
                expires: rules::after(now, new.window),
                results_kept: rules::life(new.results_kept, quotas),
                state: BatchState::Validating,
                model: None,
                counts: Counts { total: input.lines, completed: 0, failed: 0 },
                usage: BatchUsage::default(),
                errors: Vec::new(),
                output: None,
                error: None,
                times: Times::default(),
                is_claimed: false,
            };
            // `check_batch` has found this room free in the same transaction.
            let room = input.lines.saturating_mul(rules::ROOM_OF_A_LINE);
            batches::insert(tables, &row, rules::life(None, quotas), room)?;
            Ok(row)
        })
    }

    fn batch(&mut self, tenant: &TenantId, id: BatchId) -> Result<BatchRow, JobError> {
        self.read(|tables| batch_of(tables, tenant, id))
    }

    fn batches(&mut self, tenant: &TenantId, page: &BatchPage) -> Result<Page<BatchRow>, JobError> {
        self.read(|tables| batches::page(tables, tenant, page))
    }

    fn cancel(
        &mut self,
        now: UtcTime,
        tenant: &TenantId,
        id: BatchId,
    ) -> Result<BatchRow, JobError> {
        self.write(|tables| {
            tables.lock_batch(id)?;
            if let Some(state) = rules::cancel(batch_of(tables, tenant, id)?.state)? {
                batches::set_state(tables, id, state, now)?;
            }
            batch(tables, id)
        })
    }

    fn quota_use(&mut self, scope: &QuotaScope) -> Result<QuotaUse, JobError> {
        self.read(|tables| quota_use(tables, scope))
    }

    fn claimable(&mut self, now: UtcTime, most: Most) -> Result<Vec<BatchRow>, JobError> {
        self.read(|tables| batches::claimable(tables, now, most))
    }

    fn claim(
        &mut self,
        now: UtcTime,
        id: BatchId,
        seed: ClaimSeed,
        lease: UtcTime,
    ) -> Result<Option<Claimed>, JobError> {
        self.write(|tables| {
            tables.lock_batch(id)?;
            let row = batch(tables, id)?;
            let latest = claims::latest(tables, id)?.ok_or(JobError::NoSuchBatch)?;
            let is_held = latest.lease.is_some_and(|lease| lease > super::nanos(now));
            if is_held || matches!(row.state, BatchState::Ended(_)) {
                return Ok(None);
            }
            let earlier = EarlierClaim {
                was_released: latest.was_released,
                has_sent: claims::begun(tables, id, latest.number)? > 0,
                answers: latest.answers,
            };
            let barren = rules::barren(earlier, latest.barren);
            let claim = Claim { batch: id, number: ClaimNumber(latest.number + 1), seed };
            claims::insert(tables, &claim, lease, barren)?;
            // What the dead claim had reserved for lines in progress is free again.
            batches::reset_room(tables, id, rules::ROOM_OF_A_LINE)?;
            let input = row.input;
            let file = files::find(tables, input, None)?
                .ok_or_else(|| damaged(format!("input {input} of {id} is missing")))?;
            Ok(Some(Claimed {
                claim,
                batch: batch(tables, id)?,
                file,
                ranges: files::ranges(tables, input)?,
                answered: answers::lines(tables, id)?,
                open: claims::open_tries(tables, &claim)?,
                barren,
            }))
        })
    }

    fn renew(&mut self, claim: &Claim, lease: UtcTime) -> Result<BatchRow, JobError> {
        fenced(self, claim, |tables| {
            claims::set_lease(tables, claim.batch, lease)?;
            batch(tables, claim.batch)
        })
    }

    fn claimed(&mut self, claim: &Claim) -> Result<BatchRow, JobError> {
        self.read(|tables| {
            claims::check(tables, claim)?;
            batch(tables, claim.batch)
        })
    }

    fn release(&mut self, claim: &Claim, tries: TriesLeft) -> Result<(), JobError> {
        fenced(self, claim, |tables| {
            claims::release(tables, claim.batch)?;
            match tries {
                // The claim's own marks go, too: the next claim has nothing to cap.
                TriesLeft::None => {
                    claims::delete_below(tables, claim.batch, ClaimNumber(claim.number.0 + 1))
                }
                TriesLeft::Open => Ok(()),
            }
        })
    }

    fn end_leases(&mut self) -> Result<(), JobError> {
        self.write(claims::end_leases)
    }

    fn capped(&mut self, claim: &Claim) -> Result<(), JobError> {
        fenced(self, claim, |tables| claims::delete_below(tables, claim.batch, claim.number))
    }

    fn validated(
        &mut self,
        now: UtcTime,
        claim: &Claim,
        errors: &[InputError],
    ) -> Result<BatchRow, JobError> {
        fenced(self, claim, |tables| {
            let row = batch(tables, claim.batch)?;
            let state = rules::validated(row.state, errors.is_empty());
            if state != row.state {
                batches::set_state(tables, row.id, state, now)?;
            }
            if matches!(state, BatchState::Ended(_)) {
                // No line of an invalid input counts, so that its quota of lines is free again.
                batches::set_invalid(tables, row.id, errors)?;
                batches::set_results(tables, row.id, None, None)?;
                claims::delete_below(tables, row.id, ClaimNumber(claim.number.0 + 1))?;
            }
            batch(tables, claim.batch)
        })
    }

    fn begin(
        &mut self,
        claim: &Claim,
        begun: u64,
        room: u64,
        quotas: &[ScopedQuotas],
    ) -> Result<(), JobError> {
        fenced(self, claim, |tables| {
            tables.lock_scopes(quotas)?;
            for scoped in quotas {
                rules::check_room(scoped, &quota_use(tables, &scoped.scope)?, room)?;
            }
            claims::set_begun(tables, claim, begun)?;
            batches::add_room(tables, claim.batch, room)
        })
    }

    fn begin_again(&mut self, claim: &Claim, tries: &[(u64, u32)]) -> Result<(), JobError> {
        fenced(self, claim, |tables| {
            tries
                .iter()
                .try_for_each(|(line, number)| claims::set_try(tables, claim, *line, *number))
        })
    }

    fn add_segment(&mut self, claim: &Claim, segment: BlobId) -> Result<(), JobError> {
        fenced(self, claim, |tables| {
            let row = batch(tables, claim.batch)?;
            files::insert_blob(
                tables,
                &NewBlob {
                    id: segment,
                    tenant: &row.tenant,
                    pool: row.pool.as_ref(),
                    kind: BlobKind::Segment,
                    bytes: 0,
                    batch: Some(row.id),
                },
            )
        })
    }

    fn commit(&mut self, claim: &Claim, new: &[Answer], room: u64) -> Result<BatchRow, JobError> {
        fenced(self, claim, |tables| {
            let mut progress = batches::Progress { room, ..Default::default() };
            let mut costs = BTreeMap::new();
            for answer in new {
                // The primary key refuses a second answer to a line, and the whole commit with it.
                answers::insert(tables, claim.batch, answer)?;
                files::grow_blob(tables, answer.range.blob, answer.range.length)?;
                match answer.kind {
                    AnswerKind::Output => progress.completed += 1,
                    AnswerKind::Error => progress.failed += 1,
                }
                progress.usage.add(&answer.usage.tokens);
                if let Some(TryCost { day, class, reference }) = &answer.usage.cost {
                    let sum: &mut DeviceNanos = costs.entry((*day, class.clone())).or_default();
                    *sum = DeviceNanos(sum.0.saturating_add(reference.0));
                }
                if let Some(model) = &answer.model {
                    batches::set_model(tables, claim.batch, model)?;
                }
            }
            batches::add(tables, claim.batch, &progress)?;
            // Last and in one order: on a server another batch of the tenant may add to the same
            // rows.
            for ((day, class), reference) in costs {
                spent::add(tables, claim.batch, &TryCost { day, class, reference })?;
            }
            batch(tables, claim.batch)
        })
    }

    fn spent(&mut self, day: UtcDay) -> Result<Vec<SpentByBatches>, JobError> {
        self.read(|tables| spent::of_day(tables, day))
    }

    fn begin_end(
        &mut self,
        now: UtcTime,
        claim: &Claim,
        cause: Cause,
    ) -> Result<BatchRow, JobError> {
        fenced(self, claim, |tables| {
            let row = batch(tables, claim.batch)?;
            if let Some(state) = rules::begin_end(row.state, cause) {
                batches::set_state(tables, row.id, state, now)?;
            }
            batch(tables, claim.batch)
        })
    }

    fn end(
        &mut self,
        now: UtcTime,
        claim: &Claim,
        output: FileId,
        error: FileId,
    ) -> Result<BatchRow, JobError> {
        fenced(self, claim, |tables| {
            let mut row = batch(tables, claim.batch)?;
            let BatchState::Ending(cause) = row.state else {
                return Err(damaged(format!("{} ends without a cause", row.id)));
            };
            // The batch was cancelled or has expired before its input was checked.
            if row.times.running.is_none() {
                batches::set_invalid(tables, row.id, &[])?;
                row.counts.total = 0;
            }
            // No file would have these lines, and their client would miss them.
            if row.counts.unanswered() > 0 {
                return Err(damaged(format!("{} ends with lines unanswered", row.id)));
            }
            let output = result_file(tables, &row, AnswerKind::Output, (output, now))?;
            let error = result_file(tables, &row, AnswerKind::Error, (error, now))?;
            batches::set_state(tables, row.id, BatchState::Ended(cause), now)?;
            batches::set_results(tables, row.id, output, error)?;
            answers::delete(tables, row.id)?;
            claims::delete_below(tables, row.id, ClaimNumber(claim.number.0 + 1))?;
            batch(tables, claim.batch)
        })
    }

    fn figures(&mut self) -> Result<StoredFigures, JobError> {
        self.read(|tables| {
            let mut figures = batches::figures(tables)?;
            let (stored, segments) = files::stored_by_all_kinds(tables)?;
            figures.stored = stored;
            figures.results = figures.results.saturating_add(segments);
            Ok(figures)
        })
    }

    fn sweep(&mut self, now: UtcTime) -> Result<Vec<Released>, JobError> {
        self.write(|tables| {
            files::delete_lost_uploads(tables)?;
            for file in files::expired(tables, now)? {
                // Another gateway may have begun a batch with the file, or deleted it.
                tables.lock_file(file)?;
                if !files::is_needed(tables, file)? {
                    files::delete(tables, file)?;
                }
            }
            batches::delete_old(tables, now)?;
            // After both deletes, so that it finds the blobs of files and of batches.
            released(tables)
        })
    }

    fn start(&mut self) -> Result<Vec<BlobId>, JobError> {
        self.write(|tables| {
            // Their clients have lost the connection, so that nobody can finish them.
            files::delete_uploads(tables)?;
            files::blobs(tables)
        })
    }
}
