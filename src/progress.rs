//! Lines that tell on a terminal that work goes on. Work of up to two seconds tells nothing.

use std::io::IsTerminal as _;
use std::time::Duration;

use tokio::time::{Instant, interval_at};

/// Does `work`. Tells on a terminal what takes time, from two seconds on.
pub async fn told<T>(what: &str, work: impl Future<Output = T>) -> T {
    let is_seen = std::io::stderr().is_terminal();
    told_by(what, work, |line| {
        if is_seen {
            // Standard error, so that standard output holds results alone.
            eprintln!("{line}");
        }
    })
    .await
}

#[expect(clippy::disallowed_methods, reason = "the line says how long the work has taken")]
async fn told_by<T>(what: &str, work: impl Future<Output = T>, tell: impl Fn(&str)) -> T {
    let began = Instant::now();
    let mut ticks = interval_at(began + FIRST, EVERY);
    tokio::pin!(work);
    loop {
        tokio::select! {
            done = &mut work => return done,
            _ = ticks.tick() => tell(&format!("{what}: {} s so far", began.elapsed().as_secs())),
        }
    }
}

/// The time from which on work is told of.
const FIRST: Duration = Duration::from_secs(2);
/// The time between two lines.
const EVERY: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn long_work_is_told_and_short_is_not() {
        for (seconds, expected) in [
            (1, &[][..]),
            (3, &["loading: 2 s so far"]),
            (8, &["loading: 2 s so far", "loading: 7 s so far"]),
        ] {
            let lines = RefCell::new(Vec::new());
            let work = tokio::time::sleep(Duration::from_secs(seconds));
            told_by("loading", work, |line| lines.borrow_mut().push(line.to_owned())).await;
            assert_eq!(*lines.borrow(), expected);
        }
    }
}
