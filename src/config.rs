//! `tollgate config`: checks, shows and describes the configuration, and reloads that of a
//! running gateway.

use anyhow::Result;
use serde::Deserialize;
use serde_json::Value;
use tollgate_config::Config;

use crate::admin::{Admin, Ask};
use crate::common::{Place, say};

/// Check, show and describe the configuration.
#[derive(clap::Args)]
pub struct ConfigArguments {
    #[command(subcommand)]
    action: ConfigAction,
}

#[derive(clap::Subcommand)]
enum ConfigAction {
    /// Report every mistake with its file, line and key.
    Check(Place),
    /// Print every value in force and its source.
    Show(Place),
    /// Print what a reload of the running gateway would change.
    Diff(Admin),
    /// Make the running gateway read its config again.
    Reload(Admin),
    /// Print the JSON schema of config files.
    Schema,
    /// Print an example file with every key at its default.
    Example,
}

/// Runs the subcommand.
pub fn run(arguments: ConfigArguments) -> Result<()> {
    match arguments.action {
        ConfigAction::Check(place) => {
            let config = place.load()?;
            let (tenants, plans) = (config.tenants().count(), config.plans().count());
            say(format!(
                "the config is valid: {}, {}\n",
                counted(tenants, "tenant"),
                counted(plans, "plan")
            ))?;
        }
        ConfigAction::Show(place) => say(place.show()?)?,
        ConfigAction::Diff(admin) => say(reload(&admin, Ask::Get("/config/difference"))?.shown())?,
        ConfigAction::Reload(admin) => {
            say(reload(&admin, Ask::Post("/config/reload", &Value::Null))?.shown())?
        }
        ConfigAction::Schema => say(format!("{:#}\n", Config::schema()))?,
        ConfigAction::Example => say(Config::example())?,
    }
    Ok(())
}

/// The gateway's answer to a reload.
#[derive(Deserialize)]
struct Reload {
    applied: bool,
    certificate_renewed: bool,
    changes: Vec<Change>,
}

/// A changed key.
#[derive(Deserialize)]
struct Change {
    key: String,
    old: Option<String>,
    new: Option<String>,
    place: String,
    effect: String,
}

/// Asks the running gateway for a reload or its difference. The gateway reads
/// its own files, environment and flags.
fn reload(admin: &Admin, ask: Ask<'_>) -> Result<Reload> {
    admin.connect()?.json(ask)
}

impl Reload {
    /// Returns the lines for the terminal, of 80 columns at most.
    fn shown(&self) -> String {
        let Self { applied, certificate_renewed, changes } = self;
        let mut text = String::new();
        for Change { key, old, new, place, effect } in changes {
            let [old, new] = [old, new].map(|value| value.as_deref().unwrap_or("not set"));
            text.push_str(&fitted(format!("{effect:8}{key}  {place}")));
            text.push_str(&fitted(format!("        {old} -> {new}")));
        }
        if *certificate_renewed {
            text.push_str("live    the certificate is renewed\n");
        }
        let pending = changes.iter().filter(|change| change.effect == "restart").count();
        let live = changes.len() - pending;
        text.push_str(&match (changes.len(), applied) {
            (0, _) if !certificate_renewed => {
                "no key differs from the config in force\n".to_owned()
            }
            (_, true) => {
                format!("{} in force, {pending} pending until a restart\n", counted(live, "change"))
            }
            (_, false) => format!("{} live, {pending} after a restart\n", counted(live, "change")),
        });
        text
    }
}

/// Returns a line of at most 80 characters.
fn fitted(line: String) -> String {
    if line.chars().count() <= COLUMNS {
        return line + "\n";
    }
    line.chars().take(COLUMNS - 1).chain(['…', '\n']).collect()
}

/// Columns of a terminal.
const COLUMNS: usize = 80;

fn counted(count: usize, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}
