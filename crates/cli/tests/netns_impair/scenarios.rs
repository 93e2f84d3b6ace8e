//! `sandwire impair run`.

use std::{
    os::unix::process::CommandExt,
    process::{Command, Stdio},
};

use sandwire_testlab::lab;
use serde_json::Value;

use crate::lab::{Service, command, interfaces, round_trip, wait_until};

const SCENARIO: &str = r#"
duration = "9s"
[[rule]]
name = "all"
delay = "10ms"

[[step]]
at = "1s"
set = "name all delay 40ms"
"#;

/// The impairment changes at its moment, and ends with the scenario.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_scenario_changes_the_impairment_by_the_clock_and_ends_it() {
    lab::run(|lab| {
        interfaces(lab);
        let service = Service::start(lab);
        let file = lab.folder().join("scenario.toml");
        std::fs::write(&file, SCENARIO).unwrap();
        let line = format!("run {} --netns far --json", file.display());
        std::thread::scope(|scope| {
            let running = scope.spawn(|| service.run(&line));
            wait_until("the delay is another", || {
                (80.0..100.0).contains(&round_trip(lab).0)
            });
            let said: Value = serde_json::from_str(&running.join().unwrap()).unwrap();
            assert_eq!(said["changes"], 2, "{said:#}");
            assert_eq!(said["completed"], true, "{said:#}");
        });
        let (least, _) = round_trip(lab);
        assert!(least < 5.0, "{least}");

        std::fs::write(&file, SCENARIO.replace("40ms", "-40ms")).unwrap();
        let output = service.output(&line);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("line 9"), "{said}");
    });
}

/// Nobody can look afterwards: the impairment has ended by then.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_scenario_says_at_its_end_whether_it_was_valid() {
    lab::run(|lab| {
        interfaces(lab);
        let service = Service::start(lab);
        let file = lab.folder().join("scenario.toml");
        let mut pings = Command::new("ip")
            .args("netns exec far ping -n -q -i 0.1 10.9.0.1".split(' '))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // No packet is as early as a nanosecond, nor as late as an hour.
        for (budget, valid) in [("1ns", false), ("3600s", true)] {
            let text = format!(
                "budget = \"{budget}\"\nduration = \"900s\"\n[[rule]]\nname = \"a\"\ndelay = \"10ms\"\n\
                 [[step]]\nat = \"2s\"\nset = \"name b delay 5ms\"\n"
            );
            std::fs::write(&file, text).unwrap();
            let line = format!("run {} --netns far --json", file.display());
            let running = command(&service.folder, &line)
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            wait_until("packets go by its second rule", || {
                let shown = service.run("show --json");
                let shown: Value = serde_json::from_str(&shown).unwrap();
                let rules = shown[0]["egress"]["line"]["rules"].as_array();
                let mut rules = rules.into_iter().flatten();
                rules.any(|rule| rule["name"] == "b" && rule["released"].as_u64() > Some(0))
            });
            lab.run(&format!("kill -INT {}", running.id()));
            let said = running.wait_with_output().unwrap().stdout;
            let said: Value = serde_json::from_slice(&said).unwrap();
            assert_eq!(said["valid"], valid, "{said:#}");
        }
        pings.kill().unwrap();
        pings.wait().unwrap();
    });
}

/// As when the terminal that it was started in is closed; `nohup` has it go on.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_hangup_ends_a_scenario_with_its_impairment() {
    lab::run(|lab| {
        interfaces(lab);
        let service = Service::start(lab);
        let file = lab.folder().join("scenario.toml");
        std::fs::write(&file, SCENARIO.replace("9s", "900s")).unwrap();
        let line = format!("run {} --netns far", file.display());
        let run = command(&service.folder, &line);
        let start_by = |how: &[&str]| {
            let mut started = Command::new(how[0]);
            started.args(&how[1..]);
            started.arg(run.get_program()).args(run.get_args());
            started.env("SANDWIRE_IMPAIR_FOLDER", &service.folder);
            started.stdout(Stdio::null()).spawn().unwrap()
        };
        // The tests may have been started by `nohup` themselves.
        let mut running = start_by(&["env", "--default-signal=HUP"]);
        wait_until("it is impaired", || service.run("show").contains("far0"));
        lab.run(&format!("kill -HUP {}", running.id()));
        assert!(running.wait().unwrap().success());
        assert_eq!(service.run("show"), "nothing is impaired\n");

        let mut running = start_by(&["nohup"]);
        wait_until("it is impaired", || service.run("show").contains("far0"));
        // What is ignored, and not blocked, never comes.
        let status = std::fs::read_to_string(format!("/proc/{}/status", running.id())).unwrap();
        for (set, hangup) in [("SigIgn:", 1), ("SigBlk:", 0)] {
            let mask = status.lines().find_map(|line| line.strip_prefix(set));
            let mask = u64::from_str_radix(mask.unwrap().trim(), 16).unwrap();
            assert_eq!(mask & 1, hangup, "{set} {mask:x}");
        }
        lab.run(&format!("kill -TERM {}", running.id()));
        assert!(running.wait().unwrap().success());
        assert_eq!(service.run("show"), "nothing is impaired\n");
    });
}

/// The first signal ends the scenario and lets packets go, the second doesn't wait for them.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_second_signal_ends_a_scenario_without_its_last_packets() {
    lab::run(|lab| {
        interfaces(lab);
        let service = Service::start(lab);
        let file = lab.folder().join("scenario.toml");
        let text =
            "duration = \"900s\"\n[[rule]]\nmatch = { protocol = \"icmp\" }\ndelay = \"600s\"\n";
        std::fs::write(&file, text).unwrap();
        let line = format!("run {} --netns far --json", file.display());
        let running = command(&service.folder, &line)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        wait_until("it is impaired", || service.run("show").contains("far0"));
        lab.shell("ip netns exec far ping -n -q -c 3 -i 0.02 -W 0.1 10.9.0.1 || true");
        lab.run(&format!("kill -INT {}", running.id()));
        wait_until("its packets are waited for", || {
            service.shown()["state"]["state"] == "draining"
        });
        lab.run(&format!("kill -INT {}", running.id()));
        let output = running.wait_with_output().unwrap();
        assert!(output.status.success());
        let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(said["released"], 0, "{said:#}");
        // The kernel may have sent reports of multicast as well.
        assert!(said["flushed"].as_u64().unwrap() >= 3, "{said:#}");
        assert_eq!(service.run("show"), "nothing is impaired\n");
        assert_eq!(lab.run("ip -n far -o link").matches("swd").count(), 0);
        let (least, _) = round_trip(lab);
        assert!(least < 5.0, "{least}");
    });
}

/// Who may not ask the service isn't told that nothing is impaired.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn whoever_may_not_ask_the_service_is_told_so() {
    lab::run(|lab| {
        interfaces(lab);
        let service = Service::start(lab);
        service.run("--netns far --both 'delay 10ms'");
        for line in ["show", "clear --all", "clear --netns far"] {
            let mut asked = command(&service.folder, line);
            let output = asked.uid(65_534).gid(65_534).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{line}: {said}");
            assert!(said.contains("only root"), "{line}: {said}");
        }
    });
}

/// What a scenario isn't allowed to begin it doesn't end either.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_scenario_that_is_refused_leaves_the_impairment_that_there_is() {
    lab::run(|lab| {
        interfaces(lab);
        let service = Service::start(lab);
        let file = lab.folder().join("scenario.toml");
        std::fs::write(&file, SCENARIO).unwrap();
        service.run("--netns far --both 'delay 10ms'");
        let output = service.output(&format!("run {} --netns far --side host", file.display()));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("the other way round"), "{said}");
        assert_eq!(service.shown()["state"]["state"], "impaired");
        let (least, _) = round_trip(lab);
        assert!(least >= 20.0, "{least}");
    });
}
