//! Posting a block: checked against its epoch, then written as entries that
//! sum to zero, all inside the caller's transaction.

use std::io::BufWriter;

use rusqlite::{CachedStatement, Connection, OptionalExtension, Statement, params};
use sha2::{Digest, Sha256};
use tollgate_domain::block::EnergyParts;
use tollgate_domain::{Block, BlockParts, Caller, DeviceNanos, Millijoules, UtcTime, WorkerEpoch};

use crate::act::{AdminAction, PartiallyRejectedBlock, Posted, RefusedBlock};
use crate::audit::chain::{self, Chain};
use crate::audit::record::{Body, Said};
use crate::charge::{DailyChange, DailyKey, add_to_day};
use crate::schema::{CORRECTION, FIRST_SHARE, METERED, account};
use crate::{BlockRefusal, LedgerError, archive, backup};

mod posting;

use posting::{FinishedAt, Posting};

/// The row of a known epoch.
struct EpochRow {
    id: i64,
    last_block: u64,
    last_step: u64,
    ended: bool,
    identity: [String; 4],
}

/// One line of `entries`.
pub(crate) struct Entry<'a> {
    pub(crate) kind: i64,
    pub(crate) account: i64,
    pub(crate) amount_ns: i64,
    /// What was drawn in that time; `None` where the device did not tell.
    pub(crate) energy_mj: Option<i64>,
    /// Who and what for: caller id, sequence, request, attempt.
    pub(crate) owner: Option<(i64, i64, &'a str, u32)>,
}

/// Device time, and what was drawn in it where the device told.
#[derive(Clone, Copy)]
pub(crate) struct Amounts {
    pub(crate) amount_ns: i64,
    pub(crate) energy_mj: Option<i64>,
}

impl Amounts {
    /// What is left without the first `kept_ns` of it. The energy goes with
    /// the time, rounded down.
    pub(crate) fn beyond(self, kept_ns: i64) -> Self {
        let Self { amount_ns, energy_mj } = self;
        let excess_ns = amount_ns - kept_ns;
        let nanos = |amount: i64| DeviceNanos(amount.unsigned_abs());
        let drawn = |energy: i64| {
            let energy = Millijoules(energy.unsigned_abs());
            energy.of_part(nanos(excess_ns), nanos(amount_ns)).millijoules() as i64
        };
        Self { amount_ns: excess_ns, energy_mj: energy_mj.map(drawn) }
    }
}

/// Which block, by the ledger's own number of its epoch.
#[derive(Clone, Copy)]
pub(crate) struct BlockKey {
    pub(crate) epoch_id: i64,
    pub(crate) block: i64,
}

/// Posts `block` and its records; the caller rolls back on an error.
///
/// # Errors
/// [`LedgerError::Refused`] where it contradicts the ledger, and storage errors.
pub(crate) fn post_block(
    connection: &Connection,
    chain: &mut Chain,
    block: &Block,
) -> Result<Posted, LedgerError> {
    let digest = digest_of(block.parts())?;
    post(connection, chain, block, &digest, Said { digest: &digest, struck: None })
}

/// Posts `struck`, which is `said` without what is not believed of it. When
/// it comes again it comes as it was said, so that is remembered as well.
///
/// # Errors
/// As [`post_block`].
pub(crate) fn post_struck(
    connection: &Connection,
    chain: &mut Chain,
    partly: &PartiallyRejectedBlock,
) -> Result<Posted, LedgerError> {
    let PartiallyRejectedBlock { reported: said, accepted: struck, reason } = partly;
    let digest = digest_of(said.parts())?;
    let reason = shortened(reason);
    let said = Said { digest: &digest, struck: Some(&reason) };
    let posted = post(connection, chain, struck, &digest_of(struck.parts())?, said)?;
    if posted == Posted::New {
        let BlockParts { epoch, number, .. } = struck.parts();
        let epoch = find_epoch(connection, *epoch)?
            .ok_or_else(|| LedgerError::Damaged("an epoch was posted and is not there".into()))?;
        connection
            .prepare_cached(
                "INSERT INTO struck_blocks (epoch_id, block, digest, reason) VALUES (?1, ?2, ?3, ?4)",
            )?
            .execute(params![epoch.id, *number as i64, &digest[..], reason])?;
    }
    Ok(posted)
}

/// Posts `block`, unless one that was said in the same words is there.
fn post(
    connection: &Connection,
    chain: &mut Chain,
    block: &Block,
    digest: &[u8; 32],
    said: Said<'_>,
) -> Result<Posted, LedgerError> {
    let parts = block.parts();
    let mut epoch = find_epoch(connection, parts.epoch)?;
    if let Some(posted) = already_posted(connection, parts, epoch.as_ref(), said.digest)? {
        return Ok(posted);
    }
    if pass_over_lost(connection, chain, parts, epoch.as_ref())? {
        epoch = find_epoch(connection, parts.epoch)?;
    }
    check_against_epoch(parts, epoch.as_ref()).map_err(|refusal| refused(parts, refusal))?;
    let epoch_id = match &epoch {
        Some(epoch) => {
            update_epoch(connection, epoch, parts)?;
            epoch.id
        }
        None => insert_epoch(connection, parts)?,
    };
    let key = BlockKey { epoch_id, block: parts.number as i64 };
    let record = chain.append(connection, &Body::block(parts, digest, said))?;
    insert_block(connection, key, parts, digest, record)?;
    let energy = parts.energy_parts();
    insert_platform_entries(connection, key, parts, energy.as_ref())?;
    let mut posting = Posting::of(connection, key, parts)?;
    for (index, share) in parts.shares.iter().enumerate() {
        let drew = energy.as_ref().map(|energy| energy.shares[index]);
        posting.share(FIRST_SHARE + index as i64, share, drew)?;
    }
    for (index, finished) in parts.finished.iter().enumerate() {
        let record = chain.append(connection, &Body::attempt(parts, finished))?;
        posting.finished(FinishedAt { index, record }, finished)?;
    }
    posting.days.write(connection)?;
    refuse_unless_balanced(connection, key)?;
    Ok(Posted::New)
}

/// Passes over a block that cannot be posted, so that those after it can be.
/// Its time is in no account; `check` reports it.
pub(crate) fn pass_over(
    connection: &Connection,
    chain: &mut Chain,
    refused: &RefusedBlock,
) -> Result<Posted, LedgerError> {
    let &RefusedBlock { ref worker, epoch, number, ref reason, at } = refused;
    // What no database keeps is no time of ours.
    let at = UtcTime(at.0.min(i64::MAX as u64));
    let known = find_epoch(connection, epoch)?;
    // An epoch is its worker's alone.
    if known.as_ref().is_some_and(|known| known.identity[0] != worker.as_str()) {
        return Err(LedgerError::Refused { epoch, number, refusal: BlockRefusal::Identity });
    }
    let expected = known.as_ref().map_or(1, |known| known.last_block + 1);
    if number < expected {
        return Ok(Posted::Already);
    }
    if number > expected {
        let refusal = BlockRefusal::Gap { expected };
        return Err(LedgerError::Refused { epoch, number, refusal });
    }
    let id = match known {
        Some(known) => {
            connection
                .prepare_cached("UPDATE epochs SET last_block = ?2 WHERE id = ?1")?
                .execute(params![known.id, number as i64])?;
            known.id
        }
        // Nothing it said is believed, its device neither.
        None => {
            connection.execute(
                "INSERT INTO epochs (epoch, worker, device_class, device_name, device_uuid,
                   last_block, last_step, ended) VALUES (?1, ?2, '', '', '', ?3, 0, 0)",
                params![epoch.to_string(), worker.as_str(), number as i64],
            )?;
            connection.last_insert_rowid()
        }
    };
    let reason = shortened(reason);
    let kept = RefusedBlock { reason: reason.clone(), at, ..refused.clone() };
    let record = chain.append(connection, &Body::refused(&kept))?;
    connection.execute(
        "INSERT INTO refused_blocks (epoch_id, block, reason, at_utc_ns, record_seq)
         VALUES (?1, ?2, ?3, ?4, ?5)",
        params![id, number as i64, reason, at.0 as i64, record],
    )?;
    Ok(Posted::New)
}

/// Passes over the blocks before `parts` that were posted to this ledger after
/// the backup that it was restored from, and that no journal has any more.
fn pass_over_lost(
    connection: &Connection,
    chain: &mut Chain,
    parts: &BlockParts,
    epoch: Option<&EpochRow>,
) -> Result<bool, LedgerError> {
    let expected = epoch.map_or(1, |epoch| epoch.last_block + 1);
    if parts.number <= expected {
        return Ok(false);
    }
    let Some(at) = backup::restored(connection)?.filter(|at| parts.started < *at) else {
        return Ok(false);
    };
    for number in expected..parts.number {
        let (worker, epoch) = (parts.worker.clone(), parts.epoch);
        let reason = "lost: the ledger was restored from an older backup".to_owned();
        pass_over(connection, chain, &RefusedBlock { worker, epoch, number, reason, at })?;
    }
    Ok(true)
}

/// A reason as it is kept: a worker's words may be in it.
fn shortened(reason: &str) -> String {
    reason.chars().take(500).collect()
}

/// Records what an admin did, once for its id.
pub(crate) fn record_action(
    connection: &Connection,
    chain: &mut Chain,
    action: &AdminAction,
) -> Result<Posted, LedgerError> {
    if chain::knows_action(connection, &action.id)? {
        return Ok(Posted::Already);
    }
    let record = chain.append(connection, &Body::action(action))?;
    chain::remember_action(connection, &action.id, record)?;
    Ok(Posted::New)
}

/// SHA-256 of the block's fields. `check` makes the block again from its rows
/// and compares, so a flipped bit in any of them is found.
pub(crate) fn digest_of(parts: &BlockParts) -> Result<[u8; 32], LedgerError> {
    let mut hashed = BufWriter::new(Sha256::new());
    serde_json::to_writer(&mut hashed, parts)
        .map_err(|error| LedgerError::Damaged(error.to_string()))?;
    let hash = hashed.into_inner().map_err(|error| LedgerError::Damaged(error.to_string()))?;
    Ok(hash.finalize().into())
}

fn refused(parts: &BlockParts, refusal: BlockRefusal) -> LedgerError {
    LedgerError::Refused { epoch: parts.epoch, number: parts.number, refusal }
}

fn find_epoch(
    connection: &Connection,
    epoch: WorkerEpoch,
) -> Result<Option<EpochRow>, LedgerError> {
    Ok(connection
        .prepare_cached(
            "SELECT id, last_block, last_step, ended, worker, device_class, device_name, device_uuid
             FROM epochs WHERE epoch = ?1",
        )?
        .query_row([epoch.to_string()], |row| {
            Ok(EpochRow {
                id: row.get(0)?,
                last_block: row.get(1)?,
                last_step: row.get(2)?,
                ended: row.get(3)?,
                identity: [row.get(4)?, row.get(5)?, row.get(6)?, row.get(7)?],
            })
        })
        .optional()?)
}

/// Whether the block is there already, the same; another one is refused.
fn already_posted(
    connection: &Connection,
    parts: &BlockParts,
    epoch: Option<&EpochRow>,
    digest: &[u8; 32],
) -> Result<Option<Posted>, LedgerError> {
    let Some(epoch) = epoch.filter(|epoch| parts.number <= epoch.last_block) else {
        return Ok(None);
    };
    let known: Option<Vec<u8>> = connection
        .prepare_cached(
            "SELECT coalesce(
               (SELECT digest FROM struck_blocks WHERE epoch_id = ?1 AND block = ?2),
               (SELECT digest FROM blocks WHERE epoch_id = ?1 AND block = ?2))",
        )?
        .query_row(params![epoch.id, parts.number as i64], |row| row.get(0))?;
    match known {
        Some(known) if known == digest => Ok(Some(Posted::Already)),
        Some(_) => Err(refused(parts, BlockRefusal::Conflict)),
        None if archive::has_block(connection, epoch.id, parts.number)? => {
            Err(refused(parts, BlockRefusal::Archived))
        }
        None => Err(refused(parts, BlockRefusal::Skipped)),
    }
}

fn check_against_epoch(parts: &BlockParts, epoch: Option<&EpochRow>) -> Result<(), BlockRefusal> {
    let Some(epoch) = epoch else {
        return if parts.number == 1 { Ok(()) } else { Err(BlockRefusal::Gap { expected: 1 }) };
    };
    let expected = epoch.last_block + 1;
    if epoch.ended {
        return Err(BlockRefusal::Ended);
    }
    if parts.number != expected {
        return Err(BlockRefusal::Gap { expected });
    }
    // An epoch that began with a block passed over takes its device from the
    // first one that is posted.
    let identity = identity_of(parts);
    let unknown = epoch.identity[1..].iter().all(String::is_empty);
    if epoch.identity[0] != identity[0] || (!unknown && epoch.identity != identity) {
        return Err(BlockRefusal::Identity);
    }
    if parts.first_step != 0 && parts.first_step <= epoch.last_step {
        return Err(BlockRefusal::Steps { after: epoch.last_step });
    }
    Ok(())
}

fn identity_of(parts: &BlockParts) -> [String; 4] {
    [
        parts.worker.to_string(),
        parts.device.class.to_string(),
        parts.device.name.clone(),
        parts.device.uuid.clone(),
    ]
}

fn insert_epoch(connection: &Connection, parts: &BlockParts) -> Result<i64, LedgerError> {
    let [worker, class, name, uuid] = identity_of(parts);
    connection
        .prepare_cached(
            "INSERT INTO epochs (epoch, worker, device_class, device_name, device_uuid,
               last_block, last_step, ended) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        )?
        .execute(params![
            parts.epoch.to_string(),
            worker,
            class,
            name,
            uuid,
            parts.number as i64,
            parts.last_step as i64,
            parts.last_of_epoch
        ])?;
    Ok(connection.last_insert_rowid())
}

fn update_epoch(
    connection: &Connection,
    epoch: &EpochRow,
    parts: &BlockParts,
) -> Result<(), LedgerError> {
    let [worker, class, name, uuid] = identity_of(parts);
    connection
        .prepare_cached(
            "UPDATE epochs SET last_block = ?2, last_step = ?3, ended = ?4, worker = ?5,
               device_class = ?6, device_name = ?7, device_uuid = ?8 WHERE id = ?1",
        )?
        .execute(params![
            epoch.id,
            parts.number as i64,
            parts.last_step.max(epoch.last_step) as i64,
            parts.last_of_epoch,
            worker,
            class,
            name,
            uuid
        ])?;
    Ok(())
}

fn insert_block(
    connection: &Connection,
    key: BlockKey,
    parts: &BlockParts,
    digest: &[u8; 32],
    record: u64,
) -> Result<(), LedgerError> {
    connection
        .prepare_cached(
            "INSERT INTO blocks (epoch_id, block, model, calibration, first_step, last_step,
               started_utc_ns, day, last_of_epoch, digest, record_seq)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
        )?
        .execute(params![
            key.epoch_id,
            key.block,
            parts.model.as_str(),
            parts.calibration,
            parts.first_step as i64,
            parts.last_step as i64,
            parts.started.0 as i64,
            parts.started.day().0,
            parts.last_of_epoch,
            &digest[..],
            record
        ])?;
    Ok(())
}

fn insert_platform_entries(
    connection: &Connection,
    key: BlockKey,
    parts: &BlockParts,
    energy: Option<&EnergyParts>,
) -> Result<(), LedgerError> {
    let signed = |amount: DeviceNanos| amount.nanos() as i64;
    let drew = |of: fn(&EnergyParts) -> Millijoules| energy.map(|all| of(all).0 as i64);
    let all = parts.energy.map(|energy| -(energy.0 as i64));
    let mut statement = entry_statement(connection)?;
    for (ordinal, account, amount_ns, energy_mj) in [
        (0, account::DEVICE, -signed(parts.wall), all),
        (1, account::OVERHEAD, signed(parts.overhead), drew(|energy| energy.overhead)),
        (2, account::IDLE, signed(parts.idle), drew(|energy| energy.idle)),
        (3, account::LOSS, signed(parts.loss), drew(|energy| energy.loss)),
    ] {
        if ordinal == 0 || amount_ns != 0 {
            let entry = Entry { kind: METERED, account, amount_ns, energy_mj, owner: None };
            insert_entry(&mut statement, key, ordinal, &entry)?;
        }
    }
    Ok(())
}

/// Moves `excess` of an entry from its tenant to `platform.loss`: a pair of
/// entries beside it that sums to zero.
pub(crate) fn move_to_loss(
    connection: &Connection,
    key: BlockKey,
    daily: &DailyKey<'_>,
    owner: Option<(i64, i64, &str, u32)>,
    excess: Amounts,
) -> Result<(), LedgerError> {
    let Amounts { amount_ns: excess, energy_mj } = excess;
    if excess == 0 {
        return Ok(());
    }
    // Above every share of the block, also those that are not written yet.
    let last: i64 = connection
        .prepare_cached("SELECT max(ordinal) FROM entries WHERE epoch_id = ?1 AND block = ?2")?
        .query_row(params![key.epoch_id, key.block], |row| row.get(0))?;
    let first = last.max(FIRST_CORRECTION - 1) + 1;
    let mut statement = entry_statement(connection)?;
    let taken = energy_mj.map(|energy| -energy);
    for (ordinal, account, amount_ns, energy_mj) in
        [(first, account::TENANT, -excess, taken), (first + 1, account::LOSS, excess, energy_mj)]
    {
        let entry = Entry { kind: CORRECTION, account, amount_ns, energy_mj, owner };
        insert_entry(&mut statement, key, ordinal, &entry)?;
    }
    let change =
        DailyChange { entries: 1, attributed_ns: -excess, energy_mj: taken, ..Default::default() };
    add_to_day(connection, daily, &change)
}

/// What [`insert_entry`] runs. Whoever writes many asks for it once.
fn entry_statement(connection: &Connection) -> Result<CachedStatement<'_>, LedgerError> {
    Ok(connection.prepare_cached(
        "INSERT INTO entries (epoch_id, block, ordinal, kind, account, amount_ns,
           caller_id, sequence, request_id, attempt, energy_mj)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
    )?)
}

fn insert_entry(
    statement: &mut Statement<'_>,
    key: BlockKey,
    ordinal: i64,
    entry: &Entry<'_>,
) -> Result<(), LedgerError> {
    let Entry { kind, account, amount_ns, energy_mj, owner } = entry;
    statement.execute(params![
        key.epoch_id,
        key.block,
        ordinal,
        kind,
        account,
        amount_ns,
        owner.map(|owner| owner.0),
        owner.map(|owner| owner.1),
        owner.map(|owner| owner.2),
        owner.map(|owner| owner.3),
        energy_mj
    ])?;
    Ok(())
}

/// The id of a caller, made at its first appearance.
pub(crate) fn caller_id(connection: &Connection, caller: &Caller) -> Result<i64, LedgerError> {
    let (tenant, key) = (caller.tenant.as_str(), caller.key.as_str());
    let known = connection
        .prepare_cached("SELECT id FROM callers WHERE tenant = ?1 AND key = ?2")?
        .query_row([tenant, key], |row| row.get(0))
        .optional()?;
    if let Some(id) = known {
        return Ok(id);
    }
    connection
        .prepare_cached("INSERT INTO callers (tenant, key) VALUES (?1, ?2)")?
        .execute([tenant, key])?;
    Ok(connection.last_insert_rowid())
}

/// The other side of the boundary checks the sum too: what was written must
/// be zero, whatever the block said.
fn refuse_unless_balanced(connection: &Connection, key: BlockKey) -> Result<(), LedgerError> {
    let sums: (i64, i64) = connection
        .prepare_cached(
            "SELECT sum(amount_ns), coalesce(sum(energy_mj), 0) FROM entries
             WHERE epoch_id = ?1 AND block = ?2",
        )?
        .query_row(params![key.epoch_id, key.block], |row| Ok((row.get(0)?, row.get(1)?)))?;
    if sums == (0, 0) {
        Ok(())
    } else {
        Err(LedgerError::Damaged(format!(
            "a block's entries sum to {} ns and {} mJ",
            sums.0, sums.1
        )))
    }
}

/// Corrections stand above every ordinal a share can have.
const FIRST_CORRECTION: i64 = FIRST_SHARE + tollgate_domain::block::LARGEST_BLOCK as i64;
