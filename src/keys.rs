//! `tollgate keys`: creates, lists, rotates and revokes API keys. Uses the admin API of a
//! running gateway, or the files of a stopped one. A secret is shown only once.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use serde::Deserialize;
use serde_json::json;
use tollgate_config::Config;
use tollgate_domain::{KeyId, ModelName, Network, PlanName, TenantId};
use tollgate_gateway::auth::{
    Endpoint, HeardBy, KeyRecord, KeyRequest, KeyStore, NewKey, Scopes, UnderWay,
};

use crate::admin::{Admin, Ask, Reach, encoded};
use crate::common::{day, now, say, span, table};
use crate::{data, databases, manifest};

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
    /// Revoke a key permanently.
    Revoke(Revoke),
}

#[derive(clap::Args)]
struct Create {
    #[command(flatten)]
    admin: Admin,
    /// The key's tenant.
    #[arg(long, value_name = "NAME")]
    tenant: TenantId,
    /// A description of the key's purpose.
    #[arg(long, value_name = "TEXT", default_value = "")]
    label: String,
    /// A model that the key may use. Can be repeated [default: all that the tenant may use].
    #[arg(long = "model", value_name = "NAME")]
    models: Vec<ModelName>,
    /// An endpoint that the key may use: chat, completions, models, usage or batches. Can be
    /// repeated [default: all].
    #[arg(long = "endpoint", value_name = "NAME")]
    endpoints: Vec<Endpoint>,
    /// A network that the key may be used from, such as 10.0.0.0/8. Can be repeated
    /// [default: any].
    #[arg(long = "source", value_name = "NETWORK")]
    sources: Vec<Network>,
    /// A plan with limits for this key alone, in addition to its tenant's limits.
    #[arg(long, value_name = "NAME")]
    plan: Option<PlanName>,
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
    admin: Admin,
    /// Only this tenant's.
    #[arg(long, value_name = "NAME")]
    tenant: Option<TenantId>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct Rotate {
    #[command(flatten)]
    admin: Admin,
    /// The id of the key that is replaced, as `list` shows it.
    key: KeyId,
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
    admin: Admin,
    /// The id of the key, as `list` shows it.
    key: KeyId,
    /// Also end the key's running requests within seconds. The tenant pays for the
    /// work done. Works for a revoked key, too.
    #[arg(long)]
    end_streams: bool,
}

/// A new key and its secret.
#[derive(Deserialize)]
struct NewSecret {
    #[serde(flatten)]
    record: KeyRecord,
    secret: String,
}

/// A revoked key, and the gateways that have heard of it, if several share the keys.
#[derive(Deserialize)]
struct RevokedKey {
    #[serde(flatten)]
    record: KeyRecord,
    #[serde(default)]
    gateways: Option<HeardBy>,
}

/// Runs the subcommand.
pub fn run(arguments: KeysArguments) -> Result<()> {
    match arguments.action {
        KeysAction::Create(create) => self::create(create),
        KeysAction::List(list) => self::list(list),
        KeysAction::Rotate(rotate) => self::rotate(rotate),
        KeysAction::Revoke(revoke) => self::revoke(revoke),
    }
}

fn create(create: Create) -> Result<()> {
    let Create { admin, tenant, label, models, endpoints, sources, plan, expires, quiet } = create;
    let request = KeyRequest {
        tenant,
        label,
        models,
        endpoints,
        sources,
        plan,
        expires_in_seconds: expires.map(seconds),
    };
    let reach = admin.reach()?;
    let new = match &reach {
        Reach::Running(client) => {
            // The running gateway checks the request by the config in force, which may differ from
            // the files.
            client.json(Ask::Post("/v1/keys", &serde_json::to_value(&request)?))?
        }
        Reach::Stopped(config) => {
            let (tenant, options) = request
                .check(config, now())
                .map_err(|error| anyhow!("{error}; use --config for another config"))?;
            NewSecret::from(make_store(config)?.create(&tenant, options, now())?)
        }
    };
    show(&reach, &new, quiet)
}

fn rotate(rotate: Rotate) -> Result<()> {
    let reach = rotate.admin.reach()?;
    let new = match &reach {
        Reach::Running(client) => {
            let path = format!("/v1/keys/{}/rotate", encoded(rotate.key.as_str()));
            let body = json!({ "overlap_seconds": seconds(rotate.overlap) });
            client.json(Ask::Post(&path, &body))?
        }
        Reach::Stopped(config) => {
            NewSecret::from(open_store(config)?.rotate(&rotate.key, rotate.overlap, now())?)
        }
    };
    show(&reach, &new, rotate.quiet)
}

fn revoke(revoke: Revoke) -> Result<()> {
    let under_way = if revoke.end_streams { UnderWay::End } else { UnderWay::Finish };
    let RevokedKey { record, gateways } =
        revoke_by(&revoke.admin.reach()?, &revoke.key, under_way)?;
    let ended = if record.ends_requests { ", and its running requests end" } else { "" };
    let heard = gateways.map(|gateways| format!("; {gateways}")).unwrap_or_default();
    say(format!("key {} of tenant {} is revoked{ended}{heard}\n", record.id, record.tenant))
}

fn revoke_by(reach: &Reach, key: &KeyId, under_way: UnderWay) -> Result<RevokedKey> {
    match reach {
        Reach::Running(client) => {
            let end = under_way == UnderWay::End;
            let path = format!("/v1/keys/{}?end_streams={end}", encoded(key.as_str()));
            client.json(Ask::Delete(&path))
        }
        Reach::Stopped(config) => {
            let store = open_store(config)?;
            let record = store.revoke(key, under_way, now())?;
            Ok(RevokedKey { record, gateways: store.wait_until_heard()? })
        }
    }
}

/// Returns the records of all keys, or of those of one tenant, by tenant and age.
///
/// # Errors
/// The gateway does not answer, or the store of a stopped one cannot be read.
pub fn records(reach: &Reach, tenant: Option<&TenantId>) -> Result<Vec<KeyRecord>> {
    let mut records: Vec<KeyRecord> = match reach {
        Reach::Running(client) => {
            let tenant = tenant.map(|name| format!("tenant={}&", encoded(name.as_str())));
            client.pages(&format!("/v1/keys?{}", tenant.unwrap_or_default()))?
        }
        Reach::Stopped(config) => open_store(config)?.list(tenant)?,
    };
    // The admin API pages by id, and the files list by tenant and age.
    records.sort_by(|a, b| (&a.tenant, a.created, &a.id).cmp(&(&b.tenant, b.created, &b.id)));
    Ok(records)
}

fn list(list: ListKeys) -> Result<()> {
    let records = records(&list.admin.reach()?, list.tenant.as_ref())?;
    if list.json {
        let rows: Vec<_> =
            records.iter().map(|record| ListedKey { state: record.state(now()), record }).collect();
        return say(format!("{:#}\n", json!({ "keys": rows })));
    }
    let rows: Vec<Vec<String>> = records.iter().map(as_row).collect();
    say(table(&["key", "tenant", "plan", "only", "state", "created", "expires", "label"], &rows))
}

/// Returns whole seconds, rounded up: a key must not end before its time.
fn seconds(span: Duration) -> u64 {
    span.as_secs() + u64::from(span.subsec_nanos() > 0)
}

/// A key in the list as JSON.
#[derive(serde::Serialize)]
struct ListedKey<'a> {
    state: &'static str,
    #[serde(flatten)]
    record: &'a KeyRecord,
}

impl From<NewKey> for NewSecret {
    fn from(new: NewKey) -> Self {
        let NewKey { record, secret } = new;
        Self { record, secret: secret.expose().to_owned() }
    }
}

/// Opens the key store that the config names to change it.
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
    let place = databases::keys_in(config, folder)?;
    // A key in a new database would be the only one that works.
    manifest::refuse_lost_keys(folder, &place)?;
    KeyStore::open_to_change(folder, place)
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
fn show(reach: &Reach, new: &NewSecret, quiet: bool) -> Result<()> {
    let NewSecret { record, secret } = new;
    if let Err(error) = say(format!("{secret}\n")) {
        revoke_by(reach, &record.id, UnderWay::End)?;
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

fn as_row(record: &KeyRecord) -> Vec<String> {
    vec![
        record.id.to_string(),
        record.tenant.to_string(),
        record.plan.as_ref().map_or("-", PlanName::as_str).to_owned(),
        only(&record.scopes),
        record.state(now()).to_owned(),
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
