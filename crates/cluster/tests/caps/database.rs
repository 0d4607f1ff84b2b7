//! The database of a play: rows, and the transactions on them.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use tollgate_cluster::{Answer, Ask, CapRow, GatewayNumber, Retirement, SliceRow, Timeline};

use crate::omission::Omission;

pub(crate) const WORKERS: usize = 2;

#[derive(Clone, Default)]
pub(crate) struct Database {
    omitted: Option<Omission>,
    pub(crate) timeline: Timeline,
    pub(crate) cap: CapRow,
    pub(crate) slices: BTreeMap<GatewayNumber, SliceRow>,
    pub(crate) members: BTreeMap<GatewayNumber, Member>,
    /// The number of the last posted block of each worker.
    pub(crate) posted: [u64; WORKERS],
    next_number: u32,
    /// Facts that must be known before anything is granted, after commits were lost.
    pub(crate) unlearned: BTreeSet<Unlearned>,
}

/// The row of a gateway.
#[derive(Clone)]
pub(crate) struct Member {
    /// A random number, by which a gateway knows its own row.
    life: u64,
    beat: u64,
    pub(crate) retirement: Option<Retirement<usize>>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Unlearned {
    /// The grants of this gateway.
    Gateway(GatewayNumber),
    /// The numbers of the gateways whose attempts this worker has.
    Worker(usize),
}

/// A block of a worker's journal: one attempt.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    pub(crate) number: GatewayNumber,
    pub(crate) cost: u64,
}

/// The grants that a gateway remembers, and the call whose answer made it tell them.
#[derive(Clone, Copy)]
pub(crate) struct Told {
    pub(crate) call: u64,
    pub(crate) granted: u64,
}

/// The beats of other live gateways, as an answer has them.
pub(crate) type Beats = Vec<(GatewayNumber, u64)>;

impl Database {
    pub(crate) fn new(omitted: Option<Omission>) -> Self {
        Self { omitted, ..Self::default() }
    }

    fn omits(&self, rule: Omission) -> bool {
        self.omitted == Some(rule)
    }

    /// Adds a gateway with a number of its own.
    pub(crate) fn join(&mut self, life: u64) -> GatewayNumber {
        let number = GatewayNumber(self.next_number);
        self.next_number += 1;
        self.members.insert(number, Member { life, beat: 0, retirement: None });
        self.slices.insert(number, SliceRow::default());
        number
    }

    /// Answers a beat of a gateway; `None` if it has no row or is retired.
    pub(crate) fn ask(
        &mut self,
        number: GatewayNumber,
        life: u64,
        cap: u64,
        mut ask: Ask,
    ) -> Option<(Answer, Beats)> {
        let live = self.members.values().filter(|member| member.retirement.is_none()).count();
        let member = self.members.get_mut(&number).filter(|member| member.life == life)?;
        if member.retirement.is_some() {
            return None;
        }
        member.beat += 1;
        if !self.unlearned.is_empty() {
            (ask.need, ask.expected) = (0, 0);
        }
        let slice = self.slices.get_mut(&number).expect("a member has a slice");
        if self.omitted == Some(Omission::CallNumbers) {
            slice.call = 0;
        }
        let gateways = NonZeroU32::new(live as u32).expect("this one lives");
        // A stale call gets no answer that anyone reads.
        let _ = self.cap.ask(slice, cap, gateways, ask);
        let answer = Answer { call: ask.call, row: *slice, timeline: self.timeline };
        let others = self
            .members
            .iter()
            .filter(|(other, member)| **other != number && member.retirement.is_none());
        Some((answer, others.map(|(number, member)| (*number, member.beat)).collect()))
    }

    /// Posts blocks of a worker, the first of which has this number.
    pub(crate) fn post(&mut self, worker: usize, first: u64, blocks: &[Block]) {
        if self.posted[worker] + 1 != first && !self.omits(Omission::PostOnce) {
            return;
        }
        for block in blocks {
            self.cap.post(self.slices.get_mut(&block.number), block.cost);
        }
        let last = first + blocks.len() as u64 - 1;
        self.posted[worker] = self.posted[worker].max(last);
    }

    /// Learns the grants that a gateway remembers. Returns its row; `None` if it has none, or
    /// if a newer call came before.
    pub(crate) fn learn(&mut self, number: GatewayNumber, told: Told) -> Option<SliceRow> {
        let slice = self.slices.get_mut(&number)?;
        let Told { mut call, mut granted } = told;
        if self.omitted == Some(Omission::LearnNewest) {
            call = slice.call;
        }
        if self.omitted == Some(Omission::LearnLess) {
            granted = granted.max(slice.granted);
        }
        self.cap.learn(slice, call, granted).ok()?;
        self.unlearned.remove(&Unlearned::Gateway(number));
        Some(*slice)
    }

    pub(crate) fn retire(&mut self, number: GatewayNumber) {
        let Some(member) = self.members.get_mut(&number) else { return };
        member.retirement.get_or_insert_with(|| Retirement::new(0..WORKERS));
        match self.omitted {
            Some(Omission::CloseBeforeFree) => self.free(number),
            Some(Omission::LearnUntilFree) => {
                self.unlearned.remove(&Unlearned::Gateway(number));
            }
            _ => {}
        }
    }

    /// Adds a retired gateway that a worker has attempts of and this database has no row of.
    pub(crate) fn adopt_unknown(&mut self, number: GatewayNumber) {
        let retirement = Some(Retirement::new(0..WORKERS));
        self.members.entry(number).or_insert_with(|| {
            self.slices.insert(number, SliceRow::default());
            self.unlearned.insert(Unlearned::Gateway(number));
            Member { life: 0, beat: 0, retirement }
        });
    }

    /// Frees the slices of the retired gateways of which nothing can be posted any more.
    pub(crate) fn free_complete(&mut self) {
        let (omitted, posted) = (self.omitted, self.posted);
        let of = |worker: &usize| match omitted {
            Some(Omission::PostBeforeFree) => u64::MAX,
            _ => posted[*worker],
        };
        let complete = self.members.iter().filter(|(_, member)| {
            member.retirement.as_ref().is_some_and(|retirement| retirement.is_complete(of))
        });
        for number in complete.map(|(number, _)| *number).collect::<Vec<_>>() {
            self.free(number);
        }
    }

    fn free(&mut self, number: GatewayNumber) {
        self.members.remove(&number);
        let slice = self.slices.remove(&number).expect("a member has a slice");
        self.cap.free(slice);
        self.unlearned.remove(&Unlearned::Gateway(number));
    }

    /// Makes a standby, which has all of these commits, the database.
    pub(crate) fn promoted(mut self) -> Self {
        self.timeline = Timeline(self.timeline.0 + 1);
        if !self.omits(Omission::JumpNumbers) {
            self.next_number += 1_000;
        }
        if !self.omits(Omission::Learn) {
            let gateways = self.members.keys().copied().map(Unlearned::Gateway);
            self.unlearned = gateways.chain((0..WORKERS).map(Unlearned::Worker)).collect();
        }
        self
    }
}
