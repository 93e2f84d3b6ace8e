//! A line that carries only packets up to a size, as a router in front of it treats the others.
//!
//! What counts is the packet from its IP header on; of a frame without IP, all behind the Ethernet header and
//! its VLAN tags. Too large an IPv4 packet is fragmented (RFC 791 §3.2) or dropped; with "don't fragment", and all else,
//! it is dropped. The sender of a dropped one is told if it is so asked, by ICMP's "fragmentation needed" (RFC 1191 §4)
//! where "don't fragment" was set and by ICMPv6's "packet too big" (RFC 4443 §3.2).
//!
//! An answer comes from the address that the packet was sent to, as we have none of our own and that one
//! finds its way back. There is none where RFC 1122 §3.2.2, RFC 4443 §2.4 forbid it: to an error, to a later fragment,
//! to or from what isn't one host's address. Nor more than one per millisecond, since answers must be limited.

mod answer;

use sandwire_engine::classify::{self, IpHeaders, IpVersion};

use crate::{Nanoseconds, checksum};

/// What is too large, and what becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MtuModel {
    /// The largest packet, in bytes from its IP header on.
    pub bytes: u32,
    /// Whether the sender is told, by ICMP's "fragmentation needed" or ICMPv6's "packet too big". If not,
    /// the line is a path MTU black hole.
    pub answer: bool,
    /// What becomes of IPv4 packets that may be fragmented.
    pub without_df: WithoutDf,
}

/// What becomes of IPv4 packets whose "don't fragment" bit isn't set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WithoutDf {
    /// They are fragmented, as by any router (RFC 1812 §5.2.7).
    #[default]
    Fragment,
    /// They are dropped without an answer, as by many tunnels and clouds.
    Drop,
}

/// The smallest MTU that makes sense, that of IPv4 (RFC 791 §3.2). IPv6 needs 1280: hosts don't go below for an answer.
pub const MTU_MIN: u32 = 68;

/// Nanoseconds between two answers, at least.
const ANSWER_GAP: Nanoseconds = 1_000_000;

/// What becomes of one packet.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Passage {
    Fits,
    /// These frames take its place.
    Fragments(Vec<Vec<u8>>),
    /// It is dropped, and this frame is sent back.
    Refused(Option<Vec<u8>>),
}

/// When answers may be sent.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    next: Nanoseconds,
}

impl MtuModel {
    /// What becomes of this frame that comes now.
    pub(crate) fn passage(&self, frame: &[u8], now: Nanoseconds, answers: &mut Answers) -> Passage {
        let mtu = usize::try_from(self.bytes).unwrap_or(usize::MAX);
        // Most frames: no need to read their headers.
        if frame.len() <= mtu.saturating_add(ETHERNET_BYTES) {
            return Passage::Fits;
        }
        let headers = classify::parse(frame);
        let Some(ip) = headers.ip else {
            let start = headers
                .ethernet
                .map_or(0, |ethernet| ethernet.payload_offset);
            return if frame.len() - start <= mtu {
                Passage::Fits
            } else {
                Passage::Refused(None)
            };
        };
        if ip.end - ip.offset <= mtu {
            return Passage::Fits;
        }
        let may_fragment =
            ip.version == IpVersion::V4 && frame[ip.offset + FLAGS] & DONT_FRAGMENT == 0;
        if may_fragment {
            return match self.without_df {
                WithoutDf::Drop => Passage::Refused(None),
                WithoutDf::Fragment => {
                    fragments(frame, &ip, mtu).map_or(Passage::Refused(None), Passage::Fragments)
                }
            };
        }
        if !self.answer || now < answers.next {
            return Passage::Refused(None);
        }
        let answer = answer::too_big(frame, &ip, self.bytes);
        if answer.is_some() {
            answers.next = now.saturating_add(ANSWER_GAP);
        }
        Passage::Refused(answer)
    }
}

/// The parts of an IPv4 packet; none if the MTU has no room for eight bytes of data.
fn fragments(frame: &[u8], ip: &IpHeaders, mtu: usize) -> Option<Vec<Vec<u8>>> {
    let header = &frame[ip.offset..ip.payload_offset];
    let data = frame.get(ip.payload_offset..ip.end)?;
    let bytes = mtu.checked_sub(header.len())? / 8 * 8;
    if bytes == 0 {
        return None;
    }
    let place = u16::from_be_bytes([header[FLAGS], header[FLAGS + 1]]);
    let (is_last, first_unit) = (place & MORE_FRAGMENTS == 0, place & PLACE_MASK);
    let later_header = header_of_later(header);
    let parts = data.chunks(bytes).count();
    (0..)
        .zip(data.chunks(bytes))
        .map(|(part, data)| {
            let header = if part == 0 { header } else { &later_header };
            let unit = usize::from(first_unit) + part * bytes / 8;
            let unit = u16::try_from(unit)
                .ok()
                .filter(|unit| *unit <= PLACE_MASK)?;
            let more = if is_last && part + 1 == parts {
                0
            } else {
                MORE_FRAGMENTS
            };
            let total = u16::try_from(header.len() + data.len()).ok()?;
            let mut fragment = [&frame[..ip.offset], header, data].concat();
            let header = &mut fragment[ip.offset..ip.offset + header.len()];
            header[TOTAL..TOTAL + 2].copy_from_slice(&total.to_be_bytes());
            header[FLAGS..FLAGS + 2].copy_from_slice(&(unit | more).to_be_bytes());
            header[CHECKSUM..CHECKSUM + 2].fill(0);
            let checksum = checksum::finish(checksum::sum(0, header));
            header[CHECKSUM..CHECKSUM + 2].copy_from_slice(&checksum.to_be_bytes());
            Some(fragment)
        })
        .collect()
}

/// The IPv4 header of fragments after the first: only options with the "copied" bit (RFC 791 §3.1).
fn header_of_later(header: &[u8]) -> Vec<u8> {
    let (fixed, mut options) = header.split_at(IPV4_BYTES.min(header.len()));
    let mut later = fixed.to_vec();
    while let [kind, rest @ ..] = options {
        let bytes = match (*kind, rest.first()) {
            (0, _) => break,
            (1, _) => 1,
            (_, Some(&bytes)) if bytes >= 2 => usize::from(bytes),
            _ => break,
        };
        let Some((option, after)) = options.split_at_checked(bytes) else {
            break;
        };
        if kind & 0x80 != 0 {
            later.extend_from_slice(option);
        }
        options = after;
    }
    later.resize(later.len().next_multiple_of(4), 0);
    later[0] = 0x40 | u8::try_from(later.len() / 4).unwrap_or(5);
    later
}

const ETHERNET_BYTES: usize = 14;
const IPV4_BYTES: usize = 20;
/// Places in an IPv4 header.
const TOTAL: usize = 2;
const FLAGS: usize = 6;
const CHECKSUM: usize = 10;
const DONT_FRAGMENT: u8 = 0x40;
const MORE_FRAGMENTS: u16 = 0x2000;
const PLACE_MASK: u16 = 0x1fff;

#[cfg(test)]
mod tests;
