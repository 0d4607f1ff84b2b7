//! `tollgate statement`: a tenant's month with prices, computed from the ledger.
//! The gateway may be running.

use std::io::Write;

use anyhow::{Result, anyhow, bail};
use tollgate_config::Config;
use tollgate_domain::{DeviceNanos, Millijoules, PlanName, TenantId, UtcMonth};
use tollgate_gateway::statement::{as_json, status, unknown_plan};
use tollgate_ledger::{
    PlanSpan, PricedAs, Record, Statement, StatementError, StatementFigures, StatementLine,
    StatementQuery,
};

use crate::common::{Place, now, say, table};
use crate::databases;

/// Print a tenant's monthly statement: the cost by key, model, device class,
/// tier and price list.
#[derive(clap::Args)]
pub struct StatementArguments {
    #[command(flatten)]
    place: Place,
    /// The tenant.
    #[arg(long, value_name = "NAME")]
    tenant: String,
    /// The UTC month, such as 2026-11.
    #[arg(long, value_name = "MONTH")]
    month: UtcMonth,
    /// Use this plan's prices for the whole month [default: those of the tenant's
    /// plan on each day].
    #[arg(long, value_name = "NAME")]
    plan: Option<String>,
    /// Print JSON: times in whole nanoseconds, energy in millijoules, money in
    /// decimals.
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// Print CSV, in the same units.
    #[arg(long)]
    csv: bool,
    /// Print the days behind the lines instead. Each one follows the id of its line
    /// and a comma. The line's digest covers the days.
    #[arg(long, conflicts_with_all = ["json", "csv", "entries"])]
    days: bool,
    /// Print the records behind the days, in the same form. The records are summed
    /// again and must equal the days.
    #[arg(long, conflicts_with_all = ["json", "csv"])]
    entries: bool,
}

/// Prints the statement.
pub fn run(arguments: StatementArguments) -> Result<()> {
    let config = arguments.place.load()?;
    let tenant = TenantId::new(&arguments.tenant)?;
    let wanted = arguments.plan.as_deref().map(PlanName::new).transpose()?;
    let now_has = config.tenant(&tenant).and_then(|tenant| tenant.priced_as());
    let now_has = now_has.map(|plan| plan.name.clone());
    let priced_as = match &wanted {
        Some(plan) => PricedAs::Plan(plan),
        None => PricedAs::Told(now_has.as_ref()),
    };
    let prices = config.prices().ok_or_else(|| {
        anyhow!(
            "the config has no price list; write one under [prices.NAME], or use `tollgate usage`"
        )
    })?;
    let place = databases::ledger(&config)?;
    let Some(reader) = databases::open_ledger(&place)? else {
        bail!("there is no ledger in data folder {} yet", config.data().display());
    };
    let (tenant, month) = (&tenant, arguments.month);
    let query = StatementQuery { tenant, month, priced_as, prices, now: now() };
    if arguments.entries {
        // A month can have millions of records, and each would be a write of its own.
        let mut output = std::io::BufWriter::new(std::io::stdout().lock());
        let mut written = Ok(());
        let made = reader.statement_records(query, &mut |line, record: &Record| {
            // The callback returns nothing, so the first error of the output is kept
            // for later.
            if written.is_ok() {
                written = writeln!(output, "{line},{record}");
            }
        });
        refuse_unknown_plans(&config, &made.map_err(|error| explained(error, tenant))?)?;
        written?;
        return Ok(output.flush()?);
    }
    let statement = reader.statement(query).map_err(|error| explained(error, tenant))?;
    refuse_unknown_plans(&config, &statement)?;
    if arguments.days {
        return say(days(&statement));
    }
    if arguments.json {
        say(format!("{:#}\n", as_json(&statement)))
    } else if arguments.csv {
        say(csv(&statement))
    } else {
        say(text(&statement))
    }
}

fn explained(error: StatementError, tenant: &TenantId) -> anyhow::Error {
    match error {
        StatementError::NoPlan { .. } => anyhow!(
            "tenant {:?} never had a plan that the config defines, so its prices are unknown; give --plan",
            tenant.as_str()
        ),
        error => error.into(),
    }
}

/// Refuses a statement with a plan that the config no longer defines: the plan's
/// prices are unknown.
fn refuse_unknown_plans(config: &Config, statement: &Statement) -> Result<()> {
    let Some(PlanSpan { from, to, plan }) = unknown_plan(config, statement) else { return Ok(()) };
    bail!(
        "the config does not define plan {:?}, which sets the prices from {from} to {to}; restore the plan, or give --plan",
        plan.as_str()
    )
}

fn days(statement: &Statement) -> String {
    let lines = statement.lines.iter();
    lines.flat_map(|line| line.days.iter().map(|day| format!("{},{day}\n", line.id))).collect()
}

/// Returns CSV (RFC 4180). Names contain neither commas nor quotes. There is a row
/// for each line and no total, because importers sum the rows themselves.
fn csv(statement: &Statement) -> String {
    let mut text = "statement,status,tenant,month,line,key,model,device_class,from,to,price_list,\
        requests,prompt_tokens,cached_tokens,completion_tokens,attributed_ns,reference_ns,\
        per_device_second,per_million_prompt_tokens,per_million_completion_tokens,currency,amount,\
        charges,entries,digest,energy_mj,tier,factor\r\n"
        .to_owned();
    for line in &statement.lines {
        let figures = &line.figures;
        let cells = [
            statement.id.clone(),
            status(statement).to_owned(),
            statement.tenant.to_string(),
            statement.month.to_string(),
            line.id.clone(),
            line.key.to_string(),
            line.model.to_string(),
            line.class.to_string(),
            line.from.to_string(),
            line.to.to_string(),
            line.list.to_string(),
            figures.requests.to_string(),
            figures.prompt_tokens.to_string(),
            figures.cached_tokens.to_string(),
            figures.completion_tokens.to_string(),
            figures.attributed_ns.to_string(),
            figures.reference_ns.to_string(),
            line.prices.device_second.to_string(),
            line.prices.million_prompt_tokens.to_string(),
            line.prices.million_completion_tokens.to_string(),
            statement.currency.to_string(),
            figures.amount.to_string(),
            line.charges.to_string(),
            line.entries.to_string(),
            line.digest.clone(),
            figures.energy_mj.map(|energy| energy.to_string()).unwrap_or_default(),
            line.tier.to_string(),
            line.prices.factor.to_string(),
        ];
        text += &(cells.join(",") + "\r\n");
    }
    text
}

/// Returns a table for the terminal: the prices of a second of device time and of a
/// million tokens, then the used amounts.
fn text(statement: &Statement) -> String {
    let Statement { id, tenant, month, plans, currency, .. } = statement;
    let status = status(statement);
    let plans: Vec<String> = match &plans[..] {
        [all] => vec![all.plan.to_string()],
        several => several.iter().map(|it| format!("{} from {}", it.plan, it.from)).collect(),
    };
    let plans = plans.join(", ");
    let mut text = format!("{status} statement {id}\n{tenant}, {month} (UTC), plan {plans}\n\n");
    if statement.lines.is_empty() {
        text += "nothing was used\n";
        return text;
    }
    let head = [
        "key",
        "model",
        "class",
        "tier",
        "from",
        "to",
        "per s",
        "per M in",
        "per M out",
        "factor",
        "requests",
        "in",
        "out",
        "device time",
        "reference",
        "energy",
        "amount",
    ];
    let mut rows: Vec<Vec<String>> = statement.lines.iter().map(row).collect();
    let mut total = vec!["total".to_owned()];
    // The first ten columns have no sum.
    total.resize(10, String::new());
    total.extend(figure_cells(&statement.total));
    rows.push(total);
    text += &table(&head, &rows);
    text += "\nper s: price of a second of reference cost; per M: of a million tokens\n\
        factor: of the whole amount, for the tier\n\
        in, out: tokens of the prompts and of the answers\n";
    text += &format!("amounts in {currency}; digest {}\n", statement.digest);
    text
}

fn row(line: &StatementLine) -> Vec<String> {
    let mut cells = vec![
        line.key.to_string(),
        line.model.to_string(),
        line.class.to_string(),
        line.tier.to_string(),
        line.from.to_string(),
        line.to.to_string(),
        line.prices.device_second.to_string(),
        line.prices.million_prompt_tokens.to_string(),
        line.prices.million_completion_tokens.to_string(),
        line.prices.factor.to_string(),
    ];
    cells.extend(figure_cells(&line.figures));
    cells
}

fn figure_cells(figures: &StatementFigures) -> [String; 7] {
    [
        figures.requests.to_string(),
        figures.prompt_tokens.to_string(),
        figures.completion_tokens.to_string(),
        DeviceNanos(figures.attributed_ns).to_string(),
        DeviceNanos(figures.reference_ns).to_string(),
        figures.energy_mj.map(|energy| Millijoules(energy).to_string()).unwrap_or_default(),
        figures.amount.to_string(),
    ]
}
