use super::{super::release::Why, *};

const REST: Duration = Duration::from_secs(3);

fn counts(slots: &Slots) -> sandwire_api::pool::SlotCounts {
    slots.pool(&name("web")).unwrap().slots
}

#[test]
fn a_released_slot_is_torn_down_and_its_number_rests() {
    let (host, slots) = Host::with_pool(1);
    let mut all = spec("web", 13);
    slots.resize_pool(&all.name, 13).unwrap();
    all.size = 13;
    slots.await_ready("web", 13);
    let lease = slots.take("web:a").unwrap().lease;
    let released = slots.give_back("a").unwrap();
    assert_eq!(released.outcome, ReleaseOutcome::Released);
    assert_eq!((released.slot, released.held_by.len()), (lease.slot, 0));
    assert_eq!(code(slots.give_back("a")), ErrorCode::NotFound);

    slots.wait_until("it rests", |state| {
        state.pools[&name("web")].pool.counts().quarantined == 1
    });
    assert!(!host.kernel.numbers("web").contains(&lease.slot));
    host.advance(&slots, REST - Duration::from_millis(1));
    assert_eq!(counts(&slots).quarantined, 1);
    host.advance(&slots, Duration::from_millis(1));
    slots.await_ready("web", 13);
    assert!(
        host.kernel.numbers("web").contains(&lease.slot),
        "built anew"
    );
    host.kernel.assert_unviolated();
}

#[test]
fn whoever_found_a_lease_due_does_not_end_the_next_of_its_name() {
    let (host, slots) = Host::with_pool(1);
    slots.take(r#"web:a "ttl_seconds": 60"#).unwrap();
    let key = slots.shared.lock().leases.keys().next().unwrap().clone();
    let now = slots.shared.now();
    for late in [Why::Begun, Why::Expired(now)] {
        assert_eq!(code(slots.shared.release(&key, late)), ErrorCode::NotFound);
        assert_eq!(slots.leases(ROOT)[0].state, LeaseState::Active, "{late:?}");
    }
    let due = Why::Expired(now + Duration::from_secs(60));
    let ended = slots.shared.release(&key, due).unwrap();
    assert_eq!(ended.outcome, ReleaseOutcome::Released);
    host.kernel.assert_unviolated();
}

#[test]
fn whoever_waited_to_end_a_lease_ends_none_of_that_name_that_it_may_not_see() {
    let (host, slots) = Host::with_pool(1);
    slots.take("web:a").unwrap();
    let key = ROOT.lease_key(None, &name("a"));
    let late = slots.shared.release(&key, Why::Asked(BOB));
    assert_eq!(code(late), ErrorCode::NotFound);
    assert_eq!(slots.leases(ROOT)[0].state, LeaseState::Active);
    slots.shared.release(&key, Why::Asked(ROOT)).unwrap();
    host.kernel.assert_unviolated();
}

#[test]
fn a_vmm_that_runs_keeps_its_slot_until_it_ends() {
    let (host, slots) = Host::with_pool(1);
    let lease = slots.take("web:a").unwrap().lease;
    assert!(host.kernel.start_vmm(lease.netns_name.as_deref().unwrap()));
    let released = slots.give_back("a").unwrap();
    assert_eq!(released.outcome, ReleaseOutcome::Held);
    assert_eq!(released.held_by[0].pid, 17);
    assert_eq!(counts(&slots).held, 1);
    assert_eq!(slots.leases(ROOT)[0].state, LeaseState::Releasing);
    assert_eq!(code(slots.take("web:a")), ErrorCode::Conflict);
    host.advance_until(&slots, "it was tried again", |_| {
        host.kernel.lock().withdrawals > 3
    });
    assert_eq!(slots.counters().releases_held, 1, "there was one release");
    let searches = host.kernel.lock().searches;
    assert_eq!(searches, 1, "nobody but the owner has asked who it is");
    for _ in 0..3 {
        assert_eq!(slots.give_back("a").unwrap().held_by, released.held_by);
    }
    let searches = host.kernel.lock().searches;
    assert_eq!(searches, 2, "no time has gone by since the last search");

    host.kernel.stop_vmm(lease.netns_name.as_deref().unwrap());
    host.advance(&slots, Duration::from_secs(1));
    slots.wait_until("the lease has ended", |state| state.leases.is_empty());
    assert!(
        !host.kernel.start_vmm(lease.netns_name.as_deref().unwrap()),
        "one that starts late finds no TAP"
    );
    slots.await_quiet();
    host.kernel.assert_unviolated();
}

#[test]
fn a_held_lease_is_still_held_after_a_restart() {
    let (host, slots) = Host::with_pool(1);
    let lease = slots.take("web:a").unwrap().lease;
    host.kernel.start_vmm(lease.netns_name.as_deref().unwrap());
    slots.give_back("a").unwrap();
    drop(slots);
    let slots = host.start();
    assert_eq!(slots.leases(ROOT)[0].state, LeaseState::Releasing);
    host.kernel.stop_vmm(lease.netns_name.as_deref().unwrap());
    host.advance(&slots, Duration::from_secs(1));
    slots.wait_until("the lease has ended", |state| state.leases.is_empty());
    host.kernel.assert_unviolated();
}

#[test]
fn a_release_that_the_kernel_fails_is_tried_again() {
    let (host, slots) = Host::with_pool(1);
    slots.take("web:a").unwrap();
    host.kernel.fail("withdraw", true);
    let error = slots.give_back("a").unwrap_err();
    assert_eq!(error.code(), ErrorCode::Internal);
    assert_eq!(
        error.to_string(),
        "cannot withdraw the TAPs of slot 0 of pool 'web': cannot withdraw model: the test says so"
    );
    host.kernel.fail("withdraw", false);
    host.advance(&slots, Duration::from_secs(1));
    slots.wait_until("the lease has ended", |state| state.leases.is_empty());
}

#[test]
fn a_lease_whose_end_can_t_be_journaled_is_tried_again_after_a_while() {
    let (host, slots) = Host::with_pool(1);
    slots.take(r#"web:a "ttl_seconds": 60"#).unwrap();
    slots.shared.lock().journal.set_read_only(true);
    host.advance(&slots, Duration::from_secs(60));
    slots.wait_until("it failed", |state| state.counters.journal_failures > 0);
    // No time goes by on the host.
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(slots.counters().journal_failures, 1);
    host.advance(&slots, Duration::from_secs(1));
    slots.wait_until("it failed again", |state| {
        state.counters.journal_failures > 1
    });
    slots.shared.lock().journal.set_read_only(false);
    host.advance(&slots, Duration::from_secs(1));
    slots.wait_until("the lease has ended", |state| state.counters.expiries == 1);
    assert!(slots.leases(ROOT).is_empty());
    host.kernel.assert_unviolated();
}

#[test]
fn a_lease_that_somebody_works_on_does_not_keep_others_from_ending() {
    let (host, slots) = Host::with_pool(2);
    for lease in ["a", "b"] {
        let request = format!(r#"web:{lease} "ttl_seconds": 60"#);
        slots.take(&request).unwrap();
    }
    let has_ended = |state: &State, lease: &str| {
        let mut keys = state.leases.keys();
        !keys.any(|key| key.name.as_str() == lease)
    };
    let begun = Instant::now();
    let work = |_: &LeaseInterfaces| {
        host.advance(&slots, Duration::from_secs(60));
        slots.wait_until("the other has ended", |state| has_ended(state, "b"));
        assert!(!has_ended(&slots.shared.lock(), "a"));
    };
    slots.with_interfaces(ROOT, None, &name("a"), work).unwrap();
    assert!(
        begun.elapsed() < Duration::from_secs(8),
        "it was waited for"
    );
    host.advance(&slots, Duration::from_secs(1));
    slots.wait_until("it has ended, too", |state| has_ended(state, "a"));
    host.kernel.assert_unviolated();
}

#[test]
fn nobody_begins_to_work_on_a_lease_whose_time_is_over() {
    let (host, slots) = Host::with_pool(1);
    slots.take(r#"web:a "ttl_seconds": 60"#).unwrap();
    let work = || slots.with_interfaces(ROOT, None, &name("a"), |_| ());
    work().unwrap();
    // So that it doesn't end at once.
    slots.shutdown();
    host.clock.advance(Duration::from_secs(60));
    let error = work().unwrap_err();
    assert_eq!(error.to_string(), "cannot use lease 'a': its time is over");
}

#[test]
fn a_lease_whose_time_is_over_is_not_acquired_again() {
    let (host, slots) = Host::with_pool(2);
    let requests = ["", r#", "clone_address": "10.64.0.3""#]
        .map(|address| format!(r#"web:a "ttl_seconds": 60{address}"#));
    let lease = slots.take(&requests[1]).unwrap().lease;
    // So that it doesn't end at once.
    let key = slots.shared.lock().leases.keys().next().unwrap().clone();
    slots.shared.lock().set_busy(&key, true);
    host.advance(&slots, Duration::from_secs(60));
    for request in &requests {
        let error = slots.take(request).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Conflict);
        assert!(error.to_string().contains("is over"), "{error}");
    }
    slots.shared.lock().set_busy(&key, false);
    host.advance(&slots, Duration::from_secs(1));
    slots.wait_until("it has ended", |state| state.leases.is_empty());
    let next = slots.take(&requests[0]).unwrap();
    assert!(next.new && next.lease.slot != lease.slot);
    host.kernel.assert_unviolated();
}

#[test]
fn a_lease_that_has_just_ended_can_t_be_traced() {
    let (_host, slots) = Host::with_pool(1);
    slots.take("web:a").unwrap();
    let (key, slot) = {
        let state = slots.shared.lock();
        let record = &state.leases.values().next().unwrap().record;
        (record.key.clone(), state.slot_plan(record).unwrap())
    };
    let trace = slots.shared.watch(&key, slot.clone()).unwrap();
    slots.give_back("a").unwrap();
    assert_eq!(trace.0.next(Duration::ZERO), Traced::End);
    // Whoever asked for it saw the lease a moment before.
    let late = slots.shared.watch(&key, slot).err();
    assert_eq!(late.map(|error| error.code()), Some(ErrorCode::NotFound));
}

#[test]
fn packets_are_not_told_of_any_more_once_the_service_has_stopped() {
    let (host, slots) = Host::with_pool(1);
    slots.take("web:a").unwrap();
    let trace = slots.trace(ROOT, None, &name("a")).unwrap();
    assert_eq!(host.kernel.lock().traced.len(), 1);
    slots.begin_shutdown();
    while trace.next(Duration::from_millis(10)) != Traced::End {}
    drop(trace);
    assert_eq!(host.kernel.lock().traced.len(), 0);
}

#[test]
fn a_tear_down_that_fails_is_tried_again_and_told() {
    let (host, slots) = Host::with_pool(1);
    host.kernel.fail("tear down", true);
    slots.take("web:a").unwrap();
    slots.give_back("a").unwrap();
    slots.wait_until("it failed", |state| state.counters.tear_downs_failed > 0);
    let problems = slots.health().problems;
    assert!(
        problems
            .iter()
            .any(|problem| problem.message.contains("torn down")),
        "{problems:?}"
    );
    host.kernel.fail("tear down", false);
    host.advance(&slots, Duration::from_secs(1));
    slots.await_quiet();
    assert_eq!(counts(&slots).quarantined, 1);
}

#[test]
fn a_lease_ends_by_its_time_to_live() {
    let (host, slots) = Host::with_pool(1);
    let lease = slots.take(r#"web:a "ttl_seconds": 60"#).unwrap().lease;
    assert_eq!(lease.expires_at, Some(lease.acquired_at + 60));
    host.advance(&slots, Duration::from_secs(59));
    assert_eq!(slots.leases(ROOT).len(), 1);
    drop(slots);
    let slots = host.start();
    assert_eq!(slots.leases(ROOT), [lease], "a restart doesn't prolong it");
    host.advance(&slots, Duration::from_secs(1));
    slots.wait_until("the lease has ended", |state| state.leases.is_empty());
    slots.wait_until("it is counted", |state| state.counters.expiries == 1);
}

#[test]
fn a_resting_number_still_rests_after_a_restart() {
    let (host, slots) = Host::with_pool(1);
    slots.take("web:a").unwrap();
    slots.give_back("a").unwrap();
    slots.await_quiet();
    drop(slots);
    let slots = host.start();
    assert_eq!(counts(&slots).quarantined, 1);
    host.advance(&slots, REST);
    slots.wait_until("its rest is over", |state| {
        state.pools[&name("web")].pool.counts().quarantined == 0
    });
}

#[test]
fn releases_of_one_lease_at_once_agree() {
    let (host, slots) = Host::with_pool(1);
    slots.take("web:a").unwrap();
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let callers: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| slots.give_back("a")))
            .collect();
        callers
            .into_iter()
            .map(|caller| caller.join().unwrap())
            .collect()
    });
    let done = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
    assert_eq!(done, 1, "{outcomes:?}");
    assert_eq!(slots.counters().releases, 1);
    slots.await_quiet();
    host.kernel.assert_unviolated();
}
