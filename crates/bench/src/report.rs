//! Reports from records: a table for a terminal, a page with plots for a browser.
//!
//! Made from records alone, so that a report can be remade anywhere, and of several machines.

mod bars;
mod page;
mod plots;

use std::fmt::Write;

use crate::record::{Record, Row};

pub(crate) use page::as_page;

/// The record as a table of rows, then what was promised and what was reached.
pub(crate) fn as_text(record: &Record) -> String {
    let mut lines = vec![["case", "metric", "median", "min", "max", "unit"].map(str::to_owned)];
    for row in record.rows.iter().filter(|row| is_summary(row)) {
        let [median, min, max] = [row.median, row.min, row.max].map(figure);
        lines.push([
            row.case.clone(),
            row.metric.clone(),
            median,
            min,
            max,
            row.unit.clone(),
        ]);
    }
    let mut text = aligned(&lines);
    text.push('\n');
    for (name, ratio) in &record.ratios {
        let _ = write!(text, "{name} {}", figure(*ratio));
        let note = record.notes.get(name).map(|note| format!(" ({note})"));
        let _ = writeln!(text, "{}", note.unwrap_or_default());
    }
    for (case, reason) in &record.not_run {
        let _ = writeln!(text, "not run: {case} ({reason})");
    }
    text.push('\n');
    for verdict in bars::verdicts(record) {
        let word = if verdict.is_reached {
            "reached"
        } else {
            "MISSED"
        };
        let _ = writeln!(
            text,
            "{word:<8} {} {}: {}",
            verdict.what,
            verdict.bound,
            figure(verdict.value)
        );
    }
    text
}

/// Whether a row is a figure by itself, rather than the raw samples behind others, a check that
/// found nothing, or a second opinion on a time.
fn is_summary(row: &Row) -> bool {
    let metric = row.metric.as_str();
    let is_raw = matches!(metric, "acquire_us" | "ready_at") || metric.ends_with("_samples");
    let is_opinion = ["_wall", "_checked"]
        .iter()
        .any(|end| metric.ends_with(end));
    let is_check = ["_wrong", "_missing", "_lost"]
        .iter()
        .any(|end| metric.ends_with(end));
    !is_raw && !is_opinion && (!is_check || row.max > 0.0)
}

/// A figure with three significant digits or all digits before the point.
fn figure(value: f64) -> String {
    match value.abs() {
        large if large >= 100.0 => format!("{value:.0}"),
        middle if middle >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn aligned<const COLUMNS: usize>(lines: &[[String; COLUMNS]]) -> String {
    let mut widths = [0; COLUMNS];
    for line in lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for line in lines {
        let cells = line.iter().zip(widths);
        let padded: Vec<String> = cells
            .map(|(cell, width)| format!("{cell:<width$}"))
            .collect();
        let _ = writeln!(text, "{}", padded.join("  ").trim_end());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostFacts;

    pub(super) fn sample_record() -> Record {
        let mut record = Record::new("slots", HostFacts::default(), [].into());
        record.host.cpu = "A <fast> & small one".to_owned();
        record.add("recipe", "fill_per_slot", "ms", &[66.0, 68.0, 71.0]);
        record.add("sandwire_v4", "fill_per_slot", "ms", &[2.0, 2.1, 2.2]);
        record.add("large_v4, round 1 of 1", "ready_at", "s", &[0.1, 0.2, 0.4]);
        record.add("acquire_at_rest", "acquire_p50_us", "us", &[150.0]);
        record.add("acquire_at_rest", "acquire_p99_us", "us", &[4000.0]);
        record.add(
            "acquire_at_rest",
            "acquire_us",
            "us",
            &[100.0, 150.0, 4000.0],
        );
        let fill = |case| (case, "fill_per_slot");
        record.add_ratio("netns_fill_speedup", fill("recipe"), fill("sandwire_v4"));
        record
    }

    #[test]
    fn the_text_tells_what_was_reached_and_what_was_missed() {
        let text = as_text(&sample_record());
        assert!(
            text.contains("reached  netns_fill_speedup at least 20: 32.4"),
            "{text}"
        );
        assert!(
            text.contains("MISSED   acquire_at_rest acquire_p99_us at most 2000: 4000"),
            "{text}"
        );
        assert!(
            !text.contains("ready_at"),
            "raw samples are for plots: {text}"
        );
    }

    #[test]
    fn figures_have_three_digits() {
        let figures = [1234.5, 68.04, 2.125, 0.83].map(figure);
        assert_eq!(figures, ["1234", "68.0", "2.12", "0.83"]);
    }
}
