//! The image on a node of Kubernetes as far as podman can play one: what the manifest's DaemonSet starts, with its commands,
//! mounts and namespaces, and with the configuration that `docs/cni.md` has for a node.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{
    fs::{self, Permissions},
    io::Write,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use sandwire_testlab::{
    command as tools,
    host::Beyond,
    lab::{self, Lab},
    podman::Podman,
    sandwire,
};

use super::*;

const MINUTE: Duration = Duration::from_secs(60);

/// A pod's template, and what plays its node.
struct Node<'a> {
    lab: &'a Lab,
    podman: Podman,
    pod: Value,
}

fn read(path: &str) -> String {
    fs::read_to_string(workspace::root().join(path)).unwrap()
}

fn pod() -> Value {
    let text = read("packaging/kubernetes/sandwire.yaml");
    let documents = serde_yaml_ng::Deserializer::from_str(&text);
    let mut documents =
        documents.map(|one| <Value as serde::Deserialize>::deserialize(one).unwrap());
    let set = documents.find(|one| one["kind"] == "DaemonSet").unwrap();
    set["spec"]["template"]["spec"].clone()
}

/// The first block of a document that has such a line.
fn block_with(document: &str, line: &str) -> String {
    let text = read(document);
    let blocks = text.split("```").skip(1).step_by(2);
    let block = blocks.map(|block| block.split_once('\n').unwrap().1);
    let mut having = block.filter(|block| block.lines().any(|one| one == line));
    having.next().unwrap().to_owned()
}

fn words(list: &Value) -> Vec<&str> {
    let list = list.as_array().into_iter().flatten();
    list.map(|word| word.as_str().unwrap()).collect()
}

impl<'a> Node<'a> {
    fn start(lab: &'a Lab) -> Self {
        // As on a host with systemd, and as mounts of a container that are to be seen by the node need it.
        lab.run("mount --make-shared /sys/fs/bpf");
        let node = Self {
            lab,
            podman: Podman::prepare(lab).unwrap(),
            pod: pod(),
        };
        let configuration = node.path("/etc/sandwire");
        fs::create_dir_all(&configuration).unwrap();
        let text = block_with("docs/cni.md", "kind = \"container\"");
        fs::write(configuration.join("sandwire.toml"), text).unwrap();
        node
    }

    /// A path of the node: what isn't the lab's own is in its folder.
    fn path(&self, path: &str) -> PathBuf {
        if path.starts_with("/run/") || path.starts_with("/sys/") {
            return PathBuf::from(path);
        }
        self.lab.folder().join("node").join(&path[1..])
    }

    fn load_image(&self) {
        let executable = self.lab.folder().join("sandwire");
        fs::write(&executable, sandwire::stripped(self.lab.folder()).unwrap()).unwrap();
        fs::set_permissions(&executable, Permissions::from_mode(0o755)).unwrap();
        let name = self.pod["containers"][0]["image"].as_str().unwrap();
        let image = build(&executable, name, self.lab.folder()).unwrap();
        let said = self
            .podman
            .run(&format!("load --input {}", image.display()));
        assert!(said.unwrap().contains(name));
    }

    /// What podman is told of a container so that it is as the kubelet would start it, but for `hostPID`, which podman has with
    /// cgroups only: runtimes that name namespaces by processes need it, and this one has a name.
    fn flags(&self, container: &Value) -> Vec<String> {
        let mut flags: Vec<String> = ["--cgroups=disabled", "--security-opt=seccomp=unconfined"]
            .map(str::to_owned)
            .into();
        if self.pod["hostNetwork"] == true {
            flags.push("--network=host".into());
        }
        if container["securityContext"]["privileged"] == true {
            flags.push("--privileged".into());
        }
        for mount in container["volumeMounts"].as_array().unwrap() {
            flags.push(format!("--volume={}", self.volume(mount)));
        }
        let command = Value::to_string(&container["command"]);
        flags.push(format!("--entrypoint={command}"));
        flags
    }

    fn volume(&self, mount: &Value) -> String {
        let volumes = self.pod["volumes"].as_array().unwrap();
        let volume = volumes
            .iter()
            .find(|volume| volume["name"] == mount["name"]);
        let source = match volume.unwrap()["hostPath"]["path"].as_str() {
            Some(path) => self.path(path),
            None => workspace::root().join("packaging/cni"),
        };
        fs::create_dir_all(&source).unwrap();
        let inside = mount["mountPath"].as_str().unwrap();
        let mode = match (&mount["readOnly"], &mount["mountPropagation"]) {
            (Value::Bool(true), _) => "ro",
            (_, Value::String(how)) if how == "Bidirectional" => "rshared",
            _ => "rw",
        };
        format!("{}:{inside}:{mode}", source.display())
    }

    /// Runs a container of the pod, to its end or in the background.
    fn run(&self, container: &Value, how: &str) {
        let mut command = self.podman.command(&format!("run {how}"));
        command.args(self.flags(container));
        command.arg(container["image"].as_str().unwrap());
        command.args(words(&container["args"]));
        tools::output_of(&mut command).unwrap_or_else(|error| panic!("{error:#}"));
    }

    fn start_daemon(&self) {
        let daemon = &self.pod["containers"][0];
        self.run(daemon, "--detach --name daemon");
        let probe = words(&daemon["readinessProbe"]["exec"]["command"]).join(" ");
        let deadline = Instant::now() + MINUTE;
        loop {
            let asked = self.podman.output(&format!("exec daemon {probe}")).unwrap();
            if asked.status.success() {
                return;
            }
            let said = String::from_utf8_lossy(&asked.stderr).into_owned();
            assert!(Instant::now() < deadline, "the daemon isn't ready: {said}");
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn leases(&self) -> usize {
        let listed = self.podman.run("exec daemon sandwire --json list").unwrap();
        let listed: Value = serde_json::from_str(&listed).unwrap();
        listed.as_array().unwrap().len()
    }

    /// Calls the plugin that was installed on the node with what was installed for it.
    fn plugin(&self, verb: &str) -> String {
        let conflist = self.path("/etc/cni/net.d").join("10-sandwire.conflist");
        let list: Value = serde_json::from_str(&fs::read_to_string(conflist).unwrap()).unwrap();
        let mut network = list["plugins"][0].clone();
        network["name"] = list["name"].clone();
        network["cniVersion"] = list["cniVersion"].clone();
        let plugin = self
            .path("/opt/cni/bin")
            .join(network["type"].as_str().unwrap());
        let mut child = Command::new(plugin)
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", "pod")
            .env("CNI_NETNS", "/run/netns/pod")
            .env("CNI_IFNAME", "eth0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        input.write_all(network.to_string().as_bytes()).unwrap();
        drop(input);
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{verb}: {said}");
        said
    }
}

#[test]
#[ignore = "needs root and podman: cargo xtask test container"]
fn the_manifests_containers_give_a_pod_its_network_and_may_be_replaced() {
    lab::run_within(5 * MINUTE, |lab| {
        let _beyond = Beyond::attach().unwrap();
        let node = Node::start(lab);
        node.load_image();
        let name = node.pod["containers"][0]["image"].as_str().unwrap();
        let asked = format!("run --rm --cgroups=disabled {name} --version");
        let version = node.podman.run(&asked);
        assert_eq!(version.unwrap().trim(), name.replace(':', " "));

        node.run(&node.pod["initContainers"][0], "--rm");
        node.start_daemon();
        let _namespace = lab.namespace("pod");
        node.plugin("ADD");
        let shown = lab.run("ip -n pod -j -4 address show dev eth0");
        let shown: Value = serde_json::from_str(&shown).unwrap();
        let address = shown[0]["addr_info"][0]["local"].as_str().unwrap();
        assert!(address.starts_with("10.244.3."), "{shown}");
        lab.run(&format!("ping -c 1 -W 20 {address}"));

        // By SIGKILL.
        node.podman.run("rm --force --time 0 daemon").unwrap();
        lab.run(&format!("ping -c 1 -W 20 {address}"));
        node.start_daemon();
        assert_eq!(node.leases(), 1);
        lab.run(&format!("ping -c 1 -W 20 {address}"));
        node.plugin("DEL");
        assert_eq!(node.leases(), 0);
        assert_eq!(lab.run("ip -n pod -o link show").lines().count(), 1);
        node.podman.run("stop --time 10 daemon").unwrap();
    });
}
