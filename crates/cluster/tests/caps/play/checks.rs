//! The promises of a play: after each step, and at its end.

use super::Play;
use crate::database::WORKERS;
use crate::omission::Omission;

impl Play {
    /// Checks that the cap holds even if everything that may be spent now is spent now: the
    /// costs of the ended attempts, the worst case of those that run or are on their way to a
    /// worker that takes them, the slices of gateways whose work a worker takes, and what a
    /// database would grant.
    pub(super) fn check_cap(&self) -> Result<(), String> {
        let ended = self.cost;
        let running = self.workers.iter().flat_map(|worker| &worker.running);
        let running: u64 = running.map(|attempt| attempt.worst).sum();
        let wire = self.wire.iter().filter(|sent| {
            let worker = &self.workers[sent.worker];
            worker.life == sent.worker_life && worker.takes(sent.attempt.number, sent.timeline)
        });
        let wire: u64 = wire.map(|sent| sent.attempt.worst).sum();
        let usable = (0..self.gateways.len()).filter(|&index| self.is_taken(index));
        let slices: u64 =
            usable.map(|index| self.gateways[index].slice.rest(self.clock(index))).sum();
        let granting = self.databases.iter().filter(|database| {
            database.unlearned.is_empty()
                && self.workers.iter().any(|worker| worker.gate.timeline() <= database.timeline)
        });
        let rest: u64 = granting.map(|database| database.cap.rest(self.cap)).sum();
        match ended + running + wire + slices + rest {
            all if all > self.cap => Err(format!(
                "{all} of {} may be spent: {ended} ended, {running} run, {wire} on the way, \
                 {slices} in slices, {rest} to grant",
                self.cap
            )),
            _ => Ok(()),
        }
    }

    /// Returns true if a worker would take new work of a gateway now.
    fn is_taken(&self, index: usize) -> bool {
        let gateway = &self.gateways[index];
        let any_beat = self.omits(Omission::BeatAfterOpen);
        let is_open = |worker: usize| {
            any_beat || gateway.streams[worker].is_some_and(|opened| gateway.beat > opened)
        };
        gateway.lives
            && (0..WORKERS).any(|worker| {
                is_open(worker) && self.workers[worker].takes(gateway.number, gateway.timeline)
            })
    }

    /// Ends all gateways, starts one, and plays without faults until the others are free.
    /// Then every cost must be posted once, and the whole rest be there to grant.
    pub(super) fn end(&mut self) -> Result<(), String> {
        self.gateways.iter_mut().for_each(|gateway| gateway.lives = false);
        self.databases.drain(..self.databases.len() - 1);
        self.wire.clear();
        self.late.clear();
        self.join();
        let last = self.gateways.len() - 1;
        for _ in 0..600 {
            self.pass(1_000);
            for index in 0..WORKERS {
                while let Some(attempt) = self.workers[index].running.pop() {
                    self.journal(index, attempt);
                }
                let blocks = self.workers[index].journal.clone();
                let posted = self.newest().posted[index] as usize;
                let first = posted as u64 + 1;
                if posted < blocks.len() {
                    self.newest().post(index, first, &blocks[posted..]);
                }
            }
            self.close();
            self.tell();
            self.free();
            let now = self.clock(last);
            let ask = self.gateways[last].slice.ask(now, 0, 0, 0);
            self.answer(last, ask, now);
            self.check_cap()?;
        }
        self.check_end(last)
    }

    fn check_end(&mut self, last: usize) -> Result<(), String> {
        let cost = self.cost;
        let cap = self.newest().cap;
        if cap.spent != cost {
            return Err(format!("{cost} was spent, and {} is posted", cap.spent));
        }
        let now = self.clock(last);
        let need = self.cap - cost - self.gateways[last].slice.rest(now);
        let ask = self.gateways[last].slice.ask(now, need, 0, 0);
        self.answer(last, ask, now);
        let rest = self.gateways[last].slice.rest(now);
        if rest + cost != self.cap {
            return Err(format!("{cost} of {} was spent, and {rest} can be granted", self.cap));
        }
        Ok(())
    }
}
