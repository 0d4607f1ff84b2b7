//! `tollgate admins`: creates, lists and revokes named admins, each with a role. Uses the
//! admin API of a running gateway, or the files of a stopped one.

use anyhow::Result;
use serde::Deserialize;
use serde_json::json;
use tollgate_domain::AdminName;
use tollgate_gateway::auth::{AdminRecord, NewAdmin, Role};

use crate::admin::{Admin, Ask, Reach, encoded};
use crate::common::{day, now, say, table};
use crate::keys::{make_store, open_store};

/// Create, list and revoke named admins.
#[derive(clap::Args)]
pub struct AdminsArguments {
    #[command(subcommand)]
    action: AdminsAction,
}

#[derive(clap::Subcommand)]
enum AdminsAction {
    /// Create an admin. The key is printed only once.
    Create(CreateAdmin),
    /// List the named admins, without their keys.
    List(ListAdmins),
    /// Revoke an admin permanently.
    Revoke(RevokeAdmin),
}

#[derive(clap::Args)]
struct CreateAdmin {
    #[command(flatten)]
    admin: Admin,
    /// The name, as the audit log will show it.
    name: AdminName,
    /// auditor (reads all, changes nothing), operator (reads all but money; lifts
    /// penalties, rests workers, reloads) or admin (everything).
    #[arg(long)]
    role: Role,
    /// Print only the key.
    #[arg(long)]
    quiet: bool,
}

#[derive(clap::Args)]
struct ListAdmins {
    #[command(flatten)]
    admin: Admin,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct RevokeAdmin {
    #[command(flatten)]
    admin: Admin,
    /// The name, as `list` shows it.
    name: AdminName,
}

/// Runs the subcommand.
pub fn run(arguments: AdminsArguments) -> Result<()> {
    match arguments.action {
        AdminsAction::Create(create) => self::create(create),
        AdminsAction::List(list) => self::list(list),
        AdminsAction::Revoke(revoke) => self::revoke(revoke),
    }
}

fn create(create: CreateAdmin) -> Result<()> {
    #[derive(Deserialize)]
    struct Created {
        #[serde(flatten)]
        record: AdminRecord,
        secret: String,
    }
    let CreateAdmin { admin, name, role, quiet } = create;
    let reach = admin.reach()?;
    let (record, secret) = match &reach {
        Reach::Running(client) => {
            let body = json!({ "name": name, "role": role });
            let Created { record, secret } = client.json(Ask::Post("/v1/admins", &body))?;
            (record, secret)
        }
        Reach::Stopped(config) => {
            let new = make_store(config)?.create_admin(&name, role, now())?;
            let NewAdmin { record, secret } = new;
            (record, secret.expose().to_owned())
        }
    };
    if let Err(error) = say(format!("{secret}\n")) {
        // As for an API key: nobody can use a key that was not printed.
        revoke_by(&reach, &name)?;
        return Err(error.context(format!("the key could not be printed; {name} was revoked")));
    }
    if !quiet {
        // The note goes to standard error, so that a script reads the key alone.
        let AdminRecord { name, role, created: _ } = record;
        eprintln!("admin {name} with the role {}; the key is not shown again", role.as_str());
    }
    Ok(())
}

fn list(list: ListAdmins) -> Result<()> {
    let records: Vec<AdminRecord> = match list.admin.reach()? {
        Reach::Running(client) => client.pages("/v1/admins")?,
        Reach::Stopped(config) => open_store(&config)?.admins()?,
    };
    if list.json {
        return say(format!("{:#}\n", json!({ "admins": records })));
    }
    let row = |record: &AdminRecord| {
        let AdminRecord { name, role, created } = record;
        vec![name.to_string(), role.as_str().to_owned(), day(Some(*created))]
    };
    say(table(&["name", "role", "created"], &records.iter().map(row).collect::<Vec<_>>()))
}

fn revoke(revoke: RevokeAdmin) -> Result<()> {
    let name = revoke.name;
    revoke_by(&revoke.admin.reach()?, &name)?;
    say(format!("admin {name} is revoked\n"))
}

fn revoke_by(reach: &Reach, name: &AdminName) -> Result<()> {
    match reach {
        Reach::Running(client) => {
            client.text(Ask::Delete(&format!("/v1/admins/{}", encoded(name.as_str()))))?;
        }
        Reach::Stopped(config) => {
            open_store(config)?.revoke_admin(name)?;
        }
    }
    Ok(())
}
