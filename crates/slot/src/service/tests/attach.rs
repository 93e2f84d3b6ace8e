use std::path::PathBuf;

use sandwire_api::{
    attach::{Attached, AttachedDevice, DeviceChoice},
    pool::AddressPlan,
    slot::SlotKind,
};

use super::*;

/// A pool of containers.
fn boxes(size: u32) -> PoolSpec {
    PoolSpec {
        kind: SlotKind::Container,
        data_path: DataPath::Ebpf,
        device: DeviceChoice::Auto,
        quarantine_seconds: 0,
        ..spec("boxes", size)
    }
}

fn with_boxes(size: u32) -> (Host, Arc<Slots>) {
    let host = Host::new();
    let slots = host.start();
    slots.create_pool(&boxes(size)).unwrap();
    slots.await_ready("boxes", size);
    (host, slots)
}

const BLUE: &str = r#"boxes:a "attach": {"netns": "/run/netns/blue"}"#;

fn attached(slots: &Slots) -> Attached {
    let lease = slots.take(BLUE).unwrap().lease;
    lease.attached.expect("its interface is attached")
}

#[test]
fn an_interface_goes_at_once_if_its_lease_comes_to_nothing_after_all() {
    let (host, slots) = with_boxes(1);
    host.service.lock().refuses = true;
    // It looks at the host alone, and wouldn't find a child in its namespace.
    host.kernel.fail("tear down", true);
    let refused = slots.take(&format!(r#"{BLUE}, "vsock": {{}}"#));
    refused.unwrap_err();
    assert!(host.kernel.lock().attached.is_empty());
    assert!(slots.leases(ROOT).is_empty());
}

#[test]
fn an_interface_goes_with_a_lease_whose_caller_has_gone_meanwhile() {
    let (host, slots) = with_boxes(1);
    for request in [BLUE.to_owned(), format!(r#"{BLUE}, "vsock": {{}}"#)] {
        let refused = slots.acquire_while(ROOT, &request_of(&request), &|| false);
        assert_eq!(code(refused), ErrorCode::Unavailable);
        assert!(host.kernel.lock().attached.is_empty());
        assert!(host.service.lock().channels.is_empty());
        assert!(slots.leases(ROOT).is_empty());
        slots.await_quiet();
    }
    attached(&slots);
}

#[test]
fn a_lease_that_was_being_taken_back_when_the_daemon_died_is_nobodys() {
    for steps in 2..14 {
        let (host, slots) = with_boxes(1);
        drop(slots);
        let power = Power::unlimited();
        let slots = host.start_with(&power).unwrap();
        slots.await_ready("boxes", 1);
        slots.await_quiet();
        let goes = || {
            power.set(steps);
            false
        };
        let request = request_of(&format!(r#"{BLUE}, "vsock": {{}}"#));
        slots.acquire_while(ROOT, &request, &goes).unwrap_err();
        power.cut();
        drop(slots);
        let slots = host.start();
        host.advance_until(&slots, "the lease is gone", |state| state.leases.is_empty());
        slots.await_quiet();
        assert!(host.kernel.lock().attached.is_empty(), "{steps} steps");
        host.kernel.assert_unviolated();
    }
}

/// The device was chosen for the former pool.
#[test]
fn no_lease_is_of_a_pool_that_was_made_anew_while_it_was_looked_at() {
    let (host, slots) = with_boxes(1);
    let others = Arc::clone(&slots);
    host.kernel.lock().interlude = Some(Interlude::new(move || {
        others.delete_pool(&name("boxes")).unwrap();
        let anew = PoolSpec {
            device: DeviceChoice::Macvlan,
            parent: serde_json::from_str(r#"{"interface": "eth9"}"#).unwrap(),
            policy: serde_json::from_str(r#"{"uplink": "route"}"#).unwrap(),
            ..boxes(1)
        };
        others.create_pool(&anew).unwrap();
        others.await_ready("boxes", 1);
    }));
    assert_eq!(code(slots.take(BLUE)), ErrorCode::Conflict);
    assert!(slots.leases(ROOT).is_empty());
    slots.await_ready("boxes", 1);
    assert_eq!(attached(&slots).device, AttachedDevice::Macvlan);
}

#[test]
fn a_lease_says_where_its_interface_is_also_after_a_restart() {
    let (host, slots) = with_boxes(1);
    let first = attached(&slots);
    assert_eq!(first.interface.as_str(), "eth0");
    let addresses: Vec<String> = first
        .addresses
        .iter()
        .map(|own| format!("{} by {}", own.address, own.gateway.unwrap()))
        .collect();
    assert_eq!(
        addresses,
        ["10.64.0.2/32 by 169.254.1.1", "fd00:c10e::2/128 by fe80::1"]
    );
    assert_eq!(first.mac.to_string(), "06:73:0a:40:00:02");
    let routes: Vec<String> = first
        .routes
        .iter()
        .map(|route| route.destination.to_string())
        .collect();
    assert_eq!(routes, ["0.0.0.0/0", "::/0"]);
    slots.await_ready("boxes", 1);
    drop(slots);

    let slots = host.start();
    let detail = slots.lease_detail(ROOT, None, &name("a")).unwrap();
    assert_eq!(detail.lease.attached, Some(first.clone()));
    assert_eq!(detail.defects, []);
    let again = slots.take(BLUE).unwrap();
    assert!(!again.new && again.lease.attached == Some(first));
    slots.await_ready("boxes", 1);
    slots.await_health(true);
    let health = slots.health();
    assert!(health.problems.is_empty(), "{health:?}");
    slots.give_back("a").unwrap();
    assert!(host.kernel.lock().attached.is_empty());
    host.kernel.assert_unviolated();
}

#[test]
fn what_can_t_be_attached_is_refused_and_changes_nothing() {
    let (host, slots) = with_boxes(1);
    slots
        .create_pool(&PoolSpec {
            addresses: serde_json::from_str(r#"{"plan": "prefix", "ipv4": "10.65.0.0/28"}"#)
                .unwrap(),
            guest: serde_json::from_str(r#"{"ipv6": ""}"#).unwrap(),
            ..spec("web", 1)
        })
        .unwrap();
    slots.await_ready("web", 1);
    for request in [
        r#"boxes:a "#,
        r#"web:a "attach": {"netns": "/run/netns/blue"}"#,
        r#"boxes:a "attach": {"netns": "blue"}"#,
        r#"boxes:a "attach": {"netns": "/run/netns/blue", "mtu": 1000}"#,
        r#"boxes:a "attach": {"netns": "/run/netns/blue", "mac": "01:00:00:00:00:01"}"#,
        r#"boxes:a "attach": {"netns": "/run/netns/blue", "mac": "02:73:77:00:00:01"}"#,
        r#"boxes:a "attach": {"netns": "/run/netns/blue", "routes": ["10.0.0.0/8", "10.0.0.1/8"]}"#,
        r#"boxes:a "attach": {"netns": "/run/netns/blue"}, "process": true"#,
    ] {
        let request = request.trim_end();
        assert_eq!(
            code(slots.take(request)),
            ErrorCode::InvalidRequest,
            "{request}"
        );
    }
    let open = PoolSpec {
        access: serde_json::from_str(r#"[{"verbs": ["acquire", "manage"], "uids": [1000]}]"#)
            .unwrap(),
        ..boxes(1)
    };
    slots.delete_pool(&name("boxes")).unwrap();
    slots.create_pool(&open).unwrap();
    slots.await_ready("boxes", 1);
    let error = slots.acquire(ALICE, &request_of(BLUE));
    assert_eq!(
        code(error),
        ErrorCode::Forbidden,
        "not even who manages the pool"
    );
    assert!(slots.leases(ROOT).is_empty() && host.kernel.lock().attached.is_empty());
    host.kernel.assert_unviolated();
}

#[test]
fn the_same_name_elsewhere_is_a_conflict() {
    let (_host, slots) = with_boxes(1);
    attached(&slots);
    let red = r#"boxes:a "attach": {"netns": "/run/netns/red"}"#;
    assert_eq!(code(slots.take(red)), ErrorCode::Conflict);
    let renamed = r#"boxes:a "attach": {"netns": "/run/netns/blue", "interface": "net1"}"#;
    assert_eq!(code(slots.take(renamed)), ErrorCode::Conflict);
}

#[test]
fn another_namespace_at_the_same_path_is_a_conflict() {
    let (host, slots) = with_boxes(1);
    let be = |cookie| {
        let blue = PathBuf::from("/run/netns/blue");
        host.kernel.lock().cookies.insert(blue, cookie);
    };
    be(7);
    attached(&slots);
    assert!(!slots.take(BLUE).unwrap().new);
    be(8);
    let error = slots.take(BLUE).unwrap_err();
    assert!(
        error.to_string().contains("was at /run/netns/blue before"),
        "{error}"
    );
    assert_eq!(error.code(), ErrorCode::Conflict);
    slots.give_back("a").unwrap();
    slots.await_ready("boxes", 1);
    assert!(slots.take(BLUE).unwrap().new);
}

#[test]
fn a_lease_whose_interface_can_t_be_made_is_taken_back() {
    let (host, slots) = with_boxes(1);
    let gone = PathBuf::from("/run/netns/blue");
    host.kernel.lock().missing_namespaces.insert(gone.clone());
    let error = slots.take(BLUE).unwrap_err();
    assert!(error.to_string().contains("attach lease 'a'"), "{error}");
    assert!(slots.leases(ROOT).is_empty());
    host.kernel.lock().missing_namespaces.remove(&gone);
    slots.await_ready("boxes", 1);
    attached(&slots);
    host.kernel.assert_unviolated();
}

#[test]
fn a_crash_at_any_step_of_an_attach_leaves_a_whole_lease_or_none() {
    for steps in 0..14 {
        let (host, slots) = with_boxes(1);
        drop(slots);
        let power = Power::unlimited();
        let slots = host.start_with(&power).unwrap();
        slots.await_ready("boxes", 1);
        slots.await_quiet();
        power.set(steps);
        let answered = slots.take(BLUE).is_ok();
        power.cut();
        drop(slots);

        let slots = host.start();
        slots.await_ready("boxes", 1);
        slots.await_quiet();
        let leases = slots.leases(ROOT);
        if answered {
            assert_eq!(leases.len(), 1, "{steps} steps: an answered lease stays");
        }
        let interfaces = host.kernel.lock().attached.len();
        assert_eq!(interfaces, leases.len(), "{steps} steps: {leases:?}");
        // Whoever had no answer asks again, and has it.
        attached(&slots);
        slots.give_back("a").unwrap();
        slots.await_quiet();
        assert!(host.kernel.lock().attached.is_empty(), "{steps} steps");
        host.kernel.assert_unviolated();
    }
}

#[test]
fn an_interface_that_went_while_the_service_was_away_is_made_again() {
    let (host, slots) = with_boxes(1);
    attached(&slots);
    drop(slots);
    host.kernel.lock().attached.clear();
    let slots = host.start();
    slots.wait_until("it is made again", |state| {
        state.counters.defects_repaired > 0
    });
    assert_eq!(host.kernel.lock().attached.len(), 1);
    host.kernel.assert_unviolated();
}

#[test]
fn a_lease_keeps_the_device_that_the_kernel_had_when_it_was_made() {
    let (host, slots) = with_boxes(2);
    let old = attached(&slots);
    assert_eq!(old.device, AttachedDevice::Veth);
    assert!(old.device_reason.unwrap().contains("makes no netkit pairs"));
    host.kernel.lock().has_netkit = true;
    let red = r#"boxes:b "attach": {"netns": "/run/netns/red"}"#;
    let new = slots.take(red).unwrap().lease.attached.unwrap();
    assert_eq!(new.device, AttachedDevice::Netkit);
    assert!(new.device_reason.is_some());
    drop(slots);

    host.kernel.lock().has_netkit = false;
    let slots = host.start();
    assert_eq!(attached(&slots).device, AttachedDevice::Veth);
    let kept = slots.lease_detail(ROOT, None, &name("b")).unwrap();
    assert_eq!(kept.lease.attached, Some(new));
}

#[test]
fn netkit_is_refused_where_the_kernel_has_none_and_by_other_kinds() {
    let host = Host::new();
    let slots = host.start();
    let wanted = PoolSpec {
        device: DeviceChoice::Netkit,
        ..boxes(1)
    };
    assert_eq!(code(slots.create_pool(&wanted)), ErrorCode::InvalidRequest);
    assert!(slots.pools().is_empty());
    host.kernel.lock().has_netkit = true;
    let other = PoolSpec {
        device: DeviceChoice::Auto,
        ..spec("web", 1)
    };
    assert_eq!(code(slots.create_pool(&other)), ErrorCode::Unsupported);
    slots.create_pool(&wanted).unwrap();
    slots.await_ready("boxes", 1);
    let made = attached(&slots);
    assert_eq!(
        (made.device, made.device_reason),
        (AttachedDevice::Netkit, None)
    );
    host.kernel.lock().has_netkit = false;
    let red = r#"boxes:b "attach": {"netns": "/run/netns/red"}"#;
    assert_eq!(code(slots.take(red)), ErrorCode::InvalidRequest);
}

/// Children of two such pools may be on one network.
#[test]
fn pools_of_ipv6_alone_give_their_first_slots_macs_of_their_own() {
    let host = Host::new();
    let slots = host.start();
    let mac_of_first = |pool: &str, prefix: &str| {
        let spec = PoolSpec {
            name: name(pool),
            addresses: AddressPlan::Prefix {
                ipv4: None,
                ipv6: Some(prefix.parse().unwrap()),
            },
            ..boxes(1)
        };
        slots.create_pool(&spec).unwrap();
        slots.await_ready(pool, 1);
        let request = format!(r#"{pool}:{pool} "attach": {{"netns": "/run/netns/{pool}"}}"#);
        let lease = slots.take(&request).unwrap().lease;
        lease.attached.expect("its interface is attached").mac
    };
    let one = mac_of_first("one", "fd00:1::/64");
    assert_ne!(one, mac_of_first("two", "fd00:2::/64"));
}
