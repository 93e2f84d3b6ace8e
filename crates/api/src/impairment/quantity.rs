//! Times, shares, rates, limits and lists of packets, as the texts that people write.
//!
//! Values are whole numbers of the smallest unit, so what is written, read and written again is the same. A number
//! may be out of the range that makes sense, so that whoever checks it ([`super::check`]) can say of which rule and field it
//! is; a text that is no quantity is refused here.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{ObjectBuilder, RefOr, Schema, Type},
};

/// A length of time: `50ms`, `1.5s`, `100us`, `2min`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TimeSpan {
    /// Nanoseconds; below zero only until it is checked.
    pub nanoseconds: i64,
}

/// A share of packets, or a probability: `1%`, `0.05%`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Percent {
    /// Parts in 1,000,000,000; outside 0 and that only until it is checked.
    pub billionths: i64,
}

/// Bits per second: `10mbit`, `1.5gbit`, `512kbit`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BitRate {
    /// Bits per second.
    pub bits_per_second: u64,
}

/// How much a queue holds: `100 packets`, `64 kB`, or both: `100 packets 64 kB`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct QueueLimit {
    /// Packets, at most.
    pub packets: Option<u64>,
    /// Bytes, at most.
    pub bytes: Option<u64>,
}

/// Packets from `first` to `last`, counted from 0 among those that the rule matched: `17`, `20-29`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PacketRange {
    /// The first.
    pub first: u64,
    /// The last.
    pub last: u64,
}

/// Ports from `first` to `last`: `53`, `8000-8999`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ports {
    /// The first.
    pub first: u16,
    /// The last.
    pub last: u16,
}

/// Why a text is no quantity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is no {what}: {hint}")]
pub struct InvalidQuantity {
    /// What was given, cut to a printable length.
    pub text: String,
    /// What it was to be.
    pub what: &'static str,
    /// What to write.
    pub hint: &'static str,
}

/// Parts of a whole.
pub(crate) const WHOLE: i64 = 1_000_000_000;

impl TimeSpan {
    /// That many milliseconds.
    #[must_use]
    pub const fn milliseconds(count: i64) -> Self {
        Self {
            nanoseconds: count.saturating_mul(1_000_000),
        }
    }

    /// Nanoseconds; none if it is below zero.
    #[must_use]
    pub fn as_nanoseconds(self) -> u64 {
        u64::try_from(self.nanoseconds).unwrap_or(0)
    }
}

impl Percent {
    /// That many parts in 100,000: 1% is 1000.
    #[must_use]
    pub const fn thousandths(count: i64) -> Self {
        Self {
            billionths: count.saturating_mul(WHOLE / 100_000),
        }
    }

    /// All of them.
    #[must_use]
    pub const fn all() -> Self {
        Self { billionths: WHOLE }
    }

    /// The share as a number, 1 being all.
    #[must_use]
    pub fn share(self) -> f64 {
        #[expect(
            clippy::cast_precision_loss,
            reason = "exact up to 2^53 billionths, where 1 billion is all"
        )]
        let parts = self.billionths as f64;
        parts / 1e9
    }
}

impl FromStr for TimeSpan {
    type Err = InvalidQuantity;

    fn from_str(text: &str) -> Result<Self, InvalidQuantity> {
        const HINT: &str = "write a number with ns, us, ms, s, min or h: 50ms, 1.5s";
        let refuse = || refusal(text, "time", HINT);
        let (number, unit) = split_unit(text);
        let factor = match unit {
            "ns" => 1,
            "us" | "µs" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "min" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            "" if number == "0" => 1,
            _ => return Err(refuse()),
        };
        let nanoseconds = decimal(number, factor).ok_or_else(refuse)?;
        Ok(Self { nanoseconds })
    }
}

impl FromStr for Percent {
    type Err = InvalidQuantity;

    fn from_str(text: &str) -> Result<Self, InvalidQuantity> {
        let refuse = || {
            let hint = "write a number with %, at most 7 digits after the point: 1%, 0.05%";
            refusal(text, "share", hint)
        };
        let (number, unit) = split_unit(text);
        if !(unit == "%" || unit.is_empty() && number == "0") {
            return Err(refuse());
        }
        let billionths = decimal(number, WHOLE / 100).ok_or_else(refuse)?;
        Ok(Self { billionths })
    }
}

impl FromStr for BitRate {
    type Err = InvalidQuantity;

    fn from_str(text: &str) -> Result<Self, InvalidQuantity> {
        let refuse = || {
            refusal(
                text,
                "rate",
                "write a number with bit, kbit, mbit or gbit, which mean per second: 10mbit",
            )
        };
        let (number, unit) = split_unit(text);
        let unit = unit.to_ascii_lowercase();
        let factor = match unit.strip_suffix("/s").unwrap_or(&unit) {
            "bit" => 1,
            "kbit" => 1_000,
            "mbit" => 1_000_000,
            "gbit" => 1_000_000_000,
            _ => return Err(refuse()),
        };
        let bits = decimal(number, factor).and_then(|bits| u64::try_from(bits).ok());
        let bits_per_second = bits.ok_or_else(refuse)?;
        Ok(Self { bits_per_second })
    }
}

impl FromStr for QueueLimit {
    type Err = InvalidQuantity;

    fn from_str(text: &str) -> Result<Self, InvalidQuantity> {
        let refuse = || {
            refusal(
                text,
                "limit of a queue",
                "write 100 packets, 64 kB, or 100 packets 64 kB",
            )
        };
        let mut limit = Self::default();
        let mut rest = text.trim();
        while !rest.is_empty() {
            let (number, after) = split_unit(rest);
            let after = after.trim_start();
            let end = after.find(|letter: char| !letter.is_ascii_alphabetic());
            let (unit, after) = after.split_at(end.unwrap_or(after.len()));
            let factor = match unit {
                "packets" | "packet" => 1,
                "bytes" | "byte" | "B" => 1,
                "kB" => 1_000,
                "KiB" => 1 << 10,
                "MB" => 1_000_000,
                "MiB" => 1 << 20,
                _ => return Err(refuse()),
            };
            let count = decimal(number, factor).and_then(|count| u64::try_from(count).ok());
            let count = count.ok_or_else(refuse)?;
            let place = if unit.starts_with("packet") {
                &mut limit.packets
            } else {
                &mut limit.bytes
            };
            if place.replace(count).is_some() {
                return Err(refuse());
            }
            rest = after.trim_start();
        }
        if limit == Self::default() {
            return Err(refuse());
        }
        Ok(limit)
    }
}

impl FromStr for PacketRange {
    type Err = InvalidQuantity;

    fn from_str(text: &str) -> Result<Self, InvalidQuantity> {
        let refuse = || {
            refusal(
                text,
                "packet",
                "write its number, counted from 0, or a range: 17, 20-29",
            )
        };
        let (first, last) = range(text).ok_or_else(refuse)?;
        Ok(Self { first, last })
    }
}

impl FromStr for Ports {
    type Err = InvalidQuantity;

    fn from_str(text: &str) -> Result<Self, InvalidQuantity> {
        let refuse = || refusal(text, "port", "write 53 or 8000-8999, up to 65535");
        let (first, last) = range(text).ok_or_else(refuse)?;
        let (first, last) = (u16::try_from(first), u16::try_from(last));
        let (Ok(first), Ok(last)) = (first, last) else {
            return Err(refuse());
        };
        Ok(Self { first, last })
    }
}

impl fmt::Display for TimeSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (factor, unit) = match self.nanoseconds.unsigned_abs() {
            0..1_000 => (1, "ns"),
            1_000..1_000_000 => (1_000, "us"),
            1_000_000..1_000_000_000 => (1_000_000, "ms"),
            _ => (1_000_000_000, "s"),
        };
        if self.nanoseconds == 0 {
            return f.write_str("0ms");
        }
        write_decimal(f, self.nanoseconds.into(), factor)?;
        f.write_str(unit)
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_decimal(f, self.billionths.into(), i128::from(WHOLE) / 100)?;
        f.write_str("%")
    }
}

impl fmt::Display for BitRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (factor, unit) = match self.bits_per_second {
            0..1_000 => (1, "bit"),
            1_000..1_000_000 => (1_000, "kbit"),
            1_000_000..1_000_000_000 => (1_000_000, "mbit"),
            _ => (1_000_000_000, "gbit"),
        };
        write_decimal(f, self.bits_per_second.into(), factor)?;
        f.write_str(unit)
    }
}

impl fmt::Display for QueueLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(packets) = self.packets {
            write!(f, "{packets} packets")?;
        }
        if self.packets.is_some() && self.bytes.is_some() {
            f.write_str(" ")?;
        }
        match self.bytes {
            None => Ok(()),
            Some(bytes) if bytes > 0 && bytes.is_multiple_of(1_000) => {
                write!(f, "{} kB", bytes / 1_000)
            }
            Some(bytes) => write!(f, "{bytes} bytes"),
        }
    }
}

impl fmt::Display for PacketRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_range(f, self.first, self.last)
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_range(f, self.first.into(), self.last.into())
    }
}

/// The number at the start and what follows it.
pub(crate) fn split_unit(text: &str) -> (&str, &str) {
    let is_number = |letter: char| letter.is_ascii_digit() || matches!(letter, '.' | '-' | '+');
    let end = text.find(|letter| !is_number(letter));
    let (number, unit) = text.split_at(end.unwrap_or(text.len()));
    (number, unit)
}

/// A decimal number times the factor, if that is whole and in range.
fn decimal(text: &str, factor: i64) -> Option<i64> {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, text),
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let is_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let is_cut = digits.ends_with('.') || whole.is_empty();
    if is_cut || !is_digits(whole) || !is_digits(fraction) || fraction.len() > 12 {
        return None;
    }
    let whole = i128::from(whole.parse::<i64>().ok()?);
    let scale = 10i128.pow(u32::try_from(fraction.len()).ok()?);
    let parts: i128 = if fraction.is_empty() {
        0
    } else {
        fraction.parse().ok()?
    };
    // What has no room here has none as a result either, however much of it the fraction is.
    let scaled = whole.checked_mul(scale)?.checked_add(parts)?;
    let product = scaled.checked_mul(i128::from(factor))?;
    if product % scale != 0 {
        return None;
    }
    i64::try_from(sign * (product / scale)).ok()
}

/// Writes a number of parts, of which `factor`, a power of ten, are one.
fn write_decimal(f: &mut fmt::Formatter<'_>, parts: i128, factor: i128) -> fmt::Result {
    let sign = if parts < 0 { "-" } else { "" };
    let (whole, rest) = (parts.abs() / factor, parts.abs() % factor);
    write!(f, "{sign}{whole}")?;
    if rest == 0 {
        return Ok(());
    }
    let width = usize::try_from(factor.ilog10()).unwrap_or(0);
    let digits = format!("{rest:0width$}");
    write!(f, ".{}", digits.trim_end_matches('0'))
}

fn range(text: &str) -> Option<(u64, u64)> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| {
        let is_digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<u64>().ok().filter(|_| is_digits)
    };
    let (first, last) = (number(first)?, number(last)?);
    (first <= last).then_some((first, last))
}

fn write_range(f: &mut fmt::Formatter<'_>, first: u64, last: u64) -> fmt::Result {
    if first == last {
        write!(f, "{first}")
    } else {
        write!(f, "{first}-{last}")
    }
}

fn refusal(text: &str, what: &'static str, hint: &'static str) -> InvalidQuantity {
    InvalidQuantity {
        text: text.chars().take(40).collect(),
        what,
        hint,
    }
}

/// Makes a quantity a text in JSON, TOML and the OpenAPI document.
macro_rules! as_text {
    ($type:ty, $description:literal, $example:literal) => {
        impl Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(FromText::<$type>::new($description))
            }
        }

        impl PartialSchema for $type {
            fn schema() -> RefOr<Schema> {
                ObjectBuilder::new()
                    .schema_type(Type::String)
                    .description(Some($description))
                    .examples([$example])
                    .into()
            }
        }

        impl ToSchema for $type {}
    };
}

as_text!(TimeSpan, "a time, such as \"50ms\"", "50ms");
as_text!(Percent, "a share, such as \"1%\"", "1%");
as_text!(BitRate, "a rate, such as \"10mbit\"", "10mbit");
as_text!(
    QueueLimit,
    "a limit, such as \"100 packets\"",
    "100 packets"
);
as_text!(PacketRange, "packets, such as 17 or \"20-29\"", "20-29");
as_text!(Ports, "ports, such as 53 or \"8000-8999\"", "53");

/// Reads a text, or a whole number as if it were one.
struct FromText<T> {
    expected: &'static str,
    kind: std::marker::PhantomData<T>,
}

impl<T> FromText<T> {
    fn new(expected: &'static str) -> Self {
        Self {
            expected,
            kind: std::marker::PhantomData,
        }
    }
}

impl<T: FromStr<Err: fmt::Display>> serde::de::Visitor<'_> for FromText<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn time(text: &str) -> i64 {
        text.parse::<TimeSpan>().unwrap().nanoseconds
    }

    #[test]
    fn texts_mean_what_they_say() {
        assert_eq!(time("50ms"), 50_000_000);
        assert_eq!(time("1.5s"), 1_500_000_000);
        assert_eq!(time("-2us"), -2_000);
        assert_eq!((time("0"), time("2min")), (0, 120_000_000_000));
        let percent = |text: &str| text.parse::<Percent>().unwrap().billionths;
        assert_eq!(
            (percent("1%"), percent("0.0000001%"), percent("150%")),
            (10_000_000, 1, 1_500_000_000)
        );
        let rate = |text: &str| text.parse::<BitRate>().unwrap().bits_per_second;
        assert_eq!(
            (rate("10mbit"), rate("1.5Gbit/s")),
            (10_000_000, 1_500_000_000)
        );
        let limit: QueueLimit = "100 packets 64kB".parse().unwrap();
        assert_eq!((limit.packets, limit.bytes), (Some(100), Some(64_000)));
    }

    #[test]
    fn what_is_no_quantity_is_refused_with_what_to_write() {
        for text in [
            "",
            "5",
            "ms",
            "5 ms",
            "1.ms",
            ".5ms",
            "1e3ms",
            "0.1ns",
            "99999999999h",
            "5sec",
            "--5ms",
            "9223372036854775807.999999999999h",
            "-9223372036854775807.999999999999min",
        ] {
            let error = text.parse::<TimeSpan>().unwrap_err().to_string();
            assert!(error.contains("1.5s"), "{error}");
        }
        for text in ["1", "0.01", "%", "1 %", "0.00000001%"] {
            assert!(text.parse::<Percent>().is_err(), "{text}");
        }
        let huge = "9223372036854775807.999999999999gbit";
        for text in ["10", "10mbps", "10Mb", "-1mbit", "1mbit/h", huge] {
            assert!(text.parse::<BitRate>().is_err(), "{text}");
        }
        for text in [
            "",
            "10",
            "10 packets 20 packets",
            "packets",
            "10 frames",
            "-1 packets",
        ] {
            assert!(text.parse::<QueueLimit>().is_err(), "{text}");
        }
        for text in ["", "-", "5-4", "-5", "5-", "65536", "+5"] {
            assert!(text.parse::<Ports>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(
            nanoseconds: i64,
            billionths: i64,
            rate in 0u64..1 << 62,
            packets in prop::option::of(0u64..1 << 62),
            bytes in prop::option::of(0u64..1 << 50),
            first in 0u64..1000,
            more in 0u64..1000,
        ) {
            let span = TimeSpan { nanoseconds };
            prop_assert_eq!(span.to_string().parse(), Ok(span));
            let share = Percent { billionths };
            prop_assert_eq!(share.to_string().parse(), Ok(share));
            let rate = BitRate { bits_per_second: rate };
            prop_assert_eq!(rate.to_string().parse(), Ok(rate));
            let limit = QueueLimit { packets, bytes };
            prop_assume!(limit != QueueLimit::default());
            prop_assert_eq!(limit.to_string().parse(), Ok(limit));
            let range = PacketRange { first, last: first + more };
            prop_assert_eq!(range.to_string().parse(), Ok(range));
        }
    }
}
