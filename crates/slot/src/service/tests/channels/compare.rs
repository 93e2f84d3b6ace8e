//! Channels of services that have come to have others than the journal says.

use super::*;

#[test]
fn what_the_service_has_too_much_or_too_little_is_made_good() {
    let (host, slots) = Host::with_pool(2);
    slots.take(r#"web:a "vsock": {}"#).unwrap();
    slots.take(r#"web:b "vsock": {}"#).unwrap();
    // Away while a lease ends, and when it comes back it has lost another one.
    host.service.set_down(true);
    slots.give_back("a").unwrap();
    assert_eq!(host.channels(), ["0/a", "0/b"]);
    let lost = LeaseKey {
        owner_uid: 0,
        name: name("b"),
    };
    host.service.lock().channels.remove(&lost);
    host.service.set_down(false);
    let service = Arc::clone(&host.service);
    host.advance_until(&slots, "the service has what the journal says", |_| {
        let service = service.lock();
        let folders_fit = service.folders.len() == 1;
        folders_fit && service.channels.keys().eq([&lost])
    });
}

#[test]
fn a_service_that_is_away_keeps_no_others_channels_from_being_as_they_should() {
    let (host, slots) = open_to_alice(3);
    assert_eq!(BOB.uid, GROUP_UID);
    for (caller, request) in [
        (ALICE, r#"web:a "vsock": {}"#),
        (BOB, r#"web:b "vsock": {}"#),
    ] {
        slots.acquire(caller, &request_of(request)).unwrap();
    }
    let (of_alice, of_bob) = (
        ALICE.lease_key(None, &name("a")),
        BOB.lease_key(None, &name("b")),
    );
    let mut service = host.service.lock();
    service.down = Some(1);
    let lost = service.channels.remove(&of_alice).unwrap();
    service.folders.insert("/run/sandwire/vsock/web.99".into());
    service.generation += 1;
    drop(service);
    let service = Arc::clone(&host.service);
    host.advance_until(
        &slots,
        "alice's channel is back, and no other folder",
        |_| {
            let service = service.lock();
            service.channels.contains_key(&of_alice) && service.folders.len() == 2
        },
    );
    assert_eq!(host.service.lock().channels[&of_alice], lost);
    // Hers alone is asked about hers, and root is told of those that answer.
    assert_eq!(slots.channel_connections(ALICE, None).unwrap().len(), 1);
    assert_eq!(slots.channel_connections(ROOT, None).unwrap().len(), 1);
    let error = slots.channel_connections(BOB, None).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unavailable);
    let counted = slots.channels(ROOT);
    let of = |key: &LeaseKey| {
        let row = counted.iter().find(|row| row.lease == key.name).unwrap();
        row.traffic.is_some()
    };
    assert_eq!((of(&of_alice), of(&of_bob)), (true, false));
    let error = slots
        .acquire(BOB, &request_of(r#"web:c "vsock": {}"#))
        .unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unavailable);
    slots
        .acquire(ALICE, &request_of(r#"web:c "vsock": {}"#))
        .unwrap();
}

#[test]
fn a_stale_channel_goes_without_the_folder_that_another_lease_has_by_now() {
    let (host, slots) = Host::with_pool(1);
    slots.take(r#"web:a "vsock": {}"#).unwrap();
    let key = |lease| ROOT.lease_key(None, &name(lease));
    let mut service = host.service.lock();
    let held = service.channels[&key("a")].clone();
    let stale = ChannelPlan {
        lease: key("stale"),
        ..held.clone()
    };
    service.channels.insert(key("stale"), stale);
    service.generation += 1;
    drop(service);
    let service = Arc::clone(&host.service);
    host.advance_until(&slots, "the stale one is gone", |_| {
        !service.lock().channels.contains_key(&key("stale"))
    });
    assert!(host.service.lock().folders.contains(&held.folder));
    // One whose folder somebody has removed is made anew, also where its policy is another one, too.
    let mut service = host.service.lock();
    service.folders.clear();
    for channel in service.channels.values_mut() {
        channel.policy = policy(TCP_RULE);
    }
    service.generation += 1;
    drop(service);
    let service = Arc::clone(&host.service);
    host.advance_until(&slots, "the channel is as before", |_| {
        service.lock().channels[&key("a")] == held
    });
    // Not only at some later comparison.
    assert!(service.lock().folders.contains(&held.folder));
}

/// Its former service is the later one, and has the sockets until it is told.
#[test]
fn a_channel_whose_owner_has_come_to_another_group_is_opened_once_the_former_service_has_closed_it()
{
    let (host, slots) = Host::with_pool(1);
    slots.take(r#"web:a "vsock": {}"#).unwrap();
    // One that is under way has seen what both had before.
    slots.await_compared();
    let key = ROOT.lease_key(None, &name("a"));
    let mut service = host.service.lock();
    service.former = service.channels.remove(&key);
    service.generation += 1;
    drop(service);
    host.advance_until(&slots, "the channel is the other service's", |_| {
        host.service.lock().channels.contains_key(&key)
    });
    let service = host.service.lock();
    assert_eq!((service.former.is_none(), service.refused_opens), (true, 0));
}

/// Who releases it has closed it already, and it would come back in the folder of the slot's next tenant.
#[test]
fn a_channel_of_a_lease_that_is_just_ending_is_not_opened_anew() {
    let (host, slots) = open_to_alice(2);
    for request in [r#"web:a "vsock": {}"#, r#"web:b "vsock": {}"#] {
        slots.acquire(ALICE, &request_of(request)).unwrap();
    }
    let [a, b] = ["a", "b"].map(|lease| ALICE.lease_key(None, &name(lease)));
    let mut state = slots.shared.lock();
    let ending = state.leases.get_mut(&a).unwrap();
    ending.is_busy = true;
    ending.record.state = LeaseState::Releasing;
    drop(state);
    let mut service = host.service.lock();
    service.channels.clear();
    service.generation += 1;
    drop(service);
    let service = Arc::clone(&host.service);
    host.advance_until(&slots, "the other one is there", |_| {
        service.lock().channels.contains_key(&b)
    });
    // A further comparison, and the folders are looked at.
    host.service.lock().channels.remove(&b);
    host.service.lock().generation += 1;
    host.advance_until(&slots, "the other one is there again", |_| {
        service.lock().channels.contains_key(&b)
    });
    let service = host.service.lock();
    assert!(!service.channels.contains_key(&a));
    assert_eq!(service.folders.len(), 2, "its folder is who releases it's");
}

#[test]
fn why_channels_differ_is_told_to_root_alone() {
    let (host, slots) = Host::with_pool(1);
    slots.take(r#"web:a "vsock": {}"#).unwrap();
    let mut service = host.service.lock();
    service.channels.clear();
    service.refuses = true;
    service.generation += 1;
    drop(service);
    host.advance_until(&slots, "it is noticed", |state| {
        state.channels.difference().is_some()
    });
    for (caller, is_told) in [(ROOT, true), (ALICE, false)] {
        let problems = slots.health_for(caller).problems;
        let mut problems = problems.iter();
        let found = problems.find(|problem| problem.subject == "vsock channels");
        let message = &found.unwrap().message;
        assert_eq!(message.contains("as told"), is_told, "{message}");
    }
}
