//! The rows of a cap in the database, and the changes that a call makes to them. All amounts
//! are in the unit of the cap, such as nanoseconds of reference cost.

use std::num::NonZeroU32;

/// The place of a call among all calls of one data folder. A later call is larger, so that a
/// call which comes late changes nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Order {
    /// The number of the gateway's start in its data folder.
    pub life: u64,
    /// The number of the call in that life, from 1.
    pub call: u64,
}

/// The row of one gateway's slice of a cap in one period.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SliceRow {
    /// The newest call of the gateway for this slice.
    pub order: Order,
    /// The amount that the gateway may spend in the period, with what it has spent.
    pub granted: u64,
    /// The part of `granted` that the gateway has said to be spent.
    pub used: u64,
}

/// A call of a gateway for its slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The place of the call.
    pub order: Order,
    /// The slice as the gateway has it, less what it gives back with this call. `None` in the
    /// first call of a life, which does not know the slice: it stays as it is.
    pub claim: Option<u64>,
    /// The amount that the gateway has spent.
    pub used: u64,
    /// The amount without which a request cannot start; zero if none waits.
    pub need: u64,
    /// The amount that the gateway expects to spend soon beyond `need`.
    pub expected: u64,
}

/// The state of a cap in one period beside the slice that a call is for.
#[derive(Clone, Copy, Debug)]
pub struct Book {
    /// The cap.
    pub cap: u64,
    /// The number of gateways that run.
    pub gateways: NonZeroU32,
    /// The sum of the other gateways' slices.
    pub granted: u64,
    /// The part of that sum that they have spent.
    pub used: u64,
    /// The amount that other gateways may bring from the period before: requests that run
    /// across the change of period count in the period in which they end. Of each gateway
    /// without a slice in this period, the unspent rest of its slice in the one before.
    pub carried: u64,
    /// The unspent rest of the gateway's own slice in the period before.
    pub own_carried: u64,
    /// The amount that other gateways have or may bring in the next period, if some of them have
    /// entered it by their clocks and the gateway that calls has not.
    pub next: Option<u64>,
    /// False if nothing may be granted now, because the database may have lost grants.
    pub may_grant: bool,
}

/// The state of a cap after a call, for the gateway that called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// The part of the cap that no gateway has.
    pub rest: u64,
    /// The amount that other gateways have spent.
    pub used_elsewhere: u64,
    /// The amount that other gateways have and have not spent.
    pub idle_elsewhere: u64,
}

/// The answer to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The place of the call that is answered.
    pub order: Order,
    /// The slice after it, without what it granted.
    pub claimed: u64,
    /// The slice after it.
    pub granted: u64,
    /// The part of the slice that any life of the gateway has said to be spent.
    pub used: u64,
    /// The cap after it.
    pub standing: Standing,
}

/// A call that a newer call of the same gateway has overtaken. It has changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a newer call of the same gateway came before this one")]
pub struct StaleCall;

impl SliceRow {
    /// Sets the slice to what the gateway claims, and adds what it needs as far as the cap
    /// has it. A grant beyond the need is at most the `2 * gateways`th part of the rest, so
    /// that the others find something, too.
    ///
    /// A claim counts even where it exceeds the row. The row has less after a failover of
    /// the database that lost a grant, and after a change of period, in which requests that
    /// run go on.
    ///
    /// # Errors
    /// [`StaleCall`]
    pub fn ask(&mut self, book: &Book, ask: &Ask) -> Result<Answer, StaleCall> {
        if ask.order <= self.order {
            return Err(StaleCall);
        }
        let is_new = self.order == Order::default();
        // A life that begins does not know what an earlier one left running.
        let kept = if is_new { book.own_carried } else { self.granted };
        let claimed = ask.claim.unwrap_or(kept.max(ask.used));
        let mut rest = book.cap.saturating_sub(claimed).saturating_sub(book.taken());
        if let Some(next) = book.next {
            // What is not spent yet may be spent in the next period, too.
            let brought = claimed.saturating_sub(ask.used);
            rest = rest.min(book.cap.saturating_sub(next).saturating_sub(brought));
        }
        let granted = match book.may_grant {
            true => {
                let fair = rest / (2 * u64::from(book.gateways.get()));
                ask.need.saturating_add(ask.expected).min(fair).max(ask.need).min(rest)
            }
            false => 0,
        };
        let granted = claimed.saturating_add(granted);
        // A life that begins does not know yet what an earlier one has spent and told.
        let used = ask.used.max(self.used);
        *self = Self { order: ask.order, granted, used };
        let standing = Standing {
            rest: rest.saturating_sub(granted - claimed),
            used_elsewhere: book.used,
            idle_elsewhere: book.taken().saturating_sub(book.used),
        };
        Ok(Answer { order: ask.order, claimed, granted, used, standing })
    }

    /// Returns the part of the slice that may still be spent.
    pub fn unspent(&self) -> u64 {
        self.granted.saturating_sub(self.used)
    }
}

impl Book {
    /// Reads the state of a cap for a call of `home` in the period that begins on the day `now`
    /// after the one that began on `before`. `rows` are the slices of these periods and later
    /// ones, each with the first day of its period and its data folder.
    pub fn open<H: Eq + ?Sized>(
        (cap, gateways, may_grant): (u64, NonZeroU32, bool),
        home: &H,
        (now, before): (u32, u32),
        rows: &[(u32, &H, SliceRow)],
    ) -> (Self, SliceRow) {
        let row_of =
            |home: &H, day| rows.iter().find(|(first_day, of, _)| *first_day == day && *of == home);
        let unspent_of = |row: Option<&(u32, &H, SliceRow)>| row.map_or(0, |row| row.2.unspent());
        let others = || rows.iter().filter(|(_, of, _)| *of != home);
        let sum = |amounts: &mut dyn Iterator<Item = u64>| amounts.fold(0, u64::saturating_add);
        let of_now = || others().filter(|(first_day, ..)| *first_day == now);
        let has_entered =
            |home: &H, day| rows.iter().any(|(first_day, of, _)| *first_day >= day && *of == home);
        // The unspent rest of a period may still be spent in the next one by those who have not
        // entered it.
        let brought = |from, to| {
            let late = others().filter(move |(first_day, ..)| *first_day == from);
            sum(&mut late.filter(|(_, of, _)| !has_entered(of, to)).map(|row| row.2.unspent()))
        };
        let later = others().map(|(first_day, ..)| *first_day).filter(|day| *day > now).min();
        let next = later.map(|later| {
            let in_next = others().filter(|(first_day, ..)| *first_day == later);
            sum(&mut in_next.map(|row| row.2.granted)).saturating_add(brought(now, later))
        });
        let book = Self {
            cap,
            gateways,
            granted: sum(&mut of_now().map(|row| row.2.granted)),
            used: sum(&mut of_now().map(|row| row.2.used)),
            carried: brought(before, now),
            own_carried: unspent_of(row_of(home, before)),
            next,
            may_grant,
        };
        (book, row_of(home, now).map_or_else(SliceRow::default, |row| row.2))
    }

    /// Returns what the other gateways have or may bring.
    fn taken(&self) -> u64 {
        self.granted.saturating_add(self.carried)
    }
}
