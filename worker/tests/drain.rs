//! Test of SIGTERM: the worker finishes its requests, accepts nothing new and
//! closes the journal. A test program of its own, because the signal reaches the
//! whole process.
#![allow(missing_docs)]

mod support;

use support::*;
use tollgate_wire::v1;

#[tokio::test(flavor = "multi_thread")]
async fn drained_worker_finishes_running_requests() {
    let data = tempfile::tempdir().expect("a folder");
    // No parent's pipe, like under a service manager.
    let bench = start(data.path(), |options| options.parent = None).await;
    let mut reader = bench.blocks().await;
    let mut statuses =
        bench.client.clone().status(v1::StatusRequest {}).await.expect("tells").into_inner();
    let mut long = assignment("req-1", "acme", vec![10, 11, 12]);
    long.max_tokens = 600;
    let ends = bench.announcement.models[0].end_tokens.iter();
    long.sampling.as_mut().expect("it is there").logit_bias =
        ends.map(|&token| (token, -100.0)).collect();
    let mut first = bench.run(long).await;
    first.events.message().await.expect("no error").expect("it runs");
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::TERM)
        .expect("signals");
    while !statuses.message().await.expect("no error").expect("a status").draining {}
    let late = bench.run(assignment("req-2", "acme", vec![10])).await.outcome().await;
    let refused = late.refused.expect("refused");
    assert_eq!(refused.reason(), v1::RefusedReason::Draining);
    let outcome = first.outcome().await;
    assert_eq!(outcome.usage.expect("figures").completion_tokens, 600);
    let mut last = false;
    while let Some(block) = reader.next().await {
        last = block.parts().last_of_epoch;
    }
    assert!(last, "the gateway has the whole epoch");
    bench.serving.await.expect("does not panic").expect("ends well");
}
