//! The wire: messages between worker and gateway, which come late, twice, out of
//! order or not at all.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tollgate_domain::{FinishReason, WorkerEpoch};

use super::{Connection, Event, GatewayMessage, PlantedBug, WorkerMessage, World};
use crate::gateway::caller;

impl World {
    pub(super) fn cut_wire(&mut self) {
        let Some(number) = self.wire.as_ref().map(|wire| wire.number) else { return };
        self.seen.cuts += 1;
        self.soon(0, 60, Event::LostAtGateway(number));
        self.soon(0, 60, Event::LostAtWorker(number));
    }

    pub(super) fn lose_at_gateway(&mut self, number: u64) {
        let Some(wire) = self.wire.as_mut().filter(|wire| wire.number == number) else { return };
        if std::mem::take(&mut wire.gateway_holds) {
            wire.task.abort();
            self.soon(0, 40, Event::LostAtWorker(number));
            let again = self.gateway.as_mut().map(|gateway| gateway.lost(number, &mut self.facts));
            for request in again.into_iter().flatten() {
                let life = self.gateway.as_ref().map_or(0, |gateway| gateway.life);
                self.soon(1, 30, Event::Follow { life, request });
            }
        }
        self.hang_up();
    }

    pub(super) fn lose_at_worker(&mut self, number: u64) {
        let Some(wire) = self.wire.as_mut().filter(|wire| wire.number == number) else { return };
        if std::mem::take(&mut wire.worker_holds) {
            if let Some(working) = &mut self.working {
                for run in working.runs.iter_mut().filter(|run| run.connection == number) {
                    run.cancelled.get_or_insert(FinishReason::Fault);
                }
            }
            self.soon(0, 40, Event::LostAtGateway(number));
        }
        self.hang_up();
    }

    pub(super) fn hang_up(&mut self) {
        if self.wire.as_ref().is_some_and(|wire| !wire.gateway_holds && !wire.worker_holds) {
            self.wire = None;
            self.soon(50, 120, Event::Connect);
        }
    }

    pub(super) fn connect(&mut self) {
        let (Some(gateway), Some(working), None) = (&mut self.gateway, &self.working, &self.wire)
        else {
            return;
        };
        self.wires += 1;
        let online = self.gateways.online(working.epoch, gateway);
        let (blocks, receiver) = mpsc::channel(1_024);
        let (ack_sender, acks) = mpsc::channel(1_024);
        let taken = Arc::new(AtomicBool::new(false));
        let number = self.wires;
        let task = gateway.follow_journal(
            number,
            Arc::clone(&online),
            ReceiverStream::new(receiver),
            ack_sender,
            Arc::clone(&taken),
        );
        self.wire = Some(Connection {
            number,
            online,
            reader: working.rig.reader(),
            blocks,
            acks,
            taken,
            task,
            worker_holds: true,
            gateway_holds: true,
            arrivals: [self.now; 2],
        });
        self.send_blocks();
    }

    pub(super) fn send_to_gateway(&mut self, number: u64, message: WorkerMessage) {
        let delay = self.chance.between(0, 15);
        let wire = self.wire.as_mut();
        let Some(wire) = wire.filter(|wire| wire.number == number && wire.worker_holds) else {
            return;
        };
        let mut when = (self.now + delay).max(wire.arrivals[0]);
        if let WorkerMessage::Block(block) = &message {
            if self.chance.percent(1) {
                // The block arrives after its successor.
                self.shuffled = true;
                when += self.chance.between(1, 150);
            } else {
                wire.arrivals[0] = when;
            }
            if self.chance.percent(8) {
                self.seen.repeated += 1;
                let mut block = block.clone();
                if self.plant == PlantedBug::PostedTwice {
                    block.block += 1;
                    if block.first_step > 0 {
                        (block.first_step, block.last_step) =
                            (block.last_step + 1, block.last_step + 1);
                    }
                }
                let message = Box::new(WorkerMessage::Block(block));
                self.at(when, Event::ToGateway { connection: number, message });
            }
        } else {
            wire.arrivals[0] = when;
        }
        self.at(when, Event::ToGateway { connection: number, message: Box::new(message) });
    }

    pub(super) fn send_to_worker(&mut self, number: u64, message: GatewayMessage) {
        let delay = self.chance.between(0, 15);
        let wire = self.wire.as_mut();
        let Some(wire) = wire.filter(|wire| wire.number == number && wire.gateway_holds) else {
            return;
        };
        let when = (self.now + delay).max(wire.arrivals[1]);
        wire.arrivals[1] = when;
        self.at(when, Event::ToWorker { connection: number, message: Box::new(message) });
    }

    pub(super) fn receive_at_gateway(&mut self, connection: u64, message: WorkerMessage) {
        let Some(wire) = self.wire.as_ref().filter(|wire| wire.number == connection) else {
            return;
        };
        let (true, Some(gateway)) = (wire.gateway_holds, &mut self.gateway) else { return };
        match message {
            WorkerMessage::Block(block) => {
                if wire.blocks.try_send(Ok(*block)).is_err() {
                    self.lose_at_gateway(connection);
                }
            }
            WorkerMessage::Progress(attempt, usage) => gateway.progress(&attempt, usage),
            WorkerMessage::Finished(attempt, usage) => {
                self.seen.answered += 1;
                self.diary.push(format!("{:>6} heard the end of {attempt:?}", self.now));
                gateway.finished(&attempt, usage, &mut self.facts);
            }
        }
    }

    pub(super) fn receive_at_worker(&mut self, connection: u64, message: GatewayMessage) {
        let holds =
            self.wire.as_ref().is_some_and(|wire| wire.number == connection && wire.worker_holds);
        let (true, Some(working)) = (holds, &mut self.working) else { return };
        match message {
            GatewayMessage::Order(tenant, attempt, order) => {
                working.order((caller(tenant), attempt, connection), order, self.now);
            }
            GatewayMessage::Cancel(attempt) => {
                for run in working.runs.iter_mut().filter(|run| run.attempt == attempt) {
                    run.cancelled.get_or_insert(FinishReason::Cancelled);
                }
            }
            GatewayMessage::Ack(ack) => {
                let epoch = WorkerEpoch::try_from(ack.epoch).expect("an epoch");
                working.rig.acknowledge(epoch, ack.block);
            }
        }
    }

    pub(super) fn send_blocks(&mut self) {
        let mut blocks = Vec::new();
        let Some(wire) = self.wire.as_mut().filter(|wire| wire.worker_holds) else { return };
        let number = wire.number;
        loop {
            match wire.reader.next_block() {
                Ok(Some(block)) => blocks.push(block),
                Ok(None) => break,
                Err(_) if self.disk.is_dark() => break,
                Err(error) => {
                    self.facts.wrong(format!("the journal cannot be read: {error}"));
                    break;
                }
            }
        }
        for block in blocks {
            self.seen.blocks += 1;
            self.facts.handed(&block);
            let parts = block.parts();
            self.mark(&[73, parts.epoch.0 as u64, parts.number, parts.wall.nanos()]);
            self.write_down(|| {
                let ended = parts.finished.iter().map(|it| (&it.attempt.request, it.reason));
                let ended: Vec<_> = ended.collect();
                format!("sent {:x}/{}: {ended:?}", parts.epoch.0, parts.number)
            });
            if self.plant == PlantedBug::AcknowledgedTooEarly
                && let Some(working) = &self.working
            {
                working.rig.acknowledge(parts.epoch, parts.number);
            }
            self.send_to_gateway(number, WorkerMessage::Block(Box::new(block.into())));
        }
    }
}
