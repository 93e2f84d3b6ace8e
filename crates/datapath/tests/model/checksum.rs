//! The Internet checksum, always over everything.

use std::net::IpAddr;

/// Sum of 16-bit words with the carries folded in; an odd last byte counts as the high one.
pub(crate) fn sum(bytes: &[u8]) -> u16 {
    let mut total: u64 = 0;
    for pair in bytes.chunks(2) {
        let low = pair.get(1).copied().unwrap_or(0);
        total += u64::from(u16::from_be_bytes([pair[0], low]));
    }
    fold(total)
}

fn fold(mut total: u64) -> u16 {
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    total as u16
}

/// The pseudo-header that TCP, UDP, DCCP and ICMPv6 add to what they sum.
pub(crate) fn pseudo_header(
    source: IpAddr,
    destination: IpAddr,
    protocol: u8,
    length: usize,
) -> Vec<u8> {
    let mut bytes = Vec::new();
    for address in [source, destination] {
        match address {
            IpAddr::V4(address) => bytes.extend(address.octets()),
            IpAddr::V6(address) => bytes.extend(address.octets()),
        }
    }
    bytes.extend((length as u32).to_be_bytes());
    bytes.extend([0, 0, 0, protocol]);
    bytes
}

/// The checksum that belongs at `at` in `new`, given what it was in `old`.
///
/// A right checksum makes everything sum up to 0xffff. The path never repairs a wrong one: whatever
/// everything summed up to before, it does after. Both are what comes before `at` (pseudo-header
/// included), the field, and what follows, as much of it as there is.
pub(crate) fn carried_over(old: &[u8], new: &[u8], at: usize) -> u16 {
    let error = !sum(old);
    let mut without = new.to_vec();
    without[at..at + 2].fill(0);
    !fold(u64::from(sum(&without)) + u64::from(error))
}

/// The right checksum for bytes whose own field is zero.
pub(crate) fn of(bytes: &[u8]) -> u16 {
    !sum(bytes)
}

/// Whether bytes with their checksum in them add up.
pub(crate) fn holds(bytes: &[u8]) -> bool {
    sum(bytes) == 0xffff
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_from_rfc_1071s_neighbourhood_adds_up() {
        // The IPv4 header that most textbooks use.
        let header = [
            0x45, 0x00, 0x00, 0x73, 0x00, 0x00, 0x40, 0x00, 0x40, 0x11, 0xb8, 0x61, 0xc0, 0xa8,
            0x00, 0x01, 0xc0, 0xa8, 0x00, 0xc7,
        ];
        assert!(holds(&header));
        let mut without = header;
        without[10..12].fill(0);
        assert_eq!(of(&without), 0xb861);
        let mut changed = header;
        changed[8] = 63;
        let fixed = carried_over(&header, &changed, 10);
        changed[10..12].copy_from_slice(&fixed.to_be_bytes());
        assert!(holds(&changed));
    }
}
