//! Tests that an invalid plan is refused before anything runs.

use tollgate_engine::SamplingParams;
use tollgate_engine::backend::cpu::{CpuBackend, CpuOptions};
use tollgate_engine::backend::{
    Backend, BackendError, LogitRows, ModelShape, PlanFault, Results, SampleRequest, SampleTarget,
    Span, StepLimits, StepOutput, StepPlan,
};
use tollgate_engine::model::ModelFiles;
use tollgate_engine::random_model::{ModelSpec, RandomModel};
use tollgate_engine::weights::Element;

#[test]
fn invalid_plan_is_refused_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let model = RandomModel { spec: ModelSpec::tiny(), element: Element::Bf16, seed: 3 };
    model.write(folder.path()).unwrap();
    let options = CpuOptions { threads: 2, kv_tokens: 100, step_tokens: 40, instructions: None };
    let mut backend = CpuBackend::new(&ModelFiles::open(folder.path()).unwrap(), &options).unwrap();
    assert_eq!(backend.kv_blocks(), 7);
    assert_eq!(backend.shape().context, 112, "no longer than the pool");
    let mut run = |spans: &[Span<'_>]| {
        let mut output = StepOutput::default();
        let result = backend.step(&StepPlan::logits(spans), &mut output);
        result.map(|()| output)
    };
    let good = Span { tokens: &[5, 6, 7], start: 0, blocks: &[3], logits: LogitRows::All };
    let before = run(&[good]).unwrap();
    assert_eq!(before.rows(), 3);
    let many = [1; 41];
    let next = Span { tokens: &[1], start: 0, blocks: &[4], logits: LogitRows::None };
    for (spans, index, expected) in [
        (vec![Span { tokens: &[], ..good }], 0, PlanFault::Empty),
        (
            vec![next, Span { tokens: &[512], ..good }],
            1,
            PlanFault::Token { token: 512, vocabulary: 512 },
        ),
        (
            vec![Span { start: 110, blocks: &[0, 1, 2, 3, 4, 5, 6, 0], ..good }],
            0,
            PlanFault::Context { end: 113, context: 112 },
        ),
        (vec![Span { start: 14, ..good }], 0, PlanFault::BlocksShort { blocks: 1, end: 17 }),
        (vec![Span { blocks: &[7], ..good }], 0, PlanFault::Block { block: 7, pool: 7 }),
        (
            vec![Span { tokens: &many, blocks: &[0, 1, 2], ..good }],
            0,
            PlanFault::TooManyTokens { limit: 40 },
        ),
        (vec![next, Span { blocks: &[4], ..good }], 1, PlanFault::BlockShared { block: 4 }),
        (vec![Span { start: 14, blocks: &[2, 2], ..good }], 0, PlanFault::BlockShared { block: 2 }),
    ] {
        match run(&spans) {
            Err(BackendError::Plan { span, reason }) => {
                assert_eq!((span, reason), (index, expected));
            }
            other => panic!("{expected:?}: {other:?}"),
        }
    }
    let after = run(&[good]).unwrap();
    for row in 0..3 {
        assert_eq!(before.row(row), after.row(row));
    }
    assert_eq!(run(&[]).unwrap().rows(), 0, "a step of nothing is one");
}

#[test]
fn invalid_sample_requests_are_refused() {
    let shape = ModelShape {
        context: 64,
        vocabulary: 512,
        layers: 1,
        heads: 1,
        kv_heads: 1,
        head_dim: 32,
        kv_bytes_per_token: 1,
        end_tokens: Vec::new(),
        sampling_defaults: Default::default(),
        hash: String::new(),
    };
    let limits = StepLimits { tokens: 8, logit_rows: 3 };
    let span = |block| Span { tokens: &[5], start: 0, blocks: block, logits: LogitRows::Last };
    let spans = [span(&[0]), span(&[1])];
    let params = SamplingParams::greedy(1);
    let draw = |row| SampleRequest { row, params: &params, token: SampleTarget::first() };
    let check = |spans: &[Span<'_>], draws: &[SampleRequest<'_>], feeds: &[u32]| {
        let plan = StepPlan { spans, results: Results::Samples(draws), token_feedback: feeds };
        let checked = plan.check(&shape, limits, 4).and_then(|()| plan.check_feedback(2));
        checked.map_err(|error| error.to_string())
    };
    check(&spans, &[draw(0), draw(1), draw(1)], &[1, 0]).unwrap();
    for (draws, feeds, expected) in [
        (vec![draw(2)], &[][..], "sample 0: row 2 is not below the step's 2 rows"),
        (vec![draw(0); 7], &[], "sample 6: more than 6 samples in one step"),
        (vec![draw(0)], &[1, 2], "sample 2: the previous step had only 2 samples"),
        (
            vec![draw(0)],
            &[1],
            "span 1: token feedback needs one entry for each span, and one token in each span",
        ),
    ] {
        assert_eq!(check(&spans, &draws, feeds).unwrap_err(), expected);
    }
    let long = [Span { tokens: &[5, 6], ..spans[0] }];
    let expected =
        "span 0: token feedback needs one entry for each span, and one token in each span";
    assert_eq!(check(&long, &[draw(0)], &[0]).unwrap_err(), expected);
    let point = tollgate_engine::sample::SamplingPoint {
        seed: 0,
        position: 1,
        counts: &Default::default(),
        prompt: &[],
        constraint: None,
    };
    let pending =
        SampleRequest { token: SampleTarget::Next { point, pending: Some(7) }, ..draw(0) };
    let expected = "sample 7: the previous step had only 2 samples";
    assert_eq!(check(&spans, &[pending], &[]).unwrap_err(), expected);
}
