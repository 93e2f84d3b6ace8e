//! The host that the scene describes, made of veth pairs in the lab.

use std::{fs, net::IpAddr};

use sandwire_testlab::lab::Lab;

use crate::{
    generator::scene::{self, INTERFACES, MARK, ROUTERS, ROUTES, TABLE, To},
    model::{
        Mac,
        world::{TABLE_LOCAL, TABLE_MAIN},
    },
};

/// Number of the interface that plays the host end of entry 0.
pub(crate) const HOST_END: u32 = 1000;

/// Makes interfaces, addresses, routes, neighbours and rules, and says the interfaces' numbers.
pub(crate) fn set_up(lab: &Lab) -> [u32; 5] {
    lab.shell("mountpoint -q /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf");
    for (path, value) in [
        ("ipv4/ip_forward", "1"),
        ("ipv6/conf/all/forwarding", "1"),
        ("ipv6/conf/default/accept_dad", "0"),
    ] {
        fs::write(format!("/proc/sys/net/{path}"), value).expect("sysctl of the lab");
    }
    let mut script = format!(
        "ip link add end0 index {HOST_END} type veth peer name end0-peer\n\
         ip link set end0-peer up\nip link set end0 up\n"
    );
    for (number, (name, mac, mtu)) in INTERFACES.iter().enumerate() {
        script += &format!(
            "ip link add {name} address {} mtu {mtu} type veth peer name {name}-peer\n\
             ip link set {name}-peer up\nip link set {name} up\n",
            colons(*mac)
        );
        if number == 4 {
            continue;
        }
        for version in [4, 6] {
            let router = scene::router(version, number);
            script += &format!(
                "ip address add {}/{} dev {name} {}\n\
                 ip neighbour add {router} lladdr {} dev {name} nud permanent\n",
                own_address(router),
                if version == 4 { 24 } else { 64 },
                if version == 4 { "" } else { "nodad" },
                colons(ROUTERS[number])
            );
        }
    }
    for version in [4, 6] {
        script += &format!(
            "ip neighbour add {} lladdr {} dev up0 nud permanent\n",
            scene::outside(version, 3),
            colons(ROUTERS[0])
        );
    }
    // As the kernel does once something is sent there.
    script += &format!(
        "ip neighbour add {} lladdr {} dev up1 nud noarp\n",
        scene::outside(4, scene::ALL + 1),
        colons([0xff; 6])
    );
    script += &routes();
    script += &format!(
        "ip rule add fwmark {MARK} table {TABLE}\nip -6 rule add fwmark {MARK} table {TABLE}\n"
    );
    lab.shell(&script);
    INTERFACES.map(|(name, ..)| {
        let path = format!("/sys/class/net/{name}/ifindex");
        let text = fs::read_to_string(path).expect("the interface is there");
        text.trim().parse().expect("a number")
    })
}

/// The host's own address beside a router.
fn own_address(router: IpAddr) -> IpAddr {
    match router {
        IpAddr::V4(address) => {
            let [a, b, c, _] = address.octets();
            IpAddr::from([a, b, c, 1])
        }
        IpAddr::V6(address) => {
            let mut segments = address.segments();
            segments[7] = 1;
            IpAddr::from(segments)
        }
    }
}

fn routes() -> String {
    let mut script = String::new();
    for (table, net, to) in ROUTES {
        let version = if net.contains(':') { 6 } else { 4 };
        let words = match to {
            // The kernel makes these with the addresses.
            To::Local => continue,
            To::Link(number) if number < 4 && table == TABLE_MAIN => continue,
            To::Link(number) => format!("{net} dev {}", INTERFACES[number].0),
            To::Router(number) => {
                let router = scene::router(version, number);
                format!("{net} via {router} dev {}", INTERFACES[number].0)
            }
            To::Refused(kind) => format!("{kind} {net}"),
        };
        assert_ne!(table, TABLE_LOCAL, "only addresses go there");
        script += &format!("ip -{version} route add {words} table {table}\n");
    }
    script
}

fn colons(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
