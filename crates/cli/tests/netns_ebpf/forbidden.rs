//! Hosts that forbid eBPF: pools that leave the choice get `nft`, and the doctor says why.

use std::{collections::BTreeMap, env, process::Command, thread};

use sandwire_testlab::{lab, sandwire};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};
use serde_json::{Value, json};

use crate::{
    assert_in_touch,
    ebpf::{World, prefixes},
};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn where_ebpf_is_forbidden_auto_is_nft_and_the_doctor_says_why() {
    lab::run(|lab| {
        let world = without_bpf(|| World::without_pools(lab));
        let [ipv4, ipv6] = prefixes(0);
        let spec = json!({
            "name": "web",
            "data_path": "auto",
            "size": 1,
            "addresses": {"plan": "prefix", "ipv4": ipv4, "ipv6": ipv6},
        });
        world.daemon.create_pool(&spec).unwrap();
        let made = world.daemon.call("GET", "/v1/pools/web", None).unwrap();
        assert_eq!(made["spec"]["data_path"], "nft", "{made}");
        let (lease, guest) = world.guest("web", "a");
        assert_in_touch(&lease, &guest);
        assert_eq!(world.detail(&lease)["data_path"], "nft");
        let log = world.daemon.log();
        assert!(log.contains("the pool uses nft"), "{log}");

        let output = without_bpf(|| world.daemon.output("--json doctor").unwrap());
        assert_doctor_says(&output.stdout, "seccomp");
        // Another way to forbid it. Namespaces are then out of reach as well.
        let output = Command::new("setpriv")
            .args(["--bounding-set=-bpf,-perfmon,-sys_admin", "--inh-caps=-all"])
            .arg(sandwire::executable().unwrap())
            .args(["doctor", "--json"])
            .output()
            .unwrap();
        assert_doctor_says(&output.stdout, "this process lacks CAP_BPF, CAP_PERFMON");

        // One that insists is refused, and nothing else.
        let mut insists = spec.clone();
        insists["name"] = json!("insists");
        let [ipv4, ipv6] = prefixes(1);
        insists["addresses"] = json!({"plan": "prefix", "ipv4": ipv4, "ipv6": ipv6});
        insists["data_path"] = json!("ebpf");
        let refused = world
            .daemon
            .http("POST", "/v1/pools", Some(&insists))
            .unwrap();
        assert!(
            refused.status >= 400 && refused.body.contains("forbidden"),
            "{}: {}",
            refused.status,
            refused.body
        );
        assert_in_touch(&lease, &guest);
    });
}

/// Runs something whose processes may not call `bpf`, as a container's profile says.
fn without_bpf<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let filter = SeccompFilter::new(
        BTreeMap::from([(libc::SYS_bpf, Vec::new())]),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM.unsigned_abs()),
        env::consts::ARCH.try_into().unwrap(),
    );
    let program: BpfProgram = filter.unwrap().try_into().unwrap();
    thread::scope(|scope| {
        let confined = scope.spawn(move || {
            apply_filter(&program).unwrap();
            work()
        });
        confined.join().unwrap()
    })
}

#[track_caller]
fn assert_doctor_says(report: &[u8], reason: &str) {
    let report: Value = serde_json::from_slice(report).unwrap();
    let findings = report["findings"].as_array().unwrap();
    let named = |finding: &&Value| finding["name"] == "programs load";
    let finding = findings.iter().find(named).unwrap();
    assert_eq!(finding["found"], json!(false), "{finding}");
    for (key, words) in [("detail", reason), ("used_instead", "the data path nft")] {
        let text = finding[key].as_str().unwrap();
        assert!(text.contains(words), "{finding}");
    }
}
