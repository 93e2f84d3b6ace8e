use std::collections::HashSet;

use proptest::prelude::*;
use sandwire_api::{error::ErrorCode, pool::TapSpec};

use super::*;

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// A pool from what differs from the defaults, as JSON, on a host without eBPF.
fn spec(addresses: &str, more: &str) -> PoolSpec {
    let comma = if more.is_empty() { "" } else { "," };
    let text = format!(r#"{{"name": "web", "addresses": {addresses}{comma} {more}}}"#);
    let spec = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
    choose_data_path(&spec, || false)
}

fn plan(addresses: &str, more: &str) -> Plan {
    Plan::new(&name("default"), &spec(addresses, more)).unwrap()
}

fn refusal(addresses: &str, more: &str) -> PlanError {
    let spec = spec(addresses, more);
    Plan::new(&name("default"), &spec).expect_err("this should be refused")
}

const DUAL: &str = r#"{"plan": "prefix", "ipv4": "10.64.0.0/16", "ipv6": "fd00:c10e::/64"}"#;
const SMALL: &str = r#"{"plan": "prefix", "ipv4": "10.64.0.0/24", "ipv6": "fd00:c10e::/64"}"#;
const FIRECRACKER: &str = r#"{"plan": "firecracker_clones"}"#;
const ONLY_IPV4: &str = r#""guest": {"ipv6": ""}"#;

/// What must hold for every plan that is accepted, over all its slot numbers.
fn check_invariants(plan: &Plan) {
    let (mut names, mut host_ends) = (HashSet::new(), HashSet::new());
    let mut addresses = HashSet::new();
    let guest_subnets = plan.guest_subnets();
    let hosts: Vec<IpAddr> = plan
        .host_ipv4
        .map(IpAddr::V4)
        .into_iter()
        .chain(plan.host_ipv6.map(IpAddr::V6))
        .collect();
    assert!(plan.slots_max > 0);
    for number in (0..plan.slots_max).map(SlotNumber) {
        let slot = plan.slot(number);
        assert_eq!(slot.number, number);
        assert!(slot.host_interface.len() <= 15, "{}", slot.host_interface);
        assert_eq!(slot.nics.len(), usize::from(plan.spec.nics));
        assert!(names.insert(slot.netns_name.clone()), "{}", slot.netns_name);
        for name in slot.host_ends() {
            assert!(host_ends.insert(name.to_owned()), "{name} is given twice");
            assert!(name.len() <= 15, "{name}");
            let (tag, interface) = names::parse_host_interface(name).unwrap();
            assert_eq!(
                (tag, plan.slot_of_interface(interface)),
                (&*plan.tag, Some(number))
            );
        }
        let taps: HashSet<&str> = slot.nics.iter().map(|nic| &*nic.tap).collect();
        assert_eq!(taps.len(), slot.nics.len(), "{taps:?}");
        for address in slot.clone_addresses() {
            assert!(addresses.insert(address), "{address} is given twice");
            assert!(!hosts.contains(&address), "{address} is the host's");
            assert_eq!(plan.slot_of_address(address), Some(number), "{address}");
            let within = |prefixes: &[IpNet]| prefixes.iter().any(|net| net.contains(&address));
            assert!(within(&plan.clone_prefixes), "{address} is in no prefix");
            assert!(!within(&guest_subnets), "{address} is a guest's neighbour");
        }
        for nic in &slot.nics {
            assert!(!nic.tap.is_empty() && nic.tap.len() <= 15, "{}", nic.tap);
            if let Some(ipv4) = nic.ipv4 {
                assert!(ipv4.guest.contains(&ipv4.gateway) && ipv4.guest.addr() != ipv4.gateway);
            }
            if let Some(ipv6) = nic.ipv6 {
                assert!(ipv6.guest.contains(&ipv6.gateway) && ipv6.guest.addr() != ipv6.gateway);
            }
        }
        if let Some(transit) = slot.transit {
            for address in [transit.host, transit.slot].map(IpAddr::V4) {
                assert!(addresses.insert(address), "{address} is given twice");
                let prefixes = plan.transit_prefixes();
                assert!(prefixes.iter().any(|net| net.contains(&address)));
            }
        }
    }
    let slot_prefixes = plan.slot_prefixes();
    for host in hosts {
        assert_eq!(plan.slot_of_address(host), None);
        assert!(slot_prefixes.iter().all(|net| !net.contains(&host)));
    }
    for address in addresses.iter().take(300) {
        let is_transit = |net: &IpNet| net.contains(address);
        assert!(
            slot_prefixes.iter().any(|net| net.contains(address))
                || plan.transit_prefixes().iter().any(is_transit)
        );
    }
    assert_eq!(first_overlap(&plan.clone_prefixes, &guest_subnets), None);
}

#[test]
fn all_slots_of_a_dual_stack_prefix_are_distinct() {
    let plan = plan(DUAL, "");
    assert_eq!(plan.slots_max, 65_000);
    assert_eq!(plan.host_ipv4, Some(Ipv4Addr::new(10, 64, 0, 1)));
    check_invariants(&plan);
}

#[test]
fn all_slots_with_several_interfaces_are_distinct() {
    let plan = plan(SMALL, r#""nics": 4"#);
    assert_eq!(plan.slots_max, 253 / 4);
    check_invariants(&plan);
    let slot = plan.slot(SlotNumber(1));
    let taps: Vec<&str> = slot.nics.iter().map(|nic| &*nic.tap).collect();
    assert_eq!(taps, ["vmtap0", "vmtap1", "vmtap2", "vmtap3"]);
    let third = slot.nics[2].ipv4.unwrap();
    assert_eq!(third.guest.to_string(), "192.168.241.18/29");
    assert_eq!(third.gateway.to_string(), "192.168.241.17");
    assert_eq!(third.clone_address.to_string(), "10.64.0.8");
    assert_eq!(slot.nics[2].guest_mac.to_string(), "06:00:c0:a8:f1:04");
}

#[test]
fn the_last_usable_address_is_given_and_the_broadcast_address_is_not() {
    let plan = plan(
        r#"{"plan": "prefix", "ipv4": "10.64.0.0/30"}"#,
        r#""size": 1, "guest": {"ipv6": ""}"#,
    );
    assert_eq!(plan.slots_max, 1);
    let slot = plan.slot(SlotNumber(0));
    assert_eq!(
        slot.nics[0].ipv4.unwrap().clone_address.to_string(),
        "10.64.0.2"
    );
    assert_eq!(plan.slot_of_address("10.64.0.3".parse().unwrap()), None);
    assert_eq!(plan.slot_of_address("10.64.0.0".parse().unwrap()), None);
}

#[test]
fn the_firecracker_scheme_stops_before_the_guests_subnet() {
    let plan = plan(FIRECRACKER, ONLY_IPV4);
    assert_eq!(plan.slots_max, 7230);
    check_invariants(&plan);
    let slot = plan.slot(SlotNumber(31));
    let transit = slot.transit.unwrap();
    assert_eq!(transit.host.to_string(), "10.1.8.1");
    assert_eq!(transit.slot.to_string(), "10.1.8.2");
    let clone_address = slot.nics[0].ipv4.unwrap().clone_address;
    assert_eq!(clone_address.to_string(), "192.168.1.11");
}

#[test]
fn the_firecracker_scheme_ends_where_its_bytes_overflow() {
    let plan = plan(
        FIRECRACKER,
        r#""guest": {"ipv4": "172.16.0.2/30", "ipv6": ""}"#,
    );
    assert_eq!(plan.slots_max, 7680);
    check_invariants(&plan);
    let last = plan.slot(SlotNumber(7679)).nics[0].ipv4.unwrap();
    assert_eq!(last.clone_address.to_string(), "192.168.255.235");
}

#[test]
fn a_guest_subnet_between_the_schemes_addresses_is_left_out_of_its_prefixes() {
    let plan = plan(
        FIRECRACKER,
        r#""guest": {"ipv4": "192.168.5.246/29", "ipv6": ""}"#,
    );
    assert_eq!(plan.slots_max, 7680);
    check_invariants(&plan);
}

#[test]
fn a_guest_subnet_that_meets_the_schemes_transit_stops_it() {
    let plan = plan(
        FIRECRACKER,
        r#""guest": {"ipv4": "10.100.16.2/29", "ipv6": ""}"#,
    );
    assert_eq!(plan.slots_max, 100 * 30 + 2);
    check_invariants(&plan);
    assert!(matches!(
        refusal(
            FIRECRACKER,
            r#""guest": {"ipv4": "192.168.0.2/16", "ipv6": ""}"#
        ),
        PlanError::Overlap { .. }
    ));
}

#[test]
fn the_firecracker_scheme_takes_ipv6_from_a_prefix() {
    let plan = plan(
        r#"{"plan": "firecracker_clones", "ipv6": "fd00:c10e::/64"}"#,
        "",
    );
    assert_eq!(plan.slots_max, 7230);
    check_invariants(&plan);
}

#[test]
fn what_does_not_go_together_is_refused_with_the_reason() {
    let ebpf = |more: &str| format!(r#""data_path": "ebpf", {more}"#);
    let host = |more: &str| format!(r#""kind": "host", "data_path": "ebpf", {more}"#);
    let policy = |field: &str| format!(r#""data_path": "nft", "policy": {{{field}}}"#);
    for (addresses, more, text) in [
        (
            DUAL,
            r#""kind": "host", "data_path": "nft""#.to_owned(),
            "kind = host needs data_path = ebpf",
        ),
        (
            DUAL,
            r#""data_path": "xdp""#.to_owned(),
            "data_path = xdp needs kind = host",
        ),
        (
            FIRECRACKER,
            host(ONLY_IPV4),
            "addresses.plan = firecracker_clones gives addresses",
        ),
        (
            DUAL,
            host(r#""tap": {"name": "tap0"}"#),
            "tap.name = tap0 can't be chosen",
        ),
        (
            DUAL,
            ebpf(r#""guest": {"mac": "02:73:77:76:00:09"}"#),
            "guest.mac = 02:73:77:76:00:09 is among",
        ),
        (
            DUAL,
            policy(r#""group": "a""#),
            "policy.group = a needs data_path = ebpf",
        ),
        (
            DUAL,
            policy(r#""talks_to": ["b"]"#),
            "policy.talks_to = b needs",
        ),
        (
            DUAL,
            policy(r#""egress": {"default": "deny"}"#),
            "policy.egress = 0 rules needs",
        ),
        (
            DUAL,
            policy(r#""limits": {"egress": {"bits_per_second": 8000}}"#),
            "policy.limits = a limit needs",
        ),
        (
            DUAL,
            policy(r#""route_mark": 7"#),
            "policy.route_mark = 7 needs",
        ),
        (
            DUAL,
            policy(r#""route_table": 7"#),
            "policy.route_table = 7 needs",
        ),
    ] {
        let error = refusal(addresses, &more);
        assert_eq!(error.code(), ErrorCode::Unsupported, "{more}");
        assert!(error.to_string().starts_with(text), "{more}: {error}");
    }
}

#[test]
fn a_policy_s_numbers_are_refused_beyond_their_ranges() {
    let limit = |field: &str| format!(r#""limits": {{"ingress": {{{field}}}}}"#);
    let talks_to = |groups: u32| {
        let names: Vec<String> = (0..groups).map(|group| format!(r#""g{group}""#)).collect();
        format!(r#""talks_to": [{}]"#, names.join(","))
    };
    for (field, text) in [
        (
            limit(r#""bits_per_second": 7999"#),
            "policy.limits.ingress.bits_per_second = 7999 is out of range",
        ),
        (
            limit(r#""packets_per_second": 0"#),
            "policy.limits.ingress.packets_per_second = 0",
        ),
        (
            limit(r#""bits_per_second": 8000, "burst_bytes": 1513"#),
            "policy.limits.ingress.burst_bytes = 1513",
        ),
        (
            limit(r#""burst_packets": 5"#),
            "policy.limits.ingress.burst_packets is set but",
        ),
        (r#""route_mark": 0"#.to_owned(), "policy.route_mark = 0"),
        (
            r#""route_mark": 16777216"#.to_owned(),
            "policy.route_mark = 16777216 is out of range: it must be 1 to 16777215",
        ),
        (r#""route_table": 0"#.to_owned(), "policy.route_table = 0"),
        (
            talks_to(65),
            "policy.talks_to names 65 groups, and may name 64: ",
        ),
        (
            r#""talks_to": ["a", "b", "a"]"#.to_owned(),
            "policy.talks_to names group 'a' twice: leave one of them out",
        ),
    ] {
        let more = format!(r#""data_path": "ebpf", "policy": {{{field}}}"#);
        let error = refusal(DUAL, &more);
        assert_eq!(error.code(), ErrorCode::InvalidRequest, "{more}");
        assert!(error.to_string().starts_with(text), "{more}: {error}");
    }
    let most = format!(r#""data_path": "ebpf", "policy": {{{}}}"#, talks_to(64));
    plan(DUAL, &most);
}

#[test]
fn all_host_slots_have_taps_of_their_own() {
    for nics in [1, 3] {
        let more = format!(r#""kind": "host", "data_path": "ebpf", "nics": {nics}"#);
        let plan = plan(DUAL, &more);
        check_invariants(&plan);
        let slot = plan.slot(SlotNumber(plan.slots_max - 1));
        let number = (plan.slots_max - 1) * nics;
        assert_eq!(slot.host_interface, format!("swj67hu4-{number}"));
        assert_eq!(slot.host_interface, slot.nics[0].tap);
        assert_eq!(slot.host_ends().count(), slot.nics.len());
        assert_eq!(slot.api_nics()[0].tap, slot.host_interface);
    }
}

#[test]
fn settings_that_cannot_work_are_refused_by_name() {
    for (addresses, more, text) in [
        (DUAL, r#""nics": 0"#, "nics = 0"),
        (DUAL, r#""nics": 9"#, "nics = 9"),
        (
            FIRECRACKER,
            r#""nics": 2, "guest": {"ipv6": ""}"#,
            "nics = 2",
        ),
        (DUAL, r#""tap": {"mtu": 1279}"#, "tap.mtu = 1279"),
        (DUAL, r#""tap": {"mtu": 65522}"#, "tap.mtu = 65522"),
        (
            DUAL,
            r#""policy": {"connections_max": 0}"#,
            "policy.connections_max = 0",
        ),
        (
            SMALL,
            r#""size": 254"#,
            "size = 254 is out of range: it must be 0 to 253",
        ),
        (
            DUAL,
            r#""tap": {"name": "sixteen-bytes-00"}"#,
            "tap.name: 'sixteen-bytes-00'",
        ),
        (DUAL, r#""tap": {"name": ""}"#, "tap.name"),
        (DUAL, r#""tap": {"name": "a/b"}"#, "tap.name"),
        (DUAL, r#""tap": {"name": "tap%d"}"#, "tap.name"),
        (DUAL, r#""tap": {"name": "uplink0"}"#, "tap.name"),
        (
            DUAL,
            r#""nics": 2, "tap": {"name": "tap"}"#,
            "tap.name: 'tap' must end in a number",
        ),
        (
            DUAL,
            r#""nics": 2, "tap": {"name": "fifteen-bytes-9"}"#,
            "tap.name: 'fifteen-bytes-10'",
        ),
        (
            DUAL,
            r#""guest": {"mac": "01:00:00:00:00:01"}"#,
            "guest.mac",
        ),
        (
            DUAL,
            r#""guest": {"mac": "00:00:00:00:00:00"}"#,
            "guest.mac",
        ),
        (
            DUAL,
            r#""guest": {"mac": "02:73:77:00:00:01"}"#,
            "guest.mac and guest.gateway_mac",
        ),
        (
            DUAL,
            r#""nics": 2, "guest": {"mac": "02:00:00:00:00:ff"}"#,
            "guest.mac",
        ),
        (
            DUAL,
            r#""guest": {"ipv6": ""}"#,
            "addresses.ipv6 is set but guest.ipv6 is not",
        ),
        (
            r#"{"plan": "prefix", "ipv4": "10.64.0.0/16"}"#,
            "",
            "guest.ipv6 is set, as it is unless said otherwise, but addresses.ipv6 is not: set addresses.ipv6, or guest.ipv6 = \"\"",
        ),
        (
            r#"{"plan": "prefix"}"#,
            r#""guest": {"ipv4": "", "ipv6": ""}"#,
            "the guests have neither",
        ),
        (
            r#"{"plan": "prefix", "ipv4": "10.64.0.1/16"}"#,
            ONLY_IPV4,
            "addresses.ipv4 = 10.64.0.1/16 is not a prefix",
        ),
        (
            r#"{"plan": "prefix", "ipv4": "10.64.0.0/31"}"#,
            ONLY_IPV4,
            "addresses.ipv4 = 10.64.0.0/31 is too small",
        ),
        (
            r#"{"plan": "prefix", "ipv4": "127.1.0.0/16"}"#,
            ONLY_IPV4,
            "addresses.ipv4 = 127.1.0.0/16 overlaps",
        ),
        (
            r#"{"plan": "prefix", "ipv4": "169.254.0.0/16"}"#,
            ONLY_IPV4,
            "addresses.ipv4",
        ),
        (
            r#"{"plan": "prefix", "ipv4": "192.168.0.0/16"}"#,
            ONLY_IPV4,
            "guest.ipv4",
        ),
        (
            r#"{"plan": "prefix", "ipv4": "0.0.0.0/0"}"#,
            ONLY_IPV4,
            "guest.ipv4",
        ),
        (
            r#"{"plan": "prefix", "ipv4": "10.64.0.0/16", "ipv6": "fd00::/8"}"#,
            "",
            "guest.ipv6",
        ),
        (
            r#"{"plan": "prefix", "ipv4": "10.64.0.0/16", "ipv6": "fd00:ec2::/64"}"#,
            "",
            "addresses.ipv6",
        ),
        (
            DUAL,
            r#""guest": {"ipv4": "192.168.241.0/29"}"#,
            "guest.ipv4 = 192.168.241.0",
        ),
        (
            DUAL,
            r#""guest": {"ipv4": "192.168.241.7/29"}"#,
            "guest.ipv4 = 192.168.241.7",
        ),
        (
            DUAL,
            r#""guest": {"ipv4": "192.168.241.1/29"}"#,
            "guest.ipv4_gateway = 192.168.241.1 is the guest's own",
        ),
        (
            DUAL,
            r#""guest": {"ipv4_gateway": "192.168.242.1"}"#,
            "guest.ipv4_gateway = 192.168.242.1 is not in",
        ),
        (
            DUAL,
            r#""guest": {"ipv4": "192.168.241.2/31"}"#,
            "guest.ipv4 = 192.168.241.2/31 is too small",
        ),
        (
            DUAL,
            r#""guest": {"ipv6": "fe80::2/64"}"#,
            "guest.ipv6 = fe80::2/64 overlaps",
        ),
        (
            DUAL,
            r#""nics": 8, "guest": {"ipv4": "10.60.0.2/16", "ipv4_gateway": "10.60.0.1"}"#,
            "guest.ipv4 = 10.64.0.2/16 overlaps 10.64.0.0/16",
        ),
    ] {
        let error = refusal(addresses, more);
        assert_eq!(error.code(), ErrorCode::InvalidRequest);
        assert!(error.to_string().starts_with(text), "{more}: {error}");
    }
}

#[test]
fn pools_that_would_meet_on_the_host_are_told_apart_from_those_that_do_not() {
    let web = plan(DUAL, "");
    let inside = plan(r#"{"plan": "prefix", "ipv4": "10.64.7.0/24"}"#, ONLY_IPV4);
    let apart = plan(r#"{"plan": "prefix", "ipv4": "10.65.0.0/16"}"#, ONLY_IPV4);
    let scheme = plan(FIRECRACKER, ONLY_IPV4);
    let on_guests = plan(
        r#"{"plan": "prefix", "ipv4": "192.168.241.0/24"}"#,
        r#""guest": {"ipv4": "172.16.0.2/30", "ipv6": ""}"#,
    );
    assert!(web.overlaps(&inside).is_some() && inside.overlaps(&web).is_some());
    assert_eq!(web.overlaps(&apart), None);
    assert!(web.overlaps(&scheme).is_some(), "transit addresses count");
    assert!(web.overlaps(&on_guests).is_some() && on_guests.overlaps(&web).is_some());
    assert!(scheme.overlaps(&scheme).is_some());
}

/// Small enough to walk through all slots, wild enough to meet every edge.
fn any_spec() -> impl Strategy<Value = PoolSpec> {
    let ipv4_prefix = (any::<u32>(), 0u8..=32)
        .prop_map(|(bits, length)| Ipv4Net::new_assert(Ipv4Addr::from_bits(bits), length));
    let ipv6_prefix = (any::<u128>(), 0u8..=128)
        .prop_map(|(bits, length)| Ipv6Net::new_assert(Ipv6Addr::from_bits(bits), length));
    let likely_ipv4 = prop_oneof![
        1 => ipv4_prefix.clone(),
        4 => (0u32..=255, 16u8..=30).prop_map(|(third, length)| {
            Ipv4Net::new_assert(Ipv4Addr::from_bits(0x0a40_0000 | third << 8), length).trunc()
        }),
    ];
    let likely_ipv6 = prop_oneof![
        1 => ipv6_prefix.clone(),
        4 => (100u8..=127).prop_map(|length| {
            Ipv6Net::new_assert("fd00:c10e::".parse().unwrap(), length)
        }),
    ];
    let guest_ipv4 = prop_oneof![
        1 => ipv4_prefix,
        4 => (any::<u16>(), 8u8..=30).prop_map(|(low, length)| {
            Ipv4Net::new_assert(Ipv4Addr::from_bits(0xc0a8_0000 | u32::from(low)), length)
        }),
    ];
    let guest_ipv6 = prop_oneof![
        1 => ipv6_prefix,
        4 => (any::<u16>(), 64u8..=128).prop_map(|(low, length)| {
            let address = Ipv6Addr::new(0xfd00, 0x5eed, 0, 0, 0, 0, 0, low);
            Ipv6Net::new_assert(address, length)
        }),
    ];
    let addresses = prop_oneof![
        3 => (prop::option::of(likely_ipv4), prop::option::of(likely_ipv6.clone()))
            .prop_map(|(ipv4, ipv6)| AddressPlan::Prefix { ipv4, ipv6 }),
        1 => prop::option::of(likely_ipv6).prop_map(|ipv6| AddressPlan::FirecrackerClones { ipv6 }),
    ];
    (
        addresses,
        prop::option::of(guest_ipv4),
        prop::option::of(guest_ipv6),
        (0u8..=9, any::<[u8; 6]>(), 1000u32..=66_000, 0u32..300),
        prop_oneof![
            Just("vmtap0".to_owned()),
            "[ -~]{0,17}",
            "[a-z]{1,14}[0-9]{1,2}"
        ],
    )
        .prop_map(|(addresses, ipv4, ipv6, (nics, mac, mtu, size), tap)| {
            let mut spec: PoolSpec = spec(DUAL, "");
            (spec.addresses, spec.nics, spec.size) = (addresses, nics, size);
            (spec.guest.ipv4, spec.guest.ipv6) = (ipv4, ipv6);
            (spec.tap.name, spec.tap.mtu) = (tap, mtu);
            if mtu % 3 == 0 {
                spec.kind = SlotKind::Host;
                spec.tap.name = TapSpec::default().name;
            }
            if mtu % 3 != 1 {
                spec.data_path = DataPath::Ebpf;
            }
            if mac[5] % 2 == 0 {
                spec.guest.mac = MacAddress(mac);
            }
            spec
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_settings_are_refused_or_give_distinct_slots(spec in any_spec()) {
        if let Ok(mut plan) = Plan::new(&name("default"), &spec) {
            // The numbers' arithmetic has no steps beyond these; all of them would take hours.
            plan.slots_max = plan.slots_max.min(300);
            check_invariants(&plan);
        }
    }
}

/// A pool that had IPv6 alone may get IPv4 later.
#[test]
fn the_prefixes_of_containers_are_known_whatever_is_said_of_guests() {
    let guests = [
        r#""ipv4": """#,
        r#""ipv6": """#,
        r#""ipv4": "", "ipv6": """#,
    ];
    let pool = |guest: &str| {
        let more = format!(r#""kind": "container", "data_path": "ebpf", "guest": {{{guest}}}"#);
        plan(SMALL, &more)
    };
    let expected = pool("");
    assert_eq!(expected.clone_prefixes.len(), 2);
    for guest in guests {
        assert_eq!(
            pool(guest).clone_prefixes,
            expected.clone_prefixes,
            "{guest}"
        );
    }
}
