//! The suite `relay`: how much passes the relay in one TCP stream and in small datagrams, beside no relay at all and
//! beside stunnel.
//!
//! ```text
//!  box ── host ══ wire ══ peer ── dest
//! ```
//! Each is a network namespace, joined by veths. Both relays, what is compared with them, the client and the server
//! share the machine's processors. All take turns within a round.

mod datagrams;
mod place;

use std::collections::BTreeMap;

use anyhow::Result;
use clap::ValueEnum;

use crate::{
    cpu,
    extent::{self, Pace},
    host::HostFacts,
    progress::Step,
    record::Record,
};
use place::{Place, Way};

/// Parts of the suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// One TCP stream.
    Tcp,
    /// Datagrams of 200 bytes.
    Udp,
}

impl extent::Part for Part {
    const QUICK: Pace = Pace {
        rounds: 1,
        milliseconds: 1000,
    };
    const FULL: Pace = Pace {
        rounds: 5,
        milliseconds: 3000,
    };
}

/// How much of the suite is run.
pub(crate) type Extent = extent::Extent<Part>;

/// Bytes of a datagram's payload.
const DATAGRAM_BYTES: usize = 200;

/// Runs the suite. To be called inside a private host.
pub(crate) fn run(extent: &Extent) -> Result<Record> {
    let settings = BTreeMap::from([
        ("rounds".to_owned(), u64::from(extent.rounds())),
        ("milliseconds".to_owned(), u64::from(extent.milliseconds())),
        ("datagram_bytes".to_owned(), DATAGRAM_BYTES as u64),
    ]);
    let mut record = Record::new("relay", HostFacts::read()?, settings);
    cpu::go_first();
    let place = Place::build()?;
    for round in 1..=extent.rounds() {
        let _step = Step::begin(&format!("round {round} of {}", extent.rounds()), 1);
        for way in Way::ALL {
            let part = if way.is_tcp() { Part::Tcp } else { Part::Udp };
            if !extent.has(part) {
                continue;
            }
            if let Err(error) = measure(&place, way, extent, &mut record) {
                record.not_run(way.name(), &format!("{error:#}"));
            }
        }
    }
    let throughput = "throughput";
    for (name, below) in [
        ("tcp_vs_stunnel", Way::Stunnel),
        ("tcp_vs_plain", Way::PlainTcp),
    ] {
        let (above, below) = (
            (Way::RelayedTcp.name(), throughput),
            (below.name(), throughput),
        );
        record.add_ratio(name, above, below);
    }
    let delivered = "delivered";
    let udp = [Way::RelayedUdp, Way::PlainUdp].map(|way| (way.name(), delivered));
    record.add_ratio("udp_vs_plain", udp[0], udp[1]);
    if let Some(row) = record.row(Way::RelayedUdp.name(), delivered) {
        let thousands = row.median;
        record.insert_ratio("udp_kpps", thousands);
    }
    Ok(record)
}

fn measure(place: &Place, way: Way, extent: &Extent, record: &mut Record) -> Result<()> {
    let running = place.start(way)?;
    let measured = measure_running(place, way, extent, record);
    match (measured, running.end()) {
        (Err(error), Err(left)) => Err(error.context(format!("{left:#}, after this"))),
        (measured, ended) => measured.and(ended),
    }
}

fn measure_running(place: &Place, way: Way, extent: &Extent, record: &mut Record) -> Result<()> {
    if way.is_tcp() {
        let gigabits = place.stream(way, extent.time())?;
        record.add(way.name(), "throughput", "Gbit/s", &[gigabits]);
    } else {
        let delivered = datagrams::highest(DATAGRAM_BYTES, extent.time())?;
        record.add(way.name(), "delivered", "thousand per second", &[delivered]);
    }
    Ok(())
}
