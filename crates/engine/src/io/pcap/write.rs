//! Writes captures, with times in nanoseconds: pcap, or pcapng with a comment on each frame.

use std::io::{self, Write};

/// Which format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// The older one, which everything reads.
    Pcap,
    /// The newer one, with interfaces and comments.
    #[default]
    Pcapng,
}

/// Writes frames one by one. Give it a buffered output: it writes in small pieces.
#[derive(Debug)]
pub struct Writer<W> {
    output: W,
    format: Format,
    block: Vec<u8>,
}

impl<W: Write> Writer<W> {
    /// Begins a file, for frames of these interfaces; pcap forgets of which a frame was.
    ///
    /// # Errors
    ///
    /// If the output fails.
    pub fn new(output: W, format: Format, interfaces: &[&str]) -> io::Result<Self> {
        let mut writer = Self {
            output,
            format,
            block: Vec::new(),
        };
        match format {
            Format::Pcap => writer.write_pcap_header()?,
            Format::Pcapng => {
                writer.write_section_header()?;
                for name in interfaces {
                    writer.write_interface(name)?;
                }
            }
        }
        Ok(writer)
    }

    /// Writes a frame with its time, in nanoseconds since 1970. pcap has no comments, and no times after 2106.
    ///
    /// # Errors
    ///
    /// If the output fails; the file's end is then not to be trusted.
    pub fn write(
        &mut self,
        interface: u32,
        time: u64,
        frame: &[u8],
        comment: Option<&str>,
    ) -> io::Result<()> {
        let length = u32::try_from(frame.len()).map_err(io::Error::other)?;
        self.block.clear();
        if self.format == Format::Pcap {
            let seconds = u32::try_from(time / NANOS).unwrap_or(u32::MAX);
            let nanos = u32::try_from(time % NANOS).unwrap_or(0);
            for number in [seconds, nanos, length, length] {
                self.put(number);
            }
            self.output.write_all(&self.block)?;
            return self.output.write_all(frame);
        }
        let [low @ .., _, _, _, _] = time.to_le_bytes();
        let [_, _, _, _, high @ ..] = time.to_le_bytes();
        self.put(interface);
        self.block.extend(high);
        self.block.extend(low);
        self.put(length);
        self.put(length);
        self.block.extend_from_slice(frame);
        self.pad();
        if let Some(comment) = comment {
            self.put_option(OPTION_COMMENT, comment.as_bytes());
            self.put_option(OPTION_END, &[]);
        }
        self.write_block(ENHANCED_PACKET)
    }

    /// Hands everything to the system.
    ///
    /// # Errors
    ///
    /// If the output fails.
    pub fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }

    /// The output, with everything in it that was written.
    pub fn into_inner(self) -> W {
        self.output
    }

    fn write_pcap_header(&mut self) -> io::Result<()> {
        self.put(MAGIC_NANOSECONDS);
        self.block.extend(2_u16.to_le_bytes());
        self.block.extend(4_u16.to_le_bytes());
        self.put(0);
        self.put(0);
        self.put(SNAP_LENGTH);
        self.put(LINK_TYPE_ETHERNET.into());
        self.output.write_all(&self.block)
    }

    fn write_section_header(&mut self) -> io::Result<()> {
        self.block.clear();
        self.put(BYTE_ORDER_MAGIC);
        self.block.extend(1_u16.to_le_bytes());
        self.block.extend(0_u16.to_le_bytes());
        // The length of the section is not known beforehand.
        self.block.extend(u64::MAX.to_le_bytes());
        let program = concat!("sandwire ", env!("CARGO_PKG_VERSION"));
        self.put_option(OPTION_APPLICATION, program.as_bytes());
        self.put_option(OPTION_END, &[]);
        self.write_block(SECTION_HEADER)
    }

    fn write_interface(&mut self, name: &str) -> io::Result<()> {
        self.block.clear();
        self.block.extend(LINK_TYPE_ETHERNET.to_le_bytes());
        self.block.extend(0_u16.to_le_bytes());
        self.put(SNAP_LENGTH);
        self.put_option(OPTION_INTERFACE_NAME, name.as_bytes());
        self.put_option(OPTION_TIME_RESOLUTION, &[NANOSECONDS]);
        self.put_option(OPTION_END, &[]);
        self.write_block(INTERFACE_DESCRIPTION)
    }

    /// A block: type, length, body, length again.
    fn write_block(&mut self, kind: u32) -> io::Result<()> {
        let length = u32::try_from(self.block.len() + 12).map_err(io::Error::other)?;
        self.output.write_all(&kind.to_le_bytes())?;
        self.output.write_all(&length.to_le_bytes())?;
        self.output.write_all(&self.block)?;
        self.output.write_all(&length.to_le_bytes())
    }

    fn put(&mut self, number: u32) {
        self.block.extend(number.to_le_bytes());
    }

    /// Options are cut at 65,535 bytes, which is as long as they can be.
    fn put_option(&mut self, code: u16, value: &[u8]) {
        let length = u16::try_from(value.len()).unwrap_or(u16::MAX);
        self.block.extend(code.to_le_bytes());
        self.block.extend(length.to_le_bytes());
        self.block.extend(&value[..usize::from(length)]);
        self.pad();
    }

    /// Fills up to a multiple of four.
    fn pad(&mut self) {
        self.block.resize(self.block.len().next_multiple_of(4), 0);
    }
}

const NANOS: u64 = 1_000_000_000;
const MAGIC_NANOSECONDS: u32 = 0xa1b2_3c4d;
const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const BYTE_ORDER_MAGIC: u32 = 0x1a2b_3c4d;
const INTERFACE_DESCRIPTION: u32 = 1;
const ENHANCED_PACKET: u32 = 6;
const LINK_TYPE_ETHERNET: u16 = 1;
/// As many bytes of a frame as there may be here.
const SNAP_LENGTH: u32 = 262_144;
const OPTION_END: u16 = 0;
const OPTION_COMMENT: u16 = 1;
const OPTION_INTERFACE_NAME: u16 = 2;
const OPTION_APPLICATION: u16 = 4;
const OPTION_TIME_RESOLUTION: u16 = 9;
/// Ten to the minus ninth seconds.
const NANOSECONDS: u8 = 9;
