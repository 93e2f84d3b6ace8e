//! Whether the eBPF data path works here, or exactly why not, and what it would find on the uplinks.
//!
//! The programs themselves are loaded, by a process in mount and network namespaces of its own with a bpffs of
//! its own: nothing else tells whether this kernel's verifier takes them.

use std::fs;

use nix::sched::CloneFlags;
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use sandwire_datapath::{
    Datapath, Settings,
    abi::SkbPlaces,
    features::{FIB_LOOKUP_MARK, FIB_LOOKUP_TABLE, Features},
};
use sandwire_kernel_net::{interface, netlink::Socket, qdisc};

use super::{
    Probe, host,
    probe::{self, Probed, Results},
    report::{EBPF, Finding},
    uplinks::Uplinks,
};
use crate::privilege::effective_capabilities;

const BPFFS: &str = "/sys/fs/bpf";
/// Why an interface is an uplink, if nobody says which are.
const DEFAULT_ROUTE: &str = "a default route leads there";
/// Room for a few sandboxes is enough to try it.
const ENTRIES: u32 = 64;
const NFT_INSTEAD: &str = "the data path nft; pools with ebpf or xdp, and host slots, are refused";
/// Capabilities that loading and attaching take; CAP_SYS_ADMIN stands for the first two.
const CAPABILITIES: [(u32, &str); 3] =
    [(39, "CAP_BPF"), (38, "CAP_PERFMON"), (12, "CAP_NET_ADMIN")];
const SYS_ADMIN: u32 = 21;

/// Loads the programs where nothing of it stays.
pub(super) fn probe_all() -> Results {
    let mut results = Results::new();
    match load() {
        Ok(features) => {
            let answer = |found| Probed {
                found: Some(found),
                detail: "tried".to_owned(),
            };
            results.insert("programs".to_owned(), answer(true));
            results.insert("tcx".to_owned(), answer(features.tcx));
            let has = |flag| features.fib_flags & flag != 0;
            results.insert("marks".to_owned(), answer(has(FIB_LOOKUP_MARK)));
            results.insert("tables".to_owned(), answer(has(FIB_LOOKUP_TABLE)));
            let places = features.skb_places != SkbPlaces::default();
            results.insert("checksums".to_owned(), answer(places));
        }
        Err(detail) => {
            let found = rustix::process::geteuid().is_root().then_some(false);
            results.insert("programs".to_owned(), Probed { found, detail });
        }
    }
    results
}

fn load() -> Result<Features, String> {
    let mut flags = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET;
    if !rustix::process::geteuid().is_root() {
        flags |= CloneFlags::CLONE_NEWUSER;
    }
    nix::sched::unshare(flags)
        .map_err(|error| format!("cannot make namespaces to try it in: {error}"))?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private).map_err(|error| format!("cannot make mounts private: {error}"))?;
    mount("bpf", BPFFS, "bpf", MountFlags::empty(), None)
        .map_err(|error| format!("cannot mount a bpffs on {BPFFS}: {error}"))?;
    let settings = Settings {
        nics_max: ENTRIES,
        answers_max: ENTRIES,
        prefixes_max: ENTRIES,
        ..Settings::new(format!("{BPFFS}/sandwire/probe").into())
    };
    let opened = Datapath::open(&settings).map_err(|error| error.to_string())?;
    Ok(opened.datapath.features())
}

/// What was found out, and how to get what is missing.
pub(super) fn findings(uplinks: &Uplinks) -> Vec<Finding> {
    let results = probe::apart(Probe::DataPath);
    let mut findings = program_findings(&results, &circumstances());
    findings.push(bpffs_finding(
        &fs::read_to_string("/proc/mounts").unwrap_or_default(),
    ));
    let (names, why) = uplink_names(uplinks);
    if names.is_empty() {
        let detail = match why {
            DEFAULT_ROUTE => "there is no default route".to_owned(),
            _ => format!("{why} names none"),
        };
        let how = "a default route, or `uplinks` in the configuration";
        let instead = "the host's own network stack for every packet that leaves";
        findings.push(Finding::new(EBPF, "uplinks", Some(false), detail).or(instead, how));
    }
    findings.extend(
        names
            .iter()
            .map(|name| uplink_finding(name, why, look_at(name).as_ref())),
    );
    findings
}

fn program_findings(results: &Result<Results, String>, circumstances: &str) -> Vec<Finding> {
    let find = |name: &str| match results {
        Ok(results) => results.get(name).cloned(),
        Err(reason) => (name == "programs").then(|| Probed {
            found: None,
            detail: reason.clone(),
        }),
    };
    let mut findings = Vec::new();
    if let Some(mut programs) = find("programs") {
        if programs.found != Some(true) && !circumstances.is_empty() {
            programs.detail.push_str(&format!(" ({circumstances})"));
        }
        let how = "Linux 6.1 or later with CONFIG_BPF_SYSCALL, CONFIG_NET_CLS_BPF and CONFIG_NET_SCH_INGRESS; root, or \
                   CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN";
        findings.push(
            Finding::new(EBPF, "programs load", programs.found, programs.detail)
                .or(NFT_INSTEAD, how),
        );
    }
    for (key, name, instead, how) in [
        (
            "tcx",
            "TCX on uplinks",
            "clsact filters of priority 49152",
            "Linux 6.6 or later with CONFIG_NET_XGRESS",
        ),
        (
            "marks",
            "routing marks (`route_mark`)",
            "the host's own network stack for packets with a mark, by the same rules",
            "Linux 6.10 or later",
        ),
        (
            "tables",
            "routing tables (`route_table`)",
            "nothing: who has one reaches nobody beyond the host",
            "Linux 6.5 or later",
        ),
        (
            "checksums",
            "checksums are finished only where they belong",
            "nothing: a guest can have one written into addresses that were judged",
            "a kernel with CONFIG_DEBUG_INFO_BTF, and before 6.2 not locked down for confidentiality; or VMMs that open \
             the TAP without virtio-net headers",
        ),
    ] {
        if let Some(probed) = find(key) {
            findings.push(Finding::new(EBPF, name, probed.found, probed.detail).or(instead, how));
        }
    }
    findings
}

fn bpffs_finding(mounts: &str) -> Finding {
    let path = host::mount_point(mounts, "bpf");
    let detail = match path {
        Some(path) => format!("mounted at {path}"),
        None => "not mounted".to_owned(),
    };
    Finding::new(EBPF, "bpffs", Some(path.is_some()), detail).or(
        "the daemon mounts one at /sys/fs/bpf for the first pool that needs it",
        "mount -t bpf bpf /sys/fs/bpf",
    )
}

/// Uplinks, and why these.
fn uplink_names(uplinks: &Uplinks) -> (&[String], &'static str) {
    match &uplinks.configured {
        Some(names) => (names, "`uplinks` of the configuration"),
        None => (&uplinks.of_default_routes, DEFAULT_ROUTE),
    }
}

/// What matters of an interface for an uplink.
struct Seen {
    /// What queues packets to be sent.
    queue: String,
    /// Whether that holds packets back until they may leave.
    is_paced: bool,
    has_ethernet: bool,
}

/// Nothing if there is no such interface.
fn look_at(name: &str) -> Option<Seen> {
    let mut socket = Socket::route().ok()?;
    let found = interface::find(&mut socket, name).ok()??;
    Some(Seen {
        is_paced: qdisc::honours_departures(&mut socket, &found).ok()?,
        queue: found.queue.unwrap_or_default(),
        has_ethernet: found.mac.is_some(),
    })
}

fn uplink_finding(name: &str, why: &str, seen: Option<&Seen>) -> Finding {
    let subject = format!("uplink {name}");
    let passed_by = |but: &str, how: &str| {
        Finding::new(EBPF, &subject, Some(false), format!("{why}, but {but}"))
            .or("the host's own network stack", how)
    };
    let Some(seen) = seen else {
        return passed_by("it is not there", "it is taken up when it appears");
    };
    if !seen.has_ethernet {
        return passed_by(
            "its packets have no Ethernet headers",
            "a tunnel that carries Ethernet frames, as vxlan and gretap do",
        );
    }
    let pacing = match seen.queue.as_str() {
        "fq" => "its queue is fq: what exceeds a limit leaves later".to_owned(),
        queue if seen.is_paced => {
            format!("its queue is {queue}, with fq in each: what exceeds a limit leaves later")
        }
        "mq" => format!(
            "its queue is mq, without fq in each: what exceeds a limit is dropped; for delay instead, \
             sysctl -w net.core.default_qdisc=fq and tc qdisc replace dev {name} root mq"
        ),
        queue => format!(
            "its queue is {}: what exceeds a limit is dropped; for delay instead, tc qdisc replace dev {name} root fq",
            if queue.is_empty() { "unknown" } else { queue }
        ),
    };
    let path = format!("/sys/class/net/{name}/device/driver");
    let driver = fs::read_link(path).ok();
    let driver = driver
        .as_ref()
        .and_then(|path| path.file_name())
        .map_or_else(
            || "no driver of a device, so no `xdp`".to_owned(),
            |driver| format!("driver {}", driver.to_string_lossy()),
        );
    Finding::new(
        EBPF,
        &subject,
        Some(true),
        format!("{why}; {pacing}; {driver}"),
    )
}

/// What commonly forbids eBPF to a process, as far as it applies to this one.
fn circumstances() -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let lockdown = fs::read_to_string("/sys/kernel/security/lockdown").unwrap_or_default();
    let unprivileged = host::setting("kernel/unprivileged_bpf_disabled");
    told(&status, &lockdown, unprivileged.as_deref())
}

fn told(status: &str, lockdown: &str, unprivileged: Option<&str>) -> String {
    let mut parts = Vec::new();
    let effective = effective_capabilities(status);
    let has = |number: u32| effective & (1 << number) != 0;
    let lacks: Vec<&str> = CAPABILITIES
        .iter()
        .filter(|(number, _)| !has(*number) && (*number == 12 || !has(SYS_ADMIN)))
        .map(|(_, name)| *name)
        .collect();
    if !lacks.is_empty() {
        parts.push(format!("this process lacks {}", lacks.join(", ")));
        if unprivileged.is_some_and(|value| value != "0") {
            parts.push("kernel.unprivileged_bpf_disabled is set".to_owned());
        }
    }
    if status.lines().any(|line| line == "Seccomp:\t2") {
        parts.push("a seccomp filter may forbid bpf".to_owned());
    }
    let mode = lockdown
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'));
    if let Some((mode, _)) = mode.filter(|(mode, _)| *mode != "none") {
        parts.push(format!("the kernel is locked down for {mode}"));
    }
    parts.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probed(found: bool, detail: &str) -> Probed {
        Probed {
            found: Some(found),
            detail: detail.to_owned(),
        }
    }

    #[test]
    fn a_refusal_is_told_with_what_may_have_caused_it() {
        let results = Ok(Results::from([(
            "programs".to_owned(),
            probed(false, "cannot load from_guest: Operation not permitted"),
        )]));
        let text = program_findings(&results, "a seccomp filter may forbid bpf")[0].text(false);
        for needed in [
            "✗ programs load: cannot load from_guest",
            "(a seccomp filter may forbid bpf)",
            "used instead: the data path nft",
            "CONFIG_NET_CLS_BPF",
        ] {
            assert!(text.contains(needed), "{needed} is missing in:\n{text}");
        }
        let hung = Err("the probe 'data-path' hung".to_owned());
        assert_eq!(program_findings(&hung, "").len(), 1);
    }

    #[test]
    fn what_forbids_ebpf_is_read_from_the_system() {
        let root = "CapEff:\t000001ffffffffff\nSeccomp:\t0\n";
        assert_eq!(
            told(root, "[none] integrity confidentiality", Some("2")),
            ""
        );
        let container = "CapEff:\t0000000000000000\nSeccomp:\t2\n";
        let text = told(container, "none integrity [confidentiality]", Some("2"));
        for needed in [
            "lacks CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN",
            "unprivileged_bpf_disabled",
            "seccomp",
            "locked down for confidentiality",
        ] {
            assert!(text.contains(needed), "{needed} is missing in: {text}");
        }
        // CAP_SYS_ADMIN and CAP_NET_ADMIN.
        let older = format!("CapEff:\t{:016x}\n", (1u64 << 21) | (1 << 12));
        assert_eq!(told(&older, "", None), "");
    }

    #[test]
    fn uplinks_tell_their_queue_and_why_they_are_uplinks() {
        let why = "a default route leads there";
        let seen = |queue: &str, has_ethernet| Seen {
            queue: queue.to_owned(),
            is_paced: queue == "fq",
            has_ethernet,
        };
        let paced = uplink_finding("nothing0", why, Some(&seen("fq", true))).text(false);
        assert!(
            paced.contains(why) && paced.contains("leaves later"),
            "{paced}"
        );
        for (queue, advice) in [("mq", "root mq"), ("pfifo_fast", "root fq")] {
            let dropped = uplink_finding("nothing0", why, Some(&seen(queue, true))).text(false);
            assert!(
                dropped.contains(&format!("queue is {queue}")) && dropped.contains(advice),
                "{dropped}"
            );
        }
        let all_paced = Seen {
            is_paced: true,
            ..seen("mq", true)
        };
        let paced = uplink_finding("nothing0", why, Some(&all_paced)).text(false);
        assert!(paced.contains("leaves later"), "{paced}");
        let gone = uplink_finding("nothing0", why, None).text(false);
        assert!(
            gone.contains("✗ uplink nothing0") && gone.contains("not there"),
            "{gone}"
        );
        let bare = uplink_finding("nothing0", why, Some(&seen("fq", false))).text(false);
        for needed in [
            "✗ uplink nothing0",
            "no Ethernet headers",
            "own network stack",
        ] {
            assert!(bare.contains(needed), "{needed} is missing in: {bare}");
        }
    }

    #[test]
    fn a_bpffs_is_found_among_the_mounts() {
        let mounted = bpffs_finding("bpf /sys/fs/bpf bpf rw 0 0\n").text(false);
        assert!(
            mounted.contains("✓ bpffs: mounted at /sys/fs/bpf"),
            "{mounted}"
        );
        let text = bpffs_finding("").text(false);
        assert!(text.contains("mount -t bpf"), "{text}");
    }
}
