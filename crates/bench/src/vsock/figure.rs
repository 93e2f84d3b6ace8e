//! The figure of a talk about vsock for microVMs (KVM Forum 2019): throughput by the size of the user's buffer,
//! and by how much of a guest's data the device may hold when the host is slow (its TX buffer).

use std::time::Duration;

use anyhow::Result;

use super::{
    backend::{NO_LIMIT, Program},
    throughput::{Direction, Place},
};
use crate::record::Record;

/// How metrics of the figure begin; the size of the user's buffer follows.
pub(crate) const USER_BUFFER: &str = "user_buffer_";
/// Cases of the figure, with what they are called in a plot.
pub(crate) const FIGURE_CASES: [(&str, &str); 4] = [
    ("tx_buffer_64k", "to the host, TX buffer 64 KiB"),
    ("tx_buffer_256k", "to the host, TX buffer 256 KiB"),
    ("tx_buffer_1m", "to the host, TX buffer 1 MiB"),
    ("to_guest", "to the guest"),
];

const TX_BUFFERS: [u32; 3] = [64 << 10, 256 << 10, 1 << 20];
const USER_BUFFERS: [usize; 7] = [64, 256, 1024, 4096, 16 << 10, 64 << 10, 256 << 10];

/// Measures each point once.
pub(super) fn measure(time: Duration, record: &mut Record) {
    for ((case, _), connection_bytes) in FIGURE_CASES.into_iter().zip(TX_BUFFERS) {
        super::attempt(record, case, |record| {
            line(case, Direction::ToHost, connection_bytes, time, record)
        });
    }
    let (to_guest, _) = FIGURE_CASES[3];
    super::attempt(record, to_guest, |record| {
        line(to_guest, Direction::ToGuest, TX_BUFFERS[1], time, record)
    });
}

fn line(
    case: &str,
    direction: Direction,
    connection_bytes: u32,
    time: Duration,
    record: &mut Record,
) -> Result<()> {
    let program = Program::Sandwire {
        busy_poll: Duration::ZERO,
        connection_bytes,
        connects_per_second: NO_LIMIT,
    };
    let mut place = Place::build(program, 1)?;
    for bytes in USER_BUFFERS {
        let figures = place.measure(direction, bytes, time)?;
        let metric = format!("{USER_BUFFER}{bytes}");
        record.add(case, &metric, "Gbit/s", &[figures.gigabits()]);
    }
    Ok(())
}
