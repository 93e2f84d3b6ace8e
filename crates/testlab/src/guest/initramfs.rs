//! The guests' user space: busybox, kernel modules, a network set once, and a web server.
//!
//! The web server stores a value in the guest's memory and acts inside the guest on request:
//! `/cgi-bin/value` (GET, POST), `/cgi-bin/fetch?HOST:PORT/SECONDS` (over HTTP), `/cgi-bin/ping?ADDRESS`,
//! and `/cgi-bin/run`, which runs the shell script in a POST's body.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use super::cpio::Archive;
use crate::{command, fake_guest::GuestNetwork};

/// Prints this on the console when the web server listens.
pub const READY_LINE: &str = "guest: ready";

/// Makes the initramfs of a guest. Modules are loaded in the given order, the network is set up on
/// the first Ethernet interface, and the script runs last, before the guest idles.
///
/// # Errors
/// If busybox or a module can't be read, or busybox isn't a static executable.
pub fn build(network: &GuestNetwork, modules: &[PathBuf], script: &str) -> Result<Vec<u8>> {
    build_with(network, modules, &[], script)
}

/// Like [`build`], with programs of this machine under `/usr/bin`: their names there and their files.
///
/// # Errors
/// If something can't be read, or busybox isn't a static executable.
pub fn build_with(
    network: &GuestNetwork,
    modules: &[PathBuf],
    programs: &[(String, PathBuf)],
    script: &str,
) -> Result<Vec<u8>> {
    let mut archive = base()?;
    add_programs(&mut archive, programs)?;
    let load = add_modules(&mut archive, modules)?;
    let init = format!("{INIT_HEAD}{load}{}{script}\n{INIT_TAIL}", up(network));
    archive.executable("init", init.as_bytes());
    archive.executable("www/cgi-bin/value", VALUE.as_bytes());
    archive.executable("www/cgi-bin/fetch", FETCH.as_bytes());
    archive.executable("www/cgi-bin/ping", PING.as_bytes());
    archive.executable("www/cgi-bin/run", RUN.as_bytes());
    Ok(archive.finish())
}

/// Adds kernel modules; returns the script that loads them in this order.
pub(super) fn add_modules(archive: &mut Archive, modules: &[PathBuf]) -> Result<String> {
    let mut load = String::new();
    for module in modules {
        let name = module
            .file_name()
            .and_then(|name| name.to_str())
            .with_context(|| format!("{} is not a module", module.display()))?;
        let content =
            fs::read(module).with_context(|| format!("read the module {}", module.display()))?;
        archive.file(&format!("modules/{name}"), &content);
        let _ = writeln!(load, "insmod /modules/{name}");
    }
    Ok(load)
}

/// An archive with busybox and the folders that a system needs.
pub(super) fn base() -> Result<Archive> {
    base_with(Path::new("/bin/busybox"))
}

/// Like [`base`], with another busybox.
pub(super) fn base_with(busybox: &Path) -> Result<Archive> {
    let busybox = fs::read(busybox).context("read busybox (package busybox-static)")?;
    // A dynamically linked one names its loader; in an initramfs it would not start.
    let needs_loader = busybox
        .windows(10)
        .any(|window| window == b"/ld-linux-" || window == b"/ld-musl-x");
    ensure!(
        !needs_loader,
        "busybox is dynamically linked: install busybox-static"
    );
    let mut archive = Archive::default();
    archive.executable("bin/busybox", &busybox);
    archive.symlink("bin/sh", "busybox");
    for folder in ["proc", "sys", "dev", "tmp", "www"] {
        archive.folder(folder);
    }
    archive.character_device("dev/console", 5, 1);
    Ok(archive)
}

/// A copy without debugging information, which would fill the guest's memory.
pub(super) fn stripped(executable: &Path, folder: &Path, name: &str) -> Result<PathBuf> {
    let copy = folder.join(name);
    command::output_of(
        Command::new("strip")
            .arg("-o")
            .args([&copy, &executable.to_owned()]),
    )?;
    Ok(copy)
}

/// Adds executables under `usr/bin`, and their libraries where the loader looks for them.
pub(super) fn add_programs(archive: &mut Archive, executables: &[(String, PathBuf)]) -> Result<()> {
    let mut libraries = BTreeSet::new();
    for (name, path) in executables {
        let content = fs::read(path).with_context(|| format!("read {}", path.display()))?;
        archive.executable(&format!("usr/bin/{name}"), &content);
        let text = command::output_of(Command::new("ldd").arg(path)).unwrap_or_default();
        libraries.extend(libraries_of(&text));
    }
    for library in libraries {
        let content = fs::read(&library).with_context(|| format!("read {}", library.display()))?;
        let path = library.to_string_lossy();
        archive.executable(path.trim_start_matches('/'), &content);
    }
    Ok(())
}

/// The files in what `ldd` prints; nothing for a static executable.
fn libraries_of(text: &str) -> Vec<PathBuf> {
    text.lines()
        .flat_map(str::split_whitespace)
        .filter(|word| word.starts_with('/'))
        .map(PathBuf::from)
        .collect()
}

fn up(network: &GuestNetwork) -> String {
    let [a, b, c, d, e, f] = network.mac;
    let (ipv4, ipv4_length) = network.ipv4;
    let (ipv6, ipv6_length) = network.ipv6;
    let (gateway4, gateway6) = (network.ipv4_gateway, network.ipv6_gateway);
    format!(
        "\
for nic in eth0 vec0; do [ -e /sys/class/net/$nic ] && break; done
ip link set lo up
ip link set $nic address {a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}
echo 0 > /proc/sys/net/ipv6/conf/$nic/accept_dad
echo 0 > /proc/sys/net/ipv6/conf/$nic/accept_ra
ip address add {ipv4}/{ipv4_length} dev $nic
ip address add {ipv6}/{ipv6_length} dev $nic
ip link set $nic up
ip route add default via {gateway4}
ip -6 route add default via {gateway6} dev $nic
for gateway in {gateway4} {gateway6}; do
  tries=0
  until ping -c 1 -W 1 $gateway > /dev/null 2>&1 || [ $tries = 10 ]; do tries=$((tries + 1)); done
done
httpd -h /www
"
    )
}

/// Makes the tools usable and mounts what they need.
pub(super) const INIT_HEAD: &str = "\
#!/bin/sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev 2>/dev/null
";

const INIT_TAIL: &str = "\
echo 'guest: ready'
while :; do sleep 3600; done
";

const VALUE: &str = "\
#!/bin/sh
if [ \"$REQUEST_METHOD\" = POST ]; then
  head -c \"$CONTENT_LENGTH\" > /tmp/value.$$
  mv /tmp/value.$$ /tmp/value
fi
printf 'Content-Type: text/plain\\r\\n\\r\\n'
cat /tmp/value 2>/dev/null
exit 0
";

// Not wget: a static glibc's getservbyname, which it calls, crashes without its libraries.
const FETCH: &str = "\
#!/bin/sh
printf 'Content-Type: text/plain\\r\\n\\r\\n'
server=${QUERY_STRING%/*}
host=${server%:*}
host=${host#[}
printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w ${QUERY_STRING##*/} \"${host%]}\" ${server##*:} 2>&1 | sed '1,/^\\r*$/d'
";

const RUN: &str = "\
#!/bin/sh
printf 'Content-Type: text/plain\\r\\n\\r\\n'
head -c \"$CONTENT_LENGTH\" > /tmp/run.$$
sh /tmp/run.$$ 2>&1
rm /tmp/run.$$
exit 0
";

const PING: &str = "\
#!/bin/sh
printf 'Content-Type: text/plain\\r\\n\\r\\n'
ping -c 1 -W 2 \"$QUERY_STRING\" > /tmp/ping.$$ 2>&1 && echo answered || echo silent
cat /tmp/ping.$$
rm /tmp/ping.$$
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read_off_what_ldd_prints() {
        let text = "\tlinux-vdso.so.1 (0x00007f)\n\tlibc.so.6 => /lib/libc.so.6 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        assert_eq!(
            libraries_of(text),
            [
                PathBuf::from("/lib/libc.so.6"),
                PathBuf::from("/lib64/ld-linux-x86-64.so.2")
            ]
        );
        assert!(libraries_of("\tstatically linked\n").is_empty());
    }
}
