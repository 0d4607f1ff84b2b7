//! The tables on a PostgreSQL server. They have the columns of the file; [`super::schema`]
//! says what the columns mean. Added are the id of the store and the data folder of the
//! gateway that an upload or a cost belongs to.

use tollgate_sql::{Connection, make_once};

use super::damaged;
use crate::error::JobError;

/// The format on a server that this version reads and writes.
const FORMAT: i64 = 1;
/// The lock of the gateway that makes the tables.
const MAKER_LOCK: i64 = 0x746f_6c6c_6a6f_6273;

/// Makes the tables if there are none, and refuses those of another format.
pub(super) fn make_tables(connection: &mut Connection) -> Result<(), JobError> {
    make_once(connection, ("job_store", MAKER_LOCK), &[TABLES])?;
    let query = "SELECT format FROM job_store";
    let format: i64 = connection.query_row(query, (), |row| row.get(0))?;
    match format {
        FORMAT => Ok(()),
        other => Err(damaged(format!(
            "the batches on the server have format {other}, this version reads format {FORMAT}"
        ))),
    }
}

// The collation "C" orders texts by their bytes, as SQLite does.
const TABLES: &str = r#"
CREATE TABLE job_store (
  -- The folder of the bytes names it.
  id BYTEA NOT NULL,
  format BIGINT NOT NULL,
  has_folder BIGINT NOT NULL DEFAULT 0
);
INSERT INTO job_store (id, format) VALUES (uuid_send(gen_random_uuid()), 1);

-- The data folders whose own files and batches have moved here.
CREATE TABLE adopted_homes (home TEXT COLLATE "C" PRIMARY KEY);

CREATE TABLE blobs (
  id BYTEA PRIMARY KEY,
  tenant TEXT COLLATE "C" NOT NULL,
  pool TEXT COLLATE "C",
  kind TEXT COLLATE "C" NOT NULL CHECK (kind IN ('upload', 'input', 'segment')),
  bytes BIGINT NOT NULL CHECK (bytes >= 0),
  batch BYTEA,
  -- The data folder of the gateway that writes an upload, and the time of its beginning.
  home TEXT COLLATE "C",
  begun_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX blobs_by_tenant ON blobs (tenant);
CREATE INDEX blobs_by_pool ON blobs (pool) WHERE pool IS NOT NULL;
CREATE INDEX blobs_uploading ON blobs (begun_at) WHERE kind = 'upload';

CREATE TABLE files (
  seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  id BYTEA UNIQUE NOT NULL,
  tenant TEXT COLLATE "C" NOT NULL,
  pool TEXT COLLATE "C",
  bytes BIGINT NOT NULL,
  created BIGINT NOT NULL,
  expires BIGINT NOT NULL,
  filename TEXT COLLATE "C" NOT NULL,
  purpose TEXT COLLATE "C" NOT NULL CHECK (purpose IN ('batch', 'batch_output')),
  lines BIGINT NOT NULL,
  sha256 BYTEA
);
CREATE INDEX files_by_tenant ON files (tenant, seq);
CREATE INDEX files_by_pool ON files (pool) WHERE pool IS NOT NULL;
CREATE INDEX files_by_expiry ON files (expires);

CREATE TABLE ranges (
  file BYTEA NOT NULL,
  ordinal BIGINT NOT NULL,
  blob BYTEA NOT NULL,
  start BIGINT NOT NULL,
  length BIGINT NOT NULL,
  PRIMARY KEY (file, ordinal)
);
CREATE INDEX ranges_by_blob ON ranges (blob);

CREATE TABLE batches (
  seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  id BYTEA UNIQUE NOT NULL,
  tenant TEXT COLLATE "C" NOT NULL,
  pool TEXT COLLATE "C",
  key TEXT COLLATE "C" NOT NULL,
  input BYTEA NOT NULL,
  endpoint TEXT COLLATE "C" NOT NULL,
  metadata TEXT COLLATE "C",
  created BIGINT NOT NULL,
  expires BIGINT NOT NULL,
  results_kept BIGINT NOT NULL,
  kept BIGINT NOT NULL,
  state TEXT COLLATE "C" NOT NULL CHECK (state IN ('validating', 'running', 'ending', 'ended')),
  cause TEXT COLLATE "C",
  model TEXT COLLATE "C",
  models_differ BIGINT NOT NULL DEFAULT 0,
  total BIGINT NOT NULL,
  completed BIGINT NOT NULL DEFAULT 0,
  failed BIGINT NOT NULL DEFAULT 0,
  prompt_tokens BIGINT NOT NULL DEFAULT 0,
  cached_tokens BIGINT NOT NULL DEFAULT 0,
  completion_tokens BIGINT NOT NULL DEFAULT 0,
  reasoning_tokens BIGINT NOT NULL DEFAULT 0,
  errors TEXT COLLATE "C" NOT NULL DEFAULT '[]',
  output BYTEA,
  error BYTEA,
  running_at BIGINT,
  ending_at BIGINT,
  ended_at BIGINT,
  room BIGINT NOT NULL,
  claim BIGINT NOT NULL DEFAULT 0,
  claim_bits BYTEA,
  lease BIGINT,
  claim_answers BIGINT NOT NULL DEFAULT 0,
  barren BIGINT NOT NULL DEFAULT 0,
  CHECK (completed + failed <= total)
);
CREATE INDEX batches_by_tenant ON batches (tenant, seq);
CREATE INDEX batches_by_pool ON batches (pool) WHERE pool IS NOT NULL;
CREATE INDEX batches_open ON batches (expires) WHERE state <> 'ended';
CREATE INDEX batches_by_input ON batches (input) WHERE state <> 'ended';

CREATE TABLE claims (
  batch BYTEA NOT NULL,
  number BIGINT NOT NULL,
  bits BYTEA NOT NULL,
  id_bits BYTEA NOT NULL,
  begun BIGINT NOT NULL DEFAULT 0,
  PRIMARY KEY (batch, number)
);

CREATE TABLE tries (
  batch BYTEA NOT NULL,
  claim BIGINT NOT NULL,
  line BIGINT NOT NULL,
  number BIGINT NOT NULL,
  PRIMARY KEY (batch, claim, line)
);

CREATE TABLE answers (
  batch BYTEA NOT NULL,
  line BIGINT NOT NULL,
  kind TEXT COLLATE "C" NOT NULL CHECK (kind IN ('output', 'error')),
  blob BYTEA NOT NULL,
  start BIGINT NOT NULL,
  length BIGINT NOT NULL,
  paid_claim BIGINT,
  paid_try BIGINT,
  PRIMARY KEY (batch, line)
);

CREATE TABLE spent (
  day BIGINT NOT NULL,
  tenant TEXT COLLATE "C" NOT NULL,
  class TEXT COLLATE "C" NOT NULL,
  -- The data folder of the gateway that ran the lines.
  home TEXT COLLATE "C" NOT NULL,
  reference_ns BIGINT NOT NULL,
  PRIMARY KEY (day, tenant, class, home)
);
"#;
