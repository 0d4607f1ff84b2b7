//! An engine without a thread: its owner turns it, under a clock of the
//! owner's. What it decides, books and says is what a running [`Engine`]
//! would, so hours of load can be played in seconds and twice alike.
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

/// An engine that does nothing between two calls of [`ManualEngine::turn`].
pub struct ManualEngine {
    core: Core,
    inbox: Arc<Inbox>,
}

impl ManualEngine {
    /// An engine whose meter runs from now on.
    pub fn new(
        backend: Box<dyn Backend>,
        options: EngineOptions,
        clock: Arc<dyn Clock>,
        journal: Box<dyn StepJournal>,
    ) -> Self {
        let (core, inbox) = assemble(backend, options, clock, journal);
        Self { core, inbox }
    }

    /// The way to it, as to any engine.
    pub fn handle(&self) -> EngineHandle {
        EngineHandle::new(Arc::clone(&self.inbox))
    }

    /// Takes what was handed in and runs one step, if there is anything to
    /// run. Time passes only as the backend and the owner move the clock.
    ///
    /// # Errors
    /// The fault that would have ended the engine's thread; it is not to be
    /// turned again.
    pub fn tick(&mut self) -> Result<Tick, EngineError> {
        let tick = self.core.tick(self.inbox.collect())?;
        if tick == Tick::Idle {
            self.core.idle()?;
        }
        Ok(tick)
    }

    /// The sums of the meter, up to the end of the last step.
    pub fn totals(&self) -> Totals {
        self.core.totals()
    }
}
