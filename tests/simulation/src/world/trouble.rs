//! Failures, and the times at which they happen.

use super::{Event, TROUBLED, World};
use crate::worker::MS;

impl World {
    pub(super) fn trouble(&mut self) {
        let trouble = self.chance.below(9);
        self.write_down(|| format!("trouble {trouble}"));
        match trouble {
            0 => self.kill_worker(),
            1 => self.kill_gateway(),
            2 => {
                self.kill_worker();
                self.kill_gateway();
            }
            3 | 4 => {
                let changes = self.chance.between(1, 60);
                self.disk.faults(|faults| faults.dark_in = Some(changes));
            }
            5 => self.cut_wire(),
            6 => {
                self.disk.faults(|faults| faults.failing_syncs = Some(3));
                self.soon(50, 600, Event::TroubleOver);
            }
            7 => {
                self.disk.faults(|faults| faults.full = true);
                self.soon(50, 900, Event::TroubleOver);
            }
            _ => self.stop_worker(),
        }
    }

    pub(super) fn trouble_over(&mut self) {
        self.disk.faults(|faults| {
            faults.full = false;
            faults.failing_syncs = None;
        });
        if self.now > TROUBLED {
            self.disk.faults(|faults| faults.dark_in = None);
            self.ending = true;
        }
    }

    pub(super) fn lose_power(&mut self) {
        self.mark(&[72]);
        self.write_down(|| "the power fails".to_owned());
        self.kill_worker();
        self.kill_gateway();
        self.disk.cut_power();
    }

    pub(super) fn kill_worker(&mut self) {
        let Some(working) = self.working.take() else { return };
        self.seen.worker_deaths += 1;
        self.write_down(|| format!("worker {:x} dies", working.epoch.0));
        self.disk.kill(working.process);
        self.facts.died(working.epoch, self.now * MS);
        drop(working);
        if let Some(number) = self.wire.as_ref().map(|wire| wire.number) {
            self.lose_at_worker(number);
        }
        self.soon(100, 700, Event::StartWorker);
    }

    /// Tells the worker to stop: it closes its journal and sends what it can.
    pub(super) fn stop_worker(&mut self) {
        let Some(working) = &mut self.working else { return };
        let epoch = working.epoch;
        if working.rig.close().is_ok() {
            self.facts.synced(epoch);
        }
        self.send_blocks();
        self.kill_worker();
    }

    pub(super) fn kill_gateway(&mut self) {
        let Some(gateway) = self.gateway.take() else { return };
        self.seen.gateway_deaths += 1;
        self.write_down(|| "gateway dies".to_owned());
        self.disk.kill(gateway.process);
        self.disk.forget_shared();
        drop(gateway);
        if let Some(number) = self.wire.as_ref().map(|wire| wire.number) {
            self.lose_at_gateway(number);
        }
        // The worker is a child process, so it notices the end of its gateway.
        let life = self.lives;
        self.soon(5, 250, Event::Orphaned(life));
        self.soon(300, 900, Event::StartGateway);
    }
}
