//! The tables of `jobs.db`.

/// The format that this version reads and writes.
pub(super) const FORMAT: i64 = 3;
/// The format without the costs of days.
pub(super) const WITHOUT_SPENT: i64 = 1;
/// The format without tokens of reasoning.
pub(super) const WITHOUT_REASONING: i64 = 2;

/// The table that format 2 adds.
pub(super) const SPENT: &str = "
CREATE TABLE spent (
  day INTEGER NOT NULL,
  tenant TEXT NOT NULL,
  class TEXT NOT NULL,
  reference_ns INTEGER NOT NULL,
  PRIMARY KEY (day, tenant, class)
) WITHOUT ROWID;
PRAGMA user_version = 2;
";

/// The column that format 3 adds.
pub(super) const REASONING: &str = "
ALTER TABLE batches ADD COLUMN reasoning_tokens INTEGER NOT NULL DEFAULT 0;
PRAGMA user_version = 3;
";

/// The tables of format 1. Ids are 16 bytes, times are nanoseconds of Unix time.
pub(super) const DEFINITION: &str = "
-- Bytes on disk. `kind` is 'upload' until the upload is finished.
CREATE TABLE blobs (
  id BLOB PRIMARY KEY NOT NULL,
  tenant TEXT NOT NULL,
  pool TEXT,
  kind TEXT NOT NULL CHECK (kind IN ('upload', 'input', 'segment')),
  bytes INTEGER NOT NULL CHECK (bytes >= 0),
  batch BLOB
) WITHOUT ROWID;
CREATE INDEX blobs_by_tenant ON blobs (tenant);
CREATE INDEX blobs_by_pool ON blobs (pool) WHERE pool IS NOT NULL;
CREATE TABLE files (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  id BLOB UNIQUE NOT NULL,
  tenant TEXT NOT NULL,
  pool TEXT,
  bytes INTEGER NOT NULL,
  created INTEGER NOT NULL,
  expires INTEGER NOT NULL,
  filename TEXT NOT NULL,
  purpose TEXT NOT NULL CHECK (purpose IN ('batch', 'batch_output')),
  lines INTEGER NOT NULL,
  sha256 BLOB
);
CREATE INDEX files_by_tenant ON files (tenant, seq);
CREATE INDEX files_by_pool ON files (pool) WHERE pool IS NOT NULL;
CREATE INDEX files_by_expiry ON files (expires);
CREATE TABLE ranges (
  file BLOB NOT NULL,
  ordinal INTEGER NOT NULL,
  blob BLOB NOT NULL,
  start INTEGER NOT NULL,
  length INTEGER NOT NULL,
  PRIMARY KEY (file, ordinal)
) WITHOUT ROWID;
CREATE INDEX ranges_by_blob ON ranges (blob);
CREATE TABLE batches (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  id BLOB UNIQUE NOT NULL,
  tenant TEXT NOT NULL,
  pool TEXT,
  key TEXT NOT NULL,
  input BLOB NOT NULL,
  endpoint TEXT NOT NULL,
  metadata TEXT,
  created INTEGER NOT NULL,
  expires INTEGER NOT NULL,
  results_kept INTEGER NOT NULL,
  kept INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('validating', 'running', 'ending', 'ended')),
  cause TEXT,
  model TEXT,
  models_differ INTEGER NOT NULL DEFAULT 0,
  total INTEGER NOT NULL,
  completed INTEGER NOT NULL DEFAULT 0,
  failed INTEGER NOT NULL DEFAULT 0,
  prompt_tokens INTEGER NOT NULL DEFAULT 0,
  cached_tokens INTEGER NOT NULL DEFAULT 0,
  completion_tokens INTEGER NOT NULL DEFAULT 0,
  errors TEXT NOT NULL DEFAULT '[]',
  output BLOB,
  error BLOB,
  running_at INTEGER,
  ending_at INTEGER,
  ended_at INTEGER,
  -- Bytes of results that are reserved and not written.
  room INTEGER NOT NULL,
  claim INTEGER NOT NULL DEFAULT 0,
  claim_bits BLOB,
  lease INTEGER,
  claim_answers INTEGER NOT NULL DEFAULT 0,
  barren INTEGER NOT NULL DEFAULT 0,
  CHECK (completed + failed <= total)
);
CREATE INDEX batches_by_tenant ON batches (tenant, seq);
CREATE INDEX batches_by_pool ON batches (pool) WHERE pool IS NOT NULL;
CREATE INDEX batches_open ON batches (expires) WHERE state <> 'ended';
CREATE INDEX batches_by_input ON batches (input) WHERE state <> 'ended';
-- Claims whose tries may lack their caps.
CREATE TABLE claims (
  batch BLOB NOT NULL,
  number INTEGER NOT NULL,
  bits BLOB NOT NULL,
  id_bits BLOB NOT NULL,
  begun INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (batch, number)
) WITHOUT ROWID;
-- The last try of each line that was tried again under a claim.
CREATE TABLE tries (
  batch BLOB NOT NULL,
  claim INTEGER NOT NULL,
  line INTEGER NOT NULL,
  number INTEGER NOT NULL,
  PRIMARY KEY (batch, claim, line)
) WITHOUT ROWID;
CREATE TABLE answers (
  batch BLOB NOT NULL,
  line INTEGER NOT NULL,
  kind TEXT NOT NULL CHECK (kind IN ('output', 'error')),
  blob BLOB NOT NULL,
  start INTEGER NOT NULL,
  length INTEGER NOT NULL,
  paid_claim INTEGER,
  paid_try INTEGER,
  PRIMARY KEY (batch, line)
) WITHOUT ROWID;
";
