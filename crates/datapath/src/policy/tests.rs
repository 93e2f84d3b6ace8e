//! The compiled form, read by a simple interpreter, against the definition in `EgressPolicy`.

use std::net::IpAddr;

use proptest::prelude::*;
use sandwire_api::policy::EgressRule;

use super::*;

/// What a packet is to the policy: where to, which protocol, and the port unless it is a later fragment.
#[derive(Clone, Copy, Debug)]
struct Packet {
    to: IpAddr,
    protocol: u8,
    port: Option<u16>,
}

/// The definition, word by word.
fn defined(egress: &EgressPolicy, packet: Packet) -> PolicyAction {
    for length in (0..=128).rev() {
        for rule in &egress.rules {
            let is_here =
                |prefix: &IpNet| prefix.prefix_len() == length && prefix.contains(&packet.to);
            // A prefix that is written twice in one rule is one prefix.
            if rule.prefixes.iter().any(is_here) && ports_cover(&rule.ports, packet) {
                return rule.action;
            }
        }
    }
    egress.default
}

fn ports_cover(ports: &[HostService], packet: Packet) -> bool {
    let inside = |first, last| {
        packet
            .port
            .is_none_or(|port| (first..=last).contains(&port))
    };
    ports.is_empty()
        || ports.iter().any(|ports| match *ports {
            HostService::All => true,
            HostService::Icmp => matches!(packet.protocol, 1 | 58),
            HostService::Tcp(first, last) => packet.protocol == 6 && inside(first, last),
            HostService::Udp(first, last) => packet.protocol == 17 && inside(first, last),
        })
}

/// What the programs do with the compiled form: allow, or deny with a reason.
fn interpreted(compiled: &Compiled, packet: Packet) -> Result<(), u16> {
    let default = if compiled.policy.flags & PolicyFlag::Allow.number() != 0 {
        Ok(())
    } else {
        Err(u16::from(DropReason::Policy as u8))
    };
    let found = compiled
        .prefixes
        .iter()
        .filter(|(key, _)| matches(key, packet.to))
        .max_by_key(|(key, _)| key.prefix_length);
    let Some((_, value)) = found else {
        return default;
    };
    let outcome = |action: u16| {
        if action == 1 {
            Ok(())
        } else {
            Err(value.reason)
        }
    };
    let Some(list) = value.list.checked_sub(1) else {
        return outcome(value.action);
    };
    let list = &compiled.lists[list as usize];
    let first = list.rules[..list.count as usize]
        .iter()
        .find(|rule| rule_covers(rule, packet));
    first.map_or(default, |rule| outcome(rule.action.into()))
}

fn matches(key: &PrefixKey, address: IpAddr) -> bool {
    let bits = |address: abi::Address| {
        u128::from_be_bytes(abi::Plain::bytes(&address).try_into().unwrap())
    };
    let difference = bits(key.address) ^ bits(address.into());
    assert!(key.prefix_length >= 32);
    difference.leading_zeros() >= key.prefix_length - 32
}

fn rule_covers(rule: &PortRule, packet: Packet) -> bool {
    let protocol = if packet.protocol == 58 {
        1
    } else {
        packet.protocol
    };
    rule.protocol == 0
        || (rule.protocol == protocol
            && (protocol == 1
                || packet
                    .port
                    .is_none_or(|port| (rule.first..=rule.last).contains(&port))))
}

/// Addresses that are close to one another, so that prefixes overlap.
fn address() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        (0_u8..4, 0_u8..4, any::<u8>()).prop_map(|(b, c, d)| IpAddr::from([
            10,
            b * 64,
            c * 64,
            d & 0xf3
        ])),
        (0_u16..4, 0_u16..4).prop_map(|(a, b)| IpAddr::from([
            0xfd00,
            a << 14,
            0,
            0,
            0,
            0,
            0,
            b << 7
        ])),
    ]
}

fn prefix() -> impl Strategy<Value = IpNet> {
    (address(), 0_u8..=128).prop_map(|(address, length)| {
        let length = if address.is_ipv4() {
            length % 33
        } else {
            length
        };
        IpNet::new(address, length).unwrap()
    })
}

fn ports() -> impl Strategy<Value = HostService> {
    let range = || (1_u16..6, 0_u16..3).prop_map(|(first, more)| (first, first + more));
    prop_oneof![
        1 => Just(HostService::All),
        1 => Just(HostService::Icmp),
        3 => range().prop_map(|(first, last)| HostService::Tcp(first, last)),
        3 => range().prop_map(|(first, last)| HostService::Udp(first, last)),
    ]
}

fn action() -> impl Strategy<Value = PolicyAction> {
    prop_oneof![Just(PolicyAction::Allow), Just(PolicyAction::Deny)]
}

fn egress() -> impl Strategy<Value = EgressPolicy> {
    let rule = (
        action(),
        prop::collection::vec(prefix(), 1..4),
        prop::collection::vec(ports(), 0..3),
    );
    let rule = rule.prop_map(|(action, prefixes, ports)| EgressRule {
        action,
        prefixes,
        ports,
    });
    (action(), prop::collection::vec(rule, 0..8))
        .prop_map(|(default, rules)| EgressPolicy { default, rules })
}

fn packet() -> impl Strategy<Value = Packet> {
    let protocol = prop_oneof![Just(6_u8), Just(17), Just(1), Just(58), Just(132)];
    (address(), protocol, prop::option::weighted(0.8, 1_u16..9))
        .prop_map(|(to, protocol, port)| Packet { to, protocol, port })
}

fn spec(egress: EgressPolicy) -> PolicySpec {
    PolicySpec {
        egress,
        cloud_metadata: true,
        ..PolicySpec::default()
    }
}

fn one_rule(action: PolicyAction, prefixes: &[&str], ports: &[HostService]) -> EgressRule {
    EgressRule {
        action,
        prefixes: prefixes.iter().map(|text| text.parse().unwrap()).collect(),
        ports: ports.to_vec(),
    }
}

fn to(address: &str) -> Packet {
    Packet {
        to: address.parse().unwrap(),
        protocol: 6,
        port: Some(443),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_compiled_form_means_what_the_rules_say(
        egress in egress(),
        packets in prop::collection::vec(packet(), 32),
    ) {
        let compiled = match compile(&spec(egress.clone()), &[]) {
            Ok(compiled) => compiled,
            Err(PolicyError::Rules(..)) => return Err(TestCaseError::reject("too many rules")),
            Err(other) => return Err(TestCaseError::fail(other.to_string())),
        };
        for packet in packets {
            let expected = defined(&egress, packet) == PolicyAction::Allow;
            prop_assert_eq!(interpreted(&compiled, packet).is_ok(), expected, "{:?}", packet);
        }
    }

    #[test]
    fn no_rule_opens_metadata_or_clone_addresses(
        egress in egress(),
        clone_prefixes in prop::collection::vec(prefix(), 1..3),
        packets in prop::collection::vec(packet(), 32),
    ) {
        let mut spec = spec(egress);
        spec.cloud_metadata = false;
        let metadata = [
            "169.254.169.254", "169.254.170.2", "169.254.170.23", "169.254.0.23", "100.100.100.200",
            "fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "fd00:c1::a9fe:a9fe",
        ];
        let all = ["0.0.0.0/0", "::/0", "169.254.169.254/32", "fd00:ec2::254/128"];
        spec.egress.rules.insert(0, one_rule(PolicyAction::Allow, &all, &[]));
        let Ok(compiled) = compile(&spec, &clone_prefixes) else {
            return Err(TestCaseError::reject("too many rules"));
        };
        for address in metadata {
            let reason = u16::from(DropReason::Metadata as u8);
            prop_assert_eq!(interpreted(&compiled, to(address)), Err(reason));
        }
        for packet in packets {
            let is_clone = clone_prefixes.iter().any(|prefix| prefix.contains(&packet.to));
            let reason = u16::from(DropReason::NoSuchSandbox as u8);
            let outcome = interpreted(&compiled, packet);
            prop_assert_eq!(outcome == Err(reason), is_clone, "{:?}", packet);
        }
    }
}

#[test]
fn a_rule_may_deny_the_metadata_that_the_policy_allows() {
    let address = "169.254.169.254";
    let mut spec = spec(EgressPolicy::default());
    assert_eq!(
        interpreted(&compile(&spec, &[]).unwrap(), to(address)),
        Ok(())
    );
    let deny = one_rule(PolicyAction::Deny, &["169.254.0.0/16"], &[]);
    spec.egress.rules.push(deny);
    let reason = u16::from(DropReason::Policy as u8);
    assert_eq!(
        interpreted(&compile(&spec, &[]).unwrap(), to(address)),
        Err(reason)
    );
}

#[test]
fn what_is_said_of_all_ipv6_does_not_hold_for_ipv4() {
    let deny = one_rule(PolicyAction::Deny, &["::/0"], &[]);
    let spec = spec(EgressPolicy {
        rules: vec![deny],
        ..EgressPolicy::default()
    });
    let compiled = compile(&spec, &[]).unwrap();
    assert!(interpreted(&compiled, to("2001:db8::1")).is_err());
    assert!(interpreted(&compiled, to("192.0.2.1")).is_ok());
}

#[test]
fn equal_rules_share_a_list_and_whole_prefixes_need_none() {
    let ports = [HostService::Tcp(443, 443)];
    let spec = spec(EgressPolicy {
        default: PolicyAction::Deny,
        rules: vec![
            one_rule(
                PolicyAction::Allow,
                &["192.0.2.0/24", "198.51.100.0/24"],
                &ports,
            ),
            one_rule(PolicyAction::Allow, &["203.0.113.0/24"], &[]),
        ],
    });
    let compiled = compile(&spec, &[]).unwrap();
    let lists: Vec<u32> = compiled
        .prefixes
        .iter()
        .map(|(_, value)| value.list)
        .collect();
    assert_eq!(lists, [1, 1, 0]);
    assert_eq!(compiled.lists.len(), 1);
    assert_eq!(compiled.policy.flags & PolicyFlag::Allow.number(), 0);
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let ports: Vec<HostService> = (1..=17).map(|port| HostService::Tcp(port, port)).collect();
    let mut too_many = spec(EgressPolicy::default());
    too_many.host_services.clone_from(&ports);
    assert_eq!(compile(&too_many, &[]), Err(PolicyError::Services(17)));

    let wide = one_rule(PolicyAction::Deny, &["192.0.2.0/24"], &ports);
    let ports: Vec<HostService> = (1..=16).map(|port| HostService::Udp(port, port)).collect();
    let narrow = one_rule(PolicyAction::Deny, &["192.0.2.128/25"], &ports);
    let too_many = spec(EgressPolicy {
        rules: vec![wide, narrow],
        ..EgressPolicy::default()
    });
    let text = compile(&too_many, &[]).unwrap_err().to_string();
    assert_eq!(
        text,
        "192.0.2.128/25 and the prefixes around it have 33 egress rules; at most 32 are possible"
    );

    let mapped = one_rule(PolicyAction::Deny, &["::ffff:192.0.2.0/120"], &[]);
    let mapped = spec(EgressPolicy {
        rules: vec![mapped],
        ..EgressPolicy::default()
    });
    assert!(matches!(compile(&mapped, &[]), Err(PolicyError::Mapped(_))));

    let prefix = "192.0.2.0/24".parse().unwrap();
    let many = EgressRule {
        action: PolicyAction::Deny,
        prefixes: vec![prefix; PREFIXES_MAX + 1],
        ports: Vec::new(),
    };
    let many = spec(EgressPolicy {
        rules: vec![many],
        ..EgressPolicy::default()
    });
    assert_eq!(
        compile(&many, &[]),
        Err(PolicyError::Prefixes(PREFIXES_MAX + 1))
    );
}

/// How many packets of `bytes` pass at once, and how many in the second after that.
fn passed(limit: &Limit, bytes: u64) -> (u64, u64) {
    let (mut due_bytes, mut due_packets) = (0_u64, 0_u64);
    let mut count = |now: u64| {
        let mut passed = 0;
        while due_bytes.saturating_sub(now) <= limit.byte_burst
            && due_packets.saturating_sub(now) <= limit.packet_burst
        {
            due_bytes = due_bytes.max(now) + ((bytes * limit.byte_cost) >> BYTE_COST_SHIFT);
            due_packets = due_packets.max(now) + limit.packet_cost;
            passed += 1;
        }
        passed
    };
    let burst = count(1_000_000_000);
    (burst, count(2_000_000_000))
}

#[test]
fn limits_let_through_what_they_say() {
    let packets = RateLimit {
        packets_per_second: Some(1_000),
        burst_packets: Some(200),
        ..RateLimit::default()
    };
    // A second is longer than the burst: what was not used is gone.
    assert_eq!(passed(&limit(&packets).unwrap(), 1_000), (200, 200));
    let bytes = RateLimit {
        bits_per_second: Some(80_000_000),
        burst_bytes: Some(20_000_000),
        ..RateLimit::default()
    };
    let (burst, then) = passed(&limit(&bytes).unwrap(), 1_000);
    assert!((20_000..=20_001).contains(&burst), "{burst}");
    assert!((9_999..=10_001).contains(&then), "{then}");
    assert_eq!(limit(&RateLimit::default()), Ok(Limit::default()));
}

#[test]
fn rates_out_of_range_are_refused() {
    let slow = RateLimit {
        bits_per_second: Some(7_999),
        ..RateLimit::default()
    };
    assert_eq!(
        limit(&slow).unwrap_err().to_string(),
        "bits_per_second is 7999; possible is 8,000 to 1,000,000,000,000"
    );
    let endless = RateLimit {
        packets_per_second: Some(1),
        burst_packets: Some(u64::MAX),
        ..RateLimit::default()
    };
    assert!(limit(&endless).is_err());
    let fastest = RateLimit {
        bits_per_second: Some(1_000_000_000_000),
        packets_per_second: Some(1_000_000_000),
        ..RateLimit::default()
    };
    let limit = limit(&fastest).unwrap();
    assert!(limit.byte_cost > 8_000 && limit.packet_cost == 1);
}
