//! The reload of a config: the sources are read again and checked as a whole, and the
//! parts that need no restart replace those of the running config.

use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::{Config, check, read_sections};
use crate::difference::{self, Change, Effect};
use crate::problem::{ConfigErrors, Place, Problem};
use crate::read::{Reader, join};
use crate::sections::Root;
use crate::source::Sources;

/// The result of a reload that found no mistake.
#[derive(Clone, Debug)]
pub struct Reload {
    /// The config to put in force: the new one, with the parts of the running one that need
    /// a restart.
    pub config: Arc<Config>,
    /// Every key of the new config whose value differs from the running one, in the order
    /// of the keys. Those that need a restart are not part of `config`.
    pub changes: Vec<Change>,
}

impl Reload {
    /// Returns the changes that `config` applies.
    pub fn live(&self) -> impl Iterator<Item = &Change> {
        self.changes.iter().filter(|change| change.effect == Effect::Live)
    }

    /// Returns the changes that wait for a restart.
    pub fn pending(&self) -> impl Iterator<Item = &Change> {
        self.changes.iter().filter(|change| change.effect == Effect::Restart)
    }
}

impl Config {
    /// Reads the sources of this config again: the same paths, environment and flags.
    ///
    /// # Errors
    /// Every mistake in it, with place and key.
    pub fn reload(&self) -> Result<Reload, ConfigErrors> {
        match &self.sources {
            Some(sources) => self.reload_from(sources),
            // A config from text cannot have changed.
            None => Ok(Reload { config: Arc::new(self.clone()), changes: Vec::new() }),
        }
    }

    /// Returns a hash of the files that a reload reads: the config's and those of the
    /// certificate. Files that cannot be read count as empty, because the reload reports
    /// them.
    pub fn files_hash(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        let tls = &self.gateway.tls;
        let config = self.sources.iter().flat_map(|sources| sources.files(&mut Vec::new()));
        for path in config.chain(tls.certificate.clone()).chain(tls.key.clone()) {
            let content = std::fs::read(&path).unwrap_or_default();
            // With the names and lengths, so that no text can move between files unseen.
            hash.update(path.as_os_str().as_encoded_bytes());
            hash.update((content.len() as u64).to_le_bytes());
            hash.update(content);
        }
        hash.finalize().into()
    }

    /// Notes the present hash of the files.
    pub(super) fn with_files_at_load(self) -> Self {
        Self { files_at_load: self.files_hash(), ..self }
    }

    /// Returns the result of [`Self::files_hash`] at the first load.
    pub fn files_at_load(&self) -> [u8; 32] {
        self.files_at_load
    }

    /// Reads `sources` as the successor of this config.
    ///
    /// # Errors
    /// Every mistake in it, with place and key.
    pub fn reload_from(&self, sources: &Sources) -> Result<Reload, ConfigErrors> {
        let mut problems = Vec::new();
        let (tree, loaded) = sources.gather(&mut problems);
        let mut reader = Reader { problems };
        let (root, tree, demo) = read_sections(tree, &mut reader);
        // The new config must be valid as it is: the next start reads it.
        check::Checker { tree: &tree, root: &root, reader: &mut reader }.resolve(demo);
        if demo && !self.demo {
            let message = "no tenant is configured; a reload does not add the demo tenant: \
                           configure a tenant, or restart";
            reader.problem(&Place::Default, "tenants", message);
        }
        ConfigErrors::check(reader.problems)?;
        let changes = difference::between(&self.root, &root, &tree);
        let mut in_force = difference::in_force_after(&self.root, &root);
        ConfigErrors::check(plans_of_kept_models(&in_force, &root))?;
        // Tenants may name a model that is served only after the restart.
        let served: Vec<_> = in_force.models.keys().cloned().collect();
        for (name, model) in &root.models {
            in_force.models.entry(name.clone()).or_insert_with(|| model.clone());
        }
        let mut reader = Reader::default();
        // Checked once more: the parts of the running config that stay must agree with the new
        // ones.
        let checker = check::Checker { tree: &tree, root: &in_force, reader: &mut reader };
        let mut resolved = checker.resolve(demo);
        ConfigErrors::check(reader.problems)?;
        resolved.models.retain(|name, _| served.contains(name));
        in_force.models.retain(|name, _| served.contains(name));
        let config = Self::new(in_force, resolved, demo);
        let (sources, revision) = (Some(sources.clone()), self.revision + 1);
        let files_at_load = self.files_at_load;
        let config = Arc::new(Self { loaded, sources, files_at_load, revision, ..config });
        Ok(Reload { config, changes })
    }
}

/// Reports each model that the new config does not have, that is served until the restart,
/// and whose plan the new config does not have either.
fn plans_of_kept_models(in_force: &Root, new: &Root) -> Vec<Problem> {
    let lost = in_force.models.iter().filter_map(|(name, model)| {
        let plan = model.plan.as_ref().filter(|plan| !new.plans.contains_key(*plan))?;
        let key = join(&join("models", name.as_str()), "plan");
        let message = format!(
            "the model is served until a restart and has the plan {plan}, which is gone: keep \
             the plan until then"
        );
        Some(Problem { place: Place::Default, key, message })
    });
    lost.collect()
}
