//! Table `homes` of a server: the data folders of the gateways that share it, with their newest
//! starts.

use tollgate_sql::{Connection, SqlError, params};

/// Notes the newest life of a data folder. Work of its earlier lives may not be in the ledger
/// yet.
pub(crate) fn begin(connection: &Connection, home: &str, life: u64) -> Result<(), SqlError> {
    let begin = "INSERT INTO homes (home, life, is_settled) VALUES (?1, ?2, false)
         ON CONFLICT (home) DO UPDATE SET life = excluded.life, is_settled = false";
    connection.execute(begin, params![home, life])?;
    Ok(())
}

/// Notes that all work of the lives before `life` is in the ledger.
pub(crate) fn settle(connection: &Connection, home: &str, life: u64) -> Result<(), SqlError> {
    let settle = "UPDATE homes SET is_settled = true WHERE home = ?1 AND life = ?2";
    connection.execute(settle, params![home, life])?;
    Ok(())
}

/// The table. A life of a home is settled if a later one is, with all before it.
pub(crate) const DEFINITION: &str = r#"
CREATE TABLE homes (
  home TEXT COLLATE "C" PRIMARY KEY,
  life BIGINT NOT NULL,
  is_settled BOOLEAN NOT NULL
);
"#;
