//! Events of the worker.

use tollgate_domain::block::Attempt;
use tollgate_domain::{FinishReason, MonotonicTime, WorkerEpoch};

use super::{Event, WorkerMessage, World};
use crate::facts::End;
use crate::worker::{MS, Working};

impl World {
    pub(super) fn start_worker(&mut self) {
        if self.working.is_some() {
            return;
        }
        if self.gateway.is_none() {
            return self.soon(20, 100, Event::StartWorker);
        }
        self.processes += 1;
        self.lives += 1;
        let (process, epoch) = (self.processes, WorkerEpoch(0xe000 + u128::from(self.lives)));
        match Working::start(self.disk.of(process), process, epoch, &self.clock) {
            Ok(working) => {
                self.facts.born(epoch, self.now * MS);
                self.write_down(|| format!("worker {:x} starts", epoch.0));
                self.working = Some(working);
                let life = self.lives;
                self.soon(5, 30, Event::Turn(life));
                self.soon(0, 100, Event::Tick(life));
                self.soon(20, 80, Event::Connect);
            }
            Err(error) => {
                self.disk.kill(process);
                if error.kind() == std::io::ErrorKind::InvalidData {
                    self.facts.wrong(format!("a journal cannot be opened: {error}"));
                }
                self.soon(100, 300, Event::StartWorker);
            }
        }
    }

    pub(super) fn is_life(&self, life: u64) -> bool {
        self.lives == life && self.working.is_some()
    }

    pub(super) fn turn(&mut self, life: u64) {
        let (true, Some(working)) = (self.is_life(life), &mut self.working) else { return };
        if working.rig.is_closed() {
            return;
        }
        if working.runs.is_empty() {
            if working.idle(MonotonicTime(self.now * MS)).is_err() {
                return self.kill_worker();
            }
            return self.soon(20, 60, Event::Turn(life));
        }
        if working.began(self.now).is_err() {
            return self.kill_worker();
        }
        let started = self.now;
        let (least, most) = if self.chance.percent(3) { (200, 900) } else { (3, 40) };
        self.soon(least, most, Event::Stepped { life, started });
    }

    pub(super) fn stepped(&mut self, life: u64, started: u64) {
        let (true, Some(working)) = (self.is_life(life), &mut self.working) else { return };
        let table = &self.gateways.model().table;
        let Ok(stepped) = working.step(&mut self.chance, table, started, self.now) else {
            return self.kill_worker();
        };
        let epoch = working.epoch;
        self.facts.stepped(epoch, self.now * MS);
        for (attempt, connection, usage) in stepped.reported {
            self.send_to_gateway(connection, WorkerMessage::Progress(attempt, usage));
        }
        for (connection, figures) in stepped.ended {
            let attempt = Attempt { request: figures.request, attempt: figures.attempt };
            let is_paid = figures.reason != FinishReason::Fault;
            let end = End {
                caller: figures.caller,
                attempt: attempt.clone(),
                usage: figures.usage,
                is_paid,
            };
            self.facts.ended(epoch, end);
            self.send_to_gateway(connection, WorkerMessage::Finished(attempt, figures.usage));
        }
        self.at(self.now, Event::Turn(life));
    }

    pub(super) fn tick(&mut self, life: u64) {
        let (true, Some(working)) = (self.is_life(life), &mut self.working) else { return };
        let epoch = working.epoch;
        let segment = self.chance.between(600, 3_000);
        match working.rig.tick(segment) {
            Ok(()) => self.facts.synced(epoch),
            Err(_) if self.disk.is_dark() => return,
            // The engine ends at its next event.
            Err(_) => return self.kill_worker(),
        }
        self.send_blocks();
        self.at(self.now + 100, Event::Tick(life));
    }
}
