//! The Internet checksum (RFC 1071), in the byte order of memory: neither sums nor what is folded of them need be
//! swapped, since the sum of swapped words is the swapped sum.

/// Adds the 16-bit words of `bytes`, as memory holds them, to `sum`; an odd last byte counts as if a zero followed it.
/// `bytes` must begin at an even place of what is summed.
#[must_use]
pub fn add(sum: u64, bytes: &[u8]) -> u64 {
    let mut sum = sum;
    let mut words = bytes.chunks_exact(4);
    for word in &mut words {
        let mut four = [0; 4];
        four.copy_from_slice(word);
        sum += u64::from(u32::from_ne_bytes(four));
    }
    let mut last = [0; 4];
    let rest = words.remainder();
    last[..rest.len()].copy_from_slice(rest);
    sum + u64::from(u32::from_ne_bytes(last))
}

/// The checksum field that belongs to a sum, as its two bytes are in memory. Never zero: to a receiver both zeros
/// are the same, but in UDP a field of 0 says that there is none.
#[must_use]
pub fn field(sum: u64) -> [u8; 2] {
    match !fold(sum) {
        0 => [0xff, 0xff],
        field => field.to_ne_bytes(),
    }
}

/// The checksum field of an IPv4 header, whose own field must be zero.
#[must_use]
pub fn ipv4_header(header: &[u8]) -> [u8; 2] {
    (!fold(add(0, header))).to_ne_bytes()
}

/// The checksum of SCTP over a packet whose own field is zero, as the field has it (RFC 9260, appendix A: CRC32c).
#[must_use]
pub fn crc32c(bytes: &[u8]) -> [u8; 4] {
    let step = |crc: u32, byte: &u8| {
        let place = usize::from(crc.to_le_bytes()[0] ^ byte);
        (crc >> 8) ^ CRC32C[place]
    };
    (!bytes.iter().fold(!0, step)).to_le_bytes()
}

/// What each last byte does to the rest.
const CRC32C: [u32; 256] = {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut crc, mut bit) = (byte, 0);
        while bit < 8 {
            crc = (crc >> 1) ^ (POLYNOMIAL * (crc & 1));
            bit += 1;
        }
        table[byte as usize] = crc;
        byte += 1;
    }
    table
};

/// The 16-bit sum with all carries.
fn fold(sum: u64) -> u16 {
    let mut sum = (sum & 0xffff_ffff) + (sum >> 32);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    #[expect(clippy::cast_possible_truncation, reason = "the loop ends below 2^16")]
    let folded = sum as u16;
    folded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_value_of_crc32c_is_the_known_one() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283_u32.to_le_bytes());
        assert_eq!(crc32c(&[0; 32]), [0xaa, 0x36, 0x91, 0x8a], "RFC 3720, B.4");
    }

    #[test]
    fn the_header_of_a_known_packet_has_its_known_checksum() {
        // The worked example of an IPv4 header in many textbooks: the sum is 0xb861.
        let header = [
            0x45, 0x00, 0x00, 0x73, 0x00, 0x00, 0x40, 0x00, 0x40, 0x11, 0x00, 0x00, 0xc0, 0xa8,
            0x00, 0x01, 0xc0, 0xa8, 0x00, 0xc7,
        ];
        assert_eq!(ipv4_header(&header), [0xb8, 0x61]);
    }

    #[test]
    fn sums_of_parts_and_of_odd_lengths_agree_with_word_by_word() {
        let bytes: Vec<u8> = (0..=255u8).map(|byte| byte.wrapping_mul(167)).collect();
        for length in 0..=bytes.len() {
            let mut slow = 0u32;
            for pair in bytes[..length].chunks(2) {
                let word = u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]);
                slow += u32::from(word);
                slow = (slow & 0xffff) + (slow >> 16);
            }
            let parts = add(
                add(0, &bytes[..length / 2 * 2]),
                &bytes[length / 2 * 2..length],
            );
            assert_eq!(
                fold(parts).to_ne_bytes(),
                u16::try_from(slow).unwrap().to_be_bytes()
            );
        }
    }

    #[test]
    fn a_checksum_of_zero_is_written_as_all_ones() {
        assert_eq!(field(0xffff), [0xff, 0xff]);
        assert_eq!(field(0), [0xff, 0xff]);
    }
}
