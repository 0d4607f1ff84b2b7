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
    /// Returns what other gateways have or bring in the next period, if one has entered it.
    fn next(&self, period: u32, home: usize) -> Option<u64> {
        let has_entered = |home: usize| self.rows.contains_key(&(period + 1, home));
        let others = self.rows.iter().filter(|((_, owner), _)| *owner != home);
        let in_next = others.clone().filter(|((of, _), _)| *of == period + 1);
        let in_next = in_next.map(|(_, row)| row.granted).reduce(|sum, more| sum + more)?;
        let brought = others.filter(|((of, owner), _)| *of == period && !has_entered(*owner));
        Some(in_next + brought.map(|(_, row)| row.unspent()).sum::<u64>())
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
        let mut row = self.rows.get(&(period, home)).copied().unwrap_or_default();
        let mut book = Book {
            cap,
            gateways,
            granted: 0,
            used: 0,
            carried: 0,
            own_carried: 0,
            next: None,
            may_grant: now >= self.paused_until,
        };
        for ((of, owner), other) in &self.rows {
            if *of == period && *owner != home {
                book.granted += other.granted;
                book.used += other.used;
            }
            if *of + 1 != period {
                continue;
            }
            match *owner == home {
                true => book.own_carried = other.unspent(),
                false if self.rows.contains_key(&(period, *owner)) => {}
                false => book.carried += other.unspent(),
            }
        }
        match omitted {
            Some(Omission::Order) if row.order != Order::default() => {
                row.order = Order { life: 0, call: 1 };
            }
            Some(Omission::CarriedWork) => book = Book { carried: 0, own_carried: 0, ..book },
            Some(Omission::Pause) => book.may_grant = true,
            _ => {}
        }
        if omitted != Some(Omission::NextPeriod) {
            book.next = self.next(period, home);
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
