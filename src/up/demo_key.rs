//! The key of the demo tenant: written for the first start, and removed once the
//! configuration names tenants, because it would be refused everywhere.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::{Context, Result};
use tollgate_config::Config;
use tollgate_domain::TenantId;
use tollgate_gateway::auth::{KeyOptions, KeyStore, Scopes, UnderWay};

use crate::common::now;

/// Makes the demo tenant's key if the config has no tenants, and otherwise revokes and removes
/// the key of an earlier start. A config may name a tenant `demo`; its keys stay.
///
/// # Errors
/// The key or its file cannot be written.
pub fn follow(config: &Config, folder: &Path, keys: &KeyStore) -> Result<()> {
    let demo = TenantId::new(DEMO)?;
    if config.is_demo() {
        return make(folder, &demo, keys);
    }
    if config.tenants().any(|tenant| tenant.name == demo) {
        return Ok(());
    }
    remove(folder, &demo, keys)
}

/// Creates the demo tenant's key, once. No other secret is ever written as plain
/// text.
fn make(folder: &Path, demo: &TenantId, keys: &KeyStore) -> Result<()> {
    let path = folder.join(FILE);
    if path.exists() {
        return Ok(());
    }
    let options = KeyOptions {
        label: LABEL.to_owned(),
        scopes: Scopes::everything(),
        plan: None,
        expires: None,
    };
    let new = keys.create(demo, options, now())?;
    // The rename is atomic, so a crash cannot leave half a key.
    let unfinished = folder.join("demo.key.new");
    let written = OpenOptions::new()
        .write(true)
        .create(true)
        // A crash may have left a draft.
        .truncate(true)
        // Only the owner may read the key.
        .mode(0o600)
        .open(&unfinished)
        .and_then(|mut file| writeln!(file, "{}", new.secret.expose()))
        .and_then(|()| std::fs::rename(&unfinished, &path));
    written.with_context(|| format!("cannot write {}", path.display()))
}

fn remove(folder: &Path, demo: &TenantId, keys: &KeyStore) -> Result<()> {
    let path = folder.join(FILE);
    if !path.exists() {
        return Ok(());
    }
    let now = now();
    for key in keys.list(Some(demo))? {
        if key.label == LABEL && key.is_active(now) {
            keys.revoke(&key.id, UnderWay::Finish, now)?;
        }
    }
    // After the revocation: a key whose secret is gone could not be told from one in use.
    std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
    tracing::info!(
        file = %path.display(),
        "revoked and removed the key of the demo tenant; the configuration names tenants"
    );
    Ok(())
}

const DEMO: &str = "demo";
const FILE: &str = "demo.key";
const LABEL: &str = "made at the first start";
