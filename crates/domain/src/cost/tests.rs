//! Tests of the formulas against plain sums, and of the properties of any table: parts sum
//! to the whole, and more work never costs less.

use proptest::prelude::*;

use super::*;

fn table() -> CostTable {
    CostTable::try_from(CostTableParts {
        version: "test".into(),
        step_ns: 10_000.0,
        linear: Curve(vec![(1, 100_000.0), (8, 120_000.0), (64, 400_000.0), (256, 1_600_000.0)]),
        head: Curve(vec![(1, 20_000.0), (32, 60_000.0)]),
        ns_per_kv_byte: 0.01,
        ns_per_attention_flop: 0.0001,
        shape: AttentionShape { kv_bytes_per_token: 3_072, flop_per_pair: 3_072 },
        reference_batch: 32,
        reference_chunk: 256,
    })
    .expect("a valid table")
}

fn decode(id: u64, context: u32) -> SequenceWork {
    SequenceWork { sequence: SequenceId(id), new_tokens: 1, logit_rows: 1, context }
}

fn any_work() -> impl Strategy<Value = SequenceWork> {
    (0u32..600, 0u32..4, 0u32..8_000).prop_map(|(new_tokens, logit_rows, context)| SequenceWork {
        sequence: SequenceId(0),
        new_tokens,
        logit_rows,
        context,
    })
}

fn numbered(mut works: Vec<SequenceWork>) -> Vec<SequenceWork> {
    for (id, work) in works.iter_mut().enumerate() {
        work.sequence = SequenceId(id as u64);
    }
    works
}

proptest! {
    #[test]
    fn step_cost_equals_prediction_of_whole_step(
        works in prop::collection::vec(any_work(), 1..30),
        gone in prop::collection::vec(any_work(), 0..10),
    ) {
        let table = table();
        let mut cost = table.step_cost();
        prop_assert_eq!(cost.predicted(), DeviceNanos::ZERO);
        for work in works.iter().chain(&gone) {
            cost.add(work);
        }
        for work in &gone {
            cost.remove(work);
        }
        let whole = table.predict_step(&works).as_secs_f64();
        prop_assert!((cost.predicted().as_secs_f64() / whole - 1.0).abs() < 1e-6);
    }
}

proptest! {
    #[test]
    fn shares_sum_to_the_step(
        total in 0u64..10_000_000_000_000,
        works in prop::collection::vec(any_work(), 1..70),
    ) {
        let works = numbered(works);
        let shares = table().attribute(DeviceNanos(total), &works);
        prop_assert_eq!(shares.len(), works.len());
        prop_assert_eq!(shares.into_iter().sum::<DeviceNanos>(), DeviceNanos(total));
    }

    #[test]
    fn split_conserves_for_any_weights(
        total in any::<u64>(),
        weights in prop::collection::vec(
            prop_oneof![any::<f64>(), Just(0.0), Just(f64::NAN), Just(f64::INFINITY), Just(1e300)],
            1..40,
        ),
    ) {
        let ids: Vec<_> = (0..weights.len() as u64).map(SequenceId).collect();
        let shares = split(DeviceNanos(total), &weights, &ids);
        prop_assert_eq!(shares.into_iter().sum::<DeviceNanos>(), DeviceNanos(total));
    }

    #[test]
    fn attribution_ignores_the_order_of_works(works in prop::collection::vec(any_work(), 2..40)) {
        let works = numbered(works);
        let total = DeviceNanos(123_456_789);
        let forward = table().attribute(total, &works);
        let mut reversed = works.clone();
        reversed.reverse();
        let mut backward = table().attribute(total, &reversed);
        backward.reverse();
        prop_assert_eq!(forward, backward);
    }

    #[test]
    fn more_own_work_never_lowers_own_weight(
        others in prop::collection::vec(any_work(), 0..20),
        mine in any_work(),
        more_tokens in 0u32..50,
        more_rows in 0u32..3,
    ) {
        let mut works = others;
        works.push(mine);
        let before = table().weights(&works);
        let last = works.last_mut().expect("just pushed");
        last.new_tokens += more_tokens;
        last.logit_rows += more_rows;
        let after = table().weights(&works);
        prop_assert!(after.last() >= before.last());
    }

    #[test]
    fn splitting_work_over_sequences_never_lowers_the_weight(
        others in prop::collection::vec(any_work(), 0..10),
        tokens in 2u32..400,
    ) {
        let part = |new_tokens, context| SequenceWork {
            sequence: SequenceId(0), new_tokens, logit_rows: 0, context,
        };
        let mut whole = others.clone();
        whole.push(part(tokens, 0));
        let mut halves = others;
        halves.push(part(tokens / 2, 0));
        halves.push(part(tokens - tokens / 2, tokens / 2));
        let sum_last = |works: &[SequenceWork], k: usize| -> f64 {
            let weights = table().weights(works);
            let all: f64 = weights.iter().sum();
            weights[weights.len() - k..].iter().sum::<f64>() / all
        };
        prop_assert!(sum_last(&halves, 2) >= sum_last(&whole, 1) * (1.0 - 1e-9));
    }

    #[test]
    fn reference_cost_is_additive_in_generated_tokens(
        context in 0u64..4_000, first in 0u64..500, second in 0u64..500,
    ) {
        let table = table();
        let whole = table.generated_ns(context..context + first + second);
        let middle = context + first;
        let parts = table.generated_ns(context..middle)
            + table.generated_ns(middle..middle + second);
        prop_assert!((whole - parts).abs() <= 1e-6 * whole.max(1.0));
    }

    #[test]
    fn scored_rows_cost_the_same_in_any_prompt(
        cached in 0u64..4_000, first in 1u64..500, second in 1u64..500,
    ) {
        let table = table();
        let extra = |uncached, cached, scored| {
            table.prompt_work_ns(PromptWork { uncached, cached, scored })
                - table.prompt_ns(cached..cached + uncached)
        };
        let whole = extra(first + second, cached, first + second);
        let parts = extra(first, cached, first) + extra(second, cached + first, second);
        prop_assert!((whole - parts).abs() <= 1e-6 * whole);
        // Beyond 32 rows h continues with its last slope, 40,000 / 31.
        let each = (60_000.0 + 224.0 * 40_000.0 / 31.0) / 256.0;
        prop_assert!((whole - (first + second) as f64 * each).abs() <= 1e-6 * whole);
    }
}

#[test]
fn equal_sequences_pay_equally_to_one_nanosecond() {
    let works: Vec<_> = (0..7).map(|id| decode(id, 100)).collect();
    let shares = table().attribute(DeviceNanos(1_000_003), &works);
    let (low, high) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
    assert!(high.nanos() - low.nanos() <= 1);
    // 1,000,003 = 7 x 142,857 + 4: the remaining ns go to the smallest ids.
    assert_eq!(shares[3].nanos(), 142_858);
    assert_eq!(shares[4].nanos(), 142_857);
}

#[test]
fn step_without_sequences_has_no_shares() {
    assert!(table().attribute(DeviceNanos(5), &[]).is_empty());
}

#[test]
fn curves_interpolate_and_extrapolate() {
    let curve = Curve(vec![(1, 10.0), (5, 18.0), (9, 50.0)]);
    for (tokens, expected) in
        [(0, 0.0), (1, 10.0), (3, 14.0), (5, 18.0), (7, 34.0), (9, 50.0), (10, 58.0)]
    {
        assert_eq!(curve.at(tokens), expected, "{tokens}");
    }
    assert_eq!(Curve(vec![(4, 8.0)]).at(2), 8.0);
    assert_eq!(Curve(vec![(4, 8.0)]).at(8), 16.0);
}

#[test]
fn prompt_cost_is_sum_over_its_chunks() {
    // 300 uncached tokens after 10 cached ones: chunks of 256 and 44.
    let table = table();
    let reads = (10.0 + 256.0) + (10.0 + 300.0);
    let pairs = 300.0 * 10.0 + 300.0 * 301.0 / 2.0;
    let expected = 2.0 * 110_000.0 / 32.0
        + 300.0 * 1_500_000.0 / 256.0
        + 0.01 * 3_072.0 * reads
        + 0.0001 * 3_072.0 * pairs;
    assert!((table.prompt_ns(10..310) - expected).abs() < 1e-3);
    assert_eq!(table.prompt_ns(50..50), 0.0);
}

#[test]
fn scored_prompt_costs_more_than_plain_one() {
    let table = table();
    let cost = |scored| table.request([PromptWork::of(300, scored)], [(300, 5)]);
    assert_eq!(cost(false), table.request([(300, 0)], [(300, 5)]));
    assert!(cost(true) > cost(false));
    assert_eq!(PromptWork::of(300, true).scored, 300);
}

#[test]
fn invalid_tables_are_rejected() {
    let good = table().parts().clone();
    type Spoil = fn(&mut CostTableParts);
    let cases: [(&str, Spoil); 9] = [
        ("curve linear", |t| t.linear.0.iter_mut().for_each(|point| point.1 = 1e300)),
        ("ns_per_kv_byte", |t| t.ns_per_kv_byte = 1e300),
        ("linear", |t| t.linear.0.iter_mut().for_each(|point| point.1 = 0.0)),
        ("curve linear", |t| t.linear.0.clear()),
        ("curve head", |t| t.head.0[1].1 = 1.0),
        ("curve linear", |t| t.linear.0[0].1 = f64::NAN),
        ("step_ns", |t| t.step_ns = -1.0),
        ("reference_batch", |t| t.reference_batch = 0),
        ("version", |t| t.version.clear()),
    ];
    for (named, spoil) in cases {
        let mut parts = good.clone();
        spoil(&mut parts);
        let error = CostTable::try_from(parts).expect_err(named).to_string();
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn tokens_within_minute_follow_shortest_step() {
    let table = table();
    // 10 + 100 + 20 us: no step with a sampled token is shorter.
    assert_eq!(table.tokens_within(Duration::from_secs(60)), 461_539);
    assert_eq!(table.tokens_within(Duration::ZERO), 0);
    let alone = table.predict_step(&[decode(1, 0)]);
    let most = 60_000_000_000 / alone.nanos();
    assert!(table.tokens_within(Duration::from_secs(60)) >= most, "{most}");
}
