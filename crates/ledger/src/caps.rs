//! The caps that several gateways share: their slices on the database server. The rules are in
//! `tollgate-cluster`.

use std::fs;
use std::io;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use aws_lc_rs::rand;
use tollgate_cluster::{Answer, Ask, Book};
use tollgate_domain::UtcDay;
use tollgate_sql::{Begin, Connection, ServerAddress, SqlError};

use crate::durable_file;
use crate::error::StorageError;
use crate::hex::hex;
use crate::rows::homes::{self, OtherGateway};
use crate::rows::slices;
use crate::server_connection::{ServerConnection, ServerFailure};

/// The identity of a data folder. The slices that a gateway has belong to it, so that they are
/// found again at the next start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Home {
    /// A random id.
    pub id: String,
    /// The number of this start, from 1.
    pub life: u64,
    file: PathBuf,
}

/// The identity of a data folder that cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("the gateway's id in {} cannot be {what}", path.display())]
pub struct HomeError {
    path: PathBuf,
    what: &'static str,
    source: io::Error,
}

/// The name of a cap as the server has it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CapKey {
    /// The key of the limit in a plan.
    pub limit: String,
    /// The kind of the scope.
    pub kind: String,
    /// The name of the key, tenant, pool or model.
    pub scope: String,
    /// The class of the devices; empty for a budget.
    pub class: String,
}

/// A call for a slice of a cap.
#[derive(Clone, Debug)]
pub struct SliceCall {
    /// The cap.
    pub cap: CapKey,
    /// The value of the cap.
    pub value: u64,
    /// The first day of the period.
    pub first_day: UtcDay,
    /// The first day of the period before.
    pub previous: UtcDay,
    /// The call.
    pub ask: Ask,
}

/// A gateway's connection to its slices. The calls block and must not come from async code.
pub struct Slices {
    connection: ServerConnection,
    home: Home,
}

/// A failure of the server while slices were asked for.
#[derive(Debug, thiserror::Error)]
#[error("{address}: the slices of caps cannot be read or written")]
pub struct SlicesError {
    address: String,
    source: StorageError,
}

/// An error that keeps a gateway from its slices.
#[derive(Debug, thiserror::Error)]
pub enum OpenSlicesError {
    /// The server cannot be used.
    #[error(transparent)]
    Server(#[from] SlicesError),
    /// The identity of the data folder cannot be written.
    #[error(transparent)]
    Home(#[from] HomeError),
}

impl Home {
    /// Reads the identity of the data folder `data` and counts the start. The identity is made
    /// at the first start.
    ///
    /// # Errors
    /// [`HomeError`]
    pub fn begin_life(data: &Path) -> Result<Self, HomeError> {
        let path = data.join("gateway.id");
        let failed = |what| move |source| HomeError { path: data.join("gateway.id"), what, source };
        let earlier = match fs::read_to_string(&path) {
            Ok(text) => Some(parse(&text, &path).map_err(failed("read"))?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed("read")(error)),
        };
        let home = match earlier {
            Some(earlier) => Self { life: earlier.life.saturating_add(1), ..earlier },
            None => Self { id: random_id().map_err(failed("made"))?, life: 1, file: path },
        };
        home.write().map_err(failed("written"))?;
        Ok(home)
    }

    /// Begins a life after `newest`, which the server knows: the data folder was restored from
    /// an older copy.
    fn begin_life_after(&mut self, newest: u64) -> Result<(), HomeError> {
        self.life = newest.saturating_add(1);
        let written = self.write();
        written.map_err(|source| HomeError { path: self.file.clone(), what: "written", source })
    }

    /// Replaces the file. The life is on the disk before any call of it: the server must never
    /// see a life twice.
    fn write(&self) -> io::Result<()> {
        durable_file::replace(&self.file, &format!("{} {}\n", self.id, self.life))
    }
}

fn parse(text: &str, file: &Path) -> io::Result<Home> {
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, "it is not an id and a number");
    let (id, life) = text.trim().split_once(' ').ok_or_else(invalid)?;
    let is_id = id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    let life = life.parse().map_err(|_| invalid())?;
    let file = file.to_owned();
    if is_id { Ok(Home { id: id.to_owned(), life, file }) } else { Err(invalid()) }
}

fn random_id() -> io::Result<String> {
    let mut bytes = [0; 16];
    rand::fill(&mut bytes).map_err(|_| io::Error::other("the system has no random numbers"))?;
    Ok(hex(&bytes))
}

impl Slices {
    /// Connects to the server, and makes the tables if there are none. Slices of periods that
    /// are long over on `today` are deleted.
    ///
    /// # Errors
    /// The server cannot be used, or the identity of the data folder cannot be written.
    pub fn open(
        address: &ServerAddress,
        mut home: Home,
        today: UtcDay,
    ) -> Result<Self, OpenSlicesError> {
        let mut connection = ServerConnection::new(address.clone());
        let before = today.0.saturating_sub(KEPT_DAYS);
        let newest = connection.run(|connection| {
            slices::make_tables(connection)?;
            slices::forget(connection, before)?;
            let of_slices = slices::newest_life(connection, &home.id)?;
            Ok(of_slices.max(homes::newest_life(connection, &home.id)?))
        });
        if let Some(newest) = newest.map_err(SlicesError::from)?
            && newest >= home.life
        {
            home.begin_life_after(newest)?;
        }
        let begun = connection.run(|connection| homes::begin(connection, &home.id, home.life));
        begun.map_err(SlicesError::from)?;
        Ok(Self { connection, home })
    }

    /// Takes over the slices of a gateway that was retired, for as long as it takes to give back
    /// what it has not spent. All its work must be in the ledger. Returns `None` if it has started
    /// again.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn take_over(
        address: &ServerAddress,
        lost: &OtherGateway,
    ) -> Result<Option<Self>, SlicesError> {
        let mut connection = ServerConnection::new(address.clone());
        let taken = connection.run(|connection| homes::take_over(connection, lost))?;
        let Some(life) = taken else { return Ok(None) };
        // The file is on another machine. Its gateway finds the life taken when it starts.
        let home = Home { id: lost.home.clone(), life, file: PathBuf::new() };
        Ok(Some(Self { connection, home }))
    }

    /// Returns the caps of which the gateway has an unspent slice of any period.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn all_unspent(&mut self) -> Result<Vec<CapKey>, SlicesError> {
        let home = self.home.id.clone();
        Ok(self.connection.run(|connection| slices::all_unspent_of(connection, &home))?)
    }

    /// Returns the address of the server.
    pub fn address(&self) -> &ServerAddress {
        self.connection.address()
    }

    /// Notes that all work of earlier lives is in the ledger.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn settle_earlier_lives(&mut self) -> Result<(), SlicesError> {
        let Home { id, life, .. } = &self.home;
        Ok(self.connection.run(|connection| homes::settle(connection, id, *life))?)
    }

    /// Returns the identity of the data folder.
    pub fn home(&self) -> &Home {
        &self.home
    }

    /// Returns the caps of which this gateway has an unspent slice from an earlier life.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn unspent(&mut self, today: UtcDay) -> Result<Vec<CapKey>, SlicesError> {
        let days = (today.0, today.first_of_month().0);
        let home = self.home.id.clone();
        Ok(self.connection.run(|connection| slices::unspent_of(connection, &home, days))?)
    }

    /// Returns the caps of which some gateway lacks some.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn hungry(&mut self) -> Result<Vec<CapKey>, SlicesError> {
        Ok(self.connection.run(|connection| slices::hungry(connection))?)
    }

    /// Asks for slices in one transaction. `gateways` is the number of gateways that run.
    /// Returns the answer to each call, in their order; `None` where a later call was answered
    /// before.
    ///
    /// # Errors
    /// The server does not answer. The calls may have been done all the same; the next calls for
    /// the same slices put that right.
    pub fn ask(
        &mut self,
        calls: &[SliceCall],
        gateways: NonZeroU32,
    ) -> Result<Vec<Option<Answer>>, SlicesError> {
        let home = self.home.id.clone();
        Ok(self.connection.run(|connection| {
            let transaction = connection.begin(Begin::Write)?;
            let answers = answer_all(transaction.connection(), &home, calls, gateways)?;
            transaction.commit()?;
            Ok(answers)
        })?)
    }
}

fn answer_all(
    connection: &Connection,
    home: &str,
    calls: &[SliceCall],
    gateways: NonZeroU32,
) -> Result<Vec<Option<Answer>>, SqlError> {
    let is_paused = slices::is_paused(connection)?;
    let mut answers = vec![None; calls.len()];
    let mut order: Vec<usize> = (0..calls.len()).collect();
    // All gateways lock in one order, so that no two wait for each other.
    order.sort_by_key(|at| &calls[*at].cap);
    for at in order {
        let call = &calls[at];
        let cap = slices::lock(connection, &call.cap)?;
        let found = slices::of_cap(connection, cap, call.previous.0)?;
        let rows: Vec<_> =
            found.iter().map(|it| (it.first_day, it.home.as_str(), it.row)).collect();
        let of_cap = (call.value.min(LARGEST_CAP), gateways, !is_paused);
        let days = (call.first_day.0, call.previous.0);
        let (book, mut row) = Book::open(of_cap, home, days, &rows);
        // A call that comes late changes nothing.
        let Ok(answer) = row.ask(&book, &call.ask) else { continue };
        slices::put(connection, (cap, call.first_day.0, home), &row)?;
        if answer.granted < answer.claimed.saturating_add(call.ask.need) {
            slices::mark_hungry(connection, cap)?;
        }
        answers[at] = Some(answer);
    }
    Ok(answers)
}

impl From<ServerFailure> for SlicesError {
    fn from(ServerFailure { address, source }: ServerFailure) -> Self {
        Self { address, source }
    }
}

/// The days for which slices of past periods are kept: more than a month, because the period
/// before is read.
const KEPT_DAYS: u32 = 70;
/// The largest cap that the columns hold with a margin for what is claimed beyond it.
const LARGEST_CAP: u64 = 1 << 62;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn home_keeps_its_id_and_counts_lives() {
        let data = tempfile::tempdir().expect("a folder");
        let first = Home::begin_life(data.path()).expect("made");
        let second = Home::begin_life(data.path()).expect("read");
        assert_eq!((first.life, second.life), (1, 2));
        assert_eq!(first.id, second.id);
        fs::write(data.path().join("gateway.id"), "not an id\n").expect("writes");
        let error = Home::begin_life(data.path()).expect_err("no id");
        assert!(error.to_string().ends_with("gateway.id cannot be read"), "{error}");
    }
}
