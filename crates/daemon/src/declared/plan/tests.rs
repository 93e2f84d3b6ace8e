use std::slice;

use sandwire_api::identity::{Allowed, IdentityPolicy};
use sandwire_identity::{NewIdentity, instance_number};

use super::*;

type Change = fn(&mut Standing);

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// `web`, of `/c/web`.
fn declared() -> DeclaredIdentity {
    DeclaredIdentity {
        name: name("web"),
        new: NewIdentity {
            cgroup: "/c/web".into(),
            name: Some(name("web")),
            addresses: vec!["10.0.0.5".parse().unwrap()],
            interface: "lo".to_owned(),
            existing: false,
            allowed: Allowed::default(),
            tcp_only: false,
            policy: IdentityPolicy::default(),
            prefixes: vec!["10.1.0.0/24".parse().unwrap()],
            own_cgroup: false,
            declared_by: Some(name("here")),
        },
    }
}

/// What comes of it in the cgroup of number 1.
fn added() -> Standing {
    Standing {
        name: name("web"),
        cgroup: "/c/web".into(),
        cgroup_id: 1,
        state: State::Active,
        addresses: vec!["10.0.0.5".parse().unwrap(), "10.1.0.9".parse().unwrap()],
        interface: "lo".to_owned(),
        allowed: Allowed::default(),
        tcp_only: false,
        policy: Some(IdentityPolicy::default()),
        declared_by: instance_number(&name("here")),
    }
}

fn there(id: u64) -> Place {
    Place::There {
        path: "/c/web".into(),
        id,
    }
}

/// The steps as words.
fn steps(declared: &[(DeclaredIdentity, Place)], standing: &[Standing]) -> Vec<String> {
    let steps = plan(declared, standing, &name("here")).into_iter();
    steps
        .map(|step| match step {
            Step::Remove(one) => format!("remove {}", one.name),
            Step::Add(one, cgroup) => format!("add {} to {cgroup}", one.name),
            Step::SetPolicy(one, _) => format!("policy {}", one.name),
            Step::Await(one) => format!("await {}", one.name),
            Step::AwaitEnd(one, former) => format!("await {} after {}", one.name, former.cgroup_id),
            Step::Tell(one, reason) => format!("tell {}: {reason}", one.name),
        })
        .collect()
}

#[test]
fn what_is_declared_is_added_as_its_cgroup_comes_and_comes_anew() {
    let place = |place: Place| vec![(declared(), place)];
    let dying = Standing {
        state: State::Dying,
        ..added()
    };
    let other = Standing {
        tcp_only: true,
        ..dying.clone()
    };
    let by_hand = Standing {
        declared_by: 0,
        ..dying.clone()
    };
    let rows: [(Place, &[Standing], &[&str]); 10] = [
        (Place::Absent, &[], &["await web"]),
        (there(1), &[], &["add web to 1"]),
        (there(1), &[added()], &[]),
        (there(2), &[], &["add web to 2"]),
        (there(2), slice::from_ref(&dying), &["add web to 2"]),
        (there(2), slice::from_ref(&other), &["await web after 1"]),
        (there(2), slice::from_ref(&by_hand), &["await web after 1"]),
        (Place::Absent, slice::from_ref(&dying), &["await web"]),
        (
            Place::Unusable("of version 1".to_owned()),
            &[],
            &["tell web: of version 1"],
        ),
        // The moment between two looks: the cgroup has just gone.
        (Place::Absent, &[added()], &[]),
    ];
    for (at, standing, expected) in rows {
        assert_eq!(steps(&place(at.clone()), standing), expected, "{at:?}");
    }
}

#[test]
fn one_of_another_name_at_its_path_is_waited_for() {
    let former = Standing {
        name: name("former"),
        state: State::Dying,
        ..added()
    };
    let by_hand = Standing {
        declared_by: 0,
        ..former.clone()
    };
    for standing in [former, by_hand] {
        let told = steps(&[(declared(), there(2))], &[standing]);
        assert_eq!(told, ["await web after 1"]);
    }
}

#[test]
fn what_is_declared_no_more_goes_and_nothing_else() {
    let by_hand = Standing {
        name: name("hand"),
        cgroup: "/c/hand".into(),
        cgroup_id: 7,
        declared_by: 0,
        ..added()
    };
    let of_another = Standing {
        declared_by: instance_number(&name("there")),
        ..by_hand.clone()
    };
    assert_eq!(
        steps(&[], &[added(), by_hand.clone(), of_another]),
        ["remove web"]
    );
    // Its place is another's at once.
    let mut other = declared();
    other.name = name("other");
    other.new.cgroup = "/c/other".into();
    let place = Place::There {
        path: "/c/other".into(),
        id: 3,
    };
    assert_eq!(
        steps(&[(other, place)], &[added(), by_hand]),
        ["remove web", "add other to 3"]
    );
}

#[test]
fn a_policy_is_changed_and_what_cannot_be_is_kept_and_told() {
    let mut asked = declared();
    asked.new.policy.cloud_metadata = true;
    let declared_now = [(asked.clone(), there(1))];
    assert_eq!(steps(&declared_now, &[added()]), ["policy web"]);
    let unreadable = Standing {
        policy: None,
        ..added()
    };
    assert_eq!(steps(&declared_now, &[unreadable]), ["policy web"]);
    let dying = Standing {
        state: State::Dying,
        ..added()
    };
    assert_eq!(
        steps(&[(asked, Place::Absent)], &[dying]),
        ["policy web", "await web"]
    );

    let rows: [(Change, &str); 10] = [
        (|one| one.name = name("old"), "(name)"),
        (|one| one.cgroup = "/c/old".into(), "(cgroup)"),
        (|one| one.addresses.truncate(1), "(addresses)"),
        (|one| one.addresses.swap(0, 1), "(addresses)"),
        (
            |one| one.addresses[1] = "10.2.0.1".parse().unwrap(),
            "(addresses)",
        ),
        (|one| one.interface = "dummy0".to_owned(), "(interface)"),
        (|one| one.tcp_only = true, "(tcp_only)"),
        (
            |one| one.allowed.other_protocols = true,
            "(allow_other_protocols)",
        ),
        (|one| one.allowed.loopback = true, "(allow_loopback)"),
        (
            |one| one.allowed.host_services = true,
            "(allow_host_services)",
        ),
    ];
    for (change, words) in rows {
        let mut standing = added();
        change(&mut standing);
        let told = steps(&[(declared(), there(1))], &[standing]);
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].starts_with("tell web: "), "{told:?}");
        assert!(
            told[0].contains(words) && told[0].contains("is there"),
            "{told:?}"
        );
    }
    // The policy is the one thing that can be changed, whatever else differs.
    let other = Standing {
        tcp_only: true,
        ..added()
    };
    let told = steps(&declared_now, &[other]);
    assert_eq!(told[0], "policy web");
    assert!(told[1].contains("(tcp_only)"), "{told:?}");
}

#[test]
fn one_that_was_added_by_hand_is_left_alone() {
    let by_hand = Standing {
        declared_by: 0,
        ..added()
    };
    let as_declared = [(declared(), there(1))];
    assert_eq!(steps(&as_declared, slice::from_ref(&by_hand)), [""; 0]);
    assert_eq!(steps(&[], slice::from_ref(&by_hand)), [""; 0]);
    let mut other = by_hand.clone();
    other.policy = None;
    other.addresses.truncate(1);
    let told = steps(&as_declared, &[other]);
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(
        told[0].contains("by a command or another daemon"),
        "{told:?}"
    );
    assert!(told[0].contains("(addresses, policy)"), "{told:?}");
    // Its name, at another cgroup.
    let elsewhere = Standing {
        cgroup: "/c/hand".into(),
        cgroup_id: 7,
        ..by_hand
    };
    let told = steps(&[(declared(), Place::Absent)], &[elsewhere]);
    assert!(told[0].contains("(cgroup)"), "{told:?}");
}
