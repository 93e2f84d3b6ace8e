//! Beside NetworkManager, in a guest with systemd: what it does to interfaces of sandboxes, what keeps it from that, and that
//! the rest is put right.
//!
//! Inside, [`CHECK`] runs as another unit and prints what it sees on the serial console; outside, that is compared with what
//! must be.

use std::time::Duration;

use sandwire_testlab::{
    guest::systemd::{self, Addition, Image, checks},
    lab,
};

/// As on Fedora and its like: all interfaces that it finds are its affair.
const NETWORK_MANAGER: &str = "[main]\nplugins=keyfile\n";
/// What is installed for it, at first where it doesn't look.
const CONFIG: &str = include_str!("../../../packaging/NetworkManager/10-sandwire.conf");
const SANDWIRE: &str = "audit_seconds = 2\n";
/// (busybox prefers its own `ip` to the one on the PATH, hence the paths.)
const CHECK: &str = r#"
exec > /dev/console 2>&1
say() { echo "check $1: $2"; }
state() { nmcli -g GENERAL.STATE device show $1; }
shared() { /bin/ip -o link show type bridge | cut -d ' ' -f 2 | tr -d ':@'; }
addresses() { /bin/ip -o address show dev $(shared) | grep -c inet; }
damage() { journalctl --unit sandwire | grep -c 'address .* is missing or changed'; }
mended() { journalctl --unit sandwire | grep -q addrgenmode && echo yes || echo no; }
damaged() { [ $(damage) -gt 0 ] && echo yes || echo no; }
making() { for i in /sys/class/net/sw*; do /bin/ip -d link show ${i##*/}; done | grep -c 'addrgenmode eui64'; }
own() { for i in /sys/class/net/sw*; do /bin/ip -6 -o address show dev ${i##*/}; done | grep -c fe80; }
doctor() { sandwire doctor | tr '\n' ' ' | grep -o 'it has interfaces of sandboxes in its care, [a-z0-9-]* among [0-9]*'; }
# Waits until a command says what it is to say; says at last what it says.
until_it_says() { for i in $(seq 100); do [ "$($1)" = "$2" ] && break; sleep 0.3; done; $1; }
all_unmanaged() { nmcli -g DEVICE,STATE device | grep '^sw' | grep -vc ':unmanaged$'; }

say active "$(systemctl is-active NetworkManager)"
sandwire pool create apart --kind host --size 10 --ipv4 10.65.0.0/24 --ipv6 fd00:c10e:1::/64 --wait > /dev/null
sandwire pool create web --size 3 --ipv4 10.64.0.0/24 --ipv6 fd00:c10e::/64 --wait > /dev/null
udevadm settle
sandwire acquire apart one > /dev/null
sandwire exec one -- sleep 300 &
external() { state $(shared); }
loopback() { state lo; }
say taken "$(until_it_says external '100 (connected (externally))')"
say doctor "$(doctor)"
say before "$(addresses)"
mkdir /sys/fs/cgroup/x
sandwire identity add /sys/fs/cgroup/x --address 10.77.0.5 --address fd77::5 > /dev/null
identity() { /bin/ip -o address show dev lo | grep -cE '10.77.0.5|fd77::5|fd53:7764'; }
# It takes them when networking goes off, when it comes back, or not at all that time.
restored_in_time() { nmcli networking off; sleep 3; nmcli networking on; sleep 3; restored; }
restored() { journalctl --unit sandwire | grep -q 'taken addresses of an identity' && echo yes || echo no; }
say identity-taken "$(until_it_says loopback '100 (connected (externally))')"
nmcli networking off
say off "$(until_it_says damaged yes)"
nmcli networking on
say identity-off "$(until_it_says restored_in_time yes)"
say identity-back "$(until_it_says identity 3)"
say back "$(until_it_says addresses 4)"

cp /10-sandwire.conf /etc/NetworkManager/conf.d/
systemctl reload NetworkManager
say left-alone "$(until_it_says all_unmanaged 0)"
say doctor-after "$(doctor)"
# It may take the addresses along as it lets go of the interface.
sleep 5
say again "$(until_it_says addresses 4)"
before=$(damage)
nmcli networking off
sleep 5
say kept "$(addresses)"
say kept-before "$(($(damage) - before))"
nmcli networking on

systemctl stop NetworkManager
say making "$(until_it_says mended yes)"
# A VMM goes: the interface's carrier goes, and comes with the next one.
kill %1
sandwire exec one -- sleep 300 &
say put-right "$(until_it_says making 0)"
say own "$(own)"
say slot "$(sandwire --json show one | tr -d ' \n' | grep -o '"used":"[a-z]*"')"
journalctl --no-pager --unit sandwire --lines 60
say done yes
sync
busybox poweroff -f
"#;

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn network_manager_leaves_sandboxes_alone_and_what_it_does_all_the_same_is_put_right() {
    let image = Image::with_network_manager().unwrap();
    lab::run_within(Duration::from_secs(960), |lab| {
        let after = "sandwire.service NetworkManager.service";
        let mut additions = systemd::host(lab.folder(), SANDWIRE, after, CHECK).unwrap();
        additions.extend([
            Addition::text("/etc/NetworkManager/NetworkManager.conf", NETWORK_MANAGER),
            Addition::text("/10-sandwire.conf", CONFIG),
        ]);
        let arguments = "systemd.wants=NetworkManager.service systemd.wants=sandwire.service systemd.wants=check.service";
        let patience = Duration::from_secs(900);
        let console = image
            .run(lab.folder(), &additions, arguments, patience)
            .unwrap();
        println!("{console}");
        let seen = checks(&console);
        let check = |name: &str| seen.get(name).map_or("(nothing)", String::as_str);
        assert_eq!(check("active"), "active");
        assert_eq!(check("taken"), "100 (connected (externally))");
        assert!(check("doctor").ends_with("among 1"), "{}", check("doctor"));
        assert_eq!(check("before"), "4");
        assert_eq!(check("identity-taken"), "100 (connected (externally))");
        assert_eq!(check("off"), "yes", "it takes no addresses");
        assert_eq!(check("back"), "4");
        assert_eq!(check("identity-off"), "yes", "it takes none of identities");
        assert_eq!(check("identity-back"), "3");
        assert_eq!(check("left-alone"), "0");
        assert_eq!(check("doctor-after"), "");
        assert_eq!(check("again"), "4");
        assert_eq!((check("kept"), check("kept-before")), ("4", "0"));
        assert_eq!(
            check("making"),
            "yes",
            "it has the kernel make no addresses"
        );
        assert_eq!(check("put-right"), "0");
        assert_eq!(check("own"), "0");
        assert_eq!(check("slot"), "\"used\":\"attached\"");
        assert_eq!(check("done"), "yes");
    });
}
