//! The package on a host with systemd: installed, exchanged, removed and purged by dpkg, with a sandbox in use.
//!
//! Inside, [`CHECK`] runs as a unit and prints what it sees on the serial console; outside, that is compared with what must be.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::Path,
    time::Duration,
};

use sandwire_testlab::{
    guest::systemd::{Addition, Image, checks},
    lab, sandwire,
};

use super::build;
use crate::workspace;

const VERSIONS: [&str; 2] = ["1.0.0", "1.0.1"];

/// What starts the script.
const UNIT: &str = "[Service]\nType=oneshot\nExecStart=/bin/dash /check\n";

/// Runs in the guest as a unit of its own. No package of the guest's is known to its dpkg, so what ours depends on isn't either.
const CHECK: &str = r#"
exec > /dev/console 2>&1
# The image's shell is busybox, which prefers its own dpkg and stat.
ln -sf dash /bin/sh
say() { echo "check $1: $2"; }
state() { systemctl is-active $1; }
pid() { systemctl show --property MainPID --value $1; }
namespaces() { ls /run/netns 2> /dev/null | grep -c sandwire; }
tables() { nft list tables | grep -c sandwire; }
finish() { sync; busybox poweroff -f; }
install() {
  dpkg --force-depends --force-confold -i $1 > /said 2>&1
  done=$?
  cat /said
  say "$2" "$done"
  [ $done = 0 ] || finish
}
mkdir -p /var/lib/dpkg/info /var/lib/dpkg/updates
: > /var/lib/dpkg/status

install /packages/first.deb installed
say after-installing "$(state sandwire) $(systemctl is-enabled sandwire)"
echo '[vsock]' >> /etc/sandwire/sandwire.toml
echo 'enabled = true' >> /etc/sandwire/sandwire.toml
systemctl enable --now sandwire-vsock sandwire
say enabled "$(state sandwire) $(state sandwire-vsock)"
user() { sed -n 's/^sandwire-vsock:[^:]*:\([0-9]*\):.*/\1/p' /etc/passwd; }
runs_as() { sed -n 's/^Uid:[[:space:]]*[0-9]*[[:space:]]*\([0-9]*\).*/\1/p' /proc/$(pid sandwire-vsock)/status; }
[ "$(user)" -gt 0 ] && [ "$(runs_as)" = "$(user)" ] && say user its-own || say user "$(runs_as), not $(user)"
sandwire pool create web --size 2 --ipv4 10.64.0.0/24 --ipv6 fd00:c10e::/64 --wait
sandwire acquire web one
lease() { sandwire --json show one | grep -o '"clone_address":[^,}]*' | tr -d '\n '; }
first=$(lease)
say lease "$first"
netns=$(sandwire --json show one | grep -o 'sandwire\.default\.web\.[0-9]*' | head -n 1)
[ -n "$netns" ] || finish

old=$(pid sandwire)
vsock=$(pid sandwire-vsock)
install /packages/second.deb upgraded
say told "$(grep -c 'sandwire-vsock still runs the former version' /said)"
[ "$(pid sandwire)" != $old ] && say exchanged "$(state sandwire)"
[ "$(pid sandwire-vsock)" = $vsock ] && say left-alone "$(state sandwire-vsock)"
[ "$(lease)" = "$first" ] && say adopted yes
say configuration "$(grep -c 'enabled = true' /etc/sandwire/sandwire.toml)"

dpkg -r sandwire
say removed "$? $(state sandwire) $(state sandwire-vsock)"
say executable "$(ls /usr/bin/sandwire 2> /dev/null)"
say tap "$(/bin/ip netns exec $netns /bin/ip -o link show vmtap0 | cut -d ' ' -f 2)"
/bin/ip netns exec $netns sleep 1000 &
user=$!
for i in $(seq 100); do /bin/ip netns pids $netns | grep -q $user && break; sleep 0.1; done
dpkg -P sandwire > /said 2>&1
say purged-in-use "$? $(namespaces) $(grep -c "$netns\|web" /said)"
cat /said
kill $user
wait $user
dpkg -P sandwire
say purged "$?"
say namespaces "$(namespaces)"
say tables "$(tables)"
say interfaces "$(/bin/ip -o link | grep -c 'sw')"
say left "$(ls -d /run/sandwire /var/lib/sandwire /etc/sandwire /sys/fs/bpf/sandwire* /etc/systemd/system/*/sandwire* /usr/share/doc/sandwire 2> /dev/null | tr '\n' ' ')"

install /packages/second.deb again
systemctl start sandwire
say again-active "$(state sandwire)"
say pools "$(sandwire --json pool list | tr -d ' \n')"
say failures "$(systemctl list-units --failed --no-legend | grep -c sandwire)"
journalctl --no-pager --unit sandwire --lines 30
say done yes
finish
"#;

/// An executable as a package of that version, compressed as little as an emulated guest has memory for.
fn package(executable: &Path, version: &str) -> Vec<u8> {
    let (tree, folder) = (workspace::root(), executable.parent().unwrap());
    let quickly = ["-Zgzip", "-z1"];
    let package = build(tree, executable, version, folder, &quickly).unwrap();
    fs::read(package).unwrap()
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn dpkg_installs_exchanges_removes_and_purges_under_a_sandbox() {
    let image = Image::with_dpkg().unwrap();
    lab::run_within(Duration::from_secs(960), |lab| {
        let mut additions = vec![
            Addition::text("/etc/systemd/system/check.service", UNIT),
            Addition::text("/check", CHECK),
        ];
        let executable = lab.folder().join("sandwire");
        fs::write(&executable, sandwire::stripped(lab.folder()).unwrap()).unwrap();
        fs::set_permissions(&executable, Permissions::from_mode(0o755)).unwrap();
        for (name, version) in ["first", "second"].into_iter().zip(VERSIONS) {
            additions.push(Addition {
                path: format!("/packages/{name}.deb"),
                content: package(&executable, version),
                executable: false,
            });
        }
        let arguments = "systemd.wants=check.service";
        let patience = Duration::from_secs(900);
        let console = image
            .run(lab.folder(), &additions, arguments, patience)
            .unwrap();
        println!("{console}");
        let seen = checks(&console);
        let check = |name: &str| seen.get(name).map_or("(nothing)", String::as_str);
        assert_eq!(check("installed"), "0");
        assert_eq!(check("after-installing"), "inactive disabled");
        assert_eq!(check("enabled"), "active active");
        assert_eq!(check("user"), "its-own");
        assert_eq!(check("lease").matches("clone_address").count(), 2);
        check_exchange(&check);
        check_removal(&check);
        assert_eq!(check("again"), "0");
        assert_eq!(check("again-active"), "active");
        assert_eq!(check("pools"), "[]");
        assert_eq!(check("failures"), "0");
        assert_eq!(check("done"), "yes");
    });
}

fn check_exchange<'a>(check: &impl Fn(&str) -> &'a str) {
    assert_eq!(check("upgraded"), "0");
    assert_eq!(check("told"), "1");
    assert_eq!(check("exchanged"), "active");
    assert_eq!(check("left-alone"), "active");
    assert_eq!(check("adopted"), "yes");
    assert_eq!(check("configuration"), "1", "it is the administrator's");
}

fn check_removal<'a>(check: &impl Fn(&str) -> &'a str) {
    assert_eq!(check("removed"), "0 inactive inactive");
    assert_eq!(check("executable"), "");
    assert_eq!(check("tap"), "vmtap0:", "a removal took a network away");
    let refused: Vec<&str> = check("purged-in-use").split(' ').collect();
    assert_ne!(refused[0], "0", "it took the network of one in use");
    assert_ne!(refused[1], "0", "the slot is gone");
    assert_ne!(refused[2], "0", "it doesn't say who is in the way");
    assert_eq!(check("purged"), "0");
    for gone in ["namespaces", "tables", "interfaces"] {
        assert_eq!(check(gone), "0", "{gone}");
    }
    assert_eq!(check("left"), "");
}
