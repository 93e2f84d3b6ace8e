use super::*;

#[test]
fn a_lease_has_all_that_a_vmm_needs() {
    let (_host, slots) = Host::with_pool(2);
    // Of two builders either may be done first, and slots are handed out in the order of that.
    let Acquired { lease, new } = slots.take("web:a").unwrap();
    assert!(new);
    assert!(lease.slot < 2, "{lease:?}");
    assert_eq!(lease.state, LeaseState::Active);
    let netns = format!("/run/netns/sandwire.test.web.{}", lease.slot);
    assert_eq!(lease.netns.as_deref(), Some(&*netns));
    let nic = &lease.nics[0];
    assert_eq!(nic.tap, "vmtap0");
    assert_eq!(
        nic.ipv4.as_ref().unwrap().clone_address.to_string(),
        format!("10.64.0.{}", lease.slot + 2)
    );
    assert_eq!(
        nic.ipv6.as_ref().unwrap().clone_address.to_string(),
        format!("fd00:c10e::{}", lease.slot + 2)
    );
    assert_eq!((lease.acquired_at, lease.expires_at), (1_700_001_000, None));
}

#[test]
fn asking_again_gives_the_same_lease() {
    let (_host, slots) = Host::with_pool(2);
    let first = slots.take("web:a").unwrap();
    let again = slots.take("web:a").unwrap();
    assert_eq!(again.lease, first.lease);
    assert!(!again.new);
    assert_eq!(slots.counters().acquires, 1);
}

#[test]
fn the_same_name_in_another_pool_is_refused() {
    let (_host, slots) = Host::with_pool(1);
    let mut other = spec("db", 1);
    other.addresses = serde_json::from_str(
        r#"{"plan": "prefix", "ipv4": "10.65.0.0/28", "ipv6": "fd00:c10f::/64"}"#,
    )
    .unwrap();
    slots.create_pool(&other).unwrap();
    slots.await_ready("db", 1);
    slots.take("web:a").unwrap();
    assert_eq!(code(slots.take("db:a")), ErrorCode::Conflict);
    assert!(slots.take("db:b").unwrap().new);
}

#[test]
fn leases_without_a_name_get_one_that_nobody_else_has() {
    let (host, slots) = Host::with_pool(3);
    slots.take("web:lease-0001").unwrap();
    let first = slots.take("web").unwrap().lease.name;
    let second = slots.take("web").unwrap().lease.name;
    assert_eq!(
        (first.as_str(), second.as_str()),
        ("lease-0000", "lease-0002")
    );
    slots.await_ready("web", 3);
    drop(slots);
    let slots = host.start();
    let third = slots.take("web").unwrap().lease.name;
    assert_eq!(
        third.as_str(),
        "lease-03e8",
        "numbers set aside are not used again"
    );
}

#[test]
fn an_unknown_pool_and_an_endless_moment_are_refused() {
    let (_host, slots) = Host::with_pool(1);
    assert_eq!(code(slots.take("nowhere")), ErrorCode::NotFound);
    let momentary = slots.take(r#"web:a "ttl_seconds": 0"#);
    assert_eq!(code(momentary), ErrorCode::InvalidRequest);
}

#[test]
fn an_empty_pool_says_why() {
    let (host, slots) = Host::with_pool(1);
    host.kernel.fail("build", true);
    slots.take("web:a").unwrap();
    slots.wait_until("a build failed", |state| state.counters.builds_failed > 0);
    let error = slots.take("web:b").unwrap_err();
    assert_eq!(error.code(), ErrorCode::PoolEmpty);
    assert!(error.to_string().contains("the test says so"), "{error}");
    assert!(!slots.health().ready);

    host.kernel.fail("build", false);
    host.advance(&slots, Duration::from_secs(10));
    slots.await_ready("web", 1);
    slots.take("web:b").unwrap();
    slots.await_health(true);
}

#[test]
fn a_pool_with_all_numbers_leased_is_exhausted() {
    let (_host, slots) = Host::with_pool(2);
    for lease in 0..13 {
        slots.wait_until("one is ready", |state| {
            state.pools[&name("web")].pool.counts().ready > 0
        });
        slots.take(&format!("web:l{lease}")).unwrap();
    }
    assert_eq!(code(slots.take("web:more")), ErrorCode::PoolExhausted);
    assert_eq!(
        slots.counters().acquires_refused[&ErrorCode::PoolExhausted],
        1
    );
}

#[test]
fn a_journal_that_cannot_be_written_hands_nothing_out_and_the_service_goes_on() {
    let (_host, slots) = Host::with_pool(2);
    let set_read_only = |is| slots.shared.lock().journal.set_read_only(is);
    set_read_only(true);
    for request in ["web:a", "web", r#"web:b "clone_address": "10.64.0.2""#] {
        let error = slots.take(request).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Internal);
        assert!(error.to_string().contains("journal.sqlite"), "{error}");
    }
    assert!(slots.leases(ROOT).is_empty());
    set_read_only(false);
    slots.await_ready("web", 2);
    assert_eq!(
        slots.take("web:a").unwrap().lease.slot,
        0,
        "it was put back"
    );
    set_read_only(true);
    assert_eq!(code(slots.give_back("a")), ErrorCode::Internal);
    assert_eq!(slots.leases(ROOT)[0].state, LeaseState::Active);
    set_read_only(false);
    slots.give_back("a").unwrap();
}

#[test]
fn a_certain_address_is_handed_out_whether_its_slot_is_ready_or_not() {
    let (_host, slots) = Host::with_pool(2);
    let ready = slots.take(r#"web:a "clone_address": "10.64.0.3""#).unwrap();
    assert_eq!(ready.lease.slot, 1);
    let unbuilt = slots
        .take(r#"web:b "clone_address": "fd00:c10e::9""#)
        .unwrap();
    assert_eq!(unbuilt.lease.slot, 7);
    let again = slots.take(r#"web:b "clone_address": "10.64.0.9""#).unwrap();
    assert_eq!((again.lease, again.new), (unbuilt.lease, false));
    for (request, expected) in [
        (r#"web:c "clone_address": "10.64.0.9""#, ErrorCode::Conflict),
        (r#"web:b "clone_address": "10.64.0.3""#, ErrorCode::Conflict),
        (
            r#"web:c "clone_address": "10.64.0.1""#,
            ErrorCode::InvalidRequest,
        ),
        (
            r#"web:c "clone_address": "10.99.0.1""#,
            ErrorCode::InvalidRequest,
        ),
    ] {
        assert_eq!(code(slots.take(request)), expected, "{request}");
    }
}

#[test]
fn a_certain_address_that_cannot_be_built_is_refused_with_the_reason() {
    let (host, slots) = Host::with_pool(1);
    host.kernel.fail("build", true);
    let error = slots
        .take(r#"web:a "clone_address": "10.64.0.9""#)
        .unwrap_err();
    assert_eq!(error.code(), ErrorCode::PoolEmpty);
    assert!(error.to_string().contains("the test says so"), "{error}");
    assert!(slots.leases(ROOT).is_empty());
}

#[test]
fn a_lease_comes_back_at_its_old_address_before_the_end_of_its_rest() {
    let (host, slots) = Host::with_pool(1);
    slots.take("web:mine").unwrap();
    slots.give_back("mine").unwrap();
    let other = slots.take(r#"web:other "clone_address": "10.64.0.2""#);
    assert_eq!(code(other), ErrorCode::Conflict);
    let back = slots
        .take(r#"web:mine "clone_address": "10.64.0.2""#)
        .unwrap();
    assert_eq!((back.lease.slot, back.new), (0, true));
    host.kernel.assert_unviolated();
}

#[test]
fn a_claim_of_an_old_address_that_comes_to_nothing_does_not_end_its_rest() {
    let (host, slots) = Host::with_pool(1);
    slots.take("web:mine").unwrap();
    slots.give_back("mine").unwrap();
    slots.await_quiet();
    let mine = r#"web:mine "clone_address": "10.64.0.2""#;
    let other = r#"web:other "clone_address": "10.64.0.2""#;
    host.kernel.fail("build", true);
    assert_eq!(code(slots.take(mine)), ErrorCode::PoolEmpty);
    host.kernel.fail("build", false);
    assert_eq!(code(slots.take(other)), ErrorCode::Conflict);
    // Here the slot is built, but the lease can't be journaled.
    slots.shared.lock().journal.set_read_only(true);
    assert_eq!(code(slots.take(mine)), ErrorCode::Internal);
    slots.shared.lock().journal.set_read_only(false);
    slots.await_quiet();
    assert_eq!(code(slots.take(other)), ErrorCode::Conflict);
    drop(slots);
    let slots = host.start();
    assert_eq!(code(slots.take(other)), ErrorCode::Conflict);
    host.advance(&slots, Duration::from_secs(3));
    slots.wait_until("its rest is over", |state| {
        state.pools[&name("web")].pool.counts().quarantined == 0
    });
    assert_eq!(slots.take(other).unwrap().lease.slot, 0);
    host.kernel.assert_unviolated();
}

/// Who waited for the answer may have been killed, and another takes back what it asked for.
#[test]
fn a_release_waits_for_the_lease_that_is_just_being_acquired() {
    let (host, slots) = Host::with_pool(1);
    let gate = host.kernel.builds_gate.lock().unwrap();
    std::thread::scope(|scope| {
        let acquiring = scope.spawn(|| slots.take(r#"web:a "clone_address": "10.64.0.9""#));
        slots.wait_until("its slot is being built", |state| {
            state.pools[&name("web")].pool.counts().building > 0
        });
        let releasing = scope.spawn(|| slots.give_back("a"));
        assert_eq!(code(slots.give_back("b")), ErrorCode::NotFound);
        let stranger = slots.release(BOB, Some(0), &name("a"));
        assert_eq!(code(stranger), ErrorCode::NotFound);
        std::thread::sleep(Duration::from_millis(50));
        drop(gate);
        acquiring.join().unwrap().unwrap();
        let released = releasing.join().unwrap().unwrap();
        assert_eq!(released.outcome, ReleaseOutcome::Released);
    });
    assert!(slots.leases(ROOT).is_empty());
    assert_eq!(code(slots.give_back("a")), ErrorCode::NotFound);
}

#[test]
fn many_callers_at_once_never_share_a_slot() {
    let (host, slots) = Host::with_pool(4);
    let leased: Vec<u32> = std::thread::scope(|scope| {
        let callers: Vec<_> = (0..8)
            .map(|caller| {
                let slots = &slots;
                scope.spawn(move || {
                    let taken = (0..3)
                        .filter_map(|lease| slots.take(&format!("web:c{caller}-{lease}")).ok());
                    taken
                        .map(|acquired| acquired.lease.slot)
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        let leased = callers
            .into_iter()
            .flat_map(|caller| caller.join().unwrap());
        leased.collect()
    });
    let distinct: BTreeSet<u32> = leased.iter().copied().collect();
    assert_eq!(distinct.len(), leased.len(), "{leased:?}");
    assert!(leased.len() >= 4, "the ready ones at least: {leased:?}");
    host.kernel.assert_unviolated();
}

#[test]
fn a_lease_whose_caller_has_gone_meanwhile_is_taken_back() {
    let host = Host::new();
    let slots = host.start();
    let mut spec = spec("web", 2);
    spec.data_path = DataPath::Ebpf;
    slots.create_pool(&spec).unwrap();
    slots.await_ready("web", 2);
    let gone = || false;
    for request in [
        "web",
        r#"web:plain "ttl_seconds": 5"#,
        r#"web:own "policy": {"uplink": "deny"}"#,
        r#"web:certain "clone_address": "10.64.0.12""#,
        r#"web:called "vsock": {}"#,
    ] {
        let request = request_of(request);
        let refused = slots.acquire_while(ROOT, &request, &gone);
        assert_eq!(code(refused), ErrorCode::Unavailable, "{request:?}");
        assert!(slots.leases(ROOT).is_empty(), "{request:?}");
        assert!(host.service.lock().channels.is_empty());
        slots.await_quiet();
    }
    host.advance_until(&slots, "only the pool has a policy", |_| {
        host.kernel.lock().policies.len() == 1
    });
    drop(slots);
    let slots = host.start();
    assert!(slots.leases(ROOT).is_empty(), "the journal has none");
    // Who is there again gets what it had.
    slots.take("web:plain").unwrap();
    let again = slots.acquire_while(ROOT, &request_of("web:plain"), &gone);
    assert!(!again.unwrap().new);
    assert_eq!(slots.leases(ROOT).len(), 1);
    host.kernel.assert_unviolated();
}

#[test]
fn a_lease_for_which_somebody_else_waits_stays_when_its_caller_goes() {
    for round in 0..20 {
        let (host, slots) = Host::with_pool(0);
        let request = request_of(r#"web:a "clone_address": "10.64.0.12""#);
        let gate = host.kernel.builds_gate.lock().unwrap();
        std::thread::scope(|scope| {
            let gone = scope.spawn(|| slots.acquire_while(ROOT, &request, &|| false));
            let waits = scope.spawn(|| slots.acquire(ROOT, &request));
            slots.wait_until("both have asked", |state| {
                state.acquiring.values().sum::<u32>() == 2
            });
            drop(gate);
            // Told or not, it has no lease for itself.
            let _ = gone.join().unwrap();
            waits.join().unwrap().unwrap();
        });
        assert_eq!(slots.leases(ROOT).len(), 1, "round {round}");
        host.kernel.assert_unviolated();
    }
}

#[test]
fn every_refusal_is_counted_once_whatever_was_asked_for() {
    let host = Host::new();
    let slots = host.start();
    let mut spec = spec("web", 1);
    spec.data_path = DataPath::Ebpf;
    slots.create_pool(&spec).unwrap();
    slots.await_ready("web", 1);
    host.service.set_down(true);
    for (caller, request, word) in [
        (ROOT, "none", ErrorCode::NotFound),
        (ROOT, r#"none "vsock": {}"#, ErrorCode::NotFound),
        (ROOT, r#"web "vsock": {}"#, ErrorCode::Unavailable),
        (
            ROOT,
            r#"web "attach": {"netns": "/run/netns/blue"}"#,
            ErrorCode::InvalidRequest,
        ),
        (
            BOB,
            r#"web "policy": {"uplink": "deny"}"#,
            ErrorCode::Forbidden,
        ),
        (BOB, "web", ErrorCode::Forbidden),
    ] {
        let before = slots.counters().acquires_refused;
        assert_eq!(code(slots.acquire(caller, &request_of(request))), word);
        let mut expected = before;
        *expected.entry(word).or_default() += 1;
        assert_eq!(slots.counters().acquires_refused, expected, "{request}");
    }
}
