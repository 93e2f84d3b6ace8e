//! `sandwire top`: traffic of leases, a table that renews itself each second.

use std::{
    collections::{BTreeMap, HashMap},
    io::IsTerminal,
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Args;
use sandwire_api::{
    client::{Blocking, ClientError},
    drop_reason::DropReason,
    error::ErrorCode,
    name::Name,
    slot::DataPath,
    traffic::{LeaseTraffic, Traffic, TrafficTotal},
};
use serde::Serialize;

use super::policy::limits_text;
use crate::{Context, connection::cannot, failure::Outcome, render};

/// Time between two samples.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long a live table waits for the daemon until it says that there is no answer.
const ANSWER_MAX: Duration = Duration::from_secs(3);
/// Reasons that a row names before it only counts.
const REASONS_SHOWN_MAX: usize = 3;
/// Cursor to the upper left, and everything below it cleared.
const REPAINT: &str = "\x1b[H\x1b[J";
/// Lines that a row has at most in a live table, where it can't be in one; what is longer is cut.
const ROW_LINES_MAX: usize = 3;
/// Lines of a terminal that doesn't say.
const LINES_DEFAULT: u16 = 24;

/// Command line of `sandwire top`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Print one sample, measured over a second, instead of renewing it.
    #[arg(long)]
    once: bool,

    /// Only leases of this pool.
    #[arg(long)]
    pool: Option<Name>,
}

/// One sample: what passed between two readings.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Sample {
    /// Time between the readings.
    seconds: f64,
    leases: Vec<Row>,
}

/// A lease in a sample.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Row {
    #[serde(flatten)]
    lease: LeaseTraffic,
    /// Absent with the `nft` data path.
    rates: Option<Rates>,
}

/// What passed per second.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Rates {
    egress: Rate,
    ingress: Rate,
    /// Packets dropped per second, by reason.
    drops: BTreeMap<DropReason, u64>,
}

/// What passed per second in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Rate {
    bits_per_second: u64,
    /// As they are on the wire.
    packets_per_second: u64,
}

/// All leases at one time.
struct Reading {
    at: Instant,
    leases: Vec<LeaseTraffic>,
}

pub(crate) fn run(context: &Context, arguments: &Arguments) -> Outcome {
    let is_live = std::io::stdout().is_terminal() && !arguments.once && !context.output.json;
    if is_live {
        return renew(context, arguments);
    }
    let client = context.client();
    let read = || read(&client, arguments).map_err(cannot("read the traffic"));
    let before = read()?;
    std::thread::sleep(INTERVAL);
    let sample = compare(&before, &read()?);
    context
        .output
        .answer(&sample, |sample| sample_text(sample, usize::MAX))
}

/// The table that renews itself, also past the end of one daemon and the start of the next.
fn renew(context: &Context, arguments: &Arguments) -> Outcome {
    let client = context.client().with_timeout(ANSWER_MAX);
    let mut before = read(&client, arguments).map_err(cannot("read the traffic"))?;
    let mut shown = None;
    let mut text = "measuring …\n".to_owned();
    loop {
        if context.output.write(&format!("{REPAINT}{text}"))? != ExitCode::SUCCESS {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(INTERVAL);
        let mut note = String::new();
        match read(&client, arguments) {
            Ok(now) => {
                shown = Some(compare(&before, &now));
                before = now;
            }
            Err(error) if is_away(&error) => {
                let seconds = before.at.elapsed().as_secs();
                note = format!("no answer from the daemon for {seconds} s: the last figures\n");
            }
            Err(error) => return Err(cannot("read the traffic")(error)),
        }
        let size = rustix::termios::tcgetwinsize(std::io::stdout());
        let lines = size.map_or(0, |size| size.ws_row);
        let lines = if lines == 0 { LINES_DEFAULT } else { lines };
        // The cursor waits in the last one.
        let lines_max = usize::from(lines).saturating_sub(1 + note.lines().count());
        let table = shown.as_ref().map(|shown| sample_text(shown, lines_max));
        text = table.unwrap_or_default() + &note;
    }
}

/// Whether the daemon may be back soon: it is started anew, say. What it answers is no such thing, unless that it stops.
fn is_away(error: &ClientError) -> bool {
    match error {
        ClientError::Connect { .. } | ClientError::Transport { .. } => true,
        ClientError::Api(answer) => answer.code == ErrorCode::Unavailable,
        ClientError::Decode { .. } => false,
    }
}

fn read(client: &Blocking, arguments: &Arguments) -> Result<Reading, ClientError> {
    let mut leases = client.traffic()?;
    leases.retain(|lease| {
        arguments
            .pool
            .as_ref()
            .is_none_or(|pool| lease.pool == *pool)
    });
    Ok(Reading {
        at: Instant::now(),
        leases,
    })
}

/// Rates of the leases that are there now; the busiest first.
fn compare(before: &Reading, now: &Reading) -> Sample {
    let elapsed = now.at.duration_since(before.at);
    let key = |lease: &LeaseTraffic| (lease.owner_uid, lease.name.clone(), lease.slot);
    let known: HashMap<_, _> = before
        .leases
        .iter()
        .filter_map(|lease| Some((key(lease), lease.traffic.as_ref()?)))
        .collect();
    let mut leases: Vec<Row> = now
        .leases
        .iter()
        .map(|lease| Row {
            rates: lease.traffic.as_ref().map(|traffic| {
                let nothing = Traffic::default();
                let earlier = known.get(&key(lease)).copied().unwrap_or(&nothing);
                rates(&traffic.since(earlier), elapsed)
            }),
            lease: lease.clone(),
        })
        .collect();
    leases.sort_by(|left, right| {
        let busy = |row: &Row| std::cmp::Reverse(row.rates.as_ref().map(Rates::load));
        let name = |row: &Row| {
            (
                row.lease.pool.clone(),
                row.lease.name.clone(),
                row.lease.owner_uid,
            )
        };
        busy(left)
            .cmp(&busy(right))
            .then_with(|| name(left).cmp(&name(right)))
    });
    Sample {
        seconds: elapsed.as_secs_f64(),
        leases,
    }
}

fn rates(passed: &Traffic, elapsed: Duration) -> Rates {
    let micros = elapsed.as_micros().max(1);
    let per_second = |count: u128| u64::try_from(count * 1_000_000 / micros).unwrap_or(u64::MAX);
    let rate = |total: &TrafficTotal| Rate {
        bits_per_second: per_second(u128::from(total.bytes) * 8),
        packets_per_second: per_second(total.segments.into()),
    };
    Rates {
        egress: rate(&passed.egress),
        ingress: rate(&passed.ingress),
        drops: passed
            .drops
            .iter()
            // A single drop in a long second is still one.
            .map(|(reason, count)| (*reason, per_second((*count).into()).max(1)))
            .collect(),
    }
}

impl Rates {
    fn load(&self) -> (u64, u64) {
        let bits = self
            .egress
            .bits_per_second
            .saturating_add(self.ingress.bits_per_second);
        (bits, self.drops.values().sum())
    }
}

/// As many rows as so many lines have room for: a row takes several in a narrow terminal.
fn sample_text(sample: &Sample, lines_max: usize) -> String {
    if sample.leases.is_empty() {
        return "no leases\n".to_owned();
    }
    let mut shown = sample.leases.len().min(lines_max).max(1);
    loop {
        let row_lines_max = (lines_max < usize::MAX).then_some(ROW_LINES_MAX);
        let text = rows_text(sample, shown, row_lines_max);
        let lines = text.lines().count();
        if lines <= lines_max || shown == 1 {
            return text;
        }
        shown -= 1;
    }
}

fn rows_text(sample: &Sample, shown: usize, row_lines_max: Option<usize>) -> String {
    let mut headings = vec![
        "LEASE",
        "POOL",
        "OWNER",
        "PATH",
        "OUT bit/s",
        "OUT pkt/s",
        "IN bit/s",
        "IN pkt/s",
        "DROP/s",
        "DROPPED SINCE ACQUIRE",
        "LIMITS",
    ];
    let is_impaired = |row: &Row| row.lease.impairment.is_some();
    let any_impaired = sample.leases.iter().any(is_impaired);
    if any_impaired {
        headings.push("IMPAIRED");
    }
    let mut table = render::table(&headings);
    for row in &sample.leases[..shown] {
        let mut cells = cells(row);
        if any_impaired {
            let impairment = row.lease.impairment.as_ref();
            cells.push(impairment.map_or("-".to_owned(), ToString::to_string));
        }
        let mut row = comfy_table::Row::from(cells);
        if let Some(lines) = row_lines_max {
            row.max_height(lines);
        }
        table.add_row(row);
    }
    let mut text = render::table_text(&table);
    if shown < sample.leases.len() {
        text.push_str(&format!("and {} more\n", sample.leases.len() - shown));
    }
    if sample
        .leases
        .iter()
        .any(|row| row.lease.data_path == DataPath::Nft)
    {
        text.push_str("The nft data path doesn't count per lease; see 'sandwire show'.\n");
    }
    text
}

fn cells(row: &Row) -> Vec<String> {
    let lease = &row.lease;
    let mut cells = vec![
        lease.name.to_string(),
        lease.pool.to_string(),
        lease.owner_uid.to_string(),
        render::data_path(lease.data_path).to_owned(),
    ];
    match &row.rates {
        None => cells.extend(std::iter::repeat_n("-".to_owned(), 5)),
        Some(rates) => cells.extend(
            [
                rates.egress.bits_per_second,
                rates.egress.packets_per_second,
                rates.ingress.bits_per_second,
                rates.ingress.packets_per_second,
                rates.drops.values().sum(),
            ]
            .map(render::decimal),
        ),
    }
    let nothing = Traffic::default();
    cells.push(drops_text(lease.traffic.as_ref().unwrap_or(&nothing)));
    cells.push(limits_text(&lease.limits));
    cells
}

/// The most frequent reasons with their counts; `-` without any.
fn drops_text(traffic: &Traffic) -> String {
    let mut drops: Vec<(u64, DropReason)> = traffic
        .drops
        .iter()
        .map(|(reason, count)| (*count, *reason))
        .filter(|(count, _)| *count > 0)
        .collect();
    if drops.is_empty() {
        return "-".to_owned();
    }
    drops.sort_by_key(|(count, reason)| (std::cmp::Reverse(*count), *reason));
    let mut parts: Vec<String> = drops
        .iter()
        .take(REASONS_SHOWN_MAX)
        .map(|(count, reason)| format!("{} {}", reason.name(), render::decimal(*count)))
        .collect();
    if drops.len() > REASONS_SHOWN_MAX {
        parts.push("…".to_owned());
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use sandwire_api::{impairment::ImpairmentSummary, policy::LimitSpec, slot::SlotKind};

    use super::*;

    fn lease(name: &str, bytes: u64, drops: &[(DropReason, u64)]) -> LeaseTraffic {
        let total = TrafficTotal {
            packets: bytes / 1000,
            bytes,
            segments: bytes / 500,
        };
        LeaseTraffic {
            name: name.parse().unwrap(),
            pool: "web".parse().unwrap(),
            owner_uid: 1000,
            slot: 1,
            kind: SlotKind::Host,
            data_path: DataPath::Ebpf,
            limits: LimitSpec::default(),
            traffic: Some(Traffic {
                egress: total,
                ingress: TrafficTotal::default(),
                drops: drops.iter().copied().collect(),
            }),
            impairment: None,
        }
    }

    fn sample(before: Vec<LeaseTraffic>, now: Vec<LeaseTraffic>, seconds: u64) -> Sample {
        let at = Instant::now();
        let before = Reading { at, leases: before };
        let at = at + Duration::from_secs(seconds);
        compare(&before, &Reading { at, leases: now })
    }

    #[test]
    fn impaired_leases_are_told_from_others() {
        let mut impaired = lease("a", 0, &[]);
        let delay = "delay 50ms".parse().unwrap();
        impaired.impairment = Some(ImpairmentSummary::new(&delay, true));
        let sample = sample(vec![], vec![impaired, lease("b", 0, &[])], 1);
        let text = sample_text(&sample, 9);
        let ends = ["IMPAIRED", "delay 50ms", "-"];
        for (line, end) in text.lines().zip(ends) {
            assert!(line.trim_end().ends_with(end), "{text}");
        }
    }

    #[test]
    fn rates_are_what_came_between_the_readings_and_the_busiest_is_first() {
        let sample = sample(
            vec![
                lease("a", 1000, &[]),
                lease("b", 0, &[(DropReason::Policy, 5)]),
            ],
            vec![
                lease("a", 3000, &[]),
                lease("b", 1_000_000, &[(DropReason::Policy, 9)]),
                lease("c", 0, &[]),
            ],
            2,
        );
        let names: Vec<&str> = sample
            .leases
            .iter()
            .map(|row| row.lease.name.as_str())
            .collect();
        assert_eq!(names, ["b", "a", "c"]);
        let rates = sample.leases[0].rates.as_ref().unwrap();
        assert_eq!(
            rates.egress,
            Rate {
                bits_per_second: 4_000_000,
                packets_per_second: 1000
            }
        );
        assert_eq!(rates.drops[&DropReason::Policy], 2);
        let rates = sample.leases[1].rates.as_ref().unwrap();
        assert_eq!(rates.egress.bits_per_second, 8000);
    }

    #[test]
    fn a_row_has_rates_drops_and_limits() {
        let mut busy = lease(
            "a",
            1_250_000,
            &[(DropReason::Policy, 1500), (DropReason::Arp, 2)],
        );
        busy.limits.egress.bits_per_second = Some(100_000_000);
        let text = sample_text(&sample(vec![], vec![busy], 1), usize::MAX);
        let row = text.lines().nth(1).unwrap();
        for part in ["10.0 M", "2.50 k", "policy 1.50 k, arp 2", "egress 100mbit"] {
            assert!(row.contains(part), "{part} is missing in:\n{text}");
        }
    }

    #[test]
    fn rows_beyond_the_screen_are_counted_and_nft_is_explained() {
        let mut leases = vec![lease("a", 1, &[]), lease("b", 1, &[]), lease("c", 1, &[])];
        leases[2].data_path = DataPath::Nft;
        leases[2].traffic = None;
        let text = sample_text(&sample(vec![], leases, 1), 4);
        assert!(text.contains("and 2 more"), "{text}");
        assert!(text.contains("nft data path"), "{text}");
        assert_eq!(sample_text(&sample(vec![], vec![], 1), 5), "no leases\n");
    }

    #[test]
    fn the_document_has_totals_and_rates() {
        let json = serde_json::to_value(sample(vec![], vec![lease("a", 1000, &[])], 1)).unwrap();
        assert_eq!(json["leases"][0]["traffic"]["egress"]["bytes"], 1000);
        assert_eq!(
            json["leases"][0]["rates"]["egress"]["bits_per_second"],
            8000
        );
    }
}
