//! `sandwire impair record`: what it measures, and that its scenario does the same again.

use std::{
    fs,
    net::UdpSocket,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use sandwire_testlab::{command, lab, namespace, sandwire};
use serde_json::Value;

use crate::lab::{Service, interfaces, verb, wait_until};

/// Least and median round trip in milliseconds, and the share of probes that were lost.
fn figures(said: &str) -> (f64, f64, f64) {
    let said: Value = serde_json::from_str(said).unwrap();
    let number = |value: &Value| value.as_f64().unwrap();
    let round_trip = |which: &str| number(&said["round_trip_nanoseconds"][which]) / 1e6;
    let lost = 1.0 - number(&said["answered"]) / number(&said["sent"]);
    (round_trip("least"), round_trip("median"), lost)
}

/// 20 ms each way are 40 ms, 10 % each way 19 %. With 1600 probes and then 800, 5 points from that and 7 from
/// each other are more than four standard deviations. What a busy machine adds to 40 ms is measured as the
/// link's own, and comes again when the scenario is run on that machine: the round trip is then within 5 ms of the
/// recorded one, and twice of what was added.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_recorded_link_comes_again_from_its_scenario() {
    lab::run(|lab| {
        interfaces(lab);
        let service = Service::start(lab);
        let (first, second) = (lab.folder().join("first"), lab.folder().join("second"));
        let record = |seconds: u32, file: &std::path::Path| {
            let file = file.display();
            service.run(&format!(
                "record 10.9.0.1 --netns far --interval 5ms --seconds {seconds} --out {file} --json"
            ))
        };
        service.run("--netns far --both 'seed 3; delay 20ms loss 10%'");
        let (least, median, loss) = figures(&record(16, &first));
        assert!((40.0..45.0).contains(&least), "{least}");
        assert!((loss - 0.19).abs() < 0.05, "{loss}");
        service.run("clear --all");

        let text = fs::read_to_string(&first).unwrap();
        println!("{text}");
        let run = format!("run {} --netns far --json", first.display());
        thread::scope(|scope| {
            let running = scope.spawn(|| service.run(&run));
            wait_until("the scenario runs", || {
                service.run("show --json").contains("far0")
            });
            let (_, again, lost_again) = figures(&record(4, &second));
            let bounds = median - 5.0..median + 2.0 * (median - 40.0) + 5.0;
            assert!(bounds.contains(&again), "{median} and then {again}");
            assert!(
                (lost_again - loss).abs() < 0.07,
                "{loss} and then {lost_again}"
            );
            let said: Value = serde_json::from_str(&running.join().unwrap()).unwrap();
            assert_eq!(said["completed"], true, "{said:#}");
        });
    });
}

/// A server that sends back what comes, while 8 Mbit/s of other traffic leave.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_udp_server_is_probed_and_the_rate_is_that_which_passed() {
    lab::run(|lab| {
        interfaces(lab);
        let echo = UdpSocket::bind("[fd09::1]:7000").unwrap();
        thread::spawn(move || {
            let mut packet = [0; 2048];
            while let Ok((length, from)) = echo.recv_from(&mut packet) {
                let _ = echo.send_to(&packet[..length], from);
            }
        });
        // 1000 bytes with their headers of 42, a thousand of them a second: 8.3 Mbit/s.
        let open = || Ok(UdpSocket::bind("10.9.0.2:0")?);
        let load = namespace::inside(&namespace::path_of("far"), open).unwrap();
        thread::spawn(move || {
            loop {
                let start = std::time::Instant::now();
                for _ in 0..10 {
                    let _ = load.send_to(&[0; 1000], "10.9.0.1:9");
                }
                thread::sleep(Duration::from_millis(10).saturating_sub(start.elapsed()));
            }
        });
        let line = "record fd09::1 --udp 7000 --netns far --interface far0 --rate --seconds 3";
        let output = verb(lab.folder(), line);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        // A busy machine sends fewer than thirty.
        let (counts, _) = said.split_once(" probes were answered by fd09::1").unwrap();
        let counts = counts.rsplit(' ').take(3).collect::<Vec<_>>();
        assert!(counts[0] == counts[2] && counts[0] != "0", "{said}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(
            text.starts_with("# Recorded by `sandwire impair record` until 20"),
            "{text}"
        );
        let egress = text.split("recorded-egress").nth(1).unwrap();
        let rate = egress.split("rate = \"").nth(1).unwrap();
        let rate: f64 = rate.split("mbit").next().unwrap().parse().unwrap();
        // A busy machine sends less than it should, never more.
        assert!((1.0..9.0).contains(&rate), "{text}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_interrupted_recording_is_written() {
    lab::run(|lab| {
        interfaces(lab);
        let file = lab.folder().join("scenario");
        let mut recording = Command::new(sandwire::executable().unwrap())
            .args(["impair", "record", "fd09::2", "--seconds", "60", "--out"])
            .arg(&file)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        thread::sleep(Duration::from_secs(3));
        command::run(&format!("kill -INT {}", recording.id())).unwrap();
        assert!(recording.wait().unwrap().success());
        let text = fs::read_to_string(&file).unwrap();
        let duration = text.split("\nduration = \"").nth(1).unwrap();
        let seconds: f64 = duration.split("s\"").next().unwrap().parse().unwrap();
        assert!(seconds > 0.5 && seconds < 59.0, "{text}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_was_measured_until_the_interface_went_is_written() {
    lab::run(|lab| {
        interfaces(lab);
        let file = lab.folder().join("scenario");
        let words = "10.9.0.1 --netns far --interface far0 --rate --seconds 60 --json --out";
        let recording = Command::new(sandwire::executable().unwrap())
            .args(["impair", "record"])
            .args(words.split(' '))
            .arg(&file)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        thread::sleep(Duration::from_secs(3));
        lab.run("ip link del near0");
        let output = recording.wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        assert!(
            said.contains("counters of far0: no such interface"),
            "{said}"
        );
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(answer["completed"], false, "{answer:#}");
        assert!(answer["answered"].as_u64() > Some(0), "{answer:#}");
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.contains("\nduration = \""), "{text}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_cannot_be_measured_is_refused_and_leaves_no_file() {
    lab::run(|lab| {
        interfaces(lab);
        let taken = lab.folder().join("taken");
        fs::write(&taken, "mine").unwrap();
        let to_taken = format!("10.9.0.2 --seconds 1 --out {}", taken.display());
        for (line, status, words) in [
            ("203.0.113.1 --seconds 1", 1, "look at the routes"),
            (
                "no-such-host.invalid --seconds 1",
                1,
                "cannot find the address of no-such-host.invalid",
            ),
            ("10.9.0.2 --netns nowhere", 1, "/run/netns/nowhere"),
            (
                "10.9.0.2 --netns /etc/passwd",
                1,
                "no file of a network namespace",
            ),
            ("10.9.0.2 --interface nope", 1, "no such interface"),
            ("10.9.0.2 --rate", 1, "--interface"),
            ("10.9.0.2 --interval 1ms", 1, "between 5ms and 10s"),
            ("10.9.0.2 --step 50ms", 1, "at least the interval"),
            ("10.9.0.2 --seconds 86400", 1, "make --step longer"),
            (
                "10.9.0.2 --seconds 86400 --interval 5ms",
                1,
                "more than 1000000 probes",
            ),
            (&to_taken, 1, "File exists"),
            // Nobody has that address, and nobody listens there.
            ("10.9.0.9 --seconds 1", 2, "none of"),
            ("10.9.0.2 --udp 7 --seconds 1", 2, "none of"),
        ] {
            let file = lab.folder().join("scenario");
            let out = if line == to_taken {
                String::new()
            } else {
                format!(" --out {}", file.display())
            };
            let output = verb(lab.folder(), &format!("record {line}{out}"));
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(status), "{line}: {said}");
            assert!(said.contains(words), "{line}: {said}");
            assert!(!file.exists(), "{line}");
        }
        assert_eq!(fs::read_to_string(&taken).unwrap(), "mine");

        // In a new namespace nobody may ping without the right to raw sockets.
        let output = Command::new("setpriv")
            .args(["--bounding-set", "-net_raw"])
            .arg(sandwire::executable().unwrap())
            .args(["impair", "record", "10.9.0.2", "--seconds", "1"])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("ping_group_range"), "{said}");
    });
}
