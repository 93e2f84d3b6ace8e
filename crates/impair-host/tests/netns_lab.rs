//! Labs in the kernel: whole, interrupted at every step, and beside other people's namespaces.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::path::Path;

use sandwire_impair_host::lab::{self, Lab};
use sandwire_testlab::lab as private;

const THREE: &str = r#"
[host.client]
[host.router]
forward = true
[host.server]
[switch.lan]
[host.printer]

[[link]]
ends = ["client", "router"]
addresses = [["10.0.1.1/24", "fd00:1::1/64"], ["10.0.1.2/24", "fd00:1::2/64"]]
[[link]]
ends = ["router", "server"]
addresses = [["10.0.2.1/24", "fd00:2::1/64"], ["10.0.2.2/24", "fd00:2::2/64"]]
mtu = 1400
[[link]]
ends = ["server", "lan"]
[[link]]
ends = ["lan", "printer"]

[[route]]
host = "client"
to = "default"
via = "10.0.1.2"
[[route]]
host = "server"
to = "10.0.1.0/24"
via = "10.0.2.1"
[[route]]
host = "client"
to = "default"
via = "fd00:1::2"
[[route]]
host = "server"
to = "fd00:1::/64"
via = "fd00:2::1"
"#;

fn shop() -> Lab {
    Lab::parse(THREE, Path::new("shop.toml")).unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn hosts_reach_each_other_as_declared_and_down_leaves_nothing() {
    private::run(|host| {
        let before = host.snapshot();
        lab::up(&shop(), None, |_| Ok(())).unwrap();
        for target in ["10.0.2.2", "fd00:2::2"] {
            host.run(&format!(
                "ip netns exec sandwire-lab.shop.client ping -c 2 -i 0.05 -W 2 {target}"
            ));
        }
        let listed = lab::list().unwrap();
        assert_eq!(listed.len(), 1);
        let printer = listed[0]
            .hosts
            .iter()
            .find(|it| it.name.as_str() == "printer")
            .unwrap();
        let address = printer.addresses["eth0"][0].addr();
        host.run(&format!(
            "ip netns exec sandwire-lab.shop.server ping -c 1 -W 2 {address}"
        ));
        let mtu = host.run("ip netns exec sandwire-lab.shop.server cat /sys/class/net/eth0/mtu");
        assert_eq!(mtu.trim(), "1400");
        let removed = lab::down(&listed[0].name, None).unwrap();
        assert_eq!(
            (removed.namespaces.len(), removed.links),
            (5, 4),
            "{removed:?}"
        );
        assert!(
            removed.failures.is_empty() && removed.processes.is_empty(),
            "{removed:?}"
        );
        assert_eq!(host.snapshot(), before);
        assert!(lab::down(&listed[0].name, None).unwrap_err().is_refusal());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_lab_that_fails_at_any_step_leaves_nothing() {
    private::run(|host| {
        let before = host.snapshot();
        let mut steps = 0;
        lab::up(&shop(), None, |_| {
            steps += 1;
            Ok(())
        })
        .unwrap();
        lab::down(&"shop".parse().unwrap(), None).unwrap();
        assert_eq!(steps, 5 + 4 + 2 + 5);
        for failing in 0..steps {
            let mut step = 0;
            let error = lab::up(&shop(), None, |_| {
                step += 1;
                if step > failing {
                    Err("no more".to_owned())
                } else {
                    Ok(())
                }
            });
            let text = error.unwrap_err().to_string();
            assert!(
                text.ends_with("no more; what was made has been taken away"),
                "{text}"
            );
            assert_eq!(host.snapshot(), before, "step {failing}");
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_others_have_made_is_never_touched() {
    private::run(|host| {
        let theirs = host.namespace("sandwire-lab.shop.server");
        let stranger = host.namespace("sandwire-lab.other");
        let before = host.snapshot();
        let error = lab::up(&shop(), None, |_| Ok(())).unwrap_err();
        assert!(error.is_refusal(), "{error}");
        assert!(
            error.to_string().contains("that no lab has made"),
            "{error}"
        );
        assert!(lab::list().unwrap().is_empty());
        assert!(
            lab::down(&"shop".parse().unwrap(), None)
                .unwrap_err()
                .is_refusal()
        );
        assert_eq!(host.snapshot(), before);
        drop(theirs);

        lab::up(&shop(), None, |_| Ok(())).unwrap();
        let again = lab::up(&shop(), None, |_| Ok(())).unwrap_err();
        assert!(again.to_string().contains("it is up already"), "{again}");
        // An interface that somebody else brought into a host of the lab is not ours to delete.
        host.shell(
            "ip link add theirs type veth peer name outside\n\
             ip link set theirs netns sandwire-lab.shop.client",
        );
        let removed = lab::down(&"shop".parse().unwrap(), None).unwrap();
        assert_eq!(
            (removed.links, removed.failures.len()),
            (4, 0),
            "{removed:?}"
        );
        assert!(stranger.path().exists());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn processes_inside_are_told_of_and_lose_their_links() {
    private::run(|host| {
        lab::up(&shop(), None, |_| Ok(())).unwrap();
        let mut sleeper = std::process::Command::new("ip")
            .args(["netns", "exec", "sandwire-lab.shop.router", "sleep", "100"])
            .spawn()
            .unwrap();
        // `ip` becomes the command it runs.
        let inside = || {
            let labs = lab::list().unwrap();
            labs[0]
                .hosts
                .iter()
                .flat_map(|it| it.processes.clone())
                .collect::<Vec<_>>()
        };
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while inside() != [sleeper.id()] {
            assert!(std::time::Instant::now() < deadline, "{:?}", inside());
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let removed = lab::down(&"shop".parse().unwrap(), None).unwrap();
        assert_eq!(removed.processes, [sleeper.id()]);
        let path = format!("/proc/{}/ns/net", sleeper.id());
        let left = host.run(&format!("nsenter --net={path} ip -o link"));
        assert_eq!(left.lines().count(), 1, "{left}");
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    });
}
