//! Labs from a file, as a user makes them.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{
    fs,
    path::PathBuf,
    process::{Command, Output},
};

use sandwire_testlab::{
    lab::{self, Lab},
    sandwire,
};
use serde_json::Value;

const SHOP: &str = r#"
[host.client]
[host.router]
forward = true
[host.server]

[[link]]
ends = ["client", "router"]
addresses = ["10.0.1.1/24", "10.0.1.2/24"]
[[link]]
ends = ["router", "server"]
addresses = ["10.0.2.1/24", "10.0.2.2/24"]

[[route]]
host = "client"
to = "default"
via = "10.0.1.2"
[[route]]
host = "server"
to = "default"
via = "10.0.2.1"
"#;

fn sandwire_lab(arguments: &[&str]) -> Output {
    let executable = sandwire::executable().unwrap();
    let mut command = Command::new(executable);
    command.arg("lab").args(arguments).output().unwrap()
}

/// Standard output of one that must succeed.
fn done(arguments: &[&str]) -> String {
    let output = sandwire_lab(arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// Standard error of one that must be refused.
fn refused(arguments: &[&str]) -> String {
    let output = sandwire_lab(arguments);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {error}");
    error
}

fn file(lab: &Lab, name: &str, text: &str) -> PathBuf {
    let path = lab.folder().join(name);
    fs::write(&path, text).unwrap();
    path
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_lab_comes_up_runs_commands_by_name_and_goes_without_a_trace() {
    lab::run(|lab| {
        let shop = file(lab, "shop.toml", SHOP);
        let shop = shop.to_str().unwrap();
        let before = lab.snapshot();
        assert_eq!(
            done(&["up", shop, "--check"]),
            "lab shop would be made: client, router, server\n"
        );
        assert_eq!(lab.snapshot(), before);
        assert_eq!(
            done(&["up", shop]),
            "lab shop is up: client, router, server\n"
        );
        let pinged = done(&[
            "exec", "client", "--", "ping", "-c", "2", "-i", "0.1", "server",
        ]);
        assert!(pinged.contains("2 received"), "{pinged}");
        let own = done(&["exec", "router", "--", "ls", "/sys/class/net"]);
        assert_eq!(
            own.split_whitespace().collect::<Vec<_>>(),
            ["eth0", "eth1", "lo"]
        );
        let listed: Value = serde_json::from_str(&done(&["list", "--json"])).unwrap();
        assert_eq!(listed[0]["hosts"][2]["addresses"]["eth0"][0], "10.0.2.2/24");
        let status = sandwire_lab(&["exec", "client", "--", "sh", "-c", "exit 7"]).status;
        assert_eq!(status.code(), Some(7));
        assert!(
            refused(&["exec", "printer", "--", "true"]).contains("it has client, router, server")
        );
        assert!(refused(&["up", shop]).contains("it is up already"));
        assert_eq!(
            done(&["down"]),
            "lab shop is down: 3 hosts and 2 links are gone\n"
        );
        assert_eq!(lab.snapshot(), before);
        assert_eq!(done(&["list"]), "no lab is up\n");
        assert!(refused(&["down", "shop"]).contains("there is no lab shop"));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn of_several_labs_one_is_to_be_chosen() {
    lab::run(|lab| {
        for name in ["one.toml", "two.toml"] {
            done(&["up", file(lab, name, SHOP).to_str().unwrap()]);
        }
        assert!(refused(&["down"]).contains("choose one: one, two"));
        assert!(refused(&["exec", "client", "--", "true"]).contains("choose one: one, two"));
        done(&[
            "exec", "client", "--lab", "two", "--", "ping", "-c", "1", "server",
        ]);
        done(&["down", "one"]);
        done(&["exec", "client", "--", "ping", "-c", "1", "server"]);
        done(&["down"]);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_is_wrong_with_a_file_is_said_with_its_line_and_nothing_is_made() {
    lab::run(|lab| {
        let before = lab.snapshot();
        let wrong = SHOP.replace("[\"router\", \"server\"]", "[\"router\", \"sever\"]");
        let path = file(lab, "shop.toml", &wrong);
        let said = refused(&["up", path.to_str().unwrap()]);
        let place = format!("{}:11:19: there is no host 'sever'", path.display());
        assert!(said.contains(&place), "{said}");
        assert!(
            refused(&["up", "/run/lab/none.toml"]).contains("cannot read lab /run/lab/none.toml")
        );
        assert_eq!(lab.snapshot(), before);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn links_are_impaired_each_way_and_down_ends_that() {
    lab::run(|lab| {
        let before = lab.snapshot();
        let impaired = SHOP.replacen(
            "[[link]]\n",
            "[[link]]\nab = \"delay 30ms\"\nba = \"match protocol=icmp version=4 loss packets 2 delay 20ms; delay 20ms\"\n",
            1,
        );
        let shop = file(
            lab,
            "shop.toml",
            &format!(
                "{impaired}[switch.lan]\n[host.printer]\n\
             [[link]]\nends = [\"client\", \"lan\"]\nba = \"delay 40ms\"\n[[link]]\nends = [\"lan\", \"printer\"]\n"
            ),
        );
        let up = sandwire_lab(&["up", shop.to_str().unwrap()]);
        assert!(
            up.status.success(),
            "{}",
            String::from_utf8_lossy(&up.stderr)
        );
        let ping = |host: &str| {
            let output =
                sandwire_lab(&["exec", "client", "--", "ping", "-c", "5", "-i", "0.2", host]);
            String::from_utf8(output.stdout).unwrap()
        };
        // The first may be late for having waited for ARP, which is delayed too.
        let far = ping("server");
        assert!(far.contains("4 received"), "{far}");
        let least = |text: &str| -> f64 {
            let times = text.split_once("min/avg/max/mdev = ").unwrap().1;
            times.split('/').next().unwrap().parse().unwrap()
        };
        assert!((50.0..75.0).contains(&least(&far)), "{far}");
        let near = ping("printer");
        assert!((40.0..65.0).contains(&least(&near)), "{near}");
        let listed = done(&["list"]);
        assert!(
            listed.contains("eth1") && !listed.contains("swd"),
            "{listed}"
        );
        let removed: Value = serde_json::from_str(&done(&["down", "--json"])).unwrap();
        assert_eq!(removed["removed"]["impairments"], 2, "{removed}");
        assert_eq!(lab.snapshot(), before);
    });
}
