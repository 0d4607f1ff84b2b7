//! The gateway's process in a simulation: the real settlement, ledger and
//! admission, and requests that act as the tasks of real requests do.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tollgate_admission::{
    Admission, AdmissionOptions, Estimate, Hold, HoldState, MoneyEstimate, Requester, Reserve,
    ResolveError, Resolved, Scope, ScopeLimits, Spent,
};
use tollgate_config::{Config, LiveConfig};
use tollgate_domain::block::Attempt;
use tollgate_domain::{
    Block, Caller, DeviceNanos, KeyId, RequestId, SamplingDefaults, TenantId, Tier, Usage, UtcTime,
    WorkerEpoch,
};
use tollgate_ledger::{
    FaultCap, Health, Ledger, LedgerHandle, LedgerOptions, LedgerReader, ManualLedger, Posted,
};
use tollgate_text::Tokenizer;
use tollgate_wire::v1::{self, JournalAck, JournalBlock};

use super::facts::Facts;
use super::worker::{DAWN, MS, Wanted, cost, device, model_name, worker_name};
use super::world::GatewayMessage;
use tollgate_serving::in_flight::{InFlight, InFlightTask};
use tollgate_serving::limits::Limits;
use tollgate_serving::model::{BuiltTokenizer, ServedModel};
use tollgate_serving::observer::NoObserver;
use tollgate_serving::orders::{Placement, Terms};
use tollgate_serving::settlement::{ReadThread, Settlement, SettlementOptions};
use tollgate_serving::test_support::{TOKENIZER, TestKeys, connected_worker};
use tollgate_serving::worker_identity::{ProtocolViolations, Trust, WorkerError, WorkerIdentity};
use tollgate_serving::workers::ConnectedWorker;
use tollgate_serving::{Clock, KeyDirectory};

/// The device time that a tenant may spend in the day of a run.
pub(super) const CAP_NS: u64 = 60 * MS;
const PLANS: &str = r#"
[plans.open]
device_time_per_day = "60ms"
concurrent = 3
queued = 4
[tenants.acme]
plan = "open"
[tenants.other]
plan = "open"
"#;
const MOST_ATTEMPTS: u32 = 3;
/// A request's deadline with its grace, and the deadline of its wait.
const LIFE: Duration = Duration::from_secs(60);
const QUEUE: Duration = Duration::from_secs(20);

/// The state that outlives gateways.
pub(super) struct Gateways {
    model: Arc<ServedModel>,
    config: Arc<Config>,
    keys: Arc<dyn KeyDirectory>,
    violations: ProtocolViolations,
    lives: u64,
    asked: Vec<(TenantId, RequestId)>,
}

/// A running gateway.
pub(super) struct Gateway {
    pub(super) life: u64,
    pub(super) process: u64,
    clock: Clock,
    settlement: Settlement,
    admission: Admission,
    config: Arc<Config>,
    model: Arc<ServedModel>,
    in_flight: InFlight,
    trust: Trust,
    handle: LedgerHandle,
    ledger: ManualLedger,
    following: JoinSet<TaskEnd>,
    faults: JoinSet<()>,
    requests: Vec<Request>,
    /// True once a worker was connected to this gateway.
    pub(super) has_model: bool,
}

/// The end of a task.
pub(super) enum TaskEnd {
    Followed(u64, WorkerError),
    Done,
}

/// The next step of a request.
pub(super) enum Next {
    Wait,
    Send(GatewayMessage),
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    Running,
    Done,
    /// The request's task was lost with its hold.
    Forgotten,
}

struct Request {
    id: RequestId,
    tenant: usize,
    order: Wanted,
    expected: u64,
    hold: Option<Hold>,
    open: Option<InFlightTask>,
    placement: Option<Placement>,
    number: u32,
    connection: u64,
    reported: Usage,
    is_streamed: bool,
    leaving: bool,
    expired: bool,
    /// The time since which the request waits for a worker.
    waits: Instant,
    state: State,
}

impl Gateways {
    pub(super) fn new() -> Self {
        static SHARED: OnceLock<(Arc<ServedModel>, Arc<Config>)> = OnceLock::new();
        let (model, config) = SHARED.get_or_init(|| {
            let config = Config::from_toml(Path::new("simulation.toml"), PLANS).expect("a config");
            (served_model(), Arc::new(config))
        });
        Self {
            model: Arc::clone(model),
            config: Arc::clone(config),
            keys: Arc::new(TestKeys::default()),
            violations: ProtocolViolations::default(),
            lives: 0,
            asked: Vec::new(),
        }
    }

    pub(super) fn model(&self) -> &ServedModel {
        &self.model
    }

    pub(super) fn violations(&self) -> u64 {
        self.violations.count()
    }

    /// Starts process `process` at `now`, in milliseconds, on a ledger.
    pub(super) fn start(
        &mut self,
        process: u64,
        ledger: LedgerOptions,
        now: u64,
    ) -> Result<Gateway, tollgate_ledger::LedgerError> {
        let options = LedgerOptions { queue: 256, group: 64, ..ledger };
        let (handle, ledger) = Ledger::open_manual(options)?;
        let clock = Clock::simulated(Instant::now(), UtcTime(DAWN.0 + now * MS));
        let today = clock.utc().day();
        let spending = handle.reader().spending(today)?;
        let admission = Admission::new(AdmissionOptions::default());
        let config = LiveConfig::new(Arc::clone(&self.config));
        let limits = Limits::new(admission.clone(), config, Arc::clone(&self.keys));
        limits.restore_spend(spending, today);
        let in_flight = InFlight::default();
        let settlement = Settlement::new(SettlementOptions {
            ledger: handle.clone(),
            in_flight: in_flight.clone(),
            clock: clock.clone(),
            limits,
            observer: Arc::new(NoObserver),
            stopping: CancellationToken::new(),
            number: None,
            reads: ReadThread::Caller,
        });
        let mut following = JoinSet::new();
        let left = settlement.clone();
        following.spawn(async move {
            left.close_left_open().await;
            TaskEnd::Done
        });
        self.lives += 1;
        Ok(Gateway {
            life: self.lives,
            process,
            clock,
            settlement,
            admission,
            config: Arc::clone(&self.config),
            model: Arc::clone(&self.model),
            in_flight,
            trust: Trust::new(self.violations.clone()),
            handle,
            ledger,
            following,
            faults: JoinSet::new(),
            requests: Vec::new(),
            has_model: false,
        })
    }

    pub(super) fn remember(&mut self, tenant: usize, id: RequestId) {
        self.asked.push((caller(tenant).tenant, id));
    }

    /// Returns every request that was sent.
    pub(super) fn asked(&self) -> &[(TenantId, RequestId)] {
        &self.asked
    }

    pub(super) fn online(&self, epoch: WorkerEpoch, gateway: &Gateway) -> Arc<ConnectedWorker> {
        let identity = WorkerIdentity {
            is_shared: false,
            name: worker_name(),
            epoch,
            class: device().class,
            device: "simulated".to_owned(),
            models: [(model_name(), Arc::clone(&self.model))].into(),
            trust: gateway.trust.clone(),
        };
        connected_worker(Arc::new(identity), gateway.settlement.orders())
    }
}

impl Gateway {
    pub(super) fn follow_journal(
        &mut self,
        number: u64,
        online: Arc<ConnectedWorker>,
        blocks: ReceiverStream<Result<JournalBlock, tonic::Status>>,
        acks: mpsc::Sender<JournalAck>,
        taken: Arc<AtomicBool>,
    ) -> AbortHandle {
        let settlement = self.settlement.clone();
        self.following.spawn(async move {
            let taken = || taken.store(true, Ordering::Relaxed);
            match settlement.ingest(&online.identity, blocks, acks, taken).await {
                Err(error) => TaskEnd::Followed(number, error),
            }
        })
    }

    pub(super) fn ended_task(&mut self) -> Option<TaskEnd> {
        while self.faults.try_join_next().is_some() {}
        loop {
            match self.following.try_join_next()? {
                Ok(TaskEnd::Done) => {}
                Ok(ended) => return Some(ended),
                Err(error) if error.is_cancelled() => {}
                Err(error) => std::panic::resume_unwind(error.into_panic()),
            }
        }
    }

    /// Wakes the ledger's thread and returns the milliseconds that it sleeps next.
    pub(super) fn commit(&mut self) -> u64 {
        self.ledger.tick();
        if self.handle.health() == Health::Healthy { 1 } else { 90 }
    }

    pub(super) fn reader(&self) -> LedgerReader {
        self.handle.reader().clone()
    }

    pub(super) fn post_again(&mut self, block: Block) -> Result<Posted, String> {
        let posted = self.handle.submit(block);
        self.ledger.tick();
        let posted = posted.now_or_never().ok_or("the ledger did not answer")?;
        posted.map_err(|error| error.to_string())
    }

    fn fault(&mut self, index: usize, payable: Usage, facts: &mut Facts) {
        let request = &self.requests[index];
        let attempt = request.attempt();
        facts.capped(&attempt);
        let cap = FaultCap {
            caller: caller(request.tenant),
            attempt,
            model: model_name(),
            class: device().class,
            payable,
            at: self.clock.utc(),
            tier: Tier::Interactive,
        };
        let settlement = self.settlement.clone();
        self.faults.spawn(async move { settlement.cap_fault(cap).await });
    }

    pub(super) fn ask(
        &mut self,
        id: RequestId,
        tenant: usize,
        order: Wanted,
        (is_streamed, is_forgotten): (bool, bool),
    ) -> Option<usize> {
        let caller = caller(tenant);
        let plan = self.config.tenant(&caller.tenant)?.plan.clone()?;
        let table = &self.model.table;
        let with_margin = |cost: u64| DeviceNanos(cost + (cost >> 20) + 1);
        let expected = cost(table, order.prompt, order.most / 2);
        let now = self.clock.now();
        let hold = self.admission.reserve(
            now,
            self.clock.utc(),
            Reserve {
                id: id.clone(),
                requester: Requester { tenant: caller.tenant.clone(), pool: None },
                tier: Tier::Interactive,
                is_line: false,
                scopes: vec![ScopeLimits {
                    scope: Scope::Tenant(caller.tenant.clone()),
                    limits: Arc::clone(&plan.limits),
                    revision: self.config.revision(),
                }],
                counted: 0,
                class: device().class,
                estimate: Estimate {
                    tokens: order.prompt + order.most,
                    most_tokens: order.prompt + order.most,
                    expected: DeviceNanos(expected),
                    most: DeviceNanos(cost(table, order.prompt, order.most)),
                    worst: with_margin(cost(table, order.prompt, order.most)),
                    least: with_margin(cost(table, order.prompt, 1)),
                    grammar_time: Duration::ZERO,
                    money: MoneyEstimate::default(),
                },
                queue_deadline: now.after(QUEUE),
                expires: now.after(LIFE),
            },
        );
        let hold = hold.ok()?;
        let order = Wanted { budget: hold.budget().map(DeviceNanos::nanos), ..order };
        let is_forgotten = is_forgotten && hold.state() == HoldState::Running;
        let (hold, open, state) = if is_forgotten {
            drop(hold);
            (None, None, State::Forgotten)
        } else {
            (Some(hold), Some(self.in_flight.begin(id.clone(), caller)), State::Waiting)
        };
        self.requests.push(Request {
            id,
            tenant,
            order,
            expected,
            hold,
            open,
            placement: None,
            number: 0,
            connection: 0,
            reported: Usage::default(),
            is_streamed,
            leaving: false,
            expired: false,
            waits: Instant::now(),
            state,
        });
        (!is_forgotten).then(|| self.requests.len() - 1)
    }

    /// Moves a request on that waits for its place or for a worker.
    pub(super) fn follow(
        &mut self,
        index: usize,
        place: Option<(u64, Arc<ConnectedWorker>)>,
        facts: &mut Facts,
    ) -> Next {
        let request = &mut self.requests[index];
        if request.state != State::Waiting {
            return Next::Nothing;
        }
        let turn = request.hold.as_ref().and_then(|hold| hold.queue_ticket().now_or_never());
        match (turn, place) {
            (None, _) if request.hold.is_some() => Next::Wait,
            (Some(Ok(())), None) if request.waits.elapsed() < QUEUE => Next::Wait,
            (Some(Ok(())), None) => {
                self.void(index, facts);
                Next::Nothing
            }
            (Some(Ok(())), Some((connection, online))) => {
                let terms = Terms::of(Arc::clone(&self.model), &request.assignment());
                let (attempt, caller) = (request.attempt(), caller(request.tenant));
                let placement = self.settlement.orders().open(
                    attempt.clone(),
                    online.identity.epoch,
                    caller,
                    terms,
                    Instant::now(),
                );
                request.placement = Some(placement);
                request.connection = connection;
                request.reported = Usage::default();
                request.state = State::Running;
                if let Some(open) = &request.open {
                    open.placed(request.number);
                }
                Next::Send(GatewayMessage::Order(request.tenant, attempt, request.order))
            }
            _ => {
                request.end();
                Next::Nothing
            }
        }
    }

    fn running(&mut self, attempt: &Attempt) -> Option<usize> {
        self.requests
            .iter()
            .position(|request| request.state == State::Running && request.attempt() == *attempt)
    }

    pub(super) fn progress(&mut self, attempt: &Attempt, usage: Usage) {
        let Some(index) = self.running(attempt) else { return };
        let request = &mut self.requests[index];
        if let Some(placement) = &mut request.placement {
            placement.streamed(usage.completion_tokens);
        }
        if !request.leaving {
            request.reported = usage;
        }
    }

    /// Handles the last event of an attempt.
    pub(super) fn finished(&mut self, attempt: &Attempt, usage: Usage, facts: &mut Facts) {
        let Some(index) = self.running(attempt) else { return };
        let placement = self.requests[index].placement.take();
        if let Some(Err(what)) = placement.map(|placement| placement.finished(usage)) {
            facts.wrong(format!("{}: an honest event is refused: {what}", attempt.request));
        }
        self.settle(index, &usage, facts);
    }

    pub(super) fn leave(&mut self, index: usize) -> Option<(u64, Attempt)> {
        let now = self.clock.now();
        let request = &mut self.requests[index];
        match request.state {
            State::Waiting => {
                if let Some(hold) = request.hold.take() {
                    let _ = hold.void(now); // the request's turn may have passed
                }
                request.end();
                None
            }
            State::Running => {
                request.leaving = true;
                Some((request.connection, request.attempt()))
            }
            State::Done | State::Forgotten => None,
        }
    }

    /// Ends a request after its worker did not answer a cancel. The whole hold counts.
    pub(super) fn impatient(&mut self, index: usize, number: u32, facts: &mut Facts) {
        let request = &mut self.requests[index];
        if request.state != State::Running || request.number != number {
            return;
        }
        request.placement = None;
        let held = request.order.budget.unwrap_or(request.expected);
        let usage = Usage {
            reference: request.reported.reference.max(DeviceNanos(held)),
            ..request.reported
        };
        self.settle(index, &usage, facts);
    }

    /// Handles a lost connection and returns the requests to place again.
    pub(super) fn lost(&mut self, connection: u64, facts: &mut Facts) -> Vec<usize> {
        let mut again = Vec::new();
        for index in 0..self.requests.len() {
            let request = &mut self.requests[index];
            if request.state != State::Running || request.connection != connection {
                continue;
            }
            request.placement = None;
            let content = request.is_streamed && request.reported.completion_tokens > 0;
            let is_over = request.leaving || content;
            let reported = if content { request.reported } else { Usage::default() };
            self.fault(index, reported, facts);
            let request = &mut self.requests[index];
            if !is_over && request.number + 1 < MOST_ATTEMPTS {
                request.number += 1;
                request.state = State::Waiting;
                request.waits = Instant::now();
                again.push(index);
            } else if content {
                self.settle(index, &reported, facts);
            } else {
                self.void(index, facts);
            }
        }
        again
    }

    fn settle(&mut self, index: usize, usage: &Usage, facts: &mut Facts) {
        let now = self.clock.now();
        let request = &mut self.requests[index];
        let spent =
            Spent { tokens: usage.total_tokens(), reference: usage.reference, ..Spent::default() };
        let Some(hold) = request.hold.take() else {
            return facts.wrong(format!("{} ends twice", request.id));
        };
        match hold.settle(now, spent) {
            Ok(settled) if settled.overrun > DeviceNanos::ZERO => {
                facts.wrong(format!("{} exceeds its budget", request.id));
            }
            Ok(settled) if settled.late != request.expired => {
                facts.wrong(format!("{}: {settled:?}", request.id));
            }
            Ok(_) => {}
            Err(error) => facts.wrong(format!("{}: {error}", request.id)),
        }
        request.end();
        let again = ResolveError::AlreadySettled(Resolved::Posted);
        let id = request.id.clone();
        self.is_over(&id, again, facts);
    }

    fn void(&mut self, index: usize, facts: &mut Facts) {
        let now = self.clock.now();
        let request = &mut self.requests[index];
        let voided = request.hold.take().map(|hold| hold.void(now));
        if !matches!(voided, Some(Ok(_))) {
            facts.wrong(format!("{}: {voided:?}", request.id));
        }
        request.end();
        let again = ResolveError::AlreadySettled(Resolved::Voided);
        let id = request.id.clone();
        self.is_over(&id, again, facts);
    }

    /// Checks that a second resolve changes nothing and reports the first.
    fn is_over(&self, id: &RequestId, expected: ResolveError, facts: &mut Facts) {
        let now = self.clock.now();
        let spent = Spent { tokens: 1, reference: DeviceNanos(1), ..Spent::default() };
        for again in [self.admission.settle(now, id, spent), self.admission.void(now, id)] {
            if again != Err(expected) {
                facts.wrong(format!("{id} resolved again: {again:?}"));
            }
        }
    }

    pub(super) fn sweep(&mut self, facts: &mut Facts) {
        let swept = self.admission.expire(self.clock.now());
        self.in_flight.sweep();
        for request in &mut self.requests {
            request.expired |= swept.expired.contains(&request.id);
            if swept.timed_out.contains(&request.id) {
                request.hold = None;
                request.end();
            }
        }
        let open = self.requests.iter().filter(|request| {
            !request.expired && (request.hold.is_some() || request.state == State::Forgotten)
        });
        let (open, status) = (open.count(), self.admission.status());
        if status.running + status.queued != open {
            facts.wrong(format!("{open} holds are open, {status:?}"));
        }
    }

    pub(super) fn is_at_rest(&mut self) -> bool {
        while self.faults.try_join_next().is_some() {}
        self.faults.is_empty()
            && self
                .requests
                .iter()
                .all(|request| matches!(request.state, State::Done | State::Forgotten))
    }

    /// Checks, long after the last request, that no hold is left and that a late
    /// figure is posted once.
    pub(super) fn end_of_holds(&mut self, facts: &mut Facts) {
        self.sweep(facts);
        let (now, status) = (self.clock.now(), self.admission.status());
        if status.running + status.queued != 0 {
            facts.wrong(format!("holds outlive their life: {status:?}"));
        }
        for request in &self.requests {
            if request.state != State::Forgotten {
                continue;
            }
            let spent = Spent { tokens: 1, reference: DeviceNanos(1), ..Spent::default() };
            let late = self.admission.settle(now, &request.id, spent);
            if !matches!(&late, Ok(settled) if settled.late) {
                facts.wrong(format!("{} comes late: {late:?}", request.id));
            }
            let again = ResolveError::AlreadySettled(Resolved::Posted);
            self.is_over(&request.id, again, facts);
        }
    }
}

impl Request {
    fn attempt(&self) -> Attempt {
        Attempt { request: self.id.clone(), attempt: self.number }
    }

    fn end(&mut self) {
        self.state = State::Done;
        self.open = None;
    }

    fn assignment(&self) -> v1::Assignment {
        let caller = caller(self.tenant);
        v1::Assignment {
            request_id: self.id.as_str().to_owned(),
            attempt: self.number,
            tenant: caller.tenant.as_str().to_owned(),
            key: caller.key.as_str().to_owned(),
            model: model_name().as_str().to_owned(),
            prompts: vec![v1::Prompt { tokens: vec![0; self.order.prompt as usize] }],
            choices: 1,
            max_tokens: self.order.most as u32,
            budget_ns: self.order.budget,
            ..v1::Assignment::default()
        }
    }
}

/// Returns the caller of a tenant's requests, the subject of a token.
pub(super) fn caller(tenant: usize) -> Caller {
    let key = KeyId::new(["jwt:acme", "jwt:other"][tenant]).expect("a name");
    Caller { tenant: tenants()[tenant].clone(), key }
}

pub(super) fn tenants() -> [TenantId; 2] {
    ["acme", "other"].map(|name| TenantId::new(name).expect("a name"))
}

fn served_model() -> Arc<ServedModel> {
    let tokenizer = Tokenizer::from_json(TOKENIZER.as_bytes()).expect("a tokenizer");
    let text = BuiltTokenizer { tokenizer: Arc::new(tokenizer), longest_token: 1 };
    Arc::new(ServedModel {
        defaults: SamplingDefaults::default(),
        name: model_name(),
        hash: String::new(),
        class: device().class,
        text: Arc::new(text),
        template: None,
        context_length: 256,
        vocabulary: 1,
        table: serde_json::from_str(TABLE).expect("a table"),
    })
}

/// A cost table in which a token costs about a millisecond.
const TABLE: &str = r#"{"version":"v1","step_ns":1000000.0,
    "linear":[[1,10000000.0],[256,100000000.0]],"head":[[1,1000000.0],[32,2000000.0]],
    "ns_per_kv_byte":0.001,"ns_per_attention_flop":0.0001,
    "shape":{"kv_bytes_per_token":1024,"flop_per_pair":1024},"reference_batch":32,
    "reference_chunk":256}"#;
