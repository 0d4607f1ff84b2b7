//! Helpers that several subcommands share: paths of config and data, and the text
//! forms of durations and days.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Result, anyhow, bail};
use tollgate_config::{Config, ConfigErrors, Flags, Sources};
use tollgate_domain::{UtcDay, UtcTime};

/// The paths of the config and of the data folder.
#[derive(clap::Args, Clone)]
pub struct Place {
    /// A config file, or a folder of *.toml files.
    #[arg(long, value_name = "PATH")]
    pub config: Option<PathBuf>,
    /// The data folder [default: data].
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
}

impl Place {
    /// Loads the config like `up` does.
    ///
    /// # Errors
    /// Every mistake in it.
    pub fn load(&self) -> Result<Config> {
        load(self.config.clone(), self.flags())
    }

    /// Returns every value of the config with its source.
    ///
    /// # Errors
    /// Every mistake in it.
    pub fn show(&self) -> Result<String> {
        let sources = Sources::of_process(self.config.clone(), self.flags());
        Config::show(&sources).map_err(|errors| mistakes(&errors))
    }

    fn flags(&self) -> Flags {
        Flags { data: self.data.clone(), ..Flags::default() }
    }
}

/// Loads a config from `path`, the environment and `flags`.
///
/// # Errors
/// The config is invalid; each mistake has a line.
pub fn load(path: Option<PathBuf>, flags: Flags) -> Result<Config> {
    Config::load(&Sources::of_process(path, flags)).map_err(|errors| mistakes(&errors))
}

fn mistakes(errors: &ConfigErrors) -> anyhow::Error {
    match errors.problems() {
        [one] => anyhow!("{one}"),
        several => anyhow!("the config has {} mistakes:\n{errors}", several.len()),
    }
}

/// Returns the path of the demo tenant's key in the data folder, for commands that were given
/// no key.
///
/// # Errors
/// The file is not there: it exists only while no tenant is configured. `option` names a key.
pub fn demo_key(data: &Path, option: &str) -> Result<PathBuf> {
    let path = data.join("demo.key");
    if path.exists() {
        return Ok(path);
    }
    bail!(
        "no key is given, and there is no {}: `tollgate up` writes one while no tenant is \
         configured. Make a key with `tollgate keys create --tenant NAME --quiet > FILE` and name \
         it with {option}",
        path.display()
    )
}

/// Parses a duration such as `30d`, `2h` or `250ms`.
///
/// # Errors
/// The text is no duration.
pub fn span(text: &str) -> Result<Duration, String> {
    tollgate_config::parse_span(text)
        .ok_or_else(|| format!("{text:?} is not a duration such as 30d, 2h or 250ms"))
}

/// Returns the wall clock's time.
#[expect(clippy::disallowed_methods, reason = "subcommands read the date here")]
pub fn now() -> UtcTime {
    // A clock before 1970 is wrong, but no subcommand should fail for that.
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    UtcTime(since.as_nanos().min(u128::from(u64::MAX)) as u64)
}

/// Returns the UTC day such as `2026-11-20`, or `-`.
pub fn day(time: Option<UtcTime>) -> String {
    time.map_or_else(|| "-".to_owned(), |time| time.day().to_string())
}

/// Returns the UTC minute such as `2026-11-20 08:05`.
pub fn minute(time: UtcTime) -> String {
    let minutes = time.unix_seconds() / 60;
    format!("{} {:02}:{:02}", time.day(), minutes / 60 % 24, minutes % 60)
}

/// Returns the UTC second such as `2026-11-20 08:05:59`.
pub fn second(time: UtcTime) -> String {
    format!("{}:{:02}", minute(time), time.unix_seconds() % 60)
}

/// Parses a UTC day in the form that [`day`] shows.
///
/// # Errors
/// The text is no calendar day from 1970 on.
pub fn parse_day(text: &str) -> Result<UtcDay, String> {
    let wrong = || format!("{text:?} is not a day such as 2026-11-20");
    let year: u32 = text.get(..4).and_then(|year| year.parse().ok()).ok_or_else(wrong)?;
    // The number of a day lies in this range for its year; comparing the text finds
    // the day.
    let near = (u64::from(year.max(1970)) - 1970) * 365;
    let most = near + 366 + u64::from(year) / 4;
    (near as u32..=most as u32).map(UtcDay).find(|day| day.to_string() == text).ok_or_else(wrong)
}

/// Prints text to standard output and flushes it, so that an error cannot be lost.
///
/// # Errors
/// The terminal, pipe or file cannot be written.
pub fn say(text: impl AsRef<str>) -> Result<()> {
    let mut output = std::io::stdout().lock();
    output.write_all(text.as_ref().as_bytes())?;
    Ok(output.flush()?)
}

/// Returns the exit code of `result`. Prints an error and its causes on one
/// line to standard error.
pub fn exit(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of our output closed it early, like `head`: no failure.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            ExitCode::FAILURE
        }
    }
}

/// Prints an error and its causes on one line to standard error.
pub fn report(error: &anyhow::Error) {
    // One write: a worker shares standard error with the gateway, and `eprintln!` writes the
    // parts of a line one by one.
    let line = format!("tollgate: {error:#}\n");
    // Without standard error there is no place for a report.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let kind = error.root_cause().downcast_ref::<std::io::Error>().map(std::io::Error::kind);
    // An error with a context came from another pipe than standard output.
    error.chain().count() == 1 && kind == Some(std::io::ErrorKind::BrokenPipe)
}

/// Returns a table with aligned columns, [`WIDTH`] characters wide at most. Columns of numbers
/// are aligned to the right. Columns that do not fit follow below their row, each value with
/// its name; there empty values are left out.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        // A character of several bytes takes one column.
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([head[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let shown = columns_that_fit(&widths);
    // A day such as 2026-11-20 begins with a digit and is no number.
    let is_number =
        |cell: &str| cell.starts_with(|c: char| c.is_ascii_digit()) && !cell.contains('-');
    // A total leaves the cells of columns without a sum empty.
    let is_numeric = |column: usize| {
        let mut cells = rows.iter().map(|row| &row[column]).filter(|cell| !cell.is_empty());
        cells.clone().next().is_some() && cells.all(|cell| is_number(cell))
    };
    let numeric: Vec<bool> = (0..shown).map(is_numeric).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut line = String::new();
        for (column, cell) in cells.take(shown).enumerate() {
            let pad = " ".repeat(widths[column].saturating_sub(cell.chars().count()));
            let (before, after) = if numeric[column] { (&*pad, "") } else { ("", &*pad) };
            line.push_str(&format!("{before}{cell}{after}  "));
        }
        line.trim_end().to_owned() + "\n"
    };
    let mut text = line(&mut head.iter().copied());
    for row in rows {
        text += &line(&mut row.iter().map(String::as_str));
        let rest = head.iter().zip(row).skip(shown);
        text += &below(rest.filter(|(_, cell)| !matches!(cell.as_str(), "" | "-")));
    }
    text
}

/// Returns the number of leading columns of these widths that fit a line; at least one.
fn columns_that_fit(widths: &[usize]) -> usize {
    let mut used = 0;
    let fits = |width: &&usize| {
        used += *width + 2;
        // The gap after the last column is not printed.
        used <= WIDTH + 2
    };
    widths.iter().take_while(fits).count().max(1)
}

/// Returns values with their names on indented lines.
fn below<'a>(cells: impl Iterator<Item = (&'a &'a str, &'a String)>) -> String {
    let (mut text, mut line) = (String::new(), String::new());
    for (name, cell) in cells {
        let value = format!("{name} {cell}");
        // Four for the indent, two for the comma and its space.
        let is_full = 4 + line.chars().count() + 2 + value.chars().count() > WIDTH;
        if !line.is_empty() && is_full {
            text += &format!("    {line}\n");
            line.clear();
        }
        let comma = if line.is_empty() { "" } else { ", " };
        line += &format!("{comma}{value}");
    }
    if !line.is_empty() {
        text += &format!("    {line}\n");
    }
    text
}

/// Characters of a line of a table at most: a terminal has at least as many.
const WIDTH: usize = 80;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_round_trip() {
        for text in ["1970-01-01", "2000-02-29", "2026-11-20", "2026-12-31", "2100-03-01"] {
            assert_eq!(parse_day(text).expect(text).to_string(), text);
        }
        for text in ["", "2026", "2026-02-30", "2026-13-01", "1969-12-31", "20261120", "x"] {
            assert!(parse_day(text).is_err(), "{text}");
        }
    }

    #[test]
    fn table_aligns_numbers_right() {
        let rows =
            [vec!["acme".to_owned(), "7".to_owned()], vec!["b".to_owned(), "1200".to_owned()]];
        assert_eq!(
            table(&["tenant", "tokens"], &rows),
            "tenant  tokens\nacme         7\nb         1200\n"
        );
    }

    #[test]
    fn wide_table_shows_last_columns_below_rows() {
        let (name, label) = ("n".repeat(40), "l".repeat(45));
        let row = |cells: [&str; 5]| cells.map(str::to_owned).to_vec();
        let rows = [row([&name, "7", &label, "-", "2 s"]), row(["total", "12", "", "", ""])];
        assert_eq!(
            table(&["name", "tokens", "label", "expires", "time"], &rows),
            format!(
                "name{}  tokens\n{name}       7\n    label {label}, time 2 s\ntotal{}      12\n",
                " ".repeat(36),
                " ".repeat(35)
            )
        );
    }

    #[test]
    fn table_lines_fit_a_terminal() {
        for columns in 1..16 {
            let head: Vec<String> = (0..columns).map(|n| format!("column {n}")).collect();
            let head: Vec<&str> = head.iter().map(String::as_str).collect();
            let cells = |n: usize| (0..columns).map(|m| "x".repeat((n * 7 + m * 5) % 23)).collect();
            let rows: Vec<Vec<String>> = (0..5).map(cells).collect();
            for line in table(&head, &rows).lines() {
                assert!(line.chars().count() <= WIDTH, "{line}");
            }
        }
    }
}
