//! The statements that move records into the archive's sums and delete them. All
//! of them run in one transaction, in this order.

use super::Tables;
use crate::error::LedgerError;

/// Adds everything that the records before `to` stand for to the archive's sums,
/// and deletes it.
pub(crate) fn run(tables: Tables<'_>, to: u64) -> Result<(), LedgerError> {
    // The last statements delete the rows that the others read.
    for statements in [FIND_GONE, SUM_DAYS, SUM_EPOCHS, KEEP_ATTEMPTS_AND_DELETE] {
        // The bound is an integer, and a batch takes no parameters.
        tables.connection.execute_batch(&statements.replace("{to}", &to.to_string()))?;
    }
    Ok(())
}

/// Collects the attempts that leave: those that ended, and those that a fault cap
/// ended although their worker recorded no end.
const FIND_GONE: &str = "
CREATE TEMP TABLE gone AS
  SELECT request_id, caller_id, attempt, 1 AS ended FROM attempts WHERE record_seq < {to}
  UNION ALL
  SELECT request_id, caller_id, attempt, 0 FROM fault_caps AS cap WHERE record_seq < {to}
    AND NOT EXISTS (SELECT 1 FROM attempts AS done WHERE done.request_id = cap.request_id
      AND done.caller_id = cap.caller_id AND done.attempt = cap.attempt);
CREATE UNIQUE INDEX temp.gone_ids ON gone (request_id, caller_id, attempt);
";

/// Adds the device time, charges and tokens that leave to the sums by day.
const SUM_DAYS: &str = "
INSERT INTO archived_days (day, caller_id, model, device_class, tier, charges, entries, requests,
  prompt_tokens, cached_tokens, completion_tokens, attributed_ns, reference_ns, energy_mj)
SELECT day, caller_id, model, device_class, tier, sum(charges), sum(entries), sum(requests),
  sum(prompt), sum(cached), sum(completion), sum(attributed), sum(reference), sum(energy)
FROM (
  SELECT blocks.day AS day, caller_id, model, device_class, tier, 0 AS charges, 1 AS entries,
    0 AS requests, 0 AS prompt, 0 AS cached, 0 AS completion, amount_ns AS attributed,
    0 AS reference, energy_mj AS energy
  FROM blocks JOIN entries USING (epoch_id, block) JOIN epochs ON epochs.id = blocks.epoch_id
  WHERE record_seq < {to} AND account = 1
  UNION ALL
  SELECT day, caller_id, model, device_class, tier, 1, 0, counted, prompt_tokens, cached_tokens,
    completion_tokens, 0, reference_ns, NULL
  FROM gone JOIN requests USING (request_id, caller_id, attempt))
WHERE true GROUP BY 1, 2, 3, 4, 5
ON CONFLICT DO UPDATE SET charges = charges + excluded.charges,
  entries = entries + excluded.entries, requests = requests + excluded.requests,
  prompt_tokens = prompt_tokens + excluded.prompt_tokens,
  cached_tokens = cached_tokens + excluded.cached_tokens,
  completion_tokens = completion_tokens + excluded.completion_tokens,
  attributed_ns = attributed_ns + excluded.attributed_ns,
  reference_ns = reference_ns + excluded.reference_ns,
  energy_mj = coalesce(energy_mj + excluded.energy_mj, energy_mj, excluded.energy_mj);
";

/// Adds the time and energy of the blocks that leave to the sums by epoch.
const SUM_EPOCHS: &str = "
INSERT INTO archived_epochs
SELECT epoch_id, sum(blocks), max(last_block), max(last_step), max(ended), sum(wall),
  sum(tenants), sum(overhead), sum(idle), sum(loss), -sum(energy) FILTER (WHERE account = 0),
  sum(energy) FILTER (WHERE account = 1), sum(energy) FILTER (WHERE account = 2),
  sum(energy) FILTER (WHERE account = 3), sum(energy) FILTER (WHERE account = 4)
FROM (
  SELECT epoch_id, 1 AS blocks, block AS last_block, last_step, last_of_epoch AS ended, 0 AS wall,
    0 AS tenants, 0 AS overhead, 0 AS idle, 0 AS loss, NULL AS account, NULL AS energy
  FROM blocks WHERE record_seq < {to}
  UNION ALL
  SELECT epoch_id, 1, block, 0, 0, 0, 0, 0, 0, 0, NULL, NULL FROM refused_blocks
  WHERE record_seq < {to}
  UNION ALL
  SELECT epoch_id, 0, 0, 0, 0, iif(account = 0, -amount_ns, 0), iif(account = 1, amount_ns, 0),
    iif(account = 2, amount_ns, 0), iif(account = 3, amount_ns, 0), iif(account = 4, amount_ns, 0),
    account, energy_mj
  FROM blocks JOIN entries USING (epoch_id, block) WHERE record_seq < {to})
WHERE true GROUP BY 1
ON CONFLICT DO UPDATE SET blocks = blocks + excluded.blocks,
  last_block = max(last_block, excluded.last_block),
  last_step = max(last_step, excluded.last_step), ended = max(ended, excluded.ended),
  wall_ns = wall_ns + excluded.wall_ns, tenants_ns = tenants_ns + excluded.tenants_ns,
  overhead_ns = overhead_ns + excluded.overhead_ns, idle_ns = idle_ns + excluded.idle_ns,
  loss_ns = loss_ns + excluded.loss_ns,
  energy_mj = coalesce(energy_mj + excluded.energy_mj, energy_mj, excluded.energy_mj),
  tenants_mj = coalesce(tenants_mj + excluded.tenants_mj, tenants_mj, excluded.tenants_mj),
  overhead_mj = coalesce(overhead_mj + excluded.overhead_mj, overhead_mj, excluded.overhead_mj),
  idle_mj = coalesce(idle_mj + excluded.idle_mj, idle_mj, excluded.idle_mj),
  loss_mj = coalesce(loss_mj + excluded.loss_mj, loss_mj, excluded.loss_mj);
";

/// Keeps the ids of the attempts that leave and the time of attempts that are
/// still open, then deletes the rows.
const KEEP_ATTEMPTS_AND_DELETE: &str = "
INSERT INTO archived_attempts SELECT request_id, caller_id, attempt, ended FROM gone;

DELETE FROM archived_shares WHERE (request_id, caller_id, attempt)
  IN (SELECT request_id, caller_id, attempt FROM gone);
INSERT INTO archived_shares
SELECT request_id, caller_id, attempt, sum(amount_ns)
FROM blocks JOIN entries USING (epoch_id, block)
WHERE record_seq < {to} AND account = 1 AND (request_id, caller_id, attempt)
  NOT IN (SELECT request_id, caller_id, attempt FROM archived_attempts)
GROUP BY 1, 2, 3
ON CONFLICT DO UPDATE SET attributed_ns = attributed_ns + excluded.attributed_ns;

DELETE FROM requests WHERE (request_id, caller_id, attempt)
  IN (SELECT request_id, caller_id, attempt FROM gone);
DELETE FROM attempts WHERE record_seq < {to};
DELETE FROM fault_caps WHERE record_seq < {to};
CREATE TEMP TABLE gone_blocks AS SELECT epoch_id, block FROM blocks WHERE record_seq < {to};
DELETE FROM entries WHERE (epoch_id, block) IN (SELECT epoch_id, block FROM gone_blocks);
DELETE FROM struck_blocks WHERE (epoch_id, block) IN (SELECT epoch_id, block FROM gone_blocks);
DELETE FROM blocks WHERE record_seq < {to};
DELETE FROM refused_blocks WHERE record_seq < {to};
DELETE FROM records WHERE seq < {to};
DELETE FROM checkpoints WHERE size < {to};
DELETE FROM record_nodes WHERE ((position + 1) << level) <= {to};
DROP TABLE temp.gone;
DROP TABLE temp.gone_blocks;
";
