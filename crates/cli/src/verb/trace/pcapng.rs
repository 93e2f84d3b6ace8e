//! A capture file in the format pcapng, with a comment on each packet.
//!
//! Three kinds of blocks are all it takes, so they are written here; the format is that of the IETF
//! draft "PCAP Now Generic (pcapng) Capture File Format". Numbers are little-endian.

use std::io::{self, Write};

use sandwire_api::trace::{Direction, TracePacket};

use super::fate_text;

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE_DESCRIPTION: u32 = 1;
const ENHANCED_PACKET: u32 = 6;
const BYTE_ORDER_MAGIC: u32 = 0x1a2b_3c4d;
const LINK_TYPE_ETHERNET: u16 = 1;
/// As many bytes of a packet as there may be here; the same for all interfaces, as readers want it.
const SNAP_LENGTH: u32 = 262_144;
const OPTION_END: u16 = 0;
const OPTION_COMMENT: u16 = 1;
const OPTION_APPLICATION: u16 = 4;
const OPTION_INTERFACE_NAME: u16 = 2;
const OPTION_TIME_RESOLUTION: u16 = 9;
const OPTION_PACKET_FLAGS: u16 = 2;
/// Ten to the minus ninth seconds.
const NANOSECONDS: u8 = 9;
const FLAG_INBOUND: u32 = 1;
const FLAG_OUTBOUND: u32 = 2;

/// Writes a capture file.
pub(super) struct Writer<W> {
    file: W,
    lease: String,
    /// The sandbox's interfaces in the order in which the file describes them.
    nics: Vec<u8>,
}

impl<W: Write> Writer<W> {
    /// Begins the file.
    pub(super) fn new(mut file: W, lease: &str) -> io::Result<Self> {
        let mut body = Vec::new();
        body.extend(BYTE_ORDER_MAGIC.to_le_bytes());
        body.extend(1u16.to_le_bytes());
        body.extend(0u16.to_le_bytes());
        // The length of the section is not known beforehand.
        body.extend(u64::MAX.to_le_bytes());
        let program = concat!("sandwire ", env!("CARGO_PKG_VERSION"));
        push_option(&mut body, OPTION_APPLICATION, program.as_bytes());
        push_option(&mut body, OPTION_END, &[]);
        write_block(&mut file, SECTION_HEADER, &body)?;
        let mut writer = Self {
            file,
            lease: lease.to_owned(),
            nics: Vec::new(),
        };
        // Readers take no file without any, even if there is no packet.
        writer.describe_interface(0)?;
        Ok(writer)
    }

    /// Adds a packet and what became of it.
    pub(super) fn write(&mut self, packet: &TracePacket) -> io::Result<()> {
        let interface = match self.nics.iter().position(|nic| *nic == packet.nic) {
            Some(interface) => interface,
            None => self.describe_interface(packet.nic)?,
        };
        let frame = &packet.frame.0;
        let number = |value: usize| u32::try_from(value).map_err(io::Error::other);
        let mut body = Vec::new();
        body.extend(number(interface)?.to_le_bytes());
        let [low @ .., _, _, _, _] = packet.time.to_le_bytes();
        let [_, _, _, _, high @ ..] = packet.time.to_le_bytes();
        body.extend(high);
        body.extend(low);
        body.extend(number(frame.len())?.to_le_bytes());
        body.extend(packet.length.max(number(frame.len())?).to_le_bytes());
        body.extend(frame);
        pad(&mut body);
        push_option(&mut body, OPTION_COMMENT, fate_text(packet).as_bytes());
        let flags = match packet.direction {
            Direction::Egress => FLAG_OUTBOUND,
            Direction::Ingress => FLAG_INBOUND,
        };
        push_option(&mut body, OPTION_PACKET_FLAGS, &flags.to_le_bytes());
        push_option(&mut body, OPTION_END, &[]);
        write_block(&mut self.file, ENHANCED_PACKET, &body)
    }

    fn describe_interface(&mut self, nic: u8) -> io::Result<usize> {
        let mut body = Vec::new();
        body.extend(LINK_TYPE_ETHERNET.to_le_bytes());
        body.extend(0u16.to_le_bytes());
        body.extend(SNAP_LENGTH.to_le_bytes());
        let name = format!("{} interface {nic}", self.lease);
        push_option(&mut body, OPTION_INTERFACE_NAME, name.as_bytes());
        push_option(&mut body, OPTION_TIME_RESOLUTION, &[NANOSECONDS]);
        push_option(&mut body, OPTION_END, &[]);
        write_block(&mut self.file, INTERFACE_DESCRIPTION, &body)?;
        self.nics.push(nic);
        Ok(self.nics.len() - 1)
    }
}

/// How many bytes, of those that begin with a block, are whole blocks.
pub(super) fn whole_blocks(bytes: &[u8], _at_beginning: bool) -> usize {
    let mut at = 0;
    while let Some((_, [a, b, c, d, ..])) = bytes[at..].split_at_checked(4) {
        let length = u32::from_le_bytes([*a, *b, *c, *d]) as usize;
        if length == 0 || bytes.len() - at < length {
            break;
        }
        at += length;
    }
    at
}

/// A block: type, length, body, length again.
fn write_block(file: &mut impl Write, kind: u32, body: &[u8]) -> io::Result<()> {
    let length = u32::try_from(body.len() + 12).map_err(io::Error::other)?;
    let mut block = Vec::with_capacity(body.len() + 12);
    block.extend(kind.to_le_bytes());
    block.extend(length.to_le_bytes());
    block.extend(body);
    block.extend(length.to_le_bytes());
    file.write_all(&block)
}

fn push_option(body: &mut Vec<u8>, code: u16, value: &[u8]) {
    // The longest value is a comment of a few words.
    let length = u16::try_from(value.len()).unwrap_or(u16::MAX);
    body.extend(code.to_le_bytes());
    body.extend(length.to_le_bytes());
    body.extend(&value[..usize::from(length)]);
    pad(body);
}

/// Fills up to a multiple of four.
fn pad(body: &mut Vec<u8>) {
    body.resize(body.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use sandwire_api::{
        drop_reason::DropReason,
        trace::{Frame, Stage, Verdict},
    };

    use super::*;

    fn packet(nic: u8, length: u32) -> TracePacket {
        let mut frame = vec![2; 12];
        frame.extend([
            8, 0, 0x45, 0, 0, 28, 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
        ]);
        frame.extend([0x10, 0xe1, 0, 53, 0, 8, 0, 0]);
        TracePacket {
            time: 1_700_000_000_123_456_789,
            nic,
            direction: Direction::Egress,
            verdict: Verdict::Drop,
            stage: Stage::Policy,
            reason: Some(DropReason::Metadata),
            target: None,
            length,
            segments: 1,
            frame: Frame(frame),
        }
    }

    #[test]
    fn tcpdump_reads_what_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.pcapng");
        let mut writer = Writer::new(std::fs::File::create(&path).unwrap(), "a7").unwrap();
        for nic in [0, 1, 0] {
            writer.write(&packet(nic, 1514)).unwrap();
        }
        let output = Command::new("tcpdump")
            .args(["-n", "-e", "-tt", "--nano", "-r"])
            .arg(&path)
            .output()
            .expect("tcpdump is installed");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        for line in lines {
            assert!(line.starts_with("1700000000.123456789 "), "{line}");
            assert!(line.contains("10.0.0.1.4321 > 10.0.0.2.53"), "{line}");
            assert!(line.contains("length 1514"), "{line}");
        }
    }

    #[test]
    fn tcpdump_reads_a_capture_without_packets() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.pcapng");
        Writer::new(std::fs::File::create(&path).unwrap(), "a7").unwrap();
        let output = Command::new("tcpdump")
            .arg("-r")
            .arg(&path)
            .output()
            .expect("tcpdump is installed");
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && output.stdout.is_empty(),
            "{complaint}"
        );
    }

    #[test]
    fn a_capture_that_is_cut_off_anywhere_has_whole_blocks_before() {
        let mut file = Vec::new();
        let mut writer = Writer::new(&mut file, "a7").unwrap();
        writer.write(&packet(0, 42)).unwrap();
        writer.write(&packet(1, 60)).unwrap();
        let mut ends = Vec::new();
        for cut in 0..=file.len() {
            let whole = whole_blocks(&file[..cut], true);
            assert!(whole <= cut);
            if ends.last() != Some(&whole) {
                ends.push(whole);
            }
        }
        // The section, two interfaces, two packets.
        assert_eq!(ends.len(), 6);
        assert_eq!((ends[0], ends[5]), (0, file.len()));
    }

    #[test]
    fn blocks_hold_together_and_carry_the_comment() {
        let mut file = Vec::new();
        let mut writer = Writer::new(&mut file, "a7").unwrap();
        writer.write(&packet(0, 42)).unwrap();
        writer.write(&packet(0, 42)).unwrap();
        let mut kinds = Vec::new();
        let mut rest = &file[..];
        while !rest.is_empty() {
            let field = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap());
            let length = usize::try_from(field(4)).unwrap();
            assert!(length.is_multiple_of(4) && field(length - 4) == field(4));
            kinds.push(field(0));
            rest = &rest[length..];
        }
        assert_eq!(
            kinds,
            [
                SECTION_HEADER,
                INTERFACE_DESCRIPTION,
                ENHANCED_PACKET,
                ENHANCED_PACKET
            ]
        );
        let comment = b"drop at policy: metadata";
        assert!(file.windows(comment.len()).any(|part| part == comment));
    }
}
