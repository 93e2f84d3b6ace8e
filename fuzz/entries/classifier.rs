//! Any bytes are a frame: what is found lies in it, and a rule made of it matches it.

use sandwire_engine::classify::{Fragment, Match, flow_hash, parse};

/// One case.
pub(crate) fn run(bytes: &[u8]) {
    let headers = parse(bytes);
    let _ = flow_hash(&headers);
    assert!(Match::default().matches(&headers));
    let Some(ip) = headers.ip else {
        return;
    };
    assert!(ip.offset < ip.payload_offset && ip.end <= bytes.len());
    assert!(ip.ports.is_none() || ip.fragment != Fragment::Later);
    let rule = Match {
        version: Some(ip.version),
        protocol: Some(ip.protocol),
        source: Some(ip.source.into()),
        destination: Some(ip.destination.into()),
        source_ports: ip.ports.map(|(port, _)| port..=port),
        destination_ports: ip.ports.map(|(_, port)| port..=port),
        vlan: headers.vlan,
    };
    assert!(rule.matches(&headers), "{rule}");
    assert_eq!(rule.check(), Ok(()), "{rule}");
    assert_eq!(rule.reversed().reversed(), rule);
}
