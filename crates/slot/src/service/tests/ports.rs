use super::*;
use crate::network::Listener;

fn tcp(host_port: u16, host_address: Option<&str>) -> PublishPort {
    PublishPort {
        protocol: Protocol::Tcp,
        host_address: host_address.map(|address| address.parse().unwrap()),
        host_port,
        clone_port: 80,
        nic: 0,
    }
}

/// A pool whose leases Alice and Bob may have, with ports.
fn for_users(size: u32) -> (Host, Arc<Slots>) {
    let host = Host::new();
    let slots = host.start();
    let mut spec = spec("web", size);
    spec.access =
        serde_json::from_str(r#"[{"verbs": ["acquire", "publish"], "gids": [100]}]"#).unwrap();
    slots.create_pool(&spec).unwrap();
    slots.await_ready("web", size);
    (host, slots)
}

fn publish(slots: &Slots, lease: &str, port: &PublishPort) -> Result<(), ServiceError> {
    slots
        .publish(ROOT, None, &name(lease), port, false)
        .map(|_| ())
}

/// Host ports that the kernel has, with where they lead.
fn in_kernel(host: &Host) -> Vec<(u16, Vec<String>)> {
    let state = host.kernel.lock();
    let ports = state.ports.iter().map(|(port, addresses)| {
        let addresses = addresses.iter().map(ToString::to_string);
        (port.host_port, addresses.collect())
    });
    ports.collect()
}

#[test]
fn a_port_leads_to_the_lease_until_it_is_withdrawn() {
    let (host, slots) = Host::with_pool(1);
    slots.take("web:a").unwrap();
    publish(&slots, "a", &tcp(8080, None)).unwrap();
    publish(&slots, "a", &tcp(8080, None)).unwrap();
    publish(&slots, "a", &tcp(8081, Some("fd00::1"))).unwrap();
    let ipv6 = "fd00:c10e::2".to_owned();
    let expected = [
        (8080, vec!["10.64.0.2".to_owned(), ipv6.clone()]),
        (8081, vec![ipv6]),
    ];
    assert_eq!(in_kernel(&host), expected);
    assert_eq!(slots.published_ports(ROOT).len(), 2);
    assert_eq!(slots.lease_ports(ROOT, None, &name("a")).unwrap().len(), 2);

    let withdraw = |address| slots.withdraw(ROOT, None, &name("a"), Protocol::Tcp, 8081, address);
    assert_eq!(code(withdraw(None)), ErrorCode::NotFound);
    withdraw(Some("fd00::1".parse().unwrap())).unwrap();
    assert_eq!(in_kernel(&host).len(), 1);
}

#[test]
fn ports_that_a_packet_could_mean_both_of_are_refused() {
    let (host, slots) = Host::with_pool(2);
    slots.take("web:a").unwrap();
    slots.take("web:b").unwrap();
    publish(&slots, "a", &tcp(80, Some("10.0.0.1"))).unwrap();
    publish(&slots, "b", &tcp(80, Some("10.0.0.2"))).unwrap();
    publish(&slots, "b", &tcp(80, Some("fd00::1"))).unwrap();
    for taken in [tcp(80, Some("10.0.0.1")), tcp(80, None)] {
        assert_eq!(code(publish(&slots, "b", &taken)), ErrorCode::Conflict);
    }
    let udp = PublishPort {
        protocol: Protocol::Udp,
        ..tcp(80, None)
    };
    publish(&slots, "b", &udp).unwrap();
    assert_eq!(in_kernel(&host).len(), 4);
}

#[test]
fn a_user_publishes_so_many_ports_and_root_more() {
    let (_host, slots) = for_users(3);
    for (caller, lease) in [(ALICE, "web:a"), (ALICE, "web:b"), (BOB, "web:c")] {
        slots.acquire(caller, &request_of(lease)).unwrap();
    }
    let publish = |caller, lease, port: u16| {
        let port = tcp(5000 + port, None);
        slots.publish(caller, Some(ALICE.uid), &name(lease), &port, false)
    };
    for port in 1..=256 {
        publish(ALICE, if port % 2 == 0 { "a" } else { "b" }, port).unwrap();
    }
    let error = publish(ALICE, "a", 257).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Conflict);
    let text = "cannot publish tcp port 5257: user 1000 has 256 published ports, and may have 256: withdraw one";
    assert_eq!(error.to_string(), text);
    publish(ALICE, "b", 1).expect("it has that one");
    slots
        .publish(BOB, None, &name("c"), &tcp(5257, None), false)
        .expect("others have their own");
    publish(ROOT, "a", 258).unwrap();
    slots
        .withdraw(ALICE, None, &name("a"), Protocol::Tcp, 5002, None)
        .unwrap();
    assert_eq!(
        code(publish(ALICE, "a", 2)),
        ErrorCode::Conflict,
        "root's counts too"
    );
    slots
        .withdraw(ALICE, None, &name("a"), Protocol::Tcp, 5004, None)
        .unwrap();
    publish(ALICE, "a", 2).unwrap();
    assert_eq!(slots.published_ports_count(), 257);
}

#[test]
fn ports_of_the_hosts_own_services_are_roots_to_publish() {
    let (_host, slots) = for_users(1);
    slots.acquire(ALICE, &request_of("web:a")).unwrap();
    let publish =
        |caller, port| slots.publish(caller, Some(ALICE.uid), &name("a"), &tcp(port, None), false);
    let error = publish(ALICE, 22).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Forbidden);
    let text = "uid 1000 may not publish tcp port 22: those below 1024 are root's (net.ipv4.ip_unprivileged_port_start)";
    assert_eq!(error.to_string(), text);
    assert_eq!(code(publish(ALICE, 1023)), ErrorCode::Forbidden);
    publish(ALICE, 1024).unwrap();
    publish(ROOT, 22).unwrap();
    publish(ALICE, 22).expect("it has that one");
}

#[test]
fn a_service_of_the_host_is_hidden_only_if_root_says_so() {
    let (host, slots) = for_users(1);
    slots.acquire(ALICE, &request_of("web:a")).unwrap();
    let publish = |caller, hide| {
        let (owner, port) = (Some(ALICE.uid), tcp(8080, None));
        slots.publish(caller, owner, &name("a"), &port, hide)
    };
    host.kernel.lock().listeners = vec![listener("192.0.2.1", true)];
    for (caller, hide) in [(ALICE, false), (ALICE, true), (ROOT, false)] {
        let error = publish(caller, hide).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Conflict);
        let text = error.to_string();
        assert!(
            text.contains("tcp port 8080") && text.contains("at 192.0.2.1:8080"),
            "{text}"
        );
    }
    publish(ROOT, true).unwrap();
    publish(ALICE, false).expect("it has that one");
}

fn listener(address: &str, takes_ipv4: bool) -> Listener {
    Listener {
        address: address.parse().unwrap(),
        takes_ipv4,
    }
}

#[test]
fn only_what_a_caller_from_elsewhere_would_miss_is_hidden() {
    let (host, slots) = Host::with_pool(1);
    slots.take("web:a").unwrap();
    let (any, ipv4, ipv6) = (None, Some("192.0.2.1"), Some("2001:db8::1"));
    for (address, takes_ipv4, published, is_hidden) in [
        ("0.0.0.0", true, any, true),
        ("0.0.0.0", true, ipv4, true),
        ("0.0.0.0", true, ipv6, false),
        ("::", true, any, true),
        ("::", true, ipv4, true),
        ("::", true, ipv6, true),
        ("::", false, any, true),
        ("::", false, ipv4, false),
        ("::", false, ipv6, true),
        ("192.0.2.1", true, any, true),
        ("192.0.2.1", true, ipv4, true),
        ("192.0.2.2", true, ipv4, false),
        ("192.0.2.1", true, ipv6, false),
        ("2001:db8::1", false, ipv6, true),
        ("2001:db8::2", false, ipv6, false),
        ("2001:db8::1", false, ipv4, false),
        ("127.0.0.1", true, any, false),
        ("127.0.0.53", true, any, false),
        ("::1", false, any, false),
        ("fd53:7764:6c6f:6f70::100", false, any, false),
        ("224.0.0.251", true, any, false),
    ] {
        host.kernel.lock().listeners = vec![listener(address, takes_ipv4)];
        let refused = publish(&slots, "a", &tcp(80, published)).is_err();
        assert_eq!(refused, is_hidden, "{address} and {published:?}");
        let published = published.map(|address| address.parse().unwrap());
        let _ = slots.withdraw(ROOT, None, &name("a"), Protocol::Tcp, 80, published);
    }
}

#[test]
fn an_address_that_is_spared_is_not_the_hosts_to_publish_or_to_hide() {
    let (host, slots) = Host::with_pool(1);
    slots.take("web:a").unwrap();
    let spare = |addresses: &[&str]| {
        let addresses = addresses.iter().map(|address| address.parse().unwrap());
        slots.spare_addresses(addresses.collect()).unwrap();
    };
    let of_address = |port| publish(&slots, "a", &tcp(port, Some("10.0.0.5")));
    host.kernel.lock().listeners = vec![listener("10.0.0.5", true)];
    spare(&["10.0.0.5", "2001:db8::5"]);
    assert_eq!(code(of_address(8080)), ErrorCode::Conflict);
    publish(&slots, "a", &tcp(8081, None)).expect("what listens there is not hidden");
    spare(&["2001:db8::5"]);
    assert_eq!(
        code(publish(&slots, "a", &tcp(8082, None))),
        ErrorCode::Conflict
    );
    host.kernel.lock().listeners.clear();
    of_address(8080).unwrap();
}

#[test]
fn ports_that_cannot_be_are_refused() {
    let (_host, slots) = Host::with_pool(1);
    slots.take("web:a").unwrap();
    let second_nic = PublishPort {
        nic: 1,
        ..tcp(80, None)
    };
    for impossible in [
        tcp(0, None),
        tcp(80, Some("0.0.0.0")),
        tcp(80, Some("ff02::1")),
        tcp(80, Some("127.0.0.1")),
        tcp(80, Some("::1")),
        tcp(80, Some("fd53:7764:6c6f:6f70::100")),
        // No packet has such a destination.
        tcp(80, Some("::ffff:192.0.2.1")),
        second_nic,
    ] {
        assert_eq!(
            code(publish(&slots, "a", &impossible)),
            ErrorCode::InvalidRequest
        );
    }
    assert_eq!(
        code(publish(&slots, "b", &tcp(80, None))),
        ErrorCode::NotFound
    );
}

#[test]
fn a_port_that_the_kernel_refuses_is_not_published() {
    let (host, slots) = Host::with_pool(1);
    slots.take("web:a").unwrap();
    host.kernel.fail("publish", true);
    assert_eq!(
        code(publish(&slots, "a", &tcp(80, None))),
        ErrorCode::Internal
    );
    assert!(slots.published_ports(ROOT).is_empty());
    host.kernel.fail("publish", false);
    publish(&slots, "a", &tcp(80, None)).unwrap();

    host.kernel.fail("publish", true);
    let withdrawn = slots.withdraw(ROOT, None, &name("a"), Protocol::Tcp, 80, None);
    assert_eq!(code(withdrawn), ErrorCode::Internal);
    assert_eq!(slots.published_ports(ROOT).len(), 1);
}

#[test]
fn a_change_that_the_kernel_refuses_is_undone_before_others_tell_it_theirs() {
    let (host, slots) = Host::with_pool(1);
    host.kernel.fail("publish", true);
    let mut others_wait = false;
    let told = slots.shared.tell_ports_since(1, |_| {
        others_wait = slots.shared.ports_gate.try_lock().is_err();
    });
    assert!(told.is_err() && others_wait);
    host.kernel.fail("publish", false);
    let told = slots
        .shared
        .tell_ports_since(1, |_| panic!("nothing failed"));
    told.unwrap();
}

#[test]
fn ports_outlive_the_service_and_end_with_their_lease() {
    let (host, slots) = Host::with_pool(1);
    slots.take("web:a").unwrap();
    publish(&slots, "a", &tcp(80, None)).unwrap();
    drop(slots);
    host.kernel.lock().ports.clear();
    let slots = host.start();
    assert_eq!(in_kernel(&host).len(), 1, "told again at the start");
    slots.give_back("a").unwrap();
    assert!(in_kernel(&host).is_empty());
    drop(slots);
    assert!(host.start().published_ports(ROOT).is_empty());
}

#[test]
fn ports_that_could_not_be_withdrawn_with_their_lease_are_withdrawn_later() {
    let (host, slots) = Host::with_pool(1);
    slots.take("web:a").unwrap();
    publish(&slots, "a", &tcp(80, None)).unwrap();
    host.kernel.fail("publish", true);
    slots.give_back("a").unwrap();
    assert_eq!(in_kernel(&host).len(), 1);
    host.kernel.fail("publish", false);
    host.advance(&slots, Duration::from_secs(1));
    slots.wait_until("the kernel is told", |state| state.ports_dirty.is_none());
    assert!(in_kernel(&host).is_empty());
}

#[test]
fn an_address_is_not_handed_on_while_a_port_leads_to_it() {
    let host = Host::new();
    let slots = host.start();
    let mut spec = spec("web", 1);
    spec.quarantine_seconds = 0;
    slots.create_pool(&spec).unwrap();
    slots.await_ready("web", 1);
    slots.take("web:a").unwrap();
    publish(&slots, "a", &tcp(80, None)).unwrap();
    host.kernel.fail("publish", true);
    slots.give_back("a").unwrap();
    std::thread::scope(|scope| {
        let next = scope.spawn(|| slots.take(r#"web:a "clone_address": "10.64.0.2""#));
        std::thread::sleep(Duration::from_millis(200));
        host.kernel.fail("publish", false);
        host.advance(&slots, Duration::from_secs(1));
        next.join().unwrap().unwrap();
    });
    assert!(in_kernel(&host).is_empty());
    host.kernel.assert_unviolated();
}

#[test]
fn who_tells_the_kernel_of_ports_from_before_a_lease_ended_hands_no_address_on() {
    let (host, slots) = Host::with_pool(1);
    slots.take("web:a").unwrap();
    publish(&slots, "a", &tcp(80, None)).unwrap();
    let gate = slots.shared.ports_gate.lock().unwrap();
    std::thread::scope(|scope| {
        let released = scope.spawn(|| slots.give_back("a"));
        slots.wait_until("the lease has ended", |state| state.leases.is_empty());
        // As somebody does who has the gate, and published another port meanwhile.
        let mut state = slots.shared.lock();
        state.tear_down_unpublished();
        assert_eq!(state.unpublishing.len(), 1);
        drop(state);
        drop(gate);
        released.join().unwrap().unwrap();
    });
    slots.await_quiet();
    host.kernel.assert_unviolated();
}

#[test]
fn many_who_change_ports_at_once_share_what_the_kernel_is_told() {
    let (host, slots) = Host::with_pool(8);
    let leases: Vec<String> = (0..8).map(|number| format!("a{number}")).collect();
    for (lease, port) in leases.iter().zip(80..) {
        slots.take(&format!("web:{lease}")).unwrap();
        publish(&slots, lease, &tcp(port, None)).unwrap();
    }
    let told = host.kernel.lock().port_lists;
    let gate = slots.shared.ports_gate.lock().unwrap();
    std::thread::scope(|scope| {
        let (staying, going) = leases.split_at(4);
        let released = going
            .iter()
            .map(|lease| scope.spawn(|| slots.give_back(lease)));
        let released: Vec<_> = released.collect();
        let published = staying.iter().zip(8080..).map(|(lease, port)| {
            let slots = &slots;
            scope.spawn(move || publish(slots, lease, &tcp(port, None)))
        });
        let published: Vec<_> = published.collect();
        // The same once more is told of when the first is.
        let again = scope.spawn(|| publish(&slots, "a0", &tcp(8080, None)));
        slots.wait_until("all have made their changes", |state| {
            state.leases.len() == 4 && state.ports.len() == 8
        });
        assert!(!again.is_finished());
        drop(gate);
        released
            .into_iter()
            .for_each(|one| drop(one.join().unwrap().unwrap()));
        published
            .into_iter()
            .for_each(|one| one.join().unwrap().unwrap());
        again.join().unwrap().unwrap();
    });
    assert_eq!(host.kernel.lock().port_lists - told, 1);
    let mut ports: Vec<u16> = in_kernel(&host).iter().map(|(port, _)| *port).collect();
    ports.sort_unstable();
    assert_eq!(ports, [80, 81, 82, 83, 8080, 8081, 8082, 8083]);
    slots.await_quiet();
    host.kernel.assert_unviolated();
}

#[test]
fn a_port_that_the_kernel_has_although_it_refused_it_ends_with_its_lease() {
    let (host, slots) = Host::with_pool(1);
    slots.take("web:a").unwrap();
    host.kernel.fail("confirm ports", true);
    publish(&slots, "a", &tcp(80, None)).unwrap_err();
    assert_eq!(in_kernel(&host).len(), 1);
    slots.give_back("a").unwrap();
    host.kernel.fail("confirm ports", false);
    host.advance_until(&slots, "the kernel is told", |_| {
        in_kernel(&host).is_empty()
    });
    slots.await_quiet();
    host.kernel.assert_unviolated();
}

#[test]
fn a_start_that_cannot_tell_the_kernel_its_ports_hands_no_address_on() {
    let (host, slots) = Host::with_pool(1);
    slots.take("web:a").unwrap();
    publish(&slots, "a", &tcp(80, None)).unwrap();
    host.kernel.fail("publish", true);
    slots.give_back("a").unwrap();
    drop(slots);
    let slots = host.start();
    std::thread::sleep(Duration::from_millis(200));
    host.kernel.fail("publish", false);
    host.advance_until(&slots, "the kernel is told", |_| {
        in_kernel(&host).is_empty()
    });
    slots.await_quiet();
    host.kernel.assert_unviolated();
}

#[test]
fn a_port_is_not_published_to_a_lease_that_is_still_being_made() {
    let (host, slots) = Host::with_pool(1);
    host.service.lock().refuses = true;
    let gate = slots.shared.channels_gates[0].write().unwrap();
    std::thread::scope(|scope| {
        let acquired = scope.spawn(|| slots.take(r#"web:a "vsock": {}"#));
        slots.wait_until("its channel is being opened", |state| {
            state.leases.values().any(|lease| lease.is_opening)
        });
        let published = publish(&slots, "a", &tcp(80, None));
        drop(gate);
        acquired.join().unwrap().unwrap_err();
        assert_eq!(code(published), ErrorCode::Conflict);
    });
    assert!(slots.leases(ROOT).is_empty() && in_kernel(&host).is_empty());
}
