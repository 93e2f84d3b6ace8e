//! Limits as they are written on the command line: `100mbit,burst=1mib` and `20k,burst=64`.

use std::{fmt, str::FromStr};

/// Bits per second, with the bytes that may exceed them at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BitLimit {
    /// No limit if absent.
    pub(crate) bits_per_second: Option<u64>,
    pub(crate) burst_bytes: Option<u64>,
}

/// Packets per second, with the packets that may exceed them at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PacketLimit {
    /// No limit if absent.
    pub(crate) packets_per_second: Option<u64>,
    pub(crate) burst_packets: Option<u64>,
}

const NONE: &str = "none";
/// Units of rates, the longest ending first; all decimal.
const BITS: &[(&str, u64)] = &[
    ("tbit", 1_000_000_000_000),
    ("gbit", 1_000_000_000),
    ("mbit", 1_000_000),
    ("kbit", 1000),
    ("bit", 1),
];
const BYTES: &[(&str, u64)] = &[
    ("gib", 1 << 30),
    ("mib", 1 << 20),
    ("kib", 1 << 10),
    ("gb", 1_000_000_000),
    ("mb", 1_000_000),
    ("kb", 1000),
    ("b", 1),
    ("", 1),
];
const PACKETS: &[(&str, u64)] = &[("m", 1_000_000), ("k", 1000), ("", 1)];

impl FromStr for BitLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || {
            format!(
                "'{text}' is not a limit: write a rate with kbit, mbit or gbit, as 100mbit, \
                 100mbit,burst=1mib or none"
            )
        };
        let (rate, burst) = parts(text, BITS, BYTES).ok_or_else(refuse)?;
        Ok(Self {
            bits_per_second: rate,
            burst_bytes: burst,
        })
    }
}

impl FromStr for PacketLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || {
            format!(
                "'{text}' is not a limit: write packets per second, as 20000, 20k,burst=64 or none"
            )
        };
        let (rate, burst) = parts(text, PACKETS, PACKETS).ok_or_else(refuse)?;
        Ok(Self {
            packets_per_second: rate,
            burst_packets: burst,
        })
    }
}

impl fmt::Display for BitLimit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bits_per_second {
            None => formatter.write_str(NONE),
            Some(rate) => write_exact(formatter, rate, BITS),
        }?;
        match self.burst_bytes {
            None => Ok(()),
            Some(burst) => {
                formatter.write_str(",burst=")?;
                write_exact(formatter, burst, &BYTES[..3])
            }
        }
    }
}

impl fmt::Display for PacketLimit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.packets_per_second {
            None => formatter.write_str(NONE),
            Some(rate) => write!(formatter, "{rate}"),
        }?;
        match self.burst_packets {
            None => Ok(()),
            Some(burst) => write!(formatter, ",burst={burst}"),
        }
    }
}

/// `RATE[,burst=SIZE]` or `none`.
fn parts(
    text: &str,
    rates: &[(&str, u64)],
    bursts: &[(&str, u64)],
) -> Option<(Option<u64>, Option<u64>)> {
    if text == NONE {
        return Some((None, None));
    }
    let (rate, burst) = match text.split_once(',') {
        None => (text, None),
        Some((rate, burst)) => (rate, Some(burst.strip_prefix("burst=")?)),
    };
    let burst = match burst {
        None => None,
        Some(burst) => Some(quantity(burst, bursts)?),
    };
    Some((Some(quantity(rate, rates)?), burst))
}

/// A decimal number with a unit, above zero. Its fraction must come to a whole number.
fn quantity(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let text = text.to_ascii_lowercase();
    let (number, unit) = units
        .iter()
        .find_map(|(ending, unit)| Some((text.strip_suffix(ending)?, *unit)))?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|d| d.is_ascii_digit());
    if !is_number(whole) || !is_number(fraction) {
        return None;
    }
    let scale = 10u64.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let parts = u128::from(fraction.parse::<u64>().ok()?) * u128::from(unit);
    if !parts.is_multiple_of(u128::from(scale)) {
        return None;
    }
    let fraction = u64::try_from(parts / u128::from(scale)).ok()?;
    let whole: u64 = whole.parse().ok()?;
    let value = whole.checked_mul(unit)?.checked_add(fraction)?;
    (value > 0).then_some(value)
}

/// By the largest unit that leaves a whole number.
fn write_exact(
    formatter: &mut fmt::Formatter<'_>,
    value: u64,
    units: &[(&str, u64)],
) -> fmt::Result {
    match units
        .iter()
        .find(|(_, unit)| value > 0 && value.is_multiple_of(*unit))
    {
        Some((name, unit)) => write!(formatter, "{}{name}", value / unit),
        None => write!(formatter, "{value}"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bits(text: &str) -> (Option<u64>, Option<u64>) {
        let limit: BitLimit = text.parse().unwrap();
        (limit.bits_per_second, limit.burst_bytes)
    }

    #[test]
    fn rates_are_read_with_their_units_and_bursts() {
        assert_eq!(bits("100mbit"), (Some(100_000_000), None));
        assert_eq!(
            bits("1.5Gbit,burst=2MiB"),
            (Some(1_500_000_000), Some(2 << 20))
        );
        assert_eq!(bits("8000bit,burst=1500"), (Some(8000), Some(1500)));
        assert_eq!(bits("none"), (None, None));
        let limit: PacketLimit = "20k,burst=64".parse().unwrap();
        assert_eq!(
            (limit.packets_per_second, limit.burst_packets),
            (Some(20_000), Some(64))
        );
    }

    #[test]
    fn what_is_no_limit_is_refused() {
        for text in [
            "",
            "100",
            "mbit",
            "0mbit",
            "-1mbit",
            "+1mbit",
            "1.mbit",
            ".5mbit",
            "1.5bit",
            "1e3mbit",
            "100 mbit",
            "100mbit,",
            "100mbit,burst",
            "100mbit,burst=",
            "100mbit,burst=0",
            "100mbit,burst=1xb",
            "100mbit,peak=1",
            "99999999999999999999bit",
            "99999999999tbit",
            "none,burst=1",
            "1.00000000000000000000mbit",
            "é",
        ] {
            assert!(text.parse::<BitLimit>().is_err(), "{text:?} was taken");
        }
        for text in ["", "k", "1mbit", "0", "1.5", "5,burst=1kib"] {
            assert!(text.parse::<PacketLimit>().is_err(), "{text:?} was taken");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parsers_panic(text in "\\PC{0,40}") {
            let _ = text.parse::<BitLimit>();
            let _ = text.parse::<PacketLimit>();
        }

        #[test]
        fn a_limit_reads_back_as_written(rate in 1u64.., burst in proptest::option::of(1u64..)) {
            let limit = BitLimit { bits_per_second: Some(rate), burst_bytes: burst };
            prop_assert_eq!(limit.to_string().parse(), Ok(limit));
            let limit = PacketLimit { packets_per_second: Some(rate), burst_packets: burst };
            prop_assert_eq!(limit.to_string().parse(), Ok(limit));
        }

        #[test]
        fn near_misses_are_read_exactly_or_refused(
            whole in 0u64..2_000_000,
            fraction in "[0-9]{0,22}",
            unit in prop::sample::select(vec!["bit", "kbit", "mbit", "gbit", "tbit"]),
        ) {
            let text = if fraction.is_empty() { format!("{whole}{unit}") } else { format!("{whole}.{fraction}{unit}") };
            if let Ok(limit) = text.parse::<BitLimit>() {
                let scale = BITS.iter().find(|(name, _)| *name == unit).unwrap().1;
                let rate = limit.bits_per_second.unwrap();
                prop_assert!(rate > 0 && rate / scale == whole);
            }
        }
    }
}
