//! Rules for corrections: the part of an entry that a fault cap moves from the
//! tenant to `platform.loss`.

use tollgate_domain::{DeviceNanos, Millijoules};

use crate::rows::entries::{Amounts, CORRECTION, Entry, EntryOwner, MeteredEntry, account};

/// Returns what is left of an entry without its first `kept_ns`. The energy is
/// split by time, rounded down.
pub(crate) fn beyond(entry: Amounts, kept_ns: i64) -> Amounts {
    let Amounts { amount_ns, energy_mj } = entry;
    // No overflow: callers keep at most the amount, and at least nothing.
    let excess_ns = amount_ns - kept_ns;
    let nanos = |amount: i64| DeviceNanos(amount.unsigned_abs());
    let part = |energy: i64| {
        let energy = Millijoules(energy.unsigned_abs());
        energy.of_part(nanos(excess_ns), nanos(amount_ns)).millijoules() as i64
    };
    Amounts { amount_ns: excess_ns, energy_mj: energy_mj.map(part) }
}

/// Splits `payable_ns` over the entries of an attempt, in the order of the device's
/// work. Returns each entry with its excess, which may be zero.
pub(crate) fn excesses(
    entries: Vec<MeteredEntry>,
    payable_ns: i64,
) -> impl Iterator<Item = (MeteredEntry, Amounts)> {
    let mut room_ns = payable_ns;
    entries.into_iter().map(move |entry| {
        // The first entries are paid in full, because their tokens went out first.
        let kept_ns = entry.amounts.amount_ns.min(room_ns);
        room_ns -= kept_ns;
        let excess = beyond(entry.amounts, kept_ns);
        (entry, excess)
    })
}

/// Returns the excess of a new share of an attempt that has a cap. `room_ns` is the cap
/// without what is paid already; it is negative if a late cap is below that.
pub(crate) fn excess_of_share(share: Amounts, room_ns: i64) -> Amounts {
    beyond(share, share.amount_ns.min(room_ns.max(0)))
}

/// Returns the pair of entries that moves `excess` to `platform.loss`. The pair
/// sums to zero.
pub(crate) fn to_loss(excess: Amounts, owner: EntryOwner<'_>) -> [Entry<'_>; 2] {
    let taken = negated(excess);
    [(account::TENANT, taken), (account::LOSS, excess)].map(|(account, amounts)| Entry {
        kind: CORRECTION,
        account,
        amounts,
        owner: Some(owner),
    })
}

/// Returns the opposite amounts.
pub(crate) fn negated(amounts: Amounts) -> Amounts {
    Amounts { amount_ns: -amounts.amount_ns, energy_mj: amounts.energy_mj.map(|energy| -energy) }
}

/// Returns true if a stored correction of a metered entry takes the right energy
/// from the tenant, or gives it to loss. Absurd amounts occur in damaged files
/// only; other checks report them.
pub(crate) fn is_moved_from(metered: Amounts, moved: Amounts, account: i64) -> bool {
    // A correction takes from the tenant with a minus and gives to loss with a plus.
    let (excess_ns, sign) = match account {
        account::TENANT => (moved.amount_ns.wrapping_neg(), -1),
        _ => (moved.amount_ns, 1),
    };
    // A correction cannot move more time than its entry has.
    if !(0..=metered.amount_ns).contains(&excess_ns) {
        return false;
    }
    let due = beyond(metered, metered.amount_ns - excess_ns).energy_mj;
    moved.energy_mj == due.map(|energy| energy.wrapping_mul(sign))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn energy_follows_time_rounded_down() {
        let entry = Amounts { amount_ns: 100, energy_mj: Some(1_002) };
        assert_eq!(beyond(entry, 33), Amounts { amount_ns: 67, energy_mj: Some(671) });
        assert_eq!(beyond(entry, 100).amount_ns, 0);
        let unknown = Amounts { amount_ns: 100, energy_mj: None };
        assert_eq!(beyond(unknown, 33).energy_mj, None);
    }

    #[test]
    fn share_beyond_cap_is_excess() {
        let share = Amounts { amount_ns: 50, energy_mj: None };
        for (cap_ns, paid_ns, excess_ns) in [(120, 100, 30), (120, 0, 0), (60, 80, 50), (0, 0, 50)]
        {
            assert_eq!(excess_of_share(share, cap_ns - paid_ns).amount_ns, excess_ns);
        }
    }

    #[test]
    fn corrections_are_recognised() {
        let metered = Amounts { amount_ns: 100, energy_mj: Some(1_002) };
        let excess = beyond(metered, 33);
        assert!(is_moved_from(metered, excess, account::LOSS));
        assert!(is_moved_from(metered, negated(excess), account::TENANT));
        let wrong = Amounts { energy_mj: Some(670), ..excess };
        assert!(!is_moved_from(metered, wrong, account::LOSS));
    }
}
