//! For any sequence of acts, in any order and with any repetition, the ledger conserves
//! device time and energy and agrees with a model (C10).
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

mod common;

use std::collections::BTreeMap;

use common::*;
use proptest::prelude::*;
use tollgate_domain::{Block, DeviceNanos, FinishedAttempt, Millijoules, Share, Tier};
use tollgate_ledger::{FaultCap, Ledger, LedgerError, LedgerReader, Posted, UsageQuery};

/// An act on the ledger.
#[derive(Clone, Debug)]
enum Act {
    /// The next block: request and time of each share, the requests that finish, and
    /// the energy if the device reports it.
    Next { shares: Vec<(u8, u32)>, finishes: Vec<u8>, energy: Option<u32> },
    /// An earlier block, again.
    Again { back: u8 },
    /// A block with the number of an earlier one and another content.
    Forged { back: u8 },
    /// A block with a number that leaves a gap.
    Early,
    /// A fault cap on a request.
    Cap { request: u8, payable: u32 },
}

fn any_act() -> impl Strategy<Value = Act> {
    let shares = proptest::collection::vec((0_u8..6, 0_u32..1_000), 0..5);
    let finishes = proptest::collection::vec(0_u8..6, 0..3);
    let energy = proptest::option::of(prop_oneof![0..10_u32, 0..1_000_000_u32]);
    prop_oneof![
        6 => (shares, finishes, energy)
            .prop_map(|(shares, finishes, energy)| Act::Next { shares, finishes, energy }),
        2 => any::<u8>().prop_map(|back| Act::Again { back }),
        1 => any::<u8>().prop_map(|back| Act::Forged { back }),
        1 => Just(Act::Early),
        2 => (0_u8..6, 0_u32..2_000).prop_map(|(request, payable)| Act::Cap { request, payable }),
    ]
}

#[derive(Default)]
struct Model {
    blocks: Vec<Block>,
    shares: BTreeMap<u8, u64>,
    caps: BTreeMap<u8, u64>,
    finished: Vec<u8>,
}

impl Model {
    fn tenants(&self) -> u64 {
        let pays = |(request, total): (&u8, &u64)| {
            self.caps.get(request).map_or(*total, |cap| *total.min(cap))
        };
        self.shares.iter().map(pays).sum()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn ledger_conserves_time_in_any_sequence(acts in proptest::collection::vec(any_act(), 1..40)) {
        let folder = tempfile::tempdir().expect("a folder");
        let ledger = Ledger::open(&folder.path().join("ledger.db")).expect("opens");
        let mut model = Model::default();
        for act in acts {
            match act {
                Act::Next { shares, finishes, energy } => {
                    let block = next_block(&mut model, &shares, &finishes, energy);
                    prop_assert_eq!(post(&ledger, block).expect("posts"), Posted::New);
                }
                Act::Again { back } => {
                    if let Some(block) = pick(&model, back) {
                        prop_assert_eq!(post(&ledger, block).expect("posts"), Posted::Already);
                    }
                }
                Act::Forged { back } => {
                    if let Some(block) = pick(&model, back) {
                        let mut parts = block.into_parts();
                        match parts.energy {
                            Some(energy) => parts.energy = Some(Millijoules(energy.0 + 1)),
                            None => {
                                parts.idle += DeviceNanos(1);
                                parts.wall += DeviceNanos(1);
                            }
                        }
                        let forged = Block::try_from(parts).expect("it balances");
                        let refused = matches!(post(&ledger, forged), Err(LedgerError::Refused { .. }));
                        prop_assert!(refused);
                    }
                }
                Act::Early => {
                    let early = block(model.blocks.len() as u64 + 2, vec![], vec![]);
                    let refused = matches!(post(&ledger, early), Err(LedgerError::Refused { .. }));
                    prop_assert!(refused);
                }
                Act::Cap { request, payable } => cap_once(&ledger, &mut model, request, payable)?,
            }
        }
        agrees(ledger.reader(), &model)?;
        drop(ledger);
        agrees(&Ledger::open_read_only(&folder.path().join("ledger.db")).expect("opens"), &model)?;
    }
}

/// Returns the tier of a request: every other one is of the batch tier.
fn tier_of(request: u8) -> Tier {
    if request % 2 == 1 { Tier::Batch } else { Tier::Interactive }
}

fn next_block(
    model: &mut Model,
    shares: &[(u8, u32)],
    finishes: &[u8],
    energy: Option<u32>,
) -> Block {
    let mut ends = Vec::new();
    for &request in finishes {
        if !model.finished.contains(&request) {
            model.finished.push(request);
            let here = shares.iter().filter(|share| share.0 == request);
            let here: u64 = here.map(|share| u64::from(share.1)).sum();
            let total = model.shares.get(&request).copied().unwrap_or(0) + here;
            let end = finished("acme", request.into(), usage(total, total / 2));
            ends.push(FinishedAttempt { tier: tier_of(request), ..end });
        }
    }
    let number = model.blocks.len() as u64 + 1;
    let entries = shares.iter().map(|&(request, ns)| Share {
        tier: tier_of(request),
        ..share("acme", request.into(), ns.into())
    });
    let mut parts = parts(number, entries.collect(), ends);
    parts.energy = energy.map(|energy| Millijoules(energy.into()));
    let block = Block::try_from(parts).expect("it balances");
    for &(request, ns) in shares {
        *model.shares.entry(request).or_default() += u64::from(ns);
    }
    model.blocks.push(block.clone());
    block
}

fn pick(model: &Model, back: u8) -> Option<Block> {
    let count = model.blocks.len();
    (count > 0).then(|| model.blocks[usize::from(back) % count].clone())
}

fn cap_once(
    ledger: &tollgate_ledger::LedgerHandle,
    model: &mut Model,
    request: u8,
    payable: u32,
) -> Result<(), TestCaseError> {
    let payable = u64::from(payable);
    let posted = cap("acme", request.into(), usage(payable, payable));
    let result = post_cap(ledger, FaultCap { tier: tier_of(request), ..posted });
    match model.caps.get(&request) {
        None => {
            prop_assert_eq!(result.expect("posts"), Posted::New);
            model.caps.insert(request, payable);
        }
        Some(&known) if known == payable => {
            prop_assert_eq!(result.expect("posts"), Posted::Already);
        }
        Some(_) => prop_assert!(matches!(result, Err(LedgerError::AlreadySettled))),
    }
    Ok(())
}

fn agrees(reader: &LedgerReader, model: &Model) -> Result<(), TestCaseError> {
    let balance = reader.balance(EPOCH).expect("reads");
    let wall: u64 = model.blocks.iter().map(|block| block.parts().wall.nanos()).sum();
    prop_assert_eq!(balance.wall_ns, wall as i64);
    prop_assert_eq!(balance.tenants_ns, model.tenants() as i64);
    prop_assert!(balance.is_exact());
    let told: Vec<_> = model.blocks.iter().filter_map(|block| block.parts().energy).collect();
    let energy = reader.energy(EPOCH).expect("reads");
    prop_assert_eq!(energy.is_some(), !told.is_empty());
    if let Some(energy) = energy {
        prop_assert_eq!(energy.energy_mj, told.into_iter().sum::<Millijoules>().0 as i64);
        prop_assert!(energy.is_exact());
        let usage = reader.usage(&UsageQuery::default()).expect("reads");
        let tenants: u64 = usage.iter().filter_map(|row| row.energy_mj).sum();
        prop_assert_eq!(energy.tenants_mj, tenants as i64);
    }
    prop_assert_eq!(reader.check(), vec![]);
    Ok(())
}
