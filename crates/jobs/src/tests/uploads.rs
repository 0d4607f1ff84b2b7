//! Uploads and downloads over the simulated disk: reservations, limits, deaths.

use std::time::Duration;

use super::chance::Chance;
use super::disk::Moment;
use super::world::{Process, World, input, new_batch, quotas_of, tenant};
use crate::batch::{BatchState, Cause, FailureCode};
use crate::{
    FileId, FilePage, JobError, NewUpload, Order, QuotaScope, Quotas, ScopedQuotas, Store, Upload,
};

fn new_upload(declared: Option<u64>, quotas: Vec<ScopedQuotas>) -> NewUpload {
    NewUpload { id: None, tenant: tenant("acme"), pool: None, declared, quotas }
}

async fn begin(
    process: &Process,
    declared: Option<u64>,
    quotas: Quotas,
) -> Result<Upload, JobError> {
    process.jobs.upload(new_upload(declared, quotas_of("acme", quotas))).await
}

async fn stored(process: &Process) -> (u64, u64) {
    let scope = QuotaScope::Tenant(tenant("acme"));
    let used = process.jobs.quota_use(scope).await.expect("memory");
    (used.stored, used.uploads)
}

async fn read(process: &Process, id: FileId) -> Result<Vec<u8>, JobError> {
    let mut content = process.jobs.read(tenant("acme"), id).await?;
    let mut bytes = Vec::new();
    while let Some(part) = content.next().await? {
        bytes.extend(part);
    }
    Ok(bytes)
}

#[tokio::test(start_paused = true)]
async fn upload_is_whole_after_power_cuts() {
    let mut finished = 0;
    for seed in 0..200 {
        let world = World::new(seed);
        let mut chance = Chance::new(seed);
        let process = world.start();
        process.fuse.dies_at(1 + seed % 12, Moment::After);
        let mut row = None;
        if let Ok(mut upload) = begin(&process, Some(100), Quotas::default()).await
            && upload.write(vec![b'a'; 90]).await.is_ok()
        {
            row = upload.finish("in".to_owned(), None).await.ok();
        }
        drop(process);
        world.disk.cut_power(&mut chance);
        let process = world.start();
        if let Some(row) = row {
            finished += 1;
            assert_eq!(read(&process, row.id).await.expect("whole"), vec![b'a'; 90]);
        }
        let page = FilePage { after: None, limit: 9, order: Order::Ascending, purpose: None };
        let rows = process.jobs.files(tenant("acme"), page).await.expect("memory").rows;
        for row in &rows {
            assert_eq!(read(&process, row.id).await.expect("whole").len(), 90);
        }
        // Bytes on disk, rows and the quota agree.
        assert_eq!(world.disk.sums(), (rows.len(), 90 * rows.len() as u64), "seed {seed}");
        assert_eq!(stored(&process).await, (90 * rows.len() as u64, 0));
    }
    assert!((20..180).contains(&finished), "{finished} of 200 were finished");
}

#[tokio::test(start_paused = true)]
async fn upload_that_is_dropped_gives_its_bytes_back() {
    let world = World::new(1);
    let process = world.start();
    let mut upload = begin(&process, None, Quotas::default()).await.expect("begins");
    upload.write(vec![b'a'; 5_000]).await.expect("written");
    assert_eq!(stored(&process).await, (8 << 20, 1), "one step is reserved");
    drop(upload);
    assert_eq!((stored(&process).await, world.disk.sums()), ((0, 0), (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn upload_of_a_failing_store_is_swept() {
    let world = World::new(1);
    let process = world.start();
    let upload = begin(&process, Some(100), Quotas::default()).await.expect("begins");
    world.fail_store(100);
    drop(upload);
    process.jobs.sweep().await.expect_err("the store still fails");
    world.fail_store(0);
    assert_eq!(stored(&process).await, (100, 1));
    process.jobs.sweep().await.expect("sweeps");
    assert_eq!((stored(&process).await, world.disk.sums()), ((0, 0), (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn upload_has_one_outcome_after_failed_commits() {
    let (mut made, mut refused) = (0, 0);
    for seed in 0..40 {
        let world = World::new(seed);
        let process = world.start();
        let mut upload = begin(&process, Some(100), Quotas::default()).await.expect("begins");
        upload.write(b"a\n".to_vec()).await.expect("written");
        world.fail_store(60);
        let finished = upload.finish("in".to_owned(), None).await;
        world.fail_store(0);
        process.jobs.sweep().await.expect("sweeps");
        match finished {
            Ok(row) => {
                made += 1;
                assert_eq!(read(&process, row.id).await.expect("there"), b"a\n");
            }
            // The file may exist all the same; then the row, the bytes and the quota do.
            Err(_) => refused += 1,
        }
        let (files, bytes) = world.disk.sums();
        assert_eq!(stored(&process).await, (2 * files as u64, 0));
        assert_eq!(bytes, 2 * files as u64);
    }
    assert!(made > 5 && refused > 5, "{made} made, {refused} refused");
}

/// Two requests with one `Idempotency-Key` ask for the same id.
#[tokio::test(start_paused = true)]
async fn upload_returns_earlier_file_of_same_id() {
    let world = World::new(1);
    let process = world.start();
    let upload = async |bytes: &[u8]| {
        let id = Some(FileId::from_random(7));
        let new = new_upload(Some(100), quotas_of("acme", Quotas::default()));
        let mut upload = process.jobs.upload(NewUpload { id, ..new }).await.expect("begins");
        upload.write(bytes.to_vec()).await.expect("written");
        upload
    };
    let [first, same, other] = [upload(b"a\n").await, upload(b"a\n").await, upload(b"b\n").await];
    let made = first.finish("in".to_owned(), None).await.expect("made");
    assert_eq!(same.finish("in".to_owned(), None).await.expect("found"), made);
    let refused = other.finish("in".to_owned(), None).await;
    assert!(matches!(refused, Err(JobError::FileExists(_))), "{refused:?}");
    assert_eq!((stored(&process).await, world.disk.sums()), ((2, 0), (1, 2)));
}

#[tokio::test(start_paused = true)]
async fn upload_beyond_a_limit_is_refused() {
    let world = World::new(1);
    let process = world.start();
    let limits = process.jobs.limits();
    let message = |error: JobError| error.to_string();
    let refused = begin(&process, Some(limits.file * 2), Quotas::default()).await.err();
    assert_eq!(message(refused.expect("too large")), "The file has more than 209715200 bytes.");
    let plenty = || Quotas { stored: 1 << 40, ..Quotas::default() };
    for (part, count, expected) in [
        (vec![b'a'; 1 << 16], 17, "A line of the file has more than 1048576 bytes."),
        (b"a\n".repeat(10_000), 6, "The file has more than 50000 lines."),
        (
            [vec![b'a'; (1 << 20) - 1], b"\n".to_vec()].concat(),
            201,
            "The file has more than 209715200 bytes.",
        ),
    ] {
        let mut upload = begin(&process, None, plenty()).await.expect("begins");
        let mut refused = None;
        for _ in 0..count {
            assert!(refused.is_none());
            refused = upload.write(part.clone()).await.err();
        }
        assert_eq!(message(refused.expect("too large")), expected);
        assert!(upload.finish("in".to_owned(), None).await.is_err(), "it cannot go on");
    }
    world.disk.set_free(Some(10_000));
    let refused = begin(&process, Some(9_001), Quotas::default()).await.err();
    assert!(matches!(refused, Some(JobError::NoSpace)));
    begin(&process, Some(9_000), Quotas::default()).await.expect("the spare bytes stay free");
    assert_eq!((stored(&process).await, world.disk.sums()), ((0, 0), (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn deleted_file_keeps_its_bytes_for_readers() {
    let world = World::new(1);
    let process = world.start();
    let row = process.upload("acme", &"aaaaaaaaa\n".repeat(20_000)).await;
    let mut first = process.jobs.read(tenant("acme"), row.id).await.expect("there");
    let second = process.jobs.read(tenant("acme"), row.id).await.expect("there");
    first.next().await.expect("reads");
    process.jobs.delete_file(tenant("acme"), row.id).await.expect("deleted");
    assert!(process.jobs.read(tenant("acme"), row.id).await.is_err());
    drop(second);
    process.jobs.sweep().await.expect("sweeps");
    assert_eq!(stored(&process).await.0, 200_000, "a reader is left");
    assert!(first.next().await.expect("reads").is_some());
    drop(first);
    assert_eq!((stored(&process).await, world.disk.sums()), ((0, 0), (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn changed_bytes_are_never_served_as_whole() {
    let world = World::new(1);
    let process = world.start();
    let row = process.upload("acme", &input(5, |_| "")).await;
    let quotas = quotas_of("acme", Quotas::default());
    let batch = process.jobs.create_batch(new_batch("acme", row.id), quotas).await.expect("made");
    world.disk.damage();
    assert!(matches!(read(&process, row.id).await, Err(JobError::Damaged)));
    let stop = tokio_util::sync::CancellationToken::new();
    tokio::select! {
        () = process.dispatcher(crate::DispatchOptions::default()).run(stop) => {}
        () = tokio::time::sleep(Duration::from_secs(10)) => {}
    }
    let row = process.row(&batch).await;
    assert_eq!(row.state, BatchState::Ended(Cause::Failed(FailureCode::Internal)));
    assert_eq!(world.workers.spent(), 0);
}

/// Returns about `bytes` bytes of long lines.
fn lines(bytes: u64) -> Vec<u8> {
    let line = [vec![b'a'; 99_999], b"\n".to_vec()].concat();
    line.repeat(bytes.div_ceil(100_000) as usize)
}

/// Uploads of one tenant in parallel, in an order that follows from a seed. Returns the
/// most bytes that were on the disk.
async fn play_uploads(seed: u64, quotas: &Quotas) -> u64 {
    let world = World::new(seed);
    let process = world.start();
    let mut chance = Chance::new(seed);
    let mut uploads: Vec<(Upload, u64)> = Vec::new();
    let mut most = 0;
    for _ in 0..90 {
        match chance.below(4) {
            0 => {
                // The declared length may be true, too small, or absent.
                let size = 1 + chance.below(6_000_000);
                let declared = [Some(size), Some(1), None][chance.below(3) as usize];
                if let Ok(upload) = begin(&process, declared, quotas.clone()).await {
                    uploads.push((upload, size));
                }
            }
            1 if !uploads.is_empty() => {
                let at = chance.below(uploads.len() as u64) as usize;
                let (upload, left) = uploads.remove(at);
                if left == 0 {
                    let _ = upload.finish("in".to_owned(), None).await;
                }
            }
            _ if !uploads.is_empty() => {
                let at = chance.below(uploads.len() as u64) as usize;
                let (mut upload, left) = uploads.remove(at);
                let part = left.min(1_500_000);
                if upload.write(b"a\n".to_vec()).await.is_ok()
                    && upload.write(lines(part)).await.is_ok()
                {
                    uploads.push((upload, left - part));
                }
            }
            _ => {}
        }
        most = most.max(world.disk.sums().1);
    }
    most
}

/// J04.
#[tokio::test(start_paused = true)]
async fn parallel_uploads_never_exceed_their_quota() {
    check_parallel_uploads(20).await;
}

#[tokio::test(start_paused = true)]
#[ignore = "long: a thousand plays of uploads"]
async fn parallel_uploads_never_exceed_in_many_plays() {
    check_parallel_uploads(1_000).await;
}

async fn check_parallel_uploads(seeds: u64) {
    let quota = 12 << 20;
    let (mut closest, mut control) = (0, 0);
    for seed in 0..seeds {
        let quotas = Quotas { stored: quota, ..Quotas::default() };
        let most = play_uploads(seed, &quotas).await;
        assert!(most <= quota, "{most} bytes with seed {seed}");
        closest = closest.max(most);
        if seed < 20 {
            // Control: the same uploads without a reservation.
            let quotas = Quotas { stored: u64::MAX / 2, uploads: 99, ..Quotas::default() };
            control = control.max(play_uploads(seed, &quotas).await);
        }
    }
    assert!(closest > quota / 3 && control > quota, "{closest} and {control} bytes");
}

/// J07.
fn check_guessed_ids(guesses: u64) {
    let world = World::new(7);
    let mut chance = Chance::new(7);
    let mut store = world.store();
    let now = tollgate_domain::UtcTime(1);
    let own = super::suite::some_file(&mut *store);
    let foreign = tenant("beta");
    for _ in 0..guesses {
        let bits = u128::from(chance.next()) << 64 | u128::from(chance.next());
        // Guesses near a known id find no more than any others.
        let id = match chance.below(3) {
            0 => own,
            1 => FileId::from_random(own.bits() ^ (1 << chance.below(128))),
            _ => FileId::from_random(bits),
        };
        assert!(matches!(store.ranges(now, &foreign, id), Err(JobError::NoSuchFile)));
        assert!(matches!(store.delete_file(now, &foreign, id), Err(JobError::NoSuchFile)));
    }
    assert!(store.ranges(now, &tenant("acme"), own).is_ok());
}

#[tokio::test(start_paused = true)]
async fn guessed_ids_find_nothing() {
    check_guessed_ids(10_000);
}

#[tokio::test(start_paused = true)]
#[ignore = "long: a million guesses"]
async fn million_guessed_ids_find_nothing() {
    check_guessed_ids(500_000);
}

/// J08.
#[tokio::test(start_paused = true)]
async fn results_that_are_never_fetched_go() {
    let world = World::new(1);
    let process = world.start();
    let mut batches = Vec::new();
    let kept = || {
        let kept = Duration::from_secs(3_600);
        quotas_of("acme", Quotas { kept, ..Quotas::default() })
    };
    for _ in 0..5 {
        let mut upload = process.jobs.upload(new_upload(None, kept())).await.expect("begins");
        upload.write(input(50, |_| "").into_bytes()).await.expect("written");
        let file = upload.finish("in".to_owned(), None).await.expect("finished");
        let new = new_batch("acme", file.id);
        batches.push(process.jobs.create_batch(new, kept()).await.expect("created"));
    }
    let stop = tokio_util::sync::CancellationToken::new();
    let minutes = |minutes: u64| tokio::time::sleep(Duration::from_secs(minutes * 60));
    let check = async {
        minutes(55).await;
        assert!(world.disk.sums().1 > 0);
        for batch in &batches {
            process.check(batch).await;
        }
        minutes(10).await;
    };
    tokio::select! {
        () = process.dispatcher(crate::DispatchOptions::default()).run(stop) => {}
        () = check => {}
    }
    assert_eq!(world.disk.sums(), (0, 0));
    let scope = QuotaScope::Tenant(tenant("acme"));
    let used = process.jobs.quota_use(scope).await.expect("memory");
    assert_eq!(used, crate::quota::QuotaUse::default());
    for batch in &batches {
        assert!(process.jobs.batch(tenant("acme"), batch.id).await.is_err());
    }
}

#[tokio::test]
async fn jobs_on_the_host_survive_a_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let open = || {
        let options = crate::JobsOptions {
            place: crate::JobsPlace::Own {
                folder: folder.path().to_owned(),
                before_open: std::sync::Arc::new(|_| Ok(())),
            },
            limits: crate::JobLimits { spare: 0, ..crate::JobLimits::default() },
            utc: std::sync::Arc::new(|| tollgate_domain::UtcTime(1_000_000_000)),
        };
        crate::Jobs::open(options).expect("opens")
    };
    let jobs = open();
    let quotas = quotas_of("acme", Quotas::default());
    let mut upload = jobs.upload(new_upload(None, quotas.clone())).await.expect("begins");
    upload.write(b"a\nb\n".to_vec()).await.expect("written");
    let row = upload.finish("../../etc/passwd".to_owned(), None).await.expect("finished");
    let left = jobs.upload(new_upload(None, quotas)).await.expect("begins");
    // A kill: no destructor runs.
    std::mem::forget(left);
    drop(jobs);
    let jobs = open();
    assert_eq!(jobs.file(tenant("acme"), row.id).await.expect("there"), row);
    assert_eq!((row.lines, row.bytes), (2, 4));
    let names: Vec<_> = std::fs::read_dir(folder.path().join("blobs")).expect("a folder").collect();
    assert_eq!(names.len(), 1, "no name of the client's, no unfinished upload");
}
