//! The database of a play: rows, and the transaction that answers a call.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use tollgate_cluster::{Answer, Ask, Book, Order, SliceRow, StaleCall};

use crate::omission::Omission;

/// A call on its way to the database.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) home: usize,
    pub(crate) period: u32,
    pub(crate) ask: Ask,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Database {
    pub(crate) rows: BTreeMap<(u32, usize), SliceRow>,
    /// The time until which nothing is granted.
    pub(crate) paused_until: u64,
}

impl Database {
    /// Returns the newest life of a gateway that has slices.
    pub(crate) fn newest_life(&self, home: usize) -> u64 {
        let of_home = self.rows.iter().filter(|((_, of), _)| *of == home);
        of_home.map(|(_, row)| row.order.life).max().unwrap_or(0)
    }

    /// Takes the unspent parts of a lost gateway's slices away. `spent` tells what it has spent of
    /// each period; `None` leaves it at what the gateway has told.
    pub(crate) fn free(&mut self, home: usize, spent: Option<&BTreeMap<u32, u64>>) {
        let known = spent.cloned().unwrap_or_default();
        // Work that ran across a change of period can have cost something without a slice.
        for period in known.iter().filter(|(_, spent)| **spent > 0).map(|(period, _)| *period) {
            self.rows.entry((period, home)).or_default();
        }
        for ((period, _), row) in self.rows.iter_mut().filter(|((_, of), _)| *of == home) {
            let used = row.used.max(known.get(period).copied().unwrap_or(0));
            let order = Order { life: row.order.life + 1, call: 0 };
            *row = SliceRow { order, granted: used, used };
        }
    }

    /// Answers a call at `now`.
    pub(crate) fn answer(
        &mut self,
        call: &Call,
        (now, cap): (u64, u64),
        gateways: NonZeroU32,
        omitted: Option<Omission>,
    ) -> Result<Answer, StaleCall> {
        let Call { home, period, ref ask } = *call;
        let rows: Vec<_> =
            self.rows.iter().map(|((period, home), row)| (*period, home, *row)).collect();
        let of_cap = (cap, gateways, now >= self.paused_until);
        let (mut book, mut row) = Book::open(of_cap, &home, (period, period - 1), &rows);
        match omitted {
            Some(Omission::Order) if row.order != Order::default() => {
                row.order = Order { life: 0, call: 1 };
            }
            Some(Omission::CarriedWork) => book = Book { carried: 0, own_carried: 0, ..book },
            Some(Omission::Pause) => book.may_grant = true,
            Some(Omission::NextPeriod) => book.next = None,
            _ => {}
        }
        let before = row;
        let mut answer = row.ask(&book, ask)?;
        if omitted == Some(Omission::Claims) && before.order != Order::default() {
            let beyond = answer.claimed.saturating_sub(before.granted);
            row.granted -= beyond;
            answer.granted -= beyond;
        }
        self.rows.insert((period, home), row);
        Ok(answer)
    }
}
