//! The example file: every key with its description and default. A test checks that
//! `config/tollgate.toml` is equal to it.

use std::collections::BTreeMap;

use tollgate_domain::{ModelName, PlanName, PoolName, PriceListName, TenantId, WorkerName};

use crate::read::{Section, Visited};
use crate::schema::sentence;
use crate::sections::{DEMO_MODEL, IssuerName, RawAuth, RawCluster, Root};

/// Columns of a comment line at most.
const WIDTH: usize = 79;

const HEAD: &str = "\
# The configuration of tollgate: every key with its default. Copy the keys that
# you want to change.
#
# --config takes a file like this one, or a folder of such files. A flag takes
# precedence over an environment variable, and a variable over a file. The key
# gateway.listen has the flag --listen and the variable
# TOLLGATE_GATEWAY__LISTEN. Durations are written \"250ms\", \"2s\" or \"1h\", and
# sizes \"64KiB\" or \"2MiB\". A relative path is relative to its file.
# A line that begins with # and no space is an example; uncomment it to use it.
";

pub(crate) fn whole() -> String {
    let mut text = HEAD.to_owned();
    // Named entries have no default, so the file shows one example of each.
    let root = Root::default();
    root.visit("", &mut |visited| write(&mut text, visited, Standing::Default));
    samples().visit("", &mut |visited| {
        let (Visited::Table { key, .. } | Visited::Field { key, .. }) = &visited;
        let named =
            ["plans.", "pools.", "tenants.", "models.", "prices.", "auth.jwt.", "cluster.workers."];
        if named.iter().any(|table| key.starts_with(table)) {
            write(&mut text, visited, Standing::Example);
        }
    });
    text
}

/// Returns a config with one entry in each table of named entries.
pub(crate) fn samples() -> Root {
    Root { auth: sample_auth(), ..sample_names() }
}

/// The form of a key in the file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Standing {
    Default,
    Example,
}

fn write(text: &mut String, visited: Visited<'_>, standing: Standing) {
    match visited {
        // These two tables hold nothing but other tables.
        Visited::Table { key: "" | "auth", .. } => {}
        Visited::Table { key, doc } => {
            text.push('\n');
            comment(text, &sentence(doc));
            // An example must not take effect when the file is used as it is.
            let mark = if standing == Standing::Example { "#" } else { "" };
            text.push_str(&format!("{mark}[{key}]\n"));
        }
        Visited::Field { key, doc, value, sample } => {
            let (_, name) = key.rsplit_once('.').unwrap_or(("", key));
            text.push('\n');
            comment(text, &sentence(doc));
            let line = match (value, standing) {
                (Some(value), Standing::Default) => format!("{name} = {value}\n"),
                (Some(value), Standing::Example) => format!("#{name} = {value}\n"),
                (None, _) => format!("#{name} = {sample}\n"),
            };
            text.push_str(&line);
        }
    }
}

/// Appends a comment, wrapped at [`WIDTH`].
fn comment(text: &mut String, sentence: &str) {
    let mut line = "#".to_owned();
    for word in sentence.split_whitespace() {
        if line.len() + 1 + word.len() > WIDTH {
            text.push_str(&line);
            text.push('\n');
            line = "#".to_owned();
        }
        line.push(' ');
        line.push_str(word);
    }
    text.push_str(&line);
    text.push('\n');
}

#[expect(clippy::expect_used, reason = "the names are constants that follow the rules")]
fn sample_names() -> Root {
    let good = "the name follows the rules";
    Root {
        plans: BTreeMap::from([(PlanName::new("team").expect(good), Default::default())]),
        pools: BTreeMap::from([(PoolName::new("trial").expect(good), Default::default())]),
        tenants: BTreeMap::from([(TenantId::new("acme").expect(good), Default::default())]),
        models: BTreeMap::from([(ModelName::new(DEMO_MODEL).expect(good), Default::default())]),
        prices: BTreeMap::from([(PriceListName::new("standard").expect(good), Default::default())]),
        cluster: RawCluster {
            workers: BTreeMap::from([(WorkerName::new("gpu0").expect(good), Default::default())]),
            ..RawCluster::default()
        },
        ..Root::default()
    }
}

#[expect(clippy::expect_used, reason = "the name is a constant that follows the rules")]
fn sample_auth() -> RawAuth {
    let name = IssuerName::new("corporate").expect("the name follows the rules");
    RawAuth { jwt: BTreeMap::from([(name, Default::default())]) }
}
