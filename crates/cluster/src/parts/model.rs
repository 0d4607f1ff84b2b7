//! The store of rates as a model: the script that runs on a server makes the same changes.

use std::collections::BTreeMap;

use super::{BORN_FULL, Beat, BeatAnswer, LIFE, PartAnswer, PartAsk, WHOLE};

/// The milliseconds of [`LIFE`].
const LIFE_MS: u64 = LIFE.as_millis() as u64;
/// The step back of the clock that changes nothing, in milliseconds.
const STEP_MS: u64 = 1_000;
/// The milliseconds for which the calls of a gateway are remembered after its end.
const MEMORY_MS: u64 = 60_000;

/// The store. Times are milliseconds of its clock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Store {
    state: Option<State>,
    members: BTreeMap<u32, Member>,
    pools: BTreeMap<String, Pool>,
    wanted: BTreeMap<String, (u64, u64)>,
}

/// The state of the store itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State {
    born: u64,
    /// The birth for which all gateways have claimed.
    settled: u64,
    /// The time at which they had.
    settled_at: u64,
    /// The time of the newest beat.
    last: u64,
    /// The process of the server.
    run: u64,
}

/// A gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Member {
    until: u64,
    /// The time since which it has not been lost. What it had before does not count.
    since: u64,
    told: u64,
    /// True if the gateway has started since the store was born.
    is_new: bool,
}

/// The parts of one rate.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Pool {
    born: u64,
    level: u64,
    at: u64,
    fill: u64,
    size: u64,
    entries: BTreeMap<u32, Entry>,
}

/// The parts that one gateway has of a rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Entry {
    since: u64,
    call: u64,
    parts: u64,
    wanted: u64,
}

/// The reason why a call changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoAnswer {
    /// The store does not know the gateway, or has lost what it knew: a beat must come first.
    Unknown,
    /// A newer call of the same gateway came before.
    Stale,
}

impl Store {
    /// Adopts a beat that comes at `now` over a connection to the process `run`.
    pub fn beat(&mut self, now: u64, run: u64, beat: &Beat) -> BeatAnswer {
        let is_lost = |state: &State| state.run != run || state.is_stale(now);
        let mut state = match self.state.filter(|state| !is_lost(state)) {
            Some(state) => state,
            None => {
                // Also after the clock was set back: their ends may be hours away.
                self.members.clear();
                // A gateway that starts alone has nobody whose grants were lost.
                let alone = beat.is_first && beat.gateways <= 1;
                let born = if alone { BORN_FULL } else { now };
                State { born, settled: 0, settled_at: 0, last: now, run }
            }
        };
        state.last = now;
        let known = self.members.get(&beat.number).filter(|member| {
            member.until >= now && (member.since >= state.born || state.born == BORN_FULL)
        });
        let must_claim = known.is_none();
        let since = known.map_or(now, |member| member.since);
        let told = if must_claim { 0 } else { beat.told };
        let is_new = beat.is_first || known.is_some_and(|member| member.is_new);
        self.members.insert(beat.number, Member { until: now + LIFE_MS, since, told, is_new });
        self.members.retain(|_, member| member.until + MEMORY_MS >= now);
        // One that has started since may have taken the place of one that has not claimed yet.
        let old = self.members.values().filter(|member| member.until >= now && !member.is_new);
        let told = old.filter(|member| member.told == state.born).count();
        if state.settled != state.born && told >= beat.gateways as usize {
            (state.settled, state.settled_at) = (state.born, now);
        }
        self.state = Some(state);
        self.wanted.retain(|_, (_, at)| *at + LIFE_MS >= now);
        let wanted = self.wanted.iter().map(|(name, (parts, _))| (name.clone(), *parts));
        BeatAnswer { born: state.born, must_claim, wanted: wanted.collect() }
    }

    /// Makes the store take `now` for the time of a beat, as if it had not been silent.
    pub fn hide_silence(&mut self, now: u64) {
        if let Some(state) = &mut self.state {
            state.last = now;
        }
    }

    /// Removes a gateway that stops.
    pub fn leave(&mut self, number: u32) {
        if let Some(member) = self.members.get_mut(&number) {
            member.until = 0;
        }
    }

    /// Adopts a call of the gateway `number` for parts of the rate `name`. The gateway means the
    /// store that was born at `born`: a call from before that has outdated claims.
    ///
    /// # Errors
    /// [`NoAnswer`]
    pub fn ask(
        &mut self,
        now: u64,
        (number, born): (u32, u64),
        name: &str,
        ask: &PartAsk,
    ) -> Result<PartAnswer, NoAnswer> {
        let is_meant = |state: &State| state.born == born && !state.is_stale(now);
        let state = self.state.filter(is_meant).ok_or(NoAnswer::Unknown)?;
        let member = self.members.get(&number).filter(|member| member.until >= now);
        let since = member.ok_or(NoAnswer::Unknown)?.since;
        let begun = state.begun();
        let may_grant = now >= begun;
        let known = self.pools.remove(name).filter(|pool| pool.born == state.born);
        let mut pool = known.unwrap_or_else(|| Pool::begin(state.born, ask));
        pool.adopt(ask);
        pool.refill(now, begun);
        pool.drop_ended(now, &self.members);
        let answer = pool.ask(now, (number, since), may_grant, ask);
        let wanted: u64 = pool.entries.values().map(|entry| entry.wanted).sum();
        if wanted > 0 {
            self.wanted.insert(name.to_owned(), (wanted, now));
        } else {
            self.wanted.remove(name);
        }
        self.pools.insert(name.to_owned(), pool);
        answer
    }

    /// Returns true if the store grants at `now`, although the gateway `number` has not claimed what
    /// it had: it was cut off for too long.
    pub fn grants_without(&self, now: u64, number: u32) -> bool {
        let Some(state) = self.state else { return false };
        let told = self.members.get(&number).filter(|member| member.until >= now);
        now >= state.begun() && told.is_none_or(|member| member.told != state.born)
    }

    /// Returns the birth of the store; zero if no gateway was heard yet.
    pub fn born(&self) -> u64 {
        self.state.map_or(0, |state| state.born)
    }

    /// Returns true if parts and levels of the rate `name` add up, as far as the store knows.
    pub fn is_sound(&self, name: &str) -> bool {
        let Some(pool) = self.pools.get(name) else { return true };
        pool.taken() <= WHOLE && pool.level <= pool.free()
    }
}

impl State {
    /// Returns the time since which the store grants. The free parts refill since then, too:
    /// before, gateways may have used what they had not claimed yet.
    fn begun(&self) -> u64 {
        let at_last = if self.born == BORN_FULL { BORN_FULL } else { self.born + LIFE_MS };
        if self.settled == self.born { at_last.min(self.settled_at) } else { at_last }
    }

    /// Returns true if no gateway could beat for so long that what they had has ended, or if
    /// the clock was set.
    fn is_stale(&self, now: u64) -> bool {
        now > self.last + LIFE_MS || now + STEP_MS < self.last
    }
}

impl Pool {
    /// Makes the pool of a rate that no gateway has asked for. It was empty when the store began to
    /// grant, and has been refilled since.
    fn begin(born: u64, ask: &PartAsk) -> Self {
        let level = if born == BORN_FULL { WHOLE } else { 0 };
        let (fill, size) = (ask.fill, ask.size);
        Self { born, level, at: born, fill, size, entries: BTreeMap::new() }
    }

    /// Adopts the rate of a newer config.
    fn adopt(&mut self, ask: &PartAsk) {
        if ask.size > self.size {
            // The units stay, and are a smaller part of a larger burst.
            self.level = (self.level as f64 * (self.size as f64 / ask.size as f64)) as u64;
        }
        self.size = ask.size;
        let slower = self.fill == 0 || (ask.fill != 0 && self.fill > ask.fill);
        // The time until now counts at the slower of both rates.
        self.fill = if slower { self.fill } else { ask.fill };
    }

    fn refill(&mut self, now: u64, begun: u64) {
        self.at = self.at.max(begun.min(now));
        let (free, passed) = (self.free(), now.saturating_sub(self.at));
        if self.fill == 0 || now < self.at {
            self.at = now;
            return;
        }
        let grown = free * passed.min(self.fill) / self.fill;
        if grown > 0 {
            self.level = (self.level + grown).min(free);
            // Only the time that was counted has passed.
            self.at = if passed >= self.fill {
                now
            } else {
                (self.at + (grown * self.fill).div_ceil(free)).min(now)
            };
        }
    }

    /// Drops what gateways had that have ended or were lost.
    fn drop_ended(&mut self, now: u64, members: &BTreeMap<u32, Member>) {
        let free = self.free();
        self.entries.retain(|number, entry| {
            let Some(member) = members.get(number) else { return false };
            if member.until < now || member.since != entry.since {
                (entry.parts, entry.wanted) = (0, 0);
            }
            true
        });
        self.change_parts(free, now);
    }

    fn ask(
        &mut self,
        now: u64,
        (number, since): (u32, u64),
        may_grant: bool,
        ask: &PartAsk,
    ) -> Result<PartAnswer, NoAnswer> {
        let before = self.free();
        let mut entry = self.entries.get(&number).copied().unwrap_or_default();
        if ask.call <= entry.call {
            return Err(NoAnswer::Stale);
        }
        let others = WHOLE - before - entry.parts;
        entry.parts = ask.claim.min(WHOLE - others);
        let free = WHOLE - others - entry.parts;
        self.level = (self.level + ask.give).min(free);
        let (mut granted, mut level) = (0, 0);
        if may_grant {
            granted = ask.need_parts.max((ask.need_parts + ask.spare).min(free / 2)).min(free);
            if granted < ask.least {
                granted = 0;
            }
            let fair = (self.level * granted).checked_div(free).unwrap_or(0);
            level = self.level.min(ask.need_level.max(fair)).min(ask.room + granted);
        }
        entry.parts += granted;
        self.level = (self.level - level).min(free - granted);
        entry.wanted = ask.lacking(granted, level, entry.parts);
        (entry.since, entry.call) = (since, ask.call);
        self.fill = ask.fill;
        self.entries.insert(number, entry);
        self.change_parts(before, now);
        let users = self.entries.values().filter(|entry| entry.parts + entry.wanted > 0);
        let users = users.count() as u64;
        let (free, pooled) = (self.free(), self.level);
        Ok(PartAnswer { parts: entry.parts, level, free, pooled, users })
    }

    /// Forgets the time that was not counted yet if the free parts have changed: it must not
    /// count for more parts than there were.
    fn change_parts(&mut self, before: u64, now: u64) {
        if self.free() != before {
            self.at = now;
        }
    }

    fn taken(&self) -> u64 {
        self.entries.values().map(|entry| entry.parts).sum()
    }

    fn free(&self) -> u64 {
        WHOLE - self.taken()
    }
}
