//! The orders of this gateway to its workers, and the workers' reports while the
//! orders ran. Records in a worker's journal are compared with them. A record
//! that does not fit an order is billed to no tenant; its time is loss.
//!
//! Orders are in memory only. For requests that another gateway ordered, this
//! gateway has the ledger, the keys and the price: see `Unordered`.

mod terms;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tollgate_domain::block::{Attempt, FinishedAttempt, Share};
use tollgate_domain::{
    Block, BlockParts, Caller, DeviceNanos, Millijoules, RequestId, Tier, Usage, WorkerEpoch,
};

pub use self::terms::Terms;
pub(crate) use self::terms::at_most_since;
use self::terms::most_for_orphan;
use crate::model::ServedModel;

/// Orders that wait for their record. Admission bounds the running orders; ended
/// orders of a worker that never reports their end are forgotten beyond this.
const MOST_ORDERS: usize = 65_536;
/// Epochs with an energy total. Beyond this number the epoch that was heard
/// of first is forgotten. An epoch that ends is forgotten with its last block.
const MOST_EPOCHS: usize = 1_024;
/// An allowance for the energy that a device drew before this gateway heard of
/// the epoch, as time at the largest power of any device. It equals a day at
/// 700 W.
const BEFORE_FIRST_BLOCK: Duration = Duration::from_secs(600);

/// The orders of this gateway; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Orders {
    table: Arc<Mutex<OrderTable>>,
}

#[derive(Debug, Default)]
struct OrderTable {
    orders: HashMap<Attempt, Order>,
    /// Orders with an ended stream, oldest first. Some may be forgotten already.
    ended: VecDeque<Attempt>,
    /// The newest request of which an order was forgotten before its record came.
    forgotten: Option<RequestId>,
    epochs: HashMap<WorkerEpoch, EnergyTotal>,
    /// The last block of each epoch that was compared with the orders and is in the ledger.
    compared: HashMap<WorkerEpoch, u64>,
}

/// The sum of the blocks of one epoch.
#[derive(Clone, Copy, Debug)]
struct EnergyTotal {
    /// The time when the first block came.
    first_heard: Instant,
    wall: DeviceNanos,
    energy: Millijoules,
    /// The number of the last block in the sum.
    last_block: u64,
}

/// One placement of a request.
#[derive(Debug)]
struct Order {
    /// The epoch in which the request was placed.
    epoch: WorkerEpoch,
    caller: Caller,
    terms: Terms,
    opened: Instant,
    /// True once the order's stream has ended.
    ended: bool,
    /// Tokens that were streamed, once the stream has ended.
    streamed: u64,
    /// The usage in the last message of the stream.
    final_usage: Option<Usage>,
    /// Device time of the order's shares in blocks up to `last_block`.
    attributed: DeviceNanos,
    last_block: u64,
    /// The block that reports the order's end, and the usage in the block.
    journalled: Option<(u64, Usage)>,
    /// True once that end is in the ledger. Before, the block may come again.
    is_recorded: bool,
}

/// The guard of an open order, which lives as long as the order's stream.
#[derive(Debug)]
pub struct Placement {
    orders: Orders,
    attempt: Attempt,
    streamed: u64,
}

/// The gateways that can have ordered work in an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EpochOwner {
    /// This gateway alone, which has followed the epoch from its beginning.
    ThisGateway,
    /// Other gateways as well: an earlier one, or those that share the worker.
    Shared,
}

/// The source of requests in a block for which this gateway has no order.
pub(crate) enum Origin<'a> {
    /// No source: this gateway has followed the epoch from its beginning, so
    /// every request must be an order of this gateway, perhaps a forgotten one.
    Ours(Unordered<'a>),
    /// An earlier gateway.
    Earlier(Unordered<'a>),
    /// Any of the gateways that share the worker. Requests with the number of this gateway in
    /// their ids must be its orders.
    Any(u32, Unordered<'a>),
    /// The same, for a block that another gateway has recorded: that one has judged the requests
    /// of other gateways.
    Recorded(u32),
}

/// The judge of requests that another gateway ordered. Their callers must have been able to ask,
/// and they must cost what the model costs here.
pub(crate) struct Unordered<'a> {
    /// Tells if the caller's tenant has or had such a key.
    pub(crate) may_have_asked: &'a dyn Fn(&Caller) -> bool,
    /// The block's model, if it is still served at the block's price.
    pub(crate) model: Option<&'a ServedModel>,
}

/// A record of a block that the gateway rejects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InvalidRecord {
    pub(crate) caller: Caller,
    pub(crate) attempt: Attempt,
    /// The tier of the order; as the record has it if there is no order.
    pub(crate) tier: Tier,
    /// The reason, for the log and for the ledger.
    pub(crate) what: &'static str,
    /// True if the attempt is real and its figures are not: it pays nothing.
    pub(crate) voids: bool,
    /// True if the worker is not to blame: the price is not known any more.
    pub(crate) excused: bool,
}

impl InvalidRecord {
    /// Returns true for an end that was reported before.
    pub(crate) fn is_repeated_end(&self) -> bool {
        self.what == END_REPEATED
    }

    /// Makes the rejection of an end that the ledger has already.
    pub(crate) fn replayed(finished: &FinishedAttempt) -> Self {
        Self {
            caller: finished.caller.clone(),
            attempt: finished.attempt.clone(),
            tier: finished.tier,
            what: END_REPEATED,
            voids: false,
            excused: false,
        }
    }
}

/// Returns the block without the attempts that have an invalid record. Their time becomes loss.
pub(crate) fn without_invalid(block: &Block, invalid: &[InvalidRecord]) -> Block {
    block.without(|caller, attempt| {
        invalid.iter().any(|record| record.caller == *caller && record.attempt == *attempt)
    })
}

impl Orders {
    /// Notes that `attempt` of `caller` is placed in `epoch`.
    pub fn open(
        &self,
        attempt: Attempt,
        epoch: WorkerEpoch,
        caller: Caller,
        terms: Terms,
        now: Instant,
    ) -> Placement {
        let order = Order {
            epoch,
            caller,
            terms,
            opened: now,
            ended: false,
            streamed: 0,
            final_usage: None,
            attributed: DeviceNanos::ZERO,
            last_block: 0,
            journalled: None,
            is_recorded: false,
        };
        let mut table = self.lock();
        table.orders.insert(attempt.clone(), order);
        table.keep_bounded();
        // The placement locks the table when it is dropped.
        drop(table);
        Placement { orders: self.clone(), attempt, streamed: 0 }
    }

    /// Returns the records of `block` that the gateway rejects. A second check of
    /// the same block, before the block is in the ledger, gives the same answer.
    pub(crate) fn check(
        &self,
        block: &BlockParts,
        origin: &Origin<'_>,
        now: Instant,
    ) -> Vec<InvalidRecord> {
        let mut table = self.lock();
        let mut invalid = Vec::new();
        let mut note = |caller: &Caller, attempt: &Attempt, (found, tier): Checked| {
            if let Err(Rejection { what, voids, excused }) = found {
                let (caller, attempt) = (caller.clone(), attempt.clone());
                invalid.push(InvalidRecord { caller, attempt, tier, what, voids, excused });
            }
        };
        let mut counted = HashSet::new();
        for share in &block.shares {
            let Share { sequence: _, caller, attempt, attributed: _, tier } = share;
            let found = match table.orders.get_mut(attempt) {
                Some(order) => (order.check_share(block, share, now), order.terms.tier()),
                None => (origin.check_share(caller, attempt, table.forgotten.as_ref()), *tier),
            };
            counted.insert(attempt);
            note(caller, attempt, found);
        }
        let mut ended = HashSet::new();
        for finished in &block.finished {
            let FinishedAttempt { caller, attempt, tier, .. } = finished;
            let found = match table.orders.get_mut(attempt) {
                // A second end in one block cannot be told from the true one, so the
                // attempt pays nothing.
                order if !ended.insert((caller, attempt)) => {
                    let tier = order.map_or(*tier, |order| order.terms.tier());
                    (Err(Rejection::void(END_REPEATED)), tier)
                }
                Some(order) => (order.check_finished(block, finished, now), order.terms.tier()),
                None => (origin.check_finished(finished, table.forgotten.as_ref()), *tier),
            };
            note(caller, attempt, found);
        }
        // Several shares of one attempt may stand in one block, so the block's number
        // is noted only after all of them are added.
        for attempt in counted {
            if let Some(order) = table.orders.get_mut(attempt) {
                order.last_block = order.last_block.max(block.number);
            }
        }
        invalid
    }

    /// Notes that a block was compared with the orders and is in the ledger. Returns false if it
    /// was noted before: orders that it ends may be forgotten since, so it must not be compared
    /// again.
    pub(crate) fn compared(&self, epoch: WorkerEpoch, block: u64) -> bool {
        let mut table = self.lock();
        let newest = table.compared.entry(epoch).or_default();
        let is_new = *newest < block;
        *newest = block.max(*newest);
        if table.compared.len() > MOST_EPOCHS {
            // Which epoch is the oldest is not known; blocks of it come no more, most likely.
            table.compared.retain(|of, _| *of == epoch);
        }
        is_new
    }

    /// True if the device can have drawn all the energy that the epoch of `block`
    /// has reported. Each block has a bound of its own, but a worker could report
    /// more blocks than time. An epoch of this gateway alone began little
    /// before its first block, so the gateway's clock bounds that epoch as well.
    pub(crate) fn may_have_drawn(
        &self,
        block: &BlockParts,
        owner: EpochOwner,
        now: Instant,
    ) -> bool {
        let mut table = self.lock();
        let before = table.epochs.get(&block.epoch).copied().unwrap_or(EnergyTotal {
            first_heard: now,
            wall: DeviceNanos::ZERO,
            energy: Millijoules::ZERO,
            last_block: 0,
        });
        let mut total = before;
        // A repeated block was counted when it first came.
        if before.last_block < block.number {
            let wall = before.wall.nanos().saturating_add(block.wall.nanos());
            let energy = block.energy.unwrap_or(Millijoules::ZERO);
            total.wall = DeviceNanos(wall);
            total.energy = Millijoules(before.energy.0.saturating_add(energy.0));
            total.last_block = block.number;
        }
        let age =
            (now.saturating_duration_since(total.first_heard) + BEFORE_FIRST_BLOCK).as_nanos();
        // The gateway did not see the beginning of a shared epoch.
        let is_shared = owner == EpochOwner::Shared;
        let age = DeviceNanos(u64::try_from(age).unwrap_or(u64::MAX));
        let is_possible =
            total.energy.is_drawn_in(total.wall) && (is_shared || total.energy.is_drawn_in(age));
        // A refused block must not count: the worker may send another in its place.
        if is_possible {
            table.epochs.insert(block.epoch, total);
            table.keep_bounded();
        }
        is_possible
    }

    /// Notes that the end of an attempt is in the ledger. The order is forgotten once its stream has
    /// ended, too.
    pub(crate) fn recorded(&self, attempt: &Attempt) {
        let mut table = self.lock();
        let Some(order) = table.orders.get_mut(attempt) else { return };
        order.is_recorded = true;
        if order.ended {
            table.orders.remove(attempt);
        }
    }

    /// Forgets the orders of an epoch of which no more blocks will come.
    pub(crate) fn epoch_closed(&self, epoch: WorkerEpoch) {
        let mut table = self.lock();
        // An open stream still reports its figures; it forgets its order itself.
        table.orders.retain(|_, order| order.epoch != epoch || !order.ended);
        table.epochs.remove(&epoch);
        table.compared.remove(&epoch);
    }

    fn lock(&self) -> MutexGuard<'_, OrderTable> {
        // Every change under the lock is complete before a panic could happen.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OrderTable {
    /// Forgets the oldest ended orders and epochs once there are too many.
    fn keep_bounded(&mut self) {
        // One is enough, because epochs are added one by one.
        if self.epochs.len() > MOST_EPOCHS
            && let Some(first) = self.epochs.iter().min_by_key(|(_, total)| total.first_heard)
        {
            let epoch = *first.0;
            self.epochs.remove(&epoch);
        }
        // Entries of forgotten orders leave the queue here, so the queue is bounded too.
        while let Some(first) = self.ended.front() {
            if self.orders.len() <= MOST_ORDERS && self.orders.contains_key(first) {
                return;
            }
            if let Some(first) = self.ended.pop_front()
                && self.orders.remove(&first).is_some()
            {
                // The ids of one gateway grow with time.
                self.forgotten = self.forgotten.take().max(Some(first.request));
            }
        }
    }
}

/// The result of a check of a record, and the tier of its attempt.
type Checked = (Result<(), Rejection>, Tier);

/// The reason why a record is rejected.
struct Rejection {
    what: &'static str,
    voids: bool,
    excused: bool,
}

impl Rejection {
    /// Rejects a record of an attempt that the worker does not run.
    fn foreign(what: &'static str) -> Self {
        Self { what, voids: false, excused: false }
    }

    /// Rejects false figures of a real attempt.
    fn void(what: &'static str) -> Self {
        Self { what, voids: true, excused: false }
    }
}

impl Order {
    fn check_share(
        &mut self,
        block: &BlockParts,
        share: &Share,
        now: Instant,
    ) -> Result<(), Rejection> {
        let Share { sequence: _, caller, attempt: _, attributed, tier } = share;
        self.check_owner(block, caller, *tier)?;
        if self.journalled.is_some_and(|(number, _)| number < block.number) {
            return Err(Rejection::foreign("device time after its end"));
        }
        // A repeated block was counted when it first came.
        if self.last_block < block.number {
            let sum = self.attributed.nanos().saturating_add(attributed.nanos());
            self.attributed = DeviceNanos(sum);
        }
        if self.attributed > at_most_since(self.opened, now) {
            return Err(Rejection::void("more device time than has passed"));
        }
        Ok(())
    }

    fn check_finished(
        &mut self,
        block: &BlockParts,
        reported: &FinishedAttempt,
        now: Instant,
    ) -> Result<(), Rejection> {
        let FinishedAttempt { caller, usage, tier, .. } = reported;
        self.check_owner(block, caller, *tier)?;
        if self.journalled.is_some_and(|(number, _)| number < block.number) {
            return Err(Rejection::foreign(END_REPEATED));
        }
        // Noted before the checks: the stream's last event is compared with it later.
        self.journalled = Some((block.number, *usage));
        // Stream and journal report the figures of one meter, so they are equal.
        if self.final_usage.is_some_and(|streamed| streamed != *usage) {
            return Err(Rejection::void("another usage than was streamed"));
        }
        // A stream that broke has no final usage, but the client has these tokens.
        if usage.completion_tokens < self.streamed {
            return Err(Rejection::void("fewer tokens than were streamed"));
        }
        // A journal does not tell the tokens of each choice.
        self.terms.check(usage, None).map_err(Rejection::void)?;
        if usage.attributed > at_most_since(self.opened, now) {
            return Err(Rejection::void("more device time than has passed"));
        }
        Ok(())
    }

    fn check_owner(
        &self,
        block: &BlockParts,
        caller: &Caller,
        tier: Tier,
    ) -> Result<(), Rejection> {
        if self.epoch != block.epoch {
            return Err(Rejection::foreign("an attempt that was placed elsewhere"));
        }
        if self.caller != *caller {
            return Err(Rejection::foreign("another tenant's or key's attempt"));
        }
        if !self.terms.is_for(&block.model, &block.device.class) {
            return Err(Rejection::foreign("another model or class of device than was ordered"));
        }
        // The tier has a price of its own.
        if self.terms.tier() != tier {
            return Err(Rejection::foreign("another tier than was ordered"));
        }
        Ok(())
    }
}

impl Origin<'_> {
    /// Checks device time of an attempt without an order. `forgotten` is the newest request of
    /// which an order was forgotten.
    fn check_share(
        &self,
        caller: &Caller,
        attempt: &Attempt,
        forgotten: Option<&RequestId>,
    ) -> Result<(), Rejection> {
        match self.unordered(attempt, forgotten)? {
            Some(unordered) if !(unordered.may_have_asked)(caller) => {
                Err(Rejection::foreign("a tenant that has no such key"))
            }
            _ => Ok(()),
        }
    }

    fn check_finished(
        &self,
        reported: &FinishedAttempt,
        forgotten: Option<&RequestId>,
    ) -> Result<(), Rejection> {
        let FinishedAttempt { caller, attempt, usage, .. } = reported;
        self.check_share(caller, attempt, forgotten)?;
        let Some(unordered) = self.unordered(attempt, forgotten)? else { return Ok(()) };
        // Without the price the reference cost cannot be checked.
        let Some(model) = unordered.model else {
            let what = "another gateway's request at a price that is not known any more";
            return Err(Rejection { what, voids: true, excused: true });
        };
        if usage.reference > most_for_orphan(model, usage) {
            return Err(Rejection::void("more reference cost than its tokens can cause"));
        }
        Ok(())
    }

    /// Returns the judge of an attempt without an order; `None` if another gateway has judged it.
    fn unordered(
        &self,
        attempt: &Attempt,
        forgotten: Option<&RequestId>,
    ) -> Result<Option<&Unordered<'_>>, Rejection> {
        let never_ordered = || Err(Rejection::foreign("an attempt that was never ordered"));
        // An older request than a forgotten one may have had an order, too.
        let is_newer = forgotten.is_none_or(|forgotten| attempt.request > *forgotten);
        let is_ours = |number: &u32| is_newer && attempt.request.gateway() == Some(*number);
        match self {
            Self::Ours(_) if is_newer => never_ordered(),
            Self::Any(number, _) | Self::Recorded(number) if is_ours(number) => never_ordered(),
            Self::Ours(unordered) | Self::Earlier(unordered) | Self::Any(_, unordered) => {
                Ok(Some(unordered))
            }
            Self::Recorded(_) => Ok(None),
        }
    }
}

impl Placement {
    /// Notes the number of tokens that have come.
    pub fn streamed(&mut self, tokens: u64) {
        self.streamed = tokens;
    }

    /// Notes the usage in the last message of the stream.
    ///
    /// # Errors
    /// The journal has already reported another usage.
    pub fn finished(&self, usage: Usage) -> Result<(), &'static str> {
        let mut table = self.orders.lock();
        // A forgotten order leaves nothing to compare with.
        let Some(order) = table.orders.get_mut(&self.attempt) else { return Ok(()) };
        order.final_usage = Some(usage);
        match order.journalled {
            Some((_, journalled)) if journalled != usage => {
                Err("another usage than it has journalled")
            }
            _ => Ok(()),
        }
    }

    /// Notes that the worker refused the order. A later record of the attempt is
    /// then a record of an attempt that was never ordered.
    pub fn refused(&self) {
        self.orders.lock().orders.remove(&self.attempt);
    }
}

impl Drop for Placement {
    fn drop(&mut self) {
        let mut table = self.orders.lock();
        let Some(order) = table.orders.get_mut(&self.attempt) else { return };
        order.ended = true;
        order.streamed = self.streamed;
        // No report of the attempt is expected any more. A block that was checked and is not in the
        // ledger yet may come again, over another connection.
        if order.is_recorded {
            table.orders.remove(&self.attempt);
        } else {
            table.ended.push_back(self.attempt.clone());
            table.keep_bounded();
        }
    }
}

const END_REPEATED: &str = "an end reported twice";
