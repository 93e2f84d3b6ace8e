//! Another kernel under a test: the test's own executable, run in a QEMU guest.
//!
//! The guest's initramfs holds the test executable, the `sandwire` executable, the programs that labs
//! use, and every library that these ask for, all copied from this machine. So whatever a lab can do
//! here it can do there, as far as the kernel lets it. [`crate::lab::run_on`] is how tests use it.

use std::{
    fmt::Write as _,
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use super::{
    cpio::Archive,
    emulation::{Boot, PLUG_LINE},
    initramfs::{self, add_programs, stripped},
    kernel::Kernel,
    python,
};
use crate::{command, lab::FILES, sandwire};

/// What the guest is to run: one test of an executable, in namespaces of its own.
#[derive(Clone, Debug)]
pub struct Job<'a> {
    /// The test executable.
    pub executable: &'a Path,
    /// Its arguments.
    pub arguments: &'a [&'a str],
    /// Environment variables, for it alone.
    pub variables: &'a [(&'a str, &'a str)],
    /// A folder whose files it finds in [`crate::lab::FILES`].
    pub files: &'a Path,
    /// How the machine is.
    pub setting: Setting,
}

/// What may be said of a machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Setting {
    /// Whether it has room for a second processor, for [`plug_in_processor`].
    pub spare_processor: bool,
    /// Whether the job finds two cards of virtio-net in its network namespace, [`CARDS`], with a cable between them.
    pub cards: bool,
    /// More arguments of its kernel.
    pub kernel_arguments: &'static str,
}

/// Names of the two cards.
pub const CARDS: [&str; 2] = ["eth0", "eth1"];

/// How a job ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// What the executable exited with; none if the guest ended before.
    pub status: Option<i32>,
    /// Everything on the guest's console.
    pub console: String,
}

/// Boots a kernel, runs the job there, and waits until the guest powers itself off. Files go into
/// `folder`.
///
/// # Errors
/// If the guest can't be made, or doesn't end in time; the error then holds its console.
pub fn run(kernel: &Kernel, folder: &Path, job: &Job<'_>, patience: Duration) -> Result<Ended> {
    let console = Boot {
        name: "machine",
        folder,
        kernel,
        initramfs: &build(kernel, folder, job)?,
        memory: "1024M",
        disk: None,
        spare_processor: job.setting.spare_processor,
        cards: job.setting.cards,
        arguments: job.setting.kernel_arguments,
    }
    .run(patience)?;
    let status = console
        .lines()
        .find_map(|line| line.strip_prefix(STATUS_LINE))
        .and_then(|status| status.trim().parse().ok());
    Ok(Ended { status, console })
}

/// Called by a job in its guest: asks for the spare processor and switches it on. It is the processor numbered 1.
///
/// # Errors
/// If the machine has none, or the kernel doesn't take it in within a minute.
pub fn plug_in_processor() -> Result<()> {
    fs::write("/dev/console", format!("\n{PLUG_LINE}\n")).context("ask for a processor")?;
    let switch = Path::new("/sys/devices/system/cpu/cpu1/online");
    let deadline = Instant::now() + Duration::from_secs(60);
    while !switch.exists() {
        ensure!(Instant::now() < deadline, "no processor was plugged in");
        thread::sleep(Duration::from_millis(50));
    }
    if fs::read_to_string(switch)?.trim() != "1" {
        fs::write(switch, "1").with_context(|| format!("switch on by {}", switch.display()))?;
    }
    Ok(())
}

/// The job's network namespace, where it has to be made before.
const NETWORK: &str = "machine";

/// Before the job's exit status on the console.
const STATUS_LINE: &str = "machine: exit status ";

/// Programs that labs and the product run; the shell because busybox's own prefers its own `ip`.
const PROGRAMS: &[&str] = &[
    "bpftool", "ethtool", "findmnt", "ip", "mount", "nft", "nsenter", "ping", "setpriv", "sh",
    "sysctl", "tc", "tcpdump", "umount", "unshare",
];

/// `tcpdump` becomes a user of its own before it reads anything.
const USERS: &[u8] = b"root:x:0:0::/root:/bin/sh\ntcpdump:x:100:100::/:/bin/false\n";

/// What the product and its tests need of the kernel.
pub(super) const MODULES: &[&str] = &[
    "tun",
    "veth",
    "bridge",
    "vxlan",
    "macvlan",
    "ipvlan",
    "sch_ingress",
    "sch_fq",
    "sch_netem",
    "cls_bpf",
    "nf_tables",
    "nft_chain_nat",
    "nft_connlimit",
    "nft_ct",
    "nft_fib_inet",
    "nft_limit",
    "nft_log",
    "nft_masq",
    "nft_nat",
    "nft_redir",
    "nft_reject_inet",
    "nft_socket",
    "nft_tproxy",
    "nf_conntrack_netlink",
    "sctp",
    "vsock_loopback",
];

fn build(kernel: &Kernel, folder: &Path, job: &Job<'_>) -> Result<Vec<u8>> {
    let mut archive = initramfs::base()?;
    for path in ["run", "etc", "root", "var", FILES.trim_start_matches('/')] {
        archive.folder(path);
    }
    archive.symlink("var/run", "/run");
    archive.file("etc/passwd", USERS);
    let of_cards: &[&str] = match job.setting.cards {
        true => &["virtio_pci", "virtio_net"],
        false => &[],
    };
    let modules = kernel.modules_for(&[MODULES, of_cards].concat())?;
    let load = initramfs::add_modules(&mut archive, &modules)?;
    let mut executables = vec![(JOB.to_owned(), stripped(job.executable, folder, "job")?)];
    let mut variables = String::new();
    if let Ok(path) = sandwire::executable() {
        executables.push(("sandwire".to_owned(), stripped(&path, folder, "sandwire")?));
        variables.push_str("SANDWIRE_EXECUTABLE=/usr/bin/sandwire ");
    }
    for program in PROGRAMS {
        let path = command::find(program).with_context(|| format!("no {program} on the PATH"))?;
        executables.push(((*program).to_owned(), path));
    }
    executables.push(("python3".to_owned(), python::INTERPRETER.into()));
    add_programs(&mut archive, &executables)?;
    python::add_modules(&mut archive)?;
    add_files(&mut archive, job.files)?;
    for (name, value) in job.variables {
        let _ = write!(variables, "{name}='{value}' ");
    }
    let (network, enter) = if job.setting.cards {
        (
            network_with_cards(),
            format!("nsenter --net=/run/netns/{NETWORK} unshare"),
        )
    } else {
        (String::new(), "unshare --net".to_owned())
    };
    let init = format!(
        "{}export PATH=/usr/bin:/bin\n\
         {load}\
         ip link set lo up\n\
         mount -t cgroup2 cgroup2 /sys/fs/cgroup\n\
         {network}\
         {variables} RUST_BACKTRACE=1 {enter} --mount --pid --uts --ipc --propagation private \
         --mount-proc --fork -- /usr/bin/{JOB} {}\n\
         status=$?\n\
         echo\n\
         echo \"{STATUS_LINE}$status\"\n\
         busybox poweroff -f\n",
        initramfs::INIT_HEAD,
        job.arguments.join(" "),
    );
    archive.executable("init", init.as_bytes());
    Ok(archive.finish())
}

/// Lines that make a network namespace with the cards. By its path, `ip` isn't the shell's own.
fn network_with_cards() -> String {
    let mut lines = format!("/usr/bin/ip netns add {NETWORK}\n");
    for card in CARDS {
        let _ = writeln!(lines, "/usr/bin/ip link set {card} netns {NETWORK}");
    }
    lines
}

fn add_files(archive: &mut Archive, folder: &Path) -> Result<()> {
    let listed = fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))?;
    for entry in listed {
        let path = entry?.path();
        let content = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        let name = path.file_name().unwrap_or_default().display().to_string();
        archive.file(
            &format!("{}/{name}", FILES.trim_start_matches('/')),
            &content,
        );
    }
    Ok(())
}

/// Name of the test executable in the guest.
const JOB: &str = "lab-test";
