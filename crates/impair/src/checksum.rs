//! The Internet checksum (RFC 1071).

/// The ones' complement sum of 16-bit words, the last one filled up with a zero; what came before is in `sum`.
#[must_use]
pub(crate) fn sum(sum: u32, bytes: &[u8]) -> u32 {
    let words = bytes.chunks(2).map(|word| match *word {
        [high, low] => u32::from(u16::from_be_bytes([high, low])),
        [high] => u32::from(high) << 8,
        _ => 0,
    });
    words.fold(sum, |sum, word| {
        let sum = sum + word;
        (sum & 0xffff) + (sum >> 16)
    })
}

/// The checksum over what was summed up.
#[must_use]
pub(crate) fn finish(sum: u32) -> u16 {
    let folded = (sum & 0xffff) + (sum >> 16);
    let folded = (folded & 0xffff) + (folded >> 16);
    !u16::try_from(folded & 0xffff).unwrap_or(0)
}

/// The checksum after `old` became `new`, both of an even number of bytes at an even place: RFC 1624, equation 3.
#[must_use]
pub(crate) fn updated(checksum: u16, old: &[u8], new: &[u8]) -> u16 {
    // A sum's complement is the sum of complements.
    let without_old = u32::from(!checksum) + u32::from(finish(sum(0, old)));
    finish(sum(without_old, new))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The example of RFC 1071 §3: the sum is ddf2.
    #[test]
    fn the_rfcs_example_comes_out() {
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(finish(sum(0, &bytes)), !0xddf2);
        assert_eq!(sum(0, &[0xab]), 0xab00);
    }

    proptest! {
        #[test]
        fn an_update_is_the_same_as_a_new_sum(
            mut bytes in prop::collection::vec(any::<u8>(), 12..40),
            new in any::<[u8; 4]>(),
        ) {
            bytes[0] = 1;
            let before = finish(sum(0, &bytes));
            let old: [u8; 4] = bytes[4..8].try_into().unwrap();
            bytes[4..8].copy_from_slice(&new);
            prop_assert_eq!(updated(before, &old, &new), finish(sum(0, &bytes)));
        }
    }
}
