//! Real guests: Linux in user mode, a kernel as a process on a TAP.
//!
//! How it is started, and what it needs for that, is in [`sandwire_user_mode_linux`]; user space is a static busybox.
//! Everything that differs between guests is on the kernel's command line, so all share one initramfs.
//!
//! A guest takes TCP on port 5001 and throws it away. It also tries again and again to connect to who
//! is beyond the uplink, on a port for each size of write, and then writes zeros.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::Child,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
pub(crate) use sandwire_user_mode_linux::missing;
use sandwire_user_mode_linux::{self as user_mode_linux, BUSYBOX, Start};

use crate::{way::Sandbox, way::mac_text, world};

/// The last line that a guest prints when all is well.
pub(crate) const READY: &str = "guest: ready";

/// A running guest. It is killed when dropped.
pub(crate) struct Linux {
    child: Child,
    console: PathBuf,
}

impl Linux {
    /// Starts a guest on a sandbox's TAP. Its files go into `folder`, by its name.
    pub(crate) fn start(
        sandbox: &Sandbox,
        folder: &Path,
        name: &str,
        sends_to: Option<Ipv4Addr>,
    ) -> Result<Self> {
        let console = folder.join(format!("{name}.console"));
        let output = File::create(&console).context("cannot write a guest's console")?;
        let sends_to = sends_to.map_or_else(String::new, |address| address.to_string());
        let start = Start {
            tap: &sandbox.tap,
            folder,
            name,
            initramfs: &folder.join(INITRAMFS),
        };
        let mut command = world::command_in(&sandbox.namespace, user_mode_linux::PROGRAM);
        start.complete(&mut command);
        let child = command
            .arg(format!("guest_mac={}", mac_text(sandbox.mac)))
            .arg(format!(
                "guest_address={}/{}",
                sandbox.guest, sandbox.prefix_length
            ))
            .arg(format!("guest_gateway={}", sandbox.gateway))
            .arg(format!("guest_sends_to={sends_to}"))
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .context("cannot start user-mode Linux")?;
        Ok(Self { child, console })
    }

    /// Waits until the guest is set up.
    pub(crate) fn wait_ready(&mut self, deadline: Instant) -> Result<()> {
        loop {
            let console = self.console();
            if console.contains(READY) {
                return Ok(());
            }
            let ended = self.child.try_wait().context("cannot look at a guest")?;
            if ended.is_some() || Instant::now() > deadline {
                bail!("a guest did not get ready: {}", self.last_words());
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// The end of what the guest has printed.
    pub(crate) fn last_words(&self) -> String {
        let console = self.console();
        let lines: Vec<&str> = console.lines().collect();
        lines[lines.len().saturating_sub(5)..].join(" / ")
    }

    fn console(&self) -> String {
        let bytes = fs::read(&self.console).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Stops the guest's kernel where it is, or lets it go on. Its other processes are traced by it, and
    /// wait for it at their next system call; a signal of their own would confuse it.
    pub(crate) fn freeze(&self, is_frozen: bool) -> Result<()> {
        let signal = if is_frozen {
            Signal::STOP
        } else {
            Signal::CONT
        };
        kill_process(Pid::from_child(&self.child), signal).context("cannot signal a guest")
    }
}

impl Drop for Linux {
    fn drop(&mut self) {
        // It has a process group of its own, whose first process is the child: nobody else is hit.
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        let _ = self.child.wait();
    }
}

/// Name of the initramfs in the guests' folder.
const INITRAMFS: &str = "guest.cpio";
/// The ports that a guest connects to, and the size of its writes there.
pub(crate) const SIZES: [(u16, u32); 2] = [(5064, 64), (5016, 16_384)];

/// Writes the guests' user space into their folder, and what else they need.
pub(crate) fn prepare(folder: &Path) -> Result<()> {
    let busybox = fs::read(BUSYBOX).context("cannot read busybox")?;
    let is_dynamic = busybox.windows(10).any(|window| window == b"/ld-linux-");
    ensure!(
        !is_dynamic,
        "{BUSYBOX} is not static: install busybox-static"
    );
    let mut archive = Archive::default();
    archive.entry("bin", 0o040_755, &[]);
    for folder in ["proc", "sys", "dev"] {
        archive.entry(folder, 0o040_755, &[]);
    }
    archive.entry("bin/busybox", 0o100_755, &busybox);
    archive.entry("bin/sh", 0o120_777, b"busybox");
    archive.entry("init", 0o100_755, init().as_bytes());
    archive.entry("bin/drain", 0o100_755, DRAIN.as_bytes());
    for (_, size) in SIZES {
        let pour = format!("#!/bin/sh\nexec dd if=/dev/zero bs={size} 2>/dev/null\n");
        archive.entry(&format!("bin/pour{size}"), 0o100_755, pour.as_bytes());
    }
    fs::write(folder.join(INITRAMFS), archive.finish()).context("cannot write an initramfs")?;
    user_mode_linux::prepare(folder)
}

fn init() -> String {
    let pours = SIZES.map(|(port, size)| {
        format!(
            "[ -z \"$guest_sends_to\" ] || while :; do \
             nc $guest_sends_to {port} -e /bin/pour{size} 2>/dev/null; usleep 100000; done &\n"
        )
    });
    format!("{INIT}{}{INIT_TAIL}", pours.concat())
}

const INIT: &str = "\
#!/bin/sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev 2>/dev/null
ip link set lo up
ip link set vec0 address $guest_mac
ip address add $guest_address dev vec0
ip link set vec0 up
ip route add default via $guest_gateway
nc -ll -p 5001 -e /bin/drain &
";
const INIT_TAIL: &str = "\
echo 'guest: ready'
while :; do sleep 3600; done
";
const DRAIN: &str = "#!/bin/sh\nexec dd of=/dev/null bs=65536 2>/dev/null\n";

/// An archive in cpio's \"newc\" format, which a kernel unpacks as its first file system.
/// Documentation/driver-api/early-userspace/buffer-format.rst in the kernel's source.
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    names: BTreeSet<String>,
}

impl Archive {
    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.names.insert(name.to_owned());
        let number = self.names.len();
        let header = format!(
            "070701{number:08x}{mode:08x}{0:08x}{0:08x}{1:08x}{0:08x}{length:08x}{0:08x}{0:08x}{0:08x}{0:08x}{name_length:08x}{0:08x}",
            0,
            1,
            length = content.len(),
            name_length = name.len() + 1,
        );
        self.bytes.extend_from_slice(header.as_bytes());
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        let length = self.bytes.len().next_multiple_of(4);
        self.bytes.resize(length, 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_an_archive_begins_at_a_multiple_of_four() {
        let mut archive = Archive::default();
        archive.entry("bin/tool", 0o100_755, b"#!/bin/sh\n");
        archive.entry("bin/alias", 0o120_777, b"tool");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        let starts = bytes.windows(6).enumerate();
        let headers: Vec<usize> = starts
            .filter_map(|(at, window)| (window == b"070701").then_some(at))
            .collect();
        assert_eq!(headers.len(), 3);
        assert!(headers.iter().all(|at| at % 4 == 0));
        assert_eq!(
            &bytes[headers[0] + 54..headers[0] + 62],
            b"0000000a",
            "file size"
        );
        assert_eq!(
            &bytes[headers[0] + 94..headers[0] + 102],
            b"00000009",
            "name size"
        );
        assert_eq!(&bytes[headers[0] + 110..headers[0] + 119], b"bin/tool\0");
    }

    #[test]
    fn the_guest_connects_on_a_port_for_each_size() {
        let script = init();
        assert!(
            script.contains("nc $guest_sends_to 5064 -e /bin/pour64 "),
            "{script}"
        );
        assert!(script.trim_end().ends_with("done"));
    }
}
