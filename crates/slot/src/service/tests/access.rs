use sandwire_api::{
    pool::{AccessRule, AccessVerb, PolicySpec},
    slot::DataPath,
    vsock::VsockPolicy,
};

use super::*;

const PORT: PublishPort = PublishPort {
    protocol: Protocol::Tcp,
    host_address: None,
    host_port: 8080,
    clone_port: 80,
    nic: 0,
};

/// A pool that Alice may use, Bob's group may not, and uid 2000 manages.
fn open_pool() -> (Host, Arc<Slots>) {
    let host = Host::new();
    let slots = host.start();
    let mut spec = spec("web", 3);
    spec.access = vec![
        AccessRule {
            verbs: vec![AccessVerb::Acquire, AccessVerb::Publish],
            uids: vec![ALICE.uid],
            gids: vec![],
            leases_max: None,
        },
        AccessRule {
            verbs: vec![AccessVerb::Manage],
            uids: vec![2000],
            gids: vec![],
            leases_max: None,
        },
    ];
    slots.create_pool(&spec).unwrap();
    slots.await_ready("web", 3);
    (host, slots)
}

#[test]
fn only_who_is_granted_a_verb_may_use_it() {
    let (_host, slots) = open_pool();
    let request = request_of("web:a");
    assert_eq!(code(slots.acquire(BOB, &request)), ErrorCode::Forbidden);
    assert!(slots.acquire(ALICE, &request).unwrap().new);
    assert!(
        slots.acquire(ROOT, &request).unwrap().new,
        "names are per owner"
    );
}

#[test]
fn a_user_holds_as_many_leases_of_a_pool_as_the_rule_says_that_lets_it_acquire() {
    let host = Host::new();
    let slots = host.start();
    let mut spec = spec("web", 6);
    let by_user = r#"[{"verbs": ["acquire"], "uids": [1000, 1001], "leases_max": 2}]"#;
    spec.access = serde_json::from_str(by_user).unwrap();
    slots.create_pool(&spec).unwrap();
    slots.await_ready("web", 6);
    for lease in ["web:a", "web:b"] {
        slots.acquire(ALICE, &request_of(lease)).unwrap();
    }
    let third = slots.acquire(ALICE, &request_of("web:c"));
    let reason = third.as_ref().unwrap_err().to_string();
    assert!(
        reason.contains("holds 2 of its leases, and may hold 2"),
        "{reason}"
    );
    assert_eq!(code(third), ErrorCode::Conflict);
    // Those that are there are answered, and others have their own share.
    assert!(!slots.acquire(ALICE, &request_of("web:b")).unwrap().new);
    slots.acquire(BOB, &request_of("web:a")).unwrap();
    for lease in ["web:a", "web:b", "web:c"] {
        slots.acquire(ROOT, &request_of(lease)).unwrap();
    }
    slots.release(ALICE, None, &name("a")).unwrap();
    host.advance_until(&slots, "a slot is ready", |state| {
        state.pools[&name("web")].pool.counts().ready > 0
    });
    slots.acquire(ALICE, &request_of("web:c")).unwrap();
    for (rule, most) in [
        (r#"{"verbs": ["show", "manage"], "gids": [100]}"#, Some(2)),
        (
            r#"{"verbs": ["acquire"], "gids": [100], "leases_max": 5}"#,
            Some(5),
        ),
        (r#"{"verbs": ["acquire"], "gids": [100]}"#, None),
    ] {
        spec.access.push(serde_json::from_str(rule).unwrap());
        assert_eq!(ALICE.leases_max(&spec), most, "{rule}");
    }
    assert_eq!(ROOT.leases_max(&spec), None);
}

#[test]
fn a_group_is_granted_verbs_too() {
    let mut spec = spec("web", 1);
    spec.access = vec![AccessRule {
        verbs: vec![AccessVerb::Show],
        uids: vec![],
        gids: vec![100],
        leases_max: None,
    }];
    assert!(BOB.may(AccessVerb::Show, &spec));
    assert!(!BOB.may(AccessVerb::Acquire, &spec));
    assert!(ROOT.may(AccessVerb::Acquire, &spec));
}

#[test]
fn a_tenant_sees_only_its_own_leases() {
    let (_host, slots) = open_pool();
    slots.acquire(ALICE, &request_of("web:a")).unwrap();
    let alices = Some(ALICE.uid);
    assert!(slots.leases(BOB).is_empty());
    assert_eq!(
        code(slots.release(BOB, alices, &name("a"))),
        ErrorCode::NotFound
    );
    assert_eq!(
        code(slots.lease_detail(BOB, alices, &name("a"))),
        ErrorCode::NotFound
    );
    assert_eq!(
        code(slots.release(ROOT, None, &name("a"))),
        ErrorCode::NotFound
    );
    assert_eq!(slots.leases(ALICE).len(), 1);
    assert_eq!(slots.leases(ROOT).len(), 1);
    assert!(
        slots
            .lease_detail(ALICE, None, &name("a"))
            .unwrap()
            .defects
            .is_empty()
    );
    slots.release(ROOT, alices, &name("a")).unwrap();
}

#[test]
fn who_manages_a_pool_sees_and_releases_all_its_leases_but_publishes_nothing() {
    let (_host, slots) = open_pool();
    let manager = Caller {
        uid: 2000,
        gid: 2000,
        privileged: false,
    };
    slots.acquire(ALICE, &request_of("web:a")).unwrap();
    assert_eq!(slots.leases(manager).len(), 1);
    let alices = Some(ALICE.uid);
    let published = slots.publish(manager, alices, &name("a"), &PORT, false);
    assert_eq!(code(published), ErrorCode::Forbidden);
    slots
        .publish(ALICE, None, &name("a"), &PORT, false)
        .unwrap();
    assert_eq!(slots.published_ports(manager).len(), 1);
    assert!(slots.published_ports(BOB).is_empty());
    slots.release(manager, alices, &name("a")).unwrap();
}

#[test]
fn whoever_may_see_a_lease_may_withdraw_its_ports() {
    let (_host, slots) = open_pool();
    slots.acquire(ALICE, &request_of("web:a")).unwrap();
    let alices = Some(ALICE.uid);
    let manager = Caller { uid: 2000, ..BOB };
    let withdraw = |caller| {
        let name = &name("a");
        slots.withdraw(caller, alices, name, Protocol::Tcp, 8080, None)
    };
    slots
        .publish(ALICE, None, &name("a"), &PORT, false)
        .unwrap();
    assert_eq!(
        code(slots.publish(manager, alices, &name("a"), &PORT, false)),
        ErrorCode::Forbidden
    );
    assert_eq!(code(withdraw(BOB)), ErrorCode::NotFound);
    withdraw(manager).unwrap();
    assert_eq!(code(withdraw(ALICE)), ErrorCode::NotFound);
}

/// A policy may have a hundred thousand prefixes, and nobody is served while it is copied under the lock.
#[test]
fn what_is_looked_at_of_a_pool_is_no_copy_of_its_settings() {
    let (_host, slots) = open_pool();
    let plan = Arc::clone(&slots.shared.lock().pools[&name("web")].plan);
    let views = slots.pool_views();
    assert!(std::ptr::eq(views[0].spec(), &raw const plan.spec));
    assert_eq!(views[0].to_api(), slots.pool(&name("web")).unwrap());
}

/// Who may is looked up when it is done: until then another pool may have got the name.
#[test]
fn pools_are_changed_and_deleted_by_who_manages_them_alone() {
    let (_host, slots) = open_pool();
    let manager = Caller { uid: 2000, ..ALICE };
    let web = name("web");
    let policy = PolicySpec::default();
    let attempts = |caller| {
        [
            slots.resize_pool_by(caller, &web, 2).map(drop),
            slots.move_pool_by(caller, &web, DataPath::Ebpf).map(drop),
            slots
                .set_pool_policy(caller, &web, policy.clone())
                .map(drop),
            slots
                .set_pool_vsock(caller, &web, VsockPolicy::default())
                .map(drop),
            slots.delete_pool_by(caller, &web),
        ]
    };
    for attempt in attempts(ALICE) {
        assert_eq!(code(attempt), ErrorCode::Forbidden);
    }
    for attempt in attempts(manager) {
        attempt.unwrap();
    }
}

#[test]
fn who_may_use_a_pool_changes_under_its_leases() {
    let (_host, slots) = open_pool();
    let web = name("web");
    slots.acquire(ALICE, &request_of("web:a")).unwrap();
    let mut spec = slots.pool_spec(&web).unwrap();
    let before = spec.access.clone();
    spec.access.retain(|rule| !rule.uids.contains(&ALICE.uid));
    assert_ne!(spec.access, before);
    spec.quarantine_seconds += 60;
    // As by a reload.
    slots.ensure_pool(&spec).unwrap();
    assert_eq!(slots.pool_spec(&web).unwrap(), spec);
    let refused = slots.acquire(ALICE, &request_of("web:b"));
    assert_eq!(code(refused), ErrorCode::Forbidden);
    assert_eq!(slots.leases(ALICE).len(), 1);
    slots.release(ALICE, None, &name("a")).unwrap();
    let by = |caller, access| slots.set_pool_use(caller, &web, access, None).map(drop);
    let manager = Caller { uid: 2000, ..ALICE };
    by(manager, None).unwrap();
    for caller in [manager, ALICE] {
        let refused = by(caller, Some(before.clone()));
        assert_eq!(code(refused), ErrorCode::Forbidden);
    }
    by(ROOT, Some(before)).unwrap();
    slots.acquire(ALICE, &request_of("web:b")).unwrap();
}
