//! An engine without a thread. Its owner calls [`ManualEngine::tick`] and moves the clock.
//! The engine decides, books and delivers exactly like a running [`Engine`], so hours of
//! load can be simulated in seconds, with the same result each time.
//!
//! [`Engine`]: super::Engine

use std::sync::Arc;

use super::inbox::{EngineHandle, Inbox};
use super::journal::StepJournal;
use super::tick::Core;
use super::{EngineError, EngineOptions, assemble};
use crate::backend::Backend;
use crate::clock::Clock;
use crate::meter::Totals;

pub use super::tick::Tick;

/// An engine that does nothing between two calls of [`ManualEngine::tick`].
pub struct ManualEngine {
    core: Core,
    inbox: Arc<Inbox>,
}

impl ManualEngine {
    /// Creates an engine. Its meter starts now.
    pub fn new(
        backend: Box<dyn Backend>,
        options: EngineOptions,
        clock: Arc<dyn Clock>,
        journal: Box<dyn StepJournal>,
    ) -> Self {
        let (core, inbox) = assemble(backend, options, clock, journal);
        Self { core, inbox }
    }

    /// Returns a handle to the engine.
    pub fn handle(&self) -> EngineHandle {
        EngineHandle::new(Arc::clone(&self.inbox))
    }

    /// Applies the commands and runs one step if there is work. Time passes only when the
    /// backend or the owner moves the clock.
    ///
    /// # Errors
    ///
    /// The fault that would have ended the engine's thread. The engine must not be used
    /// after it.
    pub fn tick(&mut self) -> Result<Tick, EngineError> {
        let tick = self.core.tick(self.inbox.collect())?;
        if tick == Tick::Idle {
            self.core.idle()?;
        }
        Ok(tick)
    }

    /// Returns the totals of the meter up to the end of the last step.
    pub fn totals(&self) -> Totals {
        self.core.totals()
    }
}
