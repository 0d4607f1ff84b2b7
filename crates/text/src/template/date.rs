//! The function `strftime_now`, by which a template prints the date.

use minijinja::{Error, ErrorKind};
use tollgate_domain::UtcTime;

/// Returns `format` filled in for `now`, in UTC and English.
pub(super) fn strftime(format: &str, now: UtcTime) -> Result<String, Error> {
    // The result is not counted against the memory allowance, so the format is bounded.
    if format.len() > 256 {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "strftime_now: the format is too long",
        ));
    }
    let (year, month, day) = now.day().civil();
    let seconds = now.unix_seconds() % 86_400;
    let (hour, minute, second) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
    // 1970-01-01 was a Thursday.
    let weekday = WEEKDAYS[(now.day().0 as usize + 4) % 7];
    let month_name = MONTHS[month as usize - 1];
    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(c) = characters.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match characters.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&format!("{:02}", year % 100)),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('B') => out.push_str(month_name),
            Some('b' | 'h') => out.push_str(&month_name[..3]),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('e') => out.push_str(&format!("{day:2}")),
            Some('A') => out.push_str(weekday),
            Some('a') => out.push_str(&weekday[..3]),
            Some('H') => out.push_str(&format!("{hour:02}")),
            Some('M') => out.push_str(&format!("{minute:02}")),
            Some('S') => out.push_str(&format!("{second:02}")),
            Some('F') => out.push_str(&now.day().to_string()),
            Some('T') => out.push_str(&format!("{hour:02}:{minute:02}:{second:02}")),
            Some('%') => out.push('%'),
            other => {
                let directive = other.map(String::from).unwrap_or_default();
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("strftime_now: %{directive} is not supported"),
                ));
            }
        }
    }
    Ok(out)
}

const WEEKDAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strftime_prints_utc_date() {
        let now = UtcTime(1_795_203_723 * 1_000_000_000); // 2026-11-20T19:42:03Z, a Friday
        for (format, expected) in [
            ("%d %b %Y", "20 Nov 2026"),
            ("%A, %B %e %y", "Friday, November 20 26"),
            ("%F %T %a 100%%", "2026-11-20 19:42:03 Fri 100%"),
            ("", ""),
        ] {
            assert_eq!(strftime(format, now).expect(format), expected);
        }
        assert!(strftime("%Q", now).is_err());
        assert!(strftime("%", now).is_err());
    }
}
