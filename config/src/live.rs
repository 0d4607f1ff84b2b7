//! The config in force, which a reload replaces as a whole.

use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::config::Config;

/// The config in force. Clones share it and see its replacement.
#[derive(Clone, Debug)]
pub struct LiveConfig(Arc<ArcSwap<Config>>);

impl LiveConfig {
    /// Puts `config` in force.
    pub fn new(config: Arc<Config>) -> Self {
        Self(Arc::new(ArcSwap::new(config)))
    }

    /// Returns the config in force. A request takes it once and keeps it to its end, so
    /// that no request sees two configs.
    pub fn current(&self) -> Arc<Config> {
        self.0.load_full()
    }

    /// Puts `config` in force for all later calls of [`Self::current`].
    pub fn replace(&self, config: Arc<Config>) {
        self.0.store(config);
    }
}
