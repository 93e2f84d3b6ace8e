//! `sandwire trace`: what becomes of each packet of a lease, a line each, while it runs.

mod pcapng;
mod summary;

use std::{
    io::{self, ErrorKind, Write},
    path::PathBuf,
    process::ExitCode,
};

use clap::Args;
use sandwire_api::{
    client::{Client, Trace},
    name::Name,
    trace::{Direction, TraceLine, TracePacket, Verdict},
};
use tokio::runtime;

use self::summary::summary;
use crate::{
    Context,
    connection::cannot,
    failure::{Failure, Outcome},
    interruption::{Ends, end_in_any_case, interrupted},
    output::note,
    patient::Patient,
    record_file::RecordFile,
    render,
};

/// Command line of `sandwire trace`.
#[derive(Debug, Args)]
#[command(
    after_help = "Frames are shown as they came, before any translation. With --json the packets are one array, \
    closed at the end. Interrupting it ends it in order."
)]
pub(crate) struct Arguments {
    /// Name of the lease.
    name: Name,

    /// Numeric user that holds it, if not you; for root.
    #[arg(long, value_name = "UID")]
    owner_uid: Option<u32>,

    /// End after so many packets.
    #[arg(long, value_name = "NUMBER")]
    count: Option<u64>,

    /// Write a capture in the format pcapng to this file instead, with a comment on each packet; `-` is
    /// standard output.
    #[arg(long, short, value_name = "FILE", conflicts_with = "json")]
    write: Option<PathBuf>,
}

/// How a trace ended.
#[derive(Clone, Debug, Default)]
struct Summary {
    packets: u64,
    lost: u64,
    /// The daemon's own words.
    reason: Option<String>,
}

pub(crate) fn run(context: &Context, arguments: &Arguments) -> Outcome {
    let name = &arguments.name;
    let failed = |error: io::Error| Failure::failed(format!("cannot trace lease {name}: {error}"));
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(failed)?;
    end_in_any_case(&format!("trace lease {name}")).map_err(failed)?;
    let mut is_answered = false;
    let summary = match runtime.block_on(follow(context, arguments, &mut is_answered)) {
        Ok(summary) => summary,
        // The array is the document.
        Err(failure) if is_answered => return Ok(context.output.fail_by_status(&failure)),
        Err(failure) => return Err(failure),
    };
    let mut text = format!(
        "{} traced",
        render::count(
            usize::try_from(summary.packets).unwrap_or(usize::MAX),
            "packet"
        )
    );
    if summary.lost > 0 {
        text.push_str(&format!(", {} more came too fast to be kept", summary.lost));
    }
    if let Some(reason) = &summary.reason {
        text.push_str(&format!("; {reason}"));
    }
    note(&text);
    Ok(ExitCode::SUCCESS)
}

/// Also says whether a document has begun.
async fn follow(
    context: &Context,
    arguments: &Arguments,
    is_answered: &mut bool,
) -> Result<Summary, Failure> {
    let name = &arguments.name;
    let operation = format!("trace lease {name}");
    let failed = |error: io::Error| Failure::failed(format!("cannot {operation}: {error}"));
    let mut ends = Ends::new().map_err(failed)?;
    let client = Client::new(&context.socket);
    let mut trace = tokio::select! {
        trace = client.trace(name, arguments.owner_uid) => trace.map_err(cannot(&operation))?,
        () = ends.wait() => return Err(interrupted(&operation)),
    };
    let mut sink = Sink::open(context, arguments)?;
    *is_answered = matches!(sink, Sink::Json { .. });
    let mut summary = Summary::default();
    let outcome = tokio::select! {
        outcome = copy(&mut trace, &mut sink, arguments.count, &mut summary, &operation) => outcome,
        () = ends.wait() => Ok(()),
    };
    // What was written is made whole whatever happened.
    let closed = sink.close().or_else(gone_is_fine).map_err(failed);
    outcome.and(closed)?;
    Ok(summary)
}

/// Copies lines until there is an end of them, or nobody reads any more.
async fn copy(
    trace: &mut Trace,
    sink: &mut Sink,
    count: Option<u64>,
    summary: &mut Summary,
    operation: &str,
) -> Result<(), Failure> {
    while count.is_none_or(|count| summary.packets < count) {
        let line = trace.next().await.map_err(cannot(operation))?;
        let written = match line {
            None => return Ok(()),
            Some(TraceLine::Begin) => {
                note("tracing; interrupt to end");
                Ok(())
            }
            Some(TraceLine::Packet(packet)) => {
                summary.packets += 1;
                sink.packet(&packet)
            }
            Some(TraceLine::Lost { count }) => {
                summary.lost = summary.lost.saturating_add(count);
                sink.lost(count)
            }
            Some(TraceLine::End { reason }) => {
                summary.reason = Some(reason);
                return Ok(());
            }
        };
        match written {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
            Err(error) => return Err(Failure::failed(format!("cannot {operation}: {error}"))),
            Ok(()) => {}
        }
    }
    Ok(())
}

fn gone_is_fine(error: io::Error) -> io::Result<()> {
    if error.kind() == ErrorKind::BrokenPipe {
        Ok(())
    } else {
        Err(error)
    }
}

/// Where packets go.
enum Sink {
    /// A line for people each.
    Text,
    /// One array of packets.
    Json { is_first: bool },
    /// A capture file.
    Capture(Box<pcapng::Writer<RecordFile>>),
}

impl Sink {
    fn open(context: &Context, arguments: &Arguments) -> Result<Self, Failure> {
        let Some(path) = &arguments.write else {
            if !context.output.json {
                return Ok(Self::Text);
            }
            print("[").or_else(gone_is_fine).map_err(|error| {
                Failure::failed(format!("cannot write to standard output: {error}"))
            })?;
            return Ok(Self::Json { is_first: true });
        };
        let failed = |error: io::Error| {
            Failure::refused(format!("cannot write to {}: {error}", path.display()))
        };
        let file = RecordFile::create(path, pcapng::whole_blocks).map_err(failed)?;
        let writer = pcapng::Writer::new(file, arguments.name.as_str()).map_err(failed)?;
        Ok(Self::Capture(Box::new(writer)))
    }

    fn packet(&mut self, packet: &TracePacket) -> io::Result<()> {
        match self {
            Self::Text => print(&format!("{}\n", line(packet))),
            Self::Json { is_first } => {
                let separator = if std::mem::take(is_first) {
                    "\n"
                } else {
                    ",\n"
                };
                print(&format!("{separator}{}", serde_json::to_string(packet)?))
            }
            Self::Capture(writer) => writer.write(packet),
        }
    }

    fn lost(&mut self, count: u64) -> io::Result<()> {
        match self {
            Self::Text => print(&format!("... {count} packets came too fast to be kept\n")),
            Self::Json { .. } | Self::Capture(_) => Ok(()),
        }
    }

    fn close(&mut self) -> io::Result<()> {
        match self {
            Self::Text | Self::Capture(_) => Ok(()),
            Self::Json { is_first: true } => print("]\n"),
            Self::Json { is_first: false } => print("\n]\n"),
        }
    }
}

fn print(text: &str) -> io::Result<()> {
    Patient(io::stdout()).write_all(text.as_bytes())
}

/// A packet in a line.
fn line(packet: &TracePacket) -> String {
    let nanoseconds = packet.time % 1_000_000_000;
    let seconds = packet.time / 1_000_000_000;
    let clock = format!(
        "{:02}:{:02}:{:02}.{:06}",
        seconds / 3600 % 24,
        seconds / 60 % 60,
        seconds % 60,
        nanoseconds / 1000
    );
    let arrow = match packet.direction {
        Direction::Egress => "out",
        Direction::Ingress => "in ",
    };
    let nic = match packet.nic {
        0 => String::new(),
        nic => format!(" nic{nic}"),
    };
    let segments = match packet.segments {
        0 | 1 => String::new(),
        segments => format!(" ({segments} segments)"),
    };
    format!(
        "{clock} {arrow}{nic} {}{segments} -> {}",
        summary(&packet.frame.0),
        fate_text(packet)
    )
}

/// What became of a packet, where and why.
fn fate_text(packet: &TracePacket) -> String {
    let mut text = packet.verdict.as_str().to_owned();
    if let Some(target) = &packet.target {
        text.push_str(&format!(" by {target}"));
    }
    if packet.verdict == Verdict::Drop {
        text.push_str(&format!(" at {}", packet.stage.as_str()));
    }
    if let Some(reason) = packet.reason {
        text.push_str(&format!(": {}", reason.name()));
    }
    text
}

#[cfg(test)]
mod tests {
    use sandwire_api::{
        drop_reason::DropReason,
        trace::{Frame, Stage},
    };

    use super::*;

    fn packet() -> TracePacket {
        let mut frame = vec![2; 12];
        frame.extend([
            8, 0, 0x45, 0, 0, 28, 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
        ]);
        frame.extend([0x10, 0xe1, 0, 53, 0, 8, 0, 0]);
        TracePacket {
            time: (3600 * 25 + 61) * 1_000_000_000 + 1000,
            nic: 0,
            direction: Direction::Egress,
            verdict: Verdict::Drop,
            stage: Stage::Policy,
            reason: Some(DropReason::Metadata),
            target: None,
            length: 42,
            segments: 1,
            frame: Frame(frame),
        }
    }

    #[test]
    fn a_line_has_time_direction_packet_and_fate() {
        assert_eq!(
            line(&packet()),
            "01:01:01.000001 out 10.0.0.1:4321 > 10.0.0.2:53 udp 0 bytes -> drop at policy: metadata"
        );
        let sent = TracePacket {
            nic: 1,
            direction: Direction::Ingress,
            verdict: Verdict::Uplink,
            stage: Stage::Redirect,
            reason: None,
            target: Some("eth0".to_owned()),
            segments: 44,
            ..packet()
        };
        let text = line(&sent);
        assert!(text.contains(" in  nic1 "), "{text}");
        assert!(
            text.ends_with("udp 0 bytes (44 segments) -> uplink by eth0"),
            "{text}"
        );
    }
}
