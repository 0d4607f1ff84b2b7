//! The suite that every store must pass. `stores` is the one place that names them.

use std::time::Duration;

use tollgate_domain::{DeviceClass, DeviceNanos, KeyId, ModelName, PoolName, UtcDay, UtcTime};
use tollgate_sql::testing::TestServer;

use super::world::{TODAY, new_batch, quotas_of, tenant};
use crate::batch::{BatchUsage, CancelReason, SpentByBatches, TryCost, TryUsage};
use crate::claim::{Claim, ClaimSeed, Claimed};
use crate::file::{BlobRange, FilePage, FinishedFile, NewFile, Order, Purpose};
use crate::quota::QuotaUse;
use crate::rules::ROOM_OF_A_LINE;
use crate::store::{Answer, AnswerKind, GatewayStored, Most, Released, TriesLeft};
use crate::{
    BatchId, BatchPage, BatchRow, BatchState, BlobId, Cause, FailureCode, FileId, FileRow,
    InputError, JobError, NewBatch, QuotaScope, Quotas, ScopedQuotas, SqlStore, Store,
};

/// Runs a test over each store.
fn stores(test: impl Fn(&mut dyn Store)) {
    test(&mut SqlStore::in_memory().expect("memory"));
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("jobs.db");
    test(&mut SqlStore::open(path, std::sync::Arc::new(|_| Ok(()))).expect("opens"));
    if let Some(server) = TestServer::shared() {
        test(&mut on_server(&server, &server.new_database(), "first"));
    }
}

/// Opens the store of a server's database for a gateway.
fn on_server(server: &TestServer, database: &str, home: &str) -> SqlStore {
    SqlStore::on_server(server.address(database), home.to_owned()).expect("opens")
}

const NOW: UtcTime = UtcTime(1_000_000_000_000);
/// The cost of an answer.
const COST: DeviceNanos = DeviceNanos(7);
const ALL: GatewayStored = GatewayStored(1 << 40);

fn at(seconds: u64) -> UtcTime {
    UtcTime(NOW.0 + seconds * 1_000_000_000)
}

fn quotas() -> Vec<ScopedQuotas> {
    quotas_of("acme", Quotas::default())
}

fn upload(id: u128, name: &str, reserved: u64) -> NewFile {
    NewFile {
        id: FileId::from_random(id),
        blob: BlobId::from_random(id),
        tenant: tenant(name),
        pool: None,
        reserved,
    }
}

fn finished(bytes: u64, lines: u64) -> FinishedFile {
    FinishedFile { bytes, lines, sha256: [7; 32], filename: "in.jsonl".to_owned(), life: None }
}

/// Uploads a file of `lines` lines.
fn file(store: &mut dyn Store, id: u128, lines: u64) -> FileRow {
    let new = upload(id, "acme", 100);
    store.reserve(&new, &quotas(), ALL).expect("reserved");
    store.finish(NOW, &new, &finished(90, lines), &quotas()).expect("finished")
}

/// Makes a file of 'acme' for other tests.
pub(super) fn some_file(store: &mut dyn Store) -> FileId {
    file(store, 77, 1).id
}

fn batch_new(id: u128, input: FileId) -> NewBatch {
    NewBatch { id: BatchId::from_random(id), ..new_batch("acme", input) }
}

fn batch(store: &mut dyn Store, id: u128, lines: u64) -> BatchRow {
    let input = file(store, id, lines).id;
    store.create_batch(NOW, &batch_new(id, input), &quotas()).expect("created")
}

fn seed(bits: u128) -> ClaimSeed {
    ClaimSeed { bits, id_bits: 1 << 80 }
}

fn claim(store: &mut dyn Store, batch: &BatchRow, bits: u128) -> Claimed {
    let claimed = store.claim(NOW, batch.id, seed(bits), at(15)).expect("no failure");
    claimed.expect("no live claim")
}

/// Makes a batch that runs, and its claim.
fn running(store: &mut dyn Store, id: u128, lines: u64) -> Claim {
    let batch = batch(store, id, lines);
    let claim = claim(store, &batch, id).claim;
    let row = store.validated(NOW, &claim, &[]).expect("valid");
    assert_eq!(row.state, BatchState::Running);
    claim
}

fn answer(claim: &Claim, line: u64, kind: AnswerKind, offset: u64) -> Answer {
    let blob = match kind {
        AnswerKind::Output => BlobId::from_random(900),
        AnswerKind::Error => BlobId::from_random(901),
    };
    Answer {
        line,
        kind,
        range: BlobRange { blob, offset, length: 10 },
        paid: Some(claim.try_name(line, 0)),
        usage: TryUsage {
            tokens: BatchUsage {
                prompt_tokens: 3,
                cached_tokens: 1,
                completion_tokens: 2,
                reasoning_tokens: 1,
            },
            cost: Some(TryCost { day: TODAY, class: DeviceClass::cpu(), reference: COST }),
        },
        model: Some(ModelName::new("m").expect("a name")),
    }
}

fn used(store: &mut dyn Store) -> QuotaUse {
    store.quota_use(&QuotaScope::Tenant(tenant("acme"))).expect("read")
}

fn quota_of(result: Result<impl std::fmt::Debug, JobError>) -> &'static str {
    match result {
        Err(JobError::Quota(refusal)) => refusal.quota,
        other => panic!("expected a quota: {other:?}"),
    }
}

#[test]
fn store_reserves_bytes_before_they_are_written() {
    stores(|store| {
        let few = |change: fn(&mut Quotas)| {
            let mut quotas = Quotas { stored: 300, uploads: 2, files: 3, ..Quotas::default() };
            change(&mut quotas);
            quotas_of("acme", quotas)
        };
        let (first, second) = (upload(1, "acme", 200), upload(2, "acme", 100));
        store.reserve(&first, &few(|_| {}), ALL).expect("room");
        store.reserve(&second, &few(|_| {}), ALL).expect("exactly the room");
        let third = upload(3, "acme", 1);
        assert_eq!(quota_of(store.reserve(&third, &few(|_| {}), ALL)), "uploads");
        assert_eq!(quota_of(store.reserve(&third, &few(|q| q.uploads = 9), ALL)), "stored");
        let plenty = few(|q| (q.uploads, q.files, q.stored) = (9, 2, 9_000));
        assert_eq!(quota_of(store.reserve(&third, &plenty, ALL)), "files");
        let plenty = few(|q| (q.uploads, q.stored) = (9, 9_000));
        let full = GatewayStored(300);
        assert_eq!(quota_of(store.reserve(&third, &plenty, full)), "gateway.jobs.stored");
        assert_eq!(quota_of(store.grow(&second, 101, &few(|_| {}), ALL)), "stored");
        store.abandon(first.blob).expect("given back");
        assert!(!store.is_upload(first.blob).expect("read"));
        store.grow(&second, 300, &few(|_| {}), ALL).expect("room again");
        assert_eq!(used(store), QuotaUse { stored: 300, files: 1, uploads: 1, ..<_>::default() });
        // A finished file counts its own bytes only.
        store.finish(NOW, &second, &finished(120, 4), &few(|_| {})).expect("finished");
        assert_eq!(used(store), QuotaUse { stored: 120, files: 1, ..QuotaUse::default() });
        store.abandon(second.blob).expect("no upload any more");
        assert_eq!(used(store).stored, 120, "a finished file is not given up");
        assert!(store.finish(NOW, &first, &finished(1, 1), &few(|_| {})).is_err(), "given up");
    });
}

#[test]
fn store_counts_pool_over_its_tenants() {
    stores(|store| {
        let pool = PoolName::new("trial").expect("a name");
        let scoped = |name: &str| {
            let mut scoped = quotas_of(name, Quotas::default());
            let mut of_pool = scoped[0].clone();
            of_pool.scope = QuotaScope::Pool(pool.clone());
            of_pool.quotas.uploads = 1;
            scoped.push(of_pool);
            scoped
        };
        let new = |id, name: &str| NewFile { pool: Some(pool.clone()), ..upload(id, name, 10) };
        store.reserve(&new(1, "acme"), &scoped("acme"), ALL).expect("room");
        let refused = store.reserve(&new(2, "beta"), &scoped("beta"), ALL);
        let message = refused.as_ref().expect_err("the pool is full").to_string();
        assert!(message.starts_with("Pool 'trial' has 1 uploads"), "{message}");
        assert_eq!(quota_of(refused), "uploads");
    });
}

#[test]
fn store_shows_files_to_their_tenant_only() {
    stores(|store| {
        let row = file(store, 1, 5);
        assert_eq!(store.file(NOW, &tenant("acme"), row.id).expect("there"), row);
        let foreign = tenant("beta");
        assert!(matches!(store.file(NOW, &foreign, row.id), Err(JobError::NoSuchFile)));
        assert!(matches!(store.ranges(NOW, &foreign, row.id), Err(JobError::NoSuchFile)));
        assert!(matches!(store.delete_file(NOW, &foreign, row.id), Err(JobError::NoSuchFile)));
        let stolen = NewBatch { tenant: foreign.clone(), ..batch_new(1, row.id) };
        assert!(matches!(store.create_batch(NOW, &stolen, &[]), Err(JobError::NoSuchFile)));
        let page =
            FilePage { after: Some(row.id), limit: 1, order: Order::Ascending, purpose: None };
        assert!(matches!(store.files(NOW, &foreign, &page), Err(JobError::NoSuchFile)));
        let expired = row.expires;
        assert!(matches!(store.file(expired, &tenant("acme"), row.id), Err(JobError::NoSuchFile)));
        let own = batch(store, 2, 3);
        assert!(matches!(store.batch(&foreign, own.id), Err(JobError::NoSuchBatch)));
        assert!(matches!(store.cancel(NOW, &foreign, own.id), Err(JobError::NoSuchBatch)));
        let page = BatchPage { after: Some(own.id), limit: 1 };
        assert!(matches!(store.batches(&foreign, &page), Err(JobError::NoSuchBatch)));
    });
}

#[test]
fn store_lists_files_in_pages() {
    stores(|store| {
        let ids: Vec<FileId> = (1..=5).map(|id| file(store, id, 1).id).collect();
        for (order, expected) in
            [(Order::Ascending, [0, 1, 2, 3, 4]), (Order::Descending, [4, 3, 2, 1, 0])]
        {
            let (mut after, mut found) = (None, Vec::new());
            loop {
                let page = FilePage { after, limit: 2, order, purpose: Some(Purpose::Batch) };
                let page = store.files(NOW, &tenant("acme"), &page).expect("read");
                found.extend(page.rows.iter().map(|row| row.id));
                after = found.last().copied();
                if !page.has_more {
                    break;
                }
            }
            assert_eq!(found, expected.map(|at: usize| ids[at]));
        }
        let page = FilePage {
            after: None,
            limit: 9,
            order: Order::Ascending,
            purpose: Some(Purpose::BatchOutput),
        };
        assert!(store.files(NOW, &tenant("acme"), &page).expect("read").rows.is_empty());
    });
}

#[test]
fn store_keeps_an_input_until_its_batch_ends() {
    stores(|store| {
        let batch = batch(store, 1, 2);
        let refused = store.delete_file(NOW, &tenant("acme"), batch.input);
        assert!(matches!(refused, Err(JobError::FileInUse)));
        // Also beyond its life: the batch reads it.
        assert_eq!(store.sweep(at(8 * 86_400)).expect("swept"), []);
        let held = claim(store, &batch, 1).claim;
        store.cancel(NOW, &tenant("acme"), batch.id).expect("cancelled");
        let ids = (FileId::from_random(50), FileId::from_random(51));
        store.end(NOW, &held, ids.0, ids.1).expect("ended");
        let blob = BlobId::from_random(1);
        let released = store.delete_file(NOW, &tenant("acme"), batch.input).expect("deleted");
        assert_eq!(released, [Released(blob)]);
        // Its bytes count until they are deleted.
        assert_eq!(used(store).stored, 90);
        store.forget(blob).expect("forgotten");
        assert_eq!(used(store), QuotaUse::default());
    });
}

/// Two requests with one `Idempotency-Key` ask for the same id.
#[test]
fn store_returns_earlier_batch_of_same_id() {
    stores(|store| {
        let first = batch(store, 1, 2);
        let other = file(store, 2, 3).id;
        // No quota refuses a batch that exists.
        let full = quotas_of("acme", Quotas { queued: 1, ..Quotas::default() });
        let again = store.create_batch(at(1), &batch_new(1, other), &full).expect("found");
        assert_eq!(again, first);
        assert_eq!(used(store).queued, 1);
    });
}

#[test]
fn store_checks_quotas_when_a_batch_is_created() {
    stores(|store| {
        let input = file(store, 1, 100).id;
        let mut create = |id, change: fn(&mut Quotas)| {
            let mut quotas = Quotas { queued: 2, lines: 250, files: 5, ..Quotas::default() };
            change(&mut quotas);
            store.create_batch(NOW, &batch_new(id, input), &quotas_of("acme", quotas))
        };
        assert_eq!(quota_of(create(1, |q| q.queued = 0)), "queued");
        assert_eq!(quota_of(create(1, |q| q.lines = 99)), "lines");
        assert_eq!(quota_of(create(1, |q| q.files = 2)), "files");
        assert_eq!(quota_of(create(1, |q| q.results = 100)), "results");
        create(1, |_| {}).expect("allowed");
        create(2, |_| {}).expect("allowed");
        assert_eq!(quota_of(create(3, |_| {})), "queued");
        assert_eq!(quota_of(create(3, |q| q.queued = 9)), "lines");
        let expected = QuotaUse {
            queued: 2,
            lines: 200,
            stored: 90,
            results: 200 * ROOM_OF_A_LINE,
            files: 5,
            uploads: 0,
        };
        assert_eq!(used(store), expected);
    });
}

#[test]
fn store_fences_all_writes_by_the_claim() {
    stores(|store| {
        let stale = running(store, 1, 9);
        store.add_segment(&stale, BlobId::from_random(900)).expect("its own");
        let batch = store.claimed(&stale).expect("its own");
        assert!(store.claim(at(14), batch.id, seed(2), at(30)).expect("read").is_none(), "held");
        let claimed = store.claim(at(15), batch.id, seed(2), at(30)).expect("read");
        let live = claimed.expect("the lease is over").claim;
        assert_eq!(live.number.0, stale.number.0 + 1);
        let before = store.claimed(&live).expect("its own");
        let (line, no) = (answer(&stale, 0, AnswerKind::Output, 0), FileId::from_random(9));
        let refused = [
            store.renew(&stale, at(99)).err(),
            store.claimed(&stale).err(),
            store.release(&stale, TriesLeft::None).err(),
            store.capped(&stale).err(),
            store.validated(NOW, &stale, &[]).err(),
            store.begin(&stale, 9, 9, &[]).err(),
            store.begin_again(&stale, &[(1, 1)]).err(),
            store.add_segment(&stale, BlobId::from_random(5)).err(),
            store.commit(&stale, &[line], 0).err(),
            store.begin_end(NOW, &stale, Cause::Expired).err(),
            store.end(NOW, &stale, no, no).err(),
        ];
        for refused in refused {
            assert!(matches!(refused, Some(JobError::StaleClaim)), "{refused:?}");
        }
        assert_eq!(store.claimed(&live).expect("its own"), before);
        // The same number with other random bits is another claim.
        let forged = Claim { seed: seed(3), ..live };
        assert!(matches!(store.renew(&forged, at(99)), Err(JobError::StaleClaim)));
        store.end_leases().expect("a start");
        assert!(store.claim(at(15), batch.id, seed(4), at(30)).expect("read").is_some());
    });
}

#[test]
fn store_names_open_tries_of_earlier_claims() {
    stores(|store| {
        let first = running(store, 1, 9);
        store.add_segment(&first, BlobId::from_random(900)).expect("added");
        store.begin(&first, 4, 100, &quotas()).expect("begun");
        store.begin_again(&first, &[(1, 1), (2, 1)]).expect("begun");
        store.begin_again(&first, &[(2, 2)]).expect("begun");
        store.commit(&first, &[answer(&first, 0, AnswerKind::Output, 0)], 10).expect("answered");
        let row = store.claimed(&first).expect("its own");
        let open = |claimed: &Claimed| -> Vec<_> {
            claimed.open.iter().map(|open| (open.line, open.request.clone())).collect()
        };
        store.end_leases().expect("a start");
        let second = claim(store, &row, 2);
        let of_first: Vec<_> = [(1, 1), (2, 2), (3, 0)]
            .map(|(line, number)| (line, first.request_id(line, number)))
            .into();
        assert_eq!(open(&second), of_first);
        assert_eq!(second.answered, [0]);
        // A takeover that dies leaves the marks, and its own tries come on top.
        store.begin(&second.claim, 2, 0, &quotas()).expect("begun");
        store.end_leases().expect("a start");
        let third = claim(store, &row, 3);
        let mut both = of_first;
        both.push((1, second.claim.request_id(1, 0)));
        assert_eq!(open(&third), both);
        store.capped(&third.claim).expect("noted");
        store.end_leases().expect("a start");
        assert_eq!(open(&claim(store, &row, 4)), []);
    });
}

#[test]
fn store_counts_barren_claims_until_an_answer() {
    stores(|store| {
        let mut last = running(store, 1, 9);
        store.add_segment(&last, BlobId::from_random(900)).expect("added");
        let row = store.claimed(&last).expect("its own");
        let mut next = |store: &mut dyn Store, sends: bool, expected: u32| {
            if sends {
                store.begin(&last, 4, 0, &[]).expect("begun");
            }
            store.end_leases().expect("a start");
            let claimed = claim(store, &row, 2);
            assert_eq!(claimed.barren, expected);
            last = claimed.claim;
            last
        };
        next(store, true, 1);
        next(store, false, 1);
        next(store, true, 2);
        let live = next(store, true, 3);
        store.commit(&live, &[answer(&live, 0, AnswerKind::Output, 0)], 0).expect("answered");
        next(store, true, 0);
        let live = next(store, true, 1);
        store.begin(&live, 4, 0, &[]).expect("begun");
        store.release(&live, TriesLeft::Open).expect("a drain");
        let after = claim(store, &row, 9);
        assert_eq!(after.barren, 0, "a drain is no death");
        assert!(!after.open.is_empty(), "its tries wait for their caps");
    });
}

#[test]
fn store_ends_a_batch_with_its_files() {
    stores(|store| {
        let claim = running(store, 1, 4);
        for id in [900, 901] {
            store.add_segment(&claim, BlobId::from_random(id)).expect("added");
        }
        store.begin(&claim, 4, 4_000, &quotas()).expect("begun");
        assert_eq!(used(store).results, 4 * ROOM_OF_A_LINE + 4_000);
        let answers = [
            answer(&claim, 2, AnswerKind::Output, 0),
            answer(&claim, 0, AnswerKind::Error, 0),
            answer(&claim, 1, AnswerKind::Output, 10),
        ];
        let row = store.commit(&claim, &answers, 3 * (ROOM_OF_A_LINE + 1_000)).expect("answered");
        assert_eq!((row.counts.completed, row.counts.failed), (2, 1));
        assert_eq!((row.usage.prompt_tokens, row.usage.reasoning_tokens), (9, 3));
        assert_eq!(used(store).results, ROOM_OF_A_LINE + 1_000 + 30);
        let twice = store.commit(&claim, &answers[..1], 0);
        assert!(matches!(twice, Err(JobError::Storage(_))), "a line is answered once: {twice:?}");
    });
    // The failure above closes a store in memory.
    stores(|store| {
        let claim = running(store, 1, 2);
        for id in [900, 901] {
            store.add_segment(&claim, BlobId::from_random(id)).expect("added");
        }
        let (output, error) = (FileId::from_random(50), FileId::from_random(51));
        store.begin_end(NOW, &claim, Cause::Done).expect("ending");
        let answers =
            [answer(&claim, 1, AnswerKind::Output, 0), answer(&claim, 0, AnswerKind::Output, 10)];
        store.commit(&claim, &answers, 0).expect("answered");
        let row = store.end(at(5), &claim, output, error).expect("ended");
        assert_eq!(row.state, BatchState::Ended(Cause::Done));
        assert_eq!((row.output, row.error), (Some(output), None));
        let (file, ranges) = store.ranges(at(6), &tenant("acme"), output).expect("there");
        // Adjacent answers are one range.
        assert_eq!(ranges, [BlobRange { blob: BlobId::from_random(900), offset: 0, length: 20 }]);
        assert_eq!((file.bytes, file.lines, file.purpose), (20, 2, Purpose::BatchOutput));
        assert_eq!(file.expires, at(5 + 7 * 86_400));
        assert_eq!(used(store), QuotaUse { stored: 90, results: 20, files: 2, ..<_>::default() });
        assert!(matches!(store.renew(&claim, at(99)), Err(JobError::StaleClaim)), "it has ended");
        // The unused segment goes with the next sweep, the results when they expire.
        assert_eq!(store.sweep(at(6)).expect("swept"), [Released(BlobId::from_random(901))]);
        let row = store.batch(&tenant("acme"), claim.batch).expect("kept");
        assert_eq!(row.times.ended, Some(at(5)));
        let mut released = store.sweep(at(8 * 86_400)).expect("swept");
        released.retain(|blob| *blob != Released(BlobId::from_random(901)));
        assert_eq!(released.len(), 2, "input and output");
        assert!(store.batch(&tenant("acme"), claim.batch).is_err(), "not kept any longer");
    });
}

#[test]
fn store_refuses_to_end_with_lines_unanswered() {
    stores(|store| {
        let claim = running(store, 1, 2);
        let id = FileId::from_random(50);
        assert!(store.end(NOW, &claim, id, id).is_err(), "no cause");
    });
    stores(|store| {
        let claim = running(store, 1, 2);
        let id = FileId::from_random(50);
        store.begin_end(NOW, &claim, Cause::Expired).expect("ending");
        assert!(store.end(NOW, &claim, id, id).is_err(), "two lines without an answer");
    });
}

#[test]
fn store_keeps_the_first_cause() {
    stores(|store| {
        let claim = running(store, 1, 2);
        let batch = claim.batch;
        let row = store.cancel(NOW, &tenant("acme"), batch).expect("cancelled");
        assert_eq!(row.state, BatchState::Ending(Cause::Cancelled(CancelReason::Asked)));
        let again = store.cancel(at(1), &tenant("acme"), batch).expect("a repeat");
        assert_eq!(again, row);
        assert_eq!(store.begin_end(NOW, &claim, Cause::Done).expect("too late").state, row.state);
        let done = running(store, 2, 2);
        store.begin_end(NOW, &done, Cause::Done).expect("done");
        let refused = store.cancel(NOW, &tenant("acme"), done.batch);
        assert!(matches!(refused, Err(JobError::BatchEnded)));
    });
}

#[test]
fn store_fails_a_batch_with_an_invalid_input() {
    stores(|store| {
        let batch = batch(store, 1, 7);
        let claim = claim(store, &batch, 1).claim;
        let error = InputError {
            code: "invalid_json_line".to_owned(),
            message: "It's \"no\" JSON.".to_owned(),
            param: None,
            line: Some(3),
        };
        let row = store.validated(NOW, &claim, std::slice::from_ref(&error)).expect("noted");
        assert_eq!(row.state, BatchState::Ended(Cause::Failed(FailureCode::InvalidInput)));
        assert_eq!((row.errors, row.counts.total), (vec![error], 0));
        assert_eq!(used(store), QuotaUse { stored: 90, files: 1, ..QuotaUse::default() });
    });
}

#[test]
fn store_lists_claimable_batches_tenants_in_turn() {
    stores(|store| {
        let mut rows = Vec::new();
        for (id, name, window) in
            [(1, "acme", 50), (2, "acme", 10), (3, "acme", 30), (4, "beta", 90), (5, "acme", 99)]
        {
            let new = upload(id, name, 10);
            store.reserve(&new, &[], ALL).expect("room");
            let input = store.finish(NOW, &new, &finished(10, 1), &quotas()).expect("finished").id;
            let window = Duration::from_secs(window);
            let new = NewBatch { tenant: tenant(name), window, ..batch_new(id, input) };
            rows.push(store.create_batch(NOW, &new, &quotas()).expect("created"));
        }
        store.cancel(NOW, &tenant("acme"), rows[4].id).expect("cancelled");
        let mut listed = |now, most| -> Vec<u128> {
            let rows = store.claimable(now, Most(most)).expect("read");
            rows.iter().map(|row| row.id.bits()).collect()
        };
        // The cancelled one has to be ended; then the first of each tenant.
        assert_eq!(listed(NOW, 99), [5, 2, 4, 3, 1]);
        assert_eq!(listed(NOW, 2), [5, 2]);
        assert_eq!(listed(at(40), 99), [2, 3, 5, 4, 1], "expired ones come first");
        claim(store, &rows[1], 1);
        let listed: Vec<u128> =
            store.claimable(NOW, Most(99)).expect("read").iter().map(|row| row.id.bits()).collect();
        assert_eq!(listed, [5, 3, 4, 1]);
    });
}

#[test]
fn store_figures_equal_a_recount() {
    stores(|store| {
        let claim = running(store, 1, 9);
        store.add_segment(&claim, BlobId::from_random(900)).expect("added");
        store.commit(&claim, &[answer(&claim, 0, AnswerKind::Output, 0)], 0).expect("answered");
        batch(store, 2, 5);
        let cancelled = batch(store, 3, 5);
        store.cancel(NOW, &tenant("acme"), cancelled.id).expect("cancelled");
        let figures = store.figures().expect("read");
        let used = used(store);
        assert_eq!(
            (figures.validating, figures.running, figures.ending, figures.ended),
            (1, 1, 1, 0)
        );
        assert_eq!(figures.lines, used.lines);
        assert_eq!(figures.stored, used.stored);
        assert_eq!(figures.results, used.results);
        assert_eq!(figures.oldest, Some(NOW));
    });
}

#[test]
fn store_clears_the_model_when_lines_differ() {
    stores(|store| {
        let claim = running(store, 1, 3);
        store.add_segment(&claim, BlobId::from_random(900)).expect("added");
        let mut models = Vec::new();
        for (line, model) in [(0, "a"), (1, "b"), (2, "a")] {
            let model = Some(ModelName::new(model).expect("a name"));
            let answer = Answer { model, ..answer(&claim, line, AnswerKind::Output, 10 * line) };
            let row = store.commit(&claim, &[answer], 0).expect("answered");
            models.push(row.model.map(|model| model.to_string()));
        }
        assert_eq!(models, [Some("a".to_owned()), None, None]);
        let key = store.claimed(&claim).expect("its own").key;
        assert_eq!(key, KeyId::new("key-1").expect("a name"));
    });
}

#[test]
fn store_survives_being_opened_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let open = || {
        let path = folder.path().join("jobs.db");
        SqlStore::open(path, std::sync::Arc::new(|_| Ok(()))).expect("opens")
    };
    let mut store = open();
    let claim = running(&mut store, 1, 2);
    let left = upload(7, "acme", 100);
    store.reserve(&left, &quotas(), ALL).expect("reserved");
    let before = store.claimed(&claim).expect("its own");
    drop(store);
    let mut store = open();
    assert_eq!(store.claimed(&claim).expect("its own"), before);
    let known = store.start().expect("started");
    assert_eq!(known, [BlobId::from_random(1)], "an unfinished upload is forgotten");
    assert_eq!(used(&mut store).uploads, 0);
}

#[test]
fn store_refuses_a_file_of_another_format() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("jobs.db");
    let open = || SqlStore::open(path.clone(), std::sync::Arc::new(|_| Ok(())));
    drop(open().expect("opens"));
    let connection = rusqlite::Connection::open(&path).expect("opens");
    connection.execute_batch("PRAGMA user_version = 9;").expect("written");
    let error = crate::error::with_causes(&open().err().expect("a newer format"));
    assert!(error.contains("format 9, this version reads format 3"), "{error}");
    // A database of another program, which has no format number.
    connection.execute_batch("PRAGMA user_version = 0;").expect("written");
    let error = crate::error::with_causes(&open().err().expect("a foreign file"));
    assert!(error.contains("format 0, this version reads format 3"), "{error}");
    drop(connection);
    std::fs::write(&path, [7; 5_000]).expect("written");
    let error = crate::error::with_causes(&open().err().expect("no database"));
    let unreadable = "file is not a database; restore the file from a backup";
    assert_eq!(error, format!("the store of jobs failed: {}: {unreadable}", path.display()));
}

#[test]
fn store_sums_costs_by_day_and_class() {
    stores(|store| {
        let claim = running(store, 1, 3);
        let mut answers: Vec<Answer> =
            (0..3).map(|line| answer(&claim, line, AnswerKind::Output, line * 10)).collect();
        answers[2].usage.cost = None;
        store.commit(&claim, &answers, 0).expect("answered");
        let row = |class: DeviceClass, reference: u64| SpentByBatches {
            tenant: tenant("acme"),
            class,
            reference: DeviceNanos(reference),
        };
        assert_eq!(store.spent(TODAY).expect("read"), [row(DeviceClass::cpu(), 14)]);
        assert_eq!(store.spent(UtcDay(TODAY.0 + 1)).expect("read"), []);
        // Another class and later days; the day before yesterday is forgotten.
        let claim = running(store, 2, 2);
        let gpu = DeviceClass::new("h200").expect("a name");
        for (line, days) in [(0, 1), (1, 2)] {
            let mut answer = answer(&claim, line, AnswerKind::Error, line * 10);
            let day = UtcDay(TODAY.0 + days);
            answer.usage.cost = Some(TryCost { day, class: gpu.clone(), reference: COST });
            store.commit(&claim, &[answer], 0).expect("answered");
            assert_eq!(store.spent(day).expect("read"), [row(gpu.clone(), 7)]);
        }
        assert_eq!(store.spent(TODAY).expect("read"), []);
    });
}

#[test]
fn store_brings_older_formats_up_to_date() {
    let second = "ALTER TABLE batches DROP COLUMN reasoning_tokens; PRAGMA user_version = 2;";
    let first = &format!("DROP TABLE spent; {second} PRAGMA user_version = 1;");
    for older in [first, second] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("jobs.db");
        let open = || SqlStore::open(path.clone(), std::sync::Arc::new(|_| Ok(()))).expect("opens");
        let claim = running(&mut open(), 1, 1);
        let database = rusqlite::Connection::open(&path).expect("opens");
        database.execute_batch(older).expect("an older format");
        drop(database);
        let mut store = open();
        let answer = answer(&claim, 0, AnswerKind::Output, 0);
        store.commit(&claim, &[answer], 0).expect("the batch is still there");
        assert_eq!(store.spent(TODAY).expect("read").len(), 1);
    }
}

/// Two gateways on one server: the second claims nothing that the first holds, and each counts
/// its own costs and forgets its own uploads.
#[test]
fn store_on_server_serves_two_gateways() {
    let Some(server) = TestServer::shared() else { return };
    let database = server.new_database();
    let [mut first, mut second] =
        ["first", "second"].map(|home| on_server(&server, &database, home));
    let held = running(&mut first, 1, 2);
    let lost = second.claim(NOW, held.batch, seed(9), at(15)).expect("no failure");
    assert!(lost.is_none(), "the lease of the first lives");
    first.commit(&held, &[answer(&held, 0, AnswerKind::Output, 0)], 0).expect("answered");
    let left = upload(7, "acme", 100);
    first.reserve(&left, &quotas(), ALL).expect("reserved");
    second.start().expect("started");
    assert!(first.is_upload(left.blob).expect("read"), "it is not of the second");
    let taken = second.claim(at(16), held.batch, seed(9), at(31)).expect("no failure");
    let taken = taken.expect("the lease is over").claim;
    let late = answer(&held, 1, AnswerKind::Output, 10);
    assert!(matches!(first.commit(&held, &[late], 0), Err(JobError::StaleClaim)));
    second.add_segment(&taken, BlobId::from_random(99)).expect("added");
    let mut mine = answer(&taken, 1, AnswerKind::Output, 10);
    mine.range.blob = BlobId::from_random(99);
    second.commit(&taken, &[mine], 0).expect("answered");
    for store in [&mut first, &mut second] {
        let spent = store.spent(TODAY).expect("read");
        assert_eq!(spent.iter().map(|row| row.reference).collect::<Vec<_>>(), [COST]);
    }
    first.start().expect("started");
    assert!(!first.is_upload(left.blob).expect("read"));
}

/// Transactions of several gateways at the same time admit no more than the quota.
#[test]
fn store_on_server_checks_quotas_of_parallel_uploads() {
    let Some(server) = TestServer::shared() else { return };
    let database = server.new_database();
    drop(on_server(&server, &database, "first"));
    let few = quotas_of("acme", Quotas { stored: 1_000, uploads: 1_000, ..Quotas::default() });
    let upload_all = |gateway: u128| {
        let mut store = on_server(&server, &database, &format!("gateway {gateway}"));
        let tries = (0..40).filter(|number| {
            let new = upload(gateway * 1_000 + number, "acme", 70);
            store.reserve(&new, &few, ALL).is_ok()
        });
        tries.count()
    };
    let made: usize = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (1..=4).map(|gateway| scope.spawn(move || upload_all(gateway))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
    });
    assert_eq!(made, 14, "14 uploads of 70 bytes fit into 1,000");
}

#[test]
fn store_on_server_adopts_own_rows_once() {
    let Some(server) = TestServer::shared() else { return };
    let mut own = SqlStore::in_memory().expect("memory");
    let held = running(&mut own, 1, 2);
    own.commit(&held, &[answer(&held, 0, AnswerKind::Output, 0)], 0).expect("answered");
    own.reserve(&upload(7, "acme", 100), &quotas(), ALL).expect("reserved");
    own.start().expect("started");
    let (before, cost) = (own.claimed(&held).expect("read"), own.spent(TODAY).expect("read"));
    let mut shared = on_server(&server, &server.new_database(), "first");
    assert!(shared.adopt(&mut own).expect("moved"));
    assert!(!shared.adopt(&mut own).expect("known"), "a second move writes nothing");
    assert_eq!(shared.claimed(&held).expect("the claim moves, too"), before);
    assert_eq!(shared.spent(TODAY).expect("read"), cost);
    assert_eq!(used(&mut shared).uploads, 0);
    let taken = shared.claim(NOW, held.batch, seed(9), at(15)).expect("no failure");
    let taken = taken.expect("no lease has moved");
    assert_eq!(taken.answered, [0]);
}
