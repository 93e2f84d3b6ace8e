//! How much of the host's nft table there is: all of it for those whose packets it judges or translates, and
//! otherwise a guard that tracks no connections. The judges are `nft`, the kernel's count of connections, and
//! packets.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod fixture;

use std::{
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    time::Duration,
};

use fixture::{EBPF_KINDS, INSTANCE, IPV4, IPV6, ebpf_pool, pool_of};
use sandwire_api::{
    published_port::{Protocol, PublishPort},
    slot::DataPath,
};
use sandwire_slot::{
    kernel::KernelNetwork,
    network::{Network, Tenancy},
    plan::{Plan, SlotNumber, SlotPlan},
};
use sandwire_testlab::{
    fake_guest::FakeGuest,
    host::{Beyond, HOST_IPV4, HOST_IPV6},
    lab::{self, Lab},
};

const PATIENCE: Duration = Duration::from_secs(60);
/// For what must not arrive.
const IN_VAIN: Duration = Duration::from_millis(500);
const TABLE: &str = "sandwire-test";
const ROUTE: &str = r#"{"uplink":"route","host_services":["all"]}"#;
const MASQUERADE: &str = r#"{"uplink":"masquerade"}"#;
const GUARD: &[&str] = &["raw"];
const FULL: &[&str] = &[
    "connections_4096",
    "forward",
    "input",
    "publish",
    "publish_local",
    "raw",
    "uplink",
];
const NONE: &[&str] = &[];

fn first(kind: &str, policy: &str) -> Plan {
    ebpf_pool("first", kind, policy, IPV4, IPV6)
}

fn second(policy: &str) -> Plan {
    ebpf_pool("second", "host", policy, "10.65.0.0/24", "fd00:c10f::/64")
}

fn by_nft() -> Plan {
    pool_of("nft", "{}", "{}", "10.66.0.0/24", "fd00:c110::/64")
}

fn open() -> KernelNetwork {
    KernelNetwork::open(INSTANCE).unwrap()
}

/// The table's chains, sorted; none if there is no table.
fn chains(lab: &Lab) -> Vec<String> {
    let listed: serde_json::Value = serde_json::from_str(&lab.run("nft -j list chains")).unwrap();
    let objects = listed["nftables"].as_array().unwrap();
    let chains = objects.iter().map(|object| &object["chain"]);
    let ours = chains.filter(|chain| chain["table"] == TABLE);
    let mut names: Vec<String> = ours
        .map(|chain| chain["name"].as_str().unwrap().to_owned())
        .collect();
    names.sort();
    names
}

/// How many elements the set of host ends has.
fn host_ends(lab: &Lab) -> usize {
    let text = lab.run(&format!("nft -j list set inet {TABLE} host_ends"));
    let listed: serde_json::Value = serde_json::from_str(&text).unwrap();
    let objects = listed["nftables"].as_array().unwrap();
    let sets = objects
        .iter()
        .filter_map(|object| object["set"].as_object());
    sets.filter_map(|set| set.get("elem")?.as_array().map(Vec::len))
        .sum()
}

fn started(network: &KernelNetwork, plan: &Plan) -> (SlotPlan, FakeGuest) {
    let slot = plan.slot(SlotNumber(0));
    network.build(&slot).unwrap();
    let policy = &plan.spec.policy;
    let tenancy = Tenancy {
        policy: network.add_policy(policy).unwrap(),
        group: sandwire_datapath::group_number(plan.group_of(policy).as_str()),
        is_process: false,
    };
    network.activate(&slot, &tenancy).unwrap();
    let netns = match slot.has_netns() {
        true => slot.netns_path(),
        false => "/proc/self/ns/net".to_owned(),
    };
    let guest = FakeGuest::attach(netns.as_ref(), &slot.nics[0].tap).unwrap();
    let known = guest.network();
    for gateway in [IpAddr::from(known.ipv4_gateway), known.ipv6_gateway.into()] {
        guest.ping(gateway, PATIENCE).unwrap();
    }
    (slot, guest)
}

fn port(slot: &SlotPlan) -> (PublishPort, Vec<IpAddr>) {
    let port = r#"{"protocol":"tcp","host_port":8080,"clone_port":80}"#;
    (
        serde_json::from_str(port).unwrap(),
        slot.clone_addresses().collect(),
    )
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn pools_that_are_only_routed_cost_the_host_no_connection_tracking() {
    lab::run(|lab| {
        let _beyond = Beyond::attach().unwrap();
        let tracked = || lab.run("cat /proc/sys/net/netfilter/nf_conntrack_count");
        // Connections are remembered for a while: those that must not be come first.
        for (policy, extent, is_tracked) in [(ROUTE, GUARD, false), (MASQUERADE, FULL, true)] {
            for kind in EBPF_KINDS {
                let network = open();
                let plan = first(kind, policy);
                network.add_pool(&plan).unwrap();
                assert_eq!(chains(lab), extent, "{kind} {policy}");
                let (slot, guest) = started(&network, &plan);
                for address in slot.clone_addresses() {
                    let version = if address.is_ipv4() { 4 } else { 6 };
                    lab.run(&format!("ping -{version} -c 1 -W 5 {address}"));
                }
                assert_eq!(tracked().trim() != "0", is_tracked, "{kind} {policy}");
                guest.detach().unwrap();
                assert!(network.tear_down(&[slot]).remove(0).is_ok());
                network.remove_pool(&plan).unwrap();
                assert_eq!(chains(lab), NONE, "{kind} {policy}");
            }
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_table_is_whole_from_the_first_that_needs_it_to_the_last() {
    lab::run(|lab| {
        let network = open();
        let routed = first("host", ROUTE);
        network.add_pool(&routed).unwrap();
        let alone = host_ends(lab);
        assert_eq!(chains(lab), GUARD);

        network.add_pool(&by_nft()).unwrap();
        assert_eq!(chains(lab), FULL);
        network.add_pool(&second(MASQUERADE)).unwrap();
        network.remove_pool(&by_nft()).unwrap();
        assert_eq!(chains(lab), FULL, "the other pool masquerades");

        // Policies change while sandboxes run.
        network
            .change_pool(&second(r#"{"uplink":"deny"}"#), None)
            .unwrap();
        assert_eq!(chains(lab), GUARD);
        network.change_pool(&second(MASQUERADE), None).unwrap();
        assert_eq!(chains(lab), FULL);
        let listed = lab.run(&format!("nft list set inet {TABLE} masqueraded4"));
        assert!(listed.contains("10.65.0.0/24"), "{listed}");
        let published = [port(&routed.slot(SlotNumber(0)))];
        network.set_published_ports(&published).unwrap();
        network.remove_pool(&second(MASQUERADE)).unwrap();
        assert_eq!(chains(lab), FULL, "a port is published");
        network.set_published_ports(&[]).unwrap();
        assert_eq!(chains(lab), GUARD);
        assert_eq!(host_ends(lab), alone);

        network.set_published_ports(&published).unwrap();
        assert_eq!(chains(lab), FULL);
        let listed = lab.run(&format!("nft list map inet {TABLE} any_ports4"));
        assert!(listed.contains("tcp . 8080 : 10.64.0."), "{listed}");
        network.set_published_ports(&[]).unwrap();
        network.remove_pool(&routed).unwrap();
        assert_eq!(chains(lab), NONE);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_pool_moves_between_nft_and_ebpf_with_all_of_the_table() {
    lab::run(|lab| {
        let network = open();
        let by_ebpf = first("netns", ROUTE);
        let before = pool_of("first", ROUTE, "{}", IPV4, IPV6);
        network.add_pool(&before).unwrap();
        assert_eq!(chains(lab), FULL);
        network.change_pool(&by_ebpf, Some(DataPath::Nft)).unwrap();
        assert_eq!(chains(lab), FULL, "slots that haven't moved need it");
        network.change_pool(&by_ebpf, None).unwrap();
        assert_eq!(chains(lab), GUARD);
        network.change_pool(&before, Some(DataPath::Ebpf)).unwrap();
        assert_eq!(chains(lab), FULL);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_audit_restores_what_is_needed_and_makes_no_more() {
    lab::run(|lab| {
        let network = open();
        let plan = first("host", ROUTE);
        network.add_pool(&plan).unwrap();
        let pools = [plan.spec.name.clone(), second(MASQUERADE).spec.name];
        assert_eq!(network.inspect_host(&pools[..1]), []);
        let damages = |extent: &[&str]| {
            for damage in ["delete table inet", "flush table inet"] {
                lab.run(&format!("nft {damage} {TABLE}"));
                let defects = network.inspect_host(&pools);
                assert_eq!(defects.len(), 1, "{damage}: {defects:?}");
                assert_eq!(defects[0].action, "repaired", "{damage}: {defects:?}");
                assert_eq!(chains(lab), extent, "{damage}");
                assert_eq!(network.inspect_host(&pools), [], "{damage}");
            }
        };
        damages(GUARD);
        network.add_pool(&second(MASQUERADE)).unwrap();
        damages(FULL);
        assert!(host_ends(lab) > 0);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_start_takes_the_table_over_as_it_is() {
    lab::run(|lab| {
        let plans = [first("host", ROUTE), second(MASQUERADE)];
        let network = open();
        for plan in &plans {
            network.add_pool(plan).unwrap();
        }
        let rules = || lab.run(&format!("nft -a list table inet {TABLE}"));
        let before = rules();
        drop(network);

        let network = open();
        network.add_pool(&plans[0]).unwrap();
        network.set_published_ports(&[]).unwrap();
        let pools = [plans[0].spec.name.clone()];
        assert_eq!(network.inspect_host(&pools), []);
        assert_eq!(rules(), before, "the second pool is still to come");
        network.add_pool(&plans[1]).unwrap();
        assert_eq!(rules(), before, "handles and all");
        network.remove_pool(&plans[1]).unwrap();
        assert_eq!(chains(lab), GUARD);
        let before = rules();
        drop(network);

        let network = open();
        network.add_pool(&plans[0]).unwrap();
        network.set_published_ports(&[]).unwrap();
        assert_eq!(network.inspect_host(&pools), []);
        assert_eq!(rules(), before);
    });
}

/// Sandboxes are running, and nobody else keeps them apart.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_start_that_the_host_refuses_half_way_leaves_what_there_is() {
    lab::run(|lab| {
        let plan = first("host", MASQUERADE);
        let network = open();
        network.add_pool(&plan).unwrap();
        let rules = || lab.run(&format!("nft -a list table inet {TABLE}"));
        let before = rules();
        drop(network);

        // The kernel refuses the host's own address of the prefix.
        lab.run("sysctl -q net.ipv6.conf.all.disable_ipv6=1");
        let network = open();
        network.take_up_pool(&plan, None).unwrap_err();
        assert_eq!(rules(), before);
        lab.run("sysctl -q net.ipv6.conf.all.disable_ipv6=0");
        network.take_up_pool(&plan, None).unwrap();
        assert_eq!(rules(), before);
        network.remove_pool(&plan).unwrap();

        // Of a new one nothing stays.
        lab.run("sysctl -q net.ipv6.conf.all.disable_ipv6=1");
        network.add_pool(&plan).unwrap_err();
        assert!(!lab.run("nft list tables").contains(TABLE));
    });
}

/// Neither the table nor what the next change goes by is half of both.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_change_that_the_host_refuses_half_way_goes_back_and_can_be_repeated() {
    lab::run(|lab| {
        let [before, after] = [MASQUERADE, ROUTE].map(|policy| first("host", policy));
        let network = open();
        network.add_pool(&before).unwrap();
        let rules = || lab.run(&format!("nft list table inet {TABLE}"));
        let told = rules();
        lab.run("sysctl -q net.ipv6.conf.all.disable_ipv6=1");
        for _ in 0..2 {
            network.change_pool(&after, None).unwrap_err();
            assert_eq!(rules(), told);
        }
        lab.run("sysctl -q net.ipv6.conf.all.disable_ipv6=0");
        network.change_pool(&after, None).unwrap();
        assert_eq!(chains(lab), GUARD);
    });
}

/// Takes everything out of the table that earlier versions didn't have: what bounds connections, and what knows who was judged.
const UNBOUND: &str = r"
    for chain in input forward; do
        nft -a list chain inet sandwire-test $chain | sed -n 's/.*@\(bounds\|judged\).*# handle //p' |
            while read -r handle; do nft delete rule inet sandwire-test $chain handle $handle; done
    done
    for version in 4 6; do nft delete map inet sandwire-test bounds$version; done
    for version in 4 6; do nft delete set inet sandwire-test judged$version; done
    nft delete chain inet sandwire-test connections_4096
    for set in open4 open6 begun4 begun6; do nft delete set inet sandwire-test $set; done
";

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_table_of_an_earlier_version_gets_its_bounds_from_the_audit() {
    lab::run(|lab| {
        let plans = [first("host", MASQUERADE), second(MASQUERADE)];
        let pools = plans.each_ref().map(|plan| plan.spec.name.clone());
        let network = open();
        network.add_pool(&plans[0]).unwrap();
        network.add_pool(&plans[1]).unwrap();
        lab.shell(UNBOUND);
        drop(network);

        let network = open();
        for plan in &plans {
            network.add_pool(plan).unwrap();
        }
        assert_eq!(chains(lab), FULL[1..], "packets go on as before");
        let defects = network.inspect_host(&pools);
        assert_eq!(defects.len(), 1, "{defects:?}");
        assert_eq!(defects[0].action, "repaired", "{defects:?}");
        assert_eq!(chains(lab), FULL);
        for prefix in ["10.64.0.0/24", "10.65.0.0/24"] {
            let listed = lab.run(&format!("nft list map inet {TABLE} bounds4"));
            let leads = format!("{prefix} : jump connections_4096");
            assert!(listed.contains(&leads), "{listed}");
        }
        assert_eq!(network.inspect_host(&pools), []);
        network.remove_pool(&plans[1]).unwrap();
        network.remove_pool(&plans[0]).unwrap();
        assert_eq!(chains(lab), NONE);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_guard_keeps_a_slot_without_its_program_from_the_host() {
    lab::run(|lab| {
        let _beyond = Beyond::attach().unwrap();
        let network = open();
        let plan = first("host", ROUTE);
        network.add_pool(&plan).unwrap();
        let (slot, guest) = started(&network, &plan);
        let tap = &slot.nics[0].tap;
        let sockets = [IpAddr::from(HOST_IPV4), HOST_IPV6.into()].map(|address| {
            let socket = UdpSocket::bind((address, 7000)).unwrap();
            socket.set_read_timeout(Some(IN_VAIN)).unwrap();
            socket
        });
        let arrives = |socket: &UdpSocket| -> io::Result<SocketAddr> {
            let target = socket.local_addr()?;
            // Nobody answers.
            let answer = guest.exchange_udp(target, b"ping", Duration::from_millis(100));
            assert!(answer.is_err(), "{answer:?}");
            Ok(socket.recv_from(&mut [0; 16])?.1)
        };
        let clones: Vec<IpAddr> = slot.clone_addresses().collect();
        for socket in &sockets {
            let source = arrives(socket).unwrap();
            assert!(clones.contains(&source.ip()), "{source}");
        }
        lab.run(&format!("tc qdisc delete dev {tap} parent ffff:fff1"));
        for socket in &sockets {
            arrives(socket).unwrap_err();
        }
        let rules = lab.run(&format!("nft list table inet {TABLE}"));
        let rule = rules
            .lines()
            .find(|line| line.contains("past the data path"));
        let counter = rule.unwrap().split("packets ").nth(1).unwrap();
        assert!(!counter.starts_with("0 "), "{rules}");
        // The guard it is that does it.
        lab.run(&format!("nft delete table inet {TABLE}"));
        arrives(&sockets[1]).unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn every_port_of_the_host_can_be_published() {
    lab::run(|lab| {
        let network = open();
        network.add_pool(&by_nft()).unwrap();
        let leads_to = ["10.66.0.2", "fd00:c110::2"].map(|address| address.parse().unwrap());
        let ports: Vec<(PublishPort, Vec<IpAddr>)> = (1..=u16::MAX)
            .map(|host_port| {
                let port = PublishPort {
                    protocol: Protocol::Tcp,
                    host_address: None,
                    host_port,
                    clone_port: 80,
                    nic: 0,
                };
                (port, leads_to.to_vec())
            })
            .collect();
        network.set_published_ports(&ports).unwrap();
        for (set, last) in [("any_ports4", "10.66.0.2"), ("any_ports6", "fd00:c110::2")] {
            let listed = lab.run(&format!("nft -n list map inet {TABLE} {set}"));
            assert_eq!(listed.matches(last).count(), usize::from(u16::MAX), "{set}");
        }
        network.set_published_ports(&ports[..1]).unwrap();
        let listed = lab.run(&format!("nft -n list map inet {TABLE} any_ports4"));
        assert_eq!(listed.matches("10.66.0.2").count(), 1);
    });
}

/// Whether a set of the table has an element with this in it.
fn has(lab: &Lab, set: &str, text: &str) -> bool {
    lab.run(&format!("nft list set inet {TABLE} {set}"))
        .contains(text)
}

/// What of a pool's packets eBPF has judged needs no more; what still goes by nft is judged here or nowhere.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_start_within_a_move_trusts_no_sandbox_more_than_its_policy_does() {
    lab::run(|lab| {
        let denied = r#"{"uplink":"deny"}"#;
        let network = open();
        network
            .add_pool(&pool_of("first", denied, "{}", IPV4, IPV6))
            .unwrap();
        drop(network);
        let by_ebpf = ebpf_pool("first", "netns", denied, IPV4, IPV6);
        let is_trusted = || {
            let sets = ["judged4", "routed4", "judged6"];
            let prefix = |set: &str| if set.ends_with('4') { IPV4 } else { IPV6 };
            sets.iter().any(|set| has(lab, set, prefix(set)))
        };
        let network = open();
        network.take_up_pool(&by_ebpf, Some(DataPath::Nft)).unwrap();
        assert!(!is_trusted());
        network.settle_pools().unwrap();
        assert!(!is_trusted());
        drop(network);
        // It can't be taken up: what there is stays as it is.
        lab.run("sysctl -q net.ipv6.conf.all.disable_ipv6=1");
        let network = open();
        network
            .take_up_pool(&by_ebpf, Some(DataPath::Nft))
            .unwrap_err();
        network.settle_pools().unwrap();
        assert!(!is_trusted());
        lab.run("sysctl -q net.ipv6.conf.all.disable_ipv6=0");
        network.take_up_pool(&by_ebpf, Some(DataPath::Nft)).unwrap();
        network.change_pool(&by_ebpf, None).unwrap();
        network.inspect_host(std::slice::from_ref(&by_ebpf.spec.name));
        assert!(!chains(lab).is_empty());
    });
}

/// Its sandboxes are running, and nobody else keeps them apart.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_pool_that_a_start_is_refused_stays_in_a_table_that_is_made_anew() {
    lab::run(|lab| {
        let (refused, other) = (by_nft(), second(MASQUERADE));
        let ends = |plan: &Plan| has(lab, "host_ends", &format!("sw{}-", plan.tag));
        let network = open();
        for plan in [&refused, &other] {
            network.add_pool(plan).unwrap();
        }
        drop(network);
        lab.run("ip link add vpn type bridge");
        lab.run("ip link set vpn up");
        lab.run("ip route add 10.66.0.0/16 dev vpn");
        let network = open();
        network.take_up_pool(&refused, None).unwrap_err();
        network.take_up_pool(&other, None).unwrap();
        network.settle_pools().unwrap();
        assert!(ends(&refused) && ends(&other));
        for damage in ["delete", "flush"] {
            lab.run(&format!("nft {damage} table inet {TABLE}"));
            network.inspect_host(std::slice::from_ref(&other.spec.name));
            assert!(ends(&refused) && ends(&other), "after {damage}");
        }
        network.remove_pool(&other).unwrap();
        assert!(ends(&refused) && !ends(&other));
        // Nor if it is the only one.
        lab.run(&format!("nft delete table inet {TABLE}"));
        network.inspect_host(&[]);
        assert!(ends(&refused));
        lab.run("ip link delete vpn");
        network.take_up_pool(&refused, None).unwrap();
        let pools = std::slice::from_ref(&refused.spec.name);
        assert_eq!(network.inspect_host(pools), []);
        network.remove_pool(&refused).unwrap();
        assert_eq!(chains(lab), NONE);
    });
}

/// The journal is written after the host: what it doesn't say of a change isn't so.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_change_that_was_killed_before_it_was_written_down_is_taken_back_by_the_next_start() {
    lab::run(|lab| {
        let bounded = |most: u32| format!(r#"{{"uplink":"deny","connections_max":{most}}}"#);
        let pool = |policy: &str| pool_of("first", policy, "{}", IPV4, IPV6);
        let open_to_all = r#"{"uplink":"masquerade","host_services":["all"],"cloud_metadata":true,
            "clone_to_clone":true,"connections_max":40}"#;
        let (before, other) = (pool(&bounded(20)), second(MASQUERADE));
        let listed = || {
            let table = lab.run(&format!("nft list table inet {TABLE}"));
            let of_pools = table
                .lines()
                .filter(|line| line.contains("elements") || line.contains(IPV4));
            let mut lines: Vec<String> = of_pools.map(str::to_owned).collect();
            lines.sort();
            lines
        };
        let network = open();
        for plan in [&before, &other] {
            network.add_pool(plan).unwrap();
        }
        let expected = listed();
        network.change_pool(&pool(open_to_all), None).unwrap();
        assert_ne!(listed(), expected);
        drop(network);
        let network = open();
        for plan in [&before, &other] {
            network.take_up_pool(plan, None).unwrap();
        }
        network.settle_pools().unwrap();
        assert_eq!(listed(), expected);
        let pools = [before.spec.name.clone(), other.spec.name.clone()];
        assert_eq!(network.inspect_host(&pools), []);
        // A change goes on from there.
        network.change_pool(&pool(&bounded(30)), None).unwrap();
        network.change_pool(&before, None).unwrap();
        assert_eq!(listed(), expected);
    });
}

/// Their sandboxes may be running: the journal was lost, or is another one's.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_start_lets_nobody_s_slots_go_unjudged() {
    lab::run(|lab| {
        let (lost, other) = (by_nft(), second(MASQUERADE));
        let ends = || has(lab, "host_ends", &format!("sw{}-", lost.tag));
        let network = open();
        network.add_pool(&lost).unwrap();
        drop(network);
        let before = lab.run(&format!("nft -a list table inet {TABLE}"));
        let network = open();
        network.settle_pools().unwrap();
        assert_eq!(lab.run(&format!("nft -a list table inet {TABLE}")), before);
        network.take_up_pool(&other, None).unwrap();
        network.settle_pools().unwrap();
        assert!(ends());
    });
}

/// Whoever takes elements out doesn't keep the pool from changing for good.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_set_that_has_lost_its_elements_is_made_anew_by_the_next_change() {
    lab::run(|lab| {
        let network = open();
        let pool = |policy: &str| pool_of("first", policy, "{}", IPV4, IPV6);
        network.add_pool(&pool(MASQUERADE)).unwrap();
        for set in ["host_ends", "routed4"] {
            lab.run(&format!("nft flush set inet {TABLE} {set}"));
            network
                .change_pool(&pool(r#"{"uplink":"deny"}"#), None)
                .unwrap();
            assert!(!has(lab, "routed4", IPV4) && has(lab, "host_ends", "sw"));
            network.change_pool(&pool(MASQUERADE), None).unwrap();
            assert!(has(lab, "routed4", IPV4));
        }
    });
}
