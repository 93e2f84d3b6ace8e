//! Rate limits: virtual scheduling (GCRA).

use sandwire_api::drop_reason::DropReason;

use super::{
    Input, Packet,
    packet::{ETHERNET, ICMP, ICMPV6, TCP, UDP},
    world::{Credit, Limit, Meter},
};

/// How far ahead an uplink's queue may be told to send, in nanoseconds, and how many packets of a sandbox it may hold.
const HORIZON: u64 = 2_000_000_000;
const HELD_MAX: u64 = 128;

/// The size of segments that are as long as what the kernel keeps of the packet apart, as SCTP's are.
pub(crate) const GSO_BY_FRAGS: u32 = 0xffff;
const SCTP_HEADER: usize = 12;

/// A frame as it is on the wire.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) segments: u64,
    /// Bytes of all segments with their headers.
    pub(crate) wire_bytes: u64,
    /// Length of the largest IP packet, with what is behind it in its frame.
    pub(crate) ip: usize,
}

/// What a frame will be on the wire: what will be cut into segments repeats its headers. How long each is by itself only
/// the kernel knows: such a packet fits if all of it does. If the kernel hasn't counted them, it is a guest's lie.
pub(crate) fn size(input: &Input, packet: &Packet) -> Size {
    let Input {
        frame, gso_size, ..
    } = input;
    if *gso_size == GSO_BY_FRAGS && input.gso_segs != 0 {
        let segments = u64::from(input.gso_segs);
        let headers = (packet.transport + SCTP_HEADER) as u64;
        return Size {
            segments,
            wire_bytes: frame.len() as u64 + (segments - 1) * headers,
            ip: frame.len() - ETHERNET,
        };
    }
    let transport = match packet.protocol {
        _ if packet.is_later_fragment() => 0,
        TCP => usize::from(frame.get(packet.transport + 12).copied().unwrap_or(0) >> 4) * 4,
        UDP | ICMP | ICMPV6 => 8,
        _ => 0,
    };
    let headers = packet.transport + transport;
    if *gso_size == 0 {
        return Size {
            segments: 1,
            wire_bytes: frame.len() as u64,
            ip: frame.len() - ETHERNET,
        };
    }
    let payload = frame.len().saturating_sub(headers);
    let segments = payload.div_ceil(*gso_size as usize).max(1);
    Size {
        segments: segments as u64,
        wire_bytes: (frame.len() + (segments - 1) * headers) as u64,
        ip: *gso_size as usize + headers - ETHERNET,
    }
}

/// Judges a packet by a limit and charges it. Over the limit it is dropped, or told when to leave if
/// it may wait in a queue. One that may not is paid for by what the processor has paid ahead, if that is enough.
pub(crate) fn police(
    limit: &Limit,
    meter: &mut Meter,
    size: Size,
    now: u64,
    may_wait: bool,
    credit_shift: Option<u32>,
) -> Result<Option<u64>, DropReason> {
    if limit.byte_cost == 0 && limit.packet_cost == 0 {
        return Ok(None);
    }
    let patience = |cost: u64| match may_wait {
        true => HORIZON.min(cost.saturating_mul(HELD_MAX)),
        false => 0,
    };
    let byte_cost = ((u128::from(size.wire_bytes) * u128::from(limit.byte_cost)) >> 20) as u64;
    let packet_cost = size.segments * limit.packet_cost;
    let most = Credit {
        bytes: ahead(limit.byte_burst, credit_shift),
        packets: ahead(limit.packet_burst, credit_shift),
    };
    let credit = meter.credit;
    let is_ours = credit.bytes <= most.bytes && credit.packets <= most.packets;
    if !may_wait && is_ours && byte_cost <= credit.bytes && packet_cost <= credit.packets {
        meter.credit.bytes -= byte_cost;
        meter.credit.packets -= packet_cost;
        return Ok(None);
    }
    let byte_debt = meter.bytes.saturating_sub(now);
    let packet_debt = meter.packets.saturating_sub(now);
    let byte_excess = match limit.byte_cost {
        0 => 0,
        _ => byte_debt.saturating_sub(limit.byte_burst),
    };
    let packet_excess = match limit.packet_cost {
        0 => 0,
        _ => packet_debt.saturating_sub(limit.packet_burst),
    };
    if byte_excess > patience(byte_cost) {
        return Err(DropReason::BitLimit);
    }
    if packet_excess > patience(packet_cost) {
        return Err(DropReason::PacketLimit);
    }
    // What is dropped costs nothing, neither bytes nor packets.
    let fill = |most: u64, credit: u64| {
        if may_wait {
            0
        } else {
            most.saturating_sub(credit)
        }
    };
    if limit.byte_cost > 0 {
        meter.bytes = now + byte_debt + byte_cost + fill(most.bytes, credit.bytes);
    }
    if limit.packet_cost > 0 {
        meter.packets = now + packet_debt + packet_cost + fill(most.packets, credit.packets);
    }
    if !may_wait {
        let of = |cost, most| if cost > 0 { most } else { 0 };
        meter.credit = Credit {
            bytes: of(limit.byte_cost, most.bytes),
            packets: of(limit.packet_cost, most.packets),
        };
    }
    let wait = byte_excess.max(packet_excess);
    Ok((wait > 0).then_some(now + wait))
}

/// A processor keeps it in 32 bits.
fn ahead(burst: u64, credit_shift: Option<u32>) -> u64 {
    credit_shift.map_or(0, |shift| (burst >> shift).min(u32::MAX.into()))
}
