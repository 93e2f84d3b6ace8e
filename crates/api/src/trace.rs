//! What happened to each packet of a lease: the lines of `GET /v1/leases/{name}/trace`.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use utoipa::ToSchema;

use crate::drop_reason::DropReason;

/// One line of a trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum TraceLine {
    /// The trace has begun: packets from here on are in it.
    Begin,
    /// A packet.
    Packet(TracePacket),
    /// Packets that are missing here because they came faster than they were read.
    Lost {
        /// How many.
        count: u64,
    },
    /// Nothing follows.
    End {
        /// Why, in a sentence.
        reason: String,
    },
}

/// A packet and its fate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TracePacket {
    /// When it came, in nanoseconds since 1970-01-01 UTC.
    pub time: u64,
    /// Which of the sandbox's interfaces, from 0.
    pub nic: u8,
    /// Which way it went.
    pub direction: Direction,
    /// What became of it.
    pub verdict: Verdict,
    /// Where that was decided.
    pub stage: Stage,
    /// Why it was dropped, if it was.
    pub reason: Option<DropReason>,
    /// Interface that it was sent to.
    pub target: Option<String>,
    /// Bytes of the frame as it came.
    pub length: u32,
    /// Packets that it is on the wire.
    pub segments: u16,
    /// The first bytes of the frame, as it came and before any translation, in hexadecimal; at most 192.
    #[schema(value_type = String, example = "0273770000010600c0a8f1020800")]
    pub frame: Frame,
}

/// Which way a packet goes, as the sandbox sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// It leaves the sandbox.
    Egress,
    /// It comes to the sandbox.
    Ingress,
}

/// What became of a packet. The numbers are those of `enum verdict` in `crates/datapath/bpf/lib/abi.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Verdict {
    /// Dropped; the reason says why.
    Drop = 0,
    /// It left by an uplink.
    Uplink = 1,
    /// Delivered to another sandbox of this host.
    Sandbox = 2,
    /// Handed to the host's own network stack.
    Stack = 3,
    /// Answered on the spot: ARP, neighbour discovery, echo to the gateway.
    Answered = 4,
    /// Delivered to the guest.
    Guest = 5,
    /// Left to the host: not for a sandbox, or the host's stack has to tell the sender something.
    Pass = 6,
}

/// Which step decided. The numbers are those of `enum stage` in `crates/datapath/bpf/lib/abi.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Stage {
    /// Reading the headers.
    Parse = 0,
    /// Checking that the sandbox speaks for itself.
    Antispoof = 1,
    /// The policy.
    Policy = 2,
    /// The route.
    Route = 3,
    /// The limits.
    Police = 4,
    /// The change of addresses.
    Nat = 5,
    /// Sending it on.
    Redirect = 6,
}

/// Bytes that are written in hexadecimal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frame(pub Vec<u8>);

impl Direction {
    /// The direction with this number of `enum direction`.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        [Self::Egress, Self::Ingress]
            .get(usize::from(number))
            .copied()
    }

    /// The word, as in the JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Egress => "egress",
            Self::Ingress => "ingress",
        }
    }
}

impl Verdict {
    /// Every verdict, by number.
    pub const ALL: [Self; 7] = [
        Self::Drop,
        Self::Uplink,
        Self::Sandbox,
        Self::Stack,
        Self::Answered,
        Self::Guest,
        Self::Pass,
    ];

    /// The verdict with this number.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// The word, as in the JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Drop => "drop",
            Self::Uplink => "uplink",
            Self::Sandbox => "sandbox",
            Self::Stack => "stack",
            Self::Answered => "answered",
            Self::Guest => "guest",
            Self::Pass => "pass",
        }
    }
}

impl Stage {
    /// Every stage, by number.
    pub const ALL: [Self; 7] = [
        Self::Parse,
        Self::Antispoof,
        Self::Policy,
        Self::Route,
        Self::Police,
        Self::Nat,
        Self::Redirect,
    ];

    /// The stage with this number.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// The word, as in the JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Parse => "parse",
            Self::Antispoof => "antispoof",
            Self::Policy => "policy",
            Self::Route => "route",
            Self::Police => "police",
            Self::Nat => "nat",
            Self::Redirect => "redirect",
        }
    }
}

impl Serialize for Frame {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut text = String::with_capacity(self.0.len() * 2);
        for byte in &self.0 {
            text.push(DIGITS[usize::from(byte >> 4)].into());
            text.push(DIGITS[usize::from(byte & 15)].into());
        }
        serializer.serialize_str(&text)
    }
}

impl<'de> Deserialize<'de> for Frame {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error;
        let text = String::deserialize(deserializer)?;
        let digit = |digit: u8| match digit {
            b'0'..=b'9' => Some(digit - b'0'),
            b'a'..=b'f' => Some(digit - b'a' + 10),
            b'A'..=b'F' => Some(digit - b'A' + 10),
            _ => None,
        };
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        let bytes: Option<Vec<u8>> = pairs
            .iter()
            .map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?))
            .collect();
        match bytes {
            Some(bytes) if rest.is_empty() => Ok(Self(bytes)),
            _ => Err(D::Error::custom("not pairs of hexadecimal digits")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(value: impl Serialize) -> String {
        serde_json::to_value(value)
            .unwrap()
            .as_str()
            .unwrap()
            .to_owned()
    }

    #[test]
    fn numbers_and_words_agree() {
        for (verdict, number) in Verdict::ALL.into_iter().zip(0..) {
            assert_eq!(verdict as u8, number);
            assert_eq!(word(verdict), verdict.as_str());
        }
        for (stage, number) in Stage::ALL.into_iter().zip(0..) {
            assert_eq!(stage as u8, number);
            assert_eq!(word(stage), stage.as_str());
        }
        for (direction, number) in [Direction::Egress, Direction::Ingress].into_iter().zip(0..) {
            assert_eq!(Direction::from_number(number), Some(direction));
            assert_eq!(word(direction), direction.as_str());
        }
        assert_eq!(Verdict::from_number(7), None);
        assert_eq!(Stage::from_number(255), None);
        assert_eq!(Direction::from_number(2), None);
    }

    #[test]
    fn a_line_reads_back_as_written() {
        let packet = TracePacket {
            time: 1_700_000_000_123_456_789,
            nic: 0,
            direction: Direction::Egress,
            verdict: Verdict::Drop,
            stage: Stage::Policy,
            reason: Some(DropReason::Metadata),
            target: None,
            length: 98,
            segments: 1,
            frame: Frame((0..=255).collect()),
        };
        for line in [
            TraceLine::Begin,
            TraceLine::Packet(packet),
            TraceLine::Lost { count: 3 },
            TraceLine::End {
                reason: "the lease has ended".to_owned(),
            },
        ] {
            let text = serde_json::to_string(&line).unwrap();
            assert_eq!(serde_json::from_str::<TraceLine>(&text).unwrap(), line);
        }
    }

    #[test]
    fn what_is_not_hexadecimal_is_refused() {
        for text in ["\"0\"", "\"0g\"", "\"0x00\"", "\"é0\"", "\"00 \""] {
            assert!(serde_json::from_str::<Frame>(text).is_err(), "{text}");
        }
    }
}
