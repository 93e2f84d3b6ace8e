//! Two containers, blue and red, that may talk to each other, and what is to hold of sandboxes after they have talked.

use sandwire_testlab::{lab::Lab, namespace::Namespace};
use serde_json::{Value, json};

use crate::{
    ebpf::{World, addresses_of, pool},
    protocols::Place,
};

/// The policy of sandboxes of a pool that talk to each other.
pub(crate) fn together() -> Value {
    json!({"uplink": "route", "clone_to_clone": true})
}

/// Both, under a policy, and red's addresses.
pub(crate) fn two(lab: &Lab, world: &World, policy: &Value) -> ([Namespace; 2], Vec<String>) {
    let mut spec = pool("boxes", "container", 0, 2, policy);
    spec["device"] = json!("veth");
    world.daemon.create_pool(&spec).unwrap();
    world.route_back(0);
    let spaces = ["blue", "red"].map(|name| lab.namespace(name));
    let leases = ["blue", "red"].map(|name| {
        let line = format!("acquire boxes {name} --netns {name}");
        world.daemon.json(&line).unwrap()
    });
    (spaces, addresses_of(&leases[1]))
}

pub(crate) fn places(spaces: &[Namespace; 2]) -> [Place; 2] {
    spaces
        .each_ref()
        .map(|space| Place::namespace(&space.path()))
}

/// Nothing was dropped but what kernels say of groups that they listen to.
#[track_caller]
pub(crate) fn assert_no_drops(world: &World, names: &[&str]) {
    for name in names {
        let path = format!("/v1/leases/{name}");
        let lease = world.daemon.call("GET", &path, None).unwrap();
        let drops = lease["traffic"]["drops"].as_object().unwrap();
        let all_known = drops.keys().all(|reason| reason == "link_chatter");
        assert!(all_known, "{name}: {drops:?}");
    }
}
