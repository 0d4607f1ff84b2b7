//! One interface over SQLite files and PostgreSQL servers, for the crates that keep
//! rows. A caller writes its SQL once, in the dialect that both understand, with
//! numbered parameters (`?1`). A call blocks until the database has answered.
//!
//! Modules from the bottom: `value` (values of columns and parameters), `params`,
//! `server` (a connection to PostgreSQL, each call with a time limit), then
//! `connection`, `statement` and `row`, which are the same for both databases, and
//! `server_tables`, which makes the tables of a server once.

mod error;
mod value;

mod params;
mod server;

mod connection;
mod row;
mod server_tables;
mod statement;

#[cfg(feature = "test-support")]
pub mod testing;

pub use connection::{Begin, Connection, Transaction};
pub use error::{OptionalRow, SqlError};
pub use params::Params;
pub use row::Row;
pub use server::{Server, ServerAddress, ServerAddressError};
pub use server_tables::{change_once, make_once, server_has_table, take_server_lock};
pub use statement::{MappedRows, Rows, Statement};
pub use value::{FromSql, OwnedValue, SqlValue, ToSql, ValueError};
