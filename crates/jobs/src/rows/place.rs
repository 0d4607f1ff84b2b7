//! The identity of a store that several gateways share. The folder of the bytes names it, so
//! that a gateway with another folder, or with another database, notices before it deletes
//! what it does not know.

use super::{Bits, SqlStore, damaged};
use crate::error::JobError;

/// A shared store, as its folder must name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StorePlace {
    /// The random id of the store.
    pub(crate) id: u128,
    /// True if a gateway has used a folder with the store before.
    pub(crate) has_folder: bool,
}

impl SqlStore {
    /// Checks the folder of the bytes with `check`, and notes that the store has one. Two gateways
    /// that start at the same time do this one after the other.
    pub(crate) fn join_folder(
        &mut self,
        check: impl FnOnce(StorePlace) -> Result<(), JobError>,
    ) -> Result<(), JobError> {
        self.write(|tables| {
            let sql = format!("SELECT id, has_folder FROM job_store{}", tables.for_update());
            let mut statement = tables.connection.prepare(&sql)?;
            let mut rows = statement.query(())?;
            let row = rows.next()?.ok_or_else(|| damaged("table job_store is empty"))?;
            let id = row.get::<Bits>(0)?.number();
            check(StorePlace { id, has_folder: row.get(1)? })?;
            tables.connection.execute("UPDATE job_store SET has_folder = 1", ())?;
            Ok(())
        })
    }
}
