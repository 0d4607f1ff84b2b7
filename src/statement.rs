//! `tollgate statement`: a tenant's month with prices, made from the ledger
//! when it is asked for, also beside a running gateway.

use std::io::Write;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use tollgate_domain::{DeviceNanos, PlanName, TenantId, UtcMonth};
use tollgate_ledger::{Ledger, Record, Statement, StatementFigures, StatementLine, StatementQuery};

use crate::common::{Place, now, say, table};

/// What a tenant owes for a month, by key, model, device class and price list.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    place: Place,
    /// Whose.
    #[arg(long, value_name = "NAME")]
    tenant: String,
    /// The UTC month, such as 2026-11.
    #[arg(long, value_name = "MONTH")]
    month: UtcMonth,
    /// At this plan's prices [default: the plan that the tenant has now].
    #[arg(long, value_name = "NAME")]
    plan: Option<String>,
    /// As JSON: times in whole nanoseconds, money in decimals.
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// As CSV, likewise.
    #[arg(long)]
    csv: bool,
    /// The records behind the lines instead: a line each, after the id of the
    /// statement's line and a comma.
    #[arg(long, conflicts_with_all = ["json", "csv"])]
    entries: bool,
}

/// Prints the statement.
pub fn run(arguments: Arguments) -> Result<()> {
    let config = arguments.place.load()?;
    let tenant = TenantId::new(&arguments.tenant)?;
    let plan = match &arguments.plan {
        Some(plan) => PlanName::new(plan)?,
        None => plan_of(&config, &tenant)?,
    };
    if config.plan(&plan).is_none() {
        bail!("there is no plan {:?} in the config", plan.as_str());
    }
    let prices = config.prices().ok_or_else(|| {
        anyhow!(
            "the config has no price list: write one under [prices.NAME], or see tollgate usage"
        )
    })?;
    let path = config.data().join("ledger.db");
    if !path.exists() {
        bail!("there is no ledger in data folder {} yet", config.data().display());
    }
    let reader = Ledger::open_read_only(&path)
        .with_context(|| format!("cannot read the ledger {}", path.display()))?;
    let (tenant, plan) = (&tenant, &plan);
    let query = StatementQuery { tenant, month: arguments.month, plan, prices, now: now() };
    if arguments.entries {
        let mut output = std::io::BufWriter::new(std::io::stdout().lock());
        let mut written = Ok(());
        reader.statement(query, &mut |line, record: &Record| {
            if written.is_ok() {
                written = writeln!(output, "{line},{record}");
            }
        })?;
        written?;
        return Ok(output.flush()?);
    }
    let statement = reader.statement(query, &mut |_, _| {})?;
    if arguments.json {
        say(format!("{:#}\n", as_json(&statement)))
    } else if arguments.csv {
        say(csv(&statement))
    } else {
        say(text(&statement))
    }
}

fn plan_of(config: &tollgate_config::Config, tenant: &TenantId) -> Result<PlanName> {
    let found = config.tenant(tenant).ok_or_else(|| {
        anyhow!(
            "tenant {:?} is not in the config, and its plan decides its prices: give --plan",
            tenant.as_str()
        )
    })?;
    let plan = found.priced_as().ok_or_else(|| anyhow!("the tenant has no plan: give --plan"))?;
    Ok(plan.name.clone())
}

fn status(statement: &Statement) -> &'static str {
    if statement.is_provisional { "provisional" } else { "final" }
}

fn as_json(statement: &Statement) -> Value {
    let Statement { id, tenant, month, plan, currency, is_provisional: _, lines, total, digest } =
        statement;
    let mut total = figures_json(total);
    total["currency"] = currency.to_string().into();
    json!({
        "id": id,
        "object": "statement",
        "status": status(statement),
        "tenant": tenant,
        "month": month.to_string(),
        "plan": plan,
        "currency": currency.to_string(),
        "lines": lines.iter().map(line_json).collect::<Vec<_>>(),
        "total": total,
        "digest": digest,
    })
}

fn line_json(line: &StatementLine) -> Value {
    let StatementLine {
        id,
        key,
        model,
        class,
        from,
        to,
        list,
        prices,
        figures,
        charges,
        entries,
        digest,
    } = line;
    let mut value = figures_json(figures);
    let about = json!({
        "id": id,
        "key": key,
        "model": model,
        "device_class": class,
        "from": from.to_string(),
        "to": to.to_string(),
        "price_list": list,
        "per_device_second": prices.device_second.to_string(),
        "per_million_prompt_tokens": prices.million_prompt_tokens.to_string(),
        "per_million_completion_tokens": prices.million_completion_tokens.to_string(),
        "charges": charges,
        "entries": entries,
        "digest": digest,
    });
    if let (Some(value), Value::Object(about)) = (value.as_object_mut(), about) {
        value.extend(about);
    }
    value
}

fn figures_json(figures: &StatementFigures) -> Value {
    let StatementFigures {
        requests,
        prompt_tokens,
        cached_tokens,
        completion_tokens,
        attributed_ns,
        reference_ns,
        amount,
    } = figures;
    json!({
        "requests": requests,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "completion_tokens": completion_tokens,
        "attributed_ns": attributed_ns,
        "reference_ns": reference_ns,
        "amount": amount.to_string(),
    })
}

/// RFC 4180; names hold neither commas nor quotes. A line each and no total:
/// what is imported is summed there.
fn csv(statement: &Statement) -> String {
    let mut text = "statement,status,tenant,month,line,key,model,device_class,from,to,price_list,\
        requests,prompt_tokens,cached_tokens,completion_tokens,attributed_ns,reference_ns,\
        per_device_second,per_million_prompt_tokens,per_million_completion_tokens,currency,amount,\
        charges,entries,digest\r\n"
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
        ];
        text += &(cells.join(",") + "\r\n");
    }
    text
}

/// For people: prices of a second of device time and of a million tokens in
/// and out, then what was used of each.
fn text(statement: &Statement) -> String {
    let Statement { id, tenant, month, plan, currency, .. } = statement;
    let status = status(statement);
    let mut text = format!("{status} statement {id}\n{tenant}, {month} (UTC), plan {plan}\n\n");
    if statement.lines.is_empty() {
        text += "nothing was used\n";
        return text;
    }
    let head = [
        "key",
        "model",
        "class",
        "from",
        "to",
        "per s",
        "per M in",
        "per M out",
        "requests",
        "in",
        "out",
        "device time",
        "reference",
        "amount",
    ];
    let mut rows: Vec<Vec<String>> = statement.lines.iter().map(row).collect();
    let mut total = vec!["total".to_owned()];
    total.resize(8, String::new());
    total.extend(figure_cells(&statement.total));
    rows.push(total);
    text += &table(&head, &rows);
    text += &format!("\namounts in {currency}; digest {}\n", statement.digest);
    text
}

fn row(line: &StatementLine) -> Vec<String> {
    let mut cells = vec![
        line.key.to_string(),
        line.model.to_string(),
        line.class.to_string(),
        line.from.to_string(),
        line.to.to_string(),
        line.prices.device_second.to_string(),
        line.prices.million_prompt_tokens.to_string(),
        line.prices.million_completion_tokens.to_string(),
    ];
    cells.extend(figure_cells(&line.figures));
    cells
}

fn figure_cells(figures: &StatementFigures) -> [String; 6] {
    [
        figures.requests.to_string(),
        figures.prompt_tokens.to_string(),
        figures.completion_tokens.to_string(),
        DeviceNanos(figures.attributed_ns).to_string(),
        DeviceNanos(figures.reference_ns).to_string(),
        figures.amount.to_string(),
    ]
}
