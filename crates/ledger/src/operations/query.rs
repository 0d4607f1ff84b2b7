//! Questions about epochs, spending and single requests.

use std::collections::HashMap;

use serde::Serialize;
use tollgate_domain::{
    Caller, DeviceClass, DeviceNanos, FinishReason, InvalidName, KeyId, ModelName, PlanName,
    Priced, RequestId, Stages, TenantId, Usage, UtcDay, UtcTime, WorkerEpoch,
};

use crate::error::LedgerError;
use crate::rows::daily::{PricedRow, SpendRow, Spender};
use crate::rows::requests::{EntryRow, RequestKey, RequestTotals};
use crate::rows::{EpochId, Tables, archives, daily, entries, epochs, name, plans, requests};
use crate::rules;
use crate::rules::balance::{self, Balance, EnergyBalance};

/// Days back from the newest block within which an epoch counts as ended lately.
const LATELY_DAYS: i64 = 1;
/// The most entries that a request's row lists.
const LISTED_ENTRIES: i64 = 1_000;

/// Spending that admission must know when it starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spending {
    /// Spending of the day.
    pub day: Vec<SpendRow>,
    /// Spending from the first of the day's month up to the day.
    pub month: Vec<SpendRow>,
    /// Usage of these days of the month, with the figures that have a price.
    pub priced: Vec<PricedRow>,
}

impl Spending {
    /// Returns what is in this and was not in `before`, which was read earlier of the same days.
    pub fn beyond(&self, before: &Self) -> Self {
        Self {
            day: spent_beyond(&self.day, &before.day),
            month: spent_beyond(&self.month, &before.month),
            priced: priced_beyond(&self.priced, &before.priced),
        }
    }
}

fn spent_beyond(rows: &[SpendRow], before: &[SpendRow]) -> Vec<SpendRow> {
    let key = |row: &SpendRow| (row.caller.clone(), row.model.clone(), row.class.clone());
    let known: HashMap<_, u64> =
        before.iter().map(|row| (key(row), row.reference.nanos())).collect();
    let rest = rows.iter().filter_map(|row| {
        let before = known.get(&key(row)).copied().unwrap_or(0);
        let reference = row.reference.nanos().checked_sub(before).filter(|rest| *rest > 0)?;
        Some(SpendRow { reference: DeviceNanos(reference), ..row.clone() })
    });
    rest.collect()
}

fn priced_beyond(rows: &[PricedRow], before: &[PricedRow]) -> Vec<PricedRow> {
    let key = |row: &PricedRow| {
        (row.caller.clone(), row.model.clone(), row.class.clone(), row.day, row.tier)
    };
    let known: HashMap<_, Priced> = before.iter().map(|row| (key(row), row.used)).collect();
    let rest = rows.iter().filter_map(|row| {
        let before = known.get(&key(row)).copied().unwrap_or_default();
        let Priced { reference_ns, prompt_tokens, completion_tokens } = row.used;
        let used = Priced {
            // A cap that came meanwhile can have lowered a figure.
            reference_ns: reference_ns.saturating_sub(before.reference_ns),
            prompt_tokens: prompt_tokens.saturating_sub(before.prompt_tokens),
            completion_tokens: completion_tokens.saturating_sub(before.completion_tokens),
        };
        (used != Priced::default()).then(|| PricedRow { used, ..row.clone() })
    });
    rest.collect()
}

/// The progress of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestState {
    /// The ledger has part of the request, but not its end.
    Running,
    /// The request ended; its figures are final.
    Posted,
}

/// All that the ledger knows of one request, over its attempts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestRow {
    /// The request's id.
    pub request: RequestId,
    /// The tenant and the key.
    pub caller: Caller,
    /// The model.
    pub model: ModelName,
    /// The class of the device that served the request last.
    pub class: DeviceClass,
    /// The progress.
    pub state: RequestState,
    /// Number of attempts that left a trace.
    pub attempts: u32,
    /// The charged usage; `attributed` is the sum of the entries.
    pub usage: Usage,
    /// The stages of the last attempt.
    pub stages: Stages,
    /// The reason of the last attempt's end.
    pub reason: Option<FinishReason>,
    /// The time of the last attempt's end.
    pub finished: Option<UtcTime>,
    /// The first 1,000 entries.
    pub entries: Vec<EntryRow>,
}

/// Returns what was spent on `day` and in its month up to it.
pub(crate) fn spending(
    tables: Tables<'_>,
    spender: Spender<'_>,
    day: UtcDay,
) -> Result<Spending, LedgerError> {
    let first = day.first_of_month();
    let known = plans::all(tables)?;
    let mut priced = daily::priced(tables, spender, (first, day))?;
    for row in &mut priced {
        // Each day is priced by the plan that the tenant had on it.
        let days = known.get(row.caller.tenant.as_str());
        let plan = days.and_then(|days| rules::plans::on(days, row.day));
        row.plan = plan.map(|plan| name(PlanName::new(plan))).transpose()?;
    }
    let spent = |from| daily::spent(tables, spender, (from, day));
    Ok(Spending { day: spent(day)?, month: spent(first)?, priced })
}

/// Returns the balance of an epoch; all zero for an unknown one.
pub(crate) fn balance(tables: Tables<'_>, epoch: WorkerEpoch) -> Result<Balance, LedgerError> {
    match epochs::find(tables, epoch)? {
        Some(known) => balance_of(tables, known.id),
        None => Ok(Balance::default()),
    }
}

/// Returns the energy balance of an epoch; `None` where no energy was reported.
pub(crate) fn energy(
    tables: Tables<'_>,
    epoch: WorkerEpoch,
) -> Result<Option<EnergyBalance>, LedgerError> {
    match epochs::find(tables, epoch)? {
        Some(known) => energy_of(tables, known.id),
        None => Ok(None),
    }
}

pub(super) fn balance_of(tables: Tables<'_>, epoch: EpochId) -> Result<Balance, LedgerError> {
    balance::of_time(archives::time_of(tables, epoch)?, entries::time_by_account(tables, epoch)?)
}

pub(super) fn energy_of(
    tables: Tables<'_>,
    epoch: EpochId,
) -> Result<Option<EnergyBalance>, LedgerError> {
    let archived = archives::energy_of(tables, epoch)?;
    balance::of_energy(archived, entries::energy_by_account(tables, epoch)?)
}

/// Returns every epoch, in the order of the first blocks.
pub(crate) fn all_epochs(tables: Tables<'_>) -> Result<Vec<WorkerEpoch>, LedgerError> {
    epochs::all(tables)?.into_iter().map(|(_, epoch)| parse_epoch(epoch)).collect()
}

/// Returns the epochs that ended lately.
pub(crate) fn lately_ended(tables: Tables<'_>) -> Result<Vec<WorkerEpoch>, LedgerError> {
    epochs::ended_within(tables, LATELY_DAYS)?.into_iter().map(parse_epoch).collect()
}

fn parse_epoch(text: String) -> Result<WorkerEpoch, LedgerError> {
    // Epochs are checked before they are written, so another text means a damaged file.
    let damaged =
        |_: InvalidName| LedgerError::Damaged("epochs.epoch is not 32 hex digits".to_owned());
    WorkerEpoch::try_from(text).map_err(damaged)
}

/// Finds one request of one tenant.
pub(crate) fn find_request(
    tables: Tables<'_>,
    tenant: &TenantId,
    request: &RequestId,
) -> Result<Option<RequestRow>, LedgerError> {
    let key = RequestKey { tenant, request };
    let ended = requests::ended_attempts(tables, key)?;
    let last = ended.last();
    let placement = match last {
        Some(last) => last.placement.clone(),
        // No end yet: the entries name the model and the device.
        None => match requests::placement_of_running(tables, key)? {
            Some(placement) => placement,
            // Neither an end nor an entry: the request is unknown, or another tenant's.
            None => return Ok(None),
        },
    };
    let RequestTotals { attempts, attributed, is_open } = requests::totals(tables, key)?;
    // Device time comes from the entries; a charge does not hold it.
    let mut usage = Usage { attributed, ..Usage::default() };
    for attempt in &ended {
        usage.prompt_tokens += attempt.usage.prompt_tokens;
        usage.cached_tokens += attempt.usage.cached_tokens;
        usage.completion_tokens += attempt.usage.completion_tokens;
        usage.reference += attempt.usage.reference;
    }
    Ok(Some(RequestRow {
        request: request.clone(),
        caller: Caller { tenant: tenant.clone(), key: name(KeyId::new(&placement.key))? },
        model: name(ModelName::new(&placement.model))?,
        class: name(DeviceClass::new(&placement.class))?,
        state: if is_open { RequestState::Running } else { RequestState::Posted },
        // Entries of ended attempts may be archived, and open attempts have no charge.
        attempts: attempts.max(ended.len() as u32),
        usage,
        stages: last.map(|last| last.stages).unwrap_or_default(),
        reason: last.map(|last| last.finish_reason()).transpose()?,
        finished: last.map(|last| last.finished),
        entries: requests::entries(tables, key, LISTED_ENTRIES)?,
    }))
}
