//! Time as a parameter. Cores take a [`MonotonicTime`] for intervals and a [`UtcTime`] for days and
//! months. Only the outermost code reads clocks.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use time::{Date, Month};

/// Nanoseconds on a clock that never goes back, counted from an origin that the process chose.
/// Useful for intervals only.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct MonotonicTime(pub u64);

impl MonotonicTime {
    /// Returns the time since `earlier`, or zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Returns the time `span` later, saturating.
    pub fn after(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span.as_nanos().min(u128::from(u64::MAX)) as u64))
    }
}

/// Nanoseconds since 1970-01-01T00:00:00Z, without leap seconds, as on Unix.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct UtcTime(pub u64);

impl UtcTime {
    /// Returns the whole seconds since the epoch.
    pub fn unix_seconds(self) -> u64 {
        self.0 / 1_000_000_000
    }

    /// Returns the calendar day of the instant.
    pub fn day(self) -> UtcDay {
        // 2^64 ns end in the year 2554, so the number of days fits.
        UtcDay((self.unix_seconds() / 86_400) as u32)
    }
}

/// A calendar day in UTC, counted from 1970-01-01. The text form is `2026-11-20`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct UtcDay(pub u32);

/// A calendar month in UTC: `year * 12 + month - 1`. The text form is `2026-11`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct UtcMonth(pub u32);

impl UtcDay {
    /// Returns the year, the month 1 to 12 and the day 1 to 31 in the Gregorian calendar. Days after
    /// 9999-12-31 give that day.
    pub fn civil(self) -> (u32, u32, u32) {
        let date = self.date();
        (date.year().unsigned_abs(), u8::from(date.month()).into(), date.day().into())
    }

    /// Returns the month of the day.
    pub fn month(self) -> UtcMonth {
        let (year, month, _) = self.civil();
        UtcMonth(year * 12 + month - 1)
    }

    /// Returns the first day of the day's month.
    pub fn first_of_month(self) -> Self {
        let (_, _, of_month) = self.civil();
        // Days of a month count from 1.
        Self(self.0.saturating_sub(of_month.saturating_sub(1)))
    }

    /// Returns the instant at which the day begins.
    pub fn start(self) -> UtcTime {
        UtcTime(u64::from(self.0) * 86_400 * 1_000_000_000)
    }

    fn date(self) -> Date {
        let julian = i32::try_from(self.0).ok().and_then(|days| days.checked_add(EPOCH_JULIAN_DAY));
        julian.and_then(|day| Date::from_julian_day(day).ok()).unwrap_or(Date::MAX)
    }

    /// Returns the day of a date, or `None` for a date before 1970.
    fn from_date(date: Date) -> Option<Self> {
        u32::try_from(date.to_julian_day() - EPOCH_JULIAN_DAY).ok().map(Self)
    }
}

/// Julian day number of 1970-01-01.
const EPOCH_JULIAN_DAY: i32 = 2_440_588;

impl fmt::Display for UtcDay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (year, month, day) = self.civil();
        write!(f, "{year:04}-{month:02}-{day:02}")
    }
}

/// A text that is not a day of the form `2026-11-20` from 1970 to 9999.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a day like 2026-11-20")]
pub struct InvalidDay;

impl FromStr for UtcDay {
    type Err = InvalidDay;

    fn from_str(text: &str) -> Result<Self, InvalidDay> {
        let part = |range: std::ops::Range<usize>| -> Option<u16> { text.get(range)?.parse().ok() };
        let date = || -> Option<Date> {
            let month = Month::try_from(u8::try_from(part(5..7)?).ok()?).ok()?;
            let day = u8::try_from(part(8..10)?).ok()?;
            Date::from_calendar_date(part(0..4)?.into(), month, day).ok()
        };
        let found = date().and_then(Self::from_date).ok_or(InvalidDay)?;
        // Numbers are also read from forms such as `+026` or `2026/11/20`. Only the form that
        // `Display` writes is valid.
        if found.to_string() == text { Ok(found) } else { Err(InvalidDay) }
    }
}

/// A text that is not a month of the form `2026-11` from 1970 to 9999.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a month like 2026-11")]
pub struct InvalidMonth;

impl FromStr for UtcMonth {
    type Err = InvalidMonth;

    fn from_str(text: &str) -> Result<Self, InvalidMonth> {
        let first: UtcDay = format!("{text}-01").parse().map_err(|_| InvalidMonth)?;
        Ok(first.month())
    }
}

impl UtcMonth {
    /// Returns the first day of the month. A month outside 1970 to 9999 gives the first day of all.
    pub fn first_day(self) -> UtcDay {
        self.day(|_| 1)
    }

    /// Returns the last day of the month. A month outside 1970 to 9999 gives the first day of all.
    pub fn last_day(self) -> UtcDay {
        self.day(|(month, year)| month.length(year))
    }

    fn day(self, day_of: impl Fn((Month, i32)) -> u8) -> UtcDay {
        let date = || -> Option<Date> {
            let year = i32::try_from(self.0 / 12).ok()?;
            let month = Month::try_from((self.0 % 12 + 1) as u8).ok()?; // at most 12
            Date::from_calendar_date(year, month, day_of((month, year))).ok()
        };
        // Months come from days or from checked texts, so the default is never needed there.
        date().and_then(UtcDay::from_date).unwrap_or_default()
    }
}

impl fmt::Display for UtcMonth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}", self.0 / 12, self.0 % 12 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instants_fall_on_civil_days() {
        for (seconds, day, month) in [
            (0, "1970-01-01", "1970-01"),
            (951_782_399, "2000-02-28", "2000-02"),
            (951_782_400, "2000-02-29", "2000-02"),
            (1_798_675_200, "2026-12-31", "2026-12"),
            (1_798_761_600, "2027-01-01", "2027-01"),
            (4_107_542_400, "2100-03-01", "2100-03"),
        ] {
            let instant = UtcTime(seconds * 1_000_000_000);
            assert_eq!(instant.day().to_string(), day);
            assert_eq!(instant.day().month().to_string(), month);
            assert!(instant.day().start() <= instant);
            assert_eq!(day.parse(), Ok(instant.day()));
        }
    }

    #[test]
    fn days_survive_their_text_form() {
        for day in (0..200_000).step_by(13).map(UtcDay) {
            assert_eq!(day.to_string().parse(), Ok(day));
        }
        for text in [
            "",
            "2026-02-30",
            "2026-13-01",
            "1969-12-31",
            "2026-1-01",
            "2026-11-20 ",
            "2026/11/20",
            "+026-11-20",
            "10000-01-01",
        ] {
            assert_eq!(text.parse::<UtcDay>(), Err(InvalidDay), "{text:?}");
        }
    }

    #[test]
    fn months_survive_their_text_form() {
        for (text, first, last) in [
            ("1970-01", "1970-01-01", "1970-01-31"),
            ("2024-02", "2024-02-01", "2024-02-29"),
            ("2026-11", "2026-11-01", "2026-11-30"),
            ("2026-12", "2026-12-01", "2026-12-31"),
            ("9999-12", "9999-12-01", "9999-12-31"),
        ] {
            let month: UtcMonth = text.parse().expect(text);
            assert_eq!(month.to_string(), text);
            assert_eq!(month.first_day().to_string(), first);
            assert_eq!(month.last_day().to_string(), last);
        }
        for text in ["", "2026", "2026-13", "2026-00", "2026-1", "2026-11-01", "1969-12"] {
            assert_eq!(text.parse::<UtcMonth>(), Err(InvalidMonth), "{text:?}");
        }
    }

    #[test]
    fn days_beyond_the_calendar_saturate() {
        assert_eq!(UtcDay(u32::MAX).to_string(), "9999-12-31");
        assert_eq!(UtcMonth(u32::MAX).first_day(), UtcDay(0));
    }
}
