//! Rate limits: virtual scheduling (GCRA).

use sandwire_api::drop_reason::DropReason;

use super::{
    Packet,
    packet::{ETHERNET, TCP, UDP},
    world::{Limit, Meter},
};

/// How far ahead an uplink's queue may be told to send, in nanoseconds.
const HORIZON: u64 = 2_000_000_000;

/// A frame as it is on the wire.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) segments: u64,
    /// Bytes of all segments with their headers.
    pub(crate) wire_bytes: u64,
    /// Length of the largest IP packet.
    pub(crate) ip: usize,
}

/// What a frame will be on the wire: what will be cut into segments repeats its headers.
pub(crate) fn size(frame: &[u8], packet: &Packet, gso_size: u32) -> Size {
    let transport = match packet.protocol {
        TCP => usize::from(frame.get(packet.transport + 12).copied().unwrap_or(0) >> 4) * 4,
        UDP => 8,
        _ => 0,
    };
    let headers = packet.transport + transport;
    if gso_size == 0 {
        return Size {
            segments: 1,
            wire_bytes: frame.len() as u64,
            ip: packet.length(),
        };
    }
    let payload = packet.end.saturating_sub(headers);
    let segments = payload.div_ceil(gso_size as usize).max(1);
    Size {
        segments: segments as u64,
        wire_bytes: (frame.len() + (segments - 1) * headers) as u64,
        ip: gso_size as usize + headers - ETHERNET,
    }
}

/// Judges a packet by a limit and charges it. Over the limit it is dropped, or told when to leave if
/// it may wait in a queue.
pub(crate) fn police(
    limit: &Limit,
    meter: &mut Meter,
    size: Size,
    now: u64,
    may_wait: bool,
) -> Result<Option<u64>, DropReason> {
    let patience = if may_wait { HORIZON } else { 0 };
    let mut departure = None;
    let byte_cost = (u128::from(size.wire_bytes) * u128::from(limit.byte_cost) >> 20) as u64;
    let packet_cost = size.segments * limit.packet_cost;
    let charges = [
        (limit.byte_cost, byte_cost, limit.byte_burst, &mut meter.bytes, DropReason::BitLimit),
        (
            limit.packet_cost,
            packet_cost,
            limit.packet_burst,
            &mut meter.packets,
            DropReason::PacketLimit,
        ),
    ];
    for (unit, cost, burst, paid_until, reason) in charges {
        if unit == 0 {
            continue;
        }
        let debt = paid_until.saturating_sub(now);
        if debt > burst + patience {
            return Err(reason);
        }
        if debt > burst {
            departure = departure.max(Some(now + debt - burst));
        }
        *paid_until = now + debt + cost;
    }
    Ok(departure)
}
