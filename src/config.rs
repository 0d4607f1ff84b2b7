//! `tollgate config`: is it right, what is in force, what can be said.

use anyhow::Result;
use tollgate_config::Config;

use crate::common::{Place, say};

/// Check, show and describe the configuration.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Say everything that is wrong, with file, line and key.
    Check(Place),
    /// Print every value in force and where it comes from.
    Show(Place),
    /// Print the JSON schema of the config.
    Schema,
    /// Print an example with every key at its default.
    Example,
}

/// Does what was asked.
pub fn run(arguments: Arguments) -> Result<()> {
    match arguments.action {
        Action::Check(place) => {
            let config = place.load()?;
            let (tenants, plans) = (config.tenants().count(), config.plans().count());
            say(format!(
                "the config is right: {}, {}\n",
                counted(tenants, "tenant"),
                counted(plans, "plan")
            ))?;
        }
        Action::Show(place) => say(place.show()?)?,
        Action::Schema => say(format!("{:#}\n", Config::schema()))?,
        Action::Example => say(Config::example())?,
    }
    Ok(())
}

fn counted(count: usize, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}
