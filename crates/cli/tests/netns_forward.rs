//! The forwarder between two veth pairs, judged by ping, iperf3 and the kernel.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

#[path = "forward/mod.rs"]
mod forward;

use std::{
    fs::File,
    io::{Read, Seek},
    net::UdpSocket,
    os::unix::fs::FileExt,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use forward::two_hosts;
use rustix::process::{Pid, Signal, kill_process};
use sandwire_testlab::{
    command, iperf3,
    lab::{self, Lab},
    namespace::{self, Namespace},
    sandwire,
};
use serde_json::Value;

/// The hosts of [`two_hosts`].
struct World {
    a: Namespace,
    b: Namespace,
}

impl World {
    fn make(lab: &Lab) -> Self {
        let [a, b] = two_hosts(lab);
        Self { a, b }
    }

    /// Spares both the search for each other, so that pings are the only packets.
    fn know_each_other(&self) {
        for (host, address, other) in [
            (&self.a, "10.9.0.2", &self.b),
            (&self.b, "10.9.0.1", &self.a),
        ] {
            let output = other.run("ip -o link show eth0").unwrap();
            let mac = output
                .split_once("link/ether ")
                .unwrap()
                .1
                .split(' ')
                .next()
                .unwrap();
            host.run(&format!("ip neigh replace {address} lladdr {mac} dev eth0"))
                .unwrap();
        }
    }

    /// Whether one of several pings of `a` to `b` is answered.
    fn is_connected(&self) -> bool {
        self.a.run("ping -c 3 -i 0.1 -W 1 10.9.0.2").is_ok()
    }

    /// Round trips of so many pings in milliseconds, and how many of them were lost.
    fn ping(&self, count: u32, target: &str) -> (Vec<f64>, u32) {
        let output = namespace::command_in(&self.a.path(), "ping")
            .args([
                "-n",
                "-i",
                "0.02",
                "-W",
                "2",
                "-c",
                &count.to_string(),
                target,
            ])
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let time = |line: &str| line.split_once("time=")?.1.split(' ').next()?.parse().ok();
        let times: Vec<f64> = text.lines().filter_map(time).collect();
        let lost = count - u32::try_from(times.len()).unwrap();
        (times, lost)
    }

    /// What iperf3 reports at its end, a server in `b` and a client in `a`.
    fn iperf3(&self, flags: &str) -> Value {
        let _server = iperf3::Server::start(Some(&self.b.path())).unwrap();
        iperf3::report(Some(&self.a.path()), &format!("--client 10.9.0.2 {flags}")).unwrap()
    }
}

/// A running `sandwire forward va vb`.
struct Forwarder {
    child: Child,
    output: File,
    errors: File,
}

impl Forwarder {
    fn start(arguments: &[&str]) -> Self {
        let (output, errors) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let child = command_of(arguments)
            .stdout(output.try_clone().unwrap())
            .stderr(errors.try_clone().unwrap())
            .spawn()
            .unwrap();
        Self {
            child,
            output,
            errors,
        }
    }

    /// Waits for the first report: packets go through from before that on.
    fn wait_report(&self) {
        let has_come = || self.output.metadata().unwrap().len() > 0;
        wait_until("a report", has_come);
    }

    /// What it has said so far. It goes on writing where it was.
    fn said(&self) -> String {
        let mut bytes = vec![0; usize::try_from(self.output.metadata().unwrap().len()).unwrap()];
        self.output.read_exact_at(&mut bytes, 0).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn stop(&mut self, signal: Signal) -> (ExitStatus, String, String) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        self.finish()
    }

    fn finish(&mut self) -> (ExitStatus, String, String) {
        let status = self.child.wait().unwrap();
        let read = |file: &mut File| {
            let mut text = String::new();
            file.rewind().unwrap();
            file.read_to_string(&mut text).unwrap();
            text
        };
        (status, read(&mut self.output), read(&mut self.errors))
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        // The lab's end would do it; a test that fails shows its reason sooner.
        let _ = self.child.kill();
    }
}

fn command_of(arguments: &[&str]) -> Command {
    let mut command = Command::new(sandwire::executable().unwrap());
    command.arg("forward").args(arguments).stdin(Stdio::null());
    command
}

fn wait_until(what: &str, mut happens: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !happens() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        thread::sleep(Duration::from_millis(20));
    }
}

fn refused(arguments: &[&str]) -> String {
    let output = command_of(arguments).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {said}");
    said
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn two_hosts_are_connected_only_while_the_forwarder_runs() {
    lab::run(|lab| {
        let world = World::make(lab);
        assert!(!world.is_connected());
        let mut forwarder = Forwarder::start(&["va", "vb"]);
        wait_until("a ping goes through", || world.is_connected());
        assert_eq!(world.ping(20, "fd09::2").1, 0);
        wait_until("a report", || forwarder.said().contains("Link report:"));
        let (status, output, errors) = forwarder.stop(Signal::INT);
        assert!(status.success(), "{errors}");
        assert!(
            errors.contains("forwarding between va (if1) and vb (if2)"),
            "{errors}"
        );
        for expected in [
            "load: time: ",
            " fps: ",
            "Link report:",
            "sent on if1.output -> if2.input (loss rate: 0%)",
            "sent on if2.output -> if1.input (loss rate: 0%)",
            "ended: 0 packets under way were released, 0 dropped",
        ] {
            assert!(output.contains(expected), "no {expected} in\n{output}");
        }
        assert!(!world.is_connected());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn every_edge_connects_and_ends_cleanly() {
    lab::run(|lab| {
        let world = World::make(lab);
        for edge in ["raw", "ring", "xdp"] {
            let mut forwarder =
                Forwarder::start(&["va", "vb", "--edge", edge, "--ab", "delay 1ms"]);
            wait_until(edge, || world.is_connected());
            assert_eq!(world.ping(20, "fd09::2").1, 0, "{edge}");
            let (status, output, errors) = forwarder.stop(Signal::INT);
            assert!(status.success(), "{edge}: {errors}");
            assert!(output.contains("ended: "), "{edge}: {output}");
            assert!(!world.is_connected(), "{edge}");
        }
    });
}

/// Up to a page, and what to do beyond is said at once.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn long_packets_pass_by_af_xdp_as_far_as_its_buffers_hold_them() {
    lab::run(|lab| {
        let world = World::make(lab);
        let set_mtu = |mtu: u32| {
            lab.shell(&format!(
                "for host in a b; do
                     ip link set v$host mtu {mtu}; ip -n $host link set eth0 mtu {mtu}
                 done"
            ));
        };
        set_mtu(3500);
        let mut forwarder = Forwarder::start(&["va", "vb", "--edge", "xdp"]);
        wait_until("a ping goes through", || world.is_connected());
        lab.run("ip netns exec a ping -n -q -c 1 -W 10 -M do -s 3472 10.9.0.2");
        let (status, _, errors) = forwarder.stop(Signal::INT);
        assert!(status.success(), "{errors}");

        set_mtu(9000);
        let said = refused(&["va", "vb", "--edge", "xdp"]);
        assert!(said.contains("ip link set va mtu 3500"), "{said}");
        assert!(said.contains("--edge ring"), "{said}");
    });
}

/// Where nothing is impaired they wait on the link from one interface to the other.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn packets_that_find_no_room_at_the_way_out_are_counted_at_the_end() {
    lab::run(|lab| {
        let world = World::make(lab);
        lab.run("tc qdisc add dev vb root tbf rate 8kbit burst 2000 limit 100000000");
        let arguments = ["va", "vb", "--edge", "raw", "--json", "--flush"];
        let mut forwarder = Forwarder::start(&arguments);
        forwarder.wait_report();
        // To somebody who isn't there, and so doesn't answer.
        let link = |report: &Value| {
            let links = report["report"]["links"].as_array().unwrap().iter();
            let mut links = links.filter(|link| link["link"] == "if1.output -> if2.input");
            links.next().unwrap()["packets"].as_u64().unwrap()
        };
        let neighbour = "ip neigh replace 10.9.0.77 lladdr 02:00:00:00:00:77 dev eth0";
        world.a.run(neighbour).unwrap();
        let send = || {
            let socket = UdpSocket::bind("10.9.0.1:0")?;
            for _ in 0..200 {
                socket.send_to(&[7; 1000], "10.9.0.77:9")?;
            }
            Ok(())
        };
        wait_until("the link is full", || {
            // Again and again: who is busy elsewhere hears only some of them.
            world.a.inside(send).unwrap();
            let said = forwarder.said();
            let whole = said.rfind('\n').map_or("", |end| &said[..end]);
            let last = whole.lines().last();
            last.is_some_and(|line| link(&serde_json::from_str(line).unwrap()) > 1000)
        });
        let (status, output, errors) = forwarder.stop(Signal::INT);
        assert!(status.success(), "{errors}");
        let last: Value = serde_json::from_str(output.lines().last().unwrap()).unwrap();
        let out = &last["report"]["apps"]["if2"];
        let drops = out.as_object().unwrap().iter();
        let drops = drops.filter(|(name, _)| name.starts_with("send_drop_"));
        let drops: u64 = drops.map(|(_, count)| count.as_u64().unwrap()).sum();
        let ended = out["sent"].as_u64().unwrap() + drops;
        let flushed = last["ended"]["flushed"].as_u64().unwrap();
        assert_eq!(link(&last), ended + flushed, "{last}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn iperf3_gets_across_by_udp_and_tcp() {
    lab::run(|lab| {
        command::require_on_path(&["iperf3"]).unwrap();
        let world = World::make(lab);
        let mut forwarder = Forwarder::start(&["va", "vb", "--json"]);
        wait_until("a ping goes through", || world.is_connected());
        let udp = world.iperf3("-u -b 4M -t 2 -l 1000");
        let (sent, lost) = (
            &udp["end"]["sum"]["packets"],
            &udp["end"]["sum"]["lost_packets"],
        );
        assert!(sent.as_u64().unwrap() > 500, "{}", udp["end"]);
        assert!(
            lost.as_u64().unwrap() * 20 <= sent.as_u64().unwrap(),
            "{}",
            udp["end"]
        );
        let tcp = world.iperf3("-t 2");
        let rate = tcp["end"]["sum_received"]["bits_per_second"]
            .as_f64()
            .unwrap();
        // However slow the machine: what gets stuck moves next to nothing.
        assert!(rate > 1e6, "{rate}");
        let (status, output, errors) = forwarder.stop(Signal::TERM);
        assert!(status.success(), "{errors}");
        let lines: Vec<Value> = output
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let last = lines.last().unwrap();
        assert_eq!(last["ended"]["flushed"], 0);
        assert_eq!(
            last["report"]["links"][0]["link"],
            "if1.output -> if2.input"
        );
        assert!(last["report"]["links"][0]["packets"].as_u64().unwrap() > 1000);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_cannot_be_forwarded_is_refused_with_what_to_do() {
    lab::run(|lab| {
        let _world = World::make(lab);
        lab.run("ip link add long type veth peer name longer");
        lab.run("ip link set long mtu 65535 up");
        lab.run("ip link set longer up");
        let missing = refused(&["va", "vc"]);
        assert!(
            missing.contains("cannot forward by vc: there is no such interface"),
            "{missing}"
        );
        assert!(
            missing.contains("va, vb") || missing.contains("vb, va"),
            "{missing}"
        );
        assert!(refused(&["va", "va"]).contains("they are the same interface"));
        assert!(refused(&["lo", "va"]).contains("loopback"));
        assert!(refused(&["va", "long"]).contains("its MTU is 65535"));
        assert!(refused(&["va", "vb", "--ab", "los 1%"]).contains("ab: 'los' is no impairment"));
        assert!(refused(&["va", "vb", "--ba", "loss 101%"]).contains("101%"));
        lab.run("ip link set va down");
        assert!(refused(&["va", "vb"]).contains("it is down; raise it: ip link set va up"));
        let executable = sandwire::executable().unwrap();
        let output = Command::new("setpriv")
            .args([
                "--bounding-set=-net_raw,-net_admin,-sys_admin",
                "--inh-caps=-all",
            ])
            .arg(executable)
            .args(["forward", "vb", "longer"])
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            !output.status.success() && said.contains("CAP_NET_RAW"),
            "{said}"
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_interface_that_is_deleted_ends_nothing() {
    lab::run(|lab| {
        let world = World::make(lab);
        let mut forwarder = Forwarder::start(&["va", "vb"]);
        wait_until("a ping goes through", || world.is_connected());
        lab.run("ip link set vb down");
        wait_until("it is told", || forwarder.said().contains("vb is down"));
        lab.run("ip link set vb up");
        wait_until("a ping goes through again", || world.is_connected());
        lab.run("ip link delete vb");
        wait_until("it is told", || forwarder.said().contains("vb is gone"));
        assert!(forwarder.child.try_wait().unwrap().is_none());
        let (status, _, errors) = forwarder.stop(Signal::TERM);
        assert!(status.success(), "{errors}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn delay_and_loss_are_what_was_asked_for_each_way() {
    lab::run(|lab| {
        let world = World::make(lab);
        let text = "match protocol=icmp version=4 delay 30ms; match version=6 delay 5ms";
        let back = "match protocol=icmp version=4 loss packets 3,17,20-29 delay 20ms";
        let mut forwarder = Forwarder::start(&["va", "vb", "--ab", text, "--ba", back, "--json"]);
        forwarder.wait_report();
        world.know_each_other();
        let (times, lost) = world.ping(100, "10.9.0.2");
        assert_eq!(lost, 12);
        // How late the latest is, is the machine's business; the best shows what was meant.
        let least = times.iter().copied().fold(f64::INFINITY, f64::min);
        assert!((50.0..60.0).contains(&least), "{least} ms");
        let (status, output, errors) = forwarder.stop(Signal::INT);
        assert!(status.success(), "{errors}");
        let last: Value = serde_json::from_str(output.lines().last().unwrap()).unwrap();
        let back = &last["report"]["impairment"]["ba"]["rules"][0];
        assert_eq!(back["dropped"]["loss"], 12, "{back}");
        assert_eq!(last["report"]["links"][0]["link"], "ab.output -> if2.input");
        assert!(last["report"]["valid"].is_boolean());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_is_under_way_is_let_go_at_the_end_or_dropped_and_counted() {
    lab::run(|lab| {
        let world = World::make(lab);
        world
            .a
            .run("ip neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev eth0")
            .unwrap();
        for (flags, expected) in [
            (
                &["--seconds", "8"][..],
                "ended: 10 packets under way were released, 0 dropped",
            ),
            (
                &["--seconds", "8", "--flush"][..],
                "ended: 0 packets under way were released, 10 dropped",
            ),
        ] {
            // Less than the end waits.
            let ab = ["va", "vb", "--ab", "match protocol=icmp version=4 delay 9s"];
            let mut forwarder = Forwarder::start(&[&ab, flags].concat());
            forwarder.wait_report();
            // Nobody answers within their patience.
            let _ = world.a.run("ping -c 10 -i 0.01 -W 1 10.9.0.2");
            let (status, output, errors) = forwarder.finish();
            assert!(status.success(), "{errors}");
            assert!(
                output.contains(expected),
                "no {expected} in\n{output}{errors}"
            );
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_recorded_run_decides_the_same_again() {
    lab::run(|lab| {
        command::require_on_path(&["tcpdump"]).unwrap();
        let world = World::make(lab);
        let folder = lab.folder().join("run");
        let folder = folder.to_str().unwrap();
        let ab = "seed 7; delay 20ms 15ms normal order any loss 10% duplicate 5%";
        let mut forwarder = Forwarder::start(&[
            "va",
            "vb",
            "--ab",
            ab,
            "--ba",
            "rate 1mbit",
            "--record",
            folder,
        ]);
        forwarder.wait_report();
        let _ = world.ping(100, "10.9.0.2");
        let (status, _, errors) = forwarder.stop(Signal::INT);
        assert!(status.success(), "{errors}");
        let executable = sandwire::executable().unwrap();
        let replay = |flags: &[&str]| {
            let mut command = Command::new(&executable);
            command
                .args(["impair", "replay", folder])
                .args(flags)
                .output()
                .unwrap()
        };
        let replayed = replay(&["--json"]);
        let text = String::from_utf8(replayed.stdout).unwrap();
        assert!(replayed.status.success(), "{text}");
        let document: Value = serde_json::from_str(&text).unwrap();
        assert!(document["decisions"].as_u64().unwrap() > 150, "{document}");
        assert_eq!(
            (&document["is_same"], &document["different"]),
            (&true.into(), &0.into())
        );
        let seen = lab.run(&format!("tcpdump -nr {folder}/before.pcapng icmp"));
        assert!(seen.lines().count() > 150, "{seen}");
        assert!(
            lab.run(&format!("grep -ac dropped:.loss {folder}/after.pcapng"))
                .trim()
                != "0"
        );
        assert!(refused(&["va", "vb", "--record", folder]).contains("it isn't empty"));
        lab.shell(&format!(
            "sed -i 's/\"number\":7,/\"number\":7000,/' {folder}/decisions.jsonl"
        ));
        assert_eq!(replay(&[]).status.code(), Some(2));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_scenario_takes_its_course() {
    lab::run(|lab| {
        let world = World::make(lab);
        let file = lab.folder().join("course.toml");
        let text = "duration = \"60s\"\n[[rule]]\nmatch = { protocol = \"icmp\" }\ndelay = \"40ms\"\n\
                    [[step]]\nat = \"12s\"\npartition = true\nfor = \"6s\"\n\
                    [[step]]\nat = \"22s\"\nclear = true\n";
        std::fs::write(&file, text).unwrap();
        let file = file.to_str().unwrap();
        let mut forwarder = Forwarder::start(&["va", "vb", "--scenario", file]);
        forwarder.wait_report();
        world.know_each_other();
        // Both ways are delayed.
        let (times, _) = world.ping(10, "10.9.0.2");
        assert!(
            times.iter().all(|time| *time >= 80.0) && times.len() == 10,
            "{times:?}"
        );
        wait_until("the partition begins", || !world.is_connected());
        wait_until("it heals, and the end is unimpaired", || {
            let (times, _) = world.ping(3, "10.9.0.2");
            times.len() == 3 && times.iter().all(|time| *time < 40.0)
        });
        let (status, output, errors) = forwarder.stop(Signal::INT);
        assert!(status.success(), "{errors}");
        assert!(output.contains("partition "), "{output}");
        let wrong = lab.folder().join("wrong.toml");
        std::fs::write(&wrong, "[[step]]\nat = \"1s\"\nramp = { loss = \"1%\" }\n").unwrap();
        let said = refused(&["va", "vb", "--scenario", wrong.to_str().unwrap()]);
        assert!(said.contains("wrong.toml: line "), "{said}");
    });
}

/// A repetition of 10 ms with thousands of steps: far more than a graph can be configured for in time.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn packets_pass_between_the_changes_of_a_dense_scenario() {
    lab::run_within(Duration::from_secs(600), |lab| {
        let world = World::make(lab);
        let file = lab.folder().join("dense.toml");
        let mut text = String::from("duration = \"10ms\"\nrepeat = \"forever\"\n");
        for step in 0..9_000 {
            let delay = 1 + step % 2;
            text.push_str(&format!(
                "[[step]]\nat = \"{step}us\"\nset = \"delay {delay}ms\"\n"
            ));
        }
        std::fs::write(&file, &text).unwrap();
        let file = file.to_str().unwrap();
        let mut forwarder = Forwarder::start(&["va", "vb", "--scenario", file]);
        wait_until("a ping goes through", || world.is_connected());
        world.know_each_other();
        let (times, _) = world.ping(10, "10.9.0.2");
        assert!(
            times.iter().all(|time| *time >= 2.0) && times.len() == 10,
            "{times:?}"
        );
        let (status, output, errors) = forwarder.stop(Signal::INT);
        assert!(status.success(), "{errors}");
        assert!(output.contains("ended: "), "{output}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_disk_that_is_full_is_told_of_while_the_run_goes_on() {
    lab::run(|lab| {
        let world = World::make(lab);
        lab.shell("mkdir /run/lab/disk; mount -t tmpfs -o size=64k tmpfs /run/lab/disk");
        let folder = "/run/lab/disk/run";
        let mut forwarder =
            Forwarder::start(&["va", "vb", "--ab", "delay 1ms", "--record", folder]);
        forwarder.wait_report();
        wait_until("the full disk is told of", || {
            let _ = world.a.run("ping -c 50 -i 0.002 -s 1400 -W 1 10.9.0.2");
            forwarder.said().contains("isn't recorded any more")
        });
        assert!(world.is_connected());
        let (status, _, errors) = forwarder.stop(Signal::INT);
        assert_eq!(status.code(), Some(2), "{errors}");
        assert!(errors.contains("No space left"), "{errors}");
        // Up to there it is a recording.
        let executable = sandwire::executable().unwrap();
        let replayed = lab.run(&format!("{} impair replay {folder}", executable.display()));
        assert!(replayed.contains("was cut off"), "{replayed}");
    });
}
