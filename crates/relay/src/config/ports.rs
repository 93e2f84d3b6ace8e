//! Protocols and ports as they are written: `tcp`, `443`, `8000-8100`.

use std::fmt;

use serde::Deserialize;

/// What can be redirected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Protocol {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Tcp, Self::Udp];

    /// As it is written.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// Ports from one to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "PortText")]
pub struct PortRange {
    /// The first.
    pub first: u16,
    /// The last.
    pub last: u16,
}

impl PortRange {
    /// All ports.
    pub const ALL: Self = Self {
        first: 1,
        last: u16::MAX,
    };

    /// Whether a port is one of them.
    #[must_use]
    pub fn contains(self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last {
            return write!(formatter, "{}", self.first);
        }
        write!(formatter, "{}-{}", self.first, self.last)
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum PortText {
    Number(u16),
    Text(String),
}

impl TryFrom<PortText> for PortRange {
    type Error = String;

    fn try_from(written: PortText) -> Result<Self, String> {
        let (first, last) = match &written {
            PortText::Number(port) => (Some(*port), Some(*port)),
            PortText::Text(text) => match text.split_once('-') {
                Some((first, last)) => (first.trim().parse().ok(), last.trim().parse().ok()),
                None => (text.trim().parse().ok(), text.trim().parse().ok()),
            },
        };
        match (first, last) {
            (Some(first), Some(last)) if 0 < first && first <= last => Ok(Self { first, last }),
            _ => Err("a port is written as 443, ports as \"8000-8100\"".to_owned()),
        }
    }
}
