//! Types that all other parts of tollgate share: ids, units, usage, limits, time, and the
//! formulas for the cost of a step and of a request.
//!
//! Nothing in this crate does I/O, reads a clock or knows a protocol. Amounts are integers
//! with their unit in the type. Each formula names its source.

pub mod block;
pub mod cost;
pub mod energy;
pub mod generation;
pub mod grammar;
pub mod ids;
pub mod limits;
pub mod network;
pub mod price;
pub mod step_counts;
pub mod tier;
pub mod time;
pub mod tool_format;
pub mod units;
pub mod usage;

pub use block::{Attempt, Block, BlockError, BlockParts, Device, FinishedAttempt, Share, Stages};
pub use cost::{
    AttentionShape, CostTable, CostTableError, Curve, PromptWork, SequenceWork, StepCost,
};
pub use energy::Millijoules;
pub use generation::{
    REPETITION_PENALTIES, Sampling, SamplingDefaults, StopReason, TextDelta, TokenLogprob,
};
pub use grammar::{CallForm, CallGrammar, Grammar};
pub use ids::{
    AdminName, Caller, ClusterName, DeviceClass, GatewayName, InvalidName, KeyId, ModelName,
    PlanName, PoolName, PriceListName, RequestId, SequenceId, TenantId, WorkerEpoch, WorkerName,
};
pub use limits::{ByClass, DEFAULT_GRAMMAR_TIME, HELD_GRAMMAR_TIME, PlanLimits, Rate};
pub use network::{InvalidNetwork, Network};
pub use price::{
    Amount, Budget, Currency, ExactAmount, InvalidCurrency, InvalidPrice, InvalidPriceFactor,
    Price, PriceBook, PriceFactor, PriceList, PricePeriod, Priced, UnitPrices,
};
pub use step_counts::{InvalidStepCounts, STEP_NANOS, STEP_SEQUENCES, StepCounts};
pub use tier::Tier;
pub use time::{InvalidDay, InvalidMonth, MonotonicTime, UtcDay, UtcMonth, UtcTime};
pub use tool_format::{ToolFormat, UnknownToolFormat};
pub use units::DeviceNanos;
pub use usage::{FinishReason, Transfers, Usage};
