//! The report as a self-contained web page: no script, no font, no network. It
//! supports light and dark mode, and every plot marks the attack.

use std::fmt::Write as _;

use crate::machine::Machine;
use crate::verdict::{
    Check, DrillReport, PhaseFigures, Quantile, Verdict, WorstShape, WorstShapes,
};

mod plot;
mod plots;

const STYLE: &str = include_str!("page/page.css");

/// Returns the page.
pub fn html(report: &DrillReport) -> String {
    let mut page = String::new();
    let title = escape(&report.scenario);
    // Writing into a `String` cannot fail.
    let _ = write!(
        page,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\">\
         <title>{title}: {verdict}</title><style>{STYLE}</style></head><body><main>",
        verdict = report.verdict.as_str(),
    );
    header(&mut page, report);
    checks(&mut page, report);
    section(&mut page, "Honest requests: time to first token", &plots::latency(report));
    honest(&mut page, report);
    section(&mut page, "Device time by tenant", &plots::shares(report));
    section(&mut page, "Outcomes of the attackers' requests", &plots::refusals(report));
    attackers(&mut page, report);
    worst_shapes(&mut page, report);
    section(&mut page, "Memory and descriptors of the gateway", &plots::resources(report));
    page.push_str("</main></body></html>\n");
    page
}

fn header(page: &mut String, report: &DrillReport) {
    let _ = write!(
        page,
        "<header><p class=\"kind\">attack drill</p><h1>{}</h1><p class=\"about\">{}</p>\
         <p class=\"verdict {}\">{}</p><p class=\"note\">{} UTC, {:.0} s alone, {:.0} s of attack, \
         {:.0} s after{}</p>",
        escape(&report.scenario),
        escape(&report.about),
        class(report.verdict),
        match report.verdict {
            Verdict::Holds => "Everything held",
            Verdict::Unclear => "Nothing was broken, but some checks are unclear",
            Verdict::Broken => "Something broke",
        },
        utc(report.started),
        report.alone.seconds(),
        report.attack.seconds(),
        report.after.seconds(),
        if report.generator_kept_up {
            ""
        } else {
            "; <b>requests were sent late</b>: this machine was too busy for exact figures"
        },
    );
    let Machine { version, processor, processors } = &report.machine;
    let _ = write!(
        page,
        "<p class=\"note\">tollgate {version}; load from a machine with {processors} processors, {}</p>",
        escape(processor)
    );
    for found in &report.capacity {
        let _ = write!(
            page,
            "<p class=\"note\">capacity: {:.1} requests/s, {:.0} tokens/s of <q>{}</q>, at most {} tokens</p>",
            found.requests_per_second,
            found.tokens_per_second,
            escape(&found.asks),
            found.max_tokens,
        );
    }
    page.push_str("</header>");
}

fn checks(page: &mut String, report: &DrillReport) {
    page.push_str("<section><h2>Expectations</h2><table><thead><tr><th></th><th>subject</th><th>expected</th><th>observed</th></tr></thead><tbody>");
    for Check { what, bound, observed, verdict } in &report.checks {
        let _ = write!(
            page,
            "<tr><td><span class=\"badge {}\">{}</span></td><td>{}</td><td>{}</td><td>{}</td></tr>",
            class(*verdict),
            verdict.as_str(),
            escape(what),
            escape(bound),
            escape(observed),
        );
    }
    page.push_str("</tbody></table></section>");
}

fn honest(page: &mut String, report: &DrillReport) {
    page.push_str(
        "<section><table class=\"numbers\"><thead><tr><th>tenant</th><th>phase</th><th>due</th>\
         <th>answered</th><th>first token p50</th><th>p99</th><th>between tokens p50</th><th>p99</th>\
         </tr></thead><tbody>",
    );
    let every = [("all".to_owned(), report.honest.clone())];
    let tenants = report.tenants.iter().map(|(name, phased)| (name.clone(), phased.clone()));
    for (name, phased) in every.into_iter().chain(tenants.take(12)) {
        let phases = [("alone", phased.alone), ("attack", phased.attack), ("after", phased.after)];
        for (phase, figures) in &phases {
            phase_row(page, &name, phase, figures);
        }
    }
    page.push_str(
        "</tbody></table><p class=\"note\">Tokens that arrive in one piece have next to no time \
         between them, so a median near 0 is usual.</p></section>",
    );
}

fn phase_row(page: &mut String, name: &str, phase: &str, figures: &PhaseFigures) {
    let PhaseFigures { due, answered, first_token, between_tokens, .. } = figures;
    let _ = write!(
        page,
        "<tr class=\"{phase}\"><td>{}</td><td>{phase}</td><td>{due}</td><td>{answered}</td>",
        escape(name)
    );
    for quantile in [first_token.p50, first_token.p99, between_tokens.p50, between_tokens.p99] {
        let few = if matches!(quantile, Quantile::TooFew(..)) { " class=\"few\"" } else { "" };
        let _ = write!(page, "<td{few}>{quantile}</td>");
    }
    page.push_str("</tr>");
}

fn attackers(page: &mut String, report: &DrillReport) {
    if report.attackers.is_empty() {
        return;
    }
    page.push_str("<section><table><thead><tr><th>attack</th><th>tenants</th><th>offered</th><th>first token p50</th><th>outcomes</th><th>connections closed</th></tr></thead><tbody>");
    for seen in &report.attackers {
        let rate = seen.offered_rate.map_or("-".to_owned(), |rate| format!("{rate:.1}/s"));
        let outcomes: Vec<String> =
            seen.outcomes.iter().map(|(what, count)| format!("{count} {what}")).collect();
        let closed = match seen.oldest_closed {
            Some(oldest) => format!("{}, the oldest after {oldest:.1} s", seen.closed),
            None => "-".to_owned(),
        };
        let first = match seen.first_token.count {
            0 => "-".to_owned(),
            _ => seen.first_token.p50.to_string(),
        };
        let cells = [&seen.kind, &seen.who, &rate, &first, &outcomes.join(", "), &closed];
        let cells: String = cells.iter().map(|cell| format!("<td>{}</td>", escape(cell))).collect();
        let _ = write!(page, "<tr>{cells}</tr>");
    }
    page.push_str("</tbody></table></section>");
}

fn worst_shapes(page: &mut String, report: &DrillReport) {
    for WorstShapes { by, shapes } in &report.worst_shapes {
        let _ = write!(
            page,
            "<section><h2>Worst shapes by {}</h2><table><thead><tr><th></th><th>number</th><th>shape</th></tr></thead><tbody>",
            escape(by)
        );
        for WorstShape { number, about, value } in shapes {
            let about = escape(about);
            let _ = write!(page, "<tr><td>{value:.1}</td><td>{number}</td><td>{about}</td></tr>");
        }
        page.push_str("</tbody></table></section>");
    }
}

fn section(page: &mut String, title: &str, body: &str) {
    let _ = write!(page, "<section><h2>{title}</h2>{body}</section>");
}

fn class(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Holds => "holds",
        Verdict::Unclear => "unclear",
        Verdict::Broken => "broken",
    }
}

/// Escapes text for use between tags and in attributes.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

/// Formats Unix seconds as `2026-11-20 21:20` (days to civil date: H. Hinnant,
/// "chrono-compatible low-level date algorithms").
fn utc(seconds: u64) -> String {
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02} {:02}:{:02}", of_day / 3_600, of_day / 60 % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn utc_formats_civil_dates() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00"),
            (951_782_399, "2000-02-28 23:59"),
            (951_782_400, "2000-02-29 00:00"),
            (1_795_219_200, "2026-11-21 00:00"),
        ] {
            assert_eq!(utc(seconds), text);
        }
    }

    #[test]
    fn escape_prevents_tags() {
        assert_eq!(escape("<script>'\"&"), "&lt;script&gt;&#39;&quot;&amp;");
    }
}
