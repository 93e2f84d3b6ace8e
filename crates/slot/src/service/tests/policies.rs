//! Policies of pools and leases.

use sandwire_api::{pool::PolicySpec, slot::DataPath};

use super::*;
use crate::model::ModelSlot;

mod groups;

impl Host {
    /// A running service with a full eBPF pool `web`.
    fn with_ebpf_pool(size: u32) -> (Self, Arc<Slots>) {
        let host = Self::new();
        let slots = host.start();
        let mut spec = spec("web", size);
        spec.data_path = DataPath::Ebpf;
        slots.create_pool(&spec).unwrap();
        slots.await_ready("web", size);
        (host, slots)
    }

    /// The policy that a slot's packets are judged by.
    fn policy_of(&self, slot: u32) -> Option<PolicySpec> {
        let kernel = self.kernel.lock();
        let is_wanted = |found: &&ModelSlot| found.number == slot;
        let tenancy = kernel.slots.values().find(is_wanted)?.tenancy?;
        kernel.policies.get(&tenancy.policy.0).cloned()
    }

    /// The pools that this policy knows.
    fn pools_known_to(&self, slot: u32) -> Vec<String> {
        let kernel = self.kernel.lock();
        let found = kernel.slots.values().find(|found| found.number == slot);
        let policy = found.and_then(|found| found.tenancy).unwrap().policy.0;
        kernel.pools_of_policies[&policy].iter().cloned().collect()
    }

    fn policy_count(&self) -> usize {
        self.kernel.lock().policies.len()
    }
}

fn denying(text: &str) -> PolicySpec {
    serde_json::from_str(&format!(
        r#"{{"egress":{{"rules":[{{"action":"deny","prefixes":["{text}"]}}]}}}}"#
    ))
    .unwrap()
}

fn set(slots: &Slots, lease: &str, policy: Option<PolicySpec>) -> Result<(), ServiceError> {
    slots
        .set_policy(ROOT, None, &name(lease), policy)
        .map(|_| ())
}

#[test]
fn asking_again_by_another_policy_or_for_a_process_is_refused() {
    let (_host, slots) = Host::with_ebpf_pool(2);
    let mut request = request_of("web:a");
    let first = slots.acquire(ROOT, &request).unwrap();
    request.policy = Some(denying("10.0.0.0/8"));
    assert_eq!(code(slots.acquire(ROOT, &request)), ErrorCode::Conflict);
    set(&slots, "a", request.policy.clone()).unwrap();
    let again = slots.acquire(ROOT, &request).unwrap();
    assert!(!again.new);
    assert_eq!(again.lease.slot, first.lease.slot);
    request.policy = Some(denying("10.0.0.0/9"));
    assert_eq!(code(slots.acquire(ROOT, &request)), ErrorCode::Conflict);
    request.policy = None;
    assert!(!slots.acquire(ROOT, &request).unwrap().new);
    request.process = true;
    assert_eq!(code(slots.acquire(ROOT, &request)), ErrorCode::Conflict);
}

/// The whole host decides anew when sandboxes change their group.
#[test]
fn a_policy_of_a_pool_is_set_for_all_its_leases_at_once() {
    let (host, slots) = Host::with_ebpf_pool(3);
    for request in ["web:a", "web:b", "web:c"] {
        slots.take(request).unwrap();
    }
    let before = host.kernel.lock().policy_changes;
    let policy = PolicySpec {
        group: Some(name("team")),
        ..denying("10.0.0.0/8")
    };
    slots
        .set_pool_policy(ROOT, &name("web"), policy.clone())
        .unwrap();
    assert_eq!(host.kernel.lock().policy_changes, before + 1);
    for number in 0..3 {
        assert_eq!(host.policy_of(number), Some(policy.clone()));
    }
}

#[test]
fn leases_share_their_pool_s_policy_and_may_have_their_own() {
    let (host, slots) = Host::with_ebpf_pool(3);
    let mut request = request_of("web:own");
    request.policy = Some(denying("10.0.0.0/8"));
    let own = slots.acquire(ROOT, &request).unwrap().lease.slot;
    let shared = slots
        .acquire(ROOT, &request_of("web:shared"))
        .unwrap()
        .lease
        .slot;
    let other = slots
        .acquire(ROOT, &request_of("web:other"))
        .unwrap()
        .lease
        .slot;
    assert_eq!(host.policy_of(own), request.policy);
    assert_eq!(host.policy_of(shared), Some(PolicySpec::default()));
    assert_eq!(host.policy_count(), 2);

    // The same policy once more is the same place; its end is the end of the last user.
    set(&slots, "other", request.policy.clone()).unwrap();
    assert_eq!(
        (host.policy_of(other), host.policy_count()),
        (request.policy.clone(), 2)
    );
    set(&slots, "own", None).unwrap();
    set(&slots, "other", Some(denying("192.0.2.0/24"))).unwrap();
    assert_eq!(host.policy_of(own), Some(PolicySpec::default()));
    assert_eq!(
        host.policy_count(),
        3,
        "packets under way may still look at it"
    );
    host.advance_until(&slots, "the unused policy is gone", |_| {
        host.policy_count() == 2
    });

    let changed = denying("198.51.100.0/24");
    slots
        .set_pool_policy(ROOT, &name("web"), changed.clone())
        .unwrap();
    assert_eq!(host.policy_of(own), Some(changed.clone()));
    assert_eq!(host.policy_of(other), Some(denying("192.0.2.0/24")));
    slots.give_back("other").unwrap();
    slots.await_quiet();
    host.advance_until(&slots, "only the pool's is left", |_| {
        host.policy_count() == 1
    });

    drop(slots);
    let slots = host.start();
    assert_eq!(host.policy_of(own), Some(changed.clone()));
    assert_eq!(
        slots.lease_policy(ROOT, None, &name("own")).unwrap().policy,
        changed
    );
    host.advance_until(&slots, "the policies of before are gone", |_| {
        host.policy_count() == 1
    });
    host.kernel.assert_unviolated();
}

#[test]
fn a_pool_that_is_empty_compiles_no_policy() {
    let (host, slots) = Host::with_ebpf_pool(0);
    let mut request = request_of("web:a");
    request.policy = Some(denying("10.0.0.0/8"));
    let refused = || slots.counters().acquires_refused.values().sum::<u64>();
    for asked in 1..=3 {
        assert_eq!(code(slots.acquire(ROOT, &request)), ErrorCode::PoolEmpty);
        assert_eq!((host.policy_count(), refused()), (1, asked));
    }
    let refusal = slots.acquire(ALICE, &request);
    assert_eq!(code(refusal), ErrorCode::Forbidden);
    slots.resize_pool(&name("web"), 1).unwrap();
    slots.await_ready("web", 1);
    let first = slots.acquire(ROOT, &request).unwrap();
    // Asked for again, it is there, whatever else is.
    slots.resize_pool(&name("web"), 0).unwrap();
    slots.await_quiet();
    assert_eq!(slots.acquire(ROOT, &request).unwrap().lease, first.lease);
    let mut certain = request_of(r#"web:b "clone_address": "10.64.0.9""#);
    certain.policy = request.policy;
    slots.acquire(ROOT, &certain).unwrap();
}

#[test]
fn a_policy_that_fails_half_way_changes_nothing() {
    let (host, slots) = Host::with_ebpf_pool(2);
    let lease = slots
        .acquire(ROOT, &request_of("web:a"))
        .unwrap()
        .lease
        .slot;
    for operation in ["add policy", "set policy"] {
        host.kernel.fail(operation, true);
        assert_eq!(
            code(set(&slots, "a", Some(denying("10.0.0.0/8")))),
            ErrorCode::Internal
        );
        host.kernel.fail(operation, false);
        assert_eq!(
            host.policy_of(lease),
            Some(PolicySpec::default()),
            "{operation}"
        );
        assert!(!slots.lease_policy(ROOT, None, &name("a")).unwrap().own);
    }
    slots.shared.lock().journal.set_read_only(true);
    assert_eq!(
        code(set(&slots, "a", Some(denying("10.0.0.0/8")))),
        ErrorCode::Internal
    );
    let pools = slots.set_pool_policy(ROOT, &name("web"), denying("10.0.0.0/8"));
    assert_eq!(code(pools), ErrorCode::Internal);
    slots.shared.lock().journal.set_read_only(false);
    assert_eq!(host.policy_of(lease), Some(PolicySpec::default()));
    host.advance_until(&slots, "what was tried is gone", |_| {
        host.policy_count() == 1
    });
    host.kernel.assert_unviolated();
}

#[test]
fn a_slot_that_cannot_be_activated_goes_to_nobody() {
    let (host, slots) = Host::with_ebpf_pool(1);
    host.kernel.fail("activate", true);
    let refused = slots.acquire(ROOT, &request_of("web:a"));
    assert_eq!(code(refused), ErrorCode::Internal);
    host.kernel.fail("activate", false);
    assert!(slots.leases(ROOT).is_empty());
    slots.await_quiet();
    slots.acquire(ROOT, &request_of("web:a")).unwrap();
    drop(slots);
    assert_eq!(host.start().leases(ROOT).len(), 1);
    host.kernel.assert_unviolated();
}

#[test]
fn policies_take_the_right_to_manage_and_the_data_path_to_have_them() {
    let (_host, slots) = Host::with_ebpf_pool(1);
    let mut nft = spec("db", 1);
    let addresses = r#"{"plan":"prefix","ipv4":"10.65.0.0/28","ipv6":"fd00:db::/64"}"#;
    nft.addresses = serde_json::from_str(addresses).unwrap();
    slots.create_pool(&nft).unwrap();
    slots.await_ready("db", 1);
    slots.acquire(ROOT, &request_of("db:b")).unwrap();
    let mut request = request_of("web:a");
    request.policy = Some(denying("10.0.0.0/8"));
    assert_eq!(code(slots.acquire(ALICE, &request)), ErrorCode::Forbidden);
    assert_eq!(
        code(set(&slots, "b", request.policy.clone())),
        ErrorCode::Unsupported
    );
    let pools = slots.set_pool_policy(ROOT, &name("db"), denying("10.0.0.0/8"));
    assert_eq!(code(pools), ErrorCode::Unsupported);
    // The host masquerades by the pool's prefix.
    request.policy = serde_json::from_str(r#"{"uplink":"route"}"#).unwrap();
    assert_eq!(
        code(slots.acquire(ROOT, &request)),
        ErrorCode::InvalidRequest
    );
    request.policy = serde_json::from_str(r#"{"uplink":"deny"}"#).unwrap();
    slots.acquire(ROOT, &request).unwrap();
}

/// Former versions took it.
#[test]
fn a_mark_of_the_relay_s_is_refused_and_one_that_is_there_stays() {
    let (host, slots) = Host::with_ebpf_pool(2);
    let marked: PolicySpec = serde_json::from_str(r#"{"route_mark":16777216}"#).unwrap();
    slots.acquire(ROOT, &request_of("web:a")).unwrap();
    let refused = set(&slots, "a", Some(marked.clone()));
    assert_eq!(code(refused), ErrorCode::InvalidRequest);
    let refused = slots.set_pool_policy(ROOT, &name("web"), marked.clone());
    assert_eq!(code(refused), ErrorCode::InvalidRequest);
    let mut former = slots.shared.lock().pools[&name("web")].current_spec();
    former.policy = marked.clone();
    // Nobody's address, which the service for vsock refuses.
    let rule = r#"{"port": "5", "to": {"kind": "tcp", "address": "0.0.0.0:80"}}"#;
    let to_nobody = serde_json::from_str(&format!(r#"{{"rules": [{rule}]}}"#)).unwrap();
    former.vsock = Some(to_nobody);
    slots.shared.lock().journal.put_pool(&former).unwrap();
    drop(slots);
    let slots = host.start();
    assert_eq!(slots.leases(ROOT).len(), 1);
    let pools = slots.pools();
    assert_eq!(pools[0].spec.policy, marked);
    slots
        .set_pool_policy(ROOT, &name("web"), PolicySpec::default())
        .unwrap();
}

/// What is asked for is judged by the lease that has the name then, and done once the data path knows the policy.
#[test]
fn who_manages_a_pool_changes_nothing_of_a_lease_that_has_its_name_in_another() {
    let host = Host::new();
    let slots = host.start();
    let [mut web, mut db] = ["web", "db"].map(|pool| spec(pool, 1));
    web.access = serde_json::from_str(r#"[{"verbs": ["manage"], "uids": [1000]}]"#).unwrap();
    db.access = serde_json::from_str(r#"[{"verbs": ["acquire"], "uids": [1000]}]"#).unwrap();
    let addresses = r#"{"plan":"prefix","ipv4":"10.65.0.0/28","ipv6":"fd00:db::/64"}"#;
    db.addresses = serde_json::from_str(addresses).unwrap();
    for pool in [&mut web, &mut db] {
        pool.data_path = DataPath::Ebpf;
        slots.create_pool(pool).unwrap();
    }
    slots.await_ready("db", 1);
    slots.acquire(ALICE, &request_of("db:a")).unwrap();
    let shared = &slots.shared;
    let key = ALICE.lease_key(None, &name("a"));
    let plan = Arc::clone(&shared.lock().pool(&web.name).unwrap().plan);
    let own = Arc::new(denying("10.0.0.0/8"));
    let held = shared.hold_policy(&plan, &own).unwrap();
    for pool in [&web.name, &db.name] {
        for policy in [Some(&own), None] {
            let held = policy.map(|_| held.clone());
            let done = shared.replace_policy(ALICE, &key, pool, policy, held);
            assert!(code(done).is_refusal(), "{pool} {policy:?}");
        }
    }
    let of_lease = slots.lease_policy(ALICE, None, &key.name).unwrap();
    assert!(!of_lease.own);
    shared
        .replace_policy(ROOT, &key, &db.name, Some(&own), Some(held))
        .unwrap();
    host.kernel.assert_unviolated();
}

#[test]
fn policies_with_routes_of_their_own_know_pools_that_come_and_go() {
    let (host, slots) = Host::with_ebpf_pool(4);
    let routed: PolicySpec = serde_json::from_str(r#"{"route_table":100}"#).unwrap();
    let marked: PolicySpec = serde_json::from_str(r#"{"route_mark":7}"#).unwrap();
    let policies = [Some(routed.clone()), Some(routed), Some(marked), None];
    let leases = policies.clone().map(|policy| {
        let mut request = request_of("web:new");
        request.name = None;
        request.policy = policy;
        slots.acquire(ROOT, &request).unwrap().lease.slot
    });
    let known = |expected: [&[&str]; 4]| {
        for (slot, expected) in leases.into_iter().zip(expected) {
            assert_eq!(host.pools_known_to(slot), expected);
        }
    };
    let (alone, both): (&[&str], &[&str]) = (&["web"], &["db", "web"]);
    known([alone; 4]);
    let mut other = spec("db", 0);
    let addresses = r#"{"plan":"prefix","ipv4":"10.65.0.0/28","ipv6":"fd00:db::/64"}"#;
    other.addresses = serde_json::from_str(addresses).unwrap();
    let before = host.kernel.lock().policy_changes;
    slots.create_pool(&other).unwrap();
    known([both, both, both, alone]);
    let changes = host.kernel.lock().policy_changes - before;
    assert_eq!(changes, 1, "of both policies at once");
    host.advance_until(&slots, "the places of before are free", |_| {
        host.policy_count() == 3
    });
    for (slot, policy) in leases.into_iter().zip(policies) {
        assert_eq!(host.policy_of(slot), Some(policy.unwrap_or_default()));
    }
    // What fails is tried again.
    host.kernel.fail("add policy", true);
    slots.delete_pool(&name("db")).unwrap();
    known([both, both, both, alone]);
    host.kernel.fail("add policy", false);
    host.advance_until(&slots, "they know that the other is gone", |_| {
        host.pools_known_to(leases[2]) == alone
    });
    known([alone; 4]);
    host.advance_until(&slots, "the places of before are free", |_| {
        host.policy_count() == 3
    });
    host.kernel.assert_unviolated();
}

/// The data path knows a policy a moment before the service does.
#[test]
fn a_policy_that_comes_when_a_start_ends_is_not_taken_for_a_leftover() {
    for round in 0..20 {
        let (host, slots) = Host::with_ebpf_pool(1);
        let plan = Arc::clone(&slots.shared.lock().pool(&name("web")).unwrap().plan);
        let shared = &slots.shared;
        let held = std::thread::scope(|scope| {
            // Neither gets further than to the data path, until both are there.
            let kernel = host.kernel.lock();
            let adding = scope.spawn(|| shared.hold_policy(&plan, &denying("10.0.0.0/8")));
            let ending =
                scope.spawn(|| shared.end_adoption(shared.now() + Duration::from_secs(10)));
            std::thread::sleep(Duration::from_millis(10));
            drop(kernel);
            ending.join().unwrap();
            adding.join().unwrap().unwrap()
        });
        let index = held.tenancy(false).policy.0;
        assert!(
            host.kernel.lock().policies.contains_key(&index),
            "round {round}"
        );
    }
}

#[test]
fn a_policy_that_comes_when_its_pool_has_moved_to_nft_is_refused() {
    let (host, slots) = Host::with_ebpf_pool(2);
    slots.take("web:old").unwrap();
    // Both have looked at the pool and have the data path told of their policies.
    let gate = slots.shared.policies_gate.lock().unwrap();
    let late = std::thread::scope(|scope| {
        let acquired = scope.spawn(|| {
            let mut request = request_of("web:new");
            request.policy = Some(denying("10.0.0.0/8"));
            slots.acquire(ROOT, &request).map(|_| ())
        });
        let changed = scope.spawn(|| set(&slots, "old", Some(denying("10.0.0.0/8"))));
        std::thread::sleep(Duration::from_millis(200));
        slots.move_pool(&name("web"), DataPath::Nft).unwrap();
        slots.await_ready("web", 2);
        drop(gate);
        [acquired, changed].map(|late| late.join().unwrap())
    });
    for refused in late {
        assert_eq!(code(refused), ErrorCode::Unsupported);
    }
    let state = slots.shared.lock();
    let has_own = |lease: &LeaseEntry| lease.record.policy.is_some();
    assert!(!state.leases.values().any(has_own));
    drop(state);
    host.advance_until(&slots, "no policy is left", |_| host.policy_count() == 0);
    host.kernel.assert_unviolated();
}
