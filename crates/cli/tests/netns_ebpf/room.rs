//! What is said where the data path has no room for more: what is full, and what to do.

use sandwire_testlab::{http::Answer, lab};
use serde_json::{Value, json};

use crate::ebpf::{SECOND, World, pool, wait_until};

/// The least that there may be; one entry is nobody's.
const NICS_MAX: u64 = 64;
const NICS_FULL: &str = "the map nics is full (64 entries): raise nics_max in the daemon's configuration and restart it, or \
     make pools smaller and release leases";
/// Twice as many policies, one of which is nobody's too.
const POLICIES: usize = 127;
const POLICIES_FULL: &str = "the map policies is full (128 entries): have leases and pools share policies, which are kept \
     once, or raise nics_max";

/// An empty pool whose policy no other pool has.
fn empty_pool(number: usize) -> Value {
    let deny = json!({"action": "deny", "prefixes": [format!("198.51.{number}.0/24")]});
    let policy = json!({"uplink": "route", "egress": {"rules": [deny]}});
    pool(&format!("empty-{number}"), "host", number, 0, &policy)
}

fn create(world: &World, spec: &Value) -> Answer {
    world.daemon.http("POST", "/v1/pools", Some(spec)).unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_full_data_path_says_what_to_do() {
    lab::run_within(300 * SECOND, |lab| {
        let world = World::with_config(lab, &format!("nics_max = {NICS_MAX}"));
        // One policy is its own.
        for number in 1..POLICIES {
            let answer = create(&world, &empty_pool(number));
            assert_eq!(answer.status, 201, "{number}: {}", answer.body);
        }
        let large = pool("large", "host", 0, 70, &json!({"uplink": "route"}));
        assert_eq!(create(&world, &large).status, 201);
        let found = || world.daemon.call("GET", "/v1/pools/large", None).unwrap();
        wait_until("it has all that there is", 60 * SECOND, || {
            found()["slots"]["ready"] == NICS_MAX - 1
        });
        wait_until("it says why it has no more", 10 * SECOND, || {
            let error = found()["last_error"]
                .as_str()
                .unwrap_or_default()
                .to_owned();
            error.contains(NICS_FULL)
        });

        let answer = create(&world, &empty_pool(POLICIES));
        assert_eq!(answer.status, 409, "{}", answer.body);
        let error: Value = answer.json().unwrap();
        assert_eq!(error["code"], "conflict");
        let text = error["message"].as_str().unwrap();
        assert!(text.contains(POLICIES_FULL), "{text}");
        let gone = world.daemon.http("GET", "/v1/pools/empty-127", None);
        assert_eq!(gone.unwrap().status, 404, "nothing has changed");

        let lease = world.daemon.acquire("large", "one").unwrap();
        let own = json!({"uplink": "deny"}).to_string();
        let path = format!("{}/own.json", lab.folder().display());
        std::fs::write(&path, own).unwrap();
        let refused = world
            .daemon
            .output(&format!("policy set {} --file {path}", lease.name))
            .unwrap();
        let text = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(1), "{text}");
        assert!(text.contains(POLICIES_FULL), "{text}");
        assert_eq!(world.detail(&lease)["defects"], json!([]));
        // There is room again a second after another is gone.
        world
            .daemon
            .call("DELETE", "/v1/pools/empty-1", None)
            .unwrap();
        wait_until("there is room for it", 20 * SECOND, || {
            world
                .daemon
                .set_policy(&lease.name, &json!({"uplink": "deny"}))
                .is_ok()
        });
    });
}
