//! A connection to a Redis server and the calls over it.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ErrorKind, RedisError, Script, Value};
use tollgate_cluster::parts::{Beat, BeatAnswer, LIFE, PartAnswer, PartAsk, WHOLE};

use crate::RedisAddress;

/// The longest time in which the server must answer a call.
const RESPONSE: Duration = Duration::from_millis(50);
/// The longest time in which a connection must be made.
const CONNECT: Duration = Duration::from_millis(500);
/// The step back of the server's clock that changes nothing, in milliseconds.
const STEP_MS: u64 = 1_000;
/// The milliseconds for which the calls of a gateway are remembered after its end.
const MEMORY_MS: u64 = 60_000;
/// The names of lacking rates in one answer at most.
const MOST_NAMES: u64 = 512;
/// The oldest version of the server, with which the scripts are tested.
const OLDEST: (u32, u32) = (7, 0);

/// A Redis server on which gateways share rates. It connects when it is used.
pub struct RateServer {
    address: RedisAddress,
    /// The name of the cluster that the server must belong to.
    cluster: String,
    connected: Option<Connected>,
    beat: Script,
    ask: Script,
    leave: Script,
}

struct Connected {
    connection: MultiplexedConnection,
    /// The process of the server. Another one may have lost what this one knew.
    run: String,
}

/// The reason why the server gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum RateServerError {
    /// The server cannot be reached, or does not answer in time.
    #[error("the Redis server {address} does not answer: {cause}")]
    Silent {
        /// The server.
        address: String,
        /// The cause.
        cause: RedisError,
    },
    /// The server refuses the call.
    #[error("the Redis server {address} refuses the gateway: {cause}")]
    Refused {
        /// The server.
        address: String,
        /// The cause.
        cause: RedisError,
    },
    /// The server is too old.
    #[error("the Redis server {address} has version {version}, and 7.0 is the oldest that works")]
    Old {
        /// The server.
        address: String,
        /// Its version.
        version: String,
    },
    /// The server is a replica, which accepts no writes.
    #[error("the Redis server {address} is a replica, which accepts no writes")]
    Replica {
        /// The server.
        address: String,
    },
    /// The server deletes keys when its memory is full, and the rates would be whole again.
    #[error(
        "the Redis server {address} may evict keys: its maxmemory-policy is {policy}, and must be \
         noeviction or one of the volatile policies with no maxmemory"
    )]
    Evicts {
        /// The server.
        address: String,
        /// The policy.
        policy: String,
    },
    /// Another cluster uses the database.
    #[error(
        "the database of the Redis server {address} is used by another cluster; name another \
         database in the URL, such as redis://host/1"
    )]
    OtherCluster {
        /// The server.
        address: String,
    },
    /// The server has lost what it knew of this gateway: a beat must come first.
    #[error("the Redis server has lost what it knew of this gateway")]
    Unknown,
}

impl RateServerError {
    /// Returns true if the server has answered, and only a change of the config or of the server
    /// helps.
    pub fn is_mistake(&self) -> bool {
        match self {
            Self::Silent { .. } | Self::Unknown => false,
            Self::Refused { cause, .. } => {
                cause.kind() == ErrorKind::AuthenticationFailed
                    || matches!(cause.code(), Some("NOAUTH" | "WRONGPASS" | "NOPERM"))
            }
            Self::Old { .. }
            | Self::Replica { .. }
            | Self::Evicts { .. }
            | Self::OtherCluster { .. } => true,
        }
    }
}

impl RateServer {
    /// Makes a server at `address`. The database must be unused, or belong to `cluster`.
    pub fn new(address: RedisAddress, cluster: String) -> Self {
        Self {
            address,
            cluster,
            connected: None,
            beat: Script::new(include_str!("scripts/beat.lua")),
            ask: Script::new(include_str!("scripts/ask.lua")),
            leave: Script::new(include_str!("scripts/leave.lua")),
        }
    }

    /// Makes the scripts take `now`, in milliseconds, for the time of the server's clock.
    #[cfg(feature = "test-support")]
    pub fn set_time(&mut self, now: u64) {
        let script = |text: &str| {
            let clock = "local now = time[1] * 1000 + math.floor(time[2] / 1000)";
            Script::new(&text.replace(clock, &format!("local now = {now}")))
        };
        self.beat = script(include_str!("scripts/beat.lua"));
        self.ask = script(include_str!("scripts/ask.lua"));
    }

    /// Says that the gateway runs. Connects first if there is no connection.
    ///
    /// # Errors
    /// [`RateServerError`]. The connection is closed then.
    pub async fn beat(&mut self, beat: &Beat) -> Result<BeatAnswer, RateServerError> {
        let answered = self.try_beat(beat).await;
        self.kept(answered)
    }

    async fn try_beat(&mut self, beat: &Beat) -> Result<BeatAnswer, RateServerError> {
        self.connect().await?;
        let cluster = self.cluster.clone();
        let mut call = self.beat.prepare_invoke();
        for key in [SERVER, MEMBERS, WANTED] {
            call.key(key);
        }
        let Some(Connected { connection, run }) = &mut self.connected else {
            return Err(RateServerError::Unknown);
        };
        call.arg(life_ms()).arg(STEP_MS).arg(MEMORY_MS).arg(beat.number).arg(beat.gateways);
        call.arg(u8::from(beat.is_first)).arg(beat.told).arg(&*run).arg(cluster).arg(MOST_NAMES);
        let answer: Result<Vec<Value>, _> = call.invoke_async(connection).await;
        let answer = answer.map_err(|cause| self.failed(cause))?;
        read_beat(&answer).ok_or(RateServerError::Unknown)
    }

    /// Makes calls of the gateway `number` for parts, each with the name of its limit, to the store
    /// that was born at `born`. The answer to a call is `None` if it
    /// is not newer than one before it.
    ///
    /// # Errors
    /// [`RateServerError`]. The connection is closed then, unless a beat must come first.
    pub async fn ask(
        &mut self,
        (number, born): (u32, u64),
        calls: &[(String, PartAsk)],
    ) -> Result<Vec<Option<PartAnswer>>, RateServerError> {
        let answered = self.try_ask((number, born), calls).await;
        self.kept(answered)
    }

    async fn try_ask(
        &mut self,
        (number, born): (u32, u64),
        calls: &[(String, PartAsk)],
    ) -> Result<Vec<Option<PartAnswer>>, RateServerError> {
        let mut call = self.ask.prepare_invoke();
        for key in [SERVER, MEMBERS, WANTED] {
            call.key(key);
        }
        call.arg(life_ms()).arg(STEP_MS).arg(WHOLE).arg(number).arg(born);
        for (name, ask) in calls {
            let PartAsk { call: order, claim, give, room, need_level, need_parts, .. } = ask;
            let PartAsk { least, spare, fill, size, .. } = ask;
            call.key(format!("{POOL}{name}")).arg(name);
            let needs = [need_level, need_parts, least, spare];
            for figure in [order, claim, give, room].into_iter().chain(needs).chain([fill, size]) {
                call.arg(figure);
            }
        }
        let Some(Connected { connection, .. }) = &mut self.connected else {
            return Err(RateServerError::Unknown);
        };
        let answer: Result<Vec<Value>, _> = call.invoke_async(connection).await;
        let answer = answer.map_err(|cause| self.failed(cause))?;
        let answers = answer.get(1..).filter(|answers| answers.len() == calls.len());
        let answers = answers.ok_or(RateServerError::Unknown)?;
        Ok(answers.iter().map(read_parts).collect())
    }

    /// Frees all that the gateway has.
    ///
    /// # Errors
    /// [`RateServerError`]
    pub async fn leave(&mut self, number: u32) -> Result<(), RateServerError> {
        let mut call = self.leave.prepare_invoke();
        call.key(MEMBERS).arg(number);
        let Some(Connected { connection, .. }) = &mut self.connected else {
            return Err(RateServerError::Unknown);
        };
        let left: Result<Value, _> = call.invoke_async(connection).await;
        left.map(drop).map_err(|cause| self.failed(cause))
    }

    /// Closes the connection after a failure that leaves its state unknown.
    fn kept<T>(&mut self, result: Result<T, RateServerError>) -> Result<T, RateServerError> {
        if result.as_ref().is_err_and(|error| !matches!(error, RateServerError::Unknown)) {
            self.connected = None;
        }
        result
    }

    /// Connects if there is no connection, and checks that the server can be used.
    ///
    /// # Errors
    /// [`RateServerError`]
    pub async fn connect(&mut self) -> Result<(), RateServerError> {
        if self.connected.is_some() {
            return Ok(());
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT))
            .set_response_timeout(Some(RESPONSE));
        let client = self.address.client();
        let connection = client.get_multiplexed_async_connection_with_config(&config).await;
        let mut connection = connection.map_err(|cause| self.failed(cause))?;
        let info: Result<String, _> = redis::cmd("INFO").query_async(&mut connection).await;
        let info = info.map_err(|cause| self.failed(cause))?;
        let run = self.check(&info)?;
        let mut query = redis::cmd("HGET");
        query.arg(SERVER).arg("cluster");
        let cluster: Result<Option<String>, _> = query.query_async(&mut connection).await;
        let cluster = cluster.map_err(|cause| self.failed(cause))?;
        if cluster.is_some_and(|cluster| cluster != self.cluster) {
            return Err(RateServerError::OtherCluster { address: self.address.to_string() });
        }
        self.connected = Some(Connected { connection, run });
        Ok(())
    }

    /// Checks that the server can be used. Returns the id of its process.
    fn check(&self, info: &str) -> Result<String, RateServerError> {
        let address = self.address.to_string();
        let value = |key: &str| {
            let line = info.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
            line.unwrap_or_default().trim().to_owned()
        };
        let version = value("redis_version");
        let mut numbers = version.split('.').map(|number| number.parse().unwrap_or(0));
        let (major, minor) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        if (major, minor) < OLDEST {
            return Err(RateServerError::Old { address, version });
        }
        if value("role") != "master" {
            return Err(RateServerError::Replica { address });
        }
        let policy = value("maxmemory_policy");
        // Most keys have a time to live, so the volatile policies evict them, too.
        if value("maxmemory") != "0" && policy != "noeviction" {
            return Err(RateServerError::Evicts { address, policy });
        }
        Ok(value("run_id"))
    }

    fn failed(&self, cause: RedisError) -> RateServerError {
        let address = self.address.to_string();
        if cause.code() == Some("OTHERCLUSTER") {
            return RateServerError::OtherCluster { address };
        }
        match cause.kind() {
            ErrorKind::Server(_) | ErrorKind::Extension | ErrorKind::AuthenticationFailed => {
                RateServerError::Refused { address, cause }
            }
            _ => RateServerError::Silent { address, cause },
        }
    }
}

/// The key of the store's own state.
const SERVER: &str = "tollgate:server";
/// The key of the gateways.
const MEMBERS: &str = "tollgate:gateways";
/// The key of the rates of which gateways lack some.
const WANTED: &str = "tollgate:wanted";
/// The beginning of the keys of rates.
const POOL: &str = "tollgate:rate:";

fn life_ms() -> u64 {
    u64::try_from(LIFE.as_millis()).unwrap_or(u64::MAX)
}

fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}

fn read_beat(answer: &[Value]) -> Option<BeatAnswer> {
    let [_, born, must_claim, wanted @ ..] = answer else { return None };
    let wanted = wanted.chunks_exact(2).filter_map(|pair| {
        let name: String = redis::from_redis_value_ref(pair.first()?).ok()?;
        Some((name, number(pair.get(1)?)?))
    });
    let (born, must_claim) = (number(born)?, number(must_claim)? == 1);
    Some(BeatAnswer { born, must_claim, wanted: wanted.collect() })
}

fn read_parts(answer: &Value) -> Option<PartAnswer> {
    let Value::Array(figures) = answer else { return None };
    let figures: Option<Vec<u64>> = figures.iter().map(number).collect();
    let [parts, level, free, pooled, users] = figures?.try_into().ok()?;
    Some(PartAnswer { parts, level, free, pooled, users })
}
