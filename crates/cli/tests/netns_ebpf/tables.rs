//! Policies with a routing table of their own: what leaves by it, and what must not leave by any other.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use sandwire_testlab::{
    command,
    fake_guest::{FakeGuest, frame},
    host::{BEYOND_IPV4, BEYOND_IPV6, ECHO_PORT, WHO_AM_I_PORT, serve_udp},
    lab::{self, Lab},
    sandwire::Lease,
};
use serde_json::json;

use crate::{
    GATEWAY_MAC,
    ebpf::{POOLS, SECOND, World, pool, wait_until},
    uplinks::{FAMILIES, Family, routes_back, second_uplink},
};

/// Where a server of the host listens, and what it has heard.
const HOST_PORT: u16 = 7777;
static HEARD: AtomicU64 = AtomicU64::new(0);

/// The host's own addresses are in no other table, and what a table leads elsewhere the stack may get all the same. What
/// the host itself calls answers it.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_table_opens_no_service_of_the_host_and_hides_no_sandbox_from_it() {
    lab::run(|lab| {
        let _second = second_uplink(lab);
        let world = World::with_config(lab, "uplinks = [\"up0\", \"up1\"]");
        for family in &FAMILIES {
            let (option, server) = (family.option, family.second[1]);
            lab.run(&format!(
                "ip {option} route add default via {server} dev up1 table 100"
            ));
        }
        serve_udp(HOST_PORT, |_, _| {
            HEARD.fetch_add(1, Ordering::SeqCst);
            b"host".to_vec()
        })
        .unwrap();
        let cases = [
            ("masked", json!("masquerade"), json!([])),
            ("routed", json!("route"), json!([])),
            ("allowed", json!("masquerade"), json!(["udp/7777"])),
        ];
        for (number, (name, uplink, services)) in cases.iter().enumerate() {
            let policy = json!({"uplink": uplink, "route_table": 100, "host_services": services});
            let spec = pool(name, POOLS[number % 2], number, 1, &policy);
            world.daemon.create_pool(&spec).unwrap();
            let (lease, guest) = world.guest(name, name);
            for family in &FAMILIES {
                let clone = family.clone_address(&lease);
                // The guest asks for its gateway once a second at most, whichever family.
                let call = format!("ping -n -q -c 1 -W 1 {clone}");
                wait_until(&format!("{name}: {clone} answers"), 10 * SECOND, || {
                    command::run(&call).is_ok()
                });
                let host = SocketAddr::new(family.second[0], HOST_PORT);
                let before = HEARD.load(Ordering::SeqCst);
                let answer = guest.exchange_udp(host, b"?", SECOND);
                // The stack gets what has no hop left, whatever the way.
                guest.send_frame(&last_hop(&guest, host)).unwrap();
                let expected = if *name == "allowed" { 2 } else { 0 };
                let heard = || HEARD.load(Ordering::SeqCst) - before;
                match expected {
                    0 => thread::sleep(SECOND / 2),
                    _ => wait_until("the host hears both", 10 * SECOND, || heard() >= 2),
                }
                let heard = heard();
                assert_eq!(heard, expected, "{name}: {host}, answered {answer:?}");
            }
            guest.detach().unwrap();
        }
    });
}

/// The stack would send by its own rules what a table doesn't lead out: what is too big for its route, what it refuses,
/// and what it says nothing of, though the policy has that service of the host.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_a_table_does_not_lead_out_leaves_by_no_other() {
    lab::run(|lab| {
        let second = second_uplink(lab);
        let world = World::with_config(lab, "uplinks = [\"up0\", \"up1\"]");
        serve_udp(WHO_AM_I_PORT, |_, _| b"host".to_vec()).unwrap();
        for family in &FAMILIES {
            world.beyond.run(&family.add_anywhere("lo")).unwrap();
            second.run(&family.add_anywhere("lo")).unwrap();
        }
        for (number, kind) in POOLS.into_iter().enumerate() {
            let policy = json!({"uplink": "route", "route_table": 100,
                "host_services": [format!("udp/{WHO_AM_I_PORT}")]});
            let spec = pool(kind, kind, number, 1, &policy);
            world.daemon.create_pool(&spec).unwrap();
            world.route_back(number);
            for route in routes_back(number) {
                second.run(&route).unwrap();
            }
            let (lease, guest) = world.guest(kind, kind);
            for family in &FAMILIES {
                assert_leaves_by_the_table_alone(lab, &world, family, (&lease, &guest));
            }
        }
    });
}

/// The stack sends what is masqueraded by the host's rules, whether a table of the policy's own has a route or not.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_is_masqueraded_goes_by_the_host_s_rules() {
    lab::run(|lab| {
        let world = World::without_pools(lab);
        let policy = json!({"uplink": "masquerade", "route_table": 100});
        world.add_pools(1, &policy);
        for kind in POOLS {
            let (_, guest) = world.guest(kind, kind);
            for beyond in [IpAddr::from(BEYOND_IPV4), BEYOND_IPV6.into()] {
                let server = SocketAddr::new(beyond, ECHO_PORT);
                let answer = guest.exchange_udp(server, b"?", 5 * SECOND).unwrap();
                assert_eq!(answer, b"?", "{kind}: {server}");
            }
        }
    });
}

fn assert_leaves_by_the_table_alone(
    lab: &Lab,
    world: &World,
    family: &Family,
    (lease, guest): (&Lease, &FakeGuest),
) {
    let (option, server) = (family.option, family.second[1]);
    let set = |line: &str| {
        lab.shell(&format!("ip {option} route {line}"));
        // As long as decisions are kept.
        thread::sleep(SECOND / 5);
    };
    let refused = || {
        let drops = &world.detail(lease)["traffic"]["drops"];
        drops["no_route"].as_u64().unwrap_or(0)
    };
    let far = SocketAddr::new(family.anywhere, WHO_AM_I_PORT);
    let ask = |payload: &[u8], patience| guest.exchange_udp(far, payload, patience);
    set(&format!(
        "replace default via {server} dev up1 table 100 mtu lock 1300"
    ));
    assert!(ask(b"?", 5 * SECOND).unwrap().starts_with(b"second "));
    let before = refused();
    ask(&[0; 1400], SECOND / 2).unwrap_err();
    assert!(refused() > before, "{far}: not told");
    // The policy has a service of the host at the first port, and none at the second.
    let far = [far, SocketAddr::new(family.anywhere, ECHO_PORT)];
    for table in ["replace unreachable default table 100", "flush table 100"] {
        set(table);
        for far in far {
            let before = refused();
            guest.exchange_udp(far, b"?", SECOND / 2).unwrap_err();
            assert!(refused() > before, "{far} after {table}: not told");
        }
        let host = SocketAddr::new(family.second[0], WHO_AM_I_PORT);
        let answer = guest.exchange_udp(host, b"?", 5 * SECOND).unwrap();
        assert_eq!(answer, b"host", "{host} after {table}");
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_table_of_its_own_leads_to_no_clone_address_of_pools_that_come_later() {
    lab::run(|lab| {
        let world = World::without_pools(lab);
        for (option, server) in [
            ("-4", IpAddr::from(BEYOND_IPV4)),
            ("-6", BEYOND_IPV6.into()),
        ] {
            let route = format!("default via {server} dev up0 table 100");
            lab.run(&format!("ip {option} route add {route}"));
        }
        let policy = json!({"uplink": "route", "route_table": 100});
        let early = pool("early", "host", 0, 1, &policy);
        world.daemon.create_pool(&early).unwrap();
        world.route_back(0);
        let (lease, guest) = world.guest("early", "early");
        guest.ping(BEYOND_IPV4.into(), 5 * SECOND).unwrap();
        let nobody = [
            IpAddr::from(Ipv4Addr::new(10, 65, 0, 200)),
            Ipv6Addr::new(0xfd00, 0xc10e, 1, 0, 0, 0, 0, 200).into(),
        ];
        // How many of two packets to addresses that nobody has were dropped as such.
        let dropped = || {
            let count = || {
                let drops = world.detail(&lease)["traffic"]["drops"].clone();
                drops["no_such_sandbox"].as_u64().unwrap_or(0)
            };
            let before = count();
            for address in nobody {
                let target = SocketAddr::new(address, ECHO_PORT);
                guest.exchange_udp(target, b"?", SECOND / 2).unwrap_err();
            }
            count() - before
        };
        assert_eq!(dropped(), 0, "there is no such pool");
        let late = pool("late", "netns", 1, 0, &policy);
        world.daemon.create_pool(&late).unwrap();
        assert_eq!(dropped(), 2);
        guest.ping(BEYOND_IPV4.into(), 5 * SECOND).unwrap();
        world.daemon.json("pool delete late").unwrap();
        assert_eq!(dropped(), 0, "there is no such pool any more");
        assert_eq!(world.detail(&lease)["defects"], json!([]));
    });
}

/// A packet of a guest that no router may pass on.
fn last_hop(guest: &FakeGuest, target: SocketAddr) -> Vec<u8> {
    let network = guest.network();
    let source: IpAddr = match target.ip() {
        IpAddr::V4(_) => network.ipv4.0.into(),
        IpAddr::V6(_) => network.ipv6.0.into(),
    };
    let source = SocketAddr::new(source, 5000);
    let mut frame = frame::udp(network.mac, GATEWAY_MAC, source, target, b"last");
    if target.is_ipv6() {
        frame[21] = 1;
        return frame;
    }
    let hops = u32::from(frame[22]) - 1;
    frame[22] = 1;
    let checksum = u32::from(u16::from_be_bytes([frame[24], frame[25]])) + (hops << 8);
    let checksum = u16::try_from((checksum & 0xffff) + (checksum >> 16)).expect("folded");
    frame[24..26].copy_from_slice(&checksum.to_be_bytes());
    frame
}
