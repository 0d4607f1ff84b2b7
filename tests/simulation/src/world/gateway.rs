//! Events of the gateway.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tollgate_domain::RequestId;
use tollgate_ledger::LedgerError;

use super::{Event, GatewayMessage, World, living};
use crate::gateway::Next;
use crate::worker::Wanted;

impl World {
    pub(super) fn start_gateway(&mut self) {
        if self.gateway.is_some() {
            return;
        }
        self.processes += 1;
        let disk = self.disk.of(self.processes);
        self.mounted.remount(disk);
        let ledger = self.mounted.ledger("/ledger.db");
        match self.gateways.start(self.processes, ledger, self.now) {
            Ok(gateway) => {
                let life = gateway.life;
                self.gateway = Some(gateway);
                self.write_down(|| format!("gateway {life} starts"));
                self.soon(1, 10, Event::Commit(life));
                self.soon(900, 1_100, Event::Sweep(life));
                self.soon(20, 80, Event::Connect);
            }
            Err(error) => {
                self.disk.kill(self.processes);
                self.disk.forget_shared();
                if matches!(error, LedgerError::Damaged(_) | LedgerError::Format { .. }) {
                    self.facts.wrong(format!("the ledger cannot be opened: {error}"));
                }
                self.soon(100, 300, Event::StartGateway);
            }
        }
    }

    pub(super) fn commit(&mut self, life: u64) {
        let Some(gateway) = living(&mut self.gateway, life) else { return };
        let wait = gateway.commit();
        self.soon(wait, wait + 8, Event::Commit(life));
    }

    pub(super) fn sweep(&mut self, life: u64) {
        let Some(gateway) = living(&mut self.gateway, life) else { return };
        gateway.sweep(&mut self.facts);
        self.soon(900, 1_100, Event::Sweep(life));
    }

    pub(super) fn ask(&mut self) {
        let (number, tenant) = (self.chance.number(), self.chance.below(2) as usize);
        let order = Wanted {
            prompt: self.chance.between(1, 40),
            stops_after: self.chance.between(1, 30),
            most: self.chance.between(4, 40),
            budget: None,
        };
        let is_streamed = self.chance.percent(70);
        let is_left = self.chance.percent(20);
        let is_forgotten = self.chance.percent(4);
        let leaves = self.chance.between(20, 800);
        let Some(gateway) = &mut self.gateway else { return };
        // Without a worker no model is known, so clients cannot ask for one.
        let wire = self.wire.as_ref().filter(|wire| wire.taken.load(Ordering::Relaxed));
        gateway.has_model |= wire.is_some_and(|wire| wire.gateway_holds);
        if !gateway.has_model {
            return;
        }
        self.seen.asked += 1;
        let id = RequestId::from_random(number.into());
        let asked = gateway.ask(id.clone(), tenant, order, (is_streamed, is_forgotten));
        let life = gateway.life;
        self.gateways.remember(tenant, id);
        let Some(request) = asked else { return };
        self.soon(0, 5, Event::Follow { life, request });
        if is_left {
            self.soon(leaves, leaves, Event::Leave { life, request });
        }
    }

    /// Moves a waiting request on.
    pub(super) fn follow(&mut self, life: u64, request: usize) {
        let Some(gateway) = living(&mut self.gateway, life) else { return };
        let wire = self.wire.as_ref().filter(|wire| {
            wire.gateway_holds && wire.taken.load(Ordering::Relaxed) && wire.online.takes_requests()
        });
        let place = wire.map(|wire| (wire.number, Arc::clone(&wire.online)));
        let number = place.as_ref().map_or(0, |place| place.0);
        match gateway.follow(request, place, &mut self.facts) {
            Next::Wait => self.soon(20, 50, Event::Follow { life, request }),
            Next::Send(message) => {
                self.write_down(|| format!("wire {number}: {message:?}"));
                self.send_to_worker(number, message);
            }
            Next::Nothing => {}
        }
    }

    pub(super) fn leave(&mut self, life: u64, request: usize) {
        let Some(gateway) = living(&mut self.gateway, life) else { return };
        if let Some((connection, attempt)) = gateway.leave(request) {
            let number = attempt.attempt;
            self.send_to_worker(connection, GatewayMessage::Cancel(attempt));
            let when = self.now + 10_000;
            self.at(when, Event::Impatient { life, request, attempt: number });
        }
    }
}
