//! The benchmark `forward` on the kernel's way and on ours: what it sends arrives, unchanged. Not how fast.

#![allow(
    clippy::unwrap_used,
    reason = "a test ends at the first thing that fails"
)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use sandwire_testlab::{command, lab, sandwire};
use serde_json::Value;

/// Ways that frames go: out by a TAP, out by a veth, and back.
const PATHS: [&str; 3] = ["tap_to_tap", "tap_to_veth", "to_guest"];
/// Loads in a sample that is looked at.
const LOADS: f64 = 8.0;
/// Full packets in 64 KB.
const SEGMENTS: f64 = 44.0;

fn median(record: &Value, case: &str, metric: &str) -> f64 {
    let mut rows = record["rows"].as_array().unwrap().iter();
    let row = rows.find(|row| row["case"] == case && row["metric"] == metric);
    let row = row.unwrap_or_else(|| panic!("no {metric} of {case}: {}", record["not_run"]));
    row["median"].as_f64().unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn all_that_forward_sends_arrives_on_every_way_and_back() {
    lab::run(|_| {
        let mut bench = Command::new(sandwire::executable().unwrap());
        // As after `su`: tc and nft are in root's own folder.
        bench.env("PATH", "/usr/bin:/bin");
        bench.args(["bench", "forward", "--quick", "--json"]);
        for way in ["kernel-nat", "recipe", "ebpf-host", "ebpf-netns", "xdp"] {
            bench.args(["--only", way]);
        }
        let text = command::output_of(&mut bench).unwrap();
        let record: Value = serde_json::from_str(&text).unwrap();
        for case in ["kernel_nat", "recipe", "ebpf_host", "ebpf_netns", "xdp"] {
            let segments = if case == "xdp" { SEGMENTS } else { 1.0 };
            for path in PATHS {
                for (load, frames) in [("64", 1.0), ("1514", 1.0), ("64k", segments)] {
                    let of = |kind: &str| median(&record, case, &format!("{path}_{load}_{kind}"));
                    assert_eq!(of("checked"), LOADS * frames, "{case} {path} {load}");
                    assert_eq!(of("missing"), 0.0, "{case} {path} {load}");
                    assert_eq!(of("wrong"), 0.0, "{case} {path} {load}");
                    assert!(of("cost") > 0.0, "{case} {path} {load}");
                }
            }
        }
        let ratio = &record["ratios"]["to_guest_ebpf_host_vs_recipe_64"];
        assert!(ratio.as_f64().unwrap() > 0.0, "{ratio}");
    });
}

/// Folders in one, which cgroups are too.
fn below(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let folders = entries.filter(|entry| entry.file_type().unwrap().is_dir());
    folders.map(|entry| entry.path()).collect()
}

fn until(what: &str, mut happens: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !happens() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// The machine's cgroups don't go with the benchmark's namespaces.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_benchmark_that_is_interrupted_leaves_no_cgroups() {
    lab::run(|lab| {
        let hierarchy = lab.folder().join("cgroups");
        fs::create_dir(&hierarchy).unwrap();
        lab.run(&format!("mount -t cgroup2 none {}", hierarchy.display()));
        // Its own, so that others' benchmarks at the same time are not looked at.
        let ours = hierarchy.join(format!("bench-test-{}", std::process::id()));
        let _ = fs::remove_dir(&ours);
        fs::create_dir(&ours).unwrap();
        let enter = format!(
            "echo 0 > {}/cgroup.procs && exec unshare --cgroup \"$0\" \"$@\"",
            ours.display()
        );
        let mut bench = Command::new("sh")
            .args(["-c", &enter])
            .arg(sandwire::executable().unwrap())
            .args(["bench", "rr", "--quick", "--only", "life"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Identities are in cgroups below the benchmark's own.
        until("there are identities", || {
            below(&ours).iter().any(|own| below(own).len() > 2)
        });
        bench.kill().unwrap();
        bench.wait().unwrap();
        until("the cgroups are gone", || below(&ours).is_empty());
        until("nobody is left", || fs::remove_dir(&ours).is_ok());
    });
}

/// Nor does its folder for temporary files.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_benchmark_that_is_interrupted_while_it_installs_leaves_no_files() {
    lab::run(|lab| {
        let [programs, temporary] = ["programs", "temporary"].map(|name| lab.folder().join(name));
        fs::create_dir(&programs).unwrap();
        fs::create_dir(&temporary).unwrap();
        // Stands for cargo: it begins to build where it is told to, and doesn't end.
        let cargo = "#!/bin/sh\nwhile [ $1 != --target-dir ]; do shift; done\nmkdir -p $2/begun\nsleep 1000\n";
        fs::write(programs.join("cargo"), cargo).unwrap();
        lab.run(&format!("chmod +x {}/cargo", programs.display()));
        let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", programs.display());
        let mut bench = Command::new(sandwire::executable().unwrap())
            .args(["bench", "vsock", "--quick", "--only", "peer"])
            .env("PATH", path)
            .env("TMPDIR", &temporary)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        until("it builds", || {
            let folders = below(&temporary);
            folders.iter().any(|one| one.join("build/begun").exists())
        });
        bench.kill().unwrap();
        bench.wait().unwrap();
        until("its folder is gone", || below(&temporary).is_empty());
    });
}
