//! The reload of a config: the sources are read again and checked as a whole, and the
//! parts that need no restart replace those of the running config.

use std::sync::Arc;

use super::{Config, check, read_sections};
use crate::difference::{self, Change, Effect};
use crate::problem::{ConfigErrors, Place, Problem};
use crate::read::{Reader, join};
use crate::sections::Root;
use crate::source::{FilesHash, Gathered, Sources};

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
        let mut hash = FilesHash::default();
        let files = self.sources.iter().flat_map(|sources| sources.files(&mut Vec::new()));
        files.for_each(|path| hash.read(&path));
        self.finish_with_certificate(hash)
    }

    /// Adds the files of the certificate to the hash of the config's files.
    fn finish_with_certificate(&self, mut hash: FilesHash) -> [u8; 32] {
        let tls = &self.gateway.tls;
        tls.certificate.iter().chain(&tls.key).for_each(|path| hash.read(path));
        hash.finish()
    }

    /// Notes the hash of the files as they were read. An edit since then is a change.
    pub(super) fn with_files_at_load(self, files: FilesHash) -> Self {
        Self { files_at_load: self.finish_with_certificate(files), ..self }
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
        let Gathered { tree, loaded, files: _ } = sources.gather(&mut problems);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_notices_edit_between_reading_and_checking() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tollgate.toml");
        let sources = Sources { path: Some(path.clone()), ..Sources::default() };
        let write = |text: &str| std::fs::write(&path, text).expect("writes the file");
        for (edited, is_known) in [("[plans.one]\n", true), ("[plans.two]\n", false)] {
            write("[plans.one]\n");
            let mut problems = Vec::new();
            let gathered = sources.gather(&mut problems);
            write(edited);
            let config = Config::of_gathered(&sources, gathered, problems).expect("a config");
            assert_eq!(config.files_at_load() == config.files_hash(), is_known, "{edited}");
        }
    }
}
