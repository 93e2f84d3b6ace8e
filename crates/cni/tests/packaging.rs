//! What is written for people, taken by its word: networks in the guide and the packages are accepted by the plugin itself,
//! and the manifests hang together.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{collections::BTreeSet, fs, path::Path};

use sandwire_cni::{Environment, Install, PLUGIN_NAME, Placed, understand};
use serde_json::{Value, json};

fn read(path: &str) -> String {
    let full = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path);
    fs::read_to_string(&full).unwrap_or_else(|error| panic!("{}: {error}", full.display()))
}

/// Has the plugin understand each of its configurations in a list, as a runtime derives them. Returns how many there are.
fn accept(conflist: &Value) -> usize {
    let name = conflist["name"].as_str().unwrap();
    let newest = json!([conflist["cniVersion"]]);
    let versions = conflist.get("cniVersions").unwrap_or(&newest);
    let plugins = conflist["plugins"].as_array().unwrap();
    let mut accepted = 0;
    for version in versions.as_array().unwrap() {
        for (place, plugin) in plugins.iter().enumerate() {
            if plugin["type"] != PLUGIN_NAME {
                continue;
            }
            let mut config = plugin.clone();
            config["cniVersion"] = version.clone();
            config["name"] = name.into();
            if place > 0 {
                config["prevResult"] = json!({ "interfaces": [], "ips": [] });
            }
            let environment = Environment {
                command: Some("ADD".into()),
                container_id: Some("c1".into()),
                netns: Some("/run/netns/blue".into()),
                interface: Some("eth0".into()),
                arguments: None,
            };
            understand(&environment, config.to_string().as_bytes())
                .unwrap_or_else(|error| panic!("{config}: {error}"));
            accepted += 1;
        }
    }
    accepted
}

#[test]
fn every_network_of_the_guide_is_accepted() {
    let guide = read("docs/cni.md");
    let blocks = guide.split("```json\n").skip(1);
    let blocks = blocks.map(|rest| rest.split("```").next().unwrap());
    let accepted: usize = blocks
        .map(|block| accept(&serde_json::from_str(block).unwrap()))
        .sum();
    assert_eq!(accepted, 2);
}

#[test]
fn the_example_is_accepted_and_is_what_the_manifests_have() {
    let example: Value = serde_json::from_str(&read("packaging/cni/10-sandwire.conflist")).unwrap();
    assert_eq!(accept(&example), 3);
    let config = find(&manifests(), "ConfigMap");
    let data = config["data"].as_object().unwrap();
    assert_eq!(data.len(), 1);
    let text = data["10-sandwire.conflist"].as_str().unwrap();
    assert_eq!(serde_json::from_str::<Value>(text).unwrap(), example);
}

fn manifests() -> Vec<Value> {
    let text = read("packaging/kubernetes/sandwire.yaml");
    serde_yaml_ng::Deserializer::from_str(&text)
        .map(|document| serde::Deserialize::deserialize(document).unwrap())
        .collect()
}

fn find(manifests: &[Value], kind: &str) -> Value {
    let found = manifests.iter().find(|document| document["kind"] == kind);
    found
        .unwrap_or_else(|| panic!("there is no {kind}"))
        .clone()
}

#[test]
fn the_manifests_hang_together() {
    let all = manifests();
    let kinds: Vec<(&str, &str)> = all
        .iter()
        .map(|document| {
            (
                document["apiVersion"].as_str().unwrap(),
                document["kind"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        kinds,
        [
            ("v1", "Namespace"),
            ("v1", "ConfigMap"),
            ("apps/v1", "DaemonSet")
        ]
    );
    let namespace = &all[0]["metadata"]["name"];
    for document in &all[1..] {
        assert_eq!(&document["metadata"]["namespace"], namespace);
    }
    let spec = find(&all, "DaemonSet")["spec"].clone();
    let labels = &spec["template"]["metadata"]["labels"];
    assert_eq!(&spec["selector"]["matchLabels"], labels);
    let pod = &spec["template"]["spec"];
    assert_eq!(
        (&pod["hostNetwork"], &pod["hostPID"]),
        (&json!(true), &json!(true))
    );

    let volumes: BTreeSet<&str> = names(&pod["volumes"]);
    let mut mounted = BTreeSet::new();
    for container in containers(pod) {
        mounted.extend(names(&container["volumeMounts"]));
    }
    assert_eq!(mounted, volumes);
    let config_map = pod["volumes"].as_array().unwrap().iter();
    let config_map = config_map.filter_map(|volume| volume["configMap"]["name"].as_str());
    assert_eq!(
        config_map.collect::<Vec<_>>(),
        [all[1]["metadata"]["name"].as_str().unwrap()]
    );
}

fn containers(pod: &Value) -> impl Iterator<Item = &Value> {
    let of = |key: &str| pod[key].as_array().unwrap().iter();
    of("initContainers").chain(of("containers"))
}

fn names(list: &Value) -> BTreeSet<&str> {
    let list = list.as_array().unwrap().iter();
    list.map(|entry| entry["name"].as_str().unwrap()).collect()
}

#[test]
fn what_the_manifests_start_exists_and_finds_its_files() {
    let verbs = read("docs/cli.md");
    let section = verbs.split("## `sandwire cni install`").nth(1).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let spec = find(&manifests(), "DaemonSet")["spec"]["template"]["spec"].clone();
    let install = &spec["initContainers"][0];
    let words = |key: &str| -> Vec<String> {
        let list = install[key].as_array().unwrap().iter();
        list.map(|word| word.as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(words("command")[..3], ["sandwire", "cni", "install"]);
    let places: Vec<&str> = install["volumeMounts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|mount| mount["mountPath"].as_str().unwrap())
        .collect();
    for word in words("command").iter().skip(3).chain(&words("args")) {
        let (flag, value) = word.split_once('=').unwrap_or((word, ""));
        assert!(
            section.contains(&format!("`{flag}")),
            "{flag} is no flag of install"
        );
        let is_mounted = places.iter().any(|place| value.starts_with(place));
        assert!(value.is_empty() || is_mounted, "{value} is nowhere");
    }
    let daemon = &spec["containers"][0];
    let socket = Path::new(sandwire_api::DEFAULT_SOCKET);
    let mounts = daemon["volumeMounts"].as_array().unwrap();
    let holds = |path: &Path| {
        let mut all = mounts.iter();
        all.any(|mount| path.starts_with(mount["mountPath"].as_str().unwrap()))
    };
    assert!(holds(socket) && holds(Path::new("/run/netns")) && holds(Path::new("/sys/fs/bpf")));
    let probe = &daemon["readinessProbe"]["exec"]["command"];
    assert_eq!(probe, &json!(["sandwire", "health"]));
    assert!(verbs.contains("## `sandwire health`"));
    assert_eq!(daemon["command"][3], "/etc/sandwire/sandwire.toml");
    assert!(holds(Path::new("/etc/sandwire/sandwire.toml")));
}

/// As under systemd: requests that run when it stops get ten seconds.
#[test]
fn the_daemon_has_as_long_to_stop_as_its_unit_gives_it() {
    let unit = read("packaging/systemd/sandwire.service");
    let (_, seconds) = unit.split_once("\nTimeoutStopSec=").unwrap();
    let seconds: u64 = seconds.lines().next().unwrap().parse().unwrap();
    let spec = find(&manifests(), "DaemonSet")["spec"]["template"]["spec"].clone();
    assert_eq!(spec["terminationGracePeriodSeconds"], seconds);
}

/// What the daemon mounts has to be there for the node too: it names namespaces, and the file system of its pins outlives
/// its container.
#[test]
fn what_the_daemon_mounts_reaches_the_node() {
    let spec = find(&manifests(), "DaemonSet")["spec"]["template"]["spec"].clone();
    let daemon = &spec["containers"][0];
    let mounts = daemon["volumeMounts"].as_array().unwrap();
    // /var/run is a link to /run in most images, so that the second mount hides the first.
    for path in ["/run/netns", "/var/run/netns", "/sys/fs/bpf"] {
        let mount = mounts.iter().find(|mount| mount["mountPath"] == path);
        let mount = mount.unwrap_or_else(|| panic!("{path} is not mounted"));
        assert_eq!(mount["mountPropagation"], "Bidirectional", "{path}");
    }
    // Only those who are may propagate anything.
    assert_eq!(daemon["securityContext"]["privileged"], true);
}

#[test]
fn names_are_the_same_in_manifests_and_guide() {
    let guide = read("docs/cni.md");
    let all = manifests();
    let spec = find(&all, "DaemonSet");
    let pod = &spec["spec"]["template"]["spec"];
    for container in containers(pod) {
        let image = container["image"].as_str().unwrap();
        assert!(
            guide.contains(&format!("`{image}`")),
            "the guide doesn't name {image}"
        );
    }
    for name in [
        format!("DaemonSet `{}`", spec["metadata"]["name"].as_str().unwrap()),
        format!(
            "a namespace `{}`",
            all[0]["metadata"]["name"].as_str().unwrap()
        ),
        "`/etc/sandwire/sandwire.toml`".to_owned(),
        "name = \"containers\"".to_owned(),
    ] {
        assert!(guide.contains(&name), "the guide doesn't say {name}");
    }
}

#[test]
fn installing_puts_a_link_and_an_example_and_leaves_a_network_alone() {
    let folder = tempfile::tempdir().unwrap();
    let mut wanted = Install {
        bin_dir: folder.path().join("opt/cni/bin"),
        conf_dir: folder.path().join("etc/cni/net.d"),
        copy: false,
        conflist: None,
    };
    let own = std::env::current_exe().unwrap();
    let first = sandwire_cni::install(&wanted).unwrap();
    assert_eq!(
        (first.plugin_was_there, first.placed),
        (false, Placed::Example)
    );
    assert_eq!(
        fs::read_link(wanted.bin_dir.join(PLUGIN_NAME)).unwrap(),
        own
    );
    fs::write(&first.conflist, "{}").unwrap();
    let second = sandwire_cni::install(&wanted).unwrap();
    assert_eq!(
        (second.plugin_was_there, second.placed),
        (true, Placed::Kept)
    );
    assert_eq!(fs::read_to_string(&first.conflist).unwrap(), "{}");

    let given = folder.path().join("10-sandwire.conflist");
    fs::write(&given, "[]").unwrap();
    wanted.copy = true;
    wanted.conflist = Some(given);
    let third = sandwire_cni::install(&wanted).unwrap();
    assert_eq!(
        (third.plugin_was_there, third.placed),
        (false, Placed::Given)
    );
    assert_eq!(fs::read_to_string(&third.conflist).unwrap(), "[]");
    let copy = fs::symlink_metadata(&third.plugin).unwrap();
    assert_eq!(
        (copy.is_file(), copy.len()),
        (true, own.metadata().unwrap().len())
    );
    let left = |path: &Path| fs::read_dir(path).unwrap().count();
    assert_eq!((left(&wanted.bin_dir), left(&wanted.conf_dir)), (1, 1));
}

#[test]
fn a_folder_that_can_not_be_made_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let wanted = Install {
        bin_dir: file.join("bin"),
        conf_dir: folder.path().to_owned(),
        copy: false,
        conflist: None,
    };
    let error = sandwire_cni::install(&wanted).unwrap_err().to_string();
    assert!(
        error.contains("cannot make the folder") && error.contains("file/bin"),
        "{error}"
    );
}
