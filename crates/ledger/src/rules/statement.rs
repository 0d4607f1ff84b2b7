//! A tenant's month, priced. Lines are summed from the sums by day, which the
//! writer keeps in the transaction of the records themselves: a month is stated as
//! quickly whatever it holds. Each line states the number of its records and the
//! digest of its days; [`records::Recount`] counts the records again.
//!
//! A record is a charge (an attempt that ended: tokens and reference cost, by the
//! day of the end) or an entry (device time, by the day of the work). Each of a
//! tenant's records is in exactly one line of one month. Only charges have a price.

mod maker;
pub(crate) mod records;

use tollgate_domain::{
    Amount, Currency, DeviceClass, KeyId, ModelName, PlanName, PriceBook, PriceListName, TenantId,
    Tier, UnitPrices, UtcDay, UtcMonth, UtcTime,
};

pub(crate) use maker::{Maker, SETTLING_NS};

use super::plans::PlanSpan;
use crate::error::LedgerError;

/// A tenant's month and the prices to use.
#[derive(Clone, Copy, Debug)]
pub struct StatementQuery<'a> {
    /// The payer.
    pub tenant: &'a TenantId,
    /// The month (UTC).
    pub month: UtcMonth,
    /// The plan that sets the prices.
    pub priced_as: PricedAs<'a>,
    /// All prices.
    pub prices: &'a PriceBook,
    /// The time of the query, which says if the month is over.
    pub now: UtcTime,
}

/// The plan that sets a tenant's prices.
#[derive(Clone, Copy, Debug)]
pub enum PricedAs<'a> {
    /// This plan, for the whole month.
    Plan(&'a PlanName),
    /// The plan that the ledger knows for each day
    /// ([`crate::Act::PutPlansInForce`]); the given plan where it knows none.
    Told(Option<&'a PlanName>),
}

/// A tenant's month.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// Id of this tenant's month, independent of its content.
    pub id: String,
    /// The payer.
    pub tenant: TenantId,
    /// The month (UTC).
    pub month: UtcMonth,
    /// The plans that set the prices, in the order of their days.
    pub plans: Vec<PlanSpan>,
    /// The currency of every amount.
    pub currency: Currency,
    /// True while the month may still gain usage in the normal course of things.
    pub is_provisional: bool,
    /// The lines, in the order of key, model, class, tier and period.
    pub lines: Vec<StatementLine>,
    /// The exact sum of the lines.
    pub total: StatementFigures,
    /// SHA-256 of `ID,DIGEST,AMOUNT` and a line feed for each line. Two statements
    /// with the same digest have the same content.
    pub digest: String,
}

/// One key's use of one model on one class of device in one tier at one price list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatementLine {
    /// Id made of the line's subject, not of its figures.
    pub id: String,
    /// The credential.
    pub key: KeyId,
    /// The model.
    pub model: ModelName,
    /// The class of the devices.
    pub class: DeviceClass,
    /// The tier of the requests.
    pub tier: Tier,
    /// The first day of the price period.
    pub from: UtcDay,
    /// The last day of the price period.
    pub to: UtcDay,
    /// The price list in force.
    pub list: PriceListName,
    /// The prices.
    pub prices: UnitPrices,
    /// The usage and its cost.
    pub figures: StatementFigures,
    /// Number of charges behind the line.
    pub charges: u64,
    /// Number of entries of device time behind the line.
    pub entries: u64,
    /// The days that the line sums.
    pub days: Vec<StatementDay>,
    /// SHA-256 of the days, each as [`StatementDay`] displays and a line feed.
    pub digest: String,
}

/// A day of a line. Displays as the one line that is hashed: the fields in this
/// order, with commas between them. Records are only ever added, so a day of the
/// same counts and sums has the same records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatementDay {
    /// The day (UTC).
    pub day: UtcDay,
    /// Attempts that ended.
    pub charges: u64,
    /// Entries of device time, and their corrections.
    pub entries: u64,
    /// Requests that ended. Requests that failed without charge are left out.
    pub requests: u64,
    /// Tokens of the prompts.
    pub prompt_tokens: u64,
    /// Prompt tokens that were found in the prefix cache.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// Reference cost in ns.
    pub reference_ns: u64,
    /// Attributed device time in ns.
    pub attributed_ns: i64,
    /// Energy in mJ of the devices that reported it; `None`, and no field, where
    /// none did.
    pub energy_mj: Option<i64>,
}

/// Usage and its cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatementFigures {
    /// Requests that ended. Requests that failed without charge are left out.
    pub requests: u64,
    /// Tokens of the prompts.
    pub prompt_tokens: u64,
    /// Prompt tokens that were found in the prefix cache.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// Attributed device time in ns, by the day of the work.
    pub attributed_ns: u64,
    /// Reference cost in ns, by the day on which the request ended.
    pub reference_ns: u64,
    /// Energy in mJ of the attributed time, as far as devices reported it.
    pub energy_mj: Option<u64>,
    /// The cost of reference cost and tokens.
    pub amount: Amount,
}

/// The reason why there is no statement.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StatementError {
    /// A day has usage but no price list in force.
    #[error(
        "{day} has usage of model {model:?} and no price list for plan {plan:?}; lists begin later"
    )]
    NoList {
        /// The first such day.
        day: UtcDay,
        /// The plan of that day.
        plan: String,
        /// The model.
        model: String,
    },
    /// The price list has no price for a device class that was used.
    #[error("price list {list:?} has no price for device class {class:?}, and no default")]
    NoPrice {
        /// The list.
        list: String,
        /// The class.
        class: String,
    },
    /// Records of the month have left the ledger.
    #[error("records of {tenant:?} in {month} are archived: read them with --data ARCHIVE")]
    Archived {
        /// The tenant.
        tenant: String,
        /// The month.
        month: UtcMonth,
    },
    /// The ledger knows no plan of the tenant.
    #[error("no plan of tenant {tenant:?} is known")]
    NoPlan {
        /// The tenant.
        tenant: String,
    },
    /// The ledger cannot be read, or does not agree with itself.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

impl std::fmt::Display for StatementDay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // All fields by name: the digest of a day must cover each of them.
        let Self {
            day,
            charges,
            entries,
            requests,
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            reference_ns,
            attributed_ns,
            energy_mj,
        } = self;
        write!(
            f,
            "{day},{charges},{entries},{requests},{prompt_tokens},{cached_tokens},\
             {completion_tokens},{reference_ns},{attributed_ns}"
        )?;
        // No field without energy: digests of days from before energy was known stay the same.
        energy_mj.map_or(Ok(()), |energy| write!(f, ",{energy}"))
    }
}
