//! Reads captures: pcap and pcapng, of either byte order, with times of any resolution.
//!
//! Sources: the IETF drafts "PCAP Capture File Format" (draft-ietf-opsawg-pcap) and "PCAP Now Generic (pcapng) Capture
//! File Format" (draft-ietf-opsawg-pcapng). Lengths that a file states are checked before they are believed, and memory
//! is taken for what was read, never for what was promised.

use std::io::{self, ErrorKind, Read};

use thiserror::Error;

/// Reads the frames of a capture one by one.
#[derive(Debug)]
pub struct Reader<R> {
    input: R,
    format: Format,
    big_endian: bool,
    /// Of pcapng's section.
    interfaces: Vec<Interface>,
    /// What was read last: a record's frame, or a block's body.
    buffer: Vec<u8>,
    other_link_types: u64,
}

/// A frame as it was captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Captured<'a> {
    /// When, in nanoseconds since 1970; pcapng's simple packets have no time.
    pub time: Option<u64>,
    /// As much of it as was captured.
    pub frame: &'a [u8],
    /// How long it was, in bytes.
    pub length: u32,
    /// The number of the interface in its section of the file; 0 in pcap.
    pub interface: u32,
}

/// A capture that can't be read, or not further.
#[derive(Debug, Error)]
pub enum CaptureError {
    /// The system can't.
    #[error("read a capture: {0}")]
    Read(#[source] io::Error),
    /// It begins with none of the formats' marks.
    #[error("read a capture: this is neither pcap nor pcapng")]
    NotACapture,
    /// It was captured from something else than Ethernet.
    #[error("read a capture: link type {0}; only Ethernet (1) can be read")]
    LinkType(u32),
    /// It ends within a record.
    #[error("read a capture: it ends within a record; what came before was read")]
    CutShort,
    /// It contradicts itself.
    #[error("read a capture: {0}; what came before was read")]
    Broken(&'static str),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Pcap { units_per_second: u32 },
    Pcapng,
}

#[derive(Debug, Clone, Copy)]
struct Interface {
    link_type: u16,
    /// 0 is without limit.
    snap_length: u32,
    resolution: u8,
    offset_seconds: i64,
}

impl<R: Read> Reader<R> {
    /// Begins with the file's header. Give it a buffered input: it reads in small pieces.
    ///
    /// # Errors
    ///
    /// If it isn't a capture of Ethernet.
    pub fn new(input: R) -> Result<Self, CaptureError> {
        let mut reader = Self {
            input,
            format: Format::Pcapng,
            big_endian: false,
            interfaces: Vec::new(),
            buffer: Vec::new(),
            other_link_types: 0,
        };
        let magic = match reader.read_array() {
            Ok(magic) => magic,
            Err(CaptureError::CutShort) => return Err(CaptureError::NotACapture),
            Err(error) => return Err(error),
        };
        if u32::from_be_bytes(magic) == SECTION_HEADER {
            reader.read_section_header()?;
            return Ok(reader);
        }
        for big_endian in [false, true] {
            reader.big_endian = big_endian;
            let units_per_second = match reader.u32_of(magic) {
                MAGIC_MICROSECONDS => 1_000_000,
                MAGIC_NANOSECONDS => 1_000_000_000,
                _ => continue,
            };
            reader.format = Format::Pcap { units_per_second };
            reader.read_pcap_header()?;
            return Ok(reader);
        }
        Err(CaptureError::NotACapture)
    }

    /// The next frame; `None` at the end of the file. After an error there is no next one.
    ///
    /// # Errors
    ///
    /// If the file can't be read on.
    pub fn read(&mut self) -> Result<Option<Captured<'_>>, CaptureError> {
        match self.format {
            Format::Pcap { units_per_second } => self.read_record(units_per_second),
            Format::Pcapng => self.read_blocks(),
        }
    }

    /// Frames of interfaces that aren't Ethernet; they were left out.
    #[must_use]
    pub fn other_link_types(&self) -> u64 {
        self.other_link_types
    }

    fn read_pcap_header(&mut self) -> Result<(), CaptureError> {
        let header: [u8; 20] = self.read_array()?;
        let version = self.u16_at(&header, 0)?;
        if version != 2 {
            return Err(CaptureError::Broken("a version of pcap that isn't 2"));
        }
        // The upper half says something about frame check sequences.
        let link_type = self.u32_at(&header, 16)? & 0xffff;
        if link_type != u32::from(LINK_TYPE_ETHERNET) {
            return Err(CaptureError::LinkType(link_type));
        }
        Ok(())
    }

    fn read_record(&mut self, units_per_second: u32) -> Result<Option<Captured<'_>>, CaptureError> {
        let Some(header) = self.read_array_or_end::<16>()? else {
            return Ok(None);
        };
        let seconds = self.u32_at(&header, 0)?;
        let units = self.u32_at(&header, 4)?;
        let captured = self.u32_at(&header, 8)?;
        let length = self.u32_at(&header, 12)?;
        if captured > FRAME_BYTES_MAX {
            return Err(CaptureError::Broken("a frame of more than 262,144 bytes"));
        }
        self.fill(captured)?;
        let nanos = u64::from(units) * u64::from(1_000_000_000 / units_per_second);
        Ok(Some(Captured {
            time: Some(u64::from(seconds) * 1_000_000_000 + nanos),
            frame: &self.buffer,
            length: length.max(captured),
            interface: 0,
        }))
    }

    /// Blocks until one has a frame.
    fn read_blocks(&mut self) -> Result<Option<Captured<'_>>, CaptureError> {
        loop {
            let Some(kind) = self.read_array_or_end::<4>()? else {
                return Ok(None);
            };
            if u32::from_be_bytes(kind) == SECTION_HEADER {
                self.read_section_header()?;
                continue;
            }
            let kind = self.u32_of(kind);
            let total = self.read_array().map(|bytes| self.u32_of(bytes))?;
            self.read_body(total, 8)?;
            let found = match kind {
                INTERFACE_DESCRIPTION => {
                    let interface = self.interface()?;
                    self.interfaces.push(interface);
                    None
                }
                ENHANCED_PACKET => Some(self.enhanced_packet()?),
                OLD_PACKET => Some(self.old_packet()?),
                SIMPLE_PACKET => Some(self.simple_packet()?),
                _ => None,
            };
            let Some(found) = found else {
                continue;
            };
            if found.link_type != LINK_TYPE_ETHERNET {
                self.other_link_types += 1;
                continue;
            }
            return Ok(Some(Captured {
                time: found.time,
                frame: &self.buffer[found.start..found.end],
                length: found.length,
                interface: found.interface,
            }));
        }
    }

    /// What follows a section header's type. It decides the byte order.
    fn read_section_header(&mut self) -> Result<(), CaptureError> {
        let total: [u8; 4] = self.read_array()?;
        let magic: [u8; 4] = self.read_array()?;
        self.big_endian = match magic {
            [0x4d, 0x3c, 0x2b, 0x1a] => false,
            [0x1a, 0x2b, 0x3c, 0x4d] => true,
            _ => return Err(CaptureError::NotACapture),
        };
        let total = self.u32_of(total);
        self.read_body(total, 12)?;
        if self.u16_at(&self.buffer, 0)? != 1 {
            return Err(CaptureError::Broken("a version of pcapng that isn't 1"));
        }
        self.interfaces.clear();
        Ok(())
    }

    /// Reads what is left of a block of so many bytes after the first `read`, and looks at the length at its end.
    fn read_body(&mut self, total: u32, read: u32) -> Result<(), CaptureError> {
        if total < read + 4 || !total.is_multiple_of(4) {
            return Err(CaptureError::Broken("a block of an impossible length"));
        }
        if total > BLOCK_BYTES_MAX {
            return Err(CaptureError::Broken("a block of more than 16 MiB"));
        }
        self.fill(total - read - 4)?;
        let trailer: [u8; 4] = self.read_array()?;
        if self.u32_of(trailer) != total {
            return Err(CaptureError::Broken("a block with two different lengths"));
        }
        Ok(())
    }

    fn interface(&self) -> Result<Interface, CaptureError> {
        let mut interface = Interface {
            link_type: self.u16_at(&self.buffer, 0)?,
            snap_length: self.u32_at(&self.buffer, 4)?,
            resolution: MICROSECONDS,
            offset_seconds: 0,
        };
        let mut at = 8;
        // Options may be missing altogether, also the one that ends them.
        while let (Ok(code), Ok(length)) = (
            self.u16_at(&self.buffer, at),
            self.u16_at(&self.buffer, at + 2),
        ) {
            let length = usize::from(length);
            let Some(value) = self.buffer.get(at + 4..at + 4 + length) else {
                return Err(CaptureError::Broken("an option longer than its block"));
            };
            match (code, value) {
                (OPTION_END, _) => break,
                (OPTION_TIME_RESOLUTION, &[resolution]) => interface.resolution = resolution,
                (OPTION_TIME_OFFSET, value) => {
                    if let Ok(bytes) = value.try_into() {
                        interface.offset_seconds = if self.big_endian {
                            i64::from_be_bytes(bytes)
                        } else {
                            i64::from_le_bytes(bytes)
                        };
                    }
                }
                _ => {}
            }
            at += 4 + length.next_multiple_of(4);
        }
        Ok(interface)
    }

    fn enhanced_packet(&self) -> Result<Found, CaptureError> {
        let interface = self.u32_at(&self.buffer, 0)?;
        self.found(interface)
    }

    fn old_packet(&self) -> Result<Found, CaptureError> {
        let interface = u32::from(self.u16_at(&self.buffer, 0)?);
        self.found(interface)
    }

    fn simple_packet(&self) -> Result<Found, CaptureError> {
        let length = self.u32_at(&self.buffer, 0)?;
        let interface = self.interface_of(0)?;
        let room = self.buffer.len() - 4;
        let captured = match interface.snap_length {
            0 => length,
            limit => length.min(limit),
        };
        let captured = usize::try_from(captured).unwrap_or(usize::MAX);
        if captured > room {
            return Err(CaptureError::Broken("a frame longer than its block"));
        }
        Ok(Found {
            link_type: interface.link_type,
            time: None,
            start: 4,
            end: 4 + captured,
            length,
            interface: 0,
        })
    }

    /// The frame of an enhanced or old packet block, which differ only before the time.
    fn found(&self, number: u32) -> Result<Found, CaptureError> {
        let interface = self.interface_of(number)?;
        let high = u64::from(self.u32_at(&self.buffer, 4)?);
        let low = u64::from(self.u32_at(&self.buffer, 8)?);
        let captured = self.u32_at(&self.buffer, 12)?;
        let length = self.u32_at(&self.buffer, 16)?.max(captured);
        let start = 20_usize;
        let end = start.saturating_add(usize::try_from(captured).unwrap_or(usize::MAX));
        if end > self.buffer.len() {
            return Err(CaptureError::Broken("a frame longer than its block"));
        }
        Ok(Found {
            link_type: interface.link_type,
            time: Some(interface.nanoseconds((high << 32) | low)),
            start,
            end,
            length,
            interface: number,
        })
    }

    fn interface_of(&self, number: u32) -> Result<Interface, CaptureError> {
        let number = usize::try_from(number).unwrap_or(usize::MAX);
        let interface = self.interfaces.get(number).copied();
        interface.ok_or(CaptureError::Broken(
            "a frame of an interface that isn't described",
        ))
    }

    /// Fills the buffer with the next bytes.
    fn fill(&mut self, bytes: u32) -> Result<(), CaptureError> {
        self.buffer.clear();
        let mut part = self.input.by_ref().take(bytes.into());
        let read = part
            .read_to_end(&mut self.buffer)
            .map_err(CaptureError::Read)?;
        if read as u64 != u64::from(bytes) {
            return Err(CaptureError::CutShort);
        }
        Ok(())
    }

    fn read_array<const N: usize>(&mut self) -> Result<[u8; N], CaptureError> {
        let read = self.read_array_or_end()?;
        read.ok_or(CaptureError::CutShort)
    }

    /// The next bytes, or `None` if there is none at all.
    fn read_array_or_end<const N: usize>(&mut self) -> Result<Option<[u8; N]>, CaptureError> {
        let mut array = [0; N];
        let mut filled = 0;
        while filled < N {
            match self.input.read(&mut array[filled..]) {
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => return Err(CaptureError::CutShort),
                Ok(count) => filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(CaptureError::Read(error)),
            }
        }
        Ok(Some(array))
    }

    fn u32_of(&self, bytes: [u8; 4]) -> u32 {
        if self.big_endian {
            u32::from_be_bytes(bytes)
        } else {
            u32::from_le_bytes(bytes)
        }
    }

    fn u32_at(&self, bytes: &[u8], at: usize) -> Result<u32, CaptureError> {
        let bytes = bytes.get(at..).and_then(<[u8]>::first_chunk);
        let bytes = bytes.ok_or(CaptureError::Broken("a block that is too short"))?;
        Ok(self.u32_of(*bytes))
    }

    fn u16_at(&self, bytes: &[u8], at: usize) -> Result<u16, CaptureError> {
        let bytes = bytes.get(at..).and_then(<[u8]>::first_chunk);
        let bytes = *bytes.ok_or(CaptureError::Broken("a block that is too short"))?;
        Ok(if self.big_endian {
            u16::from_be_bytes(bytes)
        } else {
            u16::from_le_bytes(bytes)
        })
    }
}

/// Where in the buffer a frame is.
#[derive(Debug)]
struct Found {
    link_type: u16,
    time: Option<u64>,
    start: usize,
    end: usize,
    length: u32,
    interface: u32,
}

impl Interface {
    /// A time stamp in nanoseconds since 1970; what is before that, or after the year 2554, is at that end.
    fn nanoseconds(&self, stamp: u64) -> u64 {
        const GIGA: i128 = 1_000_000_000;
        let stamp = i128::from(stamp);
        let exponent = u32::from(self.resolution & 0x7f);
        let nanos = if self.resolution & 0x80 != 0 {
            // The product has at most 94 bits.
            (stamp * GIGA) >> exponent
        } else if exponent <= 9 {
            stamp * 10_i128.pow(9 - exponent)
        } else {
            10_i128
                .checked_pow(exponent - 9)
                .map_or(0, |divisor| stamp / divisor)
        };
        let nanos = nanos + i128::from(self.offset_seconds) * GIGA;
        u64::try_from(nanos.max(0)).unwrap_or(u64::MAX)
    }
}

const MAGIC_MICROSECONDS: u32 = 0xa1b2_c3d4;
const MAGIC_NANOSECONDS: u32 = 0xa1b2_3c4d;
/// The same in both byte orders.
const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE_DESCRIPTION: u32 = 1;
const OLD_PACKET: u32 = 2;
const SIMPLE_PACKET: u32 = 3;
const ENHANCED_PACKET: u32 = 6;
const OPTION_END: u16 = 0;
const OPTION_TIME_RESOLUTION: u16 = 9;
const OPTION_TIME_OFFSET: u16 = 14;
const LINK_TYPE_ETHERNET: u16 = 1;
/// The resolution of an interface that states none: ten to the minus sixth seconds.
const MICROSECONDS: u8 = 6;

/// The longest frame that captures have; libpcap's limit too.
const FRAME_BYTES_MAX: u32 = 262_144;
const BLOCK_BYTES_MAX: u32 = 16 << 20;

#[cfg(test)]
mod tests;
