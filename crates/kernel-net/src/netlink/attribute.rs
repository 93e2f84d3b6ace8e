//! Netlink attributes: the type-length-value records that follow the header of every message.
//!
//! rtnetlink writes integers in the byte order of the machine, nfnetlink in that of the network;
//! hence the two families of `put` functions. Lengths are limited by the wire format to 64 KiB; the
//! largest attribute that we write is a list of set elements, which [`crate::nft`] splits.

use std::net::IpAddr;

const HEADER: usize = 4;
const NESTED: u16 = 0x8000;
const TYPE_MASK: u16 = 0x3fff;

/// Appends attributes to a message.
#[derive(Debug)]
pub struct Writer<'a> {
    buffer: &'a mut Vec<u8>,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(buffer: &'a mut Vec<u8>) -> Self {
        Self { buffer }
    }

    /// Appends bytes that are not an attribute: the fixed header of a message's family.
    pub fn raw(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
        self.pad();
    }

    /// Appends an attribute.
    pub fn put(&mut self, kind: u16, value: &[u8]) {
        let start = self.begin(kind);
        self.buffer.extend_from_slice(value);
        self.end(start);
    }

    /// Appends an attribute without a value.
    pub fn put_flag(&mut self, kind: u16) {
        self.put(kind, &[]);
    }

    /// Appends one byte.
    pub fn put_u8(&mut self, kind: u16, value: u8) {
        self.put(kind, &[value]);
    }

    /// Appends a 16-bit integer in the byte order of the machine.
    pub fn put_u16(&mut self, kind: u16, value: u16) {
        self.put(kind, &value.to_ne_bytes());
    }

    /// Appends a 32-bit integer in the byte order of the machine.
    pub fn put_u32(&mut self, kind: u16, value: u32) {
        self.put(kind, &value.to_ne_bytes());
    }

    /// Appends a 32-bit integer in network byte order.
    pub fn put_u32_be(&mut self, kind: u16, value: u32) {
        self.put(kind, &value.to_be_bytes());
    }

    /// Appends a 64-bit integer in network byte order.
    pub fn put_u64_be(&mut self, kind: u16, value: u64) {
        self.put(kind, &value.to_be_bytes());
    }

    /// Appends a text with its terminating zero.
    pub fn put_text(&mut self, kind: u16, value: &str) {
        let start = self.begin(kind);
        self.buffer.extend_from_slice(value.as_bytes());
        self.buffer.push(0);
        self.end(start);
    }

    /// Appends an IP address.
    pub fn put_address(&mut self, kind: u16, address: IpAddr) {
        match address {
            IpAddr::V4(address) => self.put(kind, &address.octets()),
            IpAddr::V6(address) => self.put(kind, &address.octets()),
        }
    }

    /// Appends an attribute that holds attributes.
    pub fn nest(&mut self, kind: u16, fill: impl FnOnce(&mut Writer<'_>)) {
        let start = self.begin(kind | NESTED);
        fill(self);
        self.end(start);
    }

    fn begin(&mut self, kind: u16) -> usize {
        let start = self.buffer.len();
        self.buffer.extend_from_slice(&[0, 0]);
        self.buffer.extend_from_slice(&kind.to_ne_bytes());
        start
    }

    fn end(&mut self, start: usize) {
        let length = u16::try_from(self.buffer.len() - start)
            .expect("the writers of long lists split them below 64 KiB");
        self.buffer[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        self.pad();
    }

    fn pad(&mut self) {
        let padded = self.buffer.len().next_multiple_of(4);
        self.buffer.resize(padded, 0);
    }
}

/// Attributes of a message, in order. Ends at the first malformed one.
#[derive(Clone, Copy, Debug)]
pub struct Attributes<'a> {
    rest: &'a [u8],
}

impl<'a> Attributes<'a> {
    /// Reads what follows a message's fixed header, or an attribute that holds attributes.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// The value of the first attribute of this kind.
    #[must_use]
    pub fn find(self, kind: u16) -> Option<&'a [u8]> {
        let mut attributes = self;
        attributes.find_map(|(found, value)| (found == kind).then_some(value))
    }

    /// The attributes inside the first attribute of this kind; none if it is absent.
    #[must_use]
    pub fn nested(self, kind: u16) -> Attributes<'a> {
        Attributes::new(self.find(kind).unwrap_or_default())
    }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let header = self.rest.first_chunk::<HEADER>()?;
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let kind = u16::from_ne_bytes([header[2], header[3]]) & TYPE_MASK;
        let value = self.rest.get(HEADER..length)?;
        self.rest = self
            .rest
            .get(length.next_multiple_of(4)..)
            .unwrap_or_default();
        Some((kind, value))
    }
}

/// Reads a 32-bit integer in the byte order of the machine.
#[must_use]
pub fn u32_of(value: &[u8]) -> Option<u32> {
    value.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

/// Reads a 32-bit integer in network byte order.
#[must_use]
pub fn u32_be_of(value: &[u8]) -> Option<u32> {
    value.first_chunk().map(|bytes| u32::from_be_bytes(*bytes))
}

/// Reads a text up to its terminating zero.
#[must_use]
pub fn text_of(value: &[u8]) -> String {
    let end = value
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end]).into_owned()
}

/// Reads an IP address by its length.
#[must_use]
pub fn address_of(value: &[u8]) -> Option<IpAddr> {
    if let Ok(octets) = <[u8; 4]>::try_from(value) {
        Some(IpAddr::from(octets))
    } else {
        <[u8; 16]>::try_from(value).ok().map(IpAddr::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_reads_back() {
        let mut buffer = Vec::new();
        let mut writer = Writer::new(&mut buffer);
        writer.put_text(3, "uplink0");
        writer.nest(18, |info| {
            info.put_u8(1, 7);
            info.put_u32(2, 0x0102_0304);
        });
        writer.put_u32_be(5, 9);
        let read = Attributes::new(&buffer);
        assert_eq!(read.find(3).map(text_of).as_deref(), Some("uplink0"));
        assert_eq!(read.nested(18).find(1), Some(&[7][..]));
        assert_eq!(read.nested(18).find(2).and_then(u32_of), Some(0x0102_0304));
        assert_eq!(read.find(5).and_then(u32_be_of), Some(9));
        assert_eq!(read.count(), 3);
    }

    #[test]
    fn a_truncated_attribute_ends_the_list() {
        let mut buffer = Vec::new();
        Writer::new(&mut buffer).put(1, &[1, 2, 3, 4, 5]);
        for length in 0..9 {
            assert_eq!(Attributes::new(&buffer[..length]).count(), 0, "{length}");
        }
        assert_eq!(Attributes::new(&buffer[..9]).count(), 1);
    }

    #[test]
    fn an_attribute_shorter_than_its_header_is_not_followed_for_ever() {
        assert_eq!(Attributes::new(&[0, 0, 1, 0, 0, 0, 1, 0]).count(), 0);
    }
}
