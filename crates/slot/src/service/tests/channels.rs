//! Leases with vsock channels.

mod compare;

use sandwire_api::vsock::{VsockDestination, VsockKind, VsockPolicy, VsockRule};

use super::*;
use crate::{channel::ChannelPlan, model::channels::GROUP_UID};

const HOST_RULE: &str = r#"{"rules": [{"port": "1024", "to": {"kind": "host"}}]}"#;
const TCP_RULE: &str =
    r#"{"rules": [{"port": "80", "to": {"kind": "tcp", "address": "127.0.0.1:80"}}]}"#;

fn policy(text: &str) -> VsockPolicy {
    serde_json::from_str(text).unwrap()
}

fn open_to_alice(size: u32) -> (Host, Arc<Slots>) {
    let access = r#"[{"verbs": ["acquire", "show"], "uids": [1000, 1001]}]"#;
    open_by(access, size)
}

fn open_by(access: &str, size: u32) -> (Host, Arc<Slots>) {
    let host = Host::new();
    let slots = host.start();
    let mut spec = spec("web", size);
    spec.access = serde_json::from_str(access).unwrap();
    slots.create_pool(&spec).unwrap();
    slots.await_ready("web", size);
    (host, slots)
}

impl Host {
    fn channels(&self) -> Vec<String> {
        let service = self.service.lock();
        let keys = service.channels.keys();
        keys.map(|key| format!("{}/{}", key.owner_uid, key.name))
            .collect()
    }
}

impl Slots {
    /// Waits until the first comparison is over: further ones come by the clock, which stands still.
    fn await_compared(&self) {
        let services = self.shared.channels.services();
        self.wait_until("channels are compared", |state| {
            state.channels.were_made(services)
        });
    }
}

#[test]
fn a_lease_has_a_channel_if_it_asks_for_one_and_loses_it_with_its_release() {
    let (host, slots) = Host::with_pool(2);
    slots.await_compared();
    let plain = slots.take("web:plain").unwrap().lease;
    assert_eq!(plain.vsock, None);
    let before = host.service.lock().messages;
    let lease = slots.take(r#"web:a "vsock": {}"#).unwrap().lease;
    assert_eq!(
        host.service.lock().messages - before,
        1,
        "one message to the service"
    );
    let channel = lease.vsock.unwrap();
    let folder = format!("/run/sandwire/vsock/web.{}", lease.slot);
    assert_eq!(channel.socket, format!("{folder}/vsock.sock"));
    assert_eq!(host.channels(), ["0/a"]);
    let again = slots.take(r#"web:a "vsock": {}"#).unwrap();
    assert!(!again.new && again.lease.vsock.as_ref() == Some(&channel));
    assert_eq!(slots.take("web:a").unwrap().lease.vsock, Some(channel));
    slots.give_back("a").unwrap();
    assert_eq!(host.channels(), [""; 0]);
    assert!(host.service.lock().folders.is_empty());
    let ended = slots.counted_channels().ended;
    assert_eq!(ended[&name("web")].egress_bytes, 7);
}

#[test]
fn a_lease_without_a_channel_sends_the_service_no_message() {
    let (host, slots) = Host::with_pool(2);
    slots.await_compared();
    let before = host.service.lock().messages;
    slots.take("web:plain").unwrap();
    slots.give_back("plain").unwrap();
    assert_eq!(host.service.lock().messages, before);
}

#[test]
fn while_the_service_is_away_a_channel_is_refused_and_nothing_changes() {
    let (host, slots) = Host::with_pool(1);
    // The auditor may have come while the pool was being made, and comes again.
    host.advance(&slots, Duration::from_secs(1));
    slots.await_health(true);
    host.service.set_down(true);
    let error = slots.take(r#"web:a "vsock": {}"#).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unavailable);
    assert!(error.to_string().contains("control.sock"), "{error}");
    assert!(slots.leases(ROOT).is_empty());
    assert_eq!(slots.pool(&name("web")).unwrap().slots.ready, 1);
    let health = slots.health();
    assert!(health.ready, "leases without a channel are handed out");
    let about = |problem: &sandwire_api::health::Problem| problem.subject == "vsock service";
    assert!(health.problems.iter().any(about));
}

#[test]
fn a_lease_whose_channel_cannot_be_opened_is_none() {
    let (host, slots) = Host::with_pool(1);
    host.service.lock().refuses = true;
    let error = slots.take(r#"web:a "vsock": {}"#).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Conflict);
    assert!(slots.leases(ROOT).is_empty());
    slots.await_ready("web", 1);
    host.service.lock().refuses = false;
    slots.take(r#"web:a "vsock": {}"#).unwrap();
    let slots = {
        drop(slots);
        host.start()
    };
    assert_eq!(slots.leases(ROOT).len(), 1, "the journal has one lease");
}

#[test]
fn who_may_not_wait_is_not_made_to_while_its_lease_gets_its_channel() {
    let (_host, slots) = Host::with_pool(1);
    slots.await_compared();
    let with = request_of(r#"web:a "vsock": {}"#);
    let plain = request_of("web:a");
    let now = |request| slots.acquire_now(ROOT, request, &|| true).unwrap();
    assert_eq!(now(&with), None, "a service is asked");
    let opened = slots.acquire(ROOT, &with).unwrap();
    let key = slots.shared.lock().leases.keys().next().unwrap().clone();
    let set_opening = |is_opening| {
        let mut state = slots.shared.lock();
        state.leases.get_mut(&key).unwrap().is_opening = is_opening;
    };
    set_opening(true);
    assert_eq!(now(&plain), None);
    set_opening(false);
    let found = now(&plain).expect("nobody is waited for any more");
    assert_eq!((found.lease, found.new), (opened.lease, false));
}

/// The journal would refuse another lease of that slot.
#[test]
fn a_lease_that_stays_in_the_journal_keeps_its_slot_until_it_can_be_removed() {
    let host = Host::new();
    let slots = host.start();
    let mut web = spec("web", 1);
    web.data_path = DataPath::Ebpf;
    slots.create_pool(&web).unwrap();
    slots.await_ready("web", 1);
    slots.await_compared();
    host.service.lock().refuses = true;
    let key = ROOT.lease_key(None, &name("a"));
    let request = r#"web:a "vsock": {}, "policy": {"uplink": "deny"}"#;
    let gate = host.service.opens_gate.lock().unwrap();
    let refused = std::thread::scope(|scope| {
        let acquired = scope.spawn(|| slots.take(request));
        slots.wait_until("its channel is being opened", |state| {
            state.leases.contains_key(&key)
        });
        slots.shared.lock().journal.set_read_only(true);
        drop(gate);
        acquired.join().unwrap()
    });
    assert_eq!(code(refused), ErrorCode::Conflict);
    assert_eq!(slots.leases(ROOT)[0].state, LeaseState::Releasing);
    slots.shared.lock().journal.set_read_only(false);
    host.advance_until(&slots, "it is gone, and its address has rested", |state| {
        let counts = state.pools[&web.name].pool.counts();
        state.leases.is_empty() && counts.tearing_down + counts.quarantined == 0
    });
    slots.take(r#"web:b "clone_address": "10.64.0.2""#).unwrap();
    host.advance_until(&slots, "only the pool's policy is left", |_| {
        host.kernel.lock().policies.len() == 1
    });
    drop(slots);
    let leases = host.start().leases(ROOT);
    assert_eq!(leases.len(), 1);
    assert_eq!(leases[0].name, name("b"));
    host.kernel.assert_unviolated();
}

/// Were it taken back, the slot's next tenant would have the trace.
#[test]
fn a_lease_that_is_still_being_made_can_t_be_traced() {
    let (host, slots) = Host::with_pool(1);
    slots.await_compared();
    let (key, a) = (ROOT.lease_key(None, &name("a")), name("a"));
    let gate = host.service.opens_gate.lock().unwrap();
    std::thread::scope(|scope| {
        let acquired = scope.spawn(|| slots.take(r#"web:a "vsock": {}"#));
        slots.wait_until("its channel is being opened", |state| {
            state.leases.contains_key(&key)
        });
        let early = slots.trace(ROOT, None, &a).err();
        assert_eq!(early.map(|error| error.code()), Some(ErrorCode::NotFound));
        drop(gate);
        acquired.join().unwrap().unwrap();
    });
    slots.trace(ROOT, None, &a).unwrap();
}

#[test]
fn a_lease_with_another_channel_is_not_the_one_that_is_asked_for() {
    let (_host, slots) = Host::with_pool(2);
    slots.take("web:plain").unwrap();
    slots.take(r#"web:a "vsock": {}"#).unwrap();
    for request in [
        r#"web:plain "vsock": {}"#,
        r#"web:a "vsock": {"cid": 4}"#,
        r#"web:a "vsock": {"kind": "hybrid"}"#,
    ] {
        let error = slots.take(request).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Conflict, "{request}: {error}");
    }
}

#[test]
fn a_virtual_cid_is_unique_among_the_leases_of_an_owner() {
    let (_host, slots) = open_to_alice(3);
    slots
        .take(r#"web:a "vsock": {"virtual_cid": 100}"#)
        .unwrap();
    let error = slots
        .take(r#"web:b "vsock": {"virtual_cid": 100}"#)
        .unwrap_err();
    assert_eq!(error.code(), ErrorCode::Conflict, "{error}");
    let request = request_of(r#"web:b "vsock": {"virtual_cid": 100}"#);
    slots.acquire(ALICE, &request).unwrap();
}

#[test]
fn rules_that_lead_to_the_host_take_the_right_to_manage() {
    let (host, slots) = open_to_alice(2);
    let request = request_of(&format!(r#"web:a "vsock": {{"policy": {TCP_RULE}}}"#));
    let error = slots.acquire(ALICE, &request).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Forbidden);
    let request = request_of(&format!(r#"web:a "vsock": {{"policy": {HOST_RULE}}}"#));
    slots.acquire(ALICE, &request).unwrap();
    let a = name("a");
    let error = slots
        .set_channel_policy(ALICE, None, &a, Some(policy(TCP_RULE)))
        .unwrap_err();
    assert_eq!(error.code(), ErrorCode::Forbidden);
    // Root may, for Alice's lease; Bob doesn't even see it.
    let of_alice = Some(ALICE.uid);
    slots
        .set_channel_policy(ROOT, of_alice, &a, Some(policy(TCP_RULE)))
        .unwrap();
    let found = slots.channel_policy(ALICE, None, &a).unwrap();
    assert!(found.own && found.policy == policy(TCP_RULE));
    let error = slots.channel(BOB, of_alice, &a).unwrap_err();
    assert_eq!(error.code(), ErrorCode::NotFound);
    assert!(slots.channels(BOB).is_empty());
    assert!(slots.channel_connections(BOB, None).unwrap().is_empty());
    assert_eq!(slots.channel_connections(ALICE, None).unwrap().len(), 1);
    let told = &host.service.lock().channels;
    assert_eq!(told.values().next().unwrap().policy, policy(TCP_RULE));
}

/// The process for vsock may be root.
#[test]
fn who_manages_a_pool_leads_to_services_of_the_host_that_root_has_named() {
    let access = r#"[{"verbs": ["acquire", "manage"], "uids": [1000]}]"#;
    let (host, slots) = open_by(access, 1);
    let (web, a) = (name("web"), name("a"));
    slots
        .acquire(ALICE, &request_of(r#"web:a "vsock": {}"#))
        .unwrap();
    let of_lease =
        |slots: &Slots| slots.set_channel_policy(ALICE, None, &a, Some(policy(TCP_RULE)));
    let of_pool = |slots: &Slots| slots.set_pool_vsock(ALICE, &web, policy(TCP_RULE));
    for refused in [of_lease(&slots).err(), of_pool(&slots).err()] {
        let error = refused.unwrap();
        assert_eq!(error.code(), ErrorCode::Forbidden);
        assert!(error.to_string().contains("host_services"), "{error}");
    }
    let tcp = policy(TCP_RULE).rules[0].to.clone();
    host.service.lock().host_services = vec![tcp];
    of_lease(&slots).unwrap();
    of_pool(&slots).unwrap();
    host.service.lock().host_services.clear();
    // What the pool has by root stays, at whatever port.
    let moved = TCP_RULE.replace("\"port\": \"", "\"port\": \"2");
    slots.set_pool_vsock(ALICE, &web, policy(&moved)).unwrap();
    of_lease(&slots).unwrap();
    slots
        .set_pool_vsock(ALICE, &web, policy(HOST_RULE))
        .unwrap();
    assert!(of_pool(&slots).is_err() && of_lease(&slots).is_err());
    slots.set_pool_vsock(ROOT, &web, policy(TCP_RULE)).unwrap();
    // A service that is told who calls: else the guest could say that.
    let told = TCP_RULE.replace("}}]", "}, \"identity\": true}]");
    slots.set_pool_vsock(ROOT, &web, policy(&told)).unwrap();
    assert!(of_pool(&slots).is_err() && of_lease(&slots).is_err());
    slots
        .set_channel_policy(ALICE, None, &a, Some(policy(&told)))
        .unwrap();
}

#[test]
fn a_pools_policy_holds_for_leases_without_one_of_their_own() {
    let (host, slots) = Host::with_pool(2);
    let web = name("web");
    slots.set_pool_vsock(ROOT, &web, policy(HOST_RULE)).unwrap();
    slots.take(r#"web:a "vsock": {}"#).unwrap();
    let own = format!(r#"web:b "vsock": {{"policy": {TCP_RULE}}}"#);
    slots.take(&own).unwrap();
    let rules = |host: &Host| -> Vec<VsockDestination> {
        let service = host.service.lock();
        let policies = service.channels.values();
        policies
            .map(|channel| channel.policy.rules[0].to.clone())
            .collect()
    };
    let tcp = policy(TCP_RULE).rules[0].to.clone();
    assert_eq!(rules(&host), [VsockDestination::Host, tcp.clone()]);
    slots.set_pool_vsock(ROOT, &web, policy(TCP_RULE)).unwrap();
    assert_eq!(rules(&host), [tcp.clone(), tcp]);
    slots.set_pool_vsock(ROOT, &web, policy(HOST_RULE)).unwrap();
    slots
        .set_channel_policy(ROOT, None, &name("b"), None)
        .unwrap();
    let host_rule = VsockDestination::Host;
    assert_eq!(rules(&host), [host_rule.clone(), host_rule]);
    let many = r#"{"rules": [{"port": "1-300", "to": {"kind": "unix", "path": "/run/s"}}]}"#;
    slots.give_back("a").unwrap();
    slots.give_back("b").unwrap();
    host.advance_until(&slots, "a slot is ready", |state| {
        state.pools[&name("web")].pool.counts().ready > 0
    });
    slots.take(r#"web:h "vsock": {"kind": "hybrid"}"#).unwrap();
    assert!(slots.set_pool_vsock(ROOT, &web, policy(many)).is_err());
    let kind = slots.channel(ROOT, None, &name("h")).unwrap().channel.kind;
    assert_eq!(kind, VsockKind::Hybrid);
}

#[test]
fn a_pools_policy_that_the_service_refuses_for_one_lease_is_nobodys() {
    let (host, slots) = Host::with_pool(2);
    let web = name("web");
    slots.set_pool_vsock(ROOT, &web, policy(HOST_RULE)).unwrap();
    slots.take(r#"web:a "vsock": {}"#).unwrap();
    slots.take(r#"web:b "vsock": {}"#).unwrap();
    let b = LeaseKey {
        owner_uid: ROOT.uid,
        name: name("b"),
    };
    host.service.lock().refused_policy = Some((b, policy(TCP_RULE)));
    let error = slots
        .set_pool_vsock(ROOT, &web, policy(TCP_RULE))
        .unwrap_err();
    assert_eq!(error.code(), ErrorCode::Conflict);
    assert!(error.to_string().contains("lease 'b'"), "{error}");
    for channel in host.service.lock().channels.values() {
        assert_eq!(channel.policy, policy(HOST_RULE), "{}", channel.lease);
    }
    let of_pool = |slots: &Slots| slots.pool(&web).unwrap().spec.vsock;
    assert_eq!(of_pool(&slots), Some(policy(HOST_RULE)));
    drop(slots);
    assert_eq!(of_pool(&host.start()), Some(policy(HOST_RULE)));
}

#[test]
fn a_pools_policy_that_is_refused_leaves_one_that_a_former_version_took() {
    let (host, slots) = Host::with_pool(1);
    let web = name("web");
    slots.take(r#"web:a "vsock": {}"#).unwrap();
    let mut former = slots.shared.lock().pools[&web].current_spec();
    let to_nobody = r#"{"rules":[{"port":"9","to":{"kind":"tcp","address":"0.0.0.0:9"}}]}"#;
    former.vsock = Some(policy(to_nobody));
    slots.shared.lock().journal.put_pool(&former).unwrap();
    drop(slots);
    let slots = host.start();
    let a = LeaseKey {
        owner_uid: ROOT.uid,
        name: name("a"),
    };
    host.service.lock().refused_policy = Some((a, policy(TCP_RULE)));
    let error = slots
        .set_pool_vsock(ROOT, &web, policy(TCP_RULE))
        .unwrap_err();
    assert!(error.to_string().contains("lease 'a'"), "{error}");
    assert_eq!(slots.pool(&web).unwrap().spec.vsock, former.vsock);
}

#[test]
fn a_channel_that_differs_in_policy_alone_is_not_opened_anew() {
    let (host, slots) = Host::with_pool(1);
    slots.take(r#"web:a "vsock": {}"#).unwrap();
    {
        let mut service = host.service.lock();
        for channel in service.channels.values_mut() {
            channel.policy = policy(TCP_RULE);
        }
        service.generation += 1;
    }
    let service = Arc::clone(&host.service);
    host.advance_until(&slots, "the policy is as the journal says", |_| {
        let service = service.lock();
        let mut policies = service.channels.values().map(|channel| &channel.policy);
        policies.all(|policy| policy.rules.is_empty())
    });
    assert_eq!(host.service.lock().opened, 1);
}

#[test]
fn a_pools_policy_does_not_overwrite_one_that_a_lease_gets_at_that_moment() {
    let (host, slots) = Host::with_pool(1);
    let web = name("web");
    slots.take(r#"web:a "vsock": {}"#).unwrap();
    let (key, a) = (
        LeaseKey {
            owner_uid: ROOT.uid,
            name: name("a"),
        },
        name("a"),
    );
    for _ in 0..50 {
        slots.set_channel_policy(ROOT, None, &a, None).unwrap();
        let service = host.service.lock();
        std::thread::scope(|scope| {
            let of_pool =
                scope.spawn(|| slots.set_pool_vsock(ROOT, &web, policy(HOST_RULE)).unwrap());
            let own = || slots.set_channel_policy(ROOT, None, &a, Some(policy(TCP_RULE)));
            let own = scope.spawn(move || own().unwrap());
            // Both have begun, and one of them at least waits for the service.
            std::thread::sleep(Duration::from_millis(2));
            drop(service);
            of_pool.join().unwrap();
            own.join().unwrap();
        });
        let told = &host.service.lock().channels;
        assert_eq!(told[&key].policy, policy(TCP_RULE));
    }
}

#[test]
fn who_waits_for_a_lease_keeps_no_other_channel_waiting() {
    let (_host, slots) = Host::with_pool(1);
    slots.await_compared();
    slots.take(r#"web:a "vsock": {}"#).unwrap();
    let key = LeaseKey {
        owner_uid: ROOT.uid,
        name: name("a"),
    };
    slots.shared.lock().set_busy(&key, true);
    let a = name("a");
    std::thread::scope(|scope| {
        let change = || slots.set_channel_policy(ROOT, None, &a, Some(policy(TCP_RULE)));
        let changed = scope.spawn(change);
        // A comparison that waits for the gate keeps everybody else from it.
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(5));
            assert!(slots.shared.channels_gates[0].try_write().is_ok());
        }
        slots.shared.lock().set_busy(&key, false);
        slots.shared.changed.notify_all();
        assert!(changed.join().unwrap().unwrap().own);
    });
}

#[test]
fn rules_that_are_added_at_the_same_time_are_all_there() {
    const CALLERS: u32 = 8;
    let (host, slots) = open_to_alice(1);
    slots
        .set_pool_vsock(ROOT, &name("web"), policy(TCP_RULE))
        .unwrap();
    let request: AcquireLease =
        serde_json::from_str(r#"{"pool": "web", "name": "a", "vsock": {}}"#).unwrap();
    slots.acquire(ALICE, &request).unwrap();
    let a = name("a");
    let rule = |port: u32| {
        let text = format!(r#"{{"port": "{port}", "to": {{"kind": "host"}}}}"#);
        serde_json::from_str(&text).unwrap()
    };
    std::thread::scope(|threads| {
        for port in 1000..1000 + CALLERS {
            let (slots, a) = (&slots, &a);
            threads.spawn(move || slots.add_channel_rule(ALICE, None, a, rule(port)).unwrap());
        }
    });
    let found = slots.channel_policy(ALICE, None, &a).unwrap();
    assert!(found.own);
    assert_eq!(
        found.policy.rules.len(),
        1 + CALLERS as usize,
        "and its pool's"
    );
    let told = host
        .service
        .lock()
        .channels
        .values()
        .next()
        .unwrap()
        .policy
        .clone();
    assert_eq!(told, found.policy);
    // Not twice, nor what isn't hers to open.
    assert!(slots.add_channel_rule(ALICE, None, &a, rule(1000)).is_err());
    let tcp = VsockRule {
        port: "81".parse().unwrap(),
        ..policy(TCP_RULE).rules.remove(0)
    };
    let error = slots.add_channel_rule(ALICE, None, &a, tcp).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Forbidden);
    assert_eq!(slots.channel_policy(ALICE, None, &a).unwrap(), found);
}

#[test]
fn what_only_the_pool_may_open_is_the_pools_to_close() {
    let (host, slots) = open_to_alice(2);
    let (web, a, b) = (name("web"), name("a"), name("b"));
    slots.set_pool_vsock(ROOT, &web, policy(TCP_RULE)).unwrap();
    for request in [r#"web:a "vsock": {}"#, r#"web:b "vsock": {}"#] {
        slots.acquire(ALICE, &request_of(request)).unwrap();
    }
    let of_alice = Some(ALICE.uid);
    slots
        .set_channel_policy(ROOT, of_alice, &b, Some(policy(TCP_RULE)))
        .unwrap();
    let host_rule = policy(HOST_RULE).rules.remove(0);
    for lease in [&a, &b] {
        let found = slots.add_channel_rule(ALICE, None, lease, host_rule.clone());
        assert_eq!(found.unwrap().policy.rules.len(), 2);
    }
    let ports = |slots: &Slots, host: &Host| {
        let of = |lease: &Name| slots.channel_policy(ALICE, None, lease).unwrap().policy;
        let channels = &host.service.lock().channels;
        [&a, &b].map(|lease| {
            let key = ALICE.lease_key(None, lease);
            assert_eq!(channels[&key].policy, of(lease), "{lease}");
            let rules = of(lease).rules;
            rules
                .iter()
                .map(|rule| rule.port.to_string())
                .collect::<Vec<_>>()
                .join(" ")
        })
    };
    assert_eq!(ports(&slots, &host), ["80 1024", "80 1024"]);
    slots
        .set_pool_vsock(ROOT, &web, VsockPolicy::default())
        .unwrap();
    assert_eq!(
        ports(&slots, &host),
        ["1024", "80 1024"],
        "hers, and root's"
    );
    // As if it had been away meanwhile.
    host.service.lock().generation += 1;
    drop(slots);
    let slots = host.start();
    slots.await_compared();
    assert_eq!(ports(&slots, &host), ["1024", "80 1024"]);
    // What she has added a rule without is gone for good.
    let further = VsockRule {
        port: "1025".parse().unwrap(),
        ..host_rule
    };
    slots.add_channel_rule(ALICE, None, &a, further).unwrap();
    slots.set_pool_vsock(ROOT, &web, policy(TCP_RULE)).unwrap();
    assert_eq!(ports(&slots, &host), ["1024 1025", "80 1024"]);
}

#[test]
fn a_policy_that_the_service_did_not_take_is_not_there() {
    let (host, slots) = Host::with_pool(1);
    slots.take(r#"web:a "vsock": {}"#).unwrap();
    host.service.set_down(true);
    let a = name("a");
    let error = slots
        .set_channel_policy(ROOT, None, &a, Some(policy(HOST_RULE)))
        .unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unavailable);
    assert!(!slots.channel_policy(ROOT, None, &a).unwrap().own);
    drop(slots);
    let slots = host.start();
    assert!(!slots.channel_policy(ROOT, None, &a).unwrap().own);
}

#[test]
fn who_has_few_leases_has_no_service_tell_of_everybodys() {
    let (host, slots) = open_to_alice(13);
    slots.await_compared();
    slots
        .acquire(ALICE, &request_of(r#"web:a "vsock": {}"#))
        .unwrap();
    for number in 0..12 {
        let request = format!(r#"web:l{number} "vsock": {{}}"#);
        slots.take(&request).unwrap();
    }
    let counted = |caller| {
        let channels = slots.channels(caller);
        channels.iter().filter(|row| row.traffic.is_some()).count()
    };
    let listed = |caller| slots.channel_connections(caller, None).unwrap().len();
    let before = host.service.lock().told_of_all;
    assert_eq!((counted(ALICE), listed(ALICE)), (1, 1));
    assert_eq!(host.service.lock().told_of_all, before);
    assert_eq!((counted(ROOT), listed(ROOT)), (13, 13));
    assert_eq!(host.service.lock().told_of_all, before + 2);
}

#[test]
fn a_pool_whose_sockets_would_have_too_long_paths_is_refused() {
    let host = Host::new();
    let slots = host.start();
    let error = slots
        .create_pool(&spec(&"x".repeat(63), 1))
        .unwrap_err()
        .to_string();
    assert!(error.contains("bytes too long (of 107)"), "{error}");
    assert!(slots.pools().is_empty());
}
