//! The unit files, of the daemon and of the services beside it, under their own settings, in a guest with systemd.
//!
//! Inside, [`CHECK`] runs as another unit and prints what it sees on the serial console; outside, that
//! is compared with what must be. Emulated, the boot takes most of the time.

use std::time::Duration;

use sandwire_testlab::{
    guest::systemd::{self, Addition, Image, checks},
    lab,
};

const UNIT: &str = include_str!("../../../packaging/systemd/sandwire.service");

/// The services beside the daemon.
const SERVICES: [(&str, &str); 3] = [
    (
        "sandwire-impair",
        include_str!("../../../packaging/systemd/sandwire-impair.service"),
    ),
    (
        "sandwire-relay",
        include_str!("../../../packaging/systemd/sandwire-relay.service"),
    ),
    (
        "sandwire-vsock",
        include_str!("../../../packaging/systemd/sandwire-vsock.service"),
    ),
];

/// The user of the service for vsock, and what makes it where the guest's own start doesn't.
const USERS: [(&str, &str); 2] = [
    (
        "/usr/lib/sysusers.d/sandwire.conf",
        include_str!("../../../packaging/sysusers.d/sandwire.conf"),
    ),
    (
        "/etc/systemd/system/sandwire-vsock.service.d/user.conf",
        "[Service]\nExecStartPre=+/usr/bin/systemd-sysusers sandwire.conf\n",
    ),
];

/// Files for networkd: what is installed, and one of the host's own that takes every interface.
const NETWORKS: [(&str, &str); 3] = [
    (
        "10-sandwire",
        include_str!("../../../packaging/systemd/10-sandwire.network"),
    ),
    (
        "10-sandwire-shared",
        include_str!("../../../packaging/systemd/10-sandwire-shared.network"),
    ),
    (
        "50-all",
        "[Match]\nName=*\n[Network]\nDHCP=yes\nLinkLocalAddressing=yes\n",
    ),
];

/// A relay that steers and doesn't run.
const RELAY: &str = r#"
[tls]
certificate = "/keys/host.example.pem"
key = "/keys/host.example.key"
authorities = "/keys/authority.pem"
[egress]
[[peer]]
name = "beyond"
address = "203.0.113.2:4433"
server_name = "peer.example"
[[redirect]]
from = ["10.64.0.0/16", "fd00:c10e::/64"]
to = ["198.51.100.0/24", "2001:db8:5::/64"]
via = "beyond"
"#;

const CONFIG: &str = r#"
[vsock]
enabled = true
[[identity]]
name = "web"
cgroup = "/sys/fs/cgroup/web.slice"
addresses = ["10.77.0.1"]
[[identity]]
name = "db"
cgroup = "/sys/fs/cgroup/system.slice/db.service"
addresses = ["10.77.0.2"]
"#;

/// A service in a slice of its own that is there before the daemon, and one that waits for the identity of its own cgroup, as in
/// docs/identity.md.
const WITH_IDENTITY: [(&str, &str); 3] = [
    (
        "db.service",
        "[Unit]\nAfter=sandwire.service\n[Service]\nType=exec\n\
         ExecStartPre=+/usr/bin/sandwire identity show /sys/fs/cgroup/system.slice/db.service --active --wait 60\nExecStart=/bin/busybox sleep 1000\n",
    ),
    ("web.slice", "[Unit]\nBefore=sandwire.service\n"),
    (
        "web.service",
        "[Unit]\nAfter=sandwire.service\n[Service]\nType=exec\nSlice=web.slice\n\
         ExecStartPre=+/usr/bin/sandwire identity show /sys/fs/cgroup/web.slice --active\nExecStart=/bin/busybox sleep 1000\n",
    ),
];

/// Runs in the guest as a unit of its own: what it sees is seen from outside of the daemon's unit.
/// (busybox prefers its own `ip` to the one on the PATH, hence the paths.)
const CHECK: &str = r#"
exec > /dev/console 2>&1
say() { echo "check $1: $2"; }
pid() { systemctl show --property MainPID --value ${1:-sandwire}; }
capability() { sed -n "s/^$1:[[:space:]]*//p" /proc/$(pid $2)/status; }
# Kills a unit's process; over when systemd has started another one.
kill_unit() {
  old=$(pid $1)
  kill -9 $old
  for i in $(seq 100); do
    sleep 0.2
    [ "$(pid $1)" != $old ] && [ "$(systemctl is-active $1)" = active ] && break
  done
}
lease() { sandwire --json show one | grep -o '"clone_address":[^,}]*' | tr -d '\n '; }

systemd-analyze verify /etc/systemd/system/sandwire*.service > /verified 2>&1
say verified "$? $(tr '\n' ' ' < /verified)"
say active "$(systemctl is-active sandwire)"
say effective "$(capability CapEff)"
say bounding "$(capability CapBnd)"
say new-privileges "$(capability NoNewPrivs)"
# No service was in the slice yet. The first identity of an emulated machine takes its time.
for i in $(seq 100); do sandwire identity show web > /dev/null 2>&1 && break; sleep 0.2; done
systemctl start web
say identity "$(systemctl is-active web) $(/bin/ip -o address show dev lo | grep -c 10.77.0.1/32)"
systemctl stop web
say identity-stays "$(systemctl is-active web) $(sandwire identity show web | grep -c 'declared ')"
db() { echo "$(systemctl is-active db) $(sandwire --json identity show db | tr -d ' \n' | grep -o '"state":"[a-z]*"')"; }
cgroup() { sandwire --json identity show db | tr -d ' \n' | grep -o '"cgroup_id":[0-9]*'; }
say awaited "$(sandwire identity list | grep -c '10.77.0.2 .*awaited')"
systemctl start db
say own-cgroup "$(db)"
former=$(cgroup)
systemctl restart db
[ "$(cgroup)" = "$former" ] && say own-cgroup-anew no || say own-cgroup-anew "$(db)"
systemctl stop db
sandwire pool create web --size 2 --ipv4 10.64.0.0/24 --ipv6 fd00:c10e::/64 --wait
sandwire acquire web one
first=$(lease)
say lease "$first"
netns=$(sandwire --json show one | grep -o 'sandwire\.default\.web\.[0-9]*' | head -n 1)
say tap "$(/bin/ip netns exec $netns /bin/ip -o link show vmtap0 | cut -d ' ' -f 2)"
say file "$(nsenter --net=/run/netns/$netns /bin/ip -o link show uplink0 | cut -d ' ' -f 2 | cut -d @ -f 1)"
say host-table "$(nft list tables | grep -c 'inet sandwire-default')"

# Interfaces of the host's own, which its udevd gets to as well.
sandwire pool create apart --kind host --size 10 --ipv4 10.65.0.0/24 --ipv6 fd00:c10e:1::/64 --wait
udevadm settle
say udevd "$(systemctl is-active systemd-udevd)"
/bin/ip link add other0 type bridge
managed() {
  for folder in /sys/class/net/$1; do
    sed -n 's/^ADMIN_STATE=//p' /run/systemd/netif/links/$(cat $folder/ifindex)
  done | sort | uniq -c | tr -s ' ' | tr '\n' ','
}
for i in $(seq 100); do sleep 0.2; managed other0 | grep -q configur && break; done
say managed "$(managed other0)"
say unmanaged "$(managed 'sw*')"
/bin/ip link set other0 alias sandwire:other
say doctor "$(sandwire doctor | tr '\n' ' ' | grep -o 'it configures interfaces of sandboxes, [a-z0-9-]* among [0-9]*')"
# When networkd starts it takes away routing rules and routes that it doesn't know.
sandwire pool create plain --size 1 --data-path nft --ipv4 10.66.0.0/24 --ipv6 fd00:c10e:2::/64 --wait
sandwire relay keys /keys host.example
sandwire relay steer --config /etc/sandwire/relay.toml
/bin/ip route add unreachable 192.0.2.0/24
rules() { for version in -4 -6; do /bin/ip $version rule; /bin/ip $version route show table 53571; /bin/ip $version route | grep unreachable; done; }
rules > /before
say prohibited "$(grep -c ^prohibit /before)"
say unreachable "$(grep -c ^unreachable /before)"
systemctl restart systemd-networkd
for i in $(seq 100); do /bin/ip route | grep -q 192.0.2.0 || break; sleep 0.2; done
rules > /after
say lost "$(diff /before /after | grep '^[-+][a-z0-9]' | tr '\n' ',')"
say missed "$(journalctl --unit sandwire | grep -c 'unreachable route')"
sandwire relay clear
steered() { /bin/ip rule | grep -c 'lookup 53571'; }
say cleared "$(steered)"
systemctl start sandwire-relay
say relay-active "$(systemctl is-active sandwire-relay)"
say relay-effective "$(capability CapEff sandwire-relay)"
say relay-steers "$(steered)"
kill_unit sandwire-relay
say relay-again "$(systemctl is-active sandwire-relay)"
systemctl stop sandwire-relay
say relay-stopped "$(systemctl is-active sandwire-relay) $(steered)"
sandwire relay clear
say relay-cleared "$(steered)"
sandwire pool delete plain
say shared-mac "$(/bin/ip -o link show type bridge | grep -o 'link/ether [0-9a-f:]*')"
for i in $(seq 10); do sandwire acquire apart apart-$i; done
say taps "$(for i in $(seq 10); do sandwire --json show apart-$i; done | tr -d ' ' | grep -o '"used":"[a-z]*"' | sort | uniq -c | tr -s ' ')"
sandwire release $(seq 10 | sed s/^/apart-/)
sandwire pool delete apart

# Both ends where networkd doesn't get at them.
/bin/ip netns add near
/bin/ip netns add far
/bin/ip -n near link add eth0 type veth peer name far0 netns far
/bin/ip -n near address add 192.0.2.1/24 dev eth0
/bin/ip -n far address add 192.0.2.2/24 dev far0
/bin/ip -n near link set eth0 up
/bin/ip -n far link set far0 up
# Whole milliseconds of the quickest of some pings.
quickest() { /bin/ip netns exec near busybox ping -c 5 -i 0.2 192.0.2.2 | sed -n 's:.*min/avg/max = \([0-9]*\)\..*:\1:p'; }
systemctl start sandwire-impair
say impair-active "$(systemctl is-active sandwire-impair)"
say unimpaired "$(quickest)"
sandwire impair --netns /run/netns/far --interface far0 --egress 'delay 500ms'
say impaired "$(quickest)"
kill_unit sandwire-impair
say impaired-again "$(quickest)"
sandwire impair clear --netns /run/netns/far --interface far0
say impair-cleared "$(quickest)"
say impair-effective "$(capability CapEff sandwire-impair)"
systemctl stop sandwire-impair
say impair-stopped "$(systemctl is-active sandwire-impair)"
/bin/ip netns del far
/bin/ip netns del near

say vsock-active "$(systemctl is-active sandwire-vsock)"
vsock=$(pid sandwire-vsock)
say vsock-effective "$(capability CapEff sandwire-vsock) $(capability CapBnd sandwire-vsock)"
user=$(sed -n 's/^sandwire-vsock:[^:]*:\([0-9]*:[0-9]*\):.*/\1/p' /etc/passwd)
runs_as=$(capability Uid sandwire-vsock | cut -f 2):$(capability Gid sandwire-vsock | cut -f 2)
[ -n "$user" ] && [ "$runs_as" = "$user" ] && say vsock-user its-own || say vsock-user "$runs_as, not $user"
sandwire acquire web two --vsock
say vsock-socket "$(ls /run/sandwire/vsock/web.*/vhost.sock | grep -c vhost)"
say vsock-listed "$(sandwire --json vsock list two --channels | tr -d ' ' | grep -c '"attached":false')"

kill_unit sandwire
say restarted "$(systemctl show --property NRestarts --value sandwire)"
[ "$(lease)" = "$first" ] && say adopted yes || say adopted "$(lease)"

systemctl stop sandwire
say stopped "$(systemctl is-active sandwire)"
say left "$(/bin/ip netns exec $netns /bin/ip -o link show vmtap0 | cut -d ' ' -f 2)"
systemctl start sandwire
say vsock-again "$(sandwire --json vsock list two --channels | tr -d ' ' | grep -c '"attached":false')"
[ $vsock -gt 1 ] && [ "$(pid sandwire-vsock)" = $vsock ] && say vsock-same yes || say vsock-same "$vsock, $(pid sandwire-vsock)"
sandwire release two
say vsock-left "$(ls /run/sandwire/vsock | grep -c web)"
[ "$(lease)" = "$first" ] && say kept yes || say kept "$(lease)"
sandwire release one
sandwire pool delete web
say namespaces "$(ls /run/netns | grep -c sandwire)"
say failures "$(systemctl list-units --failed --no-legend | grep -c sandwire)"
systemctl status --no-pager --lines 50 sandwire
journalctl --no-pager --unit sandwire --unit sandwire-vsock --lines 80
say done yes
sync
busybox poweroff -f
"#;

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn the_units_work_under_their_own_settings() {
    let image = Image::fetch().unwrap();
    lab::run_within(Duration::from_secs(1260), |lab| {
        let after = "sandwire.service sandwire-vsock.service";
        let mut additions = systemd::host(lab.folder(), CONFIG, after, CHECK).unwrap();
        for (name, text) in SERVICES {
            let path = format!("/etc/systemd/system/{name}.service");
            additions.push(Addition::text(&path, text));
        }
        for (path, text) in USERS {
            additions.push(Addition::text(path, text));
        }
        additions.push(Addition::text("/etc/sandwire/relay.toml", RELAY));
        for (name, text) in WITH_IDENTITY {
            let path = format!("/etc/systemd/system/{name}");
            additions.push(Addition::text(&path, text));
        }
        for (name, text) in NETWORKS {
            let path = format!("/etc/systemd/network/{name}.network");
            additions.push(Addition::text(&path, text));
        }
        let arguments = "systemd.wants=systemd-networkd.service systemd.wants=sandwire-vsock.service systemd.wants=sandwire.service \
                         systemd.wants=web.slice systemd.wants=check.service";
        let patience = Duration::from_secs(1200);
        let console = image
            .run(lab.folder(), &additions, arguments, patience)
            .unwrap();
        println!("{console}");
        let seen = checks(&console);
        let check = |name: &str| seen.get(name).map_or("(nothing)", String::as_str);
        assert_eq!(check("verified"), "0", "systemd-analyze");
        assert_eq!(check("active"), "active");
        let bounding = format!("{:016x}", capabilities_of(UNIT));
        assert_eq!(check("bounding"), bounding);
        assert_eq!(check("effective"), check("bounding"));
        assert_eq!(check("new-privileges"), "1");
        assert_eq!(check("identity"), "active 1");
        assert_eq!(check("identity-stays"), "inactive 1");
        assert_eq!(check("awaited"), "1");
        assert_eq!(check("own-cgroup"), "active \"state\":\"active\"");
        assert_eq!(check("own-cgroup-anew"), check("own-cgroup"));
        assert_eq!(check("lease").matches("clone_address").count(), 2);
        assert_eq!(check("tap"), "vmtap0:", "not seen by `ip netns exec`");
        assert_eq!(check("file"), "uplink0", "not seen by nsenter");
        assert_eq!(check("host-table"), "1");
        assert_eq!(check("udevd"), "active");
        assert!(
            check("managed").contains("configur"),
            "networkd takes no interface"
        );
        assert_eq!(
            check("doctor"),
            "it configures interfaces of sandboxes, other0 among 1"
        );
        // Ten slots of `apart`, two or three of `web`, and the shared interface.
        let unmanaged = check("unmanaged");
        assert!(
            ["13 unmanaged,", "14 unmanaged,"].contains(&unmanaged),
            "{unmanaged}"
        );
        assert_eq!((check("prohibited"), check("unreachable")), ("2", "3"));
        // That of somebody else alone: that it took none of ours is not for lack of trying.
        assert!(
            check("lost").starts_with("-unreachable 192.0.2.0/24"),
            "{}",
            check("lost")
        );
        assert_eq!(check("lost").matches(',').count(), 1);
        assert_eq!(check("missed"), "0");
        assert_eq!(check("shared-mac"), "link/ether 02:73:77:68:00:01");
        assert_eq!(check("taps"), "10 \"used\":\"unused\"");
        check_relay(&check);
        check_impair(&check);
        check_vsock(&check);
        assert_eq!(check("restarted"), "1");
        assert_eq!(check("adopted"), "yes");
        assert_eq!(check("stopped"), "inactive");
        assert_eq!(check("left"), "vmtap0:", "stopping took the slot away");
        assert_eq!(check("kept"), "yes");
        assert_eq!(check("namespaces"), "0");
        assert_eq!(check("failures"), "0");
        assert_eq!(check("done"), "yes");
    });
}

fn check_relay<'a>(check: &impl Fn(&str) -> &'a str) {
    assert_eq!(check("cleared"), "0");
    assert_eq!(check("relay-active"), "active");
    // CAP_NET_ADMIN and CAP_NET_BIND_SERVICE.
    assert_eq!(check("relay-effective"), "0000000000001400");
    assert_ne!(check("relay-steers"), "0");
    assert_eq!(check("relay-again"), "active");
    let stopped = format!("inactive {}", check("relay-steers"));
    assert_eq!(check("relay-stopped"), stopped, "what is redirected leaves");
    assert_eq!(check("relay-cleared"), "0");
}

fn check_vsock<'a>(check: &impl Fn(&str) -> &'a str) {
    assert_eq!(check("vsock-active"), "active");
    let none = "0000000000000000";
    assert_eq!(check("vsock-effective"), format!("{none} {none}"));
    assert_eq!(check("vsock-user"), "its-own");
    assert_eq!(check("vsock-socket"), "1");
    assert_eq!(check("vsock-listed"), "1");
    assert_eq!(check("vsock-again"), "1", "not after the daemon's restarts");
    assert_eq!(check("vsock-same"), "yes", "it is another process");
    assert_eq!(check("vsock-left"), "0");
}

fn check_impair<'a>(check: &impl Fn(&str) -> &'a str) {
    assert_eq!(check("impair-active"), "active");
    // What the unit gives but CAP_SETPCAP, by which the service gives up the rest.
    let kept = capabilities_of(SERVICES[0].1) & !(1 << 8);
    assert_eq!(check("impair-effective"), format!("{kept:016x}"));
    for (name, is_late) in [
        ("unimpaired", false),
        ("impaired", true),
        ("impaired-again", true),
        ("impair-cleared", false),
    ] {
        let quickest: u64 = check(name).parse().expect("whole milliseconds");
        assert_eq!(quickest >= 500, is_late, "{name}: {quickest} ms");
    }
    assert_eq!(check("impair-stopped"), "inactive");
}

/// The set that a unit lists, as the kernel counts capabilities.
fn capabilities_of(unit: &str) -> u64 {
    let line = unit
        .lines()
        .find_map(|line| line.strip_prefix("CapabilityBoundingSet="))
        .expect("the unit has a bounding set");
    let number = |name: &str| match name {
        "CAP_CHOWN" => 0,
        "CAP_DAC_OVERRIDE" => 1,
        "CAP_KILL" => 5,
        "CAP_SETPCAP" => 8,
        "CAP_NET_BIND_SERVICE" => 10,
        "CAP_NET_ADMIN" => 12,
        "CAP_NET_RAW" => 13,
        "CAP_SYS_PTRACE" => 19,
        "CAP_SYS_ADMIN" => 21,
        "CAP_PERFMON" => 38,
        "CAP_BPF" => 39,
        other => panic!("{other} is not known to this test"),
    };
    line.split_whitespace()
        .fold(0, |set, name| set | 1 << number(name))
}
