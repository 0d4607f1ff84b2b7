//! The queue for host work: parsing, rendering and tokenizing. The owner of
//! device shares that has used the least time here is served next, so that an
//! owner with dear prompts waits behind its own prompts and not in front of
//! others. A request waits for a bounded time. The front door bounds how many
//! wait: each has its body in the budget of bodies until it is tokenized.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::error::{FullQueue, Refusal, RequestError};
use crate::limits::ShareOwner;

/// Owners without work that are remembered because they are ahead of the floor.
const MOST_IDLE: usize = 1_024;

/// A fair queue in front of the threads for host work. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct FairQueue {
    schedule: Arc<Mutex<Schedule<oneshot::Sender<Slot>>>>,
}

/// The right to work on one thread. The drop ends the work and charges its time to
/// the owner.
#[derive(Debug)]
pub(super) struct Slot {
    queue: FairQueue,
    owner: ShareOwner,
    began: Instant,
}

impl FairQueue {
    pub(super) fn new(slots: usize) -> Self {
        Self { schedule: Arc::new(Mutex::new(Schedule::new(slots))) }
    }

    /// Waits up to `timeout` for the turn of `owner` and returns a slot.
    ///
    /// # Errors
    /// The turn has not come.
    pub(super) async fn acquire(
        &self,
        owner: &ShareOwner,
        timeout: Duration,
    ) -> Result<Slot, RequestError> {
        let (grant, granted) = oneshot::channel();
        let ticket = self.lock().enter(owner, grant);
        // Made before the dispatch: a client that leaves from here on also leaves the queue.
        let _waiter = Waiter { queue: self, owner, ticket };
        self.dispatch();
        match tokio::time::timeout(timeout, granted).await {
            // The schedule drops no grant while its waiter lives, so this error does not happen.
            Ok(granted) => granted.map_err(|_| RequestError::INTERNAL),
            Err(_) => Err(no_turn()),
        }
    }

    /// Returns the number of requests that wait.
    pub(super) fn waiting(&self) -> usize {
        self.lock().waiting
    }

    /// Gives the free slots to the requests that are next.
    #[expect(clippy::disallowed_methods, reason = "the time of the work is measured")]
    fn dispatch(&self) {
        // A slot is sent outside the lock, because its drop takes the lock.
        while let Some((owner, grant)) = { self.lock().next() } {
            let slot = Slot { queue: self.clone(), owner, began: Instant::now() };
            // A client that has left drops the slot, which serves the next request.
            let _ = grant.send(slot);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Schedule<oneshot::Sender<Slot>>> {
        // Every change is complete before a panic could happen.
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the refusal of a request whose turn has not come in time.
pub(super) fn no_turn() -> RequestError {
    let retry_after = Some(Duration::from_secs(1));
    Refusal::Overloaded { full: FullQueue::Tokenizing, retry_after }.into()
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.queue.lock().finish(&self.owner, self.began.elapsed());
        self.queue.dispatch();
    }
}

/// A request that waits. Dropping the waiter removes the request from the queue.
struct Waiter<'a> {
    queue: &'a FairQueue,
    owner: &'a ShareOwner,
    ticket: u64,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        // Dropped after the lock is released, because a grant may hold a slot.
        let _grant = self.queue.lock().leave(self.owner, self.ticket);
    }
}

/// The decision which request works next. `G` is the grant that a request waits for.
#[derive(Debug)]
struct Schedule<G> {
    slots: usize,
    running: usize,
    waiting: usize,
    owners: HashMap<ShareOwner, OwnerState<G>>,
    /// Owners that may take a slot, by used time and the ticket of their first request.
    ready: BTreeMap<(Duration, u64), ShareOwner>,
    /// Owners without work, by used time and number. Those behind the floor are forgotten.
    idle: BTreeMap<(Duration, u64), ShareOwner>,
    /// The time used by the owner that was served last. An owner that was idle starts
    /// here: being idle earns no credit.
    floor: Duration,
    next_ticket: u64,
}

#[derive(Debug)]
struct OwnerState<G> {
    /// Ticket of the request with which the owner came. No two owners share it.
    number: u64,
    /// Host time used, at least the floor of the moment when the owner came.
    used: Duration,
    running: usize,
    /// Waiting requests in the order of arrival.
    waiting: BTreeMap<u64, G>,
}

/// The index of a schedule that holds an owner, with its key there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Ready((Duration, u64)),
    Idle((Duration, u64)),
    /// In neither: the owner works and may not take another slot.
    Busy,
}

impl<G> Schedule<G> {
    fn new(slots: usize) -> Self {
        Self {
            slots,
            running: 0,
            waiting: 0,
            owners: HashMap::new(),
            ready: BTreeMap::new(),
            idle: BTreeMap::new(),
            floor: Duration::ZERO,
            next_ticket: 0,
        }
    }

    /// Adds a request of `name` to the queue and returns its ticket.
    fn enter(&mut self, name: &ShareOwner, grant: G) -> u64 {
        self.next_ticket += 1;
        let (ticket, floor) = (self.next_ticket, self.floor);
        if !self.owners.contains_key(name) {
            let owner =
                OwnerState { number: ticket, used: floor, running: 0, waiting: BTreeMap::new() };
            self.owners.insert(name.clone(), owner);
        }
        self.update(name, |owner| {
            if owner.is_idle() {
                owner.used = owner.used.max(floor);
            }
            owner.waiting.insert(ticket, grant);
        });
        self.waiting += 1;
        ticket
    }

    /// Removes a request that still waits, and returns its grant.
    fn leave(&mut self, name: &ShareOwner, ticket: u64) -> Option<G> {
        let grant = self.update(name, |owner| owner.waiting.remove(&ticket))??;
        self.waiting -= 1;
        self.forget();
        Some(grant)
    }

    /// Takes a slot for the request that is next, if there are both.
    fn next(&mut self) -> Option<(ShareOwner, G)> {
        if self.running >= self.slots {
            return None;
        }
        let (&(used, _), name) = self.ready.first_key_value()?;
        let name = name.clone();
        let (_, grant) = self.update(&name, |owner| {
            owner.running += 1;
            owner.waiting.pop_first()
        })??;
        self.floor = self.floor.max(used);
        self.waiting -= 1;
        self.running += 1;
        self.forget();
        Some((name, grant))
    }

    /// Ends a piece of work of `name` that took `elapsed`.
    fn finish(&mut self, name: &ShareOwner, elapsed: Duration) {
        self.running -= 1;
        self.update(name, |owner| {
            owner.running -= 1;
            owner.used = owner.used.saturating_add(elapsed);
        });
        self.forget();
    }

    /// Changes an owner and moves it to its new place in the indexes. Returns `None` if
    /// there is no such owner.
    fn update<R>(
        &mut self,
        name: &ShareOwner,
        change: impl FnOnce(&mut OwnerState<G>) -> R,
    ) -> Option<R> {
        // One slot is always left for the other owners, so that they need not wait for
        // the end of a long piece of work.
        let most = (self.slots - 1).max(1);
        let owner = self.owners.get_mut(name)?;
        let before = owner.place(most);
        let result = change(owner);
        let after = owner.place(most);
        // An owner that was just created is in no index yet, so nothing may be there.
        match before {
            Place::Ready(key) => _ = self.ready.remove(&key),
            Place::Idle(key) => _ = self.idle.remove(&key),
            Place::Busy => {}
        }
        match after {
            Place::Ready(key) => _ = self.ready.insert(key, name.clone()),
            Place::Idle(key) => _ = self.idle.insert(key, name.clone()),
            Place::Busy => {}
        }
        Some(result)
    }

    /// Forgets the idle owners that owe nothing, and everything if all are idle. If too
    /// many owe time, those that owe the least are forgotten.
    fn forget(&mut self) {
        if self.running == 0 && self.waiting == 0 {
            self.owners.clear();
            self.ready.clear();
            self.idle.clear();
            self.floor = Duration::ZERO;
            return;
        }
        while let Some((&(used, number), name)) = self.idle.first_key_value()
            && (used <= self.floor || self.idle.len() > MOST_IDLE)
        {
            self.owners.remove(name);
            self.idle.remove(&(used, number));
        }
    }
}

impl<G> OwnerState<G> {
    fn is_idle(&self) -> bool {
        self.running == 0 && self.waiting.is_empty()
    }

    /// Returns the place of the owner if it may have `most` slots.
    fn place(&self, most: usize) -> Place {
        match self.waiting.first_key_value() {
            Some((&ticket, _)) if self.running < most => Place::Ready((self.used, ticket)),
            None if self.running == 0 => Place::Idle((self.used, self.number)),
            _ => Place::Busy,
        }
    }
}

#[cfg(test)]
mod tests {
    use tollgate_domain::{PoolName, TenantId};

    use super::*;

    fn tenant(name: &str) -> ShareOwner {
        ShareOwner::Tenant(TenantId::new(name).expect("a name"))
    }

    /// Runs every task that is ready.
    async fn settle() {
        for _ in 0..1_000 {
            tokio::task::yield_now().await;
        }
    }

    /// Lets a tenant with dear prompts and one with cheap prompts work for a while on a
    /// counted clock. Returns the pieces of work of the cheap one. `charge` is the time
    /// that the queue learns of a piece.
    fn cheap_pieces(charge: impl Fn(Duration) -> Duration) -> usize {
        const DEAR: Duration = Duration::from_millis(20);
        const CHEAP: Duration = Duration::from_micros(500);
        let mut schedule = Schedule::new(1);
        for name in ["mallory", "acme"] {
            for _ in 0..8 {
                schedule.enter(&tenant(name), ());
            }
        }
        let (mut clock, mut pieces) = (Duration::ZERO, 0);
        while clock < Duration::from_secs(4) {
            let (name, ()) = schedule.next().expect("both always wait");
            let elapsed = if name == tenant("mallory") { DEAR } else { CHEAP };
            pieces += usize::from(name == tenant("acme"));
            clock += elapsed;
            schedule.finish(&name, charge(elapsed));
            schedule.enter(&name, ());
        }
        pieces
    }

    #[test]
    fn fair_queue_shares_time_not_turns() {
        // Half of four seconds is four thousand cheap pieces.
        let fair = cheap_pieces(|elapsed| elapsed);
        assert!((3_900..=4_100).contains(&fair), "{fair}");
        // The control: with one turn each, the dear prompts take nearly all the time.
        let turns = cheap_pieces(|_| Duration::from_millis(1));
        assert!(turns < 250, "{turns}");
    }

    #[test]
    fn fair_queue_remembers_debt_and_gives_no_credit() {
        let mut schedule = Schedule::new(1);
        let second = Duration::from_secs(1);
        schedule.enter(&tenant("acme"), ());
        schedule.enter(&tenant("mallory"), ());
        assert_eq!(schedule.next().expect("acme came first").0, tenant("acme"));
        schedule.enter(&tenant("acme"), ());
        schedule.finish(&tenant("acme"), second);
        assert_eq!(schedule.next().expect("mallory has used less").0, tenant("mallory"));
        schedule.finish(&tenant("mallory"), 10 * second);
        // Leaving does not forgive mallory's ten seconds.
        schedule.enter(&tenant("mallory"), ());
        schedule.enter(&tenant("newcomer"), ());
        for expected in ["newcomer", "acme"] {
            let (name, ()) = schedule.next().expect("two wait");
            assert_eq!(name, tenant(expected));
            schedule.finish(&name, second);
        }
        // The newcomer began at the time of the others and has no credit to spend.
        assert_eq!(schedule.next().expect("mallory waits").0, tenant("mallory"));
        schedule.finish(&tenant("mallory"), second);
        assert!(schedule.owners.is_empty(), "an idle queue remembers no one");
    }

    #[test]
    fn fair_queue_forgets_owners_that_left() {
        const BUSY: Duration = Duration::from_millis(1);
        const SHORT: Duration = Duration::from_micros(1);
        let mut schedule = Schedule::new(2);
        schedule.enter(&tenant("busy"), ());
        assert!(schedule.next().is_some());
        let mut most = 0;
        for number in 0..10_000 {
            schedule.enter(&tenant(&format!("owner-{number}")), ());
            schedule.enter(&tenant("busy"), ());
            let (name, ()) = schedule.next().expect("a free slot");
            assert_ne!(name, tenant("busy"));
            schedule.finish(&name, SHORT);
            schedule.finish(&tenant("busy"), BUSY);
            assert_eq!(schedule.next().expect("a free slot").0, tenant("busy"));
            most = most.max(schedule.owners.len());
        }
        assert!(most <= 2, "{most} owners");
        // The floor stays while one long piece of work runs, but the number is bounded.
        for number in 0..10_000 {
            schedule.enter(&tenant(&format!("owner-{number}")), ());
            let (name, ()) = schedule.next().expect("a free slot");
            schedule.finish(&name, SHORT);
        }
        assert_eq!(schedule.owners.len(), MOST_IDLE + 1);
        assert_eq!(schedule.idle.len(), MOST_IDLE);
        schedule.finish(&tenant("busy"), BUSY);
        assert!(schedule.owners.is_empty() && schedule.idle.is_empty());
    }

    #[test]
    fn fair_queue_separates_pool_and_tenant_by_kind() {
        let pool = ShareOwner::Pool(PoolName::new("acme").expect("a name"));
        for (other, expected) in [(tenant("acme"), &pool), (pool.clone(), &tenant("acme"))] {
            let mut schedule = Schedule::new(1);
            schedule.enter(&other, ());
            schedule.next().expect("a free slot");
            schedule.enter(&other, ());
            schedule.enter(expected, ());
            schedule.finish(&other, Duration::from_secs(1));
            let (next, ()) = schedule.next().expect("a free slot");
            assert_eq!(&next, expected, "the time of one is no debt of the other");
        }
    }

    #[test]
    fn fair_queue_leaves_a_slot_for_others() {
        let mut schedule = Schedule::new(2);
        for _ in 0..2 {
            schedule.enter(&tenant("mallory"), ());
        }
        assert!(schedule.next().is_some());
        assert!(schedule.next().is_none(), "the second slot is for another owner");
        schedule.enter(&tenant("acme"), ());
        assert_eq!(schedule.next().expect("a free slot").0, tenant("acme"));
    }

    #[tokio::test]
    async fn fair_queue_serves_second_owner_next() {
        let queue = FairQueue::new(1);
        let order = Arc::new(Mutex::new(Vec::new()));
        let first = queue.acquire(&tenant("mallory"), LONG).await.unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        let enter = |name: &'static str, tasks: &mut tokio::task::JoinSet<()>| {
            let (queue, order) = (queue.clone(), Arc::clone(&order));
            tasks.spawn(async move {
                let _slot = queue.acquire(&tenant(name), LONG).await.unwrap();
                order.lock().unwrap().push(name);
            });
        };
        for _ in 0..100 {
            enter("mallory", &mut tasks);
        }
        settle().await;
        enter("acme", &mut tasks);
        settle().await;
        drop(first);
        tasks.join_all().await;
        let order = order.lock().unwrap();
        let place = order.iter().position(|name| *name == "acme").unwrap();
        assert!(place <= 1, "{place} prompts of the other owner came first");
        assert_eq!(order.len(), 101);
        assert!(queue.lock().owners.is_empty(), "owners without a request are forgotten");
        assert_eq!(queue.waiting(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn fair_queue_refuses_after_the_timeout() {
        let queue = FairQueue::new(1);
        let held = queue.acquire(&tenant("mallory"), LONG).await.unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..10_000 {
            let queue = queue.clone();
            tasks.spawn(async move { queue.acquire(&tenant("mallory"), LONG).await.map(drop) });
        }
        settle().await;
        let hurried = queue.acquire(&tenant("acme"), LONG / 2).await;
        let Err(RequestError::Refused(refused)) = hurried else { panic!("no slot is free") };
        assert!(
            matches!(refused, Refusal::Overloaded { full: FullQueue::Tokenizing, .. }),
            "{refused:?}"
        );
        // However many wait, each of them has its turn.
        assert_eq!(queue.waiting(), 10_000, "a request that leaves makes room");
        drop(held);
        assert!(tasks.join_all().await.into_iter().all(|taken| taken.is_ok()));
        assert_eq!(queue.waiting(), 0);
    }

    const LONG: Duration = Duration::from_secs(60);
}
