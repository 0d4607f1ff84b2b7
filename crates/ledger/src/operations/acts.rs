//! Dispatch of acts to their operations.

use tollgate_domain::{Block, BlockParts};

use super::chain::Chain;
use super::{cap, plans, post};
use crate::act::{Act, Posted};
use crate::error::{BlockRefusal, LedgerError};
use crate::rows::Tables;

/// Runs an act; the caller rolls back on an error. [`LedgerError::Storage`] means
/// that the disk failed. Values that the database refuses are this act's own
/// failure, and other acts are not affected.
pub(crate) fn run(act: &Act, tables: Tables<'_>, chain: &mut Chain) -> Result<Posted, LedgerError> {
    let result = match act {
        Act::Post(block) => post::post_block(tables, chain, block),
        Act::PostPartly(partly) => post::post_partly(tables, chain, partly),
        Act::CapFault(cap) => cap::post(tables, chain, cap),
        Act::Skip(refused) => post::skip(tables, chain, refused),
        Act::Record(action) => post::record_action(tables, chain, action),
        Act::PutPlansInForce(plans) => plans::put_in_force(tables, chain, plans),
        // The commit signs after all acts of its group.
        Act::Sign => Ok(Posted::New),
    };
    // A server may have statements of this act that it has not answered yet, and their errors are
    // this act's own.
    let result = result.and_then(|posted| tables.flush().map(|()| posted));
    result.map_err(|error| match error {
        // As a disk error these values would fail the whole group and degrade the ledger.
        LedgerError::Storage(source) if source.is_about_content() => {
            refuse_content(act, source.to_string())
        }
        error => error,
    })
}

/// Returns the error for values of an act that the database refuses.
fn refuse_content(act: &Act, reason: String) -> LedgerError {
    let block: Option<&Block> = match act {
        Act::Post(block) => Some(block),
        Act::PostPartly(partly) => Some(&partly.accepted),
        Act::CapFault(_) | Act::Skip(_) | Act::Record(_) | Act::PutPlansInForce(_) | Act::Sign => {
            None
        }
    };
    match block.map(Block::parts) {
        Some(&BlockParts { epoch, number, .. }) => {
            LedgerError::Refused { epoch, number, refusal: BlockRefusal::Unfit { reason } }
        }
        None => LedgerError::Damaged(reason),
    }
}
