use proptest::prelude::*;
use sandwire_engine::classify::Fragment;

use super::*;
use crate::test_frames::{assert_checksums, tagged, tcp, udp, unreachable, with_df};

const V4: [&str; 2] = ["10.0.0.1:4000", "10.9.9.9:53"];
const V6: [&str; 2] = ["[fd00::1]:4000", "[fd00::2]:53"];

fn model(bytes: u32) -> MtuModel {
    MtuModel {
        bytes,
        answer: true,
        without_df: WithoutDf::Fragment,
    }
}

fn passage(model: MtuModel, frame: &[u8]) -> Passage {
    model.passage(frame, 0, &mut Answers::default())
}

fn answer(model: MtuModel, frame: &[u8]) -> Vec<u8> {
    match passage(model, frame) {
        Passage::Refused(Some(answer)) => answer,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_counts_is_the_packet_not_the_frame() {
    let frame = udp(V4[0], V4[1], &[7; 72]);
    assert_eq!(passage(model(100), &frame), Passage::Fits);
    assert_eq!(passage(model(100), &tagged(frame.clone())), Passage::Fits);
    let padded = [&frame[..], &[0; 20]].concat();
    assert_eq!(passage(model(100), &padded), Passage::Fits);
    assert!(matches!(passage(model(99), &frame), Passage::Refused(_)));
    let unknown = [&[0; 12], &[0x88, 0xb5][..], &[0; 100]].concat();
    assert_eq!(passage(model(100), &unknown), Passage::Fits);
    assert_eq!(passage(model(99), &unknown), Passage::Refused(None));
    assert_eq!(passage(model(0), &[]), Passage::Fits);
}

/// RFC 1191 §4: type 3, code 4, the MTU in the last two bytes of the header, and what it is about.
#[test]
fn who_forbids_fragments_is_told_the_mtu() {
    let frame = udp(V4[0], V4[1], &[7; 1400]);
    let answer = answer(model(1300), &tagged(frame.clone()));
    assert_eq!(answer[..6], frame[6..12]);
    assert_eq!(answer[6..12], frame[..6]);
    assert_checksums(&answer);
    let headers = classify::parse(&answer);
    let ip = headers.ip.unwrap();
    assert_eq!((headers.vlan, ip.icmp), (Some(7), Some((3, 4))));
    assert_eq!(ip.source.to_string(), "10.9.9.9");
    assert_eq!(ip.destination.to_string(), "10.0.0.1");
    assert_eq!(ip.end - ip.offset, 576);
    let message = &answer[ip.payload_offset..ip.end];
    assert_eq!(message[4..8], [0, 0, 0x05, 0x14]);
    assert_eq!(message[8..], frame[14..14 + 548]);
}

/// RFC 4443 §3.2: type 2, code 0, the MTU in four bytes.
#[test]
fn an_ipv6_packet_is_too_big() {
    let frame = udp(V6[0], V6[1], &[7; 1452]);
    let answer = answer(model(1400), &frame);
    assert_checksums(&answer);
    let ip = classify::parse(&answer).ip.unwrap();
    assert_eq!(ip.icmp, Some((2, 0)));
    assert_eq!(ip.end - ip.offset, 1280);
    let message = &answer[ip.payload_offset..ip.end];
    assert_eq!(message[4..8], 1400u32.to_be_bytes());
    assert_eq!(message[8..], frame[14..14 + 1232]);
}

#[test]
fn no_answer_goes_where_the_standards_forbid_it() {
    let silent = [
        udp("0.0.0.0:1", V4[1], &[0; 200]),
        udp(V4[0], "224.0.0.251:5353", &[0; 200]),
        udp(V4[0], "255.255.255.255:67", &[0; 200]),
        udp(V6[0], "[ff02::fb]:5353", &[0; 200]),
        unreachable(&udp(V4[0], V4[1], &[0; 200])),
        unreachable(&udp(V6[0], V6[1], &[0; 200])),
    ];
    for frame in silent {
        assert_eq!(passage(model(100), &frame), Passage::Refused(None));
    }
    let quiet = MtuModel {
        answer: false,
        ..model(100)
    };
    let frame = udp(V4[0], V4[1], &[0; 200]);
    assert_eq!(passage(quiet, &frame), Passage::Refused(None));
}

#[test]
fn answers_are_no_more_than_one_each_millisecond() {
    let mut answers = Answers::default();
    let frame = tcp(V4[0], V4[1], 0);
    let told = (0..5000u64)
        .map(|tick| tick * 10_000)
        .filter(|&now| {
            let passage = model(30).passage(&frame, now, &mut answers);
            matches!(passage, Passage::Refused(Some(_)))
        })
        .count();
    assert_eq!(told, 50);
}

#[test]
fn fragments_may_be_dropped_instead() {
    let frame = with_df(udp(V4[0], V4[1], &[0; 200]), false);
    let dropping = MtuModel {
        without_df: WithoutDf::Drop,
        ..model(100)
    };
    assert_eq!(passage(dropping, &frame), Passage::Refused(None));
    // No room for eight bytes behind the header.
    assert_eq!(passage(model(27), &frame), Passage::Refused(None));
}

/// RFC 791 §3.1: record route (7) isn't copied, a source route (131) is.
#[test]
fn only_options_with_the_copied_bit_go_with_later_fragments() {
    let mut header = vec![0; 20];
    header[0] = 0x4a;
    header.extend([7, 7, 4, 0, 0, 0, 0, 1, 131, 7, 4, 9, 9, 9, 9, 0, 0, 0, 0, 0]);
    let later = header_of_later(&header);
    assert_eq!(later[0], 0x47);
    assert_eq!(later[20..], [131, 7, 4, 9, 9, 9, 9, 0]);
}

proptest! {
    /// Also fragments of fragments.
    #[test]
    fn fragments_put_together_are_the_packet(
        data in prop::collection::vec(any::<u8>(), 0..3000),
        first_mtu in 68u32..1500,
        second_mtu in 68u32..1500,
        is_tagged in any::<bool>(),
    ) {
        let mut frame = with_df(udp(V4[0], V4[1], &data), false);
        if is_tagged {
            frame = tagged(frame);
        }
        let cut = |frame: Vec<u8>, mtu| match passage(model(mtu), &frame) {
            Passage::Fits => vec![frame],
            Passage::Fragments(parts) => parts,
            Passage::Refused(_) => panic!("it may be fragmented"),
        };
        let parts: Vec<Vec<u8>> = cut(frame.clone(), first_mtu)
            .into_iter()
            .flat_map(|part| cut(part, second_mtu))
            .collect();
        let whole = classify::parse(&frame).ip.unwrap();
        let mut together = Vec::new();
        for (index, part) in parts.iter().enumerate() {
            let ip = classify::parse(part).ip.unwrap();
            let mtu = usize::try_from(first_mtu.min(second_mtu)).unwrap();
            prop_assert!(ip.end - ip.offset <= mtu);
            prop_assert_eq!(ip.end, part.len());
            let header = &part[ip.offset..ip.payload_offset];
            prop_assert_eq!(checksum::finish(checksum::sum(0, header)), 0);
            let place = u16::from_be_bytes([header[6], header[7]]);
            prop_assert_eq!(usize::from(place & PLACE_MASK) * 8, together.len());
            let is_last = index + 1 == parts.len();
            prop_assert_eq!(place & MORE_FRAGMENTS == 0, is_last);
            prop_assert_eq!(ip.fragment == Fragment::Later, index > 0);
            together.extend_from_slice(&part[ip.payload_offset..]);
        }
        prop_assert_eq!(&together[..], &frame[whole.payload_offset..]);
    }

    #[test]
    fn any_bytes_get_a_passage(
        mut frame in prop::collection::vec(any::<u8>(), 0..200),
        mtu in 0u32..120,
        ether_type in prop::sample::select(vec![[0x08, 0x00], [0x86, 0xdd], [0x81, 0x00]]),
        first in prop::sample::select(vec![0x45u8, 0x4f, 0x60]),
    ) {
        if frame.len() > 14 {
            frame[12..14].copy_from_slice(&ether_type);
            frame[14] = first;
        }
        let bytes = frame.len();
        if let Passage::Fragments(parts) = passage(model(mtu), &frame) {
            prop_assert!(parts.iter().all(|part| part.len() < bytes));
        }
    }
}
