//! A fake device that computes with plain arithmetic and moves its own clock.
//!
//! The device keeps real KV blocks. Each token leaves a mark at its position, and a row of
//! logits is a function of the marks of the whole context. A wrong block, a wrong position
//! or a lost copy therefore changes the sampled tokens.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tollgate_domain::cost::CostTableParts;
use tollgate_domain::{
    AttentionShape, CostTable, Curve, DeviceClass, DeviceNanos, MonotonicTime, SequenceId,
    SequenceWork,
};

use crate::backend::{
    BLOCK_TOKENS, Backend, BackendError, BlockCopy, DeviceInfo, LogitRows, ModelShape, Results,
    SampleRequest, SampleTarget, Span, StepLimits, StepOutput, StepPlan, Transfers,
};
use crate::clock::Clock;
use crate::sample::{SamplingPoint, TokenCounts};

/// A clock that stands still until it is moved.
#[derive(Clone, Default)]
pub(crate) struct FakeClock(Arc<AtomicU64>);

impl FakeClock {
    pub(crate) fn advance(&self, span: DeviceNanos) {
        self.0.fetch_add(span.nanos(), Ordering::Relaxed);
    }
}

impl Clock for FakeClock {
    fn now(&self) -> MonotonicTime {
        MonotonicTime(self.0.load(Ordering::Relaxed))
    }
}

/// A step as the backend saw it: the tokens and the start of each span.
pub(crate) type SeenStep = Vec<(u32, u32)>;

pub(crate) struct FakeBackend {
    shape: ModelShape,
    device: DeviceInfo,
    limits: StepLimits,
    marks: Vec<[u64; BLOCK_TOKENS as usize]>,
    clock: FakeClock,
    table: CostTable,
    /// Number of the step that fails, from 1, and the kind of failure.
    pub(crate) fails_at: Option<(u64, Failure)>,
    /// True if the device reports its own time: half of each step.
    pub(crate) keeps_time: bool,
    /// True if time passes while a step runs. False if the owner of the backend moves the
    /// clock.
    moves_clock: bool,
    /// Length of the last step.
    took: DeviceNanos,
    steps: u64,
    pub(crate) seen: Arc<Mutex<Vec<SeenStep>>>,
}

#[derive(Clone, Copy)]
pub(crate) enum Failure {
    Error,
    Panic,
    NoNumbers,
}

impl FakeBackend {
    pub(crate) fn new(kv_blocks: u32, clock: FakeClock) -> Self {
        Self {
            shape: ModelShape {
                context: 1_024,
                vocabulary: VOCABULARY,
                layers: 1,
                heads: 1,
                kv_heads: 1,
                head_dim: 8,
                kv_bytes_per_token: 64,
                end_tokens: vec![END],
                sampling_defaults: Default::default(),
                hash: "00".repeat(32),
            },
            device: DeviceInfo {
                class: DeviceClass::cpu(),
                name: "arithmetic".into(),
                uuid: String::new(),
                threads: 1,
            },
            limits: StepLimits { tokens: 512, logit_rows: 128 },
            marks: vec![[0; BLOCK_TOKENS as usize]; kv_blocks as usize],
            clock,
            table: table(),
            fails_at: None,
            keeps_time: false,
            moves_clock: true,
            took: DeviceNanos::ZERO,
            steps: 0,
            seen: Arc::default(),
        }
    }

    /// Returns the marks of these blocks.
    pub(crate) fn marks_of(&self, blocks: &[u32]) -> Vec<u64> {
        blocks.iter().flat_map(|&block| self.marks[block as usize]).collect()
    }

    /// Writes the span's marks. Returns the hash of the context after each of its tokens.
    fn feed(&mut self, tokens: &[u32], start: u32, blocks: &[u32]) -> Vec<u64> {
        let cell = |position: u32| {
            (
                blocks[(position / BLOCK_TOKENS) as usize] as usize,
                (position % BLOCK_TOKENS) as usize,
            )
        };
        for (position, &token) in (start..).zip(tokens) {
            let (block, slot) = cell(position);
            self.marks[block][slot] = mix(u64::from(token) << 32 | u64::from(position));
        }
        let mut hashes = Vec::with_capacity(tokens.len());
        let mut hash = 0;
        for position in 0..start + tokens.len() as u32 {
            let (block, slot) = cell(position);
            hash = mix(hash ^ self.marks[block][slot]);
            if position >= start {
                hashes.push(hash);
            }
        }
        hashes
    }
}

impl Backend for FakeBackend {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn device(&self) -> &DeviceInfo {
        &self.device
    }

    fn kv_blocks(&self) -> u32 {
        self.marks.len() as u32
    }

    fn limits(&self) -> StepLimits {
        self.limits
    }

    fn copy_block(&mut self, BlockCopy { from, to }: BlockCopy) {
        self.marks[to as usize] = self.marks[from as usize];
    }

    fn begin(&mut self, plan: &StepPlan<'_>, output: &mut StepOutput) -> Result<(), BackendError> {
        plan.check(&self.shape, self.limits, self.kv_blocks())?;
        self.steps += 1;
        let works: Vec<SequenceWork> = (0..)
            .zip(plan.spans)
            .map(|(id, span)| SequenceWork {
                sequence: SequenceId(id),
                new_tokens: span.tokens.len() as u32,
                logit_rows: span.rows() as u32,
                context: span.start,
            })
            .collect();
        let whole = self.table.predict_step(&works);
        self.took = whole;
        if self.moves_clock {
            self.clock.advance(whole);
        }
        let failure = self.fails_at.filter(|(at, _)| *at == self.steps).map(|(_, how)| how);
        match failure {
            Some(Failure::Error) => return Err(BackendError::Device("it broke".into())),
            Some(Failure::Panic) => panic!("it panicked"),
            Some(Failure::NoNumbers) | None => {}
        }
        let seen = plan.spans.iter().map(|span| (span.tokens.len() as u32, span.start)).collect();
        self.seen.lock().expect("nobody panics holding it").push(seen);
        let mut hashes: Vec<u64> = Vec::new();
        for span in plan.spans {
            let of_span = self.feed(span.tokens, span.start, span.blocks);
            hashes.extend::<&[u64]>(match span.logits {
                LogitRows::None => &[],
                LogitRows::Last => &of_span[of_span.len() - 1..],
                LogitRows::All => &of_span[..],
            });
        }
        let rows = output.reset([hashes.len(), VOCABULARY as usize]);
        for (row, hash) in rows.chunks_exact_mut(VOCABULARY as usize).zip(hashes) {
            for (token, logit) in (0u64..).zip(row) {
                *logit = match failure {
                    Some(_) => f32::NAN,
                    // -4 to 4; an end token is rare.
                    None => (mix(hash ^ token) >> 40) as f32 / (1 << 21) as f32 - 4.0,
                };
            }
        }
        output.sample(plan);
        if self.keeps_time {
            output.set_device_time(DeviceNanos(whole.nanos() / 2));
            let (to_device, to_host) = (DeviceNanos(self.steps), DeviceNanos(1_000));
            output.set_transfers(Transfers { to_device, to_host });
        }
        Ok(())
    }
}

/// The same device with support for a step ahead. It keeps results to itself until a step
/// is finished. Time passes when the host waits for a step, and each step starts when the
/// previous one ended.
pub(crate) struct AheadBackend {
    inner: FakeBackend,
    /// Steps in progress and the times at which the device finishes them.
    begun: VecDeque<(StepOutput, MonotonicTime)>,
    done: MonotonicTime,
    /// Busy time over all steps, by the device's own clock.
    pub(crate) busy: Arc<AtomicU64>,
    drawn: Vec<Option<u32>>,
    /// Number of steps that started before the previous one was finished.
    pub(crate) ahead: Arc<AtomicU64>,
}

impl AheadBackend {
    pub(crate) fn new(mut inner: FakeBackend) -> Self {
        inner.moves_clock = false;
        Self {
            inner,
            begun: VecDeque::new(),
            done: MonotonicTime(0),
            busy: Arc::default(),
            drawn: Vec::new(),
            ahead: Arc::default(),
        }
    }

    /// Returns the result of a sample of the last step as an input token.
    fn fed(&self, draw: u32) -> u32 {
        self.drawn[draw as usize].unwrap_or(0)
    }
}

impl Backend for AheadBackend {
    fn shape(&self) -> &ModelShape {
        self.inner.shape()
    }

    fn device(&self) -> &DeviceInfo {
        self.inner.device()
    }

    fn kv_blocks(&self) -> u32 {
        self.inner.kv_blocks()
    }

    fn limits(&self) -> StepLimits {
        self.inner.limits()
    }

    fn copy_block(&mut self, copy: BlockCopy) {
        self.inner.copy_block(copy);
    }

    fn begin(&mut self, plan: &StepPlan<'_>, _: &mut StepOutput) -> Result<(), BackendError> {
        assert!(self.begun.len() < 2, "one step ahead, and no more");
        plan.check(self.shape(), self.limits(), self.kv_blocks())?;
        plan.check_feedback(self.drawn.len())?;
        self.ahead.fetch_add(self.begun.len() as u64, Ordering::Relaxed);
        let tokens: Vec<[u32; 1]> =
            plan.token_feedback.iter().map(|&draw| [self.fed(draw)]).collect();
        let fed = plan.spans.iter().zip(&tokens).map(|(span, tokens)| Span { tokens, ..*span });
        let spans: Vec<Span<'_>> = match tokens.is_empty() {
            true => plan.spans.to_vec(),
            false => fed.collect(),
        };
        let counts: Vec<TokenCounts> =
            plan.results.samples().iter().map(|draw| self.counts(draw)).collect();
        let whole = |(draw, counts)| with_counts(draw, counts);
        let draws: Vec<SampleRequest<'_>> =
            plan.results.samples().iter().copied().zip(&counts).map(whole).collect();
        let mut output = StepOutput::default();
        let plan =
            StepPlan { spans: &spans, results: Results::Samples(&draws), token_feedback: &[] };
        self.inner.begin(&plan, &mut output)?;
        self.drawn.clear();
        let tokens = output.sampled().iter().map(|drawn| drawn.as_ref().map(|drawn| drawn.token));
        self.drawn.extend(tokens);
        // The launch takes the host a little, and the device a little more before it
        // starts.
        self.inner.clock.advance(LAUNCH);
        let began = self.done.max(MonotonicTime(self.inner.clock.now().0 + LAUNCH.nanos()));
        self.done = MonotonicTime(began.0 + self.inner.took.nanos());
        output.set_device_time(self.inner.took);
        self.begun.push_back((output, self.done));
        Ok(())
    }

    fn finish(&mut self, output: &mut StepOutput) -> Result<(), BackendError> {
        let (finished, done) = self.begun.pop_front().expect("a step was begun");
        let now = self.inner.clock.now();
        self.inner.clock.advance(DeviceNanos(done.0.saturating_sub(now.0)));
        *output = finished;
        let time = output.device_time().map_or(0, DeviceNanos::nanos);
        self.busy.fetch_add(time, Ordering::Relaxed);
        Ok(())
    }

    fn runs_ahead(&self) -> bool {
        true
    }
}

impl AheadBackend {
    /// Returns the counts of a sample request, the pending token included.
    fn counts(&self, draw: &SampleRequest<'_>) -> TokenCounts {
        let mut counts = match draw.token {
            SampleTarget::Given(_) => TokenCounts::new(),
            SampleTarget::Next { point, .. } => point.counts.clone(),
        };
        if let Some(pending) = draw.pending() {
            counts.add(self.fed(pending));
        }
        counts
    }
}

fn with_counts<'a>(draw: SampleRequest<'a>, counts: &'a TokenCounts) -> SampleRequest<'a> {
    let token = match draw.token {
        SampleTarget::Given(token) => SampleTarget::Given(token),
        SampleTarget::Next { point, .. } => {
            SampleTarget::Next { point: SamplingPoint { counts, ..point }, pending: None }
        }
    };
    SampleRequest { token, ..draw }
}

/// Returns a table with all terms, for steps of 100 us and more.
pub(crate) fn table() -> CostTable {
    CostTable::try_from(CostTableParts {
        version: "test".into(),
        step_ns: 10_000.0,
        linear: Curve(vec![(1, 100_000.0), (8, 120_000.0), (64, 400_000.0), (256, 1_600_000.0)]),
        head: Curve(vec![(1, 20_000.0), (32, 60_000.0)]),
        ns_per_kv_byte: 0.01,
        ns_per_attention_flop: 0.0001,
        shape: AttentionShape { kv_bytes_per_token: 64, flop_per_pair: 32 },
        reference_batch: 32,
        reference_chunk: 256,
    })
    .expect("a valid table")
}

fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9).wrapping_add(1);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Host time to launch a step.
const LAUNCH: DeviceNanos = DeviceNanos(5_000);
pub(crate) const VOCABULARY: u32 = 97;
pub(crate) const END: u32 = 96;
