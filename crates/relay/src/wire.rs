//! What two relays say to each other inside TLS. Pure.
//!
//! A stream begins with an [`Opening`] from the host's relay, and for TCP with an [`Answer`] to it; then come the
//! connection's bytes. Datagrams travel in packets, each a sequence of [`Record`]s: a whole datagram with the
//! addresses that it had, or a fragment of a record that is too long for a packet. Nothing refers to what was sent
//! before, so a relay that starts anew needs no more than the next packet.
//!
//! Numbers are in network byte order; an address is its version (4 or 6), its bytes, and the port.

use std::net::{IpAddr, SocketAddr};

/// Name of this protocol in TLS (ALPN).
pub const PROTOCOL: &[u8] = b"sandwire-relay/1";
/// Longest name of a sender, in bytes.
pub const NAME_BYTES_MAX: usize = 255;
/// Longest [`Opening`] as it is sent, without its length.
pub const OPENING_BYTES_MAX: usize = 1 + 1 + NAME_BYTES_MAX + 2 * ADDRESS_BYTES_MAX;
/// Bytes of a fragment's record besides its content.
pub const FRAGMENT_OVERHEAD: usize = 1 + 4 + 1 + 1 + 2;

const ADDRESS_BYTES_MAX: usize = 1 + 16 + 2;
const KIND_TCP: u8 = 1;
const KIND_DATAGRAMS: u8 = 2;
const RECORD_WHOLE: u8 = 1;
const RECORD_FRAGMENT: u8 = 2;

/// Bytes that aren't what they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the other relay sends what this version doesn't understand: {0}")]
pub struct Malformed(&'static str);

/// How a stream begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opening {
    /// A TCP connection.
    Tcp {
        /// Who made it: a lease, an identity.
        sender: String,
        /// Its address.
        source: SocketAddr,
        /// Where it wanted to go.
        destination: SocketAddr,
    },
    /// Packets of datagrams both ways, each after its length in two bytes.
    Datagrams,
}

impl Opening {
    /// As it is sent: its length in two bytes, then itself.
    ///
    /// # Panics
    /// The name of the sender is longer than [`NAME_BYTES_MAX`]; configuration and API have none such.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0, 0];
        match self {
            Self::Datagrams => bytes.push(KIND_DATAGRAMS),
            Self::Tcp {
                sender,
                source,
                destination,
            } => {
                bytes.push(KIND_TCP);
                put_name(&mut bytes, sender);
                put_address(&mut bytes, *source);
                put_address(&mut bytes, *destination);
            }
        }
        let length = u16::try_from(bytes.len() - 2).expect("names are short");
        bytes[..2].copy_from_slice(&length.to_be_bytes());
        bytes
    }

    /// Reads one, without its length.
    ///
    /// # Errors
    /// It isn't one, or something follows it.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader(bytes);
        let opening = match reader.byte()? {
            KIND_DATAGRAMS => Self::Datagrams,
            KIND_TCP => Self::Tcp {
                sender: reader.name()?.to_owned(),
                source: reader.address()?,
                destination: reader.address()?,
            },
            _ => return Err(Malformed("an unknown kind of stream")),
        };
        if reader.0.is_empty() {
            return Ok(opening);
        }
        Err(Malformed("bytes behind a stream's beginning"))
    }
}

/// What became of a TCP connection's destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Answer {
    /// It is connected; its bytes follow.
    Connected = 0,
    /// The relay doesn't deliver there.
    Denied = 1,
    /// It refused.
    Refused = 2,
    /// There is no way there.
    Unreachable = 3,
    /// It didn't answer in time.
    TimedOut = 4,
    /// The sender has too many.
    TooMany = 5,
    /// Anything else.
    Failed = 6,
}

impl Answer {
    /// Reads one.
    ///
    /// # Errors
    /// It isn't one.
    pub fn decode(byte: u8) -> Result<Self, Malformed> {
        Ok(match byte {
            0 => Self::Connected,
            1 => Self::Denied,
            2 => Self::Refused,
            3 => Self::Unreachable,
            4 => Self::TimedOut,
            5 => Self::TooMany,
            6 => Self::Failed,
            _ => return Err(Malformed("an unknown answer")),
        })
    }

    /// In a word, for reports and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Connected => "connected",
            Self::Denied => "denied",
            Self::Refused => "refused",
            Self::Unreachable => "unreachable",
            Self::TimedOut => "timed_out",
            Self::TooMany => "too_many",
            Self::Failed => "failed",
        }
    }
}

/// A part of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record<'a> {
    /// A datagram.
    Whole(Datagram<'a>),
    /// A part of a record.
    Fragment(Fragment<'a>),
}

/// A datagram with the addresses that it had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// Whose it is; empty on the way back.
    pub sender: &'a str,
    /// Who sent it.
    pub source: SocketAddr,
    /// Where to.
    pub destination: SocketAddr,
    /// What is in it.
    pub payload: &'a [u8],
}

/// A part of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment<'a> {
    /// Which record of this sender.
    pub id: u32,
    /// Which part, from 0.
    pub index: u8,
    /// How many parts there are; at least one.
    pub count: u8,
    /// What is in it.
    pub content: &'a [u8],
}

impl Datagram<'_> {
    /// Bytes that it takes as a record.
    #[must_use]
    pub fn encoded_length(&self) -> usize {
        let addresses = address_length(self.source) + address_length(self.destination);
        1 + 1 + self.sender.len() + addresses + 2 + self.payload.len()
    }

    /// Appends it as a record.
    ///
    /// # Panics
    /// Name or payload are longer than what a datagram and a sender can have.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.push(RECORD_WHOLE);
        put_name(bytes, self.sender);
        put_address(bytes, self.source);
        put_address(bytes, self.destination);
        put_content(bytes, self.payload);
    }
}

impl Fragment<'_> {
    /// Appends it as a record.
    ///
    /// # Panics
    /// The content is longer than a packet.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.push(RECORD_FRAGMENT);
        bytes.extend_from_slice(&self.id.to_be_bytes());
        bytes.extend_from_slice(&[self.index, self.count]);
        put_content(bytes, self.content);
    }
}

/// The records of a packet. Ends after the first malformed one.
#[must_use]
pub fn records(packet: &[u8]) -> Records<'_> {
    Records(Reader(packet))
}

/// See [`records`].
#[derive(Clone, Debug)]
pub struct Records<'a>(Reader<'a>);

impl<'a> Iterator for Records<'a> {
    type Item = Result<Record<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.0.is_empty() {
            return None;
        }
        let record = self.0.record();
        if record.is_err() {
            self.0 = Reader(&[]);
        }
        Some(record)
    }
}

#[derive(Clone, Debug)]
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self
            .0
            .split_at_checked(count)
            .ok_or(Malformed("it ends too early"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self
            .0
            .split_first_chunk()
            .ok_or(Malformed("it ends too early"))?;
        self.0 = rest;
        Ok(*taken)
    }

    fn byte(&mut self) -> Result<u8, Malformed> {
        self.array().map(|[byte]| byte)
    }

    fn name(&mut self) -> Result<&'a str, Malformed> {
        let length = self.byte()?;
        let bytes = self.take(length.into())?;
        let name = std::str::from_utf8(bytes).map_err(|_| Malformed("a name that is no text"))?;
        // It is written to logs and reports.
        if name.chars().any(char::is_control) {
            return Err(Malformed("a name with control characters"));
        }
        Ok(name)
    }

    fn address(&mut self) -> Result<SocketAddr, Malformed> {
        let ip: IpAddr = match self.byte()? {
            4 => self.array::<4>()?.into(),
            6 => self.array::<16>()?.into(),
            _ => return Err(Malformed("an address of an unknown version")),
        };
        Ok(SocketAddr::new(ip, u16::from_be_bytes(self.array()?)))
    }

    fn content(&mut self) -> Result<&'a [u8], Malformed> {
        let length = u16::from_be_bytes(self.array()?);
        self.take(length.into())
    }

    fn record(&mut self) -> Result<Record<'a>, Malformed> {
        match self.byte()? {
            RECORD_WHOLE => Ok(Record::Whole(Datagram {
                sender: self.name()?,
                source: self.address()?,
                destination: self.address()?,
                payload: self.content()?,
            })),
            RECORD_FRAGMENT => {
                let id = u32::from_be_bytes(self.array()?);
                let [index, count] = self.array()?;
                if index >= count {
                    return Err(Malformed("a fragment behind the last"));
                }
                let content = self.content()?;
                Ok(Record::Fragment(Fragment {
                    id,
                    index,
                    count,
                    content,
                }))
            }
            _ => Err(Malformed("an unknown kind of record")),
        }
    }
}

fn address_length(address: SocketAddr) -> usize {
    if address.is_ipv4() { 7 } else { 19 }
}

fn put_address(bytes: &mut Vec<u8>, address: SocketAddr) {
    match address.ip() {
        IpAddr::V4(ip) => {
            bytes.push(4);
            bytes.extend_from_slice(&ip.octets());
        }
        IpAddr::V6(ip) => {
            bytes.push(6);
            bytes.extend_from_slice(&ip.octets());
        }
    }
    bytes.extend_from_slice(&address.port().to_be_bytes());
}

fn put_name(bytes: &mut Vec<u8>, name: &str) {
    bytes.push(u8::try_from(name.len()).expect("names of senders have at most 255 bytes"));
    bytes.extend_from_slice(name.as_bytes());
}

fn put_content(bytes: &mut Vec<u8>, content: &[u8]) {
    let length = u16::try_from(content.len()).expect("datagrams have at most 65,535 bytes");
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(content);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn address() -> impl Strategy<Value = SocketAddr> {
        (any::<IpAddr>(), any::<u16>()).prop_map(|(ip, port)| SocketAddr::new(ip, port))
    }

    fn name() -> impl Strategy<Value = String> {
        proptest::collection::vec(proptest::char::range(' ', '~'), 0..=NAME_BYTES_MAX)
            .prop_map(|letters| letters.into_iter().collect())
    }

    proptest! {
        #[test]
        fn an_opening_reads_back_as_written(
            sender in name(), source in address(), destination in address()
        ) {
            let opening = Opening::Tcp { sender, source, destination };
            let bytes = opening.encode();
            prop_assert!(bytes.len() - 2 <= OPENING_BYTES_MAX);
            prop_assert_eq!(usize::from(u16::from_be_bytes([bytes[0], bytes[1]])), bytes.len() - 2);
            prop_assert_eq!(Opening::decode(&bytes[2..]), Ok(opening));
        }

        #[test]
        fn a_packet_reads_back_as_written(
            datagrams in proptest::collection::vec(
                (name(), address(), address(), proptest::collection::vec(any::<u8>(), 0..300)), 0..8)
        ) {
            let mut packet = Vec::new();
            let mut wanted = Vec::new();
            for (sender, source, destination, payload) in &datagrams {
                let datagram = Datagram {
                    sender, source: *source, destination: *destination, payload,
                };
                let before = packet.len();
                datagram.encode(&mut packet);
                prop_assert_eq!(packet.len() - before, datagram.encoded_length());
                wanted.push(Ok(Record::Whole(datagram)));
            }
            prop_assert_eq!(records(&packet).collect::<Vec<_>>(), wanted);
        }

        #[test]
        fn any_bytes_end(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let found: Vec<_> = records(&bytes).collect();
            prop_assert!(found.len() <= bytes.len());
            prop_assert!(found.iter().rev().skip(1).all(Result::is_ok));
            let _ = Opening::decode(&bytes);
        }
    }

    #[test]
    fn what_follows_an_opening_makes_it_another() {
        let mut bytes = Opening::Datagrams.encode();
        assert_eq!(Opening::decode(&bytes[2..]), Ok(Opening::Datagrams));
        bytes.push(0);
        assert!(Opening::decode(&bytes[2..]).is_err());
        assert!(Opening::decode(&[]).is_err());
        assert!(Opening::decode(&[9]).is_err());
    }

    #[test]
    fn a_name_that_would_break_a_line_of_the_log_is_refused() {
        let opening = Opening::Tcp {
            sender: "web\n".to_owned(),
            source: "192.0.2.1:1".parse().unwrap(),
            destination: "192.0.2.2:2".parse().unwrap(),
        };
        assert!(Opening::decode(&opening.encode()[2..]).is_err());
    }

    #[test]
    fn a_fragment_behind_the_last_is_refused() {
        let mut packet = Vec::new();
        let fragment = Fragment {
            id: 7,
            index: 2,
            count: 2,
            content: b"x",
        };
        fragment.encode(&mut packet);
        assert_eq!(packet.len(), FRAGMENT_OVERHEAD + 1);
        assert!(
            records(&packet)
                .next()
                .is_some_and(|record| record.is_err())
        );
    }

    #[test]
    fn answers_read_back() {
        for byte in 0..=6 {
            assert_eq!(Answer::decode(byte).unwrap() as u8, byte);
        }
        assert!(Answer::decode(7).is_err());
    }
}
