//! Statements: reads a tenant's days, or every record behind them, for the rules to
//! make a statement of.

use tollgate_domain::UtcDay;

use crate::rows::charges::CallerCharge;
use crate::rows::entries::TenantEntry;
use crate::rows::epochs::EpochOfDays;
use crate::rows::{
    BlockKey, CallerId, Tables, archives, blocks, callers, charges, daily, entries, epochs, plans,
};
use crate::rules::statement::records::{Record, Recount};
use crate::rules::statement::{Maker, Statement, StatementError, StatementQuery};

/// Reads the statement from the sums by day.
pub(crate) fn statement(
    tables: Tables<'_>,
    query: StatementQuery<'_>,
) -> Result<Statement, StatementError> {
    read(tables, query)?.finish()
}

/// Reads the statement and calls `record` with every record behind it: the charges
/// of each key, then the entries of each epoch.
pub(crate) fn statement_records(
    tables: Tables<'_>,
    query: StatementQuery<'_>,
    record: &mut dyn FnMut(&str, &Record),
) -> Result<Statement, StatementError> {
    let maker = read(tables, query)?;
    recount(tables, query, &maker, record)?;
    maker.finish()
}

fn read<'a>(tables: Tables<'_>, query: StatementQuery<'a>) -> Result<Maker<'a>, StatementError> {
    let mut maker = Maker::new(query, || plans::of_tenant(tables, query.tenant))?;
    for (caller, key) in callers::of_tenant(tables, query.tenant)? {
        for row in daily::of_caller(tables, caller, maker.days())? {
            maker.add_day(&key, row)?;
        }
    }
    Ok(maker)
}

fn recount(
    tables: Tables<'_>,
    query: StatementQuery<'_>,
    maker: &Maker<'_>,
    record: &mut dyn FnMut(&str, &Record),
) -> Result<(), StatementError> {
    let (callers, days) = (callers::of_tenant(tables, query.tenant)?, maker.days());
    // The sums by day still hold archived usage, so a recount without it would never agree.
    for (caller, _) in &callers {
        if archives::has_days(tables, *caller, days)? {
            let (tenant, month) = (query.tenant.to_string(), query.month);
            return Err(StatementError::Archived { tenant, month });
        }
    }
    let mut recount = Recount::new(maker, record);
    for (caller, key) in &callers {
        charges::each_of_caller(tables, *caller, days, |charge| {
            add_charge(&mut recount, key, charge)
        })?;
    }
    // By epoch, not by the order in which the ledger met the epochs: the records of
    // a month then always come in the same order.
    for epoch in epochs::of_days(tables, days)? {
        for (caller, key) in &callers {
            add_entries(tables, &mut recount, &epoch, (*caller, key), days)?;
        }
    }
    recount.finish()
}

fn add_charge(
    recount: &mut Recount<'_, '_>,
    key: &str,
    charge: CallerCharge,
) -> Result<(), StatementError> {
    let CallerCharge { model, class, tier, .. } = charge;
    let record = Record::Charge {
        request: charge.request,
        attempt: charge.attempt,
        day: charge.day,
        is_counted: charge.is_counted,
        prompt_tokens: charge.prompt_tokens,
        cached_tokens: charge.cached_tokens,
        completion_tokens: charge.completion_tokens,
        reference_ns: charge.reference_ns,
    };
    recount.add(key, (&model, &class, tier), &record)
}

/// Adds the entries of a key in an epoch.
fn add_entries(
    tables: Tables<'_>,
    recount: &mut Recount<'_, '_>,
    epoch: &EpochOfDays,
    (caller, key): (CallerId, &str),
    (first, last): (u32, u32),
) -> Result<(), StatementError> {
    // Entries come by block, so each block is looked up once.
    let mut at = CurrentBlock::default();
    let blocks = (epoch.id, epoch.first_block, epoch.last_block);
    entries::each_of_caller(tables, caller, blocks, |entry| {
        let TenantEntry { block, ordinal, request, attempt, amounts, tier } = entry;
        if at.number != block {
            let (day, model) = blocks::day_and_model(tables, BlockKey { epoch: epoch.id, block })?;
            at = CurrentBlock { number: block, day, model };
        }
        // Blocks need not begin in the order of their numbers, so a block between
        // the first and the last of the month may belong to another month.
        if !(first..=last).contains(&at.day.0) {
            return Ok(());
        }
        let record = Record::Entry {
            id: format!("{}/{block}/{ordinal}", epoch.epoch),
            day: at.day,
            request,
            attempt,
            amount_ns: amounts.amount_ns,
            energy_mj: amounts.energy_mj,
        };
        recount.add(key, (&at.model, &epoch.device_class, tier), &record)
    })
}

/// The block of the current entry. Numbers begin at 1, so 0 is no block.
#[derive(Default)]
struct CurrentBlock {
    number: i64,
    day: UtcDay,
    model: String,
}
