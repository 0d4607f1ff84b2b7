//! The rows of a cap in the database, and the changes that a transaction makes to them. All
//! amounts are in the unit of the cap, such as nanoseconds of reference cost.

use std::num::NonZeroU32;

/// The row of a cap in one period.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CapRow {
    /// The cost that is posted.
    pub spent: u64,
    /// The cost that slices may still post: the sum of their `granted - posted`.
    pub leased: u64,
}

/// The row of one gateway's slice of a cap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SliceRow {
    /// The sum of all grants, less what the gateway gave back.
    pub granted: u64,
    /// The part of `granted` that is posted.
    pub posted: u64,
    /// The number of the newest call of the gateway for this slice.
    pub call: u64,
}

/// A call of a gateway for its slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The number of the call. It grows with each call, so that a call which comes late
    /// changes nothing.
    pub call: u64,
    /// The amount that the gateway no longer needs.
    pub give_back: u64,
    /// The amount without which a request cannot start; zero if none waits.
    pub need: u64,
    /// The amount that the gateway expects to spend in the next 90 s beyond `need`.
    pub expected: u64,
}

/// A call that a newer call of the same gateway has overtaken. It has changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a newer call of the same gateway was answered before this one")]
pub struct StaleCall;

impl CapRow {
    /// Returns the part of the cap that is neither spent nor in a slice.
    pub fn rest(&self, cap: u64) -> u64 {
        cap.saturating_sub(self.spent).saturating_sub(self.leased)
    }

    /// Takes back and grants what `ask` says. A need that the rest does not cover gets
    /// nothing. `gateways` is the number of live gateways; a grant beyond the need is at most
    /// the `2 * gateways`th part of the rest, so that the others find something, too.
    ///
    /// # Errors
    /// [`StaleCall`]
    pub fn ask(
        &mut self,
        slice: &mut SliceRow,
        cap: u64,
        gateways: NonZeroU32,
        ask: Ask,
    ) -> Result<(), StaleCall> {
        if ask.call <= slice.call {
            return Err(StaleCall);
        }
        slice.call = ask.call;
        // A gateway gives back only what no request uses, so the minimum changes nothing
        // unless a gateway is wrong.
        let back = ask.give_back.min(slice.unposted());
        slice.granted -= back;
        self.leased -= back;
        let rest = self.rest(cap);
        if ask.need > rest {
            return Ok(());
        }
        let fair = rest / (2 * u64::from(gateways.get()));
        let granted = ask.need.saturating_add(ask.expected).min(fair).max(ask.need);
        slice.granted += granted;
        self.leased += granted;
        Ok(())
    }

    /// Posts the cost of an attempt. `slice` is the row of the gateway that the attempt's id
    /// names; `None` if the database has no such row.
    pub fn post(&mut self, slice: Option<&mut SliceRow>, cost: u64) {
        self.spent += cost;
        if let Some(slice) = slice {
            // Never more than the slice has left: `leased` must cover what other slices have.
            let part = cost.min(slice.unposted());
            slice.posted += part;
            self.leased -= part;
        }
    }

    /// Sets a slice to what its gateway remembers, after the database lost commits. `call` is
    /// the number of the call whose answer told the gateway of the loss.
    ///
    /// The database may remember less than the gateway, because it lost a grant, or more,
    /// because it lost what the gateway gave back. Others may have that already, so the
    /// gateway must not get it again.
    ///
    /// # Errors
    /// [`StaleCall`]
    pub fn learn(
        &mut self,
        slice: &mut SliceRow,
        call: u64,
        granted: u64,
    ) -> Result<(), StaleCall> {
        // A newer call may have been granted something since.
        if call != slice.call {
            return Err(StaleCall);
        }
        let granted = granted.max(slice.posted);
        self.leased = self.leased + granted - slice.granted;
        slice.granted = granted;
        Ok(())
    }

    /// Frees what a slice has left, when its row is deleted.
    pub fn free(&mut self, slice: SliceRow) {
        self.leased -= slice.unposted();
    }
}

impl SliceRow {
    /// Returns the amount that the gateway may still post.
    fn unposted(&self) -> u64 {
        self.granted - self.posted
    }
}
