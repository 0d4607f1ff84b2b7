//! Limits on connections: all connections, those of one source, and new ones of
//! one source in a second. They are checked before a byte is read. The bounds on
//! authenticated connections are checked at the first authenticated request.
//!
//! A connection of a source at its bound waits in a line for a moment. A source on
//! which a request has authenticated lately has [`KNOWN`] times the bounds.

use std::collections::HashMap;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use governor::clock::{Clock as _, DefaultClock};
use governor::state::keyed::DefaultKeyedStateStore;
use governor::{Quota, RateLimiter};
use tokio::time::Instant;

use super::connection_table::{
    BoundReached, ConnectionCounts, ConnectionNumber, ConnectionOwners, ConnectionTable,
    OpenConnection,
};
use super::lines::{InLine, Lines};
use crate::source::{MOST_SOURCES, Source};

/// The bounds that connections must keep.
#[derive(Clone, Debug)]
pub struct ConnectionLimitOptions {
    /// Connections of all sources together.
    pub connections: usize,
    /// Connections of one source without an authenticated request.
    pub per_source: u32,
    /// Connections of one source with an authenticated request.
    pub authenticated_per_source: u32,
    /// New connections of one source in a second.
    pub new_per_second: NonZeroU32,
    /// New connections of one source at once.
    pub new_burst: NonZeroU32,
}

impl Default for ConnectionLimitOptions {
    fn default() -> Self {
        Self {
            connections: 10_000,
            per_source: 64,
            authenticated_per_source: 4_096,
            new_per_second: const { NonZeroU32::new(20).unwrap() },
            new_burst: const { NonZeroU32::new(100).unwrap() },
        }
    }
}

/// The limit for which a connection was closed as soon as it was accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LimitReached {
    /// All connections together.
    Connections,
    /// The connections of one source.
    PerSource,
    /// The new connections of one source.
    Rate,
}

/// A limit that refuses a connection for now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Full {
    pub(super) reached: LimitReached,
    /// Time after which the limit may allow the connection, if nothing changes before.
    retry: Duration,
}

impl Full {
    fn at(reached: LimitReached) -> Self {
        Self { reached, retry: RETRY }
    }
}

impl LimitReached {
    /// Returns the label in metrics.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Connections => "connections",
            Self::PerSource => "per_source",
            Self::Rate => "source_rate",
        }
    }
}

/// The connection limits of one listener.
pub(super) struct ConnectionLimits {
    bounds: ArcSwap<Bounds>,
    open: AtomicUsize,
    /// The connections by holder; at most `connections` entries, or as many as there
    /// were when it was lowered.
    table: Mutex<ConnectionTable>,
    /// The time of the last authenticated connection, by source; swept once a second,
    /// at most [`MOST_KNOWN`] entries.
    known: Mutex<HashMap<Source, Instant>>,
    /// Connections that wait for a place; an eighth of all places at most.
    lines: Arc<Lines>,
    /// True while there are too many sources for a bucket each.
    crowded: AtomicBool,
}

/// The bounds in force.
struct Bounds {
    options: ConnectionLimitOptions,
    /// Kept by a change of other bounds, so that it gives no source a new burst.
    rates: Arc<SourceRates>,
}

/// New connections by source; swept once a second.
struct SourceRates {
    unknown: SourceRate,
    /// The same for sources on which a request has authenticated lately.
    known: SourceRate,
}

type SourceRate = RateLimiter<Source, DefaultKeyedStateStore<Source>, DefaultClock>;

impl ConnectionLimits {
    pub(super) fn new(options: ConnectionLimitOptions) -> Arc<Self> {
        let rates = Arc::new(SourceRates::new(&options));
        Arc::new(Self {
            lines: Lines::new(most_in_line(&options)),
            bounds: ArcSwap::from_pointee(Bounds { options, rates }),
            open: AtomicUsize::new(0),
            table: Mutex::default(),
            known: Mutex::default(),
            crowded: AtomicBool::new(false),
        })
    }

    /// Puts `options` in force. Open connections stay, except idle ones beyond a lower total:
    /// the next [`Self::sweep`] ends those.
    pub(super) fn adopt(&self, options: ConnectionLimitOptions) {
        let old = self.bounds.load();
        let rate = |options: &ConnectionLimitOptions| (options.new_per_second, options.new_burst);
        let rates = match rate(&old.options) == rate(&options) {
            true => Arc::clone(&old.rates),
            false => Arc::new(SourceRates::new(&options)),
        };
        self.lines.set_most(most_in_line(&options));
        self.bounds.store(Arc::new(Bounds { options, rates }));
        // Last, so that each line tries again under the new bounds.
        self.lines.all_changed();
    }

    /// Returns the source of `address`, or the one that it shares with others while
    /// there are too many.
    pub(super) fn source_of(&self, address: IpAddr) -> Source {
        let source = Source::of(address);
        if self.crowded.load(Ordering::Relaxed) { source.in_crowd() } else { source }
    }

    /// Takes a place for a connection of `source`, unless others of the source wait.
    pub(super) fn permit(self: &Arc<Self>, source: Source) -> Result<ConnectionPermit, Full> {
        // A newcomer must not pass the connections that wait.
        match self.lines.has(source) {
            true => Err(self.behind_others(source)),
            false => self.permit_front(source),
        }
    }

    /// Returns the limit for which a connection of `source` waits behind others.
    fn behind_others(&self, source: Source) -> Full {
        let most = self.per_source(source);
        let is_full = self.table().unauthenticated_of(source) >= most;
        Full::at(if is_full { LimitReached::PerSource } else { LimitReached::Rate })
    }

    /// Takes a place that counts against the total alone.
    pub(super) fn permit_uncounted(self: &Arc<Self>) -> Result<ConnectionPermit, Full> {
        let permit = self.acquire().map_err(Full::at)?;
        self.make_room();
        Ok(permit)
    }

    /// Takes a place for the connection of `source` that is next.
    fn permit_front(self: &Arc<Self>, source: Source) -> Result<ConnectionPermit, Full> {
        let permit = self.acquire().map_err(Full::at)?;
        permit.count(source)?;
        // Only now, so that a connection that is refused displaces none.
        self.make_room();
        Ok(permit)
    }

    /// Enters the line of `source`, for a connection that `full` refused.
    ///
    /// # Errors
    /// The line is full, or the limit is one for which no connection waits.
    pub(super) fn enter_line(&self, source: Source, full: Full) -> Result<InLine, LimitReached> {
        let most = self.per_source(source).saturating_mul(LINE);
        match full.reached {
            LimitReached::Connections => None,
            LimitReached::PerSource | LimitReached::Rate => self.lines.enter(source, most),
        }
        .ok_or(full.reached)
    }

    /// Waits in line for the permit of a connection of `source`.
    ///
    /// # Errors
    /// The limit that still refused the connection at the end of the wait.
    pub(super) async fn wait_in_line(
        self: &Arc<Self>,
        source: Source,
        (line, full): (InLine, Full),
    ) -> Result<ConnectionPermit, LimitReached> {
        self.wait((line, full), || self.permit_front(source)).await
    }

    async fn wait<T>(
        &self,
        (line, full): (InLine, Full),
        mut attempt: impl FnMut() -> Result<T, Full>,
    ) -> Result<T, LimitReached> {
        // A connection that never comes to the front waits for the same limit.
        let mut reached = full.reached;
        let admitted = line.wait(LONGEST_WAIT, || {
            attempt().map_err(|full| {
                reached = full.reached;
                full.retry
            })
        });
        admitted.await.ok_or(reached)
    }

    /// Returns the largest number of unauthenticated connections of `source`.
    fn per_source(&self, source: Source) -> usize {
        let per_source = self.bounds.load().options.per_source as usize;
        match self.is_known(source) {
            true => per_source.saturating_mul(KNOWN.get() as usize),
            false => per_source,
        }
    }

    /// Returns true if a request on a connection of `source` has authenticated lately.
    fn is_known(&self, source: Source) -> bool {
        self.known().contains_key(&source) || self.table().has_authenticated(source)
    }

    /// Notes that a request on a connection of `source` has authenticated.
    fn note_known(&self, source: Source, now: Instant) {
        let mut known = self.known();
        // A source beyond the bound is known as long as it has such a connection.
        if known.len() < MOST_KNOWN || known.contains_key(&source) {
            known.insert(source, now);
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<Source, Instant>> {
        // Every change is one insert or remove.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a connection against the total.
    #[expect(clippy::disallowed_methods, reason = "a connection begins now")]
    fn acquire(self: &Arc<Self>) -> Result<ConnectionPermit, LimitReached> {
        // Relaxed: the counter guards no other memory.
        let most = self.bounds.load().options.connections;
        if self.open.fetch_add(1, Ordering::Relaxed) >= most {
            self.open.fetch_sub(1, Ordering::Relaxed);
            return Err(LimitReached::Connections);
        }
        // From here on the drop of the permit takes the count back.
        Ok(ConnectionPermit {
            limits: Arc::clone(self),
            connection: OpenConnection::new(Instant::now()),
            counted: OnceLock::new(),
            authenticated: AtomicBool::new(false),
        })
    }

    /// Ends a connection of the holder with most, if few places are left. Called
    /// for each new connection that passed the limits.
    fn make_room(&self) {
        // The places that are free for new connections while others end.
        let connections = self.bounds.load().options.connections;
        let room = connections / ROOM;
        let most = connections - room;
        // Looked at without the lock first, because nearly every connection finds room.
        if room == 0 || self.open() <= most {
            return;
        }
        let mut table = self.table();
        // Connections that are ending leave their places by themselves. Both numbers
        // are read under the lock, because a connection leaves both under it.
        if self.open().saturating_sub(table.ending()) > most {
            table.make_room(room);
        }
    }

    /// Drops sources that have not connected for a while, and ends idle connections
    /// beyond a total that was lowered. Called once a second.
    pub(super) fn sweep(&self, now: Instant) {
        let bounds = self.bounds.load();
        let SourceRates { unknown, known } = &*bounds.rates;
        unknown.retain_recent();
        known.retain_recent();
        self.known().retain(|_, since| now.saturating_duration_since(*since) < LATELY);
        self.crowded.store(unknown.len() > MOST_SOURCES, Ordering::Relaxed);
        self.keep_total(bounds.options.connections);
    }

    /// Ends idle connections beyond `most`. Only a lowered total is ever exceeded.
    fn keep_total(&self, most: usize) {
        if self.open() <= most {
            return;
        }
        let mut table = self.table();
        while self.open().saturating_sub(table.ending()) > most && table.end_idle() {}
    }

    /// Returns the number of open connections.
    fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Returns the numbers of open connections by state.
    pub(super) fn counts(&self) -> ConnectionCounts {
        self.table().counts(self.open())
    }

    fn table(&self) -> MutexGuard<'_, ConnectionTable> {
        // A panic could leave a wrong count behind, and no dangling entry: every
        // connection removes its own.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SourceRates {
    fn new(options: &ConnectionLimitOptions) -> Self {
        let rate = |times: NonZeroU32| {
            let per_second = options.new_per_second.saturating_mul(times);
            let burst = options.new_burst.saturating_mul(times);
            RateLimiter::dashmap(Quota::per_second(per_second).allow_burst(burst))
        };
        Self { unknown: rate(NonZeroU32::MIN), known: rate(KNOWN) }
    }
}

/// Returns the largest number of connections in all lines.
fn most_in_line(options: &ConnectionLimitOptions) -> usize {
    (options.connections / ROOM).max(1)
}

/// The count of one open connection; its drop counts down.
pub(super) struct ConnectionPermit {
    limits: Arc<ConnectionLimits>,
    connection: Arc<OpenConnection>,
    /// The source that the connection was counted against, and its place in the table.
    counted: OnceLock<(Source, ConnectionNumber)>,
    /// True once the connection counts for the owners of a request.
    authenticated: AtomicBool,
}

impl ConnectionPermit {
    /// Counts the connection of a trusted proxy against the source of `address`, which
    /// the proxy has named. Waits in line if the source is at its bound. Connections
    /// that a proxy opens for itself are never counted.
    ///
    /// # Errors
    /// The source has too many connections, or too many new ones.
    pub(super) async fn count_named(&self, address: IpAddr) -> Result<(), LimitReached> {
        let limits = &self.limits;
        let source = limits.source_of(address);
        let first = match limits.lines.has(source) {
            true => Err(limits.behind_others(source)),
            false => self.count(source),
        };
        let Err(full) = first else { return Ok(()) };
        let line = limits.enter_line(source, full)?;
        limits.wait((line, full), || self.count(source)).await
    }

    /// Counts the connection against `source`, once.
    fn count(&self, source: Source) -> Result<(), Full> {
        let limits = &*self.limits;
        // Both take the lock of the table, so they come before it is held.
        let (most, is_known) = (limits.per_source(source), limits.is_known(source));
        let mut table = limits.table();
        if table.unauthenticated_of(source) >= most {
            return Err(Full::at(LimitReached::PerSource));
        }
        let rates = Arc::clone(&limits.bounds.load().rates);
        let rate = if is_known { &rates.known } else { &rates.unknown };
        // Checked last, so that a refusal by another limit uses up no rate.
        rate.check_key(&source).map_err(|refused| Full {
            reached: LimitReached::Rate,
            retry: refused.wait_time_from(rate.clock().now()),
        })?;
        self.counted.get_or_init(|| (source, table.insert(source, Arc::clone(&self.connection))));
        Ok(())
    }

    /// Returns the connection as the table sees it.
    pub(super) fn connection(&self) -> &Arc<OpenConnection> {
        &self.connection
    }

    /// Returns true once the connection counts for the owners of a request.
    pub(super) fn is_authenticated(&self) -> bool {
        self.authenticated.load(Ordering::Relaxed)
    }

    /// Takes the connection off the count of its source, and counts it for
    /// `owners`. A second call does nothing.
    ///
    /// # Errors
    /// A bound of the owners or of the source. The connection ends then.
    #[expect(clippy::disallowed_methods, reason = "the table gets the time of this request")]
    pub(super) fn authenticate(&self, owners: &ConnectionOwners) -> Result<(), BoundReached> {
        // A connection of a trusted proxy carries the requests of many clients and
        // counts for none of them.
        if let Some(&(source, number)) = self.counted.get() {
            let (limits, now) = (&self.limits, Instant::now());
            let per_source = limits.bounds.load().options.authenticated_per_source;
            limits.table().authenticate(number, owners, per_source, now)?;
            limits.note_known(source, now);
            // Its place among the unauthenticated ones is free, so the next in line may have it.
            limits.lines.changed(source);
        }
        // Not after an error: then each further request must find the refusal in the table.
        self.authenticated.store(true, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut table = self.limits.table();
        if let Some(&(_, number)) = self.counted.get() {
            table.remove(number);
        }
        // Under the same lock as the entry, because `make_room` compares the two numbers.
        self.limits.open.fetch_sub(1, Ordering::Relaxed);
        drop(table);
        if let Some(&(source, _)) = self.counted.get() {
            self.limits.lines.changed(source);
        }
    }
}

/// The bounds of a source on which a request has authenticated lately: this many times
/// those of another source.
const KNOWN: NonZeroU32 = NonZeroU32::new(8).unwrap();

/// Time for which a source is known after its last authenticated connection.
const LATELY: Duration = Duration::from_secs(600);

/// Sources that are remembered as known. Only callers with a key make entries.
const MOST_KNOWN: usize = 16_384;

/// Connections of a source in its line, for each connection that it may have.
const LINE: usize = 3;

/// Time that a connection waits in line.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// Time after which the front of a line tries again, if nothing has changed.
const RETRY: Duration = Duration::from_millis(250);

/// The part of all places that is kept free for new connections: one in this many.
const ROOM: usize = 8;

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]
mod tests;
