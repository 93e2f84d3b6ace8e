use super::*;

fn prefixes(ipv4: &str, ipv6: &str) -> sandwire_api::pool::AddressPlan {
    let text = format!(r#"{{"plan": "prefix", "ipv4": "{ipv4}", "ipv6": "{ipv6}"}}"#);
    serde_json::from_str(&text).unwrap()
}

#[test]
fn a_pool_is_created_once() {
    let (host, slots) = Host::with_pool(2);
    assert_eq!(slots.create_pool(&spec("web", 2)).unwrap().slots.ready, 2);
    assert_eq!(
        code(slots.create_pool(&spec("web", 3))),
        ErrorCode::Conflict
    );
    assert_eq!(host.kernel.numbers("web"), [0, 1]);
}

#[test]
fn pools_that_overlap_are_refused() {
    let (_host, slots) = Host::with_pool(1);
    let error = slots.create_pool(&spec("db", 1)).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Conflict);
    let text = "cannot create pool 'db': 10.64.0.0/28 overlaps 10.64.0.0/28 of pool 'web'";
    assert_eq!(error.to_string(), text);
    assert_eq!(slots.pools().len(), 1);
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let host = Host::new();
    let slots = host.start();
    assert_eq!(
        code(slots.create_pool(&spec("web", 14))),
        ErrorCode::InvalidRequest
    );
    let mut unsupported = spec("web", 1);
    unsupported.kind = sandwire_api::slot::SlotKind::Host;
    assert_eq!(
        code(slots.create_pool(&unsupported)),
        ErrorCode::Unsupported
    );
    assert!(slots.pools().is_empty());
}

#[test]
fn a_pool_that_the_host_refuses_leaves_nothing() {
    let host = Host::new();
    let slots = host.start();
    host.kernel.fail("add pool", true);
    assert_eq!(
        code(slots.create_pool(&spec("web", 1))),
        ErrorCode::Internal
    );
    drop(slots);
    host.kernel.fail("add pool", false);
    assert!(host.start().pools().is_empty());
}

#[test]
fn a_pool_is_resized_and_stays_so() {
    let (host, slots) = Host::with_pool(2);
    slots.resize_pool(&name("web"), 5).unwrap();
    slots.await_ready("web", 5);
    slots.resize_pool(&name("web"), 1).unwrap();
    slots.await_quiet();
    assert_eq!(host.kernel.numbers("web").len(), 1);
    assert_eq!(
        code(slots.resize_pool(&name("web"), 14)),
        ErrorCode::InvalidRequest
    );
    assert_eq!(
        code(slots.resize_pool(&name("nowhere"), 1)),
        ErrorCode::NotFound
    );
    drop(slots);
    let slots = host.start();
    assert_eq!(slots.pool_spec(&name("web")).unwrap().size, 1);
}

#[test]
fn a_pool_is_deleted_when_its_leases_are_gone() {
    let (host, slots) = Host::with_pool(3);
    slots.take("web:a").unwrap();
    let error = slots.delete_pool(&name("web")).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Conflict);
    let text = "cannot delete pool 'web': 1 leases of it exist: release them first";
    assert_eq!(error.to_string(), text);
    slots.give_back("a").unwrap();
    slots.delete_pool(&name("web")).unwrap();
    assert!(slots.pools().is_empty());
    assert!(host.kernel.lock().slots.is_empty() && host.kernel.lock().pools.is_empty());
    assert_eq!(code(slots.delete_pool(&name("web"))), ErrorCode::NotFound);
    host.kernel.assert_unviolated();
    drop(slots);
    assert!(host.start().pools().is_empty());
}

#[test]
fn an_address_rests_on_where_its_pool_is_deleted_and_another_made_there() {
    let (host, slots) = Host::with_pool(1);
    let slot = slots.take("web:a").unwrap().lease.slot;
    slots.give_back("a").unwrap();
    let rests = |pool: &'static str, count: u32| {
        move |state: &State| state.pools[&name(pool)].pool.counts().quarantined == count
    };
    slots.wait_until("it rests", rests("web", 1));
    slots.delete_pool(&name("web")).unwrap();
    slots.create_pool(&spec("db", 1)).unwrap();
    slots.await_ready("db", 1);
    assert_ne!(slots.take("db:b").unwrap().lease.slot, slot);
    drop(slots);
    let slots = host.start();
    slots.wait_until("it rests after a restart, too", rests("db", 1));
    host.advance(&slots, Duration::from_secs(3));
    slots.wait_until("its rest is over", rests("db", 0));

    slots.give_back("b").unwrap();
    slots.wait_until("the other rests", rests("db", 1));
    slots.delete_pool(&name("db")).unwrap();
    let mut restless = spec("cache", 1);
    restless.quarantine_seconds = 0;
    let pool = slots.create_pool(&restless).unwrap();
    assert_eq!(pool.slots.quarantined, 0, "it lets no address rest");
    host.kernel.assert_unviolated();
}

#[test]
fn a_deletion_that_fails_leaves_a_pool_that_works() {
    let (host, slots) = Host::with_pool(2);
    host.kernel.fail("remove pool", true);
    assert_eq!(code(slots.delete_pool(&name("web"))), ErrorCode::Internal);
    host.advance(&slots, Duration::from_secs(1));
    slots.await_ready("web", 2);
    slots.take("web:a").unwrap();
}

#[test]
fn a_deletion_that_fails_leaves_a_pool_that_holds_its_policy_once() {
    let host = Host::new();
    let slots = host.start();
    let mut spec = spec("web", 1);
    spec.data_path = sandwire_api::slot::DataPath::Ebpf;
    slots.create_pool(&spec).unwrap();
    host.kernel.fail("remove pool", true);
    assert_eq!(code(slots.delete_pool(&spec.name)), ErrorCode::Internal);
    host.advance_until(&slots, "it is prepared again", |state| {
        state.pools[&spec.name].not_added.is_none()
    });
    slots.await_ready("web", 1);
    spec.policy.clone_to_clone = true;
    slots
        .set_pool_policy(ROOT, &spec.name, spec.policy)
        .unwrap();
    host.advance_until(&slots, "the old policy is gone", |_| {
        host.kernel.lock().policies.len() == 1
    });
    host.kernel.assert_unviolated();
}

#[test]
fn a_pool_of_the_configuration_is_created_adapted_or_made_anew() {
    let host = Host::new();
    let slots = host.start();
    slots.ensure_pool(&spec("web", 1)).unwrap();
    slots.await_ready("web", 1);
    assert_eq!(slots.ensure_pool(&spec("web", 2)).unwrap().spec.size, 2);
    slots.await_ready("web", 2);

    let mut changed = spec("web", 2);
    changed.tap.mtu = 9000;
    slots.take("web:a").unwrap();
    let error = slots.ensure_pool(&changed).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Conflict);
    assert!(
        error.to_string().contains("1 leases of it exist"),
        "{error}"
    );
    slots.give_back("a").unwrap();
    assert_eq!(slots.ensure_pool(&changed).unwrap().spec, changed);
    slots.await_ready("web", 2);
    host.kernel.assert_unviolated();
}

#[test]
fn a_pool_is_not_given_up_for_settings_that_are_refused() {
    let (host, slots) = Host::with_pool(2);
    let mut other = spec("db", 1);
    other.addresses = prefixes("10.65.0.0/28", "fd00:db::/64");
    slots.create_pool(&other).unwrap();
    let mut changed = spec("web", 2);
    changed.addresses = prefixes("10.65.0.0/24", "fd00:c10e::/64");
    let error = slots.ensure_pool(&changed).unwrap_err();
    let text = "cannot change pool 'web': 10.65.0.0/24 overlaps 10.65.0.0/28 of pool 'db'";
    assert_eq!(error.to_string(), text);
    // Nothing of it was touched.
    assert_eq!(slots.pool(&name("web")).unwrap().slots.ready, 2);
    slots.take("web:a").unwrap();
    host.kernel.assert_unviolated();
}

#[test]
fn a_pool_goes_on_with_its_old_settings_if_the_host_refuses_the_new_ones() {
    let (host, slots) = Host::with_pool(2);
    slots.resize_pool(&name("web"), 3).unwrap();
    slots.await_ready("web", 3);
    let mut changed = spec("web", 3);
    changed.tap.mtu = 9000;
    host.kernel.lock().refused_mtu = Some(9000);
    assert_eq!(code(slots.ensure_pool(&changed)), ErrorCode::Internal);
    slots.await_ready("web", 3);
    assert_eq!(slots.pool_spec(&name("web")).unwrap(), spec("web", 3));
    slots.take("web:a").unwrap();
    host.kernel.assert_unviolated();
    drop(slots);
    assert_eq!(host.start().pools().len(), 1);
}

#[test]
fn a_pool_that_the_host_refuses_at_a_start_keeps_its_leases_and_is_tried_again() {
    let (host, slots) = Host::with_pool(2);
    let lease = slots.take("web:a").unwrap().lease;
    slots.await_ready("web", 2);
    drop(slots);
    host.kernel.fail("add pool", true);
    let slots = host.start();
    assert_eq!(slots.leases(ROOT), [lease]);
    let health = slots.health();
    assert!(!health.ready);
    let is_told = |problem: &sandwire_api::health::Problem| problem.subject == "pool web";
    assert!(health.problems.iter().any(is_told), "{health:?}");
    // A slot that is ready would be of no use to anybody.
    let refused = slots.take("web:b").unwrap_err();
    assert_eq!(refused.code(), ErrorCode::PoolEmpty, "{refused}");
    assert!(refused.to_string().contains("add pool"), "{refused}");
    assert_eq!(slots.pool(&name("web")).unwrap().slots.ready, 2);
    host.kernel.fail("add pool", false);
    host.advance(&slots, Duration::from_secs(1));
    slots.wait_until("the pool is added", |state| {
        state.pools[&name("web")].not_added.is_none()
    });
}

#[test]
fn two_services_on_one_folder_are_refused() {
    let (host, _slots) = Host::with_pool(1);
    let second = host.start_with(&Power::unlimited());
    let error = second.err().expect("there is one already");
    assert!(
        error.to_string().contains("in use by another daemon"),
        "{error}"
    );
}

#[test]
fn the_host_is_not_inspected_while_a_pool_comes_or_goes() {
    let (host, slots) = Host::with_pool(1);
    // It may have been tried while the pool was coming.
    host.advance(&slots, Duration::from_secs(1));
    slots.await_health(true);
    host.kernel.fail("host", true);
    let gate = slots.shared.pools_gate.lock().unwrap();
    host.advance(&slots, Duration::from_secs(60));
    host.advance_until(&slots, "the auditor has gone round", |state| {
        state.counters.inspections > 3
    });
    assert!(slots.health().ready);
    drop(gate);
    host.advance(&slots, Duration::from_secs(60));
    slots.await_health(false);
}

#[test]
fn the_host_is_inspected_while_a_pool_is_long_in_going() {
    let (host, slots) = Host::with_pool(1);
    host.advance(&slots, Duration::from_secs(1));
    slots.await_health(true);
    host.kernel.fail("tear down", true);
    std::thread::scope(|scope| {
        let deleted = scope.spawn(|| slots.delete_pool(&name("web")));
        slots.wait_until("the pool is going", |state| {
            state.pools.values().all(|entry| entry.is_deleting)
        });
        host.kernel.fail("host", true);
        host.advance_until(&slots, "the host is looked at", |state| {
            state.counters.defects_found > 0
        });
        host.kernel.fail("tear down", false);
        host.advance_until(&slots, "the pool has gone", |state| state.pools.is_empty());
        deleted.join().unwrap().unwrap();
    });
}

#[test]
fn auto_is_ebpf_where_it_can_be_had_and_nft_elsewhere() {
    use sandwire_api::slot::{DataPath, SlotKind};

    for (fails, kind, expected) in [
        (false, SlotKind::Netns, Some(DataPath::Ebpf)),
        (true, SlotKind::Netns, Some(DataPath::Nft)),
        (false, SlotKind::Host, Some(DataPath::Ebpf)),
    ] {
        let host = Host::new();
        let slots = host.start();
        host.kernel.fail("check ebpf", fails);
        let mut wanted = spec("web", 1);
        (wanted.kind, wanted.data_path) = (kind, DataPath::Auto);
        let pool = slots.create_pool(&wanted).unwrap();
        assert_eq!(Some(pool.spec.data_path), expected);
        // What the configuration says once more is no change.
        let again = slots.ensure_pool(&wanted).unwrap();
        assert_eq!(Some(again.spec.data_path), expected);
    }
}

#[test]
fn what_a_former_change_has_left_goes_as_soon_as_the_kernel_lets_it() {
    let (host, slots) = Host::with_pool(1);
    drop(slots);
    assert_eq!(host.kernel.lock().settlings, 1);
    host.kernel.fail("settle pools", true);
    let slots = host.start();
    assert!(slots.shared.lock().is_unsettled);
    assert_eq!(host.kernel.lock().settlings, 1);
    host.kernel.fail("settle pools", false);
    host.advance_until(&slots, "it is settled", |state| !state.is_unsettled);
    assert_eq!(host.kernel.lock().settlings, 2);
    // Once is enough.
    host.advance(&slots, Duration::from_secs(60));
    slots.shutdown();
    assert_eq!(host.kernel.lock().settlings, 2);
}
