//! The page: host facts, promises, plots and the table of figures of each record.

use std::fmt::Write;

use anyhow::{Context, Result};

use super::{bars, figure, is_summary, plots};
use crate::record::Record;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:50em;margin:2em auto;\
padding:0 1em;color:#222}table{border-collapse:collapse;margin:1em 0}\
td,th{text-align:left;padding:.15em .8em .15em 0;border-bottom:1px solid #ddd}\
td.figure{text-align:right;font-variant-numeric:tabular-nums}.missed{color:#b02a37;font-weight:600}\
svg{max-width:100%;height:auto;margin:.5em 0}";

/// One self-contained HTML page about some records.
pub(crate) fn as_page(records: &[Record]) -> Result<String> {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <title>sandwire benchmarks</title><style>{STYLE}</style></head><body>\n\
         <h1>sandwire benchmarks</h1>\n"
    );
    for record in records {
        let _ = writeln!(page, "<h2>Suite {}</h2>", escaped(&record.suite));
        page.push_str(&host_table(record)?);
        page.push_str(&bars_table(record));
        for plot in plots::all(record)? {
            page.push_str(&plot);
        }
        page.push_str(&figures_table(record));
    }
    page.push_str("</body></html>\n");
    Ok(page)
}

fn host_table(record: &Record) -> Result<String> {
    let facts = serde_json::to_value(&record.host).context("cannot list the host's facts")?;
    let facts = facts.as_object().cloned().unwrap_or_default();
    let mut table = String::from("<table>\n");
    for (name, value) in facts {
        let value = value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned);
        let _ = writeln!(
            table,
            "<tr><th>{name}</th><td>{}</td></tr>",
            escaped(&value)
        );
    }
    for (name, value) in &record.settings {
        let _ = writeln!(table, "<tr><th>{}</th><td>{value}</td></tr>", escaped(name));
    }
    table.push_str("</table>\n");
    Ok(table)
}

fn bars_table(record: &Record) -> String {
    let mut table = String::from("<table>\n<tr><th>promise</th><th></th><th>measured</th></tr>\n");
    for verdict in bars::verdicts(record) {
        let class = if verdict.is_reached { "" } else { " missed" };
        let _ = writeln!(
            table,
            "<tr><td>{}</td><td>{}</td><td class=\"figure{class}\">{}</td></tr>",
            escaped(&verdict.what),
            verdict.bound,
            figure(verdict.value)
        );
    }
    for (ratio, note) in &record.notes {
        let _ = writeln!(
            table,
            "<tr><td>{}</td><td colspan=\"2\">{}</td></tr>",
            escaped(ratio),
            escaped(note)
        );
    }
    for (case, reason) in &record.not_run {
        let _ = writeln!(
            table,
            "<tr><td>{}</td><td>not run</td><td>{}</td></tr>",
            escaped(case),
            escaped(reason)
        );
    }
    table.push_str("</table>\n");
    table
}

fn figures_table(record: &Record) -> String {
    let mut table = String::from(
        "<table>\n<tr><th>case</th><th>metric</th><th>median</th><th>min</th><th>max</th><th>unit</th></tr>\n",
    );
    for row in record.rows.iter().filter(|row| is_summary(row)) {
        let _ = write!(
            table,
            "<tr><td>{}</td><td>{}</td>",
            escaped(&row.case),
            escaped(&row.metric)
        );
        for value in [row.median, row.min, row.max] {
            let _ = write!(table, "<td class=\"figure\">{}</td>", figure(value));
        }
        let _ = writeln!(table, "<td>{}</td></tr>", escaped(&row.unit));
    }
    table.push_str("</table>\n");
    table
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::{super::tests::sample_record, *};

    #[test]
    fn the_page_holds_host_promises_plots_and_figures() {
        let page = as_page(&[sample_record()]).unwrap();
        assert!(page.contains("A &lt;fast&gt; &amp; small one"));
        assert!(page.contains("<td>netns_fill_speedup</td><td>at least 20</td>"));
        assert_eq!(page.matches("<svg").count(), 3);
        assert_eq!(page.matches("figure missed").count(), 1);
    }
}
