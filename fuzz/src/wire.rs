//! Messages of a worker: a block balances or is rejected, and a cost table prices
//! every request.

use prost::Message as _;
use tollgate_domain::{Block, CostTable, DeviceNanos, PromptWork};
use tollgate_gateway::fuzz as gateway;
use tollgate_wire::v1;

pub(crate) fn journal_block(data: &[u8]) {
    let Ok(message) = v1::JournalBlock::decode(data) else { return };
    let Ok(block) = Block::try_from(message) else { return };
    let parts = block.parts();
    let tenants: u128 = parts.shares.iter().map(|it| u128::from(it.attributed.nanos())).sum();
    let platform = [parts.overhead, parts.idle, parts.loss];
    let platform: u128 = platform.iter().map(|it| u128::from(it.nanos())).sum();
    assert_eq!(tenants + platform, u128::from(parts.wall.nanos()));
    let drew = parts.energy_parts().map(|it| {
        let platform = it.overhead.0 + it.idle.0 + it.loss.0;
        platform + it.shares.iter().map(|share| share.0).sum::<u64>()
    });
    assert_eq!(drew, parts.energy.map(|energy| energy.0));
    assert!(parts.finished.iter().all(|it| it.usage.cached_tokens <= it.usage.prompt_tokens));
    let again = Block::try_from(v1::JournalBlock::from(block.clone()));
    assert_eq!(again, Ok(block.clone()), "the block changed on the wire");
    // A block stays balanced when some of its shares are rejected.
    let without = block.without(|_, attempt| attempt.attempt % 2 == 0);
    assert_eq!(Block::try_from(without.clone().into_parts()), Ok(without));
}

/// Checks a block against the orders of the gateway. The last byte chooses the state
/// before the block.
pub(crate) fn journal_judged(data: &[u8]) {
    let Some((&state, message)) = data.split_last() else { return };
    if let Ok(message) = v1::JournalBlock::decode(message) {
        gateway::check_block(message, state);
    }
}

/// Checks a sequence of events, each with its length before it.
pub(crate) fn run_events(mut data: &[u8]) {
    let mut events = Vec::new();
    while !data.is_empty() && events.len() < 1_000 {
        let Ok(event) = v1::RunEvent::decode_length_delimited(&mut data) else { break };
        events.push(event);
    }
    gateway::check_events(events);
}

pub(crate) fn cost_table(data: &[u8]) {
    let Ok(table) = serde_json::from_slice::<CostTable>(data) else { return };
    let mut before = DeviceNanos::ZERO;
    for tokens in [0, 1, 2, 255, 256, 257, 10_000, 1 << 24] {
        let cost = table.request([PromptWork::of(tokens, true)], [(tokens, tokens)]);
        assert!(cost >= before, "{tokens} tokens cost {cost} after {before}");
        before = cost;
    }
    let text = serde_json::to_string(&table).expect("a table is numbers and names");
    assert!(serde_json::from_str::<CostTable>(&text).is_ok(), "{text}");
}
