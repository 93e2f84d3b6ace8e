use proptest::prelude::*;

use super::super::{Format, Writer};
use super::*;

/// All frames that can be read, as (time, frame, length, interface), and how it ended.
type Frames = Vec<(Option<u64>, Vec<u8>, u32, u32)>;

fn read_all(file: &[u8]) -> (Frames, Result<(), CaptureError>) {
    let mut frames = Vec::new();
    let mut reader = match Reader::new(file) {
        Ok(reader) => reader,
        Err(error) => return (frames, Err(error)),
    };
    loop {
        match reader.read() {
            Ok(Some(captured)) => frames.push((
                captured.time,
                captured.frame.to_vec(),
                captured.length,
                captured.interface,
            )),
            Ok(None) => return (frames, Ok(())),
            Err(error) => return (frames, Err(error)),
        }
    }
}

/// Numbers of 32 bits in one byte order, for files made by hand.
fn words(big_endian: bool, words: &[u32]) -> Vec<u8> {
    let bytes = words.iter().flat_map(|word| {
        if big_endian {
            word.to_be_bytes()
        } else {
            word.to_le_bytes()
        }
    });
    bytes.collect()
}

/// A block with this body.
fn block(big_endian: bool, kind: u32, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len() + 12).unwrap();
    let head = words(big_endian, &[kind, length]);
    [&head, body, &words(big_endian, &[length])].concat()
}

/// Two numbers of 16 bits.
fn halves(big_endian: bool, one: u16, two: u16) -> Vec<u8> {
    [one, two]
        .into_iter()
        .flat_map(|half| {
            if big_endian {
                half.to_be_bytes()
            } else {
                half.to_le_bytes()
            }
        })
        .collect()
}

/// The begin of a section, and an interface with this link type and options.
fn section(big_endian: bool, link_type: u16, options: &[u8]) -> Vec<u8> {
    let mut header = words(big_endian, &[0x1a2b_3c4d]);
    header.extend(halves(big_endian, 1, 0));
    header.extend([0xff; 8]);
    let mut interface = halves(big_endian, link_type, 0);
    interface.extend(words(big_endian, &[0]));
    interface.extend(options);
    let section = block(big_endian, SECTION_HEADER, &header);
    [
        section,
        block(big_endian, INTERFACE_DESCRIPTION, &interface),
    ]
    .concat()
}

/// An enhanced packet block.
fn enhanced(big_endian: bool, interface: u32, time: u64, frame: &[u8], length: u32) -> Vec<u8> {
    let high = u32::try_from(time >> 32).unwrap();
    let low = u32::try_from(time & 0xffff_ffff).unwrap();
    let captured = u32::try_from(frame.len()).unwrap();
    let mut body = words(big_endian, &[interface, high, low, captured, length]);
    body.extend(frame);
    body.resize(body.len().next_multiple_of(4), 0);
    block(big_endian, ENHANCED_PACKET, &body)
}

#[test]
fn pcap_of_either_order_and_resolution_is_read() {
    for big_endian in [false, true] {
        for (magic, nanos) in [(0xa1b2_c3d4, 7000), (0xa1b2_3c4d, 7)] {
            let mut file = words(big_endian, &[magic]);
            file.extend(halves(big_endian, 2, 4));
            file.extend(words(big_endian, &[0, 0, 65_535, 1]));
            file.extend(words(big_endian, &[3, 7, 5, 60]));
            file.extend(b"frame");
            let (frames, ended) = read_all(&file);
            assert_eq!(
                frames,
                [(Some(3_000_000_000 + nanos), b"frame".to_vec(), 60, 0)]
            );
            assert!(ended.is_ok());
        }
    }
}

#[test]
fn pcapng_has_sections_interfaces_and_blocks_that_one_skips() {
    let mut file = Vec::new();
    for big_endian in [false, true] {
        file.extend(section(big_endian, 1, &[]));
        let mut second = halves(big_endian, 1, 0);
        second.extend(words(big_endian, &[0]));
        file.extend(block(big_endian, 1, &second));
        // Name resolution, and a kind that nobody knows.
        file.extend(block(big_endian, 4, &[0; 4]));
        file.extend(block(big_endian, 0x0bad_beef, &[1; 8]));
        file.extend(enhanced(big_endian, 1, 5, b"one", 3));
        // A simple packet has a length and nothing else.
        let mut simple = words(big_endian, &[2]);
        simple.extend(b"ab\0\0");
        file.extend(block(big_endian, SIMPLE_PACKET, &simple));
        let mut old = halves(big_endian, 0, 9);
        old.extend(words(big_endian, &[0, 6, 4, 4]));
        old.extend(b"old!");
        file.extend(block(big_endian, OLD_PACKET, &old));
    }
    let (frames, ended) = read_all(&file);
    let section = [
        (Some(5000), b"one".to_vec(), 3, 1),
        (None, b"ab".to_vec(), 2, 0),
        (Some(6000), b"old!".to_vec(), 4, 0),
    ];
    assert_eq!(frames, [section.clone(), section].concat());
    assert!(ended.is_ok());
}

#[test]
fn times_of_any_resolution_and_offset_become_nanoseconds() {
    for (resolution, stamp, nanos) in [
        (6, 1_500_000, 1_500_000_000),
        (9, 1_500_000_000, 1_500_000_000),
        (0, 2, 2_000_000_000),
        (3, 1500, 1_500_000_000),
        (12, 1_500_000_000_000, 1_500_000_000),
        (0x80 | 1, 3, 1_500_000_000),
        (0x80 | 10, 1536, 1_500_000_000),
        (127, u64::MAX, 0),
        (0xff, u64::MAX, 0),
        (0, u64::MAX, u64::MAX),
    ] {
        for (offset, shift) in [(0_i64, 0), (10, 10_000_000_000)] {
            let mut options = vec![9, 0, 1, 0, resolution, 0, 0, 0];
            options.extend([14, 0, 8, 0]);
            options.extend(offset.to_le_bytes());
            let mut file = section(false, 1, &options);
            file.extend(enhanced(false, 0, stamp, b"x", 1));
            let (frames, _) = read_all(&file);
            let expected = u64::saturating_add(nanos, shift);
            assert_eq!(frames[0].0, Some(expected), "{resolution:#x}");
        }
    }
    // Before 1970 there is nothing.
    let mut options = vec![14, 0, 8, 0];
    options.extend(i64::MIN.to_le_bytes());
    let mut file = section(false, 1, &options);
    file.extend(enhanced(false, 0, 5, b"x", 1));
    assert_eq!(read_all(&file).0[0].0, Some(0));
}

#[test]
fn what_is_not_ethernet_is_left_out_or_refused() {
    let mut file = section(false, 113, &[]);
    file.extend(enhanced(false, 0, 5, b"x", 1));
    let mut reader = Reader::new(&file[..]).unwrap();
    assert_eq!(reader.read().unwrap(), None);
    assert_eq!(reader.other_link_types(), 1);
    let mut pcap = words(false, &[0xa1b2_c3d4]);
    pcap.extend(halves(false, 2, 4));
    pcap.extend(words(false, &[0, 0, 65_535, 113]));
    assert!(matches!(
        read_all(&pcap).1,
        Err(CaptureError::LinkType(113))
    ));
}

#[test]
fn what_is_no_capture_or_contradicts_itself_is_refused_with_the_reason() {
    let refusal = |file: &[u8]| read_all(file).1.unwrap_err().to_string();
    for file in [&b""[..], b"GIF", b"GIF89a and more", &[0; 100]] {
        assert!(refusal(file).contains("neither pcap nor pcapng"));
    }
    let begin = section(false, 1, &[]);
    let with = |more: &[u8]| refusal(&[&begin, more].concat());
    assert!(with(&enhanced(false, 7, 5, b"x", 1)).contains("isn't described"));
    assert!(with(&words(false, &[6, 13])).contains("impossible length"));
    assert!(with(&words(false, &[6, 8])).contains("impossible length"));
    assert!(with(&words(false, &[6, 0x1000_0000])).contains("16 MiB"));
    assert!(with(&words(false, &[6, 12, 16])).contains("two different lengths"));
    assert!(with(&words(false, &[6, 12, 12])).contains("too short"));
    let mut long = enhanced(false, 0, 5, b"abcd", 4);
    long[20] = 9;
    assert!(with(&long).contains("longer than its block"));
    assert!(refusal(&section(false, 1, &[9, 0, 99, 0])).contains("option longer"));
    let mut record = words(false, &[0xa1b2_c3d4, 0x0004_0002, 0, 0, 0, 1, 0, 0]);
    record.extend(words(false, &[u32::MAX, 60]));
    assert!(refusal(&record).contains("262,144"));
}

#[test]
fn what_came_before_the_cut_is_read() {
    for format in [Format::Pcap, Format::Pcapng] {
        let mut writer = Writer::new(Vec::new(), format, &["a"]).unwrap();
        writer.write(0, 1, b"first", None).unwrap();
        let one = writer.into_inner();
        let mut writer = Writer::new(Vec::new(), format, &["a"]).unwrap();
        writer.write(0, 1, b"first", None).unwrap();
        writer.write(0, 2, b"second", None).unwrap();
        let both = writer.into_inner();
        for cut in one.len() + 1..both.len() {
            let (frames, ended) = read_all(&both[..cut]);
            assert_eq!(frames.len(), 1);
            assert!(matches!(ended, Err(CaptureError::CutShort)), "{cut}");
        }
    }
}

proptest! {
    #[test]
    fn what_was_written_is_read(
        frames in prop::collection::vec(
            (0..4_000_000_000_000_000_000_u64, prop::collection::vec(any::<u8>(), 0..200), any::<bool>()),
            0..20,
        ),
        is_pcap in any::<bool>(),
    ) {
        let format = if is_pcap { Format::Pcap } else { Format::Pcapng };
        let mut writer = Writer::new(Vec::new(), format, &["a", "b"]).unwrap();
        for (time, frame, second) in &frames {
            writer.write((*second).into(), *time, frame, second.then_some("why")).unwrap();
        }
        let (read, ended) = read_all(&writer.into_inner());
        prop_assert!(ended.is_ok());
        let expected: Frames = frames
            .into_iter()
            .map(|(time, frame, second)| {
                let length = u32::try_from(frame.len()).unwrap();
                (Some(time), frame, length, u32::from(second && !is_pcap))
            })
            .collect();
        prop_assert_eq!(read, expected);
    }

    #[test]
    fn any_bytes_can_be_read(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = read_all(&bytes);
        for begin in [section(false, 1, &[]), section(true, 1, &[])] {
            let _ = read_all(&[&begin[..], &bytes].concat());
        }
    }

    #[test]
    fn a_file_with_changed_bytes_can_be_read(
        is_pcap in any::<bool>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
    ) {
        let format = if is_pcap { Format::Pcap } else { Format::Pcapng };
        let mut writer = Writer::new(Vec::new(), format, &["a"]).unwrap();
        for time in 0..5 {
            writer.write(0, time, &[7; 60], Some("comment")).unwrap();
        }
        let mut file = writer.into_inner();
        for (at, byte) in changes {
            *at.get_mut(&mut file[..]) = byte;
        }
        let (frames, _) = read_all(&file);
        prop_assert!(frames.iter().all(|(_, frame, length, _)| frame.len() as u64 <= u64::from(*length)));
    }
}
