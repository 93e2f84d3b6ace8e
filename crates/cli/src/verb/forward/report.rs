//! What a forwarder has done, each second and at its end: as engines of its kind write it, or as JSON.

use std::{
    sync::mpsc::{self, Receiver, SyncSender},
    thread,
    time::Duration,
};

use sandwire_api::impairment::LineReport;
use sandwire_engine::{AppReport, Figure, LinkReport, Load};
use sandwire_impair_host::forward::{Ended, Forwarder, Report};
use serde_json::{Map, Value, json};

use crate::{failure::Failure, output::Output};

/// Writes reports beside the engine, which must not wait for whoever reads them.
pub(super) struct Printer {
    output: Output,
    reports: SyncSender<String>,
    /// Is told how the writing ended, when no more reports come.
    ended: Receiver<Result<(), Failure>>,
}

/// Reports that wait for a reader; further ones are left out.
const WAITING_MAX: usize = 8;
/// How long the last report may take to be read.
const PATIENCE: Duration = Duration::from_secs(2);

impl Printer {
    /// Starts the thread that writes.
    pub(super) fn start(output: Output) -> Self {
        let (reports, waiting) = mpsc::sync_channel::<String>(WAITING_MAX);
        let (end, ended) = mpsc::channel();
        thread::spawn(move || {
            let written = waiting
                .iter()
                .try_for_each(|text| output.write(&text).map(drop));
            // Nobody listens any more after `PATIENCE`.
            let _ = end.send(written);
        });
        Self {
            output,
            reports,
            ended,
        }
    }

    /// Says what was done since the last time.
    pub(super) fn report(&self, forwarder: &mut Forwarder) {
        let report = forwarder.report();
        let text = if self.output.json {
            line(&json!({ "report": document(&report) }))
        } else {
            text_of(&report)
        };
        // A reader that doesn't keep up misses some.
        let _ = self.reports.try_send(text);
    }

    /// Says the sums, and what became of packets that were under way; waits until all is written.
    pub(super) fn end(self, forwarder: &mut Forwarder, ended: Ended) -> Result<(), Failure> {
        let report = forwarder.report();
        let text = if self.output.json {
            let ended = json!({ "released": ended.released, "flushed": ended.flushed });
            line(&json!({ "report": document(&report), "ended": ended }))
        } else {
            let Ended { released, flushed } = ended;
            format!(
                "{}ended: {released} packets under way were released, {flushed} dropped\n",
                text_of(&report)
            )
        };
        let unread = || Failure::failed("nobody reads standard output: the last report is lost");
        let is_queued = self.reports.try_send(text).is_ok();
        drop(self.reports);
        let written = self.ended.recv_timeout(PATIENCE).map_err(|_| unread())?;
        written.and(if is_queued { Ok(()) } else { Err(unread()) })
    }
}

fn line(document: &Value) -> String {
    format!("{document}\n")
}

fn text_of(report: &Report) -> String {
    let mut text = format!("{}\n{}\n", report.load, report.links);
    for app in &report.apps {
        let figures: Vec<Figure> = app
            .figures
            .iter()
            .copied()
            .filter(is_worth_a_word)
            .collect();
        if !figures.is_empty() {
            let told = AppReport {
                figures,
                ..app.clone()
            };
            text.push_str(&format!("  {told}\n"));
        }
    }
    for (way, line) in &report.lines {
        text.push_str(&line_text(way, line));
    }
    if !report.is_valid() {
        text.push_str(
            "  INVALID: packets were released too late; nothing measured meanwhile is worth much\n",
        );
    }
    for trouble in &report.troubles {
        text.push_str(&format!("  {trouble}\n"));
    }
    text
}

/// One line for each rule.
fn line_text(way: &str, report: &LineReport) -> String {
    let mut text = String::new();
    for rule in &report.rules {
        let packets = &rule.packets;
        let drops = packets.dropped.iter();
        let drops: Vec<String> = drops
            .map(|(cause, count)| format!("{cause} {count}"))
            .collect();
        let drops = if drops.is_empty() {
            "none".to_owned()
        } else {
            drops.join(", ")
        };
        let delay = rule.achieved_delay_nanoseconds.map(|delay| {
            format!(
                ", {:.3} ms",
                Duration::from_nanos(delay).as_secs_f64() * 1e3
            )
        });
        let late = |nanoseconds: u64| Duration::from_nanos(nanoseconds).as_micros();
        text.push_str(&format!(
            "  {way} {}: {} came, {} went, dropped: {drops}; {} queued, {} under way; {:.3} Mbit/s{}; late by p50 {} p99 {} \
             max {} µs\n",
            rule.name,
            packets.offered,
            packets.released,
            rule.queued_packets,
            rule.delayed_packets,
            mbit(rule.achieved_bits_per_second),
            delay.unwrap_or_default(),
            late(rule.timing.p50_nanoseconds),
            late(rule.timing.p99_nanoseconds),
            late(rule.timing.max_nanoseconds),
        ));
    }
    text
}

#[expect(clippy::cast_precision_loss, reason = "rates are below 2^53")]
fn mbit(bits_per_second: u64) -> f64 {
    bits_per_second as f64 / 1e6
}

/// Whether people want to see it: what links say already is left out, and what has not happened.
fn is_worth_a_word(figure: &Figure) -> bool {
    figure.value > 0 && !matches!(figure.name, "received" | "sent")
}

fn document(report: &Report) -> Value {
    json!({
        "load": load(&report.load),
        "links": report.links.0.iter().map(link).collect::<Vec<Value>>(),
        "apps": report.apps.iter().map(app).collect::<Map<String, Value>>(),
        "impairment": report.lines.iter().map(|(way, line)| ((*way).to_owned(), json!(line))).collect::<Map<String, Value>>(),
        "valid": report.is_valid(),
        "troubles": report.troubles,
    })
}

fn load(load: &Load) -> Value {
    json!({
        "time": load.time.as_secs_f64(),
        "fps": load.fps(),
        "fpGbps": load.fp_gbps(),
        "fpb": load.fpb(),
        "bpp": load.bpp(),
        "sleep": load.sleep.as_micros(),
    })
}

fn link(report: &LinkReport) -> Value {
    json!({
        "link": report.link.to_string(),
        "packets": report.counters.packets_in,
        "dropped": report.counters.dropped,
        "loss_percent": report.loss_percent(),
    })
}

fn app(report: &AppReport) -> (String, Value) {
    let figures = report.figures.iter();
    let mut figures: Map<String, Value> = figures
        .map(|figure| (figure.name.to_owned(), figure.value.into()))
        .collect();
    figures.insert("sent_nowhere".to_owned(), report.sent_nowhere.into());
    (report.app.clone(), figures.into())
}
