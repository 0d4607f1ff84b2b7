//! A statement as JSON, as the admin API answers it and the command line prints it.

use serde_json::{Value, json};
use tollgate_config::Config;
use tollgate_ledger::{PlanSpan, Statement, StatementFigures, StatementLine};

/// Returns the first span of a statement with a plan that the config does not define: the
/// plan's prices are unknown.
pub fn unknown_plan<'s>(config: &Config, statement: &'s Statement) -> Option<&'s PlanSpan> {
    statement.plans.iter().find(|span| config.plan(&span.plan).is_none())
}

/// Returns `provisional` while the month may still change, and `final` later.
pub fn status(statement: &Statement) -> &'static str {
    if statement.is_provisional { "provisional" } else { "final" }
}

/// Returns the statement: times in whole nanoseconds, energy in millijoules, money in
/// decimals.
pub fn as_json(statement: &Statement) -> Value {
    let Statement { id, tenant, month, plans, currency, is_provisional: _, lines, total, digest } =
        statement;
    let mut total = figures_json(total);
    total["currency"] = currency.to_string().into();
    json!({
        "id": id,
        "object": "statement",
        "status": status(statement),
        "tenant": tenant,
        "month": month.to_string(),
        "plans": plans.iter().map(plan_json).collect::<Vec<_>>(),
        "currency": currency.to_string(),
        "lines": lines.iter().map(line_json).collect::<Vec<_>>(),
        "total": total,
        "digest": digest,
    })
}

fn plan_json(span: &PlanSpan) -> Value {
    let PlanSpan { from, to, plan } = span;
    json!({ "plan": plan, "from": from.to_string(), "to": to.to_string() })
}

fn line_json(line: &StatementLine) -> Value {
    let StatementLine {
        id,
        key,
        model,
        class,
        tier,
        from,
        to,
        list,
        prices,
        figures,
        charges,
        entries,
        days: _,
        digest,
    } = line;
    let mut value = figures_json(figures);
    let about = json!({
        "id": id,
        "key": key,
        "model": model,
        "device_class": class,
        "tier": tier,
        "from": from.to_string(),
        "to": to.to_string(),
        "price_list": list,
        "per_device_second": prices.device_second.to_string(),
        "per_million_prompt_tokens": prices.million_prompt_tokens.to_string(),
        "per_million_completion_tokens": prices.million_completion_tokens.to_string(),
        "factor": prices.factor.to_string(),
        "charges": charges,
        "entries": entries,
        "digest": digest,
    });
    // Both values come from object literals, so this branch always runs.
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
        energy_mj,
        amount,
    } = figures;
    json!({
        "requests": requests,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "completion_tokens": completion_tokens,
        "attributed_ns": attributed_ns,
        "reference_ns": reference_ns,
        "energy_mj": energy_mj,
        "amount": amount.to_string(),
    })
}
