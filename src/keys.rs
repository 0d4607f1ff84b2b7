//! `tollgate keys`: creates, lists, rotates and revokes API keys. A running gateway
//! applies a change within a second. A secret is shown only once.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use tollgate_config::Config;
use tollgate_domain::{KeyId, ModelName, Network, PlanName, TenantId, UtcTime};
use tollgate_gateway::auth::{Endpoint, KeyOptions, KeyRecord, KeyStore, NewKey, Scopes, UnderWay};

use crate::common::{Place, day, now, say, span, table};
use crate::{data, manifest};

/// Create, list, rotate and revoke API keys.
#[derive(clap::Args)]
pub struct KeysArguments {
    #[command(subcommand)]
    action: KeysAction,
}

#[derive(clap::Subcommand)]
enum KeysAction {
    /// Create a key. Its secret is printed only once.
    Create(Create),
    /// List keys, without their secrets.
    List(ListKeys),
    /// Create a key that replaces another one, which stays valid for a while.
    Rotate(Rotate),
    /// Revoke a key permanently, within a second.
    Revoke(Revoke),
}

#[derive(clap::Args)]
struct Create {
    #[command(flatten)]
    place: Place,
    /// The key's tenant.
    #[arg(long, value_name = "NAME")]
    tenant: String,
    /// A description of the key's purpose.
    #[arg(long, value_name = "TEXT", default_value = "")]
    label: String,
    /// A model that the key may use. Can be repeated [default: all that the tenant may use].
    #[arg(long = "model", value_name = "NAME")]
    models: Vec<String>,
    /// An endpoint that the key may use: chat, completions, models or usage. Can be
    /// repeated [default: all].
    #[arg(long = "endpoint", value_name = "NAME")]
    endpoints: Vec<Endpoint>,
    /// A network that the key may be used from, such as 10.0.0.0/8. Can be repeated
    /// [default: any].
    #[arg(long = "source", value_name = "NETWORK")]
    sources: Vec<Network>,
    /// A plan with limits for this key alone, in addition to its tenant's limits.
    #[arg(long, value_name = "NAME")]
    plan: Option<String>,
    /// The time until the key expires, such as 30d [default: never].
    #[arg(long, value_name = "SPAN", value_parser = span)]
    expires: Option<Duration>,
    /// Print only the key.
    #[arg(long)]
    quiet: bool,
}

#[derive(clap::Args)]
struct ListKeys {
    #[command(flatten)]
    place: Place,
    /// Only this tenant's.
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct Rotate {
    #[command(flatten)]
    place: Place,
    /// The id of the key that is replaced, as `list` shows it.
    key: String,
    /// The time for which the old key stays valid.
    #[arg(long, value_name = "SPAN", value_parser = span, default_value = "1h")]
    overlap: Duration,
    /// Print only the key.
    #[arg(long)]
    quiet: bool,
}

#[derive(clap::Args)]
struct Revoke {
    #[command(flatten)]
    place: Place,
    /// The id of the key, as `list` shows it.
    key: String,
    /// Also end the key's running requests within seconds. The tenant pays for the
    /// work done. Works for a revoked key, too.
    #[arg(long)]
    end_streams: bool,
}

/// Runs the subcommand.
pub fn run(arguments: KeysArguments) -> Result<()> {
    match arguments.action {
        KeysAction::Create(create) => self::create(create),
        KeysAction::List(list) => self::list(list),
        KeysAction::Rotate(rotate) => {
            let (_, store) = open(&rotate.place)?;
            let new = store.rotate(&key_id(&rotate.key)?, rotate.overlap, now())?;
            show(&store, &new, rotate.quiet)
        }
        KeysAction::Revoke(revoke) => {
            let (_, store) = open(&revoke.place)?;
            let under_way = if revoke.end_streams { UnderWay::End } else { UnderWay::Finish };
            let record = store.revoke(&key_id(&revoke.key)?, under_way, now())?;
            let ended = if record.ends_requests { ", and its running requests end" } else { "" };
            say(format!("key {} of tenant {} is revoked{ended}\n", record.id, record.tenant))
        }
    }
}

fn create(create: Create) -> Result<()> {
    let config = create.place.load()?;
    let tenant = TenantId::new(&create.tenant)?;
    if config.tenant(&tenant).is_none() {
        // The first few are enough to notice a typing error; there may be
        // thousands.
        let names: Vec<&str> =
            config.tenants().map(|tenant| tenant.name.as_str()).take(8).collect();
        bail!(
            "unknown tenant {tenant}; the config has: {}; use --config for another config",
            names.join(", ")
        );
    }
    let models: Vec<ModelName> =
        create.models.iter().map(|name| ModelName::new(name)).collect::<Result<_, _>>()?;
    // A key for models that do not exist would be refused at every request.
    if let Some(unknown) = models.iter().find(|name| config.model(name).is_none()) {
        bail!("unknown model {unknown}: it is not in the config");
    }
    let plan = create.plan.as_deref().map(PlanName::new).transpose()?;
    if let Some(unknown) = plan.as_ref().filter(|plan| config.plan(plan).is_none()) {
        let names: Vec<&str> = config.plans().map(|plan| plan.name.as_str()).collect();
        bail!(
            "unknown plan {unknown}; the config has: {}; use --config for another config",
            names.join(", ")
        );
    }
    // The key store writes the absence of a restriction as `None`, not as an empty
    // list.
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
    let store = make_store(&config)?;
    let new = store.create(&tenant, options, now())?;
    show(&store, &new, create.quiet)
}

fn list(list: ListKeys) -> Result<()> {
    let (_, store) = open(&list.place)?;
    let tenant = list.tenant.as_deref().map(TenantId::new).transpose()?;
    let records = store.list(tenant.as_ref())?;
    if list.json {
        let rows: Vec<_> =
            records.iter().map(|record| ListedKey { state: state(record), record }).collect();
        return say(format!("{:#}\n", serde_json::json!({ "keys": rows })));
    }
    let rows: Vec<Vec<String>> = records.iter().map(as_row).collect();
    say(table(&["key", "tenant", "plan", "only", "state", "created", "expires", "label"], &rows))
}

/// A key in the list as JSON.
#[derive(serde::Serialize)]
struct ListedKey<'a> {
    state: &'static str,
    #[serde(flatten)]
    record: &'a KeyRecord,
}

fn open(place: &Place) -> Result<(Config, KeyStore)> {
    let config = place.load()?;
    let store = open_store(&config)?;
    Ok((config, store))
}

/// Opens the key store in the config's data folder to change it.
///
/// # Errors
/// There is no folder, the keys were lost, or the store cannot be opened.
pub fn open_store(config: &Config) -> Result<KeyStore> {
    let folder = config.data();
    // A missing folder is probably a typing error: nothing in it can be listed or changed.
    if !folder.is_dir() {
        bail!("there is no data folder {}; `tollgate up` creates it", folder.display());
    }
    // Closes a folder that others could read before a secret's hash is written to
    // it.
    data::make(folder)?;
    // A key in a new database would be the only one that works.
    manifest::refuse_loss(folder, "keys.db")?;
    KeyStore::open_to_change(folder)
        .with_context(|| format!("the keys of data folder {}", folder.display()))
}

/// Opens the key store as [`open_store`] does. Makes the data folder if there is none, so
/// that keys can be made before the first start.
///
/// # Errors
/// The errors of [`open_store`], or the folder cannot be made.
pub fn make_store(config: &Config) -> Result<KeyStore> {
    let folder = config.data();
    if !folder.is_dir() {
        // Said, because a typing error in `--data` would otherwise go unseen.
        eprintln!("creating the data folder {}; no gateway has used it yet", folder.display());
        data::make(folder)?;
    }
    open_store(config)
}

/// Prints a new key, once. A key that could not be printed is revoked.
fn show(store: &KeyStore, new: &NewKey, quiet: bool) -> Result<()> {
    let NewKey { record, secret } = new;
    if let Err(error) = say(format!("{}\n", secret.expose())) {
        store.revoke(&record.id, UnderWay::End, now())?;
        return Err(
            error.context(format!("key {} could not be printed and was revoked", record.id))
        );
    }
    if !quiet {
        // The note goes to standard error, so that a script reads the key alone.
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

/// Returns the restrictions of a key: models, endpoints, networks.
fn only(scopes: &Scopes) -> String {
    let Scopes { models, endpoints, sources } = scopes;
    let models = models.iter().flatten().map(ToString::to_string);
    let endpoints = endpoints.iter().flatten().map(|endpoint| endpoint.as_str().to_owned());
    let sources = sources.iter().flatten().map(|network| format!("from {network}"));
    let only: Vec<String> = models.chain(endpoints).chain(sources).collect();
    if only.is_empty() { "-".to_owned() } else { only.join(", ") }
}

fn key_id(text: &str) -> Result<KeyId> {
    Ok(KeyId::new(text)?)
}
