//! Changing headers in place, with the checksums that belong to them.
//!
//! All functions take a frame and what [`parse`](crate::classify::parse) found in it, accept any bytes, and leave a
//! frame alone in which they don't find what they need. Checksums are updated by difference (RFC 1624), so one that was
//! wrong stays as wrong as it was, or made anew.
//!
//! ```
//! use sandwire_engine::apps::Filter;
//! use sandwire_engine::{classify, rewrite};
//!
//! // A router's work: what has come too far goes no further, and nobody sends too large segments.
//! let router = Filter::new(|packet| {
//!     let Some(ip) = classify::parse(packet.bytes()).ip else {
//!         return false;
//!     };
//!     rewrite::clamp_mss(packet.bytes_mut(), &ip, 1360);
//!     rewrite::decrement_ttl(packet.bytes_mut(), &ip).is_some()
//! });
//! ```

#![forbid(unsafe_code)]

use std::net::IpAddr;

use crate::classify::{Fragment, ICMP, ICMPV6, IpHeaders, IpVersion, TCP, UDP};

/// Takes one off the TTL or hop limit; what is left. `None` if nothing would be: the frame is as it was then, and must
/// go no further.
pub fn decrement_ttl(frame: &mut [u8], ip: &IpHeaders) -> Option<u8> {
    let packet = frame.get_mut(ip.offset..)?;
    if ip.version == IpVersion::V6 {
        let limit = packet.get_mut(IPV6_HOP_LIMIT)?;
        *limit = limit.checked_sub(1).filter(|left| *left > 0)?;
        return Some(*limit);
    }
    let left = packet
        .get(IPV4_TTL)?
        .checked_sub(1)
        .filter(|left| *left > 0)?;
    replace(packet, IPV4_TTL, &[left], IPV4_CHECKSUM)?;
    Some(left)
}

/// Lowers the maximum segment size that a TCP SYN asks for to `mss`; whether it was higher. The segments that come back
/// are then no larger.
pub fn clamp_mss(frame: &mut [u8], ip: &IpHeaders, mss: u16) -> bool {
    if ip.protocol != TCP || ip.fragment == Fragment::Later {
        return false;
    }
    let Some(segment) = frame.get_mut(ip.payload_offset..ip.end) else {
        return false;
    };
    if segment
        .get(TCP_FLAGS)
        .is_none_or(|flags| flags & TCP_SYN == 0)
    {
        return false;
    }
    let Some(at) = mss_option(segment) else {
        return false;
    };
    let asked = u16::from_be_bytes([segment[at], segment[at + 1]]);
    asked > mss && replace(segment, at, &mss.to_be_bytes(), TCP_CHECKSUM).is_some()
}

/// Computes the checksums of the IPv4 header and of TCP, UDP, ICMP or ICMPv6 anew. False if that of what the packet
/// carries wasn't: it is only a fragment or cut short, another protocol, on its way by an IPv6 routing header, or a UDP
/// datagram without checksum, which stays one.
pub fn complete_checksums(frame: &mut [u8], ip: &IpHeaders) -> bool {
    if ip.version == IpVersion::V4
        && let Some(header) = frame.get_mut(ip.offset..ip.payload_offset)
        && let Some(field) = header.get_mut(IPV4_CHECKSUM..IPV4_CHECKSUM + 2)
    {
        field.fill(0);
        let checksum = !fold(sum(0, header));
        header[IPV4_CHECKSUM..IPV4_CHECKSUM + 2].copy_from_slice(&checksum.to_be_bytes());
    }
    let Some(covered) = Covered::of(frame, ip) else {
        return false;
    };
    let at = covered.start + covered.field;
    if is_absent(frame, ip, at) {
        return false;
    }
    frame[at..at + 2].fill(0);
    let checksum = covered.checksum(frame, ip);
    frame[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
    true
}

/// Whether the checksums are right: of the IPv4 header, and of what the packet carries as far as
/// [`complete_checksums`] could compute it.
#[must_use]
pub fn checksums_are_right(frame: &[u8], ip: &IpHeaders) -> bool {
    if ip.version == IpVersion::V4 {
        let header = frame.get(ip.offset..ip.payload_offset).unwrap_or_default();
        if fold(sum(0, header)) != u16::MAX {
            return false;
        }
    }
    let Some(covered) = Covered::of(frame, ip) else {
        return true;
    };
    let bytes = &frame[covered.start..covered.end];
    is_absent(frame, ip, covered.start + covered.field)
        || fold(sum(covered.pseudo_header(ip), bytes)) == u16::MAX
}

/// The checksum after `old` has become `new` among the bytes that it covers. Both begin at an even place and have the
/// same even length.
#[must_use]
pub fn updated_checksum(checksum: u16, old: &[u8], new: &[u8]) -> u16 {
    // RFC 1624, equation 3: HC' = ~(~HC + ~m + m'). The sum of ~m is that of as many words of ones, less that of m.
    let ones = old.len().div_ceil(2) as u64 * u64::from(u16::MAX);
    !fold(sum(u64::from(!checksum) + ones - sum(0, old), new))
}

/// Puts `new` at a place of `bytes`, whose checksum has its field at `field`; both are counted from where the checksum
/// begins to count.
fn replace(bytes: &mut [u8], at: usize, new: &[u8], field: usize) -> Option<()> {
    let start = at & !1;
    let end = (at + new.len()).next_multiple_of(2);
    // An odd last byte counts as if a zero followed it.
    let padded = |bytes: &[u8]| -> Option<[u8; REPLACED_BYTES_MAX]> {
        let part = bytes.get(start..end.min(bytes.len()))?;
        let mut padded = [0; REPLACED_BYTES_MAX];
        padded.get_mut(..part.len())?.copy_from_slice(part);
        Some(padded)
    };
    let before = padded(bytes)?;
    let checksum = u16::from_be_bytes(*bytes.get(field..)?.first_chunk()?);
    bytes.get_mut(at..at + new.len())?.copy_from_slice(new);
    let after = padded(bytes)?;
    let checksum = updated_checksum(checksum, &before, &after);
    bytes
        .get_mut(field..field + 2)?
        .copy_from_slice(&checksum.to_be_bytes());
    Some(())
}

/// Where the value of a segment's MSS option is.
fn mss_option(segment: &[u8]) -> Option<usize> {
    let header_bytes = usize::from(*segment.get(TCP_DATA_OFFSET)? >> 4) * 4;
    let options = segment.get(..header_bytes)?;
    let mut at = TCP_BYTES_MIN;
    loop {
        let length = match *options.get(at)? {
            TCP_OPTION_END => return None,
            TCP_OPTION_NOTHING => 1,
            kind => {
                let length = usize::from(*options.get(at + 1)?);
                if kind == TCP_OPTION_MSS && length == 4 && options.len() >= at + 4 {
                    return Some(at + 2);
                }
                length.max(2)
            }
        };
        at += length;
    }
}

/// What the checksum of a packet's payload covers.
#[derive(Debug)]
struct Covered {
    start: usize,
    end: usize,
    /// Where the checksum is, from `start`.
    field: usize,
}

impl Covered {
    fn of(frame: &[u8], ip: &IpHeaders) -> Option<Self> {
        if ip.fragment != Fragment::Whole || ip.is_cut_short(frame) || ip.is_source_routed(frame) {
            return None;
        }
        let start = ip.payload_offset;
        let field = match (ip.protocol, ip.version) {
            (TCP, _) => TCP_CHECKSUM,
            (UDP, _) => UDP_CHECKSUM,
            (ICMP, IpVersion::V4) | (ICMPV6, IpVersion::V6) => ICMP_CHECKSUM,
            _ => return None,
        };
        let payload = frame.get(start..ip.end)?;
        let length = if ip.protocol == UDP {
            usize::from(u16::from_be_bytes(*payload.get(4..)?.first_chunk()?))
        } else {
            payload.len()
        };
        let fits = length <= payload.len() && length >= field + 2;
        fits.then_some(Self {
            start,
            end: start + length,
            field,
        })
    }

    /// The checksum of what is covered, whose field must be zero. Never zero itself, which in UDP says that there is
    /// none; to a receiver both zeros are the same.
    fn checksum(&self, frame: &[u8], ip: &IpHeaders) -> u16 {
        match !fold(sum(self.pseudo_header(ip), &frame[self.start..self.end])) {
            0 => u16::MAX,
            checksum => checksum,
        }
    }

    /// The sum of addresses, length and protocol, which all but ICMP cover.
    fn pseudo_header(&self, ip: &IpHeaders) -> u64 {
        if ip.protocol == ICMP {
            return 0;
        }
        let mut total = u64::from(ip.protocol) + (self.end - self.start) as u64;
        for address in [ip.source, ip.destination] {
            total = match address {
                IpAddr::V4(address) => sum(total, &address.octets()),
                IpAddr::V6(address) => sum(total, &address.octets()),
            };
        }
        total
    }
}

/// Whether the checksum at that place is none: a UDP datagram in IPv4 may go without.
fn is_absent(frame: &[u8], ip: &IpHeaders, at: usize) -> bool {
    ip.protocol == UDP && ip.version == IpVersion::V4 && frame[at..at + 2] == [0, 0]
}

impl IpHeaders {
    /// Whether the packet is longer than the frame.
    fn is_cut_short(&self, frame: &[u8]) -> bool {
        let (at, header_bytes) = match self.version {
            IpVersion::V4 => (2, 0),
            IpVersion::V6 => (4, IPV6_BYTES),
        };
        let length = frame.get(self.offset + at..).and_then(<[u8]>::first_chunk);
        let length = length.map_or(usize::MAX, |length| {
            usize::from(u16::from_be_bytes(*length))
        });
        self.end.saturating_sub(self.offset) < length.saturating_add(header_bytes)
    }

    /// Whether an IPv6 routing header says that the destination is another one in the end, which checksums count.
    fn is_source_routed(&self, frame: &[u8]) -> bool {
        if self.version == IpVersion::V4 {
            return false;
        }
        let mut next = frame.get(self.offset + 6).copied();
        let mut at = self.offset + IPV6_BYTES;
        while at < self.payload_offset {
            let Some(&[following, length, _, segments_left]) =
                frame.get(at..).and_then(<[u8]>::first_chunk)
            else {
                return true;
            };
            at += match next {
                Some(EXTENSION_ROUTING) if segments_left > 0 => return true,
                Some(EXTENSION_FRAGMENT) => 8,
                Some(EXTENSION_AUTHENTICATION) => (usize::from(length) + 2) * 4,
                _ => (usize::from(length) + 1) * 8,
            };
            next = Some(following);
        }
        false
    }
}

/// Adds the 16-bit words of `bytes`; an odd last byte counts as if a zero followed it.
fn sum(before: u64, bytes: &[u8]) -> u64 {
    let pairs = bytes.chunks_exact(2);
    let last = pairs.remainder().first();
    let words = pairs.map(|pair| u64::from(u16::from_be_bytes([pair[0], pair[1]])));
    before + words.sum::<u64>() + last.map_or(0, |byte| u64::from(*byte) << 8)
}

/// The 16-bit sum with all carries.
fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap_or(u16::MAX)
}

const IPV4_TTL: usize = 8;
const IPV4_CHECKSUM: usize = 10;
const IPV6_HOP_LIMIT: usize = 7;
const IPV6_BYTES: usize = 40;
const EXTENSION_ROUTING: u8 = 43;
const EXTENSION_FRAGMENT: u8 = 44;
const EXTENSION_AUTHENTICATION: u8 = 51;
const TCP_BYTES_MIN: usize = 20;
const TCP_DATA_OFFSET: usize = 12;
const TCP_FLAGS: usize = 13;
const TCP_SYN: u8 = 2;
const TCP_CHECKSUM: usize = 16;
const TCP_OPTION_END: u8 = 0;
const TCP_OPTION_NOTHING: u8 = 1;
const TCP_OPTION_MSS: u8 = 2;
const UDP_CHECKSUM: usize = 6;
const ICMP_CHECKSUM: usize = 2;
/// Two bytes at an odd place lie in two words.
const REPLACED_BYTES_MAX: usize = 4;

#[cfg(test)]
mod tests;
