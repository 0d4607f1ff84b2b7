//! Balances: measured time and energy of an epoch, and the accounts that they
//! must sum to.

use serde::Serialize;

use crate::error::LedgerError;
use crate::rows::archives::{ArchivedEnergy, ArchivedTime};
use crate::rows::entries::account;

/// Device time of an epoch by account, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Balance {
    /// The measured time.
    pub wall_ns: i64,
    /// The time that tenants pay.
    pub tenants_ns: i64,
    /// `platform.overhead`
    pub overhead_ns: i64,
    /// `platform.idle`
    pub idle_ns: i64,
    /// `platform.loss`
    pub loss_ns: i64,
}

/// Energy of an epoch by account, mJ, as far as its device reported it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EnergyBalance {
    /// The measured energy.
    pub energy_mj: i64,
    /// The energy drawn for tenants.
    pub tenants_mj: i64,
    /// The energy drawn in the time of `platform.overhead`.
    pub overhead_mj: i64,
    /// The energy drawn in the time of `platform.idle`.
    pub idle_mj: i64,
    /// The energy drawn in the time of `platform.loss`.
    pub loss_mj: i64,
}

impl Balance {
    /// Returns true if tenants, overhead, idle and loss are the wall time exactly.
    pub fn is_exact(&self) -> bool {
        // i128, because sums of a damaged file may be anything.
        let parts = [self.tenants_ns, self.overhead_ns, self.idle_ns, self.loss_ns];
        i128::from(self.wall_ns) == parts.into_iter().map(i128::from).sum()
    }
}

impl EnergyBalance {
    /// Returns true if tenants, overhead, idle and loss are the measured energy
    /// exactly.
    pub fn is_exact(&self) -> bool {
        let parts = [self.tenants_mj, self.overhead_mj, self.idle_mj, self.loss_mj];
        i128::from(self.energy_mj) == parts.into_iter().map(i128::from).sum()
    }
}

/// Returns the balance of archived time and of the sums by account.
pub(crate) fn of_time(
    archived: ArchivedTime,
    sums: Vec<(i64, i64)>,
) -> Result<Balance, LedgerError> {
    let ArchivedTime { wall_ns, tenants_ns, overhead_ns, idle_ns, loss_ns } = archived;
    let mut balance = Balance { wall_ns, tenants_ns, overhead_ns, idle_ns, loss_ns };
    // Archived time comes first, and the entries that are still here are added to it.
    let Balance { wall_ns, tenants_ns, overhead_ns, idle_ns, loss_ns } = &mut balance;
    add_by_account([wall_ns, tenants_ns, overhead_ns, idle_ns, loss_ns], sums)?;
    Ok(balance)
}

/// Returns the balance of archived energy and of the sums by account; `None`
/// where no device reported energy.
pub(crate) fn of_energy(
    archived: Option<ArchivedEnergy>,
    sums: Vec<(i64, i64)>,
) -> Result<Option<EnergyBalance>, LedgerError> {
    // No energy at all is not an energy of zero: such an epoch has no balance to check.
    if archived.is_none() && sums.is_empty() {
        return Ok(None);
    }
    let mut balance = archived.map_or_else(EnergyBalance::default, |archived| {
        let ArchivedEnergy { energy_mj, tenants_mj, overhead_mj, idle_mj, loss_mj } = archived;
        EnergyBalance { energy_mj, tenants_mj, overhead_mj, idle_mj, loss_mj }
    });
    let EnergyBalance { energy_mj, tenants_mj, overhead_mj, idle_mj, loss_mj } = &mut balance;
    add_by_account([energy_mj, tenants_mj, overhead_mj, idle_mj, loss_mj], sums)?;
    Ok(Some(balance))
}

/// Adds sums by account to the device, tenants, overhead, idle and loss.
fn add_by_account(totals: [&mut i64; 5], sums: Vec<(i64, i64)>) -> Result<(), LedgerError> {
    let [device, tenants, overhead, idle, loss] = totals;
    for (account, amount) in sums {
        let (total, amount) = match account {
            // The device is credited, so its entries are negative.
            account::DEVICE => (&mut *device, amount.wrapping_neg()),
            account::TENANT => (&mut *tenants, amount),
            account::OVERHEAD => (&mut *overhead, amount),
            account::IDLE => (&mut *idle, amount),
            account::LOSS => (&mut *loss, amount),
            other => return Err(LedgerError::Damaged(format!("unknown account {other}"))),
        };
        // Only a damaged file's sums do not fit.
        *total = total.wrapping_add(amount);
    }
    Ok(())
}
