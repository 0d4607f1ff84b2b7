//! `tollgate config`: checks, shows and describes the configuration.

use anyhow::Result;
use tollgate_config::Config;

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
        ConfigAction::Schema => say(format!("{:#}\n", Config::schema()))?,
        ConfigAction::Example => say(Config::example())?,
    }
    Ok(())
}

fn counted(count: usize, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}
