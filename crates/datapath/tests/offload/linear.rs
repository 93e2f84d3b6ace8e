//! What is linear in packets whose payload isn't.

use super::*;

/// What is linear in a packet that arrives. More than its headers would be payload that each packet has
/// had copied, with its head made anew if it was a socket's; less couldn't have been translated in place.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_headers_are_made_linear_and_no_more() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let [(one, _), (other, _)] = &setting.slots;
        for version in [4, 6] {
            let outside = peer(version, 1);
            let from_sandbox = (one, guest(version), GATEWAY_MAC, GUEST_MAC, other);
            let from_stack = (&setting.plain, outside, UPLINK_MAC, PEER_MAC, other);
            for (from, source, to_mac, from_mac, to) in [from_sandbox, from_stack] {
                let (ip, gso_size) = packets(source, clone(version, 1)).remove(2);
                let mut bytes = unfinished(&ip, (to_mac, from_mac), gso_size);
                let headers = VnetHeader::read(&bytes).header_length;
                let options = headers + 12;
                for (given, wanted) in [(0, headers), (headers, headers), (options, options)] {
                    bytes[2..4].copy_from_slice(&given.to_ne_bytes());
                    from.file().write_all(&bytes).expect("the TAP takes it");
                    let seen_as = if source == outside {
                        outside
                    } else {
                        clone(version, 0)
                    };
                    let (header, frame) = receive(to, seen_as);
                    assert_eq!(frame.len(), bytes.len() - VNET_HEADER);
                    assert_eq!(header.header_length, wanted, "IPv{version}, {given} given");
                }
            }
        }
    });
}
