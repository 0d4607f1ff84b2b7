//! What this gateway has ordered of its workers, and what it heard while they
//! ran: the measure by which their journals are judged (T56, C11). A record
//! that does not fit an order is not posted to anyone; its time is loss.
//!
//! Nothing here is on the disk. Of what an earlier gateway ordered, this one
//! knows the ledger, the keys and the price: see [`Origin::Earlier`].

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tollgate_domain::block::{Attempt, FinishedAttempt, Share};
use tollgate_domain::{BlockParts, Caller, DeviceNanos, Millijoules, Usage, WorkerEpoch};

use super::ServedModel;
use super::terms::{Terms, at_most_since, most_for_strangers};

/// Orders that wait for their record. Admission bounds how many run; those
/// of a worker that never tells their end are forgotten beyond this.
const MOST_ORDERS: usize = 65_536;
/// Lives whose energy is added up; the one that was heard of first is forgotten
/// beyond this. One that ends is forgotten with its last block.
const MOST_LIVES: usize = 1_024;
/// What may have been drawn before a life was heard of, as time in which no
/// device draws it: a day of 700 W.
const BEFORE_IT_WAS_HEARD_OF: Duration = Duration::from_secs(600);

/// The orders; clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Orders {
    book: Arc<Mutex<Book>>,
}

#[derive(Debug, Default)]
struct Book {
    orders: HashMap<Attempt, Order>,
    /// Those whose stream has ended, oldest first; some may be gone already.
    ended: VecDeque<Attempt>,
    lives: HashMap<WorkerEpoch, Drawn>,
}

/// What the blocks of a worker's life come to.
#[derive(Clone, Copy, Debug)]
struct Drawn {
    /// When its first block came.
    heard: Instant,
    wall: DeviceNanos,
    energy: Millijoules,
    /// Up to this block.
    counted: u64,
}

/// One placement of a request.
#[derive(Debug)]
struct Order {
    /// Where it was placed.
    epoch: WorkerEpoch,
    caller: Caller,
    terms: Terms,
    opened: Instant,
    /// Its stream has ended.
    ended: bool,
    /// Tokens that were streamed, once it has ended.
    streamed: u64,
    /// The worker's last word on it.
    heard: Option<Usage>,
    /// Device time of its shares in blocks up to `counted`.
    attributed: DeviceNanos,
    counted: u64,
    /// The block that tells its end, and what it says.
    told: Option<(u64, Usage)>,
}

/// Keeps an order open while its stream is.
#[derive(Debug)]
pub(super) struct Placement {
    orders: Orders,
    attempt: Attempt,
    streamed: u64,
}

/// Whose requests a block may hold beside those that stand here.
pub(super) enum Origin<'a> {
    /// Nobody's: this gateway has known the epoch from its beginning.
    Ours,
    /// An earlier gateway's. Their caller must have been able to ask, and
    /// what they cost must be what the model costs here.
    Earlier {
        /// Whether this tenant has such a key.
        may_be: &'a dyn Fn(&Caller) -> bool,
        /// The model of the block, where it is still served at that price.
        model: Option<&'a ServedModel>,
    },
}

/// A record that is not believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Untruth {
    pub(super) caller: Caller,
    pub(super) attempt: Attempt,
    pub(super) what: &'static str,
    /// The attempt is real and its figures are not: it pays nothing at all.
    pub(super) voids: bool,
    /// Nobody lies: its price is not known any more.
    pub(super) excused: bool,
}

impl Untruth {
    /// The ledger has this end already.
    pub(super) fn replayed(finished: &FinishedAttempt) -> Self {
        Self {
            caller: finished.caller.clone(),
            attempt: finished.attempt.clone(),
            what: "an end told twice",
            voids: false,
            excused: false,
        }
    }
}

impl Orders {
    /// Notes that `attempt` of `caller` is placed in `epoch`.
    pub(super) fn open(
        &self,
        attempt: Attempt,
        epoch: WorkerEpoch,
        caller: Caller,
        terms: Terms,
    ) -> Placement {
        let order = Order {
            epoch,
            caller,
            terms,
            opened: Instant::now(),
            ended: false,
            streamed: 0,
            heard: None,
            attributed: DeviceNanos::ZERO,
            counted: 0,
            told: None,
        };
        let mut book = self.lock();
        book.orders.insert(attempt.clone(), order);
        book.keep_bounded();
        drop(book);
        Placement { orders: self.clone(), attempt, streamed: 0 }
    }

    /// What of `block` is not believed. Judging it again, before it is in the
    /// ledger, gives the same answer.
    pub(super) fn judge(&self, block: &BlockParts, origin: &Origin<'_>) -> Vec<Untruth> {
        let mut book = self.lock();
        let mut untruths = Vec::new();
        let mut say = |caller: &Caller, attempt: &Attempt, found: Result<(), Wrong>| {
            if let Err(Wrong { what, voids, excused }) = found {
                let (caller, attempt) = (caller.clone(), attempt.clone());
                untruths.push(Untruth { caller, attempt, what, voids, excused });
            }
        };
        let mut counted = HashSet::new();
        for Share { sequence: _, caller, attempt, attributed } in &block.shares {
            let found = match book.orders.get_mut(attempt) {
                Some(order) => order.share(block, caller, *attributed),
                None => origin.share(caller),
            };
            counted.insert(attempt);
            say(caller, attempt, found);
        }
        let mut ended = HashSet::new();
        for finished in &block.finished {
            let FinishedAttempt { caller, attempt, .. } = finished;
            let found = match book.orders.get_mut(attempt) {
                _ if !ended.insert((caller, attempt)) => Err(Wrong::void("an end told twice")),
                Some(order) => order.finished(block, finished),
                None => origin.finished(finished),
            };
            say(caller, attempt, found);
        }
        // Of those that are believed the count goes on after this block.
        for attempt in counted {
            if let Some(order) = book.orders.get_mut(attempt) {
                order.counted = order.counted.max(block.number);
            }
        }
        untruths
    }

    /// Whether the life of `block` may have drawn all that it has told: a bound
    /// for each block alone grows with their number. A life that is `ours` began
    /// little before we heard of it, so that our clock is a bound as well.
    pub(super) fn may_have_drawn(&self, block: &BlockParts, ours: bool) -> bool {
        let mut book = self.lock();
        let now = Instant::now();
        let before = book.lives.get(&block.epoch).copied().unwrap_or(Drawn {
            heard: now,
            wall: DeviceNanos::ZERO,
            energy: Millijoules::ZERO,
            counted: 0,
        });
        let mut drawn = before;
        // A block that comes again was counted when it came first.
        if before.counted < block.number {
            let wall = before.wall.nanos().saturating_add(block.wall.nanos());
            let energy = block.energy.unwrap_or(Millijoules::ZERO);
            drawn.wall = DeviceNanos(wall);
            drawn.energy = Millijoules(before.energy.0.saturating_add(energy.0));
            drawn.counted = block.number;
        }
        let lived = (now - drawn.heard + BEFORE_IT_WAS_HEARD_OF).as_nanos();
        let lived = DeviceNanos(u64::try_from(lived).unwrap_or(u64::MAX));
        let is_possible =
            drawn.energy.is_drawn_in(drawn.wall) && (!ours || drawn.energy.is_drawn_in(lived));
        if is_possible {
            book.lives.insert(block.epoch, drawn);
            book.keep_bounded();
        }
        is_possible
    }

    /// Forgets an attempt whose end is in the ledger, once its stream has
    /// ended as well.
    pub(super) fn recorded(&self, attempt: &Attempt) {
        let mut book = self.lock();
        if book.orders.get(attempt).is_some_and(|order| order.ended) {
            book.orders.remove(attempt);
        }
    }

    /// Forgets what was placed in an epoch of which no more will come.
    pub(super) fn closed(&self, epoch: WorkerEpoch) {
        let mut book = self.lock();
        book.orders.retain(|_, order| order.epoch != epoch || !order.ended);
        book.lives.remove(&epoch);
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        // Each change under the lock is whole.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    /// Forgets those that ended longest ago, once there are too many.
    fn keep_bounded(&mut self) {
        if self.lives.len() > MOST_LIVES
            && let Some(first) = self.lives.iter().min_by_key(|(_, life)| life.heard)
        {
            let epoch = *first.0;
            self.lives.remove(&epoch);
        }
        while let Some(first) = self.ended.front() {
            if self.orders.len() <= MOST_ORDERS && self.orders.contains_key(first) {
                return;
            }
            if let Some(first) = self.ended.pop_front() {
                self.orders.remove(&first);
            }
        }
    }
}

/// What is wrong with a record.
struct Wrong {
    what: &'static str,
    voids: bool,
    excused: bool,
}

impl Wrong {
    /// It speaks of what is not its worker's to tell.
    fn foreign(what: &'static str) -> Self {
        Self { what, voids: false, excused: false }
    }

    /// Its attempt is real and its figures are not.
    fn void(what: &'static str) -> Self {
        Self { what, voids: true, excused: false }
    }
}

impl Order {
    fn share(
        &mut self,
        block: &BlockParts,
        caller: &Caller,
        attributed: DeviceNanos,
    ) -> Result<(), Wrong> {
        self.is_of(block, caller)?;
        if self.told.is_some_and(|(told, _)| told < block.number) {
            return Err(Wrong::foreign("device time after its end"));
        }
        // A block that comes again was counted when it came first.
        if self.counted < block.number {
            let sum = self.attributed.nanos().saturating_add(attributed.nanos());
            self.attributed = DeviceNanos(sum);
        }
        if self.attributed > at_most_since(self.opened) {
            return Err(Wrong::void("more device time than has passed"));
        }
        Ok(())
    }

    fn finished(&mut self, block: &BlockParts, said: &FinishedAttempt) -> Result<(), Wrong> {
        let FinishedAttempt { caller, usage, .. } = said;
        self.is_of(block, caller)?;
        if self.told.is_some_and(|(told, _)| told < block.number) {
            return Err(Wrong::foreign("an end told twice"));
        }
        self.told = Some((block.number, *usage));
        if self.heard.is_some_and(|heard| heard != *usage) {
            return Err(Wrong::void("another usage than was streamed"));
        }
        if usage.completion_tokens < self.streamed {
            return Err(Wrong::void("fewer tokens than were streamed"));
        }
        self.terms.check(usage, None).map_err(Wrong::void)?;
        if usage.attributed > at_most_since(self.opened) {
            return Err(Wrong::void("more device time than has passed"));
        }
        Ok(())
    }

    fn is_of(&self, block: &BlockParts, caller: &Caller) -> Result<(), Wrong> {
        if self.epoch != block.epoch {
            return Err(Wrong::foreign("an attempt that was placed elsewhere"));
        }
        if self.caller != *caller {
            return Err(Wrong::foreign("another tenant's or key's attempt"));
        }
        if !self.terms.is_for(&block.model, &block.device.class) {
            return Err(Wrong::foreign("another model or class of device than was ordered"));
        }
        Ok(())
    }
}

impl Origin<'_> {
    fn share(&self, caller: &Caller) -> Result<(), Wrong> {
        match self {
            Self::Ours => Err(Wrong::foreign("an attempt that was never ordered")),
            Self::Earlier { may_be, .. } if !may_be(caller) => {
                Err(Wrong::foreign("a tenant that has no such key"))
            }
            Self::Earlier { .. } => Ok(()),
        }
    }

    fn finished(&self, said: &FinishedAttempt) -> Result<(), Wrong> {
        self.share(&said.caller)?;
        let Self::Earlier { model, .. } = self else { return Ok(()) };
        let Some(model) = model else {
            let what = "an earlier gateway's request at a price that is not known any more";
            return Err(Wrong { what, voids: true, excused: true });
        };
        if said.usage.reference > most_for_strangers(model, &said.usage) {
            return Err(Wrong::void("more reference cost than its tokens can cause"));
        }
        Ok(())
    }
}

impl Placement {
    /// Notes how many tokens have come.
    pub(super) fn streamed(&mut self, tokens: u64) {
        self.streamed = tokens;
    }

    /// Notes the worker's last word. The journal may have told the end first.
    pub(super) fn heard(&self, usage: Usage) -> Result<(), &'static str> {
        let mut book = self.orders.lock();
        let Some(order) = book.orders.get_mut(&self.attempt) else { return Ok(()) };
        order.heard = Some(usage);
        match order.told {
            Some((_, told)) if told != usage => Err("another usage than it has journalled"),
            _ => Ok(()),
        }
    }

    /// Nothing was done for it: whatever is told of it is untrue.
    pub(super) fn refused(&self) {
        self.orders.lock().orders.remove(&self.attempt);
    }
}

impl Drop for Placement {
    fn drop(&mut self) {
        let mut book = self.orders.lock();
        let Some(order) = book.orders.get_mut(&self.attempt) else { return };
        order.ended = true;
        order.streamed = self.streamed;
        if order.told.is_some() {
            book.orders.remove(&self.attempt);
        } else {
            book.ended.push_back(self.attempt.clone());
            book.keep_bounded();
        }
    }
}
