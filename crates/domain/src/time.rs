//! Time as a parameter. Cores take a [`MonotonicTime`] for intervals and a
//! [`UtcTime`] for days and months; only the edges read clocks.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Nanoseconds on a clock that never goes back, from an origin that the
/// process chose. Good for intervals only.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct MonotonicTime(pub u64);

impl MonotonicTime {
    /// The time since `earlier`; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// This time and `span` more, saturating.
    pub fn after(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span.as_nanos().min(u128::from(u64::MAX)) as u64))
    }
}

/// Nanoseconds since 1970-01-01T00:00:00Z, leap seconds left out as Unix does.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct UtcTime(pub u64);

impl UtcTime {
    /// Whole seconds since the epoch.
    pub fn unix_seconds(self) -> u64 {
        self.0 / 1_000_000_000
    }

    /// The calendar day it falls on.
    pub fn day(self) -> UtcDay {
        UtcDay((self.unix_seconds() / 86_400) as u32)
    }
}

/// A calendar day in UTC, counted from 1970-01-01. Displays as `2026-11-20`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct UtcDay(pub u32);

/// A calendar month in UTC: `year * 12 + month - 1`. Displays as `2026-11`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct UtcMonth(pub u32);

impl UtcDay {
    /// Year, month 1 to 12, day 1 to 31, by the proleptic Gregorian calendar
    /// (Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms",
    /// `civil_from_days`).
    pub fn civil(self) -> (u32, u32, u32) {
        let shifted = self.0 + 719_468; // days from 0000-03-01
        let era = shifted / 146_097;
        let day_of_era = shifted % 146_097;
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
        let year = year_of_era + era * 400 + u32::from(month <= 2);
        (year, month, day)
    }

    /// The month it falls in.
    pub fn month(self) -> UtcMonth {
        let (year, month, _) = self.civil();
        UtcMonth(year * 12 + month - 1)
    }

    /// The instant at which the day begins.
    pub fn start(self) -> UtcTime {
        UtcTime(u64::from(self.0) * 86_400 * 1_000_000_000)
    }
}

impl fmt::Display for UtcDay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (year, month, day) = self.civil();
        write!(f, "{year:04}-{month:02}-{day:02}")
    }
}

/// A text that is no day of the form `2026-11-20`, from 1970 to 9999.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a day like 2026-11-20")]
pub struct InvalidDay;

/// The inverse of [`UtcDay::civil`] (Hinnant, `days_from_civil`).
impl FromStr for UtcDay {
    type Err = InvalidDay;

    fn from_str(text: &str) -> Result<Self, InvalidDay> {
        let part = |range: std::ops::Range<usize>| -> Option<u32> { text.get(range)?.parse().ok() };
        let (Some(year @ 1970..), Some(month @ 1..=12), Some(day @ 1..=31)) =
            (part(0..4), part(5..7), part(8..10))
        else {
            return Err(InvalidDay);
        };
        let shifted_year = year - u32::from(month <= 2);
        let era = shifted_year / 400;
        let year_of_era = shifted_year % 400;
        let shifted_month = (month + 9) % 12; // from March
        let day_of_year = (153 * shifted_month + 2) / 5 + day - 1;
        let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
        let found = Self(era * 146_097 + day_of_era - 719_468);
        // The 30th of February is another day by the time it is shown again.
        if found.to_string() == text { Ok(found) } else { Err(InvalidDay) }
    }
}

/// A text that is no month of the form `2026-11`, from 1970 to 9999.
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
    /// Its first day.
    pub fn first_day(self) -> UtcDay {
        // A month is made of a day or of a text that is one.
        format!("{self}-01").parse().unwrap_or_default()
    }

    /// Its last day.
    pub fn last_day(self) -> UtcDay {
        UtcDay(Self(self.0 + 1).first_day().0.saturating_sub(1))
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
    fn days_are_civil() {
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
    fn days_are_read_as_they_are_shown() {
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
        ] {
            assert_eq!(text.parse::<UtcDay>(), Err(InvalidDay), "{text:?}");
        }
    }

    #[test]
    fn months_are_read_as_shown() {
        for (text, first, last) in [
            ("1970-01", "1970-01-01", "1970-01-31"),
            ("2024-02", "2024-02-01", "2024-02-29"),
            ("2026-11", "2026-11-01", "2026-11-30"),
            ("2026-12", "2026-12-01", "2026-12-31"),
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
}
