use super::*;

#[test]
fn a_damaged_ready_slot_is_retired_and_replaced() {
    let (host, slots) = Host::with_pool(2);
    host.kernel.damage("sandwire.test.web.1");
    host.advance_until(&slots, "it is found", |state| {
        state.counters.defects_found > 0
    });
    slots.await_ready("web", 2);
    slots.await_quiet();
    assert!(!host.kernel.lock().slots.contains_key("sandwire.test.web.1"));
    let health = slots.health();
    assert!(health.ready, "{health:?}");
    let message = "tap vmtap0: is not as it was made (slot retired)";
    assert!(
        health
            .problems
            .iter()
            .any(|problem| problem.message == message),
        "{health:?}"
    );
}

#[test]
fn a_damaged_leased_slot_is_repaired_and_stays() {
    let (host, slots) = Host::with_pool(1);
    let lease = slots.take("web:a").unwrap().lease;
    slots.await_ready("web", 1);
    host.kernel.damage(lease.netns_name.as_deref().unwrap());
    assert_eq!(
        slots
            .lease_detail(ROOT, None, &name("a"))
            .unwrap()
            .defects
            .len(),
        1
    );
    host.advance_until(&slots, "it is repaired", |state| {
        state.counters.defects_repaired > 0
    });
    assert!(
        slots
            .lease_detail(ROOT, None, &name("a"))
            .unwrap()
            .defects
            .is_empty()
    );
    assert_eq!(slots.leases(ROOT), [lease]);
    // Who sees no leases of root's isn't told their names, either.
    let told = |caller| format!("{:?}", slots.health_for(caller).problems);
    for (caller, sees) in [(ROOT, true), (BOB, false)] {
        let told = told(caller);
        assert!(told.contains("slot 0 of pool web"), "{told}");
        assert_eq!(told.contains("lease"), sees, "{told}");
    }
}

#[test]
fn a_leased_slot_that_vanished_while_the_service_was_away_is_built_again() {
    let (host, slots) = Host::with_pool(1);
    let lease = slots.take("web:a").unwrap().lease;
    slots.await_ready("web", 1);
    drop(slots);
    host.kernel.remove(lease.netns_name.as_deref().unwrap());
    let slots = host.start();
    slots.wait_until("it is repaired", |state| {
        state.counters.defects_repaired > 0
    });
    assert!(host.kernel.numbers("web").contains(&lease.slot));
    assert_eq!(slots.leases(ROOT), [lease]);
    host.kernel.assert_unviolated();
}

#[test]
fn a_damaged_host_is_told_and_not_ready() {
    let (host, slots) = Host::with_pool(1);
    // The auditor may have come while the pool was being made, and comes again.
    host.advance(&slots, Duration::from_secs(1));
    slots.await_health(true);
    host.kernel.fail("host", true);
    host.advance(&slots, Duration::from_secs(60));
    slots.await_health(false);
    host.kernel.fail("host", false);
    host.advance(&slots, Duration::from_secs(60));
    slots.await_health(true);
}

#[test]
fn slots_of_no_pool_are_reclaimed_at_a_start() {
    let (host, slots) = Host::with_pool(3);
    slots.take("web:a").unwrap();
    slots.await_ready("web", 3);
    drop(slots);
    let path = host.folder.path();
    for file in std::fs::read_dir(path).unwrap() {
        std::fs::remove_file(file.unwrap().path()).unwrap();
    }
    let slots = host.start();
    assert!(host.kernel.lock().slots.is_empty());
    slots.create_pool(&spec("web", 2)).unwrap();
    slots.await_ready("web", 2);
    host.kernel.assert_unviolated();
}

#[test]
fn a_journal_that_can_not_be_written_is_a_problem_until_it_can_be() {
    let (host, slots) = Host::with_pool(2);
    host.advance(&slots, Duration::from_secs(1));
    slots.await_health(true);
    slots.shared.lock().journal.set_read_only(true);
    let reason = "cannot store lease in journal";
    let refused = slots.take("web:a").unwrap_err().to_string();
    assert!(refused.contains(reason), "{refused}");
    let health = slots.health();
    let problem = &health.problems[0];
    assert!(!health.ready && problem.blocking, "{health:?}");
    assert_eq!(problem.subject, "journal");
    // The auditor may have tried again already.
    assert!(problem.message.contains("in journal"), "{problem:?}");
    host.advance_until(&slots, "it was tried again, in vain", |state| {
        let failure = state.journal.failure();
        failure.is_some_and(|failure| !failure.contains(reason))
    });
    assert!(!slots.health().ready);
    slots.shared.lock().journal.set_read_only(false);
    // Nobody has to ask for a lease first.
    host.advance_until(&slots, "it is found to be well", |state| {
        state.journal.failure().is_none()
    });
    slots.await_health(true);
    slots.take("web").unwrap();
}
