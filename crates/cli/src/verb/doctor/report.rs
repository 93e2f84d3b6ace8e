//! All that the doctor found, as one document and as text.

mod text;

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::{Command, Stdio},
};

use sandwire_api::pool::Pool;
use sandwire_daemon::config::{Config, ConfigError};
use serde::Serialize;

use super::{
    Probe, datapath,
    firewall::{self, Obstacle},
    host, identities,
    managers::{INTERFACES, Manager, NETWORK_MANAGER, NETWORKD},
    probe::{self, Probed},
    uplinks::{self, Uplinks},
    vmm,
};
use crate::privilege::effective_capabilities;

/// The document.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    version: &'static str,
    kernel: String,
    /// Whether all that is essential is there.
    pub(super) works: bool,
    findings: Vec<Finding>,
    warnings: Vec<Warning>,
    /// Rules of other people's firewalls that may block sandboxes' traffic.
    firewall: Vec<Obstacle>,
}

/// One thing that was looked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    group: &'static str,
    name: String,
    /// Absent if it couldn't be found out.
    found: Option<bool>,
    /// How it was found, or why not.
    detail: String,
    /// Whether nothing works without it.
    essential: bool,
    /// What is used instead, if it is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    used_instead: Option<String>,
    /// How to get it, if it is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    how_to_get: Option<String>,
}

/// A setting that may get in the way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Warning {
    pub(super) subject: String,
    pub(super) problem: String,
    pub(super) advice: String,
}

const ESSENTIAL: &str = "essential";
/// What the data paths `ebpf` and `xdp`, and host slots, need.
pub(super) const EBPF: &str = "eBPF data path";
const KERNEL: &str = "kernel features";
const GUESTS: &str = "guests";
const HOST: &str = "rights and limits";

/// Kernel features: name as the probe has it, group, what is used instead, how to get it.
const FEATURES: &[(&str, &str, &str, &str)] = &[
    (
        "network namespaces",
        ESSENTIAL,
        "",
        "a kernel with CONFIG_NET_NS; root, or CAP_SYS_ADMIN",
    ),
    (
        "TUN/TAP",
        ESSENTIAL,
        "",
        "modprobe tun (CONFIG_TUN); in a container, /dev/net/tun",
    ),
    ("veth", ESSENTIAL, "", "modprobe veth (CONFIG_VETH)"),
    ("bridge", ESSENTIAL, "", "modprobe bridge (CONFIG_BRIDGE)"),
    (
        "nf_tables",
        ESSENTIAL,
        "",
        "modprobe nf_tables (CONFIG_NF_TABLES, CONFIG_NF_TABLES_INET)",
    ),
    (
        "nf_tables NAT",
        ESSENTIAL,
        "",
        "modprobe nft_chain_nat nft_masq (CONFIG_NFT_NAT, CONFIG_NFT_MASQ)",
    ),
    (
        "connection tracking",
        ESSENTIAL,
        "",
        "modprobe nf_conntrack nft_ct (CONFIG_NFT_CT)",
    ),
    (
        "connection limit",
        ESSENTIAL,
        "",
        "modprobe nft_connlimit (CONFIG_NFT_CONNLIMIT)",
    ),
    (
        "packet limit",
        ESSENTIAL,
        "",
        "modprobe nft_limit (CONFIG_NFT_LIMIT)",
    ),
    (
        "sets of ranges with several fields",
        ESSENTIAL,
        "",
        "Linux 5.6 or later",
    ),
    (
        "IPv6",
        KERNEL,
        "IPv4 alone: a pool with IPv6 is refused",
        "boot without ipv6.disable=1 (CONFIG_IPV6); net.ipv6.conf.{all,default}.disable_ipv6=0",
    ),
    (
        "private procfs",
        KERNEL,
        "the procfs at /proc, slower with thousands of slots",
        "Linux 5.2 or later (fsopen)",
    ),
    (
        "multi-queue TAP",
        KERNEL,
        "TAPs with one queue",
        "modprobe tun",
    ),
    (
        "BPF",
        KERNEL,
        "the data path nft",
        "a kernel with CONFIG_BPF_SYSCALL; root, or CAP_BPF",
    ),
    (
        "TCX",
        KERNEL,
        "cls_bpf, or the data path nft",
        "Linux 6.6 or later with CONFIG_NET_XGRESS",
    ),
    (
        "cls_bpf",
        KERNEL,
        "the data path nft",
        "modprobe cls_bpf sch_ingress (CONFIG_NET_CLS_BPF)",
    ),
    (
        "native XDP on TAP",
        KERNEL,
        "the data path nft",
        "Linux 4.15 or later with BPF",
    ),
    (
        "native XDP on veth",
        KERNEL,
        "the data path nft",
        "Linux 4.19 or later with BPF",
    ),
    (
        "AF_XDP",
        KERNEL,
        "AF_PACKET",
        "a kernel with CONFIG_XDP_SOCKETS",
    ),
    (
        "identities",
        KERNEL,
        "slots with namespaces",
        "Linux 6.1 or later with CONFIG_CGROUP_BPF; root, or CAP_BPF and CAP_NET_ADMIN",
    ),
    (
        "netkit",
        KERNEL,
        "veth",
        "Linux 6.12 or later with CONFIG_NETKIT",
    ),
    ("ipvlan", KERNEL, "veth", "modprobe ipvlan (CONFIG_IPVLAN)"),
    (
        "macvlan",
        KERNEL,
        "veth",
        "modprobe macvlan (CONFIG_MACVLAN)",
    ),
    (
        "fq",
        KERNEL,
        "no pacing",
        "modprobe sch_fq (CONFIG_NET_SCH_FQ)",
    ),
    (
        "transparent proxy",
        KERNEL,
        "no traffic over TLS (`sandwire relay`)",
        "modprobe nft_tproxy nft_socket (CONFIG_NFT_TPROXY, CONFIG_NFT_SOCKET)",
    ),
];

/// Looks at everything. `config` is the daemon's configuration, if not that of the usual place, and `pools` are those of a daemon that
/// runs.
pub(super) fn examine(config: Option<&Path>, pools: &[Pool]) -> Report {
    let (config, unusable) = match Config::load(config) {
        Ok(config) => (Some(config), None),
        Err(error) => (None, Some(unusable_configuration(&error))),
    };
    let features = probe::apart(Probe::Features);
    let mut findings: Vec<Finding> = FEATURES
        .iter()
        .map(|feature| feature_finding(feature, &features))
        .collect();
    let uplinks = Uplinks::find(config.as_ref(), pools);
    findings.extend(datapath::findings(&uplinks));
    findings.extend(device_findings());
    findings.extend(guest_findings());
    findings.extend(limit_findings());
    let mut warnings: Vec<Warning> = unusable.into_iter().collect();
    warnings.extend(uplinks::own_warnings(&uplinks));
    warnings.extend(manager_warnings());
    warnings.extend(config.as_ref().map_or(Vec::new(), identities::warnings));
    let firewall = read_firewalls(&uplinks.all(), &mut warnings);
    Report {
        version: env!("CARGO_PKG_VERSION"),
        kernel: host::kernel(),
        works: findings
            .iter()
            .all(|finding| !finding.essential || finding.found != Some(false)),
        findings,
        warnings,
        firewall,
    }
}

fn unusable_configuration(error: &ConfigError) -> Warning {
    Warning {
        subject: "configuration".to_owned(),
        problem: error.to_string(),
        advice: "the daemon doesn't start with it, and its uplinks and tables are not among what is told here: docs/configure.md \
                 has all keys"
            .to_owned(),
    }
}

impl Finding {
    pub(super) fn new(
        group: &'static str,
        name: &str,
        found: Option<bool>,
        detail: impl Into<String>,
    ) -> Self {
        Self {
            group,
            name: name.to_owned(),
            found,
            detail: detail.into(),
            essential: group == ESSENTIAL,
            used_instead: None,
            how_to_get: None,
        }
    }

    /// What to say if it is missing.
    pub(super) fn or(mut self, used_instead: &str, how_to_get: &str) -> Self {
        if self.found != Some(true) {
            let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
            self.used_instead = some(used_instead);
            self.how_to_get = some(how_to_get);
        }
        self
    }
}

fn feature_finding(
    (name, group, used_instead, how_to_get): &(&str, &'static str, &str, &str),
    features: &Result<BTreeMap<String, Probed>, String>,
) -> Finding {
    let (found, detail) = match features {
        Ok(results) => match results.get(*name) {
            Some(probed) => (probed.found, probed.detail.clone()),
            None => (
                None,
                "not tried: a network namespace could not be made".to_owned(),
            ),
        },
        Err(reason) => (None, reason.clone()),
    };
    Finding::new(group, name, found, detail).or(used_instead, how_to_get)
}

fn device_findings() -> Vec<Finding> {
    let device = |name, path, instead, how| {
        let opened = host::open_device(path);
        let detail = opened
            .clone()
            .err()
            .unwrap_or_else(|| format!("{path} opens"));
        Finding::new(KERNEL, name, Some(opened.is_ok()), detail).or(instead, how)
    };
    let btf = fs::metadata("/sys/kernel/btf/vmlinux").is_ok();
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    let cgroup = host::mount_point(&mounts, "cgroup2");
    vec![
        device(
            "vhost-net",
            "/dev/vhost-net",
            "the VMM copies packets itself",
            "modprobe vhost_net (CONFIG_VHOST_NET)",
        ),
        device(
            "vhost-vsock",
            "/dev/vhost-vsock",
            "vsock devices of the VMM (Firecracker has its own)",
            "modprobe vhost_vsock (CONFIG_VHOST_VSOCK)",
        ),
        Finding::new(
            KERNEL,
            "cgroup v2",
            Some(cgroup.is_some()),
            cgroup.map_or("not mounted".to_owned(), |path| {
                format!("mounted at {path}")
            }),
        )
        .or(
            "no identities: slots with namespaces",
            "mount -t cgroup2 none /sys/fs/cgroup/unified",
        ),
        Finding::new(KERNEL, "BTF", Some(btf), "/sys/kernel/btf/vmlinux").or(
            "BPF programs without CO-RE; no identities with --tcp-only",
            "a kernel with CONFIG_DEBUG_INFO_BTF",
        ),
    ]
}

fn guest_findings() -> Vec<Finding> {
    let (found, mut detail) = match probe::apart(Probe::Kvm) {
        Ok(results) => match results.get("kvm") {
            Some(probed) => (probed.found, probed.detail.clone()),
            None => (None, "the probe said nothing of it".to_owned()),
        },
        Err(reason) => (Some(false), reason),
    };
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let is_x86 = cfg!(target_arch = "x86_64");
    if found == Some(true) && is_x86 && !host::has_hardware_virtualisation(&cpuinfo) {
        detail.push_str(
            "; but the processor shows neither vmx nor svm, so this is a KVM in software: an ordinary guest kernel may \
             not boot under it, or take minutes",
        );
    }
    let how = match is_x86 {
        true => {
            "a machine with VMX or SVM, in a VM nested virtualisation; modprobe kvm_intel or kvm_amd; membership in \
             the group of /dev/kvm"
        }
        false => {
            "a machine whose firmware starts Linux as a hypervisor (EL2 on ARM: in a cloud, one of bare metal); \
             membership in the group of /dev/kvm"
        }
    };
    let mut findings =
        vec![Finding::new(GUESTS, "KVM", found, detail).or("QEMU's TCG, slower", how)];
    for (program, argument) in vmm::PROGRAMS {
        let path = vmm::find(program);
        let detail = match &path {
            Some(path) => {
                let version =
                    vmm::version(path, argument).unwrap_or_else(|| "tells no version".to_owned());
                format!("{}: {version}", path.display())
            }
            None => "not on the PATH".to_owned(),
        };
        findings.push(Finding::new(GUESTS, program, Some(path.is_some()), detail));
    }
    findings
}

fn limit_findings() -> Vec<Finding> {
    const CAPABILITIES: [(u32, &str); 3] = [
        (12, "CAP_NET_ADMIN"),
        (21, "CAP_SYS_ADMIN"),
        (19, "CAP_SYS_PTRACE"),
    ];
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = effective_capabilities(&status);
    let missing: Vec<&str> = CAPABILITIES
        .iter()
        .filter(|(number, _)| effective & (1 << number) == 0)
        .map(|(_, name)| *name)
        .collect();
    let uid = rustix::process::geteuid().as_raw();
    let detail = if missing.is_empty() {
        format!("uid {uid} with all capabilities that the daemon needs")
    } else {
        format!("uid {uid} lacks {}", missing.join(", "))
    };
    let rights = Finding::new(
        HOST,
        "rights of this process",
        Some(missing.is_empty()),
        detail,
    )
    .or(
        "",
        "run the daemon as root, or by the systemd unit; clients of the socket need none of these",
    );
    let files = host::open_files_max().map_or("no limit".to_owned(), |limit| limit.to_string());
    let mut findings = vec![rights, Finding::new(HOST, "open files", Some(true), files)];
    for (setting, meaning) in LIMITS {
        let value = host::setting(setting);
        let detail = match &value {
            Some(value) => format!("{value}: {meaning}"),
            None => format!("can't be read here: {meaning}"),
        };
        findings.push(Finding::new(HOST, setting, value.map(|_| true), detail));
    }
    findings
}

/// Limits that large pools meet, and what they limit.
const LIMITS: [(&str, &str); 5] = [
    (
        "net/netfilter/nf_conntrack_max",
        "connections that the host tracks",
    ),
    (
        "net/ipv4/neigh/default/gc_thresh3",
        "neighbours; those of slots are permanent and don't count",
    ),
    (
        "user/max_net_namespaces",
        "network namespaces, one per slot",
    ),
    ("fs/mount-max", "mounts, one per slot"),
    (
        "fs/inotify/max_user_instances",
        "watchers of folders per user",
    ),
];

/// Of programs for the host's own network that have taken interfaces of sandboxes.
fn manager_warnings() -> impl Iterator<Item = Warning> {
    let taken = |manager: &Manager| manager.taken(INTERFACES.as_ref(), manager.folder.as_ref());
    let some = |names: &[String]| Some(format!("{} among {}", names.first()?, names.len()));
    let networkd = some(&taken(&NETWORKD)).map(|some| Warning {
        subject: "systemd-networkd".to_owned(),
        problem: format!(
            "it configures interfaces of sandboxes, {some}: addresses and routes that it doesn't know go, and it asks sandboxes for \
             addresses by DHCP"
        ),
        advice:
            "copy packaging/systemd/*.network to /etc/systemd/network, then `networkctl reload`"
                .to_owned(),
    });
    let network_manager = some(&taken(&NETWORK_MANAGER)).map(|some| Warning {
        subject: "NetworkManager".to_owned(),
        problem: format!(
            "it has interfaces of sandboxes in its care, {some}: when it turns networking off, as for a suspended machine, it takes their addresses \
             and routes, until sandwire has put them back"
        ),
        advice: "copy packaging/NetworkManager/10-sandwire.conf to /etc/NetworkManager/conf.d, with the interface's name if it isn't there yet, then \
                 `systemctl reload NetworkManager`"
            .to_owned(),
    });
    networkd.into_iter().chain(network_manager)
}

fn read_firewalls(uplinks: &[String], warnings: &mut Vec<Warning>) -> Vec<Obstacle> {
    let mut unread = |subject: &str, problem: String| {
        warnings.push(Warning {
            subject: subject.to_owned(),
            problem: format!("other people's rules can't be read: {problem}"),
            advice: "install nftables, and run the doctor as root".to_owned(),
        });
    };
    let mut found = Vec::new();
    match output_of("nft", &["-j", "list", "ruleset"]) {
        Ok(text) => match firewall::nft::parse(&text) {
            Ok(ruleset) => found.extend(firewall::obstacles(&ruleset, uplinks)),
            Err(reason) => unread("nftables", reason),
        },
        Err(reason) => unread("nftables", reason),
    }
    for (family, names, program) in [
        ("ip", "/proc/net/ip_tables_names", "iptables-legacy-save"),
        ("ip6", "/proc/net/ip6_tables_names", "ip6tables-legacy-save"),
    ] {
        // To ask where there are none would load the older iptables into the kernel.
        if fs::read_to_string(names).is_ok_and(|tables| !tables.trim().is_empty()) {
            match output_of(program, &[]) {
                Ok(text) => {
                    let ruleset = firewall::legacy::parse(&text, family);
                    found.extend(firewall::obstacles(&ruleset, uplinks));
                }
                Err(reason) => unread(program, reason),
            }
        }
    }
    found
}

fn output_of(program: &str, arguments: &[&str]) -> Result<String, String> {
    let path = vmm::find(program).ok_or_else(|| format!("{program} is not on the PATH"))?;
    let output = Command::new(path)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        let reason = String::from_utf8_lossy(&output.stderr);
        Err(format!(
            "{program}: {}",
            reason.lines().next().unwrap_or("it failed").trim()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(found: Option<bool>) -> Result<BTreeMap<String, Probed>, String> {
        let probed = Probed {
            found,
            detail: "cannot create netkit interface: not supported".to_owned(),
        };
        Ok(BTreeMap::from([("netkit".to_owned(), probed)]))
    }

    const NETKIT: (&str, &str, &str, &str) = ("netkit", KERNEL, "veth", "Linux 6.7");

    #[test]
    fn what_is_missing_comes_with_its_substitute_and_how_to_get_it() {
        let text = feature_finding(&NETKIT, &results(Some(false))).text(false);
        for needed in [
            "✗ netkit: cannot create",
            "used instead: veth",
            "to get it: Linux 6.7",
        ] {
            assert!(text.contains(needed), "{needed} is missing in:\n{text}");
        }
    }

    #[test]
    fn what_is_there_needs_no_advice() {
        let finding = feature_finding(&NETKIT, &results(Some(true)));
        assert_eq!((finding.used_instead, finding.how_to_get), (None, None));
    }

    #[test]
    fn a_probe_without_answer_leaves_the_question_open() {
        let hung = Err("the probe 'features' hung".to_owned());
        assert_eq!(feature_finding(&NETKIT, &hung).found, None);
        assert_eq!(feature_finding(&NETKIT, &Ok(BTreeMap::new())).found, None);
    }

    #[test]
    fn every_feature_that_is_listed_is_probed_under_that_name() {
        let source = include_str!("features.rs");
        for (name, ..) in FEATURES {
            assert!(
                source.contains(&format!("\"{name}\"")),
                "{name} is not probed"
            );
        }
    }
}
