//! `sandwire impair show`: what is impaired, and what became of its packets.

use std::path::Path;

use clap::Args;
use sandwire_api::impairment::{Packets, RuleReport};
use sandwire_impair_host::control::{Client, State, Status, Way};

use super::{lease, service, target::Which};
use crate::{
    Context,
    failure::{Failure, Outcome},
    render,
};

/// Command line of `sandwire impair show`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    lease: lease::Which,

    #[command(flatten)]
    which: Which,
}

pub(super) fn run(context: &Context, folder: &Path, arguments: &Arguments) -> Outcome {
    if let Some(name) = &arguments.lease.lease {
        return lease::show(context, name, arguments.lease.owner_uid);
    }
    let which = &arguments.which;
    let found = match service::connect(folder)? {
        Some(client) => list(client, which)?,
        None if which.is_given() => which.target().map(|_| Vec::new())?,
        None => Vec::new(),
    };
    context.output.answer(&found, |all| text(all))
}

fn list(mut client: Client, which: &Which) -> Result<Vec<Status>, Failure> {
    let mut found = client.list().map_err(service::failure)?;
    if which.is_given() {
        let target = which.target_for(&mut client)?;
        found.retain(|status| {
            status.target.netns == target.netns && status.target.interface == target.interface
        });
    }
    Ok(found)
}

fn text(all: &[Status]) -> String {
    if all.is_empty() {
        return "nothing is impaired\n".to_owned();
    }
    let settings = |status: &Status| format!("{}: {}\n", status.target, status.impairment);
    let settings: String = all.iter().map(settings).collect();
    let rows = all.iter().map(|status| Row {
        interface: status.target.to_string(),
        state: &status.state,
        egress: &status.egress,
        ingress: &status.ingress,
    });
    settings + &table_text(rows)
}

/// An impaired interface, whoever asked for it.
pub(super) struct Row<'a> {
    pub(super) interface: String,
    pub(super) state: &'a State,
    pub(super) egress: &'a Way,
    pub(super) ingress: &'a Way,
}

pub(super) fn table_text<'a>(rows: impl Iterator<Item = Row<'a>>) -> String {
    let mut table = render::table(&[
        "INTERFACE",
        "STATE",
        "WAY",
        "RULE",
        "PACKETS",
        "DROPPED",
        "INSIDE",
        "DELAY",
        "BIT/S",
        "LATE P99",
    ]);
    for one in rows {
        let state = state_text(one.state);
        for (name, way) in [("egress", one.egress), ("ingress", one.ingress)] {
            let start = [one.interface.clone(), state.clone(), name.to_owned()];
            for row in rows_of(way) {
                table.add_row(start.iter().cloned().chain(row));
            }
        }
    }
    render::table_text(&table)
}

fn state_text(state: &State) -> String {
    match state {
        State::Impaired => "impaired".to_owned(),
        State::Draining => "ending".to_owned(),
        State::Ended { reason } => format!("ended: {reason}"),
    }
}

/// A row for each rule, and one for what met none.
fn rows_of(way: &Way) -> Vec<[String; 7]> {
    let mut rows: Vec<[String; 7]> = way.line.rules.iter().map(row_of).collect();
    let lost = [
        ("engine dead", way.dead_dropped),
        ("unread", way.unread),
        ("too long, see --frame-bytes-max", way.too_long),
        ("of more than 2048 segments", way.uncut),
        ("not taken back", way.refused),
        ("NAT mapping forgotten", way.line.nat_dropped),
        ("consumer full", way.line.passed_dropped),
    ];
    let any_lost = lost.iter().any(|(_, count)| *count > 0);
    let others = [
        "(none)".to_owned(),
        way.line.passed.to_string(),
        drops_text(lost),
        String::new(),
        String::new(),
        String::new(),
        String::new(),
    ];
    if rows.is_empty() || way.line.passed > 0 || any_lost {
        rows.push(others);
    }
    let gone = &way.line.gone;
    let is_valid = way.line.rules.iter().all(|rule| rule.timing.valid);
    if gone.offered > 0 && is_valid && !way.line.valid {
        rows.push(row_of_gone(gone));
    }
    rows
}

fn row_of(rule: &RuleReport) -> [String; 7] {
    let packets = &rule.packets;
    let dropped = packets.dropped.iter();
    let inside = rule.queued_packets + rule.delayed_packets;
    let late = milliseconds(rule.timing.p99_nanoseconds);
    [
        rule.name.clone(),
        packets.offered.to_string(),
        drops_text(dropped.map(|(cause, count)| (cause.as_str(), *count))),
        inside.to_string(),
        rule.achieved_delay_nanoseconds
            .map_or_else(|| "-".to_owned(), milliseconds),
        render::decimal(rule.achieved_bits_per_second),
        if rule.timing.valid {
            late
        } else {
            format!("{late} INVALID")
        },
    ]
}

/// What makes a way invalid whose rules all are valid.
fn row_of_gone(packets: &Packets) -> [String; 7] {
    let dropped = packets.dropped.iter();
    [
        "(gone)".to_owned(),
        packets.offered.to_string(),
        drops_text(dropped.map(|(cause, count)| (cause.as_str(), *count))),
        String::new(),
        String::new(),
        String::new(),
        "INVALID".to_owned(),
    ]
}

fn drops_text<'a>(causes: impl IntoIterator<Item = (&'a str, u64)>) -> String {
    let counted = causes.into_iter().filter(|(_, count)| *count > 0);
    let texts: Vec<String> = counted
        .map(|(cause, count)| format!("{count} {cause}"))
        .collect();
    if texts.is_empty() {
        "0".to_owned()
    } else {
        texts.join(", ")
    }
}

/// With microseconds.
fn milliseconds(nanoseconds: u64) -> String {
    let microseconds = nanoseconds.div_ceil(1000);
    format!("{}.{:03} ms", microseconds / 1000, microseconds % 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rounded_up_to_microseconds() {
        assert_eq!(milliseconds(0), "0.000 ms");
        assert_eq!(milliseconds(1), "0.001 ms");
        assert_eq!(milliseconds(50_001_000), "50.001 ms");
    }

    #[test]
    fn causes_that_never_occurred_are_not_named() {
        assert_eq!(drops_text([("loss", 3), ("queue_full", 0)]), "3 loss");
        assert_eq!(drops_text([("loss", 0)]), "0");
    }
}
