//! Identities that the daemon's configuration has.

use std::{fs, path::PathBuf};

use super::*;

/// A cgroup inside another, as a service's in its slice.
struct Inner(PathBuf);

impl Inner {
    fn make(&self) {
        fs::create_dir(&self.0).unwrap();
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// What a socket of a cgroup sees: its source, and how TCP to a port of the host where nobody listens ends.
fn seen(lab: &Lab, cgroup: &str) -> String {
    const SEE: &str = "import socket
s = socket.socket(type=socket.SOCK_DGRAM)
try:
    socket.create_connection((\"192.0.2.1\", 9))
except OSError as error:
    print(error.strerror, end=\" \")
try:
    s.connect((\"192.0.2.1\", 9))
    print(s.getsockname()[0])
except OSError as error:
    print(error.strerror)";
    let script = format!("echo 0 > {cgroup}/cgroup.procs; exec python3 -c '{SEE}'");
    lab.shell(&script).trim().to_owned()
}

/// A daemon whose configuration has identities.
struct Declaring {
    daemon: Daemon,
    /// Its cgroup comes and goes.
    web: Inner,
}

impl Declaring {
    /// `web`, with these addresses and this policy.
    fn web(&self, address: &str, policy: &str) -> String {
        format!(
            "[[identity]]\nname = \"web\"\ncgroup = \"{}\"\naddresses = [\"{address}\"]\npolicy = {{ {policy} }}\n",
            self.web.path()
        )
    }

    fn configure(&self, identities: &str) {
        let config = format!("instance = \"identities\"\n{identities}");
        self.daemon.configure(&config).unwrap();
    }

    fn reload(&self, lab: &Lab, identities: &str) {
        self.configure(identities);
        lab.run(&format!("kill -HUP {}", self.daemon.pid().unwrap()));
    }

    /// Names and numbers of cgroups of those that are there.
    fn listed(&self) -> Vec<(String, u64)> {
        let listed = self.daemon.call("GET", "/v1/identities", None).unwrap();
        let listed = listed.as_array().unwrap().iter();
        let listed = listed.filter(|one| one["state"] != "awaited");
        let listed = listed.map(|one| {
            let name = one["name"].as_str().unwrap().to_owned();
            (name, one["cgroup_id"].as_u64().unwrap())
        });
        listed.collect()
    }

    fn names(&self) -> Vec<String> {
        self.listed().into_iter().map(|(name, _)| name).collect()
    }

    /// What `/healthz` says of them, of a daemon that is ready whatever becomes of identities.
    fn problems(&self) -> Vec<String> {
        let health = self.daemon.call("GET", "/healthz", None).unwrap();
        let problems = health["problems"].as_array().unwrap().iter();
        let problems =
            problems.map(|problem| format!("{} {}", problem["subject"], problem["message"]));
        problems.filter(|told| told.contains("identit")).collect()
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn identities_of_the_configuration_come_and_go_with_their_cgroups_and_the_file() {
    lab::run_within(DEADLINE, |lab| {
        lab.run("ip addr add 192.0.2.1/32 dev lo");
        let before = lab.run("ip -o addr show dev lo");
        let (parent, by_hand) = (Cgroup::create().unwrap(), Cgroup::create().unwrap());
        let hand = ["--name", "hand", "--address", "10.77.0.9"];
        done(&[&["add", by_hand.path()][..], &hand].concat());
        let executable = sandwire::executable().unwrap();
        let mut host = Declaring {
            daemon: Daemon::prepare(&executable, lab.folder(), "").unwrap(),
            web: Inner(Path::new(parent.path()).join("web")),
        };
        host.configure(&host.web("10.77.0.1", ""));
        host.daemon.restart().unwrap();
        assert_eq!(
            (host.names(), host.problems()),
            (vec!["hand".to_owned()], Vec::new())
        );
        let awaited = serde_json::json!({
            "name": "web", "state": "awaited", "cgroup": host.web.path(), "addresses": ["10.77.0.1"], "prefixes": [],
        });
        for listed in [
            host.daemon.json("identity list").unwrap(),
            host.daemon.call("GET", "/v1/identities", None).unwrap(),
        ] {
            assert_eq!((&listed[0]["name"], &listed[1]), (&"hand".into(), &awaited));
        }
        refused(&["show", "web", "--active", "--wait", "0"]);

        // Its cgroup comes, while somebody waits for it as before the first process of a service.
        let path = host.web.path().to_owned();
        let waiting =
            std::thread::spawn(move || done(&["show", &path, "--active", "--wait", "600"]));
        host.web.make();
        let shown = waiting.join().unwrap();
        assert_eq!(
            (&shown["name"], &shown["state"]),
            (&"web".into(), &"active".into())
        );
        assert_eq!(seen(lab, host.web.path()), "Connection refused 10.77.0.1");
        until("it is added", || host.names() == ["hand", "web"]);
        assert_eq!(seen(lab, host.web.path()), "Connection refused 10.77.0.1");
        assert_eq!(done(&["show", "web"])["declared"], true);
        assert_eq!(done(&["show", "hand"])["declared"], false);

        // A daemon that is killed and comes again finds it.
        let added = host.listed();
        host.daemon.kill().unwrap();
        assert_eq!(seen(lab, host.web.path()), "Connection refused 10.77.0.1");
        host.daemon.restart().unwrap();
        assert_eq!(
            (host.listed(), host.problems()),
            (added.clone(), Vec::new())
        );

        // Another policy, at once.
        let denied = "egress = { default = \"deny\" }";
        host.reload(lab, &host.web("10.77.0.1", denied));
        until("the policy holds", || {
            seen(lab, host.web.path()) == "Operation not permitted 10.77.0.1"
        });
        assert_eq!(host.listed(), added);

        // A service that is started anew has a cgroup anew.
        until("the last process is gone from it", || {
            fs::remove_dir(host.web.path()).is_ok()
        });
        host.web.make();
        done(&["show", "web", "--active", "--wait", "600"]);
        assert_ne!(host.listed(), added);
        assert_eq!(host.names(), ["hand", "web"]);
        assert_eq!(
            seen(lab, host.web.path()),
            "Operation not permitted 10.77.0.1"
        );

        // What can't be changed under open sockets, and what was added by hand, stays, and is told of.
        let other = host.web("10.77.0.2", "host_services = [\"all\"]")
            + &host
                .web("10.77.0.8", "")
                .replace("\"web\"", "\"hand\"")
                .replace(host.web.path(), by_hand.path());
        host.reload(lab, &other);
        until("it is told", || host.problems().len() == 2);
        let told = host.problems().concat();
        assert!(
            told.contains("is there with other settings (addresses)"),
            "{told}"
        );
        assert!(
            told.contains("by a command or another daemon with other settings (addresses)"),
            "{told}"
        );
        assert!(seen(lab, host.web.path()).ends_with(" 10.77.0.1"));
        assert_eq!(
            seen(lab, by_hand.path()).split(' ').next_back(),
            Some("10.77.0.9")
        );
        host.reload(lab, "identities = 7\n");
        until("a wrong file is told", || {
            host.daemon.log().contains("kept the old configuration")
        });
        assert_eq!(host.names(), ["hand", "web"]);

        // Taken out of the file: by a reload, and by a start.
        host.reload(lab, "");
        until("it goes", || host.names() == ["hand"]);
        assert_eq!(seen(lab, host.web.path()), "Connection refused 192.0.2.1");
        until("nothing is wrong", || host.problems().is_empty());
        host.reload(lab, &host.web("10.77.0.2", ""));
        until("it comes again", || host.names() == ["hand", "web"]);
        assert!(seen(lab, host.web.path()).ends_with(" 10.77.0.2"));
        host.daemon.kill().unwrap();
        host.configure("");
        host.daemon.restart().unwrap();
        assert_eq!(host.names(), ["hand"]);
        assert_eq!(seen(lab, host.web.path()), "Connection refused 192.0.2.1");
        done(&["remove", "hand"]);
        assert_eq!(lab.run("ip -o addr show dev lo"), before);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_identity_of_the_configuration_goes_on_in_a_new_cgroup_while_old_sockets_are_open() {
    lab::run_within(DEADLINE, |lab| {
        lab.run("ip addr add 192.0.2.1/32 dev lo");
        let parent = Cgroup::create().unwrap();
        let executable = sandwire::executable().unwrap();
        let mut host = Declaring {
            daemon: Daemon::prepare(&executable, lab.folder(), "").unwrap(),
            web: Inner(Path::new(parent.path()).join("web")),
        };
        host.web.make();
        host.configure(&host.web("10.77.0.1", ""));
        host.daemon.restart().unwrap();
        let added = host.listed();
        assert_eq!(host.names(), ["web"], "before the daemon is ready");

        // A command that stands, as by Ctrl-Z, holds up identities alone, and nobody who looks at them.
        let held = fs::File::open("/sys/fs/bpf/sandwire-identity/v2").unwrap();
        held.lock().unwrap();
        host.daemon.kill().unwrap();
        host.daemon.restart().unwrap();
        assert_eq!(host.listed(), added);
        let metrics = host.daemon.http("GET", "/metrics", None).unwrap().body;
        assert!(
            metrics.contains("sandwire_identity_listeners{identity=\"web\"}"),
            "{metrics}"
        );
        drop(held);

        // Its sockets are those of the cgroup, where its process goes.
        let server = Server::start(host.web.path());
        let process = server.0.id().to_string();
        fs::write(format!("{}/cgroup.procs", parent.path()), process).unwrap();
        until("the last process is gone from it", || {
            fs::remove_dir(host.web.path()).is_ok()
        });
        host.web.make();
        let shown = done(&["show", "web", "--active", "--wait", "600"]);
        assert_eq!(
            (&shown["state"], &shown["declared"]),
            (&"active".into(), &true.into())
        );
        assert_eq!(seen(lab, host.web.path()), "Connection refused 10.77.0.1");
        assert_ne!(host.listed(), added);
        let links = || {
            fs::read_dir("/sys/fs/bpf/sandwire-identity/v2/links")
                .unwrap()
                .count()
        };
        assert_eq!(links(), 2, "the sockets of before have lost their programs");
        assert_eq!(host.problems(), [""; 0]);

        // With other settings it can't go on.
        let added = host.listed();
        until("the last process is gone from it", || {
            fs::remove_dir(host.web.path()).is_ok()
        });
        host.reload(lab, &host.web("10.77.0.2", ""));
        until("the file is read", || {
            host.daemon.log().contains("read the pools and identities")
        });
        host.web.make();
        until("it is told what is in the way", || {
            host.problems().concat().contains("last socket")
        });
        assert_eq!(host.listed(), added);
        // A service that is started now isn't to think that it has it.
        assert_eq!(done(&["show", "web"])["state"], "dying");
        let error = refused(&["show", "web", "--active"]);
        assert!(error.contains("its cgroup"), "{error}");
        drop(server);
        done(&["show", "web", "--active", "--wait", "600"]);
        assert_ne!(host.listed(), added);
        assert_eq!(host.names(), ["web"]);
        assert_eq!(seen(lab, host.web.path()), "Connection refused 10.77.0.2");
        until("nothing is wrong", || host.problems().is_empty());
        assert_eq!(done(&["show", "web", "--active"])["state"], "active");
        host.reload(lab, "");
        until("it goes", || host.names().is_empty());
    });
}
