//! `tollgate keys`: makes, lists, rotates and revokes API keys, also beside a
//! running gateway, which acts on it within a second. A secret is shown once.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use tollgate_config::Config;
use tollgate_domain::{KeyId, ModelName, Network, PlanName, TenantId, UtcTime};
use tollgate_gateway::auth::{Endpoint, KeyOptions, KeyRecord, KeyStore, NewKey, Scopes, UnderWay};

use crate::common::{Place, day, now, say, span, table};
use crate::data;

/// Create, list, rotate and revoke API keys.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Make a key; it is printed once and cannot be had again.
    Create(Create),
    /// List keys, never their secrets.
    List(List),
    /// Make a key that replaces another, which works on for a while.
    Rotate(Rotate),
    /// Revoke a key, for good, within a second.
    Revoke(Revoke),
}

#[derive(clap::Args)]
struct Create {
    #[command(flatten)]
    place: Place,
    /// Whose key it is.
    #[arg(long, value_name = "NAME")]
    tenant: String,
    /// What it is for, for people.
    #[arg(long, value_name = "TEXT", default_value = "")]
    label: String,
    /// A model it may use; may be given often [default: all of its tenant's].
    #[arg(long = "model", value_name = "NAME")]
    models: Vec<String>,
    /// An endpoint it may use: chat, completions, models, usage; may be given often [default: all].
    #[arg(long = "endpoint", value_name = "NAME")]
    endpoints: Vec<Endpoint>,
    /// A network it may be used from, such as 10.0.0.0/8; may be given often [default: any].
    #[arg(long = "source", value_name = "NETWORK")]
    sources: Vec<Network>,
    /// A plan whose limits bind this key alone, beside its tenant's.
    #[arg(long, value_name = "NAME")]
    plan: Option<String>,
    /// For how long it works, such as 30d [default: until it is revoked].
    #[arg(long, value_name = "SPAN", value_parser = span)]
    expires: Option<Duration>,
    /// Print the key and nothing else.
    #[arg(long)]
    quiet: bool,
}

#[derive(clap::Args)]
struct List {
    #[command(flatten)]
    place: Place,
    /// Only this tenant's.
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct Rotate {
    #[command(flatten)]
    place: Place,
    /// The id of the key that is replaced, as `list` shows it.
    key: String,
    /// For how long the old key works on.
    #[arg(long, value_name = "SPAN", value_parser = span, default_value = "1h")]
    overlap: Duration,
    /// Print the key and nothing else.
    #[arg(long)]
    quiet: bool,
}

#[derive(clap::Args)]
struct Revoke {
    #[command(flatten)]
    place: Place,
    /// Its id, as `list` shows it.
    key: String,
    /// End the requests that it has under way, too, within seconds; their
    /// tenant pays what was done. Works for a key that is revoked already.
    #[arg(long)]
    end_streams: bool,
}

/// Does what was asked.
pub fn run(arguments: Arguments) -> Result<()> {
    match arguments.action {
        Action::Create(create) => self::create(create),
        Action::List(list) => self::list(list),
        Action::Rotate(rotate) => {
            let (_, store) = open(&rotate.place)?;
            let new = store.rotate(&key_id(&rotate.key)?, rotate.overlap, now())?;
            show(&store, &new, rotate.quiet)
        }
        Action::Revoke(revoke) => {
            let (_, store) = open(&revoke.place)?;
            let under_way = if revoke.end_streams { UnderWay::End } else { UnderWay::Finish };
            let record = store.revoke(&key_id(&revoke.key)?, under_way, now())?;
            let ended = if record.ends_requests { ", and what it had under way ends" } else { "" };
            say(format!("key {} of tenant {} is revoked{ended}\n", record.id, record.tenant))
        }
    }
}

fn create(create: Create) -> Result<()> {
    let (config, store) = open(&create.place)?;
    let tenant = TenantId::new(&create.tenant)?;
    if config.tenant(&tenant).is_none() {
        // The first few are enough to see a slip; there may be thousands.
        let names: Vec<&str> =
            config.tenants().map(|tenant| tenant.name.as_str()).take(8).collect();
        bail!("no tenant {tenant} in the config (there: {}); give --config", names.join(", "));
    }
    let models: Vec<ModelName> =
        create.models.iter().map(|name| ModelName::new(name)).collect::<Result<_, _>>()?;
    if let Some(unknown) = models.iter().find(|name| config.model(name).is_none()) {
        bail!("no model {unknown} in the config");
    }
    let plan = create.plan.as_deref().map(PlanName::new).transpose()?;
    if let Some(unknown) = plan.as_ref().filter(|plan| config.plan(plan).is_none()) {
        let names: Vec<&str> = config.plans().map(|plan| plan.name.as_str()).collect();
        bail!("no plan {unknown} in the config (there: {}); give --config", names.join(", "));
    }
    let some = |is_empty: bool| !is_empty;
    let options = KeyOptions {
        label: create.label,
        scopes: Scopes {
            models: some(models.is_empty()).then_some(models),
            endpoints: some(create.endpoints.is_empty()).then_some(create.endpoints),
            sources: some(create.sources.is_empty()).then_some(create.sources),
        },
        expires: create.expires.map(|span| UtcTime(now().0.saturating_add(span.as_nanos() as u64))),
        plan,
    };
    let new = store.create(&tenant, options, now())?;
    show(&store, &new, create.quiet)
}

fn list(list: List) -> Result<()> {
    let (_, store) = open(&list.place)?;
    let tenant = list.tenant.as_deref().map(TenantId::new).transpose()?;
    let records = store.list(tenant.as_ref())?;
    if list.json {
        let rows: Vec<_> = records.iter().map(as_json).collect();
        return say(format!("{:#}\n", serde_json::json!({ "keys": rows })));
    }
    let rows: Vec<Vec<String>> = records.iter().map(as_row).collect();
    say(table(&["key", "tenant", "plan", "only", "state", "created", "expires", "label"], &rows))
}

fn open(place: &Place) -> Result<(Config, KeyStore)> {
    let config = place.load()?;
    let folder = config.data();
    // A folder that is not there was mistyped: a key in a new one opens nothing.
    if !folder.is_dir() {
        bail!("there is no data folder {}: `tollgate up` makes it", folder.display());
    }
    data::make(folder)?;
    let store = KeyStore::open_to_change(folder)
        .with_context(|| format!("the keys of data folder {}", folder.display()))?;
    Ok((config, store))
}

/// Shows a new key, once. Where nobody can have seen it, it is revoked.
fn show(store: &KeyStore, new: &NewKey, quiet: bool) -> Result<()> {
    let NewKey { record, secret } = new;
    if let Err(error) = say(format!("{}\n", secret.expose())) {
        store.revoke(&record.id, UnderWay::End, now())?;
        return Err(error.context(format!("key {} could not be shown and is revoked", record.id)));
    }
    if !quiet {
        eprintln!("key {} of tenant {}; it is not shown again", record.id, record.tenant);
    }
    Ok(())
}

fn state(record: &KeyRecord) -> &'static str {
    match (record.revoked, record.is_active(now())) {
        (Some(_), _) => "revoked",
        (None, true) => "active",
        (None, false) => "expired",
    }
}

fn as_row(record: &KeyRecord) -> Vec<String> {
    vec![
        record.id.to_string(),
        record.tenant.to_string(),
        record.plan.as_ref().map_or("-", PlanName::as_str).to_owned(),
        only(&record.scopes),
        state(record).to_owned(),
        day(Some(record.created)),
        day(record.expires),
        record.label.clone(),
    ]
}

/// What a key is limited to: models, endpoints, networks.
fn only(scopes: &Scopes) -> String {
    let Scopes { models, endpoints, sources } = scopes;
    let models = models.iter().flatten().map(ToString::to_string);
    let endpoints = endpoints.iter().flatten().map(|endpoint| endpoint.as_str().to_owned());
    let sources = sources.iter().flatten().map(|network| format!("from {network}"));
    let only: Vec<String> = models.chain(endpoints).chain(sources).collect();
    if only.is_empty() { "-".to_owned() } else { only.join(", ") }
}

fn as_json(record: &KeyRecord) -> serde_json::Value {
    let KeyRecord {
        id,
        tenant,
        label,
        scopes,
        created,
        expires,
        revoked,
        ends_requests,
        rotated_from,
        plan,
    } = record;
    serde_json::json!({
        "key": id, "tenant": tenant, "label": label, "state": state(record), "scopes": scopes,
        "created_ns": created, "expires_ns": expires, "revoked_ns": revoked,
        "ends_requests": ends_requests,
        "rotated_from": rotated_from, "plan": plan,
    })
}

fn key_id(text: &str) -> Result<KeyId> {
    Ok(KeyId::new(text)?)
}
