//! The requests of a run as CSV (RFC 4180): one line for each request, for
//! spreadsheets and other programs.

use std::io::{self, Write};
use std::time::Duration;

use crate::outcome::{End, Outcome};
use crate::report::{NOT_SENT, Sample, TIMED_OUT};

const HEAD: &str = "due_ms,sent_ms,first_token_ms,end_ms,tenant,status,tokens,error";

/// Writes a line for each of `samples`. `tenants` has the names of the tenants in the order of
/// the load. Times are milliseconds from the start of the run. A cell is empty if the request
/// has no such value.
///
/// # Errors
/// The writer failed.
pub fn write(mut to: impl Write, tenants: &[String], samples: &[Sample]) -> io::Result<()> {
    writeln!(to, "{HEAD}")?;
    for Sample { due, outcome } in samples {
        let Outcome { tenant, end, late, first_token, whole, tokens, .. } = outcome;
        let ms = |since: Duration| format!("{:.3}", (*due + since).as_secs_f64() * 1e3);
        let [sent, first] = [late, first_token].map(|span| span.map(ms).unwrap_or_default());
        let (status, error) = status_and_error(end);
        let status = status.map(|status| status.to_string()).unwrap_or_default();
        let tenant = cell(&tenants[*tenant]);
        let (due, end, error) = (ms(Duration::ZERO), ms(*whole), cell(error));
        writeln!(to, "{due},{sent},{first},{end},{tenant},{status},{tokens},{error}")?;
    }
    to.flush()
}

/// Returns the HTTP status, if it is known, and the error code or the reason.
fn status_and_error(end: &End) -> (Option<u16>, &str) {
    match end {
        End::Done => (Some(200), ""),
        End::Refused { status, code } => (Some(*status), code),
        // Only an answer that has begun can break off.
        End::BrokenOff(code) => (Some(200), code),
        End::Error(kind) => (None, kind),
        End::TimedOut => (None, TIMED_OUT),
        End::NotSent => (None, NOT_SENT),
    }
}

/// Quotes text that has characters with a meaning in CSV.
fn cell(text: &str) -> String {
    match text.contains([',', '"', '\r', '\n']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_times_and_ends() {
        let ms = Duration::from_millis;
        let sent = |end, first: Option<u64>| Outcome {
            late: Some(ms(1)),
            first_token: first.map(ms),
            tokens: 4,
            ..Outcome::ended(0, end, ms(50))
        };
        let full = End::Refused { status: 429, code: "rate_limit_exceeded".to_owned() };
        let samples = [
            (0, sent(End::Done, Some(20))),
            (100, sent(End::Done, None)),
            (200, Outcome { late: Some(ms(1)), ..Outcome::ended(1, full, ms(2)) }),
            (300, sent(End::BrokenOff("server_error".to_owned()), Some(20))),
            (400, Outcome::ended(1, End::Error("connect failed"), ms(3))),
            (500, Outcome { late: Some(ms(1)), ..Outcome::ended(0, End::TimedOut, ms(9)) }),
            (600, Outcome::ended(0, End::NotSent, ms(0))),
        ]
        .map(|(due, outcome)| Sample { due: ms(due), outcome });
        let mut text = Vec::new();
        write(&mut text, &["acme".to_owned(), "a,\"b\"".to_owned()], &samples).expect("writes");
        let text = String::from_utf8(text).expect("text");
        let wanted = [
            HEAD,
            "0.000,1.000,20.000,50.000,acme,200,4,",
            "100.000,101.000,,150.000,acme,200,4,",
            "200.000,201.000,,202.000,\"a,\"\"b\"\"\",429,0,rate_limit_exceeded",
            "300.000,301.000,320.000,350.000,acme,200,4,server_error",
            "400.000,,,403.000,\"a,\"\"b\"\"\",,0,connect failed",
            "500.000,501.000,,509.000,acme,,0,timed out",
            "600.000,,,600.000,acme,,0,not sent: too many in flight",
        ];
        assert_eq!(text.lines().collect::<Vec<_>>(), wanted);
    }
}
