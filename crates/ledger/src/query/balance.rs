//! Where a worker's time and energy went: what was measured, and the accounts
//! that it has to sum to.

use rusqlite::{Connection, OptionalExtension};
use serde::Serialize;

use crate::LedgerError;
use crate::schema::account;

/// Where a device's time went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Balance {
    /// What was measured.
    pub wall_ns: i64,
    /// What tenants pay.
    pub tenants_ns: i64,
    /// `platform.overhead`
    pub overhead_ns: i64,
    /// `platform.idle`
    pub idle_ns: i64,
    /// `platform.loss`
    pub loss_ns: i64,
}

/// Where a device's energy went, as far as it told what it drew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EnergyBalance {
    /// What was measured.
    pub energy_mj: i64,
    /// What was drawn for tenants.
    pub tenants_mj: i64,
    /// In the time of `platform.overhead`.
    pub overhead_mj: i64,
    /// In that of `platform.idle`.
    pub idle_mj: i64,
    /// In that of `platform.loss`.
    pub loss_mj: i64,
}

impl Balance {
    /// Whether tenants, overhead, idle and loss are the wall time exactly.
    pub fn is_exact(&self) -> bool {
        // Sums of a damaged file may be anything.
        let parts = [self.tenants_ns, self.overhead_ns, self.idle_ns, self.loss_ns];
        i128::from(self.wall_ns) == parts.into_iter().map(i128::from).sum()
    }
}

impl EnergyBalance {
    /// Whether tenants, overhead, idle and loss are what was measured exactly.
    pub fn is_exact(&self) -> bool {
        let parts = [self.tenants_mj, self.overhead_mj, self.idle_mj, self.loss_mj];
        i128::from(self.energy_mj) == parts.into_iter().map(i128::from).sum()
    }
}

pub(crate) fn balance_of(connection: &Connection, epoch_id: i64) -> Result<Balance, LedgerError> {
    let mut statement = connection.prepare_cached(
        "SELECT account, sum(amount_ns) FROM entries WHERE epoch_id = ?1 GROUP BY account",
    )?;
    let mut rows = statement.query([epoch_id])?;
    let mut balance = archived_balance(connection, epoch_id)?;
    while let Some(row) = rows.next()? {
        let amount: i64 = row.get(1)?;
        let (account, amount) = match row.get(0)? {
            account::DEVICE => (&mut balance.wall_ns, amount.wrapping_neg()),
            account::TENANT => (&mut balance.tenants_ns, amount),
            account::OVERHEAD => (&mut balance.overhead_ns, amount),
            account::IDLE => (&mut balance.idle_ns, amount),
            account::LOSS => (&mut balance.loss_ns, amount),
            other => return Err(LedgerError::Damaged(format!("unknown account {other}"))),
        };
        // Only a damaged file's sums do not fit.
        *account = account.wrapping_add(amount);
    }
    Ok(balance)
}

/// Where the time of an epoch's archived blocks went.
fn archived_balance(connection: &Connection, epoch_id: i64) -> Result<Balance, LedgerError> {
    let archived = connection
        .prepare_cached(
            "SELECT wall_ns, tenants_ns, overhead_ns, idle_ns, loss_ns
             FROM archived_epochs WHERE epoch_id = ?1",
        )?
        .query_row([epoch_id], |row| {
            Ok(Balance {
                wall_ns: row.get(0)?,
                tenants_ns: row.get(1)?,
                overhead_ns: row.get(2)?,
                idle_ns: row.get(3)?,
                loss_ns: row.get(4)?,
            })
        })
        .optional()?;
    Ok(archived.unwrap_or_default())
}

pub(crate) fn energy_of(
    connection: &Connection,
    epoch_id: i64,
) -> Result<Option<EnergyBalance>, LedgerError> {
    let mut statement = connection.prepare_cached(
        "SELECT account, sum(energy_mj) FROM entries
         WHERE epoch_id = ?1 AND energy_mj IS NOT NULL GROUP BY account",
    )?;
    let mut rows = statement.query([epoch_id])?;
    let mut balance = archived_energy(connection, epoch_id)?;
    while let Some(row) = rows.next()? {
        let (account, amount): (i64, i64) = (row.get(0)?, row.get(1)?);
        let balance = balance.get_or_insert_default();
        let (account, amount) = match account {
            account::DEVICE => (&mut balance.energy_mj, amount.wrapping_neg()),
            account::TENANT => (&mut balance.tenants_mj, amount),
            account::OVERHEAD => (&mut balance.overhead_mj, amount),
            account::IDLE => (&mut balance.idle_mj, amount),
            account::LOSS => (&mut balance.loss_mj, amount),
            other => return Err(LedgerError::Damaged(format!("unknown account {other}"))),
        };
        // Only a damaged file's sums do not fit.
        *account = account.wrapping_add(amount);
    }
    Ok(balance)
}

/// Where the energy of an epoch's archived blocks went.
fn archived_energy(
    connection: &Connection,
    epoch_id: i64,
) -> Result<Option<EnergyBalance>, LedgerError> {
    Ok(connection
        .prepare_cached(
            "SELECT energy_mj, coalesce(tenants_mj, 0), coalesce(overhead_mj, 0),
               coalesce(idle_mj, 0), coalesce(loss_mj, 0)
             FROM archived_epochs WHERE epoch_id = ?1 AND energy_mj IS NOT NULL",
        )?
        .query_row([epoch_id], |row| {
            Ok(EnergyBalance {
                energy_mj: row.get(0)?,
                tenants_mj: row.get(1)?,
                overhead_mj: row.get(2)?,
                idle_mj: row.get(3)?,
                loss_mj: row.get(4)?,
            })
        })
        .optional()?)
}
