use std::time::Duration;

use sandwire_api::{attach::AttachedDevice, lease::LeaseState};

use super::*;
use crate::{
    attach::{AttachRecord, ParentRecord},
    lease::LeaseKey,
    pool::Rest,
};

const NUMBER: SlotNumber = SlotNumber(3);

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn plan() -> Plan {
    let spec = serde_json::from_str(
        r#"{"name": "web", "data_path": "nft", "addresses": {"plan": "prefix", "ipv4": "10.64.0.0/24"},
            "guest": {"ipv6": ""}}"#,
    );
    Plan::new(&name("default"), &spec.unwrap()).unwrap()
}

fn lease(state: LeaseState) -> LeaseRecord {
    LeaseRecord {
        key: LeaseKey {
            owner_uid: 0,
            name: name("a"),
        },
        pool: name("web"),
        slot: NUMBER,
        state,
        acquired_at: 0,
        expiry: None,
        policy: None,
        is_process: false,
        channel: None,
        attach: None,
    }
}

fn released(is_torn_down: bool) -> ReleasedSlot {
    ReleasedSlot {
        pool: name("web"),
        slot: NUMBER,
        rest: Rest {
            tenant: lease(LeaseState::Active).key,
            until: Duration::ZERO,
        },
        is_torn_down,
    }
}

/// What the kernel can have of slot 3 of pool web.
#[derive(Clone, Copy, Debug)]
enum Found {
    Nothing,
    Complete,
    OnlyNamespace,
    OnlyInterface,
}

const ALL_FOUND: [Found; 4] = [
    Found::Nothing,
    Found::Complete,
    Found::OnlyNamespace,
    Found::OnlyInterface,
];

fn inventory(found: Found) -> Inventory {
    let [interface, namespace] = objects_of(&name("default"), "web", NUMBER);
    let mut inventory = Inventory::default();
    match found {
        Found::Nothing => {}
        Found::Complete => inventory.slots.push(("web".to_owned(), NUMBER.0)),
        Found::OnlyNamespace => inventory.leftovers.push(namespace),
        Found::OnlyInterface => inventory.leftovers.push(interface),
    }
    inventory
}

fn decide_with_pool(
    leases: &[LeaseRecord],
    released: &[ReleasedSlot],
    inventory: &Inventory,
) -> Actions {
    let plan = plan();
    let plans = BTreeMap::from([(name("web"), &plan)]);
    decide(&name("default"), &plans, leases, released, inventory)
}

fn slot() -> Vec<SlotKey> {
    vec![(name("web"), NUMBER)]
}

#[test]
fn a_leased_slot_is_kept_whatever_else_is_said_of_it() {
    for state in [LeaseState::Active, LeaseState::Releasing] {
        for others in [vec![], vec![released(false)], vec![released(true)]] {
            for found in ALL_FOUND {
                let actions = decide_with_pool(&[lease(state)], &others, &inventory(found));
                let mut expected = Actions {
                    keep: slot(),
                    ..Actions::default()
                };
                match found {
                    Found::Complete => {}
                    Found::Nothing => expected.rebuild = slot(),
                    Found::OnlyNamespace | Found::OnlyInterface => expected.repair = slot(),
                }
                assert_eq!(actions, expected, "{found:?}, {others:?}");
            }
        }
    }
}

#[test]
fn a_released_slot_is_torn_down_unless_that_is_done() {
    for is_torn_down in [false, true] {
        for found in ALL_FOUND {
            let actions = decide_with_pool(&[], &[released(is_torn_down)], &inventory(found));
            let mut expected = Actions::default();
            match (is_torn_down, found) {
                (true, Found::Nothing) => expected.rest = slot(),
                _ => expected.tear_down = slot(),
            }
            assert_eq!(actions, expected, "{found:?}, torn down: {is_torn_down}");
        }
    }
}

#[test]
fn a_slot_without_an_entry_is_adopted_if_complete() {
    for found in ALL_FOUND {
        let mut expected = Actions::default();
        match found {
            Found::Nothing => {}
            Found::Complete => expected.adopt = slot(),
            Found::OnlyNamespace | Found::OnlyInterface => expected.tear_down = slot(),
        }
        assert_eq!(
            decide_with_pool(&[], &[], &inventory(found)),
            expected,
            "{found:?}"
        );
    }
}

#[test]
fn both_pieces_of_a_slot_are_one_slot_to_tear_down() {
    let leftovers = objects_of(&name("default"), "web", NUMBER).to_vec();
    let inventory = Inventory {
        leftovers,
        ..Inventory::default()
    };
    let expected = Actions {
        tear_down: slot(),
        ..Actions::default()
    };
    assert_eq!(decide_with_pool(&[], &[], &inventory), expected);
}

#[test]
fn without_its_pool_everything_is_reclaimed() {
    for found in ALL_FOUND {
        let inventory = inventory(found);
        let actions = decide(&name("default"), &BTreeMap::new(), &[], &[], &inventory);
        let reclaim = match found {
            Found::Complete => objects_of(&name("default"), "web", NUMBER).to_vec(),
            _ => inventory.leftovers,
        };
        let expected = Actions {
            reclaim,
            ..Actions::default()
        };
        assert_eq!(actions, expected, "{found:?}");
    }
}

#[test]
fn numbers_beyond_the_pool_and_names_of_another_form_are_reclaimed() {
    let leftovers = vec![
        Leftover::Namespace("sandwire.default.web.5000".to_owned()),
        Leftover::Namespace("sandwire.default.web.x".to_owned()),
        Leftover::Interface("swzzzzzz-3".to_owned()),
    ];
    let inventory = Inventory {
        slots: vec![("web".to_owned(), 5000)],
        leftovers: leftovers.clone(),
    };
    let actions = decide_with_pool(&[], &[], &inventory);
    let beyond = objects_of(&name("default"), "web", SlotNumber(5000));
    assert_eq!(
        actions.reclaim,
        [beyond.as_slice(), leftovers.as_slice()].concat()
    );
    assert_eq!((actions.adopt, actions.tear_down), (vec![], vec![]));
}

#[test]
fn a_child_that_no_lease_has_is_reclaimed_wherever_it_is() {
    let child = Leftover::Child(names::host_alias("default", "web", NUMBER));
    let stranger = Leftover::Child("sandwire:other:web:3".to_owned());
    let inventory = Inventory {
        leftovers: vec![child.clone(), stranger.clone()],
        ..Inventory::default()
    };
    let plan = plan();
    let plans = BTreeMap::from([(name("web"), &plan)]);
    let decided =
        |leases: &[LeaseRecord]| decide(&name("default"), &plans, leases, &[], &inventory).reclaim;
    assert_eq!(decided(&[]), [child, stranger.clone()]);
    assert_eq!(decided(&[lease(LeaseState::Active)]), [stranger]);
}

#[test]
fn a_leased_child_is_not_built_again_because_the_host_has_nothing_of_it() {
    let mut leased = lease(LeaseState::Active);
    leased.attach = Some(AttachRecord {
        request: serde_json::from_str(r#"{"netns": "/run/netns/blue"}"#).unwrap(),
        netns_cookie: None,
        device: AttachedDevice::Macvlan,
        device_reason: None,
        parent: Some(ParentRecord {
            interface: "eth1".parse().unwrap(),
            mac: None,
            gateways: Vec::new(),
            subnets: Vec::new(),
            namespace: 0,
        }),
        has_mac_of_all: false,
        is_done: true,
    });
    let plan = plan();
    let plans = BTreeMap::from([(name("web"), &plan)]);
    let inventory = inventory(Found::Nothing);
    let actions = decide(&name("default"), &plans, &[leased], &[], &inventory);
    let kept = Actions {
        keep: vec![(name("web"), NUMBER)],
        ..Actions::default()
    };
    assert_eq!(actions, kept);
}
