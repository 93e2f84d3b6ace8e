//! Groups of sandboxes that talk to each other by their policies, and those that don't.

use std::collections::BTreeSet;

use sandwire_datapath::group_number;

use super::*;

#[test]
fn groups_talk_if_each_lists_the_other() {
    let (host, slots) = Host::with_ebpf_pool(3);
    let policy = |group: &str, to: &str| {
        let text = format!(r#"{{"group":"{group}","talks_to":["{to}"]}}"#);
        serde_json::from_str::<PolicySpec>(&text).unwrap()
    };
    for lease in ["a", "b", "c"] {
        slots
            .acquire(ROOT, &request_of(&format!("web:{lease}")))
            .unwrap();
    }
    set(&slots, "a", Some(policy("red", "blue"))).unwrap();
    assert!(
        host.kernel.lock().groups.pairs.is_empty(),
        "blue has not agreed"
    );
    set(&slots, "b", Some(policy("blue", "red"))).unwrap();
    set(&slots, "c", Some(policy("green", "red"))).unwrap();
    let (red, blue) = (group_number("red"), group_number("blue"));
    assert_eq!(
        host.kernel.lock().groups.pairs,
        [(red, blue), (blue, red)].into()
    );
    set(&slots, "a", None).unwrap();
    assert!(host.kernel.lock().groups.pairs.is_empty());
}

fn group(own: &str, talks_to: &[&str]) -> PolicySpec {
    PolicySpec {
        group: Some(name(own)),
        ..talking_to(talks_to.iter().copied())
    }
}

/// Pairs of these groups, both ways.
fn pairs<const N: usize>(of: [(&str, &str); N]) -> BTreeSet<(u32, u32)> {
    let of = of.map(|(one, other)| (group_number(one), group_number(other)));
    of.into_iter()
        .flat_map(|(one, other)| [(one, other), (other, one)])
        .collect()
}

#[test]
fn by_no_policy_more_groups_talk_than_there_is_room_for() {
    let (host, slots) = Host::with_ebpf_pool(4);
    for lease in ["web:a", "web:b", "web:c"] {
        slots.take(lease).unwrap();
    }
    host.kernel.lock().groups.pairs_max = 2;
    set(&slots, "a", Some(group("red", &["blue", "green"]))).unwrap();
    set(&slots, "b", Some(group("blue", &["red"]))).unwrap();
    let policies = host.policy_count();
    let assert_red_and_blue = || {
        assert_eq!(host.kernel.lock().groups.pairs, pairs([("red", "blue")]));
    };
    let too_many = group("green", &["red"]);
    let refused = set(&slots, "c", Some(too_many.clone())).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::Conflict);
    assert_eq!(
        refused.to_string(),
        "cannot let others talk to group 'green': with its talks_to 2 pairs of groups would name each other, of 1 that the \
         data path has room for: have sandboxes that may all talk to each other share a group, with clone_to_clone, or take \
         groups out of talks_to"
    );
    assert!(!slots.lease_policy(ROOT, None, &name("c")).unwrap().own);
    let refused = slots.set_pool_policy(ROOT, &name("web"), too_many.clone());
    assert_eq!(code(refused), ErrorCode::Conflict);
    assert_eq!(slots.pools()[0].spec.policy, PolicySpec::default());
    let mut request = request_of("web:d");
    request.policy = Some(too_many.clone());
    assert_eq!(code(slots.acquire(ROOT, &request)), ErrorCode::Conflict);
    assert_eq!(slots.leases(ROOT).len(), 3);
    let mut other = spec("db", 0);
    let addresses = r#"{"plan":"prefix","ipv4":"10.65.0.0/28","ipv6":"fd00:db::/64"}"#;
    other.addresses = serde_json::from_str(addresses).unwrap();
    (other.data_path, other.policy) = (DataPath::Ebpf, too_many.clone());
    assert_eq!(code(slots.create_pool(&other)), ErrorCode::Conflict);
    assert_eq!(slots.pools().len(), 1);
    assert_red_and_blue();
    assert_eq!(host.policy_count(), policies, "nothing was written");
    // Who names others that don't name it takes no room.
    set(&slots, "c", Some(group("white", &["red", "blue"]))).unwrap();
    set(&slots, "a", Some(group("red", &["green"]))).unwrap();
    set(&slots, "c", Some(too_many)).unwrap();
    assert_eq!(host.kernel.lock().groups.pairs, pairs([("red", "green")]));
    host.kernel.assert_unviolated();
}

/// Former versions refused nothing.
#[test]
fn more_groups_that_talk_than_there_is_room_for_stay_and_may_become_fewer() {
    let (host, slots) = Host::with_ebpf_pool(2);
    let taken = ["web:a", "web:b"].map(|lease| slots.take(lease).unwrap().lease.slot);
    set(&slots, "a", Some(group("red", &["blue", "green"]))).unwrap();
    set(&slots, "b", Some(group("blue", &["red"]))).unwrap();
    drop(slots);
    host.kernel.lock().groups.pairs_max = 1;
    let slots = host.start();
    for (slot, own) in taken.into_iter().zip(["red", "blue"]) {
        assert_eq!(host.policy_of(slot).unwrap().group, Some(name(own)));
    }
    let pools = slots.pools();
    assert_eq!(pools[0].last_error, None, "{pools:?}");
    assert_eq!(host.kernel.lock().groups.pairs, pairs([("red", "blue")]));
    set(&slots, "a", Some(group("red", &["blue"]))).unwrap();
    set(&slots, "a", Some(group("red", &["green"]))).unwrap();
    assert!(host.kernel.lock().groups.pairs.is_empty());
    let refused = set(&slots, "a", Some(group("red", &["blue"])));
    assert_eq!(code(refused), ErrorCode::Conflict);
}

#[test]
fn groups_that_talk_do_so_while_a_daemon_starts() {
    let (host, slots) = Host::with_ebpf_pool(4);
    let talking = [
        ("a", "red", "blue"),
        ("b", "blue", "red"),
        ("c", "black", "white"),
        ("d", "white", "black"),
    ];
    for (lease, own, other) in talking {
        slots.take(&format!("web:{lease}")).unwrap();
        set(&slots, lease, Some(group(own, &[other]))).unwrap();
    }
    drop(slots);
    host.kernel.lock().groups.told.clear();
    let slots = host.start();
    slots.await_quiet();
    let all = pairs([("red", "blue"), ("black", "white")]);
    let told = host.kernel.lock().groups.told.clone();
    assert_eq!(told, [all], "nothing else meanwhile");
    drop(slots);
    // Of a daemon that was killed before it had said that they don't talk any more.
    let slots = host.start();
    for (lease, ..) in talking {
        set(&slots, lease, None).unwrap();
    }
    drop(slots);
    host.kernel.lock().groups.pairs = pairs([("red", "blue")]);
    let _slots = host.start();
    assert!(host.kernel.lock().groups.pairs.is_empty());
}

/// Its sandboxes run on, by what the data path has of before.
#[test]
fn groups_of_a_pool_that_the_host_refuses_at_a_start_go_on_talking() {
    let (host, slots) = Host::with_ebpf_pool(2);
    for (lease, own, other) in [("a", "red", "blue"), ("b", "blue", "red")] {
        slots.take(&format!("web:{lease}")).unwrap();
        set(&slots, lease, Some(group(own, &[other]))).unwrap();
    }
    let talking = pairs([("red", "blue")]);
    drop(slots);
    host.kernel.lock().groups.told.clear();
    host.kernel.fail("add pool", true);
    let slots = host.start();
    host.advance(&slots, Duration::from_secs(1));
    host.kernel.fail("add pool", false);
    host.advance(&slots, Duration::from_secs(1));
    slots.wait_until("the pool is added", |state| {
        state.pools[&name("web")].not_added.is_none()
    });
    set(&slots, "a", None).unwrap();
    host.advance_until(&slots, "they stop", |_| {
        host.kernel.lock().groups.pairs.is_empty()
    });
    let told = host.kernel.lock().groups.told.clone();
    assert_eq!(told, [talking, BTreeSet::new()], "nothing else meanwhile");
}

/// The daemon before was killed between the end of its last pool with eBPF and its word of that.
#[test]
fn groups_that_agree_no_more_don_t_talk_where_the_data_path_opens_after_the_start() {
    let (host, slots) = Host::with_pool(1);
    drop(slots);
    {
        let groups = &mut host.kernel.lock().groups;
        groups.pairs = pairs([("red", "blue")]);
        groups.is_closed = true;
    }
    let slots = host.start();
    host.kernel.lock().groups.is_closed = false;
    let mut other = spec("db", 0);
    let addresses = r#"{"plan":"prefix","ipv4":"10.65.0.0/28","ipv6":"fd00:db::/64"}"#;
    other.addresses = serde_json::from_str(addresses).unwrap();
    (other.data_path, other.policy) = (DataPath::Ebpf, group("red", &["blue"]));
    slots.create_pool(&other).unwrap();
    assert!(host.kernel.lock().groups.pairs.is_empty());
}

#[test]
fn a_policy_whose_groups_can_t_be_told_changes_nothing() {
    let (host, slots) = Host::with_ebpf_pool(2);
    slots.take("web:a").unwrap();
    slots.take("web:b").unwrap();
    set(&slots, "a", Some(group("red", &["blue"]))).unwrap();
    let blue = Some(group("blue", &["red"]));
    host.kernel.fail("add group pairs", true);
    assert_eq!(code(set(&slots, "b", blue.clone())), ErrorCode::Internal);
    assert!(!slots.lease_policy(ROOT, None, &name("b")).unwrap().own);
    host.kernel.fail("add group pairs", false);
    host.advance_until(&slots, "what it was told of them is gone", |_| {
        host.kernel.lock().groups.pairs.is_empty()
    });
    set(&slots, "b", blue).unwrap();
    assert_eq!(host.kernel.lock().groups.pairs, pairs([("red", "blue")]));
    host.kernel.assert_unviolated();
}

/// Names whose numbers are the same.
const ALIKE: [&str; 2] = ["yiijsv", "ktodoe"];

fn talking_to<'a>(groups: impl IntoIterator<Item = &'a str>) -> PolicySpec {
    PolicySpec {
        talks_to: groups.into_iter().map(name).collect(),
        ..PolicySpec::default()
    }
}

#[test]
fn a_group_that_nobody_names_any_more_leaves_its_number_to_others() {
    let (_host, slots) = Host::with_ebpf_pool(2);
    slots.take("web:a").unwrap();
    slots.take("web:b").unwrap();
    let [first, second] = ALIKE.map(|group| Some(talking_to([group])));
    // Refused because of what comes after it.
    let both = Some(talking_to(ALIKE));
    assert_eq!(code(set(&slots, "a", both)), ErrorCode::Conflict);
    set(&slots, "a", second.clone()).unwrap();
    assert_eq!(code(set(&slots, "b", first.clone())), ErrorCode::Conflict);
    set(&slots, "a", None).unwrap();
    set(&slots, "b", first).unwrap();
    slots.give_back("b").unwrap();
    set(&slots, "a", second).unwrap();
}

/// Former versions took any number, and names that stand there twice.
#[test]
fn too_many_groups_are_refused_and_those_that_are_there_stay() {
    let (host, slots) = Host::with_ebpf_pool(2);
    slots.take("web:a").unwrap();
    let names: Vec<String> = (0..65).map(|group| format!("g{group}")).collect();
    let mut many = talking_to(names.iter().map(String::as_str));
    let refused = set(&slots, "a", Some(many.clone()));
    assert_eq!(code(refused), ErrorCode::InvalidRequest);
    let refused = slots.set_pool_policy(ROOT, &name("web"), many.clone());
    assert_eq!(code(refused), ErrorCode::InvalidRequest);
    many.talks_to.push(name("g0"));
    let mut former = slots.shared.lock().pools[&name("web")].current_spec();
    former.policy = many.clone();
    slots.shared.lock().journal.put_pool(&former).unwrap();
    drop(slots);
    let slots = host.start();
    slots.await_quiet();
    assert_eq!(slots.pools()[0].spec.policy, many);
    slots.take("web:b").unwrap();
    slots.resize_pool(&name("web"), 1).unwrap();
    slots
        .set_pool_policy(ROOT, &name("web"), talking_to(["g0"]))
        .unwrap();
}

#[test]
fn who_manages_a_pool_cannot_have_its_sandboxes_join_the_group_of_another() {
    let host = Host::new();
    let slots = host.start();
    let [mut web, mut db] = ["web", "db"].map(|pool| spec(pool, 2));
    let access = r#"[{"verbs": ["acquire", "manage"], "uids": [1000]}]"#;
    web.access = serde_json::from_str(access).unwrap();
    let addresses = r#"{"plan":"prefix","ipv4":"10.65.0.0/28","ipv6":"fd00:db::/64"}"#;
    db.addresses = serde_json::from_str(addresses).unwrap();
    for pool in [&mut web, &mut db] {
        pool.data_path = DataPath::Ebpf;
        slots.create_pool(pool).unwrap();
    }
    slots.await_ready("web", 2);
    let in_group = |group: &str| {
        let text = format!(r#"{{"group":"{group}","clone_to_clone":true}}"#);
        serde_json::from_str::<PolicySpec>(&text).unwrap()
    };
    slots.acquire(ALICE, &request_of("web:a")).unwrap();
    let a = name("a");
    let give = |caller, policy| slots.set_policy(caller, Some(ALICE.uid), &a, Some(policy));
    let mut other = request_of("web:b");
    other.policy = Some(in_group("db"));
    assert_eq!(code(slots.acquire(ALICE, &other)), ErrorCode::Forbidden);
    assert_eq!(code(give(ALICE, in_group("db"))), ErrorCode::Forbidden);
    let of_pool = slots.set_pool_policy(ALICE, &web.name, in_group("db"));
    assert_eq!(code(of_pool), ErrorCode::Forbidden);
    // Her own is hers, and so is what root has given to a lease.
    slots
        .set_pool_policy(ALICE, &web.name, in_group("web"))
        .unwrap();
    give(ALICE, PolicySpec::default()).unwrap();
    give(ROOT, in_group("db")).unwrap();
    let quiet = PolicySpec {
        clone_to_clone: false,
        ..in_group("db")
    };
    give(ALICE, quiet).unwrap();
    give(ALICE, in_group("web")).unwrap();
    assert_eq!(code(give(ALICE, in_group("db"))), ErrorCode::Forbidden);
    slots.acquire(ROOT, &other).unwrap();
    host.kernel.assert_unviolated();
}
