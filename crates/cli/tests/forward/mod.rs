//! What is to be forwarded between, and forwarders of every kind.

#![allow(dead_code, reason = "each test executable uses the part that it needs")]

use std::process::{Command, Stdio};

use sandwire_testlab::{lab::Lab, namespace::Namespace, sandwire};

/// Two hosts, `a` and `b`, and between them only the two ends `va` and `vb` in the lab's own namespace.
pub(crate) fn two_hosts(lab: &Lab) -> [Namespace; 2] {
    let hosts = ["a", "b"].map(|name| lab.namespace(name));
    lab.shell(
        "for host in a b; do\n\
           ip link add v$host type veth peer name eth0 netns $host\n\
           ip link set v$host up\n\
           ip -n $host link set eth0 up\n\
         done\n\
         sysctl -qw net.ipv6.conf.va.disable_ipv6=1 net.ipv6.conf.vb.disable_ipv6=1\n\
         ip -n a addr add 10.9.0.1/24 dev eth0; ip -n a addr add fd09::1/64 dev eth0 nodad\n\
         ip -n b addr add 10.9.0.2/24 dev eth0; ip -n b addr add fd09::2/64 dev eth0 nodad",
    );
    hosts
}

/// Has something done while a forwarder runs, by each edge in turn, and what that reports at its end looked at.
pub(crate) fn by_every_edge(
    lab: &Lab,
    hosts: &[Namespace; 2],
    work: impl Fn(),
    look: impl Fn(&str, &str),
) {
    for edge in ["raw", "ring", "xdp"] {
        let forwarder = Command::new(sandwire::executable().unwrap())
            .args(["forward", "va", "vb", "--edge", edge, "--ab", "delay 1ms"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Until there is an answer.
        hosts[0].run("ping -n -q -c 1 -w 60 10.9.0.2").unwrap();
        work();
        lab.run(&format!("kill -INT {}", forwarder.id()));
        let ended = forwarder.wait_with_output().unwrap();
        look(edge, &String::from_utf8(ended.stdout).unwrap());
    }
}
