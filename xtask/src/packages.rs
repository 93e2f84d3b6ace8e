//! The system packages that building, testing and the demo need, and their installation.
//!
//! One table says which package, how to tell that it is there, and why we need it. On Debian and its
//! kin, as root, `setup` installs exactly what is missing; otherwise it says what to run. Nothing is
//! ever removed or upgraded.

use std::{fs, path::Path, process::ExitCode};

use anyhow::{Context, Result, bail};

use crate::command;

/// Installs the system packages that building and testing need.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Only say what is missing; exit 1 if anything is.
    #[arg(long)]
    check: bool,
}

/// How to tell that a package is there, whoever installed it.
#[derive(Clone, Copy)]
enum Sign {
    /// A program of this name can be found.
    Program(&'static str),
    /// This file exists.
    File(&'static str),
}

/// A Debian package that we need.
pub(crate) struct Package {
    /// Its name.
    pub(crate) name: &'static str,
    sign: Sign,
    /// What we need it for.
    pub(crate) reason: &'static str,
}

const PACKAGES: &[Package] = &[
    package(
        "gcc",
        Sign::Program("cc"),
        "links Rust; compiles the embedded SQLite",
    ),
    package(
        "g++",
        Sign::Program("c++"),
        "compiles the run time of the fuzz targets",
    ),
    package(
        "libc6-dev",
        Sign::File("/usr/include/stdio.h"),
        "headers for the embedded SQLite",
    ),
    package(
        "clang",
        Sign::Program("clang"),
        "compiles the eBPF programs",
    ),
    package(
        "clang-19",
        Sign::Program("clang-19"),
        "the compiler of another Debian, whose programs the tests have kernels judge",
    ),
    package(
        "libbpf-dev",
        Sign::File("/usr/include/bpf/bpf_helpers.h"),
        "headers for the eBPF programs",
    ),
    package(
        "bpftool",
        Sign::Program("bpftool"),
        "the tests' second opinion on programs and maps",
    ),
    package(
        "dpkg",
        Sign::Program("dpkg-deb"),
        "puts the Debian package together",
    ),
    package(
        "systemd",
        Sign::Program("systemd-sysusers"),
        "makes the package's user in its tests",
    ),
    package(
        "python3",
        Sign::Program("python3"),
        "plays the applications in the tests of identities",
    ),
    package(
        "python3-prometheus-client",
        Sign::File("/usr/lib/python3/dist-packages/prometheus_client/openmetrics/parser.py"),
        "the tests' second opinion on metrics",
    ),
    package(
        "iproute2",
        Sign::Program("ip"),
        "the tests' second opinion on interfaces; the benchmark's recipe",
    ),
    package(
        "ethtool",
        Sign::Program("ethtool"),
        "the tests' second opinion on interfaces' features",
    ),
    package(
        "nftables",
        Sign::Program("nft"),
        "the tests' second opinion on rules",
    ),
    package(
        "iptables",
        Sign::Program("iptables"),
        "other people's firewalls in tests; the benchmark's recipe",
    ),
    package(
        "conntrack",
        Sign::Program("conntrack"),
        "the tests' second opinion on tracked connections",
    ),
    package(
        "iputils-ping",
        Sign::Program("ping"),
        "first packets in tests",
    ),
    package(
        "procps",
        Sign::Program("sysctl"),
        "kernel settings in guests and in the benchmarks' namespaces",
    ),
    package(
        "tcpdump",
        Sign::Program("tcpdump"),
        "the tests' second opinion on packets",
    ),
    package(
        "curl",
        Sign::Program("curl"),
        "a client that nobody here wrote",
    ),
    package(
        "iperf3",
        Sign::Program("iperf3"),
        "streams and datagrams that nobody here wrote",
    ),
    package(
        "dnsmasq-base",
        Sign::Program("dnsmasq"),
        "a server of UDP that nobody here wrote",
    ),
    package("bind9-dnsutils", Sign::Program("dig"), "its client"),
    package(
        "socat",
        Sign::Program("socat"),
        "a client and a server of vsock's Unix sockets that nobody here wrote",
    ),
    package(
        "openssh-client",
        Sign::Program("ssh"),
        "a client that reaches a guest through a proxy command",
    ),
    package(
        "stunnel4",
        Sign::Program("stunnel"),
        "what the benchmark compares the relay with",
    ),
    package(
        "qemu-system-x86",
        Sign::Program("qemu-system-x86_64"),
        "guests restored from one snapshot",
    ),
    package(
        "user-mode-linux",
        Sign::Program("linux.uml"),
        "many real guests at once",
    ),
    package(
        "busybox-static",
        Sign::Program("busybox"),
        "user space of the guests",
    ),
    package(
        "podman",
        Sign::Program("podman"),
        "a real container runtime for the CNI plugin",
    ),
    package(
        "crun",
        Sign::Program("crun"),
        "starts podman's containers without cgroups",
    ),
    package(
        "containerd",
        Sign::Program("containerd"),
        "the container runtime of most Kubernetes nodes",
    ),
    package(
        "runc",
        Sign::Program("runc"),
        "starts containerd's containers",
    ),
    package(
        "python3-grpcio",
        Sign::File("/usr/lib/python3/dist-packages/grpc/__init__.py"),
        "plays the kubelet before containerd",
    ),
    package(
        "containernetworking-plugins",
        Sign::File("/usr/lib/cni/bridge"),
        "the reference plugins: in chains with ours, and beside it in the benchmark",
    ),
    package(
        "cpio",
        Sign::Program("cpio"),
        "the tests' second opinion on the guests' initramfs",
    ),
    package(
        "e2fsprogs",
        Sign::Program("mke2fs"),
        "the file system of the guest with systemd",
    ),
    package(
        "valgrind",
        Sign::Program("valgrind"),
        "the benchmark's count of instructions",
    ),
    package("xz-utils", Sign::Program("xz"), "unpacks kernels of guests"),
];

const fn package(name: &'static str, sign: Sign, reason: &'static str) -> Package {
    Package { name, sign, reason }
}

impl Package {
    fn is_present(&self) -> bool {
        match self.sign {
            Sign::Program(name) => command::find(name).is_some(),
            Sign::File(path) => Path::new(path).exists(),
        }
    }
}

/// Runs `cargo xtask setup`.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let missing = missing();
    if missing.is_empty() {
        eprintln!("setup: nothing is missing");
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.check {
        for package in &missing {
            println!("{:<18} {}", package.name, package.reason);
        }
        return Ok(ExitCode::FAILURE);
    }
    install(&missing)?;
    Ok(ExitCode::SUCCESS)
}

/// Installs what is missing, if anything is.
pub(crate) fn ensure() -> Result<()> {
    let missing = missing();
    if missing.is_empty() {
        return Ok(());
    }
    install(&missing)
}

/// Installs what is missing if it can, and says what it could not: what comes next may need little of it.
pub(crate) fn try_ensure() {
    if let Err(error) = ensure() {
        eprintln!("setup: {error:#}");
    }
}

/// The packages that are not there.
pub(crate) fn missing() -> Vec<&'static Package> {
    PACKAGES
        .iter()
        .filter(|package| !package.is_present())
        .collect()
}

fn install(missing: &[&Package]) -> Result<()> {
    let names: Vec<&str> = missing.iter().map(|package| package.name).collect();
    let by_hand = format!(
        "apt-get install -y --no-install-recommends {}",
        names.join(" ")
    );
    if command::find("apt-get").is_none() {
        bail!(
            "these Debian packages, or your system's equivalents, are missing: {}",
            names.join(" ")
        );
    }
    if !command::is_root() {
        bail!("system packages are missing and only root can install them; run:\n  sudo {by_hand}");
    }
    for package in missing {
        eprintln!("setup: installing {} ({})", package.name, package.reason);
    }
    if !package_lists_are_there() {
        apt_get(&["update"])?;
    }
    let mut arguments = vec!["install", "-y", "--no-install-recommends"];
    arguments.extend(&names);
    if apt_get(&arguments).is_err() {
        // Lists that name a version the mirror no longer has are the usual cause.
        apt_get(&["update"])?;
        apt_get(&arguments)?;
    }
    let still: Vec<&str> = missing
        .iter()
        .filter(|package| !package.is_present())
        .map(|package| package.name)
        .collect();
    if !still.is_empty() {
        bail!(
            "apt-get succeeded, but these don't show: {}",
            still.join(" ")
        );
    }
    Ok(())
}

fn apt_get(arguments: &[&str]) -> Result<()> {
    let options = [
        "-q",
        "-o",
        "DPkg::Lock::Timeout=300",
        "-o",
        "Dpkg::Use-Pty=0",
    ];
    command::program(
        "apt-get",
        options.into_iter().chain(arguments.iter().copied()),
    )
    .env("DEBIAN_FRONTEND", "noninteractive")
    .run()
    .context("installing system packages")
}

fn package_lists_are_there() -> bool {
    fs::read_dir("/var/lib/apt/lists").is_ok_and(|entries| {
        entries
            .flatten()
            .any(|entry| entry.file_name().to_string_lossy().contains("_Packages"))
    })
}
