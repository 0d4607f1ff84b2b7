//! The window: the lines that are on workers at once, shared between tenants in turn.
//!
//! [`Window`] decides and does no I/O; [`SharedWindow`] hands its permits to the tasks of
//! batches. Each batch asks for one line at a time.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;
use tollgate_domain::{TenantId, UtcTime};

use crate::ids::BatchId;
use crate::quota::{QuotaScope, ScopedQuotas};

/// A batch that asks for a line on a worker.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    pub(super) batch: BatchId,
    pub(super) tenant: TenantId,
    /// The end of the batch: a tenant's earliest end comes first.
    pub(super) expires: UtcTime,
    pub(super) quotas: Vec<ScopedQuotas>,
    pub(super) company: Company,
}

/// The lines that may run beside a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Company {
    /// Others.
    Others,
    /// None: the line has lost two workers.
    Alone,
}

/// A right to one line on a worker.
#[derive(Clone, Debug)]
struct Grant {
    batch: BatchId,
    tenant: TenantId,
    scopes: Vec<QuotaScope>,
    company: Company,
}

/// Lines on workers, and the batches that ask. Bounded by the batches that are held.
#[derive(Default)]
struct Window {
    asks: Vec<Ask>,
    scopes: HashMap<QuotaScope, HashMap<BatchId, u64>>,
    /// The turn in which a tenant was last served. A tenant without an entry has just come.
    tenants: BTreeMap<TenantId, u64>,
    /// The turn in which a batch was last served.
    batches: BTreeMap<BatchId, u64>,
    turn: u64,
    in_flight: usize,
    runs_alone: bool,
}

impl Window {
    fn ask(&mut self, ask: Ask) {
        // A newcomer comes after those that wait.
        self.tenants.entry(ask.tenant.clone()).or_insert(self.turn);
        self.asks.push(ask);
    }

    fn withdraw(&mut self, batch: BatchId) {
        self.asks.retain(|ask| ask.batch != batch);
    }

    /// Grants the next line, if there is room for one.
    fn next(&mut self, capacity: usize) -> Option<Grant> {
        if self.runs_alone || self.in_flight >= capacity {
            return None;
        }
        let allowed = |ask: &&Ask| {
            ask.quotas.iter().all(|scoped| {
                let lines = self.scopes.get(&scoped.scope);
                let in_flight = lines.map_or(0, |lines| lines.values().sum());
                let others = lines.map_or(0, |lines| {
                    // The batch itself is left out: a batch that runs already takes no second
                    // place.
                    lines.keys().filter(|batch| **batch != ask.batch).count() as u64
                });
                in_flight < scoped.quotas.in_flight && others < scoped.quotas.running
            })
        };
        let turn_of = |ask: &&Ask| {
            let tenant = self.tenants.get(&ask.tenant).copied();
            let batch = self.batches.get(&ask.batch).copied();
            // The tenant's turn comes before the end of the batch: else a tenant with urgent
            // batches would hold up all others.
            (tenant, ask.tenant.clone(), ask.expires, batch)
        };
        let ask = self.asks.iter().filter(allowed).min_by_key(turn_of)?;
        if ask.company == Company::Alone && self.in_flight > 0 {
            // Nothing begins until the lines that run have ended.
            return None;
        }
        let grant = Grant {
            batch: ask.batch,
            tenant: ask.tenant.clone(),
            scopes: ask.quotas.iter().map(|scoped| scoped.scope.clone()).collect(),
            company: ask.company,
        };
        self.withdraw(grant.batch);
        self.turn += 1;
        self.tenants.insert(grant.tenant.clone(), self.turn);
        self.batches.insert(grant.batch, self.turn);
        for scope in &grant.scopes {
            *self.scopes.entry(scope.clone()).or_default().entry(grant.batch).or_default() += 1;
        }
        self.in_flight += 1;
        self.runs_alone = grant.company == Company::Alone;
        Some(grant)
    }

    fn release(&mut self, grant: &Grant) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.runs_alone &= grant.company == Company::Others;
        for scope in &grant.scopes {
            let Some(lines) = self.scopes.get_mut(scope) else { continue };
            if let Some(count) = lines.get_mut(&grant.batch) {
                *count -= 1;
            }
            lines.retain(|_, count| *count > 0);
            if lines.is_empty() {
                self.scopes.remove(scope);
            }
        }
    }

    /// Forgets a batch that is not held any more.
    fn forget(&mut self, batch: BatchId, tenant: &TenantId) {
        self.withdraw(batch);
        self.batches.remove(&batch);
        // A tenant with asks keeps its turn: no turn sorts before every turn, so it would be served
        // first.
        if !self.asks.iter().any(|ask| ask.tenant == *tenant) {
            self.tenants.remove(tenant);
        }
    }
}

/// Lines on workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InFlightLines(pub(crate) u64);

/// The window of one dispatcher. Clones share it.
#[derive(Clone)]
pub(super) struct SharedWindow {
    state: Arc<Mutex<WindowState>>,
    capacity: Arc<dyn Fn(InFlightLines) -> usize + Send + Sync>,
}

#[derive(Default)]
struct WindowState {
    window: Window,
    waiting: HashMap<BatchId, oneshot::Sender<Permit>>,
}

/// A permit for one line on a worker; a drop gives it back.
pub(super) struct Permit {
    grant: Grant,
    window: SharedWindow,
}

impl SharedWindow {
    /// Makes a window. `capacity` hears the lines on workers and returns the most.
    pub(super) fn new(capacity: impl Fn(InFlightLines) -> usize + Send + Sync + 'static) -> Self {
        Self { state: Arc::default(), capacity: Arc::new(capacity) }
    }

    /// Asks for a line. A batch asks once at a time; a dropped receiver gives the permit
    /// back.
    pub(super) fn ask(&self, ask: Ask) -> oneshot::Receiver<Permit> {
        let (sender, receiver) = oneshot::channel();
        let mut state = self.lock();
        state.waiting.insert(ask.batch, sender);
        state.window.ask(ask);
        drop(state);
        self.grant();
        receiver
    }

    /// Ends the ask of a batch.
    pub(super) fn withdraw(&self, batch: BatchId) {
        let mut state = self.lock();
        state.waiting.remove(&batch);
        state.window.withdraw(batch);
        drop(state);
        // The batch may have been the one for which the others waited.
        self.grant();
    }

    /// Forgets a batch that is not held any more.
    pub(super) fn forget(&self, batch: BatchId, tenant: &TenantId) {
        self.withdraw(batch);
        self.lock().window.forget(batch, tenant);
    }

    /// Grants as many lines as there is room for.
    pub(super) fn grant(&self) {
        loop {
            let in_flight = InFlightLines(self.lock().window.in_flight as u64);
            // Called without the lock, because the closure takes locks of other parts.
            let capacity = (self.capacity)(in_flight);
            let mut state = self.lock();
            let Some(grant) = state.window.next(capacity) else { return };
            let waiting = state.waiting.remove(&grant.batch);
            // A permit locks the window when it is dropped.
            drop(state);
            let permit = Permit { grant, window: self.clone() };
            if let Some(waiting) = waiting {
                // A batch that has left drops the permit.
                let _ = waiting.send(permit);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, WindowState> {
        // The window is consistent after each of its methods.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Permit {
    /// Returns the lines that may run beside the line.
    pub(super) fn company(&self) -> Company {
        self.grant.company
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.window.lock().window.release(&self.grant);
        self.window.grant();
    }
}

#[cfg(test)]
mod tests {
    use tollgate_domain::{PlanName, PoolName};

    use super::*;
    use crate::quota::Quotas;

    fn tenant(name: &str) -> TenantId {
        TenantId::new(name).expect("a name")
    }

    fn ask(batch: u128, name: &str, expires: u64) -> Ask {
        let quotas = ScopedQuotas {
            scope: QuotaScope::Tenant(tenant(name)),
            plan: PlanName::new("team").expect("a name"),
            quotas: Quotas { in_flight: 3, running: 2, ..Quotas::default() },
        };
        Ask {
            batch: BatchId::from_random(batch),
            tenant: tenant(name),
            expires: UtcTime(expires),
            quotas: vec![quotas],
            company: Company::Others,
        }
    }

    fn granted(window: &mut Window, capacity: usize) -> Option<(u128, Grant)> {
        window.next(capacity).map(|grant| (grant.batch.bits(), grant))
    }

    #[test]
    fn window_serves_tenants_in_turn() {
        let mut window = Window::default();
        window.ask(ask(1, "acme", 10));
        window.ask(ask(2, "acme", 20));
        window.ask(ask(3, "beta", 90));
        let mut order = Vec::new();
        while let Some((batch, _)) = granted(&mut window, 100) {
            order.push(batch);
            if order.len() < 6 {
                let name = if batch == 3 { "beta" } else { "acme" };
                window.ask(ask(batch, name, if batch == 3 { 90 } else { 10 * batch as u64 }));
            }
        }
        // Three lines in flight are the quota of each tenant.
        assert_eq!(order, [1, 3, 1, 3, 1, 3]);
    }

    #[test]
    fn window_shares_equal_ends_in_turn() {
        let mut window = Window::default();
        for batch in [1, 2] {
            window.ask(ask(batch, "acme", 10));
        }
        let (first, _) = granted(&mut window, 9).expect("room");
        window.ask(ask(first, "acme", 10));
        let (second, _) = granted(&mut window, 9).expect("room");
        assert_ne!(first, second);
    }

    #[test]
    fn window_keeps_capacity_and_quotas() {
        let mut window = Window::default();
        (1..=3).for_each(|batch| window.ask(ask(batch, "acme", batch as u64)));
        let (_, first) = granted(&mut window, 2).expect("room");
        granted(&mut window, 2).expect("room");
        assert!(granted(&mut window, 2).is_none(), "the window is full");
        assert!(granted(&mut window, 9).is_none(), "a third batch would run");
        window.release(&first);
        assert_eq!(granted(&mut window, 2).expect("room").0, 3);
    }

    #[test]
    fn window_counts_pool_over_its_tenants() {
        let mut window = Window::default();
        let pooled = |batch, name| {
            let mut ask = ask(batch, name, 1);
            let mut pool = ask.quotas[0].clone();
            pool.scope = QuotaScope::Pool(PoolName::new("trial").expect("a name"));
            pool.quotas.in_flight = 1;
            ask.quotas.push(pool);
            ask
        };
        window.ask(pooled(1, "acme"));
        window.ask(pooled(2, "beta"));
        let (_, grant) = granted(&mut window, 9).expect("room");
        assert!(granted(&mut window, 9).is_none());
        window.release(&grant);
        assert!(granted(&mut window, 9).is_some());
    }

    #[test]
    fn window_runs_a_line_alone() {
        let mut window = Window::default();
        window.ask(ask(1, "acme", 1));
        let (_, beside) = granted(&mut window, 9).expect("room");
        window.ask(Ask { company: Company::Alone, ..ask(2, "abba", 1) });
        window.ask(ask(1, "acme", 1));
        assert!(granted(&mut window, 9).is_none(), "another line still runs");
        window.release(&beside);
        let (batch, alone) = granted(&mut window, 9).expect("no line runs");
        assert_eq!((batch, alone.company), (2, Company::Alone));
        assert!(granted(&mut window, 9).is_none(), "the line is alone");
        window.release(&alone);
        assert_eq!(granted(&mut window, 9).expect("room").0, 1);
    }

    #[test]
    fn window_gives_dropped_permits_back() {
        let window = SharedWindow::new(|_| 1);
        drop(window.ask(ask(1, "acme", 1)));
        let mut second = window.ask(ask(2, "beta", 1));
        let permit = second.try_recv().expect("the first permit came back");
        let mut third = window.ask(ask(3, "acme", 1));
        assert!(third.try_recv().is_err());
        drop(permit);
        assert!(third.try_recv().is_ok());
    }
}
