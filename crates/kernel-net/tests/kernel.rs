//! Kernel objects in a lab, judged by `ip`, `nft`, `conntrack` and `/proc`.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::{
    cell::RefCell,
    collections::HashSet,
    fs,
    net::{IpAddr, TcpListener, TcpStream, UdpSocket},
    os::unix::fs::MetadataExt,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use sandwire_kernel_net::{
    address::Address,
    conntrack::{self, Datagrams},
    interface::{self, Change, InterfaceIndex},
    listener::{self, Listener, Transport},
    netlink::{Request, Socket},
    netns::{self, Home},
    nft::{self, Batch, Chain, Direction, Rule, tables},
    procfs::PrivateProcfs,
    route::{self, Route, Target},
    tap,
};
use sandwire_testlab::lab::{self, Lab};

const PLAIN_TAP: tap::Options = tap::Options {
    vnet_header: true,
    multi_queue: false,
    owner: None,
    group: None,
};

/// Number of the network namespace that the calling thread is in.
fn current_namespace() -> u64 {
    fs::metadata("/proc/thread-self/ns/net").unwrap().ino()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn of_many_messages_the_one_that_failed_is_named_in_the_kernel_s_words() {
    lab::run(|lab| {
        let mut socket = Socket::route().unwrap();
        let mut request = Request::new();
        for name in ["one", "two"] {
            interface::create_bridge(&mut request, name, None);
        }
        let nowhere = Target::Interface(InterfaceIndex(4711));
        Route::new("10.9.0.0/16".parse().unwrap(), nowhere).add(&mut request);
        interface::create_bridge(&mut request, "three", None);
        let failures = socket.execute_all(request);
        assert_eq!(failures.len(), 1, "{failures:?}");
        assert_eq!(failures[0].0, 2);
        let links = lab.run("ip -o link");
        for name in ["one", "two", "three"] {
            assert!(links.contains(name), "the others were done: {links}");
        }
        let mut request = Request::new();
        let named = Change {
            name: "one",
            mtu: Some(4_000_000),
            ..Change::default()
        };
        named.apply(&mut request);
        let text = socket.execute(request).unwrap_err().to_string();
        assert!(
            text.starts_with("cannot change interface one: Invalid argument"),
            "{text}"
        );
        assert!(
            text.contains("mtu greater than device maximum"),
            "the kernel's own words: {text}"
        );
        // The socket is still in step.
        assert!(interface::find(&mut socket, "two").unwrap().is_some());
        assert!(interface::find(&mut socket, "nobody").unwrap().is_none());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_thread_comes_home_and_leaves_only_what_it_published() {
    lab::run(|lab| {
        let before = lab.snapshot();
        let host = current_namespace();
        let home = Home::here().unwrap();
        let inside = home.unshare().unwrap();
        assert_ne!(host, current_namespace());
        inside.publish("kept").unwrap();
        drop(inside);
        assert_eq!(host, current_namespace());
        drop(home.unshare().unwrap());
        assert!(lab.run("ip netns").contains("kept"));
        assert_eq!(lab.run("ip netns exec kept ip -o link").lines().count(), 1);
        let listed = netns::list("kep").unwrap();
        assert_eq!(listed.len(), 1, "{listed:?}");
        assert!(listed[0].is_mounted);
        // A second one of that name is refused, and the first is not harmed.
        let inside = home.unshare().unwrap();
        let text = inside.publish("kept").unwrap_err().to_string();
        assert_eq!(
            text,
            "cannot mount network namespace kept: File exists (os error 17)"
        );
        drop(inside);
        assert!(netns::is_mounted("kept"));
        // An empty file, as a crash leaves it, is taken over.
        fs::write(netns::path_of("empty"), "").unwrap();
        assert!(!netns::is_mounted("empty"));
        home.unshare().unwrap().publish("empty").unwrap();
        for name in ["kept", "empty", "never"] {
            netns::remove(name).unwrap();
        }
        lab.assert_unchanged(&before);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_private_procfs_sets_the_namespace_of_the_calling_thread() {
    lab::run(|_| {
        let setting = "net/ipv6/conf/all/forwarding";
        let path = format!("/proc/sys/{setting}");
        let home = Home::here().unwrap();
        let mut procfs = PrivateProcfs::new().unwrap();
        // More often than one instance serves.
        for _ in 0..120 {
            let inside = home.unshare().unwrap();
            procfs.write(setting, "1").unwrap();
            assert_eq!(procfs.read(setting).unwrap(), "1");
            assert_eq!(fs::read_to_string(&path).unwrap(), "1\n");
            drop(inside);
            assert_eq!(procfs.read(setting).unwrap(), "0", "of the host");
        }
        let error = procfs
            .write("net/ipv6/conf/nobody/mtu", "1280")
            .unwrap_err();
        let text = error.to_string();
        assert!(text.contains("setting net/ipv6/conf/nobody/mtu"), "{text}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_tap_has_one_user_at_a_time() {
    lab::run(|lab| {
        let owned = tap::Options {
            owner: Some(1234),
            group: Some(4321),
            ..PLAIN_TAP
        };
        tap::create("vmtap0", Some(InterfaceIndex(77)), owned).unwrap();
        let shown = lab.run("ip -d -o link show vmtap0");
        for fact in [
            "77: vmtap0",
            "type tap",
            "user 1234",
            "group 4321",
            "vnet_hdr on",
            "persist on",
        ] {
            assert!(shown.contains(fact), "{fact}: {shown}");
        }
        let mut socket = Socket::route().unwrap();
        let seen = interface::find(&mut socket, "vmtap0").unwrap().unwrap();
        let tun = seen.tun.unwrap();
        assert!(tun.is_tap && tun.is_persistent && tun.has_vnet_header && !tun.is_multi_queue);
        assert_eq!((tun.owner, tun.group), (Some(1234), Some(4321)));
        let first = tap::open("vmtap0", owned).unwrap().expect("nobody has it");
        assert!(tap::open("vmtap0", owned).unwrap().is_none());
        drop(first);
        assert!(tap::open("vmtap0", owned).unwrap().is_some());
        // As udev leaves it to all users, in the lab's own mounts. Whoever can attach a TAP can delete it.
        lab.shell("mount -t tmpfs none /dev/net && mknod -m 666 /dev/net/tun c 10 200");
        tap::create("nobodys", None, PLAIN_TAP).unwrap();
        lab.shell(
            "! setpriv --reuid 1234 --regid 4321 --clear-groups ip tuntap delete nobodys mode tap",
        );
        lab.shell(
            "! setpriv --reuid 1235 --regid 1235 --clear-groups ip tuntap delete vmtap0 mode tap",
        );
        lab.run("ip link show nobodys");
        lab.shell(
            "setpriv --reuid 1234 --regid 4321 --clear-groups ip tuntap delete vmtap0 mode tap",
        );
        let of_group = tap::Options {
            group: Some(4321),
            ..PLAIN_TAP
        };
        tap::create("vmtap0", None, of_group).unwrap();
        lab.shell(
            "setpriv --reuid 1235 --regid 4321 --clear-groups ip tuntap delete vmtap0 mode tap",
        );
        let error = tap::create("a-name-too-long-", None, PLAIN_TAP).unwrap_err();
        assert!(
            error.to_string().contains("tap a-name-too-long-"),
            "{error}"
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_nft_transaction_is_carried_out_as_a_whole_or_not_at_all() {
    lab::run(|lab| {
        let mut socket = Socket::netfilter().unwrap();
        let write = |is_broken: bool| {
            let mut batch = Batch::new("ours");
            batch.add_table();
            batch.add_chain(&Chain::Regular("fine"));
            let from = Rule::new().address(Direction::Source, [192, 0, 2, 1].into());
            batch.add_rule("fine", &from.counter().drop());
            if is_broken {
                batch.add_rule("nowhere", &Rule::new().accept());
            }
            batch
        };
        let before = lab.run("nft -s list ruleset");
        let text = write(true).commit(&mut socket).unwrap_err().to_string();
        assert!(text.contains("nft rule in chain ours nowhere"), "{text}");
        assert_eq!(lab.run("nft -s list ruleset"), before);
        write(false).commit(&mut socket).unwrap();
        assert_eq!(tables(&mut socket).unwrap(), ["ours"]);
        let listed = lab.run("nft -s list chain inet ours fine");
        assert!(
            listed.contains("ip saddr 192.0.2.1 counter drop"),
            "{listed}"
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn only_connections_of_the_addresses_named_are_forgotten() {
    lab::run(|lab| {
        let mut socket = Socket::netfilter().unwrap();
        let entry = |source: &str, target: &str| {
            let ports = "--sport 1000 --dport 53 -t 100";
            lab.run(&format!(
                "conntrack -I -p udp -s {source} -d {target} {ports}"
            ));
        };
        for number in 1..=200 {
            entry(&format!("10.64.0.{number}"), "203.0.113.2");
        }
        entry("203.0.113.2", "10.64.0.7");
        entry("fd00:c10e::7", "2001:db8::1");
        entry("fd00:c10e::8", "2001:db8::1");
        assert_eq!(conntrack::count(&mut socket).unwrap(), 203);
        let addresses: HashSet<IpAddr> = ["10.64.0.7", "fd00:c10e::7"]
            .map(|address| address.parse().unwrap())
            .into();
        assert_eq!(conntrack::forget(&mut socket, &addresses).unwrap(), 3);
        assert_eq!(conntrack::forget(&mut socket, &addresses).unwrap(), 0);
        assert_eq!(conntrack::count(&mut socket).unwrap(), 200);
        let left = lab.run("conntrack -L -f ipv4") + &lab.run("conntrack -L -f ipv6");
        assert!(left.contains("10.64.0.8 ") && left.contains("fd00:c10e::8 "));
        assert!(!left.contains("10.64.0.7 ") && !left.contains("fd00:c10e::7 "));
    });
}

/// Among so many the kernel is asked for those of single addresses.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn connections_of_few_addresses_are_found_among_very_many() {
    lab::run(|lab| {
        let mut socket = Socket::netfilter().unwrap();
        let file = lab.folder().join("connections");
        let mut lines = String::new();
        let mut enter = |source: &str, target: &str, answering: &str, number: u32| {
            let ports = format!("--sport {} --dport 53", 1000 + number);
            let reply = format!(
                "-r {answering} -q 192.0.2.9 --reply-port-src 53 --reply-port-dst {}",
                1000 + number
            );
            let reply = if answering.is_empty() { "" } else { &reply };
            lines += &format!("-I -p udp -s {source} -d {target} {ports} {reply} -t 300\n");
        };
        for number in 0..31_000 {
            enter("10.64.0.8", "203.0.113.2", "", number);
        }
        // Behind the host's address, by a published port, and as it is.
        enter("10.64.0.7", "203.0.113.2", "203.0.113.2", 1);
        enter("203.0.113.2", "192.0.2.1", "10.64.0.7", 2);
        enter("203.0.113.2", "10.64.0.7", "", 3);
        enter("fd00:c10e::7", "2001:db8::1", "", 4);
        enter("2001:db8::1", "fd00:c10e::7", "", 5);
        enter("fd00:c10e::8", "2001:db8::1", "", 6);
        std::fs::write(&file, lines).unwrap();
        lab.run(&format!("conntrack --load-file {}", file.display()));
        assert_eq!(conntrack::count(&mut socket).unwrap(), 31_006);
        let addresses: HashSet<IpAddr> = ["10.64.0.7", "fd00:c10e::7"]
            .map(|address| address.parse().unwrap())
            .into();
        assert_eq!(conntrack::forget(&mut socket, &addresses).unwrap(), 5);
        assert_eq!(conntrack::forget(&mut socket, &addresses).unwrap(), 0);
        assert_eq!(conntrack::count(&mut socket).unwrap(), 31_001);
        let left = lab.run("conntrack -L -f ipv4") + &lab.run("conntrack -L -f ipv6");
        assert!(left.contains("10.64.0.8 ") && left.contains("fd00:c10e::8 "));
        assert!(!left.contains("10.64.0.7 ") && !left.contains("fd00:c10e::7 "));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn flows_of_udp_are_forgotten_by_whom_they_called_and_who_answers() {
    lab::run(|lab| {
        let mut socket = Socket::netfilter().unwrap();
        let entry = |protocol: &str, caller: &str, called: &str, answering: &str| {
            let original = format!("-s {caller} -d {called} --sport 1000 --dport 5140");
            let reply =
                format!("-r {answering} -q {caller} --reply-port-src 514 --reply-port-dst 1000");
            lab.run(&format!(
                "conntrack -I -p {protocol} {original} {reply} -t 100"
            ));
        };
        entry("udp", "203.0.113.2", "192.0.2.1", "10.64.0.7");
        entry("udp", "203.0.113.2", "192.0.2.2", "10.64.0.8");
        entry("udp", "2001:db8::2", "2001:db8::1", "fd00:c10e::7");
        lab.run(
            "conntrack -I -p tcp -s 203.0.113.2 -d 192.0.2.1 --sport 1000 --dport 5140 --state ESTABLISHED -t 100",
        );
        let seen = RefCell::new(Vec::new());
        let mut look = |ports: &[u16]| {
            let ports = ports.iter().copied().collect();
            let none = conntrack::forget_datagrams(&mut socket, &ports, |flow| {
                seen.borrow_mut().push(*flow);
                false
            });
            assert_eq!(none.unwrap(), 0);
            seen.take()
        };
        assert_eq!(look(&[514, 1000, 5141]), [], "the kernel tells of others");
        assert_eq!(look(&[1, 2, 3, 4, 5]).len(), 3, "of many ports it does");
        let mut seen = look(&[514, 5140]);
        seen.sort_by_key(|flow| flow.called);
        let flow = |called: &str, answering: &str| Datagrams {
            called: called.parse().unwrap(),
            answering: answering.parse().unwrap(),
        };
        let v6 = flow("[2001:db8::1]:5140", "[fd00:c10e::7]:514");
        let all = [
            flow("192.0.2.1:5140", "10.64.0.7:514"),
            flow("192.0.2.2:5140", "10.64.0.8:514"),
            v6,
        ];
        assert_eq!(seen, all);
        for gone in [all[0], v6] {
            let ports = [5140].into();
            let chosen = conntrack::forget_datagrams(&mut socket, &ports, |flow| *flow == gone);
            assert_eq!(chosen.unwrap(), 1, "{gone:?}");
        }
        let left = lab.run("conntrack -L -f ipv4") + &lab.run("conntrack -L -f ipv6");
        let is_left = |text: &str| left.contains(text);
        assert!(is_left("tcp") && is_left("10.64.0.8 "), "{left}");
        assert!(
            !is_left("10.64.0.7 ") && !is_left("fd00:c10e::7 "),
            "{left}"
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn thousands_of_routes_and_hundreds_of_interfaces_are_listed_in_full() {
    lab::run(|lab| {
        let mut socket = Socket::route().unwrap();
        socket.grow_buffers();
        add_many(lab, &mut socket);
        let interfaces = interface::list(&mut socket).unwrap();
        let is_ours = |found: &&interface::Interface| found.name.starts_with("many");
        assert_eq!(interfaces.iter().filter(is_ours).count(), 300);
        let routes = route::list(&mut socket).unwrap();
        let unreachable = routes.iter().filter(|found| found.unreachable).count();
        assert_eq!(unreachable, 4000);
        let refused = "10.1.2.3".parse().unwrap();
        assert_eq!(route::lookup(&mut socket, refused).unwrap(), None);
        // Two threads with sockets of their own don't disturb each other.
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut socket = Socket::route().unwrap();
                    assert_eq!(route::list(&mut socket).unwrap().len(), routes.len());
                });
            }
        });
    });
}

/// The kernel names the interfaces of such a route elsewhere than that of one with a single next hop.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_route_with_several_next_hops_is_listed_by_each() {
    lab::run(|lab| {
        lab.shell(
            "for n in 1 2; do
                 ip link add way$n type veth peer name far$n; ip link set way$n up; ip link set far$n up
                 ip addr add 10.$n.0.1/24 dev way$n; ip addr add fd0$n::1/64 dev way$n nodad
             done
             ip route add default nexthop via 10.1.0.2 dev way1 nexthop via 10.2.0.2 dev way2
             ip route add fd09::/64 nexthop via fd01::2 dev way1 nexthop via fd02::2 dev way2
             ip nexthop add id 1 via 10.1.0.3 dev way1; ip nexthop add id 2 dev way2
             ip nexthop add id 3 group 1/2
             ip route add 10.9.0.0/24 nhid 3 metric 7",
        );
        let mut socket = Socket::route().unwrap();
        let routes = route::list(&mut socket).unwrap();
        let ways = ["way1", "way2"].map(|name| {
            let found = interface::find(&mut socket, name).unwrap();
            Some(found.unwrap().index)
        });
        for (destination, gateways, metric) in [
            ("0.0.0.0/0", [Some("10.1.0.2"), Some("10.2.0.2")], None),
            ("fd09::/64", [Some("fd01::2"), Some("fd02::2")], Some(1024)),
            ("10.9.0.0/24", [Some("10.1.0.3"), None], Some(7)),
        ] {
            let to = routes
                .iter()
                .filter(|found| found.destination.to_string() == destination);
            let found: Vec<_> = to
                .map(|found| (found.interface, found.gateway, found.metric))
                .collect();
            let gateways = gateways.map(|text| text.map(|text| text.parse().unwrap()));
            let expected = [0, 1].map(|way| (ways[way], gateways[way], metric));
            assert_eq!(found, expected, "{destination}");
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_was_noted_of_a_path_is_no_route() {
    lab::run(|lab| {
        let (router, far) = (lab.namespace("router"), lab.namespace("far"));
        lab.run("ip link add near0 type veth peer name near1 netns router");
        router
            .run("ip link add far0 mtu 1300 type veth peer name far1 mtu 1300 netns far")
            .unwrap();
        lab.run("ip address add 10.1.0.1/24 dev near0");
        lab.run("ip link set near0 up");
        lab.run("ip route add default via 10.1.0.2");
        for line in [
            "sysctl -qw net.ipv4.ip_forward=1",
            "ip address add 10.1.0.2/24 dev near1",
            "ip address add 10.2.0.1/24 dev far0",
            "ip link set near1 up",
            "ip link set far0 up",
        ] {
            router.run(line).unwrap();
        }
        far.run("ip address add 10.2.0.2/24 dev far1").unwrap();
        far.run("ip link set far1 up").unwrap();
        far.run("ip route add default via 10.2.0.1").unwrap();
        lab.run("ping -n -q -c 1 -W 5 10.2.0.2");
        let mut socket = Socket::route().unwrap();
        let before = route::list(&mut socket).unwrap();
        // The router answers that it is too big.
        lab.shell("ping -n -q -c 1 -W 2 -M do -s 1400 10.2.0.2 || true");
        let noted = lab.run("ip route get 10.2.0.2");
        assert!(noted.contains("mtu 1300"), "{noted}");
        assert_eq!(route::list(&mut socket).unwrap(), before);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn interfaces_that_stay_are_listed_once_while_others_come_and_go() {
    lab::run(|lab| {
        let mut socket = Socket::route().unwrap();
        add_many(lab, &mut socket);
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut socket = Socket::route().unwrap();
                while !ended.load(Ordering::Relaxed) {
                    let mut request = Request::new();
                    interface::create_bridge(&mut request, "passing", None);
                    interface::delete(&mut request, "passing");
                    socket.execute(request).unwrap();
                }
            });
            let listed = catch_unwind(AssertUnwindSafe(|| {
                for _ in 0..20 {
                    let mut names = all_names(&mut socket);
                    names.retain(|name| name.starts_with("many"));
                    let all = names.len();
                    names.sort();
                    names.dedup();
                    assert_eq!((names.len(), all), (300, 300));
                }
            }));
            ended.store(true, Ordering::Relaxed);
            listed.unwrap_or_else(|panic| resume_unwind(panic));
        });
    });
}

fn all_names(socket: &mut Socket) -> Vec<String> {
    let all = interface::list(socket).unwrap();
    all.into_iter().map(|interface| interface.name).collect()
}

fn add_many(lab: &Lab, socket: &mut Socket) {
    let mut request = Request::new();
    for number in 0..300 {
        interface::create_bridge(&mut request, &format!("many{number}"), None);
    }
    socket.execute(request).unwrap();
    for part in 0..40_u8 {
        let mut request = Request::new();
        for number in 0..100_u8 {
            let destination: IpAddr = [10, 1, part, number].into();
            Route::new(destination.into(), Target::Unreachable).add(&mut request);
        }
        socket.execute(request).unwrap();
    }
    let index = interface::find(socket, "many7").unwrap().unwrap().index;
    let mut request = Request::new();
    Address::new(index, "192.0.2.9/24".parse().unwrap()).add(&mut request);
    socket.execute(request).unwrap();
    let shown = lab.run("ip -o address show dev many7");
    assert!(shown.contains("192.0.2.9/24"), "{shown}");
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn listeners_are_those_that_take_what_comes_from_elsewhere() {
    lab::run(|lab| {
        lab.run("ip link set lo up");
        let mut socket = Socket::diagnosis().unwrap();
        let mut at = |transport, port| listener::at_port(&mut socket, transport, port).unwrap();
        for (bound, address, takes_ipv4) in [
            ("0.0.0.0", "0.0.0.0", true),
            ("127.0.0.2", "127.0.0.2", true),
            ("[::]", "::", true),
            ("[::1]", "::1", false),
            ("[::ffff:127.0.0.3]", "127.0.0.3", true),
        ] {
            let expected = [Listener {
                address: address.parse().unwrap(),
                takes_ipv4,
            }];
            let tcp = TcpListener::bind(format!("{bound}:8080")).unwrap();
            let udp = UdpSocket::bind(format!("{bound}:8080")).unwrap();
            assert_eq!(at(Transport::Tcp, 8080), expected, "{bound}");
            assert_eq!(at(Transport::Udp, 8080), expected, "{bound}");
            assert_eq!(at(Transport::Udp, 8081), []);
            drop((tcp, udp));
            assert_eq!(at(Transport::Tcp, 8080), []);
        }
        lab.run("sysctl -q net.ipv6.bindv6only=1");
        let _only_ipv6 = TcpListener::bind("[::]:8080").unwrap();
        assert!(!at(Transport::Tcp, 8080)[0].takes_ipv4);

        let server = TcpListener::bind("127.0.0.1:8082").unwrap();
        let client = TcpStream::connect("127.0.0.1:8082").unwrap();
        let port = client.local_addr().unwrap().port();
        assert_eq!(at(Transport::Tcp, port), []);
        assert_eq!(at(Transport::Tcp, 8082).len(), 1, "the accepted one isn't");
        drop(server);
        let connected = UdpSocket::bind("127.0.0.1:8083").unwrap();
        connected.connect("127.0.0.1:9").unwrap();
        let expected = Listener {
            address: [127, 0, 0, 1].into(),
            takes_ipv4: true,
        };
        assert_eq!(at(Transport::Udp, 8083), [expected], "its peer's answers");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn one_interface_that_cannot_be_deleted_keeps_no_other() {
    lab::run(|lab| {
        // The loopback can't, whatever it is called.
        lab.run("ip link set lo down");
        lab.run("ip link set lo name odd");
        for name in ["one", "two"] {
            lab.run(&format!("ip link add {name} type bridge"));
        }
        let mut socket = Socket::route().unwrap();
        let all = ["one", "odd", "gone", "two"].map(|name| (name, None));
        interface::delete_together(&mut socket, all, interface::FIRST_GROUP).unwrap_err();
        let left = lab.run("ip -o link show");
        assert!(left.contains("odd") && !left.contains("bridge"), "{left}");
        assert!(!left.contains("one:") && !left.contains("two:"), "{left}");
        assert!(left.contains("group default"), "{left}");
        lab.run("ip link set odd name lo");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_generation_of_nft_tables_tells_whether_somebody_has_changed_one() {
    lab::run(|lab| {
        let mut netfilter = Socket::netfilter().unwrap();
        lab.run("nft add table inet one");
        lab.run("nft add set inet one names { type ipv4_addr; }");
        let mut last = nft::generation(&mut netfilter).unwrap();
        assert!(last.is_some());
        for change in [
            "add element inet one names { 192.0.2.1, 192.0.2.2 }",
            "delete element inet one names { 192.0.2.1 }",
            "flush set inet one names",
            "add table ip other",
            "delete table ip other",
        ] {
            assert_eq!(nft::generation(&mut netfilter).unwrap(), last);
            lab.shell(&format!("nft '{change}'"));
            let now = nft::generation(&mut netfilter).unwrap();
            assert_ne!(now, last, "{change}");
            last = now;
        }
        lab.run("nft list ruleset");
        assert_eq!(nft::generation(&mut netfilter).unwrap(), last);
    });
}
